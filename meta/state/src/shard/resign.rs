//! Batches signed again: a data node that changes its key puts the new signature to what it signed with the old one.
//!
//! What is said stays: the root, the leaves, and the slots that are committed under them. The leader checked the signature, as for a Publish.
//! Keeps *Nothing unsigned*: a signature takes the place of another only over the same root, by the same node, in the same generation.

use super::{BatchRef, Shard, commits::Batch, grants::Slot};
use crate::cow_arc::CowArc;
use quarry_wire::{
    ids::{CertificateSerial, Generation, NodeId, Ordinal},
    merkle::Hash,
    signed::Signature,
};
use serde::{Deserialize, Serialize};
use std::ops::Bound;

/// A batch with the new signature of its node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Resigned {
    /// Which batch.
    pub batch: BatchRef,
    /// Its root: a restored group may count its batches from an older point.
    pub root: Hash,
    /// Generation in which it was signed.
    pub generation: Generation,
    /// Certificate of the key.
    pub serial: CertificateSerial,
    /// The signature.
    pub signature: Signature,
}

impl Shard {
    /// The batches after `after` of `node` that are not signed under certificate `serial`, in order.
    pub fn signed_otherwise(
        &self,
        node: NodeId,
        serial: CertificateSerial,
        after: BatchRef,
    ) -> impl Iterator<Item = BatchRef> + '_ {
        let later = self.batches.range((Bound::Excluded(after), Bound::Unbounded));
        later.filter(move |(_, batch)| batch.node == node && batch.serial != serial).map(|(id, _)| *id)
    }

    /// The newest grant.
    #[must_use]
    pub const fn last_grant(&self) -> Ordinal {
        Ordinal { generation: self.generation, number: self.sequence_last }
    }

    /// Grants up to `last` under which a statement of `node` that it made before may still be committed.
    #[must_use]
    pub fn awaiting(&self, node: NodeId, last: Ordinal) -> usize {
        let awaits = |slab: &super::Slab| {
            let holders = slab.grant.holders.iter().zip(&slab.slots);
            holders.filter(|(holder, _)| holder.region.node == node).any(|(_, slots)| slots.contains(&Slot::Granted))
        };
        self.slabs.range(..=last).filter(|(_, slab)| awaits(slab)).count()
    }

    /// Answers how many signatures took the place of others.
    pub(super) fn resign(&mut self, node: NodeId, resigned: &[Resigned]) -> u32 {
        let mut taken = 0;
        for new in resigned {
            let same = |held: &&mut CowArc<Batch>| {
                held.node == node && held.root == new.root && held.generation == new.generation
            };
            if let Some(held) = self.batches.get_mut(&new.batch).filter(same) {
                held.serial = new.serial;
                held.signature = new.signature;
                taken += 1;
            }
        }
        taken
    }
}
