//! What many groups cost while nobody asks anything of them.

use std::collections::BTreeMap;
use std::time::Duration;

use quarry_raft::{Group, GroupId, Host, RaftNodeId, Role, Timing};
use tokio::net::TcpListener;
use tokio::time::sleep;
use tonic::transport::server::TcpIncoming;

use crate::cluster::{Ledger, command, soon, test_config, until};

/// Three hosts in this process, each with all groups.
struct Crowd {
    _dir: tempfile::TempDir,
    hosts: Vec<Host>,
    /// By node, then by number.
    groups: Vec<Vec<Group<Ledger>>>,
}

impl Crowd {
    /// Formed at one node after the other, so that leaders are spread.
    async fn form(count: u32, timing: Timing) -> Self {
        Self::form_at(count, timing, |group| group % 3).await
    }

    /// Each group formed at the node that `at` names, which leads it first.
    async fn form_at(count: u32, timing: Timing, at: impl Fn(usize) -> usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (mut hosts, mut groups, mut members) = (Vec::new(), Vec::new(), BTreeMap::new());
        for id in (1..=3).map(RaftNodeId) {
            let mut config = test_config(id, dir.path().join(format!("node-{id}")));
            config.timing = timing;
            let host = Host::open(config).await.unwrap();
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            members.insert(id, listener.local_addr().unwrap().to_string());
            let server = tonic::transport::Server::builder()
                .add_service(host.service())
                .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)));
            tokio::spawn(server);
            let mut here = Vec::new();
            for group in 0..count {
                here.push(host.start_group(GroupId(group), Ledger::default()).await.unwrap());
            }
            hosts.push(host);
            groups.push(here);
        }
        for group in 0..count as usize {
            groups[at(group)][group].initialize(members.clone()).await.unwrap();
        }
        let crowd = Self { _dir: dir, hosts, groups };
        until("leaders of all groups", || crowd.leaders().iter().all(Option::is_some)).await;
        crowd
    }

    /// The node that leads each group and its term.
    fn leaders(&self) -> Vec<Option<(usize, u64)>> {
        let leads = |group: usize| {
            let statuses = self.groups.iter().map(|here| here[group].status()).enumerate();
            let led = statuses.filter(|(_, status)| status.role == Role::Leader && status.leader_since.is_some());
            led.map(|(node, status)| (node, status.term.0)).next()
        };
        (0..self.groups[0].len()).map(leads).collect()
    }

    async fn shutdown(self) {
        for host in self.hosts {
            host.shutdown().await;
        }
    }
}

/// Time on a processor of this process so far, in hundredths of a second.
fn ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// What a meta node is configured with if nobody says otherwise.
const USUAL: Timing = Timing {
    heartbeat: Duration::from_millis(200),
    election_min: Duration::from_millis(600),
    election_max: Duration::from_millis(1_200),
};

/// `cargo test --release -p quarry-raft --test raft -- --ignored --nocapture idle`
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures for a minute on a quiet machine"]
async fn what_idle_groups_cost() {
    for count in [1, 9, 65, 257] {
        let crowd = Crowd::form(count, USUAL).await;
        sleep(Duration::from_secs(2)).await;
        let (leaders, before) = (crowd.leaders(), ticks());
        sleep(Duration::from_secs(10)).await;
        let (moved, used) = (leaders != crowd.leaders(), ticks() - before);
        let percent = used / 10;
        eprintln!("{count} groups: {percent}.{} % of one core, all three nodes; leaders moved: {moved}", used % 10);
        crowd.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures for a minute on a quiet machine"]
async fn how_long_groups_are_without_a_leader_when_a_node_dies() {
    let mut outages = Vec::new();
    for _ in 0..8 {
        let mut crowd = Crowd::form(9, USUAL).await;
        let dead = crowd.leaders()[0].expect("formed").0;
        let led: Vec<usize> =
            (0..9).filter(|group| crowd.leaders()[*group].is_some_and(|(node, _)| node == dead)).collect();
        crowd.groups.remove(dead);
        crowd.hosts.remove(dead).shutdown().await;
        let began = tokio::time::Instant::now();
        let mut waiting = led;
        while !waiting.is_empty() {
            waiting.retain(|group| {
                let back = crowd.leaders()[*group].is_some();
                if back {
                    outages.push(began.elapsed());
                }
                !back
            });
            sleep(Duration::from_millis(2)).await;
        }
        crowd.shutdown().await;
    }
    outages.sort();
    let at = |part: usize| outages[(outages.len() - 1) * part / 100];
    eprintln!("{} groups lost their leader: p50 {:?}, p90 {:?}, longest {:?}", outages.len(), at(50), at(90), at(100));
}

#[tokio::test(flavor = "multi_thread")]
async fn when_a_node_with_a_third_of_many_leaderships_dies_every_group_has_a_leader_again() {
    const COUNT: u32 = 9;
    let mut crowd = Crowd::form(COUNT, test_config(RaftNodeId(1), "unused").timing).await;
    let leaders = crowd.leaders();
    let dead = leaders[0].expect("formed").0;
    crowd.hosts.remove(dead).shutdown().await;
    crowd.groups.remove(dead);
    until("new leaders", || crowd.leaders().iter().all(Option::is_some)).await;
    for (number, group) in (0..).zip(0..COUNT as usize) {
        let deadline = soon();
        loop {
            let (leader, _) = crowd.leaders()[group].unwrap_or((0, 0));
            if crowd.groups[leader][group].propose(command(number, 8)).await.is_ok() {
                break;
            }
            assert!(tokio::time::Instant::now() < deadline, "group {group} takes nothing");
            sleep(Duration::from_millis(5)).await;
        }
    }
    crowd.shutdown().await;
}

/// Time has to pass here: it is what would bring an election about.
#[tokio::test(flavor = "multi_thread")]
async fn no_group_elects_and_no_log_grows_while_nobody_asks_anything() {
    const COUNT: u32 = 9;
    let timing = Timing {
        heartbeat: Duration::from_millis(100),
        election_min: Duration::from_millis(1_500),
        election_max: Duration::from_millis(2_000),
    };
    let crowd = Crowd::form(COUNT, timing).await;
    let logs = || crowd.groups.iter().flatten().map(|group| group.status().last_log).collect::<Vec<_>>();
    until("all followers have what the leaders have", || logs().iter().all(|last| *last == logs()[0])).await;
    let (leaders, before) = (crowd.leaders(), logs());
    sleep(2 * timing.election_max).await;
    assert_eq!((crowd.leaders(), logs()), (leaders.clone(), before));
    for (group, leader) in leaders.iter().enumerate() {
        let followers = (0..3).filter(|node| Some(*node) != leader.map(|(node, _)| node));
        let silent = followers.map(|node| crowd.groups[node][group].silence()).max().unwrap();
        assert!(silent < timing.election_min, "group {group}: a follower has heard nothing for {silent:?}");
    }
    crowd.shutdown().await;
}

/// More than tokio lets one task begin without giving way (128).
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_leads_two_hundred_groups_is_heard_in_all_of_them() {
    const COUNT: u32 = 200;
    let timing = Timing {
        heartbeat: Duration::from_millis(100),
        election_min: Duration::from_secs(5),
        election_max: Duration::from_secs(6),
    };
    let crowd = Crowd::form_at(COUNT, timing, |_| 0).await;
    let leaders = crowd.leaders();
    assert!(leaders.iter().all(|leader| leader.is_some_and(|(node, _)| node == 0)), "{leaders:?}");
    // A follower that was spoken to is silent for less long than it was before.
    let mut heard = vec![(Duration::ZERO, 0); 2 * COUNT as usize];
    until("three heartbeats at every follower", || {
        for (silence, (before, beats)) in crowd.groups[1..].iter().flatten().map(Group::silence).zip(&mut heard) {
            *beats += u32::from(silence < *before);
            *before = silence;
        }
        heard.iter().all(|(_, beats)| *beats >= 3)
    })
    .await;
    assert_eq!(crowd.leaders(), leaders);
    crowd.shutdown().await;
}
