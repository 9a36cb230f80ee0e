//! Readers: the endpoint through which peers read a region, one for each epoch.
//!
//! An epoch ends with its endpoint, not with its key alone: closing a registration turns down reads that begin later, but one that has begun
//! goes on sending whatever the memory holds by then. Closing the endpoint ends that too (*Epochs only grow*).

use crate::lanes;
use quarry_fabric::{Access, Endpoint, EndpointConfig, FabricAddress, FabricError, Memory, Registration};
use std::sync::Arc;

/// An open reader. Its domain has this read key alone, and no lane is in it.
pub(crate) struct Reader {
    endpoint: Endpoint,
    readable: Registration,
}

impl Reader {
    /// Opens a reader over all of `memory` under a random key: at `port` if that is free, so that peers find the next epoch where they found
    /// the last, else at any.
    pub(crate) fn open(
        endpoints: &EndpointConfig,
        memory: &Arc<Memory>,
        port: Option<u16>,
    ) -> Result<Self, FabricError> {
        let open = |port| Endpoint::open(EndpointConfig { port, ..endpoints.clone() });
        let endpoint = match port {
            Some(_) => open(port).or_else(|_| open(None)),
            None => open(None),
        }?;
        let readable = lanes::register(&endpoint, memory, 0..memory.len(), Access::RemoteRead)?;
        Ok(Self { endpoint, readable })
    }

    pub(crate) fn address(&self) -> FabricAddress {
        self.endpoint.address()
    }

    /// What is added to an offset to make a remote address.
    pub(crate) fn base(&self) -> u64 {
        self.readable.base()
    }

    pub(crate) fn key(&self) -> u64 {
        self.readable.key()
    }

    /// Bytes that can be read through it.
    pub(crate) fn bytes(&self) -> u64 {
        self.readable.len() as u64
    }

    /// Ends its epoch: when this returns, no byte leaves through it, and its key opens nothing.
    pub(crate) fn close(self) {
        self.readable.close();
        self.endpoint.close();
    }
}
