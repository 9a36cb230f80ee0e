//! Extents and the feed: what this shard may use, as the directory says.
//! Keeps *Epochs only grow* (a lending is taken only above the highest number ever seen for its extent, a region only in a later life) and
//! *Nothing leaks* (an extent is given back only when all of it is free and rested, and is named in [`Shard::returned`] until the feed shows
//! that the directory has it).
//! When an extent is wanted and given back is planned in [`crate::lending`].

use super::{
    DropRefusal, FeedRefusal, Shard,
    grants::{Leave, Row, Slab, Slot},
    quarantine::Deadline,
    space::Extent,
};
use crate::{
    directory::{FeedChange, FeedSlice, Labels, RegionState, Standing},
    lending::{Held, Holdings},
};
use quarry_wire::{
    grant::Grant,
    ids::{ExtentId, FeedNumber, Generation, LendNumber, NodeId, Ordinal, RegionId, SlotIndex, WriterId},
    limits::extent_bytes,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

impl Shard {
    pub(super) fn apply_feed(&mut self, slice: FeedSlice) -> Result<FeedNumber, FeedRefusal> {
        if slice.from > self.feed {
            return Err(FeedRefusal::Gap { position: self.feed, found: slice.from });
        }
        let mut last = slice.from;
        for number in slice.entries.iter().map(|entry| entry.number) {
            if number <= last || number > slice.to {
                return Err(FeedRefusal::OutOfOrder { found: number });
            }
            last = number;
        }
        for entry in slice.entries {
            if entry.number > self.feed {
                self.feed = entry.number;
                // What an older generation says of memory is void.
                if entry.number.0.generation >= self.generation {
                    self.follow(entry.number.0.generation, entry.change);
                }
            }
        }
        self.feed = self.feed.max(slice.to);
        Ok(self.feed)
    }

    fn follow(&mut self, generation: Generation, change: FeedChange) {
        match change {
            FeedChange::NewGeneration => self.begin_generation(generation),
            FeedChange::Namespace(namespace) => {
                self.namespaces.insert(namespace.id, namespace);
            }
            FeedChange::Region(region) => self.follow_region(region),
            FeedChange::Lent { extent, shard, lend, region_bytes } => {
                self.follow_return(extent, lend);
                let seen = self.lends_seen.get(&extent).copied().unwrap_or_default();
                if shard != self.id || lend <= seen {
                    return;
                }
                self.lends_seen.insert(extent, lend);
                self.void(&BTreeSet::from([extent]));
                self.extents.remove(&extent);
                if let Some(held) = Extent::new(lend, extent.index, region_bytes) {
                    let node = extent.region.node;
                    if self.wants.get(&node).is_some_and(|wanted| *wanted <= held.bytes) {
                        self.wants.remove(&node);
                    }
                    self.extents.insert(extent, held);
                }
            }
            FeedChange::Unlent { extent, lend } => self.follow_return(extent, lend),
            FeedChange::Standing { node, standing, labels } => {
                if labels == Labels::default() {
                    self.labels.remove(&node);
                } else {
                    self.labels.insert(node, labels);
                }
                match standing {
                    Standing::Serving => self.drained.remove(&node),
                    Standing::Draining | Standing::Decommissioned => self.drained.insert(node),
                };
            }
            FeedChange::Retired(node) => self.follow_retirement(node),
        }
    }

    /// The feed shows that the lending which we gave back is over: it is unlent, or lent anew.
    fn follow_return(&mut self, extent: ExtentId, lend: LendNumber) {
        if self.returned.get(&extent).is_some_and(|given_back| *given_back <= lend) {
            self.returned.remove(&extent);
        }
    }

    fn follow_region(&mut self, state: RegionState) {
        let held = self.regions.get(&state.region);
        if held.is_some_and(|held| state.incarnation < held.incarnation) {
            return;
        }
        let same_life = held.is_some_and(|held| held.incarnation == state.incarnation);
        self.regions.insert(state.region, state);
        if !same_life {
            let own = self.extents.keys().filter(|extent| extent.region == state.region).copied().collect();
            self.void(&own);
        }
    }

    /// The node is gone for good. Its death may have been passed over in the feed, so its memory is void now. The lend numbers and lives seen stay.
    fn follow_retirement(&mut self, node: NodeId) {
        let own: BTreeSet<ExtentId> =
            self.extents.keys().filter(|extent| extent.region.node == node).copied().collect();
        self.void(&own);
        self.extents.retain(|extent, _| extent.region.node != node);
        self.returned.retain(|extent, _| extent.region.node != node);
        for region in self.regions.values_mut().filter(|region| region.region.node == node) {
            region.up = false;
            // Nobody waits for its memory to come back.
            region.bytes = 0;
        }
        self.drained.remove(&node);
        self.labels.remove(&node);
        self.wants.remove(&node);
    }

    /// All memory is void: extents, slots, grants and copies go. Requests stay, for they say only what was done.
    fn begin_generation(&mut self, generation: Generation) {
        self.generation = generation;
        self.drop_pins();
        let all = self.extents.keys().copied().collect();
        self.void(&all);
        self.extents.clear();
        self.returned.clear();
        self.wants.clear();
        for region in self.regions.values_mut() {
            region.up = false;
        }
    }

    /// The contents of these extents are gone: every slot in them is free at once, and keys without another copy vanish.
    fn void(&mut self, extents: &BTreeSet<ExtentId>) {
        let mut touched = BTreeSet::new();
        let mut leaving: Vec<(Ordinal, usize)> = Vec::new();
        for (id, slab) in &self.slabs {
            for (holder, at) in slab.grant.holders.iter().enumerate() {
                // An extent is held under one lending at a time, so live slots of it are of that lending.
                if extents.contains(&Slab::extent(at)) && slab.slots[holder].iter().any(|slot| *slot != Slot::Gone) {
                    leaving.push((*id, holder));
                }
            }
        }
        for (id, holder) in leaving {
            touched.insert(id);
            for slot in (0..self.slabs[&id].grant.slots.0).map(SlotIndex) {
                let was = self.slabs[&id].slot(holder, slot);
                self.leave(id, holder, slot, Leave::Void);
                if matches!(was, Some(Slot::Committed { .. })) {
                    self.drop_value_without_copy(id, slot);
                }
            }
        }
        for extent in extents {
            if let Some(held) = self.extents.get_mut(extent) {
                for (start, rest) in &held.resting {
                    self.deadlines.remove(&(rest.until, Deadline::Free(*extent, *start)));
                }
                held.void();
                // A life of a region ends with its lanes.
                self.warm.forget(*extent);
            }
        }
        for id in touched {
            self.settle(id);
        }
    }

    pub(super) fn drop_value_without_copy(&mut self, id: Ordinal, slot: SlotIndex) {
        let slab = &self.slabs[&id];
        let committed = |at: &Row| matches!(at.get(slot.0 as usize), Some(Slot::Committed { .. }));
        if slab.slots.iter().any(committed) {
            return;
        }
        if let Some(record) = slab.records.get(&slot) {
            self.values.remove(&(slab.grant.namespace, record.key.clone()));
            // Copies that were still granted can join no more.
            self.rest_slot(id, slot);
        }
    }

    pub(super) fn drop_extent(&mut self, extent: ExtentId, lend: LendNumber) -> Result<(), DropRefusal> {
        let held = self.extents.get(&extent).filter(|held| held.lend == lend);
        let Some(held) = held else {
            if self.returned.get(&extent) == Some(&lend) {
                return Ok(());
            }
            let held = self.extents.get(&extent).map(|held| held.lend);
            return Err(DropRefusal::NotHeld { extent, held, found: lend });
        };
        if !held.is_all_free() {
            return Err(DropRefusal::InUse { extent, free: held.free.total(), bytes: held.bytes });
        }
        self.extents.remove(&extent);
        self.warm.forget(extent);
        self.returned.insert(extent, lend);
        Ok(())
    }

    /// Extents given back of which the feed does not show it yet: the leader tells the directory again and again.
    pub fn returned(&self) -> impl Iterator<Item = (ExtentId, LendNumber)> {
        self.returned.iter().map(|(extent, lend)| (*extent, *lend))
    }

    /// The lending under which `extent` is held, if it is.
    #[must_use]
    pub fn held(&self, extent: ExtentId) -> Option<LendNumber> {
        self.extents.get(&extent).map(|held| held.lend)
    }

    /// The bytes of `extent`, if it is held.
    #[must_use]
    pub fn bytes_of(&self, extent: ExtentId) -> Option<u64> {
        self.extents.get(&extent).map(|held| held.bytes)
    }

    /// Extents held that are wholly free: those that can be dropped.
    pub fn idle_extents(&self) -> impl Iterator<Item = (ExtentId, LendNumber)> {
        self.extents.iter().filter(|(_, held)| held.is_all_free()).map(|(extent, held)| (*extent, held.lend))
    }

    /// Extents held, where something may be put, that are wholly free or will be once what rests is.
    pub fn loose_extents(&self) -> impl Iterator<Item = ExtentId> {
        let is_loose = |(extent, held): &(&ExtentId, &Extent)| held.live_bytes() == 0 && self.is_open(extent.region);
        self.extents.iter().filter(is_loose).map(|(extent, _)| *extent)
    }

    /// The highest lend number ever seen for `extent`.
    #[must_use]
    pub fn seen(&self, extent: ExtentId) -> Option<LendNumber> {
        self.lends_seen.get(&extent).copied()
    }

    /// Wholly free extents of regions that are not up, or of nodes that are drained: nothing may be put there, so they go back.
    pub fn dead_extents(&self) -> impl Iterator<Item = (ExtentId, LendNumber)> {
        self.idle_extents().filter(|(extent, _)| !self.is_open(extent.region))
    }

    /// Whether something may be put in this region.
    pub(super) fn is_open(&self, region: RegionId) -> bool {
        !self.drained.contains(&region.node) && self.regions.get(&region).is_some_and(|region| region.up)
    }

    pub(super) fn want(&mut self, nodes: &[NodeId], bytes: u64) {
        let known: BTreeSet<NodeId> = self.regions.keys().map(|region| region.node).collect();
        for node in nodes.iter().filter(|node| known.contains(node)) {
            let wanted = self.wants.entry(*node).or_insert(bytes);
            *wanted = bytes.max(*wanted);
        }
    }

    /// There was a place for this grant, so nobody waits for one of its size at its nodes.
    pub(super) fn has_place(&mut self, grant: &Grant) {
        let bytes = u64::from(grant.slot_size.0);
        for holder in &grant.holders {
            let node = holder.region.node;
            if self.wants.get(&node).is_some_and(|wanted| *wanted <= bytes) {
                self.wants.remove(&node);
            }
        }
    }

    /// Whether an extent of `node` that holds a slot of `bytes` is wanted.
    #[must_use]
    pub fn wants(&self, node: NodeId, bytes: u64) -> bool {
        self.wants.get(&node).is_some_and(|wanted| *wanted >= bytes)
    }

    /// What this shard has of each node's memory, and what it needs.
    #[must_use]
    pub fn holdings(&self) -> Holdings {
        let mut nodes: BTreeMap<NodeId, Held> = BTreeMap::new();
        for (extent, it) in self.extents.iter().filter(|(extent, _)| self.is_open(extent.region)) {
            let live = it.live_bytes();
            let held = nodes.entry(extent.region.node).or_default();
            held.extents += 1;
            held.bytes += it.bytes;
            held.largest = it.bytes.max(held.largest);
            held.room += it.bytes - live;
            if live == 0 {
                held.loose += 1;
                held.loose_largest = it.bytes.max(held.loose_largest);
            }
        }
        for (node, bytes) in &self.wants {
            // Whoever found no place may have found one elsewhere meanwhile, or have gone.
            if !self.has_place_on(*node, *bytes, &BTreeSet::new()) {
                nodes.entry(*node).or_default().wanted = Some(*bytes);
            }
        }
        let has_grants = !self.writers.is_empty();
        let is_written = self.is_written();
        Holdings { shard: self.id, generation: self.generation, nodes: Arc::new(nodes), has_grants, is_written }
    }

    /// Whether a slot of `bytes` has a place on `node` now, in an extent that is not `aside`.
    #[must_use]
    pub fn has_place_on(&self, node: NodeId, bytes: u64, aside: &BTreeSet<ExtentId>) -> bool {
        let here = self.extents.iter().filter(|(extent, _)| extent.region.node == node && self.is_open(extent.region));
        here.into_iter().any(|(extent, held)| !aside.contains(extent) && held.free.first_fit(bytes).is_some())
    }

    /// Whether a writer has a grant that is open.
    #[must_use]
    pub fn is_written(&self) -> bool {
        self.writers.range(..).any(|(writer, _)| *writer != WriterId::HOLDERS)
    }

    /// Those of `extents` that have a place for a slot of `bytes` now.
    pub fn with_place(&self, extents: &BTreeSet<ExtentId>, bytes: u64) -> impl Iterator<Item = ExtentId> {
        let held = extents.iter().filter_map(|extent| Some((*extent, self.extents.get(extent)?)));
        held.filter(move |(_, held)| held.free.first_fit(bytes).is_some()).map(|(extent, _)| extent)
    }

    /// Nodes with a region whose extents hold a slot of `bytes`, up and not among `avoid`, where this shard has no place for one now: an
    /// extent of each would help.
    #[must_use]
    pub fn lacks_place(&self, bytes: u64, avoid: &BTreeSet<NodeId>) -> BTreeSet<NodeId> {
        let usable = |region: &RegionState| self.is_open(region.region) && !avoid.contains(&region.region.node);
        let large = self.regions.values().filter(|region| usable(region) && extent_bytes(region.bytes) >= bytes);
        let mut nodes: BTreeSet<NodeId> = large.map(|region| region.region.node).collect();
        for (extent, held) in self.extents.iter().filter(|(extent, _)| self.is_open(extent.region)) {
            if held.free.first_fit(bytes).is_some() {
                nodes.remove(&extent.region.node);
            }
        }
        nodes
    }
}
