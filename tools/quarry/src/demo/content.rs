//! What the demo writes: bytes that two processes make alike from a seed, different in every block of every round.

use quarry_client::Key;

/// What a block's contents are made from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Content {
    pub(crate) seed: u64,
    pub(crate) size: usize,
}

impl Content {
    /// The bytes of block `block` of round `round`.
    pub(crate) fn of(self, round: u32, block: u32) -> Vec<u8> {
        // SplitMix64: each block starts at a place of its own in the sequence, spread by the first step.
        let mut state = self.seed ^ mix((u64::from(round) << 32) | u64::from(block));
        let mut bytes = Vec::with_capacity(self.size + 8);
        while bytes.len() < self.size {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            bytes.extend(mix(state).to_le_bytes());
        }
        bytes.truncate(self.size);
        bytes
    }
}

/// The key of a block.
pub(crate) fn key(round: u32, block: u32) -> Key {
    Key::new(format!("round-{round}/block-{block:07}")).expect("some twenty characters are a key")
}

const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_block_of_every_round_and_seed_differs_and_is_made_alike_again() {
        let contents = |seed| {
            let content = Content { seed, size: 100 };
            (1..=2).flat_map(move |round| (0..50).map(move |block| content.of(round, block)))
        };
        let all: BTreeSet<Vec<u8>> = contents(1).chain(contents(2)).collect();
        assert_eq!(all.len(), 200);
        assert!(contents(1).eq(contents(1)));
        assert!(all.iter().all(|bytes| bytes.len() == 100));
    }

    #[test]
    fn keys_differ_by_round_and_block() {
        let keys: BTreeSet<Key> = (1..=3).flat_map(|round| (0..100).map(move |block| key(round, block))).collect();
        assert_eq!(keys.len(), 300);
    }
}
