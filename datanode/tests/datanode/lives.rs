//! The lives of regions and of the node itself.

use crate::support::{
    Double, Peer, arm, client, commit, config, frame, grant, node, reason, refusal, sign, soon, status, until,
};
use quarry_datanode::{DataNode, DataNodeError};
use quarry_proto::{
    refusal::Refusal,
    v1::{arm_refused::Reason, commit_outcome::Code},
};
use quarry_wire::ids::{Generation, Incarnation, NodeId, RegionId, RegionIndex};

fn region(node: u64) -> RegionId {
    RegionId { node: NodeId(node), index: RegionIndex(0) }
}

#[tokio::test]
async fn a_region_declared_over_closes_its_endpoints_and_comes_back_as_the_next_incarnation() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let old = grant(&double, &[a.id], 1, 7, 0, 8);
    let armed = arm(&a, &sign(&double, &old), 7).await.unwrap();
    let peer = Peer::new();
    let written = frame(&old, 0, "old life");
    peer.put(&armed, &written).await.unwrap();
    let before = double.record(a.id);

    double.state.lock().void.push((region(10), before.incarnation));
    until("the region is back", async || double.record(a.id).incarnation > before.incarnation).await;
    a.node.ready(soon()).await.unwrap();
    let after = double.record(a.id);
    assert!(peer.put(&armed, &written).await.is_err(), "an old lane took a write");
    let read = peer.read(before.address.as_bytes(), before.read_key, before.base, 64).await;
    assert!(read.is_err(), "the old read key still reads at the old endpoint");
    let read = peer.read(after.address.as_bytes(), before.read_key, after.base, 64).await;
    assert!(read.is_err(), "the old read key reads at the new endpoint");
    assert_eq!(reason(arm(&a, &sign(&double, &old), 7).await), Reason::Incarnation);
    // The frame is still in memory, and nobody vouches for it any more.
    assert_eq!(commit(&a, &old, &[&written]).await.unwrap(), [Code::NotEnoughHolders]);

    let new = grant(&double, &[a.id], 2, 7, 0, 8);
    let armed = arm(&a, &sign(&double, &new), 7).await.unwrap();
    let written = frame(&new, 0, "new life");
    Peer::new().put(&armed, &written).await.unwrap();
    assert_eq!(commit(&a, &new, &[&written]).await.unwrap(), [Code::Committed]);
}

#[tokio::test]
async fn a_late_word_about_an_earlier_life_ends_nothing() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let before = double.record(a.id);
    let earlier = Incarnation::new(before.incarnation.0.generation, before.incarnation.0.number - 1);
    double.state.lock().void.push((region(10), earlier));
    let heard = double.state.lock().heartbeats[&a.id];
    until("three more heartbeats", async || double.state.lock().heartbeats[&a.id] >= heard + 3).await;
    assert_eq!(double.record(a.id), before);
    assert_eq!(status(&a).await.regions.len(), 1);
}

#[tokio::test]
async fn a_new_generation_voids_all_memory() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let old = grant(&double, &[a.id], 1, 7, 0, 8);
    let signed = sign(&double, &old);
    arm(&a, &signed, 7).await.unwrap();
    double.state.lock().generation = 2;
    until("the region is back", async || double.record(a.id).incarnation.0.generation == Generation(2)).await;
    a.node.ready(soon()).await.unwrap();
    assert_eq!(status(&a).await.lanes, 0);
    assert!(matches!(arm(&a, &signed, 7).await, Err(Refusal::Untrusted(_))), "a grant of the old generation");
    let new = grant(&double, &[a.id], 1, 7, 0, 8);
    arm(&a, &sign(&double, &new), 7).await.unwrap();
}

#[tokio::test]
async fn a_restarted_node_has_a_new_incarnation_and_honours_nothing_of_the_old_one() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let old = grant(&double, &[a.id], 1, 7, 0, 8);
    let signed = sign(&double, &old);
    let armed = arm(&a, &signed, 7).await.unwrap();
    let before = double.record(a.id);
    let folder = a.folder;
    drop(a.node);
    assert!(Peer::new().put(&armed, &frame(&old, 0, "gone")).await.is_err(), "a dropped node took a write");

    let node = DataNode::start(config(&double, NodeId(10), folder.path())).await.unwrap();
    node.ready(soon()).await.unwrap();
    assert!(double.record(NodeId(10)).incarnation > before.incarnation);
    let request = quarry_proto::v1::ArmRequest { grant: signed, writer: old.writer.0.to_vec().into() };
    let refused = client(node.address()).await.arm(request).await.unwrap_err();
    assert!(matches!(refusal(&refused), Refusal::ArmRefused(it) if it.reason() == Reason::Incarnation));
}

#[tokio::test]
async fn a_folder_serves_one_process_and_one_node() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let second = DataNode::start(config(&double, NodeId(10), a.folder.path())).await.err();
    assert!(matches!(second, Some(DataNodeError::Locked { .. })), "{second:?}");
    let folder = a.folder;
    a.node.shutdown().await;
    let other = DataNode::start(config(&double, NodeId(11), folder.path())).await.err();
    assert!(matches!(other, Some(DataNodeError::Foreign { found_node: NodeId(10), .. })), "{other:?}");
    DataNode::start(config(&double, NodeId(10), folder.path())).await.unwrap().shutdown().await;
}

#[tokio::test]
async fn a_node_without_a_directory_says_so_and_goes_on_trying() {
    let double = Double::start().await;
    let folder = tempfile::tempdir().unwrap();
    let mut alone = config(&double, NodeId(10), folder.path());
    // Nobody listens on the first; the second answers.
    alone.metas = vec!["127.0.0.1:1".to_owned()];
    let node = DataNode::start(alone.clone()).await.unwrap();
    let ready = node.ready(tokio::time::Instant::now() + std::time::Duration::from_millis(100)).await;
    assert!(matches!(ready, Err(DataNodeError::NotReady { ready: 0, regions: 1, .. })));
    node.shutdown().await;
    alone.metas.push(double.address.to_string());
    let node = DataNode::start(alone).await.unwrap();
    node.ready(soon()).await.unwrap();
    node.shutdown().await;
}

#[tokio::test]
async fn a_stopped_node_lets_nobody_write_or_read() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let grant = grant(&double, &[a.id], 1, 7, 0, 8);
    let armed = arm(&a, &sign(&double, &grant), 7).await.unwrap();
    let record = double.record(a.id);
    a.node.shutdown().await;
    assert!(Peer::new().put(&armed, &frame(&grant, 0, "late")).await.is_err());
    assert!(Peer::new().read(record.address.as_bytes(), record.read_key, record.base, 64).await.is_err());
}

#[tokio::test]
async fn a_node_that_was_forgotten_while_it_was_not_heard_is_not_ready_any_more() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    assert_eq!(a.node.probe().ready(), Ok(()));
    double.state.lock().forgets = true;
    until("it says so", async || a.node.probe().ready().is_err_and(|why| why.contains("was forgotten"))).await;
    // Where a backup of before is restored, it is known again.
    double.state.lock().forgets = false;
    until("it serves again", async || a.node.probe().ready().is_ok()).await;
}

#[tokio::test]
async fn the_health_service_says_serving_when_every_region_is_registered() {
    use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", a.node.address())).unwrap();
    let health = HealthClient::new(channel.connect().await.unwrap());
    until("it serves", async || {
        let request = HealthCheckRequest { service: "quarry.v1.DataNode".to_owned() };
        health.clone().check(request).await.unwrap().into_inner().status() == ServingStatus::Serving
    })
    .await;
    let counted = status(&a).await.counters;
    assert!(counted.iter().any(|it| it.method == "/grpc.health.v1.Health/Check" && it.calls > 0));
}
