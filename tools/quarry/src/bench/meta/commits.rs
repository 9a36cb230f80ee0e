//! Commits of whole slabs that were written before the clock runs, and what the processes spend on them.

use super::{
    BATCHES_MAX, LabError,
    crowd::{Crowd, round},
    lab::{Lab, Work, Writer},
    probe::Used,
};
use crate::bench::{
    error::BenchError,
    measure::{Round, Side},
    report::{Row, Unit},
};
use bytes::Bytes;
use quarry_proto::v1;
use quarry_wire::limits::{GRANT_TTL_MAX, SLOTS_PER_SLAB_MAX};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::time::Instant;

/// Callers that commit.
pub(super) struct Commits {
    lab: Arc<Lab>,
    crowd: Crowd<Writer>,
    /// Entries of a commit.
    batch: usize,
    /// Commits per second in the last round.
    per_second: f64,
    /// What the processes spent in each round, and its commits.
    spent: Vec<(BTreeMap<&'static str, Used>, usize)>,
}

impl Commits {
    /// A caller for each of these works, with `batch` slots in a commit.
    pub(super) async fn new(lab: &Arc<Lab>, works: &[Work], batch: usize) -> Result<Self, BenchError> {
        let crowd = Crowd::of(lab, works).await?;
        Ok(Self { lab: Arc::clone(lab), crowd, batch, per_second: 0.0, spent: Vec::new() })
    }
}

impl Side for Commits {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        let (callers, batch) = (self.crowd.callers.len(), self.batch);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive number")]
        let batches = (self.per_second * time.as_secs_f64() / callers as f64).round() as usize;
        let batches = batches.clamp(2, BATCHES_MAX);
        let write = move |mut writer: Writer, ()| async move {
            let requests = commits_of(&mut writer, batches, batch).await?;
            Ok((writer, requests))
        };
        let (mut requests, _) = self.crowd.work(vec![(); callers], write).await?;
        // Writers come back in any order: each commits what it wrote.
        requests.sort_by(|one, other| one[0].writer.cmp(&other[0].writer));
        self.crowd.callers.sort_by_key(Writer::id);
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

        self.crowd.callers.sort_by_key(Writer::id);
        let delete = |mut writer: Writer, keys: Vec<Bytes>| async move {
            writer.delete(&keys).await?;
            Ok((writer, ()))
        };
        self.crowd.work(keys, delete).await?;
        let spent = after.into_iter().map(|(role, used)| (role, used.since(before[role]))).collect();
        self.spent.push((spent, callers * batches));
        self.per_second = (callers * batches) as f64 / elapsed.as_secs_f64();
        Ok(round(batch as f64, elapsed, latencies))
    }
}

impl Commits {
    /// What the processes used until now, by role; this process is `callers`.
    async fn used(&self) -> Result<BTreeMap<&'static str, Used>, BenchError> {
        let mut all = BTreeMap::<&'static str, Used>::new();
        let own = ("callers", std::process::id());
        for (role, pid) in self.lab.processes().await?.into_iter().chain([own]) {
            let so_far = all.entry(role).or_default();
            *so_far = so_far.and(Used::by(pid)?);
        }
        Ok(all)
    }

    /// What one commit costs each role, in processor time and in bytes to the disk. The first round was warm-up.
    pub(super) fn parts(&self, case: &str) -> Vec<Row> {
        let (mut all, mut commits) = (BTreeMap::<&'static str, Used>::new(), 0);
        for (spent, count) in self.spent.iter().skip(1) {
            commits += count;
            for (role, used) in spent {
                let so_far = all.entry(role).or_default();
                *so_far = so_far.and(*used);
            }
        }
        all.into_iter().flat_map(|(role, used)| costs(case, role, used, commits)).collect()
    }
}

/// What each of `count` calls cost `role`, in processor time and in bytes to the disk. What is less than the kernel shows was not measured.
pub(super) fn costs(case: &str, role: &str, used: Used, count: usize) -> Vec<Row> {
    let each = |total: f64| total / count as f64;
    let mut rows = Vec::new();
    if !used.cpu.is_zero() {
        rows.push(Row::cost(case, &format!("cpu/{role}"), Unit::Micros, each(used.cpu.as_secs_f64() * 1e6)));
    }
    if used.written > 0 {
        rows.push(Row::cost(case, &format!("disk/{role}"), Unit::Bytes, each(used.written as f64)));
    }
    rows
}

/// Writes slabs for so many commits of `batch` slots.
async fn commits_of(writer: &mut Writer, batches: usize, batch: usize) -> Result<Vec<v1::CommitRequest>, LabError> {
    let mut requests = Vec::with_capacity(batches);
    while requests.len() < batches {
        let count = (batches - requests.len()).min(SLOTS_PER_SLAB_MAX as usize / batch);
        let slots = u32::try_from(count * batch).expect("a slab's slots fit in a u32");
        let written = writer.write(slots, GRANT_TTL_MAX).await?;
        requests.extend(writer.commits(&written, batch));
    }
    Ok(requests)
}

/// Writes and commits so many batches; answers the keys of each.
pub(in crate::bench) async fn written(
    writer: &mut Writer,
    batches: usize,
    batch: usize,
) -> Result<Vec<Vec<Bytes>>, LabError> {
    let mut keys = Vec::with_capacity(batches);
    for request in commits_of(writer, batches, batch).await? {
        keys.push(keys_of(std::slice::from_ref(&request)));
        writer.commit(request).await?;
    }
    Ok(keys)
}

fn keys_of(requests: &[v1::CommitRequest]) -> Vec<Bytes> {
    requests.iter().flat_map(|request| &request.entries).map(|entry| entry.key.clone()).collect()
}
