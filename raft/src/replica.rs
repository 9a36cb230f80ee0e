//! A machine under openraft's hands: applies committed entries, freezes snapshots, restores them.
//! Keeps *State and index together*: whoever holds the lock sees a machine and the index it has applied, never one
//! without the other.

use std::io;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use openraft::storage::{EntryResponder, RaftStateMachine};
use openraft::{EntryPayload, OptionalSend, RaftSnapshotBuilder};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{oneshot, watch};

use crate::ids::LogIndex;
use crate::machine::{Machine, SnapshotWriter};
use crate::store::snapshot::{SnapshotFile, Snapshots};
use crate::types::{LogId, Reply, Snapshot, SnapshotMeta, StoredMembership, Types, term_of};

/// A machine that readers share with the replica that drives it.
pub(crate) struct Cell<M> {
    state: RwLock<State<M>>,
    /// The index of the last applied entry, for those who wait for one.
    applied: watch::Sender<u64>,
}

struct State<M> {
    machine: M,
    applied: Option<LogId>,
    members: StoredMembership,
    /// The first entry of the newest term that was applied here: that term's leader's own blank entry.
    term_began: Option<LogId>,
    /// Who waits for the state at an index.
    awaited: Vec<(u64, oneshot::Sender<Moment>)>,
}

/// A frozen state and the entry that led to it.
pub(crate) struct Moment {
    pub(crate) last: Option<LogId>,
    pub(crate) state: Box<dyn SnapshotWriter>,
}

impl<M: Machine> Cell<M> {
    pub(crate) fn new(machine: M) -> Arc<Self> {
        let state = State {
            machine,
            applied: None,
            members: StoredMembership::default(),
            term_began: None,
            awaited: Vec::new(),
        };
        Arc::new(Self { state: RwLock::new(state), applied: watch::Sender::new(0) })
    }

    pub(crate) fn with<R>(&self, read: impl FnOnce(&M, LogIndex) -> R) -> R {
        let state = self.state.read();
        read(&state.machine, LogIndex(state.applied.as_ref().map_or(0, LogId::index)))
    }

    /// Where the entries of `term` begin, once the first of them was applied.
    pub(crate) fn term_began(&self, term: u64) -> Option<LogIndex> {
        // Recursive: the status is also asked for by those who are reading the machine.
        let began = self.state.read_recursive().term_began?;
        (term_of(&began) == term).then(|| LogIndex(began.index()))
    }

    /// The state as it is now.
    pub(crate) fn freeze(&self) -> Moment {
        self.state.read().freeze()
    }

    /// The state as it is when the entry at `index` was applied, or now if that was before.
    pub(crate) fn freeze_at(&self, index: u64) -> oneshot::Receiver<Moment> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.state.write();
        state.awaited.retain(|(_, waiting)| !waiting.is_closed());
        state.awaited.push((index, sender));
        state.serve_awaited();
        receiver
    }

    pub(crate) fn watch_applied(&self) -> watch::Receiver<u64> {
        self.applied.subscribe()
    }
}

impl<M: Machine> State<M> {
    fn advance(&mut self, to: LogId) {
        if self.term_began.as_ref().map(term_of) != Some(term_of(&to)) {
            self.term_began = Some(to);
        }
        self.applied = Some(to);
        if !self.awaited.is_empty() {
            self.serve_awaited();
        }
    }

    fn freeze(&self) -> Moment {
        Moment { last: self.applied, state: self.machine.snapshot() }
    }

    fn serve_awaited(&mut self) {
        let applied = self.applied.as_ref().map_or(0, LogId::index);
        let (due, rest) = std::mem::take(&mut self.awaited).into_iter().partition(|(index, _)| *index <= applied);
        self.awaited = rest;
        for (_, waiting) in due {
            // Whoever asked may have gone.
            drop(waiting.send(self.freeze()));
        }
    }
}

/// The side of a [`Cell`] that openraft drives.
pub(crate) struct Replica<M> {
    cell: Arc<Cell<M>>,
    snapshots: Arc<Snapshots>,
}

impl<M: Machine> Replica<M> {
    pub(crate) fn new(cell: Arc<Cell<M>>, snapshots: Arc<Snapshots>) -> Self {
        Self { cell, snapshots }
    }
}

impl<M: Machine> RaftStateMachine<Types> for Replica<M> {
    type SnapshotData = SnapshotFile;
    type SnapshotBuilder = Builder;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        let state = self.cell.state.read();
        Ok((state.applied, state.members.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> Result<(), io::Error>
    where
        S: Stream<Item = Result<EntryResponder<Types>, io::Error>> + Unpin + OptionalSend,
    {
        while let Some(item) = entries.next().await {
            let (entry, responder) = item?;
            let reply = {
                let mut state = self.cell.state.write();
                let reply = match &entry.payload {
                    EntryPayload::Normal(command) => {
                        Reply::new(state.machine.apply(LogIndex(entry.log_id.index()), &command.0))
                    }
                    EntryPayload::Membership(members) => {
                        state.members = StoredMembership::new(Some(entry.log_id), members.clone());
                        Reply::default()
                    }
                    EntryPayload::Blank => Reply::default(),
                };
                state.advance(entry.log_id);
                reply
            };
            self.cell.applied.send_replace(entry.log_id.index());
            if let Some(responder) = responder {
                responder.send(reply);
            }
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Builder {
        let state = self.cell.state.read();
        Builder {
            snapshots: Arc::clone(&self.snapshots),
            last: state.applied,
            members: state.members.clone(),
            frozen: Mutex::new(Some(state.machine.snapshot())),
        }
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, snapshot: SnapshotFile) -> Result<(), io::Error> {
        let (cell, snapshots, meta) = (Arc::clone(&self.cell), Arc::clone(&self.snapshots), meta.clone());
        blocking(move || {
            // In place first: once the machine is restored, the log before it may be dropped.
            let snapshot = snapshots.adopt(snapshot)?;
            // Beside the old state, which may still be read while the new one comes in; nothing is applied meanwhile.
            let mut machine = cell.state.read().machine.clone();
            machine.restore(&mut snapshot.state()?)?;
            let old = {
                let mut state = cell.state.write();
                let old = std::mem::replace(&mut state.machine, machine);
                state.members = meta.last_membership;
                if let Some(last) = meta.last_log_id {
                    state.advance(last);
                    cell.applied.send_replace(last.index());
                }
                old
            };
            // A large state takes a while to be freed: nobody waits for it.
            drop(old);
            Ok(())
        })
        .await
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot>, io::Error> {
        let snapshots = Arc::clone(&self.snapshots);
        let current = blocking(move || snapshots.current()).await?;
        Ok(current.map(|file| Snapshot { meta: file.meta().clone(), snapshot: file }))
    }
}

/// Writes one frozen state to a file.
pub(crate) struct Builder {
    snapshots: Arc<Snapshots>,
    last: Option<LogId>,
    members: StoredMembership,
    frozen: Mutex<Option<Box<dyn SnapshotWriter>>>,
}

impl RaftSnapshotBuilder<Types> for Builder {
    type SnapshotData = SnapshotFile;

    async fn build_snapshot(&mut self) -> Result<Snapshot, io::Error> {
        let frozen = self.frozen.get_mut().take().ok_or_else(|| io::Error::other("this state was written already"))?;
        let (snapshots, last, members) = (Arc::clone(&self.snapshots), self.last, self.members.clone());
        let file = blocking(move || snapshots.write(last.as_ref(), &members, frozen)).await?;
        Ok(Snapshot { meta: file.meta().clone(), snapshot: file })
    }
}

/// Runs work that blocks on a thread that may.
pub(crate) async fn blocking<R: Send + 'static>(
    work: impl FnOnce() -> io::Result<R> + Send + 'static,
) -> io::Result<R> {
    #[cfg(feature = "sim")]
    if crate::sim::is_here() {
        // Another thread would come back at a moment of its own.
        return work();
    }
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}
