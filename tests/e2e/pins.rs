//! Pins on a real cluster: what is pinned stays while everything around it is used again (*Leases hold*, *Nothing leaks*).

use quarry_client::{Key, PinError, PutError};
use quarry_tests::{
    Signal, TestCluster,
    cluster::{SHARD, create_namespace},
    seed::pattern,
    soon,
    wait::PATIENCE,
};
use quarry_wire::limits::extent_bytes;
use std::time::Duration;
use tokio::task::JoinSet;

/// One to an extent of the smallest region: a grant has one slot and is over once that is committed, so that what is deleted rests for its
/// quarantine and not until the grant's end.
const BYTES: usize = 50_000;
const REGION: u64 = 1 << 20;

/// All other memory of the region is used over again, under a leader that did not give the pin; then it is renewed, read and released.
#[tokio::test]
async fn a_pinned_value_outlives_its_key_and_its_leader_and_its_memory_comes_back_when_the_pin_ends() {
    let mut cluster = TestCluster::start_with(|spec| {
        spec.data_nodes = 1;
        spec.region_bytes = vec![REGION];
    })
    .await;
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 1, None).await;
    let (pinned, left) = (Key::new("{k}pinned").unwrap(), Key::new("{k}left").unwrap());
    for (seed, key) in [(1, &pinned), (2, &left)] {
        blocks.put(key, pattern(seed, BYTES)).await.unwrap();
    }
    let pin = blocks.pin(std::slice::from_ref(&pinned), 4 * PATIENCE).await.unwrap();
    // Of a client that is gone: nobody will release it.
    std::mem::forget(blocks.pin(std::slice::from_ref(&left), Duration::from_secs(2)).await.unwrap());
    let deleted = blocks.delete_many(&[pinned.clone(), left.clone()]).await;
    assert!(deleted.iter().all(|outcome| matches!(outcome, Ok(Some(_)))));
    assert!(cluster.space().await.pinned >= BYTES as u64);
    let leader = cluster.leader(SHARD, PATIENCE).await.unwrap();
    cluster.kill(leader, Signal::KILL).await.unwrap();
    pin.renew(4 * PATIENCE).await.unwrap();
    let extents = REGION / extent_bytes(REGION);
    let mut written = 0;
    let mut round = 10;
    while written < extents + extents / 4 {
        let key = format!("{{k}}churn-{round}");
        match blocks.put(&key, pattern(round, BYTES)).await {
            Ok(_) => written += 1,
            // All that is not pinned rests.
            Err(PutError::NoSpace { .. } | PutError::Deadline { .. }) => {}
            Err(other) => panic!("{other}"),
        }
        blocks.delete(&key).await.unwrap();
        round += 1;
    }
    // Probes: a get with a lease would let all that rests rest for longer.
    assert!(!blocks.exists(&pinned).await.unwrap());
    assert!(pin.get(&pinned).await.unwrap().unwrap().bytes == pattern(1, BYTES), "others wrote over it");
    let space = cluster.space().await;
    assert!(space.pinned >= BYTES as u64 && space.pinned < 2 * BYTES as u64, "the other pin is over: {space:?}");
    pin.release().await.unwrap();
    client.close().await.unwrap();
    soon("all memory comes back", async || {
        let space = cluster.space().await;
        let used = [space.granted, space.committed, space.pinned, space.resting];
        (used == [0; 4]).then_some(())
    })
    .await;
    cluster.restart(leader).unwrap();
    cluster.wait_ready(PATIENCE).await.unwrap();
    cluster.agree().await;
}

#[tokio::test]
async fn a_pin_is_bounded_by_length_and_by_number_and_says_so() {
    let cluster = quarry_tests::cluster::shared().await;
    let (client, blocks) = cluster.namespace().await;
    let key = Key::new("key").unwrap();
    blocks.put(&key, "value").await.unwrap();
    let names = [key];
    let long = blocks.pin(&names, Duration::from_secs(601)).await;
    assert!(matches!(long, Err(PinError::Duration { .. })), "{long:?}");
    let (mut pins, mut refused) = (Vec::new(), Vec::new());
    let mut asked = JoinSet::new();
    for _ in 0..200 {
        let (blocks, names) = (blocks.clone(), names.clone());
        asked.spawn(async move { blocks.pin(&names, PATIENCE).await });
    }
    for answer in asked.join_all().await {
        match answer {
            Ok(pin) => pins.push(pin),
            Err(error) => refused.push(error),
        }
    }
    assert!(!refused.is_empty(), "there is a limit");
    for refused in refused {
        match refused {
            PinError::TooMany { resource, limit, retry_after } => {
                assert_eq!((&resource[..], limit), ("pins of one client in a shard", pins.len() as u64));
                assert!(retry_after <= PATIENCE && !retry_after.is_zero());
            }
            other => panic!("{other:?}"),
        }
    }
    // Another client is not hurt.
    let other = cluster.client().await;
    let theirs = other.namespace(&blocks.info().name).await.unwrap();
    theirs.pin(&names, PATIENCE).await.unwrap().release().await.unwrap();
    pins.pop().unwrap().release().await.unwrap();
    blocks.pin(&names, PATIENCE).await.unwrap().release().await.unwrap();
    let released: JoinSet<_> = pins.into_iter().map(quarry_client::Pin::release).collect();
    assert!(released.join_all().await.iter().all(Result::is_ok));
    other.close().await.unwrap();
    client.close().await.unwrap();
}
