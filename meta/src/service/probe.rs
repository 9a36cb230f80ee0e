//! Probes: which keys are there. No lease, not a use, and nothing is signed: what they answer opens no memory.
//!
//! They are as fresh as a resolve and share its read-index rounds; one call is answered at one applied index.

use super::control::{key_of_shard, known_namespace};
use crate::{
    core::{Core, HostedShard},
    door,
};
use quarry_meta_state::{Shard, shard::Listed};
use quarry_proto::{convert, refusal::Refusal, v1};
use quarry_wire::{
    ids::{NamespaceId, ShardId},
    limits::{KEY_BYTES_MAX, KEYS_PER_CALL_MAX, MESSAGE_BYTES_MAX},
};
use tokio::time::Instant;

/// Most bytes around a key in a list.
const LISTED_OVERHEAD: usize = 96;

// A full page of the longest keys fits in a message.
const _: () = assert!(KEYS_PER_CALL_MAX * (KEY_BYTES_MAX + LISTED_OVERHEAD) < MESSAGE_BYTES_MAX);

pub(super) async fn exists(
    core: &Core,
    asked: v1::ExistsRequest,
    deadline: Instant,
) -> Result<v1::ExistsReply, Refusal> {
    let shard = core.shard(ShardId(asked.shard))?;
    let namespace = NamespaceId(asked.namespace);
    if asked.keys.len() > KEYS_PER_CALL_MAX {
        return Err(door::too_large("keys", KEYS_PER_CALL_MAX, asked.keys.len()));
    }
    let mut keys = Vec::with_capacity(asked.keys.len());
    for bytes in &asked.keys {
        keys.push(key_of_shard(core, shard, namespace, bytes)?);
    }
    let read = |state: &Shard| {
        let mut present = vec![0_u8; keys.len().div_ceil(8)];
        for (index, key) in keys.iter().enumerate() {
            present[index / 8] |= u8::from(state.has(namespace, key)) << (index % 8);
        }
        v1::ExistsReply { present: present.into(), applied_ms: state.log_time().0 }
    };
    let reply = at_one_index(core, shard, asked.seen, deadline, read).await?;
    if reply.present.iter().all(|bits| *bits == 0) {
        // Only now: a key that is there proves its namespace.
        core.directory.read(|directory| known_namespace(directory, namespace))?;
    }
    Ok(reply)
}

pub(super) async fn list(core: &Core, asked: v1::ListRequest, deadline: Instant) -> Result<v1::ListReply, Refusal> {
    let shard = core.shard(ShardId(asked.shard))?;
    let namespace = NamespaceId(asked.namespace);
    if asked.prefix.len() > KEY_BYTES_MAX {
        return Err(door::too_large("prefix", KEY_BYTES_MAX, asked.prefix.len()));
    }
    let after = if asked.after.is_empty() { None } else { Some(convert::key(&asked.after)?) };
    let limit = usize::try_from(asked.limit).unwrap_or(usize::MAX);
    if !(1..=KEYS_PER_CALL_MAX).contains(&limit) {
        return Err(Refusal::malformed("limit", format_args!("1 to {KEYS_PER_CALL_MAX}"), limit));
    }
    let read = |state: &Shard| {
        let mut found = state.list(namespace, &asked.prefix, after.as_ref());
        let entries: Vec<v1::Listed> = found.by_ref().take(limit).map(listed).collect();
        let more = entries.len() == limit && found.next().is_some();
        v1::ListReply { entries, more, applied_ms: state.log_time().0 }
    };
    let reply = at_one_index(core, shard, asked.seen, deadline, read).await?;
    if reply.entries.is_empty() {
        core.directory.read(|directory| known_namespace(directory, namespace))?;
    }
    Ok(reply)
}

async fn at_one_index<R>(
    core: &Core,
    shard: &HostedShard,
    seen: Option<v1::Ordinal>,
    deadline: Instant,
    read: impl FnOnce(&Shard) -> R,
) -> Result<R, Refusal> {
    core.made()?;
    shard.hosted.leads()?;
    core.catch_up(shard, seen, deadline).await?;
    shard.hosted.read_linearized(deadline, |state, _| read(state)).await
}

fn listed(it: Listed<'_>) -> v1::Listed {
    v1::Listed {
        key: it.key.as_bytes().to_vec().into(),
        version: Some(it.version.into()),
        payload_bytes: it.payload_bytes,
        payload_crc: it.payload_crc,
        copies: u32::try_from(it.copies).expect("at most COPIES_MAX"),
    }
}
