//! `quarry bench meta`: what the control plane does per second, how long one call takes, what many shards cost, and how long a lost leader is missed.
//!
//! Callers speak raw gRPC, each over connections of its own, one call at a time. Slabs are granted, armed and written before the clock runs, so
//! that a commit is what is measured: Commit at a data node, Confirm at the other holder, Publish at the shard's leader, one entry of the log
//! fsynced by a majority, and the outcomes. The reference of grants and commits is the disk of the same run: appends of 4 KiB with an
//! `fdatasync` each, one after the other; their ratio says how much one of those carries. That of resolves is the smallest call to the
//! same leader. With `--peers` commits stand beside what etcd does, in turn with it.

mod commits;
mod crowd;
pub(super) mod lab;
mod outage;
mod peers;
pub(super) mod probe;
mod scale;

use super::{
    Session,
    error::BenchError,
    measure::{Pace, Round, Side, alternate},
    report::{Row, Unit},
};
use bytes::Bytes;
use commits::Commits;
pub(super) use commits::written;
use crowd::Crowd;
pub(crate) use lab::LabError;
use lab::{Lab, Work, Writer};
use probe::Used;
use quarry_wire::limits::LEASE_MAX;
use std::{path::PathBuf, sync::Arc, time::Duration};

/// Entries of a commit, keys of a resolve.
pub(super) const BATCH: usize = 100;
/// Callers at once.
const CALLERS: [usize; 3] = [1, 16, 64];
/// Most batches that one caller commits in a round: they must be written while their grant lives.
const BATCHES_MAX: usize = 400;
/// Batches that resolves choose their keys from.
const RESOLVED_BATCHES: usize = 100;
/// Slots and life of a grant that nothing is written to.
const GRANT_SLOTS: u32 = 16;
const GRANT_TTL: Duration = Duration::from_secs(1);

/// What one case is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    Grant,
    Commit { copies: u8 },
    Resolve { lease: Duration, copies: u8, shuffled: bool },
}

/// A case with its name.
struct Case {
    name: String,
    callers: usize,
    what: What,
}

/// All cases, or those of a quick look.
fn cases(tiny: bool) -> Vec<Case> {
    let crowds = if tiny { &CALLERS[..1] } else { &CALLERS[..] };
    let mut cases = Vec::new();
    for callers in crowds.iter().copied() {
        cases.push(Case { name: format!("grant/callers{callers}"), callers, what: What::Grant });
    }
    for callers in crowds.iter().copied() {
        for copies in [1, 2] {
            let name = format!("commit/{BATCH}/callers{callers}/copies{copies}");
            cases.push(Case { name, callers, what: What::Commit { copies } });
        }
    }
    for callers in crowds.iter().copied() {
        let resolve = |kind: &str, lease, copies, shuffled| Case {
            name: format!("resolve/{BATCH}/callers{callers}/{kind}"),
            callers,
            what: What::Resolve { lease, copies, shuffled },
        };
        cases.push(resolve("leased", LEASE_MAX, 1, false));
        cases.push(resolve("fresh", Duration::ZERO, 1, false));
        cases.push(resolve("leased/copies2", LEASE_MAX, 2, false));
        cases.push(resolve("leased/shuffled", LEASE_MAX, 1, true));
    }
    cases
}

/// Measures the cases that are wanted, on clusters of their own.
pub(super) async fn run(session: &mut Session) -> Result<(), BenchError> {
    if session.peers {
        Box::pin(peers::run(session)).await?;
    }
    Box::pin(calls(session)).await?;
    Box::pin(scale::run(session)).await?;
    Box::pin(outage::run(session)).await
}

/// Each call by itself, on a cluster of one shard.
async fn calls(session: &mut Session) -> Result<(), BenchError> {
    let cases: Vec<Case> = cases(session.tiny).into_iter().filter(|case| session.wants(&case.name)).collect();
    if cases.is_empty() {
        return Ok(());
    }
    let lab = Arc::new(Lab::start(&session.dir).await?);
    for case in cases {
        for row in Box::pin(measure(&lab, &case, session.pace)).await? {
            session.push(row);
        }
    }
    let lab = Arc::into_inner(lab).expect("whoever shared it has ended");
    lab.end().await
}

async fn measure(lab: &Arc<Lab>, case: &Case, pace: Pace) -> Result<Vec<Row>, BenchError> {
    let mut disk = Disk(lab.stage.cluster().dir().to_owned());
    match case.what {
        What::Grant => {
            let mut grants = Grants(Crowd::gather(lab, case.callers, 1).await?);
            let (ours, disk) = alternate(pace, &mut grants, &mut disk).await?;
            Ok(vec![Row::compared(&case.name, Unit::PerSecond, &ours, Disk::SAID, &disk)?])
        }
        What::Commit { copies } => {
            let mut commits = Commits::new(lab, &vec![Work::of(copies); case.callers], BATCH).await?;
            let (ours, disk) = alternate(pace, &mut commits, &mut disk).await?;
            let mut rows = vec![Row::compared(&case.name, Unit::PerSecond, &ours, Disk::SAID, &disk)?];
            rows.extend(commits.parts(&case.name));
            Ok(rows)
        }
        What::Resolve { lease, copies, shuffled } => {
            let mut resolves = Resolves::new(lab, case.callers, lease, copies, shuffled).await?;
            let mut bare = BareCalls(Crowd::gather(lab, case.callers, copies).await?);
            let (ours, bare) = alternate(pace, &mut resolves, &mut bare).await?;
            let mut rows =
                vec![Row::compared(&case.name, Unit::Micros, &ours, "the smallest call to the same leader", &bare)?];
            rows.extend(resolves.per_cpu_second(&case.name));
            resolves.end().await?;
            Ok(rows)
        }
    }
}

/// The disk by itself.
struct Disk(PathBuf);

impl Disk {
    const SAID: &'static str = "appends of 4 KiB with an fdatasync each, one after the other";
}

impl Side for Disk {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        let dir = self.0.clone();
        let appends = tokio::task::spawn_blocking(move || probe::appends(&dir, time)).await;
        appends.expect("writing a file does not panic")
    }
}

/// Grants that are left to end by their time.
struct Grants(Crowd<Writer>);

impl Side for Grants {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        let grant = async |mut writer: Writer, _| writer.grant(GRANT_SLOTS, GRANT_TTL).await.map(|_| writer);
        self.0.keep_calling(time, 1.0, move |writer, number| Box::pin(grant(writer, number))).await
    }
}

/// The smallest call.
struct BareCalls(Crowd<Writer>);

impl Side for BareCalls {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        let call = |mut writer: Writer, _| async move { writer.bare_call().await.map(|()| writer) };
        self.0.keep_calling(time, 1.0, call).await
    }
}

/// Resolves of keys that lie together, or from all over.
struct Resolves {
    lab: Arc<Lab>,
    crowd: Crowd<Writer>,
    lease: Duration,
    /// What is asked for, in turn.
    asked: Arc<Vec<Vec<Bytes>>>,
    /// What the leader spent in each round, and its calls.
    spent: Vec<(Used, usize)>,
}

impl Resolves {
    async fn new(
        lab: &Arc<Lab>,
        callers: usize,
        lease: Duration,
        copies: u8,
        shuffled: bool,
    ) -> Result<Self, BenchError> {
        let mut crowd = Crowd::gather(lab, callers, copies).await?;
        let writer = crowd.callers.first_mut().expect("there is a caller");
        let mut asked = written(writer, RESOLVED_BATCHES, BATCH).await?;
        if shuffled {
            // Every question has one key of every batch.
            asked = (0..BATCH).map(|key| asked.iter().map(|batch| batch[key].clone()).collect()).collect();
        }
        Ok(Self { lab: Arc::clone(lab), crowd, lease, asked: Arc::new(asked), spent: Vec::new() })
    }

    /// What the leader has used until now.
    async fn leader(&self) -> Result<Used, BenchError> {
        let leader = self.lab.processes().await?.into_iter().find(|(role, _)| *role == "leader");
        let (_, pid) = leader.ok_or_else(|| LabError::unexpected("processes", "a leader", "none"))?;
        Used::by(pid)
    }

    /// Descriptors that the leader gives for a second of processor time. The first round was warm-up.
    fn per_cpu_second(&self, case: &str) -> Option<Row> {
        let sum = |(used, calls): (Used, usize), (more, and): &(Used, usize)| (used.and(*more), calls + and);
        let (used, calls) = self.spent.iter().skip(1).fold((Used::default(), 0), sum);
        // What is less than the clock of the kernel shows was not measured.
        let rate = (calls * BATCH) as f64 / used.cpu.as_secs_f64();
        rate.is_finite().then(|| Row::cost(case, "descriptors per cpu second/leader", Unit::PerSecond, rate))
    }

    async fn end(mut self) -> Result<(), BenchError> {
        let keys: Vec<Bytes> = self.asked.iter().flatten().cloned().collect();
        self.crowd.callers.first_mut().expect("there is a caller").delete(&keys).await?;
        Ok(())
    }
}

impl Side for Resolves {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        let (asked, lease) = (Arc::clone(&self.asked), self.lease);
        let resolve = move |mut writer: Writer, number: usize| {
            let keys = asked[number % asked.len()].clone();
            async move { writer.resolve(keys, lease).await.map(|_| writer) }
        };
        let before = self.leader().await?;
        let round = self.crowd.keep_calling(time, 1.0, resolve).await?;
        self.spent.push((self.leader().await?.since(before), round.latencies.len()));
        Ok(round)
    }
}
