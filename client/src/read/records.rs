//! Region records after a refused read: is there a newer one?
//!
//! A read is refused when its key is dead, because its region has a new one (*Epochs only grow*), and fails for many other reasons, which the
//! fabric does not tell apart. The region's own data node knows: it shows the record of its newest epoch as soon as the directory has that,
//! and says if there is none yet. So a reader waits for a key that is being changed, until its deadline, and does not wait for a node that is
//! gone. All who were refused by one region share one question.

use crate::{control::Node, core::Core, retry};
use futures::{StreamExt as _, stream::FuturesUnordered};
use parking_lot::Mutex;
use quarry_proto::v1;
use quarry_wire::ids::{Incarnation, RegionEpoch, RegionId};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout_at};

/// A node answers for its own records at once, or is asked no more.
const ANSWER_MAX: Duration = Duration::from_millis(750);
/// Longest pause while a key is being changed: that is over within milliseconds while the directory has a leader.
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// So long after a key was changed a failed read is no failure: reads with the old key, which others had begun, tear down the connection that
/// those with the new one use.
const SETTLING: Duration = Duration::from_secs(1);
/// Pause before such a read is tried again.
const SETTLING_PAUSE: Duration = Duration::from_millis(5);

/// The questions under way, by region: each has its turn.
#[derive(Debug, Default)]
pub(crate) struct Renewals(Mutex<HashMap<RegionId, Arc<tokio::sync::Mutex<LastChange>>>>);

/// The newest epoch of a region's newest life that was noticed after a failed read, and when, if that life had another one before.
#[derive(Debug, Default)]
struct LastChange(Option<(Incarnation, RegionEpoch, Instant)>);

impl LastChange {
    fn note(&mut self, incarnation: Incarnation, epoch: RegionEpoch) {
        let before = self.0.filter(|(life, ..)| *life == incarnation).map_or(RegionEpoch(1), |(_, epoch, _)| epoch);
        if epoch > before {
            self.0 = Some((incarnation, epoch, Instant::now()));
        }
    }
    fn settles(&self) -> bool {
        self.0.is_some_and(|(_, _, at)| at.elapsed() < SETTLING)
    }
}

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

/// Whether another try makes sense: there is a newer record than of `epoch` in this life of the region, or will be by the deadline, or there was
/// one a moment ago.
async fn is_newer(
    core: &Core,
    region: RegionId,
    incarnation: Incarnation,
    epoch: RegionEpoch,
    deadline: Instant,
) -> bool {
    let turn = Arc::clone(core.renewals.0.lock().entry(region).or_default());
    let Ok(mut last) = timeout_at(deadline, turn.lock()).await else { return false };
    let newest = || core.control.view().read().record(region, incarnation).map(|record| record.epoch);
    let mut attempt = 0;
    let mut shown = None;
    loop {
        let Some(known) = newest() else { return false };
        last.note(incarnation, known);
        if known > epoch {
            core.endpoints.forgive(region.node);
            return true;
        }
        match shown {
            Some(Shown::Record) if last.settles() => break,
            Some(Shown::Record | Shown::Gone | Shown::Nothing) => return false,
            Some(Shown::Changing) => {
                let pause = retry::pause(attempt).min(PAUSE_MAX);
                if Instant::now() + pause >= deadline {
                    return false;
                }
                core.control.pause(pause).await;
                attempt += 1;
            }
            None => {}
        }
        shown = Some(ask(core, region, incarnation, deadline).await);
    }
    drop(last);
    sleep(SETTLING_PAUSE).await;
    core.endpoints.forgive(region.node);
    true
}

/// What a region's data node says of it.
#[derive(Clone, Copy)]
enum Shown {
    /// Its newest record, which is known now.
    Record,
    /// The region has no key now and gets one.
    Changing,
    /// That life is over.
    Gone,
    /// The node does not answer; what a meta node knows is known now.
    Nothing,
}

/// Asks the region's data node; if it does not answer, a meta node.
async fn ask(core: &Core, region: RegionId, incarnation: Incarnation, deadline: Instant) -> Shown {
    let request = v1::RegionRecordRequest { region: region.index.0 };
    let until = deadline.min(Instant::now() + ANSWER_MAX);
    let send = |mut node: Node, request| async move { node.region_record(request).await };
    let Ok(reply) = core.control.try_node(region.node, "RegionRecord", request, until, send).await else {
        if let Err(error) = core.control.describe(until).await {
            tracing::debug!(%region, %error, "nobody tells how the region can be read");
        }
        return Shown::Nothing;
    };
    if reply.incarnation.map(Incarnation::from) != Some(incarnation) {
        return Shown::Gone;
    }
    if reply.record.is_empty() {
        return Shown::Changing;
    }
    if let Err(error) = core.control.believing(deadline, |view| view.shown(&reply.record)).await {
        tracing::warn!(%region, %error, "a data node's record of its own region is not believed");
        return Shown::Nothing;
    }
    Shown::Record
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn for_a_moment_after_a_change_a_failed_read_is_no_failure() {
        let life = |number| Incarnation::new(quarry_wire::ids::Generation(1), number);
        let mut last = LastChange::default();
        last.note(life(1), RegionEpoch(1));
        assert!(!last.settles(), "nothing was changed");
        last.note(life(1), RegionEpoch(5));
        assert!(last.settles());
        tokio::time::advance(SETTLING).await;
        last.note(life(1), RegionEpoch(5));
        assert!(!last.settles(), "that was a while ago");
        last.note(life(2), RegionEpoch(1));
        assert!(!last.settles(), "the first key of a life takes no other's place");
        last.note(life(2), RegionEpoch(2));
        assert!(last.settles());
    }
}
