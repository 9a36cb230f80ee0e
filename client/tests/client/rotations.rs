//! Regions whose read key changes under their readers, and nodes whose place another takes.

use crate::{
    cluster, content,
    double::Double,
    into::{WAYS, Way},
};
use quarry_client::{CallError, Client, GetError, Key, Namespace, NamespaceSpec, Options};
use std::time::Duration;
use tokio::time::Instant;

const BYTES: usize = 3_000;

/// Values of one copy each.
async fn lone_values() -> (Double, Client, Namespace, Vec<Key>) {
    let double = Double::start(1).await;
    let client = double.connect(Options::default()).await;
    let mut spec = NamespaceSpec::cache("lone");
    spec.copies = 1;
    let blocks = client.create_namespace(spec).await.unwrap();
    let keys: Vec<Key> = (0..4).map(|number| Key::new(format!("key-{number}")).unwrap()).collect();
    for (number, key) in (0..).zip(&keys) {
        blocks.put(key.as_bytes(), content(number, BYTES)).await.unwrap();
    }
    (double, client, blocks, keys)
}

async fn read_all(way: Way, client: &Client, blocks: &Namespace, keys: &[Key]) {
    for (number, value) in (0..).zip(way.read(client, blocks, keys).await) {
        let value = value.unwrap_or_else(|wrong| panic!("{way:?}: {wrong}"));
        assert!(value.unwrap() == content(number, BYTES), "{way:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_refused_for_its_key_goes_on_with_the_new_one_through_every_call() {
    let (double, client, blocks, keys) = lone_values().await;
    for way in WAYS {
        // With a lease that still holds and a record that does not, although no newer feed number was heard of.
        read_all(way, &client, &blocks, &keys).await;
        double.rotate(0);
        read_all(way, &client, &blocks, &keys).await;
    }
    let asked = client.stats().control_calls.get("RegionRecord").copied().unwrap_or(0);
    assert_eq!(asked, WAYS.len() as u64, "each new key is asked for once");
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_wait_within_their_deadline_for_a_key_that_is_being_changed() {
    let (double, client, blocks, keys) = lone_values().await;
    read_all(Way::Get, &client, &blocks, &keys).await;
    double.rotate(0);
    double.faults().changing = 8;
    read_all(Way::GetMany, &client, &blocks, &keys).await;
    assert_eq!(double.faults().changing, 0, "they asked until it was there");

    let short = Options { timeout: Duration::from_millis(600), ..Options::default() };
    let hasty = double.connect(short).await;
    let theirs = hasty.namespace("lone").await.unwrap();
    read_all(Way::Get, &hasty, &theirs, &keys).await;
    double.rotate(0);
    double.faults().changing = u32::MAX;
    let result = theirs.get(keys[0].as_bytes()).await;
    // Its last look may have ended at the node, at the shard, or between them.
    let ended = |error: &GetError| match error {
        GetError::Unreachable { .. } | GetError::Deadline { .. } => true,
        GetError::Call(error) => matches!(error, CallError::Unreachable { .. } | CallError::Deadline { .. }),
        _ => false,
    };
    assert!(result.as_ref().is_err_and(ended), "{result:?}");
    hasty.close().await.unwrap();
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_of_one_region_share_the_question_for_its_new_key() {
    let (double, client, blocks, keys) = lone_values().await;
    read_all(Way::Get, &client, &blocks, &keys).await;
    double.rotate(0);
    double.faults().changing = 3;
    let readers = (0..32).map(|number: usize| {
        let (blocks, key) = (blocks.clone(), keys[number % keys.len()].clone());
        tokio::spawn(async move { blocks.get(key.as_bytes()).await.unwrap().unwrap() })
    });
    for reader in readers.collect::<Vec<_>>() {
        reader.await.unwrap();
    }
    let asked = client.stats().control_calls["RegionRecord"];
    assert!((3..16).contains(&asked), "{asked} questions of 32 readers");
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_at_another_node_in_the_place_of_its_own_is_refused_and_reads_the_other_copy() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    let keys: Vec<Key> = (0..20).map(|number| Key::new(format!("key-{number}")).unwrap()).collect();
    for (number, key) in (0..).zip(&keys) {
        blocks.put(key.as_bytes(), content(number, BYTES)).await.unwrap();
    }
    read_all(Way::Get, &client, &blocks, &keys).await;
    double.replace(0);
    for way in WAYS {
        read_all(way, &client, &blocks, &keys).await;
    }
    assert_eq!(client.stats().damaged_copies, 0, "no byte of the other node was read");

    // The only copy is not there: said so, and not waited for.
    let (double, lone, blocks, keys) = lone_values().await;
    read_all(Way::Get, &lone, &blocks, &keys).await;
    double.replace(0);
    let began = Instant::now();
    let result = blocks.get(keys[0].as_bytes()).await;
    assert!(matches!(result, Err(GetError::Unreachable { .. })), "{result:?}");
    assert!(began.elapsed() < Options::default().timeout, "it was waited for in vain");
    lone.close().await.unwrap();
    client.close().await.unwrap();
}
