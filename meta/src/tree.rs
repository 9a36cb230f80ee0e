//! Paths through the Merkle trees of commit batches, when many are wanted at once.
//!
//! `quarry_wire::merkle::path` hashes the whole tree for each leaf; here it is hashed once, and kept for whoever asks next. The tree of
//! RFC 6962 is the one that pairs neighbours level by level and passes an odd last node up unchanged.

use parking_lot::Mutex;
use quarry_meta_state::shard::BatchRef;
use quarry_wire::merkle::{self, Hash};
use std::{collections::HashMap, sync::Arc};

/// Leaves of all trees that are kept; beyond, all are forgotten and hashed again when asked for. Each takes about 64 bytes.
const LEAVES_MAX: usize = 1 << 18;

/// All nodes of a tree.
pub(crate) struct Tree {
    /// Level by level, the leaves first.
    nodes: Vec<Hash>,
    /// Where each level begins.
    levels: Vec<usize>,
}

impl Tree {
    /// The tree over at least one leaf.
    pub(crate) fn over(leaves: &[Hash]) -> Self {
        assert!(!leaves.is_empty(), "a batch has at least one leaf");
        let mut nodes = Vec::with_capacity(2 * leaves.len() + leaves.len().ilog2() as usize + 1);
        nodes.extend_from_slice(leaves);
        let mut levels = vec![0];
        let mut begin = 0;
        while nodes.len() - begin > 1 {
            let end = nodes.len();
            for at in (begin..end).step_by(2) {
                // The root over a pair is their parent, the root over a single node is that node.
                let parent = merkle::root(&nodes[at..end.min(at + 2)]);
                nodes.push(parent);
            }
            levels.push(end);
            begin = end;
        }
        Self { nodes, levels }
    }

    /// How many nodes it has.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The hash of a node by its number.
    pub(crate) fn node(&self, number: usize) -> &Hash {
        &self.nodes[number]
    }

    /// The numbers of the nodes beside the way from leaf `index` up to the root, lowest first.
    pub(crate) fn path(&self, index: usize) -> impl Iterator<Item = usize> + '_ {
        let ends = self.levels.iter().skip(1).copied();
        self.levels.iter().zip(ends).enumerate().filter_map(move |(height, (begin, end))| {
            let beside = begin + ((index >> height) ^ 1);
            (beside < end).then_some(beside)
        })
    }

    fn root(&self) -> Option<&Hash> {
        self.nodes.last()
    }
}

/// The trees of batches that were asked for lately.
#[derive(Default)]
pub(crate) struct Trees(Mutex<HashMap<BatchRef, Arc<Tree>>>);

impl Trees {
    /// The tree of this batch. It is the root that names a tree: a restored group may count its batches from an older point.
    pub(crate) fn of(&self, batch: BatchRef, leaves: &[Hash], root: &Hash) -> Arc<Tree> {
        if let Some(held) = self.0.lock().get(&batch)
            && held.root() == Some(root)
        {
            return Arc::clone(held);
        }
        let tree = Arc::new(Tree::over(leaves));
        let mut kept = self.0.lock();
        let leaves_kept: usize = kept.values().map(|tree| tree.len() / 2).sum();
        if leaves_kept + leaves.len() > LEAVES_MAX {
            kept.clear();
        }
        kept.insert(batch, Arc::clone(&tree));
        tree
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_the_wire_format_for_every_leaf_of_every_small_tree() {
        for count in 1..=70_u8 {
            let leaves: Vec<Hash> = (0..count).map(|n| merkle::leaf(&[n])).collect();
            let tree = Tree::over(&leaves);
            assert_eq!(tree.root(), Some(&merkle::root(&leaves)));
            for index in 0..leaves.len() {
                let path: Vec<Hash> = tree.path(index).map(|number| *tree.node(number)).collect();
                assert_eq!(path, merkle::path(&leaves, index), "{index} of {count}");
            }
        }
    }

    #[test]
    fn a_kept_tree_is_used_for_its_own_root_only_and_few_are_kept() {
        let leaves = |mark: usize, count: usize| -> Vec<Hash> {
            (0..count).map(|n| merkle::leaf(&[mark.to_le_bytes(), n.to_le_bytes()].concat())).collect()
        };
        let trees = Trees::default();
        let (one, other) = (leaves(1, 5), leaves(2, 5));
        let first = trees.of(BatchRef(1), &one, &merkle::root(&one));
        assert!(Arc::ptr_eq(&first, &trees.of(BatchRef(1), &one, &merkle::root(&one))));
        let second = trees.of(BatchRef(1), &other, &merkle::root(&other));
        assert_eq!(second.root(), Some(&merkle::root(&other)));
        let large = leaves(3, 4096);
        for number in 2..100 {
            trees.of(BatchRef(number), &large, &merkle::root(&large));
            assert!(trees.0.lock().len() <= LEAVES_MAX / 4096 + 1);
        }
    }
}
