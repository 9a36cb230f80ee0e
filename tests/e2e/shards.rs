//! Eight shards, as a cluster of some size has them: every call works across them, memory goes where it is written, and no byte is lost.

use quarry::config::EvictionSection;
use quarry_client::{Key, NamespaceSpec, Options, PutItem};
use quarry_proto::v1;
use quarry_tests::{
    TestCluster,
    cluster::{create_namespace, fresh_name, small},
    seed::pattern,
    soon,
};
use std::{collections::BTreeSet, time::Duration};

const SHARDS: u32 = 8;
const BYTES: usize = 64 << 10;
const REGION: u64 = 16 << 20;

fn keys(name: &str, count: usize) -> Vec<Key> {
    (0..count).map(|number| Key::new(format!("{name}-{number:03}")).unwrap()).collect()
}

/// The rows of every region, once each of its bytes is where some row says.
async fn counted(cluster: &TestCluster) -> Vec<v1::SpaceStatus> {
    soon("every byte of every region to be accounted for", async || {
        let space = cluster.status(cluster.metas()[0]).await.ok()?.space;
        let held = |it: &v1::SpaceStatus| {
            it.free_bytes + it.granted_bytes + it.committed_bytes + it.pinned_bytes + it.resting_bytes
        };
        let mut regions = space.iter().filter(|it| it.shard == 0).peekable();
        regions.peek()?;
        let all = regions.all(|whole| {
            let rows = space.iter().filter(|it| it.region == whole.region);
            rows.map(held).sum::<u64>() == whole.total_bytes
        });
        all.then_some(space)
    })
    .await
}

#[tokio::test]
async fn what_is_written_over_eight_shards_is_found_listed_pinned_and_deleted_and_one_shard_alone_fills_all_memory() {
    let cluster = TestCluster::start_with(|spec| {
        small(spec, 2, REGION);
        spec.raft.shards = SHARDS;
    })
    .await;
    // What was read a moment ago rests for up to twelve seconds before another shard can have it.
    let client = cluster.client_with(Options { timeout: Duration::from_secs(60), ..Options::default() }).await;
    let blocks = create_namespace(&client, 2, None).await;
    // Everything over all shards.
    let all = keys("block", 64);
    let shards: BTreeSet<u32> = all.iter().map(|key| key.shard(blocks.info().id, SHARDS).0).collect();
    assert_eq!(shards.len(), SHARDS as usize);
    let items = (0..).zip(&all).map(|(seed, key)| PutItem::create(key.clone(), pattern(seed, BYTES))).collect();
    for version in blocks.put_many(items).await {
        version.unwrap();
    }
    let stats = client.stats();
    for call in ["Grant", "Commit"] {
        let calls = stats.control_calls.get(call).copied().unwrap_or(0);
        // An extent has fifteen such slots, and a slab takes at most half of what is free.
        assert!(calls <= 3 * u64::from(SHARDS), "{calls} calls of {call} for one batch over {SHARDS} shards");
    }
    for (seed, value) in (0..).zip(blocks.get_many(&all).await) {
        assert!(value.unwrap().unwrap().bytes == pattern(seed, BYTES));
    }
    assert_eq!(blocks.exists_many(&all).await.unwrap(), all.len());
    let page = blocks.list("block-", None, 100).await.unwrap();
    assert_eq!(page.entries.iter().map(|entry| entry.key.clone()).collect::<Vec<_>>(), all);
    let pin = blocks.pin(&all, Duration::from_secs(20)).await.unwrap();
    assert_eq!(blocks.delete_many(&all).await.into_iter().filter(|it| matches!(it, Ok(Some(_)))).count(), all.len());
    assert!(pin.get(&all[7]).await.unwrap().is_some(), "pinned values are read after their keys went");
    pin.release().await.unwrap();
    assert_eq!(blocks.exists_many(&all).await.unwrap(), 0);
    counted(&cluster).await;
    // One shard alone: all its keys have one tag. What the others still hold comes to it.
    let most = usize::try_from(REGION).unwrap() / BYTES * 3 / 4;
    let alone = keys("{one}", most);
    for (seed, key) in (1_000..).zip(&alone) {
        blocks.put(key, pattern(seed, BYTES)).await.unwrap();
    }
    for (seed, value) in (1_000..).zip(blocks.get_many(&alone).await) {
        assert!(value.unwrap().unwrap().bytes == pattern(seed, BYTES));
    }
    counted(&cluster).await;
    client.close().await.unwrap();
}

/// A cache of eight shards that keeps room by evicting. Two shards fill two thirds of the memory and are emptied, then three others do: everything
/// fits all the time, so no value goes. (Where all eight are written, they have two extents each here, and values go before half is full.)
#[tokio::test]
async fn what_was_deleted_in_some_shards_makes_room_in_others_and_no_value_goes() {
    const BYTES: usize = 32 << 10;
    let cluster = TestCluster::start_with(|spec| {
        small(spec, 1, REGION);
        spec.raft.shards = SHARDS;
        spec.eviction = EvictionSection::default();
    })
    .await;
    let client = cluster.client_with(Options { timeout: Duration::from_secs(30), ..Options::default() }).await;
    let blocks = create_namespace(&client, 1, None).await;
    let tagged = |tags: &[&str]| -> Vec<Key> {
        let key = |number: usize| Key::new(format!("{{{}}}-{number}", tags[number % tags.len()])).unwrap();
        (0..(11 << 20) / BYTES).map(key).collect()
    };
    for keys in [tagged(&["a", "b"]), tagged(&["c", "d", "e"])] {
        for (part, chunk) in (0..).zip(keys.chunks(40)) {
            let items = chunk.iter().map(|key| PutItem::create(key.clone(), pattern(part, BYTES))).collect();
            for version in blocks.put_many(items).await {
                version.unwrap();
            }
        }
        assert_eq!(blocks.exists_many(&keys).await.unwrap(), keys.len(), "nothing went");
        let deleted = blocks.delete_many(&keys).await.into_iter().filter(|it| matches!(it, Ok(Some(_)))).count();
        assert_eq!(deleted, keys.len());
    }
    counted(&cluster).await;
    client.close().await.unwrap();
}

/// Three times what its quota allows, put as fast as one client can: a cache lets its own values go for it, and refuses nobody.
#[tokio::test]
async fn a_cache_at_its_quota_takes_what_a_fast_writer_puts() {
    const BYTES: usize = 8 << 10;
    const QUOTA: u64 = 8 << 20;
    let cluster = TestCluster::start_with(|spec| {
        small(spec, 2, REGION * 2);
        spec.raft.shards = SHARDS;
        spec.eviction = EvictionSection::default();
    })
    .await;
    let client = cluster.client_with(Options { timeout: Duration::from_secs(30), ..Options::default() }).await;
    let mut spec = NamespaceSpec::cache(fresh_name("test"));
    (spec.copies, spec.quota_bytes) = (2, Some(QUOTA));
    let blocks = client.create_namespace(spec).await.unwrap();
    let fit = usize::try_from(QUOTA).unwrap() / 2 / BYTES;
    let keys = keys("block", 3 * fit);
    for (part, chunk) in (0..).zip(keys.chunks(256)) {
        let items = chunk.iter().map(|key| PutItem::create(key.clone(), pattern(part, BYTES))).collect();
        for version in blocks.put_many(items).await {
            version.unwrap();
        }
    }
    let (mut held, mut after) = (0, None);
    loop {
        let page = blocks.list("block-", after.as_ref(), 4096).await.unwrap();
        held += page.entries.len();
        after = page.after;
        if after.is_none() {
            break;
        }
    }
    assert!(held <= fit && held >= fit / 2, "{held} values of {fit} that its quota allows");
    counted(&cluster).await;
    client.close().await.unwrap();
}
