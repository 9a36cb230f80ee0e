//! Labels: what a data node shares its fate with. Copies of one value are put where they share as little as can be (`shard/plan.rs`).

use super::{Directory, feed::Topic, nodes::NodeRefusal};
use quarry_wire::{
    ids::{FeedNumber, NodeId},
    limits::LABEL_BYTES_MAX,
};
use serde::{Deserialize, Serialize};

/// Where a data node stands, by its own word; an empty label says nothing.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
pub struct Labels {
    /// The machine.
    pub host: String,
    /// What fails together: a rack, a room.
    pub zone: String,
}

/// How much of their fate two nodes share, least first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Shared {
    /// Nothing that is known of.
    Nothing,
    /// The zone.
    Zone,
    /// The host.
    Host,
}

impl Labels {
    /// What nodes with these labels share.
    #[must_use]
    pub fn shared(&self, other: &Self) -> Shared {
        let same = |one: &str, two: &str| !one.is_empty() && one == two;
        match () {
            () if same(&self.host, &other.host) => Shared::Host,
            () if same(&self.zone, &other.zone) => Shared::Zone,
            () => Shared::Nothing,
        }
    }
}

impl Directory {
    pub(super) fn label(&mut self, id: NodeId, labels: Labels) -> Result<FeedNumber, NodeRefusal> {
        for label in [&labels.host, &labels.zone] {
            if label.len() > LABEL_BYTES_MAX {
                return Err(NodeRefusal::Label { found: label.len() });
            }
        }
        let held = self.nodes.get(&id).ok_or(NodeRefusal::UnknownNode { node: id })?;
        if held.labels == labels {
            return Ok(held.changed);
        }
        let changed = self.touch(Topic::Node(id), Some(held.changed));
        let held = self.nodes.get_mut(&id).expect("it was there above");
        (held.labels, held.changed) = (labels, changed);
        Ok(changed)
    }
}
