//! A reader that takes one order per line and answers each, and stops itself (SIGSTOP) in the middle of a get: the victim of the suite `abuse`.
//!
//! A get looks at its clock before every step that depends on its lease. So the reader's clock counts the looks, and stops the process right
//! after the one that it was told, with the time of before.

use quarry_client::{Buffers, Client, Clock, Cluster, Key, Namespace, Options, SystemClock};
use serde_json::{Value, json};
use std::{
    io::{BufRead as _, Write as _},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// A stopped get must fail by its lease, not by a deadline of its own.
const LONG: Duration = Duration::from_secs(300);
/// Registered memory that values are read straight into.
const BUFFERS_BYTES: usize = 16 << 20;
/// The process is stopped well before this has passed, and continued well after.
const STOPPED_WITHIN: Duration = Duration::from_millis(500);

/// Stops this process at one of the looks at it.
#[derive(Debug, Default)]
struct StoppingClock {
    looks: AtomicU64,
    /// At which look; zero: at none.
    stop_at: AtomicU64,
}

impl Clock for StoppingClock {
    fn wall_ms(&self) -> u64 {
        SystemClock.wall_ms()
    }
    fn boot(&self) -> Duration {
        let now = SystemClock.boot();
        if self.looks.fetch_add(1, Ordering::SeqCst) + 1 == self.stop_at.load(Ordering::SeqCst) {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP)
                .expect("a process may stop itself");
            // The signal may come to another thread first: this one goes no further until it has been stopped.
            while SystemClock.boot() < now + STOPPED_WITHIN {
                std::hint::spin_loop();
            }
        }
        now
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    // The test's process group may be gone when this one wakes up again: its end ends this one too.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .expect("a process may wish to die with its parent");
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().expect("the cluster file is the first argument");
    let clock = Arc::new(StoppingClock::default());
    let seam: Arc<dyn Clock> = Arc::clone(&clock) as Arc<dyn Clock>;
    let options = Options { timeout: LONG, attempt_timeout: LONG, clock: seam, ..Options::default() };
    let cluster = Cluster::from_file(Path::new(&file)).expect("the cluster file is a cluster file");
    let client = Client::connect(cluster, options).await.expect("the cluster answers");
    let buffers = client.buffers(BUFFERS_BYTES).expect("memory can be registered");
    say(&json!({"said": "ready"}));
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("orders can be read");
        let order: Value = serde_json::from_str(&line).expect("orders are JSON");
        let name = order["namespace"].as_str().expect("it names a namespace");
        let blocks = client.namespace(name).await.expect("the namespace is there");
        let blocks = if order["fresh"] == true { blocks.fresh() } else { blocks };
        let keys = order["keys"].as_array().expect("it names keys");
        let keys: Vec<Key> =
            keys.iter().map(|key| Key::new(key.as_str().expect("keys are text")).expect("a key")).collect();
        say(&json!({"said": "reading"}));
        clock.looks.store(0, Ordering::SeqCst);
        clock.stop_at.store(order["stop_at"].as_u64().expect("it says where to stop"), Ordering::SeqCst);
        let values = get(&blocks, &buffers, order["api"].as_str().expect("it says how"), &keys).await;
        clock.stop_at.store(0, Ordering::SeqCst);
        let looks = clock.looks.load(Ordering::SeqCst);
        say(&json!({"said": "got", "looks": looks, "values": values, "damaged": client.stats().damaged_copies}));
    }
}

/// Gets all keys, and answers of each what a test needs to know its value by: length and CRC of the bytes.
async fn get(blocks: &Namespace, buffers: &Buffers, api: &str, keys: &[Key]) -> Vec<Value> {
    let told = |bytes: &[u8]| json!({"bytes": bytes.len(), "crc": crc32c::crc32c(bytes)});
    if api == "into" {
        let mut items = Vec::new();
        for key in keys {
            let buffer = buffers.take(BUFFERS_BYTES / keys.len()).await.expect("there is room for all keys");
            items.push((key.clone(), buffer));
        }
        let results = blocks.get_into_many(items).await.into_iter().map(|(mut buffer, result)| match result {
            Ok(Some(got)) => told(&buffer.bytes()[..got.len]),
            Ok(None) => Value::Null,
            Err(wrong) => json!({"error": wrong.to_string()}),
        });
        return results.collect();
    }
    let results = match api {
        "single" => {
            let mut results = Vec::new();
            for key in keys {
                results.push(blocks.get(key).await);
            }
            results
        }
        "batch" => blocks.get_many(keys).await,
        other => panic!("unknown way to read {other:?}"),
    };
    let results = results.into_iter().map(|result| match result {
        Ok(Some(value)) => told(&value.bytes),
        Ok(None) => Value::Null,
        Err(wrong) => json!({"error": wrong.to_string()}),
    });
    results.collect()
}

fn say(what: &Value) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{what}").and_then(|()| out.flush()).expect("the test listens");
}
