//! Every message that a server accepts, cut and with flipped bits: refused with a type, or understood as what it then says; never a panic,
//! never a hang, nothing false believed.

use crate::mutants::mutants;
use bytes::Bytes;
use prost::Message;
use quarry::identity::Root;
use quarry_proto::{
    refusal::Refusal,
    v1::{self, commit_outcome::Code as Fate},
};
use quarry_tests::{
    Member, Seed, TestCluster, bare, calls,
    cluster::{DIRECTORY, SHARD, create_namespace, fresh_name},
    raw::{Framed, Granted, RawWriter, Wish},
    rounds::rounds,
    seed::{pattern, random},
    wait::PATIENCE,
};
use quarry_wire::{
    certificate::Role,
    ids::{CertificateSerial, NodeId},
};
use std::{collections::BTreeMap, time::Duration};
use tokio::{task::JoinSet, time::timeout};
use tonic::{Code, Status};

/// Mutants of one message in the gate: all of those with less than a hundred bytes.
const MUTANTS: usize = 900;
/// Calls under way at once.
const AT_ONCE: usize = 48;
/// A process may grow by this much under all of it.
const GROWTH_MAX: u64 = 192 << 20;

/// Resident bytes of a process.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Answers to the mutants of one message.
struct Answers {
    /// By what was done to the message.
    taken: Vec<(String, Bytes)>,
    refused: usize,
}

/// Sends all mutants of `message`; each is answered, or refused with a type.
async fn abuse(address: &str, method: &'static str, message: &impl Message, seed: &mut Seed) -> Answers {
    abuse_by(address, method, message, seed, |_| true).await
}

/// Sends those mutants of `message` that `chosen` takes.
async fn abuse_by(
    address: &str,
    method: &'static str,
    message: &impl Message,
    seed: &mut Seed,
    chosen: impl Fn(&Bytes) -> bool,
) -> Answers {
    let channel = calls::channel(address).await.unwrap();
    let mut answers = Answers { taken: Vec::new(), refused: 0 };
    let mut under_way: JoinSet<(String, Result<Bytes, Status>)> = JoinSet::new();
    let mut settle = |done: (String, Result<Bytes, Status>)| match done {
        (what, Ok(reply)) => answers.taken.push((what, reply)),
        (what, Err(status)) => {
            // What is no message of the method at all is turned down by the transport, before the service sees it.
            let typed = Refusal::from_status(&status).is_some() || status.code() == Code::Internal;
            assert!(typed && !status.message().contains("panic"), "{method} {what}: {status:?}");
            answers.refused += 1;
        }
    };
    let mutants = mutants(&message.encode_to_vec(), rounds(MUTANTS), seed);
    for mutant in mutants.into_iter().filter(|mutant| chosen(&mutant.bytes)) {
        if under_way.len() == AT_ONCE {
            settle(under_way.join_next().await.unwrap().unwrap());
        }
        let channel = channel.clone();
        under_way.spawn(async move {
            let answer = timeout(PATIENCE, bare::call(channel, method, mutant.bytes)).await;
            let answer = answer.unwrap_or_else(|_| panic!("{method} {}: no answer", mutant.what));
            (mutant.what, answer)
        });
    }
    while let Some(done) = under_way.join_next().await {
        settle(done.unwrap());
    }
    answers
}

/// What is sent is a message that the server takes: else its mutants would prove nothing.
async fn taken<T: Message + Default>(address: &str, method: &'static str, message: &impl Message) -> T {
    let channel = calls::channel(address).await.unwrap();
    let body = Bytes::from(message.encode_to_vec());
    let answer = timeout(PATIENCE, bare::call(channel, method, body)).await.unwrap();
    T::decode(answer.unwrap_or_else(|status| panic!("{method}: {status:?}"))).unwrap()
}

/// A cluster, and one value in it that must come through.
struct Scene {
    cluster: TestCluster,
    raw: RawWriter,
    blocks: quarry_client::Namespace,
    pids: Vec<(Member, u32)>,
    resident: Vec<u64>,
}

const NODE: NodeId = NodeId(101);

impl Scene {
    async fn start() -> Self {
        let cluster = TestCluster::start_with(|spec| (spec.data_nodes, spec.plaintext) = (1, true)).await;
        let client = cluster.client().await;
        let blocks = create_namespace(&client, 1, None).await;
        blocks.put("kept", pattern(1, 5_000)).await.unwrap();
        let raw = cluster.raw().await;
        let pids: Vec<(Member, u32)> =
            cluster.members().into_iter().map(|member| (member, cluster.pid(member).unwrap())).collect();
        let resident = pids.iter().map(|(_, pid)| resident(*pid)).collect();
        Self { cluster, raw, blocks, pids, resident }
    }

    async fn leader(&self, group: u32) -> String {
        self.cluster.address(self.cluster.leader(group, PATIENCE).await.unwrap())
    }

    fn node(&self) -> &str {
        self.raw.address(NODE)
    }

    async fn granted(&self) -> Granted {
        let wish = Wish {
            namespace: self.blocks.info().id,
            slot_size: 4096,
            slots: 4,
            ttl: Duration::from_secs(30),
            avoid: Vec::new(),
        };
        self.raw.grant(&wish).await.unwrap()
    }

    /// A frame that was written under a grant of its own, and not committed.
    async fn written(&mut self, key: &str) -> (Granted, Framed) {
        let granted = self.granted().await;
        let armed = self.raw.arm_all(&granted).await;
        let frame = self.raw.frame(&granted, 0, key, &pattern(2, 1_000));
        self.raw.write_frame(&granted, &armed, &frame).await;
        (granted, frame)
    }

    fn writer(&self) -> Bytes {
        calls::id_bytes(self.raw.id.0)
    }

    /// The same processes serve, and none has grown much; the replicas have the same state; what was written is there.
    async fn check(self) {
        let Self { mut cluster, blocks, pids, resident: before, .. } = self;
        for ((member, pid), before) in pids.into_iter().zip(before) {
            assert_eq!(cluster.pid(member), Some(pid), "{member} lives");
            let now = resident(pid);
            assert!(now < before + GROWTH_MAX, "{member} grew from {before} to {now} bytes");
        }
        cluster.wait_ready(PATIENCE).await.unwrap();
        assert!(cluster.ended().unwrap().is_empty());
        assert!(blocks.fresh().get("kept").await.unwrap().unwrap().bytes == pattern(1, 5_000));
        blocks.put("after", "all that").await.unwrap();
        cluster.agree().await;
        for member in cluster.members() {
            let log = std::fs::read_to_string(cluster.log_file(member)).unwrap();
            assert!(!log.contains("panicked at"), "{member} panicked");
        }
    }
}

/// Arm and Publish believe signatures, not messages: with the check of either signature removed, a mutant of its statement is taken.
#[tokio::test]
async fn no_mutant_of_an_arm_is_armed_and_no_mutant_of_a_data_nodes_message_hurts_it() {
    let mut scene = Scene::start().await;
    let mut seed = Seed::draw();
    let writer = scene.writer();
    let node = scene.node().to_owned();

    let granted = scene.granted().await;
    let arm = v1::ArmRequest { grant: granted.bytes.clone(), writer: writer.clone() };
    let answers = abuse(&node, "/quarry.v1.DataNode/Arm", &arm, &mut seed).await;
    let armed: Vec<&String> = answers.taken.iter().map(|(what, _)| what).collect();
    assert!(armed.is_empty() && answers.refused > 0, "a changed grant was armed: {armed:?}");
    let _: v1::ArmReply = taken(&node, "/quarry.v1.DataNode/Arm", &arm).await;

    let (granted, frame) = scene.written("by-hand").await;
    let grant = Some(granted.grant.id.into());
    let confirm = v1::ConfirmRequest { grant, writer: writer.clone(), entries: vec![frame.entry.clone()] };
    abuse(&node, "/quarry.v1.DataNode/Confirm", &confirm, &mut seed).await;
    let commit =
        v1::CommitRequest { grant, writer: writer.clone(), written: vec![NODE.0], entries: vec![frame.entry.clone()] };
    let first: v1::CommitReply = taken(&node, "/quarry.v1.DataNode/Commit", &commit).await;
    assert_eq!(first.outcomes[0].code(), Fate::Committed, "{first:?}");
    abuse(&node, "/quarry.v1.DataNode/Commit", &commit, &mut seed).await;
    // The same outcome as before.
    let again: v1::CommitReply = taken(&node, "/quarry.v1.DataNode/Commit", &commit).await;
    assert_eq!(again.outcomes, first.outcomes);
    let value = scene.blocks.fresh().get("by-hand").await.unwrap().unwrap();
    assert!(value.version == frame.version && value.bytes == pattern(2, 1_000));

    let close = v1::CloseRequest { grant, writer };
    abuse(&node, "/quarry.v1.DataNode/Close", &close, &mut seed).await;
    let _: v1::CloseReply = taken(&node, "/quarry.v1.DataNode/Close", &close).await;
    scene.check().await;
}

/// A mutant of a Publish is taken only if what the data node signed is untouched: with the check of the batch removed, one commits what was
/// not attested.
#[tokio::test]
async fn no_mutant_of_a_publish_commits_what_was_not_attested_and_none_of_a_control_message_hurts_a_meta_node() {
    let mut scene = Scene::start().await;
    let mut seed = Seed::draw();
    let writer = scene.writer();
    let shard = scene.leader(SHARD).await;
    let (granted, frame) = scene.written("attested").await;
    let confirm = v1::ConfirmRequest {
        grant: Some(granted.grant.id.into()),
        writer: writer.clone(),
        entries: vec![frame.entry.clone()],
    };
    let confirmed: v1::ConfirmReply = taken(scene.node(), "/quarry.v1.DataNode/Confirm", &confirm).await;
    let publish = v1::PublishRequest {
        grant: confirm.grant,
        writer: writer.clone(),
        entries: confirm.entries.clone(),
        attested: vec![confirmed.attested],
        ..Default::default()
    };
    // Not yet those without a statement: that nobody attests an entry is an outcome, and the first one counts.
    let stated = |bytes: &Bytes| v1::PublishRequest::decode(bytes.clone()).is_ok_and(|it| !it.attested.is_empty());
    // The mode is not the data node's to sign: a mutant may replace what is absent, which is this create. Whatever else one commits, or under
    // whatever signature, shows below.
    abuse_by(&shard, "/quarry.v1.Control/Publish", &publish, &mut seed, stated).await;
    let published: v1::PublishReply = taken(&shard, "/quarry.v1.Control/Publish", &publish).await;
    assert_eq!(published.outcomes[0].code(), Fate::Committed, "{published:?}");
    abuse(&shard, "/quarry.v1.Control/Publish", &publish, &mut seed).await;
    let again: v1::PublishReply = taken(&shard, "/quarry.v1.Control/Publish", &publish).await;
    assert_eq!(again.outcomes, published.outcomes);
    let value = scene.blocks.fresh().get("attested").await.unwrap().unwrap();
    assert!(value.version == frame.version && value.bytes == pattern(2, 1_000));
    let listed = scene.blocks.list("", None, 100).await.unwrap();
    let keys: Vec<&[u8]> = listed.entries.iter().map(|it| it.key.as_bytes()).collect();
    assert_eq!(keys, [&b"attested"[..], b"kept"], "only what was attested is there");

    let namespace = scene.blocks.info().id.0;
    let known = calls::describe(&shard).await.unwrap();
    let applied_ms = known.groups.iter().find(|it| it.group == SHARD).unwrap().applied_ms;
    let request = || Some(v1::RequestId { applied_ms, random: random() });
    let key = Bytes::from_static(b"kept");
    let keys = vec![key.clone(), Bytes::from_static(b"absent")];
    let seen = known.changes.and_then(|changes| changes.at);
    let describe = v1::DescribeRequest { seen };
    abuse(&shard, "/quarry.v1.Control/Describe", &describe, &mut seed).await;
    let resolve = v1::ResolveRequest { shard: SHARD, namespace, keys: keys.clone(), lease_ms: 500, stale: false, seen };
    abuse(&shard, "/quarry.v1.Control/Resolve", &resolve, &mut seed).await;
    let _: v1::ResolveReply = taken(&shard, "/quarry.v1.Control/Resolve", &resolve).await;
    let exists = v1::ExistsRequest { shard: SHARD, namespace, keys, seen };
    abuse(&shard, "/quarry.v1.Control/Exists", &exists, &mut seed).await;
    let reply: v1::ExistsReply = taken(&shard, "/quarry.v1.Control/Exists", &exists).await;
    assert_eq!(reply.present, &b"\x01"[..]);
    let list = v1::ListRequest { shard: SHARD, namespace, prefix: key.clone(), after: Bytes::new(), limit: 9, seen };
    abuse(&shard, "/quarry.v1.Control/List", &list, &mut seed).await;
    let _: v1::ListReply = taken(&shard, "/quarry.v1.Control/List", &list).await;
    // Nothing is there to be pinned, and no such pin.
    let owner = writer.clone();
    let pin = v1::PinRequest {
        shard: SHARD,
        request: request(),
        owner: owner.clone(),
        namespace,
        keys: vec![Bytes::from_static(b"absent")],
        duration_ms: 500,
        seen,
    };
    abuse(&shard, "/quarry.v1.Control/Pin", &pin, &mut seed).await;
    let reply: v1::PinReply = taken(&shard, "/quarry.v1.Control/Pin", &pin).await;
    assert_eq!(reply.pin, None);
    let never = Some(v1::Ordinal { generation: 1, number: 1_000 });
    let renew =
        v1::RenewPinRequest { shard: SHARD, request: request(), owner: owner.clone(), pin: never, duration_ms: 500 };
    abuse(&shard, "/quarry.v1.Control/RenewPin", &renew, &mut seed).await;
    let release = v1::ReleasePinRequest { shard: SHARD, owner, pin: never };
    abuse(&shard, "/quarry.v1.Control/ReleasePin", &release, &mut seed).await;
    // Nothing is deleted in a version that is not there: whatever the mutants make of the rest.
    let delete = v1::DeleteRequest {
        shard: SHARD,
        request: request(),
        namespace,
        items: vec![v1::DeleteItem { key: Bytes::from_static(b"attested"), expected: Some(frame.version.into()) }],
    };
    abuse(&shard, "/quarry.v1.Control/Delete", &delete, &mut seed).await;
    let seal = v1::SealRequest { grant: Some(granted.grant.id.into()), fill: 1, writer: writer.clone() };
    abuse(&shard, "/quarry.v1.Control/Seal", &seal, &mut seed).await;
    let grant = v1::GrantRequest {
        shard: SHARD,
        request: request(),
        writer,
        namespace,
        slot_size: 1024,
        slots: 2,
        // Those that are granted come back soon.
        ttl_ms: 1_000,
        avoid: vec![77],
        seen,
    };
    abuse(&shard, "/quarry.v1.Control/Grant", &grant, &mut seed).await;
    scene.check().await;
}

/// What is not signed as it must be enters no directory: with the check of a certificate or of a record removed, a mutant is taken.
#[tokio::test]
async fn no_mutant_of_a_certificate_or_region_record_is_taken_and_none_of_a_registry_or_admin_message_hurts_a_meta_node()
 {
    let scene = Scene::start().await;
    let mut seed = Seed::draw();
    let directory = scene.leader(DIRECTORY).await;
    let known = calls::describe(&directory).await.unwrap();
    let applied_ms = known.groups.iter().find(|it| it.group == DIRECTORY).unwrap().applied_ms;
    let records = calls::node_status(scene.node()).await.unwrap().records;
    let record = v1::RecordRegionRequest { record: records[0].clone() };
    let answers = abuse(&directory, "/quarry.v1.Registry/RecordRegion", &record, &mut seed).await;
    assert!(answers.taken.is_empty(), "a changed record was taken: {:?}", answers.taken[0].0);
    let _: v1::RecordRegionReply = taken(&directory, "/quarry.v1.Registry/RecordRegion", &record).await;
    // Of a node that exists on paper alone.
    let root = Root::read(&scene.cluster.dir().join("root.key")).unwrap();
    let paper = root.certify(CertificateSerial(1_000), NodeId(177), Role::DataNode).unwrap();
    let certificate = Bytes::from(paper.certificate.encode());
    let register = v1::RegisterRegionRequest {
        certificate: certificate.clone(),
        region: Some(v1::RegionId { node: 177, index: 0 }),
        length: 64 << 20,
        boot: Bytes::from_static(&[9; 16]),
        address: "127.0.0.1:1".to_owned(),
        ..Default::default()
    };
    let answers = abuse(&directory, "/quarry.v1.Registry/RegisterRegion", &register, &mut seed).await;
    // The certificate comes first, behind a tag and a length of two bytes.
    let end = 3 + certificate.len();
    for (what, _) in &answers.taken {
        let byte =
            what.split_once("of byte ").map(|(_, rest)| rest.split_once(' ').unwrap().0.parse::<usize>().unwrap());
        assert!(byte.is_none_or(|byte| byte >= end), "{what}: a changed certificate was taken");
    }
    let life = v1::RegionLife {
        region: Some(v1::RegionId { node: 101, index: 0 }),
        incarnation: Some(v1::Ordinal { generation: 1, number: 1 }),
    };
    let heartbeat = v1::HeartbeatRequest { node: 101, regions: vec![life], seen: None };
    abuse(&directory, "/quarry.v1.Registry/Heartbeat", &heartbeat, &mut seed).await;
    let bootstrap = v1::BootstrapRequest {
        cluster: known.cluster.clone(),
        root: Bytes::from_static(&[7; 32]),
        shards: 1,
        metas: vec![v1::MetaMember { node: 1, address: "127.0.0.1:1".to_owned(), certificate }],
    };
    let answers = abuse(&directory, "/quarry.v1.Admin/Bootstrap", &bootstrap, &mut seed).await;
    assert!(answers.taken.is_empty(), "a cluster was made twice: {:?}", answers.taken[0].0);
    let create = v1::CreateNamespaceRequest {
        request: Some(v1::RequestId { applied_ms, random: random() }),
        name: fresh_name("m"),
        class: v1::Class::Cache.into(),
        copies: 1,
        least: 1,
        quota_bytes: 1 << 30,
    };
    abuse(&directory, "/quarry.v1.Control/CreateNamespace", &create, &mut seed).await;
    // Last: it moves leaders.
    let transfer = v1::TransferLeaderRequest { group: 1, to: 1 };
    abuse(&directory, "/quarry.v1.Admin/TransferLeader", &transfer, &mut seed).await;
    scene.check().await;
}

/// The paths that a mutant is sent to are those of the services: one that does not exist would be refused without being looked at.
#[tokio::test]
async fn a_method_that_does_not_exist_is_unimplemented_and_no_mutant_is_sent_to_one() {
    let cluster = quarry_tests::shared_without_tls().await;
    let mut found = BTreeMap::new();
    for (member, method) in [
        (cluster.metas()[0], "/quarry.v1.Control/Nothing"),
        (cluster.data_nodes()[0], "/quarry.v1.DataNode/Nothing"),
        (cluster.data_nodes()[0], "/quarry.v1.Control/Grant"),
    ] {
        let channel = calls::channel(&cluster.address(member)).await.unwrap();
        let status = bare::call(channel, method, Bytes::new()).await.unwrap_err();
        found.insert(method, status.code());
    }
    assert!(found.values().all(|code| *code == Code::Unimplemented), "{found:?}");
}
