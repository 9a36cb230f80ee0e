//! Snapshots: the canonical bytes of a machine.
//!
//! ```text
//! snapshot = magic "QRYS" (4) ‖ storage version (2, little-endian) ‖ machine: 0 directory, 1 shard (1) ‖ postcard of the state
//! ```
//! Every map in a state is ordered, so equal states have equal bytes; their SHA-256 is compared between replicas. Indexes are not written:
//! they are rebuilt, and the state is checked, before it is used.

use crate::invariant::Violation;
use postcard::{de_flavors, ser_flavors};
use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};
use std::io::{self, BufRead as _, BufReader, BufWriter, Read as _, Write as _};

const MAGIC: [u8; 4] = *b"QRYS";
/// Storage version of the snapshots that this build writes and reads, and of the commands that it proposes: raised with either. Meta nodes tell
/// it each other before they send any. How the next one comes about is in `docs/storage.md`.
pub const SNAPSHOT_VERSION: u16 = 6;
/// The oldest that it reads from its own disk: the same layout, but some commands did other things, so it is not replicated with builds that
/// propose it.
pub const SNAPSHOT_SINCE: u16 = 5;
/// SHA-256 over the canonical bytes of a state.
pub type StateHash = [u8; 32];

/// Which machine a snapshot is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Machine {
    Directory,
    Shard,
}

impl Machine {
    const fn code(self) -> u8 {
        match self {
            Self::Directory => 0,
            Self::Shard => 1,
        }
    }
}

/// Why bytes are not a snapshot that this build can use.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SnapshotError {
    /// Too short, or its first bytes are others.
    #[error("these bytes are no snapshot of a Quarry state machine")]
    NoSnapshot,
    /// Another build wrote it.
    #[error(
        "snapshot version {found} is none of {since} to {newest}, which this build reads: do not downgrade a meta node"
    )]
    Version {
        /// The oldest version that this build reads.
        since: u16,
        /// The newest.
        newest: u16,
        /// The version found.
        found: u16,
    },
    /// It is of the other machine.
    #[error("the snapshot is of machine {found}, machine {expected} was expected (0 directory, 1 shard)")]
    Machine {
        /// The machine expected.
        expected: u8,
        /// The machine found.
        found: u8,
    },
    /// The bytes after the head cannot be decoded, or not be read.
    #[error("the snapshot cannot be decoded: {why}")]
    Body {
        /// What the decoder said.
        why: String,
    },
    /// It decodes to a state that cannot be.
    #[error("the snapshot holds a state that cannot be: {0}")]
    Impossible(#[from] Violation),
}

const HEAD_BYTES: usize = 7;

/// Bytes that are held between a state and where it is written to or read from.
const BUFFER_BYTES: usize = 64 << 10;

/// Writes the canonical bytes of `state`, piece by piece: a large state is never in memory as bytes.
pub(crate) fn encode_to<T: Serialize>(machine: Machine, state: &T, out: impl io::Write) -> io::Result<()> {
    let mut sink = Sink { out: BufWriter::with_capacity(BUFFER_BYTES, out), failed: None };
    sink.out.write_all(&MAGIC)?;
    sink.out.write_all(&SNAPSHOT_VERSION.to_le_bytes())?;
    sink.out.write_all(&[machine.code()])?;
    let written = postcard::serialize_with_flavor(state, &mut sink);
    if let Some(error) = sink.failed {
        return Err(error);
    }
    written.expect("a state has no value that postcard cannot write");
    sink.out.flush()
}

/// Canonical bytes of `state`.
pub(crate) fn encode<T: Serialize>(machine: Machine, state: &T) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_to(machine, state, &mut bytes).expect("writing to memory does not fail");
    bytes
}

/// The state that `input` holds to its end, its indexes still empty. Only the state itself is in memory.
pub(crate) fn decode_from<T: DeserializeOwned>(machine: Machine, input: impl io::Read) -> Result<T, SnapshotError> {
    let mut source = Source { input: BufReader::with_capacity(BUFFER_BYTES, input), taken: Vec::new(), failed: None };
    let mut head = [0; HEAD_BYTES];
    source.input.read_exact(&mut head).map_err(|error| {
        let is_short = error.kind() == io::ErrorKind::UnexpectedEof;
        if is_short { SnapshotError::NoSnapshot } else { SnapshotError::Body { why: error.to_string() } }
    })?;
    if head[..4] != MAGIC {
        return Err(SnapshotError::NoSnapshot);
    }
    let version = u16::from_le_bytes([head[4], head[5]]);
    if !(SNAPSHOT_SINCE..=SNAPSHOT_VERSION).contains(&version) {
        return Err(SnapshotError::Version { since: SNAPSHOT_SINCE, newest: SNAPSHOT_VERSION, found: version });
    }
    if head[6] != machine.code() {
        return Err(SnapshotError::Machine { expected: machine.code(), found: head[6] });
    }
    let body = |why: String| SnapshotError::Body { why };
    let decoded = T::deserialize(&mut postcard::Deserializer::from_flavor(&mut source));
    if let Some(error) = source.failed {
        return Err(body(error.to_string()));
    }
    let state = decoded.map_err(|error| body(error.to_string()))?;
    match io::copy(&mut source.input, &mut io::sink()) {
        Ok(0) => Ok(state),
        Ok(rest) => Err(body(format!("{rest} bytes follow its end"))),
        Err(error) => Err(body(error.to_string())),
    }
}

/// SHA-256 over the canonical bytes of `state`.
pub(crate) fn hash<T: Serialize>(machine: Machine, state: &T) -> StateHash {
    hash_written(|out| encode_to(machine, state, out)).expect("hashing does not fail")
}

/// SHA-256 over what `write` writes.
///
/// # Errors
/// Those of `write`.
pub fn hash_written(write: impl FnOnce(&mut dyn io::Write) -> io::Result<()>) -> io::Result<StateHash> {
    struct Hashing(Sha256);
    impl io::Write for Hashing {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.update(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut hashing = Hashing(Sha256::new());
    write(&mut hashing)?;
    Ok(hashing.0.finalize().into())
}

/// Where postcard writes to; keeps the error that postcard has no place for.
struct Sink<W: io::Write> {
    out: BufWriter<W>,
    failed: Option<io::Error>,
}

impl<W: io::Write> ser_flavors::Flavor for &mut Sink<W> {
    type Output = ();
    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.try_extend(&[byte])
    }
    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.out.write_all(bytes).map_err(|error| {
            self.failed = Some(error);
            postcard::Error::SerializeBufferFull
        })
    }
    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

/// Where postcard reads from; keeps the error that postcard has no place for.
struct Source<R: io::Read> {
    input: BufReader<R>,
    /// The bytes that were asked for last.
    taken: Vec<u8>,
    failed: Option<io::Error>,
}

impl<R: io::Read> Source<R> {
    fn fail(&mut self, error: io::Error) -> postcard::Error {
        self.failed = Some(error);
        postcard::Error::DeserializeUnexpectedEnd
    }
}

impl<'de, R: io::Read + 'de> de_flavors::Flavor<'de> for &'de mut Source<R> {
    type Remainder = ();
    type Source = ();
    fn pop(&mut self) -> postcard::Result<u8> {
        match self.input.fill_buf().map(|held| held.first().copied()) {
            Ok(Some(byte)) => {
                self.input.consume(1);
                Ok(byte)
            }
            Ok(None) => Err(postcard::Error::DeserializeUnexpectedEnd),
            Err(error) => Err(self.fail(error)),
        }
    }
    /// What is read by and by is kept nowhere, so nothing of it can be lent to the state.
    fn try_take_n(&mut self, _: usize) -> postcard::Result<&'de [u8]> {
        Err(postcard::Error::WontImplement)
    }
    fn try_take_n_temp<'a>(&'a mut self, count: usize) -> postcard::Result<&'a [u8]>
    where
        'de: 'a,
    {
        let Source { input, taken, .. } = &mut **self;
        taken.clear();
        // As many as really come, not as many as a damaged length says.
        match input.take(count as u64).read_to_end(taken) {
            Ok(read) if read == count => Ok(&self.taken),
            Ok(_) => Err(postcard::Error::DeserializeUnexpectedEnd),
            Err(error) => Err(self.fail(error)),
        }
    }
    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}
