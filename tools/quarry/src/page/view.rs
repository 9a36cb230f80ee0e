//! The cluster as the status page shows it: what the meta nodes said, put together. Pure.
//!
//! Each number is somebody's: of a group's member its own, of a shard's space its leader's (or, while it has none, of whoever applied most), of
//! a data node's silence the directory leader's. Counters are sums of `/metrics` as they are; the page makes rates of them.

use quarry::{admin, scrape::Scrape};
use quarry_meta::RegionMap;
use quarry_proto::v1;
use quarry_wire::ids::{NodeId, RegionId};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// One meta node and what was heard from it.
pub(super) struct Heard {
    pub(super) node: NodeId,
    pub(super) address: String,
    pub(super) status: Result<v1::StatusReply, String>,
    pub(super) counters: Result<Scrape, String>,
}

/// The whole cluster, as `own` and the others told it, and the memory as this node has it.
pub(super) fn cluster(own: &v1::StatusReply, heard: &[Heard], maps: &BTreeMap<RegionId, RegionMap>) -> Value {
    let mut told: Vec<&v1::StatusReply> = heard.iter().filter_map(|it| it.status.as_ref().ok()).collect();
    if told.is_empty() {
        told.push(own);
    }
    let groups: BTreeSet<u32> = told.iter().flat_map(|it| it.groups.iter().map(|group| group.group)).collect();
    let mut shards: Vec<Shard<'_>> = Vec::new();
    for group in groups.iter().copied().filter(|group| *group != admin::DIRECTORY) {
        if let Some((teller, leads)) = teller(&told, group) {
            let rows = teller.space.iter().filter(|it| it.shard == group).collect();
            shards.push(Shard { group, teller: teller.node, leads, rows });
        }
    }
    let judge = teller(&told, admin::DIRECTORY).map_or(own, |(judge, _)| judge);
    json!({
        "node": own.node,
        "cluster": hex::encode(&own.cluster),
        "generation": own.generation,
        "build": own.build,
        "change": judge.change_under_way.as_ref().map(of_change),
        "groups": groups.iter().map(|group| of_group(&told, heard, *group)).collect::<Value>(),
        "metas": heard.iter().map(of_meta).collect::<Value>(),
        "shards": shards.iter().map(of_shard).collect::<Value>(),
        "data_nodes": judge.data_nodes.iter().map(|node| of_data_node(node, &judge.space, &shards, maps)).collect::<Value>(),
    })
}

/// What a shard's space is known from.
struct Shard<'a> {
    group: u32,
    teller: u64,
    leads: bool,
    rows: Vec<&'a v1::SpaceStatus>,
}

/// Who leads a group: whom a majority of its members, itself included, takes for its leader in one term. A node that was cut off goes on calling
/// itself the leader, since it hears of no other; that is not enough.
fn leader(told: &[&v1::StatusReply], group: u32) -> Option<u64> {
    let leader = admin::leader_of(told.iter().copied(), group)?.0;
    let rows: Vec<(u64, &v1::GroupStatus)> = rows(told, group).collect();
    let (_, own) = rows.iter().find(|(node, _)| *node == leader)?;
    let voters: Vec<u64> = own.members.iter().copied().filter(|node| !own.learners.contains(node)).collect();
    let follow =
        |(node, row): &&(u64, &v1::GroupStatus)| voters.contains(node) && row.leader == leader && row.term == own.term;
    (rows.iter().filter(follow).count() > voters.len() / 2).then_some(leader)
}

/// What each node says of a group.
fn rows<'a>(told: &[&'a v1::StatusReply], group: u32) -> impl Iterator<Item = (u64, &'a v1::GroupStatus)> {
    told.iter()
        .flat_map(move |reply| reply.groups.iter().filter(move |it| it.group == group).map(|it| (reply.node, it)))
}

/// Whose word counts about a group, and whether that node leads it.
fn teller<'a>(told: &[&'a v1::StatusReply], group: u32) -> Option<(&'a v1::StatusReply, bool)> {
    let leads = leader(told, group);
    let most = || rows(told, group).max_by_key(|(_, row)| row.applied).map(|(node, _)| node);
    let node = leads.or_else(most)?;
    told.iter().find(|reply| reply.node == node).map(|reply| (*reply, leads.is_some()))
}

fn of_group(told: &[&v1::StatusReply], heard: &[Heard], group: u32) -> Value {
    let rows: BTreeMap<u64, &v1::GroupStatus> = rows(told, group).collect();
    let committed = rows.values().map(|it| it.committed).max().unwrap_or_default();
    let elections = |node: u64| {
        let counters = heard.iter().find(|it| it.node.0 == node)?.counters.as_ref().ok()?;
        Some(counters.sum("quarry_raft_leader_changes_total", &[("group", &group.to_string())]))
    };
    let members: BTreeSet<u64> =
        rows.values().flat_map(|it| it.members.iter().copied()).chain(rows.keys().copied()).collect();
    let member = |node: u64| match rows.get(&node) {
        None => json!({ "node": node, "role": null }),
        Some(it) => json!({
            "node": node,
            "role": it.role,
            "term": it.term,
            "last_log": it.last_log,
            "committed": it.committed,
            "applied": it.applied,
            "snapshot": it.snapshot,
            "lag": committed.saturating_sub(it.applied),
            "elections": elections(node),
        }),
    };
    json!({
        "group": group,
        "leader": leader(told, group),
        "term": rows.values().map(|it| it.term).max(),
        "committed": committed,
        "members": members.into_iter().map(member).collect::<Value>(),
    })
}

fn of_meta(heard: &Heard) -> Value {
    let status = heard.status.as_ref();
    json!({
        "node": heard.node.0,
        "address": heard.address,
        "build": status.ok().map(|it| &it.build),
        "draining": status.is_ok_and(|it| it.draining),
        "error": status.err(),
        "counters": heard.counters.as_ref().ok().map(counters),
        "counters_error": heard.counters.as_ref().err(),
    })
}

/// A change of the meta nodes that is under way, as the node that answered sees it.
fn of_change(change: &v1::MemberChange) -> Value {
    let wait = change.groups.iter().find(|group| !group.done);
    json!({
        "what": change.what,
        "comes": (change.comes != 0).then_some(change.comes),
        "leaves": (change.leaves != 0).then_some(change.leaves),
        "groups": change.groups.len(),
        "done": change.groups.iter().filter(|group| group.done).count(),
        "next": wait.map(|group| format!("group {}: {}", group.group, group.next)),
    })
}

/// Sums of a process's counters, by the names that the page has for them.
fn counters(scrape: &Scrape) -> Value {
    let sum = |name| scrape.sum(name, &[]);
    let refusals = scrape.label_values("quarry_rpc_refusals_total", "resource").into_iter();
    // Those that name no resource are about something else than space or load: a leader asked elsewhere, a key that exists.
    let refusals = refusals.filter(|resource| !resource.is_empty());
    let refusals: BTreeMap<&str, f64> =
        refusals.map(|it| (it, scrape.sum("quarry_rpc_refusals_total", &[("resource", it)]))).collect();
    json!({
        "started_seconds": sum("quarry_process_start_time_seconds"),
        "resident_bytes": sum("quarry_process_resident_bytes"),
        "calls": sum("quarry_rpc_requests_total"),
        "commits": scrape.sum("quarry_meta_commits_total", &[("outcome", "committed")]),
        "grants": sum("quarry_meta_grants_total"),
        "evicted_values": sum("quarry_meta_evicted_values_total"),
        "evicted_bytes": sum("quarry_meta_evicted_bytes_total"),
        "damaged_copies": sum("quarry_meta_damaged_copies_total"),
        "refusals": refusals,
    })
}

fn of_shard(shard: &Shard<'_>) -> Value {
    let sum = |of: fn(&v1::SpaceStatus) -> u64| shard.rows.iter().map(|it| of(it)).sum::<u64>();
    json!({
        "shard": shard.group,
        "told_by": shard.teller,
        "leads": shard.leads,
        "grants": sum(|it| it.grants),
        "keys": sum(|it| it.keys),
        "pins": sum(|it| it.pins),
        "space": of_space(shard.rows.iter().copied()),
    })
}

fn of_space<'a>(rows: impl Iterator<Item = &'a v1::SpaceStatus> + Clone) -> Value {
    let sum = |of: fn(&v1::SpaceStatus) -> u64| rows.clone().map(of).sum::<u64>();
    json!({
        "free": sum(|it| it.free_bytes),
        "granted": sum(|it| it.granted_bytes),
        "committed": sum(|it| it.committed_bytes),
        "pinned": sum(|it| it.pinned_bytes),
        "resting": sum(|it| it.resting_bytes),
    })
}

fn of_data_node(
    node: &v1::DataNodeStatus,
    told: &[v1::SpaceStatus],
    shards: &[Shard<'_>],
    maps: &BTreeMap<RegionId, RegionMap>,
) -> Value {
    let region = |life: &v1::RegionLife| {
        let region: RegionId = life.region.unwrap_or_default().into();
        let incarnation = life.incarnation.unwrap_or_default();
        let is_it = move |it: &&v1::SpaceStatus| it.region.is_some_and(|it| RegionId::from(it) == region);
        let here = shards.iter().flat_map(|shard| &shard.rows).copied().filter(is_it);
        let lent: u64 = here.clone().map(lent).sum();
        // The directory's own row: all of the region, and what it has lent to nobody.
        let own = told.iter().filter(|it| it.shard == admin::DIRECTORY).find(is_it);
        let (total, unlent) = own.map_or((lent, 0), |it| (it.total_bytes, it.free_bytes));
        let mut space = of_space(here);
        space["unlent"] = unlent.into();
        // Lent by the directory and not taken by its shard yet, or the other way round.
        space["transit"] = total.saturating_sub(unlent + lent).into();
        json!({
            "index": region.index.0,
            "incarnation": format!("{}.{}", incarnation.generation, incarnation.number),
            "bytes": total,
            "space": space,
            "map": maps.get(&region).map(|map| json!({ "cell_bytes": map.cell_bytes, "cells": map.letters() })),
        })
    };
    json!({
        "node": node.node,
        "address": node.address,
        "alive": node.alive,
        "silent_ms": node.silent_ms,
        "revoked": node.revoked,
        "standing": match node.standing() {
            v1::Standing::Serving => "serving",
            v1::Standing::Draining => "draining",
            v1::Standing::Decommissioned => "decommissioned",
        },
        "regions": node.regions.iter().map(region).collect::<Value>(),
    })
}

const fn lent(it: &v1::SpaceStatus) -> u64 {
    it.free_bytes + it.granted_bytes + it.committed_bytes + it.pinned_bytes + it.resting_bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn group(group: u32, role: &str, term: u64, applied: u64) -> v1::GroupStatus {
        // Node 2 leads, whoever says so.
        let (role, members, leader) = (role.to_owned(), vec![1, 2, 3], 2);
        v1::GroupStatus {
            group,
            role,
            leader,
            term,
            committed: applied,
            applied,
            last_log: applied,
            members,
            ..Default::default()
        }
    }

    fn space(free: u64, committed: u64) -> v1::SpaceStatus {
        let region = Some(v1::RegionId { node: 101, index: 0 });
        v1::SpaceStatus {
            shard: 1,
            region,
            free_bytes: free,
            committed_bytes: committed,
            keys: 3,
            grants: 2,
            ..Default::default()
        }
    }

    fn reply(node: u64, role: &str, term: u64, applied: u64, silent_ms: u64, committed: u64) -> v1::StatusReply {
        let life = v1::RegionLife {
            region: Some(v1::RegionId { node: 101, index: 0 }),
            incarnation: Some(v1::Ordinal { generation: 1, number: 4 }),
        };
        let data = v1::DataNodeStatus {
            node: 101,
            address: "d:1".to_owned(),
            alive: true,
            silent_ms,
            regions: vec![life],
            ..Default::default()
        };
        let region = Some(v1::RegionId { node: 101, index: 0 });
        let unlent = v1::SpaceStatus { region, free_bytes: 8 * MIB, total_bytes: 16 * MIB, ..Default::default() };
        v1::StatusReply {
            node,
            groups: vec![group(0, role, term, applied), group(1, role, term, applied)],
            data_nodes: vec![data],
            space: vec![unlent, space(2 * MIB, committed)],
            ..Default::default()
        }
    }

    fn heard(status: Result<v1::StatusReply, &str>, node: u64, metrics: &str) -> Heard {
        Heard {
            node: NodeId(node),
            address: format!("m{node}:1"),
            status: status.map_err(ToOwned::to_owned),
            counters: Scrape::parse(metrics).map_err(|wrong| wrong.to_string()),
        }
    }

    #[test]
    fn the_leaders_word_counts_and_others_lag_behind_what_is_committed() {
        let own = reply(1, "follower", 7, 90, 5, 3 * MIB);
        let changes =
            "# TYPE quarry_raft_leader_changes_total counter\nquarry_raft_leader_changes_total{group=\"1\"} 4\n";
        let all = [
            heard(Ok(own.clone()), 1, changes),
            heard(Ok(reply(2, "leader", 7, 100, 40, 4 * MIB)), 2, ""),
            heard(Err("no answer within 1s"), 3, ""),
        ];
        let page = cluster(&own, &all, &BTreeMap::new());
        let shard = &page["groups"][1];
        assert_eq!(
            (&shard["leader"], &shard["term"], &shard["committed"]),
            (&2.into(), &7.into(), &100.into()),
            "{page}"
        );
        assert_eq!((&shard["members"][0]["lag"], &shard["members"][0]["elections"]), (&10.into(), &4.0.into()));
        assert_eq!(shard["members"][2], json!({ "node": 3, "role": null }));
        assert_eq!(page["metas"][2]["error"], "no answer within 1s");
        assert_eq!((&page["shards"][0]["told_by"], &page["shards"][0]["leads"]), (&2.into(), &true.into()));
        let node = &page["data_nodes"][0];
        assert_eq!((&node["silent_ms"], &node["regions"][0]["incarnation"]), (&40.into(), &"1.4".into()));
        let space = &node["regions"][0]["space"];
        assert_eq!(
            (&space["committed"], &space["free"], &space["unlent"], &space["transit"]),
            (&(4 * MIB).into(), &(2 * MIB).into(), &(8 * MIB).into(), &(2 * MIB).into())
        );
    }

    #[test]
    fn without_a_leader_whoever_applied_most_tells_of_the_space() {
        let own = reply(1, "follower", 7, 90, 5, MIB);
        let all = [heard(Ok(own.clone()), 1, ""), heard(Ok(reply(2, "candidate", 8, 95, 5, 2 * MIB)), 2, "")];
        let page = cluster(&own, &all, &BTreeMap::new());
        assert_eq!(page["groups"][0]["leader"], Value::Null);
        let shard = &page["shards"][0];
        assert_eq!(
            (&shard["told_by"], &shard["leads"], &shard["space"]["committed"]),
            (&2.into(), &false.into(), &(2 * MIB).into())
        );
    }

    #[test]
    fn a_leader_that_only_itself_takes_for_one_leads_nothing() {
        let alone = reply(2, "leader", 7, 100, 40, MIB);
        let all = [heard(Err("no route"), 1, ""), heard(Ok(alone.clone()), 2, ""), heard(Err("no route"), 3, "")];
        let page = cluster(&alone, &all, &BTreeMap::new());
        assert_eq!((&page["groups"][1]["leader"], &page["shards"][0]["leads"]), (&Value::Null, &false.into()));
        assert_eq!(page["groups"][1]["members"][1]["role"], "leader");

        // Nor does one of an earlier term, whom the others have left.
        let later = reply(1, "follower", 8, 100, 40, MIB);
        let all = [heard(Ok(later), 1, ""), heard(Ok(alone.clone()), 2, ""), heard(Err("no route"), 3, "")];
        assert_eq!(cluster(&alone, &all, &BTreeMap::new())["groups"][1]["leader"], Value::Null);
    }

    #[test]
    fn a_member_that_only_learns_does_not_count_for_a_majority() {
        let mut own = reply(2, "leader", 7, 100, 40, MIB);
        for group in &mut own.groups {
            (group.members, group.learners) = (vec![2, 3], vec![3]);
        }
        own.change_under_way = Some(v1::MemberChange {
            what: "add".to_owned(),
            comes: 3,
            groups: vec![
                v1::MemberProgress { group: 0, done: true, next: String::new() },
                v1::MemberProgress { group: 1, done: false, next: "adds".to_owned() },
            ],
            ..Default::default()
        });
        let page = cluster(&own, &[heard(Ok(own.clone()), 2, "")], &BTreeMap::new());
        assert_eq!(page["groups"][1]["leader"], 2);
        let change = &page["change"];
        assert_eq!((&change["comes"], &change["leaves"], &change["done"]), (&3.into(), &Value::Null, &1.into()));
        assert_eq!((&change["groups"], &change["next"]), (&2.into(), &"group 1: adds".into()));
        assert_eq!(page["data_nodes"][0]["standing"], "serving");
    }

    #[test]
    fn a_node_of_no_cluster_shows_itself() {
        let own = v1::StatusReply { node: 1, groups: vec![group(0, "learner", 0, 0)], ..Default::default() };
        let page = cluster(&own, &[], &BTreeMap::new());
        assert_eq!((&page["cluster"], &page["metas"]), (&"".into(), &json!([])));
        assert_eq!(page["groups"][0]["members"][0]["role"], "learner");
    }

    #[test]
    fn counters_are_sums_over_all_series() {
        let text = "quarry_rpc_requests_total{method=\"a\",code=\"ok\"} 3\nquarry_rpc_requests_total{method=\"b\",code=\"ok\"} 4\n\
                    quarry_meta_commits_total{shard=\"1\",outcome=\"committed\"} 5\nquarry_meta_commits_total{shard=\"1\",outcome=\"sealed\"} 9\n\
                    quarry_rpc_refusals_total{kind=\"no_space\",resource=\"memory\"} 2\nquarry_rpc_refusals_total{kind=\"not_leader\",resource=\"\"} 8\n";
        let of = counters(&Scrape::parse(text).unwrap());
        assert_eq!((&of["calls"], &of["commits"]), (&7.0.into(), &5.0.into()));
        assert_eq!(of["refusals"], json!({ "memory": 2.0 }));
    }
}
