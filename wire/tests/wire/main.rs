//! The signed statements: what is believed, and what is not. Recorded bytes: what stays readable.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod recorded;
mod statements;
