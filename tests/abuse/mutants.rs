//! Mutants of a message: it cut at every length, and with every bit flipped.

use bytes::Bytes;
use quarry_tests::Seed;

/// One mutant, and what was done to it.
#[derive(Clone, Debug)]
pub(crate) struct Mutant {
    pub(crate) what: String,
    pub(crate) bytes: Bytes,
}

/// At most `most` mutants of `message`: all if there are no more, else some that `seed` draws.
pub(crate) fn mutants(message: &[u8], most: usize, seed: &mut Seed) -> Vec<Mutant> {
    let cuts = message.len();
    let all = cuts + 8 * message.len();
    let mut chosen: Vec<usize> = (0..all).collect();
    while chosen.len() > most {
        chosen.swap_remove(seed.below(chosen.len()));
    }
    let mutant = |number: usize| {
        if number < cuts {
            return Mutant { what: format!("cut to {number}"), bytes: Bytes::copy_from_slice(&message[..number]) };
        }
        let bit = number - cuts;
        let mut bytes = message.to_vec();
        bytes[bit / 8] ^= 1 << (bit % 8);
        Mutant { what: format!("bit {} of byte {} flipped", bit % 8, bit / 8), bytes: bytes.into() }
    };
    chosen.into_iter().map(mutant).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_nine_mutants_per_byte_all_different_from_it() {
        let mut seed = Seed::draw();
        let message: Vec<u8> = (0..20).collect();
        let all = mutants(&message, 1_000, &mut seed);
        assert_eq!(all.len(), 180);
        assert!(all.iter().all(|mutant| mutant.bytes != message));
        assert_eq!(mutants(&message, 7, &mut seed).len(), 7);
    }
}
