//! Commits: which slot is a key's current version.
//!
//! The leader checked the holders' signatures; here each holder's leaves are rebuilt from the entries and the grant, and kept with the
//! signature while a slot is committed under it, so that every resolve can prove what it says. Keeps *No half-truth* (a slot becomes readable
//! only with a leaf of a signed batch, of a holder that is in the life in which it signed and to which the slot is still granted) and
//! *Idempotent commits* (what was recorded for a (grant, slot) is answered before anything else is looked at).
//!
//! Journaled copies will join here, with attestations that say so.

use super::{
    Attested, CommitEntry, CommitOutcome, CommitRefusal, Committed, Covers, Mode, Publish, Shard, ValueRef,
    grants::{Phase, Slab, Slot},
    records::Record,
};
use crate::cow_arc::CowArc;
use quarry_wire::{
    attestation::{Attestation, AttestationBatch, Placement},
    frame::header_bytes,
    grant::{Grant, GrantHolder, Purpose},
    ids::{CertificateSerial, Generation, GrantId, NodeId, Ordinal, SlotIndex},
    limits::COMMIT_ENTRIES_MAX,
    merkle::{self, Hash},
    signed::Signature,
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, sync::Arc};

/// Names a signed batch in its shard; never used again. The same in all replicas.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct BatchRef(pub u64);

/// A holder's signature with what was signed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Batch {
    pub(super) node: NodeId,
    pub(super) generation: Generation,
    pub(super) serial: CertificateSerial,
    pub(super) signature: Signature,
    pub(super) root: Hash,
    pub(super) leaves: Arc<[Hash]>,
    /// Copies under it; the batch goes with the last one.
    pub(super) live: u32,
}

/// What `holder` says of `entry` under `grant`; none if the slab has no such slot.
pub(super) fn attestation(grant: &Grant, holder: &GrantHolder, entry: &CommitEntry) -> Option<Attestation> {
    Some(Attestation {
        namespace: grant.namespace,
        key: entry.key.clone(),
        kind: entry.kind,
        version: entry.version,
        payload_bytes: entry.payload_bytes,
        payload_crc: entry.payload_crc,
        grant: grant.id,
        lend: holder.lend,
        slot: entry.slot,
        region: holder.region,
        incarnation: holder.incarnation,
        placement: Placement::Resident(grant.offset(holder, entry.slot)?),
    })
}

/// The leaves of the tree that `holder` makes of the `entries` that it covers, with the index of each leaf's entry. None if it covers nothing,
/// too much, an entry twice or out of order, or a slot that the slab does not have.
#[must_use]
pub fn leaves(
    grant: &Grant,
    holder: &GrantHolder,
    entries: &[CommitEntry],
    covers: &Covers,
) -> Option<Vec<(usize, Hash)>> {
    let indexes: Vec<usize> = match covers {
        Covers::All => (0..entries.len()).collect(),
        Covers::Only(indexes) => indexes.iter().map(|index| *index as usize).collect(),
    };
    if indexes.is_empty() || indexes.len() > COMMIT_ENTRIES_MAX || !indexes.is_sorted_by(|one, next| one < next) {
        return None;
    }
    let leaf = |index: usize| Some((index, attestation(grant, holder, entries.get(index)?)?.leaf()));
    indexes.into_iter().map(leaf).collect()
}

/// A holder's batch, taken in for one Publish.
struct Offer {
    holder: usize,
    batch: BatchRef,
    /// Leaf of each entry.
    leaf_of: Vec<Option<u32>>,
}

impl Shard {
    /// The statement that the holder must have signed for `attested` to be true of `entries`: the leader checks its signature before it
    /// proposes. None if the grant is not known, the node is no holder of it, or what it covers cannot be.
    #[must_use]
    pub fn attested_batch(
        &self,
        grant: GrantId,
        entries: &[CommitEntry],
        attested: &Attested,
    ) -> Option<AttestationBatch> {
        let view = self.grant(grant)?;
        let holder = view.grant.holder(attested.node)?;
        let leaves = leaves(view.grant, holder, entries, &attested.covers)?;
        let hashes: Vec<Hash> = leaves.into_iter().map(|(_, hash)| hash).collect();
        Some(AttestationBatch::of(attested.node, &hashes))
    }

    pub(super) fn publish(&mut self, publish: &Publish) -> Vec<CommitOutcome> {
        let id = publish.grant.sequence;
        let known = |slab: &&CowArc<Slab>| slab.grant.id == publish.grant && slab.phase != Phase::Forgotten;
        if self.slabs.get(&id).filter(known).is_none() {
            let unknown = CommitRefusal::UnknownGrant { grant: publish.grant };
            return vec![Err(unknown); publish.entries.len()];
        }
        let offers = self.take_offers(id, publish);
        let outcomes = publish.entries.iter().enumerate().map(|(index, entry)| self.commit(id, index, entry, &offers));
        let outcomes = outcomes.collect();
        for offer in offers {
            self.release_leaf(offer.batch);
        }
        self.close_if_done(id);
        outcomes
    }

    /// Takes in the batches that count: each of a holder, once, whose region is in the life for which it was granted. Each is held by its offer
    /// until the Publish is done: a later entry may replace what an earlier one committed.
    fn take_offers(&mut self, id: Ordinal, publish: &Publish) -> Vec<Offer> {
        let mut offers = Vec::new();
        let mut nodes = BTreeSet::new();
        for attested in &publish.attested {
            let grant = &self.slabs[&id].grant;
            let place = grant.holders.iter().position(|holder| holder.region.node == attested.node);
            let Some(holder) = place.filter(|place| self.is_present(&grant.holders[*place])) else { continue };
            let made = leaves(grant, &grant.holders[holder], &publish.entries, &attested.covers);
            let Some(made) = made.filter(|_| nodes.insert(attested.node)) else { continue };
            let mut leaf_of = vec![None; publish.entries.len()];
            for (leaf, (entry, _)) in (0..).zip(&made) {
                leaf_of[*entry] = Some(leaf);
            }
            let leaves: Arc<[Hash]> = made.into_iter().map(|(_, hash)| hash).collect();
            self.batch_last += 1;
            let batch = BatchRef(self.batch_last);
            let Attested { node, generation, serial, signature, .. } = attested;
            let root = merkle::root(&leaves);
            let (node, generation, serial, signature) = (*node, *generation, *serial, *signature);
            let made = Batch { node, generation, serial, signature, root, leaves, live: 1 };
            self.batches.insert(batch, CowArc::new(made));
            offers.push(Offer { holder, batch, leaf_of });
        }
        offers
    }

    /// Whether the holder's region is up, in the life that the grant names. The first of two guards: a new life also takes the slots away, so
    /// that removing one of them alone lets no late attestation in.
    pub(super) fn is_present(&self, holder: &GrantHolder) -> bool {
        self.regions.get(&holder.region).is_some_and(|region| region.up && region.incarnation == holder.incarnation)
    }

    fn commit(&mut self, id: Ordinal, index: usize, entry: &CommitEntry, offers: &[Offer]) -> CommitOutcome {
        let slab = &self.slabs[&id];
        if entry.slot.0 >= slab.grant.slots.0 {
            return Err(CommitRefusal::NoSuchSlot { slot: entry.slot, slots: slab.grant.slots });
        }
        if let Some(record) = slab.records.get(&entry.slot) {
            if !record.is_same_frame(entry) {
                return Err(CommitRefusal::SlotTaken { slot: entry.slot, version: record.version });
            }
            let outcome = record.outcome();
            self.join(id, index, entry, offers);
            return outcome;
        }
        let counting = self.counting(id, index, entry.slot, offers);
        let outcome = self.judge(id, entry, counting.len());
        let slab = self.slabs.get_mut(&id).expect("it was there above");
        slab.records.insert(Record::of(entry, outcome));
        if outcome == Ok(Committed::Applied) {
            let value = (slab.grant.namespace, entry.key.clone());
            if let Some(old) = self.values.insert(value, ValueRef::new(id, entry.slot)) {
                self.retire(old);
            }
            self.make_copies(id, entry.slot, &counting);
        } else {
            // The slot was posted to, so it is never used for another frame of this grant.
            self.rest_slot(id, entry.slot);
        }
        outcome
    }

    /// The holders of whose batch this entry is a leaf and to whom the slot is still granted.
    fn counting(&self, id: Ordinal, index: usize, slot: SlotIndex, offers: &[Offer]) -> Vec<(usize, BatchRef, u32)> {
        let slab = &self.slabs[&id];
        let granted = |offer: &&Offer| slab.slot(offer.holder, slot) == Some(Slot::Granted);
        let leaf = |offer: &Offer| offer.leaf_of[index].map(|leaf| (offer.holder, offer.batch, leaf));
        offers.iter().filter(granted).filter_map(leaf).collect()
    }

    fn judge(&self, id: Ordinal, entry: &CommitEntry, counting: usize) -> CommitOutcome {
        let slab = &self.slabs[&id];
        let grant = &slab.grant;
        if matches!(slab.phase, Phase::Expired { .. }) {
            return Err(CommitRefusal::GrantExpired { expired_at: slab.expires_at, at: self.now });
        }
        if entry.slot.0 >= slab.fill.0 {
            return Err(CommitRefusal::Sealed { fill: slab.fill });
        }
        let shard = entry.key.shard(grant.namespace, self.settings.shards);
        if shard != self.id {
            return Err(CommitRefusal::WrongShard { expected: shard, found: self.id });
        }
        let limit = u64::from(grant.slot_size.0);
        let found = entry.payload_bytes.saturating_add(header_bytes(entry.key.as_bytes().len()) as u64);
        if found > limit {
            return Err(CommitRefusal::TooLarge { limit, found });
        }
        match (grant.purpose, entry.mode) {
            (Purpose::Move, Mode::Move { from }) => return self.judge_move(grant.namespace, entry, from, counting),
            (Purpose::Move, _) | (_, Mode::Move { .. }) => return Err(CommitRefusal::Purpose),
            (Purpose::Write | Purpose::Load | Purpose::Repair, _) => {}
        }
        let current = self.version(grant.namespace, &entry.key);
        if current == Some(entry.version) {
            return Ok(Committed::AlreadyCurrent);
        }
        let needed = grant.least.max(1);
        if counting < usize::from(needed) {
            let attested = u8::try_from(counting).unwrap_or(u8::MAX);
            return Err(CommitRefusal::NotEnoughHolders { needed, attested });
        }
        match (entry.mode, current) {
            (Mode::Create, Some(current)) => Err(CommitRefusal::Exists { current }),
            (Mode::Compare { expected }, current) if expected != current => {
                Err(CommitRefusal::CompareFailed { current })
            }
            (_, Some(current)) if current > entry.version => Err(CommitRefusal::StaleVersion { current }),
            (Mode::Create | Mode::Replace | Mode::Compare { .. } | Mode::Move { .. }, _) => Ok(Committed::Applied),
        }
    }

    /// A further copy of what was committed joins, if it is still current and the slot is still granted there. Two guards again: a value that
    /// is replaced or deleted puts every copy of its slot to rest.
    fn join(&mut self, id: Ordinal, index: usize, entry: &CommitEntry, offers: &[Offer]) {
        let namespace = self.slabs[&id].grant.namespace;
        let here = ValueRef::new(id, entry.slot);
        if self.values.get(&(namespace, entry.key.clone())) == Some(&here) {
            let counting = self.counting(id, index, entry.slot, offers);
            self.make_copies(id, entry.slot, &counting);
        }
    }

    fn make_copies(&mut self, id: Ordinal, slot: SlotIndex, counting: &[(usize, BatchRef, u32)]) {
        for (holder, batch, leaf) in counting.iter().copied() {
            let slab = self.slabs.get_mut(&id).expect("a slot is committed in a slab that is there");
            slab.slots[holder][slot.0 as usize] = Slot::Committed { batch, leaf };
            self.batches.get_mut(&batch).expect("an offer's batch was taken in").live += 1;
        }
    }

    /// The value at `old` is not current any more.
    pub(super) fn retire(&mut self, old: ValueRef) {
        self.rest_slot(old.grant(), old.slot);
        self.settle(old.grant());
    }

    /// After slots left a slab: its grant may be done, or the slab empty.
    pub(super) fn settle(&mut self, id: Ordinal) {
        self.close_if_done(id);
        self.drop_if_empty(id);
    }

    /// A slot that was committed under `batch` left, or its Publish is done.
    pub(super) fn release_leaf(&mut self, batch: BatchRef) {
        let held = self.batches.get_mut(&batch).expect("a committed slot or an offer keeps its batch");
        held.live -= 1;
        if held.live == 0 {
            self.batches.remove(&batch);
        }
    }
}
