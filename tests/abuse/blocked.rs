//! A data node whose fabric is blocked while its heartbeats go on: alive for the control plane, out of reach for bytes.
//!
//! The scene needs a network of its own, so the test starts itself again in one: a network namespace, which goes with its last process.

use quarry::local::LocalCluster;
use quarry_client::{GetError, Namespace, Options, PutError, PutItem};
use quarry_tests::{
    Member, TestCluster, calls,
    cluster::{create_namespace, small},
    eventually,
    seed::pattern,
    soon,
    wait::PATIENCE,
};
use quarry_wire::key::Key;
use std::{
    process::{Command, Stdio},
    time::Duration,
};

/// Set in the network of its own.
const INSIDE: &str = "QUARRY_ABUSE_NETWORK";
const NAME: &str =
    "blocked::a_node_whose_fabric_is_blocked_while_its_heartbeats_go_on_costs_no_read_and_no_write_that_needs_it_not";
const BLOCKED: Member = Member::Data(103);
/// Where that node's fabric endpoints are; all else is at 127.0.0.1.
const FABRIC: &str = "127.0.0.2";
const VALUES: usize = 120;
const BYTES: usize = 20_000;
/// Longest time for all of it.
const WHOLE: Duration = Duration::from_secs(180);

/// Runs this test again in a network of its own.
async fn run_inside() {
    let own = std::env::current_exe().unwrap();
    let mut command = tokio::process::Command::new("unshare");
    // Somebody who is not root becomes it in there, where it hurts nobody.
    let as_root: &[&str] = if rustix::process::getuid().is_root() { &[] } else { &["--user", "--map-root-user"] };
    command.args(as_root).arg("--net").arg("--").arg(own).args([NAME, "--exact", "--nocapture"]);
    command.env(INSIDE, "1").stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(WHOLE, command.output()).await.expect("it ends in time");
    let output = output.unwrap_or_else(|wrong| panic!("unshare cannot be run ({wrong}): tools/setup installs it"));
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "in a network of its own ({}; without the right to make one: run as root, or allow user namespaces):\n{text}",
        output.status
    );
}

/// Runs a command that changes this network.
fn network(command: &str) {
    let mut words = command.split(' ');
    let program = words.next().unwrap();
    let output = Command::new(program).args(words).output();
    let output = output.unwrap_or_else(|wrong| panic!("{program} cannot be run ({wrong}): tools/setup installs it"));
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Drops every packet from and to the blocked node's fabric: nobody is told anything.
fn block() {
    network("nft add table ip quarry");
    network("nft add chain ip quarry input { type filter hook input priority 0 ; }");
    network(&format!("nft add rule ip quarry input ip daddr {FABRIC} drop"));
    network(&format!("nft add rule ip quarry input ip saddr {FABRIC} drop"));
}

fn unblock() {
    network("nft delete table ip quarry");
}

fn bind_fabric(cluster: &LocalCluster) {
    let path = cluster.member_dir(BLOCKED).join("config.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    let bound = text.replace("bind = \"127.0.0.1\"", &format!("bind = \"{FABRIC}\""));
    assert_ne!(bound, text, "the configuration says where the fabric is");
    std::fs::write(&path, bound).unwrap();
}

fn key(index: usize) -> Key {
    Key::new(format!("key-{index}")).unwrap()
}

fn items(from: usize, count: usize) -> Vec<PutItem> {
    (from..from + count).map(|index| PutItem::create(key(index), pattern(index as u64, BYTES))).collect()
}

/// Reads that many values, each of which must be there.
async fn read_all(blocks: &Namespace, count: usize, when: &str) {
    let keys: Vec<Key> = (0..count).map(key).collect();
    for (index, result) in blocks.get_many(&keys).await.into_iter().enumerate() {
        let value = result.unwrap_or_else(|wrong| panic!("{when}: key-{index}: {wrong}"));
        let value = value.unwrap_or_else(|| panic!("{when}: key-{index} is gone"));
        assert!(value.bytes == pattern(index as u64, BYTES), "{when}: key-{index} came back changed");
    }
}

/// Guards: an operation that is not answered ends, its node is avoided for a while, and another copy is read (`client/src/endpoints.rs`,
/// `read/plan.rs`); a writer names nodes that it cannot reach when it asks for a grant (`client/src/write`).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_fabric_is_blocked_while_its_heartbeats_go_on_costs_no_read_and_no_write_that_needs_it_not() {
    if std::env::var_os(INSIDE).is_none() {
        return run_inside().await;
    }
    network("ip link set lo up");
    let mut cluster = TestCluster::start_prepared(
        |spec| {
            let silence = spec.node_silence_ms;
            small(spec, 3, 128 << 20);
            // A node that is not heard is soon held for dead.
            spec.node_silence_ms = silence;
        },
        bind_fabric,
    )
    .await;
    let options = || Options { timeout: Duration::from_secs(30), ..Options::default() };
    let client = cluster.client_with(options()).await;
    let blocks = create_namespace(&client, 2, None).await;
    let lonely = create_namespace(&client, 1, None).await;
    // Enough grants for each node to have its share of both.
    for part in 0..6 {
        let writer = cluster.client_with(options()).await;
        let theirs = writer.namespace(&blocks.info().name).await.unwrap();
        let singles = writer.namespace(&lonely.info().name).await.unwrap();
        for result in theirs.put_many(items(part * VALUES / 6, VALUES / 6)).await {
            result.unwrap();
        }
        singles.put(format!("single-{part}"), pattern(1, BYTES)).await.unwrap();
        writer.close().await.unwrap();
    }
    let raw = cluster.raw().await;
    let mut at_blocked = 0;
    for index in 0..VALUES {
        let copies = raw.copies(blocks.info().id, &format!("key-{index}")).await;
        at_blocked += usize::from(copies.iter().any(|copy| copy.region.node == BLOCKED.node()));
    }
    assert!(at_blocked > 0, "nothing lies at the node that will be blocked");
    read_all(&blocks, VALUES, "before").await;

    block();
    // Somebody who read from it before, from its cache and afresh; and somebody who meets it blocked.
    read_all(&blocks, VALUES, "blocked, cached").await;
    read_all(&blocks.fresh(), VALUES, "blocked, fresh").await;
    let newcomer = cluster.client_with(options()).await;
    let theirs = newcomer.namespace(&blocks.info().name).await.unwrap();
    read_all(&theirs, VALUES, "blocked, a new client").await;
    // Who asks for what cannot be had is told so by the deadline.
    let options = Options { timeout: Duration::from_secs(5), ..Options::default() };
    let impatient = cluster.client_with(options).await;
    let only_copies = impatient.namespace(&lonely.info().name).await.unwrap();
    let mut lost = 0;
    for part in 0..6 {
        match only_copies.get(format!("single-{part}")).await {
            Ok(Some(value)) => assert!(value.bytes == pattern(1, BYTES)),
            // Its only copy is out of reach, which is not to say that it is gone.
            Err(GetError::Unreachable { node, .. }) if node == BLOCKED.node() => lost += 1,
            Err(GetError::Deadline { .. }) => lost += 1,
            other => panic!("single-{part}: {other:?}"),
        }
    }
    // Writers go on, on the other two nodes.
    for round in 0..10 {
        for result in theirs.put_many(items(VALUES + round * 10, 10)).await {
            result.unwrap_or_else(|wrong| panic!("blocked, round {round}: {wrong}"));
        }
    }
    read_all(&blocks, VALUES + 100, "blocked, with what was written meanwhile").await;
    create_namespace(&client, 3, Some(2)).await.put("two will do", "value").await.unwrap();
    match create_namespace(&impatient, 3, Some(3)).await.put("needs all three", "value").await {
        Err(PutError::TooFewHolders { needed: 3, .. } | PutError::Deadline { .. } | PutError::NoSpace { .. }) => {}
        other => panic!("{other:?}"),
    }
    // All the while it was alive.
    cluster.wait_ready(PATIENCE).await.unwrap();
    calls::node_status(&cluster.address(BLOCKED)).await.unwrap();

    unblock();
    eventually(PATIENCE, "the node is read from again", async || {
        for part in 0..6 {
            match lonely.get(format!("single-{part}")).await {
                Ok(Some(value)) => assert!(value.bytes == pattern(1, BYTES)),
                Err(GetError::Unreachable { .. } | GetError::Deadline { .. }) => return None,
                other => panic!("single-{part}: {other:?}"),
            }
        }
        Some(())
    })
    .await;
    let all = create_namespace(&client, 3, Some(3)).await;
    soon("the node is written to again", async || match all.put("key", "on all three").await {
        Ok(_) | Err(PutError::Exists { .. }) => Some(()),
        Err(_) => None,
    })
    .await;
    assert_eq!(raw.copies(all.info().id, "key").await.len(), 3);
    read_all(&blocks.fresh(), VALUES + 100, "after").await;
    eprintln!("{at_blocked} of {VALUES} values had a copy at the blocked node, {lost} of 6 single ones their only one");
}
