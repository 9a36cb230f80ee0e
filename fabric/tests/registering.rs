//! Registering and closing registrations by many threads while operations are under way: libfabric 1.17 does not lock these calls of `net`
//! against each other, so we do. In a process of its own, which would crash without that.

use quarry_fabric::{Access, Endpoint, EndpointConfig, LocalSpan, Memory, OperationError, Provider};
use std::{
    net::{IpAddr, Ipv4Addr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::time::Instant;

const BYTES: usize = 4096;
const THREADS: u64 = 4;
const ROUNDS: u64 = 20_000;
/// Registrations that a thread holds at once.
const HELD: usize = 16;

fn open() -> Endpoint {
    let bind = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let provider = Provider::detect().expect("a provider");
    Endpoint::open(EndpointConfig { provider, bind, port: None, spin: Duration::ZERO }).expect("an endpoint")
}

#[test]
fn registrations_come_and_go_on_many_threads_while_peers_read() {
    let (target, client) = (open(), open());
    let memory = Memory::allocate(BYTES).expect("memory");
    memory.copy_in(0, &[7; BYTES]).expect("room");
    let lent = target.register(&memory, 0..BYTES, Access::RemoteRead, Some(u64::MAX)).expect("lent");
    let next = AtomicU64::new(1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let reads = std::thread::scope(|threads| {
        let workers: Vec<_> = (0..THREADS)
            .map(|_| {
                threads.spawn(|| {
                    let mut held = Vec::new();
                    for _ in 0..ROUNDS {
                        let key = Some(next.fetch_add(1, Ordering::Relaxed));
                        let registration = target.register(&memory, 0..BYTES, Access::RemoteRead, key);
                        held.push(registration.expect("a key that nobody has"));
                        if held.len() == HELD {
                            held.clear();
                        }
                    }
                })
            })
            .collect();
        runtime.block_on(async {
            let peer = client.connect(&target.address()).expect("a peer");
            let here = Memory::allocate(BYTES).expect("memory");
            let local = Arc::new(client.register(&here, 0..BYTES, Access::Local, None).expect("registered"));
            let mut reads = 0_u64;
            while !workers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
                let span = LocalSpan::new(&local, 0..BYTES).expect("within");
                let there = lent.remote_span(0..BYTES).expect("within");
                let outcome: Result<(), OperationError> =
                    client.read(&peer, span, there, Instant::now() + Duration::from_secs(60)).await;
                outcome.expect("a key that is lent all the time");
                reads += 1;
            }
            assert_eq!(here.copy_to_vec(0, BYTES).expect("within"), vec![7; BYTES]);
            reads
        })
    });
    assert!(reads > 0);
}
