//! Frames: what lies in a slot.
//!
//! ```text
//! offset  size  field
//!      0     4  magic "QRYF"
//!      4     2  format (1)
//!      6     2  header length: 64 + key length, rounded up to a multiple of 64
//!      8     4  namespace id
//!     12     2  key length
//!     14     1  kind (0 value, 1 page of an object, 2 manifest of an object)
//!     15     1  flags (0; kept for encryption)
//!     16     8  payload length
//!     24     8  version: hybrid clock
//!     32    16  version: writer id
//!     48     4  CRC-32C of the payload
//!     52     8  reserved, zero
//!     60     4  CRC-32C of the header with this field zero, key and padding included
//!     64     n  key, then zeros up to the header length
//! ```
//! All numbers are little-endian; the payload follows contiguously. A reader checks the header against what it asked for and the payload
//! against the CRC that the holder signed (*No wrong value*).

use crate::{
    canonical::{DecodeError, Reader},
    ids::{NamespaceId, WriterId},
    key::Key,
    limits::{FRAME_ALIGN, KEY_BYTES_MAX},
    units::SlotSize,
    version::{HybridClock, Version},
};
use serde::{Deserialize, Serialize};

/// Bytes of a header without its key.
pub const FIXED_BYTES: usize = 64;
/// Longest header.
pub const HEADER_BYTES_MAX: usize = header_bytes(KEY_BYTES_MAX);
const MAGIC: [u8; 4] = *b"QRYF";
const FORMAT: u16 = 1;
const HEADER_CRC_AT: usize = 60;

const _: () = assert!(FIXED_BYTES.is_multiple_of(FRAME_ALIGN));
// The header length must fit its field of two bytes.
const _: () = assert!(HEADER_BYTES_MAX <= u16::MAX as usize);

/// Bytes of the header of a frame whose key has `key_bytes` bytes.
#[must_use]
pub const fn header_bytes(key_bytes: usize) -> usize {
    (FIXED_BYTES + key_bytes).next_multiple_of(FRAME_ALIGN)
}

/// The smallest slot for a payload of `payload_bytes` under a key of `key_bytes`, if a slot can be that large.
#[must_use]
pub fn slot_size(key_bytes: usize, payload_bytes: u64) -> Option<SlotSize> {
    let bytes =
        payload_bytes.checked_add(header_bytes(key_bytes) as u64)?.checked_next_multiple_of(FRAME_ALIGN as u64)?;
    u32::try_from(bytes).ok().map(SlotSize)
}

/// What a frame carries.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub enum FrameKind {
    /// A whole value.
    #[default]
    Value,
    /// One page of an object.
    Page,
    /// The manifest of an object.
    Manifest,
}

impl FrameKind {
    /// The byte that stands for it.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Value => 0,
            Self::Page => 1,
            Self::Manifest => 2,
        }
    }
    /// The kind that `code` stands for.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Value),
            1 => Some(Self::Page),
            2 => Some(Self::Manifest),
            _ => None,
        }
    }
}

/// The header of a frame.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FrameHeader {
    /// Namespace of the key.
    pub namespace: NamespaceId,
    /// The key.
    pub key: Key,
    /// Which write of the key.
    pub version: Version,
    /// What the payload is.
    pub kind: FrameKind,
    /// Bytes of payload that follow the header.
    pub payload_bytes: u64,
    /// CRC-32C of the payload.
    pub payload_crc: u32,
}

/// Why bytes are not the header of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FrameError {
    /// The first bytes are not those of a frame.
    #[error("no frame starts here: the first bytes are {found:02x?}, not \"QRYF\"")]
    Magic {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// A format that this build does not read.
    #[error("frame format {found} is not the supported format {FORMAT}")]
    Format {
        /// The format number.
        found: u16,
    },
    /// The header does not match its own checksum.
    #[error("the frame header is damaged: its CRC-32C is {found:#010x}, its bytes give {computed:#010x}")]
    HeaderCrc {
        /// In the header.
        found: u32,
        /// Over the header.
        computed: u32,
    },
    /// A field has an impossible value, or the header is cut short.
    #[error(transparent)]
    Layout(#[from] DecodeError),
}

impl FrameHeader {
    /// Bytes of this header.
    #[must_use]
    pub fn bytes(&self) -> usize {
        header_bytes(self.key.as_bytes().len())
    }

    /// Writes the header at the start of `out`.
    ///
    /// # Panics
    /// If `out` is shorter than [`FrameHeader::bytes`].
    pub fn write_to(&self, out: &mut [u8]) {
        let bytes = self.bytes();
        let key = self.key.as_bytes();
        let out = &mut out[..bytes];
        out.fill(0);
        out[0..4].copy_from_slice(&MAGIC);
        out[4..6].copy_from_slice(&FORMAT.to_le_bytes());
        out[6..8].copy_from_slice(&u16::try_from(bytes).expect("HEADER_BYTES_MAX fits").to_le_bytes());
        out[8..12].copy_from_slice(&self.namespace.0.to_le_bytes());
        out[12..14].copy_from_slice(&u16::try_from(key.len()).expect("KEY_BYTES_MAX fits").to_le_bytes());
        out[14] = self.kind.code();
        out[16..24].copy_from_slice(&self.payload_bytes.to_le_bytes());
        out[24..32].copy_from_slice(&self.version.clock.0.to_le_bytes());
        out[32..48].copy_from_slice(&self.version.writer.0);
        out[48..52].copy_from_slice(&self.payload_crc.to_le_bytes());
        out[FIXED_BYTES..FIXED_BYTES + key.len()].copy_from_slice(key);
        let crc = crc32c::crc32c(out);
        out[HEADER_CRC_AT..FIXED_BYTES].copy_from_slice(&crc.to_le_bytes());
    }

    /// Reads and checks the header at the start of `bytes`; what follows it is not looked at.
    ///
    /// # Errors
    /// [`FrameError`], for every header that [`FrameHeader::write_to`] would not have written.
    pub fn read_from(bytes: &[u8]) -> Result<Self, FrameError> {
        const WHAT: &str = "frame header";
        let mut fixed = Reader::new(WHAT, bytes);
        let magic = fixed.array::<4>()?;
        if magic != MAGIC {
            return Err(FrameError::Magic { found: magic });
        }
        let format = fixed.u16()?;
        if format != FORMAT {
            return Err(FrameError::Format { found: format });
        }
        let length = usize::from(fixed.u16()?);
        if !(FIXED_BYTES..=HEADER_BYTES_MAX).contains(&length) || !length.is_multiple_of(FRAME_ALIGN) {
            return Err(fixed.field("header length", length as u64).into());
        }
        let header = Reader::new(WHAT, bytes).bytes(length)?;
        let mut crc_bytes = [0; 4];
        crc_bytes.copy_from_slice(&header[HEADER_CRC_AT..FIXED_BYTES]);
        let found = u32::from_le_bytes(crc_bytes);
        let head = crc32c::crc32c_append(crc32c::crc32c(&header[..HEADER_CRC_AT]), &[0; 4]);
        let computed = crc32c::crc32c_append(head, &header[FIXED_BYTES..]);
        if found != computed {
            return Err(FrameError::HeaderCrc { found, computed });
        }
        let namespace = NamespaceId(fixed.u32()?);
        let key_bytes = fixed.u16()?;
        let kind = fixed.u8()?;
        let kind = FrameKind::from_code(kind).ok_or_else(|| fixed.field("kind", u64::from(kind)))?;
        fixed.zeros("flags", 1)?;
        let payload_bytes = fixed.u64()?;
        let version = Version { clock: HybridClock(fixed.u64()?), writer: WriterId(fixed.array()?) };
        let payload_crc = fixed.u32()?;
        fixed.zeros("reserved", 8)?;
        let mut tail = Reader::new(WHAT, &header[FIXED_BYTES..]);
        let key = Key::new(tail.bytes(usize::from(key_bytes))?)
            .map_err(|wrong| tail.field("key length", wrong.found as u64))?;
        if header_bytes(key.as_bytes().len()) != length {
            return Err(tail.field("header length", length as u64).into());
        }
        tail.zeros("padding", length - FIXED_BYTES - usize::from(key_bytes))?;
        Ok(Self { namespace, key, version, kind, payload_bytes, payload_crc })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(key: &[u8]) -> FrameHeader {
        FrameHeader {
            namespace: NamespaceId(3),
            key: Key::new(key).unwrap(),
            version: Version { clock: HybridClock(77), writer: WriterId([9; 16]) },
            kind: FrameKind::Value,
            payload_bytes: 65_536,
            payload_crc: 0xdead_beef,
        }
    }
    fn written(header: &FrameHeader) -> Vec<u8> {
        let mut bytes = vec![0xff; header.bytes() + 5];
        header.write_to(&mut bytes);
        bytes.truncate(header.bytes());
        bytes
    }

    #[test]
    fn every_flipped_bit_of_a_header_is_refused() {
        for key in [&b"k"[..], &[b'x'; 65], &[0; KEY_BYTES_MAX]] {
            let good = written(&header(key));
            for bit in 0..good.len() * 8 {
                let mut bad = good.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert!(FrameHeader::read_from(&bad).is_err(), "bit {bit} flipped and still accepted");
            }
        }
    }

    #[test]
    fn every_truncation_of_a_header_is_refused() {
        let good = written(&header(b"some key"));
        for end in 0..good.len() {
            assert!(FrameHeader::read_from(&good[..end]).is_err());
        }
    }

    #[test]
    fn a_slot_holds_header_and_payload_in_a_multiple_of_64() {
        assert_eq!(slot_size(1, 0), Some(SlotSize(128)));
        assert_eq!(slot_size(64, 65_536), Some(SlotSize(65_536 + 128)));
        assert_eq!(slot_size(65, 1), Some(SlotSize(192 + 64)));
        assert_eq!(slot_size(1, u64::MAX), None);
    }

    #[test]
    fn the_layout_is_the_one_drawn_above() {
        let bytes = written(&header(b"key"));
        assert_eq!(&bytes[..8], b"QRYF\x01\x00\x80\x00");
        assert_eq!(&bytes[64..68], b"key\0");
        assert_eq!(bytes.len(), 128);
    }

    proptest! {
        #[test]
        fn a_header_round_trips(key in prop::collection::vec(any::<u8>(), 1..=KEY_BYTES_MAX), namespace: u32, clock: u64, writer: [u8; 16], payload_bytes: u64, payload_crc: u32, kind in 0u8..3) {
            let header = FrameHeader {
                namespace: NamespaceId(namespace), key: Key::new(key).unwrap(),
                version: Version { clock: HybridClock(clock), writer: WriterId(writer) },
                kind: FrameKind::from_code(kind).unwrap(), payload_bytes, payload_crc,
            };
            prop_assert_eq!(FrameHeader::read_from(&written(&header)).unwrap(), header);
        }
    }
}
