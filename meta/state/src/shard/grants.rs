//! Grants: who may write which slots, until when.
//! Decides only; the leader proposes holders and offsets, the data node enforces the fence. Keeps *Fresh space*: a granted slot names exactly
//! one grant, and was free, in an extent that is lent, of a region that is up.
//!
//! ```text
//! Open ──seal──> Sealed      at the TTL, either one: every slot still granted is put to rest ──> Expired
//!   └──────────────┴── no slot below the fill mark is granted any more: the tail is freed ────> Closed
//! Expired, Closed ── outcomes kept long enough ──> Forgotten ── last committed slot gone ──> the slab is gone
//! ```
//! Grants for moves (whose writer is each holder itself, see `moves.rs`) live and end like all others; loads and repairs will come in with their
//! [`Purpose`] too.

use super::{
    BatchRef, GrantRefusal, GrantRequest, MoveRequest, Proposed, RequestOutcome, SealRefusal, Shard, ValueRef,
    quarantine::Deadline, records::Records,
};
use crate::{cow_arc::CowArc, directory::Policy, requests::RequestRefusal};
use quarry_wire::{
    frame::header_bytes,
    grant::{Class, Grant, GrantHolder, Purpose},
    ids::{ExtentId, GrantId, NamespaceId, NodeId, Ordinal, SlotIndex, WriterId},
    limits::{EXTENT_BYTES, FRAME_ALIGN, GRANT_TTL_MAX, SLOTS_PER_SLAB_MAX},
    units::{LogTime, Offset, SlotCount, millis},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

/// One slot at one holder.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Slot {
    /// The writer's, until the grant ends.
    Granted,
    /// A copy of a key's current version; leaf of a signed batch.
    Committed { batch: BatchRef, leaf: u32 },
    /// The slab's no more: it rests, is free, or belongs to another slab.
    Gone,
    /// A copy of a version that is not current any more, kept because a pin is on it; leaf of a signed batch.
    Pinned { batch: BatchRef, leaf: u32 },
}

impl Slot {
    /// Whether a frame can be read there: a current one, or one that is pinned.
    pub(super) const fn is_copy(self) -> bool {
        matches!(self, Self::Committed { .. } | Self::Pinned { .. })
    }
}

/// The slots of one holder, in order.
pub(super) type Row = CowArc<Vec<Slot>>;

/// Where a grant is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Phase {
    Open,
    Sealed,
    Closed { at: LogTime },
    Expired { at: LogTime },
    Forgotten,
}

impl Phase {
    /// Whether slots may still be granted under it.
    pub(super) const fn is_live(self) -> bool {
        matches!(self, Self::Open | Self::Sealed)
    }
}

/// A grant with its slots at each holder, and what became of them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Slab {
    pub(super) grant: Grant,
    pub(super) expires_at: LogTime,
    pub(super) phase: Phase,
    /// Slots from here on take no frame; all slots until the grant is sealed.
    pub(super) fill: SlotCount,
    /// Per holder of the grant, in its order.
    pub(super) slots: Vec<Row>,
    /// What became of slots; when the grant is forgotten only those that are copies stay.
    pub(super) records: CowArc<Records>,
}

impl Slab {
    pub(super) fn slot(&self, holder: usize, slot: SlotIndex) -> Option<Slot> {
        self.slots.get(holder)?.get(slot.0 as usize).copied()
    }
    pub(super) fn extent(holder: &GrantHolder) -> ExtentId {
        ExtentId { region: holder.region, index: holder.extent }
    }
    fn has(&self, wanted: impl Fn(Slot) -> bool, below: SlotCount) -> bool {
        self.slots.iter().any(|slots| slots.iter().take(below.0 as usize).any(|slot| wanted(*slot)))
    }
    /// At how many holders this slot is a copy of a current version.
    pub(super) fn copies(&self, slot: SlotIndex) -> usize {
        let committed = |holder: &usize| matches!(self.slot(*holder, slot), Some(Slot::Committed { .. }));
        (0..self.slots.len()).filter(committed).count()
    }
    /// Whether a slot of it is a copy: of a current version, or of one that is pinned.
    pub(super) fn has_copies(&self) -> bool {
        self.has(Slot::is_copy, self.grant.slots)
    }
    pub(super) const fn view(&self) -> GrantView<'_> {
        GrantView {
            grant: &self.grant,
            expires_at: self.expires_at,
            fill: self.fill,
            phase: match self.phase {
                Phase::Open => GrantPhase::Open,
                Phase::Sealed => GrantPhase::Sealed,
                Phase::Closed { .. } => GrantPhase::Closed,
                Phase::Expired { .. } => GrantPhase::Expired,
                Phase::Forgotten => GrantPhase::Forgotten,
            },
        }
    }
}

/// A grant as it is now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GrantView<'a> {
    /// What was granted.
    pub grant: &'a Grant,
    /// When it expires, or would have.
    pub expires_at: LogTime,
    /// Slots from here on take no frame.
    pub fill: SlotCount,
    /// Where it is in its life.
    pub phase: GrantPhase,
}

/// Where a grant is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GrantPhase {
    /// The writer may take slots.
    Open,
    /// The writer takes no slots at or above the fill mark.
    Sealed,
    /// Every slot below the fill mark was answered.
    Closed,
    /// Its TTL is over.
    Expired,
    /// Its outcomes are forgotten; slots of it are still copies.
    Forgotten,
}

/// Where a slot goes when it leaves its slab.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Leave {
    /// To rest until then: it may have been read.
    Rest(LogTime),
    /// Free at once: it was never readable.
    Free,
    /// Nowhere: the caller frees the whole extent.
    Void,
}

/// Smallest slot: a header with the shortest key.
pub(super) const SLOT_BYTES_MIN: u32 = 128;
const _: () = assert!(header_bytes(1) == SLOT_BYTES_MIN as usize);

impl Shard {
    pub(super) fn grant_slab(
        &mut self,
        meta: NodeId,
        asked: &GrantRequest,
        holders: &[Proposed],
    ) -> Result<Grant, GrantRefusal> {
        match self.requests.look(self.now, self.settings.outcome_kept, asked.request)? {
            Some(RequestOutcome::Grant(grant)) => return Ok(grant.clone()),
            Some(RequestOutcome::Delete(_) | RequestOutcome::Pin(_) | RequestOutcome::Renew(_)) => {
                return Err(RequestRefusal::Taken.into());
            }
            None => {}
        }
        self.admit_request(asked, holders.len())?;
        let chosen = self.admit_places(slab_bytes(asked), holders)?;
        let policy = self.namespaces[&asked.namespace].policy;
        let grant = self.give(Grant {
            id: self.next_grant(),
            meta,
            purpose: Purpose::Write,
            writer: asked.writer,
            namespace: asked.namespace,
            class: policy.class,
            least: policy.least,
            slot_size: asked.slot_size,
            slots: asked.slots,
            ttl: asked.ttl,
            holders: chosen,
        });
        self.requests.record(asked.request, RequestOutcome::Grant(grant.clone()));
        Ok(grant)
    }

    /// The holders with slabs of `bytes` at these places, if all of them are free and can be used.
    pub(super) fn admit_places(&self, bytes: u64, holders: &[Proposed]) -> Result<Vec<GrantHolder>, GrantRefusal> {
        let mut nodes = BTreeSet::new();
        let mut chosen = Vec::with_capacity(holders.len());
        for Proposed { extent, base } in holders.iter().copied() {
            if !nodes.insert(extent.region.node) {
                return Err(GrantRefusal::SameNode { node: extent.region.node });
            }
            let held = self.extents.get(&extent).ok_or(GrantRefusal::NotLent { extent })?;
            let region = self.regions.get(&extent.region).filter(|region| region.up);
            let region = region.ok_or(GrantRefusal::RegionDown { region: extent.region })?;
            if !held.is_inside(base.0, bytes) || !base.0.is_multiple_of(FRAME_ALIGN as u64) {
                return Err(GrantRefusal::OutsideExtent { extent, base, bytes });
            }
            if !held.free.contains(base.0, bytes) {
                return Err(GrantRefusal::NotFree { extent, base });
            }
            let (incarnation, lend) = (region.incarnation, held.lend);
            chosen.push(GrantHolder { region: extent.region, incarnation, extent: extent.index, lend, base });
        }
        Ok(chosen)
    }

    /// The name of the next grant.
    pub(super) const fn next_grant(&self) -> GrantId {
        let number = self.sequence_last + 1;
        GrantId { shard: self.id, sequence: Ordinal { generation: self.generation, number } }
    }

    /// Takes the places of a grant, which must be free, and takes it on.
    pub(super) fn give(&mut self, grant: Grant) -> Grant {
        self.sequence_last = grant.id.sequence.number;
        for holder in &grant.holders {
            let extent = self.extents.get_mut(&Slab::extent(holder)).expect("its places were admitted");
            assert!(
                extent.free.take(holder.base.0, grant.slab_bytes()),
                "Fresh space: its places were admitted as free"
            );
        }
        if grant.writer != WriterId::HOLDERS {
            self.has_place(&grant);
        }
        self.take_on(grant.clone());
        grant
    }

    fn take_on(&mut self, grant: Grant) {
        let id = grant.id.sequence;
        let expires_at = self.now.after(grant.ttl);
        *self.used.entry(grant.namespace).or_default() += grant.slab_bytes() * grant.holders.len() as u64;
        self.writers.insert((grant.writer, id));
        self.deadlines.insert((expires_at, Deadline::Expire(id)));
        let row = Row::new(vec![Slot::Granted; grant.slots.0 as usize]);
        let slots = vec![row; grant.holders.len()];
        let (fill, records) = (grant.slots, CowArc::new(Records::default()));
        self.slabs.insert(id, CowArc::new(Slab { grant, expires_at, phase: Phase::Open, fill, slots, records }));
    }

    /// The policy of a slab's namespace, if there can be such a slab.
    pub(super) fn admit_slab(&self, asked: MoveRequest) -> Result<Policy, GrantRefusal> {
        let Some(namespace) = self.namespaces.get(&asked.namespace) else {
            return Err(GrantRefusal::UnknownNamespace { namespace: asked.namespace, position: self.feed });
        };
        let size = asked.slot_size.0;
        if size < SLOT_BYTES_MIN || u64::from(size) > EXTENT_BYTES || !(size as usize).is_multiple_of(FRAME_ALIGN) {
            return Err(GrantRefusal::SlotSize { least: SLOT_BYTES_MIN, most: EXTENT_BYTES, found: asked.slot_size });
        }
        if asked.slots.0 == 0 || asked.slots.0 > SLOTS_PER_SLAB_MAX {
            return Err(GrantRefusal::Slots { most: SLOTS_PER_SLAB_MAX, found: asked.slots });
        }
        if millis(asked.ttl) == 0 || asked.ttl > GRANT_TTL_MAX || !asked.ttl.subsec_nanos().is_multiple_of(1_000_000) {
            return Err(GrantRefusal::Ttl { most: GRANT_TTL_MAX, found: asked.ttl });
        }
        Ok(namespace.policy)
    }

    /// What can be said of a request before holders are looked at; the planner asks it too.
    pub(super) fn admit_request(&self, asked: &GrantRequest, holders: usize) -> Result<(), GrantRefusal> {
        let GrantRequest { namespace, slot_size, slots, ttl, .. } = *asked;
        let policy = self.admit_slab(MoveRequest { namespace, slot_size, slots, ttl })?;
        let (least, most) = (policy.least.max(1), policy.copies);
        if holders < usize::from(least) || holders > usize::from(most) {
            let found = u32::try_from(holders).unwrap_or(u32::MAX);
            return Err(GrantRefusal::Holders { least, most, found });
        }
        self.admit_quota(asked.namespace, slab_bytes(asked) * holders as u64, 0)
    }

    /// Whether `asked` more bytes are within the namespace's share of this shard, `planned` counted as used.
    pub(super) fn admit_quota(&self, namespace: NamespaceId, asked: u64, planned: u64) -> Result<(), GrantRefusal> {
        let Some((limit, _)) = self.quota_of(namespace) else { return Ok(()) };
        let used = self.used.get(&namespace).copied().unwrap_or(0).saturating_add(planned);
        if used.saturating_add(asked) > limit {
            let is_cache = self.namespaces.get(&namespace).is_some_and(|known| known.policy.class == Class::Cache);
            return Err(GrantRefusal::Quota { limit, used, asked, comes_back: is_cache && asked <= limit });
        }
        Ok(())
    }

    /// The namespace's share of this shard, and its copies; none if it has no quota.
    pub(super) fn quota_of(&self, namespace: NamespaceId) -> Option<(u64, u8)> {
        let policy = self.namespaces.get(&namespace)?.policy;
        Some((policy.quota_bytes?.div_ceil(u64::from(self.settings.shards)), policy.copies))
    }

    pub(super) fn seal(&mut self, grant: GrantId, fill: SlotCount) -> Result<SlotCount, SealRefusal> {
        let id = grant.sequence;
        let known = self.slabs.get_mut(&id).filter(|slab| slab.grant.id == grant && slab.phase != Phase::Forgotten);
        let slab = known.ok_or(SealRefusal::UnknownGrant { grant })?;
        if fill > slab.grant.slots {
            return Err(SealRefusal::BeyondSlab { slots: slab.grant.slots, found: fill });
        }
        if slab.phase == Phase::Open {
            slab.phase = Phase::Sealed;
            slab.fill = fill;
            self.close_if_done(id);
        }
        Ok(self.slabs[&id].fill)
    }

    /// Closes the grant once no slot below its fill mark is granted: the tail, never filled, is free at once.
    pub(super) fn close_if_done(&mut self, id: Ordinal) {
        let Some(slab) = self.slabs.get(&id).filter(|slab| slab.phase.is_live()) else { return };
        if slab.has(|slot| slot == Slot::Granted, slab.fill) {
            return;
        }
        self.end(id, Phase::Closed { at: self.now }, Leave::Free);
    }

    /// The TTL is over: what was not committed rests, since it may have been written until now.
    pub(super) fn expire(&mut self, id: Ordinal) {
        self.end(
            id,
            Phase::Expired { at: self.now },
            Leave::Rest(self.horizon.max(self.now).after(self.settings.quarantine)),
        );
    }

    fn end(&mut self, id: Ordinal, phase: Phase, granted: Leave) {
        let slab = self.slabs.get_mut(&id).expect("only a grant that is there ends");
        slab.phase = phase;
        slab.records.shrink();
        self.warm.ended(slab, self.now);
        let (expires_at, writer, slots, holders) =
            (slab.expires_at, slab.grant.writer, slab.grant.slots, slab.grant.holders.len());
        self.deadlines.remove(&(expires_at, Deadline::Expire(id)));
        self.deadlines.insert((self.now.after(self.settings.outcome_kept), Deadline::Forget(id)));
        self.writers.remove(&(writer, id));
        for holder in 0..holders {
            let granted_at = |slot: &u32| self.slabs[&id].slot(holder, SlotIndex(*slot)) == Some(Slot::Granted);
            let slots: Vec<u32> = (0..slots.0).filter(granted_at).collect();
            // Neighbours leave together: a slab that nobody wrote to is one span.
            for run in slots.chunk_by(|one, next| one + 1 == *next) {
                self.leave_together(id, holder, run, granted);
            }
        }
    }

    /// Takes neighbouring slots of one holder, none of them gone, out of their slab. The caller looks after keys, records and the end of the
    /// grant.
    pub(super) fn leave_together(&mut self, id: Ordinal, holder: usize, run: &[u32], to: Leave) {
        let slab = self.slabs.get_mut(&id).expect("slots that leave are in a slab that is there");
        let leaves = run.iter().filter_map(|slot| {
            match std::mem::replace(&mut slab.slots[holder][*slot as usize], Slot::Gone) {
                Slot::Committed { batch, .. } | Slot::Pinned { batch, .. } => Some(batch),
                Slot::Granted | Slot::Gone => None,
            }
        });
        let leaves: Vec<BatchRef> = leaves.collect();
        for batch in leaves {
            self.release_leaf(batch);
        }
        let slab = &self.slabs[&id];
        let at = slab.grant.holders[holder];
        let Offset(start) = slab.grant.offset(&at, SlotIndex(run[0])).expect("the slab has this slot");
        let bytes = u64::from(slab.grant.slot_size.0) * run.len() as u64;
        let namespace = slab.grant.namespace;
        self.give_back_quota(namespace, bytes);
        self.put(Slab::extent(&at), start, bytes, to);
    }

    /// What becomes of bytes that left a slab.
    fn put(&mut self, extent: ExtentId, start: u64, bytes: u64, to: Leave) {
        match to {
            Leave::Rest(until) => self.rest(extent, start, bytes, until),
            Leave::Free => {
                let held = self.extents.get_mut(&extent);
                held.expect("a live slot lies in an extent that is held").free.put(start, bytes);
            }
            Leave::Void => {}
        }
    }

    /// Outcomes are kept no longer; the slab stays while a slot of it is a copy.
    pub(super) fn forget(&mut self, id: Ordinal) {
        let slab = self.slabs.get_mut(&id).expect("a deadline to forget names a slab that is there");
        slab.phase = Phase::Forgotten;
        let slots = slab.slots.clone();
        let copied =
            |slot: SlotIndex| slots.iter().any(|at| at.get(slot.0 as usize).is_some_and(|state| state.is_copy()));
        slab.records.retain(copied);
        self.drop_if_empty(id);
    }

    /// Removes a forgotten slab without a copy.
    pub(super) fn drop_if_empty(&mut self, id: Ordinal) {
        if self.slabs.get(&id).is_some_and(|slab| slab.phase == Phase::Forgotten && !slab.has_copies()) {
            self.slabs.remove(&id);
        }
    }

    /// Takes one slot of one holder out of its slab. The caller looks after keys, records and the end of the grant.
    pub(super) fn leave(&mut self, id: Ordinal, holder: usize, slot: SlotIndex, to: Leave) {
        let slab = self.slabs.get_mut(&id).expect("a slot that leaves is in a slab that is there");
        let place = &mut slab.slots[holder][slot.0 as usize];
        let was = std::mem::replace(place, Slot::Gone);
        let at = slab.grant.holders[holder];
        let bytes = u64::from(slab.grant.slot_size.0);
        let Offset(start) = slab.grant.offset(&at, slot).expect("the slab has this slot");
        let namespace = slab.grant.namespace;
        match was {
            Slot::Gone => return,
            Slot::Granted => {}
            Slot::Committed { batch, .. } | Slot::Pinned { batch, .. } => self.release_leaf(batch),
        }
        self.give_back_quota(namespace, bytes);
        self.put(Slab::extent(&at), start, bytes, to);
    }

    fn give_back_quota(&mut self, namespace: NamespaceId, bytes: u64) {
        let used = self.used.get_mut(&namespace).expect("what is in use was counted");
        *used -= bytes;
        if *used == 0 {
            self.used.remove(&namespace);
        }
    }

    /// Every copy of this slot, granted or committed, rests: the frame is not wanted any more, and may have been read. A copy that is pinned
    /// stays until its last pin ends.
    pub(super) fn rest_slot(&mut self, id: Ordinal, slot: SlotIndex) {
        let Some(slab) = self.slabs.get(&id) else { return };
        let until = self.rest_until(slab);
        let is_pinned = self.is_pinned(ValueRef::new(id, slot));
        for holder in 0..slab.grant.holders.len() {
            if !(is_pinned && self.keep(id, holder, slot)) {
                self.leave(id, holder, slot, Leave::Rest(until));
            }
        }
    }

    /// A copy stays where it is though its version is not current any more; false if there is none.
    fn keep(&mut self, id: Ordinal, holder: usize, slot: SlotIndex) -> bool {
        let slab = self.slabs.get_mut(&id).expect("a copy that stays is in a slab that is there");
        let place = &mut slab.slots[holder][slot.0 as usize];
        if let Slot::Committed { batch, leaf } = *place {
            *place = Slot::Pinned { batch, leaf };
        }
        place.is_copy()
    }

    /// The grant of this name, while its outcomes are kept.
    #[must_use]
    pub fn grant(&self, grant: GrantId) -> Option<GrantView<'_>> {
        let slab = self.slabs.get(&grant.sequence)?;
        (slab.grant.id == grant && slab.phase != Phase::Forgotten).then(|| slab.view())
    }

    /// Bytes granted and committed per namespace, as the state implies them.
    pub(super) fn used_of_state(&self) -> BTreeMap<NamespaceId, u64> {
        let mut used = BTreeMap::new();
        for slab in self.slabs.values() {
            let live = slab.slots.iter().flatten().filter(|slot| **slot != Slot::Gone).count() as u64;
            if live > 0 {
                *used.entry(slab.grant.namespace).or_default() += live * u64::from(slab.grant.slot_size.0);
            }
        }
        used
    }
}

pub(super) fn slab_bytes(asked: &GrantRequest) -> u64 {
    u64::from(asked.slots.0) * u64::from(asked.slot_size.0)
}

// A grant's TTL travels in milliseconds.
const _: () = assert!(GRANT_TTL_MAX.as_millis() <= u32::MAX as u128 && Duration::from_millis(1).as_millis() == 1);
