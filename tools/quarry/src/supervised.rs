//! What the service manager is told (systemd, `Type=notify`): ready when the node serves, stopping when it drains, alive in between.
//!
//! Decides when a node counts as started; whether it serves is the node's own word, the same that `/readyz` gives. Without `NOTIFY_SOCKET`
//! nothing is told to anybody. A node that belongs to no cluster yet has nothing to recover and waits for its operator, so it counts as
//! started: else starting the nodes of a new cluster would not return before somebody bootstraps it.

use crate::http::Health;
use sd_notify::NotifyState;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{task::JoinSet, time::interval};

/// Between two looks at the node.
const LOOK: Duration = Duration::from_millis(100);

/// The service manager's view of this process. Nothing more is told about its health once this is dropped.
pub(crate) struct Supervised {
    work: JoinSet<()>,
    stopping: Arc<AtomicBool>,
}

impl Supervised {
    /// The process has begun.
    pub(crate) fn starting() -> Self {
        tell(&[NotifyState::Status("the node recovers")]);
        Self { work: JoinSet::new(), stopping: Arc::default() }
    }

    /// The node runs: tells once that it is ready, then what it does, and that it is alive as often as the service manager wants to hear it.
    pub(crate) fn follow(&mut self, health: Health) {
        if std::env::var_os("NOTIFY_SOCKET").is_some() {
            self.work.spawn(follow(health, Arc::clone(&self.stopping)));
        }
    }

    /// The node drains. It goes on saying that it is alive.
    pub(crate) fn stopping(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        tell(&[NotifyState::Stopping, NotifyState::Status("the node drains")]);
    }
}

async fn follow(health: Health, stopping: Arc<AtomicBool>) {
    // Twice in each span, as systemd advises; a look comes often enough for any span worth having.
    let mut watchdog = sd_notify::watchdog_enabled().map(|span| interval((span / 2).max(LOOK)));
    let mut looks = interval(LOOK);
    let (mut ready, mut last) = (false, String::new());
    loop {
        tokio::select! {
            _ = looks.tick() => {}
            () = tick(&mut watchdog) => {
                // Silence is what makes the service manager act.
                if health.alive().is_ok() {
                    tell(&[NotifyState::Watchdog]);
                }
                continue;
            }
        }
        if stopping.load(Ordering::Relaxed) {
            continue;
        }
        let state = health.ready();
        let now = state.as_ref().map_or_else(|why| format!("waits: {why}"), |()| "serves".to_owned());
        let first = !ready && (state.is_ok() || health.is_blank());
        if first {
            ready = true;
            tell(&[NotifyState::Ready, NotifyState::Status(&now)]);
        } else if now != last {
            tell(&[NotifyState::Status(&now)]);
        }
        last = now;
    }
}

async fn tick(watchdog: &mut Option<tokio::time::Interval>) {
    match watchdog {
        Some(watchdog) => {
            watchdog.tick().await;
        }
        None => std::future::pending().await,
    }
}

/// A service manager that cannot be told is no reason to stop serving.
fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "the service manager could not be told how this process does");
    }
}
