//! Rescues by `raft-admin`, as docs/operations.md tells them: a backup restored on new folders, one meta node that goes on alone, states compared.

use crate::load::Load;
use quarry::admin::BootstrapPlan;
use quarry_client::Namespace;
use quarry_tests::{
    Member, Signal, TestCluster,
    cluster::DIRECTORY,
    soon,
    tools::{self, Ran},
    wait::PATIENCE,
};
use serde_json::Value;
use std::{fs, path::PathBuf};

/// Runs `raft-admin` with these words.
async fn raft_admin(words: &[&str]) -> Ran {
    tools::run("raft-admin", words).await
}

/// The same, and what it answers as JSON.
async fn told(words: &[&str]) -> Value {
    raft_admin(&[words, &["-o", "json"]].concat()).await.done()
}

fn text(path: &std::path::Path) -> &str {
    path.to_str().unwrap()
}

fn data(cluster: &TestCluster, meta: Member) -> PathBuf {
    cluster.member_dir(meta).join("data")
}

/// The client goes on: what it had is gone, what it writes now is there.
async fn goes_on(blocks: &Namespace, lost: &str, key: &str) {
    soon("the value of before is not found any more", async || {
        matches!(blocks.get(lost).await, Ok(None)).then_some(())
    })
    .await;
    soon("a put", async || blocks.put(key, "again").await.ok()).await;
    assert_eq!(&blocks.get(key).await.unwrap().unwrap().bytes[..], b"again");
}

async fn generation_of(cluster: &TestCluster, meta: Member) -> u32 {
    soon("its status", async || cluster.status(meta).await.ok()).await.generation
}

#[tokio::test]
async fn a_backup_restored_on_new_folders_keeps_what_was_known_and_a_node_of_before_is_refused() {
    let mut cluster = TestCluster::start().await;
    let (client, blocks) = cluster.namespace().await;
    blocks.put("before", "value").await.unwrap();
    let (file, settings) = (cluster.dir().join("backup"), cluster.cluster_file());
    let saved = told(&["snapshot", "save", text(&file), "--cluster", text(&settings)]).await;
    let whole = told(&["snapshot", "status", text(&file)]).await;
    assert_eq!(saved["manifest"], whole["manifest"]);
    assert_eq!(saved["manifest"]["generation"], 1);
    let again = raft_admin(&["snapshot", "save", text(&file), "--cluster", text(&settings)]).await;
    assert_eq!(again.code, Some(4), "a backup never replaces a file");

    for meta in cluster.metas() {
        cluster.kill(meta, Signal::KILL).await.unwrap();
    }
    // Two new meta nodes; the third is one of before that nobody took away.
    let old = cluster.metas()[2];
    let planned = cluster.dir().join("restored.toml");
    let mut plan = BootstrapPlan::read(&cluster.dir().join("bootstrap.toml")).unwrap();
    plan.metas.retain(|meta| meta.node != old.node().0);
    plan.write(&planned).unwrap();
    for meta in &cluster.metas()[..2] {
        let (dir, node) = (data(&cluster, *meta), meta.node().0.to_string());
        let restore =
            ["snapshot", "restore", text(&file), "--dir", text(&dir), "--node", &node, "--plan", text(&planned)];
        let refused = raft_admin(&restore).await;
        assert_eq!(refused.code, Some(4), "a folder that is not empty is not touched");
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(told(&restore).await["generation"], 2);
        cluster.restart(*meta).unwrap();
    }
    cluster.wait_ready(PATIENCE).await.unwrap();
    cluster.restart(old).unwrap();
    assert_eq!(generation_of(&cluster, old).await, 1);

    // A client of before, and one that begins now.
    goes_on(&blocks, "before", "after").await;
    client.close().await.unwrap();
    let other = cluster.client().await;
    let known = other.namespace(&blocks.info().name).await.unwrap();
    assert_eq!(known.info().id, blocks.info().id, "namespaces keep their numbers");
    assert_eq!(&known.get("after").await.unwrap().unwrap().bytes[..], b"again");
    // A data node that begins now as well.
    let data_node = cluster.data_nodes()[0];
    cluster.kill(data_node, Signal::KILL).await.unwrap();
    cluster.restart(data_node).unwrap();
    goes_on(&known, "before", "later").await;
    other.close().await.unwrap();
    let status = cluster.status(old).await.unwrap();
    assert!(status.generation == 1 && status.groups.iter().all(|group| group.role != "leader"), "{status:?}");
    // Not of the plan, its number is used up: it is sent away as one that was removed, or for its generation.
    let log = cluster.log_file(old);
    soon("it is told why nobody speaks with it", async || {
        let said = fs::read_to_string(&log).unwrap();
        let told = ["was removed from the cluster", "the peer is of generation 2, this node of 1"];
        told.iter().any(|why| said.contains(why)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn one_meta_node_that_is_left_goes_on_alone_after_it_was_recovered() {
    let mut cluster = TestCluster::start().await;
    let (client, blocks) = cluster.namespace().await;
    blocks.put("before", "value").await.unwrap();
    // The follower that is left has all of it by then.
    cluster.agree().await;
    let metas = cluster.metas();
    for meta in &metas {
        cluster.kill(*meta, Signal::KILL).await.unwrap();
    }
    let left = metas[1];
    for lost in [metas[0], metas[2]] {
        fs::remove_dir_all(data(&cluster, lost)).unwrap();
    }
    let (dir, node) = (data(&cluster, left), left.node().0.to_string());
    let lines = raft_admin(&["log", "dump", "--dir", text(&dir), "--group", "0"]).await;
    assert!(lines.is_well() && lines.text.contains("CreateNamespace x1"), "{lines:?}");

    let recover = ["recover", "--offline", "--dir", text(&dir), "--keep-node", &node];
    let looked = told(&[&recover[..], &["--look"]].concat()).await;
    assert!(looked["generation"] == 1 && looked["groups"][0]["members"].as_array().unwrap().len() == 3, "{looked}");
    let unconfirmed = raft_admin(&[&recover[..], &["--confirm", "yes"]].concat()).await;
    assert_eq!(unconfirmed.code, Some(2));
    let cluster_id = looked["cluster"].as_str().unwrap();
    let recovered = told(&[&recover[..], &["--confirm", cluster_id]].concat()).await;
    assert_eq!((&recovered["generation"], recovered["metas"].as_array().unwrap().len()), (&2.into(), 1));
    cluster.restart(left).unwrap();
    cluster.wait_ready(PATIENCE).await.unwrap();
    let busy = raft_admin(&recover).await;
    assert!(
        busy.said.contains("is in use by another process"),
        "the folder of a node that runs is not touched: {busy:?}"
    );
    assert_eq!(generation_of(&cluster, left).await, 2);
    // Those that were given up are not members, are not waited for, and their numbers are used up.
    let settings = cluster.cluster_file();
    let members = told(&["member", "list", "--cluster", text(&settings)]).await;
    assert_eq!((members["members"].as_array().unwrap().len(), &members["retired"]), (1, &serde_json::json!([1, 3])));
    let hashed = told(&["hash", "--cluster", text(&settings)]).await;
    assert_eq!(hashed["missing"], serde_json::json!([]));
    goes_on(&blocks, "before", "after").await;
    client.close().await.unwrap();
}

#[tokio::test]
async fn states_agree_by_their_hashes_while_writers_write_and_stamps_are_measured() {
    let cluster = TestCluster::start().await;
    let (client, blocks) = cluster.namespace().await;
    let load = Load::start(&blocks);
    load.more(50).await;
    let settings = cluster.cluster_file();
    let hashed = told(&["hash", "--cluster", text(&settings)]).await;
    let groups = hashed["groups"].as_array().unwrap();
    assert!(groups.len() >= 2 && groups.iter().all(|it| it["verdict"] == "same"), "{hashed}");
    load.more(50).await;
    let dir = cluster.dir().to_owned();
    let measured = told(&["check", "perf", "--span", "200ms", "--dir", text(&dir), "--cluster", text(&settings)]).await;
    assert!(
        measured["commits"]["count"].as_u64() > Some(0) && measured["disk"]["count"].as_u64() > Some(0),
        "{measured}"
    );
    load.stop().await;
    client.close().await.unwrap();
    assert!(cluster.leader(DIRECTORY, PATIENCE).await.is_ok());
}
