//! An endpoint that comes back: opened at its first use, and again after an operation's deadline closed it.
//!
//! Decides when to open, which memory to register there and which peers to keep. Leaves retries to its callers: a failed or
//! closed operation is reported, and only the next one finds a new endpoint. One silent peer closes the endpoint for all, so
//! whoever talks to many keeps one of these per peer and role; reads and writes apart, since a refused write tears down its
//! connection.

use crate::{
    Access, Endpoint, EndpointConfig, FabricAddress, FabricError, LocalSpan, Memory, OperationError, Peer, Pieces,
    Pool, Registration, RemoteSpan, Span, Wait,
};
use parking_lot::Mutex;
use std::{collections::HashMap, fmt, ops::Range, sync::Arc};

/// Peers that are kept connected; beyond, the one that was used least recently is forgotten.
const PEERS_MAX: usize = 64;

/// Local bytes of an operation on a [`ClientEndpoint`], held until it has completed or its endpoint is closed.
#[derive(Clone)]
pub struct LocalBuffer {
    memory: Arc<Memory>,
    range: Range<usize>,
    /// Keeps everybody else from its bytes.
    span: Option<Arc<Span>>,
}

impl LocalBuffer {
    /// The bytes `range` of `memory`; out-of-range ones are refused by the operation.
    #[must_use]
    pub fn new(memory: &Arc<Memory>, range: Range<usize>) -> Self {
        Self { memory: Arc::clone(memory), range, span: None }
    }

    /// The bytes `range` of `span`, counted from its start. The operation holds the span until it is over.
    ///
    /// # Errors
    /// [`FabricError::OutOfRange`].
    pub fn of_span(span: &Arc<Span>, range: Range<usize>) -> Result<Self, FabricError> {
        let range = span.place(&range)?;
        Ok(Self { memory: Arc::clone(span.pool().memory()), range, span: Some(Arc::clone(span)) })
    }
}

impl fmt::Debug for LocalBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalBuffer").field("range", &self.range).finish_non_exhaustive()
    }
}

/// An endpoint for our own operations that opens itself again after it was closed by a deadline.
pub struct ClientEndpoint {
    config: EndpointConfig,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Set by `close`, for good.
    closed: bool,
    /// Registered on every endpoint that is opened, by address.
    kept: HashMap<usize, Arc<Memory>>,
    live: Option<Live>,
    opened: u64,
    uses: u64,
}

struct Live {
    endpoint: Endpoint,
    registrations: HashMap<usize, Arc<Registration>>,
    peers: HashMap<FabricAddress, (Peer, u64)>,
}

impl ClientEndpoint {
    /// Nothing is opened before the first operation.
    #[must_use]
    pub fn new(config: EndpointConfig) -> Self {
        Self { config, state: Mutex::default() }
    }

    /// Keeps all of `memory` registered, now and on every later endpoint. Other memory can be used as well; it is registered
    /// for each operation, which costs a microsecond on `net` and `tcp`, and milliseconds on cards.
    pub fn keep_registered(&self, memory: &Arc<Memory>) {
        self.state.lock().kept.insert(memory.start().addr(), Arc::clone(memory));
    }

    /// Keeps a pool registered, like other memory.
    pub fn keep_pool(&self, pool: &Arc<Pool>) {
        self.keep_registered(pool.memory());
    }

    /// Undoes [`keep_pool`](Self::keep_pool); operations in flight still hold the pool.
    pub fn forget_pool(&self, pool: &Arc<Pool>) {
        self.forget_memory(pool.memory());
    }

    /// Undoes [`keep_registered`](Self::keep_registered); operations in flight still hold the memory.
    pub fn forget_memory(&self, memory: &Arc<Memory>) {
        let mut state = self.state.lock();
        state.kept.remove(&memory.start().addr());
        if let Some(live) = &mut state.live {
            live.registrations.remove(&memory.start().addr());
        }
    }

    /// See [`Endpoint::write`]. The peer is connected if it was not.
    ///
    /// # Errors
    /// See [`OperationError`]; after [`OperationError::Deadline`] the next operation opens another endpoint.
    pub async fn write(
        &self,
        peer: &FabricAddress,
        local: impl Into<Pieces<LocalBuffer>>,
        remote: RemoteSpan,
        wait: impl Into<Wait>,
    ) -> Result<(), OperationError> {
        let (endpoint, peer, local) = self.prepare(peer, local.into())?;
        endpoint.write(&peer, local, remote, wait).await
    }

    /// See [`Endpoint::read`]. The peer is connected if it was not.
    ///
    /// # Errors
    /// See [`OperationError`]; after [`OperationError::Deadline`] the next operation opens another endpoint.
    pub async fn read(
        &self,
        peer: &FabricAddress,
        local: impl Into<Pieces<LocalBuffer>>,
        remote: RemoteSpan,
        wait: impl Into<Wait>,
    ) -> Result<(), OperationError> {
        let (endpoint, peer, local) = self.prepare(peer, local.into())?;
        endpoint.read(&peer, local, remote, wait).await
    }

    /// Forgets a peer, for instance a lane that is no more. Operations in flight to it go on.
    pub fn disconnect(&self, peer: &FabricAddress) {
        let forgotten = self.state.lock().live.as_mut().and_then(|live| live.peers.remove(peer));
        drop(forgotten);
    }

    /// How many endpoints it has opened so far.
    #[must_use]
    pub fn times_opened(&self) -> u64 {
        self.state.lock().opened
    }

    /// Closes it for good: operations in flight fail with [`OperationError::Closed`], and so do all later ones.
    pub fn close(&self) {
        let live = {
            let mut state = self.state.lock();
            state.closed = true;
            state.live.take()
        };
        if let Some(live) = live {
            live.endpoint.close();
        }
    }

    /// An open endpoint, the peer and the bytes on it.
    fn prepare(
        &self,
        address: &FabricAddress,
        local: Pieces<LocalBuffer>,
    ) -> Result<(Endpoint, Peer, Pieces<LocalSpan>), OperationError> {
        let mut state = self.state.lock();
        let State { closed, kept, live, opened, uses } = &mut *state;
        if *closed {
            return Err(OperationError::Closed);
        }
        if live.as_ref().is_some_and(|live| live.endpoint.is_closed()) {
            *live = None;
        }
        let live = match live {
            Some(live) => live,
            None => {
                let endpoint = Endpoint::open(self.config.clone())?;
                *opened += 1;
                live.insert(Live { endpoint, registrations: HashMap::new(), peers: HashMap::new() })
            }
        };
        *uses += 1;
        let peer = live.peer(address, *uses)?;
        let local = local.try_map(|LocalBuffer { memory, range, span }| {
            let at = memory.start().addr();
            let registration = match live.registrations.get(&at) {
                Some(registration) => Arc::clone(registration),
                None => {
                    let whole = 0..memory.len();
                    let registration = Arc::new(live.endpoint.register(&memory, whole, Access::Local, None)?);
                    if kept.contains_key(&at) {
                        live.registrations.insert(at, Arc::clone(&registration));
                    }
                    registration
                }
            };
            LocalSpan::held(&registration, range, span)
        })?;
        Ok((live.endpoint.clone(), peer, local))
    }
}

impl Live {
    fn peer(&mut self, address: &FabricAddress, use_number: u64) -> Result<Peer, FabricError> {
        if let Some((peer, last_use)) = self.peers.get_mut(address) {
            *last_use = use_number;
            return Ok(peer.clone());
        }
        if self.peers.len() >= PEERS_MAX {
            let oldest =
                self.peers.iter().min_by_key(|(_, (_, last_use))| *last_use).map(|(address, _)| address.clone());
            if let Some(oldest) = oldest {
                self.peers.remove(&oldest);
            }
        }
        let peer = self.endpoint.connect(address)?;
        self.peers.insert(address.clone(), (peer.clone(), use_number));
        Ok(peer)
    }
}

impl fmt::Debug for ClientEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientEndpoint").field("config", &self.config).finish_non_exhaustive()
    }
}
