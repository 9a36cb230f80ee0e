//! Reading the state: what a leader answers once its read index is applied. Nothing here changes anything; a lease needs no entry.

use super::{
    BatchRef, Shard, SpaceOf, ValueRef,
    grants::{Row, Slab, Slot},
};
use crate::{
    directory::{Namespace, RegionState},
    map::Use,
};
use quarry_wire::{
    attestation::{Attestation, AttestationBatch, Descriptor, Placement},
    frame::FrameKind,
    ids::{ExtentIndex, GrantId, Incarnation, LendNumber, NamespaceId, NodeId, RegionId, SlotIndex},
    key::Key,
    merkle::{self, Hash},
    signed::Signed,
    units::{Offset, SlotSize},
    version::Version,
};
use std::ops::Bound;

/// The current version of a key and where its copies are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resolved {
    /// Namespace of the key.
    pub namespace: NamespaceId,
    /// The key.
    pub key: Key,
    /// Its version.
    pub version: Version,
    /// What the frame carries.
    pub kind: FrameKind,
    /// Bytes of payload.
    pub payload_bytes: u64,
    /// CRC-32C of the payload.
    pub payload_crc: u32,
    /// At least one copy, in the order of the grant's holders.
    pub copies: Vec<ResolvedCopy>,
}

/// One copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResolvedCopy {
    /// The grant under which it was written.
    pub grant: GrantId,
    /// The lending of its extent.
    pub lend: LendNumber,
    /// Its extent.
    pub extent: ExtentIndex,
    /// Its slot of the slab.
    pub slot: SlotIndex,
    /// Its region.
    pub region: RegionId,
    /// The region's life.
    pub incarnation: Incarnation,
    /// Where slot 0 of its slab begins in the region.
    pub base: Offset,
    /// Bytes per slot of its slab.
    pub slot_size: SlotSize,
    /// Where the frame begins in the region.
    pub offset: Offset,
    /// The batch that proves it; read it with [`Shard::batch`].
    pub batch: BatchRef,
    /// Which leaf of the batch.
    pub leaf: u32,
}

/// A key with a value, as it stands in a list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Listed<'a> {
    /// The key.
    pub key: &'a Key,
    /// Its version.
    pub version: Version,
    /// Bytes of payload.
    pub payload_bytes: u64,
    /// CRC-32C of the payload.
    pub payload_crc: u32,
    /// How many copies there are.
    pub copies: usize,
}

impl Resolved {
    /// What the holder of `copy` said of it.
    #[must_use]
    pub fn attestation(&self, copy: &ResolvedCopy) -> Attestation {
        Attestation {
            namespace: self.namespace,
            key: self.key.clone(),
            kind: self.kind,
            version: self.version,
            payload_bytes: self.payload_bytes,
            payload_crc: self.payload_crc,
            grant: copy.grant,
            lend: copy.lend,
            slot: copy.slot,
            region: copy.region,
            incarnation: copy.incarnation,
            placement: Placement::Resident(copy.offset),
        }
    }
}

/// A batch with its signature.
#[derive(Clone, Debug)]
pub struct SignedBatch<'a> {
    /// The leaves, in order.
    pub leaves: &'a [Hash],
    signed: Signed<AttestationBatch>,
}

impl SignedBatch<'_> {
    /// What was signed, with the signature.
    #[must_use]
    pub const fn signed(&self) -> &Signed<AttestationBatch> {
        &self.signed
    }
    /// The hashes beside the way from this leaf to the root; none if there is no such leaf.
    #[must_use]
    pub fn path(&self, leaf: u32) -> Option<Vec<Hash>> {
        let leaf = leaf as usize;
        (leaf < self.leaves.len()).then(|| merkle::path(self.leaves, leaf))
    }
}

impl Shard {
    /// The current version of `key`, if it has a value.
    #[must_use]
    pub fn version(&self, namespace: NamespaceId, key: &Key) -> Option<Version> {
        let value = self.values.get(&(namespace, key.clone()))?;
        self.slabs.get(&value.grant())?.records.get(&value.slot).map(|record| record.version)
    }

    /// The current version of `key` and where its copies are.
    #[must_use]
    pub fn resolve(&self, namespace: NamespaceId, key: &Key) -> Option<Resolved> {
        self.resolved(self.values.get(&(namespace, key.clone())).copied()?)
    }

    /// The value that is written down there and where its copies are.
    pub(super) fn resolved(&self, value: ValueRef) -> Option<Resolved> {
        let slot = value.slot;
        let Slab { grant, slots, records, .. } = &**self.slabs.get(&value.grant())?;
        let record = records.get(&slot)?;
        let copies =
            grant.holders.iter().zip(slots).filter_map(|(holder, slots)| match slots.get(slot.0 as usize)? {
                Slot::Committed { batch, leaf } | Slot::Pinned { batch, leaf } => Some(ResolvedCopy {
                    grant: grant.id,
                    lend: holder.lend,
                    extent: holder.extent,
                    slot,
                    region: holder.region,
                    incarnation: holder.incarnation,
                    base: holder.base,
                    slot_size: grant.slot_size,
                    offset: grant.offset(holder, slot)?,
                    batch: *batch,
                    leaf: *leaf,
                }),
                Slot::Granted | Slot::Gone => None,
            });
        Some(Resolved {
            namespace: grant.namespace,
            key: record.key.clone(),
            version: record.version,
            kind: record.kind,
            payload_bytes: record.payload_bytes,
            payload_crc: record.payload_crc,
            copies: copies.collect(),
        })
    }

    /// The batch of this name.
    #[must_use]
    pub fn batch(&self, batch: BatchRef) -> Option<SignedBatch<'_>> {
        let held = self.batches.get(&batch)?;
        let leaves = u32::try_from(held.leaves.len()).ok()?;
        let statement = AttestationBatch { node: held.node, leaves, root: held.root };
        let signed = Signed { statement, generation: held.generation, serial: held.serial, signature: held.signature };
        Some(SignedBatch { leaves: &held.leaves, signed })
    }

    /// The descriptor of `copy`, with its way to the root of its batch.
    #[must_use]
    pub fn descriptor(&self, resolved: &Resolved, copy: &ResolvedCopy) -> Option<Descriptor> {
        let path = self.batch(copy.batch)?.path(copy.leaf)?;
        Some(Descriptor { attestation: resolved.attestation(copy), leaf: copy.leaf, path })
    }

    /// Whether `key` has a value.
    #[must_use]
    pub fn has(&self, namespace: NamespaceId, key: &Key) -> bool {
        self.values.contains_key(&(namespace, key.clone()))
    }

    /// The keys of `namespace` that begin with `prefix`, in order, after `after`. A range of an ordered map: what is not taken costs nothing.
    pub fn list(&self, namespace: NamespaceId, prefix: &[u8], after: Option<&Key>) -> impl Iterator<Item = Listed<'_>> {
        // No prefix is longer than a key; none at all begins at the least key.
        let least = if prefix.is_empty() { Key::new([0]) } else { Key::new(prefix) }.ok();
        let lower = match (least, after) {
            (Some(least), Some(after)) if *after >= least => Some(Bound::Excluded((namespace, after.clone()))),
            (Some(least), _) => Some(Bound::Included((namespace, least))),
            (None, _) => None,
        };
        lower
            .into_iter()
            .flat_map(|lower| self.values.range((lower, Bound::Unbounded)))
            .take_while(move |((of, key), _)| *of == namespace && key.as_bytes().starts_with(prefix))
            .filter_map(|((_, key), value)| {
                let slab = self.slabs.get(&value.grant())?;
                let record = slab.records.get(&value.slot)?;
                let resident = |slots: &&Row| matches!(slots.get(value.slot.0 as usize), Some(Slot::Committed { .. }));
                Some(Listed {
                    key,
                    version: record.version,
                    payload_bytes: record.payload_bytes,
                    payload_crc: record.payload_crc,
                    copies: slab.slots.iter().filter(resident).count(),
                })
            })
    }

    /// How many keys have a value.
    #[must_use]
    pub fn values(&self) -> usize {
        self.values.len()
    }

    /// The namespace of this number, as far as the feed was followed.
    #[must_use]
    pub fn namespace(&self, id: NamespaceId) -> Option<&Namespace> {
        self.namespaces.get(&id)
    }

    /// The region of this name, as far as the feed was followed.
    #[must_use]
    pub fn region(&self, region: RegionId) -> Option<&RegionState> {
        self.regions.get(&region)
    }

    /// Whether nothing new is granted on this node.
    #[must_use]
    pub fn is_drained(&self, node: NodeId) -> bool {
        self.drained.contains(&node)
    }

    /// The data nodes that are up and on which nothing new is granted, because somebody said so.
    pub fn drained(&self) -> impl Iterator<Item = NodeId> {
        let is_up = |node: &NodeId| self.regions.values().any(|region| region.up && region.region.node == *node);
        self.drained.iter().copied().filter(is_up)
    }

    /// How many current values have a copy on `node`, and how many of them have no other. Walks over all slots.
    #[must_use]
    pub fn copies_on(&self, node: NodeId) -> (u64, u64) {
        let (mut copies, mut last) = (0, 0);
        for slab in self.slabs.values() {
            let Some(own) = slab.grant.holders.iter().position(|holder| holder.region.node == node) else { continue };
            let is_copy = |holder: usize, slot: usize| matches!(slab.slots[holder][slot], Slot::Committed { .. });
            for slot in (0..slab.slots[own].len()).filter(|slot| is_copy(own, *slot)) {
                let others = (0..slab.slots.len()).any(|holder| holder != own && is_copy(holder, slot));
                copies += 1;
                last += u64::from(!others);
            }
        }
        (copies, last)
    }

    /// Tells what each byte of the extents held is used for: region, start, bytes, use. Walks over all slots, like [`Shard::space`].
    pub(crate) fn each_use(&self, tell: &mut impl FnMut(RegionId, u64, u64, Use)) {
        for (extent, held) in &self.extents {
            held.free.iter().for_each(|(start, bytes)| tell(extent.region, start, bytes, Use::Free));
            held.resting.iter().for_each(|(start, rest)| tell(extent.region, *start, rest.bytes, Use::Resting));
        }
        for slab in self.slabs.values() {
            let bytes = u64::from(slab.grant.slot_size.0);
            for (holder, slots) in slab.grant.holders.iter().zip(&slab.slots) {
                for (start, slot) in (0u64..).map(|slot| holder.base.0 + slot * bytes).zip(slots) {
                    match slot {
                        Slot::Granted => tell(holder.region, start, bytes, Use::Granted),
                        Slot::Committed { .. } => tell(holder.region, start, bytes, Use::Committed),
                        Slot::Pinned { .. } => tell(holder.region, start, bytes, Use::Pinned),
                        Slot::Gone => {}
                    }
                }
            }
        }
    }

    /// How the memory lent to this shard is used. Walks over all slots: for metrics, not for every call.
    #[must_use]
    pub fn space(&self) -> SpaceOf {
        let mut space = SpaceOf::default();
        for (extent, held) in &self.extents {
            let of = space.regions.entry(extent.region).or_default();
            of.extents += 1;
            of.bytes += held.bytes;
            of.free_bytes += held.free.total();
            of.resting_bytes += held.resting.values().map(|rest| rest.bytes).sum::<u64>();
        }
        for slab in self.slabs.values() {
            let bytes = u64::from(slab.grant.slot_size.0);
            for (holder, slots) in slab.grant.holders.iter().zip(&slab.slots) {
                let of = space.regions.entry(holder.region).or_default();
                for slot in slots {
                    match slot {
                        Slot::Granted => {
                            of.granted_slots += 1;
                            of.granted_bytes += bytes;
                        }
                        Slot::Committed { .. } => {
                            of.committed_slots += 1;
                            of.committed_bytes += bytes;
                        }
                        Slot::Pinned { .. } => {
                            of.pinned_slots += 1;
                            of.pinned_bytes += bytes;
                        }
                        Slot::Gone => {}
                    }
                }
            }
        }
        for of in space.regions.values() {
            let total = &mut space.total;
            total.extents += of.extents;
            total.bytes += of.bytes;
            total.free_bytes += of.free_bytes;
            total.granted_bytes += of.granted_bytes;
            total.granted_slots += of.granted_slots;
            total.committed_bytes += of.committed_bytes;
            total.committed_slots += of.committed_slots;
            total.pinned_bytes += of.pinned_bytes;
            total.pinned_slots += of.pinned_slots;
            total.resting_bytes += of.resting_bytes;
        }
        space
    }
}
