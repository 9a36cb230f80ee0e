//! The daemons: configuration in, a running node, an orderly end at SIGTERM or Ctrl-C.

use crate::{
    cli::{DaemonArgs, LogFormat},
    descriptors,
    exit::{Code, Failure},
    http::{AdminPort, META, Probe},
    logs,
    supervised::Supervised,
};
use quarry::{
    config::{DataNodeFile, MetaFile, NodeSection, Overrides, TlsMode, TlsSection, load, ms},
    identity::Identity,
    local::die_with_parent,
};
use quarry_client::Cluster;
use quarry_datanode::{DataNode, DataNodeConfig, KeySource, Labels};
use quarry_fabric::Provider;
use quarry_meta::{Marks, MetaConfig, MetaNode, Timing};
use quarry_trust::Trust;
use quarry_wire::{
    certificate::{Certificate, Role},
    ids::{ClusterUuid, NodeId},
    signed::{PublicKey, SecretKey, Signed},
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{info, warn};

/// Runs a meta node until it is asked to end.
pub(crate) async fn meta(args: &DaemonArgs, log_format: Option<LogFormat>) -> Result<(), Failure> {
    die_with_parent().map_err(Failure::error)?;
    let file: MetaFile = load(&args.config, &overrides(args)?).map_err(Failure::of)?;
    let (cluster, identity) = who(&file.node, Role::Meta)?;
    let node = identity.node();
    let trust = trust(&file.tls, node, Role::Meta, &cluster)?;
    let mut config = MetaConfig::new(
        node,
        file.node.data_dir,
        cluster.uuid,
        cluster.root,
        identity.key,
        identity.certificate,
        trust.clone(),
    );
    config.listen = file.node.listen;
    config.advertise = file.node.advertise;
    config.limits = file.limits;
    config.shards = file.raft.shards;
    config.timing = Timing {
        heartbeat: ms(file.raft.heartbeat_ms),
        election_min: ms(file.raft.election_ms_min),
        election_max: ms(file.raft.election_ms_max),
    };
    config.snapshot_after_entries = file.raft.snapshot_after_entries;
    config.entries_kept = file.raft.entries_kept;
    if !file.raft.balance {
        config.balance_every = None;
    }
    config.node_silence = ms(file.membership.node_silence_ms);
    config.eviction = Marks { low: file.eviction.low_water_permille, high: file.eviction.high_water_permille };
    if args.check_config {
        return Ok(());
    }
    logs::start(Some(node), logs::DAEMON, log_format)?;
    tell_of(&trust);
    descriptors::fit(&mut config.limits);
    let mut end = End::new()?;
    let mut supervised = Supervised::starting();
    let admin = AdminPort::open(META, node, file.admin.listen, &config.data_dir).await?;
    config.admin_address = Some(admin.advertised(config.advertise.as_deref()));
    let meta = MetaNode::start(config).await.map_err(Failure::error)?;
    admin.running(Probe::Meta(meta.probe(), trust));
    supervised.follow(admin.health());
    info!(cluster = %cluster.uuid, address = %meta.address(), admin = %admin.address(), "the meta node serves");
    tokio::select! {
        () = end.wait() => {}
        // It leads nothing and acknowledges nothing any more: there is nothing to hand over or to finish.
        why = meta.failed() => {
            return Err(Failure::error(format!(
                "the meta node failed and must not go on: {why}; see to the disk of that folder, then start it again"
            )));
        }
    }
    supervised.stopping();
    info!("the meta node drains");
    meta.shutdown().await;
    Ok(())
}

/// Runs a data node until it is asked to end.
pub(crate) async fn datanode(args: &DaemonArgs, log_format: Option<LogFormat>) -> Result<(), Failure> {
    die_with_parent().map_err(Failure::error)?;
    let file: DataNodeFile = load(&args.config, &overrides(args)?).map_err(Failure::of)?;
    let (cluster, identity) = who(&file.node, Role::DataNode)?;
    let node = identity.node();
    let trust = trust(&file.tls, node, Role::DataNode, &cluster)?;
    let mut config = DataNodeConfig {
        node,
        trust: trust.clone(),
        listen: file.node.listen,
        advertise: file.node.advertise,
        data_dir: file.node.data_dir,
        metas: cluster.metas.clone(),
        cluster: cluster.uuid,
        root: cluster.root,
        key: identity.key,
        certificate: identity.certificate,
        key_source: Some(Arc::new(KeyFile { path: file.node.key.clone(), cluster: cluster.uuid, root: cluster.root })),
        limits: file.limits,
        labels: Labels { host: file.labels.host, zone: file.labels.zone },
        region_bytes: file.memory.region_bytes,
        populate: file.memory.populate,
        fabric_bind: file.fabric.bind,
        provider: file.fabric.provider,
        heartbeat: ms(file.membership.heartbeat_ms),
        rotate_every: file.fabric.rotate_every,
        lanes_max: file.fabric.lanes_max,
        admin_address: None,
    };
    if args.check_config {
        if let Some(name) = &config.provider {
            Provider::named(name).map_err(|wrong| Failure::error(format!("fabric.provider: {wrong}")))?;
        }
        return Ok(());
    }
    logs::start(Some(node), logs::DAEMON, log_format)?;
    tell_of(&trust);
    descriptors::fit(&mut config.limits);
    let mut end = End::new()?;
    let mut supervised = Supervised::starting();
    let admin = AdminPort::open("datanode", node, file.admin.listen, &config.data_dir).await?;
    config.admin_address = Some(admin.advertised(config.advertise.as_deref()));
    let data_node = DataNode::start(config).await.map_err(Failure::error)?;
    admin.running(Probe::Data(data_node.probe()));
    supervised.follow(admin.health());
    info!(cluster = %cluster.uuid, address = %data_node.address(), admin = %admin.address(), "the data node serves");
    let forgotten = tokio::select! {
        () = end.wait() => None,
        why = data_node.forgotten() => Some(why),
    };
    supervised.stopping();
    let Some(why) = forgotten else {
        info!("the data node drains");
        data_node.shutdown().await;
        return Ok(());
    };
    tracing::error!(%node, why, "the data node was forgotten and stops: nobody can use what it holds");
    data_node.shutdown().await;
    // A code that the unit does not start it again for: it would be told the same.
    let hint = "quarry keys node --role datanode --id NEW makes the keys of another number";
    Err(Failure::new(Code::Conflict, format!("the data node stops: {why}")).hint(hint))
}

/// The file that a data node's signing key is in.
#[derive(Debug)]
struct KeyFile {
    path: PathBuf,
    cluster: ClusterUuid,
    root: PublicKey,
}

impl KeySource for KeyFile {
    fn read(&self) -> Result<(SecretKey, Signed<Certificate>), String> {
        let held = Identity::read(&self.path, Role::DataNode, self.cluster, self.root);
        held.map(|held| (held.key, held.certificate)).map_err(|wrong| wrong.to_string())
    }
}

fn overrides(args: &DaemonArgs) -> Result<Overrides, Failure> {
    let mut flags = Overrides::default();
    for setting in &args.settings {
        flags.set(setting).map_err(Failure::error)?;
    }
    flags.text("node.listen", args.listen.as_ref());
    flags.text("node.advertise", args.advertise.as_ref());
    flags.text("admin.listen", args.admin_listen.as_ref());
    flags.path("node.data_dir", args.data_dir.as_deref());
    flags.path("node.cluster", args.cluster.as_deref());
    flags.path("node.key", args.key.as_deref());
    flags.path("tls.credentials", args.credentials.as_deref());
    Ok(flags)
}

fn who(node: &NodeSection, role: Role) -> Result<(Cluster, Identity), Failure> {
    let cluster = Cluster::from_file(&node.cluster)?;
    let identity = Identity::read(&node.key, role, cluster.uuid, cluster.root).map_err(Failure::of)?;
    Ok((cluster, identity))
}

/// How this node proves who it is; without credentials it does not start, unless it was told to do without.
fn trust(tls: &TlsSection, node: NodeId, role: Role, cluster: &Cluster) -> Result<Trust, Failure> {
    let file = match (tls.mode, &tls.credentials) {
        (TlsMode::Off, _) => return Ok(Trust::off()),
        (TlsMode::Mutual, Some(file)) => file,
        (TlsMode::Mutual, None) => return Err(Failure::error("tls.credentials is not set")),
    };
    let make = format!(
        "quarry keys node --root ROOT.KEY --role {role} --id {} --out {} makes them; tls.mode = \"off\" does without, and lets everyone in",
        node.0,
        file.parent().unwrap_or_else(|| Path::new(".")).display()
    );
    Trust::mutual(file, cluster.uuid, cluster.root).map_err(|wrong| Failure::of(wrong).hint(make))
}

fn tell_of(trust: &Trust) {
    match trust.identity() {
        Some(identity) => info!(%identity, "connections are authenticated by mutual TLS"),
        None => warn!(
            "TLS is off: whoever reaches this port can read, write and administer (tls.mode in the configuration)"
        ),
    }
}

/// SIGTERM or Ctrl-C, listened for from the start so that none is missed.
pub(crate) struct End {
    terminate: Signal,
    interrupt: Signal,
}

impl End {
    pub(crate) fn new() -> Result<Self, Failure> {
        let listen = |kind| signal(kind).map_err(Failure::error);
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }
    pub(crate) async fn wait(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
