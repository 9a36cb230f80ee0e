//! Memory that lies: bits flipped under a committed value, frames in the wrong place (*No wrong value*).

use quarry_client::GetError;
use quarry_proto::v1::{self, commit_outcome::Code};
use quarry_tests::{
    Seed,
    raw::{Armed, Framed, Granted, RawWriter, Wish},
    seed::pattern,
    shared,
    wait::soon,
};
use quarry_wire::{
    frame::FrameHeader,
    ids::{NodeId, SlotIndex},
};
use std::{collections::BTreeMap, time::Duration};

const SLOT: u32 = 4096;
const BYTES: usize = 3_000;

/// Committed values whose slab is still open for writing.
struct Values {
    raw: RawWriter,
    granted: Granted,
    armed: BTreeMap<NodeId, Armed>,
    frames: Vec<Framed>,
}

impl Values {
    async fn write(cluster: &quarry_tests::TestCluster, blocks: &quarry_client::Namespace, count: u32) -> Self {
        let mut raw = cluster.raw().await;
        let ttl = Duration::from_secs(30);
        let wish = Wish { namespace: blocks.info().id, slot_size: SLOT, slots: count, ttl, avoid: Vec::new() };
        let granted = raw.grant(&wish).await.unwrap();
        let armed = raw.arm_all(&granted).await;
        let mut frames = Vec::new();
        for slot in 0..count {
            let frame = raw.frame(&granted, slot, &key(slot), &pattern(u64::from(slot), BYTES));
            raw.write_frame(&granted, &armed, &frame).await;
            frames.push(frame);
        }
        let entries = frames.iter().map(|frame| frame.entry.clone()).collect();
        let outcomes = raw.commit(NodeId(101), &granted, armed.keys().copied(), entries).await.unwrap();
        assert!(outcomes.iter().all(|outcome| outcome.code() == Code::Committed), "{outcomes:?}");
        Self { raw, granted, armed, frames }
    }

    /// What a reader says who found something else in a slot.
    fn complaint(&self, blocks: &quarry_client::Namespace, node: NodeId, slot: u32) -> v1::ReportDamageRequest {
        let grant = &self.granted.grant;
        let holder = grant.holder(node).unwrap();
        let header = FrameHeader::read_from(&self.frames[slot as usize].bytes).unwrap();
        v1::ReportDamageRequest {
            shard: grant.id.shard.0,
            namespace: blocks.info().id.0,
            key: key(slot).into(),
            version: Some(header.version.into()),
            region: holder.region.index.0,
            incarnation: Some(holder.incarnation.into()),
            offset: grant.offset(holder, SlotIndex(slot)).unwrap().0,
        }
    }

    async fn copies(&self, blocks: &quarry_client::Namespace, slot: u32) -> usize {
        self.raw.copies(blocks.info().id, &key(slot)).await.len()
    }

    /// Puts other bytes where a committed frame lies.
    async fn overwrite(&self, node: NodeId, slot: u32, bytes: &[u8]) {
        self.raw.write(&self.armed[&node], u64::from(slot) * u64::from(SLOT), bytes).await.unwrap();
    }
}

fn key(slot: u32) -> String {
    format!("key-{slot:03}")
}

#[tokio::test]
async fn a_flipped_bit_in_one_copy_is_never_returned_and_the_other_copy_is_used() {
    let cluster = shared().await;
    let (client, blocks) = cluster.namespace().await;
    let values = Values::write(&cluster, &blocks, 64).await;
    let mut seed = Seed::draw();
    for (slot, frame) in (0..).zip(&values.frames) {
        // Every part of the frame has its turn; the node that is damaged changes too.
        let mut bytes = frame.bytes.clone();
        let at = if slot < 16 { seed.below(128) } else { seed.below(bytes.len()) };
        bytes[at] ^= 1 << seed.below(8);
        values.overwrite(NodeId(101 + u64::from(slot % 2)), slot, &bytes).await;
    }
    for slot in 0..64 {
        let value = blocks.get(key(slot)).await.unwrap().unwrap();
        assert!(value.bytes == pattern(u64::from(slot), BYTES), "{} came back changed", key(slot));
    }
    assert!(client.stats().damaged_copies > 0, "no damaged copy was met: {:?}", client.stats());
}

#[tokio::test]
async fn a_damaged_copy_is_given_up_by_its_holder_and_an_intact_one_is_not_whoever_complains() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let values = Values::write(&cluster, &blocks, 2).await;
    let mut bytes = values.frames[1].bytes.clone();
    bytes[BYTES / 2] ^= 1;
    values.overwrite(NodeId(101), 1, &bytes).await;

    // A liar complains of what is whole.
    let node = NodeId(101);
    let complaint = values.complaint(&blocks, node, 0);
    assert!(!values.raw.report_damage(node, complaint).await.unwrap().dropped);
    assert_eq!(values.copies(&blocks, 0).await, 2);

    // Readers that meet the damaged copy tell, until it is gone. Which copy a client reads first is drawn by each.
    let mut clients = Vec::new();
    while values.copies(&blocks, 1).await == 2 {
        assert!(clients.len() < 40, "forty clients read the other copy, or nobody told");
        let reader = cluster.client().await;
        let theirs = reader.namespace(&blocks.info().name).await.unwrap();
        assert!(theirs.get(key(1)).await.unwrap().unwrap().bytes == pattern(1, BYTES));
        if reader.stats().damaged_copies > 0 {
            soon("its holder was told", async || (reader.stats().dropped_copies == 1).then_some(())).await;
        }
        clients.push(reader);
    }
    assert_eq!(values.copies(&blocks, 1).await, 1);
    assert!(blocks.fresh().get(key(1)).await.unwrap().unwrap().bytes == pattern(1, BYTES));
    // With its last copy the value is gone, and the key is free again.
    values.overwrite(NodeId(102), 1, &bytes).await;
    let complaint = values.complaint(&blocks, NodeId(102), 1);
    assert!(values.raw.report_damage(NodeId(102), complaint).await.unwrap().dropped);
    assert!(blocks.fresh().get(key(1)).await.unwrap().is_none());
    blocks.put(key(1), pattern(3, BYTES)).await.unwrap();
}

#[tokio::test]
async fn a_value_whose_copies_are_all_damaged_is_an_error_and_shows_no_byte() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let values = Values::write(&cluster, &blocks, 8).await;
    let mut seed = Seed::draw();
    for (slot, frame) in (0..).zip(&values.frames) {
        for node in [NodeId(101), NodeId(102)] {
            let mut bytes = frame.bytes.clone();
            let at = seed.below(bytes.len());
            bytes[at] ^= 1 << seed.below(8);
            values.overwrite(node, slot, &bytes).await;
        }
    }
    for slot in 0..8 {
        let damaged = blocks.get(key(slot)).await;
        assert!(matches!(damaged, Err(GetError::Corrupt { .. })), "{damaged:?}");
    }
}

#[tokio::test]
async fn a_whole_frame_of_another_key_or_version_in_the_place_of_a_value_is_never_returned() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let mut values = Values::write(&cluster, &blocks, 4).await;
    let nodes = [NodeId(101), NodeId(102)];
    // The neighbour's frame; the same key and payload in another version; the same key and version with another payload and its right CRC.
    let neighbour = values.frames[1].bytes.clone();
    let version = values.raw.frame(&values.granted, 1, &key(1), &pattern(1, BYTES)).bytes;
    let mut header = FrameHeader::read_from(&values.frames[2].bytes).unwrap();
    let other = pattern(99, BYTES);
    header.payload_crc = crc32c::crc32c(&other);
    let mut payload = vec![0; header.bytes()];
    header.write_to(&mut payload);
    payload.extend_from_slice(&other);
    for node in nodes {
        values.overwrite(node, 0, &neighbour).await;
        values.overwrite(node, 1, &version).await;
        values.overwrite(node, 2, &payload).await;
    }
    for slot in 0..3 {
        let wrong = blocks.get(key(slot)).await;
        assert!(matches!(wrong, Err(GetError::Corrupt { .. })), "{wrong:?}");
    }
    assert!(blocks.get(key(3)).await.unwrap().unwrap().bytes == pattern(3, BYTES));
}
