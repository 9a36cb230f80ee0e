//! Meta nodes killed and restarted, all at once and one by one.

use crate::load::Load;
use quarry_client::NamespaceSpec;
use quarry_tests::{Signal, TestCluster, cluster::fresh_name, wait::PATIENCE};

#[tokio::test]
async fn everything_acknowledged_is_there_after_all_meta_nodes_were_killed_and_restarted() {
    let mut cluster = TestCluster::start().await;
    let (client, blocks) = cluster.namespace().await;
    let name = fresh_name("kept");
    client.create_namespace(NamespaceSpec::cache(&name)).await.unwrap();
    for _ in 0..2 {
        let load = Load::start(&blocks);
        load.more(100).await;
        // In the middle of the load.
        for meta in cluster.metas() {
            cluster.kill(meta, Signal::KILL).await.unwrap();
        }
        for meta in cluster.metas() {
            cluster.restart(meta).unwrap();
        }
        cluster.wait_ready(PATIENCE).await.unwrap();
        load.more(50).await;
        let written = load.stop().await;
        let other = cluster.client().await;
        written.check(&other, &blocks.info().name).await;
        assert!(other.list_namespaces().await.unwrap().iter().any(|it| it.name == name));
        // The same keys again in the next round would be `Exists`.
        let emptied = blocks.clone();
        written.remove_all(&emptied).await;
    }
    client.close().await.unwrap();
    cluster.agree().await;
}

#[tokio::test]
async fn a_rolling_restart_of_the_meta_nodes_under_load_fails_no_operation() {
    let mut cluster = TestCluster::start_with(|spec| spec.raft.shards = 4).await;
    let (client, blocks) = cluster.namespace().await;
    let load = Load::start(&blocks);
    load.more(50).await;
    for meta in cluster.metas() {
        cluster.kill(meta, Signal::TERM).await.unwrap();
        load.more(50).await;
        cluster.restart(meta).unwrap();
        cluster.wait_ready(PATIENCE).await.unwrap();
        load.more(50).await;
    }
    let written = load.stop().await;
    assert_eq!(written.failed(), 0);
    written.check(&cluster.client().await, &blocks.info().name).await;
    client.close().await.unwrap();
    cluster.agree().await;
}
