//! Data nodes: who was heard when, who is silent, who is dead.
//!
//! Every meta node hears every heartbeat and keeps it in memory. The directory's leader judges: dead is who was silent for longer than
//! `node_silence` while this leader was in office for that long and a grace beside it, so that a new leader gives everyone a full deadline
//! first. Silence alone, shorter than that, only keeps a node out of new grants.

use crate::hosted::{Hosted, OWN_PROPOSAL};
use parking_lot::Mutex;
use quarry_meta_state::{
    Directory,
    directory::{DirectoryCommand, DirectoryOutcome},
};
use quarry_raft::Term;
use quarry_wire::ids::NodeId;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};
use tokio::time::{Instant, sleep};

/// What this node heard, since it started.
pub(crate) struct Membership {
    heard: Mutex<BTreeMap<NodeId, Instant>>,
    started: Instant,
    silence: Duration,
}

impl Membership {
    pub(crate) fn new(silence: Duration, now: Instant) -> Self {
        Self { heard: Mutex::new(BTreeMap::new()), started: now, silence }
    }

    /// A heartbeat of a node that the directory knows.
    pub(crate) fn hear(&self, node: NodeId, now: Instant) {
        self.heard.lock().insert(node, now);
    }

    /// How long `node` has been silent, to this process.
    pub(crate) fn silent_for(&self, node: NodeId, now: Instant) -> Duration {
        now.saturating_duration_since(self.heard.lock().get(&node).copied().unwrap_or(self.started))
    }

    /// Of `nodes`, those that new grants should avoid.
    pub(crate) fn avoided(&self, nodes: impl Iterator<Item = NodeId>, now: Instant) -> BTreeSet<NodeId> {
        let mut heard = self.heard.lock();
        // A node that was never heard may have come a moment ago, however long this process listens already.
        let mut silent = |node: &NodeId| now.saturating_duration_since(*heard.entry(*node).or_insert(now));
        nodes.filter(|node| silent(node) > self.silence / 2).collect()
    }

    /// Whether a leader in office since `since` may call `node` dead at `now`.
    fn is_dead(&self, node: NodeId, since: Instant, now: Instant) -> bool {
        // The grace is another full silence: heartbeats go on while a leader is elected, but a node may have to find it first.
        now.saturating_duration_since(since) > 2 * self.silence && self.silent_for(node, now) > self.silence
    }

    /// Judges while this node leads the directory. Runs until it is dropped.
    pub(crate) async fn judge(self: Arc<Self>, directory: Arc<Hosted<Directory>>) {
        let mut office: Option<(Term, Instant)> = None;
        loop {
            sleep(self.silence / 8).await;
            let now = Instant::now();
            office = match (directory.leads(), office) {
                (Ok(term), Some(office)) if office.0 == term => Some(office),
                (Ok(term), _) => Some((term, now)),
                (Err(_), _) => None,
            };
            let Some((_, since)) = office else { continue };
            let dead: Vec<DirectoryCommand> = directory.read(|directory| {
                let up: BTreeSet<NodeId> =
                    directory.regions().filter(|it| it.state.up).map(|it| it.state.region.node).collect();
                let dead = up.into_iter().filter(|node| self.is_dead(*node, since, now));
                dead.filter_map(|node| directory.plan_death(node)).collect()
            });
            for command in dead {
                match directory.propose(command, Instant::now() + OWN_PROPOSAL).await.map(|done| done.outcome) {
                    Ok(DirectoryOutcome::Dead(Ok(regions))) => tracing::warn!(?regions, "declared dead"),
                    Ok(other) => tracing::warn!(outcome = ?other, "a death was not taken"),
                    Err(refusal) => tracing::debug!(%refusal, "a death was not taken"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SILENCE: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn a_new_leader_gives_everyone_a_full_deadline_and_grace() {
        let start = Instant::now();
        let membership = Membership::new(SILENCE, start);
        let (heard, silent) = (NodeId(1), NodeId(2));
        let elected = start + 100 * SILENCE;
        let later = elected + 2 * SILENCE;
        membership.hear(heard, later);
        assert!(!membership.is_dead(silent, elected, later), "in office for too short a time");
        let judged = later + Duration::from_millis(1);
        assert!(membership.is_dead(silent, elected, judged));
        assert!(!membership.is_dead(heard, elected, judged));
    }

    #[tokio::test(start_paused = true)]
    async fn a_fresh_process_avoids_nobody_until_it_listened_for_a_while() {
        let start = Instant::now();
        let membership = Membership::new(SILENCE, start);
        let nodes = [NodeId(1), NodeId(2)];
        assert!(membership.avoided(nodes.into_iter(), start).is_empty());
        let later = start + SILENCE;
        membership.hear(NodeId(1), later);
        assert_eq!(membership.avoided(nodes.into_iter(), later), BTreeSet::from([NodeId(2)]));
        assert!(membership.avoided([NodeId(3)].into_iter(), later).is_empty(), "it has just come");
    }
}
