//! Peers that die, come back, or fall silent.

use crate::support::{Buffer, KIB, LONG, MIB, PeerProcess, config, open, pattern, soon, wait_until};
use quarry_fabric::{ClientEndpoint, LocalBuffer, Memory, OperationError};
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

#[tokio::test]
async fn operations_to_a_killed_peer_fail_and_those_to_its_successor_work() {
    let mut peer = PeerProcess::start(MIB, None);
    let client = open();
    let address = peer.address.clone();
    let known = client.connect(&address).unwrap();
    let buffer = Buffer::filled(&client, MIB, 4);
    client.write(&known, buffer.whole(), peer.writable(0..MIB), soon()).await.unwrap();
    peer.stop();
    let writes = (0..8).map(|_| {
        let (client, known, span, there) = (client.clone(), known.clone(), buffer.whole(), peer.writable(0..MIB));
        tokio::spawn(async move { client.write(&known, span, there, soon()).await })
    });
    let writes: Vec<_> = writes.collect();
    wait_until("all are in flight", || client.in_flight() == 8).await;
    let killed = Instant::now();
    peer.kill();
    for write in writes {
        let outcome = write.await.unwrap();
        assert!(matches!(outcome, Err(OperationError::Failed { .. })), "{outcome:?}");
    }
    assert!(killed.elapsed() < LONG / 2, "they failed by the kill, not by their deadline");
    assert!(!client.is_closed());
    assert_eq!(client.in_flight(), 0);

    // Down: nothing can be sent, and the operation says so, in time and without harm.
    let wait = Duration::from_millis(300);
    loop {
        let begun = Instant::now();
        let outcome = client.write(&known, buffer.whole(), peer.writable(0..MIB), begun + wait).await;
        match outcome {
            Err(OperationError::NotStarted) => {
                assert!(begun.elapsed() >= wait);
                break;
            }
            // The provider may report the broken connection once more.
            Err(OperationError::Failed { .. }) => assert!(killed.elapsed() < LONG),
            other => panic!("{other:?}"),
        }
    }
    assert!(!client.is_closed());

    // Back at the same address: the same `Peer` works, with the keys of the new process; the old keys are worth nothing.
    let mut next = PeerProcess::start(MIB, address.port());
    assert_eq!(next.address, address);
    client.write(&known, buffer.whole(), next.writable(0..MIB), soon()).await.unwrap();
    assert_eq!(next.ask(&format!("peek 0 {MIB}")), format!("4 {MIB}"));
    let stale = client.write(&known, buffer.span(0..64), peer.writable(0..64), soon()).await;
    assert!(matches!(stale, Err(OperationError::Failed { .. })), "{stale:?}");

    // And at another address.
    let third = PeerProcess::start(MIB, None);
    assert_ne!(third.address, address);
    let moved = client.connect(&third.address).unwrap();
    client.write(&moved, buffer.whole(), third.writable(0..MIB), soon()).await.unwrap();
}

#[tokio::test]
async fn a_silent_peer_costs_the_deadline_and_the_buffer_is_free_then() {
    let mut silent = PeerProcess::start(64 * MIB, None);
    let client = open();
    let peer = client.connect(&silent.address).unwrap();
    let buffer = Buffer::filled(&client, 64 * MIB, 1);
    client.write(&peer, buffer.span(0..64), silent.writable(0..64), soon()).await.unwrap();
    silent.stop();
    let guard = Arc::new(());
    let span = buffer.whole().guarded_by(guard.clone());
    let other = {
        let (client, peer, span, there) = (client.clone(), peer.clone(), buffer.span(0..64), silent.readable(0..64));
        tokio::spawn(async move { client.read(&peer, span, there, soon()).await })
    };
    wait_until("the other is in flight", || client.in_flight() == 1).await;
    let begun = Instant::now();
    let wait = Duration::from_millis(500);
    let outcome = client.write(&peer, span, silent.writable(0..64 * MIB), begun + wait).await;
    assert_eq!(outcome, Err(OperationError::Deadline));
    assert!(begun.elapsed() >= wait && begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
    assert!(client.is_closed());
    assert_eq!(other.await.unwrap(), Err(OperationError::Closed));
    assert_eq!(client.in_flight(), 0);
    assert_eq!(Arc::strong_count(&guard), 1, "nobody holds the buffer any more");
    // Whatever we put into the buffer now does not reach the peer.
    buffer.memory.copy_in(0, &vec![0xbb; 64 * MIB]).unwrap();
    silent.go_on();
    for offset in (0..64 * MIB).step_by(MIB) {
        assert!(!silent.ask(&format!("peek {offset} {MIB}")).starts_with("187 "), "at {offset}");
    }
}

#[tokio::test]
async fn a_client_endpoint_opens_again_after_a_deadline_closed_it() {
    let silent = PeerProcess::start(4 * KIB, None);
    let mut healthy = PeerProcess::start(4 * KIB, None);
    let client = ClientEndpoint::new(config());
    let memory = Memory::allocate(4 * KIB).unwrap();
    client.keep_registered(&memory);
    let local = || LocalBuffer::new(&memory, 0..4 * KIB);
    memory.copy_in(0, &[0x21; 4 * KIB]).unwrap();
    client.write(&silent.address, local(), silent.writable(0..4 * KIB), soon()).await.unwrap();
    silent.stop();
    let deadline = Instant::now() + Duration::from_millis(200);
    let outcome = client.write(&silent.address, local(), silent.writable(0..4 * KIB), deadline).await;
    assert_eq!(outcome, Err(OperationError::Deadline));
    client.write(&healthy.address, local(), healthy.writable(0..4 * KIB), soon()).await.unwrap();
    assert_eq!(healthy.ask("peek 0 4096"), "33 4096");
    assert_eq!(client.times_opened(), 2);
    // The silent one is not even connected now: nothing begins, nothing is closed.
    let deadline = Instant::now() + Duration::from_millis(200);
    let outcome = client.write(&silent.address, local(), silent.writable(0..4 * KIB), deadline).await;
    assert_eq!(outcome, Err(OperationError::NotStarted));
    silent.go_on();
    client.write(&silent.address, local(), silent.writable(0..4 * KIB), soon()).await.unwrap();
    assert_eq!(client.times_opened(), 2);
}

#[tokio::test]
async fn a_dropped_future_keeps_its_buffer_until_the_operation_completed() {
    let mut peer = PeerProcess::start(MIB, None);
    let client = open();
    let known = client.connect(&peer.address).unwrap();
    let buffer = Buffer::new(&client, MIB);
    let bytes = pattern(8, MIB);
    buffer.memory.copy_in(0, &bytes).unwrap();
    client.write(&known, buffer.span(0..64), peer.writable(0..64), soon()).await.unwrap();
    peer.stop();
    let guard = Arc::new(());
    let span = buffer.whole().guarded_by(guard.clone());
    let weak = Arc::downgrade(&buffer.memory);
    {
        let write = client.write(&known, span, peer.writable(0..MIB), soon());
        tokio::pin!(write);
        tokio::select! {
            biased;
            outcome = &mut write => panic!("a stopped peer took it: {outcome:?}"),
            () = wait_until("it is in flight", || client.in_flight() == 1) => {}
        }
    }
    drop(buffer);
    assert_eq!(client.in_flight(), 1, "dropping the future cancels nothing");
    assert_eq!(Arc::strong_count(&guard), 2);
    assert!(weak.upgrade().is_some());
    peer.go_on();
    wait_until("it completes", || Arc::strong_count(&guard) == 1 && client.in_flight() == 0).await;
    assert!(weak.upgrade().is_none(), "and only then the memory goes");
    let back = Buffer::new(&client, MIB);
    client.read(&known, back.whole(), peer.readable(0..MIB), soon()).await.unwrap();
    assert!(back.memory.copy_to_vec(0, MIB).unwrap() == bytes, "all of it had arrived");
    assert!(peer.ask("peek 0 1").ends_with(" 1"));
}

#[tokio::test]
async fn a_dropped_future_of_a_silent_peer_is_ended_at_its_deadline() {
    let peer = PeerProcess::start(MIB, None);
    let client = open();
    let known = client.connect(&peer.address).unwrap();
    let buffer = Buffer::new(&client, MIB);
    client.write(&known, buffer.span(0..64), peer.writable(0..64), soon()).await.unwrap();
    peer.stop();
    let guard = Arc::new(());
    {
        let deadline = Instant::now() + Duration::from_millis(300);
        let write = client.write(&known, buffer.whole().guarded_by(guard.clone()), peer.writable(0..MIB), deadline);
        tokio::pin!(write);
        tokio::select! {
            biased;
            outcome = &mut write => panic!("a stopped peer took it: {outcome:?}"),
            () = wait_until("it is in flight", || client.in_flight() == 1) => {}
        }
    }
    wait_until("its endpoint is closed for it", || client.is_closed()).await;
    wait_until("its buffer is free", || Arc::strong_count(&guard) == 1).await;
}

#[tokio::test]
async fn an_operation_that_cannot_connect_is_not_started() {
    let client = open();
    let gone = open();
    let peer = client.connect(&gone.address()).unwrap();
    gone.close();
    let buffer = Buffer::new(&client, 64);
    let span = quarry_fabric::RemoteSpan { address: 0, key: 1, len: 64 };
    let begun = Instant::now();
    let outcome = client.write(&peer, buffer.whole(), span, begun + Duration::from_millis(300)).await;
    assert_eq!(outcome, Err(OperationError::NotStarted));
    assert!(begun.elapsed() >= Duration::from_millis(300));
    assert!(!client.is_closed());
    assert_eq!(client.in_flight(), 0);
}
