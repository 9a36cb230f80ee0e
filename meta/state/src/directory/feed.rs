//! The feed: what shards must know of the directory, in the order of its numbers.
//!
//! Every change of the directory has a number of its own, and each thing in it remembers the number of its last change. A slice is the
//! present state of every thing that changed after a position, in that order. So the feed is never longer than what it is about, needs no
//! floor, and a shard of an older generation is simply told everything again: all numbers are given anew at a new generation.
//! A state that was passed over between two slices has been superseded by the one that is told; a lending cannot be passed over, because it
//! ends only when its shard gives it back.

use super::{Directory, labels::Labels, namespaces::Namespace, nodes::Standing};
use quarry_wire::{
    certificate::{Certificate, Revocations, Role},
    ids::{
        CertificateSerial, ExtentId, FeedNumber, Generation, Incarnation, LendNumber, NamespaceId, NodeId, RegionId,
        ShardId,
    },
    region::RegionRecord,
    signed::Signed,
};
use serde::{Deserialize, Serialize};
use std::ops::Bound;

/// Most entries of a slice: with the longest names it still fits in one Raft entry.
pub const FEED_SLICE_ENTRIES_MAX: usize = 256;

/// Changes between two positions of the feed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FeedSlice {
    /// The position that it follows.
    pub from: FeedNumber,
    /// The changes, by ascending number, all above `from` and not above `to`.
    pub entries: Vec<FeedEntry>,
    /// The position that it leads to.
    pub to: FeedNumber,
}

/// One change.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FeedEntry {
    /// Its number.
    pub number: FeedNumber,
    /// What is now so.
    pub change: FeedChange,
}

/// What is now so.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum FeedChange {
    /// The generation of the number began: all memory is void.
    NewGeneration,
    /// This namespace exists.
    Namespace(Namespace),
    /// This region is in this life. Whatever was in earlier lives is gone.
    Region(RegionState),
    /// This extent is lent.
    Lent {
        /// The extent.
        extent: ExtentId,
        /// To this shard.
        shard: ShardId,
        /// Under this number.
        lend: LendNumber,
        /// Bytes of the whole region: they fix where the extent lies.
        region_bytes: u64,
    },
    /// This extent is lent to nobody.
    Unlent {
        /// The extent.
        extent: ExtentId,
        /// Number of the lending that ended.
        lend: LendNumber,
    },
    /// This data node may be used so.
    Standing {
        /// The node.
        node: NodeId,
        /// What for.
        standing: Standing,
        /// What it shares its fate with.
        labels: Labels,
    },
    /// This node is gone for good, with all its memory.
    Retired(NodeId),
}

/// A region as the directory sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RegionState {
    /// The region.
    pub region: RegionId,
    /// Its life.
    pub incarnation: Incarnation,
    /// Its length in bytes; never changes.
    pub bytes: u64,
    /// Whether its node is taken to be alive in this life.
    pub up: bool,
}

/// What a change is about: the index of the feed points here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Topic {
    Generation,
    Certificate(CertificateSerial),
    Revocations,
    Node(NodeId),
    Retired(NodeId),
    Namespace(NamespaceId),
    Region(RegionId),
    Record(RegionId),
    Extent(ExtentId),
}

/// What changed after a position, for clients and data nodes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Changes {
    /// Generation of the cluster.
    pub generation: Generation,
    /// Certificates admitted.
    pub certificates: Vec<Signed<Certificate>>,
    /// The revocation list, if it changed.
    pub revocations: Option<Signed<Revocations>>,
    /// Region records.
    pub records: Vec<Signed<RegionRecord>>,
    /// Regions whose life changed.
    pub regions: Vec<RegionState>,
    /// Nodes that announced themselves.
    pub nodes: Vec<super::nodes::Node>,
    /// Nodes whose numbers are used up: nothing of them is left.
    pub retired: Vec<NodeId>,
    /// Namespaces made.
    pub namespaces: Vec<Namespace>,
    /// The position that this leads to.
    pub at: FeedNumber,
}

impl Directory {
    /// Position of the newest change.
    #[must_use]
    pub const fn feed_position(&self) -> FeedNumber {
        self.last
    }

    /// What a shard at position `from` must apply next: at most `max` entries, and never more than [`FEED_SLICE_ENTRIES_MAX`].
    #[must_use]
    pub fn feed_since(&self, from: FeedNumber, max: usize) -> FeedSlice {
        let max = max.clamp(1, FEED_SLICE_ENTRIES_MAX);
        let mut entries = Vec::new();
        for (number, topic) in self.index.range((Bound::Excluded(from), Bound::Unbounded)) {
            let Some(change) = self.change(*topic) else { continue };
            if entries.len() == max {
                let to = entries.last().map_or(from, |entry: &FeedEntry| entry.number);
                return FeedSlice { from, entries, to };
            }
            entries.push(FeedEntry { number: *number, change });
        }
        FeedSlice { from, entries, to: self.last.max(from) }
    }

    /// What shards are told about `topic`; none if it is not their business.
    fn change(&self, topic: Topic) -> Option<FeedChange> {
        match topic {
            Topic::Generation => Some(FeedChange::NewGeneration),
            Topic::Namespace(id) => self.namespaces.get(&id).map(|held| FeedChange::Namespace(held.namespace.clone())),
            Topic::Region(id) => self.regions.get(&id).map(|held| FeedChange::Region(held.state)),
            Topic::Extent(extent) => {
                let lending = self.extents.get(&extent)?;
                let region_bytes = self.regions.get(&extent.region)?.state.bytes;
                Some(match lending.shard {
                    Some(shard) => FeedChange::Lent { extent, shard, lend: lending.lend, region_bytes },
                    None => FeedChange::Unlent { extent, lend: lending.lend },
                })
            }
            Topic::Node(id) if self.is_certified(id, Role::DataNode) => {
                let held = self.nodes.get(&id)?;
                Some(FeedChange::Standing { node: id, standing: held.standing, labels: held.labels.clone() })
            }
            Topic::Retired(id) => Some(FeedChange::Retired(id)),
            Topic::Certificate(_) | Topic::Revocations | Topic::Node(_) | Topic::Record(_) => None,
        }
    }

    /// What changed after `from`: certificates, revocations, region records, regions, nodes and namespaces, each in its present state.
    #[must_use]
    pub fn changes_since(&self, from: FeedNumber) -> Changes {
        let mut changes = Changes {
            generation: self.generation(),
            certificates: Vec::new(),
            revocations: None,
            records: Vec::new(),
            regions: Vec::new(),
            nodes: Vec::new(),
            retired: Vec::new(),
            namespaces: Vec::new(),
            at: self.last.max(from),
        };
        for topic in self.index.range((Bound::Excluded(from), Bound::Unbounded)).map(|(_, topic)| *topic) {
            match topic {
                Topic::Generation | Topic::Extent(_) => {}
                Topic::Certificate(serial) => {
                    changes.certificates.extend(self.certificates.get(&serial).map(|held| held.signed.clone()));
                }
                Topic::Revocations => {
                    changes.revocations = self.revocations.as_ref().map(|held| held.signed.clone());
                }
                Topic::Node(id) => changes.nodes.extend(self.nodes.get(&id).cloned()),
                Topic::Retired(id) => changes.retired.push(id),
                Topic::Namespace(id) => {
                    changes.namespaces.extend(self.namespaces.get(&id).map(|held| held.namespace.clone()));
                }
                Topic::Region(id) => changes.regions.extend(self.regions.get(&id).map(|held| held.state)),
                Topic::Record(id) => {
                    let record = self.regions.get(&id).and_then(|held| held.record.as_ref());
                    changes.records.extend(record.map(|record| record.signed.clone()));
                }
            }
        }
        changes
    }

    /// Gives `topic` the next number, in place of `old`.
    pub(super) fn touch(&mut self, topic: Topic, old: Option<FeedNumber>) -> FeedNumber {
        if let Some(old) = old {
            self.index.remove(&old);
        }
        self.last = FeedNumber::new(self.generation(), self.last.0.number + 1);
        self.index.insert(self.last, topic);
        self.last
    }

    /// The index that the state implies.
    pub(super) fn index_of_state(&self) -> std::collections::BTreeMap<FeedNumber, Topic> {
        let mut index = std::collections::BTreeMap::new();
        if let Some(cluster) = &self.cluster {
            index.insert(cluster.changed, Topic::Generation);
        }
        index.extend(self.certificates.iter().map(|(serial, held)| (held.changed, Topic::Certificate(*serial))));
        index.extend(self.revocations.iter().map(|held| (held.changed, Topic::Revocations)));
        index.extend(self.nodes.iter().map(|(id, held)| (held.changed, Topic::Node(*id))));
        index.extend(self.retired_at().map(|(id, changed)| (changed, Topic::Retired(id))));
        index.extend(self.namespaces.iter().map(|(id, held)| (held.changed, Topic::Namespace(*id))));
        index.extend(self.regions.iter().map(|(id, held)| (held.changed, Topic::Region(*id))));
        for (id, held) in &self.regions {
            index.extend(held.record.iter().map(|record| (record.changed, Topic::Record(*id))));
        }
        index.extend(self.extents.iter().map(|(id, held)| (held.changed, Topic::Extent(*id))));
        index
    }
}
