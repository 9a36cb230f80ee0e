//! Leaders killed again and again, under load.

use crate::history::{History, What};
use quarry_client::{Namespace, PutError, PutMode};
use quarry_tests::{
    Seed, Signal, TestCluster,
    cluster::{DIRECTORY, SHARD},
    rounds::rounds,
    seed::pattern,
    soon,
    wait::PATIENCE,
};
use quarry_wire::version::Version;
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
use tokio::task::JoinHandle;

/// Leaders that are killed.
const KILLS: usize = 20;
/// Writes that must be acknowledged between two of them.
const BETWEEN: u64 = 10;
/// Keys that are replaced all the time.
const HOT: usize = 4;
const BYTES: usize = 700;

/// The payload of an attempt: its number, then bytes that follow from it.
fn payload(attempt: u64) -> Vec<u8> {
    let mut bytes = attempt.to_le_bytes().to_vec();
    bytes.extend(pattern(attempt, BYTES));
    bytes
}

/// The attempt whose payload this is.
fn attempt_of(bytes: &[u8]) -> u64 {
    let attempt = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes == payload(attempt), "a value came back changed");
    attempt
}

/// Writers and readers at work.
struct Work {
    history: Arc<History>,
    attempts: Arc<AtomicU64>,
    acknowledged: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Work {
    /// Two writers race to create the same keys, two replace a few, two read: each through a client of its own.
    async fn start(cluster: &TestCluster, namespace: &str) -> Self {
        let mut work = Self {
            history: Arc::default(),
            attempts: Arc::default(),
            acknowledged: Arc::default(),
            stop: Arc::default(),
            tasks: Vec::new(),
        };
        for worker in 0..6 {
            let blocks = cluster.client().await.namespace(namespace).await.unwrap();
            let hand = Hand {
                blocks,
                history: Arc::clone(&work.history),
                attempts: Arc::clone(&work.attempts),
                acknowledged: Arc::clone(&work.acknowledged),
            };
            let stop = Arc::clone(&work.stop);
            work.tasks.push(tokio::spawn(async move {
                let mut seed = Seed::draw();
                let mut next = 0;
                while !stop.load(Ordering::Relaxed) {
                    match worker {
                        0 | 1 => {
                            hand.write(&format!("once-{next}"), PutMode::Create).await;
                            next += 1;
                        }
                        2 | 3 => hand.write(&format!("hot-{}", seed.below(HOT)), PutMode::Replace).await,
                        _ => hand.read(&format!("hot-{}", seed.below(HOT))).await,
                    }
                }
            }));
        }
        work
    }

    /// Waits until `count` more writes are acknowledged.
    async fn more(&self, count: u64) {
        let from = self.acknowledged.load(Ordering::Relaxed);
        soon(format!("{count} more writes are acknowledged"), async || {
            assert!(self.tasks.iter().all(|task| !task.is_finished()), "a worker has ended");
            (self.acknowledged.load(Ordering::Relaxed) >= from + count).then_some(())
        })
        .await;
    }
}

/// Somebody who writes and reads, and keeps book.
struct Hand {
    blocks: Namespace,
    history: Arc<History>,
    attempts: Arc<AtomicU64>,
    acknowledged: Arc<AtomicU64>,
}

impl Hand {
    async fn write(&self, key: &str, mode: PutMode) {
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        let began = self.history.moment();
        let existed = |version: Version| What::Existed { attempt, version };
        let what = match self.blocks.put_with(key, payload(attempt), mode).await {
            Ok(version) => {
                self.acknowledged.fetch_add(1, Ordering::Relaxed);
                What::Written { attempt, version }
            }
            // It may have happened, or never: nothing follows.
            Err(PutError::Indeterminate { .. }) => return,
            Err(PutError::Exists { current }) if mode == PutMode::Create => existed(current),
            Err(PutError::StaleVersion { current }) if mode == PutMode::Replace => existed(current),
            Err(PutError::Deadline { .. } | PutError::Call(_) | PutError::TooFewHolders { .. }) => {
                What::Refused { attempt }
            }
            Err(other) => panic!("{key}: {other}"),
        };
        self.history.ended(key, began, what);
    }

    async fn read(&self, key: &str) {
        let began = self.history.moment();
        // What was not answered says nothing.
        if let Ok(found) = self.blocks.fresh().get(key).await {
            let seen = found.map(|value| (attempt_of(&value.bytes), value.version));
            self.history.ended(key, began, What::Seen(seen));
        }
    }
}

/// Twenty kills with load between them. Without the guard that a leader acknowledges only what a quorum has synced, values are lost; without
/// a read index, fresh reads go back; without the outcomes that a shard remembers, a create that is sent again wins twice.
#[tokio::test]
async fn nothing_acknowledged_is_lost_and_no_key_goes_back_while_the_leader_is_killed_twenty_times() {
    let mut cluster = TestCluster::start().await;
    let (client, blocks) = cluster.namespace().await;
    let work = Work::start(&cluster, &blocks.info().name).await;
    work.more(BETWEEN).await;
    for kill in 0..rounds(KILLS) {
        // The shard's, and now and then the directory's.
        let group = if kill % 5 == 4 { DIRECTORY } else { SHARD };
        let leader = cluster.leader(group, PATIENCE).await.unwrap();
        cluster.kill(leader, Signal::KILL).await.unwrap();
        // By turns it comes back at once, or when the others have gone on without it.
        if kill % 2 == 0 {
            work.more(BETWEEN).await;
        }
        cluster.restart(leader).unwrap();
        work.more(BETWEEN).await;
    }
    cluster.wait_ready(PATIENCE).await.unwrap();
    work.stop.store(true, Ordering::Relaxed);
    for task in work.tasks {
        task.await.unwrap();
    }
    // Through a client that wrote nothing of it.
    let hand = Hand {
        blocks: cluster.client().await.namespace(&blocks.info().name).await.unwrap(),
        history: Arc::clone(&work.history),
        attempts: work.attempts,
        acknowledged: work.acknowledged,
    };
    let before = work.history.count();
    let keys = work.history.keys();
    for key in &keys {
        hand.read(key).await;
    }
    assert_eq!(work.history.count(), before + keys.len(), "every key can be read again");
    let wrongs = work.history.wrongs(|key| key.starts_with("once-"));
    assert!(wrongs.is_empty(), "of {before} operations: {wrongs:#?}");
    eprintln!("{before} operations on {} keys", keys.len());
    client.close().await.unwrap();
    cluster.agree().await;
}
