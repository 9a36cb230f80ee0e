//! Snapshots: whole states of a machine, as files.
//!
//! ```text
//! <dir>/snapshots/group-<g>/<index>-<term>.snap
//!   0      8   magic "QRYSNAP\n"
//!   8      4   storage version, u32 LE = 1
//!  12      4   group, u32 LE
//!  16      4   length h of the record, u32 LE
//!  20      h   postcard(SnapshotRecord): last entry, members
//!  20+h    n   the machine's state
//!  20+h+n  8   n, u64 LE
//!  +8     32   SHA-256 of all before
//! ```
//!
//! The same bytes travel to followers. Keeps *Whole or absent*: a file has its name only once it is complete and
//! synced, and its digest is checked before a machine reads it. The two newest are kept.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use super::arrival::{Arrivals, Identity};
use super::disk;
use super::keys::SnapshotRecord;
use crate::ids::GroupId;
use crate::machine::SnapshotWriter;
use crate::metrics;
use crate::types::{LogId, SnapshotMeta, StoredMembership, term_of};

const MAGIC: &[u8; 8] = b"QRYSNAP\n";
const VERSION: u32 = 1;
const FIXED_BYTES: u64 = 20;
const RECORD_BYTES_MAX: u32 = 1 << 20;
const TRAILER_BYTES: u64 = 40;
const KEPT: usize = 2;

/// A snapshot that is complete and was checked. It stays readable after its name is gone.
#[derive(Debug)]
pub(crate) struct SnapshotFile {
    path: PathBuf,
    file: File,
    meta: SnapshotMeta,
    state_at: u64,
    state_bytes: u64,
    length: u64,
    digest: [u8; 32],
}

impl SnapshotFile {
    /// Opens a file and checks all of it.
    pub(crate) fn open(path: &Path, group: GroupId) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        let damaged = |why: String| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", path.display()));
        if length < FIXED_BYTES + TRAILER_BYTES {
            return Err(damaged(format!("{length} bytes are too few for a snapshot")));
        }
        let mut fixed = [0; 20];
        file.read_exact(&mut fixed)?;
        let number = |at: usize| u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
        if &fixed[..8] != MAGIC || number(8) != VERSION {
            return Err(damaged(format!("not a snapshot of version {VERSION}")));
        }
        if number(12) != group.0 {
            return Err(damaged(format!("a snapshot of group {}, expected group {group}", number(12))));
        }
        let record_bytes = number(16);
        if record_bytes > RECORD_BYTES_MAX || FIXED_BYTES + u64::from(record_bytes) + TRAILER_BYTES > length {
            return Err(damaged(format!("a record of {record_bytes} bytes does not fit")));
        }
        let mut record = vec![0; record_bytes as usize];
        file.read_exact(&mut record)?;
        file.seek(SeekFrom::Start(0))?;

        let mut digest = Sha256::new();
        let mut reader = BufReader::with_capacity(1 << 20, &file);
        io::copy(&mut (&mut reader).take(length - 32), &mut HashWriter(&mut digest, io::sink()))?;
        let mut expected = [0; 32];
        reader.read_exact(&mut expected)?;
        if digest.finalize()[..] != expected {
            return Err(damaged("the digest does not match".to_owned()));
        }
        drop(reader);
        file.seek(SeekFrom::Start(length - TRAILER_BYTES))?;
        let mut state_bytes = [0; 8];
        file.read_exact(&mut state_bytes)?;
        let state_bytes = u64::from_le_bytes(state_bytes);
        let state_at = FIXED_BYTES + u64::from(record_bytes);
        if state_at + state_bytes + TRAILER_BYTES != length {
            return Err(damaged(format!("a state of {state_bytes} bytes does not fit")));
        }
        let record: SnapshotRecord =
            postcard::from_bytes(&record).map_err(|error| damaged(format!("the record does not decode: {error}")))?;
        let (last_log_id, last_membership) = record.into_parts()?;
        let meta = SnapshotMeta { last_log_id, last_membership };
        Ok(Self { path: path.to_owned(), file, meta, state_at, state_bytes, length, digest: expected })
    }

    pub(crate) fn meta(&self) -> &SnapshotMeta {
        &self.meta
    }

    #[cfg(feature = "sim")]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the whole file.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// What tells it from all others.
    pub(crate) fn identity(&self) -> Identity {
        Identity { length: self.length, digest: self.digest }
    }

    /// The file from `at` on.
    pub(crate) fn bytes(&self, at: u64) -> io::Result<impl Read + Send + use<>> {
        Ok(ReadAt { file: self.file.try_clone()?, at, end: self.length })
    }

    /// The machine's state.
    pub(crate) fn state(&self) -> io::Result<impl Read + use<>> {
        let state = ReadAt { file: self.file.try_clone()?, at: self.state_at, end: self.state_at + self.state_bytes };
        Ok(BufReader::with_capacity(1 << 20, state))
    }
}

/// Reads a part of a file without moving the position that its handles share.
struct ReadAt {
    file: File,
    at: u64,
    end: u64,
}

impl Read for ReadAt {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.end - self.at).unwrap_or(usize::MAX).min(out.len());
        let read = self.file.read_at(&mut out[..most], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

struct HashWriter<'a, W>(&'a mut Sha256, W);

impl<W: Write> Write for HashWriter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.1.write(bytes)?;
        self.0.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.1.flush()
    }
}

/// One group's snapshots.
pub(crate) struct Snapshots {
    group: GroupId,
    dir: PathBuf,
    /// The newest that is complete: what a restart begins with and a late follower is sent.
    current: Mutex<Option<PathBuf>>,
    aside: AtomicU64,
    arrivals: Arrivals,
}

impl Snapshots {
    /// Finds the newest whole snapshot and removes what was left half written. Blocks: it reads the whole file.
    pub(crate) fn open(dir: PathBuf, group: GroupId) -> io::Result<Arc<Self>> {
        disk::create_dir(&dir)?;
        let mut current = None;
        for path in listed(&dir, "tmp")? {
            fs::remove_file(path)?;
        }
        for path in listed(&dir, "snap")?.into_iter().rev() {
            match SnapshotFile::open(&path, group) {
                Ok(_) => {
                    current = Some(path);
                    break;
                }
                Err(error) => tracing::error!(%error, "a snapshot is damaged; trying the one before it"),
            }
        }
        let arrivals = Arrivals::new(group, dir.clone());
        Ok(Arc::new(Self { group, dir, current: Mutex::new(current), aside: AtomicU64::new(0), arrivals }))
    }

    /// What other nodes send.
    pub(crate) fn arrivals(&self) -> &Arrivals {
        &self.arrivals
    }

    /// A name for a file that is not complete yet.
    pub(crate) fn aside(&self) -> PathBuf {
        self.dir.join(format!("{}.tmp", self.aside.fetch_add(1, Ordering::Relaxed)))
    }

    pub(crate) fn current(&self) -> io::Result<Option<SnapshotFile>> {
        let current = self.current.lock().clone();
        current.map(|path| SnapshotFile::open(&path, self.group)).transpose()
    }

    /// Writes a machine's state and makes it the current snapshot. Blocks.
    pub(crate) fn write(
        &self,
        last: Option<&LogId>,
        members: &StoredMembership,
        state: Box<dyn SnapshotWriter>,
    ) -> io::Result<SnapshotFile> {
        let began = Instant::now();
        let record = postcard::to_stdvec(&SnapshotRecord::new(last, members)).map_err(io::Error::other)?;
        let record_bytes = u32::try_from(record.len()).map_err(io::Error::other)?;
        let aside = self.aside();
        let file = File::create(&aside)?;
        let mut digest = Sha256::new();
        let mut out = BufWriter::with_capacity(1 << 20, HashWriter(&mut digest, &file));
        out.write_all(MAGIC)?;
        for number in [VERSION, self.group.0, record_bytes] {
            out.write_all(&number.to_le_bytes())?;
        }
        out.write_all(&record)?;
        let mut counted = Counted { out: &mut out, bytes: 0 };
        state.write_to(&mut counted)?;
        let state_bytes = counted.bytes;
        out.write_all(&state_bytes.to_le_bytes())?;
        out.flush()?;
        drop(out);
        (&file).write_all(&digest.finalize())?;
        file.sync_all()?;
        let written = self.adopt(SnapshotFile::open(&aside, self.group)?)?;
        self.arrivals.forget()?;
        metrics::snapshot_written(self.group, written.length(), began.elapsed());
        Ok(written)
    }

    /// Makes a complete snapshot the current one: under its own name, durably.
    pub(crate) fn adopt(&self, mut snapshot: SnapshotFile) -> io::Result<SnapshotFile> {
        let (term, index) = snapshot.meta.last_log_id.as_ref().map_or((0, 0), |last| (term_of(last), last.index()));
        let place = self.dir.join(format!("{index:020}-{term:020}.snap"));
        let mut current = self.current.lock();
        if snapshot.path != place {
            disk::put_in_place(&snapshot.path, &place)?;
        }
        snapshot.path.clone_from(&place);
        // A snapshot that was being written while a newer one arrived stays behind it.
        if current.as_ref().is_none_or(|current| *current < place) {
            *current = Some(place);
        }
        let all = listed(&self.dir, "snap")?;
        for old in all.iter().rev().skip(KEPT) {
            fs::remove_file(old)?;
        }
        Ok(snapshot)
    }
}

struct Counted<W> {
    out: W,
    bytes: u64,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Files with an ending, by name; names sort by index, then term.
fn listed(dir: &Path, ending: &str) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for item in fs::read_dir(dir)? {
        let path = item?.path();
        if path.extension().is_some_and(|found| found == ending) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::log_id;

    struct Bytes(Vec<u8>);

    impl SnapshotWriter for Bytes {
        fn write_to(self: Box<Self>, out: &mut dyn Write) -> io::Result<()> {
            out.write_all(&self.0)
        }
    }

    fn write(snapshots: &Snapshots, index: u64, state: &[u8]) -> SnapshotFile {
        snapshots.write(Some(&log_id(1, index)), &StoredMembership::default(), Box::new(Bytes(state.to_vec()))).unwrap()
    }

    fn read(snapshot: &SnapshotFile) -> Vec<u8> {
        let mut bytes = Vec::new();
        snapshot.state().unwrap().read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn the_newest_snapshot_comes_back_after_reopening_and_two_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let snapshots = Snapshots::open(dir.path().join("s"), GroupId(7)).unwrap();
        assert!(snapshots.current().unwrap().is_none());
        for index in [9, 10, 11] {
            write(&snapshots, index, format!("state {index}").as_bytes());
        }
        fs::write(snapshots.aside(), b"half").unwrap();
        let snapshots = Snapshots::open(dir.path().join("s"), GroupId(7)).unwrap();
        let current = snapshots.current().unwrap().unwrap();
        assert_eq!(read(&current), b"state 11");
        assert_eq!(current.meta().last_log_id, Some(log_id(1, 11)));
        let left: Vec<_> = fs::read_dir(dir.path().join("s")).unwrap().collect();
        assert_eq!(left.len(), 2, "{left:?}");
    }

    #[test]
    fn a_snapshot_with_any_byte_changed_or_cut_off_is_refused_and_the_one_before_it_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let snapshots = Snapshots::open(dir.path().to_owned(), GroupId(7)).unwrap();
        write(&snapshots, 1, b"older");
        let newest = write(&snapshots, 2, b"newer");
        let file = File::options().write(true).open(&newest.path).unwrap();
        let whole = fs::read(&newest.path).unwrap();
        for (at, byte) in (0..).zip(&whole) {
            file.write_all_at(&[byte ^ 1], at).unwrap();
            assert!(SnapshotFile::open(&newest.path, GroupId(7)).is_err(), "byte {at}");
            file.write_all_at(&[*byte], at).unwrap();
        }
        SnapshotFile::open(&newest.path, GroupId(7)).unwrap();
        assert!(SnapshotFile::open(&newest.path, GroupId(8)).is_err());
        file.set_len(whole.len() as u64 - 1).unwrap();
        let snapshots = Snapshots::open(dir.path().to_owned(), GroupId(7)).unwrap();
        assert_eq!(read(&snapshots.current().unwrap().unwrap()), b"older");
    }
}
