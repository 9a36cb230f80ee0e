//! Lending by need: a directory and several shards, whose leaders do what is planned for them; *Nothing leaks* is counted after every step.

use crate::{
    bench::attested,
    directory::{certificate, cluster, region, register},
};
use quarry_meta_state::{
    Directory, RequestId, Shard,
    directory::{DirectoryCommand, DirectoryOutcome, Policy},
    lending::{Giving, Held, Holdings, ahead, giving, ledger, turn},
    shard::{
        CommitEntry, DeleteKey, GrantRefusal, GrantRequest, Mode, Publish, Settings, ShardCommand, ShardOutcome,
        plan::Bounds,
    },
};
use quarry_wire::{
    frame::FrameKind,
    grant::{Class, Grant},
    ids::{Generation, NamespaceId, NodeId, ShardId, SlotIndex, WriterId},
    key::Key,
    limits::QUARANTINE,
    units::{LogTime, SlotCount, SlotSize, millis},
    version::{HybridClock, Version},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

const SPACE: NamespaceId = NamespaceId(1);
/// An extent of a node of these tests has so many bytes: sixteen slots.
const EXTENT: u64 = 64 << 10;
const SLOT: u32 = 4096;
const SLOTS: u32 = 16;
const EXTENTS: u32 = 16;

struct Lenders {
    directory: Directory,
    shards: Vec<Shard>,
    at: u64,
    drawn: u64,
    /// Grants whose entries are committed, by shard.
    taken: u32,
}

impl Lenders {
    /// So many nodes of sixteen extents, and so many shards; values have this many copies, one is enough.
    fn new(nodes: u64, shards: u32, copies: u8) -> Self {
        let made = (1..=shards).map(|id| Shard::new(ShardId(id), Settings::new(Generation(1), shards)));
        let mut it = Self { directory: Directory::new(), shards: made.collect(), at: 1_000, drawn: 0, taken: 0 };
        it.direct(DirectoryCommand::InitCluster(cluster(shards)));
        for node in 1..=nodes {
            it.direct(DirectoryCommand::AdmitCertificate(certificate(node)));
            it.direct(register(node, 1));
        }
        let request = RequestId { at: it.directory.log_time(), random: 77 };
        let policy = Policy { least: 1, ..Policy::new(Class::Cache, copies) };
        it.direct(DirectoryCommand::CreateNamespace { request, name: "blocks".into(), policy });
        it.balance();
        it
    }
    fn direct(&mut self, command: DirectoryCommand) -> DirectoryOutcome {
        let before = self.directory.clone();
        let outcome = self.directory.apply(LogTime(self.at), command);
        self.directory.check().and_then(|()| self.directory.check_step(&before)).unwrap();
        self.count();
        outcome
    }
    fn apply(&mut self, shard: usize, command: ShardCommand) -> ShardOutcome {
        let before = self.shards[shard].clone();
        let outcome = self.shards[shard].apply(LogTime(self.at), command);
        self.shards[shard].check().and_then(|()| self.shards[shard].check_step(&before)).unwrap();
        self.count();
        outcome
    }
    fn count(&self) {
        let shards: Vec<&Shard> = self.shards.iter().collect();
        ledger(&self.directory, &shards).unwrap_or_else(|broken| panic!("{broken}"));
    }
    fn holdings(&self) -> Vec<Holdings> {
        self.shards.iter().map(Shard::holdings).collect()
    }
    /// One round of what the leaders do; answers how many extents went from hand to hand.
    fn round(&mut self) -> usize {
        let mut moved = 0;
        for command in self.directory.plan_lending(&self.holdings(), usize::MAX) {
            assert!(matches!(self.direct(command), DirectoryOutcome::Lend(Ok(_))));
            moved += 1;
        }
        for index in 0..self.shards.len() {
            let slice = self.directory.feed_since(self.shards[index].feed_position(), usize::MAX);
            self.apply(index, ShardCommand::ApplyFeed(slice));
            let unlent = self.directory.unlent();
            let (all, own) = (self.holdings(), self.shards[index].holdings());
            for node in own.nodes.keys() {
                match giving(&own, &all, *node, unlent.contains_key(node)) {
                    Giving::Keep => {}
                    Giving::Loose => self.drop_one(index, *node),
                    Giving::Emptied if own.nodes[node].loose > 0 => self.drop_one(index, *node),
                    Giving::Emptied => {
                        if let Some((_, victims)) = self.shards[index].victims_of_an_extent(*node, |_| LogTime(0)) {
                            self.apply(index, ShardCommand::Evict { victims });
                        }
                    }
                }
            }
            let dead: Vec<_> = self.shards[index].dead_extents().collect();
            for (extent, lend) in dead {
                self.apply(index, ShardCommand::DropExtent { extent, lend });
            }
            let returned: Vec<_> = self.shards[index].returned().collect();
            for (extent, lend) in returned {
                let shard = self.shards[index].id();
                if self.directory.lent(extent) == Some((shard, lend)) {
                    self.direct(DirectoryCommand::Returned { extent, shard, lend });
                    moved += 1;
                }
            }
        }
        moved
    }
    fn drop_one(&mut self, index: usize, node: NodeId) {
        let idle: Vec<_> = self.shards[index].idle_extents().filter(|(it, _)| it.region.node == node).collect();
        if let Some((extent, lend)) = idle.last().copied() {
            assert_eq!(self.apply(index, ShardCommand::DropExtent { extent, lend }), ShardOutcome::DropExtent(Ok(())));
        }
    }
    /// Rounds until nothing goes from hand to hand any more, with time to rest between them.
    fn balance(&mut self) {
        for _ in 0..200 {
            let moved = self.round();
            self.at += millis(QUARANTINE);
            for index in 0..self.shards.len() {
                self.apply(index, ShardCommand::Tick { horizon: None });
            }
            if moved == 0 && self.round() == 0 {
                return;
            }
        }
        panic!("extents go to and fro for ever: {:?}", self.holdings());
    }
    fn plan(&mut self, index: usize, slots: u32) -> Result<ShardCommand, GrantRefusal> {
        self.drawn += 1;
        let asked = GrantRequest {
            request: RequestId { at: self.shards[index].log_time(), random: self.drawn },
            writer: WriterId([1; 16]),
            namespace: SPACE,
            slot_size: SlotSize(SLOT),
            slots: SlotCount(slots),
            ttl: Duration::from_secs(5),
        };
        let bounds = Bounds { lendable: Arc::new(self.directory.unlent()), ..Bounds::default() };
        self.shards[index].planner_within(LogTime(self.at), &bounds).grant(NodeId(100), asked)
    }
    /// Fills a slab of up to `slots` slots, waiting for memory as a writer would; none if there is none to be had.
    fn put(&mut self, index: usize, slots: u32) -> Option<Grant> {
        for _ in 0..12 {
            match self.plan(index, slots) {
                Ok(command) => {
                    let ShardOutcome::Grant(Ok(grant)) = self.apply(index, command) else { panic!("it was planned") };
                    self.fill(index, &grant);
                    return Some(grant);
                }
                Err(GrantRefusal::NotLentYet { .. } | GrantRefusal::NoSpace { .. }) => {
                    let lacking = self.shards[index].lacks_place(SLOT.into(), &BTreeSet::new());
                    let want = ShardCommand::Want { nodes: lacking.into_iter().collect(), bytes: SLOT.into() };
                    self.apply(index, want);
                    self.round();
                    self.at += millis(QUARANTINE);
                    for index in 0..self.shards.len() {
                        self.apply(index, ShardCommand::Tick { horizon: None });
                    }
                }
                Err(other) => panic!("{other}"),
            }
        }
        None
    }
    fn fill(&mut self, index: usize, grant: &Grant) {
        let shards = u32::try_from(self.shards.len()).unwrap();
        let entries: Vec<CommitEntry> = (0..grant.slots.0)
            .map(|slot| {
                let key = loop {
                    self.taken += 1;
                    let key = Key::new(format!("k{}", self.taken)).unwrap();
                    if key.shard(SPACE, shards) == grant.id.shard {
                        break key;
                    }
                };
                CommitEntry {
                    slot: SlotIndex(slot),
                    key,
                    version: Version { clock: HybridClock(1), writer: WriterId([1; 16]) },
                    kind: FrameKind::Value,
                    payload_bytes: 10,
                    payload_crc: 1,
                    mode: Mode::Replace,
                }
            })
            .collect();
        let attested = grant.holders.iter().map(|holder| attested(holder.region.node.0)).collect();
        let publish = Publish { grant: grant.id, entries, attested };
        let ShardOutcome::Publish(outcomes) = self.apply(index, ShardCommand::Publish(publish)) else { panic!() };
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    }
    /// Extents that each shard has of a node, as the directory sees it.
    fn lent(&self, node: u64) -> Vec<usize> {
        let of = |shard: &Shard| {
            let own = self.directory.extents().filter(|(extent, ..)| extent.region == region(node));
            own.filter(|(_, lent, _)| *lent == Some(shard.id())).count()
        };
        self.shards.iter().map(of).collect()
    }
}

#[test]
fn a_lone_shard_is_lent_all_memory_at_once_and_many_are_lent_nothing_of_a_small_node_ahead_of_need() {
    assert_eq!(Lenders::new(2, 1, 1).lent(2), [EXTENTS as usize]);
    assert_eq!(Lenders::new(1, 8, 1).lent(1), [0; 8]);
    assert_eq!((ahead(16, 2), ahead(64, 8), ahead(256, 8), ahead(256, 64)), (2, 2, 8, 1));
    assert_eq!(Lenders::new(1, 2, 1).lent(1), [2, 2]);
}

#[test]
fn a_put_into_an_empty_shard_waits_for_memory_on_as_many_nodes_as_there_are_copies() {
    let mut it = Lenders::new(3, 8, 2);
    assert_eq!(it.plan(4, 1).unwrap_err(), GrantRefusal::NotLentYet { needed: 2, found: 0 });
    let grant = it.put(4, 1).unwrap();
    assert_eq!(grant.holders.len(), 2, "not one copy because one node was quicker");
    assert!(it.lent(1).iter().sum::<usize>() <= 1 && it.lent(2).iter().sum::<usize>() <= 1);
}

#[test]
fn a_shard_that_is_the_only_one_used_fills_the_whole_memory() {
    let mut it = Lenders::new(1, 8, 1);
    let mut filled = 0;
    while let Some(grant) = it.put(2, SLOTS) {
        filled += grant.slots.0;
    }
    assert_eq!(filled, EXTENTS * SLOTS);
    assert_eq!(it.lent(1)[2], EXTENTS as usize);
    it.balance();
}

#[test]
fn what_a_shard_has_idle_goes_to_who_wants_it_and_what_it_uses_stays() {
    let mut it = Lenders::new(1, 8, 1);
    for _ in 0..10 {
        it.put(0, SLOTS).unwrap();
    }
    it.balance();
    let used = it.lent(1)[0];
    assert!((11..=14).contains(&used), "ten that are full, and a quarter of room: {used}");
    // Eight of the ten are given up by whoever had them; then another shard needs more than is unlent.
    let keys: Vec<_> = it.shards[0].list(SPACE, b"", None).map(|listed| listed.key.clone()).take(128).collect();
    for key in keys {
        it.drawn += 1;
        let request = RequestId { at: it.shards[0].log_time(), random: it.drawn };
        let keys = vec![DeleteKey { key, expected: None }];
        it.apply(0, ShardCommand::Delete { request, namespace: SPACE, keys });
    }
    it.balance();
    assert_eq!(it.lent(1)[0], used, "nobody wants it");
    let mut filled = 0;
    while filled < 12 * SLOTS {
        filled += it.put(5, SLOTS).expect("what is idle comes").slots.0;
    }
    let left: u64 = it.shards[0].space().total.committed_bytes;
    assert_eq!(left, 2 * EXTENT, "nothing had to go for it");
}

#[test]
fn the_shard_that_has_most_empties_an_extent_for_a_poor_one_and_between_equals_nothing_goes_to_and_fro() {
    let mut it = Lenders::new(1, 4, 1);
    while it.put(0, SLOTS).is_some() {}
    assert_eq!(it.lent(1)[0], EXTENTS as usize - it.lent(1)[1..].iter().sum::<usize>());
    for round in 0..40 {
        for index in [1, 2] {
            // Writers of the poor shards go on; what they find no place for is evicted there or comes from the rich one.
            if it.put(index, SLOTS).is_none() {
                let victims = it.shards[index].victims_of_an_extent(NodeId(1), |_| LogTime(0));
                assert!(victims.is_some(), "round {round}: shard {index} has {:?}", it.lent(1));
                it.apply(index, ShardCommand::Evict { victims: victims.unwrap().1 });
            }
        }
    }
    it.balance();
    let lent = it.lent(1);
    let (most, fewest) = (lent[..3].iter().max().unwrap(), lent[..3].iter().min().unwrap());
    assert!(most - fewest <= 1, "{lent:?}");
    let before = lent.clone();
    for _ in 0..20 {
        it.round();
        it.at += millis(QUARANTINE);
    }
    assert_eq!(it.lent(1), before);
}

#[test]
fn extents_of_a_dead_node_go_back_and_are_lent_anew_in_its_next_life() {
    let mut it = Lenders::new(2, 2, 1);
    for _ in 0..6 {
        it.put(0, SLOTS).unwrap();
    }
    it.balance();
    let lends: BTreeMap<_, _> = it.directory.extents().map(|(extent, _, lend)| (extent, lend)).collect();
    let dead = it.directory.plan_death(NodeId(1)).unwrap();
    it.direct(dead);
    it.balance();
    assert_eq!(it.lent(1), [0, 0], "nothing can be in them");
    assert!(it.shards.iter().all(|shard| shard.dead_extents().count() == 0));
    it.direct(register(1, 2));
    it.balance();
    assert_eq!(it.lent(1), [2, 2], "ahead of need again");
    let again = it.directory.extents().filter(|(extent, shard, _)| extent.region == region(1) && shard.is_some());
    for (extent, _, lend) in again {
        assert!(lend > lends[&extent] || lends[&extent].0.number == 0, "a lend number only grows");
    }
}

#[test]
fn a_want_is_met_by_an_extent_that_is_large_enough_and_by_no_other_node() {
    let mut it = Lenders::new(2, 8, 1);
    it.apply(0, ShardCommand::Want { nodes: vec![NodeId(2), NodeId(9)], bytes: 100 });
    assert!(it.shards[0].wants(NodeId(2), 64) && !it.shards[0].wants(NodeId(2), 101));
    assert!(!it.shards[0].wants(NodeId(9), 1), "there is no such node");
    it.balance();
    assert!(!it.shards[0].wants(NodeId(2), 1));
    assert_eq!((it.lent(1)[0], it.lent(2)[0]), (0, 1));
    // No extent holds this: nothing is lent for it, again and again.
    it.apply(0, ShardCommand::Want { nodes: vec![NodeId(2)], bytes: EXTENT + 1 });
    it.balance();
    assert_eq!(it.lent(2)[0], 1);
    let again = Shard::decode(&it.shards[0].encode()).unwrap();
    assert!(again.wants(NodeId(2), EXTENT + 1), "a want outlives its leader");
}

#[test]
fn an_extent_on_its_way_is_not_lent_twice() {
    let mut it = Lenders::new(1, 8, 1);
    it.apply(3, ShardCommand::Want { nodes: vec![NodeId(1)], bytes: 1 });
    let first = it.directory.plan_lending(&it.holdings(), usize::MAX);
    assert_eq!(first.len(), 1);
    for command in first {
        it.direct(command);
    }
    assert_eq!(it.directory.plan_lending(&it.holdings(), usize::MAX), [], "the shard has not seen it yet");
    let slice = it.directory.feed_since(it.shards[3].feed_position(), usize::MAX);
    it.apply(3, ShardCommand::ApplyFeed(slice));
    assert_eq!(it.directory.plan_lending(&it.holdings(), usize::MAX), []);
}

#[test]
fn the_ledger_finds_an_extent_that_two_hold_or_nobody() {
    let it = Lenders::new(1, 2, 1);
    let (taken, lend) = it.shards[0].idle_extents().next().unwrap();
    // A directory that takes an extent back which its shard still holds.
    let mut hasty = it.directory.clone();
    hasty.apply(LogTime(it.at), DirectoryCommand::Returned { extent: taken, shard: ShardId(1), lend });
    let shards: Vec<&Shard> = it.shards.iter().collect();
    let broken = ledger(&hasty, &shards).unwrap_err();
    assert!(broken.to_string().contains("held by shard-1"), "{broken}");
    // A shard that forgot what was lent to it.
    let forgetful = Shard::new(ShardId(2), Settings::new(Generation(1), 2));
    assert!(ledger(&it.directory, &[&it.shards[0], &forgetful]).is_ok(), "it has not seen the lending yet");
    let mut lossy = it.shards[1].clone();
    let (given, lend) = lossy.idle_extents().next().unwrap();
    lossy.apply(LogTime(it.at), ShardCommand::DropExtent { extent: given, lend });
    assert!(ledger(&it.directory, &[&it.shards[0], &lossy]).is_ok(), "it is on its way back");
    let mut ahead = it.directory.clone();
    ahead.apply(LogTime(it.at), DirectoryCommand::Returned { extent: given, shard: ShardId(2), lend });
    let slice = ahead.feed_since(lossy.feed_position(), usize::MAX);
    lossy.apply(LogTime(it.at), ShardCommand::ApplyFeed(slice));
    let broken = ledger(&it.directory, &[&it.shards[0], &lossy]).unwrap_err();
    assert!(broken.to_string().contains("has it no more"), "{broken}");
}

#[test]
fn every_shard_that_is_richer_by_two_empties_an_extent_in_turn_unless_one_is_coming() {
    use Giving::{Emptied, Keep};
    let node = NodeId(1);
    let all = |held: [(u32, u32, Option<u64>); 4]| -> Vec<Holdings> {
        let with = |(shard, (extents, loose, wanted))| Holdings {
            shard: ShardId(shard),
            generation: Generation(1),
            nodes: BTreeMap::from([(node, Held { extents, bytes: 100 * u64::from(extents), room: 0, loose, wanted })]),
            has_grants: false,
        };
        (1..).zip(held).map(with).collect()
    };
    let givings = |all: &[Holdings]| all.iter().map(|own| giving(own, all, node, false)).collect::<Vec<_>>();
    let full = all([(5, 0, None), (3, 0, Some(1)), (1, 0, Some(1)), (2, 0, None)]);
    assert_eq!(givings(&full), [Emptied, Emptied, Keep, Keep]);
    assert_eq!(full.iter().map(|own| turn(own, &full, node)).collect::<Vec<_>>(), [0, 1, 3, 2]);
    let coming = all([(5, 1, None), (3, 0, None), (1, 0, Some(1)), (2, 0, None)]);
    assert_eq!(givings(&coming), [Emptied, Keep, Keep, Keep]);
    let equal = all([(2, 0, None), (2, 0, None), (0, 0, Some(1)), (2, 0, None)]);
    assert_eq!(equal.iter().map(|own| turn(own, &equal, node)).collect::<Vec<_>>(), [2, 1, 3, 0]);
    assert_eq!(givings(&equal), [Emptied, Emptied, Keep, Emptied]);
}

#[test]
fn a_shard_gives_only_what_leaves_it_room_unless_it_is_richer_by_two() {
    let node = NodeId(1);
    let with = |shard: u32, held: Held| Holdings {
        shard: ShardId(shard),
        generation: Generation(1),
        nodes: BTreeMap::from([(node, held)]),
        has_grants: false,
    };
    let held = |extents: u32, room: u64, loose: u32, wanted: Option<u64>| Held {
        extents,
        bytes: u64::from(extents) * 100,
        room,
        loose,
        wanted,
    };
    let asked_of = |own: Held, other: Held| {
        let (own, other) = (with(1, own), with(2, other));
        giving(&own, &[own.clone(), other], node, false)
    };
    let wants = held(0, 0, 0, Some(1));
    assert_eq!(asked_of(held(1, 100, 1, None), wants), Giving::Loose);
    assert_eq!(asked_of(held(2, 120, 1, None), held(2, 0, 0, Some(1))), Giving::Keep, "20 of 100 would be too little");
    assert_eq!(asked_of(held(2, 130, 1, None), held(2, 0, 0, Some(1))), Giving::Loose);
    assert_eq!(asked_of(held(1, 100, 1, Some(1)), wants), Giving::Keep, "it wants some itself");
    assert_eq!(asked_of(held(2, 0, 0, None), wants), Giving::Emptied);
    assert_eq!(asked_of(held(2, 0, 0, Some(1)), wants), Giving::Emptied);
    assert_eq!(asked_of(held(1, 0, 0, None), wants), Giving::Emptied, "the other has none at all");
    assert_eq!(asked_of(held(1, 0, 0, Some(1)), wants), Giving::Keep, "two that want one take no turns");
    assert_eq!(
        asked_of(held(3, 150, 1, Some(1)), wants),
        Giving::Emptied,
        "the empty one, though it wants more itself"
    );
    assert_eq!(asked_of(held(2, 0, 0, None), held(1, 0, 0, Some(1))), Giving::Keep, "it is hardly richer");
    assert_eq!(asked_of(held(4, 400, 4, None), held(2, 100, 1, None)), Giving::Keep, "nobody needs it");
    assert_eq!(asked_of(held(4, 0, 0, None), held(2, 10, 0, None)), Giving::Keep, "no value goes for more room");
    let (own, other) = (with(1, held(4, 400, 4, None)), with(2, wants));
    assert_eq!(giving(&own, &[other], node, true), Giving::Keep, "there is unlent memory");
}
