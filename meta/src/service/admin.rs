//! Admin: making the cluster, and what an operator asks a node, with or without a leader.

use super::{Service, backup, members, registry::node_refused, strange};
use crate::{
    core::{Core, data_node, namespace},
    door,
    hosted::Hosted,
    leaders::Move,
    machine::Replicated,
    members::{message, steps},
    offices,
};
use futures::future::{join_all, try_join_all};
use quarry_meta_state::{
    Directory, Shard,
    directory::{Cluster, DirectoryCommand, DirectoryOutcome, InitRefusal, RegionState},
};
use quarry_proto::{
    convert::{self, required},
    protocol::Announce,
    refusal::Refusal,
    v1::{self, admin_client::AdminClient, admin_server::Admin},
};
use quarry_raft::{RaftError, RaftNodeId, Role as RaftRole};
use quarry_trust::Expect;
use quarry_wire::{
    certificate::{Certificate, Revocations, Role},
    ids::{ClusterUuid, Generation, NodeId},
    keyring::Keyring,
    limits::MESSAGE_BYTES_MAX,
    signed::{PublicKey, Signed},
    units::millis,
};
use std::{collections::BTreeMap, sync::Arc};
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, transport::Endpoint};

/// Meta nodes of a cluster, at most.
const METAS_MAX: usize = 9;
/// The first generation of a cluster; 0 is the root's.
const FIRST_GENERATION: Generation = Generation(1);

#[tonic::async_trait]
impl Admin for Service {
    async fn bootstrap(&self, request: Request<v1::BootstrapRequest>) -> Result<Response<v1::BootstrapReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(bootstrap(self.core(), request.into_inner(), deadline)).await
    }

    async fn status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::StatusReply>, Status> {
        let core = Arc::clone(&self.0);
        // It walks over all slots: not on a thread that others wait for.
        let asked = tokio::task::spawn_blocking(move || status(&core));
        self.call(async { Ok(asked.await.expect("it has no reason to panic")) }).await
    }

    async fn state_hash(&self, request: Request<v1::StateHashRequest>) -> Result<Response<v1::StateHashReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(backup::hashes(self.core(), request.into_inner(), deadline)).await
    }

    async fn stamp(&self, request: Request<v1::StampRequest>) -> Result<Response<v1::StampReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(backup::stamp(self.core(), request.into_inner(), deadline)).await
    }

    type SaveGroupStream = ReceiverStream<Result<v1::SavedPart, Status>>;

    async fn save_group(
        &self,
        request: Request<v1::SaveGroupRequest>,
    ) -> Result<Response<Self::SaveGroupStream>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(backup::save(Arc::clone(&self.0), request.into_inner(), deadline)).await
    }

    async fn apply_revocations(
        &self,
        request: Request<v1::ApplyRevocationsRequest>,
    ) -> Result<Response<v1::ApplyRevocationsReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(revoke(self.core(), request.into_inner(), deadline)).await
    }

    async fn change_members(
        &self,
        request: Request<v1::ChangeMembersRequest>,
    ) -> Result<Response<v1::ChangeMembersReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(members::change(self.core(), request.into_inner(), deadline)).await
    }

    async fn set_standing(
        &self,
        request: Request<v1::SetStandingRequest>,
    ) -> Result<Response<v1::SetStandingReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(members::set_standing(self.core(), request.into_inner(), deadline)).await
    }

    async fn forget_node(
        &self,
        request: Request<v1::ForgetNodeRequest>,
    ) -> Result<Response<v1::ForgetNodeReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(members::forget(self.core(), request.into_inner(), deadline)).await
    }

    async fn transfer_leader(
        &self,
        request: Request<v1::TransferLeaderRequest>,
    ) -> Result<Response<v1::TransferLeaderReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(transfer(self.core(), request.into_inner(), deadline)).await
    }

    async fn balance_leaders(
        &self,
        request: Request<v1::BalanceLeadersRequest>,
    ) -> Result<Response<v1::BalanceLeadersReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(async { Ok(balance(self.core(), deadline).await) }).await
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Result<Response<v1::DrainReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(async { Ok(drain(self.core(), request.into_inner(), deadline).await) }).await
    }
}

/// What a bootstrap is asked to make, checked.
struct Plan {
    cluster: Cluster,
    metas: BTreeMap<NodeId, (String, Signed<Certificate>)>,
}

impl Plan {
    fn of(core: &Core, asked: v1::BootstrapRequest) -> Result<Self, Refusal> {
        let config = &core.config;
        let uuid = ClusterUuid(convert::array("cluster", &asked.cluster)?);
        if uuid != config.cluster {
            return Err(Refusal::WrongCluster(v1::WrongCluster {
                expected: config.cluster.0.to_vec().into(),
                found: asked.cluster,
            }));
        }
        let root = PublicKey(convert::array("root", &asked.root)?);
        if root != config.root {
            return Err(Refusal::malformed("root", config.root, root));
        }
        if asked.shards != config.shards {
            return Err(Refusal::malformed("shards", format_args!("{} as configured", config.shards), asked.shards));
        }
        if asked.metas.is_empty() || asked.metas.len() > METAS_MAX {
            return Err(Refusal::malformed("metas", format_args!("1 to {METAS_MAX} nodes"), asked.metas.len()));
        }
        let mut keyring =
            Keyring::new(uuid, root).map_err(|error| Refusal::malformed("root", "a usable key", error))?;
        let mut metas = BTreeMap::new();
        for member in asked.metas {
            let certificate: Signed<Certificate> = convert::signed(&member.certificate)?;
            let (node, said) = (NodeId(member.node), &certificate.statement);
            keyring.admit(&certificate).map_err(|error| {
                Refusal::Untrusted(v1::Untrusted { why: format!("certificate {} of {node}: {error}", said.serial) })
            })?;
            if said.node != node || said.role != Role::Meta {
                let found = format!("{} as {}", said.node, said.role);
                return Err(Refusal::malformed("metas.certificate", format_args!("{node} as meta"), found));
            }
            if member.address.is_empty() {
                return Err(Refusal::malformed("metas.address", "host:port", "nothing"));
            }
            if metas.insert(node, (member.address, certificate)).is_some() {
                return Err(Refusal::malformed("metas", "each node once", format_args!("{node} twice")));
            }
        }
        if !metas.contains_key(&config.node) {
            let found = metas.keys().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return Err(Refusal::malformed("metas", format_args!("{} among others", config.node), found));
        }
        let cluster = Cluster { uuid, generation: FIRST_GENERATION, shards: asked.shards, root };
        Ok(Self { cluster, metas })
    }

    fn members(&self) -> BTreeMap<RaftNodeId, String> {
        self.metas.iter().map(|(node, (address, _))| (RaftNodeId(node.0), address.clone())).collect()
    }
}

/// Every step can be taken again, so a bootstrap that was cut short is finished by sending it once more, to any of its nodes.
async fn bootstrap(core: &Core, asked: v1::BootstrapRequest, deadline: Instant) -> Result<v1::BootstrapReply, Refusal> {
    let plan = Plan::of(core, asked)?;
    if core.directory.group.is_initialized() {
        same_members(core, &plan)?;
    } else {
        let others = plan.metas.iter().filter(|(node, _)| **node != core.config.node);
        try_join_all(others.map(|(node, (address, _))| is_blank(core, *node, address, deadline))).await?;
    }
    form(&core.directory, &plan, deadline).await?;
    for shard in core.shards.iter() {
        form(&shard.hosted, &plan, deadline).await?;
    }
    // Whoever leads the directory now does the rest; its hint says where to go.
    wait_for_leader(&core.directory, deadline).await?;
    match core.directory.propose(DirectoryCommand::InitCluster(plan.cluster), deadline).await?.outcome {
        DirectoryOutcome::Init(Ok(())) => {}
        DirectoryOutcome::Init(Err(InitRefusal::AlreadyInitialised { as_it_is })) => {
            return Err(already(as_it_is.uuid));
        }
        DirectoryOutcome::Init(Err(refusal)) => return Err(Refusal::malformed("cluster", "one that can be", refusal)),
        other => return Err(strange(&other)),
    }
    let admit = |certificate: &Signed<Certificate>| DirectoryCommand::AdmitCertificate(certificate.clone());
    let admitting = plan.metas.values().map(|(_, certificate)| core.directory.propose(admit(certificate), deadline));
    taken(join_all(admitting).await)?;
    let announce = |(node, (address, _)): (&NodeId, &(String, _))| DirectoryCommand::AnnounceNode {
        node: *node,
        address: address.clone(),
    };
    let announcing = plan.metas.iter().map(|meta| core.directory.propose(announce(meta), deadline));
    taken(join_all(announcing).await)?;
    for shard in core.shards.iter() {
        wait_for_leader(&shard.hosted, deadline).await?;
    }
    offices::spread_anew(core, deadline.min(Instant::now() + 2 * core.config.timing.election_max)).await;
    Ok(v1::BootstrapReply {})
}

fn taken(results: Vec<Result<crate::proposer::Done<DirectoryOutcome>, Refusal>>) -> Result<(), Refusal> {
    for result in results {
        match result?.outcome {
            DirectoryOutcome::Node(Ok(_)) => {}
            DirectoryOutcome::Node(Err(refusal)) => return Err(node_refused(refusal)),
            other => return Err(strange(&other)),
        }
    }
    Ok(())
}

fn already(cluster: ClusterUuid) -> Refusal {
    Refusal::AlreadyBootstrapped(v1::AlreadyBootstrapped { cluster: cluster.0.to_vec().into() })
}

/// The node was formed before: only with the same members is this the same bootstrap.
fn same_members(core: &Core, plan: &Plan) -> Result<(), Refusal> {
    let status = core.directory.group.status();
    let as_it_is: BTreeMap<RaftNodeId, String> =
        status.members.into_iter().map(|(node, member)| (node, member.addr)).collect();
    if as_it_is == plan.members() { Ok(()) } else { Err(already(core.config.cluster)) }
}

/// Makes sure that another meta node answers, is the one that is meant, hosts as many groups and belongs to no cluster yet.
async fn is_blank(core: &Core, node: NodeId, address: &str, deadline: Instant) -> Result<(), Refusal> {
    let status = ask_status(core, node, address, deadline).await?;
    if !status.cluster.is_empty() {
        return Err(Refusal::AlreadyBootstrapped(v1::AlreadyBootstrapped { cluster: status.cluster }));
    }
    hosts_as_many(core, &status)
}

/// Makes sure that a node hosts as many groups as this one.
pub(super) fn hosts_as_many(core: &Core, status: &v1::StatusReply) -> Result<(), Refusal> {
    let groups = 1 + core.shards.len();
    if status.groups.len() != groups {
        let found = format!("{} at {}", status.groups.len(), NodeId(status.node));
        return Err(Refusal::malformed("groups", format_args!("{groups} as here"), found));
    }
    Ok(())
}

/// What another meta node knows, which must be the one that is meant.
pub(crate) async fn ask_status(
    core: &Core,
    node: NodeId,
    address: &str,
    deadline: Instant,
) -> Result<v1::StatusReply, Refusal> {
    let unreachable = |why: String| door::not_ready(format!("{node} at {address} does not answer: {why}"), door::RETRY);
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| Refusal::malformed("metas.address", "host:port", error))?;
    let asking = async {
        let connector = core.config.trust.connector(Expect::meta(node));
        let channel = endpoint.connect_with_connector(connector).await;
        let channel = channel.map_err(|error| {
            let mut deepest: &dyn std::error::Error = &error;
            while let Some(source) = deepest.source() {
                deepest = source;
            }
            unreachable(deepest.to_string())
        })?;
        let mut admin = AdminClient::with_interceptor(channel, Announce).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let answer = admin.status(v1::StatusRequest {}).await.map_err(|status| unreachable(status.to_string()))?;
        Ok(answer.into_inner())
    };
    let status = timeout_at(deadline, asking).await.map_err(|_| unreachable("no answer in time".to_owned()))??;
    if status.node != node.0 {
        return Err(Refusal::malformed("metas.node", format_args!("{} at {address}", status.node), node));
    }
    Ok(status)
}

async fn form<S: Replicated>(hosted: &Hosted<S>, plan: &Plan, deadline: Instant) -> Result<(), Refusal> {
    if hosted.group.is_initialized() {
        return Ok(());
    }
    match timeout_at(deadline, hosted.group.initialize(plan.members())).await {
        Ok(Ok(()) | Err(RaftError::AlreadyInitialized { .. })) => Ok(()),
        Ok(Err(error)) => Err(door::indeterminate(format!("group {} was not formed: {error}", hosted.id()))),
        Err(_) => Err(door::indeterminate(format!("group {} was not formed in time", hosted.id()))),
    }
}

/// Waits until somebody leads the group, as far as this node knows.
async fn wait_for_leader<S: Replicated>(hosted: &Hosted<S>, deadline: Instant) -> Result<(), Refusal> {
    let mut watch = hosted.watch();
    match timeout_at(deadline, watch.wait_for(|status| status.leader.is_some())).await {
        Ok(Ok(_)) => Ok(()),
        _ => Err(door::not_ready(format!("group {} has no leader yet", hosted.id()), door::RETRY)),
    }
}

/// What this node knows.
pub(crate) fn status(core: &Core) -> v1::StatusReply {
    let now = Instant::now();
    let (under_way, done, metas, retired) = core.directory.read(|directory| {
        let metas: Vec<_> =
            directory.metas().map(|it| v1::MetaInfo { node: it.id.0, address: it.address.clone() }).collect();
        let retired: Vec<u64> = directory.retired().map(|node| node.0).collect();
        (directory.change_under_way().cloned(), directory.change_done().cloned(), metas, retired)
    });
    let (made, generation, data_nodes, neediest) = core.directory.read(|directory| {
        let labels = |node| directory.node(NodeId(node)).map(|it| it.labels.clone()).unwrap_or_default();
        let data_nodes = directory.nodes().filter_map(|node| data_node(directory, node.id)).map(|info| {
            let regions = directory.regions_of(NodeId(info.node)).map(|region| v1::RegionLife {
                region: Some(region.state.region.into()),
                incarnation: Some(region.state.incarnation.into()),
            });
            v1::DataNodeStatus {
                node: info.node,
                silent_ms: millis(core.membership.silent_for(NodeId(info.node), now)),
                address: info.address,
                alive: info.alive,
                revoked: info.revoked,
                regions: regions.collect(),
                standing: members::standing(directory.node(NodeId(info.node)).map(|it| it.standing)).into(),
                host: labels(info.node).host,
                zone: labels(info.node).zone,
            }
        });
        let neediest = directory.namespaces().max_by_key(|it| (it.policy.least, it.policy.copies)).map(namespace);
        (directory.cluster().is_some(), directory.generation().0, data_nodes.collect(), neediest)
    });
    let cluster = if made { core.config.cluster.0.to_vec() } else { Vec::new() };
    let shards = core.shards.iter().map(|shard| group_status(&shard.hosted));
    v1::StatusReply {
        node: core.config.node.0,
        cluster: cluster.into(),
        generation,
        build: env!("CARGO_PKG_VERSION").to_owned(),
        groups: std::iter::once(group_status(&core.directory)).chain(shards).collect(),
        data_nodes,
        counters: core.counters.read(),
        space: (core.directory.read(unlent).into_iter())
            .chain(core.shards.iter().flat_map(|shard| space(&shard.hosted.frozen())))
            .collect(),
        admin_address: core.config.admin_address.clone().unwrap_or_default(),
        certificate: core.config.certificate.encode().into(),
        metas,
        change_under_way: under_way.map(|held| message(&held, &steps(core, &held.change))),
        change_done: done.map(|held| message(&held, &[])),
        retired,
        neediest,
        node_silence_ms: millis(core.config.node_silence),
        draining: core.host.is_draining(),
    }
}

fn group_status<S: Replicated>(hosted: &Hosted<S>) -> v1::GroupStatus {
    let status = hosted.group.status();
    let role = match status.role {
        RaftRole::Leader => "leader",
        RaftRole::Follower => "follower",
        RaftRole::Candidate => "candidate",
        RaftRole::Learner => "learner",
        RaftRole::Stopped => "stopped",
    };
    let index = |index: Option<quarry_raft::LogIndex>| index.map_or(0, |index| index.0);
    v1::GroupStatus {
        group: status.group.0,
        role: role.to_owned(),
        term: status.term.0,
        leader: status.leader.map_or(0, |(node, _)| node.0),
        last_log: index(status.last_log),
        committed: index(status.committed),
        applied: index(status.applied),
        snapshot: index(status.snapshot),
        purged: index(status.purged),
        log_time_ms: hosted.read(Replicated::log_time).0,
        members: status.members.keys().map(|node| node.0).collect(),
        learners: status.members.iter().filter(|(_, it)| !it.voter).map(|(node, _)| node.0).collect(),
        // Hashing the whole state stops its applies: only StateHash does it.
        hash: Vec::new().into(),
    }
}

/// What is lent to no shard: one row for each region, as of shard 0.
fn unlent(directory: &Directory) -> Vec<v1::SpaceStatus> {
    let row = |state: RegionState| v1::SpaceStatus {
        region: Some(state.region.into()),
        free_bytes: directory.unlent_bytes(state.region),
        total_bytes: state.bytes,
        ..Default::default()
    };
    directory.regions().map(|region| row(region.state)).collect()
}

/// The space of a shard: one row for each region, with the numbers of the shard's live grants, keys and pins in its first row.
fn space(state: &Shard) -> Vec<v1::SpaceStatus> {
    let mut rows: Vec<_> = (state.space().regions.into_iter())
        .map(|(region, space)| v1::SpaceStatus {
            shard: state.id().0,
            region: Some(region.into()),
            free_bytes: space.free_bytes,
            granted_bytes: space.granted_bytes,
            committed_bytes: space.committed_bytes,
            resting_bytes: space.resting_bytes,
            pinned_bytes: space.pinned_bytes,
            ..Default::default()
        })
        .collect();
    if rows.is_empty() {
        rows.push(v1::SpaceStatus { shard: state.id().0, ..Default::default() });
    }
    rows[0].grants = state.live_grants() as u64;
    rows[0].keys = state.values() as u64;
    rows[0].pins = state.pins() as u64;
    rows
}

async fn revoke(
    core: &Core,
    asked: v1::ApplyRevocationsRequest,
    deadline: Instant,
) -> Result<v1::ApplyRevocationsReply, Refusal> {
    core.directory.leads()?;
    core.made()?;
    let list: Signed<Revocations> = convert::signed(&asked.list)?;
    let number = list.statement.number;
    // The machine checks it too; here it costs no entry.
    core.keyring()?
        .as_ref()
        .clone()
        .revoke(&list)
        .map_err(|error| Refusal::Untrusted(v1::Untrusted { why: format!("revocation list {number}: {error}") }))?;
    match core.directory.propose(DirectoryCommand::Revoke(list), deadline).await?.outcome {
        DirectoryOutcome::Node(Ok(feed)) => Ok(v1::ApplyRevocationsReply { number, feed: Some(feed.into()) }),
        DirectoryOutcome::Node(Err(refusal)) => Err(node_refused(refusal)),
        other => Err(strange(&other)),
    }
}

async fn transfer(
    core: &Core,
    asked: v1::TransferLeaderRequest,
    deadline: Instant,
) -> Result<v1::TransferLeaderReply, Refusal> {
    let to = RaftNodeId(required("to", (asked.to != 0).then_some(asked.to))?);
    if asked.group == 0 {
        offices::transfer(core, &core.directory, to, deadline).await?;
    } else {
        offices::transfer(core, &core.shard(quarry_wire::ids::ShardId(asked.group))?.hosted, to, deadline).await?;
    }
    Ok(v1::TransferLeaderReply {})
}

async fn balance(core: &Core, deadline: Instant) -> v1::BalanceLeadersReply {
    let told = |(it, result): (Move, Result<(), String>)| v1::LeaderMove {
        group: it.group.0,
        to: it.to.0,
        failed: result.err().unwrap_or_default(),
    };
    v1::BalanceLeadersReply { moves: offices::spread(core, deadline).await.into_iter().map(told).collect() }
}

async fn drain(core: &Core, asked: v1::DrainRequest, deadline: Instant) -> v1::DrainReply {
    if asked.undo {
        offices::undo_drain(core);
        return v1::DrainReply { led: Vec::new() };
    }
    let led = offices::drain(core, deadline).await;
    v1::DrainReply { led: led.into_iter().map(|it| v1::LedGroup { group: it.group.0, why: it.why }).collect() }
}
