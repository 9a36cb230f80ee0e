//! What leaves this node for a backup or a comparison: the whole state of a group, and hashes of states at one index. And a stamp, to measure by.
//!
//! A state is frozen, as for a snapshot, and encoded chunk by chunk beside the commands that go on. It is told with the entry that it is of;
//! which states belong together is decided by who asks.

use crate::{core::Core, door, hosted::Hosted, machine::Replicated};
use bytes::Bytes;
use futures::future::join_all;
use quarry_meta_state::hash_written;
use quarry_proto::{refusal::Refusal, v1};
use quarry_raft::{LogIndex, SnapshotWriter};
use quarry_wire::ids::ShardId;
use sha2::{Digest as _, Sha256};
use std::{io, sync::Arc, time::Duration};
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, mpsc},
    time::{Instant, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tonic::Status;

/// Bytes of a state in one message.
const CHUNK_BYTES: usize = 256 << 10;
/// Messages that wait for a slow reader.
const CHUNKS_WAITING: usize = 4;
/// How long a reader may leave them unread.
const READER_PATIENCE: Duration = Duration::from_secs(30);
/// Come again when the state that is being saved may be on its way.
const BUSY: Duration = Duration::from_secs(1);

type Parts = mpsc::Sender<Result<v1::SavedPart, Status>>;

/// Streams the whole state of one group.
pub(super) async fn save(
    core: Arc<Core>,
    asked: v1::SaveGroupRequest,
    deadline: Instant,
) -> Result<ReceiverStream<Result<v1::SavedPart, Status>>, Refusal> {
    core.made()?;
    let busy = |_| door::not_ready("this node is saving a state for somebody else", BUSY);
    let slot = Arc::clone(&core.saving).try_acquire_owned().map_err(busy)?;
    let inside = core.gate.enter()?;
    let hold = (slot, inside);
    if asked.group == 0 {
        stream(&core, &core.directory, asked.stale, deadline, hold).await
    } else {
        stream(&core, &core.shard(ShardId(asked.group))?.hosted, asked.stale, deadline, hold).await
    }
}

async fn stream<S: Replicated>(
    core: &Core,
    hosted: &Hosted<S>,
    stale: bool,
    deadline: Instant,
    hold: (OwnedSemaphorePermit, TaskTrackerToken),
) -> Result<ReceiverStream<Result<v1::SavedPart, Status>>, Refusal> {
    if !stale {
        hosted.group.read_index(deadline).await.map_err(|error| door::read_refused(hosted.id(), error))?;
    }
    let (state, applied) = hosted.group.with(|machine, applied| (machine.state().clone(), applied));
    let (generation, shards) = core.directory.read(|directory| (directory.generation(), directory.shards()));
    let head = v1::SavedHead {
        cluster: core.config.cluster.0.to_vec().into(),
        root: core.config.root.0.to_vec().into(),
        generation: generation.0,
        shards,
        build: env!("CARGO_PKG_VERSION").to_owned(),
        group: hosted.id().0,
        // Of this node now, so not below that of any entry that it has applied.
        term: hosted.group.status().term.0,
        applied: applied.0,
        log_time_ms: state.log_time().0,
        feed: Some(state.feed_position().into()),
        length: 0,
    };
    tracing::info!(group = head.group, applied = head.applied, stale, "a state is being saved");
    let (parts, answer) = mpsc::channel(CHUNKS_WAITING);
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || {
        if let Err(error) = send(&runtime, &parts, head, |out| state.encode_to(out)) {
            tracing::warn!(%error, "a state was not saved to its end");
        }
        drop(hold);
    });
    Ok(ReceiverStream::new(answer))
}

/// Sends what `encode` writes. That runs twice, since the first message says how many bytes there are: to write a state costs less than to hold
/// all of it.
fn send(
    runtime: &Handle,
    parts: &Parts,
    head: v1::SavedHead,
    encode: impl Fn(&mut dyn io::Write) -> io::Result<()>,
) -> io::Result<()> {
    let mut counted = Counted(0);
    encode(&mut counted)?;
    let head = v1::SavedHead { length: counted.0, ..head };
    let part = v1::SavedPart { head: Some(head), ..Default::default() };
    let mut chunks = Chunks { runtime, parts, part, chunk: Vec::with_capacity(CHUNK_BYTES), digest: Sha256::new() };
    encode(&mut chunks)?;
    if !chunks.chunk.is_empty() {
        chunks.leave()?;
    }
    chunks.part.digest = std::mem::take(&mut chunks.digest).finalize().to_vec().into();
    chunks.send()
}

/// Counts bytes.
struct Counted(u64);

impl io::Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Sends bytes in chunks. Blocks while the reader is slow, but no longer than its patience.
struct Chunks<'a> {
    runtime: &'a Handle,
    parts: &'a Parts,
    /// The message that goes next: the first one has the head.
    part: v1::SavedPart,
    /// What it will carry.
    chunk: Vec<u8>,
    digest: Sha256,
}

impl Chunks<'_> {
    /// The chunk goes as it is.
    fn leave(&mut self) -> io::Result<()> {
        let chunk = Bytes::from(std::mem::replace(&mut self.chunk, Vec::with_capacity(CHUNK_BYTES)));
        self.digest.update(&chunk);
        self.part.crc = crc32c::crc32c(&chunk);
        self.part.chunk = chunk;
        self.send()
    }

    fn send(&mut self) -> io::Result<()> {
        let part = std::mem::take(&mut self.part);
        match self.runtime.block_on(async { timeout(READER_PATIENCE, self.parts.send(Ok(part))).await }) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(io::Error::new(io::ErrorKind::BrokenPipe, "whoever saves it went away")),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "whoever saves it does not read on")),
        }
    }
}

impl io::Write for Chunks<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(CHUNK_BYTES - self.chunk.len());
        self.chunk.extend_from_slice(&bytes[..taken]);
        if self.chunk.len() == CHUNK_BYTES {
            self.leave()?;
        }
        Ok(taken)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The hashes of the states asked for, each with the index that it is of.
pub(super) async fn hashes(
    core: &Core,
    asked: v1::StateHashRequest,
    deadline: Instant,
) -> Result<v1::StateHashReply, Refusal> {
    let now = |group: u32| v1::GroupIndex { group, index: 0 };
    let at = match asked.at {
        none if none.is_empty() => (0..=core.config.shards).map(now).collect(),
        some => some,
    };
    let hashing = at.into_iter().map(|at| async move {
        if at.group == 0 {
            hash(&core.directory, at.index, deadline).await
        } else {
            hash(&core.shard(ShardId(at.group))?.hosted, at.index, deadline).await
        }
    });
    let groups = join_all(hashing).await.into_iter().collect::<Result<Vec<_>, Refusal>>()?;
    Ok(v1::StateHashReply { groups, node: core.config.node.0 })
}

async fn hash<S: Replicated>(hosted: &Hosted<S>, index: u64, deadline: Instant) -> Result<v1::GroupHash, Refusal> {
    let frozen = hosted.group.frozen_at(LogIndex(index), deadline).await;
    let (group, applied) = (hosted.id().0, frozen.last.0);
    let hashed = tokio::task::spawn_blocking(move || hash_of(frozen.state)).await.map_err(io::Error::other);
    let hash = hashed.flatten().map_err(|error| door::indeterminate(format!("the state was not hashed: {error}")))?;
    Ok(v1::GroupHash { group, applied, hash: hash.to_vec().into() })
}

/// One entry through the log of a group.
pub(super) async fn stamp(core: &Core, asked: v1::StampRequest, deadline: Instant) -> Result<v1::StampReply, Refusal> {
    async fn tick<S: Replicated>(hosted: &Hosted<S>, deadline: Instant) -> Result<v1::StampReply, Refusal> {
        hosted.leads()?;
        hosted.propose(S::tick(), deadline).await?;
        Ok(v1::StampReply { applied_ms: hosted.read(S::log_time).0 })
    }
    core.made()?;
    if asked.group == 0 {
        tick(&core.directory, deadline).await
    } else {
        tick(&core.shard(ShardId(asked.group))?.hosted, deadline).await
    }
}

/// SHA-256 over a state's canonical bytes, as they are written to snapshots.
fn hash_of(state: Box<dyn SnapshotWriter>) -> io::Result<[u8; 32]> {
    hash_written(|out| state.write_to(out))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Frozen;
    use quarry_meta_state::Directory;

    #[test]
    fn the_hash_of_a_frozen_state_is_the_machines_own() {
        let state = Directory::new();
        assert_eq!(hash_of(Box::new(Frozen(state.clone()))).unwrap(), state.hash());
    }

    #[tokio::test]
    async fn a_state_is_sent_whole_in_chunks_that_name_their_checksums() {
        for length in [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 5] {
            let bytes = Bytes::from(vec![7; length]);
            let (parts, mut answer) = mpsc::channel(8);
            let (head, sent) = (v1::SavedHead { group: 3, ..Default::default() }, bytes.clone());
            let runtime = Handle::current();
            let sending = tokio::task::spawn_blocking(move || {
                send(&runtime, &parts, head, |out| sent.chunks(100_000).try_for_each(|some| out.write_all(some)))
            });
            let (mut heads, mut whole, mut digest) = (0, Vec::new(), Bytes::new());
            while let Some(part) = answer.recv().await.map(Result::unwrap) {
                if let Some(head) = part.head {
                    assert_eq!(head.length, length as u64);
                    heads += 1;
                }
                assert!(part.chunk.len() <= CHUNK_BYTES);
                assert_eq!(part.crc, if part.chunk.is_empty() { 0 } else { crc32c::crc32c(&part.chunk) });
                whole.extend_from_slice(&part.chunk);
                digest = part.digest;
            }
            sending.await.unwrap().unwrap();
            assert_eq!((heads, whole.len()), (1, length));
            assert_eq!(digest[..], Sha256::digest(&bytes)[..]);
        }
    }
}
