//! CRC-32C of payloads, in the frames that are written and in those that are read.
//!
//! Decides how the bytes are walked through, not what the sum means (`quarry-wire` says where it is kept). Payloads are the only bytes that
//! are looked at one by one, so it is done in one pass, also where they are copied.

use crc_fast::{CrcAlgorithm, Digest};

/// Copied so many bytes at a time: they are still in the processor's first cache when they are read again.
const PIECE_BYTES: usize = 16 << 10;

/// The checksum of `bytes`.
pub(crate) fn of(bytes: &[u8]) -> u32 {
    narrow(crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes))
}

/// Copies `from` to `to`, which has the same length, and answers its checksum.
pub(crate) fn copied(from: &[u8], to: &mut [u8]) -> u32 {
    assert_eq!(from.len(), to.len(), "a copy is as long as what is copied");
    if from.len() <= PIECE_BYTES {
        to.copy_from_slice(from);
        return of(from);
    }
    let mut sum = Digest::new(CrcAlgorithm::Crc32Iscsi);
    for (from, to) in from.chunks(PIECE_BYTES).zip(to.chunks_mut(PIECE_BYTES)) {
        sum.update(from);
        to.copy_from_slice(from);
    }
    narrow(sum.finalize())
}

fn narrow(sum: u64) -> u32 {
    u32::try_from(sum).expect("a CRC-32 has 32 bits")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_check_value_of_the_standard_comes_out() {
        assert_eq!(of(b"123456789"), 0xe306_9283);
        assert_eq!(of(b""), 0);
    }

    proptest! {
        #[test]
        fn all_ways_give_the_checksum_of_the_other_implementation(
            bytes in proptest::collection::vec(any::<u8>(), 0..3 * PIECE_BYTES),
            start in 0_usize..64,
        ) {
            let bytes = &bytes[start.min(bytes.len())..];
            let mut copy = vec![0; bytes.len()];
            prop_assert_eq!(of(bytes), crc32c::crc32c(bytes));
            prop_assert_eq!(copied(bytes, &mut copy), crc32c::crc32c(bytes));
            prop_assert_eq!(bytes, &copy[..]);
        }
    }
}
