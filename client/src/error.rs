//! What can go wrong, by operation: what was expected, what was found, and what a caller can do.
//!
//! "Not there" is never an error: gets answer `None`. An error of a put is definite (the value was not written) unless it is
//! [`PutError::Indeterminate`]; the same holds for deletes.

use quarry_fabric::FabricError;
use quarry_proto::refusal::Refusal;
use quarry_wire::{ids::NodeId, key::KeyLengthError, version::Version};
use std::time::Duration;

/// Why a call to the cluster's servers brought no answer. Part of every other error.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// Nobody who could answer was reached in time.
    #[error("{what} cannot be reached: {last}")]
    Unreachable {
        /// Who was asked.
        what: String,
        /// What the last attempt met.
        last: String,
    },
    /// The deadline passed (see [`Options::timeout`](crate::Options::timeout)).
    #[error("not done by its deadline; the last attempt met: {last}")]
    Deadline {
        /// What the last attempt met.
        last: String,
    },
    /// The command was sent and may have been executed or not.
    #[error("the outcome is not known: {why}")]
    Indeterminate {
        /// Why not.
        why: String,
    },
    /// Turned down for a reason that has no error of its own here.
    #[error("turned down: {0}")]
    Refused(Box<Refusal>),
    /// An answer whose signatures do not chain to the cluster's root key, or that is not what was asked for.
    #[error("an answer is not believed: {why}")]
    Untrusted {
        /// What is wrong.
        why: String,
    },
    /// The cluster has no such namespace.
    #[error("there is no such namespace ({what}): create it first")]
    UnknownNamespace {
        /// Its name or number.
        what: String,
    },
    /// The client was closed.
    #[error("the client is closed")]
    Closed,
}

/// Why a client could not be made.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The cluster did not answer.
    #[error(transparent)]
    Call(#[from] CallError),
    /// libfabric cannot be used on this machine.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// This client cannot prove who it is.
    #[error("{why}")]
    Credentials {
        /// What is wrong with its credentials, and where others come from.
        why: String,
    },
    /// An option that cannot be.
    #[error("option {option} must be {expected}, found {found}")]
    Option {
        /// Which.
        option: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
}

/// Why a namespace could not be made, found or listed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NamespaceError {
    /// One with this name is there already.
    #[error("the namespace {name:?} exists already")]
    Exists {
        /// The name.
        name: String,
    },
    /// The specification is not possible.
    #[error("{field} must be {expected}, found {found}")]
    Invalid {
        /// Which part.
        field: String,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// The cluster did not answer.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Why a value was not written.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PutError {
    /// The key is empty or too long.
    #[error(transparent)]
    InvalidKey(#[from] KeyLengthError),
    /// The value does not fit in a slot.
    #[error("a value under this key has at most {limit} bytes, this one has {found}: split it")]
    TooLarge {
        /// Most bytes.
        limit: u64,
        /// Bytes that there are.
        found: u64,
    },
    /// More is reserved at once than the window can hold.
    #[error(
        "the frames take {found} bytes of a window of {limit}: reserve fewer at once, or set a larger window_bytes"
    )]
    WindowExceeded {
        /// Bytes of the window.
        limit: usize,
        /// Bytes of the frames, headers included.
        found: usize,
    },
    /// `create`: the key is there already.
    #[error("the key exists already, in version {current}")]
    Exists {
        /// The version that is there.
        current: Version,
    },
    /// `replace`: others wrote so often that no attempt of ours was the latest.
    #[error("the key is at version {current}, which stays ahead of ours: others write it all the time")]
    StaleVersion {
        /// The version that is there.
        current: Version,
    },
    /// `compare`: the key is not in the version that was expected.
    #[error("the key is not in the expected version; it is {}", current.map_or_else(|| "absent".to_owned(), |v| format!("in {v}")))]
    CompareFailed {
        /// The version that is there, if any.
        current: Option<Version>,
    },
    /// There is no room.
    #[error("no space in {resource}{}", retry_after.map_or_else(String::new, |after| format!("; try again in {after:?}")))]
    NoSpace {
        /// Of what.
        resource: String,
        /// When some may have come back; none if no space is coming.
        retry_after: Option<Duration>,
    },
    /// The write may have taken effect or not. A get tells: if it yields `version`, it did.
    #[error("it is not known whether version {version} was written: {why}")]
    Indeterminate {
        /// The version that all attempts carried.
        version: Version,
        /// Why it is not known.
        why: String,
    },
    /// This machine's clock is too far ahead of the cluster's.
    #[error("this machine's clock is {ahead:?} ahead of the cluster's: set it")]
    ClockAhead {
        /// How far.
        ahead: Duration,
    },
    /// Too few holders took the value.
    #[error("only {reached} of the {needed} holders that are needed can be reached: {last}")]
    TooFewHolders {
        /// Holders needed.
        needed: usize,
        /// Holders reached.
        reached: usize,
        /// What the last attempt met.
        last: String,
    },
    /// The deadline passed before the value was committed; it was not written.
    #[error("not written by the deadline; the last attempt met: {last}")]
    Deadline {
        /// What the last attempt met.
        last: String,
    },
    /// The cluster's servers did not answer; nothing was written.
    #[error(transparent)]
    Call(CallError),
    /// libfabric cannot be used on this machine.
    #[error(transparent)]
    Fabric(#[from] FabricError),
}

/// Why a value was not read.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GetError {
    /// The key is empty or too long.
    #[error(transparent)]
    InvalidKey(#[from] KeyLengthError),
    /// The value is there, and no copy of it passed the checks. No byte of it is shown.
    #[error("the copy at {node} is damaged and there is no other: {what}")]
    Corrupt {
        /// The holder of the last copy that was tried.
        node: NodeId,
        /// What is wrong with it.
        what: String,
    },
    /// The value is there, and none of its holders can be reached.
    #[error("no holder of the value can be reached; the last one tried, {node}: {last}")]
    Unreachable {
        /// The last holder that was tried.
        node: NodeId,
        /// What the last attempt met.
        last: String,
    },
    /// The buffer to read into is shorter than the value. Nothing was read.
    #[error("the value has {needed} bytes, the buffer to read into {found}: take a longer one")]
    BufferTooSmall {
        /// Bytes of the value.
        needed: u64,
        /// Bytes of the buffer.
        found: u64,
    },
    /// The pin was over before the value was read through it. Nothing of it is shown.
    #[error("the pin was over before the value was read: renew pins in time")]
    PinOver,
    /// The value is there, but no copy lies in memory that can be read now.
    #[error("no copy of the value is in memory now")]
    NotResident,
    /// The deadline passed.
    #[error("not read by the deadline; the last attempt met: {last}")]
    Deadline {
        /// What the last attempt met.
        last: String,
    },
    /// The cluster's servers did not answer, or their answer is not believed.
    #[error(transparent)]
    Call(CallError),
    /// libfabric cannot be used on this machine.
    #[error(transparent)]
    Fabric(#[from] FabricError),
}

/// Why values were not pinned, or a pin not renewed or released.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// No pin lasts so long.
    #[error("a pin lasts from 1 ms to {most:?}, not {found:?}: renew it before it ends")]
    Duration {
        /// Longest time.
        most: Duration,
        /// Time asked for.
        found: Duration,
    },
    /// There are too many pins.
    #[error("{resource} are limited to {limit}: release some, or try again in {retry_after:?}, when the next one ends")]
    TooMany {
        /// Whose pins.
        resource: String,
        /// How many there can be.
        limit: u64,
        /// When the next of them ends, unless it is renewed.
        retry_after: Duration,
    },
    /// The pin has ended, or the memory that it was on is void.
    #[error("the pin is over: pin the values again, they may be others by now")]
    Over,
    /// The cluster's servers did not answer.
    #[error(transparent)]
    Call(CallError),
}

/// Why a key was not deleted.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeleteError {
    /// The key is empty or too long.
    #[error(transparent)]
    InvalidKey(#[from] KeyLengthError),
    /// The key is in another version than expected.
    #[error("the key is not in the expected version; it is in {current}")]
    CompareFailed {
        /// The version that is there.
        current: Version,
    },
    /// The delete may have taken effect or not.
    #[error("it is not known whether the key was deleted: {why}")]
    Indeterminate {
        /// Why it is not known.
        why: String,
    },
    /// The cluster's servers did not answer.
    #[error(transparent)]
    Call(CallError),
}

/// Why a client could not be closed in good order. Its background work has ended all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{unfinished} background tasks were not done by the deadline; their slabs end by their time limit")]
pub struct CloseError {
    /// Tasks that were cut off.
    pub unfinished: usize,
}

impl From<CallError> for PutError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Deadline { last } => Self::Deadline { last },
            CallError::Refused(refusal) => match *refusal {
                Refusal::NoSpace(it) => Self::NoSpace {
                    resource: it.resource,
                    retry_after: (!it.terminal).then(|| Duration::from_millis(it.retry_after_ms)),
                },
                Refusal::TooLarge(it) => Self::TooLarge { limit: it.limit, found: it.found },
                Refusal::VersionAhead(it) => {
                    Self::ClockAhead { ahead: Duration::from_millis(it.version_ms.saturating_sub(it.wall_ms)) }
                }
                other => Self::Call(CallError::Refused(Box::new(other))),
            },
            other => Self::Call(other),
        }
    }
}

impl From<CallError> for GetError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Deadline { last } => Self::Deadline { last },
            other => Self::Call(other),
        }
    }
}

impl From<CallError> for DeleteError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Indeterminate { why } => Self::Indeterminate { why },
            other => Self::Call(other),
        }
    }
}
