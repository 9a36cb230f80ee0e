//! What the meta nodes answered, side by side.

use comfy_table::{Table, presets};
use quarry::admin::{self, CallError};
use quarry_proto::v1;
use serde_json::{Value, json};
use std::collections::BTreeMap;

type Answer = Result<v1::StatusReply, CallError>;

/// One object per meta node, in the order of the cluster file, and the leaders.
pub(crate) fn json(metas: &[String], answers: &[Answer]) -> Value {
    let one = |(address, answer): (&String, &Answer)| match answer {
        Err(wrong) => json!({ "address": address, "error": wrong.to_string() }),
        Ok(reply) => json!({
            "address": address,
            "node": reply.node,
            "cluster": hex::encode(&reply.cluster),
            "generation": reply.generation,
            "build": reply.build,
            "draining": reply.draining,
            "groups": reply.groups.iter().map(of_group).collect::<Value>(),
            "data_nodes": reply.data_nodes.iter().map(of_data_node).collect::<Value>(),
            "space": reply.space.iter().map(of_space).collect::<Value>(),
            "memory": memory(reply),
            "counters": reply.counters.iter().map(of_counter).collect::<Value>(),
        }),
    };
    let heard: Vec<&v1::StatusReply> = answers.iter().filter_map(|answer| answer.as_ref().ok()).collect();
    let leaders = groups(&heard).into_iter().map(|group| {
        let leader = admin::leader_of(heard.iter().copied(), group);
        json!({ "group": group, "leader": leader.map(|node| node.0) })
    });
    json!({ "metas": metas.iter().zip(answers).map(one).collect::<Value>(), "leaders": leaders.collect::<Value>() })
}

fn of_group(it: &v1::GroupStatus) -> Value {
    json!({
        "group": it.group,
        "role": it.role,
        "term": it.term,
        "leader": it.leader,
        "last_log": it.last_log,
        "committed": it.committed,
        "applied": it.applied,
        "snapshot": it.snapshot,
        "purged": it.purged,
        "log_time_ms": it.log_time_ms,
        "members": it.members,
        "learners": it.learners,
        "hash": hex::encode(&it.hash),
    })
}

fn of_data_node(it: &v1::DataNodeStatus) -> Value {
    let region = |life: &v1::RegionLife| {
        let incarnation = life.incarnation.unwrap_or_default();
        json!({
            "index": life.region.unwrap_or_default().index,
            "incarnation": format!("{}.{}", incarnation.generation, incarnation.number),
        })
    };
    json!({
        "node": it.node,
        "address": it.address,
        "alive": it.alive,
        "revoked": it.revoked,
        "silent_ms": it.silent_ms,
        "host": it.host,
        "zone": it.zone,
        "regions": it.regions.iter().map(region).collect::<Value>(),
    })
}

fn of_space(it: &v1::SpaceStatus) -> Value {
    json!({
        "shard": it.shard,
        "node": it.region.map(|region| region.node),
        "region": it.region.map(|region| region.index),
        "free_bytes": it.free_bytes,
        "granted_bytes": it.granted_bytes,
        "committed_bytes": it.committed_bytes,
        "pinned_bytes": it.pinned_bytes,
        "resting_bytes": it.resting_bytes,
        "total_bytes": it.total_bytes,
        "grants": it.grants,
        "pins": it.pins,
        "keys": it.keys,
    })
}

/// Each region's bytes: *Nothing leaks* means that none is missing for longer than a message is on its way.
fn memory(reply: &v1::StatusReply) -> Value {
    let (whole, shares): (Vec<&v1::SpaceStatus>, Vec<&v1::SpaceStatus>) =
        reply.space.iter().partition(|it| it.shard == admin::DIRECTORY);
    let of_region = |it: &&v1::SpaceStatus| {
        let own = shares.iter().filter(|share| share.region == it.region);
        let held: u64 = own
            .map(|of| of.free_bytes + of.granted_bytes + of.committed_bytes + of.pinned_bytes + of.resting_bytes)
            .sum();
        let region = it.region.unwrap_or_default();
        json!({
            "node": region.node,
            "region": region.index,
            "total_bytes": it.total_bytes,
            "unlent_bytes": it.free_bytes,
            "held_bytes": held,
            "in_transit_bytes": i128::from(it.total_bytes) - i128::from(it.free_bytes) - i128::from(held),
        })
    };
    whole.iter().map(of_region).collect()
}

fn of_counter(it: &v1::MethodCounter) -> Value {
    json!({
        "method": it.method,
        "calls": it.calls,
        "received_bytes": it.received_bytes,
        "sent_bytes": it.sent_bytes,
    })
}

fn groups(heard: &[&v1::StatusReply]) -> std::collections::BTreeSet<u32> {
    heard.iter().flat_map(|reply| reply.groups.iter().map(|it| it.group)).collect()
}

/// Tables for people: groups by meta node, then data nodes and space as the leaders see them.
pub(crate) fn text(metas: &[String], answers: &[Answer]) -> String {
    let mut nodes =
        table(&["meta node", "address", "group", "role", "leader", "term", "committed", "applied", "snapshot"]);
    for (address, answer) in metas.iter().zip(answers) {
        match answer {
            Err(wrong) => {
                nodes.add_row(vec!["-".to_owned(), address.clone(), "-".to_owned(), wrong.to_string()]);
            }
            Ok(reply) if reply.groups.is_empty() => {
                let words = [&reply.node.to_string(), address, "-", "in no cluster yet"];
                nodes.add_row(words.map(str::to_owned).to_vec());
            }
            Ok(reply) => {
                for it in &reply.groups {
                    let leader = if it.leader == 0 { "none".to_owned() } else { it.leader.to_string() };
                    nodes.add_row(vec![
                        reply.node.to_string(),
                        address.clone(),
                        it.group.to_string(),
                        it.role.clone(),
                        leader,
                        it.term.to_string(),
                        it.committed.to_string(),
                        it.applied.to_string(),
                        it.snapshot.to_string(),
                    ]);
                }
            }
        }
    }
    let heard: Vec<&v1::StatusReply> = answers.iter().filter_map(|answer| answer.as_ref().ok()).collect();
    // Heartbeats reach every meta node, so that any answer tells of data nodes; the leader of the directory judges.
    let judge = admin::leader_of(heard.iter().copied(), admin::DIRECTORY);
    let seen = heard.iter().find(|reply| Some(reply.node) == judge.map(|node| node.0)).or_else(|| heard.first());
    let mut data = table(&["data node", "address", "alive", "silent", "regions"]);
    for it in seen.into_iter().flat_map(|reply| &reply.data_nodes) {
        data.add_row(vec![
            it.node.to_string(),
            it.address.clone(),
            if it.revoked { "revoked".to_owned() } else { it.alive.to_string() },
            format!("{} ms", it.silent_ms),
            it.regions.len().to_string(),
        ]);
    }
    let mut space =
        table(&["shard", "data node", "free", "granted", "committed", "pinned", "resting", "grants", "pins", "keys"]);
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    for group in groups(&heard).into_iter().filter(|group| *group != admin::DIRECTORY) {
        let leader = admin::leader_of(heard.iter().copied(), group);
        let of_leader = heard.iter().filter(|reply| Some(reply.node) == leader.map(|node| node.0));
        for it in of_leader.flat_map(|reply| &reply.space).filter(|it| it.shard == group) {
            space.add_row(vec![
                it.shard.to_string(),
                it.region.map_or_else(|| "-".to_owned(), |region| region.node.to_string()),
                mib(it.free_bytes),
                mib(it.granted_bytes),
                mib(it.committed_bytes),
                mib(it.pinned_bytes),
                mib(it.resting_bytes),
                it.grants.to_string(),
                it.pins.to_string(),
                it.keys.to_string(),
            ]);
        }
    }
    let mut shown = nodes.to_string();
    if let Some(said) = generations(&heard) {
        shown.push('\n');
        shown.push_str(&said);
    }
    for table in [data, space].iter().filter(|table| !table.is_empty()) {
        shown.push('\n');
        shown.push_str(&table.to_string());
    }
    shown
}

/// The generation of the cluster; more than one if a meta node belongs to a history that was given up. None before there is a cluster.
fn generations(heard: &[&v1::StatusReply]) -> Option<String> {
    let mut nodes: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for reply in heard.iter().filter(|reply| !reply.cluster.is_empty()) {
        nodes.entry(reply.generation).or_default().push(reply.node.to_string());
    }
    let (newest, _) = nodes.pop_last()?;
    let old = nodes.into_iter().map(|(old, nodes)| {
        format!("; meta node {} is still of generation {old}, which was given up: stop it", nodes.join(", "))
    });
    Some(format!("generation {newest}{}", old.collect::<String>()))
}

pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header.to_vec());
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers() -> (Vec<String>, Vec<Answer>) {
        let group = v1::GroupStatus { group: 1, role: "leader".into(), term: 4, leader: 2, ..Default::default() };
        let reply = v1::StatusReply {
            node: 2,
            groups: vec![group],
            data_nodes: vec![v1::DataNodeStatus { node: 101, alive: true, ..Default::default() }],
            space: vec![v1::SpaceStatus { shard: 1, free_bytes: 3 << 20, ..Default::default() }],
            ..Default::default()
        };
        let gone = CallError::Unreachable { address: "h:1".into(), why: "refused".into() };
        (vec!["h:1".into(), "h:2".into()], vec![Err(gone), Ok(reply)])
    }

    #[test]
    fn json_has_a_row_for_every_meta_node_also_for_one_that_does_not_answer() {
        let (metas, answers) = answers();
        let json = json(&metas, &answers);
        assert!(json["metas"][0]["error"].as_str().unwrap().contains("refused"));
        assert_eq!(json["metas"][1]["groups"][0]["term"], 4);
        assert_eq!(json["leaders"][0]["leader"], 2);
    }

    #[test]
    fn the_tables_show_nodes_that_answer_and_nodes_that_do_not() {
        let (metas, answers) = answers();
        let text = text(&metas, &answers);
        for word in ["refused", "leader", "101", "3.0 MiB"] {
            assert!(text.contains(word), "{word} is not in\n{text}");
        }
    }

    #[test]
    fn a_meta_node_of_a_generation_that_was_given_up_is_named() {
        let reply =
            |node, generation| v1::StatusReply { node, generation, cluster: vec![7; 16].into(), ..Default::default() };
        let replies = [reply(1, 2), reply(3, 1), reply(2, 2), v1::StatusReply { node: 4, ..Default::default() }];
        let heard: Vec<_> = replies.iter().collect();
        let said = generations(&heard).unwrap();
        assert_eq!(said, "generation 2; meta node 3 is still of generation 1, which was given up: stop it");
        assert_eq!(generations(&heard[..1]).unwrap(), "generation 2");
        assert_eq!(generations(&heard[3..]), None);
    }
}
