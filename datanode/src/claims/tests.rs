use super::*;
use proptest::prelude::*;
use quarry_wire::{
    grant::{Class, Purpose},
    ids::{Generation, NamespaceId, Ordinal, ShardId},
    limits::LANES_MAX,
    units::{SlotCount, SlotSize},
};

const NODE: NodeId = NodeId(4);
const REGION: RegionIndex = RegionIndex(0);
const GENERATION: Generation = Generation(1);
const LIFE: Incarnation = Incarnation::new(GENERATION, 1);
const LENGTH: u64 = 1 << 20; // extents of 64 KiB
const EXTENT: u64 = LENGTH / 16;
const SLOT: u64 = 4096;
const TTL: Duration = Duration::from_secs(30);

fn at(seconds: u64) -> NodeTime {
    NodeTime(Duration::from_secs(seconds))
}
fn writer(number: u8) -> WriterId {
    WriterId([number; 16])
}
fn id(sequence: u64) -> GrantId {
    GrantId { shard: ShardId(1), sequence: Ordinal { generation: GENERATION, number: sequence } }
}

/// A grant over slots `first..first + slots` of extent `extent`.
fn grant(sequence: u64, lend: u64, by: u8, extent: u32, first: u64, slots: u32) -> Arc<Grant> {
    Arc::new(Grant {
        id: id(sequence),
        meta: NodeId(1),
        purpose: Purpose::Write,
        writer: writer(by),
        namespace: NamespaceId(1),
        class: Class::Cache,
        least: 1,
        slot_size: SlotSize(u32::try_from(SLOT).unwrap()),
        slots: SlotCount(slots),
        ttl: TTL,
        holders: vec![GrantHolder {
            region: RegionId { node: NODE, index: REGION },
            incarnation: LIFE,
            extent: ExtentIndex(extent),
            lend: LendNumber::new(GENERATION, lend),
            base: Offset(u64::from(extent) * EXTENT + first * SLOT),
        }],
    })
}
fn claims() -> Claims {
    let mut claims = Claims::new(NODE, 8);
    claims.begin(REGION, LIFE, LENGTH);
    claims
}
fn arm(claims: &mut Claims, now: NodeTime, grant: &Arc<Grant>) -> Result<ArmPlan, ArmRefusal> {
    let plan = claims.arm(now, grant, grant.writer);
    claims.check();
    plan
}
fn new_lane(plan: Result<ArmPlan, ArmRefusal>) -> (LaneId, Closing) {
    match plan {
        Ok(ArmPlan::New { closing, lane, .. }) => (lane, closing),
        other => panic!("not newly armed: {other:?}"),
    }
}

#[test]
fn a_higher_token_closes_the_older_claim_and_its_lane() {
    let mut claims = claims();
    let (old_lane, _) = new_lane(arm(&mut claims, at(0), &grant(1, 1, 1, 0, 0, 4)));
    let (lane, closing) = new_lane(arm(&mut claims, at(1), &grant(2, 1, 2, 0, 3, 4)));
    assert_ne!(lane, old_lane);
    assert_eq!(closing, Closing { claims: vec![(old_lane, id(1))], lanes: vec![old_lane] });
}

#[test]
fn a_lane_closes_for_a_claim_that_closed_long_before_on_it() {
    let mut claims = claims();
    let (lane, _) = new_lane(arm(&mut claims, at(0), &grant(1, 1, 1, 0, 0, 4)));
    let (same, _) = new_lane(arm(&mut claims, at(1), &grant(2, 1, 1, 0, 4, 4)));
    assert_eq!(lane, same, "one writer, one lane");
    let closing = claims.close(at(2), id(1), writer(1)).unwrap();
    assert_eq!(closing, Closing { claims: vec![(lane, id(1))], lanes: vec![] });
    // Another writer gets the bytes of the closed claim: a write that started there may still be landing.
    let (_, closing) = new_lane(arm(&mut claims, at(3), &grant(3, 1, 2, 0, 0, 4)));
    assert_eq!(closing.lanes, [lane]);
    assert_eq!(arm(&mut claims, at(3), &grant(2, 1, 1, 0, 4, 4)), Err(ArmRefusal::LaneClosed { grant: id(2) }));
    assert!(claims.confirmable(id(2), writer(1)).unwrap().slot(SlotIndex(0)).is_ok(), "what was completed counts");
}

#[test]
fn lower_and_equal_tokens_are_refused_also_after_the_claim_closed() {
    let mut claims = claims();
    let _ = new_lane(arm(&mut claims, at(0), &grant(5, 2, 1, 0, 0, 4)));
    for round in 0..2 {
        let lower = arm(&mut claims, at(1), &grant(4, 2, 2, 0, 3, 1));
        assert!(matches!(lower, Err(ArmRefusal::LowerToken { highest, .. }) if highest.sequence == 5), "{round}");
        let mut equal = (*grant(5, 2, 2, 0, 3, 1)).clone();
        equal.id.shard = ShardId(2);
        assert!(matches!(arm(&mut claims, at(1), &Arc::new(equal)), Err(ArmRefusal::LowerToken { .. })));
        let lending = arm(&mut claims, at(1), &grant(9, 1, 2, 0, 8, 1));
        assert!(matches!(lending, Err(ArmRefusal::Lending { .. })));
        let _ = claims.close(at(1), id(5), writer(1)).unwrap();
    }
}

#[test]
fn a_repeated_arm_of_the_live_grant_stays_on_its_lane_also_when_signed_again() {
    let mut claims = claims();
    let first = grant(1, 1, 1, 0, 0, 4);
    let (lane, _) = new_lane(arm(&mut claims, at(0), &first));
    let again = Arc::new(Grant { meta: NodeId(2), ..(*first).clone() });
    assert_eq!(arm(&mut claims, at(29), &again), Ok(ArmPlan::Again { lane }));
    let other = Arc::new(Grant { slots: SlotCount(3), ..(*first).clone() });
    assert!(matches!(arm(&mut claims, at(29), &other), Err(ArmRefusal::LowerToken { .. })));
    assert!(claims.expire(at(29)).is_empty(), "the repeat did not renew it");
    assert_eq!(claims.expire(at(30)).lanes, [lane]);
}

#[test]
fn a_closed_grant_never_arms_again_in_its_incarnation() {
    let mut claims = claims();
    let first = grant(1, 1, 1, 0, 0, 4);
    let _ = new_lane(arm(&mut claims, at(0), &first));
    let _ = claims.close(at(1), id(1), writer(1)).unwrap();
    assert_eq!(arm(&mut claims, at(2), &first), Err(ArmRefusal::Closed { grant: id(1) }));
    assert!(claims.expire(at(1).after(CLOSED_KEPT)).is_empty());
    assert_eq!(claims.known_claims(), 0, "forgotten");
    assert!(matches!(arm(&mut claims, at(500), &first), Err(ArmRefusal::LowerToken { .. })), "and still refused");
    let _ = claims.void(at(501), REGION);
    claims.begin(REGION, Incarnation::new(GENERATION, 2), LENGTH);
    assert!(matches!(arm(&mut claims, at(502), &first), Err(ArmRefusal::Incarnation { .. })));
}

#[test]
fn superseded_is_judged_slot_by_slot() {
    let mut claims = claims();
    let _ = new_lane(arm(&mut claims, at(0), &grant(1, 1, 1, 0, 0, 4)));
    let _ = new_lane(arm(&mut claims, at(1), &grant(2, 1, 2, 0, 2, 4)));
    let first = claims.confirmable(id(1), writer(1)).unwrap();
    assert_eq!(first.slot(SlotIndex(1)), Ok(Offset(SLOT)));
    assert!(matches!(first.slot(SlotIndex(2)), Err(ConfirmRefusal::Superseded { by, .. }) if by.sequence == 2));
    assert!(matches!(first.slot(SlotIndex(4)), Err(ConfirmRefusal::NoSuchSlot { .. })));
    assert!(matches!(claims.confirmable(id(1), writer(2)), Err(ConfirmRefusal::Writer { .. })));
    assert!(matches!(claims.confirmable(id(3), writer(2)), Err(ConfirmRefusal::UnknownGrant { .. })));
}

#[test]
fn grants_of_other_writers_nodes_lives_and_places_are_refused() {
    let mut claims = claims();
    let good = grant(1, 1, 1, 0, 0, 4);
    assert!(matches!(claims.arm(at(0), &good, writer(2)), Err(ArmRefusal::Writer { .. })));
    let with = |change: &dyn Fn(&mut GrantHolder)| {
        let mut grant = (*good).clone();
        change(&mut grant.holders[0]);
        Arc::new(grant)
    };
    let elsewhere = arm(&mut claims, at(0), &with(&|holder| holder.region.node = NodeId(9)));
    assert!(matches!(elsewhere, Err(ArmRefusal::NotAHolder { .. })));
    let no_region = arm(&mut claims, at(0), &with(&|holder| holder.region.index = RegionIndex(1)));
    assert!(matches!(no_region, Err(ArmRefusal::NoIncarnation { .. })));
    let life = arm(&mut claims, at(0), &with(&|holder| holder.incarnation = Incarnation::new(GENERATION, 2)));
    assert!(matches!(life, Err(ArmRefusal::Incarnation { .. })));
    for base in [EXTENT - SLOT, EXTENT, LENGTH, u64::MAX / 2] {
        let outside = arm(&mut claims, at(0), &with(&|holder| holder.base = Offset(base)));
        assert!(matches!(outside, Err(ArmRefusal::OutOfBounds { .. })), "{base}");
    }
    let extent = arm(&mut claims, at(0), &with(&|holder| holder.extent = ExtentIndex(u32::MAX)));
    assert!(matches!(extent, Err(ArmRefusal::OutOfBounds { .. })));
    assert_eq!(claims.known_claims(), 0);
}

#[test]
fn a_lane_takes_new_slabs_for_five_seconds_and_lives_no_longer_than_its_limit() {
    let mut claims = claims();
    let (first, _) = new_lane(arm(&mut claims, at(0), &grant(1, 1, 1, 0, 0, 1)));
    let (second, _) = new_lane(arm(&mut claims, at(4), &grant(2, 1, 1, 0, 1, 1)));
    let (third, _) = new_lane(arm(&mut claims, at(5), &grant(3, 1, 1, 0, 2, 1)));
    assert_eq!((first == second, first == third), (true, false));
    assert_eq!(claims.expire(at(34)).lanes, [first], "with its last claim");
    assert_eq!(claims.expire(at(35)).lanes, [third]);
    assert_eq!((claims.open_lanes(), claims.open_claims()), (0, 0));
}

#[test]
fn beyond_the_cap_writers_share_and_a_forced_close_hits_all_of_them() {
    let mut claims = Claims::new(NODE, 1);
    claims.begin(REGION, LIFE, LENGTH);
    let (lane, _) = new_lane(arm(&mut claims, at(0), &grant(1, 1, 1, 0, 0, 1)));
    let (shared, _) = new_lane(arm(&mut claims, at(1), &grant(2, 1, 2, 0, 1, 1)));
    assert_eq!(lane, shared);
    let late = arm(&mut claims, at(11), &grant(3, 1, 3, 0, 2, 1));
    assert_eq!(late, Err(ArmRefusal::NoLane { limit: 1 }), "the lane may end before this grant does");
    assert_eq!(claims.force_lane_closed(at(12), lane).lanes, [lane]);
    for (sequence, by, first) in [(1, 1, 0), (2, 2, 1)] {
        let again = arm(&mut claims, at(12), &grant(sequence, 1, by, 0, first, 1));
        assert_eq!(again, Err(ArmRefusal::LaneClosed { grant: id(sequence) }));
    }
    let _ = new_lane(arm(&mut claims, at(13), &grant(3, 1, 3, 0, 2, 1)));
}

#[test]
fn four_hundred_writers_share_the_lanes_of_a_node_by_hash_and_none_is_refused() {
    let mut claims = Claims::new(NODE, LANES_MAX);
    claims.begin(REGION, LIFE, 4 * LENGTH);
    let mut on: BTreeMap<LaneId, u32> = BTreeMap::new();
    for number in 0..400_u64 {
        let mut grant = (*grant(number + 1, 1, 1, 0, 0, 1)).clone();
        let mut random = [0; 16];
        // As random as those of real writers.
        random[..8].copy_from_slice(&(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 8).to_le_bytes());
        grant.writer = WriterId(random);
        grant.holders[0].extent = ExtentIndex(u32::try_from(number * SLOT / (4 * EXTENT)).unwrap());
        grant.holders[0].base = Offset(number * SLOT);
        let (lane, closing) = new_lane(arm(&mut claims, at(0), &Arc::new(grant)));
        assert!(closing.is_empty(), "nobody is closed for another's sake");
        *on.entry(lane).or_default() += 1;
    }
    assert_eq!((on.len(), claims.open_lanes(), claims.open_claims()), (LANES_MAX, LANES_MAX, 400));
    assert!(on.values().all(|writers| *writers <= 8), "{on:?}");
}

#[test]
fn a_refusal_for_want_of_a_lane_closes_nothing() {
    let mut claims = Claims::new(NODE, 2);
    claims.begin(REGION, LIFE, LENGTH);
    let _ = new_lane(arm(&mut claims, at(0), &grant(1, 1, 1, 0, 0, 2)));
    let _ = new_lane(arm(&mut claims, at(0), &grant(2, 1, 2, 0, 2, 2)));
    // Closing grant 1's lane makes room, so this one is armed.
    let (_, closing) = new_lane(arm(&mut claims, at(11), &grant(3, 1, 3, 0, 0, 1)));
    assert_eq!(closing.claims.len(), 1);
    let mut full = claims.clone();
    assert!(matches!(arm(&mut full, at(21), &grant(4, 1, 4, 0, 8, 1)), Err(ArmRefusal::NoLane { .. })));
    assert_eq!(full.open_claims(), claims.open_claims());
}

#[test]
fn voiding_a_region_closes_every_lane_that_reaches_it_and_forgets_its_claims() {
    let mut claims = claims();
    claims.begin(RegionIndex(1), LIFE, LENGTH);
    let (lane, _) = new_lane(arm(&mut claims, at(0), &grant(1, 1, 1, 0, 0, 4)));
    let mut other = (*grant(2, 1, 2, 0, 0, 4)).clone();
    other.holders[0].region.index = RegionIndex(1);
    let (other_lane, _) = new_lane(arm(&mut claims, at(0), &Arc::new(other)));
    assert_eq!(claims.void(at(1), REGION).lanes, [lane]);
    claims.check();
    assert!(claims.confirmable(id(1), writer(1)).is_err());
    assert!(claims.confirmable(id(2), writer(2)).is_ok());
    assert_eq!(claims.void(at(2), RegionIndex(1)).lanes, [other_lane]);
    assert_eq!((claims.open_lanes(), claims.known_claims()), (0, 0));
}

#[test]
fn what_the_node_writes_itself_closes_older_claims_with_their_lanes_and_is_closed_by_newer_ones() {
    let mut claims = claims();
    let (lane, _) = new_lane(arm(&mut claims, at(0), &grant(1, 1, 1, 0, 0, 4)));
    let own = grant(2, 1, 9, 0, 3, 4);
    let closing = claims.arm_own(at(1), &own).unwrap();
    claims.check();
    assert_eq!(closing, Closing { claims: vec![(lane, id(1))], lanes: vec![lane] });
    assert_eq!((claims.open_claims(), claims.open_lanes()), (1, 0));
    assert_eq!(claims.own_slot(id(2), SlotIndex(1)), Some(Offset(4 * SLOT)));
    assert_eq!(claims.own_slot(id(2), SlotIndex(4)), None, "the slab has no such slot");
    assert_eq!(claims.own_slot(id(1), SlotIndex(0)), None, "that one is a writer's");
    // Lower and equal tokens, and the same one again, are refused.
    assert_eq!(claims.arm_own(at(2), &own), Err(ArmRefusal::Closed { grant: id(2) }));
    assert!(matches!(claims.arm_own(at(2), &grant(1, 1, 9, 0, 4, 1)), Err(ArmRefusal::Closed { .. })));
    let (_, closing) = new_lane(arm(&mut claims, at(3), &grant(3, 1, 1, 0, 6, 4)));
    assert!(closing.is_empty(), "there is no lane to close");
    assert_eq!(claims.own_slot(id(2), SlotIndex(0)), None, "not one byte more, also beside what was taken");
    let left = claims.confirmable(id(2), writer(9)).unwrap();
    assert!(left.slot(SlotIndex(0)).is_ok(), "what was whole before counts");
    assert!(matches!(left.slot(SlotIndex(3)), Err(ConfirmRefusal::Superseded { .. })));
    assert_eq!(arm(&mut claims, at(3), &own).unwrap_err(), ArmRefusal::Closed { grant: id(2) });
}

#[test]
fn what_the_node_writes_itself_ends_with_its_time_its_close_and_its_regions_life() {
    for end in 0..3 {
        let mut claims = claims();
        let own = grant(1, 1, 9, 0, 0, 4);
        assert!(claims.arm_own(at(0), &own).unwrap().is_empty());
        match end {
            0 => assert!(claims.expire(at(30)).is_empty()),
            1 => assert!(claims.close(at(1), id(1), writer(9)).unwrap().is_empty()),
            _ => assert!(claims.void(at(1), REGION).is_empty()),
        }
        claims.check();
        assert_eq!((claims.own_slot(id(1), SlotIndex(0)), claims.open_claims()), (None, 0), "{end}");
    }
}

/// What happens to a node, in any order.
#[derive(Clone, Debug)]
enum Event {
    Arm {
        nth: usize,
    },
    /// For the node itself.
    ArmOwn {
        nth: usize,
    },
    Close {
        nth: usize,
    },
    Pass {
        seconds: u64,
    },
    Force {
        nth: usize,
    },
}

/// Grants as shards give them: one name, one content.
fn grants() -> impl Strategy<Value = Vec<Arc<Grant>>> {
    let content = (1u64..3, 1u8..4, 0u32..2, 0u64..6, 1u32..5);
    prop::collection::vec(content, 2..24).prop_map(|contents| {
        let numbered = (1..).zip(contents);
        numbered
            .map(|(sequence, (lend, by, extent, first, slots))| grant(sequence, lend, by, extent, first, slots))
            .collect()
    })
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => any::<usize>().prop_map(|nth| Event::Arm { nth }),
        3 => any::<usize>().prop_map(|nth| Event::ArmOwn { nth }),
        2 => any::<usize>().prop_map(|nth| Event::Close { nth }),
        2 => (1u64..40).prop_map(|seconds| Event::Pass { seconds }),
        1 => any::<usize>().prop_map(|nth| Event::Force { nth }),
    ]
}

/// The reference: everything that was ever armed, never forgotten.
#[derive(Default)]
struct History {
    armed: Vec<Past>,
    open_lanes: BTreeSet<LaneId>,
}
struct Past {
    grant: Arc<Grant>,
    token: Token,
    extent: ExtentIndex,
    span: Range<u64>,
    /// None if the node itself writes.
    lane: Option<LaneId>,
    open: bool,
    closed_at: NodeTime,
}

impl History {
    fn close(&mut self, now: NodeTime, closing: &Closing) {
        for lane in &closing.lanes {
            assert!(self.open_lanes.remove(lane), "closed a lane that is not open");
        }
        for past in &mut self.armed {
            let gone = closing.claims.iter().any(|(_, id)| *id == past.grant.id)
                || past.lane.is_some_and(|lane| closing.lanes.contains(&lane));
            if gone && past.open {
                past.open = false;
                past.closed_at = now;
            }
        }
    }
    fn over<'a>(&'a self, extent: ExtentIndex, span: &'a Range<u64>) -> impl Iterator<Item = &'a Past> {
        self.armed.iter().filter(move |past| past.extent == extent && overlap(&past.span, span))
    }
    fn judge_arm(&mut self, now: NodeTime, grant: &Arc<Grant>, plan: Result<ArmPlan, ArmRefusal>) {
        let holder = grant.holders[0];
        let (token, span, extent) = (grant.token(&holder), grant.span(&holder), holder.extent);
        let known = self.armed.iter().find(|past| past.grant.id == grant.id);
        let in_extent = || self.armed.iter().filter(|past| past.extent == extent);
        let lent_again = in_extent().any(|past| past.token.lend > token.lend);
        let not_above = self.over(extent, &span).any(|past| past.token >= token);
        match plan {
            Ok(ArmPlan::Again { lane }) => {
                let known = known.expect("armed before");
                assert!(known.open && known.lane == Some(lane) && known.grant == *grant);
            }
            Ok(ArmPlan::New { closing, lane, opens }) => {
                assert!(known.is_none(), "a grant is armed once");
                assert!(!lent_again && !not_above, "armed below a higher token");
                self.close(now, &closing);
                for past in &mut self.armed {
                    if past.open && past.lane.is_none() && past.extent == extent && overlap(&past.span, &span) {
                        (past.open, past.closed_at) = (false, now);
                    }
                }
                assert_eq!(opens, self.open_lanes.insert(lane), "opens exactly the lanes that are not open");
                self.armed.push(Past {
                    grant: Arc::clone(grant),
                    token,
                    extent,
                    span,
                    lane: Some(lane),
                    open: true,
                    closed_at: now,
                });
            }
            Err(ArmRefusal::NoLane { .. }) => {}
            Err(refusal) => {
                let floor = in_extent()
                    .any(|past| !past.open && past.token >= token && now.since(past.closed_at) >= CLOSED_KEPT);
                let live = known.is_some_and(|past| past.open && past.lane.is_some() && past.grant == *grant);
                assert!(!live, "a live grant was refused: {refusal}");
                assert!(known.is_some() || lent_again || not_above || floor, "refused without a reason: {refusal}");
            }
        }
    }
    fn judge_own(&mut self, now: NodeTime, grant: &Arc<Grant>, closing: Result<Closing, ArmRefusal>) {
        let holder = grant.holders[0];
        let (token, span, extent) = (grant.token(&holder), grant.span(&holder), holder.extent);
        match closing {
            Ok(closing) => {
                assert!(self.armed.iter().all(|past| past.grant.id != grant.id), "a grant is armed once");
                assert!(self.over(extent, &span).all(|past| past.token < token), "armed below a higher token");
                self.close(now, &closing);
                // An older claim without a lane has nothing to carry out.
                for past in &mut self.armed {
                    if past.open && past.lane.is_none() && past.extent == extent && overlap(&past.span, &span) {
                        (past.open, past.closed_at) = (false, now);
                    }
                }
                let (grant, lane, open) = (Arc::clone(grant), None, true);
                self.armed.push(Past { grant, token, extent, span, lane, open, closed_at: now });
            }
            Err(_) if self.armed.iter().any(|past| past.grant.id == grant.id) => {}
            Err(refusal) => self.judge_arm(now, grant, Err(refusal)),
        }
    }
    fn judge(&self, claims: &Claims, now: NodeTime) {
        for one in &self.armed {
            let later: Vec<&Past> = self.over(one.extent, &one.span).filter(|other| other.token > one.token).collect();
            if !later.is_empty() {
                assert!(!one.open, "two open claims overlap");
                assert!(
                    one.lane.is_none_or(|lane| !self.open_lanes.contains(&lane)),
                    "an earlier writer's lane can reach a later one's bytes"
                );
            }
            let writes = claims.own_slot(one.grant.id, SlotIndex(0)).is_some();
            assert_eq!(writes, one.open && one.lane.is_none(), "the node writes exactly while its claim is open");
            let said = claims.confirmable(one.grant.id, one.grant.writer);
            let covered = later.iter().any(|by| by.span.start <= one.span.start && one.span.end <= by.span.end);
            let old = !one.open && now.since(one.closed_at) >= CLOSED_KEPT;
            let Ok(said) = said else {
                assert!(covered || old, "forgotten too early");
                continue;
            };
            for slot in 0..one.grant.slots.0 {
                let slot = SlotIndex(slot);
                let start = one.grant.offset(&one.grant.holders[0], slot).unwrap().0;
                let taken = later.iter().any(|by| overlap(&by.span, &(start..start + SLOT)));
                assert_eq!(said.slot(slot).is_err(), taken, "a slot is confirmed until its bytes are claimed again");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// No two open claims overlap; no lane of an older claim survives a newer one over its bytes; lower and equal tokens are refused for ever;
    /// each slot is confirmed exactly until it is claimed again; nothing is refused without a reason.
    #[test]
    fn claims_agree_with_a_history_that_forgets_nothing(grants in grants(), events in prop::collection::vec(event(), 1..60)) {
        let mut claims = Claims::new(NODE, 3);
        claims.begin(REGION, LIFE, LENGTH);
        let mut history = History::default();
        let mut now = NodeTime::default();
        for event in events {
            match event {
                Event::Arm { nth } => {
                    let grant = &grants[nth % grants.len()];
                    let plan = claims.arm(now, grant, grant.writer);
                    history.judge_arm(now, grant, plan);
                }
                Event::ArmOwn { nth } => {
                    let grant = &grants[nth % grants.len()];
                    let closing = claims.arm_own(now, grant);
                    history.judge_own(now, grant, closing);
                }
                Event::Close { nth } if !history.armed.is_empty() => {
                    let nth = nth % history.armed.len();
                    let past = &mut history.armed[nth];
                    let closing = claims.close(now, past.grant.id, past.grant.writer).unwrap_or_default();
                    if past.open && past.lane.is_none() {
                        (past.open, past.closed_at) = (false, now);
                    }
                    history.close(now, &closing);
                }
                Event::Force { nth } if !history.open_lanes.is_empty() => {
                    let lane = *history.open_lanes.iter().nth(nth % history.open_lanes.len()).unwrap();
                    let closing = claims.force_lane_closed(now, lane);
                    history.close(now, &closing);
                }
                Event::Pass { seconds } => {
                    now = now.after(Duration::from_secs(seconds));
                    let closing = claims.expire(now);
                    for past in history.armed.iter_mut().filter(|past| past.open && past.lane.is_none()) {
                        if now >= past.closed_at.after(past.grant.ttl) {
                            (past.open, past.closed_at) = (false, now);
                        }
                    }
                    history.close(now, &closing);
                }
                Event::Close { .. } | Event::Force { .. } => {}
            }
            claims.check();
            history.judge(&claims, now);
        }
        let closing = claims.expire(now.after(LANE_LIFE_MAX));
        history.close(now, &closing);
        let end = now.after(LANE_LIFE_MAX).after(CLOSED_KEPT);
        let rest = claims.expire(end);
        prop_assert!(rest.is_empty());
        prop_assert_eq!((claims.known_claims(), claims.open_lanes(), history.open_lanes.len()), (0, 0, 0), "nothing leaks");
    }
}
