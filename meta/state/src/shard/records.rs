//! Records: what became of each slot of a slab, in a row by slot.
//!
//! Slots are mostly answered in their order, so one that is new comes last.

use super::{CommitEntry, CommitOutcome};
use quarry_wire::{frame::FrameKind, ids::SlotIndex, key::Key, version::Version};
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{MapAccess, Visitor},
    ser::SerializeMap as _,
};
use std::{fmt, ops::Index};

/// What became of one slot of a grant.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) key: Key,
    pub(super) version: Version,
    pub(super) kind: FrameKind,
    pub(super) payload_bytes: u64,
    pub(super) payload_crc: u32,
    pub(super) outcome: CommitOutcome,
}

impl Record {
    pub(super) fn of(entry: &CommitEntry, outcome: CommitOutcome) -> Self {
        let CommitEntry { key, version, kind, payload_bytes, payload_crc, .. } = entry;
        Self {
            key: key.clone(),
            version: *version,
            kind: *kind,
            payload_bytes: *payload_bytes,
            payload_crc: *payload_crc,
            outcome,
        }
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
pub(super) struct Records(Vec<(SlotIndex, Record)>);

impl Records {
    fn find(&self, slot: SlotIndex) -> Result<usize, usize> {
        // Where it is while no slot below it was left out.
        match self.0.get(slot.0 as usize) {
            Some((found, _)) if *found == slot => Ok(slot.0 as usize),
            _ => self.0.binary_search_by_key(&slot, |(found, _)| *found),
        }
    }
    pub(super) fn get(&self, slot: &SlotIndex) -> Option<&Record> {
        self.find(*slot).ok().map(|at| &self.0[at].1)
    }
    pub(super) fn insert(&mut self, slot: SlotIndex, record: Record) {
        match self.find(slot) {
            Ok(at) => self.0[at].1 = record,
            Err(at) => self.0.insert(at, (slot, record)),
        }
    }
    pub(super) fn iter(&self) -> impl Iterator<Item = (&SlotIndex, &Record)> {
        self.0.iter().map(|(slot, record)| (slot, record))
    }
    /// Keeps the records of those slots.
    pub(super) fn retain(&mut self, wanted: impl Fn(&SlotIndex) -> bool) {
        self.0.retain(|(slot, _)| wanted(slot));
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
        for (slot, record) in &self.0 {
            map.serialize_entry(slot, record)?;
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
                while let Some((slot, record)) = entries.next_entry()? {
                    records.insert(slot, record);
                }
                records.shrink();
                Ok(records)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
