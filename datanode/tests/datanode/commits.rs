//! Commit and Confirm: one outcome, whoever coordinates, whatever fails in between.

use crate::support::{
    Double, Frame, Mood, PATIENCE, Peer, Running1, arm, commit, commit_as, frame, grant, node, revoke, sign, until,
    writer,
};
use bytes::Bytes;
use futures::future::join_all;
use quarry_proto::{
    convert,
    refusal::Refusal,
    v1::{self, commit_outcome::Code},
};
use quarry_wire::{attestation::AttestationBatch, grant::Grant, ids::NodeId};
use std::time::Duration;
use tokio::time::Instant;

/// Arms a grant of eight slots on the holders, and writes `frames` on each.
async fn write(double: &Double, holders: &[&Running1], grant: &Grant, frames: &[&Frame]) {
    let (signed, peer) = (sign(double, grant), Peer::new());
    for holder in holders {
        let armed = arm(holder, &signed, grant.writer.0[0]).await.unwrap();
        for frame in frames {
            peer.put(&armed, frame).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_commit_sent_twice_and_through_the_other_holder_has_one_outcome() {
    let double = Double::start().await;
    let (a, b) = (node(&double, 10).await, node(&double, 11).await);
    let grant = Grant { least: 2, ..grant(&double, &[a.id, b.id], 1, 7, 0, 8) };
    let frame = frame(&grant, 3, "twice");
    write(&double, &[&a, &b], &grant, &[&frame]).await;
    for coordinator in [&a, &a, &b] {
        assert_eq!(commit(coordinator, &grant, &[&frame]).await.unwrap(), [Code::Committed]);
    }
    let state = double.state.lock();
    assert!(state.published.iter().all(|publish| publish.attested.len() == 2), "both holders confirmed, each time");
    assert_eq!(state.outcomes.len(), 1);
}

#[tokio::test]
async fn one_bad_entry_does_not_spoil_its_batch() {
    let double = Double::start().await;
    let (a, b) = (node(&double, 10).await, node(&double, 11).await);
    let grant = grant(&double, &[a.id, b.id], 1, 7, 0, 8);
    let frames = [frame(&grant, 0, "first"), frame(&grant, 1, "second")];
    write(&double, &[&a, &b], &grant, &[&frames[0], &frames[1]]).await;
    let mut entries: Vec<v1::CommitEntry> = vec![frames[0].entry(), frame(&grant, 2, "never written").entry()];
    let bad = |change: &dyn Fn(&mut v1::CommitEntry)| {
        let mut entry = frames[1].entry();
        change(&mut entry);
        entry
    };
    entries.push(bad(&|entry| entry.payload_crc ^= 1));
    entries.push(bad(&|entry| entry.clock += 1));
    entries.push(bad(&|entry| entry.key = Bytes::from_static(b"other")));
    entries.push(bad(&|entry| entry.payload_bytes -= 1));
    entries.push(bad(&|entry| entry.payload_bytes = u64::MAX));
    entries.push(bad(&|entry| entry.kind = v1::FrameKind::Page.into()));
    entries.push(bad(&|entry| entry.kind = 99));
    entries.push(bad(&|entry| entry.slot = 8));
    entries.push(bad(&|entry| entry.key = Bytes::new()));
    entries.push(frames[1].entry());
    let count = entries.len();
    let outcomes = commit_as(&a, &grant, 7, &[a.id, b.id], entries, PATIENCE).await.unwrap();
    let codes: Vec<Code> = outcomes.iter().map(v1::CommitOutcome::code).collect();
    let mut expected = vec![Code::Malformed; count];
    expected[0] = Code::Committed;
    expected[count - 1] = Code::Committed;
    assert_eq!(codes, expected);
    assert!(outcomes[1..count - 1].iter().all(|outcome| !outcome.detail.is_empty()), "each says why");
    assert_eq!(double.state.lock().published[0].attested.len(), 2);
}

#[tokio::test]
async fn entries_that_only_one_holder_has_are_published_with_its_word_alone() {
    let double = Double::start().await;
    let (a, b) = (node(&double, 10).await, node(&double, 11).await);
    let grant = grant(&double, &[a.id, b.id], 1, 7, 0, 8);
    let signed = sign(&double, &grant);
    let (on_a, on_b) = (arm(&a, &signed, 7).await.unwrap(), arm(&b, &signed, 7).await.unwrap());
    let (both, only_b) = (frame(&grant, 0, "both"), frame(&grant, 1, "only b"));
    let peer = Peer::new();
    peer.put(&on_a, &both).await.unwrap();
    peer.put(&on_b, &both).await.unwrap();
    peer.put(&on_b, &only_b).await.unwrap();
    assert_eq!(commit(&a, &grant, &[&both, &only_b]).await.unwrap(), [Code::Committed; 2]);
    let mut words: Vec<(u32, usize)> =
        double.state.lock().published.iter().map(|it| (it.entries[0].slot, it.attested.len())).collect();
    words.sort_unstable();
    assert_eq!(words, [(0, 2), (1, 1)]);
}

#[tokio::test]
async fn a_holder_that_is_gone_is_left_out() {
    let double = Double::start().await;
    let (a, b) = (node(&double, 10).await, node(&double, 11).await);
    let grant = grant(&double, &[a.id, b.id], 1, 7, 0, 8);
    let frame = frame(&grant, 0, "survivor");
    write(&double, &[&a, &b], &grant, &[&frame]).await;
    drop(b);
    assert_eq!(commit(&a, &grant, &[&frame]).await.unwrap(), [Code::Committed]);
    assert_eq!(double.state.lock().published[0].attested.len(), 1);
}

#[tokio::test]
async fn a_holder_whose_certificate_was_revoked_does_not_spoil_the_word_of_the_other() {
    let double = Double::start().await;
    let (a, b) = (node(&double, 10).await, node(&double, 11).await);
    let grant = grant(&double, &[a.id, b.id], 1, 7, 0, 8);
    let frame = frame(&grant, 0, "half trusted");
    write(&double, &[&a, &b], &grant, &[&frame]).await;
    revoke(&double, b.id);
    let heard = double.state.lock().heartbeats[&a.id];
    until("the revocation has arrived", async || double.state.lock().heartbeats[&a.id] >= heard + 2).await;
    assert_eq!(commit(&a, &grant, &[&frame]).await.unwrap(), [Code::Committed]);
    assert_eq!(double.state.lock().published[0].attested.len(), 1);
}

#[tokio::test]
async fn a_node_that_holds_nothing_of_a_grant_can_coordinate_its_commit() {
    let double = Double::start().await;
    let (a, b) = (node(&double, 10).await, node(&double, 11).await);
    let grant = grant(&double, &[a.id], 1, 7, 0, 8);
    let frame = frame(&grant, 0, "elsewhere");
    write(&double, &[&a], &grant, &[&frame]).await;
    assert_eq!(commit(&b, &grant, &[&frame]).await.unwrap(), [Code::Committed]);
}

#[tokio::test]
async fn a_commit_of_a_grant_that_no_holder_knows_gets_the_outcome_that_the_shard_recorded() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let grant = grant(&double, &[a.id], 1, 7, 0, 8);
    sign(&double, &grant);
    let frame = frame(&grant, 0, "forgotten here");
    let committed = v1::CommitOutcome { code: Code::Committed.into(), ..Default::default() };
    double.state.lock().outcomes.insert((grant.id, 0), committed);
    assert_eq!(commit(&a, &grant, &[&frame]).await.unwrap(), [Code::Committed]);
    let unknown = Grant { id: quarry_wire::ids::GrantId { sequence: Default::default(), ..grant.id }, ..grant };
    assert!(matches!(commit(&a, &unknown, &[&frame]).await, Err(Refusal::UnknownGrant(_))));
}

#[tokio::test]
async fn a_publish_whose_answers_are_lost_is_indeterminate_at_the_deadline_and_definite_when_asked_again() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let grant = grant(&double, &[a.id], 1, 7, 0, 8);
    let frame = frame(&grant, 0, "lost and found");
    write(&double, &[&a], &grant, &[&frame]).await;
    for mood in [Mood::Silent, Mood::Unsure] {
        double.state.lock().mood = mood.clone();
        let begun = Instant::now();
        let wait = Duration::from_millis(1500);
        let outcome = commit_as(&a, &grant, 7, &[a.id], vec![frame.entry()], wait).await;
        assert!(matches!(outcome, Err(Refusal::Indeterminate(_))), "{mood:?}: {outcome:?}");
        assert!(begun.elapsed() < wait, "{mood:?}: before the caller gave up");
    }
    let bytes: Vec<v1::PublishRequest> = double.state.lock().published.clone();
    assert!(bytes.windows(2).all(|two| two[0] == two[1]), "retries carry the same bytes");
    double.state.lock().mood = Mood::Judges;
    assert_eq!(commit(&a, &grant, &[&frame]).await.unwrap(), [Code::Committed]);
}

#[tokio::test]
async fn a_refusal_is_definite_unless_an_attempt_before_it_may_have_taken_effect() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let grant = grant(&double, &[a.id], 1, 7, 0, 8);
    let frames = [frame(&grant, 0, "never logged"), frame(&grant, 1, "logged")];
    write(&double, &[&a], &grant, &[&frames[0], &frames[1]]).await;
    let wait = Duration::from_secs(5);
    double.state.lock().mood = Mood::Refuses;
    let refused = commit_as(&a, &grant, 7, &[a.id], vec![frames[0].entry()], wait).await;
    assert!(matches!(refused, Err(Refusal::Untrusted(_))), "{refused:?}");
    double.state.lock().mood = Mood::UnsureOnce;
    let unknown = commit_as(&a, &grant, 7, &[a.id], vec![frames[1].entry()], wait).await;
    let Err(Refusal::Indeterminate(said)) = unknown else { panic!("{unknown:?}") };
    assert!(said.why.contains("revoked meanwhile"), "{said:?}");
    double.state.lock().mood = Mood::Judges;
    assert_eq!(commit(&a, &grant, &[&frames[1]]).await.unwrap(), [Code::Committed]);
}

#[tokio::test]
async fn a_publish_follows_the_hint_to_the_leader() {
    let (double, leader) = (Double::start().await, Double::start().await);
    let a = node(&double, 10).await;
    let grant = grant(&double, &[a.id], 1, 7, 0, 8);
    let frame = frame(&grant, 0, "moved");
    write(&double, &[&a], &grant, &[&frame]).await;
    {
        let mut state = leader.state.lock();
        state.grants.insert(grant.id, grant.clone());
        state.adopt(&double.state.lock());
    }
    double.state.lock().mood = Mood::Points(leader.address.to_string());
    assert_eq!(commit(&a, &grant, &[&frame]).await.unwrap(), [Code::Committed]);
    assert_eq!((double.state.lock().published.len(), leader.state.lock().published.len()), (0, 1));
}

#[tokio::test]
async fn a_batch_larger_than_one_command_is_published_in_parts_and_answered_in_order() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let mut grant = grant(&double, &[a.id], 1, 7, 0, 8);
    grant.slot_size.0 = 1024;
    grant.slots.0 = 200;
    let armed = arm(&a, &sign(&double, &grant), 7).await.unwrap();
    let peer = Peer::new();
    let mut entries = Vec::new();
    for slot in 0..200 {
        let mut frame = frame(&grant, slot, &format!("{slot:0>400}"));
        frame.payload.truncate(64);
        frame.header.payload_bytes = 64;
        frame.header.payload_crc = crc32c::crc32c(&frame.payload);
        let address = armed.base + u64::from(slot) * 1024;
        if slot % 50 != 49 {
            peer.write(&armed.lane_address, armed.write_key, address, &frame.bytes()).await.unwrap();
        }
        entries.push(frame.entry());
    }
    let outcomes = commit_as(&a, &grant, 7, &[a.id], entries, PATIENCE).await.unwrap();
    for (slot, outcome) in outcomes.iter().enumerate() {
        let expected = if slot % 50 == 49 { Code::Malformed } else { Code::Committed };
        assert_eq!(outcome.code(), expected, "slot {slot}: {}", outcome.detail);
    }
    let state = double.state.lock();
    assert!(state.published.len() >= 3, "{} parts", state.published.len());
    for part in &state.published {
        let bytes: usize = part.entries.iter().map(|entry| entry.key.len() + 72).sum();
        assert!(bytes <= 24 << 10);
    }
}

#[tokio::test]
async fn a_confirmation_is_signed_over_exactly_the_entries_that_are_there() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let grant = grant(&double, &[a.id], 1, 7, 0, 8);
    let frames = [frame(&grant, 0, "there"), frame(&grant, 1, "not there"), frame(&grant, 2, "there too")];
    write(&double, &[&a], &grant, &[&frames[0], &frames[2]]).await;
    let ask = |entries: Vec<v1::CommitEntry>| v1::ConfirmRequest {
        grant: Some(grant.id.into()),
        writer: Bytes::copy_from_slice(&writer(7).0),
        entries,
    };
    let all = frames.iter().map(Frame::entry).collect();
    let reply = a.client.clone().confirm(ask(all)).await.unwrap().into_inner();
    assert_eq!(reply.refused, [1]);
    let batch = double.keyring().verify(convert::signed::<AttestationBatch>(&reply.attested).unwrap()).unwrap();
    assert_eq!((batch.get().node, batch.get().leaves), (NodeId(10), 2));
    let good = a.client.clone().confirm(ask(vec![frames[0].entry(), frames[2].entry()])).await.unwrap().into_inner();
    assert_eq!((good.refused.is_empty(), good.attested), (true, reply.attested), "the same entries, the same root");
    let none = a.client.clone().confirm(ask(vec![frames[1].entry()])).await.unwrap().into_inner();
    assert_eq!((none.refused.len(), none.attested.is_empty()), (1, true));
}

#[tokio::test]
async fn empty_and_oversized_batches_are_refused() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let grant = grant(&double, &[a.id], 1, 7, 0, 8);
    let none = commit_as(&a, &grant, 7, &[a.id], vec![], PATIENCE).await;
    assert!(matches!(none, Err(Refusal::Malformed(_))));
    let many = vec![frame(&grant, 0, "k").entry(); 4097];
    assert!(matches!(commit_as(&a, &grant, 7, &[a.id], many, PATIENCE).await, Err(Refusal::TooLarge(_))));
    let nobody = commit_as(&a, &grant, 7, &[], vec![frame(&grant, 0, "k").entry()], PATIENCE).await;
    assert!(matches!(nobody, Err(Refusal::Malformed(it)) if it.field == "written"));
}

/// Commits that come together, through a shard that knows calls of several publishes and one that does not.
#[tokio::test]
async fn of_commits_that_come_together_each_has_its_own_outcome_whoever_they_travel_with() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    for knows_one_alone in [false, true] {
        double.state.lock().knows_one_alone = knows_one_alone;
        double.state.lock().calls.clear();
        let mut sent = Vec::new();
        let first = if knows_one_alone { 40 } else { 0 };
        for number in first..first + 15_u32 {
            let grant = grant(&double, &[a.id], u64::from(number) + 1, 7, 2 * (number - first), 2);
            let there = frame(&grant, 0, &format!("there {number}"));
            write(&double, &[&a], &grant, &[&there]).await;
            // Every third grant is one that the shard does not know, every fifth commit of a frame that nobody wrote.
            let frame = if number % 5 == 4 { frame(&grant, 1, "nowhere") } else { there };
            if number % 3 == 2 {
                double.state.lock().grants.remove(&grant.id);
            }
            sent.push((number, grant, frame));
        }
        let commits = sent.iter().map(async |(number, grant, frame)| (*number, commit(&a, grant, &[frame]).await));
        for (number, outcome) in join_all(commits).await {
            match (number % 5, number % 3) {
                (4, _) => assert_eq!(outcome.unwrap(), [Code::Malformed], "{number}"),
                (_, 2) => assert!(matches!(outcome, Err(Refusal::UnknownGrant(_))), "{number}: {outcome:?}"),
                _ => assert_eq!(outcome.unwrap(), [Code::Committed], "{number}"),
            }
        }
        let calls = double.state.lock().calls.clone();
        assert!(calls.iter().all(|calls| *calls == 1) || !knows_one_alone, "{calls:?}");
    }
}

#[tokio::test]
async fn commits_whose_shared_answer_is_lost_are_each_indeterminate_at_their_own_deadline() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let mut sent = Vec::new();
    for number in 0..6_u32 {
        let grant = grant(&double, &[a.id], u64::from(number) + 1, 7, 2 * number, 2);
        let frame = frame(&grant, 0, &format!("lost {number}"));
        write(&double, &[&a], &grant, &[&frame]).await;
        sent.push((Duration::from_millis(800 + 300 * u64::from(number % 3)), grant, frame));
    }
    for mood in [Mood::Silent, Mood::Unsure] {
        double.state.lock().mood = mood.clone();
        let commits = sent.iter().map(async |(wait, grant, frame)| {
            let begun = Instant::now();
            let outcome = commit_as(&a, grant, 7, &[a.id], vec![frame.entry()], *wait).await;
            (outcome, begun.elapsed() < *wait)
        });
        for (outcome, in_time) in join_all(commits).await {
            assert!(matches!(outcome, Err(Refusal::Indeterminate(_))), "{mood:?}: {outcome:?}");
            assert!(in_time, "{mood:?}: before the caller gave up");
        }
    }
    double.state.lock().mood = Mood::Judges;
    for (_, grant, frame) in &sent {
        assert_eq!(commit(&a, grant, &[frame]).await.unwrap(), [Code::Committed]);
    }
}
