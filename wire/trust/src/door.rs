//! The door of a server: everything that stands between its port and its services.

use crate::{
    accept::{self, Incoming},
    admission::{self, Admission},
    credentials::Credentials,
    guard::Guard,
    limits::{BACKLOG, HEADER_BYTES_MAX, KEEPALIVE, Limits, STREAMS_MAX},
    seats::{self, Seats},
};
use metrics::{Unit, describe_counter, describe_gauge};
use std::{io, net::SocketAddr, sync::Arc};
use tokio::net::{TcpListener, TcpSocket};
use tonic::transport::Server;

/// Who may come in, and how much at once. One per listener; made by [`crate::Trust::door`].
///
/// A server is made of its parts, in this order: [`Door::server`], layers that count, [`Door::guard`], [`Door::admission`], the services; and
/// it serves [`Door::incoming`].
#[derive(Debug)]
pub struct Door {
    credentials: Option<Arc<Credentials>>,
    seats: Arc<Seats>,
    admission: Admission,
}

impl Door {
    pub(crate) fn new(credentials: Option<Arc<Credentials>>, limits: Limits) -> Self {
        Self { credentials, seats: Seats::new(limits), admission: Admission::new(limits) }
    }

    /// A server whose connections have limits each.
    pub fn server(&self) -> Server {
        Server::builder()
            .max_concurrent_streams(STREAMS_MAX)
            .http2_max_header_list_size(HEADER_BYTES_MAX)
            .http2_keepalive_interval(Some(KEEPALIVE))
            .http2_keepalive_timeout(Some(KEEPALIVE))
    }

    /// The connections among `arriving` whose clients prove who they are, or all without TLS; as many as there is room for.
    pub fn incoming<A, S: 'static>(&self, arriving: A) -> Incoming<A, S> {
        Incoming::new(arriving, self.credentials.clone(), Arc::clone(&self.seats))
    }

    /// Lets a call through only if its caller may make it.
    #[must_use]
    pub fn guard(&self) -> Guard {
        Guard { mutual: self.credentials.is_some() }
    }

    /// Lets a call through only if there is room for it.
    #[must_use]
    pub fn admission(&self) -> Admission {
        self.admission.clone()
    }
}

/// Listens at `address` as servers do: with a queue that a crowd does not fill at once.
///
/// # Errors
/// What the system says.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // As a server that starts again finds its port.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

pub(crate) fn describe_metrics() {
    describe_counter!(
        accept::REFUSED,
        Unit::Count,
        "Connections that were closed before any call, since their clients did not prove who they are, by reason."
    );
    describe_gauge!(accept::SHAKING, Unit::Count, "Connections whose clients are about to prove who they are.");
    describe_gauge!(
        seats::CONNECTIONS,
        Unit::Count,
        "Connections that were let in, by listener and by whose they are."
    );
    describe_counter!(
        seats::TURNED_AWAY,
        Unit::Count,
        "Connections that were not let in for want of room, by listener and resource."
    );
    describe_counter!(
        seats::CUT,
        Unit::Count,
        "Connections that were closed because their client was too slow, by what it did not do: say hello, take an answer."
    );
    describe_gauge!(
        admission::CALLS,
        Unit::Count,
        "Calls that are under way, their answers included until they were taken, by whose they are."
    );
    describe_gauge!(
        admission::BYTES,
        Unit::Bytes,
        "Bytes of clients' requests, and of answers to them that were not taken yet, that are held in memory."
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{HELLO_MAX, REPLY_MAX, REQUEST_MAX};
    use bytes::Bytes;
    use futures::{StreamExt as _, stream};
    use http_body::{Body, Frame};
    use std::{
        convert::Infallible,
        pin::Pin,
        task::{Context, Poll},
        time::Duration,
    };
    use tokio::{
        io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, ReadBuf, duplex},
        task::JoinHandle,
        time::{Instant, timeout},
    };
    use tonic::transport::server::{Connected, TcpConnectInfo};
    use tower::service_fn;

    const ANSWER: usize = 1 << 20;
    /// Bytes on their way in each direction.
    const WIRE: usize = 4 << 10;
    const DATA: u8 = 0;
    const HEADERS: u8 = 1;
    const RESET: u8 = 3;
    const SETTINGS: u8 = 4;
    const PING: u8 = 6;

    /// A wire that looks like a socket.
    struct Wire(DuplexStream);

    impl Connected for Wire {
        type ConnectInfo = TcpConnectInfo;
        fn connect_info(&self) -> TcpConnectInfo {
            TcpConnectInfo { local_addr: None, remote_addr: Some(([10, 0, 0, 1], 9).into()) }
        }
    }
    impl AsyncRead for Wire {
        fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, to: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_read(cx, to)
        }
    }
    impl AsyncWrite for Wire {
        fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            Pin::new(&mut self.0).poll_write(cx, bytes)
        }
        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_flush(cx)
        }
        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_shutdown(cx)
        }
    }

    /// An answer in one piece, and trailers after it as gRPC has them.
    #[derive(Default)]
    struct Answer(Vec<Frame<Bytes>>);

    impl Body for Answer {
        type Data = Bytes;
        type Error = Infallible;
        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(self.0.pop().map(Ok))
        }
        fn is_end_stream(&self) -> bool {
            self.0.is_empty()
        }
    }

    /// A client that speaks HTTP/2 by hand, and its server.
    struct Met {
        door: Door,
        client: DuplexStream,
        server: JoinHandle<()>,
    }

    impl Drop for Met {
        fn drop(&mut self) {
            self.server.abort();
        }
    }

    /// A client meets a server that answers each call with [`ANSWER`] bytes once the request is whole.
    fn meet(limits: Limits) -> Met {
        let door = Door::new(None, limits);
        let (near, client) = duplex(WIRE);
        let service = service_fn(|request: http::Request<crate::RequestBody<tonic::body::Body>>| async {
            let mut body = request.into_body();
            while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
                if let Err(error) = frame {
                    return Ok(tonic::Status::from_error(error).into_http());
                }
            }
            let end = Frame::trailers(http::HeaderMap::new());
            Ok::<_, Infallible>(http::Response::new(Answer(vec![end, Frame::data(vec![1; ANSWER].into())])))
        });
        let arriving = stream::iter([Ok(Wire(near))]).chain(stream::pending());
        let incoming = door.incoming(Box::pin(arriving));
        let server = door.server().layer(door.guard()).layer(door.admission());
        let server =
            tokio::spawn(async move { server.serve_with_incoming(service, incoming).await.expect("it serves") });
        Met { door, client, server }
    }

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
        frame.extend_from_slice(&[kind, flags]);
        frame.extend_from_slice(&stream.to_be_bytes());
        frame.extend_from_slice(payload);
        frame
    }

    fn hello(window: u32) -> Vec<u8> {
        let settings = [&[0, 4][..], &window.to_be_bytes()].concat();
        [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(SETTINGS, 0, 0, &settings)].concat()
    }

    /// The headers of a call, and its message if it has one.
    fn call(stream: u32, whole: bool) -> Vec<u8> {
        let mut headers = Vec::new();
        for (name, value) in [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/quarry.v1.Control/Resolve"),
            (":authority", "x"),
            ("content-type", "application/grpc"),
        ] {
            headers.push(0);
            for text in [name, value] {
                headers.push(u8::try_from(text.len()).unwrap());
                headers.extend_from_slice(text.as_bytes());
            }
        }
        let mut said = frame(HEADERS, 4, stream, &headers);
        if whole {
            said.extend(frame(DATA, 1, stream, &[0; 5]));
        }
        said
    }

    impl Met {
        async fn say(&mut self, words: &[u8]) {
            self.client.write_all(words).await.unwrap();
        }

        /// The next frame: kind, flags, stream. None once the connection is closed. Says that it is alive when asked.
        async fn hear(&mut self) -> Option<(u8, u8, u32)> {
            let mut head = [0; 9];
            self.client.read_exact(&mut head).await.ok()?;
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut payload = vec![0; usize::try_from(length).unwrap()];
            self.client.read_exact(&mut payload).await.ok()?;
            if head[3] == PING && head[4] == 0 {
                drop(self.client.write_all(&frame(PING, 1, 0, &payload)).await);
            }
            Some((head[3], head[4], u32::from_be_bytes([head[5], head[6], head[7], head[8]])))
        }

        /// Everything that is said until the connection is closed, at most for this long; and whether it was closed.
        async fn hear_for(&mut self, most: Duration) -> (Vec<(u8, u8, u32)>, bool) {
            let mut heard = Vec::new();
            let closed = timeout(most, async {
                while let Some(frame) = self.hear().await {
                    heard.push(frame);
                }
            });
            let closed = closed.await.is_ok();
            (heard, closed)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_never_takes_an_answer_is_cut_off_and_what_was_held_for_it_is_free() {
        let mut met = meet(Limits::default());
        met.say(&[hello(0), call(1, true)].concat()).await;
        let (heard, closed) = met.hear_for(REPLY_MAX - Duration::from_secs(1)).await;
        assert!(!closed && heard.contains(&(HEADERS, 4, 1)), "{heard:?}");
        assert!(!heard.iter().any(|(kind, ..)| *kind == DATA), "it gave no room for that: {heard:?}");
        assert_eq!(met.door.admission.held(), (1, ANSWER), "calls and bytes");
        let began = Instant::now();
        assert!(met.hear_for(REPLY_MAX).await.1, "it is cut off");
        assert!(began.elapsed() < Duration::from_secs(10));
        assert_eq!(met.door.admission.held(), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_even_read_is_cut_off() {
        let mut met = meet(Limits::default());
        met.say(&[hello(1 << 30), call(1, true)].concat()).await;
        tokio::time::sleep(KEEPALIVE).await;
        assert_eq!(met.door.admission.held(), (1, ANSWER));
        tokio::time::sleep(REPLY_MAX).await;
        assert_eq!(met.door.admission.held(), (0, 0));
        // What was on the wire is still there, and then its end.
        assert!(met.hear_for(Duration::from_secs(1)).await.1);
    }

    #[tokio::test(start_paused = true)]
    async fn answers_that_are_not_taken_end_the_calls_of_a_client_long_before_its_calls_are_counted() {
        let mut met = meet(Limits { bytes_per_client_max: 4 * ANSWER, ..Limits::default() });
        met.say(&hello(0)).await;
        for number in 0..50 {
            met.say(&call(1 + 2 * number, true)).await;
            // Whatever is said meanwhile makes room on the wire.
            drop(timeout(Duration::from_millis(1), met.hear()).await);
        }
        drop(met.hear_for(Duration::from_secs(1)).await);
        assert_eq!(met.door.admission.held(), (4, 4 * ANSWER));
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_never_whole_is_answered_and_its_connection_goes_on() {
        let mut met = meet(Limits::default());
        met.say(&[hello(1 << 30), call(1, false)].concat()).await;
        let (heard, closed) = met.hear_for(REQUEST_MAX - Duration::from_secs(1)).await;
        assert!(!closed && !heard.iter().any(|(kind, ..)| *kind == HEADERS), "{heard:?}");
        let (heard, closed) = met.hear_for(Duration::from_secs(2)).await;
        // Headers that end the stream are an answer without a message: the refusal.
        assert!(!closed && heard.contains(&(HEADERS, 5, 1)), "{heard:?}");
        assert_eq!(met.door.admission.held(), (0, 0));
        met.say(&call(3, true)).await;
        let (heard, closed) = met.hear_for(REPLY_MAX / 2).await;
        assert!(!closed && heard.iter().any(|(kind, _, stream)| (*kind, *stream) == (DATA, 3)), "{heard:?}");
        assert!(!heard.iter().any(|(kind, _, stream)| (*kind, *stream) == (RESET, 3)), "{heard:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_is_there_and_asks_nothing_stays_and_one_that_never_speaks_does_not() {
        let mut met = meet(Limits::default());
        met.say(&hello(0)).await;
        assert!(!met.hear_for(Duration::from_secs(3600)).await.1);
        let mut silent = meet(Limits::default());
        assert!(silent.hear_for(HELLO_MAX + Duration::from_secs(1)).await.1);
    }
}
