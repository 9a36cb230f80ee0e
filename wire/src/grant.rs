//! Grants: the right of one writer to fill one slab on each of its holders until its TTL.
//!
//! ```text
//! body   = shard (4) ‖ sequence: generation (4), number (8) ‖ signing meta node (8) ‖ purpose (1) ‖ writer (16) ‖ namespace (4)
//!        ‖ class (1) ‖ least copies (1) ‖ slot size (4) ‖ slots (4) ‖ TTL in ms (4) ‖ holders (1) ‖ 3 × holder, unused ones zero
//! holder = node (8) ‖ region index (4) ‖ incarnation: generation (4), number (8) ‖ extent (4) ‖ lend number: generation (4), number (8)
//!        ‖ base offset (8)
//! ```
//! Slot `i` lies at `base + i * slot_size` on every holder. The data node is the last judge: it arms a grant only if the grant's token is
//! above every token it has seen on these bytes (*Fenced writers*).

use crate::{
    canonical::{DecodeError, Reader, Writer},
    ids::{
        ExtentIndex, Generation, GrantId, Incarnation, LendNumber, NamespaceId, NodeId, Ordinal, RegionId, RegionIndex,
        ShardId, SlotIndex, Token, WriterId,
    },
    limits::{COPIES_MAX, FRAME_ALIGN, GRANT_TTL_MAX, SLOTS_PER_SLAB_MAX},
    signed::{Statement, StatementKind},
    units::{Offset, SlotCount, SlotSize, millis},
};
use serde::{Deserialize, Serialize};
use std::{ops::Range, time::Duration};

/// Whether values may be evicted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Class {
    /// May be evicted, and vanishes with memory.
    Cache,
    /// Never evicted before it is safe elsewhere; journaled before it is acknowledged.
    Durable,
}

impl Class {
    /// The byte that stands for it.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Cache => 1,
            Self::Durable => 2,
        }
    }
    /// The class that `code` stands for.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Cache),
            2 => Some(Self::Durable),
            _ => None,
        }
    }
}

/// Why a slab is granted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub enum Purpose {
    /// A client writes.
    #[default]
    Write,
    /// A data node moves a copy within its own memory.
    Move,
    /// A data node loads a copy from its journal or the origin.
    Load,
    /// A data node remakes a copy of another holder.
    Repair,
}

impl Purpose {
    /// The byte that stands for it.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Write => 1,
            Self::Move => 2,
            Self::Load => 3,
            Self::Repair => 4,
        }
    }
    /// The purpose that `code` stands for.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Write),
            2 => Some(Self::Move),
            3 => Some(Self::Load),
            4 => Some(Self::Repair),
            _ => None,
        }
    }
}

/// One holder of a grant and the slab there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
pub struct GrantHolder {
    /// The region that the slab lies in.
    pub region: RegionId,
    /// The life of the region that is meant: in another one the grant is worth nothing.
    pub incarnation: Incarnation,
    /// The extent that the slab lies in.
    pub extent: ExtentIndex,
    /// The lending under which the shard holds the extent.
    pub lend: LendNumber,
    /// Where slot 0 begins.
    pub base: Offset,
}

/// The right to write, as its shard's leader signs it after it was applied.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Grant {
    /// Its name.
    pub id: GrantId,
    /// The meta node that signs.
    pub meta: NodeId,
    /// Why it was given.
    pub purpose: Purpose,
    /// Who may use it.
    pub writer: WriterId,
    /// Namespace that the slab is for.
    pub namespace: NamespaceId,
    /// Class of that namespace: a durable grant makes its holders reserve journal space.
    pub class: Class,
    /// Fewest copies with which a commit is accepted.
    pub least: u8,
    /// Bytes from one slot to the next.
    pub slot_size: SlotSize,
    /// Slots in the slab.
    pub slots: SlotCount,
    /// How long a claim made by Arm stays open, on the node's own clock.
    pub ttl: Duration,
    /// One to three holders, in the order in which they were chosen.
    pub holders: Vec<GrantHolder>,
}

impl Grant {
    /// The holder that is `node`, if it is one.
    #[must_use]
    pub fn holder(&self, node: NodeId) -> Option<&GrantHolder> {
        self.holders.iter().find(|holder| holder.region.node == node)
    }
    /// The grant's token at `holder`.
    #[must_use]
    pub const fn token(&self, holder: &GrantHolder) -> Token {
        Token { lend: holder.lend, sequence: self.id.sequence.number }
    }
    /// Where `slot` begins at `holder`; none if the slab has no such slot.
    #[must_use]
    pub fn offset(&self, holder: &GrantHolder, slot: SlotIndex) -> Option<Offset> {
        (slot.0 < self.slots.0).then(|| Offset(holder.base.0 + u64::from(slot.0) * u64::from(self.slot_size.0)))
    }
    /// The bytes of the slab.
    #[must_use]
    pub fn slab_bytes(&self) -> u64 {
        u64::from(self.slots.0) * u64::from(self.slot_size.0)
    }
    /// The span of the slab at `holder`, in region offsets.
    #[must_use]
    pub fn span(&self, holder: &GrantHolder) -> Range<u64> {
        holder.base.0..holder.base.0 + self.slab_bytes()
    }
}

impl Statement for Grant {
    const KIND: StatementKind = StatementKind::Grant;
    const NAME: &'static str = "grant";
    fn signer(&self) -> Option<NodeId> {
        Some(self.meta)
    }
    fn write(&self, out: &mut Writer) {
        out.u32(self.id.shard.0);
        out.u32(self.id.sequence.generation.0);
        out.u64(self.id.sequence.number);
        out.u64(self.meta.0);
        out.u8(self.purpose.code());
        out.bytes(&self.writer.0);
        out.u32(self.namespace.0);
        out.u8(self.class.code());
        out.u8(self.least);
        out.u32(self.slot_size.0);
        out.u32(self.slots.0);
        out.u32(u32::try_from(millis(self.ttl)).expect("GRANT_TTL_MAX fits in a u32"));
        out.u8(u8::try_from(self.holders.len()).expect("COPIES_MAX fits in a u8"));
        let unused = GrantHolder::default();
        for place in 0..COPIES_MAX {
            let holder = self.holders.get(place).unwrap_or(&unused);
            out.u64(holder.region.node.0);
            out.u32(holder.region.index.0);
            out.u32(holder.incarnation.0.generation.0);
            out.u64(holder.incarnation.0.number);
            out.u32(holder.extent.0);
            out.u32(holder.lend.0.generation.0);
            out.u64(holder.lend.0.number);
            out.u64(holder.base.0);
        }
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let id = GrantId {
            shard: ShardId(from.u32()?),
            sequence: Ordinal { generation: Generation(from.u32()?), number: from.u64()? },
        };
        let meta = NodeId(from.u64()?);
        let code = from.u8()?;
        let purpose = Purpose::from_code(code).ok_or_else(|| from.field("purpose", u64::from(code)))?;
        let writer = WriterId(from.array()?);
        let namespace = NamespaceId(from.u32()?);
        let code = from.u8()?;
        let class = Class::from_code(code).ok_or_else(|| from.field("class", u64::from(code)))?;
        let least = from.u8()?;
        if usize::from(least) > COPIES_MAX {
            return Err(from.field("least copies", u64::from(least)));
        }
        let slot_size = SlotSize(from.u32()?);
        if slot_size.0 == 0 || !(slot_size.0 as usize).is_multiple_of(FRAME_ALIGN) {
            return Err(from.field("slot size", u64::from(slot_size.0)));
        }
        let slots = SlotCount(from.u32()?);
        if slots.0 == 0 || slots.0 > SLOTS_PER_SLAB_MAX {
            return Err(from.field("slots", u64::from(slots.0)));
        }
        let ttl = Duration::from_millis(u64::from(from.u32()?));
        if ttl > GRANT_TTL_MAX {
            return Err(from.field("TTL", millis(ttl)));
        }
        let count = usize::from(from.u8()?);
        if count == 0 || count > COPIES_MAX {
            return Err(from.field("holders", count as u64));
        }
        let mut holders = Vec::with_capacity(count);
        for place in 0..COPIES_MAX {
            let holder = GrantHolder {
                region: RegionId { node: NodeId(from.u64()?), index: RegionIndex(from.u32()?) },
                incarnation: Incarnation::new(Generation(from.u32()?), from.u64()?),
                extent: ExtentIndex(from.u32()?),
                lend: LendNumber::new(Generation(from.u32()?), from.u64()?),
                base: Offset(from.u64()?),
            };
            let slab = u64::from(slots.0) * u64::from(slot_size.0);
            if holder.base.0.checked_add(slab).is_none() {
                return Err(from.field("base offset", holder.base.0));
            }
            if place < count {
                holders.push(holder);
            } else if holder != GrantHolder::default() {
                return Err(from.field("unused holder", holder.region.node.0));
            }
        }
        Ok(Self { id, meta, purpose, writer, namespace, class, least, slot_size, slots, ttl, holders })
    }
}
