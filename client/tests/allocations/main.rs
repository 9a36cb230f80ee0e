//! Allocations of a client in steady state, counted over its whole process: the cluster is a double in a process of its own.

#![expect(clippy::unwrap_used, reason = "tests may fail by panicking, helpers of tests too")]
#![expect(clippy::print_stdout, reason = "one process tells the other where it is, and figures are for people")]

#[path = "../client/double.rs"]
#[expect(dead_code, reason = "most of the double's faults are for the other suite")]
mod double;

use double::Double;
use quarry_client::{Buffer, Client, Cluster, Key, Namespace, NamespaceSpec, Options, PutItem, PutMode};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use std::{
    alloc::System,
    io::{BufRead as _, BufReader, Lines, Read as _},
    process::{Child, ChildStdout, Command, Stdio},
};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const BLOCK_BYTES: usize = 4096;
/// Rounds that are counted, after as many that are not.
const ROUNDS: usize = 50;
/// What a call may allocate whatever the number of its blocks.
const PER_CALL_MAX: f64 = 48.0;

/// Not a test: what the other process runs, until its standard input ends.
#[test]
#[ignore = "started by the tests of this suite"]
fn serve_a_double() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let double = runtime.block_on(Double::start(1));
    println!("\ncluster {}", double.cluster());
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// The process of a double; it ends when its standard input does, so with this one.
struct Other {
    child: Child,
    /// Kept open, or what it says at its end would be an error.
    _says: Lines<BufReader<ChildStdout>>,
}

impl Other {
    fn start() -> (Self, Cluster) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "serve_a_double", "--ignored", "--nocapture"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut says = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut lines = says.by_ref().map_while(Result::ok);
        let cluster = lines.find_map(|line| line.strip_prefix("cluster ")?.parse().ok());
        (Self { child, _says: says }, cluster.expect("a double says where it is"))
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().unwrap();
    }
}

async fn namespace(cluster: Cluster) -> (Client, Namespace) {
    let client = Client::connect(cluster, Options::default()).await.unwrap();
    let spec = NamespaceSpec { copies: 1, ..NamespaceSpec::cache("kv") };
    let blocks = client.create_namespace(spec).await.unwrap();
    (client, blocks)
}

/// Allocations of the middle one of many rounds, once everything that is kept is there. Others renew leases meanwhile.
async fn allocations(mut round: impl AsyncFnMut()) -> f64 {
    let mut counts = Vec::with_capacity(2 * ROUNDS);
    for _ in 0..2 * ROUNDS {
        let region = Region::new(ALLOCATOR);
        round().await;
        let counted = region.change();
        counts.push(u32::try_from(counted.allocations + counted.reallocations).unwrap());
    }
    let counts = &mut counts[ROUNDS..];
    counts.sort_unstable();
    f64::from(counts[ROUNDS / 2])
}

/// Checks what a call allocates for each of its blocks, and besides.
fn assert_allocations(what: &str, of_100: f64, of_200: f64, per_block_max: f64) {
    let per_block = (of_200 - of_100) / 100.0;
    let per_call = of_100 - 100.0 * per_block;
    println!("{what}: {per_block:.3} allocations per block, {per_call:.1} per call");
    assert!(per_block <= per_block_max + 0.02, "{what}: {per_block} allocations per block");
    assert!(per_call <= PER_CALL_MAX, "{what}: {per_call} allocations per call");
}

/// Checks what a call that writes 100 blocks allocates, its commit included.
fn assert_writing_allocations(what: &str, of_100: f64) {
    println!("{what}: {of_100} allocations for 100 blocks");
    assert!(of_100 <= 100.0, "{what}: {of_100} allocations for 100 blocks");
}

// One test, since all that this process allocates is counted.
#[tokio::test(flavor = "multi_thread")]
async fn a_block_costs_one_allocation_at_most_and_none_if_read_into_a_buffer() {
    let (_other, cluster) = Other::start();
    let (client, blocks) = namespace(cluster).await;
    let keys: Vec<Key> = (0..200).map(|number| Key::new(format!("{{tag}}block-{number}")).unwrap()).collect();
    let items = keys.iter().map(|key| PutItem::create(key.clone(), vec![7; BLOCK_BYTES])).collect();
    assert!(blocks.put_many(items).await.iter().all(Result::is_ok));

    let get_many = async |count: usize| {
        allocations(async || {
            let values = blocks.get_many(&keys[..count]).await;
            assert!(values.iter().all(|value| value.as_ref().unwrap().as_ref().unwrap().bytes.len() == BLOCK_BYTES));
        })
        .await
    };
    let (of_100, of_200) = (get_many(100).await, get_many(200).await);
    assert_allocations("get_many", of_100, of_200, 1.0);

    let buffers = client.buffers(200 * BLOCK_BYTES).unwrap();
    let get_into_many = async |count: usize| {
        let mut items: Vec<(Key, Buffer)> = Vec::new();
        for key in &keys[..count] {
            items.push((key.clone(), buffers.take(BLOCK_BYTES).await.unwrap()));
        }
        let mut held = Some(items);
        allocations(async || {
            let results = blocks.get_into_many(held.take().unwrap()).await;
            let back = results.into_iter().zip(&keys).map(|((buffer, result), key)| {
                assert_eq!(result.unwrap().unwrap().len, BLOCK_BYTES);
                (key.clone(), buffer)
            });
            held = Some(back.collect());
        })
        .await
    };
    let (of_100, of_200) = (get_into_many(100).await, get_into_many(200).await);
    assert_allocations("get_into_many", of_100, of_200, 0.0);

    let mut written = 0;
    let mut fresh_keys = || {
        written += 1;
        (0..100).map(|number| Key::new(format!("{{tag}}put-{written}-{number}")).unwrap()).collect::<Vec<Key>>()
    };
    let payload = bytes::Bytes::from(vec![7; BLOCK_BYTES]);
    // Keys and items are the caller's: made here, they are not counted.
    let mut batches: Vec<Vec<PutItem>> = (0..2 * ROUNDS)
        .map(|_| fresh_keys().into_iter().map(|key| PutItem::create(key, payload.clone())).collect())
        .collect();
    let of_100 = allocations(async || {
        let results = blocks.put_many(batches.pop().unwrap()).await;
        assert!(results.iter().all(Result::is_ok));
    });
    assert_writing_allocations("put_many", of_100.await);
    let mut batches: Vec<Vec<(Key, usize)>> =
        (0..2 * ROUNDS).map(|_| fresh_keys().into_iter().map(|key| (key, BLOCK_BYTES)).collect()).collect();
    let of_100 = allocations(async || {
        let mut frames = blocks.reserve_many(&batches.pop().unwrap()).await.unwrap();
        for index in 0..frames.len() {
            frames.payload_mut(index).fill(7);
        }
        let results = frames.put(PutMode::Create).await;
        assert!(results.iter().all(Result::is_ok));
    });
    assert_writing_allocations("reserve_many", of_100.await);
    client.close().await.unwrap();
}
