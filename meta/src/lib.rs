//! The meta node: serves the directory and the shards.
//!
//! Hosts group 0 (the directory) and one group per shard on one consensus host; turns calls into commands and reads, outcomes into messages.
//! What a command means is decided in `quarry-meta-state`, when it is committed in `quarry-raft`; the bytes of values never come here.
//!
//! | file | decides | keeps |
//! | --- | --- | --- |
//! | `timekeeper` | the next stamp, and when one is due | *Log time only creeps* |
//! | `proposer` | what stands in which entry | *Linearizable* (which errors are definite) |
//! | `grants` | plans of grants | – (apply validates) |
//! | `leaders` | which leadership moves to even out | – |
//! | `offices` | who takes over from a node that leads too much, drains or stops | *Log time only creeps* (the last stamp goes first) |
//! | `leases` | when the horizon is raised; how long a lease is | *Leases hold* |
//! | `feed` | when shards are told, when extents are lent | *Nothing leaks* |
//! | `members` | the next step of a change of the meta nodes | *Epochs only grow* |
//! | `membership` | who is silent, who is dead | – |
//! | `service/publish` | whom to believe | *Nothing unsigned* |
//! | `service/resolve` | what a descriptor is sent with | *No half-truth* |
//!
//! Every wait has a deadline: the caller's (`grpc-timeout`), or the configured one.

pub mod backup;
mod clock;
mod config;
mod core;
mod disk;
mod door;
mod error;
mod eviction;
mod feed;
mod grants;
mod health;
mod hosted;
mod leaders;
mod leases;
mod lending;
mod machine;
mod members;
mod membership;
mod metrics;
mod moves;
mod node;
mod offices;
mod probe;
mod proposer;
mod recent;
pub mod rescue;
mod service;
#[cfg(feature = "sim")]
pub mod sim;
mod timekeeper;
mod tree;

pub use clock::WallClock;
pub use config::{Marks, MetaConfig, SHARDS_MAX, Timing};
pub use error::MetaError;
pub use metrics::describe_metrics;
pub use node::MetaNode;
pub use probe::MetaProbe;
pub use quarry_meta_state::map::RegionMap;
