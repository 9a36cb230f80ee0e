//! Versions: which write of a key is the later one.
//!
//! A version is a hybrid logical clock and the writer's id, chosen before the frame is written, so it is unique. All attempts of one put keep it.

use crate::{ids::WriterId, limits::VERSION_AHEAD_MAX, units::millis};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Hybrid logical clock: 48 bits of wall-clock milliseconds since 1970, then 16 bits of counter.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct HybridClock(pub u64);

const COUNTER_BITS: u32 = 16;

impl HybridClock {
    /// The first reading at `wall_ms`.
    #[must_use]
    pub const fn at(wall_ms: u64) -> Self {
        Self(wall_ms << COUNTER_BITS)
    }

    /// The wall-clock part, in milliseconds since 1970.
    #[must_use]
    pub const fn wall_ms(self) -> u64 {
        self.0 >> COUNTER_BITS
    }

    /// The next reading of a clock that last read `self` when the wall clock says `wall_ms`: always greater than `self`.
    #[must_use]
    pub fn next(self, wall_ms: u64) -> Self {
        Self(self.0.saturating_add(1)).max(Self::at(wall_ms))
    }

    /// Whether a leader whose wall clock says `wall_ms` turns this reading away: it lies more than [`VERSION_AHEAD_MAX`] ahead and is not
    /// just one tick above `current`.
    #[must_use]
    pub fn too_far_ahead(self, wall_ms: u64, current: Option<Self>) -> bool {
        let one_above = current.is_some_and(|current| self.0 == current.0.saturating_add(1));
        self.wall_ms() > wall_ms.saturating_add(millis(VERSION_AHEAD_MAX)) && !one_above
    }
}

/// Names one write of one key. Ordered by clock, then writer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Version {
    /// When, by the writer's hybrid clock.
    pub clock: HybridClock,
    /// By whom.
    pub writer: WriterId,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}@{}", self.clock.0, self.writer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_grows_when_the_wall_clock_goes_back() {
        let first = HybridClock::at(1_000);
        let second = first.next(10);
        assert!(second > first);
        assert_eq!(second.wall_ms(), 1_000);
        assert_eq!(second.next(2_000), HybridClock::at(2_000));
    }

    #[test]
    fn a_version_from_the_future_is_turned_away_unless_it_is_one_tick_above_the_current_one() {
        let far = HybridClock::at(1_000 + millis(VERSION_AHEAD_MAX) + 1);
        assert!(far.too_far_ahead(1_000, None));
        assert!(far.next(0).too_far_ahead(1_000, None));
        assert!(!far.next(0).too_far_ahead(1_000, Some(far)));
        assert!(!HybridClock::at(1_000 + millis(VERSION_AHEAD_MAX)).too_far_ahead(1_000, None));
    }
}
