//! Replies that are lost or changed on their way: one outcome per entry, nothing granted twice, nothing false believed.

use crate::mutants::mutants;
use bytes::Bytes;
use quarry_client::{Client, Cluster, GetError, Namespace, Options, PutItem};
use quarry_proto::v1::{self, commit_outcome::Code};
use quarry_tests::{
    Seed, TestCluster,
    calls::{self, Answer, Turned},
    cluster::{SHARD, Space, create_namespace},
    raw::RawWriter,
    relay::{Fate, Relays},
    rounds::rounds,
    seed::pattern,
    soon,
    wait::eventually,
};
use quarry_wire::{ids::NodeId, key::Key};
use std::{
    panic,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

const BYTES: usize = 3_000;
/// A grant that nobody heard of ends by itself, and what it held rests for a while.
const RETURN: Duration = Duration::from_secs(90);

/// A cluster of one meta node and two data nodes, with relays before all of them.
async fn relayed() -> (TestCluster, Relays) {
    let mut relays = Relays::reserve(3).await;
    let small = |spec: &mut quarry_tests::LocalSpec| {
        spec.metas = 1;
        // The relays between the processes are nobody's.
        spec.plaintext = true;
        // A data node whose connections are cut is not dead.
        spec.node_silence_ms = 60_000;
    };
    let cluster = TestCluster::start_prepared(small, |local| relays.stand_before(local)).await;
    (cluster, relays)
}

async fn client(relays: &Relays, timeout: Duration) -> Client {
    let cluster = Cluster::from_file(relays.cluster_file()).unwrap();
    let grant_ttl = Duration::from_secs(8);
    Client::connect(cluster, Options { timeout, grant_ttl, ..Options::default() }).await.unwrap()
}

/// Loses the first `times` replies to `method`; counts them, and keeps the first one.
fn lose(relays: &Relays, method: &'static str, times: usize) -> (Arc<AtomicUsize>, Arc<Mutex<Option<Bytes>>>) {
    let (lost, first) = (Arc::new(AtomicUsize::new(0)), Arc::<Mutex<Option<Bytes>>>::default());
    let (count, keep) = (Arc::clone(&lost), Arc::clone(&first));
    relays.judge(move |it, reply| {
        if it != method || count.fetch_add(1, Ordering::SeqCst) >= times {
            return Fate::Passed;
        }
        keep.lock().unwrap().get_or_insert_with(|| reply.clone());
        Fate::Lost
    });
    (lost, first)
}

/// Calls again and again while the reply is lost, with the same message.
async fn until_answered<T>(mut call: impl AsyncFnMut() -> Answer<T>) -> T {
    soon("the call is answered", async || match call().await {
        Ok(reply) => Some(reply),
        Err(Turned::Fault(_)) => None,
        Err(Turned::Refused(refusal)) => panic!("refused: {refusal:?}"),
    })
    .await
}

/// Waits until no memory is granted or resting.
async fn settled(cluster: &TestCluster) -> Space {
    eventually(RETURN, "all memory is free or holds a value", async || {
        let space = cluster.space().await;
        (space.granted == 0 && space.resting == 0).then_some(space)
    })
    .await
}

/// Without the outcomes that a shard remembers per request, a grant whose reply was lost is given twice; without those per (grant, slot), a
/// commit that is sent again is refused; without the claim's memory, an Arm that is sent again gets another key.
#[tokio::test]
async fn whatever_was_answered_and_lost_is_answered_the_same_when_it_is_asked_again() {
    let (cluster, relays) = relayed().await;
    let blocks = create_namespace(&cluster.client().await, 2, None).await;
    let mut raw = RawWriter::connect(&relays.cluster_file()).await;
    let meta = raw.metas()[0].clone();
    let asked = v1::GrantRequest {
        shard: SHARD,
        request: Some(raw.request().await),
        writer: calls::id_bytes(raw.id.0),
        namespace: blocks.info().id.0,
        slot_size: 4096,
        slots: 4,
        ttl_ms: 20_000,
        avoid: Vec::new(),
        seen: None,
    };
    let (lost, first) = lose(&relays, "Grant", 2);
    let reply = until_answered(async || calls::done(calls::control(&meta).await?.grant(asked.clone())).await).await;
    assert!(lost.load(Ordering::SeqCst) >= 3);
    let kept = first.lock().unwrap().take().unwrap();
    let kept = <v1::GrantReply as prost::Message>::decode(kept).unwrap();
    let decode =
        |bytes: &[u8]| quarry_wire::signed::Signed::<quarry_wire::grant::Grant>::decode(bytes).unwrap().statement;
    let (grant, before) = (decode(&reply.grant), decode(&kept.grant));
    assert_eq!((grant.id, &grant.holders), (before.id, &before.holders), "one request, one grant");
    let granted = quarry_tests::raw::Granted { grant, bytes: reply.grant };

    let mut armed = std::collections::BTreeMap::new();
    for holder in &granted.grant.holders {
        let node = holder.region.node;
        let (lost, first) = lose(&relays, "Arm", 2);
        let reply = until_answered(async || raw.arm(node, &granted).await).await;
        assert!(lost.load(Ordering::SeqCst) >= 3);
        let kept = first.lock().unwrap().take().unwrap();
        let kept = <v1::ArmReply as prost::Message>::decode(kept).unwrap();
        assert_eq!((reply.key, reply.base), (kept.write_key, kept.base), "one claim, one key");
        armed.insert(node, reply);
    }
    let holders: Vec<NodeId> = armed.keys().copied().collect();
    let mut committed = 0;
    // The last one between the data node that coordinates and the leader.
    for (slot, method) in ["Commit", "Confirm", "Publish"].into_iter().enumerate() {
        let slot = u32::try_from(slot).unwrap();
        let frame = raw.frame(&granted, slot, &format!("lost-{method}"), &pattern(slot.into(), BYTES));
        raw.write_frame(&granted, &armed, &frame).await;
        let (lost, _) = lose(&relays, method, 2);
        let entries = vec![frame.entry.clone()];
        // The entry, not only the call: a coordinator that was not heard says that it does not know.
        let outcome = soon("the commit has an outcome", async || {
            match raw.commit(holders[0], &granted, holders.clone(), entries.clone()).await {
                Ok(outcomes) => Some(outcomes[0].clone()),
                Err(_) => None,
            }
        })
        .await;
        assert!(lost.load(Ordering::SeqCst) >= 1, "a reply of {method} was lost");
        relays.be_honest();
        // A holder that is not heard is left out: then the write has failed for good, which is an outcome like another.
        let expected = if method == "Confirm" { outcome.code() } else { Code::Committed };
        assert!(matches!(expected, Code::Committed | Code::NotEnoughHolders), "{method}: {outcome:?}");
        assert_eq!(outcome.code(), expected, "{method}: {outcome:?}");
        let again = raw.commit(holders[1], &granted, holders.clone(), entries).await.unwrap();
        assert_eq!(again[0].code(), expected, "{method}, through the other holder: {again:?}");
        let value = blocks.get(format!("lost-{method}")).await.unwrap();
        assert_eq!(value.is_some(), expected == Code::Committed, "{method}");
        committed += u64::from(value.is_some());
        if let Some(value) = value {
            assert!(value.version == frame.version && value.bytes == pattern(slot.into(), BYTES));
        }
    }
    let (lost, _) = lose(&relays, "Seal", 2);
    let seal = v1::SealRequest { grant: Some(granted.grant.id.into()), fill: 3, writer: calls::id_bytes(raw.id.0) };
    until_answered(async || calls::done(calls::control(&meta).await?.seal(seal.clone())).await).await;
    assert!(lost.load(Ordering::SeqCst) >= 3);
    for holder in holders {
        raw.close(holder, &granted).await.unwrap();
    }
    // These slots at two nodes, and nothing of a second grant.
    assert_eq!(settled(&cluster).await.committed, 2 * committed * 4096);
}

/// The same through the client, which decides by itself when to ask again: every put succeeds, under its first version, and no memory is lost.
#[tokio::test]
async fn puts_whose_replies_are_lost_succeed_once_each_and_no_memory_is_lost() {
    let (cluster, relays) = relayed().await;
    let direct = cluster.client().await;
    let blocks = create_namespace(&direct, 2, None).await;
    let before = settled(&cluster).await;
    let client = client(&relays, Duration::from_secs(30)).await;
    let theirs = client.namespace(&blocks.info().name).await.unwrap();
    let mut number = 0;
    for round in 0..rounds(2) {
        for method in ["Grant", "Arm", "Commit", "Confirm", "Publish", "Resolve"] {
            let (lost, _) = lose(&relays, method, 2);
            let keys: Vec<Key> = (0..8).map(|it| Key::new(format!("{method}-{round}-{it}")).unwrap()).collect();
            let items = keys.iter().map(|key| PutItem::create(key.clone(), pattern(number, BYTES))).collect();
            let versions: Vec<_> = theirs
                .put_many(items)
                .await
                .into_iter()
                .map(|it| it.unwrap_or_else(|wrong| panic!("{method}: {wrong}")))
                .collect();
            for (key, version) in keys.iter().zip(versions) {
                let value = theirs.fresh().get(key).await.unwrap().unwrap_or_else(|| panic!("{key:?} is lost"));
                assert!(value.version == version && value.bytes == pattern(number, BYTES), "{method}: {key:?}");
            }
            eprintln!("{method}: {} replies, of which the first two were lost", lost.load(Ordering::SeqCst));
            number += 1;
        }
    }
    // A slab that is in use when its client closes.
    let (lost, _) = lose(&relays, "Seal", 2);
    theirs.put("last", pattern(0, BYTES)).await.unwrap();
    client.close().await.unwrap();
    assert!(lost.load(Ordering::SeqCst) >= 1, "a client that closes seals what it has");
    relays.be_honest();
    let mut after = settled(&cluster).await;
    assert_eq!(after.free + after.committed, before.free + before.committed, "memory is lost: {before:?}, {after:?}");
    // A slot is not much larger than its frame: what is committed is one slot per put and copy.
    assert!(after.committed <= 2 * (number * 8 + 1) * 2 * BYTES as u64, "more is committed than was put: {after:?}");
    let keys: Vec<Key> = blocks.list("", None, 4096).await.unwrap().entries.into_iter().map(|it| it.key).collect();
    assert_eq!(keys.len() as u64, number * 8 + 1);
    for result in blocks.delete_many(&keys).await {
        assert!(result.unwrap().is_some());
    }
    after = settled(&cluster).await;
    assert_eq!((after.committed, after.free), (0, before.free + before.committed), "all of it comes back");
}

/// Panics of the client's own code, in tasks that nobody waits for.
fn watch_panics() -> Arc<Mutex<Vec<String>>> {
    let seen = Arc::<Mutex<Vec<String>>>::default();
    let (kept, usual) = (Arc::clone(&seen), panic::take_hook());
    panic::set_hook(Box::new(move |info| {
        if info.location().is_some_and(|at| !at.file().contains("tests/")) {
            kept.lock().unwrap().push(info.to_string());
        }
        usual(info);
    }));
    seen
}

/// Changes the first reply to `method` by a mutant of it that `seed` draws; says what was done.
fn change(relays: &Relays, method: &'static str, seed: &Arc<Mutex<Seed>>) -> Arc<Mutex<Option<String>>> {
    let done = Arc::<Mutex<Option<String>>>::default();
    let (note, seed) = (Arc::clone(&done), Arc::clone(seed));
    relays.judge(move |it, reply| {
        let mut note = note.lock().unwrap();
        if it != method || note.is_some() || reply.is_empty() {
            return Fate::Passed;
        }
        let mutant = mutants(reply, 1, &mut seed.lock().unwrap()).remove(0);
        *note = Some(mutant.what);
        Fate::Changed(mutant.bytes)
    });
    done
}

async fn check_put(blocks: &Namespace, theirs: &Namespace, number: u64, what: &str) {
    let key = format!("put-{number}");
    let put = theirs.put(&key, pattern(number, BYTES)).await;
    // What it says may be wrong, since replies are not signed; what is there is this value, or nothing.
    match blocks.fresh().get(&key).await {
        Ok(Some(value)) => assert!(value.bytes == pattern(number, BYTES), "{what}: another value was written"),
        Ok(None) => assert!(put.is_err(), "{what}: acknowledged and lost"),
        // Where a slab lies is not signed. Who is told a wrong place writes there, if at all, into slots of the same grant.
        Err(GetError::Corrupt { .. }) if what.starts_with("Arm") => {}
        Err(other) => panic!("{what}: {other}"),
    }
}

/// Mutants of replies, one at a time: the client asks again, or says with a type what is wrong, or is right. Without the check of signatures
/// and CRCs in the client (`read/check.rs`, `read/proof.rs`) a changed Resolve shows another value.
#[tokio::test]
async fn a_client_believes_no_mutant_of_a_reply_that_would_show_it_a_wrong_value() {
    let panics = watch_panics();
    let (cluster, relays) = relayed().await;
    let blocks = create_namespace(&cluster.client().await, 2, None).await;
    for name in ["one", "two"] {
        blocks.put(name, name.repeat(700)).await.unwrap();
    }
    let seed = Arc::new(Mutex::new(Seed::draw()));
    let brief = Duration::from_secs(4);
    let mut number = 0;
    for (method, times) in
        [("Resolve", 150), ("Grant", 20), ("Arm", 12), ("Commit", 50), ("Confirm", 30), ("Publish", 30)]
    {
        let (mut right, mut wrong, mut changed) = (0, 0, 0);
        let mut theirs = client(&relays, brief).await.namespace(&blocks.info().name).await.unwrap();
        for time in 0..rounds(times) {
            if time % 10 == 0 || matches!(method, "Grant" | "Arm") {
                // A new one, that has no slab, knows no record and has believed nothing.
                relays.be_honest();
                theirs = client(&relays, brief).await.namespace(&blocks.info().name).await.unwrap();
            }
            let done = change(&relays, method, &seed);
            let what = || format!("{method}, {:?}", done.lock().unwrap());
            if method == "Resolve" {
                let name = ["one", "two"][time % 2];
                match theirs.fresh().get(name).await {
                    Ok(Some(value)) => {
                        assert!(value.bytes == name.repeat(700), "{}: another value was shown", what());
                        right += 1;
                    }
                    // A miss cannot be signed.
                    Ok(None) | Err(_) => wrong += 1,
                }
            } else {
                check_put(&blocks, &theirs, number, &what()).await;
                number += 1;
            }
            changed += usize::from(done.lock().unwrap().is_some());
            relays.be_honest();
            if time % 10 == 9 {
                let value = theirs.fresh().get("one").await.unwrap().unwrap();
                assert!(value.bytes == "one".repeat(700), "{} spoiled the client", what());
            }
        }
        assert!(changed > 0, "no reply of {method} was changed");
        eprintln!("{method}: {changed} replies changed; gets {right} right, {wrong} refused or missed");
    }
    assert!(panics.lock().unwrap().is_empty(), "{panics:?}");
}

/// What a client learns when it connects, changed: region records are signed, so a wrong one is not used (*Nothing unsigned*).
#[tokio::test]
async fn a_client_that_is_told_a_mutant_of_the_directory_reads_right_or_not_at_all() {
    let panics = watch_panics();
    let (cluster, relays) = relayed().await;
    let blocks = create_namespace(&cluster.client().await, 2, None).await;
    blocks.put("one", "one".repeat(700)).await.unwrap();
    let seed = Arc::new(Mutex::new(Seed::draw()));
    let (mut right, mut wrong) = (0, 0);
    for _ in 0..rounds(80) {
        let done = change(&relays, "Describe", &seed);
        let file = Cluster::from_file(relays.cluster_file()).unwrap();
        let options = Options { timeout: Duration::from_secs(2), ..Options::default() };
        let found = async {
            let client = Client::connect(file, options).await.ok()?;
            client.namespace(&blocks.info().name).await.ok()?.get("one").await.ok()?
        };
        match found.await {
            Some(value) => {
                assert!(value.bytes == "one".repeat(700), "{:?}: another value was shown", done.lock().unwrap());
                right += 1;
            }
            None => wrong += 1,
        }
        assert!(done.lock().unwrap().is_some(), "a client asks what there is");
    }
    eprintln!("{right} read right, {wrong} did not read");
    relays.be_honest();
    let client = client(&relays, Duration::from_secs(10)).await;
    assert!(client.namespace(&blocks.info().name).await.unwrap().get("one").await.unwrap().is_some());
    assert!(panics.lock().unwrap().is_empty(), "{panics:?}");
}
