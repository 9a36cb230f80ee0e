//! Cables: a shard with memory lent to it, whose every step is checked.

use quarry_meta_state::{
    RequestId, Shard,
    directory::{FeedChange, FeedEntry, FeedSlice, Namespace, Policy, RegionState},
    shard::{
        Attested, CommitEntry, CommitOutcome, Covers, DeleteKey, DeleteRefusal, Deleted, GrantRefusal, GrantRequest,
        Mode, PinRefusal, PinRequest, PinTerm, Pinned, Publish, RenewRefusal, Settings, ShardCommand, ShardOutcome,
    },
};
use quarry_wire::{
    frame::FrameKind,
    grant::{Class, Grant},
    ids::{
        CertificateSerial, ExtentId, ExtentIndex, FeedNumber, Generation, Incarnation, LendNumber, NamespaceId, NodeId,
        PinId, RegionId, RegionIndex, ShardId, SlotIndex, WriterId,
    },
    key::Key,
    signed::Signature,
    units::{LogTime, SlotCount, SlotSize},
    version::{HybridClock, Version},
};
use std::{collections::BTreeSet, time::Duration};

pub(crate) const GEN: Generation = Generation(1);
pub(crate) const SPACE: NamespaceId = NamespaceId(1);
pub(crate) const REGION_BYTES: u64 = 1 << 20;
pub(crate) const EXTENTS: u32 = 16;
pub(crate) const SLOT: u32 = 4096;
pub(crate) const TTL: u64 = 10_000;
pub(crate) const META: NodeId = NodeId(100);

/// Random histories per test: 128, or half of `PROPTEST_CASES`.
pub(crate) fn cases() -> u32 {
    proptest::test_runner::Config::default().cases / 2
}

pub(crate) struct Bench {
    pub(crate) shard: Shard,
    pub(crate) at: u64,
    pub(crate) feed: u64,
    drawn: u64,
}

pub(crate) fn region(node: u64) -> RegionId {
    RegionId { node: NodeId(node), index: RegionIndex(0) }
}
pub(crate) fn extent(node: u64, index: u32) -> ExtentId {
    ExtentId { region: region(node), index: ExtentIndex(index) }
}
pub(crate) fn lend(number: u64) -> LendNumber {
    LendNumber::new(GEN, number)
}
pub(crate) fn life(node: u64, incarnation: u64, up: bool) -> FeedChange {
    let incarnation = Incarnation::new(GEN, incarnation);
    FeedChange::Region(RegionState { region: region(node), incarnation, bytes: REGION_BYTES, up })
}
pub(crate) fn lent(node: u64, index: u32, shard: u32, number: u64) -> FeedChange {
    FeedChange::Lent {
        extent: extent(node, index),
        shard: ShardId(shard),
        lend: lend(number),
        region_bytes: REGION_BYTES,
    }
}
pub(crate) fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}
pub(crate) fn version(clock: u64) -> Version {
    Version { clock: HybridClock(clock), writer: WriterId([7; 16]) }
}
pub(crate) fn writer(number: u8) -> WriterId {
    WriterId([number; 16])
}
pub(crate) fn entry(slot: u32, name: &str, clock: u64, mode: Mode) -> CommitEntry {
    CommitEntry {
        slot: SlotIndex(slot),
        key: key(name),
        version: version(clock),
        kind: FrameKind::Value,
        payload_bytes: 1_000,
        payload_crc: 0x1234_5678,
        mode,
    }
}
pub(crate) fn attested(node: u64) -> Attested {
    Attested {
        node: NodeId(node),
        covers: Covers::All,
        generation: GEN,
        serial: CertificateSerial(node),
        signature: Signature([u8::try_from(node).unwrap(); 64]),
    }
}

impl Bench {
    /// `nodes` nodes with one region of 1 MiB each, all of it lent to the only shard; a namespace with as many copies (at most 3), one enough.
    pub(crate) fn new(nodes: u64) -> Self {
        let copies = u8::try_from(nodes.min(3)).unwrap();
        Self::with(nodes, Policy { least: 1, ..Policy::new(Class::Cache, copies) }, 1)
    }
    pub(crate) fn with(nodes: u64, policy: Policy, shards: u32) -> Self {
        let shard = Shard::new(ShardId(1), Settings::new(GEN, shards));
        let mut bench = Self { shard, at: 1_000, feed: 0, drawn: 0 };
        let namespace = Namespace { id: SPACE, name: "blocks".into(), policy };
        bench.tell(vec![FeedChange::NewGeneration, FeedChange::Namespace(namespace)]);
        for node in 1..=nodes {
            bench.tell(vec![life(node, 1, true)]);
            bench.tell((0..EXTENTS).map(|index| lent(node, index, 1, 1)).collect());
        }
        bench
    }
    pub(crate) fn apply(&mut self, command: ShardCommand) -> ShardOutcome {
        let before = self.shard.clone();
        let shown = format!("{command:?}");
        let outcome = self.shard.apply(LogTime(self.at), command);
        self.shard.check().unwrap_or_else(|broken| panic!("{broken}\nafter {shown}"));
        self.shard.check_step(&before).unwrap_or_else(|broken| panic!("{broken}\nafter {shown}"));
        outcome
    }
    pub(crate) fn slice(&mut self, changes: Vec<FeedChange>) -> FeedSlice {
        let from = FeedNumber::new(GEN, self.feed);
        let entries = changes.into_iter().map(|change| {
            self.feed += 1;
            FeedEntry { number: FeedNumber::new(GEN, self.feed), change }
        });
        let entries = entries.collect();
        FeedSlice {
            from: if from.0.number == 0 { FeedNumber::default() } else { from },
            entries,
            to: FeedNumber::new(GEN, self.feed),
        }
    }
    pub(crate) fn tell(&mut self, changes: Vec<FeedChange>) {
        let slice = self.slice(changes);
        let to = slice.to;
        assert_eq!(self.apply(ShardCommand::ApplyFeed(slice)), ShardOutcome::Feed(Ok(to)));
    }
    pub(crate) fn request(&mut self) -> RequestId {
        self.drawn += 1;
        RequestId { at: self.shard.log_time(), random: self.drawn }
    }
    pub(crate) fn asked(&mut self, slots: u32) -> GrantRequest {
        GrantRequest {
            request: self.request(),
            writer: writer(1),
            namespace: SPACE,
            slot_size: SlotSize(SLOT),
            slots: SlotCount(slots),
            ttl: Duration::from_millis(TTL),
        }
    }
    pub(crate) fn plan(&mut self, slots: u32) -> Result<ShardCommand, GrantRefusal> {
        let asked = self.asked(slots);
        let avoid = BTreeSet::new();
        self.shard.planner(LogTime(self.at), &avoid).grant(META, asked)
    }
    pub(crate) fn try_grant(&mut self, command: ShardCommand) -> Result<Grant, GrantRefusal> {
        match self.apply(command) {
            ShardOutcome::Grant(outcome) => outcome,
            other => panic!("{other:?}"),
        }
    }
    pub(crate) fn grant(&mut self, slots: u32) -> Grant {
        let command = self.plan(slots).unwrap();
        self.try_grant(command).unwrap()
    }
    pub(crate) fn publish_with(
        &mut self,
        grant: &Grant,
        entries: Vec<CommitEntry>,
        attested: Vec<Attested>,
    ) -> Vec<CommitOutcome> {
        match self.apply(ShardCommand::Publish(Publish { grant: grant.id, entries, attested })) {
            ShardOutcome::Publish(outcomes) => outcomes,
            other => panic!("{other:?}"),
        }
    }
    /// Publishes one entry, attested by all holders.
    pub(crate) fn commit(&mut self, grant: &Grant, entry: CommitEntry) -> CommitOutcome {
        let nodes = grant.holders.iter().map(|holder| attested(holder.region.node.0)).collect();
        self.publish_with(grant, vec![entry], nodes)[0]
    }
    pub(crate) fn seal(&mut self, grant: &Grant, fill: u32) {
        let outcome = self.apply(ShardCommand::Seal { grant: grant.id, fill: SlotCount(fill) });
        assert_eq!(outcome, ShardOutcome::Seal(Ok(SlotCount(fill))));
    }
    pub(crate) fn delete(&mut self, name: &str) -> Result<Deleted, DeleteRefusal> {
        let request = self.request();
        self.delete_as(request, name)
    }
    pub(crate) fn delete_as(&mut self, request: RequestId, name: &str) -> Result<Deleted, DeleteRefusal> {
        let keys = vec![DeleteKey { key: key(name), expected: None }];
        match self.apply(ShardCommand::Delete { request, namespace: SPACE, keys }) {
            ShardOutcome::Delete(Ok(outcomes)) => outcomes[0],
            other => panic!("{other:?}"),
        }
    }
    pub(crate) fn pin_request(&mut self, owner: u8, names: &[&str], ms: u64) -> PinRequest {
        PinRequest {
            request: self.request(),
            owner: writer(owner),
            namespace: SPACE,
            keys: names.iter().map(|name| key(name)).collect(),
            duration: Duration::from_millis(ms),
        }
    }
    pub(crate) fn pin_as(&mut self, asked: PinRequest) -> Result<Pinned, PinRefusal> {
        match self.apply(ShardCommand::Pin(asked)) {
            ShardOutcome::Pin(outcome) => outcome,
            other => panic!("{other:?}"),
        }
    }
    pub(crate) fn pin(&mut self, owner: u8, names: &[&str], ms: u64) -> PinId {
        let asked = self.pin_request(owner, names, ms);
        self.pin_as(asked).unwrap().pin.unwrap()
    }
    pub(crate) fn renew(&mut self, owner: u8, pin: PinId, ms: u64) -> Result<PinTerm, RenewRefusal> {
        let request = self.request();
        self.renew_as(request, owner, pin, ms)
    }
    pub(crate) fn renew_as(
        &mut self,
        request: RequestId,
        owner: u8,
        pin: PinId,
        ms: u64,
    ) -> Result<PinTerm, RenewRefusal> {
        let duration = Duration::from_millis(ms);
        match self.apply(ShardCommand::Renew { request, owner: writer(owner), pin, duration }) {
            ShardOutcome::Renew(outcome) => outcome,
            other => panic!("{other:?}"),
        }
    }
    pub(crate) fn release(&mut self, owner: u8, pin: PinId) -> bool {
        match self.apply(ShardCommand::Release { owner: writer(owner), pin }) {
            ShardOutcome::Release { held } => held,
            other => panic!("{other:?}"),
        }
    }
    pub(crate) fn tick(&mut self, horizon: Option<u64>) -> LogTime {
        match self.apply(ShardCommand::Tick { horizon: horizon.map(LogTime) }) {
            ShardOutcome::Tick { horizon } => horizon,
            other => panic!("{other:?}"),
        }
    }
    pub(crate) fn wait(&mut self, ms: u64) {
        self.at += ms;
        self.tick(None);
    }
    pub(crate) fn free_bytes(&self) -> u64 {
        self.shard.space().total.free_bytes
    }
    pub(crate) fn current(&self, name: &str) -> Option<Version> {
        self.shard.version(SPACE, &key(name))
    }
    /// Nothing more comes: no request, no message. Removes every key, then only lets time pass. Everything must be free again.
    pub(crate) fn drain(&mut self) {
        let keys: Vec<_> = self.shard.list(SPACE, b"", None).map(|listed| listed.key.clone()).collect();
        let request = self.request();
        let keys = keys.into_iter().map(|key| DeleteKey { key, expected: None }).collect();
        self.apply(ShardCommand::Delete { request, namespace: SPACE, keys });
        let mut steps = 0;
        while let Some(due) = self.shard.next_deadline() {
            assert!(due > self.shard.log_time(), "a deadline lies ahead");
            self.at = due.0;
            self.tick(None);
            steps += 1;
            assert!(steps < 10_000, "deadlines end");
        }
        let space = self.shard.space().total;
        assert_eq!(space.free_bytes, space.bytes, "Nothing leaks: {space:?}");
        assert_eq!(self.shard.values(), 0);
        let idle = self.shard.idle_extents().collect::<Vec<_>>();
        assert_eq!(idle.len() as u64, space.extents);
        for (extent, lend) in idle {
            assert_eq!(self.apply(ShardCommand::DropExtent { extent, lend }), ShardOutcome::DropExtent(Ok(())));
        }
        assert_eq!(self.shard.space().total.bytes, 0);
    }
}
