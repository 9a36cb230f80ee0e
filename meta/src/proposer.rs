//! The proposer of one group: callers who wait share entries, and a few entries are on their way at once.
//!
//! An entry leaves at once while less than [`OPEN`] are on their way, so that a lone caller waits for nobody. Under load those who come
//! meanwhile gather; then an entry leaves when it is full, or when one has arrived: the time of the disk is what they wait for company.
//!
//! Decides what stands in which entry and with which stamp; the machine decides what it means. Keeps *Linearizable*'s rule for errors: a
//! refusal from before the entry was handed to the log is definite, anything later is `Indeterminate`.

use crate::{
    door,
    machine::{Replicated, StateMachine},
    metrics,
    timekeeper::Timekeeper,
};
use ::metrics::Histogram;
use bytes::Bytes;
use futures::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use quarry_meta_state::entry;
use quarry_proto::refusal::Refusal;
use quarry_raft::{Group, Role, Term};
use quarry_wire::{limits::COMMAND_BYTES_MAX, units::LogTime};
use std::{collections::VecDeque, sync::Arc, time::Duration};
use tokio::{
    sync::{mpsc, oneshot},
    task::yield_now,
    time::{Instant, timeout_at},
};

/// With so many entries on their way only full ones follow.
const OPEN: usize = 2;
/// Entries on their way at once.
const WINDOW: usize = 8;
/// Bytes of commands that wait in the driver; beyond, callers wait in the queue.
const HELD_BYTES_MAX: usize = WINDOW * COMMAND_BYTES_MAX;
/// Commands planned for one entry: with the longest they leave half of it to others.
const PLANNED: usize = 64;
/// Callers who may wait in line.
const QUEUE: usize = 4096;
/// Bytes of an entry that are not its commands: format, stamp, count.
const ENTRY_OVERHEAD: usize = 32;
/// How long a leader may take to apply what its predecessors left, before its callers are sent away.
const SETTLING: Duration = Duration::from_secs(1);

/// What became of a command.
#[derive(Debug)]
pub(crate) struct Done<O> {
    /// The stamp with which it was applied.
    pub(crate) at: LogTime,
    /// What the machine answered.
    pub(crate) outcome: O,
}

type Answer<S> = oneshot::Sender<Result<Done<<S as Replicated>::Outcome>, Refusal>>;

enum What<S: Replicated> {
    Command(S::Command),
    Wish(S::Wish),
}

struct Ask<S: Replicated> {
    what: What<S>,
    answer: Answer<S>,
    deadline: Instant,
}

/// A command that waits for its entry, encoded.
struct Ready<S: Replicated> {
    command: Vec<u8>,
    answer: Answer<S>,
}

/// An entry that was applied or refused.
struct Arrived {
    /// Whether commands of it were planned.
    planned: bool,
}

/// The way to a group's log. Cloning shares it.
pub(crate) struct Proposer<S: Replicated> {
    asks: mpsc::Sender<Ask<S>>,
    group: Group<StateMachine<S>>,
}

impl<S: Replicated> Clone for Proposer<S> {
    fn clone(&self) -> Self {
        Self { asks: self.asks.clone(), group: self.group.clone() }
    }
}

impl<S: Replicated> Proposer<S> {
    /// The proposer and the work that it needs done, which ends with the last proposer.
    pub(crate) fn new(
        group: Group<StateMachine<S>>,
        keeper: Arc<Timekeeper>,
    ) -> (Self, impl Future<Output = ()> + Send) {
        let (asks, waiting) = mpsc::channel(QUEUE);
        let driver = Driver {
            group: group.clone(),
            keeper,
            waiting,
            held: VecDeque::new(),
            held_bytes: 0,
            wishes: VecDeque::new(),
            planning: false,
            on_their_way: FuturesUnordered::new(),
            sizes: metrics::proposal_commands(group.id()),
        };
        (Self { asks, group }, driver.run())
    }

    /// Proposes one command and waits until it was applied.
    pub(crate) async fn propose(&self, command: S::Command, deadline: Instant) -> Result<Done<S::Outcome>, Refusal> {
        self.ask(What::Command(command), deadline).await
    }

    /// Plans a command when its turn comes, and proposes it.
    pub(crate) async fn plan(&self, wish: S::Wish, deadline: Instant) -> Result<Done<S::Outcome>, Refusal> {
        self.ask(What::Wish(wish), deadline).await
    }

    async fn ask(&self, what: What<S>, deadline: Instant) -> Result<Done<S::Outcome>, Refusal> {
        let (answer, waiting) = oneshot::channel();
        let stopped = || door::not_ready("this node is shutting down", Duration::from_secs(1));
        match timeout_at(deadline, self.asks.send(Ask { what, answer, deadline })).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Err(stopped()),
            Err(_) => return Err(door::not_ready(format!("group {} is overloaded", self.group.id()), door::RETRY)),
        }
        match timeout_at(deadline, waiting).await {
            Ok(Ok(answer)) => answer,
            // The work ended with this command somewhere in it.
            Ok(Err(_)) => Err(door::indeterminate("this node is shutting down")),
            Err(_) => Err(door::indeterminate("not applied by the deadline")),
        }
    }
}

struct Driver<S: Replicated> {
    group: Group<StateMachine<S>>,
    keeper: Arc<Timekeeper>,
    waiting: mpsc::Receiver<Ask<S>>,
    /// Made ready for an entry that was full; first in the next one.
    held: VecDeque<Ready<S>>,
    /// Their bytes.
    held_bytes: usize,
    /// Wishes that wait until the entry with planned commands that is on its way was applied.
    wishes: VecDeque<Ask<S>>,
    /// Whether such an entry is on its way.
    planning: bool,
    on_their_way: FuturesUnordered<BoxFuture<'static, Arrived>>,
    /// How many commands shared each entry.
    sizes: Histogram,
}

impl<S: Replicated> Driver<S> {
    async fn run(mut self) {
        loop {
            if self.may_enter() {
                // Callers whose calls came in together are about to ask.
                yield_now().await;
                self.enter().await;
                continue;
            }
            tokio::select! {
                Some(arrived) = self.on_their_way.next() => self.arrive(&arrived),
                ask = self.waiting.recv(), if self.held_bytes < HELD_BYTES_MAX => match ask {
                    Some(ask) => self.take_in(ask),
                    None => break,
                },
            }
        }
        while self.on_their_way.next().await.is_some() {}
    }

    /// Whether there is something to enter and it is time to.
    fn may_enter(&self) -> bool {
        let wishes = !self.planning && !self.wishes.is_empty();
        match self.on_their_way.len() {
            ..OPEN => wishes || !self.held.is_empty(),
            OPEN..WINDOW => ENTRY_OVERHEAD + self.held_bytes > COMMAND_BYTES_MAX,
            _ => false,
        }
    }

    fn arrive(&mut self, arrived: &Arrived) {
        self.planning &= !arrived.planned;
    }

    /// Sorts an ask in line; one whose deadline passed is answered.
    fn take_in(&mut self, ask: Ask<S>) {
        if ask.deadline <= Instant::now() {
            return refuse(ask.answer, door::not_ready("the deadline passed before its turn came", door::RETRY));
        }
        let command = match ask.what {
            What::Command(command) => command,
            What::Wish(_) => return self.wishes.push_back(ask),
        };
        self.make_ready(&command, ask.answer);
    }

    fn make_ready(&mut self, command: &S::Command, answer: Answer<S>) {
        if let Some(ready) = encoded(command, answer) {
            self.held_bytes += ready.command.len();
            self.held.push_back(ready);
        }
    }

    /// Fills one entry and sends it off.
    async fn enter(&mut self) {
        let term = match office(self.group.clone()).await {
            Ok(term) => term,
            Err(refusal) => return self.turn_away(&refusal),
        };
        while self.held_bytes < COMMAND_BYTES_MAX
            && let Ok(ask) = self.waiting.try_recv()
        {
            self.take_in(ask);
        }
        let (keeper, now) = (Arc::clone(&self.keeper), Instant::now());
        let wishes: Vec<Ask<S>> =
            if self.planning { Vec::new() } else { self.wishes.drain(..self.wishes.len().min(PLANNED)).collect() };
        let (at, planned) = self.plan(term, now, &keeper, wishes);
        // Planned commands go first: they are small, and plans are only good for this entry.
        let mut entry: Vec<Ready<S>> = planned;
        let has_planned = !entry.is_empty();
        let mut bytes = ENTRY_OVERHEAD + entry.iter().map(|ready| ready.command.len()).sum::<usize>();
        while let Some(ready) = self.held.pop_front_if(|ready| bytes + ready.command.len() <= COMMAND_BYTES_MAX) {
            bytes += ready.command.len();
            self.held_bytes -= ready.command.len();
            entry.push(ready);
        }
        if !entry.is_empty() {
            self.send_off(term, at, entry, has_planned);
        }
    }

    /// The stamp of the entry, and the commands that meet the wishes.
    fn plan(&mut self, term: Term, now: Instant, keeper: &Timekeeper, asks: Vec<Ask<S>>) -> (LogTime, Vec<Ready<S>>) {
        let (mut wishes, mut answers) = (Vec::new(), Vec::new());
        for ask in asks {
            match ask.what {
                What::Wish(_) if ask.deadline <= now => {
                    refuse(ask.answer, door::not_ready("the deadline passed before its turn came", door::RETRY));
                }
                What::Wish(wish) => {
                    wishes.push(wish);
                    answers.push(ask.answer);
                }
                What::Command(command) => self.make_ready(&command, ask.answer),
            }
        }
        let (at, plans) = self.group.with(|machine, _| {
            let state = machine.state();
            let at = keeper.stamp(term, now, || state.log_time());
            (at, if wishes.is_empty() { Vec::new() } else { state.plan(at, &wishes) })
        });
        let mut planned = Vec::new();
        for (plan, answer) in plans.into_iter().zip(answers) {
            match plan {
                Ok(command) => planned.extend(encoded(&command, answer)),
                Err(refusal) => refuse(answer, refusal),
            }
        }
        (at, planned)
    }

    fn send_off(&mut self, term: Term, at: LogTime, entry: Vec<Ready<S>>, planned: bool) {
        self.sizes.record(u32::try_from(entry.len()).unwrap_or(u32::MAX));
        let command = entry::join(at, entry.iter().map(|ready| ready.command.as_slice()));
        let answers: Vec<Answer<S>> = entry.into_iter().map(|ready| ready.answer).collect();
        let group = self.group.clone();
        let mut going = async move {
            let command = match command {
                Ok(command) => Bytes::from(command),
                Err(error) => {
                    refuse_all(answers, &Refusal::malformed("command", "one that fits in a log entry", error));
                    return Arrived { planned };
                }
            };
            // The stamp was read off the clock of this term of office.
            match group.propose_in(term, command).await {
                Ok(applied) => {
                    for (answer, outcome) in answers.into_iter().zip(applied.outcome) {
                        // A caller that gave up is gone.
                        drop(answer.send(Ok(Done { at, outcome })));
                    }
                }
                Err(error) => refuse_all(answers, &door::proposal_refused(group.id(), error)),
            }
            Arrived { planned }
        }
        .boxed();
        self.planning |= planned;
        // Polled once here, so that entries reach the log in the order of their stamps.
        match (&mut going).now_or_never() {
            Some(arrived) => self.arrive(&arrived),
            None => self.on_their_way.push(going),
        }
    }

    /// Everyone in line is told the same.
    fn turn_away(&mut self, refusal: &Refusal) {
        refuse_all(self.held.drain(..).map(|ready| ready.answer), refusal);
        self.held_bytes = 0;
        refuse_all(self.wishes.drain(..).map(|ask| ask.answer), refusal);
        while let Ok(ask) = self.waiting.try_recv() {
            refuse(ask.answer, refusal.clone());
        }
    }
}

/// The term that this node leads in, once it has applied what earlier leaders committed.
async fn office<S: Replicated>(group: Group<StateMachine<S>>) -> Result<Term, Refusal> {
    if let Some((term, Some(_))) = group.leads() {
        return Ok(term);
    }
    let mut watch = group.watch();
    let settled_by = Instant::now() + SETTLING;
    loop {
        watch.mark_unchanged();
        let status = group.status();
        match (status.role, status.leader_since) {
            (Role::Leader, Some(_)) => return Ok(status.term),
            (Role::Leader, None) if matches!(timeout_at(settled_by, watch.changed()).await, Ok(Ok(()))) => {}
            _ => return Err(door::not_leader(status.group, status.leader)),
        }
    }
}

/// A command made ready for an entry; one that fits in none is answered.
fn encoded<S: Replicated>(command: &S::Command, answer: Answer<S>) -> Option<Ready<S>> {
    let command = match entry::encode_command(command) {
        Ok(command) => command,
        Err(error) => {
            refuse(answer, Refusal::malformed("command", "plain data", error));
            return None;
        }
    };
    if command.len() > COMMAND_BYTES_MAX - ENTRY_OVERHEAD {
        refuse(answer, door::too_large("command", COMMAND_BYTES_MAX - ENTRY_OVERHEAD, command.len()));
        return None;
    }
    Some(Ready { command, answer })
}

fn refuse<T>(answer: oneshot::Sender<Result<T, Refusal>>, refusal: Refusal) {
    // A caller that gave up is gone.
    drop(answer.send(Err(refusal)));
}

fn refuse_all<T>(answers: impl IntoIterator<Item = oneshot::Sender<Result<T, Refusal>>>, refusal: &Refusal) {
    for answer in answers {
        refuse(answer, refusal.clone());
    }
}
