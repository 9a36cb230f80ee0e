//! `quarry bench`: what Quarry gives on this machine, against what the machine gives.
//!
//! Each bench starts a cluster of real processes of this binary in a folder for temporary files, measures, and removes all of it. Decides what is
//! measured and how it is said; the figures' meaning is explained in docs/performance.md. Keeps two rules: both sides of a ratio alternate in one
//! run, and a row that was not measured is an error, never a number.

mod calls;
mod child;
mod error;
mod etcd;
mod fabric;
mod lifecycle;
pub(crate) mod machine;
mod measure;
mod meta;
mod mooncake;
mod raw;
mod redis;
mod report;
mod small;
mod stage;
pub(crate) mod target;
mod values;

use crate::{
    exit::{Failure, Format},
    serve::End,
};
use clap::{Args, ValueEnum};
use error::BenchError;
use machine::Machine;
use measure::Pace;
use quarry::{stderr, stdout::line};
use report::{Report, Row};
use std::{path::PathBuf, time::Duration};

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Which {
    /// Puts and gets of all sizes, against raw one-sided operations.
    Fabric,
    /// The control plane: grants, commits, resolves.
    Meta,
    /// Batches of small values, against Redis on this host.
    Small,
    /// The calls by which other stores are measured.
    Calls,
    /// What signatures, leases and pins cost.
    Lifecycle,
    /// Everything.
    All,
}

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// What to measure.
    #[arg(value_enum)]
    which: Which,
    /// Only cases whose name contains this.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Counted time of each side of a case.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    seconds: Duration,
    /// Folder below which the cluster is made: its file system is what the meta nodes sync to. By default the one for temporary files.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Python interpreter of an environment that has Mooncake's package: bench lifecycle compares itself with its existence checks.
    #[arg(long, value_name = "PYTHON")]
    mooncake: Option<PathBuf>,
    /// Bench meta also compares itself with three members of etcd, which must be installed.
    #[arg(long)]
    peers: bool,
    /// Little memory and small calls: to try the bench, not the machine.
    #[arg(long, hide = true)]
    tiny: bool,
    /// As a table in Markdown, whatever the output.
    #[arg(long)]
    markdown: bool,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || format!("expected seconds above 0, at most 600, such as 0.5 or 2, found {text:?}");
    let seconds: f64 = text.parse().map_err(|_| wrong())?;
    if seconds > 0.0 && seconds <= 600.0 { Ok(Duration::from_secs_f64(seconds)) } else { Err(wrong()) }
}

pub(crate) async fn run(args: &BenchArgs, format: Format) -> Result<(), Failure> {
    let mut end = End::new()?;
    // Interrupted or failed, the processes end and the folder goes with what owns them.
    let report = tokio::select! {
        report = Box::pin(measure(args)) => report?,
        () = end.wait() => return Err(Failure::error("interrupted")),
    };
    match format {
        _ if args.markdown => line(report.markdown())?,
        Format::Json => line(serde_json::to_string(&report).map_err(Failure::error)?)?,
        Format::Text => line(report.shown())?,
    }
    Ok(())
}

async fn measure(args: &BenchArgs) -> Result<Report, BenchError> {
    let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let machine = Machine::here(&dir)?;
    stderr::line(&machine);
    let mut session = Session {
        dir,
        pace: Pace { side: args.seconds },
        tiny: args.tiny,
        filter: args.filter.clone(),
        mooncake: args.mooncake.clone(),
        peers: args.peers,
        known: Vec::new(),
        rows: Vec::new(),
    };
    let wanted = |which: Which| args.which == which || args.which == Which::All;
    if wanted(Which::Fabric) {
        fabric::run(&mut session).await?;
    }
    if wanted(Which::Meta) {
        meta::run(&mut session).await?;
    }
    if wanted(Which::Small) {
        small::run(&mut session).await?;
    }
    if wanted(Which::Calls) {
        calls::run(&mut session).await?;
    }
    if wanted(Which::Lifecycle) {
        lifecycle::run(&mut session).await?;
    }
    if session.rows.is_empty() {
        let known = session.known.join(", ");
        return Err(BenchError::NoCase { filter: session.filter.unwrap_or_default(), known });
    }
    Ok(Report { machine, rows: session.rows })
}

/// One run of the command: what is wanted, and the rows so far.
#[derive(Debug)]
struct Session {
    /// Where clusters are made.
    dir: PathBuf,
    pace: Pace,
    /// Whether memory is to be spared.
    tiny: bool,
    filter: Option<String>,
    /// The interpreter that has Mooncake's package.
    mooncake: Option<PathBuf>,
    /// Whether etcd is to be compared with.
    peers: bool,
    /// Every case that was asked about.
    known: Vec<String>,
    rows: Vec<Row>,
}

impl Session {
    /// Whether a case is to be measured.
    fn wants(&mut self, case: &str) -> bool {
        self.known.push(case.to_owned());
        self.filter.as_ref().is_none_or(|filter| case.contains(filter.as_str()))
    }

    /// Whether any of these is to be measured: a cluster that nobody needs is not started.
    fn wants_any(&mut self, cases: &[String]) -> bool {
        let mut any = false;
        for case in cases {
            any |= self.wants(case);
        }
        any
    }

    /// Takes a row; says it to whoever waits.
    fn push(&mut self, row: Row) {
        stderr::line(row.sentence());
        self.rows.push(row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_above_zero_and_may_have_a_fraction() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "601", "x", "NaN", "inf", ""] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_filter_chooses_by_part_of_the_name_and_all_cases_are_known() {
        let mut session = Session {
            dir: PathBuf::new(),
            pace: Pace { side: Duration::from_secs(1) },
            tiny: true,
            filter: Some("get".to_owned()),
            mooncake: None,
            peers: false,
            known: Vec::new(),
            rows: Vec::new(),
        };
        assert!(session.wants("get/4KiB") && !session.wants("put/4KiB"));
        assert!(session.wants_any(&["get/1MiB".to_owned(), "put/1MiB".to_owned()]));
        assert_eq!(session.known, ["get/4KiB", "put/4KiB", "get/1MiB", "put/1MiB"]);
    }
}
