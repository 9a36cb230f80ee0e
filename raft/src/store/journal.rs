//! The journal in front of the database: what somebody waits for goes here in one write and one sync. The database has the same writes
//! at once, in memory, and makes them durable at leisure.
//!
//! ```text
//! <dir>/journal-0, <dir>/journal-1     SPAN bytes each, zero-written when made: a sync then has no sizes or places to store
//!   0    magic "QRYRAFTJ" | version u32 = 1 | zeros to 512
//!   512  frames, one after the other
//! frame  number u64 | bytes u32 | crc u32 | body          crc: CRC-32C of number, bytes and body; numbers count up by one
//! body   writes, one after the other:
//!        kind u8 | key bytes u8 | value bytes u32 | key | value
//!        kind 1  the key of tree "log" now has this value
//!        kind 2  the key of tree "meta" now has this value
//!        kind 3  the log of this key's group ends before this key; no value
//! ```
//!
//! The two files are written in turn. On opening, the frames of both go to the database once more, in order.
//!
//! Keeps *Settled before overwritten*: a file is written anew only when all that it held is durable in the database.
//! Keeps *A prefix and more*: the database recovers a prefix of what it was given that reaches at least to the beginning of the older file, so
//! with the frames it holds all that was acknowledged. What it may hold beyond them are entries at the end of a log, and records that
//! nobody was told of; `log.rs` waits for the journal before it writes anything for which that would not be so.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::disk;
use crate::config::DiskSync;
use crate::machine::MAX_COMMAND_BYTES;

const MAGIC: &[u8; 8] = b"QRYRAFTJ";
const VERSION: u32 = 1;
const FRAMES_AT: usize = 512;
/// Bytes of one file. The database reuses its own space only after half a MiB of further writes: syncing it this often keeps those
/// writes in order on the medium.
const SPAN: usize = 512 << 10;
const FRAME_HEAD: usize = 16;
const WRITE_HEAD: usize = 6;
// One entry with its keys fits in a frame, many times over.
const _: () = assert!(8 * (MAX_COMMAND_BYTES + 4096) < SPAN - FRAMES_AT);

/// What one write does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// A part of an entry.
    Log = 1,
    /// A record of a group.
    Meta = 2,
    /// The log ends before this key.
    Cut = 3,
}

/// The writes of one frame, encoded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Body(Vec<u8>);

impl Body {
    pub(crate) fn add(&mut self, kind: Kind, key: &[u8], value: &[u8]) {
        self.0.push(kind as u8);
        self.0.push(u8::try_from(key.len()).expect("keys have at most 13 bytes"));
        self.0.extend_from_slice(&u32::try_from(value.len()).expect("values have a few KiB").to_le_bytes());
        self.0.extend_from_slice(key);
        self.0.extend_from_slice(value);
    }

    pub(crate) fn of(kind: Kind, key: &[u8], value: &[u8]) -> Self {
        let mut body = Self::default();
        body.add(kind, key, value);
        body
    }
}

/// The writes of a frame's body, in order.
fn writes(mut body: &[u8], mut each: impl FnMut(Kind, &[u8], &[u8]) -> io::Result<()>) -> io::Result<()> {
    while !body.is_empty() {
        let Some((head, rest)) = body.split_first_chunk::<WRITE_HEAD>() else {
            return Err(damaged("a write is cut off"));
        };
        let [kind, key, value @ ..] = *head;
        let kind = match kind {
            1 => Kind::Log,
            2 => Kind::Meta,
            3 => Kind::Cut,
            other => return Err(damaged(&format!("write of kind {other}, expected 1 to 3"))),
        };
        let value = usize::try_from(u32::from_le_bytes(value)).unwrap_or(usize::MAX);
        let Some((key, rest)) = rest.split_at_checked(key.into()) else { return Err(damaged("a key is cut off")) };
        let Some((value, rest)) = rest.split_at_checked(value) else { return Err(damaged("a value is cut off")) };
        each(kind, key, value)?;
        body = rest;
    }
    Ok(())
}

fn damaged(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the journal is damaged: {why}"))
}

fn crc(number: u64, body: &[u8]) -> u32 {
    let head = crc32c::crc32c_append(crc32c::crc32c(&number.to_le_bytes()), &length(body).to_le_bytes());
    crc32c::crc32c_append(head, body)
}

fn length(body: &[u8]) -> u32 {
    u32::try_from(body.len()).expect("a frame is shorter than its file")
}

/// A frame as it was found.
struct Frame<'a> {
    number: u64,
    body: &'a [u8],
}

/// The frames of one file, up to the first that is not whole or not the next one.
fn frames(file: &[u8]) -> Vec<Frame<'_>> {
    let mut found: Vec<Frame<'_>> = Vec::new();
    let mut rest = file.get(FRAMES_AT..).unwrap_or_default();
    while let Some((head, after)) = rest.split_first_chunk::<FRAME_HEAD>() {
        let [number, tail] =
            [&head[..8], &head[8..]].map(|part| u64::from_le_bytes(part.try_into().expect("eight bytes")));
        let [bytes, sum] = [tail & u64::from(u32::MAX), tail >> 32];
        let Some((body, next)) = usize::try_from(bytes).ok().and_then(|bytes| after.split_at_checked(bytes)) else {
            break;
        };
        let follows = found.last().is_none_or(|last| last.number + 1 == number);
        if number == 0 || body.is_empty() || u64::from(crc(number, body)) != sum || !follows {
            break;
        }
        found.push(Frame { number, body });
        rest = next;
    }
    found
}

/// Makes durable, elsewhere, all that was written so far.
pub(crate) type Settle = Box<dyn FnMut() -> io::Result<()> + Send>;

/// What the journal of a folder held when it was opened.
pub(crate) struct Opened {
    files: [File; 2],
    content: [Vec<u8>; 2],
}

impl Opened {
    /// Opens the two files, or makes them.
    pub(crate) fn open(dir: &Path) -> io::Result<Self> {
        let [(first, of_first), (second, of_second)] = [open_file(&path(dir, 0))?, open_file(&path(dir, 1))?];
        Ok(Self { files: [first, second], content: [of_first, of_second] })
    }

    /// Tells every write that is in the files, in order. Answers where to go on.
    ///
    /// # Errors
    /// When frames are missing between the files, and those of `each`.
    fn replay(&self, mut each: impl FnMut(Kind, &[u8], &[u8]) -> io::Result<()>) -> io::Result<(usize, u64)> {
        let mut found =
            self.content.each_ref().map(|content| frames(content)).into_iter().enumerate().collect::<Vec<_>>();
        found.sort_by_key(|(_, frames)| frames.first().map_or(0, |first| first.number));
        let mut last = 0;
        for frame in found.iter().flat_map(|(_, frames)| frames) {
            if last != 0 && frame.number != last + 1 {
                return Err(damaged(&format!("after frame {last} comes {}", frame.number)));
            }
            last = frame.number;
            writes(frame.body, &mut each)?;
        }
        // The older file is free once all this has settled.
        Ok((found[0].0, last + 1))
    }

    /// Brings the database up to date with `each`, has it settle, and begins.
    pub(crate) fn begin(
        self,
        each: impl FnMut(Kind, &[u8], &[u8]) -> io::Result<()>,
        mut settle: Settle,
        disk: Arc<dyn DiskSync>,
    ) -> io::Result<Journal> {
        let (current, next) = self.replay(each)?;
        settle()?;
        Ok(Journal { files: self.files, current, at: FRAMES_AT, next, settler: Settler::start(settle)?, disk })
    }
}

fn path(dir: &Path, number: usize) -> PathBuf {
    dir.join(format!("journal-{number}"))
}

fn open_file(path: &Path) -> io::Result<(File, Vec<u8>)> {
    if !path.try_exists()? {
        let mut empty = vec![0; SPAN];
        empty[..8].copy_from_slice(MAGIC);
        empty[8..12].copy_from_slice(&VERSION.to_le_bytes());
        disk::write_small(path, &empty)?;
    }
    let content = std::fs::read(path)?;
    let (magic, rest) = content.split_at_checked(8).unwrap_or_default();
    let version = rest.first_chunk::<4>().map(|bytes| u32::from_le_bytes(*bytes));
    if magic != MAGIC || version != Some(VERSION) || content.len() != SPAN {
        let found = format!("{} bytes, magic {magic:?}, version {version:?}", content.len());
        let why =
            format!("{}: expected {SPAN} bytes, magic {MAGIC:?}, version {VERSION}, found {found}", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok((OpenOptions::new().write(true).open(path)?, content))
}

/// The open journal.
pub(crate) struct Journal {
    files: [File; 2],
    /// Which file is written.
    current: usize,
    /// Where its next frame goes.
    at: usize,
    /// The number of the next frame.
    next: u64,
    settler: Settler,
    disk: Arc<dyn DiskSync>,
}

impl Journal {
    /// Returns when these writes are on the medium. Each body is recovered whole or not at all.
    ///
    /// # Errors
    /// Those of the disk, of the database's settling too. The journal must not be used after one.
    pub(crate) fn write(&mut self, bodies: &[Body]) -> io::Result<()> {
        let mut out = Vec::with_capacity(bodies.iter().map(|body| FRAME_HEAD + body.0.len()).sum());
        for Body(body) in bodies.iter().filter(|body| !body.0.is_empty()) {
            if FRAMES_AT + FRAME_HEAD + body.len() > SPAN {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{} bytes in one frame", body.len())));
            }
            if self.at + out.len() + FRAME_HEAD + body.len() > SPAN {
                self.put(&out)?;
                out.clear();
                self.turn()?;
            }
            out.extend_from_slice(&self.next.to_le_bytes());
            out.extend_from_slice(&length(body).to_le_bytes());
            out.extend_from_slice(&crc(self.next, body).to_le_bytes());
            out.extend_from_slice(body);
            self.next += 1;
        }
        self.put(&out)
    }

    fn put(&mut self, out: &[u8]) -> io::Result<()> {
        let file = &self.files[self.current];
        file.write_all_at(out, self.at as u64)?;
        self.at += out.len();
        self.disk.sync_data(file)
    }

    /// Goes on in the other file, whose frames have settled, and has those of this one settle.
    fn turn(&mut self) -> io::Result<()> {
        self.settler.finish()?;
        self.settler.begin();
        self.current = 1 - self.current;
        self.at = FRAMES_AT;
        Ok(())
    }
}

/// A thread that has the database make its writes durable while the journal goes on.
struct Settler {
    /// None once it is to end.
    asks: Option<Sender<()>>,
    answers: Receiver<io::Result<()>>,
    under_way: bool,
    thread: Option<JoinHandle<()>>,
}

impl Settler {
    fn start(mut settle: Settle) -> io::Result<Self> {
        let (asks, asked) = channel();
        let (answer, answers) = channel();
        let thread = std::thread::Builder::new().name("raft-settler".to_owned()).spawn(move || {
            while let Ok(()) = asked.recv() {
                // Whoever asked may be gone.
                drop(answer.send(settle()));
            }
        })?;
        Ok(Self { asks: Some(asks), answers, under_way: false, thread: Some(thread) })
    }

    fn begin(&mut self) {
        if let Some(asks) = &self.asks {
            // A thread that has ended answers nothing, which `finish` finds out.
            asks.send(()).ok();
        }
        self.under_way = true;
    }

    /// Waits for what was begun, for as long as the disk takes.
    fn finish(&mut self) -> io::Result<()> {
        if !std::mem::take(&mut self.under_way) {
            return Ok(());
        }
        self.answers.recv().unwrap_or_else(|_| Err(io::Error::other("the settler thread panicked")))
    }
}

impl Drop for Settler {
    fn drop(&mut self) {
        drop(self.asks.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the settler thread panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;
    use crate::config::Fdatasync;

    type Seen = Vec<(Kind, Vec<u8>, Vec<u8>)>;

    fn begin(dir: &Path, settle: impl FnMut() -> io::Result<()> + Send + 'static) -> (Journal, Seen) {
        let mut seen = Seen::new();
        let each = |kind, key: &[u8], value: &[u8]| {
            seen.push((kind, key.to_vec(), value.to_vec()));
            Ok(())
        };
        let journal = Opened::open(dir).unwrap().begin(each, Box::new(settle), Arc::new(Fdatasync)).unwrap();
        (journal, seen)
    }

    fn put(number: u32, bytes: usize) -> Body {
        Body::of(Kind::Log, &number.to_be_bytes(), &vec![7; bytes])
    }

    fn numbers(seen: &Seen) -> Vec<u32> {
        seen.iter().map(|(_, key, _)| u32::from_be_bytes(key[..].try_into().unwrap())).collect()
    }

    #[test]
    fn what_was_written_is_told_again_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, seen) = begin(dir.path(), || Ok(()));
        assert_eq!(seen, []);
        let mut both = Body::of(Kind::Log, b"a", b"1");
        both.add(Kind::Meta, b"b", b"");
        journal.write(&[both, Body::default()]).unwrap();
        journal.write(&[Body::of(Kind::Cut, b"c", b"")]).unwrap();
        drop(journal);
        let (_, seen) = begin(dir.path(), || Ok(()));
        let write = |kind, key: &str, value: &str| (kind, key.as_bytes().to_vec(), value.as_bytes().to_vec());
        assert_eq!(seen, [write(Kind::Log, "a", "1"), write(Kind::Meta, "b", ""), write(Kind::Cut, "c", "")]);
    }

    #[test]
    fn nothing_is_overwritten_that_has_not_settled() {
        // Lives end at any point of the two files. Whatever had not settled by then is told again.
        let dir = tempfile::tempdir().unwrap();
        let written = Arc::new(Mutex::new(0_u32));
        let settled = Arc::new(Mutex::new(0_u32));
        let mut turns = 0;
        for life in 0..40_u32 {
            let settle = {
                let (written, settled) = (Arc::clone(&written), Arc::clone(&settled));
                move || {
                    *settled.lock() = *written.lock();
                    Ok(())
                }
            };
            let settled_before = *settled.lock();
            let (mut journal, seen) = begin(dir.path(), settle);
            let told = numbers(&seen);
            assert!(told.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{told:?}");
            let last = *written.lock();
            assert_eq!(told.last().copied().unwrap_or(0), last, "life {life}: the last writes are lost");
            assert!(
                told.first().is_none_or(|first| *first <= settled_before + 1),
                "life {life}: {settled_before} settled, {told:?}"
            );
            for step in 0..(life * 7) % 61 {
                let number = *written.lock() + 1;
                // The database has a write before the journal does.
                *written.lock() = number;
                let before = journal.current;
                journal.write(&[put(number, ((step * 9_973) % 40_000) as usize)]).unwrap();
                turns += u32::from(before != journal.current);
            }
        }
        assert!(turns > 5, "the files were hardly ever exchanged: {turns} times");
    }

    #[test]
    fn a_frame_that_is_torn_anywhere_ends_the_journal_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = begin(dir.path(), || Ok(()));
        journal.write(&[put(1, 10), put(2, 20), put(3, 30)]).unwrap();
        let (from, to) = (FRAMES_AT + 2 * (FRAME_HEAD + WRITE_HEAD + 4) + 30, journal.at);
        drop(journal);
        let whole = std::fs::read(path(dir.path(), 0)).unwrap();
        for at in from..to {
            let mut torn = whole.clone();
            torn[at..to].fill(0);
            if torn == whole {
                continue;
            }
            let numbers: Vec<u64> = frames(&torn).iter().map(|frame| frame.number).collect();
            assert_eq!(numbers, [1, 2], "torn at {at}");
            let mut flipped = whole.clone();
            flipped[at] ^= 1;
            assert_eq!(frames(&flipped).len(), 2, "flipped at {at}");
        }
    }

    #[test]
    fn frames_that_are_missing_in_the_middle_are_damage() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = begin(dir.path(), || Ok(()));
        let mut number = 0;
        while journal.current == 0 {
            number += 1;
            journal.write(&[put(number, 30_000)]).unwrap();
        }
        drop(journal);
        let older = OpenOptions::new().write(true).open(path(dir.path(), 0)).unwrap();
        older.write_all_at(&[0; 64], (SPAN - 100_000) as u64).unwrap();
        let damage = Opened::open(dir.path()).unwrap().replay(|_, _, _| Ok(())).unwrap_err();
        assert_eq!(damage.kind(), io::ErrorKind::InvalidData);
        assert!(damage.to_string().contains("comes"), "{damage}");
    }

    #[test]
    fn a_database_that_does_not_settle_ends_the_journal() {
        let dir = tempfile::tempdir().unwrap();
        let mut calls = 0;
        let (mut journal, _) = begin(dir.path(), move || {
            calls += 1;
            if calls == 1 { Ok(()) } else { Err(io::Error::other("no medium")) }
        });
        let failed = (0..100).map(|number| journal.write(&[put(number, 30_000)])).find_map(Result::err);
        assert!(failed.expect("both files are full long before").to_string().contains("no medium"));
        assert_eq!(journal.current, 1, "the first file was not written anew");
    }

    #[test]
    fn another_version_and_a_file_that_is_cut_short_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        drop(Opened::open(dir.path()).unwrap());
        let file = OpenOptions::new().write(true).open(path(dir.path(), 1)).unwrap();
        file.write_all_at(&2_u32.to_le_bytes(), 8).unwrap();
        let newer = Opened::open(dir.path()).map(drop).unwrap_err();
        assert!(newer.to_string().contains("version Some(2)"), "{newer}");
        file.write_all_at(&1_u32.to_le_bytes(), 8).unwrap();
        file.set_len(1000).unwrap();
        assert!(Opened::open(dir.path()).is_err());
    }
}
