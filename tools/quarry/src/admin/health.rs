//! How a cluster does, as its meta nodes' answers show it: in one word, and in a sentence for each thing that is wrong.

use super::{CallError, DIRECTORY, leader_of};
use quarry_proto::v1;
use quarry_wire::ids::NodeId;
use serde::Serialize;
use std::collections::BTreeSet;

/// The role of a group whose disk or log failed on a node.
const STOPPED: &str = "stopped";

/// Part of the silence after which a data node is declared dead: longer, and it is late. By default three heartbeats and three seconds of ten, so
/// that one that is lost changes nothing.
const LATE_TENTHS: u64 = 3;
/// However soon it is declared dead, it is not late before.
const LATE_MS_MIN: u64 = 1_000;
/// If nobody says when it is declared dead.
const LATE_MS: u64 = 3_000;

/// After how many milliseconds of silence a data node is late, by what the leader of the directory says.
#[must_use]
pub fn late_after_ms(judge: &v1::StatusReply) -> u64 {
    if judge.node_silence_ms == 0 { LATE_MS } else { (judge.node_silence_ms / 10 * LATE_TENTHS).max(LATE_MS_MIN) }
}

/// How a cluster does.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// All is well.
    Healthy,
    /// It works, but something is missing that it was made with.
    Degraded,
    /// Some group has no leader, so that nothing can be written there; or too few data nodes are in use for the values of a namespace.
    Unavailable,
}

/// How a cluster does, and why.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Health {
    /// In one word.
    pub state: State,
    /// What is wrong, one sentence each.
    pub problems: Vec<String>,
}

impl Health {
    /// Judges by the answers of all meta nodes of the cluster file, in its order.
    #[must_use]
    pub fn judge(addresses: &[String], answers: &[Result<v1::StatusReply, CallError>]) -> Self {
        let mut health = Self { state: State::Healthy, problems: Vec::new() };
        let heard: Vec<&v1::StatusReply> = answers.iter().filter_map(|answer| answer.as_ref().ok()).collect();
        for (address, answer) in addresses.iter().zip(answers) {
            match answer {
                Err(wrong) => health.add(State::Degraded, format!("meta node {wrong}")),
                Ok(reply) if reply.cluster.is_empty() => {
                    health.add(State::Degraded, format!("meta node {address} belongs to no cluster yet: bootstrap it"));
                }
                Ok(reply) if reply.draining => {
                    let led = reply.groups.iter().filter(|it| it.role == "leader").count();
                    let leads = match led {
                        0 => "it leads nothing".to_owned(),
                        led => format!("it still leads {led} of {} groups, for nobody else would", reply.groups.len()),
                    };
                    health.add(State::Degraded, format!("{} at {address} drains: {leads}", NodeId(reply.node)));
                }
                Ok(_) => {}
            }
        }
        let groups: BTreeSet<u32> = heard.iter().flat_map(|reply| reply.groups.iter().map(|it| it.group)).collect();
        if groups.is_empty() {
            health.add(State::Unavailable, "no meta node answers for any group".to_owned());
        }
        for reply in &heard {
            for stopped in reply.groups.iter().filter(|it| it.role == STOPPED) {
                let problem = format!("group {} has stopped on {}", stopped.group, NodeId(reply.node));
                health.add(State::Degraded, problem);
            }
        }
        for group in groups {
            let Some(leader) = leader_of(heard.iter().copied(), group) else {
                health.add(State::Unavailable, format!("group {group} has no leader"));
                continue;
            };
            let voters = |reply: &&v1::StatusReply| {
                let it = reply.groups.iter().find(|it| it.group == group && reply.node == leader.0)?;
                Some(it.members.iter().copied().filter(|node| !it.learners.contains(node)).collect::<BTreeSet<u64>>())
            };
            let voters = heard.iter().find_map(voters).unwrap_or_default();
            let follow = |reply: &&&v1::StatusReply| {
                let follows = |it: &v1::GroupStatus| it.group == group && it.leader == leader.0 && it.role != STOPPED;
                voters.contains(&reply.node) && reply.groups.iter().any(follows)
            };
            let size = voters.len();
            let following = heard.iter().filter(follow).count();
            if following * 2 <= size {
                let problem = format!("only {following} of {size} voters of group {group} follow {leader}");
                health.add(State::Unavailable, problem);
            }
        }
        for change in heard.iter().filter_map(|reply| reply.change_under_way.as_ref()).take(1) {
            health.note(format!("a change of members is under way: {}", change.what));
        }
        // The directory's leader is the judge of data nodes; without one nobody is.
        let judge = leader_of(heard.iter().copied(), DIRECTORY);
        let Some(judge) = heard.iter().find(|reply| Some(NodeId(reply.node)) == judge) else { return health };
        if let Some(problem) = judge.neediest.as_ref().and_then(|needy| lacks_nodes(needy, &judge.data_nodes)) {
            health.add(State::Unavailable, problem);
        }
        let is_out = |node: &&v1::DataNodeStatus| node.standing() == v1::Standing::Decommissioned;
        for node in judge.data_nodes.iter().filter(|node| !node.alive && !is_out(node)) {
            let at = format!("data node {} at {}", node.node, node.address);
            let problem = if node.revoked {
                format!(
                    "{at}: its certificate is revoked, nothing that it holds can be read; make another with quarry keys node --new-key {}, then raft-admin node rotate-key {}",
                    node.node, node.node
                )
            } else {
                format!("{at} is silent for {} ms and declared dead", node.silent_ms)
            };
            health.add(State::Degraded, problem);
        }
        let late_after = late_after_ms(judge);
        let is_late = |node: &&v1::DataNodeStatus| node.alive && node.silent_ms > late_after;
        let mut late = 0;
        for node in judge.data_nodes.iter().filter(is_late).filter(|node| !is_out(node)) {
            let silent = node.silent_ms / 1_000;
            let mut problem =
                format!("data node {} at {} does not answer: silent for {silent} s", node.node, node.address);
            // Builds before this one do not say.
            if judge.node_silence_ms > 0 {
                problem += &format!(", declared dead after {} s", judge.node_silence_ms.div_ceil(1_000));
            }
            health.add(State::Degraded, problem);
            late += usize::from(node.standing() == v1::Standing::Serving);
        }
        if late > 0
            && let Some(needy) = &judge.neediest
        {
            let serves = |node: &&v1::DataNodeStatus| node.alive && node.standing() == v1::Standing::Serving;
            let answer = judge.data_nodes.iter().filter(serves).count() - late;
            let needed = needy.least.max(1);
            if answer < needed as usize {
                let name = &needy.name;
                let problem =
                    format!("values for namespace {name} need {needed} data nodes, {answer} answer: puts may fail");
                health.add(State::Degraded, problem);
            }
        }
        health
    }

    /// Something to know that is no problem.
    fn note(&mut self, note: String) {
        self.problems.push(note);
    }

    fn add(&mut self, state: State, problem: String) {
        self.state = self.state.max(state);
        self.problems.push(problem);
    }
}

/// Why no value can be put into the namespace that needs the most data nodes; none if enough are in use.
fn lacks_nodes(needy: &v1::Namespace, nodes: &[v1::DataNodeStatus]) -> Option<String> {
    let count = |is: &dyn Fn(&v1::DataNodeStatus) -> bool| nodes.iter().filter(|node| is(node)).count();
    let in_use = count(&|node| node.alive && node.standing() == v1::Standing::Serving);
    let needed = needy.least.max(1) as usize;
    if in_use >= needed {
        return None;
    }
    let drain = count(&|node| node.alive && node.standing() == v1::Standing::Draining);
    let gone = count(&|node| !node.alive && node.standing() != v1::Standing::Decommissioned);
    let why = match (drain, gone) {
        (0, 0) => "start more".to_owned(),
        (0, gone) => format!("{gone} cannot be used now"),
        (drain, 0) => format!("{drain} drain: raft-admin node drain --undo takes that back"),
        (drain, gone) => format!("{drain} drain, {gone} cannot be used now"),
    };
    let name = &needy.name;
    Some(format!(
        "no value can be put into namespace {name}: it needs {needed} data nodes in use, there are {in_use}; {why}"
    ))
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{addresses, gone, reply},
        *,
    };

    #[test]
    fn health_tells_whole_degraded_and_leaderless_clusters_apart() {
        let well = [Ok(reply(1, "leader", 3, 1)), Ok(reply(2, "follower", 3, 1)), Ok(reply(3, "follower", 3, 1))];
        assert_eq!(Health::judge(&addresses(), &well), Health { state: State::Healthy, problems: Vec::new() });
        let one_gone = [gone(), Ok(reply(2, "leader", 4, 2)), Ok(reply(3, "follower", 4, 2))];
        assert_eq!(Health::judge(&addresses(), &one_gone).state, State::Degraded);
        let old_leader = [gone(), Ok(reply(2, "follower", 3, 1)), Ok(reply(3, "candidate", 4, 0))];
        assert_eq!(Health::judge(&addresses(), &old_leader).state, State::Unavailable);
        let lonely = [gone(), Ok(reply(2, "leader", 4, 2)), gone()];
        assert_eq!(Health::judge(&addresses(), &lonely).state, State::Unavailable);
        assert_eq!(Health::judge(&addresses(), &[gone(), gone(), gone()]).state, State::Unavailable);
    }

    #[test]
    fn learners_do_not_count() {
        let with_learner = |mut reply: v1::StatusReply| {
            for group in &mut reply.groups {
                (group.members, group.learners) = (vec![1, 2, 3, 4], vec![4]);
            }
            let meta = |node: u64| v1::MetaInfo { node, address: format!("127.0.0.1:{node}") };
            reply.metas = [1, 2, 3, 4].map(meta).to_vec();
            reply
        };
        let answers = [
            Ok(with_learner(reply(1, "leader", 3, 1))),
            Ok(with_learner(reply(2, "follower", 3, 1))),
            gone(),
            Ok(with_learner(reply(4, "learner", 3, 1))),
        ];
        assert_eq!(Health::judge(&addresses(), &answers).state, State::Degraded, "two of three voters");
        let alone =
            [Ok(with_learner(reply(1, "leader", 3, 1))), gone(), gone(), Ok(with_learner(reply(4, "learner", 3, 1)))];
        assert_eq!(Health::judge(&addresses(), &alone).state, State::Unavailable, "a learner makes no majority");
    }

    #[test]
    fn a_group_that_stopped_on_one_node_degrades_a_cluster_and_on_two_of_three_ends_its_service() {
        let mut stopped = reply(3, "follower", 3, 1);
        stopped.groups[1].role = STOPPED.to_owned();
        let mut other = reply(2, "follower", 3, 1);
        let answers = [Ok(reply(1, "leader", 3, 1)), Ok(other.clone()), Ok(stopped.clone())];
        let health = Health::judge(&addresses(), &answers);
        let problems = vec!["group 1 has stopped on node-3".to_owned()];
        assert_eq!(health, Health { state: State::Degraded, problems });
        other.groups[1].role = STOPPED.to_owned();
        let answers = [Ok(reply(1, "leader", 3, 1)), Ok(other), Ok(stopped)];
        assert_eq!(Health::judge(&addresses(), &answers).state, State::Unavailable);
    }

    #[test]
    fn a_silent_data_node_degrades_a_cluster() {
        let mut leader = reply(1, "leader", 3, 1);
        leader.data_nodes = vec![v1::DataNodeStatus { node: 101, alive: false, ..Default::default() }];
        let answers = [Ok(leader), Ok(reply(2, "follower", 3, 1)), Ok(reply(3, "follower", 3, 1))];
        let health = Health::judge(&addresses(), &answers);
        assert_eq!((health.state, health.problems.len()), (State::Degraded, 1));
    }

    #[test]
    fn a_data_node_that_missed_some_heartbeats_is_well_and_one_that_is_silent_longer_degrades_the_cluster() {
        let with = |silent_ms: [u64; 2], standing: v1::Standing| {
            let mut leader = reply(1, "leader", 3, 1);
            leader.node_silence_ms = 10_000;
            leader.neediest = Some(v1::Namespace { name: "kv".into(), copies: 2, least: 2, ..Default::default() });
            let node = |(node, silent_ms): (u64, u64)| v1::DataNodeStatus {
                node,
                address: format!("h:{node}"),
                alive: true,
                silent_ms,
                standing: if node == 102 { standing.into() } else { v1::Standing::Serving.into() },
                ..Default::default()
            };
            leader.data_nodes = (101..).zip(silent_ms).map(node).collect();
            let answers = [Ok(leader), Ok(reply(2, "follower", 3, 1)), Ok(reply(3, "follower", 3, 1))];
            Health::judge(&addresses(), &answers)
        };
        assert_eq!(with([2_900, 3_000], v1::Standing::Serving).state, State::Healthy);
        let late = with([0, 4_200], v1::Standing::Serving);
        let problems = [
            "data node 102 at h:102 does not answer: silent for 4 s, declared dead after 10 s",
            "values for namespace kv need 2 data nodes, 1 answer: puts may fail",
        ];
        assert_eq!(late, Health { state: State::Degraded, problems: problems.map(str::to_owned).to_vec() });
        let out = with([0, 4_200], v1::Standing::Decommissioned);
        assert_eq!(out.problems.len(), 1, "nobody waits for one that is out of use: {out:?}");
        assert_eq!(late_after_ms(&v1::StatusReply { node_silence_ms: 1_000, ..Default::default() }), LATE_MS_MIN);
        assert_eq!(late_after_ms(&v1::StatusReply::default()), LATE_MS);
    }

    /// Three meta nodes that are well, one of which leads and says this of data nodes, of which a namespace needs two.
    fn with_data_nodes(nodes: &[(bool, v1::Standing)]) -> Health {
        let mut leader = reply(1, "leader", 3, 1);
        leader.neediest = Some(v1::Namespace { name: "kv".into(), copies: 3, least: 2, ..Default::default() });
        let node = |(node, (alive, standing)): (u64, &(bool, v1::Standing))| v1::DataNodeStatus {
            node,
            alive: *alive,
            standing: (*standing).into(),
            ..Default::default()
        };
        leader.data_nodes = (101..).zip(nodes).map(node).collect();
        let answers = [Ok(leader), Ok(reply(2, "follower", 3, 1)), Ok(reply(3, "follower", 3, 1))];
        Health::judge(&addresses(), &answers)
    }

    #[test]
    fn a_cluster_whose_data_nodes_drain_takes_no_values_and_is_not_called_healthy() {
        use v1::Standing::{Decommissioned, Draining, Serving};
        assert_eq!(with_data_nodes(&[(true, Serving), (true, Serving)]).state, State::Healthy);
        assert_eq!(with_data_nodes(&[(true, Serving), (true, Serving), (true, Draining)]).state, State::Healthy);
        let out = with_data_nodes(&[(true, Serving), (true, Serving), (false, Decommissioned)]);
        assert_eq!(out, Health { state: State::Healthy, problems: Vec::new() }, "nobody misses one that is out of use");
        let drained = with_data_nodes(&[(true, Draining), (true, Draining)]);
        assert_eq!(drained.state, State::Unavailable);
        assert_eq!(
            drained.problems,
            [
                "no value can be put into namespace kv: it needs 2 data nodes in use, there are 0; 2 drain: raft-admin node drain --undo takes that back"
            ]
        );
        let few = with_data_nodes(&[(true, Serving), (false, Serving), (true, Draining)]);
        assert_eq!(few.state, State::Unavailable);
        assert!(few.problems[0].ends_with("there are 1; 1 drain, 1 cannot be used now"), "{few:?}");
        assert_eq!(with_data_nodes(&[]).state, State::Unavailable, "a namespace and no data node");
    }

    #[test]
    fn one_that_drains_and_leads_all_the_same_is_said_to_lead() {
        let drains = |mut it: v1::StatusReply| {
            it.draining = true;
            Ok(it)
        };
        let answers = [drains(reply(1, "leader", 3, 1)), drains(reply(2, "follower", 3, 1)), gone()];
        let health = Health::judge(&addresses(), &answers);
        assert!(health.problems[0].contains("still leads 2 of 2 groups"), "{health:?}");
        assert!(health.problems[1].contains("leads nothing"), "{health:?}");
    }
}
