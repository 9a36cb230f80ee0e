//! A shard: grants, slots, values, the lease horizon and quarantine of the keys that hash to it.
//!
//! Decides which remote bytes are a value; never touches the bytes. Leaves to the service: proposing (see [`plan`]), signing grants, checking
//! signatures before a Publish is proposed, leases (horizon minus the leader's running log clock), and when to stamp (see
//! [`Shard::next_deadline`]). One file per concept:
//!
//! | file | decides | keeps |
//! | --- | --- | --- |
//! | `space` | free ranges and resting ranges of an extent | *Fresh space* |
//! | `extents` | what the feed changes; wanting extents and giving them back | *Nothing leaks*, *Epochs only grow* |
//! | `grants` | who may write which slots, until when | *Fresh space* |
//! | `commits` | which slot is a key's current version | *No half-truth*, *Idempotent commits* |
//! | `records` | nothing: they keep what became of slots | |
//! | `moves` | values that their holders copy to another slab | *No wrong value*, *Leases hold* |
//! | `evict` | which slabs go whole to make room | *Fresh space*, *Leases hold* |
//! | `deletes` | removal of keys | *Linearizable* |
//! | `damage` | copies that are not what was committed | *No half-truth* |
//! | `resign` | a node's new signatures in place of its old ones | *Nothing unsigned* |
//! | `leases` | the horizon | *Leases hold* |
//! | `pins` | values that are kept where they are for long reads | *Leases hold*, *Nothing leaks* |
//! | `quarantine` | the rest of freed memory, and every other deadline | *Leases hold*, *Nothing leaks* |
//!
//! Files for journaled copies and objects will stand beside them.

mod check;
mod command;
mod commits;
mod damage;
mod deletes;
mod evict;
mod extents;
mod grants;
mod leases;
mod moves;
mod pins;
pub mod plan;
mod quarantine;
mod read;
mod records;
mod refusal;
mod resign;
mod space;
mod victims;
mod warm;

use crate::{
    cow_arc::CowArc,
    directory::{Labels, Namespace, RegionState},
    ordered::{Map, Set},
    requests::Requests,
    snapshot::{self, Machine, SnapshotError, StateHash},
};
pub use command::{
    Attested, CheckedCopy, CommitEntry, CommitOutcome, Committed, Covers, DeleteKey, Deleted, DroppedCopy, Evicted,
    GrantRequest, Mode, MoveRequest, PinRequest, PinTerm, Pinned, Proposed, Publish, ShardCommand, ShardOutcome,
    ValuePlace,
};
use commits::Batch;
pub use commits::{BatchRef, leaves};
pub use grants::{GrantPhase, GrantView};
use grants::{Phase, Slab};
pub use moves::{PlannedMove, Sought, Sparse};
use pins::Pin;
use quarantine::Deadline;
use quarry_wire::{
    grant::Grant,
    ids::{
        ExtentId, FeedNumber, Generation, LendNumber, NamespaceId, NodeId, Ordinal, PinId, RegionId, ShardId,
        SlotIndex, WriterId,
    },
    key::Key,
    limits::{HORIZON_AHEAD, OUTCOME_KEPT, QUARANTINE},
    units::LogTime,
};
pub use read::{Listed, Resolved, ResolvedCopy, SignedBatch};
pub use refusal::{
    CommitRefusal, CopyRefusal, DeleteRefusal, DropRefusal, EvictRefusal, FeedRefusal, GrantRefusal, PinMiss,
    PinRefusal, RenewRefusal, SealRefusal,
};
pub use resign::Resigned;
use serde::{Deserialize, Serialize};
use space::Extent;
pub use space::{Space, SpaceOf};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    time::Duration,
};
pub use victims::{Lack, Marks, Need, Room, Victim};
use warm::Warm;

/// What a shard is made with; part of its state, so equal on all replicas.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// Generation in which the cluster is when the shard is made.
    pub generation: Generation,
    /// How many shards the cluster has.
    pub shards: u32,
    /// Rest of freed memory after its last possible lease.
    pub quarantine: Duration,
    /// How long outcomes are kept after their grant closed, and requests after their stamp.
    pub outcome_kept: Duration,
    /// The horizon is never raised further than this ahead of log time, so that a wrong proposal cannot hold memory for long.
    pub horizon_ahead_max: Duration,
}

impl Settings {
    /// The limits of this build.
    #[must_use]
    pub const fn new(generation: Generation, shards: u32) -> Self {
        Self {
            generation,
            shards,
            quarantine: QUARANTINE,
            outcome_kept: OUTCOME_KEPT,
            horizon_ahead_max: HORIZON_AHEAD.saturating_mul(6),
        }
    }
}

/// Where the current version of a key is written down: a slot of a slab.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
struct ValueRef {
    // The parts of the grant's number stand apart: together they would take a third more, and there is one for every value.
    generation: Generation,
    number: u64,
    slot: SlotIndex,
}

const _: () = assert!(size_of::<ValueRef>() == 16);

impl ValueRef {
    const fn new(Ordinal { generation, number }: Ordinal, slot: SlotIndex) -> Self {
        Self { generation, number, slot }
    }
    const fn grant(self) -> Ordinal {
        Ordinal { generation: self.generation, number: self.number }
    }
}

/// What came of a request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum RequestOutcome {
    Grant(Grant),
    Delete(Vec<Result<Deleted, DeleteRefusal>>),
    Pin(Pinned),
    Renew(PinTerm),
}

/// The state of a shard. Cloning it costs nothing of note, however many values it has: whatever grows with them is shared, and copied piece by
/// piece where one of the two changes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Shard {
    id: ShardId,
    settings: Settings,
    generation: Generation,
    /// Log time of the last entry.
    now: LogTime,
    /// No lease ends after it; moved by Tick, upwards only.
    horizon: LogTime,
    /// How far the directory's feed was applied.
    feed: FeedNumber,
    /// Sequence number of the last grant; counts on through generations.
    sequence_last: u64,
    /// Number of the last batch.
    batch_last: u64,
    namespaces: BTreeMap<NamespaceId, Namespace>,
    regions: BTreeMap<RegionId, RegionState>,
    /// Nodes on which nothing new is granted.
    drained: BTreeSet<NodeId>,
    /// What data nodes share their fate with, those that say so.
    labels: BTreeMap<NodeId, Labels>,
    /// The extents held.
    extents: Map<ExtentId, Extent>,
    /// The highest lend number ever seen, per extent.
    lends_seen: Map<ExtentId, LendNumber>,
    /// Given back, but the feed does not show it yet.
    returned: BTreeMap<ExtentId, LendNumber>,
    /// Nodes of which an extent is wanted, for a slot of so many bytes.
    wants: BTreeMap<NodeId, u64>,
    /// Slabs by the sequence of their grant; a slab stays while its outcomes are kept or a slot of it is committed.
    slabs: Map<Ordinal, CowArc<Slab>>,
    /// Signed batches, each while a slot is committed under it.
    batches: Map<BatchRef, CowArc<Batch>>,
    values: Map<(NamespaceId, Key), ValueRef>,
    requests: Requests<RequestOutcome>,
    /// Number of the last pin; counts on through generations.
    pin_last: u64,
    pins: Map<PinId, CowArc<Pin>>,
    /// Everything that happens by itself, in order.
    #[serde(skip)]
    deadlines: Set<(LogTime, Deadline)>,
    /// Bytes granted and committed per namespace, all copies counted.
    #[serde(skip)]
    used: BTreeMap<NamespaceId, u64>,
    /// Grants that are open or sealed, by writer.
    #[serde(skip)]
    writers: Set<(WriterId, Ordinal)>,
    /// How many pins each value is under.
    #[serde(skip)]
    pinned: Map<ValueRef, u32>,
    /// How many pins each owner holds.
    #[serde(skip)]
    pin_owners: BTreeMap<WriterId, u32>,
    /// Where planners should not go if there is another place.
    #[serde(skip)]
    warm: Warm,
}

impl Shard {
    /// A shard that was told nothing.
    ///
    /// # Panics
    /// If the cluster has no shard: checked when a cluster is made.
    #[must_use]
    pub fn new(id: ShardId, settings: Settings) -> Self {
        assert!(settings.shards > 0 && id.0 > 0 && id.0 <= settings.shards, "shards are numbered from 1");
        Self {
            id,
            settings,
            generation: settings.generation,
            now: LogTime(0),
            horizon: LogTime(0),
            feed: FeedNumber::default(),
            sequence_last: 0,
            batch_last: 0,
            namespaces: BTreeMap::new(),
            regions: BTreeMap::new(),
            drained: BTreeSet::new(),
            labels: BTreeMap::new(),
            extents: Map::new(),
            lends_seen: Map::new(),
            returned: BTreeMap::new(),
            wants: BTreeMap::new(),
            slabs: Map::new(),
            batches: Map::new(),
            values: Map::new(),
            requests: Requests::new(),
            pin_last: 0,
            pins: Map::new(),
            deadlines: Set::default(),
            used: BTreeMap::new(),
            writers: Set::default(),
            pinned: Map::new(),
            pin_owners: BTreeMap::new(),
            warm: Warm::default(),
        }
    }

    /// Applies one command of an entry stamped `at`. A stamp below the last one counts as the last one. Whatever has become due is done first,
    /// so replicas agree whatever the command is.
    pub fn apply(&mut self, at: LogTime, command: ShardCommand) -> ShardOutcome {
        self.advance(at);
        match command {
            ShardCommand::ApplyFeed(slice) => ShardOutcome::Feed(self.apply_feed(slice)),
            ShardCommand::Grant { meta, asked, holders } => {
                ShardOutcome::Grant(self.grant_slab(meta, &asked, &holders))
            }
            ShardCommand::GrantMove { meta, asked, holders } => {
                ShardOutcome::Grant(self.grant_move(meta, asked, &holders))
            }
            ShardCommand::Publish(publish) => ShardOutcome::Publish(self.publish(&publish)),
            ShardCommand::Seal { grant, fill } => ShardOutcome::Seal(self.seal(grant, fill)),
            ShardCommand::Delete { request, namespace, keys } => {
                ShardOutcome::Delete(self.delete(request, namespace, &keys))
            }
            ShardCommand::DropExtent { extent, lend } => ShardOutcome::DropExtent(self.drop_extent(extent, lend)),
            ShardCommand::Tick { horizon } => ShardOutcome::Tick { horizon: self.raise_horizon(horizon) },
            ShardCommand::Pin(asked) => ShardOutcome::Pin(self.pin(&asked)),
            ShardCommand::Renew { request, owner, pin, duration } => {
                ShardOutcome::Renew(self.renew(request, owner, pin, duration))
            }
            ShardCommand::DropCopy(asked) => ShardOutcome::DropCopy(self.drop_copy(&asked)),
            ShardCommand::Release { owner, pin } => ShardOutcome::Release { held: self.release(owner, pin) },
            ShardCommand::Resign { node, batches } => ShardOutcome::Resign { taken: self.resign(node, &batches) },
            ShardCommand::Evict { victims } => ShardOutcome::Evict(self.evict(&victims)),
            ShardCommand::Want { nodes, bytes } => {
                self.want(&nodes, bytes);
                ShardOutcome::Want
            }
        }
    }

    /// Which shard this is.
    #[must_use]
    pub const fn id(&self) -> ShardId {
        self.id
    }

    /// What it was made with.
    #[must_use]
    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The generation that it is in.
    #[must_use]
    pub const fn generation(&self) -> Generation {
        self.generation
    }

    /// Log time of the last entry.
    #[must_use]
    pub const fn log_time(&self) -> LogTime {
        self.now
    }

    /// How far it has followed the directory.
    #[must_use]
    pub const fn feed_position(&self) -> FeedNumber {
        self.feed
    }

    /// Canonical bytes of the whole state.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        snapshot::encode(Machine::Shard, self)
    }

    /// Writes what [`Shard::encode`] answers, piece by piece.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn encode_to(&self, out: impl io::Write) -> io::Result<()> {
        snapshot::encode_to(Machine::Shard, self, out)
    }

    /// SHA-256 over [`Shard::encode`]: equal on all replicas that applied the same entries.
    #[must_use]
    pub fn hash(&self) -> StateHash {
        snapshot::hash(Machine::Shard, self)
    }

    /// Reads what [`Shard::encode`] wrote, checked.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, SnapshotError> {
        Self::decode_from(bytes)
    }

    /// Reads what [`Shard::encode`] wrote, to the end of `input`, checked.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn decode_from(input: impl io::Read) -> Result<Self, SnapshotError> {
        let mut state: Self = snapshot::decode_from(Machine::Shard, input)?;
        state.share_keys();
        state.deadlines = state.deadlines_of_state();
        state.used = state.used_of_state();
        state.writers = state.writers_of_state();
        (state.pinned, state.pin_owners) = state.pinned_of_state();
        state.warm = state.warm_of_state();
        state.check()?;
        Ok(state)
    }

    /// A key is written twice, but kept once: beside the record of its value.
    fn share_keys(&mut self) {
        let same = |at: &ValueRef| Some(self.slabs.get(&at.grant())?.records.get(&at.slot)?.key.clone());
        let shared = self.values.iter().map(|((namespace, key), at)| {
            let known = same(at).filter(|known| known == key);
            ((*namespace, known.unwrap_or_else(|| key.clone())), *at)
        });
        self.values = shared.collect();
    }
}
