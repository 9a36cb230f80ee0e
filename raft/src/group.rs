//! One Raft group on this node: propose, read, watch, change.
//! Decides nothing about the state; translates between openraft and this crate's words.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::errors::{
    ClientWriteError, Fatal, ForwardReason, ForwardToLeader, InitializeError, LinearizableReadError,
};
use openraft::impls::ProgressResponder;
use openraft::raft::ReadPolicy;
use openraft::{BasicNode, Raft};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::error::{LeaderHint, ProposeError, RaftError, ReadError};
use crate::ids::{GroupId, LogIndex, RaftNodeId, Term};
use crate::machine::{MAX_COMMAND_BYTES, Machine, SnapshotWriter};
use crate::metrics::{self, GroupMeters};
use crate::port::Heard;
use crate::reads::Rounds;
use crate::replica::{Cell, Replica};
use crate::status::{GroupStatus, Role};
use crate::store::Store;
use crate::types::{Command, Metrics, Reply, Types, term_of};

pub(crate) type Node<M> = Raft<Types, Replica<M>>;

/// A command that was applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Applied<T> {
    /// Its place in the log.
    pub index: LogIndex,
    /// The term of the leader that took it in.
    pub term: Term,
    /// What the machine answered.
    pub outcome: T,
}

/// A frozen state of a machine.
pub struct Frozen {
    /// The term of the last entry in it.
    pub term: Term,
    /// The last entry in it; 0 if there is none.
    pub last: LogIndex,
    /// Its bytes, to be written once.
    pub state: Box<dyn SnapshotWriter>,
}

impl std::fmt::Debug for Frozen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Frozen").field("term", &self.term).field("last", &self.last).finish_non_exhaustive()
    }
}

/// A handle to one group. Cheap to clone.
pub struct Group<M: Machine> {
    inner: Arc<Inner<M>>,
}

impl<M: Machine> Clone for Group<M> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<M: Machine> std::fmt::Debug for Group<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group").field("id", &self.inner.id).finish_non_exhaustive()
    }
}

/// How long progress of the log may take to show in the status that is watched; elections and faults show at once.
const MOMENT: Duration = Duration::from_millis(1);

/// What of openraft's metrics the status tells of the log. The rest changes with every heartbeat.
#[derive(PartialEq)]
struct Progress {
    log: [Option<u64>; 5],
    matched: Vec<(u64, Option<u64>)>,
}

impl Progress {
    fn of(metrics: &Metrics) -> Self {
        let index = |id: &Option<crate::types::LogId>| id.as_ref().map(|id| id.index());
        let log = [
            metrics.last_log_index,
            index(&metrics.local_committed),
            index(&metrics.last_applied),
            index(&metrics.snapshot),
            index(&metrics.purged),
        ];
        let matched = metrics.replication.iter().flatten().map(|(id, matched)| (*id, index(matched))).collect();
        Self { log, matched }
    }
}

/// What of openraft's metrics is no mere progress of the log.
#[derive(PartialEq)]
struct Office {
    state: openraft::ServerState,
    term: u64,
    leader: Option<u64>,
    members: Option<crate::types::LogId>,
    running: bool,
}

impl Office {
    fn of(metrics: &Metrics) -> Self {
        Self {
            state: metrics.state,
            term: metrics.current_term,
            leader: metrics.current_leader,
            members: *metrics.membership_config.log_id(),
            running: metrics.running_state.is_ok(),
        }
    }
}

struct Inner<M: Machine> {
    id: GroupId,
    node: RaftNodeId,
    raft: Node<M>,
    cell: Arc<Cell<M>>,
    store: Arc<Store>,
    status: watch::Receiver<GroupStatus>,
    rounds: Rounds,
    /// Changes of members are made one after the other: two at once may leave a joint membership behind.
    changes: tokio::sync::Mutex<()>,
    propose_deadline: Duration,
    meters: Arc<GroupMeters>,
    heard: Heard,
    /// Whether this node stands for election by itself, as its port reads it.
    stands: Arc<AtomicBool>,
}

impl<M: Machine> Group<M> {
    pub(crate) fn new(
        id: GroupId,
        node: RaftNodeId,
        raft: Node<M>,
        cell: Arc<Cell<M>>,
        store: Arc<Store>,
        propose_deadline: Duration,
        (heard, stands): (Heard, Arc<AtomicBool>),
    ) -> Self {
        let mut metrics = raft.metrics();
        let fault = store.committer().watch_failed();
        let first = GroupStatus::new(id, &metrics.borrow_watched(), &cell, fault.borrow().as_deref());
        let (publish, status) = watch::channel(first);
        let watched = Arc::clone(&cell);
        let meters = Arc::new(GroupMeters::new(id));
        let counting = Arc::clone(&meters);
        tokio::spawn(async move {
            let (mut office, mut progress) = (Office::of(&metrics.borrow_watched()), None);
            while metrics.changed().await.is_ok() && !publish.is_closed() {
                let (found, gone_on) = {
                    let metrics = metrics.borrow_watched();
                    (Office::of(&metrics), Progress::of(&metrics))
                };
                let same = std::mem::replace(&mut office, found) == office && fault.borrow().is_none();
                let idle = progress.as_ref() == Some(&gone_on);
                progress = Some(gone_on);
                if same && idle {
                    continue;
                }
                if same {
                    // The log went on, and will do so a few more times for the same entry: whoever waits for its answer comes first.
                    sleep(MOMENT).await;
                }
                let now = GroupStatus::new(id, &metrics.borrow_watched(), &watched, fault.borrow().as_deref());
                publish.send_if_modified(|before| {
                    let changed = *before != now;
                    if now.leader.is_some() && (now.leader != before.leader || now.term != before.term) {
                        counting.leader_changes.increment(1);
                    }
                    *before = now;
                    changed
                });
            }
        });
        let (rounds, changes) = (Rounds::default(), tokio::sync::Mutex::new(()));
        Self {
            inner: Arc::new(Inner {
                id,
                node,
                raft,
                cell,
                store,
                status,
                rounds,
                changes,
                propose_deadline,
                meters,
                heard,
                stands,
            }),
        }
    }

    /// The group's name.
    pub fn id(&self) -> GroupId {
        self.inner.id
    }

    /// Forms the group: once, on one node, with the `host:port` of every member. All members must host the group.
    ///
    /// # Errors
    /// [`RaftError::AlreadyInitialized`] when this node has a log already; [`RaftError::NotAMember`] when the list
    /// leaves this node out.
    pub async fn initialize(&self, members: BTreeMap<RaftNodeId, String>) -> Result<(), RaftError> {
        let ids: BTreeSet<RaftNodeId> = members.keys().copied().collect();
        let nodes: BTreeMap<u64, BasicNode> =
            members.into_iter().map(|(id, addr)| (id.0, BasicNode { addr })).collect();
        self.answered(self.inner.raft.initialize(nodes), "formation").await?.map_err(|error| match error {
            openraft::errors::RaftError::APIError(InitializeError::NotAllowed(_)) => {
                RaftError::AlreadyInitialized { group: self.inner.id }
            }
            openraft::errors::RaftError::APIError(InitializeError::NotInMembers(_)) => {
                RaftError::NotAMember { node: self.inner.node, members: ids }
            }
            openraft::errors::RaftError::Fatal(fatal) => self.fatal(&fatal),
        })
    }

    /// Whether the group was formed, as far as this node knows.
    pub fn is_initialized(&self) -> bool {
        !self.status().members.is_empty()
    }

    /// Appends a command and waits until it is applied here.
    ///
    /// # Errors
    /// See [`ProposeError`]: only [`ProposeError::Indeterminate`] leaves open whether the command is applied. Dropping
    /// the future leaves it open too.
    pub async fn propose(&self, command: Bytes) -> Result<Applied<M::Outcome>, ProposeError> {
        self.write(command, None).await
    }

    /// Like [`Group::propose`], if this node still leads in `term` when the command reaches the log; otherwise
    /// [`ProposeError::NotLeader`], also when it leads again in a later term. For commands that say what was true of
    /// one term of office.
    ///
    /// # Errors
    /// See [`ProposeError`].
    pub async fn propose_in(&self, term: Term, command: Bytes) -> Result<Applied<M::Outcome>, ProposeError> {
        self.write(command, Some(term)).await
    }

    async fn write(&self, command: Bytes, term: Option<Term>) -> Result<Applied<M::Outcome>, ProposeError> {
        let written = self.write_uncounted(command, term).await;
        self.count([&written]);
        written
    }

    fn count<'a>(&self, results: impl IntoIterator<Item = &'a Result<Applied<M::Outcome>, ProposeError>>)
    where
        M::Outcome: 'a,
    {
        for result in results {
            self.inner.meters.proposals.increment(1);
            if result.is_err() {
                self.inner.meters.proposals_failed.increment(1);
            }
        }
    }

    async fn write_uncounted(&self, command: Bytes, term: Option<Term>) -> Result<Applied<M::Outcome>, ProposeError> {
        let command = self.admit(command)?;
        let limit = self.inner.propose_deadline;
        let (responder, answer) = ProgressResponder::complete_only();
        let mut request = self.inner.raft.write(command).responder(responder);
        if let Some(Term(term)) = term {
            request = request.with_leader(term);
        }
        let written = timeout(limit, async {
            request.await.map_err(|fatal| unknown(&fatal))?;
            answer.await.map_err(|_| ProposeError::Indeterminate { why: "the group ended".to_owned() })
        });
        match written.await {
            Ok(Ok(Ok(response))) => Ok(applied(&response.log_id, response.data)),
            Ok(Ok(Err(error))) => Err(refused(error)),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(ProposeError::Indeterminate { why: format!("not applied within {limit:?}") }),
        }
    }

    /// Appends several commands together, as entries of their own, and waits for all. The results are in the order of
    /// the commands; each stands alone.
    pub async fn propose_many(&self, commands: Vec<Bytes>) -> Vec<Result<Applied<M::Outcome>, ProposeError>> {
        let count = commands.len();
        let admitted: Result<Vec<Command>, ProposeError> =
            commands.into_iter().map(|command| self.admit(command)).collect();
        let admitted = match admitted {
            Ok(admitted) => admitted,
            Err(error) => return vec_of(count, &error),
        };
        let limit = self.inner.propose_deadline;
        let mut results = Vec::with_capacity(count);
        let written = timeout(limit, async {
            let mut answers = self.inner.raft.client_write_many(admitted).await?;
            while let Some(answer) = answers.next().await {
                results.push(match answer? {
                    Ok(response) => Ok(applied(&response.log_id, response.response)),
                    Err(error) => Err(refused(error)),
                });
            }
            Ok(())
        })
        .await;
        let rest = match written {
            Ok(Ok(())) => ProposeError::Indeterminate { why: "no answer".to_owned() },
            Ok(Err(fatal)) => unknown(&fatal),
            Err(_) => ProposeError::Indeterminate { why: format!("not applied within {limit:?}") },
        };
        let missing = count - results.len();
        results.extend(vec_of(missing, &rest));
        self.count(&results);
        results
    }

    fn admit(&self, command: Bytes) -> Result<Command, ProposeError> {
        if command.len() > MAX_COMMAND_BYTES {
            return Err(ProposeError::TooLarge { bytes: command.len(), limit: MAX_COMMAND_BYTES });
        }
        if self.stopped() {
            return Err(ProposeError::ShuttingDown);
        }
        Ok(Command(command))
    }

    fn stopped(&self) -> bool {
        self.inner.store.committer().failed().is_some()
            || self.inner.raft.metrics().borrow_watched().running_state.is_err()
    }

    /// Confirms that this node leads, by asking a majority, and waits until its machine has applied all that was
    /// committed before. What is read then includes every write that was acknowledged before the call. Callers that
    /// arrive together share one question.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub async fn read_index(&self, deadline: Instant) -> Result<LogIndex, ReadError> {
        let raft = self.inner.raft.clone();
        let round = move || {
            let raft = raft.clone();
            async move {
                match raft.get_read_linearizer(ReadPolicy::ReadIndex).await {
                    Ok(linearizer) => Ok(linearizer.read_log_id().log_id().index()),
                    Err(openraft::errors::RaftError::APIError(LinearizableReadError::ForwardToLeader(forward))) => {
                        Err(ReadError::NotLeader { leader: hint(forward) })
                    }
                    Err(openraft::errors::RaftError::APIError(LinearizableReadError::QuorumNotEnough(quorum))) => {
                        Err(ReadError::NoQuorum { why: quorum.to_string() })
                    }
                    Err(openraft::errors::RaftError::Fatal(_)) => Err(ReadError::ShuttingDown),
                }
            }
        };
        let read = async {
            let index = self.inner.rounds.join(round).await?;
            // The sender lives in the cell that this handle holds.
            let mut applied = self.inner.cell.watch_applied();
            applied.wait_for(|applied| *applied >= index).await.map_err(|_| ReadError::ShuttingDown)?;
            Ok(LogIndex(index))
        };
        timeout_at(deadline, read).await.unwrap_or(Err(ReadError::DeadlinePassed))
    }

    /// Reads the machine, together with the index of the last entry that it has applied. No command is applied
    /// meanwhile, so it should be short, and it must not be nested. Alone it says nothing about other nodes: see [`Group::read_index`].
    pub fn with<R>(&self, read: impl FnOnce(&M, LogIndex) -> R) -> R {
        self.inner.cell.with(read)
    }

    /// A copy of the state as it is when the entry at `index` was applied here: later ones are not in it. If the group has come further
    /// already, or not so far by the deadline, the state as it is then; `last` tells.
    pub async fn frozen_at(&self, index: LogIndex, deadline: Instant) -> Frozen {
        let moment = match timeout_at(deadline, self.inner.cell.freeze_at(index.0)).await {
            Ok(Ok(moment)) => moment,
            Ok(Err(_)) | Err(_) => self.inner.cell.freeze(),
        };
        let last = moment.last.as_ref();
        Frozen {
            term: Term(last.map_or(0, term_of)),
            last: LogIndex(last.map_or(0, |id| id.index())),
            state: moment.state,
        }
    }

    /// The group as this node sees it now.
    pub fn status(&self) -> GroupStatus {
        let fault = self.inner.store.committer().failed();
        let metrics = self.inner.raft.metrics();
        GroupStatus::new(self.inner.id, &metrics.borrow_watched(), &self.inner.cell, fault.as_deref())
    }

    /// The term that this node leads in, as far as it knows, and the entry with which that began, once it is applied: what of
    /// [`Group::status`] every call at a leader asks for.
    pub fn leads(&self) -> Option<(Term, Option<LogIndex>)> {
        if self.inner.store.committer().has_failed() {
            return None;
        }
        let metrics = self.inner.raft.metrics();
        let metrics = metrics.borrow_watched();
        let leads = metrics.state == openraft::ServerState::Leader && metrics.running_state.is_ok();
        leads.then(|| (Term(metrics.current_term), self.inner.cell.term_began(metrics.current_term)))
    }

    /// Sets the gauges that tell where the group stands on this node. The application calls it before it shows its metrics. `within`: as for
    /// [`Group::is_followed`].
    pub fn record_metrics(&self, within: Duration) {
        metrics::stand(&self.status(), self.is_followed(within));
    }

    /// Whether this node leads and a majority, itself included, has answered it within this time. One that is cut off goes on believing that it leads;
    /// a new leader is followed as soon as it was answered once.
    pub fn is_followed(&self, within: Duration) -> bool {
        let status = self.status();
        let answering = self.answering(within);
        let follows = |node: &RaftNodeId| *node == status.node || answering.contains(node);
        let voters: Vec<&RaftNodeId> = status.members.iter().filter(|(_, it)| it.voter).map(|(node, _)| node).collect();
        status.role == Role::Leader && 2 * voters.iter().filter(|node| follows(node)).count() > voters.len()
    }

    /// On a leader, the other members that have answered it within this time.
    pub fn answering(&self, within: Duration) -> BTreeSet<RaftNodeId> {
        let metrics = self.inner.raft.metrics();
        let metrics = metrics.borrow_watched();
        let answers = metrics.heartbeat.iter().flatten().filter(|(id, _)| **id != metrics.id);
        let recent =
            answers.filter(|(_, at)| at.as_ref().is_some_and(|at| openraft::Instant::elapsed(&**at) <= within));
        recent.map(|(id, _)| RaftNodeId(*id)).collect()
    }

    /// The same, as it changes; progress of the log shows a moment late.
    pub fn watch(&self) -> watch::Receiver<GroupStatus> {
        self.inner.status.clone()
    }

    /// Hands leadership to another voter and returns when this node sees that it leads. Nothing to do when it does
    /// already.
    ///
    /// # Errors
    /// [`RaftError::NotLeader`], also when a third node took over instead, [`RaftError::Membership`] when `to` is no voter,
    /// [`RaftError::DeadlinePassed`] when it has not happened yet; it may still.
    pub async fn transfer_leader(&self, to: RaftNodeId, deadline: Instant) -> Result<(), RaftError> {
        let leads = |status: &GroupStatus, node: RaftNodeId| status.leader.as_ref().is_some_and(|(id, _)| *id == node);
        let status = self.status();
        if leads(&status, to) {
            return Ok(());
        }
        if !leads(&status, self.inner.node) {
            return Err(RaftError::NotLeader { leader: status.leader });
        }
        if !status.members.get(&to).is_some_and(|member| member.voter) {
            let voters: Vec<_> = status.members.iter().filter(|(_, member)| member.voter).map(|(id, _)| id.0).collect();
            return Err(RaftError::Membership { why: format!("node {to} is no voter; voters are {voters:?}") });
        }
        self.answered(self.inner.raft.trigger().transfer_leader(to.0), "transfer")
            .await?
            .map_err(|fatal| self.fatal(&fatal))?;
        let mut watch = self.watch();
        // Another than `to` may win the election, for instance because `to` is down.
        let over = |status: &GroupStatus| status.leader.as_ref().is_some_and(|(id, _)| *id != self.inner.node);
        let done = watch.wait_for(|status| over(status) || status.fault.is_some());
        match timeout_at(deadline, done).await {
            Ok(Ok(status)) => match &status.fault {
                None if leads(&status, to) => Ok(()),
                None => Err(RaftError::NotLeader { leader: status.leader.clone() }),
                Some(why) => Err(RaftError::Failed { why: why.clone() }),
            },
            Ok(Err(_)) => Err(RaftError::ShuttingDown),
            Err(_) => Err(RaftError::DeadlinePassed { doing: format!("transfer of group {} to {to}", self.inner.id) }),
        }
    }

    /// Adds a node that receives the log and does not vote. Returns once the change is committed; the node may still
    /// be catching up (see [`GroupStatus::matched`]).
    ///
    /// # Errors
    /// [`RaftError::NotLeader`], [`RaftError::Membership`], [`RaftError::DeadlinePassed`].
    pub async fn add_learner(&self, node: RaftNodeId, addr: String, deadline: Instant) -> Result<(), RaftError> {
        let change = async {
            let _turn = self.inner.changes.lock().await;
            self.inner.raft.add_learner(node.0, BasicNode { addr }, false).await.map(drop)
        };
        self.changed(timeout_at(deadline, change).await, || format!("addition of learner {node}"))
    }

    /// Makes exactly these nodes voters; each must be a member already. Voters that are left out leave the group: shut
    /// them down, and never use their numbers again.
    ///
    /// # Errors
    /// [`RaftError::NotLeader`], [`RaftError::Membership`], [`RaftError::DeadlinePassed`].
    pub async fn change_members(&self, voters: BTreeSet<RaftNodeId>, deadline: Instant) -> Result<(), RaftError> {
        let voters: BTreeSet<u64> = voters.into_iter().map(|node| node.0).collect();
        let change = async {
            let _turn = self.inner.changes.lock().await;
            self.inner.raft.change_membership(voters, false).await.map(drop)
        };
        self.changed(timeout_at(deadline, change).await, || "change of voters".to_owned())
    }

    /// Ends the membership of a node that does not vote.
    ///
    /// # Errors
    /// [`RaftError::NotLeader`], [`RaftError::Membership`] when it votes or is no member, [`RaftError::DeadlinePassed`].
    pub async fn remove_learner(&self, node: RaftNodeId, deadline: Instant) -> Result<(), RaftError> {
        let change = async {
            let _turn = self.inner.changes.lock().await;
            let gone = openraft::ChangeMembers::RemoveNodes(BTreeSet::from([node.0]));
            self.inner.raft.change_membership(gone, false).await.map(drop)
        };
        self.changed(timeout_at(deadline, change).await, || format!("removal of learner {node}"))
    }

    fn changed<T>(
        &self,
        result: Result<
            Result<T, openraft::errors::RaftError<Types, ClientWriteError<Types>>>,
            tokio::time::error::Elapsed,
        >,
        doing: impl FnOnce() -> String,
    ) -> Result<T, RaftError> {
        match result {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(openraft::errors::RaftError::APIError(error))) => Err(match error {
                ClientWriteError::ForwardToLeader(forward) => RaftError::NotLeader { leader: hint(forward) },
                other => RaftError::Membership { why: other.to_string() },
            }),
            Ok(Err(openraft::errors::RaftError::Fatal(fatal))) => Err(self.fatal(&fatal)),
            Err(_) => Err(RaftError::DeadlinePassed { doing: doing() }),
        }
    }

    /// Begins a snapshot of what is applied now; [`GroupStatus::snapshot`] tells when it is done.
    ///
    /// # Errors
    /// [`RaftError::Failed`], [`RaftError::ShuttingDown`].
    pub async fn trigger_snapshot(&self) -> Result<(), RaftError> {
        self.answered(self.inner.raft.trigger().snapshot(), "snapshot").await?.map_err(|fatal| self.fatal(&fatal))
    }

    /// For how long no leader has spoken to this node, counted from the start of the group. Of no meaning while it leads itself. (A status
    /// goes on naming a leader that is gone until there is another.)
    pub fn silence(&self) -> Duration {
        self.inner.heard.silence()
    }

    /// Whether this node stands for election when it hears of no leader for long enough; it does from the start. It votes in any case,
    /// and takes a leadership that is handed to it.
    pub fn stand_for_election(&self, stand: bool) {
        self.inner.stands.store(stand, Ordering::SeqCst);
        self.inner.raft.runtime_config().elect(stand);
    }

    /// Stands for election now, if a majority would grant it.
    ///
    /// # Errors
    /// [`RaftError::Failed`], [`RaftError::ShuttingDown`].
    pub async fn trigger_election(&self) -> Result<(), RaftError> {
        self.answered(self.inner.raft.trigger().elect(true), "election").await?.map_err(|fatal| self.fatal(&fatal))
    }

    /// Waits for the group to take something in, for as long as a proposal may take.
    async fn answered<T>(&self, work: impl Future<Output = T>, doing: &str) -> Result<T, RaftError> {
        let passed = |_| RaftError::DeadlinePassed { doing: format!("{doing} of group {}", self.inner.id) };
        timeout(self.inner.propose_deadline, work).await.map_err(passed)
    }

    fn fatal(&self, fatal: &Fatal<Types>) -> RaftError {
        match (self.inner.store.committer().failed(), fatal) {
            (Some(why), _) => RaftError::Failed { why },
            (None, Fatal::Stopped) => RaftError::ShuttingDown,
            (None, fatal) => RaftError::Failed { why: fatal.to_string() },
        }
    }
}

fn vec_of<T>(count: usize, error: &ProposeError) -> Vec<Result<Applied<T>, ProposeError>> {
    (0..count).map(|_| Err(error.clone())).collect()
}

fn applied<T: 'static>(id: &crate::types::LogId, reply: Reply) -> Applied<T> {
    let outcome = reply.take().expect("the replica answers every command with its machine's outcome");
    Applied { index: LogIndex(id.index()), term: Term(term_of(id)), outcome }
}

fn refused(error: ClientWriteError<Types>) -> ProposeError {
    match error {
        ClientWriteError::ForwardToLeader(forward) => ProposeError::NotLeader { leader: hint(forward) },
        other => ProposeError::Indeterminate { why: other.to_string() },
    }
}

fn unknown(fatal: &Fatal<Types>) -> ProposeError {
    ProposeError::Indeterminate { why: fatal.to_string() }
}

fn hint(forward: ForwardToLeader<Types>) -> LeaderHint {
    // A leader that has not heard from a majority for a while names itself; that helps nobody.
    if forward.reason == ForwardReason::LeaseExpired {
        return None;
    }
    Some((RaftNodeId(forward.leader_id?), forward.leader_node?.addr))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn other_leader() -> ForwardToLeader<Types> {
        ForwardToLeader::new(2, BasicNode::new("elsewhere:1"))
    }

    /// A command may be done again elsewhere only if it is not in any log.
    #[test]
    fn what_was_in_the_log_has_an_unknown_fate_also_if_it_was_taken_out_again() {
        let before = refused(ClientWriteError::ForwardToLeader(other_leader()));
        let leader = Some((RaftNodeId(2), "elsewhere:1".to_owned()));
        assert_eq!(before, ProposeError::NotLeader { leader });
        let after = refused(ClientWriteError::LogEntryDiscarded(other_leader()));
        assert!(matches!(after, ProposeError::Indeterminate { .. }), "{after:?}");
        let stopped = unknown(&Fatal::Stopped);
        assert!(matches!(stopped, ProposeError::Indeterminate { .. }), "{stopped:?}");
    }
}
