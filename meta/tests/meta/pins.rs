//! Pins at the door of a meta node.

use crate::{
    cluster::{Cluster, Node, fresh},
    player::{DataNode, Writer, entry, proven_copies},
};
use bytes::Bytes;
use quarry_proto::{
    refusal::Refusal,
    v1::{self, delete_outcome},
};
use quarry_wire::ids::NodeId;

fn names(keys: &[&str]) -> Vec<Bytes> {
    keys.iter().map(|key| Bytes::copy_from_slice(key.as_bytes())).collect()
}

async fn request(cluster: &Cluster, writer: &Writer, keys: &[&str], duration_ms: u32) -> v1::PinRequest {
    v1::PinRequest {
        shard: 1,
        request: Some(cluster.request(1).await),
        owner: writer.id.0.to_vec().into(),
        namespace: writer.namespace.0,
        keys: names(keys),
        duration_ms,
        seen: None,
    }
}

async fn pin(cluster: &Cluster, request: &v1::PinRequest) -> Result<v1::PinReply, Refusal> {
    cluster.ask(async |node: &Node| node.control().pin(request.clone()).await).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pin_is_answered_with_proof_also_after_its_key_was_deleted_and_its_leader_changed() {
    let mut cluster = Cluster::new().await;
    let node = DataNode::join(&cluster, 11).await;
    let writer = Writer::new(&cluster.create_namespace("kv", 1).await);
    let grant = writer.grant(&cluster).await;
    let entries: Vec<_> = (0..3).map(|slot| entry(slot, &format!("key-{slot}"))).collect();
    let publish = writer.publish(&grant, &entries, &[node.attest(&grant, &entries)]);
    cluster.ask(async |node: &Node| node.control().publish(publish.clone()).await).await.unwrap();

    let names = ["key-0", "nothing", "key-2"];
    let asked = request(&cluster, &writer, &names, 60_000).await;
    let first = pin(&cluster, &asked).await.unwrap();
    let values = first.values.clone().unwrap();
    assert_eq!((values.lease_ms, first.until_ms), (60_000, values.applied_ms + 60_000));
    let delete = v1::DeleteRequest {
        shard: 1,
        request: Some(cluster.request(1).await),
        namespace: writer.namespace.0,
        items: vec![v1::DeleteItem { key: b"key-0".to_vec().into(), expected: None }],
    };
    let deleted = cluster.ask(async |node: &Node| node.control().delete(delete.clone()).await).await.unwrap();
    assert_eq!(deleted.outcomes[0].code(), delete_outcome::Code::Deleted);
    let leader = cluster.leader(1).await;
    cluster.node(leader).kill();

    let again = pin(&cluster, &asked).await.unwrap();
    assert_eq!((again.pin, again.until_ms), (first.pin, first.until_ms), "the same request has the same pin");
    let values = again.values.unwrap();
    assert_eq!(values.items.iter().map(|it| it.found).collect::<Vec<_>>(), [true, false, true]);
    let keyring = cluster.keyring().await;
    for index in [0, 2] {
        let holders = proven_copies(&keyring, &values, index, names[index], writer.namespace);
        assert_eq!(holders, [NodeId(11)]);
    }

    let renew = v1::RenewPinRequest {
        shard: 1,
        request: Some(cluster.request(1).await),
        owner: writer.id.0.to_vec().into(),
        pin: first.pin,
        duration_ms: 120_000,
    };
    let call = async |it: &v1::RenewPinRequest| {
        cluster.ask(async |node: &Node| node.control().renew_pin(it.clone()).await).await
    };
    let renewed = call(&renew).await.unwrap();
    assert!(renewed.until_ms > first.until_ms && renewed.duration_ms == 120_000);
    assert_eq!(call(&renew).await.unwrap().until_ms, renewed.until_ms);
    let stranger = v1::RenewPinRequest { owner: vec![9; 16].into(), request: Some(cluster.request(1).await), ..renew };
    assert!(matches!(call(&stranger).await, Err(Refusal::UnknownPin(_))));

    let release = |owner: Vec<u8>| v1::ReleasePinRequest { shard: 1, owner: owner.into(), pin: first.pin };
    let call = async |it: v1::ReleasePinRequest| {
        cluster.ask(async |node: &Node| node.control().release_pin(it.clone()).await).await.unwrap().held
    };
    assert!(!call(release(vec![9; 16])).await);
    assert!(call(release(writer.id.0.to_vec())).await);
    assert!(!call(release(writer.id.0.to_vec())).await);
    // The request is known, its pin is over.
    assert!(matches!(pin(&cluster, &asked).await, Err(Refusal::UnknownPin(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn pins_that_cannot_be_are_refused_in_words_that_say_what_can() {
    let cluster = Cluster::new().await;
    let writer = Writer::new(&cluster.create_namespace("kv", 1).await);
    let good = request(&cluster, &writer, &["key"], 1_000).await;
    let nothing = pin(&cluster, &good).await.unwrap();
    assert_eq!((nothing.pin, nothing.values.unwrap().items[0].found), (None, false));
    let named = || Some(v1::RequestId { random: fresh(), ..good.request.unwrap() });
    let bad = [
        v1::PinRequest { duration_ms: 0, request: named(), ..good.clone() },
        v1::PinRequest { duration_ms: 600_001, request: named(), ..good.clone() },
        v1::PinRequest { keys: Vec::new(), request: named(), ..good.clone() },
        v1::PinRequest { keys: names(&["key"; 513]), request: named(), ..good.clone() },
        v1::PinRequest { keys: names(&["k".repeat(512).as_str(); 33]), request: named(), ..good.clone() },
        v1::PinRequest { keys: names(&[""]), request: named(), ..good.clone() },
        v1::PinRequest { owner: vec![1; 15].into(), request: named(), ..good.clone() },
        v1::PinRequest { request: None, ..good.clone() },
        v1::PinRequest { shard: 7, request: named(), ..good.clone() },
    ];
    for request in bad {
        let refused = pin(&cluster, &request).await;
        assert!(matches!(refused, Err(Refusal::Malformed(_) | Refusal::TooLarge(_))), "{refused:?}");
    }
    let unknown = v1::PinRequest { namespace: 77, request: named(), ..good };
    assert!(matches!(pin(&cluster, &unknown).await, Err(Refusal::UnknownNamespace(_))));
}
