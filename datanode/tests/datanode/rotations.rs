//! New read keys within a life (*Epochs only grow*).

use crate::support::{
    Double, PATIENCE, Peer, Running1, arm, commit, frame, grant, node, node_with, refusal, rotate, sign, soon, until,
};
use quarry_datanode::DataNode;
use quarry_proto::{refusal::Refusal, v1, v1::commit_outcome::Code};
use quarry_wire::{ids::RegionEpoch, region::RegionRecord};
use std::time::Duration;

async fn shown(node: &Running1) -> v1::RegionRecordReply {
    node.client.clone().region_record(v1::RegionRecordRequest { region: 0 }).await.unwrap().into_inner()
}

/// The old record opens nothing, not at its own address and not where the region is read now.
async fn is_dead(old: &RegionRecord, now: &RegionRecord) {
    for address in [&old.address, &now.address] {
        let read = Peer::new().read(address.as_bytes(), old.read_key, old.base, 64).await;
        assert!(read.is_err(), "a key of epoch {} reads in epoch {}", old.epoch, now.epoch);
    }
}

#[tokio::test]
async fn once_a_rotation_is_answered_no_earlier_key_reads_and_everything_else_goes_on() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let given = grant(&double, &[a.id], 1, 7, 0, 8);
    let armed = arm(&a, &sign(&double, &given), 7).await.unwrap();
    let (peer, first) = (Peer::new(), frame(&given, 0, "before"));
    peer.put(&armed, &first).await.unwrap();
    let mut old = vec![double.record(a.id)];
    for round in 2..6 {
        let answered = rotate(&a, PATIENCE).await.unwrap();
        let now = double.record(a.id);
        assert_eq!((answered.len(), answered[0].epoch, now.epoch), (1, round, RegionEpoch(round)));
        assert_eq!(now.incarnation, old[0].incarnation, "its contents are the same");
        for old in &old {
            is_dead(old, &now).await;
        }
        assert!(Peer::new().get(&now, &given, 0, first.bytes().len()).await == first.bytes());
        let reply = shown(&a).await;
        assert!(reply.record == double.state.lock().records[&now.region].encode(), "it shows what the directory has");
        old.push(now);
    }
    // The lane is another endpoint: the writer noticed nothing.
    let second = frame(&given, 1, "after");
    peer.put(&armed, &second).await.unwrap();
    assert_eq!(commit(&a, &given, &[&first, &second]).await.unwrap(), [Code::Committed; 2]);
}

#[tokio::test]
async fn while_the_directory_is_away_the_old_key_is_dead_and_the_node_goes_on_trying() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let old = double.record(a.id);
    double.state.lock().takes_no_records = true;
    let answer = rotate(&a, Duration::from_millis(300)).await;
    assert!(matches!(answer, Err(Refusal::Indeterminate(_))), "{answer:?}");
    assert_eq!(double.record(a.id), old, "nothing newer was acknowledged");
    is_dead(&old, &old).await;
    let reply = shown(&a).await;
    assert!(reply.incarnation.is_some() && reply.record.is_empty(), "{reply:?}");

    double.state.lock().takes_no_records = false;
    until("the new record is taken", async || double.record(a.id).epoch > old.epoch).await;
    let now = double.record(a.id);
    Peer::new().read(now.address.as_bytes(), now.read_key, now.base, 64).await.unwrap();
    is_dead(&old, &now).await;
    // Asked again, it is another one.
    assert!(rotate(&a, PATIENCE).await.unwrap()[0].epoch > now.epoch.0);
}

#[tokio::test]
async fn a_rotation_cut_short_by_a_crash_is_a_new_life() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let old = double.record(a.id);
    double.state.lock().takes_no_records = true;
    rotate(&a, Duration::from_millis(100)).await.unwrap_err();
    let folder = a.folder;
    drop(a.node);
    double.state.lock().takes_no_records = false;
    let node = DataNode::start(crate::support::config(&double, a.id, folder.path())).await.unwrap();
    node.ready(soon()).await.unwrap();
    let now = double.record(a.id);
    assert!(now.incarnation > old.incarnation && now.epoch == RegionEpoch(1), "{now:?}");
    is_dead(&old, &now).await;
}

#[tokio::test]
async fn a_region_declared_over_in_the_middle_of_a_rotation_answers_it_with_its_next_life() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let old = double.record(a.id);
    double.state.lock().takes_no_records = true;
    let (answer, ()) = tokio::join!(rotate(&a, PATIENCE), async {
        until("the old key is dead", async || shown(&a).await.record.is_empty()).await;
        let mut state = double.state.lock();
        state.void.push((old.region, old.incarnation));
        state.takes_no_records = false;
    });
    let now = double.record(a.id);
    let answer = answer.unwrap();
    assert_eq!(answer[0].incarnation.map(Into::into), Some(now.incarnation));
    is_dead(&old, &now).await;
}

#[tokio::test]
async fn keys_are_changed_by_the_clock_where_the_settings_say_so() {
    let double = Double::start().await;
    let every = Duration::from_secs(1);
    let a = node_with(&double, 10, |config| config.rotate_every = Some(every)).await.unwrap();
    let old = double.record(a.id);
    until("the key was changed", async || double.record(a.id).epoch > old.epoch).await;
    is_dead(&old, &double.record(a.id)).await;
}

#[tokio::test]
async fn regions_that_are_not_there_and_reasons_too_long_are_refused() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    for request in [
        v1::RotateRegionRequest { region: Some(1), why: String::new() },
        v1::RotateRegionRequest { region: None, why: "x".repeat(257) },
    ] {
        let refused = a.client.clone().rotate_region(request).await.unwrap_err();
        assert!(matches!(refusal(&refused), Refusal::Malformed(_)));
    }
    let stranger = a.client.clone().region_record(v1::RegionRecordRequest { region: 1 }).await.unwrap().into_inner();
    assert_eq!(stranger, v1::RegionRecordReply::default());
}
