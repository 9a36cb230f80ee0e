//! Damage that readers report: the node looks at its own copy and gives it up if it is not what was committed.
//!
//! A reader is not believed: the node reads the frame itself, once, and tells the shard what lies there, which knows what should. So a false report
//! costs one look at one frame and nothing else; one look at a time is taken.

use crate::{
    metas::{LeaderCallError, with_timeout},
    node::Node,
    service,
};
use futures::future::BoxFuture;
use quarry_proto::{
    convert::{self, required},
    refusal::Refusal,
    v1,
};
use quarry_wire::{
    frame::{FrameHeader, HEADER_BYTES_MAX, header_bytes},
    ids::{Incarnation, RegionId, RegionIndex},
    limits::{EXTENT_BYTES, FRAME_ALIGN},
    units::Offset,
    version::Version,
};
use std::sync::Arc;
use tokio::{
    task::yield_now,
    time::{Instant, timeout_at},
};
use tonic::Status;

/// Bytes looked at under one lock.
const PIECE_BYTES: usize = 256 << 10;

/// Looks at the copy and answers whether it was given up.
///
/// # Errors
/// A refusal, if nothing could be found out.
pub(crate) async fn report(
    node: &Arc<Node>,
    asked: v1::ReportDamageRequest,
    deadline: Instant,
) -> Result<v1::ReportDamageReply, Refusal> {
    let index = RegionIndex(asked.region);
    let incarnation: Incarnation = required("incarnation", asked.incarnation)?.into();
    let key = convert::key(&asked.key)?;
    let _: Version = required("version", asked.version.clone())?.try_into()?;
    let Some(seat) = node.regions.iter().find(|seat| seat.id.index == index) else {
        return Err(Refusal::malformed("region", format_args!("0 to {}", node.regions.len() - 1), asked.region));
    };
    if !asked.offset.is_multiple_of(FRAME_ALIGN as u64) || asked.offset >= seat.length {
        let expected = format_args!("a multiple of {FRAME_ALIGN} below {}", seat.length);
        return Err(Refusal::malformed("offset", expected, asked.offset));
    }
    let Ok(_turn) = timeout_at(deadline, node.looking.lock()).await else {
        return Err(service::not_ready("other copies are looked at", 1_000));
    };
    let found = whole_frame(node, seat.id, incarnation, asked.offset, seat.length, deadline).await?;
    let request = v1::CheckCopyRequest {
        shard: asked.shard,
        namespace: asked.namespace,
        key: asked.key,
        version: asked.version,
        region: Some(seat.id.into()),
        incarnation: Some(incarnation.into()),
        offset: asked.offset,
        found,
    };
    let call = |address: String, until: Instant| {
        let (node, request) = (Arc::clone(node), with_timeout(request.clone(), until));
        let call = async move { Ok(node.metas.registry(&address)?.check_copy(request).await?.into_inner()) };
        Box::pin(call) as BoxFuture<'static, Result<v1::CheckCopyReply, Status>>
    };
    let reply = node.metas.at_leader(asked.shard, deadline, call).await.map_err(|error| match error {
        LeaderCallError::Refused { refusal, .. } => refusal,
        // The shard may have dropped the copy all the same.
        LeaderCallError::Deadline { last } => Refusal::Indeterminate(v1::Indeterminate { why: last }),
    })?;
    if reply.dropped {
        tracing::error!(region = %seat.id, offset = asked.offset, %key, "a copy in this node's memory is damaged and was given up: the memory should be looked at");
    } else {
        tracing::debug!(region = %seat.id, offset = asked.offset, %key, why = reply.why, "a copy that was complained of stays");
    }
    node.meters.reported(reply.dropped);
    Ok(v1::ReportDamageReply { dropped: reply.dropped })
}

/// The frame that lies there, if header and payload are whole.
async fn whole_frame(
    node: &Node,
    region: RegionId,
    incarnation: Incarnation,
    offset: u64,
    length: u64,
    deadline: Instant,
) -> Result<Option<v1::FoundFrame>, Refusal> {
    let copy_out = |at: u64, into: &mut [u8]| {
        let holdings = node.holdings.lock();
        let lives = holdings.standing(region.index).is_some_and(|(life, _)| life == incarnation);
        if !lives {
            return Err(service::not_ready("that life of the region is over", 1_000));
        }
        let copied = holdings.copy_out(region.index, Offset(at), into);
        copied.map_err(|error| service::not_ready(&error.to_string(), 1_000))
    };
    let room = length - offset;
    let mut head = vec![0; usize::try_from(room).map_or(HEADER_BYTES_MAX, |room| room.min(HEADER_BYTES_MAX))];
    copy_out(offset, &mut head)?;
    let Ok(header) = FrameHeader::read_from(&head) else { return Ok(None) };
    let begin = header_bytes(header.key.as_bytes().len()) as u64;
    // What cannot be a frame of ours is not read on.
    if header.payload_bytes > EXTENT_BYTES || header.payload_bytes > room.saturating_sub(begin) {
        return Ok(None);
    }
    let (mut done, mut crc, mut piece) = (0, 0, vec![0; PIECE_BYTES]);
    while done < header.payload_bytes {
        if Instant::now() >= deadline {
            return Err(service::not_ready("the frame was not read before the deadline", 100));
        }
        let left = usize::try_from(header.payload_bytes - done).map_or(PIECE_BYTES, |left| left.min(PIECE_BYTES));
        copy_out(offset + begin + done, &mut piece[..left])?;
        crc = crc32c::crc32c_append(crc, &piece[..left]);
        done += left as u64;
        yield_now().await;
    }
    if crc != header.payload_crc {
        return Ok(None);
    }
    Ok(Some(v1::FoundFrame {
        namespace: header.namespace.0,
        key: header.key.as_bytes().to_vec().into(),
        version: Some(header.version.into()),
        kind: v1::FrameKind::from(header.kind).into(),
        payload_bytes: header.payload_bytes,
        payload_crc: header.payload_crc,
    }))
}
