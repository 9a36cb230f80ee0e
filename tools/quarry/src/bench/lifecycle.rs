//! `quarry bench lifecycle`: what the guarantees around a value cost, per block and per call.
//!
//! Signatures are measured on the functions that data nodes and readers call, in this process: making a batch's tree and signing its root,
//! and checking the root and every leaf's way up to it. Leases are measured on a cluster: resolves of a hundred keys with a lease and without
//! one in turn, with what the leader and the caller spend on a processor; pins likewise. Resolves and existence probes stand beside the batched
//! existence check of another store where one is installed.

use super::{
    Session,
    error::BenchError,
    measure::{Pace, Round, Side, alone, alternate},
    meta::{
        BATCH, LabError,
        lab::{Lab, Writer},
        probe::Used,
        written,
    },
    mooncake::Mooncake,
    report::{Row, Unit},
};
use bytes::Bytes;
use quarry_wire::{
    attestation::{Attestation, AttestationBatch, Placement},
    certificate::{Certificate, Role},
    frame::FrameKind,
    ids::{
        CertificateSerial, ClusterUuid, Generation, GrantId, Incarnation, LendNumber, NamespaceId, NodeId, Ordinal,
        RegionId, RegionIndex, ShardId, SlotIndex, WriterId,
    },
    key::Key,
    keyring::Keyring,
    limits::LEASE_MAX,
    merkle::{self, Hash},
    signed::{SecretKey, Signed},
    units::Offset,
    version::{HybridClock, Version},
};
use std::{hint::black_box, time::Duration};
use tokio::time::Instant;

const SIGN: &str = "signature/sign/of100";
const CHECK: &str = "signature/check/of100";
const LEASED: &str = "lease/resolve100";
const PINNED: &str = "pin/100/pin+release";
const RESOLVED: &str = "peer/resolve100";
const PROBED: &str = "peer/exists100";
/// Batches that calls choose their keys from.
const BATCHES: usize = 20;
/// How long a pin is asked for.
const PIN: Duration = Duration::from_secs(30);

pub(super) async fn run(session: &mut Session) -> Result<(), BenchError> {
    let alone_here: Vec<&str> = [SIGN, CHECK].into_iter().filter(|case| session.wants(case)).collect();
    for case in alone_here {
        let mut side = Signatures { batch: Signed100::make(), checks: case == CHECK };
        let measured = alone(session.pace, &mut side).await?;
        session.push(Row::alone(case, Unit::Micros, &measured)?);
    }
    let cases: Vec<&str> = [LEASED, PINNED, RESOLVED, PROBED].into_iter().filter(|case| session.wants(case)).collect();
    if cases.is_empty() {
        return Ok(());
    }
    let lab = Lab::start(&session.dir).await?;
    let mut writer = lab.writer(1).await?;
    let asked = written(&mut writer, BATCHES, BATCH).await?;
    let mut mooncake = match &session.mooncake {
        Some(python) if cases.iter().any(|case| [RESOLVED, PROBED].contains(case)) => {
            Some(Mooncake::start(python, lab.stage.cluster().dir()).await?)
        }
        _ => None,
    };
    for case in cases {
        let calls = |how| Calls { lab: &lab, own: None, asked: &asked, next: 0, how };
        match case {
            LEASED => {
                let rows =
                    leases(&lab, session.pace, calls(How::Resolve(LEASE_MAX)), calls(How::Resolve(Duration::ZERO)));
                for row in Box::pin(rows).await? {
                    session.push(row);
                }
            }
            PINNED => {
                let (mut pins, mut resolves) = (calls(How::Pin), calls(How::Resolve(LEASE_MAX)));
                let (pins, resolves) = alternate(session.pace, &mut pins, &mut resolves).await?;
                session.push(Row::compared(case, Unit::Micros, &pins, "a resolve with a lease", &resolves)?);
            }
            _ => {
                let how = if case == PROBED { How::Exists } else { How::Resolve(LEASE_MAX) };
                let row = against(mooncake.as_mut(), session.pace, case, calls(how)).await?;
                session.push(row);
            }
        }
    }
    drop(mooncake);
    lab.end().await
}

/// Resolves with a lease beside those without, and what the former take on processors.
async fn leases(lab: &Lab, pace: Pace, mut leased: Calls<'_>, mut bare: Calls<'_>) -> Result<Vec<Row>, BenchError> {
    let (with, without) = alternate(pace, &mut leased, &mut bare).await?;
    let mut rows = vec![Row::compared(LEASED, Unit::Micros, &with, "the same without a lease", &without)?];
    let leader = lab.processes().await?.into_iter().find(|(role, _)| *role == "leader");
    let (_, leader) = leader.ok_or_else(|| LabError::unexpected("processes", "a leader", "none"))?;
    let used = || Ok::<_, BenchError>([Used::by(leader)?, Used::by(std::process::id())?]);
    let before = used()?;
    let round = leased.round(pace.side).await?;
    let blocks = (round.latencies.len() * BATCH) as f64;
    for ((what, after), before) in ["leader", "reader"].into_iter().zip(used()?).zip(before) {
        let micros = after.since(before).cpu.as_secs_f64() * 1e6 / blocks;
        // What is less than the clock of the kernel shows was not measured.
        if micros == 0.0 {
            continue;
        }
        rows.push(Row::cost(LEASED, &format!("cpu per block/{what}"), Unit::Micros, micros));
    }
    Ok(rows)
}

/// A call of ours beside the other store's.
async fn against(
    mooncake: Option<&mut Mooncake>,
    pace: Pace,
    case: &str,
    mut ours: Calls<'_>,
) -> Result<Row, BenchError> {
    let Some(mooncake) = mooncake else {
        let ours = alone(pace, &mut ours).await?;
        return Ok(Row::alone(case, Unit::Micros, &ours)?.without_reference("none: see --mooncake"));
    };
    let mut theirs = mooncake.existence();
    let (ours, theirs) = alternate(pace, &mut ours, &mut theirs).await?;
    Row::compared(case, Unit::Micros, &ours, format!("Mooncake {} batch_is_exist 100", mooncake.version()), &theirs)
}

/// A batch of a hundred attestations, signed.
struct Signed100 {
    node: NodeId,
    cluster: ClusterUuid,
    key: SecretKey,
    attestations: Vec<Attestation>,
    keyring: Keyring,
    /// What a reader is given: the signed root, and each leaf's way up to it.
    shown: Bytes,
    ways: Vec<Vec<Hash>>,
}

const GENERATION: Generation = Generation(1);
const SERIAL: CertificateSerial = CertificateSerial(7);

impl Signed100 {
    fn make() -> Self {
        let (node, cluster) = (NodeId(101), ClusterUuid([9; 16]));
        let (root, key) = (SecretKey::from_seed(&[1; 32]), SecretKey::from_seed(&[2; 32]));
        let certificate = Certificate { serial: SERIAL, node, role: Role::DataNode, key: key.public() };
        let mut keyring = Keyring::new(cluster, root.public()).expect("the key of a seed is a good one");
        keyring.see_generation(GENERATION);
        keyring.admit(&root.sign_as_root(cluster, certificate)).expect("the root has signed it");
        let number = |number| Ordinal { generation: GENERATION, number };
        let attestation = |slot: u32| Attestation {
            namespace: NamespaceId(1),
            key: Key::new(format!("prefix-of-a-block-{slot:06}")).expect("a short name is a key"),
            kind: FrameKind::Value,
            version: Version { clock: HybridClock(1), writer: WriterId([3; 16]) },
            payload_bytes: 4096,
            payload_crc: slot,
            grant: GrantId { shard: ShardId(1), sequence: number(5) },
            lend: LendNumber(number(2)),
            slot: SlotIndex(slot),
            region: RegionId { node, index: RegionIndex(0) },
            incarnation: Incarnation(number(1)),
            placement: Placement::Resident(Offset(u64::from(slot) * 4352)),
        };
        let count = u32::try_from(BATCH).expect("a hundred fits in a u32");
        let attestations: Vec<Attestation> = (0..count).map(attestation).collect();
        let leaves: Vec<Hash> = attestations.iter().map(Attestation::leaf).collect();
        let batch = AttestationBatch::of(node, &leaves);
        let shown = key.sign(cluster, GENERATION, SERIAL, batch).encode().into();
        let ways = (0..BATCH).map(|leaf| merkle::path(&leaves, leaf)).collect();
        Self { node, cluster, key, attestations, keyring, shown, ways }
    }

    /// What a data node does for a commit of a hundred, once it has looked at the frames.
    fn sign(&self) -> Vec<u8> {
        let leaves: Vec<Hash> = self.attestations.iter().map(Attestation::leaf).collect();
        let batch = AttestationBatch::of(self.node, &leaves);
        self.key.sign(self.cluster, GENERATION, SERIAL, batch).encode()
    }

    /// What a reader does with a batch that it sees for the first time.
    fn check(&self) -> bool {
        let signed = Signed::<AttestationBatch>::decode(&self.shown).expect("it was encoded above");
        let said = self.keyring.verify(signed).expect("its signer is certified").into_inner();
        let mut proven = merkle::Proven::of(said.root, said.leaves as usize);
        let mut leaves = self.attestations.iter().zip(&self.ways).enumerate();
        leaves.all(|(leaf, (attestation, way))| proven.shows(&attestation.leaf(), leaf, way))
    }
}

/// Batches signed, or checked; a call is one block of a batch.
struct Signatures {
    batch: Signed100,
    checks: bool,
}

impl Side for Signatures {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        let (until, mut round) = (Instant::now() + time, Round::default());
        while round.latencies.is_empty() || Instant::now() < until {
            let began = Instant::now();
            if self.checks {
                assert!(black_box(&self.batch).check(), "what was signed is believed");
            } else {
                black_box(black_box(&self.batch).sign());
            }
            round.add(1.0, began.elapsed() / u32::try_from(BATCH).expect("a hundred fits in a u32"));
        }
        Ok(round)
    }
}

/// What is asked of the shard for a hundred keys.
#[derive(Clone, Copy, Debug)]
enum How {
    Resolve(Duration),
    Exists,
    Pin,
}

/// Calls of one caller, one after the other.
struct Calls<'a> {
    lab: &'a Lab,
    own: Option<Writer>,
    asked: &'a [Vec<Bytes>],
    next: usize,
    how: How,
}

impl Side for Calls<'_> {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        if self.own.is_none() {
            self.own = Some(self.lab.writer(1).await?);
        }
        let writer = self.own.as_mut().expect("it was made above");
        let (until, mut round) = (Instant::now() + time, Round::default());
        while round.latencies.is_empty() || Instant::now() < until {
            self.next = (self.next + 1) % self.asked.len();
            let keys = self.asked[self.next].clone();
            let began = Instant::now();
            match self.how {
                How::Resolve(lease) => drop(writer.resolve(keys, lease).await?),
                How::Exists => writer.exists(keys).await?,
                How::Pin => writer.pin(keys, PIN).await?,
            }
            round.add(1.0, began.elapsed());
        }
        Ok(round)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_checked_and_a_changed_one_is_not_believed() {
        let mut batch = Signed100::make();
        assert!(batch.check());
        batch.attestations[42].payload_crc += 1;
        assert!(!batch.check());
    }
}
