//! A node that changes its signing key (*Nothing unsigned*).

use crate::support::{
    Double, Keys, PATIENCE, Peer, arm, batch, commit, frame, grant, node, node_key, node_with, revoke, rotate_key,
    sign, until,
};
use parking_lot::Mutex;
use quarry_proto::{refusal::Refusal, v1::commit_outcome::Code};
use quarry_wire::ids::{CertificateSerial, NodeId};
use std::{sync::Arc, time::Duration};

const SERIAL: u64 = 99;

#[tokio::test]
async fn a_node_that_changes_its_key_signs_again_all_that_it_signed_and_nothing_that_others_did() {
    let double = Double::start().await;
    let keys = Arc::new(Keys(Mutex::new(Ok(Keys::another(NodeId(10), SERIAL)))));
    let a = node_with(&double, 10, |config| config.key_source = Some(keys)).await.unwrap();
    let b = node(&double, 11).await;
    let given = grant(&double, &[a.id], 1, 7, 0, 8);
    let armed = arm(&a, &sign(&double, &given), 7).await.unwrap();
    let peer = Peer::new();
    for slot in 0..3 {
        let frame = frame(&given, slot, &format!("key-{slot}"));
        peer.put(&armed, &frame).await.unwrap();
        assert_eq!(commit(&a, &given, &[&frame]).await.unwrap(), [Code::Committed]);
    }
    let before = double.record(a.id);
    let mut forged = batch(a.id, &node_key(b.id), 10);
    forged.statement.root = [1; 32];
    let theirs = batch(b.id, &node_key(b.id), 11);
    {
        let mut state = double.state.lock();
        assert_eq!(state.batches.len(), 3);
        state.batches.insert(4, forged.clone());
        state.batches.insert(5, theirs.clone());
        // It was signed before the change and is published after the first look.
        state.late = Some(batch(a.id, &node_key(a.id), 10));
        state.awaiting = 2;
    }
    let reply = rotate_key(&a, PATIENCE).await.unwrap();
    assert_eq!((reply.serial, reply.resigned, reply.regions.len()), (SERIAL, 4, 1));
    let now = double.record(a.id);
    assert!(now.epoch > before.epoch && now.read_key != before.read_key);
    {
        let state = double.state.lock();
        assert_eq!((&state.batches[&4], &state.batches[&5]), (&forged, &theirs));
        for number in [1, 2, 3, 6] {
            assert_eq!(state.batches[&number].serial, CertificateSerial(SERIAL), "batch {number}");
        }
        assert_eq!(state.records[&before.region].serial, CertificateSerial(SERIAL));
    }

    // Without the old key everything goes on.
    revoke(&double, a.id);
    let frame = frame(&given, 3, "key-3");
    peer.put(&armed, &frame).await.unwrap();
    assert_eq!(commit(&a, &given, &[&frame]).await.unwrap(), [Code::Committed]);
    assert_eq!(double.state.lock().batches[&7].serial, CertificateSerial(SERIAL));
    // Asked again, there is nothing to do but another read key.
    assert_eq!(rotate_key(&a, PATIENCE).await.unwrap().resigned, 0);
}

#[tokio::test]
async fn as_long_as_what_was_signed_before_may_be_published_a_change_of_keys_is_not_done() {
    let double = Double::start().await;
    let keys = Arc::new(Keys(Mutex::new(Ok(Keys::another(NodeId(10), SERIAL)))));
    let a = node_with(&double, 10, |config| config.key_source = Some(keys)).await.unwrap();
    double.state.lock().awaiting = u64::MAX;
    let answer = rotate_key(&a, Duration::from_millis(500)).await;
    assert!(matches!(answer, Err(Refusal::Indeterminate(_))), "{answer:?}");
    let looks = {
        let mut state = double.state.lock();
        state.awaiting = 0;
        state.asked_up_to.len()
    };
    assert_eq!(rotate_key(&a, PATIENCE).await.unwrap().serial, SERIAL);
    // What it signed before it had the key is for none of the grants that came since, however often it is told.
    let up_to = double.state.lock().asked_up_to.clone();
    assert!(up_to.len() > looks);
    assert_eq!(up_to[0], None);
    assert!(up_to[1..].iter().all(|last| *last == Some(1)), "{up_to:?}");
}

#[tokio::test]
async fn one_change_of_keys_waits_for_the_other_and_no_third_key_comes_in_between() {
    let double = Double::start().await;
    let keys = Arc::new(Keys(Mutex::new(Ok(Keys::another(NodeId(10), SERIAL)))));
    let a = node_with(&double, 10, |config| config.key_source = Some(Arc::clone(&keys) as _)).await.unwrap();
    double.state.lock().awaiting = u64::MAX;
    let first = rotate_key(&a, PATIENCE);
    let second = async {
        until("the first one looks", async || !double.state.lock().asked_up_to.is_empty()).await;
        *keys.0.lock() = Ok(Keys::another(a.id, 98));
        let answer = rotate_key(&a, Duration::from_millis(300)).await;
        assert!(matches!(answer, Err(Refusal::Indeterminate(_))), "{answer:?}");
        assert!(double.keyring().certificates().all(|it| it.statement.serial != CertificateSerial(98)));
        double.state.lock().awaiting = 0;
    };
    let (first, ()) = tokio::join!(first, second);
    assert_eq!(first.unwrap().serial, SERIAL);
    assert_eq!(rotate_key(&a, PATIENCE).await.unwrap().serial, 98);
}

#[tokio::test]
async fn a_key_that_the_root_did_not_certify_for_this_node_is_not_taken() {
    let double = Double::start().await;
    let keys = Arc::new(Keys(Mutex::new(Err("there is no such file".to_owned()))));
    let a = node_with(&double, 10, |config| config.key_source = Some(Arc::clone(&keys) as _)).await.unwrap();
    let certificates = double.keyring().certificates().count();
    let (key, _) = Keys::another(a.id, 50);
    let (_, of_another_key) = Keys::another(a.id, 51);
    for held in
        [Err("there is no such file".to_owned()), Ok(Keys::another(NodeId(11), SERIAL)), Ok((key, of_another_key))]
    {
        *keys.0.lock() = held;
        let answer = rotate_key(&a, PATIENCE).await;
        assert!(matches!(answer, Err(Refusal::Untrusted(_))), "{answer:?}");
    }
    let b = node(&double, 11).await;
    let answer = rotate_key(&b, PATIENCE).await;
    assert!(matches!(answer, Err(Refusal::Untrusted(_))), "it has no key file: {answer:?}");
    assert_eq!(double.keyring().certificates().count(), certificates + 1, "that of the second node alone is new");
    assert_eq!(double.state.lock().records.values().next().unwrap().serial, CertificateSerial(10));
}
