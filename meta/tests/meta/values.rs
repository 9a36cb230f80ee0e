//! The life of values: granted, published, resolved, deleted.

use crate::{
    cluster::{Cluster, Node, UUID, fresh, refusal, root, until},
    player::{DataNode, Writer, attestation, entry, proven_copies, wall_ms},
};
use quarry_proto::{
    refusal::Refusal,
    v1::{self, commit_outcome::Code, delete_outcome},
};
use quarry_wire::{
    attestation::AttestationBatch,
    certificate::Revocations,
    ids::{CertificateSerial, NodeId},
    key::Key,
    signed::Signed,
    version::HybridClock,
};
use std::collections::BTreeSet;

async fn publish(cluster: &Cluster, request: &v1::PublishRequest) -> Result<Vec<v1::CommitOutcome>, Refusal> {
    cluster.ask(async |node: &Node| node.control().publish(request.clone()).await).await.map(|reply| reply.outcomes)
}

async fn resolve(cluster: &Cluster, request: &v1::ResolveRequest) -> v1::ResolveReply {
    cluster.ask(async |node: &Node| node.control().resolve(request.clone()).await).await.unwrap()
}

fn codes(outcomes: &[v1::CommitOutcome]) -> Vec<Code> {
    outcomes.iter().map(v1::CommitOutcome::code).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_published_value_is_resolved_with_proof_until_it_is_deleted() {
    let cluster = Cluster::new().await;
    let nodes = [DataNode::join(&cluster, 11).await, DataNode::join(&cluster, 12).await];
    let writer = Writer::new(&cluster.create_namespace("kv", 2).await);
    let grant = writer.grant(&cluster).await;
    assert_eq!(grant.holders.len(), 2);
    let entries: Vec<_> = (0..5).map(|slot| entry(slot, &format!("key-{slot}"))).collect();
    let attested: Vec<_> = nodes.iter().map(|node| node.attest(&grant, &entries)).collect();
    let request = writer.publish(&grant, &entries, &attested);
    assert_eq!(codes(&publish(&cluster, &request).await.unwrap()), [Code::Committed; 5]);
    let again = publish(&cluster, &request).await.unwrap();
    assert_eq!(codes(&again), [Code::Committed; 5], "the same commit has the same outcome, however often it is sent");

    let leader = cluster.leader(1).await;
    let leader = cluster.nodes.iter().find(|node| node.id == leader).unwrap();
    let status = leader.admin().status(v1::StatusRequest {}).await.unwrap().into_inner();
    let shard = status.space.iter().filter(|row| row.shard == 1);
    assert_eq!(shard.map(|row| (row.grants, row.keys)).collect::<Vec<_>>(), [(1, 5), (0, 0)]);

    let keys = ["key-0", "nothing", "key-3", "key-4"];
    let reply = resolve(&cluster, &writer.resolve(&keys, 2_000)).await;
    assert_eq!(reply.lease_ms, 2_000);
    assert_eq!(reply.items.iter().map(|it| it.found).collect::<Vec<_>>(), [true, false, true, true]);
    assert_eq!(reply.batches.len(), 2, "what a batch shares travels once for each holder");
    let keyring = cluster.keyring().await;
    for (index, key) in keys.iter().enumerate().filter(|(_, key)| **key != "nothing") {
        let holders = proven_copies(&keyring, &reply, index, key, writer.namespace);
        assert_eq!(holders.into_iter().collect::<BTreeSet<_>>(), BTreeSet::from([NodeId(11), NodeId(12)]));
    }
    let probe = resolve(&cluster, &writer.resolve(&keys, 0)).await;
    assert_eq!(probe.lease_ms, 0, "a probe gets no lease");
    let long = resolve(&cluster, &writer.resolve(&keys, 60_000)).await;
    assert!(long.lease_ms <= 5_000 && long.lease_ms > 0, "found {}", long.lease_ms);

    let keys = keys.iter().map(|key| key.as_bytes().to_vec().into()).collect();
    let exists = v1::ExistsRequest { shard: 1, namespace: writer.namespace.0, keys, seen: None };
    let reply = cluster.ask(async |node: &Node| node.control().exists(exists.clone()).await).await.unwrap();
    assert_eq!(reply.present[..], [0b1101]);
    let ask = async |prefix: &[u8], after: &[u8], limit| {
        let (prefix, after) = (prefix.to_vec().into(), after.to_vec().into());
        let asked = v1::ListRequest { shard: 1, namespace: writer.namespace.0, prefix, after, limit, seen: None };
        cluster.ask(async |node: &Node| node.control().list(asked.clone()).await).await
    };
    let names = |reply: &v1::ListReply| {
        let names = reply.entries.iter().map(|it| String::from_utf8(it.key.to_vec()).unwrap());
        (names.collect::<Vec<_>>().join(" "), reply.more)
    };
    let page = ask(b"key-", b"key-0", 2).await.unwrap();
    assert_eq!(names(&page), ("key-1 key-2".to_owned(), true));
    let entry = &page.entries[0];
    assert_eq!((entry.payload_bytes, entry.payload_crc, entry.copies), (1000, 43, 2));
    assert_eq!(names(&ask(b"", b"key-2", 2).await.unwrap()), ("key-3 key-4".to_owned(), false));
    assert_eq!(names(&ask(b"no", b"", 2).await.unwrap()), (String::new(), false));
    assert!(matches!(ask(b"", b"", 0).await, Err(Refusal::Malformed(it)) if it.field == "limit"));
    assert!(matches!(ask(b"", b"", 4097).await, Err(Refusal::Malformed(it)) if it.field == "limit"));
    assert!(matches!(ask(&[1; 513], b"", 1).await, Err(Refusal::TooLarge(it)) if (it.limit, it.found) == (512, 513)));
    assert!(matches!(ask(b"", &[1; 513], 1).await, Err(Refusal::Malformed(it)) if it.field == "key"));

    let item = |key: &str, expected| v1::DeleteItem { key: key.as_bytes().to_vec().into(), expected };
    let other = v1::Version { clock: 1, writer: vec![0; 16].into() };
    let delete = v1::DeleteRequest {
        shard: 1,
        request: Some(cluster.request(1).await),
        namespace: writer.namespace.0,
        items: vec![item("key-0", None), item("nothing", None), item("key-3", Some(other))],
    };
    use delete_outcome::Code::{CompareFailed, Deleted, NotFound};
    for _ in 0..2 {
        let reply = cluster.ask(async |node: &Node| node.control().delete(delete.clone()).await).await.unwrap();
        let codes: Vec<_> = reply.outcomes.iter().map(v1::DeleteOutcome::code).collect();
        assert_eq!(codes, [Deleted, NotFound, CompareFailed], "a repeated request is answered, not executed");
    }
    let reply = resolve(&cluster, &writer.resolve(&["key-0", "key-3"], 0)).await;
    assert_eq!(reply.items.iter().map(|it| it.found).collect::<Vec<_>>(), [false, true]);
    cluster.assert_equal_hashes(0).await;
    cluster.assert_equal_hashes(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_is_not_the_holders_own_about_these_entries_is_not_believed() {
    let cluster = Cluster::new().await;
    let nodes = [DataNode::join(&cluster, 11).await, DataNode::join(&cluster, 12).await];
    let stranger = DataNode::join(&cluster, 13).await;
    let writer = Writer::new(&cluster.create_namespace("kv", 2).await);
    let mut request = writer.grant_request(&cluster, 1).await;
    request.avoid = vec![stranger.id.0];
    let grant = writer.granted(&cluster, &request).await.unwrap();
    assert!(grant.holder(stranger.id).is_none(), "a node that the writer cannot reach is avoided");
    let entries = [entry(0, "one"), entry(1, "two")];
    let honest: Vec<_> = nodes.iter().map(|node| node.attest(&grant, &entries)).collect();

    let mut flipped = honest[1].clone();
    flipped.signature.0[5] ^= 1;
    let other_entries = nodes[1].attest(&grant, &[entry(0, "one"), entry(1, "two")]);
    let fewer = nodes[1].attest(&grant, &entries[..1]);
    let in_anothers_name = stranger.sign(honest[1].statement);
    let by_the_root = root().sign_as_root(UUID, honest[1].statement);
    let leaf = attestation(&grant, nodes[0].id, &entries[0]).leaf();
    let no_holder = stranger.sign(AttestationBatch::of(stranger.id, &[leaf]));
    let another_generation = Signed { generation: quarry_wire::ids::Generation(2), ..honest[1].clone() };
    for (name, forged) in [
        ("flipped", flipped),
        ("other entries", other_entries),
        ("fewer", fewer),
        ("in another's name", in_anothers_name),
        ("by the root", by_the_root),
        ("no holder", no_holder),
        ("another generation", another_generation),
    ] {
        let request = writer.publish(&grant, &entries, &[honest[0].clone(), forged]);
        let refused = publish(&cluster, &request).await;
        assert!(matches!(refused, Err(Refusal::Untrusted(_))), "{name}: {refused:?}");
    }
    let mut stolen = writer.publish(&grant, &entries, &honest);
    stolen.writer = vec![9; 16].into();
    assert!(matches!(publish(&cluster, &stolen).await, Err(Refusal::Untrusted(_))), "another writer's grant");

    let reply = resolve(&cluster, &writer.resolve(&["one", "two"], 0)).await;
    assert!(reply.items.iter().all(|it| !it.found), "nothing of all that took effect");
    let one =
        publish(&cluster, &writer.publish(&grant, &entries[..1], &[nodes[0].attest(&grant, &entries[..1])])).await;
    assert_eq!(codes(&one.unwrap()), [Code::NotEnoughHolders]);
    let two = [entry(2, "one"), entry(3, "two")];
    let attested: Vec<_> = nodes.iter().map(|node| node.attest(&grant, &two)).collect();
    let outcomes = publish(&cluster, &writer.publish(&grant, &two, &attested)).await.unwrap();
    assert_eq!(codes(&outcomes), [Code::Committed; 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn publishes_that_share_a_call_are_each_answered_as_if_they_had_come_alone() {
    let cluster = Cluster::new().await;
    let nodes = [DataNode::join(&cluster, 11).await, DataNode::join(&cluster, 12).await];
    let writer = Writer::new(&cluster.create_namespace("kv", 2).await);
    let grant = writer.grant(&cluster).await;
    let one = |slot: u32, key: &str| {
        let entries = [entry(slot, key)];
        let attested: Vec<_> = nodes.iter().map(|node| node.attest(&grant, &entries)).collect();
        writer.publish(&grant, &entries, &attested)
    };
    let (first, second, mut forged) = (one(0, "first"), one(1, "second"), one(2, "forged"));
    let mut bytes = forged.attested[1].to_vec();
    *bytes.last_mut().unwrap() ^= 1;
    forged.attested[1] = bytes.into();
    let unknown = quarry_wire::ids::GrantId { sequence: quarry_wire::ids::Ordinal::default(), ..grant.id };
    let unknown = v1::PublishRequest { grant: Some(unknown.into()), ..one(3, "unknown") };
    let empty = v1::PublishRequest { entries: Vec::new(), ..first.clone() };
    let nested = v1::PublishRequest { together: vec![first.clone()], ..Default::default() };
    let stolen = v1::PublishRequest { writer: vec![9; 16].into(), ..one(4, "stolen") };
    let exists = one(5, "first");
    let together = vec![first.clone(), forged, second, unknown, empty, nested, stolen, exists, first.clone()];
    let whole = v1::PublishRequest { together, ..Default::default() };

    for again in [false, true] {
        let at_leader = async |node: &Node| {
            let reply = node.control().publish(whole.clone()).await?;
            match reply.get_ref().together.first().and_then(|first| first.answer.as_ref()) {
                Some(v1::publish_answer::Answer::Refusal(v1::Refusal {
                    kind: Some(refusal @ Refusal::NotLeader(_)),
                })) => Err(refusal.clone().into_status()),
                _ => Ok(reply),
            }
        };
        let reply = cluster.ask(at_leader).await.unwrap();
        assert!(reply.outcomes.is_empty() && reply.together.len() == whole.together.len());
        let answers: Vec<_> = reply.together.into_iter().map(|answer| answer.answer.unwrap()).collect();
        for (place, expected) in [
            (0, Code::Committed),
            (2, Code::Committed),
            (3, Code::UnknownGrant),
            (7, Code::Exists),
            (8, Code::Committed),
        ] {
            let v1::publish_answer::Answer::Reply(reply) = &answers[place] else { panic!("{place}: {answers:?}") };
            assert_eq!(codes(&reply.outcomes), [expected], "{place}, again: {again}");
            assert!(reply.applied_ms > 0);
        }
        let refused = |place: usize| match &answers[place] {
            v1::publish_answer::Answer::Refusal(refusal) => refusal.kind.clone().unwrap(),
            v1::publish_answer::Answer::Reply(reply) => panic!("{place}: {reply:?}"),
        };
        assert!(matches!(refused(1), Refusal::Untrusted(_)), "{:?}", refused(1));
        assert!(matches!(refused(4), Refusal::Malformed(it) if it.field == "entries"));
        assert!(matches!(refused(5), Refusal::Malformed(it) if it.field == "together"));
        assert!(matches!(refused(6), Refusal::Untrusted(_)), "{:?}", refused(6));
    }
    let keys = ["first", "second", "forged", "unknown", "stolen"];
    let reply = resolve(&cluster, &writer.resolve(&keys, 0)).await;
    assert_eq!(reply.items.iter().map(|it| it.found).collect::<Vec<_>>(), [true, true, false, false, false]);

    let beside = v1::PublishRequest { together: vec![first.clone()], ..first.clone() };
    assert!(matches!(publish(&cluster, &beside).await, Err(Refusal::Malformed(it)) if it.field == "together"));
    let many = v1::PublishRequest { together: vec![first; 65], ..Default::default() };
    assert!(matches!(publish(&cluster, &many).await, Err(Refusal::TooLarge(it)) if (it.limit, it.found) == (64, 65)));
    cluster.assert_equal_hashes(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outcomes_say_what_stood_in_the_way() {
    let cluster = Cluster::new().await;
    let node = DataNode::join(&cluster, 11).await;
    let writer = Writer::new(&cluster.create_namespace("kv", 1).await);
    let grant = writer.grant(&cluster).await;
    let send = async |entry: v1::CommitEntry| {
        let entries = [entry];
        let request = writer.publish(&grant, &entries, &[node.attest(&grant, &entries)]);
        publish(&cluster, &request).await.map(|outcomes| outcomes.into_iter().next().unwrap())
    };
    let first = entry(0, "key");
    assert_eq!(send(first.clone()).await.unwrap().code(), Code::Committed);
    let exists = send(entry(1, "key")).await.unwrap();
    assert_eq!((exists.code(), exists.version.unwrap().clock), (Code::Exists, first.clock));
    let replace = v1::PutMode { kind: v1::put_mode::Kind::Replace.into(), expected: None };
    let older = v1::CommitEntry { clock: first.clock - 1, mode: Some(replace.clone()), ..entry(2, "key") };
    assert_eq!(send(older).await.unwrap().code(), Code::StaleVersion);
    let newer = v1::CommitEntry { mode: Some(replace.clone()), ..entry(3, "key") };
    assert_eq!(send(newer.clone()).await.unwrap().code(), Code::Committed);
    let compare = |expected| v1::PutMode { kind: v1::put_mode::Kind::Compare.into(), expected };
    let wrong = v1::CommitEntry { mode: Some(compare(None)), ..entry(4, "key") };
    let failed = send(wrong).await.unwrap();
    assert_eq!((failed.code(), failed.version.unwrap().clock), (Code::CompareFailed, newer.clock));
    assert_eq!(send(entry(0, "other")).await.unwrap().code(), Code::SlotTaken);
    let far = HybridClock::at(wall_ms() + 3_600_000);
    let ahead = send(v1::CommitEntry { clock: far.0, ..entry(5, "key") }).await;
    assert!(matches!(ahead, Err(Refusal::VersionAhead(_))), "{ahead:?}");

    let seal = v1::SealRequest { grant: Some(grant.id.into()), fill: 6, writer: writer.id.0.to_vec().into() };
    cluster.ask(async |node: &Node| node.control().seal(seal.clone()).await).await.unwrap();
    let sealed = send(entry(7, "late")).await.unwrap();
    assert_eq!((sealed.code(), sealed.a), (Code::Sealed, 6));
    let mut unknown = writer.publish(&grant, &[entry(0, "key")], &[]);
    unknown.grant.as_mut().unwrap().sequence.as_mut().unwrap().number += 1_000;
    assert_eq!(codes(&publish(&cluster, &unknown).await.unwrap()), [Code::UnknownGrant]);
}

#[tokio::test(flavor = "multi_thread")]
async fn grants_asked_for_together_never_overlap_and_a_repeated_request_gets_the_same_one() {
    let cluster = Cluster::new().await;
    let _node = DataNode::join(&cluster, 11).await;
    let namespace = cluster.create_namespace("kv", 1).await;
    let writer = Writer::new(&namespace);
    let first = writer.grant_request(&cluster, 1).await;
    let grant = writer.granted(&cluster, &first).await.unwrap();
    assert_eq!(writer.granted(&cluster, &first).await.unwrap().id, grant.id);

    let requests: Vec<_> = (0..40)
        .map(|_| v1::GrantRequest {
            request: Some(v1::RequestId { random: fresh(), ..first.request.unwrap() }),
            ..first.clone()
        })
        .collect();
    let grants = futures::future::join_all(requests.iter().map(|request| writer.granted(&cluster, request))).await;
    let mut spans: Vec<_> = grants.into_iter().map(|grant| grant.unwrap()).map(|it| it.span(&it.holders[0])).collect();
    spans.push(grant.span(&grant.holders[0]));
    spans.sort_by_key(|span| span.start);
    assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start), "{spans:?}");
    assert_eq!(spans.len(), 41);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_another_shard_is_sent_there() {
    let cluster = Cluster::with(2, |_| {}).await;
    let writer = Writer::new(&cluster.create_namespace("kv", 1).await);
    let foreign =
        (0..).map(|n| format!("key-{n}")).find(|key| Key::new(key).unwrap().shard(writer.namespace, 2).0 == 2);
    let foreign = foreign.unwrap();
    let request = writer.resolve(&[&foreign], 0);
    let refused = cluster.ask(async |node: &Node| node.control().resolve(request.clone()).await).await;
    assert!(matches!(refused, Err(Refusal::WrongShard(v1::WrongShard { expected: 2, found: 1 }))), "{refused:?}");
    let request = v1::ResolveRequest { shard: 2, ..request };
    let reply = cluster.ask(async |node: &Node| node.control().resolve(request.clone()).await).await.unwrap();
    assert!(!reply.items[0].found);
    let request = v1::ResolveRequest { namespace: 77, keys: Vec::new(), ..request };
    let refused = cluster.ask(async |node: &Node| node.control().resolve(request.clone()).await).await;
    assert!(matches!(refused, Err(Refusal::UnknownNamespace(v1::UnknownNamespace { id: 77, .. }))), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_who_wait_share_entries() {
    let cluster = Cluster::new().await;
    let writer = Writer::new(&cluster.create_namespace("kv", 1).await);
    let leader = cluster.leader(1).await;
    let node = cluster.nodes.iter().find(|node| node.id == leader).unwrap();
    let last_log = async || {
        let status = node.admin().status(v1::StatusRequest {}).await.unwrap().into_inner();
        status.groups.into_iter().find(|it| it.group == 1).unwrap().last_log
    };
    let request = cluster.request(1).await;
    let before = last_log().await;
    let delete = |random| v1::DeleteRequest {
        shard: 1,
        request: Some(v1::RequestId { random, ..request }),
        namespace: writer.namespace.0,
        items: vec![v1::DeleteItem { key: b"nothing".to_vec().into(), expected: None }],
    };
    let control = node.control();
    let calls = (0..300).map(|_| {
        let (mut control, delete) = (control.clone(), delete(fresh()));
        async move { control.delete(delete).await.unwrap().into_inner().outcomes.len() }
    });
    let answers = futures::future::join_all(calls).await;
    assert!(answers.into_iter().all(|outcomes| outcomes == 1));
    let entries = last_log().await - before;
    assert!(entries < 150, "300 commands took {entries} entries");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_grant_gives_its_space_back_by_itself() {
    let cluster = Cluster::new().await;
    let _node = DataNode::join(&cluster, 11).await;
    let writer = Writer::new(&cluster.create_namespace("kv", 1).await);
    let request = v1::GrantRequest { ttl_ms: 300, ..writer.grant_request(&cluster, 1).await };
    let grant = writer.granted(&cluster, &request).await.unwrap();
    // At all nodes: one that lags has not heard of the grant yet.
    until("the slab to be free again", async || {
        for node in &cluster.nodes {
            let status = node.admin().status(v1::StatusRequest {}).await.ok()?.into_inner();
            status.space.iter().find(|it| it.shard == 1).filter(|it| it.free_bytes == 16 << 20)?;
        }
        Some(())
    })
    .await;
    let entries = [entry(0, "late")];
    let outcomes = publish(&cluster, &writer.publish(&grant, &entries, &[])).await.unwrap();
    assert_eq!(codes(&outcomes), [Code::GrantExpired]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_says_who_leads_and_reads_stale_when_asked_to() {
    let cluster = Cluster::new().await;
    let writer = Writer::new(&cluster.create_namespace("kv", 1).await);
    let leader = cluster.leader(1).await;
    let follower = cluster.nodes.iter().find(|node| node.id != leader).unwrap();
    let address = cluster.nodes.iter().find(|node| node.id == leader).unwrap().address.to_string();
    let request = writer.resolve(&["key"], 1_000);
    let refused = refusal(follower.control().resolve(request.clone()).await);
    assert_eq!(refused, Refusal::NotLeader(v1::NotLeader { group: 1, leader: leader.0, address: address.clone() }));
    let refused = refusal(follower.control().grant(writer.grant_request(&cluster, 1).await).await);
    assert_eq!(refused, Refusal::NotLeader(v1::NotLeader { group: 1, leader: leader.0, address }));
    let stale = v1::ResolveRequest { stale: true, ..request };
    let known = until("the namespace at the follower", async || follower.control().resolve(stale.clone()).await.ok());
    let reply = known.await.into_inner();
    assert_eq!((reply.lease_ms, reply.items[0].found), (0, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_signed_again_by_its_node_alone_and_under_a_key_that_is_believed() {
    const SERIAL: u64 = 7_001;
    let cluster = Cluster::new().await;
    let mut nodes = [DataNode::join(&cluster, 11).await, DataNode::join(&cluster, 12).await];
    let writer = Writer::new(&cluster.create_namespace("kv", 2).await);
    let grant = writer.grant(&cluster).await;
    let entries: Vec<_> = (0..8).map(|slot| entry(slot, &format!("key-{slot}"))).collect();
    let attested: Vec<_> = nodes.iter().map(|node| node.attest(&grant, &entries)).collect();
    publish(&cluster, &writer.publish(&grant, &entries, &attested)).await.unwrap();

    let batches = async |node: u64| {
        let request = v1::BatchesRequest { shard: 1, node, serial: SERIAL, after: 0, last: None };
        cluster.ask(async |it: &Node| it.registry().batches(request).await).await.unwrap()
    };
    let resign = async |node: u64, batch: u64, signed: &Signed<AttestationBatch>| {
        let batches = vec![v1::NamedBatch { batch, signed: signed.encode().into() }];
        let request = v1::ResignRequest { shard: 1, node, batches };
        cluster.ask(async |it: &Node| it.registry().resign(request.clone()).await).await.map(|reply| reply.taken)
    };
    let reply = batches(11).await;
    assert_eq!((reply.batches.len(), reply.awaiting), (1, 0), "all eight slots are committed");
    assert_eq!(reply.batches[0].signed, attested[0].encode());
    let batch = reply.batches[0].batch;

    let certificate = nodes[0].change_key(SERIAL);
    let again = nodes[0].sign(attested[0].statement);
    let refused = resign(11, batch, &again).await;
    assert!(matches!(refused, Err(Refusal::Untrusted(_))), "the key is not known yet: {refused:?}");
    let admit = v1::AdmitCertificateRequest { certificate: certificate.encode().into() };
    cluster.ask(async |it: &Node| it.registry().admit_certificate(admit.clone()).await).await.unwrap();
    let mut forged = again.clone();
    forged.signature = attested[0].signature;
    for (node, signed) in [(11, &forged), (12, &again), (11, &attested[1])] {
        let refused = resign(node, batch, signed).await;
        assert!(matches!(refused, Err(Refusal::Untrusted(_))), "{refused:?}");
    }
    assert_eq!(resign(11, batch, &again).await.unwrap(), 1);
    assert!(batches(11).await.batches.is_empty());
    assert_eq!(batches(12).await.batches.len(), 1);

    // What readers are given from now on.
    let reply = resolve(&cluster, &writer.resolve(&["key-3"], 1_000)).await;
    let signed: BTreeSet<_> = reply.batches.iter().map(|it| it.signed.to_vec()).collect();
    assert_eq!(signed, BTreeSet::from([again.encode(), attested[1].encode()]));
    let holders = proven_copies(&cluster.keyring().await, &reply, 0, "key-3", writer.namespace);
    assert_eq!(holders.len(), 2);

    // A key that is void already is nobody's next one.
    let list = Revocations { number: 1, serials: [CertificateSerial(7_002)].into() };
    let request = v1::ApplyRevocationsRequest { list: root().sign_as_root(UUID, list).encode().into() };
    cluster.ask(async |it: &Node| it.admin().apply_revocations(request.clone()).await).await.unwrap();
    let admit = v1::AdmitCertificateRequest { certificate: nodes[0].change_key(7_002).encode().into() };
    let refused = cluster.ask(async |it: &Node| it.registry().admit_certificate(admit.clone()).await).await;
    assert!(matches!(refused, Err(Refusal::Untrusted(_))), "{refused:?}");
}
