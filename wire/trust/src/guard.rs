//! The guard of a server: lets a call through only if the table lets a role of its caller make it.

use crate::{identity::Identity, stream::Connection, table::callers};
use http::Extensions;
use quarry_proto::{refusal::Refusal, v1};
use quarry_wire::{
    certificate::Role,
    ids::{NodeId, WriterId},
};
use std::{
    future::{Ready, ready},
    sync::Arc,
    task::{Context, Poll},
};
use tonic::{Status, transport::server::TcpConnectInfo};
use tower::{Layer, Service};

/// Who makes a call. In the extensions of every request that passed a [`Guard`].
#[derive(Clone, Debug, Default)]
pub enum Caller {
    /// Nobody knows: this server runs without TLS.
    #[default]
    Unchecked,
    /// Proved by a certificate.
    Known(Arc<Identity>),
}

impl Caller {
    /// The caller of the request with these extensions.
    #[must_use]
    pub fn of(extensions: &Extensions) -> Self {
        extensions.get::<Self>().cloned().unwrap_or_default()
    }

    /// The node that calls in this role, if a certificate proves that.
    #[must_use]
    pub fn node_as(&self, role: Role) -> Option<NodeId> {
        match self {
            Self::Known(identity) => identity.node_as(role),
            Self::Unchecked => None,
        }
    }

    /// Refuses a call about another node than the caller's own.
    ///
    /// # Errors
    /// [`Refusal::Forbidden`].
    pub fn is_node(&self, role: Role, node: NodeId, method: &str) -> Result<(), Refusal> {
        match self {
            Self::Known(identity) if identity.node_as(role) != Some(node) => {
                Err(forbidden(method, identity, vec![format!("the {role} {node} itself")]))
            }
            Self::Known(_) | Self::Unchecked => Ok(()),
        }
    }

    /// Refuses a call in the name of a writer that is not the caller's own.
    ///
    /// # Errors
    /// [`Refusal::Forbidden`].
    pub fn is_writer(&self, writer: WriterId, method: &str) -> Result<(), Refusal> {
        match self {
            Self::Known(identity) if !identity.owns(writer) => {
                Err(forbidden(method, identity, vec![format!("the client that writer {writer} belongs to")]))
            }
            Self::Known(_) | Self::Unchecked => Ok(()),
        }
    }
}

fn forbidden(method: &str, found: &Identity, expected: Vec<String>) -> Refusal {
    Refusal::Forbidden(v1::Forbidden { method: method.to_owned(), found: found.to_string(), expected })
}

/// Guards all services of a server. A layer.
#[derive(Clone, Copy, Debug)]
pub struct Guard {
    pub(crate) mutual: bool,
}

impl<S> Layer<S> for Guard {
    type Service = Guarded<S>;
    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded { inner, mutual: self.mutual }
    }
}

/// A server that is guarded.
#[derive(Clone, Debug)]
pub struct Guarded<S> {
    inner: S,
    mutual: bool,
}

impl<S, In, Out> Service<http::Request<In>> for Guarded<S>
where
    S: Service<http::Request<In>, Response = http::Response<Out>>,
    Out: Default,
{
    type Response = http::Response<Out>;
    type Error = S::Error;
    type Future = futures::future::Either<S::Future, Ready<Result<Self::Response, S::Error>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<In>) -> Self::Future {
        match self.admit(&request) {
            Ok(caller) => {
                request.extensions_mut().insert(caller);
                if let Some(socket) = socket(request.extensions()) {
                    request.extensions_mut().insert(socket);
                }
                futures::future::Either::Left(self.inner.call(request))
            }
            Err(status) => futures::future::Either::Right(ready(Ok(status.into_http()))),
        }
    }
}

fn socket(extensions: &Extensions) -> Option<TcpConnectInfo> {
    extensions.get::<Connection<TcpConnectInfo>>().map(|it| it.socket.clone())
}

impl<S> Guarded<S> {
    fn admit<In>(&self, request: &http::Request<In>) -> Result<Caller, Status> {
        let connection = request.extensions().get::<Connection<TcpConnectInfo>>();
        if let Some(refusal) = connection.and_then(|it| it.line.as_ref()?.turned_away.clone()) {
            return Err(refusal.into());
        }
        if !self.mutual {
            return Ok(Caller::Unchecked);
        }
        let path = request.uri().path();
        let Some(roles) = callers(path) else {
            return Err(Status::unimplemented(format!("there is no call {path}")));
        };
        let expected = || roles.iter().map(ToString::to_string).collect();
        let Some(peer) = connection.and_then(|it| it.peer.clone()) else {
            let found = "nobody: the connection shows no certificate".to_owned();
            return Err(
                Refusal::Forbidden(v1::Forbidden { method: path.to_owned(), found, expected: expected() }).into()
            );
        };
        if roles.iter().any(|role| peer.is(*role)) {
            return Ok(Caller::Known(peer));
        }
        Err(forbidden(path, &peer, expected()).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_wire::ids::ClusterUuid;
    use tower::{ServiceExt as _, service_fn};

    const CLUSTER: ClusterUuid = ClusterUuid([3; 16]);

    async fn call(mutual: bool, path: &str, peer: Option<Identity>) -> Result<Caller, Status> {
        let server = service_fn(|request: http::Request<()>| async move {
            let caller = request.extensions().get::<Caller>().cloned();
            Ok::<_, std::convert::Infallible>(http::Response::new(caller))
        });
        let mut request = http::Request::builder().uri(path).body(()).unwrap();
        let socket = TcpConnectInfo { local_addr: None, remote_addr: None };
        request.extensions_mut().insert(Connection { peer: peer.map(Arc::new), socket, line: None });
        let answer = Guard { mutual }.layer(server).oneshot(request).await.unwrap();
        match Status::from_header_map(answer.headers()) {
            Some(status) => Err(status),
            None => Ok(answer.into_body().expect("the guard says who calls")),
        }
    }

    fn client(role: Role) -> Identity {
        Identity::client(CLUSTER, &[role], "x").unwrap()
    }

    #[tokio::test]
    async fn a_call_passes_only_with_a_role_that_may_make_it_and_says_both_sides_otherwise() {
        let grant = "/quarry.v1.Control/Grant";
        assert!(matches!(call(true, grant, Some(client(Role::Writer))).await, Ok(Caller::Known(_))));
        for other in [Some(client(Role::Reader)), Some(client(Role::Admin)), None] {
            let status = call(true, grant, other.clone()).await.unwrap_err();
            let Some(Refusal::Forbidden(it)) = Refusal::from_status(&status) else { panic!("{status:?}") };
            assert_eq!((it.method.as_str(), it.expected), (grant, vec!["writer".to_owned()]));
            assert!(other.is_none_or(|other| it.found == other.to_string()), "{}", it.found);
        }
        let both = Identity::client(CLUSTER, &[Role::Reader, Role::Writer], "x").unwrap();
        assert!(call(true, grant, Some(both)).await.is_ok());
    }

    #[tokio::test]
    async fn what_no_table_lists_is_called_by_nobody_and_without_tls_nobody_is_asked() {
        let unlisted = "/quarry.v1.Control/Frobnicate";
        let status = call(true, unlisted, Some(client(Role::Admin))).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unimplemented);
        assert!(matches!(call(false, unlisted, None).await, Ok(Caller::Unchecked)));
    }

    #[test]
    fn a_node_speaks_for_itself_alone_and_a_writer_in_its_own_name() {
        let known = |identity| Caller::Known(Arc::new(identity));
        let node = known(Identity::node(CLUSTER, Role::DataNode, NodeId(101)).unwrap());
        assert!(node.is_node(Role::DataNode, NodeId(101), "Heartbeat").is_ok());
        assert!(matches!(node.is_node(Role::DataNode, NodeId(102), "Heartbeat"), Err(Refusal::Forbidden(_))));
        assert!(node.is_node(Role::Meta, NodeId(101), "Link").is_err(), "an id in another role is another node");
        let writer = client(Role::Writer);
        let own = WriterId::marked([1; 8], writer.mark());
        assert!(known(writer.clone()).is_writer(own, "Arm").is_ok());
        assert!(known(writer).is_writer(WriterId::anonymous([1; 8]), "Arm").is_err());
        assert!(Caller::Unchecked.is_writer(WriterId::anonymous([1; 8]), "Arm").is_ok());
    }
}
