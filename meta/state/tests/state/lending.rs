//! Lending by need: a directory and several shards, whose leaders do what is planned for them; *Nothing leaks* is counted after every step.

use crate::{
    bench::attested,
    directory::{certificate, cluster, region, register},
};
use quarry_meta_state::{
    Directory, RequestId, Shard,
    directory::{DirectoryCommand, DirectoryOutcome, Policy},
    lending::{Coming, Giving, Held, Holdings, ahead, coming, giving, ledger, turn},
    shard::{
        CommitEntry, DeleteKey, GrantRefusal, GrantRequest, Lack, Marks, Mode, Need, PlannedMove, Publish, Settings,
        ShardCommand, ShardOutcome, Sought, Victim, plan::Bounds,
    },
};
use quarry_wire::{
    frame::FrameKind,
    grant::{Class, Grant},
    ids::{ExtentId, Generation, LendNumber, NamespaceId, NodeId, RegionIndex, ShardId, SlotIndex, WriterId},
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
/// How long an extent is empty before it is given away: whoever was just lent it uses it first.
const EMPTY_FOR: u64 = 2_000;

struct Lenders {
    directory: Directory,
    shards: Vec<Shard>,
    at: u64,
    drawn: u64,
    /// Grants whose entries are committed, by shard.
    taken: u32,
    /// Since when extents are seen empty, by shard.
    empty: Vec<BTreeMap<(ExtentId, LendNumber), u64>>,
}

impl Lenders {
    /// So many nodes of sixteen extents, and so many shards; values have this many copies, one is enough.
    fn new(nodes: u64, shards: u32, copies: u8) -> Self {
        let mut it = Self::with(nodes, shards, copies, &[u64::from(EXTENTS) * EXTENT]);
        it.balance();
        it
    }
    /// The same with regions of these sizes on each node, and nothing is lent yet.
    fn with(nodes: u64, shards: u32, copies: u8, regions: &[u64]) -> Self {
        let made = (1..=shards).map(|id| Shard::new(ShardId(id), Settings::new(Generation(1), shards)));
        let mut it = Self {
            directory: Directory::new(),
            shards: made.collect(),
            at: 1_000,
            drawn: 0,
            taken: 0,
            empty: vec![BTreeMap::new(); shards as usize],
        };
        it.direct(DirectoryCommand::InitCluster(cluster(shards)));
        for node in 1..=nodes {
            it.direct(DirectoryCommand::AdmitCertificate(certificate(node)));
            for (index, bytes) in (0..).map(RegionIndex).zip(regions) {
                it.direct(DirectoryCommand::RegisterRegion { node: NodeId(node), index, bytes: *bytes, life: 1 });
            }
        }
        let request = RequestId { at: it.directory.log_time(), random: 77 };
        let policy = Policy { least: 1, ..Policy::new(Class::Cache, copies) };
        it.direct(DirectoryCommand::CreateNamespace { request, name: "blocks".into(), policy });
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
                match giving(&own, &all, *node, unlent.get(node).copied()) {
                    Giving::Keep => {}
                    Giving::Loose { least, at_once } => self.drop_one(index, *node, least, at_once),
                    Giving::Compacted { .. } => self.compact(index, *node),
                    Giving::Emptied => {
                        if turn(&own, &all, *node) == 0
                            && let Some((_, victims)) =
                                self.shards[index].victims_of_an_extent(*node, 1, |_| LogTime(0))
                        {
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
    /// Gives an empty extent of `node` back, if one has been empty for long enough.
    fn drop_one(&mut self, index: usize, node: NodeId, least: u64, at_once: bool) {
        let is_large = |it: &ExtentId| self.shards[index].bytes_of(*it).is_some_and(|bytes| bytes >= least);
        let idle = self.shards[index].idle_extents().filter(|(it, _)| it.region.node == node && is_large(it));
        let idle: BTreeSet<_> = idle.collect();
        let empty = &mut self.empty[index];
        empty.retain(|lent, _| lent.0.region.node != node || idle.contains(lent));
        for lent in &idle {
            empty.entry(*lent).or_insert(self.at);
        }
        let first = idle.iter().map(|lent| (empty[lent], *lent)).min();
        if let Some((since, (extent, lend))) = first
            && (at_once || since + EMPTY_FOR <= self.at)
        {
            assert_eq!(self.apply(index, ShardCommand::DropExtent { extent, lend }), ShardOutcome::DropExtent(Ok(())));
        }
    }
    /// Moves some values out of the extent of `node` that has the fewest, as the leader does.
    fn compact(&mut self, index: usize, node: NodeId) {
        let (asked, none) = (BTreeSet::from([node]), BTreeSet::new());
        let shard = &self.shards[index];
        let Some(sparse) = shard.sparse_extent(&Sought { asked, ..Sought::default() }) else { return };
        let away = BTreeSet::from([sparse.extent]);
        let plan = shard.plan_move(NodeId(100), LogTime(self.at), &sparse.values, &away, &none);
        let Some(PlannedMove { command, entries, .. }) = plan else { return };
        let ShardOutcome::Grant(Ok(grant)) = self.apply(index, command) else { panic!("it was planned") };
        let attested = grant.holders.iter().map(|holder| attested(holder.region.node.0)).collect();
        let publish = Publish { grant: grant.id, entries, attested };
        let ShardOutcome::Publish(outcomes) = self.apply(index, ShardCommand::Publish(publish)) else { panic!() };
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
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
    /// The slabs that the leader of a shard would let go now.
    fn victims(&self, index: usize, lacks: &BTreeSet<Lack>) -> Vec<Victim> {
        let (shard, all) = (&self.shards[index], self.holdings());
        let mut comes = self.directory.unlent();
        for node in self.directory.extents().map(|(extent, ..)| extent.region.node) {
            if let Some(Coming::Loose(bytes) | Coming::Compacted(bytes)) = coming(&all[index], &all, node) {
                comes.insert(node, bytes);
            }
        }
        let need = Need { marks: Marks::default(), lacks, wanted: None, pressed: &BTreeSet::new(), coming: &comes };
        shard.victims(need, |_| LogTime(0))
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
    assert!((10..=14).contains(&used), "ten that are full, and at most a quarter of room: {used}");
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
                let victims = it.shards[index].victims_of_an_extent(NodeId(1), 1, |_| LogTime(0));
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
fn an_extent_that_is_lent_and_not_seen_yet_or_given_back_is_in_transit() {
    let it = Lenders::new(1, 2, 1);
    let holdings: Vec<Holdings> = it.shards.iter().map(Shard::holdings).collect();
    assert_eq!(it.directory.in_transit(&holdings), BTreeMap::new(), "both have seen their two");
    // A replica that has not seen what it was lent.
    let late = Shard::new(ShardId(2), Settings::new(Generation(1), 2)).holdings();
    let coming = BTreeMap::from([(NodeId(1), EXTENT)]);
    assert_eq!(it.directory.in_transit(&[holdings[0].clone(), late]), coming);
    let mut gives = it.shards[1].clone();
    let (extent, lend) = gives.idle_extents().next().unwrap();
    gives.apply(LogTime(it.at), ShardCommand::DropExtent { extent, lend });
    assert_eq!(it.directory.in_transit(&[holdings[0].clone(), gives.holdings()]), coming);
}

/// What one shard has of node 1: extents of 100 bytes each.
fn held(extents: u32, room: u64, loose: u32, wanted: Option<u64>) -> Held {
    Held {
        extents,
        bytes: u64::from(extents) * 100,
        room,
        loose,
        largest: u64::from(extents.min(1)) * 100,
        loose_largest: u64::from(loose.min(1)) * 100,
        wanted,
    }
}

/// The shards that have this, numbered from 1, all of them written or none.
fn shards(held: &[Held], is_written: bool) -> Vec<Holdings> {
    let with = |(shard, held): (u32, &Held)| Holdings {
        shard: ShardId(shard),
        generation: Generation(1),
        nodes: Arc::new(BTreeMap::from([(NodeId(1), *held)])),
        has_grants: is_written,
        is_written,
    };
    (1..).zip(held).map(with).collect()
}

/// What the first of them is to do.
fn asked_of(is_written: bool, all: &[Held]) -> Giving {
    let all = shards(all, is_written);
    giving(&all[0], &all, NodeId(1), None)
}

#[test]
fn every_shard_that_is_richer_by_two_empties_an_extent_in_turn_unless_one_is_coming() {
    use Giving::{Emptied, Keep};
    let node = NodeId(1);
    let all = |all: [(u32, u32, Option<u64>); 4]| {
        shards(&all.map(|(extents, loose, wanted)| held(extents, u64::from(loose) * 100, loose, wanted)), true)
    };
    let givings = |all: &[Holdings]| all.iter().map(|own| giving(own, all, node, None)).collect::<Vec<_>>();
    let full = all([(5, 0, None), (3, 0, Some(1)), (1, 0, Some(1)), (2, 0, None)]);
    assert_eq!(givings(&full), [Emptied, Emptied, Keep, Keep]);
    assert_eq!(full.iter().map(|own| turn(own, &full, node)).collect::<Vec<_>>(), [0, 1, 3, 2]);
    let coming = all([(5, 1, None), (3, 1, None), (1, 0, Some(1)), (2, 2, None)]);
    let now = |at_once| Giving::Loose { least: 1, at_once };
    assert_eq!(givings(&coming), [now(true), now(true), Keep, now(false)]);
    let equal = all([(2, 0, None), (2, 0, None), (0, 0, Some(1)), (2, 0, None)]);
    assert_eq!(equal.iter().map(|own| turn(own, &equal, node)).collect::<Vec<_>>(), [2, 1, 3, 0]);
    assert_eq!(givings(&equal), [Emptied, Emptied, Keep, Emptied]);
}

#[test]
fn what_is_empty_goes_to_who_needs_it_unless_a_poorer_writer_needs_it_as_room() {
    let loose = Giving::Loose { least: 1, at_once: false };
    let wants = held(0, 0, 0, Some(1));
    for is_written in [false, true] {
        assert_eq!(asked_of(is_written, &[held(1, 100, 1, None), wants]), loose);
        assert_eq!(asked_of(is_written, &[held(2, 120, 1, None), held(2, 0, 0, Some(1))]), loose);
        let room = if is_written { loose } else { Giving::Keep };
        assert_eq!(asked_of(is_written, &[held(2, 120, 1, None), held(2, 20, 0, None)]), room, "that one is short");
        assert_eq!(asked_of(is_written, &[held(2, 130, 1, None), held(2, 40, 0, None)]), room, "it only asks");
        assert_eq!(asked_of(is_written, &[held(2, 110, 1, None), held(2, 40, 0, None)]), Giving::Keep);
        assert_eq!(asked_of(is_written, &[held(1, 100, 1, Some(1)), wants]), Giving::Keep, "it wants some itself");
        assert_eq!(asked_of(is_written, &[held(4, 400, 4, None), held(2, 100, 1, None)]), Giving::Keep, "no need");
        let at_once = Giving::Loose { least: 1, at_once: true };
        assert_eq!(asked_of(is_written, &[held(3, 150, 1, Some(1)), wants]), at_once, "though it wants more itself");
    }
    let poorer = [held(2, 105, 1, None), held(3, 0, 0, Some(1))];
    assert_eq!((asked_of(true, &poorer), asked_of(false, &poorer)), (Giving::Keep, loose));
    // What one that is short got from its equal does not come back from it.
    let equals = [held(16, 240, 1, None), held(16, 190, 0, None)];
    assert_eq!(asked_of(true, &equals), Giving::Keep);
    let all = shards(&[held(2, 105, 1, None), wants], true);
    assert_eq!(giving(&all[0], &all, NodeId(1), Some(100)), Giving::Keep, "there is unlent memory");
}

#[test]
fn values_are_moved_for_others_before_any_go_and_go_only_for_who_found_no_place() {
    let moved = |or_emptied| Giving::Compacted { or_emptied };
    let (short, wants) = (held(2, 10, 0, None), held(1, 0, 0, Some(1)));
    assert_eq!(asked_of(true, &[held(3, 140, 0, None), short]), moved(false));
    assert_eq!(asked_of(true, &[held(3, 130, 0, None), short]), Giving::Keep, "30 of 200 would be too little");
    assert_eq!(asked_of(true, &[held(3, 120, 0, None), wants]), Giving::Emptied, "and 20 for who found no place");
    assert_eq!(asked_of(true, &[held(3, 130, 0, None), wants]), moved(true));
    assert_eq!(asked_of(true, &[held(1, 90, 0, None), held(1, 0, 0, Some(1))]), Giving::Keep, "it has no other");
    assert_eq!(asked_of(true, &[held(3, 130, 0, None), wants, held(1, 100, 1, None)]), Giving::Keep, "one is coming");
    assert_eq!(asked_of(true, &[held(3, 0, 0, None), wants]), Giving::Emptied);
    assert_eq!(asked_of(true, &[held(2, 0, 0, None), held(0, 0, 0, Some(1))]), Giving::Emptied);
    assert_eq!(asked_of(true, &[held(2, 0, 0, Some(1)), held(0, 0, 0, Some(1))]), Giving::Emptied);
    assert_eq!(asked_of(true, &[held(1, 0, 0, None), held(0, 0, 0, Some(1))]), Giving::Emptied, "that one has none");
    assert_eq!(asked_of(true, &[held(1, 0, 0, Some(1)), held(0, 0, 0, Some(1))]), Giving::Keep, "no turns");
    assert_eq!(asked_of(true, &[held(2, 0, 0, None), wants]), Giving::Keep, "it is hardly richer");
    assert_eq!(asked_of(true, &[held(4, 0, 0, None), short]), Giving::Keep, "no value goes for more room");
    // Who can move values comes first, and not for ever.
    let all = shards(&[held(4, 0, 0, None), held(3, 130, 0, None), wants], true);
    assert_eq!(giving(&all[0], &all, NodeId(1), None), Giving::Emptied);
    assert_eq!((turn(&all[0], &all, NodeId(1)), turn(&all[1], &all, NodeId(1))), (1, 1));
}

#[test]
fn a_shard_waits_for_what_others_have_empty_or_can_make_empty_and_for_nothing_else() {
    let node = NodeId(1);
    let comes = |all: &[Held]| {
        let all = shards(all, true);
        coming(&all[0], &all, node)
    };
    let full = held(2, 0, 0, Some(1));
    assert_eq!(comes(&[held(3, 0, 0, Some(1)), held(2, 105, 1, None)]), None, "a poorer writer needs it");
    assert_eq!(comes(&[full, held(2, 100, 1, None)]), Some(Coming::Loose(100)));
    assert_eq!(comes(&[full, held(3, 140, 0, None)]), Some(Coming::Compacted(100)));
    assert_eq!(comes(&[full, held(3, 140, 0, None), held(2, 100, 1, None)]), Some(Coming::Loose(100)));
    assert_eq!(comes(&[full, held(2, 100, 1, Some(1)), held(9, 0, 0, None)]), None);
    let mut old = shards(&[full, held(2, 200, 2, None)], false);
    assert_eq!(coming(&old[0], &old, node), Some(Coming::Loose(100)));
    old[1].generation = Generation(2);
    assert_eq!(coming(&old[0], &old, node), None);
}

/// A slot that only the extents of the first region hold of a node with two regions.
const LARGE: u64 = 2 * EXTENT;

fn of_two_sizes(shards: u32) -> Lenders {
    Lenders::with(1, shards, 1, &[u64::from(EXTENTS) * LARGE, u64::from(EXTENTS) * EXTENT])
}

#[test]
fn small_needs_take_small_extents_and_leave_the_large_ones_for_large_slots() {
    let mut it = of_two_sizes(8);
    it.balance();
    for shard in [1, 2, 3] {
        it.apply(shard, ShardCommand::Want { nodes: vec![NodeId(1)], bytes: EXTENT });
    }
    it.balance();
    assert_eq!(it.lent(1), [0; 8], "none of the region with large ones");
    it.apply(4, ShardCommand::Want { nodes: vec![NodeId(1)], bytes: LARGE });
    it.balance();
    assert_eq!(it.lent(1), [0, 0, 0, 0, 1, 0, 0, 0]);
}

#[test]
fn a_want_of_a_large_slot_is_met_though_small_extents_are_lent_to_nobody() {
    let mut it = of_two_sizes(8);
    let large: Vec<ExtentId> =
        it.directory.extents().map(|(extent, ..)| extent).filter(|extent| extent.region == region(1)).collect();
    for extent in large {
        it.direct(DirectoryCommand::LendExtent { extent, shard: ShardId(1) });
    }
    it.balance();
    assert_eq!(it.lent(1)[0], EXTENTS as usize);
    assert_eq!(it.directory.unlent(), BTreeMap::from([(NodeId(1), EXTENT)]), "only small ones are left");
    it.apply(5, ShardCommand::Want { nodes: vec![NodeId(1)], bytes: LARGE });
    it.balance();
    assert_eq!(it.lent(1)[5], 1, "{:?}", it.holdings());
}

#[test]
fn only_what_is_large_enough_is_given_and_waited_for() {
    let (node, small) =
        (NodeId(1), |extents, loose| Held { largest: 40, loose_largest: 40, ..held(extents, 40, loose, None) });
    let wants = held(1, 0, 0, Some(80));
    let all = |rich: Held| shards(&[rich, wants], true);
    let asked = |rich: Held, unlent| giving(&all(rich)[0], &all(rich), node, unlent);
    assert_eq!(asked(small(3, 1), None), Giving::Keep, "no value of a small one goes: it is of no use");
    let mixed = Held { loose_largest: 40, ..held(3, 40, 1, None) };
    assert_eq!(asked(mixed, None), Giving::Emptied, "nor is a small one that is empty");
    assert_eq!(asked(held(3, 200, 1, None), None), Giving::Loose { least: 80, at_once: true });
    assert_eq!(asked(held(3, 200, 1, None), Some(40)), Giving::Loose { least: 80, at_once: true }, "nor one of nobody");
    assert_eq!(asked(held(3, 200, 1, None), Some(80)), Giving::Keep);
    let comes = |rich: Held| coming(&all(rich)[1], &all(rich), node);
    assert_eq!((comes(small(3, 1)), comes(held(3, 200, 1, None))), (None, Some(Coming::Loose(100))));
}

/// Of a node's memory, a shard has this many extents of 100 bytes, and so much room for slabs.
fn has_room(extents: u32, room: u64) -> Holdings {
    shards(&[held(extents, room, 1, None)], true).remove(0)
}

/// What goes wrong between two shards of a cluster with these marks: nothing, or what one of them does.
fn wrong_with(marks: Marks) -> Option<String> {
    let node = NodeId(1);
    let part = |extents: u32, mark: u16| u64::from(extents) * 100 * u64::from(mark) / 1000;
    for extents in 1..=512 {
        let evicts = has_room(extents, part(extents, marks.low).saturating_sub(1));
        if !evicts.needs(node) {
            return Some(format!("with {extents} extents it evicts, and others do not see that it needs any"));
        }
        // To one that has as many; who has two more gives without more ado.
        if has_room(extents, part(extents, marks.high)).gives(node, &has_room(extents, 0)) {
            return Some(format!("with {extents} extents it gives away what it has just evicted"));
        }
    }
    None
}

#[test]
fn with_every_mark_that_several_shards_may_have_others_see_who_evicts_and_what_that_makes_stays() {
    assert_eq!(wrong_with(Marks::most(8)), None);
    assert_eq!(wrong_with(Marks::default()), None);
    let Marks { low, high } = Marks::most(8);
    // A little more, and values go while other shards have empty extents.
    assert!(wrong_with(Marks { low: low + 5, high }).unwrap().contains("do not see"));
    assert!(wrong_with(Marks { low, high: high + 5 }).unwrap().contains("gives away"));
    assert_eq!(Marks::most(1), Marks { low: 999, high: 1000 }, "a lone shard has nobody to give to");
}

#[test]
fn a_shard_that_nobody_writes_to_evicts_nothing_for_room_unless_it_is_alone() {
    let full = |shards: u32| {
        let mut it = Lenders::new(1, shards, 1);
        while it.put(0, SLOTS).is_some() {}
        it.balance();
        assert!(!it.shards[0].is_written() && it.shards[0].holdings().nodes[&NodeId(1)].room == 0);
        it
    };
    let none = BTreeSet::new();
    assert_eq!(full(2).victims(0, &none), [], "others may take what is free, and it lacks nothing");
    assert_ne!(full(1).victims(0, &none), [], "nobody else could use it: the next writer need not wait");
    // A writer comes back.
    let mut it = full(2);
    let key = it.shards[0].list(SPACE, b"", None).next().unwrap().key.clone();
    let request = RequestId { at: it.shards[0].log_time(), random: 1 };
    let keys = vec![DeleteKey { key, expected: None }];
    it.apply(0, ShardCommand::Delete { request, namespace: SPACE, keys });
    it.at += millis(QUARANTINE);
    it.apply(0, ShardCommand::Tick { horizon: None });
    assert_eq!(it.victims(0, &none), []);
    let open = it.plan(0, 1).unwrap();
    it.apply(0, open);
    assert_ne!(it.victims(0, &none), []);
}

/// Writers of several shards put and delete whatever they like, as long as all values together have no more than half of the memory: however it
/// is spread over the shards, and whoever had the memory before, everybody finds a place in time and nothing goes.
#[test]
fn no_value_goes_while_half_of_the_memory_is_free_whichever_shards_are_used() {
    for seed in 0..6 {
        let mut it = Lenders::new(2, 4, 1);
        let mut random = Random(seed);
        let mut keys: Vec<Vec<Key>> = vec![Vec::new(); 4];
        let budget = usize::try_from(2 * EXTENTS * SLOTS / 2).unwrap();
        for step in 0..120 {
            let hot = usize::try_from((seed + step / 20) % 4).unwrap();
            let index = if random.below(4) == 0 { usize::try_from(random.below(4)).unwrap() } else { hot };
            let slots = 1 + usize::try_from(random.below(16)).unwrap();
            let used: usize = keys.iter().map(Vec::len).sum();
            if used + slots > budget || random.below(4) == 0 {
                // Of one shard, sometimes nearly all.
                let from = usize::try_from(random.below(4)).unwrap();
                let part = 2 + random.below(14);
                let gone: Vec<Key> = keys[from].extract_if(.., |_| random.below(part) > 0).collect();
                for keys in gone.chunks(32) {
                    it.drawn += 1;
                    let request = RequestId { at: it.shards[from].log_time(), random: it.drawn };
                    let keys = keys.iter().map(|key| DeleteKey { key: key.clone(), expected: None }).collect();
                    it.apply(from, ShardCommand::Delete { request, namespace: SPACE, keys });
                }
            } else {
                let before = it.taken;
                let grant = it.put(index, u32::try_from(slots).unwrap());
                let grant = grant.unwrap_or_else(|| panic!("seed {seed}, step {step}: {:?}", it.holdings()));
                let own = (before + 1..=it.taken).map(|number| Key::new(format!("k{number}")).unwrap());
                let own: Vec<Key> = own.filter(|key| key.shard(SPACE, 4) == grant.id.shard).collect();
                assert_eq!(own.len(), grant.slots.0 as usize);
                keys[index].extend(own);
            }
            // A writer keeps a slot open, so that its shard needs room.
            if let Ok(command) = it.plan(hot, 1) {
                it.apply(hot, command);
            }
            it.round();
            it.at += random.below(2_000);
            for index in 0..4 {
                it.apply(index, ShardCommand::Tick { horizon: None });
                let victims = it.victims(index, &BTreeSet::new());
                assert_eq!(victims, [], "seed {seed}, step {step}: {:?}", it.holdings());
            }
        }
        let values: usize = it.shards.iter().map(Shard::values).sum();
        assert_eq!(values, keys.iter().map(Vec::len).sum::<usize>(), "seed {seed}");
    }
}

/// Splitmix64: the same numbers every time.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}
