//! What both sides of every Quarry connection must agree on: ids, units, frames, signed statements, limits.
//!
//! Decides layouts and how a statement is checked; never touches a clock, a socket, a disk or a random source. The layouts are drawn above
//! their types and in `docs/wire.md`; they do not change, they get a new version beside them.
//! Keeps *Nothing unsigned* (see [`keyring`]) and the checks behind *No wrong value* (see [`frame`]).
#![warn(missing_docs)]

pub mod attestation;
pub mod canonical;
pub mod certificate;
pub mod frame;
pub mod grant;
pub mod ids;
pub mod key;
pub mod keyring;
pub mod limits;
pub mod merkle;
pub mod region;
pub mod signed;
mod together;
pub mod units;
pub mod version;
