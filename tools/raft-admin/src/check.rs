//! `raft-admin check perf`: what the disk of a meta node gives, and what the cluster makes of it.
//!
//! Nothing here fails for being slow: a machine may be busy. What is far from what meta nodes need is said, with what to do.

use crate::Ask;
use clap::Subcommand;
use quarry::{
    admin,
    exit::{Code, Failure, Format},
    perf,
    stdout::line,
};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};
use tokio::time::Instant;

/// Bytes of each write: about one small entry.
const WRITE_BYTES: usize = 256;
/// Clients that propose at once.
const CLIENTS: usize = 16;
/// A disk whose slowest hundredth of syncs takes longer makes leaders late with their heartbeats.
const SYNC_P99_MAX: Duration = Duration::from_millis(10);
/// A commit is a sync on two nodes and a round trip: it should not take many times as long as a sync.
const COMMIT_PER_SYNC_MAX: f64 = 20.0;

#[derive(Subcommand, Debug)]
pub(crate) enum CheckCommand {
    /// Measure how fast the disk under a folder makes writes durable, and how fast the cluster commits.
    Perf {
        /// A folder on the disk that the meta node uses; a file is made in it and removed.
        #[arg(long, value_name = "FOLDER")]
        dir: PathBuf,
        /// How long each of the two is measured.
        #[arg(long, value_name = "SPAN", default_value = "3s", value_parser = humantime::parse_duration)]
        span: Duration,
        /// Only the disk: no cluster is asked.
        #[arg(long)]
        disk_only: bool,
        /// The group whose leader is asked; 0 is the directory.
        #[arg(long, value_name = "GROUP", default_value_t = 0)]
        group: u32,
        #[command(flatten)]
        ask: CheckAsk,
    },
}

/// As for every question, but the cluster may be left out.
#[derive(clap::Args, Debug)]
pub(crate) struct CheckAsk {
    /// Cluster file, or quarry://host:port,host:port?uuid=..&root=..
    #[arg(long, value_name = "FILE|URL", env = "QUARRY_CLUSTER", required_unless_present = "disk_only")]
    cluster: Option<String>,
    /// Credentials of an administrator, instead of those that the cluster file names.
    #[arg(long, value_name = "FILE", env = "QUARRY_CREDENTIALS")]
    credentials: Option<PathBuf>,
    /// Deadline of each question.
    #[arg(long, value_name = "SPAN", default_value = "3s", value_parser = quarry::span::deadline)]
    timeout: Duration,
}

/// How long many of the same took.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Figures {
    count: usize,
    per_second: f64,
    p50: Duration,
    p99: Duration,
    max: Duration,
}

impl Figures {
    /// None of none.
    fn of(mut took: Vec<Duration>, span: Duration) -> Option<Self> {
        took.sort_unstable();
        let at = |hundredth: usize| took.get((took.len().saturating_sub(1)) * hundredth / 100).copied();
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        let per_second = took.len() as f64 / span.as_secs_f64();
        Some(Self { count: took.len(), per_second, p50: at(50)?, p99: at(99)?, max: at(100)? })
    }

    fn json(self) -> Value {
        let Self { count, per_second, p50, p99, max } = self;
        let us = |it: Duration| it.as_micros();
        json!({ "count": count, "per_second": per_second, "p50_us": us(p50), "p99_us": us(p99), "max_us": us(max) })
    }

    fn text(self) -> String {
        let Self { count, per_second, p50, p99, max } = self;
        format!("{per_second:.0}/s ({count}), p50 {p50:.2?}, p99 {p99:.2?}, slowest {max:.2?}")
    }
}

pub(crate) async fn run(command: CheckCommand, format: Format) -> Result<ExitCode, Failure> {
    let CheckCommand::Perf { dir, span, disk_only, group, ask } = command;
    let disk = measure_disk(&dir, span).map_err(|wrong| Failure::of_file(&dir, &wrong))?;
    let disk = disk.ok_or_else(|| Failure::usage("--span is too short for a single write"))?;
    let measured = match ask.cluster {
        Some(cluster) if !disk_only => {
            let ask = Ask { cluster, credentials: ask.credentials, timeout: ask.timeout };
            measure_commits(&ask, group, span).await.map(Some)
        }
        _ => Ok(None),
    };
    // What the disk gives is told also if the cluster does not answer.
    let (commits, wrong) = match measured {
        Ok(commits) => (commits, None),
        Err(wrong) => (None, Some(wrong)),
    };
    let warnings = judge(&disk, commits.as_ref());
    line(match format {
        Format::Json => json!({
            "disk": disk.json(),
            "commits": commits.map(Figures::json),
            "commit_per_sync": commits.map(|it| ratio(it.p50, disk.p50)),
            "warnings": warnings,
        })
        .to_string(),
        Format::Text => {
            let mut text = format!("disk, {WRITE_BYTES} B written and synced: {}", disk.text());
            if let Some(commits) = commits {
                let ratio = ratio(commits.p50, disk.p50);
                text += &format!("\ncommits of group {group}, {CLIENTS} clients: {}", commits.text());
                text += &format!("\na commit takes {ratio:.1} times as long as a sync (p50)");
            }
            warnings.iter().fold(text, |text, warning| format!("{text}\nwarning: {warning}"))
        }
    })?;
    wrong.map_or(Ok(ExitCode::SUCCESS), Err)
}

fn ratio(of: Duration, to: Duration) -> f64 {
    of.as_secs_f64() / to.as_secs_f64().max(f64::EPSILON)
}

fn judge(disk: &Figures, commits: Option<&Figures>) -> Vec<String> {
    let mut warnings = Vec::new();
    if disk.p99 > SYNC_P99_MAX {
        warnings.push(format!(
            "one sync in a hundred takes {:.2?}, meta nodes need {SYNC_P99_MAX:.0?}: give them a disk of their own (SSD or better), or raise election timeouts",
            disk.p99
        ));
    }
    if let Some(commits) = commits
        && ratio(commits.p50, disk.p50) > COMMIT_PER_SYNC_MAX
    {
        warnings.push(format!(
            "a commit takes {:.0} times as long as a sync, expected up to {COMMIT_PER_SYNC_MAX:.0}: look at the CPUs of the meta nodes and the network between them, and at the disks of the other two",
            ratio(commits.p50, disk.p50)
        ));
    }
    warnings
}

/// Appends and syncs, one after the other, as the log's committer does. The file goes at the end.
fn measure_disk(dir: &Path, span: Duration) -> io::Result<Option<Figures>> {
    let path = dir.join(format!(".check-perf-{}", std::process::id()));
    let measured = append_and_sync(&path, span);
    fs::remove_file(&path)?;
    Ok(Figures::of(measured?, span))
}

fn append_and_sync(path: &Path, span: Duration) -> io::Result<Vec<Duration>> {
    let mut file = File::options().create_new(true).write(true).open(path)?;
    let until = Instant::now() + span;
    let mut took = Vec::new();
    while Instant::now() < until {
        let began = Instant::now();
        file.write_all(&[7; WRITE_BYTES])?;
        file.sync_data()?;
        took.push(began.elapsed());
    }
    Ok(took)
}

async fn measure_commits(ask: &Ask, group: u32, span: Duration) -> Result<Figures, Failure> {
    let (metas, trust) = crate::whom(ask)?;
    let answers = admin::status_all(&trust, &metas, ask.timeout).await;
    admin::unless_forbidden(&answers)?;
    let heard = || answers.iter().filter_map(|answer| answer.as_ref().ok());
    if heard().next().is_some() && !heard().any(|reply| reply.groups.iter().any(|it| it.group == group)) {
        return Err(Failure::new(Code::NotFound, format!("there is no group {group}")));
    }
    let leader = admin::leader_of(heard(), group)
        .ok_or_else(|| Failure::new(Code::Unavailable, format!("group {group} has no leader")))?;
    let address = metas.iter().zip(&answers).find(|(_, it)| it.as_ref().is_ok_and(|it| it.node == leader.0));
    let (address, _) = address.ok_or_else(|| Failure::new(Code::Unavailable, format!("{leader} does not answer")))?;
    let took = perf::stamps(&trust, address, group, CLIENTS, span).await?;
    Figures::of(took, span).ok_or_else(|| Failure::usage("--span is too short for a single commit"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(p50: u64, p99: u64) -> Figures {
        let ms = Duration::from_millis;
        Figures { count: 100, per_second: 1.0, p50: ms(p50), p99: ms(p99), max: ms(p99) }
    }

    #[test]
    fn figures_are_of_the_sorted_spans() {
        let took: Vec<Duration> = (1..=200).rev().map(Duration::from_millis).collect();
        let it = Figures::of(took, Duration::from_secs(2)).unwrap();
        assert_eq!((it.count, it.p50.as_millis(), it.p99.as_millis(), it.max.as_millis()), (200, 100, 198, 200));
        assert_eq!(Figures::of(Vec::new(), Duration::from_secs(1)), None);
    }

    #[test]
    fn a_slow_disk_and_commits_far_behind_it_are_told() {
        assert_eq!(judge(&figures(1, 5), Some(&figures(4, 9))), [] as [String; 0]);
        assert_eq!(judge(&figures(1, 11), None).len(), 1);
        assert_eq!(judge(&figures(1, 5), Some(&figures(21, 90))).len(), 1);
    }

    #[test]
    fn the_disk_is_measured_with_a_file_that_goes() {
        let dir = tempfile::tempdir().unwrap();
        let measured = measure_disk(dir.path(), Duration::from_millis(20)).unwrap().unwrap();
        assert!(measured.count > 0 && measured.p50 <= measured.p99);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(measure_disk(&dir.path().join("none"), Duration::from_millis(20)).is_err());
    }
}
