//! Lending on a live cluster of eight shards: memory goes where it is needed, and every byte is accounted for on every node.

use crate::{
    cluster::{Cluster, Node, until},
    player::{DataNode, Writer},
};
use quarry_proto::{refusal::Refusal, v1};
use quarry_wire::{grant::Grant, signed::Signed};
use std::time::Duration;

/// An extent of a played node has 1 MiB.
const EXTENT: u32 = 1 << 20;
const EXTENTS: usize = 16;
const SHARDS: u32 = 8;

/// A slab as large as an extent, of this shard.
async fn granted(cluster: &Cluster, writer: &Writer, shard: u32) -> Result<Grant, Refusal> {
    let mut request = writer.grant_request(cluster, shard).await;
    (request.slot_size, request.slots) = (EXTENT, 1);
    let reply = cluster.ask(async |node: &Node| node.control().grant(request.clone()).await).await?;
    Ok(Signed::<Grant>::decode(&reply.grant).unwrap().statement)
}

/// Gives a slab back that nothing was written to.
async fn let_go(cluster: &Cluster, writer: &Writer, grant: &Grant) {
    let request = v1::SealRequest { grant: Some(grant.id.into()), fill: 0, writer: writer.id.0.to_vec().into() };
    cluster.ask(async |node: &Node| node.control().seal(request.clone()).await).await.unwrap();
}

/// Waits until every node sees all bytes of every region, then says how many extents each shard has.
async fn counted(cluster: &Cluster) -> Vec<u64> {
    until("every byte to be accounted for on every node", async || {
        let mut extents = Vec::new();
        for node in cluster.running() {
            let space = node.admin().status(v1::StatusRequest {}).await.ok()?.into_inner().space;
            let held = |it: &v1::SpaceStatus| {
                it.free_bytes + it.granted_bytes + it.committed_bytes + it.pinned_bytes + it.resting_bytes
            };
            for whole in space.iter().filter(|it| it.shard == 0) {
                let sum: u64 = space.iter().filter(|it| it.region == whole.region).map(held).sum();
                if sum != whole.total_bytes {
                    return None;
                }
            }
            let of =
                |shard: u32| space.iter().filter(|it| it.shard == shard).map(held).sum::<u64>() / u64::from(EXTENT);
            extents = (1..=SHARDS).map(of).collect();
        }
        Some(extents)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_goes_to_the_shard_that_needs_it_and_comes_back_from_one_that_does_not_and_no_byte_is_lost() {
    let cluster = Cluster::with(SHARDS, |config| config.node_silence = Duration::from_millis(1_500)).await;
    let mut node = DataNode::join(&cluster, 11).await;
    let writer = Writer::new(&cluster.create_namespace("kv", 1).await);
    assert_eq!(counted(&cluster).await, [0; SHARDS as usize], "nothing is lent ahead of need");
    // One shard alone takes the whole of the memory, each slab in one call.
    let mut slabs = Vec::new();
    for _ in 0..EXTENTS {
        slabs.push(granted(&cluster, &writer, 3).await.unwrap());
    }
    assert_eq!(counted(&cluster).await[2], EXTENTS as u64);
    // Another one finds none, which is not the end: the first has grants that may end.
    match granted(&cluster, &writer, 5).await.unwrap_err() {
        Refusal::NoSpace(lack) => assert!(!lack.terminal, "{lack:?}"),
        other => panic!("{other}"),
    }
    for slab in &slabs {
        let_go(&cluster, &writer, slab).await;
    }
    until("an idle extent for the shard that wants one", async || granted(&cluster, &writer, 5).await.ok()).await;
    let extents = counted(&cluster).await;
    assert!(extents[4] >= 1 && extents.iter().sum::<u64>() <= EXTENTS as u64, "{extents:?}");
    // A dead node's memory goes back to the directory, and out again in its next life.
    node.fall_silent();
    until("the directory to judge", async || {
        let status = cluster.nodes[0].admin().status(v1::StatusRequest {}).await.ok()?.into_inner();
        status.data_nodes.iter().all(|it| !it.alive).then_some(())
    })
    .await;
    until("the memory of a dead node to be unlent", async || {
        (counted(&cluster).await == [0; SHARDS as usize]).then_some(())
    })
    .await;
    node.register(&cluster, 77).await;
    node.record(&cluster).await.unwrap();
    node.beat(&cluster);
    granted(&cluster, &writer, 7).await.unwrap();
    counted(&cluster).await;
    for group in 0..=SHARDS {
        cluster.assert_equal_hashes(group).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_of_one_value_lie_in_different_zones_as_long_as_there_are_some() {
    let cluster = Cluster::new().await;
    for (id, zone) in [(11, "east"), (12, "east"), (13, "west")] {
        // Each goes on sending heartbeats until the test ends.
        Box::leak(Box::new(DataNode::join_in(&cluster, id, zone).await));
    }
    let writer = Writer::new(&cluster.create_namespace("kv", 2).await);
    let zones = async || {
        let grant = writer.grant(&cluster).await;
        let mut nodes: Vec<u64> = grant.holders.iter().map(|holder| holder.region.node.0).collect();
        nodes.sort_unstable();
        nodes
    };
    until("the shard to know all zones", async || (zones().await.contains(&13)).then_some(())).await;
    for _ in 0..6 {
        assert!(zones().await.contains(&13), "two copies in one zone");
    }
    // Without another zone, two hosts of one are better than none.
    let mut request = writer.grant_request(&cluster, 1).await;
    request.avoid = vec![13];
    let grant = writer.granted(&cluster, &request).await.unwrap();
    assert_eq!(grant.holders.len(), 2);
}
