//! Local clusters, as tests use them.

use crate::{DEADLINE, runs};
use quarry::{
    admin::{self, BootstrapPlan, CallError, DIRECTORY, FIRST_SHARD, Health, State, status_all},
    local::{LocalCluster, LocalError, LocalSpec, Member, Signal},
};
use quarry_proto::{protocol::Announce, refusal::Refusal, v1};
use quarry_trust::Expect;
use std::time::Duration;
use tonic::transport::Endpoint;

fn spec() -> LocalSpec {
    LocalSpec { region_bytes: vec![16 << 20], ..LocalSpec::new(env!("CARGO_BIN_EXE_quarry").into()) }
}

async fn health(cluster: &LocalCluster) -> Health {
    let metas: Vec<String> = cluster.metas().into_iter().map(|member| cluster.address(member)).collect();
    Health::judge(&metas, &status_all(cluster.trust(), &metas, Duration::from_secs(5)).await)
}

#[tokio::test]
async fn members_are_killed_paused_and_brought_back_and_nothing_outlives_the_cluster() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = LocalCluster::create(&dir.path().join("cluster"), spec()).unwrap();
    cluster.start(DEADLINE).await.unwrap();
    assert_eq!(health(&cluster).await.state, State::Healthy);
    let before = cluster.traffic().await.unwrap();
    assert!(before.sum(|method| method.ends_with("/Heartbeat")).calls > 0);

    let leader = cluster.leader(FIRST_SHARD, DEADLINE).await.unwrap();
    cluster.kill(leader, Signal::KILL).await.unwrap();
    assert!(!cluster.is_running(leader));
    assert!(matches!(cluster.pause(leader).await, Err(LocalError::NotRunning { member }) if member == leader));
    let next = cluster.leader(FIRST_SHARD, DEADLINE).await.unwrap();
    assert_ne!(next, leader);
    cluster.restart(leader).unwrap();
    cluster.wait_ready(DEADLINE).await.unwrap();

    let follower = cluster.metas().into_iter().find(|member| *member != next).unwrap();
    cluster.pause(follower).await.unwrap();
    assert_ne!(health(&cluster).await.state, State::Healthy);
    cluster.resume(follower).await.unwrap();

    let pids: Vec<u32> = cluster.members().into_iter().map(|member| cluster.pid(member).unwrap()).collect();
    assert_eq!(pids.len(), 5);
    drop(cluster);
    assert!(!pids.into_iter().any(runs));
}

#[tokio::test]
async fn a_process_that_cannot_start_is_reported_with_its_last_words() {
    let dir = tempfile::tempdir().unwrap();
    let spec = LocalSpec { environment: vec![("QUARRY_RAFT__HARTBEAT_MS".to_owned(), "1".to_owned())], ..spec() };
    let mut cluster = LocalCluster::create(&dir.path().join("cluster"), spec).unwrap();
    let wrong = cluster.start(DEADLINE).await.unwrap_err();
    match wrong {
        LocalError::Ended { member: Member::Meta(_) | Member::Data(_), log, .. } => {
            assert!(log.contains("unknown key raft"), "{log}");
        }
        other => panic!("{other}"),
    }
}

/// Has another meta node than `not` lead the directory.
async fn led_by_another(cluster: &LocalCluster, not: Member) -> Member {
    let leader = cluster.leader(DIRECTORY, DEADLINE).await.unwrap();
    if leader != not {
        return leader;
    }
    let to = cluster.metas().into_iter().find(|meta| *meta != not).unwrap();
    let endpoint = Endpoint::from_shared(format!("http://{}", cluster.address(leader))).unwrap();
    let channel =
        endpoint.timeout(DEADLINE).connect_with_connector(cluster.trust().connector(Expect::META)).await.unwrap();
    let mut calls = v1::admin_client::AdminClient::with_interceptor(channel, Announce);
    calls.transfer_leader(v1::TransferLeaderRequest { group: DIRECTORY, to: to.node().0 }).await.unwrap();
    let until = tokio::time::Instant::now() + DEADLINE;
    loop {
        let leader = cluster.leader(DIRECTORY, DEADLINE).await.unwrap();
        if leader != not {
            return leader;
        }
        assert!(tokio::time::Instant::now() < until, "{not} leads the directory still");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_cluster_is_bootstrapped_again_and_opened_again_whoever_leads_it() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("cluster");
    let mut cluster = LocalCluster::create(&folder, LocalSpec { data_nodes: 1, ..spec() }).unwrap();
    cluster.start(DEADLINE).await.unwrap();
    let plan = BootstrapPlan::read(&folder.join("bootstrap.toml")).unwrap();
    let first = cluster.metas()[0];
    led_by_another(&cluster, first).await;
    admin::bootstrap(&plan, cluster.trust(), Duration::from_secs(20)).await.unwrap();

    // With the first of the plan down, the others are asked.
    cluster.kill(first, Signal::KILL).await.unwrap();
    admin::bootstrap(&plan, cluster.trust(), Duration::from_secs(20)).await.unwrap();

    // Without a majority the error is what a node says of it, not that time was up.
    let second = cluster.metas()[1];
    cluster.kill(second, Signal::KILL).await.unwrap();
    let wrong = admin::bootstrap(&plan, cluster.trust(), Duration::from_secs(8)).await.unwrap_err();
    assert!(wrong.is_passing(), "{wrong}");
    match wrong {
        CallError::Refused { refusal, .. } => assert!(
            matches!(*refusal, Refusal::NotLeader(_) | Refusal::NotReady(_) | Refusal::Indeterminate(_)),
            "{refusal}"
        ),
        other => panic!("{other}"),
    }
    cluster.stop().await.unwrap();
    drop(cluster);

    let mut cluster = LocalCluster::open(&folder, spec()).unwrap();
    cluster.start(DEADLINE).await.unwrap();
    assert_eq!(health(&cluster).await.state, State::Healthy);
}
