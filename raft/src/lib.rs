//! Many Raft groups on one log: consensus behind a few traits.
//!
//! A [`Host`] is one node's part in all its groups. A [`Group`] replicates a [`Machine`] by commands, which are opaque
//! bytes here. Nothing outside sees the Raft library that does the work, nor the database that holds logs and votes.
//!
//! What holds:
//! - *Acknowledged is on disk*: a vote or an entry counts only after `fdatasync` of the log's journal (`store/committer`).
//! - *A failed sync is final*: nothing is acknowledged after it and nothing is tried again.
//! - *An error proves little*: only refusals from before a command was handed to the log say that it was not applied
//!   ([`ProposeError`]).
//! - *Whole or absent*: a snapshot file has its name only once it is complete and synced (`store/snapshot`).
//! - *State and index together*: a reader sees a machine and the index that it has applied ([`Group::with`]).
//! - A restarted leader does not lead again without an election; a group serves only after it was recovered.
//!
//! Left to others: what commands mean, time, who may call, TLS (through [`Connect`] and the caller's server).

mod config;
mod error;
mod generation;
mod group;
mod host;
mod ids;
mod machine;
mod metrics;
mod offline;
mod port;
mod reads;
mod replica;
#[cfg(feature = "sim")]
pub mod sim;
mod status;
mod store;
mod succession;
mod transport;
mod types;
mod versions;

pub use config::{Connect, DiskSync, Fdatasync, HostConfig, Timing};
pub use error::{LeaderHint, ProposeError, RaftError, ReadError};
pub use group::{Applied, Frozen, Group};
pub use host::Host;
pub use ids::{GroupId, LogIndex, RaftNodeId, Term};
pub use machine::{MAX_COMMAND_BYTES, Machine, SnapshotWriter};
pub use metrics::describe_metrics;
pub use offline::{FoundEntry, FoundGroup, FoundKind, FoundVote, Offline, Place, Seed, found};
pub use status::{GroupStatus, Member, Role};
pub use transport::service::{ProvedPeer, RaftService};
pub use versions::{Span, StateVersions};
