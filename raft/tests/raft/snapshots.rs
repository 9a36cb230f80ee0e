//! Snapshots on their way, and what a restart reads.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use quarry_raft::{HostConfig, LogIndex, RaftNodeId, Span, StateVersions};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};

use crate::cluster::{Cluster, command, soon, until};

fn small_snapshots(config: HostConfig) -> HostConfig {
    HostConfig { snapshot_after_entries: 40, entries_kept: 5, ..config }
}

/// What passed to a node through a wire that does not hold.
#[derive(Default)]
struct Wire {
    connections: AtomicU64,
    bytes: AtomicU64,
}

/// An address that leads to `to` by connections which break after so many bytes on the way there. On one of them a byte is changed.
async fn bad_wire(to: SocketAddr, breaks_after: u64, changes_at: u64) -> (SocketAddr, Arc<Wire>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, wire) = (listener.local_addr().unwrap(), Arc::new(Wire::default()));
    let passed = Arc::clone(&wire);
    tokio::spawn(async move {
        let changed = Arc::new(AtomicU64::new(0));
        while let Ok((near, _)) = listener.accept().await {
            let Ok(far) = TcpStream::connect(to).await else { continue };
            let (wire, changed) = (Arc::clone(&passed), Arc::clone(&changed));
            wire.connections.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(async move {
                let ((mut near_read, mut near_write), (mut far_read, mut far_write)) =
                    (near.into_split(), far.into_split());
                let there = async {
                    let (mut buffer, mut count) = (vec![0; 16 << 10], 0_u64);
                    while count < breaks_after {
                        let read = near_read.read(&mut buffer).await.unwrap_or(0);
                        if read == 0 {
                            break;
                        }
                        if (count..count + read as u64).contains(&changes_at)
                            && changed.fetch_add(1, Ordering::SeqCst) == 0
                        {
                            buffer[read / 2] ^= 1;
                        }
                        count += read as u64;
                        wire.bytes.fetch_add(read as u64, Ordering::SeqCst);
                        if far_write.write_all(&buffer[..read]).await.is_err() {
                            break;
                        }
                    }
                };
                tokio::select! {
                    () = there => {}
                    _ = copy(&mut far_read, &mut near_write) => {}
                }
            });
        }
    });
    (address, wire)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_is_longer_than_any_connection_lives_arrives_piece_by_piece_and_damage_on_its_way_is_sent_again()
 {
    const LINES: u64 = 600;
    let mut cluster = Cluster::formed(1, small_snapshots).await;
    let leader = RaftNodeId(1);
    // Ten megabytes.
    for first in (0..LINES).step_by(50) {
        let commands = (first..first + 50).map(|number| command(number, 17_000)).collect();
        for result in cluster.group(leader).propose_many(commands).await {
            result.unwrap();
        }
    }
    let dropped = || cluster.group(leader).status().purged.is_some_and(|purged| purged > LogIndex(LINES - 100));
    until("the leader drops the beginning of its log", dropped).await;
    let late = RaftNodeId(2);
    cluster.add(late).await;
    let (address, wire) = bad_wire(cluster.addrs[&late], 3 << 20, 1_500_000).await;
    cluster.group(leader).add_learner(late, address.to_string(), soon()).await.unwrap();
    let all = || cluster.group(late).with(|ledger, _| ledger.lines.len() as u64 == LINES);
    until("the snapshot is there", all).await;
    assert_eq!(cluster.nodes[&late].restored.load(Ordering::SeqCst), 1);
    let (connections, bytes) = (wire.connections.load(Ordering::SeqCst), wire.bytes.load(Ordering::SeqCst));
    assert!(connections >= 4, "{connections} connections are too few for it to have broken");
    assert!(bytes < 2 * LINES * 17_000, "{bytes} bytes: what had arrived was sent again");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_applies_only_what_is_behind_the_snapshot() {
    let mut cluster = Cluster::formed(1, small_snapshots).await;
    let node = RaftNodeId(1);
    for number in 0..150 {
        cluster.write(number, 50).await;
    }
    until("a snapshot", || cluster.group(node).status().snapshot > Some(LogIndex(100))).await;
    cluster.stop(node).await;
    cluster.restart(node).await;
    let status = cluster.group(node).status();
    let behind = status.applied.unwrap().0 - status.snapshot.unwrap().0;
    let (applied, lines) = cluster.group(node).with(|it, _| (it.applied.load(Ordering::SeqCst), it.lines.len()));
    assert!(
        applied <= behind && behind < 60 && lines == 150,
        "{applied} applied, {behind} behind the snapshot, {lines}"
    );
    cluster.shutdown().await;
}

/// Node 1 is of a build that knows state version 2 and proposes version 1, node 2 of the one before it, node 3 of the one after it.
fn three_builds(config: HostConfig) -> HostConfig {
    let both = Span { since: 1, until: 3 };
    let state_versions = match config.node.0 {
        1 => StateVersions { reads: both, proposes: 1 },
        2 => StateVersions::only(1),
        _ => StateVersions { reads: both, proposes: 2 },
    };
    HostConfig { state_versions, ..small_snapshots(config) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_replicates_snapshots_and_entries_with_the_one_before_it_and_the_one_after_it() {
    let mut cluster = Cluster::formed(1, three_builds).await;
    let leader = RaftNodeId(1);
    for number in 0..100 {
        cluster.write(number, 50).await;
    }
    until("the leader drops the beginning of its log", || cluster.group(leader).status().purged.is_some()).await;
    for other in [2, 3].map(RaftNodeId) {
        cluster.add(other).await;
        let addr = cluster.addrs[&other].to_string();
        cluster.group(leader).add_learner(other, addr, soon()).await.unwrap();
    }
    cluster.write(100, 50).await;
    assert_eq!(cluster.converge().await.len(), 101);
    for other in [2, 3].map(RaftNodeId) {
        assert_eq!(cluster.nodes[&other].restored.load(Ordering::SeqCst), 1, "node {other} got a snapshot");
    }
    cluster.shutdown().await;
}
