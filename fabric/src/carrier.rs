//! What carries our operations: libfabric, or the double in memory. One name for each object that the rest of this crate uses,
//! whichever it is.

use crate::{
    Access, FabricAddress, FabricError, Provider, double,
    raw::{self, Completion, Order, Piece, Source, WaitObject},
};
use std::{os::fd::RawFd, sync::Arc};

/// The space in which keys are valid.
pub(crate) enum Domain {
    Library(Arc<raw::Domain>),
    Double(double::Domain),
}

impl Domain {
    pub(crate) fn open(provider: &Provider, source: &Source) -> Result<Self, FabricError> {
        match provider.network() {
            None => Ok(Self::Library(Arc::new(raw::Domain::open(raw::discover(provider.name(), source)?)?))),
            Some(network) => Ok(Self::Double(network.open_domain())),
        }
    }

    /// Registers `length` bytes at `start`, which the caller keeps mapped until the registration *and* every endpoint of this
    /// domain are closed.
    pub(crate) fn register(
        &self,
        start: *mut u8,
        length: usize,
        access: Access,
        key: u64,
    ) -> Result<Region, FabricError> {
        match self {
            Self::Library(domain) => domain.register(start, length, access.flags(), key).map(Region::Library),
            Self::Double(domain) => domain.register(start, length, access, key).map(Region::Double),
        }
    }

    /// How many operations the provider queues.
    pub(crate) fn transmit_depth(&self) -> usize {
        match self {
            Self::Library(domain) => domain.info.transmit_depth(),
            Self::Double(_) => double::DEPTH,
        }
    }

    /// Local pieces that one operation may have.
    pub(crate) fn pieces_max(&self) -> usize {
        match self {
            Self::Library(domain) => domain.info.pieces_max(),
            Self::Double(_) => crate::PIECES_MAX,
        }
    }

    /// Whether peers address memory by virtual address rather than by offset.
    pub(crate) fn virtual_addresses(&self) -> bool {
        match self {
            Self::Library(domain) => domain.info.virtual_addresses(),
            Self::Double(_) => false,
        }
    }
}

/// A memory region known to a domain; closed when dropped.
pub(crate) enum Region {
    Library(raw::Region),
    Double(double::Region),
}

impl Region {
    /// The key that peers name.
    pub(crate) fn key(&self) -> u64 {
        match self {
            Self::Library(region) => region.key(),
            Self::Double(region) => region.key(),
        }
    }

    /// What local operations name; it means something while the region is open.
    pub(crate) fn descriptor(&self) -> usize {
        match self {
            Self::Library(region) => region.descriptor(),
            Self::Double(_) => 0,
        }
    }
}

/// An enabled endpoint with its queue.
pub(crate) enum Wires {
    Library(raw::Wires),
    Double(double::Wires),
}

impl Wires {
    pub(crate) fn open(domain: &Domain, source: &Source) -> Result<Self, FabricError> {
        match domain {
            Domain::Library(domain) => {
                raw::Wires::open(Arc::clone(domain), source, WaitObject::Descriptor).map(Self::Library)
            }
            Domain::Double(domain) => domain.open_wires(source).map(Self::Double),
        }
    }

    /// The descriptor that becomes readable when there is something to do, after a [`may_sleep`](Self::may_sleep).
    pub(crate) fn descriptor(&self) -> RawFd {
        match self {
            Self::Library(wires) => wires.descriptor(),
            Self::Double(wires) => wires.descriptor(),
        }
    }

    pub(crate) fn address(&self) -> Result<FabricAddress, FabricError> {
        match self {
            Self::Library(wires) => wires.address(),
            Self::Double(wires) => Ok(wires.address()),
        }
    }

    /// Makes a peer known; `address` was checked to be of our kind.
    pub(crate) fn insert(&self, address: &FabricAddress) -> Result<u64, FabricError> {
        match self {
            Self::Library(wires) => wires.insert(address),
            Self::Double(wires) => Ok(wires.insert(address)),
        }
    }

    pub(crate) fn remove(&self, peer: u64) {
        match self {
            Self::Library(wires) => wires.remove(peer),
            Self::Double(wires) => wires.remove(peer),
        }
    }

    /// Hands an operation over; 0, or a negative error number (then nothing was begun).
    ///
    /// The caller keeps the local memory, its regions and the context until the completion, or until the endpoint is closed.
    pub(crate) fn post(&self, order: &Order, pieces: impl Iterator<Item = Piece>) -> i32 {
        match self {
            Self::Library(wires) => wires.post(order, pieces),
            Self::Double(wires) => wires.post(order, pieces),
        }
    }

    /// Makes progress and takes a batch of completions.
    pub(crate) fn progress(&self) -> Completions {
        match self {
            Self::Library(wires) => Completions::Library(wires.progress()),
            Self::Double(wires) => Completions::Double(wires.progress().into_iter()),
        }
    }

    /// Whether one may wait for the descriptor; if not, there is something to do already.
    pub(crate) fn may_sleep(&self) -> bool {
        match self {
            Self::Library(wires) => wires.may_sleep(),
            Self::Double(wires) => wires.may_sleep(),
        }
    }

    /// Closes the endpoint; then takes the completions that were on their way. On an error the endpoint is still open.
    pub(crate) fn close(self, late: &mut Vec<Completion>) -> Result<(), FabricError> {
        match self {
            Self::Library(wires) => wires.close(late),
            Self::Double(wires) => {
                late.extend(wires.close());
                Ok(())
            }
        }
    }
}

/// What one look at a queue found.
#[expect(clippy::large_enum_variant, reason = "the large one is the one of production, and short-lived")]
pub(crate) enum Completions {
    Library(raw::Completions),
    Double(std::vec::IntoIter<Completion>),
}

impl Iterator for Completions {
    type Item = Completion;

    fn next(&mut self) -> Option<Completion> {
        match self {
            Self::Library(completions) => completions.next(),
            Self::Double(completions) => completions.next(),
        }
    }
}
