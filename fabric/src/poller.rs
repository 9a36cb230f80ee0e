//! The thread that makes progress: one per process serves every endpoint, ours and those that peers use.
//!
//! Decides when an endpoint is looked at: when its descriptor says so, and all of them every [`SWEEP`], so that a wake-up that
//! a provider forgot costs that long at most. Leaves to `endpoint.rs` what is done then, and whether its descriptor is watched at
//! all times ([`Watch::Always`]) or only while somebody sleeps ([`Watch::OnRequest`]): a thread that spins must not share
//! its completion with a second one that the same completion woke up. An endpoint leaves the poller before it is closed; the
//! thread may still hold it for a moment, and finds it closed.

use crate::{FabricError, endpoint::Core};
use parking_lot::Mutex;
use rustix::{
    event::{Timespec, epoll},
    fd::{BorrowedFd, OwnedFd},
};
use std::{
    collections::HashMap,
    mem::MaybeUninit,
    os::fd::RawFd,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::time::Instant;

/// How often every endpoint is looked at, whatever its descriptor says.
const SWEEP: Duration = Duration::from_millis(100);
/// How often one is looked at that is watched on request.
const SWEEP_WATCHED: Duration = Duration::from_millis(1);
/// Endpoints that one wait reports at most.
const EVENTS: usize = 64;

/// When an endpoint's descriptor is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Watch {
    /// From `add` to `remove`.
    Always,
    /// From [`Poller::arm`] to [`Poller::disarm`], and for what is new: `net` of libfabric 1.17 leaves the descriptor readable for
    /// good after an operation of our own completed, and waiting for that would never sleep. What is not new may be something
    /// that another thread was about to see to and did not, so the endpoint is also looked at every [`SWEEP_WATCHED`].
    OnRequest,
}

/// Why an endpoint has its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// Its descriptor says so, or it was not done in its last turn.
    Ready,
    /// Time has passed.
    Clock,
}

pub(crate) struct Poller {
    epoll: OwnedFd,
    endpoints: Mutex<HashMap<u64, Arc<Core>>>,
    next: AtomicU64,
    /// Those that are watched on request, now.
    watched: Mutex<HashMap<u64, Arc<Core>>>,
}

impl Poller {
    /// This process's poller, started at the first call.
    pub(crate) fn shared() -> Result<&'static Self, FabricError> {
        static SHARED: OnceLock<Result<Poller, FabricError>> = OnceLock::new();
        static STARTED: OnceLock<Result<(), FabricError>> = OnceLock::new();
        let poller = SHARED.get_or_init(|| {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| system("epoll_create1", &error))?;
            Ok(Self { epoll, endpoints: Mutex::default(), next: AtomicU64::new(0), watched: Mutex::default() })
        });
        let poller = poller.as_ref().map_err(Clone::clone)?;
        STARTED
            .get_or_init(|| {
                let thread = std::thread::Builder::new().name("fabric-poller".to_owned());
                thread.spawn(|| poller.run()).map(drop).map_err(|error| system("starting the poller thread", &error))
            })
            .clone()?;
        Ok(poller)
    }

    /// A number for an endpoint; never given again, so a late event cannot hit the wrong one.
    pub(crate) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Begins to serve an endpoint.
    pub(crate) fn add(
        &self,
        core: &Arc<Core>,
        number: u64,
        descriptor: RawFd,
        watch: Watch,
    ) -> Result<(), FabricError> {
        let flags = match watch {
            Watch::Always => epoll::EventFlags::IN,
            Watch::OnRequest => epoll::EventFlags::ET,
        };
        self.endpoints.lock().insert(number, Arc::clone(core));
        // SAFETY: the queue that owns the descriptor is open: the caller holds its endpoint open.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        epoll::add(&self.epoll, descriptor, epoll::EventData::new_u64(number), flags).map_err(|error| {
            self.endpoints.lock().remove(&number);
            system("epoll_ctl(ADD)", &error)
        })
    }

    /// Watches the descriptor of an endpoint that was added [on request](Watch::OnRequest), which may be readable already.
    pub(crate) fn arm(&self, core: &Arc<Core>, number: u64, descriptor: RawFd) {
        self.watched.lock().insert(number, Arc::clone(core));
        self.change(number, descriptor, epoll::EventFlags::IN | epoll::EventFlags::ET);
    }

    /// Undoes [`arm`](Self::arm).
    pub(crate) fn disarm(&self, number: u64, descriptor: RawFd) {
        self.watched.lock().remove(&number);
        self.change(number, descriptor, epoll::EventFlags::ET);
    }

    fn change(&self, number: u64, descriptor: RawFd, flags: epoll::EventFlags) {
        // SAFETY: the queue that owns the descriptor is open: the caller holds its endpoint open.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        if let Err(error) = epoll::modify(&self.epoll, descriptor, epoll::EventData::new_u64(number), flags) {
            tracing::error!(%error, "what is watched cannot be changed, an endpoint is looked at now and then only");
        }
    }

    /// Stops serving an endpoint, before it is closed.
    pub(crate) fn remove(&self, number: u64, descriptor: RawFd) {
        // SAFETY: the queue that owns the descriptor is open: the caller is about to close it.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        if let Err(error) = epoll::delete(&self.epoll, descriptor) {
            tracing::error!(%error, "an endpoint's descriptor was not in the poller");
        }
        self.endpoints.lock().remove(&number);
        self.watched.lock().remove(&number);
    }

    fn run(&self) {
        let mut events = [MaybeUninit::uninit(); EVENTS];
        // Endpoints that had more to do than one turn allows.
        let mut restless: Vec<Arc<Core>> = Vec::new();
        let mut turn: Vec<(Why, Arc<Core>)> = Vec::new();
        let mut next_sweep = Instant::now() + SWEEP;
        let mut next_look = Instant::now();
        loop {
            let mut wait =
                if restless.is_empty() { next_sweep.saturating_duration_since(Instant::now()) } else { Duration::ZERO };
            if !self.watched.lock().is_empty() {
                wait = wait.min(SWEEP_WATCHED);
            }
            let timeout = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
            let ready = match epoll::wait(&self.epoll, &mut events, Some(&timeout)) {
                Ok((ready, _)) => &*ready,
                Err(rustix::io::Errno::INTR) => &[],
                Err(error) => {
                    // Cannot happen with a valid epoll descriptor. Without progress every peer hangs; dying tells them.
                    tracing::error!(%error, "epoll_wait failed, giving up");
                    std::process::abort();
                }
            };
            turn.extend(restless.drain(..).map(|core| (Why::Ready, core)));
            {
                let endpoints = self.endpoints.lock();
                let ready = ready.iter().filter_map(|event| endpoints.get(&event.data.u64()).cloned());
                turn.extend(ready.map(|core| (Why::Ready, core)));
            }
            let now = Instant::now();
            // Also while others are ready all the time.
            if now >= next_look {
                next_look = now + SWEEP_WATCHED;
                let why = if turn.is_empty() { Why::Clock } else { Why::Ready };
                turn.extend(self.watched.lock().values().cloned().map(|core| (why, core)));
            }
            if now >= next_sweep {
                next_sweep = now + SWEEP;
                turn.clear();
                turn.extend(self.endpoints.lock().values().cloned().map(|core| (Why::Ready, core)));
                for (_, core) in turn.iter().filter(|(_, core)| core.overdue(now)) {
                    core.close_overdue();
                }
            }
            restless.extend(turn.drain(..).filter_map(|(why, core)| (!core.serve(why)).then_some(core)));
        }
    }
}

fn system(call: &'static str, error: &dyn std::error::Error) -> FabricError {
    FabricError::System { call, text: error.to_string(), hint: "; check the limits of threads and open files" }
}
