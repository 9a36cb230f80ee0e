//! A follower that was left behind the log.

use crate::load::Load;
use quarry_tests::{Member, Signal, TestCluster, cluster::SHARD, soon, wait::PATIENCE};

#[tokio::test]
async fn a_follower_behind_the_purged_log_installs_a_snapshot_and_comes_to_the_same_state() {
    let mut cluster =
        TestCluster::start_with(|spec| (spec.raft.snapshot_after_entries, spec.raft.entries_kept) = (40, 10)).await;
    let (client, blocks) = cluster.namespace().await;
    let load = Load::start(&blocks);
    load.more(50).await;
    let leader = cluster.leader(SHARD, PATIENCE).await.unwrap();
    let follower = cluster.metas().into_iter().find(|meta| *meta != leader).unwrap();
    cluster.kill(follower, Signal::KILL).await.unwrap();
    let last = group(&cluster, leader).await.last_log;
    load.more(200).await;
    // The leader has thrown away what the follower would need: only a snapshot can bring it back.
    let purged = soon("the log is purged beyond what the follower has", async || {
        let purged = group(&cluster, cluster.leader(SHARD, PATIENCE).await.ok()?).await.purged;
        (purged > last).then_some(purged)
    })
    .await;
    cluster.restart(follower).unwrap();
    soon("the follower has caught up", async || {
        let status = cluster.status(follower).await.ok()?;
        let own = status.groups.into_iter().find(|group| group.group == SHARD)?;
        (own.applied >= purged && own.snapshot >= last).then_some(())
    })
    .await;
    load.more(50).await;
    let written = load.stop().await;
    client.close().await.unwrap();
    cluster.agree().await;
    // It can lead from that state.
    hand_over(&cluster, follower).await;
    assert_eq!(cluster.leader(SHARD, PATIENCE).await.unwrap(), follower);
    written.check(&cluster.client().await, &blocks.info().name).await;
}

async fn group(cluster: &TestCluster, meta: Member) -> quarry_proto::v1::GroupStatus {
    let status = cluster.status(meta).await.unwrap();
    status.groups.into_iter().find(|group| group.group == SHARD).expect("every meta node hosts the shard")
}

/// Makes `to` the shard's leader.
async fn hand_over(cluster: &TestCluster, to: Member) {
    soon("the leadership is handed over", async || {
        let leader = cluster.leader(SHARD, PATIENCE).await.ok()?;
        if leader == to {
            return Some(());
        }
        let calls = quarry_tests::calls::connect(&cluster.address(leader)).await.ok()?;
        let mut admin = quarry_proto::v1::admin_client::AdminClient::new(calls);
        let asked = quarry_proto::v1::TransferLeaderRequest { group: SHARD, to: to.node().0 };
        let _ = admin.transfer_leader(asked).await;
        None
    })
    .await;
}
