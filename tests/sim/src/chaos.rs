//! What goes wrong, and when: all of it drawn from the seed.

use crate::world::World;
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

/// Disturbs the world until `end`, and then mends it: every node up, every wire whole.
pub(crate) async fn disturb(world: &Rc<World>, end: Instant) {
    while Instant::now() < end && !world.checks.is_broken() {
        sleep(sim::between(Duration::from_millis(100), Duration::from_millis(1_500))).await;
        match sim::roll(12) {
            0 | 1 => {
                let node = pick();
                sim::note(format_args!("{node} is cut off"));
                for other in others(node) {
                    world.net.cut(node, other);
                    world.net.cut(other, node);
                }
            }
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
        if sim::chance(600) {
            start_all(world, true).await;
        }
    }
    sim::note(format_args!("the world is mended"));
    world.net.heal();
    world.net.set(Weather::default());
    *world.lost_per_mille.borrow_mut() = 0;
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
