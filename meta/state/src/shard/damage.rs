//! Damage: a holder looked at a copy of its own that a reader complained of, and says what lies there.
//!
//! Only the shard knows what should lie there, so it compares: the copy goes if the frame that its holder found is not the one that was
//! committed, and stays whatever anybody complains of if it is. A copy that goes rests like any other, and its slot is no longer granted to the
//! holder, so nothing that it stated earlier about this (grant, slot) counts any more, also if it is still on its way (*No half-truth*). With
//! its last copy a value is gone. While a pin is on a value its readers know its places, and the memory may not be used again (*Leases hold*), so
//! its copies stay; whoever reads a damaged one afterwards complains again.

use super::{
    CheckedCopy, CopyRefusal, DroppedCopy, Shard,
    grants::{Leave, Slot},
};
use quarry_wire::frame::FrameHeader;

impl Shard {
    /// Whether the copy that was looked at is a damaged copy of the key's current version, and what of it is to go.
    ///
    /// # Errors
    /// [`CopyRefusal`]: nothing is to go.
    pub fn check_copy(&self, asked: &CheckedCopy) -> Result<(), CopyRefusal> {
        self.damaged(asked).map(drop)
    }

    fn damaged(&self, asked: &CheckedCopy) -> Result<(super::ValueRef, usize), CopyRefusal> {
        let value = self.values.get(&(asked.namespace, asked.key.clone())).ok_or(CopyRefusal::NotCurrent)?;
        let slab = &self.slabs[&value.grant()];
        let record = &slab.records[&value.slot];
        if record.version != asked.version {
            return Err(CopyRefusal::NotCurrent);
        }
        let place = slab.grant.holders.iter().position(|holder| {
            holder.region == asked.region
                && holder.incarnation == asked.incarnation
                && slab.grant.offset(holder, value.slot) == Some(asked.offset)
        });
        let is_committed = |place: &usize| matches!(slab.slot(*place, value.slot), Some(Slot::Committed { .. }));
        let place = place.filter(is_committed).ok_or(CopyRefusal::NotThere)?;
        let committed = FrameHeader {
            namespace: asked.namespace,
            key: record.key.clone(),
            version: record.version,
            kind: record.kind,
            payload_bytes: record.payload_bytes,
            payload_crc: record.payload_crc,
        };
        let is_intact = asked.found.as_ref() == Some(&committed);
        match (is_intact, self.is_pinned(*value)) {
            (true, _) => Err(CopyRefusal::Intact),
            (false, true) => Err(CopyRefusal::Pinned),
            (false, false) => Ok((*value, place)),
        }
    }

    pub(super) fn drop_copy(&mut self, asked: &CheckedCopy) -> Result<DroppedCopy, CopyRefusal> {
        let (value, place) = self.damaged(asked)?;
        let until = self.rest_until(&self.slabs[&value.grant()]);
        self.leave(value.grant(), place, value.slot, Leave::Rest(until));
        let left = self.slabs[&value.grant()].copies(value.slot);
        self.drop_value_without_copy(value.grant(), value.slot);
        self.settle(value.grant());
        Ok(DroppedCopy { left: u8::try_from(left).unwrap_or(u8::MAX) })
    }
}
