//! Many endpoints on the one poller, and many tasks on one endpoint.

use crate::support::{Buffer, KIB, Target, open, pattern, soon};
use quarry_fabric::OperationError;
use std::sync::Arc;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_operations_of_many_tasks_do_not_mix() {
    const TASKS: usize = 32;
    const ROUNDS: usize = 40;
    const BYTES: usize = 16 * KIB;
    let target = Arc::new(Target::new(TASKS * BYTES));
    let client = open();
    let peer = client.connect(&target.endpoint.address()).unwrap();
    let tasks = (0..TASKS).map(|task| {
        let (target, client, peer) = (Arc::clone(&target), client.clone(), peer.clone());
        tokio::spawn(async move {
            let (out, back) = (Buffer::new(&client, BYTES), Buffer::new(&client, BYTES));
            let range = task * BYTES..(task + 1) * BYTES;
            for round in 0..ROUNDS {
                let bytes = pattern(task * 1000 + round, BYTES);
                out.memory.copy_in(0, &bytes).unwrap();
                let there = target.writable.remote_span(range.clone()).unwrap();
                client.write(&peer, out.whole(), there, soon()).await.unwrap();
                assert!(target.memory.copy_to_vec(range.start, BYTES).unwrap() == bytes);
                let there = target.readable.remote_span(range.clone()).unwrap();
                client.read(&peer, back.whole(), there, soon()).await.unwrap();
                assert!(back.memory.copy_to_vec(0, BYTES).unwrap() == bytes);
            }
        })
    });
    let tasks: Vec<_> = tasks.collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(client.in_flight(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_operations_than_the_queue_holds_all_complete() {
    const OPERATIONS: usize = 1000;
    let target = Arc::new(Target::new(OPERATIONS * 64));
    let client = open();
    let peer = client.connect(&target.endpoint.address()).unwrap();
    let buffer = Buffer::new(&client, OPERATIONS * 64);
    let bytes = pattern(5, OPERATIONS * 64);
    buffer.memory.copy_in(0, &bytes).unwrap();
    let writes: Vec<_> = (0..OPERATIONS)
        .map(|i| {
            let range = i * 64..(i + 1) * 64;
            let (client, peer, span) = (client.clone(), peer.clone(), buffer.span(range.clone()));
            let there = target.writable.remote_span(range).unwrap();
            tokio::spawn(async move { client.write(&peer, span, there, soon()).await })
        })
        .collect();
    for write in writes {
        write.await.unwrap().unwrap();
    }
    assert!(target.bytes() == bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_endpoints_share_one_poller() {
    const LANES: usize = 64;
    let lanes: Vec<_> = (0..LANES).map(|_| Target::new(4 * KIB)).collect();
    let client = open();
    let buffer = Buffer::new(&client, LANES * 4 * KIB);
    let peers: Vec<_> = lanes.iter().map(|lane| client.connect(&lane.endpoint.address()).unwrap()).collect();
    for (i, (lane, peer)) in lanes.iter().zip(&peers).enumerate() {
        let bytes = pattern(i, 4 * KIB);
        let range = i * 4 * KIB..(i + 1) * 4 * KIB;
        buffer.memory.copy_in(range.start, &bytes).unwrap();
        let there = lane.writable.remote_span(0..4 * KIB).unwrap();
        client.write(peer, buffer.span(range), there, soon()).await.unwrap();
        assert!(lane.bytes() == bytes, "lane {i}");
    }
    let pollers = std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter(|task| {
            let name = task.as_ref().unwrap().path().join("comm");
            std::fs::read_to_string(name).is_ok_and(|name| name.trim() == "fabric-poller")
        })
        .count();
    assert_eq!(pollers, 1);
    // Closing every second one leaves the others served.
    for lane in lanes.iter().step_by(2) {
        lane.endpoint.close();
    }
    for (lane, peer) in lanes.iter().zip(&peers).skip(1).step_by(2) {
        let there = lane.writable.remote_span(0..64).unwrap();
        client.write(peer, buffer.span(0..64), there, soon()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_closed_under_their_operations_end_them_all() {
    for _ in 0..30 {
        let target = Arc::new(Target::new(64 * KIB));
        let client = open();
        let peer = client.connect(&target.endpoint.address()).unwrap();
        let buffer = Buffer::new(&client, 64 * KIB);
        let writes: Vec<_> = (0..16)
            .map(|_| {
                let (client, peer, span) = (client.clone(), peer.clone(), buffer.whole());
                let there = target.writable.remote_span(0..64 * KIB).unwrap();
                tokio::spawn(async move {
                    let mut completed = 0u32;
                    loop {
                        match client.write(&peer, span.clone(), there, soon()).await {
                            Ok(()) => completed += 1,
                            Err(error) => return (completed, error),
                        }
                    }
                })
            })
            .collect();
        let closing = client.clone();
        crate::support::wait_until("they are under way", || closing.in_flight() >= 8).await;
        tokio::task::spawn_blocking(move || closing.close()).await.unwrap();
        for write in writes {
            assert_eq!(write.await.unwrap().1, OperationError::Closed);
        }
        assert_eq!(client.in_flight(), 0);
        assert_eq!(Arc::strong_count(&buffer.registration), 1, "every buffer is given back");
    }
}
