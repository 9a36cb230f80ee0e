//! Grants, seals, planning, the feed's effect on space.

use crate::bench::{
    Bench, EXTENTS, GEN, META, REGION_BYTES, SLOT, SPACE, TTL, attested, entry, extent, lend, lent, life, region,
    writer,
};
use quarry_meta_state::{
    Entry, EntryError, SNAPSHOT_SINCE, SNAPSHOT_VERSION, Shard, SnapshotError,
    directory::{FeedChange, Labels, Policy, Shared, Standing},
    shard::{
        CommitRefusal, Committed, DropRefusal, GrantPhase, GrantRefusal, Mode, Proposed, SealRefusal, ShardCommand,
        ShardOutcome, plan::Bounds,
    },
};
use quarry_wire::{
    grant::{Class, Grant},
    ids::{GrantId, NamespaceId, NodeId, Ordinal},
    limits::{COMMAND_BYTES_MAX, EXTENT_BYTES, GRANT_TTL_MAX, QUARANTINE, SLOTS_PER_SLAB_MAX},
    units::{LogTime, Offset, SlotCount, SlotSize, millis},
};
use std::{collections::BTreeSet, time::Duration};

const EXTENT: u64 = REGION_BYTES / EXTENTS as u64;

fn place(node: u64, index: u32, base: u64) -> Proposed {
    Proposed { extent: extent(node, index), base: Offset(base) }
}

#[test]
fn what_a_leader_proposes_wrongly_is_refused_with_its_reason() {
    let mut bench = Bench::with(2, Policy { least: 1, ..Policy::new(Class::Cache, 2) }, 1);
    let ask = |bench: &mut Bench, holders: Vec<Proposed>| {
        let asked = bench.asked(4);
        bench.try_grant(ShardCommand::Grant { meta: META, asked, holders })
    };
    let bytes = 4 * u64::from(SLOT);
    assert_eq!(ask(&mut bench, vec![]), Err(GrantRefusal::Holders { least: 1, most: 2, found: 0 }));
    let three = vec![place(1, 0, 0); 3];
    assert_eq!(ask(&mut bench, three), Err(GrantRefusal::Holders { least: 1, most: 2, found: 3 }));
    let same = vec![place(1, 0, 0), place(1, 1, EXTENT)];
    assert_eq!(ask(&mut bench, same), Err(GrantRefusal::SameNode { node: NodeId(1) }));
    let unknown = place(9, 0, 0);
    assert_eq!(ask(&mut bench, vec![unknown]), Err(GrantRefusal::NotLent { extent: unknown.extent }));
    for base in [EXTENT - 64, EXTENT, 32, u64::MAX - 63] {
        let outside = GrantRefusal::OutsideExtent { extent: extent(1, 0), base: Offset(base), bytes };
        assert_eq!(ask(&mut bench, vec![place(1, 0, base)]), Err(outside));
    }
    ask(&mut bench, vec![place(1, 0, 0)]).unwrap();
    let taken = GrantRefusal::NotFree { extent: extent(1, 0), base: Offset(bytes - 64) };
    assert_eq!(ask(&mut bench, vec![place(1, 0, bytes - 64)]), Err(taken));
    ask(&mut bench, vec![place(1, 0, bytes)]).unwrap();
    bench.tell(vec![life(2, 2, false)]);
    assert_eq!(ask(&mut bench, vec![place(2, 0, 0)]), Err(GrantRefusal::RegionDown { region: region(2) }));
    bench.drain();
}

#[test]
fn what_no_grant_can_be_is_refused() {
    let mut bench = Bench::new(1);
    let mut ask = |change: &dyn Fn(&mut quarry_meta_state::shard::GrantRequest)| {
        let mut asked = bench.asked(4);
        change(&mut asked);
        let planned = bench.shard.planner(LogTime(bench.at), &BTreeSet::new()).grant(META, asked.clone());
        let applied = bench.try_grant(ShardCommand::Grant { meta: META, asked, holders: vec![place(1, 0, 0)] });
        assert_eq!(planned.unwrap_err(), applied.unwrap_err(), "planner and apply agree");
        let mut asked = bench.asked(4);
        change(&mut asked);
        bench.try_grant(ShardCommand::Grant { meta: META, asked, holders: vec![place(1, 0, 0)] }).unwrap_err()
    };
    for size in [0, 64, SLOT + 1, 1 << 30] {
        let refused = GrantRefusal::SlotSize { least: 128, most: EXTENT_BYTES, found: SlotSize(size) };
        assert_eq!(ask(&|asked| asked.slot_size = SlotSize(size)), refused);
    }
    for slots in [0, SLOTS_PER_SLAB_MAX + 1] {
        let refused = GrantRefusal::Slots { most: SLOTS_PER_SLAB_MAX, found: SlotCount(slots) };
        assert_eq!(ask(&|asked| asked.slots = SlotCount(slots)), refused);
    }
    for found in [Duration::ZERO, GRANT_TTL_MAX + Duration::from_millis(1), Duration::from_micros(1_500)] {
        assert_eq!(ask(&|asked| asked.ttl = found), GrantRefusal::Ttl { most: GRANT_TTL_MAX, found });
    }
    let refused = ask(&|asked| asked.namespace = NamespaceId(9));
    assert!(matches!(refused, GrantRefusal::UnknownNamespace { namespace: NamespaceId(9), .. }));
}

#[test]
fn a_repeated_grant_request_gets_the_same_grant() {
    let mut bench = Bench::new(2);
    let asked = bench.asked(4);
    let avoid = BTreeSet::new();
    let first = bench.shard.planner(LogTime(bench.at), &avoid).grant(META, asked.clone()).unwrap();
    let grant = bench.try_grant(first.clone()).unwrap();
    assert_eq!(bench.try_grant(first), Ok(grant.clone()));
    // Another leader plans the same request anew.
    let again = bench.shard.planner(LogTime(bench.at), &avoid).grant(NodeId(101), asked).unwrap();
    assert_eq!(bench.try_grant(again), Ok(grant.clone()));
    assert_eq!(bench.shard.space().total.granted_slots, 8);
    assert_eq!(bench.shard.grants_of(writer(1)).map(|view| view.grant.id).collect::<Vec<_>>(), [grant.id]);
}

#[test]
fn a_grant_closes_unsealed_with_the_commit_of_its_last_slot() {
    let mut bench = Bench::new(1);
    let grant = bench.grant(2);
    assert_eq!(bench.commit(&grant, entry(0, "a", 5, Mode::Create)), Ok(Committed::Applied));
    assert_eq!(bench.shard.grant(grant.id).unwrap().phase, GrantPhase::Open);
    assert_eq!(bench.commit(&grant, entry(1, "b", 5, Mode::Create)), Ok(Committed::Applied));
    assert_eq!(bench.shard.grant(grant.id).unwrap().phase, GrantPhase::Closed);
}

#[test]
fn the_tail_of_a_sealed_grant_is_free_once_all_below_the_mark_is_committed() {
    let mut bench = Bench::new(1);
    let all = bench.free_bytes();
    let grant = bench.grant(4);
    bench.seal(&grant, 2);
    assert_eq!(bench.shard.space().total.granted_slots, 4, "the writer may still write below the mark");
    assert_eq!(bench.commit(&grant, entry(0, "a", 5, Mode::Create)), Ok(Committed::Applied));
    assert_eq!(bench.commit(&grant, entry(1, "b", 5, Mode::Create)), Ok(Committed::Applied));
    assert_eq!(bench.free_bytes(), all - 2 * u64::from(SLOT));
    assert_eq!(bench.shard.grant(grant.id).unwrap().phase, GrantPhase::Closed);
    assert_eq!(bench.shard.grants_of(writer(1)).count(), 0);
    // Sealing again says what the first seal said.
    let again = bench.apply(ShardCommand::Seal { grant: grant.id, fill: SlotCount(4) });
    assert_eq!(again, ShardOutcome::Seal(Ok(SlotCount(2))));
    bench.drain();
}

#[test]
fn a_publish_beyond_the_fill_mark_is_sealed() {
    let mut bench = Bench::new(1);
    let grant = bench.grant(4);
    bench.seal(&grant, 2);
    let sealed = Err(CommitRefusal::Sealed { fill: SlotCount(2) });
    assert_eq!(bench.commit(&grant, entry(2, "a", 5, Mode::Create)), sealed);
    bench.wait(TTL);
    assert_eq!(bench.commit(&grant, entry(2, "a", 5, Mode::Create)), sealed, "the first outcome stays");
    bench.drain();
}

#[test]
fn a_seal_that_cannot_be_is_refused() {
    let mut bench = Bench::new(1);
    let grant = bench.grant(4);
    let beyond = SealRefusal::BeyondSlab { slots: SlotCount(4), found: SlotCount(5) };
    let seal = |grant, fill| ShardCommand::Seal { grant, fill: SlotCount(fill) };
    assert_eq!(bench.apply(seal(grant.id, 5)), ShardOutcome::Seal(Err(beyond)));
    let stranger = GrantId { sequence: Ordinal { generation: GEN, number: 9 }, ..grant.id };
    let unknown = SealRefusal::UnknownGrant { grant: stranger };
    assert_eq!(bench.apply(seal(stranger, 0)), ShardOutcome::Seal(Err(unknown)));
}

#[test]
fn uncommitted_slots_rest_after_the_grant_expired() {
    let mut bench = Bench::new(1);
    let all = bench.free_bytes();
    bench.grant(4);
    bench.wait(TTL);
    assert_eq!(bench.shard.space().total.resting_bytes, 4 * u64::from(SLOT));
    bench.wait(millis(QUARANTINE) - 1);
    assert_ne!(bench.free_bytes(), all);
    bench.wait(1);
    assert_eq!(bench.free_bytes(), all);
}

#[test]
fn a_refused_slot_rests_and_is_never_granted_while_its_grant_is_open() {
    let mut bench = Bench::new(1);
    let grant = bench.grant(2);
    let refused = Err(CommitRefusal::NotEnoughHolders { needed: 1, attested: 0 });
    assert_eq!(bench.publish_with(&grant, vec![entry(0, "a", 5, Mode::Create)], vec![]), [refused]);
    let space = bench.shard.space().total;
    assert_eq!((space.granted_slots, space.resting_bytes), (1, u64::from(SLOT)));
    bench.wait(TTL - 1);
    assert_eq!(bench.shard.space().total.resting_bytes, u64::from(SLOT), "the healthy writer keeps its lane");
    bench.drain();
}

#[test]
fn grants_planned_for_one_entry_do_not_overlap() {
    let mut bench = Bench::new(2);
    let asked: Vec<_> = (0..8).map(|_| bench.asked(8)).collect();
    let avoid = BTreeSet::new();
    let mut planner = bench.shard.planner(LogTime(bench.at), &avoid);
    let commands: Vec<_> = asked.into_iter().map(|asked| planner.grant(META, asked).unwrap()).collect();
    for command in commands {
        assert_eq!(bench.try_grant(command).unwrap().holders.len(), 2);
    }
}

#[test]
fn nodes_to_avoid_hold_nothing_and_too_few_that_answer_are_told_apart_from_no_space() {
    let mut bench = Bench::with(3, Policy::new(Class::Cache, 2), 1);
    let avoid = BTreeSet::from([NodeId(2)]);
    for _ in 0..8 {
        let asked = bench.asked(1);
        let command = bench.shard.planner(LogTime(bench.at), &avoid).grant(META, asked).unwrap();
        let grant = bench.try_grant(command).unwrap();
        assert_eq!(grant.holder(NodeId(2)), None);
    }
    let avoid = BTreeSet::from([NodeId(2), NodeId(1)]);
    let asked = bench.asked(1);
    let refused = bench.shard.planner(LogTime(bench.at), &avoid).grant(META, asked).unwrap_err();
    assert_eq!(refused, GrantRefusal::TooFewNodes { needed: 2, found: 1, silent: 2 });
    // One node more would not help if there never was another.
    let mut small = Bench::with(1, Policy::new(Class::Cache, 2), 1);
    let refused = small.plan(1).unwrap_err();
    assert!(matches!(refused, GrantRefusal::NoSpace { needed: 2, found: 1, .. }), "{refused}");
}

#[test]
fn a_dead_node_is_missed_only_where_those_that_answer_are_too_few() {
    let mut bench = Bench::with(3, Policy { least: 2, ..Policy::new(Class::Cache, 2) }, 1);
    bench.tell(vec![life(3, 1, false)]);
    while let Ok(command) = bench.plan(16) {
        bench.try_grant(command).unwrap();
    }
    let refused = bench.plan(1).unwrap_err();
    assert!(matches!(refused, GrantRefusal::NoSpace { needed: 2, found: 0, retry_after: Some(_) }), "{refused}");
    let asked = bench.asked(1);
    let avoid = BTreeSet::from([NodeId(1), NodeId(3)]);
    let refused = bench.shard.planner(LogTime(bench.at), &avoid).grant(META, asked).unwrap_err();
    assert_eq!(refused, GrantRefusal::TooFewNodes { needed: 2, found: 0, silent: 2 }, "one is left of three");
    bench.tell(vec![FeedChange::Retired(NodeId(3))]);
    assert!(matches!(bench.plan(1).unwrap_err(), GrantRefusal::NoSpace { .. }));
    let asked = bench.asked(1);
    let refused = bench.shard.planner(LogTime(bench.at), &avoid).grant(META, asked).unwrap_err();
    assert!(
        matches!(refused, GrantRefusal::NoSpace { found: 0, .. }),
        "nobody waits for one that is forgotten: {refused}"
    );
}

#[test]
fn drained_nodes_are_too_few_and_not_full() {
    let mut bench = Bench::with(2, Policy { least: 2, ..Policy::new(Class::Cache, 2) }, 1);
    let stand = |node, standing| FeedChange::Standing { node: NodeId(node), standing, labels: Labels::default() };
    bench.tell(vec![stand(1, Standing::Draining)]);
    assert_eq!(bench.plan(1).unwrap_err(), GrantRefusal::TooFewNodes { needed: 2, found: 1, silent: 0 });
    assert_eq!(bench.shard.drained().collect::<Vec<_>>(), [NodeId(1)]);
    bench.tell(vec![stand(2, Standing::Draining)]);
    assert_eq!(bench.plan(1).unwrap_err(), GrantRefusal::TooFewNodes { needed: 2, found: 0, silent: 0 });
    bench.tell(vec![stand(1, Standing::Serving), stand(2, Standing::Serving)]);
    assert!(bench.plan(1).is_ok());
}

#[test]
fn where_nothing_is_evicted_only_open_grants_give_memory_and_quota_back() {
    let bounds = Bounds { keeps_all: true, ..Bounds::default() };
    let quota = 32 * u64::from(SLOT);
    for quota_bytes in [None, Some(quota)] {
        let mut bench = Bench::with(1, Policy { quota_bytes, ..Policy::new(Class::Cache, 1) }, 1);
        let mut filled = 0;
        let mut fill = |bench: &mut Bench, grant: &Grant| {
            for slot in 0..grant.slots.0 {
                bench.commit(grant, entry(slot, &format!("k{filled}"), 5, Mode::Create)).unwrap();
                filled += 1;
            }
        };
        let mut last: Option<Grant> = None;
        while let Ok(command) = bench.plan(4) {
            let grant = bench.try_grant(command).unwrap();
            if let Some(before) = last.replace(grant) {
                fill(&mut bench, &before);
            }
        }
        let last = last.unwrap();
        let comes_back = |refused: GrantRefusal| match refused {
            GrantRefusal::NoSpace { retry_after, .. } => retry_after.is_some(),
            GrantRefusal::Quota { comes_back, .. } => comes_back,
            other => panic!("{other}"),
        };
        let refused = |bench: &mut Bench| {
            let asked = bench.asked(1);
            bench.shard.planner_within(LogTime(bench.at), &bounds).grant(META, asked).unwrap_err()
        };
        assert!(comes_back(refused(&mut bench)), "the last grant is open");
        fill(&mut bench, &last);
        assert!(!comes_back(refused(&mut bench)), "all is committed");
        assert!(comes_back(bench.plan(1).unwrap_err()), "slabs can go");
    }
}

#[test]
fn the_place_of_a_grant_that_just_ended_is_taken_last() {
    let mut bench = Bench::new(1);
    let first = bench.grant(8);
    bench.seal(&first, 0);
    let mut spans = vec![first.span(&first.holders[0])];
    // All of the region but that place, in pieces: none of them lies there.
    let pieces = u64::from(EXTENTS) * (EXTENT / (8 * u64::from(SLOT))) - 1;
    for _ in 0..pieces {
        let grant = bench.grant(8);
        let span = grant.span(&grant.holders[0]);
        assert!(spans.iter().all(|other| span.end <= other.start || other.end <= span.start), "{span:?}");
        spans.push(span);
    }
    let last = bench.grant(8);
    assert_eq!(last.span(&last.holders[0]), spans[0], "it is taken when nothing else is left");
}

#[test]
fn a_full_shard_gives_fewer_slots_then_says_when_space_comes_back() {
    let mut bench = Bench::new(1);
    let per_extent = u32::try_from(EXTENT / u64::from(SLOT)).unwrap();
    assert_eq!(bench.grant(4 * per_extent).slots, SlotCount(per_extent), "a slab lies in one extent");
    for _ in 1..EXTENTS {
        bench.grant(per_extent);
    }
    let refused = bench.plan(1).unwrap_err();
    let retry_after = Some(Duration::from_millis(TTL) + QUARANTINE);
    assert_eq!(refused, GrantRefusal::NoSpace { needed: 1, found: 0, retry_after });
    bench.wait(TTL);
    let refused = bench.plan(1).unwrap_err();
    assert_eq!(refused, GrantRefusal::NoSpace { needed: 1, found: 0, retry_after: Some(QUARANTINE) });
    bench.wait(millis(QUARANTINE));
    bench.grant(1);
    // No extent is ever large enough for this, so waiting does not help.
    let mut asked = bench.asked(1);
    asked.slot_size = SlotSize(1 << 20);
    let refused = bench.shard.planner(LogTime(bench.at), &BTreeSet::new()).grant(META, asked).unwrap_err();
    assert_eq!(refused, GrantRefusal::SlotSize { least: 128, most: EXTENT, found: SlotSize(1 << 20) });
}

#[test]
fn a_namespace_stays_within_its_quota_whatever_the_leader_proposes() {
    let quota = 32 * u64::from(SLOT);
    let policy = Policy { quota_bytes: Some(quota), ..Policy::new(Class::Cache, 2) };
    let mut bench = Bench::with(2, policy, 1);
    let grant = bench.grant(9);
    assert_eq!(grant.slots, SlotCount(2), "with two copies an eighth of the quota");
    for _ in 0..6 {
        bench.grant(2);
    }
    bench.grant(1);
    assert_eq!(bench.grant(2).slots, SlotCount(1), "as many as are left");
    bench.seal(&grant, 0);
    bench.grant(2);
    let asked = bench.asked(1);
    let holders = vec![place(1, 9, 9 * EXTENT), place(2, 9, 9 * EXTENT)];
    let refused = bench.try_grant(ShardCommand::Grant { meta: META, asked, holders }).unwrap_err();
    let asked = 2 * u64::from(SLOT);
    assert_eq!(refused, GrantRefusal::Quota { limit: quota, used: quota, asked, comes_back: true });
}

#[test]
fn an_extent_is_dropped_only_when_all_of_it_is_free_and_rested() {
    let mut bench = Bench::new(1);
    let grant = bench.grant(1);
    let used = quarry_wire::ids::ExtentId { region: region(1), index: grant.holders[0].extent };
    let drop = |extent, number| ShardCommand::DropExtent { extent, lend: lend(number) };
    let in_use = DropRefusal::InUse { extent: used, free: EXTENT - u64::from(SLOT), bytes: EXTENT };
    assert_eq!(bench.apply(drop(used, 1)), ShardOutcome::DropExtent(Err(in_use)));
    bench.wait(TTL);
    assert_eq!(bench.apply(drop(used, 1)), ShardOutcome::DropExtent(Err(in_use)));
    bench.wait(millis(QUARANTINE));
    let not_held = DropRefusal::NotHeld { extent: used, held: Some(lend(1)), found: lend(2) };
    assert_eq!(bench.apply(drop(used, 2)), ShardOutcome::DropExtent(Err(not_held)));
    assert_eq!(bench.apply(drop(used, 1)), ShardOutcome::DropExtent(Ok(())));
    assert_eq!(bench.apply(drop(used, 1)), ShardOutcome::DropExtent(Ok(())), "again");
    assert_eq!(bench.shard.returned().collect::<Vec<_>>(), [(used, lend(1))]);
    // The old lending told again does not bring it back; the next one does.
    bench.tell(vec![lent(1, used.index.0, 1, 1)]);
    assert_eq!(bench.shard.space().total.extents, u64::from(EXTENTS) - 1);
    bench.tell(vec![lent(1, used.index.0, 1, 2)]);
    assert_eq!(bench.shard.space().total.extents, u64::from(EXTENTS));
    assert_eq!(bench.shard.returned().count(), 0);
    bench.drain();
}

#[test]
fn a_stamp_that_goes_back_counts_as_the_last_one() {
    let mut bench = Bench::new(1);
    bench.wait(500);
    let now = bench.shard.log_time();
    bench.at -= 300;
    bench.tick(None);
    assert_eq!(bench.shard.log_time(), now);
}

#[test]
fn an_entry_round_trips_and_refuses_what_it_cannot_be() {
    let mut bench = Bench::new(1);
    let entry = Entry { at: LogTime(7), commands: vec![bench.plan(4).unwrap(), ShardCommand::Tick { horizon: None }] };
    let bytes = entry.encode().unwrap();
    assert_eq!(Entry::decode(&bytes), Ok(entry));
    let decode = Entry::<ShardCommand>::decode;
    assert_eq!(decode(&[]), Err(EntryError::Empty));
    assert_eq!(decode(&[9]), Err(EntryError::Format { expected: 1, found: 9 }));
    assert!(matches!(decode(&bytes[..bytes.len() - 1]), Err(EntryError::Body { .. })));
    assert!(matches!(decode(&[&bytes[..], &[0]].concat()), Err(EntryError::Body { .. })));
    let publish = quarry_meta_state::shard::Publish {
        grant: GrantId::default(),
        entries: (0..1_000).map(|slot| crate::bench::entry(slot, &"k".repeat(100), 1, Mode::Create)).collect(),
        attested: vec![attested(1)],
    };
    let large = Entry { at: LogTime(7), commands: vec![ShardCommand::Publish(publish)] };
    assert!(matches!(large.encode(), Err(EntryError::TooLarge { limit: COMMAND_BYTES_MAX, .. })));
}

#[test]
fn a_snapshot_says_what_it_is_and_is_refused_when_it_is_something_else() {
    let bench = Bench::new(1);
    let bytes = bench.shard.encode();
    let again = Shard::decode(&bytes).unwrap();
    assert_eq!((again.hash(), &again), (bench.shard.hash(), &bench.shard));
    assert_eq!(Shard::decode(b"QRY"), Err(SnapshotError::NoSnapshot));
    assert_eq!(Shard::decode(&[b"XXXX", &bytes[4..]].concat()), Err(SnapshotError::NoSnapshot));
    let of_version = |other: u16| Shard::decode(&[&bytes[..4], &other.to_le_bytes(), &bytes[6..]].concat());
    for other in [SNAPSHOT_SINCE - 1, SNAPSHOT_VERSION + 1] {
        let refused = SnapshotError::Version { since: SNAPSHOT_SINCE, newest: SNAPSHOT_VERSION, found: other };
        assert_eq!(of_version(other), Err(refused));
    }
    for known in SNAPSHOT_SINCE..=SNAPSHOT_VERSION {
        assert_eq!(of_version(known).as_ref(), Ok(&bench.shard));
    }
    let directory = quarry_meta_state::Directory::new().encode();
    assert_eq!(Shard::decode(&directory), Err(SnapshotError::Machine { expected: 1, found: 0 }));
    assert!(matches!(Shard::decode(&bytes[..bytes.len() - 1]), Err(SnapshotError::Body { .. })));
    assert_eq!(bench.shard.namespace(SPACE).unwrap().name, "blocks");
}

fn labelled(node: u64, host: &str, zone: &str) -> FeedChange {
    let labels = Labels { host: host.into(), zone: zone.into() };
    FeedChange::Standing { node: NodeId(node), standing: Standing::Serving, labels }
}

fn holders(bench: &mut Bench) -> (Vec<u64>, Shared) {
    let grant = bench.grant(1);
    let shared = bench.shard.shared_fate(&grant);
    let mut nodes: Vec<u64> = grant.holders.iter().map(|holder| holder.region.node.0).collect();
    nodes.sort_unstable();
    (nodes, shared)
}

#[test]
fn holders_of_one_grant_lie_in_different_zones_else_on_different_hosts_else_anywhere() {
    let policy = Policy { least: 1, ..Policy::new(Class::Cache, 2) };
    let mut bench = Bench::with(4, policy, 1);
    bench.tell(vec![
        labelled(1, "a", "east"),
        labelled(2, "a", "east"),
        labelled(3, "b", "east"),
        labelled(4, "c", "west"),
    ]);
    for _ in 0..20 {
        let (nodes, shared) = holders(&mut bench);
        assert!(nodes.contains(&4) && shared == Shared::Nothing, "{nodes:?}");
    }
    // The only one of the other zone is down: then other hosts.
    bench.tell(vec![life(4, 2, false)]);
    for _ in 0..20 {
        let (nodes, shared) = holders(&mut bench);
        assert!(nodes.contains(&3) && shared == Shared::Zone, "{nodes:?}");
    }
    bench.tell(vec![life(3, 2, false)]);
    assert_eq!(holders(&mut bench), (vec![1, 2], Shared::Host), "near copies are better than one");
    let again = Shard::decode(&bench.shard.encode()).unwrap();
    assert_eq!(again.hash(), bench.shard.hash());
}

#[test]
fn three_copies_share_as_little_as_two_zones_allow_and_nodes_without_labels_share_nothing() {
    let policy = Policy { least: 1, ..Policy::new(Class::Cache, 3) };
    let mut bench = Bench::with(4, policy, 1);
    bench.tell(vec![labelled(1, "a", "east"), labelled(2, "a", "east"), labelled(3, "b", "east")]);
    for _ in 0..20 {
        let (nodes, shared) = holders(&mut bench);
        assert!(nodes.contains(&4) && nodes.contains(&3) && shared == Shared::Zone, "{nodes:?}");
    }
    bench.tell(vec![labelled(1, "", ""), labelled(2, "", ""), labelled(3, "", "")]);
    assert_eq!(holders(&mut bench).1, Shared::Nothing);
}

#[test]
fn where_slabs_are_bounded_one_takes_half_of_what_is_free_beyond_the_room_that_is_kept() {
    let mut bench = Bench::new(1);
    let whole = u32::try_from(EXTENT / u64::from(SLOT)).unwrap();
    let mut slots = Vec::new();
    for _ in 0..17 {
        let asked = bench.asked(whole);
        let bounds = Bounds { in_parts: true, ..Bounds::default() };
        let command = bench.shard.planner_within(LogTime(bench.at), &bounds).grant(META, asked).unwrap();
        slots.push(bench.try_grant(command).unwrap().slots.0);
    }
    // An eighth of sixteen extents is two of them. A sixteenth of an extent is always to be had.
    assert_eq!(slots[..13], [whole; 13]);
    assert_eq!(slots[13..], [whole / 2, whole / 4, whole / 8, whole / 16]);
    assert_eq!(bench.grant(whole).slots, SlotCount(whole), "where they are not, it is as large as was asked for");
    let mut asked = bench.asked(1);
    asked.slot_size = SlotSize(u32::try_from(EXTENT).unwrap());
    let bounds = Bounds { in_parts: true, ..Bounds::default() };
    let one = bench.shard.planner_within(LogTime(bench.at), &bounds).grant(META, asked).unwrap();
    assert_eq!(bench.try_grant(one).unwrap().slots, SlotCount(1), "one slot is never too much");
    bench.drain();
}

#[test]
fn where_slabs_are_bounded_they_are_at_every_node_that_they_lie_at() {
    let parts = |avoid: &[u64]| Bounds {
        in_parts: true,
        avoid: avoid.iter().copied().map(NodeId).collect(),
        ..Bounds::default()
    };
    let whole = u32::try_from(EXTENT / u64::from(SLOT)).unwrap();
    for copies in [1, 2] {
        let policy = Policy { least: 1, ..Policy::new(Class::Cache, copies) };
        let mut bench = Bench::with(2, policy, 2);
        let granted = |bench: &mut Bench, bounds: &Bounds| {
            let asked = bench.asked(whole);
            let command = bench.shard.planner_within(LogTime(bench.at), bounds).grant(META, asked).unwrap();
            bench.try_grant(command).unwrap()
        };
        // Node 2 has three extents left, one beyond the eighth that it keeps.
        for _ in 0..EXTENTS - 3 {
            granted(&mut bench, &Bounds { in_parts: false, ..parts(&[1]) });
        }
        let free = |bench: &Bench| bench.shard.space().regions[&region(2)].free_bytes;
        let mut at_both = false;
        for number in 0..12 {
            let before = free(&bench);
            let grant = granted(&mut bench, &parts(&[]));
            let most = (before.saturating_sub(2 * EXTENT) / 2).max(EXTENT / 16);
            let taken = before - free(&bench);
            assert!(taken <= most, "{copies} copies, slab {number}: {taken} of {before} bytes");
            at_both |= grant.holders.len() == 2;
        }
        assert_eq!(at_both, copies == 2);
    }
}
