//! A simulated world: many hosts in one thread, under one seed, in time that only passes when nothing else can happen.
//!
//! What runs is what runs in production (groups, logs, snapshots, read rounds, the library underneath); what is played is the disk
//! ([`Disk`], with a line between synced and not), the wire between hosts ([`Net`]) and chance ([`roll`]). Everything that happens is
//! noted ([`note`]) and hashed: equal seeds have equal traces, or something is not deterministic.
//!
//! What holds:
//! - *One seed, one history*: all randomness is drawn from the world's, all time is the paused runtime's, nothing iterates over
//!   hash-ordered maps and no thread but this one works.
//! - *Crashes forget*: a host that crashed reads, writes and says nothing more, and what it had not synced is gone, but for a
//!   prefix that may have made it to the medium.
//!
//! Only here for tests: behind the feature `sim`.

pub(crate) mod disk;
mod net;
pub(crate) mod runtime;

use std::cell::RefCell;
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::time::Instant;

pub use disk::{Disk, Pace};
pub use net::{Net, Weather};

thread_local! {
    static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
}

struct World {
    dice: u64,
    began: Option<Instant>,
    trace: Sha256,
    events: u64,
    told: bool,
}

/// What came of a simulated world.
#[derive(Debug)]
pub struct Run<T> {
    /// What the work returned.
    pub result: T,
    /// SHA-256 over everything that was noted.
    pub trace: [u8; 32],
    /// How much was noted.
    pub events: u64,
    /// How long it took in there.
    pub lasted: Duration,
}

/// Leaves the thread as it was, however the work ends.
struct Leave;

impl Drop for Leave {
    fn drop(&mut self) {
        WORLD.with_borrow_mut(Option::take);
    }
}

/// Runs `work` in a world of its own on this thread. `told`: everything noted is also printed to standard error.
///
/// # Panics
/// If this thread is in a world already, or `work` panics.
pub fn run<T>(seed: u64, told: bool, work: impl Future<Output = T>) -> Run<T> {
    let world = World { dice: mix(seed), began: None, trace: Sha256::new(), events: 0, told };
    let outer = WORLD.with_borrow_mut(|place| place.replace(world));
    assert!(outer.is_none(), "one world at a time on a thread");
    let _leave = Leave;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .rng_seed(tokio::runtime::RngSeed::from_bytes(&seed.to_le_bytes()))
        .build()
        .expect("a runtime without I/O needs nothing of the system");
    let (result, lasted) = runtime.block_on(async {
        with(|world| world.began = Some(Instant::now()));
        (work.await, now())
    });
    drop(runtime);
    let world = WORLD.with_borrow_mut(Option::take).expect("the world was put there above");
    Run { result, trace: world.trace.finalize().into(), events: world.events, lasted }
}

fn with<R>(work: impl FnOnce(&mut World) -> R) -> R {
    WORLD.with_borrow_mut(|world| work(world.as_mut().expect("called inside a simulated world")))
}

/// Whether this thread is in a simulated world.
pub(crate) fn is_here() -> bool {
    WORLD.with_borrow(Option::is_some)
}

/// Time since the world began.
///
/// # Panics
/// Outside a world, like all that follows.
pub fn now() -> Duration {
    let began = with(|world| world.began);
    began.map_or(Duration::ZERO, |began| Instant::now() - began)
}

/// Something happened.
pub fn note(what: std::fmt::Arguments<'_>) {
    let line = format!("{:?} {what}\n", now());
    with(|world| {
        world.events += 1;
        world.trace.update(line.as_bytes());
        if world.told {
            eprint!("{line}");
        }
    });
}

fn mix(state: u64) -> u64 {
    // SplitMix64.
    let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// 64 random bits.
#[must_use]
pub fn draw() -> u64 {
    with(|world| {
        world.dice = world.dice.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(world.dice)
    })
}

/// A number below `sides`, at least 1.
#[must_use]
pub fn roll(sides: u64) -> u64 {
    draw() % sides.max(1)
}

/// True `per_mille` times of a thousand.
#[must_use]
pub fn chance(per_mille: u64) -> bool {
    roll(1_000) < per_mille
}

/// A time between the two.
#[must_use]
pub fn between(least: Duration, most: Duration) -> Duration {
    let span = u64::try_from(most.saturating_sub(least).as_micros()).unwrap_or(u64::MAX);
    least + Duration::from_micros(roll(span.saturating_add(1)))
}
