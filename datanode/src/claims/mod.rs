//! Claims: who may write which bytes of this node's memory. The decision alone; `holdings.rs` makes it true.
//!
//! For each armed grant there is a claim: its span, its token, its lane, and whether it is open. Rules, each of which the protocol's model
//! needs:
//!
//! - A grant is armed only above every token that was ever armed on any of its bytes, closed claims included.
//! - Arming closes every older claim that overlaps, and every lane that such a claim was ever on and that is still open: a write that has
//!   started there would go on landing. Whatever else was on those lanes closes with them (*Fenced writers*).
//! - A closed claim never opens again, and its slots can still be confirmed, each until a higher token claims its bytes.
//! - A lane closes with its last open claim.
//! - What this node itself writes (to move a value) is armed under the same rules, once, and needs no lane: it asks for each piece that it is
//!   about to write whether its claim is open still ([`Claims::own_slot`]).
//!
//! Leaves to others: signatures, endpoints, keys, clocks. Time comes in as an argument and bounds only waste.
//!
//! Memory is bounded: a closed claim is forgotten when one higher claim covers it, or a while after it closed. From then on its extent's floor
//! refuses every unknown grant with its token or a lower one.

mod refusal;
#[cfg(test)]
mod tests;

pub use refusal::{ArmRefusal, ConfirmRefusal};

use quarry_wire::{
    grant::{Grant, GrantHolder},
    ids::{ExtentIndex, GrantId, Incarnation, LendNumber, NodeId, RegionId, RegionIndex, SlotIndex, Token, WriterId},
    limits::{GRANT_TTL_MAX, LANE_LIFE_MAX, LANE_OPEN_TO_NEW, OUTCOME_KEPT, extent_bytes},
    units::Offset,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Arc,
    time::Duration,
};

/// How long a closed claim is remembered: a commit may be retried as long as its outcome is.
const CLOSED_KEPT: Duration = Duration::from_secs(OUTCOME_KEPT.as_secs() + GRANT_TTL_MAX.as_secs());

// A forgotten claim must have no lane left, or arming over its bytes would not close it.
const _: () = assert!(CLOSED_KEPT.as_secs() > LANE_LIFE_MAX.as_secs());

/// The node's monotonic time, counted from its start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct NodeTime(pub Duration);

impl NodeTime {
    fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span))
    }
    fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// A lane of this node, never used again for another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct LaneId(pub u64);

/// What must be closed now, before anything else is handed out.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[must_use = "a claim is closed only when its write region and lane are"]
pub struct Closing {
    /// Write regions, each on a lane that may stay open.
    pub claims: Vec<(LaneId, GrantId)>,
    /// Lanes: endpoints, with all that is on them.
    pub lanes: Vec<LaneId>,
}

impl Closing {
    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.claims.is_empty() && self.lanes.is_empty()
    }
}

/// How a grant is armed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ArmPlan {
    /// It is armed already: answer with the same key.
    Again {
        /// The lane that it is on.
        lane: LaneId,
    },
    /// It is armed now.
    New {
        /// What to close first: the fence.
        closing: Closing,
        /// The lane that it is on.
        lane: LaneId,
        /// Whether that lane is to be opened.
        opens: bool,
    },
}

/// What can be said about the slots of an armed grant at one instant.
#[derive(Clone, Debug)]
pub struct Confirmable {
    /// The grant.
    pub grant: Arc<Grant>,
    /// This node's part of it.
    pub holder: GrantHolder,
    /// Bytes that higher tokens have claimed since.
    superseded: Vec<(Range<u64>, Token)>,
}

impl Confirmable {
    /// Where `slot` begins, if it can be confirmed.
    ///
    /// # Errors
    /// [`ConfirmRefusal::NoSuchSlot`], [`ConfirmRefusal::Superseded`].
    pub fn slot(&self, slot: SlotIndex) -> Result<Offset, ConfirmRefusal> {
        let Some(offset) = self.grant.offset(&self.holder, slot) else {
            return Err(ConfirmRefusal::NoSuchSlot { slot, slots: self.grant.slots });
        };
        let span = offset.0..offset.0 + u64::from(self.grant.slot_size.0);
        match self.superseded.iter().find(|(taken, _)| overlap(taken, &span)) {
            Some((_, by)) => Err(ConfirmRefusal::Superseded { slot, by: *by }),
            None => Ok(offset),
        }
    }
}

/// All claims and lanes of one node.
#[derive(Clone, Debug)]
pub struct Claims {
    node: NodeId,
    lanes_max: usize,
    regions: BTreeMap<RegionIndex, RegionClaims>,
    /// Where each known grant's claim is. Invariant: exactly the claims in `regions`.
    places: BTreeMap<GrantId, (RegionIndex, ExtentIndex)>,
    /// The claims of this node itself that are open.
    own: BTreeSet<GrantId>,
    /// Open lanes. Invariant: each has an open claim.
    lanes: BTreeMap<LaneId, Lane>,
    next_lane: u64,
}

/// One region in its present life.
#[derive(Clone, Debug)]
struct RegionClaims {
    incarnation: Incarnation,
    length: u64,
    extents: BTreeMap<ExtentIndex, ExtentClaims>,
}

/// A slab lies inside one extent, so only claims of the same extent overlap.
#[derive(Clone, Debug, Default)]
struct ExtentClaims {
    /// Highest lending seen; only grows.
    lend: LendNumber,
    /// Highest token of the claims forgotten by time; only grows.
    floor: Option<Token>,
    claims: BTreeMap<GrantId, Claim>,
}

#[derive(Clone, Debug)]
struct Claim {
    grant: Arc<Grant>,
    holder: GrantHolder,
    token: Token,
    span: Range<u64>,
    /// The lane that it is or was on, while that lane is open. None for what this node itself writes.
    lane: Option<LaneId>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Open { closes_at: NodeTime },
    Closed { at: NodeTime, with_lane: bool },
}

/// What a new claim closes.
struct Older {
    claims: Vec<GrantId>,
    /// Those that they were ever on and that are open.
    lanes: BTreeSet<LaneId>,
}

#[derive(Clone, Debug)]
struct Lane {
    /// Who it was opened for; beyond the cap others may share it.
    writer: WriterId,
    opened_at: NodeTime,
    /// Claims on it that are open.
    open: BTreeSet<GrantId>,
    /// Claims that are or were on it and are still known.
    touched: BTreeSet<GrantId>,
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

impl Claims {
    /// No claims, no regions.
    #[must_use]
    pub const fn new(node: NodeId, lanes_max: usize) -> Self {
        Self {
            node,
            lanes_max,
            regions: BTreeMap::new(),
            places: BTreeMap::new(),
            own: BTreeSet::new(),
            lanes: BTreeMap::new(),
            next_lane: 0,
        }
    }

    /// The node whose claims these are.
    #[must_use]
    pub const fn node(&self) -> NodeId {
        self.node
    }

    /// A region begins a life. Claims of an earlier one must have been voided.
    ///
    /// # Panics
    /// If the region has a life that was not voided: its lanes could still reach its memory.
    pub fn begin(&mut self, region: RegionIndex, incarnation: Incarnation, length: u64) {
        let before = self.regions.insert(region, RegionClaims { incarnation, length, extents: BTreeMap::new() });
        assert!(before.is_none(), "{region} begins {incarnation} before its last life was voided");
    }

    /// A region's life is over: every lane that can reach its memory closes, and its claims are gone.
    pub fn void(&mut self, at: NodeTime, region: RegionIndex) -> Closing {
        let mut closing = Closing::default();
        let Some(gone) = self.regions.get(&region) else { return closing };
        let on_lanes = gone.extents.values().flat_map(|extent| extent.claims.values());
        let lanes: BTreeSet<LaneId> = on_lanes.filter_map(|claim| claim.lane).collect();
        for lane in lanes {
            self.kill_lane(at, lane, &mut closing);
        }
        self.regions.remove(&region);
        self.places.retain(|_, (of, _)| *of != region);
        self.own.retain(|id| self.places.contains_key(id));
        closing
    }

    /// Arms `grant` for `writer`, or says that it is armed already.
    ///
    /// # Errors
    /// [`ArmRefusal`]; then nothing changed.
    pub fn arm(&mut self, at: NodeTime, grant: &Arc<Grant>, writer: WriterId) -> Result<ArmPlan, ArmRefusal> {
        if writer != grant.writer {
            return Err(ArmRefusal::Writer { owner: grant.writer, found: writer });
        }
        let (holder, token, span) = self.admit(grant)?;
        let place = (holder.region.index, holder.extent);
        if let Some(claim) = self.claim(grant.id) {
            return claim.again(grant, &holder);
        }
        let older = self.older(place, token, &span)?;
        let lane = self.choose_lane(at, writer, grant.ttl, &older.lanes)?;
        let closing = self.fence(at, older);
        let opens = lane.is_none();
        let lane = lane.unwrap_or_else(|| self.open_lane(at, writer));
        let on = self.lanes.get_mut(&lane).expect("chosen among the open lanes that stay, or just opened");
        on.open.insert(grant.id);
        on.touched.insert(grant.id);
        let state = State::Open { closes_at: at.after(grant.ttl) };
        self.take_on(Claim { grant: Arc::clone(grant), holder, token, span, lane: Some(lane), state });
        Ok(ArmPlan::New { closing, lane, opens })
    }

    /// Arms a grant for what this node itself writes, and says what to close first. Once: a grant that is known is refused, so that no slot of
    /// it is ever written twice.
    ///
    /// # Errors
    /// [`ArmRefusal`]; then nothing changed.
    pub fn arm_own(&mut self, at: NodeTime, grant: &Arc<Grant>) -> Result<Closing, ArmRefusal> {
        let (holder, token, span) = self.admit(grant)?;
        if self.claim(grant.id).is_some() {
            return Err(ArmRefusal::Closed { grant: grant.id });
        }
        let older = self.older((holder.region.index, holder.extent), token, &span)?;
        let closing = self.fence(at, older);
        let state = State::Open { closes_at: at.after(grant.ttl) };
        self.take_on(Claim { grant: Arc::clone(grant), holder, token, span, lane: None, state });
        self.own.insert(grant.id);
        Ok(closing)
    }

    /// Where this node may write `slot` of a grant that it armed for itself; none if it may not any more.
    #[must_use]
    pub fn own_slot(&self, grant: GrantId, slot: SlotIndex) -> Option<Offset> {
        let claim = self.own.contains(&grant).then(|| self.claim(grant))??;
        claim.grant.offset(&claim.holder, slot)
    }

    /// The claims that a grant with `token` over `span` closes, and the lanes.
    fn older(&self, place: (RegionIndex, ExtentIndex), token: Token, span: &Range<u64>) -> Result<Older, ArmRefusal> {
        let claims = match self.extent(place) {
            Some(extent) => extent.older_than(token, span)?,
            None => Vec::new(),
        };
        let lanes = claims.iter().filter_map(|id| self.claim(*id)?.lane).collect();
        Ok(Older { claims, lanes })
    }

    /// Closes what is older.
    fn fence(&mut self, at: NodeTime, older: Older) -> Closing {
        let mut closing = Closing::default();
        for id in older.claims {
            self.close_claim(at, id, &mut closing);
        }
        for lane in older.lanes {
            self.kill_lane(at, lane, &mut closing);
        }
        closing
    }

    /// A new claim is here; what it covers is forgotten.
    fn take_on(&mut self, claim: Claim) {
        let (id, place) = (claim.grant.id, (claim.holder.region.index, claim.holder.extent));
        let region = self.regions.get_mut(&place.0).expect("admitted, so the region has a life");
        let extent = region.extents.entry(place.1).or_default();
        extent.lend = extent.lend.max(claim.token.lend);
        for covered in extent.covered_by(&claim) {
            extent.claims.remove(&covered);
            self.places.remove(&covered);
        }
        extent.claims.insert(id, claim);
        self.places.insert(id, place);
    }

    /// The writer is done with `grant`. Closing it again changes nothing.
    ///
    /// # Errors
    /// [`ConfirmRefusal::UnknownGrant`], [`ConfirmRefusal::Writer`].
    pub fn close(&mut self, at: NodeTime, grant: GrantId, writer: WriterId) -> Result<Closing, ConfirmRefusal> {
        self.owned(grant, writer)?;
        let mut closing = Closing::default();
        self.close_claim(at, grant, &mut closing);
        Ok(closing)
    }

    /// What time closes: claims past their TTL, lanes past their life. Forgets what closed long ago.
    pub fn expire(&mut self, at: NodeTime) -> Closing {
        let mut closing = Closing::default();
        let over = |claim: &Claim| matches!(claim.state, State::Open { closes_at } if closes_at <= at);
        for id in self.ids(over) {
            self.close_claim(at, id, &mut closing);
        }
        let old: Vec<LaneId> = self
            .lanes
            .iter()
            .filter(|(_, lane)| at.since(lane.opened_at) >= LANE_LIFE_MAX)
            .map(|(id, _)| *id)
            .collect();
        for lane in old {
            self.kill_lane(at, lane, &mut closing);
        }
        let past = |claim: &Claim| {
            claim.lane.is_none()
                && matches!(claim.state, State::Closed { at: closed, .. } if at.since(closed) >= CLOSED_KEPT)
        };
        for id in self.ids(past) {
            let token = self.claim(id).expect("just listed").token;
            let place = self.places[&id];
            let region = self.regions.get_mut(&place.0).expect("places name known claims");
            let extent = region.extents.get_mut(&place.1).expect("places name known claims");
            extent.floor = extent.floor.max(Some(token));
            self.forget(id);
        }
        closing
    }

    /// Closes a lane and every claim on it, also because it could not be opened: its grants are then not armed again here.
    pub fn force_lane_closed(&mut self, at: NodeTime, lane: LaneId) -> Closing {
        let mut closing = Closing::default();
        self.kill_lane(at, lane, &mut closing);
        closing
    }

    /// What can be confirmed for `grant`, whether its claim is open or not.
    ///
    /// # Errors
    /// [`ConfirmRefusal::UnknownGrant`], [`ConfirmRefusal::Writer`]. Single slots are refused by [`Confirmable::slot`].
    pub fn confirmable(&self, grant: GrantId, writer: WriterId) -> Result<Confirmable, ConfirmRefusal> {
        let claim = self.owned(grant, writer)?;
        let extent = self.extent(self.places[&grant]).expect("places name known claims");
        let higher = |other: &&Claim| other.token > claim.token && overlap(&other.span, &claim.span);
        let superseded = extent.claims.values().filter(higher).map(|other| (other.span.clone(), other.token)).collect();
        Ok(Confirmable { grant: Arc::clone(&claim.grant), holder: claim.holder, superseded })
    }

    /// Claims that are open.
    #[must_use]
    pub fn open_claims(&self) -> usize {
        self.lanes.values().map(|lane| lane.open.len()).sum::<usize>() + self.own.len()
    }

    /// Lanes that are open.
    #[must_use]
    pub fn open_lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Claims that are known, closed ones included.
    #[must_use]
    pub fn known_claims(&self) -> usize {
        self.places.len()
    }

    /// Whether the grant is for this node, this life, and bytes that are there.
    fn admit(&self, grant: &Grant) -> Result<(GrantHolder, Token, Range<u64>), ArmRefusal> {
        let not_a_holder = ArmRefusal::NotAHolder { node: self.node, grant: grant.id };
        let holder = *grant.holder(self.node).ok_or(not_a_holder)?;
        let RegionId { index, .. } = holder.region;
        let region = self.regions.get(&index).ok_or(ArmRefusal::NoIncarnation { region: holder.region })?;
        if holder.incarnation != region.incarnation {
            let (current, found) = (region.incarnation, holder.incarnation);
            return Err(ArmRefusal::Incarnation { region: holder.region, current, found });
        }
        let unit = extent_bytes(region.length);
        let start = u64::from(holder.extent.0).saturating_mul(unit);
        let extent = start.min(region.length)..start.saturating_add(unit).min(region.length);
        let span = grant.span(&holder);
        if span.start < extent.start || span.end > extent.end {
            return Err(ArmRefusal::OutOfBounds { extent, found: span });
        }
        Ok((holder, grant.token(&holder), span))
    }

    /// The open lane to use; none to open one.
    fn choose_lane(
        &self,
        at: NodeTime,
        writer: WriterId,
        ttl: Duration,
        doomed: &BTreeSet<LaneId>,
    ) -> Result<Option<LaneId>, ArmRefusal> {
        let stay = || self.lanes.iter().filter(|(id, _)| !doomed.contains(id));
        let takes_new = |lane: &Lane| at.since(lane.opened_at) < LANE_OPEN_TO_NEW;
        if let Some((own, _)) = stay().rfind(|(_, lane)| lane.writer == writer && takes_new(lane)) {
            return Ok(Some(*own));
        }
        if stay().count() < self.lanes_max {
            return Ok(None);
        }
        // Share: by hash among those that take new slabs, else among those that outlive this grant.
        let new: Vec<LaneId> = stay().filter(|(_, lane)| takes_new(lane)).map(|(id, _)| *id).collect();
        let outlives = |lane: &Lane| at.after(ttl) < lane.opened_at.after(LANE_LIFE_MAX);
        let candidates =
            if new.is_empty() { stay().filter(|(_, lane)| outlives(lane)).map(|(id, _)| *id).collect() } else { new };
        if candidates.is_empty() {
            return Err(ArmRefusal::NoLane { limit: self.lanes_max });
        }
        let random = u64::from_le_bytes(writer.0[..8].try_into().expect("a writer id has 16 bytes"));
        let place = random % candidates.len() as u64;
        Ok(Some(candidates[usize::try_from(place).expect("smaller than a length")]))
    }

    fn open_lane(&mut self, at: NodeTime, writer: WriterId) -> LaneId {
        let id = LaneId(self.next_lane);
        self.next_lane += 1;
        self.lanes.insert(id, Lane { writer, opened_at: at, open: BTreeSet::new(), touched: BTreeSet::new() });
        id
    }

    /// Closes an open claim, and its lane if it was the last open one there.
    fn close_claim(&mut self, at: NodeTime, id: GrantId, closing: &mut Closing) {
        let Some(claim) = self.claim_mut(id) else { return };
        if !matches!(claim.state, State::Open { .. }) {
            return;
        }
        claim.state = State::Closed { at, with_lane: false };
        let Some(lane) = claim.lane else {
            assert!(self.own.remove(&id), "an open claim has an open lane, or is this node's own");
            return;
        };
        closing.claims.push((lane, id));
        let on = self.lanes.get_mut(&lane).expect("a claim names its lane while that is open");
        on.open.remove(&id);
        if on.open.is_empty() {
            self.kill_lane(at, lane, closing);
        }
    }

    /// Closes a lane, if it is open, and every claim on it.
    fn kill_lane(&mut self, at: NodeTime, lane: LaneId, closing: &mut Closing) {
        let Some(gone) = self.lanes.remove(&lane) else { return };
        closing.lanes.push(lane);
        for id in gone.touched {
            let Some(claim) = self.claim_mut(id) else { continue };
            claim.lane = None;
            if matches!(claim.state, State::Open { .. }) {
                claim.state = State::Closed { at, with_lane: true };
            }
        }
    }

    fn forget(&mut self, id: GrantId) {
        let Some((region, extent)) = self.places.remove(&id) else { return };
        let claim = self
            .regions
            .get_mut(&region)
            .and_then(|region| region.extents.get_mut(&extent)?.claims.remove(&id))
            .expect("places name known claims");
        if let Some(lane) = claim.lane.and_then(|lane| self.lanes.get_mut(&lane)) {
            lane.touched.remove(&id);
        }
    }

    fn owned(&self, grant: GrantId, writer: WriterId) -> Result<&Claim, ConfirmRefusal> {
        let claim = self.claim(grant).ok_or(ConfirmRefusal::UnknownGrant { grant })?;
        let owner = claim.grant.writer;
        if owner == writer { Ok(claim) } else { Err(ConfirmRefusal::Writer { owner, found: writer }) }
    }

    fn ids(&self, such: impl Fn(&Claim) -> bool) -> Vec<GrantId> {
        let extents = self.regions.values().flat_map(|region| region.extents.values());
        let claims = extents.flat_map(|extent| extent.claims.iter());
        claims.filter(|(_, claim)| such(claim)).map(|(id, _)| *id).collect()
    }

    fn extent(&self, (region, extent): (RegionIndex, ExtentIndex)) -> Option<&ExtentClaims> {
        self.regions.get(&region)?.extents.get(&extent)
    }

    fn claim(&self, id: GrantId) -> Option<&Claim> {
        self.extent(*self.places.get(&id)?)?.claims.get(&id)
    }

    fn claim_mut(&mut self, id: GrantId) -> Option<&mut Claim> {
        let (region, extent) = self.places.get(&id)?;
        self.regions.get_mut(region)?.extents.get_mut(extent)?.claims.get_mut(&id)
    }

    /// Checks what must always hold between the parts.
    #[cfg(test)]
    fn check(&self) {
        let extents = self.regions.values().flat_map(|region| region.extents.values());
        let claims: Vec<(&GrantId, &Claim)> = extents.flat_map(|extent| extent.claims.iter()).collect();
        assert_eq!(claims.len(), self.places.len(), "places are exactly the claims");
        for (id, claim) in claims {
            let open = matches!(claim.state, State::Open { .. });
            let on = claim.lane.map(|lane| self.lanes.get(&lane).expect("a claim names open lanes only"));
            let on_lane = on.is_some_and(|lane| lane.open.contains(id));
            assert!(!(on_lane && self.own.contains(id)), "what this node writes needs no lane");
            assert_eq!(
                open,
                on_lane || self.own.contains(id),
                "open claims are open on their lane, or this node's own"
            );
            assert!(on.is_none_or(|lane| lane.touched.contains(id)), "a lane knows who was on it");
        }
        for lane in self.lanes.values() {
            assert!(!lane.open.is_empty(), "a lane closes with its last claim");
            assert!(lane.open.is_subset(&lane.touched), "open claims were armed");
        }
        assert!(self.lanes.len() <= self.lanes_max, "lanes are capped");
        assert!(self.own.iter().all(|id| self.places.contains_key(id)), "own claims are known");
    }
}

impl Claim {
    /// What a repeated arm of this claim's grant gets.
    fn again(&self, grant: &Grant, holder: &GrantHolder) -> Result<ArmPlan, ArmRefusal> {
        // Another leader may have signed it again; anything else that differs is not this grant.
        let same = Grant { meta: self.grant.meta, ..grant.clone() } == *self.grant;
        if !same {
            return Err(ArmRefusal::LowerToken { highest: self.token, found: grant.token(holder) });
        }
        match (self.state, self.lane) {
            (State::Open { .. }, Some(lane)) => Ok(ArmPlan::Again { lane }),
            (State::Closed { with_lane: true, .. }, _) => Err(ArmRefusal::LaneClosed { grant: grant.id }),
            (State::Closed { .. } | State::Open { .. }, _) => Err(ArmRefusal::Closed { grant: grant.id }),
        }
    }
}

impl ExtentClaims {
    /// The claims that a grant with `token` over `span` would close.
    fn older_than(&self, token: Token, span: &Range<u64>) -> Result<Vec<GrantId>, ArmRefusal> {
        if token.lend < self.lend {
            return Err(ArmRefusal::Lending { current: self.lend, found: token.lend });
        }
        let over = || self.claims.iter().filter(|(_, claim)| overlap(&claim.span, span));
        let highest = over().map(|(_, claim)| claim.token).max().max(self.floor);
        match highest {
            Some(highest) if highest >= token => Err(ArmRefusal::LowerToken { highest, found: token }),
            _ => Ok(over().map(|(id, _)| *id).collect()),
        }
    }

    /// Claims with nothing left to confirm or to refuse once `claim` is here: its token is higher than theirs on all their bytes.
    fn covered_by(&self, claim: &Claim) -> Vec<GrantId> {
        let covered = |other: &Claim| {
            other.token < claim.token && claim.span.start <= other.span.start && other.span.end <= claim.span.end
        };
        self.claims.iter().filter(|(_, other)| covered(other)).map(|(id, _)| *id).collect()
    }
}
