//! Pins: values that are kept where they are.

use crate::bench::{Bench, EXTENTS, GEN, SLOT, SPACE, TTL, entry, key, lent, life, version, writer};
use quarry_meta_state::{
    RequestRefusal, Shard,
    directory::{FeedChange, FeedEntry, FeedSlice},
    shard::{DeleteKey, Mode, PinMiss, PinRefusal, PinTerm, RenewRefusal, ShardCommand, ShardOutcome},
};
use quarry_wire::{
    ids::{FeedNumber, Generation, LendNumber, NodeId, PinId, SlotIndex},
    limits::{KEYS_PER_PIN_MAX, OUTCOME_KEPT, PIN_MAX, PINS_PER_OWNER_MAX, PINS_PER_SHARD_MAX, QUARANTINE},
    units::{LogTime, millis},
};
use std::{collections::BTreeSet, time::Duration};

const SECOND: u64 = 1_000;

/// A key with a value of version `clock`, in a slab of its own that is sealed and closed.
fn put(bench: &mut Bench, name: &str, clock: u64) {
    let grant = bench.grant(1);
    bench.commit(&grant, entry(0, name, clock, Mode::Replace)).unwrap();
    bench.seal(&grant, 1);
}

fn resting(bench: &Bench) -> u64 {
    bench.shard.space().total.resting_bytes
}

fn kept(bench: &Bench) -> u64 {
    bench.shard.space().total.pinned_bytes
}

#[test]
fn a_pinned_value_stays_at_its_place_after_it_was_replaced_or_deleted_until_its_pin_ends_and_the_quarantine() {
    for delete in [false, true] {
        let mut bench = Bench::new(2);
        put(&mut bench, "a", 5);
        let before = bench.shard.resolve(SPACE, &key("a")).unwrap();
        let end = bench.at + 60 * SECOND;
        let pin = bench.pin(1, &["a"], 60 * SECOND);
        if delete {
            bench.delete("a").unwrap();
        } else {
            put(&mut bench, "a", 6);
        }
        let two = 2 * u64::from(SLOT);
        assert_eq!((kept(&bench), resting(&bench)), (two, 0), "it does not even begin to rest");
        assert_eq!(
            bench.shard.pinned(writer(1), pin).unwrap(),
            std::slice::from_ref(&before),
            "same copies, same proof"
        );
        assert!(bench.shard.batch(before.copies[0].batch).is_some());
        // Long after every outcome is forgotten, and through a snapshot.
        bench.at = end - 1;
        bench.tick(None);
        bench.shard = Shard::decode(&bench.shard.encode()).unwrap();
        assert_eq!(bench.shard.pinned(writer(1), pin).unwrap(), [before]);
        bench.wait(1);
        assert_eq!(bench.shard.pinned(writer(1), pin), None);
        assert_eq!((kept(&bench), resting(&bench)), (0, two));
        bench.wait(millis(QUARANTINE) - 1);
        assert_eq!(resting(&bench), two);
        bench.wait(1);
        assert_eq!(resting(&bench), 0);
        bench.drain();
    }
}

#[test]
fn a_pinned_place_is_granted_to_nobody() {
    let mut bench = Bench::new(1);
    put(&mut bench, "a", 5);
    let place = bench.shard.resolve(SPACE, &key("a")).unwrap().copies[0];
    bench.pin(1, &["a"], 60 * SECOND);
    bench.delete("a").unwrap();
    bench.wait(30 * SECOND);
    // All there is, in slabs of one slot.
    let mut bases = BTreeSet::new();
    while let Ok(command) = bench.plan(1) {
        bases.insert(bench.try_grant(command).unwrap().holders[0].base);
    }
    assert_eq!(bases.len() as u64 + 1, (1 << 20) / u64::from(SLOT));
    assert!(!bases.contains(&place.offset));
    let free = bench.shard.space().total.free_bytes;
    assert_eq!(free, 0);
    bench.drain();
}

#[test]
fn what_was_let_go_rests_past_the_leases_that_were_given_meanwhile() {
    let mut bench = Bench::new(1);
    put(&mut bench, "a", 5);
    let pin = bench.pin(1, &["a"], 60 * SECOND);
    bench.delete("a").unwrap();
    let horizon = bench.at + 20 * SECOND;
    bench.tick(Some(horizon));
    bench.at += SECOND;
    assert!(bench.release(1, pin));
    bench.at = horizon + millis(QUARANTINE) - 1;
    bench.tick(None);
    assert_eq!(resting(&bench), u64::from(SLOT));
    bench.wait(1);
    assert_eq!(resting(&bench), 0);
    bench.drain();
}

#[test]
fn a_value_under_two_pins_stays_until_the_last_one_is_over_and_a_current_one_stays_for_ever() {
    let mut bench = Bench::new(1);
    put(&mut bench, "a", 5);
    let short = bench.pin(1, &["a"], 10 * SECOND);
    let long = bench.pin(2, &["a"], 20 * SECOND);
    assert_ne!(short, long);
    put(&mut bench, "a", 6);
    bench.wait(10 * SECOND);
    assert_eq!((bench.shard.pins(), kept(&bench)), (1, u64::from(SLOT)));
    bench.wait(10 * SECOND);
    assert_eq!((bench.shard.pins(), kept(&bench), resting(&bench)), (0, 0, u64::from(SLOT)));
    let pin = bench.pin(1, &["a"], SECOND);
    assert_eq!(bench.shard.pinned(writer(1), pin).unwrap()[0].version, version(6));
    bench.wait(SECOND);
    assert_eq!(bench.current("a"), Some(version(6)), "a pin that is over takes nothing along");
    bench.drain();
}

#[test]
fn a_pin_names_the_version_of_each_key_and_what_it_could_not_keep() {
    let mut bench = Bench::new(1);
    put(&mut bench, "a", 5);
    put(&mut bench, "b", 6);
    let asked = bench.pin_request(1, &["a", "none", "b", "b"], SECOND);
    let until = LogTime(bench.at + SECOND);
    let pinned = bench.pin_as(asked).unwrap();
    let none = Err(PinMiss::NotFound);
    assert_eq!(pinned.keys, [Ok(version(5)), none, Ok(version(6)), Ok(version(6))]);
    assert_eq!(pinned.term, PinTerm { duration: Duration::from_secs(1), until });
    assert_eq!(bench.shard.pinned(writer(1), pinned.pin.unwrap()).unwrap().len(), 2);
    // Nothing to keep is no pin.
    let asked = bench.pin_request(1, &["none"], SECOND);
    let pinned = bench.pin_as(asked).unwrap();
    assert_eq!((pinned.pin, pinned.keys), (None, vec![none]));
    assert_eq!(bench.shard.pins(), 1);
    bench.drain();
}

#[test]
fn a_repeated_pin_request_gets_the_same_pin_with_the_same_end() {
    let mut bench = Bench::new(1);
    put(&mut bench, "a", 5);
    let asked = bench.pin_request(1, &["a"], 10 * SECOND);
    let first = bench.pin_as(asked.clone()).unwrap();
    put(&mut bench, "a", 6);
    bench.wait(9 * SECOND);
    assert_eq!(bench.pin_as(asked.clone()).unwrap(), first, "neither a later end nor the later version");
    assert_eq!(bench.shard.pins(), 1);
    bench.wait(SECOND);
    assert_eq!(bench.pin_as(asked.clone()).unwrap(), first, "and none that is over comes back");
    assert_eq!(bench.shard.pins(), 0);
    // Names of other kinds of requests, and one that may be forgotten.
    let keys = vec![DeleteKey { key: key("a"), expected: None }];
    let delete = ShardCommand::Delete { request: asked.request, namespace: SPACE, keys };
    assert_eq!(bench.apply(delete), ShardOutcome::Delete(Err(RequestRefusal::Taken)));
    let pin = bench.pin(1, &["a"], SECOND);
    let taken = Err(RenewRefusal::Request(RequestRefusal::Taken));
    assert_eq!(bench.renew_as(asked.request, 1, pin, SECOND), taken);
    bench.wait(millis(OUTCOME_KEPT));
    let stale = bench.pin_as(asked);
    assert!(matches!(stale, Err(PinRefusal::Request(RequestRefusal::Stale { .. }))), "{stale:?}");
    bench.drain();
}

#[test]
fn a_pin_that_is_renewed_lasts_longer_and_never_shorter() {
    let mut bench = Bench::new(1);
    put(&mut bench, "a", 5);
    let pin = bench.pin(1, &["a"], 10 * SECOND);
    bench.delete("a").unwrap();
    bench.wait(9 * SECOND);
    let request = bench.request();
    let term = PinTerm { duration: Duration::from_secs(10), until: LogTime(bench.at + 10 * SECOND) };
    assert_eq!(bench.renew_as(request, 1, pin, 10 * SECOND), Ok(term));
    bench.wait(5 * SECOND);
    assert_eq!(bench.renew_as(request, 1, pin, 10 * SECOND), Ok(term), "the same request renews once");
    assert_eq!(bench.renew(1, pin, SECOND).unwrap().until, term.until, "it never ends earlier than was said");
    bench.wait(5 * SECOND - 1);
    assert_eq!(kept(&bench), u64::from(SLOT));
    bench.wait(1);
    assert_eq!(kept(&bench), 0);
    assert_eq!(bench.renew(1, pin, SECOND), Err(RenewRefusal::UnknownPin { pin }), "what is over does not come back");
    bench.drain();
}

#[test]
fn only_its_owner_renews_or_releases_a_pin_and_it_is_released_once() {
    let mut bench = Bench::new(1);
    put(&mut bench, "a", 5);
    let pin = bench.pin(1, &["a"], 10 * SECOND);
    assert_eq!(bench.renew(2, pin, SECOND), Err(RenewRefusal::UnknownPin { pin }));
    assert!(!bench.release(2, pin));
    assert_eq!(bench.shard.pinned(writer(2), pin), None);
    assert_eq!(bench.shard.pins(), 1);
    assert!(bench.release(1, pin));
    assert!(!bench.release(1, pin));
    let never = PinId::new(GEN, pin.0.number + 1);
    assert!(!bench.release(1, never));
    assert_eq!((bench.shard.pins(), kept(&bench)), (0, 0));
    bench.drain();
}

#[test]
fn a_pin_that_would_be_too_long_too_wide_or_one_too_many_is_refused_by_name() {
    let mut bench = Bench::new(1);
    put(&mut bench, "a", 5);
    let longest = millis(PIN_MAX);
    for ms in [0, longest + 1] {
        let asked = bench.pin_request(1, &["a"], ms);
        let refused = PinRefusal::Duration { most: PIN_MAX, found: Duration::from_millis(ms) };
        assert_eq!(bench.pin_as(asked), Err(refused));
    }
    let mut asked = bench.pin_request(1, &["a"], SECOND);
    asked.duration += Duration::from_nanos(1);
    assert!(matches!(bench.pin_as(asked), Err(PinRefusal::Duration { .. })), "log time has milliseconds");
    for keys in [0, KEYS_PER_PIN_MAX + 1] {
        let asked = bench.pin_request(1, &vec!["a"; keys], SECOND);
        let refused = bench.pin_as(asked);
        assert!(matches!(refused, Err(PinRefusal::Keys { found, .. }) if found as usize == keys), "{refused:?}");
    }
    let pin = bench.pin(1, &["a"], longest);
    assert!(matches!(bench.renew(1, pin, longest + 1), Err(RenewRefusal::Duration { .. })));
    for _ in 1..PINS_PER_OWNER_MAX {
        bench.pin(1, &["a"], longest);
    }
    bench.wait(SECOND);
    let asked = bench.pin_request(1, &["a"], SECOND);
    let retry_after = PIN_MAX - Duration::from_secs(1);
    let limit = u32::try_from(PINS_PER_OWNER_MAX).unwrap();
    assert_eq!(bench.pin_as(asked.clone()), Err(PinRefusal::OwnersPins { limit, retry_after }));
    // Nothing was recorded: the same request is taken once there is room.
    assert!(bench.release(1, pin));
    assert!(bench.pin_as(asked).unwrap().pin.is_some());
    bench.wait(longest);
    assert_eq!(bench.shard.pins(), 0);
    bench.drain();
}

#[test]
fn a_shard_holds_only_so_many_pins() {
    let mut bench = Bench::new(1);
    put(&mut bench, "a", 5);
    let at = LogTime(bench.at);
    for number in 0..PINS_PER_SHARD_MAX {
        let owner = u8::try_from(number / PINS_PER_OWNER_MAX).unwrap();
        let asked = bench.pin_request(owner, &["a"], 60 * SECOND);
        // Unchecked: a check of each step would take long.
        let outcome = bench.shard.apply(at, ShardCommand::Pin(asked));
        assert!(matches!(outcome, ShardOutcome::Pin(Ok(_))), "{outcome:?}");
    }
    let asked = bench.pin_request(200, &["a"], SECOND);
    let limit = u32::try_from(PINS_PER_SHARD_MAX).unwrap();
    let retry_after = Duration::from_secs(60);
    assert_eq!(bench.pin_as(asked), Err(PinRefusal::ShardsPins { limit, retry_after }));
    bench.wait(60 * SECOND);
    assert_eq!(bench.shard.pins(), 0);
    bench.drain();
}

#[test]
fn a_pin_keeps_its_value_when_the_outcomes_of_its_grant_are_forgotten() {
    let mut bench = Bench::new(1);
    let grant = bench.grant(4);
    bench.commit(&grant, entry(1, "a", 5, Mode::Create)).unwrap();
    let pin = bench.pin(1, &["a"], millis(PIN_MAX));
    bench.delete("a").unwrap();
    bench.wait(TTL);
    bench.wait(millis(OUTCOME_KEPT));
    assert_eq!(bench.shard.grant(grant.id), None, "its outcomes are forgotten");
    let found = bench.shard.pinned(writer(1), pin).unwrap();
    assert_eq!((found[0].version, found[0].copies[0].slot), (version(5), SlotIndex(1)));
    assert!(bench.release(1, pin));
    bench.drain();
}

#[test]
fn a_copy_that_joins_later_is_under_the_pin_too_and_one_that_was_only_granted_is_not_kept() {
    let mut bench = Bench::new(2);
    let grant = bench.grant(1);
    let said = entry(0, "a", 5, Mode::Create);
    let one = vec![crate::bench::attested(1)];
    bench.publish_with(&grant, vec![said.clone()], one.clone())[0].unwrap();
    let pin = bench.pin(1, &["a"], 60 * SECOND);
    bench.publish_with(&grant, vec![said], vec![crate::bench::attested(2)])[0].unwrap();
    bench.delete("a").unwrap();
    assert_eq!(bench.shard.pinned(writer(1), pin).unwrap()[0].copies.len(), 2);
    let grant = bench.grant(1);
    bench.publish_with(&grant, vec![entry(0, "b", 5, Mode::Create)], one)[0].unwrap();
    bench.pin(1, &["b"], 60 * SECOND);
    bench.delete("b").unwrap();
    assert_eq!((kept(&bench), resting(&bench)), (3 * u64::from(SLOT), u64::from(SLOT)));
    bench.drain();
}

#[test]
fn memory_that_is_lost_is_lost_for_pins_too() {
    let mut bench = Bench::new(2);
    put(&mut bench, "a", 5);
    put(&mut bench, "b", 5);
    let pin = bench.pin(1, &["a", "b"], 60 * SECOND);
    bench.delete("a").unwrap();
    bench.tell(vec![life(1, 2, true)]);
    let found = bench.shard.pinned(writer(1), pin).unwrap();
    let nodes: Vec<_> = found.iter().flat_map(|it| &it.copies).map(|copy| copy.region.node).collect();
    assert_eq!(nodes, [NodeId(2), NodeId(2)]);
    bench.tell(vec![life(2, 2, true)]);
    assert_eq!(bench.current("b"), None);
    let left = bench.shard.pinned(writer(1), pin).unwrap();
    assert!(left.iter().all(|it| it.copies.is_empty()));
    assert_eq!(bench.shard.pins(), 1, "the pin itself ends at its time");
    bench.drain();
}

#[test]
fn a_new_generation_has_no_pins() {
    let mut bench = Bench::new(1);
    put(&mut bench, "a", 5);
    let pin = bench.pin(1, &["a"], 60 * SECOND);
    bench.delete("a").unwrap();
    let later = Generation(GEN.0 + 1);
    let number = FeedNumber::new(later, 1);
    let entries = vec![FeedEntry { number, change: FeedChange::NewGeneration }];
    let slice = FeedSlice { from: bench.shard.feed_position(), entries, to: number };
    bench.apply(ShardCommand::ApplyFeed(slice));
    assert_eq!((bench.shard.pins(), bench.shard.pinned(writer(1), pin)), (0, None));
    assert_eq!(bench.shard.space().total.bytes, 0);
    assert_eq!(bench.renew(1, pin, SECOND), Err(RenewRefusal::UnknownPin { pin }));
}

#[test]
fn an_extent_with_a_pinned_slot_is_not_given_back() {
    let mut bench = Bench::new(1);
    put(&mut bench, "a", 5);
    let copy = bench.shard.resolve(SPACE, &key("a")).unwrap().copies[0];
    bench.pin(1, &["a"], 60 * SECOND);
    bench.delete("a").unwrap();
    bench.wait(30 * SECOND);
    let (extent, lend) = (crate::bench::extent(1, copy.extent.0), LendNumber::new(GEN, 1));
    let refused = bench.apply(ShardCommand::DropExtent { extent, lend });
    assert!(matches!(refused, ShardOutcome::DropExtent(Err(_))), "{refused:?}");
    assert_eq!(bench.shard.idle_extents().count(), EXTENTS as usize - 1);
    // A later lending says that its memory is somebody else's by now: nothing of ours is there.
    bench.tell(vec![lent(1, copy.extent.0, 1, 2)]);
    assert_eq!(kept(&bench), 0);
    bench.drain();
}

#[test]
fn a_key_of_another_shard_is_not_pinned() {
    let policy = quarry_meta_state::directory::Policy::new(quarry_wire::grant::Class::Cache, 1);
    let mut bench = Bench::with(1, policy, 2);
    let other = (0..).map(|number| key(&format!("k{number}"))).find(|key| key.shard(SPACE, 2).0 == 2).unwrap();
    let mut asked = bench.pin_request(1, &[], SECOND);
    asked.keys.push(other);
    let pinned = bench.pin_as(asked).unwrap();
    assert!(matches!(pinned.keys[0], Err(PinMiss::WrongShard { .. })), "{pinned:?}");
    assert_eq!((pinned.pin, bench.shard.pins()), (None, 0));
}
