//! What goes wrong, and when: all of it drawn from the seed.

use crate::world::{SHARDS, World};
use quarry_raft::{
    RaftNodeId,
    sim::{self, Weather},
};
use std::{rc::Rc, time::Duration};
use tokio::time::{Instant, sleep};

fn pick() -> RaftNodeId {
    let ids: Vec<RaftNodeId> = World::ids().collect();
    ids[usize::try_from(sim::roll(ids.len() as u64)).expect("there are three")]
}

fn others(node: RaftNodeId) -> impl Iterator<Item = RaftNodeId> {
    World::ids().filter(move |other| *other != node)
}

/// Weather of some kind.
fn weather() -> Weather {
    let lost_per_mille = [0, 0, 10, 50][usize::try_from(sim::roll(4)).expect("below four")];
    let most = [5, 10, 10, 60][usize::try_from(sim::roll(4)).expect("below four")];
    Weather { lost_per_mille, most: Duration::from_millis(most), ..Weather::default() }
}

/// What kind of things go wrong. One kind per seed, for what one kind shows the others hide: where nodes crash all the time, no deposed
/// leader lives to be asked; where leaders change, log time stands still, and memory rests longer than it must.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Climate {
    /// A bit of everything.
    Mixed,
    /// Leaders are cut off from the others, and for a while nobody tells them.
    Deposed,
    /// The power of most machines, or of all, fails at once.
    Power,
    /// Something happens now and then.
    Calm,
}

impl Climate {
    /// The first thing that is drawn from a seed, so that a seed keeps it whatever else becomes of the world.
    pub(crate) fn drawn() -> Self {
        [Self::Mixed, Self::Deposed, Self::Power, Self::Calm][usize::try_from(sim::roll(4)).expect("below four")]
    }

    /// How long nothing goes wrong.
    fn pause(self) -> Duration {
        let (least, most) = match self {
            Self::Mixed => (100, 1_500),
            Self::Deposed => (500, 2_000),
            Self::Power => (500, 4_000),
            Self::Calm => (3_000, 9_000),
        };
        sim::between(Duration::from_millis(least), Duration::from_millis(most))
    }
}

/// Disturbs the world until `end`, and then mends it: every node up, every wire whole.
pub(crate) async fn disturb(world: &Rc<World>, climate: Climate, end: Instant) {
    while Instant::now() < end && !world.checks.is_broken() {
        sleep(climate.pause()).await;
        match climate {
            Climate::Mixed | Climate::Calm => {
                anything(world);
                if sim::chance(600) {
                    start_all(world, true).await;
                }
            }
            Climate::Deposed => depose(world).await,
            Climate::Power => power(world).await,
        }
    }
    sim::note(format_args!("the world is mended"));
    world.net.heal();
    world.net.set(Weather::default());
    *world.lost_per_mille.borrow_mut() = 0;
    start_all(world, false).await;
}

/// One thing of any kind.
fn anything(world: &World) {
    match sim::roll(12) {
        0 | 1 => cut_off(world, pick()),
        2 => {
            let (from, to) = (pick(), pick());
            sim::note(format_args!("nothing passes from {from} to {to}"));
            world.net.cut(from, to);
        }
        3 => {
            let node = pick();
            sim::note(format_args!("{node} is not heard"));
            others(node).for_each(|other| world.net.cut(node, other));
        }
        4..=6 => {
            sim::note(format_args!("wires are whole"));
            world.net.heal();
        }
        7 | 8 => {
            world.crash(pick());
        }
        9 if sim::chance(400) => {
            // The power of the whole room.
            World::ids().for_each(|node| world.crash(node));
        }
        10 => {
            let weather = weather();
            sim::note(format_args!("{weather:?}"));
            world.net.set(weather);
            *world.lost_per_mille.borrow_mut() = weather.lost_per_mille;
        }
        _ => {}
    }
}

fn cut_off(world: &World, node: RaftNodeId) {
    sim::note(format_args!("{node} is cut off"));
    for other in others(node) {
        world.net.cut(node, other);
        world.net.cut(other, node);
    }
}

/// The leader of some group is cut off from the others, not from clients, for long enough that another leads.
async fn depose(world: &World) {
    let group = usize::try_from(sim::roll(u64::from(SHARDS) + 1)).expect("few groups");
    cut_off(world, world.leader(group).unwrap_or_else(pick));
    sleep(sim::between(Duration::from_secs(1), Duration::from_secs(6))).await;
    sim::note(format_args!("wires are whole"));
    world.net.heal();
}

/// The power fails, of all machines or of all but one, and comes back soon.
async fn power(world: &Rc<World>) {
    let spared = sim::chance(500).then(pick);
    World::ids().filter(|node| Some(*node) != spared).for_each(|node| world.crash(node));
    sleep(sim::between(Duration::from_millis(10), Duration::from_secs(1))).await;
    start_all(world, false).await;
}

/// Starts what is down; `some`: only some of it.
async fn start_all(world: &Rc<World>, some: bool) {
    for node in World::ids().filter(|node| !world.is_up(*node)) {
        if some && sim::chance(300) {
            continue;
        }
        if let Err(why) = world.start(node).await {
            world.checks.broken(format!("{node} does not start again: {why}"));
        }
    }
}
