//! Gets: from keys to checked values.
//!
//! Decides when the shards are asked: for what is not known within its lease, once more for what no known copy yielded, and then no more,
//! unless a region of such a copy has got a new read key meanwhile.
//! All calls that read values go one way: `cache` and `resolve` find a value's copies, `plan` chooses among them, `fetch` reads, `check` has
//! the last word; `records` looks for the new key of a region that refused a read. They differ in where a payload ends: in memory of its
//! own, or in a buffer of the reader's.
//!
//! What takes longer than a lease is read in steps: values whose lease ended before they were read are resolved again, as long as each step
//! brings some. What is pinned is never resolved.

pub(crate) mod cache;
mod check;
pub(crate) mod damage;
mod fetch;
mod landing;
mod plan;
pub(crate) mod probe;
mod proof;
pub(crate) mod records;
pub(crate) mod resolve;
pub(crate) mod sharing;

use crate::{
    buffers::Buffer,
    core::Core,
    error::GetError,
    namespace::{Got, Value},
};
use bytes::Bytes;
use cache::Found;
use check::Miss;
use quarry_wire::{
    ids::{Incarnation, NamespaceId, RegionEpoch, RegionId},
    key::Key,
    version::Version,
};
use records::Refused;
use resolve::Resolved;
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// Times that the shards are asked about one key in one call, those not counted after which only others had their turn.
const RESOLVES_MAX: u32 = 2;

/// Reads all `keys`. One result per key, in their order.
pub(crate) async fn get_many(
    core: &Core,
    namespace: NamespaceId,
    keys: &[Key],
    fresh: bool,
) -> Vec<Result<Option<Value>, GetError>> {
    let mut wants: Vec<Want> = keys.iter().map(|key| Want::new(key.clone(), None)).collect();
    get_all(core, namespace, &mut wants, fresh).await;
    let value = |it: Landed| Value { bytes: it.bytes, version: it.version };
    wants.into_iter().map(|want| want.outcome().map(|found| found.map(value))).collect()
}

/// Reads the values of all keys into their buffers. One result per item, in their order.
pub(crate) async fn get_into_many(
    core: &Core,
    namespace: NamespaceId,
    items: Vec<(Key, Buffer)>,
    fresh: bool,
) -> Vec<(Buffer, Result<Option<Got>, GetError>)> {
    let mut wants: Vec<Want> = items.into_iter().map(|(key, buffer)| Want::new(key, Some(buffer))).collect();
    get_all(core, namespace, &mut wants, fresh).await;
    let got = |it: Landed| Got { len: it.len, version: it.version };
    let result = |mut want: Want| {
        let buffer = want.into.take().expect("a buffer is in its want except during an operation");
        (buffer, want.outcome().map(|found| found.map(got)))
    };
    wants.into_iter().map(result).collect()
}

/// Reads values whose places are known and are not to be asked for again. One result per key, in their order.
pub(crate) async fn get_known(
    core: &Core,
    namespace: NamespaceId,
    items: Vec<(Key, Resolved)>,
) -> Vec<Result<Option<Value>, GetError>> {
    let mut wants: Vec<Want> = items.into_iter().map(|(key, found)| Want::known(key, None, found)).collect();
    get_all_known(core, namespace, &mut wants).await;
    let value = |it: Landed| Value { bytes: it.bytes, version: it.version };
    wants.into_iter().map(|want| want.outcome().map(|found| found.map(value))).collect()
}

/// The same into buffers.
pub(crate) async fn get_known_into(
    core: &Core,
    namespace: NamespaceId,
    items: Vec<(Key, Buffer, Resolved)>,
) -> Vec<(Buffer, Result<Option<Got>, GetError>)> {
    let want = |(key, buffer, found)| Want::known(key, Some(buffer), found);
    let mut wants: Vec<Want> = items.into_iter().map(want).collect();
    get_all_known(core, namespace, &mut wants).await;
    let got = |it: Landed| Got { len: it.len, version: it.version };
    let result = |mut want: Want| {
        let buffer = want.into.take().expect("a buffer is in its want except during an operation");
        (buffer, want.outcome().map(|found| found.map(got)))
    };
    wants.into_iter().map(result).collect()
}

/// A value that is wanted.
#[derive(Debug)]
struct Want {
    key: Key,
    /// Where its payload is to go, if not to memory of its own.
    into: Option<Buffer>,
    state: State,
    /// What the last copy that was tried met.
    last: Option<Miss>,
    /// Times that the shards were asked about it.
    asked: u32,
    /// Its lease was over before it was read.
    is_late: bool,
}

#[derive(Debug)]
enum State {
    /// The shard is to be asked. The descriptor that led to nothing good, if there was one.
    Unknown {
        spent: Option<Arc<Found>>,
    },
    /// To be read from a copy that was not tried yet; those that were are marked by a bit each.
    Found {
        found: Arc<Found>,
        tried: u32,
    },
    Done(Result<Option<Landed>, GetError>),
}

/// A value that passed every check.
#[derive(Debug)]
struct Landed {
    version: Version,
    len: usize,
    /// Its bytes, unless they went to a buffer.
    bytes: Bytes,
}

impl Want {
    const fn new(key: Key, into: Option<Buffer>) -> Self {
        Self { key, into, state: State::Unknown { spent: None }, last: None, asked: 0, is_late: false }
    }

    /// Whose place is known; what is not there, or is not believed, is done.
    fn known(key: Key, into: Option<Buffer>, found: Resolved) -> Self {
        let state = match found {
            Ok(Some(found)) => State::Found { found, tried: 0 },
            Ok(None) => State::Done(Ok(None)),
            Err(error) => State::Done(Err(error)),
        };
        Self { state, ..Self::new(key, into) }
    }

    /// Whether the shards are to be asked about it.
    const fn is_to_be_asked(&self) -> bool {
        matches!(self.state, State::Unknown { .. }) && self.asked < RESOLVES_MAX
    }

    /// Whether its lease is over.
    fn is_over(&self, now: Duration) -> bool {
        matches!(&self.state, State::Found { found, .. } if now >= found.lease_end)
    }

    /// The copy that was read last is the value.
    fn landed(&mut self, bytes: Bytes, len: usize) {
        let State::Found { found, .. } = &self.state else { return };
        self.state = State::Done(Ok(Some(Landed { version: found.version, len, bytes })));
    }

    /// The copy that was tried last did not yield the value.
    fn failed(&mut self, miss: Miss) {
        // Other copies have the same lease and the same deadline.
        let over = matches!(miss, Miss::LeaseOver | Miss::NoRoom);
        self.is_late = matches!(miss, Miss::LeaseOver);
        self.last = Some(miss);
        if over {
            self.spend();
        }
    }

    /// No copy that its descriptor names can be tried; why the last one failed is told rather than `why`.
    fn missed(&mut self, why: Miss) {
        self.is_late = matches!(why, Miss::LeaseOver);
        self.last.get_or_insert(why);
        self.spend();
    }

    fn spend(&mut self) {
        if let State::Found { found, .. } = &self.state {
            self.state = State::Unknown { spent: Some(Arc::clone(found)) };
        }
    }

    fn outcome(self) -> Result<Option<Landed>, GetError> {
        match self.state {
            State::Done(outcome) => outcome,
            State::Unknown { .. } | State::Found { .. } => Err(given_up(self.last)),
        }
    }
}

/// Brings every want to its end.
async fn get_all(core: &Core, namespace: NamespaceId, wants: &mut [Want], fresh: bool) {
    let deadline = match core.deadline() {
        Ok(deadline) => deadline,
        Err(error) => {
            for want in wants {
                want.state = State::Done(Err(error.clone().into()));
            }
            return;
        }
    };
    if !fresh {
        let revocations = core.control.view().read().revocations();
        let (cache, now, mut hits) = (core.cache.lock(), core.options.clock.boot(), 0);
        for want in wants.iter_mut() {
            if let Some(found) = cache.get(namespace, &want.key, now, revocations) {
                want.state = State::Found { found, tried: 0 };
                hits += 1;
            }
        }
        core.counters.cache_hits.add(hits);
    }
    loop {
        // What is unknown when the shards were asked often enough stays so.
        if wants.iter().any(Want::is_to_be_asked) && Instant::now() < deadline {
            look_up(core, namespace, wants, deadline).await;
        }
        let done = wants.iter().filter(|want| matches!(want.state, State::Done(_))).count();
        if !wants.iter().any(|want| matches!(want.state, State::Found { .. })) {
            return;
        }
        let refused = fetch::fetch(core, namespace, wants, deadline).await;
        if wants.iter().filter(|want| matches!(want.state, State::Done(_))).count() > done {
            // A step of a long way: who waited for others until the lease was over has not had a turn yet.
            for want in wants.iter_mut().filter(|want| want.is_late) {
                want.asked = 0;
            }
        }
        let mut needed = Refused::new();
        for want in wants.iter_mut() {
            if let State::Unknown { spent } = &mut want.state
                && let Some(spent) = spent.take()
            {
                needed.extend(refusing(&spent, &refused));
                core.cache.lock().forget(namespace, &want.key, &spent);
            }
        }
        // A key that was changed is nobody's failure: with the new one there is another try, and a lease that covers it.
        if records::any_is_newer(core, &needed, deadline).await {
            for want in wants.iter_mut() {
                want.asked = want.asked.min(RESOLVES_MAX - 1);
            }
        }
    }
}

/// Which regions of a value's copies were not read although their records said how.
fn refusing(found: &Found, refused: &Refused) -> impl Iterator<Item = ((RegionId, Incarnation), RegionEpoch)> {
    let regions = found.copies.iter().map(|copy| (copy.region, copy.incarnation));
    regions.filter_map(|region| Some((region, *refused.get(&region)?)))
}

/// Brings every want to its end whose place is known, or not: each copy is tried twice, the second time with what the directory says then of
/// the memory that it lies in, and again when a region of it has got a new read key meanwhile.
async fn get_all_known(core: &Core, namespace: NamespaceId, wants: &mut [Want]) {
    let deadline = match core.deadline() {
        Ok(deadline) => deadline,
        Err(error) => {
            for want in wants {
                want.state = State::Done(Err(error.clone().into()));
            }
            return;
        }
    };
    let mut is_first = true;
    loop {
        let refused = fetch::fetch(core, namespace, wants, deadline).await;
        let (mut needed, mut missed) = (Refused::new(), Vec::new());
        for want in wants.iter_mut().filter(|want| !want.is_late) {
            if let State::Unknown { spent: Some(found) } = &want.state {
                needed.extend(refusing(found, &refused));
                missed.push(want);
            }
        }
        if missed.is_empty() {
            break;
        }
        let is_newer = records::any_is_newer(core, &needed, deadline).await;
        let again = is_newer || is_first && core.control.describe(deadline).await.is_ok();
        if !again {
            break;
        }
        is_first = false;
        for want in missed {
            if let State::Unknown { spent: Some(found) } = &want.state {
                want.state = State::Found { found: Arc::clone(found), tried: 0 };
            }
        }
    }
    if Instant::now() < deadline {
        for want in wants.iter_mut().filter(|want| want.is_late && matches!(want.state, State::Unknown { .. })) {
            want.state = State::Done(Err(GetError::PinOver));
        }
    }
}

/// Asks the shards about all that is unknown, in one go.
async fn look_up(core: &Core, namespace: NamespaceId, wants: &mut [Want], deadline: Instant) {
    let unknown = |want: &&Want| want.is_to_be_asked();
    let asked: Vec<Key> = wants.iter().filter(unknown).map(|want| want.key.clone()).collect();
    let resolved = resolve::resolve(core, namespace, &asked, deadline).await;
    let now = core.options.clock.boot();
    let mut cache = core.cache.lock();
    let unknown = |want: &&mut Want| want.is_to_be_asked();
    for (want, resolved) in wants.iter_mut().filter(unknown).zip(resolved) {
        want.asked += 1;
        want.state = match resolved {
            // It was there a moment ago, in damaged copies alone, and its holders have given them up.
            Ok(None) if matches!(want.last, Some(Miss::Corrupt { .. })) => State::Done(Err(given_up(want.last.take()))),
            Ok(None) => State::Done(Ok(None)),
            Err(error) => State::Done(Err(error)),
            Ok(Some(found)) => {
                cache.insert(namespace, &want.key, &found, now);
                State::Found { found, tried: 0 }
            }
        };
    }
}

fn given_up(miss: Option<Miss>) -> GetError {
    let late = |last: &str| GetError::Deadline { last: last.to_owned() };
    match miss {
        Some(Miss::Corrupt { node, what }) => GetError::Corrupt { node, what },
        Some(Miss::Unreachable { node, last }) => GetError::Unreachable { node, last },
        Some(Miss::LeaseOver) => late("the lease ended before the bytes were checked"),
        Some(Miss::NoRoom) => late("waiting for room in the window"),
        None => late("resolving the key"),
    }
}
