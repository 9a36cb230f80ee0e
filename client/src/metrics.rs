//! What a client tells through the `metrics` facade: an application that installs a recorder before it connects gets these; without one they
//! cost next to nothing.

use crate::error::{GetError, PutError};
use ::metrics::{Counter, Histogram, Unit, counter, describe_counter, describe_histogram, histogram};
use quarry_wire::version::Version;
use std::time::Duration;

const PUT_DURATION: &str = "quarry_client_put_duration_seconds";
const GET_DURATION: &str = "quarry_client_get_duration_seconds";
const PUT_VALUES: &str = "quarry_client_put_values_total";
const GET_VALUES: &str = "quarry_client_get_values_total";
const PUT_BYTES: &str = "quarry_client_put_bytes_total";
const GET_BYTES: &str = "quarry_client_get_bytes_total";
const CALLS: &str = "quarry_client_calls_total";
pub(crate) const RETRIES: &str = "quarry_client_retries_total";
pub(crate) const WRITTEN_BYTES: &str = "quarry_client_fabric_written_bytes_total";
pub(crate) const WRITES: &str = "quarry_client_fabric_writes_total";
pub(crate) const READ_BYTES: &str = "quarry_client_fabric_read_bytes_total";
pub(crate) const READS: &str = "quarry_client_fabric_reads_total";
pub(crate) const FAILURES: &str = "quarry_client_fabric_failures_total";
pub(crate) const LOST_LANE_WRITES: &str = "quarry_client_lost_lane_writes_total";
pub(crate) const CACHE_HITS: &str = "quarry_client_cache_hits_total";
pub(crate) const DAMAGED: &str = "quarry_client_damaged_copies_total";
pub(crate) const DROPPED: &str = "quarry_client_dropped_copies_total";

/// Says what the metrics of this crate mean, to the recorder that is installed.
pub fn describe_metrics() {
    describe_histogram!(PUT_DURATION, Unit::Seconds, "Time of a call that puts one or many values.");
    describe_histogram!(GET_DURATION, Unit::Seconds, "Time of a call that gets one or many values.");
    describe_counter!(PUT_VALUES, Unit::Count, "Values that were put, by result: ok, error.");
    describe_counter!(GET_VALUES, Unit::Count, "Keys that were got, by result: found, absent, error.");
    describe_counter!(PUT_BYTES, Unit::Bytes, "Bytes of the values that were put, copies not counted.");
    describe_counter!(GET_BYTES, Unit::Bytes, "Bytes of the values that were got.");
    describe_counter!(CALLS, Unit::Count, "Calls sent to meta and data nodes, by method; every attempt counts.");
    describe_counter!(RETRIES, Unit::Count, "Attempts beyond the first, of calls and of puts.");
    describe_counter!(WRITTEN_BYTES, Unit::Bytes, "Bytes of completed one-sided writes, all copies.");
    describe_counter!(WRITES, Unit::Count, "Completed one-sided writes.");
    describe_counter!(READ_BYTES, Unit::Bytes, "Bytes of completed one-sided reads.");
    describe_counter!(READS, Unit::Count, "Completed one-sided reads.");
    describe_counter!(FAILURES, Unit::Count, "One-sided operations that failed.");
    describe_counter!(LOST_LANE_WRITES, Unit::Count, "Writes that failed because their data node had closed the lane.");
    describe_counter!(CACHE_HITS, Unit::Count, "Keys that were got through a descriptor that was still leased.");
    describe_counter!(DAMAGED, Unit::Count, "Copies that were read and did not pass the checks.");
    describe_counter!(DROPPED, Unit::Count, "Those of them that their holder gave up when it was told.");
}

/// A call was sent.
pub(crate) fn called(method: &'static str) {
    counter!(CALLS, "method" => method).increment(1);
}

/// What the public calls of one client count.
#[derive(Debug)]
pub(crate) struct Meters {
    put_duration: Histogram,
    get_duration: Histogram,
    put_good: Counter,
    put_failed: Counter,
    get_found: Counter,
    get_absent: Counter,
    get_failed: Counter,
    put_bytes: Counter,
    get_bytes: Counter,
}

impl Default for Meters {
    fn default() -> Self {
        Self {
            put_duration: histogram!(PUT_DURATION),
            get_duration: histogram!(GET_DURATION),
            put_good: counter!(PUT_VALUES, "result" => "ok"),
            put_failed: counter!(PUT_VALUES, "result" => "error"),
            get_found: counter!(GET_VALUES, "result" => "found"),
            get_absent: counter!(GET_VALUES, "result" => "absent"),
            get_failed: counter!(GET_VALUES, "result" => "error"),
            put_bytes: counter!(PUT_BYTES),
            get_bytes: counter!(GET_BYTES),
        }
    }
}

impl Meters {
    /// A call that put values of these lengths ended.
    pub(crate) fn put(&self, took: Duration, lengths: &[usize], results: &[Result<Version, PutError>]) {
        self.put_duration.record(took);
        for (length, result) in lengths.iter().zip(results) {
            match result {
                Ok(_) => {
                    self.put_good.increment(1);
                    self.put_bytes.increment(*length as u64);
                }
                Err(error) => {
                    self.put_failed.increment(1);
                    tracing::debug!(%error, "a value was not put");
                }
            }
        }
    }

    /// A call that got values ended; of each that was found, its length.
    pub(crate) fn got<'r>(&self, took: Duration, results: impl Iterator<Item = Result<Option<usize>, &'r GetError>>) {
        self.get_duration.record(took);
        for result in results {
            match result {
                Ok(Some(bytes)) => {
                    self.get_found.increment(1);
                    self.get_bytes.increment(bytes as u64);
                }
                Ok(None) => self.get_absent.increment(1),
                Err(error) => {
                    self.get_failed.increment(1);
                    tracing::debug!(%error, "a value was not got");
                }
            }
        }
    }
}
