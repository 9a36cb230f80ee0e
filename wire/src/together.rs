//! Signatures checked together: one equation for all, in about six tenths of the time that they take one by one ([`ed25519_dalek::verify_batch`]).
//!
//! As when each is checked alone, s must be reduced, and R must be a point in its one encoding that is not of small order; the batch check leaves
//! the last two to its caller. Keys of small order are no [`crate::signed::PublicKey`]s that anything is checked with.
//!
//! One thing differs. A point may have a part of small order, and such parts of several signatures can cancel in the sum, so what passes here
//! may fail alone. Only who has the secret key can make such a signature: it is a word of the node that it names as any other, and proves as
//! much. Who checks it alone later, as readers do, refuses that node's copy as one that is damaged, which that node could have had more simply.

use curve25519_dalek::constants::EIGHT_TORSION;
use ed25519_dalek::{Signature, Verifier as _, VerifyingKey, verify_batch};
use std::sync::LazyLock;

/// The encodings of the points of small order; two of them are taken with the sign of a coordinate that has none, too.
static SMALL_ORDER: LazyLock<[[u8; 32]; 10]> = LazyLock::new(|| {
    let mut encodings = [[0; 32]; 10];
    let (points, signed) = encodings.split_at_mut(8);
    points.copy_from_slice(&EIGHT_TORSION.map(|point| point.compress().0));
    // (0, 1) and (0, -1), with a sign of the 0.
    for (encoding, of) in signed.iter_mut().zip([points[0], points[4]]) {
        *encoding = of;
        encoding[31] |= 0x80;
    }
    encodings
});

/// A signature, and what it is said to be of.
pub(crate) struct Claim<'a> {
    pub(crate) key: &'a VerifyingKey,
    pub(crate) message: Vec<u8>,
    pub(crate) signature: Signature,
}

impl Claim<'_> {
    /// Whether the key made this signature of the message. Strict: refuses weak keys and malleable signatures.
    ///
    /// What `verify_strict` accepts and nothing else, without decoding R: the plain check compares its bytes with the one encoding that it must
    /// have, so that its order can be told by them.
    pub(crate) fn is_good(&self) -> bool {
        !self.key.is_weak()
            && !SMALL_ORDER.contains(self.signature.r_bytes())
            && self.key.verify(&self.message, &self.signature).is_ok()
    }
}

/// Whether all of these are good. One that is not spoils all: then each is to be looked at alone.
pub(crate) fn are_good(claims: &[Claim<'_>]) -> bool {
    if let [one] = claims {
        return one.is_good();
    }
    let has_odd_point = |claim: &Claim<'_>| {
        let r = claim.signature.r_bytes();
        claim.key.is_weak() || SMALL_ORDER.contains(r) || !is_reduced(r)
    };
    if claims.iter().any(has_odd_point) {
        return false;
    }
    let messages: Vec<&[u8]> = claims.iter().map(|claim| claim.message.as_slice()).collect();
    let signatures: Vec<Signature> = claims.iter().map(|claim| claim.signature).collect();
    let keys: Vec<VerifyingKey> = claims.iter().map(|claim| *claim.key).collect();
    verify_batch(&messages, &signatures, &keys).is_ok()
}

/// Whether the coordinate in an encoding of a point is below 2²⁵⁵ − 19: above it, a point would have another encoding.
fn is_reduced(encoding: &[u8; 32]) -> bool {
    encoding[0] < 237 || encoding[31] & 0x7f != 0x7f || encoding[1..31].iter().any(|byte| *byte != 0xff)
}

#[cfg(test)]
mod tests {
    use super::*;
    use curve25519_dalek::{EdwardsPoint, Scalar};
    use ed25519_dalek::{Signer as _, SigningKey};
    use proptest::prelude::*;
    use sha2::{Digest as _, Sha512};

    fn key(seed: u8) -> SigningKey {
        SigningKey::from_bytes(&[seed; 32])
    }

    /// Signatures of as many keys as there are different seeds, each of a message of its own.
    fn signed(seeds: &[u8]) -> Vec<(VerifyingKey, Vec<u8>, Signature)> {
        let one = |(place, seed): (usize, &u8)| {
            let message = format!("message {place}").into_bytes();
            (key(*seed).verifying_key(), message.clone(), key(*seed).sign(&message))
        };
        seeds.iter().enumerate().map(one).collect()
    }

    fn claims(signed: &[(VerifyingKey, Vec<u8>, Signature)]) -> Vec<Claim<'_>> {
        let claims = signed.iter().map(|(key, message, signature)| Claim {
            key,
            message: message.clone(),
            signature: *signature,
        });
        claims.collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn what_is_good_alone_is_good_together_and_one_flipped_bit_spoils_all(
            seeds in prop::collection::vec(1_u8..4, 2..6),
            bad in any::<prop::sample::Index>(),
            bit in 0_usize..512,
        ) {
            let mut all = signed(&seeds);
            prop_assert!(claims(&all).iter().all(Claim::is_good));
            prop_assert!(are_good(&claims(&all)));
            let bad = bad.index(all.len());
            let mut bytes = all[bad].2.to_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            all[bad].2 = Signature::from_bytes(&bytes);
            prop_assert!(!are_good(&claims(&all)));
            let good: Vec<bool> = claims(&all).iter().map(Claim::is_good).collect();
            prop_assert_eq!(good, (0..all.len()).map(|place| place != bad).collect::<Vec<_>>());
        }
    }

    #[test]
    fn signatures_that_changed_places_are_not_good() {
        let mut all = signed(&[1, 1, 2]);
        let (first, second) = (all[0].2, all[1].2);
        (all[0].2, all[1].2) = (second, first);
        assert!(!are_good(&claims(&all)));
    }

    #[test]
    fn a_point_of_small_order_a_second_encoding_and_a_number_that_is_not_reduced_are_refused_alone_and_together() {
        // With a key of small order anything could be "signed": R = s·B − k·A for s = 0 is then of small order too.
        let order: [u8; 32] = [
            0xed, 0xd3, 0xf5, 0x5c, 0x1a, 0x63, 0x12, 0x58, 0xd6, 0x9c, 0xf7, 0xa2, 0xde, 0xf9, 0xde, 0x14, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10,
        ];
        let good = signed(&[1, 2]);
        for small in *SMALL_ORDER {
            let mut all = good.clone();
            all[0].2 = Signature::from_components(small, [0; 32]);
            assert!(!claims(&all)[0].is_good() && !are_good(&claims(&all)));
            if let Ok(weak) = VerifyingKey::from_bytes(&small) {
                all[0].0 = weak;
                assert!(!claims(&all)[0].is_good() && !are_good(&claims(&all)));
            }
        }
        // s and s + the order of the group are the same number.
        let mut all = good.clone();
        let (mut s, mut carry) = (*all[0].2.s_bytes(), 0_u16);
        for (byte, more) in s.iter_mut().zip(order) {
            let sum = u16::from(*byte) + u16::from(more) + carry;
            (*byte, carry) = (sum.to_le_bytes()[0], sum >> 8);
        }
        all[0].2 = Signature::from_components(*all[0].2.r_bytes(), s);
        assert!(!claims(&all)[0].is_good() && !are_good(&claims(&all)));

        let mut largest = [0xff; 32];
        (largest[0], largest[31]) = (236, 0x7f);
        assert!(is_reduced(&largest));
        largest[0] = 237;
        assert!(!is_reduced(&largest));
        largest[31] = 0xff;
        assert!(!is_reduced(&largest));
        largest[7] = 0;
        assert!(is_reduced(&largest));
    }

    #[test]
    fn parts_of_small_order_are_all_that_passes_together_and_not_alone() {
        // Made with the secret key: R has a part of small order, s fits the rest of it.
        let (secret, message) = (key(1), b"odd".to_vec());
        let public = secret.verifying_key();
        let nonce = Scalar::from(77_u64);
        let r = (EdwardsPoint::mul_base(&nonce) + EIGHT_TORSION[4]).compress();
        let hash: [u8; 64] =
            Sha512::new().chain_update(r.0).chain_update(public.as_bytes()).chain_update(&message).finalize().into();
        let s = nonce + Scalar::from_bytes_mod_order_wide(&hash) * secret.to_scalar();
        let odd = (public, message, Signature::from_components(r.0, s.to_bytes()));
        assert!(!claims(std::slice::from_ref(&odd))[0].is_good());
        let mut passed = 0;
        for seed in 1..40 {
            let all = [signed(&[seed]).remove(0), odd.clone()];
            passed += usize::from(are_good(&claims(&all)));
        }
        assert!((1..39).contains(&passed), "half of the time, by an even factor: {passed}");
    }
}
