//! All groups of one node: one log, one committer thread, one way to each peer.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::join_all;
use openraft::{Config, Raft, SnapshotPolicy};
use tokio::sync::{Semaphore, watch};
use tokio::time::sleep;

use crate::config::HostConfig;
use crate::error::{Doing, RaftError};
use crate::group::Group;
use crate::ids::{GroupId, RaftNodeId};
use crate::machine::{MAX_COMMAND_BYTES, Machine};
use crate::port::{GroupPort, Heard};
use crate::replica::{Cell, Replica, blocking};
use crate::store::Store;
use crate::store::log::GroupLog;
use crate::store::snapshot::Snapshots;
use crate::transport::link::Links;
use crate::transport::network::Network;
use crate::transport::service::{PeerService, Ports, RaftService};
use crate::transport::{MESSAGE_BYTES_AIM, MESSAGE_BYTES_MAX, Port, snapshots};

/// How many entries one append to a follower carries.
const APPEND_ENTRIES_MAX: u32 = 64;
// A message may hold one append on top of what it was to hold.
const _: () =
    assert!(APPEND_ENTRIES_MAX as usize * (MAX_COMMAND_BYTES + 1024) + MESSAGE_BYTES_AIM <= MESSAGE_BYTES_MAX);
/// How long a snapshot may take to send and install.
const SNAPSHOT_DEADLINE: Duration = Duration::from_secs(600);

/// One node's part in all its groups. Cheap to clone.
#[derive(Clone)]
pub struct Host {
    inner: Arc<Inner>,
}

struct Inner {
    config: HostConfig,
    store: Arc<Store>,
    links: Arc<Links>,
    ports: Arc<Ports>,
    service: PeerService,
    snapshot_slots: Arc<Semaphore>,
    /// Groups are started one after the other.
    starting: tokio::sync::Mutex<()>,
    closed: AtomicBool,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("config", &self.inner.config).finish_non_exhaustive()
    }
}

impl Host {
    /// Opens the node's folder, or makes it.
    ///
    /// # Errors
    /// [`RaftError::Locked`], [`RaftError::WrongNode`], [`RaftError::WrongVersion`], [`RaftError::Settings`],
    /// [`RaftError::Storage`].
    pub async fn open(config: HostConfig) -> Result<Self, RaftError> {
        config.check()?;
        let opening = config.clone();
        let store = tokio::task::spawn_blocking(move || Store::open(&opening))
            .await
            .map_err(std::io::Error::other)
            .doing(|| "open the log".to_owned())??;
        let generation = store.generation();
        let links =
            Links::new(config.node, Arc::clone(&config.connect), Arc::clone(&generation), config.state_versions);
        let ports = Ports::new(config.node, generation, config.state_versions);
        Ok(Self::of(config, Arc::new(store), links, ports))
    }

    /// A host in a simulated world, on this disk and wire. Its folder holds snapshots only; give each life of a node one of its
    /// own, with the files that the one before it left behind.
    ///
    /// # Errors
    /// [`RaftError::Settings`].
    #[cfg(feature = "sim")]
    pub fn simulated(config: HostConfig, disk: &crate::sim::Disk, net: &crate::sim::Net) -> Result<Self, RaftError> {
        config.check()?;
        let store = Arc::new(Store::simulated(&config, disk));
        let ports = Ports::new(config.node, store.generation(), config.state_versions);
        let links = Links::simulated(Arc::clone(&config.connect), net.clone(), Arc::clone(&ports));
        net.join(Arc::clone(&ports));
        Ok(Self::of(config, store, links, ports))
    }

    fn of(config: HostConfig, store: Arc<Store>, links: Arc<Links>, ports: Arc<Ports>) -> Self {
        let service = PeerService::new(Arc::clone(&ports));
        tokio::spawn(pulse(config.timing.heartbeat, Arc::clone(&ports)));
        tokio::spawn(end_at_fault(store.committer().watch_failed(), Arc::clone(&ports), Arc::clone(&links)));
        let inner = Inner {
            config,
            store,
            links,
            ports,
            service,
            snapshot_slots: Arc::new(Semaphore::new(snapshots::AT_ONCE)),
            starting: tokio::sync::Mutex::new(()),
            closed: AtomicBool::new(false),
        };
        Self { inner: Arc::new(inner) }
    }

    /// This node.
    pub fn node(&self) -> RaftNodeId {
        self.inner.config.node
    }

    /// The generation of this node's groups: 1, and one more each time that they began again from a backup or from one survivor. Nodes of
    /// different generations refuse each other; one whose groups were never formed takes the generation of the first that calls.
    pub fn generation(&self) -> u32 {
        self.inner.store.generation().get()
    }

    /// Starts a group with an empty machine and recovers it: the newest snapshot is restored and the log is applied up
    /// to the last entry that was known to be committed, before this returns. A group that was never formed waits for
    /// [`Group::initialize`] here or on another member.
    ///
    /// # Errors
    /// [`RaftError::AlreadyStarted`], [`RaftError::Storage`], [`RaftError::ShuttingDown`], [`RaftError::Failed`] when
    /// what is on disk does not fit together.
    pub async fn start_group<M: Machine>(&self, id: GroupId, machine: M) -> Result<Group<M>, RaftError> {
        let inner = &self.inner;
        let _turn = inner.starting.lock().await;
        if inner.closed.load(Ordering::SeqCst) {
            return Err(RaftError::ShuttingDown);
        }
        self.well()?;
        if inner.ports.contains(id) {
            return Err(RaftError::AlreadyStarted { group: id });
        }
        let dir = inner.store.snapshot_dir(id);
        let snapshots =
            blocking(move || Snapshots::open(dir, id)).await.doing(|| format!("open the snapshots of group {id}"))?;
        let log = GroupLog::open(&inner.store, id).doing(|| format!("open the log of group {id}"))?;
        let cell = Cell::new(machine);
        let network = Network {
            group: id,
            links: Arc::clone(&inner.links),
            append_limit: inner.config.timing.election_max,
            snapshot_slots: Arc::clone(&inner.snapshot_slots),
        };
        let replica = Replica::new(Arc::clone(&cell), Arc::clone(&snapshots));
        let raft = Raft::new(inner.config.node.0, Arc::new(self.settings(id)?), network, log, replica)
            .await
            .map_err(|fatal| RaftError::Failed { why: fatal.to_string() })?;
        // The core answers once it has taken in what was recovered and has published its first status.
        raft.is_initialized().await.map_err(|fatal| RaftError::Failed { why: fatal.to_string() })?;
        let (heard, stands) = (Heard::nobody(), Arc::new(AtomicBool::new(true)));
        let port = GroupPort {
            raft: raft.clone(),
            snapshots,
            heard: heard.clone(),
            group: id,
            timing: inner.config.timing,
            stands: Arc::clone(&stands),
            stood: parking_lot::Mutex::new(None),
        };
        let added = inner.ports.add(id, Arc::new(port));
        assert!(added, "groups are started one after the other");
        if let Err(fault) = self.well() {
            // The others may have been stopped before this one was among them.
            stop(inner.ports.close()).await;
            return Err(fault);
        }
        let store = Arc::clone(&inner.store);
        Ok(Group::new(id, inner.config.node, raft, cell, store, inner.config.propose_deadline, (heard, stands)))
    }

    fn well(&self) -> Result<(), RaftError> {
        self.fault().map_or(Ok(()), |why| Err(RaftError::Failed { why }))
    }

    fn settings(&self, id: GroupId) -> Result<Config, RaftError> {
        let config = &self.inner.config;
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let settings = Config {
            cluster_name: format!("quarry-{id}"),
            heartbeat_interval: millis(config.timing.heartbeat),
            // They come from `pulse`, for all groups at once.
            enable_heartbeat: false,
            election_timeout_min: millis(config.timing.election_min),
            election_timeout_max: millis(config.timing.election_max),
            install_snapshot_timeout: millis(SNAPSHOT_DEADLINE),
            max_payload_entries: APPEND_ENTRIES_MAX.into(),
            snapshot_policy: SnapshotPolicy::LogsSinceLast(config.snapshot_after_entries),
            max_in_snapshot_log_to_keep: config.entries_kept,
            replication_lag_threshold: config.snapshot_after_entries.saturating_add(config.entries_kept),
            // A restarted leader stands for election like everyone else: its machine may be behind its old promises.
            enable_leader_restore: Some(false),
            // A node that comes back from a partition must not unseat a healthy leader.
            enable_pre_vote: Some(true),
            ..Config::default()
        };
        settings.validate().map_err(|error| RaftError::Settings { why: error.to_string() })
    }

    /// The service for the node's gRPC server. The server must accept with `TCP_NODELAY` (tonic's
    /// `TcpIncoming::with_nodelay`), or every answer waits 40 ms for a delayed acknowledgement.
    pub fn service(&self) -> RaftService {
        RaftService::new(self.inner.service.clone())
    }

    /// Says to the other nodes, with every answer, whether this node wants no leadership. They and this node act upon it as the
    /// application decides: see [`Host::draining_peers`] and [`Group::stand_for_election`].
    pub fn set_draining(&self, draining: bool) {
        self.inner.ports.set_draining(draining);
    }

    /// What was last said of this node.
    pub fn is_draining(&self) -> bool {
        self.inner.ports.is_draining()
    }

    /// The nodes that want no leadership, by their last answers to this one.
    pub fn draining_peers(&self) -> BTreeSet<RaftNodeId> {
        self.inner.links.draining()
    }

    /// Why nothing can be made durable any more, if the disk has failed. All groups of this host are stopped then: a
    /// node that can promise nothing must neither lead nor vote. The process should end.
    pub fn fault(&self) -> Option<String> {
        self.inner.store.committer().failed()
    }

    /// Waits until [`Host::fault`] says something; never returns while the disk does its work.
    pub async fn failed(&self) -> String {
        let mut watch = self.inner.store.committer().watch_failed();
        match watch.wait_for(Option::is_some).await.map(|why| why.clone()) {
            Ok(Some(why)) => why,
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }

    /// Stops all groups and links, makes the log durable and lets go of the folder. Handles to groups then answer that
    /// the host is shutting down.
    pub async fn shutdown(&self) {
        self.inner.closed.store(true, Ordering::SeqCst);
        let _turn = self.inner.starting.lock().await;
        stop(self.inner.ports.close()).await;
        self.inner.links.close();
        let store = Arc::clone(&self.inner.store);
        let closed = blocking(move || {
            store.close();
            Ok(())
        });
        if let Err(error) = closed.await {
            tracing::error!(%error, "the log was not closed cleanly");
        }
    }
}

/// Has all groups that this node leads say so to their followers, together, so that what goes to one peer goes in few messages: see
/// `transport/link.rs`. The other groups look at their election timers only once their leader was silent for half of it:
/// with many groups, that would cost more than the heartbeats. Ends with the host.
async fn pulse(every: Duration, ports: Arc<Ports>) {
    let mut closed = ports.closed();
    loop {
        tokio::select! {
            () = sleep(every) => {}
            _ = closed.wait_for(|closed| *closed) => return,
        }
        for group in ports.all() {
            group.pulse();
        }
    }
}

/// Stops all groups when the disk fails: those without a write in flight would not notice by themselves, and go on
/// leading. Holds nothing that keeps the host alive.
async fn end_at_fault(mut fault: watch::Receiver<Option<String>>, ports: Arc<Ports>, links: Arc<Links>) {
    if fault.wait_for(Option::is_some).await.is_ok() {
        let groups = ports.close();
        links.close();
        stop(groups).await;
    }
}

async fn stop(groups: Vec<Arc<dyn Port>>) {
    join_all(groups.iter().map(|group| group.stop())).await;
}
