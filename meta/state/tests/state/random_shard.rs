//! Random histories of one shard, hostile commands among them: every invariant after every command, equal states on every replica, and
//! everything free again in the end.

use crate::bench::{Bench, GEN, META, SLOT, SPACE, attested, cases, extent, key, lend, lent, life, version, writer};
use proptest::{collection::vec, prelude::*, test_runner::TestCaseResult};
use quarry_meta_state::{
    Entry, RequestId, Shard,
    directory::{FeedChange, Policy},
    shard::{
        Attested, BatchRef, CheckedCopy, CommitEntry, Covers, DeleteKey, GrantRequest, Lack, Marks, Mode, MoveRequest,
        Need, PinRequest, Proposed, Publish, Resigned, ShardCommand, ShardOutcome, Sought, Sparse, ValuePlace,
    },
};
use quarry_wire::{
    frame::FrameKind,
    grant::{Class, Grant},
    ids::{CertificateSerial, Generation, GrantId, NodeId, Ordinal, PinId, ShardId, SlotIndex, WriterId},
    signed::Signature,
    units::{LogTime, Offset, SlotCount, SlotSize},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

#[derive(Clone, Debug)]
enum Step {
    Wait(u16),
    /// The stamp goes back.
    Back(u16),
    Grant {
        writer: u8,
        slots: u8,
        wide: bool,
        ttl: u16,
        avoid: u8,
    },
    /// Holders at arbitrary places.
    WildGrant {
        slots: u8,
        places: Vec<(u8, u8, u16)>,
        stamp: i32,
    },
    Publish {
        grant: u8,
        entries: Vec<(u8, u8, u8, u8)>,
        nodes: u8,
        only: Option<Vec<u8>>,
    },
    /// A grant that may never have been given.
    WildPublish {
        sequence: u8,
        generation: u8,
        shard: u8,
        slot: u32,
        nodes: u8,
    },
    Seal {
        grant: u8,
        fill: u8,
    },
    Delete {
        keys: Vec<(u8, Option<u8>)>,
        stamp: i32,
    },
    Horizon(u32),
    Life {
        node: u8,
        raise: u8,
        up: bool,
    },
    Lent {
        node: u8,
        index: u8,
        shard: u8,
        number: u8,
    },
    Unlent {
        node: u8,
        index: u8,
        number: u8,
    },
    /// The last changes are told again, or some are left out.
    WildFeed {
        back: u8,
        ahead: u8,
    },
    Drop {
        node: u8,
        index: u8,
        number: u8,
    },
    Pin {
        owner: u8,
        keys: Vec<u8>,
        ms: u16,
        stamp: i32,
    },
    Renew {
        owner: u8,
        pin: u8,
        ms: u16,
    },
    Release {
        owner: u8,
        pin: u8,
    },
    /// Current values are moved out of some extents; these nodes attest. Or of the sparsest extent that there is.
    Move {
        keys: Vec<u8>,
        away: u8,
        sparse: bool,
        nodes: u8,
        only: Option<Vec<u8>>,
    },
    /// A slab for moves at arbitrary places.
    WildGrantMove {
        slots: u8,
        ttl: u16,
        places: Vec<(u8, u8, u16)>,
    },
    /// A value is moved under an arbitrary grant, from an arbitrary place, as an arbitrary version.
    WildMove {
        grant: u8,
        from: u8,
        slots: (u8, u8),
        name: u8,
        clock: Option<u8>,
        nodes: u8,
    },
    /// A node signs some of its batches again.
    Resign {
        node: u8,
        skip: u8,
    },
    Evict {
        grants: Vec<u8>,
        /// Those that a leader would choose as well.
        chosen: bool,
    },
    /// A holder gives up a copy of a key: the one that there is, or one a little beside it.
    Damage {
        name: u8,
        copy: u8,
        beside: bool,
    },
    /// A command of before, once more.
    Again(u16),
}

fn step() -> impl Strategy<Value = Step> {
    let entries = || vec((0u8..10, 0u8..6, 0u8..12, any::<u8>()), 1..5);
    prop_oneof![
        4 => (0u16..6_000).prop_map(Step::Wait),
        1 => (0u16..3_000).prop_map(Step::Back),
        5 => (0u8..3, 1u8..9, any::<bool>(), 1u16..12_000, 0u8..8)
            .prop_map(|(writer, slots, wide, ttl, avoid)| Step::Grant { writer, slots, wide, ttl, avoid }),
        2 => (1u8..40, vec((0u8..5, 0u8..18, any::<u16>()), 0..4), -130_000i32..1_000)
            .prop_map(|(slots, places, stamp)| Step::WildGrant { slots, places, stamp }),
        10 => (any::<u8>(), entries(), 0u8..16, prop_oneof![3 => Just(None), 1 => vec(0u8..6, 0..4).prop_map(Some)])
            .prop_map(|(grant, entries, nodes, only)| Step::Publish { grant, entries, nodes, only }),
        1 => (any::<u8>(), 0u8..3, 0u8..3, any::<u32>(), 0u8..8)
            .prop_map(|(sequence, generation, shard, slot, nodes)| Step::WildPublish { sequence, generation, shard, slot, nodes }),
        3 => (any::<u8>(), 0u8..12).prop_map(|(grant, fill)| Step::Seal { grant, fill }),
        3 => (vec((0u8..6, proptest::option::of(0u8..12)), 0..4), -130_000i32..1_000)
            .prop_map(|(keys, stamp)| Step::Delete { keys, stamp }),
        2 => (0u32..100_000).prop_map(Step::Horizon),
        1 => (1u8..4, 0u8..3, any::<bool>()).prop_map(|(node, raise, up)| Step::Life { node, raise, up }),
        1 => (1u8..4, 0u8..18, 1u8..3, 0u8..6).prop_map(|(node, index, shard, number)| Step::Lent { node, index, shard, number }),
        1 => (1u8..4, 0u8..18, 0u8..6).prop_map(|(node, index, number)| Step::Unlent { node, index, number }),
        1 => (0u8..4, 0u8..3).prop_map(|(back, ahead)| Step::WildFeed { back, ahead }),
        2 => (1u8..4, 0u8..18, 0u8..6).prop_map(|(node, index, number)| Step::Drop { node, index, number }),
        3 => (0u8..2, vec(0u8..6, 0..4), 0u16..20_000, -130_000i32..1_000)
            .prop_map(|(owner, keys, ms, stamp)| Step::Pin { owner, keys, ms, stamp }),
        2 => (0u8..2, any::<u8>(), 0u16..20_000).prop_map(|(owner, pin, ms)| Step::Renew { owner, pin, ms }),
        2 => (0u8..2, any::<u8>()).prop_map(|(owner, pin)| Step::Release { owner, pin }),
        6 => (vec(0u8..6, 1..5), any::<u8>(), any::<bool>(), 0u8..16, prop_oneof![3 => Just(None), 1 => vec(0u8..6, 0..4).prop_map(Some)])
            .prop_map(|(keys, away, sparse, nodes, only)| Step::Move { keys, away, sparse, nodes, only }),
        1 => (0u8..40, 0u16..32_000, vec((0u8..5, 0u8..18, any::<u16>()), 0..4))
            .prop_map(|(slots, ttl, places)| Step::WildGrantMove { slots, ttl, places }),
        2 => (any::<u8>(), any::<u8>(), (0u8..6, 0u8..6), 0u8..6, proptest::option::of(0u8..12), 0u8..16)
            .prop_map(|(grant, from, slots, name, clock, nodes)| Step::WildMove { grant, from, slots, name, clock, nodes }),
        1 => (1u8..4, 0u8..4).prop_map(|(node, skip)| Step::Resign { node, skip }),
        3 => (vec(any::<u8>(), 0..4), any::<bool>()).prop_map(|(grants, chosen)| Step::Evict { grants, chosen }),
        2 => (0u8..6, any::<u8>(), proptest::bool::weighted(0.2))
            .prop_map(|(name, copy, beside)| Step::Damage { name, copy, beside }),
        3 => any::<u16>().prop_map(Step::Again),
    ]
}

struct History {
    bench: Bench,
    grants: Vec<Grant>,
    /// Every pin that was ever given.
    pins: Vec<PinId>,
    /// Those that were neither released nor have come to their end, with their owners.
    lasting: BTreeMap<PinId, (WriterId, LogTime)>,
    /// Everything applied, with its stamp.
    log: Vec<(u64, ShardCommand)>,
    incarnations: [u64; 4],
}

impl History {
    fn new(policy: Policy) -> Self {
        let bench = Bench::with(3, policy, 1);
        Self {
            bench,
            grants: Vec::new(),
            pins: Vec::new(),
            lasting: BTreeMap::new(),
            log: Vec::new(),
            incarnations: [1; 4],
        }
    }
    fn apply(&mut self, command: ShardCommand) {
        self.log.push((self.bench.at, command.clone()));
        match (command.clone(), self.bench.apply(command)) {
            (_, ShardOutcome::Grant(Ok(grant))) => self.grants.push(grant),
            (ShardCommand::Pin(asked), ShardOutcome::Pin(Ok(pinned))) => {
                // A request that comes again names the pin that it made, which may be over.
                if let Some(pin) = pinned.pin.filter(|pin| !self.pins.contains(pin)) {
                    self.pins.push(pin);
                    self.lasting.insert(pin, (asked.owner, pinned.term.until));
                }
            }
            (ShardCommand::Renew { pin, .. }, ShardOutcome::Renew(Ok(term))) => {
                if let Some((_, until)) = self.lasting.get_mut(&pin) {
                    *until = term.until.max(*until);
                }
            }
            (ShardCommand::Release { pin, .. }, ShardOutcome::Release { held: true }) => {
                self.lasting.remove(&pin);
            }
            _ => {}
        }
        let now = self.bench.shard.log_time();
        self.lasting.retain(|_, (_, until)| *until > now);
        for (pin, (owner, until)) in &self.lasting {
            assert!(self.bench.shard.pinned(*owner, *pin).is_some(), "{pin} is gone at {now}, before {until}");
        }
        assert_eq!(self.bench.shard.pins(), self.lasting.len(), "no pin outlasts its end or its release");
    }
    fn pick_pin(&self, index: u8) -> Option<PinId> {
        let index = usize::from(index).checked_rem(self.pins.len())?;
        Some(self.pins[index])
    }
    fn pick(&self, index: u8) -> Option<GrantId> {
        let index = usize::from(index).checked_rem(self.grants.len())?;
        Some(self.grants[index].id)
    }
    fn request(&mut self, stamp: i32) -> RequestId {
        let mut request = self.bench.request();
        request.at = LogTime(request.at.0.saturating_add_signed(stamp.into()));
        request
    }
    fn tell(&mut self, change: FeedChange) {
        let slice = self.bench.slice(vec![change]);
        self.apply(ShardCommand::ApplyFeed(slice));
    }
    fn run(&mut self, step: Step) {
        let nodes_of = |mask: u8| (1..=4u64).filter(move |node| mask >> (node - 1) & 1 == 1);
        match step {
            Step::Wait(ms) => {
                self.bench.at += u64::from(ms);
                self.apply(ShardCommand::Tick { horizon: None });
            }
            Step::Back(ms) => {
                let now = self.bench.at;
                self.bench.at = now.saturating_sub(ms.into());
                self.apply(ShardCommand::Tick { horizon: None });
                self.bench.at = now;
            }
            Step::Grant { writer: number, slots, wide, ttl, avoid } => {
                let avoid: BTreeSet<_> = nodes_of(avoid).map(NodeId).collect();
                let mut asked = self.bench.asked(slots.into());
                asked.writer = writer(number);
                asked.slot_size = SlotSize(if wide { 4 * SLOT } else { SLOT });
                asked.ttl = Duration::from_millis(ttl.into());
                let planned = self.bench.shard.planner(LogTime(self.bench.at), &avoid).grant(META, asked);
                if let Ok(command) = planned {
                    let before = self.grants.len();
                    self.apply(command);
                    // Deadlines that were due may only have freed more.
                    assert_eq!(self.grants.len(), before + 1, "what was planned is granted");
                }
            }
            Step::WildGrant { slots, places, stamp } => {
                let request = self.request(stamp);
                let asked = GrantRequest { request, slot_size: SlotSize(SLOT), ..self.bench.asked(slots.into()) };
                self.apply(ShardCommand::Grant {
                    meta: META,
                    asked,
                    holders: places.into_iter().map(wild_place).collect(),
                });
            }
            Step::Publish { grant, entries, nodes, only } => {
                let Some(grant) = self.pick(grant) else { return };
                let entries: Vec<_> = entries.into_iter().map(commit_entry).collect();
                let attested = nodes_of(nodes).map(|node| covering(node, only.as_deref())).collect();
                self.apply(ShardCommand::Publish(Publish { grant, entries, attested }));
            }
            Step::WildPublish { sequence, generation, shard, slot, nodes } => {
                let sequence = Ordinal { generation: Generation(generation.into()), number: sequence.into() };
                let grant = GrantId { shard: ShardId(shard.into()), sequence };
                let mut entry = commit_entry((0, 1, 1, 1));
                entry.slot = SlotIndex(slot);
                let attested = nodes_of(nodes).map(attested).collect();
                self.apply(ShardCommand::Publish(Publish { grant, entries: vec![entry], attested }));
            }
            Step::Seal { grant, fill } => {
                let Some(grant) = self.pick(grant) else { return };
                self.apply(ShardCommand::Seal { grant, fill: SlotCount(fill.into()) });
            }
            Step::Delete { keys, stamp } => {
                let keys = keys.into_iter().map(|(name, expected)| DeleteKey {
                    key: key(&format!("k{name}")),
                    expected: expected.map(|clock| version(clock.into())),
                });
                let keys = keys.collect();
                let request = self.request(stamp);
                self.apply(ShardCommand::Delete { request, namespace: SPACE, keys });
            }
            Step::Horizon(ahead) => {
                let horizon = Some(LogTime(self.bench.at + u64::from(ahead)));
                self.apply(ShardCommand::Tick { horizon });
            }
            Step::Life { node, raise, up } => {
                let incarnation = &mut self.incarnations[usize::from(node)];
                *incarnation += u64::from(raise);
                let number = *incarnation;
                self.tell(life(node.into(), number, up));
            }
            Step::Lent { node, index, shard, number } => {
                self.tell(lent(node.into(), index.into(), shard.into(), number.into()));
            }
            Step::Unlent { node, index, number } => {
                self.tell(FeedChange::Unlent { extent: extent(node.into(), index.into()), lend: lend(number.into()) });
            }
            Step::WildFeed { back, ahead } => {
                let mut slice = self.bench.slice(vec![life(1, 1, true)]);
                slice.from.0.number = slice.from.0.number.saturating_sub(back.into()) + u64::from(ahead);
                self.apply(ShardCommand::ApplyFeed(slice));
                self.bench.feed = self.bench.shard.feed_position().0.number;
            }
            Step::Drop { node, index, number } => {
                let (extent, lend) = (extent(node.into(), index.into()), lend(number.into()));
                self.apply(ShardCommand::DropExtent { extent, lend });
            }
            Step::Pin { owner, keys, ms, stamp } => {
                let keys = keys.into_iter().map(|name| key(&format!("k{name}"))).collect();
                let (request, duration) = (self.request(stamp), Duration::from_millis(ms.into()));
                let asked = PinRequest { request, owner: writer(owner), namespace: SPACE, keys, duration };
                self.apply(ShardCommand::Pin(asked));
            }
            Step::Renew { owner, pin, ms } => {
                let Some(pin) = self.pick_pin(pin) else { return };
                let (request, duration) = (self.bench.request(), Duration::from_millis(ms.into()));
                self.apply(ShardCommand::Renew { request, owner: writer(owner), pin, duration });
            }
            Step::Release { owner, pin } => {
                let Some(pin) = self.pick_pin(pin) else { return };
                self.apply(ShardCommand::Release { owner: writer(owner), pin });
            }
            Step::Move { keys, away, sparse, nodes, only } => {
                let shard = &self.bench.shard;
                let found = if sparse {
                    shard.sparse_extent(&Sought { wanted: Some(u64::from(away) << 8), ..Sought::default() })
                } else {
                    None
                };
                let (values, away) = match found {
                    Some(Sparse { extent, values, .. }) => (values, BTreeSet::from([extent])),
                    None => {
                        let places = keys.iter().filter_map(|name| shard.place_of(SPACE, &key(&format!("k{name}"))));
                        let away = (0..8u32)
                            .filter(|bit| away >> bit & 1 == 1)
                            .map(|bit| extent(1 + u64::from(bit) % 3, bit / 3));
                        (places.collect(), away.collect())
                    }
                };
                let Some(planned) = shard.plan_move(META, LogTime(self.bench.at), &values, &away, &BTreeSet::new())
                else {
                    return;
                };
                let before = self.grants.len();
                self.apply(planned.command);
                assert_eq!(self.grants.len(), before + 1, "what was planned is granted");
                let grant = self.grants[before].id;
                let attested = nodes_of(nodes).map(|node| covering(node, only.as_deref())).collect();
                self.apply(ShardCommand::Publish(Publish { grant, entries: planned.entries, attested }));
            }
            Step::WildGrantMove { slots, ttl, places } => {
                let (slot_size, slots) = (SlotSize(SLOT), SlotCount(slots.into()));
                let asked = MoveRequest { namespace: SPACE, slot_size, slots, ttl: Duration::from_millis(ttl.into()) };
                let holders = places.into_iter().map(wild_place).collect();
                self.apply(ShardCommand::GrantMove { meta: META, asked, holders });
            }
            Step::WildMove { grant, from, slots: (from_slot, slot), name, clock, nodes } => {
                let (Some(grant), Some(from)) = (self.pick(grant), self.pick(from)) else { return };
                let name_of = key(&format!("k{name}"));
                let found = self.bench.shard.resolve(SPACE, &name_of);
                let mut entry = commit_entry((slot, name, clock.unwrap_or(3), 0));
                // The current value as it is, or another one.
                let place = self.bench.shard.place_of(SPACE, &name_of).filter(|_| clock.is_none());
                if let (Some(found), None) = (found, clock) {
                    (entry.version, entry.payload_bytes, entry.payload_crc) =
                        (found.version, found.payload_bytes, found.payload_crc);
                }
                let from = place.unwrap_or_else(|| ValuePlace { grant: from, slot: SlotIndex(from_slot.into()) });
                entry.mode = Mode::Move { from };
                let attested = nodes_of(nodes).map(attested).collect();
                self.apply(ShardCommand::Publish(Publish { grant, entries: vec![entry], attested }));
            }
            Step::Resign { node, skip } => {
                let (node, serial) = (NodeId(node.into()), CertificateSerial(u64::from(skip) + 1));
                let shard = &self.bench.shard;
                let again = |batch| {
                    let root = shard.batch(batch).expect("it was named just now").signed().statement.root;
                    Resigned { batch, root, generation: GEN, serial, signature: Signature([skip; 64]) }
                };
                let all = shard.signed_otherwise(node, serial, BatchRef(0));
                let batches = all.skip(skip.into()).map(again).collect();
                self.apply(ShardCommand::Resign { node, batches });
            }
            Step::Evict { grants, chosen } => {
                let mut victims: Vec<GrantId> = grants.into_iter().filter_map(|grant| self.pick(grant)).collect();
                let mut sure = 0;
                if chosen {
                    let lacks = BTreeSet::from([Lack { namespace: SPACE, slot_size: SlotSize(4 * SLOT) }]);
                    let need = Need {
                        marks: Marks { low: 900, high: 950 },
                        lacks: &lacks,
                        wanted: Some(SlotSize(4 * SLOT)),
                        pressed: &BTreeSet::from([SPACE]),
                        coming: &BTreeMap::new(),
                    };
                    let proposed = self.bench.shard.victims(need, |_| LogTime(0));
                    sure = proposed.len();
                    victims.splice(0..0, proposed.into_iter().map(|victim| victim.grant));
                }
                self.log.push((self.bench.at, ShardCommand::Evict { victims: victims.clone() }));
                let at_once = self.bench.shard.next_deadline().is_none_or(|due| due.0 > self.bench.at);
                let ShardOutcome::Evict(outcomes) = self.bench.apply(ShardCommand::Evict { victims }) else {
                    panic!("another outcome")
                };
                // Deadlines that were due may have taken some before.
                assert!(!at_once || outcomes[..sure].iter().all(Result::is_ok), "what is proposed goes: {outcomes:?}");
            }
            Step::Damage { name, copy, beside } => {
                // What is due comes first: pins end.
                self.apply(ShardCommand::Tick { horizon: None });
                let Some(value) = self.bench.shard.resolve(SPACE, &key(&format!("k{name}"))) else { return };
                let copies = value.copies.len();
                let copy = value.copies[usize::from(copy) % copies];
                let checked = CheckedCopy {
                    namespace: SPACE,
                    key: value.key.clone(),
                    version: value.version,
                    region: copy.region,
                    incarnation: copy.incarnation,
                    offset: Offset(copy.offset.0 + if beside { 64 } else { 0 }),
                    found: None,
                };
                let stays = self.bench.shard.check_copy(&checked).is_err();
                assert!(stays || !beside);
                self.apply(ShardCommand::DropCopy(checked));
                let left = self.bench.shard.resolve(SPACE, &value.key).map_or(0, |value| value.copies.len());
                assert_eq!(left, if stays { copies } else { copies - 1 });
            }
            Step::Again(index) => {
                let Some(index) = usize::from(index).checked_rem(self.log.len()) else { return };
                let command = self.log[index].1.clone();
                self.apply(command);
            }
        }
    }
}

/// What a node attests: all entries, or only these.
fn covering(node: u64, only: Option<&[u8]>) -> Attested {
    let covers = only.map_or(Covers::All, |only| Covers::Only(only.iter().map(|index| u32::from(*index)).collect()));
    Attested { covers, ..attested(node) }
}

fn wild_place((node, index, base): (u8, u8, u16)) -> Proposed {
    Proposed {
        extent: extent(node.into(), index.into()),
        base: Offset(u64::from(index) * (1 << 16) + u64::from(base) / 64 * 64),
    }
}

fn commit_entry((slot, name, clock, mode): (u8, u8, u8, u8)) -> CommitEntry {
    let mode = match mode % 8 {
        0..=2 => Mode::Create,
        3..=5 => Mode::Replace,
        6 => Mode::Compare { expected: None },
        _ => Mode::Compare { expected: Some(version((mode / 8 % 12).into())) },
    };
    CommitEntry {
        slot: SlotIndex(slot.into()),
        key: key(&format!("k{name}")),
        version: version(clock.into()),
        kind: FrameKind::Value,
        payload_bytes: if clock == 11 { 1 << 20 } else { 100 },
        payload_crc: u32::from(clock) + 1,
        mode,
    }
}

/// Another replica: applies the same entries, written and read again, and takes a snapshot on the way.
fn replay(policy: Policy, log: &[(u64, ShardCommand)], snapshot_after: usize) -> Shard {
    let mut shard = Bench::with(3, policy, 1).shard;
    for (index, (at, command)) in log.iter().enumerate() {
        let bytes = Entry { at: LogTime(*at), commands: vec![command.clone()] }.encode().unwrap();
        let entry = Entry::<ShardCommand>::decode(&bytes).unwrap();
        for command in entry.commands {
            shard.apply(entry.at, command);
        }
        if index == snapshot_after {
            shard = Shard::decode(&shard.encode()).unwrap();
        }
    }
    shard
}

fn run(policy: Policy, steps: Vec<Step>, snapshot_after: usize) -> TestCaseResult {
    let mut history = History::new(policy);
    for step in steps {
        history.run(step);
    }
    let other = replay(policy, &history.log, snapshot_after);
    prop_assert_eq!(other.hash(), history.bench.shard.hash());
    prop_assert_eq!(&other, &history.bench.shard);
    assert_eq!(history.bench.shard.generation(), GEN);
    history.bench.drain();
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 3_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_invariant_holds_after_every_command(steps in vec(step(), 1..120), snapshot_after in 0usize..60) {
        run(Policy { least: 1, ..Policy::new(Class::Cache, 3) }, steps, snapshot_after)?;
    }

    #[test]
    fn every_invariant_holds_with_two_needed_copies_and_a_quota(steps in vec(step(), 1..120), snapshot_after in 0usize..60) {
        let policy = Policy { quota_bytes: Some(40 * u64::from(SLOT)), ..Policy::new(Class::Cache, 2) };
        run(policy, steps, snapshot_after)?;
    }
}
