//! Single values: written, replaced, deleted, read back, and the limits of keys and values.

use quarry_client::{CallError, Client, DeleteError, GetError, Namespace, Options, PutError, PutMode, Refusal};
use quarry_tests::{
    Seed, TestCluster,
    calls::Turned,
    cluster::{create_namespace, fresh_name},
    raw::{Granted, Placed, Wish},
    seed::pattern,
    shared, soon,
};
use quarry_wire::{
    frame::header_bytes,
    limits::{EXTENT_BYTES, KEY_BYTES_MAX, extent_bytes},
};
use std::time::Duration;
use tokio::time::Instant;

#[tokio::test]
async fn a_value_is_read_back_as_it_was_written_from_two_copies() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let raw = cluster.raw().await;
    let version = blocks.put("greeting", "hello").await.unwrap();
    let value = blocks.get("greeting").await.unwrap().unwrap();
    assert_eq!((&value.bytes[..], value.version), (&b"hello"[..], version));
    let mut nodes: Vec<u64> = Vec::new();
    for copy in raw.copies(blocks.info().id, "greeting").await {
        let record = raw.record(copy.region).await;
        let frame = raw.read(&record, copy.offset, copy.frame_bytes).await.unwrap();
        assert_eq!(frame[header_bytes("greeting".len())..], *b"hello");
        nodes.push(copy.region.node.0);
    }
    nodes.sort_unstable();
    assert_eq!(nodes, [101, 102]);
}

#[tokio::test]
async fn a_key_that_was_never_written_is_no_error() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    assert!(blocks.get("nothing").await.unwrap().is_none());
}

#[tokio::test]
async fn a_replaced_value_is_read_in_its_new_version() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let first = blocks.put("key", "old").await.unwrap();
    for round in 0..5_u8 {
        let second = blocks.put_with("key", vec![round; 1_000], PutMode::Replace).await.unwrap();
        assert!(second > first);
        let value = blocks.get("key").await.unwrap().unwrap();
        assert_eq!((&value.bytes[..], value.version), (&[round; 1_000][..], second), "own writes are seen at once");
    }
}

#[tokio::test]
async fn creating_a_key_twice_tells_the_version_that_is_there() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let first = blocks.put("key", "one").await.unwrap();
    match blocks.put("key", "two").await {
        Err(PutError::Exists { current }) => assert_eq!(current, first),
        other => panic!("{other:?}"),
    }
    assert_eq!(&blocks.get("key").await.unwrap().unwrap().bytes[..], b"one");
}

#[tokio::test]
async fn a_compare_writes_only_over_the_version_that_it_names() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let first = blocks.put_with("key", "one", PutMode::Compare(None)).await.unwrap();
    let second = blocks.put_with("key", "two", PutMode::Compare(Some(first))).await.unwrap();
    match blocks.put_with("key", "three", PutMode::Compare(Some(first))).await {
        Err(PutError::CompareFailed { current }) => assert_eq!(current, Some(second)),
        other => panic!("{other:?}"),
    }
    match blocks.put_with("absent", "three", PutMode::Compare(Some(first))).await {
        Err(PutError::CompareFailed { current }) => assert_eq!(current, None),
        other => panic!("{other:?}"),
    }
    assert_eq!(&blocks.get("key").await.unwrap().unwrap().bytes[..], b"two");
}

#[tokio::test]
async fn values_of_all_sizes_are_read_back() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let mut seed = Seed::draw();
    for length in [0, 1, 63, 64, 65, 4 << 10, 64 << 10, 4 << 20] {
        let bytes = seed.bytes(length);
        let key = format!("value-{length}");
        blocks.put(&key, bytes.clone()).await.unwrap();
        let value = blocks.get(&key).await.unwrap().unwrap();
        assert!(value.bytes == bytes, "{length} bytes came back changed");
    }
}

#[tokio::test]
async fn the_largest_value_fits_and_one_byte_more_is_refused_with_the_limit() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let largest = usize::try_from(EXTENT_BYTES).unwrap() - header_bytes("large".len());
    match blocks.put("large", vec![7; largest + 1]).await {
        Err(PutError::TooLarge { limit, found }) => {
            assert_eq!((limit, found), (largest as u64, largest as u64 + 1));
        }
        other => panic!("{other:?}"),
    }
    assert!(blocks.get("large").await.unwrap().is_none());
    let bytes = pattern(1, largest);
    blocks.put("large", bytes.clone()).await.unwrap();
    let value = blocks.get("large").await.unwrap().unwrap();
    assert!(value.bytes == bytes, "the largest value came back changed");
    blocks.delete("large").await.unwrap();
}

#[tokio::test]
async fn a_value_larger_than_every_extent_of_a_small_cluster_is_refused_with_the_limit_there() {
    let region_bytes = 64 << 20;
    let cluster = TestCluster::start_with(|spec| spec.region_bytes = vec![region_bytes]).await;
    let (_client, blocks) = cluster.namespace().await;
    let largest = usize::try_from(extent_bytes(region_bytes)).unwrap() - header_bytes("large".len());
    match blocks.put("large", vec![7; largest * 2]).await {
        Err(PutError::TooLarge { limit, found }) => {
            // Sizes of slots are rounded: not all of the extent is used.
            assert!(limit <= largest as u64 && limit > largest as u64 * 15 / 16, "{limit} of {largest}");
            assert_eq!(found, largest as u64 * 2);
            blocks.put("large", vec![7; usize::try_from(limit).unwrap()]).await.unwrap();
            let above = blocks.put("larger", vec![7; usize::try_from(limit).unwrap() + 1]).await;
            assert!(matches!(above, Err(PutError::TooLarge { .. })), "{above:?}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn keys_have_1_to_512_bytes_of_any_kind() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let longest: Vec<u8> = (0..=u8::MAX).cycle().take(KEY_BYTES_MAX).collect();
    for key in [&longest[..], &[0], &[0xff, 0xfe]] {
        blocks.put(key, "value").await.unwrap();
        assert_eq!(&blocks.get(key).await.unwrap().unwrap().bytes[..], b"value");
    }
    for (key, length) in [(vec![1; KEY_BYTES_MAX + 1], KEY_BYTES_MAX + 1), (Vec::new(), 0)] {
        assert!(matches!(blocks.put(&key, "value").await, Err(PutError::InvalidKey(wrong)) if wrong.found == length));
        assert!(matches!(blocks.get(&key).await, Err(GetError::InvalidKey(wrong)) if wrong.found == length));
        assert!(matches!(blocks.delete(&key).await, Err(DeleteError::InvalidKey(wrong)) if wrong.found == length));
    }
}

#[tokio::test]
async fn a_deleted_key_is_gone_and_can_be_created_again() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let first = blocks.put("key", "one").await.unwrap();
    assert_eq!(blocks.delete("key").await.unwrap(), Some(first));
    assert!(blocks.get("key").await.unwrap().is_none());
    assert_eq!(blocks.delete("key").await.unwrap(), None);
    let second = blocks.put("key", "two").await.unwrap();
    assert!(second > first);
    assert_eq!(&blocks.get("key").await.unwrap().unwrap().bytes[..], b"two");
}

#[tokio::test]
async fn another_client_reads_what_the_first_wrote_and_fresh_sees_what_a_lease_may_hide() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let other = cluster.client().await;
    let theirs = other.namespace(&blocks.info().name).await.unwrap();
    let first = blocks.put("key", "one").await.unwrap();
    assert_eq!(theirs.get("key").await.unwrap().unwrap().version, first);
    let second = blocks.put_with("key", "two", PutMode::Replace).await.unwrap();
    // Within its lease the other may still see the first version; never anything else, and with fresh() the second at once.
    let cached = theirs.get("key").await.unwrap().unwrap();
    assert!([first, second].contains(&cached.version));
    let fresh = theirs.fresh().get("key").await.unwrap().unwrap();
    assert_eq!((&fresh.bytes[..], fresh.version), (&b"two"[..], second));
    let before = other.stats();
    let again = theirs.get("key").await.unwrap().unwrap();
    assert_eq!(again.version, second);
    let after = other.stats();
    assert_eq!(after.control_calls_total(), before.control_calls_total(), "within the lease no call is made");
    assert_eq!(after.cache_hits, before.cache_hits + 1);
}

#[tokio::test]
async fn a_closed_client_answers_closed_and_the_cluster_forgets_its_grants() {
    let cluster = shared().await;
    let (client, blocks) = cluster.namespace().await;
    blocks.put("key", "value").await.unwrap();
    client.close().await.unwrap();
    assert!(matches!(blocks.get("key").await, Err(GetError::Call(CallError::Closed))));
    assert!(matches!(blocks.put("other", "value").await, Err(PutError::Call(CallError::Closed))));
}

#[tokio::test]
async fn puts_go_on_when_space_of_an_idle_slab_goes_to_another_writer() {
    // An attempt that waits for a lane that is no more takes longer than the put has.
    let options = || Options {
        attempt_timeout: Duration::from_secs(60),
        timeout: Duration::from_secs(20),
        idle: Duration::from_secs(2),
        ..Options::default()
    };
    let cluster = TestCluster::start_with(|spec| spec.region_bytes = vec![64 << 20]).await;
    let client = cluster.client().await;
    let name = create_namespace(&client, 2, None).await.info().name.clone();
    for _ in 0..4 {
        let client = cluster.client_with(options()).await;
        let blocks = client.namespace(&name).await.unwrap();
        let lost = lane_lost_under(&cluster, &client, &blocks).await;
        client.close().await.unwrap();
        if lost {
            return;
        }
    }
    panic!("no lane was closed under a slab in use");
}

/// Two slabs share a lane. The one goes idle, and another writer is armed on its space, while the other slab is written to, and goes on to
/// be. Answers whether its lane was closed, which it is not if the client had taken another in the meantime.
async fn lane_lost_under(cluster: &TestCluster, client: &Client, blocks: &Namespace) -> bool {
    let raw = cluster.raw().await;
    let namespace = blocks.info().id;
    let key = fresh_name("small");
    blocks.put(&key, vec![1; 4 << 10]).await.unwrap();
    let small = raw.copies(namespace, &key).await;
    let mut written = Instant::now();
    blocks.put_with("large", vec![0; 64 << 10], PutMode::Replace).await.unwrap();
    let mut taken: Vec<Granted> = Vec::new();
    soon("another writer has the idle slab's space", async || {
        // Often enough for its slab to stay open, and seldom enough for its slots to last.
        if written.elapsed() > Duration::from_millis(500) {
            written = Instant::now();
            blocks.put_with("large", vec![0; 64 << 10], PutMode::Replace).await.unwrap();
        }
        if !client.stats().control_calls.contains_key("Seal") {
            return None;
        }
        let wish = Wish { namespace, slot_size: 4096, slots: 4096, ttl: Duration::from_secs(20), avoid: Vec::new() };
        let granted = match raw.grant(&wish).await {
            Ok(granted) => granted,
            Err(Turned::Refused(Refusal::NoSpace(_))) => return None,
            Err(other) => panic!("{other:?}"),
        };
        let overlaps = granted.grant.holders.iter().any(|holder| {
            let span = granted.grant.span(holder);
            let behind = |copy: &&Placed| copy.region == holder.region && span.contains(&(copy.offset + (8 << 10)));
            small.iter().find(behind).is_some()
        });
        taken.push(granted);
        overlaps.then_some(())
    })
    .await;
    let overlapping = taken.pop().unwrap();
    raw.arm_all(&overlapping).await;
    // Room for the slab that comes next.
    for granted in &taken {
        raw.seal(granted, 0).await.unwrap();
    }
    for round in 1..4_u8 {
        let bytes = vec![round; 64 << 10];
        blocks.put_with("large", bytes.clone(), PutMode::Replace).await.unwrap();
        assert!(blocks.get("large").await.unwrap().unwrap().bytes == bytes);
    }
    raw.seal(&overlapping, 0).await.unwrap();
    client.stats().lost_lane_writes > 0
}
