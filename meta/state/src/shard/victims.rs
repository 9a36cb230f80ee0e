//! Victims: which slabs a leader proposes to evict. Pure, but not part of apply: the leader alone knows what was leased when, and replicas only
//! validate (`evict.rs`).
//!
//! Least recently used first: the last lease of a slab, or its grant if that was later; ties go by age. What is asked for decides how many go:
//! a node below its low-water mark is brought to its high-water mark, a namespace at its quota loses slabs of its own, and whoever found no
//! room in one piece gets the piece whose clearing costs the least recently used slabs. Memory that rests counts as free: it comes back by
//! itself, so nothing is evicted twice for one need.

use super::{
    Shard,
    grants::{Row, Slab},
    plan::ROOM_PARTS,
    space::Ranges,
};
use crate::{
    cow_arc::CowArc,
    lending::{LEAVES_FOR_SHORT, SHORT_BELOW},
};
use quarry_wire::{
    grant::Class,
    ids::{ExtentId, GrantId, NamespaceId, NodeId, Ordinal, SlotIndex},
    units::{LogTime, Offset, SlotSize, millis},
};
use std::collections::{BTreeMap, BTreeSet};

/// No more than this of a quota is kept free ahead, in bytes: a large namespace does not lose an eighth of its values for that.
const QUOTA_AHEAD_MAX: u64 = 1 << 30;

/// Room for so many slots of the size that was lacking is kept ahead, if the marks ask for no less: pieces cost more than room.
const PIECES_AHEAD: u64 = 16;

/// The highest marks where there are several shards, in thousandths.
const LOW_MAX: u16 = 125;
const HIGH_MAX: u16 = 200;
// Who evicts is one that the others take for short: values do not go while others have something empty.
const _: () = assert!(LOW_MAX as u64 * SHORT_BELOW <= 1000);
// Nor for slots that are granted and never used.
const _: () = assert!(LOW_MAX as u64 * ROOM_PARTS <= 1000);
// What eviction makes is too little to be given away: two shards do not give each other what they have just evicted.
const _: () = assert!(HIGH_MAX as u64 * LEAVES_FOR_SHORT <= 1000);

/// When eviction begins on a node and when it is enough, in thousandths of the bytes that the node lends to the shard; the same of what a quota
/// allows in the shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Marks {
    /// Below this much free or resting memory it begins.
    pub low: u16,
    /// With this much it is enough; above `low`.
    pub high: u16,
}

impl Marks {
    /// The highest marks that a cluster of so many shards may have: where there are several, others must see what a shard that evicts lacks, and
    /// leave it what it makes.
    #[must_use]
    pub const fn most(shards: u32) -> Self {
        if shards == 1 { Self { low: 999, high: 1000 } } else { Self { low: LOW_MAX, high: HIGH_MAX } }
    }
}

impl Default for Marks {
    /// From an eighth up to three sixteenths.
    fn default() -> Self {
        Self { low: 125, high: 188 }
    }
}

/// Somebody found no room.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Lack {
    /// For a slab of this namespace.
    pub namespace: NamespaceId,
    /// Of one slot of this size.
    pub slot_size: SlotSize,
}

/// What victims are chosen for.
#[derive(Clone, Copy, Debug)]
pub struct Need<'a> {
    /// When room is made ahead, and how much.
    pub marks: Marks,
    /// Who found no room just now.
    pub lacks: &'a BTreeSet<Lack>,
    /// The largest slot that somebody found no place for lately. Then some room in pieces that hold such slots is kept as well: what is free in
    /// smaller ones would keep a node above its mark that has no place for them.
    pub wanted: Option<SlotSize>,
    /// Namespaces that had used up their quota lately: some of it is kept free ahead. Others lose nothing before they reach theirs.
    pub pressed: &'a BTreeSet<NamespaceId>,
    /// Nodes where the shard will have more without anything going, and the bytes of the largest extent that comes: what is lent to nobody, and
    /// what others give ([`crate::lending::coming`]). Nothing goes there, as far as that is large enough.
    pub coming: &'a BTreeMap<NodeId, u64>,
}

/// What one node has for a shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Room {
    /// Bytes lent.
    pub lent: u64,
    /// Bytes that are free.
    pub free: u64,
    /// Bytes that rest.
    pub resting: u64,
    /// Of both, what lies in pieces that are large enough for a slot that somebody found no place for lately; 0 if nobody did.
    pub in_pieces: u64,
}

impl Room {
    fn part(self, thousandths: u16) -> u64 {
        self.lent / 1000 * u64::from(thousandths)
    }
}

/// A slab that is to go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Victim {
    /// Its grant.
    pub grant: GrantId,
    /// Its last lease, or its grant if that was later.
    pub last_used: LogTime,
    /// Its slots at all holders together: what the eviction costs to apply.
    pub slots: u32,
    /// Bytes that its copies have.
    pub bytes: u64,
}

/// A slab that may go.
struct Candidate<'a> {
    id: Ordinal,
    last_used: LogTime,
    slab: &'a Slab,
    /// Bytes of copies per holder.
    bytes: Vec<u64>,
}

impl Candidate<'_> {
    fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }
}

impl Shard {
    /// What each node that is up has for this shard.
    #[must_use]
    pub fn room(&self) -> BTreeMap<NodeId, Room> {
        let mut rooms: BTreeMap<NodeId, Room> = BTreeMap::new();
        for (extent, held) in self.extents.iter().filter(|(extent, _)| self.is_up(**extent)) {
            let room = rooms.entry(extent.region.node).or_default();
            room.lent += held.bytes;
            room.free += held.free.total();
            room.resting += held.resting.values().map(|rest| rest.bytes).sum::<u64>();
        }
        rooms
    }

    /// What each of the rooms has in pieces that hold slots of this size, as far as they hold whole ones: what is free, joined with what rests
    /// beside it.
    fn in_pieces_of(&self, slot_size: SlotSize, rooms: &mut BTreeMap<NodeId, Room>) {
        let one = u64::from(slot_size.0).max(1);
        for (extent, held) in self.extents.iter().filter(|(extent, _)| self.is_up(**extent)) {
            if let Some(room) = rooms.get_mut(&extent.region.node) {
                room.in_pieces += held.coming().iter().map(|(_, bytes)| bytes / one * one).sum::<u64>();
            }
        }
    }

    fn is_up(&self, extent: ExtentId) -> bool {
        self.regions.get(&extent.region).is_some_and(|region| region.up)
    }

    /// The slabs that should go, in this order; none if there is room enough. `leased`: when a descriptor of a slab was last given with a
    /// lease, as far as the leader knows. Walks over all slabs unless there is room enough.
    #[must_use]
    pub fn victims(&self, need: Need<'_>, leased: impl Fn(Ordinal) -> LogTime) -> Vec<Victim> {
        let marks = self.marks_now(&need);
        let Need { lacks, wanted, pressed, coming, .. } = need;
        let mut rooms = self.room();
        if let Some(wanted) = wanted {
            self.in_pieces_of(wanted, &mut rooms);
        }
        let enough = wanted.map_or(0, |size| u64::from(size.0).saturating_mul(PIECES_AHEAD));
        let is_short = |room: &Room, mark: u16| {
            room.free + room.resting < room.part(mark) || room.in_pieces < room.part(mark).min(enough)
        };
        // What is freed on a drained node goes back to the directory: no value need go for it.
        let is_kept_roomy = |node: &NodeId| !coming.contains_key(node) && !self.drained.contains(node);
        let low = rooms.iter().filter(|(node, room)| is_short(room, marks.low) && is_kept_roomy(node));
        let mut short: BTreeSet<NodeId> = low.map(|(node, _)| *node).collect();
        let is_near =
            |namespace: &&NamespaceId| self.quota_left(**namespace, marks.low).is_some_and(|(left, low)| left < low);
        let near_quota: Vec<NamespaceId> = pressed.iter().filter(is_near).copied().collect();
        if short.is_empty() && lacks.is_empty() && near_quota.is_empty() {
            return Vec::new();
        }
        let candidates = self.candidates(leased);
        let mut chosen = BTreeSet::new();
        for namespace in near_quota {
            self.within_quota(namespace, marks, 0, &candidates, &mut chosen);
        }
        for lack in lacks {
            if let Some(one) = self.lacks_quota(*lack) {
                self.within_quota(lack.namespace, marks, one, &candidates, &mut chosen);
            }
            self.in_one_piece(*lack, &candidates, coming, &mut chosen);
        }
        let give = |rooms: &mut BTreeMap<NodeId, Room>, candidate: &Candidate<'_>| {
            for (holder, bytes) in candidate.slab.grant.holders.iter().zip(&candidate.bytes) {
                if let Some(room) = rooms.get_mut(&holder.region.node) {
                    room.resting += bytes;
                    room.in_pieces += bytes;
                }
            }
        };
        for candidate in candidates.iter().filter(|candidate| chosen.contains(&candidate.id)) {
            give(&mut rooms, candidate);
        }
        for candidate in &candidates {
            short.retain(|node| is_short(&rooms[node], marks.high));
            if short.is_empty() {
                break;
            }
            let on = candidate.slab.grant.holders.iter().zip(&candidate.bytes);
            if on.into_iter().any(|(holder, bytes)| *bytes > 0 && short.contains(&holder.region.node))
                && chosen.insert(candidate.id)
            {
                give(&mut rooms, candidate);
            }
        }
        let victims = candidates.iter().filter(|candidate| chosen.contains(&candidate.id));
        let slots = |slab: &Slab| slab.slots.iter().map(|slots| u32::try_from(slots.len()).unwrap_or(u32::MAX)).sum();
        let victim = |candidate: &Candidate<'_>| Victim {
            grant: candidate.slab.grant.id,
            last_used: candidate.last_used,
            slots: slots(candidate.slab),
            bytes: candidate.total(),
        };
        victims.map(victim).collect()
    }

    /// A shard that nobody writes to keeps no room, unless somebody found no place lately: others may use it meanwhile. A lone shard keeps its room
    /// for the next writer, for nobody else could use it.
    fn marks_now(&self, need: &Need<'_>) -> Marks {
        let keeps_room = self.is_written() || need.wanted.is_some() || self.settings.shards == 1;
        if keeps_room { need.marks } else { Marks { low: 0, high: 0 } }
    }

    /// What must go so that one extent of `node` is empty once it has rested, for another shard: all that lies in the extent whose last use
    /// is the longest ago. None if every extent of at least `least` bytes holds something that cannot go.
    #[must_use]
    pub fn victims_of_an_extent(
        &self,
        node: NodeId,
        least: u64,
        leased: impl Fn(Ordinal) -> LogTime,
    ) -> Option<(ExtentId, Vec<GrantId>)> {
        let here = |extent: &ExtentId| extent.region.node == node && self.is_up(*extent);
        /// What of an extent can go.
        #[derive(Default)]
        struct Going {
            bytes: u64,
            last_used: LogTime,
            slabs: Vec<GrantId>,
        }
        let mut going: BTreeMap<ExtentId, Going> = BTreeMap::new();
        for candidate in self.candidates(leased) {
            for (extent, _, bytes) in candidate.slab.spans_of_copies().into_iter().filter(|(extent, ..)| here(extent)) {
                let it = going.entry(extent).or_default();
                it.bytes += bytes;
                it.last_used = it.last_used.max(candidate.last_used);
                if it.slabs.last() != Some(&candidate.slab.grant.id) {
                    it.slabs.push(candidate.slab.grant.id);
                }
            }
        }
        let whole = going.into_iter().filter(|(extent, it)| self.extents[extent].live_bytes() == it.bytes);
        let large = whole.filter(|(extent, _)| self.extents[extent].bytes >= least);
        large.min_by_key(|(extent, it)| (it.last_used, *extent)).map(|(extent, it)| (extent, it.slabs))
    }

    /// Whether there is a slab of this grant, be it that only its outcomes are kept.
    #[must_use]
    pub fn has_slab(&self, grant: Ordinal) -> bool {
        self.slabs.contains_key(&grant)
    }

    /// Whether a slab of class `cache` could go now or once its grant or its pins end, with copies in an extent of at least `bytes`.
    pub(super) fn something_can_go(&self, bytes: u64, is_usable: impl Fn(ExtentId) -> bool) -> bool {
        let is_there =
            |extent: ExtentId| is_usable(extent) && self.extents.get(&extent).is_some_and(|held| held.bytes >= bytes);
        self.slabs.values().any(|slab| {
            slab.grant.class == Class::Cache
                && slab.grant.holders.iter().map(Slab::extent).any(is_there)
                && slab.has_copies()
        })
    }

    /// All slabs that may go, least recently used first.
    fn candidates(&self, leased: impl Fn(Ordinal) -> LogTime) -> Vec<Candidate<'_>> {
        let may_go = |(id, slab): &(&Ordinal, &CowArc<Slab>)| {
            slab.grant.class == Class::Cache && !slab.phase.is_live() && !self.has_pinned_values(**id)
        };
        let mut candidates: Vec<Candidate<'_>> = (self.slabs.iter().filter(may_go))
            .map(|(id, slab)| {
                let granted = LogTime(slab.expires_at.0.saturating_sub(millis(slab.grant.ttl)));
                let copies = |slots: &Row| slots.iter().filter(|slot| slot.is_copy()).count() as u64;
                let bytes = slab.slots.iter().map(|slots| copies(slots) * u64::from(slab.grant.slot_size.0)).collect();
                Candidate { id: *id, last_used: leased(*id).max(granted), slab, bytes }
            })
            .filter(|candidate| candidate.total() > 0)
            .collect();
        candidates.sort_by_key(|candidate| (candidate.last_used, candidate.id));
        candidates
    }

    /// The bytes that one value of this size takes of the namespace's quota, if they are more than is left of it in this shard; none if it can
    /// never fit.
    #[must_use]
    pub fn lacks_quota(&self, lack: Lack) -> Option<u64> {
        let (limit, copies) = self.quota_of(lack.namespace)?;
        let one = u64::from(lack.slot_size.0) * u64::from(copies);
        (one <= limit && self.admit_quota(lack.namespace, one, 0).is_err()).then_some(one)
    }

    /// What is left of a namespace's quota in this shard, and what `mark` asks for of it; none if it has no quota.
    fn quota_left(&self, namespace: NamespaceId, mark: u16) -> Option<(u64, u64)> {
        let (limit, _) = self.quota_of(namespace)?;
        let used = self.used.get(&namespace).copied().unwrap_or(0);
        let marked = u128::from(limit) * u128::from(mark) / 1000;
        Some((limit.saturating_sub(used), u64::try_from(marked).unwrap_or(u64::MAX).min(QUOTA_AHEAD_MAX)))
    }

    /// A namespace near its quota loses slabs of its own until `one` is left of it, and what the high mark asks for.
    fn within_quota(
        &self,
        namespace: NamespaceId,
        marks: Marks,
        one: u64,
        candidates: &[Candidate<'_>],
        chosen: &mut BTreeSet<Ordinal>,
    ) {
        let Some((left, high)) = self.quota_left(namespace, marks.high) else { return };
        // Ahead of need nothing goes that is more than is wanted: it may be all that the namespace has.
        let may_go = |candidate: &&Candidate<'_>| one > 0 || candidate.total() <= high;
        let own = || candidates.iter().filter(|candidate| candidate.slab.grant.namespace == namespace).filter(may_go);
        let going = own().filter(|candidate| chosen.contains(&candidate.id)).map(Candidate::total);
        let mut left = left.saturating_add(going.sum());
        for candidate in own() {
            if left >= one.max(high) {
                break;
            }
            if chosen.insert(candidate.id) {
                left = left.saturating_add(candidate.total());
            }
        }
    }

    /// Where no slot of this size fits, even when all has rested and come, on as many nodes as are needed: the slabs in the way of one, those that
    /// were used last as long ago as can be.
    fn in_one_piece(
        &self,
        lack: Lack,
        candidates: &[Candidate<'_>],
        coming: &BTreeMap<NodeId, u64>,
        chosen: &mut BTreeSet<Ordinal>,
    ) {
        let Some(namespace) = self.namespaces.get(&lack.namespace) else { return };
        let (bytes, needed) = (u64::from(lack.slot_size.0), usize::from(namespace.policy.least.max(1)));
        let mut nodes: BTreeMap<NodeId, BTreeMap<ExtentId, Ranges>> = BTreeMap::new();
        let may_hold = |extent: &ExtentId| self.is_open(extent.region);
        for (extent, held) in self.extents.iter().filter(|(extent, held)| held.bytes >= bytes && may_hold(extent)) {
            nodes.entry(extent.region.node).or_default().insert(*extent, held.coming());
        }
        let is_known = |node: &NodeId| self.regions.keys().any(|it| it.node == *node && self.is_open(*it));
        let come: BTreeSet<NodeId> = coming
            .iter()
            .filter(|(node, largest)| **largest >= bytes && is_known(node))
            .map(|(node, _)| *node)
            .collect();
        nodes.retain(|node, _| !come.contains(node));
        for candidate in candidates.iter().filter(|candidate| chosen.contains(&candidate.id)) {
            for (extent, start, bytes) in candidate.slab.spans_of_copies() {
                if let Some(coming) = nodes.get_mut(&extent.region.node).and_then(|own| own.get_mut(&extent)) {
                    coming.put(start, bytes);
                }
            }
        }
        let fits = |own: &BTreeMap<ExtentId, Ranges>| own.values().any(|coming| coming.first_fit(bytes).is_some());
        let (roomy, lacking): (Vec<_>, Vec<_>) = nodes.into_values().partition(|own| fits(own));
        let mut ways: Vec<(LogTime, Vec<Ordinal>)> =
            lacking.into_iter().filter_map(|own| way(own, bytes, candidates, chosen)).collect();
        ways.sort();
        let missing = needed.saturating_sub(roomy.len() + come.len());
        if ways.len() >= missing {
            chosen.extend(ways.into_iter().take(missing).flat_map(|(_, slabs)| slabs));
        }
    }
}

/// The slabs that leave room for `bytes` in one of these extents when they go, with the last use of the one that was used last.
fn way(
    mut extents: BTreeMap<ExtentId, Ranges>,
    bytes: u64,
    candidates: &[Candidate<'_>],
    chosen: &BTreeSet<Ordinal>,
) -> Option<(LogTime, Vec<Ordinal>)> {
    for (index, candidate) in candidates.iter().enumerate().filter(|(_, it)| !chosen.contains(&it.id)) {
        for (extent, start, length) in candidate.slab.spans_of_copies() {
            let Some(coming) = extents.get_mut(&extent) else { continue };
            coming.put(start, length);
            let Some((from, _)) = coming.run(start).filter(|(_, length)| *length >= bytes) else { continue };
            let is_in_it = |it: &&Candidate<'_>| {
                !chosen.contains(&it.id)
                    && (it.slab.spans_of_copies().into_iter())
                        .any(|(at, start, length)| at == extent && start < from + bytes && start + length > from)
            };
            let slabs = candidates[..=index].iter().filter(is_in_it).map(|it| it.id).collect();
            return Some((candidate.last_used, slabs));
        }
    }
    None
}

impl Slab {
    /// Where its copies lie: extent, start, bytes; neighbours as one.
    fn spans_of_copies(&self) -> Vec<(ExtentId, u64, u64)> {
        let mut spans = Vec::new();
        for (index, holder) in self.grant.holders.iter().enumerate() {
            for run in self.runs_of_copies(index) {
                let Some(Offset(start)) = self.grant.offset(holder, SlotIndex(run[0])) else { continue };
                spans.push((Self::extent(holder), start, u64::from(self.grant.slot_size.0) * run.len() as u64));
            }
        }
        spans
    }
}
