//! Changes of the meta nodes, taken through all groups.
//!
//! The directory says what is wanted ([`MemberChange`]); each group's own membership says how far the group has come. Every node looks at both
//! and takes the next step of the groups that it leads, so nobody has to tell anybody, and a new leader goes on where the last one ended.
//! Decides the next step of a group ([`next_step`]), and that a change has come to its end. Leaves to `service/members`: whether a change may
//! begin. The directory's own group is the last that a node leaves, so that the node hears of it as long as it can.

use crate::{
    core::Core,
    door::{RETRY, not_ready},
    hosted::{Hosted, OWN_PROPOSAL},
    machine::Replicated,
    service::ask_status,
};
use futures::{
    future::join_all,
    stream::{FuturesUnordered, StreamExt as _},
};
use quarry_meta_state::{
    Directory,
    directory::{DirectoryCommand, DirectoryOutcome, MemberChange, NumberedChange},
};
use quarry_proto::{refusal::Refusal, v1};
use quarry_raft::{GroupStatus, LogIndex, Member, RaftNodeId, Role};
use quarry_wire::ids::NodeId;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::time::{Instant, sleep};

/// A learner that lacks no more entries than this may vote: what it lacks, it has in a moment.
pub(crate) const LAG_MAX: u64 = 1_000;
/// Between two looks while a change is under way.
const PAUSE: Duration = Duration::from_millis(50);
/// Between two questions of a node that nobody leads whether it was removed.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// A node that takes longer to answer does not answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// What a group has to do next for a change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// Nothing: the change is done here.
    Done,
    /// Send the log to this node.
    AddLearner { node: RaftNodeId, address: String },
    /// Hand the leadership on: the leader leaves.
    GiveOffice,
    /// Make these nodes the voters; others that voted leave.
    SetVoters(BTreeSet<RaftNodeId>),
    /// End the membership of this node, which does not vote.
    RemoveLearner(RaftNodeId),
    /// Wait for something.
    Wait(Wait),
}

/// What a group waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wait {
    /// The step before is not known to be committed.
    Commit,
    /// The node lacks so many entries; none: it was not heard yet.
    Behind { node: RaftNodeId, lag: Option<u64> },
    /// The node is no member of the group.
    NotAMember(RaftNodeId),
    /// The directory's group goes last.
    Shards,
    /// Nobody else votes.
    LastVoter,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("done"),
            Self::AddLearner { node, .. } => write!(f, "send the log to node {node}"),
            Self::GiveOffice => f.write_str("hand the leadership on"),
            Self::SetVoters(voters) => {
                let voters: Vec<String> = voters.iter().map(ToString::to_string).collect();
                write!(f, "make {} the voters", voters.join(", "))
            }
            Self::RemoveLearner(node) => write!(f, "send node {node} nothing any more"),
            Self::Wait(Wait::Commit) => f.write_str("wait until the last step is committed"),
            Self::Wait(Wait::Behind { node, lag: Some(lag) }) => {
                write!(f, "wait for node {node}, which lacks {lag} entries")
            }
            Self::Wait(Wait::Behind { node, lag: None }) => write!(f, "wait for node {node} to catch up"),
            Self::Wait(Wait::NotAMember(node)) => write!(f, "wait: node {node} is no member"),
            Self::Wait(Wait::Shards) => f.write_str("wait for the shards"),
            Self::Wait(Wait::LastVoter) => f.write_str("wait: nobody else votes"),
        }
    }
}

/// A group, as the node that looks sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub(crate) members: &'a BTreeMap<RaftNodeId, Member>,
    pub(crate) settled: bool,
    pub(crate) leader: Option<RaftNodeId>,
    /// On the leader, how many entries the node that comes lacks, once it was heard.
    pub(crate) lag: Option<u64>,
    /// Whether nothing else has to be done before a member leaves.
    pub(crate) may_leave: bool,
}

/// What a group must do next. Any prefix of the steps may have been taken before, by whomever.
pub(crate) fn next_step(change: &MemberChange, view: View<'_>) -> Step {
    match change {
        MemberChange::Add { node, address } => {
            let node = RaftNodeId(node.0);
            if !view.members.contains_key(&node) {
                return Step::AddLearner { node, address: address.clone() };
            }
            if view.settled { Step::Done } else { Step::Wait(Wait::Commit) }
        }
        MemberChange::Promote { node } => {
            let node = RaftNodeId(node.0);
            match view.members.get(&node) {
                None => Step::Wait(Wait::NotAMember(node)),
                Some(member) if member.voter && view.settled => Step::Done,
                Some(member) => take_in(node, member.voter, voters_with(view.members, Some(node), None), view),
            }
        }
        MemberChange::Remove { node } => leave(RaftNodeId(node.0), view),
        MemberChange::Replace { old, new, address } => {
            let (old, new) = (RaftNodeId(old.0), RaftNodeId(new.0));
            let votes = |node| view.members.get(&node).map(|member| member.voter);
            match (votes(new), votes(old)) {
                (None, _) => Step::AddLearner { node: new, address: address.clone() },
                (Some(true), None) if view.settled => Step::Done,
                (Some(true), Some(false)) if view.settled => leave(old, view),
                (Some(_), _) if view.leader == Some(old) => Step::GiveOffice,
                (Some(false), _) if !view.may_leave => Step::Wait(Wait::Shards),
                (Some(voter), _) => take_in(new, voter, voters_with(view.members, Some(new), Some(old)), view),
            }
        }
    }
}

/// Makes a learner a voter once it has caught up; or goes on with that.
fn take_in(node: RaftNodeId, is_voter: bool, voters: BTreeSet<RaftNodeId>, view: View<'_>) -> Step {
    match view.lag {
        _ if is_voter => Step::SetVoters(voters),
        Some(lag) if lag <= LAG_MAX => Step::SetVoters(voters),
        lag => Step::Wait(Wait::Behind { node, lag }),
    }
}

fn leave(node: RaftNodeId, view: View<'_>) -> Step {
    let rest = voters_with(view.members, None, Some(node));
    match view.members.get(&node) {
        None if view.settled => Step::Done,
        None => Step::Wait(Wait::Commit),
        Some(_) if rest.is_empty() => Step::Wait(Wait::LastVoter),
        // At once, also in the directory: a node that has left the shards does not see how they go on.
        Some(_) if view.leader == Some(node) => Step::GiveOffice,
        Some(_) if !view.may_leave => Step::Wait(Wait::Shards),
        Some(member) if !member.voter => Step::RemoveLearner(node),
        Some(_) => Step::SetVoters(rest),
    }
}

/// What a group must do next, while no change is under way, so that no node is a member whose number is used up: a leader whose directory was
/// behind may have added it again.
fn stray_step(retired: &BTreeSet<RaftNodeId>, view: View<'_>) -> Step {
    let strays = view.members.keys().filter(|node| retired.contains(node));
    strays.map(|node| leave(*node, view)).find(|step| !matches!(step, Step::Wait(_))).unwrap_or(Step::Done)
}

/// The voters, with one more and one less.
pub(crate) fn voters_with(
    members: &BTreeMap<RaftNodeId, Member>,
    more: Option<RaftNodeId>,
    less: Option<RaftNodeId>,
) -> BTreeSet<RaftNodeId> {
    let voters = members.iter().filter(|(_, member)| member.voter).map(|(node, _)| *node);
    voters.chain(more).filter(|node| Some(*node) != less).collect()
}

fn step(change: &MemberChange, status: &GroupStatus, may_leave: bool) -> Step {
    next_step(change, view(status, change.comes().map(|node| RaftNodeId(node.0)), may_leave))
}

fn view(status: &GroupStatus, comes: Option<RaftNodeId>, may_leave: bool) -> View<'_> {
    let matched = comes.and_then(|node| status.matched.get(&node).copied().flatten());
    let last = status.last_log.map_or(0, |index| index.0);
    View {
        members: &status.members,
        settled: status.settled,
        leader: status.leader.as_ref().map(|(node, _)| *node),
        lag: matched.map(|matched| last.saturating_sub(matched.0)),
        may_leave,
    }
}

/// The next step of every group, in the order of their numbers, as this node sees them.
pub(crate) fn steps(core: &Core, change: &MemberChange) -> Vec<Step> {
    let shards: Vec<Step> = core.shards.iter().map(|shard| step(change, &shard.hosted.group.status(), true)).collect();
    let may_leave = shards.iter().all(|step| *step == Step::Done);
    std::iter::once(step(change, &core.directory.group.status(), may_leave)).chain(shards).collect()
}

/// Takes steps as long as this node lives.
pub(crate) async fn run(core: Arc<Core>) {
    let mut watch = core.directory.watch();
    loop {
        watch.mark_unchanged();
        let under_way = core.directory.read(|directory| directory.change_under_way().cloned());
        let Some(change) = under_way else {
            if remove_strays(&core).await {
                sleep(PAUSE).await;
            } else if watch.changed().await.is_err() {
                return;
            }
            continue;
        };
        let steps = steps(&core, &change.change);
        if steps.iter().all(|step| *step == Step::Done) {
            conclude(&core, &change).await;
        } else {
            let (first, rest) = steps.split_first().expect("there is a directory");
            let shards = core.shards.iter().zip(rest).map(|(shard, step)| take(&shard.hosted, step));
            tokio::join!(take(&core.directory, first), join_all(shards));
        }
        if core.directory.group.status().role == Role::Stopped {
            return;
        }
        sleep(PAUSE).await;
    }
}

/// Has those leave the groups that this node leads whose numbers are used up. False if there are none.
async fn remove_strays(core: &Core) -> bool {
    let retired: BTreeSet<RaftNodeId> =
        core.directory.read(|directory| directory.retired().map(|node| RaftNodeId(node.0)).collect());
    if retired.is_empty() {
        return false;
    }
    let next = |status: GroupStatus| {
        let leads = status.role == Role::Leader;
        if leads { stray_step(&retired, view(&status, None, true)) } else { Step::Done }
    };
    let first = next(core.directory.group.status());
    let rest: Vec<Step> = core.shards.iter().map(|shard| next(shard.hosted.group.status())).collect();
    if first == Step::Done && rest.iter().all(|step| *step == Step::Done) {
        return false;
    }
    let shards = core.shards.iter().zip(&rest).map(|(shard, step)| take(&shard.hosted, step));
    tokio::join!(take(&core.directory, &first), join_all(shards));
    true
}

/// Takes the step if this node leads the group. One that fails is taken again, by whoever leads then.
async fn take<S: Replicated>(hosted: &Hosted<S>, step: &Step) {
    if hosted.leads().is_err() {
        return;
    }
    let (group, deadline) = (&hosted.group, Instant::now() + OWN_PROPOSAL);
    let taken = match step {
        Step::Done | Step::Wait(_) => return,
        Step::AddLearner { node, address } => group.add_learner(*node, address.clone(), deadline).await,
        Step::SetVoters(voters) => group.change_members(voters.clone(), deadline).await,
        Step::RemoveLearner(node) => group.remove_learner(*node, deadline).await,
        Step::GiveOffice => {
            let status = group.status();
            let answering = group.answering(PATIENCE);
            let fit =
                |node: &RaftNodeId| status.members.get(node).is_some_and(|it| it.voter) && answering.contains(node);
            let heirs = status.matched.iter().filter(|(node, _)| fit(node));
            let Some((to, _)) = heirs.max_by_key(|(node, matched)| (**matched, **node)) else { return };
            hosted.stamp_before_leaving(deadline).await;
            group.transfer_leader(*to, deadline).await
        }
    };
    match taken {
        Ok(()) => tracing::info!(group = %hosted.id(), %step, "a step of a change of members was taken"),
        Err(error) => {
            tracing::debug!(group = %hosted.id(), %step, %error, "a step of a change of members was not taken")
        }
    }
}

/// Notes in the directory, if this node leads it, that the change has come to its end.
async fn conclude(core: &Core, change: &NumberedChange) {
    if core.directory.leads().is_err() {
        return;
    }
    // To have seen a node come is lasting. But a replica that is behind may not have seen yet that the node which leaves had come at all.
    if change.change.leaves().is_some() && !has_caught_up(core).await {
        return;
    }
    if !steps(core, &change.change).iter().all(|step| *step == Step::Done) {
        return;
    }
    let command = DirectoryCommand::EndChange { number: change.number, cancelled: false };
    match core.directory.propose(command, Instant::now() + OWN_PROPOSAL).await.map(|done| done.outcome) {
        Ok(DirectoryOutcome::Member(Ok(number))) => {
            tracing::info!(%number, what = %change.change, "members were changed")
        }
        Ok(other) => tracing::debug!(outcome = ?other, "the end of a change was not taken"),
        Err(refusal) => tracing::debug!(%refusal, "the end of a change was not taken"),
    }
}

/// Asks meta nodes for their status, all at once, until `enough` have answered or the deadline is over: one that hangs holds nobody up.
pub(crate) async fn ask_until(
    core: &Core,
    others: &[(NodeId, String)],
    enough: usize,
    deadline: Instant,
) -> Vec<v1::StatusReply> {
    let mut asked: FuturesUnordered<_> =
        others.iter().map(|(node, address)| ask_status(core, *node, address, deadline)).collect();
    let mut heard = Vec::new();
    while heard.len() < enough
        && let Some(answer) = asked.next().await
    {
        heard.extend(answer);
    }
    heard
}

/// Waits until this node knows to be committed, in every group, all that a majority of the directory's voters had in their logs when they were
/// asked: so all that was committed before. False if no majority answers, or it takes too long.
async fn has_caught_up(core: &Core) -> bool {
    let status = core.directory.group.status();
    let voters: Vec<_> = status.members.iter().filter(|(_, member)| member.voter).collect();
    let own = RaftNodeId(core.config.node.0);
    let others = voters.iter().filter(|(node, _)| **node != own);
    let others: Vec<_> = others.map(|(node, member)| (NodeId(node.0), member.addr.clone())).collect();
    let needed = (voters.len() / 2 + 1).saturating_sub(voters.len() - others.len());
    let heard = ask_until(core, &others, needed, Instant::now() + PATIENCE).await;
    if heard.len() < needed {
        return false;
    }
    let has = |group: GroupStatus| {
        let last = |reply: &v1::StatusReply| {
            reply.groups.iter().find(|it| it.group == group.group.0).map_or(0, |it| it.last_log)
        };
        heard.iter().map(last).max().unwrap_or(0) <= group.committed.map_or(0, |LogIndex(index)| index)
    };
    let deadline = Instant::now() + OWN_PROPOSAL;
    loop {
        let shards = core.shards.iter().map(|shard| shard.hosted.group.status());
        if std::iter::once(core.directory.group.status()).chain(shards).all(has) {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        sleep(PAUSE).await;
    }
}

/// Waits until this node has applied, in every group, all that was committed before, and every shard has heard all that the directory says.
pub(crate) async fn has_applied_all(core: &Core, deadline: Instant) -> Result<(), Refusal> {
    let behind = |what: &str| not_ready(format!("this node does not know yet {what}: ask again"), RETRY);
    if !has_caught_up(core).await {
        return Err(behind("all that is committed"));
    }
    let seen = core.directory.read(Directory::feed_position).into();
    for shard in core.shards.iter() {
        core.catch_up(shard, Some(seen), deadline).await?;
        let committed = shard.hosted.group.status().committed;
        while shard.hosted.group.status().applied < committed {
            if Instant::now() >= deadline {
                return Err(behind("the state of every shard"));
            }
            sleep(PAUSE).await;
        }
    }
    Ok(())
}

/// Finds out whether this node was removed: it may have slept through that, and nobody calls on it any more. Ends when it knows.
pub(crate) async fn ask_whether_removed(core: Arc<Core>) {
    loop {
        sleep(ASK_EVERY).await;
        let own = core.config.node;
        let suspects = core.directory.read(|directory| directory.is_retired(own)) || core.served.lock().is_err();
        if !core.directory.group.is_initialized() || !suspects {
            continue;
        }
        let mut others: BTreeMap<NodeId, String> =
            core.directory.read(|directory| directory.metas().map(|meta| (meta.id, meta.address.clone())).collect());
        let members = core.directory.group.status().members;
        others.extend(members.into_iter().map(|(node, member)| (NodeId(node.0), member.addr)));
        others.remove(&own);
        let deadline = Instant::now() + PATIENCE;
        let asked = others.iter().map(|(node, address)| ask_status(&core, *node, address, deadline));
        let says_so = |reply: &v1::StatusReply| {
            reply.retired.contains(&own.0) && reply.change_under_way.as_ref().is_none_or(|it| it.leaves != own.0)
        };
        if join_all(asked).await.iter().flatten().any(says_so) {
            core.removed.store(true, Ordering::SeqCst);
            tracing::error!(node = %own, "this node was removed from the cluster: stop it, its number is never used again");
            return;
        }
    }
}

/// Whether a meta node may have its say: one that was removed may not.
pub(crate) fn may_speak(directory: &Directory, node: NodeId) -> bool {
    let leaving = directory.change_under_way().and_then(|held| held.change.leaves()) == Some(node);
    leaving || !directory.is_retired(node)
}

/// The message for a change; with how far each group is, while it is under way.
pub(crate) fn message(change: &NumberedChange, steps: &[Step]) -> v1::MemberChange {
    let progress =
        |(group, step): (u32, &Step)| v1::MemberProgress { group, done: *step == Step::Done, next: step.to_string() };
    v1::MemberChange {
        number: Some(change.number.into()),
        what: change.change.to_string(),
        comes: change.change.comes().map_or(0, |node| node.0),
        leaves: change.change.leaves().map_or(0, |node| node.0),
        groups: (0..).zip(steps).map(progress).collect(),
    }
}

/// What a node says of itself that was removed.
pub(crate) const REMOVED: &str = "this node was removed from the cluster: stop it";

/// The refusal of a node that was removed.
pub(crate) fn removed(node: NodeId) -> Refusal {
    let why = format!("{node} was removed from the cluster: stop it, its number is never used again");
    Refusal::node_refused(v1::node_refused::Reason::Retired, node.0, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A group of a test: what its membership is, and a leader that takes steps as openraft does.
    #[derive(Clone)]
    struct Group {
        members: BTreeMap<RaftNodeId, Member>,
        settled: bool,
        leader: u64,
        /// The voters that a change which was cut short is on its way to.
        joint: Option<BTreeSet<RaftNodeId>>,
    }

    impl Group {
        fn of(voters: &[u64], learners: &[u64]) -> Self {
            let member = |id: &u64, voter| (RaftNodeId(*id), Member { addr: format!("h:{id}"), voter });
            let members = voters.iter().map(|id| member(id, true)).chain(learners.iter().map(|id| member(id, false)));
            Self { members: members.collect(), settled: true, leader: voters[0], joint: None }
        }
        fn next(&self, change: &MemberChange, lag: Option<u64>, may_leave: bool) -> Step {
            let leader = Some(RaftNodeId(self.leader));
            next_step(change, View { members: &self.members, settled: self.settled, leader, lag, may_leave })
        }
        fn voters(&self) -> Vec<u64> {
            voters_with(&self.members, None, None).into_iter().map(|node| node.0).collect()
        }
        /// Takes the step, or only the half of it that a crash leaves behind.
        fn take(&mut self, step: &Step, half: bool) {
            match step {
                Step::AddLearner { node, address } => {
                    self.members.insert(*node, Member { addr: address.clone(), voter: false });
                }
                Step::RemoveLearner(node) => {
                    assert!(!self.members[node].voter);
                    self.members.remove(node);
                }
                Step::SetVoters(voters) => {
                    assert!(voters.iter().all(|node| self.members.contains_key(node)) && !voters.is_empty());
                    for node in voters {
                        self.members.get_mut(node).unwrap().voter = true;
                    }
                    self.joint = Some(voters.clone());
                    self.settled = false;
                    if !half {
                        self.members.retain(|node, member| !member.voter || voters.contains(node));
                        (self.joint, self.settled) = (None, true);
                    }
                }
                Step::GiveOffice => {
                    let other = self.voters().into_iter().find(|id| *id != self.leader);
                    self.leader = other.expect("another voter");
                }
                Step::Done | Step::Wait(_) => {}
            }
        }
    }

    fn add(node: u64) -> MemberChange {
        MemberChange::Add { node: NodeId(node), address: format!("h:{node}") }
    }
    const fn promote(node: u64) -> MemberChange {
        MemberChange::Promote { node: NodeId(node) }
    }
    const fn remove(node: u64) -> MemberChange {
        MemberChange::Remove { node: NodeId(node) }
    }
    fn replace(old: u64, new: u64) -> MemberChange {
        MemberChange::Replace { old: NodeId(old), new: NodeId(new), address: format!("h:{new}") }
    }

    #[test]
    fn a_learner_that_lags_is_not_promoted() {
        let group = Group::of(&[1, 2, 3], &[4]);
        let behind = |lag| Step::Wait(Wait::Behind { node: RaftNodeId(4), lag });
        assert_eq!(group.next(&promote(4), None, true), behind(None));
        assert_eq!(group.next(&promote(4), Some(LAG_MAX + 1), true), behind(Some(LAG_MAX + 1)));
        assert!(matches!(group.next(&promote(4), Some(LAG_MAX), true), Step::SetVoters(voters) if voters.len() == 4));
        assert_eq!(group.next(&promote(5), Some(0), true), Step::Wait(Wait::NotAMember(RaftNodeId(5))));
    }

    #[test]
    fn a_leader_that_leaves_hands_its_office_on_first_and_the_last_voter_stays() {
        let mut group = Group::of(&[1, 2, 3], &[]);
        assert_eq!(group.next(&remove(1), None, true), Step::GiveOffice);
        group.take(&Step::GiveOffice, false);
        assert!(matches!(group.next(&remove(1), None, true), Step::SetVoters(voters) if voters.len() == 2));
        assert_eq!(group.next(&remove(1), None, false), Step::Wait(Wait::Shards));
        assert_eq!(Group::of(&[1], &[2]).next(&remove(1), None, true), Step::Wait(Wait::LastVoter));
        assert_eq!(Group::of(&[1], &[2]).next(&remove(2), None, true), Step::RemoveLearner(RaftNodeId(2)));
    }

    #[test]
    fn who_is_retired_leaves_again_if_he_was_added_late_and_the_last_voter_stays() {
        let stray = |group: &Group| {
            let leader = Some(RaftNodeId(group.leader));
            let view = View { members: &group.members, settled: group.settled, leader, lag: None, may_leave: true };
            stray_step(&[RaftNodeId(3), RaftNodeId(4)].into(), view)
        };
        let mut group = Group::of(&[1, 2, 3], &[4, 5]);
        let mut taken = Vec::new();
        while stray(&group) != Step::Done {
            taken.push(stray(&group));
            group.take(&taken[taken.len() - 1], false);
            assert!(taken.len() < 5, "{taken:?}");
        }
        let rest = [RaftNodeId(1), RaftNodeId(2)].into();
        assert_eq!(taken, [Step::SetVoters(rest), Step::RemoveLearner(RaftNodeId(4))]);
        assert_eq!(group.members.len(), 3, "5 is not retired");
        let mut led = Group::of(&[1, 3], &[]);
        led.leader = 3;
        assert_eq!(stray(&led), Step::GiveOffice);
        assert_eq!(stray(&Group::of(&[3], &[])), Step::Done);
    }

    proptest! {
        /// Whatever crashes leave behind, and from wherever a change begins, it comes to its end, and never leaves the group without voters.
        #[test]
        fn a_change_comes_to_its_end_from_wherever_it_was_left(
            halves in proptest::collection::vec(any::<bool>(), 12),
            kind in 0..4,
            leader in 0..3_usize,
            begun in 0..3,
        ) {
            let mut group = Group::of(&[1, 2, 3], if kind == 1 || begun == 1 { &[4] } else { &[] });
            group.leader = [1, 2, 3][leader];
            let (change, expected): (_, &[u64]) = match kind {
                0 => (add(4), &[1, 2, 3]),
                1 => (promote(4), &[1, 2, 3, 4]),
                2 => (remove(2), &[1, 3]),
                _ => (replace(2, 4), &[1, 3, 4]),
            };
            let mut taken = 0;
            loop {
                let step = group.next(&change, Some(0), true);
                if step == Step::Done { break; }
                prop_assert!(!matches!(step, Step::Wait(_)), "{step:?}");
                let half = halves.get(taken).copied().unwrap_or(false);
                group.take(&step, half);
                prop_assert!(!group.voters().is_empty());
                taken += 1;
                prop_assert!(taken < 20, "no end");
            }
            prop_assert_eq!(group.voters(), expected);
            prop_assert!(group.joint.is_none());
        }
    }
}
