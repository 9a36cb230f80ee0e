//! A real data node on the real fabric, over loopback. The meta node beside it is a double: it numbers incarnations, takes records, and
//! judges publishes as simply as a shard could, so that tests can make it refuse, stay silent and forget.
#![expect(clippy::unwrap_used, reason = "tests may fail by panicking, helpers of tests too")]

mod arms;
mod commits;
mod damage;
mod fencing;
mod keys;
mod limits;
mod lives;
mod moves;
mod rotations;
mod support;
