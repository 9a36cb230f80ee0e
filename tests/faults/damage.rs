//! Memory that lies: bits flipped under a committed value, frames in the wrong place (*No wrong value*).

use quarry_client::GetError;
use quarry_proto::v1::commit_outcome::Code;
use quarry_tests::{
    Seed,
    raw::{Armed, Framed, Granted, RawWriter, Wish},
    seed::pattern,
    shared,
};
use quarry_wire::ids::NodeId;
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
    let mut header = quarry_wire::frame::FrameHeader::read_from(&values.frames[2].bytes).unwrap();
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
