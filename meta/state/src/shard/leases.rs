//! Leases: permission to read. The shard only keeps the horizon: a replicated promise that no lease ends after it.
//!
//! The leader gives leases without a log entry, each at most horizon − its running log clock; a new leader inherits the horizon, so what an
//! earlier leader promised still holds. Leases that are replicated one by one are pins (`pins.rs`): what they keep does not begin to rest before
//! they end. Keeps *Leases hold*.

use super::{Shard, Slab};
use quarry_wire::units::LogTime;

impl Shard {
    /// No lease ends after this log time. A leader gives a lease of at most this minus its running log clock.
    #[must_use]
    pub const fn horizon(&self) -> LogTime {
        self.horizon
    }

    /// Raises the horizon, at most to the bound ahead of log time; never lowers it.
    pub(super) fn raise_horizon(&mut self, asked: Option<LogTime>) -> LogTime {
        if let Some(asked) = asked {
            self.horizon = self.horizon.max(asked.min(self.now.after(self.settings.horizon_ahead_max)));
        }
        self.horizon
    }

    /// When memory of `slab` that is freed now may be granted again: after every lease that could have been given, and the quarantine.
    ///
    /// While the grant is open it also outlasts the grant: a new grant over part of an armed slab would make the node close the claim and the
    /// lane under its healthy writer.
    pub(super) fn rest_until(&self, slab: &Slab) -> LogTime {
        let last_lease = self.now.max(self.horizon);
        let last_use = if slab.phase.is_live() { last_lease.max(slab.expires_at) } else { last_lease };
        last_use.after(self.settings.quarantine)
    }
}
