//! Slots, purely: which size a frame gets, how many a slab should have, and which one is next.
//!
//! Decides the trade between waste and the number of slabs that are open at once: payloads get eight sizes per doubling (so powers of two
//! fit exactly and no payload wastes more than an eighth), those of megabytes get thirty-two (few of them fit in an extent, so that a size
//! rounded up may cost a whole slot of it), the largest fit exactly, and headers get three sizes.

use quarry_wire::{
    frame::{HEADER_BYTES_MAX, header_bytes},
    limits::{EXTENT_BYTES, FRAME_ALIGN, SLOTS_PER_SLAB_MAX},
};
use std::ops::Range;

/// From this size on payloads get slots of exactly their size.
const EXACT_FROM: u64 = 4 << 20;
/// From this size on there are [`FINE_STEPS`] sizes per doubling.
const FINE_FROM: u64 = 1 << 20;
/// Sizes per doubling of small payloads.
const STEPS: u64 = 8;
/// Sizes per doubling of large payloads.
const FINE_STEPS: u64 = 32;
/// Slots of a line's first slab, unless it is said at once that it needs more; fewer if a writer has lines in many shards.
const SLOTS_FIRST: u32 = 16;
/// The first slabs of all shards together are no more than so many with one.
const FIRST_PARTS_MAX: u32 = 4;
/// Bytes of a writer's first slab.
const SLAB_BYTES_FIRST: u64 = 16 << 20;
/// How much larger the next slab is than the last.
const GROWTH: u32 = 4;

/// Header room for a key: enough for keys of 64, 192 and 512 bytes.
fn header_room(key_bytes: usize) -> u64 {
    let needed = header_bytes(key_bytes);
    let room = [128, 256, HEADER_BYTES_MAX].into_iter().find(|room| needed <= *room);
    room.unwrap_or(HEADER_BYTES_MAX) as u64
}

/// Payload room, in steps of the power of two at or below it.
fn payload_room(payload_bytes: u64) -> u64 {
    let doubling = payload_bytes.next_power_of_two() / 2;
    let step = match payload_bytes {
        EXACT_FROM.. => 1,
        FINE_FROM.. => doubling / FINE_STEPS,
        _ => doubling / STEPS,
    };
    payload_bytes.next_multiple_of(step.max(FRAME_ALIGN as u64))
}

/// Size of the slot for such a frame, or the most payload that a slot can hold under such a key.
pub(crate) fn slot_size_for(key_bytes: usize, payload_bytes: u64) -> Result<u32, u64> {
    let limit = EXTENT_BYTES - header_bytes(key_bytes) as u64;
    if payload_bytes > limit {
        return Err(limit);
    }
    // Close to the limit the frame alone must fit.
    let bytes = (header_room(key_bytes) + payload_room(payload_bytes)).min(EXTENT_BYTES);
    Ok(u32::try_from(bytes).expect("an extent's bytes fit in a u32"))
}

/// The most payload that is written under such a key where no slot may be larger than `slot_max`: sizes are rounded, so not all of it is used.
pub(crate) fn payload_in(key_bytes: usize, slot_max: u64) -> u64 {
    let fits = |payload| slot_size_for(key_bytes, payload).is_ok_and(|slot| u64::from(slot) <= slot_max);
    let (mut most, mut above) = (0, slot_max);
    while most + 1 < above {
        let middle = most + (above - most) / 2;
        if fits(middle) { most = middle } else { above = middle }
    }
    most
}

/// How many slots to ask for: a few at first, then more with use, and at least what is known to be needed; never more than fits in
/// `slab_bytes_max`, but at least one.
pub(crate) fn slots_to_ask(last: Option<u32>, needed: u32, slot_size: u32, slab_bytes_max: u64, shards: u32) -> u32 {
    let fitting = |bytes: u64| u32::try_from(bytes / u64::from(slot_size)).unwrap_or(u32::MAX);
    let first = || (SLOTS_FIRST / shards.clamp(1, FIRST_PARTS_MAX)).min(fitting(SLAB_BYTES_FIRST));
    let grown = last.map_or_else(first, |last| last.saturating_mul(GROWTH));
    grown.max(needed).min(fitting(slab_bytes_max)).clamp(1, SLOTS_PER_SLAB_MAX)
}

/// What a line has and needs just after slots were taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    /// Slots that are free in the slabs that it has.
    pub(crate) free: u32,
    /// Slots that callers know they will need.
    pub(crate) needed: u32,
    /// Slots that were just taken.
    pub(crate) taken: u32,
    /// Slots of the slab that they were taken from.
    pub(crate) slab: u32,
    /// How often slots were taken, this time included.
    pub(crate) reservations: u64,
}

impl Ahead {
    /// Whether the next slab should be sent for now: what is known to be needed does not fit, or, for a line that is used again and again,
    /// another turn like this one or half a slab does not.
    pub(crate) fn wants_slab(&self) -> bool {
        let again = if self.reservations >= 2 { self.taken.max(self.slab.div_ceil(2)) } else { 0 };
        self.free < self.needed.max(again)
    }
}

/// Which slots of a slab were handed out: those below the mark, each once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fill {
    mark: u32,
    slots: u32,
}

impl Fill {
    pub(crate) fn new(slots: u32) -> Self {
        Self { mark: 0, slots }
    }

    /// The next slots: as many of `wanted` as are left.
    pub(crate) fn take(&mut self, wanted: u32) -> Option<Range<u32>> {
        let end = self.mark.saturating_add(wanted).min(self.slots);
        if end == self.mark {
            return None;
        }
        let taken = self.mark..end;
        self.mark = end;
        Some(taken)
    }

    /// The first slot that was never handed out.
    pub(crate) fn mark(&self) -> u32 {
        self.mark
    }
    pub(crate) fn is_full(&self) -> bool {
        self.mark == self.slots
    }
    /// Slots that were not handed out.
    pub(crate) fn left(&self) -> u32 {
        self.slots - self.mark
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use quarry_wire::frame::slot_size;

    proptest! {
        #[test]
        fn the_most_that_a_smaller_slot_takes_fits_it_and_one_byte_more_does_not(key in 1usize..=512, slots in 64u64..=1 << 20) {
            let slot_max = slots * FRAME_ALIGN as u64;
            let most = payload_in(key, slot_max);
            prop_assert!(u64::from(slot_size_for(key, most).unwrap()) <= slot_max);
            prop_assert!(slot_size_for(key, most + 1).is_ok_and(|slot| u64::from(slot) > slot_max) || most == EXTENT_BYTES - header_bytes(key) as u64);
        }

        #[test]
        fn every_frame_fits_its_slot_and_wastes_at_most_an_eighth_and_its_header_room(key in 1usize..=512, payload in 0u64..=EXTENT_BYTES) {
            match slot_size_for(key, payload) {
                Ok(size) => {
                    let needed = slot_size(key, payload).unwrap().0;
                    prop_assert!(size >= needed && (size as usize).is_multiple_of(FRAME_ALIGN) && u64::from(size) <= EXTENT_BYTES);
                    let spare = u64::from(size - needed);
                    prop_assert!(spare <= payload / 8 + header_room(key) - header_bytes(key) as u64 + FRAME_ALIGN as u64, "{spare} spare");
                }
                Err(limit) => prop_assert!(payload > limit),
            }
        }

        #[test]
        fn slots_are_handed_out_once_and_in_order(slots in 1u32..200, wants in prop::collection::vec(0u32..40, 0..60)) {
            let mut fill = Fill::new(slots);
            let mut next = 0;
            for want in wants {
                if let Some(range) = fill.take(want) {
                    prop_assert!(range.start == next && range.end <= slots && range.end - range.start <= want);
                    next = range.end;
                } else {
                    prop_assert!(want == 0 || next == slots);
                }
                prop_assert_eq!(fill.mark(), next);
            }
        }
    }

    #[test]
    fn powers_of_two_fit_exactly_under_short_keys() {
        for shift in 12..=22 {
            assert_eq!(slot_size_for(64, 1 << shift), Ok((1 << shift) + 128));
        }
        assert_eq!(slot_size_for(40, (5 << 20) + 64), Ok((5 << 20) + 64 + 128), "large values fit exactly");
    }

    #[test]
    fn there_are_few_sizes() {
        let sizes = |payloads: Range<u64>| {
            let sizes = payloads.step_by(64).map(|payload| slot_size_for(32, payload).unwrap());
            sizes.collect::<std::collections::BTreeSet<_>>().len()
        };
        let (small, large) = (sizes(0..FINE_FROM), sizes(FINE_FROM..EXACT_FROM));
        assert!(small < 110 && large <= 66, "{small} sizes below 1 MiB, {large} from there to 4 MiB");
    }

    #[test]
    fn values_of_four_million_bytes_lie_four_to_an_extent_of_sixteen_mebibytes() {
        let size = u64::from(slot_size_for(40, 4_000_000).unwrap());
        assert_eq!((16 << 20) / size, 4, "{size} bytes a slot");
    }

    #[test]
    fn the_largest_value_fits_an_extent_and_one_byte_more_is_refused() {
        let limit = EXTENT_BYTES - 128;
        assert_eq!(slot_size_for(1, limit), Ok(64 << 20));
        assert_eq!(slot_size_for(1, limit + 1), Err(limit));
        assert_eq!(slot_size_for(512, u64::MAX), Err(EXTENT_BYTES - 576));
    }

    #[test]
    fn the_next_slab_is_sent_for_before_it_is_needed_and_not_for_one_call_alone() {
        let ahead =
            |free, needed, taken, slab, reservations| Ahead { free, needed, taken, slab, reservations }.wants_slab();
        assert!(ahead(0, 1, 63, 63, 1), "the call that took all needs more");
        assert!(!ahead(0, 0, 63, 63, 1), "one call alone, which has all that it needs");
        assert!(!ahead(10, 10, 53, 63, 1), "what is left will do");
        assert!(ahead(31, 0, 32, 63, 2), "another turn like this one would not fit");
        assert!(!ahead(63, 0, 32, 63, 3));
        assert!(ahead(7, 0, 1, 16, 9), "half of it is used");
        assert!(!ahead(8, 0, 1, 16, 8));
    }

    #[test]
    fn slabs_begin_small_and_grow_with_use_up_to_the_cap() {
        let size = (64 << 10) + 128;
        assert_eq!(slots_to_ask(None, 1, size, EXTENT_BYTES, 1), 16);
        assert_eq!(slots_to_ask(None, 1, size, EXTENT_BYTES, 8), 4, "eight lines are eight slabs");
        assert_eq!(slots_to_ask(Some(16), 1, size, EXTENT_BYTES, 1), 64);
        assert_eq!(slots_to_ask(Some(1022), 1, size, EXTENT_BYTES, 1), 1022);
        assert_eq!(slots_to_ask(None, 1000, size, EXTENT_BYTES, 1), 1000, "a known need is asked for at once");
        assert_eq!(slots_to_ask(None, 1, 64 << 20, EXTENT_BYTES, 1), 1);
        assert_eq!(slots_to_ask(None, 1, 8 << 20, 1, 1), 1, "at least one");
        assert_eq!(slots_to_ask(Some(4000), 9000, 128, EXTENT_BYTES, 1), SLOTS_PER_SLAB_MAX);
    }
}
