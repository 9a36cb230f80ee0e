//! The admin port of a process: `/metrics`, `/livez`, `/readyz`, `/status` over HTTP; on a meta node also the status page.
//!
//! Serves few at a time, and each for a short time (`few.rs`). It is there before the node is, so that a supervisor can tell a process that recovers from one that hangs. Reading changes nothing.
//! Alive: the process answers and its node has not failed for good. Ready: the node has recovered and serves.

use crate::{exit::Failure, few, page};
use axum::{
    Router,
    extract::State,
    http::{
        StatusCode,
        header::{CACHE_CONTROL, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
    routing::get,
};
use parking_lot::RwLock;
use quarry::{
    build::VERSION,
    metrics::{Exporter, UPKEEP},
};
use quarry_client::NodeId;
use quarry_datanode::DataProbe;
use quarry_meta::MetaProbe;
use quarry_trust::Trust;
use serde_json::{Value, json};
use std::{net::SocketAddr, path::Path, sync::Arc};
use tokio::{
    net::TcpListener,
    task::JoinSet,
    time::{Instant, interval},
};

/// How the text format of Prometheus is called.
const EXPOSITION: &str = "text/plain; version=0.0.4; charset=utf-8";
const INDEX: &str = "/metrics  metrics, for Prometheus\n/livez    200 while the process lives\n/readyz   200 while it serves\n/status   what it is and knows, as JSON\n";

/// The role that has a status page.
pub(crate) const META: &str = "meta";

/// A node that can be asked.
pub(crate) enum Probe {
    /// With what it proves who it is to the other meta nodes, which its page asks.
    Meta(MetaProbe, Trust),
    Data(DataProbe),
}

impl Probe {
    fn ready(&self) -> Result<(), String> {
        match self {
            Self::Meta(probe, _) => probe.ready(),
            Self::Data(probe) => probe.ready(),
        }
    }
    fn failed(&self) -> Option<String> {
        match self {
            Self::Meta(probe, _) => probe.failed(),
            // A data node has nothing that can fail for good while it lives.
            Self::Data(_) => None,
        }
    }
    fn record_metrics(&self) {
        match self {
            Self::Meta(probe, _) => probe.record_metrics(),
            Self::Data(probe) => probe.record_metrics(),
        }
    }
    fn status(&self) -> Value {
        match self {
            Self::Meta(probe, _) => {
                let status = probe.status();
                let group = |it: &quarry_proto::v1::GroupStatus| {
                    json!({
                        "group": it.group, "role": it.role, "term": it.term, "leader": it.leader, "members": it.members,
                        "last_log": it.last_log, "committed": it.committed, "applied": it.applied, "snapshot": it.snapshot,
                        "log_time_ms": it.log_time_ms,
                    })
                };
                let node = |it: &quarry_proto::v1::DataNodeStatus| json!({ "node": it.node, "address": it.address, "alive": it.alive, "revoked": it.revoked, "silent_ms": it.silent_ms });
                json!({
                    "generation": status.generation,
                    "groups": status.groups.iter().map(group).collect::<Vec<_>>(),
                    "data_nodes": status.data_nodes.iter().map(node).collect::<Vec<_>>(),
                })
            }
            Self::Data(probe) => {
                let status = probe.status();
                json!({ "regions": status.regions.len(), "lanes": status.lanes, "claims_open": status.claims_open })
            }
        }
    }
}

/// A node's word on how it is, for whoever tells others.
#[derive(Clone)]
pub(crate) struct Health(Arc<Shown>);

impl Health {
    /// Whether it serves, or why not.
    pub(crate) fn ready(&self) -> Result<(), String> {
        self.0.ready()
    }
    /// Whether it has not failed for good, or how it did.
    pub(crate) fn alive(&self) -> Result<(), String> {
        self.0.alive()
    }
    /// Whether it runs and belongs to no cluster yet.
    pub(crate) fn is_blank(&self) -> bool {
        matches!(&*self.0.stage.read(), Stage::Running(Probe::Meta(probe, _)) if !probe.belongs())
    }
}

/// What the process is doing.
enum Stage {
    Starting,
    Running(Probe),
}

struct Shown {
    role: &'static str,
    node: NodeId,
    began: Instant,
    exporter: Exporter,
    stage: RwLock<Stage>,
    cluster: page::Gathered,
}

impl Shown {
    /// All metrics, as they are now.
    fn metrics(&self) -> String {
        if let Stage::Running(probe) = &*self.stage.read() {
            probe.record_metrics();
        }
        self.exporter.render(self.ready().is_ok())
    }
    /// What the process says of itself, as JSON.
    fn page(&self) -> String {
        let (ready, alive) = (self.ready(), self.alive());
        let mut page = json!({
            "role": self.role,
            "node": self.node.0,
            "version": VERSION,
            "uptime_seconds": self.began.elapsed().as_secs(),
            "alive": alive.is_ok(),
            "ready": ready.is_ok(),
            "why_not": alive.err().or_else(|| ready.err()),
        });
        if let Stage::Running(probe) = &*self.stage.read()
            && let (Value::Object(page), Value::Object(more)) = (&mut page, probe.status())
        {
            page.extend(more);
        }
        format!("{page:#}\n")
    }
    fn ready(&self) -> Result<(), String> {
        match &*self.stage.read() {
            Stage::Starting => Err("the node recovers".to_owned()),
            Stage::Running(probe) => probe.ready(),
        }
    }
    fn alive(&self) -> Result<(), String> {
        match &*self.stage.read() {
            Stage::Starting => Ok(()),
            Stage::Running(probe) => probe.failed().map_or(Ok(()), Err),
        }
    }
}

/// A running admin port. It ends when this is dropped.
pub(crate) struct AdminPort {
    address: SocketAddr,
    shown: Arc<Shown>,
    _work: JoinSet<()>,
}

impl AdminPort {
    /// Opens the port; installs the recorder of this process.
    pub(crate) async fn open(
        role: &'static str,
        node: NodeId,
        listen: SocketAddr,
        data_dir: &Path,
    ) -> Result<Self, Failure> {
        let failed = |wrong: &dyn ToString| Failure::error(format!("admin.listen {listen}: {}", wrong.to_string()));
        let listener = TcpListener::bind(listen).await.map_err(|wrong| failed(&wrong))?;
        let address = listener.local_addr().map_err(|wrong| failed(&wrong))?;
        let exporter = Exporter::install(role, node, data_dir.to_owned()).map_err(Failure::error)?;
        let shown = Shown {
            role,
            node,
            began: Instant::now(),
            exporter,
            stage: RwLock::new(Stage::Starting),
            cluster: page::Gathered::default(),
        };
        let shown = Arc::new(shown);
        let front = if role == META {
            page::router().route("/cluster.json", get(cluster))
        } else {
            Router::new().route("/", get(|| async { INDEX }))
        };
        let router = front
            .route("/metrics", get(metrics))
            .route("/livez", get(|State(shown): State<Arc<Shown>>| async move { said(shown.alive()) }))
            .route("/readyz", get(|State(shown): State<Arc<Shown>>| async move { said(shown.ready()) }))
            .route("/status", get(status))
            .with_state(Arc::clone(&shown));
        let mut work = JoinSet::new();
        work.spawn(few::serve(listener, router));
        let upkeep = shown.exporter.clone();
        work.spawn(async move {
            let mut ticks = interval(UPKEEP);
            loop {
                ticks.tick().await;
                upkeep.upkeep();
            }
        });
        Ok(Self { address, shown, _work: work })
    }

    /// Where it listens.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// `host:port` at which others reach it, when this host is called as in `advertise`.
    pub(crate) fn advertised(&self, advertise: Option<&str>) -> String {
        let host = advertise.and_then(|address| address.rsplit_once(':')).map(|(host, _)| host);
        match host {
            Some(host) if self.address.ip().is_unspecified() => format!("{host}:{}", self.address.port()),
            _ => self.address.to_string(),
        }
    }

    /// How the node is, for as long as anybody wants to know.
    pub(crate) fn health(&self) -> Health {
        Health(Arc::clone(&self.shown))
    }

    /// The node has started.
    pub(crate) fn running(&self, probe: Probe) {
        *self.shown.stage.write() = Stage::Running(probe);
    }
}

fn said(result: Result<(), String>) -> Response {
    match result {
        Ok(()) => (StatusCode::OK, "ok\n").into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

async fn metrics(State(shown): State<Arc<Shown>>) -> Response {
    ([(CONTENT_TYPE, EXPOSITION)], aside(move || shown.metrics()).await).into_response()
}

/// The whole cluster, as this meta node can find it out.
async fn cluster(State(shown): State<Arc<Shown>>) -> Response {
    let asked = match &*shown.stage.read() {
        Stage::Running(Probe::Meta(probe, trust)) => Some((probe.clone(), trust.clone())),
        _ => None,
    };
    let Some((probe, trust)) = asked else { return said(Err("the node recovers".to_owned())) };
    let counted = Arc::clone(&shown);
    let page = shown.cluster.page(&probe, &trust, move || counted.metrics()).await;
    ([(CONTENT_TYPE, "application/json"), (CACHE_CONTROL, "no-store")], page.to_string()).into_response()
}

/// Counting walks over all that a meta node knows: it is not for a thread that others wait for.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.expect("counting has no reason to panic")
}

async fn status(State(shown): State<Arc<Shown>>) -> Response {
    ([(CONTENT_TYPE, "application/json")], aside(move || shown.page()).await).into_response()
}
