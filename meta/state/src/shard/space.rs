//! Space: which bytes of an extent are free, and which rest.
//! Keeps *Fresh space*: a range is taken only if all of it is free, and put back only if none of it is.

use crate::ordered::Map;
use quarry_wire::{
    ids::{ExtentIndex, LendNumber},
    limits::extent_bytes,
    units::LogTime,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Disjoint ranges that do not touch, in region offsets, with their sum.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(super) struct Ranges {
    /// End by start.
    ends: Map<u64, u64>,
    total: u64,
}

impl Ranges {
    pub(super) fn of(start: u64, bytes: u64) -> Self {
        Self { ends: [(start, start + bytes)].into_iter().collect(), total: bytes }
    }
    pub(super) const fn total(&self) -> u64 {
        self.total
    }
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.ends.iter().map(|(start, end)| (*start, end - start))
    }
    /// The first place where `bytes` fit.
    pub(super) fn first_fit(&self, bytes: u64) -> Option<u64> {
        if self.total < bytes {
            return None;
        }
        self.ends.iter().find(|(start, end)| *end - *start >= bytes).map(|(start, _)| *start)
    }
    fn around(&self, start: u64, bytes: u64) -> Option<(u64, u64)> {
        let end = start.checked_add(bytes)?;
        let (from, to) = self.ends.at_or_before(&start)?;
        (end <= *to).then_some((*from, *to))
    }
    /// The range around `at`: its start and its bytes.
    pub(super) fn run(&self, at: u64) -> Option<(u64, u64)> {
        let (from, to) = self.around(at, 1)?;
        Some((from, to - from))
    }
    /// Bytes of the largest range.
    pub(super) fn largest(&self) -> u64 {
        self.iter().map(|(_, bytes)| bytes).max().unwrap_or(0)
    }
    pub(super) fn contains(&self, start: u64, bytes: u64) -> bool {
        self.around(start, bytes).is_some()
    }
    /// Takes a range out; false, and nothing done, unless all of it is there.
    pub(super) fn take(&mut self, start: u64, bytes: u64) -> bool {
        let Some((from, to)) = self.around(start, bytes) else { return false };
        self.ends.remove(&from);
        if from < start {
            self.ends.insert(from, start);
        }
        if start + bytes < to {
            self.ends.insert(start + bytes, to);
        }
        self.total -= bytes;
        true
    }
    /// Puts a range in, joined with its neighbours.
    ///
    /// # Panics
    /// If some of it is there already: then two owners had it, which *Fresh space* excludes.
    pub(super) fn put(&mut self, start: u64, bytes: u64) {
        let mut from = start;
        let mut to = start + bytes;
        if let Some((before, end)) = self.ends.at_or_before(&start).map(|(before, end)| (*before, *end)) {
            assert!(end <= start, "Fresh space: a range is freed twice");
            if end == start {
                from = before;
            }
        }
        if let Some((after, end)) = self.ends.at_or_after(&start).map(|(after, end)| (*after, *end)) {
            assert!(after >= to, "Fresh space: a range is freed twice");
            if after == to {
                self.ends.remove(&after);
                to = end;
            }
        }
        self.ends.insert(from, to);
        self.total += bytes;
    }
}

/// Memory that rests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Rest {
    pub(super) bytes: u64,
    /// Free again at this log time.
    pub(super) until: LogTime,
}

/// An extent that this shard holds.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Extent {
    /// The lending under which it is held.
    pub(super) lend: LendNumber,
    /// Where it begins in its region.
    pub(super) start: u64,
    /// Its bytes.
    pub(super) bytes: u64,
    pub(super) free: Ranges,
    /// By start.
    pub(super) resting: Map<u64, Rest>,
}

impl Extent {
    /// A wholly free extent; none if a region of `region_bytes` has no such extent.
    pub(super) fn new(lend: LendNumber, index: ExtentIndex, region_bytes: u64) -> Option<Self> {
        let bytes = extent_bytes(region_bytes);
        let start = u64::from(index.0).checked_mul(bytes)?;
        let fits = bytes > 0 && start.checked_add(bytes)? <= region_bytes;
        fits.then(|| Self { lend, start, bytes, free: Ranges::of(start, bytes), resting: Map::new() })
    }
    pub(super) fn is_inside(&self, start: u64, bytes: u64) -> bool {
        start >= self.start && start.checked_add(bytes).is_some_and(|end| end <= self.start + self.bytes)
    }
    /// Bytes that are neither free nor at rest: granted, or copies.
    pub(super) fn live_bytes(&self) -> u64 {
        self.bytes - self.free.total() - self.resting.values().map(|rest| rest.bytes).sum::<u64>()
    }
    /// What is free once all that rests has rested.
    pub(super) fn coming(&self) -> Ranges {
        let mut coming = self.free.clone();
        for (start, rest) in &self.resting {
            coming.put(*start, rest.bytes);
        }
        coming
    }
    pub(super) fn is_all_free(&self) -> bool {
        self.free.total() == self.bytes
    }
    /// Frees everything at once: the region's contents are gone, so nothing can be read there any more.
    pub(super) fn void(&mut self) {
        self.free = Ranges::of(self.start, self.bytes);
        self.resting.clear();
    }
}

/// How some memory of a shard is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    /// Extents lent to the shard.
    pub extents: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes free.
    pub free_bytes: u64,
    /// Bytes of slots granted and not yet committed.
    pub granted_bytes: u64,
    /// Such slots.
    pub granted_slots: u64,
    /// Bytes of slots that are a current copy.
    pub committed_bytes: u64,
    /// Such slots.
    pub committed_slots: u64,
    /// Bytes of slots that are a copy of a version that is not current any more, kept for a pin.
    pub pinned_bytes: u64,
    /// Such slots.
    pub pinned_slots: u64,
    /// Bytes in quarantine.
    pub resting_bytes: u64,
}

/// [`Space`] of a whole shard, and by region.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SpaceOf {
    /// All regions together.
    pub total: Space,
    /// Each region.
    pub regions: BTreeMap<quarry_wire::ids::RegionId, Space>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_agree_with_a_row_of_bits(steps in proptest::collection::vec((0u64..32, 1u64..8, any::<bool>()), 1..200)) {
            let mut ranges = Ranges::of(0, 40);
            let mut bits = [true; 40];
            for (start, bytes, take) in steps {
                let span = usize::try_from(start).unwrap()..usize::try_from(start + bytes).unwrap();
                if take {
                    let all = bits[span.clone()].iter().all(|bit| *bit);
                    prop_assert_eq!(ranges.contains(start, bytes), all);
                    prop_assert_eq!(ranges.take(start, bytes), all);
                    if all { bits[span].fill(false) }
                } else if bits[span.clone()].iter().all(|bit| !*bit) {
                    ranges.put(start, bytes);
                    bits[span].fill(true);
                }
                prop_assert_eq!(ranges.total(), bits.iter().filter(|bit| **bit).count() as u64);
                let runs = bits.chunk_by(|one, other| one == other).filter(|run| run[0]).count();
                prop_assert_eq!(ranges.iter().count(), runs, "neighbours are joined");
                let fits = |at: u64| {
                    let span = usize::try_from(at).unwrap()..usize::try_from(at + bytes).unwrap();
                    span.end <= 40 && bits[span].iter().all(|bit| *bit)
                };
                prop_assert_eq!(ranges.first_fit(bytes), (0..40).find(|at| fits(*at)));
            }
        }
    }
}
