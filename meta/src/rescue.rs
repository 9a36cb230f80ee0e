//! How a cluster begins again: from a backup, or from what one meta node of a lost majority holds. Nothing runs meanwhile.
//!
//! Decides what the states of all groups are in the new generation; `quarry-raft` writes the folder that starts with them. The generation is
//! raised here, in the directory and in every shard, and not by whoever leads first: from its first moment the new cluster holds no grant, lease
//! or copy of the old one, and no node of the old one is heard. Certificates, revocations, namespaces, the outcomes of requests and all numbers
//! that were given stay.
//!
//! Keeps *Whole or absent*: the new folder is made beside the old one and takes its place when it is complete. A crash leaves the old folder, or
//! one that a repetition finishes; a node does not start on what lies between.

use crate::{
    backup::{Backup, BackupError, Part},
    disk,
    error::MetaError,
    machine::{Frozen, Replicated},
};
use quarry_meta_state::{
    Directory, Entry, EntryError, Shard,
    directory::{DirectoryCommand, DirectoryOutcome, FEED_SLICE_ENTRIES_MAX, MemberChange},
    shard::{Settings, ShardCommand, ShardOutcome},
};
use quarry_raft::{FoundEntry, FoundKind, GroupId, LogIndex, Offline, RaftError, RaftNodeId, Seed, Term};
pub use quarry_raft::{FoundGroup, FoundVote, Member, Place};
use quarry_wire::{
    certificate::{Certificate, Revocations},
    ids::{ClusterUuid, Generation, NodeId, Ordinal, ShardId},
    signed::{PublicKey, Signed},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Write as _},
    fs, io,
    path::{Path, PathBuf},
};

/// Why a cluster cannot begin again.
#[derive(Debug, thiserror::Error)]
pub enum RescueError {
    /// The backup cannot be used.
    #[error(transparent)]
    Backup(#[from] BackupError),
    /// The folder, or the file that says whose it is.
    #[error(transparent)]
    Folder(#[from] MetaError),
    /// The log.
    #[error(transparent)]
    Raft(#[from] RaftError),
    /// There is something in the folder.
    #[error("{} is not empty: name a new folder, or empty it", dir.display())]
    NotEmpty {
        /// The folder.
        dir: PathBuf,
    },
    /// The backup or the folder is of another cluster than the plan.
    #[error("{what} of the cluster: expected {expected} as planned, found {found}")]
    OtherCluster {
        /// What differs.
        what: &'static str,
        /// What the plan says.
        expected: String,
        /// What was found.
        found: String,
    },
    /// The folder is another node's than the one that was named.
    #[error("{} is the folder of {found}, {expected} was named", dir.display())]
    OtherNode {
        /// The folder.
        dir: PathBuf,
        /// The node that was named.
        expected: NodeId,
        /// The node whose folder it is.
        found: NodeId,
    },
    /// The plan names a node or an address twice.
    #[error("the plan names {found} twice: each meta node has a number and an address of its own")]
    PlannedTwice {
        /// The node or the address.
        found: String,
    },
    /// The node is none of those of the plan.
    #[error("the plan has no {node}, it has {}", planned.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))]
    NotPlanned {
        /// The node that was named.
        node: NodeId,
        /// The nodes of the plan.
        planned: Vec<NodeId>,
    },
    /// The plan names a number that was used up when the backup was saved.
    #[error(
        "the plan names {node}, whose number is used up: it was removed or forgotten before; give it another number"
    )]
    UsedUp {
        /// The node.
        node: NodeId,
    },
    /// The node's removal had begun.
    #[error("{node} was removed from the cluster, its number is used up: take another node, or restore a backup")]
    Retired {
        /// The node.
        node: NodeId,
    },
    /// There is no cluster to go on with.
    #[error("this node never heard of its cluster: it was not bootstrapped, or lost its log; restore a backup")]
    NoCluster,
    /// The folder holds nothing of a group.
    #[error("this node holds nothing of group {group}: take another node, or restore a backup")]
    NoGroup {
        /// The group.
        group: u32,
    },
    /// The generation would not be a new one.
    #[error("the next generation must be above {current}, found {found}")]
    Generation {
        /// The highest that is known here.
        current: Generation,
        /// The one asked for.
        found: Generation,
    },
    /// A state cannot be read, or cannot go on.
    #[error("group {group} cannot go on: {why}")]
    State {
        /// The group.
        group: u32,
        /// Why.
        why: String,
    },
    /// The log has a hole.
    #[error("entries {first} to {last} of group {group} should be in the log and are not: it was cut, or is damaged")]
    Missing {
        /// The group.
        group: u32,
        /// The first entry that is missing.
        first: LogIndex,
        /// The last one.
        last: LogIndex,
    },
    /// The disk failed.
    #[error("{doing}: {source}")]
    Disk {
        /// What was being done.
        doing: String,
        /// The cause.
        source: io::Error,
    },
}

/// A meta node of the new cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewMeta {
    /// The node.
    pub node: NodeId,
    /// `host:port` of its gRPC server.
    pub address: String,
    /// Its certificate.
    pub certificate: Signed<Certificate>,
}

/// With what a cluster is to begin again.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RestorePlan {
    /// The cluster.
    pub cluster: ClusterUuid,
    /// The public half of its root key.
    pub root: PublicKey,
    /// How many shards it has.
    pub shards: u32,
    /// Its meta nodes from here on: all of them, the same on every one.
    pub metas: Vec<NewMeta>,
    /// The generation that begins; none: the one after the backup's. It must be higher than any that the cluster ever was in.
    pub generation: Option<Generation>,
    /// A revocation list that is newer than the backup.
    pub revocations: Option<Signed<Revocations>>,
}

/// What began.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Begun {
    /// The cluster.
    pub cluster: ClusterUuid,
    /// The generation that begins.
    pub generation: Generation,
    /// How many shards there are.
    pub shards: u32,
    /// How many namespaces are known.
    pub namespaces: usize,
    /// How many certificates are known.
    pub certificates: usize,
    /// The meta nodes.
    pub metas: BTreeMap<NodeId, String>,
    /// Where the folder is kept that was replaced.
    pub kept: Option<PathBuf>,
}

/// The states of all groups, and the entry that each is of.
struct Whole {
    directory: (Directory, Place),
    shards: Vec<(Shard, Place)>,
}

fn state_error(group: u32) -> impl Fn(&dyn fmt::Display) -> RescueError {
    move |why| RescueError::State { group, why: why.to_string() }
}

impl Whole {
    fn of_backup(backup: &Backup) -> Result<Self, RescueError> {
        fn read<S: Replicated>(backup: &Backup, part: &Part) -> Result<(S, Place), RescueError> {
            let state = S::decode_from(&mut backup.state(part)).map_err(|error| state_error(part.group)(&error))?;
            Ok((state, Place { term: Term(part.term), index: LogIndex(part.applied) }))
        }
        let part = |group: u32| {
            backup.manifest().groups.iter().find(|part| part.group == group).ok_or(RescueError::NoGroup { group })
        };
        let directory = read(backup, part(0)?)?;
        let shards = (1..=backup.manifest().shards).map(|group| read(backup, part(group)?));
        Ok(Self { directory, shards: shards.collect::<Result<_, _>>()? })
    }

    /// What a stopped node holds, up to the last entry of each log: whatever was acknowledged and reached this node is among them.
    fn of_folder(offline: &Offline) -> Result<Self, RescueError> {
        let directory = replay(offline, GroupId(0), Directory::new())?;
        let (generation, count) = (directory.0.generation(), directory.0.shards());
        if directory.0.cluster().is_none() {
            return Err(RescueError::NoCluster);
        }
        let shards = (1..=count).map(|id| {
            // A shard is made with the first generation, and comes to the others through its log.
            let first = directory.0.cluster().map_or(generation, |cluster| cluster.generation);
            replay(offline, GroupId(id), Shard::new(ShardId(id), Settings::new(first, count)))
        });
        let shards = shards.collect::<Result<_, _>>()?;
        Ok(Self { directory, shards })
    }

    /// The highest generation that any of the states knows.
    fn generation(&self) -> Generation {
        self.shards.iter().map(|(shard, _)| shard.generation()).fold(self.directory.0.generation(), Ord::max)
    }

    /// Voids all memory, makes `metas` known, and uses up the numbers of all meta nodes that do not stay.
    fn begin(
        &mut self,
        generation: Generation,
        stay: &BTreeSet<NodeId>,
        metas: &[NewMeta],
        revocations: Option<Signed<Revocations>>,
    ) -> Result<(), RescueError> {
        let directory = &mut self.directory.0;
        tell(directory, DirectoryCommand::RaiseGeneration { generation })?;
        // Before their certificates may be revoked.
        let is_given_up = |node: &NodeId| !stay.contains(node) && directory.regions_of(*node).next().is_none();
        let given_up: Vec<NodeId> = directory.metas().map(|meta| meta.id).filter(is_given_up).collect();
        if let Some(list) = revocations {
            tell(directory, DirectoryCommand::Revoke(list))?;
        }
        for NewMeta { node, address, certificate } in metas {
            tell(directory, DirectoryCommand::AdmitCertificate(certificate.clone()))?;
            tell(directory, DirectoryCommand::AnnounceNode { node: *node, address: address.clone() })?;
        }
        // As if the others had been removed: nobody waits for them, and they are not found under their old names again.
        for node in given_up {
            let number = tell(directory, DirectoryCommand::BeginChange(MemberChange::Remove { node }))?;
            let number = number.ok_or_else(|| state_error(0)(&"a removal has no number"))?;
            tell(directory, DirectoryCommand::EndChange { number, cancelled: false })?;
        }
        for (shard, _) in &mut self.shards {
            follow(directory, shard)?;
        }
        self.check()
    }

    /// The states are checked as those are that a node reads.
    fn check(&self) -> Result<(), RescueError> {
        Directory::decode(&self.directory.0.encode()).map_err(|error| state_error(0)(&error))?;
        for (shard, _) in &self.shards {
            Shard::decode(&shard.encode()).map_err(|error| state_error(shard.id().0)(&error))?;
        }
        Ok(())
    }

    fn seeds(self) -> (Directory, Vec<Seed>) {
        let (directory, place) = self.directory;
        let copy = directory.clone();
        let mut seeds = vec![Seed { group: GroupId(0), last: place, state: Box::new(Frozen(directory)) }];
        seeds.extend(self.shards.into_iter().map(|(shard, last)| Seed {
            group: GroupId(shard.id().0),
            last,
            state: Box::new(Frozen(shard)),
        }));
        (copy, seeds)
    }
}

/// Applies a command; answers the number of a change of members, if it is about one.
fn tell(directory: &mut Directory, command: DirectoryCommand) -> Result<Option<Ordinal>, RescueError> {
    let wrong = state_error(0);
    match directory.apply(directory.log_time(), command) {
        DirectoryOutcome::Generation(Ok(())) | DirectoryOutcome::Node(Ok(_)) => Ok(None),
        DirectoryOutcome::Member(Ok(number)) => Ok(Some(number)),
        DirectoryOutcome::Generation(Err(refusal)) => Err(wrong(&refusal)),
        DirectoryOutcome::Node(Err(refusal)) => Err(wrong(&refusal)),
        DirectoryOutcome::Member(Err(refusal)) => Err(wrong(&refusal)),
        other => Err(wrong(&format_args!("a command was answered for another one: {other:?}"))),
    }
}

/// Tells a shard everything that the directory says, the new generation first.
fn follow(directory: &Directory, shard: &mut Shard) -> Result<(), RescueError> {
    loop {
        let slice = directory.feed_since(shard.feed_position(), FEED_SLICE_ENTRIES_MAX);
        if slice.to == shard.feed_position() {
            return Ok(());
        }
        match shard.apply(shard.log_time(), ShardCommand::ApplyFeed(slice)) {
            ShardOutcome::Feed(Ok(_)) => {}
            ShardOutcome::Feed(Err(refusal)) => return Err(state_error(shard.id().0)(&refusal)),
            other => return Err(state_error(shard.id().0)(&format_args!("the feed was answered with {other:?}"))),
        }
    }
}

/// Whether a walk that ended before `next` has come to `last`, or why not.
fn whole_to(next: LogIndex, last: LogIndex) -> Result<(), String> {
    if next.0 == last.0 + 1 {
        return Ok(());
    }
    Err(format!("entries {next} to {last} are neither in a snapshot that can be read nor in the log"))
}

fn replay<S: Replicated>(offline: &Offline, group: GroupId, fresh: S) -> Result<(S, Place), RescueError> {
    let wrong = state_error(group.0);
    let found = offline.group(group)?;
    let Some(last) = found.last else { return Err(RescueError::NoGroup { group: group.0 }) };
    let mut state = fresh;
    let mut next = LogIndex(0);
    if let Some((place, mut input)) = offline.state(group)? {
        state = S::decode_from(&mut input).map_err(|error| wrong(&error))?;
        next = LogIndex(place.map_or(0, |place| place.index.0 + 1));
    }
    let mut expected = next;
    offline.entries(group, next, last.index, |entry| -> Result<(), RescueError> {
        if entry.place.index != expected {
            return Err(wrong(&format_args!("entry {expected} is missing from the log")));
        }
        expected = LogIndex(expected.0 + 1);
        if let FoundKind::Command(command) = &entry.kind {
            let entry = Entry::<S::Command>::decode(command)
                .map_err(|error: EntryError| wrong(&format_args!("entry {}: {error}", entry.place.index)))?;
            for command in entry.commands {
                state.apply(entry.at, command);
            }
        }
        Ok(())
    })?;
    // The log may begin above the snapshot that is left of it, and hold nothing: then no entry showed the hole.
    whole_to(expected, last.index).map_err(|why| wrong(&why))?;
    // A later term than any that was voted in here, or led.
    let term = found.vote.map_or(last.term, |vote| vote.term.max(last.term));
    Ok((state, Place { term, index: last.index }))
}

/// Makes the folder of one meta node of a cluster that begins again from a backup. Every node of the plan is made from the same file by the
/// same plan. Blocks.
///
/// # Errors
/// [`RescueError`]; on an error the folder holds no node.
pub fn restore(backup: &Backup, plan: &RestorePlan, dir: &Path, node: NodeId) -> Result<Begun, RescueError> {
    let manifest = backup.manifest();
    no_repetition(&plan.metas)?;
    let planned = plan.metas.iter().map(|meta| meta.node);
    if !planned.clone().any(|it| it == node) {
        return Err(RescueError::NotPlanned { node, planned: planned.collect() });
    }
    same("the UUID", plan.cluster, &manifest.cluster)?;
    same("the root key", plan.root, &manifest.root)?;
    same("the number of shards", plan.shards, manifest.shards)?;
    let not_empty = |found: io::Result<fs::ReadDir>| found.is_ok_and(|mut items| items.next().is_some());
    if not_empty(fs::read_dir(dir)) {
        return Err(RescueError::NotEmpty { dir: dir.to_owned() });
    }
    let mut whole = Whole::of_backup(backup)?;
    if let Some(used) = plan.metas.iter().find(|meta| whole.directory.0.is_retired(meta.node)) {
        return Err(RescueError::UsedUp { node: used.node });
    }
    let generation = next_generation(whole.generation(), plan.generation)?;
    let stay = plan.metas.iter().map(|meta| meta.node).collect();
    whole.begin(generation, &stay, &plan.metas, plan.revocations.clone())?;
    let metas = plan.metas.iter().map(|meta| (meta.node, meta.address.clone())).collect();
    found(dir, node, generation, metas, whole, None)
}

/// Each number and each address once.
fn no_repetition(metas: &[NewMeta]) -> Result<(), RescueError> {
    let (mut nodes, mut addresses) = (BTreeSet::new(), BTreeSet::new());
    for meta in metas {
        if !nodes.insert(meta.node) {
            return Err(RescueError::PlannedTwice { found: meta.node.to_string() });
        }
        if !addresses.insert(meta.address.as_str()) {
            return Err(RescueError::PlannedTwice { found: meta.address.clone() });
        }
    }
    Ok(())
}

/// The folder of a stopped meta node, held by this process alone.
#[derive(Debug)]
pub struct Survivor {
    dir: PathBuf,
    cluster: ClusterUuid,
    node: NodeId,
    /// None: a recovery came so far that its new folder is complete and the old one put aside.
    offline: Option<Offline>,
}

impl Survivor {
    /// Opens the folder of a stopped node. Blocks.
    ///
    /// # Errors
    /// [`RescueError::OtherNode`]; [`RaftError::Locked`] while the node runs; [`RescueError::Folder`].
    pub fn open(dir: &Path, node: NodeId) -> Result<Self, RescueError> {
        is_there(dir)?;
        let (cluster, found) = disk::owner(dir)?;
        if found != node {
            return Err(RescueError::OtherNode { dir: dir.to_owned(), expected: node, found });
        }
        let halfway = disk::next(dir).exists() && !disk::raft(dir).exists();
        let offline = if halfway { None } else { Some(Offline::open(&disk::raft(dir))?) };
        Ok(Self { dir: dir.to_owned(), cluster, node, offline })
    }

    /// The cluster.
    #[must_use]
    pub const fn cluster(&self) -> ClusterUuid {
        self.cluster
    }

    /// The node.
    #[must_use]
    pub const fn node(&self) -> NodeId {
        self.node
    }

    /// The generation that it is in; none when a recovery only has to be finished.
    #[must_use]
    pub fn generation(&self) -> Option<Generation> {
        self.offline.as_ref().map(|offline| Generation(offline.generation()))
    }

    /// What it holds of each group; nothing when a recovery only has to be finished.
    ///
    /// # Errors
    /// [`RescueError::Raft`].
    pub fn groups(&self) -> Result<Vec<FoundGroup>, RescueError> {
        let Some(offline) = &self.offline else { return Ok(Vec::new()) };
        offline.groups()?.into_iter().map(|group| offline.group(group).map_err(RescueError::from)).collect()
    }

    /// Makes this node the only member of all its groups, in the next generation, or in `generation`. Whatever its logs hold counts as
    /// committed. The folder of before is kept. Blocks.
    ///
    /// # Errors
    /// [`RescueError`]; on an error the node's folder is as it was.
    pub fn recover(self, generation: Option<Generation>) -> Result<Begun, RescueError> {
        let Self { dir, cluster, node, offline } = self;
        let wrong = |doing: String| move |source| RescueError::Disk { doing, source };
        let Some(offline) = offline else {
            disk::put_next(&dir, None).map_err(wrong(format!("finish {}", dir.display())))?;
            let offline = Offline::open(&disk::raft(&dir))?;
            let whole = Whole::of_folder(&offline)?;
            let members = offline.group(GroupId(0))?.members;
            let metas = members.into_iter().map(|(id, member)| (NodeId(id.0), member.addr)).collect();
            return Ok(begun(cluster, &whole.directory.0, metas, None));
        };
        let mut whole = Whole::of_folder(&offline)?;
        let known = whole.generation().max(Generation(offline.generation()));
        let next = next_generation(known, generation)?;
        let mut members = offline.group(GroupId(0))?.members;
        let own = members.remove(&RaftNodeId(node.0)).ok_or_else(|| RescueError::State {
            group: 0,
            why: {
                let members: Vec<String> = members.keys().map(ToString::to_string).collect();
                format!("{node} is no member of it any more, members are {}", members.join(", "))
            },
        })?;
        if whole.directory.0.is_retired(node) {
            return Err(RescueError::Retired { node });
        }
        whole.begin(next, &BTreeSet::from([node]), &[], None)?;
        let left = disk::next(&dir);
        if left.exists() {
            // Of a recovery that ended before its folder was complete: the old one is still in its place.
            fs::remove_dir_all(&left).map_err(wrong(format!("remove {}", left.display())))?;
        }
        let kept = dir.join(format!("raft.generation-{known}", known = known.0));
        // Let go of the folder before it is moved.
        drop(offline);
        found(&dir, node, next, BTreeMap::from([(node, own.addr)]), whole, Some(kept))
    }
}

fn same<T: ToString>(what: &'static str, expected: impl fmt::Display, found: T) -> Result<(), RescueError> {
    let (expected, found) = (expected.to_string(), found.to_string());
    if expected == found { Ok(()) } else { Err(RescueError::OtherCluster { what, expected, found }) }
}

fn next_generation(current: Generation, asked: Option<Generation>) -> Result<Generation, RescueError> {
    let found = asked.unwrap_or_else(|| Generation(current.0.saturating_add(1)));
    if found > current { Ok(found) } else { Err(RescueError::Generation { current, found }) }
}

/// Writes the next folder of consensus and gives it its place.
fn found(
    dir: &Path,
    node: NodeId,
    generation: Generation,
    metas: BTreeMap<NodeId, String>,
    whole: Whole,
    kept: Option<PathBuf>,
) -> Result<Begun, RescueError> {
    let members = metas.iter().map(|(id, address)| (RaftNodeId(id.0), address.clone())).collect();
    let cluster = whole.directory.0.cluster().ok_or(RescueError::NoCluster)?.uuid;
    let (directory, seeds) = whole.seeds();
    quarry_raft::found(&disk::next(dir), RaftNodeId(node.0), generation.0, &members, seeds)?;
    // From here on no node starts in this folder, until the next step is done.
    disk::mark(dir, cluster, node)?;
    disk::put_next(dir, kept.as_deref())
        .map_err(|source| RescueError::Disk { doing: format!("put the new folder into {}", dir.display()), source })?;
    Ok(begun(cluster, &directory, metas, kept))
}

fn begun(cluster: ClusterUuid, directory: &Directory, metas: BTreeMap<NodeId, String>, kept: Option<PathBuf>) -> Begun {
    Begun {
        cluster,
        generation: directory.generation(),
        shards: directory.shards(),
        namespaces: directory.namespaces().count(),
        certificates: directory.certificates().count(),
        metas,
        kept,
    }
}

/// One entry of a log, in words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogLine {
    /// Where it lies.
    pub place: Place,
    /// `blank`, `members` or `commands`.
    pub kind: &'static str,
    /// Its stamp in milliseconds of log time; commands have one.
    pub at_ms: Option<u64>,
    /// Bytes of its commands.
    pub bytes: usize,
    /// What it holds: kinds of commands with their numbers, or members.
    pub says: String,
}

/// Shows the entries of one group's log in the folder of a stopped node, from one index to another. Answers the last index before them that is in
/// the snapshot alone, if entries that were asked for were cut from the log. Blocks.
///
/// # Errors
/// [`RescueError`]; an entry that does not decode is shown as such and is no error, but entries that should be there and are not are one, after
/// all others were shown.
pub fn dump(
    dir: &Path,
    group: u32,
    from: LogIndex,
    to: LogIndex,
    mut see: impl FnMut(LogLine) -> Result<(), RescueError>,
) -> Result<Option<LogIndex>, RescueError> {
    let offline = Offline::open(&logs_of(dir))?;
    let held = offline.group(GroupId(group))?;
    let cut = held.purged.map(|place| place.index).filter(|purged| from <= *purged);
    let mut walk = Walk { next: cut.map_or(from, |purged| LogIndex(purged.0 + 1)), hole: None };
    offline.entries(GroupId(group), from, to, |entry| {
        walk.step(entry.place.index);
        see(if group == 0 { line::<Directory>(&entry) } else { line::<Shard>(&entry) })
    })?;
    let last = [held.last, held.committed, held.snapshot].into_iter().flatten().map(|place| place.index).max();
    match walk.end(last.map(|last| last.min(to))) {
        Some((first, last)) => Err(RescueError::Missing { group, first, last }),
        None => Ok(cut),
    }
}

/// A walk over a log that should have no holes.
struct Walk {
    /// The index that should come next.
    next: LogIndex,
    /// The first hole: its first entry and its last.
    hole: Option<(LogIndex, LogIndex)>,
}

impl Walk {
    fn step(&mut self, index: LogIndex) {
        if index > self.next {
            self.hole.get_or_insert((self.next, LogIndex(index.0 - 1)));
        }
        self.next = LogIndex(index.0 + 1);
    }

    /// The first hole, if there is one; what is missing before `last`, the last entry that should have been seen, is one too.
    fn end(self, last: Option<LogIndex>) -> Option<(LogIndex, LogIndex)> {
        self.hole.or_else(|| last.filter(|last| self.next <= *last).map(|last| (self.next, last)))
    }
}

/// The groups of a stopped node's folder. Blocks.
///
/// # Errors
/// [`RescueError::Raft`]; [`RescueError::Disk`] if there is no such folder.
pub fn groups(dir: &Path) -> Result<Vec<u32>, RescueError> {
    is_there(dir)?;
    Ok(Offline::open(&logs_of(dir))?.groups()?.into_iter().map(|group| group.0).collect())
}

fn is_there(dir: &Path) -> Result<(), RescueError> {
    let there = fs::metadata(dir).map(drop);
    there.map_err(|source| RescueError::Disk { doing: format!("open {}", dir.display()), source })
}

/// The logs of a node's folder; a folder of logs itself is taken too, such as one that a recovery kept.
fn logs_of(dir: &Path) -> PathBuf {
    if dir.join("FORMAT").exists() { dir.to_owned() } else { disk::raft(dir) }
}

fn line<S: Replicated>(entry: &FoundEntry) -> LogLine
where
    S::Command: fmt::Debug,
{
    let place = entry.place;
    match &entry.kind {
        FoundKind::Blank => LogLine { place, kind: "blank", at_ms: None, bytes: 0, says: "a leader began".to_owned() },
        FoundKind::Members(members) => {
            let say = |(id, member): (&RaftNodeId, &Member)| {
                format!("{id}={}{}", member.addr, if member.voter { "" } else { " (learner)" })
            };
            let says = members.iter().map(say).collect::<Vec<_>>().join(", ");
            LogLine { place, kind: "members", at_ms: None, bytes: 0, says }
        }
        FoundKind::Command(command) => {
            let decoded = Entry::<S::Command>::decode(command);
            let (at_ms, says) = match decoded {
                Ok(entry) => (Some(entry.at.0), kinds(&entry.commands)),
                Err(error) => (None, format!("not decoded: {error}")),
            };
            LogLine { place, kind: "commands", at_ms, bytes: command.len(), says }
        }
    }
}

/// The kinds of commands in an entry, each with how often it comes.
fn kinds<C: fmt::Debug>(commands: &[C]) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for command in commands {
        *counts.entry(kind(command)).or_default() += 1;
    }
    counts.into_iter().map(|(kind, count)| format!("{kind} x{count}")).collect::<Vec<_>>().join(", ")
}

/// The name of a command's variant: what its debug form begins with. The rest, which may be long, is not written.
fn kind(command: &impl fmt::Debug) -> String {
    struct Name(String);
    impl fmt::Write for Name {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            let letters = text.chars().take_while(|letter| letter.is_alphanumeric());
            let before = self.0.len();
            self.0.extend(letters);
            // The first thing that is no letter ends it.
            if self.0.len() - before == text.len() { Ok(()) } else { Err(fmt::Error) }
        }
    }
    let mut name = Name(String::new());
    // It ends with an error, on purpose.
    let _ = write!(name, "{command:?}");
    name.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_that_lacks_its_last_entries_is_not_whole() {
        assert_eq!(whole_to(LogIndex(8), LogIndex(7)), Ok(()));
        let hole = whole_to(LogIndex(5), LogIndex(7)).unwrap_err();
        assert!(hole.contains("entries 5 to 7"), "{hole}");
        assert!(whole_to(LogIndex(0), LogIndex(7)).is_err(), "no snapshot, and a log that begins behind it");
    }

    #[test]
    fn commands_are_told_by_their_kinds() {
        let commands = [
            DirectoryCommand::Tick,
            DirectoryCommand::AnnounceNode { node: NodeId(1), address: "a:1".into() },
            DirectoryCommand::Tick,
        ];
        assert_eq!(kinds(&commands), "AnnounceNode x1, Tick x2");
    }

    #[test]
    fn a_walk_over_a_log_names_its_first_hole_and_what_is_missing_at_its_end() {
        let walk = |from: u64, indices: &[u64], last: Option<u64>| {
            let mut walk = Walk { next: LogIndex(from), hole: None };
            indices.iter().for_each(|index| walk.step(LogIndex(*index)));
            walk.end(last.map(LogIndex)).map(|(first, last)| (first.0, last.0))
        };
        assert_eq!(walk(4, &[4, 5, 6], Some(6)), None);
        assert_eq!(walk(4, &[4, 7, 9], Some(9)), Some((5, 6)), "the first of two");
        assert_eq!(walk(4, &[6, 7], Some(7)), Some((4, 5)), "at the beginning");
        assert_eq!(walk(4, &[4, 5], Some(8)), Some((6, 8)), "at the end");
        assert_eq!(walk(4, &[], Some(5)), Some((4, 5)), "nothing is there");
        assert_eq!(walk(4, &[], Some(3)), None, "nothing was asked for");
        assert_eq!(walk(0, &[], None), None, "an empty log");
    }
}
