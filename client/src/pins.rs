//! Pins: values that stay where they are while they are read for longer than a lease lasts.
//!
//! Decides how keys are grouped into calls, and until when what is pinned may be read: a pin counts from sending its request, on the boot-time
//! clock, taken one percent shorter, like a lease (*Leases hold*). Reads go the way of all reads, only that no shard is asked on it: what is
//! pinned is read or not, never another version. What a shard answered is kept, to be proven again under each newer revocation list.

use crate::{
    buffers::Buffer,
    calls,
    client::Shared,
    core::Core,
    error::{CallError, GetError, PinError},
    namespace::{Got, Value},
    read::{self, cache::Found, resolve::Resolved},
};
use bytes::Bytes;
use futures::future::join_all;
use parking_lot::Mutex;
use quarry_proto::{refusal::Refusal, v1};
use quarry_wire::{
    ids::{NamespaceId, ShardId},
    key::Key,
    limits::{KEYS_PER_PIN_MAX, PIN_KEY_BYTES_MAX, PIN_MAX},
    units::millis,
    version::Version,
};
use std::{collections::HashMap, sync::Arc, time::Duration};
use tokio::time::Instant;

/// Values as they were when they were pinned. They can be read through it until it is over, whatever becomes of their keys meanwhile: nobody
/// writes to their memory. See [`Namespace::pin`](crate::Namespace::pin).
///
/// It ends by itself after the time that was asked for, counted from asking, unless it is [renewed](Self::renew) before. Dropping it releases
/// it in the background; [`release`](Self::release) waits for that. While it lasts it holds memory of the cluster: release it when the reading
/// is done.
///
/// A pin outlives no memory: what the restart of its holders took is gone for it too.
#[derive(Debug)]
pub struct Pin {
    shared: Arc<Shared>,
    namespace: NamespaceId,
    parts: Vec<Part>,
    /// By key: which part keeps it, and its place in there.
    places: HashMap<Key, (usize, usize)>,
}

/// What one shard keeps under one name.
#[derive(Debug)]
struct Part {
    shard: ShardId,
    /// Its name; none once it was released, or if none of its keys had a value.
    pin: Option<v1::Ordinal>,
    /// When it was asked for, on the boot-time clock.
    sent: Duration,
    /// Nothing is read through it from then on, on the boot-time clock.
    end: Mutex<Duration>,
    keys: Vec<Key>,
    /// What the shard said of the keys.
    said: v1::ResolveReply,
    /// None before it was looked at.
    proven: Mutex<Option<Proven>>,
}

/// What of a shard's answer is believed.
#[derive(Clone, Debug)]
struct Proven {
    /// Number of the newest revocation list then.
    revocations: u64,
    /// One for each key.
    values: Arc<[Resolved]>,
}

/// The keys of one call.
struct Asked {
    shard: ShardId,
    bytes: usize,
    keys: Vec<Key>,
}

/// Whole milliseconds of a time that a pin can last.
fn term(duration: Duration) -> Result<u32, PinError> {
    let ms = millis(duration);
    if ms == 0 || duration > PIN_MAX {
        return Err(PinError::Duration { most: PIN_MAX, found: duration });
    }
    Ok(u32::try_from(ms).expect("the longest pin has fewer milliseconds"))
}

/// When a pin is over that was asked for at `sent`.
fn end(sent: Duration, ms: u32) -> Duration {
    let duration = Duration::from_millis(ms.into());
    sent + duration - duration / 100
}

pub(crate) async fn pin(
    shared: &Arc<Shared>,
    namespace: NamespaceId,
    keys: &[Key],
    duration: Duration,
) -> Result<Pin, PinError> {
    let core = shared.core();
    let (ms, deadline) = (term(duration)?, core.deadline()?);
    let calls = group(core, namespace, keys);
    let sent = calls.into_iter().map(|asked| call(core, namespace, asked, ms, deadline));
    let mut pin = Pin { shared: Arc::clone(shared), namespace, parts: Vec::new(), places: HashMap::new() };
    let mut refused = None;
    for answer in join_all(sent).await {
        match answer {
            Ok(part) => {
                let place = pin.parts.len();
                pin.places.extend(part.keys.iter().cloned().zip((0..).map(|index| (place, index))));
                refused = part.prove(core, namespace, deadline).await.err().or(refused);
                pin.parts.push(part);
            }
            Err(error) => refused = Some(error),
        }
    }
    match refused {
        // What was pinned is released when it drops.
        Some(error) => Err(error.into()),
        None => Ok(pin),
    }
}

/// The keys by shard, as many in one call as one pin takes.
fn group(core: &Core, namespace: NamespaceId, keys: &[Key]) -> Vec<Asked> {
    let mut calls: Vec<Asked> = Vec::new();
    for (shard, places) in read::resolve::by_shard(core, namespace, keys) {
        let first = calls.len();
        for key in places.into_iter().map(|place| &keys[place]) {
            let length = key.as_bytes().len();
            let has_room =
                |call: &&mut Asked| call.keys.len() < KEYS_PER_PIN_MAX && call.bytes + length <= PIN_KEY_BYTES_MAX;
            match calls[first..].last_mut().filter(has_room) {
                Some(call) => {
                    call.bytes += length;
                    call.keys.push(key.clone());
                }
                None => calls.push(Asked { shard, bytes: length, keys: vec![key.clone()] }),
            }
        }
    }
    calls
}

async fn call(
    core: &Core,
    namespace: NamespaceId,
    asked: Asked,
    ms: u32,
    deadline: Instant,
) -> Result<Part, CallError> {
    let Asked { shard, keys, .. } = asked;
    let seen = core.control.view().read().seen();
    let make = |request| v1::PinRequest {
        shard: shard.0,
        request: Some(request),
        owner: core.writer_bytes.clone(),
        namespace: namespace.0,
        keys: keys.iter().map(|key| Bytes::copy_from_slice(key.as_bytes())).collect(),
        duration_ms: ms,
        seen,
    };
    // Before the first attempt: whichever was executed, it was sent later.
    let sent = core.options.clock.boot();
    let reply = core
        .control
        .command(shard.0, "Pin", make, deadline, |mut meta, request| async move { meta.pin(request).await })
        .await?;
    let mut said = reply.values.unwrap_or_default();
    core.control.heard(shard.0, said.applied_ms, said.changes.take());
    let end = Mutex::new(end(sent, ms.min(said.lease_ms)));
    let nothing = Mutex::new(None);
    Ok(Part { shard, pin: reply.pin, sent, end, keys, said, proven: nothing })
}

impl Pin {
    /// The version of `key` that is pinned; `None` if the key had no value, or was not named.
    #[must_use]
    pub fn version(&self, key: &Key) -> Option<Version> {
        self.known(key).map(|found| found.version)
    }

    /// Bytes of the value of `key` that is pinned.
    #[must_use]
    pub fn payload_bytes(&self, key: &Key) -> Option<u64> {
        self.known(key).map(|found| found.payload_bytes)
    }

    /// How long all of it can still be read, unless it is renewed.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        let ends = self.parts.iter().filter(|part| part.pin.is_some()).map(|part| *part.end.lock());
        ends.min().map_or(Duration::ZERO, |end| end.saturating_sub(self.core().options.clock.boot()))
    }

    /// Reads a pinned value; `None` if its key had none when the pin was made, or was not named.
    ///
    /// # Errors
    /// [`GetError::PinOver`] if the pin was over before the bytes were read and checked; otherwise see [`GetError`].
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Value>, GetError> {
        let keys = [Key::new(key)?];
        let mut results = self.get_many(&keys).await;
        results.pop().unwrap_or(Err(GetError::Call(CallError::Closed)))
    }

    /// Reads many pinned values. One result per key, in their order.
    pub async fn get_many(&self, keys: &[Key]) -> Vec<Result<Option<Value>, GetError>> {
        let (core, began) = (self.core(), Instant::now());
        calls::call(core, "get_pinned", async {
            let found = self.find(keys.iter()).await;
            let items = keys.iter().cloned().zip(found).collect();
            let results = Box::pin(read::get_known(core, self.namespace, items)).await;
            let length = |value: &Option<Value>| value.as_ref().map(|value| value.bytes.len());
            core.counters.meters.got(began.elapsed(), results.iter().map(|it| it.as_ref().map(length)));
            results
        })
        .await
    }

    /// Reads a pinned value straight into the caller's registered memory, as [`Namespace::get_into`](crate::Namespace::get_into) does.
    ///
    /// # Errors
    /// As [`get`](Self::get), and [`GetError::BufferTooSmall`].
    pub async fn get_into(&self, key: impl AsRef<[u8]>, buffer: Buffer) -> (Buffer, Result<Option<Got>, GetError>) {
        let key = match Key::new(key) {
            Ok(key) => key,
            Err(error) => return (buffer, Err(error.into())),
        };
        let mut results = self.get_into_many(vec![(key, buffer)]).await;
        results.pop().expect("one result per item")
    }

    /// The same for many values. One result per item, in their order.
    pub async fn get_into_many(&self, items: Vec<(Key, Buffer)>) -> Vec<(Buffer, Result<Option<Got>, GetError>)> {
        let (core, began) = (self.core(), Instant::now());
        calls::call(core, "get_pinned", async {
            let found = self.find(items.iter().map(|(key, _)| key)).await;
            let items = items.into_iter().zip(found).map(|((key, buffer), found)| (key, buffer, found)).collect();
            let results = Box::pin(read::get_known_into(core, self.namespace, items)).await;
            let length = |got: &Option<Got>| got.map(|got| got.len);
            core.counters.meters.got(began.elapsed(), results.iter().map(|(_, it)| it.as_ref().map(length)));
            results
        })
        .await
    }

    /// Lets all of it last at least `duration` from now. A pin never ends earlier than was said.
    ///
    /// # Errors
    /// [`PinError::Over`] if some of it has ended: what was read through it so far was right, what is kept of the rest goes on.
    /// Otherwise see [`PinError`]; then it is renewed in part.
    pub async fn renew(&self, duration: Duration) -> Result<(), PinError> {
        let core = self.core();
        let (ms, deadline) = (term(duration)?, core.deadline()?);
        let work = join_all(self.parts.iter().map(|part| part.renew(core, ms, deadline)));
        calls::call(core, "renew_pin", work).await.into_iter().collect()
    }

    /// Gives up the pin and waits until the shards have let go of it.
    ///
    /// # Errors
    /// [`PinError::Call`] if a shard did not answer: its part ends by itself.
    pub async fn release(mut self) -> Result<(), PinError> {
        let core = self.core();
        let deadline = core.deadline()?;
        let work = join_all(self.parts.iter().map(|part| part.release(core, deadline)));
        let released: Result<(), CallError> = calls::call(core, "release_pin", work).await.into_iter().collect();
        // Nothing is left to be done when it drops.
        self.parts.clear();
        Ok(released?)
    }

    fn core(&self) -> &Arc<Core> {
        self.shared.core()
    }

    /// What was pinned of `key`.
    fn known(&self, key: &Key) -> Option<Arc<Found>> {
        let (part, place) = *self.places.get(key)?;
        match self.parts[part].proven.lock().as_ref()?.values.get(place)? {
            Ok(found) => found.clone(),
            Err(_) => None,
        }
    }

    /// Where the values of these keys are, each to be read until its part is over.
    async fn find(&self, keys: impl Iterator<Item = &Key>) -> Vec<Resolved> {
        let core = self.core();
        let proven = match core.deadline() {
            Ok(deadline) => join_all(self.parts.iter().map(|part| part.prove(core, self.namespace, deadline))).await,
            Err(error) => vec![Err(error); self.parts.len()],
        };
        let find = |key: &Key| {
            let Some((part, place)) = self.places.get(key) else { return Ok(None) };
            let values = proven[*part].clone()?;
            let lease_end = *self.parts[*part].end.lock();
            let renewed = |found: Arc<Found>| Arc::new(Found { lease_end, ..(*found).clone() });
            values[*place].clone().map(|found| found.map(renewed))
        };
        keys.map(find).collect()
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let parts: Vec<Part> = self.parts.drain(..).filter(|part| part.pin.is_some()).collect();
        if parts.is_empty() {
            return;
        }
        let core = Arc::clone(self.core());
        let deadline = Instant::now() + core.options.timeout;
        let tasks = core.tasks.clone();
        self.shared.runtime().spawn(tasks.track_future(async move {
            for outcome in join_all(parts.iter().map(|part| part.release(&core, deadline))).await {
                if let Err(error) = outcome {
                    tracing::debug!(%error, "a pin was not released: it ends by itself");
                }
            }
        }));
    }
}

impl Part {
    /// What is believed of the shard's answer under the newest revocation list, one for each key.
    async fn prove(
        &self,
        core: &Core,
        namespace: NamespaceId,
        deadline: Instant,
    ) -> Result<Arc<[Resolved]>, CallError> {
        let revocations = core.control.view().read().revocations();
        if let Some(proven) = self.proven.lock().as_ref().filter(|proven| proven.revocations >= revocations) {
            return Ok(Arc::clone(&proven.values));
        }
        let (keys, end): (Vec<&Key>, _) = (self.keys.iter().collect(), *self.end.lock());
        let values = read::resolve::believe(core, namespace, &keys, &self.said, (self.sent, end), deadline).await?;
        let values: Arc<[Resolved]> = values.into();
        *self.proven.lock() = Some(Proven { revocations, values: Arc::clone(&values) });
        Ok(values)
    }

    async fn renew(&self, core: &Core, ms: u32, deadline: Instant) -> Result<(), PinError> {
        if self.pin.is_none() {
            return Ok(());
        }
        let shard = self.shard.0;
        let make = |request| v1::RenewPinRequest {
            shard,
            request: Some(request),
            owner: core.writer_bytes.clone(),
            pin: self.pin,
            duration_ms: ms,
        };
        let sent = core.options.clock.boot();
        let send = |mut meta: crate::control::Meta, request| async move { meta.renew_pin(request).await };
        let reply = core.control.command(shard, "RenewPin", make, deadline, send).await?;
        core.control.heard(shard, reply.applied_ms, None);
        let renewed = end(sent, ms.min(reply.duration_ms));
        let mut end = self.end.lock();
        *end = renewed.max(*end);
        Ok(())
    }

    async fn release(&self, core: &Core, deadline: Instant) -> Result<(), CallError> {
        if self.pin.is_none() {
            return Ok(());
        }
        let shard = self.shard.0;
        let request = v1::ReleasePinRequest { shard, owner: core.writer_bytes.clone(), pin: self.pin };
        let send = |mut meta: crate::control::Meta, request| async move { meta.release_pin(request).await };
        let reply = core.control.ask(shard, "ReleasePin", &request, deadline, send).await?;
        core.control.heard(shard, reply.applied_ms, None);
        Ok(())
    }
}

impl From<CallError> for PinError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused(refusal) => match *refusal {
                Refusal::UnknownPin(_) => Self::Over,
                Refusal::TooManyRequests(it) => Self::TooMany {
                    resource: it.resource,
                    limit: it.limit,
                    retry_after: Duration::from_millis(it.retry_after_ms),
                },
                other => Self::Call(CallError::Refused(Box::new(other))),
            },
            other => Self::Call(other),
        }
    }
}
