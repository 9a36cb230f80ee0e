//! Commits, deletes and reads.

use crate::bench::{Bench, GEN, META, SLOT, SPACE, TTL, attested, entry, key, life, region, version, writer};
use quarry_meta_state::{
    RequestId, RequestRefusal, Shard,
    directory::Policy,
    shard::{
        CommitRefusal, Committed, Covers, DeleteKey, DeleteRefusal, Deleted, Mode, Publish, ShardCommand, ShardOutcome,
    },
};
use quarry_wire::{
    certificate::{Certificate, Role},
    grant::Class,
    ids::{CertificateSerial, ClusterUuid, GrantId, NodeId, Ordinal, ShardId, SlotIndex},
    key::Key,
    keyring::Keyring,
    limits::{OUTCOME_KEPT, QUARANTINE},
    signed::SecretKey,
    units::{LogTime, SlotCount, SlotSize, millis},
};

const APPLIED: Result<Committed, CommitRefusal> = Ok(Committed::Applied);

#[test]
fn a_committed_key_resolves_to_every_attested_copy() {
    let mut bench = Bench::new(2);
    let grant = bench.grant(4);
    assert_eq!(bench.commit(&grant, entry(2, "a", 5, Mode::Create)), APPLIED);
    let found = bench.shard.resolve(SPACE, &key("a")).unwrap();
    assert_eq!((found.version, found.payload_bytes, found.copies.len()), (version(5), 1_000, 2));
    for (copy, holder) in found.copies.iter().zip(&grant.holders) {
        assert_eq!((copy.region, copy.incarnation, copy.lend), (holder.region, holder.incarnation, holder.lend));
        assert_eq!(copy.offset, grant.offset(holder, SlotIndex(2)).unwrap());
        assert_eq!((copy.base, copy.slot_size), (holder.base, SlotSize(SLOT)));
    }
    assert_eq!(bench.shard.resolve(SPACE, &key("b")), None);
    bench.drain();
}

#[test]
fn a_resolved_descriptor_is_proven_by_the_signature_that_the_holder_made() {
    let mut bench = Bench::new(1);
    let cluster = ClusterUuid([3; 16]);
    let (root, node_key) = (SecretKey::from_seed(&[1; 32]), SecretKey::from_seed(&[2; 32]));
    let mut keyring = Keyring::new(cluster, root.public()).unwrap();
    keyring.see_generation(GEN);
    let (serial, node) = (CertificateSerial(1), NodeId(1));
    let certificate = Certificate { serial, node, role: Role::DataNode, key: node_key.public() };
    keyring.admit(&root.sign_as_root(cluster, certificate)).unwrap();

    let grant = bench.grant(4);
    let entries: Vec<_> = (0..3).map(|slot| entry(slot, &format!("k{slot}"), 5, Mode::Create)).collect();
    // The holder refused the middle one.
    let mut attested = attested(1);
    attested.covers = Covers::Only(vec![0, 2]);
    let statement = bench.shard.attested_batch(grant.id, &entries, &attested).unwrap();
    let signed = node_key.sign(cluster, GEN, serial, statement);
    attested.signature = signed.signature;
    keyring.verify(signed).unwrap();
    let outcomes = bench.publish_with(&grant, entries, vec![attested]);
    let refused = Err(CommitRefusal::NotEnoughHolders { needed: 1, attested: 0 });
    assert_eq!(outcomes, [APPLIED, refused, APPLIED]);

    for name in ["k0", "k2"] {
        let found = bench.shard.resolve(SPACE, &key(name)).unwrap();
        let copy = found.copies[0];
        let descriptor = bench.shard.descriptor(&found, &copy).unwrap();
        let batch = bench.shard.batch(copy.batch).unwrap();
        assert!(descriptor.proven_by(batch.signed()));
        keyring.verify(batch.signed().clone()).unwrap();
    }
    // The same through a snapshot.
    let again = Shard::decode(&bench.shard.encode()).unwrap();
    let found = again.resolve(SPACE, &key("k2")).unwrap();
    let descriptor = again.descriptor(&found, &found.copies[0]).unwrap();
    assert!(descriptor.proven_by(again.batch(found.copies[0].batch).unwrap().signed()));
}

#[test]
fn commit_at_the_expiry_instant_is_refused() {
    let mut bench = Bench::new(1);
    let expires_at = LogTime(bench.at + TTL);
    let grant = bench.grant(4);
    bench.at += TTL - 1;
    assert_eq!(bench.commit(&grant, entry(0, "a", 5, Mode::Create)), APPLIED);
    bench.at += 1;
    let refused = Err(CommitRefusal::GrantExpired { expired_at: expires_at, at: expires_at });
    assert_eq!(bench.commit(&grant, entry(1, "b", 5, Mode::Create)), refused);
    assert_eq!(bench.current("b"), None);
    bench.drain();
}

#[test]
fn repeated_commit_returns_the_first_outcome() {
    let mut bench = Bench::new(2);
    let grant = bench.grant(4);
    let first = entry(0, "a", 5, Mode::Create);
    let late = entry(1, "a", 6, Mode::Create);
    assert_eq!(bench.commit(&grant, first.clone()), APPLIED);
    let exists = Err(CommitRefusal::Exists { current: version(5) });
    assert_eq!(bench.commit(&grant, late.clone()), exists);
    bench.delete("a").unwrap();
    // Neither the delete, nor expiry, nor another mode changes what was said.
    for wait in [0, TTL, 1_000] {
        bench.wait(wait);
        assert_eq!(bench.commit(&grant, first.clone()), APPLIED);
        assert_eq!(bench.commit(&grant, late.clone()), exists);
        assert_eq!(bench.commit(&grant, entry(1, "a", 6, Mode::Replace)), exists);
        assert_eq!(bench.current("a"), None);
    }
    bench.drain();
}

#[test]
fn a_repeat_through_the_other_holder_has_the_first_outcome_and_joins_its_copy() {
    let mut bench = Bench::new(2);
    let grant = bench.grant(2);
    let said = entry(0, "a", 5, Mode::Create);
    assert_eq!(bench.publish_with(&grant, vec![said.clone()], vec![attested(1)]), [APPLIED]);
    assert_eq!(bench.shard.resolve(SPACE, &key("a")).unwrap().copies.len(), 1);
    assert_eq!(bench.publish_with(&grant, vec![said.clone()], vec![attested(2)]), [APPLIED]);
    assert_eq!(bench.shard.resolve(SPACE, &key("a")).unwrap().copies.len(), 2);
    assert_eq!(bench.publish_with(&grant, vec![said], vec![attested(1), attested(2)]), [APPLIED]);
    assert_eq!(bench.shard.resolve(SPACE, &key("a")).unwrap().copies.len(), 2);
    bench.drain();
}

#[test]
fn a_further_copy_does_not_join_once_its_slot_is_not_granted_or_its_version_not_current() {
    let mut bench = Bench::new(2);
    let grant = bench.grant(2);
    let said = entry(0, "a", 5, Mode::Create);
    assert_eq!(bench.publish_with(&grant, vec![said.clone()], vec![attested(1)]), [APPLIED]);
    assert_eq!(bench.publish_with(&grant, vec![entry(1, "a", 6, Mode::Replace)], vec![attested(1)]), [APPLIED]);
    assert_eq!(bench.publish_with(&grant, vec![said], vec![attested(2)]), [APPLIED]);
    let found = bench.shard.resolve(SPACE, &key("a")).unwrap();
    assert_eq!((found.version, found.copies.len()), (version(6), 1));
    // The grant expires: the second copy of slot 1 cannot join any more.
    bench.wait(TTL);
    assert_eq!(bench.publish_with(&grant, vec![entry(1, "a", 6, Mode::Replace)], vec![attested(2)]), [APPLIED]);
    assert_eq!(bench.shard.resolve(SPACE, &key("a")).unwrap().copies.len(), 1);
    bench.drain();
}

#[test]
fn a_repeat_that_names_another_frame_is_refused() {
    let mut bench = Bench::new(1);
    let grant = bench.grant(4);
    assert_eq!(bench.commit(&grant, entry(0, "a", 5, Mode::Create)), APPLIED);
    let taken = Err(CommitRefusal::SlotTaken { slot: SlotIndex(0), version: version(5) });
    assert_eq!(bench.commit(&grant, entry(0, "b", 5, Mode::Create)), taken);
    assert_eq!(bench.commit(&grant, entry(0, "a", 6, Mode::Replace)), taken);
    let mut other_payload = entry(0, "a", 5, Mode::Create);
    other_payload.payload_crc += 1;
    assert_eq!(bench.commit(&grant, other_payload), taken);
    assert_eq!(bench.current("a"), Some(version(5)));
    assert_eq!(bench.current("b"), None);
    // Also twice within one Publish.
    let twice = vec![entry(1, "c", 5, Mode::Create), entry(1, "d", 5, Mode::Create)];
    let taken = Err(CommitRefusal::SlotTaken { slot: SlotIndex(1), version: version(5) });
    assert_eq!(bench.publish_with(&grant, twice, vec![attested(1)]), [APPLIED, taken]);
}

// Found by the random histories: the batch went with the first entry's slot while the second still needed it.
#[test]
fn a_publish_may_replace_what_it_committed_itself() {
    let mut bench = Bench::new(1);
    let grant = bench.grant(4);
    let entries = vec![entry(0, "a", 5, Mode::Create), entry(1, "a", 6, Mode::Replace), entry(2, "b", 5, Mode::Create)];
    assert_eq!(bench.publish_with(&grant, entries, vec![attested(1)]), [APPLIED, APPLIED, APPLIED]);
    assert_eq!(bench.current("a"), Some(version(6)));
    bench.drain();
}

#[test]
fn a_late_attestation_of_an_old_incarnation_does_not_count() {
    let mut bench = Bench::new(2);
    let grant = bench.grant(4);
    bench.tell(vec![life(1, 2, true)]);
    let refused = Err(CommitRefusal::NotEnoughHolders { needed: 1, attested: 0 });
    assert_eq!(bench.publish_with(&grant, vec![entry(0, "a", 5, Mode::Create)], vec![attested(1)]), [refused]);
    // The other holder still counts.
    let outcomes = bench.publish_with(&grant, vec![entry(1, "b", 5, Mode::Create)], vec![attested(1), attested(2)]);
    assert_eq!(outcomes, [APPLIED]);
    let found = bench.shard.resolve(SPACE, &key("b")).unwrap();
    assert_eq!(found.copies.iter().map(|copy| copy.region).collect::<Vec<_>>(), [region(2)]);
    bench.drain();
}

#[test]
fn a_strangers_or_a_double_attestation_does_not_count() {
    let policy = Policy::new(Class::Cache, 2);
    let mut bench = Bench::with(3, policy, 1);
    let grant = bench.grant(4);
    let holders: Vec<_> = grant.holders.iter().map(|holder| holder.region.node.0).collect();
    let stranger = (1..=3).find(|node| !holders.contains(node)).unwrap();
    let refused = Err(CommitRefusal::NotEnoughHolders { needed: 2, attested: 1 });
    let twice = vec![attested(holders[0]), attested(holders[0])];
    assert_eq!(bench.publish_with(&grant, vec![entry(0, "a", 5, Mode::Create)], twice), [refused]);
    let with_stranger = vec![attested(holders[0]), attested(stranger)];
    assert_eq!(bench.publish_with(&grant, vec![entry(1, "a", 5, Mode::Create)], with_stranger), [refused]);
    let mut nothing = attested(holders[1]);
    nothing.covers = Covers::Only(vec![3]);
    let out_of_range = vec![attested(holders[0]), nothing];
    assert_eq!(bench.publish_with(&grant, vec![entry(2, "a", 5, Mode::Create)], out_of_range), [refused]);
    bench.drain();
}

#[test]
fn modes_decide_by_the_current_version() {
    let mut bench = Bench::new(1);
    let grant = bench.grant(12);
    let mut slot = 0;
    let mut put = |bench: &mut Bench, clock, mode| {
        slot += 1;
        bench.commit(&grant, entry(slot - 1, "a", clock, mode))
    };
    let compare = |clock: Option<u64>| Mode::Compare { expected: clock.map(version) };
    let failed = |clock: Option<u64>| Err(CommitRefusal::CompareFailed { current: clock.map(version) });
    assert_eq!(put(&mut bench, 5, compare(Some(4))), failed(None));
    assert_eq!(put(&mut bench, 5, compare(None)), APPLIED);
    assert_eq!(put(&mut bench, 6, Mode::Create), Err(CommitRefusal::Exists { current: version(5) }));
    assert_eq!(put(&mut bench, 4, Mode::Replace), Err(CommitRefusal::StaleVersion { current: version(5) }));
    assert_eq!(put(&mut bench, 4, compare(Some(5))), Err(CommitRefusal::StaleVersion { current: version(5) }));
    assert_eq!(put(&mut bench, 6, compare(Some(4))), failed(Some(5)));
    assert_eq!(put(&mut bench, 6, compare(Some(5))), APPLIED);
    assert_eq!(put(&mut bench, 7, Mode::Replace), APPLIED);
    assert_eq!(bench.delete("a"), Ok(Deleted { version: version(7) }));
    assert_eq!(put(&mut bench, 6, Mode::Create), APPLIED);
    bench.drain();
}

#[test]
fn a_put_whose_version_is_already_current_under_another_slot_succeeds_and_gives_its_slot_back() {
    let mut bench = Bench::new(1);
    let (one, two) = (bench.grant(1), bench.grant(1));
    assert_eq!(bench.commit(&one, entry(0, "a", 5, Mode::Create)), APPLIED);
    assert_eq!(bench.commit(&two, entry(0, "a", 5, Mode::Create)), Ok(Committed::AlreadyCurrent));
    let space = bench.shard.space().total;
    assert_eq!((space.committed_slots, space.resting_bytes), (1, u64::from(SLOT)));
    assert_eq!(bench.commit(&two, entry(0, "a", 5, Mode::Create)), Ok(Committed::AlreadyCurrent));
    bench.drain();
}

#[test]
fn malformed_entries_are_refused_each_on_its_own() {
    let mut bench = Bench::with(1, Policy::new(Class::Cache, 1), 8);
    let home = |wanted: bool| {
        let names = (0..).map(|n| format!("k{n}"));
        let mut fitting = names.filter(move |name| (Key::new(name).unwrap().shard(SPACE, 8) == ShardId(1)) == wanted);
        fitting.next().unwrap()
    };
    let (own, other) = (home(true), home(false));
    let grant = bench.grant(4);
    let mut large = entry(1, &own, 5, Mode::Create);
    large.payload_bytes = u64::from(SLOT);
    let entries = vec![entry(0, &other, 5, Mode::Create), large, entry(2, &own, 5, Mode::Create)];
    let outcomes = bench.publish_with(&grant, entries, vec![attested(1)]);
    let wrong = CommitRefusal::WrongShard { expected: key(&other).shard(SPACE, 8), found: ShardId(1) };
    let found = u64::from(SLOT) + 128;
    assert_eq!(outcomes, [Err(wrong), Err(CommitRefusal::TooLarge { limit: u64::from(SLOT), found }), APPLIED]);
    let beyond = CommitRefusal::NoSuchSlot { slot: SlotIndex(4), slots: SlotCount(4) };
    assert_eq!(bench.commit(&grant, entry(4, &own, 5, Mode::Create)), Err(beyond));
    let stranger = GrantId { shard: ShardId(1), sequence: Ordinal { generation: GEN, number: 99 } };
    let publish =
        Publish { grant: stranger, entries: vec![entry(0, &own, 9, Mode::Replace)], attested: vec![attested(1)] };
    let unknown = CommitRefusal::UnknownGrant { grant: stranger };
    assert_eq!(bench.apply(ShardCommand::Publish(publish)), ShardOutcome::Publish(vec![Err(unknown)]));
    let wrong_shard = GrantId { shard: ShardId(2), ..grant.id };
    let publish =
        Publish { grant: wrong_shard, entries: vec![entry(3, &own, 9, Mode::Replace)], attested: vec![attested(1)] };
    let unknown = CommitRefusal::UnknownGrant { grant: wrong_shard };
    assert_eq!(bench.apply(ShardCommand::Publish(publish)), ShardOutcome::Publish(vec![Err(unknown)]));
}

#[test]
fn outcomes_are_kept_for_their_time_after_the_grant_closed_then_the_grant_is_unknown() {
    let mut bench = Bench::new(1);
    let grant = bench.grant(2);
    assert_eq!(bench.commit(&grant, entry(0, "a", 5, Mode::Create)), APPLIED);
    bench.seal(&grant, 1);
    bench.wait(millis(OUTCOME_KEPT) - 1);
    assert_eq!(bench.commit(&grant, entry(0, "a", 5, Mode::Create)), APPLIED);
    bench.wait(1);
    let unknown = Err(CommitRefusal::UnknownGrant { grant: grant.id });
    assert_eq!(bench.commit(&grant, entry(0, "a", 5, Mode::Create)), unknown);
    assert_eq!(bench.shard.grant(grant.id), None);
    // The value outlives its grant.
    assert_eq!(bench.shard.resolve(SPACE, &key("a")).unwrap().copies.len(), 1);
    bench.drain();
}

#[test]
fn replaced_memory_rests_until_after_the_horizon_and_the_quarantine() {
    let mut bench = Bench::new(1);
    let (one, two) = (bench.grant(1), bench.grant(1));
    assert_eq!(bench.commit(&one, entry(0, "a", 5, Mode::Create)), APPLIED);
    let free = bench.free_bytes();
    let horizon = bench.at + 9_000;
    bench.tick(Some(horizon));
    assert_eq!(bench.commit(&two, entry(0, "a", 6, Mode::Replace)), APPLIED);
    assert_eq!(bench.shard.space().total.resting_bytes, u64::from(SLOT));
    let end = horizon + millis(QUARANTINE);
    bench.at = end - 1;
    bench.tick(None);
    assert_eq!(bench.free_bytes(), free);
    bench.at = end;
    bench.tick(None);
    assert_eq!(bench.free_bytes(), free + u64::from(SLOT));
}

#[test]
fn the_horizon_only_grows_and_is_bounded() {
    let mut bench = Bench::new(1);
    let now = bench.at;
    assert_eq!(bench.tick(Some(now + 5_000)), LogTime(now + 5_000));
    assert_eq!(bench.tick(Some(now + 4_000)), LogTime(now + 5_000));
    let most = now + millis(bench.shard.settings().horizon_ahead_max);
    assert_eq!(bench.tick(Some(u64::MAX)), LogTime(most));
    // A new leader inherits it.
    assert_eq!(Shard::decode(&bench.shard.encode()).unwrap().horizon(), LogTime(most));
}

#[test]
fn a_repeated_delete_is_not_executed_again() {
    let mut bench = Bench::new(1);
    let grant = bench.grant(4);
    assert_eq!(bench.commit(&grant, entry(0, "a", 5, Mode::Create)), APPLIED);
    let request = bench.request();
    assert_eq!(bench.delete_as(request, "a"), Ok(Deleted { version: version(5) }));
    assert_eq!(bench.commit(&grant, entry(1, "a", 6, Mode::Create)), APPLIED);
    assert_eq!(bench.delete_as(request, "a"), Ok(Deleted { version: version(5) }));
    assert_eq!(bench.current("a"), Some(version(6)));
    assert_eq!(bench.delete("b"), Err(DeleteRefusal::NotFound));
}

#[test]
fn a_request_at_the_floor_is_stale_and_never_executed() {
    let mut bench = Bench::new(1);
    let grant = bench.grant(4);
    assert_eq!(bench.commit(&grant, entry(0, "a", 5, Mode::Create)), APPLIED);
    let old = bench.request();
    let command = || ShardCommand::Delete {
        request: old,
        namespace: SPACE,
        keys: vec![DeleteKey { key: key("a"), expected: Some(version(4)) }],
    };
    let failed = DeleteRefusal::CompareFailed { expected: version(4), current: version(5) };
    assert_eq!(bench.apply(command()), ShardOutcome::Delete(Ok(vec![Err(failed)])));
    bench.wait(millis(OUTCOME_KEPT) - 1);
    assert_eq!(bench.apply(command()), ShardOutcome::Delete(Ok(vec![Err(failed)])));
    bench.wait(1);
    let stale = RequestRefusal::Stale { floor: old.at, found: old.at };
    assert_eq!(bench.apply(command()), ShardOutcome::Delete(Err(stale)));
    let ahead = RequestId { at: LogTime(bench.at + 1), random: 7 };
    let refused = RequestRefusal::Ahead { at: LogTime(bench.at), found: ahead.at };
    let command = ShardCommand::Delete { request: ahead, namespace: SPACE, keys: Vec::new() };
    assert_eq!(bench.apply(command), ShardOutcome::Delete(Err(refused)));
    bench.drain();
}

#[test]
fn a_request_name_is_good_for_one_kind_of_request() {
    let mut bench = Bench::new(1);
    let asked = bench.asked(1);
    let request = asked.request;
    let avoid = std::collections::BTreeSet::new();
    let command = bench.shard.planner(LogTime(bench.at), &avoid).grant(META, asked).unwrap();
    bench.try_grant(command).unwrap();
    let command = ShardCommand::Delete { request, namespace: SPACE, keys: Vec::new() };
    assert_eq!(bench.apply(command), ShardOutcome::Delete(Err(RequestRefusal::Taken)));
}

#[test]
fn a_region_in_a_new_life_takes_its_copies_with_it_and_its_memory_is_free_at_once() {
    let mut bench = Bench::new(2);
    let grant = bench.grant(2);
    assert_eq!(bench.commit(&grant, entry(0, "both", 5, Mode::Create)), APPLIED);
    assert_eq!(bench.publish_with(&grant, vec![entry(1, "one", 5, Mode::Create)], vec![attested(1)]), [APPLIED]);
    bench.tell(vec![life(1, 2, false)]);
    assert_eq!(bench.shard.resolve(SPACE, &key("both")).unwrap().copies.len(), 1);
    assert_eq!(bench.current("one"), None);
    let space = bench.shard.space();
    assert_eq!(space.regions[&region(1)].free_bytes, space.regions[&region(1)].bytes);
    // An old life told again changes nothing.
    bench.tell(vec![life(1, 1, true)]);
    assert!(!bench.shard.region(region(1)).unwrap().up);
    bench.tell(vec![life(2, 2, true)]);
    assert_eq!(bench.current("both"), None);
    bench.drain();
}

#[test]
fn keys_are_listed_in_order_by_prefix_after_a_key_and_up_to_a_limit() {
    let mut bench = Bench::new(1);
    let grant = bench.grant(8);
    for (slot, name) in (0..).zip(["a/3", "b", "a/1", "a", "a/2"]) {
        assert_eq!(bench.commit(&grant, entry(slot, name, 5, Mode::Create)), APPLIED);
    }
    let list = |prefix: &[u8], after: Option<&str>, limit| {
        let after = after.map(key);
        let found = bench.shard.list(SPACE, prefix, after.as_ref()).take(limit).map(|listed| listed.key.to_string());
        found.collect::<Vec<_>>()
    };
    assert_eq!(list(b"", None, 9), ["a", "a/1", "a/2", "a/3", "b"]);
    assert_eq!(list(b"a/", None, 2), ["a/1", "a/2"]);
    assert_eq!(list(b"a/", Some("a/2"), 9), ["a/3"]);
    assert_eq!(list(b"a/", Some("b"), 9), Vec::<String>::new());
    assert_eq!(list(&[b'a'; 600], None, 9), Vec::<String>::new());
    let listed = bench.shard.list(SPACE, b"a/", None).next().unwrap();
    assert_eq!((Some(listed.version), listed.payload_bytes, listed.copies), (bench.current("a/1"), 1_000, 1));
    assert!(bench.shard.has(SPACE, &key("a/1")) && !bench.shard.has(SPACE, &key("a/4")));
    assert_eq!(writer(1), grant.writer);
}
