//! `quarry demo`: shows on real processes that Quarry does its job.
//!
//! Starts three meta nodes and two data nodes, writes a round of blocks with two copies, has another process read them back, kills the Raft
//! leader in the middle of a second round and finishes it, kills a data node and has every block read from its other copy. The figures come
//! from the servers' own counters.

mod content;
mod figures;
pub(crate) mod verify;

use crate::{
    cli::DemoArgs,
    exit::{Failure, Format},
    serve::End,
};
use content::Content;
use figures::{Figures, Measured, Span};
use quarry::{
    admin::FIRST_SHARD,
    local::{LocalCluster, LocalSpec, Signal},
    stderr,
    stdout::line,
};
use quarry_client::{Client, Cluster, Namespace, NamespaceSpec, Options, PutItem};
use quarry_wire::limits::{EXTENT_BYTES, EXTENTS_PER_SMALL_REGION, REGION_BYTES_MAX};
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};
use tokio::time::Instant;
use verify::Found;

/// How long a cluster may take to be ready.
const READY: Duration = Duration::from_secs(60);
/// Deadline of each operation: long enough for an election on a busy host.
const OPERATION: Duration = Duration::from_secs(30);
/// How long the reading process may take: a base and a slow 16 MiB/s.
const VERIFY_BASE: Duration = Duration::from_secs(60);
const VERIFY_BYTES_PER_SECOND: u64 = 16 << 20;
/// Second round: so many batches, and the leader is killed while the middle one is under way.
const BATCHES: u32 = 50;
/// Smallest region of the demo: its extents hold slabs of some hundred blocks of the usual size.
const REGION_BYTES_LEAST: u64 = 512 << 20;
const NAMESPACE: &str = "demo";

pub(crate) async fn run(args: &DemoArgs, format: Format) -> Result<(), Failure> {
    let mut end = End::new()?;
    let folder = Folder::new(args)?;
    let binary = std::env::current_exe().map_err(Failure::error)?;
    let spec = LocalSpec {
        region_bytes: vec![region_bytes(args)?],
        populate: true,
        detached: args.keep,
        ..LocalSpec::new(binary)
    };
    let mut cluster = LocalCluster::create(&folder.dir, spec)?;
    // Interrupted or failed, the processes end with `cluster`.
    let figures = tokio::select! {
        figures = Box::pin(show(args, &mut cluster)) => figures?,
        () = end.wait() => {
            // Its processes end first.
            drop(cluster);
            if folder.dir.exists() {
                folder.remove()?;
            }
            return Err(Failure::error("interrupted"));
        }
    };
    match format {
        Format::Json => line(serde_json::to_string(&figures).map_err(Failure::error)?)?,
        Format::Text => line(figures.shown())?,
    }
    if args.keep {
        keep(cluster, folder).await?;
    } else {
        cluster.stop().await?;
        folder.remove()?;
    }
    match figures.problems() {
        problems if problems.is_empty() => Ok(()),
        problems => Err(Failure::error(problems.join("; "))),
    }
}

/// All of it, on a cluster that is not started yet.
async fn show(args: &DemoArgs, cluster: &mut LocalCluster) -> Result<Figures, Failure> {
    let size = usize::try_from(args.size).map_err(Failure::error)?;
    let content = Content { seed: args.seed, size };
    let payload_bytes = u64::from(args.blocks) * args.size;
    say("starting three meta nodes and two data nodes");
    cluster.start(READY).await?;
    let client = connect(cluster).await?;
    client.create_namespace(NamespaceSpec::cache(NAMESPACE)).await?;
    client.close().await.map_err(Failure::error)?;

    say(format!("round 1: writing {} blocks of {} bytes, two copies each", args.blocks, args.size));
    let before = cluster.traffic().await?;
    let (seconds, unacknowledged_first) = write_all(cluster, content, args.blocks).await?;
    let written = cluster.traffic().await?;
    say("round 1: another process reads them back");
    let first = read_back(args, cluster, &[1]).await?;
    let read = cluster.traffic().await?;

    say("round 2: writing again, the Raft leader is killed in the middle");
    let (leaderless, unacknowledged_second) = write_through_a_kill(cluster, content, args.blocks).await?;
    say(format!("round 2: finished, {} ms without a leader; another process reads it back", leaderless.as_millis()));
    let second = read_back(args, cluster, &[2]).await?;

    let victim = *cluster.data_nodes().first().expect("the demo starts two data nodes");
    say(format!("killing {victim}; another process reads both rounds from their other copies"));
    cluster.kill(victim, Signal::KILL).await?;
    let degraded = read_back(args, cluster, &[1, 2]).await?;

    Ok(Figures::of(&Measured {
        blocks: args.blocks,
        size: args.size,
        put: Span { traffic: written.since(&before), payload_bytes, seconds },
        get: Span { traffic: read.since(&written), payload_bytes: first.bytes, seconds: first.seconds },
        leaderless_ms: u64::try_from(leaderless.as_millis()).unwrap_or(u64::MAX),
        unacknowledged: unacknowledged_first + unacknowledged_second,
        found: [first, second, degraded],
    }))
}

async fn connect(cluster: &LocalCluster) -> Result<Client, Failure> {
    let options = Options { timeout: OPERATION, ..Options::default() };
    Ok(Client::connect(Cluster::from_file(cluster.cluster_file())?, options).await?)
}

/// Round one, through a client of its own that is closed at the end, so that its seals are counted. Answers the time that the puts took and
/// how many were not acknowledged.
async fn write_all(cluster: &LocalCluster, content: Content, blocks: u32) -> Result<(f64, u64), Failure> {
    let client = connect(cluster).await?;
    let namespace = client.namespace(NAMESPACE).await?;
    let step = verify::per_call(content.size as u64);
    let (mut seconds, mut unacknowledged) = (0.0, 0);
    for first in (0..blocks).step_by(step as usize) {
        let items = items(content, 1, first..blocks.min(first.saturating_add(step)));
        let begun = Instant::now();
        unacknowledged += put(&namespace, items).await;
        seconds += begun.elapsed().as_secs_f64();
    }
    client.close().await.map_err(Failure::error)?;
    Ok((seconds, unacknowledged))
}

/// Round two. The leader of the shard is killed while the middle batch is under way. Answers the time from the kill to the acknowledgement of
/// the first batch that began after it, and how many puts were not acknowledged.
async fn write_through_a_kill(
    cluster: &mut LocalCluster,
    content: Content,
    blocks: u32,
) -> Result<(Duration, u64), Failure> {
    let client = connect(cluster).await?;
    let namespace = client.namespace(NAMESPACE).await?;
    let bounds: Vec<u32> = (0..=BATCHES.min(blocks)).map(|n| share(blocks, n, BATCHES.min(blocks))).collect();
    let middle = bounds.len() / 2;
    let (mut killed_at, mut back_after, mut unacknowledged) = (None, None, 0);
    for (number, bound) in bounds.windows(2).enumerate() {
        let items = items(content, 2, bound[0]..bound[1]);
        if number + 1 == middle {
            let leader = cluster.leader(FIRST_SHARD, READY).await?;
            let kill = async {
                let at = Instant::now();
                cluster.kill(leader, Signal::KILL).await.map(|_| at)
            };
            let (missed, at) = tokio::join!(put(&namespace, items), kill);
            killed_at = Some(at?);
            unacknowledged += missed;
            say(format!("round 2: killed {leader} after {} blocks", bound[0]));
        } else {
            unacknowledged += put(&namespace, items).await;
            if let (Some(at), None) = (killed_at, back_after) {
                back_after = Some(Instant::now().saturating_duration_since(at));
            }
        }
    }
    // With a single batch there is none after the kill: its own end counts.
    let back_after = back_after.or_else(|| killed_at.map(|at| Instant::now().saturating_duration_since(at)));
    client.close().await.map_err(Failure::error)?;
    Ok((back_after.unwrap_or_default(), unacknowledged))
}

/// Where the `n`th of `parts` equal parts of `whole` begins.
fn share(whole: u32, n: u32, parts: u32) -> u32 {
    u32::try_from(u64::from(whole) * u64::from(n) / u64::from(parts.max(1))).expect("a part is no more than the whole")
}

fn items(content: Content, round: u32, blocks: std::ops::Range<u32>) -> Vec<PutItem> {
    blocks.map(|block| PutItem::create(content::key(round, block), content.of(round, block))).collect()
}

/// Writes a batch; answers how many were not acknowledged, and says why the first of them was not.
async fn put(namespace: &Namespace, items: Vec<PutItem>) -> u64 {
    let results = namespace.put_many(items).await;
    let failed: Vec<_> = results.into_iter().filter_map(Result::err).collect();
    if let Some(first) = failed.first() {
        say(format!("{} puts failed; the first: {first}", failed.len()));
    }
    failed.len() as u64
}

/// Starts the reading process and takes what it found.
async fn read_back(args: &DemoArgs, cluster: &LocalCluster, rounds: &[u32]) -> Result<Found, Failure> {
    let binary = std::env::current_exe().map_err(Failure::error)?;
    let mut command = Command::new(binary);
    command.arg("demo-verify").arg("--cluster").arg(cluster.cluster_file()).args(["--namespace", NAMESPACE]);
    command.arg("--timeout").arg(humantime::format_duration(OPERATION).to_string());
    command.arg("--blocks").arg(args.blocks.to_string());
    command.arg("--size").arg(args.size.to_string());
    command.arg("--seed").arg(args.seed.to_string());
    for round in rounds {
        command.arg("--round").arg(round.to_string());
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    quarry_fabric::without_our_descriptors(&mut command);
    let mut command = tokio::process::Command::from(command);
    command.kill_on_drop(true);
    let bytes = u64::from(args.blocks) * args.size * rounds.len() as u64;
    let deadline = VERIFY_BASE + Duration::from_secs(bytes / VERIFY_BYTES_PER_SECOND);
    let late = |_| Failure::error(format!("the reading process did not end within {deadline:?}"));
    let reader = command.spawn().map_err(Failure::error)?;
    let output = tokio::time::timeout(deadline, reader.wait_with_output()).await;
    let output = output.map_err(late)?.map_err(Failure::error)?;
    if !output.status.success() {
        return Err(Failure::error(format!("the reading process failed ({})", output.status)));
    }
    serde_json::from_slice(&output.stdout).map_err(Failure::error)
}

/// Memory that each data node needs: both rounds, with room for what slabs leave unused and for slots given up when the leader is killed.
fn region_bytes(args: &DemoArgs) -> Result<u64, Failure> {
    let block = args.size + args.size / 4 + 4096;
    let wanted = (block * u64::from(args.blocks) * 3).max(block * EXTENTS_PER_SMALL_REGION).max(REGION_BYTES_LEAST);
    let wanted = wanted.next_multiple_of(EXTENT_BYTES);
    if args.size == 0 || block > EXTENT_BYTES || wanted > REGION_BYTES_MAX {
        return Err(Failure::error(format!(
            "{} blocks of {} bytes do not fit: a block has 1 to {} bytes, and {} bytes of memory per data node are needed of at most {}",
            args.blocks,
            args.size,
            EXTENT_BYTES / 5 * 4 - 4096,
            wanted,
            REGION_BYTES_MAX
        )));
    }
    Ok(wanted)
}

/// Makes the cluster whole again and leaves it.
async fn keep(mut cluster: LocalCluster, folder: Folder) -> Result<(), Failure> {
    for member in cluster.members() {
        if !cluster.is_running(member) {
            cluster.restart(member)?;
        }
    }
    cluster.wait_ready(READY).await?;
    let dir = folder.dir.display();
    say(format!("the cluster in {dir} runs on; use it:"));
    say(format!("  export QUARRY_CLUSTER={} QUARRY_NAMESPACE={NAMESPACE}", cluster.cluster_file().display()));
    say(format!("  quarry get {} | sha256sum", content::key(2, 0)));
    say("and stop it:");
    say(format!("  kill $(cat {dir}/*/pid)"));
    cluster.leave_running();
    Ok(())
}

/// The cluster's folder.
struct Folder {
    dir: PathBuf,
    ours: bool,
}

impl Folder {
    fn new(args: &DemoArgs) -> Result<Self, Failure> {
        if let Some(dir) = &args.dir {
            return Ok(Self { dir: dir.clone(), ours: false });
        }
        let name = format!("quarry-demo-{}", hex::encode(quarry::identity::random::<6>().map_err(Failure::error)?));
        Ok(Self { dir: std::env::temp_dir().join(name), ours: true })
    }
    /// Removes it if nobody asked for it. After a failure it stays, with its logs; when it was interrupted it goes.
    fn remove(&self) -> Result<(), Failure> {
        let remove = |dir: &Path| std::fs::remove_dir_all(dir);
        if self.ours { remove(&self.dir).map_err(Failure::error) } else { Ok(()) }
    }
}

/// Progress goes to stderr: stdout is for the answer.
fn say(what: impl std::fmt::Display) {
    stderr::line(what);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(blocks: u32, size: u64) -> DemoArgs {
        DemoArgs { blocks, size, seed: 1, dir: None, keep: false }
    }

    #[test]
    fn parts_cover_the_whole() {
        let bounds: Vec<u32> = (0..=50).map(|n| share(1013, n, 50)).collect();
        assert_eq!((bounds[0], bounds[50]), (0, 1013));
        assert!(bounds.is_sorted());
    }

    #[test]
    fn regions_hold_both_rounds_and_what_cannot_fit_is_refused() {
        for (blocks, size) in [(1, 1), (1000, 64 << 10), (10, 48 << 20), (20_000, 64 << 10)] {
            let bytes = region_bytes(&args(blocks, size)).unwrap();
            assert!(bytes >= 2 * u64::from(blocks) * size && bytes.is_multiple_of(EXTENT_BYTES), "{blocks} {size}");
        }
        for (blocks, size) in [(1, 0), (1, 64 << 20), (1_000_000, 1 << 20)] {
            assert!(region_bytes(&args(blocks, size)).is_err(), "{blocks} {size}");
        }
    }
}
