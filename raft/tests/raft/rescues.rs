//! Groups that begin again: from what one node holds, in a new generation, without those of the old one.

use std::collections::BTreeMap;
use std::io;

use quarry_raft::{FoundKind, GroupId, LogIndex, Machine, Offline, RaftError, RaftNodeId, Role, Seed, found};

use crate::cluster::{Cluster, GROUP, Ledger, soon, until};

const FIRST: RaftNodeId = RaftNodeId(1);
const SECOND: RaftNodeId = RaftNodeId(2);
const THIRD: RaftNodeId = RaftNodeId(3);
const FOURTH: RaftNodeId = RaftNodeId(4);

/// The machine of a stopped node, with all that its log holds, and the seed that follows from it.
fn replayed(offline: &Offline) -> (Ledger, Seed) {
    let mut ledger = Ledger::default();
    let snapshot = offline.state(GROUP).unwrap().map(|(last, mut bytes)| {
        ledger.restore(&mut bytes).unwrap();
        last.unwrap().index
    });
    let from = LogIndex(snapshot.map_or(0, |last| last.0 + 1));
    let seen = offline.entries::<RaftError>(GROUP, from, LogIndex(u64::MAX), |entry| {
        if let FoundKind::Command(command) = entry.kind {
            ledger.apply(entry.place.index, &command);
        }
        Ok(())
    });
    seen.unwrap();
    let last = offline.group(GROUP).unwrap().last.unwrap();
    let seed = Seed { group: GROUP, last, state: ledger.snapshot() };
    (ledger, seed)
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_that_begin_again_go_on_without_the_nodes_of_the_old_generation() {
    // A snapshot after every tenth entry, so that a state and a tail are read.
    let mut cluster = Cluster::formed(3, |mut config| {
        (config.snapshot_after_entries, config.entries_kept) = (10, 2);
        config
    })
    .await;
    for number in 0..25 {
        cluster.write(number, 100).await;
    }
    cluster.converge().await;
    for id in [FIRST, SECOND, THIRD] {
        cluster.stop(id).await;
    }
    let dir = |id: RaftNodeId| cluster.config(id).dir;
    let members: BTreeMap<RaftNodeId, String> = cluster.members().into_iter().filter(|(id, _)| *id != THIRD).collect();
    for id in [FIRST, SECOND] {
        let old = dir(id).with_extension("old");
        std::fs::rename(dir(id), &old).unwrap();
        let offline = Offline::open(&old).unwrap();
        assert_eq!((offline.node(), offline.generation()), (id, 1));
        assert_eq!(offline.groups().unwrap(), [GROUP]);
        assert_eq!(offline.group(GROUP).unwrap().members.len(), 3);
        let (ledger, seed) = replayed(&offline);
        assert_eq!(ledger.numbers(), (0..25).collect());
        found(&dir(id), id, 2, &members, vec![seed]).unwrap();
    }
    // The third comes back as it was; it has a vote in the old group, and nobody there.
    for id in [THIRD, FIRST, SECOND] {
        cluster.restart(id).await;
    }
    until("one of the two leads", || cluster.leader_now().is_some_and(|leader| leader != THIRD)).await;
    for number in 25..30 {
        cluster.write(number, 100).await;
    }
    for id in [FIRST, SECOND] {
        assert_eq!(cluster.nodes[&id].host.generation(), 2);
        until("both have all", || cluster.group(id).with(|ledger, _| ledger.numbers().len() == 30)).await;
    }
    let third = cluster.group(THIRD);
    assert_eq!(third.with(|ledger, _| ledger.numbers().len()), 25);
    assert_ne!(third.status().role, Role::Leader);

    // An empty folder belongs to no generation yet: it takes that of the cluster which it is added to, for good.
    cluster.add(FOURTH).await;
    let address = cluster.addrs[&FOURTH].to_string();
    let leader = cluster.leader().await;
    cluster.group(leader).add_learner(FOURTH, address, soon()).await.unwrap();
    until("the learner has all", || cluster.group(FOURTH).with(|ledger, _| ledger.numbers().len() == 30)).await;
    cluster.stop(FOURTH).await;
    cluster.restart(FOURTH).await;
    assert_eq!(cluster.nodes[&FOURTH].host.generation(), 2);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_state_is_frozen_at_the_index_asked_for_while_commands_go_on() {
    let cluster = Cluster::formed(1, |config| config).await;
    cluster.write(0, 10).await;
    let group = cluster.group(FIRST);
    let at = LogIndex(group.with(|_, applied| applied.0) + 3);
    let (frozen, ()) = tokio::join!(group.frozen_at(at, soon()), async {
        for number in 1..9 {
            cluster.write(number, 10).await;
        }
    });
    assert_eq!(frozen.last, at);
    let mut bytes = Vec::new();
    frozen.state.write_to(&mut bytes).unwrap();
    let mut ledger = Ledger::default();
    ledger.restore(&mut io::Cursor::new(bytes)).unwrap();
    assert_eq!(ledger.numbers(), (0..4).collect());
    // An index that was passed is answered at once, one that does not come at the deadline: both with the index that they are of.
    let now = group.with(|_, applied| applied);
    assert_eq!(group.frozen_at(at, soon()).await.last, now);
    assert_eq!(group.frozen_at(LogIndex(u64::MAX), tokio::time::Instant::now()).await.last, now);
    cluster.shutdown().await;
}

#[tokio::test]
async fn a_folder_in_use_or_without_a_node_is_not_opened() {
    let mut cluster = Cluster::start(1, |config| config).await;
    let dir = cluster.config(FIRST).dir;
    assert!(matches!(Offline::open(&dir), Err(RaftError::Locked { .. })));
    cluster.stop(FIRST).await;
    assert_eq!(Offline::open(&dir).unwrap().groups().unwrap(), [] as [GroupId; 0]);
    assert!(matches!(Offline::open(cluster.dir.path()), Err(RaftError::WrongVersion { .. })));
}
