//! The pure machines under consensus: entries in, outcomes out, snapshots as the state's canonical bytes.

use crate::grants::{self, GrantWish};
use quarry_meta_state::{
    Directory, Entry, Shard,
    directory::{DirectoryCommand, DirectoryOutcome},
    shard::{ShardCommand, ShardOutcome},
};
use quarry_proto::refusal::Refusal;
use quarry_raft::{LogIndex, Machine, SnapshotWriter};
use quarry_wire::{ids::FeedNumber, units::LogTime};
use serde::{Serialize, de::DeserializeOwned};
use std::{convert::Infallible, io};

/// A pure state machine that entries of commands drive.
pub(crate) trait Replicated: Clone + Send + Sync + 'static {
    /// What it is told.
    type Command: Serialize + DeserializeOwned + Send + 'static;
    /// What it answers, refusals included.
    type Outcome: Send + 'static;
    /// A wish from which a command is planned when its turn comes, against the state of that moment.
    type Wish: Send + 'static;

    fn apply(&mut self, at: LogTime, command: Self::Command) -> Self::Outcome;
    fn log_time(&self) -> LogTime;
    /// How far it is in the feed; the directory's own newest change.
    fn feed_position(&self) -> FeedNumber;
    fn next_deadline(&self) -> Option<LogTime>;
    /// The command that only passes time.
    fn tick() -> Self::Command;
    /// The commands that meet these wishes in one entry stamped `at`, or why not, one by one.
    fn plan(&self, at: LogTime, wishes: &[Self::Wish]) -> Vec<Result<Self::Command, Refusal>>;
    /// Writes its canonical bytes.
    fn encode_to(&self, out: &mut dyn io::Write) -> io::Result<()>;
    /// Reads what [`Replicated::encode_to`] wrote, to the end of `input`.
    fn decode_from(input: &mut dyn io::Read) -> io::Result<Self>;
    fn hash(&self) -> [u8; 32];
}

impl Replicated for Directory {
    type Command = DirectoryCommand;
    type Outcome = DirectoryOutcome;
    /// Commands of the directory are not planned.
    type Wish = Infallible;

    fn apply(&mut self, at: LogTime, command: DirectoryCommand) -> DirectoryOutcome {
        Self::apply(self, at, command)
    }
    fn log_time(&self) -> LogTime {
        Self::log_time(self)
    }
    fn feed_position(&self) -> FeedNumber {
        Self::feed_position(self)
    }
    fn next_deadline(&self) -> Option<LogTime> {
        Self::next_deadline(self)
    }
    fn tick() -> DirectoryCommand {
        DirectoryCommand::Tick
    }
    fn plan(&self, _: LogTime, wishes: &[Infallible]) -> Vec<Result<DirectoryCommand, Refusal>> {
        wishes.iter().map(|wish| match *wish {}).collect()
    }
    fn encode_to(&self, out: &mut dyn io::Write) -> io::Result<()> {
        Self::encode_to(self, out)
    }
    fn decode_from(input: &mut dyn io::Read) -> io::Result<Self> {
        Self::decode_from(input).map_err(invalid)
    }
    fn hash(&self) -> [u8; 32] {
        Self::hash(self)
    }
}

impl Replicated for Shard {
    type Command = ShardCommand;
    type Outcome = ShardOutcome;
    type Wish = GrantWish;

    fn apply(&mut self, at: LogTime, command: ShardCommand) -> ShardOutcome {
        Self::apply(self, at, command)
    }
    fn log_time(&self) -> LogTime {
        Self::log_time(self)
    }
    fn feed_position(&self) -> FeedNumber {
        Self::feed_position(self)
    }
    fn next_deadline(&self) -> Option<LogTime> {
        Self::next_deadline(self)
    }
    fn tick() -> ShardCommand {
        ShardCommand::Tick { horizon: None }
    }
    fn plan(&self, at: LogTime, wishes: &[GrantWish]) -> Vec<Result<ShardCommand, Refusal>> {
        grants::plan(self, at, wishes)
    }
    fn encode_to(&self, out: &mut dyn io::Write) -> io::Result<()> {
        Self::encode_to(self, out)
    }
    fn decode_from(input: &mut dyn io::Read) -> io::Result<Self> {
        Self::decode_from(input).map_err(invalid)
    }
    fn hash(&self) -> [u8; 32] {
        Self::hash(self)
    }
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// A pure machine as consensus sees it.
#[derive(Clone)]
pub(crate) struct StateMachine<S: Replicated> {
    state: S,
    #[cfg(feature = "sim")]
    watched: Option<crate::sim::Watched<S>>,
}

impl<S: Replicated> StateMachine<S> {
    pub(crate) const fn new(state: S) -> Self {
        Self {
            state,
            #[cfg(feature = "sim")]
            watched: None,
        }
    }
    /// One whose every step is seen.
    #[cfg(feature = "sim")]
    pub(crate) const fn watched(state: S, watched: crate::sim::Watched<S>) -> Self {
        Self { state, watched: Some(watched) }
    }
    pub(crate) const fn state(&self) -> &S {
        &self.state
    }
}

impl<S: Replicated> Machine for StateMachine<S> {
    /// One outcome per command of the entry, in order.
    type Outcome = Vec<S::Outcome>;

    fn apply(&mut self, index: LogIndex, command: &[u8]) -> Vec<S::Outcome> {
        // A replica that skipped an entry would drift away from the others: better none than a wrong one.
        let entry = Entry::<S::Command>::decode(command)
            .unwrap_or_else(|error| panic!("entry {index} of the log cannot be applied: {error}"));
        #[cfg(feature = "sim")]
        let before = self.watched.is_some().then(|| self.state.clone());
        let outcomes: Vec<S::Outcome> =
            entry.commands.into_iter().map(|command| self.state.apply(entry.at, command)).collect();
        #[cfg(feature = "sim")]
        if let Some((watched, before)) = self.watched.as_ref().zip(before) {
            let entry = Entry::<S::Command>::decode(command).expect("it was decoded above");
            watched(index, &entry, &before, &self.state, &outcomes);
        }
        outcomes
    }

    fn snapshot(&self) -> Box<dyn SnapshotWriter> {
        Box::new(Frozen(self.state.clone()))
    }

    fn restore(&mut self, input: &mut dyn io::Read) -> io::Result<()> {
        self.state = S::decode_from(input)?;
        Ok(())
    }

    fn hash(&self) -> [u8; 32] {
        self.state.hash()
    }
}

/// A state that is written as it is now, whatever is applied meanwhile.
pub(crate) struct Frozen<S>(pub(crate) S);

impl<S: Replicated> SnapshotWriter for Frozen<S> {
    fn write_to(self: Box<Self>, out: &mut dyn io::Write) -> io::Result<()> {
        self.0.encode_to(out)
    }
}
