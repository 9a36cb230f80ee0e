//! One group as this node hosts it: its machine to read, its log to propose to, its running clock.

use crate::{
    door,
    machine::{Replicated, StateMachine},
    proposer::{Done, Proposer},
    timekeeper::{Timekeeper, stamp_due},
};
use quarry_proto::refusal::Refusal;
use quarry_raft::{Group, GroupId, GroupStatus, Term};
use quarry_wire::units::LogTime;
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout_at},
};

/// How long the node's own proposals (stamps, feed, lendings) may take.
pub(crate) const OWN_PROPOSAL: Duration = Duration::from_secs(10);
/// Stamps follow each other no faster.
const STAMP_PAUSE: Duration = Duration::from_millis(10);

/// A hosted group.
pub(crate) struct Hosted<S: Replicated> {
    pub(crate) group: Group<StateMachine<S>>,
    proposer: Proposer<S>,
    keeper: Arc<Timekeeper>,
}

impl<S: Replicated> Hosted<S> {
    /// The group and the work of its proposer.
    pub(crate) fn new(group: Group<StateMachine<S>>) -> (Self, impl Future<Output = ()> + Send) {
        let keeper = Arc::new(Timekeeper::default());
        let (proposer, work) = Proposer::new(group.clone(), Arc::clone(&keeper));
        (Self { group, proposer, keeper }, work)
    }

    pub(crate) fn id(&self) -> GroupId {
        self.group.id()
    }

    /// Reads the state that is applied here, whoever leads.
    pub(crate) fn read<R>(&self, read: impl FnOnce(&S) -> R) -> R {
        self.group.with(|machine, _| read(machine.state()))
    }

    /// The same, at one index, with the leader's running clock, once a majority confirmed that this node leads.
    pub(crate) async fn read_linearized<R>(
        &self,
        deadline: Instant,
        read: impl FnOnce(&S, LogTime) -> R,
    ) -> Result<R, Refusal> {
        self.group.read_index(deadline).await.map_err(|error| door::read_refused(self.id(), error))?;
        let term = self.leads()?;
        Ok(self.group.with(|machine, _| read(machine.state(), self.stamp(term, machine.state()))))
    }

    /// A copy of the state that is applied here, to walk over all of it: entries wait for the copy alone, which costs little.
    pub(crate) fn frozen(&self) -> S {
        self.read(S::clone)
    }

    /// The term that this node leads in and whose machine holds all that earlier leaders committed.
    pub(crate) fn leads(&self) -> Result<Term, Refusal> {
        match self.group.leads() {
            Some((term, Some(_))) => Ok(term),
            Some((_, None)) => {
                Err(door::not_ready(format!("the leader of group {} has just begun", self.id()), door::RETRY))
            }
            None => Err(door::not_leader(self.id(), self.group.status().leader)),
        }
    }

    /// The leader's clock now.
    pub(crate) fn running(&self) -> Result<LogTime, Refusal> {
        let term = self.leads()?;
        Ok(self.group.with(|machine, _| self.stamp(term, machine.state())))
    }

    fn stamp(&self, term: Term, state: &S) -> LogTime {
        self.keeper.stamp(term, Instant::now(), || state.log_time())
    }

    /// Proposes one command and waits until it was applied.
    pub(crate) async fn propose(&self, command: S::Command, deadline: Instant) -> Result<Done<S::Outcome>, Refusal> {
        self.proposer.propose(command, deadline).await
    }

    /// Plans a command when its turn comes, proposes it and waits until it was applied.
    pub(crate) async fn plan(&self, wish: S::Wish, deadline: Instant) -> Result<Done<S::Outcome>, Refusal> {
        self.proposer.plan(wish, deadline).await
    }

    /// What this node knows of the group, as it changes; every applied entry is a change.
    pub(crate) fn watch(&self) -> watch::Receiver<GroupStatus> {
        self.group.watch()
    }

    /// Waits until the state applied here satisfies `holds`; false if it does not by the deadline.
    pub(crate) async fn wait_for(&self, deadline: Instant, holds: impl Fn(&S) -> bool) -> bool {
        let mut watch = self.watch();
        loop {
            watch.mark_unchanged();
            if self.read(&holds) {
                return true;
            }
            if !matches!(timeout_at(deadline, watch.changed()).await, Ok(Ok(()))) {
                return self.read(&holds);
            }
        }
    }

    /// Stamps the log while this node leads and a deadline is pending: at the deadline, and before it often enough. Silent otherwise. Ends
    /// with the group.
    pub(crate) async fn keep_time(self: Arc<Self>) {
        let mut watch = self.watch();
        loop {
            watch.mark_unchanged();
            let due = self.leads().ok().and_then(|term| {
                self.read(|state| {
                    let due = stamp_due(state.log_time(), state.next_deadline())?;
                    Some(due.since(self.stamp(term, state)))
                })
            });
            if due == Some(Duration::ZERO) {
                if let Err(refusal) = self.propose(S::tick(), Instant::now() + OWN_PROPOSAL).await {
                    tracing::debug!(group = %self.id(), %refusal, "a stamp was not taken");
                }
                sleep(STAMP_PAUSE).await;
                continue;
            }
            tokio::select! {
                changed = watch.changed() => if changed.is_err() { return },
                () = sleep(due.unwrap_or_default()), if due.is_some() => {}
            }
        }
    }

    /// Puts the running clock in the log before this node gives up its office, if anything waits for time to pass: the next leader goes on
    /// from there.
    pub(crate) async fn stamp_before_leaving(&self, deadline: Instant) {
        if self.leads().is_ok()
            && self.read(|state| state.next_deadline().is_some())
            && let Err(refusal) = self.propose(S::tick(), deadline).await
        {
            tracing::debug!(group = %self.id(), %refusal, "no last stamp");
        }
    }
}
