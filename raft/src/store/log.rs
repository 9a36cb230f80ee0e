//! One group's log and vote, as openraft wants them.
//! Decides what is written in which order; the committer decides when it is durable.
//!
//! Keeps *One order*: votes and entries go to the database, and then to the committer, in the order in which openraft
//! asks; the database recovers a prefix of it.
//! Keeps *Readable at once*: an entry can be read when `append` returns. A tail of the log stays in memory, so that
//! replication and applying do not read the database.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use openraft::storage::{IOFlushed, RaftLogStorage};
use openraft::{EntryPayload, LogState, OptionalSend, RaftLogReader};
use parking_lot::RwLock;

use super::committer::Job;
use super::database::Batch;
use super::journal::{Body, Kind};
use super::keys::{self, EntryReader, MetaKind, PlaceRecord, VoteRecord};
use super::{Open, Store, cut};
use crate::ids::GroupId;
use crate::types::{Entry, LogId, Types, Vote};

/// How much of a log's end stays in memory.
const TAIL_ENTRIES: usize = 1_024;
const TAIL_BYTES: usize = 1 << 20;
/// About how many bytes of entries one read for replication returns.
const READ_BYTES: usize = 1 << 20;

/// A group's log. Clones share it.
#[derive(Clone)]
pub(crate) struct GroupLog {
    group: GroupId,
    store: Arc<Store>,
    state: Arc<RwLock<State>>,
}

struct State {
    vote: Option<Vote>,
    purged: Option<LogId>,
    /// Where the log begins while nothing was purged: at 0, unless openraft's tests want otherwise.
    begins: u64,
    /// The last entry, or `purged` if there is none.
    last: Option<LogId>,
    /// The end of the log without gaps, up to and with `last`.
    tail: BTreeMap<u64, Entry>,
    tail_bytes: usize,
}

fn bytes_of(entry: &Entry) -> usize {
    size_of::<Entry>()
        + match &entry.payload {
            EntryPayload::Normal(command) => command.0.len(),
            EntryPayload::Blank | EntryPayload::Membership(_) => 0,
        }
}

impl GroupLog {
    pub(crate) fn open(store: &Arc<Store>, group: GroupId) -> io::Result<Self> {
        let state = store.with(|open| {
            let vote = read_meta::<VoteRecord>(open, group, MetaKind::Vote)?.map(Vote::from);
            let purged = read_meta::<PlaceRecord>(open, group, MetaKind::Purged)?.map(LogId::from);
            let all = keys::log_key(group, 0, 0)..=keys::log_key(group, u64::MAX, u8::MAX);
            let begins = match open.log.keys(all.clone()).next().transpose()? {
                Some(key) => keys::index_of(&key)?,
                None => 0,
            };
            drop_half_entry(open, group)?;
            let last = match open.log.keys(all).next_back().transpose()? {
                Some(key) => Some(keys::index_of(&key)?),
                None => None,
            };
            let last = match last.filter(|last| purged.as_ref().is_none_or(|purged| *last > purged.index())) {
                Some(index) => Some(read_database(open, group, index, index)?.remove(0).log_id),
                None => purged,
            };
            Ok(State { vote, purged, begins, last, tail: BTreeMap::new(), tail_bytes: 0 })
        })?;
        if let Some(purged) = &state.purged {
            // A purge may have been cut short.
            store.committer().submit(Job::Purge { group, upto: purged.index() });
        }
        Ok(Self { group, store: Arc::clone(store), state: Arc::new(RwLock::new(state)) })
    }

    /// The vote, the last entry purged and the last entry.
    pub(crate) fn stand(&self) -> (Option<Vote>, Option<LogId>, Option<LogId>) {
        let state = self.state.read();
        (state.vote, state.purged, state.last)
    }

    /// The last entry that is known to be committed.
    pub(crate) fn committed(&self) -> io::Result<Option<LogId>> {
        let committed = self.store.with(|open| read_meta::<PlaceRecord>(open, self.group, MetaKind::Committed))?;
        // The log is written before the index, and recovered in that order; a smaller one would still be true.
        Ok(committed.map(LogId::from).min(self.state.read().last))
    }

    /// Writes to the database; what it answers goes to the committer.
    fn write_meta(&self, kind: MetaKind, record: &impl serde::Serialize) -> io::Result<Body> {
        let (key, value) = (keys::meta_key(self.group, kind), keys::encode_meta(record)?);
        let body = Body::of(Kind::Meta, &key, &value);
        self.store.with(|open| open.meta.insert(key, value))?;
        Ok(body)
    }

    /// Entries of `from..=to` that the log contains; stops early once `limit` bytes were read.
    pub(crate) fn read(&self, from: u64, to: u64, limit: usize) -> io::Result<Vec<Entry>> {
        // Held until all is read, so that a read shows one moment.
        let state = self.state.read();
        let first = state.purged.as_ref().map_or(state.begins, |purged| purged.index() + 1);
        let (from, to) = (from.max(first), state.last.as_ref().map(LogId::index).map_or(0, |last| last.min(to)));
        if from > to || state.last.is_none() {
            return Ok(Vec::new());
        }
        let tail_from = state.tail.keys().next().copied().unwrap_or(u64::MAX);
        let mut entries = Vec::new();
        let mut next = from;
        let mut bytes = 0;
        while next < tail_from && next <= to && bytes < limit {
            // In steps, so that a long read does not hold more than it returns.
            let upto = to.min(tail_from - 1).min(next.saturating_add(255));
            for entry in self.store.with(|open| read_database(open, self.group, next, upto))? {
                if bytes < limit {
                    bytes += bytes_of(&entry);
                    entries.push(entry);
                }
            }
            next = upto + 1;
        }
        if from.max(tail_from) <= to {
            for entry in state.tail.range(from.max(tail_from)..=to).map(|(_, entry)| entry) {
                if bytes >= limit {
                    break;
                }
                bytes += bytes_of(entry);
                entries.push(entry.clone());
            }
        }
        if let Some(gap) = entries.iter().zip(from..).find(|(entry, index)| entry.log_id.index() != *index) {
            return Err(missing(self.group, gap.1));
        }
        if bytes < limit && entries.last().map(|entry| entry.log_id.index()) != Some(to) {
            return Err(missing(self.group, to));
        }
        Ok(entries)
    }
}

fn missing(group: GroupId, index: u64) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("entry {index} of group {group} is missing from the log"))
}

/// The process may have ended within an entry that it wrote: the database then has some of its parts. Nobody was told of such an entry, or the
/// journal would have brought back the others, and it is the last one written.
fn drop_half_entry(open: &Open, group: GroupId) -> io::Result<()> {
    let all = keys::log_key(group, 0, 0)..=keys::log_key(group, u64::MAX, u8::MAX);
    let Some(last) = open.log.keys(all).next_back().transpose()? else { return Ok(()) };
    let index = keys::index_of(&last)?;
    let mut parts = open.log.range(keys::log_key(group, index, 0)..=keys::log_key(group, index, u8::MAX));
    let Some((_, first)) = parts.next().transpose()? else { return Ok(()) };
    let mut reader = EntryReader::start(index, &first)?;
    for part in parts {
        reader.push(index, &part?.1)?;
    }
    if reader.is_complete() { Ok(()) } else { cut(&open.log, group, index) }
}

fn read_meta<T: serde::de::DeserializeOwned>(open: &Open, group: GroupId, kind: MetaKind) -> io::Result<Option<T>> {
    open.meta.get(keys::meta_key(group, kind))?.map(|value| keys::decode_meta(&value)).transpose()
}

fn read_database(open: &Open, group: GroupId, from: u64, to: u64) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let mut reader: Option<EntryReader> = None;
    for item in open.log.range(keys::log_key(group, from, 0)..=keys::log_key(group, to, u8::MAX)) {
        let (key, value) = item?;
        let index = keys::index_of(&key)?;
        let current = match reader.take() {
            None => EntryReader::start(index, &value)?,
            Some(mut current) => {
                current.push(index, &value)?;
                current
            }
        };
        if current.is_complete() {
            entries.push(current.finish()?);
        } else {
            reader.replace(current);
        }
    }
    match reader {
        Some(incomplete) => incomplete.finish().map(|_| entries),
        None => Ok(entries),
    }
}

impl RaftLogReader<Types> for GroupLog {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<Entry>, io::Error> {
        let from = match range.start_bound() {
            Bound::Included(from) => *from,
            Bound::Excluded(before) => before + 1,
            Bound::Unbounded => 0,
        };
        let to = match range.end_bound() {
            Bound::Included(to) => *to,
            Bound::Excluded(0) => return Ok(Vec::new()),
            Bound::Excluded(end) => end - 1,
            Bound::Unbounded => u64::MAX,
        };
        self.read(from, to, usize::MAX)
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> Result<Vec<Entry>, io::Error> {
        if start >= end {
            return Ok(Vec::new());
        }
        self.read(start, end - 1, READ_BYTES)
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        Ok(self.state.read().vote)
    }
}

impl RaftLogStorage<Types> for GroupLog {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<Types>, io::Error> {
        let state = self.state.read();
        Ok(LogState { last_purged_log_id: state.purged, last_log_id: state.last })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        let body = self.write_meta(MetaKind::Vote, &VoteRecord::from(vote))?;
        self.state.write().vote = Some(*vote);
        self.store.committer().durable(body).await
    }

    /// Becomes durable with the next round, at most a tenth of a second later: an older value only means that more is
    /// learnt from the leader after a restart.
    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), io::Error> {
        if let Some(committed) = committed {
            let body = self.write_meta(MetaKind::Committed, &PlaceRecord::from(&committed))?;
            self.store.committer().submit(Job::Lazy(body));
        }
        Ok(())
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, io::Error> {
        self.committed()
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<Types>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries: Vec<Entry> = entries.into_iter().collect();
        let mut batch = Batch::default();
        let mut bodies = Vec::with_capacity(entries.len());
        for entry in &entries {
            let mut body = Body::default();
            for (part, value) in (0_u8..).zip(keys::encode_entry(entry)?) {
                let key = keys::log_key(self.group, entry.log_id.index(), part);
                body.add(Kind::Log, &key, &value);
                batch.insert(&key, value);
            }
            bodies.push(body);
        }
        {
            let mut state = self.state.write();
            self.store.with(|open| open.log.apply(batch))?;
            if state.last.is_none() {
                state.begins = entries.first().map_or(0, |first| first.log_id.index());
            }
            for entry in entries {
                state.last = Some(entry.log_id);
                state.tail_bytes += bytes_of(&entry);
                state.tail.insert(entry.log_id.index(), entry);
            }
            while state.tail.len() > TAIL_ENTRIES || state.tail_bytes > TAIL_BYTES {
                let Some((_, oldest)) = state.tail.pop_first() else { break };
                state.tail_bytes -= bytes_of(&oldest);
            }
        }
        self.store.committer().submit(Job::Append(bodies, callback));
        Ok(())
    }

    /// The journal first: if the database lost entries that the journal still holds some of, opening would bring back those alone.
    async fn truncate_after(&mut self, last: Option<LogId>) -> Result<(), io::Error> {
        let from = last.as_ref().map_or(0, |last| last.index() + 1);
        self.store.committer().durable(Body::of(Kind::Cut, &keys::log_key(self.group, from, 0), &[])).await?;
        let mut state = self.state.write();
        self.store.with(|open| cut(&open.log, self.group, from))?;
        let cut = state.tail.split_off(&from);
        state.tail_bytes -= cut.values().map(bytes_of).sum::<usize>();
        state.last = last.max(state.purged);
        Ok(())
    }

    /// What is purged cannot be read from here on; the committer removes it. When nothing is left, the next entry may leave a gap behind the
    /// last: it must not be in the database before the journal knows why.
    async fn purge(&mut self, upto: LogId) -> Result<(), io::Error> {
        let body = self.write_meta(MetaKind::Purged, &PlaceRecord::from(&upto))?;
        let whole = self.state.read().last.as_ref().is_none_or(|last| last.index() <= upto.index());
        if whole {
            self.store.committer().durable(body).await?;
        } else {
            self.store.committer().submit(Job::Lazy(body));
        }
        let mut state = self.state.write();
        let keep = state.tail.split_off(&(upto.index() + 1));
        state.tail = keep;
        state.tail_bytes = state.tail.values().map(bytes_of).sum();
        if whole {
            state.last = Some(upto);
        }
        state.purged = Some(upto);
        self.store.committer().submit(Job::Purge { group: self.group, upto: upto.index() });
        Ok(())
    }
}
