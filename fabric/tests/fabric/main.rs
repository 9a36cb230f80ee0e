//! The fabric on the real provider, over loopback: two or more endpoints, and peers in processes of their own where something is
//! to be stopped or killed.

#![expect(clippy::unwrap_used, reason = "tests may fail by panicking, helpers of tests too")]

mod basics;
mod double;
mod fences;
mod library;
mod many;
mod peers;
mod pieces;
mod reference;
mod refusals;
mod support;
