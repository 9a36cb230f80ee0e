//! Connecting: reaches a server, makes sure that it is the one that is meant, and learns whether it takes us.
//!
//! In TLS 1.3 a client is done before its certificate was looked at. So a connection counts as made only when the server's first bytes came
//! (its settings, which every HTTP/2 server sends at once): a server that does not take our certificate answers with an alert instead, and
//! that is the error of the connection, not a riddle in the middle of the first call.

use crate::{
    credentials::Credentials,
    identity::Identity,
    stream::{Inner, Stream},
};
use futures::future::BoxFuture;
use http::Uri;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use quarry_wire::{certificate::Role, ids::NodeId};
use rustls::{AlertDescription, CertificateError, pki_types::ServerName};
use std::{
    collections::BTreeMap,
    fmt, io,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{io::AsyncBufReadExt as _, net::TcpStream, time::timeout};
use tokio_rustls::TlsConnector;
use tonic::{Code, Status};

/// How long reaching a server and agreeing with it may take, if the endpoint sets no shorter time.
const DIAL_MAX: Duration = Duration::from_secs(5);
/// Addresses whose last trouble is remembered; there are fewer servers in a cluster.
const TROUBLES_MAX: usize = 4096;

/// Who must be at the other end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Expect {
    /// None: either kind of node.
    role: Option<Role>,
    node: Option<NodeId>,
}

impl Expect {
    /// Any meta node.
    pub const META: Self = Self { role: Some(Role::Meta), node: None };
    /// Any data node.
    pub const DATA_NODE: Self = Self { role: Some(Role::DataNode), node: None };
    /// Any node of the cluster.
    pub const ANY: Self = Self { role: None, node: None };

    /// This meta node.
    #[must_use]
    pub const fn meta(node: NodeId) -> Self {
        Self { role: Some(Role::Meta), node: Some(node) }
    }

    /// This data node.
    #[must_use]
    pub const fn data_node(node: NodeId) -> Self {
        Self { role: Some(Role::DataNode), node: Some(node) }
    }

    fn is_met_by(self, identity: &Identity) -> bool {
        let Some(role) = self.role else { return true };
        identity.is(role) && self.node.is_none_or(|node| identity.node_as(role) == Some(node))
    }
}

impl fmt::Display for Expect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.role, self.node) {
            (None, _) => f.write_str("a node"),
            (Some(role), None) => write!(f, "a {role}"),
            (Some(role), Some(node)) => write!(f, "the {role} {}", node.0),
        }
    }
}

/// Why a connection was not made.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// Nobody answers there.
    #[error("{0}")]
    Unreachable(#[from] io::Error),
    /// It took too long.
    #[error("no connection within {0:?}")]
    Late(Duration),
    /// One side does not trust the other.
    #[error("not trusted: {0}")]
    Untrusted(String),
}

/// Which servers could not be trusted, or did not trust us, when they were last reached.
#[derive(Debug, Default)]
pub(crate) struct Troubles(Mutex<BTreeMap<String, String>>);

impl Troubles {
    pub(crate) fn note(&self, address: &str, why: Option<&str>) {
        let mut troubles = self.0.lock();
        let Some(why) = why else {
            troubles.remove(address);
            return;
        };
        if troubles.len() >= TROUBLES_MAX {
            troubles.clear();
        }
        troubles.insert(address.to_owned(), why.to_owned());
    }

    /// Whether a call to `address` that ended so failed before it was sent, because the connection was not trusted; then why.
    pub(crate) fn distrust(&self, address: &str, status: &Status) -> Option<String> {
        let of_transport =
            matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled);
        if !of_transport || !status.details().is_empty() {
            return None;
        }
        // A call on an older connection may have failed in another way meanwhile, after it was sent: the status must tell of this trouble.
        let why = self.0.lock().get(address).cloned()?;
        let mut told = status.message().contains(&why);
        let mut source = std::error::Error::source(status);
        while let Some(error) = source.filter(|_| !told) {
            told = error.to_string().contains(&why);
            source = error.source();
        }
        told.then_some(why)
    }
}

/// Makes connections to one server: the connector of a tonic endpoint.
#[derive(Clone)]
pub struct Connector {
    pub(crate) credentials: Option<Arc<Credentials>>,
    pub(crate) troubles: Arc<Troubles>,
    pub(crate) expect: Expect,
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector").field("expect", &self.expect).finish_non_exhaustive()
    }
}

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<Stream<TcpStream>>;
    type Error = DialError;
    type Future = BoxFuture<'static, Result<Self::Response, DialError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), DialError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let dial = self.clone();
        Box::pin(async move {
            let address = uri.authority().map(ToString::to_string).unwrap_or_default();
            let dialled = timeout(DIAL_MAX, dial.reach(&address)).await.unwrap_or(Err(DialError::Late(DIAL_MAX)));
            let why = match &dialled {
                Err(DialError::Untrusted(why)) => Some(why.as_str()),
                Ok(_) | Err(_) => None,
            };
            dial.troubles.note(&address, why);
            dialled.map(TokioIo::new)
        })
    }
}

impl Connector {
    async fn reach(&self, address: &str) -> Result<Stream<TcpStream>, DialError> {
        let socket = TcpStream::connect(address).await?;
        socket.set_nodelay(true)?;
        let Some(credentials) = &self.credentials else {
            let expects_http = Some((Arc::clone(&self.troubles), address.to_owned()));
            return Ok(Stream { inner: Inner::Plain { socket, expects_http }, watch: None });
        };
        let own = credentials.current();
        // Servers are known by their identities, whatever they are called.
        let nobody = ServerName::try_from("quarry").expect("it is a name of one label");
        let turned = |error: io::Error| self.explain(address, credentials, error);
        let mut stream = TlsConnector::from(Arc::clone(&own.client)).connect(nobody, socket).await.map_err(turned)?;
        let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let peer = shown.map(crate::anchor::identity_of);
        let Some(Ok(peer)) = peer else {
            return Err(DialError::Untrusted(format!("{address} showed no certificate that names it")));
        };
        if !self.expect.is_met_by(&peer) {
            return Err(DialError::Untrusted(format!("at {address} {} was expected, found {peer}", self.expect)));
        }
        let first = stream.fill_buf().await.map_err(turned)?;
        if first.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed by the server at once").into());
        }
        Ok(Stream { inner: Inner::Tls { stream: Box::new(stream.into()), peer: Arc::new(peer) }, watch: None })
    }

    /// What a failed handshake means.
    fn explain(&self, address: &str, credentials: &Credentials, error: io::Error) -> DialError {
        let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) else {
            return DialError::Unreachable(error);
        };
        let cluster = credentials.cluster();
        let file = credentials.path().display();
        let why = match tls {
            rustls::Error::InvalidCertificate(wrong) => {
                let what = match wrong {
                    CertificateError::Expired | CertificateError::ExpiredContext { .. } => "has expired".to_owned(),
                    CertificateError::UnknownIssuer => {
                        format!("is of another root, or of another cluster than {cluster}")
                    }
                    CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                        "is a client's, not a node's".to_owned()
                    }
                    other => format!("is not believed: {other}"),
                };
                format!("the certificate of {address} {what}")
            }
            rustls::Error::AlertReceived(alert) => {
                let what = match alert {
                    AlertDescription::CertificateExpired => "they have expired".to_owned(),
                    AlertDescription::CertificateRequired => "there is no certificate in them".to_owned(),
                    AlertDescription::UnknownCA => "they are of another root, or of another cluster".to_owned(),
                    other => format!("{other:?}"),
                };
                format!("{address} does not take the credentials {file}: {what}; quarry keys makes others")
            }
            rustls::Error::InvalidMessage(_) => {
                format!("{address} does not speak TLS: it runs with tls.mode = \"off\", or is no process of Quarry")
            }
            other => format!("no agreement with {address}: {other}"),
        };
        DialError::Untrusted(why)
    }
}
