//! Who wakes for a completion: the task that spins for it, or the poller for a task that sleeps, never both, and never only because
//! time has passed. In a process of its own, one test after the other, since all endpoints of a process share one poller.

use parking_lot::Mutex;
use quarry_fabric::{
    Access, Endpoint, EndpointConfig, FabricAddress, LocalSpan, Memory, Peer, Provider, Registration, RemoteSpan, Wait,
    without_our_descriptors,
};
use std::{
    future::poll_fn,
    io::{BufRead, BufReader},
    net::{IpAddr, Ipv4Addr},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Wake, Waker},
    time::Duration,
};
use tokio::time::Instant;

/// One at a time.
static ALONE: Mutex<()> = Mutex::new(());
const ROUNDS: u64 = 2000;
const MIB: usize = 1 << 20;

/// A peer in another process, what it lends, and an endpoint here that is connected to it.
struct Cable {
    peer: Child,
    there: RemoteSpan,
    client: Endpoint,
    target: Peer,
    local: Arc<Registration>,
}

impl Cable {
    /// With `bytes` on both ends.
    fn new(bytes: usize, spin: Duration) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fabric-peer"));
        command.arg(bytes.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut peer = without_our_descriptors(&mut command).spawn().expect("a peer");
        let mut ready = String::new();
        BufReader::new(peer.stdout.take().expect("set-up")).read_line(&mut ready).expect("set-up");
        let words: Vec<&str> = ready.split_whitespace().collect();
        let ["ready", address, base, read_key, _] = words.as_slice() else { panic!("{ready}") };
        let there = RemoteSpan {
            address: base.parse().expect("set-up"),
            key: read_key.parse().expect("set-up"),
            len: bytes as u64,
        };
        let provider = Provider::detect().expect("set-up");
        let bind = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let client = Endpoint::open(EndpointConfig { provider, bind, port: None, spin }).expect("set-up");
        let target = client
            .connect(&FabricAddress::from_bytes(&hex::decode(address).expect("set-up")).expect("set-up"))
            .expect("set-up");
        let memory = Memory::allocate(bytes).expect("set-up");
        let local = Arc::new(client.register(&memory, 0..bytes, Access::Local, None).expect("set-up"));
        Self { peer, there, client, target, local }
    }

    fn end(mut self) {
        drop(self.peer.stdin.take());
        self.peer.wait().expect("set-up");
    }
}

#[test]
fn the_poller_does_not_look_while_a_task_spins() {
    let _alone = ALONE.lock();
    // Longer than any read takes, also on a busy machine.
    let cable = Cable::new(4096, Duration::from_secs(30));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let looks = |spins| {
        runtime.block_on(async {
            let deadline = Instant::now() + Duration::from_secs(60);
            let wait = if spins { Wait::spinning_until(deadline) } else { Wait::until(deadline) };
            let span = LocalSpan::new(&cable.local, 0..4096).unwrap();
            cable.client.read(&cable.target, span.clone(), cable.there, wait).await.unwrap();
            let before = cable.client.times_polled();
            for _ in 0..ROUNDS {
                cable.client.read(&cable.target, span.clone(), cable.there, wait).await.unwrap();
            }
            cable.client.times_polled() - before
        })
    };
    // It looks at all endpoints ten times per second in any case.
    let spinning = looks(true);
    assert!(spinning < ROUNDS / 4, "{spinning} looks for {ROUNDS} operations that were spun for");
    // On a busy machine whole rounds are over before anybody can sleep: then there is another try.
    let slept = (0..10).find_map(|_| {
        let sleeping = looks(false);
        assert!(
            sleeping < ROUNDS * 8,
            "{sleeping} looks for {ROUNDS} operations: it does not sleep while they are under way"
        );
        (sleeping > ROUNDS / 4).then_some(())
    });
    assert!(slept.is_some(), "ten times fewer than {} looks for {ROUNDS} operations that were slept for", ROUNDS / 4);
    cable.end();
}

/// Holds up the thread that calls it, once: whoever sends to it gets far ahead meanwhile.
struct HoldUp {
    waker: Waker,
    held: AtomicBool,
}

impl Wake for HoldUp {
    fn wake(self: Arc<Self>) {
        if !self.held.swap(true, Ordering::Relaxed) {
            std::thread::park_timeout(Duration::from_millis(200));
        }
        self.waker.wake_by_ref();
    }
}

/// Once the socket's buffer is full nothing more arrives, so nothing new is told, while much is left to read.
#[test]
fn large_reads_of_a_reader_that_fell_behind_do_not_wait_for_the_clock() {
    const TOGETHER: usize = 32;
    const TIMES: u64 = 4;
    let _alone = ALONE.lock();
    let cable = Cable::new(TOGETHER * MIB, EndpointConfig::SPIN);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let deadline = Instant::now() + Duration::from_secs(60);
        for _ in 0..TIMES {
            let reads = (0..TOGETHER).map(|at| {
                let span = LocalSpan::new(&cable.local, at * MIB..(at + 1) * MIB).expect("within");
                let there =
                    RemoteSpan { address: cable.there.address + (at * MIB) as u64, len: MIB as u64, ..cable.there };
                cable.client.read(&cable.target, span, there, Wait::until(deadline))
            });
            let mut all = std::pin::pin!(futures::future::join_all(reads));
            let mut hold_up = None;
            let outcomes = poll_fn(|context| {
                let hold_up = hold_up.get_or_insert_with(|| {
                    Waker::from(Arc::new(HoldUp { waker: context.waker().clone(), held: AtomicBool::new(false) }))
                });
                all.as_mut().poll(&mut Context::from_waker(hold_up))
            });
            for outcome in outcomes.await {
                outcome.expect("read");
            }
        }
    });
    let (late, all) = (cable.client.found_by_clock(), TIMES * TOGETHER as u64);
    assert!(late < all / 4, "{late} of {all} operations were found by the clock alone");
    cable.end();
}
