//! Moves: values that go to another slab at the same nodes.

use crate::bench::{Bench, EXTENTS, META, REGION_BYTES, SLOT, SPACE, TTL, attested, entry, extent, key, life, version};
use quarry_meta_state::{
    Shard,
    directory::Policy,
    entry as log_entry,
    shard::{
        Attested, CommitEntry, CommitOutcome, CommitRefusal, Committed, Covers, DeleteKey, GrantPhase, GrantRefusal,
        Mode, MoveRequest, PlannedMove, Proposed, Publish, ShardCommand, Sought, Sparse, ValuePlace,
    },
};
use quarry_wire::{
    grant::{Class, Grant, Purpose},
    ids::{ExtentId, NodeId, SlotIndex, WriterId},
    limits::{COMMAND_BYTES_MAX, COPIES_MAX, GRANT_TTL_MAX, KEY_BYTES_MAX, OUTCOME_KEPT, QUARANTINE},
    units::{LogTime, Offset, SlotCount, SlotSize, millis},
};
use std::collections::BTreeSet;

const SECOND: u64 = 1_000;
const EXTENT: u64 = REGION_BYTES / EXTENTS as u64;

/// Keys with values of version 5, each in a slab of its own that is closed.
fn put(bench: &mut Bench, names: &[&str]) {
    for name in names {
        let grant = bench.grant(1);
        bench.commit(&grant, entry(0, name, 5, Mode::Replace)).unwrap();
    }
}

/// Values of version 5 in one slab, which is closed then.
fn fill(bench: &mut Bench, names: &[String]) {
    let grant = bench.grant(u32::try_from(names.len()).unwrap());
    let entries = (0..).zip(names).map(|(slot, name)| entry(slot, name, 5, Mode::Create)).collect();
    let attested = grant.holders.iter().map(|holder| attested(holder.region.node.0)).collect();
    let outcomes = bench.publish_with(&grant, entries, attested);
    assert!(outcomes.iter().all(|outcome| *outcome == Ok(Committed::Applied)), "{outcomes:?}");
}

fn places(bench: &Bench, names: &[&str]) -> Vec<ValuePlace> {
    names.iter().map(|name| bench.shard.place_of(SPACE, &key(name)).unwrap()).collect()
}

fn try_plan(bench: &Bench, names: &[&str], away: &[ExtentId]) -> Option<PlannedMove> {
    let away = away.iter().copied().collect();
    bench.shard.plan_move(META, LogTime(bench.at), &places(bench, names), &away, &BTreeSet::new())
}

/// A grant to move these values, and what to publish under it.
fn begin(bench: &mut Bench, names: &[&str]) -> (Grant, PlannedMove) {
    let planned = try_plan(bench, names, &[]).unwrap();
    (bench.try_grant(planned.command.clone()).unwrap(), planned)
}

fn publish(bench: &mut Bench, grant: &Grant, planned: &PlannedMove, nodes: &[u64]) -> Vec<CommitOutcome> {
    bench.publish_with(grant, planned.entries.clone(), nodes.iter().map(|node| attested(*node)).collect())
}

fn resting(bench: &Bench) -> u64 {
    bench.shard.space().total.resting_bytes
}

#[test]
fn a_moved_value_keeps_its_version_and_the_place_that_it_left_rests_until_every_lease_on_it_is_over() {
    let mut bench = Bench::new(2);
    put(&mut bench, &["a", "b"]);
    let horizon = bench.at + 8 * SECOND;
    bench.tick(Some(horizon));
    let before = bench.shard.resolve(SPACE, &key("a")).unwrap();
    let (grant, planned) = begin(&mut bench, &["a", "b"]);
    assert_eq!((grant.purpose, grant.writer, grant.slots), (Purpose::Move, WriterId::HOLDERS, SlotCount(2)));
    assert_eq!(publish(&mut bench, &grant, &planned, &[1, 2]), [Ok(Committed::Applied); 2]);

    let after = bench.shard.resolve(SPACE, &key("a")).unwrap();
    assert_eq!(after.version, before.version);
    assert_eq!((after.payload_bytes, after.payload_crc), (before.payload_bytes, before.payload_crc));
    assert_eq!(after.copies.len(), 2);
    for new in &after.copies {
        let old = before.copies.iter().find(|old| old.region == new.region).expect("the nodes stay");
        assert_eq!(new.grant, grant.id);
        assert_ne!(new.offset, old.offset);
        assert!(bench.shard.descriptor(&after, new).is_some(), "the new place has a proof of its own");
    }
    assert_eq!(bench.shard.grant(grant.id).unwrap().phase, GrantPhase::Closed);
    // 2 values, 2 copies each.
    assert_eq!(resting(&bench), 4 * u64::from(SLOT));
    bench.at = horizon + millis(QUARANTINE) - 1;
    bench.tick(None);
    assert_eq!(resting(&bench), 4 * u64::from(SLOT));
    bench.wait(1);
    assert_eq!(resting(&bench), 0);
    // Whoever compares with the version that he knows sees no difference.
    let own = bench.grant(1);
    let compare = Mode::Compare { expected: Some(version(5)) };
    assert_eq!(bench.commit(&own, entry(0, "a", 6, compare)), Ok(Committed::Applied));
    bench.drain();
}

#[test]
fn a_value_that_was_replaced_deleted_or_made_anew_meanwhile_is_not_moved() {
    let mut bench = Bench::new(1);
    put(&mut bench, &["a", "b", "c"]);
    let (grant, planned) = begin(&mut bench, &["a", "b", "c"]);
    let other = bench.grant(2);
    bench.commit(&other, entry(0, "a", 6, Mode::Replace)).unwrap();
    bench.delete("b").unwrap();
    bench.delete("c").unwrap();
    // The very same frame once more, in another slot.
    bench.commit(&other, entry(1, "c", 5, Mode::Create)).unwrap();
    let not_current = |current| Err(CommitRefusal::NotCurrent { current });
    let outcomes = publish(&mut bench, &grant, &planned, &[1]);
    assert_eq!(outcomes, [not_current(Some(version(6))), not_current(None), not_current(Some(version(5)))]);
    assert_eq!(bench.current("a"), Some(version(6)));
    assert_eq!(bench.current("b"), None);
    assert_eq!(bench.shard.place_of(SPACE, &key("c")).unwrap().grant, other.id);
    bench.drain();
}

#[test]
fn a_move_sent_twice_has_one_outcome_also_after_the_value_went_on() {
    let mut bench = Bench::new(2);
    put(&mut bench, &["a"]);
    let (grant, planned) = begin(&mut bench, &["a"]);
    assert_eq!(publish(&mut bench, &grant, &planned, &[1, 2]), [Ok(Committed::Applied)]);
    assert_eq!(publish(&mut bench, &grant, &planned, &[1]), [Ok(Committed::Applied)]);
    assert_eq!(resting(&bench), 2 * u64::from(SLOT), "nothing was left twice");
    let (next, further) = begin(&mut bench, &["a"]);
    assert_eq!(publish(&mut bench, &next, &further, &[1, 2]), [Ok(Committed::Applied)]);
    assert_eq!(publish(&mut bench, &grant, &planned, &[1, 2]), [Ok(Committed::Applied)], "the first outcome stays");
    assert_eq!(bench.shard.place_of(SPACE, &key("a")).unwrap().grant, next.id);
    bench.drain();
}

#[test]
fn of_two_moves_of_one_value_the_first_to_be_applied_holds() {
    let mut bench = Bench::new(1);
    put(&mut bench, &["a"]);
    let (one, first) = begin(&mut bench, &["a"]);
    let (two, second) = begin(&mut bench, &["a"]);
    assert_eq!(publish(&mut bench, &two, &second, &[1]), [Ok(Committed::Applied)]);
    let late = Err(CommitRefusal::NotCurrent { current: Some(version(5)) });
    assert_eq!(publish(&mut bench, &one, &first, &[1]), [late]);
    bench.drain();
}

#[test]
fn the_outcome_of_the_put_stays_and_its_late_copies_join_no_more() {
    let mut bench = Bench::new(2);
    let grant = bench.grant(2);
    let put = entry(0, "a", 5, Mode::Create);
    // The second holder has not confirmed yet.
    assert_eq!(bench.publish_with(&grant, vec![put.clone()], vec![attested(1)]), [Ok(Committed::Applied)]);
    let (to, planned) = begin(&mut bench, &["a"]);
    assert_eq!(to.holders.len(), 1);
    assert_eq!(publish(&mut bench, &to, &planned, &[1]), [Ok(Committed::Applied)]);
    assert_eq!(bench.commit(&grant, put), Ok(Committed::Applied));
    let found = bench.shard.resolve(SPACE, &key("a")).unwrap();
    assert_eq!(found.copies.len(), 1, "a copy of the old place is none of the new one");
    // The writer's grant is open: its other slot is still its own.
    assert_eq!(bench.commit(&grant, entry(1, "b", 5, Mode::Create)), Ok(Committed::Applied));
    bench.drain();
}

#[test]
fn a_move_with_fewer_copies_than_there_are_is_refused_and_the_value_stays() {
    let mut bench = Bench::new(3);
    put(&mut bench, &["a"]);
    let before = bench.shard.resolve(SPACE, &key("a"));
    let (grant, planned) = begin(&mut bench, &["a"]);
    let refused = Err(CommitRefusal::NotEnoughHolders { needed: 3, attested: 2 });
    assert_eq!(publish(&mut bench, &grant, &planned, &[1, 3]), [refused]);
    assert_eq!(bench.shard.resolve(SPACE, &key("a")), before);
    assert_eq!(bench.shard.grant(grant.id).unwrap().phase, GrantPhase::Closed, "every slot has its answer");
    // A node lost its memory: what is left is moved, as many as are left.
    bench.tell(vec![life(2, 2, true)]);
    let (grant, planned) = begin(&mut bench, &["a"]);
    assert_eq!(grant.holders.len(), 2);
    assert_eq!(publish(&mut bench, &grant, &planned, &[1, 3]), [Ok(Committed::Applied)]);
    bench.drain();
}

#[test]
fn a_pinned_value_is_neither_planned_nor_moved_until_its_pin_ends() {
    let mut bench = Bench::new(1);
    put(&mut bench, &["a", "b"]);
    let (grant, planned) = begin(&mut bench, &["a", "b"]);
    let pin = bench.pin(1, &["a"], 5 * SECOND);
    let before = bench.shard.resolve(SPACE, &key("a"));
    let outcomes = publish(&mut bench, &grant, &planned, &[1]);
    assert_eq!(outcomes, [Err(CommitRefusal::Pinned), Ok(Committed::Applied)]);
    assert_eq!(bench.shard.resolve(SPACE, &key("a")), before);
    assert_eq!(try_plan(&bench, &["a"], &[]), None);
    assert!(bench.release(1, pin));
    let (grant, planned) = begin(&mut bench, &["a"]);
    assert_eq!(publish(&mut bench, &grant, &planned, &[1]), [Ok(Committed::Applied)]);
    bench.drain();
}

#[test]
fn a_grant_for_moves_takes_only_moves_and_another_grant_none() {
    let mut bench = Bench::new(1);
    put(&mut bench, &["a"]);
    let (to_move, planned) = begin(&mut bench, &["a"]);
    let plain = bench.grant(1);
    for mode in [Mode::Create, Mode::Replace, Mode::Compare { expected: Some(version(5)) }] {
        let (other, _) = begin(&mut bench, &["a"]);
        assert_eq!(bench.commit(&other, entry(0, "a", 6, mode)), Err(CommitRefusal::Purpose));
    }
    assert_eq!(publish(&mut bench, &plain, &planned, &[1]), [Err(CommitRefusal::Purpose)]);
    assert_eq!(publish(&mut bench, &to_move, &planned, &[1]), [Ok(Committed::Applied)]);
    bench.drain();
}

#[test]
fn another_frame_than_the_one_that_is_there_is_not_moved() {
    let mut bench = Bench::new(1);
    put(&mut bench, &["a", "b"]);
    let (_, planned) = begin(&mut bench, &["a"]);
    let good = planned.entries[0].clone();
    let from = places(&bench, &["b"])[0];
    for (what, wrong) in [
        ("version", CommitEntry { version: version(6), ..good.clone() }),
        ("length", CommitEntry { payload_bytes: 999, ..good.clone() }),
        ("CRC", CommitEntry { payload_crc: 1, ..good.clone() }),
        ("key", CommitEntry { key: key("b"), ..good.clone() }),
        ("place", CommitEntry { mode: Mode::Move { from }, ..good }),
    ] {
        let (grant, _) = begin(&mut bench, &["a"]);
        let refused = Err(CommitRefusal::NotCurrent { current: Some(version(5)) });
        assert_eq!(bench.commit(&grant, wrong), refused, "{what}");
    }
    bench.drain();
}

#[test]
fn a_move_that_is_never_finished_ends_with_its_grant_and_leaks_nothing() {
    let mut bench = Bench::new(2);
    put(&mut bench, &["a"]);
    let before = (bench.free_bytes(), bench.shard.resolve(SPACE, &key("a")));
    let (grant, planned) = begin(&mut bench, &["a"]);
    assert_ne!(bench.free_bytes(), before.0);
    bench.wait(millis(GRANT_TTL_MAX));
    let expired = publish(&mut bench, &grant, &planned, &[1, 2]);
    assert!(matches!(expired[0], Err(CommitRefusal::GrantExpired { .. })), "{expired:?}");
    bench.wait(millis(QUARANTINE));
    assert_eq!((bench.free_bytes(), bench.shard.resolve(SPACE, &key("a"))), before);
    bench.wait(millis(OUTCOME_KEPT));
    let unknown = Err(CommitRefusal::UnknownGrant { grant: grant.id });
    assert_eq!(publish(&mut bench, &grant, &planned, &[1, 2]), [unknown]);
    bench.drain();
}

#[test]
fn a_slab_for_moves_is_granted_only_where_a_slab_can_be_and_beyond_the_quota() {
    let quota = 4 * u64::from(SLOT);
    let policy = Policy { quota_bytes: Some(quota), least: 1, ..Policy::new(Class::Cache, 2) };
    let mut bench = Bench::with(2, policy, 1);
    put(&mut bench, &["a", "b"]);
    assert!(bench.plan(1).is_err(), "the namespace has used its quota");
    let asked = MoveRequest {
        namespace: SPACE,
        slot_size: SlotSize(SLOT),
        slots: SlotCount(1),
        ttl: std::time::Duration::from_millis(TTL),
    };
    let at = |index: u32, base: u64| Proposed { extent: extent(1, index), base: Offset(base) };
    let grant_move = |holders| ShardCommand::GrantMove { meta: META, asked, holders };
    let taken = GrantRefusal::NotFree { extent: extent(1, 0), base: Offset(0) };
    assert_eq!(bench.try_grant(grant_move(vec![at(0, 0)])), Err(taken));
    assert_eq!(bench.try_grant(grant_move(vec![])), Err(GrantRefusal::Holders { least: 1, most: 2, found: 0 }));
    let same = vec![at(1, EXTENT), at(2, 2 * EXTENT)];
    assert_eq!(bench.try_grant(grant_move(same)), Err(GrantRefusal::SameNode { node: NodeId(1) }));
    let (grant, planned) = begin(&mut bench, &["a", "b"]);
    assert_eq!(publish(&mut bench, &grant, &planned, &[1, 2]), [Ok(Committed::Applied); 2]);
    bench.drain();
}

#[test]
fn a_plan_stays_out_of_the_extents_that_are_to_be_emptied_and_fills_the_fullest_others() {
    let mut bench = Bench::new(1);
    // 15 of 16 slots of the first extent, and two of the second.
    fill(&mut bench, &(0..15).map(|slot| format!("full-{slot}")).collect::<Vec<_>>());
    fill(&mut bench, &["sparse-0".to_owned(), "sparse-1".to_owned()]);
    let holder_of = |planned: &PlannedMove| match &planned.command {
        ShardCommand::GrantMove { asked, holders, .. } => (asked.slots, holders[0].extent),
        other => panic!("{other:?}"),
    };
    let one = try_plan(&bench, &["sparse-0"], &[extent(1, 1)]).unwrap();
    assert_eq!(holder_of(&one), (SlotCount(1), extent(1, 0)), "the last free slot of the fullest extent");
    let two = try_plan(&bench, &["sparse-0", "sparse-1"], &[extent(1, 1)]).unwrap();
    assert_eq!(holder_of(&two), (SlotCount(2), extent(1, 2)), "both fit there no more");
    let all_but_the_first: Vec<_> = (1..EXTENTS).map(|index| extent(1, index)).collect();
    let halved = try_plan(&bench, &["sparse-0", "sparse-1"], &all_but_the_first).unwrap();
    assert_eq!((holder_of(&halved), halved.entries.len()), ((SlotCount(1), extent(1, 0)), 1));
    let everywhere: Vec<_> = (0..EXTENTS).map(|index| extent(1, index)).collect();
    assert_eq!(try_plan(&bench, &["sparse-0"], &everywhere), None);
}

#[test]
fn a_plan_fits_in_a_command_however_long_the_keys_are() {
    for length in [1, 40, KEY_BYTES_MAX] {
        let mut bench = Bench::new(3);
        let names: Vec<String> = (0..160).map(|number| format!("{number:0length$}")).collect();
        for names in names.chunks(16) {
            fill(&mut bench, names);
        }
        let values: Vec<_> = names.iter().map(|name| bench.shard.place_of(SPACE, &key(name)).unwrap()).collect();
        let planned =
            bench.shard.plan_move(META, LogTime(bench.at), &values, &BTreeSet::new(), &BTreeSet::new()).unwrap();
        let grant = bench.try_grant(planned.command.clone()).unwrap();
        assert_eq!(grant.slots.0 as usize, planned.entries.len());
        let mut entries = planned.entries;
        for entry in &mut entries {
            // As long as numbers get.
            let Mode::Move { from } = &mut entry.mode else { panic!("a move") };
            from.grant.sequence.number = u64::MAX;
            (entry.version.clock.0, entry.payload_bytes, entry.payload_crc) = (u64::MAX, u64::MAX, u32::MAX);
        }
        let half: Vec<u32> = (0..u32::try_from(entries.len()).unwrap()).collect();
        let attested = (1..=COPIES_MAX as u64).map(attested);
        let attested = attested.map(|it| Attested { covers: Covers::Only(half.clone()), ..it });
        let publish = ShardCommand::Publish(Publish { grant: grant.id, entries, attested: attested.collect() });
        let bytes = log_entry::encode_command(&publish).unwrap().len();
        assert!(bytes + 64 <= COMMAND_BYTES_MAX, "{bytes} bytes with keys of {length}");
    }
}

/// One value in each extent, with holes beside it: all but one slot in sixteen was deleted again.
fn scattered(bench: &mut Bench) {
    for index in 0..EXTENTS {
        fill(bench, &(0..16).map(|slot| format!("{index}-{slot}")).collect::<Vec<_>>());
    }
    let gone = |index: u32| (0..16).filter(move |slot| *slot != index).map(move |slot| format!("{index}-{slot}"));
    let keys = (0..EXTENTS).flat_map(gone).map(|name| DeleteKey { key: key(&name), expected: None }).collect();
    let request = bench.request();
    bench.apply(ShardCommand::Delete { request, namespace: SPACE, keys });
    bench.wait(TTL + millis(QUARANTINE));
}

/// Somebody found no place for a slot of so many bytes.
fn wanting(bytes: u64) -> Sought {
    Sought { wanted: Some(bytes), ..Sought::default() }
}

#[test]
fn sparse_extents_are_emptied_until_large_slots_fit_again() {
    let mut bench = Bench::new(1);
    scattered(&mut bench);
    let whole = |bench: &mut Bench| {
        let mut asked = bench.asked(1);
        asked.slot_size = SlotSize(u32::try_from(EXTENT).unwrap());
        let planned = bench.shard.planner(LogTime(bench.at), &BTreeSet::new()).grant(META, asked);
        planned.and_then(|command| bench.try_grant(command))
    };
    assert!(matches!(whole(&mut bench), Err(GrantRefusal::NoSpace { .. })), "15/16 of the memory is free");
    let mut emptied = BTreeSet::new();
    while let Some(Sparse { extent, live_bytes, values }) = bench.shard.sparse_extent(&Sought::default()) {
        assert!(live_bytes >= u64::from(SLOT) && !values.is_empty());
        let away = BTreeSet::from([extent]);
        let planned =
            bench.shard.plan_move(META, LogTime(bench.at), &values, &away, &BTreeSet::new()).expect("there is room");
        let grant = bench.try_grant(planned.command.clone()).unwrap();
        assert_eq!(publish(&mut bench, &grant, &planned, &[1])[0], Ok(Committed::Applied));
        assert!(emptied.insert(extent), "{extent} is emptied twice");
    }
    assert_eq!(emptied.len(), 1, "one that rests is enough");
    bench.wait(millis(QUARANTINE));
    whole(&mut bench).unwrap();
    assert_eq!(bench.shard.values(), EXTENTS as usize);
    assert!(bench.shard.sparse_extent(&Sought::default()).is_some(), "the free one was taken: the next is needed");
    assert_eq!(
        bench.shard.sparse_extent(&Sought { avoid: BTreeSet::from([NodeId(1)]), ..Sought::default() }),
        None,
        "a node that is not heard is left"
    );
    bench.drain();
}

#[test]
fn an_extent_with_an_open_grant_or_a_pin_is_not_emptied() {
    let mut bench = Bench::new(1);
    scattered(&mut bench);
    // A pin on all but two, and a grant that lasts beside one of these.
    let names: Vec<String> = (0..EXTENTS).map(|index| format!("{index}-{index}")).collect();
    let pinned: Vec<&str> = names[2..].iter().map(String::as_str).collect();
    bench.pin(1, &pinned, 60 * SECOND);
    bench.grant(1);
    let found = bench.shard.sparse_extent(&Sought::default()).unwrap();
    assert_eq!((found.extent, found.values.len()), (extent(1, 1), 1));
    bench.pin(1, &["1-1"], 60 * SECOND);
    assert_eq!(bench.shard.sparse_extent(&Sought::default()), None);
    bench.wait(TTL + millis(QUARANTINE));
    assert_eq!(bench.shard.sparse_extent(&Sought::default()).unwrap().extent, extent(1, 0));
    bench.drain();
}

#[test]
fn somebody_who_found_no_place_for_a_large_slot_has_an_extent_emptied() {
    let mut bench = Bench::new(1);
    scattered(&mut bench);
    // Fill up until less than two extents are free.
    while bench.free_bytes() >= 2 * EXTENT {
        let grant = bench.grant(1);
        let name = format!("more-{}", bench.shard.values());
        bench.commit(&grant, entry(0, &name, 5, Mode::Create)).unwrap();
    }
    assert_eq!(bench.shard.sparse_extent(&Sought::default()), None);
    assert_eq!(bench.shard.sparse_extent(&wanting(SLOT.into())), None, "that one has a place");
    assert!(bench.shard.sparse_extent(&wanting(EXTENT)).is_some());
    assert_eq!(bench.shard.sparse_extent(&wanting(2 * EXTENT)), None, "no extent is so large");
    bench.drain();
}

#[test]
fn a_moved_value_goes_through_a_snapshot_and_outlives_the_outcomes_of_its_grants() {
    let mut bench = Bench::new(2);
    put(&mut bench, &["a"]);
    let (grant, planned) = begin(&mut bench, &["a"]);
    publish(&mut bench, &grant, &planned, &[1, 2]);
    bench.shard = Shard::decode(&bench.shard.encode()).unwrap();
    bench.wait(millis(OUTCOME_KEPT) + TTL);
    let found = bench.shard.resolve(SPACE, &key("a")).unwrap();
    assert_eq!((found.copies.len(), found.copies[0].slot), (2, SlotIndex(0)));
    // Its grant is forgotten, and it can be moved on all the same.
    let (next, further) = begin(&mut bench, &["a"]);
    assert_eq!(publish(&mut bench, &next, &further, &[1, 2]), [Ok(Committed::Applied)]);
    bench.drain();
}
