//! What a large shard costs: memory per slot, the pause of a snapshot, and how long publishing, writing and restoring take.
//!
//! ```text
//! cargo test --release -p quarry-meta-state --test figures -- --ignored --nocapture
//! QUARRY_FIGURES_SLOTS=10000000 cargo test ...    (1,000,000 unless it says so)
//! ```
//! Keys of 64 bytes, two copies, commits of 100, slabs of 1,000 slots. Nothing is asserted about time.
#![expect(clippy::unwrap_used, reason = "helpers of tests are tests, but clippy knows only the marked functions")]
#![expect(clippy::disallowed_methods, clippy::disallowed_types, reason = "measuring needs a clock and a second thread")]
#![expect(clippy::print_stdout, reason = "the table is what is asked for")]

mod lending;

use quarry_meta_state::{
    RequestId, Shard,
    directory::{FeedChange, FeedEntry, FeedSlice, Namespace, Policy, RegionState},
    shard::{
        Attested, CommitEntry, Committed, Covers, GrantRequest, Mode, Proposed, Publish, Settings, ShardCommand,
        ShardOutcome,
    },
};
use quarry_wire::{
    frame::FrameKind,
    grant::{Class, Grant},
    ids::{
        CertificateSerial, ExtentId, ExtentIndex, FeedNumber, Generation, Incarnation, LendNumber, NamespaceId, NodeId,
        RegionId, RegionIndex, ShardId, SlotIndex, WriterId,
    },
    key::Key,
    limits::EXTENT_BYTES,
    signed::Signature,
    units::{LogTime, Offset, SlotCount, SlotSize},
    version::{HybridClock, Version},
};
use sha2::{Digest, Sha256};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use std::{
    alloc::System,
    fs::File,
    io::{self, BufWriter, Write},
    iter,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

#[global_allocator]
static GLOBAL: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const GEN: Generation = Generation(1);
const SPACE: NamespaceId = NamespaceId(1);
const SLOT: u32 = 256;
const SLAB: u32 = 1000;
const COMMIT: u32 = 100;
const NODES: [u64; 2] = [1, 2];

fn live_bytes() -> usize {
    let stats = GLOBAL.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn seconds(began: Instant) -> f64 {
    began.elapsed().as_secs_f64()
}

/// What applying one command took. Processor time says it also where other processes take their turns.
#[derive(Clone, Copy, Debug)]
struct Took {
    wall: Duration,
    processor: Duration,
}

/// What this thread has used so far.
fn processor_time() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(used.tv_sec).unwrap(), u32::try_from(used.tv_nsec).unwrap())
}

/// A shard with enough memory of two nodes, and where its next slab lies.
struct Rig {
    shard: Shard,
    at: u64,
    requests: u64,
    /// Slabs granted.
    slabs: u32,
    slabs_per_extent: u32,
    clock: u64,
}

impl Rig {
    fn new(slabs: u32) -> Self {
        let bytes = u64::from(SLAB) * u64::from(SLOT);
        let slabs_per_extent = u32::try_from(EXTENT_BYTES / bytes).unwrap();
        let extents = slabs.div_ceil(slabs_per_extent).max(16);
        let region_bytes = u64::from(extents) * EXTENT_BYTES;
        let mut shard = Shard::new(ShardId(1), Settings::new(GEN, 1));
        let policy = Policy { least: 2, ..Policy::new(Class::Cache, 2) };
        let mut changes = vec![
            FeedChange::NewGeneration,
            FeedChange::Namespace(Namespace { id: SPACE, name: "blocks".into(), policy }),
        ];
        for node in NODES {
            let region = RegionId { node: NodeId(node), index: RegionIndex(0) };
            let incarnation = Incarnation::new(GEN, 1);
            changes.push(FeedChange::Region(RegionState { region, incarnation, bytes: region_bytes, up: true }));
            changes.extend((0..extents).map(|index| FeedChange::Lent {
                extent: ExtentId { region, index: ExtentIndex(index) },
                shard: ShardId(1),
                lend: LendNumber::new(GEN, 1),
                region_bytes,
            }));
        }
        let entries: Vec<FeedEntry> = (1..)
            .zip(changes)
            .map(|(number, change)| FeedEntry { number: FeedNumber::new(GEN, number), change })
            .collect();
        let to = entries.last().unwrap().number;
        let slice = FeedSlice { from: FeedNumber::default(), entries, to };
        assert_eq!(shard.apply(LogTime(1_000), ShardCommand::ApplyFeed(slice)), ShardOutcome::Feed(Ok(to)));
        Self { shard, at: 1_000, requests: 0, slabs: 0, slabs_per_extent, clock: 0 }
    }

    fn grant(&mut self) -> (Grant, Took) {
        self.at += 5;
        self.requests += 1;
        let asked = GrantRequest {
            request: RequestId { at: self.shard.log_time(), random: self.requests },
            writer: WriterId([1; 16]),
            namespace: SPACE,
            slot_size: SlotSize(SLOT),
            slots: SlotCount(SLAB),
            ttl: Duration::from_secs(10),
        };
        let (extent, place) = (self.slabs / self.slabs_per_extent, self.slabs % self.slabs_per_extent);
        self.slabs += 1;
        let base = u64::from(extent) * EXTENT_BYTES + u64::from(place) * u64::from(SLAB) * u64::from(SLOT);
        let holder = |node: u64| Proposed {
            extent: ExtentId {
                region: RegionId { node: NodeId(node), index: RegionIndex(0) },
                index: ExtentIndex(extent),
            },
            base: Offset(base),
        };
        let command = ShardCommand::Grant { meta: NodeId(9), asked, holders: NODES.map(holder).to_vec() };
        match self.apply(command) {
            (ShardOutcome::Grant(Ok(grant)), took) => (grant, took),
            other => panic!("{other:?}"),
        }
    }

    /// The commands that fill one slab with these keys.
    fn fill(&mut self, grant: &Grant, mut key: impl FnMut(u32) -> Key) -> Vec<ShardCommand> {
        let firsts = (0..SLAB).step_by(COMMIT as usize);
        let publish = |first: u32| {
            let entries = (first..first + COMMIT).map(|slot| {
                self.clock += 1;
                CommitEntry {
                    slot: SlotIndex(slot),
                    key: key(slot),
                    version: Version { clock: HybridClock(self.clock), writer: WriterId([1; 16]) },
                    kind: FrameKind::Value,
                    payload_bytes: 100,
                    payload_crc: slot,
                    mode: Mode::Replace,
                }
            });
            let entries = entries.collect();
            let attested = NODES.map(|node| Attested {
                node: NodeId(node),
                covers: Covers::All,
                generation: GEN,
                serial: CertificateSerial(node),
                signature: Signature([7; 64]),
            });
            ShardCommand::Publish(Publish { grant: grant.id, entries, attested: attested.to_vec() })
        };
        firsts.map(publish).collect()
    }

    fn apply(&mut self, command: ShardCommand) -> (ShardOutcome, Took) {
        let (began, used) = (Instant::now(), processor_time());
        let outcome = self.shard.apply(LogTime(self.at), command);
        (outcome, Took { wall: began.elapsed(), processor: processor_time() - used })
    }

    fn publish(&mut self, command: ShardCommand) -> Took {
        let (outcome, took) = self.apply(command);
        let ShardOutcome::Publish(outcomes) = outcome else { panic!("{outcome:?}") };
        assert!(outcomes.iter().all(|outcome| *outcome == Ok(Committed::Applied)), "{outcomes:?}");
        took
    }

    /// One slab full of `key`s; what its grant took, which also frees what has rested, and what each commit took.
    fn slab(&mut self, key: impl FnMut(u32) -> Key) -> Vec<Took> {
        let (grant, took) = self.grant();
        let commands = self.fill(&grant, key);
        iter::once(took).chain(commands.into_iter().map(|command| self.publish(command))).collect()
    }
}

/// 64 bytes, in no order.
fn key(number: u64) -> Key {
    Key::new(hex::encode(Sha256::digest(number.to_le_bytes()))).unwrap()
}

/// Numbers that look drawn, the same each time.
fn mixed(number: u64, below: u64) -> u64 {
    (number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20) % below
}

struct Hashing<W>(W, Sha256);
impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.0.write(bytes)?;
        self.1.update(&bytes[..written]);
        Ok(written)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// As a group writes its snapshot: buffered, hashed, synced. The frozen state is dropped here.
fn write(state: Shard, file: &File) {
    let mut out = BufWriter::with_capacity(1 << 20, Hashing(file, Sha256::new()));
    state.encode_to(&mut out).unwrap();
    out.flush().unwrap();
    drop(out);
    file.sync_all().unwrap();
    drop(state);
}

fn read(mut file: &File) -> Shard {
    io::Seek::rewind(&mut file).unwrap();
    Shard::decode_from(file).unwrap()
}

fn longest(times: &[Took]) -> String {
    let shown = |of: fn(&Took) -> Duration| {
        let mut sorted: Vec<Duration> = times.iter().map(of).collect();
        sorted.sort_unstable();
        let at = |part: usize| sorted[(sorted.len() - 1) * part / 1000].as_secs_f64() * 1e3;
        format!("p50 {:.3}, p99 {:.3}, longest {:.3} ms", at(500), at(990), at(1000))
    };
    format!("{} ({} of processor time), {} entries", shown(|it| it.wall), shown(|it| it.processor), times.len())
}

#[test]
#[ignore = "takes a minute and gigabytes: it measures"]
fn what_a_large_shard_costs() {
    let slots: u64 = std::env::var("QUARRY_FIGURES_SLOTS").map_or(1_000_000, |text| text.parse().unwrap());
    let slabs = u32::try_from(slots / u64::from(SLAB)).unwrap();
    let (live_before, resident_before) = (live_bytes(), resident_bytes());
    let mut rig = Rig::new(slabs * 2);
    let began = Instant::now();
    let mut times = Vec::new();
    for slab in 0..slabs {
        times.extend(rig.slab(|slot| key(u64::from(slab) * u64::from(SLAB) + u64::from(slot))));
    }
    let busy: f64 = times.iter().map(|it| it.processor.as_secs_f64()).sum();
    println!(
        "{slots} slots in {:.1} s; {:.0} slots per second of processor time; {}",
        seconds(began),
        slots as f64 / busy,
        longest(&times)
    );
    drop(times);
    // Outcomes are forgotten, as in a shard that was filled some time ago.
    rig.at += 200_000;
    rig.shard.apply(LogTime(rig.at), ShardCommand::Tick { horizon: None });
    let per_slot = |before: usize, now: usize| (now - before) as f64 / slots as f64;
    println!(
        "per slot: {:.0} bytes allocated, {:.0} resident",
        per_slot(live_before, live_bytes()),
        per_slot(resident_before, resident_bytes())
    );

    let replace = |rig: &mut Rig| {
        let drawn = rig.requests * u64::from(SLAB);
        rig.slab(|slot| key(mixed(drawn + u64::from(slot), slots)))
    };
    let mut calm = Vec::new();
    for _ in 0..100 {
        calm.extend(replace(&mut rig));
    }
    println!("replacing, no snapshot: {}", longest(&calm));
    for _ in 0..3 {
        let began = Instant::now();
        let frozen = rig.shard.clone();
        let cloned = began.elapsed();
        thread::spawn(|| drop(frozen)).join().unwrap();
        println!("clone: {:.3} ms", cloned.as_secs_f64() * 1e3);
    }

    let folder = tempfile::tempdir().unwrap();
    let file = File::options().read(true).write(true).create_new(true).open(folder.path().join("s")).unwrap();
    let done = AtomicBool::new(false);
    let (mut during, mut after) = (Vec::new(), Vec::new());
    let highest = live_bytes();
    thread::scope(|scope| {
        let frozen = rig.shard.clone();
        let writer = scope.spawn(|| {
            let began = Instant::now();
            write(frozen, &file);
            done.store(true, Ordering::Release);
            seconds(began)
        });
        while !done.load(Ordering::Acquire) && during.len() < slabs as usize * 5 {
            during.extend(replace(&mut rig));
        }
        println!(
            "replacing, while a snapshot is written: {}; {} MB more",
            longest(&during),
            (live_bytes().saturating_sub(highest)) >> 20
        );
        println!("written in {:.2} s", writer.join().unwrap());
        for _ in 0..50 {
            after.extend(replace(&mut rig));
        }
    });
    println!("replacing, after it: {}", longest(&after));
    println!(
        "file: {} bytes, {:.0} per slot",
        file.metadata().unwrap().len(),
        file.metadata().unwrap().len() as f64 / slots as f64
    );
    drop(rig);
    let (live_before, resident_before) = (live_bytes(), resident_bytes());
    let began = Instant::now();
    let back = read(&file);
    println!(
        "restored in {:.2} s; per slot {:.0} bytes allocated, {} resident more",
        seconds(began),
        per_slot(live_before, live_bytes()),
        resident_bytes().saturating_sub(resident_before)
    );
    drop(back);
}
