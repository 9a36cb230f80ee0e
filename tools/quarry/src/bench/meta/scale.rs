//! What many shards cost: commits of sixteen callers spread over them, and what meta nodes use when nobody asks anything of them.

use super::{
    BATCH, Disk,
    commits::Commits,
    lab::{Lab, Work},
    probe::Used,
};
use crate::bench::{
    Session,
    error::BenchError,
    measure::alternate,
    report::{Row, Unit},
};
use quarry::{admin::FIRST_SHARD, local::Member};
use std::{sync::Arc, time::Duration};

/// Shards of the clusters that are measured.
const SHARDS: [u32; 3] = [1, 8, 64];
const CALLERS: usize = 16;
/// A new cluster has registered its memory, lent it and spread its leaders by then.
const SETTLED: Duration = Duration::from_secs(5);
/// How long nobody asks anything: the kernel counts in hundredths of a second.
const IDLE: Duration = Duration::from_secs(10);

/// Measures the cases that are wanted, each number of shards on a cluster of its own.
pub(super) async fn run(session: &mut Session) -> Result<(), BenchError> {
    // A quick look is one at two shards, for a moment.
    let (all, settled, idle) = if session.tiny {
        (&[2][..], Duration::ZERO, Duration::from_millis(500))
    } else {
        (&SHARDS[..], SETTLED, IDLE)
    };
    for shards in all {
        let (rest, commits) =
            (format!("shards{shards}/idle"), format!("shards{shards}/commit/{BATCH}/callers{CALLERS}"));
        let (wants_rest, wants_commits) = (session.wants(&rest), session.wants(&commits));
        if !wants_rest && !wants_commits {
            continue;
        }
        let lab = Arc::new(Lab::start_with(&session.dir, *shards).await?);
        if wants_rest {
            tokio::time::sleep(settled).await;
            let before = metas(&lab)?;
            tokio::time::sleep(idle).await;
            let share = metas(&lab)?.since(before).cpu.as_secs_f64() / idle.as_secs_f64();
            // What is less than the clock of the kernel shows was not measured.
            if share > 0.0 {
                session.push(Row::plain(rest, Unit::PercentOfCore, share * 100.0));
            }
        }
        if wants_commits {
            let spread = |caller: usize| {
                let caller = u32::try_from(caller).expect("few callers");
                Work { shard: FIRST_SHARD + caller % shards, ..Work::of(1) }
            };
            let works: Vec<Work> = (0..CALLERS).map(spread).collect();
            let mut ours = Commits::new(&lab, &works, BATCH).await?;
            let mut disk = Disk(lab.stage.cluster().dir().to_owned());
            let (measured, appends) = alternate(session.pace, &mut ours, &mut disk).await?;
            session.push(Row::compared(&commits, Unit::PerSecond, &measured, Disk::SAID, &appends)?);
            for row in ours.parts(&commits) {
                session.push(row);
            }
        }
        let lab = Arc::into_inner(lab).expect("whoever shared it has ended");
        lab.end().await?;
    }
    Ok(())
}

/// What all meta nodes have used until now.
fn metas(lab: &Lab) -> Result<Used, BenchError> {
    let cluster = lab.stage.cluster();
    let pids = cluster.metas().into_iter().filter_map(|meta: Member| cluster.pid(meta));
    pids.into_iter().try_fold(Used::default(), |sum, pid| Ok(sum.and(Used::by(pid)?)))
}
