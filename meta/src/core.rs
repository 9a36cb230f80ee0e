//! What all services of a node share.

use crate::{
    config::MetaConfig, door, eviction::Eviction, hosted::Hosted, leases::Horizon, lending::Lending,
    membership::Membership, moves::Moving, offices::Office, tree::Trees,
};
use parking_lot::{Mutex, RwLock};
use quarry_meta_state::{Directory, Shard, directory, lending::LentTo, shard::plan::Bounds};
use quarry_proto::{counters::Counters, refusal::Refusal, v1};
use quarry_raft::Host;
use quarry_wire::{
    certificate::Role,
    ids::{FeedNumber, NodeId, ShardId},
    keyring::Keyring,
    units::millis,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{sync::Semaphore, time::Instant};
use tokio_util::task::{TaskTracker, task_tracker::TaskTrackerToken};

/// A shard, the horizon of its leases, the trees of its batches, and what was leased of it when.
pub(crate) struct HostedShard {
    pub(crate) id: ShardId,
    pub(crate) hosted: Arc<Hosted<Shard>>,
    pub(crate) horizon: Horizon,
    pub(crate) trees: Trees,
    pub(crate) eviction: Eviction,
    pub(crate) moving: Moving,
    pub(crate) lending: Lending,
}

/// One node's groups, and what it knows beside them.
pub(crate) struct Core {
    pub(crate) config: MetaConfig,
    pub(crate) host: Host,
    pub(crate) directory: Arc<Hosted<Directory>>,
    /// In the order of their numbers, from 1.
    pub(crate) shards: Arc<[HostedShard]>,
    pub(crate) membership: Arc<Membership>,
    pub(crate) counters: Counters,
    pub(crate) gate: Gate,
    /// Held while leaderships of this node are handed over: two heirs at once would only stand against each other.
    pub(crate) handing_over: tokio::sync::Mutex<()>,
    /// States are saved one at a time: each is encoded, twice, while it is sent.
    pub(crate) saving: Arc<Semaphore>,
    /// Whether every group was served when that was last looked at; if not, why.
    pub(crate) served: Mutex<Result<(), String>>,
    /// Whether others say that this node was removed.
    pub(crate) removed: AtomicBool,
    keyring: RwLock<Option<(FeedNumber, Arc<Keyring>)>>,
    lendings: RwLock<(FeedNumber, Lendings)>,
}

/// What the directory lent.
#[derive(Clone, Default)]
struct Lendings {
    unlent: Arc<BTreeMap<NodeId, u64>>,
    lent: Arc<LentTo>,
}

impl Core {
    pub(crate) fn new(
        config: MetaConfig,
        host: Host,
        directory: Arc<Hosted<Directory>>,
        shards: Arc<[HostedShard]>,
        membership: Arc<Membership>,
    ) -> Self {
        let (counters, gate) = (Counters::default(), Gate::default());
        let (keyring, lendings) = (RwLock::new(None), RwLock::default());
        let saving = Arc::new(Semaphore::new(1));
        let served = Mutex::new(Err("the groups were not looked at yet".to_owned()));
        let removed = AtomicBool::new(false);
        let handing_over = tokio::sync::Mutex::new(());
        Self {
            config,
            host,
            directory,
            shards,
            membership,
            counters,
            gate,
            handing_over,
            saving,
            served,
            removed,
            keyring,
            lendings,
        }
    }

    /// The leaderships of all groups, the directory's first.
    pub(crate) fn offices(&self) -> impl Iterator<Item = &dyn Office> + Send {
        let shards = self.shards.iter().map(|shard| &*shard.hosted as &dyn Office);
        std::iter::once(&*self.directory as &dyn Office).chain(shards)
    }

    /// The shard with this number.
    pub(crate) fn shard(&self, id: ShardId) -> Result<&HostedShard, Refusal> {
        let index = id.0.checked_sub(1).and_then(|index| usize::try_from(index).ok());
        tracing::Span::current().record("shard", id.0);
        index
            .and_then(|index| self.shards.get(index))
            .ok_or_else(|| Refusal::malformed("shard", format_args!("1 to {}", self.shards.len()), id.0))
    }

    /// Whom to believe, as this node's directory replica has it. Made anew when the directory moved.
    pub(crate) fn keyring(&self) -> Result<Arc<Keyring>, Refusal> {
        let position = self.directory.read(Directory::feed_position);
        if let Some((at, keyring)) = &*self.keyring.read()
            && *at == position
        {
            return Ok(Arc::clone(keyring));
        }
        let (at, keyring) = self.directory.read(|directory| (directory.feed_position(), directory.keyring().cloned()));
        let keyring = Arc::new(keyring.ok_or_else(not_made)?);
        *self.keyring.write() = Some((at, Arc::clone(&keyring)));
        Ok(keyring)
    }

    /// Nodes with an extent that is lent to nobody, and the bytes of the largest such, as this node's directory replica has it.
    pub(crate) fn lendable(&self) -> Arc<BTreeMap<NodeId, u64>> {
        self.lendings().unlent
    }

    /// What is lent to whom, as this node's directory replica has it.
    pub(crate) fn lent_to(&self) -> Arc<LentTo> {
        self.lendings().lent
    }

    /// Made anew when the directory moved.
    fn lendings(&self) -> Lendings {
        let position = self.directory.read(Directory::feed_position);
        {
            let (at, lendings) = &*self.lendings.read();
            if *at == position {
                return lendings.clone();
            }
        }
        let made = self.directory.read(|directory| {
            let (unlent, lent) = (Arc::new(directory.unlent()), Arc::new(directory.lent_to()));
            (directory.feed_position(), Lendings { unlent, lent })
        });
        *self.lendings.write() = made.clone();
        made.1
    }

    /// Where a grant of `shard` may not be planned, and where more could be had.
    pub(crate) fn bounds(&self, shard: &HostedShard, unreachable: &[u64]) -> Bounds {
        Bounds {
            avoid: self.avoided(unreachable),
            aside: shard.lending.aside(),
            lendable: self.lendable(),
            keeps_all: self.config.eviction.low == 0,
            in_parts: self.shards.len() > 1,
        }
    }

    /// Fails while there is no cluster, as far as this node knows.
    pub(crate) fn made(&self) -> Result<(), Refusal> {
        if self.directory.read(|directory| directory.cluster().is_some()) { Ok(()) } else { Err(not_made()) }
    }

    /// What changed in the directory after `seen`, as this node's replica has it; nothing if nothing did.
    pub(crate) fn changes(&self, seen: Option<v1::Ordinal>) -> Option<v1::Changes> {
        let seen = seen.map(FeedNumber::from).unwrap_or_default();
        self.directory.read(|directory| {
            (directory.feed_position() > seen).then(|| changes(directory, &directory.changes_since(seen)))
        })
    }

    /// Waits until the shard's replica here has come as far in the feed as the caller.
    pub(crate) async fn catch_up(
        &self,
        shard: &HostedShard,
        seen: Option<v1::Ordinal>,
        deadline: Instant,
    ) -> Result<(), Refusal> {
        let Some(seen) = seen.map(FeedNumber::from) else { return Ok(()) };
        if shard.hosted.wait_for(deadline, |state| state.feed_position() >= seen).await {
            return Ok(());
        }
        let position = shard.hosted.read(Shard::feed_position);
        Err(door::not_ready(format!("{} is at {position}, the request has seen {seen}", shard.id), door::RETRY))
    }

    /// Who leads each group, and how far it is here.
    pub(crate) fn groups(&self) -> Vec<v1::GroupInfo> {
        let info = |status: quarry_raft::GroupStatus, applied_ms: u64| {
            let (leader, address) = status.leader.map_or_else(|| (0, String::new()), |(node, addr)| (node.0, addr));
            v1::GroupInfo { group: status.group.0, leader, address, applied_ms }
        };
        let first = info(self.directory.group.status(), self.directory.read(Directory::log_time).0);
        let shards =
            self.shards.iter().map(|shard| info(shard.hosted.group.status(), shard.hosted.read(Shard::log_time).0));
        std::iter::once(first).chain(shards).collect()
    }

    /// The meta nodes, as this node's replica of the directory has them.
    pub(crate) fn metas(&self) -> Vec<v1::MetaInfo> {
        let members = self.directory.group.status().members;
        members.into_iter().map(|(node, it)| v1::MetaInfo { node: node.0, address: it.addr }).collect()
    }

    /// Data nodes that have been silent to this node for a while, and those that the caller cannot reach.
    pub(crate) fn avoided(&self, unreachable: &[u64]) -> BTreeSet<NodeId> {
        let mut avoided = self.directory.read(|directory| {
            let up = directory.regions().filter(|it| it.state.up).map(|it| it.state.region.node);
            self.membership.avoided(up, Instant::now())
        });
        avoided.extend(unreachable.iter().copied().map(NodeId));
        avoided
    }
}

/// The refusal of a node that belongs to no cluster yet.
pub(crate) fn not_made() -> Refusal {
    door::not_ready(
        "the cluster is not made yet, or this node has not heard of it: bootstrap it",
        Duration::from_secs(1),
    )
}

/// The message for `changes`.
fn changes(directory: &Directory, changes: &directory::Changes) -> v1::Changes {
    let touched: BTreeSet<NodeId> = (changes.nodes.iter().map(|node| node.id))
        .chain(changes.regions.iter().map(|region| region.region.node))
        .collect();
    v1::Changes {
        at: Some(changes.at.into()),
        certificates: changes.certificates.iter().map(|it| it.encode().into()).collect(),
        records: changes.records.iter().map(|it| it.encode().into()).collect(),
        namespaces: changes.namespaces.iter().map(namespace).collect(),
        revocations: changes.revocations.as_ref().map(|it| it.encode().into()).unwrap_or_default(),
        data_nodes: touched.into_iter().filter_map(|node| data_node(directory, node)).collect(),
        retired: changes.retired.iter().map(|node| node.0).collect(),
        metas: (changes.nodes.iter())
            .filter(|it| directory.is_certified(it.id, Role::Meta) && !directory.is_retired(it.id))
            .map(|it| v1::MetaInfo { node: it.id.0, address: it.address.clone() })
            .collect(),
    }
}

/// The message for a namespace.
pub(crate) fn namespace(it: &directory::Namespace) -> v1::Namespace {
    v1::Namespace {
        id: it.id.0,
        name: it.name.clone(),
        class: v1::Class::from(it.policy.class).into(),
        copies: it.policy.copies.into(),
        least: it.policy.least.into(),
        quota_bytes: it.policy.quota_bytes.unwrap_or(0),
    }
}

/// A data node that announced itself, also one that is not believed any more.
pub(crate) fn data_node(directory: &Directory, node: NodeId) -> Option<v1::DataNodeInfo> {
    let announced = directory.node(node)?;
    let certified = directory.is_certified(node, Role::DataNode);
    (certified || directory.was_certified(node, Role::DataNode)).then(|| v1::DataNodeInfo {
        node: node.0,
        address: announced.address.clone(),
        alive: certified && directory.regions_of(node).any(|region| region.state.up),
        revoked: !certified,
    })
}

/// Lets calls in until the node shuts down, and knows when the last one has ended.
#[derive(Default)]
pub(crate) struct Gate {
    closed: AtomicBool,
    calls: TaskTracker,
}

impl Gate {
    /// Lets a call in; it is under way until the token is dropped.
    pub(crate) fn enter(&self) -> Result<TaskTrackerToken, Refusal> {
        // Counted before the look, so that whoever closes the gate waits for it.
        let token = self.calls.token();
        if self.closed.load(Ordering::SeqCst) {
            return Err(door::not_ready("this node is shutting down", Duration::from_secs(1)));
        }
        Ok(token)
    }

    /// Lets nobody in any more and waits for those inside; false if some were left at the deadline.
    pub(crate) async fn close(&self, deadline: Instant) -> bool {
        self.closed.store(true, Ordering::SeqCst);
        self.calls.close();
        tokio::time::timeout_at(deadline, self.calls.wait()).await.is_ok()
    }
}

/// Milliseconds of a stamp's clock that a message carries.
pub(crate) fn millis_u32(span: Duration) -> u32 {
    u32::try_from(millis(span)).unwrap_or(u32::MAX)
}
