//! Making a cluster; data nodes that come, fall silent and return.

use crate::{
    cluster::{Cluster, Node, config, fresh, identity, refusal, until},
    player::{DataNode, Writer, entry},
};
use quarry_meta::{MetaError, MetaNode};
use quarry_proto::{
    refusal::Refusal,
    v1::{self, control_client::ControlClient},
};
use quarry_wire::{certificate::Role, ids::NodeId};
use std::{net::SocketAddr, time::Duration};
use tonic::transport::Endpoint;

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_made_once() {
    let cluster = Cluster::blank(1, |_| {}).await;
    let refused = refusal(cluster.nodes[0].control().describe(v1::DescribeRequest { seen: None }).await);
    assert!(matches!(refused, Refusal::NotReady(_)), "{refused:?}");
    let ask = async |request: &v1::BootstrapRequest| {
        cluster.ask(async |node: &Node| node.admin().bootstrap(request.clone()).await).await
    };
    let right = cluster.bootstrap_request();
    let mut wrong = right.clone();
    wrong.cluster = vec![0; 16].into();
    assert!(matches!(ask(&wrong).await, Err(Refusal::WrongCluster(_))));
    let wrong = v1::BootstrapRequest { shards: 2, ..right.clone() };
    assert!(matches!(ask(&wrong).await, Err(Refusal::Malformed(it)) if it.field == "shards"));
    let mut wrong = right.clone();
    wrong.metas[1].certificate = identity(NodeId(wrong.metas[1].node), Role::DataNode).1.encode().into();
    assert!(matches!(ask(&wrong).await, Err(Refusal::Malformed(_))));
    let mut wrong = right.clone();
    wrong.metas.swap(1, 2);
    (wrong.metas[1].address, wrong.metas[2].address) = (wrong.metas[2].address.clone(), wrong.metas[1].address.clone());
    let refused = refusal(cluster.nodes[0].admin().bootstrap(wrong).await);
    assert!(matches!(&refused, Refusal::Malformed(it) if it.field == "metas.node"), "{refused:?}");

    ask(&right).await.unwrap();
    ask(&right).await.expect("the same again changes nothing");
    let fewer = v1::BootstrapRequest { metas: right.metas[..2].to_vec(), ..right.clone() };
    assert!(matches!(ask(&fewer).await, Err(Refusal::AlreadyBootstrapped(_) | Refusal::Malformed(_))));
    cluster.assert_equal_hashes(0).await;

    let made = cluster.create_namespace("kv", 2).await;
    assert_eq!((made.copies, made.least), (2, 2));
    let request = v1::CreateNamespaceRequest {
        request: Some(cluster.request(0).await),
        name: "kv".into(),
        class: v1::Class::Cache.into(),
        copies: 1,
        least: 0,
        quota_bytes: 0,
    };
    let again = cluster.ask(async |node: &Node| node.control().create_namespace(request.clone()).await).await;
    assert_eq!(again, Err(Refusal::NamespaceExists(v1::NamespaceExists { id: made.id, name: "kv".into() })));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_that_cannot_be_is_refused_in_words_that_say_what_can() {
    let cluster = Cluster::new().await;
    let refused = async |wrong: fn(&mut v1::CreateNamespaceRequest)| {
        let mut request = v1::CreateNamespaceRequest {
            request: Some(cluster.request(0).await),
            name: "kv".into(),
            class: v1::Class::Cache.into(),
            copies: 1,
            least: 0,
            quota_bytes: 0,
        };
        wrong(&mut request);
        let refused = cluster.ask(async |node: &Node| node.control().create_namespace(request.clone()).await).await;
        refused.unwrap_err().to_string()
    };
    let letters = "1 to 64 of ASCII letters, digits, '-', '_' and '.'";
    assert_eq!(refused(|it| it.name = "a b".into()).await, format!("name must be {letters}, found \"a b\""));
    assert_eq!(refused(|it| it.name.clear()).await, format!("name must be {letters}, found \"\""));
    assert_eq!(refused(|it| it.copies = 0).await, "copies must be 1 to 3, found 0");
    assert_eq!(refused(|it| it.copies = 4).await, "copies must be 1 to 3, found 4");
    assert_eq!(
        refused(|it| it.quota_bytes = 4096).await,
        "quota_bytes must be 0, or at least 4224: each of 1 shards allows an even share of it, found 4096"
    );
    assert_eq!(refused(|it| it.least = 2).await, "least must be 1 to 1, the copies of the namespace, found 2");
    assert_eq!(
        refused(|it| it.class = v1::Class::Durable.into()).await,
        "class must be cache: durable namespaces need journals, which this build does not have, found durable"
    );
    assert!(cluster.describe().await.changes.unwrap().namespaces.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bootstrap_that_cannot_reach_every_node_makes_nothing() {
    let mut cluster = Cluster::blank(1, |_| {}).await;
    cluster.nodes[2].kill();
    let refused = refusal(cluster.nodes[0].admin().bootstrap(cluster.bootstrap_request()).await);
    assert!(matches!(refused, Refusal::NotReady(_)), "{refused:?}");
    let status = cluster.nodes[0].admin().status(v1::StatusRequest {}).await.unwrap().into_inner();
    assert!(status.cluster.is_empty() && status.groups.iter().all(|group| group.members.is_empty()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_of_no_protocol_version_is_refused() {
    let cluster = Cluster::blank(1, |_| {}).await;
    let endpoint = Endpoint::from_shared(format!("http://{}", cluster.nodes[0].address)).unwrap();
    let mut control = ControlClient::new(endpoint.connect().await.unwrap());
    let refused = refusal(control.describe(v1::DescribeRequest { seen: None }).await);
    assert!(matches!(refused, Refusal::UnsupportedProtocol(it) if it.found == 0), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_holds_a_last_copy_is_decommissioned_only_by_force() {
    let cluster = Cluster::with(1, |_| {}).await;
    let node = DataNode::join(&cluster, 11).await;
    let writer = Writer::new(&cluster.create_namespace("kv", 1).await);
    let (grant, entries) = (writer.grant(&cluster).await, [entry(0, "a")]);
    let request = writer.publish(&grant, &entries, &[node.attest(&grant, &entries)]);
    let published = cluster.ask(async |meta: &Node| meta.control().publish(request.clone()).await).await.unwrap();
    assert_eq!(published.outcomes[0].code(), v1::commit_outcome::Code::Committed);
    let asked =
        v1::SetStandingRequest { node: 11, standing: v1::Standing::Decommissioned.into(), ..Default::default() };
    let set = async |asked: v1::SetStandingRequest| {
        cluster.ask(async |meta: &Node| meta.admin().set_standing(asked).await).await
    };
    let refused = set(asked).await.unwrap_err();
    let last = v1::node_refused::Reason::LastCopies;
    assert!(matches!(&refused, Refusal::NodeRefused(it) if it.reason() == last), "{refused:?}");
    let looked = set(v1::SetStandingRequest { look_only: true, ..asked }).await.unwrap();
    assert_eq!((looked.copies, looked.last_copies), (1, 1), "nothing was changed");
    let forced = set(v1::SetStandingRequest { force: true, ..asked }).await.unwrap();
    assert_eq!((forced.copies, forced.last_copies), (1, 1));
    set(asked).await.expect("the same again changes nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_data_node_is_declared_dead_and_returns_in_a_new_life() {
    let cluster = Cluster::with(1, |config| config.node_silence = Duration::from_millis(1_500)).await;
    let (mut node, other) = (DataNode::join(&cluster, 11).await, DataNode::join(&cluster, 12).await);
    let first = node.incarnation;
    let boot = fresh().into();
    let alive = async |id: NodeId| {
        let status = cluster.nodes[0].admin().status(v1::StatusRequest {}).await.ok()?.into_inner();
        status.data_nodes.into_iter().find(|it| it.node == id.0).map(|it| it.alive)
    };
    until("both to be known", async || Some((alive(node.id).await? && alive(other.id).await?).then_some(())?)).await;
    node.fall_silent();
    until("the silent one to be dead", async || (!alive(node.id).await?).then_some(())).await;
    assert_eq!(alive(other.id).await, Some(true), "the other one was heard");

    let reply = until("a heartbeat that is told", async || {
        let reply = cluster.nodes[0].registry().heartbeat(node.heartbeat()).await.ok()?.into_inner();
        (!reply.void.is_empty()).then_some(reply)
    })
    .await;
    assert_eq!(reply.void[0].region, Some(node.region().into()));
    let stale = node.record(&cluster).await;
    assert!(matches!(stale, Err(Refusal::StaleIncarnation(_))), "{stale:?}");
    node.register(&cluster, boot).await;
    assert!(node.incarnation > first);
    let second = node.incarnation;
    node.register(&cluster, boot).await;
    assert_eq!(node.incarnation, second, "a repeated registration raises nothing");
    node.record(&cluster).await.unwrap();
    node.beat(&cluster);
    until("it to be alive again", async || alive(node.id).await?.then_some(())).await;
    let writer = Writer::new(&cluster.create_namespace("kv", 2).await);
    let grant = until("a grant that uses it", async || {
        let grant = writer.grant(&cluster).await;
        grant.holder(node.id).is_some().then_some(grant)
    });
    assert_eq!(grant.await.holder(node.id).unwrap().incarnation, second);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_region_without_its_nodes_certificate_is_not_registered() {
    let cluster = Cluster::new().await;
    let node = DataNode::join(&cluster, 11).await;
    let ask = async |request: &v1::RegisterRegionRequest| {
        cluster.ask(async |node: &Node| node.registry().register_region(request.clone()).await).await
    };
    let right = node.registration(1);
    let of_another = v1::RegisterRegionRequest {
        certificate: identity(NodeId(12), Role::DataNode).1.encode().into(),
        ..right.clone()
    };
    assert!(matches!(ask(&of_another).await, Err(Refusal::Untrusted(_))));
    let wrong_role =
        v1::RegisterRegionRequest { certificate: identity(NodeId(11), Role::Meta).1.encode().into(), ..right.clone() };
    assert!(matches!(ask(&wrong_role).await, Err(Refusal::Untrusted(_))));
    let mut forged = identity(NodeId(11), Role::DataNode).1;
    forged.signature.0[0] ^= 1;
    let forged = v1::RegisterRegionRequest { certificate: forged.encode().into(), ..right.clone() };
    assert!(matches!(ask(&forged).await, Err(Refusal::Untrusted(_))));
    let longer = v1::RegisterRegionRequest { length: 32 << 20, ..right };
    assert!(matches!(ask(&longer).await, Err(Refusal::Malformed(it)) if it.field == "length"));
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_cannot_work_and_foreign_folders_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let right = config(NodeId(1), &dir, any, 1);
    let mut wrong = right.clone();
    wrong.shards = 0;
    assert!(matches!(MetaNode::start(wrong).await, Err(MetaError::Settings { .. })));
    let mut wrong = right.clone();
    wrong.certificate = identity(NodeId(2), Role::Meta).1;
    assert!(matches!(MetaNode::start(wrong).await, Err(MetaError::Settings { .. })));
    let mut wrong = right.clone();
    wrong.certificate.signature.0[0] ^= 1;
    assert!(matches!(MetaNode::start(wrong).await, Err(MetaError::Trust { .. })));
    let node = MetaNode::start(right).await.unwrap();
    let second = MetaNode::start(config(NodeId(1), &dir, any, 1)).await;
    assert!(matches!(second, Err(MetaError::Raft(_))), "a folder is one process's: {second:?}");
    node.shutdown().await;
    let other = MetaNode::start(config(NodeId(2), &dir, any, 1)).await;
    assert!(matches!(other, Err(MetaError::WrongFolder { .. })), "{other:?}");
}
