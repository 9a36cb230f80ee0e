//! The client against a cluster in one process: real calls, real one-sided operations, real signatures, and faults on purpose.

#![expect(clippy::unwrap_used, reason = "tests may fail by panicking, helpers of tests too")]

mod basics;
mod damage;
mod double;
mod endings;
mod faults;
mod into;
mod pins;
mod probes;
mod reserve;
mod rotations;

use double::Double;
use quarry_client::{Client, Namespace, NamespaceSpec, Options};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Waits until `condition` holds; panics after ten seconds.
async fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "not so within ten seconds: {what}");
        sleep(Duration::from_millis(2)).await;
    }
}

/// A double with so many data nodes, a client and a namespace of two copies.
async fn cluster(nodes: u64, options: Options) -> (Double, Client, Namespace) {
    let double = Double::start(nodes).await;
    let client = double.connect(options).await;
    let blocks = client.create_namespace(NamespaceSpec::cache("kv")).await.unwrap();
    (double, client, blocks)
}

/// Bytes that differ from place to place and from seed to seed.
fn content(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
