//! Arm: who may write where, and what a key is worth elsewhere.

use crate::support::{
    Double, EXTENT_BYTES, META, PATIENCE, Peer, SLOT, arm, commit, commit_as, frame, grant, node, node_with, reason,
    refusal, revoke, sign, sign_as, soon, status, until, writer,
};
use bytes::Bytes;
use quarry_datanode::{DataNode, DataNodeError};
use quarry_proto::{
    refusal::Refusal,
    v1::{self, arm_refused::Reason, commit_outcome::Code},
};
use quarry_wire::{
    frame::FrameHeader,
    grant::{Class, Grant},
    units::Offset,
};
use std::time::Duration;

#[tokio::test]
async fn a_frame_written_through_a_lane_is_committed_and_read_under_the_region_record() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let grant = grant(&double, &[a.id], 1, 7, 0, 8);
    let armed = arm(&a, &sign(&double, &grant), 7).await.unwrap();
    let peer = Peer::new();
    let frames = [frame(&grant, 0, "one"), frame(&grant, 5, "two")];
    for frame in &frames {
        peer.put(&armed, frame).await.unwrap();
    }
    assert_eq!(commit(&a, &grant, &[&frames[0], &frames[1]]).await.unwrap(), [Code::Committed; 2]);
    let record = double.record(a.id);
    for frame in &frames {
        let bytes = peer.get(&record, &grant, frame.slot, frame.bytes().len()).await;
        assert_eq!(FrameHeader::read_from(&bytes).unwrap(), frame.header);
        assert_eq!(bytes[frame.header.bytes()..], frame.payload);
    }
    assert_eq!(double.state.lock().published.len(), 1, "one signature and one entry for the batch");
}

#[tokio::test]
async fn a_repeated_arm_has_the_same_lane_and_key_and_a_second_grant_the_same_lane_and_another_key() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let first = sign(&double, &grant(&double, &[a.id], 1, 7, 0, 8));
    let armed = arm(&a, &first, 7).await.unwrap();
    assert_eq!(arm(&a, &first, 7).await.unwrap(), armed);
    let other = arm(&a, &sign(&double, &grant(&double, &[a.id], 2, 7, 8, 8)), 7).await.unwrap();
    assert_eq!(other.lane_address, armed.lane_address);
    assert_ne!(other.write_key, armed.write_key);
    let found = status(&a).await;
    assert_eq!((found.lanes, found.claims_open), (1, 2));
}

#[tokio::test]
async fn lower_and_equal_tokens_are_refused_also_after_the_grant_was_closed() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let late = sign(&double, &grant(&double, &[a.id], 5, 7, 0, 8));
    arm(&a, &late, 7).await.unwrap();
    let early = sign(&double, &grant(&double, &[a.id], 4, 8, 7, 2));
    let equal = sign(&double, &grant(&double, &[a.id], 5, 8, 7, 2));
    for round in 0..2 {
        assert_eq!(reason(arm(&a, &early, 8).await), Reason::LowerToken, "round {round}");
        assert_eq!(reason(arm(&a, &equal, 8).await), Reason::LowerToken, "round {round}");
        let close = v1::CloseRequest {
            grant: Some(grant(&double, &[a.id], 5, 7, 0, 8).id.into()),
            writer: Bytes::copy_from_slice(&writer(7).0),
        };
        a.client.clone().close(close).await.unwrap();
    }
    assert_eq!(reason(arm(&a, &late, 7).await), Reason::GrantClosed);
    assert_eq!(status(&a).await.lanes, 0, "a lane closes with its last claim");
}

#[tokio::test]
async fn a_lanes_key_is_refused_at_the_reader_and_at_another_lane_and_the_read_key_writes_nothing() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let (one, two) = (grant(&double, &[a.id], 1, 7, 0, 8), grant(&double, &[a.id], 2, 8, 8, 8));
    let armed_one = arm(&a, &sign(&double, &one), 7).await.unwrap();
    let armed_two = arm(&a, &sign(&double, &two), 8).await.unwrap();
    assert_ne!(armed_one.lane_address, armed_two.lane_address);
    let record = double.record(a.id);
    let reader = record.address.as_bytes();
    let bytes = [0xaa; 512];
    let wrong = [
        (reader, armed_one.write_key, armed_one.base),
        (&armed_two.lane_address[..], armed_one.write_key, armed_one.base),
        (reader, record.read_key, record.base),
        (&armed_one.lane_address[..], record.read_key, record.base),
        (&armed_one.lane_address[..], armed_one.write_key ^ 1, armed_one.base),
        (&armed_one.lane_address[..], armed_one.write_key, armed_one.base + one.slab_bytes()),
    ];
    for (number, (address, key, at)) in wrong.into_iter().enumerate() {
        assert!(Peer::new().write(address, key, at, &bytes).await.is_err(), "write {number} was taken");
    }
    assert!(
        Peer::new().read(&armed_one.lane_address, armed_one.write_key, armed_one.base, 512).await.is_err(),
        "a write key reads"
    );
    let peer = Peer::new();
    for grant in [&one, &two] {
        let all = peer.get(&record, grant, 0, usize::try_from(grant.slab_bytes()).unwrap()).await;
        assert!(all.iter().all(|byte| *byte == 0), "a refused write landed");
    }
}

#[tokio::test]
async fn a_new_grant_over_the_same_bytes_fences_the_old_writer() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let old = grant(&double, &[a.id], 1, 7, 0, 8);
    let new = grant(&double, &[a.id], 2, 8, 4, 8);
    let old_armed = arm(&a, &sign(&double, &old), 7).await.unwrap();
    let old_peer = Peer::new();
    let (kept, lost) = (frame(&old, 1, "kept"), frame(&old, 5, "lost"));
    old_peer.put(&old_armed, &kept).await.unwrap();
    old_peer.put(&old_armed, &lost).await.unwrap();

    let new_armed = arm(&a, &sign(&double, &new), 8).await.unwrap();
    assert!(old_peer.put(&old_armed, &lost).await.is_err(), "the old writer got through");
    let fresh = frame(&new, 1, "fresh");
    Peer::new().put(&new_armed, &fresh).await.unwrap();
    assert!(old_peer.put(&old_armed, &lost).await.is_err(), "the old writer got through");
    let found = Peer::new().get(&double.record(a.id), &new, 1, fresh.bytes().len()).await;
    assert_eq!(found, fresh.bytes());

    // What was completed and is not superseded still counts, slot by slot.
    assert_eq!(commit(&a, &old, &[&kept, &lost]).await.unwrap(), [Code::Committed, Code::NotEnoughHolders]);
    assert_eq!(commit(&a, &new, &[&fresh]).await.unwrap(), [Code::Committed]);
    assert_eq!(reason(arm(&a, &sign(&double, &old), 7).await), Reason::GrantClosed);
}

#[tokio::test]
async fn another_writer_can_neither_arm_nor_commit_nor_close() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let grant = grant(&double, &[a.id], 1, 7, 0, 8);
    let signed = sign(&double, &grant);
    assert_eq!(reason(arm(&a, &signed, 8).await), Reason::Writer);
    let armed = arm(&a, &signed, 7).await.unwrap();
    let frame = frame(&grant, 0, "mine");
    Peer::new().put(&armed, &frame).await.unwrap();
    let stolen = commit_as(&a, &grant, 8, &[a.id], vec![frame.entry()], PATIENCE).await;
    assert!(matches!(stolen, Err(Refusal::Untrusted(_))), "{stolen:?}");
    let (id, thief) = (Some(grant.id.into()), Bytes::copy_from_slice(&writer(8).0));
    let close = v1::CloseRequest { grant: id, writer: thief.clone() };
    let closed = a.client.clone().close(close).await.unwrap_err();
    assert!(matches!(refusal(&closed), Refusal::Untrusted(_)));
    let confirm = v1::ConfirmRequest { grant: id, writer: thief, entries: vec![frame.entry()] };
    let confirmed = a.client.clone().confirm(confirm).await.unwrap_err();
    assert!(matches!(refusal(&confirmed), Refusal::Untrusted(_)));
    assert_eq!(double.state.lock().published.len(), 0);
    assert_eq!(commit(&a, &grant, &[&frame]).await.unwrap(), [Code::Committed]);
}

#[tokio::test]
async fn every_flipped_bit_and_every_truncation_of_a_grant_is_refused() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let good = sign(&double, &grant(&double, &[a.id], 1, 7, 0, 8));
    let believed = |answer: Result<v1::ArmReply, Refusal>| match answer {
        Err(Refusal::Malformed(_) | Refusal::Untrusted(_)) => false,
        other => panic!("neither malformed nor untrusted: {other:?}"),
    };
    for bit in 0..good.len() * 8 {
        let mut bad = good.to_vec();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(!believed(arm(&a, &bad.into(), 7).await), "bit {bit}");
    }
    for end in 0..good.len() {
        assert!(!believed(arm(&a, &good.slice(..end), 7).await), "first {end} bytes");
    }
    assert_eq!(status(&a).await.claims_open, 0);
    assert!(arm(&a, &good, 7).await.is_ok());
}

#[tokio::test]
async fn a_grant_signed_by_no_meta_node_or_by_a_revoked_one_is_not_believed() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let grant = grant(&double, &[a.id], 1, 7, 0, 8);
    assert!(matches!(arm(&a, &sign_as(a.id, &grant), 7).await, Err(Refusal::Untrusted(_))), "a data node's grant");
    let signed = sign(&double, &grant);
    revoke(&double, META);
    until("the revocation has arrived", async || matches!(arm(&a, &signed, 7).await, Err(Refusal::Untrusted(_)))).await;
}

#[tokio::test]
async fn grants_for_other_nodes_and_places_and_of_class_durable_are_refused() {
    let double = Double::start().await;
    let (a, b) = (node(&double, 10).await, node(&double, 11).await);
    let good = grant(&double, &[a.id], 1, 7, 0, 8);
    assert_eq!(reason(arm(&b, &sign(&double, &good), 7).await), Reason::NotAHolder);
    let with = |change: &dyn Fn(&mut Grant)| {
        let mut grant = good.clone();
        change(&mut grant);
        sign(&double, &grant)
    };
    let outside = with(&|grant| grant.holders[0].base = Offset(EXTENT_BYTES - u64::from(SLOT)));
    assert_eq!(reason(arm(&a, &outside, 7).await), Reason::OutOfBounds);
    let life = with(&|grant| grant.holders[0].incarnation.0.number += 1);
    assert_eq!(reason(arm(&a, &life, 7).await), Reason::Incarnation);
    let durable = with(&|grant| grant.class = Class::Durable);
    assert!(matches!(arm(&a, &durable, 7).await, Err(Refusal::Malformed(it)) if it.field == "grant.class"));
    arm(&a, &with(&|grant| grant.holders[0].lend.0.number = 3), 7).await.unwrap();
    let old_lending = grant(&double, &[a.id], 9, 8, 16, 8);
    assert_eq!(reason(arm(&a, &sign(&double, &old_lending), 8).await), Reason::Lending);
}

#[tokio::test]
async fn beyond_the_cap_two_writers_share_a_lane_and_each_writes_with_a_key_of_its_own() {
    let double = Double::start().await;
    let a = node_with(&double, 10, |config| config.lanes_max = 1).await.unwrap();
    let (one, two) = (grant(&double, &[a.id], 1, 7, 0, 8), grant(&double, &[a.id], 2, 8, 8, 8));
    let armed_one = arm(&a, &sign(&double, &one), 7).await.unwrap();
    let armed_two = arm(&a, &sign(&double, &two), 8).await.unwrap();
    assert_eq!(armed_one.lane_address, armed_two.lane_address);
    for (grant, armed) in [(&one, &armed_one), (&two, &armed_two)] {
        let frame = frame(grant, 0, "shared");
        Peer::new().put(armed, &frame).await.unwrap();
        assert_eq!(commit(&a, grant, &[&frame]).await.unwrap(), [Code::Committed]);
    }
    assert_eq!(status(&a).await.lanes, 1);
}

#[tokio::test]
async fn after_its_ttl_a_grant_writes_nothing_more_and_what_it_wrote_can_be_committed() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let grant = Grant { ttl: Duration::from_millis(300), ..grant(&double, &[a.id], 1, 7, 0, 8) };
    let armed = arm(&a, &sign(&double, &grant), 7).await.unwrap();
    let peer = Peer::new();
    let frame = frame(&grant, 0, "in time");
    peer.put(&armed, &frame).await.unwrap();
    until("the claim has closed", async || status(&a).await.claims_open == 0).await;
    assert!(peer.put(&armed, &frame).await.is_err(), "written after the TTL");
    assert_eq!(commit(&a, &grant, &[&frame]).await.unwrap(), [Code::Committed]);
}

#[tokio::test]
async fn a_call_without_a_protocol_version_is_refused() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", a.node.address())).unwrap();
    let mut bare = v1::data_node_client::DataNodeClient::new(channel.connect().await.unwrap());
    let status = bare.node_status(v1::NodeStatusRequest {}).await.unwrap_err();
    assert!(matches!(refusal(&status), Refusal::UnsupportedProtocol(_)));
}

#[tokio::test]
async fn settings_that_cannot_work_are_refused_by_name() {
    let double = Double::start().await;
    let folder = tempfile::tempdir().unwrap();
    let good = || crate::support::config(&double, quarry_wire::ids::NodeId(10), folder.path());
    let wrong = [
        ("region_bytes", quarry_datanode::DataNodeConfig { region_bytes: vec![1000], ..good() }),
        ("region_bytes", quarry_datanode::DataNodeConfig { region_bytes: vec![], ..good() }),
        ("metas", quarry_datanode::DataNodeConfig { metas: vec![], ..good() }),
        ("metas and advertise", quarry_datanode::DataNodeConfig { metas: vec!["host".into()], ..good() }),
        ("lanes_max", quarry_datanode::DataNodeConfig { lanes_max: 0, ..good() }),
        ("certificate", quarry_datanode::DataNodeConfig { node: quarry_wire::ids::NodeId(12), ..good() }),
        ("heartbeat", quarry_datanode::DataNodeConfig { heartbeat: Duration::ZERO, ..good() }),
    ];
    for (expected, config) in wrong {
        let started = DataNode::start(config).await.err();
        assert!(matches!(&started, Some(DataNodeError::Config { field, .. }) if *field == expected), "{started:?}");
    }
    let mut forged = good();
    forged.certificate.signature.0[0] ^= 1;
    assert!(matches!(DataNode::start(forged).await.err(), Some(DataNodeError::Certificate(_))));
    let started = DataNode::start(good()).await.unwrap();
    started.ready(soon()).await.unwrap();
}
