//! Cables: a double of the meta node, a cluster of real data nodes around it, and a writer on the real fabric.

use bytes::Bytes;
use parking_lot::Mutex;
use quarry_datanode::{DataNode, DataNodeConfig, DataNodeError, KeySource};
use quarry_fabric::{
    Access, Endpoint, EndpointConfig, FabricAddress, LocalSpan, Memory, OperationError, Provider, RemoteSpan,
};
use quarry_proto::{
    convert,
    protocol::{Announce, Check},
    refusal::Refusal,
    v1::{
        self,
        commit_outcome::Code,
        control_server::{Control, ControlServer},
        data_node_client::DataNodeClient,
        registry_server::{Registry, RegistryServer},
    },
};
use quarry_wire::{
    attestation::{Attestation, AttestationBatch, Placement},
    certificate::{Certificate, Role},
    frame::{FrameHeader, FrameKind},
    grant::{Class, Grant, GrantHolder, Purpose},
    ids::{
        CertificateSerial, ClusterUuid, ExtentIndex, FeedNumber, Generation, GrantId, Incarnation, LendNumber,
        NamespaceId, NodeId, Ordinal, RegionId, RegionIndex, ShardId, SlotIndex, WriterId,
    },
    key::Key,
    keyring::Keyring,
    region::RegionRecord,
    signed::{SecretKey, Signed},
    units::{Offset, SlotCount, SlotSize},
    version::{HybridClock, Version},
};
use std::{
    collections::BTreeMap,
    future::pending,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tokio::{net::TcpListener, task::JoinHandle, time::Instant};
use tonic::{
    Request, Response, Status,
    service::{Interceptor as _, interceptor::InterceptedService},
    transport::{Channel, Server, server::TcpIncoming},
};

pub(crate) const CLUSTER: ClusterUuid = ClusterUuid([0x51; 16]);
pub(crate) const REGION_BYTES: u64 = 4 << 20;
pub(crate) const EXTENT_BYTES: u64 = REGION_BYTES / 16;
pub(crate) const SLOT: u32 = 8192;
pub(crate) const NAMESPACE: NamespaceId = NamespaceId(3);
pub(crate) const META: NodeId = NodeId(1);
const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// What any step of a test may take on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// What one read or write may take. Where nobody listens any more, libfabric tries until then.
const ATTEMPT: Duration = Duration::from_secs(2);

pub(crate) type Client = DataNodeClient<InterceptedService<Channel, Announce>>;

pub(crate) fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// Polls until `condition` holds.
pub(crate) async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = soon();
    while !condition().await {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) fn writer(number: u8) -> WriterId {
    WriterId::anonymous([number; 8])
}

fn root() -> SecretKey {
    SecretKey::from_seed(&[1; 32])
}
fn meta_key() -> SecretKey {
    SecretKey::from_seed(&[2; 32])
}
pub(crate) fn node_key(node: NodeId) -> SecretKey {
    SecretKey::from_seed(&[u8::try_from(node.0).unwrap(); 32])
}
fn certify(node: NodeId, role: Role, key: &SecretKey) -> Signed<Certificate> {
    let said = Certificate { serial: CertificateSerial(node.0), node, role, key: key.public() };
    root().sign_as_root(CLUSTER, said)
}

// ------------------------------------------------------------------------------------------------- the double

/// How the double answers a Publish.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mood {
    #[default]
    Judges,
    /// It was handed to the log, and nobody knows.
    Unsure,
    /// The same once, then it refuses.
    UnsureOnce,
    /// Refuses for good.
    Refuses,
    /// Never answers.
    Silent,
    /// Refuses as no leader, naming another address.
    Points(String),
}

#[derive(Default)]
pub(crate) struct DoubleState {
    pub(crate) generation: u32,
    pub(crate) mood: Mood,
    /// It knows no calls of several publishes, as builds before them.
    pub(crate) knows_one_alone: bool,
    /// Publishes in each call.
    pub(crate) calls: Vec<usize>,
    pub(crate) grants: BTreeMap<GrantId, Grant>,
    pub(crate) published: Vec<v1::PublishRequest>,
    pub(crate) outcomes: BTreeMap<(GrantId, u32), v1::CommitOutcome>,
    pub(crate) void: Vec<(RegionId, Incarnation)>,
    pub(crate) records: BTreeMap<RegionId, Signed<RegionRecord>>,
    pub(crate) heartbeats: BTreeMap<NodeId, u64>,
    pub(crate) revocations: Bytes,
    /// Batches that were published, and those that took their places, by number.
    pub(crate) batches: BTreeMap<u64, Signed<AttestationBatch>>,
    /// So many times grants still wait for what was signed before; then this is published.
    pub(crate) awaiting: u64,
    pub(crate) late: Option<Signed<AttestationBatch>>,
    /// The newest grant, at each look one newer; and up to which one it was asked whether grants wait.
    pub(crate) newest_grant: u64,
    pub(crate) asked_up_to: Vec<Option<u64>>,
    /// What nodes said of copies that were complained of. Those without a whole frame go.
    pub(crate) checked: Vec<v1::CheckCopyRequest>,
    /// No call of anybody reaches it now.
    pub(crate) cut_off: bool,
    /// It says of every node that it was forgotten.
    pub(crate) forgets: bool,
    /// It takes no records now.
    pub(crate) takes_no_records: bool,
    lives: BTreeMap<RegionId, (Incarnation, Bytes)>,
    nodes: BTreeMap<NodeId, String>,
    certificates: Vec<Signed<Certificate>>,
    feed: u64,
}

/// A double of a meta node that leads every group.
#[derive(Clone)]
pub(crate) struct Double {
    pub(crate) state: Arc<Mutex<DoubleState>>,
    pub(crate) address: SocketAddr,
    _server: Arc<Running>,
}

struct Running(JoinHandle<()>);
impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[derive(Clone)]
struct Serves(Arc<Mutex<DoubleState>>);

impl Double {
    pub(crate) async fn start() -> Self {
        let state = Arc::new(Mutex::new(DoubleState {
            generation: 1,
            certificates: vec![certify(META, Role::Meta, &meta_key())],
            ..Default::default()
        }));
        let listener = TcpListener::bind((LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let serves = Serves(Arc::clone(&state));
        let reached = Arc::clone(&state);
        let check = move |request: Request<()>| {
            if reached.lock().cut_off { Err(Status::unavailable("cut off")) } else { Check.call(request) }
        };
        let server = Server::builder()
            .add_service(InterceptedService::new(ControlServer::new(serves.clone()), check.clone()))
            .add_service(InterceptedService::new(RegistryServer::new(serves), check))
            .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)));
        let server = tokio::spawn(async { server.await.unwrap() });
        Self { state, address, _server: Arc::new(Running(server)) }
    }

    pub(crate) fn record(&self, node: NodeId) -> RegionRecord {
        let region = RegionId { node, index: RegionIndex(0) };
        self.state.lock().records[&region].statement.clone()
    }

    /// What a reader or shard would believe.
    pub(crate) fn keyring(&self) -> Keyring {
        self.state.lock().keyring()
    }
}

impl DoubleState {
    fn keyring(&self) -> Keyring {
        let mut keyring = Keyring::new(CLUSTER, root().public()).unwrap();
        keyring.see_generation(Generation(self.generation));
        for certificate in &self.certificates {
            keyring.admit(certificate).unwrap();
        }
        keyring
    }
    fn feed(&self) -> FeedNumber {
        FeedNumber::new(Generation(self.generation), self.feed)
    }
    fn changes(&self) -> v1::Changes {
        v1::Changes {
            at: Some(self.feed().into()),
            certificates: self.certificates.iter().map(|signed| signed.encode().into()).collect(),
            records: self.records.values().map(|signed| signed.encode().into()).collect(),
            namespaces: Vec::new(),
            revocations: self.revocations.clone(),
            data_nodes: self
                .nodes
                .iter()
                .map(|(node, address)| v1::DataNodeInfo {
                    node: node.0,
                    address: address.clone(),
                    alive: true,
                    revoked: false,
                })
                .collect(),
            retired: Vec::new(),
            metas: Vec::new(),
        }
    }

    /// Knows the same nodes as `other`.
    pub(crate) fn adopt(&mut self, other: &Self) {
        self.certificates.clone_from(&other.certificates);
        self.nodes.clone_from(&other.nodes);
    }

    /// Each of a call as if it had come alone.
    fn judge_all(&mut self, request: v1::PublishRequest) -> Result<v1::PublishReply, Refusal> {
        if request.together.is_empty() || self.knows_one_alone {
            self.calls.push(1);
            return self.judge(request);
        }
        self.calls.push(request.together.len());
        let together = request.together.into_iter().map(|publish| v1::PublishAnswer {
            answer: Some(match self.judge(publish) {
                Ok(reply) => v1::publish_answer::Answer::Reply(reply),
                Err(refusal) => v1::publish_answer::Answer::Refusal(v1::Refusal { kind: Some(refusal) }),
            }),
        });
        Ok(v1::PublishReply { together: together.collect(), ..Default::default() })
    }

    /// As a shard does: the first outcome stands; else enough valid attestations commit.
    fn judge(&mut self, request: v1::PublishRequest) -> Result<v1::PublishReply, Refusal> {
        let id = convert::grant_id(request.grant)?;
        let writer = convert::writer_id(&request.writer)?;
        let grant = self.grants.get(&id).cloned();
        let grant = grant.ok_or(Refusal::UnknownGrant(v1::UnknownGrant { grant: request.grant }))?;
        let keyring = self.keyring();
        for bytes in &request.attested {
            let signed = convert::signed::<AttestationBatch>(bytes)?;
            let number = self.batches.len() as u64 + 1;
            let batch = keyring.verify(signed.clone());
            let batch = batch.map_err(|error| Refusal::Untrusted(v1::Untrusted { why: error.to_string() }))?;
            self.batches.insert(number, signed);
            let holder = *grant.holder(batch.get().node).unwrap();
            let leaf = |entry: &v1::CommitEntry| {
                let slot = SlotIndex(entry.slot);
                Attestation {
                    namespace: grant.namespace,
                    key: convert::key(&entry.key).unwrap(),
                    kind: convert::frame_kind(entry.kind).unwrap(),
                    version: Version { clock: HybridClock(entry.clock), writer },
                    payload_bytes: entry.payload_bytes,
                    payload_crc: entry.payload_crc,
                    grant: id,
                    lend: holder.lend,
                    slot,
                    region: holder.region,
                    incarnation: holder.incarnation,
                    placement: Placement::Resident(grant.offset(&holder, slot).unwrap()),
                }
                .leaf()
            };
            let leaves: Vec<_> = request.entries.iter().map(leaf).collect();
            if AttestationBatch::of(holder.region.node, &leaves) != *batch.get() {
                return Err(Refusal::Untrusted(v1::Untrusted { why: "another root".to_owned() }));
            }
        }
        let fresh = if request.attested.len() >= usize::from(grant.least) {
            v1::CommitOutcome { code: Code::Committed.into(), ..Default::default() }
        } else {
            let (a, b) = (u64::from(grant.least), request.attested.len() as u64);
            v1::CommitOutcome { code: Code::NotEnoughHolders.into(), a, b, ..Default::default() }
        };
        let outcome =
            |entry: &v1::CommitEntry| self.outcomes.entry((id, entry.slot)).or_insert_with(|| fresh.clone()).clone();
        let outcomes = request.entries.iter().map(outcome).collect();
        self.published.push(request);
        Ok(v1::PublishReply { outcomes, applied_ms: 77, ..Default::default() })
    }
}

#[tonic::async_trait]
impl Control for Serves {
    async fn describe(&self, _: Request<v1::DescribeRequest>) -> Result<Response<v1::DescribeReply>, Status> {
        let state = self.0.lock();
        Ok(Response::new(v1::DescribeReply {
            cluster: Bytes::copy_from_slice(&CLUSTER.0),
            generation: state.generation,
            shards: 1,
            changes: Some(state.changes()),
            ..Default::default()
        }))
    }
    async fn publish(&self, request: Request<v1::PublishRequest>) -> Result<Response<v1::PublishReply>, Status> {
        let mood = self.0.lock().mood.clone();
        match mood {
            Mood::Judges => Ok(Response::new(self.0.lock().judge_all(request.into_inner())?)),
            Mood::Unsure => {
                // Applied, and the answer is lost.
                self.0.lock().judge_all(request.into_inner())?;
                Err(Refusal::Indeterminate(v1::Indeterminate { why: "lost".to_owned() }).into())
            }
            Mood::UnsureOnce => {
                let mut state = self.0.lock();
                state.mood = Mood::Refuses;
                state.judge_all(request.into_inner())?;
                Err(Refusal::Indeterminate(v1::Indeterminate { why: "lost".to_owned() }).into())
            }
            Mood::Refuses => Err(Refusal::Untrusted(v1::Untrusted { why: "revoked meanwhile".to_owned() }).into()),
            Mood::Silent => pending().await,
            Mood::Points(address) => Err(Refusal::NotLeader(v1::NotLeader { group: 1, leader: 9, address }).into()),
        }
    }
    async fn create_namespace(
        &self,
        _: Request<v1::CreateNamespaceRequest>,
    ) -> Result<Response<v1::CreateNamespaceReply>, Status> {
        Err(Status::unimplemented("not of this double"))
    }
    async fn grant(&self, _: Request<v1::GrantRequest>) -> Result<Response<v1::GrantReply>, Status> {
        Err(Status::unimplemented("not of this double"))
    }
    async fn seal(&self, _: Request<v1::SealRequest>) -> Result<Response<v1::SealReply>, Status> {
        Err(Status::unimplemented("not of this double"))
    }
    async fn delete(&self, _: Request<v1::DeleteRequest>) -> Result<Response<v1::DeleteReply>, Status> {
        Err(Status::unimplemented("not of this double"))
    }
    async fn resolve(&self, _: Request<v1::ResolveRequest>) -> Result<Response<v1::ResolveReply>, Status> {
        Err(Status::unimplemented("not of this double"))
    }
    async fn pin(&self, _: Request<v1::PinRequest>) -> Result<Response<v1::PinReply>, Status> {
        Err(Status::unimplemented("not of this double"))
    }
    async fn renew_pin(&self, _: Request<v1::RenewPinRequest>) -> Result<Response<v1::RenewPinReply>, Status> {
        Err(Status::unimplemented("not of this double"))
    }
    async fn release_pin(&self, _: Request<v1::ReleasePinRequest>) -> Result<Response<v1::ReleasePinReply>, Status> {
        Err(Status::unimplemented("not of this double"))
    }
    async fn exists(&self, _: Request<v1::ExistsRequest>) -> Result<Response<v1::ExistsReply>, Status> {
        Err(Status::unimplemented("not of this double"))
    }
    async fn list(&self, _: Request<v1::ListRequest>) -> Result<Response<v1::ListReply>, Status> {
        Err(Status::unimplemented("not of this double"))
    }
}

#[tonic::async_trait]
impl Registry for Serves {
    async fn register_region(
        &self,
        request: Request<v1::RegisterRegionRequest>,
    ) -> Result<Response<v1::RegisterRegionReply>, Status> {
        let request = request.into_inner();
        let mut state = self.0.lock();
        let region = RegionId::from(request.region.unwrap());
        let certificate = convert::signed::<Certificate>(&request.certificate)?;
        if !state.certificates.contains(&certificate) {
            state.certificates.push(certificate);
        }
        let generation = Generation(state.generation);
        let incarnation = match state.lives.get(&region) {
            Some((life, boot)) if *boot == request.boot => *life,
            Some((life, _)) if life.0.generation == generation => Incarnation::new(generation, life.0.number + 1),
            _ => Incarnation::new(generation, 1),
        };
        state.lives.insert(region, (incarnation, request.boot));
        state.nodes.insert(region.node, request.address);
        state.void.retain(|(other, _)| *other != region);
        state.feed += 1;
        Ok(Response::new(v1::RegisterRegionReply {
            incarnation: Some(incarnation.into()),
            cluster: Bytes::copy_from_slice(&CLUSTER.0),
            generation: state.generation,
        }))
    }
    async fn record_region(
        &self,
        request: Request<v1::RecordRegionRequest>,
    ) -> Result<Response<v1::RecordRegionReply>, Status> {
        let mut state = self.0.lock();
        if state.takes_no_records {
            return Err(Refusal::NotReady(v1::NotReady { why: "no leader".to_owned(), retry_after_ms: 1 }).into());
        }
        let signed = convert::signed::<RegionRecord>(&request.into_inner().record)?;
        let record = state.keyring().verify(signed);
        let record = record.map_err(|error| Refusal::Untrusted(v1::Untrusted { why: error.to_string() }))?;
        let region = record.get().region;
        let (current, _) = state.lives[&region];
        if record.get().incarnation != current {
            return Err(Refusal::StaleIncarnation(v1::StaleIncarnation {
                region: Some(region.into()),
                expected: Some(current.into()),
                found: Some(record.get().incarnation.into()),
            })
            .into());
        }
        let held = state.records.get(&region).map(|held| (held.statement.incarnation, held.statement.epoch));
        let said = (record.get().incarnation, record.get().epoch);
        assert!(held.is_none_or(|held| held <= said), "epochs only grow: {held:?}, then {said:?}");
        state.records.insert(region, record.signed().clone());
        state.feed += 1;
        Ok(Response::new(v1::RecordRegionReply { feed: Some(state.feed().into()) }))
    }
    async fn admit_certificate(
        &self,
        request: Request<v1::AdmitCertificateRequest>,
    ) -> Result<Response<v1::AdmitCertificateReply>, Status> {
        let certificate = convert::signed::<Certificate>(&request.into_inner().certificate)?;
        let mut state = self.0.lock();
        state.certificates.push(certificate);
        state.feed += 1;
        Ok(Response::new(v1::AdmitCertificateReply { feed: Some(state.feed().into()) }))
    }
    async fn batches(&self, request: Request<v1::BatchesRequest>) -> Result<Response<v1::BatchesReply>, Status> {
        let asked = request.into_inner();
        let mut state = self.0.lock();
        let awaiting = state.awaiting;
        if asked.after == 0 {
            state.awaiting = awaiting.saturating_sub(1);
        }
        let others = state.batches.range(asked.after + 1..).filter(|(_, held)| held.serial.0 != asked.serial);
        // One at a time: pages are what is tried here.
        let batches =
            others.take(1).map(|(number, held)| v1::NamedBatch { batch: *number, signed: held.encode().into() });
        let batches = batches.collect();
        if awaiting == 1
            && let Some(late) = state.late.take()
        {
            let number = state.batches.len() as u64 + 1;
            state.batches.insert(number, late);
        }
        state.newest_grant += 1;
        state.asked_up_to.push(asked.last.map(|last| last.number));
        let newest = v1::Ordinal { generation: 1, number: state.newest_grant };
        let last = Some(asked.last.unwrap_or(newest));
        Ok(Response::new(v1::BatchesReply { batches, last, awaiting }))
    }
    async fn resign(&self, request: Request<v1::ResignRequest>) -> Result<Response<v1::ResignReply>, Status> {
        let asked = request.into_inner();
        let mut state = self.0.lock();
        let mut taken = 0;
        for named in &asked.batches {
            let signed = convert::signed::<AttestationBatch>(&named.signed)?;
            state.keyring().verify(signed.clone()).expect("a node signs with a key that is known");
            let held = state.batches.insert(named.batch, signed.clone()).unwrap();
            assert_eq!(held.statement, signed.statement, "what was said stays");
            taken += 1;
        }
        Ok(Response::new(v1::ResignReply { taken }))
    }
    async fn check_copy(&self, request: Request<v1::CheckCopyRequest>) -> Result<Response<v1::CheckCopyReply>, Status> {
        let asked = request.into_inner();
        let dropped = asked.found.is_none();
        self.0.lock().checked.push(asked);
        Ok(Response::new(v1::CheckCopyReply { dropped, why: String::new() }))
    }
    async fn heartbeat(&self, request: Request<v1::HeartbeatRequest>) -> Result<Response<v1::HeartbeatReply>, Status> {
        let mut state = self.0.lock();
        let node = request.get_ref().node;
        *state.heartbeats.entry(NodeId(node)).or_default() += 1;
        if state.forgets {
            let reason = v1::node_refused::Reason::Retired;
            return Err(Refusal::node_refused(reason, node, format_args!("node {node} was forgotten")).into_status());
        }
        let life = |(region, life): &(RegionId, Incarnation)| v1::RegionLife {
            region: Some((*region).into()),
            incarnation: Some((*life).into()),
        };
        Ok(Response::new(v1::HeartbeatReply {
            void: state.void.iter().map(life).collect(),
            changes: Some(state.changes()),
            generation: state.generation,
            groups: Vec::new(),
            metas: Vec::new(),
        }))
    }
}

// ------------------------------------------------------------------------------------------------- the cluster

/// A data node with its folder.
pub(crate) struct Running1 {
    pub(crate) id: NodeId,
    pub(crate) node: DataNode,
    pub(crate) client: Client,
    pub(crate) folder: tempfile::TempDir,
}

pub(crate) fn config(double: &Double, id: NodeId, folder: &std::path::Path) -> DataNodeConfig {
    DataNodeConfig {
        node: id,
        listen: SocketAddr::new(LOCALHOST, 0),
        advertise: None,
        data_dir: folder.to_owned(),
        metas: vec![double.address.to_string()],
        cluster: CLUSTER,
        root: root().public(),
        key: node_key(id),
        certificate: certify(id, Role::DataNode, &node_key(id)),
        key_source: None,
        trust: quarry_trust::Trust::off(),
        limits: quarry_trust::Limits::default(),
        labels: quarry_datanode::Labels::default(),
        region_bytes: vec![REGION_BYTES],
        populate: false,
        fabric_bind: LOCALHOST,
        provider: None,
        heartbeat: Duration::from_millis(20),
        rotate_every: None,
        lanes_max: 256,
        admin_address: None,
    }
}

pub(crate) async fn client(address: SocketAddr) -> Client {
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
    DataNodeClient::with_interceptor(channel.connect().await.unwrap(), Announce)
}

/// Starts data node `id` and waits until it is registered.
pub(crate) async fn node_with(
    double: &Double,
    id: u64,
    change: impl FnOnce(&mut DataNodeConfig),
) -> Result<Running1, DataNodeError> {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(double, NodeId(id), folder.path());
    change(&mut config);
    let node = DataNode::start(config).await?;
    node.ready(soon()).await?;
    let client = client(node.address()).await;
    Ok(Running1 { id: NodeId(id), node, client, folder })
}

pub(crate) async fn node(double: &Double, id: u64) -> Running1 {
    node_with(double, id, |_| {}).await.unwrap()
}

/// A grant of sequence `sequence` for writer `by`: `slots` slots from slot `first` of extent 0, on each of `holders`.
pub(crate) fn grant(double: &Double, holders: &[NodeId], sequence: u64, by: u8, first: u32, slots: u32) -> Grant {
    let state = double.state.lock();
    let generation = Generation(state.generation);
    let holder = |node: &NodeId| {
        let region = RegionId { node: *node, index: RegionIndex(0) };
        GrantHolder {
            region,
            incarnation: state.lives[&region].0,
            extent: ExtentIndex(0),
            lend: LendNumber::new(generation, 1),
            base: Offset(u64::from(first) * u64::from(SLOT)),
        }
    };
    Grant {
        id: GrantId { shard: ShardId(1), sequence: Ordinal { generation, number: sequence } },
        meta: META,
        purpose: Purpose::Write,
        writer: writer(by),
        namespace: NAMESPACE,
        class: Class::Cache,
        least: 1,
        slot_size: SlotSize(SLOT),
        slots: SlotCount(slots),
        ttl: Duration::from_secs(30),
        holders: holders.iter().map(holder).collect(),
    }
}

/// The grant as its shard's leader signs it; the double's shard knows it from now on.
pub(crate) fn sign(double: &Double, grant: &Grant) -> Bytes {
    double.state.lock().grants.insert(grant.id, grant.clone());
    let generation = Generation(double.state.lock().generation);
    meta_key().sign(CLUSTER, generation, CertificateSerial(META.0), grant.clone()).encode().into()
}

/// Signed by somebody who is no meta node: the data node `by`.
pub(crate) fn sign_as(by: NodeId, grant: &Grant) -> Bytes {
    let claims_to_be = Grant { meta: by, ..grant.clone() };
    node_key(by).sign(CLUSTER, Generation(1), CertificateSerial(by.0), claims_to_be).encode().into()
}

/// The root declares a node's certificate void.
pub(crate) fn revoke(double: &Double, node: NodeId) {
    let list = quarry_wire::certificate::Revocations { number: 1, serials: [CertificateSerial(node.0)].into() };
    let mut state = double.state.lock();
    state.revocations = root().sign_as_root(CLUSTER, list).encode().into();
    state.feed += 1;
}

pub(crate) async fn arm(node: &Running1, signed: &Bytes, by: u8) -> Result<v1::ArmReply, Refusal> {
    let request = v1::ArmRequest { grant: signed.clone(), writer: Bytes::copy_from_slice(&writer(by).0) };
    let reply = node.client.clone().arm(request).await;
    reply.map(Response::into_inner).map_err(|status| refusal(&status))
}

pub(crate) fn refusal(status: &Status) -> Refusal {
    Refusal::from_status(status).unwrap_or_else(|| panic!("a fault, not a refusal: {status:?}"))
}

/// The reason of a refused arm.
pub(crate) fn reason(answer: Result<v1::ArmReply, Refusal>) -> v1::arm_refused::Reason {
    match answer {
        Err(Refusal::ArmRefused(it)) => it.reason(),
        other => panic!("not an arm refusal: {other:?}"),
    }
}

/// Asks for new read keys of all regions.
pub(crate) async fn rotate(node: &Running1, wait: Duration) -> Result<Vec<v1::RegionEpoch>, Refusal> {
    let mut request = Request::new(v1::RotateRegionRequest { region: None, why: "a test".to_owned() });
    request.set_timeout(wait);
    let reply = node.client.clone().rotate_region(request).await;
    reply.map(|reply| reply.into_inner().regions).map_err(|status| refusal(&status))
}

/// A key and its certificate, where a key file would be.
#[derive(Debug)]
pub(crate) struct Keys(pub(crate) Mutex<Result<(SecretKey, Signed<Certificate>), String>>);

impl Keys {
    /// Another key of `node`, certified under `serial`.
    pub(crate) fn another(node: NodeId, serial: u64) -> (SecretKey, Signed<Certificate>) {
        let key = SecretKey::from_seed(&[u8::try_from(serial).unwrap(); 32]);
        let said = Certificate { serial: CertificateSerial(serial), node, role: Role::DataNode, key: key.public() };
        (key, root().sign_as_root(CLUSTER, said))
    }
}

impl KeySource for Keys {
    fn read(&self) -> Result<(SecretKey, Signed<Certificate>), String> {
        self.0.lock().clone()
    }
}

/// Has a node change its signing key.
pub(crate) async fn rotate_key(node: &Running1, wait: Duration) -> Result<v1::RotateKeyReply, Refusal> {
    let mut request = Request::new(v1::RotateKeyRequest { why: "a test".to_owned() });
    request.set_timeout(wait);
    node.client.clone().rotate_key(request).await.map(Response::into_inner).map_err(|status| refusal(&status))
}

pub(crate) async fn report_damage(
    node: &Running1,
    asked: v1::ReportDamageRequest,
) -> Result<v1::ReportDamageReply, Refusal> {
    let mut request = Request::new(asked);
    request.set_timeout(PATIENCE);
    node.client.clone().report_damage(request).await.map(Response::into_inner).map_err(|status| refusal(&status))
}

/// A batch that `key` signs as `node` under `serial`.
pub(crate) fn batch(node: NodeId, key: &SecretKey, serial: u64) -> Signed<AttestationBatch> {
    let said = AttestationBatch { node, leaves: 1, root: [u8::try_from(serial).unwrap(); 32] };
    key.sign(CLUSTER, Generation(1), CertificateSerial(serial), said)
}

pub(crate) async fn status(node: &Running1) -> v1::NodeStatusReply {
    node.client.clone().node_status(v1::NodeStatusRequest {}).await.unwrap().into_inner()
}

// ------------------------------------------------------------------------------------------------- the writer

/// A frame for `slot`.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) slot: u32,
    pub(crate) header: FrameHeader,
    pub(crate) payload: Vec<u8>,
}

pub(crate) fn frame(grant: &Grant, slot: u32, key: &str) -> Frame {
    let seed = u8::try_from(grant.id.sequence.number % 100).unwrap();
    let payload: Vec<u8> = (0..4000u32).map(|byte| (byte % 251) as u8 ^ seed).collect();
    let header = FrameHeader {
        namespace: grant.namespace,
        key: Key::new(key).unwrap(),
        version: Version { clock: HybridClock::at(1_000 + u64::from(slot)), writer: grant.writer },
        kind: FrameKind::Value,
        payload_bytes: payload.len() as u64,
        payload_crc: crc32c::crc32c(&payload),
    };
    Frame { slot, header, payload }
}

impl Frame {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.header.bytes()];
        self.header.write_to(&mut bytes);
        bytes.extend(&self.payload);
        bytes
    }
    pub(crate) fn entry(&self) -> v1::CommitEntry {
        v1::CommitEntry {
            slot: self.slot,
            key: Bytes::copy_from_slice(self.header.key.as_bytes()),
            clock: self.header.version.clock.0,
            kind: v1::FrameKind::Value.into(),
            payload_bytes: self.header.payload_bytes,
            payload_crc: self.header.payload_crc,
            mode: None,
        }
    }
}

/// Somebody with an endpoint: writes and reads as any peer could.
pub(crate) struct Peer {
    endpoint: Endpoint,
}

impl Peer {
    pub(crate) fn new() -> Self {
        let provider = Provider::detect().unwrap();
        Self {
            endpoint: Endpoint::open(EndpointConfig { provider, bind: LOCALHOST, port: None, spin: Duration::ZERO })
                .unwrap(),
        }
    }

    pub(crate) async fn write(&self, to: &[u8], key: u64, address: u64, bytes: &[u8]) -> Result<(), OperationError> {
        let memory = Memory::allocate(bytes.len()).unwrap();
        memory.copy_in(0, bytes).unwrap();
        let local = Arc::new(self.endpoint.register(&memory, 0..bytes.len(), Access::Local, None).unwrap());
        let local = LocalSpan::new(&local, 0..bytes.len()).unwrap();
        let peer = self.endpoint.connect(&FabricAddress::from_bytes(to).unwrap()).unwrap();
        let remote = RemoteSpan { address, key, len: bytes.len() as u64 };
        self.endpoint.write(&peer, local, remote, Instant::now() + ATTEMPT).await
    }

    pub(crate) async fn read(
        &self,
        from: &[u8],
        key: u64,
        address: u64,
        length: usize,
    ) -> Result<Vec<u8>, OperationError> {
        let memory = Memory::allocate(length).unwrap();
        let local = Arc::new(self.endpoint.register(&memory, 0..length, Access::Local, None).unwrap());
        let local = LocalSpan::new(&local, 0..length).unwrap();
        let peer = self.endpoint.connect(&FabricAddress::from_bytes(from).unwrap()).unwrap();
        let remote = RemoteSpan { address, key, len: length as u64 };
        self.endpoint.read(&peer, local, remote, Instant::now() + ATTEMPT).await?;
        Ok(memory.copy_to_vec(0, length).unwrap())
    }

    /// Writes a frame where an armed grant has its slot.
    pub(crate) async fn put(&self, armed: &v1::ArmReply, frame: &Frame) -> Result<(), OperationError> {
        let address = armed.base + u64::from(frame.slot) * u64::from(SLOT);
        self.write(&armed.lane_address, armed.write_key, address, &frame.bytes()).await
    }

    /// Reads what lies in a slot of a grant, as a reader does: with the region record.
    pub(crate) async fn get(&self, record: &RegionRecord, grant: &Grant, slot: u32, length: usize) -> Vec<u8> {
        let holder = grant.holder(record.region.node).unwrap();
        let offset = grant.offset(holder, SlotIndex(slot)).unwrap().0;
        self.read(record.address.as_bytes(), record.read_key, record.base + offset, length).await.unwrap()
    }
}

pub(crate) async fn commit_as(
    node: &Running1,
    grant: &Grant,
    by: u8,
    written: &[NodeId],
    entries: Vec<v1::CommitEntry>,
    wait: Duration,
) -> Result<Vec<v1::CommitOutcome>, Refusal> {
    let mut request = Request::new(v1::CommitRequest {
        grant: Some(grant.id.into()),
        writer: Bytes::copy_from_slice(&writer(by).0),
        written: written.iter().map(|node| node.0).collect(),
        entries,
    });
    request.set_timeout(wait);
    let reply = node.client.clone().commit(request).await;
    reply.map(|reply| reply.into_inner().outcomes).map_err(|status| refusal(&status))
}

/// Commits frames by the grant's own writer, written on all its holders.
pub(crate) async fn commit(node: &Running1, grant: &Grant, frames: &[&Frame]) -> Result<Vec<Code>, Refusal> {
    let holders: Vec<NodeId> = grant.holders.iter().map(|holder| holder.region.node).collect();
    let entries = frames.iter().map(|frame| frame.entry()).collect();
    let by = grant.writer.0[0];
    let outcomes = commit_as(node, grant, by, &holders, entries, PATIENCE).await?;
    Ok(outcomes.iter().map(v1::CommitOutcome::code).collect())
}
