//! What a meta node counts and measures beside its calls and its consensus.
//!
//! Space is told by the shard's leader alone, so that sums over all nodes are right; a node that leads no more tells zeros.

use crate::{core::HostedShard, moves::Moved, offices::Reason};
use ::metrics::{Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use quarry_meta_state::{
    Shard,
    directory::Shared,
    shard::{Evicted, Space},
};
use quarry_proto::{telemetry::outcome_name, v1};
use quarry_raft::GroupId;
use quarry_wire::ids::ShardId;
use std::{collections::BTreeMap, time::Duration};

const PROPOSAL_COMMANDS: &str = "quarry_meta_proposal_commands";
const GRANTS: &str = "quarry_meta_grants_total";
const GRANTS_NEAR: &str = "quarry_meta_grants_near_total";
const COMMITS: &str = "quarry_meta_commits_total";
const EVICTED_SLABS: &str = "quarry_meta_evicted_slabs_total";
const EVICTED_VALUES: &str = "quarry_meta_evicted_values_total";
const EVICTED_BYTES: &str = "quarry_meta_evicted_bytes_total";
const DAMAGED: &str = "quarry_meta_damaged_copies_total";
const GIVEN_BACK: &str = "quarry_meta_extents_given_back_total";
const MOVED_VALUES: &str = "quarry_meta_moved_values_total";
const MOVED_BYTES: &str = "quarry_meta_moved_bytes_total";
const GROUPS_LED: &str = "quarry_raft_groups_led";
const LEADER_MOVES: &str = "quarry_meta_leader_moves_total";
const SPACE_BYTES: &str = "quarry_meta_space_bytes";
const SLOTS: &str = "quarry_meta_slots";
const GRANTS_LIVE: &str = "quarry_meta_grants_live";
const PINS: &str = "quarry_meta_pins";
const KEYS: &str = "quarry_meta_keys";
const HORIZON: &str = "quarry_meta_lease_horizon_seconds";
const DATA_NODES: &str = "quarry_meta_data_nodes";

/// Says what the metrics of this crate mean, to the recorder that is installed.
pub fn describe_metrics() {
    describe_histogram!(PROPOSAL_COMMANDS, Unit::Count, "Commands of callers that shared one entry of the log.");
    describe_counter!(
        GRANTS,
        Unit::Count,
        "Grants that this node signed as the shard's leader, repeated ones included."
    );
    describe_counter!(
        GRANTS_NEAR,
        Unit::Count,
        "Grants with two holders in one zone or on one host, because none with room lie further apart."
    );
    describe_counter!(
        COMMITS,
        Unit::Count,
        "Entries of commits that this node answered as the shard's leader, by outcome."
    );
    describe_counter!(EVICTED_SLABS, Unit::Count, "Cache slabs that this node evicted as the shard's leader.");
    describe_counter!(EVICTED_VALUES, Unit::Count, "Values that went with evicted slabs.");
    describe_counter!(EVICTED_BYTES, Unit::Bytes, "Memory that evicted slabs gave back, all copies counted.");
    describe_counter!(
        DAMAGED,
        Unit::Count,
        "Copies that their holders found damaged and this node gave up as the shard's leader."
    );
    describe_counter!(
        GIVEN_BACK,
        Unit::Count,
        "Extents that this node, as the shard's leader, gave back to the directory for others to use."
    );
    describe_counter!(
        MOVED_VALUES,
        Unit::Count,
        "Values that this node, as the shard's leader, had moved to another slab at the same data nodes."
    );
    describe_counter!(MOVED_BYTES, Unit::Bytes, "Bytes of the slots that they left, all copies counted.");
    describe_gauge!(GROUPS_LED, Unit::Count, "Raft groups that this node leads.");
    describe_counter!(
        LEADER_MOVES,
        Unit::Count,
        "Leaderships that this node handed to another, by reason: balance (it led more than its share), drain, operator."
    );
    describe_gauge!(
        SPACE_BYTES,
        Unit::Bytes,
        "Memory lent to the shard by state: free, granted, committed, pinned (a version replaced or deleted that a pin keeps), quarantined. Told by the shard's leader, 0 elsewhere."
    );
    describe_gauge!(
        SLOTS,
        Unit::Count,
        "Slots of the shard by state: granted, committed, pinned. Told by the shard's leader, 0 elsewhere."
    );
    describe_gauge!(
        GRANTS_LIVE,
        Unit::Count,
        "Grants that are open or sealed. Told by the shard's leader, 0 elsewhere."
    );
    describe_gauge!(PINS, Unit::Count, "Read pins that the shard holds. Told by the shard's leader, 0 elsewhere.");
    describe_gauge!(KEYS, Unit::Count, "Keys of the shard that have a value. Told by the shard's leader, 0 elsewhere.");
    describe_gauge!(
        HORIZON,
        Unit::Seconds,
        "How far the lease horizon is ahead of the leader's clock. Told by the shard's leader, 0 elsewhere."
    );
    describe_gauge!(DATA_NODES, Unit::Count, "Data nodes that the directory knows, by state: alive, dead.");
}

/// The sizes of one group's entries.
pub(crate) fn proposal_commands(group: GroupId) -> Histogram {
    histogram!(PROPOSAL_COMMANDS, "group" => group.to_string())
}

/// A grant was signed.
pub(crate) fn granted(shard: ShardId, shared: Shared) {
    counter!(GRANTS, "shard" => shard.0.to_string()).increment(1);
    let what = match shared {
        Shared::Nothing => return,
        Shared::Zone => "zone",
        Shared::Host => "host",
    };
    counter!(GRANTS_NEAR, "shard" => shard.0.to_string(), "shared" => what).increment(1);
}

/// A slab was evicted.
pub(crate) fn evicted(shard: ShardId, evicted: Evicted) {
    let shard = shard.0.to_string();
    counter!(EVICTED_SLABS, "shard" => shard.clone()).increment(1);
    counter!(EVICTED_VALUES, "shard" => shard.clone()).increment(evicted.values.into());
    counter!(EVICTED_BYTES, "shard" => shard).increment(evicted.bytes);
}

/// A damaged copy was given up.
pub(crate) fn damaged(shard: ShardId) {
    counter!(DAMAGED, "shard" => shard.0.to_string()).increment(1);
}

/// A batch was answered.
pub(crate) fn committed(shard: ShardId, outcomes: &[v1::CommitOutcome]) {
    let mut counts: BTreeMap<&'static str, u64> = BTreeMap::new();
    for outcome in outcomes {
        *counts.entry(outcome_name(outcome.code())).or_default() += 1;
    }
    for (outcome, count) in counts {
        counter!(COMMITS, "shard" => shard.0.to_string(), "outcome" => outcome).increment(count);
    }
}

/// An extent was given back.
pub(crate) fn given_back(shard: ShardId) {
    counter!(GIVEN_BACK, "shard" => shard.0.to_string()).increment(1);
}

/// Values were moved.
pub(crate) fn moved(shard: ShardId, moved: Moved) {
    counter!(MOVED_VALUES, "shard" => shard.0.to_string()).increment(moved.values as u64);
    counter!(MOVED_BYTES, "shard" => shard.0.to_string()).increment(moved.bytes);
}

/// A leadership was handed over.
pub(crate) fn leader_moved(reason: Reason) {
    counter!(LEADER_MOVES, "reason" => reason.name()).increment(1);
}

/// Sets the number of groups that this node leads.
#[expect(clippy::cast_precision_loss, reason = "gauges are floating point; a cluster has few groups")]
pub(crate) fn groups_led(count: usize) {
    gauge!(GROUPS_LED).set(count as f64);
    for reason in Reason::ALL {
        // Shown before the first one.
        counter!(LEADER_MOVES, "reason" => reason.name()).increment(0);
    }
}

/// Where a shard stands, as its leader sees it.
#[derive(Default)]
struct Standing {
    space: Space,
    grants: usize,
    pins: usize,
    keys: usize,
    horizon: Duration,
}

/// Sets the gauges of a shard. Walks over all slots, if this node leads it: not to be called all the time.
#[expect(clippy::cast_precision_loss, reason = "gauges are floating point; bytes and counts stay far below 2^53")]
pub(crate) fn stand(shard: &HostedShard) {
    let running = shard.hosted.running();
    let standing = running.map_or_else(
        |_| Standing::default(),
        |running| {
            let state: Shard = shard.hosted.frozen();
            Standing {
                space: state.space().total,
                grants: state.live_grants(),
                pins: state.pins(),
                keys: state.values(),
                horizon: state.horizon().since(running),
            }
        },
    );
    let id = shard.id.0.to_string();
    let space = &standing.space;
    for (state, bytes) in [
        ("free", space.free_bytes),
        ("granted", space.granted_bytes),
        ("committed", space.committed_bytes),
        ("pinned", space.pinned_bytes),
        ("quarantined", space.resting_bytes),
    ] {
        gauge!(SPACE_BYTES, "shard" => id.clone(), "state" => state).set(bytes as f64);
    }
    for (state, slots) in
        [("granted", space.granted_slots), ("committed", space.committed_slots), ("pinned", space.pinned_slots)]
    {
        gauge!(SLOTS, "shard" => id.clone(), "state" => state).set(slots as f64);
    }
    for counted in [EVICTED_SLABS, EVICTED_VALUES, EVICTED_BYTES, MOVED_VALUES, MOVED_BYTES, DAMAGED, GIVEN_BACK] {
        // Shown before the first one.
        counter!(counted, "shard" => id.clone()).increment(0);
    }
    for shared in ["zone", "host"] {
        counter!(GRANTS_NEAR, "shard" => id.clone(), "shared" => shared).increment(0);
    }
    gauge!(GRANTS_LIVE, "shard" => id.clone()).set(standing.grants as f64);
    gauge!(PINS, "shard" => id.clone()).set(standing.pins as f64);
    gauge!(KEYS, "shard" => id.clone()).set(standing.keys as f64);
    gauge!(HORIZON, "shard" => id).set(standing.horizon.as_secs_f64());
}

/// Sets the numbers of data nodes.
#[expect(clippy::cast_precision_loss, reason = "gauges are floating point; a cluster has few nodes")]
pub(crate) fn data_nodes(alive: usize, dead: usize) {
    gauge!(DATA_NODES, "state" => "alive").set(alive as f64);
    gauge!(DATA_NODES, "state" => "dead").set(dead as f64);
}
