//! Accepting: handshakes of many clients side by side, each with a deadline, so that a slow or hostile one holds up nobody.
//!
//! When there are as many handshakes as may be, a newcomer takes the place of whoever has taken longest: an honest client is done in
//! milliseconds, so whoever fills the places with silence loses them first, and members of the cluster get in beside it.

use crate::{
    anchor::identity_of,
    credentials::Credentials,
    limits::{ACCEPT_PAUSE, HANDSHAKE_MAX, HANDSHAKE_SURE, HANDSHAKES_MAX},
    seats::{Seats, zero},
    stream::{Inner, Stream, Watch},
};
use futures::Stream as Sequence;
use metrics::{Gauge, counter, gauge};
use parking_lot::Mutex;
use rustls::{CertificateError, Error};
use std::{
    any::Any,
    collections::VecDeque,
    io,
    net::IpAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    task::{AbortHandle, JoinSet},
    time::{Instant, Sleep, sleep_until, timeout},
};
use tokio_rustls::TlsAcceptor;
use tonic::transport::server::{Connected, TcpConnectInfo};

/// How long a client that was turned away may take to notice, and what it may still say meanwhile.
const GOODBYE_MAX: Duration = Duration::from_secs(1);
const GOODBYE_BYTES_MAX: u64 = 64 << 10;
/// Connections that are accepted in one go. A handshake is a millisecond of arithmetic: other work must get its turn between them.
const AT_ONE_GO: usize = 16;
/// Those who were turned away are told of in the log no more often.
const TELL_EVERY: Duration = Duration::from_secs(1);
pub(crate) const REFUSED: &str = "quarry_tls_handshakes_refused_total";
pub(crate) const SHAKING: &str = "quarry_tls_handshakes_in_flight";

/// Why handshakes fail, as metrics tell it.
const REASONS: [&str; 11] = [
    "broken",
    "certificate",
    "crowded_out",
    "expired",
    "late",
    "name",
    "no_certificate",
    "not_tls",
    "other_root",
    "protocol",
    "turned_down_by_client",
];

/// Connections whose clients proved who they are, made of those that arrived.
#[derive(Debug)]
pub struct Incoming<A, S> {
    /// None once no more arrive.
    arriving: Option<A>,
    credentials: Option<Arc<Credentials>>,
    seats: Arc<Seats>,
    handshakes: JoinSet<Option<(Inner<S>, Option<IpAddr>)>>,
    /// The handshakes under way and some that ended, oldest first.
    begun: VecDeque<(Instant, AbortHandle)>,
    /// None is accepted before.
    pause: Option<Pin<Box<Sleep>>>,
    told: Arc<Mutex<Option<Instant>>>,
    shaking: Gauge,
}

impl<A, S: 'static> Incoming<A, S> {
    pub(crate) fn new(arriving: A, credentials: Option<Arc<Credentials>>, seats: Arc<Seats>) -> Self {
        // All are shown from the start, as zeros.
        REASONS.into_iter().for_each(|reason| drop(counter!(REFUSED, "reason" => reason)));
        Self {
            arriving: Some(arriving),
            credentials,
            seats,
            handshakes: JoinSet::new(),
            begun: VecDeque::new(),
            pause: None,
            told: Arc::default(),
            shaking: zero(gauge!(SHAKING)),
        }
    }

    /// Whether another handshake may begin now; if not, some time passes before it may.
    fn has_room(&mut self) -> bool {
        if self.begun.len() < HANDSHAKES_MAX {
            return true;
        }
        self.begun.retain(|(_, handshake)| !handshake.is_finished());
        if self.begun.len() < HANDSHAKES_MAX {
            return true;
        }
        let Some((since, _)) = self.begun.front() else { return true };
        let sure = *since + HANDSHAKE_SURE;
        if sure > Instant::now() {
            self.pause = Some(Box::pin(sleep_until(sure)));
            return false;
        }
        if let Some((_, slowest)) = self.begun.pop_front() {
            slowest.abort();
            turned_away(&self.told, "crowded_out", "others came while it took its time");
        }
        true
    }
}

impl<A, S> Incoming<A, S>
where
    A: Sequence<Item = io::Result<S>> + Unpin,
    S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    /// The next connection that arrives, if one may be taken on.
    fn poll_arrival(&mut self, cx: &mut Context<'_>) -> Poll<Option<S>> {
        loop {
            if let Some(pause) = &mut self.pause {
                if pause.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                self.pause = None;
            }
            if !self.has_room() {
                continue;
            }
            let Some(arriving) = &mut self.arriving else { return Poll::Ready(None) };
            match Pin::new(arriving).poll_next(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => {
                    self.arriving = None;
                    return Poll::Ready(None);
                }
                Poll::Ready(Some(Ok(socket))) => return Poll::Ready(Some(socket)),
                Poll::Ready(Some(Err(error))) => {
                    // Most often there are no descriptors left: asking again at once would only burn the time of others.
                    turned_away(&self.told, "broken", &error.to_string());
                    self.pause = Some(Box::pin(sleep_until(Instant::now() + ACCEPT_PAUSE)));
                }
            }
        }
    }

    /// Lets a connection in, if there is a seat.
    fn seat(&self, inner: Inner<S>, address: Option<IpAddr>) -> Option<Stream<S>> {
        let seat = self.seats.seat(inner.peer().map(Arc::as_ref), address)?;
        Some(Stream { inner, watch: Some(Box::new(Watch::new(seat))) })
    }
}

impl<A, S> Sequence for Incoming<A, S>
where
    A: Sequence<Item = io::Result<S>> + Unpin,
    S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    type Item = io::Result<Stream<S>>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        for _ in 0..AT_ONE_GO {
            // Those who are done come first: their handshakes have been paid for.
            let done = this.handshakes.poll_join_next(cx);
            if let Poll::Ready(Some(shaken)) = done {
                #[expect(clippy::cast_precision_loss, reason = "there are few handshakes")]
                this.shaking.set(this.handshakes.len() as f64);
                // One that was crowded out has been counted.
                if let Ok(Some((inner, address))) = shaken
                    && let Some(stream) = this.seat(inner, address)
                {
                    return Poll::Ready(Some(Ok(stream)));
                }
                continue;
            }
            let socket = match this.poll_arrival(cx) {
                Poll::Ready(Some(socket)) => socket,
                Poll::Ready(None) if done.is_ready() => return Poll::Ready(None),
                Poll::Ready(None) | Poll::Pending => return Poll::Pending,
            };
            let address = address(&socket);
            let Some(credentials) = &this.credentials else {
                match this.seat(Inner::Plain { socket, expects_http: None }, address) {
                    Some(stream) => return Poll::Ready(Some(Ok(stream))),
                    None => continue,
                }
            };
            let (credentials, told) = (Arc::clone(credentials), Arc::clone(&this.told));
            let handshake =
                this.handshakes.spawn(async move { Some((shake(credentials, socket, told).await?, address)) });
            this.begun.push_back((Instant::now(), handshake));
            #[expect(clippy::cast_precision_loss, reason = "there are few handshakes")]
            this.shaking.set(this.handshakes.len() as f64);
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// Where a connection comes from, if its socket knows.
fn address<S: Connected>(socket: &S) -> Option<IpAddr> {
    let info = socket.connect_info();
    (&info as &dyn Any).downcast_ref::<TcpConnectInfo>()?.remote_addr().map(|address| address.ip())
}

async fn shake<S>(credentials: Arc<Credentials>, socket: S, told: Arc<Mutex<Option<Instant>>>) -> Option<Inner<S>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let own = credentials.current();
    let accept = TlsAcceptor::from(Arc::clone(&own.server)).accept(socket).into_fallible();
    let mut left = None;
    let (reason, why) = match timeout(HANDSHAKE_MAX, accept).await {
        Ok(Ok(stream)) => {
            let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
            match shown.map(identity_of) {
                Some(Ok(peer)) => {
                    return Some(Inner::Tls { stream: Box::new(stream.into()), peer: Arc::new(peer) });
                }
                Some(Err(error)) => ("name", error.to_string()),
                None => ("no_certificate", "no certificate".to_owned()),
            }
        }
        Ok(Err((error, socket))) => {
            left = Some(socket);
            (reason(&error), error.to_string())
        }
        Err(_) => ("late", format!("not done within {HANDSHAKE_MAX:?}")),
    };
    turned_away(&told, reason, &why);
    if let Some(socket) = left {
        say_goodbye(socket).await;
    }
    None
}

/// Counts a client that was not let in, and tells of it now and then.
fn turned_away(told: &Mutex<Option<Instant>>, reason: &'static str, why: &str) {
    counter!(REFUSED, "reason" => reason).increment(1);
    let mut told = told.lock();
    if told.is_none_or(|at| at.elapsed() >= TELL_EVERY) {
        *told = Some(Instant::now());
        tracing::warn!(reason, why, "a client was not let in");
    }
}
/// Lets the alert, which was sent, arrive: a socket that is closed with bytes unread takes back what it said.
async fn say_goodbye<S: AsyncRead + AsyncWrite + Unpin>(mut socket: S) {
    let goodbye = async {
        socket.shutdown().await?;
        tokio::io::copy(&mut socket.take(GOODBYE_BYTES_MAX), &mut tokio::io::sink()).await
    };
    // Whether the client is still there does not matter any more.
    drop(timeout(GOODBYE_MAX, goodbye).await);
}

/// Why a handshake failed, as metrics tell it.
fn reason(error: &io::Error) -> &'static str {
    let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) else { return "broken" };
    match tls {
        Error::NoCertificatesPresented => "no_certificate",
        Error::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => "expired",
        Error::InvalidCertificate(CertificateError::UnknownIssuer) => "other_root",
        Error::InvalidCertificate(_) => "certificate",
        Error::InvalidMessage(_) => "not_tls",
        Error::AlertReceived(_) => "turned_down_by_client",
        _ => "protocol",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{FAREWELL_MAX, HELLO_MAX, Limits, REPLY_MAX};
    use futures::{StreamExt as _, stream};
    use tokio::io::{DuplexStream, duplex};

    const HELLO: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";

    type Arriving = stream::Iter<std::vec::IntoIter<io::Result<DuplexStream>>>;

    /// Connections without TLS, and their far ends.
    fn arrive(count: usize, limits: Limits) -> (Incoming<Arriving, DuplexStream>, Vec<DuplexStream>) {
        let (near, far): (Vec<_>, Vec<_>) = (0..count).map(|_| duplex(1024)).map(|(near, far)| (Ok(near), far)).unzip();
        (Incoming::new(stream::iter(near), None, Seats::new(limits)), far)
    }

    /// Reads until the connection ends, and how.
    async fn ending(stream: &mut Stream<DuplexStream>) -> io::ErrorKind {
        let mut sink = Vec::new();
        let ended = timeout(Duration::from_secs(24 * 3600), stream.read_to_end(&mut sink)).await;
        ended.expect("within a day of the test's clock").expect_err("it does not end well").kind()
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_begin_to_speak_is_sent_away_and_who_does_may_be_silent_then() {
        let (mut incoming, mut far) = arrive(3, Limits::default());
        let began = Instant::now();
        for said in [&b""[..], &HELLO[..HELLO.len() - 1]] {
            let mut client = far.remove(0);
            let mut stream = incoming.next().await.unwrap().unwrap();
            client.write_all(said).await.unwrap();
            assert_eq!(ending(&mut stream).await, io::ErrorKind::TimedOut);
        }
        assert!(began.elapsed() < 3 * HELLO_MAX);
        let mut stream = incoming.next().await.unwrap().unwrap();
        far[0].write_all(HELLO).await.unwrap();
        assert!(timeout(100 * HELLO_MAX, ending(&mut stream)).await.is_err(), "it is let be");
        assert!(incoming.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_take_an_answer_is_sent_away() {
        let (mut incoming, mut far) = arrive(1, Limits::default());
        let mut stream = incoming.next().await.unwrap().unwrap();
        far[0].write_all(HELLO).await.unwrap();
        let line = stream.connect_info().line.unwrap();
        let taken = line.reply_begins();
        assert!(timeout(REPLY_MAX / 2, ending(&mut stream)).await.is_err());
        line.reply_ends(taken);
        assert!(timeout(10 * REPLY_MAX, ending(&mut stream)).await.is_err(), "it was taken");
        line.reply_begins();
        let began = Instant::now();
        assert_eq!(ending(&mut stream).await, io::ErrorKind::TimedOut);
        assert!(began.elapsed() > REPLY_MAX && began.elapsed() < 2 * REPLY_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn who_finds_no_seat_is_let_in_to_be_told_so_and_soon_sent_away_and_its_seat_is_free_then() {
        let limits = Limits { connections_max: 1, connections_per_client_max: 1, ..Limits::default() };
        let (mut incoming, _far) = arrive(3, limits);
        let first = incoming.next().await.unwrap().unwrap();
        let mut second = incoming.next().await.unwrap().unwrap();
        assert!(second.connect_info().line.unwrap().turned_away.is_some());
        let began = Instant::now();
        assert_eq!(ending(&mut second).await, io::ErrorKind::ConnectionRefused);
        assert!(began.elapsed() <= FAREWELL_MAX + Duration::from_millis(10));
        drop(first);
        assert!(incoming.next().await.unwrap().unwrap().connect_info().line.unwrap().turned_away.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn connections_that_cannot_be_accepted_are_waited_for_and_end_nothing() {
        let broken = || Err(io::Error::from_raw_os_error(24));
        let arriving = stream::iter(vec![broken(), broken(), Ok(duplex(64).0)]);
        let mut incoming = Incoming::new(arriving, None, Seats::new(Limits::default()));
        let began = Instant::now();
        assert!(incoming.next().await.unwrap().is_ok());
        assert!(began.elapsed() >= 2 * ACCEPT_PAUSE);
    }
}
