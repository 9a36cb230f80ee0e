//! etcd on this host, for comparison: three members as processes, their data on the disk that Quarry's meta nodes use.
//!
//! Each member runs as its defaults have it but for heartbeats and elections, which are Quarry's. Callers speak native gRPC to the leader, each
//! over a connection of its own; without TLS, which is to etcd's advantage.

mod messages;

use super::{
    child::{Served, free_ports},
    error::BenchError,
    meta::{LabError, probe::Used},
};
use bytes::Bytes;
use messages::{Operation, Put, PutReply, Status, StatusReply, Txn, TxnReply};
use std::{
    fs::{self, File},
    io,
    path::Path,
    process::Stdio,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};
use tokio::time::Instant;
use tonic::{
    Request,
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

/// How long the members may take to have a leader.
const READY: Duration = Duration::from_secs(30);
/// How long any one call may take.
const CALL: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(50);
const MEMBERS: usize = 3;

/// Three members of ours, ended when this is dropped.
#[derive(Debug)]
pub(super) struct Etcd {
    members: Vec<Served>,
    /// Where clients reach the leader.
    leader: String,
    version: String,
    /// Callers so far.
    callers: AtomicU32,
}

impl Etcd {
    /// Starts it with its data below `dir`.
    ///
    /// # Errors
    /// [`BenchError::Etcd`] if it is not installed or finds no leader.
    pub(super) async fn start(dir: &Path) -> Result<Self, BenchError> {
        let dir = dir.join("etcd");
        fs::create_dir_all(&dir).map_err(|source| BenchError::Folder { path: dir.clone(), source })?;
        let ports = free_ports(2 * MEMBERS).map_err(BenchError::io("ports for etcd"))?;
        let (clients, peers) = ports.split_at(MEMBERS);
        let url = |address| format!("http://{address}");
        let names: Vec<String> = (1..=MEMBERS).map(|number| format!("member-{number}")).collect();
        let all: Vec<String> = names.iter().zip(peers).map(|(name, peer)| format!("{name}={}", url(peer))).collect();
        let all = all.join(",");
        let mut members = Vec::with_capacity(MEMBERS);
        for (name, (client, peer)) in names.iter().zip(clients.iter().zip(peers)) {
            let (client, peer, data) = (url(client), url(peer), dir.join(name));
            let log = dir.join(format!("{name}.log"));
            let output = File::create(&log).map_err(|source| BenchError::Folder { path: log, source })?;
            let data = data.to_string_lossy();
            let options = [
                ("--name", name.as_str()),
                ("--data-dir", &*data),
                ("--listen-client-urls", &*client),
                ("--advertise-client-urls", &*client),
                ("--listen-peer-urls", &*peer),
                ("--initial-advertise-peer-urls", &*peer),
                ("--initial-cluster", &*all),
                ("--initial-cluster-state", "new"),
                ("--heartbeat-interval", "200"),
                ("--election-timeout", "1200"),
                ("--logger", "zap"),
                ("--log-outputs", "stdout"),
            ];
            let arguments = options.into_iter().flat_map(|(option, value)| [option, value]);
            members
                .push(Served::start("etcd", arguments, Stdio::from(output)).map_err(BenchError::io("setpriv etcd"))?);
        }
        let mut etcd = Self { members, leader: String::new(), version: String::new(), callers: AtomicU32::new(0) };
        let until = Instant::now() + READY;
        loop {
            for client in clients {
                let address = url(client);
                let Ok(reply) = status(&address).await else { continue };
                if reply.header.is_some_and(|it| it.member_id == reply.leader) {
                    (etcd.leader, etcd.version) = (address, reply.version);
                    return Ok(etcd);
                }
            }
            etcd.all_alive()?;
            if Instant::now() >= until {
                return Err(wrong("a leader of three members", format!("none within {READY:?}")));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    fn all_alive(&mut self) -> Result<(), BenchError> {
        for member in &mut self.members {
            if let Some(status) = member.ended().map_err(BenchError::io("etcd"))? {
                let found = format!(
                    "the end of one, {status}; Debian has it as etcd-server, `cargo xtask peers --prepare` installs it"
                );
                return Err(wrong("three members that run", found));
            }
        }
        Ok(())
    }

    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// A caller with a connection of its own, opened. Its keys have `key_bytes` bytes, its values `value_bytes`.
    pub(super) async fn caller(&self, key_bytes: usize, value_bytes: usize) -> Result<Caller, LabError> {
        let channel = connect(&self.leader).await?;
        let number = self.callers.fetch_add(1, Ordering::Relaxed);
        Ok(Caller { grpc: Grpc::new(channel), number, count: 0, key_bytes, value: vec![7; value_bytes].into() })
    }

    /// What all members have used until now.
    pub(super) fn used(&self) -> Result<Used, BenchError> {
        self.members.iter().try_fold(Used::default(), |sum, member| Ok(sum.and(Used::by(member.pid())?)))
    }
}

fn wrong(expected: impl Into<String>, found: impl Into<String>) -> BenchError {
    BenchError::Etcd { expected: expected.into(), found: found.into() }
}

async fn connect(address: &str) -> Result<Channel, LabError> {
    let wrong = |source| LabError::Connect { address: address.to_owned(), source };
    let endpoint = Endpoint::from_shared(address.to_owned()).map_err(wrong)?;
    endpoint.connect_timeout(CALL).timeout(CALL).connect().await.map_err(wrong)
}

async fn status(address: &str) -> Result<StatusReply, LabError> {
    let mut grpc = Grpc::new(connect(address).await?);
    call(&mut grpc, "/etcdserverpb.Maintenance/Status", Status {}).await
}

async fn call<M, R>(grpc: &mut Grpc<Channel>, path: &'static str, message: M) -> Result<R, LabError>
where
    M: prost::Message + Send + Sync + 'static,
    R: prost::Message + Default + Send + Sync + 'static,
{
    let broken = |source| LabError::Connect { address: "etcd".to_owned(), source };
    grpc.ready().await.map_err(broken)?;
    let codec = ProstCodec::<M, R>::default();
    let reply = grpc.unary(Request::new(message), PathAndQuery::from_static(path), codec).await;
    Ok(reply.map_err(LabError::call(path))?.into_inner())
}

/// One caller, one call at a time. Every put has a key of its own.
pub(super) struct Caller {
    grpc: Grpc<Channel>,
    number: u32,
    /// Keys made so far.
    count: u64,
    key_bytes: usize,
    value: Bytes,
}

impl Caller {
    fn next(&mut self) -> Put {
        self.count += 1;
        let width = self.key_bytes - 9;
        let key = format!("{:08x}-{:0width$x}", self.number, self.count);
        Put { key: key.into(), value: self.value.clone() }
    }

    /// One put.
    pub(super) async fn put(&mut self) -> Result<(), LabError> {
        let put = self.next();
        let reply: PutReply = call(&mut self.grpc, "/etcdserverpb.KV/Put", put).await?;
        let revision = reply.header.map_or(0, |header| header.revision);
        if revision > 0 { Ok(()) } else { Err(LabError::unexpected("revision of a put", "above 0", revision)) }
    }

    /// A transaction of so many puts.
    pub(super) async fn put_many(&mut self, count: usize) -> Result<(), LabError> {
        let success = (0..count).map(|_| Operation { put: Some(self.next()) }).collect();
        let reply: TxnReply = call(&mut self.grpc, "/etcdserverpb.KV/Txn", Txn { success }).await?;
        let done = reply.responses.iter().filter(|it| it.put.is_some()).count();
        if reply.succeeded && done == count {
            return Ok(());
        }
        Err(LabError::unexpected("puts of a transaction", count, done))
    }
}

/// Whether there is an etcd to compare with.
pub(super) fn installed() -> Result<(), BenchError> {
    match std::process::Command::new("etcd").arg("--version").output() {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(wrong(
            "etcd to compare with",
            "none: Debian has it as etcd-server, `cargo xtask peers --prepare` installs it",
        )),
        Err(error) => Err(BenchError::io("etcd")(error)),
    }
}
