//! The life of a region, over and over: registered with the directory, opened, recorded, until the directory says that it is over; and the
//! epochs within it, each with a read key of its own.
//!
//! Order matters. A region that ends has its lanes and its reader closed before the next life is asked for, so that no key of the old one can
//! reach memory that the directory lends anew. An epoch has its reader closed before the record of the next one is signed, so once that is
//! acknowledged the old key is dead. The record is sent when the reader is open, so that a record that can be found can also be read through
//! (*Epochs only grow*). Between two epochs nobody can read the region: that lasts until the directory has the record, however long it is
//! away, and writes go on meanwhile. A crash in between is a restart, so a new life.

use crate::{
    entropy,
    metas::{LeaderCallError, with_timeout},
    node::{Node, RegionSeat},
    rotations::{self, Rotated},
};
use bytes::Bytes;
use quarry_proto::{convert, refusal::Refusal, v1};
use quarry_wire::{
    ids::{FeedNumber, Generation, Incarnation},
    region::RegionRecord,
    signed::Signed,
};
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, sleep, sleep_until};

/// The directory's Raft group.
const DIRECTORY: u32 = 0;
/// One round of asking for its leader.
const ROUND: Duration = Duration::from_secs(10);
/// Pause between rounds that failed.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_LONGEST: Duration = Duration::from_secs(2);

/// Keeps region number `seat` registered, for ever.
pub(crate) async fn keep(node: Arc<Node>, seat: usize) {
    let region = &node.regions[seat];
    let mut trouble = Trouble::new();
    // Those who want a key that is newer than their question. A new life has one, too.
    let mut waiting = Vec::new();
    loop {
        waiting.append(&mut region.rotations.take());
        let boot = entropy::bytes::<16>();
        let mut record = loop {
            match open(&node, region, boot).await {
                Ok(record) => break record,
                Err(error) => trouble.pause(&node, region, error).await,
            }
        };
        let incarnation = record.statement.incarnation;
        loop {
            let announced = loop {
                match announce(&node, region, &record).await {
                    Ok(announced) => break announced,
                    Err(error) => trouble.pause(&node, region, error).await,
                }
            };
            if let Announced::Over = announced {
                break;
            }
            trouble = Trouble::new();
            let epoch = record.statement.epoch;
            tracing::info!(region = %region.id, %incarnation, %epoch, "region registered");
            node.standing.send_modify(|standing| {
                standing.recorded.insert(region.id.index);
                standing.last = "registered".to_owned();
            });
            for asker in waiting.drain(..) {
                // Whoever gave up does not want to know.
                let _ = asker.send(Rotated { incarnation, epoch });
            }
            let Some(cause) = epoch_ends(&node, region, incarnation).await else { break };
            waiting.append(&mut region.rotations.take());
            let Some(next) = rotate(&node, region, incarnation, &mut trouble).await else { break };
            node.meters.rotated(cause);
            record = next;
        }
        node.standing.send_modify(|standing| {
            standing.recorded.remove(&region.id.index);
        });
    }
}

/// Why an epoch ends while its region lives on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cause {
    /// Somebody asked.
    Command,
    /// It was time.
    Schedule,
}

/// Waits until the region needs a new key, none if its life is over.
async fn epoch_ends(node: &Node, region: &RegionSeat, incarnation: Incarnation) -> Option<Cause> {
    let lifetime = node.rotate_every.map(|every| rotations::lifetime(every, entropy::key()));
    let due = lifetime.map(|lifetime| Instant::now() + lifetime);
    loop {
        if !node.holdings.lock().lives().contains(&(region.id, incarnation)) {
            return None;
        }
        if region.rotations.is_asked() {
            return Some(Cause::Command);
        }
        tokio::select! {
            () = region.bell.notified() => {}
            () = async { sleep_until(due.expect("only with a schedule")).await }, if due.is_some() => {
                return Some(Cause::Schedule);
            }
        }
    }
}

/// Ends the epoch and begins the next one, none if the life is over.
async fn rotate(
    node: &Node,
    region: &RegionSeat,
    incarnation: Incarnation,
    trouble: &mut Trouble,
) -> Option<Signed<RegionRecord>> {
    loop {
        let rotated = node.holdings.lock().rotate(region.id.index, incarnation);
        match rotated {
            Ok(record) => return record.map(|record| node.membership.sign(record)),
            // The old key is dead all the same.
            Err(error) => trouble.pause(node, region, error.to_string()).await,
        }
    }
}

enum Announced {
    Recorded,
    /// That life ended before it could be recorded.
    Over,
}

/// Asks the directory for a life, and opens the region for it.
async fn open(node: &Arc<Node>, region: &RegionSeat, boot: [u8; 16]) -> Result<Signed<RegionRecord>, String> {
    let request = v1::RegisterRegionRequest {
        certificate: node.membership.certificate().encode().into(),
        region: Some(region.id.into()),
        length: region.length,
        boot: Bytes::copy_from_slice(&boot),
        address: node.address.clone(),
        host: node.labels.host.clone(),
        zone: node.labels.zone.clone(),
    };
    let caller = Arc::clone(node);
    let call = node.metas.at_leader(DIRECTORY, Instant::now() + ROUND, move |address, deadline| {
        let (node, request) = (Arc::clone(&caller), with_timeout(request.clone(), deadline));
        Box::pin(async move { Ok(node.metas.registry(&address)?.register_region(request).await?.into_inner()) })
    });
    let reply = call.await.map_err(|error| error.to_string())?;
    let cluster = node.membership.cluster();
    if reply.cluster != cluster.0.as_slice() {
        return Err(format!(
            "the directory is of another cluster than {cluster}: check the addresses of the meta nodes"
        ));
    }
    if !node.see_generation(Generation(reply.generation)) {
        return Err("a meta node answered for a generation that is over".to_owned());
    }
    let incarnation = convert::required("incarnation", reply.incarnation).map_err(|error| error.to_string())?;
    let begun = node.holdings.lock().begin(region.id.index, Incarnation::from(incarnation));
    begun.map(|record| node.membership.sign(record)).map_err(|error| error.to_string())
}

/// Tells the directory how the region can be read.
async fn announce(node: &Arc<Node>, region: &RegionSeat, record: &Signed<RegionRecord>) -> Result<Announced, String> {
    let request = v1::RecordRegionRequest { record: record.encode().into() };
    let caller = Arc::clone(node);
    let call = node.metas.at_leader(DIRECTORY, Instant::now() + ROUND, move |address, deadline| {
        let (node, request) = (Arc::clone(&caller), with_timeout(request.clone(), deadline));
        Box::pin(async move { Ok(node.metas.registry(&address)?.record_region(request).await?.into_inner()) })
    });
    let incarnation = record.statement.incarnation;
    match call.await {
        Ok(reply) => {
            let feed = reply.feed.map(FeedNumber::from).unwrap_or_default();
            let still = node.holdings.lock().recorded(region.id.index, record.clone(), feed);
            Ok(if still { Announced::Recorded } else { Announced::Over })
        }
        Err(LeaderCallError::Refused {
            refusal: Refusal::StaleIncarnation(_) | Refusal::StaleGeneration(_), ..
        }) => {
            node.void_all(&[(region.id, incarnation)], None);
            Ok(Announced::Over)
        }
        Err(error) => {
            let over = !node.holdings.lock().lives().contains(&(region.id, incarnation));
            if over { Ok(Announced::Over) } else { Err(error.to_string()) }
        }
    }
}

/// Waits longer after each failure, and logs one only when it changed.
struct Trouble {
    last: String,
    pause: Duration,
}

impl Trouble {
    fn new() -> Self {
        Self { last: String::new(), pause: PAUSE_FIRST }
    }

    async fn pause(&mut self, node: &Node, region: &RegionSeat, error: String) {
        if self.last != error {
            tracing::warn!(region = %region.id, error, "the region cannot be registered yet, trying on");
            node.standing.send_modify(|standing| standing.last.clone_from(&error));
            self.last = error;
        }
        sleep(self.pause).await;
        self.pause = (self.pause * 2).min(PAUSE_LONGEST);
    }
}
