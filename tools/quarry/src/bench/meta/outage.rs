//! How long a writer waits when the leader of its shard is killed: from the kill to the end of the first put that began after it.

use crate::bench::{
    Session,
    error::BenchError,
    measure::{Measured, Round},
    report::{Row, Unit},
    stage::Stage,
};
use bytes::Bytes;
use quarry::{admin::FIRST_SHARD, config::RaftSection, local::Signal};
use quarry_client::Namespace;
use std::time::Duration;
use tokio::{sync::watch, time::Instant};

const CASE: &str = "outage/leader-kill";
/// Leaders that are killed.
const LOSSES: u32 = 12;
/// How long a killed node may take to be back.
const READY: Duration = Duration::from_secs(60);
const REGION_BYTES: u64 = 256 << 20;
/// How long a writer writes between two losses.
const CALM: Duration = Duration::from_millis(500);

/// Measures it on a cluster of its own, unless this is a quick look: losses take seconds.
pub(super) async fn run(session: &mut Session) -> Result<(), BenchError> {
    if session.tiny || !session.wants(CASE) {
        return Ok(());
    }
    let raft = RaftSection { shards: 1, ..RaftSection::default() };
    let timeout = Duration::from_millis(raft.election_ms_max);
    let mut stage = Stage::start_with(&session.dir, 2, REGION_BYTES, raft).await?;
    let client = stage.client().await?;
    let namespace = stage.namespace(&client, "outage", 1).await?;
    let (last, puts) = watch::channel(None);
    let writer = tokio::spawn(write(namespace, last));
    let measured = losses(&mut stage, puts).await;
    writer.abort();
    let measured = measured?;
    client.close().await?;
    let row = Row::alone(CASE, Unit::Micros, &measured)?;
    session.push(row.against("the longest election timeout", timeout.as_secs_f64() * 1e6));
    stage.end().await
}

/// When a put began and ended, or why it failed.
type Put = Option<Result<(Instant, Instant), String>>;

/// Puts small values one after the other until nobody listens any more, and tells of the last one.
async fn write(namespace: Namespace, last: watch::Sender<Put>) {
    for number in 0_u32.. {
        let began = Instant::now();
        let put = namespace.put(format!("outage/{number}"), Bytes::from_static(&[7; 256])).await;
        let said = put.map(|_| (began, Instant::now())).map_err(|error| error.to_string());
        let failed = said.is_err();
        if last.send(Some(said)).is_err() || failed {
            break;
        }
    }
}

async fn losses(stage: &mut Stage, mut puts: watch::Receiver<Put>) -> Result<Measured, BenchError> {
    let mut measured = Measured::default();
    for _ in 0..LOSSES {
        first_since(&mut puts, Instant::now() + CALM).await?;
        let leader = stage.cluster().leader(FIRST_SHARD, READY).await?;
        let killed = Instant::now();
        stage.cluster_mut().kill(leader, Signal::KILL).await?;
        let ended = first_since(&mut puts, killed).await?;
        let mut round = Round::default();
        round.add(1.0, ended - killed);
        measured.add(round);
        stage.cluster_mut().restart(leader)?;
        stage.cluster_mut().wait_ready(READY).await?;
    }
    Ok(measured)
}

/// When the first put ended that began at `since` or later.
async fn first_since(puts: &mut watch::Receiver<Put>, since: Instant) -> Result<Instant, BenchError> {
    let begun = |put: &Put| put.as_ref().is_some_and(|put| put.as_ref().map_or(true, |(began, _)| *began >= since));
    let found = tokio::time::timeout(READY, puts.wait_for(begun)).await;
    let said = match found {
        Ok(Ok(put)) => put.clone(),
        Ok(Err(_)) => Some(Err("the writer ended".to_owned())),
        Err(_) => Some(Err(format!("no put within {READY:?}"))),
    };
    match said {
        Some(Ok((_, ended))) => Ok(ended),
        Some(Err(why)) => Err(BenchError::Outage { why }),
        None => Err(BenchError::Outage { why: "no put yet".to_owned() }),
    }
}
