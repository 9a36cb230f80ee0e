//! Endpoints, peers, and the life of an operation from call to outcome.
//!
//! Decides how operations are posted, bounded and ended, and how an endpoint is closed. Leaves the waiting for the network to
//! `poller.rs`, reopening to `client.rs`, and retries of operations to the callers.
//!
//! Keeps, with one lock: calls into libfabric hold `gate` for reading, `close` takes it for writing. So nobody is inside
//! libfabric while an endpoint is closed, and nobody gets in afterwards. Nothing that could enter again (wakers, dropped peers)
//! runs while the gate is held.

use crate::{
    Access, FabricAddress, FabricError, LocalSpan, Memory, OperationError, Pieces, Pool, PoolRegistration, Provider,
    Registration, RemoteSpan, Wait,
    carrier::{Domain, Wires},
    metrics::Meters,
    operation::{Op, Outcome, Pending, Permits},
    poller::{Poller, Watch, Why},
    raw::{self, Direction, Order, Source},
};
use parking_lot::{Mutex, RwLock};
use std::{
    collections::HashMap,
    fmt,
    net::IpAddr,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::{Notify, Semaphore},
    time::{Instant, sleep_until, timeout_at},
};

/// Operations in flight on one endpoint at most.
const DEPTH_MAX: usize = 192;
/// Operations in flight to one peer at most: a silent peer must not take the room of the others.
const PEER_DEPTH_MAX: usize = 64;
/// First and longest pause before a post is tried again that the provider had no room or no connection for.
const RETRY_FIRST: Duration = Duration::from_millis(1);
const RETRY_LONGEST: Duration = Duration::from_millis(10);
/// Rounds of progress for one endpoint before others have their turn.
const ROUNDS: usize = 64;
/// Looks in a row that found nothing to finish, after which an endpoint with operations in flight is left alone. One does not
/// tell: `net` of libfabric 1.17 reads what begins a message in one look and its bytes in the next, and lets us sleep in between.
/// While the socket's buffer is full nothing more arrives, and so no new readiness would wake us.
const LOOKS_IN_VAIN: usize = 3;

/// How much longer an operation is spun for than its endpoint's configuration says, per KiB: what its bytes take on a fabric of 2 GiB/s.
const SPIN_PER_KIB: Duration = Duration::from_nanos(480);
/// Longest time that is spun for because of an operation's bytes.
const SPIN_FOR_BYTES_MAX: Duration = Duration::from_millis(1);

/// After so many operations in a row that were spun for in vain, only one of so many is spun for.
const VAIN_MAX: u32 = 4;
const VAIN_PROBE: u32 = 32;

// One silent peer leaves room for at least two others.
const _: () = assert!(PEER_DEPTH_MAX * 3 <= DEPTH_MAX);

/// How an endpoint is to be opened.
#[derive(Debug, Clone)]
pub struct EndpointConfig {
    /// Checked provider, see [`Provider::detect`].
    pub provider: Provider,
    /// The local address that peers reach it at.
    pub bind: IpAddr,
    /// The port, or none to let the system choose.
    pub port: Option<u16>,
    /// How long an operation that is [awaited so](Wait::spinning_until) looks for its completion itself before it sleeps, and longer by the
    /// time that its bytes take. Zero for endpoints that serve.
    pub spin: Duration,
}

impl EndpointConfig {
    /// A good [`spin`](Self::spin) for endpoints whose operations matter to somebody who waits.
    pub const SPIN: Duration = Duration::from_micros(100);
}

/// A libfabric endpoint in a domain of its own, served from `open` to `close` by this process's poller thread.
///
/// Clones are the same endpoint; it is closed when the last one is dropped, if not before.
#[derive(Clone)]
pub struct Endpoint {
    owner: Arc<Owner>,
}

/// Closes the endpoint when the last clone goes; `Core` itself is also held by the poller and by peers.
struct Owner {
    core: Arc<Core>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.core.close();
    }
}

/// What the clones, the poller and the peers share.
pub(crate) struct Core {
    /// None once closed.
    gate: RwLock<Option<Wires>>,
    closed: AtomicBool,
    domain: Arc<Domain>,
    address: FabricAddress,
    number: u64,
    spin: Duration,
    /// Operations in a row that were spun for in vain or not at all.
    unspun: AtomicU32,
    /// Whether the poller watches the descriptor, for an endpoint that is watched on request. Held while that changes: whoever
    /// finds it set may sleep, since it is taken back only when no operation is in flight.
    watched: Mutex<bool>,
    /// Turns of the poller with this endpoint.
    looks: AtomicU64,
    /// Operations that the poller finished in a turn of which only the clock told it.
    found_by_clock: AtomicU64,
    /// Peers may use its memory, so somebody has to look at all times.
    serves: AtomicBool,
    poller: &'static Poller,
    pending: Pending,
    /// Memory that peers may be touching until the endpoint is closed, by its address.
    exposed: Mutex<HashMap<usize, Arc<Memory>>>,
    depth: Arc<Semaphore>,
    /// Told when the endpoint made progress, for those whose post found no room.
    moved: Notify,
    next_local_key: AtomicU64,
    meters: Meters,
}

/// A peer that an endpoint can reach; forgotten when the last clone and the last operation to it are gone.
#[derive(Clone)]
pub struct Peer {
    entry: Arc<PeerEntry>,
}

pub(crate) struct PeerEntry {
    core: Arc<Core>,
    number: u64,
    address: FabricAddress,
    depth: Arc<Semaphore>,
}

impl Endpoint {
    /// Opens an endpoint and starts serving it.
    ///
    /// # Errors
    /// [`FabricError::AddressInUse`], [`FabricError::BindUnspecified`], [`FabricError::NoProvider`], [`FabricError::Library`].
    pub fn open(config: EndpointConfig) -> Result<Self, FabricError> {
        let EndpointConfig { provider, bind, port, spin } = config;
        if bind.is_unspecified() {
            return Err(FabricError::BindUnspecified { ip: bind });
        }
        let poller = Poller::shared()?;
        let source = Source { ip: bind, port };
        let domain = Arc::new(Domain::open(&provider, &source)?);
        let wires = Wires::open(&domain, &source)?;
        let descriptor = wires.descriptor();
        let core = Arc::new(Core {
            closed: AtomicBool::new(false),
            address: wires.address()?,
            number: poller.number(),
            spin,
            unspun: AtomicU32::new(0),
            watched: Mutex::new(false),
            looks: AtomicU64::new(0),
            found_by_clock: AtomicU64::new(0),
            serves: AtomicBool::new(false),
            poller,
            pending: Pending::default(),
            exposed: Mutex::default(),
            // Below the provider's own depth, so that a full queue is ours to wait for.
            depth: Arc::new(Semaphore::new((domain.transmit_depth() * 3 / 4).clamp(1, DEPTH_MAX))),
            moved: Notify::new(),
            next_local_key: AtomicU64::new(1),
            meters: Meters::new(),
            gate: RwLock::new(Some(wires)),
            domain,
        });
        let endpoint = Self { owner: Arc::new(Owner { core: Arc::clone(&core) }) };
        core.meters.opened.increment(1);
        poller.add(&core, core.number, descriptor, core.watch())?;
        // Descriptors mean something only after the queue was asked whether one may sleep.
        core.settle();
        Ok(endpoint)
    }

    /// The address that peers connect to.
    #[must_use]
    pub fn address(&self) -> FabricAddress {
        self.core().address.clone()
    }

    /// Registers a range of memory. The key is the caller's (random, where it protects something); without one, the next of a
    /// sequence is taken, which is meant for [`Access::Local`]. Providers of RDMA cards choose keys themselves: see
    /// [`Registration::key`].
    ///
    /// # Errors
    /// [`FabricError::OutOfRange`], [`FabricError::KeyInUse`], [`FabricError::Closed`], [`FabricError::Library`].
    pub fn register(
        &self,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
        key: Option<u64>,
    ) -> Result<Registration, FabricError> {
        let core = self.core();
        let gate = core.gate.read();
        if gate.is_none() {
            return Err(FabricError::Closed { what: "endpoint" });
        }
        let key = key.unwrap_or_else(|| core.next_local_key.fetch_add(1, Ordering::Relaxed));
        let registration = Registration::new(&core.domain, memory, range, access, key)?;
        if access != Access::Local {
            core.exposed.lock().entry(memory.start().addr()).or_insert_with(|| Arc::clone(memory));
            core.serves.store(true, Ordering::SeqCst);
            drop(gate);
            core.have_watched();
        }
        Ok(registration)
    }

    /// Registers a pool for local use, under the next key of the sequence.
    ///
    /// # Errors
    /// [`FabricError::Closed`], [`FabricError::Library`].
    pub fn register_pool(&self, pool: &Arc<Pool>) -> Result<PoolRegistration, FabricError> {
        let core = self.core();
        let gate = core.gate.read();
        if gate.is_none() {
            return Err(FabricError::Closed { what: "endpoint" });
        }
        let key = core.next_local_key.fetch_add(1, Ordering::Relaxed);
        PoolRegistration::new(&core.domain, pool, key)
    }

    /// Local pieces that one operation may have here: what the provider takes, at most [`PIECES_MAX`](crate::PIECES_MAX).
    #[must_use]
    pub fn pieces_max(&self) -> usize {
        self.core().domain.pieces_max()
    }

    /// Makes a peer known. Nothing is sent: the connection is made by the first operation, and again by the next one after it
    /// broke, also to another process at the same address.
    ///
    /// # Errors
    /// [`FabricError::BadAddress`], [`FabricError::Closed`], [`FabricError::Library`].
    pub fn connect(&self, peer: &FabricAddress) -> Result<Peer, FabricError> {
        let core = self.core();
        core.address.check_kind_of(peer)?;
        let gate = core.gate.read();
        let wires = gate.as_ref().ok_or(FabricError::Closed { what: "endpoint" })?;
        let number = wires.insert(peer)?;
        drop(gate);
        let depth = Arc::new(Semaphore::new(PEER_DEPTH_MAX));
        let entry = PeerEntry { core: Arc::clone(core), number, address: peer.clone(), depth };
        Ok(Peer { entry: Arc::new(entry) })
    }

    /// Writes local bytes, of one piece or several, to a peer. `Ok` means that they are visible in the target's memory.
    ///
    /// Needs a tokio runtime with its timer. Dropping the future does not cancel the write.
    ///
    /// # Errors
    /// See [`OperationError`]. [`OperationError::Deadline`] closed this endpoint.
    pub async fn write(
        &self,
        peer: &Peer,
        local: impl Into<Pieces<LocalSpan>>,
        remote: RemoteSpan,
        wait: impl Into<Wait>,
    ) -> Result<(), OperationError> {
        self.core().run(Direction::Write, peer, local.into(), remote, wait.into()).await
    }

    /// Reads a peer's bytes into local memory, of one piece or several. `Ok` means that they are there; what they are worth is the caller's to check.
    ///
    /// Needs a tokio runtime with its timer. Dropping the future does not cancel the read.
    ///
    /// # Errors
    /// See [`OperationError`]. [`OperationError::Deadline`] closed this endpoint.
    pub async fn read(
        &self,
        peer: &Peer,
        local: impl Into<Pieces<LocalSpan>>,
        remote: RemoteSpan,
        wait: impl Into<Wait>,
    ) -> Result<(), OperationError> {
        self.core().run(Direction::Read, peer, local.into(), remote, wait.into()).await
    }

    /// Closes the endpoint: the fence. When it returns (to whichever caller), no remote byte lands or leaves through it any
    /// more, operations in flight have failed with [`OperationError::Closed`], and their buffers are free.
    ///
    /// Takes tens of microseconds and may be called from async code. If libfabric cannot close it, the process aborts: going on
    /// without the fence would let a fenced writer reach memory that was given to another.
    pub fn close(&self) {
        self.core().close();
    }

    /// Whether it was closed, by [`close`](Self::close) or by an operation past its deadline.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.core().closed.load(Ordering::Acquire)
    }

    /// Operations in flight, those of dropped futures included.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.core().pending.len()
    }

    /// How often the process's poller thread looked at it so far. It need not, while tasks spin for their operations.
    #[must_use]
    pub fn times_polled(&self) -> u64 {
        self.core().looks.load(Ordering::Relaxed)
    }

    /// Operations whose end the process's poller thread found only because it looks now and then in any case: wake-ups that
    /// the provider did not give. Each cost about a millisecond.
    #[must_use]
    pub fn found_by_clock(&self) -> u64 {
        self.core().found_by_clock.load(Ordering::Relaxed)
    }

    fn core(&self) -> &Arc<Core> {
        &self.owner.core
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("address", &self.core().address).field("closed", &self.is_closed()).finish()
    }
}

impl Peer {
    /// Its address.
    #[must_use]
    pub fn address(&self) -> &FabricAddress {
        &self.entry.address
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Peer").field(&self.entry.address).finish()
    }
}

impl Drop for PeerEntry {
    fn drop(&mut self) {
        if let Some(wires) = self.core.gate.read().as_ref() {
            wires.remove(self.number);
        }
    }
}

/// What became of a post.
#[derive(PartialEq, Eq)]
enum Posted {
    Started,
    /// No room at the provider, or no connection yet.
    Again,
}

impl Core {
    async fn run(
        self: &Arc<Self>,
        direction: Direction,
        peer: &Peer,
        local: Pieces<LocalSpan>,
        remote: RemoteSpan,
        Wait { deadline, spins }: Wait,
    ) -> Result<(), OperationError> {
        self.check(peer, &local, &remote)?;
        let order = |op: &Op| Order {
            direction,
            peer: op.peer.number,
            remote_address: remote.address,
            remote_key: remote.key,
            context: op.context(),
        };
        let op = Op::new(local.clone(), Arc::clone(&peer.entry), deadline);
        let mut pause = RETRY_FIRST;
        loop {
            let room = self.room(&peer.entry, deadline).await?;
            // What begins too late would only cost its endpoint.
            if Instant::now() >= deadline {
                return Err(OperationError::NotStarted);
            }
            if self.post(&op, &order(&op), &local, room)? == Posted::Started {
                break;
            }
            let room = self.room(&peer.entry, deadline).await?;
            let moved = self.moved.notified();
            tokio::pin!(moved);
            // Listen before the post is tried again: progress right after it must not be missed.
            moved.as_mut().enable();
            if self.post(&op, &order(&op), &local, room)? == Posted::Started {
                break;
            }
            self.have_watched();
            // Without a connection there is nothing in flight here whose completion would wake us.
            let retry = Instant::now() + pause;
            if retry >= deadline {
                sleep_until(deadline).await;
                return Err(OperationError::NotStarted);
            }
            let _ = timeout_at(retry, moved).await;
            pause = (pause * 2).min(RETRY_LONGEST);
        }
        // From here on the operation alone holds the buffer.
        drop(local);
        if spins && let Some(outcome) = self.spin(&op, remote.len) {
            return outcome;
        }
        self.have_watched();
        if let Ok(outcome) = timeout_at(deadline, Outcome(&op)).await {
            return outcome;
        }
        // Only closing the endpoint gives the buffer back.
        if let Some(outcome) = op.take() {
            return outcome;
        }
        tracing::warn!(peer = %peer.entry.address, "an operation did not complete by its deadline, closing its endpoint");
        self.close_overdue();
        op.take().unwrap_or(Err(OperationError::Deadline))
    }

    /// Looks for the end of an operation for a while, unless that was in vain too often lately. With others in flight the poller
    /// is awake anyway, and two who look get in each other's way.
    fn spin(&self, op: &Op, bytes: u64) -> Option<Result<(), OperationError>> {
        if self.spin.is_zero() || self.pending.len() > 1 {
            return None;
        }
        let unspun = self.unspun.fetch_add(1, Ordering::Relaxed);
        if unspun >= VAIN_MAX && !unspun.is_multiple_of(VAIN_PROBE) {
            return None;
        }
        let kib = u32::try_from(bytes >> 10).unwrap_or(u32::MAX);
        let until = Instant::now() + self.spin + SPIN_PER_KIB.saturating_mul(kib).min(SPIN_FOR_BYTES_MAX);
        loop {
            self.progress();
            if let Some(outcome) = op.take() {
                self.unspun.store(0, Ordering::Relaxed);
                return Some(outcome);
            }
            if Instant::now() >= until {
                return None;
            }
            std::hint::spin_loop();
        }
    }

    fn watch(&self) -> Watch {
        if self.spin.is_zero() { Watch::Always } else { Watch::OnRequest }
    }

    /// Makes sure that the poller looks when there is something to do: before one sleeps.
    fn have_watched(self: &Arc<Self>) {
        if self.watch() == Watch::Always || *self.watched.lock() {
            return;
        }
        // A descriptor means something only after the queue was asked whether one may sleep. If there is too much to do for
        // that, the descriptor is readable anyway.
        self.settle();
        let gate = self.gate.read();
        let Some(wires) = gate.as_ref() else { return };
        let mut watched = self.watched.lock();
        if !*watched {
            self.poller.arm(self, self.number, wires.descriptor());
            *watched = true;
        }
    }

    /// What the poller does in its turn; false if others should have their turn first.
    pub(crate) fn serve(&self, why: Why) -> bool {
        self.looks.fetch_add(1, Ordering::Relaxed);
        if why == Why::Clock {
            let found = self.progress();
            self.found_by_clock.fetch_add(u64::try_from(found).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
        let calm = self.settle();
        if self.watch() == Watch::Always || !calm {
            return calm;
        }
        let gate = self.gate.read();
        let Some(wires) = gate.as_ref() else { return true };
        let mut watched = self.watched.lock();
        // Whoever begins an operation after this look finds it unwatched, and has it watched anew before sleeping.
        if *watched && !self.serves.load(Ordering::SeqCst) && self.pending.len() == 0 {
            self.poller.disarm(self.number, wires.descriptor());
            *watched = false;
        }
        true
    }

    fn check(
        self: &Arc<Self>,
        peer: &Peer,
        local: &Pieces<LocalSpan>,
        remote: &RemoteSpan,
    ) -> Result<(), OperationError> {
        if self.closed.load(Ordering::Acquire) {
            return Err(OperationError::Closed);
        }
        if !Arc::ptr_eq(self, &peer.entry.core) {
            return Err(FabricError::WrongEndpoint { what: "peer" }.into());
        }
        if local.iter().any(|piece| !piece.registration.belongs_to(&self.domain)) {
            return Err(FabricError::WrongEndpoint { what: "registration" }.into());
        }
        let (found, limit) = (local.count(), self.domain.pieces_max());
        if found > limit {
            return Err(FabricError::TooManyPieces { limit, found }.into());
        }
        let length = local.bytes();
        if length != remote.len || length == 0 {
            return Err(FabricError::LengthMismatch { local: length, remote: remote.len }.into());
        }
        if local.iter().any(|piece| piece.range.is_empty()) {
            return Err(FabricError::Empty { what: "a piece of an operation" }.into());
        }
        Ok(())
    }

    /// Waits for room in the peer's queue, then in ours.
    async fn room(&self, peer: &PeerEntry, deadline: Instant) -> Result<Permits, OperationError> {
        let now = |depth: &Arc<Semaphore>| Arc::clone(depth).try_acquire_owned().ok();
        if let Some(peer) = now(&peer.depth)
            && let Some(own) = now(&self.depth)
        {
            return Ok((own, peer, self.meters.begin()));
        }
        let both = async {
            let peer = Arc::clone(&peer.depth).acquire_owned().await;
            let own = Arc::clone(&self.depth).acquire_owned().await;
            own.and_then(|own| Ok((own, peer?, self.meters.begin()))).map_err(|_| OperationError::Closed)
        };
        timeout_at(deadline, both).await.unwrap_or(Err(OperationError::NotStarted))
    }

    fn post(
        &self,
        op: &Arc<Op>,
        order: &Order,
        local: &Pieces<LocalSpan>,
        room: Permits,
    ) -> Result<Posted, OperationError> {
        let gate = self.gate.read();
        let wires = gate.as_ref().ok_or(OperationError::Closed)?;
        op.hold(room);
        // Before the post: its completion may come before the post returns.
        self.pending.insert(op);
        let rc = wires.post(order, local.iter().map(LocalSpan::piece));
        drop(gate);
        if rc == 0 {
            op.set_posted();
            return Ok(Posted::Started);
        }
        self.pending.forget(op);
        op.release();
        if rc == -libc::EAGAIN {
            // The provider may be waiting for us to look.
            self.progress();
            return Ok(Posted::Again);
        }
        Err(OperationError::Failed { errno: -rc, provider_errno: 0, text: raw::strerror(-rc) })
    }

    /// Drives the provider once and finishes what completed; how many operations that were.
    fn progress(&self) -> usize {
        let completions = self.gate.read().as_ref().map(Wires::progress);
        self.pending.complete(completions.into_iter().flatten())
    }

    /// Drives the provider until its descriptor may be waited for; false if others should have their turn first.
    pub(crate) fn settle(&self) -> bool {
        let mut calm = false;
        let mut in_vain = 0;
        for _ in 0..ROUNDS {
            in_vain = if self.progress() > 0 { 0 } else { in_vain + 1 };
            // Also tells whether completions are left: each look at the queue costs system calls, so none is for nothing.
            calm = self.gate.read().as_ref().is_none_or(Wires::may_sleep) && in_vain >= self.looks_needed();
            if calm {
                break;
            }
        }
        self.moved.notify_waiters();
        calm
    }

    /// Looks in vain after which nothing is to be expected. What is watched at all times wakes us as long as there is something to read.
    fn looks_needed(&self) -> usize {
        if self.watch() == Watch::OnRequest && self.pending.len() > 0 { LOOKS_IN_VAIN } else { 0 }
    }

    /// Whether an operation is past its deadline without anybody having seen to it.
    pub(crate) fn overdue(&self, now: Instant) -> bool {
        self.pending.overdue(now)
    }

    /// Closes the endpoint because an operation is past its deadline.
    pub(crate) fn close_overdue(&self) {
        if !self.closed.load(Ordering::Acquire) {
            self.meters.closed_by_deadline.increment(1);
        }
        self.close();
    }

    pub(crate) fn close(&self) {
        let mut late = Vec::new();
        {
            let mut gate = self.gate.write();
            let Some(wires) = gate.take() else { return };
            self.closed.store(true, Ordering::Release);
            self.meters.closed.increment(1);
            self.poller.remove(self.number, wires.descriptor());
            if let Err(error) = wires.close(&mut late) {
                tracing::error!(%error, address = %self.address, "an endpoint cannot be closed, so its fence cannot be kept: aborting");
                std::process::abort();
            }
        }
        self.depth.close();
        self.pending.abandon(late, Instant::now());
        self.moved.notify_waiters();
        let exposed = std::mem::take(&mut *self.exposed.lock());
        drop(exposed);
    }
}
