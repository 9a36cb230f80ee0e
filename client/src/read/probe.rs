//! Probes: which keys are there and where. They open no memory: no lease, not a use, nothing is kept.
//!
//! Decides how the answers of the shards become one: the leading run of present keys, and one order over all shards. Each shard's answer is as
//! of one moment, not before the call began (*Linearizable*); there is no such moment for all shards together.

use crate::{
    core::Core,
    error::{CallError, GetError},
    namespace::{CopyStat, Listed, Page, Stat},
    read::resolve::{self, Resolved, untrusted},
};
use bytes::Bytes;
use futures::future::join_all;
use quarry_proto::v1;
use quarry_wire::{
    ids::{NamespaceId, ShardId},
    key::{Key, KeyLengthError},
    limits::{KEY_BYTES_MAX, KEYS_PER_CALL_MAX},
    version::Version,
};
use std::collections::BTreeMap;
use tokio::time::Instant;

/// How many of `keys` are there before the first that is not.
pub(crate) async fn leading_run(core: &Core, namespace: NamespaceId, keys: &[Key]) -> Result<usize, CallError> {
    let deadline = core.deadline()?;
    let by_shard = resolve::by_shard(core, namespace, keys);
    let calls = by_shard.iter().flat_map(|(shard, indexes)| {
        indexes.chunks(KEYS_PER_CALL_MAX).map(move |indexes| async move {
            (indexes, present(core, namespace, *shard, keys, indexes, deadline).await)
        })
    });
    // What stopped the run so far: the first key that is not there, or that nothing is known of.
    let mut first: (usize, Result<(), CallError>) = (keys.len(), Ok(()));
    for (indexes, answer) in join_all(calls).await {
        let stop = match answer {
            Ok(bits) => {
                indexes.iter().enumerate().find(|(place, _)| !bit(&bits, *place)).map(|(_, index)| (*index, Ok(())))
            }
            Err(error) => indexes.first().map(|index| (*index, Err(error))),
        };
        if let Some(stop) = stop
            && stop.0 < first.0
        {
            first = stop;
        }
    }
    let (run, known) = first;
    known.map(|()| run)
}

fn bit(bits: &[u8], place: usize) -> bool {
    bits[place / 8] >> (place % 8) & 1 == 1
}

/// One bit for each key at `indexes`, which all belong to `shard`.
async fn present(
    core: &Core,
    namespace: NamespaceId,
    shard: ShardId,
    keys: &[Key],
    indexes: &[usize],
    deadline: Instant,
) -> Result<Bytes, CallError> {
    let request = v1::ExistsRequest {
        shard: shard.0,
        namespace: namespace.0,
        keys: indexes.iter().map(|index| Bytes::copy_from_slice(keys[*index].as_bytes())).collect(),
        seen: core.control.view().read().seen(),
    };
    let reply = core
        .control
        .ask(shard.0, "Exists", &request, deadline, |mut meta, request| async move { meta.exists(request).await })
        .await?;
    core.control.heard(shard.0, reply.applied_ms, None);
    let expected = indexes.len().div_ceil(8);
    if reply.present.len() != expected {
        return Err(untrusted(&format!("expected {expected} bytes of answers, found {}", reply.present.len())));
    }
    Ok(reply.present)
}

/// What is known of each key, its copies proven by their holders' signatures.
pub(crate) async fn stat_many(
    core: &Core,
    namespace: NamespaceId,
    keys: &[Key],
) -> Vec<Result<Option<Stat>, GetError>> {
    let resolved = match core.deadline() {
        Ok(deadline) => resolve::probe(core, namespace, keys, deadline).await,
        Err(error) => keys.iter().map(|_| Err(error.clone().into())).collect(),
    };
    resolved.into_iter().map(stat).collect()
}

fn stat(resolved: Resolved) -> Result<Option<Stat>, GetError> {
    let Some(found) = resolved? else { return Ok(None) };
    let copy = |place: &crate::read::cache::Place| CopyStat {
        node: place.region.node,
        region: place.region.index.0,
        incarnation: place.incarnation,
        offset: place.offset,
    };
    Ok(Some(Stat {
        version: found.version,
        payload_bytes: found.payload_bytes,
        payload_crc: found.payload_crc,
        copies: found.copies.iter().map(copy).collect(),
    }))
}

/// The first keys behind `after` that begin with `prefix`, over all shards.
pub(crate) async fn list(
    core: &Core,
    namespace: NamespaceId,
    prefix: &[u8],
    after: Option<&Key>,
    limit: usize,
) -> Result<Page, GetError> {
    let deadline = core.deadline()?;
    if prefix.len() > KEY_BYTES_MAX {
        return Err(KeyLengthError { found: prefix.len() }.into());
    }
    let limit = limit.clamp(1, KEYS_PER_CALL_MAX);
    let shards = core.control.view().read().shards();
    let calls = (1..=shards).map(|shard| part(core, namespace, ShardId(shard), prefix, after, limit, deadline));
    let mut parts = Vec::new();
    for part in join_all(calls).await {
        parts.push(part?);
    }
    merge(parts, limit).map_err(Into::into)
}

/// What one shard has, in order, and whether it has more behind that.
type Part = (Vec<Listed>, bool);

async fn part(
    core: &Core,
    namespace: NamespaceId,
    shard: ShardId,
    prefix: &[u8],
    after: Option<&Key>,
    limit: usize,
    deadline: Instant,
) -> Result<Part, CallError> {
    let request = v1::ListRequest {
        shard: shard.0,
        namespace: namespace.0,
        prefix: Bytes::copy_from_slice(prefix),
        after: after.map(|key| Bytes::copy_from_slice(key.as_bytes())).unwrap_or_default(),
        limit: u32::try_from(limit).expect("at most KEYS_PER_CALL_MAX"),
        seen: core.control.view().read().seen(),
    };
    let reply = core
        .control
        .ask(shard.0, "List", &request, deadline, |mut meta, request| async move { meta.list(request).await })
        .await?;
    core.control.heard(shard.0, reply.applied_ms, None);
    let mut entries: Vec<Listed> = Vec::with_capacity(reply.entries.len());
    let mut last = after.cloned();
    for entry in reply.entries {
        let wrong = |why: String| untrusted(&format!("an entry of a list: {why}"));
        let key = Key::new(&entry.key).map_err(|error| wrong(error.to_string()))?;
        if last.as_ref().is_some_and(|last| *last >= key) || !key.as_bytes().starts_with(prefix) {
            return Err(wrong(format!("{key} stands where it does not belong")));
        }
        let version = entry.version.ok_or_else(|| wrong("no version".to_owned()))?;
        let version = Version::try_from(version).map_err(|error| wrong(error.to_string()))?;
        last = Some(key.clone());
        entries.push(Listed {
            key,
            version,
            payload_bytes: entry.payload_bytes,
            payload_crc: entry.payload_crc,
            copies: entry.copies,
        });
    }
    if reply.more && entries.is_empty() {
        return Err(untrusted("a list that has more and says nothing"));
    }
    Ok((entries, reply.more))
}

/// The first `limit` entries of all parts in order, as far as it is known that none is missing between them.
fn merge(parts: Vec<Part>, limit: usize) -> Result<Page, CallError> {
    // Behind the last entry of a part that has more there may be anything.
    let complete_to =
        parts.iter().filter(|(_, more)| *more).filter_map(|(entries, _)| entries.last()).map(|it| it.key.clone()).min();
    let mut merged: BTreeMap<Key, Listed> = BTreeMap::new();
    let mut left_out = complete_to.is_some();
    for entry in parts.into_iter().flat_map(|(entries, _)| entries) {
        if complete_to.as_ref().is_some_and(|end| entry.key > *end) {
            continue;
        }
        if let Some(twice) = merged.insert(entry.key.clone(), entry) {
            return Err(untrusted(&format!("two shards list {}", twice.key)));
        }
        if merged.len() > limit {
            merged.pop_last();
            left_out = true;
        }
    }
    let entries: Vec<Listed> = merged.into_values().collect();
    let after = if left_out { entries.last().map(|entry| entry.key.clone()) } else { None };
    Ok(Page { entries, after })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn listed(name: &str) -> Listed {
        Listed {
            key: Key::new(name).unwrap(),
            version: Version::default(),
            payload_bytes: 0,
            payload_crc: 0,
            copies: 1,
        }
    }

    proptest! {
        #[test]
        fn pages_over_shards_that_answer_as_little_as_they_like_give_every_key_once_and_in_order(
            shards in prop::collection::vec(prop::collection::btree_set("[a-c]{1,3}", 0..20), 1..4),
            limit in 1usize..8,
            cuts in prop::collection::vec(1usize..8, 1..6),
        ) {
            let mut expected: Vec<String> = shards.iter().flatten().cloned().collect();
            expected.sort();
            let unique = { let mut all = expected.clone(); all.dedup(); all.len() == expected.len() };
            prop_assume!(unique);
            let (mut found, mut after, mut round): (Vec<String>, Option<Key>, usize) = (Vec::new(), None, 0);
            loop {
                let parts = shards.iter().enumerate().map(|(shard, keys)| {
                    let behind: Vec<&String> = keys.iter().filter(|key| after.as_ref().is_none_or(|after| key.as_bytes() > after.as_bytes())).collect();
                    let take = limit.min(cuts[(round + shard) % cuts.len()]);
                    (behind.iter().take(take).map(|key| listed(key)).collect(), behind.len() > take)
                }).collect();
                let page = merge(parts, limit).unwrap();
                prop_assert!(page.entries.len() <= limit);
                found.extend(page.entries.iter().map(|entry| entry.key.to_string()));
                round += 1;
                match page.after {
                    Some(next) => after = Some(next),
                    None => break,
                }
                prop_assert!(round <= expected.len() + 1, "every page gets on");
            }
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_key_that_two_shards_list_is_not_believed() {
        let parts = vec![(vec![listed("one")], false), (vec![listed("one")], false)];
        assert!(matches!(merge(parts, 9), Err(CallError::Untrusted { .. })));
    }
}
