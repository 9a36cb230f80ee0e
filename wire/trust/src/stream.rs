//! A connection, with or without TLS, and who is at its other end.
//!
//! One that a server let in is watched: it ends if its client does not begin to speak, or leaves an answer where it is for too long.

use crate::{
    dial::Troubles,
    identity::Identity,
    limits::{FAREWELL_MAX, HELLO_MAX, REPLY_LOOK, REPLY_MAX},
    seats::{CUT, Line, Seat},
};
use metrics::counter;
use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};
use tokio_rustls::TlsStream;
use tonic::transport::server::Connected;

/// The type of a TLS record that carries an alert.
const ALERT: u8 = 0x15;

/// What a client of HTTP/2 says first: 24 bytes, and the head of a frame with its settings.
const HELLO_BYTES: usize = 24 + 9;

/// A connection to another process.
#[derive(Debug)]
pub struct Stream<S> {
    pub(crate) inner: Inner<S>,
    /// Of a connection that was accepted.
    pub(crate) watch: Option<Box<Watch>>,
}

/// Watches over a connection that was let in.
#[derive(Debug)]
pub(crate) struct Watch {
    seat: Seat,
    /// When it is looked at next.
    next: Pin<Box<Sleep>>,
    /// Bytes of the client's hello that came.
    heard: usize,
}

impl Watch {
    pub(crate) fn new(seat: Seat) -> Self {
        let first = if seat.line.turned_away.is_some() { FAREWELL_MAX } else { HELLO_MAX };
        Self { seat, next: Box::pin(sleep(first)), heard: 0 }
    }

    /// Fails once the client has been too slow, or has been told that there is no room for it.
    fn poll(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        while self.next.as_mut().poll(cx).is_ready() {
            if self.seat.line.turned_away.is_some() {
                return Err(io::Error::new(io::ErrorKind::ConnectionRefused, "there is no room for this connection"));
            }
            let cut = |why, what| {
                counter!(CUT, "why" => why).increment(1);
                Err(io::Error::new(io::ErrorKind::TimedOut, what))
            };
            if self.heard < HELLO_BYTES {
                return cut("hello", "the client did not begin to speak HTTP/2");
            }
            if self.seat.line.is_slow(REPLY_MAX) {
                return cut("reply", "the client did not take an answer");
            }
            self.next.as_mut().reset(Instant::now() + REPLY_LOOK);
        }
        Ok(())
    }
}

impl<S> Stream<S> {
    fn watch(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        self.watch.as_mut().map_or(Ok(()), |watch| watch.poll(cx))
    }
}

#[derive(Debug)]
pub(crate) enum Inner<S> {
    Plain {
        socket: S,
        /// Until the first byte came: whom to tell if the other side speaks TLS.
        expects_http: Option<(Arc<Troubles>, String)>,
    },
    Tls {
        stream: Box<TlsStream<S>>,
        peer: Arc<Identity>,
    },
}

impl<S> Inner<S> {
    /// Who is at the other end, if that was proved.
    pub(crate) fn peer(&self) -> Option<&Arc<Identity>> {
        match self {
            Self::Plain { .. } => None,
            Self::Tls { peer, .. } => Some(peer),
        }
    }
}

/// What is known of a connection, to be found in the extensions of each of its requests.
#[derive(Clone, Debug)]
pub struct Connection<I> {
    /// Who is at the other end, if that was proved.
    pub peer: Option<Arc<Identity>>,
    /// What the socket says.
    pub socket: I,
    pub(crate) line: Option<Arc<Line>>,
}

impl<S: Connected> Connected for Stream<S> {
    type ConnectInfo = Connection<S::ConnectInfo>;

    fn connect_info(&self) -> Self::ConnectInfo {
        let socket = match &self.inner {
            Inner::Plain { socket, .. } => socket.connect_info(),
            Inner::Tls { stream, .. } => stream.get_ref().0.connect_info(),
        };
        let line = self.watch.as_ref().map(|watch| Arc::clone(&watch.seat.line));
        Connection { peer: self.inner.peer().cloned(), socket, line }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Inner<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain { socket, expects_http: None } => Pin::new(socket).poll_read(cx, buf),
            Self::Plain { socket, expects_http } => {
                let before = buf.filled().len();
                ready!(Pin::new(socket).poll_read(cx, buf))?;
                let first = buf.filled().get(before).copied();
                if let Some((troubles, address)) = expects_http.take()
                    && first == Some(ALERT)
                {
                    let why = format!(
                        "{address} speaks TLS and this side does not: name credentials, which quarry keys makes"
                    );
                    troubles.note(&address, Some(&why));
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, why)));
                }
                Poll::Ready(Ok(()))
            }
            Self::Tls { stream, .. } => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Stream<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.watch(cx)?;
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.inner).poll_read(cx, buf))?;
        if let Some(watch) = &mut this.watch {
            watch.heard = watch.heard.saturating_add(buf.filled().len() - before);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Stream<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.watch(cx)?;
        match &mut this.inner {
            Inner::Plain { socket, .. } => Pin::new(socket).poll_write(cx, buf),
            Inner::Tls { stream, .. } => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.watch(cx)?;
        match &mut this.inner {
            Inner::Plain { socket, .. } => Pin::new(socket).poll_write_vectored(cx, bufs),
            Inner::Tls { stream, .. } => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.inner {
            Inner::Plain { socket, .. } => socket.is_write_vectored(),
            Inner::Tls { stream, .. } => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.watch(cx)?;
        match &mut this.inner {
            Inner::Plain { socket, .. } => Pin::new(socket).poll_flush(cx),
            Inner::Tls { stream, .. } => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        match &mut this.inner {
            Inner::Plain { socket, .. } => Pin::new(socket).poll_shutdown(cx),
            Inner::Tls { stream, .. } => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
