//! Warm places: where slabs lay whose lanes may still be open. Planners take them last, since arming a new grant there closes such a lane, and
//! with it whatever else its writer does on it.
//!
//! A hint to planners and no part of the state: apply never asks it, no snapshot holds it, and two states that differ in it are equal.

use super::{
    Shard,
    grants::{Phase, Slab},
    space::Ranges,
};
use crate::ordered::Map;
use quarry_wire::{ids::ExtentId, limits::LANE_LIFE_MAX, units::LogTime};
use std::{collections::BTreeMap, time::Duration};

/// Ends are rounded up to this, so that neighbours that ended at about the same time become one place.
const STEP: Duration = Duration::from_secs(2);
const STEP_MS: u64 = STEP.as_secs() * 1000;

/// The places of all extents.
#[derive(Clone, Debug, Default)]
pub(super) struct Warm(BTreeMap<ExtentId, Places>);

impl PartialEq for Warm {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
impl Eq for Warm {}

/// Disjoint places of one extent, by start.
#[derive(Clone, Debug, Default)]
struct Places(Map<u64, Place>);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Place {
    end: u64,
    /// No lane of its slabs is open from then on.
    cold_at: LogTime,
}

impl Warm {
    /// The grant of a slab ended at `at`.
    pub(super) fn ended(&mut self, slab: &Slab, at: LogTime) {
        let cold_at = LogTime(at.after(LANE_LIFE_MAX).0.next_multiple_of(STEP_MS));
        for holder in &slab.grant.holders {
            let span = slab.grant.span(holder);
            self.0.entry(Slab::extent(holder)).or_default().note(span.start, Place { end: span.end, cold_at }, at);
        }
    }

    /// The first free place of `bytes` in the extent that is cold at `at`.
    pub(super) fn first_cold_fit(&self, extent: ExtentId, free: &Ranges, bytes: u64, at: LogTime) -> Option<u64> {
        match self.0.get(&extent) {
            None => free.first_fit(bytes),
            Some(_) if free.total() < bytes => None,
            Some(places) => free.iter().find_map(|(start, length)| places.cold_fit(start, start + length, bytes, at)),
        }
    }

    /// The extent is not held any more.
    pub(super) fn forget(&mut self, extent: ExtentId) {
        self.0.remove(&extent);
    }
}

impl Places {
    /// Takes note of a place; what was said of its bytes before is over.
    fn note(&mut self, mut start: u64, mut place: Place, at: LogTime) {
        let before = self.0.before(&start).map(|(before, old)| (*before, *old));
        if let Some((before, old)) = before
            && old.end > start
        {
            self.0.insert(before, Place { end: start, ..old });
            if old.end > place.end {
                self.0.insert(place.end, old);
            }
        }
        while let Some((inside, old)) = self.0.at_or_after(&start).map(|(inside, old)| (*inside, *old))
            && inside < place.end
        {
            self.0.remove(&inside);
            if old.end > place.end {
                self.0.insert(place.end, old);
            }
        }
        // Neighbours become one with it, or go if they are cold: so the places stay few.
        if let Some((before, old)) = self.0.before(&start).map(|(before, old)| (*before, *old)) {
            if old.end == start && old.cold_at == place.cold_at {
                self.0.remove(&before);
                start = before;
            } else if old.cold_at <= at {
                self.0.remove(&before);
            }
        }
        if let Some((after, old)) = self.0.at_or_after(&place.end).map(|(after, old)| (*after, *old)) {
            if after == place.end && old.cold_at == place.cold_at {
                self.0.remove(&after);
                place.end = old.end;
            } else if old.cold_at <= at {
                self.0.remove(&after);
            }
        }
        self.0.insert(start, place);
    }

    /// The first `bytes` of a free range beside all that is warm.
    fn cold_fit(&self, start: u64, end: u64, bytes: u64, at: LogTime) -> Option<u64> {
        let mut from = start;
        let first = self.0.at_or_before(&from).map_or(from, |(before, _)| *before);
        for (taken, place) in self.0.range(first..end) {
            if place.cold_at <= at || place.end <= from {
                continue;
            }
            if *taken >= from && *taken - from >= bytes {
                break;
            }
            from = place.end;
        }
        (from <= end && end - from >= bytes).then_some(from)
    }
}

impl Shard {
    /// The warm places that the state implies.
    pub(super) fn warm_of_state(&self) -> Warm {
        let mut ended: Vec<(LogTime, &Slab)> = Vec::new();
        for slab in self.slabs.values() {
            if let Phase::Closed { at } | Phase::Expired { at } = slab.phase {
                ended.push((at, slab));
            }
        }
        ended.sort_by_key(|(at, slab)| (*at, slab.grant.id.sequence));
        let mut warm = Warm::default();
        for (at, slab) in ended {
            warm.ended(slab, at);
        }
        warm
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn cold_places_agree_with_a_row_of_bytes(steps in proptest::collection::vec((0u64..32, 1u64..8, 0u64..4), 1..200)) {
            let mut places = Places::default();
            let mut row = [LogTime(0); 40];
            let mut now = LogTime(1);
            for (start, bytes, later) in steps {
                now = LogTime(now.0 + later);
                let place = Place { end: start + bytes, cold_at: LogTime(now.0 + 10) };
                places.note(start, place, now);
                row[usize::try_from(start).unwrap()..usize::try_from(start + bytes).unwrap()].fill(place.cold_at);
                let fits = |at: u64| row[usize::try_from(at).unwrap()..usize::try_from(at + bytes).unwrap()].iter().all(|cold| *cold <= now);
                prop_assert_eq!(places.cold_fit(0, 40, bytes, now), (0..=40 - bytes).find(|at| fits(*at)));
                let spans: Vec<(u64, u64)> = places.0.iter().map(|(start, place)| (*start, place.end)).collect();
                prop_assert!(spans.iter().all(|(start, end)| start < end) && spans.is_sorted_by(|one, next| one.1 <= next.0));
            }
        }
    }
}
