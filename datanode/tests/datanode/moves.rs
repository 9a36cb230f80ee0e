//! Moves: copies go to another slab within the node's own memory, under the fences of every writer.

use crate::support::{
    Double, EXTENT_BYTES, Frame, PATIENCE, Peer, Running1, SLOT, arm, frame, grant, node, node_with, reason, refusal,
    sign, sign_as, status,
};
use bytes::Bytes;
use quarry_proto::{
    convert,
    refusal::Refusal,
    v1::{self, arm_refused::Reason},
};
use quarry_wire::{
    attestation::{Attestation, AttestationBatch, Placement},
    frame::FrameHeader,
    grant::{Grant, Purpose},
    ids::{ExtentIndex, NodeId, SlotIndex, WriterId},
    units::{Offset, SlotSize},
};
use tonic::{Request, Response};

/// A grant for moves over the same places as [`grant`] gives.
fn grant_move(double: &Double, holders: &[NodeId], sequence: u64, first: u32, slots: u32) -> Grant {
    let written = grant(double, holders, sequence, 0, first, slots);
    Grant { purpose: Purpose::Move, writer: WriterId::HOLDERS, ..written }
}

/// "Copy this frame, which lies in a slot of `from`, to that slot."
fn order(from: &Grant, frame: &Frame, to: u32) -> v1::MovedCopy {
    let FrameHeader { key, version, payload_bytes, payload_crc, .. } = &frame.header;
    v1::MovedCopy {
        slot: to,
        region: 0,
        offset: from.offset(&from.holders[0], SlotIndex(frame.slot)).unwrap().0,
        key: Bytes::copy_from_slice(key.as_bytes()),
        version: Some((*version).into()),
        kind: v1::FrameKind::Value.into(),
        payload_bytes: *payload_bytes,
        payload_crc: *payload_crc,
    }
}

async fn move_signed(
    node: &Running1,
    signed: Bytes,
    entries: Vec<v1::MovedCopy>,
) -> Result<v1::MoveCopiesReply, Refusal> {
    let mut request = Request::new(v1::MoveCopiesRequest { grant: signed, entries });
    request.set_timeout(PATIENCE);
    let reply = node.client.clone().move_copies(request).await;
    reply.map(Response::into_inner).map_err(|status| refusal(&status))
}

async fn move_copies(
    double: &Double,
    node: &Running1,
    grant: &Grant,
    entries: Vec<v1::MovedCopy>,
) -> Result<v1::MoveCopiesReply, Refusal> {
    move_signed(node, sign(double, grant), entries).await
}

/// Arms a grant and writes frames under it.
async fn write(double: &Double, node: &Running1, peer: &Peer, grant: &Grant, frames: &[&Frame]) -> v1::ArmReply {
    let armed = arm(node, &sign(double, grant), grant.writer.0[0]).await.unwrap();
    for frame in frames {
        peer.put(&armed, frame).await.unwrap();
    }
    armed
}

/// Whether the node signed for exactly these frames in these slots of the grant.
fn signed_for(double: &Double, node: NodeId, to: &Grant, attested: &Bytes, frames: &[(&Frame, u32)]) -> bool {
    let holder = *to.holder(node).unwrap();
    let leaf = |(frame, slot): &(&Frame, u32)| {
        let header = frame.header.clone();
        Attestation {
            namespace: header.namespace,
            key: header.key,
            kind: header.kind,
            version: header.version,
            payload_bytes: header.payload_bytes,
            payload_crc: header.payload_crc,
            grant: to.id,
            lend: holder.lend,
            slot: SlotIndex(*slot),
            region: holder.region,
            incarnation: holder.incarnation,
            placement: Placement::Resident(to.offset(&holder, SlotIndex(*slot)).unwrap()),
        }
        .leaf()
    };
    let leaves: Vec<_> = frames.iter().map(leaf).collect();
    let batch = double.keyring().verify(convert::signed::<AttestationBatch>(attested).unwrap()).unwrap();
    *batch.get() == AttestationBatch::of(node, &leaves)
}

#[tokio::test]
async fn copies_are_moved_byte_for_byte_and_signed_for_at_their_new_place() {
    let (double, peer) = (Double::start().await, Peer::new());
    let node = node(&double, 10).await;
    let from = grant(&double, &[node.id], 1, 7, 0, 4);
    let frames = [frame(&from, 0, "first"), frame(&from, 3, "second")];
    write(&double, &node, &peer, &from, &[&frames[0], &frames[1]]).await;
    let to = grant_move(&double, &[node.id], 2, 8, 2);
    let orders = vec![order(&from, &frames[1], 0), order(&from, &frames[0], 1)];
    let reply = move_copies(&double, &node, &to, orders).await.unwrap();
    assert_eq!(reply.refused, [0; 0]);
    assert!(signed_for(&double, node.id, &to, &reply.attested, &[(&frames[1], 0), (&frames[0], 1)]));
    let record = double.record(node.id);
    for (frame, slot) in [(&frames[1], 0), (&frames[0], 1)] {
        let bytes = frame.bytes();
        assert_eq!(peer.get(&record, &to, slot, bytes.len()).await, bytes);
        assert_eq!(peer.get(&record, &from, frame.slot, bytes.len()).await, bytes, "who reads the old place goes on");
    }
    assert_eq!(status(&node).await.claims_open, 1, "the writer's own; the move has ended");
}

#[tokio::test]
async fn a_frame_of_many_pieces_is_moved_whole() {
    let (double, peer) = (Double::start().await, Peer::new());
    let node = node_with(&double, 10, |config| config.region_bytes = vec![64 << 20]).await.unwrap();
    let large = |grant: Grant, extent: u32| {
        let mut grant = Grant { slot_size: SlotSize(1 << 20), ..grant };
        (grant.holders[0].extent, grant.holders[0].base) = (ExtentIndex(extent), Offset(u64::from(extent) * (4 << 20)));
        grant
    };
    let from = large(grant(&double, &[node.id], 1, 7, 0, 1), 2);
    let mut frame = frame(&from, 0, "large");
    // No multiple of a piece.
    frame.payload = (0..1_000_003u32).map(|byte| (byte % 249).to_le_bytes()[0]).collect();
    (frame.header.payload_bytes, frame.header.payload_crc) = (1_000_003, crc32c::crc32c(&frame.payload));
    write(&double, &node, &peer, &from, &[&frame]).await;
    let to = large(grant_move(&double, &[node.id], 2, 0, 1), 9);
    let reply = move_copies(&double, &node, &to, vec![order(&from, &frame, 0)]).await.unwrap();
    assert!(signed_for(&double, node.id, &to, &reply.attested, &[(&frame, 0)]));
    let bytes = frame.bytes();
    assert!(peer.get(&double.record(node.id), &to, 0, bytes.len()).await == bytes);
}

#[tokio::test]
async fn what_is_moved_onto_an_older_slab_is_out_of_its_writers_reach_and_the_lane_is_closed() {
    let (double, peer) = (Double::start().await, Peer::new());
    let node = node(&double, 10).await;
    let from = grant(&double, &[node.id], 1, 7, 0, 4);
    let kept = frame(&from, 0, "kept");
    write(&double, &node, &peer, &from, &[&kept]).await;
    let old = grant(&double, &[node.id], 2, 8, 8, 4);
    let late = frame(&old, 1, "late");
    let lane = write(&double, &node, &peer, &old, &[]).await;
    let to = grant_move(&double, &[node.id], 3, 9, 1);
    let reply = move_copies(&double, &node, &to, vec![order(&from, &kept, 0)]).await.unwrap();
    assert!(signed_for(&double, node.id, &to, &reply.attested, &[(&kept, 0)]));
    assert!(peer.put(&lane, &late).await.is_err(), "its lane is closed");
    let bytes = kept.bytes();
    assert_eq!(peer.get(&double.record(node.id), &to, 0, bytes.len()).await, bytes);
    // And the other way round: what has a lower token, or was armed, is not written by the node.
    let lower = grant_move(&double, &[node.id], 1, 9, 1);
    let lower = Grant { id: quarry_wire::ids::GrantId { shard: quarry_wire::ids::ShardId(2), ..lower.id }, ..lower };
    for (grant, expected) in [(&lower, Reason::LowerToken), (&to, Reason::GrantClosed)] {
        let answer = move_copies(&double, &node, grant, vec![order(&from, &kept, 0)]).await;
        assert_eq!(reason(answer.map(|_| v1::ArmReply::default())), expected);
    }
}

#[tokio::test]
async fn a_damaged_frame_and_one_that_is_not_there_are_not_moved_and_spoil_nothing() {
    let (double, peer) = (Double::start().await, Peer::new());
    let node = node(&double, 10).await;
    let from = grant(&double, &[node.id], 1, 7, 0, 4);
    let good = frame(&from, 0, "good");
    let mut damaged = frame(&from, 1, "damaged");
    let at = damaged.payload.len() - 1;
    damaged.payload[at] ^= 1;
    write(&double, &node, &peer, &from, &[&good, &damaged]).await;
    let to = grant_move(&double, &[node.id], 2, 8, 8);
    let changed = |change: &dyn Fn(&mut v1::MovedCopy), to: u32| {
        let mut order = order(&from, &good, to);
        change(&mut order);
        order
    };
    let orders = vec![
        order(&from, &damaged, 0),
        order(&from, &frame(&from, 2, "never written"), 1),
        order(&from, &good, 2),
        changed(&|order| order.payload_crc ^= 1, 3),
        changed(&|order| order.payload_bytes -= 1, 4),
        changed(&|order| order.key = Bytes::from_static(b"other"), 5),
        changed(&|order| order.offset = u64::MAX, 6),
        changed(&|order| order.region = 1, 7),
    ];
    let reply = move_copies(&double, &node, &to, orders).await.unwrap();
    assert_eq!(reply.refused, [0, 1, 3, 4, 5, 6, 7]);
    assert!(signed_for(&double, node.id, &to, &reply.attested, &[(&good, 2)]));
    let none = grant_move(&double, &[node.id], 3, 16, 1);
    let reply = move_copies(&double, &node, &none, vec![order(&from, &damaged, 0)]).await.unwrap();
    assert_eq!((reply.refused.as_slice(), reply.attested.len()), (&[0][..], 0), "nothing is signed for nothing");
}

#[tokio::test]
async fn a_grant_for_moves_that_is_another_nodes_a_clients_or_nobodys_is_refused() {
    let (double, peer) = (Double::start().await, Peer::new());
    let (node, other) = (node(&double, 10).await, node(&double, 11).await);
    let from = grant(&double, &[node.id], 1, 7, 0, 4);
    let kept = frame(&from, 0, "kept");
    write(&double, &node, &peer, &from, &[&kept]).await;
    let orders = || vec![order(&from, &kept, 0)];
    let as_arm = |answer: Result<v1::MoveCopiesReply, Refusal>| answer.map(|_| v1::ArmReply::default());

    let others = grant_move(&double, &[other.id], 2, 8, 1);
    assert_eq!(reason(as_arm(move_copies(&double, &node, &others, orders()).await)), Reason::NotAHolder);
    let mut life = grant_move(&double, &[node.id], 3, 8, 1);
    life.holders[0].incarnation.0.number += 1;
    assert_eq!(reason(as_arm(move_copies(&double, &node, &life, orders()).await)), Reason::Incarnation);
    let mut outside = grant_move(&double, &[node.id], 4, 8, 1);
    outside.holders[0].base = Offset(EXTENT_BYTES - u64::from(SLOT) / 2);
    assert_eq!(reason(as_arm(move_copies(&double, &node, &outside, orders()).await)), Reason::OutOfBounds);
    let written = grant(&double, &[node.id], 5, 7, 8, 1);
    let answer = move_copies(&double, &node, &written, orders()).await;
    assert!(matches!(answer, Err(Refusal::Malformed(it)) if it.field == "grant.purpose"));
    let own = grant_move(&double, &[node.id], 6, 8, 1);
    assert!(matches!(move_signed(&node, sign_as(node.id, &own), orders()).await, Err(Refusal::Untrusted(_))));
    // Nobody gets a key for a grant for moves.
    let request = v1::ArmRequest { grant: sign(&double, &own), writer: Bytes::copy_from_slice(&own.writer.0) };
    let answer = node.client.clone().arm(request).await.map_err(|status| refusal(&status));
    assert!(matches!(answer, Err(Refusal::Malformed(it)) if it.field == "grant.purpose"));

    for (entries, field) in [
        (vec![], "entries"),
        (vec![order(&from, &kept, 1)], "slot"),
        (vec![order(&from, &kept, 0), order(&from, &kept, 0)], "slot"),
        (vec![v1::MovedCopy { payload_bytes: u64::MAX, ..order(&from, &kept, 0) }], "payload_bytes"),
        (vec![v1::MovedCopy { version: None, ..order(&from, &kept, 0) }], "version"),
        (vec![v1::MovedCopy { key: Bytes::new(), ..order(&from, &kept, 0) }], "key"),
    ] {
        let answer = move_copies(&double, &node, &own, entries).await;
        assert!(matches!(&answer, Err(Refusal::Malformed(it)) if it.field == field), "{field}: {answer:?}");
    }
    // After all this it is still good.
    let reply = move_copies(&double, &node, &own, orders()).await.unwrap();
    assert!(signed_for(&double, node.id, &own, &reply.attested, &[(&kept, 0)]));
}
