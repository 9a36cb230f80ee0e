//! Leases and the horizon that they must not pass.
//!
//! The horizon is replicated a few seconds ahead of log time, so a lease costs no log entry; it is raised when less than half of that is left
//! and somebody asks. Keeps *Leases hold*: a lease ends at the horizon or before it, by the running clock of a leader that was confirmed after
//! the call arrived.

use crate::{
    door,
    hosted::{Hosted, OWN_PROPOSAL},
};
use quarry_meta_state::{Shard, shard::ShardCommand};
use quarry_proto::refusal::Refusal;
use quarry_wire::{
    limits::{HORIZON_AHEAD, LEASE_MAX},
    units::LogTime,
};
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::Mutex,
    time::{Instant, timeout_at},
};

/// Raises the horizon of one shard, one raise at a time.
#[derive(Default)]
pub(crate) struct Horizon(Arc<Mutex<()>>);

impl Horizon {
    /// Makes sure that a lease of `wanted` can be given, as far as this leader knows; longer leases than [`LEASE_MAX`] are never given.
    pub(crate) async fn reach(
        &self,
        shard: &Arc<Hosted<Shard>>,
        wanted: Duration,
        deadline: Instant,
    ) -> Result<(), Refusal> {
        let wanted = wanted.min(LEASE_MAX);
        let left = |shard: &Hosted<Shard>| Ok(shard.read(Shard::horizon).since(shard.running()?));
        let found = left(shard)?;
        if found >= HORIZON_AHEAD / 2 {
            return Ok(());
        }
        if found >= wanted {
            // Enough for this caller; raised in the background for the next ones.
            if let Ok(turn) = Arc::clone(&self.0).try_lock_owned() {
                let shard = Arc::clone(shard);
                tokio::spawn(async move {
                    if let Err(refusal) = raise(&shard, Instant::now() + OWN_PROPOSAL).await {
                        tracing::debug!(group = %shard.id(), %refusal, "the horizon was not raised");
                    }
                    drop(turn);
                });
            }
            return Ok(());
        }
        let Ok(_turn) = timeout_at(deadline, self.0.lock()).await else {
            return Err(door::not_ready("the lease horizon was not raised in time", door::RETRY));
        };
        if left(shard)? < wanted {
            raise(shard, deadline).await?;
        }
        Ok(())
    }
}

async fn raise(shard: &Hosted<Shard>, deadline: Instant) -> Result<(), Refusal> {
    let horizon = Some(shard.running()?.after(HORIZON_AHEAD));
    shard.propose(ShardCommand::Tick { horizon }, deadline).await.map(drop)
}

/// The lease for a caller who asked for `asked`, when the leader's clock says `running`.
pub(crate) fn lease(asked: Duration, horizon: LogTime, running: LogTime) -> Duration {
    asked.min(LEASE_MAX).min(horizon.since(running))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_never_passes_the_horizon() {
        let second = Duration::from_secs(1);
        assert_eq!(lease(second, LogTime(10_000), LogTime(2_000)), second);
        assert_eq!(lease(60 * second, LogTime(10_000), LogTime(2_000)), LEASE_MAX);
        assert_eq!(lease(60 * second, LogTime(10_000), LogTime(9_999)), Duration::from_millis(1));
        assert_eq!(lease(60 * second, LogTime(10_000), LogTime(10_001)), Duration::ZERO);
    }
}
