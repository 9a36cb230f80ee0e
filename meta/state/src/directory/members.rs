//! Changes of the meta nodes: at most one is under way, and all groups are changed by it.
//!
//! A change is an intent: it says what is wanted, not how far it is. How far each group has come is what the group's own membership says, so a
//! change is gone on with by whoever leads, from wherever it was left. Decides which change is under way and which numbers of nodes are used up;
//! leaves to the service: whether a change is wise now (quorum, lag), and taking its steps.
//! Keeps *Epochs only grow*: changes are numbered upwards, and a node that is retired never comes back. A number is a meta node's or a data node's.

use super::{
    Directory,
    feed::Topic,
    nodes::{NODE_ADDRESS_BYTES_MAX, NodeRefusal},
};
use quarry_wire::{
    certificate::Role,
    ids::{FeedNumber, Generation, NodeId, Ordinal},
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What is to become of the meta nodes. In all groups.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum MemberChange {
    /// This node receives every group's log, and does not vote.
    Add {
        /// The new node.
        node: NodeId,
        /// `host:port` where it listens.
        address: String,
    },
    /// This node votes. It was added before.
    Promote {
        /// The node.
        node: NodeId,
    },
    /// This node is no member any more; its number is used up.
    Remove {
        /// The node.
        node: NodeId,
    },
    /// `new` takes the vote of `old`, which is no member any more. Both in one step of each group, so `old` may be dead.
    Replace {
        /// The node that leaves.
        old: NodeId,
        /// The node that comes.
        new: NodeId,
        /// `host:port` where the new one listens.
        address: String,
    },
}

impl MemberChange {
    /// The node that comes or is promoted, if one does.
    #[must_use]
    pub const fn comes(&self) -> Option<NodeId> {
        match self {
            Self::Add { node, .. } | Self::Promote { node } | Self::Replace { new: node, .. } => Some(*node),
            Self::Remove { .. } => None,
        }
    }

    /// The node that leaves, if one does.
    #[must_use]
    pub const fn leaves(&self) -> Option<NodeId> {
        match self {
            Self::Remove { node } | Self::Replace { old: node, .. } => Some(*node),
            Self::Add { .. } | Self::Promote { .. } => None,
        }
    }
}

impl fmt::Display for MemberChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Add { node, address } => write!(f, "add {node} at {address}"),
            Self::Promote { node } => write!(f, "promote {node}"),
            Self::Remove { node } => write!(f, "remove {node}"),
            Self::Replace { old, new, address } => write!(f, "replace {old} by {new} at {address}"),
        }
    }
}

/// A change with its number.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NumberedChange {
    /// Counts the changes of the cluster.
    pub number: Ordinal,
    /// What is wanted.
    pub change: MemberChange,
}

/// Why a change was not begun or ended.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum MemberRefusal {
    /// The cluster was not initialised yet.
    #[error("the cluster is not initialised")]
    NotInitialised,
    /// Another one is under way.
    #[error("change {} ({}) is under way: wait for it, or cancel it", .under_way.number, .under_way.change)]
    UnderWay {
        /// That one.
        under_way: NumberedChange,
    },
    /// The node's number is used up.
    #[error("{node} was removed, and a number is never used again: give the node a new one, and an empty folder")]
    Retired {
        /// The node.
        node: NodeId,
    },
    /// No certificate that holds names it as a meta node.
    #[error("no certificate that holds names {node} as a meta node: admit one first")]
    NotCertified {
        /// The node.
        node: NodeId,
    },
    /// The address cannot be one.
    #[error("an address has 1 to {NODE_ADDRESS_BYTES_MAX} bytes, this one has {found}")]
    Address {
        /// Its bytes.
        found: usize,
    },
    /// A node cannot take its own place.
    #[error("{node} cannot replace itself: give the new node a number of its own")]
    Same {
        /// The node.
        node: NodeId,
    },
    /// No such change is under way.
    #[error("{}", not_under_way(*.found))]
    NotUnderWay {
        /// The number named; none was if it is zero.
        found: Ordinal,
    },
    /// A removal only goes on: the number is used up from its beginning.
    #[error("a removal cannot be cancelled: {node} is out for good as soon as it has begun")]
    OnlyForward {
        /// The node that leaves.
        node: NodeId,
    },
    /// The number is a data node's.
    #[error("{node} is or was a data node: give the meta node a number of its own")]
    DataNode {
        /// The node.
        node: NodeId,
    },
}

fn not_under_way(found: Ordinal) -> String {
    if found == Ordinal::default() {
        "no change of the meta nodes is under way".to_owned()
    } else {
        format!("change {found} is not under way")
    }
}

/// What the directory keeps of the changes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Members {
    /// The highest number given.
    pub(super) last: Ordinal,
    pub(super) under_way: Option<NumberedChange>,
    /// The last one that came to its end.
    pub(super) done: Option<NumberedChange>,
}

impl Members {
    pub(super) const fn new() -> Self {
        Self { last: Ordinal { generation: Generation(0), number: 0 }, under_way: None, done: None }
    }
}

impl Directory {
    /// Begins a change. The same one again, while it is under way or if it was the last that came to its end, has the same number.
    pub(super) fn begin_change(&mut self, change: MemberChange) -> Result<Ordinal, MemberRefusal> {
        if self.cluster.is_none() {
            return Err(MemberRefusal::NotInitialised);
        }
        let same = |held: &&NumberedChange| held.change == change;
        if let Some(held) = self.members.under_way.as_ref().filter(same) {
            return Ok(held.number);
        }
        if let Some(under_way) = self.members.under_way.clone() {
            return Err(MemberRefusal::UnderWay { under_way });
        }
        if let Some(held) = self.members.done.as_ref().filter(same) {
            return Ok(held.number);
        }
        if let Some(node) = [change.comes(), change.leaves()].into_iter().flatten().find(|node| self.is_retired(*node))
        {
            return Err(MemberRefusal::Retired { node });
        }
        // A number is retired for all that it names: memory under it would be left to nobody.
        let holds_memory = |node: &NodeId| self.regions_of(*node).next().is_some();
        if let Some(node) = [change.comes(), change.leaves()].into_iter().flatten().find(holds_memory) {
            return Err(MemberRefusal::DataNode { node });
        }
        if let MemberChange::Replace { old, new, .. } = &change
            && old == new
        {
            return Err(MemberRefusal::Same { node: *old });
        }
        match &change {
            MemberChange::Add { node, address } | MemberChange::Replace { new: node, address, .. } => {
                if !self.is_certified(*node, Role::Meta) {
                    return Err(MemberRefusal::NotCertified { node: *node });
                }
                if self.was_certified(*node, Role::DataNode) {
                    return Err(MemberRefusal::DataNode { node: *node });
                }
                self.announce(*node, address).map_err(|refusal| match refusal {
                    NodeRefusal::NotInitialised => MemberRefusal::NotInitialised,
                    NodeRefusal::Address { found } => MemberRefusal::Address { found },
                    NodeRefusal::Retired { node } => MemberRefusal::Retired { node },
                    NodeRefusal::Untrusted { .. }
                    | NodeRefusal::UnknownNode { .. }
                    | NodeRefusal::Alive { .. }
                    | NodeRefusal::Decommissioned { .. }
                    | NodeRefusal::Label { .. } => MemberRefusal::NotCertified { node: *node },
                })?;
            }
            MemberChange::Remove { node } => self.retire(*node),
            MemberChange::Promote { .. } => {}
        }
        let number = Ordinal { generation: self.generation(), number: self.members.last.number + 1 };
        assert!(number > self.members.last, "a change's number only grows");
        self.members.last = number;
        self.members.under_way = Some(NumberedChange { number, change });
        Ok(number)
    }

    /// The change has come to its end in all groups; or, `cancelled`, is given up: what it did stays.
    pub(super) fn end_change(&mut self, found: Ordinal, cancelled: bool) -> Result<Ordinal, MemberRefusal> {
        if self.members.done.as_ref().is_some_and(|held| held.number == found) && !cancelled {
            return Ok(found);
        }
        let ended = self.members.under_way.take_if(|held| held.number == found);
        let Some(ended) = ended else { return Err(MemberRefusal::NotUnderWay { found }) };
        if cancelled {
            if let MemberChange::Remove { node } = ended.change {
                self.members.under_way = Some(ended);
                return Err(MemberRefusal::OnlyForward { node });
            }
            return Ok(found);
        }
        if let Some(node) = ended.change.leaves() {
            self.retire(node);
            self.forget_announcement(node);
        }
        self.members.done = Some(ended);
        Ok(found)
    }

    /// A new generation begins: who is a member was decided by whoever began it.
    pub(super) fn give_up_change(&mut self) {
        self.members.under_way = None;
        self.members.done = None;
    }

    /// Uses the node's number up.
    pub(super) fn retire(&mut self, node: NodeId) {
        if !self.is_retired(node) {
            let changed = self.touch(Topic::Retired(node), None);
            self.retired.insert(node, changed);
        }
    }

    /// The change under way.
    #[must_use]
    pub const fn change_under_way(&self) -> Option<&NumberedChange> {
        self.members.under_way.as_ref()
    }

    /// The last change that came to its end, in this generation.
    #[must_use]
    pub const fn change_done(&self) -> Option<&NumberedChange> {
        self.members.done.as_ref()
    }

    /// The meta nodes that announced themselves and are not retired: where clients and data nodes may ask.
    pub fn metas(&self) -> impl Iterator<Item = &super::Node> {
        self.nodes.values().filter(|node| self.is_certified(node.id, Role::Meta) && !self.is_retired(node.id))
    }

    /// Whether the node was removed, or forgotten: its number is used up.
    #[must_use]
    pub fn is_retired(&self, node: NodeId) -> bool {
        self.retired.contains_key(&node)
    }

    /// The nodes whose numbers are used up.
    pub fn retired(&self) -> impl Iterator<Item = NodeId> {
        self.retired.keys().copied()
    }

    /// When each was retired, in the feed.
    pub(super) fn retired_at(&self) -> impl Iterator<Item = (NodeId, FeedNumber)> {
        self.retired.iter().map(|(node, changed)| (*node, *changed))
    }
}
