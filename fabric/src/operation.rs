//! One operation in flight: what it owns, how it ends, and the future that waits for it.
//!
//! Invariant: while an operation is in [`Pending`], libfabric may touch its context and buffer, and `Pending` keeps both alive.
//! It leaves by its completion, by a refused post, or after its endpoint was closed, and is finished exactly once.

use crate::{
    LocalSpan, OperationError, Pieces,
    endpoint::PeerEntry,
    metrics::InFlight,
    raw::{Completion, Failure},
};
use libfabric_sys::fi_context2;
use parking_lot::Mutex;
use std::{
    cell::UnsafeCell,
    collections::HashMap,
    ffi::c_void,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
};
use tokio::{sync::OwnedSemaphorePermit, time::Instant};

/// Room in the queues, the endpoint's and the peer's, and the mark of being under way.
pub(crate) type Permits = (OwnedSemaphorePermit, OwnedSemaphorePermit, InFlight);

/// An operation; its address is its name at libfabric.
pub(crate) struct Op {
    /// libfabric's own while the operation is in flight.
    context: UnsafeCell<fi_context2>,
    pub(crate) peer: Arc<PeerEntry>,
    deadline: Instant,
    /// Whether the provider took it: before, it may leave `Pending` again as if it had never been there.
    posted: AtomicBool,
    state: Mutex<State>,
}

enum State {
    Waiting {
        waker: Option<Waker>,
        permits: Option<Permits>,
        /// The buffer, only to be kept. Let go before the outcome is told: then it is free for whoever waits.
        local: Option<Pieces<LocalSpan>>,
    },
    Done(Result<(), OperationError>),
    Taken,
}

// SAFETY: `context` is never touched by us, only by libfabric, which guards it itself; all else is `Send` and `Sync`.
unsafe impl Send for Op {}
// SAFETY: as above.
unsafe impl Sync for Op {}

impl Op {
    pub(crate) fn new(local: Pieces<LocalSpan>, peer: Arc<PeerEntry>, deadline: Instant) -> Arc<Self> {
        Arc::new(Self {
            context: UnsafeCell::new(fi_context2::default()),
            peer,
            deadline,
            posted: AtomicBool::new(false),
            state: Mutex::new(State::Waiting { waker: None, permits: None, local: Some(local) }),
        })
    }

    /// What to give libfabric as context.
    pub(crate) fn context(&self) -> *mut c_void {
        self.context.get().cast()
    }

    /// Keeps the room that it takes until it is finished.
    pub(crate) fn hold(&self, room: Permits) {
        if let State::Waiting { permits, .. } = &mut *self.state.lock() {
            *permits = Some(room);
        }
    }

    /// Notes that the provider took it.
    pub(crate) fn set_posted(&self) {
        self.posted.store(true, Ordering::Release);
    }

    /// Gives back the room of a refused post.
    pub(crate) fn release(&self) {
        let room = match &mut *self.state.lock() {
            State::Waiting { permits, .. } => permits.take(),
            State::Done(_) | State::Taken => None,
        };
        drop(room);
    }

    /// Ends it: first room and buffer are free, then the outcome is there, then the waker is called, the latter two outside of
    /// the lock. Called once, by whoever took it out of [`Pending`].
    fn finish(&self, outcome: Result<(), OperationError>) {
        let held = match &mut *self.state.lock() {
            State::Waiting { permits, local, .. } => (permits.take(), local.take()),
            State::Done(_) | State::Taken => return,
        };
        drop(held);
        let before = std::mem::replace(&mut *self.state.lock(), State::Done(outcome));
        if let State::Waiting { waker: Some(waker), .. } = before {
            waker.wake();
        }
    }

    /// The outcome, if there is one and nobody took it.
    pub(crate) fn take(&self) -> Option<Result<(), OperationError>> {
        let mut state = self.state.lock();
        if !matches!(*state, State::Done(_)) {
            return None;
        }
        match std::mem::replace(&mut *state, State::Taken) {
            State::Done(outcome) => Some(outcome),
            State::Waiting { .. } | State::Taken => None,
        }
    }
}

/// Waits for an operation's outcome. Dropping it changes nothing for the operation.
pub(crate) struct Outcome<'a>(pub(crate) &'a Op);

impl Future for Outcome<'_> {
    type Output = Result<(), OperationError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.0.state.lock();
        if let State::Waiting { waker, .. } = &mut *state {
            match waker {
                Some(waker) => waker.clone_from(context.waker()),
                None => *waker = Some(context.waker().clone()),
            }
            return Poll::Pending;
        }
        match std::mem::replace(&mut *state, State::Taken) {
            State::Done(outcome) => Poll::Ready(outcome),
            State::Waiting { .. } | State::Taken => unreachable!("an outcome is awaited once"),
        }
    }
}

/// All operations that libfabric may still touch, by context.
#[derive(Default)]
pub(crate) struct Pending {
    operations: Mutex<HashMap<usize, Arc<Op>>>,
}

impl Pending {
    pub(crate) fn insert(&self, op: &Arc<Op>) {
        self.operations.lock().insert(op.context().addr(), Arc::clone(op));
    }

    /// For a post that was refused: libfabric forgot the context.
    pub(crate) fn forget(&self, op: &Arc<Op>) {
        self.operations.lock().remove(&op.context().addr());
    }

    pub(crate) fn len(&self) -> usize {
        self.operations.lock().len()
    }

    /// Whether one should have ended by now, and nobody saw to it (its future was dropped, or its runtime is stuck).
    pub(crate) fn overdue(&self, now: Instant) -> bool {
        self.operations.lock().values().any(|op| op.deadline < now && op.posted.load(Ordering::Acquire))
    }

    /// Finishes what completed, and counts it. Completions that name none of ours (the provider's own) are passed over.
    pub(crate) fn complete(&self, completions: impl Iterator<Item = Completion>) -> usize {
        let mut finished = 0;
        for Completion { context, outcome } in completions {
            let op = self.operations.lock().remove(&context);
            if let Some(op) = op {
                op.finish(outcome.map_err(Failure::into_error));
                finished += 1;
            }
        }
        finished
    }

    /// After the endpoint was closed: what completed well in the end did; the rest is closed under its feet.
    pub(crate) fn abandon(&self, late: Vec<Completion>, now: Instant) {
        let mut operations = std::mem::take(&mut *self.operations.lock());
        for completion in late.into_iter().filter(|completion| completion.outcome.is_ok()) {
            if let Some(op) = operations.remove(&completion.context) {
                op.finish(Ok(()));
            }
        }
        for op in operations.into_values() {
            let error = if op.deadline <= now { OperationError::Deadline } else { OperationError::Closed };
            op.finish(Err(error));
        }
    }
}
