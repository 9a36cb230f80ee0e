//! Copies that readers complain of: the node looks itself (*No wrong value*).

use crate::support::{
    Double, NAMESPACE, Peer, REGION_BYTES, SLOT, arm, commit, frame, grant, node, report_damage, sign,
};
use quarry_proto::{
    refusal::Refusal,
    v1::{self, commit_outcome::Code},
};
use quarry_wire::ids::SlotIndex;

#[tokio::test]
async fn a_node_says_of_a_copy_what_lies_there_and_takes_nobodys_word() {
    let double = Double::start().await;
    let a = node(&double, 10).await;
    let given = grant(&double, &[a.id], 1, 7, 0, 8);
    let armed = arm(&a, &sign(&double, &given), 7).await.unwrap();
    let peer = Peer::new();
    let frames: Vec<_> = (0..3).map(|slot| frame(&given, slot, &format!("key-{slot}"))).collect();
    for frame in &frames {
        peer.put(&armed, frame).await.unwrap();
        assert_eq!(commit(&a, &given, &[frame]).await.unwrap(), [Code::Committed]);
    }
    let holder = given.holders[0];
    let asked = |slot: u32| v1::ReportDamageRequest {
        shard: given.id.shard.0,
        namespace: NAMESPACE.0,
        key: format!("key-{slot}").into(),
        version: Some(frames[slot as usize].header.version.into()),
        region: 0,
        incarnation: Some(holder.incarnation.into()),
        offset: given.offset(&holder, SlotIndex(slot)).unwrap().0,
    };
    // Whole: the shard is told so, and what it says is passed on.
    assert!(!report_damage(&a, asked(0)).await.unwrap().dropped);
    // A flipped bit in the payload, one in the header, and a whole frame of another key in its place.
    let overwrite = async |slot: u32, bytes: &[u8]| {
        let address = armed.base + u64::from(slot) * u64::from(SLOT);
        peer.write(&armed.lane_address, armed.write_key, address, bytes).await.unwrap();
    };
    for at in [frames[1].bytes().len() - 1, 20] {
        let mut bytes = frames[1].bytes();
        bytes[at] ^= 1;
        overwrite(1, &bytes).await;
        assert!(report_damage(&a, asked(1)).await.unwrap().dropped);
    }
    overwrite(2, &frames[0].bytes()).await;
    assert!(!report_damage(&a, asked(2)).await.unwrap().dropped);

    let checked = double.state.lock().checked.clone();
    let found: Vec<Option<bytes::Bytes>> =
        checked.iter().map(|copy| copy.found.as_ref().map(|found| found.key.clone())).collect();
    assert_eq!(found, [Some("key-0".into()), None, None, Some("key-0".into())]);
    for (copy, slot) in checked.iter().zip([0, 1, 1, 2]) {
        let asked = asked(slot);
        assert_eq!((copy.offset, &copy.key, copy.version.clone()), (asked.offset, &asked.key, asked.version));
        assert_eq!(copy.region, Some(holder.region.into()));
    }
    let whole = checked[0].found.clone().unwrap();
    assert_eq!((whole.namespace, whole.payload_crc), (NAMESPACE.0, frames[0].header.payload_crc));

    // What cannot be is refused, and nobody is asked.
    let wrong = [
        v1::ReportDamageRequest { region: 1, ..asked(0) },
        v1::ReportDamageRequest { offset: asked(0).offset + 1, ..asked(0) },
        v1::ReportDamageRequest { offset: u64::MAX - 63, ..asked(0) },
        v1::ReportDamageRequest { incarnation: None, ..asked(0) },
        v1::ReportDamageRequest { version: None, ..asked(0) },
        v1::ReportDamageRequest { key: bytes::Bytes::new(), ..asked(0) },
    ];
    for asked in wrong {
        let refused = report_damage(&a, asked.clone()).await;
        assert!(matches!(refused, Err(Refusal::Malformed(_))), "{asked:?}: {refused:?}");
    }
    let mut past = asked(0);
    past.incarnation.as_mut().unwrap().number += 1;
    assert!(matches!(report_damage(&a, past).await, Err(Refusal::NotReady(_))));
    // At the very end of the region there is no room for a frame: none lies there.
    let end = v1::ReportDamageRequest { offset: REGION_BYTES - 64, ..asked(0) };
    report_damage(&a, end).await.unwrap();
    assert_eq!(double.state.lock().checked.len(), 5);
}
