//! Records: what became of each slot of a slab, in a row by slot.
//!
//! Slots are mostly answered in their order, so one that is new comes last.

use super::{CommitEntry, CommitOutcome, Committed, Mode};
use quarry_wire::{frame::FrameKind, ids::SlotIndex, key::Key, limits::SLOTS_PER_SLAB_MAX, version::Version};
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, MapAccess, Visitor},
    ser::SerializeMap as _,
};
use std::{fmt, ops::Index};

/// What became of one slot of a grant. There is one for every value, so it is small.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Record {
    pub(super) key: Key,
    pub(super) version: Version,
    pub(super) payload_bytes: u64,
    /// None for what most slots come to: [`Committed::Applied`].
    other: Option<Box<CommitOutcome>>,
    pub(super) payload_crc: u32,
    slot: u16,
    pub(super) kind: FrameKind,
}

const _: () = assert!(SLOTS_PER_SLAB_MAX <= 1 << 16);
// Costs of a value: docs/performance-meta.md tells them.
const _: () = assert!(size_of::<Record>() == 56);

/// A record as it is written, under its slot.
#[derive(Serialize, Deserialize)]
struct Written<K> {
    key: K,
    version: Version,
    kind: FrameKind,
    payload_bytes: u64,
    payload_crc: u32,
    outcome: CommitOutcome,
}

impl Record {
    /// What became of the slot of `entry`, which the slab must have.
    pub(super) fn of(entry: &CommitEntry, outcome: CommitOutcome) -> Self {
        let CommitEntry { slot, key, version, kind, payload_bytes, payload_crc, .. } = entry;
        Self {
            key: key.clone(),
            version: *version,
            payload_bytes: *payload_bytes,
            other: (outcome != Ok(Committed::Applied)).then(|| Box::new(outcome)),
            payload_crc: *payload_crc,
            slot: u16::try_from(slot.0).expect("a slab has no more slots than that"),
            kind: *kind,
        }
    }
    pub(super) fn outcome(&self) -> CommitOutcome {
        self.other.as_deref().copied().unwrap_or(Ok(Committed::Applied))
    }
    const fn slot(&self) -> SlotIndex {
        SlotIndex(self.slot as u32)
    }
    pub(super) fn is_same_frame(&self, entry: &CommitEntry) -> bool {
        self.key == entry.key
            && self.version == entry.version
            && self.kind == entry.kind
            && self.payload_bytes == entry.payload_bytes
            && self.payload_crc == entry.payload_crc
    }
}

/// The records of a slab. Written as a map from slot to record.
#[derive(Clone, PartialEq, Eq, Default)]
pub(super) struct Records(Vec<Record>);

impl Records {
    fn find(&self, slot: SlotIndex) -> Result<usize, usize> {
        // Where it is while no slot below it was left out.
        match self.0.get(slot.0 as usize) {
            Some(found) if found.slot() == slot => Ok(slot.0 as usize),
            _ => self.0.binary_search_by_key(&slot, Record::slot),
        }
    }
    pub(super) fn get(&self, slot: &SlotIndex) -> Option<&Record> {
        self.find(*slot).ok().map(|at| &self.0[at])
    }
    pub(super) fn insert(&mut self, record: Record) {
        match self.find(record.slot()) {
            Ok(at) => self.0[at] = record,
            Err(at) => self.0.insert(at, record),
        }
    }
    pub(super) fn iter(&self) -> impl Iterator<Item = (SlotIndex, &Record)> {
        self.0.iter().map(|record| (record.slot(), record))
    }
    /// Keeps the records of those slots.
    pub(super) fn retain(&mut self, wanted: impl Fn(SlotIndex) -> bool) {
        self.0.retain(|record| wanted(record.slot()));
        self.0.shrink_to_fit();
    }
    /// No more will come, but for few.
    pub(super) fn shrink(&mut self) {
        self.0.shrink_to_fit();
    }
}

impl Index<&SlotIndex> for Records {
    type Output = Record;
    fn index(&self, slot: &SlotIndex) -> &Record {
        self.get(slot).expect("whoever names a record knows that it is there")
    }
}

impl fmt::Debug for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl Serialize for Records {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (slot, record) in self.iter() {
            let Record { key, version, kind, payload_bytes, payload_crc, .. } = record;
            let (version, kind, payload_bytes, payload_crc) = (*version, *kind, *payload_bytes, *payload_crc);
            let written = Written { key, version, kind, payload_bytes, payload_crc, outcome: record.outcome() };
            map.serialize_entry(&slot, &written)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Records {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Records;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "records by slot")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Records, A::Error> {
                let mut records = Records::default();
                while let Some((slot, written)) = entries.next_entry::<SlotIndex, Written<Key>>()? {
                    if slot.0 >= SLOTS_PER_SLAB_MAX {
                        return Err(de::Error::custom(format_args!("no slab has a {slot}")));
                    }
                    let Written { key, version, kind, payload_bytes, payload_crc, outcome } = written;
                    let mode = Mode::Replace;
                    let entry = CommitEntry { slot, key, version, kind, payload_bytes, payload_crc, mode };
                    records.insert(Record::of(&entry, outcome));
                }
                records.shrink();
                Ok(records)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
