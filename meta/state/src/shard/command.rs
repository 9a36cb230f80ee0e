//! What a shard is told, and what it answers. Outcomes are replicated: same entry, same outcome, on every replica.

use super::Resigned;
use crate::{
    directory::FeedSlice,
    requests::{RequestId, RequestRefusal},
};
use quarry_wire::{
    frame::FrameKind,
    grant::{Class, Grant},
    ids::{
        CertificateSerial, ExtentId, FeedNumber, Generation, GrantId, Incarnation, LendNumber, NamespaceId, NodeId,
        PinId, RegionId, ShardId, SlotIndex, WriterId,
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
}

/// What went with a slab.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Evicted {
    /// Values that are no more.
    pub values: u32,
    /// Bytes that rest now, all copies counted.
    pub bytes: u64,
}

/// Why a slab was not evicted. Nothing of it was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum EvictRefusal {
    /// There is no such slab: it never was, or went before.
    #[error("there is no slab of the grant {grant}: it never was, or went before")]
    UnknownSlab {
        /// The grant named.
        grant: GrantId,
    },
    /// Its values may not vanish.
    #[error("the slab of the grant {grant} is of class {class:?}: only Cache is evicted")]
    NotCache {
        /// The grant named.
        grant: GrantId,
        /// Its class.
        class: Class,
    },
    /// Its writer may still commit slots of it.
    #[error("the grant {grant} is not over: its slab goes once it is closed or expired")]
    StillGranted {
        /// The grant named.
        grant: GrantId,
    },
    /// A pin is on a value of it.
    #[error("a pin is on a value of the slab of the grant {grant}: it goes once its pins ended")]
    Pinned {
        /// The grant named.
        grant: GrantId,
    },
    /// None of its slots is a copy any more.
    #[error("nothing is left in the slab of the grant {grant}")]
    Empty {
        /// The grant named.
        grant: GrantId,
    },
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
    /// The frame that lies there whole, header and payload; none if there is none.
    pub found: Option<FoundFrame>,
}

/// What a whole frame says of itself, its payload's CRC checked.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FoundFrame {
    /// Namespace of the key.
    pub namespace: NamespaceId,
    /// The key.
    pub key: Key,
    /// The version.
    pub version: Version,
    /// What the frame carries.
    pub kind: FrameKind,
    /// Bytes of payload.
    pub payload_bytes: u64,
    /// CRC-32C of the payload.
    pub payload_crc: u32,
}

/// A damaged copy is one no more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DroppedCopy {
    /// Copies that the value has left; with none it is gone.
    pub left: u8,
}

/// Why a copy that a reader complained of stays what it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum CopyRefusal {
    /// The key has no value, or one of another version.
    #[error("this is not the key's current version")]
    NotCurrent,
    /// The value has no copy there.
    #[error("the value has no copy at this place of this life of the region")]
    NotThere,
    /// It is damaged, and a pin is on the value.
    #[error("the copy is damaged, and stays until the pins on its value have ended")]
    Pinned,
    /// What lies there is what was committed.
    #[error("the frame is the one that was committed")]
    Intact,
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

/// Why a key has no value under a pin.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum PinMiss {
    /// It has no value.
    #[error("the key has no value")]
    NotFound,
    /// It belongs to another shard.
    #[error("the key belongs to {expected}, this is {found}")]
    WrongShard {
        /// The key's shard.
        expected: ShardId,
        /// This shard.
        found: ShardId,
    },
}

/// Why nothing was pinned. Refusals are not recorded: nothing was changed, and the same request may be taken later.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum PinRefusal {
    /// The request itself was not looked at.
    #[error(transparent)]
    Request(#[from] RequestRefusal),
    /// No pin lasts so long.
    #[error("a pin lasts from 1 ms to {most:?}, not {found:?}: renew it")]
    Duration {
        /// Longest time.
        most: Duration,
        /// Time asked for.
        found: Duration,
    },
    /// Too many keys for one pin.
    #[error("a pin has 1 to {most} keys, not {found}: pin the others apart")]
    Keys {
        /// Most keys.
        most: u32,
        /// Keys named.
        found: u32,
    },
    /// The owner has as many pins as one may have in one shard.
    #[error("the client holds {limit} pins in this shard, which is the most: release some, the next one ends in {} ms", .retry_after.as_millis())]
    OwnersPins {
        /// Most pins.
        limit: u32,
        /// When the next of them ends unless it is renewed.
        retry_after: Duration,
    },
    /// There are as many pins as a shard may have.
    #[error("the shard holds {limit} pins, which is the most: the next one ends in {} ms", .retry_after.as_millis())]
    ShardsPins {
        /// Most pins.
        limit: u32,
        /// When the next of them ends unless it is renewed.
        retry_after: Duration,
    },
}

/// Why a pin was not renewed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum RenewRefusal {
    /// The request itself was not looked at.
    #[error(transparent)]
    Request(#[from] RequestRefusal),
    /// No pin lasts so long.
    #[error("a pin lasts from 1 ms to {most:?}, not {found:?}: renew it again later")]
    Duration {
        /// Longest time.
        most: Duration,
        /// Time asked for.
        found: Duration,
    },
    /// The owner has no such pin: it ended, was released, or never was.
    #[error("the client holds no pin {pin}: it ended, was released, or never was")]
    UnknownPin {
        /// The pin named.
        pin: PinId,
    },
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

/// Why a commit was turned down.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum CommitRefusal {
    /// Create, but the key has a value.
    #[error("the key already has version {current}")]
    Exists {
        /// Its version.
        current: Version,
    },
    /// The key has a later version.
    #[error("the key already has the later version {current}: merge its clock and write again")]
    StaleVersion {
        /// Its version.
        current: Version,
    },
    /// Compare, but the key has another version.
    #[error("the key does not have the expected version but {current:?}")]
    CompareFailed {
        /// Its version, if it has a value.
        current: Option<Version>,
    },
    /// The grant is over.
    #[error("the grant expired at {expired_at}, it is {at}: write again under a new grant")]
    GrantExpired {
        /// When it expired.
        expired_at: LogTime,
        /// Log time of the refusal.
        at: LogTime,
    },
    /// The grant was sealed below this slot.
    #[error("the grant was sealed at {fill:?}: write again under a new grant")]
    Sealed {
        /// The fill mark.
        fill: SlotCount,
    },
    /// Too few holders said that they have it, or too few of those that said it still count.
    #[error("{attested} holders have the frame, {needed} are needed: write again")]
    NotEnoughHolders {
        /// How many are needed.
        needed: u8,
        /// How many count.
        attested: u8,
    },
    /// The grant is not known: never given, or closed so long ago that its outcomes are forgotten.
    #[error("the grant {grant} is not known: it was never given, or its outcomes are forgotten")]
    UnknownGrant {
        /// The grant named.
        grant: GrantId,
    },
    /// The slab has no such slot.
    #[error("{slot} is beyond the slab's {slots:?}")]
    NoSuchSlot {
        /// The slot named.
        slot: SlotIndex,
        /// How many there are.
        slots: SlotCount,
    },
    /// The slot was committed, or refused, with another frame.
    #[error("{slot} was already answered for a frame of version {version}: a slot carries one frame per grant")]
    SlotTaken {
        /// The slot.
        slot: SlotIndex,
        /// Version of the frame that it was answered for.
        version: Version,
    },
    /// The frame does not fit in the slot.
    #[error("the frame has {found} bytes, the slot {limit}")]
    TooLarge {
        /// Bytes per slot.
        limit: u64,
        /// Bytes of the frame.
        found: u64,
    },
    /// The key belongs to another shard.
    #[error("the key belongs to {expected}, this is {found}")]
    WrongShard {
        /// The key's shard.
        expected: ShardId,
        /// This shard.
        found: ShardId,
    },
    /// A move, but the key's value is not that frame at that place any more: it was replaced, deleted, or moved already.
    #[error("the key's value is not the one that was to be moved, its version is {current:?}")]
    NotCurrent {
        /// Its version, if it has a value.
        current: Option<Version>,
    },
    /// A move, but a pin is on the value.
    #[error("a pin keeps the value where it is")]
    Pinned,
    /// A move under another grant than one for moves, or another commit under such a grant.
    #[error("the grant is for another purpose than this commit")]
    Purpose,
}

/// Why no slab was granted. Refusals are not recorded: nothing was changed, and the same request may be granted later.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum GrantRefusal {
    /// The request itself was not looked at.
    #[error(transparent)]
    Request(#[from] RequestRefusal),
    /// No such namespace here.
    #[error("{namespace} is not known at feed position {position}")]
    UnknownNamespace {
        /// The namespace named.
        namespace: NamespaceId,
        /// How far this shard has followed the directory.
        position: FeedNumber,
    },
    /// No slot has this size.
    #[error("a slot size is a multiple of 64 from {least} to {most} bytes, not {}", .found.0)]
    SlotSize {
        /// Smallest size.
        least: u32,
        /// Largest size.
        most: u64,
        /// Size asked for.
        found: SlotSize,
    },
    /// No slab has so many slots.
    #[error("a slab has 1 to {most} slots, not {}", .found.0)]
    Slots {
        /// Most slots.
        most: u32,
        /// Slots asked for.
        found: SlotCount,
    },
    /// No grant lives so long.
    #[error("a grant lives from 1 ms to {most:?}, not {found:?}")]
    Ttl {
        /// Longest life.
        most: Duration,
        /// Life asked for.
        found: Duration,
    },
    /// Too few or too many holders were proposed.
    #[error("the namespace wants {least} to {most} holders, {found} were proposed")]
    Holders {
        /// Fewest.
        least: u8,
        /// Most.
        most: u8,
        /// Proposed.
        found: u32,
    },
    /// Two holders were proposed at one node.
    #[error("{node} was proposed twice")]
    SameNode {
        /// The node.
        node: NodeId,
    },
    /// The extent is not lent to this shard.
    #[error("{extent} is not lent to this shard")]
    NotLent {
        /// The extent.
        extent: ExtentId,
    },
    /// The region cannot be used now.
    #[error("{region} is not up")]
    RegionDown {
        /// The region.
        region: RegionId,
    },
    /// The slab does not lie in the extent.
    #[error("a slab at {base} with {bytes} bytes does not lie inside {extent}")]
    OutsideExtent {
        /// The extent.
        extent: ExtentId,
        /// Where the slab was proposed.
        base: Offset,
        /// Its bytes.
        bytes: u64,
    },
    /// The bytes are in use or rest.
    #[error("{extent} is not free at {base}")]
    NotFree {
        /// The extent.
        extent: ExtentId,
        /// Where the slab was proposed.
        base: Offset,
    },
    /// The namespace has used up its share of this shard.
    #[error(
        "the namespace has {used} of its {limit} bytes in this shard in use, {asked} more were asked for{}",
        if *.comes_back { "; values of it that were not read for long make room" } else { "" }
    )]
    Quota {
        /// Its bytes in this shard.
        limit: u64,
        /// Bytes in use, all copies counted.
        used: u64,
        /// Bytes asked for, all copies counted.
        asked: u64,
        /// Whether waiting helps: a namespace of class `cache` loses slabs of its own then.
        comes_back: bool,
    },
    /// Enough nodes have the memory, but some of them are down or cannot be reached.
    #[error("a slab needs {needed} nodes, {found} have room and {silent} are down or cannot be reached")]
    TooFewNodes {
        /// Nodes needed.
        needed: u8,
        /// Nodes with room that answer.
        found: u8,
        /// Nodes with extents large enough that do not answer.
        silent: u8,
    },
    /// There is no room now.
    #[error("no space for a slab on {needed} nodes, only on {found}{}", coming(.retry_after.as_ref()))]
    NoSpace {
        /// Nodes needed.
        needed: u8,
        /// Nodes with room.
        found: u8,
        /// When space that rests, is granted or can be evicted may be free, counted from the leader's log time; none if nothing is coming
        /// back.
        retry_after: Option<Duration>,
    },
}

/// In a sentence: when space comes back.
fn coming(retry_after: Option<&Duration>) -> String {
    retry_after.map_or_else(
        || ", and nothing is coming back".to_owned(),
        |after| format!("; some comes back in {} ms", after.as_millis()),
    )
}

/// Why a seal was turned down.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum SealRefusal {
    /// The grant is not known.
    #[error("the grant {grant} is not known: it was never given, or its outcomes are forgotten")]
    UnknownGrant {
        /// The grant named.
        grant: GrantId,
    },
    /// The fill mark lies beyond the slab.
    #[error("the fill mark {found:?} is beyond the slab's {slots:?}")]
    BeyondSlab {
        /// Slots of the slab.
        slots: SlotCount,
        /// The mark named.
        found: SlotCount,
    },
}

/// Why a key was not removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum DeleteRefusal {
    /// It has no value.
    #[error("the key has no value")]
    NotFound,
    /// It has another version.
    #[error("the key has version {current}, {expected} was expected")]
    CompareFailed {
        /// The version expected.
        expected: Version,
        /// The version that it has.
        current: Version,
    },
    /// It belongs to another shard.
    #[error("the key belongs to {expected}, this is {found}")]
    WrongShard {
        /// The key's shard.
        expected: ShardId,
        /// This shard.
        found: ShardId,
    },
}

/// Why an extent was not dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum DropRefusal {
    /// This shard does not hold it under that lending.
    #[error("{extent} is not held under {found}, but under {held:?}")]
    NotHeld {
        /// The extent.
        extent: ExtentId,
        /// The lending under which it is held, if it is.
        held: Option<LendNumber>,
        /// The lending named.
        found: LendNumber,
    },
    /// Some of it is in use or rests.
    #[error("{extent} has only {free} of {bytes} bytes free")]
    InUse {
        /// The extent.
        extent: ExtentId,
        /// Bytes free.
        free: u64,
        /// Bytes in all.
        bytes: u64,
    },
}

/// Why a slice of the feed was not applied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum FeedRefusal {
    /// Entries between the shard's position and the slice are missing.
    #[error("the slice follows {found}, this shard is only at {position}: ask again from there")]
    Gap {
        /// The shard's position.
        position: FeedNumber,
        /// Where the slice begins.
        found: FeedNumber,
    },
    /// The slice's entries do not ascend from its beginning to its end.
    #[error("the slice is out of order at {found}")]
    OutOfOrder {
        /// The number that is out of order.
        found: FeedNumber,
    },
}
