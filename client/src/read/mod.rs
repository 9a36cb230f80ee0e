//! Gets: from keys to checked values.
//!
//! Decides when the shards are asked: for what is not known within its lease, once more for what no known copy yielded, and then no more.

pub(crate) mod cache;
pub(crate) mod fetch;
pub(crate) mod probe;
mod proof;
pub(crate) mod resolve;

use crate::{core::Core, error::GetError, namespace::Value};
use cache::Found;
use fetch::{Fetched, Miss, Want};
use quarry_wire::{ids::NamespaceId, key::Key};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};
use tokio::time::Instant;

/// Times that the shards are asked about one key in one call.
const RESOLVES_MAX: u32 = 2;

type Got = Result<Option<Value>, GetError>;

/// Reads all `keys`. One result per key, in their order.
pub(crate) async fn get_many(core: &Arc<Core>, namespace: NamespaceId, keys: &[Key], fresh: bool) -> Vec<Got> {
    let deadline = match core.deadline() {
        Ok(deadline) => deadline,
        Err(error) => return keys.iter().map(|_| Err(GetError::from(error.clone()))).collect(),
    };
    // A key that is asked for twice is read once.
    let mut places: HashMap<&Key, usize> = HashMap::new();
    let mut unique: Vec<Key> = Vec::new();
    let order: Vec<usize> = keys
        .iter()
        .map(|key| {
            *places.entry(key).or_insert_with(|| {
                unique.push(key.clone());
                unique.len() - 1
            })
        })
        .collect();
    let results = get_unique(core, namespace, &unique, fresh, deadline).await;
    order.into_iter().map(|place| results[place].clone()).collect()
}

async fn get_unique(
    core: &Arc<Core>,
    namespace: NamespaceId,
    keys: &[Key],
    fresh: bool,
    deadline: Instant,
) -> Vec<Got> {
    let mut results: Vec<Option<Got>> = keys.iter().map(|_| None).collect();
    let mut known: BTreeMap<usize, Arc<Found>> = BTreeMap::new();
    if !fresh {
        let (cache, now) = (core.cache.lock(), core.options.clock.boot());
        known.extend(keys.iter().enumerate().filter_map(|(index, key)| Some((index, cache.get(namespace, key, now)?))));
        core.counters.cache_hits.add(known.len() as u64);
    }
    let mut misses: BTreeMap<usize, Miss> = BTreeMap::new();
    let mut resolves = 0;
    loop {
        let missing: Vec<usize> =
            (0..keys.len()).filter(|index| results[*index].is_none() && !known.contains_key(index)).collect();
        if !missing.is_empty() {
            if resolves == RESOLVES_MAX || Instant::now() >= deadline {
                for index in missing {
                    results[index] = Some(Err(given_up(misses.remove(&index))));
                }
            } else {
                resolves += 1;
                look_up(core, namespace, keys, &missing, deadline, &mut known, &mut results).await;
            }
        }
        if known.is_empty() {
            break;
        }
        let wants = std::mem::take(&mut known).into_iter();
        let wants: Vec<Want> = wants.map(|(index, found)| Want::new(index, keys[index].clone(), found)).collect();
        let used: BTreeMap<usize, Arc<Found>> =
            wants.iter().map(|want| (want.index, Arc::clone(&want.found))).collect();
        for fetched in fetch::fetch(core, namespace, wants, deadline).await {
            match fetched {
                Fetched::Value(index, value) => results[index] = Some(Ok(Some(value))),
                Fetched::Missed(index, miss) => {
                    core.cache.lock().forget(namespace, &keys[index], &used[&index]);
                    misses.insert(index, miss);
                }
            }
        }
    }
    let given_up = || GetError::Deadline { last: "its task ended early".to_owned() };
    results.into_iter().map(|result| result.unwrap_or_else(|| Err(given_up()))).collect()
}

/// Asks the shards about the keys at `missing`, all in one go.
async fn look_up(
    core: &Arc<Core>,
    namespace: NamespaceId,
    keys: &[Key],
    missing: &[usize],
    deadline: Instant,
    known: &mut BTreeMap<usize, Arc<Found>>,
    results: &mut [Option<Got>],
) {
    let asked = missing.iter().map(|index| &keys[*index]);
    let resolved = resolve::resolve(core, namespace, asked, core.options.lease, deadline).await;
    let now = core.options.clock.boot();
    let mut cache = core.cache.lock();
    for (index, resolved) in missing.iter().zip(resolved) {
        match resolved {
            Ok(None) => results[*index] = Some(Ok(None)),
            Err(error) => results[*index] = Some(Err(error)),
            Ok(Some(found)) => {
                cache.insert(namespace, &keys[*index], &found, now);
                known.insert(*index, found);
            }
        }
    }
}

fn given_up(miss: Option<Miss>) -> GetError {
    let late = |last: &str| GetError::Deadline { last: last.to_owned() };
    match miss {
        Some(Miss::Corrupt { node, what }) => GetError::Corrupt { node, what },
        Some(Miss::Unreachable { node, last }) => GetError::Unreachable { node, last },
        Some(Miss::LeaseOver) => late("the lease ended before the bytes were checked"),
        Some(Miss::NoRoom) => late("waiting for room in the window"),
        None => late("resolving the key"),
    }
}
