//! What one client can use up: calls, connections, bytes. The same door stands before meta nodes.

use crate::support::{
    Double, Mood, SLOT, arm, client, commit, frame, grant, node, node_with, refusal, sign, soon, status, until,
};
use bytes::Bytes;
use quarry_proto::{
    refusal::Refusal,
    v1::{self, commit_outcome::Code},
};
use quarry_trust::Limits;
use quarry_wire::limits::MESSAGE_BYTES_MAX;
use tokio::time::Instant;

fn too_many(refusal: Refusal) -> (String, u64, u64) {
    match refusal {
        Refusal::TooManyRequests(it) if it.retry_after_ms > 0 => (it.resource, it.limit, it.found),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_client_with_as_many_calls_as_it_may_have_is_refused_more_and_administrators_are_not() {
    let double = Double::start().await;
    let few = Limits { calls_per_client_max: 1, ..Limits::default() };
    let a = node_with(&double, 10, |config| config.limits = few).await.unwrap();
    let grant = grant(&double, &[a.id], 1, 7, 0, 8);
    let signed = sign(&double, &grant);
    let armed = arm(&a, &signed, 7).await.unwrap();
    let one = frame(&grant, 0, "one");
    crate::support::Peer::new().put(&armed, &one).await.unwrap();
    // The shard does not answer: the commit waits.
    double.state.lock().mood = Mood::Silent;
    {
        let (frames, deadline) = ([&one], soon());
        let refused = loop {
            assert!(Instant::now() < deadline, "it is let in beside another");
            let commits = commit(&a, &grant, &frames);
            tokio::pin!(commits);
            tokio::select! {
                // It came while there was one to arm.
                answer = &mut commits => {
                    too_many(answer.unwrap_err());
                    until("the place is free", async || arm(&a, &signed, 7).await.is_ok()).await;
                }
                refused = async {
                    loop {
                        assert!(Instant::now() < deadline, "it is let in beside another");
                        // It may arrive before the commit does.
                        if let Err(refused) = arm(&a, &signed, 7).await {
                            return refused;
                        }
                        tokio::task::yield_now().await;
                    }
                } => {
                    // While the commit is still under way.
                    assert!(futures::poll!(&mut commits).is_pending());
                    assert_eq!(status(&a).await.claims_open, 1);
                    break refused;
                }
            }
        };
        assert_eq!(too_many(refused), ("calls of one client in flight".to_owned(), 1, 2));
        double.state.lock().mood = Mood::Judges;
    }
    // Its caller went away: the place is free, and what was written can still be committed.
    until("the place is free", async || arm(&a, &signed, 7).await.is_ok()).await;
    assert_eq!(commit(&a, &grant, &[&one]).await.unwrap(), [Code::Committed]);
}

#[tokio::test]
async fn a_connection_too_many_is_told_so_and_served_once_another_has_gone() {
    let double = Double::start().await;
    let few = Limits { connections_max: 2, connections_per_client_max: 2, ..Limits::default() };
    let a = node_with(&double, 10, |config| config.limits = few).await.unwrap();
    let second = client(a.node.address()).await;
    let mut third = client(a.node.address()).await;
    let ask = v1::RegionRecordRequest { region: 0 };
    second.clone().region_record(ask).await.unwrap();
    let refused = refusal(&third.region_record(ask).await.unwrap_err());
    assert_eq!(too_many(refused), ("connections of one client".to_owned(), 2, 3));
    drop(second);
    // By the same client, which connects anew when its connection was closed.
    until("it is served", async || third.region_record(ask).await.is_ok()).await;
    assert!(status(&a).await.regions.len() == 1, "those who were in stay in");
}

#[tokio::test]
async fn a_message_that_is_too_long_is_refused_with_both_lengths_and_the_connection_goes_on() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    for _ in 0..2 {
        let request = v1::ArmRequest { grant: vec![7; MESSAGE_BYTES_MAX].into(), writer: Bytes::from_static(&[1; 16]) };
        let refused = refusal(&a.client.clone().arm(request).await.unwrap_err());
        let Refusal::TooLarge(it) = refused else { panic!("{refused:?}") };
        assert_eq!(it.limit, MESSAGE_BYTES_MAX as u64);
        assert!((it.limit + 1..it.limit + u64::from(SLOT)).contains(&it.found), "{it:?}");
    }
    assert!(status(&a).await.regions.len() == 1);
}
