//! Paths through the Merkle tree of one commit batch, when many are wanted at once.
//!
//! `quarry_wire::merkle::path` hashes the whole tree for each leaf; here it is hashed once. The tree of RFC 6962 is the one that pairs
//! neighbours level by level and passes an odd last node up unchanged.

use quarry_wire::merkle::{self, Hash};

/// All nodes of a tree, by level; the leaves are the first level.
pub(crate) struct Tree(Vec<Vec<Hash>>);

impl Tree {
    /// The tree over at least one leaf.
    pub(crate) fn over(leaves: Vec<Hash>) -> Self {
        assert!(!leaves.is_empty(), "a batch has at least one leaf");
        let mut levels = vec![leaves];
        while let Some(below) = levels.last()
            && below.len() > 1
        {
            // The root over a pair is their parent, the root over a single node is that node.
            let level = below.chunks(2).map(merkle::root).collect();
            levels.push(level);
        }
        Self(levels)
    }

    /// The hashes beside the way from leaf `index` up to the root, lowest first.
    pub(crate) fn path(&self, index: usize) -> impl Iterator<Item = Hash> + '_ {
        self.0.iter().enumerate().filter_map(move |(height, level)| level.get((index >> height) ^ 1).copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_the_wire_format_for_every_leaf_of_every_small_tree() {
        for count in 1..=70_u8 {
            let leaves: Vec<Hash> = (0..count).map(|n| merkle::leaf(&[n])).collect();
            let tree = Tree::over(leaves.clone());
            for index in 0..leaves.len() {
                assert_eq!(tree.path(index).collect::<Vec<_>>(), merkle::path(&leaves, index), "{index} of {count}");
            }
        }
    }
}
