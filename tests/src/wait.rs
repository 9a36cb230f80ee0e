//! Waiting for a condition, with a deadline.

use std::{fmt::Display, time::Duration};
use tokio::time::{Instant, sleep};

/// Time for anything that a healthy cluster does, with room for a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// Looks again and again until `look` finds what it looks for.
///
/// # Panics
/// At the deadline, naming `what` was missing.
pub async fn eventually<T>(deadline: Duration, what: impl Display, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let until = Instant::now() + deadline;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < until, "not within {deadline:?}: {what}");
        sleep(LOOK).await;
    }
}

/// [`eventually`] within [`PATIENCE`].
pub async fn soon<T>(what: impl Display, look: impl AsyncFnMut() -> Option<T>) -> T {
    eventually(PATIENCE, what, look).await
}
