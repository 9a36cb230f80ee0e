//! A backup: the states of all groups of a cluster in one file.
//!
//! ```text
//! 0       8   magic "QRYBACK\n"
//! 8       4   version of the layout, u32 LE = 1
//! 12      n   parts: the canonical bytes of one group's state each, in the order of the manifest
//! +n      m   manifest, JSON: the cluster, and group, entry, offset, length and SHA-256 of each part
//! +m      4   m, u32 LE
//! +4      4   CRC-32C of the manifest, u32 LE
//! +4     32   SHA-256 of all before
//! ```
//! Written aside and synced before it gets its name, so it is there whole or not at all. Nothing in it is used before all checksums fit.
//!
//! The states are not of one moment. **Shards come first, the directory last**: so the directory knows whatever a shard had heard of it
//! (namespaces, regions, lendings), never the other way round; what a backup must not forget (certificates, revocations, numbers that were
//! given, removed nodes) lies in the directory. What memory holds is void after a restore, so shards need not agree about it with anyone.

use quarry_wire::ids::FeedNumber;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::{
    fs::{self, File},
    io::{self, BufWriter, Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

const MAGIC: &[u8; 8] = b"QRYBACK\n";
/// Version of the layout that this build writes and reads.
const VERSION: u32 = 1;
const HEAD_LEN: usize = 8 + 4;
const TRAILER_LEN: usize = 4 + 4 + 32;
const HEAD_BYTES: u64 = HEAD_LEN as u64;
const TRAILER_BYTES: u64 = TRAILER_LEN as u64;
/// A part of 256 shards has a line of some 300 bytes each.
const MANIFEST_BYTES_MAX: u64 = 16 << 20;

/// Why a backup cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// A file of this name is there already.
    #[error("{} exists already: a backup never replaces a file", file.display())]
    Exists {
        /// The file.
        file: PathBuf,
    },
    /// The file is none.
    #[error("{} is no backup of a Quarry cluster", file.display())]
    NoBackup {
        /// The file.
        file: PathBuf,
    },
    /// Another build wrote it.
    #[error("{} is a backup of version {found}, this build reads version {VERSION}", file.display())]
    Version {
        /// The file.
        file: PathBuf,
        /// The version found.
        found: u32,
    },
    /// Some bytes are not those that were written.
    #[error("{} is damaged: {part}: {why}; use another backup", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What of it: the state of a group, the manifest, the head.
        part: String,
        /// What does not fit.
        why: String,
    },
    /// The states do not belong together.
    #[error("the states do not belong together: {why}")]
    Mixed {
        /// Which, and why.
        why: String,
    },
    /// The disk failed.
    #[error("{doing}: {source}")]
    Disk {
        /// What was being done.
        doing: String,
        /// The cause.
        source: io::Error,
    },
}

/// What a backup says about itself.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// The cluster's UUID.
    pub cluster: String,
    /// The public half of its root key, in hexadecimal digits.
    pub root: String,
    /// The generation that it was in.
    pub generation: u32,
    /// How many shards it has.
    pub shards: u32,
    /// The build that saved it.
    pub build: String,
    /// The groups, in the order in which they were saved.
    pub groups: Vec<Part>,
}

/// One group in a backup.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Part {
    /// The group: 0 is the directory.
    pub group: u32,
    /// A term not below that of the last entry.
    pub term: u64,
    /// The last entry whose effect is in the state.
    pub applied: u64,
    /// Log time of the state, in milliseconds.
    pub log_time_ms: u64,
    /// How far the state is in the feed: generation.
    pub feed_generation: u32,
    /// How far the state is in the feed: number.
    pub feed: u64,
    /// Where its bytes begin in the file.
    pub offset: u64,
    /// How many they are.
    pub length: u64,
    /// SHA-256 over them, in hexadecimal digits.
    pub sha256: String,
}

impl Part {
    fn feed(&self) -> (u32, u64) {
        (self.feed_generation, self.feed)
    }

    /// What people call it.
    fn name(group: u32) -> String {
        if group == 0 { "the state of group 0 (directory)".to_owned() } else { format!("the state of group {group}") }
    }
}

/// What is known of a group before its bytes come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PartHead {
    /// The group.
    pub group: u32,
    /// A term not below that of the last entry.
    pub term: u64,
    /// The last entry whose effect is in the state.
    pub applied: u64,
    /// Log time of the state, in milliseconds.
    pub log_time_ms: u64,
    /// How far the state is in the feed.
    pub feed: FeedNumber,
}

/// The cluster of a backup.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Origin {
    /// The cluster's UUID.
    pub cluster: String,
    /// The public half of its root key, in hexadecimal digits.
    pub root: String,
    /// The generation that it is in.
    pub generation: u32,
    /// How many shards it has.
    pub shards: u32,
    /// The build that saves it.
    pub build: String,
}

fn disk<'a>(doing: &'a str, file: &'a Path) -> impl Fn(io::Error) -> BackupError + 'a {
    move |source| BackupError::Disk { doing: format!("{doing} {}", file.display()), source }
}

/// A backup that is being written. Dropped before [`BackupWriter::finish`] it leaves nothing behind.
#[derive(Debug)]
pub struct BackupWriter {
    place: PathBuf,
    aside: PathBuf,
    out: BufWriter<File>,
    at: u64,
    whole: Sha256,
    parts: Vec<Part>,
    current: Option<Current>,
}

/// The state that is being written.
#[derive(Debug)]
struct Current {
    head: PartHead,
    offset: u64,
    digest: Sha256,
    /// The digest of the whole file before it.
    before: Sha256,
}

impl Drop for BackupWriter {
    fn drop(&mut self) {
        // Gone under this name once it is finished.
        drop(fs::remove_file(&self.aside));
    }
}

impl BackupWriter {
    /// Begins a file that will be called `place`.
    ///
    /// # Errors
    /// [`BackupError::Exists`], [`BackupError::Disk`].
    pub fn create(place: &Path) -> Result<Self, BackupError> {
        if place.exists() {
            return Err(BackupError::Exists { file: place.to_owned() });
        }
        let (aside, file) = Self::aside(place)?;
        let mut writer = Self {
            place: place.to_owned(),
            aside,
            out: BufWriter::with_capacity(1 << 20, file),
            at: 0,
            whole: Sha256::new(),
            parts: Vec::new(),
            current: None,
        };
        writer.put(MAGIC)?;
        writer.put(&VERSION.to_le_bytes())?;
        Ok(writer)
    }

    /// A new file beside `place` that nobody else writes, also not another who saves to the same name.
    fn aside(place: &Path) -> Result<(PathBuf, File), BackupError> {
        let mut number = 0_u32;
        loop {
            let mut name = place.file_name().unwrap_or_default().to_owned();
            name.push(format!(".{}-{number}.part", std::process::id()));
            let aside = place.with_file_name(name);
            match File::create_new(&aside) {
                Ok(file) => return Ok((aside, file)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < u32::MAX => number += 1,
                Err(error) => return Err(disk("make", &aside)(error)),
            }
        }
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), BackupError> {
        self.out.write_all(bytes).map_err(disk("write", &self.aside))?;
        self.whole.update(bytes);
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Begins the state of a group.
    ///
    /// # Panics
    /// If the one before was not ended.
    pub fn begin(&mut self, head: PartHead) {
        assert!(self.current.is_none(), "a part ends before the next one begins");
        self.current = Some(Current { head, offset: self.at, digest: Sha256::new(), before: self.whole.clone() });
    }

    /// Adds bytes to the state that was begun.
    ///
    /// # Errors
    /// [`BackupError::Disk`].
    ///
    /// # Panics
    /// If none was.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), BackupError> {
        self.put(bytes)?;
        self.current.as_mut().expect("bytes belong to a part that was begun").digest.update(bytes);
        Ok(())
    }

    /// Takes back the state that was begun, if one was: whoever sent it did not come to its end.
    ///
    /// # Errors
    /// [`BackupError::Disk`].
    pub fn take_back(&mut self) -> Result<(), BackupError> {
        let Some(Current { offset, before, .. }) = self.current.take() else { return Ok(()) };
        let mut cut = || -> io::Result<()> {
            self.out.seek(SeekFrom::Start(offset))?;
            self.out.get_ref().set_len(offset)
        };
        cut().map_err(disk("cut", &self.aside))?;
        (self.at, self.whole) = (offset, before);
        Ok(())
    }

    /// Ends the state that was begun. Answers its SHA-256, in hexadecimal digits.
    ///
    /// # Panics
    /// If none was.
    pub fn end(&mut self) -> String {
        let current = self.current.take().expect("a part ends after it was begun");
        let Current { head, offset, digest, .. } = current;
        self.parts.push(Part {
            group: head.group,
            term: head.term,
            applied: head.applied,
            log_time_ms: head.log_time_ms,
            feed_generation: head.feed.0.generation.0,
            feed: head.feed.0.number,
            offset,
            length: self.at - offset,
            sha256: hex::encode(digest.finalize()),
        });
        self.parts.last().map(|part| part.sha256.clone()).unwrap_or_default()
    }

    /// Writes the manifest, syncs the file and gives it its name.
    ///
    /// # Errors
    /// [`BackupError::Mixed`] if the states are not those of one cluster, the directory's last; [`BackupError::Disk`].
    pub fn finish(mut self, origin: Origin) -> Result<Manifest, BackupError> {
        let Origin { cluster, root, generation, shards, build } = origin;
        let manifest = Manifest { cluster, root, generation, shards, build, groups: std::mem::take(&mut self.parts) };
        manifest.check().map_err(|why| BackupError::Mixed { why })?;
        let text = serde_json::to_vec(&manifest).expect("numbers and strings are always JSON");
        self.put(&text)?;
        self.put(&u32::try_from(text.len()).expect("a manifest is short").to_le_bytes())?;
        self.put(&crc32c::crc32c(&text).to_le_bytes())?;
        let digest = std::mem::take(&mut self.whole).finalize();
        self.out.write_all(&digest).map_err(disk("write", &self.aside))?;
        self.out.flush().map_err(disk("write", &self.aside))?;
        self.out.get_ref().sync_all().map_err(disk("sync", &self.aside))?;
        // A link, and not a rename: what came to this name meanwhile stays.
        match fs::hard_link(&self.aside, &self.place) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(BackupError::Exists { file: self.place.clone() });
            }
            done => done.map_err(disk("name", &self.place))?,
        }
        let folder = self.place.parent().filter(|parent| !parent.as_os_str().is_empty());
        let folder = folder.unwrap_or_else(|| Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(disk("sync", folder))?;
        Ok(manifest)
    }
}

impl Manifest {
    /// Whether it lists all groups once, the directory last and not behind any shard.
    fn check(&self) -> Result<(), String> {
        let mut groups: Vec<u32> = self.groups.iter().map(|part| part.group).collect();
        let Some(directory) = self.groups.last().filter(|part| part.group == 0) else {
            return Err(format!("the directory must come last, found groups {groups:?}"));
        };
        groups.sort_unstable();
        if groups != (0..=self.shards).collect::<Vec<_>>() {
            return Err(format!("expected groups 0 to {}, found {groups:?}", self.shards));
        }
        match self.groups.iter().find(|part| part.feed() > directory.feed()) {
            Some(Part { group, feed_generation, feed, .. }) => Err(format!(
                "group {group} has followed the feed to {feed_generation}.{feed}, the directory only came to {}.{}: save again",
                directory.feed_generation, directory.feed
            )),
            None => Ok(()),
        }
    }
}

/// A backup whose checksums all fit.
#[derive(Debug)]
pub struct Backup {
    file: File,
    manifest: Manifest,
}

impl Backup {
    /// Opens a file and reads all of it, to know that it is what was written.
    ///
    /// # Errors
    /// [`BackupError`]: `Damaged` names the part.
    pub fn open(path: &Path) -> Result<Self, BackupError> {
        let io = disk("read", path);
        let owned = || path.to_owned();
        let damaged = |part: &str, why: String| BackupError::Damaged { file: owned(), part: part.to_owned(), why };
        let mut file = File::open(path).map_err(&io)?;
        let length = file.metadata().map_err(&io)?.len();
        let mut head = [0; HEAD_LEN];
        if length < HEAD_BYTES {
            return Err(BackupError::NoBackup { file: owned() });
        }
        file.read_exact(&mut head).map_err(&io)?;
        if head[..8] != MAGIC[..] {
            return Err(BackupError::NoBackup { file: owned() });
        }
        let version = u32::from_le_bytes(head[8..].try_into().expect("the range has 4 bytes"));
        if version != VERSION {
            return Err(BackupError::Version { file: owned(), found: version });
        }
        if length < HEAD_BYTES + TRAILER_BYTES {
            return Err(damaged("the end", format!("{length} bytes are too few: it was cut off")));
        }
        let mut trailer = [0; TRAILER_LEN];
        file.read_exact_at(&mut trailer, length - TRAILER_BYTES).map_err(&io)?;
        let number = |at: usize| u32::from_le_bytes(trailer[at..at + 4].try_into().expect("the range has 4 bytes"));
        let (bytes, crc) = (u64::from(number(0)), number(4));
        let at =
            (length - TRAILER_BYTES).checked_sub(bytes).filter(|at| *at >= HEAD_BYTES && bytes <= MANIFEST_BYTES_MAX);
        let at = at.ok_or_else(|| damaged("the end", format!("a manifest of {bytes} bytes does not fit")))?;
        let mut text = vec![0; usize::try_from(bytes).expect("its limit fits")];
        file.read_exact_at(&mut text, at).map_err(&io)?;
        if crc32c::crc32c(&text) != crc {
            return Err(damaged("the manifest", "its checksum does not fit".to_owned()));
        }
        let manifest: Manifest =
            serde_json::from_slice(&text).map_err(|error| damaged("the manifest", error.to_string()))?;
        manifest.check().map_err(|why| damaged("the manifest", why))?;
        let mut next = HEAD_BYTES;
        let backup = Self { file, manifest };
        for part in &backup.manifest.groups {
            let name = Part::name(part.group);
            if part.offset != next || part.length > at - next {
                return Err(damaged(&name, format!("{} bytes at {} do not fit", part.length, part.offset)));
            }
            next += part.length;
            backup.digest(part.offset, part.length, Sha256::new()).map_err(&io).and_then(|found| {
                let fits = found == part.sha256;
                if fits { Ok(()) } else { Err(damaged(&name, format!("expected {}, found {found}", part.sha256))) }
            })?;
        }
        if next != at {
            return Err(damaged("the manifest", format!("{} bytes before it belong to no group", at - next)));
        }
        let whole = backup.digest(0, length - 32, Sha256::new()).map_err(&io)?;
        if whole != hex::encode(&trailer[8..]) {
            return Err(damaged("the end", "the digest of the whole file does not fit".to_owned()));
        }
        Ok(backup)
    }

    fn digest(&self, offset: u64, length: u64, mut digest: Sha256) -> io::Result<String> {
        let mut file = &self.file;
        file.seek(SeekFrom::Start(offset))?;
        let mut left = length;
        let mut buffer = vec![0; 1 << 20];
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
            file.read_exact(&mut buffer[..most])?;
            digest.update(&buffer[..most]);
            left -= most as u64;
        }
        Ok(hex::encode(digest.finalize()))
    }

    /// What it says about itself.
    #[must_use]
    pub const fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The bytes of a group's state.
    pub(crate) fn state(&self, part: &Part) -> impl io::Read {
        Section { file: &self.file, at: part.offset, end: part.offset + part.length }
    }
}

/// Some bytes of a file.
struct Section<'a> {
    file: &'a File,
    at: u64,
    end: u64,
}

impl io::Read for Section<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.end - self.at).unwrap_or(usize::MAX).min(out.len());
        let read = self.file.read_at(&mut out[..most], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_wire::ids::Generation;

    fn origin() -> Origin {
        Origin { cluster: "a cluster".into(), root: "00".into(), generation: 1, shards: 2, build: "1".into() }
    }

    fn head(group: u32, feed: u64) -> PartHead {
        let feed = FeedNumber::new(Generation(1), feed);
        PartHead { group, term: 3, applied: 70, log_time_ms: 5, feed }
    }

    fn write(place: &Path, parts: &[(u32, u64)]) -> Result<Manifest, BackupError> {
        let mut writer = BackupWriter::create(place)?;
        for (group, feed) in parts {
            // One that does not come to its end leaves nothing behind.
            writer.begin(head(7, 7));
            writer.write(&[9; 3_000_000])?;
            writer.take_back()?;
            writer.begin(head(*group, *feed));
            writer.write(format!("state of {group}, ").as_bytes())?;
            writer.write(b"in two pieces")?;
            writer.end();
        }
        writer.finish(origin())
    }

    fn read(backup: &Backup, part: &Part) -> Vec<u8> {
        let mut bytes = Vec::new();
        backup.state(part).read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_backup_comes_back_as_it_was_and_never_replaces_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("b");
        let manifest = write(&place, &[(1, 4), (2, 3), (0, 4)]).unwrap();
        let backup = Backup::open(&place).unwrap();
        assert_eq!(*backup.manifest(), manifest);
        assert_eq!(read(&backup, &manifest.groups[1]), b"state of 2, in two pieces");
        assert!(matches!(write(&place, &[(1, 4), (2, 3), (0, 4)]), Err(BackupError::Exists { .. })));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left aside");
    }

    #[test]
    fn of_two_who_save_to_one_name_at_once_the_first_to_end_is_kept_whole() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("b");
        let mut slow = BackupWriter::create(&place).unwrap();
        slow.begin(head(1, 4));
        slow.write(&[9; 3_000_000]).unwrap();
        let manifest = write(&place, &[(1, 4), (2, 3), (0, 4)]).unwrap();
        slow.write(&[9; 3_000_000]).unwrap();
        slow.end();
        for group in [2, 0] {
            slow.begin(head(group, 4));
            slow.end();
        }
        assert!(matches!(slow.finish(origin()), Err(BackupError::Exists { .. })));
        let backup = Backup::open(&place).unwrap();
        assert_eq!(read(&backup, &manifest.groups[1]), b"state of 2, in two pieces");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left aside");
    }

    #[test]
    fn states_that_do_not_belong_together_make_no_backup() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("b");
        // The directory before a shard; a shard missing; a shard that heard what the directory does not know.
        for parts in [&[(1, 4), (0, 4), (2, 4)][..], &[(1, 4), (0, 4)], &[(1, 5), (2, 4), (0, 4)]] {
            let wrong = write(&place, parts).unwrap_err();
            assert!(matches!(wrong, BackupError::Mixed { .. }), "{wrong}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
    }

    #[test]
    fn every_changed_byte_and_every_cut_is_refused_with_the_part_named() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("b");
        let manifest = write(&place, &[(1, 4), (2, 3), (0, 4)]).unwrap();
        let whole = fs::read(&place).unwrap();
        let file = File::options().write(true).open(&place).unwrap();
        for (at, byte) in (0_u64..).zip(&whole) {
            file.write_all_at(&[byte ^ 1], at).unwrap();
            let wrong = Backup::open(&place).expect_err("a changed byte");
            let changed = manifest.groups.iter().find(|it| (it.offset..it.offset + it.length).contains(&at));
            if let Some(changed) = changed {
                let expected = Part::name(changed.group);
                assert!(matches!(&wrong, BackupError::Damaged { part, .. } if *part == expected), "{at}: {wrong}");
            }
            file.write_all_at(&[*byte], at).unwrap();
        }
        Backup::open(&place).unwrap();
        for length in 0..whole.len() {
            file.set_len(length as u64).unwrap();
            assert!(Backup::open(&place).is_err(), "{length}");
            file.write_all_at(&whole[length..], length as u64).unwrap();
        }
    }
}
