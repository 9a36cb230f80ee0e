//! Operations that the target must refuse, and that must leave its memory as it was.

use crate::support::{Buffer, KIB, MIB, Target, fresh_key, open, soon};
use quarry_fabric::{Access, Endpoint, OperationError, Peer, RemoteSpan};

/// Tries a write of `span` and expects a refusal that leaves every byte of the target alone.
async fn refuse_write(client: &Endpoint, peer: &Peer, target: &Target, span: RemoteSpan) {
    let before = target.bytes();
    let buffer = Buffer::filled(client, usize::try_from(span.len).unwrap(), 0xee);
    let outcome = client.write(peer, buffer.whole(), span, soon()).await;
    assert!(matches!(outcome, Err(OperationError::Failed { .. })), "{outcome:?}");
    assert!(target.bytes() == before, "a refused write changed the target");
}

/// Tries a read of `span` and expects a refusal that brings nothing.
async fn refuse_read(client: &Endpoint, peer: &Peer, span: RemoteSpan) {
    let buffer = Buffer::filled(client, usize::try_from(span.len).unwrap(), 0xee);
    let outcome = client.read(peer, buffer.whole(), span, soon()).await;
    assert!(matches!(outcome, Err(OperationError::Failed { .. })), "{outcome:?}");
    let length = buffer.memory.len();
    assert_eq!(buffer.memory.copy_to_vec(0, length).unwrap(), vec![0xee; length]);
}

/// The target still takes what it should.
async fn still_serves(client: &Endpoint, peer: &Peer, target: &Target) {
    let there = target.readable.remote_span(0..64).unwrap();
    let buffer = Buffer::new(client, 64);
    client.read(peer, buffer.whole(), there, soon()).await.unwrap();
    assert_eq!(buffer.memory.copy_to_vec(0, 64).unwrap(), target.memory.copy_to_vec(0, 64).unwrap());
}

#[tokio::test]
pub(crate) async fn wrong_keys_are_refused_and_the_target_is_untouched() {
    let target = Target::new(2 * MIB);
    target.memory.copy_in(0, &[0x11; 64]).unwrap();
    let client = open();
    let peer = client.connect(&target.endpoint.address()).unwrap();
    for length in [32, 4 * KIB, MIB] {
        let write = target.writable.remote_span(0..length).unwrap();
        let read = target.readable.remote_span(0..length).unwrap();
        refuse_write(&client, &peer, &target, RemoteSpan { key: fresh_key(), ..write }).await;
        refuse_write(&client, &peer, &target, read).await;
        refuse_read(&client, &peer, RemoteSpan { key: fresh_key(), ..read }).await;
        refuse_read(&client, &peer, write).await;
        still_serves(&client, &peer, &target).await;
    }
}

#[tokio::test]
pub(crate) async fn a_local_registration_is_of_no_use_to_peers() {
    let target = Target::new(4 * KIB);
    let local = Buffer::new(&target.endpoint, 4 * KIB);
    let client = open();
    let peer = client.connect(&target.endpoint.address()).unwrap();
    let span = local.registration.remote_span(0..64).unwrap();
    refuse_write(&client, &peer, &target, span).await;
    refuse_read(&client, &peer, span).await;
    assert_eq!(local.memory.copy_to_vec(0, 4 * KIB).unwrap(), vec![0; 4 * KIB]);
}

#[tokio::test]
pub(crate) async fn bytes_outside_of_the_registration_are_refused() {
    let target = Target::new(2 * MIB);
    // Lends the middle only; the memory on both sides is there, but not lent.
    let middle =
        target.endpoint.register(&target.memory, MIB / 2..MIB, Access::RemoteWrite, Some(fresh_key())).unwrap();
    let lent = target.endpoint.register(&target.memory, MIB / 2..MIB, Access::RemoteRead, Some(fresh_key())).unwrap();
    let client = open();
    let peer = client.connect(&target.endpoint.address()).unwrap();
    let write = middle.remote_span(0..4 * KIB).unwrap();
    let read = lent.remote_span(0..4 * KIB).unwrap();
    let half = (MIB / 2) as u64;
    for start in [half - 2048, half, half + (1 << 30), u64::MAX - 2047 - write.address] {
        refuse_write(&client, &peer, &target, RemoteSpan { address: write.address + start, ..write }).await;
        refuse_read(&client, &peer, RemoteSpan { address: read.address + start, ..read }).await;
    }
    assert!(middle.remote_span(0..MIB / 2 + 1).is_err());
    still_serves(&client, &peer, &target).await;
}

#[tokio::test]
pub(crate) async fn a_closed_registration_is_refused_while_others_go_on() {
    let target = Target::new(2 * MIB);
    let client = open();
    let peer = client.connect(&target.endpoint.address()).unwrap();
    let buffer = Buffer::filled(&client, 4 * KIB, 9);
    let there = target.writable.remote_span(0..4 * KIB).unwrap();
    client.write(&peer, buffer.whole(), there, soon()).await.unwrap();
    target.writable.close();
    assert!(target.writable.is_closed() && !target.readable.is_closed());
    refuse_write(&client, &peer, &target, there).await;
    refuse_write(&client, &peer, &target, RemoteSpan { len: MIB as u64, ..there }).await;
    still_serves(&client, &peer, &target).await;
    // The same bytes under a new key: the new one works, the old one still does not.
    let again = target.endpoint.register(&target.memory, 0..MIB, Access::RemoteWrite, Some(fresh_key())).unwrap();
    client.write(&peer, buffer.whole(), again.remote_span(8192..8192 + 4096).unwrap(), soon()).await.unwrap();
    assert_eq!(target.memory.copy_to_vec(8192, 4096).unwrap(), vec![9; 4096]);
    refuse_write(&client, &peer, &target, there).await;
}

#[tokio::test]
pub(crate) async fn a_key_of_one_endpoint_is_refused_at_another() {
    let one = Target::new(64 * KIB);
    let two = open();
    // Endpoint two lends the same memory, but under keys of its own.
    let theirs = two.register(&one.memory, 0..64 * KIB, Access::RemoteWrite, Some(fresh_key())).unwrap();
    let client = open();
    let peer = client.connect(&two.address()).unwrap();
    refuse_write(&client, &peer, &one, one.writable.remote_span(0..4 * KIB).unwrap()).await;
    refuse_read(&client, &peer, one.readable.remote_span(0..4 * KIB).unwrap()).await;
    let buffer = Buffer::filled(&client, 4 * KIB, 5);
    client.write(&peer, buffer.whole(), theirs.remote_span(0..4 * KIB).unwrap(), soon()).await.unwrap();
    assert_eq!(one.memory.copy_to_vec(0, 4 * KIB).unwrap(), vec![5; 4 * KIB]);
}

#[tokio::test]
pub(crate) async fn a_refused_write_of_one_client_does_not_disturb_another() {
    let target = Target::new(MIB);
    let (bad, good) = (open(), open());
    let bad_peer = bad.connect(&target.endpoint.address()).unwrap();
    let good_peer = good.connect(&target.endpoint.address()).unwrap();
    let buffer = Buffer::filled(&good, 64 * KIB, 1);
    let span = target.writable.remote_span(0..64 * KIB).unwrap();
    for _ in 0..20 {
        let wrong = Buffer::filled(&bad, 4 * KIB, 2);
        let refused = RemoteSpan { key: fresh_key(), len: 4 * KIB as u64, ..span };
        let (refused, taken) = tokio::join!(
            bad.write(&bad_peer, wrong.whole(), refused, soon()),
            good.write(&good_peer, buffer.whole(), span, soon()),
        );
        assert!(matches!(refused, Err(OperationError::Failed { .. })), "{refused:?}");
        taken.unwrap();
    }
    assert_eq!(target.memory.copy_to_vec(0, 64 * KIB).unwrap(), vec![1; 64 * KIB]);
}
