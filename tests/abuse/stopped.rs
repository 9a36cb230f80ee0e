//! Writers that are stopped in the middle of a large write and wake up when their slabs belong to others (*Fenced writers*).

use quarry_proto::v1::commit_outcome::Code;
use quarry_tests::{
    Member, Seed, Signal, TestCluster,
    cluster::create_namespace,
    eventually,
    raw::{Granted, RawWriter, Wish},
    rounds::rounds,
    seed::pattern,
    soon,
    victim::Victim,
};
use quarry_wire::{
    frame::header_bytes,
    ids::{Generation, GrantId, NamespaceId, NodeId, Ordinal, RegionId, RegionIndex, ShardId, WriterId},
    key::Key,
    region::RegionRecord,
};
use std::{collections::BTreeMap, ops::Range, time::Duration};
use tokio::{task::JoinSet, time::Instant};

const NODE: NodeId = NodeId(101);
/// Times that a stopped writer's slab is granted again: so many batches of so many writers.
const BATCHES: usize = 5;
const WRITERS: usize = 10;
const _: () = assert!(BATCHES * WRITERS == 50);
/// The whole slab is one slot, and one write.
const SLOT: u32 = 32 << 20;
const SLAB: u64 = SLOT as u64;
/// Places that are looked at to see how far a write has come.
const LOOKS: u64 = 16;
/// Looks without a change after which nothing more is on its way.
const SAME: u32 = 4;
/// Lifetime of grants that run out while their writer is stopped, which must be time for all of a batch to be stopped before.
const TTL: Duration = Duration::from_secs(5);
/// A write that is not on its way by then has met a closed lane.
const LATE: Duration = Duration::from_secs(10);
/// Lifetime of grants that do not run out.
const LONG: Duration = Duration::from_secs(30);

struct Scene {
    cluster: TestCluster,
    raw: RawWriter,
    namespace: NamespaceId,
    record: RegionRecord,
    /// What the last writer wrote: the next one writes another.
    byte: u8,
}

/// A writer, stopped in the middle of its write.
struct Stopped {
    victim: Victim,
    /// Of its slab.
    base: u64,
    /// What it writes all over it.
    byte: u8,
    writer: WriterId,
    grant: GrantId,
}

impl Scene {
    /// How many of the places in the slab at `base` hold `byte`.
    async fn landed(&self, base: u64, byte: u8) -> u64 {
        let mut count = 0;
        for look in 0..LOOKS {
            let at = base + (look + 1) * (SLAB / LOOKS) - 1;
            count += u64::from(self.raw.read(&self.record, at, 1).await.unwrap() == [byte]);
        }
        count
    }

    /// New writers, each stopped in the middle of its write: the node is stopped first, so that no write can end before. None if a grant ran
    /// out before.
    async fn stop_half_way(&mut self, ttl: Duration) -> Option<Vec<Stopped>> {
        let mut starting = JoinSet::new();
        for _ in 0..WRITERS {
            let file = self.cluster.cluster_file();
            starting.spawn(async move { Victim::start(env!("CARGO_BIN_EXE_raw-writer"), &file).await });
        }
        let mut writers = Vec::new();
        for mut victim in starting.join_all().await {
            let held = victim.grant(self.namespace, SLOT, 1, ttl).await;
            self.byte = self.byte.wrapping_add(1);
            writers.push(stopped(victim, &held, self.byte));
        }
        // All at once, since the time of the first runs out while the last one is armed.
        let arming: JoinSet<Stopped> = writers
            .drain(..)
            .map(|mut writer| async move {
                writer.victim.arm_granted().await;
                writer
            })
            .collect();
        writers = arming.join_all().await;
        let node = Member::Data(NODE.0);
        self.cluster.pause(node).await.unwrap();
        for writer in &mut writers {
            writer.victim.begin_write(NODE.0, writer.byte).await;
        }
        let (mut late, until) = (false, Instant::now() + LATE);
        for writer in &writers {
            late |= soon("the write fills the sockets' buffers, or comes too late", async || {
                let full = writer.victim.unacknowledged_bytes() > 100_000;
                (full || Instant::now() > until).then_some(!full)
            })
            .await;
            writer.victim.signal(Signal::STOP);
            soon("the writer stops", async || writer.victim.is_stopped().then_some(())).await;
        }
        self.cluster.resume(node).await.unwrap();
        if late {
            return None;
        }
        for writer in &writers {
            let (mut before, mut same) = (0, 0);
            let landed = soon("the landing ends", async || {
                let now = self.landed(writer.base, writer.byte).await;
                same = if now == before { same + 1 } else { 0 };
                before = now;
                (same >= SAME).then_some(now)
            })
            .await;
            assert!(landed < LOOKS, "the whole write landed before the writer was stopped");
            // A claim that ended while the node was stopped lets nothing in.
            late |= self.raw.read(&self.record, writer.base, 1).await.unwrap() != [writer.byte];
        }
        (!late).then_some(writers)
    }

    /// Ends a stopped writer's grant at the shard while its claim at the node stays open, so that nothing but the later token stands between
    /// the two writers.
    async fn seal(&mut self, writer: &Stopped) {
        let own = std::mem::replace(&mut self.raw.id, writer.writer);
        self.raw.seal_id(writer.grant, 0).await.unwrap();
        self.raw.id = own;
    }

    /// Takes the slabs of all these writers again, for another writer, and commits a value in each at once. All other space is held meanwhile.
    async fn granted_again(&mut self, writers: &[Stopped], payload: &mut [u8]) -> BTreeMap<u64, Taken> {
        let wish = Wish { namespace: self.namespace, slot_size: SLOT, slots: 1, ttl: LONG, avoid: Vec::new() };
        let (mut taken, mut others) = (BTreeMap::new(), Vec::new());
        eventually(Duration::from_secs(90), "the stopped writers' slabs are granted again", async || {
            // As long as there is some, without a pause.
            while let Ok(next) = self.raw.grant(&wish).await {
                let base = next.grant.holders[0].base.0;
                if writers.iter().any(|writer| writer.base == base) {
                    taken.insert(base, self.fill(&next, payload).await);
                } else {
                    others.push(next);
                }
            }
            (taken.len() == writers.len()).then_some(())
        })
        .await;
        for other in others {
            self.raw.seal(&other, 0).await.unwrap();
        }
        taken
    }

    /// Arms a slab, writes all over it and commits. Payloads of different slabs differ in their first bytes.
    async fn fill(&mut self, granted: &Granted, payload: &mut [u8]) -> Taken {
        let holder = granted.grant.holder(NODE).unwrap();
        let armed = self.raw.arm(NODE, granted).await.unwrap();
        let key = format!("key-{}", granted.grant.id.sequence.number);
        payload[..8].copy_from_slice(&granted.grant.id.sequence.number.to_le_bytes());
        let payload = &payload[..SLOT as usize - header_bytes(key.len())];
        let frame = self.raw.frame(granted, 0, &key, payload);
        self.raw.write(&armed, 0, &frame.bytes).await.unwrap();
        let outcomes = self.raw.commit(NODE, granted, [NODE], vec![frame.entry]).await.unwrap();
        assert_eq!(outcomes[0].code(), Code::Committed, "{outcomes:?}");
        Taken { key: Key::new(key).unwrap(), span: granted.grant.span(holder), bytes: frame.bytes }
    }
}

/// A value where a stopped writer's slab was.
struct Taken {
    key: Key,
    span: Range<u64>,
    /// Header and payload.
    bytes: Vec<u8>,
}

fn stopped(victim: Victim, held: &serde_json::Value, byte: u8) -> Stopped {
    let number = |name: &str| held[name].as_u64().unwrap();
    let generation = Generation(u32::try_from(number("generation")).unwrap());
    let sequence = Ordinal { generation, number: number("sequence") };
    let writer = hex::decode(held["writer"].as_str().unwrap()).unwrap();
    Stopped {
        victim,
        base: held["holders"][0]["base"].as_u64().unwrap(),
        byte,
        writer: WriterId(writer.try_into().unwrap()),
        grant: GrantId { shard: ShardId(1), sequence },
    }
}

/// Guard: arming a higher token closes older overlapping claims *and their lanes* (`datanode/src/claims`, `lanes.rs`). With the write region
/// closed and the lane left open, the rest of the write still lands.
#[tokio::test]
async fn a_writer_stopped_in_the_middle_of_a_write_cannot_reach_a_slab_that_was_granted_to_another() {
    let cluster = TestCluster::start_small(1, 1 << 30).await;
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 1, None).await;
    let raw = cluster.raw().await;
    let record = raw.record(RegionId { node: NODE, index: RegionIndex(0) }).await;
    let mut scene = Scene { cluster, raw, namespace: blocks.info().id, record, byte: 0 };
    let mut payload = pattern(Seed::draw().bits(), SLOT as usize);
    let batches = rounds(BATCHES);
    for batch in 0..batches {
        // In the first batch the grants run out at the shard and at the node.
        let runs_out = batch % BATCHES == 0;
        let mut ttl = if runs_out { TTL } else { LONG };
        let mut writers = loop {
            match scene.stop_half_way(ttl).await {
                Some(writers) => break writers,
                // A busy machine needs more time for it.
                None => {
                    assert!(ttl < LONG, "a grant ran out before its writer could be stopped");
                    ttl = LONG.min(ttl * 2);
                }
            }
        };
        if !runs_out {
            for writer in &writers {
                scene.seal(writer).await;
            }
        }
        let taken = scene.granted_again(&writers, &mut payload).await;
        for writer in &writers {
            // One slab, one holder: the same bytes of the same node, all of them another's now.
            assert_eq!(taken[&writer.base].span, writer.base..writer.base + SLAB);
        }
        for writer in &writers {
            writer.victim.signal(Signal::CONT);
        }
        for writer in &mut writers {
            let said = writer.victim.answer("written").await;
            assert_eq!(said["ok"], false, "batch {batch}: a fenced write was acknowledged: {said}");
        }
        for Taken { span, bytes, .. } in taken.values() {
            let now = scene.raw.read(&scene.record, span.start, bytes.len()).await.unwrap();
            assert!(now == *bytes, "batch {batch}: a stopped writer reached the memory of another");
        }
        for Taken { key, bytes, .. } in taken.into_values() {
            if batch + 1 == batches {
                // Only now: a lease would keep freed memory from being granted for a while.
                let value = blocks.get(&key).await.unwrap().unwrap();
                assert!(
                    bytes.ends_with(&value.bytes)
                        && value.bytes.len() == bytes.len() - header_bytes(key.as_bytes().len())
                );
            }
            assert!(blocks.delete(&key).await.unwrap().is_some());
        }
    }
}
