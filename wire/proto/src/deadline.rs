//! The deadline that a caller sets: the header `grpc-timeout`.

use http::HeaderMap;
use std::time::Duration;

/// Name of the header.
pub const HEADER: &str = "grpc-timeout";

/// How long the caller waits, if it says so: at most 8 digits and a unit.
#[must_use]
pub fn of(headers: &HeaderMap) -> Option<Duration> {
    parse(headers.get(HEADER)?.to_str().ok()?)
}

fn parse(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_read_in_every_unit_and_nothing_else_is() {
        assert_eq!(parse("2H"), Some(Duration::from_secs(7_200)));
        assert_eq!(parse("3M"), Some(Duration::from_secs(180)));
        assert_eq!(parse("10S"), Some(Duration::from_secs(10)));
        assert_eq!(parse("1500m"), Some(Duration::from_millis(1500)));
        assert_eq!(parse("6u"), Some(Duration::from_micros(6)));
        assert_eq!(parse("7n"), Some(Duration::from_nanos(7)));
        assert_eq!(parse("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for wrong in ["", "S", "10", "10x", "-1S", "123456789n", "1 S", "ü"] {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
        let mut headers = HeaderMap::new();
        assert_eq!(of(&headers), None);
        headers.insert(HEADER, "5m".parse().unwrap());
        assert_eq!(of(&headers), Some(Duration::from_millis(5)));
    }
}
