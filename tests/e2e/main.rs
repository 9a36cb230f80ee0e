//! End to end: what users of Quarry see, on a cluster of real processes that stays healthy.
//!
//! Proves the outcomes of puts, gets, deletes, namespaces and commands, the limits, and that malformed requests are refused typed and change
//! nothing. What happens when processes fail stands in the suites `faults` and `crash`. Unless a test needs a cluster of its own, all share
//! one and take namespaces of their own.
#![expect(clippy::unwrap_used, reason = "tests may fail by panicking, helpers of tests too")]

mod batches;
mod commands;
mod commits;
mod doors;
mod drops;
mod eviction;
mod leases;
mod library;
mod members;
mod moves;
mod namespaces;
mod observe;
mod operators;
mod pins;
mod recorded;
mod revocations;
mod shards;
mod trust;
mod values;
mod versions;
