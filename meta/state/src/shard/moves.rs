//! Moves: a value goes from its slot to a slot of another slab, at the same nodes, so that the memory that it leaves can be used as a whole.
//!
//! A grant for moves is a grant like all others, except for its writer: each holder writes its own memory. A commit under it
//! ([`Mode::Move`]) names the place that it takes the value from, and applies only if the key's current value is that very frame there, no pin
//! is on it (its readers know its place), and as many holders vouch for the new copies as have one now. The version stays, so nobody who
//! compares sees a difference; the slots that are left rest like those of a replaced value, so leases on the old place hold (*Leases hold*).
//! What was recorded for the place that was left stays as it is (*Idempotent commits*).
//!
//! What to move, and where to, is planned here too, and is not part of apply: the leader proposes it ([`Shard::plan_move`],
//! [`Shard::sparse_extent`]).

use super::{
    CommitEntry, CommitOutcome, CommitRefusal, Committed, GrantRefusal, Mode, MoveRequest, Proposed, Resolved,
    ResolvedCopy, Shard, ShardCommand, ValuePlace, ValueRef,
    grants::{Phase, Slab, Slot},
};
use crate::cow_arc::CowArc;
use quarry_wire::{
    grant::{Grant, Purpose},
    ids::{ExtentId, GrantId, NamespaceId, NodeId, SlotIndex, WriterId},
    key::Key,
    limits::{COMMAND_BYTES_MAX, GRANT_TTL_MAX, SLOTS_PER_SLAB_MAX},
    units::{LogTime, Offset, SlotCount, SlotSize},
};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes that one grant for moves has at most at one holder, unless a single slot has more: what a holder copies in one go.
const MOVE_BYTES_MAX: u64 = 8 << 20;
/// Bytes of the entries of one grant: they are published by one command, beside the holders' signatures.
const MOVE_ENTRIES_BYTES: usize = COMMAND_BYTES_MAX * 3 / 4;
/// What an entry takes beside its key.
const MOVE_ENTRY_BYTES: usize = 112;

/// A value and where it is written down.
type Movable = (ValuePlace, Resolved);

/// One grant for moves as it can be proposed, and what is to be published under it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlannedMove {
    /// The command that grants it.
    pub command: ShardCommand,
    /// What goes to which slot, in the order of the slots.
    pub entries: Vec<CommitEntry>,
    /// Where the value of each entry lies now; each at the same nodes.
    pub from: Vec<Vec<ResolvedCopy>>,
}

/// Which extent is to be made free, and from where values may go whither.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Sought {
    /// Somebody found no place for a slot of so many bytes.
    pub wanted: Option<u64>,
    /// Nodes of which other shards need an extent.
    pub asked: BTreeSet<NodeId>,
    /// Nodes that are not heard.
    pub avoid: BTreeSet<NodeId>,
    /// Extents of which nothing could be moved lately.
    pub stuck: BTreeSet<ExtentId>,
    /// Extents that nothing is to be put in.
    pub aside: BTreeSet<ExtentId>,
}

/// An extent with few live bytes, and what is to be moved so that it becomes free.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sparse {
    /// The extent.
    pub extent: ExtentId,
    /// Its live bytes.
    pub live_bytes: u64,
    /// The values that have a copy in it.
    pub values: Vec<ValuePlace>,
}

impl Shard {
    pub(super) fn grant_move(
        &mut self,
        meta: NodeId,
        asked: MoveRequest,
        holders: &[Proposed],
    ) -> Result<Grant, GrantRefusal> {
        let policy = self.admit_slab(asked)?;
        if holders.is_empty() || holders.len() > usize::from(policy.copies) {
            let found = u32::try_from(holders.len()).unwrap_or(u32::MAX);
            return Err(GrantRefusal::Holders { least: 1, most: policy.copies, found });
        }
        // No quota: what is moved is in two places only for a while.
        let MoveRequest { namespace, slot_size, slots, ttl } = asked;
        let chosen = self.admit_places(u64::from(slots.0) * u64::from(slot_size.0), holders)?;
        Ok(self.give(Grant {
            id: self.next_grant(),
            meta,
            purpose: Purpose::Move,
            writer: WriterId::HOLDERS,
            namespace,
            class: policy.class,
            least: 1,
            slot_size,
            slots,
            ttl,
            holders: chosen,
        }))
    }

    pub(super) fn judge_move(
        &self,
        namespace: NamespaceId,
        entry: &CommitEntry,
        from: ValuePlace,
        counting: usize,
    ) -> CommitOutcome {
        let Some((slab, value)) = self.current_at(namespace, &entry.key, from) else {
            return Err(CommitRefusal::NotCurrent { current: self.version(namespace, &entry.key) });
        };
        if !slab.records.get(&from.slot).is_some_and(|record| record.is_same_frame(entry)) {
            return Err(CommitRefusal::NotCurrent { current: self.version(namespace, &entry.key) });
        }
        if self.is_pinned(value) {
            return Err(CommitRefusal::Pinned);
        }
        let needed = slab.copies(from.slot).max(1);
        if counting < needed {
            let count = |number: usize| u8::try_from(number).unwrap_or(u8::MAX);
            return Err(CommitRefusal::NotEnoughHolders { needed: count(needed), attested: count(counting) });
        }
        Ok(Committed::Applied)
    }

    /// The slab of the key's current value, if that is written down at `from`.
    fn current_at(&self, namespace: NamespaceId, key: &Key, from: ValuePlace) -> Option<(&Slab, ValueRef)> {
        let value = ValueRef::new(from.grant.sequence, from.slot);
        let slab = self.slabs.get(&value.grant()).filter(|slab| slab.grant.id == from.grant)?;
        (self.values.get(&(namespace, key.clone())) == Some(&value)).then_some((slab, value))
    }

    /// Where the current value of `key` is written down.
    #[must_use]
    pub fn place_of(&self, namespace: NamespaceId, key: &Key) -> Option<ValuePlace> {
        let value = self.values.get(&(namespace, key.clone()))?;
        Some(ValuePlace { grant: self.slabs.get(&value.grant())?.grant.id, slot: value.slot })
    }

    /// Where the values of a slab that are current are written down.
    #[must_use]
    pub fn places_in(&self, grant: GrantId) -> Vec<ValuePlace> {
        let known = self.slabs.get(&grant.sequence).filter(|slab| slab.grant.id == grant);
        known.into_iter().flat_map(|slab| slab.values()).map(|(slot, _)| ValuePlace { grant, slot }).collect()
    }

    /// The current value that is written down at `place`, if it may be moved.
    fn movable(&self, place: ValuePlace) -> Option<Resolved> {
        let value = ValueRef::new(place.grant.sequence, place.slot);
        let found = self.resolved(value)?;
        let (_, value) = self.current_at(found.namespace, &found.key, place)?;
        (!self.is_pinned(value) && !found.copies.is_empty()).then_some(found)
    }

    /// Plans one grant that takes as many of `values` as it can: those that have slots of one size at the same nodes. They go to extents of
    /// these nodes that are not among `away`, the fullest first, so that what is empty stays empty. `avoid`: nodes that the leader does not
    /// hear. None if none of the values is where it was said to be, free of pins, and has room elsewhere.
    #[must_use]
    pub fn plan_move(
        &self,
        meta: NodeId,
        at: LogTime,
        values: &[ValuePlace],
        away: &BTreeSet<ExtentId>,
        avoid: &BTreeSet<NodeId>,
    ) -> Option<PlannedMove> {
        let mut groups: BTreeMap<(NamespaceId, SlotSize, Vec<NodeId>), Vec<Movable>> = BTreeMap::new();
        for place in values.iter().copied() {
            let Some(mut found) = self.movable(place) else { continue };
            found.copies.sort_by_key(|copy| copy.region.node);
            let nodes: Vec<NodeId> = found.copies.iter().map(|copy| copy.region.node).collect();
            if !nodes.iter().any(|node| avoid.contains(node)) {
                let size = found.copies[0].slot_size;
                groups.entry((found.namespace, size, nodes)).or_default().push((place, found));
            }
        }
        groups.into_iter().find_map(|((namespace, slot_size, nodes), mut group)| {
            group.truncate(most_slots(slot_size, &group));
            let (slots, holders) = self.move_places(at, slot_size, group.len(), &nodes, away)?;
            group.truncate(slots.0 as usize);
            let asked = MoveRequest { namespace, slot_size, slots, ttl: GRANT_TTL_MAX };
            let command = ShardCommand::GrantMove { meta, asked, holders };
            let (entries, from) = (0..).map(SlotIndex).zip(group).map(|(slot, it)| move_entry(slot, it)).unzip();
            Some(PlannedMove { command, entries, from })
        })
    }

    /// Places for as many slots as fit, `most` of them at best, at each of the nodes.
    fn move_places(
        &self,
        at: LogTime,
        slot_size: SlotSize,
        most: usize,
        nodes: &[NodeId],
        away: &BTreeSet<ExtentId>,
    ) -> Option<(SlotCount, Vec<Proposed>)> {
        let mut slots = u32::try_from(most).ok()?;
        while slots > 0 {
            let bytes = u64::from(slots) * u64::from(slot_size.0);
            let holders: Option<Vec<Proposed>> =
                nodes.iter().map(|node| self.move_place(at, bytes, *node, away)).collect();
            if let Some(holders) = holders {
                return Some((SlotCount(slots), holders));
            }
            slots /= 2;
        }
        None
    }

    fn move_place(&self, at: LogTime, bytes: u64, node: NodeId, away: &BTreeSet<ExtentId>) -> Option<Proposed> {
        let is_usable = |extent: &ExtentId| {
            extent.region.node == node
                && !away.contains(extent)
                && self.regions.get(&extent.region).is_some_and(|region| region.up)
        };
        let mut fullest: Vec<_> = self.extents.iter().filter(|(extent, _)| is_usable(extent)).collect();
        fullest.sort_by_key(|(extent, held)| (held.free.total(), **extent));
        let place = |extent: ExtentId, base: u64| Proposed { extent, base: Offset(base) };
        let cold = fullest.iter().find_map(|(extent, held)| {
            Some(place(**extent, self.warm.first_cold_fit(**extent, &held.free, bytes, at)?))
        });
        cold.or_else(|| fullest.iter().find_map(|(extent, held)| Some(place(**extent, held.free.first_fit(bytes)?))))
    }

    /// The extent to make free next, if a node needs one: it has none that is free, or will be once what rests is, though what is free in it
    /// would make two; or others need one of it; or somebody found no place there, though it has so much free, but not in one place. The extent
    /// is the one with the fewest live bytes whose grants have all ended, without a pin on a value of it, if the node's other extents have that
    /// much free. Walks over all slabs if there is a need: not for every call.
    #[must_use]
    pub fn sparse_extent(&self, sought: &Sought) -> Option<Sparse> {
        let Sought { wanted, asked, avoid, stuck, aside } = sought;
        let mut nodes: BTreeMap<NodeId, Vec<ExtentId>> = BTreeMap::new();
        for extent in self.extents.keys().filter(|extent| !avoid.contains(&extent.region.node)) {
            if self.regions.get(&extent.region).is_some_and(|region| region.up) {
                nodes.entry(extent.region.node).or_default().push(*extent);
            }
        }
        let mut candidates: Vec<(u64, ExtentId)> = Vec::new();
        let needs =
            |(node, extents): &(&NodeId, &Vec<ExtentId>)| self.needs_extent(extents, *wanted, asked.contains(node));
        for (_, extents) in nodes.iter().filter(needs) {
            let free_in =
                |extent: &ExtentId| if aside.contains(extent) { 0 } else { self.extents[extent].free.total() };
            let free: u64 = extents.iter().map(free_in).sum();
            candidates.extend(extents.iter().filter_map(|extent| {
                let held = &self.extents[extent];
                let live = held.live_bytes();
                let fits = live > 0 && free - free_in(extent) >= live && !stuck.contains(extent);
                fits.then_some((live, *extent))
            }));
        }
        if candidates.is_empty() {
            return None;
        }
        let held_fast = self.held_fast();
        let (live_bytes, extent) = candidates.into_iter().filter(|(_, extent)| !held_fast.contains(extent)).min()?;
        let lies_in = |slab: &Slab| slab.grant.holders.iter().position(|holder| Slab::extent(holder) == extent);
        let values = self.slabs.values().filter_map(|slab| Some((slab, lies_in(slab)?))).flat_map(|(slab, holder)| {
            let copies = (0..).map(SlotIndex).zip(&slab.slots[holder]);
            let current = copies.filter(|(_, slot)| matches!(slot, Slot::Committed { .. }));
            current.map(|(slot, _)| ValuePlace { grant: slab.grant.id, slot })
        });
        Some(Sparse { extent, live_bytes, values: values.collect() })
    }

    fn needs_extent(&self, extents: &[ExtentId], wanted: Option<u64>, is_asked: bool) -> bool {
        let held = || extents.iter().map(|extent| &self.extents[extent]);
        let comes = held().any(|held| held.live_bytes() == 0);
        let free: u64 = held().map(|held| held.free.total()).sum();
        let largest = held().map(|held| held.bytes).max().unwrap_or(0);
        let misses = |bytes: u64| free >= bytes && held().all(|held| held.free.first_fit(bytes).is_none());
        !comes && (is_asked || free >= 2 * largest || wanted.is_some_and(misses))
    }

    /// Extents that cannot be emptied by moving: a grant that lasts has a slab there, or a slab there has a value that is pinned.
    fn held_fast(&self) -> BTreeSet<ExtentId> {
        let stays = |slab: &&CowArc<Slab>| {
            matches!(slab.phase, Phase::Open | Phase::Sealed) || self.has_pinned_values(slab.grant.id.sequence)
        };
        self.slabs.values().filter(stays).flat_map(|slab| slab.grant.holders.iter().map(Slab::extent)).collect()
    }
}

/// How many of these values go under one grant.
fn most_slots(slot_size: SlotSize, group: &[Movable]) -> usize {
    let by_bytes = (MOVE_BYTES_MAX / u64::from(slot_size.0)).clamp(1, u64::from(SLOTS_PER_SLAB_MAX));
    let mut room = MOVE_ENTRIES_BYTES;
    let fits = |(_, found): &&Movable| {
        let bytes = MOVE_ENTRY_BYTES + found.key.as_bytes().len();
        let fits = bytes <= room;
        room = room.saturating_sub(bytes);
        fits
    };
    group.iter().take(usize::try_from(by_bytes).unwrap_or(usize::MAX)).take_while(fits).count()
}

fn move_entry(slot: SlotIndex, (from, found): Movable) -> (CommitEntry, Vec<ResolvedCopy>) {
    let Resolved { key, version, kind, payload_bytes, payload_crc, copies, .. } = found;
    (CommitEntry { slot, key, version, kind, payload_bytes, payload_crc, mode: Mode::Move { from } }, copies)
}
