//! Accepting: handshakes of many clients side by side, each with a deadline, so that a slow or hostile one holds up nobody.

use crate::{
    anchor::identity_of,
    credentials::Credentials,
    stream::{Inner, Stream},
};
use futures::Stream as Sequence;
use metrics::counter;
use parking_lot::Mutex;
use rustls::{CertificateError, Error};
use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    task::JoinSet,
    time::{Instant, timeout},
};
use tokio_rustls::TlsAcceptor;

/// How long a client may take to show who it is.
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);
/// Handshakes under way at once; further connections wait in the system's queue.
const HANDSHAKES_MAX: usize = 256;
/// How long a client that was turned away may take to notice, and what it may still say meanwhile.
const GOODBYE_MAX: Duration = Duration::from_secs(1);
const GOODBYE_BYTES_MAX: u64 = 64 << 10;
/// Those who were turned away are told of in the log no more often.
const TELL_EVERY: Duration = Duration::from_secs(1);
pub(crate) const REFUSED: &str = "quarry_tls_handshakes_refused_total";

/// Why handshakes fail, as metrics tell it.
const REASONS: [&str; 10] = [
    "broken",
    "certificate",
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
    handshakes: JoinSet<Option<Stream<S>>>,
    told: Arc<Mutex<Option<Instant>>>,
}

impl<A, S: 'static> Incoming<A, S> {
    pub(crate) fn new(arriving: A, credentials: Option<Arc<Credentials>>) -> Self {
        // All are shown from the start, as zeros.
        REASONS.into_iter().for_each(|reason| drop(counter!(REFUSED, "reason" => reason)));
        Self { arriving: Some(arriving), credentials, handshakes: JoinSet::new(), told: Arc::default() }
    }
}

impl<A, S> Sequence for Incoming<A, S>
where
    A: Sequence<Item = io::Result<S>> + Unpin,
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Item = io::Result<Stream<S>>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            while this.handshakes.len() < HANDSHAKES_MAX
                && let Some(arriving) = &mut this.arriving
            {
                match Pin::new(arriving).poll_next(cx) {
                    Poll::Pending => break,
                    Poll::Ready(None) => this.arriving = None,
                    Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error))),
                    Poll::Ready(Some(Ok(socket))) => match &this.credentials {
                        None => return Poll::Ready(Some(Ok(Stream(Inner::Plain { socket, expects_http: None })))),
                        Some(credentials) => {
                            this.handshakes.spawn(shake(Arc::clone(credentials), socket, Arc::clone(&this.told)));
                        }
                    },
                }
            }
            match this.handshakes.poll_join_next(cx) {
                Poll::Ready(Some(Ok(Some(stream)))) => return Poll::Ready(Some(Ok(stream))),
                Poll::Ready(Some(_)) => {}
                Poll::Ready(None) if this.arriving.is_none() => return Poll::Ready(None),
                Poll::Ready(None) | Poll::Pending => return Poll::Pending,
            }
        }
    }
}

async fn shake<S>(credentials: Arc<Credentials>, socket: S, told: Arc<Mutex<Option<Instant>>>) -> Option<Stream<S>>
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
                    return Some(Stream(Inner::Tls { stream: Box::new(stream.into()), peer: Arc::new(peer) }));
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
    counter!(REFUSED, "reason" => reason).increment(1);
    tell(&told, reason, &why);
    if let Some(socket) = left {
        say_goodbye(socket).await;
    }
    None
}

fn tell(told: &Mutex<Option<Instant>>, reason: &str, why: &str) {
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
