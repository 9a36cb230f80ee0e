//! The feed at a shard: order, repeats, generations.

use crate::bench::{Bench, EXTENTS, GEN, entry, key, lent, life, region};
use quarry_meta_state::{
    directory::{FeedChange, FeedEntry, FeedSlice},
    shard::{Committed, FeedRefusal, Mode, ShardCommand, ShardOutcome},
};
use quarry_wire::ids::{FeedNumber, Generation};

#[test]
fn a_slice_after_a_gap_is_refused() {
    let mut bench = Bench::new(1);
    let position = bench.shard.feed_position();
    let _missed = bench.slice(vec![life(1, 2, true)]);
    let next = bench.slice(vec![life(1, 3, true)]);
    let gap = FeedRefusal::Gap { position, found: next.from };
    assert_eq!(bench.apply(ShardCommand::ApplyFeed(next)), ShardOutcome::Feed(Err(gap)));
    assert_eq!(bench.shard.feed_position(), position);
}

#[test]
fn a_slice_that_does_not_ascend_is_refused() {
    let mut bench = Bench::new(1);
    let mut slice = bench.slice(vec![life(1, 2, true), life(1, 3, true)]);
    slice.entries.swap(0, 1);
    let found = slice.entries[1].number;
    let refused = FeedRefusal::OutOfOrder { found };
    assert_eq!(bench.apply(ShardCommand::ApplyFeed(slice.clone())), ShardOutcome::Feed(Err(refused)));
    slice.entries.swap(0, 1);
    slice.to = slice.entries[0].number;
    let refused = FeedRefusal::OutOfOrder { found: slice.entries[1].number };
    assert_eq!(bench.apply(ShardCommand::ApplyFeed(slice)), ShardOutcome::Feed(Err(refused)));
}

#[test]
fn a_repeated_slice_changes_nothing() {
    let mut bench = Bench::new(1);
    let slice = bench.slice(vec![life(1, 2, true)]);
    bench.apply(ShardCommand::ApplyFeed(slice.clone()));
    let grant = bench.grant(1);
    assert_eq!(bench.commit(&grant, entry(0, "a", 5, Mode::Create)), Ok(Committed::Applied));
    let hash = bench.shard.hash();
    let to = slice.to;
    assert_eq!(bench.apply(ShardCommand::ApplyFeed(slice)), ShardOutcome::Feed(Ok(to)));
    assert_eq!(bench.shard.hash(), hash);
}

#[test]
fn a_new_generation_voids_memory_and_what_the_old_one_still_says_is_ignored() {
    let mut bench = Bench::new(1);
    let grant = bench.grant(2);
    assert_eq!(bench.commit(&grant, entry(0, "a", 5, Mode::Create)), Ok(Committed::Applied));
    let from = bench.shard.feed_position();
    let next = Generation(2);
    let number = FeedNumber::new(next, 1);
    let slice = FeedSlice { from, entries: vec![FeedEntry { number, change: FeedChange::NewGeneration }], to: number };
    assert_eq!(bench.apply(ShardCommand::ApplyFeed(slice)), ShardOutcome::Feed(Ok(number)));
    assert_eq!(bench.shard.generation(), next);
    assert_eq!(bench.shard.version(crate::bench::SPACE, &key("a")), None);
    assert_eq!(bench.shard.space().total.extents, 0);
    assert!(!bench.shard.region(region(1)).unwrap().up);
    // A slice of the old generation comes late.
    let late = bench.slice(vec![life(1, 9, true), lent(1, 0, 1, 9)]);
    assert_eq!(late.to.0.generation, GEN);
    assert_eq!(bench.apply(ShardCommand::ApplyFeed(late)), ShardOutcome::Feed(Ok(number)));
    assert_eq!(bench.shard.space().total.extents, 0);
    bench.drain();
}

#[test]
fn an_extent_lent_to_another_shard_or_beyond_its_region_is_not_taken() {
    let mut bench = Bench::new(1);
    bench.tell(vec![lent(2, 0, 2, 1), lent(1, EXTENTS, 1, 1)]);
    assert_eq!(bench.shard.space().total.extents, u64::from(EXTENTS));
}
