//! Disks that are slow, broken, or somebody else's.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use quarry_raft::{DiskSync, Group, GroupId, Host, HostConfig, ProposeError, RaftError, RaftNodeId, Role};
use std::sync::{Condvar, Mutex};

use crate::cluster::{GROUP, Ledger, PATIENCE, command, soon, test_config, until};

#[derive(Clone, Copy, PartialEq)]
enum Mood {
    Well,
    Stuck,
    Broken,
}

/// A disk whose syncs can be held up or made to fail.
struct MoodyDisk {
    mood: Mutex<Mood>,
    changed: Condvar,
    asked: std::sync::atomic::AtomicU64,
}

impl MoodyDisk {
    fn new() -> Arc<Self> {
        Arc::new(Self { mood: Mutex::new(Mood::Well), changed: Condvar::new(), asked: 0.into() })
    }

    fn set(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
        self.changed.notify_all();
    }

    fn asked(&self) -> u64 {
        self.asked.load(std::sync::atomic::Ordering::SeqCst)
    }
}

impl DiskSync for MoodyDisk {
    fn sync_data(&self, file: &File) -> io::Result<()> {
        self.asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let mood = self.mood.lock().unwrap();
        let (mood, waited) =
            self.changed.wait_timeout_while(mood, Duration::from_secs(60), |mood| *mood == Mood::Stuck).unwrap();
        assert!(!waited.timed_out(), "nobody let the disk go on");
        match *mood {
            Mood::Broken => Err(io::Error::other("the medium is gone")),
            Mood::Well | Mood::Stuck => file.sync_data(),
        }
    }
}

async fn alone(disk: Arc<MoodyDisk>, dir: &std::path::Path) -> (Host, Group<Ledger>) {
    let host = Host::open(HostConfig { disk, ..test_config(RaftNodeId(1), dir) }).await.unwrap();
    let group = leading(&host, GROUP).await;
    (host, group)
}

/// A group of this host alone, which it leads.
async fn leading(host: &Host, id: GroupId) -> Group<Ledger> {
    let group = host.start_group(id, Ledger::default()).await.unwrap();
    group.initialize(BTreeMap::from([(RaftNodeId(1), "127.0.0.1:1".to_owned())])).await.unwrap();
    until("a leader", || group.status().leader_since.is_some()).await;
    group
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acknowledgement_waits_for_the_sync_of_the_log() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), MoodyDisk::new());
    let (host, group) = alone(Arc::clone(&disk), dir.path()).await;
    group.propose(command(1, 10)).await.unwrap();

    disk.set(Mood::Stuck);
    let asked = disk.asked();
    let mut write = Box::pin(tokio::spawn({
        let group = group.clone();
        async move { group.propose(command(2, 10)).await }
    }));
    until("a sync is asked for", || disk.asked() > asked).await;
    // The entry is in the log by now at the latest; only the sync is missing.
    until("the entry is in the log", || group.status().last_log > group.status().applied).await;
    assert!((&mut write).now_or_never().is_none());
    assert!(!group.with(|ledger, _| ledger.lines.contains_key(&2)), "applied before it was durable on a majority");
    disk.set(Mood::Well);
    write.await.unwrap().unwrap();
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_sync_is_never_acknowledged_and_ends_the_groups_service() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), MoodyDisk::new());
    let (host, group) = alone(Arc::clone(&disk), dir.path()).await;
    group.propose(command(1, 10)).await.unwrap();

    disk.set(Mood::Broken);
    let failed = group.propose(command(2, 10)).await;
    assert!(matches!(failed, Err(ProposeError::Indeterminate { .. })), "{failed:?}");
    until("the group has stopped", || group.status().role == Role::Stopped).await;
    assert!(group.status().fault.is_some_and(|why| why.contains("the medium is gone")));
    assert!(host.fault().is_some_and(|why| why.contains("the medium is gone")));

    // A disk that is well again changes nothing: what it lost, it lost.
    disk.set(Mood::Well);
    let asked = disk.asked();
    assert_eq!(group.propose(command(3, 10)).await, Err(ProposeError::ShuttingDown));
    assert_eq!(group.propose(command(4, 10)).await, Err(ProposeError::ShuttingDown));
    assert_eq!(disk.asked(), asked, "a failed sync was tried again");
    assert!(!group.with(|ledger, _| ledger.lines.contains_key(&2)));
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_sync_stops_every_group_of_the_host_also_those_without_a_write() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), MoodyDisk::new());
    let (host, busy) = alone(Arc::clone(&disk), dir.path()).await;
    let idle = leading(&host, GroupId(7)).await;
    let mut failed = Box::pin(host.failed());
    assert!((&mut failed).now_or_never().is_none(), "a disk that works has not failed");

    disk.set(Mood::Broken);
    busy.propose(command(1, 10)).await.unwrap_err();
    let why = tokio::time::timeout(PATIENCE, failed).await.expect("the fault is told");
    assert!(why.contains("the medium is gone"), "{why}");
    for group in [&busy, &idle] {
        // Nothing is written any more: only the host can have stopped the idle group.
        let stopped = async { group.watch().wait_for(|it| it.role == Role::Stopped).await.map(|it| it.clone()) };
        let status = tokio::time::timeout(PATIENCE, stopped).await.expect("no group goes on leading").unwrap();
        assert!(status.fault.is_some_and(|why| why.contains("the medium is gone")));
        assert_eq!(status.leader, None);
        assert!(group.read_index(soon()).await.is_err(), "it still answers for the group");
    }
    let late = host.start_group(GroupId(8), Ledger::default()).await.map(drop);
    assert!(matches!(late, Err(RaftError::Failed { .. })), "{late:?}");
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_is_for_one_process_one_node_and_one_format() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a/b");
    let host = Host::open(test_config(RaftNodeId(1), &path)).await.unwrap();
    let locked = Host::open(test_config(RaftNodeId(1), &path)).await.unwrap_err();
    assert!(matches!(locked, RaftError::Locked { .. }), "{locked}");
    host.shutdown().await;

    let foreign = Host::open(test_config(RaftNodeId(2), &path)).await.unwrap_err();
    let (expected, found) = (RaftNodeId(2), RaftNodeId(1));
    assert!(matches!(&foreign, RaftError::WrongNode { expected: e, found: f, .. } if (*e, *f) == (expected, found)));

    std::fs::write(path.join("FORMAT"), "quarry-raft 3\nnode 1\n").unwrap();
    let newer = Host::open(test_config(RaftNodeId(1), &path)).await.unwrap_err();
    assert!(matches!(&newer, RaftError::WrongVersion { found, .. } if found == "quarry-raft 3"), "{newer}");
    std::fs::remove_file(path.join("FORMAT")).unwrap();
    let unnamed = Host::open(test_config(RaftNodeId(1), &path)).await.unwrap_err();
    assert!(matches!(unnamed, RaftError::WrongVersion { .. }), "{unnamed}");
}

#[tokio::test]
async fn settings_that_cannot_work_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = test_config(RaftNodeId(1), dir.path());
    config.timing.heartbeat = config.timing.election_min;
    let refused = Host::open(config).await.unwrap_err();
    assert!(matches!(refused, RaftError::Settings { .. }), "{refused}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
