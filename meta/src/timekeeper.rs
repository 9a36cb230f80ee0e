//! Log time at a leader: what the next stamp is, and when one is due.
//!
//! A leader's stamp is the last stamp in its log at election plus its own monotonic time since; so log time never goes back and never runs
//! faster than real time, whoever leads (*Log time only creeps*). It stands still while a group has no leader.
//! Decides only; `proposer.rs` stamps entries with it, `ticker.rs` proposes the stamps that are due.

use parking_lot::Mutex;
use quarry_raft::Term;
use quarry_wire::units::LogTime;
use std::time::Duration;
use tokio::time::Instant;

/// Longest time between two stamps while a deadline is pending.
const STAMP_GAP_MAX: Duration = Duration::from_secs(600);
/// Shortest, but for the stamp at the deadline itself.
const STAMP_GAP_MIN: Duration = Duration::from_secs(1);

/// The running clock of one group at this node, while it leads.
#[derive(Debug, Default)]
pub(crate) struct Timekeeper(Mutex<Option<Office>>);

#[derive(Debug, Clone, Copy)]
struct Office {
    term: Term,
    /// Last stamp of the log when this leader began.
    base: LogTime,
    began: Instant,
    /// Last stamp given.
    last: LogTime,
}

impl Timekeeper {
    /// The stamp of an entry proposed at `now` by the leader of `term`. `log_time` is the last stamp that the state holds; it is read only
    /// when a term begins, so it must hold all that earlier leaders committed.
    pub(crate) fn stamp(&self, term: Term, now: Instant, log_time: impl FnOnce() -> LogTime) -> LogTime {
        let mut office = self.0.lock();
        let office = match &mut *office {
            Some(office) if office.term == term => office,
            other => {
                let base = log_time();
                other.insert(Office { term, base, began: now, last: base })
            }
        };
        let running = office.base.after(now.saturating_duration_since(office.began));
        office.last = office.last.max(running);
        office.last
    }
}

/// When the next stamp must be in the log, if a deadline is pending: at the deadline, and before it often enough that a new leader, who goes
/// on from the last stamp, loses at most a tenth of the time left.
pub(crate) fn stamp_due(last: LogTime, deadline: Option<LogTime>) -> Option<LogTime> {
    let deadline = deadline?;
    let gap = (deadline.since(last) / 10).clamp(STAMP_GAP_MIN, STAMP_GAP_MAX);
    Some(deadline.min(last.after(gap)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn a_leader_goes_on_from_the_last_stamp_at_the_pace_of_its_own_clock() {
        let (keeper, start) = (Timekeeper::default(), Instant::now());
        assert_eq!(keeper.stamp(Term(1), start, || LogTime(500)), LogTime(500));
        assert_eq!(keeper.stamp(Term(1), start + SECOND, || panic!("read once a term")), LogTime(1_500));
        // Another led in between and came only to 900: the time without this leader does not count.
        assert_eq!(keeper.stamp(Term(3), start + 60 * SECOND, || LogTime(900)), LogTime(900));
        assert_eq!(keeper.stamp(Term(3), start + 61 * SECOND, || panic!("read once a term")), LogTime(1_900));
    }

    #[tokio::test(start_paused = true)]
    async fn stamps_never_go_back() {
        let (keeper, start) = (Timekeeper::default(), Instant::now());
        assert_eq!(keeper.stamp(Term(1), start, || LogTime(10)), LogTime(10));
        assert_eq!(keeper.stamp(Term(1), start + 2 * SECOND, || panic!("read once a term")), LogTime(2_010));
        assert_eq!(keeper.stamp(Term(1), start + SECOND, || panic!("read once a term")), LogTime(2_010));
    }

    #[test]
    fn a_stamp_is_due_at_the_deadline_and_at_tenths_of_the_time_left() {
        assert_eq!(stamp_due(LogTime(0), None), None);
        assert_eq!(stamp_due(LogTime(0), Some(LogTime(500))), Some(LogTime(500)));
        assert_eq!(stamp_due(LogTime(0), Some(LogTime(5_000))), Some(LogTime(1_000)));
        assert_eq!(stamp_due(LogTime(0), Some(LogTime(30_000))), Some(LogTime(3_000)));
        assert_eq!(stamp_due(LogTime(0), Some(LogTime(100_000_000))), Some(LogTime(600_000)));
        assert_eq!(stamp_due(LogTime(7_000), Some(LogTime(7_000))), Some(LogTime(7_000)));
    }
}
