//! Moves as a leader orders them, with a data node that copies nothing and signs for it, or does not.

use crate::{
    cluster::{Cluster, Node, UUID, identity, until},
    player::{DataNode, Writer, entry, proven_copies},
};
use parking_lot::Mutex;
use quarry_meta::Marks;
use quarry_proto::{
    convert,
    v1::{
        self,
        commit_outcome::Code,
        data_node_server::{DataNode as Serves, DataNodeServer},
    },
};
use quarry_wire::{
    attestation::{Attestation, AttestationBatch, Placement},
    certificate::Role,
    grant::{Grant, Purpose},
    ids::{CertificateSerial, Generation, NodeId, SlotIndex, WriterId},
    merkle::Hash,
};
use std::{sync::Arc, time::Duration};
use tokio::{net::TcpListener, task::JoinSet};
use tonic::{
    Request, Response, Status,
    transport::{Server, server::TcpIncoming},
};

const SLOT: u32 = 512 << 10;

/// How a holder answers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mood {
    Honest,
    /// It signs for other frames than it was told.
    Lies,
    /// It vouches for nothing.
    Refuses,
}

/// A data node's server that moves.
#[derive(Clone)]
struct Holder {
    id: NodeId,
    mood: Arc<Mutex<Mood>>,
    /// The keys that it was told to copy, call by call.
    told: Arc<Mutex<Vec<Vec<String>>>>,
}

impl Holder {
    /// Joins the cluster as data node `id`. The server ends with the set.
    async fn join(cluster: &Cluster, id: u64, server: &mut JoinSet<()>) -> (Self, DataNode) {
        let holder = Self { id: NodeId(id), mood: Arc::new(Mutex::new(Mood::Honest)), told: Arc::default() };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let serving = Server::builder()
            .add_service(DataNodeServer::new(holder.clone()))
            .serve_with_incoming(TcpIncoming::from(listener));
        server.spawn(async { serving.await.unwrap() });
        let node = DataNode::join_at(cluster, id, address).await;
        (holder, node)
    }
}

#[tonic::async_trait]
impl Serves for Holder {
    async fn move_copies(
        &self,
        request: Request<v1::MoveCopiesRequest>,
    ) -> Result<Response<v1::MoveCopiesReply>, Status> {
        let request = request.into_inner();
        let grant: Grant = convert::signed::<Grant>(&request.grant)?.statement;
        assert_eq!((grant.purpose, grant.writer), (Purpose::Move, WriterId::HOLDERS));
        let keys = request.entries.iter().map(|entry| String::from_utf8(entry.key.to_vec()).unwrap());
        self.told.lock().push(keys.collect());
        let mood = *self.mood.lock();
        if mood == Mood::Refuses {
            let refused = (0..u32::try_from(request.entries.len()).unwrap()).collect();
            return Ok(Response::new(v1::MoveCopiesReply { attested: bytes::Bytes::new(), refused }));
        }
        let holder = *grant.holder(self.id).unwrap();
        let leaf = |entry: &v1::MovedCopy| -> Hash {
            Attestation {
                namespace: grant.namespace,
                key: convert::key(&entry.key).unwrap(),
                kind: convert::frame_kind(entry.kind).unwrap(),
                version: entry.version.clone().unwrap().try_into().unwrap(),
                payload_bytes: entry.payload_bytes,
                payload_crc: entry.payload_crc ^ u32::from(mood == Mood::Lies),
                grant: grant.id,
                lend: holder.lend,
                slot: SlotIndex(entry.slot),
                region: holder.region,
                incarnation: holder.incarnation,
                placement: Placement::Resident(grant.offset(&holder, SlotIndex(entry.slot)).unwrap()),
            }
            .leaf()
        };
        let leaves: Vec<Hash> = request.entries.iter().map(leaf).collect();
        let batch = AttestationBatch::of(self.id, &leaves);
        let (key, _) = identity(self.id, Role::DataNode);
        let signed = key.sign(UUID, Generation(1), CertificateSerial(self.id.0), batch);
        Ok(Response::new(v1::MoveCopiesReply { attested: signed.encode().into(), refused: Vec::new() }))
    }
    async fn arm(&self, _: Request<v1::ArmRequest>) -> Result<Response<v1::ArmReply>, Status> {
        Err(Status::unimplemented("it only moves"))
    }
    async fn commit(&self, _: Request<v1::CommitRequest>) -> Result<Response<v1::CommitReply>, Status> {
        Err(Status::unimplemented("it only moves"))
    }
    async fn confirm(&self, _: Request<v1::ConfirmRequest>) -> Result<Response<v1::ConfirmReply>, Status> {
        Err(Status::unimplemented("it only moves"))
    }
    async fn close(&self, _: Request<v1::CloseRequest>) -> Result<Response<v1::CloseReply>, Status> {
        Err(Status::unimplemented("it only moves"))
    }
    async fn region_record(
        &self,
        _: Request<v1::RegionRecordRequest>,
    ) -> Result<Response<v1::RegionRecordReply>, Status> {
        Err(Status::unimplemented("it only moves"))
    }
    async fn report_damage(
        &self,
        _: Request<v1::ReportDamageRequest>,
    ) -> Result<Response<v1::ReportDamageReply>, Status> {
        Err(Status::unimplemented("it only moves"))
    }
    async fn rotate_region(
        &self,
        _: Request<v1::RotateRegionRequest>,
    ) -> Result<Response<v1::RotateRegionReply>, Status> {
        Err(Status::unimplemented("it only moves"))
    }
    async fn rotate_key(&self, _: Request<v1::RotateKeyRequest>) -> Result<Response<v1::RotateKeyReply>, Status> {
        Err(Status::unimplemented("it only moves"))
    }
    async fn node_status(&self, _: Request<v1::NodeStatusRequest>) -> Result<Response<v1::NodeStatusReply>, Status> {
        Err(Status::unimplemented("it only moves"))
    }
}

/// Values under these keys in a slab of as many slots, which is closed then, or has a tail that is free again.
async fn put(cluster: &Cluster, writer: &Writer, node: &DataNode, slots: (u32, u32), keys: &[String]) {
    let (slot_size, slots) = slots;
    let request = v1::GrantRequest { slot_size, slots, ..writer.grant_request(cluster, 1).await };
    let grant = writer.granted(cluster, &request).await.unwrap();
    assert_eq!(grant.slots.0, slots);
    let entries: Vec<_> = (0..).zip(keys).map(|(slot, key)| entry(slot, key)).collect();
    let request = writer.publish(&grant, &entries, &[node.attest(&grant, &entries)]);
    let reply = cluster.ask(async |node: &Node| node.control().publish(request.clone()).await).await.unwrap();
    assert!(reply.outcomes.iter().all(|outcome| outcome.code() == Code::Committed), "{:?}", reply.outcomes);
    let fill = u32::try_from(keys.len()).unwrap();
    let seal = v1::SealRequest { grant: Some(grant.id.into()), fill, writer: writer.id.0.to_vec().into() };
    cluster.ask(async |node: &Node| node.control().seal(seal.clone()).await).await.unwrap();
}

/// What is resolved of a key: nothing, or its version and where in the region it is, with its proof checked.
async fn place(cluster: &Cluster, writer: &Writer, key: &str, lease_ms: u32) -> Option<(v1::Version, u64)> {
    let request = writer.resolve(&[key], lease_ms);
    let reply = cluster.ask(async |node: &Node| node.control().resolve(request.clone()).await).await.unwrap();
    let item = reply.items[0].clone();
    if !item.found {
        return None;
    }
    assert_eq!(proven_copies(&cluster.keyring().await, &reply, 0, key, writer.namespace).len(), 1);
    let (copy, shared) = (&item.copies[0], &reply.batches[0]);
    Some((item.version.unwrap(), shared.base + u64::from(copy.slot) * u64::from(shared.slot_size)))
}

async fn places(cluster: &Cluster, writer: &Writer, keys: &[String]) -> Vec<Option<(v1::Version, u64)>> {
    let mut places = Vec::new();
    for key in keys {
        places.push(place(cluster, writer, key, 0).await);
    }
    places
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sparse_extent_is_emptied_by_what_its_holder_signs_for_and_by_nothing_else() {
    let cluster = Cluster::with(1, |config| {
        config.eviction.low = 0;
        config.compact_every = Duration::from_millis(50);
    })
    .await;
    let mut server = JoinSet::new();
    let (holder, node) = Holder::join(&cluster, 11, &mut server).await;
    let writer = Writer::new(&cluster.create_namespace("kv", 1).await);
    let keys: Vec<String> = (0..16).map(|extent| format!("key-{extent}")).collect();
    *holder.mood.lock() = Mood::Refuses;
    for key in &keys {
        // An extent has two slots; one is free again at once.
        put(&cluster, &writer, &node, (SLOT, 2), std::slice::from_ref(key)).await;
    }
    let before = places(&cluster, &writer, &keys).await;
    until("it is told to move, and vouches for nothing", async || (!holder.told.lock().is_empty()).then_some(())).await;
    *holder.mood.lock() = Mood::Lies;
    let told = holder.told.lock().len();
    until("it lies", async || (holder.told.lock().len() > told).then_some(())).await;
    assert_eq!(places(&cluster, &writer, &keys).await, before);
    *holder.mood.lock() = Mood::Honest;
    until("a value has moved", async || (places(&cluster, &writer, &keys).await != before).then_some(())).await;
    let after = places(&cluster, &writer, &keys).await;
    let moved: Vec<&String> = keys
        .iter()
        .zip(before.iter().zip(&after))
        .filter(|(_, (before, after))| before != after)
        .map(|(key, _)| key)
        .collect();
    assert_eq!(moved.len(), 1, "one extent that will be free is enough");
    assert_eq!(holder.told.lock().last().unwrap(), &[moved[0].clone()]);
    for (before, after) in before.into_iter().zip(after) {
        assert_eq!(before.unwrap().0, after.unwrap().0, "versions stay");
    }
    drop(node);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_leased_lately_is_moved_out_of_a_slab_before_it_is_evicted() {
    let cluster = Cluster::with(1, |config| config.eviction = Marks { low: 500, high: 520 }).await;
    let mut server = JoinSet::new();
    let (holder, node) = Holder::join(&cluster, 11, &mut server).await;
    let writer = Writer::new(&cluster.create_namespace("kv", 1).await);
    let keys: Vec<String> = (0..8).map(|slot| format!("key-{slot}")).collect();
    put(&cluster, &writer, &node, (SLOT / 8, 8), &keys).await;
    let before = place(&cluster, &writer, "key-3", 1_000).await.unwrap();
    // Until less than half is free: 16 slabs, all younger than that lease.
    for slab in 0..16 {
        put(&cluster, &writer, &node, (SLOT, 1), &[format!("more-{slab}")]).await;
    }
    until("the slab is gone", async || place(&cluster, &writer, "key-0", 0).await.is_none().then_some(())).await;
    let after = place(&cluster, &writer, "key-3", 0).await.expect("it was leased lately");
    assert_eq!(after.0, before.0);
    assert_ne!(after.1, before.1);
    assert_eq!(*holder.told.lock(), [["key-3"]]);
    let found = places(&cluster, &writer, &keys).await;
    assert_eq!(found.iter().flatten().count(), 1, "the others went with the slab");
    drop(node);
}
