//! `quarry bench calls`: the calls that other stores are measured by, one value and a hundred values at a time, in four sizes.
//!
//! `cargo xtask peers` sets these rows beside those of other stores. Values that are read were written before, each once; cold, like theirs, means
//! that this client has never asked for the key.

use super::{
    Session,
    error::BenchError,
    measure::{Round, Side, alone},
    report::{Row, Unit},
    stage::{Stage, delete},
    values::{Source, all_put, key},
};
use quarry_client::{Key, Namespace};
use std::time::Duration;
use tokio::time::Instant;

/// Sizes of a value, and the most values of each that a round moves.
const SIZES: [(&str, usize, usize); 4] =
    [("4KiB", 4 << 10, 2000), ("64KiB", 64 << 10, 1000), ("1MiB", 1 << 20, 300), ("4MiB", 4 << 20, 100)];
/// Values of a call.
const BATCHES: [usize; 2] = [1, 100];
/// Memory of the data node: what the largest case has written and not yet got back, and as much again.
const REGION_BYTES: u64 = 6 << 30;
/// The same where memory is to be spared, and the most values of a round then.
const TINY_REGION_BYTES: u64 = 512 << 20;
const TINY_COUNT: usize = 8;

/// How a case reads or writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Put,
    Cold,
    Warm,
}

fn case(kind: Kind, size: &str, batch: usize) -> String {
    match kind {
        Kind::Put => format!("put/{size}/batch{batch}/copies1"),
        Kind::Cold => format!("get/{size}/batch{batch}/cold"),
        Kind::Warm => format!("get/{size}/batch{batch}/warm"),
    }
}

pub(crate) async fn run(session: &mut Session) -> Result<(), BenchError> {
    let kinds = [Kind::Put, Kind::Cold, Kind::Warm];
    let cases: Vec<String> = SIZES
        .iter()
        .flat_map(|(name, _, _)| BATCHES.map(|batch| kinds.map(|kind| case(kind, name, batch))))
        .flatten()
        .collect();
    if !session.wants_any(&cases) {
        return Ok(());
    }
    let region_bytes = if session.tiny { TINY_REGION_BYTES } else { REGION_BYTES };
    let stage = Stage::start(&session.dir, 1, region_bytes).await?;
    let client = stage.client().await?;
    let namespace = stage.namespace(&client, "calls", 1).await?;
    for (name, size, count) in SIZES {
        for batch in BATCHES {
            for kind in kinds {
                let case = case(kind, name, batch);
                if session.wants(&case) {
                    stage.room(region_bytes / 2).await?;
                    let count = if session.tiny { count.min(TINY_COUNT) } else { count };
                    let source = Source::new(size);
                    let mut side = Calls {
                        case: &case,
                        stage: &stage,
                        namespace: &namespace,
                        source,
                        kind,
                        count,
                        batch,
                        round: 0,
                    };
                    let measured = alone(session.pace, &mut side).await?;
                    session.push(Row::alone(&case, Unit::GibPerSecond, &measured)?);
                }
            }
        }
    }
    client.close().await?;
    stage.end().await
}

/// Rounds of one case.
struct Calls<'a> {
    case: &'a str,
    stage: &'a Stage,
    namespace: &'a Namespace,
    source: Source,
    kind: Kind,
    count: usize,
    batch: usize,
    round: usize,
}

impl Side for Calls<'_> {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        self.round += 1;
        let prefix = format!("{}/{}", self.case, self.round);
        let (round, written) = match self.kind {
            Kind::Put => self.puts(&prefix, time).await?,
            Kind::Cold => {
                self.source.write(self.namespace, &prefix, 0..self.count).await?;
                let client = self.stage.client().await?;
                let namespace = client.namespace("calls").await?;
                // Opens its connections; the first batch is not measured again.
                self.get(&namespace, &prefix, 0..1).await?;
                let round = self.gets(&namespace, &prefix, 1, time).await?;
                client.close().await?;
                (round, self.count)
            }
            Kind::Warm => {
                self.source.write(self.namespace, &prefix, 0..self.count).await?;
                self.get(self.namespace, &prefix, 0..self.count).await?;
                (self.gets(self.namespace, &prefix, 0, time).await?, self.count)
            }
        };
        let keys: Vec<Key> = (0..written).map(|at| key(&prefix, at)).collect();
        delete(self.namespace, &keys).await?;
        Ok(round)
    }
}

impl Calls<'_> {
    async fn puts(&self, prefix: &str, time: Duration) -> Result<(Round, usize), BenchError> {
        let mut round = Round::default();
        let until = Instant::now() + time;
        let mut written = 0;
        while written < self.count {
            let items = self.source.items(prefix, written..self.count.min(written + self.batch));
            let (count, begun) = (items.len(), Instant::now());
            let results = self.namespace.put_many(items).await;
            round.add((count * self.source.size()) as f64, begun.elapsed());
            all_put(self.case, results)?;
            written += count;
            if Instant::now() >= until {
                break;
            }
        }
        Ok((round, written))
    }

    /// Reads each value once, in the order of writing.
    async fn gets(
        &self,
        namespace: &Namespace,
        prefix: &str,
        first: usize,
        time: Duration,
    ) -> Result<Round, BenchError> {
        let mut round = Round::default();
        let until = Instant::now() + time;
        let mut at = first;
        while at < self.count {
            let numbers = at..self.count.min(at + self.batch);
            at = numbers.end;
            let count = numbers.len();
            let took = self.get(namespace, prefix, numbers).await?;
            round.add((count * self.source.size()) as f64, took);
            if Instant::now() >= until {
                break;
            }
        }
        Ok(round)
    }

    async fn get(
        &self,
        namespace: &Namespace,
        prefix: &str,
        numbers: std::ops::Range<usize>,
    ) -> Result<Duration, BenchError> {
        let keys: Vec<Key> = numbers.clone().map(|at| key(prefix, at)).collect();
        let begun = Instant::now();
        let got = namespace.get_many(&keys).await;
        let took = begun.elapsed();
        self.source.check(self.case, prefix, numbers, got)?;
        Ok(took)
    }
}
