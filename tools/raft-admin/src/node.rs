//! `raft-admin node`: the data nodes, what they are used for, and a new signing key for one, while all that it signed before stays readable.

use crate::{Ask, region, report::table};
use clap::Subcommand;
use quarry::{
    admin::{self, CallError},
    exit::{Code, Failure, Format},
    members, regions,
    revocations::{self, Admitted},
    stdout::line,
};
use quarry_proto::{
    refusal::Refusal,
    v1::{self, node_refused::Reason},
};
use quarry_trust::Trust;
use quarry_wire::{certificate::Role, ids::NodeId};
use serde_json::{Value, json};
use std::{process::ExitCode, time::Duration};

#[derive(Subcommand, Debug)]
pub(crate) enum NodeCommand {
    /// The data nodes: state, memory by use.
    List(Ask),
    /// Grant nothing new on a data node; what it holds is still read.
    Drain {
        /// The data node.
        node: u64,
        /// Use it again. A node that was decommissioned is not used again.
        #[arg(long)]
        undo: bool,
        #[command(flatten)]
        ask: Ask,
    },
    /// Take a data node out of use for good: its memory is void at once. Values with a copy elsewhere keep that one; the others are lost, and for
    /// that --yes is asked.
    Decommission {
        /// The data node.
        node: u64,
        /// Lose the values whose last copy it holds.
        #[arg(long)]
        yes: bool,
        #[command(flatten)]
        ask: Ask,
    },
    /// Forget a data node that is dead or decommissioned. Its number is never used again.
    Forget {
        /// The data node.
        node: u64,
        #[command(flatten)]
        ask: Ask,
    },
    /// Have a data node sign with the key that is in its key file now (quarry keys node --new-key puts one there), and sign again what it signed
    /// before. When this ends well, its older certificates may be revoked. Grants that wait for it can hold this up for 30 s; doing it again
    /// goes on where it ended.
    RotateKey {
        /// The data node.
        node: u64,
        /// The reason, for the data node's log.
        #[arg(long, value_name = "TEXT", default_value = "")]
        why: String,
        /// How long the node may take; --timeout is that of the questions before and after.
        #[arg(long, value_name = "SPAN", default_value = "60s", value_parser = humantime::parse_duration)]
        wait: Duration,
        #[command(flatten)]
        ask: Ask,
    },
}

pub(crate) async fn run(command: NodeCommand, format: Format) -> Result<ExitCode, Failure> {
    match command {
        NodeCommand::List(ask) => list(&ask, format).await,
        NodeCommand::Drain { node, undo, ask } => {
            let standing = if undo { v1::Standing::Serving } else { v1::Standing::Draining };
            let (metas, trust) = crate::present(&ask).await?;
            let asked = v1::SetStandingRequest { node, standing: standing.into(), ..Default::default() };
            let reply = set(&trust, &metas, asked, &ask).await?;
            told(format, node, name(standing), reply)
        }
        NodeCommand::Decommission { node, yes, ask } => decommission(node, yes, &ask, format).await,
        NodeCommand::Forget { node, ask } => {
            let (metas, trust) = crate::present(&ask).await?;
            members::forget(&trust, &metas, node, ask.timeout).await.map_err(failure)?;
            line(match format {
                Format::Json => json!({ "node": node, "state": "forgotten" }).to_string(),
                Format::Text => format!("node {node} is forgotten; its number is never used again"),
            })?;
            Ok(ExitCode::SUCCESS)
        }
        NodeCommand::RotateKey { node, why, wait, ask } => rotate_key(node, &why, wait, &ask, format).await,
    }
}

/// A data node whose number is used up is none any more.
fn failure(wrong: CallError) -> Failure {
    let gone = matches!(wrong.refusal(), Some(Refusal::NodeRefused(it)) if it.reason() == Reason::Retired);
    if gone { Failure::new(Code::NotFound, wrong) } else { wrong.into() }
}

async fn set(
    trust: &Trust,
    metas: &[String],
    asked: v1::SetStandingRequest,
    ask: &Ask,
) -> Result<v1::SetStandingReply, Failure> {
    members::set_standing(trust, metas, asked, ask.timeout).await.map_err(failure)
}

fn told(format: Format, node: u64, state: &str, held: v1::SetStandingReply) -> Result<ExitCode, Failure> {
    let (copies, last) = (held.copies, held.last_copies);
    line(match format {
        Format::Json => json!({ "node": node, "state": state, "copies": copies, "last_copies": last }).to_string(),
        Format::Text => {
            format!("node {node} is {state}; it held {copies} copies of values, of {last} of them the last one")
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn decommission(node: u64, yes: bool, ask: &Ask, format: Format) -> Result<ExitCode, Failure> {
    let (metas, trust) = crate::present(ask).await?;
    let asked =
        v1::SetStandingRequest { node, standing: v1::Standing::Decommissioned.into(), look_only: true, force: yes };
    let held = set(&trust, &metas, asked, ask).await?;
    if held.last_copies > 0 && !yes {
        let what = format!("{} values have their last copy on node {node}: nothing was changed", held.last_copies);
        let hint = "raft-admin node drain lets them age out; --yes loses them now";
        return Err(Failure::new(Code::Error, what).hint(hint));
    }
    // The meta node counts again, with all that is committed, and refuses by itself.
    let held = set(&trust, &metas, v1::SetStandingRequest { look_only: false, ..asked }, ask).await?;
    told(format, node, name(v1::Standing::Decommissioned), held)
}

/// A state in one word.
const fn name(standing: v1::Standing) -> &'static str {
    match standing {
        v1::Standing::Serving => "serving",
        v1::Standing::Draining => "draining",
        v1::Standing::Decommissioned => "decommissioned",
    }
}

/// In one word: what it may be used for, and whether it is there.
fn state(node: &v1::DataNodeStatus, late_after_ms: u64) -> &'static str {
    match (node.standing(), node.alive) {
        (v1::Standing::Decommissioned, _) => "decommissioned",
        (_, false) => "dead",
        (v1::Standing::Draining, true) => "draining",
        (v1::Standing::Serving, true) if node.silent_ms > late_after_ms => "silent",
        (v1::Standing::Serving, true) => "alive",
    }
}

async fn list(ask: &Ask, format: Format) -> Result<ExitCode, Failure> {
    let (metas, trust) = crate::whom(ask)?;
    let (_, answers) = admin::status_of_present(&trust, &metas, ask.timeout).await;
    admin::unless_forbidden(&answers)?;
    let heard: Vec<&v1::StatusReply> = answers.iter().filter_map(|answer| answer.as_ref().ok()).collect();
    let leader = |group| admin::leader_of(heard.iter().copied(), group).map(|node| node.0);
    let judge = heard.iter().find(|it| Some(it.node) == leader(admin::DIRECTORY)).or_else(|| heard.first());
    let Some(judge) = judge else { return Err(admin::nobody(&answers)) };
    let late_after_ms = admin::late_after_ms(judge);
    // Of each shard the rows of its leader count.
    let space: Vec<&v1::SpaceStatus> =
        heard.iter().flat_map(|it| it.space.iter().filter(|row| leader(row.shard) == Some(it.node))).collect();
    let sum = |node: u64, of: fn(&v1::SpaceStatus) -> u64| -> u64 {
        space.iter().filter(|row| row.region.is_some_and(|region| region.node == node)).map(|row| of(row)).sum()
    };
    let bytes = |node: u64| {
        [
            sum(node, |row| row.free_bytes),
            sum(node, |row| row.granted_bytes),
            sum(node, |row| row.committed_bytes),
            sum(node, |row| row.resting_bytes),
        ]
    };
    line(match format {
        Format::Json => {
            let row = |it: &v1::DataNodeStatus| {
                let [free, granted, committed, resting] = bytes(it.node);
                json!({ "node": it.node, "address": it.address, "state": state(it, late_after_ms), "silent_ms": it.silent_ms,
                    "host": it.host, "zone": it.zone,
                    "regions": it.regions.len(), "free_bytes": free, "granted_bytes": granted,
                    "committed_bytes": committed, "resting_bytes": resting })
            };
            json!({ "data_nodes": judge.data_nodes.iter().map(row).collect::<Value>() }).to_string()
        }
        Format::Text => {
            let header = [
                "data node",
                "address",
                "host",
                "zone",
                "state",
                "silent",
                "regions",
                "free",
                "granted",
                "committed",
                "resting",
            ];
            let mut shown = table(&header);
            for it in &judge.data_nodes {
                let mut row = vec![
                    it.node.to_string(),
                    it.address.clone(),
                    it.host.clone(),
                    it.zone.clone(),
                    state(it, late_after_ms).to_owned(),
                    format!("{} ms", it.silent_ms),
                    it.regions.len().to_string(),
                ];
                row.extend(bytes(it.node).map(|bytes| format!("{} MiB", bytes >> 20)));
                shown.add_row(row);
            }
            shown.to_string()
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn rotate_key(node: u64, why: &str, wait: Duration, ask: &Ask, format: Format) -> Result<ExitCode, Failure> {
    let (metas, trust) = crate::whom(ask)?;
    let known = region::known(ask, &trust, &metas).await?;
    let address = &region::data_node(&known, node)?.address;
    let answer = regions::rotate_key(&trust, node, address, why, wait).await;
    let rotated = answer?;
    let newest = regions::newest(&trust, &metas, ask.timeout).await?;
    let is_older = |it: &Admitted| {
        let said = it.certificate;
        !it.revoked && said.node == NodeId(node) && said.role == Role::DataNode && said.serial.0 != rotated.serial
    };
    let (certificates, _) = revocations::certificates(&newest);
    let older: Vec<u64> = certificates.iter().filter(|it| is_older(it)).map(|it| it.certificate.serial.0).collect();
    line(match format {
        Format::Json => {
            json!({ "node": node, "serial": rotated.serial, "resigned": rotated.resigned, "older": older }).to_string()
        }
        Format::Text => {
            let signs = format!(
                "node {node} signs under certificate {}, {} batches are signed again",
                rotated.serial, rotated.resigned
            );
            if older.is_empty() {
                signs
            } else {
                let older: Vec<String> = older.iter().map(u64::to_string).collect();
                let older = older.join(" ");
                format!("{signs}; nothing depends on its older ones any more, quarry keys revoke ends them: {older}")
            }
        }
    })?;
    Ok(ExitCode::SUCCESS)
}
