//! Ranges of memory that an endpoint's domain knows: by key to peers, by descriptor to our own operations.
//!
//! Decides how a registration ends: `close` and drop stop *new* operations; the fence is the endpoint. The memory stays mapped,
//! since the registration holds it, and for remotely accessible memory the endpoint does too.

use crate::{
    FabricError, Memory, Pool, Span,
    carrier::{Domain, Region},
    pieces::Pieces,
    raw,
};
use libfabric_sys::flags;
use parking_lot::Mutex;
use std::{any::Any, fmt, ops::Range, sync::Arc};

/// What a registration allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// Peers may read.
    RemoteRead,
    /// Peers may write.
    RemoteWrite,
    /// Our own operations may read into it and write from it; peers may do nothing.
    Local,
}

impl Access {
    pub(crate) fn flags(self) -> u64 {
        match self {
            Self::RemoteRead => flags::REMOTE_READ,
            Self::RemoteWrite => flags::REMOTE_WRITE,
            Self::Local => flags::READ | flags::WRITE,
        }
    }
}

/// A registered range. Closed when dropped.
pub struct Registration {
    // Closed before the memory and the domain may go: fields drop in this order.
    region: Mutex<Option<Region>>,
    /// What local operations name, valid while the region is open.
    descriptor: usize,
    memory: Arc<Memory>,
    domain: Arc<Domain>,
    range: Range<usize>,
    access: Access,
    key: u64,
    base: u64,
}

impl Registration {
    pub(crate) fn new(
        domain: &Arc<Domain>,
        memory: &Arc<Memory>,
        range: Range<usize>,
        access: Access,
        key: u64,
    ) -> Result<Self, FabricError> {
        let length = memory.len();
        if range.start > range.end || range.end > length {
            return Err(FabricError::OutOfRange { start: range.start, end: range.end, length });
        }
        if range.is_empty() {
            return Err(FabricError::Empty { what: "a registration" });
        }
        let start = memory.start().wrapping_add(range.start);
        let region = domain.register(start, range.len(), access, key)?;
        let base = if domain.virtual_addresses() { start.addr() as u64 } else { 0 };
        Ok(Self {
            key: region.key(),
            descriptor: region.descriptor(),
            region: Mutex::new(Some(region)),
            memory: Arc::clone(memory),
            domain: Arc::clone(domain),
            range,
            access,
            base,
        })
    }

    /// The key that peers name. The one that was asked for where the provider lets us choose (`net`, `tcp`), its own otherwise.
    #[must_use]
    pub fn key(&self) -> u64 {
        self.key
    }

    /// What peers add to an offset into this range to get a [`RemoteSpan::address`]: 0, or a virtual address.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Length of the range in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// What it allows.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// The memory behind it.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The span of this range that peers name, for `offset..offset + len`.
    ///
    /// # Errors
    /// [`FabricError::OutOfRange`].
    pub fn remote_span(&self, range: Range<usize>) -> Result<RemoteSpan, FabricError> {
        self.check(&range)?;
        Ok(RemoteSpan { address: self.base + range.start as u64, key: self.key, len: range.len() as u64 })
    }

    /// Stops new remote operations: when it returns, this key is refused. One that has started goes on; only closing the endpoint
    /// stops that. Does nothing for [`Access::Local`], which our own operations may be using: that ends on drop.
    pub fn close(&self) {
        if self.access != Access::Local {
            self.region.lock().take();
        }
    }

    /// Whether [`close`](Self::close) was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.region.lock().is_none()
    }

    pub(crate) fn belongs_to(&self, domain: &Arc<Domain>) -> bool {
        Arc::ptr_eq(&self.domain, domain)
    }

    fn check(&self, range: &Range<usize>) -> Result<(), FabricError> {
        if range.start > range.end || range.end > self.range.len() {
            let (start, end) = (range.start, range.end);
            return Err(FabricError::OutOfRange { start, end, length: self.range.len() });
        }
        Ok(())
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key is a secret of those who may use it.
        f.debug_struct("Registration").field("range", &self.range).field("access", &self.access).finish_non_exhaustive()
    }
}

/// A pool as one endpoint knows it: for local use, and only through its spans. Closed when dropped.
#[derive(Debug, Clone)]
pub struct PoolRegistration {
    // Not to be given out: whoever has it could use memory that others have borrowed.
    registration: Arc<Registration>,
    pool: Arc<Pool>,
}

impl PoolRegistration {
    pub(crate) fn new(domain: &Arc<Domain>, pool: &Arc<Pool>, key: u64) -> Result<Self, FabricError> {
        let memory = pool.memory();
        let registration = Registration::new(domain, memory, 0..memory.len(), Access::Local, key)?;
        Ok(Self { registration: Arc::new(registration), pool: Arc::clone(pool) })
    }

    /// The bytes `range` of the span, for one operation, which holds the span until it has completed or its endpoint is closed.
    ///
    /// # Errors
    /// [`FabricError::OutOfRange`], [`FabricError::WrongPool`].
    pub fn local_span(&self, span: &Arc<Span>, range: Range<usize>) -> Result<LocalSpan, FabricError> {
        if !Arc::ptr_eq(&self.pool, span.pool()) {
            return Err(FabricError::WrongPool);
        }
        let range = span.place(&range)?;
        Ok(LocalSpan {
            registration: Arc::clone(&self.registration),
            range,
            _span: Some(Arc::clone(span)),
            _guard: None,
        })
    }
}

/// Local bytes of an operation: a part of a registration with [`Access::Local`], or of a pool's span.
///
/// The operation holds it until it has completed or its endpoint is closed, whatever happens to its future.
#[derive(Clone)]
pub struct LocalSpan {
    pub(crate) registration: Arc<Registration>,
    pub(crate) range: Range<usize>,
    /// Keeps everybody else from its bytes.
    _span: Option<Arc<Span>>,
    /// Only to be dropped, when the buffer is free again.
    _guard: Option<Arc<dyn Any + Send + Sync>>,
}

impl LocalSpan {
    /// The bytes `range`, counted from the start of the registration.
    ///
    /// # Errors
    /// [`FabricError::OutOfRange`], [`FabricError::NotLocal`].
    pub fn new(registration: &Arc<Registration>, range: Range<usize>) -> Result<Self, FabricError> {
        registration.check(&range)?;
        if registration.access != Access::Local {
            return Err(FabricError::NotLocal { found: registration.access });
        }
        Ok(Self { registration: Arc::clone(registration), range, _span: None, _guard: None })
    }

    /// Also holds `guard` for as long, for instance to learn when the buffer is free.
    #[must_use]
    pub fn guarded_by(self, guard: Arc<dyn Any + Send + Sync>) -> Self {
        Self { _guard: Some(guard), ..self }
    }

    pub(crate) fn held(
        registration: &Arc<Registration>,
        range: Range<usize>,
        span: Option<Arc<Span>>,
    ) -> Result<Self, FabricError> {
        Ok(Self { _span: span, ..Self::new(registration, range)? })
    }

    /// As libfabric wants it.
    pub(crate) fn piece(&self) -> raw::Piece {
        let start = self.registration.memory.start().wrapping_add(self.registration.range.start + self.range.start);
        // A local registration is not closed before it is dropped.
        raw::Piece { start, length: self.range.len(), descriptor: self.registration.descriptor }
    }
}

impl Pieces<LocalSpan> {
    pub(crate) fn bytes(&self) -> u64 {
        self.iter().map(|piece| piece.range.len() as u64).sum()
    }
}

impl fmt::Debug for LocalSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalSpan").field("range", &self.range).finish_non_exhaustive()
    }
}

/// Bytes of a peer: as its owner told us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteSpan {
    /// The owner's base plus an offset.
    pub address: u64,
    /// The key of the registration.
    pub key: u64,
    /// Bytes to move; the same as the local span's length.
    pub len: u64,
}
