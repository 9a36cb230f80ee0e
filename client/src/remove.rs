//! Deletes. Decides how keys are grouped into calls; a delete of unknown fate is reported as such, never repeated under another name.

use crate::{core::Core, error::DeleteError};
use bytes::Bytes;
use futures::future::join_all;
use quarry_proto::v1::{self, delete_outcome::Code};
use quarry_wire::{
    ids::NamespaceId,
    key::Key,
    limits::{COMMAND_BYTES_MAX, KEYS_PER_CALL_MAX},
    version::Version,
};
use std::{collections::BTreeMap, sync::Arc};
use tokio::time::Instant;

/// Bytes of one call's items: a delete is one command, which must fit in a log entry with room to spare.
const CALL_BYTES_MAX: usize = COMMAND_BYTES_MAX * 3 / 4;
/// What an item takes beside its key: lengths, and an expected version.
const ITEM_BYTES: usize = 40;

type Deleted = Result<Option<Version>, DeleteError>;

pub(crate) async fn delete_many(
    core: &Arc<Core>,
    namespace: NamespaceId,
    items: Vec<(Key, Option<Version>)>,
) -> Vec<Deleted> {
    let deadline = match core.deadline() {
        Ok(deadline) => deadline,
        Err(error) => return items.iter().map(|_| Err(DeleteError::from(error.clone()))).collect(),
    };
    let shards = core.control.view().read().shards();
    let mut calls: Vec<Call> = Vec::new();
    let mut filling: BTreeMap<u32, usize> = BTreeMap::new();
    for (index, (key, expected)) in items.iter().enumerate() {
        let shard = key.shard(namespace, shards).0;
        let bytes = key.as_bytes().len() + ITEM_BYTES;
        let call = match filling.get(&shard) {
            Some(place)
                if calls[*place].bytes + bytes <= CALL_BYTES_MAX && calls[*place].items.len() < KEYS_PER_CALL_MAX =>
            {
                *place
            }
            _ => {
                calls.push(Call { shard, bytes: 0, indexes: Vec::new(), items: Vec::new() });
                filling.insert(shard, calls.len() - 1);
                calls.len() - 1
            }
        };
        let call = &mut calls[call];
        call.bytes += bytes;
        call.indexes.push(index);
        call.items
            .push(v1::DeleteItem { key: Bytes::copy_from_slice(key.as_bytes()), expected: expected.map(Into::into) });
    }
    let keys: Vec<Key> = items.into_iter().map(|(key, _)| key).collect();
    core.cache.lock().invalidate(namespace, &keys, core.options.clock.boot());
    let sent = calls.into_iter().map(|call| call.send(core, namespace, deadline));
    let mut results: Vec<Option<Deleted>> = keys.iter().map(|_| None).collect();
    for (indexes, outcomes) in join_all(sent).await {
        for (index, outcome) in indexes.into_iter().zip(outcomes) {
            results[index] = Some(outcome);
        }
    }
    core.cache.lock().invalidate(namespace, &keys, core.options.clock.boot());
    let nothing = || DeleteError::Indeterminate { why: "the reply said nothing about this key".to_owned() };
    results.into_iter().map(|result| result.unwrap_or_else(|| Err(nothing()))).collect()
}

struct Call {
    shard: u32,
    bytes: usize,
    indexes: Vec<usize>,
    items: Vec<v1::DeleteItem>,
}

impl Call {
    async fn send(self, core: &Core, namespace: NamespaceId, deadline: Instant) -> (Vec<usize>, Vec<Deleted>) {
        let Self { shard, indexes, items, .. } = self;
        let make =
            |request| v1::DeleteRequest { shard, request: Some(request), namespace: namespace.0, items: items.clone() };
        let reply = core
            .control
            .command(shard, "Delete", make, deadline, |mut meta, request| async move { meta.delete(request).await })
            .await;
        let outcomes = match reply {
            Ok(reply) => {
                core.control.heard(shard, reply.applied_ms, None);
                reply.outcomes.into_iter().map(outcome).collect()
            }
            Err(error) => indexes.iter().map(|_| Err(DeleteError::from(error.clone()))).collect(),
        };
        (indexes, outcomes)
    }
}

fn outcome(message: v1::DeleteOutcome) -> Deleted {
    let code = message.code();
    let version = message.version.and_then(|version| Version::try_from(version).ok());
    match (code, version) {
        (Code::Deleted, Some(version)) => Ok(Some(version)),
        (Code::NotFound, _) => Ok(None),
        (Code::CompareFailed, Some(current)) => Err(DeleteError::CompareFailed { current }),
        // Deleted with nothing there is how an absent key answers a compare.
        (Code::CompareFailed, None) => Ok(None),
        (Code::Deleted | Code::Unspecified, _) => {
            Err(DeleteError::Indeterminate { why: "the reply is not understood".to_owned() })
        }
    }
}
