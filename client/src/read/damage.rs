//! Reports of damage: a copy that is not what its holder signed is told to the holder, which looks itself and gives it up.
//!
//! In the background, one at a time per node: a reader has the value from another copy and waits for nobody. What is not reported for that
//! reason is met again.

use crate::{control::Node, core::Core, read::cache::Found};
use parking_lot::Mutex;
use quarry_proto::v1;
use quarry_wire::{
    ids::{Incarnation, NamespaceId, NodeId, RegionId},
    key::Key,
};
use std::{collections::BTreeSet, sync::Arc};
use tokio::time::Instant;

/// The nodes that are being told.
#[derive(Debug, Default)]
pub(crate) struct Reports(Mutex<BTreeSet<NodeId>>);

/// Tells the holder of a copy that it is damaged. What is known of the key is forgotten: the next reader asks where it is.
pub(super) fn report(
    core: &Core,
    namespace: NamespaceId,
    key: &Key,
    found: &Arc<Found>,
    (region, incarnation): (RegionId, Incarnation),
    offset: u64,
) {
    core.cache.lock().forget(namespace, key, found);
    let node = region.node;
    // The last clone of a client may be gone already; then nobody tells.
    let Some(core) = core.me.upgrade().filter(|core| !core.closing.is_cancelled()) else { return };
    if !core.reports.0.lock().insert(node) {
        return;
    }
    let request = v1::ReportDamageRequest {
        shard: key.shard(namespace, core.control.view().read().shards()).0,
        namespace: namespace.0,
        key: key.as_bytes().to_vec().into(),
        version: Some(found.version.into()),
        region: region.index.0,
        incarnation: Some(incarnation.into()),
        offset,
    };
    let told = Arc::clone(&core);
    core.tasks.spawn(async move {
        let until = Instant::now() + told.options.attempt_timeout;
        let send = |mut node: Node, request| async move { node.report_damage(request).await };
        match told.control.try_node(node, "ReportDamage", request, until, send).await {
            Ok(reply) if reply.dropped => told.counters.dropped.add(1),
            Ok(_) => tracing::debug!(%node, "the holder finds the copy intact"),
            Err(error) => tracing::debug!(%node, ?error, "the holder was not told of a damaged copy"),
        }
        told.reports.0.lock().remove(&node);
    });
}
