//! Wrong bytes, wrong signatures, old leases.

use crate::{cluster, content, double::Double, until};
use quarry_client::{CallError, Clock, GetError, Key, NamespaceSpec, Options, PutError, PutItem, SystemClock};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_copy_is_never_shown_and_the_other_one_is_read() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    for number in 0..40_u64 {
        blocks.put(format!("key-{number}"), content(number, 3000)).await.unwrap();
        double.damage(&format!("key-{number}"), usize::try_from(number % 2).unwrap());
    }
    for number in 0..40 {
        let value = blocks.get(format!("key-{number}")).await.unwrap().unwrap();
        assert!(value.bytes == content(number, 3000));
    }
    assert!(client.stats().damaged_copies > 0);
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_whose_copies_are_all_damaged_is_an_error() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    blocks.put("key", content(1, 3000)).await.unwrap();
    double.damage("key", 0);
    double.damage("key", 1);
    let result = blocks.get("key").await;
    assert!(matches!(result, Err(GetError::Corrupt { .. })), "{result:?}");
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_copy_is_told_to_its_holder_and_the_shard_is_asked_anew() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    blocks.put("key", content(1, 3000)).await.unwrap();
    double.damage("key", 0);
    // Which copy is read first is drawn anew by every client.
    let mut clients = vec![];
    while double.reports().is_empty() {
        let other = double.connect(Options::default()).await;
        let theirs = other.namespace("kv").await.unwrap();
        assert!(theirs.get("key").await.unwrap().unwrap().bytes == content(1, 3000));
        let told = other.stats().damaged_copies > 0;
        if told {
            until("the holder was told", || other.stats().dropped_copies == 1).await;
            let asked = other.stats().control_calls["Resolve"];
            assert!(theirs.get("key").await.unwrap().is_some());
            assert_eq!(other.stats().control_calls["Resolve"], asked + 1, "what was known of it is forgotten");
        }
        clients.push(other);
    }
    assert!(double.reports().iter().all(|report| *report == (0, "key".into())), "{:?}", double.reports());
    for other in clients {
        other.close().await.unwrap();
    }
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_cannot_be_read_is_passed_over() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    for number in 0..40 {
        blocks.put(format!("key-{number}"), content(number, 3000)).await.unwrap();
    }
    double.close_reader(0);
    for number in 0..40 {
        let value = blocks.get(format!("key-{number}")).await.unwrap().unwrap();
        assert!(value.bytes == content(number, 3000));
    }
    let short =
        Options { timeout: Duration::from_secs(2), attempt_timeout: Duration::from_millis(200), ..Options::default() };
    let other = double.connect(short).await;
    let theirs = other.namespace("kv").await.unwrap();
    double.close_reader(1);
    let result = theirs.get("key-1").await;
    assert!(matches!(result, Err(GetError::Unreachable { .. } | GetError::Deadline { .. })), "{result:?}");
    other.close().await.unwrap();
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn patience_with_a_holder_that_cannot_be_read_is_spent_once_and_not_for_each_value_of_a_batch() {
    const BYTES: usize = 700 << 10;
    let (double, client, blocks) = cluster(2, Options::default()).await;
    let keys: Vec<Key> = (0..64).map(|number| Key::new(format!("key-{number}")).unwrap()).collect();
    let items = keys.iter().zip(0..).map(|(key, number)| PutItem::create(key.clone(), content(number, BYTES)));
    for result in blocks.put_many(items.collect()).await {
        result.unwrap();
    }
    double.close_reader(0);
    for (value, number) in blocks.get_many(&keys).await.into_iter().zip(0..) {
        assert!(value.unwrap().unwrap().bytes == content(number, BYTES));
    }
    let failures = client.stats().fabric_failures;
    assert!((1..=8).contains(&failures), "{failures}: only what was under way together");
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn grants_and_batches_that_nobody_certified_are_not_used() {
    let short = Options { timeout: Duration::from_secs(3), ..Options::default() };
    let (double, client, blocks) = cluster(2, short).await;
    double.faults().forge_grants = true;
    let result = blocks.put("key", "value").await;
    assert!(matches!(result, Err(PutError::Call(CallError::Untrusted { .. }))), "{result:?}");
    assert_eq!(client.stats().fabric_writes, 0);
    double.faults().forge_grants = false;
    double.faults().forge_batches = true;
    blocks.put("key", "value").await.unwrap();
    let result = blocks.get("key").await;
    assert!(matches!(result, Err(GetError::Call(CallError::Untrusted { .. }))), "{result:?}");
    assert_eq!(client.stats().fabric_reads, 0);
    client.close().await.unwrap();
}

/// The system's clock, and what was added.
#[derive(Debug, Default)]
struct Pushed(AtomicU64);

impl Clock for Pushed {
    fn wall_ms(&self) -> u64 {
        SystemClock.wall_ms()
    }
    fn boot(&self) -> Duration {
        SystemClock.boot() + Duration::from_millis(self.0.load(Ordering::Relaxed))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_descriptor_is_not_used_after_its_lease_also_if_the_machine_slept() {
    let clock = Arc::new(Pushed::default());
    let double = Double::start(2).await;
    let client = double.connect(Options { clock: Arc::clone(&clock) as Arc<dyn Clock>, ..Options::default() }).await;
    let blocks = client.create_namespace(NamespaceSpec::cache("kv")).await.unwrap();
    blocks.put("key", "value").await.unwrap();
    let resolves = || client.stats().control_calls.get("Resolve").copied().unwrap_or(0);
    blocks.get("key").await.unwrap().unwrap();
    blocks.get("key").await.unwrap().unwrap();
    assert_eq!(resolves(), 1);
    clock.0.store(6_000, Ordering::Relaxed);
    blocks.get("key").await.unwrap().unwrap();
    assert_eq!(resolves(), 2);
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_lease_nothing_is_read() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    blocks.put("key", "value").await.unwrap();
    double.faults().lease_ms = Some(0);
    let result = blocks.get("key").await;
    assert!(matches!(result, Err(GetError::Deadline { .. })), "{result:?}");
    assert_eq!(client.stats().fabric_reads, 0);
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_higher_revocation_number_in_a_resolve_voids_all_that_was_proven_before() {
    let (double, client, _) = cluster(2, Options::default()).await;
    let mut spec = NamespaceSpec::cache("lone");
    spec.copies = 1;
    let lone = client.create_namespace(spec).await.unwrap();
    for number in 0..3 {
        lone.put(format!("key-{number}"), content(number, 3000)).await.unwrap();
    }
    lone.get("key-0").await.unwrap().unwrap();
    // The one holder of it is not to be believed any more, and all that the client hears of that is a number.
    double.revoke(4, &[0]);
    double.faults().revocations = 4;
    lone.get("key-0").await.unwrap().unwrap();
    let untrusted = |result: Result<Option<_>, GetError>| {
        assert!(matches!(result, Err(GetError::Call(CallError::Untrusted { .. }))), "{result:?}");
    };
    untrusted(lone.get("key-1").await);
    let reads = client.stats().fabric_reads;
    untrusted(lone.get("key-0").await);
    assert_eq!(client.stats().fabric_reads, reads, "nothing was read through what a revoked key signed");
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revocation_list_that_nobody_shows_voids_what_comes_with_its_number() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    blocks.put("key", "value").await.unwrap();
    double.faults().revocations = 7;
    let result = blocks.get("key").await;
    assert!(matches!(result, Err(GetError::Call(CallError::Untrusted { .. }))), "{result:?}");
    assert_eq!(client.stats().fabric_reads, 0);
    // Once it is shown, its signer's word counts again for all whom it does not name.
    double.revoke(7, &[1]);
    assert!(blocks.get("key").await.unwrap().unwrap().bytes == b"value"[..]);
    client.close().await.unwrap();
}
