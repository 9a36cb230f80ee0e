//! Writers and readers: they ask, ask again until they are answered, and write down what they were told.

use crate::{
    history::{Answered, Asked, Operation},
    run::Mutant,
    world::{Failed, SHARDS, World},
};
use quarry_meta::sim::{Done, SimMeta};
use quarry_meta_state::{
    RequestId,
    shard::{
        Attested, CommitEntry, CommitOutcome, CommitRefusal, Covers, DeleteKey, DeleteRefusal, GrantRequest, Mode,
        Publish, ShardCommand, ShardOutcome,
    },
};
use quarry_proto::refusal::Refusal;
use quarry_raft::{RaftNodeId, sim};
use quarry_wire::{
    frame::FrameKind,
    grant::Grant,
    ids::{CertificateSerial, NamespaceId, RegionId, ShardId, SlotIndex, WriterId},
    key::Key,
    limits::LEASE_MAX,
    signed::Signature,
    units::{LogTime, SlotCount, SlotSize},
    version::{HybridClock, Version},
};
use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    ops::Range,
    rc::Rc,
    sync::Arc,
    time::Duration,
};
use tokio::time::{Instant, sleep};

/// The namespace of everything that is written.
pub(crate) const NAMESPACE: NamespaceId = NamespaceId(1);
/// How many keys are written and read.
const KEYS: u64 = 6;
/// So large that a slab is a whole extent: memory is scarce, and used again as soon as it may be.
const SLOT_SIZE: SlotSize = SlotSize(16_384);
const SLOTS: SlotCount = SlotCount(4);
/// How long a client asks before it gives up.
const STUBBORN: Duration = Duration::from_secs(8);
/// 2026, so that versions look like versions.
const WALL_MS: u64 = 1_790_000_000_000;

pub(crate) fn key(number: u64) -> Key {
    Key::new(format!("key-{number}")).expect("a short key")
}

/// What clients were told.
#[derive(Default)]
pub(crate) struct Told {
    order: Cell<u64>,
    pub(crate) operations: RefCell<BTreeMap<u64, Vec<Operation>>>,
    /// Commits with their acknowledged outcomes.
    pub(crate) commits: RefCell<Vec<(ShardId, Publish, CommitOutcome)>>,
    pub(crate) grants: RefCell<Vec<Grant>>,
    pub(crate) stop: Cell<bool>,
}

impl Told {
    fn next(&self) -> u64 {
        self.order.set(self.order.get() + 1);
        self.order.get()
    }

    fn record(&self, key: u64, operation: Operation) {
        sim::note(format_args!("key {key}: {:?} {:?}", operation.asked, operation.answered));
        self.operations.borrow_mut().entry(key).or_default().push(operation);
    }
}

/// A slab that is being filled.
struct Slab {
    grant: Grant,
    used: u32,
    until: Instant,
}

pub(crate) struct Client {
    world: Rc<World>,
    told: Rc<Told>,
    /// Hardly ever writes: so it stays with a leader that nobody else believes in any more.
    reader: bool,
    writer: WriterId,
    clock: HybridClock,
    leaders: BTreeMap<ShardId, RaftNodeId>,
    stamps: BTreeMap<ShardId, LogTime>,
    slabs: BTreeMap<ShardId, Slab>,
    /// The last version seen of each key.
    seen: BTreeMap<u64, Version>,
}

fn any_node() -> RaftNodeId {
    RaftNodeId(1 + sim::roll(crate::world::NODES))
}

/// A copy as a reader is told of it.
type Place = (RegionId, Range<u64>);

impl Client {
    pub(crate) fn new(number: u8, world: &Rc<World>, told: &Rc<Told>) -> Self {
        Self {
            world: Rc::clone(world),
            told: Rc::clone(told),
            reader: number.is_multiple_of(2),
            writer: WriterId([number; 16]),
            clock: HybridClock::default(),
            leaders: BTreeMap::new(),
            stamps: BTreeMap::new(),
            slabs: BTreeMap::new(),
            seen: BTreeMap::new(),
        }
    }

    /// Works until it is told to stop.
    pub(crate) async fn work(mut self) {
        while !self.told.stop.get() && !self.world.checks.is_broken() {
            sleep(sim::between(Duration::from_millis(5), Duration::from_millis(150))).await;
            let number = sim::roll(KEYS);
            let lazy = self.reader && !sim::chance(100);
            match if lazy { 9 } else { sim::roll(10) } {
                0..=3 => self.put(number).await,
                4 => self.delete(number).await,
                _ => self.get(number).await,
            }
        }
    }

    /// Asks until somebody answers; `None` after a while. Refusals that asking again does not change are answers.
    pub(crate) async fn insist<T, F>(
        &mut self,
        shard: ShardId,
        work: impl Fn(Arc<SimMeta>, Instant) -> F,
    ) -> Option<Result<T, Refusal>>
    where
        F: Future<Output = Result<T, Refusal>>,
    {
        let give_up = Instant::now() + STUBBORN;
        while Instant::now() < give_up {
            // Now and then somebody else is asked, who may think that it leads, or not know that it does.
            let asks_around = if self.reader { 20 } else { 100 };
            let known = self.leaders.get(&shard).copied().filter(|_| !sim::chance(asks_around));
            let node = known.unwrap_or_else(any_node);
            match self.world.call(node, &work).await {
                Ok(done) => {
                    self.leaders.insert(shard, node);
                    return Some(Ok(done));
                }
                Err(Failed::Refused(Refusal::NotLeader(hint))) if hint.leader != 0 && hint.leader != node.0 => {
                    self.leaders.insert(shard, RaftNodeId(hint.leader));
                }
                Err(
                    Failed::Lost
                    | Failed::Refused(Refusal::NotLeader(_) | Refusal::NotReady(_) | Refusal::Indeterminate(_)),
                ) => {
                    self.leaders.remove(&shard);
                }
                Err(Failed::Refused(other)) => return Some(Err(other)),
            }
            sleep(sim::between(Duration::from_millis(10), Duration::from_millis(120))).await;
        }
        None
    }

    async fn tell(&mut self, shard: ShardId, command: ShardCommand) -> Option<ShardOutcome> {
        let done = self
            .insist(shard, |meta, deadline| {
                let command = command.clone();
                async move { meta.tell(shard, command, deadline).await }
            })
            .await?;
        self.heard(shard, done)
    }

    fn heard(&mut self, shard: ShardId, done: Result<Done<ShardOutcome>, Refusal>) -> Option<ShardOutcome> {
        match done {
            Ok(Done { at, outcome }) => {
                let stamp = self.stamps.entry(shard).or_default();
                *stamp = at.max(*stamp);
                Some(outcome)
            }
            Err(refusal) => {
                sim::note(format_args!("refused: {refusal}"));
                None
            }
        }
    }

    fn request(&self, shard: ShardId) -> RequestId {
        RequestId { at: self.stamps.get(&shard).copied().unwrap_or_default(), random: sim::draw() }
    }

    fn version(&mut self) -> Version {
        let now = u64::try_from(sim::now().as_millis()).unwrap_or(u64::MAX);
        self.clock = self.clock.next(WALL_MS + now);
        Version { clock: self.clock, writer: self.writer }
    }

    fn merge(&mut self, number: u64, version: Version) {
        self.clock = self.clock.max(version.clock);
        self.seen.insert(number, version);
    }

    /// A slot that nothing was written to.
    async fn slot(&mut self, shard: ShardId) -> Option<(Grant, SlotIndex)> {
        let usable = self.slabs.get(&shard).is_some_and(|slab| {
            // Sometimes too late.
            slab.used < slab.grant.slots.0 && (Instant::now() < slab.until || sim::chance(50))
        });
        if !usable {
            self.slabs.remove(&shard);
            let ttl = Duration::from_millis(2_000 + sim::roll(4_000));
            let asked = GrantRequest {
                request: self.request(shard),
                writer: self.writer,
                namespace: NAMESPACE,
                slot_size: SLOT_SIZE,
                // Whoever hardly writes would only keep the rest of it from the others.
                slots: if self.reader { SlotCount(1) } else { SLOTS },
                ttl,
            };
            let done = self
                .insist(shard, |meta, deadline| {
                    let asked = asked.clone();
                    async move { meta.grant(shard, asked, deadline).await }
                })
                .await?;
            let Some(ShardOutcome::Grant(Ok(grant))) = self.heard(shard, done) else { return None };
            self.told.grants.borrow_mut().push(grant.clone());
            self.slabs.insert(shard, Slab { grant, used: 0, until: Instant::now() + ttl });
        }
        let slab = self.slabs.get_mut(&shard)?;
        slab.used += 1;
        Some((slab.grant.clone(), SlotIndex(slab.used - 1)))
    }

    async fn put(&mut self, number: u64) {
        let key = key(number);
        let shard = key.shard(NAMESPACE, SHARDS);
        let Some((grant, slot)) = self.slot(shard).await else { return };
        let version = self.version();
        let (mode, asked) = match sim::roll(5) {
            0 | 1 => (Mode::Create, Asked::Create(version)),
            2 | 3 => (Mode::Replace, Asked::Replace(version)),
            _ => {
                let expected = self.seen.get(&number).copied();
                (Mode::Compare { expected }, Asked::Compare { expected, version })
            }
        };
        let payload_crc = u32::try_from(version.clock.0 & 0xffff_ffff).expect("masked");
        let entry = CommitEntry { slot, key, version, kind: FrameKind::Value, payload_bytes: 1_000, payload_crc, mode };
        let holders = if sim::chance(150) { 1 } else { grant.holders.len() };
        let attested = grant.holders.iter().map(|holder| Attested {
            node: holder.region.node,
            covers: Covers::All,
            generation: grant.id.sequence.generation,
            serial: CertificateSerial(holder.region.node.0),
            signature: Signature([7; 64]),
        });
        let whole = Publish { grant: grant.id, entries: vec![entry], attested: attested.collect() };
        let part = Publish { attested: whole.attested.iter().take(holders).cloned().collect(), ..whole.clone() };
        let began = self.told.next();
        let answer = self.publish(shard, &part).await;
        let ended = self.told.next();
        if let Some(outcome) = answer {
            self.told.commits.borrow_mut().push((shard, whole.clone(), outcome));
        }
        let answered = match answer {
            Some(Ok(_)) => {
                self.merge(number, version);
                Answered::Committed
            }
            Some(Err(CommitRefusal::Exists { current })) => {
                self.merge(number, current);
                Answered::Exists(current)
            }
            Some(Err(CommitRefusal::StaleVersion { current })) => {
                self.merge(number, current);
                Answered::Stale(current)
            }
            Some(Err(CommitRefusal::CompareFailed { current })) => {
                match current {
                    Some(current) => self.merge(number, current),
                    None => drop(self.seen.remove(&number)),
                }
                Answered::CompareFailed(current)
            }
            // Definite, and nothing happened.
            Some(Err(CommitRefusal::GrantExpired { .. } | CommitRefusal::Sealed { .. })) => return,
            Some(Err(other)) => {
                return self.world.checks.broken(format!("{} of {slot}: {other}", grant.id));
            }
            None => Answered::Unknown,
        };
        let ended = if answered == Answered::Unknown { u64::MAX } else { ended };
        self.told.record(number, Operation { asked, answered, began, ended });
        if let Some(first) = answer
            && sim::chance(150)
            && let Some(again) = self.publish(shard, &whole).await
            && again != first
        {
            self.world.checks.broken(format!("Idempotent commits: {}, {slot}: {first:?}, then {again:?}", grant.id));
        }
        if sim::chance(100)
            && let Some(slab) = self.slabs.remove(&shard)
        {
            self.tell(shard, ShardCommand::Seal { grant: slab.grant.id, fill: SlotCount(slab.used) }).await;
        }
    }

    /// The outcome of a commit of one entry, if there is an answer.
    pub(crate) async fn publish(&mut self, shard: ShardId, publish: &Publish) -> Option<CommitOutcome> {
        match self.tell(shard, ShardCommand::Publish(publish.clone())).await? {
            ShardOutcome::Publish(outcomes) => outcomes.first().copied(),
            other => {
                self.world.checks.broken(format!("a commit was answered with {other:?}"));
                None
            }
        }
    }

    async fn delete(&mut self, number: u64) {
        let key = key(number);
        let shard = key.shard(NAMESPACE, SHARDS);
        let expected = if sim::chance(300) { self.seen.get(&number).copied() } else { None };
        let keys = vec![DeleteKey { key, expected }];
        let command = ShardCommand::Delete { request: self.request(shard), namespace: NAMESPACE, keys };
        let began = self.told.next();
        let outcome = self.tell(shard, command).await;
        let ended = self.told.next();
        let answered = match outcome {
            None => Answered::Unknown,
            Some(ShardOutcome::Delete(Ok(outcomes))) => match outcomes.first() {
                Some(Ok(deleted)) => Answered::Deleted(deleted.version),
                Some(Err(DeleteRefusal::NotFound)) => Answered::NotFound,
                Some(Err(DeleteRefusal::CompareFailed { current, .. })) => Answered::CompareFailed(Some(*current)),
                other => return self.world.checks.broken(format!("a delete was answered with {other:?}")),
            },
            Some(other) => return self.world.checks.broken(format!("a delete was answered with {other:?}")),
        };
        if matches!(answered, Answered::Deleted(_) | Answered::NotFound) {
            self.seen.remove(&number);
        }
        let ended = if answered == Answered::Unknown { u64::MAX } else { ended };
        self.told.record(number, Operation { asked: Asked::Delete { expected }, answered, began, ended });
    }

    async fn get(&mut self, number: u64) {
        let key = key(number);
        let shard = key.shard(NAMESPACE, SHARDS);
        let unconfirmed = self.world.mutant() == Some(Mutant::UnconfirmedReads);
        // Often the longest, which ends right at the horizon.
        let wanted = if sim::chance(500) { LEASE_MAX } else { sim::between(Duration::from_millis(100), LEASE_MAX) };
        let began = self.told.next();
        let checks = Arc::clone(&self.world.checks);
        let found = self
            .insist(shard, |meta, deadline| {
                let (key, checks, sent) = (key.clone(), Arc::clone(&checks), sim::now());
                async move {
                    let read = |state: &quarry_meta_state::Shard| {
                        let resolved = state.resolve(NAMESPACE, &key)?;
                        let places: Vec<Place> = (resolved.copies.iter())
                            .map(|copy| (copy.region, copy.offset.0..copy.offset.0 + u64::from(copy.slot_size.0)))
                            .collect();
                        Some((resolved.version, places))
                    };
                    let (found, lease) = if unconfirmed {
                        meta.resolve_unconfirmed(shard, wanted, deadline, read).await?
                    } else {
                        meta.resolve(shard, wanted, deadline, read).await?
                    };
                    // A client counts from sending, one percent short.
                    for (region, bytes) in found.iter().flat_map(|(_, places)| places) {
                        checks.lease(*region, bytes.clone(), sent + lease * 99 / 100);
                    }
                    Ok(found.map(|(version, _)| version))
                }
            })
            .await;
        let ended = self.told.next();
        let Some(Ok(found)) = found else { return };
        match found {
            Some(version) => self.merge(number, version),
            None => drop(self.seen.remove(&number)),
        }
        self.told.record(number, Operation { asked: Asked::Get, answered: Answered::Found(found), began, ended });
    }
}
