//! The database under the logs: two ordered trees of bytes, written in batches. In a folder it is sled's; in a simulated world it
//! lies in memory, with a line between what is synced and what is not.
//! Decides nothing; `keys.rs` owns the layout, `log.rs` the order of writes.

use std::fs::File;
use std::io;
use std::ops::RangeInclusive;

use parking_lot::Mutex;
use sled::IVec;

use super::journal::Journal;

/// Writes in order. Those that remove something are recovered together or not at all; of others a prefix may be.
#[derive(Debug, Default, Clone)]
pub(crate) struct Batch(Vec<(IVec, Option<IVec>)>);

impl Batch {
    pub(crate) fn insert(&mut self, key: impl Into<IVec>, value: impl Into<IVec>) {
        self.0.push((key.into(), Some(value.into())));
    }

    pub(crate) fn remove(&mut self, key: impl Into<IVec>) {
        self.0.push((key.into(), None));
    }

    #[cfg(feature = "sim")]
    pub(crate) fn into_writes(self) -> Vec<(IVec, Option<IVec>)> {
        self.0
    }
}

/// One ordered tree.
pub(crate) enum Tree {
    Sled(sled::Tree),
    #[cfg(feature = "sim")]
    Memory(crate::sim::disk::MemoryTree),
}

impl Tree {
    pub(crate) fn get(&self, key: impl AsRef<[u8]>) -> io::Result<Option<IVec>> {
        match self {
            Self::Sled(tree) => Ok(tree.get(key)?),
            #[cfg(feature = "sim")]
            Self::Memory(tree) => tree.get(key.as_ref()),
        }
    }

    pub(crate) fn insert(&self, key: impl AsRef<[u8]>, value: impl Into<IVec>) -> io::Result<()> {
        let mut batch = Batch::default();
        batch.insert(key.as_ref(), value);
        self.apply(batch)
    }

    pub(crate) fn apply(&self, batch: Batch) -> io::Result<()> {
        match self {
            Self::Sled(tree) if batch.0.iter().all(|(_, value)| value.is_some()) => {
                // For a batch of its own sled would write its buffer out twice, through all threads of its pool.
                batch.0.into_iter().try_for_each(|(key, value)| {
                    tree.insert(key, value.expect("just looked"))?;
                    Ok(())
                })
            }
            Self::Sled(tree) => {
                let mut writes = sled::Batch::default();
                for (key, value) in batch.0 {
                    match value {
                        Some(value) => writes.insert(key, value),
                        None => writes.remove(key),
                    }
                }
                Ok(tree.apply_batch(writes)?)
            }
            #[cfg(feature = "sim")]
            Self::Memory(tree) => tree.apply(batch),
        }
    }

    /// Keys and values in order, from either end.
    pub(crate) fn range<const N: usize>(&self, keys: RangeInclusive<[u8; N]>) -> Range {
        match self {
            Self::Sled(tree) => Range::Sled(tree.range(keys)),
            #[cfg(feature = "sim")]
            Self::Memory(tree) => Range::Memory(tree.range(keys.start(), keys.end())),
        }
    }

    /// Keys in order, from either end.
    pub(crate) fn keys<const N: usize>(
        &self,
        keys: RangeInclusive<[u8; N]>,
    ) -> impl DoubleEndedIterator<Item = io::Result<IVec>> {
        self.range(keys).map(|item| item.map(|(key, _)| key))
    }
}

type Item = io::Result<(IVec, IVec)>;

/// An iterator over a part of a tree.
#[cfg_attr(feature = "sim", expect(clippy::large_enum_variant, reason = "the large one is the one of production"))]
pub(crate) enum Range {
    Sled(sled::Iter),
    #[cfg(feature = "sim")]
    Memory(std::vec::IntoIter<Item>),
}

impl Iterator for Range {
    type Item = Item;

    fn next(&mut self) -> Option<Item> {
        match self {
            Self::Sled(items) => items.next().map(|item| Ok(item?)),
            #[cfg(feature = "sim")]
            Self::Memory(items) => items.next(),
        }
    }
}

impl DoubleEndedIterator for Range {
    fn next_back(&mut self) -> Option<Item> {
        match self {
            Self::Sled(items) => items.next_back().map(|item| Ok(item?)),
            #[cfg(feature = "sim")]
            Self::Memory(items) => items.next_back(),
        }
    }
}

/// What the trees lie on.
pub(crate) enum Medium {
    Folder {
        /// What makes writes durable. Ends before the database does: its settler holds on to it.
        journal: Mutex<Journal>,
        db: sled::Db,
        _lock: File,
    },
    #[cfg(feature = "sim")]
    Memory,
}

impl Medium {
    /// Leaves the database's threads nothing to do that would keep its file open. Nothing depends on what they wrote: the journal has it.
    pub(crate) fn come_to_rest(&self) {
        match self {
            Self::Folder { db, .. } => {
                if let Err(error) = db.flush() {
                    tracing::warn!(%error, "the log database could not be flushed at its end");
                }
            }
            #[cfg(feature = "sim")]
            Self::Memory => {}
        }
    }
}
