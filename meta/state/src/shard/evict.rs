//! Eviction: slabs of class `cache` go whole to make room.
//!
//! The leader proposes victims ([`Shard::victims`]); here each is validated on its own: it is a slab of class `cache`, its writer can commit
//! nothing of it any more, no pin is on a value of it, and something of it is left. Then its values vanish at once and every slot rests like any
//! other that may have been read (*Leases hold*), neighbours as one span, so that what comes back is large (*Fresh space*). Outcomes stay where
//! they are as long as those of replaced values: a commit asked for again has the outcome that it had (*Idempotent commits*).

use super::{
    EvictRefusal, Evicted, Shard, ValueRef,
    grants::{Leave, Slab, Slot},
};
use quarry_wire::{
    grant::Class,
    ids::{GrantId, Ordinal, SlotIndex},
};

impl Shard {
    pub(super) fn evict(&mut self, victims: &[GrantId]) -> Vec<Result<Evicted, EvictRefusal>> {
        victims.iter().map(|victim| self.evict_slab(*victim)).collect()
    }

    fn evict_slab(&mut self, grant: GrantId) -> Result<Evicted, EvictRefusal> {
        let known = self.slabs.get(&grant.sequence).filter(|slab| slab.grant.id == grant);
        let slab = known.ok_or(EvictRefusal::UnknownSlab { grant })?;
        if slab.grant.class != Class::Cache {
            return Err(EvictRefusal::NotCache { grant, class: slab.grant.class });
        }
        if slab.phase.is_live() {
            return Err(EvictRefusal::StillGranted { grant });
        }
        if self.has_pinned_values(grant.sequence) {
            return Err(EvictRefusal::Pinned { grant });
        }
        if !slab.has_copies() {
            return Err(EvictRefusal::Empty { grant });
        }
        let until = self.rest_until(slab);
        let values: Vec<_> = slab.values().map(|(_, record)| (slab.grant.namespace, record.key.clone())).collect();
        let runs: Vec<_> = (0..slab.slots.len()).map(|holder| (holder, slab.runs_of_copies(holder))).collect();
        let mut evicted = Evicted { values: u32::try_from(values.len()).unwrap_or(u32::MAX), bytes: 0 };
        for value in values {
            let gone = self.values.remove(&value);
            assert!(gone.is_some_and(|at| at.grant() == grant.sequence), "a committed slot is its key's current value");
        }
        for (holder, runs) in runs {
            for run in runs {
                let slot_size = u64::from(self.slabs[&grant.sequence].grant.slot_size.0);
                evicted.bytes += slot_size * run.len() as u64;
                self.leave_together(grant.sequence, holder, &run, Leave::Rest(until));
            }
        }
        self.drop_if_empty(grant.sequence);
        Ok(evicted)
    }

    /// Whether a pin is on a value that is written down in this slab.
    pub(super) fn has_pinned_values(&self, id: Ordinal) -> bool {
        let of = |slot| ValueRef::new(id, SlotIndex(slot));
        self.pinned.range(of(0)..=of(u32::MAX)).next().is_some()
    }
}

impl Slab {
    /// The values that are current with a copy here, by slot.
    pub(super) fn values(&self) -> impl Iterator<Item = (SlotIndex, &super::records::Record)> {
        let committed = |slot: SlotIndex| {
            self.slots.iter().any(|slots| matches!(slots.get(slot.0 as usize), Some(Slot::Committed { .. })))
        };
        self.records.iter().filter(move |(slot, _)| committed(*slot))
    }

    /// Neighbouring slots of one holder that are copies.
    pub(super) fn runs_of_copies(&self, holder: usize) -> Vec<Vec<u32>> {
        let copies: Vec<u32> =
            (0..).zip(&self.slots[holder]).filter(|(_, slot)| slot.is_copy()).map(|(slot, _)| slot).collect();
        copies.chunk_by(|one, next| one + 1 == *next).map(<[u32]>::to_vec).collect()
    }
}
