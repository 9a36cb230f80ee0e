//! Seeds: a randomized test draws everything from one number and says which when it fails. `QUARRY_SEED=<number>` runs it again.

/// A small generator (splitmix64) that prints its seed if the test fails.
#[derive(Debug)]
pub struct Seed {
    seed: u64,
    state: u64,
}

impl Seed {
    /// The seed of the environment, else one of the system's.
    ///
    /// # Panics
    /// If `QUARRY_SEED` is no number.
    #[must_use]
    pub fn draw() -> Self {
        let given = std::env::var("QUARRY_SEED").ok();
        let seed = given.map_or_else(random, |text| text.parse().expect("QUARRY_SEED is a decimal number"));
        Self { seed, state: seed }
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    /// A number below `end`.
    ///
    /// # Panics
    /// If `end` is zero.
    pub fn below(&mut self, end: usize) -> usize {
        assert!(end > 0, "nothing is below zero");
        usize::try_from(self.bits() % end as u64).expect("it is below a usize")
    }

    /// That many bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        pattern(self.bits(), length)
    }
}

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("QUARRY_SEED={}", self.seed);
        }
    }
}

/// Bytes that follow from `seed`, all different from place to place.
#[must_use]
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let words = (0..length.div_ceil(8) as u64).map(|place| mix(seed ^ place.wrapping_mul(0xd6e8_feb8_6659_fd93)));
    let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    bytes.truncate(length);
    bytes
}

/// 64 bits of the system's generator.
///
/// # Panics
/// If the system has none.
#[must_use]
pub fn random() -> u64 {
    u64::from_le_bytes(quarry::identity::random().expect("the system has a generator"))
}

fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_bytes_and_another_gives_others() {
        assert_eq!(pattern(7, 100), pattern(7, 100));
        assert_ne!(pattern(7, 100), pattern(8, 100));
        assert_eq!(pattern(7, 13), pattern(7, 100)[..13]);
    }
}
