//! The data node as a process: what its parts share, its start, and its end.

use crate::{
    DataNodeConfig, DataNodeError, KeySource, Labels,
    claims::Claims,
    clock::Clock,
    disk::DataDir,
    heartbeat,
    holdings::Holdings,
    membership::Membership,
    metas::{Channels, Metas},
    metrics::Meters,
    probe::DataProbe,
    regions,
    resign::KeyChange,
    rotations::Rotations,
    service,
    sharing::Sharing,
};
use parking_lot::Mutex;
use quarry_fabric::{EndpointConfig, Memory, Provider};
use quarry_proto::counters::Counters;
use quarry_trust::{Limits, Trust};
use quarry_wire::{
    ids::{FeedNumber, Generation, Incarnation, NodeId, RegionId, RegionIndex},
    keyring::{Keyring, TrustError},
    signed::{Signed, Statement},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
    time::{Instant, MissedTickBehavior, interval, timeout, timeout_at},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// How often claims past their time are looked for. Time bounds only waste, so this need not be exact.
const EXPIRY_EVERY: Duration = Duration::from_millis(200);
/// How long calls under way may take to finish when the node stops.
const DRAIN_MAX: Duration = Duration::from_secs(5);
/// How long all who answer must take this node for forgotten before it stops, or three heartbeats if that is longer.
const FORGOTTEN_FOR: Duration = Duration::from_secs(5);
/// Certificates that are not known are asked for at most this often.
const REFRESH_EVERY: Duration = Duration::from_millis(200);
/// How long asking for them may take.
const REFRESH_MAX: Duration = Duration::from_secs(2);

/// What the parts of a running node share.
pub(crate) struct Node {
    pub(crate) id: NodeId,
    /// `host:port` that others reach it at.
    pub(crate) address: String,
    pub(crate) labels: Labels,
    pub(crate) provider: String,
    pub(crate) heartbeat: Duration,
    /// How long a region keeps a read key; none: until it is told to change it.
    pub(crate) rotate_every: Option<Duration>,
    pub(crate) holdings: Mutex<Holdings>,
    pub(crate) membership: Membership,
    /// Where its next signing key comes from.
    pub(crate) key_source: Option<Arc<dyn KeySource>>,
    pub(crate) key_change: tokio::sync::Mutex<KeyChange>,
    pub(crate) metas: Arc<Metas>,
    pub(crate) sharing: Arc<Sharing<Metas>>,
    pub(crate) peers: Channels,
    pub(crate) clock: Clock,
    pub(crate) counters: Counters,
    pub(crate) meters: Meters,
    pub(crate) admin_address: Option<String>,
    pub(crate) regions: Vec<RegionSeat>,
    pub(crate) trust: Trust,
    /// Held by the one move that is under way.
    pub(crate) moving: tokio::sync::Mutex<()>,
    /// Held by the one look at a copy that is under way.
    pub(crate) looking: tokio::sync::Mutex<()>,
    pub(crate) limits: Limits,
    /// Set once: no grant is armed any more.
    pub(crate) draining: AtomicBool,
    pub(crate) standing: watch::Sender<Standing>,
    refreshed: tokio::sync::Mutex<Option<Instant>>,
}

/// What of a region never changes, who wants a new key of it, and the bell that rings when its life is over or somebody asks.
pub(crate) struct RegionSeat {
    pub(crate) id: RegionId,
    pub(crate) length: u64,
    pub(crate) rotations: Rotations,
    pub(crate) bell: Notify,
}

/// How registration stands.
#[derive(Clone, Debug, Default)]
pub(crate) struct Standing {
    /// Regions that the directory has a record of.
    pub(crate) recorded: BTreeSet<RegionIndex>,
    /// What was last heard of the directory.
    pub(crate) last: String,
    /// What each meta node that answers, by its address, said last of this node: that its number is used up, and why, or nothing of the kind.
    pub(crate) told: BTreeMap<String, Option<String>>,
    /// How many meta nodes are asked.
    pub(crate) asked: usize,
}

impl Standing {
    /// Whether all `regions` regions can be written and read.
    pub(crate) fn serves(&self, regions: usize) -> bool {
        self.forgotten().is_none() && self.recorded.len() == regions
    }

    /// Why this node's number is used up, if a majority of the meta nodes say so, and none takes it as it is. Some may be left over from a
    /// history that was given up, and be the only ones that answer.
    pub(crate) fn forgotten(&self) -> Option<&str> {
        if self.told.values().any(Option::is_none) {
            return None;
        }
        let mut against = self.told.values().flatten();
        let why = against.next()?;
        (2 * (1 + against.count()) > self.asked).then_some(why)
    }
}

impl Node {
    pub(crate) fn draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Ends the lives that a meta node says are over, if it has heard of the present ones.
    pub(crate) fn void_all(&self, over: &[(RegionId, Incarnation)], feed: Option<FeedNumber>) {
        for (region, over) in over {
            let mut holdings = self.holdings.lock();
            let lives = holdings.lives();
            let Some((_, current)) = lives.into_iter().find(|(id, current)| id == region && over >= current) else {
                continue;
            };
            if !holdings.heard_by(region.index, feed) {
                continue;
            }
            let gone = holdings.void(self.clock.now(), region.index, current);
            drop(holdings);
            if gone {
                tracing::warn!(%region, %current, "the region's life is over: its lanes and its reader are closed");
                self.standing.send_modify(|standing| {
                    standing.recorded.remove(&region.index);
                });
                if let Some(seat) = self.regions.iter().find(|seat| seat.id == *region) {
                    seat.bell.notify_one();
                }
            }
        }
    }

    /// Takes note of a generation. A new one voids all memory. False if it is over.
    pub(crate) fn see_generation(&self, generation: Generation) -> bool {
        let current = self.membership.see_generation(generation);
        if current {
            let old = self.holdings.lock().of_before(generation);
            self.void_all(&old, None);
        }
        current
    }

    /// Checks a statement; if its certificate or generation is news, asks the directory once.
    pub(crate) async fn verify<S: Statement + Clone>(
        &self,
        signed: Signed<S>,
        deadline: Instant,
    ) -> Result<S, TrustError> {
        let news = |error: &TrustError| {
            matches!(error, TrustError::UnknownCertificate { .. })
                || matches!(error, TrustError::Generation { expected, found } if found > expected)
        };
        match self.membership.verify(signed.clone()) {
            Err(error) if news(&error) => {
                self.refresh(deadline).await;
                self.membership.verify(signed).map(quarry_wire::keyring::Verified::into_inner)
            }
            known => known.map(quarry_wire::keyring::Verified::into_inner),
        }
    }

    /// Asks a meta node for all that the directory knows, unless that was just done.
    pub(crate) async fn refresh(&self, deadline: Instant) {
        let Ok(mut refreshed) = timeout_at(deadline, self.refreshed.lock()).await else { return };
        if refreshed.is_some_and(|at| at.elapsed() < REFRESH_EVERY) {
            return;
        }
        match self.metas.describe(deadline.min(Instant::now() + REFRESH_MAX)).await {
            Ok(reply) => {
                if !self.see_generation(Generation(reply.generation)) {
                    tracing::debug!(generation = reply.generation, "a meta node of a generation that is over answered");
                    return;
                }
                self.metas.heard(&reply.groups);
                self.metas.learn(Generation(reply.generation), &reply.metas, reply.changes.as_ref());
                if let Some(changes) = reply.changes {
                    self.membership.apply(changes);
                }
            }
            Err(error) => tracing::debug!(%error, "no meta node describes the cluster"),
        }
        *refreshed = Some(Instant::now());
    }
}

/// A running data node. Dropping it ends every region's life at once, as a crash would.
pub struct DataNode {
    node: Arc<Node>,
    address: SocketAddr,
    stop: CancellationToken,
    tasks: TaskTracker,
    /// Told to finish the calls under way, then to end.
    drain: CancellationToken,
    server: JoinHandle<()>,
    /// The folder is ours as long as this is here.
    _data_dir: DataDir,
}

impl DataNode {
    /// Starts a data node. When this returns, its gRPC server answers; its regions are registered with the directory in the background (see
    /// [`DataNode::ready`]), for as long as that takes.
    ///
    /// # Errors
    /// [`DataNodeError`]: a setting, the certificate, the data folder, memory, the fabric or the address is not usable.
    pub async fn start(config: DataNodeConfig) -> Result<Self, DataNodeError> {
        config.check()?;
        let keyring = Keyring::new(config.cluster, config.root)?;
        let membership = Membership::new(keyring, config.key.clone(), &config.certificate)?;
        let listener = quarry_trust::listen(config.listen);
        let listener = listener.map_err(|source| DataNodeError::Listen { address: config.listen, source })?;
        let listening = listener.local_addr();
        let address = listening.map_err(|source| DataNodeError::Listen { address: config.listen, source })?;
        let prepared = tokio::task::spawn_blocking(move || Prepared::of(config)).await;
        let Prepared { config, data_dir, provider, memories } = match prepared {
            Ok(prepared) => prepared?,
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        };

        let endpoints =
            EndpointConfig { provider: provider.clone(), bind: config.fabric_bind, port: None, spin: Duration::ZERO };
        let mut holdings = Holdings::new(Claims::new(config.node, config.lanes_max), endpoints);
        let mut regions = Vec::with_capacity(memories.len());
        for (index, memory) in (0..).map(RegionIndex).zip(memories) {
            let id = RegionId { node: config.node, index };
            regions.push(RegionSeat {
                id,
                length: memory.len() as u64,
                rotations: Rotations::default(),
                bell: Notify::new(),
            });
            holdings.add_region(id, memory);
        }
        let metas = Arc::new(Metas::new(config.metas, config.trust.clone()));
        let node = Arc::new(Node {
            id: config.node,
            address: config.advertise.unwrap_or_else(|| address.to_string()),
            labels: config.labels,
            provider: provider.name().to_owned(),
            heartbeat: config.heartbeat,
            rotate_every: config.rotate_every,
            holdings: Mutex::new(holdings),
            membership,
            key_source: config.key_source,
            key_change: tokio::sync::Mutex::default(),
            sharing: Sharing::new(Arc::clone(&metas)),
            metas,
            peers: Channels::new(config.trust.clone()),
            clock: Clock::start(),
            counters: Counters::default(),
            meters: Meters::new(),
            admin_address: config.admin_address,
            regions,
            trust: config.trust,
            moving: tokio::sync::Mutex::default(),
            looking: tokio::sync::Mutex::default(),
            limits: config.limits,
            draining: AtomicBool::new(false),
            standing: watch::Sender::new(Standing::default()),
            refreshed: tokio::sync::Mutex::new(None),
        });

        let (stop, drain, tasks) = (CancellationToken::new(), CancellationToken::new(), TaskTracker::new());
        for seat in 0..node.regions.len() {
            tasks.spawn(stop.clone().run_until_cancelled_owned(regions::keep(Arc::clone(&node), seat)));
        }
        tasks.spawn(stop.clone().run_until_cancelled_owned(heartbeat::beat_all(Arc::clone(&node))));
        tasks.spawn(stop.clone().run_until_cancelled_owned(expire(Arc::clone(&node))));
        let server = tokio::spawn(service::serve(Arc::clone(&node), listener, drain.clone()));
        tracing::info!(node = %node.id, %address, provider = %node.provider, "data node started");
        Ok(Self { node, address, stop, tasks, drain, server, _data_dir: data_dir })
    }

    /// Where its gRPC server listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Who it is.
    #[must_use]
    pub fn id(&self) -> NodeId {
        self.node.id
    }

    /// A handle for asking how the node is.
    #[must_use]
    pub fn probe(&self) -> DataProbe {
        DataProbe::new(Arc::clone(&self.node))
    }

    /// Waits until the directory has a record of every region.
    ///
    /// # Errors
    /// [`DataNodeError::NotReady`] if it has not by `deadline`.
    pub async fn ready(&self, deadline: Instant) -> Result<(), DataNodeError> {
        let regions = self.node.regions.len();
        let mut standing = self.node.standing.subscribe();
        let all = standing.wait_for(|standing| standing.recorded.len() == regions);
        if let Ok(Ok(_)) = timeout_at(deadline, all).await {
            return Ok(());
        }
        let standing = self.node.standing.borrow().clone();
        Err(DataNodeError::NotReady { ready: standing.recorded.len(), regions, last: standing.last })
    }

    /// Waits until this node's number is known to be used up, and says why. Nobody can use what it holds then, and that does not change: it is to
    /// be stopped. Who would say otherwise has had some seconds to.
    pub async fn forgotten(&self) -> String {
        const KEPT: &str = "the node keeps the sending half";
        let mut standing = self.node.standing.subscribe();
        loop {
            let told = standing.wait_for(|standing| standing.forgotten().is_some()).await.expect(KEPT);
            let why = told.forgotten().expect("it was waited for").to_owned();
            drop(told);
            let taken_back = standing.wait_for(|standing| standing.forgotten().is_none());
            if timeout(FORGOTTEN_FOR.max(self.node.heartbeat * 3), taken_back).await.is_err() {
                return why;
            }
        }
    }

    /// Stops: arms nothing more, finishes the calls under way (5 s at most), closes every endpoint.
    pub async fn shutdown(mut self) {
        self.node.draining.store(true, Ordering::Release);
        self.drain.cancel();
        if timeout(DRAIN_MAX, &mut self.server).await.is_err() {
            tracing::warn!("calls were still under way when the node stopped");
            self.server.abort();
        }
        self.stop.cancel();
        self.tasks.close();
        if timeout(DRAIN_MAX, self.tasks.wait()).await.is_err() {
            tracing::warn!("background work was still under way when the node stopped");
        }
        tracing::info!(node = %self.node.id, "data node stopped");
    }
}

impl Drop for DataNode {
    fn drop(&mut self) {
        self.node.draining.store(true, Ordering::Release);
        self.stop.cancel();
        // The server ends by itself: it takes no more connections, and what is asked on the open ones finds no claims.
        self.drain.cancel();
        self.node.holdings.lock().void_all(self.node.clock.now());
    }
}

/// What takes long and blocks.
struct Prepared {
    config: DataNodeConfig,
    data_dir: DataDir,
    provider: Provider,
    memories: Vec<Arc<Memory>>,
}

impl Prepared {
    fn of(config: DataNodeConfig) -> Result<Self, DataNodeError> {
        let data_dir = DataDir::open(&config.data_dir, config.cluster, config.node)?;
        let provider = match &config.provider {
            Some(name) => Provider::named(name)?,
            None => Provider::detect()?,
        };
        let allocate = |bytes: &u64| {
            let bytes = usize::try_from(*bytes).expect("checked with the settings");
            if config.populate { Memory::allocate_populated(bytes) } else { Memory::allocate(bytes) }
        };
        let memories = config.region_bytes.iter().map(allocate).collect::<Result<_, _>>()?;
        Ok(Self { config, data_dir, provider, memories })
    }
}

async fn expire(node: Arc<Node>) {
    let mut ticks = interval(EXPIRY_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        node.holdings.lock().expire(node.clock.now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_takes_itself_for_forgotten_only_when_a_majority_of_all_meta_nodes_says_so() {
        let mut standing = Standing { asked: 3, ..Standing::default() };
        let mut says = |meta: &str, said: Option<Option<&str>>| {
            match said {
                Some(used_up) => standing.told.insert(meta.to_owned(), used_up.map(str::to_owned)),
                None => standing.told.remove(meta),
            };
            standing.forgotten().map(str::to_owned)
        };
        let forgotten = Some(Some("forgotten"));
        assert_eq!(says("h:1", forgotten), None, "the only one that answers may be of a history that was given up");
        assert_eq!(says("h:2", Some(None)), None);
        assert_eq!(says("h:3", forgotten), None, "those two may be, and the other one knows of nothing");
        assert_eq!(says("h:2", None).as_deref(), Some("forgotten"), "it does not answer any more");
        assert_eq!(says("h:1", Some(None)), None, "it took that back: a restore forgot that the node was forgotten");
        let alone =
            Standing { asked: 1, told: [("h:1".to_owned(), Some("why".to_owned()))].into(), ..Standing::default() };
        assert!(alone.forgotten().is_some() && !alone.serves(0));
    }
}
