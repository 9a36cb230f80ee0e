//! The answering side: accepts links and snapshots and hands them to the groups of this node.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::RwLock;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::{Body, Service, StdError, http};
use tonic::server::NamedService;
use tonic::{Request, Response, Status, Streaming};

use super::pb::peer_server::{Peer, PeerServer};
use super::{BATCH, Caller, MESSAGE_BYTES_AIM, MESSAGE_BYTES_MAX, PROTOCOL, Port, at_once, gather, pb, snapshots};
use crate::generation::Generation;
use crate::ids::{GroupId, RaftNodeId};
use crate::versions::{Span, StateVersions};

/// How long a caller may take to say who it is.
const HELLO_DEADLINE: Duration = Duration::from_secs(5);
/// How long a snapshot waits for others that are received.
const SLOT_DEADLINE: Duration = Duration::from_secs(5);

/// The groups of this node, as peers reach them.
pub(crate) struct Ports {
    pub(crate) node: RaftNodeId,
    generation: Arc<Generation>,
    /// What this build does with states and entries.
    state: StateVersions,
    groups: RwLock<BTreeMap<GroupId, Arc<dyn Port>>>,
    closed: watch::Sender<bool>,
    /// Whether this node wants no leadership: every message to a peer says so.
    draining: AtomicBool,
}

impl Ports {
    pub(crate) fn new(node: RaftNodeId, generation: Arc<Generation>, state: StateVersions) -> Arc<Self> {
        let (groups, closed) = (RwLock::new(BTreeMap::new()), watch::Sender::new(false));
        Arc::new(Self { node, generation, state, groups, closed, draining: AtomicBool::new(false) })
    }

    pub(crate) fn set_draining(&self, draining: bool) {
        self.draining.store(draining, Ordering::SeqCst);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Adds a group; `false` when there is one of this name.
    pub(crate) fn add(&self, group: GroupId, port: Arc<dyn Port>) -> bool {
        let mut groups = self.groups.write();
        let free = !groups.contains_key(&group);
        if free {
            groups.insert(group, port);
        }
        free
    }

    pub(crate) fn contains(&self, group: GroupId) -> bool {
        self.groups.read().contains_key(&group)
    }

    pub(crate) fn all(&self) -> Vec<Arc<dyn Port>> {
        self.groups.read().values().cloned().collect()
    }

    /// Whether the groups were taken away.
    pub(crate) fn closed(&self) -> watch::Receiver<bool> {
        self.closed.subscribe()
    }

    /// Takes all groups away and ends all links.
    pub(crate) fn close(&self) -> Vec<Arc<dyn Port>> {
        self.closed.send_replace(true);
        std::mem::take(&mut *self.groups.write()).into_values().collect()
    }

    pub(crate) fn get(&self, group: GroupId) -> Option<Arc<dyn Port>> {
        self.groups.read().get(&group).cloned()
    }

    /// Whether this caller is to be answered; in which protocol version.
    fn check(&self, caller: Caller, proved: Option<ProvedPeer>) -> Result<u32, pb::Refusal> {
        let Some(spoken) = PROTOCOL.common(caller.protocol) else {
            return Err(pb::Refusal::versions(pb::Reason::Protocol, PROTOCOL, caller.protocol));
        };
        if let Some(ProvedPeer(proved)) = proved
            && proved.0 != caller.from
        {
            return Err(pb::Refusal::mismatch(pb::Reason::WrongCaller, proved.0, caller.from));
        }
        if caller.to != self.node.0 {
            return Err(pb::Refusal::mismatch(pb::Reason::WrongNode, self.node.0, caller.to));
        }
        if let Some(theirs) = caller.state {
            // Either may lead, and what it proposes is applied by the other.
            if !self.state.reads.has(theirs.proposes) {
                return Err(pb::Refusal::versions(pb::Reason::State, self.state.reads, Span::only(theirs.proposes)));
            }
            if !theirs.reads.has(self.state.proposes) {
                return Err(pb::Refusal::versions(
                    pb::Reason::StateProposed,
                    Span::only(self.state.proposes),
                    theirs.reads,
                ));
            }
        }
        if !self.generation.accepts(caller.generation, || self.is_blank()) {
            let own = self.generation.get();
            return Err(pb::Refusal::mismatch(pb::Reason::Generation, own.into(), caller.generation.into()));
        }
        Ok(spoken)
    }

    /// Whether this node hosts groups, and none of them was ever formed.
    fn is_blank(&self) -> bool {
        let groups = self.groups.read();
        !groups.is_empty() && groups.values().all(|port| port.is_blank())
    }
}

/// The node that a caller proved to be. A server that knows puts it into the extensions of each request; without it callers are taken by
/// their word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProvedPeer(pub RaftNodeId);

/// The service through which other nodes reach this one, to be mounted on its gRPC server.
#[derive(Clone)]
pub struct RaftService(PeerServer<PeerService>);

impl RaftService {
    pub(crate) fn new(service: PeerService) -> Self {
        let server = PeerServer::new(service);
        Self(server.max_decoding_message_size(MESSAGE_BYTES_MAX).max_encoding_message_size(MESSAGE_BYTES_MAX))
    }
}

impl std::fmt::Debug for RaftService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RaftService")
    }
}

impl NamedService for RaftService {
    const NAME: &'static str = <PeerServer<PeerService> as NamedService>::NAME;
}

impl<B> Service<http::Request<B>> for RaftService
where
    B: Body + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<http::Request<B>>::poll_ready(&mut self.0, context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        self.0.call(request)
    }
}

/// What stands behind it.
#[derive(Clone)]
pub(crate) struct PeerService {
    ports: Arc<Ports>,
    receiving: Arc<Semaphore>,
}

impl PeerService {
    pub(crate) fn new(ports: Arc<Ports>) -> Self {
        Self { ports, receiving: Arc::new(Semaphore::new(snapshots::AT_ONCE)) }
    }

    /// The group that a snapshot is for.
    fn port(&self, start: &pb::SnapshotStart, proved: Option<ProvedPeer>) -> Result<Arc<dyn Port>, pb::Refusal> {
        self.ports.check(start.into(), proved)?;
        self.ports.get(GroupId(start.group)).ok_or_else(|| pb::Refusal::new(pb::Reason::NoSuchGroup))
    }
}

#[tonic::async_trait]
impl Peer for PeerService {
    type LinkStream = ReceiverStream<Result<pb::FromPeer, Status>>;

    async fn link(&self, request: Request<Streaming<pb::ToPeer>>) -> Result<Response<Self::LinkStream>, Status> {
        let (out, stream) = mpsc::channel(8);
        let ports = Arc::clone(&self.ports);
        let mut closed = ports.closed.subscribe();
        let proved = request.extensions().get().copied();
        tokio::spawn(async move {
            tokio::select! {
                () = serve(ports, proved, request.into_inner(), out) => {}
                _ = closed.wait_for(|closed| *closed) => {}
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn ask_snapshot(&self, request: Request<pb::SnapshotStart>) -> Result<Response<pb::SnapshotHave>, Status> {
        let (proved, start) = (request.extensions().get().copied(), request.into_inner());
        let refused = |refusal| pb::SnapshotHave { refusal: Some(refusal), ..Default::default() };
        let have = match self.port(&start, proved) {
            Err(refusal) => refused(refusal),
            Ok(port) => match snapshots::arrived(&*port, &start).await {
                Ok(offset) => pb::SnapshotHave { offset, refusal: None },
                Err(reason) => refused(pb::Refusal::new(reason)),
            },
        };
        Ok(Response::new(have))
    }

    async fn send_snapshot(
        &self,
        request: Request<Streaming<pb::SnapshotPart>>,
    ) -> Result<Response<pb::SnapshotAnswer>, Status> {
        let proved = request.extensions().get().copied();
        let mut parts = request.into_inner();
        let first = timeout(HELLO_DEADLINE, parts.message())
            .await
            .map_err(|_| Status::deadline_exceeded("no start of a snapshot"))??;
        let Some(start) = first.and_then(|part| part.start) else {
            return Err(Status::invalid_argument("a snapshot begins with its start"));
        };
        let refused = |refusal| Response::new(pb::SnapshotAnswer { refusal: Some(refusal), ..Default::default() });
        let port = match self.port(&start, proved) {
            Ok(port) => port,
            Err(refusal) => return Ok(refused(refusal)),
        };
        // One whose connection broke may not have noticed yet.
        let Ok(Ok(_slot)) = timeout(SLOT_DEADLINE, self.receiving.acquire()).await else {
            return Ok(refused(pb::Refusal::new(pb::Reason::Busy)));
        };
        Ok(match snapshots::receive(&*port, start, parts).await {
            Ok(body) => Response::new(pb::SnapshotAnswer { body, refusal: None }),
            Err(reason) => refused(pb::Refusal::new(reason)),
        })
    }
}

async fn serve(
    ports: Arc<Ports>,
    proved: Option<ProvedPeer>,
    mut inbound: Streaming<pb::ToPeer>,
    out: mpsc::Sender<Result<pb::FromPeer, Status>>,
) {
    let Ok(Ok(Some(pb::ToPeer { hello: Some(hello), .. }))) = timeout(HELLO_DEADLINE, inbound.message()).await else {
        return;
    };
    let greeting = match ports.check((&hello).into(), proved) {
        Ok(protocol) => {
            let welcome = pb::Welcome { protocol, node: ports.node.0 };
            pb::FromPeer { welcome: Some(welcome), draining: ports.is_draining(), ..Default::default() }
        }
        Err(refusal) => pb::FromPeer { refusal: Some(refusal), ..Default::default() },
    };
    let refused = greeting.refusal.is_some();
    if out.send(Ok(greeting)).await.is_err() || refused {
        return;
    }
    // Bounded by what the peer's groups keep on their way at once.
    let (answers, waiting) = mpsc::unbounded_channel();
    let writing = tokio::spawn(write(Arc::clone(&ports), waiting, out));
    while let Ok(Some(message)) = inbound.message().await {
        for call in message.calls {
            dispatch(&ports, call, &answers);
        }
    }
    writing.abort();
}

/// Answers go out together when several are ready.
async fn write(
    ports: Arc<Ports>,
    mut answers: mpsc::UnboundedReceiver<pb::Answer>,
    out: mpsc::Sender<Result<pb::FromPeer, Status>>,
) {
    let mut batch = Vec::new();
    while answers.recv_many(&mut batch, BATCH).await > 0 {
        gather(&mut batch, || answers.try_recv().ok()).await;
        let mut rest = batch.drain(..).peekable();
        while rest.peek().is_some() {
            let mut bytes = 0;
            let mut message = pb::FromPeer { draining: ports.is_draining(), ..Default::default() };
            while bytes < MESSAGE_BYTES_AIM
                && let Some(answer) = rest.next()
            {
                bytes += answer.body.len();
                message.answers.push(answer);
            }
            if out.send(Ok(message)).await.is_err() {
                return;
            }
        }
    }
}

/// Hands a call to its group; the answer goes out when it is there.
pub(crate) fn dispatch(ports: &Ports, call: pb::Call, answers: &mpsc::UnboundedSender<pb::Answer>) {
    let answer = {
        let id = call.id;
        move |result: Result<bytes::Bytes, pb::Reason>| match result {
            Ok(body) => pb::Answer { id, body, refusal: None },
            Err(reason) => pb::Answer { id, body: bytes::Bytes::new(), refusal: Some(pb::Refusal::new(reason)) },
        }
    };
    let Some(port) = ports.get(GroupId(call.group)) else {
        drop(answers.send(answer(Err(pb::Reason::NoSuchGroup))));
        return;
    };
    let mut working = port.call(call.kind(), call.body);
    // Polled once here, so that calls reach their group in the order in which they came; a caller that went away
    // needs no answer.
    match at_once(&mut working) {
        Some(result) => drop(answers.send(answer(result))),
        None => {
            let answers = answers.clone();
            tokio::spawn(async move { drop(answers.send(answer(working.await))) });
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::super::Boxed;
    use super::*;
    use crate::store::snapshot::{SnapshotFile, Snapshots};
    use crate::types::Vote;

    const STATE: StateVersions = StateVersions { reads: Span { since: 3, until: 6 }, proposes: 4 };

    fn ports() -> Arc<Ports> {
        Ports::new(RaftNodeId(3), Generation::of_memory(1), STATE)
    }

    fn caller() -> Caller {
        Caller { protocol: PROTOCOL, state: Some(STATE), from: 1, to: 3, generation: 1 }
    }

    #[test]
    fn a_caller_is_answered_in_the_newest_version_that_both_speak_and_refused_with_both_sides_named_if_there_is_none() {
        let (ports, newest) = (ports(), PROTOCOL.until - 1);
        let speaking = |since, until| ports.check(Caller { protocol: Span { since, until }, ..caller() }, None);
        assert_eq!(speaking(newest, newest + 1), Ok(newest));
        assert_eq!(speaking(newest, newest + 9), Ok(newest));
        let other = speaking(newest + 1, newest + 3).unwrap_err();
        assert_eq!(
            (other.reason(), other.expected, other.found),
            (pb::Reason::Protocol, newest.into(), u64::from(newest) + 2)
        );
        let text = format!("protocol {PROTOCOL}, this node {} to {}", newest + 1, newest + 2);
        assert!(other.explain().contains(&text), "{}", other.explain());
    }

    #[test]
    fn a_caller_is_refused_unless_each_side_reads_what_the_other_proposes_and_is_told_which_build_comes_first() {
        let ports = ports();
        let keeping = |state| ports.check(Caller { state, ..caller() }, None);
        let build = |since, until, proposes| Some(StateVersions { reads: Span { since, until }, proposes });
        for known in [None, Some(StateVersions::only(4)), build(4, 8, 4), build(4, 8, 5), build(1, 5, 3)] {
            assert!(keeping(known).is_ok(), "{known:?}");
        }
        for (unknown, reason, text) in [
            // Versions in common are not enough.
            (
                build(4, 8, 6),
                pb::Reason::State,
                "reads states and entries of version 3 to 5, and this node proposes 6:",
            ),
            (
                build(1, 5, 2),
                pb::Reason::State,
                "reads states and entries of version 3 to 5, and this node proposes 2:",
            ),
            (build(3, 4, 3), pb::Reason::StateProposed, "proposes entries of version 4, and this node reads 3:"),
            (build(5, 8, 5), pb::Reason::StateProposed, "proposes entries of version 4, and this node reads 5 to 7:"),
        ] {
            let refusal = keeping(unknown).unwrap_err();
            assert_eq!(refusal.reason(), reason, "{unknown:?}");
            assert!(refusal.explain().contains(text), "{}", refusal.explain());
        }
        let first = |state| keeping(state).unwrap_err().explain();
        assert!(first(build(4, 8, 6)).ends_with("first give every meta node a build that reads 6, then this one"));
        assert!(first(build(3, 4, 3)).ends_with("give this node a build that reads 4"));
    }

    #[test]
    fn a_build_that_does_not_say_what_it_proposes_proposes_the_newest_that_it_reads() {
        let reads = Some(pb::Span { since: 4, until: 6 });
        let hello = pb::Hello { state: reads, ..Default::default() };
        let of = |hello: &pb::Hello| Caller::from(hello).state.unwrap();
        assert_eq!(of(&hello), StateVersions { reads: Span { since: 4, until: 6 }, proposes: 5 });
        let hello = pb::Hello { state_proposed: 4, ..hello };
        assert_eq!(of(&hello).proposes, 4);
        let start = pb::SnapshotStart { state: reads, state_proposed: 4, ..Default::default() };
        assert_eq!(Caller::from(&start).state, Caller::from(&hello).state);
    }

    #[test]
    fn builds_that_name_one_version_and_no_state_are_understood() {
        let newest = PROTOCOL.until - 1;
        let hello = pb::Hello { protocol: newest, from: 1, to: 3, generation: 1, ..Default::default() };
        assert_eq!(ports().check((&hello).into(), None), Ok(newest));
        let nothing = pb::Hello { from: 1, to: 3, generation: 1, ..Default::default() };
        assert_eq!(ports().check((&nothing).into(), None).unwrap_err().reason(), pb::Reason::Protocol);
        let start = pb::SnapshotStart { protocol: newest, from: 1, to: 3, generation: 1, ..Default::default() };
        assert_eq!(Caller::from(&start), Caller::from(&hello));
    }

    #[test]
    fn a_caller_for_another_node_is_refused_with_both_sides_named() {
        let other = ports().check(Caller { to: 4, ..caller() }, None).unwrap_err();
        assert_eq!((other.reason(), other.expected, other.found), (pb::Reason::WrongNode, 3, 4));
    }

    #[test]
    fn a_caller_that_proved_to_be_one_node_cannot_speak_as_another() {
        let (ports, proved) = (ports(), Some(ProvedPeer(RaftNodeId(1))));
        assert!(ports.check(caller(), proved).is_ok());
        let other = ports.check(Caller { from: 2, ..caller() }, proved).unwrap_err();
        assert_eq!((other.reason(), other.expected, other.found), (pb::Reason::WrongCaller, 1, 2));
    }

    #[test]
    fn a_caller_of_another_generation_is_refused_with_both_sides_named() {
        for (own, found) in [(1, 2), (2, 1)] {
            let ports = Ports::new(RaftNodeId(3), Generation::of_memory(own), STATE);
            let other = ports.check(Caller { generation: found, ..caller() }, None).unwrap_err();
            assert_eq!(
                (other.reason(), other.expected, other.found),
                (pb::Reason::Generation, own.into(), found.into())
            );
        }
    }

    /// A group that hands its calls on in turn, as a group does; each body is one call's number.
    struct Handing(mpsc::Sender<Bytes>);

    impl Port for Handing {
        fn call(&self, _kind: pb::Kind, body: Bytes) -> Boxed<Result<Bytes, pb::Reason>> {
            let on = self.0.clone();
            Box::pin(async move {
                on.send(body).await.map_err(|_| pb::Reason::Stopped)?;
                std::future::pending().await
            })
        }

        fn pulse(&self) {}

        fn snapshots(&self) -> Arc<Snapshots> {
            unreachable!("nobody asks for snapshots here")
        }

        fn install(&self, _: Vote, _: SnapshotFile) -> Boxed<Result<Bytes, pb::Reason>> {
            unreachable!("nobody installs one here")
        }

        fn is_blank(&self) -> bool {
            true
        }

        fn stop(&self) -> Boxed<()> {
            Box::pin(async {})
        }
    }

    #[tokio::test]
    async fn all_calls_of_a_long_message_reach_their_groups_at_once_and_in_order() {
        let (ports, (on, mut handed)) = (ports(), mpsc::channel(1_000));
        let (answers, _waiting) = mpsc::unbounded_channel();
        assert!(ports.add(GroupId(1), Arc::new(Handing(on))));
        for id in 0..500_u64 {
            let body = Bytes::copy_from_slice(&id.to_le_bytes());
            dispatch(&ports, pb::Call { id, group: 1, kind: pb::Kind::Append.into(), body }, &answers);
        }
        // Nothing waited in between: what was put off to a task of its own is not there yet.
        assert_eq!(handed.len(), 500);
        for id in 0..500_u64 {
            assert_eq!(handed.recv().await.unwrap(), &id.to_le_bytes()[..]);
        }
    }
}
