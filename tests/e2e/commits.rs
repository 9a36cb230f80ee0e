//! Commits by hand: once, twice, through the other holder, beyond the fill mark, after the end, forged.

use bytes::Bytes;
use quarry_client::Namespace;
use quarry_proto::{
    refusal::Refusal,
    v1::{self, commit_outcome::Code},
};
use quarry_tests::{
    calls::{self, Turned, id_bytes, refusal},
    raw::{Granted, RawWriter, Wish},
    seed::pattern,
    shared, soon,
};
use quarry_wire::ids::{NodeId, WriterId};
use std::time::Duration;

const ONE: NodeId = NodeId(101);
const OTHER: NodeId = NodeId(102);
const BOTH: [NodeId; 2] = [ONE, OTHER];

fn wish(blocks: &Namespace) -> Wish {
    Wish { namespace: blocks.info().id, slot_size: 4096, slots: 8, ttl: Duration::from_secs(20), avoid: Vec::new() }
}

async fn granted(raw: &RawWriter, blocks: &Namespace) -> Granted {
    raw.grant(&wish(blocks)).await.unwrap()
}

#[tokio::test]
async fn a_commit_sent_twice_and_through_the_other_holder_has_one_outcome() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let mut raw = cluster.raw().await;
    let grant = granted(&raw, &blocks).await;
    let armed = raw.arm_all(&grant).await;
    assert_eq!(armed.keys().copied().collect::<Vec<_>>(), BOTH);
    let frame = raw.frame(&grant, 0, "key", b"written by hand");
    raw.write_frame(&grant, &armed, &frame).await;
    for via in [ONE, ONE, OTHER, OTHER] {
        let outcomes = raw.commit(via, &grant, BOTH, vec![frame.entry.clone()]).await.unwrap();
        assert_eq!(outcomes.len(), 1);
        assert_eq!(outcomes[0].code(), Code::Committed, "through {via}: {:?}", outcomes[0]);
    }
    let value = blocks.get("key").await.unwrap().unwrap();
    assert_eq!((&value.bytes[..], value.version), (&b"written by hand"[..], frame.version));
    // Deleted meanwhile: the commit was applied once, and its repetition does not bring the value back.
    assert_eq!(blocks.delete("key").await.unwrap(), Some(frame.version));
    let outcomes = raw.commit(ONE, &grant, BOTH, vec![frame.entry.clone()]).await.unwrap();
    assert_eq!(outcomes[0].code(), Code::Committed);
    assert!(blocks.fresh().get("key").await.unwrap().is_none());
}

#[tokio::test]
async fn two_commits_of_one_batch_at_once_have_one_outcome() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let mut raw = cluster.raw().await;
    let grant = granted(&raw, &blocks).await;
    let armed = raw.arm_all(&grant).await;
    let mut entries = Vec::new();
    for slot in 0..8 {
        let frame = raw.frame(&grant, slot, &format!("key-{slot}"), &pattern(u64::from(slot), 1000));
        raw.write_frame(&grant, &armed, &frame).await;
        entries.push(frame.entry);
    }
    let (one, other) =
        tokio::join!(raw.commit(ONE, &grant, BOTH, entries.clone()), raw.commit(OTHER, &grant, BOTH, entries.clone()));
    for outcomes in [one.unwrap(), other.unwrap()] {
        assert!(outcomes.iter().all(|outcome| outcome.code() == Code::Committed), "{outcomes:?}");
    }
    for slot in 0..8_u32 {
        let value = blocks.get(format!("key-{slot}")).await.unwrap().unwrap();
        assert!(value.bytes == pattern(u64::from(slot), 1000));
    }
}

#[tokio::test]
async fn a_bad_entry_is_refused_alone() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let mut raw = cluster.raw().await;
    let grant = granted(&raw, &blocks).await;
    let armed = raw.arm_all(&grant).await;
    let mut entries = Vec::new();
    for slot in 0..5 {
        let frame = raw.frame(&grant, slot, &format!("key-{slot}"), b"payload");
        raw.write_frame(&grant, &armed, &frame).await;
        entries.push(frame.entry);
    }
    // Says something else than what lies in the slot; names a slot that there is not; names no key.
    entries[1].payload_crc ^= 1;
    entries[2].slot = 8;
    entries[3].key = Bytes::new();
    let outcomes = raw.commit(ONE, &grant, BOTH, entries).await.unwrap();
    let codes: Vec<Code> = outcomes.iter().map(v1::CommitOutcome::code).collect();
    assert_eq!(codes[0], Code::Committed, "{outcomes:?}");
    assert_eq!(codes[4], Code::Committed, "{outcomes:?}");
    for place in 1..4 {
        assert!(matches!(codes[place], Code::Malformed | Code::NotEnoughHolders), "{:?}", outcomes[place]);
        assert!(blocks.get(format!("key-{place}")).await.unwrap().is_none());
    }
    assert!(blocks.get("key-0").await.unwrap().is_some() && blocks.get("key-4").await.unwrap().is_some());
}

#[tokio::test]
async fn nothing_is_committed_that_was_not_written_or_not_armed() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let mut raw = cluster.raw().await;
    let grant = granted(&raw, &blocks).await;
    let frame = raw.frame(&grant, 0, "key", b"never written");
    // Not armed anywhere: no holder vouches for it.
    let unarmed = raw.commit(ONE, &grant, BOTH, vec![frame.entry.clone()]).await;
    match unarmed {
        Ok(outcomes) => assert_ne!(outcomes[0].code(), Code::Committed, "{outcomes:?}"),
        Err(Turned::Refused(Refusal::UnknownGrant(_))) => {}
        other => panic!("{other:?}"),
    }
    assert!(blocks.get("key").await.unwrap().is_none());
    // Armed, but the slot holds nothing.
    let grant = granted(&raw, &blocks).await;
    let armed = raw.arm_all(&grant).await;
    let frame = raw.frame(&grant, 0, "key", b"never written");
    let outcomes = raw.commit(ONE, &grant, BOTH, vec![frame.entry.clone()]).await.unwrap();
    assert_ne!(outcomes[0].code(), Code::Committed, "{outcomes:?}");
    assert!(blocks.get("key").await.unwrap().is_none());
    // Written at one holder only, and named as written at both: the one that has it vouches alone, which is too few.
    let frame = raw.frame(&grant, 1, "key", b"written once");
    raw.write(&armed[&ONE], 4096, &frame.bytes).await.unwrap();
    let outcomes = raw.commit(ONE, &grant, BOTH, vec![frame.entry.clone()]).await.unwrap();
    assert_eq!(outcomes[0].code(), Code::NotEnoughHolders, "{outcomes:?}");
    assert_eq!((outcomes[0].a, outcomes[0].b), (2, 1));
    assert!(blocks.get("key").await.unwrap().is_none());
}

#[tokio::test]
async fn nobody_commits_arms_seals_or_closes_under_the_grant_of_another() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let mut raw = cluster.raw().await;
    let grant = granted(&raw, &blocks).await;
    let armed = raw.arm_all(&grant).await;
    let frame = raw.frame(&grant, 0, "key", b"mine");
    raw.write_frame(&grant, &armed, &frame).await;
    let thief = cluster.raw().await;
    assert!(matches!(refusal(thief.arm(ONE, &grant).await), Refusal::ArmRefused(it)
        if it.reason() == v1::arm_refused::Reason::Writer));
    assert!(matches!(refusal(thief.commit(ONE, &grant, BOTH, vec![frame.entry.clone()]).await), Refusal::Untrusted(_)));
    assert!(matches!(refusal(thief.seal(&grant, 0).await), Refusal::Untrusted(_)));
    assert!(matches!(refusal(thief.close(ONE, &grant).await), Refusal::Untrusted(_)));
    // On one connection: hundreds of handshakes would outlast the grant.
    let node = calls::data_node(raw.address(ONE)).await.unwrap();
    let arm = async |grant: Bytes| {
        let request = v1::ArmRequest { grant, writer: id_bytes(raw.id.0) };
        calls::done(node.clone().arm(request)).await
    };
    // A grant changed to name another writer, holder or size does not carry the leader's signature any more.
    for at in 0..grant.bytes.len() {
        let mut forged = grant.bytes.to_vec();
        forged[at] ^= 1 << (at % 8);
        let answer = arm(forged.into()).await;
        assert!(
            matches!(&answer, Err(Turned::Refused(Refusal::Untrusted(_) | Refusal::Malformed(_)))),
            "byte {at}: {answer:?}"
        );
    }
    // Nor is one that was cut off, or that has more behind it.
    let longer = Bytes::from([&grant.bytes[..], &[0]].concat());
    for forged in (0..grant.bytes.len()).map(|end| grant.bytes.slice(..end)).chain([longer]) {
        let answer = arm(forged).await;
        assert!(matches!(&answer, Err(Turned::Refused(Refusal::Malformed(_)))), "{answer:?}");
    }
    let outcomes = raw.commit(ONE, &grant, BOTH, vec![frame.entry]).await.unwrap();
    assert_eq!(outcomes[0].code(), Code::Committed);
    raw.id = WriterId::marked([9; 8], raw.id.mark());
    assert!(matches!(refusal(raw.arm(ONE, &grant).await), Refusal::ArmRefused(_)));
}

#[tokio::test]
async fn a_commit_beyond_the_fill_mark_is_told_so_and_one_below_it_is_taken() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let mut raw = cluster.raw().await;
    let grant = granted(&raw, &blocks).await;
    let armed = raw.arm_all(&grant).await;
    let (below, beyond) = (raw.frame(&grant, 1, "below", b"1"), raw.frame(&grant, 2, "beyond", b"2"));
    raw.write_frame(&grant, &armed, &below).await;
    raw.write_frame(&grant, &armed, &beyond).await;
    raw.seal(&grant, 2).await.unwrap();
    let entries = vec![below.entry, beyond.entry];
    let outcomes = raw.commit(OTHER, &grant, BOTH, entries).await.unwrap();
    assert_eq!(outcomes[0].code(), Code::Committed, "{outcomes:?}");
    assert_eq!((outcomes[1].code(), outcomes[1].a), (Code::Sealed, 2), "{outcomes:?}");
    assert!(blocks.get("below").await.unwrap().is_some());
    assert!(blocks.get("beyond").await.unwrap().is_none());
}

#[tokio::test]
async fn a_commit_after_the_grants_end_is_refused_and_an_earlier_outcome_is_remembered() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let mut raw = cluster.raw().await;
    let wish = Wish { ttl: Duration::from_millis(1_500), ..wish(&blocks) };
    let grant = raw.grant(&wish).await.unwrap();
    let armed = raw.arm_all(&grant).await;
    let (early, late) = (raw.frame(&grant, 0, "early", b"1"), raw.frame(&grant, 1, "late", b"2"));
    raw.write_frame(&grant, &armed, &early).await;
    raw.write_frame(&grant, &armed, &late).await;
    let outcomes = raw.commit(ONE, &grant, BOTH, vec![early.entry.clone()]).await.unwrap();
    assert_eq!(outcomes[0].code(), Code::Committed, "{outcomes:?}");
    // The end is in log time: the next entry with a later stamp brings it.
    let raw = &raw;
    let leader_says = async |frame: &quarry_tests::raw::Framed| {
        raw.commit(ONE, &grant, BOTH, vec![frame.entry.clone()]).await.unwrap()[0].clone()
    };
    soon("the grant's writing time is over at the node", async || {
        raw.write(&armed[&ONE], 4096, &late.bytes).await.is_err().then_some(())
    })
    .await;
    let outcome = soon("the grant has ended", async || {
        let outcome = leader_says(&late).await;
        (outcome.code() != Code::Committed).then_some(outcome)
    })
    .await;
    assert_eq!(outcome.code(), Code::GrantExpired, "{outcome:?}");
    assert!(outcome.b >= outcome.a, "{outcome:?}");
    assert_eq!(leader_says(&early).await.code(), Code::Committed);
    assert!(blocks.get("late").await.unwrap().is_none());
}
