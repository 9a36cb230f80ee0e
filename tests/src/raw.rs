//! A writer and reader by hand: grant, arm, `fi_write`, commit, resolve, `fi_read`, each a step that a test can leave out, repeat or forge.

use crate::{
    calls::{self, Answer, at_leader, id_bytes},
    cluster::SHARD,
    seed,
    wait::soon,
};
use bytes::Bytes;
use quarry_fabric::{
    ClientEndpoint, EndpointConfig, FabricAddress, LocalBuffer, Memory, OperationError, Provider, RemoteSpan,
};
use quarry_proto::{convert, v1};
use quarry_wire::{
    frame::{self, FrameHeader, FrameKind},
    grant::Grant,
    ids::{GrantId, Incarnation, NamespaceId, NodeId, RegionId, SlotIndex, WriterId},
    key::Key,
    region::RegionRecord,
    signed::Signed,
    version::{HybridClock, Version},
};
use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
    path::Path,
    sync::Arc,
    time::Duration,
};
use tokio::time::Instant;

/// Longest time for one operation that should succeed.
pub const OPERATION: Duration = Duration::from_secs(10);

/// Somebody who writes and reads by hand.
pub struct RawWriter {
    /// Who it says that it is.
    pub id: WriterId,
    metas: Vec<String>,
    nodes: BTreeMap<NodeId, String>,
    writes: ClientEndpoint,
    reads: ClientEndpoint,
    clock: HybridClock,
}

/// What is asked of a grant.
#[derive(Clone, Debug)]
pub struct Wish {
    /// Of the slab.
    pub namespace: NamespaceId,
    /// Header included.
    pub slot_size: u32,
    /// How many.
    pub slots: u32,
    /// How long the writer may write; zero: the longest.
    pub ttl: Duration,
    /// Nodes not to be chosen.
    pub avoid: Vec<NodeId>,
}

/// A grant, and its signed bytes as they came.
#[derive(Clone, Debug)]
pub struct Granted {
    /// Checked nowhere here.
    pub grant: Grant,
    /// What Arm is given.
    pub bytes: Bytes,
}

/// Where a holder lets us write.
#[derive(Clone, Debug)]
pub struct Armed {
    /// Our lane.
    pub lane: FabricAddress,
    /// Its write key.
    pub key: u64,
    /// Remote address of slot 0.
    pub base: u64,
}

/// A frame, ready to be written, and the entry that commits it.
#[derive(Clone, Debug)]
pub struct Framed {
    /// Header and payload.
    pub bytes: Vec<u8>,
    /// For Commit.
    pub entry: v1::CommitEntry,
    /// Of the value.
    pub version: Version,
}

/// The fabric endpoint of tests.
///
/// # Panics
/// If this host has no provider.
#[must_use]
pub fn endpoint() -> ClientEndpoint {
    let provider = Provider::detect().expect("this host has a libfabric provider");
    ClientEndpoint::new(EndpointConfig {
        provider,
        bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
        port: None,
        spin: Duration::ZERO,
    })
}

/// The wall clock, for versions.
#[expect(clippy::disallowed_methods, reason = "the one place where tests look at the wall clock")]
fn wall_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    u64::try_from(since.expect("it is after 1970").as_millis()).expect("milliseconds since 1970 fit in 64 bits")
}

impl RawWriter {
    /// A writer with an id of its own.
    ///
    /// # Panics
    /// If no meta node answers.
    pub async fn connect(cluster_file: &Path) -> Self {
        let file = quarry_client::Cluster::from_file(cluster_file).expect("the cluster file is a cluster file");
        let trust = file.trust().expect("its credentials are there");
        calls::know(file.metas.clone(), &trust);
        let id = trust.writer(seed::random().to_le_bytes());
        let (writes, reads) = (endpoint(), endpoint());
        let mut raw =
            Self { id, metas: file.metas, nodes: BTreeMap::new(), writes, reads, clock: HybridClock::default() };
        let known = raw.describe().await.changes.unwrap_or_default().data_nodes;
        calls::know(known.iter().map(|it| it.address.clone()), &trust);
        raw.nodes = known.into_iter().map(|it| (NodeId(it.node), it.address)).collect();
        raw
    }

    /// What the first meta node that answers knows.
    ///
    /// # Panics
    /// If none answers.
    pub async fn describe(&self) -> v1::DescribeReply {
        for meta in &self.metas {
            if let Ok(reply) = calls::describe(meta).await {
                return reply;
            }
        }
        panic!("no meta node answers");
    }

    /// host:port of a data node.
    ///
    /// # Panics
    /// If it was not known when this writer connected.
    #[must_use]
    pub fn address(&self, node: NodeId) -> &str {
        &self.nodes[&node]
    }

    /// host:port of the meta nodes.
    #[must_use]
    pub fn metas(&self) -> &[String] {
        &self.metas
    }

    /// Asks this meta node nothing more: it is stopped, and each question would wait for it in vain.
    pub fn pass_over(&mut self, meta: &str) {
        self.metas.retain(|known| known != meta);
    }

    /// The newest region record of a region, once there is one.
    pub async fn record(&self, region: RegionId) -> RegionRecord {
        soon("the region is recorded", async || {
            let changes = self.describe().await.changes?;
            let records = changes.records.iter().map(|bytes| {
                Signed::<RegionRecord>::decode(bytes).expect("a meta node passes on whole records").statement
            });
            records.filter(|record| record.region == region).max_by_key(|it| (it.incarnation, it.epoch))
        })
        .await
    }

    /// A request of this shard that nobody made before.
    pub async fn request(&self) -> v1::RequestId {
        self.request_and_seen().await.0
    }

    /// A request that nobody made before, and the feed number that a shard must have seen to know what we know.
    async fn request_and_seen(&self) -> (v1::RequestId, Option<v1::Ordinal>) {
        let reply = self.describe().await;
        let applied_ms = reply.groups.iter().find(|it| it.group == SHARD).map_or(0, |it| it.applied_ms);
        (v1::RequestId { applied_ms, random: seed::random() }, reply.changes.and_then(|changes| changes.at))
    }

    /// Asks for a grant.
    ///
    /// # Errors
    /// What the shard's leader refuses.
    pub async fn grant(&self, wish: &Wish) -> Answer<Granted> {
        let (request, seen) = self.request_and_seen().await;
        let request = v1::GrantRequest {
            shard: SHARD,
            request: Some(request),
            writer: id_bytes(self.id.0),
            namespace: wish.namespace.0,
            slot_size: wish.slot_size,
            slots: wish.slots,
            ttl_ms: u32::try_from(wish.ttl.as_millis()).expect("a TTL is short"),
            avoid: wish.avoid.iter().map(|node| node.0).collect(),
            seen,
        };
        let reply = at_leader(&self.metas, |mut control| {
            let request = request.clone();
            async move { calls::done(control.grant(request)).await }
        })
        .await?;
        let grant = Signed::<Grant>::decode(&reply.grant).expect("a leader sends whole grants").statement;
        Ok(Granted { grant, bytes: reply.grant })
    }

    /// Arms a grant at a holder.
    ///
    /// # Errors
    /// What the holder refuses.
    pub async fn arm(&self, node: NodeId, granted: &Granted) -> Answer<Armed> {
        let request = v1::ArmRequest { grant: granted.bytes.clone(), writer: id_bytes(self.id.0) };
        let reply = calls::done(calls::data_node(self.address(node)).await?.arm(request)).await?;
        let lane = FabricAddress::from_bytes(&reply.lane_address).expect("a lane has an address");
        Ok(Armed { lane, key: reply.write_key, base: reply.base })
    }

    /// Arms a grant at all its holders.
    ///
    /// # Panics
    /// If one refuses.
    pub async fn arm_all(&self, granted: &Granted) -> BTreeMap<NodeId, Armed> {
        let mut armed = BTreeMap::new();
        for holder in &granted.grant.holders {
            let node = holder.region.node;
            armed.insert(node, self.arm(node, granted).await.expect("a new grant can be armed"));
        }
        armed
    }

    /// Writes `bytes` at `offset` from slot 0.
    ///
    /// # Errors
    /// What the fabric says.
    pub async fn write(&self, armed: &Armed, offset: u64, bytes: &[u8]) -> Result<(), OperationError> {
        self.write_to(&armed.lane, armed.key, armed.base + offset, bytes, OPERATION).await
    }

    /// Writes `bytes` to any address under any key.
    ///
    /// # Errors
    /// What the fabric says.
    pub async fn write_to(
        &self,
        peer: &FabricAddress,
        key: u64,
        address: u64,
        bytes: &[u8],
        within: Duration,
    ) -> Result<(), OperationError> {
        let local = local(bytes)?;
        let remote = RemoteSpan { address, key, len: bytes.len() as u64 };
        self.writes.write(peer, local, remote, Instant::now() + within).await
    }

    /// Reads from any address under any key.
    ///
    /// # Errors
    /// What the fabric says.
    pub async fn read_from(
        &self,
        peer: &FabricAddress,
        key: u64,
        address: u64,
        length: usize,
    ) -> Result<Vec<u8>, OperationError> {
        let memory = Memory::allocate(length)?;
        let remote = RemoteSpan { address, key, len: length as u64 };
        self.reads.read(peer, LocalBuffer::new(&memory, 0..length), remote, Instant::now() + OPERATION).await?;
        Ok(memory.copy_to_vec(0, length)?)
    }

    /// Reads a span of a region by its record.
    ///
    /// # Errors
    /// What the fabric says.
    pub async fn read(&self, record: &RegionRecord, offset: u64, length: usize) -> Result<Vec<u8>, OperationError> {
        self.read_from(&reader(record), record.read_key, record.base + offset, length).await
    }

    /// The frame of a value in `slot` of a grant.
    ///
    /// # Panics
    /// If the key cannot be one.
    pub fn frame(&mut self, granted: &Granted, slot: u32, key: &str, payload: &[u8]) -> Framed {
        self.clock = self.clock.next(wall_ms());
        self.frame_at(self.clock, granted, slot, key, payload)
    }

    /// The same of a version of this clock.
    ///
    /// # Panics
    /// If the key cannot be one.
    #[must_use]
    pub fn frame_at(&self, clock: HybridClock, granted: &Granted, slot: u32, key: &str, payload: &[u8]) -> Framed {
        let version = Version { clock, writer: self.id };
        let header = FrameHeader {
            namespace: granted.grant.namespace,
            key: Key::new(key).expect("the test's keys can be keys"),
            version,
            kind: FrameKind::Value,
            payload_bytes: payload.len() as u64,
            payload_crc: crc32c::crc32c(payload),
        };
        let mut bytes = vec![0; header.bytes()];
        header.write_to(&mut bytes);
        bytes.extend_from_slice(payload);
        let entry = v1::CommitEntry {
            slot,
            key: Bytes::copy_from_slice(key.as_bytes()),
            clock: version.clock.0,
            kind: v1::FrameKind::Value.into(),
            payload_bytes: header.payload_bytes,
            payload_crc: header.payload_crc,
            mode: None,
        };
        Framed { bytes, entry, version }
    }

    /// Writes a frame to all holders.
    ///
    /// # Panics
    /// If one of the writes fails.
    pub async fn write_frame(&self, granted: &Granted, armed: &BTreeMap<NodeId, Armed>, frame: &Framed) {
        let offset = u64::from(frame.entry.slot) * u64::from(granted.grant.slot_size.0);
        for armed in armed.values() {
            self.write(armed, offset, &frame.bytes).await.expect("an armed slab can be written");
        }
    }

    /// Commits through one holder.
    ///
    /// # Errors
    /// What the holder or the shard's leader refuses as a whole.
    pub async fn commit(
        &self,
        via: NodeId,
        granted: &Granted,
        written: impl IntoIterator<Item = NodeId>,
        entries: Vec<v1::CommitEntry>,
    ) -> Answer<Vec<v1::CommitOutcome>> {
        let request = v1::CommitRequest {
            grant: Some(granted.grant.id.into()),
            writer: id_bytes(self.id.0),
            written: written.into_iter().map(|node| node.0).collect(),
            entries,
        };
        let reply = calls::done(calls::data_node(self.address(via)).await?.commit(request)).await?;
        Ok(reply.outcomes)
    }

    /// Complains of a copy to its holder.
    ///
    /// # Errors
    /// What the holder refuses.
    pub async fn report_damage(&self, node: NodeId, asked: v1::ReportDamageRequest) -> Answer<v1::ReportDamageReply> {
        calls::done(calls::data_node(self.address(node)).await?.report_damage(asked)).await
    }

    /// Tells a holder that nothing more is written under the grant.
    ///
    /// # Errors
    /// What the holder refuses.
    pub async fn close(&self, node: NodeId, granted: &Granted) -> Answer<v1::CloseReply> {
        let request = v1::CloseRequest { grant: Some(granted.grant.id.into()), writer: id_bytes(self.id.0) };
        calls::done(calls::data_node(self.address(node)).await?.close(request)).await
    }

    /// Seals the grant from slot `fill` on.
    ///
    /// # Errors
    /// What the shard's leader refuses.
    pub async fn seal(&self, granted: &Granted, fill: u32) -> Answer<v1::SealReply> {
        self.seal_id(granted.grant.id, fill).await
    }

    /// Seals a grant of which only the number is known.
    ///
    /// # Errors
    /// What the shard's leader refuses.
    pub async fn seal_id(&self, grant: GrantId, fill: u32) -> Answer<v1::SealReply> {
        let request = v1::SealRequest { grant: Some(grant.into()), fill, writer: id_bytes(self.id.0) };
        at_leader(&self.metas, |mut control| {
            let request = request.clone();
            async move { calls::done(control.seal(request)).await }
        })
        .await
    }

    /// Deletes keys, whatever version they have.
    ///
    /// # Errors
    /// What the shard's leader refuses.
    pub async fn delete(&self, namespace: NamespaceId, keys: &[&str]) -> Answer<v1::DeleteReply> {
        let items =
            keys.iter().map(|key| v1::DeleteItem { key: Bytes::copy_from_slice(key.as_bytes()), expected: None });
        let request = v1::DeleteRequest {
            shard: SHARD,
            request: Some(self.request().await),
            namespace: namespace.0,
            items: items.collect(),
        };
        at_leader(&self.metas, |mut control| {
            let request = request.clone();
            async move { calls::done(control.delete(request)).await }
        })
        .await
    }

    /// Asks where keys are.
    ///
    /// # Errors
    /// What the shard's leader refuses.
    pub async fn resolve(&self, namespace: NamespaceId, keys: &[&str]) -> Answer<v1::ResolveReply> {
        let request = v1::ResolveRequest {
            shard: SHARD,
            namespace: namespace.0,
            keys: keys.iter().map(|key| Bytes::copy_from_slice(key.as_bytes())).collect(),
            lease_ms: 1_000,
            stale: false,
            seen: self.request_and_seen().await.1,
        };
        at_leader(&self.metas, |mut control| {
            let request = request.clone();
            async move { calls::done(control.resolve(request)).await }
        })
        .await
    }

    /// Where the copies of one key lie: region, incarnation and offset of the frame.
    ///
    /// # Panics
    /// If the shard's leader refuses.
    pub async fn copies(&self, namespace: NamespaceId, key: &str) -> Vec<Placed> {
        let reply = self.resolve(namespace, &[key]).await.expect("a resolve of a known namespace is answered");
        let item = reply.items.first().expect("one answer per key");
        let placed = item.copies.iter().map(|copy| {
            let batch = &reply.batches[copy.batch as usize];
            let region: RegionId = batch.region.expect("a batch names its region").into();
            let offset = batch.base + u64::from(copy.slot) * u64::from(batch.slot_size);
            let frame_bytes = frame::header_bytes(key.len()) as u64 + item.payload_bytes;
            Placed {
                region,
                offset,
                frame_bytes: usize::try_from(frame_bytes).expect("a frame fits in memory"),
                slot: SlotIndex(copy.slot),
                incarnation: batch.incarnation.expect("a batch names its incarnation").into(),
                grant: convert::grant_id(batch.grant).expect("a batch names its grant"),
            }
        });
        placed.collect()
    }
}

/// Where one copy lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placed {
    /// The region.
    pub region: RegionId,
    /// Its life.
    pub incarnation: Incarnation,
    /// Of the frame, from the start of the region.
    pub offset: u64,
    /// Header and payload.
    pub frame_bytes: usize,
    /// In its slab.
    pub slot: SlotIndex,
    /// Under which it was written.
    pub grant: GrantId,
}

/// The endpoint that serves reads of a region.
///
/// # Panics
/// If the record's address cannot be one.
#[must_use]
pub fn reader(record: &RegionRecord) -> FabricAddress {
    FabricAddress::from_bytes(record.address.as_bytes()).expect("a record names an address")
}

fn local(bytes: &[u8]) -> Result<LocalBuffer, OperationError> {
    let memory: Arc<Memory> = Memory::allocate(bytes.len())?;
    memory.copy_in(0, bytes)?;
    Ok(LocalBuffer::new(&memory, 0..bytes.len()))
}
