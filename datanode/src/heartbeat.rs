//! Heartbeats to every meta node. Each reply says which of our regions' lives are over, and what changed in the directory.

use crate::{metas::with_timeout, node::Node};
use quarry_proto::{
    refusal::Refusal,
    v1::{self, node_refused::Reason},
};
use quarry_wire::ids::{FeedNumber, Generation, Incarnation, RegionId};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, timeout_at},
};
use tonic::Status;

/// Longest wait for a reply, if that is more than the time between heartbeats.
const REPLY_MAX: Duration = Duration::from_secs(1);

/// Sends heartbeats to every meta node that the cluster has, for ever.
pub(crate) async fn beat_all(node: Arc<Node>) {
    let mut watch = node.metas.watch();
    let mut beating: BTreeMap<String, JoinSet<()>> = BTreeMap::new();
    loop {
        watch.mark_unchanged();
        let listeners = node.metas.listeners();
        beating.retain(|address, _| listeners.contains(address));
        for address in listeners {
            beating.entry(address.clone()).or_insert_with(|| {
                let mut one = JoinSet::new();
                one.spawn(beat(Arc::clone(&node), address));
                one
            });
        }
        if watch.changed().await.is_err() {
            return;
        }
    }
}

/// Sends heartbeats to the meta node at `address`, for ever.
async fn beat(node: Arc<Node>, address: String) {
    let mut ticks = interval(node.heartbeat);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut reached = true;
    loop {
        ticks.tick().await;
        match once(&node, &address).await {
            Ok(()) if !reached => {
                tracing::info!(meta = address, "the meta node answers heartbeats again");
                reached = true;
            }
            Err(error) if reached => {
                tracing::warn!(meta = address, %error, "the meta node does not answer heartbeats");
                reached = false;
            }
            Ok(()) | Err(_) => {}
        }
    }
}

async fn once(node: &Node, address: &str) -> Result<(), Status> {
    let lives = node.holdings.lock().lives();
    let seen = node.membership.seen();
    let request = v1::HeartbeatRequest {
        node: node.id.0,
        regions: lives
            .into_iter()
            .map(|(region, life)| v1::RegionLife { region: Some(region.into()), incarnation: Some(life.into()) })
            .collect(),
        seen: seen.map(Into::into),
    };
    let deadline = Instant::now() + node.heartbeat.max(REPLY_MAX);
    let call = async { node.metas.registry(address)?.heartbeat(with_timeout(request, deadline)).await };
    let reply = timeout_at(deadline, call).await;
    let reply = reply.unwrap_or_else(|_| Err(Status::deadline_exceeded("no reply in time")));
    if let Err(wrong) = &reply {
        let said = match Refusal::from_status(wrong) {
            Some(Refusal::NodeRefused(it)) if it.reason() == Reason::Retired => Some(Some(it.why)),
            _ => None,
        };
        note(node, address, said);
    }
    let reply = reply?.into_inner();
    if !node.see_generation(Generation(reply.generation)) {
        // A node that slept through a restore. Whatever it says is about memory that is no more.
        note(node, address, None);
        return Err(Status::failed_precondition(format!("it is in generation {}, which is over", reply.generation)));
    }
    note(node, address, Some(None));
    node.metas.heard(&reply.groups);
    let feed = reply.changes.as_ref().and_then(|changes| changes.at).map(FeedNumber::from);
    let over: Vec<(RegionId, Incarnation)> =
        reply.void.into_iter().filter_map(|life| Some((life.region?.into(), life.incarnation?.into()))).collect();
    node.void_all(&over, feed);
    node.metas.learn(Generation(reply.generation), &reply.metas, reply.changes.as_ref());
    if let Some(changes) = reply.changes {
        node.membership.apply(changes);
    }
    Ok(())
}

/// A node whose number is used up serves nobody, whatever it holds; it may have missed its own death. `said`: none if the meta node says nothing.
fn note(node: &Node, address: &str, said: Option<Option<String>>) {
    let listeners = node.metas.listeners();
    node.standing.send_if_modified(|standing| {
        let before = standing.forgotten().map(str::to_owned);
        standing.told.retain(|address, _| listeners.contains(address));
        match said {
            Some(used_up) => standing.told.insert(address.to_owned(), used_up),
            None => standing.told.remove(address),
        };
        standing.asked = listeners.len();
        before.as_deref() != standing.forgotten()
    });
}
