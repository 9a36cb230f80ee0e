//! The data node: lends registered memory to writers and readers, judges who may write it, and signs what it holds.
//!
//! What it holds can be rebuilt or dropped; what exists, and where, is only what the shards say. It is the last judge of one thing: which
//! writer can reach which bytes (*Fenced writers*). The parts, from the decision to the wire:
//!
//! - [`claims`]: who may write which bytes of which region. Pure; time is an argument.
//! - `lanes`, `readers`, `regions`: the endpoints that make those decisions true. A lane is an endpoint in a domain of its own; closing it is
//!   the fence. A reader lives for one epoch; `rotations` says when the next one begins.
//! - `confirm`: checks frames in memory against commit entries and signs one batch over those that are there (*No half-truth*).
//! - `commit`: coordinates: asks all holders to confirm, publishes at the shard's leader, answers one outcome per entry.
//! - `resign`: a new signing key, and the new signatures over what the old one signed.
//! - `membership`, `heartbeat`, `metas`: whom to believe, who is alive, who leads.
//! - `disk`: the one file that says whose data folder this is.
//!
//! Class `cache` alone is served: a durable grant is refused when it is armed, because its pages belong in a journal. The journal's place is
//! between `confirm`, which would copy a frame out and wait for its fsync, and `disk`, which owns every fsync ritual.

pub mod claims;
mod clock;
mod commit;
mod config;
mod confirm;
mod damage;
mod disk;
mod entropy;
mod error;
#[cfg(test)]
mod fences;
mod heartbeat;
mod holdings;
mod lanes;
mod membership;
mod metas;
mod metrics;
mod moves;
mod node;
mod probe;
mod readers;
mod regions;
mod resign;
mod rotations;
mod service;
mod sharing;

pub use config::{DataNodeConfig, KeySource, Labels};
pub use error::DataNodeError;
pub use metrics::describe_metrics;
pub use node::DataNode;
pub use probe::DataProbe;
