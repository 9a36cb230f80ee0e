//! Requests: commands that must not be executed twice, and what came of them.
//!
//! A request names an applied stamp of its group and 64 random bits. Its outcome is kept while its stamp is younger than the span kept; a
//! request whose stamp is not is stale and never executed again. So whatever may still be executed for the first time is remembered, and
//! whatever is forgotten is refused: no request takes effect twice (*Idempotent commits*, *Linearizable*).

use crate::ordered::Map;
use quarry_wire::units::LogTime;
use serde::{Deserialize, Serialize};
use std::{fmt, sync::Arc, time::Duration};

/// Names one request: an applied stamp of the group that it is sent to, and 64 bits of the client's own randomness.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct RequestId {
    /// The stamp: the log time of an entry that this group has applied, as its last reply said.
    pub at: LogTime,
    /// Random bits.
    pub random: u64,
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request-{}-{:016x}", self.at, self.random)
    }
}

/// Why a request was not looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum RequestRefusal {
    /// Its stamp is at or below the floor: it may have been executed and forgotten. If it was sent before, its outcome is unknown for ever.
    #[error(
        "the request is stamped {found}, at or below the floor {floor}: if it was sent before, what came of it is not known any more"
    )]
    Stale {
        /// Highest stamp that is refused.
        floor: LogTime,
        /// The request's stamp.
        found: LogTime,
    },
    /// Its stamp is no applied stamp of this group. Not executed now; a copy of it may be, later.
    #[error("the request is stamped {found}, but this group has only come to {at}: use a stamp of its last reply")]
    Ahead {
        /// Log time of this entry.
        at: LogTime,
        /// The request's stamp.
        found: LogTime,
    },
    /// Another kind of request used its name.
    #[error("the request's name was used by another kind of request: draw new random bits")]
    Taken,
}

/// Outcomes by request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Requests<O> {
    outcomes: Map<RequestId, Arc<O>>,
}

impl<O> Requests<O> {
    pub(crate) fn new() -> Self {
        Self { outcomes: Map::new() }
    }

    /// The outcome recorded for `id`; none if it may be executed now.
    pub(crate) fn look(&self, now: LogTime, kept: Duration, id: RequestId) -> Result<Option<&O>, RequestRefusal> {
        if let Some(outcome) = self.outcomes.get(&id) {
            return Ok(Some(outcome));
        }
        if id.at > now {
            return Err(RequestRefusal::Ahead { at: now, found: id.at });
        }
        if id.at.after(kept) <= now {
            let floor = LogTime(now.0.saturating_sub(quarry_wire::units::millis(kept)));
            return Err(RequestRefusal::Stale { floor, found: id.at });
        }
        Ok(None)
    }

    pub(crate) fn record(&mut self, id: RequestId, outcome: O) {
        self.outcomes.insert(id, Arc::new(outcome));
    }

    /// Forgets whatever has become stale at `now`.
    pub(crate) fn forget(&mut self, now: LogTime, kept: Duration) {
        while self.next_deadline(kept).is_some_and(|due| due <= now) {
            self.outcomes.pop_first();
        }
    }

    /// When the next outcome is forgotten.
    pub(crate) fn next_deadline(&self, kept: Duration) -> Option<LogTime> {
        self.outcomes.first_key_value().map(|(id, _)| id.at.after(kept))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&RequestId, &O)> {
        self.outcomes.iter().map(|(id, outcome)| (id, &**outcome))
    }
}
