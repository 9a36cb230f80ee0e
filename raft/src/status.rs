//! What a group says about itself on this node.

use std::collections::BTreeMap;

use openraft::ServerState;

use crate::error::LeaderHint;
use crate::ids::{GroupId, LogIndex, RaftNodeId, Term};
use crate::machine::Machine;
use crate::replica::Cell;
use crate::types::{LogId, Metrics};

/// What a node is in a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Receives the log, does not vote. Also a node that belongs to no group yet.
    Learner,
    /// Votes and follows.
    Follower,
    /// Stands for election.
    Candidate,
    /// Leads, or believes so: only a read index or a proposal proves it.
    Leader,
    /// Stopped on this node.
    Stopped,
}

/// One member of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Its `host:port`.
    pub addr: String,
    /// Whether it votes; learners do not.
    pub voter: bool,
}

/// A group as this node sees it. All indexes are of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupStatus {
    /// The group.
    pub group: GroupId,
    /// This node.
    pub node: RaftNodeId,
    /// Who leads, as far as this node knows.
    pub leader: LeaderHint,
    /// The current term.
    pub term: Term,
    /// What this node is.
    pub role: Role,
    /// The last entry in the log.
    pub last_log: Option<LogIndex>,
    /// The last entry known to be committed.
    pub committed: Option<LogIndex>,
    /// The last entry applied to the machine.
    pub applied: Option<LogIndex>,
    /// The last entry in the newest snapshot.
    pub snapshot: Option<LogIndex>,
    /// The last entry removed from the log.
    pub purged: Option<LogIndex>,
    /// All members, as of the newest change in the log, committed or not. In a joint membership, who votes on either side.
    pub members: BTreeMap<RaftNodeId, Member>,
    /// Whether that change is known to be committed, and is not one half of a change of voters.
    pub settled: bool,
    /// The entry with which this node's leadership began, once it is applied: from here on the machine holds all that
    /// earlier leaders committed. `None` while this node does not lead or has not come so far.
    pub leader_since: Option<LogIndex>,
    /// On a leader, the last entry that each other member is known to hold.
    pub matched: BTreeMap<RaftNodeId, Option<LogIndex>>,
    /// Why the group stopped on this node, if it or the node's disk failed.
    pub fault: Option<String>,
}

impl GroupStatus {
    /// `fault` is that of the disk: it is of all groups, and stops them.
    pub(crate) fn new<M: Machine>(group: GroupId, metrics: &Metrics, cell: &Cell<M>, fault: Option<&str>) -> Self {
        let members = metrics.membership_config.membership();
        let voters: Vec<u64> = members.voter_ids().collect();
        let addr = |id: u64| members.get_node(&id).map(|node| node.addr.clone());
        let index = |id: &Option<LogId>| id.as_ref().map(|id| LogIndex(id.index()));
        let role = match metrics.state {
            ServerState::Learner => Role::Learner,
            ServerState::Follower => Role::Follower,
            ServerState::Candidate => Role::Candidate,
            ServerState::Leader => Role::Leader,
            ServerState::Shutdown => Role::Stopped,
        };
        let fault = match &metrics.running_state {
            Ok(()) | Err(openraft::errors::Fatal::Stopped) => fault.map(str::to_owned),
            Err(fault) => Some(fault.to_string()),
        };
        let role = if fault.is_some() || metrics.running_state.is_err() { Role::Stopped } else { role };
        // A leader that has stopped leads no more, and does not know who does.
        let led = metrics.current_leader.filter(|id| *id != metrics.id || role != Role::Stopped);
        Self {
            group,
            node: RaftNodeId(metrics.id),
            leader: led.and_then(|id| addr(id).map(|addr| (RaftNodeId(id), addr))),
            term: Term(metrics.current_term),
            role,
            last_log: metrics.last_log_index.map(LogIndex),
            committed: index(&metrics.local_committed),
            applied: index(&metrics.last_applied),
            snapshot: index(&metrics.snapshot),
            purged: index(&metrics.purged),
            members: members
                .nodes()
                .map(|(id, node)| (RaftNodeId(*id), Member { addr: node.addr.clone(), voter: voters.contains(id) }))
                .collect(),
            settled: members.get_joint_config().len() <= 1
                && metrics.membership_config.log_id().as_ref().map(LogId::index)
                    <= metrics.local_committed.as_ref().map(LogId::index),
            leader_since: if role == Role::Leader { cell.term_began(metrics.current_term) } else { None },
            matched: metrics
                .replication
                .iter()
                .flatten()
                .filter(|(id, _)| **id != metrics.id)
                .map(|(id, matched)| (RaftNodeId(*id), index(matched)))
                .collect(),
            fault,
        }
    }
}
