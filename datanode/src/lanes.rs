//! Lanes: the endpoints through which writers reach this node's memory.
//!
//! Carries out what [`crate::claims`] decided. A lane is an endpoint in a libfabric domain of its own with its write regions, because a key is
//! valid on every endpoint of its domain, and because closing a write region does not stop a write that has started: only closing the
//! endpoint does (*Fenced writers*).

use crate::{
    claims::{Closing, LaneId},
    entropy,
};
use quarry_fabric::{Access, Endpoint, EndpointConfig, FabricError, Memory, Registration};
use quarry_wire::ids::GrantId;
use std::{collections::BTreeMap, ops::Range, sync::Arc};

/// How often a key that is taken is drawn again. One repeat in 2^64 draws is already unlikely.
const KEY_DRAWS: usize = 4;

/// What a writer needs to reach its slab.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct WriteRegion {
    /// Address of the lane's endpoint.
    pub(crate) address: Vec<u8>,
    /// The key that its writes must carry.
    pub(crate) key: u64,
    /// Remote address of slot 0.
    pub(crate) base: u64,
}

/// The open lanes.
pub(crate) struct Lanes {
    config: EndpointConfig,
    open: BTreeMap<LaneId, Lane>,
}

struct Lane {
    endpoint: Endpoint,
    writes: BTreeMap<GrantId, Registration>,
}

impl Lanes {
    pub(crate) fn new(config: EndpointConfig) -> Self {
        Self { config, open: BTreeMap::new() }
    }

    /// Closes what must be closed. When it returns, no byte lands through any of it.
    pub(crate) fn carry_out(&mut self, closing: &Closing) {
        for id in &closing.lanes {
            if let Some(lane) = self.open.remove(id) {
                lane.endpoint.close();
                tracing::debug!(lane = id.0, "lane closed");
            }
        }
        for (lane, grant) in &closing.claims {
            if let Some(registration) = self.open.get_mut(lane).and_then(|lane| lane.writes.remove(grant)) {
                registration.close();
            }
        }
    }

    pub(crate) fn open(&mut self, lane: LaneId) -> Result<(), FabricError> {
        let endpoint = Endpoint::open(self.config.clone())?;
        tracing::debug!(lane = lane.0, address = %endpoint.address(), "lane opened");
        self.open.insert(lane, Lane { endpoint, writes: BTreeMap::new() });
        Ok(())
    }

    /// Opens a write region over `span` of `memory` on an open lane, under a random key.
    pub(crate) fn lend(
        &mut self,
        lane: LaneId,
        grant: GrantId,
        memory: &Arc<Memory>,
        span: Range<usize>,
    ) -> Result<WriteRegion, FabricError> {
        let on = self.open.get_mut(&lane).ok_or(FabricError::Closed { what: "lane" })?;
        let registration = register(&on.endpoint, memory, span, Access::RemoteWrite)?;
        let region = describe(&on.endpoint, &registration);
        on.writes.insert(grant, registration);
        Ok(region)
    }

    /// Bytes of all write regions.
    pub(crate) fn registered_bytes(&self) -> u64 {
        self.open.values().flat_map(|lane| lane.writes.values()).map(|write| write.len() as u64).sum()
    }

    /// The write region that was opened for `grant`.
    pub(crate) fn lent(&self, lane: LaneId, grant: GrantId) -> Option<WriteRegion> {
        let on = self.open.get(&lane)?;
        Some(describe(&on.endpoint, on.writes.get(&grant)?))
    }
}

fn describe(endpoint: &Endpoint, registration: &Registration) -> WriteRegion {
    WriteRegion { address: endpoint.address().as_bytes().to_vec(), key: registration.key(), base: registration.base() }
}

/// Registers under a random key, for peers.
pub(crate) fn register(
    endpoint: &Endpoint,
    memory: &Arc<Memory>,
    range: Range<usize>,
    access: Access,
) -> Result<Registration, FabricError> {
    let mut last = None;
    for _ in 0..KEY_DRAWS {
        match endpoint.register(memory, range.clone(), access, Some(entropy::key())) {
            Err(error @ FabricError::KeyInUse { .. }) => last = Some(error),
            other => return other,
        }
    }
    Err(last.expect("only a key in use goes round"))
}
