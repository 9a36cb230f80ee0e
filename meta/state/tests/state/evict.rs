//! Eviction: which slabs go, what stays, and when their memory is granted again.

use crate::bench::{Bench, EXTENTS, GEN, META, REGION_BYTES, SLOT, SPACE, TTL, attested, entry, key, writer};
use quarry_meta_state::{
    directory::{FeedChange, Labels, Policy, Standing},
    shard::{
        CommitRefusal, Committed, EvictRefusal, Evicted, GrantRefusal, GrantRequest, Lack, Marks, Mode, Need,
        ShardCommand, ShardOutcome, Victim,
    },
};
use quarry_wire::{
    grant::{Class, Grant},
    ids::{GrantId, NamespaceId, NodeId, Ordinal},
    limits::QUARANTINE,
    units::{LogTime, SlotCount, SlotSize, millis},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

const EXTENT: u64 = REGION_BYTES / EXTENTS as u64;
const MARKS: Marks = Marks { low: 125, high: 188 };
const NO_LACK: BTreeSet<Lack> = BTreeSet::new();

fn evict(bench: &mut Bench, victims: &[GrantId]) -> Vec<Result<Evicted, EvictRefusal>> {
    match bench.apply(ShardCommand::Evict { victims: victims.to_vec() }) {
        ShardOutcome::Evict(outcomes) => outcomes,
        other => panic!("{other:?}"),
    }
}

/// A slab of `slots` slots, all of them committed, under the keys `name0`, `name1` and so on.
fn filled(bench: &mut Bench, name: &str, slots: u32) -> Grant {
    let grant = bench.grant(slots);
    fill(bench, &grant, name);
    grant
}

fn fill(bench: &mut Bench, grant: &Grant, name: &str) {
    let entries = (0..grant.slots.0).map(|slot| entry(slot, &format!("{name}{slot}"), 5, Mode::Replace)).collect();
    let nodes = grant.holders.iter().map(|holder| attested(holder.region.node.0)).collect();
    let outcomes = bench.publish_with(grant, entries, nodes);
    assert!(outcomes.iter().all(|outcome| *outcome == Ok(Committed::Applied)), "{outcomes:?}");
}

fn victims(bench: &Bench, lacks: &BTreeSet<Lack>, leased: &BTreeMap<Ordinal, u64>) -> Vec<Victim> {
    let last = |slab| LogTime(leased.get(&slab).copied().unwrap_or(0));
    let need = Need { marks: MARKS, lacks, wanted: None, pressed: &BTreeSet::new(), coming: &BTreeMap::new() };
    bench.shard.victims(need, last)
}

#[test]
fn an_evicted_slab_goes_whole_and_its_memory_is_granted_again_only_after_the_horizon_and_the_quarantine() {
    let mut bench = Bench::new(2);
    let all = bench.free_bytes();
    let grant = filled(&mut bench, "k", 4);
    let horizon = bench.tick(Some(bench.at + 9_000));
    let bytes = 8 * u64::from(SLOT);
    assert_eq!(evict(&mut bench, &[grant.id]), [Ok(Evicted { values: 4, bytes })]);
    assert_eq!(bench.shard.values(), 0);
    let space = bench.shard.space().total;
    assert_eq!((space.resting_bytes, space.committed_slots), (bytes, 0));
    bench.wait(horizon.0 + millis(QUARANTINE) - bench.at - 1);
    assert_eq!(bench.free_bytes(), all - bytes);
    bench.wait(1);
    assert_eq!(bench.free_bytes(), all);
    bench.drain();
}

#[test]
fn a_key_that_was_evicted_can_be_created_again_and_its_commit_of_before_keeps_its_outcome() {
    let mut bench = Bench::new(1);
    let grant = filled(&mut bench, "k", 1);
    evict(&mut bench, &[grant.id]).remove(0).unwrap();
    assert_eq!(bench.current("k0"), None);
    let again = entry(0, "k0", 5, Mode::Replace);
    assert_eq!(bench.commit(&grant, again.clone()), Ok(Committed::Applied), "the outcome that was recorded");
    assert_eq!(bench.current("k0"), None, "and no effect");
    let other = bench.grant(1);
    assert_eq!(bench.commit(&other, entry(0, "k0", 3, Mode::Create)), Ok(Committed::Applied));
    bench.wait(200_000);
    let unknown = Err(CommitRefusal::UnknownGrant { grant: grant.id });
    assert_eq!(bench.commit(&grant, again), unknown, "outcomes are kept for their time");
    bench.drain();
}

#[test]
fn what_cannot_go_is_refused_with_its_reason_and_changes_nothing() {
    let mut bench = Bench::new(1);
    let open = bench.grant(2);
    bench.commit(&open, entry(0, "open", 5, Mode::Create)).unwrap();
    let sealed = bench.grant(2);
    bench.seal(&sealed, 1);
    let pinned = filled(&mut bench, "pinned", 2);
    let pin = bench.pin(1, &["pinned1"], 500_000);
    let empty = filled(&mut bench, "empty", 1);
    bench.delete("empty0").unwrap();
    let unknown = GrantId { sequence: Ordinal { generation: GEN, number: 99 }, ..open.id };
    let named = [open.id, sealed.id, pinned.id, empty.id, unknown];
    let refused = [
        EvictRefusal::StillGranted { grant: open.id },
        EvictRefusal::StillGranted { grant: sealed.id },
        EvictRefusal::Pinned { grant: pinned.id },
        EvictRefusal::Empty { grant: empty.id },
        EvictRefusal::UnknownSlab { grant: unknown },
    ];
    let before = bench.shard.hash();
    assert_eq!(evict(&mut bench, &named), refused.map(Err));
    assert_eq!(bench.shard.hash(), before, "nothing was changed");
    assert_eq!(victims(&bench, &NO_LACK, &BTreeMap::new()), []);
    // The version that is pinned stays though it is current no more.
    bench.delete("pinned1").unwrap();
    assert_eq!(evict(&mut bench, &[pinned.id]), [Err(EvictRefusal::Pinned { grant: pinned.id })]);
    bench.release(1, pin);
    evict(&mut bench, &[pinned.id]).remove(0).unwrap();
    assert_eq!(bench.current("pinned0"), None);
    bench.drain();
}

#[test]
fn durable_values_stay() {
    let mut bench = Bench::with(1, Policy::new(Class::Durable, 1), 1);
    let mut last = filled(&mut bench, "k", 1).id;
    while bench.plan(1).is_ok() {
        last = filled(&mut bench, &format!("{last}-"), 16).id;
    }
    let refused = EvictRefusal::NotCache { grant: last, class: Class::Durable };
    assert_eq!(evict(&mut bench, &[last]), [Err(refused)]);
    let lacks = BTreeSet::from([Lack { namespace: SPACE, slot_size: SlotSize(SLOT) }]);
    assert_eq!(victims(&bench, &lacks, &BTreeMap::new()), []);
    let refused = bench.plan(1).unwrap_err();
    assert_eq!(refused, GrantRefusal::NoSpace { needed: 1, found: 0, retry_after: None }, "nothing can go");
}

#[test]
fn the_least_recently_used_slabs_go_until_the_high_water_mark_is_reached() {
    let mut bench = Bench::new(1);
    let slots = u32::try_from(EXTENT / u64::from(SLOT)).unwrap();
    // All but two of sixteen extents are full: exactly the low-water mark.
    let mut slabs: Vec<Grant> = Vec::new();
    for number in 0..14 {
        bench.wait(1);
        slabs.push(filled(&mut bench, &format!("{number}-"), slots));
    }
    let ids = |victims: Vec<Victim>| victims.into_iter().map(|victim| victim.grant).collect::<Vec<_>>();
    assert_eq!(victims(&bench, &NO_LACK, &BTreeMap::new()), [], "at the mark");
    filled(&mut bench, "last", 1);
    // 18.8 % of sixteen extents: one more has to go, and a part of another.
    assert_eq!(ids(victims(&bench, &NO_LACK, &BTreeMap::new())), [slabs[0].id, slabs[1].id], "the oldest");
    let leased = BTreeMap::from([(slabs[0].id.sequence, bench.at + 7), (slabs[2].id.sequence, bench.at + 1)]);
    let chosen = victims(&bench, &NO_LACK, &leased);
    assert_eq!(chosen[0].bytes, EXTENT);
    assert_eq!(ids(chosen), [slabs[1].id, slabs[3].id], "leases count as use");
    // Everything was leased since: the longest ago goes first.
    let leased: BTreeMap<Ordinal, u64> =
        (1..).zip(slabs.iter().rev()).map(|(after, slab)| (slab.id.sequence, bench.at + after)).collect();
    let chosen = ids(victims(&bench, &NO_LACK, &leased));
    assert_eq!(chosen[1..], [slabs[13].id, slabs[12].id], "after the slab that was granted last and never leased");
    evict(&mut bench, &[slabs[0].id]).remove(0).unwrap();
    assert_eq!(ids(victims(&bench, &NO_LACK, &BTreeMap::new())), [], "what rests is coming back");
    bench.drain();
}

#[test]
fn only_slabs_that_help_the_node_that_is_short_go() {
    let mut bench = Bench::with(2, Policy::new(Class::Cache, 1), 1);
    let mut on: BTreeMap<NodeId, Vec<GrantId>> = BTreeMap::new();
    let only = |bench: &mut Bench, node: u64, name: &str, slots: u32| {
        let asked = bench.asked(slots);
        let avoid = BTreeSet::from([NodeId(3 - node)]);
        let planned = bench.shard.planner(LogTime(bench.at), &avoid).grant(META, asked);
        let command = planned.unwrap();
        let grant = bench.try_grant(command).unwrap();
        fill(bench, &grant, name);
        grant
    };
    for number in 0..15 {
        // Those of the second node are older.
        for node in [2, 1] {
            if node == 1 || number < 8 {
                let grant = only(&mut bench, node, &format!("{node}-{number}-"), 16);
                on.entry(NodeId(node)).or_default().push(grant.id);
            }
        }
    }
    let chosen: Vec<_> = victims(&bench, &NO_LACK, &BTreeMap::new()).into_iter().map(|victim| victim.grant).collect();
    assert_eq!(chosen, on[&NodeId(1)][..3], "15 of 16 extents are full there, at most 13 may be");
    bench.drain();
}

#[test]
fn whoever_finds_no_room_in_one_piece_gets_the_piece_that_costs_the_least_recently_used() {
    let mut bench = Bench::new(1);
    let quarter = u32::try_from(EXTENT / u64::from(SLOT)).unwrap() / 4;
    let mut slabs = Vec::new();
    while let Ok(command) = bench.plan(quarter) {
        bench.wait(1);
        let grant = bench.try_grant(command).unwrap();
        fill(&mut bench, &grant, &format!("{}-", slabs.len()));
        slabs.push(grant);
    }
    assert_eq!(slabs.len(), 64);
    // One quarter of every extent but the last goes: a quarter of all is free, and nowhere a half of an extent.
    let holes: Vec<GrantId> = slabs.iter().step_by(4).take(15).map(|slab| slab.id).collect();
    evict(&mut bench, &holes).into_iter().for_each(|outcome| assert!(outcome.is_ok()));
    bench.wait(20_000);
    let large = SlotSize(u32::try_from(EXTENT / 2).unwrap());
    let ask = |bench: &mut Bench| {
        let mut asked = bench.asked(1);
        asked.slot_size = large;
        bench.shard.planner(LogTime(bench.at), &BTreeSet::new()).grant(META, asked)
    };
    let retry_after = Some(QUARANTINE);
    assert_eq!(ask(&mut bench), Err(GrantRefusal::NoSpace { needed: 1, found: 0, retry_after }), "not for ever");
    assert_eq!(victims(&bench, &NO_LACK, &BTreeMap::new()), [], "a quarter is enough for everyone else");
    let lacks = BTreeSet::from([Lack { namespace: SPACE, slot_size: large }]);
    // The neighbour of the hole in the seventh extent was used longest ago.
    let leased: BTreeMap<Ordinal, u64> =
        (slabs.iter().enumerate()).filter(|(at, _)| *at != 25).map(|(_, slab)| (slab.id.sequence, bench.at)).collect();
    let chosen = victims(&bench, &lacks, &leased);
    assert_eq!(chosen.iter().map(|victim| victim.grant).collect::<Vec<_>>(), [slabs[25].id]);
    assert_eq!(bench.shard.places_in(slabs[25].id).len(), quarter as usize);
    evict(&mut bench, &[slabs[25].id]).remove(0).unwrap();
    assert_eq!(victims(&bench, &lacks, &leased), [], "it is coming");
    bench.wait(millis(QUARANTINE));
    let command = ask(&mut bench).unwrap();
    bench.try_grant(command).unwrap();
    bench.drain();
}

#[test]
fn a_cache_namespace_at_its_quota_makes_room_by_its_own_oldest_slabs() {
    let quota = 64 * u64::from(SLOT);
    let mut bench = Bench::with(2, Policy { quota_bytes: Some(quota), ..Policy::new(Class::Cache, 1) }, 1);
    let slabs: Vec<Grant> = (0..7).map(|number| filled(&mut bench, &format!("{number}-"), 64)).collect();
    assert!(slabs.iter().all(|slab| slab.slots == SlotCount(8)), "an eighth of the quota at most");
    filled(&mut bench, "more", 5);
    assert_eq!(filled(&mut bench, "rest", 9).slots, SlotCount(3), "as many as are left");
    let one = u64::from(SLOT);
    let refused = GrantRefusal::Quota { limit: quota, used: quota, asked: one, comes_back: true };
    assert_eq!(bench.plan(1), Err(refused));
    assert_eq!(victims(&bench, &NO_LACK, &BTreeMap::new()), [], "there is memory enough");
    let lacks = BTreeSet::from([Lack { namespace: SPACE, slot_size: SlotSize(SLOT) }]);
    let leased = BTreeMap::from([(slabs[0].id.sequence, bench.at + 1)]);
    let ids = |victims: Vec<Victim>| victims.into_iter().map(|victim| victim.grant).collect::<Vec<_>>();
    // Twelve slots are three sixteenths, the high mark.
    assert_eq!(ids(victims(&bench, &lacks, &leased)), [slabs[1].id, slabs[2].id]);
    evict(&mut bench, &[slabs[1].id, slabs[2].id]).into_iter().for_each(|outcome| assert!(outcome.is_ok()));
    assert_eq!(victims(&bench, &lacks, &leased), []);
    assert_eq!(bench.grant(4).slots, SlotCount(4), "the quota counts no memory that rests");
    bench.drain();
}

#[test]
fn a_namespace_that_had_used_up_its_quota_lately_keeps_some_of_it_free_and_others_lose_nothing() {
    let quota = 64 * u64::from(SLOT);
    let mut bench = Bench::with(2, Policy { quota_bytes: Some(quota), ..Policy::new(Class::Cache, 1) }, 1);
    let slabs: Vec<Grant> = (0..7).map(|number| filled(&mut bench, &format!("{number}-"), 8)).collect();
    let ahead = |bench: &Bench, pressed: &[NamespaceId]| {
        let (pressed, coming) = (pressed.iter().copied().collect(), BTreeMap::new());
        let need = Need { marks: MARKS, lacks: &NO_LACK, wanted: None, pressed: &pressed, coming: &coming };
        bench.shard.victims(need, |_| LogTime(0)).into_iter().map(|victim| victim.grant).collect::<Vec<_>>()
    };
    assert_eq!(ahead(&bench, &[SPACE]), [], "an eighth is left: the low mark");
    filled(&mut bench, "more", 1);
    assert_eq!(ahead(&bench, &[]), [], "who has not used it up may");
    assert_eq!(ahead(&bench, &[SPACE, NamespaceId(99)]), [slabs[0].id], "seven are left, and it takes eight");
    bench.drain();
}

#[test]
fn one_value_that_is_most_of_a_quota_stays_until_another_needs_its_room_and_one_that_can_never_fit_takes_nothing() {
    let quota = 16 * u64::from(SLOT);
    let mut bench = Bench::with(2, Policy { quota_bytes: Some(quota), ..Policy::new(Class::Cache, 1) }, 1);
    let large = SlotSize(15 * SLOT);
    let command = {
        let asked = GrantRequest { slot_size: large, ..bench.asked(1) };
        bench.shard.planner(LogTime(bench.at), &BTreeSet::new()).grant(META, asked).unwrap()
    };
    let grant = bench.try_grant(command).unwrap();
    fill(&mut bench, &grant, "large");
    bench.seal(&grant, 1);
    let (pressed, coming) = (BTreeSet::from([SPACE]), BTreeMap::new());
    let need = Need { marks: MARKS, lacks: &NO_LACK, wanted: None, pressed: &pressed, coming: &coming };
    assert_eq!(bench.shard.victims(need, |_| LogTime(0)), [], "an eighth is not left, and nobody needs it");
    let never = BTreeSet::from([Lack { namespace: SPACE, slot_size: SlotSize(17 * SLOT) }]);
    assert_eq!(bench.shard.victims(Need { lacks: &never, ..need }, |_| LogTime(0)), []);
    let again = BTreeSet::from([Lack { namespace: SPACE, slot_size: large }]);
    let chosen = bench.shard.victims(Need { lacks: &again, ..need }, |_| LogTime(0));
    assert_eq!(chosen.into_iter().map(|victim| victim.grant).collect::<Vec<_>>(), [grant.id]);
    bench.drain();
}

#[test]
fn a_value_that_fits_its_quota_only_with_fewer_copies_than_it_is_to_have_is_refused_for_good() {
    let quota = 3 * u64::from(SLOT);
    let mut bench = Bench::with(2, Policy { quota_bytes: Some(quota), least: 1, ..Policy::new(Class::Cache, 2) }, 1);
    filled(&mut bench, "k", 1);
    let size = SlotSize(2 * SLOT);
    let asked = GrantRequest { slot_size: size, ..bench.asked(1) };
    let refused = bench.shard.planner(LogTime(bench.at), &BTreeSet::new()).grant(META, asked).unwrap_err();
    let (used, asked) = (2 * u64::from(SLOT), 4 * u64::from(SLOT));
    assert_eq!(refused, GrantRefusal::Quota { limit: quota, used, asked, comes_back: false });
    assert_eq!(bench.shard.lacks_quota(Lack { namespace: SPACE, slot_size: size }), None, "nothing goes for it");
    bench.drain();
}

#[test]
fn a_slab_takes_as_many_slots_as_fit_in_one_piece() {
    // Slots of which four fit in an extent, asked for in numbers that halving would waste.
    let mut bench = Bench::new(1);
    let size = SlotSize(u32::try_from(EXTENT / 4).unwrap() - 64);
    let mut slots = 0;
    for _ in 0..EXTENTS {
        let mut asked = bench.asked(15);
        asked.slot_size = size;
        let command = bench.shard.planner(LogTime(bench.at), &BTreeSet::new()).grant(META, asked).unwrap();
        slots += bench.try_grant(command).unwrap().slots.0;
    }
    assert_eq!(slots, 4 * EXTENTS);
    bench.drain();
}

/// A small writer and its helpers: values of two very different sizes are put, replaced and deleted in a cluster that is far too small for
/// them, for 10,000 rounds; whoever finds no room waits for what is evicted.
#[test]
fn churn_of_small_and_large_values_never_finds_the_memory_full_for_good_and_ends_with_all_of_it_free() {
    let mut bench = Bench::with(3, Policy { least: 1, ..Policy::new(Class::Cache, 2) }, 1);
    let all = bench.shard.space().total;
    let mut random = Random(0x5eed);
    let mut leased: BTreeMap<Ordinal, u64> = BTreeMap::new();
    let (mut evicted, mut waits, mut longest) = (0, 0, 0);
    for round in 0..10_000u64 {
        bench.at += random.below(300);
        let large = random.below(4) == 0;
        // In a region of 1 MiB, a 16th of 64 MiB: 256 B to 10 KiB beside 8 to 16 MiB of 64 MiB extents.
        let size = if large { EXTENT / 8 + random.below(EXTENT / 8) } else { 256 + random.below(1_800) };
        let size = SlotSize(u32::try_from(size.next_multiple_of(64)).unwrap());
        let slots = if large { 1 } else { 1 + u32::try_from(random.below(8)).unwrap() };
        let mut waited = 0;
        let grant = loop {
            let mut asked = bench.asked(slots);
            (asked.slot_size, asked.writer) = (size, writer(u8::try_from(random.below(5)).unwrap()));
            let planned = bench.shard.planner(LogTime(bench.at), &BTreeSet::new()).grant(META, asked);
            let lacks = match planned {
                Ok(command) => break told(&mut bench, command),
                Err(GrantRefusal::NoSpace { retry_after, .. }) => {
                    let after = retry_after.expect("something can always go or comes back");
                    bench.at += millis(after.max(Duration::from_millis(1)));
                    bench.shard.apply(LogTime(bench.at), ShardCommand::Tick { horizon: None });
                    BTreeSet::from([Lack { namespace: SPACE, slot_size: size }])
                }
                Err(other) => panic!("{other}"),
            };
            waited += 1;
            waits += 1;
            assert!(waited < 100, "round {round}: no room for {size:?} in {:?}", bench.shard.space().total);
            evicted += relieve(&mut bench, &lacks, &leased);
        };
        longest = longest.max(waited);
        // A writer dies now and then, and leaves its grant as it is.
        let commit = random.below(10) > 0;
        for slot in (0..grant.slots.0).filter(|_| commit) {
            let name = format!("k{}", random.below(20_000));
            let mut entry = entry(slot, &name, round + 1, Mode::Replace);
            entry.payload_bytes = u64::from(size.0) - 192;
            let nodes = grant.holders.iter().map(|holder| attested(holder.region.node.0)).collect();
            let publish = quarry_meta_state::shard::Publish { grant: grant.id, entries: vec![entry], attested: nodes };
            bench.shard.apply(LogTime(bench.at), ShardCommand::Publish(publish));
        }
        let read = key(&format!("k{}", random.below(20_000)));
        if let Some(found) = bench.shard.resolve(SPACE, &read) {
            leased.insert(found.copies[0].grant.sequence, bench.at);
            let horizon = Some(LogTime(bench.at + 10_000));
            bench.shard.apply(LogTime(bench.at), ShardCommand::Tick { horizon });
        }
        if random.below(3) == 0 {
            let keys = vec![quarry_meta_state::shard::DeleteKey { key: read, expected: None }];
            let request = bench.request();
            bench.shard.apply(LogTime(bench.at), ShardCommand::Delete { request, namespace: SPACE, keys });
        }
        evicted += relieve(&mut bench, &NO_LACK, &leased);
        if round % 500 == 0 {
            bench.shard.check().unwrap();
        }
    }
    assert!(evicted > 500 && waits > 0, "{evicted} slabs went, {waits} waits, at most {longest} at once");
    bench.wait(TTL);
    bench.wait(200_000);
    let keys: Vec<String> = bench.shard.list(SPACE, b"", None).map(|listed| listed.key.to_string()).collect();
    assert!(!keys.is_empty());
    bench.drain();
    assert_eq!(all.free_bytes, all.bytes, "which is what it began with");
}

fn told(bench: &mut Bench, command: ShardCommand) -> Grant {
    match bench.shard.apply(LogTime(bench.at), command) {
        ShardOutcome::Grant(Ok(grant)) => grant,
        other => panic!("{other:?}"),
    }
}

/// What the leader does; how many slabs went.
fn relieve(bench: &mut Bench, lacks: &BTreeSet<Lack>, leased: &BTreeMap<Ordinal, u64>) -> usize {
    let victims: Vec<GrantId> = victims(bench, lacks, leased).into_iter().map(|victim| victim.grant).collect();
    if victims.is_empty() {
        return 0;
    }
    match bench.shard.apply(LogTime(bench.at), ShardCommand::Evict { victims }) {
        ShardOutcome::Evict(outcomes) => outcomes.iter().filter(|outcome| outcome.is_ok()).count(),
        other => panic!("{other:?}"),
    }
}

/// Splitmix64: the same numbers every time.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

#[test]
fn nothing_goes_for_room_on_a_drained_node() {
    let mut bench = Bench::new(1);
    while let Ok(command) = bench.plan(16) {
        let grant = bench.try_grant(command).unwrap();
        fill(&mut bench, &grant, &format!("{}-", grant.id.sequence.number));
    }
    let lacks = BTreeSet::from([Lack { namespace: SPACE, slot_size: SlotSize(SLOT) }]);
    assert!(!victims(&bench, &NO_LACK, &BTreeMap::new()).is_empty());
    let (node, labels) = (NodeId(1), Labels::default());
    bench.tell(vec![FeedChange::Standing { node, standing: Standing::Draining, labels: labels.clone() }]);
    assert_eq!(victims(&bench, &NO_LACK, &BTreeMap::new()), []);
    assert_eq!(victims(&bench, &lacks, &BTreeMap::new()), [], "nobody is given a place there");
    bench.tell(vec![FeedChange::Standing { node, standing: Standing::Serving, labels }]);
    assert!(!victims(&bench, &lacks, &BTreeMap::new()).is_empty());
}

#[test]
fn room_in_pieces_that_hold_no_slot_of_the_wanted_size_is_no_room() {
    let mut bench = Bench::new(1);
    // Two slots of three eighths of an extent: a quarter of each is left over.
    let size = SlotSize(u32::try_from(EXTENT / 8 * 3).unwrap());
    let mut grants = 0;
    loop {
        let asked = GrantRequest { slot_size: size, ..bench.asked(2) };
        let planned = bench.shard.planner(LogTime(bench.at), &BTreeSet::new()).grant(META, asked);
        let Ok(command) = planned else { break };
        let grant = bench.try_grant(command).unwrap();
        fill(&mut bench, &grant, &format!("g{grants}-"));
        bench.seal(&grant, grant.slots.0);
        grants += 1;
    }
    let none = BTreeMap::new();
    let need = Need { marks: MARKS, lacks: &NO_LACK, wanted: None, pressed: &BTreeSet::new(), coming: &none };
    let all = |wanted| bench.shard.victims(Need { wanted, ..need }, |_| LogTime(0));
    assert_eq!(all(None), [], "a quarter of all is free");
    assert_eq!(all(Some(SlotSize(64))), [], "and holds small slots");
    let victims = all(Some(size));
    let lendable = BTreeMap::from([(NodeId(1), 1)]);
    let evicted = bench.shard.victims(Need { wanted: Some(size), coming: &lendable, ..need }, |_| LogTime(0));
    assert_eq!(evicted, [], "more memory is to be had: nothing need go");
    let freed: u64 = victims.iter().map(|victim| victim.bytes).sum();
    let lent = REGION_BYTES;
    let high = lent / 1000 * u64::from(MARKS.high);
    assert!(freed >= high.min(16 * u64::from(size.0)) && freed < lent / 2, "{freed} of {lent}");
}
