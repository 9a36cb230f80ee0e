//! Frames that are filled in place.

use crate::{
    cluster, content,
    double::{Double, outcome},
};
use quarry_client::{Clock as _, HybridClock, Key, NamespaceSpec, Options, PutError, PutMode, SystemClock};
use quarry_proto::v1::commit_outcome::Code;
use std::time::Duration;

fn keys(count: usize) -> Vec<Key> {
    (0..count).map(|number| Key::new(format!("{{tag}}{number}")).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_filled_in_place_come_back_and_neighbours_leave_in_one_operation() {
    let (_double, client, blocks) = cluster(2, Options::default()).await;
    let keys = keys(100);
    let wanted: Vec<(Key, usize)> = keys.iter().map(|key| (key.clone(), 4096)).collect();
    let mut frames = blocks.reserve_many(&wanted).await.unwrap();
    assert_eq!((frames.len(), frames.key(7)), (100, &keys[7]));
    for (index, seed) in (0..frames.len()).zip(0..) {
        frames.payload_mut(index).copy_from_slice(&content(seed, 4096));
        assert_eq!(frames.payload(index), content(seed, 4096));
    }
    let versions = frames.put(PutMode::Create).await;
    let stats = client.stats();
    assert_eq!((stats.fabric_writes, stats.control_calls["Commit"]), (2, 1), "one write per copy, one commit");
    for ((value, version), seed) in blocks.get_many(&keys).await.into_iter().zip(versions).zip(0..) {
        let value = value.unwrap().unwrap();
        assert_eq!((value.version, &value.bytes[..]), (version.unwrap(), &content(seed, 4096)[..]));
    }
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_of_all_sizes_are_reserved_together_and_answer_in_their_order() {
    let (_double, client, blocks) = cluster(2, Options::default()).await;
    let sizes = [4096, 0, 70_000, 1, 4096, (3 << 20) + 5, 4095, 2 << 20, 70_000, 0];
    let wanted: Vec<(Key, usize)> =
        sizes.iter().enumerate().map(|(number, size)| (Key::new(format!("key-{number}")).unwrap(), *size)).collect();
    let mut frames = blocks.reserve_many(&wanted).await.unwrap();
    for (index, seed) in (0..frames.len()).zip(0..) {
        frames.payload_mut(index).copy_from_slice(&content(seed, sizes[index]));
    }
    blocks.put("key-4", "taken").await.unwrap();
    for (index, result) in frames.put(PutMode::Create).await.into_iter().enumerate() {
        assert_eq!(matches!(result, Err(PutError::Exists { .. })), index == 4, "{index}: {result:?}");
    }
    for ((index, (key, size)), seed) in wanted.iter().enumerate().zip(0..) {
        let expected = if index == 4 { b"taken".to_vec() } else { content(seed, *size) };
        assert!(blocks.get(key).await.unwrap().unwrap().bytes == expected, "{index} came back changed");
    }
    assert!(blocks.reserve_many(&[]).await.unwrap().put(PutMode::Create).await.is_empty());
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reserved_frame_that_is_written_again_needs_no_second_filling() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    for (round, code) in [Code::GrantExpired, Code::Sealed, Code::NotEnoughHolders].into_iter().enumerate() {
        double.faults().outcomes.push_back(outcome(code, None));
        let key = format!("{code:?}");
        let mut frame = blocks.reserve(&key, 100_000).await.unwrap();
        frame.copy_from_slice(&content(round as u64, 100_000));
        let version = frame.put(PutMode::Create).await.unwrap();
        let value = blocks.get(&key).await.unwrap().unwrap();
        assert!(value.version == version && value.bytes == content(round as u64, 100_000), "{code:?}");
    }
    blocks.put("key", "one").await.unwrap();
    let ahead = HybridClock::at(SystemClock.wall_ms() + 60_000);
    double.advance("key", ahead);
    let mut frame = blocks.reserve("key", 5000).await.unwrap();
    frame.copy_from_slice(&content(9, 5000));
    let version = frame.put(PutMode::Replace).await.unwrap();
    assert!(version.clock > ahead, "written again under a later version");
    let value = blocks.fresh().get("key").await.unwrap().unwrap();
    assert!(value.version == version && value.bytes == content(9, 5000));
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn reserved_frames_take_their_place_in_the_window_until_they_are_dropped() {
    let double = Double::start(2).await;
    let options = Options { window_bytes: 64 << 20, timeout: Duration::from_millis(300), ..Options::default() };
    let client = double.connect(options).await;
    let blocks = client.create_namespace(NamespaceSpec::cache("kv")).await.unwrap();
    let held = blocks.reserve("one", 40 << 20).await.unwrap();
    let late = blocks.reserve("two", 40 << 20).await;
    assert!(matches!(late, Err(PutError::Deadline { .. })), "{late:?}");
    drop(held);
    let frame = blocks.reserve("two", 40 << 20).await.unwrap();
    assert_eq!(frame.len(), 40 << 20);
    let wanted: Vec<(Key, usize)> = keys(2).into_iter().map(|key| (key, 40 << 20)).collect();
    let never = blocks.reserve_many(&wanted).await.unwrap_err();
    assert!(matches!(never, PutError::WindowExceeded { limit: 0x400_0000, found } if found > 80 << 20), "{never}");
    assert!(matches!(blocks.reserve("huge", 65 << 20).await, Err(PutError::TooLarge { .. })));
    drop(frame);
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_call_is_committed_slab_by_slab() {
    let double = Double::start(1).await;
    let client = double.connect(Options::default()).await;
    let spec = NamespaceSpec { copies: 1, ..NamespaceSpec::cache("one") };
    let blocks = client.create_namespace(spec).await.unwrap();
    let items = keys(100).into_iter().map(|key| quarry_client::PutItem::create(key, vec![7; 1 << 20])).collect();
    for result in blocks.put_many(items).await {
        result.unwrap();
    }
    let stats = client.stats();
    assert_eq!(double.grants()[0], 63, "what is needed is asked for at once, as far as it fits in a slab");
    assert!(stats.control_calls["Commit"] <= stats.control_calls["Grant"], "{stats:?}");
    assert!(stats.put_time.fabric > Duration::ZERO && stats.put_time.commit > Duration::ZERO);
    client.close().await.unwrap();
}
