//! A cluster in one process, for faults that real servers cannot be asked for: real gRPC, real fabric endpoints, real signatures, and a
//! state without Raft. Memory is never used twice.

use bytes::Bytes;
use parking_lot::Mutex;
use quarry_client::{Client, Cluster, Options};
use quarry_fabric::{Access, Endpoint, EndpointConfig, FabricAddress, Memory, Provider, Registration};
use quarry_proto::{
    convert,
    protocol::Check,
    refusal::Refusal,
    v1::{
        self,
        commit_outcome::Code,
        control_server::{Control, ControlServer},
        data_node_server::{DataNode, DataNodeServer},
        delete_outcome,
    },
};
use quarry_wire::{
    attestation::{Attestation, AttestationBatch, Placement},
    certificate::{Certificate, Revocations, Role},
    frame::{FrameHeader, FrameKind, header_bytes},
    grant::{Class, Grant, GrantHolder, Purpose},
    ids::{
        CertificateSerial, ClusterUuid, ExtentIndex, FeedNumber, Generation, GrantId, Incarnation, LendNumber,
        NamespaceId, NodeId, Ordinal, RegionEpoch, RegionId, RegionIndex, ShardId, SlotIndex, WriterId,
    },
    key::Key,
    merkle::{self, Hash},
    region::{FabricName, RegionRecord},
    signed::SecretKey,
    units::{Offset, SlotCount, SlotSize},
    version::{HybridClock, Version},
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, transport::Server};

const CLUSTER: ClusterUuid = ClusterUuid([7; 16]);
const GENERATION: Generation = Generation(1);
const META: NodeId = NodeId(1);
const REGION_BYTES: u64 = 512 << 20;
/// Entries under one signature.
const BATCH: usize = 64;
/// A signed batch as it travels, with its leaves.
type Signed = (Bytes, Vec<Hash>);
const SLAB_BYTES_MAX: u64 = 64 << 20;

/// What goes wrong on purpose.
#[derive(Default)]
pub(crate) struct Faults {
    /// Commits whose reply is lost after they were applied.
    pub(crate) lose_replies: u32,
    /// Commits that are lost before anything happens.
    pub(crate) lose_commits: u32,
    /// Outcomes to give instead of applying, one per entry that comes.
    pub(crate) outcomes: VecDeque<v1::CommitOutcome>,
    /// Nodes that refuse to arm.
    pub(crate) no_arm: BTreeSet<u64>,
    /// Nodes whose Commit answers that the grant is unknown.
    pub(crate) unknown_grant: BTreeSet<u64>,
    /// Refusals for the next grants.
    pub(crate) refuse_grants: VecDeque<Refusal>,
    /// Refusals for the next deletes.
    pub(crate) refuse_deletes: VecDeque<Refusal>,
    /// Lease to give instead of what was asked.
    pub(crate) lease_ms: Option<u32>,
    /// Grants are signed by a key that nobody certified.
    pub(crate) forge_grants: bool,
    /// Batches are signed by a key that nobody certified.
    pub(crate) forge_batches: bool,
    /// No call is answered.
    pub(crate) silent: bool,
    /// Probes answer less than was asked.
    pub(crate) short_answers: bool,
    /// So many times nodes say that the directory does not have their newest records yet.
    pub(crate) changing: u32,
    /// Resolves name this revocation list; it is shown with a description if there is one, not with resolves.
    pub(crate) revocations: u64,
    /// Refusals for the next pins.
    pub(crate) refuse_pins: VecDeque<Refusal>,
    /// Pins last and are renewed for no more than so many milliseconds.
    pub(crate) pin_ms_max: Option<u32>,
    /// Grants live so long instead of what was asked.
    pub(crate) ttl: Option<Duration>,
}

struct Holder {
    id: NodeId,
    key: SecretKey,
    memory: Arc<Memory>,
    reading: Mutex<Reading>,
    lane: Mutex<Endpoint>,
    /// Write regions and their lanes, by grant.
    armed: Mutex<HashMap<u64, (FabricAddress, Registration)>>,
    address: SocketAddr,
}

/// How a holder is read in its present epoch.
struct Reading {
    epoch: u64,
    reader: Endpoint,
    _readable: Registration,
    record: Bytes,
}

impl Reading {
    /// Opens an epoch, where `key` says who reads what.
    fn open(id: NodeId, key: &SecretKey, memory: &Arc<Memory>, epoch: u64, port: Option<u16>) -> Self {
        let reader = endpoint_at(port);
        let read_key = Some(id.0 << 32 | epoch);
        let readable = reader.register(memory, 0..memory.len(), Access::RemoteRead, read_key).unwrap();
        let record = RegionRecord {
            region: region_of(id),
            incarnation: incarnation(),
            epoch: RegionEpoch(epoch),
            length: REGION_BYTES,
            base: readable.base(),
            read_key: readable.key(),
            provider: Provider::detect().unwrap().name().to_owned(),
            address: FabricName::new(reader.address().as_bytes()).unwrap(),
        };
        let record = key.sign(CLUSTER, GENERATION, serial(id), record).encode().into();
        Self { epoch, reader, _readable: readable, record }
    }
}

struct Given {
    grant: Grant,
    recorded: BTreeMap<u32, (Key, Version, v1::CommitOutcome)>,
    sealed: Option<u32>,
}

#[derive(Clone)]
struct Stored {
    version: Version,
    entry: v1::CommitEntry,
    grant: Grant,
    /// Per holder: signed batch, leaf, path.
    copies: Vec<(NodeId, Bytes, u32, Vec<Hash>)>,
}

#[derive(Default)]
struct State {
    namespaces: Vec<v1::Namespace>,
    grants: BTreeMap<u64, Given>,
    next_offset: u64,
    keys: BTreeMap<(u32, Key), Stored>,
    /// Pins that were not released, with their numbers of keys. They end by no time.
    pins: BTreeMap<u64, usize>,
    pin_last: u64,
    now_ms: u64,
    /// Grants that were asked for with nodes to avoid.
    avoiding: usize,
    /// The newest revocation list.
    revocations: Bytes,
    /// Copies that were complained of, with the holder that was told.
    reports: Vec<(usize, v1::ReportDamageRequest)>,
}

pub(crate) struct World {
    root: SecretKey,
    meta_key: SecretKey,
    holders: Vec<Holder>,
    metas: Vec<SocketAddr>,
    /// Which of the meta servers leads.
    leader: Mutex<usize>,
    state: Mutex<State>,
    pub(crate) faults: Mutex<Faults>,
}

/// The servers; they end when it is dropped.
pub(crate) struct Double {
    pub(crate) world: Arc<World>,
    servers: Vec<JoinHandle<()>>,
}

impl Drop for Double {
    fn drop(&mut self) {
        for server in &self.servers {
            server.abort();
        }
        for holder in &self.world.holders {
            holder.lane.lock().close();
            holder.reading.lock().reader.close();
        }
    }
}

fn endpoint() -> Endpoint {
    endpoint_at(None)
}

fn endpoint_at(port: Option<u16>) -> Endpoint {
    let config = EndpointConfig {
        provider: Provider::detect().unwrap(),
        bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
        port,
        spin: Duration::ZERO,
    };
    Endpoint::open(config).unwrap()
}

impl Double {
    /// Two meta servers, of which the second leads, and so many data nodes.
    pub(crate) async fn start(nodes: u64) -> Self {
        let root = SecretKey::from_seed(&[1; 32]);
        let mut holders = Vec::new();
        let mut listeners = Vec::new();
        for number in 0..nodes {
            let id = NodeId(11 + number);
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let key = SecretKey::from_seed(&[u8::try_from(id.0).unwrap(); 32]);
            let memory = Memory::allocate(usize::try_from(REGION_BYTES).unwrap()).unwrap();
            let reading = Mutex::new(Reading::open(id, &key, &memory, 1, None));
            let address = listener.local_addr().unwrap();
            listeners.push(listener);
            let armed = Mutex::default();
            holders.push(Holder { id, key, memory, reading, lane: Mutex::new(endpoint()), armed, address });
        }
        let meta_listeners =
            [TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap()];
        let world = Arc::new(World {
            root,
            meta_key: SecretKey::from_seed(&[2; 32]),
            holders,
            metas: meta_listeners.iter().map(|listener| listener.local_addr().unwrap()).collect(),
            leader: Mutex::new(1),
            state: Mutex::new(State { next_offset: 4096, ..State::default() }),
            faults: Mutex::default(),
        });
        let mut servers = Vec::new();
        for (index, listener) in meta_listeners.into_iter().enumerate() {
            let service = ControlServer::with_interceptor(MetaServer { index, world: Arc::clone(&world) }, Check);
            servers.push(tokio::spawn(async move {
                Server::builder()
                    .add_service(service)
                    .serve_with_incoming(TcpListenerStream::new(listener))
                    .await
                    .unwrap();
            }));
        }
        for (index, listener) in listeners.into_iter().enumerate() {
            let service = DataNodeServer::with_interceptor(NodeServer { index, world: Arc::clone(&world) }, Check);
            servers.push(tokio::spawn(async move {
                Server::builder()
                    .add_service(service)
                    .serve_with_incoming(TcpListenerStream::new(listener))
                    .await
                    .unwrap();
            }));
        }
        Self { world, servers }
    }

    pub(crate) fn cluster(&self) -> Cluster {
        let metas = self.world.metas.iter().map(ToString::to_string).collect();
        Cluster::new(CLUSTER, self.world.root.public(), metas).unwrap().without_tls()
    }

    pub(crate) async fn connect(&self, options: Options) -> Client {
        Client::connect(self.cluster(), options).await.unwrap()
    }

    pub(crate) fn faults(&self) -> parking_lot::MutexGuard<'_, Faults> {
        self.world.faults.lock()
    }

    /// Moves the leader's office to the other meta server.
    pub(crate) fn other_leads(&self) {
        let mut leader = self.world.leader.lock();
        *leader = 1 - *leader;
    }

    /// Fill marks of the grants that were sealed, and how many are open: a grant also closes when all its slots were committed.
    pub(crate) fn seals(&self) -> (Vec<u32>, usize) {
        let state = self.world.state.lock();
        let marks: Vec<u32> = state.grants.values().filter_map(|given| given.sealed).collect();
        let is_open = |given: &&Given| given.sealed.is_none() && given.recorded.len() < given.grant.slots.0 as usize;
        let open = state.grants.values().filter(is_open).count();
        (marks, open)
    }

    /// Slots of each grant that was given, in order.
    pub(crate) fn grants(&self) -> Vec<u32> {
        self.world.state.lock().grants.values().map(|given| given.grant.slots.0).collect()
    }

    /// How many grants were asked for with nodes to avoid.
    pub(crate) fn avoiding(&self) -> usize {
        self.world.state.lock().avoiding
    }

    /// Copies of a key's value.
    pub(crate) fn copies(&self, key: &str) -> usize {
        let state = self.world.state.lock();
        let found = state.keys.iter().find(|((_, known), _)| known.as_bytes() == key.as_bytes());
        found.map_or(0, |(_, stored)| stored.copies.len())
    }

    /// Numbers of keys of the pins that were not released.
    pub(crate) fn pins(&self) -> Vec<usize> {
        self.world.state.lock().pins.values().copied().collect()
    }

    /// Ends all pins, as their time does.
    pub(crate) fn end_pins(&self) {
        self.world.state.lock().pins.clear();
    }

    /// How many keys there are.
    pub(crate) fn keys(&self) -> usize {
        self.world.state.lock().keys.len()
    }

    /// Sets the current version of a key far ahead, as another writer would.
    pub(crate) fn advance(&self, key: &str, clock: HybridClock) {
        let mut state = self.world.state.lock();
        let found = state.keys.iter_mut().find(|((_, known), _)| known.as_bytes() == key.as_bytes());
        found.unwrap().1.version = Version { clock, writer: WriterId([9; 16]) };
    }

    /// Flips a bit of the payload of a key's copy on holder number `holder`.
    pub(crate) fn damage(&self, key: &str, holder: usize) {
        let state = self.world.state.lock();
        let (name, stored) = state.keys.iter().find(|((_, known), _)| known.as_bytes() == key.as_bytes()).unwrap();
        let holder = &self.world.holders[holder];
        let base = stored.grant.holder(holder.id).unwrap().base.0;
        let at = base + u64::from(stored.entry.slot) * u64::from(stored.grant.slot_size.0);
        let at = usize::try_from(at).unwrap() + header_bytes(name.1.as_bytes().len());
        let byte = holder.memory.copy_to_vec(at, 1).unwrap()[0];
        holder.memory.copy_in(at, &[byte ^ 4]).unwrap();
    }

    /// Puts a copy of the frame of `other` in the place of `key`'s, on all holders. Both have the same length.
    pub(crate) fn overwrite(&self, key: &str, other: &str) {
        let state = self.world.state.lock();
        let find = |name: &str| state.keys.iter().find(|((_, known), _)| known.as_bytes() == name.as_bytes()).unwrap();
        let ((_, name), stored) = find(key);
        let (_, source) = find(other);
        let bytes = header_bytes(name.as_bytes().len()) + usize::try_from(stored.entry.payload_bytes).unwrap();
        for holder in &self.world.holders {
            let place = |stored: &Stored| {
                let base = stored.grant.holder(holder.id).unwrap().base.0;
                usize::try_from(base + u64::from(stored.entry.slot) * u64::from(stored.grant.slot_size.0)).unwrap()
            };
            let frame = holder.memory.copy_to_vec(place(source), bytes).unwrap();
            holder.memory.copy_in(place(stored), &frame).unwrap();
        }
    }

    /// Which keys' copies were complained of, at which holder.
    pub(crate) fn reports(&self) -> Vec<(usize, Bytes)> {
        self.world.state.lock().reports.iter().map(|(holder, asked)| (*holder, asked.key.clone())).collect()
    }

    /// Closes a holder's lane, as a forced close does: nothing of an earlier writer lands any more. Later grants get another one.
    pub(crate) fn close_lane(&self, holder: usize) {
        let mut lane = self.world.holders[holder].lane.lock();
        lane.close();
        *lane = endpoint();
    }

    /// Stops serving reads on a holder.
    pub(crate) fn close_reader(&self, holder: usize) {
        self.world.holders[holder].reading.lock().reader.close();
    }

    /// Gives a holder a new read key, as a rotation does. Nobody is told.
    pub(crate) fn rotate(&self, holder: usize) {
        let holder = &self.world.holders[holder];
        let mut reading = holder.reading.lock();
        let (epoch, port) = (reading.epoch + 1, reading.reader.address().port());
        reading.reader.close();
        *reading = Reading::open(holder.id, &holder.key, &holder.memory, epoch, port);
    }

    /// The root declares the certificates of these holders void, by list `number`.
    pub(crate) fn revoke(&self, number: u64, holders: &[usize]) {
        let serials = holders.iter().map(|holder| serial(self.world.holders[*holder].id)).collect();
        let list = self.world.root.sign_as_root(CLUSTER, Revocations { number, serials });
        self.world.state.lock().revocations = list.encode().into();
    }

    /// Another node takes the place of a holder: it is read at the same host and port, under keys of its own, and shows records of its own.
    pub(crate) fn replace(&self, holder: usize) {
        let holder = &self.world.holders[holder];
        let mut reading = holder.reading.lock();
        let port = reading.reader.address().port();
        reading.reader.close();
        let (other, key) = (NodeId(77), SecretKey::from_seed(&[77; 32]));
        let memory = Memory::allocate(usize::try_from(REGION_BYTES).unwrap()).unwrap();
        *reading = Reading::open(other, &key, &memory, 9, port);
    }
}

fn region_of(node: NodeId) -> RegionId {
    RegionId { node, index: RegionIndex(0) }
}
fn incarnation() -> Incarnation {
    Incarnation::new(GENERATION, 1)
}
fn lend() -> LendNumber {
    LendNumber::new(GENERATION, 1)
}
fn serial(node: NodeId) -> CertificateSerial {
    CertificateSerial(node.0)
}

impl World {
    /// Never, if the double is to be silent.
    async fn answers(&self) {
        if self.faults.lock().silent {
            std::future::pending::<()>().await;
        }
    }

    fn changes(&self) -> v1::Changes {
        let certificate = |node, role, key: &SecretKey| {
            let said = Certificate { serial: serial(node), node, role, key: key.public() };
            Bytes::from(self.root.sign_as_root(CLUSTER, said).encode())
        };
        let mut certificates = vec![certificate(META, Role::Meta, &self.meta_key)];
        certificates.extend(self.holders.iter().map(|holder| certificate(holder.id, Role::DataNode, &holder.key)));
        let info = |holder: &Holder| v1::DataNodeInfo {
            node: holder.id.0,
            address: holder.address.to_string(),
            alive: true,
            revoked: false,
        };
        let (namespaces, revocations) = {
            let state = self.state.lock();
            (state.namespaces.clone(), state.revocations.clone())
        };
        v1::Changes {
            at: Some(FeedNumber::new(GENERATION, 1).into()),
            certificates,
            records: self.holders.iter().map(|holder| holder.reading.lock().record.clone()).collect(),
            namespaces,
            revocations,
            data_nodes: self.holders.iter().map(info).collect(),
            retired: Vec::new(),
            metas: Vec::new(),
        }
    }

    fn holder(&self, node: u64) -> Option<&Holder> {
        self.holders.iter().find(|holder| holder.id.0 == node)
    }

    fn grant(&self, asked: &v1::GrantRequest) -> Result<v1::GrantReply, Refusal> {
        if let Some(refusal) = self.faults.lock().refuse_grants.pop_front() {
            return Err(refusal);
        }
        let mut state = self.state.lock();
        state.now_ms += 1;
        state.avoiding += usize::from(!asked.avoid.is_empty());
        let namespace = state.namespaces.iter().find(|namespace| namespace.id == asked.namespace).cloned();
        let namespace = namespace.ok_or_else(|| {
            Refusal::UnknownNamespace(v1::UnknownNamespace { id: asked.namespace, name: String::new() })
        })?;
        let fitting = u32::try_from(SLAB_BYTES_MAX / u64::from(asked.slot_size)).unwrap();
        let slots = asked.slots.min(fitting);
        let base = state.next_offset;
        state.next_offset += (u64::from(slots) * u64::from(asked.slot_size)).next_multiple_of(4096);
        assert!(state.next_offset <= REGION_BYTES, "the double has no room left");
        let chosen: Vec<&Holder> = self
            .holders
            .iter()
            .filter(|holder| !asked.avoid.contains(&holder.id.0))
            .take(namespace.copies as usize)
            .collect();
        if chosen.len() < namespace.least as usize {
            return Err(Refusal::NoSpace(v1::NoSpace {
                resource: "nodes".to_owned(),
                terminal: true,
                ..Default::default()
            }));
        }
        let number = state.grants.len() as u64 + 1;
        let (forged, ttl) = {
            let faults = self.faults.lock();
            (faults.forge_grants, faults.ttl)
        };
        let grant = Grant {
            id: GrantId { shard: ShardId(asked.shard), sequence: Ordinal { generation: GENERATION, number } },
            meta: META,
            purpose: Purpose::Write,
            writer: convert::writer_id(&asked.writer)?,
            namespace: NamespaceId(asked.namespace),
            class: Class::Cache,
            least: u8::try_from(namespace.least).unwrap(),
            slot_size: SlotSize(asked.slot_size),
            slots: SlotCount(slots),
            ttl: ttl.unwrap_or_else(|| Duration::from_millis(asked.ttl_ms.into())),
            holders: chosen
                .into_iter()
                .map(|holder| GrantHolder {
                    region: region_of(holder.id),
                    incarnation: incarnation(),
                    extent: ExtentIndex(0),
                    lend: lend(),
                    base: Offset(base),
                })
                .collect(),
        };
        let given = Given { grant: grant.clone(), recorded: BTreeMap::new(), sealed: None };
        state.grants.insert(number, given);
        let key = if forged { SecretKey::from_seed(&[99; 32]) } else { self.meta_key.clone() };
        let signed = key.sign(CLUSTER, GENERATION, serial(META), grant).encode();
        Ok(v1::GrantReply { grant: signed.into(), applied_ms: state.now_ms, changes: None })
    }

    /// What a coordinator, the confirming holders and the shard do together.
    fn commit(&self, asked: &v1::CommitRequest) -> Result<v1::CommitReply, Refusal> {
        let writer = convert::writer_id(&asked.writer)?;
        let number = convert::grant_id(asked.grant)?.sequence.number;
        let mut state = self.state.lock();
        state.now_ms += 1;
        let State { grants, keys, .. } = &mut *state;
        let given = grants.get_mut(&number).expect("clients name grants that they got");
        let grant = given.grant.clone();
        // Each holder signs all entries, a batch at a time, having looked at what lies there.
        let mut signed: Vec<(NodeId, Vec<Signed>)> = Vec::new();
        for node in &asked.written {
            let holder = self.holder(*node).expect("clients name holders that they wrote to");
            let mut leaves = Vec::new();
            for entry in &asked.entries {
                let base = grant.holder(holder.id).unwrap().base.0;
                let offset = base + u64::from(entry.slot) * u64::from(grant.slot_size.0);
                let key = convert::key(&entry.key)?;
                let at = usize::try_from(offset).unwrap();
                let head = holder.memory.copy_to_vec(at, header_bytes(entry.key.len())).unwrap();
                let header = FrameHeader::read_from(&head).expect("a committed slot holds a frame");
                let version = Version { clock: HybridClock(entry.clock), writer };
                assert_eq!((&header.key, header.version), (&key, version), "a committed slot holds what it says");
                leaves.push(
                    Attestation {
                        namespace: grant.namespace,
                        key,
                        kind: FrameKind::Value,
                        version,
                        payload_bytes: entry.payload_bytes,
                        payload_crc: entry.payload_crc,
                        grant: grant.id,
                        lend: lend(),
                        slot: SlotIndex(entry.slot),
                        region: region_of(holder.id),
                        incarnation: incarnation(),
                        placement: Placement::Resident(Offset(offset)),
                    }
                    .leaf(),
                );
            }
            let key = if self.faults.lock().forge_batches { &self.root } else { &holder.key };
            let batches = leaves.chunks(BATCH).map(|leaves| {
                let batch = AttestationBatch::of(holder.id, leaves);
                (key.sign(CLUSTER, GENERATION, serial(holder.id), batch).encode().into(), leaves.to_vec())
            });
            signed.push((holder.id, batches.collect()));
        }
        let mut outcomes = Vec::new();
        for (place, entry) in asked.entries.iter().enumerate() {
            let key = convert::key(&entry.key)?;
            let version = Version { clock: HybridClock(entry.clock), writer };
            if let Some((recorded_key, recorded, outcome)) = given.recorded.get(&entry.slot) {
                assert_eq!((recorded_key, *recorded), (&key, version), "a slot is committed with one value only");
                outcomes.push(outcome.clone());
                continue;
            }
            let name = (grant.namespace.0, key.clone());
            let outcome = match self.faults.lock().outcomes.pop_front() {
                Some(outcome) => outcome,
                None => judge(entry, version, keys.get(&name)),
            };
            if outcome.code() == Code::Committed {
                let copies = signed
                    .iter()
                    .map(|(node, batches)| {
                        let (bytes, leaves) = &batches[place / BATCH];
                        let leaf = place % BATCH;
                        (*node, bytes.clone(), u32::try_from(leaf).unwrap(), merkle::path(leaves, leaf))
                    })
                    .collect();
                keys.insert(name, Stored { version, entry: entry.clone(), grant: grant.clone(), copies });
            }
            given.recorded.insert(entry.slot, (key, version, outcome.clone()));
            outcomes.push(outcome);
        }
        Ok(v1::CommitReply { outcomes, applied_ms: state.now_ms })
    }

    fn resolve(&self, asked: &v1::ResolveRequest) -> Result<v1::ResolveReply, Refusal> {
        let state = self.state.lock();
        let mut reply = {
            let faults = self.faults.lock();
            v1::ResolveReply {
                lease_ms: faults.lease_ms.unwrap_or(asked.lease_ms),
                applied_ms: state.now_ms,
                revocations: faults.revocations,
                ..Default::default()
            }
        };
        let mut hashes: Vec<u8> = Vec::new();
        for key in &asked.keys {
            let Some(stored) = state.keys.get(&(asked.namespace, convert::key(key)?)) else {
                reply.items.push(v1::Resolved::default());
                continue;
            };
            let mut item = v1::Resolved {
                found: true,
                version: Some(stored.version.into()),
                kind: 0,
                payload_bytes: stored.entry.payload_bytes,
                payload_crc: stored.entry.payload_crc,
                copies: Vec::new(),
            };
            for (node, signed, leaf, path) in &stored.copies {
                let first = hashes.len() / 32;
                hashes.extend(path.iter().flatten());
                item.copies.push(v1::Copy {
                    batch: u32::try_from(reply.batches.len()).unwrap(),
                    leaf: *leaf,
                    slot: stored.entry.slot,
                    path: (first..first + path.len()).map(|index| u32::try_from(index).unwrap()).collect(),
                    journaled: false,
                });
                reply.batches.push(v1::ResolvedBatch {
                    signed: signed.clone(),
                    grant: Some(stored.grant.id.into()),
                    lend: Some(lend().into()),
                    region: Some(region_of(*node).into()),
                    incarnation: Some(incarnation().into()),
                    base: stored.grant.holder(*node).unwrap().base.0,
                    slot_size: stored.grant.slot_size.0,
                });
            }
            reply.items.push(item);
        }
        reply.hashes = hashes.into();
        Ok(reply)
    }

    fn pin(&self, asked: &v1::PinRequest) -> Result<v1::PinReply, Refusal> {
        if let Some(refusal) = self.faults.lock().refuse_pins.pop_front() {
            return Err(refusal);
        }
        let lease_ms = asked.duration_ms.min(self.faults.lock().pin_ms_max.unwrap_or(u32::MAX));
        let (namespace, keys) = (asked.namespace, asked.keys.clone());
        let values = self.resolve(&v1::ResolveRequest { namespace, keys, lease_ms, ..Default::default() })?;
        let mut state = self.state.lock();
        let kept = values.items.iter().filter(|item| item.found).count();
        let pin = (kept > 0).then(|| {
            state.pin_last += 1;
            let number = state.pin_last;
            state.pins.insert(number, kept);
            v1::Ordinal { generation: GENERATION.0, number }
        });
        Ok(v1::PinReply { pin, values: Some(values), until_ms: 0 })
    }

    fn exists(&self, asked: &v1::ExistsRequest) -> Result<v1::ExistsReply, Refusal> {
        let state = self.state.lock();
        let mut present = vec![0; asked.keys.len().div_ceil(8)];
        for (index, key) in asked.keys.iter().enumerate() {
            let there = state.keys.contains_key(&(asked.namespace, convert::key(key)?));
            present[index / 8] |= u8::from(there) << (index % 8);
        }
        if self.faults.lock().short_answers {
            present.pop();
        }
        Ok(v1::ExistsReply { present: present.into(), applied_ms: state.now_ms })
    }

    fn list(&self, asked: &v1::ListRequest) -> v1::ListReply {
        let state = self.state.lock();
        let of_shard = |key: &Key| key.shard(NamespaceId(asked.namespace), 2).0 == asked.shard;
        let mut found = state.keys.iter().filter(|((namespace, key), _)| {
            let bytes = key.as_bytes();
            *namespace == asked.namespace
                && of_shard(key)
                && bytes.starts_with(&asked.prefix)
                && bytes > &asked.after[..]
        });
        let listed = |((_, key), stored): (&(u32, Key), &Stored)| v1::Listed {
            key: key.as_bytes().to_vec().into(),
            version: Some(stored.version.into()),
            payload_bytes: stored.entry.payload_bytes,
            payload_crc: stored.entry.payload_crc,
            copies: u32::try_from(stored.copies.len()).unwrap(),
        };
        let short = self.faults.lock().short_answers;
        let limit = if short { 0 } else { asked.limit as usize };
        let entries: Vec<v1::Listed> = found.by_ref().take(limit).map(listed).collect();
        v1::ListReply { entries, more: found.next().is_some(), applied_ms: state.now_ms }
    }

    fn delete(&self, asked: &v1::DeleteRequest) -> Result<v1::DeleteReply, Refusal> {
        if let Some(refusal) = self.faults.lock().refuse_deletes.pop_front() {
            return Err(refusal);
        }
        let mut state = self.state.lock();
        state.now_ms += 1;
        let mut outcomes = Vec::new();
        for item in &asked.items {
            let name = (asked.namespace, convert::key(&item.key)?);
            let expected = item.expected.clone().map(Version::try_from).transpose()?;
            let current = state.keys.get(&name).map(|stored| stored.version);
            let code = match current {
                None => delete_outcome::Code::NotFound,
                Some(current) if expected.is_some_and(|expected| expected != current) => {
                    delete_outcome::Code::CompareFailed
                }
                Some(_) => {
                    state.keys.remove(&name);
                    delete_outcome::Code::Deleted
                }
            };
            outcomes.push(v1::DeleteOutcome { code: code.into(), version: current.map(Into::into) });
        }
        Ok(v1::DeleteReply { outcomes, applied_ms: state.now_ms })
    }
}

pub(crate) fn outcome(code: Code, version: Option<Version>) -> v1::CommitOutcome {
    v1::CommitOutcome { code: code.into(), version: version.map(Into::into), ..Default::default() }
}

fn judge(entry: &v1::CommitEntry, version: Version, stored: Option<&Stored>) -> v1::CommitOutcome {
    use v1::put_mode::Kind;
    let current = stored.map(|stored| stored.version);
    let mode = entry.mode.clone().unwrap_or_default();
    let expected = mode.expected.clone().map(|version| Version::try_from(version).unwrap());
    match (mode.kind(), current) {
        (_, Some(current)) if current == version => outcome(Code::Committed, None),
        (Kind::Create, Some(current)) => outcome(Code::Exists, Some(current)),
        (Kind::Compare, current) if current != expected => outcome(Code::CompareFailed, current),
        (Kind::Replace | Kind::Compare, Some(current)) if current > version => {
            outcome(Code::StaleVersion, Some(current))
        }
        _ => outcome(Code::Committed, None),
    }
}

struct MetaServer {
    index: usize,
    world: Arc<World>,
}

impl MetaServer {
    async fn leads(&self, group: u32) -> Result<(), Refusal> {
        self.world.answers().await;
        let leader = *self.world.leader.lock();
        if leader == self.index {
            return Ok(());
        }
        let address = self.world.metas[leader].to_string();
        Err(Refusal::NotLeader(v1::NotLeader { group, leader: leader as u64 + 1, address }))
    }
}

#[tonic::async_trait]
impl Control for MetaServer {
    async fn describe(&self, _: Request<v1::DescribeRequest>) -> Result<Response<v1::DescribeReply>, Status> {
        Ok(Response::new(v1::DescribeReply {
            cluster: CLUSTER.0.to_vec().into(),
            generation: GENERATION.0,
            shards: 2,
            groups: Vec::new(),
            changes: Some(self.world.changes()),
            metas: Vec::new(),
        }))
    }

    async fn create_namespace(
        &self,
        request: Request<v1::CreateNamespaceRequest>,
    ) -> Result<Response<v1::CreateNamespaceReply>, Status> {
        self.leads(0).await?;
        let asked = request.into_inner();
        let mut state = self.world.state.lock();
        if let Some(there) = state.namespaces.iter().find(|namespace| namespace.name == asked.name) {
            let refusal = v1::NamespaceExists { id: there.id, name: there.name.clone() };
            return Err(Refusal::NamespaceExists(refusal).into());
        }
        let least = if asked.least == 0 { asked.copies.min(2) } else { asked.least };
        let id = u32::try_from(state.namespaces.len()).unwrap() + 1;
        let (class, copies, quota_bytes) = (asked.class, asked.copies, asked.quota_bytes);
        let made = v1::Namespace { id, name: asked.name, class, copies, least, quota_bytes };
        state.namespaces.push(made.clone());
        Ok(Response::new(v1::CreateNamespaceReply { namespace: Some(made), applied_ms: 1 }))
    }

    async fn grant(&self, request: Request<v1::GrantRequest>) -> Result<Response<v1::GrantReply>, Status> {
        self.leads(request.get_ref().shard).await?;
        Ok(Response::new(self.world.grant(request.get_ref())?))
    }

    async fn publish(&self, _: Request<v1::PublishRequest>) -> Result<Response<v1::PublishReply>, Status> {
        Err(Status::unimplemented("clients do not publish"))
    }

    async fn seal(&self, request: Request<v1::SealRequest>) -> Result<Response<v1::SealReply>, Status> {
        let asked = request.into_inner();
        let grant = convert::grant_id(asked.grant)?;
        self.leads(grant.shard.0).await?;
        let mut state = self.world.state.lock();
        state.grants.get_mut(&grant.sequence.number).unwrap().sealed.get_or_insert(asked.fill);
        Ok(Response::new(v1::SealReply { applied_ms: state.now_ms }))
    }

    async fn delete(&self, request: Request<v1::DeleteRequest>) -> Result<Response<v1::DeleteReply>, Status> {
        self.leads(request.get_ref().shard).await?;
        Ok(Response::new(self.world.delete(request.get_ref())?))
    }

    async fn resolve(&self, request: Request<v1::ResolveRequest>) -> Result<Response<v1::ResolveReply>, Status> {
        self.leads(request.get_ref().shard).await?;
        Ok(Response::new(self.world.resolve(request.get_ref())?))
    }

    async fn pin(&self, request: Request<v1::PinRequest>) -> Result<Response<v1::PinReply>, Status> {
        self.leads(request.get_ref().shard).await?;
        Ok(Response::new(self.world.pin(request.get_ref())?))
    }

    async fn renew_pin(&self, request: Request<v1::RenewPinRequest>) -> Result<Response<v1::RenewPinReply>, Status> {
        let asked = request.into_inner();
        self.leads(asked.shard).await?;
        let state = self.world.state.lock();
        if !asked.pin.is_some_and(|pin| state.pins.contains_key(&pin.number)) {
            return Err(Refusal::UnknownPin(v1::UnknownPin { pin: asked.pin }).into());
        }
        let duration_ms = asked.duration_ms.min(self.world.faults.lock().pin_ms_max.unwrap_or(u32::MAX));
        let applied_ms = state.now_ms;
        Ok(Response::new(v1::RenewPinReply { duration_ms, until_ms: 0, applied_ms }))
    }

    async fn release_pin(
        &self,
        request: Request<v1::ReleasePinRequest>,
    ) -> Result<Response<v1::ReleasePinReply>, Status> {
        let asked = request.into_inner();
        self.leads(asked.shard).await?;
        let mut state = self.world.state.lock();
        let held = state.pins.remove(&asked.pin.unwrap_or_default().number).is_some();
        Ok(Response::new(v1::ReleasePinReply { held, applied_ms: state.now_ms }))
    }

    async fn exists(&self, request: Request<v1::ExistsRequest>) -> Result<Response<v1::ExistsReply>, Status> {
        self.leads(request.get_ref().shard).await?;
        Ok(Response::new(self.world.exists(request.get_ref())?))
    }

    async fn list(&self, request: Request<v1::ListRequest>) -> Result<Response<v1::ListReply>, Status> {
        self.leads(request.get_ref().shard).await?;
        Ok(Response::new(self.world.list(request.get_ref())))
    }
}

struct NodeServer {
    index: usize,
    world: Arc<World>,
}

impl NodeServer {
    fn holder(&self) -> &Holder {
        &self.world.holders[self.index]
    }
}

#[tonic::async_trait]
impl DataNode for NodeServer {
    async fn arm(&self, request: Request<v1::ArmRequest>) -> Result<Response<v1::ArmReply>, Status> {
        self.world.answers().await;
        let holder = self.holder();
        if self.world.faults.lock().no_arm.contains(&holder.id.0) {
            return Err(Refusal::NotReady(v1::NotReady { why: "no lanes".to_owned(), retry_after_ms: 0 }).into());
        }
        let grant = convert::signed::<Grant>(&request.get_ref().grant)?.statement;
        let span = grant.span(grant.holder(holder.id).expect("a holder is asked to arm its own grant"));
        let span = usize::try_from(span.start).unwrap()..usize::try_from(span.end).unwrap();
        let lane = holder.lane.lock();
        let number = grant.id.sequence.number;
        let mut armed = holder.armed.lock();
        // Armed before, it answers the same until its lane is closed.
        let (address, region) = armed.entry(number).or_insert_with(|| {
            let key = Some(0xbeef_0000 + number);
            (lane.address(), lane.register(&holder.memory, span, Access::RemoteWrite, key).unwrap())
        });
        if *address != lane.address() {
            let reason = v1::arm_refused::Reason::LaneClosed.into();
            let refusal =
                v1::ArmRefused { reason, expected: "an open lane".to_owned(), found: "a closed one".to_owned() };
            return Err(Refusal::ArmRefused(refusal).into());
        }
        Ok(Response::new(v1::ArmReply {
            lane_address: Bytes::copy_from_slice(address.as_bytes()),
            write_key: region.key(),
            base: region.base(),
            provider: Provider::detect().unwrap().name().to_owned(),
        }))
    }

    async fn commit(&self, request: Request<v1::CommitRequest>) -> Result<Response<v1::CommitReply>, Status> {
        self.world.answers().await;
        let asked = request.into_inner();
        let lost = {
            let mut faults = self.world.faults.lock();
            if faults.unknown_grant.contains(&self.holder().id.0) {
                return Err(Refusal::UnknownGrant(v1::UnknownGrant { grant: asked.grant }).into());
            }
            if faults.lose_commits > 0 {
                faults.lose_commits -= 1;
                return Err(Status::unavailable("lost on its way"));
            }
            let lost = faults.lose_replies > 0;
            faults.lose_replies = faults.lose_replies.saturating_sub(1);
            lost
        };
        // Long enough for others to come meanwhile.
        tokio::time::sleep(Duration::from_millis(2)).await;
        let reply = self.world.commit(&asked)?;
        if lost {
            return Err(Status::unavailable("its reply was lost"));
        }
        Ok(Response::new(reply))
    }

    async fn confirm(&self, _: Request<v1::ConfirmRequest>) -> Result<Response<v1::ConfirmReply>, Status> {
        Err(Status::unimplemented("clients do not ask for confirmations"))
    }

    async fn move_copies(&self, _: Request<v1::MoveCopiesRequest>) -> Result<Response<v1::MoveCopiesReply>, Status> {
        Err(Status::unimplemented("not of this double"))
    }

    async fn close(&self, request: Request<v1::CloseRequest>) -> Result<Response<v1::CloseReply>, Status> {
        self.world.answers().await;
        let grant = convert::grant_id(request.into_inner().grant)?;
        self.holder().armed.lock().remove(&grant.sequence.number);
        Ok(Response::new(v1::CloseReply {}))
    }

    async fn region_record(
        &self,
        _: Request<v1::RegionRecordRequest>,
    ) -> Result<Response<v1::RegionRecordReply>, Status> {
        self.world.answers().await;
        let changing = {
            let mut faults = self.world.faults.lock();
            faults.changing = faults.changing.saturating_sub(1);
            faults.changing > 0
        };
        let record = if changing { Bytes::new() } else { self.holder().reading.lock().record.clone() };
        Ok(Response::new(v1::RegionRecordReply { incarnation: Some(incarnation().into()), record }))
    }

    async fn report_damage(
        &self,
        request: Request<v1::ReportDamageRequest>,
    ) -> Result<Response<v1::ReportDamageReply>, Status> {
        self.world.answers().await;
        let mut state = self.world.state.lock();
        state.reports.push((self.index, request.into_inner()));
        Ok(Response::new(v1::ReportDamageReply { dropped: true }))
    }

    async fn rotate_region(
        &self,
        _: Request<v1::RotateRegionRequest>,
    ) -> Result<Response<v1::RotateRegionReply>, Status> {
        Err(Status::unimplemented("clients do not rotate"))
    }

    async fn rotate_key(&self, _: Request<v1::RotateKeyRequest>) -> Result<Response<v1::RotateKeyReply>, Status> {
        Err(Status::unimplemented("clients do not rotate"))
    }

    async fn node_status(&self, _: Request<v1::NodeStatusRequest>) -> Result<Response<v1::NodeStatusReply>, Status> {
        Err(Status::unimplemented("clients do not ask for the status"))
    }
}
