//! Who the nodes are: changes of the meta nodes, and what data nodes are used for.
//!
//! The directory's leader decides and acts; these calls find it, by its own hints, and ask again for as long as that helps. All of them may be
//! made any number of times.

use crate::admin::{CallError, Calls, LOOK, call, silent};
use quarry_proto::{refusal::Refusal, v1};
use quarry_trust::{Expect, Trust};
use std::{future::Future, time::Duration};
use tokio::time::{Instant, sleep};
use tonic::{Response, Status};

/// Between two attempts that nobody could answer.
const PAUSE: Duration = Duration::from_millis(100);

/// Makes a call to the leader of the directory, whoever it turns out to be. Those that are silent are asked last, and none may use up the time
/// of the others.
///
/// # Errors
/// [`CallError`]: at once if time does not change it, else at the deadline the last one.
pub(crate) async fn at_directory<T, F: Future<Output = Result<Response<T>, Status>>>(
    trust: &Trust,
    metas: &[String],
    deadline: Duration,
    run: impl Fn(Calls, Duration) -> F,
) -> Result<T, CallError> {
    let silent = silent(trust, metas, deadline).await;
    let (last_ones, mut metas): (Vec<&String>, Vec<_>) = metas.iter().partition(|address| silent.contains(*address));
    metas.extend(last_ones);
    let until = Instant::now() + deadline;
    let left = || until.saturating_duration_since(Instant::now());
    let mut last = CallError::Address { address: String::new() };
    let mut hinted: Option<String> = None;
    let mut turn = 0;
    while !left().is_zero() && !metas.is_empty() {
        let was_hinted = hinted.is_some();
        let address = hinted.take().unwrap_or_else(|| {
            turn += 1;
            metas[(turn - 1) % metas.len()].clone()
        });
        // Whoever stopped just now leaves half of the time to others.
        let patience = if silent.contains(&address) { LOOK } else { LOOK.max(left() / 2) }.min(left());
        let wrong = match call(trust, Expect::META, &address, patience, |calls| run(calls, patience)).await {
            Ok(reply) => return Ok(reply),
            Err(wrong) if !wrong.is_passing() => return Err(wrong),
            Err(wrong) => wrong,
        };
        if let CallError::Refused { refusal, .. } = &wrong
            && let Refusal::NotLeader(it) = &**refusal
            && !it.address.is_empty()
            && !was_hinted
        {
            hinted = Some(it.address.clone());
        } else {
            sleep(PAUSE.min(left())).await;
        }
        // What a node said tells more than that another did not answer.
        if matches!(wrong, CallError::Refused { .. }) || !matches!(last, CallError::Refused { .. }) {
            last = wrong;
        }
    }
    Err(last)
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
