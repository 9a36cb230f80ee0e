//! Crashes of the control plane: leaders killed under load, whole clusters restarted, followers left behind, disks asked.
//!
//! Proves that what was acknowledged is there afterwards, that all nodes come to the same state, and that nothing is acknowledged before
//! it is on the disks of a quorum. Failures of data nodes and writers stand in the suite `faults`.
#![expect(clippy::unwrap_used, reason = "tests may fail by panicking, helpers of tests too")]

mod leaders;
mod load;
mod rescues;
mod restarts;
mod snapshots;
mod sync;
