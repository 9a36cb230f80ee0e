//! Extents go where they are needed: the directory's leader lends, shards' leaders give back.
//!
//! Both look at the replicas on their own node and do what [`quarry_meta_state::lending`] plans from them, so they need no messages of their own:
//! what a shard wants and what it gave back stands in its replicated state, and the next leader sees it. What is remembered here is only for
//! how long an extent has been empty, and which one is being emptied; a new leader begins that anew.

use crate::{
    core::{Core, HostedShard},
    door,
    hosted::{Hosted, OWN_PROPOSAL},
    metrics,
};
use futures::{
    future::{join_all, select_all},
    stream::{FuturesUnordered, StreamExt as _},
};
use parking_lot::Mutex;
use quarry_meta_state::{
    Directory, Shard,
    directory::{DirectoryCommand, DirectoryOutcome},
    lending::{Coming, Giving, Holdings, ahead, coming, giving, turn, wanted},
    shard::{DropRefusal, ShardCommand, ShardOutcome},
};
use quarry_proto::refusal::Refusal;
use quarry_raft::LogIndex;
use quarry_wire::ids::{ExtentId, LendNumber, NodeId, ShardId};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};
use tokio::time::{Instant, sleep, sleep_until};

/// Extents lent or taken back in one go.
const LENDINGS_AT_ONCE: usize = 64;
/// Between two looks of the directory's leader at shards that change all the time.
const LEND_PAUSE: Duration = Duration::from_millis(5);
/// The same for what shards give back.
const GIVE_PAUSE: Duration = Duration::from_millis(50);
/// A look at large shards takes time in which nothing is applied: the pause is at least so many times as long.
const PAUSE_TIMES: u32 = 20;
/// An extent is given to another shard only when it has been empty for so long: who was just lent it uses it first.
const EMPTY_FOR: Duration = Duration::from_secs(2);
/// An extent goes back by itself when it has been empty for so long.
const IDLE_FOR: Duration = Duration::from_secs(60);
/// A shard that was to empty an extent and could not looks for another one after so long.
const EMPTYING_MAX: Duration = Duration::from_secs(60);
/// A shard that is not the first to empty an extent for another one waits for each that comes before it.
const TURN: Duration = Duration::from_secs(3);
/// A shard that was to make an extent empty by moving values, and has not after so long, lets values go for somebody who found no place.
const COMPACTING_MAX: Duration = Duration::from_secs(10);
/// How long a grant waits for an extent before it looks again.
const LENT_WITHIN: Duration = Duration::from_secs(2);
/// How long a shard's own proposals about extents may take; others wait behind them.
const GIVE_WITHIN: Duration = Duration::from_secs(2);

/// An extent that nothing new is to be planned in.
#[derive(Clone, Copy)]
struct Aside {
    /// Until when that is tried.
    until: Instant,
    /// Whether it is for a shard that has less and found no place: own writers do not get it back, and no other one is emptied meanwhile.
    for_poorer: bool,
}

/// What a shard's leader knows about extents that it gives back.
#[derive(Default)]
pub(crate) struct Lending {
    /// Extents that are being emptied for other shards: nothing new goes there. It is taken while the shard's state is read, so the state is never
    /// read while it is held.
    aside: Mutex<BTreeMap<ExtentId, Aside>>,
    /// Nodes of which an extent is to be made empty for other shards by moving its values.
    compacting: Mutex<BTreeSet<NodeId>>,
    /// What the shard has, as of the last entry that was applied here when somebody looked.
    seen: Mutex<Option<(LogIndex, Holdings)>>,
}

impl Lending {
    /// Extents that nothing new is to be planned in.
    pub(crate) fn aside(&self) -> BTreeSet<ExtentId> {
        self.aside.lock().keys().copied().collect()
    }
    /// Nodes of which an extent is to be made empty for other shards by moving its values.
    pub(crate) fn compacting(&self) -> BTreeSet<NodeId> {
        self.compacting.lock().clone()
    }
    /// What the shard has now. Made anew when an entry was applied: many ask, and most shards are as they were.
    fn holdings(&self, hosted: &Hosted<Shard>) -> Holdings {
        let mut seen = self.seen.lock();
        hosted.group.with(|machine, at| match &*seen {
            Some((when, holdings)) if *when == at => holdings.clone(),
            _ => seen.insert((at, machine.state().holdings())).1.clone(),
        })
    }
    /// Lets nothing new into an extent that is being emptied.
    pub(crate) fn put_aside(&self, extent: ExtentId) {
        self.put(extent, false);
    }
    fn put(&self, extent: ExtentId, for_poorer: bool) {
        self.aside.lock().insert(extent, Aside { until: Instant::now() + EMPTYING_MAX, for_poorer });
    }
    /// Takes back for own writers what of `extents` is not for a poorer shard. Whether there was any.
    pub(crate) fn own_first(&self, extents: impl IntoIterator<Item = ExtentId>) -> bool {
        let mut aside = self.aside.lock();
        let yields = |extent: ExtentId| aside.get(&extent).is_some_and(|aside| !aside.for_poorer);
        let extents: Vec<ExtentId> = extents.into_iter().filter(|extent| yields(*extent)).collect();
        aside.retain(|extent, _| !extents.contains(extent));
        !extents.is_empty()
    }
    /// The extent is as good as any other again.
    pub(crate) fn take_back(&self, extent: ExtentId) {
        self.aside.lock().remove(&extent);
    }
}

/// What each shard has, as this node's replicas show it.
fn holdings(shards: &[HostedShard]) -> Vec<Holdings> {
    shards.iter().map(|shard| shard.lending.holdings(&shard.hosted)).collect()
}

/// Lends what is needed and takes back what was returned while this node leads the directory. Ends with the directory.
pub(crate) async fn lend(directory: Arc<Hosted<Directory>>, shards: Arc<[HostedShard]>) {
    let mut watch = directory.watch();
    let mut watches: Vec<_> = shards.iter().map(|shard| shard.hosted.watch()).collect();
    loop {
        watch.mark_unchanged();
        for watch in &mut watches {
            watch.mark_unchanged();
        }
        let mut looked = Duration::ZERO;
        if directory.leads().is_ok() {
            let mut commands = returned(&directory, &shards);
            let began = Instant::now();
            let holdings = holdings(&shards);
            commands.extend(directory.read(|directory| directory.plan_lending(&holdings, LENDINGS_AT_ONCE)));
            looked = began.elapsed();
            if !commands.is_empty() {
                if !all_taken(&directory, commands).await {
                    sleep(door::RETRY).await;
                }
                continue;
            }
        }
        let mut shard_changes: FuturesUnordered<_> = watches.iter_mut().map(|watch| watch.changed()).collect();
        tokio::select! {
            changed = watch.changed() => if changed.is_err() { return },
            Some(_) = shard_changes.next() => {}
        }
        sleep(LEND_PAUSE.max(looked * PAUSE_TIMES)).await;
    }
}

/// What shards gave back and the directory does not show yet.
fn returned(directory: &Hosted<Directory>, shards: &[HostedShard]) -> Vec<DirectoryCommand> {
    let mut commands = Vec::new();
    for shard in shards {
        let given: Vec<_> = shard.hosted.read(|state| state.returned().collect());
        directory.read(|directory| {
            for (extent, lend) in given {
                if directory.lent(extent) == Some((shard.id, lend)) {
                    commands.push(DirectoryCommand::Returned { extent, shard: shard.id, lend });
                }
            }
        });
    }
    commands.truncate(LENDINGS_AT_ONCE);
    commands
}

async fn all_taken(directory: &Hosted<Directory>, commands: Vec<DirectoryCommand>) -> bool {
    let deadline = Instant::now() + OWN_PROPOSAL;
    let outcomes = join_all(commands.into_iter().map(|command| directory.propose(command, deadline))).await;
    outcomes.into_iter().fold(true, |all, outcome| match outcome.map(|done| done.outcome) {
        Ok(DirectoryOutcome::Lend(Ok(_)) | DirectoryOutcome::Returned(Ok(()))) => all,
        Ok(other) => {
            tracing::debug!(outcome = ?other, "an extent was not lent or taken back");
            false
        }
        Err(refusal) => {
            tracing::debug!(%refusal, "an extent was not lent or taken back");
            false
        }
    })
}

/// An extent under one lending.
type Lent = (ExtentId, LendNumber);

/// What was seen at earlier looks.
#[derive(Default)]
struct Seen {
    /// Since when each extent is empty.
    empty: BTreeMap<(ShardId, Lent), Instant>,
    /// Since when a shard is asked to empty an extent of a node.
    asked: BTreeMap<(ShardId, NodeId), Instant>,
}

/// Gives back extents of the shards that this node leads: of dead regions, for other shards, and what nobody has used for long. Ends with the
/// directory.
/// `evicts`: whether an extent is emptied for a shard that is poorer.
pub(crate) async fn give(directory: Arc<Hosted<Directory>>, shards: Arc<[HostedShard]>, evicts: bool) {
    let mut watches: Vec<_> =
        std::iter::once(directory.watch()).chain(shards.iter().map(|shard| shard.hosted.watch())).collect();
    let mut seen = Seen::default();
    loop {
        for watch in &mut watches {
            watch.mark_unchanged();
        }
        let (next, looked) = give_back(&directory, &shards, evicts, &mut seen).await;
        {
            let changed = select_all(watches.iter_mut().map(|watch| Box::pin(watch.changed())));
            tokio::select! {
                (changed, at, _) = changed => if changed.is_err() && at == 0 { return },
                () = async { sleep_until(next.unwrap_or_else(Instant::now)).await }, if next.is_some() => {}
            }
        }
        sleep(GIVE_PAUSE.max(looked * PAUSE_TIMES)).await;
    }
}

/// One look at all shards that are led here. Answers when to look again though nothing changes, and how long the look took.
async fn give_back(
    directory: &Hosted<Directory>,
    shards: &[HostedShard],
    evicts: bool,
    since: &mut Seen,
) -> (Option<Instant>, Duration) {
    let Seen { empty, asked } = since;
    if shards.iter().all(|shard| shard.hosted.leads().is_err()) {
        empty.clear();
        asked.clear();
        return (None, Duration::ZERO);
    }
    let now = Instant::now();
    let all = holdings(shards);
    let (lendable, in_transit) = directory.read(|directory| (directory.unlent(), directory.in_transit(&all)));
    let mut spares: BTreeMap<NodeId, u32> = BTreeMap::new();
    let mut next: Option<Instant> = None;
    let mut look_at = |at: Instant| next = Some(next.map_or(at, |next| next.min(at)));
    let (mut seen, mut still_asked) = (BTreeSet::new(), BTreeSet::new());
    let mut work = Vec::new();
    for (shard, own) in shards.iter().zip(&all) {
        if shard.hosted.leads().is_err() {
            shard.lending.aside.lock().clear();
            shard.lending.compacting.lock().clear();
            continue;
        }
        let (idle, dead): (Vec<Lent>, Vec<Lent>) =
            shard.hosted.read(|state| (state.idle_extents().collect(), state.dead_extents().collect()));
        let mut drops = dead.clone();
        // Not under the lock: who waits for a place takes it while it reads the state.
        let aside = shard.lending.aside();
        let gone: BTreeSet<ExtentId> =
            shard.hosted.read(|state| aside.into_iter().filter(|extent| state.held(*extent).is_none()).collect());
        shard.lending.aside.lock().retain(|extent, aside| now < aside.until && !gone.contains(extent));
        let mut by_node: BTreeMap<NodeId, Vec<(Instant, Lent)>> = BTreeMap::new();
        for lent in idle.into_iter().filter(|lent| !dead.contains(lent)) {
            seen.insert((shard.id, lent));
            let since = *empty.entry((shard.id, lent)).or_insert(now);
            by_node.entry(lent.0.region.node).or_default().push((since, lent));
        }
        let (mut emptied, mut compacting) = (Vec::new(), BTreeSet::new());
        for (node, held) in own.nodes.iter() {
            let mut idle = by_node.remove(node).unwrap_or_default();
            // Those that were to be emptied first, then those that were empty for longest.
            let is_aside = |lent: &Lent| shard.lending.aside.lock().contains_key(&lent.0);
            idle.sort_by_key(|(since, lent)| (!is_aside(lent), *since));
            let first = idle.first().copied();
            let mut empty_after = |wait: Duration| {
                still_asked.insert((shard.id, *node));
                let due = *asked.entry((shard.id, *node)).or_insert(now) + wait + TURN * turn(own, &all, *node);
                if due <= now { emptied.push((*node, wanted(own, &all, *node))) } else { look_at(due) }
            };
            let is_large = |lent: &Lent, least: u64| {
                shard.hosted.read(|state| state.bytes_of(lent.0).is_some_and(|bytes| bytes >= least))
            };
            match giving(own, &all, *node, lendable.get(node).copied()) {
                Giving::Loose { least, at_once } => match idle.into_iter().find(|(_, lent)| is_large(lent, least)) {
                    Some((since, lent)) => {
                        let ripe = if at_once || is_aside(&lent) { now } else { since + EMPTY_FOR };
                        if at_once {
                            // Else whoever is rich takes it again before it is gone.
                            shard.lending.put(lent.0, true);
                        }
                        if ripe <= now { drops.push(lent) } else { look_at(ripe) }
                    }
                    None => set_aside(shard, *node, least),
                },
                Giving::Compacted { or_emptied } => {
                    compacting.insert(*node);
                    if or_emptied && evicts {
                        empty_after(COMPACTING_MAX);
                    }
                }
                // What is on its way may be what is missed, and others may have something empty in a moment.
                Giving::Emptied if evicts => empty_after(if in_transit.contains_key(node) { 2 * TURN } else { TURN }),
                Giving::Emptied => {}
                Giving::Keep => {
                    shard.lending.aside.lock().retain(|extent, _| extent.region.node != *node);
                    let mut has_many =
                        || held.extents > *spares.entry(*node).or_insert_with(|| spare(directory, *node));
                    if let Some((since, lent)) = first.filter(|_| held.can_spare() && has_many()) {
                        if since + IDLE_FOR <= now { drops.push(lent) } else { look_at(since + IDLE_FOR) }
                    }
                }
            }
        }
        *shard.lending.compacting.lock() = compacting;
        if !drops.is_empty() || !emptied.is_empty() {
            look_at(now + EMPTY_FOR);
            work.push(carry_out(shard, drops, emptied));
        }
    }
    empty.retain(|lent, _| seen.contains(lent));
    asked.retain(|it, _| still_asked.contains(it));
    let looked = now.elapsed();
    join_all(work).await;
    (next, looked)
}

/// Lets nothing new into an extent of `node` of at least so many bytes whose last slots rest, unless one is aside already.
fn set_aside(shard: &HostedShard, node: NodeId, least: u64) {
    let aside = shard.lending.aside();
    let loose = shard.hosted.read(|state| {
        let is_one = |extent: &ExtentId| {
            extent.region.node == node && state.bytes_of(*extent).is_some_and(|bytes| bytes >= least)
        };
        let is_aside = aside.iter().any(is_one);
        state.loose_extents().find(|extent| !is_aside && is_one(extent))
    });
    if let Some(extent) = loose {
        shard.lending.put_aside(extent);
    }
}

/// Extents of `node` that a shard keeps though it does not use them: what it would be lent ahead of need, and one.
fn spare(directory: &Hosted<Directory>, node: NodeId) -> u32 {
    let (total, shards) = directory.read(|directory| {
        let own = directory.extents().filter(|(extent, ..)| extent.region.node == node).count();
        (u32::try_from(own).unwrap_or(u32::MAX), directory.shards())
    });
    ahead(total, shards).max(1)
}

async fn carry_out(shard: &HostedShard, drops: Vec<Lent>, emptied: Vec<(NodeId, u64)>) {
    for (node, least) in emptied {
        empty_one(shard, node, least).await;
    }
    let deadline = Instant::now() + GIVE_WITHIN;
    let drop = |(extent, lend)| shard.hosted.propose(ShardCommand::DropExtent { extent, lend }, deadline);
    for done in join_all(drops.into_iter().map(drop)).await {
        match done.map(|done| done.outcome) {
            Ok(ShardOutcome::DropExtent(Ok(()))) => metrics::given_back(shard.id),
            Ok(other) => {
                // Somebody took it in between: it is as good as any other again.
                if let ShardOutcome::DropExtent(Err(DropRefusal::InUse { extent, .. })) = &other {
                    shard.lending.take_back(*extent);
                }
                tracing::debug!(shard = shard.id.0, outcome = ?other, "an extent stays");
            }
            Err(refusal) => tracing::debug!(shard = shard.id.0, %refusal, "an extent stays"),
        }
    }
}

/// Begins to empty the extent of `node` that was used least recently of those with so many bytes, unless one is being emptied.
async fn empty_one(shard: &HostedShard, node: NodeId, least: u64) {
    let goes_already = |(extent, aside): (&ExtentId, &Aside)| extent.region.node == node && aside.for_poorer;
    let is_under_way = shard.lending.aside.lock().iter().any(goes_already);
    if is_under_way {
        return;
    }
    let uses = &shard.eviction.uses;
    let victims = shard.hosted.read(|state| state.victims_of_an_extent(node, least, |slab| uses.last(slab)));
    let Some((extent, victims)) = victims else {
        return;
    };
    // Before anything goes, so that nobody takes what becomes free of it.
    shard.lending.put(extent, true);
    tracing::debug!(shard = shard.id.0, %extent, slabs = victims.len(), "emptied for another shard");
    crate::eviction::evict(shard, victims).await;
}

/// What `shard` will have without a value going, by node, as soon as it needs it: what other shards give, and what is on its way from one to
/// another. With the extents that it has there.
pub(crate) fn awaited(core: &Core, shard: &HostedShard) -> BTreeMap<NodeId, (Coming, u32)> {
    let all = holdings(&core.shards);
    awaited_by(shard.id, &all, &core.lent_to().in_transit(&all))
}

/// The same, of what all shards have and of the largest extents that are on their way.
fn awaited_by(shard: ShardId, all: &[Holdings], in_transit: &BTreeMap<NodeId, u64>) -> BTreeMap<NodeId, (Coming, u32)> {
    let Some(own) = all.iter().find(|it| it.shard == shard) else { return BTreeMap::new() };
    let nodes: BTreeSet<NodeId> = all.iter().flat_map(|it| it.nodes.keys()).chain(in_transit.keys()).copied().collect();
    let has = |node: &NodeId| own.nodes.get(node).map_or(0, |held| held.extents);
    let comes = |node: NodeId| coming(own, all, node).max(in_transit.get(&node).copied().map(Coming::Loose));
    nodes.into_iter().filter_map(|node| Some((node, (comes(node)?, has(&node))))).collect()
}

/// Nodes with memory that could come to `shard` from others, for a slot of `bytes`: it is not the end if there is none now.
pub(crate) fn may_come(core: &Core, shard: &HostedShard, nodes: &BTreeSet<NodeId>) -> bool {
    if nodes.is_empty() {
        return false;
    }
    let all = holdings(&core.shards);
    let evicts = core.config.eviction.low > 0;
    let Some(own) = all.iter().find(|it| it.shard == shard.id) else { return false };
    let has = |it: &Holdings, node: &NodeId| it.nodes.get(node).copied().unwrap_or_default();
    nodes.iter().any(|node| {
        let others = all.iter().filter(|other| other.shard != shard.id).map(|other| (other, has(other, node)));
        coming(own, &all, *node).is_some()
            || others.into_iter().any(|(other, held)| {
                held.loose > 0 || held.extents > 0 && other.has_grants || evicts && held.is_richer(&has(own, node))
            })
    })
}

/// Has the shard want an extent of each of these nodes for a slot of `bytes`.
///
/// # Errors
/// [`Refusal`]: this node leads no more, or cannot propose.
pub(crate) async fn want(
    shard: &HostedShard,
    nodes: &BTreeSet<NodeId>,
    bytes: u64,
    deadline: Instant,
) -> Result<(), Refusal> {
    let aside = shard.lending.aside();
    let nodes: Vec<NodeId> = shard.hosted.read(|state| {
        let lacks = |node: NodeId| !state.wants(node, bytes) && !state.has_place_on(node, bytes, &aside);
        nodes.iter().copied().filter(|node| lacks(*node)).collect()
    });
    if nodes.is_empty() {
        return Ok(());
    }
    let deadline = deadline.min(Instant::now() + GIVE_WITHIN);
    shard.hosted.propose(ShardCommand::Want { nodes, bytes }, deadline).await.map(|_| ())
}

/// Waits until there is a place on one of these nodes, of which an extent is wanted; false if there was none for a while.
pub(crate) async fn lent(shard: &HostedShard, nodes: &BTreeSet<NodeId>, bytes: u64, deadline: Instant) -> bool {
    let deadline = deadline.min(Instant::now() + LENT_WITHIN);
    let has_place = |state: &Shard| {
        let aside = shard.lending.aside();
        nodes.iter().any(|node| state.has_place_on(*node, bytes, &aside))
    };
    !nodes.is_empty() && shard.hosted.wait_for(deadline, has_place).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_meta_state::lending::Held;
    use quarry_wire::ids::{ExtentIndex, Generation, RegionId, RegionIndex};

    fn extent(node: u64, index: u32) -> ExtentId {
        let region = RegionId { node: NodeId(node), index: RegionIndex(0) };
        ExtentId { region, index: ExtentIndex(index) }
    }

    #[test]
    fn own_writers_take_back_what_is_aside_for_who_is_short_and_not_what_is_for_who_found_no_place() {
        let lending = Lending::default();
        let (short, poorer, other) = (extent(1, 0), extent(1, 1), extent(2, 0));
        lending.put_aside(short);
        lending.put(poorer, true);
        assert_eq!(lending.aside(), [short, poorer].into(), "nothing new goes to either");
        assert!(!lending.own_first([other]), "nothing there was aside");
        assert_eq!(lending.aside(), [short, poorer].into());
        assert!(lending.own_first([short, poorer, other]));
        assert_eq!(lending.aside(), [poorer].into());
        assert!(!lending.own_first([poorer]), "there is nothing to plan again with");
        lending.take_back(poorer);
        assert_eq!(lending.aside(), BTreeSet::new());
    }

    #[test]
    fn what_is_on_its_way_to_whomever_is_awaited_like_what_others_have_empty() {
        let node = |id| NodeId(id);
        let held = |extents: u32, room, loose| Held {
            extents,
            bytes: u64::from(extents) * 100,
            room,
            loose,
            loose_largest: 100,
            largest: 100,
            wanted: None,
        };
        let with = |shard, nodes: &[(u64, Held)]| Holdings {
            shard: ShardId(shard),
            generation: Generation(1),
            nodes: Arc::new(nodes.iter().map(|(id, held)| (node(*id), *held)).collect()),
            has_grants: true,
            is_written: true,
        };
        let full = held(2, 0, 0);
        let all = [
            with(1, &[(1, full), (2, full), (3, full)]),
            with(2, &[(1, held(3, 300, 3)), (2, full), (3, held(9, 500, 0))]),
        ];
        let in_transit = BTreeMap::from([(node(2), 64), (node(3), 64), (node(4), 32)]);
        let awaited = awaited_by(ShardId(1), &all, &in_transit);
        let expected = [
            (node(1), (Coming::Loose(100), 2)),
            (node(2), (Coming::Loose(64), 2)),
            // Sooner than what has to be moved first.
            (node(3), (Coming::Loose(64), 2)),
            (node(4), (Coming::Loose(32), 0)),
        ];
        assert_eq!(awaited, expected.into());
        assert_eq!(awaited_by(ShardId(1), &all, &BTreeMap::new()).get(&node(2)), None, "nobody has anything there");
        assert_eq!(awaited_by(ShardId(7), &all, &in_transit), BTreeMap::new());
    }
}
