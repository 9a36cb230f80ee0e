//! How a figure comes about: rounds of both sides in turn, medians of rounds, percentiles of single calls.
//!
//! Both sides of a ratio alternate in one run, so that whatever else the machine does meets both. The first round of each side is warm-up and
//! not counted.

use super::error::BenchError;
use std::time::Duration;

/// Rounds of each side that count.
const ROUNDS: u32 = 5;

/// How long a case is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pace {
    /// Counted time of each side of a case.
    pub(crate) side: Duration,
}

impl Pace {
    /// Time of one round.
    pub(crate) fn round(self) -> Duration {
        self.side / ROUNDS
    }
}

/// What one side did in one round.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Round {
    /// How much was done, in whatever the rate counts: bytes, values, calls.
    pub(crate) amount: f64,
    /// The time that it took.
    pub(crate) elapsed: Duration,
    /// The time of each call.
    pub(crate) latencies: Vec<Duration>,
}

impl Round {
    /// Adds a call that did `amount` in `took`, of calls one after the other.
    pub(crate) fn add(&mut self, amount: f64, took: Duration) {
        self.amount += amount;
        self.elapsed += took;
        self.latencies.push(took);
    }
}

/// One side of a comparison.
pub(crate) trait Side {
    /// Works for about `time`, at least one call.
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError>;
}

/// What one side did in all its counted rounds.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Measured {
    rates: Vec<f64>,
    latencies: Vec<Duration>,
}

impl Measured {
    pub(crate) fn add(&mut self, round: Round) {
        self.rates.push(round.amount / round.elapsed.as_secs_f64());
        self.latencies.extend(round.latencies);
    }

    /// Median over the rounds of what was done per second.
    pub(crate) fn rate(&self) -> f64 {
        let mut rates = self.rates.clone();
        rates.sort_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied().unwrap_or(f64::NAN)
    }

    /// Microseconds below which a share of all calls stayed, `share` from 0 to 1.
    pub(crate) fn percentile_us(&self, share: f64) -> f64 {
        let mut latencies = self.latencies.clone();
        latencies.sort_unstable();
        let last = latencies.len().saturating_sub(1);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a small count")]
        let at = (latencies.len() as f64 * share) as usize;
        latencies.get(at.min(last)).map_or(f64::NAN, |latency| latency.as_secs_f64() * 1e6)
    }

    pub(crate) fn calls(&self) -> usize {
        self.latencies.len()
    }
}

/// Measures one side.
pub(crate) async fn alone(pace: Pace, side: &mut impl Side) -> Result<Measured, BenchError> {
    side.round(pace.round()).await?;
    let mut measured = Measured::default();
    for _ in 0..ROUNDS {
        measured.add(side.round(pace.round()).await?);
    }
    Ok(measured)
}

/// Measures two sides in turn.
pub(crate) async fn alternate(
    pace: Pace,
    ours: &mut impl Side,
    theirs: &mut impl Side,
) -> Result<(Measured, Measured), BenchError> {
    ours.round(pace.round()).await?;
    theirs.round(pace.round()).await?;
    let (mut of_ours, mut of_theirs) = (Measured::default(), Measured::default());
    for _ in 0..ROUNDS {
        of_ours.add(ours.round(pace.round()).await?);
        of_theirs.add(theirs.round(pace.round()).await?);
    }
    Ok((of_ours, of_theirs))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls that take 1, 2, 3, .. microseconds, two in each round.
    #[derive(Default)]
    struct Growing(u64);

    impl Side for Growing {
        async fn round(&mut self, _: Duration) -> Result<Round, BenchError> {
            let mut round = Round::default();
            for _ in 0..2 {
                self.0 += 1;
                round.add(1.0, Duration::from_micros(self.0));
            }
            Ok(round)
        }
    }

    #[tokio::test]
    async fn warm_up_is_not_counted_and_the_rate_is_the_median_of_rounds() {
        let pace = Pace { side: Duration::from_millis(1) };
        let (ours, theirs) = alternate(pace, &mut Growing::default(), &mut Growing::default()).await.unwrap();
        assert_eq!(ours, theirs);
        // Rounds of (3, 4), (5, 6), .. (11, 12) microseconds; the third is the median.
        assert_eq!(ours.calls(), 10);
        assert!((ours.rate() - 2.0 / 15e-6).abs() < 1.0, "{}", ours.rate());
        assert!((ours.percentile_us(0.5) - 8.0).abs() < 1e-9);
        assert!((ours.percentile_us(0.0) - 3.0).abs() < 1e-9);
        assert!((ours.percentile_us(1.0) - 12.0).abs() < 1e-9);
        assert_eq!(alone(pace, &mut Growing::default()).await.unwrap(), ours);
    }

    #[test]
    fn nothing_measured_is_no_number() {
        assert!(Measured::default().rate().is_nan());
        assert!(Measured::default().percentile_us(0.5).is_nan());
    }
}
