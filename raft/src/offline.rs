//! A node's folder while no process uses it: what is in it, and a new one in which groups begin with given states.
//!
//! Decides what the log, vote and members of a group say that begins again; leaves the states to those who know what they mean. A folder that
//! is looked at is opened as a restart would open it: what the journal holds is given to the database again, nothing else changes.
//! Keeps *Whole or absent* (a new folder is complete and synced when [`found`] returns; whoever asks gives it its name then) and *One history*:
//! the new groups are of a higher generation, so no node of the old ones is heard.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use openraft::{BasicNode, EntryPayload, Membership};

use crate::config::HostConfig;
use crate::error::{Doing, RaftError};
use crate::ids::{GroupId, LogIndex, RaftNodeId, Term};
use crate::machine::SnapshotWriter;
use crate::status::Member;
use crate::store::committer::Job;
use crate::store::journal::{Body, Kind};
use crate::store::keys::{self, MetaKind, PlaceRecord, VoteRecord};
use crate::store::log::GroupLog;
use crate::store::snapshot::{SnapshotFile, Snapshots};
use crate::store::{Store, disk, read_format, write_format};
use crate::types::{Entry, LogId, StoredMembership, Vote, log_id, term_of};

/// About how many bytes of entries are read in one go.
const READ_BYTES: usize = 4 << 20;

/// A place in a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The term of the entry.
    pub term: Term,
    /// Its index.
    pub index: LogIndex,
}

impl Place {
    fn of(id: &LogId) -> Self {
        Self { term: Term(term_of(id)), index: LogIndex(id.index()) }
    }
}

/// For whom a node has voted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoundVote {
    /// The term.
    pub term: Term,
    /// The node.
    pub node: RaftNodeId,
    /// Whether that node is known to have been elected.
    pub committed: bool,
}

/// What a folder holds of one group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundGroup {
    /// The group.
    pub group: GroupId,
    /// The vote.
    pub vote: Option<FoundVote>,
    /// The last entry.
    pub last: Option<Place>,
    /// The last entry that this node knew to be committed.
    pub committed: Option<Place>,
    /// The last entry removed from the log.
    pub purged: Option<Place>,
    /// The last entry in the newest snapshot.
    pub snapshot: Option<Place>,
    /// The members, as of the newest change in the log.
    pub members: BTreeMap<RaftNodeId, Member>,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FoundKind {
    /// A leader's first.
    Blank,
    /// A command of the machine.
    Command(Bytes),
    /// A change of members: these are members from here on.
    Members(BTreeMap<RaftNodeId, Member>),
}

/// One entry of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundEntry {
    /// Where it lies.
    pub place: Place,
    /// What it is.
    pub kind: FoundKind,
}

/// A folder that this process holds alone.
pub struct Offline {
    store: Arc<Store>,
    node: RaftNodeId,
}

impl std::fmt::Debug for Offline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Offline").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Drop for Offline {
    fn drop(&mut self) {
        self.store.close();
    }
}

impl Offline {
    /// Opens the folder of a node that is stopped. Blocks.
    ///
    /// # Errors
    /// [`RaftError::Locked`] while a process uses it; [`RaftError::WrongVersion`], also when nothing is there; [`RaftError::Storage`].
    pub fn open(dir: &Path) -> Result<Self, RaftError> {
        let mark = read_format(dir)?.ok_or_else(|| RaftError::WrongVersion {
            dir: dir.to_owned(),
            expected: "the folder of a node".to_owned(),
            found: "no FORMAT file".to_owned(),
        })?;
        let store = Arc::new(Store::open(&HostConfig::new(mark.node, dir))?);
        Ok(Self { store, node: mark.node })
    }

    /// Whose folder it is.
    pub fn node(&self) -> RaftNodeId {
        self.node
    }

    /// The generation of its groups.
    pub fn generation(&self) -> u32 {
        self.store.generation().get()
    }

    /// The groups of which it holds anything, in order.
    ///
    /// # Errors
    /// [`RaftError::Storage`].
    pub fn groups(&self) -> Result<Vec<GroupId>, RaftError> {
        let listed = self.store.with(|open| {
            let mut groups = BTreeSet::new();
            for tree in [&open.log, &open.meta] {
                let mut next = Some(0);
                while let Some(from) = next {
                    let Some(key) = tree.keys(keys::from_group(from)).next().transpose()? else { break };
                    let group = keys::group_of(&key)?;
                    groups.insert(group);
                    next = group.0.checked_add(1);
                }
            }
            Ok(groups.into_iter().collect())
        });
        listed.doing(|| "list the groups of the log".to_owned())
    }

    /// What it holds of a group. The newest snapshot is read whole, to know that it is whole.
    ///
    /// # Errors
    /// [`RaftError::Storage`].
    pub fn group(&self, group: GroupId) -> Result<FoundGroup, RaftError> {
        let look = || -> io::Result<FoundGroup> {
            let log = GroupLog::open(&self.store, group)?;
            let (vote, purged, last) = log.stand();
            let snapshot = self.snapshot(group)?;
            let mut members = snapshot.as_ref().map(|file| members_of(file.meta().last_membership.membership()));
            walk(&log, 0, u64::MAX, |entry| {
                if let EntryPayload::Membership(changed) = &entry.payload {
                    members = Some(members_of(changed));
                }
                Ok(())
            })?;
            let snapshot = snapshot.and_then(|file| file.meta().last_log_id);
            Ok(FoundGroup {
                group,
                vote: vote.map(|vote: Vote| FoundVote {
                    term: Term(vote.leader_id.term),
                    node: RaftNodeId(vote.leader_id.voted_for),
                    committed: vote.committed,
                }),
                // A snapshot may have arrived before the log behind it was given up.
                last: last.max(snapshot).as_ref().map(Place::of),
                committed: log.committed()?.max(snapshot).as_ref().map(Place::of),
                purged: purged.as_ref().map(Place::of),
                snapshot: snapshot.as_ref().map(Place::of),
                members: members.unwrap_or_default(),
            })
        };
        look().doing(|| format!("read group {group}"))
    }

    /// Where the newest snapshot of a group ends, and its bytes.
    ///
    /// # Errors
    /// [`RaftError::Storage`].
    pub fn state(&self, group: GroupId) -> Result<Option<(Option<Place>, impl Read + use<>)>, RaftError> {
        let read = self.snapshot(group).and_then(|file| {
            file.map(|file| Ok((file.meta().last_log_id.as_ref().map(Place::of), file.state()?))).transpose()
        });
        read.doing(|| format!("read the snapshot of group {group}"))
    }

    /// Shows the entries from `from` to `to` that the log holds, in order, until `see` fails.
    ///
    /// # Errors
    /// [`RaftError::Storage`]; what `see` answers.
    pub fn entries<E: From<RaftError>>(
        &self,
        group: GroupId,
        from: LogIndex,
        to: LogIndex,
        mut see: impl FnMut(FoundEntry) -> Result<(), E>,
    ) -> Result<(), E> {
        let doing = || format!("read the log of group {group}");
        let log = GroupLog::open(&self.store, group).doing(doing)?;
        let mut stopped = None;
        let walked = walk(&log, from.0, to.0, |entry| {
            let place = Place::of(&entry.log_id);
            let kind = match entry.payload {
                EntryPayload::Blank => FoundKind::Blank,
                EntryPayload::Normal(command) => FoundKind::Command(command.0),
                EntryPayload::Membership(members) => FoundKind::Members(members_of(&members)),
            };
            see(FoundEntry { place, kind }).map_err(|why| {
                stopped = Some(why);
                io::Error::other("stopped")
            })
        });
        match (stopped, walked) {
            (Some(why), _) => Err(why),
            (None, walked) => Ok(walked.doing(doing)?),
        }
    }

    fn snapshot(&self, group: GroupId) -> io::Result<Option<SnapshotFile>> {
        let dir = self.store.snapshot_dir(group);
        if !dir.is_dir() {
            return Ok(None);
        }
        Snapshots::open(dir, group)?.current()
    }
}

fn walk(log: &GroupLog, from: u64, to: u64, mut see: impl FnMut(Entry) -> io::Result<()>) -> io::Result<()> {
    let mut next = from;
    loop {
        let entries = log.read(next, to, READ_BYTES)?;
        let Some(last) = entries.last().map(|entry| entry.log_id.index()) else { return Ok(()) };
        entries.into_iter().try_for_each(&mut see)?;
        if last >= to {
            return Ok(());
        }
        next = last + 1;
    }
}

fn members_of(members: &Membership<u64, BasicNode>) -> BTreeMap<RaftNodeId, Member> {
    let voters: BTreeSet<u64> = members.voter_ids().collect();
    let member = |(id, node): (&u64, &BasicNode)| {
        (RaftNodeId(*id), Member { addr: node.addr.clone(), voter: voters.contains(id) })
    };
    members.nodes().map(member).collect()
}

/// With what a group begins again.
pub struct Seed {
    /// The group.
    pub group: GroupId,
    /// The last entry whose effect is in the state.
    pub last: Place,
    /// The state.
    pub state: Box<dyn SnapshotWriter>,
}

impl std::fmt::Debug for Seed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seed").field("group", &self.group).field("last", &self.last).finish_non_exhaustive()
    }
}

/// Makes the folder of one member of groups that begin again with these states, and syncs all of it. Every member is made the same way, from
/// the same states: a snapshot one place behind `last`, in the next term, that makes `members` the voters. Blocks.
///
/// # Errors
/// [`RaftError::Settings`] when the folder exists; [`RaftError::NotAMember`]; [`RaftError::Storage`].
pub fn found(
    dir: &Path,
    node: RaftNodeId,
    generation: u32,
    members: &BTreeMap<RaftNodeId, String>,
    seeds: Vec<Seed>,
) -> Result<(), RaftError> {
    if dir.exists() {
        return Err(RaftError::Settings { why: format!("{} exists already: name an empty place", dir.display()) });
    }
    let Some((first, _)) = members.first_key_value().filter(|_| members.contains_key(&node)) else {
        return Err(RaftError::NotAMember { node, members: members.keys().copied().collect() });
    };
    disk::create_dir(dir).doing(|| format!("make {}", dir.display()))?;
    write_format(dir, node, generation)?;
    let store = Store::open(&HostConfig::new(node, dir))?;
    for seed in seeds {
        let group = seed.group;
        begin(&store, *first, members, seed).doing(|| format!("write group {group}"))?;
    }
    store.close();
    match store.committer().failed() {
        None => Ok(()),
        Some(why) => Err(io::Error::other(why)).doing(|| format!("write {}", dir.display())),
    }
}

fn begin(store: &Store, first: RaftNodeId, members: &BTreeMap<RaftNodeId, String>, seed: Seed) -> io::Result<()> {
    let (term, index) = (seed.last.term.0 + 1, seed.last.index.0 + 1);
    let voters: BTreeSet<u64> = members.keys().map(|node| node.0).collect();
    let nodes: BTreeMap<u64, BasicNode> =
        members.iter().map(|(id, addr)| (id.0, BasicNode { addr: addr.clone() })).collect();
    let members = Membership::new(vec![voters], nodes).map_err(io::Error::other)?;
    let place = log_id(term, index);
    // The snapshot first: without its vote and its place the log would only be older than it, as after an install that was cut short.
    let snapshots = Snapshots::open(store.snapshot_dir(seed.group), seed.group)?;
    snapshots.write(Some(&place), &StoredMembership::new(Some(place), members), seed.state)?;
    // As if the first member had been elected in that term, so that the next election is in a later one.
    let vote = keys::encode_meta(&VoteRecord::from(&Vote::new_committed(term, first.0)))?;
    let here = || keys::encode_meta(&PlaceRecord::from(&place));
    for (kind, value) in [(MetaKind::Vote, vote), (MetaKind::Purged, here()?), (MetaKind::Committed, here()?)] {
        let key = keys::meta_key(seed.group, kind);
        let body = Body::of(Kind::Meta, &key, &value);
        store.with(|open| open.meta.insert(key, value))?;
        store.committer().submit(Job::Lazy(body));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    struct Bytes(Vec<u8>);

    impl SnapshotWriter for Bytes {
        fn write_to(self: Box<Self>, out: &mut dyn Write) -> io::Result<()> {
            out.write_all(&self.0)
        }
    }

    fn seeds() -> Vec<Seed> {
        let last = |term, index| Place { term: Term(term), index: LogIndex(index) };
        vec![
            Seed { group: GroupId(0), last: last(3, 70), state: Box::new(Bytes(b"zero".to_vec())) },
            Seed { group: GroupId(4), last: last(1, 9), state: Box::new(Bytes(b"four".to_vec())) },
        ]
    }

    #[test]
    fn a_founded_folder_holds_its_groups_one_place_further_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let members = BTreeMap::from([1, 2].map(|id| (RaftNodeId(id), format!("host-{id}:1"))));
        let place = dir.path().join("raft");
        let outsider = found(&place, RaftNodeId(3), 2, &members, seeds()).unwrap_err();
        assert!(matches!(outsider, RaftError::NotAMember { .. }), "{outsider}");
        found(&place, RaftNodeId(2), 2, &members, seeds()).unwrap();
        assert!(matches!(found(&place, RaftNodeId(2), 2, &members, seeds()), Err(RaftError::Settings { .. })));

        let offline = Offline::open(&place).unwrap();
        assert!(matches!(Offline::open(&place), Err(RaftError::Locked { .. })));
        assert_eq!((offline.node(), offline.generation()), (RaftNodeId(2), 2));
        assert_eq!(offline.groups().unwrap(), [GroupId(0), GroupId(4)]);
        let zero = offline.group(GroupId(0)).unwrap();
        let here = Some(Place { term: Term(4), index: LogIndex(71) });
        assert_eq!((zero.last, zero.committed, zero.purged, zero.snapshot), (here, here, here, here));
        let vote = FoundVote { term: Term(4), node: RaftNodeId(1), committed: true };
        assert_eq!(zero.vote, Some(vote));
        assert!(zero.members.len() == 2 && zero.members.values().all(|member| member.voter));
        let mut bytes = Vec::new();
        offline.state(GroupId(4)).unwrap().unwrap().1.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, b"four");
        let none = |_| -> Result<(), RaftError> { panic!("there are no entries") };
        offline.entries(GroupId(0), LogIndex(0), LogIndex(u64::MAX), none).unwrap();
    }
}
