//! Readers that are stopped in the middle of a get, until their lease is over and the memory that they read belongs to others
//! (*Leases hold*, *No wrong value*).

use quarry_client::{Namespace, PutItem, PutMode};
use quarry_tests::{
    Member, Signal, TestCluster,
    cluster::create_namespace,
    eventually,
    raw::{Granted, Placed, RawWriter, Wish},
    seed::pattern,
    sockets, soon,
    victim::Victim,
};
use quarry_wire::{ids::NodeId, key::Key, limits::FRAME_ALIGN};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::{task::yield_now, time::Instant};

const NODE: NodeId = NodeId(101);
const MEMBER: Member = Member::Data(101);
const VALUES: usize = 20;
const BIG: &str = "big";
/// More than the buffers of two sockets hold, so that a stopped reader has a part of it only.
const BIG_BYTES: usize = 12 << 20;
/// The longest rest: lease horizon and quarantine, and room for a busy machine.
const REUSED_WITHIN: Duration = Duration::from_secs(60);
/// How long a node that goes on may take to answer.
const BYTES_COME_WITHIN: Duration = Duration::from_secs(2);
/// What lies where the values lay.
const OTHERS: u8 = 0xee;

fn key(index: usize) -> String {
    format!("key-{index}")
}

/// What a key held first, and what it holds after everything was replaced.
fn payload(key: &str, replaced: bool) -> Vec<u8> {
    let seed = u64::from(crc32c::crc32c(key.as_bytes())) << 1 | u64::from(replaced);
    let bytes = if key == BIG { BIG_BYTES } else { 10_000 + usize::try_from(seed % 60_000).unwrap() };
    pattern(seed, bytes)
}

/// A way to read, by which readers are stopped at each look at their clock.
#[derive(Clone, Debug)]
struct Way {
    api: &'static str,
    fresh: bool,
    keys: Vec<String>,
    namespace: String,
}

/// A reader, stopped in the middle of a get.
struct Stopped {
    victim: Victim,
    way: Way,
    /// At which look of how many; none: while bytes came.
    at: Option<(u64, u64)>,
}

impl Way {
    fn order(&self, stop_at: u64) -> Value {
        json!({"api": self.api, "fresh": self.fresh, "keys": self.keys, "namespace": self.namespace, "stop_at": stop_at})
    }

    /// Reads to the end, so that the connections stand and the descriptors are cached; answers how often a get looks at its clock.
    async fn whole(&self, victim: &mut Victim) -> u64 {
        let mut looks = 0;
        for _ in 0..2 {
            victim.order(&self.order(0)).await;
            victim.answer("reading").await;
            let got = victim.answer("got").await;
            for (key, value) in self.keys.iter().zip(got["values"].as_array().unwrap()) {
                assert_eq!(*value, told(&payload(key, false)), "{key}");
            }
            looks = got["looks"].as_u64().unwrap();
        }
        looks
    }

    /// Readers stopped right after each look; in a batch, which looks once more for every value, after the first and the last ones.
    async fn stopped(&self, cluster: &TestCluster) -> Vec<Stopped> {
        let mut all = Vec::new();
        let mut at = 1;
        loop {
            let mut victim = Victim::start(env!("CARGO_BIN_EXE_slow-reader"), &cluster.cluster_file()).await;
            let looks = self.whole(&mut victim).await;
            victim.order(&self.order(at)).await;
            victim.answer("reading").await;
            soon(format!("{self:?} stops at look {at} of {looks}"), async || victim.is_stopped().then_some(())).await;
            all.push(Stopped { victim, way: self.clone(), at: Some((at, looks)) });
            if at == looks {
                return all;
            }
            at = if at < 4 { at + 1 } else { looks };
        }
    }

    /// A reader stopped while the bytes of its value come: the node is stopped first, and sends them when the reader is stopped.
    async fn stopped_half_way(&self, cluster: &mut TestCluster) -> Stopped {
        let mut victim = Victim::start(env!("CARGO_BIN_EXE_slow-reader"), &cluster.cluster_file()).await;
        self.whole(&mut victim).await;
        let node = cluster.pid(MEMBER).unwrap();
        eventually(REUSED_WITHIN, "a reader is stopped while bytes come", async || {
            let unread = || sockets::of(node).iter().map(|socket| socket.unread).sum::<u64>();
            cluster.kill(MEMBER, Signal::STOP).await.unwrap();
            let before = unread();
            victim.order(&self.order(0)).await;
            victim.answer("reading").await;
            // Something came for the node; if it was not what the reader asks for, another try shows that.
            soon("the node is asked", async || (unread() > before).then_some(())).await;
            victim.signal(Signal::STOP);
            soon("the reader stops", async || victim.is_stopped().then_some(())).await;
            cluster.kill(MEMBER, Signal::CONT).await.unwrap();
            let until = Instant::now() + BYTES_COME_WITHIN;
            while Instant::now() < until {
                // It reads nothing: its socket's buffer fills.
                if victim.unread_bytes() > 100_000 {
                    return Some(());
                }
                yield_now().await;
            }
            victim.signal(Signal::CONT);
            victim.answer("got").await;
            None
        })
        .await;
        Stopped { victim, way: self.clone(), at: None }
    }
}

fn told(bytes: &[u8]) -> Value {
    json!({"bytes": bytes.len(), "crc": crc32c::crc32c(bytes)})
}

/// Waits until all of these places are granted to another writer, who writes over them.
async fn taken_by_others(raw: &RawWriter, blocks: &Namespace, places: &[Placed]) {
    let wish = Wish {
        namespace: blocks.info().id,
        slot_size: 4096,
        slots: 4096,
        ttl: Duration::from_secs(30),
        avoid: Vec::new(),
    };
    let mut taken: Vec<(Placed, Vec<bool>)> =
        places.iter().map(|place| (*place, vec![false; place.frame_bytes.div_ceil(FRAME_ALIGN)])).collect();
    eventually(REUSED_WITHIN, "the memory of replaced values is granted again", async || {
        // As long as there is some, without a pause: fewer slots are granted where not all of them fit.
        while let Ok(granted) = raw.grant(&wish).await {
            overwrite(raw, &granted, &mut taken).await;
        }
        taken.iter().flat_map(|(_, units)| units).all(|taken| *taken).then_some(())
    })
    .await;
}

/// Writes all over a new grant's slab, if it has a part of one of the places, and marks the units that it covers.
async fn overwrite(raw: &RawWriter, granted: &Granted, taken: &mut [(Placed, Vec<bool>)]) {
    let span = granted.grant.span(granted.grant.holder(NODE).unwrap());
    let mut used = false;
    for (place, units) in taken {
        for (unit, taken) in (0..).zip(units) {
            let covered = span.contains(&(place.offset + unit * FRAME_ALIGN as u64));
            *taken |= covered;
            used |= covered;
        }
    }
    if used {
        let armed = raw.arm(NODE, granted).await.unwrap();
        let bytes = vec![OTHERS; usize::try_from(granted.grant.slab_bytes()).unwrap()];
        raw.write(&armed, 0, &bytes).await.unwrap();
    }
}

/// Guards: a lease is looked at after the bytes were copied (`client/src/read/check.rs`): without it the bytes of others are met, and count as
/// damage; header and CRC are compared; freed memory rests until the horizon and the quarantine are over (`meta/state/src/shard/quarantine.rs`):
/// without it a reader within its lease meets the bytes of others.
#[tokio::test]
async fn a_reader_stopped_across_the_end_of_its_lease_and_the_reuse_of_its_slot_sees_no_byte_of_others() {
    let mut cluster = TestCluster::start_small(1, 256 << 20).await;
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 1, None).await;
    let all: Vec<String> = (0..VALUES).map(key).chain([BIG.to_owned()]).collect();
    let items = |mode: PutMode, replaced: bool| {
        let item = |key: &String| PutItem { mode, ..PutItem::create(Key::new(key).unwrap(), payload(key, replaced)) };
        all.iter().map(item).collect::<Vec<PutItem>>()
    };
    for result in blocks.put_many(items(PutMode::Create, false)).await {
        result.unwrap();
    }
    client.close().await.unwrap();
    let raw = cluster.raw().await;
    let mut places = Vec::new();
    for key in &all {
        places.extend(raw.copies(blocks.info().id, key).await);
    }
    assert_eq!(places.len(), all.len());

    let way =
        |api, fresh, keys: &[String]| Way { api, fresh, keys: keys.to_vec(), namespace: blocks.info().name.clone() };
    let mut readers = Vec::new();
    for fresh in [true, false] {
        readers.extend(way("single", fresh, &all[..1]).stopped(&cluster).await);
        readers.extend(way("batch", fresh, &all[..VALUES]).stopped(&cluster).await);
        readers.extend(way("into", fresh, &all[1..3]).stopped(&cluster).await);
    }
    for api in ["single", "into"] {
        readers.push(way(api, false, &all[VALUES..]).stopped_half_way(&mut cluster).await);
    }

    let client = cluster.client().await;
    let theirs = client.namespace(&blocks.info().name).await.unwrap();
    for result in theirs.put_many(items(PutMode::Replace, true)).await {
        result.unwrap();
    }
    client.close().await.unwrap();
    taken_by_others(&raw, &theirs, &places).await;

    for reader in &readers {
        reader.victim.signal(Signal::CONT);
    }
    for Stopped { mut victim, way, at } in readers {
        let got = victim.answer("got").await;
        assert_eq!(got["damaged"], 0, "{way:?} stopped at {at:?} looked at the bytes of others: {got}");
        // What was there before lies nowhere any more: it comes only from who had read it before it was stopped.
        let before_it_asked = at.is_some_and(|(at, _)| at == 1);
        for (key, value) in way.keys.iter().zip(got["values"].as_array().unwrap()) {
            let (old, new) = (told(&payload(key, false)), told(&payload(key, true)));
            assert!(
                *value == new || (!before_it_asked && *value == old),
                "{way:?} stopped at {at:?}: {key} is {value}, not {new}"
            );
        }
        victim.kill().await;
    }
}
