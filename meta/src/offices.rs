//! Offices: the leaderships that this node holds, and how it gives them to others: one by one so that all lead equally many, one that an
//! administrator names, all at once when the node drains.
//!
//! `leaders.rs` decides what moves to even out; here it is seen, waited for and done. A node that drains says so with each of its answers to
//! others, does not stand for election while others could, and hands back what it is given all the same. That it drains lives in memory
//! alone: a node that was started again takes part again.
//! Keeps: of one node, one hand over (or one drain) at a time; the log has the leader's last stamp before another leads.

use crate::{
    core::Core,
    door,
    hosted::Hosted,
    leaders::{Move, Seat, Settling, View, next_move},
    machine::Replicated,
    metrics,
};
use futures::future::{BoxFuture, join_all};
use quarry_meta_state::Directory;
use quarry_proto::refusal::Refusal;
use quarry_raft::{GroupId, GroupStatus, RaftError, RaftNodeId, Role, Timing};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout_at};

/// How far behind in the log a voter may be and still be given the leadership: what it lacks, it gets before it stands.
const LAG_MAX: u64 = 2_000;
/// Between two looks of a node that evens nothing out: whether it drains.
const IDLE: Duration = Duration::from_secs(1);
/// Between two looks at a new cluster whose followers have not answered yet.
const SPREAD_PAUSE: Duration = Duration::from_millis(20);

/// Why a leadership was handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// This node led more than its share.
    Balance,
    /// This node drains, or stops.
    Drain,
    /// An administrator named the group and the node.
    Operator,
}

impl Reason {
    pub(crate) const ALL: [Self; 3] = [Self::Balance, Self::Drain, Self::Operator];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Balance => "balance",
            Self::Drain => "drain",
            Self::Operator => "operator",
        }
    }
}

/// One group's leadership, whatever the group replicates.
pub(crate) trait Office: Send + Sync {
    fn status(&self) -> GroupStatus;
    /// While this node leads: the other voters that answered lately and hold the log but for its end, and how far each is.
    fn heirs(&self, timing: Timing) -> BTreeMap<RaftNodeId, u64>;
    /// Hands over and returns when `to` leads.
    fn hand_over(&self, to: RaftNodeId, deadline: Instant) -> BoxFuture<'_, Result<(), RaftError>>;
    fn stand_for_election(&self, stand: bool);
    /// For how long no leader has spoken here.
    fn silence(&self) -> Duration;
}

impl<S: Replicated> Office for Hosted<S> {
    fn status(&self) -> GroupStatus {
        self.group.status()
    }

    fn heirs(&self, timing: Timing) -> BTreeMap<RaftNodeId, u64> {
        let status = self.group.status();
        if status.role != Role::Leader {
            return BTreeMap::new();
        }
        let (answering, last) = (self.group.answering(timing.election_min), status.last_log.map_or(0, |index| index.0));
        let fit = |(node, matched): (&RaftNodeId, &Option<quarry_raft::LogIndex>)| {
            let matched = matched.as_ref()?.0;
            let voter = status.members.get(node).is_some_and(|member| member.voter);
            (voter && answering.contains(node) && matched + LAG_MAX >= last).then_some((*node, matched))
        };
        status.matched.iter().filter_map(fit).collect()
    }

    fn hand_over(&self, to: RaftNodeId, deadline: Instant) -> BoxFuture<'_, Result<(), RaftError>> {
        Box::pin(async move {
            self.stamp_before_leaving(deadline).await;
            self.group.transfer_leader(to, deadline).await
        })
    }

    fn stand_for_election(&self, stand: bool) {
        self.group.stand_for_election(stand);
    }

    fn silence(&self) -> Duration {
        self.group.silence()
    }
}

/// A leadership that this node could not give away, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) group: GroupId,
    pub(crate) why: String,
}

/// Looks after this node's offices until it is dropped: gives away what is more than its share, or all while it drains.
pub(crate) async fn keep(core: Arc<Core>) {
    let timing = core.config.timing;
    let mut settling = Settling::default();
    loop {
        sleep(core.config.balance_every.unwrap_or(IDLE)).await;
        if core.host.is_draining() {
            stand_only_if_nobody_else(&core);
            for kept in leave_all(&core, Instant::now() + timing.election_max).await {
                tracing::debug!(group = %kept.group, why = kept.why, "this node drains and still leads");
            }
            continue;
        }
        // A turn of before may have said otherwise just after the drain was undone.
        stand(&core, true);
        if core.config.balance_every.is_some() && !members_change(&core) {
            // Whoever won an election, or came back, keeps still for as long as another election could take.
            let view = look(&core, Some((&mut settling, 2 * timing.election_max)));
            if let Some(it) = next_move(&view) {
                // It told how it went; what did not happen is looked at again.
                drop(make(&core, it, Instant::now() + timing.election_max).await);
            }
        }
    }
}

/// While members change, whoever leaves gives his offices away: nothing else moves meanwhile.
fn members_change(core: &Core) -> bool {
    core.directory.read(|directory| directory.change_under_way().is_some())
}

/// What this node sees; with `settling`, only what has been so for a while is fit to move.
fn look(core: &Core, mut settling: Option<(&mut Settling, Duration)>) -> View {
    let (timing, now, mut draining) = (core.config.timing, Instant::now(), core.host.draining_peers());
    // A member that is about to leave has just handed its offices on.
    let leaves = |directory: &Directory| directory.change_under_way()?.change.leaves();
    draining.extend(core.directory.read(leaves).map(|node| RaftNodeId(node.0)));
    let seat = |office: &dyn Office| {
        let status = office.status();
        let voters: BTreeSet<_> =
            status.members.iter().filter(|(_, member)| member.voter).map(|(node, _)| *node).collect();
        // A leader that has just begun has nothing to give yet.
        let leads = status.leader_since.map(|_| status.term);
        let mut heirs: BTreeSet<_> = leads.map(|_| office.heirs(timing).into_keys().collect()).unwrap_or_default();
        if let Some((settling, quiet)) = &mut settling {
            heirs = settling.observe(now, status.group, leads, &heirs, *quiet);
        }
        let leader = status.leader.map(|(node, _)| node);
        (!voters.is_empty()).then_some(Seat { group: status.group, leader, voters, heirs })
    };
    let groups = core.offices().filter_map(seat).collect();
    View { me: RaftNodeId(core.config.node.0), groups, draining }
}

/// Makes one move; whether it happened.
async fn make(core: &Core, it: Move, deadline: Instant) -> Result<(), String> {
    let Ok(_turn) = timeout_at(deadline, core.handing_over.lock()).await else {
        return Err("this node is handing over others".to_owned());
    };
    let office = core.offices().find(|office| office.status().group == it.group).ok_or("there is no such group")?;
    let result = office.hand_over(it.to, deadline).await;
    tell(&result, it, Reason::Balance);
    result.map_err(|error| error.to_string())
}

fn tell(result: &Result<(), RaftError>, it: Move, reason: Reason) {
    let (Move { group, to }, reason_name) = (it, reason.name());
    match result {
        Ok(()) => {
            metrics::leader_moved(reason);
            tracing::info!(%group, %to, reason = reason_name, "the leadership was handed over");
        }
        Err(error) => {
            tracing::warn!(%group, %to, reason = reason_name, %error, "the leadership was not handed over");
        }
    }
}

/// Gives away all that is more than this node's share, one after the other without a pause, until the deadline. Says what was tried.
pub(crate) async fn spread(core: &Core, deadline: Instant) -> Vec<(Move, Result<(), String>)> {
    let mut tried: Vec<(Move, Result<(), String>)> = Vec::new();
    let refused = |tried: &[(Move, Result<(), String>)]| tried.iter().any(|(_, result)| result.is_err());
    while !core.host.is_draining() && !refused(&tried) {
        let view = look(core, None);
        let Some(it) = next_move(&view) else { break };
        tried.push((it, make(core, it, deadline.min(Instant::now() + core.config.timing.election_max)).await));
    }
    tried
}

/// Spreads the leaderships of a cluster that was just made, as far as its nodes take them by the deadline: what is left over moves later.
pub(crate) async fn spread_anew(core: &Core, deadline: Instant) {
    while core.config.balance_every.is_some() && Instant::now() < deadline {
        if next_move(&look(core, None).if_all_could()).is_none() {
            return;
        }
        if spread(core, deadline).await.iter().any(|(_, result)| result.is_err()) {
            return;
        }
        // The followers have not answered yet.
        sleep(SPREAD_PAUSE).await;
    }
}

/// Hands the leadership of one group to the node that was named.
pub(crate) async fn transfer<S: Replicated>(
    core: &Core,
    hosted: &Hosted<S>,
    to: RaftNodeId,
    deadline: Instant,
) -> Result<(), Refusal> {
    if core.host.draining_peers().contains(&to) {
        return Err(door::not_ready(format!("node {to} drains: it takes no leadership"), IDLE));
    }
    let Ok(_turn) = timeout_at(deadline, core.handing_over.lock()).await else {
        return Err(door::not_ready("this node is handing over other leaderships", door::RETRY));
    };
    let led = hosted.group.leads().is_some();
    let result = hosted.hand_over(to, deadline).await;
    if led {
        tell(&result, Move { group: hosted.id(), to }, Reason::Operator);
    }
    result.map_err(|error| match error {
        RaftError::NotLeader { leader } => door::not_leader(hosted.id(), leader),
        RaftError::Membership { why } => Refusal::malformed("to", "a voter of the group", why),
        RaftError::ShuttingDown => door::not_ready("this node is shutting down", IDLE),
        error => door::indeterminate(error.to_string()),
    })
}

/// Begins to drain, or goes on: gives all leaderships away and wants none. Says what this node still leads at the deadline.
pub(crate) async fn drain(core: &Core, deadline: Instant) -> Vec<Kept> {
    core.host.set_draining(true);
    stand(core, false);
    leave_all(core, deadline).await
}

/// Takes part again.
pub(crate) fn undo_drain(core: &Core) {
    core.host.set_draining(false);
    stand(core, true);
}

fn stand(core: &Core, stand: bool) {
    for office in core.offices() {
        office.stand_for_election(stand);
    }
}

/// While this node drains, others lead; but a group must not stay without a leader because all that are left drain.
fn stand_only_if_nobody_else(core: &Core) {
    for office in core.offices() {
        office.stand_for_election(office.silence() >= 2 * core.config.timing.election_max);
    }
}

/// Gives all leaderships away, all groups at once. Says what this node still leads.
async fn leave_all(core: &Core, deadline: Instant) -> Vec<Kept> {
    let busy = "this node was handing over other leaderships";
    let Ok(_turn) = timeout_at(deadline, core.handing_over.lock()).await else {
        let led = core.offices().filter(|office| office.status().role == Role::Leader);
        return led.map(|office| Kept { group: office.status().group, why: busy.to_owned() }).collect();
    };
    join_all(core.offices().map(|office| leave(core, office, deadline))).await.into_iter().flatten().collect()
}

/// Hands one leadership to the voter that holds most of the log, if this node leads. Only those that answered lately and do not drain
/// themselves are tried, each for no longer than an election takes: when the others leave at the same time, nobody is left to lead, and
/// nothing is gained by waiting.
async fn leave(core: &Core, office: &dyn Office, deadline: Instant) -> Option<Kept> {
    let timing = core.config.timing;
    let mut tried = BTreeSet::new();
    let mut why = "no other voter answers, holds the log and does not drain".to_owned();
    loop {
        let status = office.status();
        if status.role != Role::Leader {
            return None;
        }
        let draining = core.host.draining_peers();
        let heirs = office.heirs(timing);
        let fit = heirs.iter().filter(|(node, _)| !tried.contains(*node) && !draining.contains(*node));
        let heir = fit.max_by_key(|(node, matched)| (**matched, **node)).map(|(node, _)| *node);
        let Some(to) = heir.filter(|_| Instant::now() < deadline) else {
            return Some(Kept { group: status.group, why });
        };
        let result = office.hand_over(to, deadline.min(Instant::now() + timing.election_max)).await;
        tell(&result, Move { group: status.group, to }, Reason::Drain);
        if let Err(error) = result {
            why = format!("node {to} did not take it: {error}");
        }
        tried.insert(to);
    }
}
