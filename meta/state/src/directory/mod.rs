//! The directory: Raft group 0. Nodes, certificates, namespaces, regions, lendings of extents.
//!
//! Decides whom to believe, which life a region is in and which shard holds an extent. Leaves to the service: heartbeats and judging who is
//! dead, when to lend, telling shards (they pull the [`feed`]). Keeps *Nothing unsigned*, *Epochs only grow*, and its part of *Nothing leaks*:
//! an extent is lent to one shard at a time.

mod check;
pub mod extents;
pub mod feed;
pub mod labels;
pub mod members;
pub mod namespaces;
pub mod nodes;
pub mod regions;

use crate::{
    invariant::Violation,
    requests::{RequestId, Requests},
    snapshot::{self, Machine, SnapshotError, StateHash},
};
use extents::{LendRefusal, Lending, ReturnRefusal};
use feed::Topic;
pub use feed::{Changes, FEED_SLICE_ENTRIES_MAX, FeedChange, FeedEntry, FeedSlice, RegionState};
pub use labels::{Labels, Shared};
pub use members::{MemberChange, NumberedChange};
use members::{MemberRefusal, Members};
pub use namespaces::{Namespace, Policy};
use namespaces::{NamespaceEntry, NamespaceRefusal};
pub use nodes::{Node, Standing};
use nodes::{NodeRefusal, Numbered};
use quarry_wire::{
    certificate::{Certificate, Revocations},
    ids::{
        CertificateSerial, ClusterUuid, ExtentId, FeedNumber, Generation, Incarnation, LendNumber, NamespaceId, NodeId,
        Ordinal, RegionId, RegionIndex, ShardId,
    },
    keyring::Keyring,
    limits::OUTCOME_KEPT,
    region::RegionRecord,
    signed::{PublicKey, Signed},
    units::LogTime,
};
use regions::{RegionEntry, RegionRefusal};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, io, time::Duration};

/// A command for the directory. New variants are added at the end, so that old entries keep their meaning.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum DirectoryCommand {
    /// The first command of a cluster.
    InitCluster(Cluster),
    /// A restore or a rescue: all memory is void from here on.
    RaiseGeneration {
        /// The generation that begins; above the present one.
        generation: Generation,
    },
    /// A certificate that the root signed.
    AdmitCertificate(Signed<Certificate>),
    /// A revocation list that the root signed.
    Revoke(Signed<Revocations>),
    /// Where a node's control service listens.
    AnnounceNode {
        /// The node.
        node: NodeId,
        /// `host:port`.
        address: String,
    },
    /// A data node offers memory whose contents are new.
    RegisterRegion {
        /// The node.
        node: NodeId,
        /// Which of its regions.
        index: RegionIndex,
        /// Its length in bytes.
        bytes: u64,
        /// Drawn at random whenever the node begins anew with this memory (start, return from death). The same number again is a retry.
        life: u128,
    },
    /// Where a region can be reached, signed by its node.
    RecordRegion(Signed<RegionRecord>),
    /// A node is taken to be dead in these lives of its regions; lives that began since are left alone.
    DeclareDead {
        /// The node.
        node: NodeId,
        /// The lives that were judged.
        judged: Vec<(RegionIndex, Incarnation)>,
    },
    /// A new namespace.
    CreateNamespace {
        /// Name of the request.
        request: RequestId,
        /// Name of the namespace.
        name: String,
        /// Its rules.
        policy: Policy,
    },
    /// Lends an extent to a shard.
    LendExtent {
        /// The extent.
        extent: ExtentId,
        /// The shard.
        shard: ShardId,
    },
    /// A shard gave an extent back.
    Returned {
        /// The extent.
        extent: ExtentId,
        /// The shard that held it.
        shard: ShardId,
        /// The lending that ended.
        lend: LendNumber,
    },
    /// Time passes.
    Tick,
    /// A change of the meta nodes begins.
    BeginChange(MemberChange),
    /// The change of this number came to its end in all groups.
    EndChange {
        /// Its number.
        number: Ordinal,
        /// It is given up instead; what it did stays.
        cancelled: bool,
    },
    /// What a data node may be used for.
    SetStanding {
        /// The node.
        node: NodeId,
        /// From now on.
        standing: Standing,
    },
    /// A data node that is dead or decommissioned goes from the directory and from all shards; its number is used up.
    ForgetNode {
        /// The node.
        node: NodeId,
    },
    /// What a node that announced itself shares its fate with.
    LabelNode {
        /// The node.
        node: NodeId,
        /// From now on.
        labels: Labels,
    },
}

/// What became of a [`DirectoryCommand`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum DirectoryOutcome {
    /// Of `InitCluster`: initialised now, or before with the same values.
    Init(Result<(), InitRefusal>),
    /// Of `RaiseGeneration`.
    Generation(Result<(), GenerationRefusal>),
    /// Of `AdmitCertificate`, `Revoke`, `AnnounceNode`, `SetStanding`, `ForgetNode` and `LabelNode`: the number of the change.
    Node(Result<FeedNumber, NodeRefusal>),
    /// Of `RegisterRegion`: the life that the region is in now.
    Region(Result<Incarnation, RegionRefusal>),
    /// Of `RecordRegion`: the number of the change.
    Record(Result<FeedNumber, RegionRefusal>),
    /// Of `DeclareDead`: the regions whose life ended.
    Dead(Result<Vec<RegionId>, RegionRefusal>),
    /// Of `CreateNamespace`: its number.
    Namespace(Result<NamespaceId, NamespaceRefusal>),
    /// Of `LendExtent`: under which number it is lent.
    Lend(Result<LendNumber, LendRefusal>),
    /// Of `Returned`.
    Returned(Result<(), ReturnRefusal>),
    /// Of `Tick`.
    Tick,
    /// Of `BeginChange` and `EndChange`: the number of the change.
    Member(Result<Ordinal, MemberRefusal>),
}

/// What a cluster is made with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Cluster {
    /// Its random name.
    pub uuid: ClusterUuid,
    /// Its first generation; from 1.
    pub generation: Generation,
    /// How many shards it has, for ever.
    pub shards: u32,
    /// Public half of its root key.
    pub root: PublicKey,
}

/// Most shards of a cluster.
pub const SHARDS_MAX: u32 = 4096;

/// Why a cluster was not initialised.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum InitRefusal {
    /// It was, with other values.
    #[error("the cluster {} is already initialised, with {} shards", .as_it_is.uuid, .as_it_is.shards)]
    AlreadyInitialised {
        /// The values.
        as_it_is: Cluster,
    },
    /// No cluster has so many shards.
    #[error("a cluster has 1 to {SHARDS_MAX} shards, not {found}")]
    Shards {
        /// Shards asked for.
        found: u32,
    },
    /// Generations count from 1: 0 is the root's.
    #[error("the first generation is at least 1")]
    Generation,
    /// The root key is no usable key.
    #[error("the root key is not usable")]
    RootKey,
}

/// Why a generation was not begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum GenerationRefusal {
    /// The cluster was not initialised yet.
    #[error("the cluster is not initialised")]
    NotInitialised,
    /// It is not above the present one.
    #[error("{found} is not above the present {current}")]
    NotAbove {
        /// The present one.
        current: Generation,
        /// The one named.
        found: Generation,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct ClusterEntry {
    /// As it was initialised.
    first: Cluster,
    generation: Generation,
    /// When the generation began.
    changed: FeedNumber,
}

/// The state of the directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Directory {
    now: LogTime,
    /// How long outcomes are kept.
    outcome_kept: Duration,
    cluster: Option<ClusterEntry>,
    /// Number of the newest change.
    last: FeedNumber,
    certificates: BTreeMap<CertificateSerial, Numbered<Certificate>>,
    revocations: Option<Numbered<Revocations>>,
    nodes: BTreeMap<NodeId, Node>,
    /// Nodes whose numbers are used up: meta nodes that were removed, data nodes that were forgotten.
    retired: BTreeMap<NodeId, FeedNumber>,
    members: Members,
    namespaces: BTreeMap<NamespaceId, NamespaceEntry>,
    /// The highest number given to a namespace.
    namespace_last: NamespaceId,
    regions: BTreeMap<RegionId, RegionEntry>,
    extents: BTreeMap<ExtentId, Lending>,
    requests: Requests<Result<NamespaceId, NamespaceRefusal>>,
    /// Numbers of namespaces by name.
    #[serde(skip)]
    names: BTreeMap<String, NamespaceId>,
    /// What each number is about.
    #[serde(skip)]
    index: BTreeMap<FeedNumber, Topic>,
    #[serde(skip)]
    keyring: Option<Keyring>,
}

impl Default for Directory {
    fn default() -> Self {
        Self::new()
    }
}

impl Directory {
    /// A directory that was told nothing.
    #[must_use]
    pub fn new() -> Self {
        Self {
            now: LogTime(0),
            outcome_kept: OUTCOME_KEPT,
            cluster: None,
            last: FeedNumber::new(Generation(0), 0),
            certificates: BTreeMap::new(),
            revocations: None,
            nodes: BTreeMap::new(),
            retired: BTreeMap::new(),
            members: Members::new(),
            namespaces: BTreeMap::new(),
            namespace_last: NamespaceId(0),
            regions: BTreeMap::new(),
            extents: BTreeMap::new(),
            requests: Requests::new(),
            names: BTreeMap::new(),
            index: BTreeMap::new(),
            keyring: None,
        }
    }

    /// Applies one command of an entry stamped `at`. A stamp below the last one counts as the last one.
    pub fn apply(&mut self, at: LogTime, command: DirectoryCommand) -> DirectoryOutcome {
        self.now = self.now.max(at);
        self.requests.forget(self.now, self.outcome_kept);
        match command {
            DirectoryCommand::InitCluster(cluster) => DirectoryOutcome::Init(self.init(cluster)),
            DirectoryCommand::RaiseGeneration { generation } => {
                DirectoryOutcome::Generation(self.raise_generation(generation))
            }
            DirectoryCommand::AdmitCertificate(signed) => DirectoryOutcome::Node(self.admit(&signed)),
            DirectoryCommand::Revoke(list) => DirectoryOutcome::Node(self.revoke(&list)),
            DirectoryCommand::AnnounceNode { node, address } => DirectoryOutcome::Node(self.announce(node, &address)),
            DirectoryCommand::RegisterRegion { node, index, bytes, life } => {
                DirectoryOutcome::Region(self.register_region(node, index, bytes, life))
            }
            DirectoryCommand::RecordRegion(signed) => DirectoryOutcome::Record(self.record_region(&signed)),
            DirectoryCommand::DeclareDead { node, judged } => DirectoryOutcome::Dead(self.declare_dead(node, &judged)),
            DirectoryCommand::CreateNamespace { request, name, policy } => {
                DirectoryOutcome::Namespace(self.create_namespace(request, &name, policy))
            }
            DirectoryCommand::LendExtent { extent, shard } => DirectoryOutcome::Lend(self.lend(extent, shard)),
            DirectoryCommand::Returned { extent, shard, lend } => {
                DirectoryOutcome::Returned(self.take_back(extent, shard, lend))
            }
            DirectoryCommand::Tick => DirectoryOutcome::Tick,
            DirectoryCommand::BeginChange(change) => DirectoryOutcome::Member(self.begin_change(change)),
            DirectoryCommand::EndChange { number, cancelled } => {
                DirectoryOutcome::Member(self.end_change(number, cancelled))
            }
            DirectoryCommand::LabelNode { node, labels } => DirectoryOutcome::Node(self.label(node, labels)),
            DirectoryCommand::SetStanding { node, standing } => {
                DirectoryOutcome::Node(self.set_standing(node, standing))
            }
            DirectoryCommand::ForgetNode { node } => DirectoryOutcome::Node(self.forget_node(node)),
        }
    }

    fn init(&mut self, cluster: Cluster) -> Result<(), InitRefusal> {
        if let Some(held) = &self.cluster {
            let as_it_is = held.first;
            return if as_it_is == cluster { Ok(()) } else { Err(InitRefusal::AlreadyInitialised { as_it_is }) };
        }
        if cluster.shards == 0 || cluster.shards > SHARDS_MAX {
            return Err(InitRefusal::Shards { found: cluster.shards });
        }
        if cluster.generation.0 == 0 {
            return Err(InitRefusal::Generation);
        }
        let mut keyring = Keyring::new(cluster.uuid, cluster.root).map_err(|_| InitRefusal::RootKey)?;
        keyring.see_generation(cluster.generation);
        self.keyring = Some(keyring);
        let changed = FeedNumber::new(cluster.generation, 1);
        self.cluster = Some(ClusterEntry { first: cluster, generation: cluster.generation, changed });
        self.last = changed;
        self.index.insert(changed, Topic::Generation);
        Ok(())
    }

    /// Voids all memory and numbers everything anew, in its old order, so that every shard and client is told everything again.
    fn raise_generation(&mut self, generation: Generation) -> Result<(), GenerationRefusal> {
        let cluster = self.cluster.as_mut().ok_or(GenerationRefusal::NotInitialised)?;
        if generation <= cluster.generation {
            return Err(GenerationRefusal::NotAbove { current: cluster.generation, found: generation });
        }
        cluster.generation = generation;
        if let Some(keyring) = &mut self.keyring {
            keyring.see_generation(generation);
        }
        self.give_up_change();
        for lending in self.extents.values_mut() {
            lending.shard = None;
        }
        let regions: Vec<_> = self.regions.keys().copied().collect();
        for region in regions {
            self.new_life(region, None);
        }
        let old = std::mem::take(&mut self.index);
        let begun = self.touch(Topic::Generation, None);
        for topic in old.into_values() {
            self.renumber(topic, begun);
        }
        Ok(())
    }

    fn renumber(&mut self, topic: Topic, begun: FeedNumber) {
        if topic == Topic::Generation {
            if let Some(cluster) = &mut self.cluster {
                cluster.changed = begun;
            }
            return;
        }
        let changed = self.touch(topic, None);
        let gone = "the index points only at what there is";
        match topic {
            Topic::Generation => {}
            Topic::Certificate(serial) => self.certificates.get_mut(&serial).expect(gone).changed = changed,
            Topic::Revocations => self.revocations.as_mut().expect(gone).changed = changed,
            Topic::Node(id) => self.nodes.get_mut(&id).expect(gone).changed = changed,
            Topic::Retired(id) => *self.retired.get_mut(&id).expect(gone) = changed,
            Topic::Namespace(id) => self.namespaces.get_mut(&id).expect(gone).changed = changed,
            Topic::Region(id) => self.regions.get_mut(&id).expect(gone).changed = changed,
            Topic::Record(id) => {
                self.regions.get_mut(&id).and_then(|held| held.record.as_mut()).expect(gone).changed = changed;
            }
            Topic::Extent(id) => self.extents.get_mut(&id).expect(gone).changed = changed,
        }
    }

    /// Log time of the last entry.
    #[must_use]
    pub const fn log_time(&self) -> LogTime {
        self.now
    }

    /// When something happens by itself next: the leader stamps an entry then.
    #[must_use]
    pub fn next_deadline(&self) -> Option<LogTime> {
        self.requests.next_deadline(self.outcome_kept)
    }

    /// What the cluster was made with; none before it was.
    #[must_use]
    pub fn cluster(&self) -> Option<&Cluster> {
        self.cluster.as_ref().map(|held| &held.first)
    }

    /// The present generation; 0 before the cluster is initialised.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.cluster.as_ref().map_or(Generation(0), |held| held.generation)
    }

    /// How many shards there are; 0 before the cluster is initialised.
    #[must_use]
    pub fn shards(&self) -> u32 {
        self.cluster.as_ref().map_or(0, |held| held.first.shards)
    }

    /// Canonical bytes of the whole state.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        snapshot::encode(Machine::Directory, self)
    }

    /// Writes what [`Directory::encode`] answers, piece by piece.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn encode_to(&self, out: impl io::Write) -> io::Result<()> {
        snapshot::encode_to(Machine::Directory, self, out)
    }

    /// SHA-256 over [`Directory::encode`]: equal on all replicas that applied the same entries.
    #[must_use]
    pub fn hash(&self) -> StateHash {
        snapshot::hash(Machine::Directory, self)
    }

    /// Reads what [`Directory::encode`] wrote, checked.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, SnapshotError> {
        Self::decode_from(bytes)
    }

    /// Reads what [`Directory::encode`] wrote, to the end of `input`, checked.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn decode_from(input: impl io::Read) -> Result<Self, SnapshotError> {
        let mut state: Self = snapshot::decode_from(Machine::Directory, input)?;
        state.rebuild()?;
        state.check()?;
        Ok(state)
    }

    /// Makes what is kept beside the state from the state.
    fn rebuild(&mut self) -> Result<(), Violation> {
        self.names = self.namespaces.values().map(|held| (held.namespace.name.clone(), held.namespace.id)).collect();
        self.index = self.index_of_state();
        self.keyring = self.keyring_of_state()?;
        Ok(())
    }
}
