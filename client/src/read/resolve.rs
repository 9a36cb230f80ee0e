//! From keys to proven descriptors.
//!
//! Asks the shards, one call for all keys of a shard, and keeps of the answers only what its signatures prove: each batch by the keyring
//! (once), each copy by its way up to the batch's root (*Nothing unsigned*). The lease counts from before the request was sent, on the
//! boot-time clock, and is taken one percent shorter (*Leases hold*).

use crate::{
    core::Core,
    error::{CallError, GetError},
    read::cache::{Found, Place},
    view::Doubt,
};
use bytes::Bytes;
use futures::future::join_all;
use quarry_proto::{convert, refusal::Refusal, v1};
use quarry_wire::{
    attestation::{Attestation, AttestationBatch, Descriptor, Placement},
    frame::FrameKind,
    ids::{GrantId, Incarnation, LendNumber, NamespaceId, RegionId, ShardId, SlotIndex},
    key::Key,
    limits::{EXTENT_BYTES, KEYS_PER_CALL_MAX},
    merkle::Hash,
    signed::Signed,
    units::{Offset, millis},
    version::Version,
};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::time::Instant;

/// Neighbouring slots that are read from one holder.
const NEIGHBOURS: u64 = 16;

/// What is known of a key: where it is, or that it is not there.
pub(crate) type Resolved = Result<Option<Arc<Found>>, GetError>;

/// Resolves all `keys`. One answer per key, in their order.
pub(crate) async fn resolve(
    core: &Arc<Core>,
    namespace: NamespaceId,
    keys: &[Key],
    deadline: Instant,
) -> Vec<Resolved> {
    let shards = core.control.view().read().shards();
    let mut by_shard: BTreeMap<ShardId, Vec<usize>> = BTreeMap::new();
    for (index, key) in keys.iter().enumerate() {
        by_shard.entry(key.shard(namespace, shards)).or_default().push(index);
    }
    let calls = by_shard.iter().flat_map(|(shard, indexes)| {
        indexes.chunks(KEYS_PER_CALL_MAX).map(move |indexes| {
            let asked: Vec<Key> = indexes.iter().map(|index| keys[*index].clone()).collect();
            async move { (indexes, resolve_call(core, namespace, *shard, &asked, deadline).await) }
        })
    });
    let mut answers: Vec<Option<Resolved>> = keys.iter().map(|_| None).collect();
    for (indexes, resolved) in join_all(calls).await {
        for (index, resolved) in indexes.iter().zip(resolved) {
            answers[*index] = Some(resolved);
        }
    }
    let silent = || GetError::Call(untrusted("the reply said nothing about this key"));
    answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(silent()))).collect()
}

/// The version that is current now, by a shared read-index round and without a lease.
pub(crate) async fn current_version(
    core: &Core,
    namespace: NamespaceId,
    shard: ShardId,
    key: &Key,
    deadline: Instant,
) -> Result<Option<Version>, CallError> {
    let reply = ask(core, namespace, shard, std::slice::from_ref(key), Duration::ZERO, deadline).await?;
    match reply.items.into_iter().next() {
        Some(item) if item.found => {
            let version = item.version.ok_or_else(|| untrusted("a key without a version"))?;
            Ok(Some(Version::try_from(version).map_err(|wrong| untrusted(&wrong.to_string()))?))
        }
        Some(_) => Ok(None),
        None => Err(untrusted("the reply said nothing about this key")),
    }
}

async fn ask(
    core: &Core,
    namespace: NamespaceId,
    shard: ShardId,
    keys: &[Key],
    lease: Duration,
    deadline: Instant,
) -> Result<v1::ResolveReply, CallError> {
    let request = v1::ResolveRequest {
        shard: shard.0,
        namespace: namespace.0,
        keys: keys.iter().map(|key| Bytes::copy_from_slice(key.as_bytes())).collect(),
        lease_ms: u32::try_from(millis(lease)).unwrap_or(0),
        stale: false,
        seen: core.control.view().read().seen(),
    };
    let mut reply = core
        .control
        .ask(shard.0, "Resolve", &request, deadline, |mut meta, request| async move { meta.resolve(request).await })
        .await?;
    core.control.heard(shard.0, reply.applied_ms, reply.changes.take());
    Ok(reply)
}

async fn resolve_call(
    core: &Core,
    namespace: NamespaceId,
    shard: ShardId,
    keys: &[Key],
    deadline: Instant,
) -> Vec<Resolved> {
    let fail = |error: CallError| keys.iter().map(|_| Err(GetError::from(error.clone()))).collect();
    let sent = core.options.clock.boot();
    let reply = match ask(core, namespace, shard, keys, core.options.lease, deadline).await {
        Ok(reply) => reply,
        Err(error) => return fail(error),
    };
    if reply.items.len() != keys.len() {
        return fail(untrusted(&format!("expected {} answers, found {}", keys.len(), reply.items.len())));
    }
    let batches = match batches(core, &reply.batches, deadline).await {
        Ok(batches) => batches,
        Err(error) => return fail(error),
    };
    let lease = Duration::from_millis(u64::from(reply.lease_ms)).min(core.options.lease);
    let proof =
        Proof { namespace, batches, hashes: reply.hashes.as_chunks().0, sent, lease_end: sent + lease - lease / 100 };
    keys.iter().zip(&reply.items).map(|(key, item)| proof.found(key, item)).collect()
}

/// A batch and what its copies share, or why it is not believed.
type Batch = Result<Shared, String>;

struct Shared {
    signed: Signed<AttestationBatch>,
    grant: GrantId,
    lend: LendNumber,
    region: RegionId,
    incarnation: Incarnation,
    base: u64,
    slot_size: u64,
}

/// Checks the signatures of the batches. If one fails for what we may merely not know yet, the cluster is described anew and all are
/// checked once more; one that fails then spoils only its own copies.
async fn batches(core: &Core, messages: &[v1::ResolvedBatch], deadline: Instant) -> Result<Vec<Batch>, CallError> {
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
    Ok(Shared {
        signed,
        grant: convert::grant_id(message.grant)?,
        lend: convert::required("lend", message.lend)?.into(),
        region: convert::required("region", message.region)?.into(),
        incarnation: convert::required("incarnation", message.incarnation)?.into(),
        base: message.base,
        slot_size: u64::from(message.slot_size),
    })
}

/// What the copies of one reply are proven with.
struct Proof<'a> {
    namespace: NamespaceId,
    batches: Vec<Batch>,
    hashes: &'a [Hash],
    sent: Duration,
    lease_end: Duration,
}

impl Proof<'_> {
    fn found(&self, key: &Key, item: &v1::Resolved) -> Resolved {
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
        for copy in item.copies.iter().filter(|copy| !copy.journaled) {
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
            }))),
        }
    }

    /// Where a copy is, if its holder signed exactly that.
    fn place(&self, key: &Key, version: Version, item: &v1::Resolved, copy: &v1::Copy) -> Result<Place, String> {
        let batch = self.batches.get(copy.batch as usize).ok_or("it names no batch of the reply")?;
        let batch = batch.as_ref().map_err(Clone::clone)?;
        let path = copy.path.iter().map(|index| self.hashes.get(*index as usize).copied());
        let path = path.collect::<Option<Vec<Hash>>>().ok_or("its path names no hash of the reply")?;
        let offset = u64::from(copy.slot)
            .checked_mul(batch.slot_size)
            .and_then(|bytes| bytes.checked_add(batch.base))
            .ok_or("its slot lies nowhere")?;
        let descriptor = Descriptor {
            attestation: Attestation {
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
            },
            leaf: copy.leaf,
            path,
        };
        if !descriptor.proven_by(&batch.signed) {
            return Err(format!("{} did not sign that it holds this version there", batch.region.node));
        }
        let spread = batch.grant.sequence.number.wrapping_mul(31).wrapping_add(u64::from(copy.slot) / NEIGHBOURS);
        Ok(Place { region: batch.region, incarnation: batch.incarnation, offset, spread })
    }
}

fn untrusted(why: &str) -> CallError {
    CallError::Untrusted { why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_wire::{
        ids::{CertificateSerial, ClusterUuid, Generation, NodeId, Ordinal, RegionIndex, WriterId},
        merkle,
        signed::SecretKey,
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
        let signed =
            SecretKey::from_seed(&[2; 32]).sign(ClusterUuid([7; 16]), Generation(1), CertificateSerial(5), said);
        let it = attestation(3);
        let batch = Shared {
            signed,
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
        let proof = Proof {
            namespace: NamespaceId(4),
            batches,
            hashes,
            sent: Duration::ZERO,
            lease_end: Duration::from_secs(1),
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
        let changes: [Change; 13] = [
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
