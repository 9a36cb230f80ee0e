//! From a shard's answer to descriptors that are believed.
//!
//! Keeps of an answer only what its signatures prove: each batch by the keyring (once), each copy by its way up to the batch's root
//! (*Nothing unsigned*). Of many copies of one batch each node of its tree is hashed once.

use crate::{
    core::Core,
    error::{CallError, GetError},
    read::{
        cache::{Found, Place},
        resolve::{Resolved, untrusted},
    },
    view::Doubt,
};
use quarry_proto::{convert, refusal::Refusal, v1};
use quarry_wire::{
    attestation::{Attestation, AttestationBatch, Placement},
    frame::FrameKind,
    ids::{GrantId, Incarnation, LendNumber, NamespaceId, NodeId, RegionId, SlotIndex},
    key::Key,
    limits::EXTENT_BYTES,
    merkle::{self, Hash},
    signed::Signed,
    units::Offset,
    version::Version,
};
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// Copies of one value that are looked at; readers mark those that they tried by a bit each.
const COPIES_MAX: usize = 32;
/// Neighbouring slots that are read from one holder.
const NEIGHBOURS: u64 = 16;

/// A batch and what its copies share, or why it is not believed.
pub(super) type Batch = Result<Shared, String>;

pub(super) struct Shared {
    /// What of its tree was shown so far; its signature was checked before.
    proven: merkle::Proven,
    node: NodeId,
    grant: GrantId,
    lend: LendNumber,
    region: RegionId,
    incarnation: Incarnation,
    base: u64,
    slot_size: u64,
}

/// Checks the signatures of the batches. If one fails for what we may merely not know yet, the cluster is described anew and all are
/// checked once more; one that fails then spoils only its own copies.
pub(super) async fn batches(
    core: &Core,
    messages: &[v1::ResolvedBatch],
    deadline: Instant,
) -> Result<Vec<Batch>, CallError> {
    let mut first = true;
    let check = |view: &mut crate::view::View| {
        let strict = std::mem::replace(&mut first, false);
        let checked = messages.iter().map(|message| match view.batch(&message.signed) {
            Err(doubt) if strict && doubt.may_be_ours() => Err(doubt),
            Err(doubt) => Ok(Err(doubt.to_string())),
            Ok(signed) => Ok(shared(message, signed).map_err(|wrong| wrong.to_string())),
        });
        checked.collect::<Result<Vec<Batch>, Doubt>>()
    };
    core.control.believing(deadline, check).await
}

fn shared(message: &v1::ResolvedBatch, signed: Signed<AttestationBatch>) -> Result<Shared, Refusal> {
    let AttestationBatch { node, leaves, root } = signed.statement;
    Ok(Shared {
        proven: merkle::Proven::of(root, leaves as usize),
        node,
        grant: convert::grant_id(message.grant)?,
        lend: convert::required("lend", message.lend)?.into(),
        region: convert::required("region", message.region)?.into(),
        incarnation: convert::required("incarnation", message.incarnation)?.into(),
        base: message.base,
        slot_size: u64::from(message.slot_size),
    })
}

/// What the copies of one reply are proven with.
pub(super) struct Proof<'a> {
    pub(super) namespace: NamespaceId,
    pub(super) batches: Vec<Batch>,
    pub(super) hashes: &'a [Hash],
    pub(super) sent: Duration,
    pub(super) lease_end: Duration,
    /// Number of the revocation list under which the batches were verified.
    pub(super) revocations: u64,
}

impl Proof<'_> {
    /// What is known of `key` by `item`.
    pub(super) fn found(&mut self, key: &Key, item: &v1::Resolved) -> Resolved {
        if !item.found {
            return Ok(None);
        }
        let doubt = |why: &str| GetError::Call(untrusted(why));
        let version = item.version.clone().ok_or_else(|| doubt("a key without a version"))?;
        let version = Version::try_from(version).map_err(|wrong| doubt(&wrong.to_string()))?;
        let kind = convert::frame_kind(item.kind).map_err(|wrong| doubt(&wrong.to_string()))?;
        if kind != FrameKind::Value {
            return Err(doubt(&format!("expected a value, the key holds a {kind:?}")));
        }
        if item.payload_bytes > EXTENT_BYTES {
            return Err(doubt(&format!("a value of {} bytes is larger than any slot", item.payload_bytes)));
        }
        let mut copies = Vec::with_capacity(item.copies.len());
        let mut refused = None;
        for copy in item.copies.iter().filter(|copy| !copy.journaled).take(COPIES_MAX) {
            match self.place(key, version, item, copy) {
                Ok(place) => copies.push(place),
                Err(why) => {
                    tracing::warn!(%key, %why, "a copy is not believed");
                    refused = Some(why);
                }
            }
        }
        match refused {
            Some(why) if copies.is_empty() => Err(doubt(&why)),
            _ if copies.is_empty() => Err(GetError::NotResident),
            _ => Ok(Some(Arc::new(Found {
                version,
                payload_bytes: item.payload_bytes,
                payload_crc: item.payload_crc,
                copies,
                sent: self.sent,
                lease_end: self.lease_end,
                revocations: self.revocations,
            }))),
        }
    }

    /// Where a copy is, if its holder signed exactly that.
    fn place(&mut self, key: &Key, version: Version, item: &v1::Resolved, copy: &v1::Copy) -> Result<Place, String> {
        let batch = self.batches.get_mut(copy.batch as usize).ok_or("it names no batch of the reply")?;
        let batch = batch.as_mut().map_err(|why| why.clone())?;
        if copy.path.iter().any(|index| self.hashes.get(*index as usize).is_none()) {
            return Err("its path names no hash of the reply".to_owned());
        }
        let offset = u64::from(copy.slot)
            .checked_mul(batch.slot_size)
            .and_then(|bytes| bytes.checked_add(batch.base))
            .ok_or("its slot lies nowhere")?;
        let attestation = Attestation {
            namespace: self.namespace,
            key: key.clone(),
            kind: FrameKind::Value,
            version,
            payload_bytes: item.payload_bytes,
            payload_crc: item.payload_crc,
            grant: batch.grant,
            lend: batch.lend,
            slot: SlotIndex(copy.slot),
            region: batch.region,
            incarnation: batch.incarnation,
            placement: Placement::Resident(Offset(offset)),
        };
        let path = copy.path.iter().map(|index| &self.hashes[*index as usize]);
        if batch.region.node != batch.node || !batch.proven.shows(&attestation.leaf(), copy.leaf as usize, path) {
            return Err(format!("{} did not sign that it holds this version there", batch.region.node));
        }
        let spread = batch.grant.sequence.number.wrapping_mul(31).wrapping_add(u64::from(copy.slot) / NEIGHBOURS);
        Ok(Place { region: batch.region, incarnation: batch.incarnation, offset, spread })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_wire::{
        ids::{Generation, NodeId, Ordinal, RegionIndex, ShardId, WriterId},
        merkle,
        version::HybridClock,
    };

    const LEAVES: u32 = 5;

    fn key() -> Key {
        Key::new("key-3").unwrap()
    }
    fn version() -> Version {
        Version { clock: HybridClock(9), writer: WriterId([1; 16]) }
    }
    fn attestation(slot: u32) -> Attestation {
        Attestation {
            namespace: NamespaceId(4),
            key: Key::new(format!("key-{slot}")).unwrap(),
            kind: FrameKind::Value,
            version: version(),
            payload_bytes: 100,
            payload_crc: 77,
            grant: GrantId { shard: ShardId(1), sequence: Ordinal { generation: Generation(1), number: 6 } },
            lend: LendNumber::new(Generation(1), 2),
            slot: SlotIndex(slot),
            region: RegionId { node: NodeId(5), index: RegionIndex(0) },
            incarnation: Incarnation::new(Generation(1), 3),
            placement: Placement::Resident(Offset(4096 + u64::from(slot) * 256)),
        }
    }
    fn reply() -> (v1::Resolved, Vec<Hash>, Vec<Batch>) {
        let leaves: Vec<Hash> = (0..LEAVES).map(|slot| attestation(slot).leaf()).collect();
        let said = AttestationBatch::of(NodeId(5), &leaves);
        let it = attestation(3);
        let AttestationBatch { node, leaves: count, root } = said;
        let batch = Shared {
            proven: merkle::Proven::of(root, count as usize),
            node,
            grant: it.grant,
            lend: it.lend,
            region: it.region,
            incarnation: it.incarnation,
            base: 4096,
            slot_size: 256,
        };
        let hashes = merkle::path(&leaves, 3);
        let path = (0..u32::try_from(hashes.len()).unwrap()).collect();
        let copy = v1::Copy { batch: 0, leaf: 3, slot: 3, path, journaled: false };
        let item = v1::Resolved {
            found: true,
            version: Some(version().into()),
            kind: 0,
            payload_bytes: 100,
            payload_crc: 77,
            copies: vec![copy],
        };
        (item, hashes, vec![Ok(batch)])
    }
    fn prove(item: &v1::Resolved, hashes: &[Hash], batches: Vec<Batch>) -> Resolved {
        let mut proof = Proof {
            namespace: NamespaceId(4),
            batches,
            hashes,
            sent: Duration::ZERO,
            lease_end: Duration::from_secs(1),
            revocations: 0,
        };
        proof.found(&key(), item)
    }
    fn is_untrusted(resolved: &Resolved) -> bool {
        matches!(resolved, Err(GetError::Call(CallError::Untrusted { .. })))
    }

    #[test]
    fn a_signed_copy_is_found_where_its_holder_says() {
        let (item, hashes, batches) = reply();
        let found = prove(&item, &hashes, batches).unwrap().unwrap();
        assert_eq!(found.copies[0].offset, 4096 + 3 * 256);
        assert_eq!((found.version, found.payload_crc), (version(), 77));
        let absent = v1::Resolved::default();
        assert!(matches!(prove(&absent, &[], Vec::new()), Ok(None)));
    }

    #[test]
    fn a_copy_with_any_changed_part_is_not_believed() {
        type Change = fn(&mut v1::Resolved, &mut Shared);
        let changes: [Change; 14] = [
            |item, _| item.version.as_mut().unwrap().clock += 1,
            |item, _| item.payload_bytes += 1,
            |item, _| item.payload_crc ^= 1,
            |item, _| item.copies[0].slot += 1,
            |item, _| item.copies[0].leaf ^= 1,
            |item, _| item.copies[0].path[0] = 1,
            |item, _| item.copies[0].path[0] = 1000,
            |item, _| item.copies[0].batch = 1,
            |_, batch| batch.base += 64,
            |_, batch| batch.grant.sequence.number += 1,
            |_, batch| batch.lend.0.number += 1,
            |_, batch| batch.incarnation.0.number += 1,
            |_, batch| batch.region.node.0 += 1,
            // Signed by another node than the one that it is about.
            |_, batch| batch.node.0 += 1,
        ];
        for (number, change) in changes.iter().enumerate() {
            let (mut item, hashes, mut batches) = reply();
            change(&mut item, batches[0].as_mut().ok().unwrap());
            assert!(is_untrusted(&prove(&item, &hashes, batches)), "change {number} was believed");
        }
    }

    #[test]
    fn a_path_with_a_flipped_bit_or_a_batch_that_is_not_believed_proves_nothing() {
        let (item, good, _) = reply();
        for bit in 0..good.len() * 256 {
            let mut hashes = good.clone();
            hashes[bit / 256][bit % 256 / 8] ^= 1 << (bit % 8);
            let (_, _, batches) = reply();
            assert!(is_untrusted(&prove(&item, &hashes, batches)), "bit {bit}");
        }
        assert!(is_untrusted(&prove(&item, &good, vec![Err("revoked".to_owned())])));
    }

    #[test]
    fn other_kinds_and_journaled_copies_are_no_values_to_read() {
        let (mut item, hashes, batches) = reply();
        item.copies[0].journaled = true;
        assert!(matches!(prove(&item, &hashes, batches), Err(GetError::NotResident)));
        let (mut item, hashes, batches) = reply();
        item.kind = 2;
        assert!(is_untrusted(&prove(&item, &hashes, batches)));
    }
}
