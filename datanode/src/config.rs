//! What a data node is told when it starts, checked once, at the door.

use crate::DataNodeError;
use quarry_trust::{Limits, Trust};
use quarry_wire::{
    certificate::{Certificate, Role},
    ids::{ClusterUuid, NodeId},
    limits::{EXTENT_BYTES, LABEL_BYTES_MAX, LANES_MAX, REGION_BYTES_FULL, REGION_BYTES_MAX, REGION_BYTES_MIN},
    signed::{PublicKey, SecretKey, Signed},
};
use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

/// Regions of one node.
const REGIONS_MAX: usize = 64;
/// Shortest and longest time between heartbeats.
const HEARTBEAT_MIN: Duration = Duration::from_millis(10);
const HEARTBEAT_MAX: Duration = Duration::from_secs(60);
/// Shortest and longest life of a read key by schedule. Readers learn each new one by a refused read, so it should not be short.
const ROTATE_EVERY_MIN: Duration = Duration::from_secs(1);
const ROTATE_EVERY_MAX: Duration = Duration::from_secs(366 * 24 * 3600);

/// Where a node's signing key is kept.
pub trait KeySource: Send + Sync + fmt::Debug {
    /// The key and its certificate as they are there now. May block.
    ///
    /// # Errors
    /// Why they cannot be used.
    fn read(&self) -> Result<(SecretKey, Signed<Certificate>), String>;
}

/// What a data node shares its fate with, at most [`LABEL_BYTES_MAX`] bytes each: copies of one value are put in different zones, else on
/// different hosts, where there are enough. An empty label says nothing.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Labels {
    /// The machine.
    pub host: String,
    /// What fails together: a rack, a room.
    pub zone: String,
}

/// Everything that a data node needs to know to start.
#[derive(Clone, Debug)]
pub struct DataNodeConfig {
    /// Who it is; never used again for another node.
    pub node: NodeId,
    /// Where its gRPC server listens; port 0 lets the system choose.
    pub listen: SocketAddr,
    /// `host:port` under which others reach it, if that is not where it listens.
    pub advertise: Option<String>,
    /// Its own folder; made if it is not there.
    pub data_dir: PathBuf,
    /// `host:port` of every meta node.
    pub metas: Vec<String>,
    /// The cluster.
    pub cluster: ClusterUuid,
    /// Public half of the cluster's root key.
    pub root: PublicKey,
    /// The node's own key.
    pub key: SecretKey,
    /// What the root signed for that key, in the role of a data node.
    pub certificate: Signed<Certificate>,
    /// Where the next key and its certificate are when the node is told to change its key; none: it keeps the one that it starts with.
    pub key_source: Option<Arc<dyn KeySource>>,
    /// How it proves who it is, and whom it lets in.
    pub trust: Trust,
    /// What the clients of its gRPC server may use up.
    pub limits: Limits,
    /// What it shares its fate with.
    pub labels: Labels,
    /// Size of each region in bytes, 1 MiB to 16 GiB.
    pub region_bytes: Vec<u64>,
    /// Touch all memory at the start: no page fault later, and too little memory shows at once.
    pub populate: bool,
    /// Address of this host that fabric endpoints are opened at.
    pub fabric_bind: IpAddr,
    /// libfabric provider, if not the one that fits the installed library.
    pub provider: Option<String>,
    /// Time between two heartbeats to each meta node.
    pub heartbeat: Duration,
    /// How long each region keeps a read key, a tenth more or less; none: until it is told to change it.
    pub rotate_every: Option<Duration>,
    /// Lanes open at once; beyond that writers share.
    pub lanes_max: usize,
    /// `host:port` where this process shows its metrics, to be told by `NodeStatus`; none if it does not.
    pub admin_address: Option<String>,
}

impl DataNodeConfig {
    /// Refuses what cannot work. Signatures are checked by the keyring.
    pub(crate) fn check(&self) -> Result<(), DataNodeError> {
        let wrong = |field: &'static str, expected: &str, found: String| {
            Err(DataNodeError::Config { field, expected: expected.to_owned(), found })
        };
        if self.metas.is_empty() {
            return wrong("metas", "at least one host:port", "none".to_owned());
        }
        for address in self.metas.iter().chain(&self.advertise) {
            let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port.parse());
            if !matches!(port, Some(Ok(1..=u16::MAX))) {
                return wrong("metas and advertise", "host:port", format!("{address:?}"));
            }
        }
        if self.advertise.is_none() && self.listen.ip().is_unspecified() {
            let expected = "set when listening on an unspecified address: others must know how to reach this node";
            return wrong("advertise", expected, "nothing".to_owned());
        }
        for label in [&self.labels.host, &self.labels.zone] {
            if label.len() > LABEL_BYTES_MAX {
                return wrong("labels", "at most 64 bytes each", format!("{} bytes", label.len()));
            }
        }
        if self.region_bytes.is_empty() || self.region_bytes.len() > REGIONS_MAX {
            return wrong("region_bytes", "1 to 64 regions", format!("{}", self.region_bytes.len()));
        }
        for bytes in &self.region_bytes {
            let unit = if *bytes >= REGION_BYTES_FULL { EXTENT_BYTES } else { REGION_BYTES_MIN };
            let fits = (REGION_BYTES_MIN..=REGION_BYTES_MAX).contains(bytes) && bytes.is_multiple_of(unit);
            if !fits || usize::try_from(*bytes).is_err() {
                let expected = "1 MiB to 16 GiB, in whole MiB (from 1 GiB on in multiples of 64 MiB)";
                return wrong("region_bytes", expected, format!("{bytes}"));
            }
        }
        if !(HEARTBEAT_MIN..=HEARTBEAT_MAX).contains(&self.heartbeat) {
            return wrong("heartbeat", "10 ms to 60 s", format!("{:?}", self.heartbeat));
        }
        if let Some(every) = self.rotate_every
            && !(ROTATE_EVERY_MIN..=ROTATE_EVERY_MAX).contains(&every)
        {
            return wrong("rotate_every", "1 s to 366 days", format!("{every:?}"));
        }
        if !(1..=LANES_MAX).contains(&self.lanes_max) {
            return wrong("lanes_max", "1 to 256", self.lanes_max.to_string());
        }
        if let Err(error) = self.limits.check() {
            return wrong(error.name, &error.expected, error.found.to_string());
        }
        if let Err((expected, found)) = fits(self.node, &self.key, &self.certificate.statement) {
            return wrong("certificate", &expected, found);
        }
        if let Some(identity) = self.trust.identity()
            && identity.node_as(Role::DataNode) != Some(self.node)
        {
            return wrong("credentials", &format!("those of {} as datanode", self.node), identity.to_string());
        }
        Ok(())
    }
}

/// Whether a certificate lets `node` sign with `key`; else what it should be and is.
pub(crate) fn fits(node: NodeId, key: &SecretKey, said: &Certificate) -> Result<(), (String, String)> {
    if said.role != Role::DataNode {
        return Err(("one for the role datanode".to_owned(), said.role.to_string()));
    }
    if said.node != node {
        return Err((format!("one of {node}"), format!("one of {}", said.node)));
    }
    if said.key != key.public() {
        return Err((format!("one for the key {}", key.public()), said.key.to_string()));
    }
    Ok(())
}
