//! A leader that is stopped for ten seconds, and wakes up deposed (*Leases hold*, *Linearizable*).

use quarry_client::PutMode;
use quarry_proto::v1;
use quarry_tests::{
    Signal, TestCluster, calls,
    cluster::{SHARD, create_namespace},
    raw::{RawWriter, Wish},
    rounds::rounds,
    seed::pattern,
    soon,
    wait::PATIENCE,
};
use quarry_wire::{
    ids::NodeId,
    limits::{EXTENT_BYTES, QUARANTINE},
};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

const STOPPED: Duration = Duration::from_secs(10);
const NODE: NodeId = NodeId(101);
/// Questions that lie before the stopped leader when it wakes up.
const QUESTIONS: usize = 20;
/// The whole slab is one slot: an extent.
const SLOT: u32 = 64 << 20;

/// Without the read index, a leader that wakes up answers from its old state; without the horizon that the next leader inherits, memory under a
/// lease of the old one is granted early.
#[tokio::test]
async fn a_leader_stopped_for_ten_seconds_answers_nothing_stale_and_its_leases_outlive_it() {
    let mut cluster = TestCluster::start_with(|spec| {
        spec.data_nodes = 1;
        spec.region_bytes = vec![1 << 30];
        // The stopped leader is asked by hand.
        spec.plaintext = true;
    })
    .await;
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 1, None).await;
    let wish = Wish {
        namespace: blocks.info().id,
        slot_size: SLOT,
        slots: 1,
        ttl: Duration::from_secs(30),
        avoid: Vec::new(),
    };
    for round in 0..rounds(1) {
        let mut raw = cluster.raw().await;
        let key = format!("key-{round}");
        let (granted, frame) = committed(&mut raw, &wish, &key).await;
        let base = granted.grant.holders[0].base.0;
        let leader = cluster.leader(SHARD, PATIENCE).await.unwrap();
        // A lease, counted from before it was asked for.
        let sent = Instant::now();
        let resolved = ask(&cluster.address(leader), &blocks, &key).await.unwrap();
        assert_eq!(resolved.items[0].version, Some(frame.version.into()));
        let lease = Duration::from_millis(resolved.lease_ms.into());
        assert!(lease > Duration::from_secs(1), "a lease was given: {lease:?}");
        cluster.kill(leader, Signal::STOP).await.unwrap();
        let stopped = Instant::now();
        // Asked while it sleeps; it finds them when it wakes up.
        let address = cluster.address(leader);
        raw.pass_over(&address);
        let waiting: Vec<_> = (0..QUESTIONS)
            .map(|_| {
                let (address, blocks, key) = (address.clone(), blocks.clone(), key.clone());
                tokio::spawn(async move { ask(&address, &blocks, &key).await })
            })
            .collect();
        // The cluster goes on, and the old version's memory is free for whoever comes: but not before the lease of the stopped leader is over.
        let deleted = raw.delete(blocks.info().id, &[&key]).await.unwrap();
        assert_eq!(deleted.outcomes[0].version, Some(frame.version.into()), "{deleted:?}");
        let mut others = Vec::new();
        // It is the last place to be granted, since a lane to it may still be open.
        let again = soon("the deleted value's memory is granted again", async || {
            let next = raw.grant(&wish).await.ok()?;
            let found = next.grant.holders[0].base.0 == base;
            others.push(next);
            found.then(Instant::now)
        })
        .await;
        assert!(again >= sent + lease + QUARANTINE, "granted again {:?} after a lease of {lease:?}", again - sent);
        for other in others {
            raw.seal(&other, 0).await.unwrap();
        }
        let newer = blocks.put_with(&key, pattern(round as u64, 3_000), PutMode::Create).await.unwrap();
        sleep_until(stopped + STOPPED).await;
        cluster.resume(leader).await.unwrap();
        for answer in waiting {
            // Whatever it says, it does not say the old version.
            if let Ok(reply) = answer.await.unwrap() {
                assert_eq!(reply.items[0].version, Some(newer.into()), "a stale answer");
            }
        }
        cluster.wait_ready(PATIENCE).await.unwrap();
        assert!(blocks.fresh().get(&key).await.unwrap().unwrap().version == newer);
    }
    client.close().await.unwrap();
    cluster.agree().await;
}

/// A value that fills an extent, of which only the beginning is written.
async fn committed(
    raw: &mut RawWriter,
    wish: &Wish,
    key: &str,
) -> (quarry_tests::raw::Granted, quarry_tests::raw::Framed) {
    assert_eq!(u64::from(SLOT), EXTENT_BYTES);
    let granted = raw.grant(wish).await.unwrap();
    let armed = raw.arm_all(&granted).await;
    let frame = raw.frame(&granted, 0, key, &pattern(7, 1_000));
    raw.write_frame(&granted, &armed, &frame).await;
    let outcomes = raw.commit(NODE, &granted, [NODE], vec![frame.entry.clone()]).await.unwrap();
    assert_eq!(outcomes[0].code(), v1::commit_outcome::Code::Committed, "{outcomes:?}");
    raw.seal(&granted, 1).await.unwrap();
    raw.close(NODE, &granted).await.unwrap();
    (granted, frame)
}

/// Asks one meta node for a key, fresh and with the longest lease.
async fn ask(address: &str, blocks: &quarry_client::Namespace, key: &str) -> calls::Answer<v1::ResolveReply> {
    let asked = v1::ResolveRequest {
        shard: SHARD,
        namespace: blocks.info().id.0,
        keys: vec![key.to_owned().into()],
        lease_ms: 5_000,
        stale: false,
        seen: None,
    };
    // Longer than the leader is stopped.
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).expect("an address");
    let channel = endpoint.connect().await.map_err(|wrong| tonic::Status::unavailable(wrong.to_string()))?;
    let announced = tonic::service::interceptor::InterceptedService::new(channel, quarry_proto::protocol::Announce);
    let mut control = v1::control_client::ControlClient::new(announced);
    calls::done(async {
        // It may sleep for as long as we are patient with the others, and some more.
        tokio::time::timeout(PATIENCE * 2, control.resolve(asked)).await.expect("it answers when it wakes up")
    })
    .await
}
