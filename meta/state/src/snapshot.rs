//! Snapshots: the canonical bytes of a machine.
//!
//! ```text
//! snapshot = magic "QRYS" (4) ‖ storage version (2, little-endian) ‖ machine: 0 directory, 1 shard (1) ‖ postcard of the state
//! ```
//! Every map in a state is ordered, so equal states have equal bytes; their SHA-256 is compared between replicas. Indexes are not written:
//! they are rebuilt, and the state is checked, before it is used.

use crate::invariant::Violation;
use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};

const MAGIC: [u8; 4] = *b"QRYS";
/// Storage version of the snapshots that this build writes and reads, and of the commands in entries: raised with either. Meta nodes tell it
/// each other before they send any.
pub const SNAPSHOT_VERSION: u16 = 5;
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
        "snapshot version {found} is not the version {expected} that this build reads: do not downgrade a meta node"
    )]
    Version {
        /// The version that this build reads.
        expected: u16,
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
    /// The bytes after the head cannot be decoded.
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

/// Canonical bytes of `state`.
pub(crate) fn encode<T: Serialize>(machine: Machine, state: &T) -> Vec<u8> {
    let mut head = MAGIC.to_vec();
    head.extend(SNAPSHOT_VERSION.to_le_bytes());
    head.push(machine.code());
    postcard::to_extend(state, head).expect("a state has no value that postcard cannot write")
}

/// The state in `bytes`, its indexes still empty.
pub(crate) fn decode<T: DeserializeOwned>(machine: Machine, bytes: &[u8]) -> Result<T, SnapshotError> {
    let (head, body) = bytes.split_at_checked(HEAD_BYTES).ok_or(SnapshotError::NoSnapshot)?;
    if head[..4] != MAGIC {
        return Err(SnapshotError::NoSnapshot);
    }
    let version = u16::from_le_bytes([head[4], head[5]]);
    if version != SNAPSHOT_VERSION {
        return Err(SnapshotError::Version { expected: SNAPSHOT_VERSION, found: version });
    }
    if head[6] != machine.code() {
        return Err(SnapshotError::Machine { expected: machine.code(), found: head[6] });
    }
    match postcard::take_from_bytes(body) {
        Ok((state, [])) => Ok(state),
        Ok((_, rest)) => Err(SnapshotError::Body { why: format!("{} bytes follow its end", rest.len()) }),
        Err(error) => Err(SnapshotError::Body { why: error.to_string() }),
    }
}

/// SHA-256 over the canonical bytes of `state`.
pub(crate) fn hash<T: Serialize>(machine: Machine, state: &T) -> StateHash {
    Sha256::digest(encode(machine, state)).into()
}
