//! The control plane beside etcd: both hold three copies of a log on the same disk and answer when two have it there.
//!
//! Ours is the smallest thing that Quarry keeps, a commit of one slot with its key, beside a put of such a key; and a commit of a hundred beside a
//! transaction of a hundred puts. A commit goes through a data node, which signs what it holds, and over TLS; a put goes straight to the leader.

use super::{
    BATCH,
    commits::{Commits, costs},
    crowd::Crowd,
    lab::{Lab, PAYLOAD_BYTES, Work},
    probe::Used,
};
use crate::bench::{
    Session,
    error::BenchError,
    etcd::{self, Etcd},
    measure::{Pace, Round, Side, alternate},
    report::{Row, Unit},
};
use quarry_wire::limits::LANES_MAX;
use std::{sync::Arc, time::Duration};

/// Bytes of every key, of both sides.
const KEY_BYTES: usize = 64;
/// Callers of single puts, and of batches.
const SINGLE: [usize; 4] = [1, 16, 64, 256];
const BATCHED: [usize; 3] = [1, 16, 64];

/// A case with its name.
struct Case {
    name: String,
    callers: usize,
    batch: usize,
}

fn cases(tiny: bool) -> Vec<Case> {
    let of = |batch: usize, crowds: &[usize]| -> Vec<Case> {
        let crowds = if tiny { &crowds[..1] } else { crowds };
        let named = |callers: &usize| Case { name: format!("etcd/{batch}/callers{callers}"), callers: *callers, batch };
        crowds.iter().map(named).collect()
    };
    of(1, &SINGLE).into_iter().chain(of(BATCH, &BATCHED)).collect()
}

/// Measures the cases that are wanted. The largest crowd takes all lanes of a data node, and gives them back only as its grants end: it has a
/// cluster of its own.
pub(super) async fn run(session: &mut Session) -> Result<(), BenchError> {
    let wanted = cases(session.tiny).into_iter().filter(|case| session.wants(&case.name));
    let (crowds, cases): (Vec<Case>, Vec<Case>) = wanted.partition(|case| case.callers >= LANES_MAX);
    for cases in [cases, crowds].into_iter().filter(|cases| !cases.is_empty()) {
        of_one_cluster(session, cases).await?;
    }
    Ok(())
}

async fn of_one_cluster(session: &mut Session, cases: Vec<Case>) -> Result<(), BenchError> {
    etcd::installed()?;
    let lab = Arc::new(Lab::start(&session.dir).await?);
    let etcd = Etcd::start(lab.stage.cluster().dir()).await?;
    for case in cases {
        for row in Box::pin(measure(&lab, &etcd, &case, session.pace)).await? {
            session.push(row);
        }
    }
    drop(etcd);
    let lab = Arc::into_inner(lab).expect("whoever shared it has ended");
    lab.end().await
}

async fn measure(lab: &Arc<Lab>, etcd: &Etcd, case: &Case, pace: Pace) -> Result<Vec<Row>, BenchError> {
    let work = Work { key_bytes: KEY_BYTES, ..Work::of(1) };
    let mut commits = Commits::new(lab, &vec![work; case.callers], case.batch).await?;
    let crowd = Crowd::of_etcd(etcd, case.callers, (KEY_BYTES, PAYLOAD_BYTES)).await?;
    let mut puts = Puts { etcd, crowd, batch: case.batch, spent: Vec::new() };
    let (ours, theirs) = alternate(pace, &mut commits, &mut puts).await?;
    let what = if case.batch == 1 { "Put".to_owned() } else { format!("Txn of {} puts", case.batch) };
    let reference = format!("etcd {} {what}", etcd.version());
    let mut rows = vec![Row::compared(&case.name, Unit::PerSecond, &ours, reference, &theirs)?];
    rows.extend(commits.parts(&case.name));
    rows.extend(puts.parts(&case.name));
    Ok(rows)
}

/// Puts into etcd, alone or many in a transaction.
struct Puts<'a> {
    etcd: &'a Etcd,
    crowd: Crowd<etcd::Caller>,
    batch: usize,
    /// What its members spent in each round, and its calls.
    spent: Vec<(Used, usize)>,
}

impl Side for Puts<'_> {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        let before = self.etcd.used()?;
        let batch = self.batch;
        let put = move |mut caller: etcd::Caller, _| async move {
            if batch == 1 {
                caller.put().await?
            } else {
                caller.put_many(batch).await?
            }
            Ok(caller)
        };
        let round = self.crowd.keep_calling(time, batch as f64, put).await?;
        self.spent.push((self.etcd.used()?.since(before), round.latencies.len()));
        Ok(round)
    }
}

impl Puts<'_> {
    /// What one call costs all members together. The first round was warm-up.
    fn parts(&self, case: &str) -> Vec<Row> {
        let sum = |(used, calls): (Used, usize), (more, and): &(Used, usize)| (used.and(*more), calls + and);
        let (used, calls) = self.spent.iter().skip(1).fold((Used::default(), 0), sum);
        costs(case, "etcd", used, calls)
    }
}
