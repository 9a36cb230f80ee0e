//! The doors of the servers: protocol versions and malformed requests are refused typed, and the servers live on.

use bytes::Bytes;
use quarry_proto::{protocol::HEADER, refusal::Refusal, v1};
use quarry_tests::{
    Seed, TestCluster,
    calls::{self, Turned, at_leader, refusal},
    shared_without_tls,
};
use quarry_wire::limits::{COMMIT_ENTRIES_MAX, KEYS_PER_CALL_MAX, MESSAGE_BYTES_MAX, PROTOCOL_MAX, PROTOCOL_MIN};
use tonic::{
    Code, Request, Status, client::Grpc, codegen::http::uri::PathAndQuery, metadata::MetadataValue, transport::Channel,
};
use tonic_prost::ProstCodec;

/// Addresses of a meta node and a data node.
fn doors(cluster: &TestCluster) -> (String, String) {
    (cluster.address(cluster.metas()[0]), cluster.address(cluster.data_nodes()[0]))
}

#[tokio::test]
async fn a_call_of_another_protocol_version_or_of_none_is_refused_with_the_versions_spoken() {
    let cluster = shared_without_tls().await;
    let (meta, data) = doors(&cluster);
    fn asked<T>(message: T, version: Option<u32>) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(version) = version {
            request.metadata_mut().insert(HEADER, MetadataValue::from(version));
        }
        request
    }
    let meta: Channel = calls::channel(&meta).await.unwrap();
    let data: Channel = calls::channel(&data).await.unwrap();
    for version in [None, Some(0), Some(PROTOCOL_MAX + 1), Some(u32::MAX)] {
        let mut control = v1::control_client::ControlClient::new(meta.clone());
        let mut registry = v1::registry_client::RegistryClient::new(meta.clone());
        let mut admin = v1::admin_client::AdminClient::new(meta.clone());
        let mut node = v1::data_node_client::DataNodeClient::new(data.clone());
        let refused = [
            control.describe(asked(v1::DescribeRequest::default(), version)).await.unwrap_err(),
            registry.heartbeat(asked(v1::HeartbeatRequest::default(), version)).await.unwrap_err(),
            admin.status(asked(v1::StatusRequest {}, version)).await.unwrap_err(),
            node.node_status(asked(v1::NodeStatusRequest {}, version)).await.unwrap_err(),
        ];
        for status in refused {
            match Refusal::from_status(&status) {
                Some(Refusal::UnsupportedProtocol(it)) => {
                    assert_eq!((it.found, it.min, it.max), (version.unwrap_or(0), PROTOCOL_MIN, PROTOCOL_MAX));
                }
                other => panic!("version {version:?}: {other:?} in {status:?}"),
            }
        }
        let mut node = v1::data_node_client::DataNodeClient::new(data.clone());
        assert!(node.node_status(asked(v1::NodeStatusRequest {}, Some(PROTOCOL_MAX))).await.is_ok());
    }
}

#[tokio::test]
async fn requests_with_missing_or_impossible_parts_are_refused_and_the_data_node_lives() {
    let cluster = shared_without_tls().await;
    let (_, address) = doors(&cluster);
    let mut node = calls::data_node(&address).await.unwrap();
    let pid = cluster.pid(cluster.data_nodes()[0]).unwrap();
    let writer = Bytes::from_static(&[1; 16]);
    let grant = Some(v1::GrantId { shard: 1, sequence: Some(v1::Ordinal { generation: 1, number: 1 << 40 }) });
    for garbage in [Vec::new(), vec![3], vec![0; 16], vec![0xff; 300], vec![3; 3 << 20]] {
        let request = v1::ArmRequest { grant: garbage.into(), writer: writer.clone() };
        let answer = calls::done(node.arm(request)).await;
        assert!(matches!(answer, Err(Turned::Refused(Refusal::Malformed(_)))), "{answer:?}");
    }
    for id in [Bytes::new(), Bytes::from_static(&[1; 15]), Bytes::from_static(&[1; 17])] {
        let request = v1::ConfirmRequest { grant, writer: id, entries: vec![v1::CommitEntry::default()] };
        let answer = refusal(calls::done(node.confirm(request)).await);
        assert!(matches!(&answer, Refusal::Malformed(it) if it.field == "writer"), "{answer:?}");
    }
    for id in [None, Some(v1::GrantId { shard: 1, sequence: None })] {
        let request = v1::CloseRequest { grant: id, writer: writer.clone() };
        let answer = refusal(calls::done(node.close(request)).await);
        assert!(matches!(&answer, Refusal::Malformed(it) if it.field.contains("grant")), "{answer:?}");
    }
    let commit = |written: Vec<u64>, entries: usize| v1::CommitRequest {
        grant,
        writer: writer.clone(),
        written,
        entries: vec![v1::CommitEntry::default(); entries],
    };
    for (request, what) in [
        (commit(vec![], 1), "no holder"),
        (commit(vec![1, 2, 3, 4], 1), "four holders"),
        (commit(vec![101], 0), "no entry"),
    ] {
        let answer = refusal(calls::done(node.commit(request)).await);
        assert!(matches!(answer, Refusal::Malformed(_)), "{what}: {answer:?}");
    }
    let answer = refusal(calls::done(node.commit(commit(vec![101], COMMIT_ENTRIES_MAX + 1))).await);
    assert!(matches!(&answer, Refusal::TooLarge(it) if it.limit == COMMIT_ENTRIES_MAX as u64), "{answer:?}");
    let answer = refusal(
        calls::done(node.confirm(v1::ConfirmRequest { grant, writer, entries: vec![v1::CommitEntry::default()] }))
            .await,
    );
    assert!(matches!(answer, Refusal::UnknownGrant(_)), "{answer:?}");
    assert_eq!(cluster.pid(cluster.data_nodes()[0]), Some(pid));
    assert!(calls::node_status(&address).await.is_ok());
}

#[tokio::test]
async fn requests_with_missing_or_impossible_parts_are_refused_and_the_meta_nodes_live() {
    let cluster = shared_without_tls().await;
    let (_client, blocks) = cluster.namespace().await;
    // Once it holds a value, the shard has heard of the namespace.
    blocks.put("before", "all that").await.unwrap();
    let raw = cluster.raw().await;
    let metas = raw.metas().to_vec();
    let request = raw.request().await;
    let good = v1::GrantRequest {
        shard: 1,
        request: Some(request),
        writer: Bytes::from_static(&[1; 16]),
        namespace: blocks.info().id.0,
        slot_size: 4096,
        slots: 1,
        ttl_ms: 1_000,
        avoid: Vec::new(),
        seen: None,
    };
    let bad = [
        v1::GrantRequest { request: None, ..good.clone() },
        v1::GrantRequest { writer: Bytes::from_static(&[1; 3]), ..good.clone() },
        v1::GrantRequest { slot_size: 0, ..good.clone() },
        v1::GrantRequest { slot_size: 100, ..good.clone() },
        v1::GrantRequest { slot_size: u32::MAX, ..good.clone() },
        v1::GrantRequest { slots: 0, ..good.clone() },
        v1::GrantRequest { slots: u32::MAX, ..good.clone() },
        v1::GrantRequest { ttl_ms: 30_001, ..good.clone() },
        v1::GrantRequest { ttl_ms: u32::MAX, ..good.clone() },
        v1::GrantRequest { shard: 0, ..good.clone() },
        v1::GrantRequest { shard: 2, ..good.clone() },
        v1::GrantRequest { request: Some(v1::RequestId { applied_ms: u64::MAX, ..request }), ..good.clone() },
    ];
    for asked in bad {
        let answer = at_leader(&metas, |mut control| {
            let asked = asked.clone();
            async move { calls::done(control.grant(asked)).await }
        })
        .await;
        let refused = refusal(answer);
        let typed = matches!(refused, Refusal::Malformed(_) | Refusal::TooLarge(_) | Refusal::WrongShard(_));
        assert!(typed, "{asked:?}: {refused:?}");
    }
    let resolve =
        |keys: Vec<Bytes>| v1::ResolveRequest { shard: 1, namespace: blocks.info().id.0, keys, ..Default::default() };
    for (asked, what) in [
        (resolve(vec![Bytes::new()]), "an empty key"),
        (resolve(vec![vec![1; 513].into()]), "a long key"),
        (resolve(vec![Bytes::from_static(b"k"); KEYS_PER_CALL_MAX + 1]), "many keys"),
    ] {
        let answer = at_leader(&metas, |mut control| {
            let asked = asked.clone();
            async move { calls::done(control.resolve(asked)).await }
        })
        .await;
        let refused = refusal(answer);
        assert!(matches!(refused, Refusal::Malformed(_) | Refusal::TooLarge(_)), "{what}: {refused:?}");
    }
    // Forged statements: nothing that is not signed as it must be is believed.
    let publish = v1::PublishRequest {
        grant: Some(v1::GrantId { shard: 1, sequence: Some(v1::Ordinal { generation: 1, number: 1 }) }),
        writer: Bytes::from_static(&[1; 16]),
        entries: vec![v1::CommitEntry { key: Bytes::from_static(b"k"), ..Default::default() }],
        attested: vec![Bytes::from_static(&[4; 200])],
        ..Default::default()
    };
    let answer = at_leader(&metas, |mut control| {
        let publish = publish.clone();
        async move { calls::done(control.publish(publish)).await }
    })
    .await;
    let refused = refusal(answer);
    assert!(matches!(refused, Refusal::Malformed(_) | Refusal::Untrusted(_)), "{refused:?}");
    for meta in cluster.metas() {
        assert!(cluster.status(meta).await.is_ok(), "{meta} lives");
    }
    blocks.put("after", "all that").await.unwrap();
}

#[tokio::test]
async fn a_message_beyond_the_limit_is_refused_and_the_servers_live() {
    let cluster = shared_without_tls().await;
    let (meta, data) = doors(&cluster);
    let huge = Bytes::from(vec![7; MESSAGE_BYTES_MAX + 1]);
    let mut node = calls::data_node(&data).await.unwrap();
    let too_large = |status: Status| match Refusal::from_status(&status) {
        Some(Refusal::TooLarge(it)) => {
            assert_eq!(it.limit, MESSAGE_BYTES_MAX as u64);
            assert!(it.found > it.limit, "{it:?}");
        }
        other => panic!("{other:?} in {status:?}"),
    };
    too_large(node.arm(v1::ArmRequest { grant: huge.clone(), writer: Bytes::new() }).await.unwrap_err());
    let mut control = calls::control(&meta).await.unwrap();
    let asked = v1::CreateNamespaceRequest { name: String::from_utf8(huge.to_vec()).unwrap(), ..Default::default() };
    too_large(control.create_namespace(asked).await.unwrap_err());
    assert!(calls::node_status(&data).await.is_ok() && calls::status(&meta).await.is_ok());
}

#[tokio::test]
async fn bytes_that_are_no_http2_or_no_protobuf_do_not_hurt_a_server() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let cluster = shared_without_tls().await;
    let (meta, data) = doors(&cluster);
    for address in [&meta, &data] {
        for noise in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            &[0; 4096],
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        ] {
            let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
            socket.write_all(noise).await.unwrap();
            let mut rest = Vec::new();
            // The server closes the connection, or resets it.
            let _ =
                tokio::time::timeout(calls::CALL, socket.read_to_end(&mut rest)).await.expect("the server hangs up");
        }
    }
    assert!(calls::node_status(&data).await.is_ok() && calls::status(&meta).await.is_ok());
}

/// Sends `message` to a method that takes another.
async fn mistaken(channel: Channel, method: &'static str, message: v1::ArmRequest) -> Result<(), Status> {
    let mut raw = Grpc::new(channel);
    raw.ready().await.map_err(|wrong| Status::unavailable(wrong.to_string()))?;
    let mut request = Request::new(message);
    request.metadata_mut().insert(HEADER, MetadataValue::from(PROTOCOL_MAX));
    let codec = ProstCodec::<v1::ArmRequest, v1::CloseReply>::default();
    raw.unary(request, PathAndQuery::from_static(method), codec).await.map(|_| ())
}

#[tokio::test]
async fn a_message_of_another_kind_is_refused_by_every_method_and_the_servers_live() {
    let cluster = shared_without_tls().await;
    let (meta, data) = doors(&cluster);
    let of_metas = [
        "/quarry.v1.Control/CreateNamespace",
        "/quarry.v1.Control/Grant",
        "/quarry.v1.Control/Publish",
        "/quarry.v1.Control/Seal",
        "/quarry.v1.Control/Delete",
        "/quarry.v1.Control/Resolve",
        "/quarry.v1.Control/Exists",
        "/quarry.v1.Control/List",
        "/quarry.v1.Registry/RegisterRegion",
        "/quarry.v1.Registry/RecordRegion",
        "/quarry.v1.Registry/Heartbeat",
        "/quarry.v1.Admin/Bootstrap",
        "/quarry.v1.Admin/TransferLeader",
    ];
    let of_data = [
        "/quarry.v1.DataNode/Arm",
        "/quarry.v1.DataNode/Commit",
        "/quarry.v1.DataNode/Confirm",
        "/quarry.v1.DataNode/MoveCopies",
        "/quarry.v1.DataNode/Close",
    ];
    let mut seed = Seed::draw();
    for (address, methods) in [(&meta, &of_metas[..]), (&data, &of_data[..])] {
        let channel = calls::channel(address).await.unwrap();
        for method in methods {
            for length in [1, 7, 200, 5_000] {
                let message = v1::ArmRequest { grant: seed.bytes(length).into(), writer: seed.bytes(length).into() };
                let answer = mistaken(channel.clone(), method, message).await;
                let status = answer.expect_err(method);
                let typed = Refusal::from_status(&status).is_some();
                // What is no message of the method at all is turned down by the transport, before the service sees it.
                assert!(typed || status.code() == Code::Internal, "{method}: {status:?}");
            }
        }
    }
    assert!(calls::node_status(&data).await.is_ok() && calls::status(&meta).await.is_ok());
}

#[tokio::test]
async fn a_follower_names_the_leader() {
    let cluster = shared_without_tls().await;
    let (_client, blocks) = cluster.namespace().await;
    let raw = cluster.raw().await;
    let leader = cluster.leader(1, calls::CALL).await.unwrap();
    let follower = cluster.metas().into_iter().find(|meta| *meta != leader).unwrap();
    let mut control = calls::control(&cluster.address(follower)).await.unwrap();
    let asked = v1::GrantRequest {
        shard: 1,
        request: Some(raw.request().await),
        writer: Bytes::from_static(&[1; 16]),
        namespace: blocks.info().id.0,
        slot_size: 4096,
        slots: 1,
        ..Default::default()
    };
    match refusal(calls::done(control.grant(asked)).await) {
        Refusal::NotLeader(it) => {
            assert_eq!((it.group, it.leader, it.address), (1, leader.node().0, cluster.address(leader)));
        }
        other => panic!("{other:?}"),
    }
}
