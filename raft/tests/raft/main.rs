//! Hosts on real disks and real sockets, in one process or in child processes that are killed and traced.

mod cluster;
mod crashes;
mod disks;
mod groups;
mod members;
