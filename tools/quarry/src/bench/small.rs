//! `quarry bench small`: batches of small values, as inference servers ask for them, against Redis in the same run.

use super::{
    Session,
    error::BenchError,
    measure::{Measured, Round, Side, alone, alternate},
    redis::{Calls, Redis},
    report::{Row, Unit},
    stage::{Stage, delete},
    values::{Source, all_put, key},
};
use quarry_client::{Client, Key, Namespace, Options};
use std::time::Duration;
use tokio::time::Instant;

/// Bytes of a value.
const SIZE: usize = 4 << 10;
/// Values of a call.
const BATCH: usize = 100;
/// Batches that are there to be read; more than a cold round reads.
const BATCHES: usize = 200;
/// Batches that a round reads in turn while their leases last.
const WARM_BATCHES: usize = 20;
/// Slabs of the shuffled batch.
const SLABS: usize = 100;
/// Largest slab of its writer: a few values.
const SMALL_SLAB_BYTES: u64 = 8 * (4 << 10);
/// Values written for the shuffled batch: enough to fill that many such slabs.
const SHUFFLED_VALUES: usize = 16 * SLABS;
/// Memory of each data node.
const REGION_BYTES: u64 = 1 << 30;
/// The same where memory is to be spared, and the most that a case of puts may write then.
const TINY_REGION_BYTES: u64 = 256 << 20;
const TINY_PUT_BYTES: u64 = 8 << 20;
/// Bytes that one case of puts may write; then what it wrote is deleted.
const PUT_BYTES: u64 = 256 << 20;
const NO_REDIS: &str = "redis-server is not installed";

const GET_WARM: &str = "get/4KiB/batch100/warm";
const GET_COLD: &str = "get/4KiB/batch100/cold";
const GET_SHUFFLED: &str = "get/4KiB/batch100/shuffled100slabs/warm";
const PUTS: [(u8, &str); 2] = [(1, "put/4KiB/batch100/copies1"), (2, "put/4KiB/batch100/copies2")];

pub(crate) async fn run(session: &mut Session) -> Result<(), BenchError> {
    let cases: Vec<String> =
        [GET_WARM, GET_COLD, GET_SHUFFLED].into_iter().chain(PUTS.map(|(_, case)| case)).map(str::to_owned).collect();
    if !session.wants_any(&cases) {
        return Ok(());
    }
    let (region_bytes, put_bytes) =
        if session.tiny { (TINY_REGION_BYTES, TINY_PUT_BYTES) } else { (REGION_BYTES, PUT_BYTES) };
    let stage = Stage::start(&session.dir, 2, region_bytes).await?;
    let redis = Redis::start(stage.cluster().dir()).await?;
    let bench = Bench { stage: &stage, redis: redis.as_ref(), source: Source::new(SIZE), put_bytes };
    Box::pin(bench.gets(session)).await?;
    Box::pin(bench.puts(session)).await?;
    drop(redis);
    stage.end().await
}

struct Bench<'a> {
    stage: &'a Stage,
    redis: Option<&'a Redis>,
    source: Source,
    put_bytes: u64,
}

impl Bench<'_> {
    /// Measures a case against Redis's call of the same kind, if there is Redis.
    async fn against_redis(
        &self,
        session: &mut Session,
        case: &str,
        ours: &mut impl Side,
        calls: impl FnOnce(&Redis) -> Result<(Calls, &'static str), BenchError>,
    ) -> Result<(), BenchError> {
        let row = match self.redis {
            Some(redis) => {
                let (mut theirs, call) = calls(redis)?;
                let (ours, theirs) = alternate(session.pace, ours, &mut theirs).await?;
                let reference = format!("Redis {} {call}", redis.version());
                Row::compared(case, Unit::Micros, &ours, reference, &theirs)?
            }
            None => {
                let ours: Measured = alone(session.pace, ours).await?;
                Row::alone(case, Unit::Micros, &ours)?.without_reference(NO_REDIS)
            }
        };
        session.push(row);
        Ok(())
    }

    async fn gets(&self, session: &mut Session) -> Result<(), BenchError> {
        let mget = |redis: &Redis| {
            redis.set(&self.source, BATCH, WARM_BATCHES)?.once_each()?;
            Ok((redis.get(&self.source, BATCH, WARM_BATCHES)?, "MGET 100"))
        };
        let client = self.stage.client().await?;
        let namespace = self.stage.namespace(&client, "gets", 1).await?;
        if session.wants(GET_WARM) || session.wants(GET_COLD) {
            self.source.write(&namespace, "b", 0..BATCH * BATCHES).await?;
        }
        if session.wants(GET_WARM) {
            let batches: Vec<Batch> = (0..WARM_BATCHES).map(Batch::of).collect();
            let mut ours = Warm { case: GET_WARM, source: &self.source, namespace: &namespace, batches, next: 0 };
            self.against_redis(session, GET_WARM, &mut ours, mget).await?;
        }
        if session.wants(GET_COLD) {
            self.source.write(&namespace, "warm-up", 0..1).await?;
            let mut ours = Cold { source: &self.source, stage: self.stage };
            self.against_redis(session, GET_COLD, &mut ours, mget).await?;
        }
        if session.wants(GET_SHUFFLED) {
            let writer =
                self.stage.client_with(|options| Options { slab_bytes_max: SMALL_SLAB_BYTES, ..options }).await?;
            let written = writer.namespace("gets").await?;
            self.source.write(&written, "s", 0..SHUFFLED_VALUES).await?;
            writer.close().await?;
            let mut ours = Warm {
                case: GET_SHUFFLED,
                source: &self.source,
                namespace: &namespace,
                batches: (0..SHUFFLED_VALUES / SLABS).map(Batch::shuffled).collect(),
                next: 0,
            };
            self.against_redis(session, GET_SHUFFLED, &mut ours, mget).await?;
        }
        Ok(client.close().await?)
    }

    async fn puts(&self, session: &mut Session) -> Result<(), BenchError> {
        let set =
            |redis: &Redis| Ok((redis.set(&self.source, BATCH, WARM_BATCHES)?, "pipelined SET 100, nothing synced"));
        for (copies, case) in PUTS {
            if !session.wants(case) {
                continue;
            }
            self.stage.room(2 * self.put_bytes).await?;
            let client = self.stage.client().await?;
            let namespace = self.stage.namespace(&client, &format!("puts-{copies}"), copies).await?;
            let mut ours = Puts {
                case,
                source: &self.source,
                namespace: &namespace,
                written: Vec::new(),
                put_bytes: self.put_bytes,
            };
            self.against_redis(session, case, &mut ours, set).await?;
            delete(&namespace, &ours.written).await?;
            client.close().await?;
        }
        Ok(())
    }
}

/// The numbers and keys of one call.
struct Batch {
    prefix: &'static str,
    numbers: Vec<usize>,
    keys: Vec<Key>,
}

impl Batch {
    fn new(prefix: &'static str, numbers: Vec<usize>) -> Self {
        let keys = numbers.iter().map(|at| key(prefix, *at)).collect();
        Self { prefix, numbers, keys }
    }
    /// Neighbours, as they were written.
    fn of(number: usize) -> Self {
        Self::new("b", (number * BATCH..(number + 1) * BATCH).collect())
    }
    /// One value out of each of a hundred slabs, in no order.
    fn shuffled(number: usize) -> Self {
        let apart = SHUFFLED_VALUES / SLABS;
        // 37 and 100 have no common divisor: every slab once.
        Self::new("s", (0..SLABS).map(|at| at * 37 % SLABS * apart + number).collect())
    }
}

/// Gets through descriptors within their leases.
struct Warm<'a> {
    case: &'static str,
    source: &'a Source,
    namespace: &'a Namespace,
    batches: Vec<Batch>,
    next: usize,
}

impl Side for Warm<'_> {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        // Leases may have ended during the other side's round; a round is shorter than they are.
        for batch in &self.batches {
            let got = self.namespace.get_many(&batch.keys).await;
            self.source.check(self.case, batch.prefix, batch.numbers.iter().copied(), got)?;
        }
        let mut round = Round::default();
        let until = Instant::now() + time.min(WARM_ROUND_MAX);
        loop {
            let batch = &self.batches[self.next];
            self.next = (self.next + 1) % self.batches.len();
            let begun = Instant::now();
            let got = self.namespace.get_many(&batch.keys).await;
            round.add(BATCH as f64, begun.elapsed());
            self.source.check(self.case, batch.prefix, batch.numbers.iter().copied(), got)?;
            if Instant::now() >= until {
                return Ok(round);
            }
        }
    }
}

/// Longest round that stays within the leases taken before it.
const WARM_ROUND_MAX: Duration = Duration::from_secs(2);

/// Gets of keys that a client has never asked for; its connections are open.
struct Cold<'a> {
    source: &'a Source,
    stage: &'a Stage,
}

impl Side for Cold<'_> {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        let client: Client = self.stage.client().await?;
        let namespace = client.namespace("gets").await?;
        self.source.check(GET_COLD, "warm-up", 0..1, namespace.get_many(&[key("warm-up", 0)]).await)?;
        let mut round = Round::default();
        let until = Instant::now() + time;
        for number in 0..BATCHES {
            let batch = Batch::of(number);
            let begun = Instant::now();
            let got = namespace.get_many(&batch.keys).await;
            round.add(BATCH as f64, begun.elapsed());
            self.source.check(GET_COLD, batch.prefix, batch.numbers, got)?;
            if Instant::now() >= until {
                break;
            }
        }
        client.close().await?;
        Ok(round)
    }
}

/// Puts of new keys.
struct Puts<'a> {
    case: &'static str,
    source: &'a Source,
    namespace: &'a Namespace,
    written: Vec<Key>,
    put_bytes: u64,
}

impl Side for Puts<'_> {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        let mut round = Round::default();
        let until = Instant::now() + time;
        loop {
            let first = self.written.len();
            let items = self.source.items("p", first..first + BATCH);
            self.written.extend(items.iter().map(|item| item.key.clone()));
            let begun = Instant::now();
            let results = self.namespace.put_many(items).await;
            round.add(BATCH as f64, begun.elapsed());
            all_put(self.case, results)?;
            if Instant::now() >= until || (self.written.len() * SIZE) as u64 >= self.put_bytes {
                return Ok(round);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_shuffled_batch_has_one_value_of_every_slab_and_all_batches_together_have_all_values() {
        let apart = SHUFFLED_VALUES / SLABS;
        let mut all = BTreeSet::new();
        for number in 0..apart {
            let numbers = Batch::shuffled(number).numbers;
            let parts: BTreeSet<usize> = numbers.iter().map(|at| at / apart).collect();
            assert_eq!(parts.len(), SLABS);
            all.extend(numbers);
        }
        assert_eq!(all.len(), SHUFFLED_VALUES);
    }

    // A batch takes one value of each run of so many neighbours, and a slab holds no more than such a run.
    const _: () = assert!(SMALL_SLAB_BYTES / SIZE as u64 <= (SHUFFLED_VALUES / SLABS) as u64);
}
