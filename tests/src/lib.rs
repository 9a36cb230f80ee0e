//! The cluster harness of the suites `e2e`, `faults`, `crash` and `abuse`: real processes on loopback, real libfabric.
//!
//! Decides how clusters are started, shared, bounded and cleaned up, how conditions are waited for, and how a write is done by hand, step by
//! step. Leaves to the suites what is proven. Nothing here sleeps for luck: a wait polls a condition and ends at a deadline that names what
//! was missing.

pub mod bare;
pub mod calls;
pub mod cluster;
pub mod raw;
pub mod relay;
pub mod rounds;
pub mod seed;
pub mod sockets;
pub mod stranger;
pub mod tools;
pub mod victim;
pub mod wait;

pub use cluster::{Shared, TestCluster, shared, shared_without_tls};
pub use quarry::local::{LocalSpec, Member, Signal};
pub use seed::Seed;
pub use wait::{eventually, soon};
