//! What a data node counts and measures beside its calls.

use crate::{confirm::Verdict, node::Node, regions::Cause};
use ::metrics::{Counter, Unit, counter, describe_counter, describe_gauge, gauge};

const LANES: &str = "quarry_datanode_lanes_open";
const CLAIMS: &str = "quarry_datanode_claims_live";
const REGIONS: &str = "quarry_datanode_regions_live";
const REGISTERED: &str = "quarry_datanode_mr_registered_bytes";
const ROTATIONS: &str = "quarry_datanode_region_rotations_total";
const ENTRIES: &str = "quarry_datanode_confirm_entries_total";
const SIGNATURES: &str = "quarry_datanode_attestation_signatures_total";
const COMMITS: &str = "quarry_datanode_commit_batches_total";
const COMMIT_ENTRIES: &str = "quarry_datanode_commit_entries_total";
const REPORTS: &str = "quarry_datanode_damage_reports_total";
const MOVES: &str = "quarry_datanode_moves_total";
const MOVED_BYTES: &str = "quarry_datanode_moved_bytes_total";

/// Says what the metrics of this crate mean, to the recorder that is installed.
pub fn describe_metrics() {
    describe_gauge!(LANES, Unit::Count, "Lanes that are open: endpoints of writers.");
    describe_gauge!(CLAIMS, Unit::Count, "Claims that are open: grants that can be written now.");
    describe_gauge!(REGIONS, Unit::Count, "Regions that have a life: registered for readers.");
    describe_gauge!(
        REGISTERED,
        Unit::Bytes,
        "Memory registered with the fabric, by what peers may do with it: read, write. Memory that is both counts twice."
    );
    describe_counter!(
        ROTATIONS,
        Unit::Count,
        "Times that a region was given a new read key within its life, by cause: command, schedule."
    );
    describe_counter!(
        ENTRIES,
        Unit::Count,
        "Entries of commits that this node looked at as their holder, by verdict: confirmed, refused."
    );
    describe_counter!(SIGNATURES, Unit::Count, "Batches of attestations that this node signed.");
    describe_counter!(COMMITS, Unit::Count, "Commits that this node coordinated, by result: answered, refused.");
    describe_counter!(
        REPORTS,
        Unit::Count,
        "Copies of this node that readers complained of, by verdict: damaged (and given up), intact (or none of ours)."
    );
    describe_counter!(
        MOVES,
        Unit::Count,
        "Copies that this node was told to move within its memory, by verdict: moved, refused."
    );
    describe_counter!(MOVED_BYTES, Unit::Bytes, "Bytes of the copies that it moved, headers included.");
    describe_counter!(COMMIT_ENTRIES, Unit::Count, "Entries of the commits that this node coordinated.");
}

/// What a node counts.
pub(crate) struct Meters {
    confirmed: Counter,
    refused: Counter,
    signatures: Counter,
    answered: Counter,
    turned_down: Counter,
    entries: Counter,
    rotated_on_command: Counter,
    rotated_on_schedule: Counter,
    damaged: Counter,
    intact: Counter,
    moved: Counter,
    not_moved: Counter,
    moved_bytes: Counter,
}

impl Meters {
    pub(crate) fn new() -> Self {
        Self {
            confirmed: counter!(ENTRIES, "verdict" => "confirmed"),
            refused: counter!(ENTRIES, "verdict" => "refused"),
            signatures: counter!(SIGNATURES),
            answered: counter!(COMMITS, "result" => "answered"),
            turned_down: counter!(COMMITS, "result" => "refused"),
            entries: counter!(COMMIT_ENTRIES),
            rotated_on_command: counter!(ROTATIONS, "cause" => "command"),
            rotated_on_schedule: counter!(ROTATIONS, "cause" => "schedule"),
            damaged: counter!(REPORTS, "verdict" => "damaged"),
            intact: counter!(REPORTS, "verdict" => "intact"),
            moved: counter!(MOVES, "verdict" => "moved"),
            not_moved: counter!(MOVES, "verdict" => "refused"),
            moved_bytes: counter!(MOVED_BYTES),
        }
    }

    /// A copy that a reader complained of was looked at.
    pub(crate) fn reported(&self, damaged: bool) {
        if damaged { &self.damaged } else { &self.intact }.increment(1);
    }

    /// A batch was looked at.
    pub(crate) fn confirmed(&self, entries: usize, verdict: &Verdict) {
        self.refused.increment(verdict.refused.len() as u64);
        self.confirmed.increment((entries - verdict.refused.len()) as u64);
        if !verdict.attested.is_empty() {
            self.signatures.increment(1);
        }
    }

    /// So many copies were moved, with so many bytes, and so many not.
    pub(crate) fn moved(&self, moved: usize, bytes: u64, refused: usize) {
        self.moved.increment(moved as u64);
        self.moved_bytes.increment(bytes);
        self.not_moved.increment(refused as u64);
        if moved > 0 {
            self.signatures.increment(1);
        }
    }

    /// A region has a new key.
    pub(crate) fn rotated(&self, cause: Cause) {
        match cause {
            Cause::Command => self.rotated_on_command.increment(1),
            Cause::Schedule => self.rotated_on_schedule.increment(1),
        }
    }

    /// A commit came to its end.
    pub(crate) fn committed(&self, entries: usize, answered: bool) {
        if answered { &self.answered } else { &self.turned_down }.increment(1);
        self.entries.increment(entries as u64);
    }
}

/// Sets the gauges that tell where a node stands.
#[expect(clippy::cast_precision_loss, reason = "gauges are floating point; bytes and counts stay far below 2^53")]
pub(crate) fn stand(node: &Node) {
    let holdings = node.holdings.lock();
    let (lanes, claims, regions) = (holdings.open_lanes(), holdings.open_claims(), holdings.lives().len());
    let (readable, writable) = holdings.registered_bytes();
    drop(holdings);
    gauge!(LANES).set(lanes as f64);
    gauge!(CLAIMS).set(claims as f64);
    gauge!(REGIONS).set(regions as f64);
    gauge!(REGISTERED, "access" => "read").set(readable as f64);
    gauge!(REGISTERED, "access" => "write").set(writable as f64);
}
