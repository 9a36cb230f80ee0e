//! Writers killed at every step of a put, and in the middle of their writes (*Nothing leaks*, *Idempotent commits*).

use quarry_client::{Client, Namespace, PutError};
use quarry_proto::v1::commit_outcome::Code;
use quarry_tests::{
    Member, Seed, TestCluster, calls,
    cluster::{Space, create_namespace},
    eventually,
    raw::{Granted, RawWriter, Wish},
    rounds::rounds,
    seed::pattern,
    sockets, soon,
    victim::Victim,
};
use quarry_wire::{
    frame::header_bytes,
    ids::{NodeId, RegionId, RegionIndex},
    region::RegionRecord,
    version::Version,
};
use std::{ops::Range, time::Duration};
use tokio::{
    task::JoinSet,
    time::{Instant, timeout},
};

const TTL: Duration = Duration::from_secs(4);
/// Time for a grant to end, and for its space to rest: the longest rest is the lease horizon and the quarantine.
const SPACE_IS_BACK: Duration = Duration::from_secs(60);
/// More than the buffers of two sockets hold while nobody reads.
const FULL: u64 = 100_000;
const NODE: NodeId = NodeId(101);
const MEMBER: Member = Member::Data(101);

/// How far a writer comes before it is killed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Step {
    Granted,
    Armed,
    MidWrite,
    Written,
    /// Its commit lies in the socket of a holder that has not looked at it.
    CommitSent,
}

const STEPS: [Step; 5] = [Step::Granted, Step::Armed, Step::MidWrite, Step::Written, Step::CommitSent];
/// Slot of a victim: its write does not fit in the buffers of sockets.
const SLOT: u32 = 4 << 20;
const BYTES: usize = 100_000;
/// Writers that are killed at any moment of their commit.
const COMMITS: usize = 20;

async fn victim(cluster: &TestCluster) -> Victim {
    Victim::start(env!("CARGO_BIN_EXE_raw-writer"), &cluster.cluster_file()).await
}

/// A key so long that the message that commits it is longer than all that is said before it.
fn key(what: &str) -> String {
    format!("{what}-{}", "k".repeat(450))
}

/// Bytes that lie in the sockets of a gRPC port.
fn came(address: &str) -> u64 {
    let (_, port) = address.rsplit_once(':').unwrap();
    let port: u16 = port.parse().unwrap();
    sockets::all().iter().filter(|socket| socket.port == port).map(|socket| socket.unread).sum()
}

/// Takes a new writer as far as `step` and kills it there. Answers what it wrote.
async fn die_at(cluster: &mut TestCluster, blocks: &Namespace, step: Step, key: &str, seed: u64) -> Vec<u8> {
    let mut victim = victim(cluster).await;
    victim.grant(blocks.info().id, SLOT, 1, TTL).await;
    if step >= Step::Armed {
        victim.arm_granted().await;
    }
    if step == Step::MidWrite {
        cluster.pause(MEMBER).await.unwrap();
        victim.begin_write(NODE.0, 0xbb).await;
        soon("the write fills the sockets' buffers", async || (victim.unacknowledged_bytes() > FULL).then_some(()))
            .await;
    }
    if step >= Step::Written {
        victim.write_value(key, seed, BYTES).await;
    }
    if step == Step::CommitSent {
        let before = came(&cluster.address(MEMBER));
        cluster.pause(MEMBER).await.unwrap();
        victim.begin_commit(NODE.0).await;
        let address = cluster.address(MEMBER);
        let sent = async || (came(&address) > before + 600).then_some(());
        soon("the commit lies in the socket of the node", sent).await;
    }
    victim.kill().await;
    // A node that is not paused is told to go on, which it does.
    cluster.resume(MEMBER).await.unwrap();
    pattern(seed, BYTES)
}

/// What must be found under a key from now on.
struct Expected {
    key: String,
    version: Version,
    bytes: Vec<u8>,
}

/// Another writer puts the same key at once. It has it, or it is told that the dead writer's value is there, which then is whole.
async fn put_after(blocks: &Namespace, key: &str, theirs: &[u8], commit_sent: bool, seed: u64) -> Expected {
    let ours = pattern(seed, BYTES / 2);
    let (version, bytes) = match blocks.put(key, ours.clone()).await {
        Ok(version) => (version, ours),
        Err(PutError::Exists { current }) if commit_sent => (current, theirs.to_vec()),
        other => panic!("{key:.20}: {other:?}"),
    };
    let expected = Expected { key: key.to_owned(), version, bytes };
    expected.check(blocks).await;
    expected
}

impl Expected {
    async fn check(&self, blocks: &Namespace) {
        let value = blocks.fresh().get(&self.key).await.unwrap().unwrap();
        assert_eq!(value.version, self.version, "{:.20}", self.key);
        assert!(value.bytes == self.bytes, "{:.20} came back changed", self.key);
    }
}

/// Waits until no grant is left and nothing rests.
async fn at_rest(cluster: &TestCluster) -> Space {
    eventually(SPACE_IS_BACK, "the space of dead writers comes back", async || {
        let now = cluster.space().await;
        (now.granted == 0 && now.resting == 0).then_some(now)
    })
    .await
}

async fn nothing_leaks(cluster: &TestCluster, client: Client, blocks: &Namespace, left: &[Expected], before: Space) {
    client.close().await.unwrap();
    eventually(SPACE_IS_BACK, "the grants of dead writers end", async || {
        (cluster.space().await.granted == 0).then_some(())
    })
    .await;
    let other = cluster.client().await;
    let theirs = other.namespace(&blocks.info().name).await.unwrap();
    for expected in left {
        // A commit that came late has changed nothing.
        expected.check(&theirs).await;
        assert_eq!(theirs.delete(&expected.key).await.unwrap(), Some(expected.version));
    }
    assert_eq!(at_rest(cluster).await, before);
}

async fn two_small_nodes() -> TestCluster {
    TestCluster::start_small(2, 128 << 20).await
}

/// Guards: grants end by their TTL (`meta/state/src/shard/grants.rs`), nothing waits for a granted slot, and a commit applies as one entry.
#[tokio::test]
async fn a_writer_killed_at_any_step_blocks_nobody_leaves_nothing_and_its_commit_is_whole_or_not() {
    let mut cluster = two_small_nodes().await;
    let before = cluster.space().await;
    assert_eq!((before.granted, before.committed, before.resting), (0, 0, 0), "{before:?}");
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 2, None).await;
    let mut seed = Seed::draw();
    let mut left = Vec::new();
    for (round, step) in (0..rounds(1)).flat_map(|round| STEPS.map(|step| (round, step))) {
        let key = key(&format!("{step:?}-{round}"));
        let theirs = die_at(&mut cluster, &blocks, step, &key, seed.bits()).await;
        left.push(put_after(&blocks, &key, &theirs, step == Step::CommitSent, seed.bits()).await);
    }
    nothing_leaks(&cluster, client, &blocks, &left, before).await;
}

/// Guard: a slot's outcome is recorded with the value that it makes, in one entry (`meta/state/src/shard/commits.rs`).
#[tokio::test]
async fn a_writer_killed_at_any_moment_of_its_commit_leaves_the_value_whole_or_absent() {
    let cluster = two_small_nodes().await;
    let before = cluster.space().await;
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 2, None).await;
    let mut seed = Seed::draw();
    let mut left = Vec::new();
    let mut theirs_won = 0;
    let count = rounds(COMMITS);
    for round in 0..count {
        let key = key(&format!("key-{round}"));
        let mut victim = victim(&cluster).await;
        victim.arm(blocks.info().id, 1 << 20, 1, TTL).await;
        let theirs = seed.bits();
        victim.write_value(&key, theirs, BYTES).await;
        victim.begin_commit(NODE.0 + u64::from(seed.below(2) == 0)).await;
        let moment = Duration::from_micros(seed.below(12_000) as u64);
        let answered = timeout(moment, victim.answer("committed")).await;
        victim.kill().await;
        let expected = put_after(&blocks, &key, &pattern(theirs, BYTES), true, seed.bits()).await;
        let won = expected.bytes.len() == BYTES;
        if let Ok(said) = answered {
            assert!(said["ok"] == true && won, "{said}: what was acknowledged is there");
        }
        theirs_won += usize::from(won);
        left.push(expected);
    }
    eprintln!("{theirs_won} of {count} commits of killed writers took effect");
    nothing_leaks(&cluster, client, &blocks, &left, before).await;
}

const WRITERS_KILLED: usize = 100;
const WRITERS_PER_WAVE: usize = 20;
/// Time for all of a wave to be armed; one that is not in the middle of its write by then does not count.
const WAVE_TTL: Duration = Duration::from_secs(20);
/// A write that is not on its way by then has met a closed lane.
const LATE: Duration = Duration::from_secs(10);
/// A neighbour's slab: four slots, each wholly filled.
const NEIGHBOUR_SLOT: u32 = 64 << 10;
const NEIGHBOUR_SLOTS: u32 = 4;

/// A committed slab, and all of its bytes.
struct Neighbour {
    span: Range<u64>,
    bytes: Vec<u8>,
}

async fn granted(raw: &RawWriter, blocks: &Namespace) -> Granted {
    let (slot_size, slots) = (NEIGHBOUR_SLOT, NEIGHBOUR_SLOTS);
    let ttl = Duration::from_secs(30);
    raw.grant(&Wish { namespace: blocks.info().id, slot_size, slots, ttl, avoid: Vec::new() }).await.unwrap()
}

/// Fills a neighbour's slab and commits it.
async fn neighbour(raw: &mut RawWriter, granted: &Granted, seed: &mut Seed) -> Neighbour {
    let armed = raw.arm(NODE, granted).await.unwrap();
    let (mut bytes, mut entries) = (Vec::new(), Vec::new());
    for slot in 0..NEIGHBOUR_SLOTS {
        let key = format!("neighbour-{:032x}", u128::from(seed.bits()));
        let payload = pattern(seed.bits(), NEIGHBOUR_SLOT as usize - header_bytes(key.len()));
        let frame = raw.frame(granted, slot, &key, &payload);
        bytes.extend_from_slice(&frame.bytes);
        entries.push(frame.entry);
    }
    raw.write(&armed, 0, &bytes).await.unwrap();
    let outcomes = raw.commit(NODE, granted, [NODE], entries).await.unwrap();
    assert!(outcomes.iter().all(|it| it.code() == Code::Committed), "{outcomes:?}");
    raw.close(NODE, granted).await.unwrap();
    raw.seal(granted, NEIGHBOUR_SLOTS).await.unwrap();
    Neighbour { span: granted.grant.span(granted.grant.holder(NODE).unwrap()), bytes }
}

async fn whole(raw: &RawWriter, record: &RegionRecord, neighbours: &[Neighbour]) {
    for neighbour in neighbours {
        let now = raw.read(record, neighbour.span.start, neighbour.bytes.len()).await.unwrap();
        assert!(now == neighbour.bytes, "{:?}: a dead writer reached its neighbour", neighbour.span);
    }
}

/// Guards: a write region is the slab and no byte more (`datanode/src/claims`), lanes close by themselves at the end of their life (also where
/// claims would stay open beyond their TTL: that alone does not make this fail).
#[tokio::test]
async fn a_hundred_clients_killed_in_the_middle_of_their_writes_touch_no_neighbour_and_leave_nothing_behind() {
    let mut cluster = TestCluster::start_small(1, 1 << 30).await;
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 1, None).await;
    let mut raw = cluster.raw().await;
    let record = raw.record(RegionId { node: NODE, index: RegionIndex(0) }).await;
    let before = cluster.space().await;
    let process = cluster.pid(MEMBER).unwrap();
    let mut seed = Seed::draw();
    let mut neighbours = Vec::new();
    let (mut touching, mut killed, mut waves) = (0, 0, 0);
    while killed < rounds(WRITERS_KILLED) {
        waves += 1;
        assert!(waves <= 3 * rounds(WRITERS_KILLED) / WRITERS_PER_WAVE, "only {killed} were in the middle of a write");
        let mut starting = JoinSet::new();
        for _ in 0..WRITERS_PER_WAVE {
            let file = cluster.cluster_file();
            starting.spawn(async move { Victim::start(env!("CARGO_BIN_EXE_raw-writer"), &file).await });
        }
        // One after the other, each between two neighbours.
        let (mut victims, mut next_to) = (Vec::new(), vec![granted(&raw, &blocks).await]);
        let mut bases = Vec::new();
        for mut victim in starting.join_all().await {
            let held = victim.grant(blocks.info().id, SLOT / 4, 4, WAVE_TTL).await;
            bases.push(held["holders"][0]["base"].as_u64().unwrap());
            victims.push(victim);
            next_to.push(granted(&raw, &blocks).await);
        }
        for granted in &next_to {
            neighbours.push(neighbour(&mut raw, granted, &mut seed).await);
        }
        let is_next = |base: u64, it: &Neighbour| it.span.end == base || it.span.start == base + u64::from(SLOT);
        touching += bases.iter().filter(|base| neighbours.iter().any(|it| is_next(**base, it))).count();
        // All at once, since the time of the first runs out while the last one is armed.
        let arming = victims.into_iter().map(|mut victim| async move {
            victim.arm_granted().await;
            victim
        });
        let mut victims = arming.collect::<JoinSet<Victim>>().join_all().await;
        cluster.pause(MEMBER).await.unwrap();
        for victim in &mut victims {
            victim.begin_write(NODE.0, 0xee).await;
        }
        let late = Instant::now() + LATE;
        for victim in &mut victims {
            let full = soon("the write fills the sockets' buffers, or came too late", async || {
                let full = victim.unacknowledged_bytes() > FULL;
                (full || Instant::now() > late).then_some(full)
            })
            .await;
            killed += usize::from(full);
        }
        // Half of them die with their bytes in the sockets; the others somewhere in the middle of what lands.
        for victim in victims.split_off(WRITERS_PER_WAVE / 2) {
            victim.kill().await;
        }
        cluster.resume(MEMBER).await.unwrap();
        for mut victim in victims {
            let moment = Duration::from_micros(seed.below(3_000) as u64);
            let _finished_before = timeout(moment, victim.answer("written")).await;
            victim.kill().await;
        }
        whole(&raw, &record, &neighbours).await;
    }
    assert!(touching >= killed / 2, "only {touching} of {killed} had a neighbour");
    // The node is the same process, and holds no lane, claim or byte of theirs.
    let after = at_rest(&cluster).await;
    let held = neighbours.iter().map(|it| it.bytes.len() as u64).sum::<u64>();
    assert_eq!((after.committed, after.free + held), (held, before.free), "{before:?} {after:?}");
    let address = cluster.address(MEMBER);
    soon("no lane and no claim is left", async || {
        let status = calls::node_status(&address).await.ok()?;
        ((status.lanes, status.claims_open) == (0, 0)).then_some(())
    })
    .await;
    assert_eq!((cluster.pid(MEMBER), cluster.ended().unwrap().len()), (Some(process), 0));
    whole(&raw, &record, &neighbours).await;
    blocks.put("after", "all is well").await.unwrap();
    assert_eq!(&blocks.get("after").await.unwrap().unwrap().bytes[..], b"all is well");
}
