//! *Nothing unsigned*: every flipped bit, every truncation, every wrong cluster, generation, kind, signer and role is refused.

use proptest::prelude::*;
use quarry_wire::{
    attestation::{Attestation, AttestationBatch, Descriptor, Placement},
    certificate::{Certificate, Revocations, Role},
    frame::FrameKind,
    grant::{Class, Grant, GrantHolder, Purpose},
    ids::*,
    key::Key,
    keyring::{Keyring, TrustError},
    merkle,
    region::{FabricName, RegionRecord},
    signed::{SecretKey, Signed, Statement},
    units::{Offset, SlotCount, SlotSize},
    version::{HybridClock, Version},
};
use std::time::Duration;

pub(crate) const CLUSTER: ClusterUuid = ClusterUuid([1; 16]);
pub(crate) const META: NodeId = NodeId(1);
pub(crate) const DATA: NodeId = NodeId(11);
pub(crate) const GENERATION: Generation = Generation(3);
pub(crate) const META_SERIAL: CertificateSerial = CertificateSerial(100);
pub(crate) const DATA_SERIAL: CertificateSerial = CertificateSerial(101);

pub(crate) fn key(n: u8) -> SecretKey {
    SecretKey::from_seed(&[n; 32])
}
fn root() -> SecretKey {
    key(1)
}
pub(crate) fn certificate(serial: CertificateSerial, node: NodeId, role: Role, of: &SecretKey) -> Signed<Certificate> {
    root().sign_as_root(CLUSTER, Certificate { serial, node, role, key: of.public() })
}
/// A keyring that knows a meta node (key 2) and a data node (key 3).
fn keyring() -> Keyring {
    let mut ring = Keyring::new(CLUSTER, root().public()).unwrap();
    assert!(ring.see_generation(GENERATION));
    ring.admit(&certificate(META_SERIAL, META, Role::Meta, &key(2))).unwrap();
    ring.admit(&certificate(DATA_SERIAL, DATA, Role::DataNode, &key(3))).unwrap();
    ring
}
pub(crate) fn grant() -> Grant {
    let holder = |node| GrantHolder {
        region: RegionId { node: NodeId(node), index: RegionIndex(0) },
        incarnation: Incarnation::new(GENERATION, 7),
        extent: ExtentIndex(2),
        lend: LendNumber::new(GENERATION, 5),
        base: Offset(1 << 20),
    };
    Grant {
        id: GrantId { shard: ShardId(1), sequence: Ordinal { generation: GENERATION, number: 42 } },
        meta: META,
        purpose: Purpose::Write,
        writer: WriterId::anonymous([8; 8]),
        namespace: NamespaceId(4),
        class: Class::Cache,
        least: 2,
        slot_size: SlotSize(65_664),
        slots: SlotCount(16),
        ttl: Duration::from_secs(30),
        holders: vec![holder(11), holder(12)],
    }
}
pub(crate) fn record() -> RegionRecord {
    RegionRecord {
        region: RegionId { node: DATA, index: RegionIndex(0) },
        incarnation: Incarnation::new(GENERATION, 7),
        epoch: RegionEpoch(2),
        length: 1 << 30,
        base: 0,
        read_key: 0xfeed_beef,
        provider: "tcp".into(),
        address: FabricName::new(&[2, 0, 1, 2, 127, 0, 0, 1]).unwrap(),
    }
}
fn attestation(slot: u32) -> Attestation {
    Attestation {
        namespace: NamespaceId(4),
        key: Key::new(format!("key-{slot}")).unwrap(),
        kind: FrameKind::Value,
        version: Version { clock: HybridClock(9), writer: WriterId::anonymous([8; 8]) },
        payload_bytes: 65_536,
        payload_crc: 0x1234_5678,
        grant: grant().id,
        lend: LendNumber::new(GENERATION, 5),
        slot: SlotIndex(slot),
        region: RegionId { node: DATA, index: RegionIndex(0) },
        incarnation: Incarnation::new(GENERATION, 7),
        placement: Placement::Resident(Offset(4096)),
    }
}
pub(crate) fn batch() -> (Vec<Attestation>, AttestationBatch) {
    let attestations: Vec<_> = (0..5).map(attestation).collect();
    let leaves: Vec<_> = attestations.iter().map(Attestation::leaf).collect();
    (attestations, AttestationBatch::of(DATA, &leaves))
}

fn refuses_every_change<S: Statement + Clone + PartialEq + std::fmt::Debug>(signed: &Signed<S>) {
    let ring = keyring();
    let good = signed.encode();
    assert_eq!(&Signed::<S>::decode(&good).unwrap(), signed);
    ring.verify(signed.clone()).unwrap();
    for bit in 0..good.len() * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        if let Ok(decoded) = Signed::<S>::decode(&bad) {
            assert!(ring.verify(decoded).is_err(), "bit {bit} of a {} flipped and still believed", S::NAME);
        }
    }
    for end in 0..good.len() {
        assert!(Signed::<S>::decode(&good[..end]).is_err(), "a {} cut at {end} still decodes", S::NAME);
    }
    let mut longer = good;
    longer.push(0);
    assert!(Signed::<S>::decode(&longer).is_err(), "a {} with a byte more still decodes", S::NAME);
}

#[test]
fn every_flipped_bit_and_every_truncation_of_every_statement_is_refused() {
    refuses_every_change(&certificate(CertificateSerial(5), DATA, Role::DataNode, &key(3)));
    refuses_every_change(&root().sign_as_root(
        CLUSTER,
        Revocations { number: 4, serials: [CertificateSerial(9), CertificateSerial(12)].into() },
    ));
    refuses_every_change(&key(2).sign(CLUSTER, GENERATION, META_SERIAL, grant()));
    refuses_every_change(&key(3).sign(CLUSTER, GENERATION, DATA_SERIAL, record()));
    refuses_every_change(&key(3).sign(CLUSTER, GENERATION, DATA_SERIAL, batch().1));
}

#[test]
fn a_statement_of_another_cluster_is_refused() {
    let foreign = key(3).sign(ClusterUuid([2; 16]), GENERATION, DATA_SERIAL, record());
    assert_eq!(keyring().verify(foreign), Err(TrustError::BadSignature));
}

#[test]
fn a_statement_of_a_lower_generation_is_refused() {
    let old = key(3).sign(CLUSTER, Generation(2), DATA_SERIAL, record());
    assert_eq!(keyring().verify(old), Err(TrustError::Generation { expected: GENERATION, found: Generation(2) }));
    assert!(!keyring().see_generation(Generation(2)), "a lower generation is not taken");
}

#[test]
fn a_data_node_cannot_grant_and_a_meta_node_cannot_attest() {
    let mut forged = grant();
    forged.meta = DATA;
    let forged = key(3).sign(CLUSTER, GENERATION, DATA_SERIAL, forged);
    assert_eq!(keyring().verify(forged), Err(TrustError::Role { expected: Role::Meta, found: Role::DataNode }));
    let mut forged = batch().1;
    forged.node = META;
    let forged = key(2).sign(CLUSTER, GENERATION, META_SERIAL, forged);
    assert_eq!(keyring().verify(forged), Err(TrustError::Role { expected: Role::DataNode, found: Role::Meta }));
}

#[test]
fn a_node_cannot_speak_about_another_node() {
    let mut ring = keyring();
    ring.admit(&certificate(CertificateSerial(102), NodeId(12), Role::DataNode, &key(4))).unwrap();
    let forged = key(4).sign(CLUSTER, GENERATION, CertificateSerial(102), record());
    assert_eq!(ring.verify(forged), Err(TrustError::Signer { expected: DATA, found: NodeId(12) }));
}

#[test]
fn a_revoked_certificate_is_refused_and_an_older_list_does_not_bring_it_back() {
    let mut ring = keyring();
    let statement = key(3).sign(CLUSTER, GENERATION, DATA_SERIAL, record());
    ring.revoke(&root().sign_as_root(CLUSTER, Revocations { number: 2, serials: [DATA_SERIAL].into() })).unwrap();
    assert_eq!(ring.verify(statement.clone()), Err(TrustError::Revoked { serial: DATA_SERIAL }));
    let older = root().sign_as_root(CLUSTER, Revocations { number: 1, serials: [].into() });
    assert_eq!(ring.revoke(&older), Err(TrustError::OldRevocations { held: 2, found: 1 }));
    let other = root().sign_as_root(CLUSTER, Revocations { number: 2, serials: [].into() });
    assert_eq!(ring.revoke(&other), Err(TrustError::RevocationsReused { number: 2 }));
    assert_eq!(ring.verify(statement), Err(TrustError::Revoked { serial: DATA_SERIAL }));
}

#[test]
fn two_keys_of_one_node_are_believed_side_by_side_while_it_rotates() {
    let mut ring = keyring();
    ring.admit(&certificate(CertificateSerial(103), DATA, Role::DataNode, &key(5))).unwrap();
    ring.verify(key(3).sign(CLUSTER, GENERATION, DATA_SERIAL, record())).unwrap();
    ring.verify(key(5).sign(CLUSTER, GENERATION, CertificateSerial(103), record())).unwrap();
    let reused = certificate(DATA_SERIAL, DATA, Role::DataNode, &key(5));
    assert_eq!(ring.admit(&reused), Err(TrustError::SerialReused { serial: DATA_SERIAL }));
}

#[test]
fn statements_that_are_checked_together_have_the_verdicts_that_each_has_alone() {
    let mut ring = keyring();
    let (second, gone) = (CertificateSerial(103), CertificateSerial(104));
    ring.admit(&certificate(second, DATA, Role::DataNode, &key(5))).unwrap();
    ring.admit(&certificate(gone, DATA, Role::DataNode, &key(6))).unwrap();
    ring.revoke(&root().sign_as_root(CLUSTER, Revocations { number: 1, serials: [gone].into() })).unwrap();
    let batch = |slot| AttestationBatch::of(DATA, &[attestation(slot).leaf()]);
    let sign = |by: u8, serial, slot| key(by).sign(CLUSTER, GENERATION, serial, batch(slot));
    let good = vec![sign(3, DATA_SERIAL, 0), sign(5, second, 1), sign(3, DATA_SERIAL, 2)];
    let of_a_stranger =
        key(3).sign(CLUSTER, GENERATION, DATA_SERIAL, AttestationBatch { node: NodeId(12), ..batch(3) });
    let mut changed = sign(3, DATA_SERIAL, 4);
    changed.statement.root[0] ^= 1;
    let unbelieved = vec![
        sign(3, CertificateSerial(999), 5),
        sign(6, gone, 6),
        sign(2, META_SERIAL, 7),
        key(3).sign(CLUSTER, Generation(2), DATA_SERIAL, batch(8)),
        of_a_stranger,
    ];
    let forged = vec![sign(5, DATA_SERIAL, 9), changed];
    for statements in [
        vec![],
        good[..1].to_vec(),
        good.clone(),
        unbelieved.clone(),
        [good.clone(), unbelieved.clone()].concat(),
        [forged.clone(), good.clone()].concat(),
        [good, unbelieved, forged].concat(),
    ] {
        let alone: Vec<_> = statements.iter().map(|it| ring.verify(it.clone()).map(drop)).collect();
        assert_eq!(ring.verify_all(&statements.iter().collect::<Vec<_>>()), alone);
    }
}

#[test]
fn a_certificate_that_the_root_did_not_sign_is_refused() {
    let forged =
        key(9).sign_as_root(CLUSTER, certificate(CertificateSerial(7), DATA, Role::DataNode, &key(9)).statement);
    assert_eq!(keyring().admit(&forged), Err(TrustError::BadSignature));
}

#[test]
fn a_descriptor_is_proven_by_its_own_batch_only() {
    let (attestations, said) = batch();
    let leaves: Vec<_> = attestations.iter().map(Attestation::leaf).collect();
    let signed = key(3).sign(CLUSTER, GENERATION, DATA_SERIAL, said);
    let good = Descriptor { attestation: attestations[3].clone(), leaf: 3, path: merkle::path(&leaves, 3) };
    assert!(good.proven_by(&signed));
    let changes: [fn(&mut Descriptor); 12] = [
        |d| d.leaf = 2,
        |d| d.attestation.namespace = NamespaceId(5),
        |d| d.attestation.key = Key::new("other").unwrap(),
        |d| d.attestation.version.clock.0 += 1,
        |d| d.attestation.payload_bytes += 1,
        |d| d.attestation.payload_crc ^= 1,
        |d| d.attestation.grant.sequence.number += 1,
        |d| d.attestation.lend.0.number += 1,
        |d| d.attestation.slot.0 += 1,
        |d| d.attestation.region.node = NodeId(12),
        |d| d.attestation.incarnation.0.number += 1,
        |d| d.attestation.placement = Placement::Journaled,
    ];
    for change in changes {
        let mut bad = good.clone();
        change(&mut bad);
        assert!(!bad.proven_by(&signed), "{bad:?}");
    }
}

#[test]
fn tokens_compare_generation_then_lending_then_sequence() {
    let token = |generation, lend, sequence| Token { lend: LendNumber::new(Generation(generation), lend), sequence };
    assert!(token(2, 1, 1) > token(1, 9, 9));
    assert!(token(1, 2, 1) > token(1, 1, 9));
    assert!(token(1, 1, 2) > token(1, 1, 1));
}

proptest! {
    #[test]
    fn every_grant_round_trips(sequence: u64, writer: [u8; 16], slots in 1u32..=4096, units in 1u32..1024, base in 0u64..1 << 40, count in 1usize..=3, ttl in 0u64..=30_000) {
        let mut it = grant();
        it.id.sequence.number = sequence;
        it.writer = WriterId(writer);
        it.slots = SlotCount(slots);
        it.slot_size = SlotSize(units * 64);
        it.ttl = Duration::from_millis(ttl);
        it.holders = (0..count as u64).map(|n| GrantHolder { base: Offset(base), region: RegionId { node: NodeId(n + 1), index: RegionIndex(1) }, ..it.holders[0] }).collect();
        let signed = key(2).sign(CLUSTER, GENERATION, META_SERIAL, it);
        prop_assert_eq!(Signed::decode(&signed.encode()).unwrap(), signed);
    }

    #[test]
    fn arbitrary_bytes_never_make_a_decoder_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        drop(Signed::<Grant>::decode(&bytes));
        drop(Signed::<RegionRecord>::decode(&bytes));
        drop(Signed::<Certificate>::decode(&bytes));
        drop(Signed::<Revocations>::decode(&bytes));
        drop(Signed::<AttestationBatch>::decode(&bytes));
    }
}

#[test]
fn a_record_with_an_overlong_name_is_refused_and_harms_nobody() {
    let mut long = record();
    long.provider = "a provider name of more than sixteen bytes".into();
    let signed = key(3).sign(CLUSTER, GENERATION, DATA_SERIAL, long);
    let read = Signed::<RegionRecord>::decode(&signed.encode());
    assert!(read.is_err(), "a name with spaces is no provider: {read:?}");
    let bytes = postcard::to_allocvec(&vec![0u8; 65]).unwrap();
    assert!(postcard::from_bytes::<FabricName>(&bytes).is_err());
}
