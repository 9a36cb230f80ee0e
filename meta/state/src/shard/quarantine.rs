//! Quarantine and every other deadline: what happens by itself when log time passes.
//!
//! One ordered index holds all deadlines; whatever is due is done at the beginning of every apply, whatever the command. Keeps *Leases hold*
//! (resting memory is freed here and nowhere else, unless its contents are gone) and *Nothing leaks* (whatever is in use has a deadline, is
//! a current value or is under a pin, which has a deadline).

use super::{GrantPhase, Phase, Shard, space::Rest};
use crate::ordered::Set;
use quarry_wire::{
    ids::{ExtentId, Generation, Ordinal, PinId, WriterId},
    units::LogTime,
};

/// What happens at a deadline. The order decides what comes first at one instant: grants expire and pins end before space is freed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Deadline {
    /// A grant expires.
    Expire(Ordinal),
    /// A pin ends.
    Unpin(PinId),
    /// Resting memory of this extent, from this offset, becomes free.
    Free(ExtentId, u64),
    /// The outcomes of a grant are forgotten.
    Forget(Ordinal),
}

impl Shard {
    /// Grants that are open or sealed.
    #[must_use]
    pub fn live_grants(&self) -> usize {
        self.writers.len()
    }

    /// When something happens by itself next: the leader stamps an entry then.
    #[must_use]
    pub fn next_deadline(&self) -> Option<LogTime> {
        let own = self.deadlines.first().map(|(at, _)| *at);
        let requests = self.requests.next_deadline(self.settings.outcome_kept);
        [own, requests].into_iter().flatten().min()
    }

    /// Moves log time to `at` and does whatever is due.
    pub(super) fn advance(&mut self, at: LogTime) {
        self.now = self.now.max(at);
        while let Some((due, deadline)) = self.deadlines.first().copied() {
            if due > self.now {
                break;
            }
            self.deadlines.pop_first();
            match deadline {
                Deadline::Expire(grant) => self.expire(grant),
                Deadline::Unpin(pin) => self.unpin(pin),
                Deadline::Free(extent, start) => self.wake(extent, start),
                Deadline::Forget(grant) => self.forget(grant),
            }
        }
        self.requests.forget(self.now, self.settings.outcome_kept);
    }

    /// Puts memory to rest, joined with what rests beside it until the same instant.
    pub(super) fn rest(&mut self, extent: ExtentId, start: u64, bytes: u64, until: LogTime) {
        let held = self.extents.get_mut(&extent).expect("a live slot lies in an extent that is held");
        let mut from = start;
        let mut total = bytes;
        if let Some((before, rest)) = held.resting.before(&start)
            && before + rest.bytes == start
            && rest.until == until
        {
            from = *before;
            total += rest.bytes;
        }
        let after = start + bytes;
        if let Some(rest) = held.resting.get(&after).copied().filter(|rest| rest.until == until) {
            held.resting.remove(&after);
            self.deadlines.remove(&(until, Deadline::Free(extent, after)));
            total += rest.bytes;
        }
        held.resting.insert(from, Rest { bytes: total, until });
        self.deadlines.insert((until, Deadline::Free(extent, from)));
    }

    /// Frees what has rested.
    fn wake(&mut self, extent: ExtentId, start: u64) {
        let held = self.extents.get_mut(&extent).expect("resting memory keeps its extent");
        let rest = held.resting.remove(&start).expect("a deadline to free names memory that rests");
        held.free.put(start, rest.bytes);
    }

    /// The deadlines that the state implies.
    pub(super) fn deadlines_of_state(&self) -> Set<(LogTime, Deadline)> {
        let mut deadlines = Set::default();
        for (id, slab) in &self.slabs {
            match slab.phase {
                Phase::Open | Phase::Sealed => deadlines.insert((slab.expires_at, Deadline::Expire(*id))),
                Phase::Closed { at } | Phase::Expired { at } => {
                    deadlines.insert((at.after(self.settings.outcome_kept), Deadline::Forget(*id)))
                }
                Phase::Forgotten => {}
            };
        }
        for (id, extent) in &self.extents {
            let resting = extent.resting.iter();
            deadlines.extend(resting.map(|(start, rest)| (rest.until, Deadline::Free(*id, *start))));
        }
        deadlines.extend(self.pins.iter().map(|(id, pin)| (pin.end, Deadline::Unpin(*id))));
        deadlines
    }

    /// Open and sealed grants by writer, as the state implies them.
    pub(super) fn writers_of_state(&self) -> Set<(WriterId, Ordinal)> {
        let mut writers = Set::default();
        for (id, slab) in self.slabs.iter().filter(|(_, slab)| slab.phase.is_live()) {
            writers.insert((slab.grant.writer, *id));
        }
        writers
    }

    /// The grants of `writer` that are open or sealed.
    pub fn grants_of(&self, writer: WriterId) -> impl Iterator<Item = super::GrantView<'_>> {
        let (first, last) = (Ordinal::default(), Ordinal { generation: Generation(u32::MAX), number: u64::MAX });
        let ids = self.writers.range((writer, first)..=(writer, last));
        ids.filter_map(|(_, id)| self.slabs.get(id))
            .map(|slab| slab.view())
            .filter(|view| matches!(view.phase, GrantPhase::Open | GrantPhase::Sealed))
    }
}
