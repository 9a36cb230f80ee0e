//! Admission: how many calls may be under way, how long each may take, and how many bytes they may hold.
//!
//! Decides by the kind of call (see [`Kind`]) and by the client: clients share one room and have one each, nodes and administrators have
//! rooms of their own, and Raft has no limit here, so nothing that clients do keeps the group from talking. What is refused is refused before
//! anything was done, with the resource, its limit, what was found, and when to come again. A call holds its place until its answer was taken.

use crate::{
    limits::{
        ADMIN_CALLS_MAX, BYTES_AGAIN, CALL_AGAIN, CALL_MAX, HEALTH_CALLS_MAX, Limits, NODE_CALLS_MAX, REPLY_BYTES_SURE,
        REQUEST_MAX,
    },
    room::{Full, Held, Room},
    seats::{Line, too_many, zero},
    stream::Connection,
    table::{Kind, kind},
};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use metrics::gauge;
use parking_lot::Mutex;
use quarry_proto::{deadline, refusal::Refusal, v1};
use quarry_wire::{limits::MESSAGE_BYTES_MAX, units::millis};
use std::{
    error::Error,
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::{Instant, Sleep, sleep_until, timeout};
use tonic::transport::server::TcpConnectInfo;
use tower::{Layer, Service};

pub(crate) const CALLS: &str = "quarry_rpc_calls_in_flight";
pub(crate) const BYTES: &str = "quarry_rpc_held_bytes";
/// A message on the wire: whether it is compressed, and its length in four bytes, before it.
const PREFIX: usize = 5;

/// The limits of the calls of one server. A layer; cloning shares them.
#[derive(Clone)]
pub struct Admission(Arc<Rooms>);

struct Rooms {
    limits: Limits,
    clients: Arc<Room>,
    bytes: Arc<Room>,
    nodes: Arc<Room>,
    admins: Arc<Room>,
    health: Arc<Room>,
    raft: Arc<Room>,
}

impl std::fmt::Debug for Admission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admission").field("limits", &self.0.limits).finish_non_exhaustive()
    }
}

impl Admission {
    pub(crate) fn new(limits: Limits) -> Self {
        let room = |of: &'static str, most| Room::new(most, zero(gauge!(CALLS, "of" => of)));
        Self(Arc::new(Rooms {
            clients: room("client", limits.calls_max),
            bytes: Room::new(limits.bytes_max, zero(gauge!(BYTES))),
            nodes: room("node", NODE_CALLS_MAX),
            admins: room("admin", ADMIN_CALLS_MAX),
            health: room("health", HEALTH_CALLS_MAX),
            raft: room("raft", usize::MAX),
            limits,
        }))
    }
}

#[cfg(test)]
impl Admission {
    /// Calls of clients under way, and the bytes that are held for them.
    pub(crate) fn held(&self) -> (usize, usize) {
        (self.0.clients.taken(), self.0.bytes.taken())
    }
}

impl Rooms {
    /// The place of a call of this kind, if there is room for it.
    fn admit(&self, kind: Kind, line: &Line) -> Result<InCall, Refusal> {
        let all = |room: &Arc<Room>, resource| room.take(1).map_err(|full| too_many(resource, full, CALL_AGAIN));
        let (place, own) = match kind {
            Kind::Raft => (self.raft.take_anyway(1), None),
            Kind::Node => (all(&self.nodes, "calls of nodes in flight")?, None),
            Kind::Admin => (all(&self.admins, "calls of administrators in flight")?, None),
            Kind::Health => (all(&self.health, "questions about health in flight")?, None),
            Kind::Client => {
                let bytes = |resource| move |full| too_many(resource, full, BYTES_AGAIN);
                line.account.bytes.check().map_err(bytes(BYTES_OF_ONE))?;
                self.bytes.check().map_err(bytes(BYTES_OF_ALL))?;
                let own = line.account.calls.take(1);
                let own = own.map_err(|full| too_many("calls of one client in flight", full, CALL_AGAIN))?;
                (all(&self.clients, "calls in flight")?, Some(own))
            }
        };
        let bytes =
            (kind == Kind::Client).then(|| Mutex::new([line.account.bytes.take_anyway(0), self.bytes.take_anyway(0)]));
        Ok(InCall { _place: place, _own: own, bytes, reply: Mutex::new(None) })
    }
}

const BYTES_OF_ONE: &str = "bytes of one client in flight";
const BYTES_OF_ALL: &str = "bytes in flight";

/// What a call holds: its places, the bytes of its request, and those of its answer until they were taken.
struct InCall {
    _place: Held,
    _own: Option<Held>,
    /// Of this client, and of all.
    bytes: Option<Mutex<[Held; 2]>>,
    /// Set once the answer is on its way.
    reply: Mutex<Option<(Arc<Line>, u64)>>,
}

impl InCall {
    /// Takes the bytes of a request that are about to come.
    fn expect(&self, length: usize) -> Result<(), Refusal> {
        let Some(bytes) = &self.bytes else { return Ok(()) };
        let mut bytes = bytes.lock();
        let full = |resource| move |full: Full| too_many(resource, full, BYTES_AGAIN);
        bytes[0].grow(length).map_err(full(BYTES_OF_ONE))?;
        bytes[1].grow(length).map_err(full(BYTES_OF_ALL))
    }

    /// Takes the bytes of an answer. One that is small is always taken: to throw it away would free little, and leave its caller in doubt.
    fn answer(&self, length: usize) -> Result<(), Refusal> {
        let Some(bytes) = &self.bytes else { return Ok(()) };
        let mut bytes = bytes.lock();
        if length <= REPLY_BYTES_SURE {
            bytes.iter_mut().for_each(|held| held.grow_anyway(length));
            return Ok(());
        }
        let lost = |resource| {
            move |Full { limit, found }| {
                let why = format!(
                    "its answer of {length} bytes found no room: {resource} is limited to {limit}, found {found}"
                );
                Refusal::Indeterminate(v1::Indeterminate { why })
            }
        };
        bytes[0].grow(length).map_err(lost(BYTES_OF_ONE))?;
        bytes[1].grow(length).map_err(lost(BYTES_OF_ALL))
    }
}

impl Drop for InCall {
    fn drop(&mut self) {
        if let Some((line, name)) = self.reply.get_mut().take() {
            line.reply_ends(name);
        }
    }
}

impl<S> Layer<S> for Admission {
    type Service = Admitted<S>;
    fn layer(&self, inner: S) -> Admitted<S> {
        Admitted { inner, rooms: Arc::clone(&self.0) }
    }
}

/// A server whose calls are limited.
#[derive(Clone)]
pub struct Admitted<S> {
    inner: S,
    rooms: Arc<Rooms>,
}

impl<S: std::fmt::Debug> std::fmt::Debug for Admitted<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admitted").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<S, In, Out> Service<http::Request<In>> for Admitted<S>
where
    S: Service<http::Request<RequestBody<In>>, Response = http::Response<Out>>,
    S::Future: Send + 'static,
    Out: Body<Data = Bytes> + Default + Unpin + Send,
{
    type Response = http::Response<ReplyBody<Out>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<In>) -> Self::Future {
        let kind = kind(request.uri().path());
        let connection = request.extensions().get::<Connection<TcpConnectInfo>>().and_then(|it| it.line.clone());
        let line = connection.unwrap_or_else(|| Line::of_nobody(&self.rooms.limits));
        let call = match self.rooms.admit(kind, &line) {
            Ok(call) => Arc::new(call),
            Err(refusal) => {
                let status = refusal.into_status();
                return Box::pin(async move { Ok(status.into_http()) });
            }
        };
        let asked = deadline::of(request.headers());
        // Links between meta nodes, and watches, last as long as both sides like.
        let lasting = matches!(kind, Kind::Raft | Kind::Health);
        let limits = (!lasting).then(|| {
            let most = asked.map_or(REQUEST_MAX, |asked| asked.min(REQUEST_MAX));
            Incoming { until: Instant::now() + most, most, prefix: Vec::with_capacity(PREFIX), late: None }
        });
        let held = Arc::clone(&call);
        let answering = self.inner.call(request.map(|body| RequestBody { body, limits, call: held }));
        Box::pin(async move {
            if lasting {
                return Ok(answering.await?.map(|body| ReplyBody { body, first: None, call: Some(call) }));
            }
            let Ok(answer) = timeout(CALL_MAX, answering).await else {
                let why = format!("the call was not done within {CALL_MAX:?}");
                return Ok(Refusal::Indeterminate(v1::Indeterminate { why }).into_status().into_http());
            };
            let (head, mut body) = answer?.into_parts();
            // The server asks for it when the client has room, so never if that has none: how much is held is to be known before.
            let first = poll_fn(|cx| match Pin::new(&mut body).poll_frame(cx) {
                Poll::Ready(first) => Poll::Ready(first),
                Poll::Pending => Poll::Ready(None),
            });
            let first = first.await;
            if let Some(Ok(frame)) = &first
                && let Some(data) = frame.data_ref()
                && let Err(refusal) = call.answer(data.len())
            {
                return Ok(refusal.into_status().into_http());
            }
            let name = line.reply_begins();
            *call.reply.lock() = Some((line, name));
            Ok(http::Response::from_parts(head, ReplyBody { body, first, call: Some(call) }))
        })
    }
}

/// A request on its way.
struct Incoming {
    until: Instant,
    most: Duration,
    /// The first bytes of its message, until its length is known.
    prefix: Vec<u8>,
    /// Wakes this request when its time is over; made when it has to wait.
    late: Option<Pin<Box<Sleep>>>,
}

/// The body of a request that has a limit in time and in bytes.
pub struct RequestBody<B> {
    body: B,
    limits: Option<Incoming>,
    call: Arc<InCall>,
}

impl<B> std::fmt::Debug for RequestBody<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RequestBody").finish_non_exhaustive()
    }
}

impl Incoming {
    /// Looks at what came: how long the message will be is known before it is there.
    fn came(&mut self, data: &[u8], call: &InCall) -> Result<(), Refusal> {
        if self.prefix.len() < PREFIX {
            let missing = (PREFIX - self.prefix.len()).min(data.len());
            self.prefix.extend_from_slice(&data[..missing]);
            if let [_, length @ ..] = &self.prefix[..]
                && let Ok(length) = <[u8; 4]>::try_from(length)
            {
                let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
                if length > MESSAGE_BYTES_MAX {
                    let (limit, found) = (MESSAGE_BYTES_MAX as u64, length as u64);
                    return Err(Refusal::TooLarge(v1::TooLarge { what: "the message".to_owned(), limit, found }));
                }
                call.expect(length)?;
            }
        }
        if Instant::now() > self.until { Err(self.too_late()) } else { Ok(()) }
    }

    fn too_late(&self) -> Refusal {
        let limit = millis(self.most);
        Refusal::TooManyRequests(v1::TooManyRequests {
            resource: "milliseconds for a request to arrive".to_owned(),
            limit,
            found: limit.saturating_add(millis(self.until.elapsed())),
            retry_after_ms: millis(CALL_AGAIN),
        })
    }
}

impl<B> Body for RequestBody<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.body).poll_frame(cx).map_err(Into::into);
        let Some(limits) = &mut this.limits else { return polled };
        let refused = match &polled {
            Poll::Pending => {
                let until = limits.until;
                let late = limits.late.get_or_insert_with(|| Box::pin(sleep_until(until)));
                late.as_mut().poll(cx).is_ready().then(|| limits.too_late())
            }
            Poll::Ready(Some(Ok(frame))) => frame.data_ref().and_then(|data| limits.came(data, &this.call).err()),
            Poll::Ready(_) => None,
        };
        match refused {
            Some(refusal) => Poll::Ready(Some(Err(refusal.into_status().into()))),
            None => polled,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The bytes of an answer, which keep the place of its call: HTTP/2 takes a body as a whole and holds what its client has no room for.
struct Untaken {
    bytes: Bytes,
    _call: Arc<InCall>,
}

impl AsRef<[u8]> for Untaken {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The body of an answer, which keeps the place of its call until it was taken.
pub struct ReplyBody<B: Body> {
    body: B,
    /// What the body begins with, if that is known.
    first: Option<Result<Frame<B::Data>, B::Error>>,
    call: Option<Arc<InCall>>,
}

impl<B: Body + Default> Default for ReplyBody<B> {
    fn default() -> Self {
        Self { body: B::default(), first: None, call: None }
    }
}

impl<B: Body> std::fmt::Debug for ReplyBody<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReplyBody").finish_non_exhaustive()
    }
}

// Nothing in it is pinned but the body, which may be moved.
impl<B: Body + Unpin> Unpin for ReplyBody<B> {}

impl<B: Body<Data = Bytes> + Unpin> Body for ReplyBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let polled = match self.first.take() {
            Some(first) => Poll::Ready(Some(first)),
            None => Pin::new(&mut self.body).poll_frame(cx),
        };
        let Some(call) = &self.call else { return polled };
        let held = |bytes: Bytes| Bytes::from_owner(Untaken { bytes, _call: Arc::clone(call) });
        polled.map_ok(|frame| frame.map_data(held))
    }
    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        let mut hint = self.body.size_hint();
        let Some(Ok(frame)) = &self.first else { return hint };
        let first = frame.data_ref().map_or(0, |data| data.len() as u64);
        let upper = hint.upper().and_then(|upper| upper.checked_add(first));
        let lower = hint.lower().saturating_add(first);
        hint = SizeHint::new();
        hint.set_lower(lower);
        if let Some(upper) = upper {
            hint.set_upper(upper);
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        identity::Identity,
        limits::REPLY_MAX,
        seats::{Seat, Seats},
    };
    use quarry_wire::{certificate::Role, ids::ClusterUuid};
    use std::{collections::VecDeque, convert::Infallible, sync::Arc};
    use tokio::{
        sync::Semaphore,
        time::{advance, sleep},
    };
    use tonic::Status;
    use tower::service_fn;

    const GRANT: &str = "/quarry.v1.Control/Grant";

    /// A body of these pieces; one that never ends after them has `more`.
    #[derive(Default)]
    struct Pieces {
        pieces: VecDeque<Bytes>,
        more: bool,
    }

    impl Body for Pieces {
        type Data = Bytes;
        type Error = Infallible;
        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            match self.pieces.pop_front() {
                Some(piece) => Poll::Ready(Some(Ok(Frame::data(piece)))),
                None if self.more => Poll::Pending,
                None => Poll::Ready(None),
            }
        }
    }

    /// A message of this length, of which so much is there.
    fn message(length: usize, there: usize) -> Pieces {
        let mut bytes = vec![0];
        bytes.extend_from_slice(&u32::try_from(length).unwrap().to_be_bytes());
        bytes.resize(PREFIX + there, 7);
        // In two pieces, the first within the length.
        let rest = Bytes::from(bytes.split_off(3));
        Pieces { pieces: [bytes.into(), rest].into(), more: there < length }
    }

    /// A server that reads its request, waits until it is let go, and answers so many bytes.
    struct Served {
        answer: usize,
        admission: Admission,
        seats: Arc<Seats>,
        go: Arc<Semaphore>,
    }

    type Answer = Result<http::Response<ReplyBody<Pieces>>, Refusal>;

    impl Served {
        fn new(limits: Limits) -> Self {
            Self {
                answer: 1_000,
                admission: Admission::new(limits),
                seats: Seats::new(limits),
                go: Arc::new(Semaphore::new(0)),
            }
        }

        fn seat(&self, name: &str) -> Seat {
            let peer = Identity::client(ClusterUuid([3; 16]), &[Role::Writer], name).unwrap();
            self.seats.seat(Some(&peer), None).unwrap()
        }

        /// Begins a call; it has its place, or was refused, once this returns.
        fn begin(&self, seat: &Seat, path: &str, body: Pieces) -> impl Future<Output = Answer> + use<> {
            self.begin_for(seat, path, body, None)
        }

        fn begin_for(
            &self,
            seat: &Seat,
            path: &str,
            body: Pieces,
            timeout: Option<&'static str>,
        ) -> impl Future<Output = Answer> + use<> {
            let (go, answer) = (Arc::clone(&self.go), self.answer);
            let server = service_fn(move |request: http::Request<RequestBody<Pieces>>| {
                let go = Arc::clone(&go);
                async move {
                    let mut body = request.into_body();
                    while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
                        if let Err(error) = frame {
                            return Ok(Status::from_error(error).into_http());
                        }
                    }
                    go.acquire().await.expect("it is not closed").forget();
                    Ok::<_, Infallible>(http::Response::new(Pieces {
                        pieces: [Bytes::from(vec![1; answer])].into(),
                        more: false,
                    }))
                }
            });
            let mut request = http::Request::builder().uri(path).body(body).unwrap();
            if let Some(timeout) = timeout {
                request.headers_mut().insert(deadline::HEADER, timeout.parse().unwrap());
            }
            let socket = TcpConnectInfo { local_addr: None, remote_addr: None };
            request.extensions_mut().insert(Connection { peer: None, socket, line: Some(Arc::clone(&seat.line)) });
            let answering = self.admission.layer(server).call(request);
            async move {
                let answer = answering.await.unwrap();
                match Status::from_header_map(answer.headers()) {
                    Some(status) => Err(Refusal::from_status(&status).expect("it is typed")),
                    None => Ok(answer),
                }
            }
        }

        async fn refused(&self, seat: &Seat) -> (String, u64, u64) {
            resource(self.begin(seat, GRANT, message(1, 1)).await.err())
        }
    }

    fn resource(refusal: Option<Refusal>) -> (String, u64, u64) {
        match refusal {
            Some(Refusal::TooManyRequests(it)) if it.retry_after_ms > 0 => (it.resource, it.limit, it.found),
            other => panic!("{other:?}"),
        }
    }

    fn few() -> Limits {
        Limits {
            calls_max: 3,
            calls_per_client_max: 2,
            bytes_max: 5_000,
            bytes_per_client_max: 3_000,
            ..Limits::default()
        }
    }

    #[tokio::test]
    async fn one_client_has_its_share_of_calls_and_all_have_theirs_and_what_ended_makes_room() {
        let served = Served::new(few());
        let (alice, bob) = (served.seat("alice"), served.seat("bob"));
        let call = |seat| served.begin(seat, GRANT, message(1, 1));
        let (one, two) = (call(&alice), call(&alice));
        // Another connection of hers is no other client.
        assert_eq!(served.refused(&served.seat("alice")).await, ("calls of one client in flight".to_owned(), 2, 3));
        let three = call(&bob);
        assert_eq!(served.refused(&bob).await, ("calls in flight".to_owned(), 3, 4));
        served.go.add_permits(3);
        drop((one.await.unwrap(), two.await.unwrap(), three));
        let again = [call(&alice), call(&alice), call(&bob)];
        assert_eq!(served.refused(&bob).await.0, "calls in flight");
        drop(again);
    }

    #[tokio::test]
    async fn what_clients_do_keeps_neither_raft_nor_data_nodes_nor_administrators_from_their_calls() {
        let served = Served::new(few());
        let (alice, bob) = (served.seat("alice"), served.seat("bob"));
        let call = |seat, path: &str| served.begin(seat, path, message(1, 1));
        let filled = [call(&alice, GRANT), call(&alice, GRANT), call(&bob, GRANT)];
        served.go.add_permits(100);
        for path in [
            "/quarry.raft.v1.Peer/Link",
            "/quarry.v1.Registry/Heartbeat",
            "/quarry.v1.Control/Publish",
            "/quarry.v1.Admin/Status",
            "/grpc.health.v1.Health/Check",
        ] {
            assert!(call(&alice, path).await.is_ok(), "{path}");
        }
        let admins: Vec<_> = (0..ADMIN_CALLS_MAX).map(|_| call(&bob, "/quarry.v1.Admin/Status")).collect();
        let refused = call(&bob, "/quarry.v1.Admin/Status").await.err();
        assert_eq!(resource(refused).0, "calls of administrators in flight");
        let links: Vec<_> = (0..10_000).map(|_| call(&bob, "/quarry.raft.v1.Peer/Link")).collect();
        assert!(call(&bob, "/quarry.raft.v1.Peer/Link").await.is_ok());
        drop((filled, admins, links));
    }

    #[tokio::test]
    async fn a_message_that_is_too_long_is_refused_by_its_announcement_with_limit_and_length() {
        let served = Served::new(Limits::default());
        let seat = served.seat("alice");
        served.go.add_permits(10);
        assert!(served.begin(&seat, GRANT, message(MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX)).await.is_ok());
        let answer = served.begin(&seat, GRANT, message(MESSAGE_BYTES_MAX + 1, 2)).await.err();
        let Some(Refusal::TooLarge(it)) = answer else { panic!("{answer:?}") };
        assert_eq!((it.limit, it.found), (MESSAGE_BYTES_MAX as u64, MESSAGE_BYTES_MAX as u64 + 1));
    }

    #[tokio::test]
    async fn bytes_that_are_announced_or_not_taken_count_until_they_are_gone() {
        let served = Served::new(Limits { calls_max: 100, calls_per_client_max: 100, ..few() });
        let (alice, bob, carol) = (served.seat("alice"), served.seat("bob"), served.seat("carol"));
        // Announced, and never sent.
        let half = tokio::spawn(served.begin(&alice, GRANT, message(2_900, 10)));
        for _ in 0..1_000 {
            tokio::task::yield_now().await;
        }
        assert_eq!(alice.line.account.bytes.taken(), 2_900, "as announced");
        let more = served.begin(&alice, GRANT, message(200, 200)).await.err();
        assert_eq!(resource(more), ("bytes of one client in flight".to_owned(), 3_000, 3_100));
        // Answered, and not taken.
        served.go.add_permits(2);
        let mut answers = Vec::new();
        for _ in 0..2 {
            let mut answer = served.begin(&bob, GRANT, message(1, 1)).await.unwrap().into_body();
            let frame = poll_fn(|cx| Pin::new(&mut answer).poll_frame(cx)).await.unwrap().unwrap();
            answers.push((answer, frame));
        }
        assert_eq!((bob.line.account.bytes.taken(), served.admission.0.bytes.taken()), (2_002, 4_902));
        let more = served.begin(&carol, GRANT, message(200, 200)).await.err();
        assert_eq!(resource(more), ("bytes in flight".to_owned(), 5_000, 5_102));
        drop(answers);
        half.abort();
        assert!(half.await.is_err());
        assert_eq!(served.admission.0.bytes.taken(), 0);
    }

    #[tokio::test]
    async fn an_answer_that_finds_no_room_is_thrown_away_and_its_call_has_no_known_outcome() {
        let mut served = Served::new(Limits { bytes_per_client_max: 250_000, ..Limits::default() });
        served.answer = 100_000;
        let seat = served.seat("alice");
        // All of them begin before any is answered.
        let calls: Vec<_> = (0..5).map(|_| served.begin(&seat, GRANT, message(1, 1))).collect();
        served.go.add_permits(5);
        let mut answers = Vec::new();
        let mut lost = Vec::new();
        for call in calls {
            // Not a byte of them is asked for.
            match call.await {
                Ok(answer) => answers.push(answer),
                Err(Refusal::Indeterminate(it)) => lost.push(it.why),
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!((answers.len(), lost.len()), (2, 3), "{lost:?}");
        assert!(lost[0].contains("bytes of one client in flight is limited to 250000"), "{lost:?}");
        let mut body = answers.pop().unwrap().into_body();
        let (mut taken, hint) = (0, body.size_hint());
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            taken += frame.unwrap().data_ref().unwrap().len();
        }
        assert_eq!((taken, hint.lower()), (100_000, 100_000), "what has room is whole");
        drop((body, answers));
        assert_eq!(seat.line.account.bytes.taken(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_does_not_end_is_refused_by_the_deadline_of_its_caller_or_of_the_server() {
        let served = Served::new(Limits::default());
        let seat = served.seat("alice");
        for (timeout, expected) in
            [(None, REQUEST_MAX), (Some("500m"), Duration::from_millis(500)), (Some("1H"), REQUEST_MAX)]
        {
            let began = Instant::now();
            let answer = served.begin_for(&seat, GRANT, message(100, 10), timeout).await.err();
            let (resource, limit, _) = resource(answer);
            assert_eq!((resource.as_str(), limit), ("milliseconds for a request to arrive", millis(expected)));
            assert!(began.elapsed() >= expected && began.elapsed() < expected + Duration::from_secs(1));
        }
        assert_eq!(seat.line.account.calls.taken(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_never_ends_is_ended_and_its_outcome_is_not_known() {
        let served = Served::new(Limits::default());
        let seat = served.seat("alice");
        let answer = served.begin(&seat, GRANT, message(1, 1)).await.err();
        assert!(matches!(answer, Some(Refusal::Indeterminate(_))), "{answer:?}");
        assert_eq!(seat.line.account.calls.taken(), 0);
        // A link between meta nodes has no end.
        let link = served.begin(&seat, "/quarry.raft.v1.Peer/Link", message(100, 10));
        tokio::select! {
            answer = link => panic!("{:?}", answer.err()),
            () = sleep(10 * CALL_MAX) => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_nobody_takes_makes_its_connection_a_slow_one() {
        let served = Served::new(few());
        let seat = served.seat("alice");
        served.go.add_permits(2);
        let answer = served.begin(&seat, GRANT, message(1, 1)).await.unwrap();
        advance(REPLY_MAX / 2).await;
        let later = served.begin(&seat, GRANT, message(1, 1)).await.unwrap();
        assert_eq!(served.refused(&seat).await.0, "calls of one client in flight");
        advance(REPLY_MAX / 2 + Duration::from_secs(1)).await;
        assert!(seat.line.is_slow(REPLY_MAX));
        drop(answer);
        assert!(!seat.line.is_slow(REPLY_MAX));
        drop(later);
        advance(10 * REPLY_MAX).await;
        assert!(!seat.line.is_slow(REPLY_MAX));
    }
}
