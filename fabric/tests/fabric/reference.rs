//! The raw client that benches compare with does what it says.

use crate::support::{KIB, MIB, Target, config, fresh_key, pattern};
use quarry_fabric::{
    FabricError, OperationError, RemoteSpan,
    reference::{Load, RawClient, Way},
};
use std::{net::Ipv4Addr, time::Duration};

const TIME: Duration = Duration::from_millis(20);

fn client(target: &Target, bytes: usize) -> RawClient {
    RawClient::open(&config().provider, Ipv4Addr::LOCALHOST.into(), &target.endpoint.address(), bytes).unwrap()
}

#[test]
fn a_raw_run_moves_the_bytes_that_it_counts() {
    let target = Target::new(MIB);
    let mut raw = client(&target, MIB);
    let bytes = pattern(3, MIB);
    raw.memory().copy_in(0, &bytes).unwrap();
    for depth in [1, 16] {
        let there = target.writable.remote_span(0..MIB).unwrap();
        let run = raw.run(there, Load { way: Way::Write, bytes: 64 * KIB, depth, time: TIME }).unwrap();
        assert_eq!(run.bytes, run.latencies.len() as u64 * 64 * KIB as u64);
        assert!(run.latencies.is_sorted() && run.latencies.len() >= depth);
        assert!(run.quantile(0.5) <= run.quantile(1.0) && run.quantile(1.0) <= run.elapsed);
        assert!(run.gib_per_second() > 0.0);
    }
    if target.bytes() != bytes {
        // A short run on a slow machine has not been at every place.
        assert_eq!(target.memory.copy_to_vec(0, 64 * KIB).unwrap(), bytes[..64 * KIB]);
    }
    let back = pattern(4, MIB);
    target.memory.copy_in(0, &back).unwrap();
    let there = target.readable.remote_span(0..MIB).unwrap();
    raw.run(there, Load { way: Way::Read, bytes: MIB, depth: 1, time: TIME }).unwrap();
    assert!(raw.memory().copy_to_vec(0, MIB).unwrap() == back);
}

#[test]
fn a_raw_run_that_the_target_refuses_fails_and_ends_its_client() {
    let target = Target::new(64 * KIB);
    let mut raw = client(&target, 64 * KIB);
    let load = Load { way: Way::Write, bytes: 4 * KIB, depth: 4, time: TIME };
    let there = target.writable.remote_span(0..64 * KIB).unwrap();
    let small = RemoteSpan { len: 8 * KIB as u64, ..there };
    let refusal = raw.run(small, load).unwrap_err();
    assert!(matches!(refusal, OperationError::Invalid(FabricError::OutOfRange { .. })), "{refusal:?}");

    let mut raw = client(&target, 64 * KIB);
    let refusal = raw.run(RemoteSpan { key: fresh_key(), ..there }, load).unwrap_err();
    assert!(matches!(refusal, OperationError::Failed { .. }), "{refusal:?}");
    assert_eq!(raw.run(there, load), Err(OperationError::Closed));
    assert_eq!(target.bytes(), vec![0; 64 * KIB]);
}
