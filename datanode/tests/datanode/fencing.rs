//! Fencing at its edges: writers that share lanes, lanes that are closed under others, a node that hears no meta node, and a control plane in
//! error. The node is the last judge of who may write.

use crate::support::{
    Double, Peer, SLOT, arm, commit, commit_as, frame, grant, node, node_with, reason, sign, status, writer,
};
use quarry_proto::{
    refusal::Refusal,
    v1::{arm_refused::Reason, commit_outcome::Code},
};
use quarry_wire::{
    grant::Grant,
    ids::{GrantId, LendNumber, ShardId},
    units::Offset,
};
use std::{collections::BTreeSet, time::Duration};

/// Longest wait for what is not answered.
const BRIEF: Duration = Duration::from_millis(300);

#[tokio::test]
async fn many_writers_beyond_the_cap_share_lanes_and_each_value_of_theirs_is_committed() {
    let double = Double::start().await;
    let a = node_with(&double, 10, |config| config.lanes_max = 4).await.unwrap();
    let peer = Peer::new();
    let mut lanes = BTreeSet::new();
    let mut keys = BTreeSet::new();
    for number in 0..16_u8 {
        let grant = grant(&double, &[a.id], u64::from(number) + 1, number + 1, u32::from(number) * 2, 2);
        let armed = arm(&a, &sign(&double, &grant), number + 1).await.unwrap();
        let frame = frame(&grant, 1, &format!("of-{number}"));
        peer.put(&armed, &frame).await.unwrap();
        assert_eq!(commit(&a, &grant, &[&frame]).await.unwrap(), [Code::Committed], "writer {number}");
        lanes.insert(armed.lane_address);
        keys.insert(armed.write_key);
    }
    assert_eq!((lanes.len(), keys.len()), (4, 16), "lanes are shared, keys are not");
    let found = status(&a).await;
    assert_eq!((found.lanes, found.claims_open), (4, 16));
}

#[tokio::test]
async fn a_lane_closed_under_those_who_share_it_is_said_to_be_closed_and_what_they_completed_is_committed() {
    let double = Double::start().await;
    let a = node_with(&double, 10, |config| config.lanes_max = 1).await.unwrap();
    let (one, two) = (grant(&double, &[a.id], 1, 7, 0, 8), grant(&double, &[a.id], 2, 8, 8, 8));
    let (signed_one, signed_two) = (sign(&double, &one), sign(&double, &two));
    let (armed_one, armed_two) = (arm(&a, &signed_one, 7).await.unwrap(), arm(&a, &signed_two, 8).await.unwrap());
    assert_eq!(armed_one.lane_address, armed_two.lane_address);
    let (peer, done, late) = (Peer::new(), frame(&two, 0, "done"), frame(&two, 1, "late"));
    peer.put(&armed_two, &done).await.unwrap();
    // Bytes of the first go to a third writer: their lane closes, and with it the second's.
    let three = grant(&double, &[a.id], 3, 9, 0, 8);
    let armed_three = arm(&a, &sign(&double, &three), 9).await.unwrap();
    assert_ne!(armed_three.lane_address, armed_two.lane_address);
    assert!(Peer::new().put(&armed_two, &late).await.is_err(), "a write through a closed lane");
    for _ in 0..2 {
        assert_eq!(reason(arm(&a, &signed_two, 8).await), Reason::LaneClosed);
    }
    assert_eq!(
        commit(&a, &two, &[&done, &late]).await.unwrap(),
        [Code::Committed, Code::Malformed],
        "what was not written is not"
    );
    // A new grant of the second writer goes on.
    let four = grant(&double, &[a.id], 4, 8, 16, 8);
    let armed_four = arm(&a, &sign(&double, &four), 8).await.unwrap();
    let after = frame(&four, 0, "after");
    Peer::new().put(&armed_four, &after).await.unwrap();
    assert_eq!(commit(&a, &four, &[&after]).await.unwrap(), [Code::Committed]);
}

#[tokio::test]
async fn a_node_that_hears_no_meta_node_fences_by_tokens_alone_and_commits_when_it_hears_one_again() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let (old, new) = (grant(&double, &[a.id], 1, 7, 0, 8), grant(&double, &[a.id], 2, 8, 0, 4));
    let (signed_old, signed_new) = (sign(&double, &old), sign(&double, &new));
    let armed_old = arm(&a, &signed_old, 7).await.unwrap();
    let writer_old = Peer::new();
    let stale = frame(&old, 0, "old");
    writer_old.put(&armed_old, &stale).await.unwrap();
    double.state.lock().cut_off = true;
    let heard = double.state.lock().heartbeats[&a.id];
    // Its claims stand: time and silence take nothing from a writer.
    writer_old.put(&armed_old, &frame(&old, 1, "still")).await.unwrap();
    let armed_new = arm(&a, &signed_new, 8).await.unwrap();
    assert!(writer_old.put(&armed_old, &stale).await.is_err(), "the old writer got through");
    assert_eq!(reason(arm(&a, &signed_old, 7).await), Reason::GrantClosed);
    let fresh = frame(&new, 0, "new");
    Peer::new().put(&armed_new, &fresh).await.unwrap();
    // What nobody could record has no outcome.
    let unsaid = commit_as(&a, &new, 8, &[a.id], vec![fresh.entry()], BRIEF).await;
    let open = matches!(unsaid, Err(Refusal::NotReady(_) | Refusal::NotLeader(_) | Refusal::Indeterminate(_)));
    assert!(open, "{unsaid:?}");
    assert!(double.state.lock().published.is_empty());
    assert_eq!(double.state.lock().heartbeats[&a.id], heard, "it was cut off");
    double.state.lock().cut_off = false;
    assert_eq!(commit(&a, &new, &[&fresh]).await.unwrap(), [Code::Committed]);
    assert_eq!(commit(&a, &old, &[&stale]).await.unwrap(), [Code::NotEnoughHolders], "its bytes are another's");
}

#[tokio::test]
async fn of_overlapping_grants_of_a_control_plane_in_error_the_node_takes_those_with_higher_tokens_alone() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let first = grant(&double, &[a.id], 5, 7, 0, 8);
    let armed = arm(&a, &sign(&double, &first), 7).await.unwrap();
    let (peer, kept) = (Peer::new(), frame(&first, 7, "kept"));
    // Signed by a meta node, every one of them.
    let with = |by: u8, change: &dyn Fn(&mut Grant)| {
        let mut wrong = Grant { writer: writer(by), ..first.clone() };
        change(&mut wrong);
        let state = double.state.lock().grants.get(&wrong.id).cloned();
        let signed = sign(&double, &wrong);
        // The shard of the test goes by the first that it gave under a name.
        double.state.lock().grants.insert(wrong.id, state.unwrap_or(wrong));
        signed
    };
    let other_shard = |grant: &mut Grant| grant.id = GrantId { shard: ShardId(2), ..grant.id };
    let wrong = [
        ("the same grant to another writer", 8, with(8, &|_| {})),
        ("the same grant elsewhere", 7, with(7, &|grant| grant.holders[0].base = Offset(u64::from(SLOT) * 4))),
        ("the same grant, larger", 7, with(7, &|grant| grant.slots.0 = 16)),
        ("the same token from another shard", 8, with(8, &other_shard)),
        (
            "a lower token, over the last slot",
            8,
            with(8, &|grant| {
                grant.id.sequence.number = 4;
                grant.holders[0].base = Offset(u64::from(SLOT) * 7);
            }),
        ),
        (
            "an earlier lending, with a later number",
            8,
            with(8, &|grant| {
                grant.id.sequence.number = 9;
                grant.holders[0].lend = LendNumber::new(grant.id.sequence.generation, 0);
            }),
        ),
    ];
    for (what, by, signed) in &wrong {
        let refused = reason(arm(&a, signed, *by).await);
        assert!(matches!(refused, Reason::LowerToken | Reason::Lending), "{what}: {refused:?}");
    }
    peer.put(&armed, &kept).await.unwrap();
    let found = status(&a).await;
    assert_eq!((found.lanes, found.claims_open), (1, 1), "the first goes on, untouched");
    // The same bytes under a higher token: whatever the control plane meant, never two at once.
    let second = with(8, &|grant| {
        grant.id = GrantId { shard: ShardId(2), ..grant.id };
        grant.id.sequence.number = 6;
    });
    arm(&a, &second, 8).await.unwrap();
    assert!(peer.put(&armed, &kept).await.is_err(), "two writers on the same bytes");
    assert_eq!(status(&a).await.claims_open, 1);
}
