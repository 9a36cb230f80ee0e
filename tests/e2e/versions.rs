//! Versions on a real cluster: of another clock, in lists, and the memory of those that are not current any more.

use quarry_client::{Key, PutError, PutMode};
use quarry_proto::{
    refusal::Refusal,
    v1::{self, commit_outcome::Code},
};
use quarry_tests::{
    TestCluster,
    calls::Turned,
    cluster::create_namespace,
    raw::{Framed, Wish},
    seed::pattern,
    shared, soon,
};
use quarry_wire::{
    ids::NodeId,
    limits::{VERSION_AHEAD_MAX, extent_bytes},
    version::HybridClock,
};
use std::{collections::BTreeSet, time::Duration};

const BOTH: [NodeId; 2] = [NodeId(101), NodeId(102)];

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap()
}

/// Guards: `meta/state/src/shard/commits.rs::judge` and `meta/src/service/publish.rs::entries`; a client merges the clock that it is told.
#[tokio::test]
async fn a_version_behind_the_current_one_is_told_so_one_far_ahead_is_turned_away_and_a_client_writes_over_one_that_is_a_little_ahead()
 {
    let cluster = shared().await;
    let (client, blocks) = cluster.namespace().await;
    let raw = cluster.raw().await;
    let wish = Wish {
        namespace: blocks.info().id,
        slot_size: 4096,
        slots: 4,
        ttl: Duration::from_secs(20),
        avoid: Vec::new(),
    };
    let grant = raw.grant(&wish).await.unwrap();
    let armed = raw.arm_all(&grant).await;
    let replace = async |frame: &Framed| {
        raw.write_frame(&grant, &armed, frame).await;
        let mode = v1::PutMode { kind: v1::put_mode::Kind::Replace.into(), expected: None };
        let entry = v1::CommitEntry { mode: Some(mode), ..frame.entry.clone() };
        raw.commit(BOTH[0], &grant, BOTH, vec![entry]).await
    };
    let current = blocks.put("key", "current").await.unwrap();
    let behind = raw.frame_at(HybridClock(current.clock.0 - 1), &grant, 0, "key", b"behind");
    let outcomes = replace(&behind).await.unwrap();
    assert_eq!((outcomes[0].code(), outcomes[0].version.clone()), (Code::StaleVersion, Some(current.into())));
    let now = current.clock.wall_ms();
    let far = HybridClock::at(now + 2 * ms(VERSION_AHEAD_MAX));
    match replace(&raw.frame_at(far, &grant, 1, "key", b"from the future")).await {
        Err(Turned::Refused(Refusal::VersionAhead(told))) => {
            assert_eq!((told.version_ms, told.limit_ms), (far.wall_ms(), ms(VERSION_AHEAD_MAX)));
            assert!(told.wall_ms >= now && told.wall_ms < far.wall_ms() - told.limit_ms);
        }
        other => panic!("{other:?}"),
    }
    let seen = blocks.fresh().get("key").await.unwrap().unwrap();
    assert_eq!((&seen.bytes[..], seen.version), (&b"current"[..], current));

    let ahead = raw.frame_at(HybridClock::at(now + ms(VERSION_AHEAD_MAX) / 2), &grant, 2, "key", b"ahead");
    assert_eq!(replace(&ahead).await.unwrap()[0].code(), Code::Committed);
    assert_eq!(blocks.fresh().get("key").await.unwrap().unwrap().version, ahead.version);
    // Of a client that knows nothing of it.
    let other = cluster.client().await;
    let theirs = other.namespace(&blocks.info().name).await.unwrap();
    let over = theirs.put_with("key", "over it", PutMode::Replace).await.unwrap();
    assert!(over > ahead.version, "{over} is not above {}", ahead.version);
    let seen = blocks.fresh().get("key").await.unwrap().unwrap();
    assert_eq!((&seen.bytes[..], seen.version), (&b"over it"[..], over));
    assert_eq!(theirs.delete("key").await.unwrap(), Some(over));
    for client in [other, client] {
        client.close().await.unwrap();
    }
}

#[tokio::test]
async fn pages_of_a_list_show_every_key_with_the_prefix_once_while_others_come_and_go() {
    let cluster = shared().await;
    let (client, blocks) = cluster.namespace().await;
    let mut expected = BTreeSet::new();
    for number in 0..40 {
        let key = format!("{}/{number:02}", ["a", "b"][number % 2]);
        blocks.put(&key, pattern(number as u64, number)).await.unwrap();
        if number % 2 == 0 {
            expected.insert(Key::new(key).unwrap());
        }
    }
    let (mut listed, mut after, mut pages) = (Vec::new(), None, 0);
    loop {
        let page = blocks.list("a/", after.as_ref(), 6).await.unwrap();
        assert!(page.entries.len() <= 6);
        for entry in page.entries {
            let stat = blocks.stat(&entry.key).await.unwrap().unwrap();
            assert_eq!((entry.version, entry.payload_bytes), (stat.version, stat.payload_bytes));
            listed.push(entry.key);
        }
        pages += 1;
        let Some(last) = page.after else { break };
        // The key that the next page begins behind goes, and one comes that would lie before it; both prefixes change.
        blocks.delete(&last).await.unwrap();
        blocks.put(format!("a/!{pages}"), "before all others").await.unwrap();
        blocks.put(format!("b/!{pages}"), "of the other prefix").await.unwrap();
        after = Some(last);
    }
    assert!(pages >= 4, "{pages} pages");
    assert!(listed.is_sorted());
    assert_eq!(listed.iter().cloned().collect::<BTreeSet<_>>(), expected);
    assert_eq!(listed.len(), expected.len(), "no key twice");
    client.close().await.unwrap();
}

/// One value to a grant and an extent, so that nothing rests until a grant's end.
#[tokio::test]
async fn a_key_that_is_replaced_more_often_than_there_is_room_for_keeps_one_version_and_the_memory_of_the_others_comes_back()
 {
    const REGION: u64 = 1 << 20;
    let cluster = TestCluster::start_small(1, REGION).await;
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 1, None).await;
    let room = REGION / extent_bytes(REGION);
    let (mut version, mut written) = (None, 0);
    while written < room + room / 4 {
        match blocks.put_with("key", pattern(written, 50_000), PutMode::Replace).await {
            Ok(next) => {
                assert!(Some(next) > version);
                version = Some(next);
                written += 1;
            }
            // All older versions rest.
            Err(PutError::NoSpace { .. } | PutError::Deadline { .. }) => {}
            Err(other) => panic!("{other}"),
        }
        assert_eq!(blocks.stat("key").await.unwrap().map(|stat| stat.version), version);
    }
    let value = blocks.get("key").await.unwrap().unwrap();
    assert!(Some(value.version) == version && value.bytes == pattern(written - 1, 50_000));
    client.close().await.unwrap();
    soon("the memory of older versions comes back", async || {
        let space = cluster.space().await;
        let one = 50_000..100_000;
        ([space.granted, space.pinned, space.resting] == [0; 3] && one.contains(&space.committed)).then_some(())
    })
    .await;
}
