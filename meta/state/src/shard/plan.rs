//! Planning: what a leader proposes. Pure, but not part of apply: two leaders may plan differently, replicas only validate.
//!
//! Holders are ranked by weighted rendezvous hashing of the grant's number over the nodes with room, weighted by their free bytes; within a
//! node the first place that fits is taken, if possible one that is not warm (see `warm.rs`). Holders of one grant lie in different zones, else
//! on different hosts, as far as nodes with room have such labels; if they do not, near ones are better than none. All arithmetic is on integers.

use super::{
    GrantRefusal, GrantRequest, Proposed, RequestOutcome, Shard, ShardCommand,
    grants::{SLOT_BYTES_MIN, Slab, slab_bytes},
    space::Ranges,
};
use crate::{
    cow_arc::CowArc,
    directory::{RegionState, Shared},
    requests::RequestRefusal,
};
use quarry_wire::{
    grant::Grant,
    ids::{ExtentId, NamespaceId, NodeId},
    limits::extent_bytes,
    units::{LogTime, Offset, SlotCount},
};
use sha2::{Digest, Sha256};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// A namespace with a quota has room for at least so many slabs, unless a single slot needs more.
const QUOTA_SLABS: u64 = 8;

/// Where a leader may not plan, and where more could be had.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Bounds {
    /// Nodes that the leader does not hear, or that writers cannot reach.
    pub avoid: BTreeSet<NodeId>,
    /// Extents that are about to be given back.
    pub aside: BTreeSet<ExtentId>,
    /// Nodes with an extent that is lent to nobody, and the bytes of the largest such.
    pub lendable: Arc<BTreeMap<NodeId, u64>>,
    /// Nothing is evicted here: what is in use comes back only when it is deleted.
    pub keeps_all: bool,
    /// Whether a slab takes, of each node that it lies at, no more than half of what the shard has free there beyond an eighth of it all, so that writers
    /// who ask for much, and use little of it, leave something for the others. A sixteenth of an extent, or one slot, is always to be had.
    pub in_parts: bool,
}

/// Where slabs are bounded, the largest takes one part in so many of what is free,
const FREE_PARTS: u64 = 2;
/// less this part of what the node lends, below which values go to make room: they do not for slots that are granted and never used.
pub(super) const ROOM_PARTS: u64 = 8;
/// A slab of one part in so many of an extent is always small enough.
const EXTENT_PARTS: u64 = 16;

/// Nothing can be lent.
static NONE_LENDABLE: BTreeMap<NodeId, u64> = BTreeMap::new();

/// Plans the grants of one log entry: what one takes the next does not see as free.
#[derive(Debug)]
pub struct Planner<'a> {
    shard: &'a Shard,
    /// The leader's running log clock.
    at: LogTime,
    avoid: &'a BTreeSet<NodeId>,
    /// Nodes with an extent that is lent to nobody, and the bytes of the largest such.
    lendable: &'a BTreeMap<NodeId, u64>,
    /// Nothing is evicted.
    keeps_all: bool,
    /// Slabs leave some of what is free.
    in_parts: bool,
    /// What is left of extents of which something was planned away.
    left: BTreeMap<ExtentId, Ranges>,
    /// The nodes that can be used.
    nodes: BTreeMap<NodeId, Room>,
    /// Bytes planned per namespace.
    planned: BTreeMap<NamespaceId, u64>,
    /// Grants planned.
    grants: u64,
}

impl Shard {
    /// The most that a place shares with any of the others.
    fn shared(&self, place: &Proposed, others: &[Proposed]) -> Shared {
        let nodes = others.iter().map(|other| other.extent.region.node);
        self.shared_by(place.extent.region.node, nodes)
    }

    fn shared_by(&self, node: NodeId, others: impl Iterator<Item = NodeId>) -> Shared {
        let own = self.labels.get(&node);
        let with = |other: NodeId| Some(own?.shared(self.labels.get(&other)?));
        others.filter_map(with).max().unwrap_or(Shared::Nothing)
    }

    /// The most that two holders of a grant share.
    #[must_use]
    pub fn shared_fate(&self, grant: &Grant) -> Shared {
        let nodes: Vec<NodeId> = grant.holders.iter().map(|holder| holder.region.node).collect();
        let pairs = (1..nodes.len()).map(|at| self.shared_by(nodes[at], nodes[..at].iter().copied()));
        pairs.max().unwrap_or(Shared::Nothing)
    }

    /// A planner for one log entry. `avoid`: nodes that the leader does not hear, or that writers cannot reach.
    #[must_use]
    pub fn planner<'a>(&'a self, at: LogTime, avoid: &'a BTreeSet<NodeId>) -> Planner<'a> {
        self.plan_grants(at, avoid, &NONE_LENDABLE, |_| false)
    }

    /// A planner that keeps within these bounds.
    #[must_use]
    pub fn planner_within<'a>(&'a self, at: LogTime, bounds: &'a Bounds) -> Planner<'a> {
        let is_aside = |extent| bounds.aside.contains(&extent);
        let Bounds { keeps_all, in_parts, .. } = *bounds;
        Planner { keeps_all, in_parts, ..self.plan_grants(at, &bounds.avoid, &bounds.lendable, is_aside) }
    }

    fn plan_grants<'a>(
        &'a self,
        at: LogTime,
        avoid: &'a BTreeSet<NodeId>,
        lendable: &'a BTreeMap<NodeId, u64>,
        is_aside: impl Fn(ExtentId) -> bool,
    ) -> Planner<'a> {
        let mut planner = Planner {
            shard: self,
            at,
            avoid,
            lendable,
            keeps_all: false,
            in_parts: false,
            left: BTreeMap::new(),
            nodes: BTreeMap::new(),
            planned: BTreeMap::new(),
            grants: 0,
        };
        let mut nodes: BTreeMap<NodeId, Room> = BTreeMap::new();
        let open = |extent: ExtentId| planner.is_usable(extent) && !is_aside(extent);
        for (extent, held) in self.extents.iter().filter(|(extent, _)| open(**extent)) {
            let room = nodes.entry(extent.region.node).or_default();
            room.bytes += held.free.total();
            room.extents.push(*extent);
        }
        planner.nodes = nodes;
        planner
    }
}

/// What a node has for slabs.
#[derive(Debug, Default)]
struct Room {
    /// Bytes that are free and not planned away.
    bytes: u64,
    /// Its extents, in order.
    extents: Vec<ExtentId>,
}

/// Nodes with or without room, when too few have some.
struct Lacking {
    /// Those that can be used.
    live: usize,
    /// Those that are avoided; those that were declared dead too, if too few are live, for then no room at these is enough.
    silent: u8,
}

impl Planner<'_> {
    /// The command that grants what is asked, to be proposed by `meta`. If there is no room for so many slots on as many nodes as the namespace
    /// has copies, as many slots as fit there in one piece are taken before fewer copies; a namespace with a quota gets no slab of more than an eighth of it, nor more slots than it
    /// has left.
    ///
    /// # Errors
    /// [`GrantRefusal`]: what apply would say, or [`GrantRefusal::NoSpace`]; a slot larger than every extent held is
    /// [`GrantRefusal::SlotSize`], for no waiting helps. Nothing was logged, so none of them is definite for a request
    /// that was proposed before.
    pub fn grant(&mut self, meta: NodeId, mut asked: GrantRequest) -> Result<ShardCommand, GrantRefusal> {
        let shard = self.shard;
        // A repeated request is answered by apply with what is recorded, whatever is proposed now. One stamped after the last applied entry
        // is judged by apply too, at its own stamp.
        let now = shard.now.max(self.at);
        match shard.requests.look(now, shard.settings.outcome_kept, asked.request)? {
            Some(RequestOutcome::Grant(_)) => return Ok(ShardCommand::Grant { meta, asked, holders: Vec::new() }),
            Some(RequestOutcome::Delete(_) | RequestOutcome::Pin(_) | RequestOutcome::Renew(_)) => {
                return Err(RequestRefusal::Taken.into());
            }
            None => {}
        }
        let policy = shard.namespaces.get(&asked.namespace).map(|namespace| namespace.policy);
        let (least, copies) = policy.map_or((1, 1), |policy| (policy.least.max(1), policy.copies));
        let planned = self.planned.get(&asked.namespace).copied().unwrap_or(0);
        if let Some((limit, _)) = shard.quota_of(asked.namespace) {
            let used = shard.used.get(&asked.namespace).copied().unwrap_or(0).saturating_add(planned);
            let one = u64::from(asked.slot_size.0) * u64::from(copies);
            if one > limit {
                // It never fits with all its copies, and fewer are for want of nodes.
                return Err(GrantRefusal::Quota { limit, used, asked: one, comes_back: false });
            }
            // Small enough that one slab is no large part of what the namespace may have: it is evicted whole.
            let left = limit.saturating_sub(used).min(limit / QUOTA_SLABS).checked_div(one).unwrap_or(0);
            let left = u32::try_from(left).unwrap_or(u32::MAX).max(1);
            asked.slots = SlotCount(asked.slots.0.min(left));
        }
        (shard.admit_request(&asked, usize::from(least)))
            .map_err(|refusal| self.final_if_nothing_goes(asked.namespace, refusal))?;
        let asked_slots = asked.slots;
        let mut holders = self.fitting(&mut asked, copies, copies);
        if holders.is_empty() {
            asked.slots = asked_slots;
            // Fewer copies only if no more nodes have memory to lend.
            self.waits_for_memory(u64::from(asked.slot_size.0), copies)?;
            holders = self.fitting(&mut asked, least, copies);
        }
        let bytes = slab_bytes(&asked);
        let found = u8::try_from(holders.len()).unwrap_or(u8::MAX);
        if found < least {
            let one = u64::from(asked.slot_size.0);
            // Those of forgotten nodes have no bytes.
            let most = shard.regions.values().map(|region| extent_bytes(region.bytes)).max().filter(|most| *most > 0);
            if let Some(most) = most.filter(|most| *most < one) {
                return Err(GrantRefusal::SlotSize { least: SLOT_BYTES_MIN, most, found: asked.slot_size });
            }
            let found = u8::try_from(self.places(one, usize::MAX).len()).unwrap_or(u8::MAX);
            let Lacking { live, silent } = self.lacking(one, usize::from(least));
            let would_do = silent > 0 && found.saturating_add(silent) >= least;
            if would_do || live == 0 || live < usize::from(least) && shard.drained().next().is_some() {
                return Err(GrantRefusal::TooFewNodes { needed: least, found, silent });
            }
            return Err(GrantRefusal::NoSpace { needed: least, found, retry_after: self.retry_after(one) });
        }
        (shard.admit_quota(asked.namespace, bytes * u64::from(found), planned))
            .map_err(|refusal| self.final_if_nothing_goes(asked.namespace, refusal))?;
        for Proposed { extent, base } in &holders {
            let left = self.left.entry(*extent).or_insert_with(|| shard.extents[extent].free.clone());
            assert!(left.take(base.0, bytes), "the place that was found is free");
            self.nodes.get_mut(&extent.region.node).expect("a place is found on a usable node").bytes -= bytes;
        }
        *self.planned.entry(asked.namespace).or_default() += bytes * u64::from(found);
        self.grants += 1;
        Ok(ShardCommand::Grant { meta, asked, holders })
    }

    /// Bytes of the largest slab at a node with this room that leaves enough for others; one slot is never too much.
    fn slab_most(&self, room: &Room) -> u64 {
        if !self.in_parts {
            return u64::MAX;
        }
        let extents = || room.extents.iter().map(|extent| self.shard.extents[extent].bytes);
        let (lent, largest) = (extents().sum::<u64>(), extents().max().unwrap_or(0));
        let free = room.bytes.saturating_sub(lent / ROOM_PARTS) / FREE_PARTS;
        free.max(largest / EXTENT_PARTS)
    }

    /// Whether one slot has a place at fewer than `needed` nodes, and at others there is memory to lend.
    fn waits_for_memory(&self, one: u64, needed: u8) -> Result<(), GrantRefusal> {
        let placed: BTreeSet<NodeId> =
            self.places(one, usize::MAX).iter().map(|place| place.extent.region.node).collect();
        let is_known_up = |node: NodeId| self.shard.regions.keys().any(|it| it.node == node && self.shard.is_open(*it));
        let more = self.lendable.iter().any(|(node, largest)| {
            *largest >= one && !placed.contains(node) && !self.avoid.contains(node) && is_known_up(*node)
        });
        let found = u8::try_from(placed.len()).unwrap_or(u8::MAX);
        if more && found < needed { Err(GrantRefusal::NotLentYet { needed, found }) } else { Ok(()) }
    }

    /// Places on at least `least` and at most `most` nodes, for the most slots that fit there, which is what is then asked; none if not even one
    /// slot fits.
    fn fitting(&self, asked: &mut GrantRequest, least: u8, most: u8) -> Vec<Proposed> {
        let enough = |places: &Vec<Proposed>| places.len() >= usize::from(least);
        let places = Some(self.slab_places(asked, usize::from(most))).filter(enough);
        places.unwrap_or_else(|| {
            let one = u64::from(asked.slot_size.0);
            let largest = |room: &Room| {
                let piece = room.extents.iter().map(|extent| self.free(*extent).largest()).max().unwrap_or(0);
                piece.min(self.slab_most(room).max(one))
            };
            let mut largest: Vec<u64> = self.nodes.values().map(largest).collect();
            largest.sort_unstable_by_key(|bytes| Reverse(*bytes));
            let on_all = usize::from(least).checked_sub(1).and_then(|last| largest.get(last)).copied().unwrap_or(0);
            let slots = u32::try_from(on_all / one).unwrap_or(u32::MAX).min(asked.slots.0);
            asked.slots = SlotCount(slots.max(1));
            Some(self.slab_places(asked, usize::from(most))).filter(enough).unwrap_or_default()
        })
    }

    /// Places for the slab that is asked for, at nodes where it leaves enough for others.
    fn slab_places(&self, asked: &GrantRequest, most: usize) -> Vec<Proposed> {
        let bytes = slab_bytes(asked);
        self.places_where(bytes, most, |room| asked.slots.0 <= 1 || bytes <= self.slab_most(room))
    }

    /// The same of `bytes` at any nodes.
    fn places(&self, bytes: u64, most: usize) -> Vec<Proposed> {
        self.places_where(bytes, most, |_| true)
    }

    /// The places of the `most` best nodes on which `bytes` fit: the best first, then always the best of those that share least with the ones
    /// before.
    fn places_where(&self, bytes: u64, most: usize, may_take: impl Fn(&Room) -> bool) -> Vec<Proposed> {
        let number = self.shard.sequence_last + 1 + self.grants;
        let roomy = self.nodes.iter().filter(|(_, room)| room.bytes >= bytes && may_take(room));
        let mut ranked: Vec<_> = roomy.map(|(node, room)| (score(number, *node, room.bytes), *node, room)).collect();
        ranked.sort_by_key(|(score, node, _)| Reverse((*score, *node)));
        let mut placed: Vec<Proposed> = ranked.into_iter().filter_map(|(_, _, room)| self.place(room, bytes)).collect();
        if self.shard.labels.is_empty() || most >= placed.len() {
            placed.truncate(most);
            return placed;
        }
        let mut chosen: Vec<Proposed> = Vec::with_capacity(most);
        while chosen.len() < most && !placed.is_empty() {
            let near = |it: &Proposed| self.shard.shared(it, &chosen);
            let (at, _) = placed.iter().enumerate().min_by_key(|(at, it)| (near(it), *at)).expect("some are left");
            chosen.push(placed.remove(at));
        }
        chosen
    }

    /// The first place of a node that fits, if possible where no lane may be open.
    fn place(&self, room: &Room, bytes: u64) -> Option<Proposed> {
        let cold = |extent: &ExtentId| {
            let base = self.shard.warm.first_cold_fit(*extent, self.free(*extent), bytes, self.at)?;
            Some(Proposed { extent: *extent, base: Offset(base) })
        };
        let any =
            |extent: &ExtentId| Some(Proposed { extent: *extent, base: Offset(self.free(*extent).first_fit(bytes)?) });
        room.extents.iter().find_map(cold).or_else(|| room.extents.iter().find_map(any))
    }

    /// What is free of an extent held and not planned away.
    fn free(&self, extent: ExtentId) -> &Ranges {
        self.left.get(&extent).unwrap_or_else(|| &self.shard.extents[&extent].free)
    }

    /// Of the nodes with extents of at least `bytes` that are not drained: how many can be used, and how many would help if they answered.
    fn lacking(&self, bytes: u64, least: usize) -> Lacking {
        let drained = |region: &RegionState| self.shard.drained.contains(&region.region.node);
        let is_large = |region: &&RegionState| extent_bytes(region.bytes) >= bytes && !drained(region);
        let (mut all, mut up) = (BTreeSet::new(), BTreeSet::new());
        for region in self.shard.regions.values().filter(is_large) {
            all.insert(region.region.node);
            if region.up {
                up.insert(region.region.node);
            }
        }
        let live = up.difference(self.avoid).count();
        let known = if live < least { all.len() } else { up.len() };
        Lacking { live, silent: u8::try_from(known - live).unwrap_or(u8::MAX) }
    }

    /// Where nothing is evicted, a quota that is used up has room again only if a grant of the namespace is open.
    fn final_if_nothing_goes(&self, namespace: NamespaceId, refusal: GrantRefusal) -> GrantRefusal {
        if self.keeps_all
            && let GrantRefusal::Quota { limit, used, asked, comes_back: true } = refusal
        {
            let is_open = |slab: &CowArc<Slab>| slab.grant.namespace == namespace && slab.phase.is_live();
            return GrantRefusal::Quota { limit, used, asked, comes_back: self.shard.slabs.values().any(is_open) };
        }
        refusal
    }

    fn is_usable(&self, extent: ExtentId) -> bool {
        !self.avoid.contains(&extent.region.node) && self.shard.is_open(extent.region)
    }

    /// When space for a slot of `bytes` may come back: the next end of a rest on a usable node, else the next end of a grant with its rest,
    /// else the rest of what can be evicted. Never if no extent is so large.
    fn retry_after(&self, bytes: u64) -> Option<std::time::Duration> {
        let shard = self.shard;
        let usable = || shard.extents.iter().filter(|(extent, held)| self.is_usable(**extent) && held.bytes >= bytes);
        usable().next()?;
        let rested = usable().flat_map(|(_, held)| held.resting.values().map(|rest| rest.until)).min();
        let live = shard.slabs.values().filter(|slab| slab.phase.is_live());
        let ended = live.map(|slab| slab.expires_at.after(shard.settings.quarantine)).min();
        let evicted = || {
            let at = shard.horizon.max(self.at).after(shard.settings.quarantine);
            let can_go = !self.keeps_all && shard.something_can_go(bytes, |extent| self.is_usable(extent));
            can_go.then_some(at)
        };
        rested.or(ended).or_else(evicted).map(|free_at| free_at.since(self.at))
    }
}

/// Score of a node in a weighted rendezvous: weight ÷ −log2(u), u drawn in (0, 1] from (grant number, node). The logarithm is piecewise
/// linear in 1/65536ths, which bends the weights by a few percent at most.
fn score(number: u64, node: NodeId, room: u64) -> u128 {
    let digest = Sha256::new()
        .chain_update(b"quarry-rendezvous-v1")
        .chain_update(number.to_le_bytes())
        .chain_update(node.0.to_le_bytes())
        .finalize();
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    let drawn = u64::from_le_bytes(first) | 1;
    let whole = u64::from(63 - drawn.leading_zeros());
    let part = u64::try_from((u128::from(drawn) << 16 >> whole) & 0xffff).expect("16 bits fit");
    let distance = (64 << 16) - ((whole << 16) + part);
    (u128::from(room) << 40) / u128::from(distance.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_chosen_in_proportion_to_their_room() {
        let wins = |one: u64, other: u64| {
            (0..4_000).filter(|number| score(*number, NodeId(1), one) > score(*number, NodeId(2), other)).count()
        };
        let even = wins(1 << 30, 1 << 30);
        assert!((1_800..2_200).contains(&even), "{even}");
        let thrice = wins(3 << 30, 1 << 30);
        assert!((2_800..3_200).contains(&thrice), "{thrice}");
        assert_eq!(wins(1 << 30, 0), 4_000, "a node without room is never preferred");
    }
}
