//! Grants: the leader's plans, the refusals, the signature.
//!
//! Grants that share an entry are planned together, so that none takes the place of another; while such an entry is on its way no further grant
//! is planned. Whoever answers signs.

use crate::{core::Core, door};
use quarry_meta_state::{
    RequestRefusal, Shard,
    shard::{GrantRefusal, GrantRequest, ShardCommand, plan::Bounds},
};
use quarry_proto::{refusal::Refusal, v1};
use quarry_wire::{
    grant::Grant,
    ids::{NodeId, ShardId},
    units::{LogTime, millis},
};
use std::collections::BTreeMap;

/// A grant that is wanted.
#[derive(Clone, Debug)]
pub(crate) struct GrantWish {
    /// The proposing node.
    pub(crate) meta: NodeId,
    pub(crate) asked: GrantRequest,
    pub(crate) bounds: Bounds,
}

/// Plans in the order of the wishes. Wishes within the same bounds, as nearly all are, see each other's places; others may meet in one place,
/// then the second is refused when it is applied and planned again.
pub(crate) fn plan(state: &Shard, at: LogTime, wishes: &[GrantWish]) -> Vec<Result<ShardCommand, Refusal>> {
    let mut planners = BTreeMap::new();
    wishes
        .iter()
        .map(|wish| {
            let planner = planners.entry(&wish.bounds).or_insert_with(|| state.planner_within(at, &wish.bounds));
            planner.grant(wish.meta, wish.asked.clone()).map_err(|why| refused(why, &wish.asked, state))
        })
        .collect()
}

/// The grant with this node's signature. Whoever answers signs: the grant may have been proposed by an earlier leader.
pub(crate) fn sign(core: &Core, mut grant: Grant) -> Vec<u8> {
    grant.meta = core.config.node;
    let (generation, serial) = (grant.id.sequence.generation, core.config.certificate.statement.serial);
    core.config.key.sign(core.config.cluster, generation, serial, grant).encode()
}

/// Whether the place that was planned is gone, so that a new plan may find another.
pub(crate) const fn overtaken(refusal: &GrantRefusal) -> bool {
    matches!(
        refusal,
        GrantRefusal::Holders { .. }
            | GrantRefusal::SameNode { .. }
            | GrantRefusal::NotLent { .. }
            | GrantRefusal::RegionDown { .. }
            | GrantRefusal::OutsideExtent { .. }
            | GrantRefusal::NotFree { .. }
    )
}

/// The resource that is lacking when data nodes have no room, before the details.
const MEMORY: &str = "memory of data nodes";

/// The resource that is lacking when a namespace may have no more, before the details.
const QUOTA: &str = "quota of namespace";

/// Whether more memory in the shard would help: not if a quota is used up.
pub(crate) fn lacks_memory(refusal: &Refusal) -> bool {
    match refusal {
        Refusal::NoSpace(lack) => lack.resource.starts_with(MEMORY),
        Refusal::TooFewNodes(_) => true,
        _ => false,
    }
}

/// The resource that a shard lacks, with what it waits for: memory that other shards give.
pub(crate) fn given_by_others(shard: ShardId) -> String {
    format!("{MEMORY} ({shard} has no place for the slab on as many nodes as are needed; other shards give it some)")
}

/// Whether a quota is used up that values of the namespace itself will make room in.
pub(crate) fn lacks_quota(refusal: &Refusal) -> bool {
    matches!(refusal, Refusal::NoSpace(lack) if lack.resource.starts_with(QUOTA) && !lack.terminal)
}

/// The refusal in the words of the protocol; `state` knows the names.
pub(crate) fn refused(refusal: GrantRefusal, wanted: &GrantRequest, state: &Shard) -> Refusal {
    match refusal {
        GrantRefusal::Request(refusal) => request_refused(refusal),
        GrantRefusal::UnknownNamespace { namespace, .. } => {
            Refusal::UnknownNamespace(v1::UnknownNamespace { id: namespace.0, name: String::new() })
        }
        GrantRefusal::SlotSize { most, found, .. } if u64::from(found.0) > most => {
            Refusal::TooLarge(v1::TooLarge { what: "slot".to_owned(), limit: most, found: u64::from(found.0) })
        }
        GrantRefusal::SlotSize { least, most, found } => {
            Refusal::malformed("slot_size", format_args!("a multiple of 64 from {least} to {most}"), found.0)
        }
        GrantRefusal::Slots { most, found } => Refusal::malformed("slots", format_args!("1 to {most}"), found.0),
        GrantRefusal::Ttl { most, found } => {
            Refusal::malformed("ttl_ms", format_args!("1 to {}", millis(most)), millis(found))
        }
        GrantRefusal::TooFewNodes { needed, found, silent } => Refusal::TooFewNodes(v1::TooFewNodes {
            needed: u32::from(needed),
            found: u32::from(found),
            silent: u32::from(silent),
            retry_after_ms: millis(door::RETRY),
            drained: state.drained().map(|node| node.0).collect(),
        }),
        GrantRefusal::NoSpace { retry_after, .. } => Refusal::NoSpace(v1::NoSpace {
            resource: format!("{MEMORY} ({refusal})"),
            retry_after_ms: retry_after.map_or(0, millis),
            needed_bytes: u64::from(wanted.slot_size.0),
            free_bytes: state.room().values().map(|room| room.free).sum(),
            terminal: retry_after.is_none(),
        }),
        GrantRefusal::NotLentYet { .. } => Refusal::NoSpace(v1::NoSpace {
            resource: format!("{MEMORY} ({refusal})"),
            retry_after_ms: millis(door::RETRY),
            needed_bytes: u64::from(wanted.slot_size.0),
            free_bytes: state.room().values().map(|room| room.free).sum(),
            terminal: false,
        }),
        GrantRefusal::Quota { limit, used, asked, comes_back } => Refusal::NoSpace(v1::NoSpace {
            resource: quota(wanted, state, limit, used, asked, comes_back),
            retry_after_ms: if comes_back { millis(door::RETRY) } else { 0 },
            needed_bytes: asked,
            free_bytes: limit.saturating_sub(used),
            terminal: !comes_back,
        }),
        GrantRefusal::Holders { .. }
        | GrantRefusal::SameNode { .. }
        | GrantRefusal::NotLent { .. }
        | GrantRefusal::RegionDown { .. }
        | GrantRefusal::OutsideExtent { .. }
        | GrantRefusal::NotFree { .. } => {
            door::not_ready(format!("the place chosen for the slab is not to be had any more: {refusal}"), door::RETRY)
        }
    }
}

/// What a namespace lacks, so that whoever set its quota knows to what: it is shared out evenly over the shards.
fn quota(wanted: &GrantRequest, state: &Shard, limit: u64, used: u64, asked: u64, comes_back: bool) -> String {
    let known = state.namespace(wanted.namespace);
    let name = known.map_or_else(String::new, |known| known.name.clone());
    let (copies, total) = known.map_or((1, None), |known| (known.policy.copies, known.policy.quota_bytes));
    let whole = total.map_or_else(String::new, |total| format!(", an even share of {total}"));
    let slot = wanted.slot_size.0;
    let mut text = format!(
        "{QUOTA} {name} (it allows {limit} bytes in {}{whole}; {used} are in use; a value of this size takes {} in {copies} copies of {slot}",
        state.id(),
        u64::from(slot) * u64::from(copies),
    );
    if asked > limit {
        text += "; it can never fit: raise the quota, or put a smaller value";
    } else if comes_back {
        text += "; values that were not read for long make room";
    }
    text + ")"
}

/// A request that was not looked at, in the words of the protocol.
pub(crate) fn request_refused(refusal: RequestRefusal) -> Refusal {
    match refusal {
        RequestRefusal::Stale { floor, found } => {
            Refusal::StaleRequest(v1::StaleRequest { floor_ms: floor.0, found_ms: found.0 })
        }
        RequestRefusal::Ahead { at, found } => Refusal::malformed(
            "request.applied_ms",
            format_args!("a log time of this group, at most {} ms", at.0),
            format_args!("{} ms", found.0),
        ),
        RequestRefusal::Taken => {
            Refusal::malformed("request", "a name of its own", "the name of a request of another kind")
        }
    }
}
