//! A snapshot that arrives: kept aside, chunk by chunk, until it is whole, over broken connections and restarts of this node.
//!
//! ```text
//! <dir>/snapshots/group-<g>/<length>-<digest>.part    the first bytes of a snapshot file of this length and digest
//! ```
//!
//! Decides what is kept of it: of each group one, that which was sent last; it goes when another comes, when this node wrote a snapshot of
//! its own, or when it is whole and not what it was said to be. Only chunks whose checksum was right are written, so what is there is the
//! beginning; after a power cut it may not be, which the digest shows in the end (*Whole or absent*).

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::time::timeout;

use super::snapshot::SnapshotFile;
use crate::ids::GroupId;

/// The ending of the names of such files.
const ENDING: &str = "part";
/// How long another stream of the same group may take to notice that it is over.
const PATIENCE: Duration = Duration::from_secs(5);

/// Which snapshot file: two with the same are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) length: u64,
    /// The digest at its end.
    pub(crate) digest: [u8; 32],
}

impl Identity {
    fn name(&self) -> String {
        let mut name = format!("{}-", self.length);
        for byte in self.digest {
            write!(name, "{byte:02x}").expect("a string takes everything");
        }
        format!("{name}.{ENDING}")
    }
}

/// What arrives for one group.
pub(crate) struct Arrivals {
    group: GroupId,
    dir: PathBuf,
    /// Held while one arrives and until it is installed.
    turn: Arc<Mutex<()>>,
}

impl Arrivals {
    pub(crate) fn new(group: GroupId, dir: PathBuf) -> Self {
        Self { group, dir, turn: Arc::default() }
    }

    /// How much of it is there.
    pub(crate) fn arrived(&self, which: Identity) -> io::Result<u64> {
        match fs::metadata(self.dir.join(which.name())) {
            Ok(found) => Ok(found.len().min(which.length)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Waits until no other is arriving; nothing if that takes too long.
    pub(crate) async fn turn(&self) -> Option<OwnedMutexGuard<()>> {
        timeout(PATIENCE, Arc::clone(&self.turn).lock_owned()).await.ok()
    }

    /// Goes on at `offset`, or begins; what there is of others is removed. Nothing if less than that is there. Blocks.
    pub(crate) fn begin(
        &self,
        turn: OwnedMutexGuard<()>,
        which: Identity,
        offset: u64,
    ) -> io::Result<Option<Arriving>> {
        let path = self.dir.join(which.name());
        for other in parts(&self.dir)?.into_iter().filter(|other| *other != path) {
            fs::remove_file(other)?;
        }
        let mut file = File::options().create(true).truncate(false).read(true).write(true).open(&path)?;
        if file.metadata()?.len() < offset || offset > which.length {
            return Ok(None);
        }
        file.set_len(offset)?;
        file.seek(SeekFrom::End(0))?;
        Ok(Some(Arriving { group: self.group, which, path, file, have: offset, _turn: turn }))
    }

    /// Removes what began to arrive, unless it goes on just now: this node has a newer snapshot of its own. Blocks.
    pub(crate) fn forget(&self) -> io::Result<()> {
        let Ok(_turn) = self.turn.try_lock() else { return Ok(()) };
        parts(&self.dir)?.into_iter().try_for_each(fs::remove_file)
    }
}

fn parts(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for item in fs::read_dir(dir)? {
        let path = item?.path();
        if path.extension().is_some_and(|ending| ending == ENDING) {
            found.push(path);
        }
    }
    Ok(found)
}

/// One snapshot on its way. What was written stays when this is dropped.
pub(crate) struct Arriving {
    group: GroupId,
    which: Identity,
    path: PathBuf,
    file: File,
    have: u64,
    _turn: OwnedMutexGuard<()>,
}

impl Arriving {
    /// Adds a chunk whose checksum was right; whether it fits. Blocks.
    pub(crate) fn append(&mut self, chunk: &[u8]) -> io::Result<bool> {
        if self.have + chunk.len() as u64 > self.which.length {
            return Ok(false);
        }
        self.file.write_all(chunk)?;
        self.have += chunk.len() as u64;
        Ok(true)
    }

    /// The whole file, synced and checked. If it is not what it was said to be, it is removed: the next attempt begins anew. Keep `self` until
    /// the file has found its place. Blocks.
    pub(crate) fn check(&self) -> io::Result<Option<SnapshotFile>> {
        if self.have < self.which.length {
            return Ok(None);
        }
        self.file.sync_all()?;
        let opened = SnapshotFile::open(&self.path, self.group);
        match opened {
            Ok(file) if file.identity() == self.which => Ok(Some(file)),
            Ok(_) => self.refuse("it has another digest"),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => self.refuse(&error.to_string()),
            Err(error) => Err(error),
        }
    }

    fn refuse(&self, why: &str) -> io::Result<Option<SnapshotFile>> {
        tracing::error!(group = %self.group, why, "a snapshot arrived whole and is not what was sent");
        fs::remove_file(&self.path)?;
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::SnapshotWriter;
    use crate::store::snapshot::Snapshots;
    use crate::types::{StoredMembership, log_id};
    use std::io::Read;

    const GROUP: GroupId = GroupId(7);

    struct Bytes(Vec<u8>);

    impl SnapshotWriter for Bytes {
        fn write_to(self: Box<Self>, out: &mut dyn Write) -> io::Result<()> {
            out.write_all(&self.0)
        }
    }

    /// A snapshot as some other node has it, and its bytes.
    fn sent(index: u64) -> (Identity, Vec<u8>) {
        let dir = tempfile::tempdir().unwrap();
        let there = Snapshots::open(dir.path().to_owned(), GROUP).unwrap();
        let state = Box::new(Bytes(vec![u8::try_from(index).unwrap(); 5_000]));
        let file = there.write(Some(&log_id(1, index)), &StoredMembership::default(), state).unwrap();
        let mut bytes = Vec::new();
        file.bytes(0).unwrap().read_to_end(&mut bytes).unwrap();
        (file.identity(), bytes)
    }

    async fn begin(arrivals: &Arrivals, which: Identity, offset: u64) -> Option<Arriving> {
        arrivals.begin(arrivals.turn().await.unwrap(), which, offset).unwrap()
    }

    fn left(dir: &Path) -> usize {
        parts(dir).unwrap().len()
    }

    #[tokio::test]
    async fn what_arrived_before_a_break_or_a_restart_need_not_be_sent_again() {
        let dir = tempfile::tempdir().unwrap();
        let (which, bytes) = sent(9);
        let here = Snapshots::open(dir.path().to_owned(), GROUP).unwrap();
        let mut arriving = begin(here.arrivals(), which, 0).await.unwrap();
        assert!(arriving.append(&bytes[..3_000]).unwrap());
        assert!(arriving.check().unwrap().is_none(), "not whole yet");
        drop((arriving, here));

        let here = Snapshots::open(dir.path().to_owned(), GROUP).unwrap();
        assert_eq!(here.arrivals().arrived(which).unwrap(), 3_000);
        assert!(begin(here.arrivals(), which, 3_001).await.is_none(), "that much is not there");
        // The sender may begin before what is there.
        let mut arriving = begin(here.arrivals(), which, 2_000).await.unwrap();
        assert!(arriving.append(&bytes[2_000..]).unwrap());
        assert!(!arriving.append(b"more").unwrap(), "more than was announced");
        let file = arriving.check().unwrap().unwrap();
        assert_eq!((file.identity(), file.meta().last_log_id), (which, Some(log_id(1, 9))));
        here.adopt(file).unwrap();
        assert_eq!(here.current().unwrap().unwrap().identity(), which);
        assert_eq!(left(dir.path()), 0);
    }

    #[tokio::test]
    async fn of_each_group_one_unfinished_snapshot_is_kept_and_none_beside_a_newer_one_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let here = Snapshots::open(dir.path().to_owned(), GROUP).unwrap();
        let ((first, bytes), (second, _)) = (sent(3), sent(4));
        begin(here.arrivals(), first, 0).await.unwrap().append(&bytes[..100]).unwrap();
        let arriving = begin(here.arrivals(), second, 0).await.unwrap();
        assert_eq!((here.arrivals().arrived(first).unwrap(), left(dir.path())), (0, 1), "the sender has another now");
        here.write(Some(&log_id(1, 5)), &StoredMembership::default(), Box::new(Bytes(Vec::new()))).unwrap();
        assert_eq!(left(dir.path()), 1, "it is still arriving");
        drop(arriving);
        here.write(Some(&log_id(1, 6)), &StoredMembership::default(), Box::new(Bytes(Vec::new()))).unwrap();
        assert_eq!(left(dir.path()), 0);
    }

    #[tokio::test]
    async fn what_arrived_whole_and_is_not_what_was_announced_is_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let here = Snapshots::open(dir.path().to_owned(), GROUP).unwrap();
        let (which, mut bytes) = sent(3);
        bytes[1_000] ^= 1;
        let mut arriving = begin(here.arrivals(), which, 0).await.unwrap();
        arriving.append(&bytes).unwrap();
        assert!(arriving.check().unwrap().is_none());
        drop(arriving);
        // A whole snapshot, but another.
        let (_, other) = sent(4);
        let mut arriving = begin(here.arrivals(), which, 0).await.unwrap();
        arriving.append(&other).unwrap();
        assert!(arriving.check().unwrap().is_none());
        assert_eq!((here.arrivals().arrived(which).unwrap(), left(dir.path())), (0, 0));
    }
}
