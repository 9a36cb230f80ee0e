//! The generation of a node's groups: which history of them the node belongs to.
//!
//! Groups that begin again from a backup, or from one survivor of a lost majority, are of the next generation. Nodes of different generations
//! refuse each other, so that what is left of the old history reaches nobody of the new one. The number lies in the folder's FORMAT file.
//! Keeps *It only grows*: a node with a log never changes it; one whose groups were never formed takes the generation of the first caller.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::ids::RaftNodeId;
use crate::store::write_format;

/// The generation of groups that were formed.
pub(crate) const FIRST: u32 = 1;

/// The generation that a node is in, and where that is kept.
pub(crate) struct Generation {
    current: Mutex<u32>,
    folder: Option<(PathBuf, RaftNodeId)>,
}

impl Generation {
    pub(crate) fn of_folder(dir: &Path, node: RaftNodeId, current: u32) -> Arc<Self> {
        Arc::new(Self { current: Mutex::new(current), folder: Some((dir.to_owned(), node)) })
    }

    /// One that no folder keeps.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn of_memory(current: u32) -> Arc<Self> {
        Arc::new(Self { current: Mutex::new(current), folder: None })
    }

    pub(crate) fn get(&self) -> u32 {
        *self.current.lock()
    }

    /// Whether this node talks with one of generation `found`. A blank node enters a higher one by that: the folder says so before anyone is
    /// told (this happens once in a node's life, so that the caller waits for one small file).
    pub(crate) fn accepts(&self, found: u32, is_blank: impl FnOnce() -> bool) -> bool {
        let mut current = self.current.lock();
        if found <= *current || !is_blank() {
            return found == *current;
        }
        if let Some((dir, node)) = &self.folder
            && let Err(error) = write_format(dir, *node, found)
        {
            tracing::error!(%error, found, "the generation of the caller was not taken");
            return false;
        }
        tracing::info!(
            generation = found,
            "this node belongs to no cluster yet and takes the generation of its caller"
        );
        *current = found;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::read_format;

    #[test]
    fn a_blank_node_enters_a_higher_generation_for_good_and_one_with_a_log_never_does() {
        let dir = tempfile::tempdir().unwrap();
        let generation = Generation::of_folder(dir.path(), RaftNodeId(3), FIRST);
        assert!(generation.accepts(FIRST, || false));
        assert!(!generation.accepts(2, || false));
        assert!(generation.accepts(2, || true));
        assert!(!generation.accepts(FIRST, || true), "it only grows");
        let mark = read_format(dir.path()).unwrap().unwrap();
        assert_eq!((mark.node, mark.generation), (RaftNodeId(3), 2));
    }
}
