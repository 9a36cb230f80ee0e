//! The wire between hosts in a simulated world: calls are late, lost on the way there or back, or cut off by partitions. What one
//! host says to another arrives in order, as on the one connection that they have.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};

use super::{between, chance, note};
use crate::ids::{GroupId, RaftNodeId};
use crate::store::snapshot::SnapshotFile;
use crate::transport::link::{LinkError, Outgoing, settle};
use crate::transport::pb;
use crate::transport::service::{Ports, dispatch};
use crate::types::Vote;

/// How the wire is.
#[derive(Debug, Clone, Copy)]
pub struct Weather {
    /// The shortest way.
    pub least: Duration,
    /// The longest way.
    pub most: Duration,
    /// Of a thousand requests, and of a thousand answers, so many are lost.
    pub lost_per_mille: u64,
}

impl Default for Weather {
    fn default() -> Self {
        Self { least: Duration::from_micros(500), most: Duration::from_millis(10), lost_per_mille: 0 }
    }
}

#[derive(Default)]
struct State {
    weather: Weather,
    hosts: BTreeMap<RaftNodeId, Arc<Ports>>,
    /// Ordered pairs between which nothing passes.
    cut: BTreeSet<(RaftNodeId, RaftNodeId)>,
}

/// All wires of a world. Cloning shares them.
#[derive(Clone, Default)]
pub struct Net(Arc<Mutex<State>>);

impl std::fmt::Debug for Net {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Net").field("cut", &self.0.lock().cut).finish_non_exhaustive()
    }
}

impl Net {
    /// Changes how the wires are.
    pub fn set(&self, weather: Weather) {
        self.0.lock().weather = weather;
    }

    /// Lets nothing pass any more from one host to another.
    pub fn cut(&self, from: RaftNodeId, to: RaftNodeId) {
        self.0.lock().cut.insert((from, to));
    }

    /// Lets everything pass again.
    pub fn heal(&self) {
        self.0.lock().cut.clear();
    }

    /// Whether what `from` says now would reach `to`.
    #[must_use]
    pub fn passes(&self, from: RaftNodeId, to: RaftNodeId) -> bool {
        !self.0.lock().cut.contains(&(from, to))
    }

    pub(crate) fn join(&self, ports: Arc<Ports>) {
        self.0.lock().hosts.insert(ports.node, ports);
    }

    /// A host crashed: nothing reaches it any more, and what it still says reaches nobody.
    pub fn leave(&self, node: RaftNodeId) {
        self.0.lock().hosts.remove(&node);
    }

    /// How long a message takes on its way, or that it is lost.
    fn way(&self, from: RaftNodeId, to: RaftNodeId) -> Option<Duration> {
        let Weather { least, most, lost_per_mille } = self.0.lock().weather;
        let takes = between(least, most);
        (self.passes(from, to) && !chance(lost_per_mille)).then_some(takes)
    }

    fn host(&self, node: RaftNodeId) -> Option<Arc<Ports>> {
        self.0.lock().hosts.get(&node).cloned()
    }

    /// Whether `own` is still the life of its host that the others talk to.
    fn is_alive(&self, own: &Arc<Ports>) -> bool {
        self.host(own.node).is_some_and(|current| Arc::ptr_eq(&current, own))
    }

    /// Sends a whole snapshot and returns the answer.
    pub(crate) async fn send_snapshot(
        &self,
        own: &Arc<Ports>,
        to: RaftNodeId,
        group: GroupId,
        vote: Vote,
        snapshot: &SnapshotFile,
    ) -> Result<Bytes, LinkError> {
        let lost = || LinkError::Broken("the snapshot was lost on its way".to_owned());
        let from = own.node;
        let takes = self.way(from, to).ok_or_else(lost)?;
        sleep(takes * 3).await;
        if !self.is_alive(own) || !self.passes(from, to) {
            return Err(lost());
        }
        let port = self.host(to).and_then(|ports| ports.get(group));
        let port = port.ok_or_else(|| LinkError::Unreachable("no such host".to_owned()))?;
        let aside = port.snapshots().aside();
        let copied = std::fs::copy(snapshot.path(), &aside).and_then(|_| SnapshotFile::open(&aside, group));
        let snapshot = copied.map_err(|error| LinkError::Broken(error.to_string()))?;
        note(format_args!("{from}>{to} snapshot of group {group}, {} bytes", snapshot.length()));
        let answer = port.install(vote, snapshot).await;
        let takes = self.way(to, from).ok_or_else(lost)?;
        sleep(takes).await;
        answer.map_err(|reason| LinkError::Refused(pb::Refusal::new(reason).explain()))
    }

    /// The task behind one link: takes calls until nobody has any.
    pub(crate) async fn carry(self, own: Arc<Ports>, to: RaftNodeId, mut calls: mpsc::Receiver<Outgoing>) {
        let from = own.node;
        let mut there: VecDeque<(Instant, pb::Call)> = VecDeque::new();
        let mut back: VecDeque<(Instant, pb::Answer)> = VecDeque::new();
        let mut waiting = BTreeMap::new();
        let (answers, mut answered) = mpsc::unbounded_channel();
        let mut next_id = 0;
        let in_order = |last: Option<Instant>, takes: Duration| {
            let at = Instant::now() + takes;
            last.map_or(at, |last| last.max(at))
        };
        loop {
            tokio::select! {
                biased;
                () = due(there.front().map(|(at, _)| *at)) => {
                    let Some((_, call)) = there.pop_front() else { continue };
                    // What was on its way when the wire was cut is lost too.
                    let host = self.host(to).filter(|_| self.passes(from, to) && self.is_alive(&own));
                    note(format_args!("{from}>{to} {call} {}", if host.is_some() { "arrives" } else { "is lost" }, call = told(&call)));
                    if let Some(host) = host {
                        dispatch(&host, call, &answers);
                    }
                }
                () = due(back.front().map(|(at, _)| *at)) => {
                    let Some((_, answer)) = back.pop_front() else { continue };
                    if self.passes(to, from) {
                        note(format_args!("{to}>{from} answer {} {:08x}", answer.id, crc32c::crc32c(&answer.body)));
                        settle(&mut waiting, pb::FromPeer { answers: vec![answer], ..Default::default() });
                    }
                }
                Some(answer) = answered.recv() => {
                    if let Some(takes) = self.way(to, from) {
                        back.push_back((in_order(back.back().map(|(at, _)| *at), takes), answer));
                    }
                }
                call = calls.recv() => {
                    let Some(Outgoing { group, kind, body, answer }) = call else { return };
                    next_id += 1;
                    waiting.retain(|_, answer: &mut crate::transport::link::Waiting| !answer.is_closed());
                    waiting.insert(next_id, answer);
                    if let Some(takes) = self.way(from, to) {
                        let call = pb::Call { id: next_id, group: group.0, kind: kind.into(), body };
                        there.push_back((in_order(there.back().map(|(at, _)| *at), takes), call));
                    }
                }
            }
        }
    }
}

fn told(call: &pb::Call) -> String {
    format!("{:?} {} of group {} {:08x}", call.kind(), call.id, call.group, crc32c::crc32c(&call.body))
}

async fn due(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}
