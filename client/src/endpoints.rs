//! Fabric endpoints: per data node one for writes and one for reads, opened at their first use.
//!
//! Decides which endpoint an operation uses and which nodes are avoided for a while after they failed. Writes and reads are apart because a
//! refused write tears down its connection; nodes are apart because a silent one closes the endpoint for all who use it.

use crate::stats::Counters;
use parking_lot::Mutex;
use quarry_fabric::{
    ClientEndpoint, EndpointConfig, FabricAddress, FabricError, LocalBuffer, OperationError, Pieces, Pool, Provider,
    RemoteSpan, Wait,
};
use quarry_wire::{
    ids::{NodeId, RegionEpoch},
    region::RegionRecord,
};
use std::{
    collections::{BTreeSet, HashMap},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    sync::Arc,
    time::Duration,
};
use tokio::time::Instant;

/// A node that failed is not chosen for this long if there is another.
const AVOIDED_FOR: Duration = Duration::from_secs(2);
/// For reads, which have other copies, that time doubles with each failure in a row, up to this.
const AVOIDED_LONGEST: Duration = Duration::from_secs(16);

/// The one and the other direction.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Direction {
    Write,
    Read,
}

#[derive(Debug)]
pub(crate) struct Endpoints {
    provider: Provider,
    /// The local address to use, or the one that leads to each peer.
    bind: Option<IpAddr>,
    write_window: Arc<Pool>,
    /// The pools that are read into: the client's own, and those of readers.
    readers: Mutex<Vec<Arc<Pool>>>,
    counters: Arc<Counters>,
    open: Mutex<HashMap<(NodeId, Direction), Arc<ClientEndpoint>>>,
    failed: Mutex<HashMap<NodeId, Failed>>,
    /// How many slabs are armed through each lane.
    lanes: Mutex<HashMap<(NodeId, FabricAddress), usize>>,
}

/// A node that failed lately.
#[derive(Clone, Copy, Debug)]
struct Failed {
    last: Instant,
    /// Failures without a success since, counted once per time that it was avoided.
    in_a_row: u32,
}

impl Failed {
    fn avoided_until(&self, direction: Direction) -> Instant {
        let doublings = match direction {
            Direction::Write => 0,
            Direction::Read => self.in_a_row.saturating_sub(1).min(8),
        };
        self.last + AVOIDED_FOR.saturating_mul(1 << doublings).min(AVOIDED_LONGEST)
    }
}

/// The remote side of a write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<'a> {
    pub(crate) node: NodeId,
    pub(crate) address: &'a FabricAddress,
    pub(crate) provider: &'a str,
    /// Remote address of the first byte.
    pub(crate) at: u64,
    pub(crate) key: u64,
}

/// A region to read from.
#[derive(Debug)]
pub(crate) struct Source {
    node: NodeId,
    /// Of the record that says so.
    pub(crate) epoch: RegionEpoch,
    endpoint: Arc<ClientEndpoint>,
    address: FabricAddress,
    /// Remote address of the region's first byte.
    base: u64,
    key: u64,
}

impl Endpoints {
    pub(crate) fn new(
        provider: Provider,
        bind: Option<IpAddr>,
        write_window: Arc<Pool>,
        readers: [Arc<Pool>; 2],
        counters: Arc<Counters>,
    ) -> Self {
        let readers = Mutex::new(readers.into());
        Self {
            provider,
            bind,
            write_window,
            readers,
            counters,
            open: Mutex::default(),
            failed: Mutex::default(),
            lanes: Mutex::default(),
        }
    }

    /// Writes `pieces`, which have `bytes` bytes in all, to the target; on `Ok` they are visible there. Whether a failure is the node's fault
    /// is the caller's to find out: its lane may have been closed.
    pub(crate) async fn write(
        &self,
        target: &Target<'_>,
        pieces: &Pieces<LocalBuffer>,
        bytes: usize,
        wait: Wait,
    ) -> Result<(), OperationError> {
        let bytes = bytes as u64;
        let (local, remote) = (pieces.clone(), RemoteSpan { address: target.at, key: target.key, len: bytes });
        let outcome = match self.endpoint(target.node, target.address, target.provider, Direction::Write) {
            Ok(endpoint) => endpoint.write(target.address, local, remote, wait).await,
            Err(error) => Err(error.into()),
        };
        if outcome.is_ok() {
            self.failed.lock().remove(&target.node);
            self.counters.writes.add(1);
            self.counters.written_bytes.add(bytes);
        }
        outcome
    }

    /// How to read the region that `record` is about.
    pub(crate) fn source(&self, record: &RegionRecord) -> Result<Source, FabricError> {
        let (node, address) = (record.region.node, FabricAddress::from_bytes(record.address.as_bytes())?);
        let endpoint = self.endpoint(node, &address, &record.provider, Direction::Read)?;
        Ok(Source { node, epoch: record.epoch, endpoint, address, base: record.base, key: record.read_key })
    }

    /// Reads `bytes` bytes at `offset` of the source's region into `local`, which has as many. What they are worth is not known yet.
    pub(crate) async fn read(
        &self,
        source: &Source,
        offset: u64,
        bytes: u64,
        local: Pieces<LocalBuffer>,
        wait: Wait,
    ) -> Result<(), OperationError> {
        let remote = RemoteSpan { address: source.base + offset, key: source.key, len: bytes };
        let outcome = source.endpoint.read(&source.address, local, remote, wait).await;
        if outcome.is_ok() {
            self.failed.lock().remove(&source.node);
            self.counters.reads.add(1);
            self.counters.read_bytes.add(bytes);
        } else {
            self.counters.failures.add(1);
            self.has_failed(source.node);
        }
        outcome
    }

    /// Registers a reader's own pool at every endpoint that reads, also at those that are opened later.
    pub(crate) fn keep_pool(&self, pool: &Arc<Pool>) {
        let mut readers = self.readers.lock();
        readers.push(Arc::clone(pool));
        for endpoint in self.all_readers() {
            endpoint.keep_pool(pool);
        }
    }

    /// Undoes [`keep_pool`](Self::keep_pool).
    pub(crate) fn forget_pool(&self, pool: &Arc<Pool>) {
        let mut readers = self.readers.lock();
        readers.retain(|kept| !Arc::ptr_eq(kept, pool));
        for endpoint in self.all_readers() {
            endpoint.forget_pool(pool);
        }
    }

    fn all_readers(&self) -> Vec<Arc<ClientEndpoint>> {
        let open = self.open.lock();
        open.iter().filter(|((_, direction), _)| *direction == Direction::Read).map(|(_, it)| Arc::clone(it)).collect()
    }

    /// Avoids a node for a while.
    pub(crate) fn has_failed(&self, node: NodeId) {
        let now = Instant::now();
        let mut failed = self.failed.lock();
        let entry = failed.entry(node).or_insert(Failed { last: now, in_a_row: 0 });
        // Operations that were under way together fail together.
        if entry.in_a_row == 0 || now >= entry.avoided_until(Direction::Read) {
            entry.in_a_row = entry.in_a_row.saturating_add(1);
        }
        entry.last = now;
    }

    /// What failed had a reason that is gone.
    pub(crate) fn forgive(&self, node: NodeId) {
        self.failed.lock().remove(&node);
    }

    /// Nodes to avoid now.
    pub(crate) fn avoided(&self, direction: Direction) -> BTreeSet<NodeId> {
        let now = Instant::now();
        let failed = self.failed.lock();
        failed.iter().filter(|(_, failed)| now < failed.avoided_until(direction)).map(|(node, _)| *node).collect()
    }

    /// A slab was armed through this lane.
    pub(crate) fn use_lane(&self, node: NodeId, lane: &FabricAddress) {
        *self.lanes.lock().entry((node, lane.clone())).or_default() += 1;
    }

    /// Undoes [`use_lane`](Self::use_lane). The connection to a lane that no slab is armed through is given up: a new one begins slowly, so
    /// it is not for each slab.
    pub(crate) fn leave_lane(&self, node: NodeId, lane: &FabricAddress) {
        let unused = {
            let mut lanes = self.lanes.lock();
            let name = (node, lane.clone());
            let uses = lanes.get_mut(&name).map_or(0, |uses| {
                *uses -= 1;
                *uses
            });
            uses == 0 && lanes.remove(&name).is_some()
        };
        if unused {
            self.forget_lane(node, lane);
        }
    }

    /// Forgets a lane that is no more.
    pub(crate) fn forget_lane(&self, node: NodeId, lane: &FabricAddress) {
        let endpoint = self.open.lock().get(&(node, Direction::Write)).cloned();
        if let Some(endpoint) = endpoint {
            endpoint.disconnect(lane);
        }
    }

    pub(crate) fn close(&self) {
        let all: Vec<_> = self.open.lock().drain().map(|(_, endpoint)| endpoint).collect();
        for endpoint in all {
            endpoint.close();
        }
    }

    fn endpoint(
        &self,
        node: NodeId,
        address: &FabricAddress,
        provider: &str,
        direction: Direction,
    ) -> Result<Arc<ClientEndpoint>, FabricError> {
        // In this order everywhere, so that no endpoint misses a pool that is registered at the same time.
        let readers = self.readers.lock();
        let mut open = self.open.lock();
        if let Some(endpoint) = open.get(&(node, direction)) {
            return Ok(Arc::clone(endpoint));
        }
        let config = EndpointConfig {
            provider: self.provider_for(provider)?,
            bind: self.bind.or_else(|| address.ip().and_then(local_address_towards)).unwrap_or(LOOPBACK),
            port: None,
            spin: EndpointConfig::SPIN,
        };
        let endpoint = Arc::new(ClientEndpoint::new(config));
        match direction {
            Direction::Write => endpoint.keep_pool(&self.write_window),
            Direction::Read => readers.iter().for_each(|pool| endpoint.keep_pool(pool)),
        }
        open.insert((node, direction), Arc::clone(&endpoint));
        Ok(endpoint)
    }

    /// `net` and `tcp` are one provider, renamed with libfabric 1.18: each side names it as its own library does.
    fn provider_for(&self, named: &str) -> Result<Provider, FabricError> {
        let sockets = ["net", "tcp"];
        let same = named == self.provider.name() || sockets.contains(&named) && sockets.contains(&self.provider.name());
        if same { Ok(self.provider.clone()) } else { Provider::named(named) }
    }
}

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// The address of this host from which packets to `peer` would go. Nothing is sent.
fn local_address_towards(peer: IpAddr) -> Option<IpAddr> {
    let any = if peer.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    // The port does not matter: connecting a datagram socket only chooses a route.
    socket.connect((peer, 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}
