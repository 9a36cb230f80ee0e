//! Planning: what a leader proposes. Pure, but not part of apply: two leaders may plan differently, replicas only validate.
//!
//! Holders are ranked by weighted rendezvous hashing of the grant's number over the nodes with room, weighted by their free bytes; within a
//! node the first place that fits is taken. All arithmetic is on integers.

use super::{
    Deadline, GrantRefusal, GrantRequest, Proposed, RequestOutcome, Shard, ShardCommand, Slab,
    grants::{SLOT_BYTES_MIN, slab_bytes},
    space::Ranges,
};
use crate::requests::RequestRefusal;
use quarry_wire::{
    ids::{ExtentId, NamespaceId, NodeId},
    limits::LANE_LIFE_MAX,
    units::{LogTime, Offset, SlotCount, millis},
};
use sha2::{Digest, Sha256};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

/// Plans the grants of one log entry: what one takes the next does not see as free.
#[derive(Debug)]
pub struct Planner<'a> {
    shard: &'a Shard,
    /// The leader's running log clock.
    at: LogTime,
    avoid: &'a BTreeSet<NodeId>,
    /// What is left of extents of which something was planned away.
    left: BTreeMap<ExtentId, Ranges>,
    /// Where slabs lay whose lanes may still be open: taken last, since arming a new grant there closes such a lane, and with it whatever else
    /// its writer does on it.
    warm: BTreeMap<ExtentId, Ranges>,
    /// Bytes planned per namespace.
    planned: BTreeMap<NamespaceId, u64>,
    /// Grants planned.
    grants: u64,
}

impl Shard {
    /// A planner for one log entry. `avoid`: nodes that the leader does not hear, or that writers cannot reach.
    #[must_use]
    pub fn planner<'a>(&'a self, at: LogTime, avoid: &'a BTreeSet<NodeId>) -> Planner<'a> {
        let warm = self.warm(at);
        Planner { shard: self, at, avoid, left: BTreeMap::new(), warm, planned: BTreeMap::new(), grants: 0 }
    }

    /// The places of slabs whose grants ended less than the life of a lane ago.
    fn warm(&self, at: LogTime) -> BTreeMap<ExtentId, Ranges> {
        let mut warm: BTreeMap<ExtentId, Ranges> = BTreeMap::new();
        let oldest = LogTime(at.0.saturating_sub(millis(LANE_LIFE_MAX)));
        for (_, deadline) in self.deadlines.range((oldest.after(self.settings.outcome_kept), Deadline::FIRST)..) {
            let Deadline::Forget(id) = deadline else { continue };
            let Some(slab) = self.slabs.get(id) else { continue };
            for holder in &slab.grant.holders {
                let span = slab.grant.span(holder);
                warm.entry(Slab::extent(holder)).or_default().cover(span.start, span.end);
            }
        }
        warm
    }
}

/// A node with room.
struct Candidate {
    score: u128,
    place: Proposed,
}

impl Planner<'_> {
    /// The command that grants what is asked, to be proposed by `meta`. If there is no room for so many slots on as many nodes as the namespace
    /// has copies, fewer slots are tried (halved each time) before fewer copies.
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
            Some(RequestOutcome::Delete(_)) => return Err(RequestRefusal::Taken.into()),
            None => {}
        }
        let policy = shard.namespaces.get(&asked.namespace).map(|namespace| namespace.policy);
        let (least, copies) = policy.map_or((1, 1), |policy| (policy.least.max(1), policy.copies));
        shard.admit_request(&asked, usize::from(least))?;
        let asked_slots = asked.slots;
        let mut candidates = self.fitting(&mut asked, copies);
        if candidates.is_empty() {
            asked.slots = asked_slots;
            candidates = self.fitting(&mut asked, least);
        }
        candidates.sort_by_key(|candidate| Reverse((candidate.score, candidate.place)));
        candidates.truncate(usize::from(copies));
        let bytes = slab_bytes(&asked);
        let found = u8::try_from(candidates.len()).unwrap_or(u8::MAX);
        if found < least {
            let one = u64::from(asked.slot_size.0);
            let most = shard.extents.values().map(|held| held.bytes).max();
            if let Some(most) = most.filter(|most| *most < one) {
                return Err(GrantRefusal::SlotSize { least: SLOT_BYTES_MIN, most, found: asked.slot_size });
            }
            let found = u8::try_from(self.candidates(one).len()).unwrap_or(u8::MAX);
            let silent = self.silent(one);
            if silent > 0 && found.saturating_add(silent) >= least {
                return Err(GrantRefusal::TooFewNodes { needed: least, found, silent });
            }
            return Err(GrantRefusal::NoSpace { needed: least, found, retry_after: self.retry_after(one) });
        }
        let planned = self.planned.get(&asked.namespace).copied().unwrap_or(0);
        shard.admit_quota(asked.namespace, bytes * u64::from(found), planned)?;
        let holders: Vec<Proposed> = candidates.into_iter().map(|candidate| candidate.place).collect();
        for Proposed { extent, base } in &holders {
            let left = self.left.entry(*extent).or_insert_with(|| shard.extents[extent].free.clone());
            assert!(left.take(base.0, bytes), "the place that was found is free");
        }
        *self.planned.entry(asked.namespace).or_default() += bytes * u64::from(found);
        self.grants += 1;
        Ok(ShardCommand::Grant { meta, asked, holders })
    }

    /// Candidates on at least `nodes` nodes, for the most slots that fit there, which is what is then asked; none if not even one slot fits.
    fn fitting(&self, asked: &mut GrantRequest, nodes: u8) -> Vec<Candidate> {
        loop {
            let candidates = self.candidates(slab_bytes(asked));
            if candidates.len() >= usize::from(nodes) {
                return candidates;
            }
            if asked.slots.0 <= 1 {
                return Vec::new();
            }
            asked.slots = SlotCount(asked.slots.0 / 2);
        }
    }

    /// One candidate per node with room, at its first place that fits, if possible where no lane may be open.
    fn candidates(&self, bytes: u64) -> Vec<Candidate> {
        let cold = self.candidates_by(|extent, free| free.first_fit_outside(bytes, self.warm.get(&extent)));
        let places: BTreeSet<NodeId> = cold.iter().map(|candidate| candidate.place.extent.region.node).collect();
        let any = self.candidates_by(|_, free| free.first_fit(bytes));
        let warm = any.into_iter().filter(|candidate| !places.contains(&candidate.place.extent.region.node));
        let warm = warm.collect::<Vec<_>>();
        cold.into_iter().chain(warm).collect()
    }

    fn candidates_by(&self, fit: impl Fn(ExtentId, &Ranges) -> Option<u64>) -> Vec<Candidate> {
        let mut nodes: BTreeMap<NodeId, (u64, Option<Proposed>)> = BTreeMap::new();
        for (extent, held) in &self.shard.extents {
            if !self.is_usable(*extent) {
                continue;
            }
            let free = self.left.get(extent).unwrap_or(&held.free);
            let (room, place) = nodes.entry(extent.region.node).or_default();
            *room += free.total();
            if place.is_none() {
                *place = fit(*extent, free).map(|base| Proposed { extent: *extent, base: Offset(base) });
            }
        }
        let number = self.shard.sequence_last + 1 + self.grants;
        let candidate = |(node, (room, place)): (NodeId, (u64, Option<Proposed>))| {
            Some(Candidate { score: score(number, node, room), place: place? })
        };
        nodes.into_iter().filter_map(candidate).collect()
    }

    /// Nodes with an extent of at least `bytes` that cannot be used now.
    fn silent(&self, bytes: u64) -> u8 {
        let large = self.shard.extents.iter().filter(|(_, held)| held.bytes >= bytes);
        let (usable, silent): (BTreeSet<_>, BTreeSet<_>) = large
            .map(|(extent, _)| (self.is_usable(*extent), extent.region.node))
            .fold((BTreeSet::new(), BTreeSet::new()), |(mut usable, mut silent), (is_usable, node)| {
                if is_usable {
                    usable.insert(node)
                } else {
                    silent.insert(node)
                };
                (usable, silent)
            });
        u8::try_from(silent.difference(&usable).count()).unwrap_or(u8::MAX)
    }

    fn is_usable(&self, extent: ExtentId) -> bool {
        !self.avoid.contains(&extent.region.node)
            && self.shard.regions.get(&extent.region).is_some_and(|region| region.up)
    }

    /// When space for a slot of `bytes` may come back by itself: the next end of a rest on a usable node, else the next end of a grant with
    /// its rest. Never if no extent is so large.
    fn retry_after(&self, bytes: u64) -> Option<std::time::Duration> {
        let shard = self.shard;
        let usable = || shard.extents.iter().filter(|(extent, held)| self.is_usable(**extent) && held.bytes >= bytes);
        usable().next()?;
        let rested = usable().flat_map(|(_, held)| held.resting.values().map(|rest| rest.until)).min();
        let live = shard.slabs.values().filter(|slab| slab.phase.is_live());
        let ended = live.map(|slab| slab.expires_at.after(shard.settings.quarantine)).min();
        rested.or(ended).map(|free_at| free_at.since(self.at))
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
