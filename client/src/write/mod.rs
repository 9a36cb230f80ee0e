//! Puts: from values to committed slots.
//!
//! Decides which values go together: those of one kind of frame (namespace, shard, slot size), which share a line. Leaves how they flow to
//! `flow.rs`, slabs to `line.rs` and `slab.rs`, filling frames in place to `reserve.rs`, and what an outcome means to `retry.rs`.

pub(crate) mod commit;
pub(crate) mod flow;
mod frames;
pub(crate) mod line;
pub(crate) mod open;
mod post;
mod reserve;
pub(crate) mod slab;
pub(crate) mod slots;

pub(crate) use reserve::reserve_many;
pub use reserve::{Reserved, ReservedMany};

use crate::{
    calls::Scope,
    core::Core,
    error::PutError,
    namespace::{PutItem, PutMode},
    retry::Happened,
};
use flow::Lot;
use frames::Payload;
use line::{Demand, LineId};
use quarry_wire::{ids::NamespaceId, key::Key, version::Version};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::{task::JoinSet, time::Instant};

/// Slowest fabric for which an operation's deadline still gives its bytes enough time, in bytes per second.
const SLOWEST_BYTES_PER_SECOND: u64 = 32 << 20;

/// One value on its way.
#[derive(Debug)]
pub(crate) struct Value {
    /// Its place among the caller's values.
    index: usize,
    key: Key,
    payload: Payload,
    payload_bytes: u64,
    /// Of the payload, once it was computed.
    crc: Option<u32>,
    mode: PutMode,
    version: Version,
    /// Slots used so far.
    slots: u32,
    /// Rewrites after a stale version so far.
    stale: u32,
    /// What became of the present attempt; an error if nothing was sent.
    fate: Option<Result<Happened, PutError>>,
}

impl Value {
    fn new(core: &Core, index: usize, key: Key, payload: Payload, payload_bytes: u64, mode: PutMode) -> Self {
        let version = core.new_version();
        Self { index, key, payload, payload_bytes, crc: None, mode, version, slots: 0, stale: 0, fate: None }
    }
}

/// Writes all of `items`. One result per item, in their order.
pub(crate) async fn put_many(
    core: &Arc<Core>,
    namespace: NamespaceId,
    items: Vec<PutItem>,
) -> Vec<Result<Version, PutError>> {
    let count = items.len();
    let deadline = match core.deadline() {
        Ok(deadline) => deadline,
        Err(error) => return (0..count).map(|_| Err(PutError::from(error.clone()))).collect(),
    };
    let mut results: Vec<Option<Result<Version, PutError>>> = (0..count).map(|_| None).collect();
    let shards = core.control.view().read().shards();
    let keys: Vec<Key> = items.iter().map(|item| item.key.clone()).collect();
    let mut by_line: BTreeMap<LineId, Vec<Value>> = BTreeMap::new();
    for (index, PutItem { key, bytes, mode }) in items.into_iter().enumerate() {
        let found = bytes.len() as u64;
        match LineId::of(namespace, &key, found, shards) {
            Ok(line) => {
                let values = by_line.entry(line).or_insert_with(|| Vec::with_capacity(count - index));
                values.push(Value::new(core, index, key, Payload::Given(bytes), found, mode));
            }
            Err(error) => results[index] = Some(Err(error)),
        }
    }
    let lots = by_line.into_iter().map(|(id, values)| {
        let line = core.line(id);
        let demand = Demand::new(&line, values.len());
        Lot { line, values, placed: None, demand }
    });
    for (index, result) in run(core, namespace, &keys, lots.collect(), deadline).await {
        results[index] = Some(result);
    }
    in_order(results)
}

fn in_order(results: Vec<Option<Result<Version, PutError>>>) -> Vec<Result<Version, PutError>> {
    let missing = || PutError::Deadline { last: "its task ended early".to_owned() };
    results.into_iter().map(|result| result.unwrap_or_else(|| Err(missing()))).collect()
}

/// Writes `lots`, which hold `keys`.
async fn run(core: &Arc<Core>, namespace: NamespaceId, keys: &[Key], lots: Vec<Lot>, deadline: Instant) -> Outcomes {
    // A get that begins from now on must not be answered from before.
    core.cache.lock().invalidate(namespace, keys, core.options.clock.boot());
    let outcomes = run_lots(core, lots, deadline).await;
    // Again: what was resolved meanwhile may be from before.
    core.cache.lock().invalidate(namespace, keys, core.options.clock.boot());
    outcomes
}

type Outcomes = Vec<(usize, Result<Version, PutError>)>;

/// Runs each lot in a task of its own, so that they use all processors; a single one runs right here. Dropping the caller drops them all.
async fn run_lots(core: &Arc<Core>, mut lots: Vec<Lot>, deadline: Instant) -> Outcomes {
    if lots.len() == 1 {
        let lot = lots.pop().expect("there is one");
        return Box::pin(flow::run(Arc::clone(core), lot, deadline)).await;
    }
    let mut tasks = JoinSet::new();
    for lot in lots {
        tasks.spawn(Scope::current().run(flow::run(Arc::clone(core), lot, deadline)));
    }
    let mut outcomes = Vec::new();
    while let Some(lot) = tasks.join_next().await {
        match lot {
            Ok(lot) => outcomes.extend(lot),
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => {}
        }
    }
    outcomes
}

/// How long `bytes` may take on the slowest fabric.
pub(crate) fn transfer_time(bytes: usize) -> Duration {
    Duration::from_millis(bytes as u64 * 1000 / SLOWEST_BYTES_PER_SECOND)
}
