//! The services of a meta node: calls become commands and reads, outcomes and refusals become messages. One file per service; the calls with a
//! story of their own have files beside them.

mod admin;
mod backup;
mod control;
mod damage;
mod members;
mod pins;
mod probe;
mod publish;
mod registry;
mod resign;
mod resolve;

pub(crate) use admin::{ask_status, status};
pub(crate) use publish::believe;

use crate::{core::Core, door};
use quarry_meta_state::RequestId;
use quarry_proto::{convert::required, refusal::Refusal, v1};
use quarry_wire::units::LogTime;
use std::{sync::Arc, time::Duration};
use tonic::{Response, Status};

/// All services of one node. Cloning shares the node.
#[derive(Clone)]
pub(crate) struct Service(Arc<Core>);

impl Service {
    pub(crate) const fn new(core: Arc<Core>) -> Self {
        Self(core)
    }

    fn core(&self) -> &Core {
        &self.0
    }

    /// Runs a call while the gate is open.
    async fn call<T>(&self, work: impl Future<Output = Result<T, Refusal>>) -> Result<Response<T>, Status> {
        let _inside = self.0.gate.enter()?;
        Ok(Response::new(work.await?))
    }
}

/// The request named by a message; `part` tells the commands apart that one request was split into.
fn request_id(message: Option<v1::RequestId>, part: u64) -> Result<RequestId, Refusal> {
    let it = required("request", message)?;
    // An odd constant keeps the parts of one request apart and, being random to others' bits, apart from theirs.
    let random = it.random.wrapping_add(part.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    Ok(RequestId { at: LogTime(it.applied_ms), random })
}

/// The machine answered a command with the outcome of another: a fault of this process, never of the caller.
pub(crate) fn strange(outcome: &impl std::fmt::Debug) -> Refusal {
    tracing::error!(?outcome, "an outcome does not fit its command");
    door::indeterminate("this node answered with the outcome of another command")
}

fn unsigned(field: &str, number: u32) -> Result<u8, Refusal> {
    u8::try_from(number).map_err(|_| Refusal::malformed(field, "at most 255", number))
}

/// What overtaken plans wait before they are made again.
const REPLAN_PAUSE: Duration = Duration::from_millis(5);
