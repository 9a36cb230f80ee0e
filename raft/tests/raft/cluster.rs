//! Cables: a machine to replicate, hosts with servers, and waiting for a condition.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use quarry_raft::{
    Applied, Group, GroupId, GroupStatus, Host, HostConfig, LogIndex, Machine, ProposeError, RaftNodeId, Role,
    SnapshotWriter, Timing,
};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic::transport::server::TcpIncoming;

pub(crate) const GROUP: GroupId = GroupId(0);
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn soon() -> Instant {
    Instant::now() + PATIENCE
}

pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = soon();
    while !holds() {
        assert!(Instant::now() < deadline, "did not come about: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Remembers every command by the number in its first eight bytes. A repeated number changes nothing.
#[derive(Clone, Default)]
pub(crate) struct Ledger {
    pub(crate) lines: BTreeMap<u64, Bytes>,
    /// How often a snapshot was restored. No part of the state.
    pub(crate) restored: Arc<AtomicU64>,
    /// How many entries were applied since it was made. No part of the state.
    pub(crate) applied: Arc<AtomicU64>,
}

impl Ledger {
    fn note(&mut self, command: &[u8]) {
        let number: [u8; 8] = command[..8].try_into().expect("eight bytes");
        self.lines.insert(u64::from_le_bytes(number), Bytes::copy_from_slice(command));
    }

    pub(crate) fn numbers(&self) -> BTreeSet<u64> {
        self.lines.keys().copied().collect()
    }
}

pub(crate) fn command(number: u64, bytes: usize) -> Bytes {
    let mut command = number.to_le_bytes().to_vec();
    command.resize(bytes.max(8), b'.');
    command.into()
}

impl Machine for Ledger {
    /// How many lines there are.
    type Outcome = usize;

    fn apply(&mut self, _: LogIndex, command: &[u8]) -> usize {
        self.applied.fetch_add(1, Ordering::SeqCst);
        self.note(command);
        self.lines.len()
    }

    fn snapshot(&self) -> Box<dyn SnapshotWriter> {
        Box::new(self.clone())
    }

    fn restore(&mut self, input: &mut dyn io::Read) -> io::Result<()> {
        self.lines.clear();
        let mut length = [0; 4];
        while input.read_exact(&mut length).is_ok() {
            let mut line = vec![0; u32::from_le_bytes(length) as usize];
            input.read_exact(&mut line)?;
            self.note(&line);
        }
        self.restored.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn hash(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        for (number, line) in &self.lines {
            hash.update(number.to_le_bytes());
            hash.update(Sha256::digest(line));
        }
        hash.finalize().into()
    }
}

impl SnapshotWriter for Ledger {
    fn write_to(self: Box<Self>, out: &mut dyn io::Write) -> io::Result<()> {
        for line in self.lines.values() {
            out.write_all(&u32::try_from(line.len()).map_err(io::Error::other)?.to_le_bytes())?;
            out.write_all(line)?;
        }
        Ok(())
    }
}

/// One running node.
pub(crate) struct Node {
    pub(crate) host: Host,
    pub(crate) group: Group<Ledger>,
    pub(crate) restored: Arc<AtomicU64>,
    server: JoinHandle<()>,
}

/// Nodes 1..=n with a folder and an address each; some of them run.
pub(crate) struct Cluster {
    pub(crate) dir: TempDir,
    pub(crate) addrs: BTreeMap<RaftNodeId, SocketAddr>,
    pub(crate) nodes: BTreeMap<RaftNodeId, Node>,
    shape: fn(HostConfig) -> HostConfig,
}

pub(crate) fn test_config(node: RaftNodeId, dir: impl Into<std::path::PathBuf>) -> HostConfig {
    HostConfig {
        timing: Timing {
            heartbeat: Duration::from_millis(100),
            election_min: Duration::from_millis(600),
            election_max: Duration::from_millis(1_200),
        },
        log_cache_bytes: 16 << 20,
        ..HostConfig::new(node, dir)
    }
}

impl Cluster {
    /// Starts `count` nodes that form no group yet.
    pub(crate) async fn start(count: u64, shape: fn(HostConfig) -> HostConfig) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let mut cluster = Self { dir, addrs: BTreeMap::new(), nodes: BTreeMap::new(), shape };
        for id in (1..=count).map(RaftNodeId) {
            cluster.add(id).await;
        }
        cluster
    }

    /// Starts nodes that form a group, and waits for its leader.
    pub(crate) async fn formed(count: u64, shape: fn(HostConfig) -> HostConfig) -> Self {
        let cluster = Self::start(count, shape).await;
        cluster.nodes[&RaftNodeId(1)].group.initialize(cluster.members()).await.expect("a new group");
        cluster.leader().await;
        cluster
    }

    pub(crate) async fn add(&mut self, id: RaftNodeId) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        self.addrs.insert(id, listener.local_addr().expect("bound"));
        self.run(id, listener).await;
    }

    pub(crate) fn members(&self) -> BTreeMap<RaftNodeId, String> {
        self.addrs.iter().map(|(id, addr)| (*id, addr.to_string())).collect()
    }

    pub(crate) fn config(&self, id: RaftNodeId) -> HostConfig {
        (self.shape)(test_config(id, self.dir.path().join(format!("node-{id}"))))
    }

    async fn run(&mut self, id: RaftNodeId, listener: TcpListener) {
        let host = Host::open(self.config(id)).await.expect("the node's folder");
        let machine = Ledger::default();
        let restored = Arc::clone(&machine.restored);
        let group = host.start_group(GROUP, machine).await.expect("a group that recovers");
        let server = tonic::transport::Server::builder()
            .add_service(host.service())
            .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)));
        let server = tokio::spawn(async move { server.await.expect("a server") });
        self.nodes.insert(id, Node { host, group, restored, server });
    }

    pub(crate) async fn stop(&mut self, id: RaftNodeId) {
        let node = self.nodes.remove(&id).expect("a running node");
        node.host.shutdown().await;
        node.server.abort();
        assert!(node.server.await.is_err(), "the server ended before it was stopped");
    }

    pub(crate) async fn restart(&mut self, id: RaftNodeId) {
        let deadline = soon();
        let listener = loop {
            match TcpListener::bind(self.addrs[&id]).await {
                Ok(listener) => break listener,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        self.run(id, listener).await;
    }

    pub(crate) async fn shutdown(mut self) {
        for id in self.nodes.keys().copied().collect::<Vec<_>>() {
            self.stop(id).await;
        }
    }

    /// A leader that has applied the beginning of its term.
    pub(crate) fn leader_now(&self) -> Option<RaftNodeId> {
        let statuses = self.nodes.values().map(|node| node.group.status());
        let leads = |status: &GroupStatus| status.role == Role::Leader && status.leader_since.is_some();
        statuses.filter(leads).max_by_key(|status| status.term).map(|status| status.node)
    }

    pub(crate) async fn leader(&self) -> RaftNodeId {
        until("a leader", || self.leader_now().is_some()).await;
        self.leader_now().expect("there was one")
    }

    pub(crate) fn group(&self, id: RaftNodeId) -> &Group<Ledger> {
        &self.nodes[&id].group
    }

    /// Proposes until it is applied; repeating it is harmless.
    pub(crate) async fn write(&self, number: u64, bytes: usize) -> Applied<usize> {
        let deadline = soon();
        loop {
            let leader = self.leader().await;
            match self.group(leader).propose(command(number, bytes)).await {
                Ok(applied) => return applied,
                Err(ProposeError::NotLeader { .. } | ProposeError::Indeterminate { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            assert!(Instant::now() < deadline, "command {number} was not applied");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until all running nodes have applied as much as the leader, and compares their states.
    pub(crate) async fn converge(&self) -> BTreeSet<u64> {
        let leader = self.leader().await;
        let target = self.group(leader).read_index(soon()).await.expect("a leader with a majority");
        for (id, node) in &self.nodes {
            until(&format!("node {id} applies {target}"), || node.group.with(|_, applied| applied >= target)).await;
        }
        let hashes: BTreeSet<_> = self.nodes.values().map(|node| node.group.with(|ledger, _| ledger.hash())).collect();
        assert_eq!(hashes.len(), 1, "the replicas differ");
        self.group(leader).with(|ledger, _| ledger.numbers())
    }
}
