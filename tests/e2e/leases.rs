//! Leases under deletes, and when memory is short (*Leases hold*, *Nothing leaks*).

use quarry_client::{Key, Options, PutError, PutMode};
use quarry_tests::{
    TestCluster,
    cluster::{create_namespace, small},
    eventually,
    seed::pattern,
    shared, soon,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

const BYTES: usize = 100_000;
const REGION: u64 = 4 << 20;

#[tokio::test]
async fn a_key_deleted_under_a_lease_is_created_again_at_once_elsewhere_and_the_lease_shows_the_old_value_whole_or_the_new_one()
 {
    let cluster = shared().await;
    let (client, blocks) = cluster.namespace().await;
    let reader = cluster.client().await;
    let theirs = reader.namespace(&blocks.info().name).await.unwrap();
    let mut old = 0;
    for round in 0..20_u64 {
        let (first, second) = (pattern(2 * round, 30_000), pattern(2 * round + 1, 20_000));
        blocks.put_with("key", first.clone(), PutMode::Replace).await.unwrap();
        assert!(theirs.fresh().get("key").await.unwrap().unwrap().bytes == first);
        let places = |stat: quarry_client::Stat| stat.copies.into_iter().map(|copy| (copy.node, copy.offset));
        let before: Vec<_> = places(blocks.stat("key").await.unwrap().unwrap()).collect();
        blocks.delete("key").await.unwrap().unwrap();
        assert!(theirs.fresh().get("key").await.unwrap().is_none(), "a fresh get asks");
        blocks.put("key", second.clone()).await.unwrap();
        let after = places(blocks.stat("key").await.unwrap().unwrap());
        assert!(after.into_iter().all(|place| !before.contains(&place)), "the old place rests");
        // What the fresh get learned took the lease away; the lease of another reader goes on.
        let seen = theirs.get("key").await.unwrap();
        assert!(seen.is_none_or(|value| value.bytes == first || value.bytes == second));
        assert!(theirs.fresh().get("key").await.unwrap().unwrap().bytes == second);
        // Now with a lease on what is deleted and created again, and no fresh get between.
        blocks.delete("key").await.unwrap().unwrap();
        let third = blocks.put("key", first.clone()).await.unwrap();
        let seen = theirs.get("key").await.unwrap().expect("it exists, or its lease goes on");
        assert!(if seen.version == third { seen.bytes == first } else { seen.bytes == second });
        old += u32::from(seen.version != third);
    }
    assert!(old > 0, "no get went through a lease on what was deleted");
    reader.close().await.unwrap();
    client.close().await.unwrap();
}

/// The longest grant, the rest after it, and room for a busy machine.
const ALL_FREE_WITHIN: Duration = Duration::from_secs(90);

/// A full pool under probes and under leases: probes keep nothing, leases keep it until they are over, and nobody is told that nothing comes.
#[tokio::test]
async fn a_full_pool_comes_back_under_a_storm_of_probes_at_once_and_after_their_end_under_leases() {
    let cluster = TestCluster::start_with(|spec| {
        small(spec, 1, REGION);
        // What is full stays full.
        spec.eviction.low_water_permille = 0;
    })
    .await;
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 1, None).await;
    let hasty = cluster
        .client_with(Options {
            timeout: Duration::from_millis(700),
            idle: Duration::from_millis(100),
            ..Options::default()
        })
        .await;
    let fast = hasty.namespace(&blocks.info().name).await.unwrap();
    let mut keys: Vec<Key> = Vec::new();
    // Each round: fill, storm or read, delete all, write again.
    for leased in [false, true] {
        // A grant whose answer came too late for the hasty client lasts until its end, and then its memory rests.
        eventually(ALL_FREE_WITHIN, "all memory of values is free", async || {
            let space = cluster.space().await;
            (space.free > 0 && [space.committed, space.resting] == [0; 2]).then_some(())
        })
        .await;
        // Extents are lent while it fills: full is what is refused again and again.
        let mut refusals = 0;
        while refusals < 3 {
            let key = Key::new(format!("{{k}}{leased}-{}", keys.len())).unwrap();
            match fast.put(&key, pattern(keys.len() as u64, BYTES)).await {
                Ok(_) => {
                    keys.push(key);
                    refusals = 0;
                }
                Err(PutError::NoSpace { .. } | PutError::Deadline { .. }) => refusals += 1,
                Err(other) => panic!("{other}"),
            }
        }
        assert!(keys.len() as u64 * BYTES as u64 > REGION / 2, "only {} values fit", keys.len());
        let stop = Arc::new(AtomicBool::new(false));
        let done = Arc::new(AtomicU64::new(0));
        let storm: Vec<_> = (0..4)
            .map(|_| {
                let (blocks, keys, stop, done) = (blocks.clone(), keys.clone(), Arc::clone(&stop), Arc::clone(&done));
                tokio::spawn(async move {
                    while !stop.load(Ordering::Relaxed) {
                        if leased {
                            for value in blocks.get_many(&keys).await {
                                value.unwrap();
                            }
                        } else {
                            blocks.exists_many(&keys).await.unwrap();
                            blocks.list("", None, 10).await.unwrap();
                            blocks.stat(&keys[0]).await.unwrap();
                        }
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        soon("the storm has begun", async || (done.load(Ordering::Relaxed) > 20).then_some(())).await;
        let gone = blocks.delete_many(&keys).await;
        assert!(gone.iter().all(|outcome| matches!(outcome, Ok(Some(_)))));
        keys.clear();
        let refused = fast.put("{k}early", pattern(1, BYTES)).await;
        match refused {
            // Whatever rests is coming back.
            Err(PutError::NoSpace { retry_after, .. }) => assert!(retry_after.is_some(), "resting space is coming"),
            Err(PutError::Deadline { .. }) => {}
            Err(other) => panic!("{other}"),
            Ok(_) => keys.push(Key::new("{k}early").unwrap()),
        }
        if leased {
            assert!(keys.is_empty(), "memory under a lease was granted");
        }
        // Under probes while they go on; under leases when nobody asks for more.
        if leased {
            stop.store(true, Ordering::Relaxed);
        }
        let again =
            soon("the memory is granted again", async || fast.put("{k}again", pattern(2, BYTES)).await.ok()).await;
        assert_eq!(blocks.stat("{k}again").await.unwrap().unwrap().version, again);
        stop.store(true, Ordering::Relaxed);
        for task in storm {
            task.await.unwrap();
        }
        keys.push(Key::new("{k}again").unwrap());
        blocks.delete_many(&keys).await;
        keys.clear();
    }
    hasty.close().await.unwrap();
    client.close().await.unwrap();
}
