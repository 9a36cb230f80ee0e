//! A meta node without its doors, for simulated worlds: its groups, proposers, clocks, horizon and feed as they are in production; no
//! gRPC, no signatures, no data nodes. Calls go straight to where the services would take them.
//!
//! Only here for tests: behind the feature `sim`.

use crate::{
    core::HostedShard,
    eviction::Eviction,
    feed,
    grants::{self, GrantWish},
    hosted::Hosted,
    leases::{self, Horizon},
    lending::{self, Lending},
    machine::{Replicated, StateMachine},
    moves::Moving,
    tree::Trees,
};
use quarry_meta_state::{
    Directory, Entry, Shard,
    directory::{DirectoryCommand, DirectoryOutcome},
    shard::{GrantRequest, Settings, ShardCommand, ShardOutcome, plan::Bounds},
};
use quarry_proto::refusal::Refusal;
use quarry_raft::{Group, GroupId, GroupStatus, Host, LogIndex, RaftError, RaftNodeId};
use quarry_wire::{
    ids::{NodeId, ShardId},
    units::LogTime,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

/// One entry as one replica applied it.
#[derive(Debug)]
pub struct Step<'a, S, C, O> {
    /// The replica.
    pub node: NodeId,
    /// The group.
    pub group: GroupId,
    /// Place of the entry.
    pub index: LogIndex,
    /// The entry.
    pub entry: &'a Entry<C>,
    /// The state that it found.
    pub before: &'a S,
    /// The state that it left.
    pub after: &'a S,
    /// One per command.
    pub outcomes: &'a [O],
}

/// Sees every entry that any replica applies, while the replica waits.
pub trait Observer: Send + Sync + 'static {
    /// Of the directory.
    fn directory(&self, step: Step<'_, Directory, DirectoryCommand, DirectoryOutcome>);
    /// Of a shard.
    fn shard(&self, step: Step<'_, Shard, ShardCommand, ShardOutcome>);
}

/// Called by a machine after each entry: index, entry, the state before and after, outcomes.
pub(crate) type Watched<S> = Arc<
    dyn Fn(LogIndex, &Entry<<S as Replicated>::Command>, &S, &S, &[<S as Replicated>::Outcome]) + Send + Sync + 'static,
>;

/// What a command led to.
#[derive(Debug, Clone)]
pub struct Done<O> {
    /// The stamp with which it was applied.
    pub at: LogTime,
    /// What the machine answered.
    pub outcome: O,
}

/// A node. Dropping it ends its own work, as when its process ends; its host must be crashed or shut down beside.
pub struct SimMeta {
    node: NodeId,
    directory: Arc<Hosted<Directory>>,
    shards: Arc<[HostedShard]>,
    _work: JoinSet<()>,
}

impl std::fmt::Debug for SimMeta {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimMeta").field("node", &self.node).finish_non_exhaustive()
    }
}

impl SimMeta {
    /// Starts and recovers the directory and the shards.
    ///
    /// # Errors
    /// Those of the groups.
    pub async fn start(host: &Host, settings: Settings, observer: Arc<dyn Observer>) -> Result<Self, RaftError> {
        let node = NodeId(host.node().0);
        let mut work = JoinSet::new();
        let seen = Arc::clone(&observer);
        let watched: Watched<Directory> = Arc::new(move |index, entry, before, after, outcomes| {
            seen.directory(Step { node, group: GroupId(0), index, entry, before, after, outcomes });
        });
        let machine = StateMachine::watched(Directory::new(), watched);
        let directory = host_group(host.start_group(GroupId(0), machine).await?, &mut work);
        let mut shards = Vec::new();
        for id in (1..=settings.shards).map(ShardId) {
            let (group, seen) = (GroupId(id.0), Arc::clone(&observer));
            let watched: Watched<Shard> = Arc::new(move |index, entry, before, after, outcomes| {
                seen.shard(Step { node, group, index, entry, before, after, outcomes });
            });
            let machine = StateMachine::watched(Shard::new(id, settings), watched);
            let hosted = host_group(host.start_group(group, machine).await?, &mut work);
            work.spawn(feed::follow(Arc::clone(&directory), Arc::clone(&hosted)));
            let (horizon, trees) = (Horizon::default(), Trees::default());
            let (eviction, moving, lending) = (Eviction::default(), Moving::default(), Lending::default());
            shards.push(HostedShard { id, hosted, horizon, trees, eviction, moving, lending });
        }
        let shards: Arc<[HostedShard]> = shards.into();
        work.spawn(lending::lend(Arc::clone(&directory), Arc::clone(&shards)));
        work.spawn(lending::give(Arc::clone(&directory), Arc::clone(&shards), true));
        Ok(Self { node, directory, shards, _work: work })
    }

    /// Forms all groups with these members: once, on one node.
    ///
    /// # Errors
    /// Those of the groups.
    pub async fn form(&self, members: &BTreeMap<RaftNodeId, String>) -> Result<(), RaftError> {
        self.directory.group.initialize(members.clone()).await?;
        for shard in self.shards.iter() {
            shard.hosted.group.initialize(members.clone()).await?;
        }
        Ok(())
    }

    /// This node.
    #[must_use]
    pub const fn node(&self) -> NodeId {
        self.node
    }

    /// Tells the directory.
    ///
    /// # Errors
    /// [`Refusal`].
    pub async fn direct(
        &self,
        command: DirectoryCommand,
        deadline: Instant,
    ) -> Result<Done<DirectoryOutcome>, Refusal> {
        self.directory.leads()?;
        let done = self.directory.propose(command, deadline).await?;
        Ok(Done { at: done.at, outcome: done.outcome })
    }

    /// Tells a shard.
    ///
    /// # Errors
    /// [`Refusal`].
    pub async fn tell(
        &self,
        shard: ShardId,
        command: ShardCommand,
        deadline: Instant,
    ) -> Result<Done<ShardOutcome>, Refusal> {
        let shard = self.shard(shard);
        shard.hosted.leads()?;
        let done = shard.hosted.propose(command, deadline).await?;
        Ok(Done { at: done.at, outcome: done.outcome })
    }

    /// Asks a shard for a slab; plans that were overtaken are made anew.
    ///
    /// # Errors
    /// [`Refusal`].
    pub async fn grant(
        &self,
        shard: ShardId,
        asked: GrantRequest,
        deadline: Instant,
    ) -> Result<Done<ShardOutcome>, Refusal> {
        let shard = self.shard(shard);
        shard.hosted.leads()?;
        loop {
            let bounds = Bounds {
                avoid: BTreeSet::new(),
                aside: shard.lending.aside(),
                lendable: Arc::new(self.directory.read(Directory::unlent)),
                keeps_all: false,
                in_parts: true,
            };
            let wish = GrantWish { meta: self.node, asked: asked.clone(), bounds };
            let done = match shard.hosted.plan(wish, deadline).await {
                Err(Refusal::NoSpace(lack)) => {
                    let bytes = u64::from(asked.slot_size.0);
                    let nodes = shard.hosted.read(|state| state.lacks_place(bytes, &BTreeSet::new()));
                    lending::want(shard, &nodes, bytes, deadline).await?;
                    if self.directory.read(|directory| directory.unlent().keys().any(|node| nodes.contains(node)))
                        && lending::lent(shard, &nodes, bytes, deadline).await
                    {
                        continue;
                    }
                    return Err(Refusal::NoSpace(lack));
                }
                done => done?,
            };
            match &done.outcome {
                ShardOutcome::Grant(Err(refusal)) if grants::overtaken(refusal) => {
                    sleep(Duration::from_millis(5)).await;
                }
                _ => return Ok(Done { at: done.at, outcome: done.outcome }),
            }
        }
    }

    /// Reads a shard as its leader, with a lease of at most `wanted`.
    ///
    /// # Errors
    /// [`Refusal`].
    pub async fn resolve<R>(
        &self,
        shard: ShardId,
        wanted: Duration,
        deadline: Instant,
        read: impl FnOnce(&Shard) -> R,
    ) -> Result<(R, Duration), Refusal> {
        let shard = self.shard(shard);
        shard.hosted.leads()?;
        shard.horizon.reach(&shard.hosted, wanted, deadline).await?;
        let give = |state: &Shard, running: LogTime| (read(state), leases::lease(wanted, state.horizon(), running));
        shard.hosted.read_linearized(deadline, give).await
    }

    /// A mutant of [`SimMeta::resolve`], to prove that it would be found: answers without asking a majority whether it still leads.
    ///
    /// # Errors
    /// [`Refusal`].
    pub async fn resolve_unconfirmed<R>(
        &self,
        shard: ShardId,
        wanted: Duration,
        deadline: Instant,
        read: impl FnOnce(&Shard) -> R,
    ) -> Result<(R, Duration), Refusal> {
        let shard = self.shard(shard);
        shard.horizon.reach(&shard.hosted, wanted, deadline).await?;
        let running = shard.hosted.running()?;
        Ok(shard.hosted.read(|state| (read(state), leases::lease(wanted, state.horizon(), running))))
    }

    /// Reads a shard as it is here, whoever leads.
    pub fn look<R>(&self, shard: ShardId, read: impl FnOnce(&Shard) -> R) -> R {
        self.shard(shard).hosted.read(read)
    }

    /// Reads the directory as it is here, whoever leads.
    pub fn look_up<R>(&self, read: impl FnOnce(&Directory) -> R) -> R {
        self.directory.read(read)
    }

    /// All groups as this node sees them.
    #[must_use]
    pub fn status(&self) -> Vec<GroupStatus> {
        let shards = self.shards.iter().map(|shard| shard.hosted.group.status());
        std::iter::once(self.directory.group.status()).chain(shards).collect()
    }

    fn shard(&self, id: ShardId) -> &HostedShard {
        self.shards.iter().find(|shard| shard.id == id).expect("a simulated client knows the shards")
    }
}

fn host_group<S: Replicated>(group: Group<StateMachine<S>>, work: &mut JoinSet<()>) -> Arc<Hosted<S>> {
    let (hosted, proposing) = Hosted::new(group);
    let hosted = Arc::new(hosted);
    work.spawn(proposing);
    work.spawn(Arc::clone(&hosted).keep_time());
    hosted
}
