//! The ways in which consensus refuses or fails.
//! *An error proves little*: only refusals from before a command was handed to the log say that it was not applied.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

use crate::ids::{GroupId, RaftNodeId};

/// A leader and its `host:port`, as far as a node knows.
pub type LeaderHint = Option<(RaftNodeId, String)>;

/// Why a host, a group or a change of members could not be had.
#[derive(Debug, thiserror::Error)]
pub enum RaftError {
    /// The disk, or the database on it, failed.
    #[error("{doing}: {source}")]
    Storage {
        /// What was being done.
        doing: String,
        /// The cause.
        source: io::Error,
    },
    /// Another process uses the folder.
    #[error("{} is in use by another process: stop it first", dir.display())]
    Locked {
        /// The folder.
        dir: PathBuf,
    },
    /// The folder belongs to another node.
    #[error("{} belongs to node {found}, this is node {expected}: give each node a folder of its own", dir.display())]
    WrongNode {
        /// The folder.
        dir: PathBuf,
        /// This node.
        expected: RaftNodeId,
        /// The node that the folder names.
        found: RaftNodeId,
    },
    /// The folder was written by another version of the storage format.
    #[error("{} has storage format {found:?}, this program reads {expected:?}", dir.display())]
    WrongVersion {
        /// The folder.
        dir: PathBuf,
        /// The format that this program reads and writes.
        expected: String,
        /// The format that was found.
        found: String,
    },
    /// Settings that cannot work.
    #[error("raft settings: {why}")]
    Settings {
        /// What is wrong, and what would be right.
        why: String,
    },
    /// The group runs already in this process.
    #[error("group {group} is already started")]
    AlreadyStarted {
        /// The group.
        group: GroupId,
    },
    /// The group has members already; forming it once more would change nothing.
    #[error("group {group} already has a log: it was formed before")]
    AlreadyInitialized {
        /// The group.
        group: GroupId,
    },
    /// The list of members leaves out the node that was asked.
    #[error("node {node} is not among the members {members:?}")]
    NotAMember {
        /// The node that is missing.
        node: RaftNodeId,
        /// The members as given.
        members: BTreeSet<RaftNodeId>,
    },
    /// Only a leader can do this.
    #[error("this node does not lead; leader: {leader:?}")]
    NotLeader {
        /// Who leads, as far as this node knows.
        leader: LeaderHint,
    },
    /// A change of members was turned down.
    #[error("change of members refused: {why}")]
    Membership {
        /// Why.
        why: String,
    },
    /// It did not happen in time. It may still happen.
    #[error("{doing}: not done by the deadline")]
    DeadlinePassed {
        /// What was waited for.
        doing: String,
    },
    /// The group stopped for good on this node; the process must be restarted once the cause is gone.
    #[error("the group has failed on this node: {why}")]
    Failed {
        /// The cause.
        why: String,
    },
    /// The host is shutting down.
    #[error("shutting down")]
    ShuttingDown,
}

/// Why a proposal has no outcome.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// Not handed to the log: this node does not lead (or its quorum is out of reach). Ask the leader.
    #[error("this node does not lead; leader: {leader:?}")]
    NotLeader {
        /// Who leads, as far as this node knows.
        leader: LeaderHint,
    },
    /// The command may have been applied, or may be later, or never.
    #[error("outcome unknown: {why}")]
    Indeterminate {
        /// What went wrong.
        why: String,
    },
    /// Not handed to the log: the command is too long.
    #[error("a command of {bytes} bytes is over the limit of {limit}: split it")]
    TooLarge {
        /// Its length.
        bytes: usize,
        /// The most that is allowed, [`crate::MAX_COMMAND_BYTES`].
        limit: usize,
    },
    /// Not handed to the log: the host is shutting down, or its disk has failed (see the group's status).
    #[error("shutting down")]
    ShuttingDown,
}

/// Why a read index could not be had. Reads change nothing, so every one of these may be retried.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// This node does not lead.
    #[error("this node does not lead; leader: {leader:?}")]
    NotLeader {
        /// Who leads, as far as this node knows.
        leader: LeaderHint,
    },
    /// The leader could not reach a majority.
    #[error("no majority: {why}")]
    NoQuorum {
        /// Who was heard.
        why: String,
    },
    /// The caller's deadline passed first.
    #[error("the deadline passed before leadership was confirmed and the log applied")]
    DeadlinePassed,
    /// The host is shutting down, or the group has failed on this node (see the group's status).
    #[error("shutting down")]
    ShuttingDown,
}

/// Adds what was being done to an I/O error.
pub(crate) trait Doing<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, RaftError>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, RaftError> {
        self.map_err(|error| RaftError::Storage { doing: what(), source: error.into() })
    }
}
