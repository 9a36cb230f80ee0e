//! `raft-admin log`: what the log of a stopped meta node says, entry by entry.

use clap::Subcommand;
use quarry::{
    exit::{Code, Failure, Format},
    stderr, stdout,
};
use quarry_meta::rescue::{self, LogLine, RescueError};
use quarry_raft::LogIndex;
use serde_json::json;
use std::{path::PathBuf, process::ExitCode};

#[derive(Subcommand, Debug)]
pub(crate) enum LogCommand {
    /// The entries that the folder of a stopped meta node holds: place, kind, stamp, bytes, and which commands.
    Dump {
        /// The data folder of the node.
        #[arg(long, value_name = "FOLDER")]
        dir: PathBuf,
        /// Only this group; 0 is the directory.
        #[arg(long, value_name = "GROUP")]
        group: Option<u32>,
        /// The first index.
        #[arg(long, value_name = "INDEX", default_value_t = 0)]
        from: u64,
        /// The last index.
        #[arg(long, value_name = "INDEX", default_value_t = u64::MAX)]
        to: u64,
    },
}

pub(crate) fn run(command: LogCommand, format: Format) -> Result<ExitCode, Failure> {
    let LogCommand::Dump { dir, group, from, to } = command;
    let there = rescue::groups(&dir).map_err(crate::snapshot::failed)?;
    let groups = match group {
        None => there,
        Some(group) if there.contains(&group) => vec![group],
        Some(group) => {
            return Err(Failure::new(Code::NotFound, format!("{} has no group {group}, but {there:?}", dir.display())));
        }
    };
    // None: whoever reads the lines has enough.
    let mut wanted = Some(());
    for group in groups {
        let seen = rescue::dump(&dir, group, LogIndex(from), LogIndex(to), |entry| {
            let text = match format {
                Format::Json => json(group, &entry),
                Format::Text => text(group, &entry),
            };
            let out = |source| RescueError::Disk { doing: "write to standard output".to_owned(), source };
            if wanted.is_some() && !stdout::part(format!("{text}\n").as_bytes()).map_err(out)? {
                wanted = None;
            }
            Ok(())
        });
        if let Some(cut) = seen.map_err(crate::snapshot::failed)? {
            stderr::line(format_args!("group {group}: the entries up to {cut} are in the snapshot alone"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn json(group: u32, entry: &LogLine) -> String {
    let LogLine { place, kind, at_ms, bytes, says } = entry;
    json!({
        "group": group, "term": place.term.0, "index": place.index.0, "kind": kind, "at_ms": at_ms, "bytes": bytes, "says": says,
    })
    .to_string()
}

fn text(group: u32, entry: &LogLine) -> String {
    let LogLine { place, kind, at_ms, bytes, says } = entry;
    let at = at_ms.map_or_else(|| "-".to_owned(), |at| format!("{at} ms"));
    format!("group {group}  {}.{}  {kind}  at {at}  {bytes} B  {says}", place.term, place.index)
}
