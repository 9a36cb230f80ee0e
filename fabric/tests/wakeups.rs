//! Who wakes for a completion: the task that spins for it, or the poller for a task that sleeps, never both. In a process of its
//! own, since all endpoints of a process share one poller.

use quarry_fabric::{
    Access, Endpoint, EndpointConfig, FabricAddress, LocalSpan, Memory, Provider, RemoteSpan, Wait,
    without_our_descriptors,
};
use std::{
    io::{BufRead, BufReader},
    net::{IpAddr, Ipv4Addr},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};
use tokio::time::Instant;

const ROUNDS: u64 = 2000;

#[test]
fn the_poller_does_not_look_while_a_task_spins() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fabric-peer"));
    command.arg("4096").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut peer = without_our_descriptors(&mut command).spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(peer.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    let words: Vec<&str> = ready.split_whitespace().collect();
    let ["ready", address, base, read_key, _] = words.as_slice() else { panic!("{ready}") };
    let there = RemoteSpan { address: base.parse().unwrap(), key: read_key.parse().unwrap(), len: 4096 };

    let provider = Provider::detect().unwrap();
    let bind = IpAddr::V4(Ipv4Addr::LOCALHOST);
    // Longer than any read takes, also on a busy machine.
    let spin = Duration::from_secs(30);
    let client = Endpoint::open(EndpointConfig { provider, bind, port: None, spin }).unwrap();
    let target = client.connect(&FabricAddress::from_bytes(&hex::decode(address).unwrap()).unwrap()).unwrap();
    let memory = Memory::allocate(4096).unwrap();
    let local = Arc::new(client.register(&memory, 0..4096, Access::Local, None).unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let looks = |spins| {
        runtime.block_on(async {
            let deadline = Instant::now() + Duration::from_secs(60);
            let wait = if spins { Wait::spinning_until(deadline) } else { Wait::until(deadline) };
            let span = LocalSpan::new(&local, 0..4096).unwrap();
            client.read(&target, span.clone(), there, wait).await.unwrap();
            let before = client.times_polled();
            for _ in 0..ROUNDS {
                client.read(&target, span.clone(), there, wait).await.unwrap();
            }
            client.times_polled() - before
        })
    };
    let (spinning, sleeping) = (looks(true), looks(false));
    // It looks at all endpoints ten times per second in any case.
    assert!(spinning < ROUNDS / 4, "{spinning} looks for {ROUNDS} operations that were spun for");
    assert!(
        sleeping < ROUNDS * 8,
        "{sleeping} looks for {ROUNDS} operations: it does not sleep while they are under way"
    );
    assert!(sleeping > ROUNDS / 4, "only {sleeping} looks for {ROUNDS} operations that were slept for");
    drop(peer.stdin.take());
    peer.wait().unwrap();
}
