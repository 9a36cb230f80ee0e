//! Sending and receiving snapshot files: a start, chunks with a checksum each, a digest of all.
//! The receiver writes aside and installs only what arrived whole.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use openraft::errors::{NetworkError, StreamingError, Unreachable};
use openraft::raft::SnapshotResponse;
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::link::deepest;
use super::network::PeerNetwork;
use super::{PROTOCOL, Port, decode, encode, pb};
use crate::ids::GroupId;
use crate::replica::blocking;
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

/// Sends a whole file and returns the follower's answer.
pub(super) async fn send(
    to: &PeerNetwork,
    vote: Vote,
    snapshot: SnapshotFile,
    limit: Duration,
) -> Result<SnapshotResponse<Types>, StreamingError<Types>> {
    let _slot = timeout(limit, to.snapshot_slots.acquire())
        .await
        .map_err(|_| unreachable(&format!("{AT_ONCE} other snapshots took {limit:?}")))?
        .map_err(|error| unreachable(&error))?;
    #[cfg(feature = "sim")]
    if let Some((net, own)) = to.links.world() {
        let sent = timeout(limit, net.send_snapshot(own, to.peer, to.group, vote, &snapshot)).await;
        let body = sent.map_err(|_| network(&"late"))?.map_err(|error| unreachable(&error))?;
        return decode(&body).map_err(|error| network(&error));
    }
    let start = pb::SnapshotStart {
        protocol: PROTOCOL,
        from: to.links.node().0,
        to: to.peer.0,
        generation: to.links.generation(),
        group: to.group.0,
        vote: encode(&vote).map_err(|error| network(&error))?,
        length: snapshot.length(),
    };
    let bytes = snapshot.bytes().map_err(|error| network(&error))?;
    let (parts, stream) = mpsc::channel(2);
    let reading = tokio::task::spawn_blocking(move || read_parts(start, bytes, &parts));
    let dialled = timeout(limit, to.links.dial(to.peer, &to.addr)).await;
    let dialled = dialled.map_err(|_| unreachable(&format!("no connection within {limit:?}")))?;
    let mut client = dialled.map_err(|error| unreachable(&deepest(&error)))?;
    let answer = timeout(limit, client.send_snapshot(ReceiverStream::new(stream)))
        .await
        .map_err(|_| network(&format!("the snapshot was not sent within {limit:?}")))?
        .map_err(|status| unreachable(&status));
    // The reader ends by itself when the stream is gone. What it could not read is the cause of all that follows.
    reading.await.map_err(io::Error::other).flatten().map_err(|error| network(&error))?;
    let answer = answer?.into_inner();
    match answer.refusal {
        Some(refusal) => Err(unreachable(&refusal.explain())),
        None => decode(&answer.body).map_err(|error| network(&error)),
    }
}

fn read_parts(
    start: pb::SnapshotStart,
    mut bytes: impl Read,
    parts: &mpsc::Sender<pb::SnapshotPart>,
) -> io::Result<()> {
    let mut left = start.length;
    let mut digest = Sha256::new();
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
        digest.update(&chunk);
        part = pb::SnapshotPart { crc: crc32c::crc32c(&chunk), chunk: chunk.into(), ..pb::SnapshotPart::default() };
    }
    let end = pb::SnapshotEnd { digest: Bytes::copy_from_slice(&digest.finalize()) };
    drop(parts.blocking_send(pb::SnapshotPart { end: Some(end), ..pb::SnapshotPart::default() }));
    Ok(())
}

/// A file that is removed unless it was put in its place.
struct Aside {
    path: PathBuf,
}

impl Drop for Aside {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, path = %self.path.display(), "a half received snapshot was not removed");
        }
    }
}

/// Receives what follows a start and installs it.
pub(super) async fn receive(
    port: &dyn Port,
    start: pb::SnapshotStart,
    mut parts: Streaming<pb::SnapshotPart>,
) -> Result<Bytes, pb::Reason> {
    let vote: Vote = decode(&start.vote).map_err(|_| pb::Reason::Malformed)?;
    let group = GroupId(start.group);
    let aside = Aside { path: port.aside() };
    let stopped = |error: io::Error| {
        tracing::error!(%error, %group, "a snapshot could not be stored");
        pb::Reason::Stopped
    };
    let path = aside.path.clone();
    let mut file = blocking(move || File::create(path)).await.map_err(stopped)?;
    let mut digest = Sha256::new();
    let mut length = 0_u64;
    let end = loop {
        let part = timeout(CHUNK_DEADLINE, parts.message()).await;
        let Ok(Ok(Some(part))) = part else { return Err(pb::Reason::Damaged) };
        if let Some(end) = part.end {
            break end;
        }
        length += part.chunk.len() as u64;
        if crc32c::crc32c(&part.chunk) != part.crc || length > start.length {
            return Err(pb::Reason::Damaged);
        }
        digest.update(&part.chunk);
        file = blocking(move || {
            file.write_all(&part.chunk)?;
            Ok(file)
        })
        .await
        .map_err(stopped)?;
    };
    if length != start.length || digest.finalize()[..] != end.digest[..] {
        return Err(pb::Reason::Damaged);
    }
    let path = aside.path.clone();
    let snapshot = blocking(move || {
        file.sync_all()?;
        SnapshotFile::open(&path, group)
    })
    .await;
    let snapshot = snapshot.map_err(|error| {
        tracing::error!(%error, %group, "a snapshot arrived whole and is not one");
        pb::Reason::Damaged
    })?;
    // A task of its own: the sender may give up, but the file must stay until the group is done with it.
    let installing = port.install(vote, snapshot);
    let installed = tokio::spawn(async move {
        let installed = installing.await;
        drop(aside);
        installed
    });
    installed.await.unwrap_or(Err(pb::Reason::Stopped))
}
