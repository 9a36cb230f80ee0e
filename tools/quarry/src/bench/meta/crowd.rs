//! Callers that work at the same time, and the time that they take for it.

use super::{
    LabError,
    lab::{Lab, Work, Writer},
};
use crate::bench::{error::BenchError, etcd, measure::Round};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};
use tokio::{sync::Barrier, task::JoinSet, time::Instant};

/// Callers with connections of their own.
pub(super) struct Crowd<C> {
    pub(super) callers: Vec<C>,
}

impl Crowd<Writer> {
    /// So many writers of the first shard.
    pub(super) async fn gather(lab: &Lab, callers: usize, copies: u8) -> Result<Self, BenchError> {
        Self::of(lab, &vec![Work::of(copies); callers]).await
    }

    /// A writer for each of these.
    pub(super) async fn of(lab: &Lab, works: &[Work]) -> Result<Self, BenchError> {
        let shards: BTreeSet<u32> = works.iter().map(|work| work.shard).collect();
        let mut leaders = BTreeMap::new();
        for shard in shards {
            leaders.insert(shard, lab.leader(shard).await?);
        }
        let mut callers = Vec::with_capacity(works.len());
        for work in works {
            callers.push(lab.writer_at(&leaders[&work.shard], *work).await?);
        }
        Ok(Self { callers })
    }
}

impl Crowd<etcd::Caller> {
    /// So many callers of etcd's leader, whose keys and values have so many bytes.
    pub(super) async fn of_etcd(
        etcd: &etcd::Etcd,
        callers: usize,
        (key_bytes, value_bytes): (usize, usize),
    ) -> Result<Self, BenchError> {
        let mut crowd = Self { callers: Vec::with_capacity(callers) };
        for _ in 0..callers {
            crowd.callers.push(etcd.caller(key_bytes, value_bytes).await?);
        }
        Ok(crowd)
    }
}

impl<C: Send + 'static> Crowd<C> {
    /// Has every caller work on its share, begun together. Answers what each said, and the time from the first start to the last end.
    pub(super) async fn work<I, O, W, F>(&mut self, shares: Vec<I>, work: W) -> Result<(Vec<O>, Duration), BenchError>
    where
        I: Send + 'static,
        O: Send + 'static,
        W: Fn(C, I) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<(C, O), LabError>> + Send,
    {
        let start = Arc::new(Barrier::new(self.callers.len()));
        let mut tasks = JoinSet::new();
        for (caller, share) in self.callers.drain(..).zip(shares) {
            let (start, work) = (Arc::clone(&start), work.clone());
            tasks.spawn(async move {
                start.wait().await;
                let began = Instant::now();
                let (caller, said) = work(caller, share).await?;
                Ok::<_, LabError>((caller, said, began, Instant::now()))
            });
        }
        let (mut answers, mut span) = (Vec::new(), None::<(Instant, Instant)>);
        while let Some(done) = tasks.join_next().await {
            let (caller, said, began, ended) = done.expect("a caller does not panic")?;
            self.callers.push(caller);
            answers.push(said);
            span = Some(span.map_or((began, ended), |(first, last)| (first.min(began), last.max(ended))));
        }
        Ok((answers, span.map_or(Duration::ZERO, |(first, last)| last - first)))
    }

    /// Has every caller make one call after the other for about `time`; `amount` is what a call counts for.
    pub(super) async fn keep_calling<W, F>(&mut self, time: Duration, amount: f64, call: W) -> Result<Round, BenchError>
    where
        W: Fn(C, usize) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<C, LabError>> + Send,
    {
        let shares = vec![(); self.callers.len()];
        let each = move |mut caller: C, ()| {
            let call = call.clone();
            async move {
                let (until, mut latencies) = (Instant::now() + time, Vec::new());
                while latencies.is_empty() || Instant::now() < until {
                    let began = Instant::now();
                    caller = call(caller, latencies.len()).await?;
                    latencies.push(began.elapsed());
                }
                Ok((caller, latencies))
            }
        };
        let (latencies, elapsed) = self.work(shares, each).await?;
        Ok(round(amount, elapsed, latencies))
    }
}

/// A round of calls that count for `amount` each.
pub(super) fn round(amount: f64, elapsed: Duration, latencies: Vec<Vec<Duration>>) -> Round {
    let latencies: Vec<Duration> = latencies.into_iter().flatten().collect();
    Round { amount: latencies.iter().map(|_| amount).sum(), elapsed, latencies }
}
