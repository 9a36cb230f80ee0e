//! The calling side of links: one task per peer, which dials, says hello, and multiplexes the calls of all groups.
//! Keeps *Every call ends*: with an answer, its deadline, or the end of the link, whichever comes first.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Streaming, transport};

use super::pb::peer_client::PeerClient;
use super::{BATCH, MESSAGE_BYTES_AIM, MESSAGE_BYTES_MAX, PROTOCOL, gather, pb};
use crate::config::Connect;
#[cfg(feature = "sim")]
use crate::generation::FIRST;
use crate::generation::Generation;
use crate::ids::{GroupId, RaftNodeId};
use crate::versions::{Span, StateVersions};

/// How long dialling and saying hello may take.
const HELLO_DEADLINE: Duration = Duration::from_secs(3);
/// How long a peer may leave a full link unread.
const WRITE_DEADLINE: Duration = Duration::from_secs(5);
/// After a failed dial calls fail at once for this long, doubled each time.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(1);
const QUEUE: usize = 4_096;

/// Why a call has no answer.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("unreachable: {0}")]
    Unreachable(String),
    #[error("the link broke: {0}")]
    Broken(String),
    #[error("refused: {0}")]
    Refused(String),
    #[error("no answer within {0:?}")]
    Deadline(Duration),
}

/// Where the answer to a call goes.
pub(crate) type Waiting = oneshot::Sender<Result<Bytes, LinkError>>;

/// A call that waits to be sent.
pub(crate) struct Outgoing {
    pub(crate) group: GroupId,
    pub(crate) kind: pb::Kind,
    pub(crate) body: Bytes,
    pub(crate) answer: Waiting,
}

/// The way to one peer. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Link {
    addr: String,
    queue: mpsc::Sender<Outgoing>,
}

impl Link {
    /// Queues a call; calls to one peer are sent in the order of this. Await the result for the answer.
    pub(crate) fn call(
        &self,
        group: GroupId,
        kind: pb::Kind,
        body: Bytes,
        limit: Duration,
    ) -> impl Future<Output = Result<Bytes, LinkError>> + Send + use<> {
        let (answer, waiting) = oneshot::channel();
        let queued = self.queue.try_send(Outgoing { group, kind, body, answer });
        async move {
            match queued {
                Ok(()) => {}
                Err(mpsc::error::TrySendError::Full(_)) => {
                    return Err(LinkError::Broken(format!("{QUEUE} calls are waiting already")));
                }
                Err(mpsc::error::TrySendError::Closed(_)) => {
                    return Err(LinkError::Unreachable("this node is shutting down".to_owned()));
                }
            }
            match timeout(limit, waiting).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(_)) => Err(LinkError::Broken("the link ended".to_owned())),
                Err(_) => Err(LinkError::Deadline(limit)),
            }
        }
    }
}

/// All links of a node.
pub(crate) struct Links {
    node: RaftNodeId,
    generation: Arc<Generation>,
    state: StateVersions,
    connect: Connect,
    links: Mutex<HashMap<RaftNodeId, Link>>,
    closed: watch::Sender<bool>,
    /// Peers that said in their last message that they want no leadership.
    draining: Arc<Mutex<BTreeSet<RaftNodeId>>>,
    /// In a simulated world: the wire, and the side of this node that others reach.
    #[cfg(feature = "sim")]
    simulated: Option<(crate::sim::Net, Arc<super::service::Ports>)>,
}

impl Links {
    pub(crate) fn new(
        node: RaftNodeId,
        connect: Connect,
        generation: Arc<Generation>,
        state: StateVersions,
    ) -> Arc<Self> {
        Arc::new(Self {
            node,
            generation,
            state,
            connect,
            links: Mutex::new(HashMap::new()),
            closed: watch::Sender::new(false),
            draining: Arc::default(),
            #[cfg(feature = "sim")]
            simulated: None,
        })
    }

    #[cfg(feature = "sim")]
    pub(crate) fn simulated(connect: Connect, net: crate::sim::Net, own: Arc<super::service::Ports>) -> Arc<Self> {
        Arc::new(Self {
            node: own.node,
            generation: Generation::of_memory(FIRST),
            state: StateVersions::only(1),
            connect,
            links: Mutex::new(HashMap::new()),
            closed: watch::Sender::new(false),
            draining: Arc::default(),
            simulated: Some((net, own)),
        })
    }

    #[cfg(feature = "sim")]
    pub(crate) fn world(&self) -> Option<&(crate::sim::Net, Arc<super::service::Ports>)> {
        self.simulated.as_ref()
    }

    pub(crate) fn node(&self) -> RaftNodeId {
        self.node
    }

    /// Peers that said lately that they want no leadership.
    pub(crate) fn draining(&self) -> BTreeSet<RaftNodeId> {
        self.draining.lock().clone()
    }

    /// The link to a peer; a new one when its address has changed.
    pub(crate) fn to(&self, peer: RaftNodeId, addr: &str) -> Link {
        let mut links = self.links.lock();
        if let Some(link) = links.get(&peer)
            && link.addr == addr
            && !link.queue.is_closed()
        {
            return link.clone();
        }
        let (queue, calls) = mpsc::channel(QUEUE);
        #[cfg(feature = "sim")]
        if let Some((net, own)) = &self.simulated {
            tokio::spawn(net.clone().carry(Arc::clone(own), peer, calls));
            let link = Link { addr: addr.to_owned(), queue };
            links.insert(peer, link.clone());
            return link;
        }
        let driver = Driver {
            node: self.node,
            generation: Arc::clone(&self.generation),
            state: self.state,
            peer,
            addr: addr.to_owned(),
            connect: Arc::clone(&self.connect),
            calls,
            next_id: 1,
            draining: Arc::clone(&self.draining),
        };
        let mut closed = self.closed.subscribe();
        tokio::spawn(async move {
            tokio::select! {
                () = driver.run() => {}
                _ = closed.wait_for(|closed| *closed) => {}
            }
        });
        let link = Link { addr: addr.to_owned(), queue };
        links.insert(peer, link.clone());
        link
    }

    /// What the start of a snapshot says of this node to a peer.
    pub(crate) fn snapshot_start(&self, peer: RaftNodeId) -> pb::SnapshotStart {
        pb::SnapshotStart {
            protocol: PROTOCOL.until - 1,
            protocol_since: PROTOCOL.since,
            state: Some(self.state.reads.into()),
            state_proposed: self.state.proposes,
            from: self.node.0,
            to: peer.0,
            generation: self.generation.get(),
            ..Default::default()
        }
    }

    /// A connection of its own to a peer.
    pub(crate) async fn dial(&self, peer: RaftNodeId, addr: &str) -> Result<PeerClient<Channel>, transport::Error> {
        let channel = (self.connect)(peer, endpoint(addr)?).await?;
        Ok(PeerClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX))
    }

    pub(crate) fn close(&self) {
        self.closed.send_replace(true);
        self.links.lock().clear();
    }
}

/// What an error of the transport comes from: it does not say so itself.
pub(crate) fn deepest(error: &transport::Error) -> String {
    let mut source: &dyn std::error::Error = error;
    while let Some(inner) = source.source() {
        source = inner;
    }
    source.to_string()
}

fn endpoint(addr: &str) -> Result<transport::Endpoint, transport::Error> {
    // A peer that is frozen, or whose machine is gone, answers no pings.
    Ok(transport::Endpoint::from_shared(format!("http://{addr}"))?
        .connect_timeout(HELLO_DEADLINE)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(Duration::from_secs(2))
        .keep_alive_timeout(Duration::from_secs(3))
        .keep_alive_while_idle(true))
}

/// The task behind one link.
struct Driver {
    node: RaftNodeId,
    generation: Arc<Generation>,
    state: StateVersions,
    peer: RaftNodeId,
    addr: String,
    connect: Connect,
    calls: mpsc::Receiver<Outgoing>,
    next_id: u64,
    /// All peers that drain; this link moves its own in and out.
    draining: Arc<Mutex<BTreeSet<RaftNodeId>>>,
}

impl Driver {
    async fn run(mut self) {
        let mut backoff = BACKOFF_MIN;
        // Dials only when there is something to say.
        while let Some(first) = self.calls.recv().await {
            match self.dial().await {
                Ok((out, answers)) => {
                    backoff = BACKOFF_MIN;
                    let error = self.serve(first, out, answers).await;
                    self.hear(false);
                    tracing::debug!(peer = %self.peer, addr = %self.addr, %error, "link ended");
                }
                Err(error) => {
                    tracing::debug!(peer = %self.peer, addr = %self.addr, %error, "link not opened");
                    self.refuse_until(first, &error, Instant::now() + backoff).await;
                    backoff = (backoff * 2).min(BACKOFF_MAX);
                }
            }
        }
    }

    /// Keeps what the peer says of itself.
    fn hear(&self, drains: bool) {
        let mut draining = self.draining.lock();
        if drains {
            draining.insert(self.peer);
        } else {
            draining.remove(&self.peer);
        }
    }

    /// Fails what comes at once, so that callers do not pile up behind a peer that is away.
    async fn refuse_until(&mut self, first: Outgoing, error: &LinkError, until: Instant) {
        let mut next = Some(first);
        while let Some(call) = next {
            drop(call.answer.send(Err(error.clone())));
            next = tokio::time::timeout_at(until, self.calls.recv()).await.unwrap_or_default();
        }
    }

    async fn dial(&self) -> Result<(mpsc::Sender<pb::ToPeer>, Streaming<pb::FromPeer>), LinkError> {
        let unreachable = |error: &dyn std::fmt::Display| LinkError::Unreachable(error.to_string());
        let hello = pb::Hello {
            protocol: PROTOCOL.until - 1,
            protocol_since: PROTOCOL.since,
            state: Some(self.state.reads.into()),
            state_proposed: self.state.proposes,
            from: self.node.0,
            to: self.peer.0,
            generation: self.generation.get(),
        };
        let (out, messages) = mpsc::channel(8);
        out.try_send(pb::ToPeer { hello: Some(hello), calls: Vec::new() }).map_err(|error| unreachable(&error))?;
        let opened = async {
            let endpoint = endpoint(&self.addr).map_err(|error| unreachable(&error))?;
            let channel = (self.connect)(self.peer, endpoint).await.map_err(|error| unreachable(&deepest(&error)))?;
            let mut client = PeerClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
            let answers = client.link(ReceiverStream::new(messages)).await.map_err(|status| unreachable(&status))?;
            let mut answers = answers.into_inner();
            let first = answers.message().await.map_err(|status| unreachable(&status))?;
            match first {
                Some(pb::FromPeer { welcome: Some(welcome), draining, .. })
                    if PROTOCOL.common(Span::only(welcome.protocol)).is_some() && welcome.node == self.peer.0 =>
                {
                    self.hear(draining);
                    Ok(answers)
                }
                Some(pb::FromPeer { refusal: Some(refusal), .. }) => {
                    tracing::warn!(peer = %self.peer, addr = %self.addr, "link refused: {}", refusal.explain());
                    Err(LinkError::Refused(refusal.explain()))
                }
                _ => Err(LinkError::Unreachable("the peer did not answer the hello".to_owned())),
            }
        };
        let answers = timeout(HELLO_DEADLINE, opened)
            .await
            .unwrap_or_else(|_| Err(LinkError::Unreachable(format!("no hello within {HELLO_DEADLINE:?}"))))?;
        Ok((out, answers))
    }

    /// Sends and receives until the link breaks; what was waiting then fails.
    async fn serve(
        &mut self,
        first: Outgoing,
        out: mpsc::Sender<pb::ToPeer>,
        mut answers: Streaming<pb::FromPeer>,
    ) -> LinkError {
        let mut waiting: BTreeMap<u64, Waiting> = BTreeMap::new();
        let mut batch = vec![first];
        let error = loop {
            if batch.is_empty() {
                tokio::select! {
                    count = self.calls.recv_many(&mut batch, BATCH) => {
                        if count == 0 {
                            break LinkError::Broken("this node is shutting down".to_owned());
                        }
                        gather(&mut batch, || self.calls.try_recv().ok()).await;
                    }
                    answer = answers.message() => match answer {
                        Ok(Some(message)) => {
                            self.hear(message.draining);
                            settle(&mut waiting, message);
                        }
                        Ok(None) => break LinkError::Broken("closed by the peer".to_owned()),
                        Err(status) => break LinkError::Broken(status.to_string()),
                    },
                }
                continue;
            }
            let mut calls = Vec::new();
            let mut bytes = 0;
            while bytes < MESSAGE_BYTES_AIM
                && let Some(call) = (!batch.is_empty()).then(|| batch.remove(0))
            {
                // The caller's deadline may have passed in the queue.
                if call.answer.is_closed() {
                    continue;
                }
                let id = self.next_id;
                self.next_id += 1;
                bytes += call.body.len();
                calls.push(pb::Call { id, group: call.group.0, kind: call.kind.into(), body: call.body });
                waiting.insert(id, call.answer);
            }
            if calls.is_empty() {
                continue;
            }
            match out.send_timeout(pb::ToPeer { hello: None, calls }, WRITE_DEADLINE).await {
                Ok(()) => {}
                Err(error) => break LinkError::Broken(error.to_string()),
            }
            // Callers that gave up leave their places behind.
            if waiting.len() > QUEUE {
                waiting.retain(|_, answer| !answer.is_closed());
            }
        };
        for answer in waiting.into_values().chain(batch.into_iter().map(|call| call.answer)) {
            drop(answer.send(Err(error.clone())));
        }
        error
    }
}

/// Hands answers to those who wait for them.
pub(crate) fn settle(waiting: &mut BTreeMap<u64, Waiting>, message: pb::FromPeer) {
    for answer in message.answers {
        let Some(caller) = waiting.remove(&answer.id) else { continue };
        let result = match answer.refusal {
            None => Ok(answer.body),
            Some(refusal) => Err(LinkError::Refused(refusal.explain())),
        };
        // A caller whose deadline passed is gone.
        drop(caller.send(result));
    }
}

#[cfg(test)]
mod tests {
    use tonic::transport::server::TcpIncoming;

    use super::super::service::{PeerService, Ports, RaftService};
    use super::*;
    use crate::config::HostConfig;

    /// What a node of build `ours` hears from one of build `theirs` that it calls: by a link, and before it would send a snapshot.
    async fn called(ours: StateVersions, theirs: StateVersions) -> [String; 2] {
        let ports = Ports::new(RaftNodeId(2), Generation::of_memory(1), theirs);
        let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let addr = incoming.local_addr().unwrap().to_string();
        let service = RaftService::new(PeerService::new(ports));
        let server = tokio::spawn(transport::Server::builder().add_service(service).serve_with_incoming(incoming));
        let connect = HostConfig::new(RaftNodeId(1), "").connect;
        let links = Links::new(RaftNodeId(1), connect, Generation::of_memory(1), ours);
        let link = links.to(RaftNodeId(2), &addr);
        let call = link.call(GroupId(7), pb::Kind::Append, Bytes::new(), HELLO_DEADLINE);
        let Err(LinkError::Refused(said)) = call.await else { panic!("the group is not hosted there") };
        let start = pb::SnapshotStart { group: 7, ..links.snapshot_start(RaftNodeId(2)) };
        let have = links.dial(RaftNodeId(2), &addr).await.unwrap().ask_snapshot(start).await.unwrap().into_inner();
        links.close();
        server.abort();
        [said, have.refusal.unwrap().explain()]
    }

    #[tokio::test]
    async fn two_builds_talk_only_if_each_reads_what_the_other_proposes_whichever_of_them_calls() {
        let build = |since, until, proposes| StateVersions { reads: Span { since, until }, proposes };
        let (old, between, new) = (StateVersions::only(6), build(6, 8, 6), build(6, 8, 7));
        let hosted = ["the peer does not host the group"; 2];
        for (one, other) in [(old, old), (old, between), (between, new), (new, new)] {
            assert_eq!(called(one, other).await, hosted, "{one:?} calls {other:?}");
            assert_eq!(called(other, one).await, hosted, "{other:?} calls {one:?}");
        }
        for said in called(new, old).await {
            assert!(said.contains("reads states and entries of version 6, and this node proposes 7:"), "{said}");
        }
        for said in called(old, new).await {
            assert!(said.contains("proposes entries of version 7, and this node reads 6:"), "{said}");
        }
    }
}
