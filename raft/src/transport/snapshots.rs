//! Sending and receiving snapshot files: what is there already is asked first, then come a start, chunks with a checksum each, an end.
//! A transfer that breaks goes on where it broke (`store/arrival.rs`); only what arrived whole, by the digest of all of it, is installed.

use std::io::{self, Read};
use std::time::Duration;

use bytes::Bytes;
use openraft::errors::{NetworkError, StreamingError, Unreachable};
use openraft::raft::SnapshotResponse;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::link::deepest;
use super::network::PeerNetwork;
use super::{Port, decode, encode, pb};
use crate::ids::GroupId;
use crate::metrics;
use crate::replica::blocking;
use crate::store::arrival::Identity;
use crate::store::snapshot::SnapshotFile;
use crate::types::{Types, Vote};

const CHUNK_BYTES: usize = 1 << 20;
/// How many snapshots a node sends, and how many it receives, at once.
pub(crate) const AT_ONCE: usize = 2;
/// How long the next chunk may take.
const CHUNK_DEADLINE: Duration = Duration::from_secs(20);

fn network(error: &dyn std::fmt::Display) -> StreamingError<Types> {
    StreamingError::Network(NetworkError::from_string(error.to_string()))
}

fn unreachable(error: &dyn std::fmt::Display) -> StreamingError<Types> {
    StreamingError::Unreachable(Unreachable::from_string(error.to_string()))
}

/// Sends what the follower lacks of a file and returns its answer. A connection that breaks is followed by the next, as long as each brings
/// the file further; what is left then is for the next attempt, which may be with a newer snapshot.
pub(super) async fn send(
    to: &PeerNetwork,
    vote: Vote,
    snapshot: SnapshotFile,
    limit: Duration,
) -> Result<SnapshotResponse<Types>, StreamingError<Types>> {
    let deadline = Instant::now() + limit;
    let _slot = timeout_at(deadline, to.snapshot_slots.acquire())
        .await
        .map_err(|_| unreachable(&format!("{AT_ONCE} other snapshots took {limit:?}")))?
        .map_err(|error| unreachable(&error))?;
    #[cfg(feature = "sim")]
    if let Some((net, own)) = to.links.world() {
        let sent = timeout(limit, net.send_snapshot(own, to.peer, to.group, vote, &snapshot)).await;
        let body = sent.map_err(|_| network(&"late"))?.map_err(|error| unreachable(&error))?;
        return decode(&body).map_err(|error| network(&error));
    }
    let which = snapshot.identity();
    let start = pb::SnapshotStart {
        group: to.group.0,
        vote: encode(&vote).map_err(|error| network(&error))?,
        length: which.length,
        digest: Bytes::copy_from_slice(&which.digest),
        ..to.links.snapshot_start(to.peer)
    };
    let mut before = None;
    loop {
        let attempt = timeout_at(deadline, once(to, &snapshot, start.clone(), before)).await;
        match attempt.map_err(|_| network(&format!("the snapshot was not sent within {limit:?}")))? {
            Ok(answer) => return Ok(answer),
            Err(Failed { error, went_on_at: None }) => return Err(error),
            Err(Failed { error, went_on_at: Some(offset) }) => {
                tracing::debug!(group = %to.group, peer = %to.peer, offset, %error, "a snapshot did not arrive whole");
                before = Some((offset, error));
            }
        }
    }
}

/// Why a stream did not bring the file to its end.
struct Failed {
    error: StreamingError<Types>,
    /// Where it began, if another may bring it further.
    went_on_at: Option<u64>,
}

impl From<StreamingError<Types>> for Failed {
    fn from(error: StreamingError<Types>) -> Self {
        Self { error, went_on_at: None }
    }
}

/// One connection. `before` is where the last one began, and how it ended.
async fn once(
    to: &PeerNetwork,
    snapshot: &SnapshotFile,
    mut start: pb::SnapshotStart,
    before: Option<(u64, StreamingError<Types>)>,
) -> Result<SnapshotResponse<Types>, Failed> {
    let dialled = to.links.dial(to.peer, &to.addr).await;
    let mut client = dialled.map_err(|error| unreachable(&deepest(&error)))?;
    let there = client.ask_snapshot(start.clone()).await.map_err(|status| unreachable(&status))?.into_inner();
    if let Some(refusal) = there.refusal {
        return Err(unreachable(&refusal.explain()).into());
    }
    let offset = there.offset.min(start.length);
    if let Some((last, error)) = before
        && offset <= last
    {
        return Err(error.into());
    }
    start.offset = offset;
    metrics::snapshot_resumed(to.group, offset);
    let bytes = snapshot.bytes(offset).map_err(|error| network(&error))?;
    let (parts, stream) = mpsc::channel(2);
    let group = to.group;
    let reading = tokio::task::spawn_blocking(move || read_parts(group, start, bytes, &parts));
    let answer = client.send_snapshot(ReceiverStream::new(stream)).await;
    // The reader ends by itself when the stream is gone. What it could not read is the cause of all that follows.
    reading.await.map_err(io::Error::other).flatten().map_err(|error| network(&error))?;
    let again = |error| Failed { error, went_on_at: Some(offset) };
    let answer = answer.map_err(|status| again(unreachable(&status)))?.into_inner();
    match answer.refusal {
        Some(refusal) if refusal.reason() == pb::Reason::Damaged => Err(again(unreachable(&refusal.explain()))),
        Some(refusal) => Err(unreachable(&refusal.explain()).into()),
        None => decode(&answer.body).map_err(|error| network(&error).into()),
    }
}

fn read_parts(
    group: GroupId,
    start: pb::SnapshotStart,
    mut bytes: impl Read,
    parts: &mpsc::Sender<pb::SnapshotPart>,
) -> io::Result<()> {
    let mut left = start.length - start.offset;
    let mut part = pb::SnapshotPart { start: Some(start), ..pb::SnapshotPart::default() };
    loop {
        // A receiver that went away has said why, or will be tried again.
        if parts.blocking_send(part).is_err() {
            return Ok(());
        }
        if left == 0 {
            break;
        }
        let mut chunk = vec![0; usize::try_from(left).unwrap_or(usize::MAX).min(CHUNK_BYTES)];
        bytes.read_exact(&mut chunk)?;
        left -= chunk.len() as u64;
        metrics::snapshot_sent(group, chunk.len() as u64);
        part = pb::SnapshotPart { crc: crc32c::crc32c(&chunk), chunk: chunk.into(), ..pb::SnapshotPart::default() };
    }
    drop(parts.blocking_send(pb::SnapshotPart { end: Some(pb::SnapshotEnd {}), ..pb::SnapshotPart::default() }));
    Ok(())
}

/// The file that a start names.
fn identity(start: &pb::SnapshotStart) -> Result<Identity, pb::Reason> {
    let digest = start.digest[..].try_into().map_err(|_| pb::Reason::Malformed)?;
    Ok(Identity { length: start.length, digest })
}

/// How much of a snapshot is here already.
pub(super) async fn arrived(port: &dyn Port, start: &pb::SnapshotStart) -> Result<u64, pb::Reason> {
    let (which, snapshots) = (identity(start)?, port.snapshots());
    blocking(move || snapshots.arrivals().arrived(which)).await.map_err(|error| {
        tracing::error!(%error, group = start.group, "what there is of a snapshot cannot be looked at");
        pb::Reason::Stopped
    })
}

/// Receives what follows a start and installs the whole.
pub(super) async fn receive(
    port: &dyn Port,
    start: pb::SnapshotStart,
    mut parts: Streaming<pb::SnapshotPart>,
) -> Result<Bytes, pb::Reason> {
    let vote: Vote = decode(&start.vote).map_err(|_| pb::Reason::Malformed)?;
    let (group, which, snapshots) = (GroupId(start.group), identity(&start)?, port.snapshots());
    let stopped = |error: io::Error| {
        tracing::error!(%error, %group, "a snapshot could not be stored");
        pb::Reason::Stopped
    };
    let turn = snapshots.arrivals().turn().await.ok_or(pb::Reason::Busy)?;
    let begun = blocking(move || snapshots.arrivals().begin(turn, which, start.offset)).await;
    let mut arriving = begun.map_err(stopped)?.ok_or(pb::Reason::Damaged)?;
    loop {
        let part = timeout(CHUNK_DEADLINE, parts.message()).await;
        let Ok(Ok(Some(part))) = part else { return Err(pb::Reason::Damaged) };
        if part.end.is_some() {
            break;
        }
        if crc32c::crc32c(&part.chunk) != part.crc {
            return Err(pb::Reason::Damaged);
        }
        metrics::snapshot_received(group, part.chunk.len() as u64);
        let (back, fits) = blocking(move || {
            let fits = arriving.append(&part.chunk)?;
            Ok((arriving, fits))
        })
        .await
        .map_err(stopped)?;
        if !fits {
            return Err(pb::Reason::Damaged);
        }
        arriving = back;
    }
    let checked = blocking(move || arriving.check().map(|snapshot| (arriving, snapshot))).await;
    let (arriving, Some(snapshot)) = checked.map_err(stopped)? else { return Err(pb::Reason::Damaged) };
    // A task of its own: the sender may give up, but nobody else may touch the file until the group is done with it.
    let installing = port.install(vote, snapshot);
    let installed = tokio::spawn(async move {
        let installed = installing.await;
        drop(arriving);
        installed
    });
    installed.await.unwrap_or(Err(pb::Reason::Stopped))
}
