//! Attestations: a data node's statements about the copies that it holds.
//!
//! ```text
//! leaf       = namespace (4) ‖ kind (1) ‖ version clock (8) ‖ version writer (16) ‖ payload length (8) ‖ payload CRC-32C (4)
//!            ‖ grant: shard (4), generation (4), sequence (8) ‖ lend number: generation (4), number (8) ‖ slot (4)
//!            ‖ region: node (8), index (4) ‖ incarnation: generation (4), number (8)
//!            ‖ placement: 0 resident, 1 journaled (1) ‖ offset (8; zero when journaled) ‖ key length (2) ‖ key
//! batch body = node (8) ‖ leaves (4) ‖ Merkle root over the leaves (32)
//! ```
//! One signature per commit batch: the batch's root is signed, and a descriptor carries its leaf's path. An attestation names no read key:
//! those come from region records, which change with every epoch.

use crate::{
    canonical::{DecodeError, Reader, Writer},
    frame::FrameKind,
    ids::{GrantId, Incarnation, LendNumber, NamespaceId, NodeId, RegionId, SlotIndex, Token},
    key::Key,
    limits::COMMIT_ENTRIES_MAX,
    merkle::{self, Hash},
    signed::{Signed, Statement, StatementKind},
    units::Offset,
    version::Version,
};
use serde::{Deserialize, Serialize};

/// Where a copy is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Placement {
    /// At this offset of the region: readable by the network card.
    Resident(Offset),
    /// Only in the node's journal.
    Journaled,
}

/// A data node says: I hold this copy. It counts only for the grant that it names.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Attestation {
    /// Namespace of the key.
    pub namespace: NamespaceId,
    /// The key.
    pub key: Key,
    /// What the frame carries.
    pub kind: FrameKind,
    /// Which write of the key.
    pub version: Version,
    /// Bytes of payload.
    pub payload_bytes: u64,
    /// CRC-32C of the payload.
    pub payload_crc: u32,
    /// The grant under which it was written.
    pub grant: GrantId,
    /// Lending of the extent that the slab lies in; with the grant's sequence it makes the token.
    pub lend: LendNumber,
    /// Slot of the slab.
    pub slot: SlotIndex,
    /// The region.
    pub region: RegionId,
    /// The region's life.
    pub incarnation: Incarnation,
    /// Resident or journaled.
    pub placement: Placement,
}

impl Attestation {
    /// The token of the grant at this holder.
    #[must_use]
    pub const fn token(&self) -> Token {
        Token { lend: self.lend, sequence: self.grant.sequence.number }
    }

    /// The leaf that stands for it in the batch's tree.
    #[must_use]
    pub fn leaf(&self) -> Hash {
        let mut out = Writer::new();
        let key = self.key.as_bytes();
        out.u32(self.namespace.0);
        out.u8(self.kind.code());
        out.u64(self.version.clock.0);
        out.bytes(&self.version.writer.0);
        out.u64(self.payload_bytes);
        out.u32(self.payload_crc);
        out.u32(self.grant.shard.0);
        out.u32(self.grant.sequence.generation.0);
        out.u64(self.grant.sequence.number);
        out.u32(self.lend.0.generation.0);
        out.u64(self.lend.0.number);
        out.u32(self.slot.0);
        out.u64(self.region.node.0);
        out.u32(self.region.index.0);
        out.u32(self.incarnation.0.generation.0);
        out.u64(self.incarnation.0.number);
        let (placement, offset) = match self.placement {
            Placement::Resident(offset) => (0, offset.0),
            Placement::Journaled => (1, 0),
        };
        out.u8(placement);
        out.u64(offset);
        out.u16(u16::try_from(key.len()).expect("KEY_BYTES_MAX fits in a u16"));
        out.bytes(key);
        merkle::leaf(&out.finish())
    }
}

/// A data node says: I hold the copies under this root.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AttestationBatch {
    /// The node; it must be the signer, and every leaf must be about one of its regions.
    pub node: NodeId,
    /// Leaves in the tree.
    pub leaves: u32,
    /// Root of the tree.
    pub root: Hash,
}

impl AttestationBatch {
    /// The batch of these attestations by `node`, in this order.
    ///
    /// # Panics
    /// If there is none, or more than [`COMMIT_ENTRIES_MAX`].
    #[must_use]
    pub fn of(node: NodeId, leaves: &[Hash]) -> Self {
        assert!(leaves.len() <= COMMIT_ENTRIES_MAX, "a commit batch has at most {COMMIT_ENTRIES_MAX} entries");
        let count = u32::try_from(leaves.len()).expect("COMMIT_ENTRIES_MAX fits in a u32");
        Self { node, leaves: count, root: merkle::root(leaves) }
    }
}

impl Statement for AttestationBatch {
    const KIND: StatementKind = StatementKind::AttestationBatch;
    const NAME: &'static str = "attestation batch";
    fn signer(&self) -> Option<NodeId> {
        Some(self.node)
    }
    fn write(&self, out: &mut Writer) {
        out.u64(self.node.0);
        out.u32(self.leaves);
        out.bytes(&self.root);
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let node = NodeId(from.u64()?);
        let leaves = from.u32()?;
        if leaves == 0 || leaves as usize > COMMIT_ENTRIES_MAX {
            return Err(from.field("leaves", u64::from(leaves)));
        }
        Ok(Self { node, leaves, root: from.array()? })
    }
}

/// An attestation of a copy with its way up to a signed batch root: what a reader is given. It is worth nothing until
/// [`Descriptor::proven_by`] and the batch's signature have been checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// What is claimed.
    pub attestation: Attestation,
    /// Which leaf of the batch.
    pub leaf: u32,
    /// Hashes beside the way up, lowest first.
    pub path: Vec<Hash>,
}

impl Descriptor {
    /// Whether this descriptor is under the root of `batch`, and about the node that signed it. The signature of the batch itself is checked
    /// once per batch by the keyring.
    #[must_use]
    pub fn proven_by(&self, batch: &Signed<AttestationBatch>) -> bool {
        let said = &batch.statement;
        self.attestation.region.node == said.node
            && merkle::climb(&self.attestation.leaf(), self.leaf as usize, said.leaves as usize, &self.path)
                == Some(said.root)
    }
}
