//! The log's disk in a simulated world: what was written can be read at once, and is forgotten in a crash unless it was synced.
//! Plays the committer's thread as a task, with rounds like its own (`store/committer.rs`).

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use sled::IVec;
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};

use super::{between, chance, note, roll};
use crate::store::committer::{Committer, Durable, Job, Waiter};
use crate::store::database::Batch;

/// How long a sync takes, and whether it is waited for.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// The shortest sync.
    pub least: Duration,
    /// The longest sync.
    pub most: Duration,
    /// A mutant, to prove that it would be found: writes are acknowledged before they are synced.
    pub acknowledged_early: bool,
}

impl Default for Pace {
    fn default() -> Self {
        Self { least: Duration::from_millis(1), most: Duration::from_millis(12), acknowledged_early: false }
    }
}

/// How long what nobody waits for may stay unsynced, as in the committer.
const LAZY_ROUND: Duration = Duration::from_millis(100);

const TREES: usize = 2;
type Trees = [BTreeMap<IVec, IVec>; TREES];

/// One node's disk, over all its lives. Cloning shares it.
#[derive(Clone)]
pub struct Disk(Arc<Mutex<State>>);

struct State {
    /// How often the node crashed: what was opened in an earlier life is dead.
    life: u64,
    pace: Pace,
    synced: Trees,
    /// What was written since, in order: tree and writes of each batch.
    unsynced: VecDeque<(usize, Batch)>,
    /// Synced and unsynced together.
    live: Trees,
    /// Batches that were synced in this life.
    taken: u64,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.0.lock();
        f.debug_struct("Disk").field("life", &state.life).field("unsynced", &state.unsynced.len()).finish()
    }
}

fn write(trees: &mut Trees, tree: usize, batch: Batch) {
    for (key, value) in batch.into_writes() {
        match value {
            Some(value) => trees[tree].insert(key, value),
            None => trees[tree].remove(&key),
        };
    }
}

impl Disk {
    /// An empty one.
    #[must_use]
    pub fn new(pace: Pace) -> Self {
        Self(Arc::new(Mutex::new(State {
            life: 0,
            pace,
            synced: Trees::default(),
            unsynced: VecDeque::new(),
            live: Trees::default(),
            taken: 0,
        })))
    }

    /// The node's process ends here and now, and the power with it. What was not synced is gone, half of the time but for a prefix.
    /// Whoever has the disk open finds it dead.
    pub fn crash(&self) {
        let mut state = self.0.lock();
        let State { synced, unsynced, .. } = &mut *state;
        let count = unsynced.len() as u64;
        let survive = if chance(500) { roll(count + 1) } else { 0 };
        for (tree, batch) in unsynced.drain(..).take(usize::try_from(survive).unwrap_or(usize::MAX)) {
            write(synced, tree, batch);
        }
        state.life += 1;
        state.live = state.synced.clone();
        note(format_args!("disk forgets {} of {count}", count - survive));
    }

    pub(crate) fn open(&self) -> (MemoryTree, MemoryTree, Life) {
        let life = Life { disk: self.clone(), life: self.0.lock().life };
        (MemoryTree { life: life.clone(), tree: 0 }, MemoryTree { life: life.clone(), tree: 1 }, life)
    }
}

/// A disk as one life of its node has it open.
#[derive(Clone)]
pub(crate) struct Life {
    disk: Disk,
    life: u64,
}

impl Life {
    fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> io::Result<R> {
        let mut state = self.disk.0.lock();
        if state.life == self.life { Ok(work(&mut state)) } else { Err(io::Error::other("the node crashed")) }
    }

    /// Everything written by now.
    fn mark(&self) -> io::Result<u64> {
        self.with(|state| state.taken + state.unsynced.len() as u64)
    }

    /// What was written before the mark is on the medium.
    fn sync(&self, mark: u64) -> io::Result<()> {
        self.with(|state| {
            while state.taken < mark
                && let Some((tree, batch)) = state.unsynced.pop_front()
            {
                write(&mut state.synced, tree, batch);
                state.taken += 1;
            }
        })
    }

    fn pace(&self) -> Pace {
        self.disk.0.lock().pace
    }
}

/// One tree, as one life of its node has it open.
pub(crate) struct MemoryTree {
    life: Life,
    tree: usize,
}

impl MemoryTree {
    pub(crate) fn get(&self, key: &[u8]) -> io::Result<Option<IVec>> {
        self.life.with(|state| state.live[self.tree].get(key).cloned())
    }

    pub(crate) fn apply(&self, batch: Batch) -> io::Result<()> {
        self.life.with(|state| {
            write(&mut state.live, self.tree, batch.clone());
            state.unsynced.push_back((self.tree, batch));
        })
    }

    pub(crate) fn range(&self, from: &[u8], to: &[u8]) -> std::vec::IntoIter<io::Result<(IVec, IVec)>> {
        let found = self.life.with(|state| {
            let range = state.live[self.tree]
                .range::<[u8], _>((std::ops::Bound::Included(from), std::ops::Bound::Included(to)));
            range.map(|(key, value)| Ok((key.clone(), value.clone()))).collect::<Vec<_>>()
        });
        found.unwrap_or_else(|error| vec![Err(error)]).into_iter()
    }
}

/// The committer of one life of a node.
pub(crate) fn start_committer(store: impl Durable + Sync, life: Life) -> Committer {
    let (jobs, queue) = mpsc::unbounded_channel();
    let fault = Arc::new(watch::Sender::new(None));
    tokio::spawn(run(store, life, queue, Arc::clone(&fault)));
    Committer::of_task(jobs, fault)
}

async fn run(
    store: impl Durable + Sync,
    life: Life,
    mut queue: mpsc::UnboundedReceiver<Job>,
    fault: Arc<watch::Sender<Option<String>>>,
) {
    let mut unsynced = false;
    loop {
        let first = if unsynced {
            match timeout(LAZY_ROUND, queue.recv()).await {
                Ok(Some(job)) => Some(job),
                Ok(None) => Some(Job::Stop),
                Err(_) => None,
            }
        } else {
            Some(queue.recv().await.unwrap_or(Job::Stop))
        };
        let idle = first.is_none();
        let mut waiting = Vec::new();
        let mut stop = false;
        for job in first.into_iter().chain(std::iter::from_fn(|| queue.try_recv().ok())) {
            match job {
                Job::Append(_, done) => waiting.push(Waiter::Openraft(done)),
                Job::Wait(_, done) => waiting.push(Waiter::Task(done)),
                Job::Lazy(_) => unsynced = true,
                Job::Purge { group, upto } => {
                    // All at once: the batches exist for the sake of latency.
                    while store.purge(group, upto).unwrap_or(false) {}
                    unsynced = true;
                }
                Job::Stop => stop = true,
            }
        }
        if waiting.is_empty() && !stop && !idle {
            continue;
        }
        let pace = life.pace();
        if pace.acknowledged_early {
            for waiter in waiting {
                waiter.tell(Ok(()));
            }
            // And is synced some time.
            if let Ok(mark) = life.mark() {
                let life = life.clone();
                tokio::spawn(async move {
                    sleep(between(pace.least, pace.most)).await;
                    // The node may have crashed meanwhile: then it is lost, which nobody is told.
                    drop(life.sync(mark));
                });
            }
            unsynced = false;
            if stop {
                return;
            }
            continue;
        }
        let synced = match life.mark() {
            Ok(mark) => {
                sleep(between(pace.least, pace.most)).await;
                life.sync(mark)
            }
            Err(error) => Err(error),
        };
        unsynced = false;
        if let Err(error) = &synced {
            fault.send_replace(Some(error.to_string()));
        }
        let failed = fault.borrow().clone();
        for waiter in waiting {
            waiter.tell(failed.as_deref().map_or(Ok(()), Err));
        }
        if stop || failed.is_some() {
            return;
        }
    }
}
