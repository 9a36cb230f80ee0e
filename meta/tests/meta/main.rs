//! Meta nodes over loopback gRPC, each in a runtime of its own so that it can be killed; data nodes are played by the tests, with real keys.
#![expect(clippy::unwrap_used, reason = "what is unwrapped here is what the tests prove")]

mod cluster;
mod eviction;
mod leaders;
mod lending;
mod members;
mod moves;
mod nodes;
mod offices;
mod pins;
mod player;
mod rescues;
mod values;
mod wall;
