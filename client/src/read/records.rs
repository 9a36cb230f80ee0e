//! Region records after a refused read: is there a newer one?
//!
//! A read is refused when its key is dead, because its region has a new one (*Epochs only grow*), and fails for many other reasons, which the
//! fabric does not tell apart. The region's own data node knows: it shows the record of its newest epoch as soon as the directory has that,
//! and says if there is none yet. So a reader waits for a key that is being changed, until its deadline, and does not wait for a node that is
//! gone. All who were refused by one region share one question.

use crate::{control::Node, core::Core, retry};
use bytes::Bytes;
use futures::{StreamExt as _, stream::FuturesUnordered};
use parking_lot::Mutex;
use quarry_proto::v1;
use quarry_wire::ids::{Incarnation, RegionEpoch, RegionId};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};
use tokio::time::{Instant, timeout_at};

/// A node answers for its own records at once, or is asked no more.
const ANSWER_MAX: Duration = Duration::from_millis(750);
/// Longest pause while a key is being changed: that is over within milliseconds while the directory has a leader.
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// The questions under way, by region.
#[derive(Debug, Default)]
pub(crate) struct Renewals(Mutex<HashMap<RegionId, Arc<tokio::sync::Mutex<()>>>>);

/// Regions that refused a read, and the epoch of the record that was used.
pub(crate) type Refused = BTreeMap<(RegionId, Incarnation), RegionEpoch>;

/// Looks for newer records of all these regions at once, and answers as soon as there is one.
pub(super) async fn any_is_newer(core: &Core, refused: &Refused, deadline: Instant) -> bool {
    let looks =
        refused.iter().map(|((region, incarnation), epoch)| is_newer(core, *region, *incarnation, *epoch, deadline));
    let mut looks: FuturesUnordered<_> = looks.collect();
    while let Some(newer) = looks.next().await {
        if newer {
            return true;
        }
    }
    false
}

/// Whether there is a newer record than of `epoch` in this life of the region, or will be by the deadline.
async fn is_newer(
    core: &Core,
    region: RegionId,
    incarnation: Incarnation,
    epoch: RegionEpoch,
    deadline: Instant,
) -> bool {
    let turn = Arc::clone(core.renewals.0.lock().entry(region).or_default());
    let Ok(_turn) = timeout_at(deadline, turn.lock()).await else { return false };
    let known = || {
        let view = core.control.view().read();
        view.record(region, incarnation).is_some_and(|record| record.epoch > epoch)
    };
    let mut attempt = 0;
    loop {
        if known() {
            core.endpoints.forgive(region.node);
            return true;
        }
        match shown(core, region, incarnation, deadline).await {
            Shown::Record => {
                let newer = known();
                if newer {
                    core.endpoints.forgive(region.node);
                }
                return newer;
            }
            Shown::Changing => {}
            Shown::Gone => return false,
        }
        let pause = retry::pause(attempt).min(PAUSE_MAX);
        if Instant::now() + pause >= deadline {
            return false;
        }
        core.control.pause(pause).await;
        attempt += 1;
    }
}

enum Shown {
    /// All that there is to know is known.
    Record,
    /// The region has no key now and gets one.
    Changing,
    /// That life is over.
    Gone,
}

/// Asks the region's data node; if it does not answer, a meta node.
async fn shown(core: &Core, region: RegionId, incarnation: Incarnation, deadline: Instant) -> Shown {
    let request = v1::RegionRecordRequest { region: region.index.0 };
    let until = deadline.min(Instant::now() + ANSWER_MAX);
    let send = |mut node: Node, request| async move { node.region_record(request).await };
    let Ok(reply) = core.control.try_node(region.node, "RegionRecord", request, until, send).await else {
        if let Err(error) = core.control.describe(until).await {
            tracing::debug!(%region, %error, "nobody tells how the region can be read");
        }
        return Shown::Record;
    };
    if reply.incarnation.map(Incarnation::from) != Some(incarnation) {
        return Shown::Gone;
    }
    if reply.record.is_empty() {
        return Shown::Changing;
    }
    let record: Bytes = reply.record;
    if let Err(error) = core.control.believing(deadline, |view| view.shown(&record)).await {
        tracing::warn!(%region, %error, "a data node's record of its own region is not believed");
    }
    Shown::Record
}
