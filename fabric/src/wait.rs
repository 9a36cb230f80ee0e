//! How long to wait for an operation, and in which way.

use tokio::time::Instant;

/// Until when an operation is waited for, and whether the task looks for its completion itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    pub(crate) deadline: Instant,
    pub(crate) spins: bool,
}

impl Wait {
    /// Sleeps until the operation is over, at most until `deadline`. What an [`Instant`] turns into.
    #[must_use]
    pub fn until(deadline: Instant) -> Self {
        Self { deadline, spins: false }
    }

    /// First looks for the completion itself, for as long as the endpoint's configuration says
    /// ([`EndpointConfig::spin`](crate::EndpointConfig::spin)), then sleeps. Saves two changes of threads where an operation takes
    /// little more than those.
    ///
    /// The task's thread does nothing else meanwhile: use it for an operation that is awaited alone, not for several that are
    /// joined (the first would spin before the second is posted). With others in flight on the same endpoint it sleeps at once,
    /// and mostly so where spinning was in vain lately.
    #[must_use]
    pub fn spinning_until(deadline: Instant) -> Self {
        Self { deadline, spins: true }
    }
}

impl From<Instant> for Wait {
    fn from(deadline: Instant) -> Self {
        Self::until(deadline)
    }
}
