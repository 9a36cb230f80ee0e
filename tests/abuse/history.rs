//! Histories: who did what to which key between which moments, and whether that can be true.
//!
//! Moments come from one counter of the test, so that "ended before the other began" is known without a clock. Keeps *Linearizable* as far as
//! versions show it: whoever begins after an acknowledged write, or after a fresh read, sees its version or a later one.

use quarry_wire::version::Version;
use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

/// What came of one operation on one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum What {
    /// A create or replace of payload `attempt` was acknowledged.
    Written { attempt: u64, version: Version },
    /// A write of payload `attempt` failed for good: nobody may ever see it.
    Refused { attempt: u64 },
    /// A create was refused because of this version.
    Existed { attempt: u64, version: Version },
    /// A fresh read saw this payload in this version, or nothing.
    Seen(Option<(u64, Version)>),
}

/// One operation: what came of it, between which moments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) began: u64,
    pub(crate) ended: u64,
    pub(crate) what: What,
}

/// What happened to all keys.
#[derive(Debug, Default)]
pub(crate) struct History {
    moment: AtomicU64,
    events: Mutex<BTreeMap<String, Vec<Event>>>,
}

impl History {
    /// Now.
    pub(crate) fn moment(&self) -> u64 {
        self.moment.fetch_add(1, Ordering::SeqCst)
    }

    /// An operation on `key` that began then ended now.
    pub(crate) fn ended(&self, key: &str, began: u64, what: What) {
        let event = Event { began, ended: self.moment(), what };
        self.events.lock().unwrap().entry(key.to_owned()).or_default().push(event);
    }

    /// Events of all keys.
    pub(crate) fn count(&self) -> usize {
        self.events.lock().unwrap().values().map(Vec::len).sum()
    }

    /// All keys.
    pub(crate) fn keys(&self) -> Vec<String> {
        self.events.lock().unwrap().keys().cloned().collect()
    }

    /// What cannot be true, key by key; keys for which `create_once` holds have one version at most.
    pub(crate) fn wrongs(&self, create_once: impl Fn(&str) -> bool) -> Vec<String> {
        let events = self.events.lock().unwrap();
        events.iter().flat_map(|(key, of_key)| wrongs(key, of_key, create_once(key))).collect()
    }
}

fn version(event: &Event) -> Option<Version> {
    match event.what {
        What::Written { version, .. } | What::Existed { version, .. } | What::Seen(Some((_, version))) => Some(version),
        What::Refused { .. } | What::Seen(None) => None,
    }
}

fn wrongs(key: &str, events: &[Event], create_once: bool) -> Vec<String> {
    let mut wrongs = Vec::new();
    let mut of_attempt: BTreeMap<u64, Version> = BTreeMap::new();
    for event in events {
        let (What::Written { attempt, version } | What::Seen(Some((attempt, version)))) = event.what else { continue };
        let known = *of_attempt.entry(attempt).or_insert(version);
        if known != version {
            wrongs.push(format!("{key}: one payload in two versions, {known} and {version}: {event:?}"));
        }
    }
    for event in events {
        if let What::Refused { attempt } | What::Existed { attempt, .. } = event.what
            && of_attempt.contains_key(&attempt)
        {
            wrongs.push(format!("{key}: what was refused for good is there: {event:?}"));
        }
    }
    if create_once {
        let mut versions: Vec<Version> = events.iter().filter_map(version).collect();
        versions.sort_unstable();
        versions.dedup();
        let winners = events.iter().filter(|event| matches!(event.what, What::Written { .. })).count();
        if versions.len() > 1 || winners > 1 {
            wrongs.push(format!("{key}: created {winners} times, in versions {versions:?}"));
        }
    }
    let mut by_end: Vec<&Event> = events.iter().collect();
    by_end.sort_unstable_by_key(|event| event.ended);
    let mut by_begin = by_end.clone();
    by_begin.sort_unstable_by_key(|event| event.began);
    let (mut ended, mut newest) = (by_end.into_iter().peekable(), None);
    for event in by_begin {
        while let Some(before) = ended.next_if(|before| before.ended < event.began) {
            newest = newest.max(version(before));
        }
        let fits = match event.what {
            What::Written { version, .. } => newest.is_none_or(|newest| version > newest),
            What::Existed { version, .. } => newest.is_none_or(|newest| version >= newest),
            What::Seen(seen) => seen.map(|(_, version)| version) >= newest,
            What::Refused { .. } => true,
        };
        if !fits {
            wrongs.push(format!("{key}: after version {newest:?} was known, {event:?}"));
        }
    }
    wrongs
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_wire::{ids::WriterId, version::HybridClock};

    fn at(clock: u64) -> Version {
        Version { clock: HybridClock(clock), writer: WriterId([1; 16]) }
    }
    fn event(began: u64, ended: u64, what: What) -> Event {
        Event { began, ended, what }
    }
    fn written(attempt: u64, clock: u64) -> What {
        What::Written { attempt, version: at(clock) }
    }
    fn seen(attempt: u64, clock: u64) -> What {
        What::Seen(Some((attempt, at(clock))))
    }

    #[test]
    fn a_history_that_can_be_true_has_no_wrongs() {
        let events = [
            event(0, 3, written(1, 10)),
            event(1, 2, What::Seen(None)),
            event(1, 4, seen(1, 10)),
            event(4, 9, written(2, 11)),
        ];
        let concurrent = [event(5, 6, seen(2, 11)), event(7, 8, seen(2, 11)), event(10, 11, seen(2, 11))];
        assert_eq!(wrongs("k", &[&events[..], &concurrent].concat(), false), Vec::<String>::new());
    }

    #[test]
    fn every_kind_of_wrong_is_found() {
        let cases: [(&str, Vec<Event>, bool); 7] = [
            ("a lost value", vec![event(0, 1, written(1, 10)), event(2, 3, What::Seen(None))], false),
            (
                "a read that goes back",
                vec![
                    event(0, 1, written(1, 10)),
                    event(0, 9, written(2, 11)),
                    event(2, 3, seen(2, 11)),
                    event(4, 5, seen(1, 10)),
                ],
                false,
            ),
            ("a version that does not grow", vec![event(0, 1, written(1, 10)), event(2, 3, written(2, 9))], false),
            ("a refused value", vec![event(0, 1, What::Refused { attempt: 1 }), event(2, 3, seen(1, 10))], false),
            ("two winners", vec![event(0, 2, written(1, 10)), event(1, 3, written(2, 11))], true),
            ("two versions of one attempt", vec![event(0, 1, written(1, 10)), event(2, 3, seen(1, 12))], false),
            (
                "two lives",
                vec![event(0, 2, written(1, 10)), event(1, 3, What::Existed { attempt: 2, version: at(12) })],
                true,
            ),
        ];
        for (what, events, create_once) in cases {
            assert!(!wrongs("k", &events, create_once).is_empty(), "{what} is not found");
        }
    }
}
