//! Moves on a cluster with mutual TLS: memory that is free in pieces becomes free as a whole, and who reads meanwhile notices nothing.

use quarry_client::{Key, Namespace, Options, PutError};
use quarry_tests::{TestCluster, cluster::create_namespace, seed::pattern, soon};
use quarry_wire::{ids::NodeId, limits::extent_bytes};
use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

const BYTES: usize = 30_000;
const REGION: u64 = 4 << 20;
const NODES: u32 = 2;

/// An extent of a node's only region.
type Place = (NodeId, u64);

async fn extents_of(blocks: &Namespace, key: &Key) -> BTreeSet<Place> {
    let found = blocks.stat(key).await.unwrap().expect("it was put");
    found.copies.iter().map(|copy| (copy.node, copy.offset / extent_bytes(REGION))).collect()
}

#[tokio::test]
async fn values_that_are_read_all_the_time_are_moved_out_of_sparse_extents_and_no_get_fails_or_shows_other_bytes() {
    let cluster = TestCluster::start_with(|spec| {
        spec.metas = 1;
        spec.data_nodes = NODES;
        spec.region_bytes = vec![REGION];
        // What is moved here is not evicted.
        spec.eviction.low_water_permille = 0;
    })
    .await;
    let hasty = Options { timeout: Duration::from_millis(700), ..Options::default() };
    let writer = cluster.client_with(hasty).await;
    let blocks = create_namespace(&writer, 2, None).await;
    // Something in every extent of both nodes.
    let mut keys: Vec<Key> = Vec::new();
    let mut seen: BTreeSet<Place> = BTreeSet::new();
    let everywhere = NODES as usize * 16;
    while seen.len() < everywhere {
        let key = Key::new(format!("key-{}", keys.len())).unwrap();
        match blocks.put(&key, pattern(keys.len() as u64, BYTES)).await {
            Ok(_) => {
                seen.append(&mut extents_of(&blocks, &key).await);
                keys.push(key);
            }
            // Extents are lent while it fills.
            Err(PutError::NoSpace { .. } | PutError::Deadline { .. }) => assert!(keys.len() < 200, "{seen:?}"),
            Err(other) => panic!("{other}"),
        }
    }
    // One value, more or less, stays in each extent. Its writer is gone, so no grant lasts.
    let mut kept: Vec<(usize, Key)> = Vec::new();
    let mut gone: Vec<Key> = Vec::new();
    let mut covered: BTreeSet<Place> = BTreeSet::new();
    for (seed, key) in keys.into_iter().enumerate() {
        let lies_in = extents_of(&blocks, &key).await;
        if lies_in.is_subset(&covered) {
            gone.push(key);
        } else {
            covered.extend(lies_in);
            kept.push((seed, key));
        }
    }
    let name = blocks.info().name.clone();
    writer.close().await.unwrap();
    let client = cluster.client().await;
    let blocks = client.namespace(&name).await.unwrap();
    let mut before = Vec::new();
    for (_, key) in &kept {
        before.push(blocks.stat(key).await.unwrap().unwrap());
    }
    assert!(blocks.delete_many(&gone).await.iter().all(|outcome| matches!(outcome, Ok(Some(_)))));

    let (stop, reads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let readers: Vec<_> = [false, true]
        .into_iter()
        .map(|fresh| {
            let (kept, stop, reads) = (kept.clone(), Arc::clone(&stop), Arc::clone(&reads));
            let blocks = if fresh { blocks.fresh() } else { blocks.clone() };
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    for (seed, key) in &kept {
                        let value = blocks.get(key).await.unwrap().expect("it was never deleted");
                        assert!(value.bytes == pattern(*seed as u64, BYTES), "{key} shows other bytes");
                        reads.fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
        })
        .collect();
    let after = soon("values have moved, and an extent of each node is left", async || {
        let mut left = covered.clone();
        let mut after = Vec::new();
        for (_, key) in &kept {
            for place in extents_of(&blocks, key).await {
                left.remove(&place);
            }
            after.push(blocks.stat(key).await.unwrap().unwrap());
        }
        let nodes: BTreeSet<NodeId> = left.iter().map(|(node, _)| *node).collect();
        (nodes.len() == NODES as usize).then_some(after)
    })
    .await;
    // And through every lease on the old places.
    let so_far = reads.load(Ordering::Relaxed);
    soon("reads go on", async || (reads.load(Ordering::Relaxed) > so_far + 500).then_some(())).await;
    stop.store(true, Ordering::Relaxed);
    for reader in readers {
        reader.await.unwrap();
    }
    let moved = before.iter().zip(&after).filter(|(before, after)| before.copies != after.copies).count();
    assert!(moved > 0);
    for (before, after) in before.iter().zip(&after) {
        assert_eq!((before.version, before.copies.len()), (after.version, after.copies.len()), "moved is not replaced");
    }
    assert_eq!(client.stats().damaged_copies, 0, "a place was used again while it was read");
    client.close().await.unwrap();
}
