//! Commits: says to the cluster that slots hold values, many in one call.
//!
//! Per slab there is at most one Commit under way; whoever comes meanwhile shares the next one (group commit). Decides which holder
//! coordinates and that the same bytes are sent until they have an outcome or nobody waits any more (*Idempotent commits*); leaves to
//! `retry.rs` what an outcome means for a put.

use crate::{
    calls::Scope,
    core::Core,
    retry::{self, CommitStep, Fault, Happened, Outcome},
    write::{
        Value,
        slab::{Reservation, Slab},
    },
};
use bytes::BytesMut;
use parking_lot::Mutex;
use quarry_proto::v1;
use quarry_wire::ids::NodeId;
use std::{collections::VecDeque, sync::Arc};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};

/// Entries in one call at most: with the longest keys it stays well below the largest message.
const ENTRIES_MAX: usize = 2048;

/// Entries that wait for the slab's next Commit.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    /// A task is committing.
    busy: bool,
}

#[derive(Debug)]
struct Job {
    entries: Vec<v1::CommitEntry>,
    /// Holders on which every entry's write completed, ascending.
    written: Vec<NodeId>,
    deadline: Instant,
    /// The call that waits.
    scope: Scope,
    answer: oneshot::Sender<Vec<Happened>>,
    /// Keeps the slab from being sealed.
    _reservation: Arc<Reservation>,
}

/// The entries for values that were written to these slots. Their keys share one allocation.
pub(crate) fn entries<'a>(written: impl Iterator<Item = (u32, &'a Value)> + Clone) -> Vec<v1::CommitEntry> {
    let (count, bytes) =
        written.clone().fold((0, 0), |(count, bytes), (_, value)| (count + 1, bytes + value.key.as_bytes().len()));
    let mut keys = BytesMut::with_capacity(bytes);
    let mut entries = Vec::with_capacity(count);
    for (slot, value) in written {
        keys.extend_from_slice(value.key.as_bytes());
        entries.push(v1::CommitEntry {
            slot,
            key: keys.split().freeze(),
            clock: value.version.clock.0,
            kind: v1::FrameKind::Value.into(),
            payload_bytes: value.payload_bytes,
            payload_crc: value.crc.expect("checksummed before it was written"),
            mode: Some(value.mode.into()),
        });
    }
    entries
}

/// Commits `entries`, whose frames are complete on `written`. One answer per entry.
pub(crate) async fn commit(
    core: &Arc<Core>,
    reservation: Arc<Reservation>,
    entries: Vec<v1::CommitEntry>,
    written: Vec<NodeId>,
    deadline: Instant,
) -> Vec<Happened> {
    let slab = Arc::clone(&reservation.slab);
    let count = entries.len();
    let (answer, answered) = oneshot::channel();
    let job = Job { entries, written, deadline, scope: Scope::current(), answer, _reservation: reservation };
    let start = {
        let mut waiting = slab.queue.waiting.lock();
        waiting.jobs.push_back(job);
        !std::mem::replace(&mut waiting.busy, true)
    };
    if start {
        core.tasks.spawn(run(Arc::clone(core), Arc::clone(&slab)));
    }
    match timeout_at(deadline, answered).await {
        Ok(Ok(answers)) => answers,
        // It may be on its way.
        Ok(Err(_)) | Err(_) => vec![Happened::NoAnswer { fault: Fault::TimedOut, maybe_logged: true }; count],
    }
}

/// Commits what waits until nothing does.
async fn run(core: Arc<Core>, slab: Arc<Slab>) {
    loop {
        let mut jobs = {
            let mut waiting = slab.queue.waiting.lock();
            let jobs = next_batch(&mut waiting.jobs);
            if jobs.is_empty() {
                waiting.busy = false;
                return;
            }
            jobs
        };
        let deadline = jobs.iter().map(|job| job.deadline).max().expect("there is a job");
        let written = std::mem::take(&mut jobs[0].written);
        let mut entries = Vec::new();
        let shares: Vec<usize> = jobs.iter_mut().map(|job| take_in(&mut entries, &mut job.entries)).collect();
        let scope = shared_scope(&jobs);
        let began = Instant::now();
        let mut answers = scope.run(send(&core, &slab, entries, &written, deadline)).await;
        core.counters.committing.add(began.elapsed());
        // The last share first: it is cut off the end.
        for (job, share) in jobs.into_iter().zip(shares).rev() {
            let own = answers.split_off(answers.len() - share);
            // Whoever went away without waiting does not hear.
            drop(job.answer.send(own));
        }
    }
}

/// The call under whose id a batch is sent: the first one's, whose lines name the others.
fn shared_scope(jobs: &[Job]) -> Scope {
    let scope = jobs[0].scope.clone();
    if jobs.len() > 1 && tracing::enabled!(tracing::Level::DEBUG) {
        let others: Vec<_> = jobs[1..].iter().filter_map(|job| job.scope.id()).collect();
        scope.span().in_scope(|| tracing::debug!(?others, "calls share a commit"));
    }
    scope
}

/// Moves `more` to the end of `all`; answers how many they were.
fn take_in(all: &mut Vec<v1::CommitEntry>, more: &mut Vec<v1::CommitEntry>) -> usize {
    let count = more.len();
    if all.is_empty() {
        std::mem::swap(all, more);
    } else {
        all.append(more);
    }
    count
}

/// The first job and those behind it that name the same holders, up to the limit.
fn next_batch(jobs: &mut VecDeque<Job>) -> Vec<Job> {
    let mut batch: Vec<Job> = Vec::new();
    let mut entries = 0;
    while let Some(job) = jobs.front() {
        entries += job.entries.len();
        if batch.first().is_some_and(|first| first.written != job.written || entries > ENTRIES_MAX) {
            break;
        }
        batch.extend(jobs.pop_front());
    }
    batch
}

/// Sends one Commit, to one holder after the other, until there are outcomes.
async fn send(
    core: &Core,
    slab: &Slab,
    entries: Vec<v1::CommitEntry>,
    written: &[NodeId],
    deadline: Instant,
) -> Vec<Happened> {
    let count = entries.len();
    let request = v1::CommitRequest {
        grant: Some(slab.grant().id.into()),
        writer: core.writer_bytes.clone(),
        written: written.iter().map(|node| node.0).collect(),
        entries,
    };
    let shard = slab.grant().id.shard.0;
    // Slabs spread the work of coordinating over their holders.
    let first = usize::try_from(slab.grant().id.sequence.number % 16).expect("below 16");
    let mut maybe_logged = false;
    let mut attempt = 0;
    loop {
        let turn = first + usize::try_from(attempt).unwrap_or(0);
        let node = written[turn % written.len()];
        let until = deadline.min(Instant::now() + core.options.attempt_timeout);
        let fault =
            match core
                .control
                .try_node(node, "Commit", request.clone(), until, |mut node, request| async move {
                    node.commit(request).await
                })
                .await
            {
                Ok(reply) if reply.outcomes.len() == count => {
                    core.control.heard(shard, reply.applied_ms, None);
                    let outcome = |it| Happened::Outcome { outcome: Outcome::of(it), maybe_logged };
                    return reply.outcomes.into_iter().map(outcome).collect();
                }
                Ok(reply) => {
                    Fault::Transport(format!("expected {count} outcomes from {node}, found {}", reply.outcomes.len()))
                }
                Err(fault) => fault,
            };
        maybe_logged |= fault.leaves_unsure();
        tracing::debug!(%node, %fault, "a commit brought no outcome");
        let step = retry::after_commit(&fault, attempt, written.len());
        match step {
            CommitStep::SameSlot { after } if Instant::now() + after < deadline => {
                if after.is_zero() {
                    core.counters.retries.add(1);
                } else {
                    core.control.pause(after).await;
                }
                attempt += 1;
            }
            CommitStep::SameSlot { .. } | CommitStep::Stop => {
                return vec![Happened::NoAnswer { fault, maybe_logged }; count];
            }
        }
    }
}
