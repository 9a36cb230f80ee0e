//! Whether the history of one key can be that of a register that does one thing at a time (*Linearizable*).
//!
//! Versions are unique, so nearly every answer says which state it saw, and the search for an order is short. Whatever has no answer may
//! have taken effect at any time after it was asked, or never.

use quarry_wire::version::Version;
use std::collections::HashSet;

/// What was asked of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Asked {
    Create(Version),
    Replace(Version),
    Compare { expected: Option<Version>, version: Version },
    Delete { expected: Option<Version> },
    Get,
}

/// What was answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answered {
    /// A put took effect.
    Committed,
    /// A put was refused for what the key was: create, an older version, compare.
    Exists(Version),
    Stale(Version),
    CompareFailed(Option<Version>),
    Deleted(Version),
    NotFound,
    /// A get.
    Found(Option<Version>),
    /// Nothing was heard: it may have taken effect, or may still.
    Unknown,
}

/// One operation; times are places in the order of everything that clients did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    pub(crate) asked: Asked,
    pub(crate) answered: Answered,
    pub(crate) began: u64,
    /// `u64::MAX` if nothing was heard.
    pub(crate) ended: u64,
}

/// The state after `asked` if it may be answered like this in `state`.
fn step(state: Option<Version>, asked: Asked, answered: Answered) -> Option<Option<Version>> {
    let fits = |holds: bool, next: Option<Version>| holds.then_some(next);
    let newer = |version: Version| state.is_none_or(|current| current < version);
    match (asked, answered) {
        (Asked::Create(version), Answered::Committed) => fits(state.is_none(), Some(version)),
        (Asked::Replace(version), Answered::Committed) => fits(newer(version), Some(version)),
        (Asked::Compare { expected, version }, Answered::Committed) => {
            fits(state == expected && newer(version), Some(version))
        }
        (Asked::Create(_), Answered::Exists(current)) => fits(state == Some(current), state),
        (Asked::Replace(version) | Asked::Compare { version, .. }, Answered::Stale(current)) => {
            fits(state == Some(current) && current > version, state)
        }
        (Asked::Compare { expected, .. }, Answered::CompareFailed(current)) => {
            fits(state == current && expected != current, state)
        }
        (Asked::Delete { expected }, Answered::Deleted(version)) => {
            fits(state == Some(version) && expected.is_none_or(|it| it == version), None)
        }
        (Asked::Delete { .. }, Answered::NotFound) => fits(state.is_none(), None),
        (Asked::Delete { expected }, Answered::CompareFailed(current)) => {
            fits(state == current && expected.is_some() && expected != current, state)
        }
        (Asked::Get, Answered::Found(found)) => fits(state == found, state),
        // Whatever it found, it did the one thing that it can do, or nothing.
        (asked, Answered::Unknown) => Some(effect(state, asked)),
        _ => None,
    }
}

/// What an unanswered operation makes of the state.
fn effect(state: Option<Version>, asked: Asked) -> Option<Version> {
    let newer = |version: Version| state.is_none_or(|current| current < version);
    match asked {
        Asked::Create(version) if state.is_none() => Some(version),
        Asked::Replace(version) if newer(version) => Some(version),
        Asked::Compare { expected, version } if state == expected && newer(version) => Some(version),
        Asked::Delete { expected } if state.is_some() && expected.is_none_or(|it| Some(it) == state) => None,
        _ => state,
    }
}

/// Most states looked at before a history is given up as too tangled to judge.
const SEARCH_MAX: usize = 400_000;

/// What a search found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    Linearizable,
    Impossible,
    TooTangled,
}

/// Looks for an order of `operations` in which every answer is true (Wing and Gong, with the states seen remembered).
pub(crate) fn judge(operations: &[Operation]) -> Verdict {
    let mut operations = operations.to_vec();
    operations.sort_by_key(|operation| operation.began);
    let words = operations.len().div_ceil(64);
    let mut seen: HashSet<(Vec<u64>, Option<Version>)> = HashSet::new();
    let mut open = vec![(vec![0_u64; words], None)];
    while let Some((done, state)) = open.pop() {
        let is_done = |index: usize| done[index / 64] >> (index % 64) & 1 == 1;
        let left = || operations.iter().enumerate().filter(|(index, _)| !is_done(*index));
        // What ended before another began comes before it.
        let first_end = left().map(|(_, operation)| operation.ended).min().unwrap_or(u64::MAX);
        if left().all(|(_, operation)| operation.answered == Answered::Unknown) {
            return Verdict::Linearizable;
        }
        for (index, operation) in left().take_while(|(_, operation)| operation.began <= first_end) {
            let Some(next) = step(state, operation.asked, operation.answered) else { continue };
            if operation.answered == Answered::Unknown && next == state {
                // It may as well never happen.
                continue;
            }
            let mut after = done.clone();
            after[index / 64] |= 1 << (index % 64);
            if seen.insert((after.clone(), next)) {
                open.push((after, next));
            }
        }
        if seen.len() > SEARCH_MAX {
            return Verdict::TooTangled;
        }
    }
    Verdict::Impossible
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_wire::{ids::WriterId, version::HybridClock};

    fn version(clock: u64) -> Version {
        Version { clock: HybridClock(clock), writer: WriterId([1; 16]) }
    }

    fn operation(began: u64, ended: u64, asked: Asked, answered: Answered) -> Operation {
        Operation { asked, answered, began, ended }
    }

    #[test]
    fn what_overlaps_may_have_happened_in_either_order_and_what_does_not_may_not() {
        let put = |began, ended| operation(began, ended, Asked::Create(version(1)), Answered::Committed);
        let miss = |began, ended| operation(began, ended, Asked::Get, Answered::Found(None));
        let hit = |began, ended| operation(began, ended, Asked::Get, Answered::Found(Some(version(1))));
        assert_eq!(judge(&[put(1, 4), miss(2, 3)]), Verdict::Linearizable);
        assert_eq!(judge(&[put(1, 4), hit(2, 3)]), Verdict::Linearizable);
        assert_eq!(judge(&[put(1, 2), miss(3, 4)]), Verdict::Impossible);
        // Seen, and then not seen any more.
        assert_eq!(judge(&[put(1, 6), hit(2, 3), miss(4, 5)]), Verdict::Impossible);
    }

    #[test]
    fn what_was_not_answered_may_happen_late_or_never() {
        let lost = operation(1, u64::MAX, Asked::Replace(version(7)), Answered::Unknown);
        let found = |began, ended, it| operation(began, ended, Asked::Get, Answered::Found(it));
        assert_eq!(judge(&[lost, found(2, 3, None), found(4, 5, Some(version(7)))]), Verdict::Linearizable);
        assert_eq!(judge(&[lost, found(2, 3, None)]), Verdict::Linearizable);
        let early = operation(2, u64::MAX, Asked::Replace(version(7)), Answered::Unknown);
        assert_eq!(judge(&[found(0, 1, Some(version(7))), early]), Verdict::Impossible, "seen before it was asked");
    }

    #[test]
    fn refusals_must_be_true_when_they_are_given() {
        let put = operation(1, 2, Asked::Create(version(5)), Answered::Committed);
        let refused = |current| operation(3, 4, Asked::Create(version(6)), Answered::Exists(version(current)));
        assert_eq!(judge(&[put, refused(5)]), Verdict::Linearizable);
        assert_eq!(judge(&[put, refused(4)]), Verdict::Impossible);
        let stale = operation(3, 4, Asked::Replace(version(9)), Answered::Stale(version(5)));
        assert_eq!(judge(&[put, stale]), Verdict::Impossible, "9 is not older than 5");
        let deleted = operation(3, 4, Asked::Delete { expected: None }, Answered::Deleted(version(5)));
        let missing = operation(5, 6, Asked::Delete { expected: None }, Answered::NotFound);
        assert_eq!(judge(&[put, deleted, missing]), Verdict::Linearizable);
        assert_eq!(judge(&[put, missing]), Verdict::Impossible);
    }
}
