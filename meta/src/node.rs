//! The meta node: opens its folder, hosts its groups, serves, and leaves in good order.

use crate::{
    config::MetaConfig,
    core::{Core, HostedShard},
    disk,
    error::MetaError,
    eviction::{self, Eviction},
    feed, health,
    hosted::Hosted,
    leases::Horizon,
    lending::{self, Lending},
    machine::{Replicated, StateMachine},
    members,
    membership::Membership,
    moves::{self, Moving},
    offices,
    probe::MetaProbe,
    service::Service,
    tree::Trees,
};
use futures::future::select_all;
use quarry_meta_state::{Directory, SNAPSHOT_VERSION, Shard, shard::Settings};
use quarry_proto::{
    protocol::Check,
    telemetry::Telemetry,
    v1::{admin_server::AdminServer, control_server::ControlServer, registry_server::RegistryServer},
};
use quarry_raft::{GroupId, Host, HostConfig, ProvedPeer, RaftNodeId, StateVersions};
use quarry_trust::{Caller, Expect};
use quarry_wire::{
    certificate,
    ids::{Generation, NodeId, ShardId},
    limits::MESSAGE_BYTES_MAX,
};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    task::JoinSet,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status, service::interceptor::InterceptedService, transport::server::TcpIncoming};
use tonic_health::server::HealthReporter;

/// How long connections may take to close once all calls have ended.
const CLOSING: Duration = Duration::from_secs(1);
/// The generation in which every cluster begins: shards are made with it, later ones come through the feed.
const FIRST_GENERATION: Generation = Generation(1);

/// A running meta node. It serves until [`MetaNode::shutdown`]; dropping it instead stops the work of this node at once and leaves open
/// connections to the end of the process.
pub struct MetaNode {
    core: Arc<Core>,
    address: SocketAddr,
    advertised: String,
    health: HealthReporter,
    /// The task that tells the health of this node.
    looking: JoinSet<()>,
    stop: CancellationToken,
    server: JoinSet<Result<(), tonic::transport::Error>>,
    work: JoinSet<()>,
}

impl std::fmt::Debug for MetaNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MetaNode").field("node", &self.core.config.node).field("address", &self.address).finish()
    }
}

impl MetaNode {
    /// Starts a node: recovers its groups, then serves. A node of a cluster that is not made yet waits to be bootstrapped.
    ///
    /// # Errors
    /// [`MetaError`].
    pub async fn start(config: MetaConfig) -> Result<Self, MetaError> {
        config.check()?;
        let (dir, cluster, node) = (config.data_dir.clone(), config.cluster, config.node);
        let raft_dir = tokio::task::spawn_blocking(move || disk::claim(&dir, cluster, node))
            .await
            .map_err(|error| MetaError::Disk { doing: "claim the folder".to_owned(), source: error.into() })??;
        let listening = |source| MetaError::Listen { address: config.listen.to_string(), source };
        let listener = quarry_trust::listen(config.listen).map_err(listening)?;
        let address = listener.local_addr().map_err(listening)?;
        let advertised = config.advertise.clone().unwrap_or_else(|| address.to_string());

        let trust = config.trust.clone();
        let host = Host::open(HostConfig {
            connect: Arc::new(move |peer, endpoint| {
                let connector = trust.connector(Expect::meta(NodeId(peer.0)));
                Box::pin(async move { endpoint.connect_with_connector(connector).await })
            }),
            timing: config.timing,
            snapshot_after_entries: config.snapshot_after_entries,
            entries_kept: config.entries_kept,
            propose_deadline: config.call_deadline,
            // Not the older ones that are read from disk: a build that wrote those applies some commands in other ways.
            state_versions: StateVersions::only(SNAPSHOT_VERSION.into()),
            ..HostConfig::new(RaftNodeId(node.0), raft_dir)
        })
        .await?;
        let mut work = JoinSet::new();
        let directory = start_group(&host, GroupId(0), Directory::new(), &mut work).await?;
        same_generation(&config.data_dir, &host, &directory)?;
        let mut shards = Vec::new();
        for id in (1..=config.shards).map(ShardId) {
            let state = Shard::new(id, Settings::new(FIRST_GENERATION, config.shards));
            let hosted = start_group(&host, GroupId(id.0), state, &mut work).await?;
            work.spawn(feed::follow(Arc::clone(&directory), Arc::clone(&hosted)));
            let (horizon, trees) = (Horizon::default(), Trees::default());
            let (eviction, moving, lending) = (Eviction::default(), Moving::default(), Lending::default());
            shards.push(HostedShard { id, hosted, horizon, trees, eviction, moving, lending });
        }
        let membership = Arc::new(Membership::new(config.node_silence, Instant::now()));
        work.spawn(Arc::clone(&membership).judge(Arc::clone(&directory)));

        let (health, health_service) = tonic_health::server::health_reporter();
        let core = Arc::new(Core::new(config, host, directory, shards.into(), membership));
        work.spawn(lending::lend(Arc::clone(&core.directory), Arc::clone(&core.shards)));
        let evicts = core.config.eviction.low > 0;
        work.spawn(lending::give(Arc::clone(&core.directory), Arc::clone(&core.shards), evicts));
        for index in 0..core.shards.len() {
            work.spawn(eviction::run(Arc::clone(&core), index));
            work.spawn(moves::compact(Arc::clone(&core), index));
        }
        work.spawn(members::run(Arc::clone(&core)));
        work.spawn(members::ask_whether_removed(Arc::clone(&core)));
        let mut looking = JoinSet::new();
        work.spawn(offices::keep(Arc::clone(&core)));
        looking.spawn(health::report(Arc::clone(&core), health.clone()));
        let stop = CancellationToken::new();
        let service = Service::new(Arc::clone(&core));
        let door = core.config.trust.door(core.config.limits);
        let router = door
            .server()
            .layer(Telemetry::new(core.config.wall.now_ms() << 20))
            .layer(core.counters.clone())
            .layer(door.guard())
            .layer(door.admission())
            .add_service(health_service)
            .add_service(InterceptedService::new(core.host.service(), prove(Arc::clone(&core.directory))))
            .add_service(InterceptedService::new(
                ControlServer::new(service.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX),
                Check,
            ))
            .add_service(InterceptedService::new(
                RegistryServer::new(service.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX),
                Check,
            ))
            .add_service(InterceptedService::new(
                AdminServer::new(service).max_decoding_message_size(MESSAGE_BYTES_MAX),
                Check,
            ));
        let incoming = door.incoming(TcpIncoming::from(listener).with_nodelay(Some(true)));
        let mut server = JoinSet::new();
        server.spawn(router.serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned()));
        tracing::info!(node = %core.config.node, %address, "serving");
        Ok(Self { core, address, advertised, health, looking, stop, server, work })
    }

    /// The address that it listens on.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// `host:port` under which others reach it.
    #[must_use]
    pub fn advertised(&self) -> &str {
        &self.advertised
    }

    /// A handle for asking how the node is.
    #[must_use]
    pub fn probe(&self) -> MetaProbe {
        MetaProbe::new(Arc::clone(&self.core))
    }

    /// Waits until this node has failed for good and says why: its disk did, which ends all its groups, or the log of one cannot be applied.
    /// The process should end then: nothing is acknowledged any more.
    pub async fn failed(&self) -> String {
        let shards = self.core.shards.iter().map(|shard| shard.hosted.watch());
        let failing = std::iter::once(self.core.directory.watch()).chain(shards).map(|mut watch| {
            Box::pin(async move {
                match watch.wait_for(|status| status.fault.is_some()).await {
                    Ok(status) => status.fault.clone().unwrap_or_default(),
                    // Shut down in good order: that is no failure.
                    Err(_) => std::future::pending().await,
                }
            })
        });
        let why = tokio::select! {
            biased;
            why = self.core.host.failed() => why,
            (why, ..) = select_all(failing) => why,
        };
        format!("{why} (folder {})", self.core.config.data_dir.display())
    }

    /// Leaves in good order: hands its leaderships to others, lets nobody in any more, finishes the calls inside, stops its groups. Takes at
    /// most the configured drain and a moment.
    pub async fn shutdown(mut self) {
        let deadline = Instant::now() + self.core.config.drain;
        self.looking.shutdown().await;
        health::close(&self.core, &self.health).await;
        for kept in offices::drain(&self.core, deadline).await {
            tracing::info!(group = %kept.group, why = kept.why, "the leadership is not handed over");
        }
        self.stop.cancel();
        if !self.core.gate.close(deadline).await {
            tracing::warn!("some calls had not ended by the end of the drain");
        }
        self.core.host.shutdown().await;
        self.work.shutdown().await;
        // All links between nodes have ended with the host; what is left are idle connections of clients.
        if timeout(CLOSING, self.server.join_next()).await.is_err() {
            self.server.shutdown().await;
        }
        tracing::info!(node = %self.core.config.node, "stopped");
    }
}

/// The generation lies in the folder, for the links, and in the directory, for everyone else. They are raised together.
fn same_generation(dir: &std::path::Path, host: &Host, directory: &Hosted<Directory>) -> Result<(), MetaError> {
    let (folder, made) = (host.generation(), directory.read(|state| state.cluster().map(|_| state.generation().0)));
    match made {
        Some(directory) if directory != folder => {
            Err(MetaError::Generations { dir: dir.to_owned(), folder, directory })
        }
        Some(_) | None => Ok(()),
    }
}

/// Tells the links between meta nodes which node calls, if a certificate proves that. One that was removed is sent away.
fn prove(
    directory: Arc<Hosted<Directory>>,
) -> impl Fn(Request<()>) -> Result<Request<()>, Status> + Clone + Send + Sync + 'static {
    move |mut request| {
        if let Some(node) = Caller::of(request.extensions()).node_as(certificate::Role::Meta) {
            if !directory.read(|directory| members::may_speak(directory, node)) {
                return Err(members::removed(node).into());
            }
            request.extensions_mut().insert(ProvedPeer(RaftNodeId(node.0)));
        }
        Ok(request)
    }
}

async fn start_group<S: Replicated>(
    host: &Host,
    id: GroupId,
    state: S,
    work: &mut JoinSet<()>,
) -> Result<Arc<Hosted<S>>, MetaError> {
    let group = host.start_group(id, StateMachine::new(state)).await?;
    let (hosted, proposing) = Hosted::new(group);
    let hosted = Arc::new(hosted);
    work.spawn(proposing);
    work.spawn(Arc::clone(&hosted).keep_time());
    Ok(hosted)
}
