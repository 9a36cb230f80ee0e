//! The door: deadlines of calls, and refusals in the words of the protocol.

use quarry_proto::{deadline, refusal::Refusal, v1};
use quarry_raft::{GroupId, LeaderHint, ProposeError, ReadError};
use std::time::Duration;
use tokio::time::Instant;
use tonic::Request;

/// What is kept of a caller's time to send the answer, so that a typed refusal arrives before the transport gives up.
const ANSWER_SHARE: u32 = 20;
/// No call is worked on for longer.
const DEADLINE_MAX: Duration = Duration::from_secs(60);

/// When the call must be answered: by its `grpc-timeout` header, or `usual` from now.
pub(crate) fn deadline<T>(request: &Request<T>, usual: Duration) -> Instant {
    let patience = deadline::of(request.metadata().as_ref()).unwrap_or(usual).min(DEADLINE_MAX);
    Instant::now() + (patience - patience / ANSWER_SHARE)
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
