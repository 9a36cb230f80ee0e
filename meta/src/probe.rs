//! What a process that runs a meta node asks it: is it ready, has it failed, what does it say of itself.

use crate::{core::Core, metrics, service::status};
use parking_lot::Mutex;
use quarry_meta_state::map::{Maps, RegionMap};
use quarry_proto::v1;
use quarry_raft::Role;
use quarry_wire::ids::{NodeId, RegionId};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::time::Instant;

/// Space is counted no more often than this.
const SPACE_EVERY: Duration = Duration::from_secs(1);

/// A handle for asking a [`MetaNode`](crate::MetaNode) while it runs. Cloning is cheap. Drop it before the node's folder is to be opened
/// again in the same process.
#[derive(Clone)]
pub struct MetaProbe {
    core: Arc<Core>,
    counted: Arc<Mutex<Option<Instant>>>,
}

impl std::fmt::Debug for MetaProbe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MetaProbe").field("node", &self.core.config.node).finish_non_exhaustive()
    }
}

impl MetaProbe {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self { core, counted: Arc::default() }
    }

    /// Whether every group is formed, recovered, and led by somebody who still leads.
    ///
    /// # Errors
    /// What is missing, as a sentence.
    pub fn ready(&self) -> Result<(), String> {
        if let Some(why) = self.failed() {
            return Err(why);
        }
        self.core.served.lock().clone()
    }

    /// Why this node can never serve again, if so.
    #[must_use]
    pub fn failed(&self) -> Option<String> {
        let shards = self.core.shards.iter().map(|shard| shard.hosted.group.status().fault);
        let groups = std::iter::once(self.core.directory.group.status().fault).chain(shards);
        self.core.host.fault().or_else(|| groups.flatten().next())
    }

    /// Whether this node is part of a cluster, as far as it has recovered.
    #[must_use]
    pub fn belongs(&self) -> bool {
        self.core.directory.read(|directory| directory.cluster().is_some())
    }

    /// The meta nodes and where they listen, as this node knows the members of the directory's group; none before the cluster is made.
    #[must_use]
    pub fn metas(&self) -> BTreeMap<NodeId, String> {
        let members = self.core.directory.group.status().members;
        members.into_iter().map(|(node, member)| (NodeId(node.0), member.addr)).collect()
    }

    /// What the node answers to a call of `Status`. Walks over all slots: not for a thread that others wait for.
    #[must_use]
    pub fn status(&self) -> v1::StatusReply {
        status(&self.core)
    }

    /// What the memory of data nodes is used for, in at most `cells` cells each, as far as this node has applied. Walks over
    /// all slots.
    #[must_use]
    pub fn maps(&self, cells: u32) -> BTreeMap<RegionId, RegionMap> {
        let mut maps = self.core.directory.read(|directory| Maps::new(directory, cells));
        for shard in self.core.shards.iter() {
            maps.add(&shard.hosted.frozen());
        }
        maps.finish()
    }

    /// Sets the gauges that tell where the node stands. To be called before its metrics are shown. Walks over all slots, once a second at most.
    pub fn record_metrics(&self) {
        let patience = self.core.config.timing.election_max;
        self.core.directory.group.record_metrics(patience);
        for shard in self.core.shards.iter() {
            shard.hosted.group.record_metrics(patience);
        }
        metrics::groups_led(self.core.offices().filter(|office| office.status().role == Role::Leader).count());
        let mut counted = self.counted.lock();
        if counted.is_some_and(|at| at.elapsed() < SPACE_EVERY) {
            return;
        }
        for shard in self.core.shards.iter() {
            metrics::stand(shard);
        }
        let (alive, all) = self.core.directory.read(|directory| {
            let up = |node: NodeId| directory.regions_of(node).any(|region| region.state.up);
            let nodes = || directory.nodes().filter(|node| directory.regions_of(node.id).next().is_some());
            (nodes().filter(|node| up(node.id)).count(), nodes().count())
        });
        metrics::data_nodes(alive, all - alive);
        *counted = Some(Instant::now());
    }
}
