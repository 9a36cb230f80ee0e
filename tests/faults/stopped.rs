//! A writer that is stopped in the middle of a large write and wakes up when its slab belongs to another (*Fenced writers*).

use crate::{NODE, one_node};
use quarry_proto::v1::commit_outcome::Code;
use quarry_tests::{
    Member, Signal, TestCluster,
    cluster::create_namespace,
    raw::{Granted, RawWriter, Wish},
    seed::pattern,
    soon,
    victim::Victim,
};
use quarry_wire::{
    ids::{Generation, GrantId, NamespaceId, Ordinal, RegionId, RegionIndex, ShardId, WriterId},
    limits::EXTENT_BYTES,
    region::RegionRecord,
};
use std::time::Duration;

const ROUNDS: u8 = 4;
/// The whole slab is one slot: an extent.
const SLOT: u32 = 64 << 20;
const _: () = assert!(SLOT as u64 == EXTENT_BYTES);
/// Places that are looked at to see how far a write has come.
const LOOKS: u64 = 64;

struct Scene<'a> {
    cluster: &'a mut TestCluster,
    raw: RawWriter,
    namespace: NamespaceId,
    record: RegionRecord,
}

impl Scene<'_> {
    /// How many of the places in the slab at `base` hold `byte`.
    async fn landed(&self, base: u64, byte: u8) -> u64 {
        let mut count = 0;
        for look in 0..LOOKS {
            let at = base + (look + 1) * (EXTENT_BYTES / LOOKS) - 1;
            count += u64::from(self.raw.read(&self.record, at, 1).await.unwrap() == [byte]);
        }
        count
    }

    /// Waits until nothing lands any more.
    async fn settled(&self, base: u64, byte: u8) -> u64 {
        let (mut before, mut same) = (self.landed(base, byte).await, 0);
        soon("the landing ends", async || {
            let now = self.landed(base, byte).await;
            same = if now == before { same + 1 } else { 0 };
            before = now;
            (same >= 5).then_some(now)
        })
        .await
    }

    /// Stops `victim` in the middle of its write to the slab at `base`: the node is stopped first, so that the write cannot end before.
    async fn stop_half_way(&mut self, victim: &mut Victim, base: u64, byte: u8) {
        let node = Member::Data(NODE.0);
        self.cluster.pause(node).await.unwrap();
        victim.begin_write(NODE.0, byte).await;
        soon("the write fills the sockets' buffers", async || (victim.unread_bytes() > 100_000).then_some(())).await;
        victim.signal(Signal::STOP);
        self.cluster.resume(node).await.unwrap();
        soon("the first bytes land", async || {
            (self.raw.read(&self.record, base, 1).await.ok()? == [byte]).then_some(())
        })
        .await;
        let landed = self.settled(base, byte).await;
        assert!(landed < LOOKS, "the whole write landed before the writer was stopped");
    }

    /// The slab again, for another writer. All other space is held meanwhile, so that the next grant that succeeds is this one.
    async fn granted_again(&self, base: u64) -> Granted {
        let wish = wish(self.namespace, Duration::from_secs(30));
        let mut others = Vec::new();
        let found = soon("the stopped writer's slab is granted again", async || {
            let next = self.raw.grant(&wish).await.ok()?;
            if next.grant.holders[0].base.0 == base {
                return Some(next);
            }
            others.push(next);
            None
        })
        .await;
        for other in others {
            self.raw.seal(&other, 0).await.unwrap();
        }
        found
    }
}

fn wish(namespace: NamespaceId, ttl: Duration) -> Wish {
    Wish { namespace, slot_size: SLOT, slots: 1, ttl, avoid: Vec::new() }
}

#[tokio::test]
async fn a_writer_stopped_in_the_middle_of_a_write_cannot_reach_a_slab_that_was_granted_to_another() {
    let mut cluster = one_node().await;
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 1, None).await;
    let raw = cluster.raw().await;
    let record = raw.record(RegionId { node: NODE, index: RegionIndex(0) }).await;
    let file = cluster.cluster_file();
    let mut scene = Scene { cluster: &mut cluster, raw, namespace: blocks.info().id, record };
    let mut payloads = Vec::new();
    for round in 0..ROUNDS {
        let byte = 0xa0 + round;
        let mut victim = Victim::start(env!("CARGO_BIN_EXE_raw-writer"), &file);
        // By turns: the grant runs out at the shard and at the node; or the shard gives the slab away while the node's claim is open, so
        // that nothing but the later token stands between the two writers.
        let runs_out = round % 2 == 0;
        let ttl = if runs_out { Duration::from_secs(4) } else { Duration::from_secs(30) };
        let held = victim.arm(blocks.info().id, SLOT, 1, ttl).await;
        let base = held["holders"][0]["base"].as_u64().unwrap();
        scene.stop_half_way(&mut victim, base, byte).await;
        if !runs_out {
            let number = |name: &str| held[name].as_u64().unwrap();
            let generation = Generation(u32::try_from(number("generation")).unwrap());
            let sequence = Ordinal { generation, number: number("sequence") };
            let id = hex::decode(held["writer"].as_str().unwrap()).unwrap();
            let own = std::mem::replace(&mut scene.raw.id, WriterId(id.try_into().unwrap()));
            scene.raw.seal_id(GrantId { shard: ShardId(1), sequence }, 0).await.unwrap();
            scene.raw.id = own;
        }
        let next = scene.granted_again(base).await;
        let armed = scene.raw.arm(NODE, &next).await.unwrap();
        let payload = pattern(u64::from(round), usize::try_from(EXTENT_BYTES).unwrap() - 128);
        let key = format!("key-{round}");
        let frame = scene.raw.frame(&next, 0, &key, &payload);
        scene.raw.write(&armed, 0, &frame.bytes).await.unwrap();
        let outcomes = scene.raw.commit(NODE, &next, [NODE], vec![frame.entry.clone()]).await.unwrap();
        assert_eq!(outcomes[0].code(), Code::Committed, "{outcomes:?}");
        victim.signal(Signal::CONT);
        let said = victim.answer("written").await;
        assert_eq!(said["ok"], false, "round {round}: a fenced write was acknowledged: {said}");
        let now = scene.raw.read(&scene.record, base, frame.bytes.len()).await.unwrap();
        assert!(now == frame.bytes, "round {round}: the stopped writer reached the memory of another");
        payloads.push((key, payload));
        victim.kill().await;
    }
    // Only now: a lease would keep freed memory from being granted for a while.
    for (key, payload) in payloads {
        assert!(blocks.get(&key).await.unwrap().unwrap().bytes == payload);
    }
}
