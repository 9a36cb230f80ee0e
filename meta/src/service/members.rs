//! Changes of the meta nodes, and what data nodes may be used for: whether they may begin.
//!
//! A change is refused here if it were unwise now: a node that is silent, has a past, or lags; voters of whom no majority answers. The steps of
//! a change that has begun are taken by [`crate::members`].

use super::{
    admin::{ask_status, hosts_as_many},
    registry::node_refused,
    strange,
};
use crate::{
    core::Core,
    members::{LAG_MAX, PATIENCE, ask_until, removed, voters_with},
};
use quarry_meta_state::directory::{
    DirectoryCommand, DirectoryOutcome, MemberChange, Standing, members::MemberRefusal,
};
use quarry_proto::{
    convert::{self, required},
    refusal::Refusal,
    v1::{self, change_members_request::Kind, node_refused::Reason},
};
use quarry_raft::RaftNodeId;
use quarry_wire::{
    certificate::{Certificate, Role},
    ids::{NodeId, Ordinal},
    signed::Signed,
};
use std::collections::BTreeSet;
use tokio::time::Instant;

/// Begins a change of the meta nodes, or cancels one. Only at the directory's leader.
pub(super) async fn change(
    core: &Core,
    asked: v1::ChangeMembersRequest,
    deadline: Instant,
) -> Result<v1::ChangeMembersReply, Refusal> {
    // What was acknowledged before is seen.
    core.directory.read_linearized(deadline, |_, _| ()).await?;
    core.made()?;
    let kind = asked.kind();
    if kind == Kind::Cancel {
        return cancel(core, deadline).await;
    }
    let change = wanted(kind, &asked)?;
    let known = |held: &&quarry_meta_state::directory::NumberedChange| held.change == change;
    let same = core.directory.read(|directory| {
        let held = [directory.change_under_way(), directory.change_done()];
        held.into_iter().flatten().find(known).map(|held| held.number)
    });
    if let Some(number) = same {
        return Ok(v1::ChangeMembersReply { number: Some(number.into()) });
    }
    // The machine judges this too; but it is to be said before anything else is looked at.
    let (under_way, retired) = core.directory.read(|directory| {
        let nodes = [change.comes(), change.leaves()];
        let retired = nodes.into_iter().flatten().find(|node| directory.is_retired(*node));
        (directory.change_under_way().cloned(), retired)
    });
    if let Some(under_way) = under_way {
        return Err(refused(&MemberRefusal::UnderWay { under_way }));
    }
    if let Some(node) = retired {
        return Err(refused(&MemberRefusal::Retired { node }));
    }
    match &change {
        MemberChange::Add { node, address } | MemberChange::Replace { new: node, address, .. } => {
            comes(core, *node, address, &asked.certificate, deadline).await?;
        }
        MemberChange::Promote { node } => is_caught_up(core, *node, deadline).await?,
        MemberChange::Remove { .. } => {}
    }
    keeps_a_quorum(core, &change, deadline).await?;
    begin(core, change, deadline).await
}

fn wanted(kind: Kind, asked: &v1::ChangeMembersRequest) -> Result<MemberChange, Refusal> {
    let node = NodeId(required("node", (asked.node != 0).then_some(asked.node))?);
    let address = || {
        let empty = asked.address.is_empty();
        if empty { Err(Refusal::malformed("address", "host:port", "nothing")) } else { Ok(asked.address.clone()) }
    };
    Ok(match kind {
        Kind::Add => MemberChange::Add { node, address: address()? },
        Kind::Promote => MemberChange::Promote { node },
        Kind::Remove => MemberChange::Remove { node },
        Kind::Replace => {
            let old = NodeId(required("old", (asked.old != 0).then_some(asked.old))?);
            MemberChange::Replace { old, new: node, address: address()? }
        }
        Kind::Unspecified | Kind::Cancel => return Err(Refusal::malformed("kind", "a change", "none")),
    })
}

async fn begin(core: &Core, change: MemberChange, deadline: Instant) -> Result<v1::ChangeMembersReply, Refusal> {
    let what = change.to_string();
    match core.directory.propose(DirectoryCommand::BeginChange(change), deadline).await?.outcome {
        DirectoryOutcome::Member(Ok(number)) => {
            tracing::info!(%number, what, "a change of members begins");
            Ok(v1::ChangeMembersReply { number: Some(number.into()) })
        }
        DirectoryOutcome::Member(Err(refusal)) => Err(refused(&refusal)),
        other => Err(strange(&other)),
    }
}

async fn cancel(core: &Core, deadline: Instant) -> Result<v1::ChangeMembersReply, Refusal> {
    let number = core.directory.read(|directory| directory.change_under_way().map(|held| held.number));
    let Some(number) = number else {
        return Err(refused(&MemberRefusal::NotUnderWay { found: Ordinal::default() }));
    };
    let end = DirectoryCommand::EndChange { number, cancelled: true };
    match core.directory.propose(end, deadline).await?.outcome {
        DirectoryOutcome::Member(Ok(number)) => Ok(v1::ChangeMembersReply { number: Some(number.into()) }),
        DirectoryOutcome::Member(Err(refusal)) => Err(refused(&refusal)),
        other => Err(strange(&other)),
    }
}

/// Makes sure that the node which is to come answers, is what it should be, and has no past; and has its certificate admitted.
async fn comes(core: &Core, node: NodeId, address: &str, certificate: &[u8], deadline: Instant) -> Result<(), Refusal> {
    let members = core.directory.group.status().members;
    let held = members.get(&RaftNodeId(node.0));
    if let Some(held) = held.filter(|held| held.addr != address) {
        let why = format!("{node} is a member already, at {}: remove it, and add one with another number", held.addr);
        return Err(Refusal::node_refused(Reason::AlreadyMember, node.0, why));
    }
    let status = ask_status(core, node, address, soon(deadline)).await;
    let status = status.map_err(|refusal| match refusal {
        Refusal::NotReady(it) => Refusal::node_refused(Reason::Silent, node.0, it.why),
        other => other,
    })?;
    hosts_as_many(core, &status)?;
    let has_a_past = status.groups.iter().any(|group| group.last_log > 0);
    if held.is_none() && has_a_past && !is_ours(core, &status) {
        let why = format!("{node} at {address} has a past of its own: start it with an empty folder, and a new number");
        return Err(Refusal::node_refused(Reason::NotBlank, node.0, why));
    }
    let certificate = if certificate.is_empty() { &status.certificate } else { certificate };
    let certificate: Signed<Certificate> = convert::signed(certificate)?;
    let said = &certificate.statement;
    if said.node != node || said.role != Role::Meta {
        let found = format!("{} as {}", said.node, said.role);
        return Err(Refusal::malformed("certificate", format_args!("{node} as meta"), found));
    }
    let untrusted = |error: quarry_wire::keyring::TrustError| {
        Refusal::Untrusted(v1::Untrusted { why: format!("certificate {} of {node}: {error}", said.serial) })
    };
    core.keyring()?.as_ref().clone().admit(&certificate).map_err(untrusted)?;
    let admit = DirectoryCommand::AdmitCertificate(certificate.clone());
    match core.directory.propose(admit, deadline).await?.outcome {
        DirectoryOutcome::Node(Ok(_)) => Ok(()),
        DirectoryOutcome::Node(Err(refusal)) => Err(node_refused(refusal)),
        other => Err(strange(&other)),
    }
}

/// When another node must have answered, so that its silence can be told in time.
fn soon(deadline: Instant) -> Instant {
    let now = Instant::now();
    now + PATIENCE.min(deadline.saturating_duration_since(now) / 2)
}

/// Whether the node's past is that of this cluster in its present generation: an earlier addition was cut short, or cancelled. One that has a log
/// and does not know the cluster yet cannot tell.
fn is_ours(core: &Core, status: &v1::StatusReply) -> bool {
    let listed = |group: &v1::GroupStatus| group.last_log == 0 || group.members.contains(&status.node);
    let generation = core.directory.read(|directory| directory.generation().0);
    status.cluster[..] == core.config.cluster.0 && status.generation == generation && status.groups.iter().all(listed)
}

/// Makes sure that a node which is to vote is a member and lacks little in every group.
async fn is_caught_up(core: &Core, node: NodeId, deadline: Instant) -> Result<(), Refusal> {
    let members = core.directory.group.status().members;
    let Some(held) = members.get(&RaftNodeId(node.0)) else {
        let why = format!("{node} is no member: add it first");
        return Err(Refusal::node_refused(Reason::NotAMember, node.0, why));
    };
    let status = ask_status(core, node, &held.addr, soon(deadline)).await;
    let status = status.map_err(|refusal| Refusal::node_refused(Reason::Silent, node.0, refusal))?;
    let shards = core.shards.iter().map(|shard| shard.hosted.group.status());
    for own in std::iter::once(core.directory.group.status()).chain(shards) {
        let committed = own.committed.map_or(0, |index| index.0);
        let it = status.groups.iter().find(|it| it.group == own.group.0);
        let lag = committed.saturating_sub(it.map_or(0, |it| it.last_log));
        if lag > LAG_MAX {
            let why = format!("{node} lacks {lag} entries of group {}, {LAG_MAX} at most: wait for it", own.group);
            let reason = Reason::Behind.into();
            return Err(Refusal::NodeRefused(v1::NodeRefused { reason, node: node.0, why, group: own.group.0, lag }));
        }
    }
    Ok(())
}

/// Makes sure that a majority of those who will vote answers now.
async fn keeps_a_quorum(core: &Core, change: &MemberChange, deadline: Instant) -> Result<(), Refusal> {
    if matches!(change, MemberChange::Add { .. }) {
        return Ok(());
    }
    let members = core.directory.group.status().members;
    let (comes, leaves) = (change.comes().map(|it| RaftNodeId(it.0)), change.leaves().map(|it| RaftNodeId(it.0)));
    if let Some(node) = leaves
        && !members.contains_key(&node)
    {
        let why = format!("{} is no member", NodeId(node.0));
        return Err(Refusal::node_refused(Reason::NotAMember, node.0, why));
    }
    let voters: BTreeSet<RaftNodeId> = voters_with(&members, comes, leaves);
    let node = leaves.or(comes).map_or(0, |node| node.0);
    if voters.is_empty() {
        let why = format!("{} is the last voter: add and promote another first", NodeId(node));
        return Err(Refusal::node_refused(Reason::LastVoter, node, why));
    }
    // Whoever comes was heard just now, and need not have an address here yet.
    let asked = voters.iter().filter(|it| it.0 != core.config.node.0 && Some(**it) != comes);
    let asked: Vec<_> = asked.filter_map(|it| Some((NodeId(it.0), members.get(it)?.addr.clone()))).collect();
    let needed = voters.len() / 2 + 1;
    let others = needed.saturating_sub(voters.len() - asked.len());
    let heard = ask_until(core, &asked, others, soon(deadline)).await;
    if heard.len() >= others {
        return Ok(());
    }
    let answered: BTreeSet<u64> = heard.iter().map(|reply| reply.node).collect();
    let silent = asked.iter().filter(|(node, _)| !answered.contains(&node.0));
    let silent: Vec<String> = silent.map(|(node, address)| format!("{node} at {address}")).collect();
    let why = format!(
        "of the {} nodes that would vote only {} answer, {needed} are needed; silent: {}",
        voters.len(),
        voters.len() - silent.len(),
        silent.join(", ")
    );
    Err(Refusal::node_refused(Reason::NoQuorum, node, why))
}

fn refused(refusal: &MemberRefusal) -> Refusal {
    let (reason, node) = match refusal {
        MemberRefusal::NotInitialised => return crate::core::not_made(),
        MemberRefusal::Address { found } => {
            return Refusal::malformed("address", "1 to 256 bytes", format_args!("{found} bytes"));
        }
        MemberRefusal::UnderWay { under_way } => {
            (Reason::UnderWay, under_way.change.comes().or_else(|| under_way.change.leaves()))
        }
        MemberRefusal::Retired { node } => (Reason::Retired, Some(*node)),
        MemberRefusal::NotCertified { node } => (Reason::NotCertified, Some(*node)),
        MemberRefusal::Same { node } => (Reason::AlreadyMember, Some(*node)),
        MemberRefusal::NotUnderWay { .. } => (Reason::NotUnderWay, None),
        MemberRefusal::OnlyForward { node } => (Reason::OnlyForward, Some(*node)),
        MemberRefusal::DataNode { node } => (Reason::OtherRole, Some(*node)),
    };
    Refusal::node_refused(reason, node.map_or(0, |node| node.0), refusal)
}

/// The message for a standing.
pub(super) fn standing(it: Option<Standing>) -> v1::Standing {
    match it.unwrap_or_default() {
        Standing::Serving => v1::Standing::Serving,
        Standing::Draining => v1::Standing::Draining,
        Standing::Decommissioned => v1::Standing::Decommissioned,
    }
}

/// Says what a data node may be used for, and counts what it holds. Decommissioning is refused without `force` while it holds last copies. They are
/// counted once the replicas here hold all that was committed when this was asked; a copy elsewhere that is lost between the count and the standing's
/// entry is not seen.
pub(super) async fn set_standing(
    core: &Core,
    asked: v1::SetStandingRequest,
    deadline: Instant,
) -> Result<v1::SetStandingReply, Refusal> {
    core.directory.read_linearized(deadline, |_, _| ()).await?;
    core.made()?;
    let node = NodeId(asked.node);
    known(core, node)?;
    let voids = asked.standing() == v1::Standing::Decommissioned && !asked.look_only && !asked.force;
    if voids {
        crate::members::has_applied_all(core, deadline).await?;
    }
    let (mut copies, mut last_copies) = (0, 0);
    for shard in core.shards.iter() {
        let (all, last) = shard.hosted.frozen().copies_on(node);
        (copies, last_copies) = (copies + all, last_copies + last);
    }
    let reply = v1::SetStandingReply { copies, last_copies };
    if asked.look_only {
        return Ok(reply);
    }
    let already = core.directory.read(|directory| directory.node(node).map(|it| it.standing));
    if voids && last_copies > 0 && already != Some(Standing::Decommissioned) {
        let why = format!("{last_copies} values have their last copy on {node}: drain it and wait, or force it");
        return Err(Refusal::node_refused(Reason::LastCopies, node.0, why));
    }
    let standing = match asked.standing() {
        v1::Standing::Serving => Standing::Serving,
        v1::Standing::Draining => Standing::Draining,
        v1::Standing::Decommissioned => Standing::Decommissioned,
    };
    match core.directory.propose(DirectoryCommand::SetStanding { node, standing }, deadline).await?.outcome {
        DirectoryOutcome::Node(Ok(_)) => {
            tracing::info!(%node, standing = standing.name(), "a data node's standing was set");
            Ok(reply)
        }
        DirectoryOutcome::Node(Err(refusal)) => Err(node_refused(refusal)),
        other => Err(strange(&other)),
    }
}

fn known(core: &Core, node: NodeId) -> Result<(), Refusal> {
    core.directory.read(|directory| {
        if directory.is_retired(node) {
            return Err(removed(node));
        }
        if directory.node(node).is_none() || !directory.is_certified(node, Role::DataNode) {
            return Err(Refusal::node_refused(Reason::Unknown, node.0, format_args!("there is no data node {node}")));
        }
        Ok(())
    })
}

/// Forgets a data node.
pub(super) async fn forget(
    core: &Core,
    asked: v1::ForgetNodeRequest,
    deadline: Instant,
) -> Result<v1::ForgetNodeReply, Refusal> {
    core.directory.read_linearized(deadline, |_, _| ()).await?;
    core.made()?;
    let node = NodeId(asked.node);
    // Forgotten before: the same again changes nothing. But a meta node that was removed was never to be forgotten here.
    let forgotten =
        core.directory.read(|directory| directory.is_retired(node) && directory.was_certified(node, Role::DataNode));
    if !forgotten {
        known(core, node)?;
    }
    match core.directory.propose(DirectoryCommand::ForgetNode { node }, deadline).await?.outcome {
        DirectoryOutcome::Node(Ok(_)) => Ok(v1::ForgetNodeReply {}),
        DirectoryOutcome::Node(Err(refusal)) => Err(node_refused(refusal)),
        other => Err(strange(&other)),
    }
}
