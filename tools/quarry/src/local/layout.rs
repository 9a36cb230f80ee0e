//! The folder of a local cluster: what is written into it, and read back.

use crate::{
    admin::{BootstrapPlan, CallError, PlanError, PlannedMeta},
    build::BUILD_ID,
    config::{
        AdminSection, CONFIG_VERSION, DataMembershipSection, DataNodeFile, EvictionSection, FabricSection,
        LabelsSection, MemorySection, MetaFile, MetaMembershipSection, NODE_CREDENTIALS, NodeSection, RaftSection,
        TlsMode, TlsSection,
    },
    credentials::{self, Validity},
    identity::{IdentityError, Root},
};
use quarry_client::{Clock as _, Cluster, ClusterError, SystemClock, Tls};
use quarry_trust::{CredentialsError, Identity, Limits, Trust};
use quarry_wire::{
    certificate::Role,
    ids::{CertificateSerial, NodeId},
};
use serde::{Deserialize, Serialize};
use std::{
    fmt, fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    time::Duration,
};

/// Version of the layout of the folder.
const LAYOUT_VERSION: u32 = 1;
/// The name of the credentials of a local cluster's clients, beside its cluster file.
const CLIENT_CREDENTIALS: &str = "client.pem";
/// What they call themselves.
const DEVELOPER: &str = "dev";
/// How long credentials last that are made at each start.
const VALID_FOR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Data nodes are numbered from here on, so that an id tells what its node is.
const FIRST_DATA_NODE: u64 = 101;

/// Certificates of nodes that come later have serials above this one.
const LATER_SERIALS: u64 = 1_000;

/// One process of a cluster, by its node id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Member {
    /// A meta node: 1, 2, 3.
    Meta(u64),
    /// A data node: 101, 102.
    Data(u64),
}

impl Member {
    /// Its id in the cluster.
    #[must_use]
    pub const fn node(self) -> NodeId {
        match self {
            Self::Meta(node) | Self::Data(node) => NodeId(node),
        }
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Meta(node) => write!(f, "meta-{node}"),
            Self::Data(node) => write!(f, "data-{node}"),
        }
    }
}

/// What a local cluster is made of.
#[derive(Clone, Debug)]
pub struct LocalSpec {
    /// Meta nodes.
    pub metas: u32,
    /// Data nodes.
    pub data_nodes: u32,
    /// Size of each region of each data node.
    pub region_bytes: Vec<u64>,
    /// Whether data nodes touch all their memory at the start.
    pub populate: bool,
    /// Consensus, the same at all meta nodes.
    pub raft: RaftSection,
    /// When meta nodes declare a data node dead.
    pub node_silence_ms: u64,
    /// How much room the meta nodes keep by letting cache values go.
    pub eviction: EvictionSection,
    /// How often data nodes give a sign of life.
    pub heartbeat_ms: u64,
    /// What clients may use up of each process.
    pub limits: Limits,
    /// What the data nodes share their fate with, in their order; those beyond say nothing.
    pub labels: Vec<LabelsSection>,
    /// The libfabric provider; none: what this host has.
    pub provider: Option<String>,
    /// The `quarry` binary that is started.
    pub binary: PathBuf,
    /// Further environment of the processes, for example `QUARRY_SECTION__KEY` or `QUARRY_LOG`.
    pub environment: Vec<(String, String)>,
    /// Whether the processes outlive this one.
    pub detached: bool,
    /// Whether connections go without TLS, so that everyone on this host may do everything.
    pub plaintext: bool,
}

impl LocalSpec {
    /// Three meta nodes and two data nodes with one region of 256 MiB each, run by `binary`.
    #[must_use]
    pub fn new(binary: PathBuf) -> Self {
        Self {
            metas: 3,
            data_nodes: 2,
            region_bytes: vec![256 << 20],
            populate: false,
            raft: RaftSection::default(),
            node_silence_ms: MetaMembershipSection::default().node_silence_ms,
            eviction: EvictionSection::default(),
            heartbeat_ms: DataMembershipSection::default().heartbeat_ms,
            limits: Limits::default(),
            labels: Vec::new(),
            provider: None,
            binary,
            environment: Vec::new(),
            detached: false,
            plaintext: false,
        }
    }

    fn labels_of(&self, data_node: Member) -> LabelsSection {
        let at = usize::try_from(data_node.node().0 - FIRST_DATA_NODE).ok();
        at.and_then(|at| self.labels.get(at)).cloned().unwrap_or_default()
    }
}

/// What can go wrong with a local cluster.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The folder holds something else.
    #[error("{} is not empty and holds no cluster made by this command: name another folder", dir.display())]
    NotEmpty {
        /// Which folder.
        dir: PathBuf,
    },
    /// The folder cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The folder's description cannot be understood.
    #[error("{}: {why}", path.display())]
    Layout {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// No ports.
    #[error("no ports for the cluster: {0}")]
    Ports(io::Error),
    /// Keys.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// Credentials.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// The plan of the bootstrap.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The cluster file.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The binary is not there or does not run.
    #[error("the binary {} cannot be run: {why}; build it: cargo build -p quarry", path.display())]
    Binary {
        /// Which.
        path: PathBuf,
        /// What happened.
        why: String,
    },
    /// The binary is of another build.
    #[error("{} is of build {found}, this is build {BUILD_ID}: build it again: cargo build -p quarry", path.display())]
    StaleBinary {
        /// Which.
        path: PathBuf,
        /// Its build id.
        found: String,
    },
    /// A process cannot be started or signalled.
    #[error("{member}: {source}")]
    Process {
        /// Which.
        member: Member,
        /// What the system says.
        source: io::Error,
    },
    /// A member that should run does not.
    #[error("{member} is not running: restart it first")]
    NotRunning {
        /// Which.
        member: Member,
    },
    /// A process ended by itself.
    #[error("{member} ended ({status}); its log ends with:\n{log}")]
    Ended {
        /// Which.
        member: Member,
        /// How.
        status: ExitStatus,
        /// Its last words.
        log: String,
    },
    /// Something did not happen in time.
    #[error("gave up waiting: {missing}")]
    Deadline {
        /// What was missing.
        missing: String,
    },
    /// Processes did not end when asked to.
    #[error("killed, since they did not end when asked to: {}", members.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))]
    Killed {
        /// Which.
        members: Vec<Member>,
    },
    /// The cluster cannot be made.
    #[error("the cluster cannot be made: {0}")]
    Bootstrap(CallError),
    /// A process did not answer.
    #[error("{member}: {source}")]
    Call {
        /// Which.
        member: Member,
        /// Why.
        source: CallError,
    },
}

/// The `quarry` binary that was built beside the running test or tool: in the folder of its profile.
///
/// # Errors
/// [`LocalError::Binary`] if there is none, [`LocalError::StaleBinary`] if it is of another build than the caller.
pub fn built_binary() -> Result<PathBuf, LocalError> {
    let own =
        std::env::current_exe().map_err(|source| LocalError::Io { path: PathBuf::from("/proc/self/exe"), source })?;
    let folders = own.ancestors().skip(1).take(2);
    let found = folders.map(|folder| folder.join("quarry")).find(|path| path.is_file());
    let found = found
        .ok_or_else(|| LocalError::Binary { path: own.with_file_name("quarry"), why: "it is not there".to_owned() })?;
    check_binary(&found)?;
    Ok(found)
}

/// Refuses a binary of another build.
pub(super) fn check_binary(path: &Path) -> Result<(), LocalError> {
    let binary = |why: String| LocalError::Binary { path: path.to_owned(), why };
    let output = Command::new(path).arg("--build-id").output().map_err(|wrong| binary(wrong.to_string()))?;
    let found = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() {
        return Err(binary(format!("it ended with {}", output.status)));
    }
    if found != BUILD_ID {
        return Err(LocalError::StaleBinary { path: path.to_owned(), found });
    }
    Ok(())
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayoutFile {
    version: u32,
    members: Vec<LayoutMember>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayoutMember {
    role: String,
    node: u64,
    address: SocketAddr,
}

/// The folder.
#[derive(Debug)]
pub(super) struct Layout {
    dir: PathBuf,
    members: Vec<(Member, SocketAddr)>,
}

impl Layout {
    pub(super) fn exists(dir: &Path) -> bool {
        dir.join("local.toml").is_file()
    }

    /// Writes a new cluster into `dir`, one address per member, meta nodes first.
    pub(super) fn create(dir: &Path, spec: &LocalSpec, addresses: &[SocketAddr]) -> Result<Self, LocalError> {
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| LocalError::Io { path, source }
        };
        fs::create_dir_all(dir).map_err(io(dir))?;
        // Absolute, since the processes and whoever reads the printed paths may work elsewhere.
        let dir = fs::canonicalize(dir).map_err(io(dir))?;
        if fs::read_dir(&dir).map_err(io(&dir))?.next().is_some() {
            return Err(LocalError::NotEmpty { dir });
        }
        let metas = (1..=u64::from(spec.metas)).map(Member::Meta);
        let data = (FIRST_DATA_NODE..FIRST_DATA_NODE + u64::from(spec.data_nodes)).map(Member::Data);
        let members: Vec<_> = metas.chain(data).zip(addresses.iter().copied()).collect();
        let layout = Self { dir: dir.clone(), members };
        let root = Root::generate()?;
        root.write(&dir.join("root.key"))?;
        let mut plan =
            BootstrapPlan { cluster: root.cluster, root: root.public(), shards: spec.raft.shards, metas: Vec::new() };
        for ((member, address), serial) in layout.members().zip(1..) {
            let folder = layout.member_dir(member);
            fs::create_dir(&folder).map_err(io(&folder))?;
            let role = match member {
                Member::Meta(_) => Role::Meta,
                Member::Data(_) => Role::DataNode,
            };
            let identity = root.certify(CertificateSerial(serial), member.node(), role)?;
            identity.write(&folder.join("node.key"))?;
            if let Member::Meta(node) = member {
                let certificate = identity.certificate;
                plan.metas.push(PlannedMeta { node, address: address.to_string(), certificate });
            }
            let path = folder.join("config.toml");
            fs::write(&path, layout.config(member, address, spec)).map_err(io(&path))?;
        }
        plan.write(&layout.plan_file())?;
        let metas = plan.metas.iter().map(|meta| meta.address.clone()).collect();
        let cluster = Cluster::new(plan.cluster, plan.root, metas)?;
        let cluster = if spec.plaintext { cluster.without_tls() } else { cluster.with_credentials(CLIENT_CREDENTIALS) };
        let path = layout.cluster_file();
        fs::write(&path, cluster.to_toml()).map_err(io(&path))?;
        layout.renew()?;
        // Last: a folder with this file is whole.
        layout.write()?;
        Ok(layout)
    }

    /// Takes one more meta node into the folder, with a key and a certificate of its own. The cluster does not know of it.
    pub(super) fn add_meta(&mut self, address: SocketAddr, spec: &LocalSpec) -> Result<Member, LocalError> {
        let last = self.members.iter().filter_map(|(member, _)| match member {
            Member::Meta(node) => Some(*node),
            Member::Data(_) => None,
        });
        let member = Member::Meta(1 + last.max().unwrap_or(0));
        let root = Root::read(&self.dir.join("root.key"))?;
        let folder = self.member_dir(member);
        fs::create_dir(&folder).map_err(|source| LocalError::Io { path: folder.clone(), source })?;
        let serial = CertificateSerial(LATER_SERIALS + member.node().0);
        root.certify(serial, member.node(), Role::Meta)?.write(&folder.join("node.key"))?;
        let path = folder.join("config.toml");
        fs::write(&path, self.config(member, address, spec)).map_err(|source| LocalError::Io { path, source })?;
        self.members.push((member, address));
        self.renew()?;
        self.write()?;
        Ok(member)
    }

    /// Makes new credentials for all connections, unless the cluster goes without. A folder of before there were any gets its first.
    pub(super) fn renew(&self) -> Result<(), LocalError> {
        let file = self.cluster_file();
        let cluster = Cluster::from_file(&file)?;
        if cluster.tls == Tls::Off {
            return Ok(());
        }
        if cluster.tls == Tls::Unset {
            let named = cluster.clone().with_credentials(CLIENT_CREDENTIALS).to_toml();
            fs::write(&file, named).map_err(|source| LocalError::Io { path: file, source })?;
        }
        let root = Root::read(&self.dir.join("root.key"))?;
        let validity = Validity::lasting(SystemClock.wall_ms(), VALID_FOR);
        let hosts = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let named = |wrong: quarry_trust::identity::IdentityError| IdentityError::Certificate(wrong.to_string());
        for (member, _) in self.members() {
            let role = match member {
                Member::Meta(_) => Role::Meta,
                Member::Data(_) => Role::DataNode,
            };
            let identity = Identity::node(root.cluster, role, member.node()).map_err(named)?;
            credentials::write(&self.member_dir(member).join(NODE_CREDENTIALS), &root, &identity, &hosts, validity)?;
        }
        let everything = [Role::Writer, Role::Reader, Role::Admin];
        let identity = Identity::client(root.cluster, &everything, DEVELOPER).map_err(named)?;
        Ok(credentials::write(&self.dir.join(CLIENT_CREDENTIALS), &root, &identity, &[], validity)?)
    }

    /// How a client that may do everything proves who it is.
    pub(super) fn trust(&self) -> Result<Trust, LocalError> {
        Ok(Cluster::from_file(self.cluster_file())?.trust()?)
    }

    fn config(&self, member: Member, listen: SocketAddr, spec: &LocalSpec) -> String {
        let node = NodeSection {
            cluster: self.cluster_file(),
            key: "node.key".into(),
            data_dir: "data".into(),
            listen,
            advertise: None,
        };
        let mode = if spec.plaintext { TlsMode::Off } else { TlsMode::Mutual };
        let tls = TlsSection { mode, credentials: None };
        match member {
            Member::Meta(_) => text(&MetaFile {
                version: CONFIG_VERSION,
                node,
                tls: tls.clone(),
                raft: spec.raft.clone(),
                membership: MetaMembershipSection { node_silence_ms: spec.node_silence_ms },
                eviction: spec.eviction.clone(),
                limits: spec.limits,
                admin: AdminSection::default(),
            }),
            Member::Data(_) => text(&DataNodeFile {
                version: CONFIG_VERSION,
                node,
                tls: tls.clone(),
                labels: spec.labels_of(member),
                memory: MemorySection { region_bytes: spec.region_bytes.clone(), populate: spec.populate },
                fabric: FabricSection { provider: spec.provider.clone(), ..FabricSection::default() },
                membership: DataMembershipSection { heartbeat_ms: spec.heartbeat_ms },
                limits: spec.limits,
                admin: AdminSection::default(),
            }),
        }
    }

    fn write(&self) -> Result<(), LocalError> {
        let member = |(member, address): &(Member, SocketAddr)| LayoutMember {
            role: match member {
                Member::Meta(_) => "meta".to_owned(),
                Member::Data(_) => "data".to_owned(),
            },
            node: member.node().0,
            address: *address,
        };
        let file = LayoutFile { version: LAYOUT_VERSION, members: self.members.iter().map(member).collect() };
        let path = self.dir.join("local.toml");
        fs::write(&path, text(&file)).map_err(|source| LocalError::Io { path, source })
    }

    pub(super) fn open(dir: &Path) -> Result<Self, LocalError> {
        let dir = fs::canonicalize(dir).map_err(|source| LocalError::Io { path: dir.to_owned(), source })?;
        let path = dir.join("local.toml");
        let wrong = |why: String| LocalError::Layout { path: path.clone(), why };
        let text = fs::read_to_string(&path).map_err(|source| LocalError::Io { path: path.clone(), source })?;
        let file: LayoutFile = toml::from_str(&text).map_err(|why| wrong(why.to_string()))?;
        if file.version != LAYOUT_VERSION {
            return Err(wrong(format!("version must be {LAYOUT_VERSION}, found {}", file.version)));
        }
        let mut members = Vec::new();
        for it in file.members {
            let member = match it.role.as_str() {
                "meta" => Member::Meta(it.node),
                "data" => Member::Data(it.node),
                role => return Err(wrong(format!("role must be meta or data, found {role}"))),
            };
            members.push((member, it.address));
        }
        Ok(Self { dir, members })
    }

    pub(super) fn members(&self) -> impl Iterator<Item = (Member, SocketAddr)> {
        self.members.iter().copied()
    }
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }
    pub(super) fn member_dir(&self, member: Member) -> PathBuf {
        self.dir.join(member.to_string())
    }
    pub(super) fn cluster_file(&self) -> PathBuf {
        self.dir.join("cluster.toml")
    }
    fn plan_file(&self) -> PathBuf {
        self.dir.join("bootstrap.toml")
    }
    pub(super) fn plan(&self) -> Result<BootstrapPlan, LocalError> {
        Ok(BootstrapPlan::read(&self.plan_file())?)
    }
}

fn text(file: &impl Serialize) -> String {
    toml::to_string(file).expect("configuration types are always TOML")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{ConfigFile as _, Overrides, load},
        identity::Identity as Signer,
    };

    fn made(dir: &Path) -> (Layout, LocalSpec) {
        let spec = LocalSpec { region_bytes: vec![1 << 20, 2 << 20], ..LocalSpec::new("quarry".into()) };
        let addresses: Vec<SocketAddr> = (1..=5).map(|port| SocketAddr::from(([127, 0, 0, 1], port))).collect();
        (Layout::create(dir, &spec, &addresses).unwrap(), spec)
    }

    #[test]
    fn a_folder_is_read_back_as_it_was_written_and_its_parts_belong_together() {
        let dir = tempfile::tempdir().unwrap();
        let (layout, spec) = made(dir.path());
        let opened = Layout::open(dir.path()).unwrap();
        assert_eq!(opened.members, layout.members);
        let plan = opened.plan().unwrap();
        let cluster = Cluster::from_file(opened.cluster_file()).unwrap();
        assert_eq!((cluster.uuid, cluster.root), (plan.cluster, plan.root));
        assert_eq!(cluster.metas, ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]);
        let mut serials = std::collections::BTreeSet::new();
        for (member, address) in opened.members() {
            let config = opened.member_dir(member).join("config.toml");
            let (mut node, role) = match member {
                Member::Meta(_) => (load::<MetaFile>(&config, &Overrides::default()).unwrap().node, Role::Meta),
                Member::Data(_) => {
                    let mut file = load::<DataNodeFile>(&config, &Overrides::default()).unwrap();
                    assert_eq!(file.memory.region_bytes, spec.region_bytes);
                    (file.node().clone(), Role::DataNode)
                }
            };
            assert_eq!(node.listen, address);
            let identity = Signer::read(&std::mem::take(&mut node.key), role, cluster.uuid, cluster.root).unwrap();
            assert_eq!(identity.node(), member.node());
            assert!(serials.insert(identity.certificate.statement.serial));
        }
    }

    #[test]
    fn a_folder_in_use_is_not_written_into() {
        let dir = tempfile::tempdir().unwrap();
        made(dir.path());
        let spec = LocalSpec::new("quarry".into());
        assert!(matches!(Layout::create(dir.path(), &spec, &[]), Err(LocalError::NotEmpty { .. })));
    }

    #[test]
    fn a_folder_of_a_later_version_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        made(dir.path());
        let path = dir.path().join("local.toml");
        let text = fs::read_to_string(&path).unwrap().replace("version = 1", "version = 2");
        fs::write(&path, text).unwrap();
        assert!(matches!(Layout::open(dir.path()), Err(LocalError::Layout { why, .. }) if why.contains("found 2")));
    }

    #[test]
    fn a_binary_of_another_build_is_refused() {
        assert!(matches!(check_binary(Path::new("/bin/true")), Err(LocalError::StaleBinary { .. })));
        assert!(matches!(check_binary(Path::new("/nowhere/quarry")), Err(LocalError::Binary { .. })));
    }
}
