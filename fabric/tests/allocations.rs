//! How often an operation allocates: once. In a process of its own, since it counts what all threads do.

#![expect(unsafe_code, reason = "an allocator that counts")]

use quarry_fabric::{
    Access, ClientEndpoint, Endpoint, EndpointConfig, LocalBuffer, Memory, Pieces, Pool, Provider, Wait,
};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    net::{IpAddr, Ipv4Addr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::time::Instant;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: the system's allocator does it; counting changes nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ROUNDS: u64 = 1000;

#[test]
fn an_operation_allocates_once_whether_it_spins_or_sleeps() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let config = |spin| EndpointConfig {
        provider: Provider::detect().unwrap(),
        bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
        port: None,
        spin,
    };
    let target = Endpoint::open(config(Duration::ZERO)).unwrap();
    let memory = Memory::allocate(64 << 10).unwrap();
    let lent = target.register(&memory, 0..64 << 10, Access::RemoteRead, Some(4711)).unwrap();
    let there = lent.remote_span(0..4096 + 96).unwrap();
    let client = ClientEndpoint::new(config(EndpointConfig::SPIN));
    let pool = Pool::new(64 << 10).unwrap();
    client.keep_pool(&pool);
    let address = target.address();
    for spins in [true, false] {
        let counted = runtime.block_on(async {
            let head = Arc::new(pool.take(96).await.unwrap());
            let payload = Arc::new(pool.take(4096).await.unwrap());
            let mut before = 0;
            for round in 0..2 * ROUNDS {
                // The first half connects and warms up.
                if round == ROUNDS {
                    before = ALLOCATIONS.load(Ordering::Relaxed);
                }
                let deadline = Instant::now() + Duration::from_secs(60);
                let wait = if spins { Wait::spinning_until(deadline) } else { Wait::until(deadline) };
                let pieces = Pieces::from([
                    LocalBuffer::of_span(&head, 0..96).unwrap(),
                    LocalBuffer::of_span(&payload, 0..4096).unwrap(),
                ]);
                client.read(&address, pieces, there, wait).await.unwrap();
            }
            ALLOCATIONS.load(Ordering::Relaxed) - before
        });
        assert!(counted >= ROUNDS, "the allocator counts");
        // The rest is for what the runtime and the poller do now and then.
        assert!(counted < ROUNDS + ROUNDS / 10, "{counted} allocations in {ROUNDS} operations, spinning: {spins}");
    }
}
