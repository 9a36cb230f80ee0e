//! Who the nodes are: changes of the meta nodes, and what data nodes are used for.
//!
//! The directory's leader decides and acts; these calls find it, by its own hints, and ask again for as long as that helps. All of them may be
//! made any number of times. Whom to ask next, and for how long, is decided by `Asking`.

use crate::admin::{CallError, Calls, LOOK, call, silent};
use quarry_proto::{refusal::Refusal, v1};
use quarry_trust::{Expect, Trust};
use std::{collections::BTreeSet, future::Future, time::Duration};
use tokio::time::{Instant, sleep};
use tonic::{Response, Status};

/// Between two attempts that nobody could answer.
const PAUSE: Duration = Duration::from_millis(100);

/// Whom to ask for the leader of the directory: all in turn, whoever a node takes for the leader next, and those that are silent once in a round
/// and not for long.
struct Asking {
    metas: Vec<String>,
    silent: BTreeSet<String>,
    /// Those of this round that are still to be asked, the next one last.
    round: Vec<String>,
    /// Those that were asked in this round: two that send to each other get no further.
    asked: BTreeSet<String>,
}

impl Asking {
    fn new(metas: &[String], silent: BTreeSet<String>) -> Self {
        Self { metas: metas.to_vec(), silent, round: Vec::new(), asked: BTreeSet::new() }
    }

    /// Whom to ask now, and for how long at most, with so much time left.
    fn next(&mut self, left: Duration) -> Option<(String, Duration)> {
        if self.round.is_empty() {
            let (silent, others): (Vec<_>, Vec<_>) =
                self.metas.iter().cloned().partition(|address| self.silent.contains(address));
            self.round = others.into_iter().chain(silent).rev().collect();
            self.asked.clear();
        }
        let address = self.round.pop()?;
        self.asked.insert(address.clone());
        // Whoever stopped just now leaves half of the time to others.
        let patience = if self.silent.contains(&address) { LOOK } else { LOOK.max(left / 2) };
        Some((address, patience.min(left)))
    }

    /// What came of it. False: a pause is due before the next is asked.
    fn heard(&mut self, address: &str, wrong: &CallError) -> bool {
        if wrong.is_silence() {
            self.silent.insert(address.to_owned());
            return false;
        }
        self.silent.remove(address);
        let Some(Refusal::NotLeader(it)) = wrong.refusal() else { return false };
        // Who is silent leads no more, or is asked in its turn.
        if it.address.is_empty() || self.asked.contains(&it.address) || self.silent.contains(&it.address) {
            return false;
        }
        self.round.retain(|to_come| *to_come != it.address);
        self.round.push(it.address.clone());
        true
    }
}

/// Makes a call to the leader of the directory, whoever it turns out to be. Those that are silent are asked last, and none may use up the time
/// of the others.
///
/// # Errors
/// [`CallError`]: at once if time does not change it, else at the deadline the last one, with all who did not answer.
pub(crate) async fn at_directory<T, F: Future<Output = Result<Response<T>, Status>>>(
    trust: &Trust,
    metas: &[String],
    deadline: Duration,
    run: impl Fn(Calls, Duration) -> F,
) -> Result<T, CallError> {
    let until = Instant::now() + deadline;
    let left = || until.saturating_duration_since(Instant::now());
    let mut asking = Asking::new(metas, silent(trust, metas, deadline / 2).await);
    let mut last: Option<CallError> = None;
    while !left().is_zero() {
        let Some((address, patience)) = asking.next(left()) else { break };
        let wrong = match call(trust, Expect::META, &address, patience, |calls| run(calls, patience)).await {
            Ok(reply) => return Ok(reply),
            Err(wrong) if !wrong.is_passing() => return Err(wrong),
            Err(wrong) => wrong,
        };
        if !asking.heard(&address, &wrong) {
            sleep(PAUSE.min(left())).await;
        }
        // What a node said tells more than that another did not answer.
        if !wrong.is_silence() || last.as_ref().is_none_or(CallError::is_silence) {
            last = Some(wrong);
        }
    }
    let none_asked = || CallError::Deadline { address: metas.join(", "), after: deadline };
    Err(last.unwrap_or_else(none_asked).beside(asking.silent))
}

/// A message that tells the server how long its caller waits.
pub(crate) fn request<T>(message: T, patience: Duration) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(patience);
    request
}

/// Begins a change of the meta nodes; [`crate::admin::status`] tells how far it is.
///
/// # Errors
/// [`CallError`], with [`Refusal::NodeRefused`] if it is unwise or impossible.
pub async fn change(
    trust: &Trust,
    metas: &[String],
    asked: &v1::ChangeMembersRequest,
    deadline: Duration,
) -> Result<v1::ChangeMembersReply, CallError> {
    at_directory(trust, metas, deadline, |calls, patience| async move {
        v1::admin_client::AdminClient::new(calls).change_members(request(asked.clone(), patience)).await
    })
    .await
}

/// Says what a data node may be used for.
///
/// # Errors
/// [`CallError`].
pub async fn set_standing(
    trust: &Trust,
    metas: &[String],
    asked: v1::SetStandingRequest,
    deadline: Duration,
) -> Result<v1::SetStandingReply, CallError> {
    at_directory(trust, metas, deadline, |calls, patience| async move {
        v1::admin_client::AdminClient::new(calls).set_standing(request(asked, patience)).await
    })
    .await
}

/// Has a data node forgotten.
///
/// # Errors
/// [`CallError`].
pub async fn forget(trust: &Trust, metas: &[String], node: u64, deadline: Duration) -> Result<(), CallError> {
    at_directory(trust, metas, deadline, |calls, patience| async move {
        v1::admin_client::AdminClient::new(calls).forget_node(request(v1::ForgetNodeRequest { node }, patience)).await
    })
    .await
    .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_proto::v1::NotLeader;

    const LEFT: Duration = Duration::from_secs(3);

    fn asking(silent: &[&str]) -> Asking {
        let names = ["a", "b", "c"].map(ToOwned::to_owned);
        Asking::new(&names, silent.iter().map(ToString::to_string).collect())
    }

    fn sends_to(from: &str, leader: &str) -> CallError {
        let it = NotLeader { group: 0, leader: 1, address: leader.to_owned() };
        CallError::Refused { address: from.to_owned(), refusal: Box::new(Refusal::NotLeader(it)) }
    }

    fn next(asking: &mut Asking) -> (String, Duration) {
        asking.next(LEFT).unwrap()
    }

    #[test]
    fn whoever_is_silent_is_asked_last_and_for_a_short_time_and_nobody_is_sent_to_it() {
        let mut asking = asking(&["a"]);
        assert_eq!(next(&mut asking), ("b".to_owned(), LEFT / 2));
        assert!(!asking.heard("b", &sends_to("b", "a")), "the leader of before hangs: a pause, and the next");
        assert_eq!(next(&mut asking).0, "c");
        assert!(!asking.heard("c", &sends_to("c", "a")));
        assert_eq!(next(&mut asking), ("a".to_owned(), LOOK));
        asking.heard("a", &CallError::Deadline { address: "a".to_owned(), after: LOOK });
        // In the next round as well.
        let round: Vec<String> = (0..3).map(|_| next(&mut asking).0).collect();
        assert_eq!(round, ["b", "c", "a"]);
        let told = sends_to("c", "a").beside(asking.silent).to_string();
        assert!(told.ends_with("; no answer from: a"), "{told}");
    }

    #[test]
    fn one_that_stops_while_it_is_asked_gets_half_of_the_time_once_and_little_later() {
        let mut asking = asking(&[]);
        assert_eq!(next(&mut asking), ("a".to_owned(), LEFT / 2));
        asking.heard("a", &CallError::Deadline { address: "a".to_owned(), after: LEFT / 2 });
        assert_eq!((next(&mut asking).0, next(&mut asking).0), ("b".to_owned(), "c".to_owned()));
        assert_eq!((next(&mut asking).0, next(&mut asking).0), ("b".to_owned(), "c".to_owned()));
        assert_eq!(next(&mut asking), ("a".to_owned(), LOOK));
    }

    #[test]
    fn a_hint_is_followed_at_once_and_two_that_send_to_each_other_pause() {
        let mut asking = asking(&[]);
        assert_eq!(next(&mut asking).0, "a");
        assert!(asking.heard("a", &sends_to("a", "c")));
        assert_eq!(next(&mut asking).0, "c");
        assert!(!asking.heard("c", &sends_to("c", "a")), "it was asked in this round");
        assert_eq!(next(&mut asking).0, "b");
        assert!(asking.heard("b", &sends_to("b", "d")), "one that the caller did not know");
        assert_eq!((next(&mut asking).0, next(&mut asking).0), ("d".to_owned(), "a".to_owned()));
    }
}
