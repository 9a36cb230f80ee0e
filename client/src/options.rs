//! What can be set about a client. Every option has a default that fits; the relations between them are checked when connecting.

use crate::{
    error::ConnectError,
    host::{Clock, Entropy, SystemClock, SystemEntropy},
};
use quarry_wire::limits::{EXTENT_BYTES, GRANT_TTL_MAX, LEASE_MAX};
use std::{net::IpAddr, sync::Arc, time::Duration};
use tokio::time::Instant;

/// Options of a client.
#[derive(Clone, Debug)]
pub struct Options {
    /// Deadline of every public call, counted from its start.
    pub timeout: Duration,
    /// Deadline of all public calls together, connecting included: for a program that is one operation to whoever runs it. Closing in good order
    /// may take 2 s more.
    pub until: Option<Instant>,
    /// Longest time for one attempt of a call or of a one-sided operation (plus the time its bytes take); then another way is tried.
    pub attempt_timeout: Duration,
    /// Bytes in flight per direction, at least 64 MiB: so much address space is reserved for each, and memory as it is used. As much again is
    /// kept for large values that were read, for as long as their readers keep them; beyond, they lie in memory of the allocator.
    pub window_bytes: usize,
    /// Largest slab that is asked for, in bytes; at most an extent (64 MiB).
    pub slab_bytes_max: u64,
    /// Lifetime asked for with each grant; at most 30 s.
    pub grant_ttl: Duration,
    /// Slabs are sealed when nothing was written to their kind for this long.
    pub idle: Duration,
    /// Lease asked for with each resolve; at most 5 s.
    pub lease: Duration,
    /// Descriptors kept for reading again within their lease.
    pub cache_entries: usize,
    /// Local address of the fabric endpoints; by default the one that leads to each data node.
    pub fabric_bind: Option<IpAddr>,
    /// libfabric provider, if not the one that fits the installed library.
    pub provider: Option<String>,
    /// The machine's clocks.
    pub clock: Arc<dyn Clock>,
    /// The machine's random numbers.
    pub entropy: Arc<dyn Entropy>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            until: None,
            attempt_timeout: Duration::from_secs(3),
            window_bytes: 128 << 20,
            slab_bytes_max: EXTENT_BYTES,
            grant_ttl: GRANT_TTL_MAX,
            idle: Duration::from_secs(1),
            lease: LEASE_MAX,
            cache_entries: 64 << 10,
            fabric_bind: None,
            provider: None,
            clock: Arc::new(SystemClock),
            entropy: Arc::new(SystemEntropy),
        }
    }
}

/// Shortest lifetime of a grant that leaves time to write.
const GRANT_TTL_MIN: Duration = Duration::from_secs(1);

impl Options {
    /// The deadline of a public call that begins now.
    pub(crate) fn deadline(&self) -> Instant {
        let own = Instant::now() + self.timeout;
        self.until.map_or(own, |until| until.min(own))
    }

    pub(crate) fn check(&self) -> Result<(), ConnectError> {
        let wrong = |option: &'static str, expected: &str, found: String| {
            Err(ConnectError::Option { option, expected: expected.to_owned(), found })
        };
        if self.timeout.is_zero() || self.attempt_timeout.is_zero() || self.idle.is_zero() {
            return wrong("timeout, attempt_timeout and idle", "more than zero", "zero".to_owned());
        }
        if (self.window_bytes as u64) < EXTENT_BYTES {
            return wrong("window_bytes", "at least 64 MiB (a slot's largest size)", format!("{}", self.window_bytes));
        }
        if self.slab_bytes_max == 0 || self.slab_bytes_max > EXTENT_BYTES {
            return wrong("slab_bytes_max", "1 to 67108864 (an extent)", format!("{}", self.slab_bytes_max));
        }
        if self.grant_ttl < GRANT_TTL_MIN || self.grant_ttl > GRANT_TTL_MAX {
            return wrong("grant_ttl", "1 s to 30 s", format!("{:?}", self.grant_ttl));
        }
        if self.lease.is_zero() || self.lease > LEASE_MAX {
            return wrong("lease", "above 0 and at most 5 s", format!("{:?}", self.lease));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn no_call_lasts_beyond_its_own_deadline_nor_that_of_all_together() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let until = |until| Options { timeout: 3 * second, until, ..Options::default() }.deadline() - now;
        assert_eq!(
            [until(None), until(Some(now + second)), until(Some(now + 9 * second))],
            [3, 1, 3].map(Duration::from_secs)
        );
    }

    #[test]
    fn the_defaults_pass_and_each_impossible_option_is_named() {
        assert!(Options::default().check().is_ok());
        let bad = [
            ("window_bytes", Options { window_bytes: 1 << 20, ..Options::default() }),
            ("slab_bytes_max", Options { slab_bytes_max: EXTENT_BYTES + 1, ..Options::default() }),
            ("grant_ttl", Options { grant_ttl: Duration::from_secs(31), ..Options::default() }),
            ("lease", Options { lease: Duration::ZERO, ..Options::default() }),
        ];
        for (name, options) in bad {
            let Err(ConnectError::Option { option, .. }) = options.check() else { panic!("{name} was taken") };
            assert_eq!(option, name);
        }
    }
}
