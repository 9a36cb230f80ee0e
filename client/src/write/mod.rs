//! Puts: from values to committed slots.
//!
//! Decides how values are grouped: per kind of frame into parts of a few megabytes, each built once in registered memory, written with one
//! operation per copy and committed with its neighbours. Leaves slabs to `line.rs` and `slab.rs`, and what an outcome means to `retry.rs`.

pub(crate) mod commit;
pub(crate) mod line;
pub(crate) mod open;
mod post;
pub(crate) mod slab;
pub(crate) mod slots;

use crate::{
    calls::Scope,
    core::Core,
    error::PutError,
    namespace::{PutItem, PutMode},
    read::resolve,
    retry::{self, Happened, How, PutStep, Standing},
};
use bytes::Bytes;
use futures::future::join_all;
use line::{Demand, Line, LineId};
use quarry_fabric::Span;
use quarry_proto::v1;
use quarry_wire::{
    frame::{FrameHeader, FrameKind, header_bytes},
    ids::{NamespaceId, NodeId},
    key::Key,
    version::Version,
};
use slab::{Reservation, Slab};
use std::{collections::BTreeMap, ops::Range, sync::Arc, time::Duration};
use tokio::{
    task::JoinSet,
    time::{Instant, timeout_at},
};

/// Bytes that one operation writes at most, unless a single frame has more.
const PART_BYTES: usize = 4 << 20;
/// The part of a put's remaining time that a Commit leaves over.
const ASKING_PART: u32 = 6;
/// Slowest fabric for which an operation's deadline still gives its bytes enough time, in bytes per second.
const SLOWEST_BYTES_PER_SECOND: u64 = 32 << 20;

/// One value on its way.
#[derive(Debug)]
struct Value {
    /// Its place among the caller's values.
    index: usize,
    key: Key,
    bytes: Bytes,
    crc: u32,
    mode: PutMode,
    version: Version,
    /// Slots used so far.
    slots: u32,
    /// Rewrites after a stale version so far.
    stale: u32,
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
    let mut lines: BTreeMap<(u32, u32), (Arc<Line>, Vec<Value>)> = BTreeMap::new();
    let shards = core.control.view().read().shards();
    let keys: Vec<Key> = items.iter().map(|item| item.key.clone()).collect();
    for (index, PutItem { key, bytes, mode }) in items.into_iter().enumerate() {
        let found = bytes.len() as u64;
        let slot_size = match slots::slot_size_for(key.as_bytes().len(), found) {
            Ok(size) => size,
            Err(limit) => {
                results[index] = Some(Err(PutError::TooLarge { limit, found }));
                continue;
            }
        };
        let shard = key.shard(namespace, shards);
        let (_, values) = lines
            .entry((shard.0, slot_size))
            .or_insert_with(|| (core.line(LineId { namespace, shard, slot_size }), Vec::new()));
        let version = core.new_version();
        values.push(Value { index, key, bytes, crc: 0, mode, version, slots: 0, stale: 0 });
    }
    // A get that begins from now on must not be answered from before.
    core.cache.lock().invalidate(namespace, &keys, core.options.clock.boot());
    let mut parts = Vec::new();
    for (line, values) in lines.into_values() {
        let part = (PART_BYTES / line.id.slot_size as usize).max(1);
        let mut rest = values;
        while !rest.is_empty() {
            let tail = rest.split_off(part.min(rest.len()));
            let demand = Demand::new(&line, u32::try_from(rest.len()).unwrap_or(u32::MAX));
            parts.push((Arc::clone(&line), std::mem::replace(&mut rest, tail), demand));
        }
    }
    let outcomes = run_parts(core, parts, deadline).await;
    // Again: what was resolved meanwhile may be from before.
    core.cache.lock().invalidate(namespace, &keys, core.options.clock.boot());
    for (index, result) in outcomes {
        results[index] = Some(result);
    }
    let missing = || PutError::Deadline { last: "its task ended early".to_owned() };
    results.into_iter().map(|result| result.unwrap_or_else(|| Err(missing()))).collect()
}

type Outcomes = Vec<(usize, Result<Version, PutError>)>;

/// Runs each part in a task of its own, so that they use all processors; a single one runs right here. Dropping the caller drops them all.
async fn run_parts(core: &Arc<Core>, mut parts: Vec<(Arc<Line>, Vec<Value>, Demand)>, deadline: Instant) -> Outcomes {
    if parts.len() == 1 {
        let (line, values, demand) = parts.pop().expect("there is one");
        return Box::pin(write_part(Arc::clone(core), line, values, demand, deadline)).await;
    }
    let mut tasks = JoinSet::new();
    for (line, values, demand) in parts {
        tasks.spawn(Scope::current().run(write_part(Arc::clone(core), line, values, demand, deadline)));
    }
    let mut outcomes = Vec::new();
    while let Some(part) = tasks.join_next().await {
        match part {
            Ok(part) => outcomes.extend(part),
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => {}
        }
    }
    outcomes
}

/// Writes the values of one part: all are put down and committed; those that have to be written again form the next round.
async fn write_part(
    core: Arc<Core>,
    line: Arc<Line>,
    mut values: Vec<Value>,
    mut demand: Demand,
    deadline: Instant,
) -> Outcomes {
    for value in &mut values {
        value.crc = crc32c::crc32c(&value.bytes);
    }
    let mut outcomes = Outcomes::new();
    while !values.is_empty() {
        let (happened, failed) = round(&core, &line, &mut values, &mut demand, deadline).await;
        if let Some(error) = failed {
            // No slot, so nothing was sent for these.
            outcomes.extend(values.drain(happened.len()..).map(|value| (value.index, Err(of_value(&error, &value)))));
        }
        let mut again = Vec::new();
        let mut longest = Duration::ZERO;
        for (value, happened) in values.drain(..).zip(happened) {
            match decide(&core, &line, value, happened, deadline).await {
                Next::Done(index, result) => outcomes.push((index, result)),
                Next::Again(value, after) => {
                    longest = longest.max(after);
                    again.push(value);
                }
            }
        }
        if !again.is_empty() {
            core.counters.retries.add(u64::try_from(again.len()).unwrap_or(u64::MAX));
            core.control.pause(longest).await;
        }
        values = again;
    }
    outcomes
}

/// What a slab's error means for one value: the cluster counts slots, callers count payload.
fn of_value(error: &PutError, value: &Value) -> PutError {
    match error {
        PutError::TooLarge { limit, .. } => PutError::TooLarge {
            limit: limit.saturating_sub(header_bytes(value.key.as_bytes().len()) as u64),
            found: value.bytes.len() as u64,
        },
        other => other.clone(),
    }
}

enum Next {
    Done(usize, Result<Version, PutError>),
    Again(Value, Duration),
}

/// Takes the decisions of `retry.rs` for one value until it is done or has to be written again.
async fn decide(core: &Core, line: &Line, mut value: Value, mut happened: Happened, deadline: Instant) -> Next {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let standing = Standing { own: value.version, slots: value.slots, stale: value.stale, left };
        match retry::after_put(&happened, &standing) {
            PutStep::Done => return Next::Done(value.index, Ok(value.version)),
            PutStep::GiveUp(error) => return Next::Done(value.index, Err(error)),
            PutStep::Retry { after, how: How::NewGrant } => return Next::Again(value, after),
            PutStep::Retry { after, how: How::NewVersion(current) } => {
                value.version = core.version_above(current);
                value.stale += 1;
                return Next::Again(value, after);
            }
            PutStep::Retry { how: How::Resolve, .. } => {
                let current =
                    resolve::current_version(core, line.id.namespace, line.id.shard, &value.key, deadline).await;
                happened = match current {
                    Ok(current) => Happened::Resolved(current),
                    Err(error) => {
                        let why = format!("its Commit brought no outcome, nor did asking: {error}");
                        let error = PutError::Indeterminate { version: value.version, why };
                        return Next::Done(value.index, Err(error));
                    }
                };
            }
        }
    }
}

/// Puts the values into slots, in order, and commits them. Answers what happened to those that got a slot, and why the others got none.
async fn round(
    core: &Arc<Core>,
    line: &Arc<Line>,
    values: &mut [Value],
    demand: &mut Demand,
    deadline: Instant,
) -> (Vec<Happened>, Option<PutError>) {
    let slot_size = line.id.slot_size as usize;
    let bytes = values.len() * slot_size;
    let mut span = match timeout_at(deadline, core.write_window.take(bytes)).await {
        Ok(Ok(span)) => span,
        Ok(Err(error)) => return (Vec::new(), Some(error.into())),
        Err(_) => return (Vec::new(), Some(PutError::Deadline { last: "waiting for room in the window".to_owned() })),
    };
    for (value, slot) in values.iter().zip(span.bytes().chunks_exact_mut(slot_size)) {
        build(line.id.namespace, value, slot);
    }
    let mut span = Some(Arc::new(span));
    let mut happened = Vec::with_capacity(values.len());
    while happened.len() < values.len() {
        let done = happened.len();
        let wanted = u32::try_from(values.len() - done).unwrap_or(u32::MAX);
        let reservation = match line.reserve(core, wanted, deadline).await {
            Ok(reservation) => reservation,
            Err(error) => return (happened, Some(error)),
        };
        let count = reservation.slots.len();
        demand.met(u32::try_from(count).unwrap_or(u32::MAX));
        let here = &mut values[done..done + count];
        for value in here.iter_mut() {
            value.slots += 1;
        }
        let last = here.last().expect("a reservation has a slot");
        let end = (done + count - 1) * slot_size + header_bytes(last.key.as_bytes().len()) + last.bytes.len();
        let entries: Vec<_> =
            here.iter().zip(reservation.slots.clone()).map(|(value, slot)| entry(value, slot)).collect();
        let filled = span.as_ref().expect("kept until the last frames are written");
        let written = write(core, &reservation, filled, done * slot_size..end, deadline).await;
        if done + count == values.len() {
            // The window is for bytes in flight; waiting for outcomes needs none.
            span = None;
        }
        match written {
            Ok(written) => {
                // The rest of the time is for asking what is current, should the Commit stay without an outcome.
                let left = deadline.saturating_duration_since(Instant::now());
                let until = deadline - left / ASKING_PART;
                happened.extend(commit::commit(core, reservation, entries, written, until).await);
            }
            Err(few) => happened.extend(std::iter::repeat_n(few, count)),
        }
    }
    (happened, None)
}

/// Builds the frame of `value` in a slot; the rest of it is zeroed, so that nothing of an earlier frame leaves with it.
fn build(namespace: NamespaceId, value: &Value, slot: &mut [u8]) {
    let header = FrameHeader {
        namespace,
        key: value.key.clone(),
        version: value.version,
        kind: FrameKind::Value,
        payload_bytes: value.bytes.len() as u64,
        payload_crc: value.crc,
    };
    let (head, rest) = slot.split_at_mut(header.bytes());
    header.write_to(head);
    let (payload, tail) = rest.split_at_mut(value.bytes.len());
    payload.copy_from_slice(&value.bytes);
    tail.fill(0);
}

fn entry(value: &Value, slot: u32) -> v1::CommitEntry {
    v1::CommitEntry {
        slot,
        key: Bytes::copy_from_slice(value.key.as_bytes()),
        clock: value.version.clock.0,
        kind: v1::FrameKind::Value.into(),
        payload_bytes: value.bytes.len() as u64,
        payload_crc: value.crc,
        mode: Some(value.mode.into()),
    }
}

/// Writes `frames` of the span (counted from its start) to the reserved slots on every holder that is left. Answers the holders that have
/// them all, ascending, or that they are too few.
async fn write(
    core: &Core,
    reservation: &Reservation,
    span: &Arc<Span>,
    frames: Range<usize>,
    deadline: Instant,
) -> Result<Vec<NodeId>, Happened> {
    let slab: &Arc<Slab> = &reservation.slab;
    let until = deadline.min(Instant::now() + core.options.attempt_timeout + transfer_time(frames.len()));
    let range = frames;
    let writes = slab.holders().into_iter().map(|holder| {
        let (target, range) = (slab.target(&holder, reservation.slots.start), range.clone());
        async move { (holder.node, post::write(core, slab, &holder, &target, span, range, until).await) }
    });
    let (mut written, mut last) = (Vec::new(), "no holder is left".to_owned());
    for (node, outcome) in join_all(writes).await {
        match outcome {
            Ok(()) => written.push(node),
            Err(error) => {
                tracing::debug!(%node, %error, "a write failed");
                slab.holder_failed(node);
                last = format!("{node}: {error}");
            }
        }
    }
    written.sort_unstable();
    if written.len() < slab.needed() {
        slab.retire();
        return Err(Happened::TooFewWritten { written: written.len(), needed: slab.needed(), last });
    }
    Ok(written)
}

/// How long `bytes` may take on the slowest fabric.
pub(crate) fn transfer_time(bytes: usize) -> Duration {
    Duration::from_millis(bytes as u64 * 1000 / SLOWEST_BYTES_PER_SECOND)
}
