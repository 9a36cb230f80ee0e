//! Simulated clusters: three meta nodes in one thread, under one seed.
//!
//! The consensus library, our logs and snapshots, the proposers, clocks, feed and horizon of a meta node, and the pure machines are those of
//! production; played are the disk under the log, the wire, and the clients. One seed is one history: the same seed has the same trace, in
//! every process. After every entry that any replica applies the invariants are checked; at the end the history of every key must be
//! linearizable, all replicas equal, and all memory free or in use by a value.
//!
//! | file | what it is |
//! | --- | --- |
//! | `world` | nodes that start, crash and start again; calls to them |
//! | `chaos` | what goes wrong, and when |
//! | `client` | writers and readers, and what they were told |
//! | `checks` | what must hold after every step |
//! | `history` | linearizability of one key |
//! | `run` | one seed from beginning to end |

mod chaos;
mod checks;
mod client;
mod history;
mod run;
mod world;

pub use run::{Mutant, Report, run};
