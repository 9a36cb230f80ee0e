//! Public calls: each has a request id, drawn by the client, under which all that is done for it is logged, here and at every server.
//!
//! A task that is spawned for a call is given its [`Scope`]; work that serves several calls at once goes on under the id of the first.

use crate::core::Core;
use quarry_proto::call_id::CallId;
use tokio::time::Instant;
use tracing::{Instrument as _, Span, error_span};

/// Runs one public call, named `name`, under a request id of its own.
pub(crate) async fn call<T>(core: &Core, name: &'static str, work: impl Future<Output = T>) -> T {
    let id = CallId::new(core.options.entropy.bits());
    // At the level of errors, so that no filter that lets lines through takes the id from them.
    let span = error_span!("client", request = %id, call = name);
    let began = Instant::now();
    let told = async {
        let answer = work.await;
        tracing::debug!(elapsed = ?began.elapsed(), "done");
        answer
    };
    id.scope(told).instrument(span).await
}

/// The call for which a task works, to be carried into another.
#[derive(Clone, Debug)]
pub(crate) struct Scope {
    id: Option<CallId>,
    span: Span,
}

impl Scope {
    /// That of the running task.
    pub(crate) fn current() -> Self {
        Self { id: CallId::current(), span: Span::current() }
    }

    /// The request id, if there is one.
    pub(crate) const fn id(&self) -> Option<&CallId> {
        self.id.as_ref()
    }

    pub(crate) const fn span(&self) -> &Span {
        &self.span
    }

    /// Runs `work` for that call.
    pub(crate) async fn run<T>(self, work: impl Future<Output = T>) -> T {
        let work = work.instrument(self.span);
        match self.id {
            Some(id) => id.scope(work).await,
            None => work.await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_spawned_task_goes_on_under_the_id_of_the_call_that_spawned_it() {
        let id = CallId::new(5);
        let scope = id.clone().scope(async { Scope::current() }).await;
        let inside = tokio::spawn(scope.run(async { CallId::current() }));
        assert_eq!(inside.await.unwrap(), Some(id));
        let outside = tokio::spawn(Scope::current().run(async { CallId::current() }));
        assert_eq!(outside.await.unwrap(), None);
    }
}
