//! Who belongs to a group and who leads it.

use std::collections::{BTreeMap, BTreeSet};

use quarry_raft::{ProposeError, RaftError, RaftNodeId};

use crate::cluster::{Cluster, command, soon, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_transfer_returns_when_the_other_node_leads() {
    let cluster = Cluster::formed(3, |config| config).await;
    cluster.write(0, 10).await;
    for _ in 0..3 {
        let from = cluster.leader().await;
        let to = cluster.nodes.keys().copied().find(|id| *id != from).unwrap();
        cluster.group(from).transfer_leader(to, soon()).await.unwrap();
        assert_eq!(cluster.group(from).status().leader.map(|(id, _)| id), Some(to));
        until("the new leader begins its term", || cluster.leader_now() == Some(to)).await;
        let refused = cluster.group(from).transfer_leader(from, soon()).await.unwrap_err();
        assert!(matches!(refused, RaftError::NotLeader { leader: Some((id, _)) } if id == to), "{refused}");
    }
    let leader = cluster.leader().await;
    let nobody = cluster.group(leader).transfer_leader(RaftNodeId(9), soon()).await.unwrap_err();
    assert!(matches!(nobody, RaftError::Membership { .. }), "{nobody}");
    cluster.write(1, 10).await;
    assert_eq!(cluster.converge().await, (0..2).collect());
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transfer_to_a_node_that_is_gone_ends_with_the_election_of_one_that_is_there() {
    let mut cluster = Cluster::formed(3, |config| config).await;
    cluster.write(0, 10).await;
    let from = cluster.leader().await;
    let others: Vec<_> = cluster.nodes.keys().copied().filter(|id| *id != from).collect();
    let [gone, left] = others[..] else { panic!("three nodes") };
    let patience = cluster.config(from).timing.election_max;
    until("both are heard", || cluster.group(from).answering(patience) == others.iter().copied().collect()).await;
    cluster.stop(gone).await;
    let refused = cluster.group(from).transfer_leader(gone, soon()).await.unwrap_err();
    assert!(matches!(refused, RaftError::NotLeader { leader: Some((id, _)) } if id == left), "{refused}");
    cluster.write(1, 10).await;
    let leader = cluster.leader().await;
    until("who is gone is not heard", || cluster.group(leader).answering(patience).len() == 1).await;
    assert_eq!(cluster.converge().await, (0..2).collect());
    until("two of three follow", || cluster.group(leader).is_followed(patience)).await;
    let left = cluster.nodes.keys().copied().find(|id| *id != leader && *id != gone).unwrap();
    cluster.stop(left).await;
    until("who is left alone is not followed", || !cluster.group(leader).is_followed(patience)).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_of_an_earlier_term_of_office_is_refused_by_the_same_leader() {
    let cluster = Cluster::formed(3, |config| config).await;
    let first = cluster.leader().await;
    let early = cluster.group(first).status().term;
    assert_eq!(cluster.group(first).propose_in(early, command(0, 10)).await.unwrap().term, early);
    let other = cluster.nodes.keys().copied().find(|id| *id != first).unwrap();
    for (from, to) in [(first, other), (other, first)] {
        cluster.group(from).transfer_leader(to, soon()).await.unwrap();
        until("the new leader begins its term", || cluster.leader_now() == Some(to)).await;
    }
    let refused = cluster.group(first).propose_in(early, command(1, 10)).await.unwrap_err();
    assert!(matches!(refused, ProposeError::NotLeader { .. }), "{refused}");
    let late = cluster.group(first).status().term;
    assert_eq!(cluster.group(first).propose_in(late, command(2, 10)).await.unwrap().term, late);
    assert_eq!(cluster.converge().await, [0, 2].into());
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_learner_catches_up_and_takes_a_voters_place() {
    let mut cluster = Cluster::formed(3, |config| config).await;
    for number in 0..20 {
        cluster.write(number, 10).await;
    }
    let new = RaftNodeId(4);
    cluster.add(new).await;
    let leader = cluster.leader().await;
    let leaves = cluster.nodes.keys().copied().find(|id| *id != leader && *id != new).unwrap();
    let addr = cluster.addrs[&new].to_string();
    cluster.group(leader).add_learner(new, addr, soon()).await.unwrap();
    let status = cluster.group(leader).status();
    assert!(!status.members[&new].voter && status.settled);
    until("the learner catches up", || cluster.group(new).with(|ledger, _| ledger.lines.len() == 20)).await;

    let voters: BTreeSet<_> = cluster.nodes.keys().copied().filter(|id| *id != leaves).collect();
    cluster.group(leader).change_members(voters.clone(), soon()).await.unwrap();
    cluster.stop(leaves).await;
    let members = cluster.group(leader).status().members;
    assert_eq!(members.iter().filter(|(_, member)| member.voter).map(|(id, _)| *id).collect::<BTreeSet<_>>(), voters);
    cluster.write(20, 10).await;
    assert_eq!(cluster.converge().await, (0..=20).collect());
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_whose_address_leads_to_another_node_gets_nothing() {
    let cluster = Cluster::start(3, |config| config).await;
    // Node 3 is said to live where node 2 does.
    let mut members: BTreeMap<_, _> = cluster.members();
    members.insert(RaftNodeId(3), members[&RaftNodeId(2)].clone());
    cluster.group(RaftNodeId(1)).initialize(members).await.unwrap();
    for number in 0..10 {
        cluster.write(number, 10).await;
    }
    let third = cluster.group(RaftNodeId(3)).status();
    assert_eq!((third.last_log, third.members.len()), (None, 0));
    let leader = cluster.leader().await;
    assert_eq!(cluster.group(leader).status().matched.get(&RaftNodeId(3)), Some(&None));
    cluster.shutdown().await;
}
