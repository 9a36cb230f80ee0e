//! Calls and operations that fail.

use crate::{
    cluster, content,
    double::{Double, outcome},
    until,
};
use quarry_client::{
    CallError, Client, Clock, Cluster, ConnectError, HybridClock, NamespaceSpec, Options, PutError, PutMode, Refusal,
    SystemClock,
};
use quarry_proto::v1::{self, commit_outcome::Code};
use std::time::Duration;
use tokio::time::{Instant, timeout};

fn impatient() -> Options {
    Options { timeout: Duration::from_secs(2), ..Options::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_whose_reply_was_lost_is_sent_again_and_written_once() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    double.faults().lose_replies = 1;
    let version = blocks.put("key", "value").await.unwrap();
    let stats = client.stats();
    assert_eq!(stats.control_calls["Commit"], 2);
    assert_eq!(stats.fabric_writes, 2, "it stayed in its slot");
    assert_eq!(blocks.get("key").await.unwrap().unwrap().version, version);
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_without_any_reply_is_settled_by_asking_for_the_current_version() {
    let (double, client, blocks) = cluster(2, impatient()).await;
    double.faults().lose_replies = u32::MAX;
    let version = blocks.put("key", "value").await.unwrap();
    assert_eq!(blocks.get("key").await.unwrap().unwrap().version, version);
    let writes = client.stats().fabric_writes;
    double.faults().lose_replies = 0;
    double.faults().lose_commits = u32::MAX;
    let lost = blocks.put_with("key", "another", PutMode::Replace).await;
    assert!(matches!(lost, Err(PutError::Indeterminate { .. })), "{lost:?}");
    assert_eq!(client.stats().fabric_writes, writes + 2, "it never left its slot");
    assert_eq!(blocks.get("key").await.unwrap().unwrap().version, version);
    double.faults().lose_commits = 0;
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_grant_is_success_only_if_the_own_version_is_current() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    double.faults().outcomes.push_back(outcome(Code::UnknownGrant, None));
    let result = blocks.put("key", "value").await;
    assert!(matches!(result, Err(PutError::Indeterminate { .. })), "{result:?}");
    assert_eq!((double.keys(), client.stats().fabric_writes), (0, 2), "nothing is rewritten");
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn applied_refusals_lead_to_another_slab_with_the_same_version() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    for code in [Code::GrantExpired, Code::Sealed, Code::NotEnoughHolders] {
        double.faults().outcomes.push_back(outcome(code, None));
        let key = format!("{code:?}");
        let version = blocks.put(&key, "value").await.unwrap();
        assert_eq!(blocks.get(&key).await.unwrap().unwrap().version, version);
    }
    assert_eq!(client.stats().fabric_writes, 3 * 2 * 2);
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replace_behind_anothers_clock_is_written_above_it() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    blocks.put("key", "one").await.unwrap();
    let ahead = HybridClock::at(SystemClock.wall_ms() + 60_000);
    double.advance("key", ahead);
    let version = blocks.put_with("key", "two", PutMode::Replace).await.unwrap();
    assert!(version.clock > ahead);
    assert_eq!(&blocks.fresh().get("key").await.unwrap().unwrap().bytes[..], b"two");
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leader_is_found_again_after_it_moved() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    for round in 0..4 {
        blocks.put(format!("key-{round}"), "value").await.unwrap();
        double.other_leads();
        assert!(blocks.fresh().get(format!("key-{round}")).await.unwrap().is_some());
    }
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_cannot_be_armed_is_replaced_by_another() {
    let (double, client, blocks) = cluster(3, Options::default()).await;
    double.faults().no_arm.insert(11);
    blocks.put("key", "value").await.unwrap();
    assert_eq!(double.copies("key"), 2);
    double.faults().no_arm.extend([12, 13]);
    until("the slab is sealed", || double.seals().1 == 0).await;
    client.close().await.unwrap();
    let other = double.connect(impatient()).await;
    let result = other.namespace("kv").await.unwrap().put("other", "value").await;
    let expected = matches!(
        result,
        Err(PutError::TooFewHolders { needed: 2, .. } | PutError::NoSpace { .. } | PutError::Deadline { .. })
    );
    assert!(expected, "{result:?}");
    other.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_beyond_the_least_may_be_missing() {
    let double = Double::start(2).await;
    let client = double.connect(Options::default()).await;
    let spec = NamespaceSpec { least: Some(1), ..NamespaceSpec::cache("easy") };
    let blocks = client.create_namespace(spec).await.unwrap();
    double.faults().no_arm.insert(12);
    blocks.put("key", "value").await.unwrap();
    assert_eq!(double.copies("key"), 1);
    assert!(blocks.get("key").await.unwrap().is_some());
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_that_was_closed_by_force_leads_to_another_slab() {
    let (double, client, blocks) = cluster(3, Options::default()).await;
    blocks.put("{tag}one", content(1, 5000)).await.unwrap();
    double.close_lane(0);
    let version = blocks.put("{tag}two", content(2, 5000)).await.unwrap();
    let value = blocks.get("{tag}two").await.unwrap().unwrap();
    assert!(value.version == version && value.bytes == content(2, 5000));
    assert_eq!(double.copies("{tag}two"), 2);
    assert!(client.stats().fabric_failures > 0);
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_that_was_closed_between_puts_costs_neither_an_attempt_nor_trust_in_its_node() {
    // Waiting for one attempt to end, or for a node to be trusted again, would take longer than the put has.
    let options = Options {
        attempt_timeout: Duration::from_secs(60),
        timeout: Duration::from_secs(20),
        idle: Duration::from_secs(60),
        ..Options::default()
    };
    let (double, client, blocks) = cluster(2, options).await;
    blocks.put("{tag}one", content(1, 5_000)).await.unwrap();
    blocks.put("{tag}large", content(2, 60_000)).await.unwrap();
    double.close_lane(0);
    // Reads let the client's fabric see that the connection is gone: what is written next finds nobody to connect to.
    for _ in 0..10 {
        assert!(blocks.fresh().get("{tag}one").await.unwrap().is_some());
    }
    blocks.put("{tag}two", content(3, 5_000)).await.unwrap();
    let lost = client.stats().lost_lane_writes;
    assert!(lost > 0, "it went through the lane that was closed");
    assert_eq!(double.grants().len(), 3, "one new slab was all it took");
    // The slab for large values was armed through the same lane; nothing has to be tried to know.
    let writes = client.stats().fabric_writes;
    blocks.put("{tag}larger", content(4, 60_000)).await.unwrap();
    assert_eq!((double.grants().len(), client.stats().fabric_writes), (4, writes + 2));
    assert_eq!((client.stats().lost_lane_writes, double.avoiding()), (lost, 0));
    for (key, seed, length) in [("{tag}one", 1, 5_000), ("{tag}two", 3, 5_000), ("{tag}larger", 4, 60_000)] {
        assert_eq!(blocks.get(key).await.unwrap().unwrap().bytes, content(seed, length));
        assert_eq!(double.copies(key), 2);
    }
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_coordinator_that_lost_the_grant_is_passed_over() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    double.faults().unknown_grant.insert(11);
    blocks.put("one", "value").await.unwrap();
    double.faults().unknown_grant.insert(12);
    let writes = client.stats().fabric_writes;
    double.faults().outcomes.clear();
    let short = double.connect(impatient()).await;
    let result = short.namespace("kv").await.unwrap().put("{tag}two", "value").await;
    // Which step the deadline falls in is chance; within a Commit it is not known what became of it.
    let ended = |error: &PutError| {
        matches!(error, PutError::Deadline { .. } | PutError::TooFewHolders { .. } | PutError::Indeterminate { .. })
    };
    assert!(result.as_ref().is_err_and(ended), "{result:?}");
    assert!(short.stats().fabric_writes > 2, "nothing was logged, so other slabs were tried");
    assert_eq!(client.stats().fabric_writes, writes);
    short.close().await.unwrap();
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_space_is_waited_for_while_some_is_coming_and_reported_when_none_is() {
    let (double, client, blocks) = cluster(2, impatient()).await;
    let refusal = |terminal| {
        Refusal::NoSpace(v1::NoSpace { resource: "memory".into(), retry_after_ms: 20, terminal, ..Default::default() })
    };
    double.faults().refuse_grants.extend([refusal(false), refusal(false)]);
    blocks.put("one", "value").await.unwrap();
    until("the slab is sealed", || double.seals().1 == 0).await;
    double.faults().refuse_grants.push_back(refusal(true));
    let full = blocks.put("{tag}two", "value").await;
    assert!(matches!(full, Err(PutError::NoSpace { retry_after: None, .. })), "{full:?}");
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_that_come_too_late_for_their_name_are_named_anew() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    let stale = || Refusal::StaleRequest(v1::StaleRequest { floor_ms: 9_000, found_ms: 1 });
    double.faults().refuse_grants.push_back(stale());
    let version = blocks.put("key", "value").await.unwrap();
    double.faults().refuse_deletes.push_back(stale());
    assert_eq!(blocks.delete("key").await.unwrap(), Some(version));
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_is_another_or_does_not_answer_is_refused() {
    let double = Double::start(1).await;
    let good = double.cluster();
    let other = Cluster { uuid: quarry_client::ClusterUuid([8; 16]), ..good.clone() };
    let refused = Client::connect(other, impatient()).await;
    assert!(matches!(refused, Err(ConnectError::Call(CallError::Untrusted { .. }))), "{refused:?}");
    // A port that was just free.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let nobody = Cluster { metas: vec![format!("127.0.0.1:{port}")], ..good };
    let refused = Client::connect(nobody, impatient()).await;
    assert!(matches!(refused, Err(ConnectError::Call(CallError::Unreachable { .. }))), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn connecting_ends_by_the_deadline_of_all_calls_together() {
    let double = Double::start(1).await;
    // It takes connections, and says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = Cluster { metas: vec![silent.local_addr().unwrap().to_string()], ..double.cluster() };
    let hour = Duration::from_secs(3600);
    let until = Some(Instant::now() + Duration::from_millis(200));
    let options = Options { timeout: hour, attempt_timeout: hour, until, ..Options::default() };
    let refused = timeout(Duration::from_secs(30), Client::connect(nobody, options)).await.expect("it ends");
    assert!(matches!(refused, Err(ConnectError::Call(CallError::Unreachable { .. }))), "{refused:?}");
}
