//! From descriptors to checked bytes.
//!
//! Reads whole frames into registered memory, neighbours in one operation, and copies each out once before it is checked: header, lengths,
//! checksum, and at last that the lease still holds (*No wrong value*). Decides which copy is read; says of each value what went wrong.

use crate::{
    calls::Scope,
    core::Core,
    endpoints::{Direction, Target},
    namespace::Value,
    read::cache::{Found, Place},
    write::transfer_time,
};
use bytes::Bytes;
use quarry_fabric::FabricAddress;
use quarry_wire::{
    frame::{FrameHeader, FrameKind, header_bytes},
    ids::{NamespaceId, NodeId},
    key::Key,
};
use std::{collections::BTreeSet, sync::Arc, time::Duration};
use tokio::{
    task::JoinSet,
    time::{Instant, timeout_at},
};

/// Bytes that one operation reads at most, unless a single frame has more.
const RUN_BYTES: u64 = 2 << 20;
/// A copy is waited for so long while there is another one to try (plus the time its bytes take).
const PATIENCE: Duration = Duration::from_millis(750);
/// Of a frame's length, the part that may lie unused between it and its neighbour for both to be read at once.
const GAP_PART: u64 = 8;
/// And so many bytes more.
const GAP_BYTES: u64 = 512;

/// A value to fetch.
#[derive(Clone, Debug)]
pub(crate) struct Want {
    /// Its place among the caller's keys.
    pub(crate) index: usize,
    pub(crate) key: Key,
    pub(crate) found: Arc<Found>,
    /// Copies that were tried, by their place in `found`.
    tried: BTreeSet<usize>,
    last: Option<Miss>,
}

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

impl Want {
    pub(crate) fn new(index: usize, key: Key, found: Arc<Found>) -> Self {
        Self { index, key, found, tried: BTreeSet::new(), last: None }
    }

    fn frame_bytes(&self) -> u64 {
        header_bytes(self.key.as_bytes().len()) as u64 + self.found.payload_bytes
    }
}

/// What came of it.
#[derive(Debug)]
pub(crate) enum Fetched {
    Value(usize, Value),
    /// No copy that this descriptor names yields the value now.
    Missed(usize, Miss),
}

/// Fetches all of `wants`, each from one copy after the other.
pub(crate) async fn fetch(
    core: &Arc<Core>,
    namespace: NamespaceId,
    mut wants: Vec<Want>,
    deadline: Instant,
) -> Vec<Fetched> {
    let mut fetched = Vec::with_capacity(wants.len());
    while !wants.is_empty() {
        let (runs, missed) = plan(core, wants, deadline);
        fetched.extend(missed);
        wants = Vec::new();
        for (mut want, outcome) in read_all(core, namespace, runs, deadline).await {
            match outcome {
                Ok(value) => fetched.push(Fetched::Value(want.index, value)),
                // Other copies have the same lease and the same deadline.
                Err(miss @ (Miss::LeaseOver | Miss::NoRoom)) => fetched.push(Fetched::Missed(want.index, miss)),
                Err(miss) => {
                    tracing::debug!(key = %want.key, ?miss, "a copy did not yield the value, trying the next");
                    want.last = Some(miss);
                    wants.push(want);
                }
            }
        }
        core.counters.retries.add(wants.len() as u64);
    }
    fetched
}

/// One operation and the frames that it brings.
struct Run {
    target: Target,
    bytes: u64,
    /// Each of its values has another copy to try.
    spare: bool,
    /// Where each value's frame begins in it.
    frames: Vec<(Want, u64)>,
}

/// A copy that was chosen.
struct Chosen {
    want: Want,
    place: Place,
    /// There is another copy to try.
    spare: bool,
}

/// Chooses a copy for each value and joins neighbours. What has no copy left to try is missed.
fn plan(core: &Core, wants: Vec<Want>, deadline: Instant) -> (Vec<Run>, Vec<Fetched>) {
    let avoided = core.endpoints.avoided(Direction::Read);
    let now = core.options.clock.boot();
    let mut missed = Vec::new();
    let mut chosen: Vec<Chosen> = Vec::with_capacity(wants.len());
    let view = core.control.view().read();
    for mut want in wants {
        if now >= want.found.lease_end || Instant::now() >= deadline {
            let miss = want.last.unwrap_or(Miss::LeaseOver);
            missed.push(Fetched::Missed(want.index, miss));
            continue;
        }
        let count = want.found.copies.len();
        let spread = want.found.copies[0].spread ^ core.salt;
        let first = usize::try_from(spread % count as u64).expect("less than a usize");
        let known = |place: &usize| {
            let copy = &want.found.copies[*place];
            view.record(copy.region, copy.incarnation).is_some()
        };
        let order = || (0..count).map(|step| (first + step) % count).filter(|place| !want.tried.contains(place));
        let healthy = |place: &usize| !avoided.contains(&want.found.copies[*place].region.node);
        let choice = order().filter(known).find(healthy).or_else(|| order().find(known));
        match choice {
            Some(place) => {
                let spare = order().filter(known).any(|other| other != place);
                want.tried.insert(place);
                let place = want.found.copies[place];
                chosen.push(Chosen { want, place, spare });
            }
            None => {
                let node = want.found.copies[first].region.node;
                let gone = || Miss::Unreachable { node, last: "its memory of that time is gone".to_owned() };
                missed.push(Fetched::Missed(want.index, want.last.unwrap_or_else(gone)));
            }
        }
    }
    chosen.sort_by_key(|chosen| (chosen.place.region, chosen.place.incarnation, chosen.place.offset));
    let mut runs: Vec<Run> = Vec::new();
    let mut open: Option<(Place, u64)> = None;
    for Chosen { want, place, spare } in chosen {
        let bytes = want.frame_bytes();
        let node = place.region.node;
        let record = view.record(place.region, place.incarnation).expect("chosen because it is there");
        if place.offset.checked_add(bytes).is_none_or(|end| end > record.length) {
            let what = format!("its frame would end beyond the region's {} bytes", record.length);
            missed.push(Fetched::Missed(want.index, Miss::Corrupt { node, what }));
            continue;
        }
        let address = match FabricAddress::from_bytes(record.address.as_bytes()) {
            Ok(address) => address,
            Err(error) => {
                let last = error.to_string();
                missed.push(Fetched::Missed(want.index, Miss::Unreachable { node, last }));
                continue;
            }
        };
        if let (Some((start, end)), Some(run)) = (open, runs.last_mut())
            && (start.region, start.incarnation) == (place.region, place.incarnation)
            && place.offset >= end
            && place.offset - end <= bytes / GAP_PART + GAP_BYTES
            && place.offset + bytes - start.offset <= RUN_BYTES
        {
            run.frames.push((want, place.offset - start.offset));
            run.bytes = place.offset + bytes - start.offset;
            run.spare &= spare;
            open = Some((start, place.offset + bytes));
            continue;
        }
        open = Some((place, place.offset + bytes));
        let target = Target {
            node,
            address,
            provider: record.provider.clone(),
            at: record.base + place.offset,
            key: record.read_key,
        };
        runs.push(Run { target, bytes, spare, frames: vec![(want, 0)] });
    }
    (runs, missed)
}

type Outcome = (Want, Result<Value, Miss>);

/// Runs all operations at once, as far as the window allows, and checks what they bring on all processors.
async fn read_all(core: &Arc<Core>, namespace: NamespaceId, mut runs: Vec<Run>, deadline: Instant) -> Vec<Outcome> {
    if runs.len() == 1 {
        let run = runs.pop().expect("there is one");
        return read_run(Arc::clone(core), namespace, run, deadline).await;
    }
    let mut tasks = JoinSet::new();
    for run in runs {
        tasks.spawn(Scope::current().run(read_run(Arc::clone(core), namespace, run, deadline)));
    }
    let mut outcomes = Vec::new();
    while let Some(run) = tasks.join_next().await {
        match run {
            Ok(run) => outcomes.extend(run),
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => {}
        }
    }
    outcomes
}

async fn read_run(core: Arc<Core>, namespace: NamespaceId, run: Run, deadline: Instant) -> Vec<Outcome> {
    let Run { target, bytes, spare, frames } = run;
    let bytes = usize::try_from(bytes).expect("at most a slot or RUN_BYTES");
    let Ok(Ok(span)) = timeout_at(deadline, core.read_window.take(bytes)).await else {
        return frames.into_iter().map(|(want, _)| (want, Err(Miss::NoRoom))).collect();
    };
    let mut span = Arc::new(span);
    let attempt = core.options.attempt_timeout;
    let patience = if spare { attempt.min(PATIENCE) } else { attempt };
    let until = deadline.min(Instant::now() + patience + transfer_time(bytes));
    if let Err(error) = core.endpoints.read(&target, &span, 0..bytes, until).await {
        let miss = Miss::Unreachable { node: target.node, last: error.to_string() };
        return frames.into_iter().map(|(want, _)| (want, Err(miss.clone()))).collect();
    }
    let span = Arc::get_mut(&mut span).expect("the operation was the only other owner, and it is over");
    let bytes = span.bytes();
    let check = |(want, at): (Want, u64)| {
        let at = usize::try_from(at).expect("inside the run");
        let payload = usize::try_from(want.found.payload_bytes).expect("inside the run");
        let (head, rest) = bytes[at..].split_at(header_bytes(want.key.as_bytes().len()));
        let outcome = checked(namespace, &want, head, rest[..payload].to_vec());
        let outcome = match outcome {
            // Bytes of memory that was given to another are never shown: the lease is looked at last.
            Ok(_) | Err(_) if core.options.clock.boot() >= want.found.lease_end => Err(Miss::LeaseOver),
            Ok(value) => Ok(value),
            Err(what) => {
                core.counters.damaged.add(1);
                Err(Miss::Corrupt { node: target.node, what })
            }
        };
        (want, outcome)
    };
    frames.into_iter().map(check).collect()
}

/// The value, if these bytes are exactly the ones that were asked for.
fn checked(namespace: NamespaceId, want: &Want, head: &[u8], payload: Vec<u8>) -> Result<Value, String> {
    let expected = FrameHeader {
        namespace,
        key: want.key.clone(),
        version: want.found.version,
        kind: FrameKind::Value,
        payload_bytes: want.found.payload_bytes,
        payload_crc: want.found.payload_crc,
    };
    let found = FrameHeader::read_from(head).map_err(|error| error.to_string())?;
    if found != expected {
        return Err(format!(
            "expected key {} in version {}, the frame holds key {} in version {}",
            expected.key, expected.version, found.key, found.version
        ));
    }
    let crc = crc32c::crc32c(&payload);
    if crc != expected.payload_crc {
        return Err(format!("the payload's CRC-32C is {crc:#010x}, signed was {:#010x}", expected.payload_crc));
    }
    Ok(Value { bytes: Bytes::from(payload), version: expected.version })
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_wire::{
        ids::WriterId,
        version::{HybridClock, Version},
    };
    use std::time::Duration;

    fn frame() -> (Want, Vec<u8>, Vec<u8>) {
        let payload: Vec<u8> = (0..200u8).collect();
        let version = Version { clock: HybridClock(9), writer: WriterId([1; 16]) };
        let found = Found {
            version,
            payload_bytes: 200,
            payload_crc: crc32c::crc32c(&payload),
            copies: Vec::new(),
            sent: Duration::ZERO,
            lease_end: Duration::MAX,
        };
        let want = Want::new(0, Key::new("some key").unwrap(), Arc::new(found));
        let header = FrameHeader {
            namespace: NamespaceId(4),
            key: want.key.clone(),
            version,
            kind: FrameKind::Value,
            payload_bytes: 200,
            payload_crc: want.found.payload_crc,
        };
        let mut head = vec![0; header.bytes()];
        header.write_to(&mut head);
        (want, head, payload)
    }

    #[test]
    fn every_flipped_bit_of_a_frame_is_refused() {
        let (want, head, payload) = frame();
        assert_eq!(checked(NamespaceId(4), &want, &head, payload.clone()).unwrap().bytes, payload);
        for bit in 0..head.len() * 8 {
            let mut bad = head.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(checked(NamespaceId(4), &want, &bad, payload.clone()).is_err(), "header bit {bit}");
        }
        for bit in 0..payload.len() * 8 {
            let mut bad = payload.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(checked(NamespaceId(4), &want, &head, bad).is_err(), "payload bit {bit}");
        }
    }

    #[test]
    fn a_whole_frame_of_another_namespace_key_or_version_is_refused() {
        let (want, head, payload) = frame();
        assert!(checked(NamespaceId(5), &want, &head, payload.clone()).is_err());
        let other = Want { key: Key::new("same len").unwrap(), ..want.clone() };
        assert!(checked(NamespaceId(4), &other, &head, payload.clone()).is_err());
        let mut found = (*want.found).clone();
        found.version.clock.0 += 1;
        let other = Want { found: Arc::new(found), ..want };
        assert!(checked(NamespaceId(4), &other, &head, payload).is_err());
    }
}
