//! Followers of a silent leader stand in turn: who succeeds is known before, and when, in the time of a simulated world.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use quarry_raft::{
    Group, GroupId, Host, HostConfig, LogIndex, Machine, RaftNodeId, Role, SnapshotWriter, Timing,
    sim::{self, Disk, Net, Pace},
};
use std::{collections::BTreeMap, io, time::Duration};
use tempfile::TempDir;
use tokio::time::sleep;

const NODES: u64 = 5;
const TIMING: Timing = Timing {
    heartbeat: Duration::from_millis(100),
    election_min: Duration::from_millis(400),
    election_max: Duration::from_millis(800),
};
/// The longest way of a message is 10 ms: one there and back before an election, one for it, and two syncs.
const ELECTED_WITHIN: Duration = Duration::from_millis(60);

/// A machine without a state.
#[derive(Clone)]
struct Nothing;

impl Machine for Nothing {
    type Outcome = ();
    fn apply(&mut self, _: LogIndex, _: &[u8]) {}
    fn snapshot(&self) -> Box<dyn SnapshotWriter> {
        Box::new(Self)
    }
    fn restore(&mut self, _: &mut dyn io::Read) -> io::Result<()> {
        Ok(())
    }
    fn hash(&self) -> [u8; 32] {
        [0; 32]
    }
}

impl SnapshotWriter for Nothing {
    fn write_to(self: Box<Self>, _: &mut dyn io::Write) -> io::Result<()> {
        Ok(())
    }
}

type Groups = BTreeMap<u64, Group<Nothing>>;

/// The leader that these nodes know, once one of them leads.
async fn leader(groups: &Groups) -> u64 {
    loop {
        let leads = |(_, group): &(&u64, &Group<Nothing>)| group.status().role == Role::Leader;
        if let Some((node, _)) = groups.iter().filter(leads).max_by_key(|(_, group)| group.status().term) {
            return *node;
        }
        sleep(Duration::from_millis(1)).await;
    }
}

/// Five nodes of which the leader goes, and so many of its heirs with it: who leads then, in the order of turns, and after how long.
async fn succeeded(group: GroupId, gone: usize) -> (usize, Duration) {
    let (folder, net) = (TempDir::new().unwrap(), Net::default());
    let (mut hosts, mut groups) = (Vec::new(), Groups::new());
    for node in 1..=NODES {
        let config =
            HostConfig { timing: TIMING, ..HostConfig::new(RaftNodeId(node), folder.path().join(node.to_string())) };
        let host = Host::simulated(config, &Disk::new(Pace::default()), &net).unwrap();
        groups.insert(node, host.start_group(group, Nothing).await.unwrap());
        hosts.push(host);
    }
    let members = (1..=NODES).map(|node| (RaftNodeId(node), format!("meta-{node}:1"))).collect();
    groups[&1].initialize(members).await.unwrap();
    let first = leader(&groups).await;
    // Everybody has heard of it, and at different moments of their own beat.
    sleep(TIMING.election_max + sim::between(Duration::ZERO, TIMING.heartbeat)).await;
    assert_eq!(leader(&groups).await, first, "nothing ended its office");
    let mut heirs: Vec<u64> = (1..=NODES).filter(|node| *node != first).collect();
    let begins = group.0 as usize % heirs.len();
    heirs.rotate_left(begins);
    for node in std::iter::once(first).chain(heirs.iter().copied().take(gone)) {
        net.leave(RaftNodeId(node));
        groups.remove(&node);
    }
    let silent = sim::now();
    let next = leader(&groups).await;
    let outage = sim::now() - silent;
    for host in &hosts {
        host.shutdown().await;
    }
    (heirs.iter().position(|heir| *heir == next).unwrap(), outage)
}

#[test]
fn followers_of_a_silent_leader_stand_in_turn_and_the_first_that_is_there_succeeds() {
    for seed in 0..6_u32 {
        // Every other time the first heir is gone too.
        let gone = seed % 2;
        let group = GroupId(seed);
        let (turn, outage) = sim::run(seed.into(), false, succeeded(group, gone as usize)).result;
        assert_eq!(turn, gone as usize, "seed {seed}: after {outage:?}");
        // Drawn lots would take up to twice the longest election timeout. Followers look at the silence once in a heartbeat.
        let most = TIMING.election_max + TIMING.heartbeat / 4 + TIMING.heartbeat * (gone + 1) + ELECTED_WITHIN;
        assert!(outage <= most, "seed {seed}: {outage:?} instead of {most:?}");
    }
}
