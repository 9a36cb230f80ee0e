//! Read keys that change while everybody reads (*Epochs only grow*, *No wrong value*).

use quarry_client::{Buffers, Client, Namespace, PutItem};
use quarry_tests::{Seed, TestCluster, cluster::create_namespace, rounds::rounds, seed::pattern, soon};
use quarry_wire::{
    ids::{NodeId, RegionEpoch, RegionId, RegionIndex},
    key::Key,
};
use std::{
    path::Path,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};
use tokio::{process::Command, task::JoinHandle};

const ROTATIONS: usize = 20;
const VALUES: usize = 100;
const BYTES: usize = 8_000;
/// Rounds that every reader does after each rotation, and values in each.
const GETS: usize = 1;
const WIDTH: usize = 8;

fn key(index: usize) -> Key {
    Key::new(format!("key-{index}")).unwrap()
}

#[derive(Clone, Copy, Debug)]
enum Way {
    Get,
    GetMany,
    GetInto,
    GetIntoMany,
}

/// Somebody who reads values one way, again and again. Not one get may fail.
struct Reader {
    rounds: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Reader {
    fn start(client: &Client, blocks: Namespace, way: Way, values: &Arc<Vec<Vec<u8>>>) -> Self {
        let (rounds, stop): (Arc<AtomicUsize>, Arc<AtomicBool>) = Default::default();
        let (count, end) = (Arc::clone(&rounds), Arc::clone(&stop));
        let (buffers, values) = (client.buffers(4 << 20).unwrap(), Arc::clone(values));
        let task = tokio::spawn(async move {
            let mut seed = Seed::draw();
            while !end.load(Ordering::Relaxed) {
                let indexes: Vec<usize> = (0..WIDTH).map(|_| seed.below(VALUES)).collect();
                read(&blocks, &buffers, way, &indexes, &values).await;
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { rounds, stop, task }
    }

    async fn more(&self, rounds: usize) {
        let from = self.rounds.load(Ordering::Relaxed);
        soon("the reader goes on", async || {
            assert!(!self.task.is_finished(), "a reader has ended");
            // The first of them may have begun before.
            (self.rounds.load(Ordering::Relaxed) > from + rounds).then_some(())
        })
        .await;
    }

    async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap();
    }
}

async fn read(blocks: &Namespace, buffers: &Buffers, way: Way, indexes: &[usize], values: &[Vec<u8>]) {
    let right = |index: usize, bytes: &[u8]| assert!(bytes == values[index], "key-{index} is changed");
    match way {
        Way::Get => {
            for index in indexes {
                let value = blocks.get(key(*index).as_bytes()).await;
                right(*index, &value.unwrap_or_else(|wrong| panic!("get of key-{index}: {wrong}")).unwrap().bytes);
            }
        }
        Way::GetMany => {
            let keys: Vec<Key> = indexes.iter().map(|index| key(*index)).collect();
            for (index, value) in indexes.iter().zip(blocks.get_many(&keys).await) {
                right(*index, &value.unwrap_or_else(|wrong| panic!("get_many of key-{index}: {wrong}")).unwrap().bytes);
            }
        }
        Way::GetInto => {
            for index in indexes {
                let buffer = buffers.take(BYTES).await.unwrap();
                let (mut buffer, got) = blocks.get_into(key(*index).as_bytes(), buffer).await;
                let got = got.unwrap_or_else(|wrong| panic!("get_into of key-{index}: {wrong}")).unwrap();
                right(*index, &buffer.bytes()[..got.len]);
            }
        }
        Way::GetIntoMany => {
            let mut items = Vec::new();
            for index in indexes {
                items.push((key(*index), buffers.take(BYTES).await.unwrap()));
            }
            for (index, (mut buffer, got)) in indexes.iter().zip(blocks.get_into_many(items).await) {
                let got = got.unwrap_or_else(|wrong| panic!("get_into_many of key-{index}: {wrong}")).unwrap();
                right(*index, &buffer.bytes()[..got.len]);
            }
        }
    }
}

/// `raft-admin` with these words; what it printed.
async fn raft_admin(cluster: &Path, words: &[&str]) -> serde_json::Value {
    let tool = quarry::local::built_binary().unwrap().with_file_name("raft-admin");
    let mut command = Command::new(tool);
    command.args(words).args(["-o", "json", "--timeout", "20s", "--cluster"]).arg(cluster);
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await.unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Guards: the reader of an epoch is closed before the record of the next one is signed (`datanode/src/holdings.rs::rotate`), and a reader that was
/// refused looks for the new key (`client/src/read/records.rs`).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_rotations_under_read_load_cost_no_get_and_no_old_key_reads_once_the_command_has_returned() {
    let cluster = TestCluster::start_small(2, 128 << 20).await;
    let client = cluster.client().await;
    let (lone, pairs) = (create_namespace(&client, 1, None).await, create_namespace(&client, 2, None).await);
    let values: Arc<Vec<Vec<u8>>> = Arc::new((0..VALUES).map(|index| pattern(index as u64, BYTES)).collect());
    for blocks in [&lone, &pairs] {
        let items = (0..VALUES).map(|index| PutItem::create(key(index), values[index].clone())).collect();
        for result in blocks.put_many(items).await {
            result.unwrap();
        }
    }
    let others = [cluster.client().await, cluster.client().await];
    let theirs = others[0].namespace(&lone.info().name).await.unwrap();
    let readers = [
        // Of values of one copy, so that there is no other to go to.
        Reader::start(&client, lone.clone(), Way::Get, &values),
        Reader::start(&client, lone.clone(), Way::GetIntoMany, &values),
        Reader::start(&others[0], theirs.clone(), Way::GetMany, &values),
        Reader::start(&others[0], theirs.fresh(), Way::GetInto, &values),
        Reader::start(&others[1], others[1].namespace(&pairs.info().name).await.unwrap(), Way::GetMany, &values),
    ];
    for reader in &readers {
        reader.more(GETS).await;
    }
    let mut epochs = [1, 1];
    for round in 0..rounds(ROTATIONS) {
        let node = NodeId(101 + (round % 2) as u64);
        let region = RegionId { node, index: RegionIndex(0) };
        // Another each time: an endpoint that served its own reads keeps the thread busy that serves all of this process.
        let raw = cluster.raw().await;
        let old = raw.record(region).await;
        assert_eq!(raw.read(&old, 0, 4096).await.unwrap().len(), 4096);
        let said =
            raft_admin(&cluster.cluster_file(), &["region", "rotate", &node.0.to_string(), "--why", "abuse"]).await;
        // The very next thing that anybody does with the old key.
        let late = raw.read(&old, 0, 4096).await;
        assert!(late.is_err(), "round {round}: the key of epoch {} still reads", old.epoch);
        epochs[round % 2] += 1;
        assert_eq!(said["regions"][0]["epoch"], epochs[round % 2]);
        let new = raw.record(region).await;
        assert_eq!((new.incarnation, new.epoch), (old.incarnation, RegionEpoch(old.epoch.0 + 1)));
        assert!(new.read_key != old.read_key);
        for reader in &readers {
            reader.more(GETS).await;
        }
    }
    let listed = raft_admin(&cluster.cluster_file(), &["region", "list"]).await;
    let listed: Vec<u64> = (0..2).map(|row| listed["regions"][row]["epoch"].as_u64().unwrap()).collect();
    assert_eq!(listed, epochs);
    for reader in readers {
        reader.end().await;
    }
    // Nothing is lost by it, and everything is written and read as before.
    let version = lone.put("after", pattern(7, BYTES)).await.unwrap();
    let value = theirs.get("after").await.unwrap().unwrap();
    assert!(value.version == version && value.bytes == pattern(7, BYTES));
    for client in others.into_iter().chain([client]) {
        assert_eq!(client.stats().damaged_copies, 0);
        client.close().await.unwrap();
    }
}
