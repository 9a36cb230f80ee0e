//! Opens a slab: asks the shard for a grant and arms it on its holders.
//!
//! Decides what to do with less than was asked for: a holder that cannot be armed is left out if enough remain, and avoided for a while.
//! The shard grants fewer slots by itself when there is less room.

use crate::{
    control::Node,
    core::Core,
    endpoints::Direction,
    error::{CallError, PutError},
    retry::{self, Fault},
    view::Doubt,
    write::{
        line::LineId,
        slab::{Armed, Slab, give_up},
    },
};
use futures::future::join_all;
use quarry_fabric::FabricAddress;
use quarry_proto::{refusal::Refusal, v1};
use quarry_wire::{
    grant::{Grant, Purpose},
    ids::NodeId,
    units::millis,
};
use std::{collections::BTreeSet, sync::Arc, time::Duration};
use tokio::time::Instant;

/// Time between the last write and the end of the grant, or a quarter of its life if that is less.
const MARGIN: Duration = Duration::from_secs(3);

/// Gets a slab of up to `slots` slots and arms it, until `deadline`. As long as something is lacking it tries again, and tells `lacks` what.
pub(crate) async fn open(
    core: &Arc<Core>,
    line: LineId,
    slots: u32,
    deadline: Instant,
    lacks: impl Fn(&PutError),
) -> Result<Arc<Slab>, PutError> {
    let mut attempt = 0;
    loop {
        let avoid = core.endpoints.avoided(Direction::Write);
        let asked_at = Instant::now();
        let (after, error) = match ask_grant(core, line, slots, &avoid, deadline).await {
            Ok(grant) => {
                let (armed, last) = arm_all(core, &grant, deadline).await;
                let needed = usize::from(grant.statement.least).max(1);
                if armed.len() >= needed {
                    let life = grant.statement.ttl;
                    // The claim's own clock may run a little faster than ours.
                    let write_until = asked_at + life - life / 100 - MARGIN.min(life / 4);
                    for holder in &armed {
                        core.endpoints.use_lane(holder.node, &holder.lane);
                    }
                    return Ok(Slab::new(grant, armed, write_until));
                }
                let reached = armed.len();
                give_back(core, grant.statement, armed);
                (retry::pause(attempt), PutError::TooFewHolders { needed, reached, last })
            }
            Err(CallError::Refused(refusal)) => match *refusal {
                // Nodes that we avoid may be all that lacks.
                Refusal::NoSpace(it) if !it.terminal || !avoid.is_empty() => {
                    let after = Duration::from_millis(it.retry_after_ms).min(Duration::from_secs(1));
                    (after.max(retry::pause(attempt)), CallError::Refused(Box::new(Refusal::NoSpace(it))).into())
                }
                Refusal::TooFewNodes(it) => {
                    let after = Duration::from_millis(it.retry_after_ms).min(Duration::from_secs(1));
                    let (needed, reached) = (it.needed as usize, it.found as usize);
                    let last = Refusal::TooFewNodes(it).to_string();
                    (after.max(retry::pause(attempt)), PutError::TooFewHolders { needed, reached, last })
                }
                other => return Err(CallError::Refused(Box::new(other)).into()),
            },
            // Nothing was written, whatever became of that grant: it ends by its time limit.
            Err(CallError::Indeterminate { why }) => return Err(PutError::Deadline { last: why }),
            Err(error) => return Err(error.into()),
        };
        if Instant::now() + after >= deadline {
            return Err(error);
        }
        lacks(&error);
        core.control.pause(after).await;
        attempt += 1;
    }
}

/// A grant with the bytes that prove it.
#[derive(Debug)]
pub(crate) struct Granted {
    pub(crate) statement: Grant,
    pub(crate) signed: bytes::Bytes,
}

async fn ask_grant(
    core: &Core,
    line: LineId,
    slots: u32,
    avoid: &BTreeSet<NodeId>,
    deadline: Instant,
) -> Result<Granted, CallError> {
    let shard = line.shard.0;
    let seen = core.control.view().read().seen();
    let make = |request| v1::GrantRequest {
        shard,
        request: Some(request),
        writer: core.writer_bytes.clone(),
        namespace: line.namespace.0,
        slot_size: line.slot_size,
        slots,
        ttl_ms: u32::try_from(millis(core.options.grant_ttl)).unwrap_or(0),
        avoid: avoid.iter().map(|node| node.0).collect(),
        seen,
    };
    let reply = core
        .control
        .command(shard, "Grant", make, deadline, |mut meta, request| async move { meta.grant(request).await })
        .await?;
    core.control.heard(shard, reply.applied_ms, reply.changes);
    let statement = core
        .control
        .believing(deadline, |view| {
            let grant = view.grant(&reply.grant)?;
            check(core, line, slots, &grant).map_err(Doubt::Broken)?;
            Ok(grant)
        })
        .await?;
    Ok(Granted { statement, signed: reply.grant })
}

/// Whether this is what we asked for.
fn check(core: &Core, line: LineId, slots: u32, grant: &Grant) -> Result<(), String> {
    let asked = (core.writer, line.namespace, line.shard, line.slot_size, Purpose::Write);
    let found = (grant.writer, grant.namespace, grant.id.shard, grant.slot_size.0, grant.purpose);
    if asked != found || grant.slots.0 > slots || grant.ttl > core.options.grant_ttl {
        return Err(format!(
            "asked for {asked:?} with up to {slots} slots, was granted {found:?} with {}",
            grant.slots.0
        ));
    }
    Ok(())
}

/// Arms the grant on all its holders at once; also says what the last failure was.
async fn arm_all(core: &Core, grant: &Granted, deadline: Instant) -> (Vec<Armed>, String) {
    let until = deadline.min(Instant::now() + core.options.attempt_timeout);
    let arms = grant.statement.holders.iter().map(|holder| arm(core, grant, holder.region.node, until));
    let (mut armed, mut last) = (Vec::new(), String::new());
    for (outcome, holder) in join_all(arms).await.into_iter().zip(&grant.statement.holders) {
        match outcome {
            Ok(holder) => armed.push(holder),
            Err(why) => {
                let node = holder.region.node;
                tracing::debug!(%node, %why, "a holder cannot be armed");
                core.endpoints.has_failed(node);
                last = format!("{node}: {why}");
            }
        }
    }
    (armed, last)
}

/// Arms the grant on one holder. Repeated, it answers the same as long as the grant is armed there, and is refused afterwards.
pub(crate) async fn arm(core: &Core, grant: &Granted, node: NodeId, until: Instant) -> Result<Armed, Fault> {
    let request = v1::ArmRequest { grant: grant.signed.clone(), writer: core.writer_bytes.clone() };
    let send = |mut node: Node, request| async move { node.arm(request).await };
    let reply = loop {
        let fault = match core.control.try_node(node, "Arm", request.clone(), until, send).await {
            Ok(reply) => break reply,
            Err(fault) => fault,
        };
        // A node that has too much to do just now has not failed.
        let Some(after) = fault.come_again().filter(|after| Instant::now() + *after < until) else { return Err(fault) };
        core.control.pause(after).await;
    };
    if reply.base.checked_add(grant.statement.slab_bytes()).is_none() {
        return Err(Fault::Transport(format!("base {:#x} plus the slab's length is no address", reply.base)));
    }
    let lane = FabricAddress::from_bytes(&reply.lane_address).map_err(|error| Fault::Transport(error.to_string()))?;
    Ok(Armed { node, lane, provider: reply.provider, key: reply.write_key, base: reply.base })
}

fn give_back(core: &Arc<Core>, grant: Grant, armed: Vec<Armed>) {
    let task = Arc::clone(core);
    core.tasks.spawn(async move {
        give_up(&task, &grant, armed.iter().map(|holder| holder.node), 0).await;
    });
}
