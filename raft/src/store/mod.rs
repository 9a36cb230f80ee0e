//! A node's folder: who owns it, and the database of logs and votes in it.
//!
//! ```text
//! <dir>/FORMAT                    "quarry-raft 2\nnode 3\n", and "generation 2\n" if it is not the first
//! <dir>/LOCK                      locked while a process uses the folder
//! <dir>/log/                      sled database (keys.rs)
//! <dir>/journal-{0,1}             its latest writes, synced before anyone is told (journal.rs)
//! <dir>/snapshots/group-<g>/      snapshot files (snapshot.rs), and one that arrives (arrival.rs)
//! ```
//!
//! The database holds logs and votes only, and is durable up to what the journal still holds. State machines live in memory: in the same database they make it grow
//! without bound.

pub(crate) mod arrival;
pub(crate) mod committer;
#[cfg(test)]
mod conformance;
pub(crate) mod database;
pub(crate) mod disk;
pub(crate) mod journal;
pub(crate) mod keys;
pub(crate) mod log;
#[cfg(test)]
mod recovery;
pub(crate) mod snapshot;

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};

use crate::config::HostConfig;
use crate::error::{Doing, RaftError};
use crate::generation::{self, Generation};
use crate::ids::{GroupId, RaftNodeId};
use committer::{Committer, Durable};
use database::{Batch, Medium, Tree};
use journal::{Body, Kind, Opened};

const FORMAT: &str = "quarry-raft 2";
/// A folder from before there was a journal: its database alone is durable.
const FORMAT_WITHOUT_JOURNAL: &str = "quarry-raft 1";
/// How many keys one batch of a purge removes.
const REMOVE_BATCH: usize = 1_000;

/// The open database. Dropped on close, so that the folder can be opened again by this process.
pub(crate) struct Open {
    pub(crate) log: Tree,
    pub(crate) meta: Tree,
    medium: Medium,
}

/// Shared with the committer thread.
struct Files {
    open: RwLock<Option<Open>>,
}

/// How often and after which pause the database is tried again that was closed a moment ago.
const CLOSING_TRIES: u32 = 100;
const CLOSING_PAUSE: Duration = Duration::from_millis(20);

/// One node's log database and its committer.
pub(crate) struct Store {
    dir: PathBuf,
    generation: Arc<Generation>,
    files: Arc<Files>,
    committer: Committer,
}

impl Store {
    pub(crate) fn open(config: &HostConfig) -> Result<Self, RaftError> {
        let dir = config.dir.clone();
        disk::create_dir(&dir).doing(|| format!("make {}", dir.display()))?;
        let lock = lock(&dir)?;
        let (found, generation) = check_format(&dir, config.node)?;
        let path = dir.join("log");
        let open = || -> io::Result<Open> {
            let db = open_database(&path, config.log_cache_bytes)?;
            let (log, meta) = (db.open_tree("log")?, db.open_tree("meta")?);
            db.flush()?;
            File::open(path.join("db"))?.sync_all()?;
            disk::sync_dir(&path)?;
            disk::sync_dir(&dir)?;
            let (log, meta) = (Tree::Sled(log), Tree::Sled(meta));
            // A second handle of the database file: its own `flush` only asks for write-out, which is not safe from power loss.
            let (file, flushed, sync) = (File::open(path.join("db"))?, db.clone(), Arc::clone(&config.disk));
            let settle = move || {
                flushed.flush()?;
                sync.sync_data(&file)
            };
            let again = |kind, key: &[u8], value: &[u8]| write_again(&log, &meta, kind, key, value);
            let journal = Opened::open(&dir)?.begin(again, Box::new(settle), Arc::clone(&config.disk))?;
            let medium = Medium::Folder { journal: Mutex::new(journal), db, _lock: lock };
            Ok(Open { log, meta, medium })
        };
        let open = open().doing(|| format!("open the log database {}", path.display()))?;
        if found == FORMAT_WITHOUT_JOURNAL {
            // From here on a build that knows no journal must not open it.
            write_format(&dir, config.node, generation)?;
        }
        let files = Arc::new(Files { open: RwLock::new(Some(open)) });
        let committer = Committer::start(Arc::clone(&files)).doing(|| "start the committer thread".to_owned())?;
        let generation = Generation::of_folder(&dir, config.node, generation);
        Ok(Self { dir, generation, files, committer })
    }

    /// A store in memory: what it forgets when its node crashes is decided by `disk`.
    #[cfg(feature = "sim")]
    pub(crate) fn simulated(config: &HostConfig, disk: &crate::sim::Disk) -> Self {
        let (log, meta, life) = disk.open();
        let open = Open { log: Tree::Memory(log), meta: Tree::Memory(meta), medium: Medium::Memory };
        let files = Arc::new(Files { open: RwLock::new(Some(open)) });
        let committer = crate::sim::disk::start_committer(Arc::clone(&files), life);
        Self { dir: config.dir.clone(), generation: Generation::of_memory(generation::FIRST), files, committer }
    }

    pub(crate) fn generation(&self) -> Arc<Generation> {
        Arc::clone(&self.generation)
    }

    pub(crate) fn committer(&self) -> &Committer {
        &self.committer
    }

    pub(crate) fn snapshot_dir(&self, group: GroupId) -> PathBuf {
        self.dir.join("snapshots").join(format!("group-{group}"))
    }

    /// Makes everything durable and lets go of the folder. Blocks for as long as that takes.
    pub(crate) fn close(&self) {
        self.committer.stop();
        let open = self.files.open.write().take();
        if let Some(open) = open.filter(|_| !self.committer.has_failed()) {
            open.medium.come_to_rest();
        }
    }

    pub(crate) fn with<R>(&self, work: impl FnOnce(&Open) -> io::Result<R>) -> io::Result<R> {
        self.files.with(work)
    }
}

impl Files {
    fn with<R>(&self, work: impl FnOnce(&Open) -> io::Result<R>) -> io::Result<R> {
        self.open.read().as_ref().map_or_else(|| Err(io::Error::other("the log is closed")), work)
    }
}

impl Durable for Arc<Files> {
    fn make_durable(&self, bodies: &[Body]) -> io::Result<()> {
        self.with(|open| match &open.medium {
            Medium::Folder { journal, .. } => journal.lock().write(bodies),
            #[cfg(feature = "sim")]
            Medium::Memory => Ok(()),
        })
    }

    fn purge(&self, group: GroupId, upto: u64) -> io::Result<bool> {
        self.with(|open| {
            let range = keys::log_key(group, 0, 0)..=keys::log_key(group, upto, u8::MAX);
            remove_batch(&open.log, open.log.keys(range), REMOVE_BATCH)
        })
    }
}

/// Removes the first `limit` keys of a range in one batch. Returns whether more may follow.
fn remove_batch(tree: &Tree, keys: impl Iterator<Item = io::Result<sled::IVec>>, limit: usize) -> io::Result<bool> {
    let mut batch = Batch::default();
    let mut count = 0;
    for key in keys.take(limit) {
        batch.remove(key?);
        count += 1;
    }
    tree.apply(batch)?;
    Ok(count == limit)
}

/// Gives the database a write that the journal held.
fn write_again(log: &Tree, meta: &Tree, kind: Kind, key: &[u8], value: &[u8]) -> io::Result<()> {
    match kind {
        Kind::Log => log.insert(key, value),
        Kind::Meta => meta.insert(key, value),
        Kind::Cut => {
            let (group, from) = keys::group_and_index(key)?;
            cut(log, group, from)
        }
    }
}

/// Ends a group's log before `from`. In one batch, so that a crash leaves no hole and no half of an entry. What is cut off was never
/// committed, so it is short.
fn cut(log: &Tree, group: GroupId, from: u64) -> io::Result<()> {
    let range = keys::log_key(group, from, 0)..=keys::log_key(group, u64::MAX, u8::MAX);
    remove_batch(log, log.keys(range), usize::MAX).map(drop)
}

/// Opens the database. Threads of its own may hold the file for a moment after it was closed in this process; other processes are kept out by
/// our own lock.
fn open_database(path: &Path, cache_bytes: u64) -> io::Result<sled::Db> {
    let mut tries = 0;
    loop {
        match sled::Config::new().path(path).flush_every_ms(None).cache_capacity(cache_bytes).open() {
            Err(sled::Error::Io(error)) if tries < CLOSING_TRIES && error.to_string().contains("acquire lock") => {
                tries += 1;
                std::thread::park_timeout(CLOSING_PAUSE);
            }
            outcome => return Ok(outcome?),
        }
    }
}

fn lock(dir: &Path) -> Result<File, RaftError> {
    let path = dir.join("LOCK");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .doing(|| format!("open {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(RaftError::Locked { dir: dir.to_owned() }),
        Err(TryLockError::Error(error)) => Err(error).doing(|| format!("lock {}", path.display())),
    }
}

pub(crate) fn write_format(dir: &Path, node: RaftNodeId, generation: u32) -> Result<(), RaftError> {
    let path = dir.join("FORMAT");
    let mut text = format!("{FORMAT}\nnode {node}\n");
    if generation != generation::FIRST {
        text.push_str(&format!("generation {generation}\n"));
    }
    disk::write_small(&path, text.as_bytes()).doing(|| format!("write {}", path.display()))
}

/// What a folder says about itself.
pub(crate) struct Mark {
    pub(crate) format: &'static str,
    pub(crate) node: RaftNodeId,
    pub(crate) generation: u32,
}

/// Whose folder it is; none if nobody used it yet.
pub(crate) fn read_format(dir: &Path) -> Result<Option<Mark>, RaftError> {
    let path = dir.join("FORMAT");
    let wrong = |found: &str| RaftError::WrongVersion {
        dir: dir.to_owned(),
        expected: FORMAT.to_owned(),
        found: found.to_owned(),
    };
    let found = match std::fs::read_to_string(&path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return if dir.join("log").exists() { Err(wrong("a log without a FORMAT file")) } else { Ok(None) };
        }
        Err(error) => return Err(error).doing(|| format!("read {}", path.display())),
    };
    let mut lines = found.lines();
    let first = lines.next().unwrap_or_default();
    let known = [FORMAT, FORMAT_WITHOUT_JOURNAL].into_iter().find(|known| *known == first);
    let node = lines.next().and_then(|line| line.strip_prefix("node ")).and_then(|id| id.parse().ok());
    let generation = match lines.next() {
        None => Some(generation::FIRST),
        Some(line) => line.strip_prefix("generation ").and_then(|number| number.parse().ok()),
    };
    match (known, node, generation) {
        (Some(format), Some(node), Some(generation)) => Ok(Some(Mark { format, node: RaftNodeId(node), generation })),
        _ => Err(wrong(first)),
    }
}

/// The format and the generation of the folder; an empty one gets the newest and the first.
fn check_format(dir: &Path, node: RaftNodeId) -> Result<(&'static str, u32), RaftError> {
    match read_format(dir)? {
        None => write_format(dir, node, generation::FIRST).map(|()| (FORMAT, generation::FIRST)),
        Some(mark) if mark.node == node => Ok((mark.format, mark.generation)),
        Some(mark) => Err(RaftError::WrongNode { dir: dir.to_owned(), expected: node, found: mark.node }),
    }
}
