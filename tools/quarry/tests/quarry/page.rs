//! The status page of meta nodes, and that its numbers are those of `/metrics`.

use crate::DEADLINE;
use quarry::{
    local::{LocalCluster, LocalSpec, Member, Report, Signal},
    scrape::{Scrape, get},
};
use quarry_client::{Client, Cluster, NamespaceSpec, Options};
use serde_json::Value;
use std::{collections::BTreeMap, time::Duration};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

const ASK: Duration = Duration::from_secs(10);

async fn cluster_json(admin: &str) -> Value {
    let page = get(admin, "/cluster.json", ASK).await.unwrap();
    assert_eq!(page.status, 200, "{}", page.body);
    serde_json::from_str(&page.body).unwrap()
}

/// The head and the body of an answer, as they came.
async fn raw(admin: &str, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(admin).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.0\r\nhost: {admin}\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_ascii_lowercase(), body.to_owned())
}

async fn admin_ports(cluster: &LocalCluster) -> BTreeMap<Member, String> {
    let reports = cluster.status().await.into_iter();
    reports.filter_map(|(member, report)| Some((member, report.admin_address()?.to_owned()))).collect()
}

/// What differs between the page's document and what the processes show themselves.
async fn differences(page: &Value, metas: &BTreeMap<Member, String>) -> Vec<String> {
    let mut found = Vec::new();
    let mut same = |what: String, told: &Value, counted: f64| {
        if told.as_f64() != Some(counted) {
            found.push(format!("{what}: the page says {told}, the metrics {counted}"));
        }
    };
    let mut all = Vec::new();
    for (member, admin) in metas {
        let scrape = Scrape::of(admin, ASK).await.unwrap();
        let node = member.node().0;
        let counters = &page["metas"].as_array().unwrap().iter().find(|it| it["node"] == node).unwrap()["counters"];
        same(
            format!("{member} commits"),
            &counters["commits"],
            scrape.sum("quarry_meta_commits_total", &[("outcome", "committed")]),
        );
        same(format!("{member} grants"), &counters["grants"], scrape.sum("quarry_meta_grants_total", &[]));
        same(
            format!("{member} start"),
            &counters["started_seconds"],
            scrape.sum("quarry_process_start_time_seconds", &[]),
        );
        for group in page["groups"].as_array().unwrap() {
            let label = group["group"].to_string();
            let of = |name: &str| scrape.sum(name, &[("group", &label)]);
            let it = group["members"].as_array().unwrap().iter().find(|it| it["node"] == node).unwrap();
            for (key, name) in [
                ("term", "quarry_raft_term"),
                ("last_log", "quarry_raft_last_log_index"),
                ("committed", "quarry_raft_commit_index"),
                ("applied", "quarry_raft_applied_index"),
                ("elections", "quarry_raft_leader_changes_total"),
            ] {
                same(format!("{member} group {label} {key}"), &it[key], of(name));
            }
            let leads = if group["leader"] == node { 1.0 } else { 0.0 };
            same(format!("{member} leads {label}"), &leads.into(), of("quarry_raft_is_leader"));
        }
        all.push(scrape);
    }
    let over_all = |name: &str, labels: &[(&str, &str)]| all.iter().map(|it| it.sum(name, labels)).sum::<f64>();
    for shard in page["shards"].as_array().unwrap() {
        let label = shard["shard"].to_string();
        for (key, name) in
            [("keys", "quarry_meta_keys"), ("grants", "quarry_meta_grants_live"), ("pins", "quarry_meta_pins")]
        {
            same(format!("shard {label} {key}"), &shard[key], over_all(name, &[("shard", &label)]));
        }
        for (key, state) in [
            ("free", "free"),
            ("granted", "granted"),
            ("committed", "committed"),
            ("pinned", "pinned"),
            ("resting", "quarantined"),
        ] {
            let labels = [("shard", label.as_str()), ("state", state)];
            same(format!("shard {label} {key}"), &shard["space"][key], over_all("quarry_meta_space_bytes", &labels));
        }
    }
    let alive = page["data_nodes"].as_array().unwrap().iter().filter(|it| it["alive"] == true).count();
    let counted = all[0].sum("quarry_meta_data_nodes", &[("state", "alive")]);
    same("data nodes alive".to_owned(), &alive.into(), counted);
    found
}

#[tokio::test]
async fn the_page_shows_the_numbers_of_metrics_and_goes_on_without_a_leader() {
    let dir = tempfile::tempdir().unwrap();
    let spec = LocalSpec { region_bytes: vec![16 << 20], ..LocalSpec::new(env!("CARGO_BIN_EXE_quarry").into()) };
    let mut cluster = LocalCluster::create(&dir.path().join("cluster"), spec).unwrap();
    cluster.start(DEADLINE).await.unwrap();
    let client =
        Client::connect(Cluster::from_file(cluster.cluster_file()).unwrap(), Options::default()).await.unwrap();
    let blocks = client.create_namespace(NamespaceSpec::cache("blocks")).await.unwrap();
    for key in 0..6 {
        blocks.put(format!("key-{key}"), vec![7; 10_000]).await.unwrap();
    }
    client.close().await.unwrap();
    let ports = admin_ports(&cluster).await;
    let metas: BTreeMap<Member, String> =
        ports.iter().filter(|(it, _)| matches!(it, Member::Meta(_))).map(|(it, port)| (*it, port.clone())).collect();
    let any = cluster.metas()[0];

    let (head, body) = raw(&metas[&any], "/").await;
    assert!(head.starts_with("http/1.0 200") && head.contains("content-type: text/html"), "{head}");
    assert!(head.contains("content-security-policy: default-src 'none'; script-src 'self'"), "{head}");
    assert!(body.contains("page.js") && body.contains("<title>Quarry"), "{body}");
    for (path, kind) in [("/page.js", "text/javascript"), ("/page.css", "text/css")] {
        let (head, _) = raw(&metas[&any], path).await;
        assert!(head.starts_with("http/1.0 200") && head.contains(kind), "{path}: {head}");
    }
    let data = &ports[&cluster.data_nodes()[0]];
    assert_eq!(get(data, "/cluster.json", ASK).await.unwrap().status, 404, "data nodes have no page");

    // Both are read while the cluster goes on: they agree once nothing happens in between.
    let until = tokio::time::Instant::now() + DEADLINE;
    let page = loop {
        let page = cluster_json(&metas[&any]).await;
        let mut wrong = differences(&page, &metas).await;
        let keys: u64 = page["shards"].as_array().unwrap().iter().filter_map(|it| it["keys"].as_u64()).sum();
        if keys != 6 {
            wrong.push(format!("{keys} keys of 6"));
        }
        if wrong.is_empty() {
            break page;
        }
        assert!(tokio::time::Instant::now() < until, "{wrong:#?}\n{page:#}");
        tokio::time::sleep(Duration::from_millis(300)).await;
    };
    for node in page["data_nodes"].as_array().unwrap() {
        let region = &node["regions"][0];
        let space = region["space"].as_object().unwrap();
        let sum: u64 = space.values().filter_map(Value::as_u64).sum();
        assert_eq!((sum, region["bytes"].as_u64()), (16 << 20, Some(16 << 20)), "{node}");
        assert!(space["committed"].as_u64() > Some(0), "{node}");
        let (cells, each) = (region["map"]["cells"].as_str().unwrap(), region["map"]["cell_bytes"].as_u64().unwrap());
        assert_eq!(cells.len() as u64 * each, 16 << 20, "{node}");
        // Six values of 10,000 bytes are more than half of each cell of 32 KiB that they fill.
        assert!(cells.contains('c'), "{cells}");
    }
    let status = cluster.status().await;
    let Report::Meta(Ok(reply)) = &status[&any] else { panic!("{status:?}") };
    assert_eq!(page["groups"].as_array().unwrap().len(), reply.groups.len());

    for other in &cluster.metas()[1..] {
        cluster.kill(*other, Signal::KILL).await.unwrap();
    }
    let until = tokio::time::Instant::now() + DEADLINE;
    loop {
        let page = cluster_json(&metas[&any]).await;
        let groups = page["groups"].as_array().unwrap();
        let silent = page["metas"].as_array().unwrap().iter().filter(|it| !it["error"].is_null()).count();
        if silent == 2 && groups.iter().all(|group| group["leader"].is_null()) {
            let shards = page["shards"].as_array().unwrap();
            assert!(shards.iter().all(|it| it["leads"] == false && it["keys"].is_u64()), "{page:#}");
            break;
        }
        assert!(tokio::time::Instant::now() < until, "{page:#}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
