//! A cluster of meta nodes in one process, and calls to it.

use quarry_meta::{MetaConfig, MetaNode, Timing};
use quarry_proto::{
    protocol::Announce,
    refusal::Refusal,
    v1::{self, admin_client::AdminClient, control_client::ControlClient, registry_client::RegistryClient},
};
use quarry_trust::Trust;
use quarry_wire::{
    certificate::{Certificate, Role},
    ids::{CertificateSerial, ClusterUuid, NodeId},
    keyring::Keyring,
    signed::{SecretKey, Signed},
};
use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use tempfile::TempDir;
use tokio::{
    runtime::Runtime,
    time::{Instant, sleep},
};
use tonic::{
    Response, Status,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

pub(crate) const UUID: ClusterUuid = ClusterUuid(*b"a test's cluster");
/// Longest wait for anything: the machine may be busy with other tests.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(20);

pub(crate) type Link = InterceptedService<Channel, Announce>;

pub(crate) fn root() -> SecretKey {
    SecretKey::from_seed(&[1; 32])
}

/// The key of a node and its certificate; the serial is the node's number.
pub(crate) fn identity(node: NodeId, role: Role) -> (SecretKey, Signed<Certificate>) {
    let mut seed = [2; 32];
    seed[..8].copy_from_slice(&node.0.to_le_bytes());
    let key = SecretKey::from_seed(&seed);
    let certificate = Certificate { serial: CertificateSerial(node.0), node, role, key: key.public() };
    (key, root().sign_as_root(UUID, certificate))
}

/// One meta node that can be killed.
pub(crate) struct Node {
    pub(crate) id: NodeId,
    pub(crate) address: SocketAddr,
    pub(crate) dir: TempDir,
    running: Option<(Runtime, MetaNode)>,
}

pub(crate) struct Cluster {
    pub(crate) nodes: Vec<Node>,
    shards: u32,
    tune: fn(&mut MetaConfig),
}

pub(crate) fn config(id: NodeId, dir: &TempDir, listen: SocketAddr, shards: u32) -> MetaConfig {
    let (key, certificate) = identity(id, Role::Meta);
    let mut config = MetaConfig::new(id, dir.path().to_owned(), UUID, root().public(), key, certificate, Trust::off());
    config.listen = listen;
    config.shards = shards;
    config.timing = Timing {
        heartbeat: Duration::from_millis(100),
        election_min: Duration::from_millis(500),
        election_max: Duration::from_millis(1_000),
    };
    config
}

impl Node {
    async fn start(id: NodeId, dir: TempDir, listen: SocketAddr, shards: u32, tune: fn(&mut MetaConfig)) -> Self {
        let mut node = Self { id, address: listen, dir, running: None };
        node.run(shards, tune).await;
        node
    }

    async fn run(&mut self, shards: u32, tune: fn(&mut MetaConfig)) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let mut config = config(self.id, &self.dir, self.address, shards);
        tune(&mut config);
        let deadline = Instant::now() + PATIENCE;
        let started = loop {
            // A killed node's threads may hold the folder and the port for a moment longer.
            match runtime.spawn(MetaNode::start(config.clone())).await.unwrap() {
                Ok(node) => break node,
                Err(error) => assert!(Instant::now() < deadline, "node {} does not start: {error}", self.id),
            }
            sleep(PAUSE).await;
        };
        self.address = started.address();
        self.running = Some((runtime, started));
    }

    /// Ends the node as a kill would: nothing of it runs any more, nothing was said to anybody.
    pub(crate) fn kill(&mut self) {
        let (runtime, node) = self.running.take().unwrap();
        runtime.shutdown_background();
        drop(node);
    }

    pub(crate) async fn shut_down(&mut self) {
        let (runtime, node) = self.running.take().unwrap();
        runtime.spawn(node.shutdown()).await.unwrap();
        runtime.shutdown_background();
    }

    pub(crate) const fn is_running(&self) -> bool {
        self.running.is_some()
    }

    fn link(&self) -> Link {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.address)).unwrap();
        let channel = endpoint.connect_timeout(Duration::from_secs(2)).timeout(Duration::from_secs(10)).connect_lazy();
        InterceptedService::new(channel, Announce)
    }
    pub(crate) fn control(&self) -> ControlClient<Link> {
        ControlClient::new(self.link())
    }
    pub(crate) fn registry(&self) -> RegistryClient<Link> {
        RegistryClient::new(self.link())
    }
    pub(crate) fn admin(&self) -> AdminClient<Link> {
        AdminClient::new(self.link())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.is_running() {
            self.kill();
        }
    }
}

impl Cluster {
    /// Three nodes, not bootstrapped.
    pub(crate) async fn blank(shards: u32, tune: fn(&mut MetaConfig)) -> Self {
        Self::blank_of(3, shards, tune).await
    }

    /// Nodes from 1 to this one, not bootstrapped.
    pub(crate) async fn blank_of(count: u64, shards: u32, tune: fn(&mut MetaConfig)) -> Self {
        let start = |id| {
            let any = SocketAddr::from(([127, 0, 0, 1], 0));
            Node::start(NodeId(id), tempfile::tempdir().unwrap(), any, shards, tune)
        };
        let nodes = futures::future::join_all((1..=count).map(start)).await;
        Self { nodes, shards, tune }
    }

    /// Three nodes, bootstrapped.
    pub(crate) async fn with(shards: u32, tune: fn(&mut MetaConfig)) -> Self {
        let cluster = Self::blank(shards, tune).await;
        cluster.bootstrap().await;
        cluster
    }

    /// So many nodes, of which the first three are bootstrapped.
    pub(crate) async fn with_spares(count: u64, shards: u32) -> Self {
        let cluster = Self::blank_of(count, shards, |_| {}).await;
        let mut request = cluster.bootstrap_request();
        request.metas.truncate(3);
        cluster.ask(async |node: &Node| node.admin().bootstrap(request.clone()).await).await.unwrap();
        cluster
    }

    pub(crate) async fn new() -> Self {
        Self::with(1, |_| {}).await
    }

    pub(crate) fn bootstrap_request(&self) -> v1::BootstrapRequest {
        let member = |node: &Node| v1::MetaMember {
            node: node.id.0,
            address: node.address.to_string(),
            certificate: identity(node.id, Role::Meta).1.encode().into(),
        };
        v1::BootstrapRequest {
            cluster: UUID.0.to_vec().into(),
            root: root().public().0.to_vec().into(),
            shards: self.shards,
            metas: self.nodes.iter().map(member).collect(),
        }
    }

    pub(crate) async fn bootstrap(&self) {
        let request = self.bootstrap_request();
        self.ask(async |node: &Node| node.admin().bootstrap(request.clone()).await).await.unwrap();
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| node.is_running())
    }

    pub(crate) fn node(&mut self, id: NodeId) -> &mut Node {
        self.nodes.iter_mut().find(|node| node.id == id).unwrap()
    }

    pub(crate) async fn restart(&mut self, id: NodeId) {
        let (shards, tune) = (self.shards, self.tune);
        self.node(id).run(shards, tune).await;
    }

    /// Asks one node after the other until one does not send us away; every refusal but those is definite.
    pub(crate) async fn ask<T>(&self, call: impl AsyncFn(&Node) -> Result<Response<T>, Status>) -> Result<T, Refusal> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            for node in self.running() {
                match call(node).await {
                    Ok(reply) => return Ok(reply.into_inner()),
                    Err(status) => match Refusal::from_status(&status) {
                        Some(Refusal::NotLeader(_) | Refusal::NotReady(_)) => {}
                        Some(refusal) => return Err(refusal),
                        None => assert!(Instant::now() < deadline, "{status}"),
                    },
                }
                assert!(Instant::now() < deadline, "nobody answers");
            }
            sleep(PAUSE).await;
        }
    }

    /// The node that leads `group`, by its own word and that of a majority.
    pub(crate) async fn leader(&self, group: u32) -> NodeId {
        until("a leader", async || {
            let mut leaders = Vec::new();
            for node in self.running() {
                let status = node.admin().status(v1::StatusRequest {}).await.ok()?.into_inner();
                let of = status.groups.into_iter().find(|it| it.group == group)?;
                leaders.push(of.leader);
            }
            let first = *leaders.first()?;
            let known = self.running().any(|node| node.id.0 == first);
            (known && leaders.iter().all(|leader| *leader == first)).then_some(NodeId(first))
        })
        .await
    }

    pub(crate) async fn describe(&self) -> v1::DescribeReply {
        self.ask(async |node: &Node| node.control().describe(v1::DescribeRequest { seen: None }).await).await.unwrap()
    }

    /// What a client believes after one Describe.
    pub(crate) async fn keyring(&self) -> Keyring {
        let described = self.describe().await;
        let mut keyring = Keyring::new(UUID, root().public()).unwrap();
        keyring.see_generation(quarry_wire::ids::Generation(described.generation));
        for certificate in described.changes.unwrap().certificates {
            keyring.admit(&Signed::decode(&certificate).unwrap()).unwrap();
        }
        keyring
    }

    /// A request name with a stamp that `group` has applied.
    pub(crate) async fn request(&self, group: u32) -> v1::RequestId {
        let leader = self.leader(group).await;
        let node = self.nodes.iter().find(|node| node.id == leader).unwrap();
        let described = node.control().describe(v1::DescribeRequest { seen: None }).await.unwrap().into_inner();
        let applied_ms = described.groups.iter().find(|it| it.group == group).unwrap().applied_ms;
        v1::RequestId { applied_ms, random: fresh() }
    }

    pub(crate) async fn create_namespace(&self, name: &str, copies: u32) -> v1::Namespace {
        self.create_limited(name, copies, 0).await
    }

    pub(crate) async fn create_limited(&self, name: &str, copies: u32, quota_bytes: u64) -> v1::Namespace {
        let request = v1::CreateNamespaceRequest {
            request: Some(self.request(0).await),
            name: name.to_owned(),
            class: v1::Class::Cache.into(),
            copies,
            least: 0,
            quota_bytes,
        };
        self.ask(async |node: &Node| node.control().create_namespace(request.clone()).await)
            .await
            .unwrap()
            .namespace
            .unwrap()
    }

    /// Waits until all running nodes have applied the same entries of `group`, and compares their hashes.
    pub(crate) async fn assert_equal_hashes(&self, group: u32) {
        let hashes = until("equal indexes", async || {
            let mut hashes = Vec::new();
            for node in self.running() {
                let reply = node.admin().state_hash(v1::StateHashRequest::default()).await.ok()?.into_inner();
                hashes.push(reply.groups.into_iter().find(|it| it.group == group)?);
            }
            hashes.iter().all(|it| it.applied == hashes[0].applied && it.applied > 0).then_some(hashes)
        })
        .await;
        assert!(hashes.iter().all(|it| it.hash == hashes[0].hash && it.hash.len() == 32), "replicas of {group} differ");
    }
}

/// A number that this process has not used.
pub(crate) fn fresh() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Polls until there is an answer.
pub(crate) async fn until<T>(what: &str, ask: impl AsyncFn() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited too long for {what}");
        sleep(PAUSE).await;
    }
}

/// The refusal in a status.
pub(crate) fn refusal<T: std::fmt::Debug>(result: Result<Response<T>, Status>) -> Refusal {
    Refusal::from_status(&result.unwrap_err()).expect("a typed refusal")
}
