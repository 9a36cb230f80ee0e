//! What a client has done so far, counted as it happens.

use crate::metrics::{self, Meters};
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Counters of one client since it was made.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Calls sent to meta and data nodes, by method, attempts counted singly.
    pub control_calls: BTreeMap<&'static str, u64>,
    /// Attempts beyond the first, of calls and of puts.
    pub retries: u64,
    /// Bytes of completed one-sided writes, all copies.
    pub fabric_written_bytes: u64,
    /// Completed one-sided writes.
    pub fabric_writes: u64,
    /// Bytes of completed one-sided reads.
    pub fabric_read_bytes: u64,
    /// Completed one-sided reads.
    pub fabric_reads: u64,
    /// One-sided operations that failed.
    pub fabric_failures: u64,
    /// Those of them that were writes through a lane that its data node had closed; other slabs took their frames.
    pub lost_lane_writes: u64,
    /// Gets answered through a descriptor that was still leased.
    pub cache_hits: u64,
    /// Copies that were read and did not pass the checks.
    pub damaged_copies: u64,
    /// Those of them that their holder gave up after it was told.
    pub dropped_copies: u64,
    /// Where the time of puts went.
    pub put_time: PutTime,
}

/// Where the time of puts went, each part summed over all operations. What overlaps counts in each part; for one put at a time the parts add up
/// to its time, but for what lies between them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PutTime {
    /// Waiting for a slab.
    pub slab: Duration,
    /// Waiting for room in the window.
    pub window: Duration,
    /// Checksums of payloads; those that are not in registered memory are copied there in the same pass.
    pub crc: Duration,
    /// Building frames: headers, and what lies between neighbours.
    pub build: Duration,
    /// One-sided writes, from the first copy's post to the last copy's completion.
    pub fabric: Duration,
    /// Commits, from sending to the outcomes.
    pub commit: Duration,
}

impl Stats {
    /// All calls together.
    #[must_use]
    pub fn control_calls_total(&self) -> u64 {
        self.control_calls.values().sum()
    }
}

/// The counters while they run.
#[derive(Debug)]
pub(crate) struct Counters {
    calls: Mutex<BTreeMap<&'static str, u64>>,
    pub(crate) retries: Counter,
    pub(crate) written_bytes: Counter,
    pub(crate) writes: Counter,
    pub(crate) read_bytes: Counter,
    pub(crate) reads: Counter,
    pub(crate) failures: Counter,
    pub(crate) lost_lane_writes: Counter,
    pub(crate) cache_hits: Counter,
    pub(crate) damaged: Counter,
    pub(crate) dropped: Counter,
    pub(crate) awaiting_slab: Timer,
    pub(crate) awaiting_window: Timer,
    pub(crate) checksumming: Timer,
    pub(crate) building: Timer,
    pub(crate) writing: Timer,
    pub(crate) committing: Timer,
    pub(crate) meters: Meters,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            calls: Mutex::default(),
            retries: Counter::told_as(metrics::RETRIES),
            written_bytes: Counter::told_as(metrics::WRITTEN_BYTES),
            writes: Counter::told_as(metrics::WRITES),
            read_bytes: Counter::told_as(metrics::READ_BYTES),
            reads: Counter::told_as(metrics::READS),
            failures: Counter::told_as(metrics::FAILURES),
            lost_lane_writes: Counter::told_as(metrics::LOST_LANE_WRITES),
            cache_hits: Counter::told_as(metrics::CACHE_HITS),
            damaged: Counter::told_as(metrics::DAMAGED),
            dropped: Counter::told_as(metrics::DROPPED),
            awaiting_slab: Timer::default(),
            awaiting_window: Timer::default(),
            checksumming: Timer::default(),
            building: Timer::default(),
            writing: Timer::default(),
            committing: Timer::default(),
            meters: Meters::default(),
        }
    }
}

/// Time spent, in nanoseconds.
#[derive(Debug, Default)]
pub(crate) struct Timer(AtomicU64);

impl Timer {
    pub(crate) fn add(&self, spent: Duration) {
        self.0.fetch_add(u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
    fn read(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// One of them.
#[derive(Debug)]
pub(crate) struct Counter {
    count: AtomicU64,
    /// The same for the application's recorder, over all its clients.
    told: ::metrics::Counter,
}

impl Counter {
    fn told_as(metric: &'static str) -> Self {
        Self { count: AtomicU64::new(0), told: ::metrics::counter!(metric) }
    }
    pub(crate) fn add(&self, count: u64) {
        self.count.fetch_add(count, Ordering::Relaxed);
        self.told.increment(count);
    }
    fn read(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

impl Counters {
    pub(crate) fn called(&self, method: &'static str) {
        *self.calls.lock().entry(method).or_default() += 1;
        metrics::called(method);
    }

    pub(crate) fn read(&self) -> Stats {
        Stats {
            control_calls: self.calls.lock().clone(),
            retries: self.retries.read(),
            fabric_written_bytes: self.written_bytes.read(),
            fabric_writes: self.writes.read(),
            fabric_read_bytes: self.read_bytes.read(),
            fabric_reads: self.reads.read(),
            fabric_failures: self.failures.read(),
            lost_lane_writes: self.lost_lane_writes.read(),
            cache_hits: self.cache_hits.read(),
            damaged_copies: self.damaged.read(),
            dropped_copies: self.dropped.read(),
            put_time: PutTime {
                slab: self.awaiting_slab.read(),
                window: self.awaiting_window.read(),
                crc: self.checksumming.read(),
                build: self.building.read(),
                fabric: self.writing.read(),
                commit: self.committing.read(),
            },
        }
    }
}
