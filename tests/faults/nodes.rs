//! Data nodes that die, come back empty, or stay silent.

use quarry_client::{GetError, Options, PutError, PutItem};
use quarry_tests::{
    Member, Signal, TestCluster, cluster::create_namespace, eventually, seed::pattern, soon, wait::PATIENCE,
};
use quarry_wire::{frame::FrameHeader, key::Key};
use std::time::Duration;

const VALUES: u64 = 150;
const BYTES: usize = 20_000;

fn key(index: u64) -> Key {
    Key::new(format!("key-{index}")).unwrap()
}

async fn fill(blocks: &quarry_client::Namespace) {
    let items = (0..VALUES).map(|index| PutItem::create(key(index), pattern(index, BYTES))).collect();
    for result in blocks.put_many(items).await {
        result.unwrap();
    }
}

/// Reads all values, each of which must be there.
async fn read_all(blocks: &quarry_client::Namespace, when: &str) {
    let keys: Vec<Key> = (0..VALUES).map(key).collect();
    for (index, result) in (0..).zip(blocks.get_many(&keys).await) {
        let value = result.unwrap_or_else(|error| panic!("{when}: {} failed: {error}", keys[0]));
        let value = value.unwrap_or_else(|| panic!("{when}: key-{index} is gone"));
        assert!(value.bytes == pattern(index, BYTES), "{when}: key-{index} came back changed");
    }
}

#[tokio::test]
async fn with_two_copies_a_killed_and_restarted_data_node_costs_no_read_and_its_old_descriptors_yield_nothing() {
    let mut cluster = TestCluster::start().await;
    let (_client, blocks) = cluster.namespace().await;
    fill(&blocks).await;
    let raw = cluster.raw().await;
    // A reader that holds descriptors of both copies, and one copy's place by hand.
    let reader = cluster.client().await;
    let theirs = reader.namespace(&blocks.info().name).await.unwrap();
    read_all(&theirs, "before").await;
    let dead = Member::Data(101);
    let old =
        raw.copies(blocks.info().id, "key-7").await.into_iter().find(|copy| copy.region.node == dead.node()).unwrap();
    let old_record = raw.record(old.region).await;
    let frame = raw.read(&old_record, old.offset, old.frame_bytes).await.unwrap();
    FrameHeader::read_from(&frame).unwrap();

    cluster.kill(dead, Signal::KILL).await.unwrap();
    read_all(&theirs, "while it is down, with cached descriptors").await;
    read_all(&theirs.fresh(), "while it is down").await;

    cluster.restart(dead).unwrap();
    cluster.wait_ready(PATIENCE).await.unwrap();
    let record = soon("its memory is recorded in a new life", async || {
        let record = raw.record(old.region).await;
        (record.incarnation > old.incarnation).then_some(record)
    })
    .await;
    read_all(&theirs, "after it came back empty, with cached descriptors").await;
    read_all(&theirs.fresh(), "after it came back empty").await;
    // The old descriptor: its record's key and endpoint are refused; at its place in the new life lies no frame.
    let by_old_record = raw.read(&old_record, old.offset, old.frame_bytes).await;
    assert!(by_old_record.is_err(), "the old read key still opens something");
    let there = raw.read(&record, old.offset, old.frame_bytes).await.unwrap();
    assert!(FrameHeader::read_from(&there).is_err(), "a frame outlived its memory");
    soon("the shard has dropped the copies of the old life", async || {
        let copies = raw.copies(blocks.info().id, "key-7").await;
        copies.iter().all(|copy| copy.region.node != dead.node()).then_some(())
    })
    .await;
    // Clients go on: new values have two copies again.
    blocks.put("after", "it came back").await.unwrap();
    assert_eq!(raw.copies(blocks.info().id, "after").await.len(), 2);
    assert_eq!(&theirs.get("after").await.unwrap().unwrap().bytes[..], b"it came back");
}

#[tokio::test]
async fn values_with_one_copy_at_a_killed_node_are_missed_and_never_wrong() {
    let mut cluster = TestCluster::start().await;
    let client = cluster.client_with(Options { timeout: Duration::from_secs(5), ..Options::default() }).await;
    let blocks = create_namespace(&client, 1, None).await;
    fill(&blocks).await;
    let holder = cluster.raw().await.copies(blocks.info().id, "key-0").await[0].region.node;
    let dead = Member::Data(holder.0);
    cluster.kill(dead, Signal::KILL).await.unwrap();
    cluster.restart(dead).unwrap();
    cluster.wait_ready(PATIENCE).await.unwrap();
    let keys: Vec<Key> = (0..VALUES).map(key).collect();
    let (kept, lost) = eventually(PATIENCE, "each value is either read or missed", async || {
        let (mut kept, mut lost) = (0, 0);
        for (index, result) in (0..).zip(blocks.get_many(&keys).await) {
            match result {
                Ok(Some(value)) => {
                    assert!(value.bytes == pattern(index, BYTES), "key-{index} came back changed");
                    kept += 1;
                }
                Ok(None) => lost += 1,
                // Until the shard heard that the memory is gone.
                Err(GetError::Unreachable { .. } | GetError::NotResident | GetError::Deadline { .. }) => return None,
                Err(other) => panic!("{other:?}"),
            }
        }
        Some((kept, lost))
    })
    .await;
    assert!(lost > 0 && kept + lost == VALUES, "{kept} kept, {lost} lost");
    // What was lost can be created again.
    let items = (0..VALUES).map(|index| PutItem::create(key(index), pattern(index, BYTES))).collect();
    let mut created = 0;
    for result in blocks.put_many(items).await {
        match result {
            Ok(_) => created += 1,
            Err(PutError::Exists { .. }) => {}
            Err(other) => panic!("{other:?}"),
        }
    }
    assert_eq!(created, lost);
    read_all(&blocks, "after the lost ones were created again").await;
}

#[tokio::test]
async fn a_silent_data_node_costs_no_read_and_writes_that_need_it_fail_typed() {
    let mut cluster = TestCluster::start().await;
    let client = cluster.client_with(Options { attempt_timeout: Duration::from_secs(1), ..Options::default() }).await;
    let blocks = create_namespace(&client, 2, None).await;
    let one_will_do = create_namespace(&client, 2, Some(1)).await;
    fill(&blocks).await;
    let silent = Member::Data(102);
    cluster.pause(silent).await.unwrap();
    read_all(&blocks, "while one node is silent").await;
    match blocks.put("needs-both", "value").await {
        Err(PutError::TooFewHolders { needed: 2, .. } | PutError::Deadline { .. } | PutError::NoSpace { .. }) => {}
        other => panic!("{other:?}"),
    }
    one_will_do.put("needs-one", "value").await.unwrap();
    assert_eq!(&one_will_do.get("needs-one").await.unwrap().unwrap().bytes[..], b"value");
    cluster.resume(silent).await.unwrap();
    cluster.wait_ready(PATIENCE).await.unwrap();
    eventually(PATIENCE, "writes with two copies go on", async || match blocks.put("needs-both", "value").await {
        Ok(_) | Err(PutError::Exists { .. }) => Some(()),
        Err(_) => None,
    })
    .await;
    read_all(&blocks, "after it spoke again").await;
    assert_eq!(&blocks.fresh().get("needs-both").await.unwrap().unwrap().bytes[..], b"value");
}
