//! Leaders: which leadership this node should give to whom, so that no node leads much more than another.
//!
//! Decides only; `offices.rs` looks, waits and hands over. There is no coordinator: every node sees who leads what, and only the one that
//! leads most gives something away, so that nodes which see the same move one leadership at a time.
//! Keeps: a move never makes the difference greater or turns it round (*nothing oscillates*); nothing goes to a node that drains, is silent
//! or lags; nothing moves while a group has no leader.

use quarry_raft::{GroupId, RaftNodeId, Term};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};
use tokio::time::Instant;

/// What one node knows of who leads.
#[derive(Debug, Clone)]
pub(crate) struct View {
    /// The node that looks.
    pub(crate) me: RaftNodeId,
    /// The groups that were formed, in the order of their numbers.
    pub(crate) groups: Vec<Seat>,
    /// Other nodes that want no leadership.
    pub(crate) draining: BTreeSet<RaftNodeId>,
}

/// The leadership of one group.
#[derive(Debug, Clone)]
pub(crate) struct Seat {
    pub(crate) group: GroupId,
    pub(crate) leader: Option<RaftNodeId>,
    pub(crate) voters: BTreeSet<RaftNodeId>,
    /// Who could take it from this node now: empty unless this node leads.
    pub(crate) heirs: BTreeSet<RaftNodeId>,
}

impl View {
    /// The same, if every voter could take what this node leads.
    pub(crate) fn if_all_could(mut self) -> Self {
        for seat in self.groups.iter_mut().filter(|seat| seat.leader == Some(self.me)) {
            seat.heirs = seat.voters.iter().copied().filter(|node| *node != self.me).collect();
        }
        self
    }
}

/// A leadership to be handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) group: GroupId,
    pub(crate) to: RaftNodeId,
}

/// The leadership that this node should give away next, if any.
pub(crate) fn next_move(view: &View) -> Option<Move> {
    let loads = loads(view)?;
    let (giver, most) = loads.iter().max_by_key(|(node, load)| (**load, Reverse(**node)))?;
    if *giver != view.me {
        return None;
    }
    let less_laden = |(node, load): &(&RaftNodeId, &usize)| **load + 1 < *most && !view.draining.contains(*node);
    let mut takers: Vec<_> = loads.iter().filter(less_laden).collect();
    takers.sort_by_key(|(node, load)| (**load, **node));
    // The directory, which all need, moves last.
    takers.into_iter().find_map(|(to, _)| {
        let seat = view.groups.iter().rev().find(|seat| seat.heirs.contains(to))?;
        Some(Move { group: seat.group, to: *to })
    })
}

/// How many groups each voter leads; nothing while that is not settled.
fn loads(view: &View) -> Option<BTreeMap<RaftNodeId, usize>> {
    let mut loads: BTreeMap<_, _> = view.groups.iter().flat_map(|seat| &seat.voters).map(|node| (*node, 0)).collect();
    for seat in &view.groups {
        *loads.entry(seat.leader?).or_default() += 1;
    }
    Some(loads)
}

/// For how long leaderships and heirs have been what they are: what just changed may change again, so it is left alone for a while.
#[derive(Debug, Default)]
pub(crate) struct Settling {
    led: BTreeMap<GroupId, (Term, Instant)>,
    heirs: BTreeMap<(GroupId, RaftNodeId), Instant>,
}

impl Settling {
    /// Takes in what is so `now`: the term that this node leads in, if it leads, and who could follow. Those are left over that have been fit
    /// for at least `quiet`, in a term that is at least as old.
    pub(crate) fn observe(
        &mut self,
        now: Instant,
        group: GroupId,
        leads: Option<Term>,
        fit: &BTreeSet<RaftNodeId>,
        quiet: Duration,
    ) -> BTreeSet<RaftNodeId> {
        self.heirs.retain(|(of, node), _| *of != group || fit.contains(node));
        let Some(term) = leads else {
            self.led.remove(&group);
            return BTreeSet::new();
        };
        let (known, since) = self.led.entry(group).or_insert((term, now));
        if *known != term {
            (*known, *since) = (term, now);
        }
        let long = |since: Instant| now.saturating_duration_since(since) >= quiet;
        let old = long(*since);
        let settled = |node: &&RaftNodeId| long(*self.heirs.entry((group, **node)).or_insert(now)) && old;
        fit.iter().filter(settled).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODES: [RaftNodeId; 3] = [RaftNodeId(1), RaftNodeId(2), RaftNodeId(3)];

    /// As `me` sees it when these lead the groups from 0 on and all others could follow.
    fn view(me: RaftNodeId, leaders: &[RaftNodeId], draining: &[RaftNodeId]) -> View {
        let seat = |(group, leader): (u32, &RaftNodeId)| Seat {
            group: GroupId(group),
            leader: Some(*leader),
            voters: NODES.into(),
            heirs: NODES.into_iter().filter(|node| *leader == me && *node != me).collect(),
        };
        View { me, groups: (0..).zip(leaders).map(seat).collect(), draining: draining.iter().copied().collect() }
    }

    fn skew(leaders: &[RaftNodeId], among: &[RaftNodeId]) -> usize {
        let load = |node: &RaftNodeId| leaders.iter().filter(|leader| *leader == node).count();
        let loads: Vec<usize> = among.iter().map(load).collect();
        loads.iter().max().unwrap() - loads.iter().min().unwrap()
    }

    #[test]
    fn from_every_start_one_node_at_a_time_moves_until_nobody_leads_two_more_than_another_and_then_nothing_moves() {
        for drained in [&[][..], &NODES[1..2]] {
            let among: Vec<_> = NODES.into_iter().filter(|node| !drained.contains(node)).collect();
            for start in 0..3_usize.pow(6) {
                let mut leaders: Vec<_> = (0..6).map(|at| NODES[start / 3_usize.pow(at) % 3]).collect();
                // A node that drains gives away by itself.
                if leaders.iter().any(|leader| drained.contains(leader)) {
                    continue;
                }
                let mut moves = 0;
                loop {
                    let planned: Vec<Move> =
                        NODES.iter().filter_map(|me| next_move(&view(*me, &leaders, drained))).collect();
                    assert!(planned.len() <= 1, "{leaders:?}: {planned:?} at once");
                    let Some(Move { group, to }) = planned.first().copied() else { break };
                    assert!(!drained.contains(&to), "{leaders:?}: to a node that drains");
                    leaders[group.0 as usize] = to;
                    moves += 1;
                    assert!(moves <= 4, "more moves than are needed from start {start}");
                }
                assert!(skew(&leaders, &among) <= 1, "stays uneven: {leaders:?}");
            }
        }
    }

    #[test]
    fn nothing_moves_while_a_group_has_no_leader_or_to_those_who_could_not_follow() {
        let all_here = [NODES[0]; 4];
        let mut looked = view(NODES[0], &all_here, &[]);
        assert_eq!(next_move(&looked), Some(Move { group: GroupId(3), to: NODES[1] }));
        looked.groups[3].heirs.clear();
        assert_eq!(next_move(&looked), Some(Move { group: GroupId(2), to: NODES[1] }), "another group can move");
        for seat in &mut looked.groups {
            seat.heirs.remove(&NODES[1]);
        }
        assert_eq!(next_move(&looked), Some(Move { group: GroupId(2), to: NODES[2] }), "another node can take it");
        looked.groups[0].leader = None;
        assert_eq!(next_move(&looked), None, "an election is under way");
    }

    #[tokio::test(start_paused = true)]
    async fn who_just_came_is_given_nothing_and_who_just_leads_gives_nothing_away() {
        const SECOND: Duration = Duration::from_secs(1);
        let (mut settling, now, quiet) = (Settling::default(), Instant::now(), 2 * SECOND);
        let both = BTreeSet::from([NODES[1], NODES[2]]);
        let one = BTreeSet::from([NODES[1]]);
        let mut at = |seconds: u32, term: Option<u64>, fit: &BTreeSet<RaftNodeId>| {
            settling.observe(now + seconds * SECOND, GroupId(1), term.map(Term), fit, quiet)
        };
        assert_eq!(at(0, Some(5), &both), BTreeSet::new());
        assert_eq!(at(2, Some(5), &both), both);
        assert_eq!(at(3, Some(5), &one), one);
        assert_eq!(at(4, Some(5), &both), one, "it was away a moment ago");
        assert_eq!(at(6, Some(5), &both), both);
        assert_eq!(at(7, Some(7), &both), BTreeSet::new(), "another election meanwhile");
        assert_eq!(at(8, None, &both), BTreeSet::new());
        assert_eq!(at(9, Some(7), &both), BTreeSet::new());
        assert_eq!(at(11, Some(7), &both), both);
    }
}
