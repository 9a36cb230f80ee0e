//! Keys: what one opens, and all that it does not. Lower tokens.

use crate::{NODE, one_node};
use quarry_fabric::{FabricAddress, OperationError};
use quarry_proto::{
    refusal::Refusal,
    v1::{arm_refused::Reason, commit_outcome::Code},
};
use quarry_tests::{
    TestCluster,
    calls::refusal,
    cluster::create_namespace,
    raw::{Armed, Granted, RawWriter, Wish, reader},
    shared, soon,
};
use quarry_wire::{ids::NamespaceId, limits::SLOTS_PER_SLAB_MAX, region::RegionRecord};
use std::time::Duration;

/// Long enough for a refusal to come back, short enough that a silent one does not hold the suite up.
const REFUSED_WITHIN: Duration = Duration::from_secs(5);
/// What refused writes would write.
const REFUSED: u8 = 0xee;
const SLOT: u32 = 4096;

/// How long the grants of these tests live.
const TTL: Duration = Duration::from_secs(20);

async fn granted(raw: &RawWriter, namespace: NamespaceId) -> Granted {
    raw.grant(&Wish { namespace, slot_size: SLOT, slots: 8, ttl: TTL, avoid: Vec::new() }).await.unwrap()
}

/// Somebody with an armed grant at [`NODE`], and where that node's memory can be read.
struct Writer {
    raw: RawWriter,
    granted: Granted,
    armed: Armed,
    record: RegionRecord,
    base: u64,
}

impl Writer {
    async fn new(cluster: &TestCluster, namespace: NamespaceId) -> Self {
        let raw = cluster.raw().await;
        let granted = granted(&raw, namespace).await;
        let armed = raw.arm(NODE, &granted).await.unwrap();
        let holder = *granted.grant.holder(NODE).unwrap();
        let record = raw.record(holder.region).await;
        Self { raw, granted, armed, record, base: holder.base.0 }
    }

    /// The slab. What lies behind it may belong to another test: it is only looked at for the bytes of refused writes.
    async fn memory(&self) -> Vec<u8> {
        let slab = usize::try_from(self.granted.grant.slab_bytes()).unwrap();
        let behind = self.raw.read(&self.record, self.base + slab as u64, 32).await.unwrap();
        assert_ne!(behind, [REFUSED; 32], "a refused write landed behind the slab");
        self.raw.read(&self.record, self.base, slab).await.unwrap()
    }

    /// A write that must fail.
    async fn refused_write(&self, peer: &FabricAddress, key: u64, address: u64, length: usize) {
        let result = self.raw.write_to(peer, key, address, &vec![REFUSED; length], REFUSED_WITHIN).await;
        assert!(is_refused(&result), "{result:?}");
    }

    /// A read that must fail.
    async fn refused_read(&self, peer: &FabricAddress, key: u64, address: u64) {
        let result = self.raw.read_from(peer, key, address, 64).await;
        assert!(is_refused(&result), "{result:?}");
    }

    /// The control: the key does open what it is for.
    async fn works(&self) {
        self.raw.write(&self.armed, 0, &[0x11; 64]).await.unwrap();
        assert_eq!(self.raw.read(&self.record, self.base, 64).await.unwrap(), [0x11; 64]);
    }
}

fn is_refused<T>(result: &Result<T, OperationError>) -> bool {
    matches!(
        result,
        Err(OperationError::Failed { .. }
            | OperationError::Closed
            | OperationError::NotStarted
            | OperationError::Deadline)
    )
}

#[tokio::test]
async fn a_wrong_key_and_an_address_out_of_bounds_are_refused_and_the_memory_is_untouched() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let writer = Writer::new(&cluster, blocks.info().id).await;
    let Armed { lane, key, base } = writer.armed.clone();
    let slab = writer.granted.grant.slab_bytes();
    writer.works().await;
    let before = writer.memory().await;
    for wrong in [key ^ 1, key.rotate_left(17), 0, u64::MAX] {
        writer.refused_write(&lane, wrong, base, 64).await;
    }
    writer.refused_write(&lane, key, base + slab, 64).await;
    writer.refused_write(&lane, key, base + slab - 32, 64).await;
    writer.refused_write(&lane, key, base + (1 << 40), 64).await;
    if let Some(below) = base.checked_sub(64) {
        writer.refused_write(&lane, key, below, 128).await;
    }
    writer.refused_read(&lane, key, base).await;
    assert!(writer.memory().await == before, "a refused operation changed memory");
    writer.works().await;
}

#[tokio::test]
async fn a_stale_key_is_refused_and_the_memory_is_untouched() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let writer = Writer::new(&cluster, blocks.info().id).await;
    let Armed { lane, key, base } = writer.armed.clone();
    writer.works().await;
    writer.raw.close(NODE, &writer.granted).await.unwrap();
    let before = writer.memory().await;
    writer.refused_write(&lane, key, base, 64).await;
    // The next lane of the same writer does not know it either.
    let next = granted(&writer.raw, blocks.info().id).await;
    let armed = writer.raw.arm(NODE, &next).await.unwrap();
    writer.refused_write(&armed.lane, key, armed.base, 64).await;
    assert!(writer.memory().await == before, "a stale key changed memory");
}

#[tokio::test]
async fn a_lanes_key_opens_nothing_at_the_reader_endpoint_nor_at_another_lane() {
    let cluster = shared().await;
    let (_client, blocks) = cluster.namespace().await;
    let one = Writer::new(&cluster, blocks.info().id).await;
    let other = Writer::new(&cluster, blocks.info().id).await;
    assert_ne!(one.armed.lane, other.armed.lane, "each writer has a lane of its own");
    one.works().await;
    other.works().await;
    let before = (one.memory().await, other.memory().await);
    let readers = reader(&one.record);
    for address in [one.armed.base, one.record.base + one.base] {
        one.refused_write(&readers, one.armed.key, address, 64).await;
        one.refused_read(&readers, one.armed.key, address).await;
        one.refused_write(&other.armed.lane, one.armed.key, address, 64).await;
        one.refused_read(&other.armed.lane, one.armed.key, address).await;
    }
    // The read key opens no lane, and nothing for writing.
    one.refused_write(&readers, one.record.read_key, one.record.base + one.base, 64).await;
    one.refused_write(&one.armed.lane, one.record.read_key, one.armed.base, 64).await;
    one.refused_read(&one.armed.lane, one.record.read_key, one.record.base + one.base).await;
    assert!((one.memory().await, other.memory().await) == before, "a refused operation changed memory");
    one.works().await;
    other.works().await;
}

/// A grant on bytes of `earlier` at [`NODE`], which must have been given up. Places of grants that just ended are taken last, so all others
/// are taken and held first.
async fn overlapping(raw: &RawWriter, earlier: &Granted) -> Granted {
    let span = earlier.grant.span(earlier.grant.holder(NODE).unwrap());
    let namespace = earlier.grant.namespace;
    let wish = Wish { namespace, slot_size: SLOT, slots: SLOTS_PER_SLAB_MAX, ttl: TTL, avoid: Vec::new() };
    soon("the space is granted again", async || {
        let next = raw.grant(&wish).await.unwrap();
        let found = next.grant.span(next.grant.holder(NODE).unwrap());
        (found.start < span.end && span.start < found.end).then_some(next)
    })
    .await
}

fn arm_refused(found: Refusal) -> Reason {
    match found {
        Refusal::ArmRefused(it) => it.reason(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn lower_and_equal_tokens_are_refused() {
    let cluster = one_node().await;
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 1, None).await;
    let mut raw = cluster.raw().await;

    // Equal: the live grant armed again is given the same key; once closed, it never arms again.
    let live = granted(&raw, blocks.info().id).await;
    let first = raw.arm(NODE, &live).await.unwrap();
    let again = raw.arm(NODE, &live).await.unwrap();
    assert_eq!((first.key, first.base, &first.lane), (again.key, again.base, &again.lane));
    raw.close(NODE, &live).await.unwrap();
    assert_eq!(arm_refused(refusal(raw.arm(NODE, &live).await)), Reason::GrantClosed);

    // Lower: a grant that was never armed is overtaken by the next one on its bytes.
    let overtaken = granted(&raw, blocks.info().id).await;
    raw.seal(&overtaken, 0).await.unwrap();
    let next = overlapping(&raw, &overtaken).await;
    let armed = raw.arm(NODE, &next).await.unwrap();
    assert_eq!(arm_refused(refusal(raw.arm(NODE, &overtaken).await)), Reason::LowerToken);
    // The later grant does not notice.
    let frame = raw.frame(&next, 0, "key", b"of the later grant");
    raw.write(&armed, 0, &frame.bytes).await.unwrap();
    let outcomes = raw.commit(NODE, &next, [NODE], vec![frame.entry]).await.unwrap();
    assert_eq!(outcomes[0].code(), Code::Committed);
    // Nor does it help to come after the later one was closed.
    raw.close(NODE, &next).await.unwrap();
    assert_eq!(arm_refused(refusal(raw.arm(NODE, &overtaken).await)), Reason::LowerToken);
    assert_eq!(&blocks.get("key").await.unwrap().unwrap().bytes[..], b"of the later grant");
}

#[tokio::test]
async fn a_later_grant_closes_the_lane_of_the_earlier_one_and_what_it_wrote_is_not_committed() {
    let cluster = one_node().await;
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 1, None).await;
    let mut raw = cluster.raw().await;
    let earlier = granted(&raw, blocks.info().id).await;
    let armed = raw.arm(NODE, &earlier).await.unwrap();
    let frame = raw.frame(&earlier, 0, "earlier", b"too late");
    raw.write(&armed, 0, &frame.bytes).await.unwrap();
    // The shard gives the space to the next one, while the node's claim is still open.
    raw.seal(&earlier, 0).await.unwrap();
    let mut later = cluster.raw().await;
    let next = overlapping(&later, &earlier).await;
    raw.write(&armed, 0, &frame.bytes).await.expect("until the later grant is armed, the claim is open");
    let next_armed = later.arm(NODE, &next).await.unwrap();
    let late = raw.write_to(&armed.lane, armed.key, armed.base, &frame.bytes, REFUSED_WITHIN).await;
    assert!(is_refused(&late), "{late:?}");
    let outcomes = raw.commit(NODE, &earlier, [NODE], vec![frame.entry]).await.unwrap();
    assert_ne!(outcomes[0].code(), Code::Committed, "{outcomes:?}");
    let frame = later.frame(&next, 0, "later", b"in time");
    later.write(&next_armed, 0, &frame.bytes).await.unwrap();
    let outcomes = later.commit(NODE, &next, [NODE], vec![frame.entry]).await.unwrap();
    assert_eq!(outcomes[0].code(), Code::Committed, "{outcomes:?}");
    assert!(blocks.get("earlier").await.unwrap().is_none());
    assert_eq!(&blocks.get("later").await.unwrap().unwrap().bytes[..], b"in time");
}
