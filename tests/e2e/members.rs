//! Nodes come and go, by the operator's tool, while a client works.

use quarry::local::Member;
use quarry_tests::{
    Signal, TestCluster,
    cluster::{DIRECTORY, create_namespace},
    eventually,
    wait::PATIENCE,
};
use std::time::Duration;

/// The numbers of the members in this role.
async fn members(cluster: &TestCluster, role: &str) -> Vec<u64> {
    let listed = cluster.raft_admin(&["member", "list"]).await.done();
    let rows = listed["members"].as_array().unwrap();
    rows.iter().filter(|row| row["role"] == role).map(|row| row["node"].as_u64().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_adds_removes_and_replaces_meta_nodes_while_a_client_writes() {
    let mut cluster = TestCluster::start_with(|spec| spec.region_bytes = vec![256 << 20]).await;
    let (client, blocks) = cluster.namespace().await;
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
    let (fourth, at) = cluster.add_meta().unwrap();
    assert_eq!(fourth, Member::Meta(4));
    // Whoever led the directory is gone: the command asks on until another does.
    let gone = cluster.leader(DIRECTORY, PATIENCE).await.unwrap();
    cluster.kill(gone, Signal::KILL).await.unwrap();
    eventually(PATIENCE, "the fourth is added", async || {
        let ran = cluster.raft_admin(&["member", "add", "4", &at.to_string()]).await;
        // It may not listen yet.
        assert!(ran.is_well() || ran.said.contains("does not answer"), "{ran:?}");
        ran.is_well().then_some(())
    })
    .await;
    cluster.restart(gone).unwrap();
    cluster.wait_ready(PATIENCE).await.unwrap();
    assert_eq!(members(&cluster, "learner").await, [4]);
    let done = cluster.raft_admin(&["member", "promote", "4"]).await.done();
    assert_eq!(done["state"], "done");
    assert_eq!(members(&cluster, "voter").await, [1, 2, 3, 4]);
    // Another one hangs meanwhile: of the usual deadline that costs little.
    cluster.kill(Member::Meta(2), Signal::STOP).await.unwrap();
    let last = cluster.raft_admin(&["member", "remove", "77", "--timeout", "3s"]).await;
    assert!(last.code == Some(3) && last.said.contains("is no member"), "{last:?}");
    cluster.raft_admin(&["member", "remove", "1", "--timeout", "3s"]).await.done();
    cluster.kill(Member::Meta(2), Signal::CONT).await.unwrap();
    let again = cluster.raft_admin(&["member", "remove", "1"]).await.done();
    assert_eq!(again["state"], "done");
    let used = cluster.raft_admin(&["member", "add", "1", &at.to_string()]).await;
    assert!(used.code == Some(4) && used.said.contains("never used again"), "{used:?}");
    // It was a meta node: there is no data node of that number to be forgotten.
    assert_eq!(cluster.raft_admin(&["node", "forget", "1"]).await.code, Some(3));
    assert_eq!(members(&cluster, "voter").await, [2, 3, 4]);

    cluster.kill(Member::Meta(2), Signal::KILL).await.unwrap();
    let lonely = cluster.raft_admin(&["member", "remove", "3"]).await;
    assert!(lonely.code == Some(6) && lonely.said.contains("silent: node-2 at "), "{lonely:?}");
    let (_, at) = cluster.add_meta().unwrap();
    eventually(PATIENCE, "the second is replaced", async || {
        let ran = cluster.raft_admin(&["member", "replace", "2", "5", &at.to_string()]).await;
        assert!(ran.is_well() || ran.said.contains("does not answer"), "{ran:?}");
        ran.is_well().then_some(())
    })
    .await;
    assert_eq!(members(&cluster, "voter").await, [3, 4, 5]);
    // The node that was removed runs on, and says so to whoever asks.
    let log = cluster.log_file(Member::Meta(1));
    eventually(PATIENCE, "the removed node says so", async || {
        std::fs::read_to_string(&log).unwrap().contains("was removed from the cluster").then_some(())
    })
    .await;
    cluster.kill(Member::Meta(1), Signal::KILL).await.unwrap();
    // The cluster file still names the first three. Of the new three one may go, and the client, which was told of them, goes on.
    eventually(PATIENCE, "the cluster is well", async || {
        let ran = cluster.raft_admin(&["health"]).await;
        if !ran.is_well() {
            eprintln!("{ran:?}");
        }
        ran.is_well().then_some(())
    })
    .await;
    cluster.kill(Member::Meta(3), Signal::KILL).await.unwrap();
    let before = blocks.put("after", "all").await;
    before.unwrap();
    assert!(!writer.is_finished(), "the writer met {:?}", writer.await);
    writer.abort();
    let mut count = 0;
    while blocks.get(format!("key-{count}")).await.unwrap().is_some() {
        count += 1;
    }
    assert!(count > 0, "something was written meanwhile");
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_drains_decommissions_and_forgets_a_data_node() {
    let mut cluster = TestCluster::start_small(3, 64 << 20).await;
    let client = cluster.client().await;
    let (pairs, lone) = (create_namespace(&client, 2, None).await, create_namespace(&client, 1, None).await);
    for number in 0..20 {
        pairs.put(format!("pair-{number}"), "two copies").await.unwrap();
        lone.put(format!("lone-{number}"), "one copy").await.unwrap();
    }
    let raw = cluster.raw().await;
    let node = raw.copies(lone.info().id, "lone-0").await[0].region.node.0;
    let name = node.to_string();
    let state = async |cluster: &TestCluster| {
        let listed = cluster.raft_admin(&["node", "list"]).await.done();
        let rows = listed["data_nodes"].as_array().unwrap().clone();
        rows.into_iter().find(|row| row["node"] == node).map(|row| row["state"].as_str().unwrap().to_owned())
    };
    assert_eq!(state(&cluster).await.as_deref(), Some("alive"));
    assert_eq!(cluster.raft_admin(&["node", "drain", &name]).await.done()["state"], "draining");
    assert_eq!(state(&cluster).await.as_deref(), Some("draining"));
    let fresh = cluster.client().await;
    let namespace = fresh.namespace(&lone.info().name).await.unwrap();
    for number in 0..20 {
        namespace.put(format!("later-{number}"), "elsewhere").await.unwrap();
        let copies = raw.copies(lone.info().id, &format!("later-{number}")).await;
        assert!(copies.iter().all(|copy| copy.region.node.0 != node), "{copies:?}");
    }
    lone.get("lone-0").await.unwrap().expect("what it holds is still read");

    for command in [&["drain", "77"][..], &["decommission", "77"], &["forget", "77"], &["rotate-key", "77"]] {
        let unknown = cluster.raft_admin(&[&["node"], command].concat()).await;
        assert!(unknown.code == Some(3) && unknown.said.contains("no data node"), "{command:?}: {unknown:?}");
    }
    assert!(cluster.raft_admin(&["node", "forget", &name]).await.refused().contains("decommission it first"));
    assert!(cluster.raft_admin(&["node", "decommission", &name]).await.refused().contains("last copy"));
    let gone = cluster.raft_admin(&["node", "decommission", &name, "--yes"]).await.done();
    assert!(
        gone["last_copies"].as_u64().unwrap() >= 1 && gone["copies"].as_u64() > gone["last_copies"].as_u64(),
        "{gone}"
    );
    assert_eq!(state(&cluster).await.as_deref(), Some("decommissioned"));
    let back = cluster.raft_admin(&["node", "drain", &name, "--undo"]).await.refused();
    assert!(back.contains("decommissioned, which is for good"), "{back}");
    eventually(PATIENCE, "the lone value is gone", async || lone.get("lone-0").await.unwrap().is_none().then_some(()))
        .await;
    for number in 0..20 {
        pairs.get(format!("pair-{number}")).await.unwrap().expect("the other copy stays");
    }
    cluster.raft_admin(&["node", "forget", &name]).await.done();
    cluster.raft_admin(&["node", "forget", &name]).await.done();
    assert_eq!(state(&cluster).await, None);
    let log = cluster.log_file(Member::Data(node));
    eventually(Duration::from_secs(30), "the node is told", async || {
        std::fs::read_to_string(&log).unwrap().contains("was forgotten").then_some(())
    })
    .await;
    pairs.put("after", "all").await.unwrap();
    cluster.kill(Member::Data(node), Signal::KILL).await.unwrap();
    fresh.close().await.unwrap();
    client.close().await.unwrap();
}
