//! Which keys are there, without reading them.

use crate::{cluster, content};
use quarry_client::{CallError, GetError, Key, NodeId, Options, Page, PutItem, PutMode};
use std::time::Duration;

fn keys(names: &[&str]) -> Vec<Key> {
    names.iter().map(|name| Key::new(name).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leading_run_ends_at_the_first_key_that_is_not_there_on_whatever_shard() {
    let (_double, client, blocks) = cluster(2, Options::default()).await;
    let all: Vec<Key> = (0..300).map(|number| Key::new(format!("block-{number}")).unwrap()).collect();
    let put = blocks.put_many(all.iter().map(|key| PutItem::create(key.clone(), "x")).collect()).await;
    assert!(put.iter().all(Result::is_ok));
    let before = client.stats();
    assert_eq!(blocks.exists_many(&all).await.unwrap(), 300);
    let stats = client.stats();
    // Slabs that are full are being sealed meanwhile, so not all calls are ours.
    assert_eq!(stats.control_calls["Exists"], 2, "one call per shard");
    assert_eq!(stats.fabric_reads, before.fabric_reads);
    for gone in [299, 121, 120, 7, 0] {
        blocks.delete(all[gone].as_bytes()).await.unwrap();
        assert_eq!(blocks.exists_many(&all).await.unwrap(), gone);
        assert!(!blocks.exists(all[gone].as_bytes()).await.unwrap());
    }
    assert!(blocks.exists("block-1").await.unwrap());
    assert_eq!(blocks.exists_many(&[]).await.unwrap(), 0);
    assert!(matches!(blocks.exists("").await, Err(GetError::InvalidKey(_))));
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_answers_what_is_so_now_and_not_what_is_leased() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    let other = double.connect(Options::default()).await;
    let theirs = other.namespace("kv").await.unwrap();
    let first = blocks.put("key", content(1, 100)).await.unwrap();
    theirs.get("key").await.unwrap().unwrap();
    let stat = theirs.stat("key").await.unwrap().unwrap();
    assert_eq!((stat.version, stat.payload_bytes, stat.payload_crc), (first, 100, crc32c::crc32c(&content(1, 100))));
    let nodes: Vec<NodeId> = stat.copies.iter().map(|copy| copy.node).collect();
    assert_eq!(nodes, [NodeId(11), NodeId(12)]);
    let second = blocks.put_with("key", content(2, 70), PutMode::Replace).await.unwrap();
    let stat = theirs.stat("key").await.unwrap().unwrap();
    assert_eq!((stat.version, stat.payload_bytes), (second, 70));
    blocks.delete("key").await.unwrap();
    assert!(!theirs.exists("key").await.unwrap());
    assert_eq!(theirs.stat("key").await.unwrap(), None);
    assert_eq!(theirs.list("", None, 10).await.unwrap(), Page::default());
    assert!(theirs.get("key").await.unwrap().is_some(), "its lease goes on, probes took nothing from it");
    other.close().await.unwrap();
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_give_every_key_with_the_prefix_once_and_in_order() {
    let (_double, client, blocks) = cluster(2, Options::default()).await;
    let mut names: Vec<String> = (0..137).map(|number| format!("a/{number}")).collect();
    let others = ["b".to_owned(), "A".to_owned()];
    let items = names.iter().chain(&others).map(|name| PutItem::create(Key::new(name).unwrap(), name.clone()));
    assert!(blocks.put_many(items.collect()).await.iter().all(Result::is_ok));
    names.sort();
    for limit in [1, 10, 1000] {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = blocks.list("a/", after.as_ref(), limit).await.unwrap();
            assert!(page.entries.len() <= limit);
            for entry in page.entries {
                assert_eq!((entry.payload_bytes, entry.copies), (entry.key.as_bytes().len() as u64, 2));
                found.push(entry.key.to_string());
            }
            after = page.after;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(found, names, "pages of {limit}");
    }
    assert_eq!(blocks.list("", None, 1000).await.unwrap().entries.len(), 139);
    assert_eq!(blocks.list("c", None, 1000).await.unwrap(), Page::default());
    let behind = Key::new("a/99").unwrap();
    assert_eq!(blocks.list("", Some(&behind), 1000).await.unwrap().entries[0].key, Key::new("b").unwrap());
    assert!(matches!(blocks.list([0; 513], None, 1).await, Err(GetError::InvalidKey(_))));
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_say_less_than_was_asked_are_not_believed() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    blocks.put("key", "value").await.unwrap();
    double.faults().short_answers = true;
    let run = blocks.exists_many(&keys(&["key"])).await;
    assert!(matches!(run, Err(GetError::Call(CallError::Untrusted { .. }))), "{run:?}");
    let page = blocks.list("", None, 10).await;
    assert!(matches!(page, Err(GetError::Call(CallError::Untrusted { .. }))), "{page:?}");
    double.faults().short_answers = false;
    double.faults().forge_batches = true;
    blocks.put("forged", "value").await.unwrap();
    let stat = blocks.stat("forged").await;
    assert!(matches!(stat, Err(GetError::Call(CallError::Untrusted { .. }))), "{stat:?}");
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_that_nobody_answers_ends_at_its_deadline() {
    let short = Options { timeout: Duration::from_secs(2), ..Options::default() };
    let (double, _client, blocks) = cluster(2, short).await;
    double.faults().silent = true;
    let (exists, stat, list) = tokio::join!(blocks.exists("key"), blocks.stat("key"), blocks.list("", None, 1));
    assert!(matches!(exists, Err(GetError::Call(_) | GetError::Deadline { .. })), "{exists:?}");
    assert!(matches!(stat, Err(GetError::Call(_) | GetError::Deadline { .. })), "{stat:?}");
    assert!(matches!(list, Err(GetError::Call(_) | GetError::Deadline { .. })), "{list:?}");
}
