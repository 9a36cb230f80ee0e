//! What operators do: status without a leader, draining by SIGTERM, a configuration that is refused.

use quarry_client::NamespaceSpec;
use quarry_tests::{
    Signal, TestCluster, calls,
    cluster::{DIRECTORY, SHARD, fresh_name},
    eventually, shared, tools,
    wait::PATIENCE,
};
use std::time::Duration;

#[tokio::test]
async fn raft_admin_tells_the_status_without_a_leader_and_health_says_so() {
    let mut cluster = TestCluster::start().await;
    let file = cluster.cluster_file().display().to_string();
    let ask = async |verb: &str| {
        let ran = tools::run("raft-admin", &[verb, "--cluster", &file]).await;
        (ran.is_well(), ran.text)
    };
    let (healthy, text) = ask("health").await;
    assert!(healthy, "{text}");
    // One that leads no group stays, so that nobody leads.
    let leaders = [cluster.leader(DIRECTORY, PATIENCE).await.unwrap(), cluster.leader(SHARD, PATIENCE).await.unwrap()];
    let (mut killed, mut left): (Vec<_>, Vec<_>) = cluster.metas().into_iter().partition(|meta| leaders.contains(meta));
    let alone = left.pop().expect("two groups have at most two leaders");
    killed.extend(left);
    for meta in &killed {
        cluster.kill(*meta, Signal::KILL).await.unwrap();
    }
    let (answered, text) = ask("status").await;
    assert!(answered && text.contains(&cluster.address(alone)), "{text}");
    let status = cluster.status(alone).await.unwrap();
    assert!(status.groups.iter().all(|group| group.role != "leader"), "{:?}", status.groups);
    let (healthy, text) = ask("health").await;
    assert!(!healthy, "{text}");
    for meta in &killed {
        cluster.restart(*meta).unwrap();
    }
    cluster.wait_ready(PATIENCE).await.unwrap();
    eventually(PATIENCE, "raft-admin health is good again", async || ask("health").await.0.then_some(())).await;
}

#[tokio::test]
async fn raft_admin_moves_leaderships_and_drains_a_meta_node_and_says_only_what_happened() {
    let cluster = TestCluster::start().await;
    let (file, metas) = (cluster.cluster_file().display().to_string(), cluster.metas());
    let ask = async |line: &str| {
        let words: Vec<&str> = line.split(' ').chain(["--cluster", &file]).collect();
        let ran = tools::run("raft-admin", &words).await;
        (ran.code, ran.text + &ran.said)
    };
    let leader = cluster.leader(SHARD, PATIENCE).await.unwrap();
    let to = *metas.iter().find(|meta| **meta != leader).unwrap();
    let (code, text) = ask(&format!("leader transfer --group {SHARD} --to {} --timeout 20s", to.node().0)).await;
    assert!(code == Some(0) && text.contains("now"), "{code:?} {text}");
    for unknown in ["--group 77 --to 1", "--group 0 --to 77"] {
        assert_eq!(ask(&format!("leader transfer {unknown}")).await.0, Some(3), "{unknown}");
    }
    for unknown in ["hash --group 77", "region rotate 101/77", "region rotate 77"] {
        assert_eq!(ask(unknown).await.0, Some(3), "{unknown}");
    }

    // It leads nothing when the command ends, and health tells that something is missing.
    let drained = cluster.leader(DIRECTORY, PATIENCE).await.unwrap();
    let (code, text) = ask(&format!("drain {} --timeout 20s", drained.node().0)).await;
    assert!(code == Some(0) && text.contains("leads nothing"), "{code:?} {text}");
    let status = cluster.status(drained).await.unwrap();
    assert!(status.draining && status.groups.iter().all(|group| group.role != "leader"), "{:?}", status.groups);
    let (code, text) = ask("health").await;
    assert!(code == Some(1) && text.contains("drains"), "{code:?} {text}");
    let (code, text) = ask(&format!("leader transfer --group {SHARD} --to {}", drained.node().0)).await;
    assert!(code == Some(6) && text.contains("drains"), "{code:?} {text}");
    assert_eq!(ask("drain 77").await.0, Some(3), "no such node");
    let (code, text) = ask(&format!("drain {} --undo", drained.node().0)).await;
    assert_eq!(code, Some(0), "{text}");
    // The others hear with its next answers that it takes part again.
    eventually(PATIENCE, "leaderships that are spread", async || {
        let (code, text) = ask("leader balance --timeout 20s -o json").await;
        let told: serde_json::Value = serde_json::from_str(&text).ok()?;
        let led = |node: &serde_json::Value| node["leads"].as_array().map_or(0, Vec::len);
        let loads: Vec<usize> = told["nodes"].as_array()?.iter().map(led).collect();
        let even = loads.len() == metas.len() && loads.iter().max()? - loads.iter().min()? <= 1;
        (code == Some(0) && even).then_some(())
    })
    .await;
}

#[tokio::test]
async fn sigterm_drains_every_process_while_clients_write() {
    let mut cluster = TestCluster::start().await;
    let (client, blocks) = cluster.namespace().await;
    // Meta nodes first, one by one: each hands its leaderships over, so that writes go on.
    let writer = {
        let blocks = blocks.clone();
        tokio::spawn(async move {
            let mut written = 0_u32;
            loop {
                match blocks.put(format!("key-{written}"), vec![1; 4_000]).await {
                    Ok(_) => written += 1,
                    Err(error) => return (written, error),
                }
            }
        })
    };
    for meta in cluster.metas() {
        let status = cluster.kill(meta, Signal::TERM).await.unwrap().unwrap();
        assert!(status.success(), "{meta} ended with {status}");
        cluster.restart(meta).unwrap();
        cluster.wait_ready(PATIENCE).await.unwrap();
    }
    assert!(!writer.is_finished(), "the writer met {:?}", writer.await);
    writer.abort();
    let mut count = 0;
    while blocks.get(format!("key-{count}")).await.unwrap().is_some() {
        count += 1;
    }
    assert!(count > 0, "something was written meanwhile");
    client.close().await.unwrap();
    for data in cluster.data_nodes() {
        let status = cluster.kill(data, Signal::TERM).await.unwrap().unwrap();
        assert!(status.success(), "{data} ended with {status}");
    }
    cluster.stop().await.unwrap();
}

#[tokio::test]
async fn a_second_bootstrap_changes_nothing_and_one_of_another_cluster_is_refused() {
    let cluster = shared().await;
    let client = cluster.client().await;
    let name = fresh_name("before");
    client.create_namespace(NamespaceSpec::cache(&name)).await.unwrap();
    let plan = quarry::admin::BootstrapPlan::read(&cluster.dir().join("bootstrap.toml")).unwrap();
    quarry::admin::bootstrap(&plan, cluster.trust(), Duration::from_secs(10)).await.unwrap();
    assert!(client.list_namespaces().await.unwrap().iter().any(|it| it.name == name));
    let other = quarry::admin::BootstrapPlan { cluster: quarry_wire::ids::ClusterUuid([9; 16]), ..plan };
    let refused = quarry::admin::bootstrap(&other, cluster.trust(), Duration::from_secs(10)).await;
    assert!(matches!(refused, Err(quarry::admin::CallError::Refused { .. })), "{refused:?}");
    for meta in cluster.metas() {
        assert!(calls::status(&cluster.address(meta)).await.is_ok());
    }
}
