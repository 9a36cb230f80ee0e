//! A line: the slabs through which one kind of frame (namespace, shard, slot size) is written, one after the other.
//!
//! Decides which slab the next frames go to and when the next one is fetched. At most one caller opens a slab at a time; the others wait
//! behind it, and the opening itself goes on if that caller goes away.

use crate::{
    core::Core,
    error::PutError,
    write::{
        open,
        slab::{Reservation, Slab},
        slots::slots_to_ask,
    },
};
use parking_lot::Mutex;
use quarry_wire::ids::{NamespaceId, ShardId};
use std::{collections::VecDeque, sync::Arc};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};

/// What the frames of a line have in common.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct LineId {
    pub(crate) namespace: NamespaceId,
    pub(crate) shard: ShardId,
    pub(crate) slot_size: u32,
}

#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) id: LineId,
    state: Mutex<State>,
    /// Held by the caller that opens the next slab.
    opening: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct State {
    /// The slab in use, then those fetched ahead.
    slabs: VecDeque<Arc<Slab>>,
    /// Slots of the last slab.
    last_slots: Option<u32>,
    /// Slots that callers know they will need.
    demand: u32,
    /// A slab is being fetched ahead of need.
    fetching: bool,
    used: Instant,
}

/// Slots that a caller knows it will need; taken back when it is dropped.
#[derive(Debug)]
pub(crate) struct Demand {
    line: Arc<Line>,
    slots: u32,
}

impl Demand {
    pub(crate) fn new(line: &Arc<Line>, slots: u32) -> Self {
        let mut state = line.state.lock();
        state.demand = state.demand.saturating_add(slots);
        drop(state);
        Self { line: Arc::clone(line), slots }
    }

    /// These were reserved.
    pub(crate) fn met(&mut self, slots: u32) {
        let met = slots.min(self.slots);
        self.slots -= met;
        let mut state = self.line.state.lock();
        state.demand = state.demand.saturating_sub(met);
    }
}

impl Drop for Demand {
    fn drop(&mut self) {
        self.met(self.slots);
    }
}

impl Line {
    pub(crate) fn new(id: LineId) -> Self {
        let state =
            State { slabs: VecDeque::new(), last_slots: None, demand: 0, fetching: false, used: Instant::now() };
        Self { id, state: Mutex::new(state), opening: tokio::sync::Mutex::new(()) }
    }

    pub(crate) fn last_used(&self) -> Instant {
        self.state.lock().used
    }
    pub(crate) fn has_slabs(&self) -> bool {
        !self.state.lock().slabs.is_empty()
    }

    /// Takes a slab out that is over.
    pub(crate) fn forget(&self, slab: &Arc<Slab>) {
        self.state.lock().slabs.retain(|held| !Arc::ptr_eq(held, slab));
    }

    /// Contiguous slots, at most `wanted`, of the slab in use or of a new one.
    pub(crate) async fn reserve(
        self: &Arc<Self>,
        core: &Arc<Core>,
        wanted: u32,
        deadline: Instant,
    ) -> Result<Reservation, PutError> {
        let late = || PutError::Deadline { last: "waiting for a slab".to_owned() };
        loop {
            if let Some(reservation) = self.reserve_now(core, wanted) {
                return Ok(reservation);
            }
            let _turn = timeout_at(deadline, self.opening.lock()).await.map_err(|_| late())?;
            if let Some(reservation) = self.reserve_now(core, wanted) {
                return Ok(reservation);
            }
            let (told, opened) = oneshot::channel();
            self.open_in_background(core, wanted, deadline, Some(told));
            timeout_at(deadline, opened).await.map_err(|_| late())?.unwrap_or_else(|_| Err(late()))?;
        }
    }

    fn reserve_now(self: &Arc<Self>, core: &Arc<Core>, wanted: u32) -> Option<Reservation> {
        let mut state = self.state.lock();
        state.used = Instant::now();
        let (reservation, fetch) = loop {
            let slab = state.slabs.front()?;
            if let Some(reservation) = slab.reserve(wanted) {
                let fetch = state.slabs.len() == 1 && !state.fetching && slab.wants_successor();
                if fetch {
                    state.fetching = true;
                }
                break (reservation, fetch);
            }
            // It is over; its keeper seals it.
            slab.retire();
            state.slabs.pop_front();
        };
        let full = !reservation.slab.is_open();
        drop(state);
        if full {
            // Wakes the keeper.
            reservation.slab.retire();
        }
        if fetch {
            self.open_in_background(core, 1, Instant::now() + core.options.timeout, None);
        }
        Some(reservation)
    }

    /// Opens a slab in a task of its own, so that it is there (or given back) even if nobody waits for it any more.
    fn open_in_background(
        self: &Arc<Self>,
        core: &Arc<Core>,
        wanted: u32,
        deadline: Instant,
        told: Option<oneshot::Sender<Result<(), PutError>>>,
    ) {
        let (line, core) = (Arc::clone(self), Arc::clone(core));
        let slots = {
            let state = self.state.lock();
            let needed = if told.is_some() { state.demand.max(wanted) } else { wanted };
            slots_to_ask(state.last_slots, needed, self.id.slot_size, core.options.slab_bytes_max)
        };
        let tasks = core.tasks.clone();
        tasks.spawn(async move {
            let opened = open::open(&core, self_id(&line), slots, deadline).await;
            let outcome = match opened {
                Ok(slab) => {
                    line.add(&core, slab);
                    Ok(())
                }
                Err(error) => Err(error),
            };
            match told {
                Some(told) => drop(told.send(outcome)),
                None => {
                    line.state.lock().fetching = false;
                    if let Err(error) = outcome {
                        tracing::debug!(%error, "the next slab could not be fetched ahead of need");
                    }
                }
            }
        });
    }

    fn add(self: &Arc<Self>, core: &Arc<Core>, slab: Arc<Slab>) {
        let mut state = self.state.lock();
        state.last_slots = Some(slab.grant.slots.0);
        state.used = Instant::now();
        state.slabs.push_back(Arc::clone(&slab));
        drop(state);
        core.tasks.spawn(slab.keep(Arc::clone(core), Arc::clone(self)));
    }
}

fn self_id(line: &Line) -> LineId {
    line.id
}
