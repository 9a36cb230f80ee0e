//! Descriptors that were proven, for reading again within their lease without asking anybody.
//!
//! Decides what may be used from memory: only within the lease, nothing that was resolved before one of our own writes to the key
//! answered, and nothing that was proven before the newest revocation list. Time is an argument (the boot-time clock).

use quarry_wire::{
    ids::{Incarnation, NamespaceId, RegionId},
    key::Key,
    version::Version,
};
use std::{collections::HashMap, sync::Arc, time::Duration};

/// Where a key's value is, proven by the signatures of its holders.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    pub(crate) version: Version,
    pub(crate) payload_bytes: u64,
    pub(crate) payload_crc: u32,
    pub(crate) copies: Vec<Place>,
    /// When the request was sent that brought it.
    pub(crate) sent: Duration,
    /// From here on it may not be used.
    pub(crate) lease_end: Duration,
    /// Number of the revocation list under which it was proven: under a later one it may not be used.
    pub(crate) revocations: u64,
}

/// A resident copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) region: RegionId,
    pub(crate) incarnation: Incarnation,
    pub(crate) offset: u64,
    /// The same for neighbours, so that they are read from one holder in one operation.
    pub(crate) spread: u64,
}

#[derive(Debug)]
enum Known {
    Found(Arc<Found>),
    /// We wrote or deleted the key then: only what was resolved later counts.
    Written(Duration),
}

#[derive(Debug)]
pub(crate) struct Cache {
    capacity: usize,
    known: HashMap<(NamespaceId, Key), Known>,
    /// Nothing that was sent until then is taken: the latest of the writes that were forgotten for room.
    floor: Option<Duration>,
}

impl Cache {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, known: HashMap::new(), floor: None }
    }

    /// What may be used now, if revocation list `revocations` is the newest.
    pub(crate) fn get(&self, namespace: NamespaceId, key: &Key, now: Duration, revocations: u64) -> Option<Arc<Found>> {
        match self.known.get(&(namespace, key.clone())) {
            Some(Known::Found(found)) if now < found.lease_end && found.revocations >= revocations => {
                Some(Arc::clone(found))
            }
            _ => None,
        }
    }

    pub(crate) fn insert(&mut self, namespace: NamespaceId, key: &Key, found: &Arc<Found>, now: Duration) {
        if self.capacity == 0 || self.floor.is_some_and(|floor| found.sent <= floor) {
            return;
        }
        match self.known.get(&(namespace, key.clone())) {
            Some(Known::Written(at)) if found.sent <= *at => return,
            Some(Known::Found(held)) if held.sent >= found.sent => return,
            _ => {}
        }
        self.make_room(now);
        self.known.insert((namespace, key.clone()), Known::Found(Arc::clone(found)));
    }

    /// Our own write of these keys begins or has answered.
    pub(crate) fn invalidate(&mut self, namespace: NamespaceId, keys: &[Key], now: Duration) {
        if self.capacity == 0 {
            return;
        }
        for key in keys {
            self.make_room(now);
            self.known.insert((namespace, key.clone()), Known::Written(now));
        }
    }

    /// Forgets a descriptor that led to nothing good, if it is still the one.
    pub(crate) fn forget(&mut self, namespace: NamespaceId, key: &Key, found: &Arc<Found>) {
        let name = (namespace, key.clone());
        if let Some(Known::Found(held)) = self.known.get(&name)
            && Arc::ptr_eq(held, found)
        {
            self.known.remove(&name);
        }
    }

    fn make_room(&mut self, now: Duration) {
        if self.known.len() < self.capacity {
            return;
        }
        let mut floor = self.floor;
        self.known.retain(|_, known| match known {
            Known::Found(found) => now < found.lease_end,
            Known::Written(at) => {
                floor = floor.max(Some(*at));
                false
            }
        });
        self.floor = floor;
        if self.known.len() >= self.capacity {
            self.known.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMESPACE: NamespaceId = NamespaceId(1);

    fn key(number: usize) -> Key {
        Key::new(format!("key-{number}")).unwrap()
    }
    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }
    fn found(sent: u64, lease_end: u64) -> Arc<Found> {
        Arc::new(Found {
            version: Version::default(),
            payload_bytes: 1,
            payload_crc: 0,
            copies: Vec::new(),
            sent: at(sent),
            lease_end: at(lease_end),
            revocations: 0,
        })
    }

    #[test]
    fn a_descriptor_is_used_within_its_lease_and_not_at_its_end() {
        let mut cache = Cache::new(10);
        cache.insert(NAMESPACE, &key(1), &found(0, 100), at(1));
        assert!(cache.get(NAMESPACE, &key(1), at(99), 0).is_some());
        assert!(cache.get(NAMESPACE, &key(1), at(100), 0).is_none());
        assert!(cache.get(NamespaceId(2), &key(1), at(50), 0).is_none());
    }

    #[test]
    fn what_was_proven_under_an_older_revocation_list_is_not_used() {
        let mut cache = Cache::new(10);
        cache.insert(NAMESPACE, &key(1), &found(0, 100), at(1));
        assert!(cache.get(NAMESPACE, &key(1), at(2), 1).is_none());
        let again = Found { revocations: 1, ..Found::clone(&found(3, 100)) };
        cache.insert(NAMESPACE, &key(1), &Arc::new(again), at(4));
        assert!(cache.get(NAMESPACE, &key(1), at(5), 1).is_some());
        assert!(cache.get(NAMESPACE, &key(1), at(5), 2).is_none());
    }

    #[test]
    fn what_was_resolved_before_an_own_write_answered_is_not_taken() {
        let mut cache = Cache::new(10);
        cache.insert(NAMESPACE, &key(1), &found(0, 100), at(1));
        cache.invalidate(NAMESPACE, &[key(1)], at(10));
        assert!(cache.get(NAMESPACE, &key(1), at(11), 0).is_none());
        cache.insert(NAMESPACE, &key(1), &found(10, 100), at(20));
        assert!(cache.get(NAMESPACE, &key(1), at(20), 0).is_none(), "it was sent before the write answered");
        cache.insert(NAMESPACE, &key(1), &found(11, 100), at(20));
        assert!(cache.get(NAMESPACE, &key(1), at(20), 0).is_some());
    }

    #[test]
    fn an_older_answer_does_not_replace_a_newer_one() {
        let mut cache = Cache::new(10);
        cache.insert(NAMESPACE, &key(1), &found(5, 100), at(6));
        cache.insert(NAMESPACE, &key(1), &found(4, 200), at(7));
        assert_eq!(cache.get(NAMESPACE, &key(1), at(7), 0).unwrap().lease_end, at(100));
    }

    #[test]
    fn it_stays_bounded_and_forgets_no_own_write_in_doing_so() {
        let mut cache = Cache::new(8);
        cache.invalidate(NAMESPACE, &[key(0)], at(50));
        for number in 1..100 {
            cache.insert(NAMESPACE, &key(number), &found(60, 1000), at(60));
            assert!(cache.known.len() <= 8);
        }
        cache.insert(NAMESPACE, &key(0), &found(50, 1000), at(60));
        assert!(cache.get(NAMESPACE, &key(0), at(60), 0).is_none(), "the write at 50 was forgotten, its time was not");
    }

    #[test]
    fn only_the_descriptor_that_failed_is_forgotten() {
        let mut cache = Cache::new(8);
        let (bad, good) = (found(1, 100), found(2, 100));
        cache.insert(NAMESPACE, &key(1), &bad, at(1));
        cache.insert(NAMESPACE, &key(1), &good, at(2));
        cache.forget(NAMESPACE, &key(1), &bad);
        assert!(cache.get(NAMESPACE, &key(1), at(3), 0).is_some());
        cache.forget(NAMESPACE, &key(1), &good);
        assert!(cache.get(NAMESPACE, &key(1), at(3), 0).is_none());
    }
}
