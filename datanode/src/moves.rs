//! Moves: copies frames from where they lie to slots of another slab in this node's own memory, and signs for those that arrived whole.
//!
//! Under a grant of its own kind: signed by the shard's leader like every grant, with its holders as the writer. Arming it closes older claims
//! and their lanes first, as for any writer; then each piece is written only while the claim is open, under the lock that closes it, so what is
//! armed later is never reached (*Fenced writers*). Damage is not spread: the header must be the one that the leader named, and the CRC is
//! taken over the very bytes that were written (*No half-truth*). What was not finished by the deadline is not signed for; the claim ends by
//! its time.

use crate::{
    claims::ConfirmRefusal,
    commit,
    confirm::{self, EntryRefusal},
    node::Node,
    service,
};
use quarry_proto::{
    convert::{self, required},
    refusal::Refusal,
    v1,
};
use quarry_wire::{
    attestation::Attestation,
    frame::{FrameHeader, HEADER_BYTES_MAX, header_bytes},
    grant::{Grant, Purpose},
    ids::{RegionIndex, SlotIndex},
    units::Offset,
};
use std::{collections::BTreeMap, sync::Arc};
use tokio::{
    task::yield_now,
    time::{Instant, timeout_at},
};

/// Bytes copied under one lock.
const PIECE_BYTES: usize = 256 << 10;
// The header lies in the first piece, which is looked at before anything is written.
const _: () = assert!(PIECE_BYTES > HEADER_BYTES_MAX);

/// A frame to copy.
struct Order {
    to: SlotIndex,
    region: RegionIndex,
    offset: u64,
    header: FrameHeader,
}

impl Order {
    fn bytes(&self) -> u64 {
        self.header.payload_bytes.saturating_add(header_bytes(self.header.key.as_bytes().len()) as u64)
    }
}

/// Copies what is asked for.
///
/// # Errors
/// A refusal of the whole: nothing of it is signed for.
pub(crate) async fn carry_out(
    node: &Node,
    request: v1::MoveCopiesRequest,
    deadline: Instant,
) -> Result<v1::MoveCopiesReply, Refusal> {
    if node.draining() {
        return Err(service::not_ready("the node is stopping", 1_000));
    }
    commit::check_count(request.entries.len())?;
    let signed = convert::signed::<Grant>(&request.grant)?;
    tracing::Span::current().record("shard", signed.statement.id.shard.0);
    let grant = node.verify(signed, deadline).await.map_err(|error| service::untrusted(&error))?;
    if grant.purpose != Purpose::Move {
        return Err(Refusal::malformed("grant.purpose", "a move", "another one"));
    }
    service::cache_only(grant.class)?;
    let orders = orders(&grant, request.entries)?;
    let grant = Arc::new(grant);

    let Ok(_turn) = timeout_at(deadline, node.moving.lock()).await else {
        return Err(service::not_ready("another move is under way", 100));
    };
    let armed = node.holdings.lock().arm_own(node.clock.now(), &grant);
    armed.map_err(|why| service::arm_refusal(&why.into()))?;
    let mut refused = BTreeMap::new();
    let mut buffer = vec![0; PIECE_BYTES];
    for (place, order) in orders.iter().enumerate() {
        if let Err(why) = copy(node, &grant, order, &mut buffer, deadline).await {
            tracing::warn!(grant = %grant.id, key = %order.header.key, region = order.region.0, offset = order.offset, %why, "a copy is not moved");
            refused.insert(place, why);
        }
    }
    drop(buffer);
    let attestations = attest(node, &grant, &orders, &mut refused).map_err(|why| service::confirm_refusal(&why))?;
    let bytes = (0..).zip(&orders).filter(|(place, _)| !refused.contains_key(place)).map(|(_, order)| order.bytes());
    node.meters.moved(attestations.len(), bytes.sum(), refused.len());
    let refused = refused.into_keys().filter_map(|place| u32::try_from(place).ok()).collect();
    Ok(v1::MoveCopiesReply { attested: confirm::sign(node, &attestations), refused })
}

/// What is to be copied, each frame to a slot of its own in which it fits.
fn orders(grant: &Grant, entries: Vec<v1::MovedCopy>) -> Result<Vec<Order>, Refusal> {
    let mut slots = std::collections::BTreeSet::new();
    let mut orders = Vec::with_capacity(entries.len());
    for entry in entries {
        let header = FrameHeader {
            namespace: grant.namespace,
            key: convert::key(&entry.key)?,
            version: required("version", entry.version)?.try_into()?,
            kind: convert::frame_kind(entry.kind)?,
            payload_bytes: entry.payload_bytes,
            payload_crc: entry.payload_crc,
        };
        let order =
            Order { to: SlotIndex(entry.slot), region: RegionIndex(entry.region), offset: entry.offset, header };
        if entry.slot >= grant.slots.0 || !slots.insert(entry.slot) {
            let expected = format_args!("below {}, each once", grant.slots.0);
            return Err(Refusal::malformed("slot", expected, entry.slot));
        }
        if order.bytes() > u64::from(grant.slot_size.0) {
            let expected = format_args!("a frame of at most {} bytes", grant.slot_size.0);
            return Err(Refusal::malformed("payload_bytes", expected, entry.payload_bytes));
        }
        orders.push(order);
    }
    Ok(orders)
}

/// Copies one frame piece by piece: each is looked at after it was copied out, and that very piece is written.
async fn copy(
    node: &Node,
    grant: &Grant,
    order: &Order,
    buffer: &mut [u8],
    deadline: Instant,
) -> Result<(), EntryRefusal> {
    let unreadable = |error: quarry_fabric::FabricError| EntryRefusal::Unreadable(error.to_string());
    let (header_length, whole) = (header_bytes(order.header.key.as_bytes().len()), order.bytes());
    let (mut done, mut crc) = (0, 0);
    while done < whole {
        if Instant::now() >= deadline {
            return Err(EntryRefusal::Late);
        }
        let length = usize::try_from(whole - done).map_or(PIECE_BYTES, |left| left.min(PIECE_BYTES));
        let piece = &mut buffer[..length];
        let from = Offset(order.offset.saturating_add(done));
        node.holdings.lock().copy_out(order.region, from, piece).map_err(unreadable)?;
        if done == 0 {
            confirm::same(&order.header, &FrameHeader::read_from(&piece[..header_length])?)?;
            crc = crc32c::crc32c(&piece[header_length..]);
        } else {
            crc = crc32c::crc32c_append(crc, piece);
        }
        if !node.holdings.lock().write_own(grant, order.to, done, piece).map_err(unreadable)? {
            return Err(EntryRefusal::Closed);
        }
        done += length as u64;
        yield_now().await;
    }
    if crc == order.header.payload_crc {
        Ok(())
    } else {
        Err(EntryRefusal::Damaged { expected: order.header.payload_crc, found: crc })
    }
}

/// What can be said of the frames that arrived. The claim closes: nothing is written under this grant any more.
fn attest(
    node: &Node,
    grant: &Grant,
    orders: &[Order],
    refused: &mut BTreeMap<usize, EntryRefusal>,
) -> Result<Vec<Attestation>, ConfirmRefusal> {
    let mut attestations = Vec::with_capacity(orders.len());
    // One lock from the claims to the last word: no higher token comes in between.
    let mut holdings = node.holdings.lock();
    holdings.close(node.clock.now(), grant.id, grant.writer)?;
    let held = holdings.confirmable(grant.id, grant.writer)?;
    for (place, order) in orders.iter().enumerate() {
        if refused.contains_key(&place) {
            continue;
        }
        match held.slot(order.to) {
            Ok(offset) => attestations.push(confirm::attestation(&held, order.header.clone(), order.to, offset)),
            Err(why) => {
                refused.insert(place, why.into());
            }
        }
    }
    Ok(attestations)
}
