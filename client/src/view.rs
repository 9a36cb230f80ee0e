//! What this client believes about the cluster: whose signatures count, where regions and nodes are, which namespaces there are.
//!
//! Decides what is believed; asks nobody (`control.rs` does). Everything that is used to read or to write passed the keyring here once
//! (*Nothing unsigned*). Records and batches of an older generation are dropped as soon as a newer one is heard of (*Epochs only grow*).

use crate::error::CallError;
use bytes::Bytes;
use quarry_proto::{convert, refusal::Refusal, v1};
use quarry_wire::{
    attestation::AttestationBatch,
    certificate::{Certificate, Revocations},
    grant::{Class, Grant},
    ids::{FeedNumber, Generation, Incarnation, NamespaceId, NodeId, RegionId},
    keyring::{Keyring, TrustError, Verified},
    region::RegionRecord,
    signed::{Signed, Statement},
};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Batches whose signature was checked that are remembered; beyond, all are forgotten and checked again when met.
const BATCHES_MAX: usize = 16 << 10;

/// A namespace as the directory knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamespaceInfo {
    /// Its number; never used again.
    pub id: NamespaceId,
    /// Its name.
    pub name: String,
    /// Whether its values may be evicted.
    pub class: Class,
    /// Copies of each value.
    pub copies: u8,
    /// Fewest copies with which a value is accepted.
    pub least: u8,
    /// Most memory that its values have, in bytes, all copies counted.
    pub quota_bytes: Option<u64>,
}

impl TryFrom<v1::Namespace> for NamespaceInfo {
    type Error = Refusal;
    fn try_from(it: v1::Namespace) -> Result<Self, Refusal> {
        let small = |field: &str, value: u32| {
            u8::try_from(value).map_err(|_| Refusal::malformed(field, "a small number", value))
        };
        Ok(Self {
            id: NamespaceId(it.id),
            name: it.name,
            class: convert::class(it.class)?,
            copies: small("copies", it.copies)?,
            least: small("least", it.least)?,
            quota_bytes: (it.quota_bytes > 0).then_some(it.quota_bytes),
        })
    }
}

/// What is believed now.
#[derive(Debug)]
pub(crate) struct View {
    keyring: Keyring,
    /// Newest feed number whose changes are all in here.
    seen: Option<FeedNumber>,
    shards: u32,
    namespaces: BTreeMap<String, NamespaceInfo>,
    nodes: HashMap<NodeId, String>,
    /// The meta nodes. One that is not named may be unknown to a node that is behind: they go only by being retired.
    metas: BTreeMap<NodeId, String>,
    /// Nodes whose numbers are used up.
    retired: BTreeSet<NodeId>,
    /// Per region the record of its newest incarnation, highest epoch.
    records: HashMap<RegionId, Verified<RegionRecord>>,
    /// Signed batches as they travel, whose signature was found good under the present keyring.
    batches: HashSet<Bytes>,
}

impl View {
    pub(crate) fn new(keyring: Keyring) -> Self {
        Self {
            keyring,
            seen: None,
            shards: 0,
            namespaces: BTreeMap::new(),
            nodes: HashMap::new(),
            metas: BTreeMap::new(),
            retired: BTreeSet::new(),
            records: HashMap::new(),
            batches: HashSet::new(),
        }
    }

    /// To be named in requests.
    pub(crate) fn seen(&self) -> Option<v1::Ordinal> {
        self.seen.map(Into::into)
    }

    /// How many shards there are; at least one once the cluster was described.
    pub(crate) fn shards(&self) -> u32 {
        self.shards
    }

    pub(crate) fn namespace(&self, name: &str) -> Option<&NamespaceInfo> {
        self.namespaces.get(name)
    }
    pub(crate) fn namespaces(&self) -> impl Iterator<Item = &NamespaceInfo> {
        self.namespaces.values()
    }
    pub(crate) fn note_namespace(&mut self, namespace: NamespaceInfo) {
        self.namespaces.insert(namespace.name.clone(), namespace);
    }

    /// Where a data node answers calls.
    pub(crate) fn node(&self, node: NodeId) -> Option<&str> {
        self.nodes.get(&node).map(String::as_str)
    }

    /// Where the meta nodes answer calls, as far as the cluster was described.
    pub(crate) fn metas(&self) -> impl ExactSizeIterator<Item = &str> {
        self.metas.values().map(String::as_str)
    }

    /// How to read a region, if this is the life of it that we know.
    pub(crate) fn record(&self, region: RegionId, incarnation: Incarnation) -> Option<&RegionRecord> {
        self.records.get(&region).map(Verified::get).filter(|record| record.incarnation == incarnation)
    }

    /// Number of the newest revocation list.
    pub(crate) fn revocations(&self) -> u64 {
        self.keyring.revocation_number()
    }

    /// Takes in a region record that its data node showed.
    pub(crate) fn shown(&mut self, bytes: &[u8]) -> Result<(), Doubt> {
        let signed = decode::<RegionRecord>(bytes).map_err(Doubt::Broken)?;
        let record = self.keyring.verify(signed)?;
        self.note_record(record);
        Ok(())
    }

    /// Forgets what was seen, so that the next description is a whole one.
    pub(crate) fn forget_seen(&mut self) {
        self.seen = None;
    }

    /// Takes in a description of the cluster.
    pub(crate) fn described(&mut self, reply: v1::DescribeReply) -> Result<(), CallError> {
        let expected = self.keyring.cluster();
        if reply.cluster[..] != expected.0 {
            let found: String = reply.cluster.iter().map(|byte| format!("{byte:02x}")).collect();
            let why = if found.is_empty() {
                "the node belongs to no cluster yet: bootstrap it".to_owned()
            } else {
                format!("expected cluster {expected}, found {found}")
            };
            return Err(CallError::Untrusted { why });
        }
        if reply.shards == 0 {
            return Err(CallError::Untrusted { why: "expected at least one shard, found none".to_owned() });
        }
        if self.shards != 0 && self.shards != reply.shards {
            let why = format!("expected {} shards, found {}: they are fixed for ever", self.shards, reply.shards);
            return Err(CallError::Untrusted { why });
        }
        self.shards = reply.shards;
        let generation = Generation(reply.generation);
        if generation < self.keyring.generation() {
            let why = format!("expected {} or later, found {generation}", self.keyring.generation());
            return Err(CallError::Untrusted { why });
        }
        self.enter(generation);
        if let Some(changes) = reply.changes {
            self.changed(changes);
        }
        let present = reply.metas.into_iter().map(|meta| (NodeId(meta.node), meta.address));
        self.metas.extend(present.filter(|(node, _)| !self.retired.contains(node)));
        Ok(())
    }

    /// Takes in what changed in the directory. What does not prove itself is left out, and whatever needs it will be refused.
    pub(crate) fn changed(&mut self, changes: v1::Changes) {
        let at = changes.at.map(FeedNumber::from);
        if let Some(at) = at {
            if at.0.generation < self.keyring.generation() {
                return;
            }
            self.enter(at.0.generation);
        }
        for node in changes.retired.iter().copied().map(NodeId) {
            self.retired.insert(node);
            self.metas.remove(&node);
            self.nodes.remove(&node);
        }
        for bytes in &changes.certificates {
            let admitted = decode::<Certificate>(bytes)
                .and_then(|certificate| self.keyring.admit(&certificate).map_err(|error| error.to_string()));
            if let Err(why) = admitted {
                tracing::warn!(%why, "a certificate is not believed");
            }
        }
        if !changes.revocations.is_empty() {
            self.revoked(&changes.revocations);
        }
        for bytes in &changes.records {
            match decode::<RegionRecord>(bytes)
                .and_then(|record| self.keyring.verify(record).map_err(|e| e.to_string()))
            {
                Ok(record) => self.note_record(record),
                Err(why) => tracing::warn!(%why, "a region record is not believed"),
            }
        }
        for namespace in changes.namespaces {
            match NamespaceInfo::try_from(namespace) {
                Ok(namespace) => self.note_namespace(namespace),
                Err(why) => tracing::warn!(%why, "a namespace is not understood"),
            }
        }
        // Replies may overtake each other: an older one knows older addresses.
        if at >= self.seen {
            for node in changes.data_nodes.into_iter().filter(|it| !self.retired.contains(&NodeId(it.node))) {
                self.nodes.insert(NodeId(node.node), node.address);
            }
            let present = changes.metas.into_iter().map(|meta| (NodeId(meta.node), meta.address));
            self.metas.extend(present.filter(|(node, _)| !self.retired.contains(node)));
            self.seen = at;
        }
    }

    fn enter(&mut self, generation: Generation) {
        if generation > self.keyring.generation() {
            self.keyring.see_generation(generation);
            // The new generation voids all memory, and its feed is read from the start.
            self.records.clear();
            self.batches.clear();
            self.seen = None;
            // So does who is gone: a generation that begins from a backup does not know of later removals, and has meta nodes of its own.
            self.retired.clear();
            self.metas.clear();
        }
    }

    fn revoked(&mut self, bytes: &[u8]) {
        let before = self.keyring.revocation_number();
        let list =
            decode::<Revocations>(bytes).and_then(|list| self.keyring.revoke(&list).map_err(|error| error.to_string()));
        if let Err(why) = list {
            tracing::warn!(%why, "a revocation list is not taken");
        }
        if self.keyring.revocation_number() != before {
            // Whatever a revoked key signed is void: what remains is checked again.
            self.batches.clear();
            let records = std::mem::take(&mut self.records);
            for (_, record) in records {
                if let Ok(record) = self.keyring.verify(record.signed().clone()) {
                    self.note_record(record);
                }
            }
        }
    }

    fn note_record(&mut self, record: Verified<RegionRecord>) {
        let newness = |record: &RegionRecord| (record.incarnation, record.epoch);
        match self.records.get(&record.get().region) {
            Some(held) if newness(held.get()) >= newness(record.get()) => {}
            _ => {
                self.records.insert(record.get().region, record);
            }
        }
    }

    /// A grant that a meta node signed.
    pub(crate) fn grant(&self, bytes: &[u8]) -> Result<Grant, Doubt> {
        let signed = decode::<Grant>(bytes).map_err(Doubt::Broken)?;
        Ok(self.keyring.verify(signed)?.into_inner())
    }

    /// A batch that its data node signed. Each is checked once.
    pub(crate) fn batch(&mut self, bytes: &Bytes) -> Result<Signed<AttestationBatch>, Doubt> {
        let signed = decode::<AttestationBatch>(bytes).map_err(Doubt::Broken)?;
        if self.batches.contains(bytes) {
            return Ok(signed);
        }
        let signed = self.keyring.verify(signed)?.signed().clone();
        if self.batches.len() >= BATCHES_MAX {
            self.batches.clear();
        }
        // A copy of its own: the bytes are a slice of a whole message, which they would keep alive.
        self.batches.insert(Bytes::copy_from_slice(bytes));
        Ok(signed)
    }
}

/// Why a statement is not used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum Doubt {
    /// It is not such a statement.
    #[error("{0}")]
    Broken(String),
    /// It does not prove itself.
    #[error(transparent)]
    Trust(#[from] TrustError),
}

impl Doubt {
    /// Whether a whole description of the cluster may help: we may lack a certificate or a generation.
    pub(crate) fn may_be_ours(&self) -> bool {
        matches!(self, Self::Trust(TrustError::Generation { .. } | TrustError::UnknownCertificate { .. }))
    }
}

fn decode<S: Statement>(bytes: &[u8]) -> Result<Signed<S>, String> {
    Signed::decode(bytes).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_wire::{
        certificate::Role,
        ids::{CertificateSerial, ClusterUuid, RegionEpoch, RegionIndex},
        region::FabricName,
        signed::SecretKey,
    };

    const CLUSTER: ClusterUuid = ClusterUuid([7; 16]);
    const GENERATION: Generation = Generation(1);
    const NODE: NodeId = NodeId(11);

    fn root() -> SecretKey {
        SecretKey::from_seed(&[1; 32])
    }
    fn node_key() -> SecretKey {
        SecretKey::from_seed(&[2; 32])
    }
    fn certificate() -> Bytes {
        let said =
            Certificate { serial: CertificateSerial(5), node: NODE, role: Role::DataNode, key: node_key().public() };
        root().sign_as_root(CLUSTER, said).encode().into()
    }
    fn region() -> RegionId {
        RegionId { node: NODE, index: RegionIndex(0) }
    }
    fn record(generation: Generation, incarnation: u64, epoch: u64) -> Bytes {
        let said = RegionRecord {
            region: region(),
            incarnation: Incarnation::new(generation, incarnation),
            epoch: RegionEpoch(epoch),
            length: 1 << 20,
            base: 0,
            read_key: 9,
            provider: "net".to_owned(),
            address: FabricName::new(&[1; 16]).unwrap(),
        };
        node_key().sign(CLUSTER, generation, CertificateSerial(5), said).encode().into()
    }
    fn changes(number: u64, records: Vec<Bytes>) -> v1::Changes {
        v1::Changes {
            at: Some(FeedNumber::new(GENERATION, number).into()),
            certificates: vec![certificate()],
            records,
            ..Default::default()
        }
    }
    fn view() -> View {
        let mut view = View::new(Keyring::new(CLUSTER, root().public()).unwrap());
        let reply =
            v1::DescribeReply { cluster: CLUSTER.0.to_vec().into(), generation: 1, shards: 1, ..Default::default() };
        view.described(reply).unwrap();
        view
    }

    #[test]
    fn a_meta_node_is_known_until_it_is_retired_whatever_nodes_that_are_behind_say() {
        let mut view = view();
        let meta = |node: u64| v1::MetaInfo { node, address: format!("h:{node}") };
        let described = |metas: &[u64], retired: &[u64]| v1::DescribeReply {
            cluster: CLUSTER.0.to_vec().into(),
            generation: 1,
            shards: 1,
            metas: metas.iter().copied().map(meta).collect(),
            changes: Some(v1::Changes { retired: retired.to_vec(), ..Default::default() }),
            ..Default::default()
        };
        view.described(described(&[1, 2, 3], &[])).unwrap();
        view.described(described(&[1, 2, 3, 4], &[])).unwrap();
        view.described(described(&[1, 2, 3], &[])).unwrap();
        assert_eq!(view.metas().collect::<Vec<_>>(), ["h:1", "h:2", "h:3", "h:4"]);
        view.described(described(&[1, 3, 4], &[2])).unwrap();
        view.described(described(&[1, 2, 3], &[])).unwrap();
        assert_eq!(view.metas().collect::<Vec<_>>(), ["h:1", "h:3", "h:4"]);
        // Also what any other reply says changed.
        let at = Some(FeedNumber::new(Generation(1), 9).into());
        view.changed(v1::Changes { at, metas: vec![meta(5)], retired: vec![1], ..Default::default() });
        assert_eq!(view.metas().collect::<Vec<_>>(), ["h:3", "h:4", "h:5"]);
    }

    #[test]
    fn a_new_generation_says_anew_who_is_gone_and_an_older_one_says_nothing() {
        let mut view = view();
        let meta = |node: u64| v1::MetaInfo { node, address: format!("h:{node}") };
        let described = |generation: u32, metas: &[u64]| v1::DescribeReply {
            cluster: CLUSTER.0.to_vec().into(),
            generation,
            shards: 1,
            metas: metas.iter().copied().map(meta).collect(),
            ..Default::default()
        };
        let gone = |generation: u32, node: u64| v1::Changes {
            at: Some(FeedNumber::new(Generation(generation), 5).into()),
            retired: vec![node],
            ..Default::default()
        };
        view.described(described(1, &[1, 2, 3])).unwrap();
        view.changed(gone(1, 3));
        view.described(described(2, &[3, 4])).unwrap();
        assert_eq!(view.metas().collect::<Vec<_>>(), ["h:3", "h:4"], "a backup of before the removal was restored");
        view.changed(gone(1, 4));
        assert_eq!(view.metas().len(), 2, "what an older generation retired does not count");
        view.changed(gone(2, 4));
        assert_eq!(view.metas().collect::<Vec<_>>(), ["h:3"]);
    }

    #[test]
    fn of_two_records_of_a_region_the_newer_incarnation_and_epoch_count() {
        let mut view = view();
        view.changed(changes(1, vec![record(GENERATION, 1, 2)]));
        view.changed(changes(2, vec![record(GENERATION, 1, 1)]));
        let first = Incarnation::new(GENERATION, 1);
        assert_eq!(view.record(region(), first).unwrap().epoch, RegionEpoch(2));
        view.changed(changes(3, vec![record(GENERATION, 2, 1)]));
        assert!(view.record(region(), first).is_none(), "the older life is over");
        assert!(view.record(region(), Incarnation::new(GENERATION, 2)).is_some());
    }

    #[test]
    fn a_record_with_a_flipped_bit_is_not_believed() {
        let good = record(GENERATION, 1, 1);
        for bit in 0..good.len() * 8 {
            let mut bad = good.to_vec();
            bad[bit / 8] ^= 1 << (bit % 8);
            let mut view = view();
            view.changed(changes(1, vec![bad.into()]));
            assert!(view.records.is_empty(), "bit {bit} flipped and still believed");
        }
    }

    #[test]
    fn a_new_generation_voids_records_and_asks_for_everything() {
        let mut view = view();
        view.changed(changes(4, vec![record(GENERATION, 1, 1)]));
        assert!(view.seen().is_some());
        let reply =
            v1::DescribeReply { cluster: CLUSTER.0.to_vec().into(), generation: 2, shards: 1, ..Default::default() };
        view.described(reply.clone()).unwrap();
        assert!(view.records.is_empty() && view.seen().is_none());
        let back = v1::DescribeReply { generation: 1, ..reply };
        assert!(matches!(view.described(back), Err(CallError::Untrusted { .. })));
        view.changed(changes(9, vec![record(GENERATION, 9, 1)]));
        assert!(view.records.is_empty(), "changes of an older generation are not taken");
    }

    #[test]
    fn what_a_revoked_key_signed_is_dropped() {
        let mut view = view();
        view.changed(changes(1, vec![record(GENERATION, 1, 1)]));
        assert_eq!(view.records.len(), 1);
        let list = Revocations { number: 1, serials: [CertificateSerial(5)].into() };
        let list = root().sign_as_root(CLUSTER, list).encode();
        view.changed(v1::Changes { revocations: list.into(), ..changes(2, Vec::new()) });
        assert!(view.records.is_empty());
    }

    #[test]
    fn another_cluster_or_another_number_of_shards_is_refused() {
        let mut view = view();
        let good =
            v1::DescribeReply { cluster: CLUSTER.0.to_vec().into(), generation: 1, shards: 1, ..Default::default() };
        for bad in [
            v1::DescribeReply { cluster: vec![8; 16].into(), ..good.clone() },
            v1::DescribeReply { cluster: Bytes::new(), ..good.clone() },
            v1::DescribeReply { shards: 2, ..good.clone() },
            v1::DescribeReply { shards: 0, ..good.clone() },
        ] {
            assert!(matches!(view.described(bad), Err(CallError::Untrusted { .. })));
        }
        assert!(view.described(good).is_ok());
    }
}
