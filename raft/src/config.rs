//! How a host is set up: its place on disk, its patience, its seams to disk and network.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tonic::transport::{Channel, Endpoint};

use crate::error::RaftError;
use crate::ids::RaftNodeId;
use crate::versions::StateVersions;

/// How often a leader says that it is there, and how long the others wait before they elect another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Between two heartbeats of a leader.
    pub heartbeat: Duration,
    /// The shortest silence after which a follower stands for election.
    pub election_min: Duration,
    /// The longest; each wait is drawn between the two. A leader without a majority for this long turns proposals away.
    pub election_max: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(250),
            election_min: Duration::from_millis(1_000),
            election_max: Duration::from_millis(2_000),
        }
    }
}

/// Makes a file's bytes safe from power loss. The seam at which tests make a disk slow or broken.
pub trait DiskSync: Send + Sync + 'static {
    /// Returns when what was written to `file` is on the medium.
    ///
    /// # Errors
    /// When that is not certain. The caller does not try again: after a failed sync the kernel may have dropped the
    /// pages.
    fn sync_data(&self, file: &File) -> io::Result<()>;
}

/// `fdatasync`.
#[derive(Debug, Default, Clone, Copy)]
pub struct Fdatasync;

impl DiskSync for Fdatasync {
    fn sync_data(&self, file: &File) -> io::Result<()> {
        file.sync_data()
    }
}

/// Connects to a peer at an endpoint whose address and patience are set. The seam for TLS: whoever sets it makes sure that this peer, and
/// no other, is at the other end.
pub type Connect =
    Arc<dyn Fn(RaftNodeId, Endpoint) -> BoxFuture<'static, Result<Channel, tonic::transport::Error>> + Send + Sync>;

/// What [`crate::Host::open`] needs to know.
#[derive(Clone)]
pub struct HostConfig {
    /// This node.
    pub node: RaftNodeId,
    /// Its folder: made if it is missing, refused if it is another node's.
    pub dir: PathBuf,
    /// Heartbeats and elections.
    pub timing: Timing,
    /// A group writes a snapshot after this many entries.
    pub snapshot_after_entries: u64,
    /// Entries kept in the log behind a snapshot, for followers that are a little late.
    pub entries_kept: u64,
    /// How long a proposal may take before its outcome is declared unknown.
    pub propose_deadline: Duration,
    /// Memory that the log database may use for its cache, in bytes.
    pub log_cache_bytes: u64,
    /// The versions of states and entries that this build's machines read, and the one of the commands that it proposes; nodes of which one
    /// does not read what the other proposes refuse each other.
    pub state_versions: StateVersions,
    /// How the log is made durable.
    pub disk: Arc<dyn DiskSync>,
    /// How other nodes are reached.
    pub connect: Connect,
}

impl HostConfig {
    /// The usual settings: `fdatasync`, plain HTTP/2 to `http://host:port`.
    pub fn new(node: RaftNodeId, dir: impl Into<PathBuf>) -> Self {
        Self {
            node,
            dir: dir.into(),
            timing: Timing::default(),
            snapshot_after_entries: 50_000,
            entries_kept: 1_000,
            propose_deadline: Duration::from_secs(10),
            log_cache_bytes: 64 << 20,
            state_versions: StateVersions::only(1),
            disk: Arc::new(Fdatasync),
            connect: Arc::new(|_, endpoint| Box::pin(async move { endpoint.connect().await })),
        }
    }

    pub(crate) fn check(&self) -> Result<(), RaftError> {
        let Timing { heartbeat, election_min, election_max } = self.timing;
        let settings = |why: String| Err(RaftError::Settings { why });
        if heartbeat < Duration::from_millis(1) || heartbeat >= election_min || election_min >= election_max {
            return settings(format!(
                "need 1ms <= heartbeat < election_min < election_max, found {heartbeat:?}, {election_min:?}, {election_max:?}"
            ));
        }
        let StateVersions { reads, proposes } = self.state_versions;
        if !reads.has(proposes) {
            return settings(format!("a node reads what it proposes: version {proposes} is none of {reads}"));
        }
        if self.snapshot_after_entries == 0 {
            return settings("snapshot_after_entries must be at least 1, found 0".to_owned());
        }
        Ok(())
    }
}

impl std::fmt::Debug for HostConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostConfig")
            .field("node", &self.node)
            .field("dir", &self.dir)
            .field("timing", &self.timing)
            .field("snapshot_after_entries", &self.snapshot_after_entries)
            .field("entries_kept", &self.entries_kept)
            .field("propose_deadline", &self.propose_deadline)
            .finish_non_exhaustive()
    }
}
