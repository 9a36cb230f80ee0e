//! Dropped futures and clones: a put that nobody waits for takes effect whole or not at all, and nothing stays behind.

use quarry_client::Options;
use quarry_tests::{Seed, seed::pattern, shared, soon};
use std::time::Duration;
use tokio::time::timeout;

#[tokio::test]
async fn a_dropped_put_leaves_its_key_absent_or_whole() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let mut seed = Seed::draw();
    blocks.put("warm", "up").await.unwrap();
    let (mut dropped, mut present) = (0, 0);
    for round in 0..60_u64 {
        let key = format!("key-{round}");
        let bytes = pattern(round, 256 << 10);
        let after = Duration::from_micros(seed.below(8_000) as u64);
        let finished = timeout(after, blocks.put(&key, bytes.clone())).await;
        dropped += u32::from(finished.is_err());
        let value = blocks.fresh().get(&key).await.unwrap();
        if let Some(value) = value {
            present += 1;
            assert!(value.bytes == bytes, "{key} is there, but not whole");
        } else {
            assert!(finished.is_err(), "{key} was acknowledged and is not there");
        }
        // The key is not stuck: whoever comes next creates it, or finds the whole value.
        match blocks.put(&key, bytes.clone()).await {
            Ok(_) | Err(quarry_client::PutError::Exists { .. }) => {}
            Err(other) => panic!("{other}"),
        }
        assert!(blocks.fresh().get(&key).await.unwrap().unwrap().bytes == bytes);
    }
    assert!(dropped > 0, "no put was dropped in flight: {present} present");
}

#[tokio::test]
async fn a_dropped_get_hurts_nobody() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let mut seed = Seed::draw();
    let bytes = seed.bytes(4 << 20);
    blocks.put("key", bytes.clone()).await.unwrap();
    for _ in 0..50 {
        let _ = timeout(Duration::from_micros(seed.below(3_000) as u64), blocks.get("key")).await;
    }
    assert!(blocks.get("key").await.unwrap().unwrap().bytes == bytes);
}

#[tokio::test]
async fn a_clone_works_on_when_the_original_is_dropped() {
    let cluster = shared().await;
    let (client, blocks) = cluster.namespace().await;
    let clone = blocks.clone();
    drop(blocks);
    drop(client);
    clone.put("key", "value").await.unwrap();
    assert_eq!(&clone.get("key").await.unwrap().unwrap().bytes[..], b"value");
}

#[tokio::test]
async fn idle_slabs_are_sealed_and_those_of_dropped_clients_come_back() {
    let cluster = quarry_tests::TestCluster::start().await;
    let before = cluster.space().await;
    assert_eq!((before.granted, before.committed, before.resting), (0, 0, 0), "{before:?}");
    let options = Options { grant_ttl: Duration::from_secs(3), ..Options::default() };
    let client = cluster.client_with(options).await;
    let blocks = quarry_tests::cluster::create_namespace(&client, 2, None).await;
    blocks.put("kept", pattern(1, 10_000)).await.unwrap();
    blocks.put("deleted", pattern(2, 10_000)).await.unwrap();
    assert!(cluster.space().await.granted > 0);
    drop((client, blocks));
    let after = soon("the slabs of a dropped client come back", async || {
        let now = cluster.space().await;
        (now.granted == 0 && now.resting == 0).then_some(now)
    })
    .await;
    assert_eq!(after.free + after.committed, before.free, "{after:?}");
    assert!((40_000..60_000).contains(&after.committed), "two values on two nodes: {after:?}");
    let client = cluster.client().await;
    let name = client.list_namespaces().await.unwrap()[0].name.clone();
    let blocks = client.namespace(&name).await.unwrap();
    blocks.delete("deleted").await.unwrap();
    soon("the memory of a deleted value comes back", async || {
        let now = cluster.space().await;
        (now.committed == after.committed / 2
            && now.granted == 0
            && now.resting == 0
            && now.free + now.committed == before.free)
            .then_some(())
    })
    .await;
    assert!(blocks.get("kept").await.unwrap().unwrap().bytes == pattern(1, 10_000));
}
