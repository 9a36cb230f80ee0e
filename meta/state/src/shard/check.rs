//! What always holds of a shard, and of each step that it takes.

use super::{
    CommitEntry, Committed, Mode, RegionState, Resolved, Shard, ValueRef,
    commits::attestation,
    grants::{Phase, Slab, Slot},
};
use crate::invariant::{Invariant, Violation};
use quarry_wire::{
    ids::{ExtentId, Ordinal, SlotIndex},
    limits::{KEYS_PER_PIN_MAX, PIN_MAX, PINS_PER_OWNER_MAX, PINS_PER_SHARD_MAX},
    merkle,
    units::{LogTime, Offset},
};
use std::collections::BTreeMap;

/// A span of an extent and who has it.
type Spans = BTreeMap<ExtentId, Vec<(u64, u64)>>;

impl Shard {
    /// Checks every invariant that a state can show. Recomputes every leaf: costly for a large state.
    ///
    /// # Errors
    /// The first one that does not hold.
    pub fn check(&self) -> Result<(), Violation> {
        self.check_space()?;
        self.check_slabs()?;
        self.check_values()?;
        self.check_batches()?;
        self.check_deadlines()?;
        self.check_pins()?;
        self.check_feed()
    }

    /// *Fresh space* and *Nothing leaks*: the spans of an extent, free, granted, committed and resting, cover it exactly once.
    fn check_space(&self) -> Result<(), Violation> {
        let mut spans: Spans = BTreeMap::new();
        for (id, held) in &self.extents {
            let own = spans.entry(*id).or_default();
            own.extend(held.free.iter());
            own.extend(held.resting.iter().map(|(start, rest)| (*start, rest.bytes)));
            let free: u64 = held.free.iter().map(|(_, bytes)| bytes).sum();
            Violation::unless(free == held.free.total(), Invariant::NothingLeaks, || format!("{id}: sum of free"))?;
        }
        for (id, slab) in &self.slabs {
            for (holder, slots) in slab.grant.holders.iter().zip(&slab.slots) {
                let extent = Slab::extent(holder);
                for (slot, _) in (0..).zip(slots).filter(|(_, state)| **state != Slot::Gone) {
                    let held = self.extents.get(&extent).filter(|held| held.lend == holder.lend);
                    Violation::unless(held.is_some(), Invariant::FreshSpace, || {
                        format!("grant {id} has a live slot in {extent}, which is not held under {}", holder.lend)
                    })?;
                    let Some(Offset(start)) = slab.grant.offset(holder, SlotIndex(slot)) else { continue };
                    spans.entry(extent).or_default().push((start, u64::from(slab.grant.slot_size.0)));
                }
            }
        }
        for (id, mut own) in spans {
            let Some(held) = self.extents.get(&id) else { continue };
            own.sort_unstable();
            let mut next = held.start;
            for (start, bytes) in own {
                Violation::unless(start >= next, Invariant::FreshSpace, || format!("{id}: two owners at {start}"))?;
                Violation::unless(start == next, Invariant::NothingLeaks, || format!("{id}: no owner at {next}"))?;
                next = start.saturating_add(bytes);
            }
            Violation::unless(next == held.start.saturating_add(held.bytes), Invariant::NothingLeaks, || {
                format!("{id}: no owner at {next}")
            })?;
        }
        Violation::unless(self.used == self.used_of_state(), Invariant::IndexAgrees, || {
            "bytes per namespace".to_owned()
        })
    }

    fn check_slabs(&self) -> Result<(), Violation> {
        for (id, slab) in &self.slabs {
            let grant = &slab.grant;
            let shape = grant.id.sequence == *id
                && grant.id.shard == self.id
                && slab.slots.len() == grant.holders.len()
                && slab.slots.iter().all(|slots| slots.len() == grant.slots.0 as usize)
                && slab.fill <= grant.slots
                && id.number <= self.sequence_last;
            Violation::unless(shape, Invariant::FreshSpace, || format!("the shape of the slab of grant {id}"))?;
            let granted = slab.slots.iter().flatten().any(|slot| *slot == Slot::Granted);
            let ends = match slab.phase {
                Phase::Open | Phase::Sealed => slab.expires_at > self.now,
                Phase::Closed { .. } | Phase::Expired { .. } => !granted,
                Phase::Forgotten => !granted && slab.has_copies(),
            };
            Violation::unless(ends, Invariant::NothingLeaks, || {
                format!("grant {id} in {:?} at {}", slab.phase, self.now)
            })?;
            for (holder, slots) in grant.holders.iter().zip(&slab.slots) {
                let live = slots.iter().any(|slot| *slot != Slot::Gone);
                let known = self.regions.get(&holder.region);
                let present = known.is_some_and(|region| region.incarnation == holder.incarnation);
                Violation::unless(!live || present, Invariant::EpochsOnlyGrow, || {
                    format!("grant {id} has a live slot in {} of {}", holder.incarnation, holder.region)
                })?;
            }
            for (slot, record) in slab.records.iter() {
                let states = slab.slots.iter().filter_map(|slots| slots.get(slot.0 as usize));
                let mut states = states.copied();
                let value = self.values.get(&(grant.namespace, record.key.clone()));
                let current = value == Some(&ValueRef::new(*id, slot));
                let is_pinned = self.is_pinned(ValueRef::new(*id, slot));
                let fits = match record.outcome() {
                    Ok(Committed::Applied) if current => states.any(|state| matches!(state, Slot::Committed { .. })),
                    Ok(Committed::Applied) if is_pinned => {
                        states.all(|state| matches!(state, Slot::Gone | Slot::Pinned { .. }))
                    }
                    Ok(Committed::Applied | Committed::AlreadyCurrent) | Err(_) => {
                        states.all(|state| state == Slot::Gone)
                    }
                };
                Violation::unless(fits, Invariant::IdempotentCommits, || {
                    format!("grant {id}, {slot}: {:?}, current: {current}", record.outcome())
                })?;
            }
        }
        Ok(())
    }

    fn check_values(&self) -> Result<(), Violation> {
        for ((namespace, key), value) in &self.values {
            let slab = self.slabs.get(&value.grant());
            let record = slab.and_then(|slab| slab.records.get(&value.slot));
            let fits = slab.zip(record).is_some_and(|(slab, record)| {
                slab.grant.namespace == *namespace && record.key == *key && record.outcome() == Ok(Committed::Applied)
            });
            Violation::unless(fits, Invariant::NoHalfTruth, || {
                format!("{key} is at {value:?}, which is not its record")
            })?;
            let home = key.shard(*namespace, self.settings.shards);
            Violation::unless(home == self.id, Invariant::NoHalfTruth, || format!("{key} belongs to {home}"))?;
        }
        Ok(())
    }

    /// *No half-truth*: every copy is a leaf of a signed batch of that node, and the leaf recomputes.
    fn check_batches(&self) -> Result<(), Violation> {
        let mut live = BTreeMap::new();
        for (id, slab) in &self.slabs {
            for (holder, slots) in slab.grant.holders.iter().zip(&slab.slots) {
                for (slot, state) in (0..).map(SlotIndex).zip(slots) {
                    let (Slot::Committed { batch, leaf } | Slot::Pinned { batch, leaf }) = *state else { continue };
                    *live.entry(batch).or_insert(0) += 1;
                    let expected = slab.records.get(&slot).and_then(|record| {
                        let entry = CommitEntry {
                            slot,
                            key: record.key.clone(),
                            version: record.version,
                            kind: record.kind,
                            payload_bytes: record.payload_bytes,
                            payload_crc: record.payload_crc,
                            mode: Mode::Replace,
                        };
                        Some(attestation(&slab.grant, holder, &entry)?.leaf())
                    });
                    let held = self.batches.get(&batch);
                    let found = held.and_then(|held| held.leaves.get(leaf as usize)).copied();
                    let signer = held.map(|held| held.node);
                    Violation::unless(
                        expected.is_some() && found == expected && signer == Some(holder.region.node),
                        Invariant::NoHalfTruth,
                        || format!("grant {id}, {slot} at {}: leaf {leaf} of {batch:?}", holder.region),
                    )?;
                }
            }
        }
        for (id, batch) in &self.batches {
            let counted = live.get(id).copied().unwrap_or(0_u32);
            Violation::unless(counted > 0 && counted == batch.live, Invariant::NothingLeaks, || {
                format!("{id:?} counts {} live leaves of {counted}", batch.live)
            })?;
            let root = !batch.leaves.is_empty() && merkle::root(&batch.leaves) == batch.root;
            Violation::unless(root && id.0 <= self.batch_last, Invariant::NoHalfTruth, || format!("root of {id:?}"))?;
        }
        Ok(())
    }

    fn check_deadlines(&self) -> Result<(), Violation> {
        let same = self.deadlines == self.deadlines_of_state() && self.writers == self.writers_of_state();
        Violation::unless(same, Invariant::IndexAgrees, || "deadlines or writers".to_owned())?;
        let due = self.deadlines.first().is_some_and(|(at, _)| *at <= self.now);
        Violation::unless(!due, Invariant::NothingLeaks, || {
            format!("{:?} is due at {}", self.deadlines.first(), self.now)
        })?;
        let ahead = self.now.after(self.settings.horizon_ahead_max);
        Violation::unless(self.horizon <= ahead, Invariant::LeasesHold, || {
            format!("the horizon {} is too far ahead of {}", self.horizon, self.now)
        })?;
        let remembered = self.requests.iter().all(|(id, _)| id.at <= self.now);
        Violation::unless(remembered, Invariant::IdempotentCommits, || {
            "a request from the future is recorded".to_owned()
        })
    }

    /// *Leases hold* and *Nothing leaks*: every pin ends, and nothing but pins keeps what is not current.
    fn check_pins(&self) -> Result<(), Violation> {
        let (pinned, owners) = self.pinned_of_state();
        let same = self.pinned == pinned && self.pin_owners == owners;
        Violation::unless(same, Invariant::IndexAgrees, || "pinned values or owners of pins".to_owned())?;
        for (id, pin) in &self.pins {
            let fits = id.0.number <= self.pin_last
                && id.0.generation == self.generation
                && pin.end <= self.now.after(PIN_MAX)
                && (1..=KEYS_PER_PIN_MAX).contains(&pin.values.len());
            Violation::unless(fits, Invariant::NothingLeaks, || format!("{id} until {} at {}", pin.end, self.now))?;
        }
        let bounded = self.pins.len() <= PINS_PER_SHARD_MAX
            && self.pin_owners.values().all(|count| *count as usize <= PINS_PER_OWNER_MAX);
        Violation::unless(bounded, Invariant::NothingLeaks, || format!("{} pins", self.pins.len()))?;
        for (id, slab) in &self.slabs {
            for (slot, _) in slab.slots.iter().flat_map(|slots| {
                (0..).map(SlotIndex).zip(slots).filter(|(_, state)| matches!(state, Slot::Pinned { .. }))
            }) {
                let value = ValueRef::new(*id, slot);
                let record = slab.records.get(&slot).is_some_and(|record| record.outcome() == Ok(Committed::Applied));
                Violation::unless(record && self.is_pinned(value), Invariant::NothingLeaks, || {
                    format!("grant {id}, {slot} is kept, but no pin is on it")
                })?;
            }
        }
        Ok(())
    }

    fn check_feed(&self) -> Result<(), Violation> {
        for (id, held) in &self.extents {
            let seen = self.lends_seen.get(id);
            Violation::unless(
                seen == Some(&held.lend)
                    && held.lend.0.generation == self.generation
                    && !self.returned.contains_key(id),
                Invariant::EpochsOnlyGrow,
                || format!("{id} is held under {}, the highest seen is {seen:?}", held.lend),
            )?;
        }
        for (id, lend) in &self.returned {
            let seen = self.lends_seen.get(id);
            Violation::unless(seen == Some(lend), Invariant::EpochsOnlyGrow, || {
                format!("{id} was given back under {lend}")
            })?;
        }
        Ok(())
    }

    /// Checks every invariant that the step from `before` to this state can show.
    ///
    /// # Errors
    /// The first one that does not hold.
    pub fn check_step(&self, before: &Self) -> Result<(), Violation> {
        let creeps = self.now >= before.now && self.horizon >= before.horizon && self.feed >= before.feed;
        Violation::unless(creeps, Invariant::LogTimeOnlyCreeps, || format!("{} after {}", self.now, before.now))?;
        let grows = self.generation >= before.generation
            && self.sequence_last >= before.sequence_last
            && self.batch_last >= before.batch_last
            && self.pin_last >= before.pin_last
            && before.lends_seen.iter().all(|(id, lend)| self.lends_seen.get(id) >= Some(lend))
            && before.regions.iter().all(|(id, old)| {
                // A region of a node that is gone for good has no bytes any more.
                let is_as_long = |new: &RegionState| new.bytes == old.bytes || (new.bytes == 0 && !new.up);
                self.regions.get(id).is_some_and(|new| new.incarnation >= old.incarnation && is_as_long(new))
            });
        Violation::unless(grows, Invariant::EpochsOnlyGrow, || "a number went back".to_owned())?;
        self.check_outcomes_stay(before)?;
        self.check_rests_stay(before)?;
        self.check_pins_hold(before)?;
        self.check_moves_keep(before)?;
        self.check_freed_rests(before)
    }

    /// *Idempotent commits*: what was recorded stays as it was, until its grant is forgotten, which takes its time.
    fn check_outcomes_stay(&self, before: &Self) -> Result<(), Violation> {
        for (id, old) in &before.slabs {
            let kept_until = match old.phase {
                Phase::Closed { at } | Phase::Expired { at } => at.after(self.settings.outcome_kept),
                Phase::Open | Phase::Sealed => LogTime(u64::MAX),
                Phase::Forgotten => continue,
            };
            let Some(new) = self.slabs.get(id).filter(|new| new.phase != Phase::Forgotten) else {
                Violation::unless(self.now >= kept_until, Invariant::IdempotentCommits, || {
                    format!("grant {id} was forgotten at {}, before {kept_until}", self.now)
                })?;
                continue;
            };
            for (slot, record) in old.records.iter() {
                Violation::unless(new.records.get(&slot) == Some(record), Invariant::IdempotentCommits, || {
                    format!("the outcome of grant {id}, {slot} changed")
                })?;
            }
        }
        Ok(())
    }

    /// Whether the contents of an extent are still those of `before`.
    fn is_same_memory(&self, before: &Self, extent: ExtentId) -> bool {
        let lend = |shard: &Self| shard.extents.get(&extent).map(|held| held.lend);
        let life = |shard: &Self| shard.regions.get(&extent.region).map(|region| region.incarnation);
        lend(self) == lend(before) && life(self) == life(before)
    }

    fn rests(&self, extent: ExtentId, start: u64, bytes: u64, until: LogTime) -> bool {
        let held = self.extents.get(&extent).and_then(|held| held.resting.at_or_before(&start));
        held.is_some_and(|(from, rest)| from + rest.bytes >= start + bytes && rest.until >= until)
    }

    /// *Leases hold*: what rests goes on resting until its time has come.
    fn check_rests_stay(&self, before: &Self) -> Result<(), Violation> {
        for (id, held) in &before.extents {
            if !self.extents.contains_key(id) {
                let voided =
                    self.generation > before.generation || held.resting.values().all(|rest| rest.until <= self.now);
                Violation::unless(voided, Invariant::LeasesHold, || format!("{id} was dropped while it rested"))?;
                continue;
            }
            if !self.is_same_memory(before, *id) {
                continue;
            }
            for (start, rest) in held.resting.iter().filter(|(_, rest)| rest.until > self.now) {
                Violation::unless(self.rests(*id, *start, rest.bytes, rest.until), Invariant::LeasesHold, || {
                    format!("{id} at {start} should rest until {}, it is {}", rest.until, self.now)
                })?;
            }
        }
        Ok(())
    }

    /// *Leases hold*: what is pinned stays where it is, and its pin never ends earlier than was said; a pin that is gone was released or is over.
    fn check_pins_hold(&self, before: &Self) -> Result<(), Violation> {
        for (id, old) in &before.pins {
            let Some(new) = self.pins.get(id) else { continue };
            Violation::unless(new.end >= old.end && new.values == old.values, Invariant::LeasesHold, || {
                format!("{id} until {} lasts until {} now", old.end, new.end)
            })?;
            for value in &old.values {
                let Some(slab) = before.slabs.get(&value.grant()) else { continue };
                for (place, holder) in slab.grant.holders.iter().enumerate() {
                    let was = slab.slot(place, value.slot).is_some_and(Slot::is_copy);
                    let is_same = self.is_same_memory(before, Slab::extent(holder));
                    let stays = !was || !is_same || self.is_copy(value.grant(), place, value.slot);
                    Violation::unless(stays, Invariant::LeasesHold, || {
                        format!("{id} is on {value:?}, which left {} at {}", holder.region, self.now)
                    })?;
                }
            }
        }
        Ok(())
    }

    /// *No half-truth*: a value whose place changed and not its version was moved: it is the same frame, has no copy less, and was under no pin.
    fn check_moves_keep(&self, before: &Self) -> Result<(), Violation> {
        for (value, old) in &before.values {
            let Some(new) = self.values.get(value).filter(|new| *new != old) else { continue };
            let of = |shard: &Self, at: &ValueRef| shard.slabs.get(&at.grant()).map(|slab| slab.copies(at.slot));
            let (Some(was), Some(is)) = (before.resolved(*old), self.resolved(*new)) else { continue };
            let frame = |it: &Resolved| (it.version, it.kind, it.payload_bytes, it.payload_crc);
            let kept = frame(&was) == frame(&is) && of(self, new) >= of(before, old) && !self.is_pinned(*old);
            Violation::unless(was.version != is.version || kept, Invariant::NoHalfTruth, || {
                format!("{} went from {old:?} to {new:?} and is not what it was", value.1)
            })?;
        }
        Ok(())
    }

    /// *Leases hold*: a copy that stopped being one, at whichever slot, rests past the horizon.
    fn check_freed_rests(&self, before: &Self) -> Result<(), Violation> {
        let until = self.now.max(before.horizon).after(self.settings.quarantine);
        for (id, slab) in &before.slabs {
            for (place, (holder, slots)) in slab.grant.holders.iter().zip(&slab.slots).enumerate() {
                let extent = Slab::extent(holder);
                if !self.is_same_memory(before, extent) {
                    continue;
                }
                for (slot, _) in (0..).map(SlotIndex).zip(slots).filter(|(_, state)| state.is_copy()) {
                    if self.is_copy(*id, place, slot) {
                        continue;
                    }
                    let Some(Offset(start)) = slab.grant.offset(holder, slot) else { continue };
                    let bytes = u64::from(slab.grant.slot_size.0);
                    Violation::unless(self.rests(extent, start, bytes, until), Invariant::LeasesHold, || {
                        format!("grant {id}, {slot} at {} should rest until {until}", holder.region)
                    })?;
                }
            }
        }
        Ok(())
    }

    fn is_copy(&self, id: Ordinal, holder: usize, slot: SlotIndex) -> bool {
        self.slabs.get(&id).and_then(|slab| slab.slot(holder, slot)).is_some_and(Slot::is_copy)
    }
}
