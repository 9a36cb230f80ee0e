//! Merkle trees over attestations: one signature per commit batch, one path per descriptor.
//!
//! As in RFC 6962 §2.1: a leaf is hashed behind a 0 byte, a node behind a 1 byte, so that neither passes for the other; the left subtree has
//! the largest power of two that is smaller than the number of leaves.

use sha2::{Digest, Sha256};

/// A SHA-256 digest.
pub type Hash = [u8; 32];

const LEAF: u8 = 0;
const NODE: u8 = 1;

/// Hash of a leaf with these canonical bytes.
#[must_use]
pub fn leaf(bytes: &[u8]) -> Hash {
    Sha256::new().chain_update([LEAF]).chain_update(bytes).finalize().into()
}

fn node(left: &Hash, right: &Hash) -> Hash {
    Sha256::new().chain_update([NODE]).chain_update(left).chain_update(right).finalize().into()
}

/// Leaves in the left subtree of a tree of `count` (at least two) leaves.
const fn left_count(count: usize) -> usize {
    count.next_power_of_two() / 2
}

/// Root over at least one leaf.
///
/// # Panics
/// If there is no leaf: an empty batch is never signed.
#[must_use]
pub fn root(leaves: &[Hash]) -> Hash {
    assert!(!leaves.is_empty(), "a batch has at least one leaf");
    if let [only] = leaves {
        return *only;
    }
    let (left, right) = leaves.split_at(left_count(leaves.len()));
    node(&root(left), &root(right))
}

/// The hashes beside the way from leaf `index` up to the root, lowest first.
///
/// # Panics
/// If there is no such leaf.
#[must_use]
pub fn path(leaves: &[Hash], index: usize) -> Vec<Hash> {
    assert!(index < leaves.len(), "a path starts at a leaf");
    if leaves.len() == 1 {
        return Vec::new();
    }
    let middle = left_count(leaves.len());
    let (left, right) = leaves.split_at(middle);
    let (mut hashes, beside) =
        if index < middle { (path(left, index), root(right)) } else { (path(right, index - middle), root(left)) };
    hashes.push(beside);
    hashes
}

/// The root that `path` leads to from leaf `index` of `count`; none if the path has the wrong length or there is no such leaf.
#[must_use]
pub fn climb(leaf: &Hash, index: usize, count: usize, path: &[Hash]) -> Option<Hash> {
    if index >= count {
        return None;
    }
    if count == 1 {
        return path.is_empty().then_some(*leaf);
    }
    let (beside, below) = path.split_last()?;
    let middle = left_count(count);
    if index < middle {
        Some(node(&climb(leaf, index, middle, below)?, beside))
    } else {
        Some(node(beside, &climb(leaf, index - middle, count - middle, below)?))
    }
}

/// The nodes of one tree that were shown to be under its root: of many leaves of a tree, each node is hashed once.
#[derive(Clone, Debug)]
pub struct Proven {
    /// Where each level begins in `nodes`, the leaves first, and where the last one ends.
    levels: Vec<usize>,
    nodes: Vec<Hash>,
    /// Which of them were shown; the others mean nothing.
    known: Vec<bool>,
    /// Nodes on the way that is climbed just now, by number.
    way: Vec<(usize, Hash)>,
}

impl Proven {
    /// The tree of `count` leaves (at least one) with this root, of which nothing else is known yet.
    ///
    /// # Panics
    /// If there is no leaf.
    #[must_use]
    pub fn of(root: Hash, count: usize) -> Self {
        assert!(count > 0, "a batch has at least one leaf");
        let (mut levels, mut end, mut width) = (vec![0, count], count, count);
        while width > 1 {
            width = width.div_ceil(2);
            end += width;
            levels.push(end);
        }
        let (mut nodes, mut known) = (vec![[0; 32]; end], vec![false; end]);
        nodes[end - 1] = root;
        known[end - 1] = true;
        Self { levels, nodes, known, way: Vec::new() }
    }

    /// Whether `leaf` is leaf `index` of the tree, as `path` (lowest first) shows on the way up to a node that is known.
    #[must_use]
    pub fn shows<'h>(&mut self, leaf: &Hash, mut index: usize, path: impl IntoIterator<Item = &'h Hash>) -> bool {
        let Self { levels, nodes, known, way } = self;
        if index >= levels[1] {
            return false;
        }
        way.clear();
        let (mut at, mut path) = (*leaf, path.into_iter());
        for level in levels.windows(2) {
            let (number, beside) = (level[0] + index, level[0] + (index ^ 1));
            if known[number] {
                let at_root = number + 1 == nodes.len();
                if nodes[number] != at || at_root && path.next().is_some() {
                    return false;
                }
                break;
            }
            way.push((number, at));
            // An odd last node passes up unchanged.
            if beside < level[1] {
                let Some(hash) = path.next() else { return false };
                way.push((beside, *hash));
                at = if index.is_multiple_of(2) { node(&at, hash) } else { node(hash, &at) };
            }
            index /= 2;
        }
        for (number, hash) in way.drain(..) {
            nodes[number] = hash;
            known[number] = true;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaves(count: u32) -> Vec<Hash> {
        (0..count).map(|n| leaf(&n.to_le_bytes())).collect()
    }

    #[test]
    fn every_leaf_of_every_small_tree_climbs_to_the_root() {
        for count in 1..70 {
            let leaves = leaves(count);
            let root = root(&leaves);
            for index in 0..leaves.len() {
                assert_eq!(climb(&leaves[index], index, leaves.len(), &path(&leaves, index)), Some(root));
            }
        }
    }

    #[test]
    fn a_path_proves_its_own_leaf_at_its_own_place_only() {
        let leaves = leaves(13);
        let root = root(&leaves);
        for index in 0..13 {
            let good = path(&leaves, index);
            for other in 0..13 {
                let climbed = climb(&leaves[other], other, 13, &good);
                assert_eq!(climbed == Some(root), other == index);
                if other != index {
                    assert_ne!(climb(&leaves[index], other, 13, &good), Some(root));
                }
            }
            for bit in 0..good.len() * 256 {
                let mut bad = good.clone();
                bad[bit / 256][bit % 256 / 8] ^= 1 << (bit % 8);
                assert_ne!(climb(&leaves[index], index, 13, &bad), Some(root));
            }
            assert_eq!(climb(&leaves[index], index, 13, &good[1..]), None);
        }
        assert_eq!(climb(&leaves[0], 13, 13, &path(&leaves, 0)), None);
    }

    #[test]
    fn what_was_shown_of_a_tree_helps_to_show_the_rest_and_nothing_else() {
        for count in 1..40_u32 {
            let leaves = leaves(count);
            let root = root(&leaves);
            let paths: Vec<Vec<Hash>> = (0..leaves.len()).map(|index| path(&leaves, index)).collect();
            for first in 0..leaves.len() {
                let mut proven = Proven::of(root, leaves.len());
                assert!(proven.shows(&leaves[first], first, &paths[first]));
                for (index, path) in paths.iter().enumerate() {
                    let other = leaf(b"other");
                    assert!(!proven.shows(&other, index, path), "{index} of {count} after {first}");
                    assert!(!proven.shows(&leaves[index], leaves.len() + index, path));
                    assert!(index == first || !proven.shows(&leaves[first], index, path));
                    assert!(proven.shows(&leaves[index], index, path), "{index} of {count} after {first}");
                }
            }
        }
    }

    #[test]
    fn nothing_is_kept_of_a_way_that_led_elsewhere() {
        let leaves = leaves(13);
        let good = path(&leaves, 5);
        for bit in 0..good.len() * 256 {
            let mut proven = Proven::of(root(&leaves), 13);
            let mut bad = good.clone();
            bad[bit / 256][bit % 256 / 8] ^= 1 << (bit % 8);
            assert!(!proven.shows(&leaves[5], 5, &bad));
            assert_eq!(proven.known.iter().filter(|known| **known).count(), 1);
            assert!(proven.shows(&leaves[5], 5, &good));
        }
        let mut proven = Proven::of(root(&leaves), 13);
        assert!(!proven.shows(&leaves[5], 5, &good[1..]));
        assert!(!proven.shows(&leaves[5], 5, good.iter().chain([&leaves[0]])));
    }

    #[test]
    fn a_node_does_not_pass_for_a_leaf() {
        let two = leaves(2);
        let joined: Vec<u8> = two.concat();
        assert_ne!(root(&two), leaf(&joined));
    }
}
