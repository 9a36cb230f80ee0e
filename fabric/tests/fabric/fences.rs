//! What stops a write that has begun: closing the endpoint, and nothing less.

use crate::support::{KIB, MIB, PeerProcess, Target, fresh_key, open, wait_for};
use quarry_fabric::{Access, Endpoint, Memory};
use std::sync::Arc;

const PAGE: usize = 4 * KIB;
const BYTES: usize = 64 * MIB;

/// How many whole pages of `byte` have landed from the start.
fn landed(memory: &Memory, byte: u8) -> usize {
    (0..BYTES / PAGE).take_while(|page| memory.copy_to_vec(page * PAGE + PAGE - 1, 1).unwrap() == [byte]).count()
}

/// Waits until nothing lands any more.
fn settled(memory: &Memory, byte: u8) -> usize {
    let mut before = landed(memory, byte);
    let mut same = 0;
    wait_for("the landing ends", || {
        let now = landed(memory, byte);
        same = if now == before { same + 1 } else { 0 };
        before = now;
        // Each look takes milliseconds once much has landed; bytes in the kernel's buffers take far less.
        std::thread::park_timeout(std::time::Duration::from_millis(2));
        (same >= 100).then_some(now)
    })
}

struct HalfWay {
    writer: PeerProcess,
    target: Target,
    byte: u8,
}

/// A writer that is stopped in the middle of a large write. The first write may win the race; then the next one is stopped.
fn stopped_half_way() -> HalfWay {
    let target = Target::new(BYTES);
    let mut writer = PeerProcess::start(PAGE, None);
    for byte in 1..=100 {
        let span = target.writable.remote_span(0..BYTES).unwrap();
        writer.begin_write(&target.endpoint.address(), span, byte);
        wait_for("the first bytes land", || (target.memory.copy_to_vec(MIB, 1).unwrap() == [byte]).then_some(()));
        writer.stop();
        let pages = settled(&target.memory, byte);
        if pages < BYTES / PAGE {
            return HalfWay { writer, target, byte };
        }
        writer.go_on();
        assert_eq!(writer.hear(), "ended ok");
    }
    panic!("a hundred writes of 64 MiB were all faster than a signal");
}

#[test]
fn closing_a_registration_does_not_stop_a_write_that_has_begun() {
    let HalfWay { mut writer, target, byte } = stopped_half_way();
    let before = landed(&target.memory, byte);
    target.writable.close();
    writer.go_on();
    assert_eq!(writer.hear(), "ended ok");
    assert!(before < BYTES / PAGE);
    assert_eq!(
        landed(&target.memory, byte),
        BYTES / PAGE,
        "if this stops it, the endpoint need not be the fence any more"
    );
}

#[test]
fn closing_the_endpoint_stops_a_write_that_has_begun() {
    let HalfWay { mut writer, target, byte } = stopped_half_way();
    // Another lane over the same memory, in a domain of its own, stays.
    let other = open();
    let readable = other.register(&target.memory, 0..BYTES, Access::RemoteRead, Some(fresh_key())).unwrap();
    target.endpoint.close();
    let before = target.bytes();
    // The memory has a new owner, who fills what had not landed.
    let rest = (landed(&target.memory, byte) + 1) * PAGE;
    target.memory.copy_in(rest, &vec![0xaa; BYTES - rest]).unwrap();
    writer.go_on();
    let ended = writer.hear();
    assert!(ended.starts_with("ended failed"), "{ended}");
    assert_eq!(settled(&target.memory, byte), rest / PAGE - 1);
    assert!(target.memory.copy_to_vec(rest, BYTES - rest).unwrap().iter().all(|byte| *byte == 0xaa));
    assert!(target.memory.copy_to_vec(0, rest).unwrap() == before[..rest]);
    assert!(!readable.is_closed() && !other.is_closed());
}

#[test]
fn memory_under_a_running_write_outlives_everything_but_the_endpoint() {
    let HalfWay { mut writer, target, byte } = stopped_half_way();
    let Target { endpoint, memory, readable, writable } = target;
    drop((readable, writable));
    let weak = Arc::downgrade(&memory);
    drop(memory);
    // The write goes on into it: it must not have been unmapped, or given to another.
    assert!(weak.upgrade().is_some(), "the endpoint holds what may still be written");
    writer.go_on();
    assert_eq!(writer.hear(), "ended ok");
    assert_eq!(landed(&weak.upgrade().unwrap(), byte), BYTES / PAGE);
    endpoint.close();
    assert!(weak.upgrade().is_none(), "a closed endpoint holds nothing");
}

#[test]
fn closing_an_endpoint_while_it_is_written_to_ends_the_landing() {
    let mut writer = PeerProcess::start(PAGE, None);
    for byte in 1..=20 {
        let target = Target::new(BYTES);
        writer.begin_write(&target.endpoint.address(), target.writable.remote_span(0..BYTES).unwrap(), byte);
        wait_for("the first bytes land", || (target.memory.copy_to_vec(0, 1).unwrap() == [byte]).then_some(()));
        target.endpoint.close();
        let at_close = target.bytes();
        let ended = writer.hear();
        assert!(ended.starts_with("ended failed") || ended == "ended ok", "{ended}");
        assert!(target.bytes() == at_close, "bytes landed after the endpoint was closed");
    }
}

#[test]
fn an_endpoint_is_closed_when_its_last_clone_goes() {
    let endpoint = open();
    let port = endpoint.address().port();
    let clone = endpoint.clone();
    drop(endpoint);
    assert!(!clone.is_closed());
    drop(clone);
    let again = Endpoint::open(quarry_fabric::EndpointConfig { port, ..crate::support::config() }).unwrap();
    assert_eq!(again.address().port(), port);
}
