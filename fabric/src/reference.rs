//! What the fabric gives without us: the reference of our benches.
//!
//! One thread, plain libfabric calls, no runtime: it posts up to `depth` operations, spins on the completion queue, and posts the
//! next one as soon as one completed. Nothing of our endpoints is used, only handles that close what they opened. Writes ask for
//! `FI_DELIVERY_COMPLETE`, like ours; weaker completions would measure something that we cannot build on. Never use it for work:
//! it has no deadlines but the one of a whole run, and it burns its processor.

use crate::{
    Access, FabricAddress, FabricError, Memory, OperationError, Provider, RemoteSpan,
    raw::{self, Completion, Direction, Domain, Order, Piece, Source, WaitObject, Wires},
};
use libfabric_sys::fi_context2;
use std::{cell::UnsafeCell, net::IpAddr, sync::Arc, time::Duration};
use tokio::time::Instant;

/// Which way the bytes go, seen from us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// `fi_writemsg` with `FI_DELIVERY_COMPLETE`.
    Write,
    /// `fi_readmsg`.
    Read,
}

/// What to do in one run.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Which way.
    pub way: Way,
    /// Bytes of one operation.
    pub bytes: usize,
    /// Operations in flight.
    pub depth: usize,
    /// For how long new ones are posted.
    pub time: Duration,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// From post to completion, ascending.
    pub latencies: Vec<Duration>,
    /// From the first post to the last completion; connecting is not counted.
    pub elapsed: Duration,
    /// Bytes that were moved.
    pub bytes: u64,
}

impl Run {
    /// GiB per second.
    #[must_use]
    pub fn gib_per_second(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let bytes = self.bytes as f64;
        bytes / self.elapsed.as_secs_f64() / f64::from(1u32 << 30)
    }

    /// The latency that this share of the operations did not exceed, for instance 0.5; zero if there were none.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Duration {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an index into a list that fits into memory"
        )]
        let at = (self.latencies.len() as f64 * share.clamp(0.0, 1.0)) as usize;
        self.latencies.get(at.min(self.latencies.len().saturating_sub(1))).copied().unwrap_or_default()
    }
}

/// Operations in flight at most, below the transmit queues of all providers that we know.
const DEPTH_MAX: usize = 64;
/// A run whose operations do not come back for so long has failed.
const PATIENCE: Duration = Duration::from_secs(10);

/// A raw client of one target. Not to be shared between threads.
pub struct RawClient {
    // Closed before what its operations use.
    wires: Option<Wires>,
    region: Option<raw::Region>,
    memory: Arc<Memory>,
    domain: Arc<Domain>,
    peer: u64,
    /// libfabric's own, one per operation in flight; leaked should one of them never come back.
    contexts: Vec<Context>,
}

/// An operation's context. It is libfabric's while the operation is in flight.
#[derive(Default)]
struct Context(UnsafeCell<fi_context2>);

/// One operation in flight.
struct Flight {
    begun: Instant,
}

impl RawClient {
    /// Opens an endpoint at `bind`, registers `bytes` bytes of memory for all its operations, and makes the target known.
    ///
    /// # Errors
    /// As [`Endpoint::open`](crate::Endpoint::open) and [`Endpoint::connect`](crate::Endpoint::connect).
    pub fn open(provider: &Provider, bind: IpAddr, target: &FabricAddress, bytes: usize) -> Result<Self, FabricError> {
        let source = Source { ip: bind, port: None };
        let domain = Arc::new(Domain::open(raw::discover(provider.name(), &source)?)?);
        let memory = Memory::allocate_populated(bytes)?;
        let region = domain.register(memory.start(), bytes, Access::Local.flags(), 1)?;
        let wires = Wires::open(Arc::clone(&domain), &source, WaitObject::None)?;
        wires.address()?.check_kind_of(target)?;
        let peer = wires.insert(target)?;
        let contexts = std::iter::repeat_with(Context::default).take(DEPTH_MAX).collect();
        Ok(Self { wires: Some(wires), region: Some(region), memory, domain, peer, contexts })
    }

    /// The memory that its operations use: operation `i` of a run has the bytes from `i * load.bytes` on, counted around.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Moves bytes between its memory and `remote` for a while. Operations go through both from the start to the end, again and
    /// again.
    ///
    /// # Errors
    /// [`OperationError::Invalid`] if an operation does not fit into the memory or `remote`; [`OperationError::NotStarted`] if the
    /// target takes no connection for ten seconds; [`OperationError::Failed`] and [`OperationError::Deadline`]. All but the first
    /// end the client.
    pub fn run(&mut self, remote: RemoteSpan, load: Load) -> Result<Run, OperationError> {
        let outcome = self.drive(remote, load);
        if matches!(&outcome, Err(error) if !matches!(error, OperationError::Invalid(_))) {
            self.close();
        }
        outcome
    }

    fn drive(&self, remote: RemoteSpan, load: Load) -> Result<Run, OperationError> {
        let Load { way, bytes, depth, time } = load;
        let Some(wires) = &self.wires else { return Err(OperationError::Closed) };
        let Some(region) = &self.region else { return Err(OperationError::Closed) };
        let there = usize::try_from(remote.len).unwrap_or(usize::MAX);
        let places = (self.memory.len() / bytes.max(1)).min(there / bytes.max(1));
        let depth = depth.clamp(1, DEPTH_MAX.min(self.domain.info.transmit_depth() / 2));
        if bytes == 0 || places < depth {
            let length = self.memory.len().min(there);
            return Err(FabricError::OutOfRange { start: 0, end: bytes.saturating_mul(depth), length }.into());
        }
        let direction = match way {
            Way::Write => Direction::Write,
            Way::Read => Direction::Read,
        };
        let mut flights: Vec<Option<Flight>> = (0..depth).map(|_| None).collect();
        let mut idle: Vec<usize> = (0..depth).collect();
        let mut latencies = Vec::with_capacity(1 << 20);
        // The time counts from the first post that is taken: connecting comes before.
        let called = Instant::now();
        let mut begun = None;
        let mut last = called;
        let mut place = 0;
        loop {
            let now = Instant::now();
            let goes_on = begun.is_none_or(|begun| now < begun + time);
            while let Some(flight) = idle.pop_if(|_| goes_on) {
                let offset = place * bytes;
                let order = Order {
                    direction,
                    peer: self.peer,
                    remote_address: remote.address + offset as u64,
                    remote_key: remote.key,
                    context: self.contexts[flight].0.get().cast(),
                };
                let start = self.memory.start().wrapping_add(offset);
                let piece = Piece { start, length: bytes, descriptor: region.descriptor() };
                let posted = Instant::now();
                let rc = wires.post(&order, std::iter::once(piece));
                match rc {
                    0 => {
                        begun.get_or_insert(posted);
                        flights[flight] = Some(Flight { begun: posted });
                    }
                    _ if rc == -libc::EAGAIN => {
                        idle.push(flight);
                        break;
                    }
                    _ => {
                        return Err(OperationError::Failed { errno: -rc, provider_errno: 0, text: raw::strerror(-rc) });
                    }
                }
                place = (place + 1) % places;
            }
            let mut completions = wires.progress().peekable();
            if completions.peek().is_none() {
                if idle.len() == depth && !goes_on {
                    break;
                }
                if now >= last + PATIENCE {
                    let never = begun.is_none();
                    return Err(if never { OperationError::NotStarted } else { OperationError::Deadline });
                }
                continue;
            }
            last = Instant::now();
            for Completion { context, outcome } in completions {
                let ended = self.contexts[..depth].iter().position(|own| own.0.get().addr() == context);
                let Some((flight, Flight { begun })) = ended.and_then(|at| Some((at, flights[at].take()?))) else {
                    continue;
                };
                outcome.map_err(raw::Failure::into_error)?;
                latencies.push(last - begun);
                idle.push(flight);
            }
        }
        let bytes = bytes as u64 * latencies.len() as u64;
        latencies.sort_unstable();
        Ok(Run { latencies, elapsed: last - begun.unwrap_or(called), bytes })
    }

    /// Only after this is nothing of ours libfabric's any more.
    fn close(&mut self) {
        let Some(wires) = self.wires.take() else { return };
        if let Err(error) = wires.close(&mut Vec::new()) {
            tracing::error!(%error, "a raw endpoint cannot be closed, its memory is never freed");
            std::mem::forget((self.region.take(), Arc::clone(&self.memory), std::mem::take(&mut self.contexts)));
        }
    }
}

impl Drop for RawClient {
    fn drop(&mut self) {
        self.close();
    }
}
