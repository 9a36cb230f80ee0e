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
