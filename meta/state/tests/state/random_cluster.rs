//! Random histories of a directory and two shards that follow its feed, with lost, repeated and late messages, dying nodes, restarts and
//! leaders that know less than the last one: after every step each byte of every region is accounted for (*Nothing leaks*), and when messages
//! arrive at last everything that is lent is held.

use crate::bench::cases;
use crate::directory::{UUID, certificate, cluster, extent, node_key, region, register};
use proptest::{collection::vec, prelude::*};
use quarry_meta_state::{
    Directory, Entry, RequestId, Shard,
    directory::{DirectoryCommand, DirectoryOutcome, FeedSlice, Policy},
    lending::{Account, Holdings, ledger},
    map::{Maps, Use},
    shard::{Attested, CommitEntry, Covers, GrantRequest, Mode, Publish, Settings, ShardCommand, ShardOutcome},
};
use quarry_wire::{
    certificate::Revocations,
    frame::FrameKind,
    grant::{Class, Grant},
    ids::{
        CertificateSerial, ExtentId, Generation, LendNumber, NamespaceId, NodeId, RegionEpoch, ShardId, SlotIndex,
        WriterId,
    },
    key::Key,
    region::{FabricName, RegionRecord},
    signed::Signature,
    units::{LogTime, SlotCount, SlotSize},
    version::{HybridClock, Version},
};
use std::{collections::BTreeSet, time::Duration};

#[derive(Clone, Debug)]
enum Step {
    Wait(u16),
    Register { node: u8, life: u8 },
    Die { node: u8 },
    OldDeath(u8),
    Record { node: u8, epoch: u8 },
    Certify(u8),
    Revoke { number: u8, serial: u8 },
    Announce { node: u8, address: u8 },
    Namespace { random: u8, name: u8 },
    Lend(u8),
    LendWild { node: u8, index: u8, shard: u8 },
    StaleLend(u8),
    Want { shard: u8, node: u8, bytes: u32 },
    Restart { shard: u8 },
    Pull { shard: u8, max: u8 },
    OldSlice { shard: u8, index: u8 },
    Drop { shard: u8, index: u8 },
    Return { shard: u8 },
    OldReturn(u8),
    Generation(u8),
    Grant { shard: u8, slots: u8 },
    Publish { grant: u8, slot: u8, key: u8 },
    Evict { shard: u8, grants: Vec<u8> },
    Again(u16),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0u16..8_000).prop_map(Step::Wait),
        3 => (1u8..5, 0u8..4).prop_map(|(node, life)| Step::Register { node, life }),
        1 => (1u8..4).prop_map(|node| Step::Die { node }),
        1 => any::<u8>().prop_map(Step::OldDeath),
        1 => (1u8..4, 0u8..4).prop_map(|(node, epoch)| Step::Record { node, epoch }),
        1 => (1u8..5).prop_map(Step::Certify),
        1 => (0u8..4, 4u8..6).prop_map(|(number, serial)| Step::Revoke { number, serial }),
        1 => (1u8..5, 0u8..2).prop_map(|(node, address)| Step::Announce { node, address }),
        1 => (0u8..4, 0u8..3).prop_map(|(random, name)| Step::Namespace { random, name }),
        4 => (1u8..40).prop_map(Step::Lend),
        1 => (1u8..40).prop_map(Step::StaleLend),
        3 => (0u8..2, 1u8..5, 1u32..100_000).prop_map(|(shard, node, bytes)| Step::Want { shard, node, bytes }),
        1 => (0u8..2).prop_map(|shard| Step::Restart { shard }),
        1 => (1u8..5, 0u8..18, 0u8..4).prop_map(|(node, index, shard)| Step::LendWild { node, index, shard }),
        6 => (0u8..2, 1u8..40).prop_map(|(shard, max)| Step::Pull { shard, max }),
        2 => (0u8..2, any::<u8>()).prop_map(|(shard, index)| Step::OldSlice { shard, index }),
        4 => (0u8..2, any::<u8>()).prop_map(|(shard, index)| Step::Drop { shard, index }),
        3 => (0u8..2).prop_map(|shard| Step::Return { shard }),
        2 => any::<u8>().prop_map(Step::OldReturn),
        1 => (0u8..3).prop_map(Step::Generation),
        3 => (0u8..2, 1u8..6).prop_map(|(shard, slots)| Step::Grant { shard, slots }),
        4 => (any::<u8>(), 0u8..6, 0u8..6).prop_map(|(grant, slot, key)| Step::Publish { grant, slot, key }),
        2 => (0u8..2, vec(any::<u8>(), 0..4)).prop_map(|(shard, grants)| Step::Evict { shard, grants }),
        2 => any::<u16>().prop_map(Step::Again),
    ]
}

struct World {
    directory: Directory,
    shards: [Shard; 2],
    at: u64,
    drawn: u64,
    log: Vec<(u64, DirectoryCommand)>,
    slices: Vec<FeedSlice>,
    returns: Vec<(ExtentId, ShardId, LendNumber)>,
    deaths: Vec<DirectoryCommand>,
    grants: Vec<Grant>,
    /// What an earlier leader of the directory saw.
    seen: Vec<Holdings>,
}

impl World {
    fn new() -> Self {
        let shard = |id| Shard::new(ShardId(id), Settings::new(Generation(1), 2));
        let mut world = Self {
            directory: Directory::new(),
            shards: [shard(1), shard(2)],
            at: 1_000,
            drawn: 0,
            log: Vec::new(),
            slices: Vec::new(),
            returns: Vec::new(),
            deaths: Vec::new(),
            grants: Vec::new(),
            seen: Vec::new(),
        };
        world.direct(DirectoryCommand::InitCluster(cluster(2)));
        for node in 1..=3 {
            world.direct(DirectoryCommand::AdmitCertificate(certificate(node)));
        }
        let request = RequestId { at: world.directory.log_time(), random: 77 };
        let policy = Policy { least: 1, ..Policy::new(Class::Cache, 2) };
        world.direct(DirectoryCommand::CreateNamespace { request, name: "blocks".into(), policy });
        world
    }
    fn direct(&mut self, command: DirectoryCommand) -> DirectoryOutcome {
        let before = self.directory.clone();
        self.log.push((self.at, command.clone()));
        let shown = format!("{command:?}");
        let outcome = self.directory.apply(LogTime(self.at), command);
        let checked = self.directory.check().and_then(|()| self.directory.check_step(&before));
        checked.unwrap_or_else(|broken| panic!("{broken}\nafter {shown}"));
        self.count();
        outcome
    }
    fn shard(&mut self, index: usize, command: ShardCommand) -> ShardOutcome {
        let before = self.shards[index].clone();
        let shown = format!("{command:?}");
        let outcome = self.shards[index].apply(LogTime(self.at), command);
        let shard = &self.shards[index];
        let checked = shard.check().and_then(|()| shard.check_step(&before));
        checked.unwrap_or_else(|broken| panic!("{broken}\nafter {shown}"));
        self.count();
        outcome
    }
    /// *Nothing leaks*, over the directory and both shards.
    fn count(&self) {
        let accounts = ledger(&self.directory, &[&self.shards[0], &self.shards[1]]);
        let accounts = accounts.unwrap_or_else(|broken| panic!("{broken}"));
        // The map is drawn another way and finds the same.
        let mut maps = Maps::new(&self.directory, 7);
        self.shards
            .iter()
            .filter(|shard| shard.generation() == self.directory.generation())
            .for_each(|shard| maps.add(shard));
        for (region, map) in maps.finish() {
            let drawn = Account {
                total: map.bytes,
                unlent: map.total(Use::Unlent),
                in_transit: map.total(Use::Transit),
                free: map.total(Use::Free),
                granted: map.total(Use::Granted),
                committed: map.total(Use::Committed) + map.total(Use::Pinned),
                quarantined: map.total(Use::Resting),
            };
            assert_eq!(drawn, accounts[&region], "{region}: {}", map.letters());
        }
    }
    fn pull(&mut self, index: usize, max: usize) {
        let slice = self.directory.feed_since(self.shards[index].feed_position(), max);
        self.slices.push(slice.clone());
        assert_eq!(self.shard(index, ShardCommand::ApplyFeed(slice.clone())), ShardOutcome::Feed(Ok(slice.to)));
    }
    fn send_returns(&mut self, index: usize) {
        let shard = self.shards[index].id();
        let returned: Vec<_> = self.shards[index].returned().collect();
        for (extent, lend) in returned {
            self.returns.push((extent, shard, lend));
            self.direct(DirectoryCommand::Returned { extent, shard, lend });
        }
    }
    fn run(&mut self, step: Step) {
        match step {
            Step::Wait(ms) => {
                self.at += u64::from(ms);
                self.direct(DirectoryCommand::Tick);
                for index in 0..2 {
                    self.shard(index, ShardCommand::Tick { horizon: None });
                }
            }
            Step::Register { node, life } => {
                self.direct(register(node.into(), life.into()));
            }
            Step::Die { node } => {
                if let Some(death) = self.directory.plan_death(NodeId(node.into())) {
                    self.deaths.push(death.clone());
                    self.direct(death);
                }
            }
            Step::OldDeath(index) => {
                if let Some(index) = usize::from(index).checked_rem(self.deaths.len()) {
                    self.direct(self.deaths[index].clone());
                }
            }
            Step::Record { node, epoch } => {
                let Some(known) = self.directory.region(region(node.into())) else { return };
                let said = RegionRecord {
                    region: region(node.into()),
                    incarnation: known.state.incarnation,
                    epoch: RegionEpoch(epoch.into()),
                    length: known.state.bytes,
                    base: 0,
                    read_key: 1,
                    provider: "tcp".into(),
                    address: FabricName::new(b"here").unwrap(),
                };
                let serial = CertificateSerial(node.into());
                let signed = node_key(node.into()).sign(UUID, self.directory.generation(), serial, said);
                self.direct(DirectoryCommand::RecordRegion(signed));
            }
            Step::Certify(node) => {
                self.direct(DirectoryCommand::AdmitCertificate(certificate(node.into())));
            }
            Step::Revoke { number, serial } => {
                let serials = BTreeSet::from([CertificateSerial(serial.into())]);
                let list = Revocations { number: number.into(), serials };
                self.direct(DirectoryCommand::Revoke(crate::directory::root().sign_as_root(UUID, list)));
            }
            Step::Announce { node, address } => {
                let address = format!("host-{address}:1");
                self.direct(DirectoryCommand::AnnounceNode { node: NodeId(node.into()), address });
            }
            Step::Namespace { random, name } => {
                let request = RequestId { at: self.directory.log_time(), random: random.into() };
                let policy = Policy::new(Class::Cache, 1);
                self.direct(DirectoryCommand::CreateNamespace { request, name: format!("n{name}"), policy });
            }
            Step::Want { shard, node, bytes } => {
                let want = ShardCommand::Want { nodes: vec![NodeId(node.into())], bytes: bytes.into() };
                assert_eq!(self.shard(shard.into(), want), ShardOutcome::Want);
            }
            // A meta node ended and came back from its snapshot.
            Step::Restart { shard } => {
                let held = &mut self.shards[usize::from(shard)];
                *held = Shard::decode(&held.encode()).unwrap();
                self.directory = Directory::decode(&self.directory.encode()).unwrap();
                self.count();
            }
            // A leader of the directory that does not know what its predecessor lent since.
            Step::StaleLend(max) => {
                for command in self.directory.plan_lending(&self.seen.clone(), max.into()) {
                    assert!(matches!(self.direct(command), DirectoryOutcome::Lend(Ok(_))));
                }
            }
            Step::Lend(max) => {
                self.seen = self.shards.iter().map(Shard::holdings).collect();
                for command in self.directory.plan_lending(&self.seen.clone(), max.into()) {
                    assert!(matches!(self.direct(command), DirectoryOutcome::Lend(Ok(_))));
                }
            }
            Step::LendWild { node, index, shard } => {
                let (extent, shard) = (extent(node.into(), index.into()), ShardId(shard.into()));
                self.direct(DirectoryCommand::LendExtent { extent, shard });
            }
            Step::Pull { shard, max } => self.pull(shard.into(), max.into()),
            Step::OldSlice { shard, index } => {
                if let Some(index) = usize::from(index).checked_rem(self.slices.len()) {
                    let slice = self.slices[index].clone();
                    self.shard(shard.into(), ShardCommand::ApplyFeed(slice));
                }
            }
            Step::Drop { shard, index } => {
                let idle: Vec<_> = self.shards[usize::from(shard)].idle_extents().collect();
                if let Some(index) = usize::from(index).checked_rem(idle.len()) {
                    let (extent, lend) = idle[index];
                    self.shard(shard.into(), ShardCommand::DropExtent { extent, lend });
                }
            }
            Step::Return { shard } => self.send_returns(shard.into()),
            Step::OldReturn(index) => {
                if let Some(index) = usize::from(index).checked_rem(self.returns.len()) {
                    let (extent, shard, lend) = self.returns[index];
                    self.direct(DirectoryCommand::Returned { extent, shard, lend });
                }
            }
            Step::Generation(raise) => {
                let generation = Generation(self.directory.generation().0 + u32::from(raise));
                self.direct(DirectoryCommand::RaiseGeneration { generation });
            }
            Step::Grant { shard, slots } => self.grant(shard.into(), slots),
            Step::Publish { grant, slot, key } => self.publish(grant, slot, key),
            Step::Evict { shard, grants } => {
                // Grants of the other shard among them.
                let ids =
                    grants.into_iter().filter_map(|at| self.grants.get(usize::from(at) % self.grants.len().max(1)));
                let victims = ids.map(|grant| grant.id).collect();
                self.shard(shard.into(), ShardCommand::Evict { victims });
            }
            Step::Again(index) => {
                let index = usize::from(index) % self.log.len();
                self.direct(self.log[index].1.clone());
            }
        }
    }
    fn grant(&mut self, index: usize, slots: u8) {
        self.drawn += 1;
        let asked = GrantRequest {
            request: RequestId { at: self.shards[index].log_time(), random: self.drawn },
            writer: WriterId([1; 16]),
            namespace: NamespaceId(1),
            slot_size: SlotSize(4096),
            slots: SlotCount(slots.into()),
            ttl: Duration::from_secs(5),
        };
        let planned = self.shards[index].planner(LogTime(self.at), &BTreeSet::new()).grant(NodeId(100), asked);
        if let Ok(command) = planned
            && let ShardOutcome::Grant(Ok(grant)) = self.shard(index, command)
        {
            self.grants.push(grant);
        }
    }
    fn publish(&mut self, grant: u8, slot: u8, name: u8) {
        let Some(index) = usize::from(grant).checked_rem(self.grants.len()) else { return };
        let grant = self.grants[index].clone();
        self.drawn += 1;
        let entry = CommitEntry {
            slot: SlotIndex(slot.into()),
            key: Key::new(format!("k{name}")).unwrap(),
            version: Version { clock: HybridClock(self.drawn), writer: grant.writer },
            kind: FrameKind::Value,
            payload_bytes: 10,
            payload_crc: 1,
            mode: Mode::Replace,
        };
        let attested = grant.holders.iter().map(|holder| Attested {
            node: holder.region.node,
            covers: Covers::All,
            generation: grant.id.sequence.generation,
            serial: CertificateSerial(holder.region.node.0),
            signature: Signature([0; 64]),
        });
        let publish = Publish { grant: grant.id, entries: vec![entry], attested: attested.collect() };
        self.shard(usize::try_from(grant.id.shard.0 - 1).unwrap(), ShardCommand::Publish(publish));
    }
    /// Every message arrives at last: the directory and its shards agree on every extent.
    fn settle(&mut self) {
        for _ in 0..3 {
            for index in 0..2 {
                while self.shards[index].feed_position() < self.directory.feed_position() {
                    self.pull(index, 9);
                }
                self.send_returns(index);
            }
        }
        for (extent, shard, lend) in self.directory.extents() {
            for holder in &self.shards {
                let held = holder.held(extent);
                let expected = (shard == Some(holder.id())).then_some(lend);
                assert_eq!(held, expected, "{extent} at {}", holder.id());
            }
        }
        assert!(self.shards.iter().all(|shard| shard.returned().count() == 0), "Returned is not repeated for ever");
        let accounts = ledger(&self.directory, &[&self.shards[0], &self.shards[1]]).unwrap();
        assert!(accounts.values().all(|account| account.in_transit == 0), "{accounts:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 3_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn directory_and_shards_agree_on_every_extent_in_the_end(steps in vec(step(), 1..100), snapshot_after in 0usize..60) {
        let mut world = World::new();
        for step in steps {
            world.run(step);
        }
        // Another replica of the directory, with a snapshot on the way.
        let mut other = Directory::new();
        for (index, (at, command)) in world.log.iter().enumerate() {
            let bytes = Entry { at: LogTime(*at), commands: vec![command.clone()] }.encode().unwrap();
            for command in Entry::<DirectoryCommand>::decode(&bytes).unwrap().commands {
                other.apply(LogTime(*at), command);
            }
            if index == snapshot_after {
                other = Directory::decode(&other.encode()).unwrap();
            }
        }
        prop_assert_eq!(other.hash(), world.directory.hash());
        world.settle();
    }
}
