//! What a group replicates: a deterministic machine, driven by commands.
//! This crate decides when a command is applied and in which order; what it means is the machine's own affair.

use std::io;

use crate::ids::LogIndex;

/// The largest command that can be proposed.
pub const MAX_COMMAND_BYTES: usize = 32 * 1024;

/// A deterministic state machine: the same commands in the same order give the same state and the same outcomes on
/// every replica. No clock, no randomness, no I/O. A clone of it should cost little, however large the state is: commands wait meanwhile.
pub trait Machine: Clone + Send + Sync + 'static {
    /// What a command led to, refusals included.
    type Outcome: Send + 'static;

    /// Applies one committed command. Called once for each command, in log order, on every replica.
    ///
    /// Commands are at most [`MAX_COMMAND_BYTES`] long. One that the machine cannot decode is a fault of the process
    /// (a newer peer wrote it, or memory is damaged), not of the caller who proposed it: the machine panics, which stops
    /// the group on this node, rather than skip it and drift away from the other replicas.
    fn apply(&mut self, index: LogIndex, command: &[u8]) -> Self::Outcome;

    /// A frozen copy of the state, which is written while further commands are applied.
    /// Commands wait for this call, so it should not serialise.
    fn snapshot(&self) -> Box<dyn SnapshotWriter>;

    /// Replaces the whole state by one that [`Machine::snapshot`] wrote.
    ///
    /// # Errors
    /// When the input cannot be read or decoded. The machine may be left in any state, and the group stops.
    fn restore(&mut self, input: &mut dyn io::Read) -> io::Result<()>;

    /// A hash over the canonical state: equal on all replicas that applied the same commands.
    fn hash(&self) -> [u8; 32];
}

/// A frozen state that can be written once.
pub trait SnapshotWriter: Send {
    /// Writes the state, on a thread that may block.
    ///
    /// # Errors
    /// Those of `out`.
    fn write_to(self: Box<Self>, out: &mut dyn io::Write) -> io::Result<()>;
}
