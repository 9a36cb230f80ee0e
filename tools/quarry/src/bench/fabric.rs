//! `quarry bench fabric`: how much of what the fabric gives arrives at the callers of puts and gets, checksums on, one copy.
//!
//! The best of both: Quarry with many values in one call, raw operations at the depth that suits them best here. Depth one: one value per call, one
//! operation at a time. The raw target is served as a data node is, so that only what Quarry adds makes the difference.

use super::{
    Session,
    error::BenchError,
    measure::{Round, Side, alternate},
    raw::Raw,
    report::{Row, Unit},
    stage::{Stage, delete},
    values::{Source, all_put, key},
};
use quarry_client::{Key, Namespace};
use quarry_fabric::reference::Way;
use std::time::Duration;
use tokio::time::Instant;

/// Sizes of a value: name, bytes.
const SIZES: [(&str, usize); 4] = [("4KiB", 4 << 10), ("64KiB", 64 << 10), ("1MiB", 1 << 20), ("4MiB", 4 << 20)];
/// What one run may use, and how large its calls are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Scale {
    /// Memory of the data node.
    region_bytes: u64,
    /// Bytes of the values of one call of the best case, at least 32 MiB to be comparable; few of the smallest values, so that a call is not all
    /// bookkeeping of this bench.
    call_bytes: usize,
    call_values_max: usize,
    /// Bytes that one round of puts writes at most; then they are deleted.
    round_bytes: usize,
    /// Memory of the raw side, here and there.
    raw_bytes: usize,
}

const FULL: Scale = Scale {
    region_bytes: 4 << 30,
    call_bytes: 128 << 20,
    call_values_max: 8192,
    round_bytes: 256 << 20,
    raw_bytes: 128 << 20,
};
const TINY: Scale = Scale {
    region_bytes: 512 << 20,
    call_bytes: 8 << 20,
    call_values_max: 64,
    round_bytes: 8 << 20,
    raw_bytes: 128 << 20,
};
/// Longest round of gets: it stays within the leases that were taken before it.
const WARM_ROUND_MAX: Duration = Duration::from_secs(2);

pub(crate) async fn run(session: &mut Session) -> Result<(), BenchError> {
    let scale = if session.tiny { TINY } else { FULL };
    let names: Vec<String> =
        SIZES.iter().flat_map(|(size, _)| [put_best(size), get_best(size), put_one(size), get_one(size)]).collect();
    if !session.wants_any(&names) {
        return Ok(());
    }
    let stage = Stage::start(&session.dir, 1, scale.region_bytes).await?;
    let client = stage.client().await?;
    let namespace = stage.namespace(&client, "fabric", 1).await?;
    let mut bench = Bench { stage: &stage, namespace: &namespace, raw: Raw::start(scale.raw_bytes)?, scale };
    for (size, bytes) in SIZES {
        Box::pin(bench.puts(session, size, bytes)).await?;
        Box::pin(bench.gets(session, size, bytes)).await?;
    }
    drop(bench);
    client.close().await?;
    stage.end().await
}

fn put_best(size: &str) -> String {
    format!("put/{size}/copies1/best")
}
fn put_one(size: &str) -> String {
    format!("put/{size}/copies1/depth1")
}
fn get_best(size: &str) -> String {
    format!("get/{size}/best")
}
fn get_one(size: &str) -> String {
    format!("get/{size}/depth1/warm")
}

struct Bench<'a> {
    stage: &'a Stage,
    namespace: &'a Namespace,
    raw: Raw,
    scale: Scale,
}

impl Bench<'_> {
    /// Values of one call of the best case.
    fn many(&self, bytes: usize) -> usize {
        (self.scale.call_bytes / bytes).clamp(1, self.scale.call_values_max)
    }

    async fn puts(&mut self, session: &mut Session, size: &str, bytes: usize) -> Result<(), BenchError> {
        for (case, unit, batch) in
            [(put_best(size), Unit::GibPerSecond, self.many(bytes)), (put_one(size), Unit::Micros, 1)]
        {
            if !session.wants(&case) {
                continue;
            }
            // All rounds and their rest fit beside each other, so that no round waits for space.
            self.stage.room(self.scale.region_bytes / 2).await?;
            let depth = if batch == 1 { 1 } else { self.raw.best_depth(Way::Write, bytes)? };
            let name = self.raw.name(Way::Write, depth);
            let mut ours = Puts {
                case: &case,
                namespace: self.namespace,
                source: Source::new(bytes),
                batch,
                round_bytes: self.scale.round_bytes,
                round: 0,
            };
            let (ours, theirs) =
                alternate(session.pace, &mut ours, &mut self.raw.side(Way::Write, bytes, depth)).await?;
            session.push(Row::compared(&case, unit, &ours, name, &theirs)?);
        }
        Ok(())
    }

    async fn gets(&mut self, session: &mut Session, size: &str, bytes: usize) -> Result<(), BenchError> {
        for (case, unit, batch) in
            [(get_best(size), Unit::GibPerSecond, self.many(bytes)), (get_one(size), Unit::Micros, 1)]
        {
            if !session.wants(&case) {
                continue;
            }
            self.stage.room(self.scale.region_bytes / 2).await?;
            let source = Source::new(bytes);
            let values = self.many(bytes);
            source.write(self.namespace, &case, 0..values).await?;
            let keys: Vec<Key> = (0..values).map(|at| key(&case, at)).collect();
            let depth = if batch == 1 { 1 } else { self.raw.best_depth(Way::Read, bytes)? };
            let name = self.raw.name(Way::Read, depth);
            let mut ours = Gets { case: &case, namespace: self.namespace, source, keys: &keys, batch, next: 0 };
            let (ours, theirs) =
                alternate(session.pace, &mut ours, &mut self.raw.side(Way::Read, bytes, depth)).await?;
            session.push(Row::compared(&case, unit, &ours, name, &theirs)?);
            delete(self.namespace, &keys).await?;
        }
        Ok(())
    }
}

/// Puts of new keys, deleted after each round.
struct Puts<'a> {
    case: &'a str,
    namespace: &'a Namespace,
    source: Source,
    batch: usize,
    round_bytes: usize,
    round: usize,
}

impl Side for Puts<'_> {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        self.round += 1;
        let prefix = format!("{}/{}", self.case, self.round);
        let mut round = Round::default();
        let until = Instant::now() + time;
        let mut written = 0;
        loop {
            let items = self.source.items(&prefix, written..written + self.batch);
            let begun = Instant::now();
            let results = self.namespace.put_many(items).await;
            round.add((self.batch * self.source.size()) as f64, begun.elapsed());
            all_put(self.case, results)?;
            written += self.batch;
            if Instant::now() >= until || written * self.source.size() >= self.round_bytes {
                break;
            }
        }
        let keys: Vec<Key> = (0..written).map(|at| key(&prefix, at)).collect();
        delete(self.namespace, &keys).await?;
        Ok(round)
    }
}

/// Gets through descriptors within their leases.
struct Gets<'a> {
    case: &'a str,
    namespace: &'a Namespace,
    source: Source,
    keys: &'a [Key],
    batch: usize,
    next: usize,
}

impl Side for Gets<'_> {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        // Leases may have ended during the other side's round. Every value is looked at here, none while the time is taken.
        let got = self.namespace.get_many(self.keys).await;
        self.source.check(self.case, self.case, 0..self.keys.len(), got)?;
        let mut round = Round::default();
        let until = Instant::now() + time.min(WARM_ROUND_MAX);
        loop {
            let first = self.next;
            let keys = &self.keys[first..self.keys.len().min(first + self.batch)];
            self.next = if first + keys.len() == self.keys.len() { 0 } else { first + keys.len() };
            let begun = Instant::now();
            let got = self.namespace.get_many(keys).await;
            round.add((keys.len() * self.source.size()) as f64, begun.elapsed());
            for (at, got) in (first..).zip(got) {
                self.source.check_one(self.case, self.case, at, got)?;
            }
            if Instant::now() >= until {
                return Ok(round);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_of_the_best_case_fills_a_commit() {
        for (_, bytes) in SIZES {
            let values = (FULL.call_bytes / bytes).clamp(1, FULL.call_values_max);
            assert!(values * bytes >= 32 << 20, "{bytes}");
        }
        // What a case writes in its six rounds lies in what it waits for, beside what rests of the case before it.
        assert!(6 * FULL.round_bytes as u64 <= FULL.region_bytes / 2);
    }
}
