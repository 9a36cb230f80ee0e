//! One write to one holder, to its end: written, lost with its lane, or the node's fault.
//!
//! A data node closes lanes by force when memory goes to another grant, and tells nobody: the writer finds a peer that takes no connection,
//! like that of a dead node. Decides between the two by asking the node with a repeated Arm, which answers the same while the grant is armed.
//! A lost lane costs all slabs that are armed through it and blames nobody; a node is avoided only if it does not answer, or if the grant is
//! armed there and yet nothing can be written.
//!
//! *Fresh space* holds: a write that is given up leaves its slot for good, and one that is repeated brings the same frame to the same slot.

use crate::{
    core::Core,
    endpoints::Target,
    retry::Fault,
    write::{
        frames::Frames,
        open,
        slab::{Armed, Slab},
        transfer_time,
    },
};
use quarry_fabric::{OperationError, Wait};
use quarry_proto::refusal::Refusal;
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, sleep_until};

/// A write that is not complete after this and the time of its bytes makes us ask; doubled with each time, up to the other.
const PATIENCE_FIRST: Duration = Duration::from_millis(100);
const PATIENCE_LONGEST: Duration = Duration::from_secs(1);
/// Longest time for asking after a write failed.
const ASKING: Duration = Duration::from_secs(1);
/// So often in a row a node must not be there when it is asked before a write to it is given up early.
const ABSENT_MAX: u32 = 2;

/// Why a frame is not at a holder.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum NotWritten {
    /// The node closed the lane, or the grant on it.
    #[error("its lane was closed: {0}")]
    LaneLost(String),
    /// The node did not answer while a write waited for it.
    #[error("{0}")]
    NodeAbsent(String),
    #[error(transparent)]
    Operation(#[from] OperationError),
}

/// What a holder says about a grant that was armed there.
enum Standing {
    Armed,
    Lost(String),
    /// The network says that nobody is there.
    Absent(String),
    /// No usable answer.
    Unknown,
}

/// Writes `frames` to `target`, which lies at `holder`. The node is avoided for a while if it is at fault. What is written alone is waited for by
/// looking, see [`Wait::spinning_until`].
pub(crate) async fn write(
    core: &Core,
    slab: &Arc<Slab>,
    holder: &Armed,
    target: &Target<'_>,
    frames: &Frames,
    until: Instant,
    alone: bool,
) -> Result<(), NotWritten> {
    let wait = if alone { Wait::spinning_until(until) } else { Wait::until(until) };
    let mut repeated = false;
    loop {
        let quick = transfer_time(frames.bytes());
        let outcome = tokio::select! {
            biased;
            () = slab.lost(holder.node) => Err(NotWritten::LaneLost("another write found it".to_owned())),
            why = watch(core, slab, holder, quick, until) => Err(why),
            // Last: a write that is tried again and again uses up its task's turn.
            written = core.endpoints.write(target, frames.pieces(), frames.bytes(), wait) => written.map_err(NotWritten::from),
        };
        let error = match outcome {
            Ok(()) => {
                slab.heard_of(holder.node);
                return Ok(());
            }
            Err(error) => error,
        };
        core.counters.failures.add(1);
        let asks = matches!(error, NotWritten::Operation(OperationError::Failed { .. } | OperationError::Closed));
        let standing =
            if asks { Some(ask(core, slab, holder, until.min(Instant::now() + ASKING)).await) } else { None };
        match (error, standing) {
            (NotWritten::LaneLost(why), _) | (_, Some(Standing::Lost(why))) => {
                core.counters.lost_lane_writes.add(1);
                slab.lane_lost(holder.node, &holder.lane);
                core.lane_lost(holder.node, &holder.lane);
                return Err(NotWritten::LaneLost(why));
            }
            // A neighbour's write that was refused tears down the connection of all.
            (_, Some(Standing::Armed)) if !repeated => repeated = true,
            (error, _) => {
                core.endpoints.has_failed(holder.node);
                return Err(error);
            }
        }
    }
}

/// Asks the holder each time that nothing was heard of it for a while, and ends with the reason to give a write to it up, if there is one.
async fn watch(core: &Core, slab: &Slab, holder: &Armed, quick: Duration, until: Instant) -> NotWritten {
    let begun = Instant::now();
    let (mut patience, mut absent) = (PATIENCE_FIRST, 0);
    loop {
        let quiet_since = slab.last_heard_of(holder.node).unwrap_or(begun).max(begun);
        let asks_at = quiet_since + patience + quick;
        if Instant::now() < asks_at {
            sleep_until(asks_at).await;
            continue;
        }
        slab.heard_of(holder.node);
        match ask(core, slab, holder, until).await {
            Standing::Lost(why) => return NotWritten::LaneLost(why),
            Standing::Absent(why) => {
                absent += 1;
                if absent >= ABSENT_MAX {
                    return NotWritten::NodeAbsent(why);
                }
            }
            Standing::Armed | Standing::Unknown => absent = 0,
        }
        patience = (patience * 2).min(PATIENCE_LONGEST);
    }
}

/// Whether the slab's grant is still armed at the holder as it was.
async fn ask(core: &Core, slab: &Slab, holder: &Armed, until: Instant) -> Standing {
    let until = until.min(Instant::now() + core.options.attempt_timeout);
    match open::arm(core, &slab.granted, holder.node, until).await {
        Ok(armed) if armed == *holder => Standing::Armed,
        Ok(_) => Standing::Lost("it was armed anew".to_owned()),
        Err(Fault::Refused(refusal)) if matches!(*refusal, Refusal::ArmRefused(_)) => {
            Standing::Lost(refusal.to_string())
        }
        Err(Fault::Transport(why) | Fault::Distrust(why)) => Standing::Absent(why),
        Err(Fault::Refused(_) | Fault::TimedOut) => Standing::Unknown,
    }
}
