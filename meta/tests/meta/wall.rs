//! Meta nodes whose wall clocks are wrong (*Log time only creeps*, *Leases hold*).

use crate::{
    cluster::{Cluster, Node},
    player::{DataNode, Writer, entry, wall_ms},
};
use quarry_meta::WallClock;
use quarry_proto::{
    refusal::Refusal,
    v1::{self, commit_outcome::Code},
};
use quarry_wire::version::HybridClock;
use std::{
    sync::atomic::{AtomicI64, Ordering},
    time::Duration,
};
use tokio::time::Instant;

const HOUR_MS: i64 = 3_600_000;
/// How far the wall clocks of all nodes of this test are ahead.
static AHEAD_MS: AtomicI64 = AtomicI64::new(0);

#[tokio::test(flavor = "multi_thread")]
async fn wall_clocks_that_jump_an_hour_either_way_move_no_lease_grant_or_stamp_and_only_turn_versions_away() {
    let cluster = Cluster::with(1, |config| {
        config.wall = WallClock::new(|| wall_ms().saturating_add_signed(AHEAD_MS.load(Ordering::SeqCst)));
    })
    .await;
    let node = DataNode::join(&cluster, 11).await;
    let writer = Writer::new(&cluster.create_namespace("kv", 1).await);
    let grant = writer.grant(&cluster).await;
    let send = async |entry: &v1::CommitEntry| {
        let entries = [entry.clone()];
        let request = writer.publish(&grant, &entries, &[node.attest(&grant, &entries)]);
        let reply = cluster.ask(async |node: &Node| node.control().publish(request.clone()).await).await;
        reply.map(|reply| reply.outcomes[0].code())
    };
    let resolve = writer.resolve(&["key-0"], 2_000);
    let leased = async || {
        let reply = cluster.ask(async |node: &Node| node.control().resolve(resolve.clone()).await).await.unwrap();
        (reply.items[0].found, reply.lease_ms)
    };
    let began = Instant::now();
    // An entry of its own: the stamp of an earlier one would count time from before.
    assert_eq!(send(&entry(3, "key-3")).await, Ok(Code::Committed));
    let first = cluster.request(1).await.applied_ms;
    let mut last = first;
    for (slot, ahead) in (0..).zip([0, HOUR_MS, -HOUR_MS]) {
        AHEAD_MS.store(ahead, Ordering::SeqCst);
        let said = entry(slot, &format!("key-{slot}"));
        if ahead < 0 {
            // To these leaders everybody comes from the future. It is a definite answer: nothing was logged.
            let refused = send(&said).await;
            assert!(matches!(refused, Err(Refusal::VersionAhead(_))), "{refused:?}");
            AHEAD_MS.store(0, Ordering::SeqCst);
        }
        assert_eq!(send(&said).await, Ok(Code::Committed), "the grant did not expire when the clock jumped");
        AHEAD_MS.store(ahead, Ordering::SeqCst);
        assert_eq!(leased().await, (true, 2_000));
        // The log goes on at its own pace: no further than real time, and never back.
        let now = cluster.request(1).await.applied_ms;
        let elapsed = began.elapsed() + Duration::from_millis(1);
        assert!(now >= last && u128::from(now - first) <= elapsed.as_millis(), "{now} after {first} in {elapsed:?}");
        last = now;
    }
    // What a leader an hour ahead let in is from the future to one that is right, and can be replaced all the same: one tick above it.
    AHEAD_MS.store(HOUR_MS, Ordering::SeqCst);
    let far = HybridClock::at(wall_ms() + 3_000_000);
    let replace = v1::PutMode { kind: v1::put_mode::Kind::Replace.into(), expected: None };
    let future = v1::CommitEntry { clock: far.0, mode: Some(replace), ..entry(4, "key-0") };
    assert_eq!(send(&future).await, Ok(Code::Committed));
    AHEAD_MS.store(0, Ordering::SeqCst);
    let other = v1::CommitEntry { slot: 5, clock: far.0 + 5_000_000_000, ..future.clone() };
    let refused = send(&other).await;
    assert!(matches!(refused, Err(Refusal::VersionAhead(_))), "{refused:?}");
    let next = v1::CommitEntry { slot: 6, clock: far.next(wall_ms()).0, ..future };
    assert_eq!(send(&next).await, Ok(Code::Committed));
}
