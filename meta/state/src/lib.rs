//! The pure state machines of Quarry's control plane: directory and shard.
//!
//! `apply(LogTime, Command) -> Outcome`: the same entries give the same state and the same outcomes on every replica. A leader proposes
//! (holders, offsets, the dead), apply validates; what is turned down is an outcome too. Nothing here reads a clock, draws at random, does
//! floating-point arithmetic or touches a host; persisting, timing and talking are the business of `quarry-meta`.
//!
//! The invariants that a state can show are checked by [`Shard::check`] and [`Directory::check`], those that a step can show by
//! [`Shard::check_step`] and [`Directory::check_step`]; [`Violation`] names the one that broke.
#![warn(missing_docs)]
#![deny(clippy::wildcard_enum_match_arm, clippy::float_arithmetic)]

mod cow_arc;
pub mod directory;
pub mod entry;
mod invariant;
pub mod lending;
pub mod map;
mod ordered;
mod requests;
pub mod shard;
mod snapshot;

pub use directory::Directory;
pub use entry::{Entry, EntryError};
pub use invariant::{Invariant, Violation};
pub use requests::{RequestId, RequestRefusal};
pub use shard::Shard;
pub use snapshot::{SNAPSHOT_SINCE, SNAPSHOT_VERSION, SnapshotError, StateHash, hash_written};
