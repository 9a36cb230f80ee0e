//! A namespace in use: put, get, probe, delete.
//!
//! Decides the shape of the public calls and their rules; `write/` and `read/` do the work.

use crate::{
    buffers::Buffer,
    calls,
    client::Shared,
    error::{CallError, DeleteError, GetError, PinError, PutError},
    pins::{self, Pin},
    read, remove,
    view::NamespaceInfo,
    write::{self, Reserved, ReservedMany},
};
use bytes::Bytes;
use quarry_proto::v1;
use quarry_wire::{
    ids::{Incarnation, NodeId},
    key::Key,
    version::Version,
};
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// How a put takes effect on its key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PutMode {
    /// Only if the key does not exist.
    #[default]
    Create,
    /// Whatever is there, if it is older.
    Replace,
    /// Only if the key is in this version, or absent for `None`.
    Compare(Option<Version>),
}

impl From<PutMode> for v1::PutMode {
    fn from(mode: PutMode) -> Self {
        use v1::put_mode::Kind;
        let (kind, expected) = match mode {
            PutMode::Create => (Kind::Create, None),
            PutMode::Replace => (Kind::Replace, None),
            PutMode::Compare(expected) => (Kind::Compare, expected),
        };
        Self { kind: kind.into(), expected: expected.map(Into::into) }
    }
}

/// One value to write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PutItem {
    /// Its key.
    pub key: Key,
    /// The value.
    pub bytes: Bytes,
    /// How it takes effect.
    pub mode: PutMode,
}

impl PutItem {
    /// Writes a key that does not exist yet.
    pub fn create(key: Key, bytes: impl Into<Bytes>) -> Self {
        Self { key, bytes: bytes.into(), mode: PutMode::Create }
    }
    /// Writes a key whatever is there.
    pub fn replace(key: Key, bytes: impl Into<Bytes>) -> Self {
        Self { key, bytes: bytes.into(), mode: PutMode::Replace }
    }
}

/// A value that was read and passed every check.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Value {
    /// Its bytes.
    pub bytes: Bytes,
    /// Which write it is.
    pub version: Version,
}

/// A value that was read into a buffer and passed every check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Got {
    /// Its bytes, at the start of the buffer.
    pub len: usize,
    /// Which write it is.
    pub version: Version,
}

/// What is known of a value without reading it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stat {
    /// Which write it is.
    pub version: Version,
    /// Its bytes.
    pub payload_bytes: u64,
    /// CRC-32C of its bytes.
    pub payload_crc: u32,
    /// Its copies, at least one; each is there by its holder's signed word.
    pub copies: Vec<CopyStat>,
}

/// Where a copy is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyStat {
    /// Its holder.
    pub node: NodeId,
    /// Which region of the holder, counted from 0.
    pub region: u32,
    /// The region's life: it is raised when the region's contents were lost.
    pub incarnation: Incarnation,
    /// Where its frame begins in the region, in bytes.
    pub offset: u64,
}

/// An entry of a list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    /// The key.
    pub key: Key,
    /// The version that was current.
    pub version: Version,
    /// Bytes of its value.
    pub payload_bytes: u64,
    /// CRC-32C of its value.
    pub payload_crc: u32,
    /// How many copies there are.
    pub copies: u32,
}

/// Some keys in order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Page {
    /// The entries, by the order of their keys' bytes.
    pub entries: Vec<Listed>,
    /// Where the next page begins, if there is one: behind this key.
    pub after: Option<Key>,
}

/// A namespace of a cluster. Cloning is cheap; clones share everything, with each other and with their [`Client`](crate::Client).
///
/// # Dropped futures
///
/// - A put that is dropped before it answered may take effect or not, as a whole: a value becomes visible only by its commit, and that names
///   bytes that were completely written. A put_many that is dropped may leave some items written and others not.
/// - A get, delete or resolve that is dropped leaves nothing behind; a delete may still take effect.
/// - Memory that the network may still touch is never given back early: it belongs to the operation until that has ended.
///
/// # Order
///
/// Two writes of one key within one `put_many` take effect in no particular order. A get that begins after a put, replace or delete of the
/// same client answered sees that write or a later one. Of *other* clients' writes a get may miss those of the last seconds, as long as its
/// lease lasts (see [`Options::lease`](crate::Options::lease)); [`fresh`](Self::fresh) never does.
#[derive(Clone, Debug)]
pub struct Namespace {
    shared: Arc<Shared>,
    info: Arc<NamespaceInfo>,
    fresh: bool,
}

impl Namespace {
    pub(crate) fn new(shared: Arc<Shared>, info: NamespaceInfo) -> Self {
        Self { shared, info: Arc::new(info), fresh: false }
    }

    /// What the directory says about it.
    #[must_use]
    pub fn info(&self) -> &NamespaceInfo {
        &self.info
    }

    /// The same namespace, whose gets ask the shard each time: they see every write that was acknowledged before they began.
    #[must_use]
    pub fn fresh(&self) -> Self {
        Self { fresh: true, ..self.clone() }
    }

    /// Writes a value under a key that does not exist yet. Answers the version, once the value has its copies.
    ///
    /// # Errors
    /// [`PutError::Exists`] if the key exists; otherwise see [`PutError`].
    pub async fn put(&self, key: impl AsRef<[u8]>, bytes: impl Into<Bytes>) -> Result<Version, PutError> {
        self.put_with(key, bytes, PutMode::Create).await
    }

    /// Writes a value in this mode.
    ///
    /// # Errors
    /// See [`PutError`].
    pub async fn put_with(
        &self,
        key: impl AsRef<[u8]>,
        bytes: impl Into<Bytes>,
        mode: PutMode,
    ) -> Result<Version, PutError> {
        let item = PutItem { key: Key::new(key)?, bytes: bytes.into(), mode };
        let mut results = self.put_many(vec![item]).await;
        results.pop().unwrap_or(Err(PutError::Call(CallError::Closed)))
    }

    /// Writes many values. One result per item, in their order; one item's failure does not touch the others.
    pub async fn put_many(&self, items: Vec<PutItem>) -> Vec<Result<Version, PutError>> {
        let (core, began) = (self.shared.core(), Instant::now());
        let lengths: Vec<usize> = items.iter().map(|item| item.bytes.len()).collect();
        calls::call(core, "put", async {
            let results = Box::pin(write::put_many(core, self.info.id, items)).await;
            core.counters.meters.put(began.elapsed(), &lengths, &results);
            results
        })
        .await
    }

    /// A frame for a payload of `payload_bytes` bytes, in the memory that it will be written from: whoever makes the value there saves a copy.
    /// It takes its place in the window ([`Options::window_bytes`](crate::Options::window_bytes)) until it was put or is dropped.
    ///
    /// # Errors
    /// [`PutError::TooLarge`], [`PutError::Deadline`] if there was no room in the window in time, [`PutError::InvalidKey`].
    pub async fn reserve(&self, key: impl AsRef<[u8]>, payload_bytes: usize) -> Result<Reserved, PutError> {
        let wanted = [(Key::new(key)?, payload_bytes)];
        let one = write::reserve_many(&self.shared, self.info.id, &wanted).await?;
        Ok(Reserved::try_from(one).expect("one frame was asked for"))
    }

    /// Frames for many payloads, as [`reserve`](Self::reserve): those of one size lie side by side and are written together. If one cannot be had,
    /// there are none.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve), and [`PutError::WindowExceeded`] if they are more than the window can ever hold.
    pub async fn reserve_many(&self, wanted: &[(Key, usize)]) -> Result<ReservedMany, PutError> {
        write::reserve_many(&self.shared, self.info.id, wanted).await
    }

    /// Reads a value; `None` if the key does not exist.
    ///
    /// # Errors
    /// See [`GetError`]. Bytes that did not pass every check are never shown.
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Value>, GetError> {
        let keys = [Key::new(key)?];
        let mut results = self.get_many(&keys).await;
        results.pop().unwrap_or(Err(GetError::Call(CallError::Closed)))
    }

    /// Reads many values. One result per key, in their order.
    pub async fn get_many(&self, keys: &[Key]) -> Vec<Result<Option<Value>, GetError>> {
        let (core, began) = (self.shared.core(), Instant::now());
        calls::call(core, "get", async {
            let results = Box::pin(read::get_many(core, self.info.id, keys, self.fresh)).await;
            let length = |value: &Option<Value>| value.as_ref().map(|value| value.bytes.len());
            core.counters.meters.got(began.elapsed(), results.iter().map(|it| it.as_ref().map(length)));
            results
        })
        .await
    }

    /// Reads a value straight into the caller's registered memory; `None` if the key does not exist. Nothing is copied on the way: the payload
    /// lands in the buffer and is checked there.
    ///
    /// Unless it answers `Ok(Some(_))`, the buffer's bytes are **undefined**: bytes that did not pass the checks, or only parts, may lie in it.
    /// A call that is dropped gives the buffer back as soon as the network has let go of it.
    ///
    /// ```no_run
    /// # async fn example(client: quarry_client::Client) -> Result<(), Box<dyn std::error::Error>> {
    /// let blocks = client.namespace("kv").await?;
    /// let buffers = client.buffers(64 << 20)?;
    /// let buffer = buffers.take(1 << 20).await?;
    /// let (mut buffer, result) = blocks.get_into("layer-7/block-42", buffer).await;
    /// if let Some(got) = result? {
    ///     let payload = &buffer.bytes()[..got.len];
    ///     assert_eq!(payload.len(), got.len);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`GetError::BufferTooSmall`] with the length that is needed; otherwise see [`GetError`].
    pub async fn get_into(&self, key: impl AsRef<[u8]>, buffer: Buffer) -> (Buffer, Result<Option<Got>, GetError>) {
        let key = match Key::new(key) {
            Ok(key) => key,
            Err(error) => return (buffer, Err(error.into())),
        };
        let mut results = self.get_into_many(vec![(key, buffer)]).await;
        results.pop().expect("one result per item")
    }

    /// The same for many values, several of them on their way at once. One result per item, in their order. Small values that lie next to
    /// each other arrive together and are copied once.
    pub async fn get_into_many(&self, items: Vec<(Key, Buffer)>) -> Vec<(Buffer, Result<Option<Got>, GetError>)> {
        let (core, began) = (self.shared.core(), Instant::now());
        calls::call(core, "get_into", async {
            let results = Box::pin(read::get_into_many(core, self.info.id, items, self.fresh)).await;
            let length = |got: &Option<Got>| got.map(|got| got.len);
            core.counters.meters.got(began.elapsed(), results.iter().map(|(_, it)| it.as_ref().map(length)));
            results
        })
        .await
    }

    /// Whether a key has a value. Opens no memory and is no use of the value: no lease, nothing is read.
    ///
    /// # Errors
    /// See [`GetError`].
    pub async fn exists(&self, key: impl AsRef<[u8]>) -> Result<bool, GetError> {
        Ok(self.exists_many(&[Key::new(key)?]).await? == 1)
    }

    /// How many of `keys` have a value before the first that has none: the length of the leading run. One call per shard (and 4,096 keys),
    /// all at once; as fresh as a [`fresh`](Self::fresh) get.
    ///
    /// # Errors
    /// [`GetError::Call`] if a shard did not answer that has the next key of the run.
    pub async fn exists_many(&self, keys: &[Key]) -> Result<usize, GetError> {
        let core = self.shared.core();
        let run = Box::pin(read::probe::leading_run(core, self.info.id, keys));
        Ok(calls::call(core, "exists", run).await?)
    }

    /// What is known of a value without reading it; `None` if the key does not exist. As fresh as a [`fresh`](Self::fresh) get.
    ///
    /// # Errors
    /// See [`GetError`].
    pub async fn stat(&self, key: impl AsRef<[u8]>) -> Result<Option<Stat>, GetError> {
        let mut results = self.stat_many(&[Key::new(key)?]).await;
        results.pop().unwrap_or(Err(GetError::Call(CallError::Closed)))
    }

    /// The same for many keys, one call per shard. One result per key, in their order.
    pub async fn stat_many(&self, keys: &[Key]) -> Vec<Result<Option<Stat>, GetError>> {
        let core = self.shared.core();
        calls::call(core, "stat", Box::pin(read::probe::stat_many(core, self.info.id, keys))).await
    }

    /// Up to `limit` keys (1 to 4,096; what lies outside is taken as the nearest) that begin with `prefix`, in the order of their bytes,
    /// behind `after`. A page may hold fewer than `limit` entries though there are more: [`Page::after`] tells.
    ///
    /// What a page says of one shard's keys was so at one moment, not before the call began; keys of different shards (see
    /// [`Key::shard`]) may be seen at different moments, and pages at others again.
    ///
    /// # Errors
    /// [`GetError::InvalidKey`] if the prefix is longer than any key; [`GetError::Call`] if a shard does not answer.
    pub async fn list(&self, prefix: impl AsRef<[u8]>, after: Option<&Key>, limit: usize) -> Result<Page, GetError> {
        let core = self.shared.core();
        calls::call(core, "list", Box::pin(read::probe::list(core, self.info.id, prefix.as_ref(), after, limit))).await
    }

    /// Pins the current values of `keys` for `duration` (at most ten minutes at a time): until then they can be read through the pin as they
    /// are now, also when their keys are replaced or deleted meanwhile, and for longer if the pin is renewed. For reads that take longer than
    /// leases last; others need none. Keys of one shard are pinned at one moment.
    ///
    /// ```no_run
    /// # async fn example(client: quarry_client::Client) -> Result<(), Box<dyn std::error::Error>> {
    /// use quarry_client::Key;
    /// use std::time::Duration;
    ///
    /// let weights = client.namespace("weights").await?;
    /// let keys = [Key::new("layer-0")?, Key::new("layer-1")?];
    /// let pin = weights.pin(&keys, Duration::from_secs(60)).await?;
    /// for key in &keys {
    ///     let value = pin.get(key).await?.expect("it had a value when it was pinned");
    ///     assert_eq!(Some(value.version), pin.version(key));
    ///     pin.renew(Duration::from_secs(60)).await?;
    /// }
    /// pin.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`PinError::TooMany`] if the shard or this client holds too many pins already; otherwise see [`PinError`]. Then nothing is pinned.
    pub async fn pin(&self, keys: &[Key], duration: Duration) -> Result<Pin, PinError> {
        let work = Box::pin(pins::pin(&self.shared, self.info.id, keys, duration));
        calls::call(self.shared.core(), "pin", work).await
    }

    /// Deletes a key. Answers the version that was deleted, or `None` if there was none.
    ///
    /// # Errors
    /// See [`DeleteError`].
    pub async fn delete(&self, key: impl AsRef<[u8]>) -> Result<Option<Version>, DeleteError> {
        self.delete_with(key, None).await
    }

    /// Deletes a key if it is in version `expected` (any, if that is `None`).
    ///
    /// # Errors
    /// [`DeleteError::CompareFailed`] if it is in another version; otherwise see [`DeleteError`].
    pub async fn delete_with(
        &self,
        key: impl AsRef<[u8]>,
        expected: Option<Version>,
    ) -> Result<Option<Version>, DeleteError> {
        let items = vec![(Key::new(key)?, expected)];
        let mut results = self.delete_items(items).await;
        results.pop().unwrap_or(Err(DeleteError::Call(CallError::Closed)))
    }

    /// Deletes many keys, whatever their versions. One result per key, in their order.
    pub async fn delete_many(&self, keys: &[Key]) -> Vec<Result<Option<Version>, DeleteError>> {
        let items = keys.iter().map(|key| (key.clone(), None)).collect();
        self.delete_items(items).await
    }

    async fn delete_items(&self, items: Vec<(Key, Option<Version>)>) -> Vec<Result<Option<Version>, DeleteError>> {
        let core = self.shared.core();
        calls::call(core, "delete", Box::pin(remove::delete_many(core, self.info.id, items))).await
    }
}
