//! The invariants that these machines can show, by name.

use std::fmt;

/// An invariant that a state or a step can be checked for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Invariant {
    /// A descriptor is resolvable only if a signed batch has exactly its leaf.
    NoHalfTruth,
    /// Per holder, a byte is in exactly one of free, granted, committed, resting.
    FreshSpace,
    /// One commit has one outcome, the first applied.
    IdempotentCommits,
    /// Freed memory rests until its last possible lease is over.
    LeasesHold,
    /// Incarnations, epochs and lend numbers never go back.
    EpochsOnlyGrow,
    /// Everything in use belongs to something that ends by itself.
    NothingLeaks,
    /// Log time, horizon and feed never go back.
    LogTimeOnlyCreeps,
    /// No key, certificate or record without its signature.
    NothingUnsigned,
    /// What is kept twice for speed agrees.
    IndexAgrees,
}

impl fmt::Display for Invariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoHalfTruth => "No half-truth",
            Self::FreshSpace => "Fresh space",
            Self::IdempotentCommits => "Idempotent commits",
            Self::LeasesHold => "Leases hold",
            Self::EpochsOnlyGrow => "Epochs only grow",
            Self::NothingLeaks => "Nothing leaks",
            Self::LogTimeOnlyCreeps => "Log time only creeps",
            Self::NothingUnsigned => "Nothing unsigned",
            Self::IndexAgrees => "an index agrees with what it indexes",
        })
    }
}

/// An invariant does not hold.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("broken: {invariant}: {detail}")]
pub struct Violation {
    /// Which.
    pub invariant: Invariant,
    /// Where.
    pub detail: String,
}

impl Violation {
    /// `Ok` if `holds`, else the violation with `detail`.
    pub(crate) fn unless(holds: bool, invariant: Invariant, detail: impl FnOnce() -> String) -> Result<(), Self> {
        if holds { Ok(()) } else { Err(Self { invariant, detail: detail() }) }
    }
}
