//! *Fenced writers* in the double of the fabric: writes that are late in every way, against claims and lanes as they are in production.
//! And reads that are late, against readers and their epochs (*Epochs only grow*).
//! Twin on the real provider: `a_writer_stopped_in_the_middle_of_a_write_cannot_reach_a_slab_that_was_granted_to_another`.

use crate::{
    claims::{ArmPlan, Claims, Closing, NodeTime},
    holdings::Holdings,
    lanes::{Lanes, WriteRegion},
};
use quarry_fabric::{
    Access, DoubleNetwork, Endpoint, EndpointConfig, FabricAddress, Faults, LocalSpan, Memory, OperationError, Peer,
    Provider, RemoteSpan,
};
use quarry_wire::{
    grant::{Class, Grant, GrantHolder, Purpose},
    ids::{
        ExtentIndex, Generation, GrantId, Incarnation, LendNumber, NamespaceId, NodeId, Ordinal, RegionEpoch, RegionId,
        RegionIndex, ShardId, WriterId,
    },
    units::{Offset, SlotCount, SlotSize},
};
use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::Duration,
};
use tokio::time::Instant;

const REGION: RegionId = RegionId { node: NodeId(4), index: RegionIndex(0) };
const GENERATION: Generation = Generation(1);
const LIFE: Incarnation = Incarnation::new(GENERATION, 1);
const REGION_BYTES: usize = 1 << 20;
const SLAB_BYTES: usize = 16 << 10;
const OLD: u8 = 0x11;
const NEW: u8 = 0x22;

/// A grant over the first slab, by a writer of this number.
fn grant(sequence: u64) -> Arc<Grant> {
    Arc::new(Grant {
        id: GrantId { shard: ShardId(1), sequence: Ordinal { generation: GENERATION, number: sequence } },
        meta: NodeId(1),
        purpose: Purpose::Write,
        writer: WriterId([u8::try_from(sequence).unwrap(); 16]),
        namespace: NamespaceId(1),
        class: Class::Cache,
        least: 1,
        slot_size: SlotSize(4096),
        slots: SlotCount(4),
        ttl: Duration::from_secs(30),
        holders: vec![GrantHolder {
            region: REGION,
            incarnation: LIFE,
            extent: ExtentIndex(0),
            lend: LendNumber::new(GENERATION, 1),
            base: Offset(0),
        }],
    })
}

fn at(seconds: u64) -> NodeTime {
    NodeTime(Duration::from_secs(seconds))
}

fn config(network: &DoubleNetwork) -> EndpointConfig {
    let bind = IpAddr::V4(Ipv4Addr::LOCALHOST);
    EndpointConfig { provider: Provider::double(network), bind, port: None, spin: Duration::ZERO }
}

/// A writer of one byte value, as a client is.
struct Writer {
    endpoint: Endpoint,
    peer: Peer,
    local: LocalSpan,
    remote: RemoteSpan,
}

impl Writer {
    fn new(network: &DoubleNetwork, region: &WriteRegion, byte: u8) -> Self {
        let endpoint = Endpoint::open(config(network)).unwrap();
        let peer = endpoint.connect(&FabricAddress::from_bytes(&region.address).unwrap()).unwrap();
        let memory = Memory::allocate(SLAB_BYTES).unwrap();
        memory.copy_in(0, &[byte; SLAB_BYTES]).unwrap();
        let local = Arc::new(endpoint.register(&memory, 0..SLAB_BYTES, Access::Local, None).unwrap());
        let local = LocalSpan::new(&local, 0..SLAB_BYTES).unwrap();
        let remote = RemoteSpan { address: region.base, key: region.key, len: SLAB_BYTES as u64 };
        Self { endpoint, peer, local, remote }
    }

    async fn write(&self) -> Result<(), OperationError> {
        let deadline = Instant::now() + Duration::from_secs(30);
        self.endpoint.write(&self.peer, self.local.clone(), self.remote, deadline).await
    }
}

async fn begins(network: &DoubleNetwork, region: &WriteRegion) {
    let address = FabricAddress::from_bytes(&region.address).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while network.under_way(&address) == 0 {
        assert!(Instant::now() < deadline, "the old write never begins");
        tokio::time::sleep(Duration::from_micros(100)).await;
    }
}

#[tokio::test]
async fn a_late_write_of_an_old_writer_never_lands_in_memory_that_was_given_to_a_new_one() {
    for seed in 0..30 {
        let network = DoubleNetwork::new(seed).unwrap();
        let (delay_most, step_gap) = (Duration::from_micros(500), Duration::from_micros(20));
        network.set(Faults { delay_most, step_bytes: 1_000, step_gap, ..Faults::default() });
        let memory = Memory::allocate(REGION_BYTES).unwrap();
        let mut holdings = Holdings::new(Claims::new(REGION.node, 8), config(&network));
        holdings.add_region(REGION, Arc::clone(&memory));
        holdings.begin(REGION.index, LIFE).unwrap();

        let old = holdings.arm(at(0), &grant(1), grant(1).writer).unwrap();
        let old_address = FabricAddress::from_bytes(&old.address).unwrap();
        // Two writers' worth of old writes: one stands still half way, the others arrive when they like, also after the fence.
        let stopped = Writer::new(&network, &old, OLD);
        let racing: Vec<Writer> = (0..4).map(|_| Writer::new(&network, &old, OLD)).collect();
        network.hold(&old_address);
        let old_writes = async {
            let racing = futures::future::join_all(racing.iter().map(Writer::write));
            tokio::join!(stopped.write(), racing)
        };
        let fence = async {
            begins(&network, &old).await;
            let new = holdings.arm(at(1), &grant(2), grant(2).writer).unwrap();
            let writer = Writer::new(&network, &new, NEW);
            assert_eq!(writer.write().await, Ok(()), "seed {seed}");
            network.release(&old_address);
        };
        let ((first, others), ()) = tokio::join!(old_writes, fence);
        assert!(std::iter::once(first).chain(others).any(|ended| ended.is_err()), "seed {seed}: no old write was late");
        let found = memory.copy_to_vec(0, SLAB_BYTES).unwrap();
        assert!(found == [NEW; SLAB_BYTES], "seed {seed}: late bytes landed");
    }
}

/// What the memory holds when `fence` carries out what claims decided.
async fn after_a_late_write(fence: impl Fn(&mut Lanes, &Closing)) -> Vec<u8> {
    let network = DoubleNetwork::new(1).unwrap();
    network.set(Faults { step_bytes: 1_000, ..Faults::default() });
    let memory = Memory::allocate(REGION_BYTES).unwrap();
    let (mut claims, mut lanes) = (Claims::new(REGION.node, 8), Lanes::new(config(&network)));
    claims.begin(REGION.index, LIFE, REGION_BYTES as u64);
    let mut arm = |sequence| {
        let grant = grant(sequence);
        let plan = claims.arm(at(sequence), &grant, grant.writer).unwrap();
        let ArmPlan::New { closing, lane, opens } = plan else { panic!("it was never armed") };
        fence(&mut lanes, &closing);
        if opens {
            lanes.open(lane).unwrap();
        }
        lanes.lend(lane, grant.id, &memory, 0..SLAB_BYTES).unwrap()
    };
    let old = arm(1);
    let old_address = FabricAddress::from_bytes(&old.address).unwrap();
    network.hold(&old_address);
    let late = Writer::new(&network, &old, OLD);
    let give_away = async {
        begins(&network, &old).await;
        let new = arm(2);
        Writer::new(&network, &new, NEW).write().await.unwrap();
        network.release(&old_address);
    };
    drop(tokio::join!(late.write(), give_away));
    memory.copy_to_vec(0, SLAB_BYTES).unwrap()
}

#[tokio::test]
async fn closing_the_write_region_alone_would_let_a_late_write_land() {
    assert!(after_a_late_write(Lanes::carry_out).await == [NEW; SLAB_BYTES], "the fence as it is");
    let no_lanes = |lanes: &mut Lanes, closing: &Closing| {
        lanes.carry_out(&Closing { claims: closing.claims.clone(), lanes: Vec::new() });
    };
    let found = after_a_late_write(no_lanes).await;
    assert!(found.contains(&OLD), "without closing the lane nothing stops it: these tests would see it");
}

/// Begins to read the whole region, and stands still half way; `meanwhile` happens, and other bytes are written. What the read brought.
async fn a_late_read(meanwhile: impl FnOnce(&mut Holdings)) -> Result<Vec<u8>, OperationError> {
    let network = DoubleNetwork::new(1).unwrap();
    network.set(Faults { step_bytes: 1_000, ..Faults::default() });
    let memory = Memory::allocate(REGION_BYTES).unwrap();
    memory.copy_in(0, &[OLD; SLAB_BYTES]).unwrap();
    let mut holdings = Holdings::new(Claims::new(REGION.node, 8), config(&network));
    holdings.add_region(REGION, Arc::clone(&memory));
    let record = holdings.begin(REGION.index, LIFE).unwrap();
    let address = FabricAddress::from_bytes(record.address.as_bytes()).unwrap();
    let endpoint = Endpoint::open(config(&network)).unwrap();
    let peer = endpoint.connect(&address).unwrap();
    let landed = Memory::allocate(SLAB_BYTES).unwrap();
    let local = Arc::new(endpoint.register(&landed, 0..SLAB_BYTES, Access::Local, None).unwrap());
    let local = LocalSpan::new(&local, 0..SLAB_BYTES).unwrap();
    let remote = RemoteSpan { address: record.base, key: record.read_key, len: SLAB_BYTES as u64 };
    network.hold(&address);
    let rotation = async {
        let deadline = Instant::now() + Duration::from_secs(30);
        while network.under_way(&address) == 0 {
            assert!(Instant::now() < deadline, "the read never begins");
            tokio::time::sleep(Duration::from_micros(100)).await;
        }
        meanwhile(&mut holdings);
        memory.copy_in(0, &[NEW; SLAB_BYTES]).unwrap();
        network.release(&address);
    };
    let read = endpoint.read(&peer, local, remote, Instant::now() + Duration::from_secs(30));
    let (outcome, ()) = tokio::join!(read, rotation);
    outcome.map(|()| landed.copy_to_vec(0, SLAB_BYTES).unwrap())
}

#[tokio::test]
async fn a_read_that_has_begun_ends_with_its_epoch_and_brings_nothing_that_came_later() {
    let undisturbed = a_late_read(|_| {}).await.unwrap();
    assert!(undisturbed.contains(&NEW), "a read that goes on brings what came later: this test would see it");
    let late = a_late_read(|holdings| {
        let next = holdings.rotate(REGION.index, LIFE).unwrap().unwrap();
        assert_eq!(next.epoch, RegionEpoch(2));
    });
    assert!(late.await.is_err(), "it went on through the new epoch");
}
