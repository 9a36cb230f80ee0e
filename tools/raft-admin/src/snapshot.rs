//! `raft-admin snapshot`: the states of all groups in one file, and a cluster that begins again from it.

use crate::Ask;
use clap::{Args, Subcommand};
use comfy_table::{Table, presets};
use quarry::{
    admin::BootstrapPlan,
    backups,
    exit::{Code, Failure, Format},
    revocations::List,
    stdout::line,
};
use quarry_meta::{
    backup::{Backup, Manifest, Part},
    rescue::{self, Begun, NewMeta, RescueError, RestorePlan},
};
use quarry_wire::ids::{Generation, NodeId};
use serde_json::json;
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

#[derive(Subcommand, Debug)]
pub(crate) enum SnapshotCommand {
    /// Save the states of all groups of a running cluster into one new file.
    Save {
        /// The file.
        file: PathBuf,
        /// Take each state from any node that answers, as it is there: works without leaders, and may miss the latest changes.
        #[arg(long)]
        stale: bool,
        /// Cluster file, or quarry://host:port,host:port?uuid=..&root=..
        #[arg(long, value_name = "FILE|URL", env = "QUARRY_CLUSTER")]
        cluster: String,
        /// Credentials of an administrator, instead of those that the cluster file names.
        #[arg(long, value_name = "FILE", env = "QUARRY_CREDENTIALS")]
        credentials: Option<PathBuf>,
        /// How long each group is tried.
        #[arg(long, value_name = "SPAN", default_value = "1m", value_parser = quarry::span::deadline)]
        timeout: Duration,
    },
    /// Read a whole backup, check all its checksums, and say what is in it.
    Status {
        /// The file.
        file: PathBuf,
    },
    /// Make the folder of one meta node of a cluster that begins again from a backup: on every new meta node once, with the same file and the
    /// same plan, before any of them is started.
    Restore(Box<Restore>),
}

#[derive(Args, Debug)]
pub(crate) struct Restore {
    /// The backup.
    file: PathBuf,
    /// The data folder of the node; it must be empty or absent.
    #[arg(long, value_name = "FOLDER")]
    dir: PathBuf,
    /// Which node of the plan it is.
    #[arg(long, value_name = "NODE")]
    node: u64,
    /// The meta nodes of the cluster from here on: a plan file as for bootstrap.
    #[arg(long, value_name = "FILE")]
    plan: PathBuf,
    /// The generation that begins, if the one after the backup's was used already: it must be higher than any that the cluster ever was in.
    #[arg(long, value_name = "NUMBER")]
    generation: Option<u32>,
    /// A revocation list that is newer than the backup.
    #[arg(long, value_name = "FILE")]
    revocations: Option<PathBuf>,
}

pub(crate) async fn run(command: SnapshotCommand, format: Format) -> Result<ExitCode, Failure> {
    match command {
        SnapshotCommand::Save { file, stale, cluster, credentials, timeout } => {
            let (metas, trust) = crate::present(&Ask { cluster, credentials, timeout }).await?;
            let saved = backups::save(&trust, &metas, &file, stale, timeout).await;
            show(&file, &saved?, "saved", format)
        }
        SnapshotCommand::Status { file } => {
            let backup = Backup::open(&file).map_err(Failure::of)?;
            show(&file, backup.manifest(), "whole", format)
        }
        SnapshotCommand::Restore(asked) => restore(&asked, format),
    }
}

fn show(file: &Path, manifest: &Manifest, state: &str, format: Format) -> Result<ExitCode, Failure> {
    let bytes: u64 = manifest.groups.iter().map(|part| part.length).sum();
    line(match format {
        Format::Json => json!({ "file": file, "state": state, "bytes": bytes, "manifest": manifest }).to_string(),
        Format::Text => {
            let mut table = Table::new();
            let head = ["group", "term", "applied", "log time", "feed", "bytes", "sha256"];
            table.load_style(presets::UTF8_FULL_CONDENSED).set_header(head);
            for Part { group, term, applied, log_time_ms, feed_generation, feed, length, sha256, .. } in
                &manifest.groups
            {
                let time = humantime::format_duration(Duration::from_millis(*log_time_ms)).to_string();
                let feed = format!("{feed_generation}.{feed}");
                let sha256 = sha256.get(..16).unwrap_or(sha256).to_owned();
                let number = u64::to_string;
                table.add_row([group.to_string(), number(term), number(applied), time, feed, number(length), sha256]);
            }
            format!(
                "{} is {state}: cluster {}, generation {}, {} shards, saved by build {}\n{table}",
                file.display(),
                manifest.cluster,
                manifest.generation,
                manifest.shards,
                manifest.build
            )
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

fn restore(asked: &Restore, format: Format) -> Result<ExitCode, Failure> {
    let plan = BootstrapPlan::read(&asked.plan).map_err(Failure::of)?;
    let backup = Backup::open(&asked.file).map_err(Failure::of)?;
    let revocations = match &asked.revocations {
        None => None,
        Some(file) => {
            let list = List::read(file, plan.cluster, plan.root).map_err(Failure::of)?;
            let list =
                list.ok_or_else(|| Failure::new(Code::NotFound, format!("there is no file {}", file.display())))?;
            Some(list.signed)
        }
    };
    let metas = plan.metas.into_iter().map(|meta| NewMeta {
        node: NodeId(meta.node),
        address: meta.address,
        certificate: meta.certificate,
    });
    let plan = RestorePlan {
        cluster: plan.cluster,
        root: plan.root,
        shards: plan.shards,
        metas: metas.collect(),
        generation: asked.generation.map(Generation),
        revocations,
    };
    let begun = rescue::restore(&backup, &plan, &asked.dir, NodeId(asked.node)).map_err(failed)?;
    tell(&begun, asked.node, &asked.dir, format)
}

/// What began, and what comes next.
pub(crate) fn tell(begun: &Begun, node: u64, dir: &Path, format: Format) -> Result<ExitCode, Failure> {
    let metas: Vec<String> = begun.metas.iter().map(|(id, address)| format!("{} at {address}", id.0)).collect();
    line(match format {
        Format::Json => json!({
            "cluster": begun.cluster.to_string(),
            "node": node,
            "dir": dir,
            "generation": begun.generation.0,
            "shards": begun.shards,
            "namespaces": begun.namespaces,
            "certificates": begun.certificates,
            "metas": begun.metas.iter().map(|(id, address)| json!({ "node": id.0, "address": address })).collect::<Vec<_>>(),
            "kept": begun.kept,
        })
        .to_string(),
        Format::Text => {
            let kept = begun.kept.as_ref().map_or_else(String::new, |kept| format!("\nthe folder of before is {}", kept.display()));
            format!(
                "{} is node {node} of cluster {} in generation {}: {} shards, {} namespaces, {} certificates; meta nodes: {}{kept}",
                dir.display(),
                begun.cluster,
                begun.generation.0,
                begun.shards,
                begun.namespaces,
                begun.certificates,
                metas.join(", ")
            )
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Two kinds of errors deserve a hint.
pub(crate) fn failed(wrong: RescueError) -> Failure {
    let hint = match &wrong {
        RescueError::OtherCluster { .. } => Some("use the plan that the cluster was made with, its meta nodes changed"),
        RescueError::Generation { .. } => Some("raft-admin status shows the generation that a running cluster is in"),
        _ => None,
    };
    let failure = match &wrong {
        RescueError::NotEmpty { .. } | RescueError::Retired { .. } | RescueError::UsedUp { .. } => {
            Failure::new(Code::Conflict, wrong)
        }
        RescueError::NotPlanned { .. } | RescueError::NoGroup { .. } => Failure::new(Code::NotFound, wrong),
        _ => Failure::of(wrong),
    };
    match hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}
