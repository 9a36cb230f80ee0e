//! Damaged copies: a data node looked at a copy of its own that a reader complained of, and says what lies there.
//!
//! The leader checks that the caller is the node that it speaks about; what should lie there is the machine's to know. A copy that is intact costs no
//! entry of the log.

use super::{control::key_of_shard, strange};
use crate::{core::Core, metrics};
use quarry_meta_state::shard::{CheckedCopy, ShardCommand, ShardOutcome};
use quarry_proto::{
    convert::{self, required},
    refusal::Refusal,
    v1,
};
use quarry_trust::Caller;
use quarry_wire::{
    certificate::Role,
    frame::FrameHeader,
    ids::{NamespaceId, RegionId, ShardId},
    units::Offset,
};
use tokio::time::Instant;

pub(super) async fn check_copy(
    core: &Core,
    asked: v1::CheckCopyRequest,
    caller: &Caller,
    deadline: Instant,
) -> Result<v1::CheckCopyReply, Refusal> {
    let region: RegionId = required("region", asked.region)?.into();
    caller.is_node(Role::DataNode, region.node, "CheckCopy")?;
    let shard = core.shard(ShardId(asked.shard))?;
    shard.hosted.leads()?;
    let namespace = NamespaceId(asked.namespace);
    let copy = CheckedCopy {
        namespace,
        key: key_of_shard(core, shard, namespace, &asked.key)?,
        version: required("version", asked.version)?.try_into()?,
        region,
        incarnation: required("incarnation", asked.incarnation)?.into(),
        offset: Offset(asked.offset),
        found: asked.found.map(found).transpose()?,
    };
    let stays = |why: String| v1::CheckCopyReply { dropped: false, why };
    if let Err(why) = shard.hosted.read_linearized(deadline, |state, _| state.check_copy(&copy)).await? {
        return Ok(stays(why.to_string()));
    }
    let key = copy.key.clone();
    match shard.hosted.propose(ShardCommand::DropCopy(copy), deadline).await?.outcome {
        ShardOutcome::DropCopy(Ok(dropped)) => {
            tracing::error!(%region, %key, left = dropped.left, "a damaged copy was given up");
            metrics::damaged(shard.id);
            Ok(v1::CheckCopyReply { dropped: true, why: String::new() })
        }
        ShardOutcome::DropCopy(Err(why)) => Ok(stays(why.to_string())),
        other => Err(strange(&other)),
    }
}

fn found(frame: v1::FoundFrame) -> Result<FrameHeader, Refusal> {
    Ok(FrameHeader {
        namespace: NamespaceId(frame.namespace),
        key: convert::key(&frame.key)?,
        version: required("found.version", frame.version)?.try_into()?,
        kind: convert::frame_kind(frame.kind)?,
        payload_bytes: frame.payload_bytes,
        payload_crc: frame.payload_crc,
    })
}
