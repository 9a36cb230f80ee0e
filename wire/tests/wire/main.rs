//! The signed statements: what is believed, and what is not.

mod statements;
