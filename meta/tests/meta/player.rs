//! Data nodes and writers as the tests play them: real keys and signatures, no memory.

use crate::cluster::{Cluster, Node, UUID, fresh, identity, root};
use quarry_proto::{refusal::Refusal, v1};
use quarry_wire::{
    attestation::{Attestation, AttestationBatch, Descriptor, Placement},
    certificate::{Certificate, Role},
    frame::FrameKind,
    grant::Grant,
    ids::{
        CertificateSerial, Generation, GrantId, Incarnation, LendNumber, NamespaceId, NodeId, RegionEpoch, RegionId,
        RegionIndex, ShardId, SlotIndex, WriterId,
    },
    key::Key,
    keyring::Keyring,
    merkle::Hash,
    region::{FabricName, RegionRecord},
    signed::{SecretKey, Signed},
    units::Offset,
    version::{HybridClock, Version},
};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::{task::JoinSet, time::sleep};

const REGION_BYTES: u64 = 16 << 20;

/// A data node with one region.
pub(crate) struct DataNode {
    pub(crate) id: NodeId,
    key: SecretKey,
    certificate: Signed<Certificate>,
    pub(crate) incarnation: Incarnation,
    /// Where it says that its server is.
    address: String,
    /// What it says that it shares its fate with.
    pub(crate) zone: String,
    beating: JoinSet<()>,
}

impl DataNode {
    /// Registers, says where it can be read, and sends heartbeats.
    pub(crate) async fn join(cluster: &Cluster, id: u64) -> Self {
        Self::join_at(cluster, id, format!("127.0.0.1:{}", 10_000 + id)).await
    }

    /// The same, of this zone.
    pub(crate) async fn join_in(cluster: &Cluster, id: u64, zone: &str) -> Self {
        let mut node = Self::join(cluster, id).await;
        zone.clone_into(&mut node.zone);
        // The labels come with a registration, a repeated one too.
        node.register(cluster, fresh().into()).await;
        node.record(cluster).await.unwrap();
        node.fall_silent();
        node.beat(cluster);
        node
    }

    /// The same, with a server at this address.
    pub(crate) async fn join_at(cluster: &Cluster, id: u64, address: String) -> Self {
        let id = NodeId(id);
        let (key, certificate) = identity(id, Role::DataNode);
        let (incarnation, beating, zone) = (Incarnation::default(), JoinSet::new(), String::new());
        let mut node = Self { id, key, certificate, incarnation, address, zone, beating };
        node.register(cluster, fresh().into()).await;
        node.record(cluster).await.unwrap();
        node.beat(cluster);
        node
    }

    pub(crate) const fn region(&self) -> RegionId {
        RegionId { node: self.id, index: RegionIndex(0) }
    }

    /// The generation that it lives in.
    const fn generation(&self) -> Generation {
        self.incarnation.0.generation
    }

    pub(crate) fn registration(&self, boot: u128) -> v1::RegisterRegionRequest {
        v1::RegisterRegionRequest {
            certificate: self.certificate.encode().into(),
            region: Some(self.region().into()),
            length: REGION_BYTES,
            boot: boot.to_le_bytes().to_vec().into(),
            address: self.address.clone(),
            host: format!("host-{}", self.id.0),
            zone: self.zone.clone(),
        }
    }

    pub(crate) async fn register(&mut self, cluster: &Cluster, boot: u128) {
        let request = self.registration(boot);
        let reply = cluster.ask(async |node: &Node| node.registry().register_region(request.clone()).await).await;
        self.incarnation = reply.unwrap().incarnation.unwrap().into();
    }

    pub(crate) async fn record(&self, cluster: &Cluster) -> Result<v1::RecordRegionReply, Refusal> {
        let record = RegionRecord {
            region: self.region(),
            incarnation: self.incarnation,
            epoch: RegionEpoch(1),
            length: REGION_BYTES,
            base: 0,
            read_key: 7,
            provider: "tcp".to_owned(),
            address: FabricName::new(b"somewhere").unwrap(),
        };
        let record = self.key.sign(UUID, self.generation(), self.certificate.statement.serial, record).encode();
        let request = v1::RecordRegionRequest { record: record.into() };
        cluster.ask(async |node: &Node| node.registry().record_region(request.clone()).await).await
    }

    pub(crate) fn heartbeat(&self) -> v1::HeartbeatRequest {
        let life = v1::RegionLife { region: Some(self.region().into()), incarnation: Some(self.incarnation.into()) };
        v1::HeartbeatRequest { node: self.id.0, regions: vec![life], seen: None }
    }

    /// Sends heartbeats to every node until [`DataNode::fall_silent`].
    pub(crate) fn beat(&mut self, cluster: &Cluster) {
        for node in &cluster.nodes {
            let (mut registry, heartbeat) = (node.registry(), self.heartbeat());
            self.beating.spawn(async move {
                loop {
                    // A node that is down hears nothing; the others do.
                    drop(registry.heartbeat(heartbeat.clone()).await);
                    sleep(Duration::from_millis(100)).await;
                }
            });
        }
    }

    pub(crate) fn fall_silent(&mut self) {
        self.beating.abort_all();
    }

    /// Its signed word that it holds these entries.
    pub(crate) fn attest(&self, grant: &Grant, entries: &[v1::CommitEntry]) -> Signed<AttestationBatch> {
        let leaves: Vec<Hash> = entries.iter().map(|it| attestation(grant, self.id, it).leaf()).collect();
        self.sign(AttestationBatch::of(self.id, &leaves))
    }

    /// Signs with another key from now on, which the root has certified under `serial`; nobody is told. Answers the certificate.
    pub(crate) fn change_key(&mut self, serial: u64) -> Signed<Certificate> {
        self.key = SecretKey::from_seed(&[u8::try_from(serial % 251).unwrap(); 32]);
        let serial = CertificateSerial(serial);
        let said = Certificate { serial, node: self.id, role: Role::DataNode, key: self.key.public() };
        self.certificate = root().sign_as_root(UUID, said);
        self.certificate.clone()
    }

    pub(crate) fn sign(&self, batch: AttestationBatch) -> Signed<AttestationBatch> {
        self.key.sign(UUID, self.generation(), self.certificate.statement.serial, batch)
    }
}

pub(crate) fn attestation(grant: &Grant, node: NodeId, entry: &v1::CommitEntry) -> Attestation {
    let holder = grant.holder(node).unwrap();
    let slot = SlotIndex(entry.slot);
    Attestation {
        namespace: grant.namespace,
        key: Key::new(&entry.key).unwrap(),
        kind: FrameKind::Value,
        version: Version { clock: HybridClock(entry.clock), writer: grant.writer },
        payload_bytes: entry.payload_bytes,
        payload_crc: entry.payload_crc,
        grant: grant.id,
        lend: holder.lend,
        slot,
        region: holder.region,
        incarnation: holder.incarnation,
        placement: Placement::Resident(grant.offset(holder, slot).unwrap()),
    }
}

/// A writer of one namespace.
pub(crate) struct Writer {
    pub(crate) id: WriterId,
    pub(crate) namespace: NamespaceId,
}

impl Writer {
    pub(crate) fn new(namespace: &v1::Namespace) -> Self {
        Self { id: WriterId::anonymous(fresh().to_le_bytes()), namespace: NamespaceId(namespace.id) }
    }

    pub(crate) async fn grant_request(&self, cluster: &Cluster, shard: u32) -> v1::GrantRequest {
        v1::GrantRequest {
            shard,
            request: Some(cluster.request(shard).await),
            writer: self.id.0.to_vec().into(),
            namespace: self.namespace.0,
            slot_size: 4096,
            slots: 8,
            ttl_ms: 20_000,
            avoid: Vec::new(),
            seen: cluster.describe().await.changes.unwrap().at,
        }
    }

    /// A grant, its signature checked as a data node would.
    pub(crate) async fn grant(&self, cluster: &Cluster) -> Grant {
        let request = self.grant_request(cluster, 1).await;
        self.granted(cluster, &request).await.unwrap()
    }

    pub(crate) async fn granted(&self, cluster: &Cluster, request: &v1::GrantRequest) -> Result<Grant, Refusal> {
        let deadline = tokio::time::Instant::now() + crate::cluster::PATIENCE;
        loop {
            let reply = cluster.ask(async |node: &Node| node.control().grant(request.clone()).await).await;
            match reply {
                // Extents are lent a moment after a region was registered.
                Err(Refusal::NoSpace(_)) if tokio::time::Instant::now() < deadline => {
                    sleep(Duration::from_millis(20)).await;
                }
                Err(refusal) => return Err(refusal),
                Ok(reply) => {
                    let signed = Signed::<Grant>::decode(&reply.grant).unwrap();
                    return Ok(cluster.keyring().await.verify(signed).expect("a signed grant").into_inner());
                }
            }
        }
    }

    pub(crate) fn publish(
        &self,
        grant: &Grant,
        entries: &[v1::CommitEntry],
        attested: &[Signed<AttestationBatch>],
    ) -> v1::PublishRequest {
        v1::PublishRequest {
            grant: Some(grant.id.into()),
            writer: self.id.0.to_vec().into(),
            entries: entries.to_vec(),
            attested: attested.iter().map(|it| it.encode().into()).collect(),
            ..Default::default()
        }
    }

    pub(crate) fn resolve(&self, keys: &[&str], lease_ms: u32) -> v1::ResolveRequest {
        v1::ResolveRequest {
            shard: 1,
            namespace: self.namespace.0,
            keys: keys.iter().map(|key| key.as_bytes().to_vec().into()).collect(),
            lease_ms,
            stale: false,
            seen: None,
        }
    }
}

pub(crate) fn entry(slot: u32, key: &str) -> v1::CommitEntry {
    v1::CommitEntry {
        slot,
        key: key.as_bytes().to_vec().into(),
        clock: HybridClock::at(wall_ms()).0 + fresh(),
        kind: v1::FrameKind::Value.into(),
        payload_bytes: 1000,
        payload_crc: 42 + slot,
        mode: None,
    }
}

pub(crate) fn wall_ms() -> u64 {
    #[expect(clippy::disallowed_methods, reason = "writers choose versions by their wall clock")]
    let now = SystemTime::now();
    u64::try_from(now.duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap()
}

/// Checks what a reader checks of every copy, and answers the nodes that hold one.
pub(crate) fn proven_copies(
    keyring: &Keyring,
    reply: &v1::ResolveReply,
    index: usize,
    key: &str,
    namespace: NamespaceId,
) -> Vec<NodeId> {
    let item = &reply.items[index];
    let hashes: Vec<Hash> = reply.hashes.chunks(32).map(|hash| hash.try_into().unwrap()).collect();
    let copies = item.copies.iter().map(|copy| {
        let shared = &reply.batches[copy.batch as usize];
        let batch = keyring.verify(Signed::<AttestationBatch>::decode(&shared.signed).unwrap()).unwrap();
        let grant = shared.grant.unwrap();
        let region: RegionId = shared.region.unwrap().into();
        let attestation = Attestation {
            namespace,
            key: Key::new(key).unwrap(),
            kind: FrameKind::Value,
            version: item.version.clone().unwrap().try_into().unwrap(),
            payload_bytes: item.payload_bytes,
            payload_crc: item.payload_crc,
            grant: GrantId { shard: ShardId(grant.shard), sequence: grant.sequence.unwrap().into() },
            lend: LendNumber::from(shared.lend.unwrap()),
            slot: SlotIndex(copy.slot),
            region,
            incarnation: shared.incarnation.unwrap().into(),
            placement: Placement::Resident(Offset(shared.base + u64::from(copy.slot) * u64::from(shared.slot_size))),
        };
        let path = copy.path.iter().map(|hash| hashes[*hash as usize]).collect();
        let descriptor = Descriptor { attestation, leaf: copy.leaf, path };
        assert!(descriptor.proven_by(batch.signed()), "a copy that its batch does not prove");
        region.node
    });
    copies.collect()
}
