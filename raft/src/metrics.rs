//! What this crate tells of itself through the `metrics` facade: without a recorder it costs next to nothing.
//!
//! Counts and durations are recorded as they happen; where a group stands is set when somebody asks ([`Group::record_metrics`]).
//!
//! [`Group::record_metrics`]: crate::Group::record_metrics

use metrics::{
    Counter, Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

use crate::ids::{GroupId, LogIndex};
use crate::status::GroupStatus;

const IS_LEADER: &str = "quarry_raft_is_leader";
const TERM: &str = "quarry_raft_term";
const LAST_LOG: &str = "quarry_raft_last_log_index";
const COMMITTED: &str = "quarry_raft_commit_index";
const APPLIED: &str = "quarry_raft_applied_index";
const LEADER_CHANGES: &str = "quarry_raft_leader_changes_total";
const PROPOSALS: &str = "quarry_raft_proposals_total";
const PROPOSALS_FAILED: &str = "quarry_raft_proposals_failed_total";
const FSYNC: &str = "quarry_raft_fsync_duration_seconds";
const SNAPSHOT_BYTES: &str = "quarry_raft_snapshot_bytes";
const SNAPSHOT_DURATION: &str = "quarry_raft_snapshot_duration_seconds";

const SNAPSHOT_SENT: &str = "quarry_raft_snapshot_sent_bytes_total";
const SNAPSHOT_RECEIVED: &str = "quarry_raft_snapshot_received_bytes_total";
const SNAPSHOT_RESUMED: &str = "quarry_raft_snapshot_resumed_bytes_total";

/// Says what the metrics of this crate mean, to the recorder that is installed.
pub fn describe_metrics() {
    describe_gauge!(IS_LEADER, Unit::Count, "1 while this node leads the group and a majority answers it, else 0.");
    describe_gauge!(TERM, Unit::Count, "The group's term, as this node knows it.");
    describe_gauge!(LAST_LOG, Unit::Count, "Index of the last entry in this node's log of the group.");
    describe_gauge!(COMMITTED, Unit::Count, "Index of the last entry that this node knows to be committed.");
    describe_gauge!(APPLIED, Unit::Count, "Index of the last entry that this node has applied.");
    describe_counter!(LEADER_CHANGES, Unit::Count, "Leaders of the group that this node learned of, itself included.");
    describe_counter!(PROPOSALS, Unit::Count, "Entries that this node proposed to the group.");
    describe_counter!(
        PROPOSALS_FAILED,
        Unit::Count,
        "Entries that this node proposed and that it does not know to be applied."
    );
    describe_histogram!(
        FSYNC,
        Unit::Seconds,
        "Time to make what was written to the log durable, once for all that waited."
    );
    describe_gauge!(SNAPSHOT_BYTES, Unit::Bytes, "Size of the last snapshot that this node wrote of the group.");
    describe_counter!(SNAPSHOT_SENT, Unit::Bytes, "Bytes of snapshots of the group that this node sent to others.");
    describe_counter!(SNAPSHOT_RECEIVED, Unit::Bytes, "Bytes of snapshots of the group that this node received.");
    describe_counter!(
        SNAPSHOT_RESUMED,
        Unit::Bytes,
        "Bytes of snapshots that this node did not send again, since the other had them from an attempt that broke."
    );
    describe_histogram!(SNAPSHOT_DURATION, Unit::Seconds, "Time to write a snapshot of the group and make it durable.");
}

/// What one group counts.
pub(crate) struct GroupMeters {
    pub(crate) proposals: Counter,
    pub(crate) proposals_failed: Counter,
    pub(crate) leader_changes: Counter,
}

impl GroupMeters {
    pub(crate) fn new(group: GroupId) -> Self {
        let of = |name| counter!(name, "group" => group.to_string());
        for shown_before_the_first in [SNAPSHOT_SENT, SNAPSHOT_RECEIVED, SNAPSHOT_RESUMED] {
            of(shown_before_the_first).increment(0);
        }
        Self { proposals: of(PROPOSALS), proposals_failed: of(PROPOSALS_FAILED), leader_changes: of(LEADER_CHANGES) }
    }
}

/// Sets the gauges of a group.
#[expect(clippy::cast_precision_loss, reason = "gauges are floating point; indexes stay far below 2^53")]
pub(crate) fn stand(status: &GroupStatus, is_followed: bool) {
    let set = |name, value: f64| gauge!(name, "group" => status.group.to_string()).set(value);
    let index = |index: Option<LogIndex>| index.map_or(0, |index| index.0) as f64;
    set(IS_LEADER, if is_followed { 1.0 } else { 0.0 });
    set(TERM, status.term.0 as f64);
    set(LAST_LOG, index(status.last_log));
    set(COMMITTED, index(status.committed));
    set(APPLIED, index(status.applied));
}

/// The durations of syncs.
pub(crate) fn fsyncs() -> Histogram {
    histogram!(FSYNC)
}

/// A snapshot was written.
#[expect(clippy::cast_precision_loss, reason = "gauges are floating point; sizes stay far below 2^53")]
pub(crate) fn snapshot_written(group: GroupId, bytes: u64, took: std::time::Duration) {
    gauge!(SNAPSHOT_BYTES, "group" => group.to_string()).set(bytes as f64);
    histogram!(SNAPSHOT_DURATION, "group" => group.to_string()).record(took);
}

/// Bytes of a snapshot were sent.
pub(crate) fn snapshot_sent(group: GroupId, bytes: u64) {
    counter!(SNAPSHOT_SENT, "group" => group.to_string()).increment(bytes);
}

/// Bytes of a snapshot were received.
pub(crate) fn snapshot_received(group: GroupId, bytes: u64) {
    counter!(SNAPSHOT_RECEIVED, "group" => group.to_string()).increment(bytes);
}

/// A snapshot is sent from here on: what is before it is there.
pub(crate) fn snapshot_resumed(group: GroupId, bytes: u64) {
    counter!(SNAPSHOT_RESUMED, "group" => group.to_string()).increment(bytes);
}
