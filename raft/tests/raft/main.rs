//! Hosts on real disks and real sockets, in one process or in child processes that are killed and traced.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

mod cluster;
mod crashes;
mod disks;
mod groups;
mod idle;
mod members;
mod rescues;
mod snapshots;
