//! A group as its peers reach it: their calls, their snapshots, the pulse that tells them who leads.
//! Decides nothing: hands on to openraft what comes, and answers what it says.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::raft::{AppendEntriesRequest, TransferLeaderRequest, VoteRequest};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::Instant;

use crate::group::Node;
use crate::machine::Machine;
use crate::store::snapshot::{SnapshotFile, Snapshots};
use crate::transport::{Boxed, Port, at_once, decode, encode, pb};
use crate::types::{Snapshot, Types, Vote};

/// When a leader was last heard here.
#[derive(Clone)]
pub(crate) struct Heard {
    /// When the group was started, and the last append.
    times: Arc<Mutex<(Instant, Option<Instant>)>>,
}

impl Heard {
    /// Nobody was heard yet.
    pub(crate) fn nobody() -> Self {
        Self { times: Arc::new(Mutex::new((Instant::now(), None))) }
    }

    fn now(&self) {
        self.times.lock().1 = Some(Instant::now());
    }

    pub(crate) fn silence(&self) -> Duration {
        let (start, last) = *self.times.lock();
        last.unwrap_or(start).elapsed()
    }

    fn within(&self, time: Duration) -> bool {
        self.times.lock().1.is_some_and(|last| last.elapsed() < time)
    }
}

/// What peers reach of a group.
pub(crate) struct GroupPort<M: Machine> {
    pub(crate) raft: Node<M>,
    pub(crate) snapshots: Arc<Snapshots>,
    pub(crate) heard: Heard,
    /// A follower whose leader was silent for less has no need to look at its election timer.
    pub(crate) at_ease: Duration,
}

impl<M: Machine> Port for GroupPort<M> {
    fn call(&self, kind: pb::Kind, body: Bytes) -> Boxed<Result<Bytes, pb::Reason>> {
        fn answer<T: Serialize, E>(answer: Result<T, E>) -> Result<Bytes, pb::Reason> {
            encode(&answer.map_err(|_| pb::Reason::Stopped)?).map_err(|_| pb::Reason::Malformed)
        }
        let raft = self.raft.clone();
        if kind == pb::Kind::Append {
            self.heard.now();
        }
        Box::pin(async move {
            let malformed = |_| pb::Reason::Malformed;
            match kind {
                pb::Kind::Append => {
                    let request: AppendEntriesRequest<Types> = decode(&body).map_err(malformed)?;
                    answer(raft.append_entries(request).await)
                }
                pb::Kind::Vote => {
                    let request: VoteRequest<Types> = decode(&body).map_err(malformed)?;
                    answer(raft.vote(request).await)
                }
                pb::Kind::PreVote => {
                    let request: VoteRequest<Types> = decode(&body).map_err(malformed)?;
                    answer(raft.pre_vote(request).await)
                }
                pb::Kind::TransferLeader => {
                    let request: TransferLeaderRequest<Types> = decode(&body).map_err(malformed)?;
                    answer(raft.handle_transfer_leader(request).await)
                }
                pb::Kind::Unspecified => Err(pb::Reason::Malformed),
            }
        })
    }

    fn pulse(&self) {
        let leads = self.raft.metrics().borrow_watched().state == openraft::ServerState::Leader;
        self.raft.runtime_config().tick(!leads && !self.heard.within(self.at_ease));
        if !leads {
            return;
        }
        // A group that is too busy to take it in sends entries, which say the same.
        if let Some(Err(fatal)) = at_once(self.raft.trigger().heartbeat()) {
            tracing::debug!(%fatal, "no heartbeat");
        }
    }

    fn snapshots(&self) -> Arc<Snapshots> {
        Arc::clone(&self.snapshots)
    }

    fn install(&self, vote: Vote, snapshot: SnapshotFile) -> Boxed<Result<Bytes, pb::Reason>> {
        let raft = self.raft.clone();
        Box::pin(async move {
            let snapshot = Snapshot { meta: snapshot.meta().clone(), snapshot };
            let installed = raft.install_full_snapshot(vote, snapshot).await.map_err(|_| pb::Reason::Stopped)?;
            encode(&installed).map_err(|_| pb::Reason::Malformed)
        })
    }

    fn is_blank(&self) -> bool {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        metrics.last_log_index.is_none() && metrics.membership_config.log_id().is_none()
    }

    fn stop(&self) -> Boxed<()> {
        let raft = self.raft.clone();
        Box::pin(async move {
            if let Err(error) = raft.shutdown().await {
                tracing::warn!(%error, "a group ended by itself");
            }
        })
    }
}
