//! Requests that no honest program makes: signed and wrong, far too large, out of order, and connections that say nothing.

use bytes::Bytes;
use prost::Message as _;
use quarry::identity::{Identity, Root};
use quarry_proto::{
    refusal::Refusal,
    v1::{self, commit_outcome::Code as Outcome},
};
use quarry_tests::{
    Member, TestCluster, bare,
    calls::{self, at_leader, refusal},
    cluster::{SHARD, create_namespace},
    raw::{Granted, Wish},
    rounds::rounds,
    seed::pattern,
    wait::PATIENCE,
};
use quarry_wire::{
    certificate::Role,
    grant::{Class, Grant},
    ids::{CertificateSerial, ClusterUuid, Generation, NodeId, WriterId},
    limits::MESSAGE_BYTES_MAX,
    signed::{SecretKey, Signed},
    units::Offset,
};
use std::time::Duration;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

const NODE: NodeId = NodeId(101);
/// Connections to each server that say nothing, or not all.
const SILENT: usize = 500;

async fn one_node() -> TestCluster {
    TestCluster::start_with(|spec| (spec.metas, spec.data_nodes, spec.plaintext) = (1, 1, true)).await
}

fn wish(blocks: &quarry_client::Namespace) -> Wish {
    Wish { namespace: blocks.info().id, slot_size: 4096, slots: 8, ttl: Duration::from_secs(20), avoid: Vec::new() }
}

/// Arm asks more of a grant than a signature: without the checks of `claims/`, a signed grant for another life, node or place is armed.
#[tokio::test]
async fn a_grant_that_is_signed_and_wrong_is_not_armed() {
    let cluster = one_node().await;
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 1, None).await;
    let raw = cluster.raw().await;
    let granted = raw.grant(&wish(&blocks)).await.unwrap();
    let root = Root::read(&cluster.dir().join("root.key")).unwrap();
    let key = cluster.member_dir(Member::Meta(1)).join("node.key");
    let meta = Identity::read(&key, Role::Meta, root.cluster, root.public()).unwrap();
    let data = cluster.member_dir(Member::Data(101)).join("node.key");
    let data = Identity::read(&data, Role::DataNode, root.cluster, root.public()).unwrap();
    let (generation, serial) = (Generation(1), meta.certificate.statement.serial);
    let other_cluster = ClusterUuid([7; 16]);
    // The real grant by the real key would be taken: that is tried last.
    let by_meta = |grant: Grant| meta.key.sign(root.cluster, generation, serial, grant);
    let changed = |change: &dyn Fn(&mut Grant)| {
        let mut grant = granted.grant.clone();
        change(&mut grant);
        grant
    };
    let true_grant = || granted.grant.clone();
    let wrong: Vec<(&str, Signed<Grant>)> = vec![
        ("another life of the region", by_meta(changed(&|it| it.holders[0].incarnation.0.number += 1))),
        (
            "an earlier generation's life",
            by_meta(changed(&|it| it.holders[0].incarnation.0.generation = Generation(0))),
        ),
        ("another node's memory", by_meta(changed(&|it| it.holders[0].region.node = NodeId(102)))),
        ("a region that is not", by_meta(changed(&|it| it.holders[0].region.index.0 = 9))),
        ("beyond the region", by_meta(changed(&|it| it.holders[0].base = Offset(1 << 40)))),
        ("at the end of 64 bits", by_meta(changed(&|it| it.holders[0].base = Offset(u64::MAX - 63)))),
        ("over the end of its extent", by_meta(changed(&|it| it.holders[0].base = Offset((64 << 20) - 4096)))),
        ("another extent than its own", by_meta(changed(&|it| it.holders[0].extent.0 += 1))),
        ("an extent that is not", by_meta(changed(&|it| it.holders[0].extent.0 = u32::MAX))),
        ("another writer", by_meta(changed(&|it| it.writer = WriterId([5; 16])))),
        ("a class that this node cannot keep", by_meta(changed(&|it| it.class = Class::Durable))),
        (
            "signed by a data node",
            data.key.sign(root.cluster, generation, data.certificate.statement.serial, true_grant()),
        ),
        (
            "signed with a data node's key, as the meta node",
            data.key.sign(root.cluster, generation, serial, true_grant()),
        ),
        ("signed for another cluster", meta.key.sign(other_cluster, generation, serial, true_grant())),
        ("signed in another generation", meta.key.sign(root.cluster, Generation(2), serial, true_grant())),
        ("signed in generation 0", meta.key.sign(root.cluster, Generation(0), serial, true_grant())),
        (
            "signed under a certificate that is not",
            meta.key.sign(root.cluster, generation, CertificateSerial(99), true_grant()),
        ),
        ("signed by nobody", SecretKey::from_seed(&[3; 32]).sign(root.cluster, generation, serial, true_grant())),
        ("signed as the root", SecretKey::from_seed(&[3; 32]).sign_as_root(root.cluster, true_grant())),
    ];
    for (what, signed) in wrong {
        let forged = Granted { grant: signed.statement.clone(), bytes: signed.encode().into() };
        let refused = refusal(raw.arm(NODE, &forged).await);
        let typed = matches!(
            refused,
            Refusal::ArmRefused(_) | Refusal::Untrusted(_) | Refusal::Malformed(_) | Refusal::NotReady(_)
        );
        assert!(typed, "{what}: {refused:?}");
    }
    raw.arm(NODE, &Granted { bytes: by_meta(true_grant()).encode().into(), grant: true_grant() }).await.unwrap();
    assert_eq!(calls::node_status(raw.address(NODE)).await.unwrap().claims_open, 1, "only the true grant was armed");
}

/// Steps in the wrong order, and twice. Without the check that a slot takes one frame, the second of two entries for it replaces the first.
#[tokio::test]
async fn steps_out_of_order_are_refused_and_the_right_order_still_works() {
    let cluster = one_node().await;
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 1, None).await;
    let mut raw = cluster.raw().await;
    let granted = raw.grant(&wish(&blocks)).await.unwrap();
    let frame = raw.frame(&granted, 0, "first", &pattern(1, 500));
    let confirm = |entries: Vec<v1::CommitEntry>, writer: Bytes| v1::ConfirmRequest {
        grant: Some(granted.grant.id.into()),
        writer,
        entries,
    };
    let mut node = calls::data_node(raw.address(NODE)).await.unwrap();
    let writer = calls::id_bytes(raw.id.0);
    // Confirm and close before arm.
    let refused = refusal(calls::done(node.confirm(confirm(vec![frame.entry.clone()], writer.clone()))).await);
    assert!(matches!(refused, Refusal::UnknownGrant(_)), "{refused:?}");
    let refused = refusal(raw.close(NODE, &granted).await);
    assert!(matches!(refused, Refusal::UnknownGrant(_)), "{refused:?}");
    let armed = raw.arm_all(&granted).await;
    raw.write_frame(&granted, &armed, &frame).await;
    // A stranger confirms, and publishes what the writer could.
    let stranger = Bytes::from_static(&[9; 16]);
    let refused = refusal(calls::done(node.confirm(confirm(vec![frame.entry.clone()], stranger.clone()))).await);
    assert!(matches!(refused, Refusal::Untrusted(_)), "{refused:?}");
    let confirmed = calls::done(node.confirm(confirm(vec![frame.entry.clone()], writer.clone()))).await.unwrap();
    let publish = v1::PublishRequest {
        grant: Some(granted.grant.id.into()),
        writer: stranger,
        entries: vec![frame.entry.clone()],
        attested: vec![confirmed.attested.clone()],
        ..Default::default()
    };
    let metas = raw.metas().to_vec();
    let publishing = async |publish: &v1::PublishRequest| {
        at_leader(&metas, |mut control| {
            let publish = publish.clone();
            async move { calls::done(control.publish(publish)).await }
        })
        .await
    };
    let refused = refusal(publishing(&publish).await);
    assert!(matches!(refused, Refusal::Untrusted(_)), "{refused:?}");
    // A true statement about something else.
    let mut other = v1::PublishRequest { writer: writer.clone(), ..publish.clone() };
    other.entries[0].slot = 1;
    let refused = refusal(publishing(&other).await);
    assert!(matches!(refused, Refusal::Untrusted(_) | Refusal::Malformed(_)), "{refused:?}");
    // The same one twice.
    let twice = v1::PublishRequest {
        attested: vec![confirmed.attested.clone(), confirmed.attested],
        writer: writer.clone(),
        ..publish
    };
    if let Ok(reply) = publishing(&twice).await {
        assert_eq!(reply.outcomes[0].code(), Outcome::Committed, "one holder, said twice: {reply:?}");
    }
    // Two entries for one slot; a slot that is not; keys that cannot be.
    let second = raw.frame(&granted, 1, "second", &pattern(2, 500));
    raw.write_frame(&granted, &armed, &second).await;
    let mut rival = second.entry.clone();
    rival.key = Bytes::from_static(b"rival");
    let mut far = second.entry.clone();
    (far.slot, far.key) = (granted.grant.slots.0, Bytes::from_static(b"far"));
    let mut farther = far.clone();
    (farther.slot, farther.key) = (u32::MAX, Bytes::from_static(b"farther"));
    let nameless = v1::CommitEntry { key: Bytes::new(), slot: 2, ..second.entry.clone() };
    let long = v1::CommitEntry { key: vec![b'k'; 513].into(), slot: 3, ..second.entry.clone() };
    let entries = vec![frame.entry.clone(), second.entry.clone(), rival, far, farther, nameless, long];
    let outcomes = raw.commit(NODE, &granted, [NODE], entries).await.unwrap();
    let codes: Vec<Outcome> = outcomes.iter().map(v1::CommitOutcome::code).collect();
    assert_eq!(codes[..2], [Outcome::Committed, Outcome::Committed], "{codes:?}");
    assert!(matches!(codes[2], Outcome::SlotTaken | Outcome::Malformed), "{codes:?}");
    assert!(codes[3..].iter().all(|code| *code == Outcome::Malformed), "{codes:?}");
    // Sealed twice, with another mark; closed twice; armed after the close; committed after both.
    raw.seal(&granted, 2).await.unwrap();
    for fill in [2, 0, 8, u32::MAX] {
        if let Err(calls::Turned::Fault(status)) = raw.seal(&granted, fill).await {
            panic!("seal with {fill}: {status:?}");
        }
    }
    for _ in 0..2 {
        raw.close(NODE, &granted).await.unwrap();
    }
    let refused = refusal(raw.arm(NODE, &granted).await);
    assert!(matches!(refused, Refusal::ArmRefused(_)), "{refused:?}");
    let again = raw.commit(NODE, &granted, [NODE], vec![frame.entry.clone(), second.entry]).await.unwrap();
    assert!(again.iter().all(|outcome| outcome.code() == Outcome::Committed), "{again:?}");
    for (key, number) in [("first", 1), ("second", 2)] {
        assert!(blocks.get(key).await.unwrap().unwrap().bytes == pattern(number, 500));
    }
    let listed = blocks.list("", None, 100).await.unwrap().entries;
    assert_eq!(listed.len(), 2, "{listed:?}");
    blocks.put("after", "all that").await.unwrap();
}

/// As many as fit in a message, and more. Without the limit of a message, or of a batch, they are worked on.
#[tokio::test]
async fn a_million_entries_are_refused_whether_they_fit_in_a_message_or_not() {
    let cluster = quarry_tests::shared_without_tls().await;
    let node = cluster.address(cluster.data_nodes()[0]);
    let leader = cluster.address(cluster.leader(SHARD, PATIENCE).await.unwrap());
    let grant = Some(v1::GrantId { shard: SHARD, sequence: Some(v1::Ordinal { generation: 1, number: 1 << 40 }) });
    let writer = Bytes::from_static(&[1; 16]);
    let confirm = v1::ConfirmRequest { grant, writer: writer.clone(), entries: Vec::new() };
    let commit = v1::CommitRequest { grant, writer: writer.clone(), written: vec![101], entries: Vec::new() };
    let publish = v1::PublishRequest { grant, writer, ..Default::default() };
    let resolve = v1::ResolveRequest { shard: SHARD, namespace: 1, ..Default::default() };
    // An item of field `number` that is empty takes two bytes: a million fit in a message.
    let a_million = |message: Vec<u8>, number: u8| [message, [(number << 3) | 2, 0].repeat(1_000_000)].concat();
    for _ in 0..rounds(1) {
        for (address, method, body) in [
            (&node, "/quarry.v1.DataNode/Confirm", a_million(confirm.encode_to_vec(), 3)),
            (&node, "/quarry.v1.DataNode/Commit", a_million(commit.encode_to_vec(), 4)),
            (&leader, "/quarry.v1.Control/Publish", a_million(publish.encode_to_vec(), 3)),
            (&leader, "/quarry.v1.Control/Publish", a_million(Vec::new(), 5)),
            (&leader, "/quarry.v1.Control/Resolve", a_million(resolve.encode_to_vec(), 3)),
        ] {
            assert!(body.len() < MESSAGE_BYTES_MAX, "{method}: the limit of a message is not what refuses it");
            let channel = calls::channel(address).await.unwrap();
            let answer = timeout(PATIENCE, bare::call(channel, method, body.into())).await.unwrap();
            let status = answer.unwrap_err();
            // Another leader is one that has not looked at it.
            let refused = Refusal::from_status(&status);
            let typed = matches!(refused, Some(Refusal::TooLarge(_) | Refusal::NotLeader(_)));
            assert!(typed, "{method}: {status:?}");
        }
        let huge = Bytes::from(vec![0; MESSAGE_BYTES_MAX + 1]);
        for (address, method) in [(&node, "/quarry.v1.DataNode/Commit"), (&leader, "/quarry.v1.Control/Grant")] {
            let channel = calls::channel(address).await.unwrap();
            let answer = timeout(PATIENCE, bare::call(channel, method, huge.clone())).await.unwrap();
            let refused = Refusal::from_status(&answer.unwrap_err());
            assert!(matches!(refused, Some(Refusal::TooLarge(_))), "{method}: {refused:?}");
        }
    }
    let (_client, blocks) = cluster.namespace().await;
    blocks.put("after", "all that").await.unwrap();
}

/// Half-open connections hold a socket and nothing else: without an own task per connection, they stop the others.
#[tokio::test]
async fn five_hundred_connections_that_never_say_anything_whole_do_not_stop_the_others() {
    let mut cluster = one_node().await;
    let (meta, data) = (cluster.address(Member::Meta(1)), cluster.address(Member::Data(101)));
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 1, None).await;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    // An empty SETTINGS frame, then the head of a HEADERS frame that announces more than ever comes.
    let begun = [&preface[..], &[0, 0, 0, 4, 0, 0, 0, 0, 0], &[0, 1, 0, 1, 4, 0, 0, 0, 1]].concat();
    let beginnings: [&[u8]; 4] = [b"", b"GET / HT", &preface[..11], &begun];
    let mut held = Vec::new();
    for number in 0..SILENT {
        for address in [&meta, &data] {
            let mut socket = timeout(PATIENCE, TcpStream::connect(address)).await.unwrap().unwrap();
            socket.write_all(beginnings[number % beginnings.len()]).await.unwrap();
            held.push(socket);
        }
    }
    // New clients, and the one from before.
    for number in 0..10 {
        let key = format!("key-{number}");
        blocks.put(&key, pattern(number, 2_000)).await.unwrap();
        let other = cluster.client().await.namespace(&blocks.info().name).await.unwrap();
        assert!(other.get(&key).await.unwrap().unwrap().bytes == pattern(number, 2_000));
    }
    // One byte at a time.
    for (socket, byte) in held.iter_mut().zip(begun.iter().cycle()) {
        // The server may have hung up on it.
        drop(socket.write_all(&[*byte]).await);
    }
    blocks.put("during", "all that").await.unwrap();
    for mut socket in held {
        drop(socket.shutdown().await);
        let mut rest = [0; 256];
        drop(timeout(Duration::from_millis(1), socket.read(&mut rest)).await);
    }
    blocks.put("after", "all that").await.unwrap();
    assert!(cluster.ended().unwrap().is_empty());
    cluster.wait_ready(PATIENCE).await.unwrap();
}
