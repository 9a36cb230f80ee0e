//! Registered memory that frames pass through: one arena per direction, whose size is the window of bytes in flight.
//!
//! Decides who waits when the window is full: first come, first served, so a large value is not starved by small ones. A span goes back when
//! its last owner lets go of it: the task that uses it, and the fabric while an operation may still touch it.

use parking_lot::Mutex;
use quarry_fabric::{FabricError, Memory};
use quarry_wire::limits::FRAME_ALIGN;
use std::{collections::BTreeMap, ops::Range, sync::Arc};
use tokio::sync::Notify;

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
}

/// Registered memory in use by one direction.
#[derive(Debug)]
pub(crate) struct Arena {
    memory: Arc<Memory>,
    free: Mutex<FreeRanges>,
    freed: Notify,
    /// Held by whoever waits at the head of the queue.
    turn: tokio::sync::Mutex<()>,
}

/// Some bytes of an arena, free again when dropped.
#[derive(Debug)]
pub(crate) struct Span {
    arena: Arc<Arena>,
    range: Range<usize>,
}

impl Arena {
    pub(crate) fn new(bytes: usize) -> Result<Arc<Self>, FabricError> {
        let bytes = bytes.next_multiple_of(FRAME_ALIGN);
        Ok(Arc::new(Self {
            memory: Memory::allocate(bytes)?,
            free: Mutex::new(FreeRanges::new(bytes)),
            freed: Notify::new(),
            turn: tokio::sync::Mutex::new(()),
        }))
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Waits for `length` contiguous bytes. The caller bounds the wait and asks for at most the whole arena.
    pub(crate) async fn take(self: &Arc<Self>, length: usize) -> Arc<Span> {
        let length = length.next_multiple_of(FRAME_ALIGN);
        assert!(length <= self.memory.len(), "values larger than the window are refused at the door");
        let _turn = self.turn.lock().await;
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // Listen before looking: what is freed in between must not be missed.
            freed.as_mut().enable();
            if let Some(range) = self.free.lock().take(length) {
                return Arc::new(Span { arena: Arc::clone(self), range });
            }
            freed.await;
        }
    }
}

impl Span {
    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.arena.memory
    }
    pub(crate) fn start(&self) -> usize {
        self.range.start
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        self.arena.free.lock().give_back(self.range.clone());
        self.arena.freed.notify_waiters();
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
        let arena = Arena::new(1024).unwrap();
        let (one, two) = (arena.take(512).await, arena.take(448).await);
        let mut large = Box::pin(arena.take(1024));
        assert!((&mut large).now_or_never().is_none());
        let mut small = Box::pin(arena.take(64));
        assert!((&mut small).now_or_never().is_none(), "64 bytes are free, but another one waits");
        drop(one);
        assert!((&mut large).now_or_never().is_none());
        drop(two);
        let whole = (&mut large).now_or_never().expect("all is free");
        assert!((&mut small).now_or_never().is_none());
        drop((whole, large));
        assert!((&mut small).now_or_never().is_some());
    }

    #[tokio::test]
    async fn a_dropped_wait_leaves_the_queue() {
        let arena = Arena::new(128).unwrap();
        let held = arena.take(128).await;
        let mut waits = Box::pin(arena.take(128));
        assert!((&mut waits).now_or_never().is_none());
        drop(waits);
        drop(held);
        assert!(arena.take(128).now_or_never().is_some());
    }
}
