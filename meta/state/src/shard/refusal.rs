//! Why a shard turns a command down, or a part of it. Refusals are outcomes like others: replicated, the same on every replica.

use crate::requests::RequestRefusal;
use quarry_wire::{
    grant::Class,
    ids::{ExtentId, FeedNumber, GrantId, LendNumber, NamespaceId, NodeId, PinId, RegionId, ShardId, SlotIndex},
    units::{LogTime, Offset, SlotCount, SlotSize},
    version::Version,
};
use serde::{Deserialize, Serialize};
use std::time::Duration;

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
    /// There is no place yet, but the directory has memory to lend.
    #[error(
        "there is no place for the slab yet at {needed} nodes, only at {found}; at others the directory has memory to lend"
    )]
    NotLentYet {
        /// Nodes asked for.
        needed: u8,
        /// Nodes with a place.
        found: u8,
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
