//! Every key and value of the log database, in one place.
//!
//! ```text
//! tree "log"   key    group u32 BE | index u64 BE | part u8          an entry is cut into parts of at most 4 KiB
//!              value  part 0: version u8 = 1 | parts u8 | bytes...   the bytes of all parts in order are
//!                     others: bytes...                               postcard(LogRecord)
//! tree "meta"  key    group u32 BE | kind u8
//!              value  version u8 = 1 | postcard(record of the kind)
//!                     kind 1 vote       VoteRecord
//!                     kind 2 committed  PlaceRecord
//!                     kind 3 purged     PlaceRecord
//! ```
//!
//! Keys are big-endian because the database sorts bytes. The records are ours and not openraft's, so that a new
//! openraft does not change what is on disk.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use bytes::Bytes;
use openraft::{BasicNode, EntryPayload, Membership};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::ids::GroupId;
use crate::machine::MAX_COMMAND_BYTES;
use crate::types::{Command, Entry, LogId, StoredMembership, Vote, log_id, term_of};

/// The version byte in front of every value.
const VALUE_VERSION: u8 = 1;

/// The longest value. The database moves pages of more than 128 KiB to files of their own, which it never syncs, and
/// a page holds up to 16 values before it is split.
const PART_BYTES: usize = 4 * 1024;
const PAGE_VALUES_MAX: usize = 24;
const PAGE_BYTES_MAX: usize = 128 * 1024;
const _: () = assert!(PAGE_VALUES_MAX * (PART_BYTES + 64) < PAGE_BYTES_MAX);
// The number of parts is stored in one byte, and leaves room for the fields around a command.
const _: () = assert!((MAX_COMMAND_BYTES + 1024) / PART_BYTES < u8::MAX as usize);

/// Kinds of group metadata.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
pub(crate) enum MetaKind {
    Vote = 1,
    Committed = 2,
    Purged = 3,
}

/// Every group that has a vote, a log or a purged one in these keys of the two trees.
pub(crate) fn group_of(key: &[u8]) -> io::Result<GroupId> {
    let group = key.first_chunk::<4>().ok_or_else(|| damaged("key", &"too short"))?;
    Ok(GroupId(u32::from_be_bytes(*group)))
}

/// Before every key of the groups from `group` on, and after every key there is.
pub(crate) fn from_group(group: u32) -> std::ops::RangeInclusive<[u8; 13]> {
    log_key(GroupId(group), 0, 0)..=[u8::MAX; 13]
}

#[derive(Serialize, Deserialize)]
pub(crate) struct VoteRecord {
    term: u64,
    node: u64,
    committed: bool,
}

impl From<&Vote> for VoteRecord {
    fn from(vote: &Vote) -> Self {
        Self { term: vote.leader_id.term, node: vote.leader_id.voted_for, committed: vote.committed }
    }
}

impl From<VoteRecord> for Vote {
    fn from(record: VoteRecord) -> Self {
        if record.committed {
            Self::new_committed(record.term, record.node)
        } else {
            Self::new(record.term, record.node)
        }
    }
}

/// A place in a log: the term and index of one entry.
#[derive(Serialize, Deserialize)]
pub(crate) struct PlaceRecord {
    term: u64,
    index: u64,
}

impl From<&LogId> for PlaceRecord {
    fn from(id: &LogId) -> Self {
        Self { term: term_of(id), index: id.index() }
    }
}

impl From<PlaceRecord> for LogId {
    fn from(record: PlaceRecord) -> Self {
        log_id(record.term, record.index)
    }
}

#[derive(Serialize, Deserialize)]
struct LogRecord {
    term: u64,
    payload: PayloadRecord,
}

#[derive(Serialize, Deserialize)]
enum PayloadRecord {
    Blank,
    Command(Bytes),
    Members(MembersRecord),
}

/// Voters (two sets while a change is under way) and the addresses of all nodes, learners included.
#[derive(Serialize, Deserialize)]
pub(crate) struct MembersRecord {
    configs: Vec<BTreeSet<u64>>,
    nodes: BTreeMap<u64, String>,
}

impl From<&Membership<u64, BasicNode>> for MembersRecord {
    fn from(members: &Membership<u64, BasicNode>) -> Self {
        Self {
            configs: members.get_joint_config().clone(),
            nodes: members.nodes().map(|(id, node)| (*id, node.addr.clone())).collect(),
        }
    }
}

impl TryFrom<MembersRecord> for Membership<u64, BasicNode> {
    type Error = io::Error;

    fn try_from(record: MembersRecord) -> Result<Self, io::Error> {
        let nodes: BTreeMap<u64, BasicNode> =
            record.nodes.into_iter().map(|(id, addr)| (id, BasicNode { addr })).collect();
        if record.configs.is_empty() && nodes.is_empty() {
            return Ok(Self::default());
        }
        Self::new(record.configs, nodes).map_err(|error| damaged("members", &error))
    }
}

/// What a snapshot says about itself, besides the state.
#[derive(Serialize, Deserialize)]
pub(crate) struct SnapshotRecord {
    pub(crate) last: Option<PlaceRecord>,
    pub(crate) members_at: Option<PlaceRecord>,
    pub(crate) members: MembersRecord,
}

impl SnapshotRecord {
    pub(crate) fn new(last: Option<&LogId>, members: &StoredMembership) -> Self {
        Self {
            last: last.map(PlaceRecord::from),
            members_at: members.log_id().as_ref().map(PlaceRecord::from),
            members: members.membership().into(),
        }
    }

    pub(crate) fn into_parts(self) -> io::Result<(Option<LogId>, StoredMembership)> {
        let members = StoredMembership::new(self.members_at.map(LogId::from), self.members.try_into()?);
        Ok((self.last.map(LogId::from), members))
    }
}

fn damaged(what: &str, error: &dyn std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{what} on disk does not decode: {error}"))
}

/// Sorts before every part of the entry.
pub(crate) fn log_key(group: GroupId, index: u64, part: u8) -> [u8; 13] {
    let mut key = [0; 13];
    key[..4].copy_from_slice(&group.0.to_be_bytes());
    key[4..12].copy_from_slice(&index.to_be_bytes());
    key[12] = part;
    key
}

/// The group and the index in a key of the log.
pub(crate) fn group_and_index(key: &[u8]) -> io::Result<(GroupId, u64)> {
    let group = key.first_chunk::<4>().ok_or_else(|| damaged("log key", &"too short"))?;
    Ok((GroupId(u32::from_be_bytes(*group)), index_of(key)?))
}

/// The index in a key of the log.
pub(crate) fn index_of(key: &[u8]) -> io::Result<u64> {
    let bytes: [u8; 8] =
        key.get(4..12).and_then(|bytes| bytes.try_into().ok()).ok_or_else(|| damaged("log key", &"too short"))?;
    Ok(u64::from_be_bytes(bytes))
}

pub(crate) fn meta_key(group: GroupId, kind: MetaKind) -> [u8; 5] {
    let mut key = [0; 5];
    key[..4].copy_from_slice(&group.0.to_be_bytes());
    key[4] = kind as u8;
    key
}

pub(crate) fn encode_meta<T: Serialize>(record: &T) -> io::Result<Vec<u8>> {
    postcard::to_extend(record, vec![VALUE_VERSION]).map_err(io::Error::other)
}

pub(crate) fn decode_meta<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    let [VALUE_VERSION, record @ ..] = bytes else {
        return Err(damaged("metadata", &format!("version {:?}, expected {VALUE_VERSION}", bytes.first())));
    };
    postcard::from_bytes(record).map_err(|error| damaged("metadata", &error))
}

/// The values of an entry's parts, in order.
pub(crate) fn encode_entry(entry: &Entry) -> io::Result<Vec<Vec<u8>>> {
    let payload = match &entry.payload {
        EntryPayload::Blank => PayloadRecord::Blank,
        EntryPayload::Normal(Command(bytes)) => PayloadRecord::Command(bytes.clone()),
        EntryPayload::Membership(members) => PayloadRecord::Members(members.into()),
    };
    let record = LogRecord { term: term_of(&entry.log_id), payload };
    let bytes = postcard::to_extend(&record, vec![VALUE_VERSION, 0]).map_err(io::Error::other)?;
    let mut parts: Vec<Vec<u8>> = bytes.chunks(PART_BYTES).map(<[u8]>::to_vec).collect();
    let count = u8::try_from(parts.len()).map_err(|_| {
        io::Error::new(io::ErrorKind::InvalidInput, format!("an entry of {} bytes is too long", bytes.len()))
    })?;
    parts[0][1] = count;
    Ok(parts)
}

/// Puts entries together again from their parts.
pub(crate) struct EntryReader {
    index: u64,
    bytes: Vec<u8>,
    parts_left: u8,
}

impl EntryReader {
    /// Begins with part 0 of the entry at `index`.
    pub(crate) fn start(index: u64, value: &[u8]) -> io::Result<Self> {
        let [VALUE_VERSION, parts, bytes @ ..] = value else {
            return Err(damaged("log entry", &format!("version {:?}, expected {VALUE_VERSION}", value.first())));
        };
        let parts_left = parts.checked_sub(1).ok_or_else(|| damaged("log entry", &"no parts"))?;
        Ok(Self { index, bytes: bytes.to_vec(), parts_left })
    }

    pub(crate) fn push(&mut self, index: u64, value: &[u8]) -> io::Result<()> {
        if index != self.index || self.parts_left == 0 {
            return Err(damaged("log entry", &format!("parts of {} and {index} are mixed up", self.index)));
        }
        self.parts_left -= 1;
        self.bytes.extend_from_slice(value);
        Ok(())
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.parts_left == 0
    }

    pub(crate) fn finish(self) -> io::Result<Entry> {
        if self.parts_left != 0 {
            return Err(damaged("log entry", &format!("{} parts of {} are missing", self.parts_left, self.index)));
        }
        let record: LogRecord = postcard::from_bytes(&self.bytes).map_err(|error| damaged("log entry", &error))?;
        let payload = match record.payload {
            PayloadRecord::Blank => EntryPayload::Blank,
            PayloadRecord::Command(bytes) => EntryPayload::Normal(Command(bytes)),
            PayloadRecord::Members(members) => EntryPayload::Membership(members.try_into()?),
        };
        Ok(Entry { log_id: log_id(record.term, self.index), payload })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(entry: &Entry) -> Entry {
        let parts = encode_entry(entry).unwrap();
        let mut reader = EntryReader::start(entry.log_id.index(), &parts[0]).unwrap();
        for part in &parts[1..] {
            assert!(!reader.is_complete());
            reader.push(entry.log_id.index(), part).unwrap();
        }
        reader.finish().unwrap()
    }

    #[test]
    fn an_entry_of_any_length_is_cut_into_short_values_and_comes_back_whole() {
        for length in [0, 1, 4_000, 4_090, 4_096, 4_097, 9_000, MAX_COMMAND_BYTES] {
            let entry =
                Entry { log_id: log_id(7, 9), payload: EntryPayload::Normal(Command(Bytes::from(vec![7; length]))) };
            assert!(encode_entry(&entry).unwrap().iter().all(|part| part.len() <= PART_BYTES));
            let back = round_trip(&entry);
            assert_eq!(back.log_id, entry.log_id);
            assert_eq!(back.payload, entry.payload);
        }
    }

    #[test]
    fn members_and_votes_come_back_as_they_were() {
        let members = Membership::new(
            vec![BTreeSet::from([1, 2]), BTreeSet::from([2, 3])],
            BTreeMap::from([1, 2, 3, 4].map(|id| (id, BasicNode::new(format!("host-{id}:1"))))),
        )
        .unwrap();
        let entry = Entry { log_id: log_id(1, 2), payload: EntryPayload::Membership(members.clone()) };
        assert_eq!(round_trip(&entry).payload, entry.payload);
        for vote in [Vote::new(3, 4), Vote::new_committed(3, 4)] {
            let bytes = encode_meta(&VoteRecord::from(&vote)).unwrap();
            assert_eq!(Vote::from(decode_meta::<VoteRecord>(&bytes).unwrap()), vote);
        }
    }

    #[test]
    fn a_value_of_an_unknown_version_or_with_a_missing_part_is_refused() {
        let entry =
            Entry { log_id: log_id(1, 1), payload: EntryPayload::Normal(Command(Bytes::from(vec![1; 10_000]))) };
        let mut parts = encode_entry(&entry).unwrap();
        let missing = EntryReader::start(1, &parts[0]).unwrap().finish();
        assert_eq!(missing.map(|_| ()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        parts[0][0] = 2;
        assert_eq!(EntryReader::start(1, &parts[0]).map(|_| ()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(decode_meta::<VoteRecord>(&[9, 1]).map(|_| ()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
