//! Eviction: keeps room on every data node, by letting the cache slabs go that nobody has read for longest.
//!
//! Decides when: a task per shard, idle unless this node leads it. It looks whenever the shard changed, and at once when somebody found no room.
//! Which slabs go is decided by [`Shard::victims`], from what this leader remembers of leases; apply validates them. What is remembered is in
//! the memory of the leader alone: a new leader takes every slab for last leased when it took office, so that nothing is evicted for want of
//! knowledge that an older one had, only in another order.
//!
//! Nothing goes as long as memory comes without that: what is lent to nobody, or what other shards have empty or can make empty by moving values
//! ([`lending::awaited`]). It is waited for, but not for ever: a shard that does not give what it could must not keep another from going on.
//! And nothing goes for room ahead of need in a shard that nobody writes to, if there are others; nor within a quota that was not used up lately.
//!
//! Giving a descriptor with a lease is use, by Resolve or Pin. Existence probes, lists and `stale` reads are none.
//!
//! Of a slab that was used lately and is to go all the same, because all others were used later, the values that were leased lately are moved to
//! another slab first, if they are the lesser part of it, and if nobody waits for room.

use crate::{
    core::{Core, HostedShard},
    door,
    hosted::OWN_PROPOSAL,
    lending, metrics, moves,
    recent::Recent,
};
use parking_lot::{Mutex, RwLock};
use quarry_meta_state::{
    Shard,
    lending::Coming,
    shard::{Lack, Need, ShardCommand, ShardOutcome, ValuePlace, Victim},
};
use quarry_raft::Term;
use quarry_wire::{
    ids::{GrantId, NamespaceId, NodeId, Ordinal},
    limits::{COMMAND_BYTES_MAX, LEASE_MAX, QUARANTINE},
    units::{LogTime, SlotSize},
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};

/// Between two looks at a shard that changes all the time.
const PAUSE: Duration = Duration::from_millis(20);
/// A look at a large shard takes milliseconds in which nothing is applied: the pause is at least so many times as long.
const PAUSE_TIMES: u32 = 20;
/// Slabs that are gone are forgotten this often.
const TIDY: Duration = Duration::from_secs(60);
/// Victims of one command.
const VICTIMS_MAX: usize = 256;
/// Slots of the victims of one command: an entry is applied in a few milliseconds.
const SLOTS_MAX: u32 = 16_384;
/// A value that was leased within this time is likely to be read again.
const LATELY: Duration = Duration::from_secs(2 * LEASE_MAX.as_secs());
/// Bytes of slots that are moved before slabs go, and how long that may take.
const MOVED_FIRST_BYTES: u64 = 4 << 20;
const MOVED_FIRST_WITHIN: Duration = Duration::from_secs(1);
/// How long after somebody found no place for a slot room is kept in pieces of its size; and how long after a namespace had used up its quota some
/// of that is kept free.
const WANTED_FOR: Duration = Duration::from_secs(60);
/// How long an extent of another shard is waited for that is empty, or will be once it has rested.
const LOOSE_WITHIN: Duration = Duration::from_secs(15);
/// How long an extent of another shard is waited for that is made empty by moving values.
const COMPACTED_WITHIN: Duration = Duration::from_secs(5);
/// Parts of the memory of uses, so that callers seldom meet.
const PARTS: usize = 16;

// Whoever has an extent empty gives it when all of it has rested.
const _: () = assert!(LOOSE_WITHIN.as_secs() > LEASE_MAX.as_secs() + QUARANTINE.as_secs());
// A victim is named in less than 32 bytes.
const _: () = assert!(VICTIMS_MAX * 32 <= COMMAND_BYTES_MAX / 2);

/// What a leader knows about eviction in one shard.
#[derive(Default)]
pub(crate) struct Eviction {
    pub(crate) uses: Uses,
    lacks: Mutex<Lacks>,
    wake: Notify,
}

/// Who found no room since the last look.
#[derive(Default)]
struct Lacks {
    /// No place for a slot.
    memory: BTreeSet<Lack>,
    /// Not enough left of a quota.
    quota: BTreeSet<Lack>,
}

impl Eviction {
    /// Somebody found no place for this.
    pub(crate) fn lacks_memory(&self, lack: Lack) {
        self.lacks.lock().memory.insert(lack);
        self.wake.notify_one();
    }

    /// Somebody found the quota used up for this, and values of the namespace can make room in it.
    pub(crate) fn lacks_quota(&self, lack: Lack) {
        self.lacks.lock().quota.insert(lack);
        self.wake.notify_one();
    }
}

/// When a descriptor of a slab was last given with a lease, by slab.
#[derive(Default)]
pub(crate) struct Uses {
    /// Which values were leased lately.
    pub(crate) values: Recent,
    parts: [RwLock<HashMap<Ordinal, AtomicU64>>; PARTS],
}

impl Uses {
    fn part(&self, slab: Ordinal) -> &RwLock<HashMap<Ordinal, AtomicU64>> {
        &self.parts[usize::try_from(slab.number % PARTS as u64).expect("less than the parts")]
    }

    /// A descriptor of this slab is given with a lease at `at`. Called once per slab and reply: one lock that nobody waits for, one store.
    pub(crate) fn touch(&self, slab: Ordinal, at: LogTime) {
        let part = self.part(slab);
        if let Some(last) = part.read().get(&slab) {
            last.fetch_max(at.0, Ordering::Relaxed);
            return;
        }
        part.write().entry(slab).or_default().fetch_max(at.0, Ordering::Relaxed);
    }

    /// When it was last touched; the beginning of time if it was not.
    pub(crate) fn last(&self, slab: Ordinal) -> LogTime {
        self.part(slab).read().get(&slab).map_or(LogTime(0), |last| LogTime(last.load(Ordering::Relaxed)))
    }

    fn keep(&self, is_there: impl Fn(Ordinal) -> bool) {
        for part in &self.parts {
            part.write().retain(|slab, _| is_there(*slab));
        }
    }
}

/// Since when other shards are waited for at each node, with the extents that there were.
#[derive(Default)]
struct Waits(BTreeMap<NodeId, (Instant, u32)>);

impl Waits {
    /// Nothing is lacking any more. What did not come in its time is not waited for again until an extent comes, or a while has passed.
    fn end(&mut self, now: Instant) {
        self.0.retain(|_, (since, _)| *since + LOOSE_WITHIN <= now && now < *since + WANTED_FOR);
    }

    /// Of what comes, what is to be waited for still, with the bytes of the extent that comes.
    fn look(&mut self, coming: &BTreeMap<NodeId, (Coming, u32)>, now: Instant) -> BTreeMap<NodeId, u64> {
        self.0.retain(|node, _| coming.contains_key(node));
        let waited = coming.iter().filter_map(|(node, (comes, extents))| {
            let (since, had) = self.0.entry(*node).or_insert((now, *extents));
            if *had != *extents {
                (*since, *had) = (now, *extents);
            }
            let (bytes, within) = match *comes {
                Coming::Loose(bytes) => (bytes, LOOSE_WITHIN),
                Coming::Compacted(bytes) => (bytes, COMPACTED_WITHIN),
            };
            (now < *since + within).then_some((*node, bytes))
        });
        waited.collect()
    }
}

/// What somebody lacked lately, and until when that counts.
#[derive(Default)]
struct Lately {
    /// The largest slot that found no place.
    wanted: Option<(SlotSize, Instant)>,
    /// Namespaces that had used up their quota.
    pressed: BTreeMap<NamespaceId, Instant>,
}

impl Lately {
    fn note(&mut self, lacks: &Lacks, now: Instant) {
        let until = now + WANTED_FOR;
        self.wanted = self.wanted.filter(|(_, until)| now < *until);
        self.pressed.retain(|_, until| now < *until);
        self.pressed.extend(lacks.quota.iter().map(|lack| (lack.namespace, until)));
        if let Some(size) = lacks.memory.iter().map(|lack| lack.slot_size).max() {
            let largest = self.wanted.map_or(size, |(wanted, _)| wanted.max(size));
            self.wanted = Some((largest, until));
        }
    }
}

/// The term in which this node leads, and when it began to.
#[derive(Clone, Copy)]
struct Office {
    term: Term,
    since: LogTime,
}

/// Makes room in one shard while this node leads it. Ends with the group.
pub(crate) async fn run(core: Arc<Core>, index: usize) {
    let shard = &core.shards[index];
    let mut watch = shard.hosted.watch();
    let mut office: Option<Office> = None;
    let mut tidy_at = Instant::now() + TIDY;
    let mut lately = Lately::default();
    let mut waits = Waits::default();
    loop {
        tokio::select! {
            () = shard.eviction.wake.notified() => {}
            changed = watch.changed() => if changed.is_err() { return },
        }
        let Ok(term) = shard.hosted.leads() else {
            // Whoever lacks something asks the new leader.
            *shard.eviction.lacks.lock() = Lacks::default();
            office = None;
            continue;
        };
        let now = shard.hosted.running().unwrap_or(LogTime(0));
        let since = office.filter(|office| office.term == term).map_or(now, |office| office.since);
        office = Some(Office { term, since });
        let lacks = mem::take(&mut *shard.eviction.lacks.lock());
        lately.note(&lacks, Instant::now());
        let lacks = &lacks.memory | &lacks.quota;
        let looked = make_room(&core, shard, &lacks, &lately, since, &mut waits).await;
        if tidy_at <= Instant::now() {
            shard.hosted.read(|state| shard.eviction.uses.keep(|slab| state.has_slab(slab)));
            tidy_at = Instant::now() + TIDY;
        }
        sleep(PAUSE.max(looked * PAUSE_TIMES)).await;
    }
}

/// Lets slabs go if there is too little room. Answers how long it took to see which.
async fn make_room(
    core: &Core,
    shard: &HostedShard,
    lacks: &BTreeSet<Lack>,
    lately: &Lately,
    since: LogTime,
    waits: &mut Waits,
) -> Duration {
    let (marks, lendable) = (core.config.eviction, core.lendable());
    let began = Instant::now();
    // It may walk over all slots: entries do not wait for that.
    let state: Shard = shard.hosted.frozen();
    let wanted = lately.wanted.map(|(size, _)| size);
    let pressed = lately.pressed.keys().copied().collect();
    let look = |coming: &BTreeMap<NodeId, u64>| {
        victims(&state, &shard.eviction.uses, Need { marks, lacks, wanted, pressed: &pressed, coming }, since)
    };
    let mut victims = look(&lendable);
    if victims.is_empty() {
        waits.end(began);
        return began.elapsed();
    }
    let mut awaited = lending::awaited(core, shard);
    if lacks.is_empty() && wanted.is_none() {
        let own = state.holdings();
        awaited.retain(|node, _| own.needs(*node));
    }
    let mut coming = waits.look(&awaited, began);
    if !coming.is_empty() {
        for (node, largest) in &*lendable {
            let most = coming.entry(*node).or_default();
            *most = (*most).max(*largest);
        }
        victims = look(&coming);
    }
    let looked = began.elapsed();
    if lacks.is_empty() && !victims.is_empty() {
        save_leased(core, shard, &victims).await;
    }
    for batch in batches(&victims) {
        if !evict(shard, batch).await {
            sleep(door::RETRY).await;
            break;
        }
    }
    looked
}

/// Lets these slabs go. False if that could not be proposed.
pub(crate) async fn evict(shard: &HostedShard, victims: Vec<GrantId>) -> bool {
    for victims in victims.chunks(VICTIMS_MAX) {
        let command = ShardCommand::Evict { victims: victims.to_vec() };
        match shard.hosted.propose(command, Instant::now() + OWN_PROPOSAL).await.map(|done| done.outcome) {
            Ok(ShardOutcome::Evict(outcomes)) => {
                for outcome in outcomes {
                    match outcome {
                        Ok(evicted) => metrics::evicted(shard.id, evicted),
                        // Something applied in between changed it; the next look sees that.
                        Err(refusal) => tracing::debug!(shard = shard.id.0, %refusal, "a slab stays"),
                    }
                }
            }
            Ok(other) => tracing::warn!(shard = shard.id.0, outcome = ?other, "nothing was evicted"),
            Err(refusal) => {
                tracing::debug!(shard = shard.id.0, %refusal, "nothing was evicted");
                return false;
            }
        }
    }
    true
}

/// Moves values that were leased lately out of slabs that are to go.
async fn save_leased(core: &Core, shard: &HostedShard, victims: &[Victim]) {
    let Ok(now) = shard.hosted.running() else { return };
    let values = shard.hosted.read(|state| leased_lately(state, &shard.eviction.uses.values, victims, now));
    if values.is_empty() {
        return;
    }
    let until = Instant::now() + MOVED_FIRST_WITHIN;
    match moves::move_values(core, shard, values, &BTreeSet::new(), MOVED_FIRST_BYTES, until).await {
        Ok(moved) => tracing::debug!(shard = shard.id.0, values = moved.values, "moved out of slabs that go"),
        Err(refusal) => tracing::debug!(shard = shard.id.0, %refusal, "nothing is moved out of slabs that go"),
    }
}

/// The values of these slabs that were leased lately, if they are at most half of their slab: a slab that is read as a whole is no better off
/// elsewhere.
fn leased_lately(state: &Shard, values: &Recent, victims: &[Victim], now: LogTime) -> Vec<ValuePlace> {
    let lately = victims.iter().filter(|victim| victim.last_used.after(LATELY) > now);
    let leased = lately.map(|victim| {
        let all = state.places_in(victim.grant);
        let is_leased = |place: &ValuePlace| values.was_leased(place.grant, place.slot, now, LATELY);
        let leased: Vec<ValuePlace> = all.iter().copied().filter(is_leased).collect();
        if leased.len() * 2 <= all.len() { leased } else { Vec::new() }
    });
    leased.flatten().collect()
}

/// The slabs that are to go, least recently used first.
fn victims(state: &Shard, uses: &Uses, need: Need<'_>, since: LogTime) -> Vec<Victim> {
    if need.marks.low == 0 {
        return Vec::new();
    }
    state.victims(need, |slab| uses.last(slab).max(since))
}

/// Cut so that no command is large nor takes long to apply.
fn batches(victims: &[Victim]) -> Vec<Vec<GrantId>> {
    let mut batches: Vec<Vec<GrantId>> = Vec::new();
    let mut slots = u32::MAX;
    for victim in victims {
        slots = slots.saturating_add(victim.slots);
        match batches.last_mut().filter(|batch| slots <= SLOTS_MAX && batch.len() < VICTIMS_MAX) {
            Some(batch) => batch.push(victim.grant),
            None => {
                slots = victim.slots;
                batches.push(vec![victim.grant]);
            }
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_wire::ids::{Generation, ShardId};

    fn slab(number: u64) -> Ordinal {
        Ordinal { generation: Generation(1), number }
    }

    fn victim(number: u64, slots: u32) -> Victim {
        Victim { grant: GrantId { shard: ShardId(1), sequence: slab(number) }, last_used: LogTime(0), slots, bytes: 1 }
    }

    #[test]
    fn the_last_use_of_a_slab_never_goes_back() {
        let uses = Uses::default();
        assert_eq!(uses.last(slab(5)), LogTime(0));
        for at in [7, 3, 9, 8] {
            uses.touch(slab(5), LogTime(at));
            uses.touch(slab(5 + PARTS as u64), LogTime(1));
        }
        assert_eq!((uses.last(slab(5)), uses.last(slab(5 + PARTS as u64))), (LogTime(9), LogTime(1)));
        uses.keep(|kept| kept != slab(5));
        assert_eq!((uses.last(slab(5)), uses.last(slab(5 + PARTS as u64))), (LogTime(0), LogTime(1)));
    }

    #[test]
    fn what_comes_is_waited_for_as_long_as_it_may_take_and_anew_when_an_extent_came() {
        let (node, other, began) = (NodeId(1), NodeId(2), Instant::now());
        let comes = |coming: Coming, extents: u32| BTreeMap::from([(node, (coming, extents))]);
        let (loose, moved) = (comes(Coming::Loose(64), 2), comes(Coming::Compacted(64), 2));
        let (waited, over) = (BTreeMap::from([(node, 64)]), BTreeMap::new());
        let instant = Duration::from_millis(1);
        let mut waits = Waits::default();
        assert_eq!(waits.look(&loose, began), waited);
        assert_eq!(waits.look(&loose, began + LOOSE_WITHIN - instant), waited);
        assert_eq!(waits.look(&moved, began + COMPACTED_WITHIN), over, "nobody moves anything");
        assert_eq!(waits.look(&loose, began + LOOSE_WITHIN), over, "nobody gives anything");
        // The next one is waited for, though the first did not come.
        let more = comes(Coming::Loose(64), 3);
        let came = began + LOOSE_WITHIN * 2;
        assert_eq!(waits.look(&more, came), waited);
        // There was room before the time was over: the next lack is waited for from its own beginning.
        waits.end(came + instant);
        let again = came + LOOSE_WITHIN;
        assert_eq!(waits.look(&more, again), waited);
        assert_eq!(waits.look(&more, again + LOOSE_WITHIN), over);
        // What did not come in its time is not waited for by the next one either, for a while.
        waits.end(again + LOOSE_WITHIN);
        assert_eq!(waits.look(&more, again + LOOSE_WITHIN + instant), over);
        waits.end(again + WANTED_FOR);
        assert_eq!(waits.look(&more, again + WANTED_FOR), waited);
        let elsewhere = BTreeMap::from([(other, (Coming::Loose(32), 0))]);
        assert_eq!(waits.look(&elsewhere, again + WANTED_FOR), BTreeMap::from([(other, 32)]));
    }

    #[test]
    fn victims_are_cut_into_commands_that_are_small_and_quick() {
        assert!(batches(&[]).is_empty());
        let small: Vec<Victim> = (0..600).map(|number| victim(number, 1)).collect();
        assert_eq!(batches(&small).iter().map(Vec::len).collect::<Vec<_>>(), [256, 256, 88]);
        let large: Vec<Victim> = (0..9).map(|number| victim(number, 8_192)).collect();
        assert_eq!(batches(&large).iter().map(Vec::len).collect::<Vec<_>>(), [2, 2, 2, 2, 1]);
        assert_eq!(batches(&[victim(1, u32::MAX), victim(2, 1)]).len(), 2);
        let named: Vec<GrantId> = batches(&small).concat();
        assert!(named.iter().zip(&small).all(|(named, victim)| *named == victim.grant), "in their order");
    }
}
