//! Local clusters, as tests use them.

use crate::{DEADLINE, runs};
use quarry::{
    admin::{FIRST_SHARD, Health, State, status_all},
    local::{LocalCluster, LocalError, LocalSpec, Member, Signal},
};

fn spec() -> LocalSpec {
    LocalSpec { region_bytes: vec![16 << 20], ..LocalSpec::new(env!("CARGO_BIN_EXE_quarry").into()) }
}

async fn health(cluster: &LocalCluster) -> Health {
    let metas: Vec<String> = cluster.metas().into_iter().map(|member| cluster.address(member)).collect();
    Health::judge(&metas, &status_all(&metas, std::time::Duration::from_secs(5)).await)
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
