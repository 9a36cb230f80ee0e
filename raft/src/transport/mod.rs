//! How nodes talk: one link per ordered pair of nodes for all groups, snapshots on streams of their own.
//! Carries openraft's messages without looking into them; the link's first message fixes the protocol version, so
//! bodies need none.

pub(crate) mod link;
pub(crate) mod network;
pub(crate) mod service;
pub(crate) mod snapshots;

use std::io;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::store::snapshot::{SnapshotFile, Snapshots};
use crate::types::Vote;
use crate::versions::{Span, StateVersions};

#[expect(unreachable_pub, unused_qualifications, unnameable_types, clippy::allow_attributes, reason = "generated")]
pub(crate) mod pb {
    tonic::include_proto!("quarry.raft.v1");
}

/// The versions of what is said between nodes, of which two that open a link need one in common.
pub(crate) const PROTOCOL: Span = Span::only(2);

/// The longest message of a link; what is put together for one stays under half of it.
pub(crate) const MESSAGE_BYTES_MAX: usize = 8 << 20;
pub(crate) const MESSAGE_BYTES_AIM: usize = 2 << 20;

/// How many calls, or answers, are put together at most.
pub(crate) const BATCH: usize = 256;

/// Adds what others who are ready to run have to say to the same peer: the heartbeats of many groups come one by one within microseconds.
/// It gives way, but never waits.
async fn gather<T>(batch: &mut Vec<T>, mut next: impl FnMut() -> Option<T>) {
    let mut before = 0;
    while before < batch.len() && batch.len() < BATCH {
        before = batch.len();
        tokio::task::yield_now().await;
        while batch.len() < BATCH
            && let Some(more) = next()
        {
            batch.push(more);
        }
    }
}

/// Takes `work` as far as it goes without waiting; its outcome if that is to its end. Outside of the budget that tokio gives to one poll of a
/// task: whoever begins hundreds of things in one go would find all after the first 127 not ready, though nothing stands in their way.
pub(crate) fn at_once<F: Future>(work: F) -> Option<F::Output> {
    tokio::task::coop::unconstrained(work).now_or_never()
}

pub(crate) type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A group as its peers see it.
pub(crate) trait Port: Send + Sync {
    /// Answers one call.
    fn call(&self, kind: pb::Kind, body: Bytes) -> Boxed<Result<Bytes, pb::Reason>>;
    /// Says to the followers that this node leads, if it does.
    fn pulse(&self);
    /// The group's snapshots.
    fn snapshots(&self) -> Arc<Snapshots>;
    /// Installs a snapshot that arrived whole.
    fn install(&self, vote: Vote, snapshot: SnapshotFile) -> Boxed<Result<Bytes, pb::Reason>>;
    /// Whether the group was never formed, as far as this node knows.
    fn is_blank(&self) -> bool;
    /// Ends the group on this node.
    fn stop(&self) -> Boxed<()>;
}

pub(crate) fn encode<T: Serialize>(message: &T) -> io::Result<Bytes> {
    postcard::to_stdvec(message).map(Bytes::from).map_err(io::Error::other)
}

pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    postcard::from_bytes(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
}

impl pb::Refusal {
    pub(crate) fn new(reason: pb::Reason) -> Self {
        Self { reason: reason.into(), ..Self::default() }
    }

    pub(crate) fn mismatch(reason: pb::Reason, expected: u64, found: u64) -> Self {
        Self { reason: reason.into(), expected, found, ..Self::default() }
    }

    fn versions(reason: pb::Reason, expected: Span, found: Span) -> Self {
        Self {
            reason: reason.into(),
            expected: expected.until.saturating_sub(1).into(),
            found: found.until.saturating_sub(1).into(),
            expected_since: expected.since.into(),
            found_since: found.since.into(),
        }
    }

    pub(crate) fn explain(&self) -> String {
        let Self { expected, found, .. } = self;
        // Builds from before there were spans name the newest alone.
        let span = |since: u64, newest: &u64| {
            let since = if since == 0 { *newest } else { since };
            if since == *newest { newest.to_string() } else { format!("{since} to {newest}") }
        };
        let (theirs, ours) = (span(self.expected_since, expected), span(self.found_since, found));
        match self.reason() {
            pb::Reason::Protocol => format!(
                "the peer speaks raft protocol {theirs}, this node {ours}: run a build on both that knows a version of the other's"
            ),
            pb::Reason::State => format!(
                "the peer reads states and entries of version {theirs}, and this node proposes {ours}: first give every meta node a build that reads {ours}, then this one"
            ),
            pb::Reason::StateProposed => format!(
                "the peer proposes entries of version {theirs}, and this node reads {ours}: give this node a build that reads {theirs}"
            ),
            pb::Reason::WrongNode => {
                format!("node {expected} answers at this address, node {found} was meant: correct the member's address")
            }
            pb::Reason::WrongCaller => {
                format!("the certificate is of node {expected}, the caller says that it is node {found}")
            }
            pb::Reason::Generation => format!(
                "the peer is of generation {expected}, this node of {found}: the older one's history was given up, it must begin with an empty folder"
            ),
            pb::Reason::NoSuchGroup => "the peer does not host the group".to_owned(),
            pb::Reason::Malformed => "the peer could not decode the message".to_owned(),
            pb::Reason::Stopped => "the group has stopped on the peer".to_owned(),
            pb::Reason::Busy => "the peer receives as many snapshots as it can".to_owned(),
            pb::Reason::Damaged => "the snapshot was damaged on its way".to_owned(),
            pb::Reason::Unspecified => "the peer refused without a reason".to_owned(),
        }
    }
}

/// What a caller says of itself before anything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Caller {
    protocol: Span,
    /// `None` from builds that do not say.
    state: Option<StateVersions>,
    from: u64,
    to: u64,
    generation: u32,
}

/// The span from an oldest version, which builds that know one alone leave out, to the newest.
fn protocol(since: u32, newest: u32) -> Span {
    Span { since: if since == 0 { newest } else { since }, until: newest.saturating_add(1) }
}

/// What is done with states; a build that does not say what it proposes proposes the newest.
fn state(reads: Option<pb::Span>, proposed: u32) -> Option<StateVersions> {
    let reads: Span = reads?.into();
    let proposes = if proposed == 0 { reads.until.saturating_sub(1) } else { proposed };
    Some(StateVersions { reads, proposes })
}

impl From<&pb::Hello> for Caller {
    fn from(hello: &pb::Hello) -> Self {
        let pb::Hello { protocol: newest, from, to, protocol_since, state: reads, state_proposed, generation } = *hello;
        let (protocol, state) = (protocol(protocol_since, newest), state(reads, state_proposed));
        Self { protocol, state, from, to, generation }
    }
}

impl From<&pb::SnapshotStart> for Caller {
    fn from(start: &pb::SnapshotStart) -> Self {
        let protocol = protocol(start.protocol_since, start.protocol);
        let state = state(start.state, start.state_proposed);
        Self { protocol, state, from: start.from, to: start.to, generation: start.generation }
    }
}

impl From<pb::Span> for Span {
    fn from(pb::Span { since, until }: pb::Span) -> Self {
        Self { since, until }
    }
}

impl From<Span> for pb::Span {
    fn from(Span { since, until }: Span) -> Self {
        Self { since, until }
    }
}
