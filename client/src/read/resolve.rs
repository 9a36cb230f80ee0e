//! From keys to proven descriptors: the calls.
//!
//! Asks the shards, one call for all keys of a shard, and leaves to `proof.rs` what of the answers is believed. The lease counts from before
//! the request was sent, on the boot-time clock, and is taken one percent shorter (*Leases hold*).

use crate::{
    core::Core,
    error::{CallError, GetError},
    read::{
        cache::Found,
        proof::{Proof, batches},
    },
};
use bytes::Bytes;
use futures::future::join_all;
use quarry_proto::v1;
use quarry_wire::{
    ids::{NamespaceId, ShardId},
    key::Key,
    limits::KEYS_PER_CALL_MAX,
    units::millis,
    version::Version,
};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::time::Instant;

/// What is known of a key: where it is, or that it is not there.
pub(crate) type Resolved = Result<Option<Arc<Found>>, GetError>;

/// Which of `keys` belong to which shard, by their places.
pub(crate) fn by_shard(core: &Core, namespace: NamespaceId, keys: &[Key]) -> BTreeMap<ShardId, Vec<usize>> {
    let shards = core.control.view().read().shards();
    let mut by_shard: BTreeMap<ShardId, Vec<usize>> = BTreeMap::new();
    for (index, key) in keys.iter().enumerate() {
        by_shard.entry(key.shard(namespace, shards)).or_default().push(index);
    }
    by_shard
}

/// Resolves all `keys` with a lease; callers at the same time share their calls. One answer per key, in their order.
pub(crate) async fn resolve(core: &Core, namespace: NamespaceId, keys: &[Key], deadline: Instant) -> Vec<Resolved> {
    let ask = |shard, keys| core.sharing.resolve(core, namespace, shard, keys, deadline);
    each_shard(core, namespace, keys, ask).await
}

/// The same without a lease: nothing may be read through what is found.
pub(crate) async fn probe(core: &Core, namespace: NamespaceId, keys: &[Key], deadline: Instant) -> Vec<Resolved> {
    let ask = |shard, keys: Vec<Key>| async move {
        let asked: Vec<&Key> = keys.iter().collect();
        match call(core, namespace, shard, &asked, Duration::ZERO, deadline).await {
            Ok(resolved) => resolved,
            Err(error) => keys.iter().map(|_| Err(error.clone().into())).collect(),
        }
    };
    each_shard(core, namespace, keys, ask).await
}

/// Asks all shards that have some of the keys, at once, and puts their answers in order.
async fn each_shard<F: Future<Output = Vec<Resolved>>>(
    core: &Core,
    namespace: NamespaceId,
    keys: &[Key],
    ask: impl Fn(ShardId, Vec<Key>) -> F,
) -> Vec<Resolved> {
    let by_shard = by_shard(core, namespace, keys);
    let calls = by_shard.iter().flat_map(|(shard, indexes)| {
        let ask = &ask;
        indexes.chunks(KEYS_PER_CALL_MAX).map(move |indexes| {
            let answers = ask(*shard, indexes.iter().map(|index| keys[*index].clone()).collect());
            async move { (indexes, answers.await) }
        })
    });
    let mut answers: Vec<Option<Resolved>> = keys.iter().map(|_| None).collect();
    for (indexes, resolved) in join_all(calls).await {
        for (index, resolved) in indexes.iter().zip(resolved) {
            answers[*index] = Some(resolved);
        }
    }
    let silent = || GetError::Call(untrusted("the reply said nothing about this key"));
    answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(silent()))).collect()
}

/// The version that is current now, by a shared read-index round and without a lease.
pub(crate) async fn current_version(
    core: &Core,
    namespace: NamespaceId,
    shard: ShardId,
    key: &Key,
    deadline: Instant,
) -> Result<Option<Version>, CallError> {
    let reply = ask(core, namespace, shard, &[key], Duration::ZERO, deadline).await?;
    match reply.items.into_iter().next() {
        Some(item) if item.found => {
            let version = item.version.ok_or_else(|| untrusted("a key without a version"))?;
            Ok(Some(Version::try_from(version).map_err(|wrong| untrusted(&wrong.to_string()))?))
        }
        Some(_) => Ok(None),
        None => Err(untrusted("the reply said nothing about this key")),
    }
}

async fn ask(
    core: &Core,
    namespace: NamespaceId,
    shard: ShardId,
    keys: &[&Key],
    lease: Duration,
    deadline: Instant,
) -> Result<v1::ResolveReply, CallError> {
    let request = v1::ResolveRequest {
        shard: shard.0,
        namespace: namespace.0,
        keys: keys.iter().map(|key| Bytes::copy_from_slice(key.as_bytes())).collect(),
        lease_ms: u32::try_from(millis(lease)).unwrap_or(0),
        stale: false,
        seen: core.control.view().read().seen(),
    };
    let mut reply = core
        .control
        .ask(shard.0, "Resolve", &request, deadline, |mut meta, request| async move { meta.resolve(request).await })
        .await?;
    core.control.heard(shard.0, reply.applied_ms, reply.changes.take());
    Ok(reply)
}

/// One call to one shard. One answer per key, in their order.
pub(super) async fn call(
    core: &Core,
    namespace: NamespaceId,
    shard: ShardId,
    keys: &[&Key],
    lease: Duration,
    deadline: Instant,
) -> Result<Vec<Resolved>, CallError> {
    let sent = core.options.clock.boot();
    let reply = ask(core, namespace, shard, keys, lease, deadline).await?;
    let lease = Duration::from_millis(u64::from(reply.lease_ms)).min(lease);
    believe(core, namespace, keys, &reply, (sent, sent + lease - lease / 100), deadline).await
}

/// What of a shard's answer is believed: one answer per key, in their order. It may be used from when it was asked for until its lease ends.
pub(crate) async fn believe(
    core: &Core,
    namespace: NamespaceId,
    keys: &[&Key],
    reply: &v1::ResolveReply,
    (sent, lease_end): (Duration, Duration),
    deadline: Instant,
) -> Result<Vec<Resolved>, CallError> {
    if reply.items.len() != keys.len() {
        return Err(untrusted(&format!("expected {} answers, found {}", keys.len(), reply.items.len())));
    }
    core.control.revoked_up_to(reply.revocations, deadline).await?;
    let revocations = core.control.view().read().revocations();
    let batches = batches(core, &reply.batches, deadline).await?;
    let mut proof = Proof { namespace, batches, hashes: reply.hashes.as_chunks().0, sent, lease_end, revocations };
    Ok(keys.iter().zip(&reply.items).map(|(key, item)| proof.found(key, item)).collect())
}

pub(crate) fn untrusted(why: &str) -> CallError {
    CallError::Untrusted { why: why.to_owned() }
}
