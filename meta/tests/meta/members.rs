//! Meta nodes come and go; what was acknowledged stays, and nobody is refused who may go on.

use crate::{
    cluster::{Cluster, Node, fresh, identity, until},
    player::{DataNode, Writer, entry},
};
use quarry_proto::{
    refusal::Refusal,
    v1::{self, change_members_request::Kind, commit_outcome::Code, node_refused::Reason},
};
use quarry_wire::{
    certificate::Role,
    grant::Grant,
    ids::{NodeId, ShardId},
    key::Key,
    signed::Signed,
};
use std::sync::atomic::{AtomicBool, Ordering};

const SHARDS: u32 = 2;

fn request(kind: Kind, node: u64) -> v1::ChangeMembersRequest {
    v1::ChangeMembersRequest { kind: kind.into(), node, ..Default::default() }
}

fn coming(kind: Kind, cluster: &Cluster, node: u64, old: u64) -> v1::ChangeMembersRequest {
    let address = cluster.nodes.iter().find(|it| it.id.0 == node).unwrap().address.to_string();
    v1::ChangeMembersRequest { address, old, ..request(kind, node) }
}

async fn begin(cluster: &Cluster, asked: &v1::ChangeMembersRequest) -> Result<v1::Ordinal, Refusal> {
    let reply = cluster.ask(async |node: &Node| node.admin().change_members(asked.clone()).await).await?;
    Ok(reply.number.unwrap())
}

async fn status(node: &Node) -> Option<v1::StatusReply> {
    Some(node.admin().status(v1::StatusRequest {}).await.ok()?.into_inner())
}

async fn is_done(cluster: &Cluster, number: v1::Ordinal) {
    until("the end of the change", async || {
        for node in cluster.running() {
            if status(node).await?.change_done.is_some_and(|it| it.number == Some(number)) {
                return Some(());
            }
        }
        None
    })
    .await;
}

/// Begins a change and waits for its end.
async fn change(cluster: &Cluster, asked: v1::ChangeMembersRequest) {
    let number = begin(cluster, &asked).await.unwrap();
    is_done(cluster, number).await;
}

async fn refused(cluster: &Cluster, asked: v1::ChangeMembersRequest) -> Reason {
    match begin(cluster, &asked).await {
        Err(Refusal::NodeRefused(it)) => it.reason(),
        other => panic!("{other:?}"),
    }
}

/// Waits until all these nodes, and no others, vote in every group, as each of them sees it.
async fn voters_are(cluster: &Cluster, voters: &[u64]) {
    until("the voters", async || {
        for node in cluster.running().filter(|node| voters.contains(&node.id.0)) {
            for group in status(node).await?.groups {
                let votes = group.members.iter().filter(|it| !group.learners.contains(it));
                if !votes.eq(voters) {
                    return None;
                }
            }
        }
        Some(())
    })
    .await;
}

/// Takes part in the cluster until it is told to stop, and answers the names of the namespaces made and the keys committed. Whatever it does
/// must come about.
struct Busy {
    namespace: v1::Namespace,
    node: DataNode,
    writer: Writer,
    stop: AtomicBool,
}

impl Busy {
    async fn new(cluster: &Cluster) -> Self {
        let node = DataNode::join(cluster, 11).await;
        let namespace = make(cluster, "kv").await;
        let writer = Writer::new(&namespace);
        Self { namespace, node, writer, stop: AtomicBool::new(false) }
    }

    async fn work(&self, cluster: &Cluster) -> (Vec<String>, Vec<String>) {
        let (mut names, mut keys) = (Vec::new(), Vec::new());
        while !self.stop.load(Ordering::SeqCst) {
            let name = format!("ns-{}", names.len());
            assert_eq!(make(cluster, &name).await.name, name);
            names.push(name);
            for shard in (1..=SHARDS).map(ShardId) {
                let grant = self.grant(cluster, shard).await;
                let key = self.key_of(shard);
                let entries = [entry(0, &key)];
                let publish = self.writer.publish(&grant, &entries, &[self.node.attest(&grant, &entries)]);
                let outcomes = persist(async || {
                    cluster.ask(async |node: &Node| node.control().publish(publish.clone()).await).await
                })
                .await
                .outcomes;
                assert_eq!(outcomes.iter().map(v1::CommitOutcome::code).collect::<Vec<_>>(), [Code::Committed]);
                keys.push(key);
            }
        }
        (names, keys)
    }

    fn key_of(&self, shard: ShardId) -> String {
        let of_shard = |key: &String| Key::new(key).unwrap().shard(self.writer.namespace, SHARDS) == shard;
        std::iter::repeat_with(|| format!("key-{}", fresh())).find(of_shard).unwrap()
    }

    async fn grant(&self, cluster: &Cluster, shard: ShardId) -> Grant {
        let described = cluster.describe().await;
        let at = described.groups.iter().find(|it| it.group == shard.0).unwrap().applied_ms;
        let asked = v1::GrantRequest {
            shard: shard.0,
            request: Some(v1::RequestId { applied_ms: at, random: fresh() }),
            writer: self.writer.id.0.to_vec().into(),
            namespace: self.writer.namespace.0,
            slot_size: 4096,
            slots: 1,
            ttl_ms: 20_000,
            avoid: Vec::new(),
            seen: described.changes.unwrap().at,
        };
        let reply =
            persist(async || cluster.ask(async |node: &Node| node.control().grant(asked.clone()).await).await).await;
        Signed::<Grant>::decode(&reply.grant).unwrap().statement
    }

    /// Everything that was acknowledged is there.
    async fn check(&self, cluster: &Cluster, (names, keys): (Vec<String>, Vec<String>)) {
        assert!(!names.is_empty() && !keys.is_empty(), "it did something");
        let namespaces = cluster.describe().await.changes.unwrap().namespaces;
        let known: Vec<String> = namespaces.into_iter().map(|it| it.name).collect();
        assert!(names.iter().all(|name| known.contains(name)), "{names:?} are not all in {known:?}");
        for key in keys {
            let shard = Key::new(&key).unwrap().shard(self.writer.namespace, SHARDS).0;
            let asked = v1::ResolveRequest { shard, ..self.writer.resolve(&[&key], 0) };
            let reply = cluster.ask(async |node: &Node| node.control().resolve(asked.clone()).await).await.unwrap();
            assert_eq!(reply.items[0].copies.len(), 1, "{key} of {}", self.namespace.name);
        }
    }
}

/// Asks again what may or may not have been done, or cannot be done yet: each call is idempotent.
async fn persist<T>(ask: impl AsyncFn() -> Result<T, Refusal>) -> T {
    until("a definite answer", async || match ask().await {
        Ok(reply) => Some(reply),
        Err(Refusal::Indeterminate(_) | Refusal::NoSpace(_)) => None,
        Err(refusal) => panic!("{refusal:?}"),
    })
    .await
}

async fn make(cluster: &Cluster, name: &str) -> v1::Namespace {
    let applied_ms = cluster.describe().await.groups[0].applied_ms;
    let asked = v1::CreateNamespaceRequest {
        request: Some(v1::RequestId { applied_ms, random: fresh() }),
        name: name.to_owned(),
        class: v1::Class::Cache.into(),
        copies: 1,
        ..Default::default()
    };
    let ask = async || cluster.ask(async |node: &Node| node.control().create_namespace(asked.clone()).await).await;
    persist(ask).await.namespace.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_grows_from_three_to_five_and_shrinks_again_under_a_writer_that_is_never_failed() {
    let mut cluster = Cluster::with_spares(5, SHARDS).await;
    let busy = Busy::new(&cluster).await;
    let grow_and_shrink = async {
        for node in [4, 5] {
            change(&cluster, coming(Kind::Add, &cluster, node, 0)).await;
            change(&cluster, request(Kind::Promote, node)).await;
        }
        voters_are(&cluster, &[1, 2, 3, 4, 5]).await;
        // The leader of the directory among them: it hands its office on first.
        let leader = cluster.leader(0).await.0;
        let leave = [leader, if leader == 1 { 2 } else { 1 }];
        for node in leave {
            change(&cluster, request(Kind::Remove, node)).await;
        }
        let left: Vec<u64> = (1..=5).filter(|node| !leave.contains(node)).collect();
        voters_are(&cluster, &left).await;
        busy.stop.store(true, Ordering::SeqCst);
        left
    };
    let (left, done) = tokio::join!(grow_and_shrink, busy.work(&cluster));
    let gone: Vec<NodeId> = cluster.nodes.iter().map(|it| it.id).filter(|id| !left.contains(&id.0)).collect();
    for id in &gone {
        // A node that was removed learns of it, and disturbs nobody.
        let node = cluster.nodes.iter().find(|it| it.id == *id).unwrap();
        let health = tonic_health::pb::health_client::HealthClient::new(
            tonic::transport::Endpoint::from_shared(format!("http://{}", node.address)).unwrap().connect_lazy(),
        );
        until("the removed node to say so", async || {
            let asked = tonic_health::pb::HealthCheckRequest { service: String::new() };
            let told = health.clone().check(asked).await.ok()?.into_inner().status();
            (told == tonic_health::pb::health_check_response::ServingStatus::NotServing).then_some(())
        })
        .await;
        cluster.node(*id).kill();
    }
    cluster.nodes.retain(|node| left.contains(&node.id.0));
    busy.check(&cluster, done).await;
    for group in 0..=SHARDS {
        cluster.assert_equal_hashes(group).await;
    }
    let back = coming(Kind::Add, &cluster, left[0], 0);
    assert_eq!(refused(&cluster, v1::ChangeMembersRequest { node: gone[0].0, ..back }).await, Reason::Retired);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_is_gone_on_with_when_its_leader_is_killed() {
    let mut cluster = Cluster::with_spares(4, SHARDS).await;
    let mut killed = NodeId(0);
    for asked in [coming(Kind::Add, &cluster, 4, 0), request(Kind::Promote, 4), request(Kind::Remove, 1)] {
        let number = begin(&cluster, &asked).await.unwrap();
        let leader = until("who leads", async || {
            let described = cluster.describe().await.groups.first()?.leader;
            cluster.running().map(|node| node.id).find(|id| id.0 == described)
        })
        .await;
        cluster.node(leader).kill();
        is_done(&cluster, number).await;
        cluster.restart(leader).await;
        killed = leader;
    }
    voters_are(&cluster, &[2, 3, 4]).await;
    if killed == NodeId(1) {
        // It was killed before it heard of its end, and is told when it comes back.
        let first = cluster.nodes.iter().find(|node| node.id == killed).unwrap();
        assert!(status(first).await.unwrap().groups.iter().all(|group| group.role != "leader"));
    }
    cluster.node(NodeId(1)).kill();
    cluster.nodes.retain(|node| node.id != NodeId(1));
    assert_eq!(make(&cluster, "after").await.name, "after");
    cluster.assert_equal_hashes(0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_node_is_replaced_under_a_writer_that_is_never_failed() {
    let mut cluster = Cluster::with_spares(4, SHARDS).await;
    let busy = Busy::new(&cluster).await;
    let leader = cluster.describe().await.groups[0].leader;
    let dead = (1..=3).find(|node| *node != leader).unwrap();
    cluster.node(NodeId(dead)).kill();
    let replace = async {
        change(&cluster, coming(Kind::Replace, &cluster, 4, dead)).await;
        let left: Vec<u64> = (1..=4).filter(|node| *node != dead).collect();
        voters_are(&cluster, &left).await;
        busy.stop.store(true, Ordering::SeqCst);
    };
    let ((), done) = tokio::join!(replace, busy.work(&cluster));
    busy.check(&cluster, done).await;
    for group in 0..=SHARDS {
        cluster.assert_equal_hashes(group).await;
    }
    // It comes back with its old folder, and learns that its place is taken.
    cluster.restart(NodeId(dead)).await;
    let back = cluster.nodes.iter().find(|node| node.id.0 == dead).unwrap();
    until("no group that it leads", async || {
        status(back).await?.groups.iter().all(|group| group.role != "leader").then_some(())
    })
    .await;
    assert_eq!(make(&cluster, "after").await.name, "after");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_is_unwise_is_refused_and_changes_nothing() {
    let mut cluster = Cluster::with_spares(4, SHARDS).await;
    assert_eq!(refused(&cluster, request(Kind::Promote, 4)).await, Reason::NotAMember);
    assert_eq!(refused(&cluster, request(Kind::Remove, 4)).await, Reason::NotAMember);
    assert_eq!(refused(&cluster, request(Kind::Cancel, 0)).await, Reason::NotUnderWay);
    let right = coming(Kind::Add, &cluster, 4, 0);
    let nobody = v1::ChangeMembersRequest { address: "127.0.0.1:1".to_owned(), ..right.clone() };
    assert_eq!(refused(&cluster, nobody).await, Reason::Silent);
    let other = v1::ChangeMembersRequest {
        certificate: identity(NodeId(4), Role::DataNode).1.encode().into(),
        ..right.clone()
    };
    assert!(matches!(begin(&cluster, &other).await, Err(Refusal::Malformed(it)) if it.field == "certificate"));
    let moved = v1::ChangeMembersRequest { node: 1, ..right.clone() };
    assert_eq!(refused(&cluster, moved).await, Reason::AlreadyMember);
    assert_eq!(status(&cluster.nodes[0]).await.unwrap().change_under_way, None);

    let first = begin(&cluster, &right).await.unwrap();
    is_done(&cluster, first).await;
    assert_eq!(begin(&cluster, &right).await.unwrap(), first, "the same again is the same change");
    assert_eq!(status(&cluster.nodes[3]).await.unwrap().groups[1].learners, [4]);

    // Of three voters one is gone: without another there would be no majority.
    let leader = cluster.describe().await.groups[0].leader;
    let others: Vec<u64> = (1..=3).filter(|node| *node != leader).collect();
    cluster.node(NodeId(others[0])).kill();
    assert_eq!(refused(&cluster, request(Kind::Remove, others[1])).await, Reason::NoQuorum);
    assert_eq!(refused(&cluster, request(Kind::Remove, leader)).await, Reason::NoQuorum);
    cluster.node(NodeId(4)).kill();
    assert_eq!(refused(&cluster, request(Kind::Promote, 4)).await, Reason::Silent);
    let keyring = cluster.keyring().await;
    assert!(keyring.certificates().any(|it| it.statement.node == NodeId(4)), "its certificate was admitted");
    change(&cluster, request(Kind::Remove, 4)).await;
    change(&cluster, request(Kind::Remove, others[0])).await;
    let left: Vec<u64> = (1..=3).filter(|node| *node != others[0]).collect();
    voters_are(&cluster, &left).await;
}
