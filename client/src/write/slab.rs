//! A slab in use: a grant that is armed on its holders, filled slot by slot, and sealed in the end.
//!
//! Decides when it is over: full, its line idle, too few holders left, its time nearly up, or the client closing. Its keeper then waits for
//! what is under way, tells the holders that the claim is done and the shard where the fill mark is. A slot is handed out once
//! (*Fresh space*: a slot that was posted to is never used for another frame of the same grant).

use crate::{
    core::Core,
    endpoints::Target,
    write::{commit::Queue, line::Line, open::Granted, slots::Fill},
};
use futures::future::join_all;
use parking_lot::Mutex;
use quarry_fabric::FabricAddress;
use quarry_proto::v1;
use quarry_wire::{grant::Grant, ids::NodeId};
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Arc,
    time::Duration,
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until, timeout_at},
};

/// Longest time for telling everyone that a slab is done.
const SEALING: Duration = Duration::from_secs(3);

/// One holder on which the grant is armed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Armed {
    pub(crate) node: NodeId,
    pub(crate) lane: FabricAddress,
    pub(crate) provider: String,
    pub(crate) key: u64,
    /// Remote address of slot 0.
    pub(crate) base: u64,
}

#[derive(Debug)]
pub(crate) struct Slab {
    pub(crate) granted: Granted,
    armed: Vec<Arc<Armed>>,
    /// No write begins after this: the claims may close.
    write_until: Instant,
    state: Mutex<State>,
    /// Told when it was retired and when a reservation ended.
    changed: Notify,
    pub(crate) queue: Queue,
}

#[derive(Debug)]
struct State {
    fill: Fill,
    /// Reservations that have not ended.
    outstanding: u32,
    retired: bool,
    /// Holders on which a write failed.
    failed: BTreeSet<NodeId>,
    /// Those of them that closed our lane.
    lost: BTreeSet<NodeId>,
    /// When a holder last completed a write, or was last asked whether the grant is still armed there.
    heard: BTreeMap<NodeId, Instant>,
}

/// Some slots of a slab. While it lives the slab is not sealed.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) slab: Arc<Slab>,
    pub(crate) slots: Range<u32>,
}

impl Reservation {
    pub(crate) fn count(&self) -> u32 {
        self.slots.end - self.slots.start
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.slab.state.lock().outstanding -= 1;
        self.slab.changed.notify_waiters();
    }
}

impl Slab {
    pub(crate) fn new(granted: Granted, armed: Vec<Armed>, write_until: Instant) -> Arc<Self> {
        let state = State {
            fill: Fill::new(granted.statement.slots.0),
            outstanding: 0,
            retired: false,
            failed: BTreeSet::new(),
            lost: BTreeSet::new(),
            heard: BTreeMap::new(),
        };
        Arc::new(Self {
            granted,
            armed: armed.into_iter().map(Arc::new).collect(),
            write_until,
            state: Mutex::new(state),
            changed: Notify::new(),
            queue: Queue::default(),
        })
    }

    pub(crate) fn grant(&self) -> &Grant {
        &self.granted.statement
    }

    /// Copies without which nothing is committed.
    pub(crate) fn needed(&self) -> usize {
        usize::from(self.grant().least).max(1)
    }

    /// Holders that can still be written to.
    pub(crate) fn holders(&self) -> Vec<Arc<Armed>> {
        let state = self.state.lock();
        self.armed.iter().filter(|holder| !state.failed.contains(&holder.node)).cloned().collect()
    }

    /// Whether slots can still be handed out.
    pub(crate) fn is_open(&self) -> bool {
        let state = self.state.lock();
        !state.retired && !state.fill.is_full() && Instant::now() < self.write_until
    }

    /// Whether a write may begin now.
    pub(crate) fn may_write(&self) -> bool {
        Instant::now() < self.write_until
    }

    /// Slots that can still be handed out.
    pub(crate) fn free_slots(&self) -> u32 {
        let state = self.state.lock();
        if state.retired || Instant::now() >= self.write_until { 0 } else { state.fill.left() }
    }

    /// The next slots, at most `wanted`; none if the slab is over.
    pub(crate) fn reserve(self: &Arc<Self>, wanted: u32) -> Option<Reservation> {
        let mut state = self.state.lock();
        if state.retired || Instant::now() >= self.write_until {
            return None;
        }
        let slots = state.fill.take(wanted)?;
        state.outstanding += 1;
        drop(state);
        Some(Reservation { slab: Arc::clone(self), slots })
    }

    /// Hands out no more slots; the keeper seals it when what is under way has ended.
    pub(crate) fn retire(&self) {
        self.state.lock().retired = true;
        self.changed.notify_waiters();
    }

    /// A write to this holder failed: its connection or its claim is gone. Too few left end the slab.
    pub(crate) fn holder_failed(&self, node: NodeId) {
        let mut state = self.state.lock();
        state.failed.insert(node);
        let left = self.armed.len() - state.failed.len();
        drop(state);
        if left < self.needed() {
            self.retire();
        }
    }

    /// If the slab is armed through this lane, that is over: no slot of it is handed out any more, and writes under way there end.
    pub(crate) fn lane_lost(&self, node: NodeId, lane: &FabricAddress) {
        if !self.armed.iter().any(|holder| holder.node == node && holder.lane == *lane) {
            return;
        }
        let mut state = self.state.lock();
        state.failed.insert(node);
        state.lost.insert(node);
        drop(state);
        self.retire();
    }

    /// Waits until this holder's lane is known to be lost.
    pub(crate) async fn lost(&self, node: NodeId) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.state.lock().lost.contains(&node) {
                return;
            }
            changed.await;
        }
    }

    /// This holder completed a write, or is being asked now.
    pub(crate) fn heard_of(&self, node: NodeId) {
        self.state.lock().heard.insert(node, Instant::now());
    }
    pub(crate) fn last_heard_of(&self, node: NodeId) -> Option<Instant> {
        self.state.lock().heard.get(&node).copied()
    }

    /// Where `slot` lies at `holder`.
    pub(crate) fn target<'a>(&self, holder: &'a Armed, slot: u32) -> Target<'a> {
        Target {
            node: holder.node,
            address: &holder.lane,
            provider: &holder.provider,
            at: holder.base + u64::from(slot) * u64::from(self.grant().slot_size.0),
            key: holder.key,
        }
    }

    /// Watches over the slab to its end. One task per slab.
    pub(crate) async fn keep(self: Arc<Self>, core: Arc<Core>, line: Arc<Line>) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let now = Instant::now();
            let idle_at = line.last_used() + core.options.idle;
            let over = {
                let state = self.state.lock();
                state.retired || state.fill.is_full() || now >= self.write_until
            };
            let idle = now >= idle_at && self.state.lock().outstanding == 0;
            if over || idle || core.closing.is_cancelled() {
                break;
            }
            tokio::select! {
                () = &mut changed => {}
                () = core.closing.cancelled() => {}
                () = sleep_until(idle_at.max(now + Duration::from_millis(10)).min(self.write_until)) => {}
            }
        }
        self.retire();
        line.forget(&self);
        // What was reserved ends by the deadlines of its callers. If one outlives the grant, sealing cannot harm it any more.
        let _ = timeout_at(self.write_until + core.options.timeout, self.settled()).await;
        self.seal(&core).await;
    }

    async fn settled(&self) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.state.lock().outstanding == 0 {
                return;
            }
            changed.await;
        }
    }

    async fn seal(&self, core: &Core) {
        let fill = self.state.lock().fill.mark();
        give_up(core, self.grant(), self.armed.iter().map(|holder| holder.node), fill).await;
        for holder in &self.armed {
            core.endpoints.leave_lane(holder.node, &holder.lane);
        }
    }
}

/// Tells holders and shard that a grant is done with. A slab that is full needs no seal: its grant closes with the commit of its last slot. Best
/// effort: what is not reached learns it from the grant's time limit.
pub(crate) async fn give_up(core: &Core, grant: &Grant, armed: impl Iterator<Item = NodeId>, fill: u32) {
    let deadline = Instant::now() + SEALING.min(core.options.timeout);
    let id = v1::GrantId::from(grant.id);
    let writer = core.writer_bytes.clone();
    let closes = armed.map(|node| {
        let request = v1::CloseRequest { grant: Some(id), writer: writer.clone() };
        async move {
            let closed = core.control.try_node(node, "Close", request, deadline, |mut node, request| async move {
                node.close(request).await
            });
            if let Err(fault) = closed.await {
                tracing::debug!(%node, %fault, "a claim was not closed, its time limit will");
            }
        }
    });
    let seal = async {
        if fill == grant.slots.0 {
            return;
        }
        let request = v1::SealRequest { grant: Some(id), fill, writer: writer.clone() };
        let shard = grant.id.shard.0;
        let sealed = core
            .control
            .ask(shard, "Seal", &request, deadline, |mut meta, request| async move { meta.seal(request).await })
            .await;
        match sealed {
            Ok(reply) => core.control.heard(shard, reply.applied_ms, None),
            Err(error) => tracing::debug!(%error, "a slab was not sealed, its time limit will"),
        }
    };
    tokio::join!(join_all(closes), seal);
}
