//! Why a grant is not armed, and why a slot is not confirmed.

use quarry_wire::{
    ids::{GrantId, Incarnation, LendNumber, NodeId, RegionId, SlotIndex, Token, WriterId},
    units::SlotCount,
};
use std::ops::Range;

/// Why a grant is not armed here.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ArmRefusal {
    /// This node is not one of its holders, or has no such region.
    #[error("{node} holds no slab of {grant}")]
    NotAHolder {
        /// This node.
        node: NodeId,
        /// The grant.
        grant: GrantId,
    },
    /// It belongs to another writer.
    #[error("the grant belongs to writer {owner}, not to {found}")]
    Writer {
        /// Whose it is.
        owner: WriterId,
        /// Who asked.
        found: WriterId,
    },
    /// The region is not being lent at the moment: it is being registered.
    #[error("{region} has no incarnation now")]
    NoIncarnation {
        /// The region.
        region: RegionId,
    },
    /// It was given for another life of the region.
    #[error("{region} is in {current}, the grant is for {found}")]
    Incarnation {
        /// The region.
        region: RegionId,
        /// Its life.
        current: Incarnation,
        /// The one that the grant is for.
        found: Incarnation,
    },
    /// The slab does not lie in the extent that the grant names, or that extent not in the region.
    #[error("the slab {found:?} does not lie inside its extent {extent:?}")]
    OutOfBounds {
        /// Bytes of the extent, as far as the region has them.
        extent: Range<u64>,
        /// Bytes of the slab.
        found: Range<u64>,
    },
    /// The extent has been lent again since.
    #[error("the extent is lent under {current} here, the grant is of {found}")]
    Lending {
        /// The highest lending seen of this extent.
        current: LendNumber,
        /// The grant's.
        found: LendNumber,
    },
    /// A grant with this token or a higher one was armed on some of these bytes.
    #[error("{highest} was armed on some of these bytes, the grant has {found}")]
    LowerToken {
        /// The highest token there.
        highest: Token,
        /// The grant's.
        found: Token,
    },
    /// It was armed before, and its claim closed.
    #[error("{grant} was armed here and is closed: it never arms again in this incarnation")]
    Closed {
        /// The grant.
        grant: GrantId,
    },
    /// Its claim was closed together with its lane.
    #[error("the lane of {grant} was closed by force: take another grant; what was completed can still be committed")]
    LaneClosed {
        /// The grant.
        grant: GrantId,
    },
    /// All lanes are taken, and none takes another slab.
    #[error("all {limit} lanes are in use and none takes another slab now")]
    NoLane {
        /// Lanes that may be open at once.
        limit: usize,
    },
}

/// Why nothing, or not this slot, is confirmed for a grant.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ConfirmRefusal {
    /// It was not armed in this incarnation of its region, or closed long ago.
    #[error("{grant} was not armed here in this incarnation, or closed long ago")]
    UnknownGrant {
        /// The grant.
        grant: GrantId,
    },
    /// It belongs to another writer.
    #[error("the grant belongs to writer {owner}, not to {found}")]
    Writer {
        /// Whose it is.
        owner: WriterId,
        /// Who asked.
        found: WriterId,
    },
    /// The slab has no such slot.
    #[error("the slab has {slots} slots, there is no {slot}", slots = slots.0)]
    NoSuchSlot {
        /// The slot.
        slot: SlotIndex,
        /// How many there are.
        slots: SlotCount,
    },
    /// A higher token has claimed the slot's bytes since.
    #[error("{slot} was claimed since by {by}")]
    Superseded {
        /// The slot.
        slot: SlotIndex,
        /// By which token.
        by: Token,
    },
}
