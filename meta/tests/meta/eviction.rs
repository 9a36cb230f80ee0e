//! Eviction at a shard's leader: what counts as use, what goes when, and what a writer without room is told.

use crate::{
    cluster::{Cluster, Node, until},
    player::{DataNode, Writer, entry},
};
use bytes::Bytes;
use quarry_meta::Marks;
use quarry_proto::{refusal::Refusal, v1};

/// An extent of a played node has 1 MiB: eight of these.
const SLOT: u32 = 128 << 10;
const PER_EXTENT: u32 = 8;
const EXTENTS: u32 = 16;

/// A slab of `slots` slots, all committed, under the keys `name-0`, `name-1` and so on; fewer slots if there is less room.
async fn filled(cluster: &Cluster, node: &DataNode, writer: &Writer, name: &str, slots: u32) -> Vec<String> {
    let mut request = writer.grant_request(cluster, 1).await;
    (request.slot_size, request.slots) = (SLOT, slots);
    let grant = writer.granted(cluster, &request).await.unwrap();
    let keys: Vec<String> = (0..grant.slots.0).map(|slot| format!("{name}-{slot}")).collect();
    let entries: Vec<_> = (0..).zip(&keys).map(|(slot, key)| entry(slot, key)).collect();
    let publish = writer.publish(&grant, &entries, &[node.attest(&grant, &entries)]);
    cluster.ask(async |node: &Node| node.control().publish(publish.clone()).await).await.unwrap();
    keys
}

/// Which of these keys have a value, asked in a way that is no use of them.
async fn present(cluster: &Cluster, writer: &Writer, keys: &[String]) -> Vec<bool> {
    let keys: Vec<Bytes> = keys.iter().map(|key| Bytes::copy_from_slice(key.as_bytes())).collect();
    let count = keys.len();
    let request = v1::ExistsRequest { shard: 1, namespace: writer.namespace.0, keys, seen: None };
    let reply = cluster.ask(async |node: &Node| node.control().exists(request.clone()).await).await.unwrap();
    (0..count).map(|index| reply.present[index / 8] >> (index % 8) & 1 == 1).collect()
}

/// Polls until none of these keys has a value.
async fn gone(cluster: &Cluster, writer: &Writer, keys: &[String]) {
    until("values to be evicted", async || {
        present(cluster, writer, keys).await.into_iter().all(|there| !there).then_some(())
    })
    .await;
}

async fn ask_for(cluster: &Cluster, writer: &Writer, slot_size: u32) -> Result<v1::GrantReply, Refusal> {
    let mut request = writer.grant_request(cluster, 1).await;
    (request.slot_size, request.slots) = (slot_size, 1);
    cluster.ask(async |node: &Node| node.control().grant(request.clone()).await).await
}

#[tokio::test(flavor = "multi_thread")]
async fn room_is_kept_by_what_was_leased_longest_ago_and_probes_and_stale_reads_are_no_use() {
    let cluster = Cluster::new().await;
    let node = DataNode::join(&cluster, 11).await;
    let writer = Writer::new(&cluster.create_namespace("kv", 1).await);
    let mut slabs = Vec::new();
    // All but an eighth, which is the mark.
    for number in 0..14 {
        slabs.push(filled(&cluster, &node, &writer, &format!("{number}"), PER_EXTENT).await);
    }
    let first = |slab: usize| slabs[slab][0].as_str();
    let read = async |slab: usize, lease_ms: u32, stale: bool| {
        let request = v1::ResolveRequest { stale, ..writer.resolve(&[first(slab)], lease_ms) };
        let reply = cluster.ask(async |node: &Node| node.control().resolve(request.clone()).await).await.unwrap();
        assert!(reply.items[0].found);
    };
    read(0, 1_000, false).await;
    read(1, 0, false).await;
    read(2, 1_000, true).await;
    assert_eq!(present(&cluster, &writer, &slabs.concat()).await, vec![true; 14 * PER_EXTENT as usize], "all are kept");
    // One more than that: three go, so that three sixteenths are free or coming.
    let last = filled(&cluster, &node, &writer, "last", PER_EXTENT).await;
    gone(&cluster, &writer, &slabs[1..4].concat()).await;
    let kept = [&slabs[0], &slabs[4..].concat(), &last].map(Vec::as_slice).concat();
    assert_eq!(present(&cluster, &writer, &kept).await, vec![true; kept.len()]);
    cluster.assert_equal_hashes(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_finds_no_room_in_one_piece_is_told_of_what_and_the_piece_is_made() {
    let cluster = Cluster::with(1, |config| config.eviction = Marks { low: 1, high: 2 }).await;
    let node = DataNode::join(&cluster, 11).await;
    let writer = Writer::new(&cluster.create_namespace("kv", 1).await);
    let mut halves = Vec::new();
    for number in 0..2 * EXTENTS {
        halves.push(filled(&cluster, &node, &writer, &format!("{number}"), PER_EXTENT / 2).await);
        if number == 0 {
            // A hole in the first extent: there is room, but not in one piece.
            let items = halves[0].iter().map(|key| v1::DeleteItem { key: key.clone().into(), expected: None });
            let request = Some(cluster.request(1).await);
            let delete = v1::DeleteRequest { shard: 1, request, namespace: writer.namespace.0, items: items.collect() };
            cluster.ask(async |node: &Node| node.control().delete(delete.clone()).await).await.unwrap();
        }
    }
    let Err(Refusal::NoSpace(refused)) = ask_for(&cluster, &writer, PER_EXTENT * SLOT).await else {
        panic!("there is no room for a whole extent")
    };
    assert!(refused.resource.starts_with("memory of data nodes (") && !refused.terminal, "{refused:?}");
    gone(&cluster, &writer, &halves[1]).await;
    let others = halves[2..].concat();
    assert_eq!(present(&cluster, &writer, &others).await, vec![true; others.len()], "only what is in the way goes");
    until("the piece to have rested", async || ask_for(&cluster, &writer, PER_EXTENT * SLOT).await.ok()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_at_its_quota_makes_room_by_itself_and_touches_no_other() {
    let cluster = Cluster::new().await;
    let node = DataNode::join(&cluster, 11).await;
    let other = Writer::new(&cluster.create_namespace("other", 1).await);
    let others = filled(&cluster, &node, &other, "other", PER_EXTENT).await;
    let quota = u64::from(8 * PER_EXTENT * SLOT);
    let writer = Writer::new(&cluster.create_limited("small", 1, quota).await);
    let old = filled(&cluster, &node, &writer, "old", PER_EXTENT).await;
    let mut new = Vec::new();
    for number in 0..7 {
        new.extend(filled(&cluster, &node, &writer, &format!("new-{number}"), 2 * PER_EXTENT).await);
    }
    assert_eq!(new.len(), 7 * PER_EXTENT as usize, "each an eighth of the quota");
    assert_eq!(present(&cluster, &writer, &old).await, vec![true; old.len()], "the whole quota may be used");
    // Whoever finds it used up waits until there is room: three sixteenths of it, two slabs.
    let mut more = filled(&cluster, &node, &writer, "more", PER_EXTENT).await;
    gone(&cluster, &writer, &old).await;
    gone(&cluster, &writer, &new[..PER_EXTENT as usize]).await;
    assert_eq!(
        present(&cluster, &writer, &new[PER_EXTENT as usize..]).await,
        vec![true; new.len() - PER_EXTENT as usize]
    );
    // From then on some is kept free, and nobody is refused.
    for number in 0..16 {
        more = filled(&cluster, &node, &writer, &format!("more-{number}"), PER_EXTENT).await;
    }
    assert_eq!(present(&cluster, &writer, &more).await, vec![true; more.len()]);
    gone(&cluster, &writer, &new).await;
    assert_eq!(present(&cluster, &other, &others).await, vec![true; others.len()]);
    let Err(Refusal::NoSpace(refused)) = ask_for(&cluster, &writer, 16 * PER_EXTENT * SLOT).await else {
        panic!("no eviction makes room for more than the quota")
    };
    let text = &refused.resource;
    assert!(text.starts_with("quota of namespace small (") && refused.terminal, "{refused:?}");
    assert!(text.contains(&format!("allows {quota} bytes in shard-1, an even share of {quota}; ")), "{text}");
    let found = 16 * PER_EXTENT * SLOT;
    let end = format!(" in 1 copies of {found}; it can never fit: raise the quota, or put a smaller value)");
    assert!(text.ends_with(&end), "{text}");
}
