//! What operators see of a running cluster: metrics, health, logs that follow one call.

use quarry::scrape::{Scrape, get};
use quarry_tests::{Member, TestCluster, cluster::SHARD, eventually, soon, wait::PATIENCE};
use std::{collections::BTreeMap, collections::BTreeSet, fs, process::Stdio, time::Duration};
use tokio::process::Command;

const ASK: Duration = Duration::from_secs(10);

/// The admin address of every process.
async fn admin_ports(cluster: &TestCluster) -> BTreeMap<Member, String> {
    let reports = quarry::local::LocalCluster::status(cluster).await;
    reports
        .into_iter()
        .map(|(member, report)| (member, report.admin_address().expect("every process has an admin port").to_owned()))
        .collect()
}

async fn scrape_all(ports: &BTreeMap<Member, String>) -> BTreeMap<Member, Scrape> {
    let mut all = BTreeMap::new();
    for (member, address) in ports {
        all.insert(*member, Scrape::of(address, ASK).await.unwrap());
    }
    all
}

#[tokio::test]
async fn every_process_shows_documented_metrics_that_move_with_work_and_says_that_it_lives_and_serves() {
    let cluster = TestCluster::start().await;
    let ports = admin_ports(&cluster).await;
    assert_eq!(ports.len(), 5);
    for (member, address) in &ports {
        for path in ["/livez", "/readyz"] {
            eventually(PATIENCE, &format!("{member}{path} is 200"), async || {
                (get(address, path, ASK).await.ok()?.status == 200).then_some(())
            })
            .await;
        }
        let status: serde_json::Value =
            serde_json::from_str(&get(address, "/status", ASK).await.unwrap().body).unwrap();
        assert_eq!((&status["node"], &status["ready"]), (&member.node().0.into(), &true.into()), "{status}");
        assert_eq!(get(address, "/nothing", ASK).await.unwrap().status, 404);
    }
    let before = scrape_all(&ports).await;
    let (client, blocks) = cluster.namespace().await;
    for key in 0..8 {
        blocks.put(format!("key-{key}"), vec![7; 10_000]).await.unwrap();
        assert!(blocks.get(format!("key-{key}")).await.unwrap().is_some());
    }
    let leader = soon("the shard has a leader", async || cluster.leader(SHARD, PATIENCE).await.ok()).await;
    let after = eventually(PATIENCE, "the numbers of the leader show eight keys", async || {
        let now = scrape_all(&ports).await;
        (now[&leader].sum("quarry_meta_keys", &[]) >= 8.0).then_some(now)
    })
    .await;
    let moved = |member: Member, name: &str, labels: &[(&str, &str)]| {
        after[&member].sum(name, labels) - before[&member].sum(name, labels)
    };
    assert_eq!(moved(leader, "quarry_meta_commits_total", &[("outcome", "committed")]), 8.0);
    assert!(moved(leader, "quarry_meta_grants_total", &[]) >= 1.0);
    assert!(moved(leader, "quarry_raft_proposals_total", &[("group", "1")]) >= 2.0);
    assert!(moved(leader, "quarry_raft_fsync_duration_seconds_count", &[]) >= 2.0);
    assert!(moved(leader, "quarry_raft_applied_index", &[("group", "1")]) >= 2.0);
    assert_eq!(after[&leader].sum("quarry_raft_is_leader", &[("group", "1")]), 1.0);
    assert_eq!(after[&leader].sum("quarry_meta_slots", &[("state", "committed")]), 16.0, "two copies of eight");
    let over_data = |name: &str, labels: &[(&str, &str)]| -> f64 {
        cluster.data_nodes().into_iter().map(|member| moved(member, name, labels)).sum()
    };
    assert_eq!(over_data("quarry_datanode_commit_entries_total", &[]), 8.0);
    assert_eq!(over_data("quarry_datanode_confirm_entries_total", &[("verdict", "confirmed")]), 16.0);
    assert!(over_data("quarry_datanode_lanes_open", &[]) >= 2.0);
    let called = [("method", "/quarry.v1.DataNode/Commit"), ("code", "ok")];
    assert!(over_data("quarry_rpc_requests_total", &called) >= 1.0);
    let catalogue = quarry::metrics::catalogue();
    for (member, scrape) in &after {
        for name in scrape.names() {
            assert!(catalogue.contains_key(name), "{member} shows {name}, which is not documented");
        }
    }
    // What no process shows after work like this either needs an event that did not happen, or belongs to clients.
    let shown: BTreeSet<&str> = after.values().flat_map(Scrape::names).collect();
    let needs = ["quarry_raft_snapshot_bytes", "quarry_raft_snapshot_duration_seconds", "quarry_rpc_refusals_total"];
    for name in catalogue.keys().filter(|name| !name.starts_with("quarry_client_") && !needs.contains(&name.as_str())) {
        assert!(shown.contains(name.as_str()), "{name} is documented and shown by nobody");
    }
    client.close().await.unwrap();
}

#[tokio::test]
async fn one_puts_request_id_is_in_the_logs_of_the_client_the_coordinator_and_the_leader() {
    let cluster = TestCluster::start_with(|spec| {
        spec.environment.push(("QUARRY_LOG".to_owned(), "info,quarry_proto=debug".to_owned()));
        spec.environment.push(("QUARRY_LOG_FORMAT".to_owned(), "json".to_owned()));
    })
    .await;
    let (client, blocks) = cluster.namespace().await;
    let binary = quarry::local::built_binary().unwrap();
    let output = Command::new(binary)
        .args(["--log-format", "json", "put", "traced", "-n", &blocks.info().name, "--cluster"])
        .arg(cluster.cluster_file())
        .env("QUARRY_LOG", "quarry_client=debug")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<serde_json::Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let put = lines.iter().find(|line| line["span"]["call"] == "put").unwrap_or_else(|| panic!("{said}"));
    let id = put["span"]["request"].as_str().unwrap().to_owned();
    assert_eq!(id.len(), 16, "64 random bits: {id}");
    let leader = soon("the shard has a leader", async || cluster.leader(SHARD, PATIENCE).await.ok()).await;
    // Whether `member` logged a call of this method under the id, and as which node and shard.
    let logged = |member: Member, method: &str| {
        let text = fs::read_to_string(cluster.log_file(member)).unwrap();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        lines.into_iter().any(|line| {
            line["span"]["request"] == id.as_str()
                && line["span"]["method"] == method
                && line["span"]["shard"] == SHARD
                && line["node"] == member.node().0
        })
    };
    eventually(PATIENCE, "the leader logged grant and publish", async || {
        let both = ["/quarry.v1.Control/Grant", "/quarry.v1.Control/Publish"];
        both.into_iter().all(|method| logged(leader, method)).then_some(())
    })
    .await;
    let coordinators = cluster.data_nodes().into_iter().filter(|member| logged(*member, "/quarry.v1.DataNode/Commit"));
    assert_eq!(coordinators.count(), 1);
    client.close().await.unwrap();
}

#[tokio::test]
async fn top_shows_a_row_for_every_process_of_the_cluster() {
    let cluster = TestCluster::start().await;
    let binary = quarry::local::built_binary().unwrap();
    let output = Command::new(binary)
        .args(["top", "--once", "-o", "json", "--cluster"])
        .arg(cluster.cluster_file())
        .kill_on_drop(true)
        .output()
        .await
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let table: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = table["processes"].as_array().unwrap();
    let nodes: Vec<u64> = rows.iter().filter_map(|row| row["node"].as_u64()).collect();
    assert_eq!(nodes, [1, 2, 3, 101, 102], "{table}");
    assert!(rows.iter().all(|row| row["error"].is_null() && row["rpcs_per_second"].as_f64() > Some(0.0)), "{table}");
    let leaders = rows.iter().flat_map(|row| row["leads"].as_array().unwrap());
    assert_eq!(leaders.count(), 2, "one leader of each group: {table}");
}
