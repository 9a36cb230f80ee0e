//! The directory: whom it believes, lives, lendings, namespaces, the feed.

use quarry_meta_state::{
    Directory, RequestId, RequestRefusal,
    directory::{
        Cluster, DirectoryCommand, DirectoryOutcome, FEED_SLICE_ENTRIES_MAX, FeedChange, GenerationRefusal,
        InitRefusal, Labels, Policy,
        extents::{LendRefusal, ReturnRefusal},
        namespaces::NamespaceRefusal,
        nodes::NodeRefusal,
        regions::RegionRefusal,
    },
};
use quarry_wire::{
    certificate::{Certificate, Revocations, Role},
    grant::Class,
    ids::{
        CertificateSerial, ClusterUuid, ExtentId, ExtentIndex, FeedNumber, Generation, Incarnation, LendNumber,
        NamespaceId, NodeId, RegionEpoch, RegionId, RegionIndex, ShardId,
    },
    limits::OUTCOME_KEPT,
    region::{FabricName, RegionRecord},
    signed::{SecretKey, Signed},
    units::{LogTime, millis},
};
use std::collections::BTreeSet;

pub(crate) const UUID: ClusterUuid = ClusterUuid([3; 16]);
const BYTES: u64 = 1 << 20;

pub(crate) fn root() -> SecretKey {
    SecretKey::from_seed(&[1; 32])
}
pub(crate) fn node_key(node: u64) -> SecretKey {
    SecretKey::from_seed(&[u8::try_from(node).unwrap() + 10; 32])
}
pub(crate) fn certificate(node: u64) -> Signed<Certificate> {
    let serial = CertificateSerial(node);
    let key = node_key(node).public();
    root().sign_as_root(UUID, Certificate { serial, node: NodeId(node), role: Role::DataNode, key })
}
pub(crate) fn cluster(shards: u32) -> Cluster {
    Cluster { uuid: UUID, generation: Generation(1), shards, root: root().public() }
}
pub(crate) fn region(node: u64) -> RegionId {
    RegionId { node: NodeId(node), index: RegionIndex(0) }
}
pub(crate) fn extent(node: u64, index: u32) -> ExtentId {
    ExtentId { region: region(node), index: ExtentIndex(index) }
}
pub(crate) fn register(node: u64, life: u128) -> DirectoryCommand {
    DirectoryCommand::RegisterRegion { node: NodeId(node), index: RegionIndex(0), bytes: BYTES, life }
}
fn record(node: u64, incarnation: Incarnation, epoch: u64) -> Signed<RegionRecord> {
    let said = RegionRecord {
        region: region(node),
        incarnation,
        epoch: RegionEpoch(epoch),
        length: BYTES,
        base: 0x1000,
        read_key: epoch,
        provider: "tcp".into(),
        address: FabricName::new(b"10.0.0.1:7000").unwrap(),
    };
    node_key(node).sign(UUID, incarnation.0.generation, CertificateSerial(node), said)
}

pub(crate) struct Bench {
    pub(crate) directory: Directory,
    at: u64,
}

impl Bench {
    /// An initialised directory that admitted nodes 1 to `nodes` and their regions.
    pub(crate) fn new(nodes: u64) -> Self {
        let mut bench = Self { directory: Directory::new(), at: 1_000 };
        bench.apply(DirectoryCommand::InitCluster(cluster(2)));
        for node in 1..=nodes {
            bench.apply(DirectoryCommand::AdmitCertificate(certificate(node)));
            bench.apply(register(node, 1));
        }
        bench
    }
    pub(crate) fn apply(&mut self, command: DirectoryCommand) -> DirectoryOutcome {
        let before = self.directory.clone();
        let shown = format!("{command:?}");
        let outcome = self.directory.apply(LogTime(self.at), command);
        self.directory.check().unwrap_or_else(|broken| panic!("{broken}\nafter {shown}"));
        self.directory.check_step(&before).unwrap_or_else(|broken| panic!("{broken}\nafter {shown}"));
        let again = Directory::decode(&self.directory.encode()).unwrap();
        assert_eq!(again.hash(), self.directory.hash());
        outcome
    }
    fn incarnation(&mut self, command: DirectoryCommand) -> Incarnation {
        match self.apply(command) {
            DirectoryOutcome::Region(Ok(incarnation)) => incarnation,
            other => panic!("{other:?}"),
        }
    }
    fn create(&mut self, random: u64, name: &str) -> Result<NamespaceId, NamespaceRefusal> {
        let request = RequestId { at: self.directory.log_time(), random };
        self.create_as(request, name, Policy::new(Class::Cache, 2))
    }
    fn create_as(&mut self, request: RequestId, name: &str, policy: Policy) -> Result<NamespaceId, NamespaceRefusal> {
        match self.apply(DirectoryCommand::CreateNamespace { request, name: name.into(), policy }) {
            DirectoryOutcome::Namespace(outcome) => outcome,
            other => panic!("{other:?}"),
        }
    }
}

fn life(number: u64) -> Incarnation {
    Incarnation::new(Generation(1), number)
}

#[test]
fn a_cluster_is_initialised_once() {
    let mut bench = Bench { directory: Directory::new(), at: 1 };
    let refused = |init| DirectoryOutcome::Init(Err(init));
    assert_eq!(bench.create(1, "a"), Err(NamespaceRefusal::NotInitialised));
    let admit = DirectoryCommand::AdmitCertificate(certificate(1));
    assert_eq!(bench.apply(admit), DirectoryOutcome::Node(Err(NodeRefusal::NotInitialised)));
    assert_eq!(bench.apply(DirectoryCommand::InitCluster(cluster(0))), refused(InitRefusal::Shards { found: 0 }));
    let none = Cluster { generation: Generation(0), ..cluster(1) };
    assert_eq!(bench.apply(DirectoryCommand::InitCluster(none)), refused(InitRefusal::Generation));
    assert_eq!(bench.apply(DirectoryCommand::InitCluster(cluster(2))), DirectoryOutcome::Init(Ok(())));
    assert_eq!(bench.apply(DirectoryCommand::InitCluster(cluster(2))), DirectoryOutcome::Init(Ok(())));
    let other = refused(InitRefusal::AlreadyInitialised { as_it_is: cluster(2) });
    assert_eq!(bench.apply(DirectoryCommand::InitCluster(cluster(3))), other);
}

#[test]
fn only_what_the_root_signed_is_admitted() {
    let mut bench = Bench::new(1);
    let mut forged = certificate(2);
    forged.statement.node = NodeId(3);
    let outcome = bench.apply(DirectoryCommand::AdmitCertificate(forged));
    assert!(matches!(outcome, DirectoryOutcome::Node(Err(NodeRefusal::Untrusted { .. }))));
    let unknown = DirectoryOutcome::Region(Err(RegionRefusal::UnknownNode { node: NodeId(2) }));
    assert_eq!(bench.apply(register(2, 1)), unknown);
    let again = bench.apply(DirectoryCommand::AdmitCertificate(certificate(1)));
    assert!(matches!(again, DirectoryOutcome::Node(Ok(_))));
}

#[test]
fn a_revoked_node_registers_and_records_nothing_more() {
    let mut bench = Bench::new(1);
    let list = |number, serials: &[u64]| {
        let serials: BTreeSet<_> = serials.iter().copied().map(CertificateSerial).collect();
        DirectoryCommand::Revoke(root().sign_as_root(UUID, Revocations { number, serials }))
    };
    assert!(matches!(bench.apply(list(2, &[1])), DirectoryOutcome::Node(Ok(_))));
    assert_eq!(
        bench.apply(register(1, 2)),
        DirectoryOutcome::Region(Err(RegionRefusal::UnknownNode { node: NodeId(1) }))
    );
    let outcome = bench.apply(DirectoryCommand::RecordRegion(record(1, life(1), 1)));
    assert!(matches!(outcome, DirectoryOutcome::Record(Err(RegionRefusal::Untrusted { .. }))));
    // An older list does not bring it back.
    assert!(matches!(bench.apply(list(1, &[])), DirectoryOutcome::Node(Err(NodeRefusal::Untrusted { .. }))));
    assert!(bench.directory.is_revoked(CertificateSerial(1)));
}

#[test]
fn a_new_life_raises_the_incarnation_and_a_retry_does_not() {
    let mut bench = Bench::new(1);
    assert_eq!(bench.incarnation(register(1, 1)), life(1));
    assert_eq!(bench.incarnation(register(1, 2)), life(2));
    assert_eq!(bench.incarnation(register(1, 2)), life(2));
    let dead = bench.directory.plan_death(NodeId(1)).unwrap();
    assert_eq!(bench.apply(dead.clone()), DirectoryOutcome::Dead(Ok(vec![region(1)])));
    assert!(!bench.directory.region(region(1)).unwrap().state.up);
    assert_eq!(bench.directory.plan_death(NodeId(1)), None);
    assert_eq!(bench.incarnation(register(1, 3)), life(4));
    // The judgement of the life before comes again: the present one is left alone.
    assert_eq!(bench.apply(dead), DirectoryOutcome::Dead(Ok(vec![])));
    assert!(bench.directory.region(region(1)).unwrap().state.up);
}

#[test]
fn a_region_of_an_impossible_or_another_length_is_refused() {
    let mut bench = Bench::new(1);
    for bytes in [0, 1 << 19, BYTES + 64, (1 << 30) + (1 << 20), 32 << 30] {
        let command = DirectoryCommand::RegisterRegion { node: NodeId(1), index: RegionIndex(1), bytes, life: 1 };
        let outcome = bench.apply(command);
        assert!(matches!(outcome, DirectoryOutcome::Region(Err(RegionRefusal::Length { .. }))), "{bytes}: {outcome:?}");
    }
    let command =
        DirectoryCommand::RegisterRegion { node: NodeId(1), index: RegionIndex(0), bytes: 2 * BYTES, life: 2 };
    let changed = RegionRefusal::LengthChanged { region: region(1), expected: BYTES, found: 2 * BYTES };
    assert_eq!(bench.apply(command), DirectoryOutcome::Region(Err(changed)));
}

#[test]
fn a_record_is_taken_in_the_present_life_with_an_epoch_that_grows() {
    let mut bench = Bench::new(1);
    let mut take = |signed| match bench.apply(DirectoryCommand::RecordRegion(signed)) {
        DirectoryOutcome::Record(outcome) => outcome,
        other => panic!("{other:?}"),
    };
    let first = take(record(1, life(1), 2)).unwrap();
    assert_eq!(take(record(1, life(1), 2)), Ok(first), "again");
    let stale = RegionRefusal::StaleEpoch { held: RegionEpoch(2), found: RegionEpoch(1) };
    assert_eq!(take(record(1, life(1), 1)), Err(stale));
    let mut other = record(1, life(1), 2).statement;
    other.read_key = 99;
    let other = node_key(1).sign(UUID, Generation(1), CertificateSerial(1), other);
    assert!(matches!(take(other), Err(RegionRefusal::StaleEpoch { .. })));
    assert!(take(record(1, life(1), 3)).unwrap() > first);
    let forged = Signed { statement: record(1, life(1), 9).statement, ..record(1, life(1), 4) };
    assert!(matches!(take(forged), Err(RegionRefusal::Untrusted { .. })));
    let (expected, found) = (life(1), life(2));
    let stale = RegionRefusal::StaleIncarnation { region: region(1), expected, up: true, found };
    assert_eq!(take(record(1, found, 4)), Err(stale));
    let mut long = record(1, life(1), 9).statement;
    long.provider = "a provider with a long name".into();
    let long = Signed { statement: long, ..record(1, life(1), 9) };
    assert!(matches!(take(long), Err(RegionRefusal::Field { found: 27, .. })));

    bench.apply(register(1, 2));
    assert_eq!(bench.directory.region(region(1)).unwrap().record, None, "a new life has no record yet");
    let mut take = |signed| bench.apply(DirectoryCommand::RecordRegion(signed));
    assert!(matches!(take(record(1, life(2), 1)), DirectoryOutcome::Record(Ok(_))));
}

#[test]
fn a_namespace_is_made_once_and_numbers_are_never_used_again() {
    let mut bench = Bench::new(0);
    let request = RequestId { at: LogTime(1_000), random: 1 };
    let policy = Policy::new(Class::Cache, 2);
    let id = bench.create_as(request, "blocks", policy).unwrap();
    assert_eq!(bench.create_as(request, "blocks", policy), Ok(id), "the same request");
    assert_eq!(bench.create(2, "blocks"), Err(NamespaceRefusal::Exists { id }));
    assert_eq!(bench.create(3, "other"), Ok(NamespaceId(id.0 + 1)));
    for name in ["", "a b", "é", &"x".repeat(65)] {
        assert!(matches!(bench.create(4, name), Err(NamespaceRefusal::Name { .. })), "{name}");
        bench.at += 1;
    }
    for (copies, least) in [(0, 0), (4, 2), (2, 3), (2, 0)] {
        let request = RequestId { at: bench.directory.log_time(), random: 5 };
        let outcome = bench.create_as(request, "third", Policy { least, ..Policy::new(Class::Cache, copies) });
        assert_eq!(outcome, Err(NamespaceRefusal::Copies { copies, least }));
        bench.at += 1;
    }
    assert_eq!(bench.directory.namespace_named("blocks").unwrap().id, id);
    bench.at += millis(OUTCOME_KEPT);
    let stale = bench.create_as(request, "blocks", policy);
    assert!(matches!(stale, Err(NamespaceRefusal::Request(RequestRefusal::Stale { .. }))));
    bench.apply(DirectoryCommand::Tick);
    assert_eq!(bench.directory.next_deadline(), None, "outcomes are forgotten");
}

#[test]
fn an_extent_is_lent_to_one_shard_until_that_one_gives_it_back() {
    let mut bench = Bench::new(1);
    let lend = |shard| DirectoryCommand::LendExtent { extent: extent(1, 0), shard: ShardId(shard) };
    let first = LendNumber::new(Generation(1), 1);
    assert_eq!(bench.apply(lend(1)), DirectoryOutcome::Lend(Ok(first)));
    let held = LendRefusal::AlreadyLent { extent: extent(1, 0), shard: ShardId(1), lend: first };
    assert_eq!(bench.apply(lend(2)), DirectoryOutcome::Lend(Err(held)));
    let unknown = LendRefusal::UnknownShard { shards: 2, found: ShardId(3) };
    assert_eq!(bench.apply(lend(3)), DirectoryOutcome::Lend(Err(unknown)));
    let returned = |shard, lend| DirectoryCommand::Returned { extent: extent(1, 0), shard: ShardId(shard), lend };
    let not_lent = |shard, lend, found| {
        DirectoryOutcome::Returned(Err(ReturnRefusal::NotLent {
            extent: extent(1, 0),
            shard: ShardId(shard),
            lend,
            found,
        }))
    };
    assert_eq!(bench.apply(returned(2, first)), not_lent(2, first, first));
    assert_eq!(bench.apply(returned(1, first)), DirectoryOutcome::Returned(Ok(())));
    let second = LendNumber::new(Generation(1), 2);
    assert_eq!(bench.apply(lend(1)), DirectoryOutcome::Lend(Ok(second)));
    assert_eq!(
        bench.apply(returned(1, first)),
        not_lent(1, second, first),
        "an old message does not end the new lending"
    );
    let dead = bench.directory.plan_death(NodeId(1)).unwrap();
    bench.apply(dead);
    let down = DirectoryCommand::LendExtent { extent: extent(1, 1), shard: ShardId(1) };
    let refused = LendRefusal::RegionDown { extent: extent(1, 1) };
    assert_eq!(bench.apply(down), DirectoryOutcome::Lend(Err(refused)));
}

#[test]
fn the_feed_tells_what_changed_since_a_position_in_order_and_in_pieces() {
    let mut bench = Bench::new(2);
    bench.create(1, "blocks").unwrap();
    let whole = bench.directory.feed_since(FeedNumber::default(), usize::MAX);
    assert_eq!(whole.entries.len(), 1 + 2 + 32 + 1);
    assert_eq!(whole.entries[0].change, FeedChange::NewGeneration);
    assert_eq!(whole.to, bench.directory.feed_position());
    let mut pieces = Vec::new();
    let mut from = FeedNumber::default();
    while from < bench.directory.feed_position() {
        let slice = bench.directory.feed_since(from, 7);
        assert!(slice.entries.len() <= 7 && slice.from == from && slice.to > from);
        from = slice.to;
        pieces.extend(slice.entries);
    }
    assert_eq!(pieces, whole.entries);
    assert!(whole.entries.len() <= FEED_SLICE_ENTRIES_MAX);
    // A region that lived on since is told once, in its present life.
    bench.apply(register(1, 2));
    bench.apply(register(1, 3));
    let since = bench.directory.feed_since(whole.to, usize::MAX);
    assert_eq!(since.entries.len(), 1);
    assert!(matches!(since.entries[0].change, FeedChange::Region(state) if state.incarnation == life(3)));
}

#[test]
fn clients_learn_what_changed_since_a_position() {
    let mut bench = Bench::new(1);
    let all = bench.directory.changes_since(FeedNumber::default());
    assert_eq!((all.certificates.len(), all.regions.len(), all.at), (1, 1, bench.directory.feed_position()));
    bench.apply(DirectoryCommand::RecordRegion(record(1, life(1), 1)));
    let announce = DirectoryCommand::AnnounceNode { node: NodeId(1), address: "host:7000".into() };
    assert!(matches!(bench.apply(announce.clone()), DirectoryOutcome::Node(Ok(_))));
    let since = bench.directory.changes_since(all.at);
    assert_eq!(since.records, [record(1, life(1), 1)]);
    assert_eq!(since.nodes[0].address, "host:7000");
    assert!(since.certificates.is_empty() && since.regions.is_empty());
    bench.apply(announce);
    assert_eq!(bench.directory.feed_position(), since.at, "the same announcement is no change");
    let stranger = DirectoryCommand::AnnounceNode { node: NodeId(9), address: "host:7000".into() };
    assert_eq!(bench.apply(stranger), DirectoryOutcome::Node(Err(NodeRefusal::UnknownNode { node: NodeId(9) })));
}

#[test]
fn a_new_generation_voids_lives_and_lendings_and_tells_everything_again() {
    let mut bench = Bench::new(1);
    let id = bench.create(1, "blocks").unwrap();
    for index in 0..16 {
        bench.apply(DirectoryCommand::LendExtent { extent: extent(1, index), shard: ShardId(1 + index % 2) });
    }
    bench.apply(DirectoryCommand::RecordRegion(record(1, life(1), 1)));
    let before = bench.directory.feed_position();
    let raise = |generation| DirectoryCommand::RaiseGeneration { generation: Generation(generation) };
    let not_above = GenerationRefusal::NotAbove { current: Generation(1), found: Generation(1) };
    assert_eq!(bench.apply(raise(1)), DirectoryOutcome::Generation(Err(not_above)));
    assert_eq!(bench.apply(raise(3)), DirectoryOutcome::Generation(Ok(())));
    let told = bench.directory.feed_since(before, usize::MAX);
    assert_eq!(told.entries.len(), 1 + 1 + 1 + 16);
    assert_eq!(told.entries[0].change, FeedChange::NewGeneration);
    assert!(told.entries.iter().all(|entry| entry.number.0.generation == Generation(3)));
    let state = bench.directory.region(region(1)).unwrap().state;
    assert!(!state.up && state.incarnation.0.generation == Generation(3));
    assert!(bench.directory.extents().all(|(_, shard, _)| shard.is_none()));
    assert_eq!(bench.directory.namespace(id).unwrap().name, "blocks");
    let next = bench.create(2, "after").unwrap();
    assert!(next.0 > 2 * 65_536, "numbers go on above the floor of the generation: {next}");
}

#[test]
fn labels_of_a_node_are_told_to_the_shards_and_outlive_a_new_address() {
    let mut bench = Bench::new(1);
    let labels = Labels { host: "rack-7-host-3".into(), zone: "rack-7".into() };
    let label = |labels: &Labels| DirectoryCommand::LabelNode { node: NodeId(1), labels: labels.clone() };
    let unknown = DirectoryOutcome::Node(Err(NodeRefusal::UnknownNode { node: NodeId(1) }));
    assert_eq!(bench.apply(label(&labels)), unknown, "it did not announce itself yet");
    bench.apply(DirectoryCommand::AnnounceNode { node: NodeId(1), address: "one:1".into() });
    let before = bench.directory.feed_position();
    assert!(matches!(bench.apply(label(&labels)), DirectoryOutcome::Node(Ok(_))));
    let told = bench.directory.feed_since(before, usize::MAX).entries;
    assert!(matches!(&told[0].change, FeedChange::Standing { labels: told, .. } if *told == labels), "{told:?}");
    let position = bench.directory.feed_position();
    bench.apply(label(&labels));
    assert_eq!(bench.directory.feed_position(), position, "the same labels are no change");
    bench.apply(DirectoryCommand::AnnounceNode { node: NodeId(1), address: "two:1".into() });
    assert_eq!(bench.directory.node(NodeId(1)).unwrap().labels, labels);
    let long = Labels { host: "h".repeat(65), ..labels };
    assert_eq!(bench.apply(label(&long)), DirectoryOutcome::Node(Err(NodeRefusal::Label { found: 65 })));
}

#[test]
fn a_quota_of_an_old_log_whose_share_of_a_shard_holds_no_value_still_makes_its_namespace() {
    let mut bench = Bench::new(1);
    let mut with = |random: u64, quota: u64| {
        let request = RequestId { at: bench.directory.log_time(), random };
        let policy = Policy { quota_bytes: Some(quota), ..Policy::new(Class::Cache, 2) };
        bench.create_as(request, &format!("n{random}"), policy)
    };
    let least = Policy::new(Class::Cache, 2).quota_least(2);
    assert_eq!(least, 2 * 2 * (4096 + 128));
    assert_eq!(with(1, least - 1), Ok(NamespaceId(1)));
    assert_eq!(with(2, least), Ok(NamespaceId(2)));
}
