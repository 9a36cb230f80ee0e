//! A connection, with or without TLS, and who is at its other end.

use crate::{dial::Troubles, identity::Identity};
use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::TlsStream;
use tonic::transport::server::Connected;

/// The type of a TLS record that carries an alert.
const ALERT: u8 = 0x15;

/// A connection to another process.
#[derive(Debug)]
pub struct Stream<S>(pub(crate) Inner<S>);

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

/// What is known of a connection, to be found in the extensions of each of its requests.
#[derive(Clone, Debug)]
pub struct Connection<I> {
    /// Who is at the other end, if that was proved.
    pub peer: Option<Arc<Identity>>,
    /// What the socket says.
    pub socket: I,
}

impl<S: Connected> Connected for Stream<S> {
    type ConnectInfo = Connection<S::ConnectInfo>;

    fn connect_info(&self) -> Self::ConnectInfo {
        match &self.0 {
            Inner::Plain { socket, .. } => Connection { peer: None, socket: socket.connect_info() },
            Inner::Tls { stream, peer } => {
                Connection { peer: Some(Arc::clone(peer)), socket: stream.get_ref().0.connect_info() }
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Stream<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().0 {
            Inner::Plain { socket, expects_http: None } => Pin::new(socket).poll_read(cx, buf),
            Inner::Plain { socket, expects_http } => {
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
            Inner::Tls { stream, .. } => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Stream<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().0 {
            Inner::Plain { socket, .. } => Pin::new(socket).poll_write(cx, buf),
            Inner::Tls { stream, .. } => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().0 {
            Inner::Plain { socket, .. } => Pin::new(socket).poll_write_vectored(cx, bufs),
            Inner::Tls { stream, .. } => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.0 {
            Inner::Plain { socket, .. } => socket.is_write_vectored(),
            Inner::Tls { stream, .. } => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().0 {
            Inner::Plain { socket, .. } => Pin::new(socket).poll_flush(cx),
            Inner::Tls { stream, .. } => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().0 {
            Inner::Plain { socket, .. } => Pin::new(socket).poll_shutdown(cx),
            Inner::Tls { stream, .. } => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
