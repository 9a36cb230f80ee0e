//! `raft-admin leader` and `raft-admin drain`: who leads which group, and having that changed. What is said to be done has happened.

use crate::{Ask, present};
use clap::Subcommand;
use comfy_table::{Table, presets};
use quarry::{
    admin::{self, CallError},
    exit::{Code, Failure, Format},
    stdout::line,
};
use quarry_proto::v1;
use quarry_trust::Trust;
use serde_json::{Value, json};
use std::{collections::BTreeMap, process::ExitCode, time::Duration};
use tokio::time::{Instant, sleep};

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(200);

#[derive(Subcommand, Debug)]
pub(crate) enum LeaderCommand {
    /// The leader of every group, and how many each meta node leads.
    List(Ask),
    /// Have a meta node lead a group; done when it does.
    Transfer {
        /// The group: 0 is the directory, 1 and up the shards.
        #[arg(long)]
        group: u32,
        /// The meta node.
        #[arg(long, value_name = "NODE")]
        to: u64,
        #[command(flatten)]
        ask: Ask,
    },
    /// Spread the leaderships now, without the pauses that meta nodes make when they do it by themselves.
    Balance(Ask),
}

pub(crate) async fn run(command: LeaderCommand, format: Format) -> Result<ExitCode, Failure> {
    match command {
        LeaderCommand::List(ask) => {
            let (metas, trust) = present(&ask).await?;
            line(led(&heard(&trust, &metas, ask.timeout).await?, &[], format))?;
            Ok(ExitCode::SUCCESS)
        }
        LeaderCommand::Transfer { group, to, ask } => transfer(group, to, &ask, format).await,
        LeaderCommand::Balance(ask) => balance(&ask, format).await,
    }
}

/// The answers of those meta nodes that answer, with their addresses.
async fn heard(trust: &Trust, metas: &[String], timeout: Duration) -> Result<Vec<(String, v1::StatusReply)>, Failure> {
    let answers = admin::status_all(trust, metas, timeout).await;
    admin::unless_forbidden(&answers)?;
    admin::is_heard(&answers)?;
    Ok(metas.iter().cloned().zip(answers).filter_map(|(address, answer)| Some((address, answer.ok()?))).collect())
}

/// The answers of those that answer soon; only if none does, of those that answer at all.
async fn heard_soon(trust: &Trust, metas: &[String], ask: &Ask) -> Result<Vec<(String, v1::StatusReply)>, Failure> {
    match heard(trust, metas, admin::LOOK.min(ask.timeout)).await {
        Ok(heard) => Ok(heard),
        Err(_) => heard(trust, metas, ask.timeout).await,
    }
}

fn leader(heard: &[(String, v1::StatusReply)], group: u32) -> Option<u64> {
    admin::leader_of(heard.iter().map(|(_, reply)| reply), group).map(|node| node.0)
}

/// The members of a group, as its leader says.
fn members(heard: &[(String, v1::StatusReply)], leader: u64, group: u32) -> Option<&[u64]> {
    let (_, reply) = heard.iter().find(|(_, reply)| reply.node == leader)?;
    reply.groups.iter().find(|it| it.group == group).map(|it| &it.members[..])
}

fn address(heard: &[(String, v1::StatusReply)], node: u64) -> Option<&str> {
    heard.iter().find(|(_, reply)| reply.node == node).map(|(address, _)| address.as_str())
}

/// Who leads what, after what was tried.
fn led(heard: &[(String, v1::StatusReply)], moves: &[(u64, v1::LeaderMove)], format: Format) -> String {
    let mut groups: Vec<u32> = heard.iter().flat_map(|(_, reply)| reply.groups.iter().map(|it| it.group)).collect();
    groups.sort_unstable();
    groups.dedup();
    let leaders: Vec<(u32, Option<u64>)> = groups.iter().map(|group| (*group, leader(heard, *group))).collect();
    let mut nodes: BTreeMap<u64, (bool, Vec<u32>)> =
        heard.iter().map(|(_, reply)| (reply.node, (reply.draining, Vec::new()))).collect();
    for (group, leader) in &leaders {
        if let Some((_, led)) = leader.and_then(|leader| nodes.get_mut(&leader)) {
            led.push(*group);
        }
    }
    match format {
        Format::Json => json!({
            "groups": leaders.iter().map(|(group, leader)| json!({ "group": group, "leader": leader })).collect::<Value>(),
            "nodes": nodes.iter().map(|(node, (draining, led))| json!({ "node": node, "draining": draining, "leads": led })).collect::<Value>(),
            "moves": moves.iter().map(|(from, it)| json!({
                "group": it.group, "from": from, "to": it.to, "failed": (!it.failed.is_empty()).then_some(&it.failed),
            })).collect::<Value>(),
        })
        .to_string(),
        Format::Text => {
            let mut shown = String::new();
            for (from, it) in moves {
                let how = if it.failed.is_empty() { String::new() } else { format!(" failed: {}", it.failed) };
                shown.push_str(&format!("group {}: {from} -> {}{how}\n", it.group, it.to));
            }
            let mut table = Table::new();
            table.load_style(presets::UTF8_FULL_CONDENSED).set_header(["meta node", "leads", "groups", "draining"]);
            for (node, (draining, led)) in &nodes {
                let groups: Vec<String> = led.iter().map(u32::to_string).collect();
                table.add_row([
                    node.to_string(),
                    led.len().to_string(),
                    groups.join(" "),
                    if *draining { "yes" } else { "no" }.to_owned(),
                ]);
            }
            shown.push_str(&table.to_string());
            for (group, _) in leaders.iter().filter(|(_, leader)| leader.is_none()) {
                shown.push_str(&format!("\ngroup {group} has no leader"));
            }
            shown
        }
    }
}

async fn transfer(group: u32, to: u64, ask: &Ask, format: Format) -> Result<ExitCode, Failure> {
    let (metas, trust) = present(ask).await?;
    let mut heard = heard_soon(&trust, &metas, ask).await?;
    let deadline = Instant::now() + ask.timeout;
    let left = || deadline.saturating_duration_since(Instant::now());
    let (mut before, mut said) = (None, false);
    let mut last = Failure::new(Code::Unavailable, format!("group {group} has no leader"));
    loop {
        if !heard.iter().any(|(_, reply)| reply.groups.iter().any(|it| it.group == group)) {
            return Err(Failure::new(Code::NotFound, format!("there is no group {group}")));
        }
        let leader = leader(&heard, group);
        if let Some(found) = leader.and_then(|leader| members(&heard, leader, group)).filter(|it| !it.contains(&to)) {
            let found: Vec<String> = found.iter().map(u64::to_string).collect();
            let what = format!("node {to} is no member of group {group}, members are {}", found.join(", "));
            return Err(Failure::new(Code::NotFound, what));
        }
        before = before.or(leader);
        if leader == Some(to) {
            let before = before.unwrap_or(to);
            line(match format {
                Format::Json => json!({ "group": group, "leader": to, "before": before }).to_string(),
                Format::Text if before == to => format!("node {to} leads group {group} already"),
                Format::Text => format!("node {to} leads group {group} now, node {before} did"),
            })?;
            return Ok(ExitCode::SUCCESS);
        }
        if let Some(address) = leader.and_then(|leader| address(&heard, leader)) {
            match admin::transfer_leader(&trust, address, group, to, left()).await {
                Ok(_) => {
                    heard = heard_soon(&trust, &metas, ask).await?;
                    continue;
                }
                Err(wrong) if !wrong.is_passing() => return Err(wrong.into()),
                // What a node said tells more than that it did not answer in the last moment.
                Err(wrong) if said && !matches!(wrong, CallError::Refused { .. }) => {}
                Err(wrong) => {
                    said = matches!(wrong, CallError::Refused { .. });
                    last = wrong.into();
                }
            }
        }
        if left() <= PAUSE {
            return Err(last.about(|why| format!("node {to} does not lead group {group}: {why}")));
        }
        sleep(PAUSE).await;
        heard = heard_soon(&trust, &metas, ask).await?;
    }
}

async fn balance(ask: &Ask, format: Format) -> Result<ExitCode, Failure> {
    let (metas, trust) = present(ask).await?;
    let mut heard = heard_soon(&trust, &metas, ask).await?;
    let deadline = Instant::now() + ask.timeout;
    let left = || deadline.saturating_duration_since(Instant::now());
    let mut moves = Vec::new();
    // A node gives away only while it leads most: the last to move may make room for another to go on.
    loop {
        let before = moves.len();
        for (address, reply) in heard {
            let answer = admin::balance_leaders(&trust, &address, left()).await?;
            moves.extend(answer.moves.into_iter().map(|it| (reply.node, it)));
        }
        let failed = moves.iter().any(|(_, it)| !it.failed.is_empty());
        if moves.len() == before || failed || left().is_zero() {
            line(led(&heard_soon(&trust, &metas, ask).await?, &moves, format))?;
            return Ok(if failed { Code::Error.into() } else { ExitCode::SUCCESS });
        }
        heard = heard_soon(&trust, &metas, ask).await?;
    }
}

pub(crate) async fn drain(node: u64, undo: bool, ask: &Ask, format: Format) -> Result<ExitCode, Failure> {
    let (metas, trust) = present(ask).await?;
    let mut heard = heard_soon(&trust, &metas, ask).await?;
    if address(&heard, node).is_none() {
        heard = self::heard(&trust, &metas, ask.timeout).await?;
    }
    let Some(address) = address(&heard, node) else {
        return Err(Failure::new(Code::NotFound, format!("no meta node that answers is node {node}")));
    };
    let deadline = Instant::now() + ask.timeout;
    let left = || deadline.saturating_duration_since(Instant::now());
    let led = loop {
        let answer = admin::drain(&trust, address, undo, left()).await?;
        if answer.led.is_empty() || left() <= PAUSE {
            break answer.led;
        }
        sleep(PAUSE).await;
    };
    if let Some(first) = led.first() {
        let groups: Vec<String> = led.iter().map(|it| it.group.to_string()).collect();
        let why = format!("node {node} drains and still leads groups {}: {}", groups.join(" "), first.why);
        return Err(Failure::new(Code::Unavailable, why).hint("it goes on trying; see raft-admin status"));
    }
    line(match format {
        Format::Json => json!({ "node": node, "draining": !undo }).to_string(),
        Format::Text if undo => format!("node {node} takes part again"),
        Format::Text => format!("node {node} drains and leads nothing"),
    })?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(node: u64, leads: &[u32]) -> (String, v1::StatusReply) {
        let group = |group| v1::GroupStatus {
            group,
            role: if leads.contains(&group) { "leader" } else { "follower" }.into(),
            term: 1,
            ..Default::default()
        };
        let reply =
            v1::StatusReply { node, groups: (0..3).map(group).collect(), draining: node == 2, ..Default::default() };
        (format!("h:{node}"), reply)
    }

    #[test]
    fn the_list_has_every_group_its_leader_and_every_node_that_answers_also_one_that_leads_nothing() {
        let heard = [reply(1, &[0, 2]), reply(2, &[])];
        let moves = [(2, v1::LeaderMove { group: 2, to: 1, failed: String::new() })];
        let shown: Value = serde_json::from_str(&led(&heard, &moves, Format::Json)).unwrap();
        assert_eq!(shown["groups"][1], json!({ "group": 1, "leader": null }));
        assert_eq!(shown["groups"][2], json!({ "group": 2, "leader": 1 }));
        assert_eq!(shown["nodes"][0], json!({ "node": 1, "draining": false, "leads": [0, 2] }));
        assert_eq!(shown["nodes"][1], json!({ "node": 2, "draining": true, "leads": [] }));
        assert_eq!(shown["moves"][0], json!({ "group": 2, "from": 2, "to": 1, "failed": null }));
        let text = led(&heard, &moves, Format::Text);
        assert!(text.contains("group 2: 2 -> 1\n") && text.contains("group 1 has no leader"), "{text}");
    }
}
