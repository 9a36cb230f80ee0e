//! Two writers and a reader on one key (*Linearizable*, *No half-truth*).

use quarry_client::{Namespace, PutError, PutMode, Value};
use quarry_tests::{Seed, TestCluster, rounds::rounds, seed::pattern};
use quarry_wire::version::Version;
use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

const KEY: &str = "contested";
const ROUNDS: usize = 1_000;
/// In one round of so many both writers also replace what was created.
const REPLACED_EVERY: usize = 5;

/// What the key holds, as those who write it know.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Now {
    /// Something about it was sent and not answered yet.
    Moving,
    Absent,
    Present(Version),
}

/// Where the writers are. A reader that finds the same `step` before and after its read knows what it must have found.
#[derive(Clone, Copy, Debug)]
struct Board {
    round: usize,
    step: usize,
    now: Now,
}

#[derive(Clone, Debug)]
struct Shared(Arc<Mutex<Board>>);

impl Shared {
    fn look(&self) -> Board {
        *self.0.lock().unwrap()
    }
    fn turn(&self, round: usize, now: Now) {
        let mut board = self.0.lock().unwrap();
        *board = Board { round, step: board.step + 1, now };
    }
}

/// The value of one writer in one round: says who wrote it, and is whole or recognizably not.
fn payload(round: usize, writer: u8, part: u8) -> Vec<u8> {
    let round = u64::try_from(round).unwrap();
    let length = 64 + usize::try_from(round.wrapping_mul(7_919) % 9_000).unwrap();
    let mut bytes = round.to_le_bytes().to_vec();
    bytes.extend([writer, part]);
    bytes.extend(pattern(round << 8 | u64::from(writer) << 4 | u64::from(part), length));
    bytes
}

/// The round of a value, which must be exactly one that somebody wrote in that round.
fn round_of(value: &Value) -> usize {
    let head: [u8; 8] = value.bytes[..8].try_into().unwrap();
    let round = usize::try_from(u64::from_le_bytes(head)).unwrap();
    assert!(value.bytes == payload(round, value.bytes[8], value.bytes[9]), "round {round}: the value is not whole");
    round
}

/// Reads until told to stop, and answers the versions that it saw.
async fn poll(blocks: Namespace, board: Shared, stop: Arc<AtomicBool>) -> BTreeSet<Version> {
    let blocks = blocks.fresh();
    let mut seen = BTreeSet::new();
    let mut last: Option<Version> = None;
    while !stop.load(Ordering::Relaxed) {
        let before = board.look();
        // Whatever the shard says is there can be read: an error is as bad as a wrong value.
        let found = blocks.get(KEY).await.unwrap_or_else(|wrong| panic!("round {}: {wrong}", before.round));
        let after = board.look();
        if before.step == after.step {
            match (before.now, &found) {
                (Now::Absent, None) | (Now::Moving, _) => {}
                (Now::Present(version), Some(value)) if value.version == version => {}
                (now, found) => panic!("round {}: {now:?}, and a fresh get found {found:?}", before.round),
            }
        }
        let Some(value) = found else { continue };
        let round = round_of(&value);
        assert!((before.round..=after.round).contains(&round), "a value of round {round} in {before:?} to {after:?}");
        assert!(last.is_none_or(|last| last <= value.version), "{last:?}, then {}: versions went back", value.version);
        last = Some(value.version);
        seen.insert(value.version);
    }
    seen
}

/// Both write at the same time, the one or the other first.
async fn race(
    seed: &mut Seed,
    writers: &[Namespace; 2],
    round: usize,
    part: u8,
    mode: PutMode,
) -> [Result<Version, PutError>; 2] {
    let put = |writer: u8| {
        let blocks = writers[usize::from(writer)].clone();
        tokio::spawn(async move { blocks.put_with(KEY, payload(round, writer, part), mode).await })
    };
    if seed.below(2) == 0 {
        let (one, other) = (put(0), put(1));
        [one.await.unwrap(), other.await.unwrap()]
    } else {
        let (other, one) = (put(1), put(0));
        [one.await.unwrap(), other.await.unwrap()]
    }
}

/// Guard: the shard's `create` applies only to a key that is absent (`meta/state/src/shard/commits.rs`).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_writers_racing_to_create_a_key_one_wins_and_a_reader_sees_only_whole_values_that_never_go_back() {
    let cluster = TestCluster::start_small(2, 256 << 20).await;
    let (_one, blocks) = cluster.namespace().await;
    let other = cluster.client().await;
    let theirs = other.namespace(&blocks.info().name).await.unwrap();
    let watcher = cluster.client().await;
    let seen_by = watcher.namespace(&blocks.info().name).await.unwrap();
    let writers = [blocks, theirs];
    let board = Shared(Arc::new(Mutex::new(Board { round: 0, step: 0, now: Now::Absent })));
    let stop = Arc::new(AtomicBool::new(false));
    let reader = tokio::spawn(poll(seen_by.clone(), board.clone(), Arc::clone(&stop)));
    let mut seed = Seed::draw();
    let mut acknowledged = BTreeSet::new();
    let mut wins = [0, 0];
    let mut left = None;
    let count = rounds(ROUNDS);
    for round in 1..=count {
        board.turn(round, Now::Moving);
        let created = race(&mut seed, &writers, round, 0, PutMode::Create).await;
        let (winner, mut version) = match &created {
            [Ok(version), Err(PutError::Exists { current })] if current == version => (0, *version),
            [Err(PutError::Exists { current }), Ok(version)] if current == version => (1, *version),
            other => panic!("round {round}: {other:?}"),
        };
        wins[winner] += 1;
        acknowledged.insert(version);
        board.turn(round, Now::Present(version));
        if round % REPLACED_EVERY == 0 {
            board.turn(round, Now::Moving);
            let replaced = race(&mut seed, &writers, round, 1, PutMode::Replace).await;
            let both = replaced.map(|result| result.unwrap_or_else(|wrong| panic!("round {round}: {wrong}")));
            assert!(both.iter().all(|it| *it > version) && both[0] != both[1], "round {round}: {both:?}");
            version = both[0].max(both[1]);
            acknowledged.extend(both);
            board.turn(round, Now::Present(version));
        }
        // The last round's value stays.
        if round == count {
            left = Some(version);
            break;
        }
        let deleter = &writers[seed.below(2)];
        board.turn(round, Now::Moving);
        assert_eq!(deleter.delete(KEY).await.unwrap(), Some(version), "round {round}");
        board.turn(round, Now::Absent);
        assert!(!reader.is_finished(), "the reader met something impossible");
    }
    stop.store(true, Ordering::Relaxed);
    let seen = reader.await.unwrap();
    let never = seen.difference(&acknowledged).collect::<Vec<_>>();
    assert!(never.is_empty(), "seen, and never acknowledged: {never:?}");
    assert!(!seen.is_empty() && wins.iter().all(|wins| *wins > 0), "no race: {wins:?}, {} seen", seen.len());
    let value = seen_by.fresh().get(KEY).await.unwrap().unwrap();
    assert_eq!((round_of(&value), Some(value.version)), (count, left));
}
