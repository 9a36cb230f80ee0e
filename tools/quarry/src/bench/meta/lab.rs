//! The cables of the bench of the control plane: a cluster of its own, and writers that call its servers by raw gRPC.
//!
//! A writer here does what the client does for a slab (grant, arm, write, commit) without what the client adds to it: no cache, no retries.
//! It takes the servers of the cluster that it started itself at their word; nothing here is meant for values that anybody keeps.

use crate::bench::{error::BenchError, stage::Stage};
use bytes::Bytes;
use quarry::{admin::FIRST_SHARD, config::RaftSection, local::Member};
use quarry_fabric::{
    ClientEndpoint, EndpointConfig, FabricAddress, FabricError, LocalBuffer, Memory, OperationError, Provider,
    RemoteSpan,
};
use quarry_proto::{
    protocol::Announce,
    v1::{self, control_client::ControlClient, data_node_client::DataNodeClient},
};
use quarry_trust::{Expect, Trust};
use quarry_wire::{
    frame::{self, FrameHeader, FrameKind},
    grant::Grant,
    ids::{NamespaceId, NodeId, ShardId, WriterId},
    key::Key,
    limits::MESSAGE_BYTES_MAX,
    signed::Signed,
    version::{HybridClock, Version},
};
use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
    path::Path,
    time::Duration,
};
use tokio::time::Instant;
use tonic::{
    Request, Status,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

/// How long a cluster may take to be ready.
const READY: Duration = Duration::from_secs(60);
/// How long any one call or write may take.
const CALL: Duration = Duration::from_secs(20);
/// Memory of each data node: its extents are then of full size.
const REGION_BYTES: u64 = 1 << 30;
/// Bytes of payload in each slot: what is measured here does not depend on them.
pub(in crate::bench) const PAYLOAD_BYTES: usize = 64;
/// Bytes of every key, unless a case says otherwise.
pub(in crate::bench) const KEY_BYTES: usize = 24;
/// What a key holds beside its number: the tag that puts it in its shard, and its writer.
const KEY_PREFIX_BYTES: usize = 14;

type Link = InterceptedService<Channel, Announce>;

/// Why a call of a bench did not do what it was to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LabError {
    #[error("connecting to {address}: {source}")]
    Connect { address: String, source: tonic::transport::Error },
    #[error("{call}: {source}")]
    Call { call: &'static str, source: Status },
    #[error("the fabric: {0}")]
    Fabric(#[from] FabricError),
    #[error("writing a slab: {0}")]
    Write(#[from] OperationError),
    #[error("{node} is no data node of this cluster")]
    UnknownNode { node: NodeId },
    #[error("{what}: expected {expected}, found {found}")]
    Unexpected { what: &'static str, expected: String, found: String },
}

impl LabError {
    pub(in crate::bench) fn unexpected(what: &'static str, expected: impl ToString, found: impl ToString) -> Self {
        Self::Unexpected { what, expected: expected.to_string(), found: found.to_string() }
    }
    pub(in crate::bench) fn call(call: &'static str) -> impl FnOnce(Status) -> Self {
        move |source| Self::Call { call, source }
    }
}

/// What a writer works on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::bench) struct Work {
    pub(in crate::bench) shard: u32,
    pub(in crate::bench) copies: u8,
    pub(in crate::bench) key_bytes: usize,
}

impl Work {
    /// In the first shard, with short keys.
    pub(in crate::bench) const fn of(copies: u8) -> Self {
        Self { shard: FIRST_SHARD, copies, key_bytes: KEY_BYTES }
    }
}

/// A cluster to measure.
pub(in crate::bench) struct Lab {
    pub(in crate::bench) stage: Stage,
    shards: u32,
    nodes: BTreeMap<NodeId, String>,
    /// A namespace for each number of copies.
    namespaces: BTreeMap<u8, u32>,
    provider: Provider,
}

impl Lab {
    /// Three meta nodes and two data nodes as processes, and a namespace with one copy and one with two. One shard: every key is sent to its leader.
    pub(in crate::bench) async fn start(dir: &Path) -> Result<Self, BenchError> {
        Self::start_with(dir, 1).await
    }

    /// The same with so many shards.
    pub(in crate::bench) async fn start_with(dir: &Path, shards: u32) -> Result<Self, BenchError> {
        let raft = RaftSection { shards, ..RaftSection::default() };
        let stage = Stage::start_with(dir, 2, REGION_BYTES, raft).await?;
        let cluster = stage.cluster();
        let leader = cluster.address(cluster.leader(FIRST_SHARD, READY).await?);
        let nodes: BTreeMap<NodeId, String> =
            cluster.data_nodes().into_iter().map(|member| (member.node(), cluster.address(member))).collect();
        let client = stage.client().await?;
        for copies in [1, 2] {
            stage.namespace(&client, &format!("meta-{copies}"), copies).await?;
        }
        client.close().await?;
        let mut control =
            ControlClient::with_interceptor(channel(stage.cluster().trust(), Expect::META, &leader).await?, Announce);
        let known = control.describe(v1::DescribeRequest { seen: None }).await.map_err(LabError::call("Describe"))?;
        let known = known.into_inner().changes.unwrap_or_default().namespaces.into_iter();
        let namespaces = known.filter_map(|it| Some((u8::try_from(it.copies).ok()?, it.id))).collect();
        let provider = Provider::detect().map_err(LabError::from)?;
        Ok(Self { stage, shards, nodes, namespaces, provider })
    }

    /// Where the leader of `shard` is.
    pub(in crate::bench) async fn leader(&self, shard: u32) -> Result<String, BenchError> {
        let cluster = self.stage.cluster();
        Ok(cluster.address(cluster.leader(shard, READY).await?))
    }

    /// A writer of the first shard with connections of its own, opened.
    pub(in crate::bench) async fn writer(&self, copies: u8) -> Result<Writer, BenchError> {
        self.writer_at(&self.leader(FIRST_SHARD).await?, Work::of(copies)).await
    }

    /// A writer that speaks to this leader, with connections of its own, opened.
    pub(in crate::bench) async fn writer_at(&self, leader: &str, work: Work) -> Result<Writer, BenchError> {
        let Work { shard, copies, key_bytes } = work;
        let trust = self.stage.cluster().trust();
        let mut control = ControlClient::with_interceptor(channel(trust, Expect::META, leader).await?, Announce)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let mut nodes = BTreeMap::new();
        for (node, address) in &self.nodes {
            let client = DataNodeClient::with_interceptor(channel(trust, Expect::DATA_NODE, address).await?, Announce)
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX);
            nodes.insert(*node, client);
        }
        let known = control.describe(v1::DescribeRequest { seen: None }).await;
        let (seen, applied_ms) = position(known.map_err(LabError::call("Describe"))?.get_ref(), shard);
        let id = trust.writer(random().to_le_bytes());
        let namespace = self.namespaces.get(&copies).copied();
        let namespace =
            namespace.ok_or_else(|| LabError::unexpected("namespace", format!("one of {copies} copies"), "none"))?;
        let provider = self.provider.clone();
        let tag = tag_of(NamespaceId(namespace), shard, self.shards);
        Ok(Writer { control, nodes, provider, id, shard, tag, key_bytes, namespace, seen, applied_ms, count: 0 })
    }

    /// Every process of the cluster, under what it is to a commit. Of many shards each meta node leads some.
    pub(in crate::bench) async fn processes(&self) -> Result<Vec<(&'static str, u32)>, BenchError> {
        let cluster = self.stage.cluster();
        let leader = cluster.leader(FIRST_SHARD, READY).await?;
        let role = |member: Member| match member {
            Member::Meta(_) if self.shards > 1 => "metas",
            Member::Meta(_) if member == leader => "leader",
            Member::Meta(_) => "followers",
            Member::Data(_) => "datanodes",
        };
        let members = cluster.members().into_iter();
        Ok(members.filter_map(|member| Some((role(member), cluster.pid(member)?))).collect())
    }

    /// Ends all processes.
    pub(in crate::bench) async fn end(self) -> Result<(), BenchError> {
        self.stage.end().await
    }
}

async fn channel(trust: &Trust, expect: Expect, address: &str) -> Result<Channel, LabError> {
    let wrong = |source| LabError::Connect { address: address.to_owned(), source };
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(wrong)?;
    let endpoint = endpoint.connect_timeout(CALL).timeout(CALL);
    endpoint.connect_with_connector(trust.connector(expect)).await.map_err(wrong)
}

/// A tag whose keys belong to `shard`.
fn tag_of(namespace: NamespaceId, shard: u32, shards: u32) -> String {
    let tags = (0..=u16::MAX).map(|number| format!("{{{number:04x}}}"));
    let belongs = |tag: &String| {
        let key = Key::new(tag).expect("a short name is a key");
        key.shard(namespace, shards) == ShardId(shard)
    };
    tags.into_iter().find(belongs).expect("every shard has one of so many tags")
}

fn position(known: &v1::DescribeReply, shard: u32) -> (Option<v1::Ordinal>, u64) {
    let seen = known.changes.as_ref().and_then(|changes| changes.at);
    let shard = known.groups.iter().find(|group| group.group == shard);
    (seen, shard.map_or(0, |group| group.applied_ms))
}

/// Random bits of the operating system.
fn random() -> u64 {
    let mut bits = [0; 8];
    let mut filled = 0;
    while filled < bits.len() {
        filled += rustix::rand::getrandom(&mut bits[filled..], rustix::rand::GetRandomFlags::empty()).unwrap_or(0);
    }
    u64::from_le_bytes(bits)
}

/// A grant that was armed and written in full.
pub(in crate::bench) struct Written {
    grant: Grant,
    entries: Vec<v1::CommitEntry>,
}

/// One writer.
pub(in crate::bench) struct Writer {
    pub(in crate::bench) control: ControlClient<Link>,
    nodes: BTreeMap<NodeId, DataNodeClient<Link>>,
    provider: Provider,
    id: WriterId,
    shard: u32,
    /// What each of its keys begins with.
    tag: String,
    key_bytes: usize,
    namespace: u32,
    seen: Option<v1::Ordinal>,
    applied_ms: u64,
    /// Keys made so far.
    count: u64,
}

impl Writer {
    /// Who it is.
    pub(in crate::bench) fn id(&self) -> [u8; 16] {
        self.id.0
    }

    /// Asks for a slab.
    pub(in crate::bench) async fn grant(&mut self, slots: u32, ttl: Duration) -> Result<(Grant, Bytes), LabError> {
        let slot_size = frame::slot_size(self.key_bytes, PAYLOAD_BYTES as u64).expect("a small frame fits in a slot");
        let request = v1::GrantRequest {
            shard: self.shard,
            request: Some(v1::RequestId { applied_ms: self.applied_ms, random: random() }),
            writer: Bytes::copy_from_slice(&self.id.0),
            namespace: self.namespace,
            slot_size: slot_size.0,
            slots,
            ttl_ms: milliseconds(ttl),
            avoid: Vec::new(),
            seen: self.seen,
        };
        let reply = self.control.grant(with_deadline(request)).await.map_err(LabError::call("Grant"))?.into_inner();
        self.applied_ms = reply.applied_ms;
        let decoded = Signed::<Grant>::decode(&reply.grant);
        let grant = decoded.map_err(|why| LabError::unexpected("grant", "a signed grant", why))?.statement;
        Ok((grant, reply.grant))
    }

    /// Gets a slab of `slots` slots and fills all of it on all its holders, under new keys.
    pub(in crate::bench) async fn write(&mut self, slots: u32, ttl: Duration) -> Result<Written, LabError> {
        let (grant, signed) = self.grant(slots, ttl).await?;
        if grant.slots.0 < slots {
            return Err(LabError::unexpected("slots of a slab", slots, grant.slots.0));
        }
        let (bytes, entries) = self.frames(&grant);
        let memory = Memory::allocate(bytes.len())?;
        memory.copy_in(0, &bytes)?;
        for holder in &grant.holders {
            let node = holder.region.node;
            let request = v1::ArmRequest { grant: signed.clone(), writer: Bytes::copy_from_slice(&self.id.0) };
            let armed = self.node(node)?.arm(with_deadline(request)).await.map_err(LabError::call("Arm"))?.into_inner();
            let lane = FabricAddress::from_bytes(&armed.lane_address)?;
            let local = LocalBuffer::new(&memory, 0..bytes.len());
            let remote = RemoteSpan { address: armed.base, key: armed.write_key, len: bytes.len() as u64 };
            // An endpoint of its own, so that none is open while commits are measured.
            let bind = IpAddr::V4(Ipv4Addr::LOCALHOST);
            let config = EndpointConfig { provider: self.provider.clone(), bind, port: None, spin: Duration::ZERO };
            let endpoint = ClientEndpoint::new(config);
            let written = endpoint.write(&lane, local, remote, Instant::now() + CALL).await;
            endpoint.close();
            written?;
        }
        Ok(Written { grant, entries })
    }

    /// The frames of a whole slab, and what is to be said of them.
    fn frames(&mut self, grant: &Grant) -> (Vec<u8>, Vec<v1::CommitEntry>) {
        let slot = grant.slot_size.0 as usize;
        let mut bytes = vec![0; slot * grant.slots.0 as usize];
        let mut entries = Vec::with_capacity(grant.slots.0 as usize);
        let payload = [7; PAYLOAD_BYTES];
        let payload_crc = crc32c::crc32c(&payload);
        for (number, place) in (0..grant.slots.0).zip(bytes.chunks_exact_mut(slot)) {
            self.count += 1;
            let width = self.key_bytes - KEY_PREFIX_BYTES;
            let name = format!("{}{}{:0width$x}", self.tag, hex::encode(&self.id.0[..4]), self.count);
            let header = FrameHeader {
                namespace: grant.namespace,
                key: Key::new(&name).expect("a short name is a key"),
                version: Version { clock: HybridClock(self.count), writer: self.id },
                kind: FrameKind::Value,
                payload_bytes: PAYLOAD_BYTES as u64,
                payload_crc,
            };
            header.write_to(&mut place[..header.bytes()]);
            place[header.bytes()..header.bytes() + PAYLOAD_BYTES].copy_from_slice(&payload);
            entries.push(v1::CommitEntry {
                slot: number,
                key: name.into(),
                clock: header.version.clock.0,
                kind: v1::FrameKind::Value.into(),
                payload_bytes: header.payload_bytes,
                payload_crc,
                mode: None,
            });
        }
        (bytes, entries)
    }

    /// Commits what was written, through the first holder.
    pub(in crate::bench) async fn commit(&mut self, request: v1::CommitRequest) -> Result<(), LabError> {
        let node = NodeId(request.written.first().copied().unwrap_or_default());
        let count = request.entries.len();
        let reply =
            self.node(node)?.commit(with_deadline(request)).await.map_err(LabError::call("Commit"))?.into_inner();
        if reply.outcomes.len() != count {
            return Err(LabError::unexpected("outcomes of a commit", count, reply.outcomes.len()));
        }
        match reply.outcomes.into_iter().find(|outcome| outcome.code() != v1::commit_outcome::Code::Committed) {
            None => Ok(()),
            Some(other) => Err(LabError::unexpected("outcome of a commit", "committed", format!("{other:?}"))),
        }
    }

    /// The commits of a slab, `batch` slots each.
    pub(in crate::bench) fn commits(&self, written: &Written, batch: usize) -> Vec<v1::CommitRequest> {
        let request = |entries: &[v1::CommitEntry]| v1::CommitRequest {
            grant: Some(written.grant.id.into()),
            writer: Bytes::copy_from_slice(&self.id.0),
            written: written.grant.holders.iter().map(|holder| holder.region.node.0).collect(),
            entries: entries.to_vec(),
        };
        written.entries.chunks(batch).map(request).collect()
    }

    /// Asks where keys are, with a lease or without.
    pub(in crate::bench) async fn resolve(
        &mut self,
        keys: Vec<Bytes>,
        lease: Duration,
    ) -> Result<v1::ResolveReply, LabError> {
        let count = keys.len();
        let request = v1::ResolveRequest {
            shard: self.shard,
            namespace: self.namespace,
            keys,
            lease_ms: milliseconds(lease),
            stale: false,
            seen: self.seen,
        };
        let reply = self.control.resolve(with_deadline(request)).await.map_err(LabError::call("Resolve"))?.into_inner();
        let found = reply.items.iter().filter(|item| item.found).count();
        let leased = lease.is_zero() || reply.lease_ms > 0;
        if found == count && leased {
            return Ok(reply);
        }
        let found = format!("{found} with {} ms of lease", reply.lease_ms);
        Err(LabError::unexpected("keys resolved", format!("{count} under a lease of {lease:?}"), found))
    }

    /// Asks which of these keys exist: all must.
    pub(in crate::bench) async fn exists(&mut self, keys: Vec<Bytes>) -> Result<(), LabError> {
        let count = keys.len();
        let request = v1::ExistsRequest { shard: self.shard, namespace: self.namespace, keys, seen: self.seen };
        let reply = self.control.exists(with_deadline(request)).await.map_err(LabError::call("Exists"))?.into_inner();
        let found: usize = reply.present.iter().map(|byte| byte.count_ones() as usize).sum();
        if found == count { Ok(()) } else { Err(LabError::unexpected("keys that exist", count, found)) }
    }

    /// Pins the values of these keys and lets go of them again.
    pub(in crate::bench) async fn pin(&mut self, keys: Vec<Bytes>, duration: Duration) -> Result<(), LabError> {
        let owner = Bytes::copy_from_slice(&self.id.0);
        let request = v1::PinRequest {
            shard: self.shard,
            request: Some(v1::RequestId { applied_ms: self.applied_ms, random: random() }),
            owner: owner.clone(),
            namespace: self.namespace,
            keys,
            duration_ms: milliseconds(duration),
            seen: self.seen,
        };
        let reply = self.control.pin(with_deadline(request)).await.map_err(LabError::call("Pin"))?.into_inner();
        let pin = Some(reply.pin.ok_or_else(|| LabError::unexpected("a pin", "its number", "none"))?);
        let release = v1::ReleasePinRequest { shard: self.shard, owner, pin };
        let reply = self.control.release_pin(with_deadline(release)).await.map_err(LabError::call("ReleasePin"))?;
        let reply = reply.into_inner();
        self.applied_ms = self.applied_ms.max(reply.applied_ms);
        if reply.held { Ok(()) } else { Err(LabError::unexpected("the pin", "held until it was released", "gone")) }
    }

    /// Takes keys away again, so that the next round finds the same room.
    pub(in crate::bench) async fn delete(&mut self, keys: &[Bytes]) -> Result<(), LabError> {
        for keys in keys.chunks(quarry_wire::limits::KEYS_PER_CALL_MAX) {
            let item = |key: &Bytes| v1::DeleteItem { key: key.clone(), expected: None };
            let request = v1::DeleteRequest {
                shard: self.shard,
                request: Some(v1::RequestId { applied_ms: self.applied_ms, random: random() }),
                namespace: self.namespace,
                items: keys.iter().map(item).collect(),
            };
            let reply =
                self.control.delete(with_deadline(request)).await.map_err(LabError::call("Delete"))?.into_inner();
            self.applied_ms = reply.applied_ms;
        }
        Ok(())
    }

    /// The smallest call that the leader answers.
    pub(in crate::bench) async fn bare_call(&mut self) -> Result<(), LabError> {
        let request = v1::DescribeRequest { seen: self.seen };
        self.control.describe(with_deadline(request)).await.map_err(LabError::call("Describe"))?;
        Ok(())
    }

    fn node(&mut self, node: NodeId) -> Result<&mut DataNodeClient<Link>, LabError> {
        self.nodes.get_mut(&node).ok_or(LabError::UnknownNode { node })
    }
}

fn milliseconds(span: Duration) -> u32 {
    u32::try_from(span.as_millis()).unwrap_or(u32::MAX)
}

/// A request that tells the server how long it may take, as those of the client do.
fn with_deadline<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(CALL);
    request
}
