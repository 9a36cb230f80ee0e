//! Moves: values go to other slabs at the nodes where they are, so that memory becomes free in large pieces.
//!
//! A job is one grant for moves: the leader plans it, has it applied and signs it, tells each holder which of its frames to copy where, and
//! proposes what they sign for. It copies nothing and keeps nothing: whatever fails in between ends by the grant's TTL, and the values stay
//! where they are. One job at a time per shard, and per data node (which sees to that itself); readers notice nothing but a new place at
//! their next resolve.
//!
//! [`compact`] is one of the two who order moves: when a node has two extents' worth of free memory and no extent that is free or about to
//! be, or another shard needs one, the extent with the fewest live bytes is emptied, no more than [`ROUND_BYTES`] each time that is looked at. Eviction is the other
//! ([`crate::eviction`]).

use crate::{
    core::{Core, HostedShard},
    door,
    grants::{overtaken, sign},
    hosted::OWN_PROPOSAL,
    metrics,
    service::{believe, strange},
};
use futures::future::join_all;
use quarry_meta_state::{
    Shard,
    shard::{
        Attested, CommitEntry, Covers, Mode, PlannedMove, Publish, ResolvedCopy, ShardCommand, ShardOutcome, Sought,
        Sparse, ValuePlace,
    },
};
use quarry_proto::{
    convert,
    protocol::Announce,
    refusal::Refusal,
    v1::{self, data_node_client::DataNodeClient},
};
use quarry_trust::Expect;
use quarry_wire::{
    attestation::AttestationBatch,
    grant::Grant,
    ids::{ExtentId, NodeId},
    limits::MESSAGE_BYTES_MAX,
    units::SlotSize,
};
use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::Mutex,
    time::{Instant, sleep, timeout_at},
};
use tonic::{Request, transport::Endpoint};

/// Bytes of slots that are moved in one round, all copies counted once.
const ROUND_BYTES: u64 = 16 << 20;
/// Longest time for one job.
const JOB_MAX: Duration = Duration::from_secs(10);
/// How long an extent that could not be emptied is left alone.
const STUCK: Duration = Duration::from_secs(60);
/// Values that a plan chooses from: it looks each of them up while the shard waits.
const PLANNED: usize = 1024;
/// How often a plan is made anew because its place was taken in between.
const REPLANS: usize = 4;

// What is copied after the grant's TTL could not be published any more.
const _: () = assert!(JOB_MAX.as_secs() < quarry_wire::limits::GRANT_TTL_MAX.as_secs());

/// What a leader knows about moves in one shard.
#[derive(Default)]
pub(crate) struct Moving {
    /// Held by the one move that is under way.
    turn: Mutex<()>,
    /// The largest slot that somebody found no place for since that was last looked at.
    wanted: AtomicU64,
}

impl Moving {
    /// Somebody found no place for a slot of this size.
    pub(crate) fn wants(&self, slot_size: SlotSize) {
        self.wanted.fetch_max(slot_size.0.into(), Ordering::Relaxed);
    }
}

/// What was moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Moved {
    /// Values.
    pub(crate) values: usize,
    /// Bytes of their slots, each copy counted.
    pub(crate) bytes: u64,
}

/// Moves those of `values` that can be moved out of the extents `away`, until about `most` bytes of slots were, or the deadline passed. What
/// has changed meanwhile, is pinned, or has no room elsewhere stays, and so does what a holder does not vouch for.
///
/// # Errors
/// [`Refusal`]: this node leads no more, or cannot propose.
pub(crate) async fn move_values(
    core: &Core,
    shard: &HostedShard,
    mut values: Vec<ValuePlace>,
    away: &BTreeSet<ExtentId>,
    most: u64,
    deadline: Instant,
) -> Result<Moved, Refusal> {
    let Ok(_turn) = timeout_at(deadline, shard.moving.turn.lock()).await else {
        return Err(door::not_ready("another move is under way", door::RETRY));
    };
    let mut moved = Moved::default();
    let mut replans = 0;
    while !values.is_empty() && moved.bytes < most && Instant::now() < deadline {
        let (at, avoid) = (shard.hosted.running()?, core.avoided(&[]));
        let next = values.len().min(PLANNED);
        let away = away | &shard.lending.aside();
        let plan = shard.hosted.read(|state| state.plan_move(core.config.node, at, &values[..next], &away, &avoid));
        let Some(plan) = plan else {
            values.drain(..next);
            continue;
        };
        let until = deadline.min(Instant::now() + JOB_MAX);
        let done = shard.hosted.propose(plan.command.clone(), until).await?;
        let grant = match done.outcome {
            ShardOutcome::Grant(Ok(grant)) => grant,
            ShardOutcome::Grant(Err(refusal)) if overtaken(&refusal) && replans < REPLANS => {
                replans += 1;
                continue;
            }
            ShardOutcome::Grant(Err(refusal)) => {
                tracing::debug!(shard = shard.id.0, %refusal, "no slab for a move");
                break;
            }
            other => return Err(strange(&other)),
        };
        let taken: BTreeSet<ValuePlace> = plan.entries.iter().filter_map(origin).collect();
        values.retain(|value| !taken.contains(value));
        let one = u64::from(grant.slot_size.0) * grant.holders.len() as u64;
        let count = carry_out(core, shard, &grant, plan, until).await?;
        moved.values += count;
        moved.bytes += count as u64 * one;
    }
    if moved.values > 0 {
        metrics::moved(shard.id, moved);
    }
    Ok(moved)
}

fn origin(entry: &CommitEntry) -> Option<ValuePlace> {
    match entry.mode {
        Mode::Move { from } => Some(from),
        Mode::Create | Mode::Replace | Mode::Compare { .. } => None,
    }
}

/// Has the holders copy, and publishes what they sign for. Answers how many values are at their new place.
async fn carry_out(
    core: &Core,
    shard: &HostedShard,
    grant: &Grant,
    plan: PlannedMove,
    deadline: Instant,
) -> Result<usize, Refusal> {
    let PlannedMove { entries, from, .. } = plan;
    let signed = sign(core, grant.clone());
    // Room is left for the proposal.
    let left = deadline.saturating_duration_since(Instant::now());
    let answer_by = Instant::now() + left / 4 * 3;
    let asked = grant.holders.iter().map(async |holder| {
        let node = holder.region.node;
        let answer = ask(core, node, &signed, orders(node, &entries, &from), answer_by).await;
        answer.inspect_err(|why| tracing::warn!(%node, grant = %grant.id, %why, "a holder moves nothing")).ok()
    });
    let answers: Vec<v1::MoveCopiesReply> = join_all(asked).await.into_iter().flatten().collect();
    let mut publish = Publish { grant: grant.id, entries, attested: Vec::with_capacity(answers.len()) };
    for answer in answers.iter().filter(|answer| !answer.attested.is_empty()) {
        match attested(core, grant, &publish, answer, deadline).await {
            Ok(attested) => publish.attested.push(attested),
            Err(why) => tracing::warn!(grant = %grant.id, %why, "what a holder says of a move is not believed"),
        }
    }
    // Also if nobody vouches for anything: then every slot has its answer, and the grant ends.
    let done = shard.hosted.propose(ShardCommand::Publish(publish), deadline).await?;
    let ShardOutcome::Publish(outcomes) = done.outcome else { return Err(strange(&done.outcome)) };
    for refusal in outcomes.iter().filter_map(|outcome| outcome.err()) {
        tracing::debug!(grant = %grant.id, %refusal, "a value stays where it is");
    }
    Ok(outcomes.iter().filter(|outcome| outcome.is_ok()).count())
}

/// What `node` is to copy.
fn orders(node: NodeId, entries: &[CommitEntry], from: &[Vec<ResolvedCopy>]) -> Vec<v1::MovedCopy> {
    let order = |(entry, copies): (&CommitEntry, &Vec<ResolvedCopy>)| {
        let copy = copies.iter().find(|copy| copy.region.node == node)?;
        Some(v1::MovedCopy {
            slot: entry.slot.0,
            region: copy.region.index.0,
            offset: copy.offset.0,
            key: bytes::Bytes::copy_from_slice(entry.key.as_bytes()),
            version: Some(entry.version.into()),
            kind: v1::FrameKind::from(entry.kind).into(),
            payload_bytes: entry.payload_bytes,
            payload_crc: entry.payload_crc,
        })
    };
    entries.iter().zip(from).filter_map(order).collect()
}

async fn ask(
    core: &Core,
    node: NodeId,
    grant: &[u8],
    entries: Vec<v1::MovedCopy>,
    deadline: Instant,
) -> Result<v1::MoveCopiesReply, String> {
    let address = core.directory.read(|directory| directory.node(node).map(|known| known.address.clone()));
    let address = address.ok_or("its address is not known")?;
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| error.to_string())?;
    let channel = endpoint.connect_with_connector_lazy(core.config.trust.connector(Expect::data_node(node)));
    let mut client = DataNodeClient::with_interceptor(channel, Announce).max_encoding_message_size(MESSAGE_BYTES_MAX);
    let mut request = Request::new(v1::MoveCopiesRequest { grant: grant.to_vec().into(), entries });
    request.set_timeout(deadline.saturating_duration_since(Instant::now()));
    match timeout_at(deadline, client.move_copies(request)).await {
        Ok(Ok(reply)) => Ok(reply.into_inner()),
        Ok(Err(status)) => {
            let status = core.config.trust.explain(&address, status);
            Err(Refusal::from_status(&status).map_or_else(|| status.to_string(), |refusal| refusal.to_string()))
        }
        Err(_) => Err("it did not answer in time".to_owned()),
    }
}

/// The machine's form of what a holder answered, if it is to be believed.
async fn attested(
    core: &Core,
    grant: &Grant,
    publish: &Publish,
    answer: &v1::MoveCopiesReply,
    deadline: Instant,
) -> Result<Attested, Refusal> {
    let refused: BTreeSet<u32> = answer.refused.iter().copied().collect();
    let count = u32::try_from(publish.entries.len()).unwrap_or(u32::MAX);
    let covers = if refused.is_empty() {
        Covers::All
    } else {
        Covers::Only((0..count).filter(|entry| !refused.contains(entry)).collect())
    };
    let statement = convert::signed::<AttestationBatch>(&answer.attested)?;
    believe(core, grant, publish, covers, statement, deadline).await
}

/// Empties sparse extents of one shard while this node leads it. Ends with the node.
pub(crate) async fn compact(core: Arc<Core>, index: usize) {
    let shard = &core.shards[index];
    let mut stuck: BTreeSet<ExtentId> = BTreeSet::new();
    let mut patience = Instant::now() + STUCK;
    loop {
        sleep(core.config.compact_every).await;
        if patience <= Instant::now() {
            stuck.clear();
            patience = Instant::now() + STUCK;
        }
        if shard.hosted.leads().is_err() {
            continue;
        }
        // Where slabs are evicted, that makes room in one piece, and sooner.
        let wanted = Some(shard.moving.wanted.swap(0, Ordering::Relaxed));
        let wanted = wanted.filter(|bytes| *bytes > 0 && core.config.eviction.low == 0);
        let (asked, avoid, aside) = (shard.lending.compacting(), core.avoided(&[]), shard.lending.aside());
        let sought = Sought { wanted, asked, avoid, stuck: stuck.clone(), aside };
        let state: Shard = shard.hosted.frozen();
        let Some(Sparse { extent, live_bytes, values }) = state.sparse_extent(&sought) else { continue };
        let away = BTreeSet::from([extent]);
        let is_asked = sought.asked.contains(&extent.region.node) && !sought.aside.contains(&extent);
        if is_asked {
            shard.lending.put_aside(extent);
        }
        match move_values(&core, shard, values, &away, ROUND_BYTES, Instant::now() + OWN_PROPOSAL).await {
            Ok(Moved { values: 0, .. }) => {
                tracing::warn!(shard = shard.id.0, %extent, live_bytes, "nothing can be moved out of a sparse extent");
                stuck.insert(extent);
                shard.lending.take_back(extent);
            }
            Ok(Moved { values, bytes }) => {
                tracing::debug!(shard = shard.id.0, %extent, live_bytes, values, bytes, "moved out of a sparse extent");
            }
            Err(refusal) => {
                tracing::debug!(shard = shard.id.0, %refusal, "nothing was moved");
                if is_asked {
                    shard.lending.take_back(extent);
                }
            }
        }
    }
}
