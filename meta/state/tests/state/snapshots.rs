//! Snapshots of a shard: the bytes of a state are the same in every build, whatever holds it in memory.

use crate::bench::{Bench, SPACE, attested, entry, key};
use quarry_meta_state::{
    Shard,
    shard::{CommitOutcome, CommitRefusal, Committed, Mode},
};
use quarry_wire::{ids::SlotIndex, key::Key, units::SlotCount};
use std::io;

/// A shard in which a little of everything has happened.
fn told() -> Bench {
    let mut bench = Bench::new(3);
    let first = bench.grant(16);
    let entries = (0..14).map(|slot| entry(slot, &format!("key-{slot}"), 10 + u64::from(slot), Mode::Create)).collect();
    let outcomes = bench.publish_with(&first, entries, vec![attested(1), attested(2)]);
    assert!(outcomes.iter().all(|outcome| *outcome == Ok(Committed::Applied)));
    bench.seal(&first, 15);
    let second = bench.grant(8);
    let outcomes: [CommitOutcome; 4] = [
        bench.commit(&second, entry(3, "key-3", 100, Mode::Replace)),
        bench.commit(&second, entry(1, "key-4", 5, Mode::Replace)),
        bench.commit(&second, entry(0, "key-5", 15, Mode::Replace)),
        bench.commit(&second, entry(2, "key-6", 200, Mode::Create)),
    ];
    assert_eq!(outcomes[0], Ok(Committed::Applied));
    assert!(matches!(outcomes[1], Err(CommitRefusal::StaleVersion { .. })));
    assert_eq!(outcomes[2], Ok(Committed::AlreadyCurrent));
    assert!(matches!(outcomes[3], Err(CommitRefusal::Exists { .. })));
    bench.pin(4, &["key-7", "key-8", "none"], 300_000);
    bench.delete("key-7").unwrap();
    bench.delete("key-9").unwrap();
    bench.tick(Some(4_000));
    // The first grant is forgotten, the third one still open.
    bench.wait(150_000);
    let third = bench.grant(16);
    assert_eq!(third.slots, SlotCount(16));
    assert_eq!(bench.commit(&third, entry(15, "key-10", 300, Mode::Replace)), Ok(Committed::Applied));
    bench
}

#[test]
fn the_bytes_of_a_known_state_never_change_within_a_version() {
    let bench = told();
    // Written down once: another hash means that no snapshot of an earlier build can be read. Then the version must change too.
    assert_eq!(hex::encode(bench.shard.hash()), RECORDED);
}
const RECORDED: &str = "9635f006c1fa01045448d6981f8209c0ab6b263e022bb092fbfee78e9b78d27c";

#[test]
fn a_state_comes_back_from_its_bytes_and_goes_on_alike() {
    let mut bench = told();
    let mut back = Shard::decode(&bench.shard.encode()).unwrap();
    assert_eq!(back, bench.shard);
    let grant = bench.grant(4);
    assert_ne!(back, bench.shard);
    back = bench.shard.clone();
    assert_eq!(bench.commit(&grant, entry(2, "new", 400, Mode::Create)), Ok(Committed::Applied));
    assert!(!back.has(SPACE, &key("new")) && bench.shard.has(SPACE, &key("new")));
    assert_eq!(bench.shard.place_of(SPACE, &key("new")).unwrap().slot, SlotIndex(2));
}

#[test]
fn a_frozen_copy_stays_as_it_was_whatever_is_applied_afterwards() {
    let mut bench = told();
    let (frozen, bytes) = (bench.shard.clone(), bench.shard.encode());
    let grant = bench.grant(16);
    let entries = (0..16).map(|slot| entry(slot, &format!("key-{slot}"), 1_000, Mode::Replace)).collect();
    bench.publish_with(&grant, entries, vec![attested(1), attested(2), attested(3)]);
    bench.delete("key-11").unwrap();
    bench.drain();
    assert_ne!(frozen, bench.shard);
    assert_eq!(frozen.encode(), bytes);
    frozen.check().unwrap();
    assert_eq!(Shard::decode(&bytes).unwrap(), frozen);
}

/// A disk that takes or gives few bytes at a time and fails after so many.
struct Slow {
    bytes: Vec<u8>,
    at: usize,
    works: usize,
}

impl Slow {
    fn step(&self, asked: usize) -> io::Result<usize> {
        let most = self.works.saturating_sub(self.at).min(asked).min(7);
        if most == 0 && asked > 0 { Err(io::Error::other("the disk is gone")) } else { Ok(most) }
    }
}

impl io::Write for Slow {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = self.step(bytes.len())?;
        self.bytes.extend_from_slice(&bytes[..taken]);
        self.at += taken;
        Ok(taken)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl io::Read for Slow {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let given = self.step(out.len().min(self.bytes.len() - self.at))?;
        out[..given].copy_from_slice(&self.bytes[self.at..self.at + given]);
        self.at += given;
        Ok(given)
    }
}

#[test]
fn a_state_goes_piece_by_piece_and_an_error_of_the_disk_is_told() {
    let bench = told();
    let bytes = bench.shard.encode();
    let mut disk = Slow { bytes: Vec::new(), at: 0, works: usize::MAX };
    bench.shard.encode_to(&mut disk).unwrap();
    assert_eq!(disk.bytes, bytes);
    disk.at = 0;
    assert_eq!(Shard::decode_from(disk).unwrap(), bench.shard);
    for works in [0, 3, 100, bytes.len() - 1] {
        let mut disk = Slow { bytes: Vec::new(), at: 0, works };
        assert_eq!(bench.shard.encode_to(&mut disk).unwrap_err().to_string(), "the disk is gone");
        let disk = Slow { bytes: bytes.clone(), at: 0, works };
        let refused = Shard::decode_from(disk).unwrap_err();
        assert!(refused.to_string().contains("the disk is gone"), "{refused}");
    }
    for kept in 0..bytes.len() {
        assert!(Shard::decode(&bytes[..kept]).is_err(), "{kept}");
    }
}

#[test]
fn a_key_is_kept_once_also_in_a_state_that_was_read() {
    let back = Shard::decode(&told().shard.encode()).unwrap();
    let listed: Vec<*const u8> = back.list(SPACE, b"", None).map(|it| it.key.as_bytes().as_ptr()).collect();
    let resolved = |it: &Key| back.resolve(SPACE, it).unwrap().key.as_bytes().as_ptr();
    let own: Vec<*const u8> = back.list(SPACE, b"", None).map(|it| resolved(it.key)).collect();
    assert_eq!(listed, own);
}
