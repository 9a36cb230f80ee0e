//! Region records: where a data node's memory can be reached, and under which read key.
//!
//! ```text
//! body = node (8) ‖ region index (4) ‖ incarnation: generation (4), number (8) ‖ epoch (8) ‖ length (8) ‖ base (8) ‖ read key (8)
//!      ‖ provider name (16, zero padded) ‖ address length (1) ‖ fabric address (64, zero padded)
//! ```
//! A descriptor names an incarnation; the record of the same incarnation with the highest epoch says how to read it.

use crate::{
    canonical::{DecodeError, Reader, Writer},
    ids::{Generation, Incarnation, NodeId, RegionEpoch, RegionId, RegionIndex},
    limits::{FABRIC_ADDRESS_BYTES_MAX, PROVIDER_NAME_BYTES_MAX, REGION_BYTES_MAX},
    signed::{Statement, StatementKind},
};
use serde::{Deserialize, Serialize};

/// The raw address of a libfabric endpoint: at most 64 bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "Vec<u8>")]
pub struct FabricName(Vec<u8>);

/// Why bytes are not a fabric name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a fabric address has 1 to {FABRIC_ADDRESS_BYTES_MAX} bytes, this one has {found}")]
pub struct FabricNameError {
    /// How many bytes there were.
    pub found: usize,
}

impl FabricName {
    /// Takes 1 to 64 bytes.
    ///
    /// # Errors
    /// [`FabricNameError`] for any other length.
    pub fn new(bytes: &[u8]) -> Result<Self, FabricNameError> {
        if bytes.is_empty() || bytes.len() > FABRIC_ADDRESS_BYTES_MAX {
            return Err(FabricNameError { found: bytes.len() });
        }
        Ok(Self(bytes.to_vec()))
    }
    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl TryFrom<Vec<u8>> for FabricName {
    type Error = FabricNameError;
    fn try_from(bytes: Vec<u8>) -> Result<Self, FabricNameError> {
        Self::new(&bytes)
    }
}

/// A data node says: my region is here.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RegionRecord {
    /// The region.
    pub region: RegionId,
    /// Its life.
    pub incarnation: Incarnation,
    /// Which registration in that life.
    pub epoch: RegionEpoch,
    /// Its length in bytes.
    pub length: u64,
    /// What is added to an offset to make a remote address.
    pub base: u64,
    /// The key that a read must carry.
    pub read_key: u64,
    /// The libfabric provider to use, such as `tcp`.
    pub provider: String,
    /// The endpoint that serves reads.
    pub address: FabricName,
}

impl Statement for RegionRecord {
    const KIND: StatementKind = StatementKind::RegionRecord;
    const NAME: &'static str = "region record";
    fn signer(&self) -> Option<NodeId> {
        Some(self.region.node)
    }
    fn write(&self, out: &mut Writer) {
        out.u64(self.region.node.0);
        out.u32(self.region.index.0);
        out.u32(self.incarnation.0.generation.0);
        out.u64(self.incarnation.0.number);
        out.u64(self.epoch.0);
        out.u64(self.length);
        out.u64(self.base);
        out.u64(self.read_key);
        let mut provider = [0; PROVIDER_NAME_BYTES_MAX];
        // A longer name is cut here, and so fails its signature: no reader produces one.
        for (to, from) in provider.iter_mut().zip(self.provider.as_bytes()) {
            *to = *from;
        }
        out.bytes(&provider);
        let mut address = [0; FABRIC_ADDRESS_BYTES_MAX];
        address[..self.address.0.len()].copy_from_slice(&self.address.0);
        out.u8(u8::try_from(self.address.0.len()).expect("FABRIC_ADDRESS_BYTES_MAX fits in a u8"));
        out.bytes(&address);
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let region = RegionId { node: NodeId(from.u64()?), index: RegionIndex(from.u32()?) };
        let incarnation = Incarnation::new(Generation(from.u32()?), from.u64()?);
        let epoch = RegionEpoch(from.u64()?);
        let length = from.u64()?;
        if length == 0 || length > REGION_BYTES_MAX {
            return Err(from.field("length", length));
        }
        let base = from.u64()?;
        if base.checked_add(length).is_none() {
            return Err(from.field("base", base));
        }
        let read_key = from.u64()?;
        let name = from.array::<PROVIDER_NAME_BYTES_MAX>()?;
        let used = name.iter().position(|byte| *byte == 0).unwrap_or(PROVIDER_NAME_BYTES_MAX);
        let printable =
            used > 0 && name[..used].iter().all(u8::is_ascii_graphic) && name[used..].iter().all(|byte| *byte == 0);
        let provider = std::str::from_utf8(&name[..used])
            .ok()
            .filter(|_| printable)
            .ok_or_else(|| from.field("provider", used as u64))?;
        let address_bytes = usize::from(from.u8()?);
        let padded = from.array::<FABRIC_ADDRESS_BYTES_MAX>()?;
        let address = padded
            .get(..address_bytes)
            .filter(|_| padded[address_bytes..].iter().all(|byte| *byte == 0))
            .and_then(|used| FabricName::new(used).ok())
            .ok_or_else(|| from.field("address length", address_bytes as u64))?;
        Ok(Self { region, incarnation, epoch, length, base, read_key, provider: provider.to_owned(), address })
    }
}
