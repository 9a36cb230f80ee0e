//! What an operation promises when all is well, and what it refuses before anything is sent.

use crate::support::{Buffer, KIB, MIB, Target, config, open, pattern, soon};
use quarry_fabric::{
    Access, ClientEndpoint, Endpoint, EndpointConfig, FabricAddress, FabricError, LocalBuffer, LocalSpan, Memory,
    OperationError, RemoteSpan, without_our_descriptors,
};
use std::net::{IpAddr, Ipv4Addr};

#[tokio::test]
pub(crate) async fn what_was_written_is_read_back() {
    let target = Target::new(MIB);
    let client = open();
    let peer = client.connect(&target.endpoint.address()).unwrap();
    let buffer = Buffer::new(&client, MIB);
    let bytes = pattern(1, 300 * KIB);
    buffer.memory.copy_in(5, &bytes).unwrap();
    let there = target.writable.remote_span(4096..4096 + bytes.len()).unwrap();
    client.write(&peer, buffer.span(5..5 + bytes.len()), there, soon()).await.unwrap();
    assert_eq!(target.memory.copy_to_vec(4096, bytes.len()).unwrap(), bytes);

    let back = Buffer::new(&client, MIB);
    let there = target.readable.remote_span(4096..4096 + bytes.len()).unwrap();
    client.read(&peer, back.span(77..77 + bytes.len()), there, soon()).await.unwrap();
    assert_eq!(back.memory.copy_to_vec(77, bytes.len()).unwrap(), bytes);
    assert_eq!(back.memory.copy_to_vec(0, 77).unwrap(), vec![0; 77]);
}

#[tokio::test]
pub(crate) async fn a_completed_write_is_visible_at_once_in_the_targets_memory() {
    let target = Target::new(4 * MIB);
    let client = open();
    let peer = client.connect(&target.endpoint.address()).unwrap();
    for (round, length) in [64, 4 * KIB, 64 * KIB, MIB, 4 * MIB].into_iter().cycle().take(50).enumerate() {
        let byte = u8::try_from(round + 1).unwrap();
        let buffer = Buffer::filled(&client, length, byte);
        let there = target.writable.remote_span(0..length).unwrap();
        client.write(&peer, buffer.whole(), there, soon()).await.unwrap();
        // No waiting here: this is the claim.
        assert_eq!(target.memory.copy_to_vec(0, length).unwrap(), vec![byte; length], "round {round}");
    }
}

#[tokio::test]
pub(crate) async fn a_peer_connected_twice_stays_when_one_of_them_goes() {
    let target = Target::new(4 * KIB);
    let client = open();
    let first = client.connect(&target.endpoint.address()).unwrap();
    let second = client.connect(&target.endpoint.address()).unwrap();
    let buffer = Buffer::filled(&client, 64, 3);
    let there = target.writable.remote_span(0..64).unwrap();
    client.write(&first, buffer.whole(), there, soon()).await.unwrap();
    drop(first);
    client.write(&second, buffer.whole(), there, soon()).await.unwrap();
    assert_eq!(target.memory.copy_to_vec(0, 64).unwrap(), vec![3; 64]);
}

#[tokio::test]
pub(crate) async fn wrong_calls_are_refused_with_what_was_found() {
    let target = Target::new(4 * KIB);
    let client = open();
    let other = open();
    let peer = client.connect(&target.endpoint.address()).unwrap();
    let buffer = Buffer::new(&client, 4 * KIB);
    let there = target.writable.remote_span(0..64).unwrap();

    let refusal = client.write(&peer, buffer.span(0..63), there, soon()).await.unwrap_err();
    assert_eq!(refusal, OperationError::Invalid(FabricError::LengthMismatch { local: 63, remote: 64 }));
    let nothing = RemoteSpan { len: 0, ..there };
    let refusal = client.write(&peer, buffer.span(9..9), nothing, soon()).await.unwrap_err();
    assert_eq!(refusal, OperationError::Invalid(FabricError::LengthMismatch { local: 0, remote: 0 }));
    let refusal = other.write(&peer, buffer.span(0..64), there, soon()).await.unwrap_err();
    assert_eq!(refusal, OperationError::Invalid(FabricError::WrongEndpoint { what: "peer" }));
    let others = other.connect(&target.endpoint.address()).unwrap();
    let refusal = other.write(&others, buffer.span(0..64), there, soon()).await.unwrap_err();
    assert_eq!(refusal, OperationError::Invalid(FabricError::WrongEndpoint { what: "registration" }));

    let end = 4 * KIB;
    let outside = LocalSpan::new(&buffer.registration, 1..end + 1).unwrap_err();
    assert_eq!(outside, FabricError::OutOfRange { start: 1, end: end + 1, length: end });
    let refused = client.register(&buffer.memory, 1..end + 1, Access::Local, None).unwrap_err();
    assert_eq!(refused, FabricError::OutOfRange { start: 1, end: end + 1, length: end });
    let refused = client.register(&buffer.memory, 8..8, Access::Local, None).unwrap_err();
    assert_eq!(refused, FabricError::Empty { what: "a registration" });
    let lent = std::sync::Arc::new(client.register(&buffer.memory, 0..64, Access::RemoteRead, Some(7777)).unwrap());
    assert_eq!(LocalSpan::new(&lent, 0..64).unwrap_err(), FabricError::NotLocal { found: Access::RemoteRead });
    let again = client.register(&buffer.memory, 0..64, Access::RemoteRead, Some(7777)).unwrap_err();
    assert_eq!(again, FabricError::KeyInUse { key: 7777 });
    let short = FabricAddress::from_bytes(&[2, 0, 1]).unwrap();
    assert!(matches!(client.connect(&short), Err(FabricError::BadAddress { .. })));
    assert_eq!(target.bytes(), vec![0; 4 * KIB], "nothing was sent");
}

#[test]
pub(crate) fn a_port_in_use_and_an_unspecified_address_are_refused() {
    let first = open();
    let port = first.address().port().unwrap();
    assert_eq!(first.address().ip(), Some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
    let refusal = Endpoint::open(EndpointConfig { port: Some(port), ..config() }).unwrap_err();
    assert_eq!(refusal, FabricError::AddressInUse { ip: IpAddr::V4(Ipv4Addr::LOCALHOST), port });
    let unspecified = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    let refusal = Endpoint::open(EndpointConfig { bind: unspecified, ..config() }).unwrap_err();
    assert_eq!(refusal, FabricError::BindUnspecified { ip: unspecified });
    // The port is free again at once.
    first.close();
    let second = Endpoint::open(EndpointConfig { port: Some(port), ..config() }).unwrap();
    assert_eq!(second.address().port(), Some(port));
}

#[tokio::test]
pub(crate) async fn a_closed_endpoint_refuses_everything() {
    let target = Target::new(4 * KIB);
    let client = open();
    let peer = client.connect(&target.endpoint.address()).unwrap();
    let buffer = Buffer::new(&client, 64);
    client.close();
    client.close();
    assert!(client.is_closed());
    let there = target.writable.remote_span(0..64).unwrap();
    assert_eq!(client.write(&peer, buffer.whole(), there, soon()).await, Err(OperationError::Closed));
    let closed = FabricError::Closed { what: "endpoint" };
    assert_eq!(client.connect(&target.endpoint.address()).unwrap_err(), closed);
    assert_eq!(client.register(&buffer.memory, 0..64, Access::Local, None).unwrap_err(), closed);
}

#[tokio::test]
pub(crate) async fn a_client_endpoint_opens_at_its_first_use_and_takes_any_memory() {
    let target = Target::new(64 * KIB);
    let client = ClientEndpoint::new(config());
    assert_eq!(client.times_opened(), 0);
    let kept = Memory::allocate(4 * KIB).unwrap();
    kept.copy_in(0, &pattern(3, 4 * KIB)).unwrap();
    client.keep_registered(&kept);
    let address = target.endpoint.address();
    for round in 0..3 {
        let span = target.writable.remote_span(round * 4 * KIB..(round + 1) * 4 * KIB).unwrap();
        client.write(&address, LocalBuffer::new(&kept, 0..4 * KIB), span, soon()).await.unwrap();
        client.disconnect(&address);
    }
    let other = Memory::allocate(64 * KIB).unwrap();
    let span = target.readable.remote_span(0..12 * KIB).unwrap();
    client.read(&address, LocalBuffer::new(&other, 100..100 + 12 * KIB), span, soon()).await.unwrap();
    assert_eq!(other.copy_to_vec(100, 12 * KIB).unwrap(), pattern(3, 4 * KIB).repeat(3));
    assert_eq!(client.times_opened(), 1);
    let outside = client.read(&address, LocalBuffer::new(&other, 1..64 * KIB + 1), span, soon()).await;
    assert!(matches!(outside, Err(OperationError::Invalid(FabricError::OutOfRange { .. }))));
    client.close();
    let span = target.readable.remote_span(0..64).unwrap();
    let after = client.read(&address, LocalBuffer::new(&other, 0..64), span, soon()).await;
    assert_eq!(after, Err(OperationError::Closed));
}

#[test]
fn a_child_process_inherits_no_sockets_of_ours() {
    let endpoint = open();
    // As libfabric's: not to be closed on exec.
    let plain = rustix::io::dup(std::io::stderr()).unwrap();
    let descriptors = |command: &mut std::process::Command| {
        let listing = command.arg("/proc/self/fd").output().unwrap();
        assert!(listing.status.success());
        // `ls` itself has the folder open.
        String::from_utf8(listing.stdout).unwrap().lines().count() - 1
    };
    let ls = || std::process::Command::new("ls");
    assert!(descriptors(&mut ls()) > 3, "a plain child inherits what is not marked");
    assert_eq!(descriptors(without_our_descriptors(&mut ls())), 3);
    drop(plain);
    assert!(!endpoint.is_closed());
}
