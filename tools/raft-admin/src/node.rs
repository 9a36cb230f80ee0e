//! `raft-admin node`: a new signing key for a data node, while all that it signed before stays readable.

use crate::{Ask, region};
use clap::Subcommand;
use quarry::{
    exit::{Code, Failure, Format},
    regions,
    revocations::{self, Admitted},
    stdout::line,
};
use quarry_wire::{certificate::Role, ids::NodeId};
use serde_json::json;
use std::{process::ExitCode, time::Duration};

#[derive(Subcommand, Debug)]
pub(crate) enum NodeCommand {
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
    let NodeCommand::RotateKey { node, why, wait, ask } = command;
    let (metas, trust) = crate::whom(&ask)?;
    let unavailable = |wrong| Failure::new(Code::Unavailable, wrong);
    let known = region::known(&ask, &trust, &metas).await?;
    let address = &region::data_node(&known, node)?.address;
    let answer = regions::rotate_key(&trust, node, address, &why, wait).await;
    let rotated = answer.map_err(|wrong| {
        if wrong.is_passing() { Failure::new(Code::Unavailable, &wrong) } else { Failure::error(&wrong) }
    })?;
    let newest = regions::newest(&trust, &metas, ask.timeout).await.map_err(unavailable)?;
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
