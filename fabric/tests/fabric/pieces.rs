//! Spans of a pool, and operations with more than one local piece.

use crate::support::{Buffer, KIB, MIB, Target, config, open, pattern, soon, wait_until};
use quarry_fabric::{
    ClientEndpoint, EndpointConfig, FabricError, LocalBuffer, LocalSpan, OperationError, Pieces, Pool, Span, Wait,
};
use std::{sync::Arc, time::Duration};

#[tokio::test]
async fn one_operation_moves_several_pieces_and_they_lie_together_at_the_target() {
    let target = Target::new(4 * MIB);
    let client = open();
    let peer = client.connect(&target.endpoint.address()).unwrap();
    assert!((2..=quarry_fabric::PIECES_MAX).contains(&client.pieces_max()));
    let lengths = [1, 96, 64 * KIB + 7, 2 * MIB - 5];
    for count in 1..=client.pieces_max() {
        // Each piece from a registration of its own, at an odd place.
        let buffers: Vec<Buffer> = (0..count).map(|_| Buffer::new(&client, 3 * MIB)).collect();
        let sent: Vec<Vec<u8>> = (0..count).map(|i| pattern(count * 10 + i, lengths[i])).collect();
        let gather = |buffer: &Buffer, i: usize| buffer.span(13 * i..13 * i + lengths[i]);
        let mut pieces = Pieces::one(gather(&buffers[0], 0));
        for (i, buffer) in buffers.iter().enumerate().skip(1) {
            pieces = pieces.and(gather(buffer, i)).unwrap();
        }
        for (i, (buffer, bytes)) in buffers.iter().zip(&sent).enumerate() {
            buffer.memory.copy_in(13 * i, bytes).unwrap();
        }
        let all = sent.concat();
        let there = target.writable.remote_span(100..100 + all.len()).unwrap();
        client.write(&peer, pieces.clone(), there, soon()).await.unwrap();
        assert!(target.memory.copy_to_vec(100, all.len()).unwrap() == all, "{count} pieces");

        for buffer in &buffers {
            buffer.memory.copy_in(0, &vec![0; 3 * MIB]).unwrap();
        }
        let there = target.readable.remote_span(100..100 + all.len()).unwrap();
        client.read(&peer, pieces, there, soon()).await.unwrap();
        for (i, (buffer, bytes)) in buffers.iter().zip(&sent).enumerate() {
            assert!(buffer.memory.copy_to_vec(13 * i, bytes.len()).unwrap() == *bytes, "piece {i} of {count}");
            assert_eq!(buffer.memory.copy_to_vec(13 * i + bytes.len(), 1).unwrap(), [0], "no more than its bytes");
        }
    }
}

#[tokio::test]
async fn pieces_that_do_not_fit_the_remote_bytes_are_refused() {
    let target = Target::new(4 * KIB);
    let client = open();
    let peer = client.connect(&target.endpoint.address()).unwrap();
    let buffer = Buffer::new(&client, 4 * KIB);
    let there = target.writable.remote_span(0..128).unwrap();
    let short = [buffer.span(0..64), buffer.span(64..127)];
    let refusal = client.write(&peer, short, there, soon()).await.unwrap_err();
    assert_eq!(refusal, OperationError::Invalid(FabricError::LengthMismatch { local: 127, remote: 128 }));
    let hollow = [buffer.span(0..128), buffer.span(9..9)];
    let refusal = client.write(&peer, hollow, there, soon()).await.unwrap_err();
    assert_eq!(refusal, OperationError::Invalid(FabricError::Empty { what: "a piece of an operation" }));
    let other = open();
    let foreign = [buffer.span(0..64), Buffer::new(&other, 64).whole()];
    let refusal = client.write(&peer, foreign, there, soon()).await.unwrap_err();
    assert_eq!(refusal, OperationError::Invalid(FabricError::WrongEndpoint { what: "registration" }));
    assert_eq!(target.bytes(), vec![0; 4 * KIB]);
}

#[tokio::test]
async fn a_frame_is_written_from_and_read_into_spans_in_place() {
    let target = Target::new(64 * KIB);
    let client = ClientEndpoint::new(config());
    let pool = Pool::new(256 * KIB).unwrap();
    client.keep_pool(&pool);
    let address = target.endpoint.address();
    let (mut head, mut payload) = (pool.take(96).await.unwrap(), pool.take(10_000).await.unwrap());
    head.bytes().copy_from_slice(&pattern(1, 96));
    payload.bytes().copy_from_slice(&pattern(2, 10_000));
    let (mut head, mut payload) = (Arc::new(head), Arc::new(payload));
    let pieces = |head: &Arc<Span>, payload: &Arc<Span>, bytes| {
        Pieces::from([LocalBuffer::of_span(head, 0..96).unwrap(), LocalBuffer::of_span(payload, 0..bytes).unwrap()])
    };
    let there = target.writable.remote_span(64..64 + 96 + 10_000).unwrap();
    client.write(&address, pieces(&head, &payload, 10_000), there, soon()).await.unwrap();
    assert_eq!(target.memory.copy_to_vec(64 + 96, 10_000).unwrap(), pattern(2, 10_000));

    // The write is over, so they are ours alone again.
    Arc::get_mut(&mut head).unwrap().bytes().fill(0);
    Arc::get_mut(&mut payload).unwrap().bytes().fill(0);
    let there = target.readable.remote_span(64..64 + 96 + 5000).unwrap();
    client.read(&address, pieces(&head, &payload, 5000), there, soon()).await.unwrap();
    assert_eq!(Arc::get_mut(&mut head).unwrap().bytes(), pattern(1, 96));
    let value = Arc::try_unwrap(payload).unwrap().into_bytes().slice(..5000);
    assert_eq!(value, pattern(2, 10_000)[..5000]);
    assert!(LocalBuffer::of_span(&head, 0..97).is_err());
    drop((head, value));
    assert_eq!(pool.free_bytes(), pool.capacity());
    assert_eq!(client.times_opened(), 1);
}

#[tokio::test]
async fn nobody_has_the_bytes_of_a_span_before_its_operation_is_over() {
    let target = Target::new(64 * MIB);
    let client = open();
    let peer = client.connect(&target.endpoint.address()).unwrap();
    let pool = Pool::new(64 * MIB).unwrap();
    let registration = client.register_pool(&pool).unwrap();
    let mut span = pool.take(64 * MIB).await.unwrap();
    span.bytes().fill(0x5a);
    let mut span = Arc::new(span);
    let local = registration.local_span(&span, 0..64 * MIB).unwrap();
    let there = target.writable.remote_span(0..64 * MIB).unwrap();
    let (begun, watched) = (client.clone(), client.clone());
    let write = tokio::spawn(async move { begun.write(&peer, local, there, soon()).await });
    wait_until("it is under way", || watched.in_flight() > 0).await;
    // Dropping the future changes nothing for the operation, so neither for the bytes.
    write.abort();
    assert!(write.await.is_err() || client.in_flight() == 0);
    while client.in_flight() > 0 {
        let has = Arc::get_mut(&mut span).is_some();
        assert!(!has || client.in_flight() == 0, "the bytes of an operation in flight were to be had");
        tokio::task::yield_now().await;
    }
    wait_until("it lets go of the span", || Arc::get_mut(&mut span).is_some()).await;
    assert!(target.memory.copy_to_vec(0, 64 * MIB).unwrap().iter().all(|byte| *byte == 0x5a));

    let other = Pool::new(64).unwrap();
    let foreign = Arc::new(other.take(64).await.unwrap());
    assert_eq!(registration.local_span(&foreign, 0..64).unwrap_err(), FabricError::WrongPool);
    assert!(registration.local_span(&span, 1..64 * MIB + 1).is_err());
}

#[tokio::test]
async fn an_outcome_is_told_only_when_the_bytes_are_free_whoever_finds_it() {
    for spin in [Duration::ZERO, Duration::from_millis(1)] {
        let target = Target::new(4 * KIB);
        let client = quarry_fabric::Endpoint::open(EndpointConfig { spin, ..config() }).unwrap();
        let peer = client.connect(&target.endpoint.address()).unwrap();
        let pool = Pool::new(4 * KIB).unwrap();
        let registration = client.register_pool(&pool).unwrap();
        let mut span = Arc::new(pool.take(4 * KIB).await.unwrap());
        let there = target.readable.remote_span(0..4 * KIB).unwrap();
        for round in 0..2000u32 {
            let mark = round.to_le_bytes()[0];
            target.memory.copy_in(0, &[mark; 4 * KIB]).unwrap();
            let local = registration.local_span(&span, 0..4 * KIB).unwrap();
            client.read(&peer, local, there, Wait::spinning_until(soon())).await.unwrap();
            let bytes = Arc::get_mut(&mut span).expect("the operation is over").bytes();
            assert_eq!(bytes, [mark; 4 * KIB]);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operations_that_spin_and_operations_that_sleep_all_complete() {
    let target = Arc::new(Target::new(MIB));
    let client = quarry_fabric::Endpoint::open(EndpointConfig { spin: Duration::from_micros(50), ..config() }).unwrap();
    let peer = client.connect(&target.endpoint.address()).unwrap();
    let tasks: Vec<_> = (0..16)
        .map(|task: usize| {
            let (target, client, peer) = (Arc::clone(&target), client.clone(), peer.clone());
            tokio::spawn(async move {
                let buffer = Buffer::new(&client, 64 * KIB);
                let range = task * 64 * KIB..(task + 1) * 64 * KIB;
                for round in 0..200 {
                    let bytes = pattern(task * 1000 + round, 64 * KIB);
                    buffer.memory.copy_in(0, &bytes).unwrap();
                    // Some spin, some sleep, and sometimes nobody is left who spins.
                    let wait =
                        if (task + round).is_multiple_of(3) { Wait::spinning_until(soon()) } else { soon().into() };
                    let span: LocalSpan = buffer.whole();
                    client.write(&peer, span, target.writable.remote_span(range.clone()).unwrap(), wait).await.unwrap();
                    assert!(target.memory.copy_to_vec(range.start, 64 * KIB).unwrap() == bytes);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(client.in_flight(), 0);
}
