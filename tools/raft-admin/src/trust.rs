//! `raft-admin certificate` and `raft-admin revocation`: whom the cluster believes, and whom it does not any more.

use crate::Ask;
use clap::Subcommand;
use comfy_table::{Table, presets};
use quarry::{
    exit::{Code, Failure, Format},
    named, regions,
    revocations::{self, List},
    stdout::line,
};
use serde_json::{Value, json};
use std::{path::PathBuf, process::ExitCode};

#[derive(Subcommand, Debug)]
pub(crate) enum CertificateCommand {
    /// All certificates that the directory has, and which of them are void.
    List(Ask),
}

#[derive(Subcommand, Debug)]
pub(crate) enum RevocationCommand {
    /// Tell the cluster which certificates are void: a file that `quarry keys revoke` made. Doing it again changes nothing.
    Apply {
        /// The list.
        #[arg(value_name = "FILE")]
        list: PathBuf,
        #[command(flatten)]
        ask: Ask,
    },
}

pub(crate) async fn certificate(command: CertificateCommand, format: Format) -> Result<ExitCode, Failure> {
    let CertificateCommand::List(ask) = command;
    let (metas, trust) = crate::whom(&ask)?;
    let newest = regions::newest(&trust, &metas, ask.timeout).await?;
    let (certificates, number) = revocations::certificates(&newest);
    line(match format {
        Format::Json => {
            let rows = certificates.iter().map(|it| {
                let said = &it.certificate;
                json!({
                    "serial": said.serial.0,
                    "node": said.node.0,
                    "role": said.role.to_string(),
                    "key": said.key.to_string(),
                    "revoked": it.revoked,
                })
            });
            json!({ "certificates": rows.collect::<Value>(), "revocation_list": number }).to_string()
        }
        Format::Text => {
            let mut table = Table::new();
            table.load_style(presets::UTF8_FULL_CONDENSED).set_header(["serial", "node", "role", "key", "revoked"]);
            for it in &certificates {
                let said = &it.certificate;
                table.add_row([
                    said.serial.0.to_string(),
                    said.node.0.to_string(),
                    said.role.to_string(),
                    said.key.to_string(),
                    it.revoked.to_string(),
                ]);
            }
            format!("{table}\nrevocation list {number}")
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn revocation(command: RevocationCommand, format: Format) -> Result<ExitCode, Failure> {
    let RevocationCommand::Apply { list: path, ask } = command;
    let cluster = named::cluster(&ask.cluster, ask.credentials.as_deref())?;
    let trust = cluster.trust().map_err(Failure::of)?;
    let list = List::read(&path, cluster.uuid, cluster.root).map_err(Failure::of)?;
    let list = list.ok_or_else(|| Failure::new(Code::NotFound, format!("there is no file {}", path.display())))?;
    let answer = revocations::apply(&trust, &cluster.metas, &list.signed, ask.timeout).await;
    let reply = answer?;
    let serials = list.signed.statement.serials.len();
    // The list holds, whatever can be found out about its consequences.
    let silenced = regions::newest(&trust, &cluster.metas, ask.timeout)
        .await
        .map(|newest| revocations::silenced(&newest, &list.signed.statement))
        .unwrap_or_default();
    line(match format {
        Format::Json => json!({ "number": reply.number, "serials": serials, "silenced": silenced }).to_string(),
        Format::Text => {
            let mut text = format!("revocation list {} holds, {serials} certificates are void", reply.number);
            for node in &silenced {
                text += &format!(
                    "\ndata node {node} has no other certificate: what it holds cannot be read, it takes no writes until it has another key (quarry keys node --new-key, raft-admin node rotate-key {node})"
                );
            }
            text
        }
    })?;
    Ok(ExitCode::SUCCESS)
}
