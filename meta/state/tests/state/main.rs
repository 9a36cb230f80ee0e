//! The state machines as their callers see them: stories, and random histories checked after every command.
#![expect(clippy::unwrap_used, reason = "helpers of tests are tests, but clippy knows only the marked functions")]

mod bench;
mod commits;
mod damage;
mod directory;
mod evict;
mod feed;
mod grants;
mod lending;
mod members;
mod moves;
mod pins;
mod random_cluster;
mod random_shard;
mod resign;
mod snapshots;
