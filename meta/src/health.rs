//! Health, as load balancers and supervisors ask for it: the node as a whole, and each of its groups.
//!
//! A group is served while its leader is known and *still leads*: by what a majority answers if it is this node, by its own word if it is
//! another. To remember a leader is not enough: a node that was cut off remembers one for ever.

use crate::{core::Core, door, hosted::Hosted, machine::Replicated, members::REMOVED};
use futures::future::join_all;
use quarry_proto::{
    protocol::Announce,
    v1::{self, control_client::ControlClient},
};
use quarry_trust::Expect;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout};
use tonic::{
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};
use tonic_health::{ServingStatus, server::HealthReporter};

/// Between two looks.
const PERIOD: Duration = Duration::from_secs(1);
/// A leader that takes longer to answer is not there.
const PATIENCE: Duration = Duration::from_secs(1);

type Link = ControlClient<InterceptedService<Channel, Announce>>;

/// Looks and tells until it is dropped.
pub(crate) async fn report(core: Arc<Core>, health: HealthReporter) {
    let mut links = BTreeMap::new();
    loop {
        let groups = look(&core, &mut links).await;
        for (group, serves) in (0..).zip(&groups) {
            health.set_service_status(group_name(group), status(*serves)).await;
        }
        let well = groups.iter().all(|serves| *serves) && !core.removed.load(Ordering::SeqCst);
        health.set_service_status("", status(well)).await;
        let missing = (0..).zip(&groups).find(|(_, serves)| !**serves);
        let removed = core.removed.load(Ordering::SeqCst).then(|| Err(REMOVED.to_owned()));
        *core.served.lock() =
            removed.unwrap_or_else(|| missing.map_or(Ok(()), |(group, _): (u32, _)| Err(not_served(&core, group))));
        sleep(PERIOD).await;
    }
}

/// Says of everything that it is not served any more.
pub(crate) async fn close(core: &Core, health: &HealthReporter) {
    *core.served.lock() = Err("the node drains".to_owned());
    health.set_service_status("", ServingStatus::NotServing).await;
    for group in 0..=core.config.shards {
        health.set_service_status(group_name(group), ServingStatus::NotServing).await;
    }
}

/// The name under which the health of a group is told.
fn group_name(group: u32) -> String {
    format!("quarry.group.{group}")
}

const fn status(serves: bool) -> ServingStatus {
    if serves { ServingStatus::Serving } else { ServingStatus::NotServing }
}

fn not_served(core: &Core, group: u32) -> String {
    if core.directory.group.is_initialized() {
        format!("nobody is known to lead group {group} now")
    } else {
        "this node belongs to no cluster yet: bootstrap it, or add it to one".to_owned()
    }
}

/// Who this node takes for the leader of a group.
enum Leader {
    Nobody,
    /// This node; whether a majority confirms it.
    This(bool),
    Other(u64, String),
}

/// Which groups are served, in the order of their numbers.
async fn look(core: &Core, links: &mut BTreeMap<String, Link>) -> Vec<bool> {
    let shards = join_all(core.shards.iter().map(|shard| leader(&shard.hosted)));
    let (first, mut rest) = tokio::join!(leader(&core.directory), shards);
    rest.insert(0, first);
    let addresses: BTreeSet<&String> = rest
        .iter()
        .filter_map(|leader| match leader {
            Leader::Other(_, address) => Some(address),
            Leader::Nobody | Leader::This(_) => None,
        })
        .collect();
    links.retain(|address, _| addresses.contains(address));
    for address in &addresses {
        if !links.contains_key(*address)
            && let Ok(endpoint) = Endpoint::from_shared(format!("http://{address}"))
        {
            let connector = core.config.trust.connector(Expect::META);
            let channel = endpoint.connect_timeout(PATIENCE).connect_with_connector_lazy(connector);
            links.insert((*address).clone(), ControlClient::with_interceptor(channel, Announce));
        }
    }
    // Nothing newer than what this node has seen is asked for: the answer is small.
    let seen = core.directory.read(|directory| directory.feed_position());
    let asking = links.iter().map(|(address, link)| {
        let (address, mut link) = (address.clone(), link.clone());
        let request = v1::DescribeRequest { seen: Some(seen.into()) };
        async move {
            let reply = timeout(PATIENCE, link.describe(request)).await.ok()?.ok()?;
            Some((address, reply.into_inner().groups))
        }
    });
    let said: BTreeMap<String, Vec<v1::GroupInfo>> = join_all(asking).await.into_iter().flatten().collect();
    let serves = |(group, leader): (u32, &Leader)| match leader {
        Leader::Nobody => false,
        Leader::This(confirmed) => *confirmed,
        Leader::Other(node, address) => {
            let own_word = said.get(address).and_then(|groups| groups.iter().find(|it| it.group == group));
            own_word.is_some_and(|it| it.leader == *node)
        }
    };
    (0..).zip(&rest).map(serves).collect()
}

async fn leader<S: Replicated>(hosted: &Hosted<S>) -> Leader {
    let status = hosted.group.status();
    match status.leader {
        _ if status.fault.is_some() => Leader::Nobody,
        None => Leader::Nobody,
        // What answers its heartbeats says so.
        Some((node, _)) if node == status.node && hosted.group.is_followed(PERIOD) => Leader::This(true),
        Some((node, _)) if node == status.node => {
            let confirmed = hosted.group.read_index(Instant::now() + PATIENCE).await;
            if let Err(error) = &confirmed {
                tracing::debug!(refusal = %door::read_refused(hosted.id(), error.clone()), "not served");
            }
            Leader::This(confirmed.is_ok())
        }
        Some((node, address)) => Leader::Other(node.0, address),
    }
}
