//! Abuse: writers, readers, nodes and messages treated worse than any deployment will treat them, on real processes and real libfabric.
//!
//! Each test says in its comment which guard it is about. Seen to fail without it were `races`, `stopped` and `slow_readers`; the others were
//! not tried without theirs. `QUARRY_ABUSE_TIMES=10` does everything ten times as often, `QUARRY_SEED` draws the same random numbers again. Smaller faults stand in the suites `faults` and `crash`.
#![expect(clippy::unwrap_used, reason = "tests may fail by panicking, helpers of tests too")]

mod blocked;
mod crowds;
mod deposed;
mod history;
mod kills;
mod leaders;
mod messages;
mod mutants;
mod races;
mod replies;
mod requests;
mod restarts;
mod rotations;
mod slow_readers;
mod stopped;
