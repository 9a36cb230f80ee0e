//! A flow: the values of one call that go through one line.
//!
//! Decides how they are cut and what overlaps. What is reserved in one slab is a batch, which is committed as a whole; a batch is written in parts
//! of a megabyte or so, one operation per part and copy. While parts are on their way the next one is built (checksummed, copied if need be),
//! and while a batch is being committed the next one is written. What is on its way is counted in bytes. Leaves slabs to `line.rs`, frames to
//! `frames.rs`, one write to `post.rs`, and what an outcome means to `retry.rs`.

use crate::{
    core::Core,
    error::PutError,
    read::resolve,
    retry::{self, Happened, How, PutStep, Standing},
    write::{
        Outcomes, Value, commit,
        frames::{self, Frames},
        line::{Demand, Line},
        post,
        slab::{Armed, Reservation},
        slots::payload_in,
        transfer_time,
    },
};
use futures::{StreamExt as _, future::join_all, stream::FuturesUnordered};
use quarry_fabric::Span;
use quarry_wire::{ids::NodeId, version::Version};
use std::{collections::BTreeMap, ops::Range, pin::pin, sync::Arc, time::Duration};
use tokio::{
    sync::{Mutex, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};

/// Bytes that one operation writes at most, unless a single frame has more. Small enough that a part is still in the processor's cache when the
/// provider reads what was just checksummed.
pub(crate) const PART_BYTES: usize = 2 << 20;
/// Bytes of one flow that are on their way at once, unless a single part has more: more would only wait in the provider's queues.
const IN_FLIGHT_BYTES: usize = 16 << 20;
/// The unit in which they are counted.
const UNIT: usize = 64;
/// The part of a put's remaining time that a Commit leaves over.
const ASKING_PART: u32 = 6;

const UNITS: usize = IN_FLIGHT_BYTES / UNIT;

/// What goes through one line.
pub(crate) struct Lot {
    pub(crate) line: Arc<Line>,
    pub(crate) values: Vec<Value>,
    /// The slots of those values whose payloads are in their place already, side by side, in their order.
    pub(crate) placed: Option<Span>,
    pub(crate) demand: Demand,
}

/// Writes all of `lot`: all are put down and committed; those that have to be written again form the next round.
pub(crate) async fn run(core: Arc<Core>, lot: Lot, deadline: Instant) -> Outcomes {
    let Lot { line, mut values, mut placed, mut demand } = lot;
    let mut outcomes = Outcomes::with_capacity(values.len());
    let flow = Flow { core: &core, line: &line, deadline, room: Arc::new(Semaphore::new(UNITS)) };
    while !values.is_empty() {
        let failed = flow.round(&mut values, placed.take(), &mut demand).await;
        let mut again = Vec::new();
        let mut longest = Duration::ZERO;
        for mut value in values {
            let happened = match (value.fate.take(), &failed) {
                (Some(Ok(happened)), _) => happened,
                // Nothing was sent for it.
                (Some(Err(error)), _) => {
                    outcomes.push((value.index, Err(error)));
                    continue;
                }
                (None, failed) => {
                    let error = failed.as_ref().expect("the round went on to the last value unless it failed");
                    outcomes.push((value.index, Err(of_value(error, &value))));
                    continue;
                }
            };
            match flow.decide(value, happened).await {
                Next::Done(index, result) => outcomes.push((index, result)),
                Next::Again(value, after) => {
                    longest = longest.max(after);
                    again.push(value);
                }
            }
        }
        if !again.is_empty() {
            core.counters.retries.add(again.len() as u64);
            core.control.pause(longest).await;
            demand = Demand::new(&line, again.len());
        }
        values = again;
    }
    outcomes
}

/// What a slab's error means for one value: the cluster counts slots, callers count payload.
fn of_value(error: &PutError, value: &Value) -> PutError {
    match error {
        PutError::TooLarge { limit, .. } => {
            PutError::TooLarge { limit: payload_in(value.key.as_bytes().len(), *limit), found: value.payload_bytes }
        }
        other => other.clone(),
    }
}

enum Next {
    Done(usize, Result<Version, PutError>),
    Again(Value, Duration),
}

struct Flow<'a> {
    core: &'a Arc<Core>,
    line: &'a Arc<Line>,
    deadline: Instant,
    /// Room for what is on its way, in [`UNIT`]s.
    room: Arc<Semaphore>,
}

/// The right to build parts, which goes from batch to batch, with the slots of the placed values that were not built yet.
type Turn = OwnedMutexGuard<Option<Span>>;

/// What became of a part, whose values are counted from the first of the batch: the holders that have all of it, ascending, or that they are
/// too few.
type Written = (Range<usize>, Result<Vec<NodeId>, Happened>);

impl Flow<'_> {
    /// Puts the values into slots, in order, and commits them; what happened is noted in each. Answers why the rest got no slot.
    async fn round(&self, values: &mut [Value], placed: Option<Span>, demand: &mut Demand) -> Option<PutError> {
        let turn = Arc::new(Mutex::new(placed));
        let mut batches = FuturesUnordered::new();
        let mut rest = values;
        let mut failed = None;
        while !rest.is_empty() {
            let turn = meanwhile(Arc::clone(&turn).lock_owned(), &mut batches, drop).await;
            let began = Instant::now();
            let reserved = meanwhile(self.line.reserve(self.core, demand, self.deadline), &mut batches, drop).await;
            self.core.counters.awaiting_slab.add(began.elapsed());
            let reservation = match reserved {
                Ok(reservation) => reservation,
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            };
            let (batch, others) = rest.split_at_mut(reservation.slots.len());
            rest = others;
            batches.push(self.batch(turn, reservation, batch));
        }
        while batches.next().await.is_some() {}
        failed
    }

    /// Writes and commits what goes into one slab.
    async fn batch(&self, mut turn: Turn, reservation: Reservation, values: &mut [Value]) {
        let mut written: Vec<Written> = Vec::new();
        let mut parts = FuturesUnordered::new();
        let mut done = 0;
        while done < values.len() {
            let count = frames::of_one_part(&values[done..], self.line.id.slot_size);
            let part = done..done + count;
            let slot = reservation.slots.start + u32::try_from(done).expect("a slab's slots are counted in a u32");
            let built = self.build(&mut values[part.clone()], &mut turn);
            match meanwhile(built, &mut parts, |part| written.push(part)).await {
                Ok((frames, room)) => parts.push(self.write(&reservation, slot, part, frames, room)),
                Err(error) => {
                    for value in &mut values[done..] {
                        value.fate = Some(Err(error.clone()));
                    }
                    break;
                }
            }
            done += count;
        }
        // The next batch is built while this one is on its way.
        drop(turn);
        while let Some(part) = parts.next().await {
            written.push(part);
        }
        drop(parts);
        self.commit(reservation, values, written).await;
    }

    /// Waits for room and makes the frames of one part.
    async fn build(
        &self,
        values: &mut [Value],
        placed: &mut Option<Span>,
    ) -> Result<(Frames, OwnedSemaphorePermit), PutError> {
        let began = Instant::now();
        let slot_size = self.line.id.slot_size as usize;
        let late = || PutError::Deadline { last: "waiting for room in the window".to_owned() };
        let units = u32::try_from((values.len() * slot_size / UNIT).min(UNITS)).expect("the room is counted in a u32");
        let room = timeout_at(self.deadline, Arc::clone(&self.room).acquire_many_owned(units));
        let room = room.await.map_err(|_| late())?.expect("the room of a flow is never closed");
        let memory = timeout_at(self.deadline, frames::memory(self.core, values, slot_size, placed));
        let memory = memory.await.map_err(|_| late())??;
        self.core.counters.awaiting_window.add(began.elapsed());
        Ok((frames::build(self.core, self.line.id, values, memory)?, room))
    }

    /// Writes frames to `slot` and those behind it on every holder that is left.
    async fn write(
        &self,
        reservation: &Reservation,
        slot: u32,
        values: Range<usize>,
        frames: Frames,
        _room: OwnedSemaphorePermit,
    ) -> Written {
        let slab = &reservation.slab;
        if !slab.may_write() {
            let last = "the grant's time was over".to_owned();
            return (values, Err(Happened::TooFewWritten { written: 0, needed: slab.needed(), last }));
        }
        let began = Instant::now();
        let until = self.deadline.min(began + self.core.options.attempt_timeout + transfer_time(frames.bytes()));
        let holders = slab.holders();
        // Nothing is built or posted meanwhile that would wait for us.
        let alone = holders.len() == 1 && values.len() == reservation.slots.len();
        let write = async |holder: &Armed| {
            let target = slab.target(holder, slot);
            post::write(self.core, slab, holder, &target, &frames, until, alone).await
        };
        let outcomes = match &holders[..] {
            // Nothing to join, nothing to allocate for it.
            [only] => vec![write(only).await],
            several => join_all(several.iter().map(|holder| write(holder))).await,
        };
        let (mut written, mut last) = (Vec::with_capacity(holders.len()), None);
        for (node, outcome) in holders.iter().map(|holder| holder.node).zip(outcomes) {
            match outcome {
                Ok(()) => written.push(node),
                Err(error) => {
                    tracing::debug!(%node, %error, "a write failed");
                    slab.holder_failed(node);
                    last = Some(format!("{node}: {error}"));
                }
            }
        }
        self.core.counters.writing.add(began.elapsed());
        written.sort_unstable();
        if written.len() < slab.needed() {
            slab.retire();
            let last = last.unwrap_or_else(|| "no holder is left".to_owned());
            return (values, Err(Happened::TooFewWritten { written: written.len(), needed: slab.needed(), last }));
        }
        (values, Ok(written))
    }

    /// Commits what was written; parts with the same holders go together.
    async fn commit(&self, reservation: Reservation, values: &mut [Value], written: Vec<Written>) {
        let mut by_holders: BTreeMap<Vec<NodeId>, Vec<Range<usize>>> = BTreeMap::new();
        for (part, outcome) in written {
            match outcome {
                Ok(holders) => by_holders.entry(holders).or_default().push(part),
                Err(few) => values[part].iter_mut().for_each(|value| value.fate = Some(Ok(few.clone()))),
            }
        }
        // The rest of the time is for asking what is current, should a Commit stay without an outcome.
        let left = self.deadline.saturating_duration_since(Instant::now());
        let until = self.deadline - left / ASKING_PART;
        let reservation = Arc::new(reservation);
        let commits = by_holders.into_iter().map(|(holders, mut parts)| {
            parts.sort_unstable_by_key(|part| part.start);
            let places = || parts.iter().cloned().flatten();
            let first = reservation.slots.start;
            let entries = commit::entries(places().map(|place| {
                let slot = first + u32::try_from(place).expect("a slab's slots are counted in a u32");
                (slot, &values[place])
            }));
            let job = commit::commit(self.core, Arc::clone(&reservation), entries, holders, until);
            async move { (parts, job.await) }
        });
        for (parts, happened) in join_all(commits).await {
            for (place, happened) in parts.into_iter().flatten().zip(happened) {
                values[place].fate = Some(Ok(happened));
            }
        }
    }

    /// Takes the decisions of `retry.rs` for one value until it is done or has to be written again.
    async fn decide(&self, mut value: Value, mut happened: Happened) -> Next {
        let line = self.line.id;
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let standing = Standing { own: value.version, slots: value.slots, stale: value.stale, left };
            match retry::after_put(&happened, &standing) {
                PutStep::Done => return Next::Done(value.index, Ok(value.version)),
                PutStep::GiveUp(error) => return Next::Done(value.index, Err(error)),
                PutStep::Retry { after, how: How::NewGrant } => return Next::Again(value, after),
                PutStep::Retry { after, how: How::NewVersion(current) } => {
                    value.version = self.core.version_above(current);
                    value.stale += 1;
                    return Next::Again(value, after);
                }
                PutStep::Retry { how: How::Resolve, .. } => {
                    let current =
                        resolve::current_version(self.core, line.namespace, line.shard, &value.key, self.deadline);
                    happened = match current.await {
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
}

/// Waits for `wanted` while `going` goes on, whose ends are noted.
async fn meanwhile<T, F: Future>(
    wanted: impl Future<Output = T>,
    going: &mut FuturesUnordered<F>,
    mut note: impl FnMut(F::Output),
) -> T {
    let mut wanted = pin!(wanted);
    loop {
        tokio::select! {
            biased;
            // First: what was just begun is posted before the processor is given to the next part.
            Some(done) = going.next(), if !going.is_empty() => note(done),
            wanted = &mut wanted => return wanted,
        }
    }
}
