//! A new signing key for the node, while all that it signed with the old one stays readable.
//!
//! Order matters. The directory admits the new certificate before anything is signed under it; both keys are believed side by side. Then the
//! node signs with the new one, gives its regions new records, and puts its new signature to every batch that shards still hold. A batch that
//! was signed before may be published later, so a shard is looked at until none of the grants from then waits for this node any more. After
//! that nothing depends on the old key, and it may be revoked. Keeps *Nothing unsigned*: the node signs again only what a key of its own signed
//! that is believed, whoever shows it. (After a leak that is not enough: such a key is revoked at once, with what it signed.)
//!
//! Whatever is interrupted is asked for again: nothing is undone, what is done is not done twice, and a wait for grants goes on where it was.

use crate::{
    config,
    metas::{LeaderCallError, with_timeout},
    node::Node,
    service,
};
use futures::{future::BoxFuture, future::try_join_all};
use quarry_proto::{convert, refusal::Refusal, v1};
use quarry_wire::{attestation::AttestationBatch, ids::CertificateSerial};
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, sleep, timeout_at};
use tonic::Status;

/// The directory's Raft group.
const DIRECTORY: u32 = 0;
/// Between two looks at a shard that still waits for older statements.
const PAUSE: Duration = Duration::from_millis(100);

/// How far the change to one key has come. One change at a time: another key in between would make the answer about this one untrue.
#[derive(Debug, Default)]
pub(crate) struct KeyChange {
    /// Certificate of the key.
    serial: Option<CertificateSerial>,
    /// Per shard the newest grant that there was when the node signed with it already: what it signed before is for none that came later.
    /// It stays when the change is asked for again, or a shard that always has open grants would never be done with.
    last: Vec<Option<v1::Ordinal>>,
}

/// Signs with the key that the node's key file has now, and has signed everything that is read under it when this returns.
pub(crate) async fn rotate_key(
    node: &Arc<Node>,
    why: String,
    deadline: Instant,
) -> Result<v1::RotateKeyReply, Refusal> {
    service::check_why(&why)?;
    let change = timeout_at(deadline, node.key_change.lock()).await;
    let mut change = change.map_err(|_| unfinished("another change of the key is under way"))?;
    let untrusted = |why: String| Refusal::Untrusted(v1::Untrusted { why });
    let source = node.key_source.clone();
    let source = source
        .ok_or_else(|| untrusted("this node has no key file: it keeps the key that it started with".to_owned()))?;
    let read = tokio::task::spawn_blocking(move || source.read()).await.expect("reading a key does not panic");
    let (key, certificate) = read.map_err(untrusted)?;
    config::fits(node.id, &key, &certificate.statement)
        .map_err(|(expected, found)| untrusted(format!("the certificate must be {expected}, found {found}")))?;
    let serial = certificate.statement.serial;
    let request = v1::AdmitCertificateRequest { certificate: certificate.encode().into() };
    let call = at_leader(node, DIRECTORY, deadline, move |node, address, until| {
        let request = with_timeout(request.clone(), until);
        Box::pin(async move { Ok(node.metas.registry(&address)?.admit_certificate(request).await?.into_inner()) })
    });
    call.await?;
    node.membership.sign_with(key, certificate).map_err(|error| untrusted(error.to_string()))?;
    if change.serial != Some(serial) {
        *change = KeyChange { serial: Some(serial), last: Vec::new() };
    }
    tracing::info!(%serial, why, "the node signs with another key");
    let shards = node.metas.describe(deadline).await.map_err(|status| unfinished(status.message()))?.shards;
    let rotated = service::rotate(node, v1::RotateRegionRequest { region: None, why }, deadline).await?;
    change.last.resize(shards as usize, None);
    let each = (1..).zip(&mut change.last).map(|(shard, last)| resign(node, shard, serial, last, deadline));
    let resigned = try_join_all(each).await?;
    let resigned = resigned.iter().sum();
    tracing::info!(%serial, resigned, "nothing depends on an older key of this node");
    Ok(v1::RotateKeyReply { serial: serial.0, resigned, regions: rotated.regions })
}

/// Signs again what a shard holds, until nothing that was signed before can come. Answers how many batches that were.
async fn resign(
    node: &Arc<Node>,
    shard: u32,
    serial: CertificateSerial,
    last: &mut Option<v1::Ordinal>,
    deadline: Instant,
) -> Result<u64, Refusal> {
    let mut resigned = 0;
    loop {
        // One look at all of them, page by page. What could still come is asked for before the first.
        let (mut after, mut awaiting, mut others) = (0, None, 0);
        loop {
            let request = v1::BatchesRequest { shard, node: node.id.0, serial: serial.0, after, last: *last };
            let reply = at_leader(node, shard, deadline, move |node, address, until| {
                let request = with_timeout(request, until);
                Box::pin(async move { Ok(node.metas.registry(&address)?.batches(request).await?.into_inner()) })
            });
            let reply = reply.await?;
            *last = last.or(reply.last);
            awaiting.get_or_insert(reply.awaiting);
            let Some(newest) = reply.batches.last() else { break };
            after = newest.batch;
            let batches: Vec<_> = reply.batches.iter().filter_map(|named| again(node, named)).collect();
            others += reply.batches.len() - batches.len();
            if batches.is_empty() {
                continue;
            }
            let request = v1::ResignRequest { shard, node: node.id.0, batches };
            let reply = at_leader(node, shard, deadline, move |node, address, until| {
                let request = with_timeout(request.clone(), until);
                Box::pin(async move { Ok(node.metas.registry(&address)?.resign(request).await?.into_inner()) })
            });
            resigned += u64::from(reply.await?.taken);
        }
        if awaiting == Some(0) {
            if others > 0 {
                tracing::warn!(
                    shard,
                    others,
                    "the shard has batches in this node's name that it did not sign, or with a revoked key"
                );
            }
            return Ok(resigned);
        }
        if Instant::now() + PAUSE >= deadline {
            return Err(unfinished(&format!("grants of shard {shard} still wait for what this node signed before")));
        }
        sleep(PAUSE).await;
    }
}

/// The same batch under the present key, if it is this node's word.
fn again(node: &Node, named: &v1::NamedBatch) -> Option<v1::NamedBatch> {
    let signed = convert::signed::<AttestationBatch>(&named.signed).ok()?;
    let batch = node.membership.verify(signed).ok()?.into_inner();
    (batch.node == node.id)
        .then(|| v1::NamedBatch { batch: named.batch, signed: node.membership.sign(batch).encode().into() })
}

async fn at_leader<T>(
    node: &Arc<Node>,
    group: u32,
    deadline: Instant,
    call: impl Fn(Arc<Node>, String, Instant) -> BoxFuture<'static, Result<T, Status>>,
) -> Result<T, Refusal> {
    let answer = node.metas.at_leader(group, deadline, |address, until| call(Arc::clone(node), address, until)).await;
    answer.map_err(|error| match error {
        LeaderCallError::Refused { refusal, .. } => refusal,
        LeaderCallError::Deadline { last } => unfinished(&last),
    })
}

fn unfinished(why: &str) -> Refusal {
    let why = format!("not all is signed with the new key yet, ask again: what is done stays done; last heard: {why}");
    Refusal::Indeterminate(v1::Indeterminate { why })
}
