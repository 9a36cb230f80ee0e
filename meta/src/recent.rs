//! Which values were leased lately: a hint of fixed size, for those who would rather not lose them.
//!
//! A value has one place in a table, by hash of where it is written down; another value with the same place pushes it out. So what was leased
//! may be forgotten, and nothing is taken for leased that was not, but for one value in 2^32. Made when the first lease is given: only leaders
//! have one.

use quarry_wire::{
    ids::{GrantId, SlotIndex},
    units::LogTime,
};
use std::{
    iter,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// Places of the table; 8 bytes each.
const PLACES: usize = 1 << 15;
/// Log time is kept in steps of 2^7 ms.
const STEP: u32 = 7;

/// The table.
#[derive(Default)]
pub(crate) struct Recent(OnceLock<Box<[AtomicU64]>>);

impl Recent {
    /// A descriptor of this value is given with a lease at `at`. One store.
    pub(crate) fn touch(&self, grant: GrantId, slot: SlotIndex, at: LogTime) {
        let table = self.0.get_or_init(|| iter::repeat_with(AtomicU64::default).take(PLACES).collect());
        let (place, tag) = place(grant, slot);
        table[place].store(tag << 32 | step(at), Ordering::Relaxed);
    }

    /// Whether one was given within `span` before `now`, as far as is known.
    pub(crate) fn was_leased(&self, grant: GrantId, slot: SlotIndex, now: LogTime, span: Duration) -> bool {
        let Some(table) = self.0.get() else { return false };
        let (place, tag) = place(grant, slot);
        let found = table[place].load(Ordering::Relaxed);
        let since = step(LogTime(now.0.saturating_sub(quarry_wire::units::millis(span))));
        found != 0 && found >> 32 == tag && found & u64::from(u32::MAX) >= since
    }
}

const fn step(at: LogTime) -> u64 {
    (at.0 >> STEP) & u32::MAX as u64
}

/// Its place in the table, and 32 bits that tell it from others there.
fn place(grant: GrantId, slot: SlotIndex) -> (usize, u64) {
    // The finalizer of splitmix64 over what names the value.
    let named = grant.sequence.number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(slot.0) << 32;
    let mut mixed = named ^ u64::from(grant.sequence.generation.0) << 17 ^ u64::from(grant.shard.0);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    let place = usize::try_from(mixed % PLACES as u64).expect("less than the places");
    (place, mixed >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_wire::ids::{Generation, Ordinal, ShardId};

    fn grant(number: u64) -> GrantId {
        GrantId { shard: ShardId(1), sequence: Ordinal { generation: Generation(1), number } }
    }

    #[test]
    fn what_was_leased_lately_is_known_for_a_while_and_nothing_else_is() {
        let recent = Recent::default();
        let (now, span) = (LogTime(1_000_000), Duration::from_secs(10));
        assert!(!recent.was_leased(grant(1), SlotIndex(0), now, span));
        for slot in 0..100 {
            recent.touch(grant(7), SlotIndex(slot), now);
        }
        let known = |number: u64, at: u64| {
            (0..100).filter(|slot| recent.was_leased(grant(number), SlotIndex(*slot), LogTime(at), span)).count()
        };
        assert!(known(7, now.0) >= 98, "few push each other out: {}", known(7, now.0));
        assert_eq!(known(7, now.0 + 9_000), known(7, now.0));
        assert_eq!((known(7, now.0 + 10_200), known(6, now.0), known(8, now.0)), (0, 0, 0));
    }
}
