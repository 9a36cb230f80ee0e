//! How fast a cluster commits: entries that change nothing, through the log of one group and back.

use crate::admin::{CallError, call};
use quarry_proto::v1::{self, admin_client::AdminClient};
use quarry_trust::{Expect, Trust};
use std::time::Duration;
use tokio::time::Instant;
use tonic::Response;

/// What the last calls may take beyond the span.
const MARGIN: Duration = Duration::from_secs(10);

/// Has `clients` propose one stamp after the other for `span`, at the node at `address`, which leads the group. Answers how long each took.
///
/// # Errors
/// [`CallError`], as soon as one call failed.
pub async fn stamps(
    trust: &Trust,
    address: &str,
    group: u32,
    clients: usize,
    span: Duration,
) -> Result<Vec<Duration>, CallError> {
    call(trust, Expect::META, address, span + MARGIN, |calls| async move {
        let until = Instant::now() + span;
        let one = |calls| async move {
            let mut admin = AdminClient::new(calls);
            let mut took = Vec::new();
            while Instant::now() < until {
                let began = Instant::now();
                admin.stamp(v1::StampRequest { group }).await?;
                took.push(began.elapsed());
            }
            Ok::<_, tonic::Status>(took)
        };
        let tasks: Vec<_> = (0..clients).map(|_| tokio::spawn(one(calls.clone()))).collect();
        let mut all = Vec::new();
        for task in tasks {
            all.extend(task.await.map_err(|wrong| tonic::Status::internal(wrong.to_string()))??);
        }
        Ok(Response::new(all))
    })
    .await
}
