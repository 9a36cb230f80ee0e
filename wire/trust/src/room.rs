//! Rooms: a number that many add to and that has a limit.

use metrics::Gauge;
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

/// How much of something may be taken, and how much is.
pub(crate) struct Room {
    most: usize,
    taken: AtomicUsize,
    shown: Gauge,
}

/// There is no room for that much.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Full {
    pub(crate) limit: usize,
    /// What would have been taken then.
    pub(crate) found: usize,
}

impl Room {
    /// A room that shows in `shown` how much is taken.
    pub(crate) fn new(most: usize, shown: Gauge) -> Arc<Self> {
        Arc::new(Self { most, taken: AtomicUsize::new(0), shown })
    }

    /// What is taken now.
    pub(crate) fn taken(&self) -> usize {
        self.taken.load(Relaxed)
    }

    /// Takes `amount`, if there is room for it.
    pub(crate) fn take(self: &Arc<Self>, amount: usize) -> Result<Held, Full> {
        let fits = |taken: usize| taken.checked_add(amount).filter(|sum| *sum <= self.most);
        let found = |taken: usize| Full { limit: self.most, found: taken.saturating_add(amount) };
        self.taken.fetch_update(Relaxed, Relaxed, fits).map_err(found)?;
        Ok(self.hold(amount))
    }

    /// Takes `amount`, whether or not there is room for it.
    pub(crate) fn take_anyway(self: &Arc<Self>, amount: usize) -> Held {
        self.taken.fetch_add(amount, Relaxed);
        self.hold(amount)
    }

    /// Whether anything more can be taken.
    pub(crate) fn check(&self) -> Result<(), Full> {
        let taken = self.taken();
        if taken < self.most { Ok(()) } else { Err(Full { limit: self.most, found: taken }) }
    }

    fn hold(self: &Arc<Self>, amount: usize) -> Held {
        self.shown.increment(gauge(amount));
        Held { room: Arc::clone(self), amount }
    }
}

#[expect(clippy::cast_precision_loss, reason = "gauges are floating point; what is held stays far below 2^53")]
const fn gauge(amount: usize) -> f64 {
    amount as f64
}

/// What somebody took; given back when dropped.
pub(crate) struct Held {
    room: Arc<Room>,
    amount: usize,
}

impl Held {
    /// Takes `amount` more, if there is room for it.
    pub(crate) fn grow(&mut self, amount: usize) -> Result<(), Full> {
        let mut more = self.room.take(amount)?;
        self.amount += std::mem::take(&mut more.amount);
        Ok(())
    }

    /// Takes `amount` more, whether or not there is room for it.
    pub(crate) fn grow_anyway(&mut self, amount: usize) {
        let mut more = self.room.take_anyway(amount);
        self.amount += std::mem::take(&mut more.amount);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.amount > 0 {
            self.room.taken.fetch_sub(self.amount, Relaxed);
            self.room.shown.decrement(gauge(self.amount));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_is_never_over_full_and_what_was_taken_comes_back() {
        let room = Room::new(3, Gauge::noop());
        let (one, mut two) = (room.take(1).unwrap(), room.take(1).unwrap());
        assert_eq!(room.take(2).err(), Some(Full { limit: 3, found: 4 }));
        two.grow(1).unwrap();
        assert_eq!(
            (two.grow(1).err(), room.check().err().map(|it| it.found)),
            (Some(Full { limit: 3, found: 4 }), Some(3))
        );
        drop(one);
        assert_eq!((room.taken(), room.check()), (2, Ok(())));
        let more = room.take_anyway(5);
        two.grow_anyway(1);
        assert_eq!((room.taken(), room.take(1).err()), (8, Some(Full { limit: 3, found: 9 })));
        drop((two, more));
        assert_eq!(room.taken(), 0);
    }
}
