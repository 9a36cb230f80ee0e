//! When a region gets a new read key: on command, and by the clock if the settings say so.
//!
//! Decides when, and whom to tell; `regions` carries it out. All who ask before a key is made share it, and whoever asks during a rotation
//! gets the next one: the key that somebody wants to be rid of is never the answer.

use parking_lot::Mutex;
use quarry_wire::ids::{Incarnation, RegionEpoch};
use std::time::Duration;
use tokio::sync::oneshot;

/// A key that the directory has a record of, made after it was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rotated {
    pub(crate) incarnation: Incarnation,
    pub(crate) epoch: RegionEpoch,
}

/// Those who asked for a new key of one region.
#[derive(Default)]
pub(crate) struct Rotations(Mutex<Vec<oneshot::Sender<Rotated>>>);

impl Rotations {
    /// Asks; told when it is done. The rotation goes on if nobody waits for that any more.
    pub(crate) fn ask(&self) -> oneshot::Receiver<Rotated> {
        let (told, done) = oneshot::channel();
        self.0.lock().push(told);
        done
    }

    pub(crate) fn is_asked(&self) -> bool {
        !self.0.lock().is_empty()
    }

    /// All who have asked so far: the key that is made next is for them.
    pub(crate) fn take(&self) -> Vec<oneshot::Sender<Rotated>> {
        std::mem::take(&mut self.0.lock())
    }
}

/// How long a scheduled key lives: up to a tenth more or less than `every`, so that a cluster's nodes do not rotate in step.
pub(crate) fn lifetime(every: Duration, random: u64) -> Duration {
    let tenth = every / 10;
    let part = u32::try_from(random % 1_000).expect("below 1000");
    every - tenth + tenth * 2 / 1_000 * part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scheduled_keys_live_a_tenth_more_or_less_than_told() {
        let every = Duration::from_secs(1_000);
        assert_eq!(lifetime(every, 0), Duration::from_secs(900));
        assert_eq!(lifetime(every, 500), every);
        assert_eq!(lifetime(every, 999), Duration::from_millis(1_099_800));
        assert_eq!(lifetime(every, 1_000), lifetime(every, 0));
    }

    #[test]
    fn who_asks_while_a_key_is_made_is_not_told_of_that_one() {
        let rotations = Rotations::default();
        let mut first = rotations.ask();
        let mut second = rotations.ask();
        let told = rotations.take();
        let mut late = rotations.ask();
        let made = Rotated { incarnation: Incarnation::new(quarry_wire::ids::Generation(1), 1), epoch: RegionEpoch(2) };
        for asker in told {
            asker.send(made).unwrap();
        }
        assert_eq!((first.try_recv(), second.try_recv()), (Ok(made), Ok(made)));
        assert!(late.try_recv().is_err());
        assert!(rotations.is_asked());
    }
}
