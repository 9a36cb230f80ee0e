//! Ordered maps of which a clone costs nothing: a state is frozen for a snapshot while the next entries are applied to it.
//!
//! A B+ tree whose nodes are shared between clones. A change copies the nodes on its way that are shared, and no others; while nothing is shared
//! it happens in place. Entries are in leaves only; a branch has the least key of each child beside it. Nodes are filled to the brim where keys
//! come in order (sequences, restored snapshots), since the last node is left full as it is and a new one begun.
//!
//! Written as `BTreeMap` is: the length and then the entries in order. What it lacks of `BTreeMap` nobody here needs.

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{MapAccess, Visitor},
    ser::SerializeMap as _,
};
use std::{
    borrow::Borrow,
    cmp::Ordering,
    fmt,
    iter::FusedIterator,
    marker::PhantomData,
    ops::{Bound, Index, RangeBounds},
    slice,
    sync::Arc,
};

/// Entries of a leaf, or children of a branch, at most: what one change of a shared node copies.
const NODE_MAX: usize = 16;
/// With fewer it is joined with a neighbour, if both together are no more than [`NODE_JOINED`].
const NODE_FEW: usize = NODE_MAX / 4;
const NODE_JOINED: usize = NODE_MAX * 3 / 4;
/// Nodes grow by so many places at a time: the rest would be memory for nothing.
const NODE_STEP: usize = 2;

/// An ordered map; see the [module](self).
pub(crate) struct Map<K, V> {
    root: Arc<Node<K, V>>,
    length: usize,
}

enum Node<K, V> {
    Leaf(Vec<(K, V)>),
    /// Never empty. All keys of a child are below the key of the next one; that of the first child is never looked at.
    Branch(Vec<Child<K, V>>),
}

/// A node under a branch, and a key that none of its own is below.
type Child<K, V> = (K, Arc<Node<K, V>>);

impl<K: Clone, V: Clone> Clone for Node<K, V> {
    fn clone(&self) -> Self {
        match self {
            Self::Leaf(entries) => Self::Leaf(entries.clone()),
            Self::Branch(children) => Self::Branch(children.clone()),
        }
    }
}

impl<K, V> Clone for Map<K, V> {
    fn clone(&self) -> Self {
        Self { root: Arc::clone(&self.root), length: self.length }
    }
}

impl<K, V> Default for Map<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K, V> Map<K, V> {
    pub(crate) fn new() -> Self {
        Self { root: Arc::new(Node::Leaf(Vec::new())), length: 0 }
    }
    pub(crate) const fn len(&self) -> usize {
        self.length
    }
    pub(crate) const fn is_empty(&self) -> bool {
        self.length == 0
    }
    pub(crate) fn clear(&mut self) {
        *self = Self::new();
    }
    pub(crate) fn iter(&self) -> Iter<'_, K, V> {
        let mut iter = Iter { above: Vec::new(), leaf: [].iter() };
        iter.descend(&self.root);
        iter
    }
    pub(crate) fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }
    pub(crate) fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }
    pub(crate) fn first_key_value(&self) -> Option<(&K, &V)> {
        self.root.first()
    }
}

impl<K: Ord, V> Map<K, V> {
    pub(crate) fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        let mut node = &*self.root;
        loop {
            match node {
                Node::Leaf(entries) => return Some(&entries[find(entries, key).ok()?].1),
                Node::Branch(children) => node = &children[child_of(children, key)].1,
            }
        }
    }
    pub(crate) fn contains_key(&self, key: &K) -> bool {
        self.get(key).is_some()
    }
    /// The entry with the highest key below `key`.
    pub(crate) fn before(&self, key: &K) -> Option<(&K, &V)> {
        self.root.last_where(&|found| found < key)
    }
    /// The entry with the highest key that is `key` or below it.
    pub(crate) fn at_or_before(&self, key: &K) -> Option<(&K, &V)> {
        self.root.last_where(&|found| found <= key)
    }
    /// The entry with the lowest key that is `key` or above it.
    pub(crate) fn at_or_after(&self, key: &K) -> Option<(&K, &V)> {
        self.root.first_after(&|found| found < key)
    }
    /// The entries whose keys are in `range`, in order.
    pub(crate) fn range(&self, range: impl RangeBounds<K>) -> impl Iterator<Item = (&K, &V)> {
        let is_below = |key: &K| match range.start_bound() {
            Bound::Included(start) => key < start,
            Bound::Excluded(start) => key <= start,
            Bound::Unbounded => false,
        };
        let mut iter = Iter { above: Vec::new(), leaf: [].iter() };
        iter.seek(&self.root, &is_below);
        iter.take_while(move |(key, _)| match range.end_bound() {
            Bound::Included(end) => *key <= end,
            Bound::Excluded(end) => *key < end,
            Bound::Unbounded => true,
        })
    }
}

impl<K: Ord + Clone, V: Clone> Map<K, V> {
    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let mut node = Arc::make_mut(&mut self.root);
        loop {
            match node {
                Node::Leaf(entries) => {
                    let at = find(entries, key).ok()?;
                    return Some(&mut entries[at].1);
                }
                Node::Branch(children) => {
                    let at = child_of(children, key);
                    node = Arc::make_mut(&mut children[at].1);
                }
            }
        }
    }

    /// Answers the value that was there.
    pub(crate) fn insert(&mut self, key: K, value: V) -> Option<V> {
        match Arc::make_mut(&mut self.root).insert(key, value, true) {
            Inserted::Instead(old) => return Some(old),
            Inserted::Beside => {}
            Inserted::Split(least, right) => {
                let left = std::mem::replace(&mut self.root, Arc::new(Node::Leaf(Vec::new())));
                // The key beside a first child is never looked at.
                self.root = Arc::new(Node::Branch(vec![(least.clone(), left), (least, right)]));
            }
        }
        self.length += 1;
        None
    }

    /// Answers the value that was there.
    pub(crate) fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let removed = Arc::make_mut(&mut self.root).remove(key);
        self.length -= usize::from(removed.is_some());
        while let Node::Branch(children) = &*self.root {
            match &children[..] {
                [] => self.root = Arc::new(Node::Leaf(Vec::new())),
                [(_, only)] => self.root = Arc::clone(only),
                _ => break,
            }
        }
        removed
    }

    pub(crate) fn pop_first(&mut self) -> Option<(K, V)> {
        let key = self.first_key_value()?.0.clone();
        let value = self.remove(&key)?;
        Some((key, value))
    }

    /// Keeps what `wanted` says.
    pub(crate) fn retain(&mut self, mut wanted: impl FnMut(&K, &V) -> bool) {
        let unwanted: Vec<K> =
            self.iter().filter(|(key, value)| !wanted(key, value)).map(|(key, _)| key.clone()).collect();
        for key in unwanted {
            self.remove(&key);
        }
    }

    /// The value of `key`, a default one if there was none.
    pub(crate) fn or_default(&mut self, key: K) -> &mut V
    where
        V: Default,
    {
        if self.get(&key).is_none() {
            self.insert(key.clone(), V::default());
        }
        self.get_mut(&key).expect("it is there, or was just put there")
    }
}

/// Where `key` is among entries, or belongs.
fn find<K: Borrow<Q>, V, Q: Ord + ?Sized>(entries: &[(K, V)], key: &Q) -> Result<usize, usize> {
    // One after the other: keys lie somewhere else in memory, and while one is looked at the next ones are on their way already.
    for (at, (found, _)) in entries.iter().enumerate() {
        match found.borrow().cmp(key) {
            Ordering::Less => {}
            Ordering::Equal => return Ok(at),
            Ordering::Greater => return Err(at),
        }
    }
    Err(entries.len())
}

/// Which child `key` is in if it is in any.
fn child_of<K: Borrow<Q>, V, Q: Ord + ?Sized>(children: &[(K, V)], key: &Q) -> usize {
    children[1..].iter().position(|(least, _)| least.borrow() > key).unwrap_or(children.len() - 1)
}

/// Puts one in, with little room to spare; what does not fit is answered. `is_last`: whether no other node of this height follows.
fn put<T>(held: &mut Vec<T>, at: usize, one: T, is_last: bool) -> Option<Vec<T>> {
    if held.len() == held.capacity() {
        held.reserve_exact(NODE_STEP);
    }
    held.insert(at, one);
    (held.len() > NODE_MAX).then(|| {
        let in_order = is_last && at + 1 == held.len();
        let right = held.split_off(if in_order { at } else { held.len() / 2 });
        held.shrink_to_fit();
        right
    })
}

enum Inserted<K, V> {
    Instead(V),
    Beside,
    /// What did not fit any more, with its least key.
    Split(K, Arc<Node<K, V>>),
}

impl<K, V> Node<K, V> {
    const fn len(&self) -> usize {
        match self {
            Self::Leaf(entries) => entries.len(),
            Self::Branch(children) => children.len(),
        }
    }

    fn first(&self) -> Option<(&K, &V)> {
        match self {
            Self::Leaf(entries) => entries.first().map(|(key, value)| (key, value)),
            Self::Branch(children) => children.first()?.1.first(),
        }
    }

    /// The last entry of which `wanted` is true; true of all entries up to some key.
    fn last_where(&self, wanted: &impl Fn(&K) -> bool) -> Option<(&K, &V)> {
        match self {
            Self::Leaf(entries) => {
                let (key, value) = entries[..entries.partition_point(|(key, _)| wanted(key))].last()?;
                Some((key, value))
            }
            Self::Branch(children) => {
                let at = children[1..].partition_point(|(least, _)| wanted(least));
                // The key beside a child may be below all of its keys, since entries go: then it is the last one of a child before it.
                children[..=at].iter().rev().find_map(|(_, child)| child.last_where(wanted))
            }
        }
    }

    /// The first entry that is not `below`; true of all entries up to some key.
    fn first_after(&self, below: &impl Fn(&K) -> bool) -> Option<(&K, &V)> {
        match self {
            Self::Leaf(entries) => {
                let (key, value) = entries.get(entries.partition_point(|(key, _)| below(key)))?;
                Some((key, value))
            }
            Self::Branch(children) => {
                let at = children[1..].partition_point(|(least, _)| below(least));
                children[at..].iter().find_map(|(_, child)| child.first_after(below))
            }
        }
    }
}

impl<K: Ord + Clone, V: Clone> Node<K, V> {
    fn insert(&mut self, key: K, value: V, is_last: bool) -> Inserted<K, V> {
        match self {
            Self::Leaf(entries) => match find(entries, &key) {
                Ok(at) => Inserted::Instead(std::mem::replace(&mut entries[at].1, value)),
                Err(at) => match put(entries, at, (key, value), is_last) {
                    None => Inserted::Beside,
                    Some(right) => Inserted::Split(right[0].0.clone(), Arc::new(Self::Leaf(right))),
                },
            },
            Self::Branch(children) => {
                let at = child_of(children, &key);
                let is_last = is_last && at + 1 == children.len();
                let (least, right) = match Arc::make_mut(&mut children[at].1).insert(key, value, is_last) {
                    Inserted::Split(least, right) => (least, right),
                    done @ (Inserted::Instead(_) | Inserted::Beside) => return done,
                };
                match put(children, at + 1, (least, right), is_last) {
                    None => Inserted::Beside,
                    Some(right) => Inserted::Split(right[0].0.clone(), Arc::new(Self::Branch(right))),
                }
            }
        }
    }

    fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        match self {
            Self::Leaf(entries) => {
                let at = find(entries, key).ok()?;
                Some(entries.remove(at).1)
            }
            Self::Branch(children) => {
                let at = child_of(children, key);
                let removed = Arc::make_mut(&mut children[at].1).remove(key);
                if children[at].1.len() < NODE_FEW {
                    tidy(children, at);
                }
                removed
            }
        }
    }
}

/// Child `at` has few entries: it goes if it has none (the last one too: its branch goes in its turn), and is joined with a neighbour if they
/// fit well together.
fn tidy<K: Clone, V: Clone>(children: &mut Vec<Child<K, V>>, at: usize) {
    if children[at].1.len() == 0 {
        children.remove(at);
        return;
    }
    let fits =
        |left: usize| children.get(left + 1).is_some_and(|right| children[left].1.len() + right.1.len() <= NODE_JOINED);
    let left = if fits(at) {
        at
    } else if at > 0 && fits(at - 1) {
        at - 1
    } else {
        return;
    };
    let (least, right) = children.remove(left + 1);
    match (Arc::make_mut(&mut children[left].1), Arc::unwrap_or_clone(right)) {
        (Node::Leaf(left), Node::Leaf(right)) => left.extend(right),
        (Node::Branch(left), Node::Branch(mut right)) => {
            // Its key was never looked at while it was a first child.
            right[0].0 = least;
            left.extend(right);
        }
        _ => unreachable!("children of one branch have the same height"),
    }
}

/// The entries of a map, in order.
pub(crate) struct Iter<'a, K, V> {
    /// What is left of the branches above the leaf, the root's first.
    above: Vec<slice::Iter<'a, Child<K, V>>>,
    leaf: slice::Iter<'a, (K, V)>,
}

impl<'a, K, V> Iter<'a, K, V> {
    /// Goes to the first entry of a node.
    fn descend(&mut self, mut node: &'a Node<K, V>) {
        loop {
            match node {
                Node::Leaf(entries) => {
                    self.leaf = entries.iter();
                    return;
                }
                Node::Branch(children) => {
                    let mut children = children.iter();
                    let Some((_, first)) = children.next() else { return };
                    self.above.push(children);
                    node = first;
                }
            }
        }
    }

    /// Goes to the first entry of a node that is not `below`, or to the end of a leaf before it.
    fn seek(&mut self, mut node: &'a Node<K, V>, below: &impl Fn(&K) -> bool) {
        loop {
            match node {
                Node::Leaf(entries) => {
                    self.leaf = entries[entries.partition_point(|(key, _)| below(key))..].iter();
                    return;
                }
                Node::Branch(children) => {
                    let at = children[1..].partition_point(|(least, _)| below(least));
                    self.above.push(children[at + 1..].iter());
                    node = &children[at].1;
                }
            }
        }
    }
}

impl<'a, K, V> Iterator for Iter<'a, K, V> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some((key, value)) = self.leaf.next() {
                return Some((key, value));
            }
            let Some((_, child)) = self.above.last_mut()?.next() else {
                self.above.pop();
                continue;
            };
            self.descend(child);
        }
    }
}

impl<K, V> FusedIterator for Iter<'_, K, V> {}

impl<'a, K, V> IntoIterator for &'a Map<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = Iter<'a, K, V>;
    fn into_iter(self) -> Iter<'a, K, V> {
        self.iter()
    }
}

impl<K: Ord + Clone, V: Clone> Extend<(K, V)> for Map<K, V> {
    fn extend<I: IntoIterator<Item = (K, V)>>(&mut self, entries: I) {
        for (key, value) in entries {
            self.insert(key, value);
        }
    }
}

impl<K: Ord + Clone, V: Clone> FromIterator<(K, V)> for Map<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut map = Self::new();
        map.extend(entries);
        map
    }
}

impl<K: Ord, V> Index<&K> for Map<K, V> {
    type Output = V;
    fn index(&self, key: &K) -> &V {
        self.get(key).expect("whoever names an entry knows that it is there")
    }
}

impl<K: PartialEq, V: PartialEq> PartialEq for Map<K, V> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.root, &other.root) || self.length == other.length && self.iter().eq(other.iter())
    }
}

impl<K: Eq, V: Eq> Eq for Map<K, V> {}

impl<K: fmt::Debug, V: fmt::Debug> fmt::Debug for Map<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self).finish()
    }
}

impl<K: Serialize, V: Serialize> Serialize for Map<K, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.length))?;
        for (key, value) in self {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl<'de, K: Deserialize<'de> + Ord + Clone, V: Deserialize<'de> + Clone> Deserialize<'de> for Map<K, V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<K, V>(PhantomData<(K, V)>);
        impl<'de, K: Deserialize<'de> + Ord + Clone, V: Deserialize<'de> + Clone> Visitor<'de> for Entries<K, V> {
            type Value = Map<K, V>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a map")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Map<K, V>, A::Error> {
                let mut map = Map::new();
                while let Some((key, value)) = entries.next_entry()? {
                    map.insert(key, value);
                }
                Ok(map)
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
    }
}

/// An ordered set; what is said of [`Map`] is true of it.
pub(crate) struct Set<T>(Map<T, ()>);

impl<T> Clone for Set<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Default for Set<T> {
    fn default() -> Self {
        Self(Map::new())
    }
}

impl<T> Set<T> {
    pub(crate) const fn len(&self) -> usize {
        self.0.len()
    }
    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    pub(crate) fn first(&self) -> Option<&T> {
        self.0.first_key_value().map(|(key, ())| key)
    }
}

impl<T: Ord + Clone> Set<T> {
    pub(crate) fn insert(&mut self, one: T) {
        self.0.insert(one, ());
    }
    pub(crate) fn remove(&mut self, one: &T) {
        self.0.remove(one);
    }
    pub(crate) fn pop_first(&mut self) -> Option<T> {
        self.0.pop_first().map(|(key, ())| key)
    }
    pub(crate) fn range(&self, range: impl RangeBounds<T>) -> impl Iterator<Item = &T> {
        self.0.range(range).map(|(key, ())| key)
    }
}

impl<T: Ord + Clone> Extend<T> for Set<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, all: I) {
        self.0.extend(all.into_iter().map(|one| (one, ())));
    }
}

impl<T: PartialEq> PartialEq for Set<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<T: Eq> Eq for Set<T> {}

impl<T: fmt::Debug> fmt::Debug for Set<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.iter().map(|(key, ())| key)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Every node is sorted, within bounds, and under a key that is not above its own.
    fn check(node: &Node<u16, u32>, is_root: bool) -> (usize, usize) {
        assert!(node.len() <= NODE_MAX && (is_root || node.len() > 0));
        match node {
            Node::Leaf(entries) => {
                assert!(entries.is_sorted_by(|one, next| one.0 < next.0));
                (entries.len(), 0)
            }
            Node::Branch(children) => {
                assert!(
                    children.len() > usize::from(is_root) && children[1..].is_sorted_by(|one, next| one.0 < next.0)
                );
                for (index, (least, child)) in children.iter().enumerate() {
                    let first = child.first().unwrap().0;
                    assert!(index == 0 || least <= first);
                    assert!(
                        children.get(index + 1).is_none_or(|next| child.last_where(&|_| true).unwrap().0 < &next.0)
                    );
                }
                let below: Vec<_> = children.iter().map(|(_, child)| check(child, false)).collect();
                assert!(below.iter().all(|(_, height)| *height == below[0].1), "one height");
                (below.iter().map(|(count, _)| count).sum(), below[0].1 + 1)
            }
        }
    }

    fn same(map: &Map<u16, u32>, expected: &BTreeMap<u16, u32>) {
        assert_eq!(check(&map.root, true).0, expected.len());
        assert_eq!(map.len(), expected.len());
        assert!(map.iter().eq(expected.iter()));
        assert_eq!(map.first_key_value(), expected.first_key_value());
        assert_eq!(postcard::to_stdvec(map).unwrap(), postcard::to_stdvec(expected).unwrap());
    }

    proptest! {
        #![proptest_config(ProptestConfig { max_shrink_iters: 200, ..ProptestConfig::with_cases(48) })]
        #[test]
        fn a_map_agrees_with_a_btree_map_and_its_clones_stay_as_they_were(
            steps in proptest::collection::vec((0u8..12, any::<u16>(), 1u16..600), 1..40),
        ) {
            let (mut map, mut expected) = (Map::new(), BTreeMap::new());
            let mut frozen = Vec::new();
            for (value, (kind, start, count)) in (0_u32..).zip(steps) {
                // Near each other, so that what is removed was there.
                let start = start % 2000;
                let keys = start..start + count;
                match kind {
                    0..=3 => keys.for_each(|key| prop_assert_eq_now(map.insert(key, value), expected.insert(key, value))),
                    4 => keys.rev().for_each(|key| prop_assert_eq_now(map.insert(key, value), expected.insert(key, value))),
                    5 | 6 => keys.for_each(|key| prop_assert_eq_now(map.remove(&key), expected.remove(&key))),
                    7 => keys.step_by(3).for_each(|key| prop_assert_eq_now(map.remove(&key), expected.remove(&key))),
                    8 => {
                        map.retain(|key, _| key % count != 0);
                        expected.retain(|key, _| key % count != 0);
                    }
                    9 => (0..count).for_each(|_| prop_assert_eq_now(map.pop_first(), expected.pop_first())),
                    10 => keys.for_each(|key| {
                        *map.or_default(key) += 1;
                        *expected.entry(key).or_default() += 1;
                    }),
                    _ => {
                        for key in keys {
                            if let Some(held) = map.get_mut(&key) {
                                *held += 1;
                                *expected.get_mut(&key).unwrap() += 1;
                            }
                        }
                    }
                }
                for key in [0, start, start + count / 2, start + count, 2599] {
                    prop_assert_eq!(map.get(&key), expected.get(&key));
                    prop_assert_eq!(map.before(&key), expected.range(..key).next_back());
                    prop_assert_eq!(map.at_or_before(&key), expected.range(..=key).next_back());
                    prop_assert_eq!(map.at_or_after(&key), expected.range(key..).next());
                    prop_assert!(map.range(key..).eq(expected.range(key..)));
                    prop_assert!(map.range(key..=key + 100).eq(expected.range(key..=key + 100)));
                    let bounds = (Bound::Excluded(key), Bound::Excluded(key + 100));
                    prop_assert!(map.range(bounds).eq(expected.range(bounds)));
                }
                same(&map, &expected);
                frozen.push((map.clone(), expected.clone()));
            }
            for (map, expected) in &frozen {
                same(map, expected);
                let bytes = postcard::to_stdvec(map).unwrap();
                let back: Map<u16, u32> = postcard::from_bytes(&bytes).unwrap();
                same(&back, expected);
                prop_assert_eq!(&back, map);
            }
        }
    }

    fn prop_assert_eq_now<T: PartialEq + fmt::Debug>(found: T, expected: T) {
        assert_eq!(found, expected);
    }

    #[test]
    fn keys_that_come_in_order_fill_their_nodes() {
        let map: Map<u16, u32> = (0..10_000).map(|key| (key, 0)).collect();
        fn leaves<K, V>(node: &Node<K, V>) -> usize {
            match node {
                Node::Leaf(_) => 1,
                Node::Branch(children) => children.iter().map(|(_, child)| leaves(child)).sum(),
            }
        }
        assert_eq!(leaves(&map.root), 10_000_usize.div_ceil(NODE_MAX));
        // Those that come backwards, behind a node that is full, leave none nearly empty.
        let below = u16::try_from(NODE_MAX).unwrap();
        let map: Map<u16, u32> = (0..below).chain((below..10_000).rev()).map(|key| (key, 0)).collect();
        assert!(leaves(&map.root) <= 10_000 / (NODE_MAX / 2) + 2, "{}", leaves(&map.root));
    }
}
