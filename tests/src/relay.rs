//! Relays: one in front of each process of a cluster. They pass gRPC calls on, and lose or change replies as a test says.
//!
//! Whoever is given the [`Relays::cluster_file`] stays behind the relays: an address of a process in a reply is replaced by that of its relay,
//! which has as many digits. A lost reply is one that the process sent: the connections of all callers of its relay are cut in its place.

use crate::{bare, calls::CALL};
use bytes::Bytes;
use quarry::local::{LocalCluster, Member};
use std::{
    convert::Infallible,
    marker::PhantomData,
    net::Shutdown,
    path::PathBuf,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinHandle,
};
use tonic::{
    Request, Response, Status,
    body::Body,
    codegen::{BoxFuture, Service, http, tokio_stream},
    server::{Grpc, NamedService, UnaryService},
    transport::{Channel, Endpoint, Server},
};

/// What becomes of a reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It arrives.
    Passed,
    /// It was sent and does not arrive.
    Lost,
    /// Other bytes arrive.
    Changed(Bytes),
}

/// Decides the fate of a reply, by its method (`Grant`) and its body.
pub type Judge = dyn Fn(&str, &Bytes) -> Fate + Send + Sync;

/// A relay in front of each process of a cluster.
pub struct Relays {
    shared: Arc<Relayed>,
    listeners: Vec<TcpListener>,
    servers: Vec<JoinHandle<()>>,
    file: PathBuf,
}

#[derive(Default)]
struct Relayed {
    judge: Mutex<Option<Arc<Judge>>>,
    /// Addresses: of a process, and of the relay in front of it.
    names: Mutex<Vec<(String, String)>>,
}

impl Relays {
    /// Relays for so many processes, which are not known yet.
    ///
    /// # Panics
    /// If there are no ports.
    pub async fn reserve(processes: usize) -> Self {
        let mut listeners = Vec::new();
        let mut short = Vec::new();
        while listeners.len() < processes {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("there are ports");
            let five_digits = listener.local_addr().expect("it is bound").port() >= 10_000;
            // The others are kept until the end, so that they do not come again.
            if five_digits { listeners.push(listener) } else { short.push(listener) }
        }
        Self { shared: Arc::default(), listeners, servers: Vec::new(), file: PathBuf::new() }
    }

    /// Starts the relays of a cluster whose processes have not been started. Its data nodes find the meta nodes, and one another, through
    /// relays.
    ///
    /// # Panics
    /// If the cluster's files are not as expected.
    pub fn stand_before(&mut self, cluster: &LocalCluster) {
        let members = cluster.members();
        let listeners = std::mem::take(&mut self.listeners);
        assert_eq!(members.len(), listeners.len(), "a relay per process");
        let names: Vec<(String, String)> = members
            .iter()
            .zip(&listeners)
            .map(|(member, listener)| {
                let own = listener.local_addr().expect("it is bound").to_string();
                (cluster.address(*member), own)
            })
            .collect();
        assert!(names.iter().all(|(real, own)| real.len() == own.len()), "addresses are replaced in place: {names:?}");
        let file = std::fs::read_to_string(cluster.cluster_file()).expect("the cluster file is there");
        let behind = names.iter().fold(file, |text, (real, own)| text.replace(real, own));
        self.file = cluster.dir().join("relayed.toml");
        std::fs::write(&self.file, behind).expect("the cluster's folder can be written");
        for member in members.iter().filter(|member| matches!(member, Member::Data(_))) {
            let path = cluster.member_dir(*member).join("config.toml");
            let config = std::fs::read_to_string(&path).expect("the configuration is there");
            let changed = config.replace("cluster.toml", "relayed.toml");
            assert_ne!(config, changed, "a configuration names the cluster file");
            std::fs::write(&path, changed).expect("the configuration can be written");
        }
        for ((real, _), listener) in names.iter().zip(listeners) {
            self.servers.push(tokio::spawn(serve(Arc::clone(&self.shared), real.clone(), listener)));
        }
        *self.shared.names.lock().expect("nobody panics with it") = names;
    }

    /// For clients that are to stay behind the relays.
    #[must_use]
    pub fn cluster_file(&self) -> PathBuf {
        self.file.clone()
    }

    /// From now on `judge` decides.
    ///
    /// # Panics
    /// Never: nobody panics while the lock is held.
    pub fn judge(&self, judge: impl Fn(&str, &Bytes) -> Fate + Send + Sync + 'static) {
        *self.shared.judge.lock().expect("nobody panics with it") = Some(Arc::new(judge));
    }

    /// From now on all replies arrive as they are.
    ///
    /// # Panics
    /// Never: nobody panics while the lock is held.
    pub fn be_honest(&self) {
        *self.shared.judge.lock().expect("nobody panics with it") = None;
    }
}

impl Drop for Relays {
    fn drop(&mut self) {
        for server in &self.servers {
            server.abort();
        }
    }
}

impl Relayed {
    fn renamed(&self, bytes: &Bytes) -> Bytes {
        let mut bytes = bytes.to_vec();
        for (real, own) in &*self.names.lock().expect("nobody panics with it") {
            let mut from = 0;
            while let Some(at) = bytes[from..].windows(real.len()).position(|it| it == real.as_bytes()) {
                bytes[from + at..from + at + real.len()].copy_from_slice(own.as_bytes());
                from += at + real.len();
            }
        }
        bytes.into()
    }
}

async fn serve(shared: Arc<Relayed>, real: String, listener: TcpListener) {
    let (arrived, incoming) = mpsc::channel::<std::io::Result<TcpStream>>(64);
    let open: Arc<Mutex<Vec<std::net::TcpStream>>> = Arc::default();
    let endpoint = Endpoint::from_shared(format!("http://{real}")).expect("addresses of a cluster are host:port");
    let relay = Relay { shared, backend: endpoint.connect_timeout(CALL).connect_lazy(), open: Arc::clone(&open) };
    let accept = async move {
        while let Ok((stream, _)) = listener.accept().await {
            // Without it small replies wait for an acknowledgement.
            drop(stream.set_nodelay(true));
            let Ok(stream) = stream.into_std() else { continue };
            let Ok(handle) = stream.try_clone() else { continue };
            let Ok(stream) = TcpStream::from_std(stream) else { continue };
            {
                let mut open = open.lock().expect("nobody panics with it");
                open.retain(|it| it.peer_addr().is_ok());
                open.push(handle);
            }
            if arrived.send(Ok(stream)).await.is_err() {
                return;
            }
        }
    };
    let server = Server::builder()
        .add_service(Door::<Control>(relay.clone(), PhantomData))
        .add_service(Door::<Registry>(relay.clone(), PhantomData))
        .add_service(Door::<Admin>(relay.clone(), PhantomData))
        .add_service(Door::<DataNode>(relay, PhantomData))
        .serve_with_incoming(tokio_stream::StreamExt::map(Incoming(incoming), |it| it));
    tokio::join!(accept, async { server.await.expect("a relay serves until it is dropped") });
}

/// Connections that were accepted.
struct Incoming(mpsc::Receiver<std::io::Result<TcpStream>>);

impl tokio_stream::Stream for Incoming {
    type Item = std::io::Result<TcpStream>;
    fn poll_next(mut self: std::pin::Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context)
    }
}

#[derive(Clone)]
struct Relay {
    shared: Arc<Relayed>,
    backend: Channel,
    open: Arc<Mutex<Vec<std::net::TcpStream>>>,
}

impl Relay {
    async fn pass(self, method: http::uri::PathAndQuery, request: Request<Bytes>) -> Result<Response<Bytes>, Status> {
        let name = method.path().rsplit('/').next().unwrap_or_default().to_owned();
        let reply = match bare::pass(self.backend.clone(), method, request).await {
            Ok(reply) => reply.map(|body| self.shared.renamed(&body)),
            Err(status) => {
                let details = self.shared.renamed(&Bytes::copy_from_slice(status.details()));
                return Err(Status::with_details(status.code(), status.message(), details));
            }
        };
        let judge = self.shared.judge.lock().expect("nobody panics with it").clone();
        match judge.map_or(Fate::Passed, |judge| judge(&name, reply.get_ref())) {
            Fate::Passed => Ok(reply),
            Fate::Changed(body) => Ok(reply.map(|_| body)),
            Fate::Lost => {
                for stream in self.open.lock().expect("nobody panics with it").drain(..) {
                    // It may be closed already.
                    drop(stream.shutdown(Shutdown::Both));
                }
                Err(Status::unavailable("the reply was lost"))
            }
        }
    }
}

/// The service of a relay that goes by the name of `N`.
struct Door<N>(Relay, PhantomData<fn() -> N>);

impl<N> Clone for Door<N> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), PhantomData)
    }
}

trait Named {
    const NAME: &'static str;
}

macro_rules! named {
    ($($name:ident $text:literal),*) => {
        $(struct $name;
        impl Named for $name {
            const NAME: &'static str = $text;
        })*
    };
}
named!(Control "quarry.v1.Control", Registry "quarry.v1.Registry", Admin "quarry.v1.Admin", DataNode "quarry.v1.DataNode");

impl<N: Named> NamedService for Door<N> {
    const NAME: &'static str = N::NAME;
}

impl<N: Named> Service<http::Request<Body>> for Door<N> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<http::Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let method = http::uri::PathAndQuery::try_from(request.uri().path()).expect("it was one");
        let relay = self.0.clone();
        Box::pin(async move { Ok(Grpc::new(bare::Bare).unary(Passing { relay, method }, request).await) })
    }
}

struct Passing {
    relay: Relay,
    method: http::uri::PathAndQuery,
}

impl UnaryService<Bytes> for Passing {
    type Response = Bytes;
    type Future = BoxFuture<Response<Bytes>, Status>;

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        Box::pin(self.relay.clone().pass(self.method.clone(), request))
    }
}
