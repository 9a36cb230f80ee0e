//! The door: deadlines of calls, and refusals in the words of the protocol.

use quarry_proto::{refusal::Refusal, v1};
use quarry_raft::{GroupId, LeaderHint, ProposeError, ReadError};
use std::time::Duration;
use tokio::time::Instant;
use tonic::{Request, metadata::MetadataMap};

/// What is kept of a caller's time to send the answer, so that a typed refusal arrives before the transport gives up.
const ANSWER_SHARE: u32 = 20;
/// No call is worked on for longer.
const DEADLINE_MAX: Duration = Duration::from_secs(60);

/// When the call must be answered: by its `grpc-timeout` header, or `usual` from now.
pub(crate) fn deadline<T>(request: &Request<T>, usual: Duration) -> Instant {
    let patience = timeout(request.metadata()).unwrap_or(usual).min(DEADLINE_MAX);
    Instant::now() + (patience - patience / ANSWER_SHARE)
}

/// The header `grpc-timeout`: at most 8 digits and a unit.
fn timeout(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

/// Ask the leader of `group`.
pub(crate) fn not_leader(group: GroupId, leader: LeaderHint) -> Refusal {
    let (leader, address) = leader.map_or_else(|| (0, String::new()), |(node, address)| (node.0, address));
    Refusal::NotLeader(v1::NotLeader { group: group.0, leader, address })
}

/// It did not get as far as the log; a later call may.
pub(crate) fn not_ready(why: impl Into<String>, retry_after: Duration) -> Refusal {
    Refusal::NotReady(v1::NotReady { why: why.into(), retry_after_ms: quarry_wire::units::millis(retry_after) })
}

/// It was handed to the log, or may have been.
pub(crate) fn indeterminate(why: impl Into<String>) -> Refusal {
    Refusal::Indeterminate(v1::Indeterminate { why: why.into() })
}

/// Something is longer than allowed.
pub(crate) fn too_large(what: &str, limit: usize, found: usize) -> Refusal {
    Refusal::TooLarge(v1::TooLarge { what: what.to_owned(), limit: limit as u64, found: found as u64 })
}

/// A proposal without an outcome.
pub(crate) fn proposal_refused(group: GroupId, error: ProposeError) -> Refusal {
    match error {
        ProposeError::NotLeader { leader } => not_leader(group, leader),
        ProposeError::Indeterminate { why } => indeterminate(why),
        ProposeError::TooLarge { bytes, limit } => too_large("command", limit, bytes),
        ProposeError::ShuttingDown => not_ready("this node is shutting down", Duration::from_secs(1)),
    }
}

/// A read that could not be confirmed.
pub(crate) fn read_refused(group: GroupId, error: ReadError) -> Refusal {
    match error {
        ReadError::NotLeader { leader } => not_leader(group, leader),
        ReadError::NoQuorum { why } => not_ready(format!("no majority of group {group} answers: {why}"), RETRY),
        ReadError::DeadlinePassed => not_ready(format!("group {group} did not confirm the read in time"), RETRY),
        ReadError::ShuttingDown => not_ready("this node is shutting down", Duration::from_secs(1)),
    }
}

/// When to come again after a hiccup.
pub(crate) const RETRY: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_header_is_read_in_every_unit_and_nothing_else_is() {
        let read = |text: &str| {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            timeout(&metadata)
        };
        assert_eq!(read("2H"), Some(Duration::from_secs(7_200)));
        assert_eq!(read("3M"), Some(Duration::from_secs(180)));
        assert_eq!(read("4S"), Some(Duration::from_secs(4)));
        assert_eq!(read("5m"), Some(Duration::from_millis(5)));
        assert_eq!(read("6u"), Some(Duration::from_micros(6)));
        assert_eq!(read("7n"), Some(Duration::from_nanos(7)));
        for wrong in ["", "S", "5", "5x", "-5S", "123456789S", "5 S"] {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_is_answered_a_little_before_its_caller_gives_up() {
        let mut request = Request::new(());
        let usual = Duration::from_secs(10);
        assert_eq!(deadline(&request, usual) - Instant::now(), Duration::from_millis(9_500));
        request.set_timeout(Duration::from_secs(1));
        assert_eq!(deadline(&request, usual) - Instant::now(), Duration::from_millis(950));
        request.set_timeout(Duration::from_secs(100_000));
        assert_eq!(deadline(&request, usual) - Instant::now(), Duration::from_secs(57));
    }
}
