//! Writers that die: their keys are free at once, their space comes back.

use quarry_tests::{Signal, TestCluster, cluster::create_namespace, seed::pattern, soon, victim::Victim};
use std::time::Duration;

const BYTES: usize = 100_000;

#[tokio::test]
async fn the_key_of_a_writer_killed_before_its_commit_is_free_at_once_and_its_space_comes_back() {
    let cluster = TestCluster::start().await;
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 2, None).await;
    let before = cluster.space().await;
    assert_eq!((before.granted, before.committed, before.resting), (0, 0, 0), "{before:?}");
    let mut victim = Victim::start(env!("CARGO_BIN_EXE_raw-writer"), &cluster.cluster_file()).await;
    victim.arm(blocks.info().id, 256 << 10, 4, Duration::from_secs(3)).await;
    victim.write_value("key", 1, BYTES).await;
    let held = cluster.space().await;
    assert_eq!(held.granted, 2 * 4 * (256 << 10), "a slab on each of two nodes: {held:?}");
    victim.signal(Signal::KILL);
    victim.kill().await;
    // The dead writer's slab is still granted, and nobody waits for it.
    assert!(blocks.get("key").await.unwrap().is_none());
    let version = blocks.put("key", pattern(2, BYTES)).await.unwrap();
    let value = blocks.get("key").await.unwrap().unwrap();
    assert!(value.version == version && value.bytes == pattern(2, BYTES));
    client.close().await.unwrap();
    let after = soon("the dead writer's slab and the quarantine end", async || {
        let now = cluster.space().await;
        (now.granted == 0 && now.resting == 0).then_some(now)
    })
    .await;
    assert_eq!(after.free + after.committed, before.free, "nothing leaks: {before:?} {after:?}");
    assert!(
        after.committed >= 2 * BYTES as u64 && after.committed < 3 * BYTES as u64,
        "one value on two nodes: {after:?}"
    );
}
