//! The seams to the machine: clocks and randomness come in here and nowhere else.
//!
//! Durations of waits come from tokio's clock, which tests can pause; this is for what must mean the same to other machines (the wall clock
//! inside versions) or must go on while the machine sleeps (leases).

use rustix::{
    rand::{GetRandomFlags, getrandom},
    time::{ClockId, clock_gettime},
};
use std::{fmt, time::Duration};

/// The clocks of this machine.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Milliseconds since 1970, as good as the machine knows. Versions are made of it.
    fn wall_ms(&self) -> u64;
    /// Time since the machine started, time asleep included. Never goes back; leases are counted on it.
    fn boot(&self) -> Duration;
}

/// A source of random numbers that nobody can guess.
pub trait Entropy: Send + Sync + fmt::Debug {
    /// 64 random bits.
    fn bits(&self) -> u64;
}

/// The operating system's clocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn wall_ms(&self) -> u64 {
        let now = clock_gettime(ClockId::Realtime);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        seconds.saturating_mul(1000).saturating_add(u64::try_from(now.tv_nsec / 1_000_000).unwrap_or(0))
    }
    fn boot(&self) -> Duration {
        let now = clock_gettime(ClockId::Boottime);
        Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
    }
}

/// The operating system's generator.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemEntropy;

impl Entropy for SystemEntropy {
    fn bits(&self) -> u64 {
        let mut bytes = [0; 8];
        let filled = getrandom(&mut bytes, GetRandomFlags::empty()).expect("Linux gives random bytes to everyone");
        assert_eq!(filled, bytes.len(), "requests of up to 256 bytes are never cut short");
        u64::from_le_bytes(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_seams_give_time_that_goes_on_and_bits_that_differ() {
        let (one, two) = (SystemClock.boot(), SystemClock.boot());
        assert!(two >= one && one > Duration::ZERO);
        assert!(SystemClock.wall_ms() > 1_600_000_000_000);
        assert_ne!(SystemEntropy.bits(), SystemEntropy.bits());
    }
}
