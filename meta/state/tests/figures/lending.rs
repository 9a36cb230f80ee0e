//! What it costs to see what each shard has and needs, with 64 shards and 25,600 extents, and to freeze a shard that saw as many lendings.

use crate::{GEN, SPACE, processor_time};
use quarry_meta_state::{
    RequestId, Shard,
    directory::{FeedChange, FeedEntry, FeedSlice, Namespace, Policy, RegionState},
    lending::{Holdings, coming},
    shard::{GrantRequest, Settings, ShardCommand, ShardOutcome, plan::Bounds},
};
use quarry_wire::{
    grant::Class,
    ids::{
        ExtentId, ExtentIndex, FeedNumber, Incarnation, LendNumber, NodeId, RegionId, RegionIndex, ShardId, WriterId,
    },
    limits::EXTENT_BYTES,
    units::{LogTime, SlotCount, SlotSize},
};
use std::{hint::black_box, time::Duration};

const NODES: u64 = 100;
const EXTENTS: u32 = 256;
const SHARDS: u32 = 64;
const SLABS: u64 = 1000;

/// A shard that was lent every `every`th extent, with a thousand slabs of which some rest.
fn shard(id: u32, every: u32) -> Shard {
    let mut shard = Shard::new(ShardId(id), Settings::new(GEN, SHARDS));
    let policy = Policy::new(Class::Cache, 1);
    let namespace = Namespace { id: SPACE, name: "blocks".into(), policy };
    let mut changes = vec![FeedChange::NewGeneration, FeedChange::Namespace(namespace)];
    let region_bytes = u64::from(EXTENTS) * EXTENT_BYTES;
    for node in 1..=NODES {
        let region = RegionId { node: NodeId(node), index: RegionIndex(0) };
        let incarnation = Incarnation::new(GEN, 1);
        changes.push(FeedChange::Region(RegionState { region, incarnation, bytes: region_bytes, up: true }));
        let own = (0..EXTENTS).filter(|index| (index + u32::try_from(node).unwrap()) % every == id % every);
        changes.extend(own.map(|index| FeedChange::Lent {
            extent: ExtentId { region, index: ExtentIndex(index) },
            shard: ShardId(id),
            lend: LendNumber::new(GEN, 1),
            region_bytes,
        }));
    }
    let numbered = |(number, change)| FeedEntry { number: FeedNumber::new(GEN, number), change };
    let entries: Vec<FeedEntry> = (1..).zip(changes).map(numbered).collect();
    let to = entries.last().unwrap().number;
    let slice = FeedSlice { from: FeedNumber::default(), entries, to };
    assert_eq!(shard.apply(LogTime(1_000), ShardCommand::ApplyFeed(slice)), ShardOutcome::Feed(Ok(to)));
    let bounds = Bounds::default();
    for number in 0..SLABS {
        let asked = GrantRequest {
            request: RequestId { at: shard.log_time(), random: number },
            writer: WriterId([1; 16]),
            namespace: SPACE,
            slot_size: SlotSize(64 << 10),
            slots: SlotCount(256),
            ttl: Duration::from_secs(10),
        };
        let command = shard.planner_within(LogTime(1_000), &bounds).grant(NodeId(100), asked).unwrap();
        let ShardOutcome::Grant(Ok(grant)) = shard.apply(LogTime(1_000), command) else { panic!("it was planned") };
        if number % 2 == 0 {
            shard.apply(LogTime(1_000), ShardCommand::Seal { grant: grant.id, fill: SlotCount(0) });
        }
    }
    shard
}

fn each(what: &str, times: u32, mut work: impl FnMut()) {
    let began = processor_time();
    for _ in 0..times {
        work();
    }
    let took = processor_time() - began;
    println!("{what}: {:.3} ms of processor time", took.as_secs_f64() * 1e3 / f64::from(times));
}

#[test]
#[ignore = "it measures"]
fn what_lending_costs_with_many_shards_and_extents() {
    let shards: Vec<Shard> = (1..=SHARDS).map(|id| shard(id, SHARDS)).collect();
    let extents: u32 = shards[0].holdings().nodes.values().map(|held| held.extents).sum();
    println!("{SHARDS} shards of {extents} extents and {SLABS} slabs");
    let all: Vec<Holdings> = shards.iter().map(Shard::holdings).collect();
    each("holdings of one shard", 100, || drop(black_box(shards[0].holdings())));
    each("holdings of all shards", 20, || drop(black_box(shards.iter().map(Shard::holdings).collect::<Vec<_>>())));
    each("what comes to one shard, at all nodes", 20, || {
        for node in (1..=NODES).map(NodeId) {
            black_box(coming(&all[0], &all, node));
        }
    });
    let all_seen = shard(1, 1);
    each("freezing one shard that saw 25,600 lendings", 100, || drop(black_box(all_seen.clone())));
    each("freezing one that saw 400", 100, || drop(black_box(shards[0].clone())));
}
