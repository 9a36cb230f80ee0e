//! openraft's network on top of links.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use openraft::base::{BoxFuture, BoxStream};
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Timeout, Unreachable};
use openraft::network::{RPCOption, RPCTypes, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, StreamAppendResult, TransferLeaderRequest,
    TransferLeaderResponse, VoteRequest, VoteResponse,
};
use openraft::{BasicNode, OptionalSend};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;

use super::link::{Link, LinkError, Links};
use super::{decode, encode, pb, snapshots};
use crate::ids::{GroupId, RaftNodeId};
use crate::store::snapshot::SnapshotFile;
use crate::types::{LogId, Snapshot, Types, Vote};

/// How many appends to one follower may be on their way at once.
const PIPELINE: usize = 16;

/// Makes a group's connections to its peers.
pub(crate) struct Network {
    pub(crate) group: GroupId,
    pub(crate) links: Arc<Links>,
    /// How long a follower may take to store entries.
    pub(crate) append_limit: Duration,
    /// Snapshots that are sent at once, over all groups.
    pub(crate) snapshot_slots: Arc<Semaphore>,
}

impl RaftNetworkFactory<Types> for Network {
    type Network = PeerNetwork;

    async fn new_client(&mut self, target: u64, node: &BasicNode) -> PeerNetwork {
        let peer = RaftNodeId(target);
        PeerNetwork {
            group: self.group,
            peer,
            addr: node.addr.clone(),
            link: self.links.to(peer, &node.addr),
            links: Arc::clone(&self.links),
            append_limit: self.append_limit,
            snapshot_slots: Arc::clone(&self.snapshot_slots),
        }
    }
}

/// One group's connection to one peer.
pub(crate) struct PeerNetwork {
    pub(super) group: GroupId,
    pub(super) peer: RaftNodeId,
    pub(super) addr: String,
    link: Link,
    pub(super) links: Arc<Links>,
    append_limit: Duration,
    pub(super) snapshot_slots: Arc<Semaphore>,
}

impl PeerNetwork {
    /// Queues a call at once; the future is its answer.
    fn call<Q: Serialize, A: DeserializeOwned>(
        &self,
        kind: pb::Kind,
        request: &Q,
        limit: Duration,
    ) -> impl Future<Output = Result<A, RPCError<Types>>> + Send + use<Q, A> {
        let (from, to) = (self.links.node(), self.peer);
        let sent = encode(request).map(|body| self.link.call(self.group, kind, body, limit));
        async move {
            let answer = match sent {
                Ok(answer) => answer.await,
                Err(error) => return Err(RPCError::Network(NetworkError::new(&error))),
            };
            let body: Bytes = answer.map_err(|error| match error {
                LinkError::Unreachable(_) | LinkError::Refused(_) => RPCError::Unreachable(Unreachable::new(&error)),
                LinkError::Broken(_) => RPCError::Network(NetworkError::new(&error)),
                LinkError::Deadline(timeout) => RPCError::Timeout(Timeout {
                    action: match kind {
                        pb::Kind::Append | pb::Kind::Unspecified => RPCTypes::AppendEntries,
                        pb::Kind::Vote | pb::Kind::PreVote => RPCTypes::Vote,
                        pb::Kind::TransferLeader => RPCTypes::TransferLeader,
                    },
                    id: from.0,
                    target: to.0,
                    timeout,
                }),
            })?;
            decode(&body).map_err(|error| RPCError::Network(NetworkError::new(&error)))
        }
    }

    /// Queues an append; the future is what openraft's stream yields for it.
    fn append(
        &self,
        request: &AppendEntriesRequest<Types>,
        limit: Duration,
    ) -> impl Future<Output = Result<(StreamAppendResult<Types>, bool), RPCError<Types>>> + Send + use<> {
        let prev = request.prev_log_id;
        let last: Option<LogId> = request.entries.last().map(|entry| entry.log_id).or(prev);
        let answer = self.call::<_, AppendEntriesResponse<Types>>(pb::Kind::Append, request, limit);
        async move {
            let answer = answer.await?;
            let whole = match &answer {
                AppendEntriesResponse::Success => true,
                AppendEntriesResponse::PartialSuccess(upto) => *upto == last,
                AppendEntriesResponse::Conflict | AppendEntriesResponse::HigherVote(_) => false,
            };
            Ok((answer.into_stream_result(prev, last), whole))
        }
    }
}

impl RaftNetworkV2<Types> for PeerNetwork {
    type SnapshotData = SnapshotFile;

    async fn append_entries(
        &mut self,
        request: AppendEntriesRequest<Types>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<Types>, RPCError<Types>> {
        self.call(pb::Kind::Append, &request, option.soft_ttl().max(self.append_limit)).await
    }

    /// Several appends are on their way at once; answers come in the order of the requests, and the stream ends with
    /// the first that is not a whole success.
    fn stream_append<'s, S>(
        &'s mut self,
        input: S,
        option: RPCOption,
    ) -> BoxFuture<'s, Result<BoxStream<'s, Result<StreamAppendResult<Types>, RPCError<Types>>>, RPCError<Types>>>
    where
        S: Stream<Item = AppendEntriesRequest<Types>> + OptionalSend + Unpin + 'static,
    {
        let limit = option.soft_ttl().max(self.append_limit);
        let this = &*self;
        let answers = input.map(move |request| this.append(&request, limit)).buffered(PIPELINE);
        let until_failure = stream::unfold(Some(Box::pin(answers)), |answers| async move {
            let mut answers = answers?;
            match answers.next().await? {
                Ok((result, whole)) => Some((Ok(result), whole.then_some(answers))),
                Err(error) => Some((Err(error), None)),
            }
        });
        Box::pin(async move { Ok(Box::pin(until_failure) as BoxStream<'s, _>) })
    }

    async fn vote(
        &mut self,
        request: VoteRequest<Types>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        self.call(pb::Kind::Vote, &request, option.soft_ttl()).await
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<Types>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        self.call(pb::Kind::PreVote, &request, option.soft_ttl()).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        option: RPCOption,
    ) -> Result<SnapshotResponse<Types>, StreamingError<Types>> {
        tokio::select! {
            closed = cancel => Err(StreamingError::Closed(closed)),
            sent = snapshots::send(self, vote, snapshot.snapshot, option.soft_ttl()) => sent,
        }
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<Types>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<Types>, RPCError<Types>> {
        self.call(pb::Kind::TransferLeader, &request, option.soft_ttl()).await
    }
}
