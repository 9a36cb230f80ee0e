//! What a meta node needs to know before it starts.

use crate::{clock::WallClock, error::MetaError};
pub use quarry_meta_state::shard::Marks;
pub use quarry_raft::Timing;
use quarry_trust::{Limits, Trust};
use quarry_wire::{
    certificate::{Certificate, Role},
    ids::{ClusterUuid, NodeId},
    keyring::Keyring,
    signed::{PublicKey, SecretKey, Signed},
};
use std::{net::SocketAddr, path::PathBuf, time::Duration};

/// Most shards of a cluster: every one is a Raft group on every meta node.
pub const SHARDS_MAX: u32 = 256;

/// Settings of one meta node. Make it with [`MetaConfig::new`] and change what should differ.
#[derive(Clone, Debug)]
pub struct MetaConfig {
    /// This node; never used for another one, nor again with an empty folder.
    pub node: NodeId,
    /// Where its gRPC server listens; port 0 takes any free one.
    pub listen: SocketAddr,
    /// `host:port` under which the others reach it; none: the address it listens on.
    pub advertise: Option<String>,
    /// Its folder.
    pub data_dir: PathBuf,
    /// The cluster.
    pub cluster: ClusterUuid,
    /// The public half of the cluster's root key.
    pub root: PublicKey,
    /// This node's key: it signs grants.
    pub key: SecretKey,
    /// The certificate of that key.
    pub certificate: Signed<Certificate>,
    /// How it proves who it is, and whom it lets in.
    pub trust: Trust,
    /// What the clients of its gRPC server may use up.
    pub limits: Limits,
    /// Shards of the cluster; the same on every node, fixed when the cluster is made.
    pub shards: u32,
    /// Heartbeats and elections.
    pub timing: Timing,
    /// A group writes a snapshot after this many entries.
    pub snapshot_after_entries: u64,
    /// Entries kept in the log behind a snapshot, for followers that are a little late.
    pub entries_kept: u64,
    /// Between two leaderships that this node gives away because it leads more than others; none: they stay where elections leave them.
    pub balance_every: Option<Duration>,
    /// A data node that is silent for longer is declared dead.
    pub node_silence: Duration,
    /// When cache slabs are evicted: in thousandths of what a data node lends to a shard; `low: 0` turns eviction off.
    pub eviction: Marks,
    /// How often a shard's leader looks whether an extent should be emptied; at most 16 MiB of slots are moved each time.
    pub compact_every: Duration,
    /// Deadline of calls that bring none.
    pub call_deadline: Duration,
    /// How long a shutdown may take to hand over leaderships and finish calls.
    pub drain: Duration,
    /// The wall clock.
    pub wall: WallClock,
    /// `host:port` where this process shows its metrics, to be told by `Status`; none if it does not.
    pub admin_address: Option<String>,
}

impl MetaConfig {
    /// The usual settings for this node; `trust` says how others prove who they are.
    #[must_use]
    pub fn new(
        node: NodeId,
        data_dir: PathBuf,
        cluster: ClusterUuid,
        root: PublicKey,
        key: SecretKey,
        certificate: Signed<Certificate>,
        trust: Trust,
    ) -> Self {
        Self {
            node,
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise: None,
            data_dir,
            cluster,
            root,
            key,
            certificate,
            trust,
            limits: Limits::default(),
            shards: 1,
            timing: Timing::default(),
            snapshot_after_entries: 50_000,
            entries_kept: 1_000,
            balance_every: Some(Duration::from_secs(1)),
            node_silence: Duration::from_secs(10),
            eviction: Marks::default(),
            compact_every: Duration::from_secs(1),
            call_deadline: Duration::from_secs(10),
            drain: Duration::from_secs(10),
            wall: WallClock::system(),
            admin_address: None,
        }
    }

    /// A keyring that knows the root and this node.
    pub(crate) fn check(&self) -> Result<Keyring, MetaError> {
        let settings = |why: String| MetaError::Settings { why };
        if self.node.0 == 0 {
            return Err(settings("node must be 1 or more, 0 stands for no node".to_owned()));
        }
        self.limits.check().map_err(|error| settings(error.to_string()))?;
        if self.shards == 0 || self.shards > SHARDS_MAX {
            return Err(settings(format!("shards must be 1 to {SHARDS_MAX}, found {}", self.shards)));
        }
        if self.node_silence <= self.timing.heartbeat {
            return Err(settings(format!(
                "node_silence must be longer than a heartbeat ({:?}), found {:?}",
                self.timing.heartbeat, self.node_silence
            )));
        }
        let (Marks { low, high }, most) = (self.eviction, Marks::most(self.shards));
        if low > most.low {
            return Err(settings(format!(
                "eviction.low must be at most {} with {} shards, found {low}",
                most.low, self.shards
            )));
        }
        if low > 0 && (high > most.high || high <= low) {
            return Err(settings(format!(
                "eviction.high must be above eviction.low ({low}) and at most {} with {} shards, found {high}",
                most.high, self.shards
            )));
        }
        let said = &self.certificate.statement;
        if said.node != self.node || said.role != Role::Meta || said.key != self.key.public() {
            return Err(settings(format!(
                "certificate must be of {} as meta for the key {}, found {} as {} for {}",
                self.node,
                self.key.public(),
                said.node,
                said.role,
                said.key
            )));
        }
        if let Some(identity) = self.trust.identity()
            && identity.node_as(Role::Meta) != Some(self.node)
        {
            return Err(settings(format!("the credentials must be those of {} as meta, found {identity}", self.node)));
        }
        let mut keyring = Keyring::new(self.cluster, self.root).map_err(|source| MetaError::Trust { source })?;
        keyring.admit(&self.certificate).map_err(|source| MetaError::Trust { source })?;
        Ok(keyring)
    }
}
