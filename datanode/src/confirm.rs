//! Confirm: which entries of a commit this node can vouch for, signed once for all of them (*No half-truth*).
//!
//! An entry passes if its grant was armed in this incarnation and is the writer's, no higher token has claimed its slot since, and the frame
//! header that lies there now says what the entry says. For class `cache` the payload is not read: the writer names only holders on which its
//! writes completed, and readers check the CRC. One bad entry does not spoil the others: it is left out and named.

use crate::{
    claims::{ConfirmRefusal, Confirmable},
    node::Node,
};
use bytes::Bytes;
use quarry_proto::{convert, refusal::Refusal, v1};
use quarry_wire::{
    attestation::{Attestation, AttestationBatch, Placement},
    frame::{FrameError, FrameHeader, HEADER_BYTES_MAX, header_bytes},
    ids::{GrantId, SlotIndex, WriterId},
    units::{Offset, SlotSize},
    version::{HybridClock, Version},
};
use std::collections::BTreeMap;

/// Why an entry is not confirmed here.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EntryRefusal {
    /// A field that cannot be.
    #[error("{0}")]
    Malformed(String),
    /// The claims say no.
    #[error(transparent)]
    Claim(#[from] ConfirmRefusal),
    /// No whole header lies in the slot.
    #[error("what lies in the slot is not the frame: {0}")]
    NoFrame(#[from] FrameError),
    /// Another header lies there.
    #[error("the frame in the slot has another {field} than the entry: expected {expected}, found {found}")]
    Differs { field: &'static str, expected: String, found: String },
    /// The frame would reach beyond its slot.
    #[error("header and payload have {found} bytes, the slot has {limit}", limit = limit.0)]
    TooLong { limit: SlotSize, found: u64 },
    /// The memory could not be looked at.
    #[error("the slot cannot be read: {0}")]
    Unreadable(String),
    /// A frame that is to be moved is not whole.
    #[error(
        "the payload's CRC-32C is {found:08x}, {expected:08x} was expected: the copy is damaged and stays where it is"
    )]
    Damaged { expected: u32, found: u32 },
    /// It was not copied before the deadline.
    #[error("the deadline passed")]
    Late,
    /// This node may write there no more.
    #[error("the grant is closed here: its time is over, or a higher token claimed its bytes")]
    Closed,
}

impl EntryRefusal {
    /// Whether the entry itself is wrong, rather than this node's claim to its slot gone. Only then is it known here that it was never
    /// committed under this grant.
    pub(crate) fn is_final(&self) -> bool {
        !matches!(
            self,
            Self::Claim(ConfirmRefusal::Superseded { .. }) | Self::Unreadable(_) | Self::Late | Self::Closed
        )
    }
}

/// What this node says to a batch.
pub(crate) struct Verdict {
    /// Signed over the entries that passed, in their order; empty if none did.
    pub(crate) attested: Bytes,
    /// The others, by their place in the batch.
    pub(crate) refused: BTreeMap<usize, EntryRefusal>,
}

/// Checks `entries` and signs for those that are there.
///
/// # Errors
/// [`ConfirmRefusal`] if nothing can be said about any of them.
pub(crate) fn confirm(
    node: &Node,
    grant: GrantId,
    writer: WriterId,
    entries: &[v1::CommitEntry],
) -> Result<Verdict, ConfirmRefusal> {
    let mut attestations = Vec::with_capacity(entries.len());
    let mut refused = BTreeMap::new();
    {
        // One lock from the claims to the last copy: no higher token comes in between.
        let holdings = node.holdings.lock();
        let held = holdings.confirmable(grant, writer)?;
        let region = held.holder.region.index;
        for (place, entry) in entries.iter().enumerate() {
            let looked = look(&held, writer, entry, |offset, into| {
                holdings.copy_out(region, offset, into).map_err(|error| EntryRefusal::Unreadable(error.to_string()))
            });
            match looked {
                Ok(attestation) => attestations.push(attestation),
                Err(refusal) => {
                    refused.insert(place, refusal);
                }
            }
        }
    }
    let verdict = Verdict { attested: sign(node, &attestations), refused };
    node.meters.confirmed(entries.len(), &verdict);
    Ok(verdict)
}

/// One signature over all of these; nothing if there are none.
pub(crate) fn sign(node: &Node, attestations: &[Attestation]) -> Bytes {
    let leaves: Vec<_> = attestations.iter().map(Attestation::leaf).collect();
    if leaves.is_empty() {
        return Bytes::new();
    }
    node.membership.sign(AttestationBatch::of(node.id, &leaves)).encode().into()
}

/// Checks one entry against its slot.
fn look(
    held: &Confirmable,
    writer: WriterId,
    entry: &v1::CommitEntry,
    copy_out: impl FnOnce(Offset, &mut [u8]) -> Result<(), EntryRefusal>,
) -> Result<Attestation, EntryRefusal> {
    let malformed = |refusal: Refusal| EntryRefusal::Malformed(refusal.to_string());
    let grant = &held.grant;
    let said = FrameHeader {
        namespace: grant.namespace,
        key: convert::key(&entry.key).map_err(malformed)?,
        version: Version { clock: HybridClock(entry.clock), writer },
        kind: convert::frame_kind(entry.kind).map_err(malformed)?,
        payload_bytes: entry.payload_bytes,
        payload_crc: entry.payload_crc,
    };
    let slot = SlotIndex(entry.slot);
    let offset = held.slot(slot)?;
    let length = header_bytes(said.key.as_bytes().len());
    let found = entry.payload_bytes.saturating_add(length as u64);
    if found > u64::from(grant.slot_size.0) {
        return Err(EntryRefusal::TooLong { limit: grant.slot_size, found });
    }
    let mut buffer = [0; HEADER_BYTES_MAX];
    let header = &mut buffer[..length];
    copy_out(offset, header)?;
    same(&said, &FrameHeader::read_from(header)?)?;
    Ok(attestation(held, said, slot, offset))
}

/// What this node says of a frame that lies in a slot.
pub(crate) fn attestation(held: &Confirmable, said: FrameHeader, slot: SlotIndex, offset: Offset) -> Attestation {
    Attestation {
        namespace: said.namespace,
        key: said.key,
        kind: said.kind,
        version: said.version,
        payload_bytes: said.payload_bytes,
        payload_crc: said.payload_crc,
        grant: held.grant.id,
        lend: held.holder.lend,
        slot,
        region: held.holder.region,
        incarnation: held.holder.incarnation,
        placement: Placement::Resident(offset),
    }
}

/// Whether the header found is the one that was said.
pub(crate) fn same(said: &FrameHeader, found: &FrameHeader) -> Result<(), EntryRefusal> {
    let differs = |field, expected: &dyn ToString, found: &dyn ToString| {
        Err(EntryRefusal::Differs { field, expected: expected.to_string(), found: found.to_string() })
    };
    if said.namespace != found.namespace {
        return differs("namespace", &said.namespace, &found.namespace);
    }
    if said.key != found.key {
        return differs("key", &said.key, &found.key);
    }
    if said.version != found.version {
        return differs("version", &said.version, &found.version);
    }
    if said.kind != found.kind {
        return differs("kind", &said.kind.code(), &found.kind.code());
    }
    if said.payload_bytes != found.payload_bytes {
        return differs("payload length", &said.payload_bytes, &found.payload_bytes);
    }
    if said.payload_crc != found.payload_crc {
        return differs("payload CRC", &said.payload_crc, &found.payload_crc);
    }
    Ok(())
}
