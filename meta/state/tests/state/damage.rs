//! Copies that are not what was committed.

use crate::bench::{Bench, SLOT, SPACE, attested, entry, key, region, version};
use quarry_meta_state::{
    Shard,
    shard::{CheckedCopy, CommitEntry, CopyRefusal, DroppedCopy, Mode, ShardCommand, ShardOutcome},
};
use quarry_wire::{
    frame::FrameHeader,
    grant::Grant,
    ids::NodeId,
    limits::QUARANTINE,
    units::{Offset, millis},
};

/// What the holder at `node` says of the copy of `entry`: a whole frame, or none.
fn copy(bench: &Bench, grant: &Grant, entry: &CommitEntry, node: u64, found: Option<FrameHeader>) -> CheckedCopy {
    let holder = grant.holder(NodeId(node)).unwrap();
    assert!(bench.shard.resolve(SPACE, &entry.key).is_some());
    CheckedCopy {
        namespace: SPACE,
        key: entry.key.clone(),
        version: entry.version,
        region: holder.region,
        incarnation: holder.incarnation,
        offset: grant.offset(holder, entry.slot).unwrap(),
        found,
    }
}

fn frame(entry: &CommitEntry) -> FrameHeader {
    FrameHeader {
        namespace: SPACE,
        key: entry.key.clone(),
        version: entry.version,
        kind: entry.kind,
        payload_bytes: entry.payload_bytes,
        payload_crc: entry.payload_crc,
    }
}

fn drop_copy(bench: &mut Bench, asked: CheckedCopy) -> Result<DroppedCopy, CopyRefusal> {
    let expected = bench.shard.check_copy(&asked);
    let ShardOutcome::DropCopy(outcome) = bench.apply(ShardCommand::DropCopy(asked)) else { unreachable!() };
    assert_eq!(outcome.map(drop), expected, "what the leader is told beforehand");
    outcome
}

#[test]
fn a_damaged_copy_goes_and_rests_like_any_other_and_with_the_last_one_its_value_is_gone() {
    let mut bench = Bench::new(2);
    let free = bench.free_bytes();
    let grant = bench.grant(2);
    let (one, other) = (entry(0, "one", 5, Mode::Create), entry(1, "other", 5, Mode::Create));
    bench.commit(&grant, one.clone()).unwrap();
    bench.commit(&grant, other.clone()).unwrap();
    bench.seal(&grant, 2);
    let horizon = bench.tick(Some(bench.at + 3_000));
    let asked = copy(&bench, &grant, &one, 1, None);
    assert_eq!(drop_copy(&mut bench, asked.clone()), Ok(DroppedCopy { left: 1 }));
    let left: Vec<_> = bench.shard.resolve(SPACE, &one.key).unwrap().copies;
    assert_eq!(left.iter().map(|copy| copy.region).collect::<Vec<_>>(), [region(2)]);
    assert_eq!(drop_copy(&mut bench, asked), Err(CopyRefusal::NotThere), "there is none any more");
    // A whole frame of something else is damage too.
    let mut last = copy(&bench, &grant, &one, 2, Some(frame(&other)));
    bench.shard = Shard::decode(&bench.shard.encode()).unwrap();
    assert_eq!(drop_copy(&mut bench, last.clone()), Ok(DroppedCopy { left: 0 }));
    assert_eq!(bench.current("one"), None);
    assert_eq!(bench.current("other"), Some(version(5)), "its neighbour is untouched");
    assert_eq!(drop_copy(&mut bench, last.clone()), Err(CopyRefusal::NotCurrent));
    last.key = key("another");
    assert_eq!(drop_copy(&mut bench, last), Err(CopyRefusal::NotCurrent));

    // Leases on the places hold.
    let kept = 2 * u64::from(SLOT);
    bench.at = horizon.0 + millis(QUARANTINE) - 1;
    bench.tick(None);
    assert_eq!(bench.free_bytes(), free - 2 * kept);
    bench.wait(1);
    assert_eq!(bench.free_bytes(), free - kept);
    // The key can be created again; what was said of the old slot stays said.
    assert!(bench.commit(&grant, one).is_ok());
    assert_eq!(bench.current("one"), None);
    let again = bench.grant(1);
    bench.commit(&again, entry(0, "one", 4, Mode::Create)).unwrap();
}

#[test]
fn whatever_anybody_complains_of_an_intact_copy_stays() {
    let mut bench = Bench::new(2);
    let grant = bench.grant(2);
    let (one, other) = (entry(0, "one", 5, Mode::Create), entry(1, "other", 5, Mode::Create));
    bench.commit(&grant, one.clone()).unwrap();
    bench.commit(&grant, other.clone()).unwrap();
    let asked = copy(&bench, &grant, &one, 1, Some(frame(&one)));
    let mut refused = vec![(asked.clone(), CopyRefusal::Intact)];
    // The holder was sent to another place, another life, or to look for another version.
    let neighbour = copy(&bench, &grant, &other, 1, None);
    refused.push((CheckedCopy { offset: neighbour.offset, ..asked.clone() }, CopyRefusal::NotThere));
    refused.push((
        CheckedCopy { offset: Offset(asked.offset.0 + 64), found: None, ..asked.clone() },
        CopyRefusal::NotThere,
    ));
    refused.push((CheckedCopy { region: region(3), found: None, ..asked.clone() }, CopyRefusal::NotThere));
    let mut life = CheckedCopy { found: None, ..asked.clone() };
    life.incarnation.0.number += 1;
    refused.push((life, CopyRefusal::NotThere));
    refused.push((CheckedCopy { version: version(4), found: None, ..asked.clone() }, CopyRefusal::NotCurrent));
    let before = bench.shard.resolve(SPACE, &one.key);
    for (asked, expected) in refused {
        assert_eq!(drop_copy(&mut bench, asked), Err(expected));
        assert_eq!(bench.shard.resolve(SPACE, &one.key), before);
    }
    // Each part of a frame counts.
    let whole = frame(&one);
    let wrong = [
        FrameHeader { key: key("two"), ..whole.clone() },
        FrameHeader { version: version(6), ..whole.clone() },
        FrameHeader { payload_bytes: whole.payload_bytes + 1, ..whole.clone() },
        FrameHeader { payload_crc: whole.payload_crc ^ 1, ..whole.clone() },
    ];
    for found in wrong {
        let mut bench = Bench::new(2);
        let grant = bench.grant(2);
        bench.commit(&grant, one.clone()).unwrap();
        let asked = copy(&bench, &grant, &one, 1, Some(found));
        assert_eq!(drop_copy(&mut bench, asked), Ok(DroppedCopy { left: 1 }));
    }
}

#[test]
fn a_damaged_copy_of_a_pinned_value_stays_until_its_pin_has_ended() {
    let mut bench = Bench::new(2);
    let grant = bench.grant(1);
    let one = entry(0, "one", 5, Mode::Create);
    bench.commit(&grant, one.clone()).unwrap();
    let pin = bench.pin(1, &["one"], 60_000);
    let asked = copy(&bench, &grant, &one, 1, None);
    assert_eq!(drop_copy(&mut bench, asked.clone()), Err(CopyRefusal::Pinned));
    assert!(bench.release(1, pin));
    assert_eq!(drop_copy(&mut bench, asked), Ok(DroppedCopy { left: 1 }));
}

#[test]
fn what_a_holder_signed_before_it_gave_a_copy_up_does_not_bring_the_copy_back() {
    let mut bench = Bench::new(2);
    let grant = bench.grant(1);
    let one = entry(0, "one", 5, Mode::Create);
    bench.commit(&grant, one.clone()).unwrap();
    let asked = copy(&bench, &grant, &one, 1, None);
    drop_copy(&mut bench, asked).unwrap();
    // The same statements arrive once more, late.
    let outcome = bench.publish_with(&grant, vec![one.clone()], vec![attested(1), attested(2)]);
    assert!(outcome[0].is_ok(), "one outcome: {outcome:?}");
    let left = bench.shard.resolve(SPACE, &one.key).unwrap().copies;
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].region, region(2));
}
