//! Load: writers that create keys as fast as they can and remember what was acknowledged.

use quarry_client::{Client, DeleteError, Namespace, PutError, PutItem};
use quarry_tests::{Seed, seed::pattern, soon};
use quarry_wire::{key::Key, version::Version};
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
use tokio::task::JoinHandle;

const WRITERS: u64 = 3;
const BATCH: u64 = 6;
const BYTES: usize = 3_000;

/// What is known about the keys that were written.
#[derive(Debug, Default)]
struct Memory {
    /// There, in this version.
    acknowledged: Vec<(u64, Version)>,
    /// Deleted, acknowledged.
    deleted: Vec<u64>,
    /// Absent or whole.
    unsure: Vec<u64>,
}

/// Running writers.
pub(crate) struct Load {
    memory: Arc<Mutex<Memory>>,
    acknowledged: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
}

fn key(number: u64) -> Key {
    Key::new(format!("key-{number}")).expect("such a key is short")
}

impl Load {
    pub(crate) fn start(blocks: &Namespace) -> Self {
        let load =
            Self { memory: Arc::default(), acknowledged: Arc::default(), stop: Arc::default(), tasks: Vec::new() };
        let mut tasks = Vec::new();
        for writer in 0..WRITERS {
            let (memory, acknowledged) = (Arc::clone(&load.memory), Arc::clone(&load.acknowledged));
            let (stop, blocks) = (Arc::clone(&load.stop), blocks.clone());
            tasks.push(tokio::spawn(async move {
                let mut seed = Seed::draw();
                let mut next = writer << 32;
                while !stop.load(Ordering::Relaxed) {
                    let numbers: Vec<u64> = (next..next + BATCH).collect();
                    next += BATCH;
                    let items =
                        numbers.iter().map(|number| PutItem::create(key(*number), pattern(*number, BYTES))).collect();
                    let results = blocks.put_many(items).await;
                    let mut there = Vec::new();
                    for (number, result) in numbers.into_iter().zip(results) {
                        match result {
                            Ok(version) => there.push((number, version)),
                            // Nobody else writes these keys: `Exists` would be our own write, forgotten.
                            Err(
                                error @ (PutError::Exists { .. }
                                | PutError::StaleVersion { .. }
                                | PutError::CompareFailed { .. }),
                            ) => {
                                panic!("key-{number}: {error}")
                            }
                            Err(_) => memory.lock().unwrap().unsure.push(number),
                        }
                    }
                    acknowledged.fetch_add(there.len() as u64, Ordering::Relaxed);
                    // Some are deleted again.
                    if !there.is_empty() && seed.below(4) == 0 {
                        let (number, version) = there.swap_remove(seed.below(there.len()));
                        match blocks.delete(key(number)).await {
                            Ok(Some(deleted)) => {
                                assert_eq!(deleted, version);
                                memory.lock().unwrap().deleted.push(number);
                            }
                            Ok(None) => panic!("key-{number} was acknowledged and is not there"),
                            Err(DeleteError::Indeterminate { .. } | DeleteError::Call(_)) => {
                                memory.lock().unwrap().unsure.push(number);
                            }
                            Err(other) => panic!("key-{number}: {other}"),
                        }
                    }
                    memory.lock().unwrap().acknowledged.extend(there);
                }
            }));
        }
        Self { tasks, ..load }
    }

    /// Waits until `count` more values are acknowledged.
    pub(crate) async fn more(&self, count: u64) {
        let from = self.acknowledged.load(Ordering::Relaxed);
        soon(format!("{count} more values are acknowledged"), async || {
            assert!(self.tasks.iter().all(|task| !task.is_finished()), "a writer has ended");
            (self.acknowledged.load(Ordering::Relaxed) >= from + count).then_some(())
        })
        .await;
    }

    /// Ends the writers.
    pub(crate) async fn stop(self) -> Written {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.expect("no writer met something impossible");
        }
        Written(std::mem::take(&mut self.memory.lock().unwrap()))
    }
}

/// What must be there.
pub(crate) struct Written(Memory);

impl Written {
    pub(crate) fn count(&self) -> usize {
        self.0.acknowledged.len()
    }

    /// How many operations were not acknowledged.
    pub(crate) fn failed(&self) -> usize {
        self.0.unsure.len()
    }

    /// Deletes all that may be there, so that the keys can be created again.
    pub(crate) async fn remove_all(self, blocks: &Namespace) {
        let Memory { acknowledged, unsure, .. } = self.0;
        let keys: Vec<Key> = acknowledged.into_iter().map(|(number, _)| number).chain(unsure).map(key).collect();
        for part in keys.chunks(1_000) {
            for result in blocks.delete_many(part).await {
                result.unwrap();
            }
        }
    }

    /// Checks all of it through a client that wrote nothing of it.
    pub(crate) async fn check(&self, client: &Client, namespace: &str) {
        let blocks = client.namespace(namespace).await.unwrap().fresh();
        let Memory { acknowledged, deleted, unsure } = &self.0;
        for part in acknowledged.chunks(1_000) {
            let keys: Vec<Key> = part.iter().map(|(number, _)| key(*number)).collect();
            for ((number, version), result) in part.iter().zip(blocks.get_many(&keys).await) {
                let value = result.unwrap().unwrap_or_else(|| panic!("key-{number} was acknowledged and is lost"));
                assert_eq!(value.version, *version);
                assert!(value.bytes == pattern(*number, BYTES), "key-{number} came back changed");
            }
        }
        let keys: Vec<Key> = deleted.iter().map(|number| key(*number)).collect();
        for (number, result) in deleted.iter().zip(blocks.get_many(&keys).await) {
            assert!(result.unwrap().is_none(), "key-{number} was deleted and is back");
        }
        let keys: Vec<Key> = unsure.iter().map(|number| key(*number)).collect();
        for (number, result) in unsure.iter().zip(blocks.get_many(&keys).await) {
            if let Some(value) = result.unwrap() {
                assert!(value.bytes == pattern(*number, BYTES), "key-{number} is there, but not whole");
            }
        }
    }
}
