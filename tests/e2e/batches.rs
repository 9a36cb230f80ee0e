//! Many values in one call: a result per item, in order.

use quarry_client::{PutError, PutItem, PutMode};
use quarry_tests::{Seed, shared};
use quarry_wire::{key::Key, limits::EXTENT_BYTES};

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

#[tokio::test]
async fn five_hundred_values_of_mixed_sizes_come_back_in_order_with_few_calls() {
    let cluster = shared().await;
    let (client, blocks) = cluster.namespace().await;
    let mut seed = Seed::draw();
    let values: Vec<(Key, Vec<u8>)> = (0..500)
        .map(|index| {
            let length = match seed.below(10) {
                0 => 0,
                1..=5 => seed.below(8 << 10),
                6..=8 => seed.below(128 << 10),
                _ => seed.below(1 << 20),
            };
            (key(&format!("block-{index}")), seed.bytes(length))
        })
        .collect();
    let items = values.iter().map(|(key, bytes)| PutItem::create(key.clone(), bytes.clone())).collect();
    let versions: Vec<_> = blocks.put_many(items).await.into_iter().map(|result| result.unwrap()).collect();
    assert_eq!(versions.len(), 500);
    let reader = cluster.client().await;
    let theirs = reader.namespace(&blocks.info().name).await.unwrap();
    // Asked for in another order, with some that are not there.
    let mut order: Vec<usize> = (0..600).collect();
    for place in (1..order.len()).rev() {
        order.swap(place, seed.below(place + 1));
    }
    let keys: Vec<Key> = order.iter().map(|index| key(&format!("block-{index}"))).collect();
    let found = theirs.get_many(&keys).await;
    assert_eq!(found.len(), keys.len());
    for (index, result) in order.iter().zip(found) {
        let value = result.unwrap();
        match values.get(*index) {
            Some((_, expected)) => {
                let value = value.unwrap();
                assert!(value.bytes == *expected, "block-{index} came back changed");
                assert_eq!(value.version, versions[*index]);
            }
            None => assert!(value.is_none()),
        }
    }
    let calls = reader.stats().control_calls.get("Resolve").copied().unwrap_or(0);
    assert!((1..=10).contains(&calls), "600 keys took {calls} resolves");
    client.close().await.unwrap();
}

#[tokio::test]
async fn one_bad_item_does_not_spoil_its_batch() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let first = blocks.put("there", "already").await.unwrap();
    let too_large = vec![0; usize::try_from(EXTENT_BYTES).unwrap()];
    let items = vec![
        PutItem::create(key("a"), "one"),
        PutItem::create(key("there"), "again"),
        PutItem::create(key("huge"), too_large),
        PutItem { mode: PutMode::Compare(Some(first)), ..PutItem::create(key("absent"), "two") },
        PutItem::create(key("b"), "three"),
        PutItem { mode: PutMode::Replace, ..PutItem::create(key("c"), "four") },
    ];
    let results = blocks.put_many(items).await;
    assert!(
        matches!(&results[..], [
        Ok(_),
        Err(PutError::Exists { current }),
        Err(PutError::TooLarge { .. }),
        Err(PutError::CompareFailed { current: None }),
        Ok(_),
        Ok(_),
    ] if *current == first),
        "{results:?}"
    );
    for (name, expected) in [("a", &b"one"[..]), ("there", b"already"), ("b", b"three"), ("c", b"four")] {
        assert_eq!(&blocks.get(name).await.unwrap().unwrap().bytes[..], expected, "{name}");
    }
    assert!(blocks.get("huge").await.unwrap().is_none());
    assert!(blocks.get("absent").await.unwrap().is_none());
}

#[tokio::test]
async fn the_same_key_twice_in_a_batch_is_created_once() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let results = blocks.put_many(vec![PutItem::create(key("k"), "one"), PutItem::create(key("k"), "two")]).await;
    let created: Vec<_> = results.iter().filter_map(|result| result.as_ref().ok()).collect();
    let [version] = created[..] else { panic!("{results:?}") };
    assert!(results.iter().any(|result| matches!(result, Err(PutError::Exists { current }) if current == version)));
    assert_eq!(blocks.get("k").await.unwrap().unwrap().version, *version);
}

#[tokio::test]
async fn many_deletes_answer_each() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let items = (0..100).map(|index| PutItem::create(key(&format!("k{index}")), vec![1; 100])).collect();
    let versions: Vec<_> = blocks.put_many(items).await.into_iter().map(|result| result.unwrap()).collect();
    let keys: Vec<Key> = (0..120).map(|index| key(&format!("k{index}"))).collect();
    let deleted = blocks.delete_many(&keys).await;
    assert_eq!(deleted.len(), 120);
    for (index, result) in deleted.into_iter().enumerate() {
        assert_eq!(result.unwrap(), versions.get(index).copied());
    }
    assert!(blocks.get_many(&keys).await.into_iter().all(|result| result.unwrap().is_none()));
}
