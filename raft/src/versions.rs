//! Which versions two builds have in common: of what they say to each other, and of the states and entries that they keep.
//!
//! Each side names a span, `[since, until)`. What is *said* is said to one peer: of two builds whose spans overlap each may call the other, and
//! they use the newest version that both know. What is *kept* is the same bytes for every replica, whoever reads them later: so a build proposes
//! in one version, and two builds call each other only if each reads what the other proposes. A new version of states and entries takes two
//! builds: one that reads it and proposes the older one, and then one that proposes it.

use std::fmt;

/// The versions from `since` on that lie below `until`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The oldest.
    pub since: u32,
    /// The first that is not known.
    pub until: u32,
}

impl Span {
    /// One version alone.
    #[must_use]
    pub const fn only(version: u32) -> Self {
        Self { since: version, until: version.saturating_add(1) }
    }

    /// Whether this version is in it.
    #[must_use]
    pub const fn has(self, version: u32) -> bool {
        self.since <= version && version < self.until
    }

    /// The newest version that is in both.
    #[must_use]
    pub fn common(self, other: Self) -> Option<u32> {
        let (since, until) = (self.since.max(other.since), self.until.min(other.until));
        (since < until).then(|| until - 1)
    }
}

/// What a build does with states and entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateVersions {
    /// Those that it reads, and applies as whoever proposed them.
    pub reads: Span,
    /// The version of the commands that it proposes, one of those that it reads.
    pub proposes: u32,
}

impl StateVersions {
    /// One version alone.
    #[must_use]
    pub const fn only(version: u32) -> Self {
        Self { reads: Span::only(version), proposes: version }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let newest = self.until.saturating_sub(1);
        if self.since >= newest { write!(f, "{newest}") } else { write!(f, "{} to {newest}", self.since) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_use_the_newest_version_that_both_know() {
        let span = |since, until| Span { since, until };
        for (ours, theirs, common) in [
            (span(1, 2), span(1, 2), Some(1)),
            (span(1, 3), span(2, 5), Some(2)),
            (span(2, 5), span(1, 4), Some(3)),
            (span(1, 2), span(2, 3), None),
            (span(4, 6), span(1, 4), None),
            (span(3, 3), span(1, 9), None),
            (span(0, 0), span(0, 0), None),
        ] {
            assert_eq!(ours.common(theirs), common, "{ours} and {theirs}");
            assert_eq!(theirs.common(ours), common, "{theirs} and {ours}");
        }
    }

    #[test]
    fn a_span_reads_as_a_person_would_say_it() {
        assert_eq!(Span::only(3).to_string(), "3");
        assert_eq!(Span { since: 3, until: 6 }.to_string(), "3 to 5");
    }
}
