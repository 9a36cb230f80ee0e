//! The one place where bytes are found to be the value that was asked for, for all calls that read.
//!
//! Keeps *No wrong value*: the header is byte for byte the one that a writer of this value writes, the payload has the signed CRC. Keeps
//! *Leases hold* on the reader's side: the lease is looked at last, so it covered the bytes while they were read and checked.

use crate::{checksum, host::Clock, read::cache::Found};
use quarry_wire::{
    frame::{FrameHeader, FrameKind, HEADER_BYTES_MAX},
    ids::{NamespaceId, NodeId},
    key::Key,
};

/// Why a copy did not yield the value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Miss {
    /// The lease was over before its bytes were checked.
    LeaseOver,
    /// The holder was not reached, or refused.
    Unreachable { node: NodeId, last: String },
    /// Its bytes are not the ones.
    Corrupt { node: NodeId, what: String },
    /// No room in the window by the deadline.
    NoRoom,
}

/// A value as it was described, and the copy of it that was read.
pub(crate) struct Expected<'a> {
    pub(crate) namespace: NamespaceId,
    pub(crate) key: &'a Key,
    pub(crate) found: &'a Found,
    pub(crate) node: NodeId,
}

impl Expected<'_> {
    /// Whether header and payload are exactly the expected ones and the lease has not ended. The bytes must lie where nobody else can write.
    pub(crate) fn check(&self, head: &[u8], payload: &[u8], clock: &dyn Clock) -> Result<(), Miss> {
        let outcome = self.compare(head, payload);
        // Bytes of memory that was given to another are never shown.
        if clock.boot() >= self.found.lease_end {
            return Err(Miss::LeaseOver);
        }
        outcome.map_err(|what| Miss::Corrupt { node: self.node, what })
    }

    fn compare(&self, head: &[u8], payload: &[u8]) -> Result<(), String> {
        let expected = FrameHeader {
            namespace: self.namespace,
            key: self.key.clone(),
            version: self.found.version,
            kind: FrameKind::Value,
            payload_bytes: self.found.payload_bytes,
            payload_crc: self.found.payload_crc,
        };
        let mut written = [0; HEADER_BYTES_MAX];
        expected.write_to(&mut written);
        if *head != written[..expected.bytes()] {
            let found = FrameHeader::read_from(head).map_err(|error| error.to_string())?;
            return Err(format!(
                "expected key {} in version {} ({} bytes), the frame holds key {} in version {} ({} bytes)",
                expected.key, expected.version, expected.payload_bytes, found.key, found.version, found.payload_bytes
            ));
        }
        let crc = checksum::of(payload);
        if crc != expected.payload_crc || payload.len() as u64 != expected.payload_bytes {
            return Err(format!(
                "the CRC-32C of {} bytes is {crc:#010x}, signed was {:#010x} of {} bytes",
                payload.len(),
                expected.payload_crc,
                expected.payload_bytes
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_wire::{
        ids::WriterId,
        version::{HybridClock, Version},
    };
    use std::{
        sync::atomic::{AtomicU64, Ordering},
        time::Duration,
    };

    const NODE: NodeId = NodeId(5);

    /// Goes on by one second each time that it is looked at.
    #[derive(Debug, Default)]
    struct Counted(AtomicU64);
    impl Clock for Counted {
        fn wall_ms(&self) -> u64 {
            0
        }
        fn boot(&self) -> Duration {
            Duration::from_secs(self.0.fetch_add(1, Ordering::Relaxed))
        }
    }

    struct Frame {
        key: Key,
        found: Found,
        head: Vec<u8>,
        payload: Vec<u8>,
    }

    impl Frame {
        fn new() -> Self {
            let payload: Vec<u8> = (0..200u8).collect();
            let version = Version { clock: HybridClock(9), writer: WriterId([1; 16]) };
            let found = Found {
                version,
                payload_bytes: 200,
                payload_crc: crc32c::crc32c(&payload),
                copies: Vec::new(),
                sent: Duration::ZERO,
                lease_end: Duration::from_secs(1_000_000),
                revocations: 0,
            };
            let key = Key::new("some key").unwrap();
            let header = FrameHeader {
                namespace: NamespaceId(4),
                key: key.clone(),
                version,
                kind: FrameKind::Value,
                payload_bytes: 200,
                payload_crc: found.payload_crc,
            };
            let mut head = vec![0; header.bytes()];
            header.write_to(&mut head);
            Self { key, found, head, payload }
        }
        fn check(&self) -> Result<(), Miss> {
            self.check_in(NamespaceId(4))
        }
        fn check_in(&self, namespace: NamespaceId) -> Result<(), Miss> {
            let expected = Expected { namespace, key: &self.key, found: &self.found, node: NODE };
            expected.check(&self.head, &self.payload, &Counted::default())
        }
    }

    fn is_corrupt(outcome: &Result<(), Miss>) -> bool {
        matches!(outcome, Err(Miss::Corrupt { node: NODE, .. }))
    }

    #[test]
    fn every_flipped_bit_of_a_frame_is_refused() {
        let mut frame = Frame::new();
        assert_eq!(frame.check(), Ok(()));
        for bit in 0..frame.head.len() * 8 {
            frame.head[bit / 8] ^= 1 << (bit % 8);
            assert!(is_corrupt(&frame.check()), "header bit {bit}");
            frame.head[bit / 8] ^= 1 << (bit % 8);
        }
        for bit in 0..frame.payload.len() * 8 {
            frame.payload[bit / 8] ^= 1 << (bit % 8);
            assert!(is_corrupt(&frame.check()), "payload bit {bit}");
            frame.payload[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(frame.check(), Ok(()));
    }

    #[test]
    fn a_whole_frame_of_another_namespace_key_version_or_length_is_refused() {
        let frame = Frame::new();
        assert!(is_corrupt(&frame.check_in(NamespaceId(5))));
        assert!(is_corrupt(&Frame { key: Key::new("same len").unwrap(), ..Frame::new() }.check()));
        let mut other = Frame::new();
        other.found.version.clock.0 += 1;
        assert!(is_corrupt(&other.check()));
        let mut short = Frame::new();
        short.payload.pop();
        assert!(is_corrupt(&short.check()));
        let mut cut = Frame::new();
        cut.head.pop();
        assert!(is_corrupt(&cut.check()));
    }

    #[test]
    fn the_lease_is_looked_at_after_the_bytes_and_a_frame_is_refused_at_its_very_end() {
        let mut frame = Frame::new();
        // The clock's first look is at 0: at its end a lease is over.
        frame.found.lease_end = Duration::ZERO;
        assert_eq!(frame.check(), Err(Miss::LeaseOver));
        frame.payload[0] ^= 1;
        assert_eq!(frame.check(), Err(Miss::LeaseOver), "after the lease, other bytes are no damage");
        frame.payload[0] ^= 1;
        frame.found.lease_end = Duration::from_nanos(1);
        assert_eq!(frame.check(), Ok(()));
    }
}
