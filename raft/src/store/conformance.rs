//! openraft's own conformance suite, on a database that is closed and opened again before every answer about what it
//! holds: what is only in memory does not count.

use std::fmt::Debug;
use std::io;
use std::ops::RangeBounds;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use openraft::storage::{IOFlushed, RaftLogStorage};
use openraft::testing::log::{StoreBuilder, Suite};
use openraft::{LogState, OptionalSend, RaftLogReader, StorageError};
use parking_lot::Mutex;

use super::Store;
use super::log::GroupLog;
use super::snapshot::Snapshots;
use crate::config::HostConfig;
use crate::ids::{GroupId, LogIndex, RaftNodeId};
use crate::machine::{Machine, SnapshotWriter};
use crate::replica::{Cell, Replica};
use crate::types::{Entry, LogId, Types, Vote};

const GROUP: GroupId = GroupId(3);

/// Counts commands.
#[derive(Clone, Default)]
struct Counter(u64);

impl Machine for Counter {
    type Outcome = u64;

    fn apply(&mut self, _: LogIndex, _: &[u8]) -> u64 {
        self.0 += 1;
        self.0
    }

    fn snapshot(&self) -> Box<dyn SnapshotWriter> {
        Box::new(Self(self.0))
    }

    fn restore(&mut self, input: &mut dyn io::Read) -> io::Result<()> {
        let mut bytes = [0; 8];
        input.read_exact(&mut bytes)?;
        self.0 = u64::from_le_bytes(bytes);
        Ok(())
    }

    fn hash(&self) -> [u8; 32] {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&self.0.to_le_bytes());
        hash
    }
}

impl SnapshotWriter for Counter {
    fn write_to(self: Box<Self>, out: &mut dyn io::Write) -> io::Result<()> {
        out.write_all(&self.0.to_le_bytes())
    }
}

/// A log whose database is reopened whenever the suite asks what it holds.
#[derive(Clone)]
struct Reopened {
    config: HostConfig,
    open: Arc<Mutex<(Arc<Store>, GroupLog)>>,
    count: Arc<AtomicUsize>,
}

impl Reopened {
    fn new(config: HostConfig, count: Arc<AtomicUsize>) -> Self {
        let open = Arc::new(Mutex::new(open(&config)));
        Self { config, open, count }
    }

    fn current(&self) -> GroupLog {
        self.open.lock().1.clone()
    }

    fn reopen(&self) -> GroupLog {
        let mut current = self.open.lock();
        current.0.close();
        *current = open(&self.config);
        self.count.fetch_add(1, Ordering::Relaxed);
        current.1.clone()
    }
}

fn open(config: &HostConfig) -> (Arc<Store>, GroupLog) {
    let store = Arc::new(Store::open(config).unwrap());
    let log = GroupLog::open(&store, GROUP).unwrap();
    (store, log)
}

impl RaftLogReader<Types> for Reopened {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<Entry>, io::Error> {
        self.reopen().try_get_log_entries(range).await
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> Result<Vec<Entry>, io::Error> {
        self.reopen().limited_get_log_entries(start, end).await
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        self.reopen().read_vote().await
    }
}

impl RaftLogStorage<Types> for Reopened {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<Types>, io::Error> {
        self.reopen().get_log_state().await
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        self.current().save_vote(vote).await
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), io::Error> {
        self.current().save_committed(committed).await
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, io::Error> {
        self.reopen().read_committed().await
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<Types>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        self.current().append(entries, callback).await
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> Result<(), io::Error> {
        self.current().truncate_after(last).await
    }

    async fn purge(&mut self, upto: LogId) -> Result<(), io::Error> {
        self.current().purge(upto).await
    }
}

struct Builder(Arc<AtomicUsize>);

impl StoreBuilder<Types, Reopened, Replica<Counter>, tempfile::TempDir> for Builder {
    async fn build(&self) -> Result<(tempfile::TempDir, Reopened, Replica<Counter>), StorageError<Types>> {
        let dir = tempfile::tempdir().unwrap();
        let config = HostConfig { log_cache_bytes: 8 << 20, ..HostConfig::new(RaftNodeId(1), dir.path().join("node")) };
        let snapshots = Snapshots::open(dir.path().join("snapshots"), GROUP).unwrap();
        let log = Reopened::new(config, Arc::clone(&self.0));
        Ok((dir, log, Replica::new(Cell::new(Counter::default()), snapshots)))
    }
}

#[test]
fn the_reopened_log_passes_openrafts_conformance_suite() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    runtime.block_on(Suite::test_all(Builder(Arc::clone(&count)))).unwrap();
    assert!(count.load(Ordering::Relaxed) > 100, "the database was hardly ever reopened");
}
