//! New keys of data nodes: a further certificate is admitted, and batches are signed again under it.
//!
//! The leader checks what the machine cannot: that the caller is the node, and the signatures. Keeps *Nothing unsigned*.

use super::{publish, registry::node_refused, strange};
use crate::{core::Core, door};
use quarry_meta_state::{
    directory::{DirectoryCommand, DirectoryOutcome},
    shard::{BatchRef, Resigned, ShardCommand, ShardOutcome},
};
use quarry_proto::{convert, refusal::Refusal, v1};
use quarry_trust::Caller;
use quarry_wire::{
    attestation::AttestationBatch,
    certificate::{Certificate, Role},
    ids::{CertificateSerial, NodeId, Ordinal, ShardId},
    limits::RESIGNED_PER_CALL_MAX,
    signed::Signed,
};
use tokio::time::Instant;

pub(super) async fn admit(
    core: &Core,
    asked: v1::AdmitCertificateRequest,
    caller: &Caller,
    deadline: Instant,
) -> Result<v1::AdmitCertificateReply, Refusal> {
    let certificate: Signed<Certificate> = convert::signed(&asked.certificate)?;
    let said = certificate.statement;
    caller.is_node(Role::DataNode, said.node, "AdmitCertificate")?;
    core.directory.leads()?;
    core.made()?;
    let untrusted = |why: String| Refusal::Untrusted(v1::Untrusted { why });
    if said.role != Role::DataNode {
        return Err(untrusted(format!("the certificate is of {} as {}", said.node, said.role)));
    }
    if core.directory.read(|directory| directory.is_revoked(said.serial)) {
        return Err(untrusted(format!("certificate {} was revoked", said.serial)));
    }
    // The machine checks the signature too; here it costs no entry.
    let admitted = core.keyring()?.as_ref().clone().admit(&certificate);
    admitted.map_err(|error| untrusted(format!("certificate {}: {error}", said.serial)))?;
    match core.directory.propose(DirectoryCommand::AdmitCertificate(certificate), deadline).await?.outcome {
        DirectoryOutcome::Node(Ok(feed)) => Ok(v1::AdmitCertificateReply { feed: Some(feed.into()) }),
        DirectoryOutcome::Node(Err(refusal)) => Err(node_refused(refusal)),
        other => Err(strange(&other)),
    }
}

pub(super) async fn batches(
    core: &Core,
    asked: v1::BatchesRequest,
    caller: &Caller,
    deadline: Instant,
) -> Result<v1::BatchesReply, Refusal> {
    let (node, serial) = (NodeId(asked.node), CertificateSerial(asked.serial));
    caller.is_node(Role::DataNode, node, "Batches")?;
    let shard = core.shard(ShardId(asked.shard))?;
    shard.hosted.leads()?;
    shard
        .hosted
        .read_linearized(deadline, |state, _| {
            let last = asked.last.map_or_else(|| state.last_grant(), Ordinal::from);
            let named = |batch: BatchRef| {
                let signed = state.batch(batch)?.signed().encode().into();
                Some(v1::NamedBatch { batch: batch.0, signed })
            };
            v1::BatchesReply {
                batches: state
                    .signed_otherwise(node, serial, BatchRef(asked.after))
                    .take(RESIGNED_PER_CALL_MAX)
                    .filter_map(named)
                    .collect(),
                last: Some(last.into()),
                awaiting: state.awaiting(node, last) as u64,
            }
        })
        .await
}

pub(super) async fn resign(
    core: &Core,
    asked: v1::ResignRequest,
    caller: &Caller,
    deadline: Instant,
) -> Result<v1::ResignReply, Refusal> {
    let node = NodeId(asked.node);
    caller.is_node(Role::DataNode, node, "Resign")?;
    let shard = core.shard(ShardId(asked.shard))?;
    shard.hosted.leads()?;
    if asked.batches.len() > RESIGNED_PER_CALL_MAX {
        return Err(door::too_large("batches", RESIGNED_PER_CALL_MAX, asked.batches.len()));
    }
    let mut batches = Vec::with_capacity(asked.batches.len());
    for named in &asked.batches {
        let signed: Signed<AttestationBatch> = convert::signed(&named.signed)?;
        let said = signed.statement;
        if said.node != node {
            let why = format!("a batch of {} is signed again by itself alone, the caller is {node}", said.node);
            return Err(Refusal::Untrusted(v1::Untrusted { why }));
        }
        publish::verify(core, &signed, deadline).await?;
        let Signed { generation, serial, signature, .. } = signed;
        batches.push(Resigned { batch: BatchRef(named.batch), root: said.root, generation, serial, signature });
    }
    match shard.hosted.propose(ShardCommand::Resign { node, batches }, deadline).await?.outcome {
        ShardOutcome::Resign { taken } => Ok(v1::ResignReply { taken }),
        other => Err(strange(&other)),
    }
}
