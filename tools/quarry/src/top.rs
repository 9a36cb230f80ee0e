//! `quarry top`: all processes of a cluster in one table, refreshed every second.
//!
//! Finds the processes by the cluster file: meta nodes are asked for their status, which names the data nodes; each tells its admin port, whose
//! metrics are read. Rates are what came between two readings. A process that cannot be read has a row that says why.

use crate::{
    cli::TopArgs,
    exit::{Code, Failure, Format},
    output::table,
};
use quarry::{
    admin,
    named::cluster,
    scrape::{Scrape, quantile},
    stdout::line,
};
use quarry_trust::Trust;
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};
use tokio::time::{Instant, sleep_until};

/// How long one process may take to answer one question.
const PATIENCE: Duration = Duration::from_secs(2);
const EVERY: Duration = Duration::from_secs(1);
/// Clears the screen and goes to its first line.
const CLEAR: &str = "\u{1b}[2J\u{1b}[H";

pub(crate) async fn top(args: &TopArgs, format: Format) -> Result<(), Failure> {
    let cluster = cluster(&args.cluster, args.credentials.as_deref())?;
    let trust = cluster.trust().map_err(Failure::of)?;
    let mut before = read(&trust, &cluster.metas).await?;
    loop {
        sleep_until(before.at + EVERY).await;
        let now = read(&trust, &cluster.metas).await?;
        let rows = rows(&before, &now);
        match format {
            Format::Json => line(json!({ "processes": rows }))?,
            Format::Text => line(format_args!("{}{}", if args.once { "" } else { CLEAR }, text(&rows)))?,
        }
        if args.once {
            return Ok(());
        }
        before = now;
    }
}

/// All processes at one time.
struct Reading {
    at: Instant,
    /// By gRPC address: what it is, and its metrics or why there are none.
    processes: BTreeMap<String, (&'static str, u64, Result<Scrape, String>)>,
}

async fn read(trust: &Trust, metas: &[String]) -> Result<Reading, Failure> {
    let mut processes = BTreeMap::new();
    let mut data: BTreeSet<(u64, String)> = BTreeSet::new();
    let (metas, answers) = admin::status_of_present(trust, metas, PATIENCE).await;
    admin::unless_forbidden(&answers)?;
    if let Some(Err(wrong)) = answers.iter().find(|_| answers.iter().all(Result::is_err)) {
        return Err(Failure::new(Code::Unavailable, format!("no meta node answers; the first: {wrong}")));
    }
    for (address, answer) in metas.into_iter().zip(answers) {
        let process = match answer {
            Ok(status) => {
                data.extend(status.data_nodes.iter().map(|node| (node.node, node.address.clone())));
                ("meta", status.node, scrape(&status.admin_address).await)
            }
            Err(wrong) => ("meta", 0, Err(wrong.to_string())),
        };
        processes.insert(address, process);
    }
    for (node, address) in data {
        let scraped = match admin::node_status(trust, &address, PATIENCE).await {
            Ok(status) => scrape(&status.admin_address).await,
            Err(wrong) => Err(wrong.to_string()),
        };
        processes.insert(address, ("datanode", node, scraped));
    }
    Ok(Reading { at: Instant::now(), processes })
}

async fn scrape(admin: &str) -> Result<Scrape, String> {
    if admin.is_empty() {
        return Err("it shows no metrics".to_owned());
    }
    Scrape::of(admin, PATIENCE).await.map_err(|wrong| wrong.to_string())
}

/// One row per process, meta nodes first.
fn rows(before: &Reading, now: &Reading) -> Vec<Value> {
    let seconds = now.at.duration_since(before.at).as_secs_f64();
    let mut rows: Vec<Value> = now
        .processes
        .iter()
        .map(|(address, (role, node, scraped))| match scraped {
            Err(why) => json!({ "role": role, "node": node, "address": address, "error": why }),
            Ok(scraped) => {
                let earlier = before.processes.get(address).and_then(|(_, _, earlier)| earlier.as_ref().ok());
                row(role, *node, address, earlier, scraped, seconds)
            }
        })
        .collect();
    rows.sort_by_key(|row| (row["role"] == "datanode", row["node"].as_u64()));
    rows
}

fn row(role: &str, node: u64, address: &str, before: Option<&Scrape>, now: &Scrape, seconds: f64) -> Value {
    // A process that restarted counts from 0 again.
    let rate = |name: &str, labels: &[(&str, &str)]| {
        before.map(|before| ((now.sum(name, labels) - before.sum(name, labels)) / seconds).max(0.0))
    };
    let call = if role == "meta" { "/quarry.v1.Control/Publish" } else { "/quarry.v1.DataNode/Commit" };
    let times = |scrape: &Scrape| scrape.buckets("quarry_rpc_request_duration_seconds", &[("method", call)]);
    let p99 = before.and_then(|before| quantile(0.99, &times(before), &times(now)));
    let leads: Vec<&str> = now
        .label_values("quarry_raft_is_leader", "group")
        .into_iter()
        .filter(|group| now.sum("quarry_raft_is_leader", &[("group", group)]) > 0.0)
        .collect();
    let terms: BTreeMap<&str, f64> = now
        .label_values("quarry_raft_term", "group")
        .into_iter()
        .map(|group| (group, now.sum("quarry_raft_term", &[("group", group)])))
        .collect();
    // Those that name no resource are about something else than space or load.
    let refusals: BTreeMap<&str, f64> = now
        .label_values("quarry_rpc_refusals_total", "resource")
        .into_iter()
        .filter(|resource| !resource.is_empty())
        .filter_map(|resource| Some((resource, rate("quarry_rpc_refusals_total", &[("resource", resource)])?)))
        .filter(|(_, rate)| *rate > 0.0)
        .collect();
    let space = |state| now.sum("quarry_meta_space_bytes", &[("state", state)]);
    let slots = |state| now.sum("quarry_meta_slots", &[("state", state)]);
    json!({
        "role": role,
        "node": node,
        "address": address,
        "leads": leads,
        "terms": terms,
        "proposals_per_second": rate("quarry_raft_proposals_total", &[]),
        "commits_per_second": if role == "meta" {
            rate("quarry_meta_commits_total", &[("outcome", "committed")])
        } else {
            rate("quarry_datanode_commit_entries_total", &[])
        },
        "commit_p99_seconds": p99,
        "rpcs_per_second": rate("quarry_rpc_requests_total", &[]),
        "connections": now.sum("quarry_listener_connections", &[("listener", "grpc")]),
        "calls_in_flight": now.sum("quarry_rpc_calls_in_flight", &[]),
        "refusals_per_second": rate("quarry_rpc_refusals_total", &[]),
        "connections_refused_per_second": rate("quarry_listener_connections_refused_total", &[]),
        "free_bytes": space("free"),
        "granted_bytes": space("granted"),
        "committed_bytes": space("committed"),
        "pinned_bytes": space("pinned"),
        "quarantined_bytes": space("quarantined"),
        "granted_slots": slots("granted"),
        "committed_slots": slots("committed"),
        "pinned_slots": slots("pinned"),
        "evicted_slabs_per_second": rate("quarry_meta_evicted_slabs_total", &[]),
        "evicted_bytes_per_second": rate("quarry_meta_evicted_bytes_total", &[]),
        "refusals_per_second": refusals,
        "pins": now.sum("quarry_meta_pins", &[]),
        "lanes": now.sum("quarry_datanode_lanes_open", &[]),
        "registered_bytes": now.sum("quarry_datanode_mr_registered_bytes", &[]),
        "resident_bytes": now.sum("quarry_process_resident_bytes", &[]),
    })
}

fn text(rows: &[Value]) -> String {
    let mut table = table(&[
        "process",
        "leads",
        "terms",
        "prop/s",
        "commit/s",
        "p99 ms",
        "rpc/s",
        "conns",
        "calls",
        "ref/s",
        "slots g/c/p",
        "pins",
        "MiB f/g/c/p/q",
        "MiB evicted/s",
        "lanes",
        "MiB mr",
        "MiB rss",
        "refused/s",
    ]);
    for row in rows {
        let name = format!("{}-{}", row["role"].as_str().unwrap_or_default(), row["node"]);
        if let Some(why) = row["error"].as_str() {
            table.add_row(vec![name, why.to_owned()]);
            continue;
        }
        let meta = row["role"] == "meta";
        let whole = |key: &str| row[key].as_f64().map_or_else(|| "-".to_owned(), |value| format!("{value:.0}"));
        let mib = |key: &str| format!("{:.0}", row[key].as_f64().unwrap_or_default() / f64::from(1 << 20));
        let only = |fits: bool, text: String| if fits { text } else { String::new() };
        let leads: Vec<&str> = row["leads"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let terms: Vec<String> = row["terms"]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(_, term)| format!("{:.0}", term.as_f64().unwrap_or_default()))
            .collect();
        let p99 = row["commit_p99_seconds"].as_f64().map_or_else(|| "-".to_owned(), |p99| format!("{:.2}", p99 * 1e3));
        let refused = row["refusals_per_second"].as_object().into_iter().flatten();
        let refused: Vec<String> =
            refused.map(|(resource, rate)| format!("{:.0} {resource}", rate.as_f64().unwrap_or_default())).collect();
        let space = ["free_bytes", "granted_bytes", "committed_bytes", "pinned_bytes", "quarantined_bytes"];
        let slots = ["granted_slots", "committed_slots", "pinned_slots"].map(whole).join("/");
        table.add_row(vec![
            name,
            leads.join(","),
            terms.join(","),
            only(meta, whole("proposals_per_second")),
            whole("commits_per_second"),
            p99,
            whole("rpcs_per_second"),
            whole("connections"),
            whole("calls_in_flight"),
            whole("refusals_per_second"),
            only(meta, slots),
            only(meta, whole("pins")),
            only(meta, space.map(mib).join("/")),
            only(meta, mib("evicted_bytes_per_second")),
            only(!meta, whole("lanes")),
            only(!meta, mib("registered_bytes")),
            mib("resident_bytes"),
            refused.join(", "),
        ]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scraped(commits: u32, quick: u32) -> Scrape {
        let method = "method=\"/quarry.v1.Control/Publish\"";
        Scrape::parse(&format!(
            "quarry_raft_is_leader{{group=\"0\"}} 1\nquarry_raft_is_leader{{group=\"1\"}} 0\nquarry_raft_term{{group=\"0\"}} 3\n\
             quarry_meta_commits_total{{shard=\"1\",outcome=\"committed\"}} {commits}\n\
             quarry_rpc_request_duration_seconds_bucket{{{method},le=\"0.001\"}} {quick}\n\
             quarry_rpc_request_duration_seconds_bucket{{{method},le=\"+Inf\"}} {quick}\n"
        ))
        .unwrap()
    }

    #[test]
    fn rates_are_of_what_came_between_two_readings_and_a_restart_is_no_negative_rate() {
        let shown = |before: Option<Scrape>, now: Scrape| row("meta", 1, "m:1", before.as_ref(), &now, 2.0);
        let one = shown(Some(scraped(10, 0)), scraped(110, 100));
        assert_eq!((one["commits_per_second"].as_f64(), &one["leads"]), (Some(50.0), &json!(["0"])));
        assert_eq!(one["commit_p99_seconds"].as_f64(), Some(0.000_99));
        assert_eq!(shown(Some(scraped(10, 0)), scraped(0, 0))["commits_per_second"].as_f64(), Some(0.0));
        assert_eq!(shown(None, scraped(0, 0))["commits_per_second"], Value::Null);
    }

    #[test]
    fn evictions_and_refusals_are_told_by_resource() {
        let scraped = |evicted: u32, refused: u32| {
            Scrape::parse(&format!(
                "quarry_meta_evicted_bytes_total{{shard=\"1\"}} {evicted}\n\
                 quarry_rpc_refusals_total{{kind=\"no_space\",resource=\"memory of data nodes\"}} {refused}\n\
                 quarry_rpc_refusals_total{{kind=\"no_space\",resource=\"quota of namespace kv\"}} 7\n\
                 quarry_rpc_refusals_total{{kind=\"not_leader\",resource=\"\"}} {refused}\n"
            ))
            .unwrap()
        };
        let shown = row("meta", 1, "m:1", Some(&scraped(0, 0)), &scraped(4 << 20, 6), 2.0);
        assert_eq!(shown["evicted_bytes_per_second"].as_f64(), Some(f64::from(2 << 20)));
        assert_eq!(shown["refusals_per_second"], json!({ "memory of data nodes": 3.0 }));
        let text = text(&[shown]);
        assert!(text.contains("3 memory of data nodes"), "{text}");
    }

    #[test]
    fn a_process_that_cannot_be_read_has_a_row_that_says_why() {
        let reading =
            |process| Reading { at: Instant::now(), processes: BTreeMap::from([("m:1".to_owned(), process)]) };
        let before = reading(("meta", 1, Ok(scraped(1, 1))));
        let rows = rows(&before, &reading(("meta", 1, Err("it does not answer".to_owned()))));
        assert!(text(&rows).contains("it does not answer"), "{}", text(&rows));
    }
}
