//! A data node that is restarted again and again while it is read from (*No wrong value*, *Epochs only grow*).

use quarry_client::{Namespace, PutItem};
use quarry_tests::{Member, Seed, Signal, TestCluster, rounds::rounds, seed::pattern, soon, wait::PATIENCE};
use quarry_wire::{
    ids::{RegionId, RegionIndex},
    key::Key,
};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};
use tokio::task::JoinHandle;

const RESTARTS: usize = 20;
const VALUES: usize = 200;
const BYTES: usize = 30_000;
const RESTARTED: Member = Member::Data(101);
/// Gets that every reader does while the node is down, and again once it is back.
const GETS: usize = 3;

fn key(index: usize) -> Key {
    Key::new(format!("key-{index}")).unwrap()
}

fn payload(index: usize) -> Vec<u8> {
    pattern(index as u64, BYTES)
}

/// Somebody who reads some of the values, again and again. Each has a live copy at any time, so each must come, and be right.
struct Reader {
    gets: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Reader {
    fn start(blocks: Namespace, batch: usize) -> Self {
        let (gets, stop): (Arc<AtomicUsize>, Arc<AtomicBool>) = Default::default();
        let (count, end) = (Arc::clone(&gets), Arc::clone(&stop));
        let task = tokio::spawn(async move {
            let mut seed = Seed::draw();
            while !end.load(Ordering::Relaxed) {
                let indexes: Vec<usize> = (0..batch).map(|_| seed.below(VALUES)).collect();
                let keys: Vec<Key> = indexes.iter().map(|index| key(*index)).collect();
                for (index, result) in indexes.iter().zip(blocks.get_many(&keys).await) {
                    let value = result.unwrap_or_else(|wrong| panic!("key-{index} has a live copy: {wrong}"));
                    let value = value.unwrap_or_else(|| panic!("key-{index} is gone"));
                    assert!(value.bytes == payload(*index), "key-{index} came back changed");
                }
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { gets, stop, task }
    }

    /// Waits for that many gets that began from now on.
    async fn more(&self, gets: usize) {
        let from = self.gets.load(Ordering::Relaxed);
        soon("the reader goes on", async || {
            assert!(!self.task.is_finished(), "a reader has ended");
            // The first of them may have begun before.
            (self.gets.load(Ordering::Relaxed) > from + gets).then_some(())
        })
        .await;
    }

    async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap();
    }
}

/// Guards: a new life of a region is another incarnation with other keys (`meta/state/src/directory/regions.rs`, `datanode/src/regions.rs`), and
/// a copy that cannot be reached or does not pass its checks makes the reader take the next one (`client/src/read/plan.rs`).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_data_node_restarted_twenty_times_under_load_costs_no_read_of_a_value_with_a_live_copy() {
    let mut cluster = TestCluster::start_small(2, 128 << 20).await;
    let (client, blocks) = cluster.namespace().await;
    let items = (0..VALUES).map(|index| PutItem::create(key(index), payload(index))).collect();
    for result in blocks.put_many(items).await {
        result.unwrap();
    }
    let cached = cluster.client().await;
    let fresh = cluster.client().await;
    let name = &blocks.info().name;
    let readers = [
        Reader::start(cached.namespace(name).await.unwrap(), 1),
        Reader::start(cached.namespace(name).await.unwrap(), 64),
        Reader::start(fresh.namespace(name).await.unwrap().fresh(), 8),
    ];
    let raw = cluster.raw().await;
    let region = RegionId { node: RESTARTED.node(), index: RegionIndex(0) };
    let mut incarnation = raw.record(region).await.incarnation;
    for round in 0..rounds(RESTARTS) {
        // By turns without a word and in good order.
        let signal = if round % 2 == 0 { Signal::KILL } else { Signal::TERM };
        cluster.kill(RESTARTED, signal).await.unwrap();
        for reader in &readers {
            reader.more(GETS).await;
        }
        cluster.restart(RESTARTED).unwrap();
        cluster.wait_ready(PATIENCE).await.unwrap();
        incarnation = soon("its memory is recorded in a new life", async || {
            let now = raw.record(region).await.incarnation;
            assert!(now >= incarnation, "{incarnation:?}, then {now:?}: a life came back");
            (now > incarnation).then_some(now)
        })
        .await;
        // It is written to again, and what it holds is read from it.
        let key = format!("after-{round}");
        let bytes = pattern(round as u64, BYTES);
        let version = soon("writes with two copies go on", async || blocks.put(&key, bytes.clone()).await.ok()).await;
        let copies = raw.copies(blocks.info().id, &key).await;
        let own = copies.iter().find(|copy| copy.region == region).unwrap_or_else(|| panic!("{key}: {copies:?}"));
        assert_eq!((copies.len(), own.incarnation), (2, incarnation));
        let value = blocks.get(&key).await.unwrap().unwrap();
        assert!(value.version == version && value.bytes == bytes);
        for reader in &readers {
            reader.more(GETS).await;
        }
    }
    for reader in readers {
        reader.end().await;
    }
    let stats = [cached.stats(), fresh.stats()];
    assert!(stats.iter().all(|stats| stats.damaged_copies == 0), "memory of another life was read: {stats:?}");
    client.close().await.unwrap();
}
