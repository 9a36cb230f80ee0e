//! What a bench prints: rows, and the machine that they were measured on.

use super::{error::BenchError, machine::Machine, measure::Measured};
use crate::output;
use serde::Serialize;

/// What a value counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) enum Unit {
    /// Payload bytes; more is better.
    #[serde(rename = "GiB/s")]
    GibPerSecond,
    /// Median time of one call; less is better.
    #[serde(rename = "us")]
    Micros,
    /// Whatever the case names, per second; more is better.
    #[serde(rename = "1/s")]
    PerSecond,
    /// Bytes that one call costs; less is better.
    #[serde(rename = "B")]
    Bytes,
    /// Share of one processor core; less is better.
    #[serde(rename = "% of a core")]
    PercentOfCore,
}

impl Unit {
    const fn name(self) -> &'static str {
        match self {
            Self::GibPerSecond => "GiB/s",
            Self::Micros => "us",
            Self::PerSecond => "1/s",
            Self::Bytes => "B",
            Self::PercentOfCore => "% of a core",
        }
    }

    /// The value that a case of this unit has.
    fn of(self, measured: &Measured) -> f64 {
        match self {
            Self::GibPerSecond => measured.rate() / f64::from(1 << 30),
            Self::Micros => measured.percentile_us(0.5),
            Self::PerSecond | Self::Bytes | Self::PercentOfCore => measured.rate(),
        }
    }
}

/// One figure. `ratio` is value / reference_value.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) case: String,
    pub(crate) value: f64,
    pub(crate) unit: Unit,
    /// What it is compared with, or why there is nothing.
    pub(crate) reference: Option<String>,
    pub(crate) reference_value: Option<f64>,
    pub(crate) ratio: Option<f64>,
    /// Percentiles of our single calls.
    pub(crate) p50_us: Option<f64>,
    pub(crate) p99_us: Option<f64>,
}

/// Calls of one side that a row needs at least.
const CALLS_MIN: usize = 5;

impl Row {
    /// A row of one side.
    ///
    /// # Errors
    /// [`BenchError::TooFew`].
    pub(crate) fn alone(case: &str, unit: Unit, ours: &Measured) -> Result<Self, BenchError> {
        enough(case, ours)?;
        Ok(Self {
            case: case.to_owned(),
            value: unit.of(ours),
            unit,
            reference: None,
            reference_value: None,
            ratio: None,
            p50_us: Some(ours.percentile_us(0.5)),
            p99_us: Some(ours.percentile_us(0.99)),
        })
    }

    /// A row of two sides that alternated.
    ///
    /// # Errors
    /// [`BenchError::TooFew`].
    pub(crate) fn compared(
        case: &str,
        unit: Unit,
        ours: &Measured,
        reference: impl Into<String>,
        theirs: &Measured,
    ) -> Result<Self, BenchError> {
        enough(case, theirs)?;
        let row = Self::alone(case, unit, ours)?;
        Ok(row.against(reference, unit.of(theirs)))
    }

    /// The same row, compared with a value of its unit that was measured in turn with it.
    pub(crate) fn against(self, reference: impl Into<String>, reference_value: f64) -> Self {
        let ratio = self.value / reference_value;
        Self { reference: Some(reference.into()), reference_value: Some(reference_value), ratio: Some(ratio), ..self }
    }

    /// The same row, saying why there is nothing to compare it with.
    pub(crate) fn without_reference(self, why: impl Into<String>) -> Self {
        Self { reference: Some(why.into()), reference_value: None, ratio: None, ..self }
    }

    /// A part of a call, in microseconds: a mean.
    pub(crate) fn part(case: String, micros: f64) -> Self {
        Self::plain(case, Unit::Micros, micros)
    }

    /// What a call of the case `of` costs of something beside its time: a mean.
    pub(crate) fn cost(of: &str, what: &str, unit: Unit, value: f64) -> Self {
        Self::plain(format!("{of}/{what}"), unit, value)
    }

    /// A figure without percentiles and without a reference.
    pub(crate) const fn plain(case: String, unit: Unit, value: f64) -> Self {
        Self { case, value, unit, reference: None, reference_value: None, ratio: None, p50_us: None, p99_us: None }
    }

    /// One line for whoever waits.
    pub(crate) fn sentence(&self) -> String {
        let mut sentence = format!("{}: {} {}", self.case, number(self.value), self.unit.name());
        if let (Some(reference), Some(value), Some(ratio)) = (&self.reference, self.reference_value, self.ratio) {
            sentence += &format!(", {reference} {}, ratio {}", number(value), number(ratio));
        }
        sentence
    }
}

fn enough(case: &str, measured: &Measured) -> Result<(), BenchError> {
    let found = measured.calls();
    if found >= CALLS_MIN {
        return Ok(());
    }
    Err(BenchError::TooFew { case: case.to_owned(), expected: CALLS_MIN, found })
}

/// All that a run measured.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) machine: Machine,
    pub(crate) rows: Vec<Row>,
}

impl Report {
    /// For people.
    pub(crate) fn shown(&self) -> String {
        let mut table =
            output::table(&["case", "value", "unit", "p50 us", "p99 us", "reference", "its value", "ratio"]);
        let some = |value: Option<f64>| value.map_or_else(String::new, number);
        for row in &self.rows {
            table.add_row(vec![
                row.case.clone(),
                number(row.value),
                row.unit.name().to_owned(),
                some(row.p50_us),
                some(row.p99_us),
                row.reference.clone().unwrap_or_default(),
                some(row.reference_value),
                some(row.ratio),
            ]);
        }
        format!("{}\n{table}", self.machine)
    }

    /// A section of docs/performance.md.
    pub(crate) fn markdown(&self) -> String {
        let mut lines = vec![
            format!("{}\n", self.machine),
            "| case | value | unit | p50 µs | p99 µs | reference | its value | ratio |".to_owned(),
            "| --- | ---: | --- | ---: | ---: | --- | ---: | ---: |".to_owned(),
        ];
        let some = |value: Option<f64>| value.map_or_else(String::new, number);
        for row in &self.rows {
            lines.push(format!(
                "| `{}` | {} | {} | {} | {} | {} | {} | {} |",
                row.case,
                number(row.value),
                row.unit.name(),
                some(row.p50_us),
                some(row.p99_us),
                row.reference.as_deref().unwrap_or_default(),
                some(row.reference_value),
                some(row.ratio),
            ));
        }
        lines.join("\n")
    }
}

/// Three significant digits, whole numbers from a hundred on.
fn number(value: f64) -> String {
    match value.abs() {
        at if at >= 100.0 => format!("{value:.0}"),
        at if at >= 10.0 => format!("{value:.1}"),
        at if at >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::measure::Round;
    use std::time::Duration;

    fn calls(count: usize, each: Duration) -> Measured {
        let mut measured = Measured::default();
        let mut round = Round::default();
        for _ in 0..count {
            round.add(f64::from(1 << 20), each);
        }
        measured.add(round);
        measured
    }

    #[test]
    fn a_ratio_is_ours_over_theirs_in_the_unit_of_the_row() {
        let (ours, theirs) = (calls(10, Duration::from_millis(2)), calls(10, Duration::from_millis(1)));
        let speed = Row::compared("put", Unit::GibPerSecond, &ours, "raw", &theirs).unwrap();
        assert!((speed.ratio.unwrap() - 0.5).abs() < 1e-9);
        assert!((speed.value - 500.0 / 1024.0).abs() < 1e-6, "{}", speed.value);
        let time = Row::compared("put", Unit::Micros, &ours, "raw", &theirs).unwrap();
        assert!((time.ratio.unwrap() - 2.0).abs() < 1e-9);
        assert!((time.value - 2000.0).abs() < 1e-9);
        let missing = time.without_reference("there is no redis-server here");
        assert_eq!((missing.reference_value, missing.ratio), (None, None));
    }

    #[test]
    fn a_row_of_too_few_calls_is_refused() {
        let (some, few) = (calls(CALLS_MIN, Duration::from_millis(1)), calls(CALLS_MIN - 1, Duration::from_millis(1)));
        assert!(Row::alone("put", Unit::Micros, &some).is_ok());
        let refused = [
            Row::alone("put", Unit::Micros, &few),
            Row::compared("put", Unit::Micros, &some, "raw", &few),
            Row::compared("put", Unit::Micros, &few, "raw", &some),
        ];
        for row in refused {
            assert!(matches!(row, Err(BenchError::TooFew { found: 4, .. })), "{row:?}");
        }
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!([0.123_4, 1.234, 12.34, 123.4, 51_234.0].map(number), ["0.123", "1.23", "12.3", "123", "51234"]);
    }
}
