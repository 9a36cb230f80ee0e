//! A double of the fabric, in memory: for tests that need a network to misbehave on demand.
//!
//! Decides when an operation arrives, in which order, how far it comes and whether it is ever answered. What it promises is what was
//! measured on `net` and `tcp`:
//!
//! - A key is checked once, when an operation arrives. One that has begun goes on landing after its registration was closed;
//!   closing the target's endpoint stops it at once.
//! - A wrong key, closed key or wrong bound tears the connection down: everything under way from that endpoint to that peer fails.
//! - A completed write is in the target's memory. A failed one may have landed in part.
//! - To a peer that is not there nothing can be posted (`EAGAIN`).
//!
//! One lock guards the whole network, also while bytes move, so that nothing lands once a close has returned.

use crate::{
    Access, FabricAddress, FabricError,
    memory::copy_opaque,
    raw::{Completion, Direction, Failure, Order, Piece, Source, strerror},
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::{AsRawFd, OwnedFd},
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    net::IpAddr,
    os::fd::RawFd,
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::time::Instant;

/// Operations that an endpoint takes at once.
pub(crate) const DEPTH: usize = 256;
/// How long the network's thread sleeps at most before it looks whether there is still a network.
const LOOK: Duration = Duration::from_millis(50);
/// How often an operation that is held is looked at.
const HELD: Duration = Duration::from_millis(1);

/// How a network of the double misbehaves.
#[derive(Debug, Clone)]
pub struct Faults {
    /// An operation arrives after a time between these two; so two of them may overtake each other.
    pub delay_least: Duration,
    /// See [`delay_least`](Self::delay_least).
    pub delay_most: Duration,
    /// Bytes move in steps of this many.
    pub step_bytes: usize,
    /// Time between two steps of one operation.
    pub step_gap: Duration,
    /// Of a thousand operations, so many never arrive, and so many arrive but are never answered.
    pub lost_per_mille: u64,
    /// An end that was told of is found by the so-manieth look after it, at least the first; the looks before it say that one may sleep. (`net`
    /// of libfabric 1.17 reads the header of an answer in one look and its bytes in the next.)
    pub looks: usize,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            delay_least: Duration::ZERO,
            delay_most: Duration::from_micros(200),
            step_bytes: 64 << 10,
            step_gap: Duration::ZERO,
            lost_per_mille: 0,
            looks: 1,
        }
    }
}

/// A network in the memory of this process. Clones are the same network; endpoints are opened on it with
/// [`Provider::double`](crate::Provider::double).
#[derive(Clone)]
pub struct DoubleNetwork(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// Told when something was posted or is no longer held.
    changed: Condvar,
}

struct State {
    faults: Faults,
    dice: u64,
    last_number: u64,
    last_port: u16,
    /// Lent memory, by domain and key.
    regions: HashMap<(u64, u64), Lent>,
    endpoints: HashMap<u64, Station>,
    addresses: HashMap<FabricAddress, u64>,
    /// What is under way, by the time of its next step.
    transfers: BTreeMap<(Instant, u64), Transfer>,
    /// Operations to these peers stand still once they have begun.
    held: BTreeSet<FabricAddress>,
}

/// Memory of a registration.
#[derive(Clone, Copy)]
struct Lent {
    start: *mut u8,
    length: usize,
    access: Access,
}

// SAFETY: a plain address; whoever uses it holds the network's lock and has checked that its owner is still there.
unsafe impl Send for Lent {}

/// An open endpoint.
struct Station {
    domain: u64,
    address: FabricAddress,
    peers: HashMap<u64, FabricAddress>,
    /// Each with the looks that do not find it.
    completions: Vec<(usize, Completion)>,
    event: Arc<OwnedFd>,
}

/// Local bytes of a transfer.
struct Local {
    start: *mut u8,
    length: usize,
}

/// An operation under way.
struct Transfer {
    from: u64,
    to: FabricAddress,
    direction: Direction,
    local: Vec<Local>,
    remote_address: u64,
    remote_key: u64,
    context: usize,
    length: usize,
    done: usize,
    fate: Fate,
    /// The endpoint that it arrived at and the memory there, once its key was accepted.
    begun: Option<(u64, *mut u8)>,
}

// SAFETY: addresses of memory that the initiating endpoint holds until it is closed, and the target's likewise; both are looked up
// under the network's lock before each step.
unsafe impl Send for Transfer {}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Whole,
    NeverArrives,
    NeverAnswered,
}

impl DoubleNetwork {
    /// A network whose randomness is drawn from `seed`.
    ///
    /// # Errors
    /// [`FabricError::System`] if its thread cannot be started.
    pub fn new(seed: u64) -> Result<Self, FabricError> {
        let state = State {
            faults: Faults::default(),
            dice: seed,
            last_number: 0,
            last_port: 1024,
            regions: HashMap::new(),
            endpoints: HashMap::new(),
            addresses: HashMap::new(),
            transfers: BTreeMap::new(),
            held: BTreeSet::new(),
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let weak = Arc::downgrade(&shared);
        let thread = std::thread::Builder::new().name("fabric-double".to_owned());
        thread.spawn(move || run(&weak)).map_err(|error| FabricError::System {
            call: "starting the double's thread",
            text: error.to_string(),
            hint: "",
        })?;
        Ok(Self(shared))
    }

    /// Changes how it misbehaves, for what is posted from now on.
    pub fn set(&self, faults: Faults) {
        self.state().faults = faults;
    }

    /// Operations to this peer stand still after their first step, until they are released: as when their sender was stopped.
    pub fn hold(&self, peer: &FabricAddress) {
        self.state().held.insert(peer.clone());
    }

    /// Lets what was held go on.
    pub fn release(&self, peer: &FabricAddress) {
        self.state().held.remove(peer);
        self.0.changed.notify_all();
    }

    /// Operations to this peer that have begun to move bytes and are not done.
    #[must_use]
    pub fn under_way(&self, peer: &FabricAddress) -> usize {
        self.state().transfers.values().filter(|transfer| transfer.to == *peer && transfer.done > 0).count()
    }

    pub(crate) fn open_domain(&self) -> Domain {
        let number = self.state().number();
        Domain { network: self.clone(), number }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock()
    }
}

impl PartialEq for DoubleNetwork {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for DoubleNetwork {}

impl fmt::Debug for DoubleNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DoubleNetwork").field("faults", &self.state().faults).finish_non_exhaustive()
    }
}

/// Steps what is due until the network is gone.
fn run(network: &Weak<Shared>) {
    while let Some(shared) = network.upgrade() {
        let mut state = shared.state.lock();
        let now = Instant::now();
        let next = state.transfers.first_key_value().map(|((due, _), _)| *due);
        match next {
            Some(due) if due <= now => {
                if let Some((_, transfer)) = state.transfers.pop_first() {
                    state.step(transfer, now);
                }
            }
            next => {
                let pause = next.map_or(LOOK, |due| due.saturating_duration_since(now).min(LOOK));
                shared.changed.wait_for(&mut state, pause);
            }
        }
    }
}

impl State {
    fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    fn draw(&mut self) -> u64 {
        // SplitMix64.
        self.dice = self.dice.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.dice ^ (self.dice >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn delay(&mut self) -> Duration {
        let Faults { delay_least, delay_most, .. } = self.faults;
        let span = u64::try_from(delay_most.saturating_sub(delay_least).as_nanos()).unwrap_or(u64::MAX);
        delay_least + Duration::from_nanos(self.draw() % span.saturating_add(1).max(1))
    }

    fn put(&mut self, due: Instant, transfer: Transfer) {
        let number = self.number();
        self.transfers.insert((due, number), transfer);
    }

    fn complete(&mut self, endpoint: u64, completion: Completion) {
        let hidden = self.faults.looks.saturating_sub(1);
        let Some(station) = self.endpoints.get_mut(&endpoint) else { return };
        station.completions.push((hidden, completion));
        ring(&station.event);
    }

    /// Ends everything under way from one endpoint to one peer.
    fn tear_down(&mut self, first: Transfer) {
        let (from, to) = (first.from, first.to.clone());
        let of_it =
            |transfer: &Transfer| transfer.from == from && transfer.to == to && transfer.fate != Fate::NeverArrives;
        let others: Vec<Transfer> =
            self.transfers.extract_if(.., |_, transfer| of_it(transfer)).map(|(_, it)| it).collect();
        for transfer in std::iter::once(first).chain(others) {
            let text = format!("{} (double: the connection was torn down)", strerror(libc::ECANCELED));
            let failure = Failure { errno: libc::ECANCELED, provider_errno: libc::ENOTCONN, text };
            self.complete(transfer.from, Completion { context: transfer.context, outcome: Err(failure) });
        }
    }

    /// The memory at the target that an arriving operation may touch.
    fn accept(&self, transfer: &Transfer, domain: u64) -> Option<*mut u8> {
        let lent = self.regions.get(&(domain, transfer.remote_key))?;
        let wanted = match transfer.direction {
            Direction::Write => Access::RemoteWrite,
            Direction::Read => Access::RemoteRead,
        };
        let start = usize::try_from(transfer.remote_address).ok()?;
        let end = start.checked_add(transfer.length)?;
        (lent.access == wanted && end <= lent.length).then(|| lent.start.wrapping_add(start))
    }

    /// One step of an operation: its arrival with the first bytes, or further bytes.
    fn step(&mut self, mut transfer: Transfer, now: Instant) {
        // Its initiator was closed: it is forgotten, and its buffer is somebody else's.
        if !self.endpoints.contains_key(&transfer.from) {
            return;
        }
        if transfer.fate == Fate::NeverArrives {
            return self.put(now + LOOK, transfer);
        }
        if transfer.done == transfer.length {
            // Arrived whole, never answered.
            return self.put(now + LOOK, transfer);
        }
        let there = self.addresses.get(&transfer.to).copied();
        let remote = match (transfer.begun, there) {
            (Some((target, memory)), Some(there)) if target == there => memory,
            (None, Some(there)) => match self.accept(&transfer, self.endpoints[&there].domain) {
                Some(memory) => {
                    transfer.begun = Some((there, memory));
                    memory
                }
                None => return self.tear_down(transfer),
            },
            // The target's endpoint is closed, or another one is in its place.
            _ => return self.tear_down(transfer),
        };
        if transfer.done > 0 && self.held.contains(&transfer.to) {
            return self.put(now + HELD, transfer);
        }
        let bytes = self.faults.step_bytes.clamp(1, transfer.length - transfer.done);
        move_bytes(&transfer, remote, bytes);
        transfer.done += bytes;
        if transfer.done < transfer.length {
            self.put(now + self.faults.step_gap, transfer);
        } else if transfer.fate == Fate::NeverAnswered {
            self.put(now + LOOK, transfer);
        } else {
            self.complete(transfer.from, Completion { context: transfer.context, outcome: Ok(()) });
        }
    }
}

/// Moves the next `bytes` bytes between the pieces of a transfer and `remote`, where its memory at the target begins.
fn move_bytes(transfer: &Transfer, remote: *mut u8, bytes: usize) {
    let (mut at, end) = (transfer.done, transfer.done + bytes);
    let mut piece_start = 0;
    for piece in &transfer.local {
        let piece_end = piece_start + piece.length;
        if at < end && at < piece_end && at >= piece_start {
            let count = (end - at).min(piece_end - at);
            let local = piece.start.wrapping_add(at - piece_start);
            let there = remote.wrapping_add(at);
            let (from, to) = match transfer.direction {
                Direction::Write => (local, there),
                Direction::Read => (there, local),
            };
            // SAFETY: the initiator is open, so it holds the piece; the target is open, so it holds what was registered on it, and the
            // range was checked when the operation arrived. The lock under which we are keeps both open.
            unsafe { copy_opaque(from, to, count) };
            at += count;
        }
        piece_start = piece_end;
    }
}

#[expect(clippy::host_endian_bytes, reason = "an event counter is in the host's order")]
fn ring(event: &OwnedFd) {
    if let Err(error) = rustix::io::write(event, &1_u64.to_ne_bytes()) {
        tracing::error!(%error, "an endpoint of the double is not woken up");
    }
}

/// A space of keys.
pub(crate) struct Domain {
    network: DoubleNetwork,
    number: u64,
}

impl Domain {
    pub(crate) fn register(
        &self,
        start: *mut u8,
        length: usize,
        access: Access,
        key: u64,
    ) -> Result<Region, FabricError> {
        let mut state = self.network.state();
        if state.regions.contains_key(&(self.number, key)) {
            return Err(FabricError::KeyInUse { key });
        }
        state.regions.insert((self.number, key), Lent { start, length, access });
        Ok(Region { network: self.network.clone(), domain: self.number, key })
    }

    pub(crate) fn open_wires(&self, source: &Source) -> Result<Wires, FabricError> {
        let IpAddr::V4(ip) = source.ip else {
            let (expected, found) = ("an IPv4 address".to_owned(), source.ip.to_string());
            return Err(FabricError::BadAddress { expected, found });
        };
        let system =
            |error: rustix::io::Errno| FabricError::System { call: "eventfd", text: error.to_string(), hint: "" };
        let event = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(system)?);
        let mut state = self.network.state();
        let address = loop {
            let port = source.port.unwrap_or_else(|| {
                state.last_port = state.last_port.checked_add(1).unwrap_or(1025);
                state.last_port
            });
            let address = FabricAddress::of_socket(ip, port);
            if !state.addresses.contains_key(&address) {
                break address;
            }
            if source.port.is_some() {
                return Err(FabricError::AddressInUse { ip: source.ip, port });
            }
        };
        let number = state.number();
        state.addresses.insert(address.clone(), number);
        let station = Station {
            domain: self.number,
            address: address.clone(),
            peers: HashMap::new(),
            completions: Vec::new(),
            event: Arc::clone(&event),
        };
        state.endpoints.insert(number, station);
        drop(state);
        Ok(Wires { network: self.network.clone(), number, address, event })
    }
}

/// Lent memory; not lent any more once dropped.
pub(crate) struct Region {
    network: DoubleNetwork,
    domain: u64,
    key: u64,
}

impl Region {
    pub(crate) fn key(&self) -> u64 {
        self.key
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.network.state().regions.remove(&(self.domain, self.key));
    }
}

/// An open endpoint; closed when dropped.
pub(crate) struct Wires {
    network: DoubleNetwork,
    number: u64,
    address: FabricAddress,
    event: Arc<OwnedFd>,
}

impl Wires {
    pub(crate) fn descriptor(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    pub(crate) fn address(&self) -> FabricAddress {
        self.address.clone()
    }

    fn with<R>(&self, work: impl FnOnce(&mut Station) -> R) -> R {
        let mut state = self.network.state();
        work(state.endpoints.get_mut(&self.number).expect("it is there until it is closed, which takes it"))
    }

    pub(crate) fn insert(&self, address: &FabricAddress) -> u64 {
        let number = self.network.state().number();
        self.with(|station| station.peers.insert(number, address.clone()));
        number
    }

    pub(crate) fn remove(&self, peer: u64) {
        self.with(|station| station.peers.remove(&peer));
    }

    pub(crate) fn post(&self, order: &Order, pieces: impl Iterator<Item = Piece>) -> i32 {
        let mut state = self.network.state();
        let peers = &state.endpoints[&self.number].peers;
        let Some(to) = peers.get(&order.peer).cloned() else { return -libc::EINVAL };
        if !state.addresses.contains_key(&to) {
            return -libc::EAGAIN;
        }
        let local: Vec<Local> = pieces.map(|piece| Local { start: piece.start, length: piece.length }).collect();
        let (lost, roll) = (state.faults.lost_per_mille, state.draw() % 1_000);
        let transfer = Transfer {
            from: self.number,
            to,
            direction: order.direction,
            length: local.iter().map(|piece| piece.length).sum(),
            local,
            remote_address: order.remote_address,
            remote_key: order.remote_key,
            context: order.context.addr(),
            done: 0,
            fate: match roll {
                roll if roll < lost => Fate::NeverArrives,
                roll if roll < lost * 2 => Fate::NeverAnswered,
                _ => Fate::Whole,
            },
            begun: None,
        };
        let due = Instant::now() + state.delay();
        state.put(due, transfer);
        drop(state);
        self.network.0.changed.notify_all();
        0
    }

    pub(crate) fn progress(&self) -> Vec<Completion> {
        self.with(|station| {
            let found = station.completions.extract_if(.., |(hidden, _)| *hidden == 0);
            let found = found.map(|(_, completion)| completion).collect();
            station.completions.iter_mut().for_each(|(hidden, _)| *hidden -= 1);
            found
        })
    }

    pub(crate) fn may_sleep(&self) -> bool {
        let tells = self.network.state().faults.looks <= 1;
        self.with(|station| {
            if tells && !station.completions.is_empty() {
                return false;
            }
            // Nothing waits: whatever rang was for what has been taken. Empty is as good.
            let _ = rustix::io::read(&station.event, &mut [0; 8]);
            true
        })
    }

    /// Nothing lands or leaves through it any more when this returns. Gives the completions that nobody took.
    pub(crate) fn close(self) -> Vec<Completion> {
        self.leave()
    }

    fn leave(&self) -> Vec<Completion> {
        let mut state = self.network.state();
        let Some(station) = state.endpoints.remove(&self.number) else { return Vec::new() };
        state.addresses.remove(&station.address);
        state.transfers.retain(|_, transfer| transfer.from != self.number);
        station.completions.into_iter().map(|(_, completion)| completion).collect()
    }
}

impl Drop for Wires {
    fn drop(&mut self) {
        drop(self.leave());
    }
}
