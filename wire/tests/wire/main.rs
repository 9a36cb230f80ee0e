//! The signed statements: what is believed, and what is not.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod statements;
