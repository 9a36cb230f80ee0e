//! A group as its peers reach it: their calls, their snapshots, the pulse that tells them who leads, and has followers succeed a leader that tells
//! nothing.
//! Decides nothing: hands on to openraft what comes, and answers what it says.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::raft::{AppendEntriesRequest, TransferLeaderRequest, VoteRequest};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::Instant;

use crate::config::Timing;
use crate::group::Node;
use crate::ids::GroupId;
use crate::machine::Machine;
use crate::store::snapshot::{SnapshotFile, Snapshots};
use crate::succession::{stands_after, turn};
use crate::transport::{Boxed, Port, at_once, decode, encode, pb};
use crate::types::{Metrics, Snapshot, Types, Vote};

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

    /// How long ago a leader spoke, if one did since the group was started.
    fn last(&self) -> Option<Duration> {
        self.times.lock().1.map(|last| last.elapsed())
    }
}

/// What peers reach of a group.
pub(crate) struct GroupPort<M: Machine> {
    pub(crate) raft: Node<M>,
    pub(crate) snapshots: Arc<Snapshots>,
    pub(crate) heard: Heard,
    pub(crate) group: GroupId,
    pub(crate) timing: Timing,
    /// Whether this node stands for election by itself.
    pub(crate) stands: Arc<AtomicBool>,
    /// When it last stood because its turn had come.
    pub(crate) stood: Mutex<Option<Instant>>,
}

impl<M: Machine> GroupPort<M> {
    /// Stands for election if this node's leader fell silent and it is its turn to succeed.
    fn succeed(&self, metrics: &Metrics, silence: Duration) {
        if silence <= self.timing.election_max || !self.stands.load(Ordering::SeqCst) {
            return;
        }
        // Without a leader there is an election already.
        let Some(leader) = metrics.current_leader else { return };
        let voters = metrics.membership_config.membership().voter_ids();
        let Some(turn) = turn(self.group, voters, leader, metrics.id) else { return };
        let mut stood = self.stood.lock();
        if silence >= stands_after(self.timing, turn)
            && stood.is_none_or(|before| before.elapsed() >= self.timing.election_min)
        {
            *stood = Some(Instant::now());
            if let Some(Err(fatal)) = at_once(self.raft.trigger().elect(true)) {
                tracing::debug!(%fatal, "no election");
            }
        }
    }
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
        let metrics = self.raft.metrics();
        let leads = metrics.borrow_watched().state == openraft::ServerState::Leader;
        if !leads {
            let silence = self.heard.last();
            // A follower whose leader spoke lately has no need to look at its election timer.
            self.raft.runtime_config().tick(silence.is_none_or(|silence| silence >= self.timing.election_min / 2));
            if let Some(silence) = silence {
                self.succeed(&metrics.borrow_watched(), silence);
            }
            return;
        }
        self.raft.runtime_config().tick(false);
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
