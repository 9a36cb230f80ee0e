//! Reads straight into a reader's own registered memory, and what all calls that read have in common.

use crate::{cluster, content, double::Double, until};
use futures::future::{FutureExt as _, join_all};
use quarry_client::{Buffer, Clock, GetError, Got, Key, Namespace, NamespaceSpec, Options, PutItem, SystemClock};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{task::yield_now, time::Instant};

/// Below and above the size from which values never share an operation.
const SMALL: usize = 3_000;
const LARGE: usize = 300_000;

/// The ways to read: whatever holds for one must hold for all.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    Get,
    /// Together with its neighbours.
    GetMany,
    GetInto,
    GetIntoMany,
}
pub(crate) const WAYS: [Way; 4] = [Way::Get, Way::GetMany, Way::GetInto, Way::GetIntoMany];

impl Way {
    /// Reads `keys` this way.
    pub(crate) async fn read(
        self,
        client: &quarry_client::Client,
        blocks: &Namespace,
        keys: &[Key],
    ) -> Vec<Result<Option<Vec<u8>>, GetError>> {
        let buffers = client.buffers(keys.len() * (1 << 20)).unwrap();
        let buffer = || buffers.try_take(1 << 20).unwrap();
        let cut = |(mut buffer, result): (Buffer, Result<Option<Got>, GetError>)| {
            Ok(result?.map(|got| buffer.bytes()[..got.len].to_vec()))
        };
        match self {
            Self::Get => {
                let mut results = Vec::new();
                for key in keys {
                    results.push(blocks.get(key.as_bytes()).await.map(|value| value.map(|value| value.bytes.to_vec())));
                }
                results
            }
            Self::GetMany => {
                let values = blocks.get_many(keys).await.into_iter();
                values.map(|result| result.map(|value| value.map(|value| value.bytes.to_vec()))).collect()
            }
            Self::GetInto => {
                let mut results = Vec::new();
                for key in keys {
                    results.push(cut(blocks.get_into(key.as_bytes(), buffer()).await));
                }
                results
            }
            Self::GetIntoMany => {
                let items = keys.iter().map(|key| (key.clone(), buffer())).collect();
                blocks.get_into_many(items).await.into_iter().map(cut).collect()
            }
        }
    }
}

/// So many values of this length, which lie next to each other.
async fn put(blocks: &Namespace, count: u64, length: usize) -> Vec<Key> {
    let keys: Vec<Key> = (0..count).map(|number| Key::new(format!("{{tag}}{number:03}")).unwrap()).collect();
    let items = keys.iter().zip(0..).map(|(key, seed)| PutItem::create(key.clone(), content(seed, length)));
    assert!(blocks.put_many(items.collect()).await.iter().all(Result::is_ok));
    keys
}

#[tokio::test(flavor = "multi_thread")]
async fn values_of_every_size_land_in_the_readers_own_memory() {
    let (_double, client, blocks) = cluster(2, Options::default()).await;
    let buffers = client.buffers(32 << 20).unwrap();
    for (seed, size) in [0, 1, 63, 4096, 65_536, 1 << 20, (3 << 20) + 17].into_iter().enumerate() {
        let key = format!("{}-{size}", "k".repeat(1 + seed * 60));
        let version = blocks.put(&key, content(seed as u64, size)).await.unwrap();
        let buffer = buffers.take(size.max(1)).await.unwrap();
        let (mut buffer, result) = blocks.get_into(&key, buffer).await;
        assert_eq!(result.unwrap(), Some(Got { len: size, version }));
        assert!(buffer.bytes()[..size] == content(seed as u64, size), "{size} bytes came back changed");
    }
    let (_, absent) = blocks.get_into("absent", buffers.take(1).await.unwrap()).await;
    assert_eq!(absent.unwrap(), None);
    let (_, invalid) = blocks.get_into("", buffers.take(1).await.unwrap()).await;
    assert!(matches!(invalid, Err(GetError::InvalidKey(_))));
    assert_eq!(buffers.free_bytes(), buffers.capacity());
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn many_values_are_read_in_order_and_neighbours_together() {
    let (_double, client, blocks) = cluster(2, Options::default()).await;
    let keys = put(&blocks, 100, SMALL).await;
    for way in [Way::GetMany, Way::GetIntoMany] {
        let before = client.stats();
        for (value, seed) in way.read(&client, &blocks, &keys).await.into_iter().zip(0..) {
            assert!(value.unwrap().unwrap() == content(seed, SMALL));
        }
        let reads = client.stats().fabric_reads - before.fabric_reads;
        assert!(reads <= 14, "{way:?}: {reads} reads for 100 neighbours");
    }
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_buffer_that_is_too_short_is_refused_with_the_length_that_is_needed() {
    let (_double, client, blocks) = cluster(2, Options::default()).await;
    let buffers = client.buffers(1 << 20).unwrap();
    blocks.put("key", content(1, 1000)).await.unwrap();
    let reads = client.stats().fabric_reads;
    let (mut buffer, result) = blocks.get_into("key", buffers.take(999).await.unwrap()).await;
    assert!(matches!(result, Err(GetError::BufferTooSmall { needed: 1000, found: 999 })), "{result:?}");
    assert_eq!((client.stats().fabric_reads, buffer.bytes().len()), (reads, 999), "nothing was read");
    let (mut buffer, result) = blocks.get_into("key", buffers.take(1000).await.unwrap()).await;
    assert!(result.unwrap().is_some() && buffer.bytes() == content(1, 1000));
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_way_to_read_shows_damaged_bytes_and_each_reads_the_other_copy() {
    for length in [SMALL, LARGE] {
        let (double, client, blocks) = cluster(2, Options::default()).await;
        let keys = put(&blocks, 12, length).await;
        for (number, key) in keys.iter().enumerate() {
            double.damage(&key.to_string(), number % 2);
        }
        for way in WAYS {
            for (value, seed) in way.read(&client, &blocks, &keys).await.into_iter().zip(0..) {
                assert!(value.unwrap().unwrap() == content(seed, length), "{way:?} of {length} bytes");
            }
        }
        assert!(client.stats().damaged_copies > 0);
        double.damage(&keys[3].to_string(), 0);
        for way in WAYS {
            let values = way.read(&client, &blocks, &keys).await;
            assert!(matches!(values[3], Err(GetError::Corrupt { .. })), "{way:?}: {:?}", values[3]);
            assert_eq!(values.iter().filter(|value| value.is_ok()).count(), 11);
        }
        client.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_way_to_read_takes_a_whole_frame_of_another_key() {
    for length in [SMALL, LARGE] {
        let (double, client, blocks) = cluster(2, Options::default()).await;
        let keys = put(&blocks, 3, length).await;
        double.overwrite(&keys[0].to_string(), &keys[1].to_string());
        for way in WAYS {
            let values = way.read(&client, &blocks, &keys).await;
            assert!(matches!(values[0], Err(GetError::Corrupt { .. })), "{way:?}: {:?}", values[0]);
            assert!(values[1].as_ref().unwrap().as_deref() == Some(&content(1, length)[..]));
        }
        client.close().await.unwrap();
    }
}

/// The system's clock, which jumps ahead by six seconds when it was looked at so many times; 0 is never.
#[derive(Debug, Default)]
pub(crate) struct Jumps {
    pub(crate) looks: AtomicU64,
    pub(crate) ahead_ms: AtomicU64,
}

impl Clock for Jumps {
    fn wall_ms(&self) -> u64 {
        SystemClock.wall_ms()
    }
    fn boot(&self) -> Duration {
        let last = self.looks.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |looks| looks.checked_sub(1)) == Ok(1);
        if last {
            self.ahead_ms.fetch_add(6_000, Ordering::SeqCst);
        }
        SystemClock.boot() + Duration::from_millis(self.ahead_ms.load(Ordering::SeqCst))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whenever_a_lease_ends_no_way_to_read_takes_the_bytes_without_asking_again() {
    for length in [SMALL, LARGE] {
        let clock = Arc::new(Jumps::default());
        let double = Double::start(2).await;
        let client =
            double.connect(Options { clock: Arc::clone(&clock) as Arc<dyn Clock>, ..Options::default() }).await;
        let blocks = client.create_namespace(NamespaceSpec::cache("kv")).await.unwrap();
        let keys = put(&blocks, 1, length).await;
        let resolves = || client.stats().control_calls.get("Resolve").copied().unwrap_or(0);
        for way in WAYS {
            // Found in memory, chosen, read, checked: at each of these the clock is looked at once.
            for looks in 1..=4 {
                way.read(&client, &blocks, &keys).await[0].as_ref().unwrap();
                let before = resolves();
                clock.looks.store(looks, Ordering::SeqCst);
                let values = way.read(&client, &blocks, &keys).await;
                assert!(values[0].as_ref().unwrap().as_deref() == Some(&content(0, length)[..]));
                assert_eq!(resolves() - before, 1, "{way:?} of {length} bytes, at look {looks}");
                assert_eq!(clock.looks.load(Ordering::SeqCst), 0);
            }
        }
        double.faults().lease_ms = Some(0);
        let reads = client.stats().fabric_reads;
        for way in WAYS {
            let values = way.read(&client, &blocks.fresh(), &keys).await;
            assert!(matches!(values[0], Err(GetError::Deadline { .. })), "{way:?}: {:?}", values[0]);
        }
        assert_eq!(client.stats().fabric_reads, reads, "without a lease nothing is read");
        client.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_counts_from_sending_the_request_however_late_its_answer_comes() {
    let clock = Arc::new(Jumps::default());
    let double = Double::start(2).await;
    let client = double.connect(Options { clock: Arc::clone(&clock) as Arc<dyn Clock>, ..Options::default() }).await;
    let blocks = client.create_namespace(NamespaceSpec::cache("kv")).await.unwrap();
    let keys = put(&blocks, 1, SMALL).await;
    let resolves = || client.stats().control_calls.get("Resolve").copied().unwrap_or(0);
    for way in WAYS {
        let before = resolves();
        // The first look is at sending; by the second one, with the answer in hand, its lease is over.
        clock.looks.store(2, Ordering::SeqCst);
        let values = way.read(&client, &blocks.fresh(), &keys).await;
        assert!(values[0].as_ref().unwrap().as_deref() == Some(&content(0, SMALL)[..]));
        assert_eq!(resolves() - before, 2, "{way:?}");
    }
    client.close().await.unwrap();
}

/// Goes on by ten milliseconds at each look.
#[derive(Debug, Default)]
struct Steps(AtomicU64);

impl Clock for Steps {
    fn wall_ms(&self) -> u64 {
        SystemClock.wall_ms()
    }
    fn boot(&self) -> Duration {
        Duration::from_millis(10 * self.0.fetch_add(1, Ordering::SeqCst))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_takes_longer_than_a_lease_is_read_in_steps_and_no_value_of_it_fails() {
    for length in [SMALL, LARGE] {
        let double = Double::start(2).await;
        let clock: Arc<dyn Clock> = Arc::<Steps>::default();
        let client = double.connect(Options { clock, ..Options::default() }).await;
        let blocks = client.create_namespace(NamespaceSpec::cache("kv")).await.unwrap();
        let keys = put(&blocks, 120, length).await;
        // Some forty looks: the clock is looked at for every value, and for every operation.
        double.faults().lease_ms = Some(400);
        let resolves = || client.stats().control_calls.get("Resolve").copied().unwrap_or(0);
        for way in [Way::GetMany, Way::GetIntoMany] {
            let before = resolves();
            for (value, seed) in way.read(&client, &blocks.fresh(), &keys).await.into_iter().zip(0..) {
                assert!(value.unwrap().unwrap() == content(seed, length), "{way:?} of {length} bytes: {seed}");
            }
            assert!(resolves() - before > 2, "{way:?} of {length} bytes: more than two leases were needed");
        }
        client.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_too_short_for_any_value_ends_a_batch_and_is_not_asked_for_for_ever() {
    let double = Double::start(2).await;
    let clock: Arc<dyn Clock> = Arc::<Steps>::default();
    let client = double.connect(Options { clock, ..Options::default() }).await;
    let blocks = client.create_namespace(NamespaceSpec::cache("kv")).await.unwrap();
    let keys = put(&blocks, 20, SMALL).await;
    double.faults().lease_ms = Some(10);
    let before = client.stats().control_calls.get("Resolve").copied().unwrap_or(0);
    for value in Way::GetMany.read(&client, &blocks.fresh(), &keys).await {
        assert!(matches!(value, Err(GetError::Deadline { .. })), "{value:?}");
    }
    assert_eq!(client.stats().control_calls["Resolve"] - before, 2);
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_reads_leave_no_memory_in_use() {
    let (_double, client, blocks) = cluster(2, Options::default()).await;
    let keys = put(&blocks, 8, LARGE).await;
    blocks.get_many(&keys).await;
    let buffers = client.buffers(8 << 20).unwrap();
    for polls in 0..20 {
        let items = keys.iter().map(|key| (key.clone(), buffers.try_take(LARGE).unwrap())).collect();
        let mut read = Box::pin(blocks.get_into_many(items));
        for _ in 0..polls {
            if (&mut read).now_or_never().is_some() {
                break;
            }
        }
        drop(read);
        until("all of it is free", || buffers.free_bytes() == buffers.capacity()).await;
    }
    for value in blocks.get_many(&keys).await {
        assert!(value.unwrap().is_some());
    }
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn gets_at_the_same_time_share_resolves() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    let keys = put(&blocks, 64, SMALL).await;
    let reader = double.connect(Options::default()).await;
    let theirs = reader.namespace("kv").await.unwrap();
    let resolves = || reader.stats().control_calls.get("Resolve").copied().unwrap_or(0);
    let gets = keys.iter().map(|key| theirs.get(key.as_bytes()));
    for (value, seed) in join_all(gets).await.into_iter().zip(0..) {
        assert!(value.unwrap().unwrap().bytes == content(seed, SMALL));
    }
    assert!(resolves() <= 2, "{} calls for 64 gets", resolves());
    let before = resolves();
    let fresh = theirs.fresh();
    for value in join_all((0..50).map(|_| fresh.get(keys[0].as_bytes()))).await {
        assert!(value.unwrap().is_some());
    }
    assert!(resolves() - before <= 2, "{} calls for 50 gets of one key", resolves() - before);
    reader.close().await.unwrap();
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_get_does_not_take_along_those_who_share_its_resolve() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    let keys = put(&blocks, 3, SMALL).await;
    double.faults().silent = true;
    let reads = keys.iter().map(|key| Box::pin(blocks.get(key.as_bytes())));
    let mut reads: Vec<_> = reads.collect();
    let calls = || client.stats().control_calls.get("Resolve").copied().unwrap_or(0);
    let patience = Instant::now() + Duration::from_secs(10);
    while calls() == 0 {
        assert!((&mut reads[0]).now_or_never().is_none() && Instant::now() < patience);
        yield_now().await;
    }
    for read in &mut reads[1..] {
        assert!(read.now_or_never().is_none());
    }
    drop(reads.remove(0));
    double.faults().silent = false;
    for (value, seed) in join_all(reads).await.into_iter().zip(1..) {
        assert!(value.unwrap().unwrap().bytes == content(seed, SMALL));
    }
    client.close().await.unwrap();
}
