//! The wall clock: the one place where this node asks what time it is. Used at the door alone, to turn away versions from the future; no state
//! machine and no deadline depends on it.

use std::{
    fmt,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

/// Tells the milliseconds since 1970. Cloning shares the clock.
#[derive(Clone)]
pub struct WallClock(Arc<dyn Fn() -> u64 + Send + Sync>);

impl WallClock {
    /// The clock of the operating system.
    #[must_use]
    pub fn system() -> Self {
        Self::new(|| {
            #[expect(clippy::disallowed_methods, reason = "this is the seam through which the wall clock enters")]
            let now = SystemTime::now();
            // A clock set before 1970 reads as 1970: then every honest version is turned away, which the operator sees.
            let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
            u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
        })
    }

    /// A clock that tells what `read` says.
    #[must_use]
    pub fn new(read: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    pub(crate) fn now_ms(&self) -> u64 {
        (self.0)()
    }
}

impl fmt::Debug for WallClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WallClock({} ms)", self.now_ms())
    }
}
