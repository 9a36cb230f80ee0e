//! Leaders come and go; what was acknowledged stays.

use crate::{
    cluster::{Cluster, Link, Node, PATIENCE, fresh, refusal, until},
    player::{DataNode, Writer, entry, proven_copies},
};
use quarry_proto::{
    refusal::Refusal,
    v1::{self, commit_outcome::Code, control_client::ControlClient},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::task::JoinSet;
use tonic::{Request, transport::Endpoint};
use tonic_health::pb::{
    HealthCheckRequest,
    health_check_response::ServingStatus::{NotServing, Serving},
    health_client::HealthClient,
};

#[tokio::test(flavor = "multi_thread")]
async fn the_next_leader_remembers_every_outcome_and_goes_on() {
    let mut cluster = Cluster::new().await;
    let node = DataNode::join(&cluster, 11).await;
    let writer = Writer::new(&cluster.create_namespace("kv", 1).await);
    let request = writer.grant_request(&cluster, 1).await;
    let grant = writer.granted(&cluster, &request).await.unwrap();
    let entries = [entry(0, "one"), entry(1, "two")];
    let publish = writer.publish(&grant, &entries, &[node.attest(&grant, &entries)]);
    let send = async |cluster: &Cluster, publish: &v1::PublishRequest| {
        let reply = cluster.ask(async |node: &Node| node.control().publish(publish.clone()).await).await.unwrap();
        reply.outcomes.iter().map(v1::CommitOutcome::code).collect::<Vec<_>>()
    };
    assert_eq!(send(&cluster, &publish).await, [Code::Committed; 2]);
    let before = cluster.ask(async |node: &Node| node.control().resolve(writer.resolve(&["one"], 1_000)).await).await;
    assert_eq!(before.unwrap().lease_ms, 1_000);
    cluster.assert_equal_hashes(0).await;
    cluster.assert_equal_hashes(1).await;

    let killed = cluster.leader(1).await;
    cluster.node(killed).kill();
    assert_ne!(cluster.leader(1).await, killed);
    assert_eq!(send(&cluster, &publish).await, [Code::Committed; 2], "the first outcome is the outcome");
    let again = writer.granted(&cluster, &request).await.unwrap();
    assert_eq!((again.id, again.holders.clone()), (grant.id, grant.holders.clone()));
    assert_ne!(again.meta.0, 0);
    let more = [entry(2, "three")];
    let publish = writer.publish(&grant, &more, &[node.attest(&grant, &more)]);
    assert_eq!(send(&cluster, &publish).await, [Code::Committed]);
    let keys = ["one", "two", "three"];
    let reply = cluster.ask(async |node: &Node| node.control().resolve(writer.resolve(&keys, 1_000)).await).await;
    let (reply, keyring) = (reply.unwrap(), cluster.keyring().await);
    for (index, key) in keys.iter().enumerate() {
        assert_eq!(proven_copies(&keyring, &reply, index, key, writer.namespace), [node.id]);
    }

    cluster.restart(killed).await;
    cluster.assert_equal_hashes(0).await;
    cluster.assert_equal_hashes(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_shuts_down_hands_its_offices_over_first() {
    let mut cluster = Cluster::new().await;
    let leader = cluster.leader(1).await;
    cluster.node(leader).shut_down().await;
    let follower = cluster.running().next().unwrap();
    let status = follower.admin().status(v1::StatusRequest {}).await.unwrap().into_inner();
    let group = status.groups.into_iter().find(|it| it.group == 1).unwrap();
    assert_ne!(group.leader, leader.0, "nobody still takes the node that left for the leader");
    let created = cluster.create_namespace("after", 1).await;
    assert_eq!(created.name, "after");
    cluster.restart(leader).await;
    cluster.assert_equal_hashes(0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_whom_nobody_can_follow_stops_without_waiting_for_the_drain() {
    let mut cluster = Cluster::with(1, |config| config.drain = PATIENCE).await;
    let leader = cluster.leader(1).await;
    let others: Vec<_> = cluster.nodes.iter().map(|node| node.id).filter(|id| *id != leader).collect();
    for other in others {
        cluster.node(other).kill();
    }
    tokio::time::timeout(PATIENCE / 2, cluster.node(leader).shut_down())
        .await
        .expect("a stop before the drain is over");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leadership_is_handed_to_the_node_that_was_named() {
    let cluster = Cluster::new().await;
    let leader = cluster.leader(1).await;
    let to = cluster.nodes.iter().map(|node| node.id).find(|id| *id != leader).unwrap();
    let request = v1::TransferLeaderRequest { group: 1, to: to.0 };
    cluster.ask(async |node: &Node| node.admin().transfer_leader(request).await).await.unwrap();
    let found = until("the new leader", async || {
        let leader = cluster.leader(1).await;
        (leader == to).then_some(leader)
    });
    assert_eq!(found.await, to);
    let nobody = v1::TransferLeaderRequest { group: 1, to: 99 };
    let refused = cluster.ask(async |node: &Node| node.admin().transfer_leader(nobody).await).await;
    assert!(matches!(refused, Err(Refusal::Malformed(_))), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_alone_answers_for_its_status_and_says_that_it_knows_no_leader() {
    let mut cluster = Cluster::new().await;
    let namespace = cluster.create_namespace("kv", 1).await;
    let (alone, others) = (cluster.nodes[0].id, [cluster.nodes[1].id, cluster.nodes[2].id]);
    cluster.assert_equal_hashes(0).await;
    for other in others {
        cluster.node(other).kill();
    }
    cluster.node(alone).kill();
    cluster.restart(alone).await;
    let node = cluster.running().next().unwrap();
    let status = node.admin().status(v1::StatusRequest {}).await.unwrap().into_inner();
    assert_eq!((status.node, status.generation, status.groups.len()), (alone.0, 1, 2));
    assert_eq!(status.groups[0].members, [1, 2, 3]);
    assert!(status.groups.iter().all(|group| group.role != "leader"), "{:?}", status.groups);
    assert!(status.counters.iter().any(|it| it.method.ends_with("/Status") && it.calls >= 1));
    let described = node.control().describe(v1::DescribeRequest { seen: None }).await.unwrap().into_inner();
    assert_eq!(
        described.changes.unwrap().namespaces,
        std::slice::from_ref(&namespace),
        "what it had applied is there again"
    );
    let writer = Writer::new(&namespace);
    let refused = refusal(node.control().resolve(writer.resolve(&["key"], 0)).await);
    assert!(matches!(refused, Refusal::NotLeader(v1::NotLeader { group: 1, .. })), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_that_slept_through_purged_entries_gets_a_snapshot() {
    let mut cluster = Cluster::with(1, |config| {
        config.snapshot_after_entries = 20;
        config.entries_kept = 5;
    })
    .await;
    let leader = cluster.leader(0).await;
    let asleep = cluster.nodes.iter().map(|node| node.id).find(|id| *id != leader).unwrap();
    cluster.node(asleep).kill();
    for number in 0..60 {
        cluster.create_namespace(&format!("ns-{number}"), 1).await;
    }
    let snapshot = async |cluster: &Cluster| {
        let node = cluster.nodes.iter().find(|node| node.id == leader)?;
        let status = node.admin().status(v1::StatusRequest {}).await.ok()?.into_inner();
        status.groups.into_iter().find(|it| it.group == 0).filter(|it| it.purged > 0)
    };
    until("a purged log", async || snapshot(&cluster).await).await;
    cluster.restart(asleep).await;
    cluster.assert_equal_hashes(0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_healthy_only_while_it_knows_the_leaders_of_its_groups() {
    let mut cluster = Cluster::blank(1, |_| {}).await;
    let endpoint = Endpoint::from_shared(format!("http://{}", cluster.nodes[0].address)).unwrap();
    let health = HealthClient::new(endpoint.connect().await.unwrap());
    let told = async |name: &str| {
        let request = HealthCheckRequest { service: name.to_owned() };
        health.clone().check(request).await.map(|reply| reply.into_inner().status())
    };
    let names = ["", "quarry.group.0", "quarry.group.1"];
    for name in names {
        until("health to be told", async || Some((told(name).await.ok()? == NotServing).then_some(())?)).await;
    }
    cluster.bootstrap().await;
    for name in names {
        until("a healthy node", async || (told(name).await.ok()? == Serving).then_some(())).await;
    }
    cluster.nodes[1].kill();
    cluster.nodes[2].kill();
    until("an unhealthy node", async || (told("").await.ok()? == NotServing).then_some(())).await;
}

/// Whoever is told that nothing was done may do it elsewhere; whoever is told `Indeterminate` may not.
#[tokio::test(flavor = "multi_thread")]
async fn what_may_be_in_the_log_is_refused_as_indeterminate_and_what_is_refused_for_good_was_never_done() {
    const ASKING: u64 = 4;
    let mut cluster = Cluster::with(1, |config| config.call_deadline = Duration::from_secs(1)).await;
    let leader = cluster.leader(0).await;
    let others: Vec<_> = cluster.nodes.iter().map(|node| node.id).filter(|id| *id != leader).collect();
    let control = cluster.node(leader).control();
    let stamp = cluster.request(0).await.applied_ms;
    // Some wait for longer than the log may take, others not.
    let ask = move |mut control: ControlClient<Link>, name: String, patient: bool| {
        let request = Some(v1::RequestId { applied_ms: stamp, random: fresh() });
        let class = v1::Class::Cache.into();
        let asked = v1::CreateNamespaceRequest { request, name, class, copies: 1, ..Default::default() };
        let mut request = Request::new(asked);
        if patient {
            request.set_timeout(Duration::from_secs(5));
        }
        async move { control.create_namespace(request).await }
    };
    let done: Vec<_> = (0..ASKING).map(|_| Arc::new(AtomicU64::new(0))).collect();
    let mut asking = JoinSet::new();
    for (task, done) in done.iter().enumerate() {
        let (control, done) = (control.clone(), Arc::clone(done));
        asking.spawn(async move {
            loop {
                let name = format!("ns-{task}-{}", done.load(Ordering::Relaxed));
                let answer = ask(control.clone(), name.clone(), task % 2 == 0).await;
                if answer.is_err() {
                    return (name, refusal(answer));
                }
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let all_go_on = async || done.iter().all(|done| done.load(Ordering::Relaxed) > 0).then_some(());
    until("all are answered", all_go_on).await;
    for other in &others {
        cluster.node(*other).kill();
    }
    let mut refused = asking.join_all().await;
    let is_unknown = |refusal: &Refusal| matches!(refusal, Refusal::Indeterminate(_));
    assert!(
        refused.iter().any(|(_, refusal)| is_unknown(refusal)),
        "the leader had taken none into its log: {refused:?}"
    );
    // A leader that has not heard of a majority for a while takes nothing into its log, and says so.
    let late = AtomicU64::new(0);
    let definite = until("the leader knows that it is alone", async || {
        let name = format!("late-{}", late.fetch_add(1, Ordering::Relaxed));
        let refusal = refusal(ask(control.clone(), name.clone(), false).await);
        (!is_unknown(&refusal)).then_some((name, refusal))
    });
    refused.push(definite.await);
    for other in others {
        cluster.restart(other).await;
    }
    let described = until("the cluster goes on", async || {
        for node in cluster.running() {
            let name = format!("after-{}", late.fetch_add(1, Ordering::Relaxed));
            if ask(node.control(), name, true).await.is_ok() {
                return Some(node.control().describe(v1::DescribeRequest { seen: None }).await.ok()?.into_inner());
            }
        }
        None
    });
    let namespaces = described.await.changes.unwrap().namespaces;
    let known: Vec<String> = namespaces.into_iter().map(|namespace| namespace.name).collect();
    for (name, refusal) in refused.into_iter().filter(|(_, refusal)| !is_unknown(refusal)) {
        assert!(matches!(refusal, Refusal::NotLeader(_) | Refusal::NotReady(_)), "{refusal:?}");
        assert!(!known.contains(&name), "{name} was refused for good, and is there: {refusal:?}");
    }
}
