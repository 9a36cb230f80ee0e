//! Meta nodes over loopback gRPC, each in a runtime of its own so that it can be killed; data nodes are played by the tests, with real keys.

mod cluster;
mod leaders;
mod nodes;
mod player;
mod values;
