//! Control: namespaces, grants, seals and deletes; publish, resolve, pins and probes stand in their own files.

use super::{REPLAN_PAUSE, Service, pins, probe, publish, request_id, resolve, strange, unsigned};
use crate::{
    core::{Core, HostedShard, namespace, not_made},
    door,
    grants::{self, GrantWish, request_refused, sign},
    lending, metrics,
};
use futures::future::join_all;
use quarry_meta_state::{
    Directory,
    directory::{DirectoryCommand, DirectoryOutcome, Policy, namespaces::NamespaceRefusal},
    shard::{DeleteKey, DeleteRefusal, GrantRequest, Lack, SealRefusal, ShardCommand, ShardOutcome, plan::Bounds},
};
use quarry_proto::{
    convert,
    refusal::Refusal,
    v1::{self, control_server::Control},
};
use quarry_trust::Caller;
use quarry_wire::{
    grant::{Class, Grant},
    ids::{ExtentId, NamespaceId, NodeId, ShardId},
    key::Key,
    limits::{COMMAND_BYTES_MAX, COPIES_MAX, GRANT_TTL_MAX, KEYS_PER_CALL_MAX, NAMESPACE_NAME_BYTES_MAX},
    units::{SlotCount, SlotSize, millis},
    version::Version,
};
use std::{collections::BTreeSet, time::Duration};
use tokio::time::{Instant, sleep};
use tonic::{Request, Response, Status};

/// Bytes of keys in one delete command; what surrounds a key is less than the rest of an entry.
const DELETE_PART_BYTES: usize = COMMAND_BYTES_MAX / 2;
/// Most bytes around a key in a delete command.
const DELETE_KEY_OVERHEAD: usize = 48;
/// How long a grant waits for values of its namespace to make room in a quota that is used up.
const QUOTA_WITHIN: Duration = Duration::from_secs(1);

#[tonic::async_trait]
impl Control for Service {
    async fn describe(&self, request: Request<v1::DescribeRequest>) -> Result<Response<v1::DescribeReply>, Status> {
        self.call(async { describe(self.core(), request.into_inner()) }).await
    }

    async fn create_namespace(
        &self,
        request: Request<v1::CreateNamespaceRequest>,
    ) -> Result<Response<v1::CreateNamespaceReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(create_namespace(self.core(), request.into_inner(), deadline)).await
    }

    async fn grant(&self, request: Request<v1::GrantRequest>) -> Result<Response<v1::GrantReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        let caller = Caller::of(request.extensions());
        self.call(async {
            caller.is_writer(convert::writer_id(&request.get_ref().writer)?, "Grant")?;
            grant(self.core(), request.into_inner(), deadline).await
        })
        .await
    }

    async fn publish(&self, request: Request<v1::PublishRequest>) -> Result<Response<v1::PublishReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(publish::publish(self.core(), request.into_inner(), deadline)).await
    }

    async fn seal(&self, request: Request<v1::SealRequest>) -> Result<Response<v1::SealReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        let caller = Caller::of(request.extensions());
        self.call(async {
            caller.is_writer(convert::writer_id(&request.get_ref().writer)?, "Seal")?;
            seal(self.core(), request.into_inner(), deadline).await
        })
        .await
    }

    async fn delete(&self, request: Request<v1::DeleteRequest>) -> Result<Response<v1::DeleteReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(delete(self.core(), request.into_inner(), deadline)).await
    }

    async fn resolve(&self, request: Request<v1::ResolveRequest>) -> Result<Response<v1::ResolveReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(resolve::resolve(self.core(), request.into_inner(), deadline)).await
    }

    async fn pin(&self, request: Request<v1::PinRequest>) -> Result<Response<v1::PinReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        let caller = Caller::of(request.extensions());
        self.call(async {
            caller.is_writer(convert::writer_id(&request.get_ref().owner)?, "Pin")?;
            pins::pin(self.core(), request.into_inner(), deadline).await
        })
        .await
    }

    async fn renew_pin(&self, request: Request<v1::RenewPinRequest>) -> Result<Response<v1::RenewPinReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        let caller = Caller::of(request.extensions());
        self.call(async {
            caller.is_writer(convert::writer_id(&request.get_ref().owner)?, "RenewPin")?;
            pins::renew(self.core(), request.into_inner(), deadline).await
        })
        .await
    }

    async fn release_pin(
        &self,
        request: Request<v1::ReleasePinRequest>,
    ) -> Result<Response<v1::ReleasePinReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        let caller = Caller::of(request.extensions());
        self.call(async {
            caller.is_writer(convert::writer_id(&request.get_ref().owner)?, "ReleasePin")?;
            pins::release(self.core(), request.into_inner(), deadline).await
        })
        .await
    }

    async fn exists(&self, request: Request<v1::ExistsRequest>) -> Result<Response<v1::ExistsReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(probe::exists(self.core(), request.into_inner(), deadline)).await
    }

    async fn list(&self, request: Request<v1::ListRequest>) -> Result<Response<v1::ListReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        self.call(probe::list(self.core(), request.into_inner(), deadline)).await
    }
}

fn describe(core: &Core, request: v1::DescribeRequest) -> Result<v1::DescribeReply, Refusal> {
    core.made()?;
    let (generation, shards) = core.directory.read(|directory| (directory.generation(), directory.shards()));
    Ok(v1::DescribeReply {
        cluster: core.config.cluster.0.to_vec().into(),
        generation: generation.0,
        shards,
        groups: core.groups(),
        changes: core.changes(request.seen),
        metas: core.metas(),
    })
}

async fn create_namespace(
    core: &Core,
    asked: v1::CreateNamespaceRequest,
    deadline: Instant,
) -> Result<v1::CreateNamespaceReply, Refusal> {
    let (request, name) = (request_id(asked.request, 0)?, asked.name);
    let class = convert::class(asked.class)?;
    if class == Class::Durable {
        let expected = "cache: durable namespaces need journals, which this build does not have";
        return Err(Refusal::malformed("class", expected, "durable"));
    }
    let mut policy = Policy::new(class, unsigned("copies", asked.copies)?);
    if asked.least != 0 {
        policy.least = unsigned("least", asked.least)?;
    }
    policy.quota_bytes = (asked.quota_bytes > 0).then_some(asked.quota_bytes);
    let shards = core.directory.read(Directory::shards);
    let least = policy.quota_least(shards);
    // Whether there may be as many copies is for the directory to say.
    let copies_fit = usize::from(policy.copies) <= COPIES_MAX;
    if let Some(found) = policy.quota_bytes.filter(|quota| copies_fit && *quota < least) {
        let expected = format_args!("0, or at least {least}: each of {shards} shards allows an even share of it");
        return Err(Refusal::malformed("quota_bytes", expected, found));
    }
    let command = DirectoryCommand::CreateNamespace { request, name: name.clone(), policy };
    let done = core.directory.propose(command, deadline).await?;
    let id = match done.outcome {
        DirectoryOutcome::Namespace(Ok(id)) => id,
        DirectoryOutcome::Namespace(Err(refusal)) => {
            return Err(match refusal {
                NamespaceRefusal::Request(refusal) => request_refused(refusal),
                NamespaceRefusal::NotInitialised => not_made(),
                NamespaceRefusal::Exists { id } => Refusal::NamespaceExists(v1::NamespaceExists { id: id.0, name }),
                NamespaceRefusal::Name { found } => {
                    let characters = "ASCII letters, digits, '-', '_' and '.'";
                    let expected = format_args!("1 to {NAMESPACE_NAME_BYTES_MAX} of {characters}");
                    Refusal::malformed("name", expected, format_args!("{found:?}"))
                }
                NamespaceRefusal::Copies { copies, .. } if !(1..=COPIES_MAX).contains(&copies.into()) => {
                    Refusal::malformed("copies", format_args!("1 to {COPIES_MAX}"), copies)
                }
                NamespaceRefusal::Copies { copies, least } => {
                    Refusal::malformed("least", format_args!("1 to {copies}, the copies of the namespace"), least)
                }
                NamespaceRefusal::TooMany { most } => Refusal::TooManyRequests(v1::TooManyRequests {
                    resource: "namespaces of this generation".to_owned(),
                    limit: most.into(),
                    found: u64::from(most) + 1,
                    retry_after_ms: 0,
                }),
            });
        }
        other => return Err(strange(&other)),
    };
    let made = core.directory.read(|directory| directory.namespace(id).map(namespace));
    Ok(v1::CreateNamespaceReply { namespace: made, applied_ms: done.at.0 })
}

async fn grant(core: &Core, asked: v1::GrantRequest, deadline: Instant) -> Result<v1::GrantReply, Refusal> {
    let shard = core.shard(ShardId(asked.shard))?;
    shard.hosted.leads()?;
    core.catch_up(shard, asked.seen, deadline).await?;
    let ttl = if asked.ttl_ms == 0 { GRANT_TTL_MAX } else { Duration::from_millis(asked.ttl_ms.into()) };
    let wanted = GrantRequest {
        request: request_id(asked.request, 0)?,
        writer: convert::writer_id(&asked.writer)?,
        namespace: NamespaceId(asked.namespace),
        slot_size: SlotSize(asked.slot_size),
        slots: SlotCount(asked.slots),
        ttl,
    };
    let granted = plan_grant(core, shard, &wanted, &asked.avoid, deadline).await;
    if let Err(Refusal::NoSpace(_)) = &granted {
        shard.moving.wants(wanted.slot_size);
    }
    let lack = Lack { namespace: wanted.namespace, slot_size: wanted.slot_size };
    match &granted {
        Err(refusal) if grants::lacks_quota(refusal) => shard.eviction.lacks_quota(lack),
        // Nothing that goes would help.
        Err(Refusal::NoSpace(it)) if it.terminal => {}
        // Nodes that answer may be full as well as too few.
        Err(Refusal::NoSpace(_) | Refusal::TooFewNodes(_)) => shard.eviction.lacks_memory(lack),
        _ => {}
    }
    let (grant, applied_ms) = granted?;
    let shared = shard.hosted.read(|state| state.shared_fate(&grant));
    let signed = sign(core, grant);
    metrics::granted(shard.id, shared);
    Ok(v1::GrantReply { grant: signed.into(), applied_ms, changes: core.changes(asked.seen) })
}

/// The grant, and the log time of its entry.
async fn plan_grant(
    core: &Core,
    shard: &HostedShard,
    wanted: &GrantRequest,
    unreachable: &[u64],
    deadline: Instant,
) -> Result<(Grant, u64), Refusal> {
    let lack = Lack { namespace: wanted.namespace, slot_size: wanted.slot_size };
    let quota_by = deadline.min(Instant::now() + QUOTA_WITHIN);
    loop {
        let bounds = core.bounds(shard, unreachable);
        let wish = GrantWish { meta: core.config.node, asked: wanted.clone(), bounds: bounds.clone() };
        let done = match shard.hosted.plan(wish, deadline).await {
            Err(refusal) if grants::lacks_quota(&refusal) => {
                if room_in_quota(shard, lack, quota_by).await {
                    // Others may take it first.
                    sleep(REPLAN_PAUSE).await;
                    continue;
                }
                return Err(refusal);
            }
            Err(refusal) if grants::lacks_memory(&refusal) => {
                if lent_more(core, shard, wanted, &bounds, deadline).await? {
                    continue;
                }
                return Err(match refusal {
                    Refusal::NoSpace(lack) => Refusal::NoSpace(not_final_yet(core, shard, wanted, &bounds.avoid, lack)),
                    other => other,
                });
            }
            done => done?,
        };
        match done.outcome {
            ShardOutcome::Grant(Ok(grant)) => return Ok((grant, done.at.0)),
            // Something applied in between took the place; plan again with what is so now.
            ShardOutcome::Grant(Err(refusal))
                if grants::overtaken(&refusal) && Instant::now() + REPLAN_PAUSE < deadline =>
            {
                sleep(REPLAN_PAUSE).await;
            }
            ShardOutcome::Grant(Err(refusal)) => {
                let refusal = shard.hosted.read(|state| grants::refused(refusal, wanted, state));
                // Others took the rest of the quota in between.
                if !(grants::lacks_quota(&refusal) && room_in_quota(shard, lack, quota_by).await) {
                    return Err(refusal);
                }
            }
            other => return Err(strange(&other)),
        }
    }
}

/// Waits until values of the namespace have made room in its quota; false if there was none in time.
async fn room_in_quota(shard: &HostedShard, lack: Lack, by: Instant) -> bool {
    shard.eviction.lacks_quota(lack);
    shard.hosted.wait_for(by, |state| state.lacks_quota(lack).is_none()).await && Instant::now() < by
}

/// Wants an extent of every node without a place for the slot. Whether to plan again, because one was lent.
async fn lent_more(
    core: &Core,
    shard: &HostedShard,
    wanted: &GrantRequest,
    bounds: &Bounds,
    deadline: Instant,
) -> Result<bool, Refusal> {
    let bytes = u64::from(wanted.slot_size.0);
    let set_aside: Vec<ExtentId> = shard.hosted.read(|state| state.with_place(&bounds.aside, bytes).collect());
    if shard.lending.own_first(set_aside) && Instant::now() + REPLAN_PAUSE < deadline {
        return Ok(true);
    }
    let lacking = shard.hosted.read(|state| state.lacks_place(bytes, &bounds.avoid));
    lending::want(shard, &lacking, bytes, deadline).await?;
    let (lendable, awaited) = (core.lendable(), lending::awaited(core, shard));
    let comes = |node: &NodeId| {
        let given = awaited.get(node).and_then(|(coming, _)| coming.soon());
        lendable.get(node).copied().max(given).is_some_and(|largest| largest >= bytes)
    };
    let coming = lacking.into_iter().filter(comes).collect();
    Ok(lending::lent(shard, &coming, bytes, deadline).await && Instant::now() + REPLAN_PAUSE < deadline)
}

/// Want of room is not final while other shards may give some back, and comes to its end sooner.
fn not_final_yet(
    core: &Core,
    shard: &HostedShard,
    wanted: &GrantRequest,
    avoid: &BTreeSet<NodeId>,
    mut lack: v1::NoSpace,
) -> v1::NoSpace {
    let lacking = shard.hosted.read(|state| state.lacks_place(wanted.slot_size.0.into(), avoid));
    let comes = || lending::awaited(core, shard).keys().any(|node| lacking.contains(node));
    if lack.terminal && lending::may_come(core, shard, &lacking) || !lack.terminal && comes() {
        (lack.terminal, lack.retry_after_ms) = (false, millis(door::RETRY));
        lack.resource = grants::given_by_others(shard.id);
    }
    lack
}

async fn seal(core: &Core, asked: v1::SealRequest, deadline: Instant) -> Result<v1::SealReply, Refusal> {
    let grant = convert::grant_id(asked.grant)?;
    let shard = core.shard(grant.shard)?;
    shard.hosted.leads()?;
    let writer = convert::writer_id(&asked.writer)?;
    if shard.hosted.read(|state| state.grant(grant).is_some_and(|held| held.grant.writer != writer)) {
        return Err(Refusal::Untrusted(v1::Untrusted { why: format!("{grant} belongs to another writer") }));
    }
    let command = ShardCommand::Seal { grant, fill: SlotCount(asked.fill) };
    let done = shard.hosted.propose(command, deadline).await?;
    match done.outcome {
        ShardOutcome::Seal(Ok(_)) => Ok(v1::SealReply { applied_ms: done.at.0 }),
        ShardOutcome::Seal(Err(SealRefusal::UnknownGrant { grant })) => {
            Err(Refusal::UnknownGrant(v1::UnknownGrant { grant: Some(grant.into()) }))
        }
        ShardOutcome::Seal(Err(SealRefusal::BeyondSlab { slots, found })) => {
            Err(Refusal::malformed("fill", format_args!("at most {}", slots.0), found.0))
        }
        other => Err(strange(&other)),
    }
}

async fn delete(core: &Core, asked: v1::DeleteRequest, deadline: Instant) -> Result<v1::DeleteReply, Refusal> {
    let shard = core.shard(ShardId(asked.shard))?;
    shard.hosted.leads()?;
    let namespace = NamespaceId(asked.namespace);
    if asked.items.len() > KEYS_PER_CALL_MAX {
        return Err(door::too_large("items", KEYS_PER_CALL_MAX, asked.items.len()));
    }
    let mut parts: Vec<Vec<DeleteKey>> = Vec::new();
    let mut bytes = usize::MAX;
    for item in asked.items {
        let key = key_of_shard(core, shard, namespace, &item.key)?;
        let expected = item.expected.map(Version::try_from).transpose()?;
        let size = key.as_bytes().len() + DELETE_KEY_OVERHEAD;
        if bytes.saturating_add(size) > DELETE_PART_BYTES {
            parts.push(Vec::new());
            bytes = 0;
        }
        bytes += size;
        parts.last_mut().expect("the first item makes the first part").push(DeleteKey { key, expected });
    }
    let mut commands = Vec::with_capacity(parts.len());
    for (part, keys) in (0..).zip(parts) {
        commands.push(ShardCommand::Delete { request: request_id(asked.request, part)?, namespace, keys });
    }
    let mut reply = v1::DeleteReply::default();
    let mut refused = None;
    for result in join_all(commands.into_iter().map(|command| shard.hosted.propose(command, deadline))).await {
        let (outcomes, at) = match result {
            Ok(done) => match done.outcome {
                ShardOutcome::Delete(Ok(outcomes)) => (outcomes, done.at),
                ShardOutcome::Delete(Err(refusal)) => return Err(request_refused(refusal)),
                other => return Err(strange(&other)),
            },
            Err(refusal) => {
                refused.get_or_insert(refusal);
                continue;
            }
        };
        reply.applied_ms = reply.applied_ms.max(at.0);
        for outcome in outcomes {
            reply.outcomes.push(delete_outcome(outcome)?);
        }
    }
    match refused {
        None => Ok(reply),
        // Some parts took effect: the refusal of another is not definite for the whole. The same request can be sent again.
        Some(refusal) if !reply.outcomes.is_empty() => {
            Err(door::indeterminate(format!("only a part of the keys was deleted: {refusal}")))
        }
        Some(refusal) => Err(refusal),
    }
}

fn delete_outcome(
    outcome: Result<quarry_meta_state::shard::Deleted, DeleteRefusal>,
) -> Result<v1::DeleteOutcome, Refusal> {
    use v1::delete_outcome::Code;
    let (code, version) = match outcome {
        Ok(deleted) => (Code::Deleted, Some(deleted.version)),
        Err(DeleteRefusal::NotFound) => (Code::NotFound, None),
        Err(DeleteRefusal::CompareFailed { current, .. }) => (Code::CompareFailed, Some(current)),
        Err(DeleteRefusal::WrongShard { expected, found }) => {
            return Err(Refusal::WrongShard(v1::WrongShard { expected: expected.0, found: found.0 }));
        }
    };
    Ok(v1::DeleteOutcome { code: code.into(), version: version.map(Into::into) })
}

/// A key that belongs to this shard.
pub(super) fn key_of_shard(
    core: &Core,
    shard: &HostedShard,
    namespace: NamespaceId,
    bytes: &[u8],
) -> Result<Key, Refusal> {
    let key = convert::key(bytes)?;
    let expected = key.shard(namespace, core.config.shards);
    if expected != shard.id {
        return Err(Refusal::WrongShard(v1::WrongShard { expected: expected.0, found: shard.id.0 }));
    }
    Ok(key)
}

/// The class of errors for a namespace that this cluster does not have.
pub(super) fn known_namespace(directory: &Directory, namespace: NamespaceId) -> Result<(), Refusal> {
    match directory.namespace(namespace) {
        Some(_) => Ok(()),
        None => Err(Refusal::UnknownNamespace(v1::UnknownNamespace { id: namespace.0, name: String::new() })),
    }
}
