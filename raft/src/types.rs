//! The one place that binds our types to openraft's parameters.

use std::any::Any;
use std::fmt;

use bytes::Bytes;
use openraft::BasicNode;
use openraft::type_config::alias;
use parking_lot::Mutex;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[cfg(feature = "sim")]
use crate::sim::runtime::Runtime;
#[cfg(not(feature = "sim"))]
use openraft::TokioRuntime as Runtime;

openraft::declare_raft_types!(
    /// Standard Raft (one leader in a term), opaque commands, outcomes that never leave the process.
    pub(crate) Types:
        D = Command,
        R = Reply,
        NodeId = u64,
        Node = BasicNode,
        AsyncRuntime = Runtime,
        LeaderId = openraft::impls::leader_id_std::LeaderId<Self::Term, Self::NodeId>,
);

pub(crate) type LogId = alias::LogIdOf<Types>;
pub(crate) type Vote = alias::VoteOf<Types>;
pub(crate) type Entry = alias::EntryOf<Types>;
pub(crate) type StoredMembership = alias::StoredMembershipOf<Types>;
pub(crate) type SnapshotMeta = alias::SnapshotMetaOf<Types>;
pub(crate) type Snapshot = alias::SnapshotOf<Types, crate::store::snapshot::SnapshotFile>;
pub(crate) type Metrics = openraft::RaftMetrics<Types>;

pub(crate) fn log_id(term: u64, index: u64) -> LogId {
    LogId::new_term_index(term, index)
}

pub(crate) fn term_of(id: &LogId) -> u64 {
    id.committed_leader_id().term
}

/// A machine's command, opaque here.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Command(pub(crate) Bytes);

impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Command({} bytes)", self.0.len())
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

/// A machine's outcome on its way to whoever proposed the command. Empty for entries that are not commands.
#[derive(Default)]
pub(crate) struct Reply(Mutex<Option<Box<dyn Any + Send>>>);

impl Reply {
    pub(crate) fn new<T: Send + 'static>(outcome: T) -> Self {
        Self(Mutex::new(Some(Box::new(outcome))))
    }

    pub(crate) fn take<T: 'static>(self) -> Option<T> {
        self.0.into_inner()?.downcast().ok().map(|outcome| *outcome)
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reply")
    }
}

// openraft asks for these so that replies could be forwarded between nodes; ours never are.
impl Serialize for Reply {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("an outcome stays in the process that applied the command"))
    }
}

impl<'de> Deserialize<'de> for Reply {
    fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Err(serde::de::Error::custom("an outcome stays in the process that applied the command"))
    }
}
