//! Which follower stands first when a leader has fallen silent, and when.
//!
//! Voters refuse everybody else for as long as they hold to a leader: its lease, the longest election timeout. openraft then has each follower
//! wait for a random time more, so that not all stand at once. Followers know each other, so nobody has to draw lots: they take turns, one
//! heartbeat apart, and the first to stand is usually elected before the next one's turn. Drawing lots stays as the way out when that does not
//! work: a follower that lacks entries is refused, one that is gone too does not stand.
//! Leaves to openraft: votes, and every rule about who may be elected.

use std::time::Duration;

use crate::config::Timing;
use crate::ids::GroupId;

/// A follower's place among those who may succeed: how many stand before it. `None` when it has no vote. The order is another one in each group:
/// the leaderships of a node that died fall to all others.
pub(crate) fn turn(group: GroupId, voters: impl IntoIterator<Item = u64>, leader: u64, node: u64) -> Option<u32> {
    let mut heirs: Vec<u64> = voters.into_iter().filter(|voter| *voter != leader).collect();
    heirs.sort_unstable();
    let place = heirs.iter().position(|heir| *heir == node)?;
    let first = group.0 as usize % heirs.len();
    u32::try_from((place + heirs.len() - first) % heirs.len()).ok()
}

/// The silence of its leader after which a follower stands whose turn it is. A quarter of a heartbeat is for voters that heard the last word a
/// little later.
pub(crate) fn stands_after(timing: Timing, turn: u32) -> Duration {
    timing.election_max + timing.heartbeat / 4 + timing.heartbeat * turn
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_follower_has_a_turn_of_its_own_and_another_begins_in_the_next_group() {
        let turns = |group| [1, 2, 4, 5].map(|node| turn(GroupId(group), [5, 4, 3, 2, 1], 3, node).unwrap());
        assert_eq!(turns(0), [0, 1, 2, 3]);
        assert_eq!(turns(1), [3, 0, 1, 2]);
        assert_eq!(turns(6), [2, 3, 0, 1]);
    }

    #[test]
    fn learners_and_the_leader_have_no_turn() {
        assert_eq!(turn(GroupId(1), [1, 2, 3], 3, 4), None);
        assert_eq!(turn(GroupId(1), [1, 2, 3], 3, 3), None);
        assert_eq!(turn(GroupId(1), [], 1, 3), None);
    }

    #[test]
    fn nobody_stands_while_voters_hold_to_the_leader_and_turns_are_a_heartbeat_apart() {
        let timing = Timing::default();
        assert!(stands_after(timing, 0) > timing.election_max);
        assert_eq!(stands_after(timing, 2) - stands_after(timing, 1), timing.heartbeat);
    }
}
