//! A line: the slabs through which one kind of frame (namespace, shard, slot size) is written, one after the other.
//!
//! Decides which slab the next frames go to and when the next one is fetched. At most one slab is being opened at a time, in a task of its
//! own: all who need one wait for it, and it goes on if they go away.

use crate::{
    calls::Scope,
    core::Core,
    error::PutError,
    write::{
        open,
        slab::{Reservation, Slab},
        slots::{Ahead, slot_size_for, slots_to_ask},
    },
};
use futures::{FutureExt as _, future::Shared};
use parking_lot::Mutex;
use quarry_fabric::FabricAddress;
use quarry_wire::{
    ids::{NamespaceId, NodeId, ShardId},
    key::Key,
};
use std::{collections::VecDeque, sync::Arc};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};

/// What the frames of a line have in common.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct LineId {
    pub(crate) namespace: NamespaceId,
    pub(crate) shard: ShardId,
    pub(crate) slot_size: u32,
}

impl LineId {
    /// The line of such a frame.
    pub(crate) fn of(namespace: NamespaceId, key: &Key, payload_bytes: u64, shards: u32) -> Result<Self, PutError> {
        let slot_size = slot_size_for(key.as_bytes().len(), payload_bytes)
            .map_err(|limit| PutError::TooLarge { limit, found: payload_bytes })?;
        Ok(Self { namespace, shard: key.shard(namespace, shards), slot_size })
    }
}

#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) id: LineId,
    state: Mutex<State>,
}

/// How the slab that is being opened came out; told to all who wait for it.
type Opening = Shared<oneshot::Receiver<Result<(), PutError>>>;

#[derive(Debug)]
struct State {
    /// The slab in use, then those fetched ahead.
    slabs: VecDeque<Arc<Slab>>,
    /// Slots of the last slab.
    last_slots: Option<u32>,
    /// Reservations so far.
    reservations: u64,
    /// Slots that callers know they will need.
    demand: u32,
    /// The slab that is being opened.
    opening: Option<Opening>,
    /// What was lacking since the last slab was opened.
    lacking: Option<PutError>,
    used: Instant,
}

/// Slots that a caller knows it will need; taken back when it is dropped.
#[derive(Debug)]
pub(crate) struct Demand {
    line: Arc<Line>,
    slots: u32,
}

impl Demand {
    pub(crate) fn new(line: &Arc<Line>, slots: usize) -> Self {
        let slots = u32::try_from(slots).unwrap_or(u32::MAX);
        let mut state = line.state.lock();
        state.demand = state.demand.saturating_add(slots);
        drop(state);
        Self { line: Arc::clone(line), slots }
    }
}

impl Drop for Demand {
    fn drop(&mut self) {
        let mut state = self.line.state.lock();
        state.demand = state.demand.saturating_sub(self.slots);
    }
}

impl Line {
    pub(crate) fn new(id: LineId) -> Self {
        let state = State {
            slabs: VecDeque::new(),
            last_slots: None,
            reservations: 0,
            demand: 0,
            opening: None,
            lacking: None,
            used: Instant::now(),
        };
        Self { id, state: Mutex::new(state) }
    }

    pub(crate) fn last_used(&self) -> Instant {
        self.state.lock().used
    }
    pub(crate) fn has_slabs(&self) -> bool {
        !self.state.lock().slabs.is_empty()
    }

    /// A lane was closed at its node: all slabs that are armed through it are over.
    pub(crate) fn lane_lost(&self, node: NodeId, lane: &FabricAddress) {
        let slabs: Vec<_> = self.state.lock().slabs.iter().cloned().collect();
        for slab in slabs {
            slab.lane_lost(node, lane);
        }
    }

    /// Takes a slab out that is over.
    pub(crate) fn forget(&self, slab: &Arc<Slab>) {
        self.state.lock().slabs.retain(|held| !Arc::ptr_eq(held, slab));
    }

    /// Contiguous slots for as much of the demand as fits, of the slab in use or of a new one; the demand is less by them.
    pub(crate) async fn reserve(
        self: &Arc<Self>,
        core: &Arc<Core>,
        demand: &mut Demand,
        deadline: Instant,
    ) -> Result<Reservation, PutError> {
        // Who comes to the end of its time first is told what was lacking, and not that time was.
        let late = || {
            let lacking = self.state.lock().lacking.clone();
            lacking.unwrap_or_else(|| {
                let leader = core.control.of_leader(self.id.shard.0);
                PutError::Deadline { last: format!("waiting for a slab: {leader}") }
            })
        };
        loop {
            if let Some(reservation) = self.reserve_now(core, demand) {
                return Ok(reservation);
            }
            let (opening, begun_for_us) = self.opening(core);
            match timeout_at(deadline, opening).await {
                Ok(Ok(Ok(()))) => {}
                Ok(Ok(Err(error))) if begun_for_us || is_final(&error) => return Err(error),
                // It was begun for others, whose time was over earlier; or its task ended with the runtime.
                Ok(Ok(Err(_))) => {}
                Ok(Err(_)) | Err(_) => return Err(late()),
            }
        }
    }

    /// Of the slab in use; the next one is sent for if what is left will not do.
    fn reserve_now(self: &Arc<Self>, core: &Arc<Core>, demand: &mut Demand) -> Option<Reservation> {
        let mut state = self.state.lock();
        state.used = Instant::now();
        let reservation = loop {
            let slab = state.slabs.front()?;
            if let Some(reservation) = slab.reserve(demand.slots) {
                break reservation;
            }
            // It is over; its keeper seals it.
            slab.retire();
            state.slabs.pop_front();
        };
        state.reservations += 1;
        let taken = reservation.count();
        demand.slots -= taken;
        state.demand = state.demand.saturating_sub(taken);
        let ahead = Ahead {
            free: state.slabs.iter().map(|slab| slab.free_slots()).fold(0, u32::saturating_add),
            needed: state.demand,
            taken,
            slab: reservation.slab.grant().slots.0,
            reservations: state.reservations,
        };
        let fetch = state.opening.is_none() && ahead.wants_slab();
        drop(state);
        if !reservation.slab.is_open() {
            // Wakes the keeper.
            reservation.slab.retire();
        }
        if fetch {
            drop(self.opening(core));
        }
        Some(reservation)
    }

    /// The opening that is under way, or a new one; true if it is new.
    fn opening(self: &Arc<Self>, core: &Arc<Core>) -> (Opening, bool) {
        let shards = core.control.view().read().shards();
        let mut state = self.state.lock();
        if let Some(opening) = &state.opening {
            return (opening.clone(), false);
        }
        let (size, most) = (self.id.slot_size, core.options.slab_bytes_max);
        let slots = slots_to_ask(state.last_slots, state.demand, size, most, shards);
        let (tell, told) = oneshot::channel();
        let opening = told.shared();
        state.opening = Some(opening.clone());
        drop(state);
        let (line, opener) = (Arc::clone(self), Arc::clone(core));
        core.tasks.spawn(Scope::current().run(async move {
            // As long as any caller that begins now may wait.
            let deadline = Instant::now() + opener.options.timeout;
            let lacks = |error: &PutError| line.state.lock().lacking = Some(error.clone());
            let outcome =
                open::open(&opener, line.id, slots, deadline, lacks).await.map(|slab| line.add(&opener, slab));
            if let Err(error) = &outcome {
                tracing::debug!(%error, "a slab could not be opened");
            }
            let mut state = line.state.lock();
            state.opening = None;
            // What was lacking is so for the next one, too, until one comes.
            if outcome.is_ok() {
                state.lacking = None;
            }
            drop(state);
            // A slab that was fetched ahead of need has nobody waiting.
            drop(tell.send(outcome));
        }));
        (opening, true)
    }

    fn add(self: &Arc<Self>, core: &Arc<Core>, slab: Arc<Slab>) {
        let mut state = self.state.lock();
        state.last_slots = Some(slab.grant().slots.0);
        state.used = Instant::now();
        state.slabs.push_back(Arc::clone(&slab));
        drop(state);
        core.tasks.spawn(slab.keep(Arc::clone(core), Arc::clone(self)));
    }
}

/// Whether a later attempt would end no better.
fn is_final(error: &PutError) -> bool {
    !matches!(error, PutError::Deadline { .. } | PutError::TooFewHolders { .. })
}
