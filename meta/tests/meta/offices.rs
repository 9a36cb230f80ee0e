//! Leaderships are spread over the nodes, and leave a node that drains.

use crate::cluster::{Cluster, Node, PATIENCE, fresh, refusal, until};
use quarry_meta::{MetaConfig, Timing};
use quarry_proto::{
    protocol::Announce,
    refusal::Refusal,
    v1::{self, control_client::ControlClient},
};
use quarry_wire::ids::NodeId;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;

const SHARDS: u32 = 8;

fn lively(config: &mut MetaConfig) {
    config.timing = Timing {
        heartbeat: Duration::from_millis(60),
        election_min: Duration::from_millis(300),
        election_max: Duration::from_millis(600),
    };
    config.balance_every = Some(Duration::from_millis(50));
}

/// How many groups each running node leads, once every group has a leader whom all of them know.
async fn loads(cluster: &Cluster) -> Option<BTreeMap<u64, usize>> {
    let mut loads: BTreeMap<u64, usize> = cluster.running().map(|node| (node.id.0, 0)).collect();
    let mut told = Vec::new();
    for node in cluster.running() {
        let status = node.admin().status(v1::StatusRequest {}).await.ok()?.into_inner();
        told.push(status.groups.iter().map(|it| it.leader).collect::<Vec<_>>());
    }
    for leader in told.first()? {
        *loads.get_mut(leader)? += 1;
    }
    told.iter().all(|leaders| *leaders == told[0]).then_some(loads)
}

async fn spread(cluster: &Cluster, nodes: &[u64], groups: usize) {
    until("leaderships that are spread", async || {
        let loads = loads(cluster).await?;
        let among: Vec<usize> = nodes.iter().map(|node| loads[node]).collect();
        let even = among.iter().max()? - among.iter().min()? <= 1 && among.iter().sum::<usize>() == groups;
        even.then_some(())
    })
    .await;
}

async fn drain(node: &Node, undo: bool) -> Vec<v1::LedGroup> {
    node.admin().drain(v1::DrainRequest { undo }).await.unwrap().into_inner().led
}

#[tokio::test(flavor = "multi_thread")]
async fn leaderships_of_a_new_cluster_are_spread_at_once_and_a_node_that_comes_back_gets_its_share() {
    let mut cluster = Cluster::with(SHARDS, lively).await;
    spread(&cluster, &[1, 2, 3], 9).await;
    cluster.node(NodeId(2)).kill();
    spread(&cluster, &[1, 3], 9).await;
    cluster.restart(NodeId(2)).await;
    spread(&cluster, &[1, 2, 3], 9).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_drains_leads_nothing_is_given_nothing_and_takes_part_again_when_that_is_undone() {
    let mut cluster = Cluster::with(SHARDS, lively).await;
    let drained = cluster.leader(3).await;
    let other = NodeId(drained.0 % 3 + 1);
    let node = cluster.nodes.iter().find(|node| node.id == drained).unwrap();
    // Where processors are busy an heir may not answer in time: the same again goes on with what is left.
    until("it leads nothing any more", async || drain(node, false).await.is_empty().then_some(())).await;
    let others: Vec<u64> = (1..=3).filter(|id| *id != drained.0).collect();
    // An election may still fall to it for a moment; it gives that away by itself.
    spread(&cluster, &others, 9).await;
    let status = node.admin().status(v1::StatusRequest {}).await.unwrap().into_inner();
    assert!(status.draining, "{status:?}");
    // The others know, and refuse to hand it what it would hand back.
    let request = v1::TransferLeaderRequest { group: 3, to: drained.0 };
    until("the leader's refusal", async || {
        let leader = cluster.leader(3).await;
        let leader = cluster.nodes.iter().find(|node| node.id == leader).unwrap();
        match refusal(leader.admin().transfer_leader(request).await) {
            Refusal::NotReady(it) if it.why.contains("drains") => Some(()),
            Refusal::NotLeader(_) => None,
            other => panic!("{other:?}"),
        }
    })
    .await;
    // When somebody fails, the one that is left over leads all.
    cluster.node(other).kill();
    let last = NodeId(others.iter().copied().find(|id| *id != other.0).unwrap());
    spread(&cluster, &[last.0], 9).await;
    cluster.restart(other).await;
    let node = cluster.nodes.iter().find(|node| node.id == drained).unwrap();
    assert_eq!(drain(node, true).await, []);
    spread(&cluster, &[1, 2, 3], 9).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_drain_lead_all_the_same_when_nobody_else_is_left() {
    let mut cluster = Cluster::with(1, lively).await;
    for node in &cluster.nodes[..2] {
        drain(node, false).await;
    }
    spread(&cluster, &[3], 2).await;
    let led = drain(&cluster.nodes[2], false).await;
    assert_eq!(led.iter().map(|it| it.group).collect::<Vec<_>>(), [0, 1]);
    assert!(led.iter().all(|it| it.why.contains("no other voter")), "{led:?}");
    cluster.node(NodeId(3)).kill();
    cluster.create_namespace("all-the-same", 1).await;
    cluster.leader(1).await;
}

/// Makes a namespace at whichever node leads: asked again, by the same name, until that is known.
async fn create(addresses: &[SocketAddr], name: &str) -> Result<(), String> {
    let deadline = Instant::now() + PATIENCE;
    let mut request = None;
    let mut turn = 0;
    loop {
        turn += 1;
        let endpoint = Endpoint::from_shared(format!("http://{}", addresses[turn % addresses.len()])).unwrap();
        let channel = endpoint.timeout(Duration::from_secs(5)).connect_lazy();
        let mut control = ControlClient::with_interceptor(channel, Announce);
        if request.is_none() {
            let described = control.describe(v1::DescribeRequest { seen: None }).await;
            let applied_ms = described.ok().map(|it| it.into_inner().groups[0].applied_ms);
            request = applied_ms.map(|applied_ms| v1::RequestId { applied_ms, random: fresh() });
        }
        let class = v1::Class::Cache.into();
        let asked =
            v1::CreateNamespaceRequest { request, name: name.to_owned(), class, copies: 1, ..Default::default() };
        let Err(status) = control.create_namespace(asked).await else { return Ok(()) };
        match Refusal::from_status(&status) {
            None | Some(Refusal::NotLeader(_) | Refusal::NotReady(_) | Refusal::Indeterminate(_)) => {}
            Some(refusal) => return Err(format!("{name}: {refusal}")),
        }
        if Instant::now() > deadline {
            return Err(format!("{name}: {status}"));
        }
        sleep(Duration::from_millis(5)).await;
    }
}

/// Nodes stop in good order and start again, one after the other, while a writer goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_refuses_nothing_for_good_and_loses_nothing_that_was_acknowledged() {
    let mut cluster = Cluster::with(SHARDS, lively).await;
    let addresses: Vec<_> = cluster.nodes.iter().map(|node| node.address).collect();
    let (made, stop) = (Arc::new(AtomicU64::new(0)), CancellationToken::new());
    let (counted, stopped) = (Arc::clone(&made), stop.clone());
    let writing = tokio::spawn(async move {
        let mut names = BTreeSet::new();
        while !stopped.is_cancelled() {
            let name = format!("ns-{}", names.len());
            create(&addresses, &name).await?;
            names.insert(name);
            counted.fetch_add(1, Ordering::Relaxed);
        }
        Ok::<_, String>(names)
    });
    for id in [1, 2, 3] {
        let before = made.load(Ordering::Relaxed);
        until("writes before a stop", async || (made.load(Ordering::Relaxed) > before + 3).then_some(())).await;
        cluster.node(NodeId(id)).shut_down().await;
        let before = made.load(Ordering::Relaxed);
        until("writes without it", async || (made.load(Ordering::Relaxed) > before + 3).then_some(())).await;
        cluster.restart(NodeId(id)).await;
        spread(&cluster, &[1, 2, 3], 9).await;
    }
    stop.cancel();
    let made = writing.await.unwrap().unwrap();
    // Any node may answer, also one that has not applied the last of them yet.
    until("all that was acknowledged, and nothing else", async || {
        let namespaces = cluster.describe().await.changes?.namespaces;
        let known: Vec<String> = namespaces.into_iter().map(|it| it.name).collect();
        (known.len() == made.len() && known.into_iter().collect::<BTreeSet<_>>() == made).then_some(())
    })
    .await;
}
