//! Resolve: descriptors with a lease.
//!
//! One shared read-index round for all who arrived before it began; descriptors and horizon are read at one applied index. What the copies of
//! one batch share travels once, and so does every hash of their paths; and what is given with a lease counts once per slab as its use.

use super::control::{key_of_shard, known_namespace};
use crate::{
    core::{Core, millis_u32},
    door,
    eviction::Uses,
    leases,
    tree::{Tree, Trees},
};
use quarry_meta_state::{
    Shard,
    shard::{BatchRef, Resolved, ResolvedCopy},
};
use quarry_proto::{refusal::Refusal, v1};
use quarry_wire::{
    ids::{NamespaceId, Ordinal, ShardId},
    key::Key,
    keyring::Keyring,
    limits::KEYS_PER_CALL_MAX,
    units::LogTime,
};
use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
    time::Duration,
};
use tokio::time::Instant;

pub(super) async fn resolve(
    core: &Core,
    asked: v1::ResolveRequest,
    deadline: Instant,
) -> Result<v1::ResolveReply, Refusal> {
    let shard = core.shard(ShardId(asked.shard))?;
    let namespace = NamespaceId(asked.namespace);
    if asked.keys.len() > KEYS_PER_CALL_MAX {
        return Err(door::too_large("keys", KEYS_PER_CALL_MAX, asked.keys.len()));
    }
    let mut keys = Vec::with_capacity(asked.keys.len());
    for bytes in &asked.keys {
        keys.push(key_of_shard(core, shard, namespace, bytes)?);
    }
    core.made()?;
    let mut reply = if asked.stale {
        shard.hosted.read(|state| answer(state, &shard.trees, namespace, &keys, None))
    } else {
        shard.hosted.leads()?;
        core.catch_up(shard, asked.seen, deadline).await?;
        let wanted = Duration::from_millis(asked.lease_ms.into());
        if !wanted.is_zero() {
            shard.horizon.reach(&shard.hosted, wanted, deadline).await?;
        }
        let give = |state: &Shard, running: LogTime| {
            let lease = leases::lease(wanted, state.horizon(), running);
            let use_of = (!lease.is_zero()).then_some((&shard.eviction.uses, running));
            let lease_ms = millis_u32(lease);
            v1::ResolveReply { lease_ms, ..answer(state, &shard.trees, namespace, &keys, use_of) }
        };
        shard.hosted.read_linearized(deadline, give).await?
    };
    if reply.items.iter().all(|item| !item.found) {
        // Only now: a key that is there proves its namespace.
        core.directory.read(|directory| known_namespace(directory, namespace))?;
    }
    add_news(core, &mut reply, asked.seen);
    Ok(reply)
}

/// What of the directory goes with an answer to a caller who knows it up to `seen`.
pub(super) fn add_news(core: &Core, reply: &mut v1::ResolveReply, seen: Option<v1::Ordinal>) {
    // Read before the changes, which have the list if the caller lacks it.
    reply.revocations = core.directory.read(|directory| directory.keyring().map_or(0, Keyring::revocation_number));
    reply.changes = core.changes(seen);
}

fn answer(
    state: &Shard,
    trees: &Trees,
    namespace: NamespaceId,
    keys: &[Key],
    use_of: Option<Use<'_>>,
) -> v1::ResolveReply {
    show(state, trees, keys.iter().map(|key| state.resolve(namespace, key)), use_of)
}

/// Giving these values is use of their slabs, at this log time.
pub(super) type Use<'a> = (&'a Uses, LogTime);

/// The message for these values of `state`, without a lease.
pub(super) fn show(
    state: &Shard,
    trees: &Trees,
    values: impl IntoIterator<Item = Option<Resolved>>,
    use_of: Option<Use<'_>>,
) -> v1::ResolveReply {
    let values = values.into_iter();
    let reply = v1::ResolveReply { items: Vec::with_capacity(values.size_hint().0), ..Default::default() };
    let (batches, bytes) = (HashMap::new(), Vec::new());
    let mut answer = Answer { state, trees, use_of, last_used: None, batches, hashes: 0, bytes, reply };
    for value in values {
        let item = value.map_or_else(v1::Resolved::default, |value| answer.item(&value));
        answer.reply.items.push(item);
    }
    let mut reply = answer.reply;
    reply.hashes = answer.bytes.into();
    reply.applied_ms = state.log_time().0;
    reply
}

struct Answer<'a> {
    state: &'a Shard,
    trees: &'a Trees,
    use_of: Option<Use<'a>>,
    /// The slab whose use was noted last: its other holders' batches come next.
    last_used: Option<Ordinal>,
    batches: HashMap<BatchRef, Shared>,
    /// How many hashes the reply holds, and their bytes.
    hashes: u32,
    bytes: Vec<u8>,
    reply: v1::ResolveReply,
}

/// A batch that the reply tells of.
struct Shared {
    /// Its place in the reply.
    index: u32,
    tree: Arc<Tree>,
    /// The place in the reply of each node of the tree that it holds.
    sent: Vec<Option<u32>>,
}

impl Answer<'_> {
    fn item(&mut self, resolved: &Resolved) -> v1::Resolved {
        // All copies of a value have one place: a slot of a grant.
        if let (Some((uses, at)), Some(copy)) = (self.use_of, resolved.copies.first()) {
            uses.values.touch(copy.grant, copy.slot, at);
        }
        let copies = resolved.copies.iter().filter_map(|copy| self.copy(copy)).collect();
        v1::Resolved {
            found: true,
            version: Some(resolved.version.into()),
            kind: v1::FrameKind::from(resolved.kind).into(),
            payload_bytes: resolved.payload_bytes,
            payload_crc: resolved.payload_crc,
            copies,
        }
    }

    fn copy(&mut self, copy: &ResolvedCopy) -> Option<v1::Copy> {
        let shared = match self.batches.entry(copy.batch) {
            Entry::Occupied(held) => held.into_mut(),
            Entry::Vacant(place) => {
                let batch = self.state.batch(copy.batch)?;
                if let Some((uses, at)) = self.use_of
                    && self.last_used.replace(copy.grant.sequence) != Some(copy.grant.sequence)
                {
                    uses.touch(copy.grant.sequence, at);
                }
                let index = u32::try_from(self.reply.batches.len()).ok()?;
                self.reply.batches.push(v1::ResolvedBatch {
                    signed: batch.signed().encode().into(),
                    grant: Some(copy.grant.into()),
                    lend: Some(copy.lend.into()),
                    region: Some(copy.region.into()),
                    incarnation: Some(copy.incarnation.into()),
                    base: copy.base.0,
                    slot_size: copy.slot_size.0,
                });
                let tree = self.trees.of(copy.batch, batch.leaves, &batch.signed().statement.root);
                let sent = vec![None; tree.len()];
                place.insert(Shared { index, tree, sent })
            }
        };
        let path = shared.tree.path(copy.leaf as usize).map(|number| {
            *shared.sent[number].get_or_insert_with(|| {
                self.bytes.extend_from_slice(shared.tree.node(number));
                self.hashes += 1;
                self.hashes - 1
            })
        });
        Some(v1::Copy {
            batch: shared.index,
            leaf: copy.leaf,
            slot: copy.slot.0,
            path: path.collect(),
            journaled: false,
        })
    }
}
