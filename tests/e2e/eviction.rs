//! Eviction on real processes: a cache that is written to for longer than it has memory (*Fresh space*, *No wrong value*, *Nothing leaks*).

use quarry::scrape::Scrape;
use quarry_client::Key;
use quarry_tests::{
    Member, TestCluster,
    cluster::{create_namespace, small},
    seed::pattern,
    soon,
};
use std::time::Duration;

const BYTES: usize = 64 << 10;
const REGION: u64 = 16 << 20;

fn key(name: &str, number: u64) -> Key {
    Key::new(format!("{name}-{number}")).unwrap()
}

/// What is evicted comes back after its rest, two seconds as long as nobody reads; so most of the memory is kept free here, and what was read
/// is written and read last.
#[tokio::test]
async fn a_cache_overfilled_three_times_takes_every_put_and_keeps_what_was_read_last() {
    let cluster = TestCluster::start_with(|spec| {
        small(spec, 1, REGION);
        (spec.eviction.low_water_permille, spec.eviction.high_water_permille) = (500, 700);
    })
    .await;
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 1, None).await;
    let all = 3 * REGION / BYTES as u64;
    for number in 0..all {
        blocks.put(key("cold", number), pattern(number, BYTES)).await.unwrap();
    }
    let hot: Vec<Key> = (0..8).map(|number| key("hot", number)).collect();
    for (number, key) in (0..).zip(&hot) {
        blocks.put(key, pattern(1_000_000 + number, BYTES)).await.unwrap();
    }
    let check = async |keys: &[Key], seed: u64| {
        let mut found = 0_usize;
        for ((number, key), value) in (0..).zip(keys).zip(blocks.get_many(keys).await) {
            if let Some(value) = value.unwrap() {
                assert!(value.bytes == pattern(seed + number, BYTES), "a wrong value of {key}");
                found += 1;
            }
        }
        found
    };
    assert_eq!(check(&hot, 1_000_000).await, hot.len());
    // A third of the memory more: what was not read makes room for it.
    let slabs = evicted(&cluster, "slabs").await;
    let more = all + REGION / 3 / BYTES as u64;
    for number in all..more {
        blocks.put(key("cold", number), pattern(number, BYTES)).await.unwrap();
    }
    soon("slabs are evicted", async || (evicted(&cluster, "slabs").await > slabs).then_some(())).await;
    assert_eq!(check(&hot, 1_000_000).await, hot.len(), "what was read last stays");
    let cold: Vec<Key> = (0..more).map(|number| key("cold", number)).collect();
    let found = check(&cold, 0).await;
    let fit = usize::try_from(REGION).unwrap() / BYTES;
    assert!((1..fit).contains(&found), "{found} of {more} values lie in memory for {fit}");
    // A slab whose grant lasts is not evicted: one slot of it that was given up keeps it until then.
    let old = check(&cold[..fit], 0).await;
    assert!(old <= fit / 8, "{old} of the oldest {fit} are no misses");
    assert!(evicted(&cluster, "values").await >= more as f64 - fit as f64);
    assert!(evicted(&cluster, "bytes").await >= 2.0 * REGION as f64);
    client.close().await.unwrap();
}

async fn evicted(cluster: &TestCluster, what: &str) -> f64 {
    let reports = quarry::local::LocalCluster::status(cluster).await;
    let (_, meta) = reports.into_iter().find(|(member, _)| matches!(member, Member::Meta(_))).unwrap();
    let scrape = Scrape::of(meta.admin_address().unwrap(), Duration::from_secs(10)).await.unwrap();
    scrape.sum(&format!("quarry_meta_evicted_{what}_total"), &[])
}
