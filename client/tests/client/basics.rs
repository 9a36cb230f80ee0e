//! What a client is for.

use crate::{cluster, content};
use quarry_client::{
    CallError, DeleteError, GetError, Key, NamespaceError, NamespaceSpec, Options, PutError, PutItem, PutMode,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_value_that_was_put_is_got_by_another_client() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    let bytes = content(1, 100_000);
    let version = blocks.put("key", bytes.clone()).await.unwrap();
    assert_eq!(double.copies("key"), 2);
    let other = double.connect(Options::default()).await;
    let value = other.namespace("kv").await.unwrap().get("key").await.unwrap().unwrap();
    assert_eq!((value.version, &value.bytes[..]), (version, &bytes[..]));
    assert_eq!(blocks.get("another key").await.unwrap(), None);
    let stats = client.stats();
    assert_eq!((stats.fabric_writes, stats.fabric_failures), (2, 0));
    assert!(stats.fabric_written_bytes >= 2 * 100_000);
    other.close().await.unwrap();
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn values_of_every_size_come_back_as_they_were() {
    let (_double, client, blocks) = cluster(2, Options::default()).await;
    let sizes = [0, 1, 63, 64, 65, 4096, 65_535, 65_536, 1 << 20, (3 << 20) + 17, 20 << 20];
    for (seed, size) in sizes.into_iter().enumerate() {
        let key = format!("{}-{size}", "k".repeat(1 + seed * 40));
        let bytes = content(seed as u64, size);
        blocks.put(&key, bytes.clone()).await.unwrap();
        assert!(blocks.get(&key).await.unwrap().unwrap().bytes == bytes, "{size} bytes came back changed");
    }
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_blocks_need_few_control_calls_and_come_back_without_any_while_leased() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    let keys: Vec<Key> = (0..1000).map(|number| Key::new(format!("block-{number}")).unwrap()).collect();
    let items = keys.iter().zip(0..).map(|(key, seed)| PutItem::create(key.clone(), content(seed, 65_536))).collect();
    let before = client.stats().control_calls_total();
    for result in blocks.put_many(items).await {
        result.unwrap();
    }
    let calls = client.stats().control_calls_total() - before;
    assert!(calls <= 50, "{calls} calls for 1000 blocks");
    assert!(double.grants().iter().all(|slots| *slots > 100), "what is needed is asked for at once");
    for _ in 0..2 {
        for (value, seed) in blocks.get_many(&keys).await.into_iter().zip(0..) {
            assert!(value.unwrap().unwrap().bytes == content(seed, 65_536));
        }
    }
    let stats = client.stats();
    assert_eq!(stats.control_calls["Resolve"], 2, "one per shard, none while leased");
    assert_eq!(stats.cache_hits, 1000);
    assert!(stats.fabric_reads < 400, "{} reads for 2000 blocks: neighbours go together", stats.fabric_reads);
    assert!(stats.fabric_writes < 100, "{} writes for 2000 frames: neighbours go together", stats.fabric_writes);
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn modes_decide_whether_a_put_takes_effect() {
    let (_double, client, blocks) = cluster(2, Options::default()).await;
    let first = blocks.put("key", "one").await.unwrap();
    assert!(matches!(blocks.put("key", "two").await, Err(PutError::Exists { current }) if current == first));
    let second = blocks.put_with("key", "two", PutMode::Replace).await.unwrap();
    assert!(second > first);
    let wrong = blocks.put_with("key", "three", PutMode::Compare(Some(first))).await;
    assert!(matches!(wrong, Err(PutError::CompareFailed { current: Some(current) }) if current == second));
    blocks.put_with("key", "three", PutMode::Compare(Some(second))).await.unwrap();
    blocks.put_with("new", "one", PutMode::Compare(None)).await.unwrap();
    assert_eq!(&blocks.get("key").await.unwrap().unwrap().bytes[..], b"three");
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_bad_item_of_a_batch_does_not_touch_the_others() {
    let (_double, client, blocks) = cluster(2, Options::default()).await;
    blocks.put("taken", "old").await.unwrap();
    let key = |name: &str| Key::new(name).unwrap();
    let items = vec![
        PutItem::create(key("one"), "1"),
        PutItem::create(key("taken"), "2"),
        PutItem::create(key("huge"), vec![0; (64 << 20) + 1]),
        PutItem::create(key("three"), "3"),
    ];
    let results = blocks.put_many(items).await;
    assert!(results[0].is_ok() && results[3].is_ok());
    assert!(matches!(results[1], Err(PutError::Exists { .. })));
    assert!(matches!(results[2], Err(PutError::TooLarge { found, .. }) if found == (64 << 20) + 1));
    assert!(matches!(blocks.put("", "x").await, Err(PutError::InvalidKey(_))));
    assert!(matches!(blocks.get([0; 513]).await, Err(GetError::InvalidKey(_))));
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn own_writes_and_deletes_are_seen_at_once() {
    let (_double, client, blocks) = cluster(2, Options::default()).await;
    for round in 0..20_u32 {
        blocks.put_with("key", round.to_le_bytes().to_vec(), PutMode::Replace).await.unwrap();
        assert_eq!(blocks.get("key").await.unwrap().unwrap().bytes[..], round.to_le_bytes());
    }
    let current = blocks.get("key").await.unwrap().unwrap().version;
    assert_eq!(blocks.delete("key").await.unwrap(), Some(current));
    assert_eq!(blocks.get("key").await.unwrap(), None);
    assert_eq!(blocks.delete("key").await.unwrap(), None);
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn others_writes_are_seen_by_fresh_gets() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    let other = double.connect(Options::default()).await;
    let theirs = other.namespace("kv").await.unwrap();
    blocks.put("key", "one").await.unwrap();
    assert_eq!(&theirs.get("key").await.unwrap().unwrap().bytes[..], b"one");
    blocks.put_with("key", "two", PutMode::Replace).await.unwrap();
    assert_eq!(&theirs.get("key").await.unwrap().unwrap().bytes[..], b"one", "leased");
    assert_eq!(&theirs.fresh().get("key").await.unwrap().unwrap().bytes[..], b"two");
    assert_eq!(&theirs.get("key").await.unwrap().unwrap().bytes[..], b"two", "what a fresh get found is kept");
    other.close().await.unwrap();
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn many_deletes_answer_in_order() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    let keys: Vec<Key> = (0..700).map(|number| Key::new(format!("{number}-{}", "x".repeat(100))).unwrap()).collect();
    let even = keys.iter().step_by(2);
    let put = blocks.put_many(even.map(|key| PutItem::create(key.clone(), "x")).collect()).await;
    assert!(put.iter().all(Result::is_ok));
    let deleted = blocks.delete_many(&keys).await;
    for (number, deleted) in deleted.into_iter().enumerate() {
        assert_eq!(deleted.unwrap(), (number % 2 == 0).then(|| *put[number / 2].as_ref().unwrap()));
    }
    assert_eq!(double.keys(), 0);
    let version = blocks.put("key", "x").await.unwrap();
    let other = blocks.put("other", "x").await.unwrap();
    let wrong = blocks.delete_with("key", Some(other)).await;
    assert!(matches!(wrong, Err(DeleteError::CompareFailed { current }) if current == version));
    assert_eq!(blocks.delete_with("key", Some(version)).await.unwrap(), Some(version));
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn puts_at_the_same_time_share_commits() {
    let (_double, client, blocks) = cluster(2, Options::default()).await;
    blocks.put("first", "x").await.unwrap();
    let before = client.stats().control_calls["Commit"];
    let puts = (0..200).map(|number| blocks.put(format!("{{tag}}{number}"), content(number, 1000)));
    for result in futures::future::join_all(puts).await {
        result.unwrap();
    }
    let commits = client.stats().control_calls["Commit"] - before;
    assert!(commits < 60, "{commits} commits for 200 puts");
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn namespaces_are_made_once_and_listed() {
    let (_double, client, blocks) = cluster(2, Options::default()).await;
    let again = client.create_namespace(NamespaceSpec::cache("kv")).await;
    assert!(matches!(again, Err(NamespaceError::Exists { name }) if name == "kv"));
    let unknown = client.namespace("none").await;
    assert!(matches!(unknown, Err(NamespaceError::Call(CallError::UnknownNamespace { .. }))));
    let names: Vec<String> = client.list_namespaces().await.unwrap().into_iter().map(|info| info.name).collect();
    assert_eq!(names, ["kv"]);
    assert_eq!((blocks.info().copies, blocks.info().least), (2, 2));
    client.close().await.unwrap();
}
