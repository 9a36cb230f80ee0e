//! What all clones of a client share, and how its background work ends.

use crate::{
    control::Control,
    endpoints::Endpoints,
    error::CallError,
    options::Options,
    read::{cache::Cache, damage::Reports, records::Renewals, sharing::Sharing},
    stats::Counters,
    write::line::{Line, LineId},
};
use bytes::Bytes;
use parking_lot::Mutex;
use quarry_fabric::{FabricAddress, Pool};
use quarry_wire::{
    ids::{NodeId, WriterId},
    limits::VERSION_AHEAD_MAX,
    units::millis,
    version::{HybridClock, Version},
};
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};
use tokio::time::Instant;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Lines that are kept although nothing was written through them lately.
const LINES_MAX: usize = 512;

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) options: Options,
    pub(crate) control: Control,
    pub(crate) endpoints: Endpoints,
    pub(crate) write_window: Arc<Pool>,
    pub(crate) read_window: Arc<Pool>,
    /// Where large values are read to that no reader has a buffer for. They stay there for as long as the reader keeps them, so nobody waits
    /// for room here.
    pub(crate) values: Arc<Pool>,
    pub(crate) writer: WriterId,
    /// The same, as requests name it.
    pub(crate) writer_bytes: Bytes,
    pub(crate) counters: Arc<Counters>,
    pub(crate) cache: Mutex<Cache>,
    /// Resolves that are shared by those who ask at the same time.
    pub(crate) sharing: Sharing,
    /// Region records that are being made anew, each once for all who were refused.
    pub(crate) renewals: Renewals,
    /// Damaged copies that are being reported.
    pub(crate) reports: Reports,
    /// For background work that begins where there is only a reference.
    pub(crate) me: Weak<Self>,
    /// All background work: openers, committers and keepers of slabs.
    pub(crate) tasks: TaskTracker,
    /// Tells the keepers to seal their slabs; no public call begins afterwards.
    pub(crate) closing: CancellationToken,
    hybrid: Mutex<HybridClock>,
    lines: Mutex<HashMap<LineId, Arc<Line>>>,
    /// Number that spreads this client's reads over holders differently than another's.
    pub(crate) salt: u64,
}

/// The parts that are made before.
pub(crate) struct Parts {
    pub(crate) options: Options,
    pub(crate) control: Control,
    pub(crate) endpoints: Endpoints,
    pub(crate) write_window: Arc<Pool>,
    pub(crate) read_window: Arc<Pool>,
    pub(crate) values: Arc<Pool>,
    pub(crate) counters: Arc<Counters>,
}

impl Core {
    pub(crate) fn new(parts: Parts) -> Arc<Self> {
        let Parts { options, control, endpoints, write_window, read_window, values, counters } = parts;
        let writer = control.trust().writer(options.entropy.bits().to_le_bytes());
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            reports: Reports::default(),
            salt: options.entropy.bits(),
            cache: Mutex::new(Cache::new(options.cache_entries)),
            sharing: Sharing::default(),
            renewals: Renewals::default(),
            options,
            control,
            endpoints,
            write_window,
            read_window,
            values,
            writer,
            writer_bytes: Bytes::copy_from_slice(&writer.0),
            counters,
            tasks: TaskTracker::new(),
            closing: CancellationToken::new(),
            hybrid: Mutex::default(),
            lines: Mutex::default(),
        })
    }

    /// The deadline of a public call that begins now.
    pub(crate) fn deadline(&self) -> Result<Instant, CallError> {
        if self.closing.is_cancelled() {
            return Err(CallError::Closed);
        }
        Ok(self.options.deadline())
    }

    /// A version later than all that this client made.
    pub(crate) fn new_version(&self) -> Version {
        let mut clock = self.hybrid.lock();
        *clock = clock.next(self.options.clock.wall_ms());
        Version { clock: *clock, writer: self.writer }
    }

    /// A version later than `current`.
    pub(crate) fn version_above(&self, current: Version) -> Version {
        let wall_ms = self.options.clock.wall_ms();
        // A clock that runs far ahead is followed for this key alone, or every later version of ours would be turned away too.
        if current.clock.wall_ms() > wall_ms.saturating_add(millis(VERSION_AHEAD_MAX) / 2) {
            return Version { clock: current.clock.next(wall_ms), writer: self.writer };
        }
        let mut clock = self.hybrid.lock();
        *clock = (*clock).max(current.clock).next(wall_ms);
        Version { clock: *clock, writer: self.writer }
    }

    /// The line of slabs for such frames.
    pub(crate) fn line(&self, id: LineId) -> Arc<Line> {
        let mut lines = self.lines.lock();
        if lines.len() >= LINES_MAX {
            lines.retain(|_, line| Arc::strong_count(line) > 1 || line.has_slabs());
        }
        Arc::clone(lines.entry(id).or_insert_with(|| Arc::new(Line::new(id))))
    }

    /// A lane of ours was closed at its node: everything that is armed through it is over, the node itself is not to blame.
    pub(crate) fn lane_lost(&self, node: NodeId, lane: &FabricAddress) {
        let lines: Vec<_> = self.lines.lock().values().cloned().collect();
        for line in lines {
            line.lane_lost(node, lane);
        }
        self.endpoints.forget_lane(node, lane);
    }

    /// Ends all background work: seals slabs, waits until `deadline`, closes the endpoints. Answers how many tasks were not done.
    pub(crate) async fn shut_down(&self, deadline: Instant) -> usize {
        self.closing.cancel();
        self.tasks.close();
        let done = tokio::time::timeout_at(deadline, self.tasks.wait()).await.is_ok();
        let unfinished = if done { 0 } else { self.tasks.len() };
        self.endpoints.close();
        self.lines.lock().clear();
        unfinished
    }
}
