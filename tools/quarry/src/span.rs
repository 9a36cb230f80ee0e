//! Spans of time on command lines.

use std::time::Duration;

/// Reads how long something may take, such as `3s` or `1m 30s`: a deadline of nothing would be over before anything began.
///
/// # Errors
/// What was expected, as a sentence.
pub fn deadline(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(span) if span.is_zero() => Err("a deadline must be longer than nothing, such as 3s".to_owned()),
        Ok(span) => Ok(span),
        Err(wrong) => Err(format!("{wrong} (expected a span such as 3s or 500ms)")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_a_span_and_longer_than_nothing() {
        assert_eq!(deadline("1m 30s"), Ok(Duration::from_secs(90)));
        for wrong in ["0s", "0", "soon", ""] {
            assert!(deadline(wrong).is_err(), "{wrong:?} was taken");
        }
    }
}
