//! Who and what: the names of clusters, nodes, namespaces, regions, extents, grants and slots.
//!
//! Every number that orders anything is read as (generation, number), because a cluster restored from a backup counts again from an older point.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty), $shown:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
        pub struct $name(pub $inner);
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($shown, "{}"), self.0)
            }
        }
    };
}

/// The random name of a cluster; it survives restores.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct ClusterUuid(pub [u8; 16]);

impl fmt::Display for ClusterUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}
impl fmt::Debug for ClusterUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClusterUuid({self})")
    }
}
impl std::str::FromStr for ClusterUuid {
    type Err = hex::FromHexError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut bytes = [0; 16];
        hex::decode_to_slice(text, &mut bytes)?;
        Ok(Self(bytes))
    }
}

number! {
    /// How often this cluster was restored or rescued. A new generation voids all memory.
    Generation(u32), "gen-"
}
number! {
    /// A process of the cluster, meta or data; never used again.
    NodeId(u64), "node-"
}
number! {
    /// A namespace; never used again.
    NamespaceId(u32), "ns-"
}
number! {
    /// A Raft group that owns the keys hashing to it. Group 0 is the directory, shards count from 1.
    ShardId(u32), "shard-"
}
number! {
    /// Which region of its node; a node numbers its regions from 0.
    RegionIndex(u32), "region-"
}
number! {
    /// Which extent of its region.
    ExtentIndex(u32), "extent-"
}
number! {
    /// Which slot of its slab, from 0.
    SlotIndex(u32), "slot-"
}
number! {
    /// Counts how often a node registered one region in its present incarnation. A read key is valid in one epoch only.
    RegionEpoch(u64), "epoch-"
}
number! {
    /// A certificate; given by the root, never used again.
    CertificateSerial(u64), "cert-"
}

/// A number that orders something, together with the generation that it was counted in. Compares generation first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Ordinal {
    /// Generation of the cluster that gave the number.
    pub generation: Generation,
    /// The number itself; grows within a generation.
    pub number: u64,
}

impl fmt::Display for Ordinal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.generation.0, self.number)
    }
}

macro_rules! ordinal {
    ($(#[$doc:meta])* $name:ident, $shown:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
        pub struct $name(pub Ordinal);
        impl $name {
            /// Number `number` of generation `generation`.
            #[must_use]
            pub const fn new(generation: Generation, number: u64) -> Self {
                Self(Ordinal { generation, number })
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($shown, "{}"), self.0)
            }
        }
    };
}

ordinal! {
    /// Life of a region's contents, numbered by the directory: raised when they were lost (restart, declared dead, new generation).
    Incarnation, "inc-"
}
ordinal! {
    /// Which lending of an extent; only grows, per extent.
    LendNumber, "lend-"
}
ordinal! {
    /// A pin, by its place in the sequence of its shard; never used again.
    PinId, "pin-"
}
ordinal! {
    /// Position in the directory's feed of changes.
    FeedNumber, "feed-"
}

/// One span of a data node's memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct RegionId {
    /// The node whose memory it is.
    pub node: NodeId,
    /// Which of its regions.
    pub index: RegionIndex,
}

impl fmt::Display for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.node, self.index)
    }
}

/// Part of a region that is lent to one shard at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct ExtentId {
    /// The region that it is cut from.
    pub region: RegionId,
    /// Which part.
    pub index: ExtentIndex,
}

impl fmt::Display for ExtentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.region, self.index)
    }
}

/// A grant: the shard that gave it and its place in that shard's sequence, within a generation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct GrantId {
    /// The shard.
    pub shard: ShardId,
    /// (generation, sequence): only grows per shard.
    pub sequence: Ordinal,
}

impl fmt::Display for GrantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/grant-{}", self.shard, self.sequence)
    }
}

/// What fences writers at a holder: compares (generation, lend number, sequence). Of two grants over the same bytes the one with the higher
/// token is the later.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Token {
    /// Generation and number of the lending of the extent.
    pub lend: LendNumber,
    /// The grant's sequence number in the shard that held the extent under that lending.
    pub sequence: u64,
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "token-{}.{}", self.lend.0, self.sequence)
    }
}

/// Who writes: drawn once per client connection. The first 8 bytes are random, the last 8 mark the identity that the client proved (zero
/// where nobody proves one).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct WriterId(pub [u8; 16]);

impl WriterId {
    /// The holders of a grant themselves, each within its own memory: the writer of grants for moves. No client is given it: with mTLS its mark
    /// would be that of a name whose hash begins with it, without mTLS a client draws its 8 bytes and has no mark.
    pub const HOLDERS: Self = Self(*b"quarry\0\0holders\0");

    /// A writer without an authenticated identity; `random` must come from the operating system's generator.
    #[must_use]
    pub fn anonymous(random: [u8; 8]) -> Self {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&random);
        Self(id)
    }

    /// A writer of the identity with this mark.
    #[must_use]
    pub fn marked(random: [u8; 8], mark: [u8; 8]) -> Self {
        let mut id = Self::anonymous(random);
        id.0[8..].copy_from_slice(&mark);
        id
    }

    /// The mark of the identity that it belongs to.
    #[must_use]
    pub fn mark(self) -> [u8; 8] {
        let mut mark = [0; 8];
        mark.copy_from_slice(&self.0[8..]);
        mark
    }
}
impl fmt::Display for WriterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}
impl fmt::Debug for WriterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WriterId({self})")
    }
}
