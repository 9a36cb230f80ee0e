//! `quarry bench meta`: what the control plane does per second, and how long one call takes.
//!
//! Callers speak raw gRPC, each over connections of its own, one call at a time. Slabs are granted, armed and written before the clock runs, so
//! that a commit is what is measured: Commit at a data node, Confirm at the other holder, Publish at the shard's leader, one entry of the log
//! fsynced by a majority, and the outcomes. The reference of grants and commits is the disk of the same run: appends of 4 KiB with an
//! `fdatasync` each, one after the other; their ratio says how much one of those carries. That of resolves is the smallest call to the
//! same leader.

pub(super) mod lab;
pub(super) mod probe;

use super::{
    Session,
    error::BenchError,
    measure::{Pace, Round, Side, alternate},
    report::{Row, Unit},
};
use bytes::Bytes;
pub(crate) use lab::LabError;
use lab::{Lab, Writer};
use probe::Used;
use quarry_proto::v1;
use quarry_wire::limits::{GRANT_TTL_MAX, LEASE_MAX, SLOTS_PER_SLAB_MAX};
use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};
use tokio::{sync::Barrier, task::JoinSet, time::Instant};

/// Entries of a commit, keys of a resolve.
pub(super) const BATCH: usize = 100;
/// Callers at once.
const CALLERS: [usize; 3] = [1, 16, 64];
/// Batches in a full slab.
const BATCHES_PER_SLAB: usize = SLOTS_PER_SLAB_MAX as usize / BATCH;
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

/// Measures the cases that are wanted, on a cluster of its own.
pub(super) async fn run(session: &mut Session) -> Result<(), BenchError> {
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
    let appends = "appends of 4 KiB with an fdatasync each, one after the other";
    match case.what {
        What::Grant => {
            let mut grants = Grants(Crowd::gather(lab, case.callers, 1).await?);
            let (ours, disk) = alternate(pace, &mut grants, &mut disk).await?;
            Ok(vec![Row::compared(&case.name, Unit::PerSecond, &ours, appends, &disk)?])
        }
        What::Commit { copies } => {
            let crowd = Crowd::gather(lab, case.callers, copies).await?;
            let mut commits = Commits { crowd, per_second: 0.0, spent: Vec::new() };
            let (ours, disk) = alternate(pace, &mut commits, &mut disk).await?;
            let mut rows = vec![Row::compared(&case.name, Unit::PerSecond, &ours, appends, &disk)?];
            rows.extend(commits.parts(&case.name));
            Ok(rows)
        }
        What::Resolve { lease, copies, shuffled } => {
            let mut resolves = Resolves::new(lab, case.callers, lease, copies, shuffled).await?;
            let mut bare = BareCalls(Crowd::gather(lab, case.callers, copies).await?);
            let (ours, bare) = alternate(pace, &mut resolves, &mut bare).await?;
            resolves.end().await?;
            Ok(vec![Row::compared(&case.name, Unit::Micros, &ours, "the smallest call to the same leader", &bare)?])
        }
    }
}

/// The disk by itself.
struct Disk(PathBuf);

impl Side for Disk {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        let dir = self.0.clone();
        let appends = tokio::task::spawn_blocking(move || probe::appends(&dir, time)).await;
        appends.expect("writing a file does not panic")
    }
}

/// Writers that work at the same time.
struct Crowd {
    lab: Arc<Lab>,
    writers: Vec<Writer>,
}

impl Crowd {
    async fn gather(lab: &Arc<Lab>, callers: usize, copies: u8) -> Result<Self, BenchError> {
        let mut writers = Vec::with_capacity(callers);
        for _ in 0..callers {
            writers.push(lab.writer(copies).await?);
        }
        Ok(Self { lab: Arc::clone(lab), writers })
    }

    /// Has every writer work on its share, begun together. Answers what each said, and the time from the first start to the last end.
    async fn work<I, O, W, F>(&mut self, shares: Vec<I>, work: W) -> Result<(Vec<O>, Duration), BenchError>
    where
        I: Send + 'static,
        O: Send + 'static,
        W: Fn(Writer, I) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<(Writer, O), LabError>> + Send,
    {
        let start = Arc::new(Barrier::new(self.writers.len()));
        let mut tasks = JoinSet::new();
        for (writer, share) in self.writers.drain(..).zip(shares) {
            let (start, work) = (Arc::clone(&start), work.clone());
            tasks.spawn(async move {
                start.wait().await;
                let began = Instant::now();
                let (writer, said) = work(writer, share).await?;
                Ok::<_, LabError>((writer, said, began, Instant::now()))
            });
        }
        let (mut answers, mut span) = (Vec::new(), None::<(Instant, Instant)>);
        while let Some(done) = tasks.join_next().await {
            let (writer, said, began, ended) = done.expect("a writer does not panic")?;
            self.writers.push(writer);
            answers.push(said);
            span = Some(span.map_or((began, ended), |(first, last)| (first.min(began), last.max(ended))));
        }
        Ok((answers, span.map_or(Duration::ZERO, |(first, last)| last - first)))
    }

    /// Has every writer make one call after the other for about `time`; `amount` is what a call counts for.
    async fn keep_calling<W, F>(&mut self, time: Duration, amount: f64, call: W) -> Result<Round, BenchError>
    where
        W: Fn(Writer, usize) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<Writer, LabError>> + Send,
    {
        let shares = vec![(); self.writers.len()];
        let each = move |mut writer: Writer, ()| {
            let call = call.clone();
            async move {
                let (until, mut latencies) = (Instant::now() + time, Vec::new());
                while latencies.is_empty() || Instant::now() < until {
                    let began = Instant::now();
                    writer = call(writer, latencies.len()).await?;
                    latencies.push(began.elapsed());
                }
                Ok((writer, latencies))
            }
        };
        let (latencies, elapsed) = self.work(shares, each).await?;
        Ok(round(amount, elapsed, latencies))
    }
}

fn round(amount: f64, elapsed: Duration, latencies: Vec<Vec<Duration>>) -> Round {
    let latencies: Vec<Duration> = latencies.into_iter().flatten().collect();
    Round { amount: latencies.iter().map(|_| amount).sum(), elapsed, latencies }
}

/// Grants that are left to end by their time.
struct Grants(Crowd);

impl Side for Grants {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        let grant = async |mut writer: Writer, _| writer.grant(GRANT_SLOTS, GRANT_TTL).await.map(|_| writer);
        self.0.keep_calling(time, 1.0, move |writer, number| Box::pin(grant(writer, number))).await
    }
}

/// The smallest call.
struct BareCalls(Crowd);

impl Side for BareCalls {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        let call = |mut writer: Writer, _| async move { writer.bare_call().await.map(|()| writer) };
        self.0.keep_calling(time, 1.0, call).await
    }
}

/// Commits of whole slabs that were written before.
struct Commits {
    crowd: Crowd,
    /// Commits per second in the last round.
    per_second: f64,
    /// What the processes spent in each round, and its commits.
    spent: Vec<(BTreeMap<&'static str, Used>, usize)>,
}

impl Side for Commits {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        let callers = self.crowd.writers.len();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive number")]
        let batches = (self.per_second * time.as_secs_f64() / callers as f64).round() as usize;
        let batches = batches.clamp(2, BATCHES_MAX);
        let write = move |mut writer: Writer, ()| async move {
            let requests = commits_of(&mut writer, batches).await?;
            Ok((writer, requests))
        };
        let (mut requests, _) = self.crowd.work(vec![(); callers], write).await?;
        // Writers come back in any order: each commits what it wrote.
        requests.sort_by(|one, other| one[0].writer.cmp(&other[0].writer));
        self.crowd.writers.sort_by_key(Writer::id);
        let keys: Vec<Vec<Bytes>> = requests.iter().map(|requests| keys_of(requests)).collect();

        let before = self.used().await?;
        let commit = |mut writer: Writer, requests: Vec<v1::CommitRequest>| async move {
            let mut latencies = Vec::with_capacity(requests.len());
            for request in requests {
                let began = Instant::now();
                writer.commit(request).await?;
                latencies.push(began.elapsed());
            }
            Ok((writer, latencies))
        };
        let (latencies, elapsed) = self.crowd.work(requests, commit).await?;
        let after = self.used().await?;

        self.crowd.writers.sort_by_key(Writer::id);
        let delete = |mut writer: Writer, keys: Vec<Bytes>| async move {
            writer.delete(&keys).await?;
            Ok((writer, ()))
        };
        self.crowd.work(keys, delete).await?;
        let spent = after.into_iter().map(|(role, used)| (role, used.since(before[role]))).collect();
        self.spent.push((spent, callers * batches));
        self.per_second = (callers * batches) as f64 / elapsed.as_secs_f64();
        Ok(round(BATCH as f64, elapsed, latencies))
    }
}

impl Commits {
    /// What the processes used until now, by role; this process is `callers`.
    async fn used(&self) -> Result<BTreeMap<&'static str, Used>, BenchError> {
        let mut all = BTreeMap::<&'static str, Used>::new();
        let own = ("callers", std::process::id());
        for (role, pid) in self.crowd.lab.processes().await?.into_iter().chain([own]) {
            let so_far = all.entry(role).or_default();
            *so_far = so_far.and(Used::by(pid)?);
        }
        Ok(all)
    }

    /// What one commit costs each role, in processor time and in bytes to the disk. The first round was warm-up.
    fn parts(&self, case: &str) -> Vec<Row> {
        let (mut all, mut commits) = (BTreeMap::<&'static str, Used>::new(), 0);
        for (spent, count) in self.spent.iter().skip(1) {
            commits += count;
            for (role, used) in spent {
                let so_far = all.entry(role).or_default();
                *so_far = so_far.and(*used);
            }
        }
        let each = |total: f64| total / commits as f64;
        // What is less than the clock of the kernel shows was not measured.
        let cpu = all.iter().filter(|(_, used)| !used.cpu.is_zero()).map(|(role, used)| {
            Row::cost(case, &format!("cpu/{role}"), Unit::Micros, each(used.cpu.as_secs_f64() * 1e6))
        });
        let disk = all
            .iter()
            .filter(|(_, used)| used.written > 0)
            .map(|(role, used)| Row::cost(case, &format!("disk/{role}"), Unit::Bytes, each(used.written as f64)));
        cpu.chain(disk).collect()
    }
}

/// Writes slabs for so many commits.
async fn commits_of(writer: &mut Writer, batches: usize) -> Result<Vec<v1::CommitRequest>, LabError> {
    let mut requests = Vec::with_capacity(batches);
    while requests.len() < batches {
        let count = (batches - requests.len()).min(BATCHES_PER_SLAB);
        let slots = u32::try_from(count * BATCH).expect("a slab's slots fit in a u32");
        let written = writer.write(slots, GRANT_TTL_MAX).await?;
        requests.extend(writer.commits(&written, BATCH));
    }
    Ok(requests)
}

/// Writes and commits so many batches; answers the keys of each.
pub(super) async fn written(writer: &mut Writer, batches: usize) -> Result<Vec<Vec<Bytes>>, LabError> {
    let mut keys = Vec::with_capacity(batches);
    for request in commits_of(writer, batches).await? {
        keys.push(keys_of(std::slice::from_ref(&request)));
        writer.commit(request).await?;
    }
    Ok(keys)
}

fn keys_of(requests: &[v1::CommitRequest]) -> Vec<Bytes> {
    requests.iter().flat_map(|request| &request.entries).map(|entry| entry.key.clone()).collect()
}

/// Resolves of keys that lie together, or from all over.
struct Resolves {
    crowd: Crowd,
    lease: Duration,
    /// What is asked for, in turn.
    asked: Arc<Vec<Vec<Bytes>>>,
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
        let writer = crowd.writers.first_mut().expect("there is a caller");
        let mut asked = written(writer, RESOLVED_BATCHES).await?;
        if shuffled {
            // Every question has one key of every batch.
            asked = (0..BATCH).map(|key| asked.iter().map(|batch| batch[key].clone()).collect()).collect();
        }
        Ok(Self { crowd, lease, asked: Arc::new(asked) })
    }

    async fn end(mut self) -> Result<(), BenchError> {
        let keys: Vec<Bytes> = self.asked.iter().flatten().cloned().collect();
        self.crowd.writers.first_mut().expect("there is a caller").delete(&keys).await?;
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
        self.crowd.keep_calling(time, 1.0, resolve).await
    }
}
