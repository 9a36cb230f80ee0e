//! `quarry bench fabric`: how much of what the fabric gives arrives at the callers of puts and gets, checksums on, one copy.
//!
//! The best of both: Quarry with many values in each of two calls at a time, raw operations at the depth that suits them best here. Depth one: one
//! value per call, one operation at a time. The raw target is served as a data node is, so that only what Quarry adds makes the difference.

use super::{
    Session,
    error::BenchError,
    measure::{Round, Side, alternate},
    raw::Raw,
    report::{Row, Unit},
    stage::{Stage, delete},
    values::{Source, all_put, key},
};
use quarry_client::{Buffer, Client, Key, Namespace, PutItem, PutMode, PutTime};
use quarry_fabric::reference::Way;
use std::time::Duration;
use tokio::time::Instant;

/// How values are handed over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum How {
    /// Many per call, as `Bytes`: each is copied once on the way.
    Bytes,
    /// Many per call, in registered memory: none is copied.
    InPlace,
    /// One per call, as `Bytes`.
    One,
}

/// Sizes of a value: name, bytes.
const SIZES: [(&str, usize); 4] = [("4KiB", 4 << 10), ("64KiB", 64 << 10), ("1MiB", 1 << 20), ("4MiB", 4 << 20)];
/// What one run may use, and how large its calls are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Scale {
    /// Memory of the data node.
    region_bytes: u64,
    /// Bytes of the frames of one call of the best case: what one slab holds, so that each call is one Commit, and two calls fit into the client's
    /// window; few of the smallest values, so that a call is not all bookkeeping of this bench.
    call_bytes: usize,
    call_values_max: usize,
    /// Bytes that one round of puts writes at most; then they are deleted.
    round_bytes: usize,
    /// Memory of the raw side, here and there.
    raw_bytes: usize,
}

const FULL: Scale = Scale {
    region_bytes: 6 << 30,
    call_bytes: 64 << 20,
    call_values_max: 8192,
    round_bytes: 384 << 20,
    raw_bytes: 128 << 20,
};
const TINY: Scale = Scale {
    region_bytes: 512 << 20,
    call_bytes: 8 << 20,
    call_values_max: 64,
    round_bytes: 8 << 20,
    raw_bytes: 128 << 20,
};
/// What a slot has beyond such a payload.
const HEADER_ROOM: usize = 128;
/// Memory of a buffer counts in multiples of this at most.
const PAGE: usize = 4096;
/// Puts of one round at most: keys and items are made ahead, outside the time that is taken.
const ROUND_VALUES_MAX: usize = 1 << 16;
/// The same with one value per call.
const ROUND_CALLS_MAX: usize = 4096;
/// Longest round of gets: it stays within the leases that were taken before it.
const WARM_ROUND_MAX: Duration = Duration::from_secs(2);

pub(crate) async fn run(session: &mut Session) -> Result<(), BenchError> {
    let scale = if session.tiny { TINY } else { FULL };
    let names: Vec<String> = SIZES
        .iter()
        .flat_map(|(size, _)| {
            [put_best(size), put_in_place(size), put_one(size), get_best(size), get_in_place(size), get_one(size)]
        })
        .collect();
    if !session.wants_any(&names) {
        return Ok(());
    }
    let stage = Stage::start(&session.dir, 1, scale.region_bytes).await?;
    let client = stage.client().await?;
    let namespace = stage.namespace(&client, "fabric", 1).await?;
    let mut bench =
        Bench { stage: &stage, client: &client, namespace: &namespace, raw: Raw::start(scale.raw_bytes)?, scale };
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
fn put_in_place(size: &str) -> String {
    format!("put/{size}/copies1/reserved/best")
}
fn get_in_place(size: &str) -> String {
    format!("get/{size}/into/best")
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
    client: &'a Client,
    namespace: &'a Namespace,
    raw: Raw,
    scale: Scale,
}

impl Bench<'_> {
    /// Values of one call of the best case.
    fn many(&self, bytes: usize) -> usize {
        (self.scale.call_bytes / (bytes + HEADER_ROOM)).clamp(1, self.scale.call_values_max)
    }

    /// Unit, values of a call, and what the raw side does.
    fn terms(&mut self, how: How, way: Way, bytes: usize) -> Result<(Unit, usize, usize, String), BenchError> {
        let one = how == How::One;
        let depth = if one { 1 } else { self.raw.best_depth(way, bytes)? };
        let unit = if one { Unit::Micros } else { Unit::GibPerSecond };
        let batch = if one { 1 } else { self.many(bytes) };
        Ok((unit, batch, depth, self.raw.name(way, depth)))
    }

    async fn puts(&mut self, session: &mut Session, size: &str, bytes: usize) -> Result<(), BenchError> {
        let cases = [(put_best(size), How::Bytes), (put_in_place(size), How::InPlace), (put_one(size), How::One)];
        for (case, how) in cases {
            if !session.wants(&case) {
                continue;
            }
            // All rounds and their rest fit beside each other, so that no round waits for space.
            self.stage.room(self.scale.region_bytes / 2).await?;
            let (unit, batch, depth, reference) = self.terms(how, Way::Write, bytes)?;
            let mut ours = Puts {
                case: &case,
                client: self.client,
                namespace: self.namespace,
                source: Source::new(bytes),
                how,
                batch,
                round_bytes: self.scale.round_bytes,
                round: 0,
                spent: Spent::default(),
            };
            let raw = &mut self.raw.side(Way::Write, bytes, depth);
            let (measured, theirs) = alternate(session.pace, &mut ours, raw).await?;
            session.push(Row::compared(&case, unit, &measured, reference, &theirs)?);
            if how == How::One {
                for (part, micros) in ours.spent.parts() {
                    session.push(Row::part(format!("{case}/{part}"), micros));
                }
            }
        }
        Ok(())
    }

    async fn gets(&mut self, session: &mut Session, size: &str, bytes: usize) -> Result<(), BenchError> {
        let cases = [(get_best(size), How::Bytes), (get_in_place(size), How::InPlace), (get_one(size), How::One)];
        for (case, how) in cases {
            if !session.wants(&case) {
                continue;
            }
            self.stage.room(self.scale.region_bytes / 2).await?;
            let (unit, batch, depth, reference) = self.terms(how, Way::Read, bytes)?;
            let source = Source::new(bytes);
            let values = self.many(bytes);
            source.write(self.namespace, &case, 0..values).await?;
            let keys: Vec<Key> = (0..values).map(|at| key(&case, at)).collect();
            let mut gets = Gets { case: &case, namespace: self.namespace, source, keys: &keys, batch, next: 0 };
            let raw = &mut self.raw.side(Way::Read, bytes, depth);
            let (measured, theirs) = if how == How::InPlace {
                // Room for each beside the others, and for what the pool needs to keep them apart.
                let memory =
                    self.client.buffers(2 * values * bytes.next_multiple_of(PAGE)).map_err(BenchError::Fabric)?;
                let mut buffers = Vec::new();
                for _ in 0..values {
                    buffers.push(memory.try_take(bytes).ok_or_else(|| BenchError::Buffers { case: case.clone() })?);
                }
                alternate(session.pace, &mut GetsInto { gets, buffers }, raw).await?
            } else {
                alternate(session.pace, &mut gets, raw).await?
            };
            session.push(Row::compared(&case, unit, &measured, reference, &theirs)?);
            delete(self.namespace, &keys).await?;
        }
        Ok(())
    }
}

/// Puts of new keys, deleted after each round.
struct Puts<'a> {
    case: &'a str,
    client: &'a Client,
    namespace: &'a Namespace,
    source: Source,
    how: How,
    batch: usize,
    round_bytes: usize,
    round: usize,
    spent: Spent,
}

impl Side for Puts<'_> {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        self.round += 1;
        let prefix = format!("{}/{}", self.case, self.round);
        let one = self.how == How::One;
        let most = (self.round_bytes / self.source.size()).min(if one { ROUND_CALLS_MAX } else { ROUND_VALUES_MAX });
        // At least one call each.
        let calls = (most / self.batch).max(2);
        let mut items: Vec<Vec<PutItem>> =
            (0..calls).map(|call| self.source.items(&prefix, call * self.batch..(call + 1) * self.batch)).collect();
        let before = self.client.stats().put_time;
        let until = Instant::now() + time;
        let mut round = Round::default();
        let mut written = Vec::new();
        if one {
            self.caller(items, until, &mut round, &mut written).await?;
        } else {
            let (mut other, mut written_by_other) = (Round::default(), Vec::new());
            let half = items.split_off(calls / 2);
            let begun = Instant::now();
            tokio::try_join!(
                self.caller(items, until, &mut round, &mut written),
                self.caller(half, until, &mut other, &mut written_by_other),
            )?;
            round.elapsed = begun.elapsed();
            round.amount += other.amount;
            round.latencies.extend(other.latencies);
            written.extend(written_by_other);
        }
        self.spent.add(before, self.client.stats().put_time, written.len());
        delete(self.namespace, &written).await?;
        Ok(round)
    }
}

impl Puts<'_> {
    /// One call after the other until the time is over or there are no more.
    async fn caller(
        &self,
        calls: Vec<Vec<PutItem>>,
        until: Instant,
        round: &mut Round,
        written: &mut Vec<Key>,
    ) -> Result<(), BenchError> {
        for items in calls {
            let keys: Vec<Key> = items.iter().map(|item| item.key.clone()).collect();
            let amount = (items.len() * self.source.size()) as f64;
            let begun = Instant::now();
            let results = match self.how {
                How::InPlace => {
                    let wanted: Vec<(Key, usize)> = keys.iter().map(|key| (key.clone(), self.source.size())).collect();
                    let failed = |source| BenchError::Put { case: self.case.to_owned(), source };
                    // Filling them is the caller's part in any store, and left out here: they hold what was in the window before.
                    let frames = self.namespace.reserve_many(&wanted).await.map_err(failed)?;
                    frames.put(PutMode::Create).await
                }
                How::Bytes | How::One => self.namespace.put_many(items).await,
            };
            round.add(amount, begun.elapsed());
            all_put(self.case, results)?;
            written.extend(keys);
            if Instant::now() >= until {
                break;
            }
        }
        Ok(())
    }
}

/// Where the time of single puts went.
#[derive(Default)]
struct Spent {
    puts: usize,
    time: PutTime,
}

impl Spent {
    fn add(&mut self, before: PutTime, after: PutTime, puts: usize) {
        self.puts += puts;
        self.time.slab += after.slab - before.slab;
        self.time.window += after.window - before.window;
        self.time.crc += after.crc - before.crc;
        self.time.build += after.build - before.build;
        self.time.fabric += after.fabric - before.fabric;
        self.time.commit += after.commit - before.commit;
    }

    /// Means in microseconds.
    fn parts(&self) -> [(&'static str, f64); 5] {
        let PutTime { slab, window, crc, build, fabric, commit } = self.time;
        [("wait", slab + window), ("crc", crc), ("build", build), ("fabric", fabric), ("commit", commit)]
            .map(|(part, time)| (part, time.as_secs_f64() * 1e6 / self.puts as f64))
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

impl Gets<'_> {
    /// Renews the leases, which may have ended during the other side's round. Every value is looked at here, none while the time is taken.
    async fn renew(&self) -> Result<(), BenchError> {
        let got = self.namespace.get_many(self.keys).await;
        self.source.check(self.case, self.case, 0..self.keys.len(), got)
    }
}

impl Side for Gets<'_> {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        self.renew().await?;
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

/// The same into registered memory, all values in one call.
struct GetsInto<'a> {
    gets: Gets<'a>,
    buffers: Vec<Buffer>,
}

impl Side for GetsInto<'_> {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        self.gets.renew().await?;
        let Gets { case, namespace, source, keys, .. } = &self.gets;
        let mut round = Round::default();
        let until = Instant::now() + time.min(WARM_ROUND_MAX);
        while round.latencies.is_empty() || Instant::now() < until {
            let items: Vec<(Key, Buffer)> = keys.iter().cloned().zip(self.buffers.drain(..)).collect();
            let begun = Instant::now();
            let got = namespace.get_into_many(items).await;
            round.add((keys.len() * source.size()) as f64, begun.elapsed());
            for (at, (buffer, got)) in got.into_iter().enumerate() {
                let name = || key(case, at).to_string();
                let got = got.map_err(|source| BenchError::Get { case: (*case).to_owned(), source })?;
                let got = got.ok_or_else(|| BenchError::Lost { case: (*case).to_owned(), key: name() })?;
                if got.len != source.size() {
                    return Err(BenchError::Different { case: (*case).to_owned(), key: name() });
                }
                self.buffers.push(buffer);
            }
        }
        for (at, buffer) in self.buffers.iter_mut().enumerate() {
            if buffer.bytes()[..source.size()] != source.value(at) {
                return Err(BenchError::Different { case: (*case).to_owned(), key: key(case, at).to_string() });
            }
        }
        Ok(round)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_of_the_best_case_fills_a_commit_and_two_fit_into_the_window() {
        let window = quarry_client::Options::default().window_bytes;
        for (_, bytes) in SIZES {
            let values = (FULL.call_bytes / (bytes + HEADER_ROOM)).clamp(1, FULL.call_values_max);
            assert!(values * bytes >= 32 << 20, "{bytes}");
            assert!(2 * values * (bytes + HEADER_ROOM) <= window, "{bytes}");
        }
        // What a case writes in its six rounds lies in what it waits for, beside what rests of the case before it.
        assert!(6 * FULL.round_bytes as u64 <= FULL.region_bytes / 2);
    }

    #[test]
    fn parts_are_means_over_all_puts() {
        let ms = Duration::from_millis;
        let before = PutTime { slab: ms(1), crc: ms(1), ..PutTime::default() };
        let after = PutTime { slab: ms(2), window: ms(1), crc: ms(5), commit: ms(8), ..PutTime::default() };
        let mut spent = Spent::default();
        spent.add(before, after, 1);
        spent.add(after, after, 1);
        let expected = [("wait", 1000.0), ("crc", 2000.0), ("build", 0.0), ("fabric", 0.0), ("commit", 4000.0)];
        for ((part, found), (name, micros)) in spent.parts().into_iter().zip(expected) {
            assert_eq!(part, name);
            assert!((found - micros).abs() < 1e-9, "{part}: {found}");
        }
    }
}
