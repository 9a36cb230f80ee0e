//! Groups: elections, proposals, reads, snapshots.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use quarry_raft::{
    GroupId, Host, HostConfig, LogIndex, MAX_COMMAND_BYTES, Machine, ProposeError, RaftError, RaftNodeId, ReadError,
    Role,
};

use crate::cluster::{Cluster, Ledger, command, soon, test_config, until};

fn as_it_is(config: HostConfig) -> HostConfig {
    config
}

fn small_snapshots(config: HostConfig) -> HostConfig {
    HostConfig { snapshot_after_entries: 40, entries_kept: 5, ..config }
}

#[tokio::test(flavor = "multi_thread")]
async fn three_nodes_go_on_without_their_leader_and_it_catches_up_from_its_disk() {
    let mut cluster = Cluster::formed(3, as_it_is).await;
    for number in 0..20 {
        cluster.write(number, 100).await;
    }
    let first = cluster.leader().await;
    let term = cluster.group(first).status().term;
    cluster.stop(first).await;
    for number in 20..40 {
        cluster.write(number, 100).await;
    }
    let second = cluster.leader().await;
    assert_ne!(first, second);
    assert!(cluster.group(second).status().term > term);

    cluster.restart(first).await;
    // What was known to be committed was applied before the group was handed out.
    assert!(cluster.group(first).with(|ledger, _| ledger.lines.len()) >= 10);
    assert_eq!(cluster.nodes[&first].restored.load(Ordering::SeqCst), 0);
    for number in 40..60 {
        cluster.write(number, 100).await;
    }
    assert_eq!(cluster.converge().await, (0..60).collect());
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_that_lags_behind_the_log_gets_a_snapshot_installed() {
    let mut cluster = Cluster::formed(3, small_snapshots).await;
    cluster.write(0, 9_000).await;
    let late = cluster.nodes.keys().copied().find(|id| Some(*id) != cluster.leader_now()).unwrap();
    cluster.stop(late).await;
    // Over two megabytes, so that the snapshot travels in several chunks.
    for number in 1..300 {
        cluster.write(number, 9_000).await;
    }
    let leader = cluster.leader().await;
    until("the leader drops the beginning of its log", || {
        cluster.group(leader).status().purged.is_some_and(|purged| purged > LogIndex(100))
    })
    .await;

    cluster.restart(late).await;
    assert!(cluster.group(late).with(|ledger, _| ledger.lines.len()) < 300);
    assert_eq!(cluster.converge().await, (0..300).collect());
    assert_eq!(cluster.nodes[&late].restored.load(Ordering::SeqCst), 1, "it caught up without a snapshot");

    // Its own disk now brings all of it back.
    cluster.stop(late).await;
    cluster.restart(late).await;
    assert!(cluster.nodes[&late].restored.load(Ordering::SeqCst) >= 1);
    cluster.write(300, 9_000).await;
    assert_eq!(cluster.converge().await, (0..=300).collect());
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_restarts_from_its_snapshot_and_the_log_behind_it_before_it_is_handed_out() {
    let mut cluster = Cluster::formed(1, small_snapshots).await;
    let node = RaftNodeId(1);
    for number in 0..150 {
        cluster.write(number, 50).await;
    }
    until("a snapshot", || cluster.group(node).status().snapshot.is_some()).await;
    let hash = cluster.group(node).with(|ledger, _| ledger.hash());
    cluster.stop(node).await;
    cluster.restart(node).await;
    assert_eq!(cluster.nodes[&node].restored.load(Ordering::SeqCst), 1);
    assert_eq!(cluster.group(node).with(|ledger, _| ledger.hash()), hash);
    let status = cluster.group(node).status();
    assert_eq!(status.leader_since, None, "leads without an election");
    assert_eq!((status.members.len(), status.applied), (1, status.committed));
    assert!(status.applied >= Some(LogIndex(100)) && status.snapshot.is_some() && status.purged.is_some());
    cluster.leader().await;
    assert!(cluster.group(node).status().leader_since > Some(LogIndex(150)));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_sees_every_write_that_was_acknowledged_before_it() {
    let cluster = Cluster::formed(3, as_it_is).await;
    for number in 0..30 {
        let written = cluster.write(number, 10).await;
        let leader = cluster.leader().await;
        let group = cluster.group(leader);
        let reads = (0..8).map(|_| {
            let group = group.clone();
            tokio::spawn(async move {
                let read = group.read_index(soon()).await?;
                Ok::<_, ReadError>((read, group.with(|ledger, applied| (ledger.lines.contains_key(&number), applied))))
            })
        });
        for read in reads.collect::<Vec<_>>() {
            let (read, (seen, applied)) = read.await.unwrap().unwrap();
            assert!(seen && read >= written.index && applied >= read);
        }
    }
    let leader = cluster.leader().await;
    let addr = cluster.addrs[&leader].to_string();
    for (id, node) in cluster.nodes.iter().filter(|(id, _)| **id != leader) {
        until("followers know their leader", || node.group.status().leader.is_some()).await;
        let expected = ReadError::NotLeader { leader: Some((leader, addr.clone())) };
        assert_eq!(node.group.read_index(soon()).await, Err(expected), "node {id}");
        let refused = node.group.propose(command(1_000, 8)).await;
        assert_eq!(refused, Err(ProposeError::NotLeader { leader: Some((leader, addr.clone())) }));
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_without_a_majority_confirms_no_read_and_acknowledges_no_write() {
    let mut cluster =
        Cluster::formed(3, |config| HostConfig { propose_deadline: std::time::Duration::from_secs(3), ..config }).await;
    cluster.write(0, 10).await;
    let leader = cluster.leader().await;
    // Somebody writes on while it loses them: what it took into its log then it cannot tell the fate of.
    let group = cluster.group(leader).clone();
    let writing = tokio::spawn(async move {
        for number in 10_000.. {
            if let Err(error) = group.propose(command(number, 10)).await {
                return (number, error);
            }
        }
        unreachable!("there are more numbers than a test has time for")
    });
    for id in cluster.nodes.keys().copied().filter(|id| *id != leader).collect::<Vec<_>>() {
        cluster.stop(id).await;
    }
    let (number, unknown) = writing.await.unwrap();
    assert!(matches!(unknown, ProposeError::Indeterminate { .. }), "{unknown:?}");
    assert!(!cluster.group(leader).with(|ledger, _| ledger.lines.contains_key(&number)));
    let read = cluster.group(leader).read_index(soon()).await;
    assert!(matches!(read, Err(ReadError::NoQuorum { .. } | ReadError::NotLeader { .. })), "{read:?}");
    let write = cluster.group(leader).propose(command(1, 10)).await;
    assert!(matches!(write, Err(ProposeError::Indeterminate { .. } | ProposeError::NotLeader { .. })), "{write:?}");
    assert!(!cluster.group(leader).with(|ledger, _| ledger.lines.contains_key(&1)));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_groups_on_one_host_are_independent() {
    let mut cluster = Cluster::formed(1, small_snapshots).await;
    let node = RaftNodeId(1);
    let host = cluster.nodes[&node].host.clone();
    let other = host.start_group(GroupId(7), Ledger::default()).await.unwrap();
    let again = host.start_group(GroupId(7), Ledger::default()).await.unwrap_err();
    assert!(matches!(again, RaftError::AlreadyStarted { group: GroupId(7) }));
    assert_eq!(other.status().role, Role::Learner);
    for number in 0..100 {
        cluster.write(number, 50).await;
    }
    assert_eq!(other.with(|ledger, applied| (ledger.lines.len(), applied)), (0, LogIndex(0)));
    other.initialize(cluster.members()).await.unwrap();
    until("a leader of the other group", || other.status().leader_since.is_some()).await;
    let first = other.propose(command(5_000, 50)).await.unwrap();
    assert_eq!(first.outcome, 1);
    assert!(first.index < LogIndex(10));
    cluster.write(100, 50).await;
    cluster.stop(node).await;

    let host = Host::open(cluster.config(node)).await.unwrap();
    let other = host.start_group(GroupId(7), Ledger::default()).await.unwrap();
    let first = host.start_group(GroupId(0), Ledger::default()).await.unwrap();
    until("both recovered", || other.status().leader_since.is_some() && first.status().leader_since.is_some()).await;
    assert_eq!(other.with(|ledger, _| ledger.numbers()), [5_000].into());
    assert_eq!(first.with(|ledger, _| ledger.numbers()), (0..=100).collect());
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_over_the_limit_are_refused_and_those_at_it_never_leave_the_synced_file() {
    let mut cluster = Cluster::formed(3, as_it_is).await;
    let leader = cluster.leader().await;
    let too_large = cluster.group(leader).propose(command(0, MAX_COMMAND_BYTES + 1)).await;
    let expected = ProposeError::TooLarge { bytes: MAX_COMMAND_BYTES + 1, limit: MAX_COMMAND_BYTES };
    assert_eq!(too_large, Err(expected));
    for number in 0..150 {
        cluster.write(number, MAX_COMMAND_BYTES).await;
    }
    assert_eq!(cluster.converge().await, (0..150).collect());
    for id in 1..=3 {
        let blobs = cluster.dir.path().join(format!("node-{id}/log/blobs"));
        assert_eq!(std::fs::read_dir(blobs).unwrap().count(), 0, "node {id} has pages in files that are never synced");
    }
    let follower = cluster.nodes.keys().copied().find(|id| *id != cluster.leader_now().unwrap()).unwrap();
    cluster.stop(follower).await;
    cluster.restart(follower).await;
    assert_eq!(cluster.converge().await, (0..150).collect());
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_commands_proposed_together_have_an_outcome_each_in_their_order() {
    let cluster = Cluster::formed(3, as_it_is).await;
    let leader = cluster.leader().await;
    let results = cluster.group(leader).propose_many((0..50).map(|number| command(number, 20)).collect()).await;
    let outcomes: Vec<usize> = results.into_iter().map(|result| result.unwrap().outcome).collect();
    assert_eq!(outcomes, (1..=50).collect::<Vec<_>>());
    let refused = cluster.group(leader).propose_many(vec![command(90, 20), command(91, 100_000)]).await;
    assert!(refused.iter().all(|result| matches!(result, Err(ProposeError::TooLarge { .. }))));
    assert_eq!(cluster.converge().await, (0..50).collect());
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_is_formed_once_and_by_a_member() {
    let cluster = Cluster::formed(1, as_it_is).await;
    let node = RaftNodeId(1);
    let again = cluster.group(node).initialize(cluster.members()).await.unwrap_err();
    assert!(matches!(again, RaftError::AlreadyInitialized { .. }), "{again}");
    cluster.shutdown().await;

    let dir = tempfile::tempdir().unwrap();
    let host = Host::open(test_config(RaftNodeId(4), dir.path())).await.unwrap();
    let group = host.start_group(GroupId(0), Ledger::default()).await.unwrap();
    assert!(!group.is_initialized());
    let left_out = group.initialize(BTreeMap::from([(RaftNodeId(1), "127.0.0.1:1".to_owned())])).await.unwrap_err();
    assert!(matches!(left_out, RaftError::NotAMember { node: RaftNodeId(4), .. }), "{left_out}");
    host.shutdown().await;
    let late = host.start_group(GroupId(1), Ledger::default()).await.unwrap_err();
    assert!(matches!(late, RaftError::ShuttingDown), "{late}");
    assert_eq!(group.propose(command(1, 8)).await, Err(ProposeError::ShuttingDown));
    assert_eq!(group.read_index(soon()).await, Err(ReadError::ShuttingDown));
}
