//! What a shard is told, and what it answers; `refusal` has its reasons for turning something down. Outcomes are replicated: same entry, same outcome, on every replica.

use super::{
    CommitRefusal, CopyRefusal, DeleteRefusal, DropRefusal, EvictRefusal, FeedRefusal, GrantRefusal, PinMiss,
    PinRefusal, RenewRefusal, Resigned, SealRefusal,
};
use crate::{
    directory::FeedSlice,
    requests::{RequestId, RequestRefusal},
};
use quarry_wire::{
    frame::{FrameHeader, FrameKind},
    grant::Grant,
    ids::{
        CertificateSerial, ExtentId, FeedNumber, Generation, GrantId, Incarnation, LendNumber, NamespaceId, NodeId,
        PinId, RegionId, SlotIndex, WriterId,
    },
    key::Key,
    signed::Signature,
    units::{LogTime, Offset, SlotCount, SlotSize},
    version::Version,
};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A command for a shard.
///
/// Journaled copies and objects will be further variants, added at the end so that old entries keep their meaning.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ShardCommand {
    /// Changes of the directory, as [`crate::Directory::feed_since`] gave them.
    ApplyFeed(FeedSlice),
    /// A slab for a writer, on the holders that the leader proposes.
    Grant {
        /// The proposing meta node: named as the signer.
        meta: NodeId,
        /// What the writer asked for.
        asked: GrantRequest,
        /// Where, at distinct nodes; the order is kept.
        holders: Vec<Proposed>,
    },
    /// Frames were written and attested: make them the current versions.
    Publish(Publish),
    /// The writer takes no slots at or above `fill` any more.
    Seal {
        /// The grant.
        grant: GrantId,
        /// The fill mark.
        fill: SlotCount,
    },
    /// Remove keys.
    Delete {
        /// Its name.
        request: RequestId,
        /// Namespace of the keys.
        namespace: NamespaceId,
        /// The keys, each removed or refused on its own.
        keys: Vec<DeleteKey>,
    },
    /// Give an extent back to the directory, if all of it is free and rested.
    DropExtent {
        /// The extent.
        extent: ExtentId,
        /// The lending that is meant.
        lend: LendNumber,
    },
    /// Time passes; the horizon may be raised.
    Tick {
        /// Promise that no lease ends after this log time.
        horizon: Option<LogTime>,
    },
    /// Keep the current versions of keys where they are.
    Pin(PinRequest),
    /// A pin is to last longer.
    Renew {
        /// Its name.
        request: RequestId,
        /// Whose pin it is.
        owner: WriterId,
        /// The pin.
        pin: PinId,
        /// How long from the command's log time; a pin that lasts longer already goes on as it was.
        duration: Duration,
    },
    /// The owner reads no more through a pin.
    Release {
        /// Whose pin it is.
        owner: WriterId,
        /// The pin.
        pin: PinId,
    },
    /// A slab for copies that their holders move within their own memory, at places that the leader proposes.
    GrantMove {
        /// The proposing meta node: named as the signer.
        meta: NodeId,
        /// The slab.
        asked: MoveRequest,
        /// Where, at distinct nodes; the order is kept.
        holders: Vec<Proposed>,
    },
    /// A data node signed batches again, with its new key.
    Resign {
        /// The node; the leader has checked that it is the one.
        node: NodeId,
        /// The batches; those that are gone are left out.
        batches: Vec<Resigned>,
    },
    /// Slabs of class `cache` are to go whole, to make room.
    Evict {
        /// The grants of the slabs, each evicted or refused on its own.
        victims: Vec<GrantId>,
    },
    /// A holder looked at a copy of its own that a reader complained of.
    DropCopy(CheckedCopy),
    /// Somebody found no place for a slot at these nodes: the shard is to be lent an extent of each.
    Want {
        /// The nodes; those that the shard knows no region of are left out.
        nodes: Vec<NodeId>,
        /// Bytes of the slot.
        bytes: u64,
    },
}

/// What became of a [`ShardCommand`], variant by variant.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ShardOutcome {
    /// Of `ApplyFeed`: the position afterwards.
    Feed(Result<FeedNumber, FeedRefusal>),
    /// Of `Grant` and `GrantMove`: the grant, to be signed. A leader that did not propose it names itself as `meta` before it signs.
    Grant(Result<Grant, GrantRefusal>),
    /// Of `Publish`: one outcome per entry, in order.
    Publish(Vec<CommitOutcome>),
    /// Of `Seal`: the fill mark that holds, the first one told.
    Seal(Result<SlotCount, SealRefusal>),
    /// Of `Delete`: one outcome per key, in order.
    Delete(Result<Vec<Result<Deleted, DeleteRefusal>>, RequestRefusal>),
    /// Of `DropExtent`: dropped now or before; it is in [`super::Shard::returned`] until the feed shows it.
    DropExtent(Result<(), DropRefusal>),
    /// Of `Tick`: the horizon that holds.
    Tick {
        /// The horizon.
        horizon: LogTime,
    },
    /// Of `Pin`: the pin.
    Pin(Result<Pinned, PinRefusal>),
    /// Of `Renew`: how it lasts now.
    Renew(Result<PinTerm, RenewRefusal>),
    /// Of `Release`: whether there was such a pin of this owner; there is none now.
    Release {
        /// There was.
        held: bool,
    },
    /// Of `Resign`: how many signatures took the place of others.
    Resign {
        /// The count.
        taken: u32,
    },
    /// Of `Evict`: one outcome per victim, in order.
    Evict(Vec<Result<Evicted, EvictRefusal>>),
    /// Of `DropCopy`: the copy is one no more.
    DropCopy(Result<DroppedCopy, CopyRefusal>),
    /// Of `Want`: it is noted until an extent of the node is lent.
    Want,
}

/// What went with a slab.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Evicted {
    /// Values that are no more.
    pub values: u32,
    /// Bytes that rest now, all copies counted.
    pub bytes: u64,
}

/// A copy that its holder looked at, and what it found there.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CheckedCopy {
    /// Namespace of the key.
    pub namespace: NamespaceId,
    /// The key.
    pub key: Key,
    /// The version that should lie there.
    pub version: Version,
    /// In which region of the node that looked; the leader has checked that the caller is that node.
    pub region: RegionId,
    /// In which life of the region.
    pub incarnation: Incarnation,
    /// Where the frame begins in the region.
    pub offset: Offset,
    /// The header of the frame that lies there, whose payload has the CRC that it says; none if no whole frame lies there.
    pub found: Option<FrameHeader>,
}

/// A damaged copy is one no more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DroppedCopy {
    /// Copies that the value has left; with none it is gone.
    pub left: u8,
}

/// Which values are to be kept, for whom and how long.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PinRequest {
    /// Its name.
    pub request: RequestId,
    /// Who will read.
    pub owner: WriterId,
    /// Namespace of the keys.
    pub namespace: NamespaceId,
    /// The keys, at most [`quarry_wire::limits::KEYS_PER_PIN_MAX`].
    pub keys: Vec<Key>,
    /// How long from the command's log time; at most [`quarry_wire::limits::PIN_MAX`].
    pub duration: Duration,
}

/// What came of a [`PinRequest`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Pinned {
    /// The pin; none if no key had a value to keep.
    pub pin: Option<PinId>,
    /// How long it lasts unless it is renewed or released.
    pub term: PinTerm,
    /// The version kept of each key, in order.
    pub keys: Vec<Result<Version, PinMiss>>,
}

/// How long a pin lasts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PinTerm {
    /// Counted by the reader from sending its request: what was asked for.
    pub duration: Duration,
    /// In log time.
    pub until: LogTime,
}

/// What a writer asks for.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GrantRequest {
    /// Its name.
    pub request: RequestId,
    /// Who will write.
    pub writer: WriterId,
    /// For which namespace.
    pub namespace: NamespaceId,
    /// Bytes per slot, a multiple of 64, frame header included.
    pub slot_size: SlotSize,
    /// Slots of the slab.
    pub slots: SlotCount,
    /// How long; at most [`quarry_wire::limits::GRANT_TTL_MAX`].
    pub ttl: Duration,
}

/// A slab for values that are moved. It is no request that may come again: what is not used ends by its TTL.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MoveRequest {
    /// Of which namespace the values are.
    pub namespace: NamespaceId,
    /// Bytes per slot, as for a [`GrantRequest`].
    pub slot_size: SlotSize,
    /// Slots of the slab.
    pub slots: SlotCount,
    /// How long; at most [`quarry_wire::limits::GRANT_TTL_MAX`].
    pub ttl: Duration,
}

/// A place for a slab that the leader proposes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Proposed {
    /// In which extent.
    pub extent: ExtentId,
    /// Where slot 0 begins, counted from the start of the region.
    pub base: Offset,
}

/// Frames that were written under one grant, with the holders' statements about them.
///
/// The leader has checked the signatures before it proposes ([`super::Shard::attested_batch`] gives the statement to check); apply rebuilds
/// the leaves and keeps them with the signature.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Publish {
    /// The grant.
    pub grant: GrantId,
    /// One per frame, in the order in which the holders made their trees.
    pub entries: Vec<CommitEntry>,
    /// One per holder that confirmed.
    pub attested: Vec<Attested>,
}

/// "Slot i now holds (key, version)".
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CommitEntry {
    /// The slot.
    pub slot: SlotIndex,
    /// The key.
    pub key: Key,
    /// Its new version.
    pub version: Version,
    /// What the frame carries.
    pub kind: FrameKind,
    /// Bytes of payload.
    pub payload_bytes: u64,
    /// CRC-32C of the payload.
    pub payload_crc: u32,
    /// What must be true of the key.
    pub mode: Mode,
}

/// What must be true of a key for a commit to take effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Mode {
    /// It has no value.
    Create,
    /// It has none, or one of a lower version.
    Replace,
    /// Its current version is exactly this one (none: it has no value), and lower than the new one.
    Compare {
        /// The version that is expected.
        expected: Option<Version>,
    },
    /// Its current value is this very frame at that place, and no pin is on it: only under a grant for moves, which takes no other mode.
    Move {
        /// Where the value is written down until now.
        from: ValuePlace,
    },
}

/// Where a value is written down: a slot of a grant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ValuePlace {
    /// The grant.
    pub grant: GrantId,
    /// The slot of its slab.
    pub slot: SlotIndex,
}

/// A holder's signature over the entries of a [`Publish`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Attested {
    /// The holder.
    pub node: NodeId,
    /// Over which entries its tree was made.
    pub covers: Covers,
    /// Generation in which it was signed.
    pub generation: Generation,
    /// Certificate of the key that signed.
    pub serial: CertificateSerial,
    /// The signature over the batch.
    pub signature: Signature,
}

/// Which entries are the leaves of a holder's tree.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Covers {
    /// All, in order.
    All,
    /// These, by ascending index: the holder refused the others.
    Only(Vec<u32>),
}

/// A key to remove.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeleteKey {
    /// The key.
    pub key: Key,
    /// Only if this is its current version; none: whatever it is.
    pub expected: Option<Version>,
}

/// A key was removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Deleted {
    /// The version that it had.
    pub version: Version,
}

/// What became of one entry of a [`Publish`].
pub type CommitOutcome = Result<Committed, CommitRefusal>;

/// A commit that holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Committed {
    /// This slot became the key's current version.
    Applied,
    /// The key already had this very version, committed under another slot; this slot is given back.
    AlreadyCurrent,
}
