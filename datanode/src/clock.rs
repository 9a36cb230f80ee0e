//! The node's own monotonic clock, as the pure parts see it. It bounds waste; no fence depends on it.

use crate::claims::NodeTime;
use tokio::time::Instant;

/// Counts from the start of the process's node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    started: Instant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self { started: Instant::now() }
    }

    pub(crate) fn now(&self) -> NodeTime {
        NodeTime(self.started.elapsed())
    }
}
