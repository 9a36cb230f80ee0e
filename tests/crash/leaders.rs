//! Leaders killed under load.

use crate::load::Load;
use quarry_client::NamespaceSpec;
use quarry_tests::{
    Signal, TestCluster,
    cluster::{DIRECTORY, SHARD, fresh_name},
    wait::PATIENCE,
};

#[tokio::test]
async fn no_acknowledged_commit_is_lost_when_the_leader_is_killed_three_times_and_all_states_are_equal() {
    let mut cluster = TestCluster::start().await;
    let (client, blocks) = cluster.namespace().await;
    let load = Load::start(&blocks);
    load.more(50).await;
    let mut names = Vec::new();
    for round in 0..3 {
        // The shard's leader, and once the directory's.
        let group = if round == 1 { DIRECTORY } else { SHARD };
        let leader = cluster.leader(group, PATIENCE).await.unwrap();
        cluster.kill(leader, Signal::KILL).await.unwrap();
        load.more(50).await;
        let next = cluster.leader(group, PATIENCE).await.unwrap();
        assert_ne!(next, leader);
        let name = fresh_name("round");
        client.create_namespace(NamespaceSpec::cache(&name)).await.unwrap();
        names.push(name);
        cluster.restart(leader).unwrap();
        cluster.wait_ready(PATIENCE).await.unwrap();
        load.more(50).await;
    }
    let written = load.stop().await;
    assert!(written.count() >= 300);
    let other = cluster.client().await;
    written.check(&other, &blocks.info().name).await;
    let known = other.list_namespaces().await.unwrap();
    assert!(names.iter().all(|name| known.iter().any(|it| it.name == *name)));
    client.close().await.unwrap();
    cluster.agree().await;
}

#[tokio::test]
async fn a_leader_that_was_stopped_and_wakes_up_acknowledges_nothing_as_leader() {
    let mut cluster = TestCluster::start().await;
    let (client, blocks) = cluster.namespace().await;
    let load = Load::start(&blocks);
    load.more(30).await;
    let leader = cluster.leader(SHARD, PATIENCE).await.unwrap();
    cluster.pause(leader).await.unwrap();
    load.more(30).await;
    cluster.resume(leader).await.unwrap();
    load.more(30).await;
    let written = load.stop().await;
    cluster.wait_ready(PATIENCE).await.unwrap();
    written.check(&cluster.client().await, &blocks.info().name).await;
    client.close().await.unwrap();
    cluster.agree().await;
}
