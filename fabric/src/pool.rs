//! Registered memory in pieces: a [`Pool`] is the window of bytes in flight, a [`Span`] is the unique owner of a part of it.
//!
//! Decides who waits when the window is full (first come, first served, so a large span is not starved by small ones) and who may
//! look at the bytes. Leaves registration to the endpoints that a pool is used with.
//!
//! A span's bytes are borrowed in place, which [`Memory`] does not allow, because nobody else can reach them:
//!
//! - A pool's memory is registered with [`Access::Local`](crate::Access::Local) alone and never given out, so no peer can name it
//!   and no other operation can use it. What was checked in place stays as it was checked.
//! - An operation takes an `Arc` of the span and lets go of it before its outcome is told, also if its future is dropped. Bytes
//!   need `&mut Span` (or the span itself), which an `Arc` gives to its last owner only: `Arc::get_mut` and `Arc::try_unwrap`
//!   succeed once all operations are over.

use crate::{FabricError, Memory};
use bytes::Bytes;
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    fmt,
    ops::{Deref, DerefMut, Range},
    sync::Arc,
};
use tokio::sync::Notify;

/// Spans begin at a multiple of this, so that those who fill neighbouring ones share no cache line.
pub const SPAN_ALIGN: usize = 64;

/// Which ranges are free, by start. Neighbours are always joined.
#[derive(Debug)]
struct FreeRanges(BTreeMap<usize, usize>);

impl FreeRanges {
    fn new(length: usize) -> Self {
        Self(BTreeMap::from([(0, length)]))
    }

    /// The first free range of `length` bytes.
    fn take(&mut self, length: usize) -> Option<Range<usize>> {
        let (start, free) = self.0.iter().find(|(_, free)| **free >= length).map(|(start, free)| (*start, *free))?;
        self.0.remove(&start);
        if free > length {
            self.0.insert(start + length, free - length);
        }
        Some(start..start + length)
    }

    /// # Panics
    /// If some of it is free already: it would be used twice.
    fn give_back(&mut self, range: Range<usize>) {
        let (mut start, mut end) = (range.start, range.end);
        if let Some((before, length)) = self.0.range(..start).next_back().map(|(start, length)| (*start, *length)) {
            assert!(before + length <= start, "a span is given back once");
            if before + length == start {
                self.0.remove(&before);
                start = before;
            }
        }
        if let Some((after, length)) = self.0.range(range.start..).next().map(|(start, length)| (*start, *length)) {
            assert!(after >= end, "a span is given back once");
            if after == end {
                self.0.remove(&after);
                end = after + length;
            }
        }
        self.0.insert(start, end - start);
    }

    fn total(&self) -> usize {
        self.0.values().sum()
    }
}

/// Memory for local use by operations, handed out in spans.
pub struct Pool {
    memory: Arc<Memory>,
    free: Mutex<FreeRanges>,
    freed: Notify,
    /// Held by whoever waits at the head of the queue.
    turn: tokio::sync::Mutex<()>,
}

/// Some bytes of a pool that nobody else can reach; free again when dropped. See the module for why looking at them is sound.
pub struct Span {
    pool: Arc<Pool>,
    /// Begins and ends at multiples of [`SPAN_ALIGN`].
    range: Range<usize>,
    /// At most as long as `range`.
    length: usize,
}

impl Pool {
    /// A pool of `bytes` bytes, rounded up to a multiple of [`SPAN_ALIGN`]. Pages come when they are first touched.
    ///
    /// # Errors
    /// As [`Memory::allocate`].
    pub fn new(bytes: usize) -> Result<Arc<Self>, FabricError> {
        let Some(bytes) = bytes.checked_next_multiple_of(SPAN_ALIGN) else {
            return Err(FabricError::OutOfRange { start: 0, end: bytes, length: usize::MAX / SPAN_ALIGN * SPAN_ALIGN });
        };
        Ok(Arc::new(Self {
            memory: Memory::allocate(bytes)?,
            free: Mutex::new(FreeRanges::new(bytes)),
            freed: Notify::new(),
            turn: tokio::sync::Mutex::new(()),
        }))
    }

    /// Bytes that it has in all.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.memory.len()
    }

    /// Bytes that no span holds. They need not lie together.
    #[must_use]
    pub fn free_bytes(&self) -> usize {
        self.free.lock().total()
    }

    /// Waits for `length` contiguous bytes, behind all who waited before. The caller bounds the wait; dropping it leaves the queue.
    /// What the bytes hold is what their last owner left there.
    ///
    /// # Errors
    /// [`FabricError::Empty`], and [`FabricError::ExceedsPool`] for more than the whole pool.
    pub async fn take(self: &Arc<Self>, length: usize) -> Result<Span, FabricError> {
        if length == 0 {
            return Err(FabricError::Empty { what: "a span" });
        }
        if length > self.capacity() {
            return Err(FabricError::ExceedsPool { asked: length, capacity: self.capacity() });
        }
        let _turn = self.turn.lock().await;
        if let Some(span) = self.find(length) {
            return Ok(span);
        }
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // Listen before looking: what is freed in between must not be missed.
            freed.as_mut().enable();
            if let Some(span) = self.find(length) {
                return Ok(span);
            }
            freed.await;
        }
    }

    /// A span of `length` bytes, if it can be had now without passing those who wait.
    #[must_use]
    pub fn try_take(self: &Arc<Self>, length: usize) -> Option<Span> {
        let _turn = self.turn.try_lock().ok()?;
        if length == 0 || length > self.capacity() { None } else { self.find(length) }
    }

    fn find(self: &Arc<Self>, length: usize) -> Option<Span> {
        let range = self.free.lock().take(length.next_multiple_of(SPAN_ALIGN))?;
        Some(Span { pool: Arc::clone(self), range, length })
    }

    /// Only for registration with local access.
    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

impl Span {
    /// The bytes. Not to be had while an operation uses them, since that holds an `Arc` of the span.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the range is inside the pool's mapping, which the pool keeps; `&mut self` of a span outside of any operation is
        // the only way to these bytes (see the module).
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.length) }
    }

    /// Length in bytes, as it was asked for.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.length
    }

    /// The pool that it is of.
    #[must_use]
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Two neighbours, the first with `at` bytes.
    ///
    /// # Errors
    /// Gives the span back as it was unless `at` is a multiple of [`SPAN_ALIGN`] that leaves bytes on both sides.
    pub fn split(mut self, at: usize) -> Result<(Self, Self), Self> {
        if at == 0 || at >= self.length || !at.is_multiple_of(SPAN_ALIGN) {
            return Err(self);
        }
        let middle = self.range.start + at;
        let second = Self { pool: Arc::clone(&self.pool), range: middle..self.range.end, length: self.length - at };
        self.range.end = middle;
        self.length = at;
        Ok((self, second))
    }

    /// One span again of two that lie next to each other without a gap, for instance since they were split.
    ///
    /// # Errors
    /// Gives both back if they do not.
    pub fn join(mut self, mut next: Self) -> Result<Self, (Self, Self)> {
        let adjacent = Arc::ptr_eq(&self.pool, &next.pool)
            && self.range.end == next.range.start
            && self.length == self.range.len();
        if !adjacent {
            return Err((self, next));
        }
        self.length += next.length;
        self.range.end = next.range.end;
        // What `next` gives back when it drops is nothing.
        next.range.start = next.range.end;
        Ok(self)
    }

    /// The bytes as a value that can be cloned and cut without a copy. They stay in the pool, which is that much smaller until
    /// the last of them is dropped.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(Frozen(self))
    }

    /// The place of `range`, counted from the start of this span, in the pool's memory.
    pub(crate) fn place(&self, range: &Range<usize>) -> Result<Range<usize>, FabricError> {
        if range.start > range.end || range.end > self.length {
            return Err(FabricError::OutOfRange { start: range.start, end: range.end, length: self.length });
        }
        Ok(self.range.start + range.start..self.range.start + range.end)
    }

    fn start(&self) -> *mut u8 {
        self.pool.memory.start().wrapping_add(self.range.start)
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if !self.range.is_empty() {
            self.pool.free.lock().give_back(self.range.clone());
            self.pool.freed.notify_waiters();
        }
    }
}

/// A span outside of any operation, dereferencing to its bytes: no operation takes it before it is a [`Span`] again.
#[derive(Debug)]
pub struct SoleSpan(Span);

impl From<Span> for SoleSpan {
    fn from(span: Span) -> Self {
        Self(span)
    }
}

impl From<SoleSpan> for Span {
    fn from(sole: SoleSpan) -> Self {
        sole.0
    }
}

impl Deref for SoleSpan {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the range is inside the pool's mapping, which the pool keeps; an operation takes an `Arc` of the span, which nobody has
        // while it is in here, so only `&mut self` changes these bytes.
        unsafe { std::slice::from_raw_parts(self.0.start(), self.0.length) }
    }
}

impl DerefMut for SoleSpan {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.bytes()
    }
}

/// A span that is not written any more.
struct Frozen(Span);

impl AsRef<[u8]> for Frozen {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the range is inside the pool's mapping, which the pool keeps; the span was moved in here, outside of any
        // operation, and is never borrowed mutably again.
        unsafe { std::slice::from_raw_parts(self.0.start(), self.0.length) }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("capacity", &self.capacity()).field("free", &self.free_bytes()).finish()
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Span").field("range", &self.range).field("length", &self.length).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_taken_never_overlap_and_all_come_back(sizes in prop::collection::vec((1usize..40, any::<bool>()), 1..200)) {
            let mut free = FreeRanges::new(256);
            let mut taken: Vec<Range<usize>> = Vec::new();
            for (size, give_back) in sizes {
                if give_back && !taken.is_empty() {
                    free.give_back(taken.swap_remove(size % taken.len()));
                } else if let Some(range) = free.take(size) {
                    prop_assert!(range.end <= 256 && taken.iter().all(|held| held.end <= range.start || range.end <= held.start));
                    taken.push(range);
                }
            }
            for range in taken {
                free.give_back(range);
            }
            prop_assert_eq!(free.0, BTreeMap::from([(0, 256)]));
        }
    }

    #[tokio::test]
    async fn whoever_waits_first_is_served_first_even_if_others_would_fit() {
        let pool = Pool::new(1024).unwrap();
        let (one, two) = (pool.take(512).await.unwrap(), pool.take(448).await.unwrap());
        let mut large = Box::pin(pool.take(1024));
        assert!((&mut large).now_or_never().is_none());
        let mut small = Box::pin(pool.take(64));
        assert!((&mut small).now_or_never().is_none(), "64 bytes are free, but another one waits");
        assert!(pool.try_take(64).is_none(), "nor does this one pass");
        drop(one);
        assert!((&mut large).now_or_never().is_none());
        drop(two);
        let whole = (&mut large).now_or_never().expect("all is free").unwrap();
        assert!((&mut small).now_or_never().is_none());
        drop((whole, large));
        assert_eq!((&mut small).now_or_never().expect("all is free").unwrap().len(), 64);
    }

    #[tokio::test]
    async fn a_dropped_wait_leaves_the_queue() {
        let pool = Pool::new(128).unwrap();
        let held = pool.take(128).await.unwrap();
        let mut waits = Box::pin(pool.take(128));
        assert!((&mut waits).now_or_never().is_none());
        drop(waits);
        drop(held);
        assert!(pool.take(128).now_or_never().is_some());
    }

    #[tokio::test]
    async fn what_can_never_be_had_is_refused_at_once() {
        let pool = Pool::new(100).unwrap();
        assert_eq!(pool.capacity(), 128);
        assert_eq!(pool.take(129).await.unwrap_err(), FabricError::ExceedsPool { asked: 129, capacity: 128 });
        assert_eq!(
            pool.take(usize::MAX).await.unwrap_err(),
            FabricError::ExceedsPool { asked: usize::MAX, capacity: 128 }
        );
        assert_eq!(pool.take(0).await.unwrap_err(), FabricError::Empty { what: "a span" });
        assert!(pool.try_take(129).is_none() && pool.try_take(0).is_none());
        assert!(Pool::new(usize::MAX).is_err());
    }

    #[test]
    fn each_byte_belongs_to_one_span() {
        let pool = Pool::new(4096).unwrap();
        let mut spans: Vec<Span> = std::iter::from_fn(|| pool.try_take(100)).collect();
        assert_eq!(spans.len(), 32);
        for (mark, span) in (1u8..).zip(&mut spans) {
            span.bytes().fill(mark);
        }
        for (mark, span) in (1u8..).zip(&mut spans) {
            assert_eq!(span.bytes(), [mark; 100]);
        }
        drop(spans);
        assert_eq!(pool.free_bytes(), 4096);
    }

    #[test]
    fn a_span_is_split_and_joined_and_all_of_it_comes_back() {
        let pool = Pool::new(512).unwrap();
        let mut span = pool.try_take(300).unwrap();
        let marks: Vec<u8> = (0..300u32).map(|i| i.to_le_bytes()[0]).collect();
        span.bytes().copy_from_slice(&marks);
        for bad in [0, 65, 300, 320] {
            span = span.split(bad).unwrap_err();
        }
        let (mut first, mut second) = span.split(128).unwrap();
        assert_eq!((first.bytes().len(), second.bytes().len()), (128, 172));
        assert_eq!((first.bytes(), second.bytes()), (&mut marks[..128].to_vec()[..], &mut marks[128..].to_vec()[..]));
        let (second, first) = second.join(first).unwrap_err();
        let mut whole = first.join(second).unwrap();
        assert_eq!(whole.bytes(), marks);
        let other = pool.try_take(64).unwrap();
        let (whole, other) = whole.join(other).expect_err("300 bytes leave a gap before the next span");
        drop((whole, other));
        assert_eq!(pool.free_bytes(), 512);
        assert_eq!(pool.try_take(512).unwrap().len(), 512);
    }

    #[test]
    fn bytes_of_a_span_hold_its_place_until_the_last_is_dropped() {
        let pool = Pool::new(256).unwrap();
        let mut span = pool.try_take(200).unwrap();
        span.bytes().copy_from_slice(&[7; 200]);
        let bytes = span.into_bytes();
        let part = bytes.slice(10..20);
        drop(bytes);
        assert_eq!((part.as_ref(), pool.free_bytes()), ([7; 10].as_slice(), 0));
        drop(part);
        assert_eq!(pool.free_bytes(), 256);
    }
}
