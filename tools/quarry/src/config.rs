//! Configuration of the two daemons: a TOML file, then environment, then flags; the later wins.
//!
//! A variable `QUARRY_SECTION__KEY` sets `section.key`; variables without `__` are not configuration. A flag `--set section.key=value` sets
//! anything, read as the environment is. Unknown keys are refused with their name, wherever they come from. Relative paths in the file and in
//! the environment start at the file's folder, those in flags at the working folder.
//! Decides names, defaults and units; what the values mean is the business of the daemons.

use figment::{
    Figment,
    error::Kind,
    providers::{Env, Format as _, Serialized, Toml},
    value::Value,
};
use quarry_meta::{Marks, SHARDS_MAX};
use quarry_trust::Limits;
use quarry_wire::limits::{
    EXTENT_BYTES, LABEL_BYTES_MAX, LANES_MAX, REGION_BYTES_FULL, REGION_BYTES_MAX, REGION_BYTES_MIN,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

/// Version of the layout of configuration files.
pub const CONFIG_VERSION: u32 = 1;
/// Longest span of a meta node's timing, in milliseconds: a day is a mistake already.
const SPAN_MS_MAX: u64 = 24 * 60 * 60 * 1_000;
/// Regions of one data node, at most.
const REGIONS_MAX: usize = 64;
/// Shortest and longest life of a read key by schedule.
const ROTATE_EVERY_MIN: Duration = Duration::from_secs(1);
const ROTATE_EVERY_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// Shortest and longest time between the heartbeats of a data node, in milliseconds.
const HEARTBEAT_MS: (u64, u64) = (10, 60_000);

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("the configuration {}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A key that there is not.
    #[error("unknown key {key} ({origin}); known here are: {}", known.join(", "))]
    UnknownKey {
        /// The key, with its section.
        key: String,
        /// Where it was set.
        origin: String,
        /// What could have been meant.
        known: Vec<String>,
    },
    /// A key is absent.
    #[error("the key {key} is not set ({origin}): set it in the file, the environment or by --set")]
    Missing {
        /// The key, with its section.
        key: String,
        /// Where it was looked for.
        origin: String,
    },
    /// A value that does not fit.
    #[error("{key} must be {expected}, found {found} ({origin})")]
    Value {
        /// The key, with its section.
        key: String,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
        /// Where it was set.
        origin: String,
    },
    /// A value that cannot be understood.
    #[error("{key}: {why}, found {found} ({origin})")]
    Unfit {
        /// The key, with its section.
        key: String,
        /// What is wrong with it.
        why: String,
        /// What it is.
        found: String,
        /// Where it was set.
        origin: String,
    },
    /// A `--set` that is not `section.key=value`.
    #[error("--set takes SECTION.KEY=VALUE, found {found:?}")]
    Flag {
        /// What was given.
        found: String,
    },
    /// Anything else that the parser says.
    #[error("the configuration {}: {why}", path.display())]
    Layout {
        /// Which file.
        path: PathBuf,
        /// What it says.
        why: String,
    },
}

/// Configuration of `quarry meta`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetaFile {
    /// Version of this layout.
    pub version: u32,
    /// Who and where.
    pub node: NodeSection,
    /// How it proves who it is.
    #[serde(default)]
    pub tls: TlsSection,
    /// Consensus.
    #[serde(default)]
    pub raft: RaftSection,
    /// Life and death of data nodes.
    #[serde(default)]
    pub membership: MetaMembershipSection,
    /// How much room is kept by letting cache values go.
    #[serde(default)]
    pub eviction: EvictionSection,
    /// What clients may use up of its gRPC server.
    #[serde(default)]
    pub limits: Limits,
    /// Where it tells of itself.
    #[serde(default)]
    pub admin: AdminSection,
}

/// Configuration of `quarry datanode`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataNodeFile {
    /// Version of this layout.
    pub version: u32,
    /// Who and where.
    pub node: NodeSection,
    /// How it proves who it is.
    #[serde(default)]
    pub tls: TlsSection,
    /// What it shares its fate with.
    #[serde(default)]
    pub labels: LabelsSection,
    /// What it lends.
    pub memory: MemorySection,
    /// How it is reached by RMA.
    #[serde(default)]
    pub fabric: FabricSection,
    /// Its signs of life.
    #[serde(default)]
    pub membership: DataMembershipSection,
    /// What clients may use up of its gRPC server.
    #[serde(default)]
    pub limits: Limits,
    /// Where it tells of itself.
    #[serde(default)]
    pub admin: AdminSection,
}

/// Who a process is and where it listens.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeSection {
    /// The cluster file: uuid, root key, meta nodes.
    pub cluster: PathBuf,
    /// The key file of this node.
    pub key: PathBuf,
    /// Folder for what it keeps; made if absent.
    pub data_dir: PathBuf,
    /// Where its gRPC server listens.
    pub listen: SocketAddr,
    /// What others are told to connect to, host:port; absent: the address of `listen`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advertise: Option<String>,
}

/// What a data node shares its fate with: copies of one value are put in different zones, else on different hosts, where there are enough.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LabelsSection {
    /// The machine; empty: not said.
    pub host: String,
    /// What fails together, a rack or a room; empty: not said.
    pub zone: String,
}

/// How a process proves who it is to the others, and whether they must.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsSection {
    /// Whether connections are authenticated and encrypted.
    pub mode: TlsMode,
    /// The file with its certificate and private key; absent: `tls.pem` beside the key file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credentials: Option<PathBuf>,
}

/// Whether connections are authenticated and encrypted. The same in all processes of a cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TlsMode {
    /// Both sides prove who they are.
    #[default]
    Mutual,
    /// Neither does: whoever reaches a port may do everything.
    Off,
}

/// The name of a node's credentials beside its key file.
pub const NODE_CREDENTIALS: &str = "tls.pem";

/// Consensus.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RaftSection {
    /// A leader speaks at least this often.
    pub heartbeat_ms: u64,
    /// A follower that hears nothing for a random time from this ...
    pub election_ms_min: u64,
    /// ... to this stands for election.
    pub election_ms_max: u64,
    /// A snapshot is written every so many entries.
    pub snapshot_after_entries: u64,
    /// Entries kept in the log behind a snapshot, for followers that are a little late.
    pub entries_kept: u64,
    /// How many shards the cluster has; fixed when it is made.
    pub shards: u32,
    /// Whether a node that leads more groups than others gives some away, at most one each second.
    pub balance: bool,
}

impl Default for RaftSection {
    fn default() -> Self {
        Self {
            heartbeat_ms: 200,
            election_ms_min: 600,
            election_ms_max: 1_200,
            snapshot_after_entries: 50_000,
            entries_kept: 1_000,
            shards: 8,
            balance: true,
        }
    }
}

/// Life and death of data nodes, as a meta node judges them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetaMembershipSection {
    /// A data node silent for this long is declared dead.
    pub node_silence_ms: u64,
}

impl Default for MetaMembershipSection {
    fn default() -> Self {
        Self { node_silence_ms: 10_000 }
    }
}

/// How much room shard leaders keep on every data node, in thousandths of what it lends to a shard. The same at all meta nodes. With more than
/// one shard at most 125 and 200: beyond that the shards would not lend each other what they need, and values would go while memory is free.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvictionSection {
    /// With less than this free or coming back, values of class cache go, the least recently read first; 0: they stay, and a full cluster refuses.
    pub low_water_permille: u16,
    /// So many go that this much is.
    pub high_water_permille: u16,
}

impl Default for EvictionSection {
    fn default() -> Self {
        let Marks { low, high } = Marks::default();
        Self { low_water_permille: low, high_water_permille: high }
    }
}

/// A data node's signs of life.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataMembershipSection {
    /// It speaks to every meta node this often.
    pub heartbeat_ms: u64,
}

impl Default for DataMembershipSection {
    fn default() -> Self {
        Self { heartbeat_ms: 1_000 }
    }
}

/// What a data node lends.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemorySection {
    /// Size of each of its regions, in bytes.
    pub region_bytes: Vec<u64>,
    /// Touch all memory at the start: no page fault later, and too little memory shows at once.
    #[serde(default = "yes")]
    pub populate: bool,
}

const fn yes() -> bool {
    true
}

/// How a data node is reached by RMA.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FabricSection {
    /// The address that its endpoints bind to; ports are chosen by the system.
    pub bind: IpAddr,
    /// The libfabric provider; absent: what this host has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provider: Option<String>,
    /// Lanes open at once; beyond that writers share.
    pub lanes_max: usize,
    /// How long each region keeps a read key, such as "24h", a tenth more or less; absent: until `raft-admin region rotate`.
    #[serde(skip_serializing_if = "Option::is_none", with = "span")]
    pub rotate_every: Option<Duration>,
}

impl Default for FabricSection {
    fn default() -> Self {
        Self { bind: IpAddr::V4(Ipv4Addr::LOCALHOST), provider: None, lanes_max: LANES_MAX, rotate_every: None }
    }
}

/// A span of time as people write it.
mod span {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};
    use std::time::Duration;

    #[expect(clippy::ref_option, reason = "serde passes a reference to the field")]
    pub(super) fn serialize<S: Serializer>(span: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        match span {
            Some(span) => to.serialize_str(&humantime::format_duration(*span).to_string()),
            None => to.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        let Some(text) = Option::<String>::deserialize(from)? else { return Ok(None) };
        let span = humantime::parse_duration(&text);
        span.map(Some).map_err(|wrong| D::Error::custom(format!("{text:?} is no span such as \"24h\": {wrong}")))
    }
}

/// Where a process tells of itself over HTTP: metrics, health, status. There is no password: who reaches the port can read it, and change nothing.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdminSection {
    /// The address that it listens on; with port 0 the system chooses one, which the log and the node's status tell.
    pub listen: SocketAddr,
}

impl Default for AdminSection {
    fn default() -> Self {
        Self { listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)) }
    }
}

/// A daemon's configuration file.
pub trait ConfigFile: Serialize + DeserializeOwned {
    /// The version that it says.
    fn version(&self) -> u32;
    /// Its paths.
    fn node(&mut self) -> &mut NodeSection;
    /// How it proves who it is.
    fn tls(&mut self) -> &mut TlsSection;
    /// Relations between its values: the key, what it must be, what it is.
    fn wrong(&self) -> Option<(&'static str, String, String)>;
}

impl ConfigFile for MetaFile {
    fn version(&self) -> u32 {
        self.version
    }
    fn node(&mut self) -> &mut NodeSection {
        &mut self.node
    }
    fn tls(&mut self) -> &mut TlsSection {
        &mut self.tls
    }
    fn wrong(&self) -> Option<(&'static str, String, String)> {
        let raft = &self.raft;
        let more_than = |than: u64| format!("more than {than}");
        let spans = [
            ("raft.heartbeat_ms", raft.heartbeat_ms),
            ("raft.election_ms_min", raft.election_ms_min),
            ("raft.election_ms_max", raft.election_ms_max),
            ("membership.node_silence_ms", self.membership.node_silence_ms),
        ];
        if let Some((key, found)) = spans.into_iter().find(|(_, found)| !(1..=SPAN_MS_MAX).contains(found)) {
            return Some((key, format!("1 to {SPAN_MS_MAX}"), found.to_string()));
        }
        // A follower must survive one lost heartbeat without an election.
        if raft.election_ms_min <= 2 * raft.heartbeat_ms {
            return Some(("raft.election_ms_min", more_than(2 * raft.heartbeat_ms), raft.election_ms_min.to_string()));
        }
        if raft.election_ms_max <= raft.election_ms_min {
            return Some(("raft.election_ms_max", more_than(raft.election_ms_min), raft.election_ms_max.to_string()));
        }
        let silence = self.membership.node_silence_ms;
        if silence <= raft.heartbeat_ms {
            return Some(("membership.node_silence_ms", more_than(raft.heartbeat_ms), silence.to_string()));
        }
        if !(1..=SHARDS_MAX).contains(&raft.shards) {
            return Some(("raft.shards", format!("1 to {SHARDS_MAX}"), raft.shards.to_string()));
        }
        if let Err(wrong) = self.limits.check() {
            return Some((wrong.name, wrong.expected, wrong.found.to_string()));
        }
        if raft.snapshot_after_entries == 0 {
            return Some(("raft.snapshot_after_entries", more_than(0), "0".to_owned()));
        }
        let EvictionSection { low_water_permille: low, high_water_permille: high } = self.eviction;
        let most = Marks::most(raft.shards);
        if low > most.low {
            let expected = format!("at most {} with {} shards", most.low, raft.shards);
            return Some(("eviction.low_water_permille", expected, low.to_string()));
        }
        if low > 0 && !(low.saturating_add(1)..=most.high).contains(&high) {
            let expected =
                format!("more than the low mark ({low}) and at most {} with {} shards", most.high, raft.shards);
            return Some(("eviction.high_water_permille", expected, high.to_string()));
        }
        None
    }
}

impl ConfigFile for DataNodeFile {
    fn version(&self) -> u32 {
        self.version
    }
    fn node(&mut self) -> &mut NodeSection {
        &mut self.node
    }
    fn tls(&mut self) -> &mut TlsSection {
        &mut self.tls
    }
    fn wrong(&self) -> Option<(&'static str, String, String)> {
        for (key, label) in [("labels.host", &self.labels.host), ("labels.zone", &self.labels.zone)] {
            if label.len() > LABEL_BYTES_MAX {
                return Some((key, format!("at most {LABEL_BYTES_MAX} bytes"), format!("{} bytes", label.len())));
            }
        }
        let regions = &self.memory.region_bytes;
        if !(1..=REGIONS_MAX).contains(&regions.len()) {
            return Some(("memory.region_bytes", format!("1 to {REGIONS_MAX} regions"), regions.len().to_string()));
        }
        if let Some((found, expected)) = regions.iter().find_map(|bytes| Some((bytes, wrong_region_bytes(*bytes)?))) {
            return Some(("memory.region_bytes", expected, found.to_string()));
        }
        if self.node.advertise.is_none() && self.node.listen.ip().is_unspecified() {
            let expected = "the address of this node for others, since it listens on all of this host".to_owned();
            return Some(("node.advertise", expected, "nothing".to_owned()));
        }
        if self.fabric.bind.is_unspecified() {
            let expected = "an address of this host at which clients reach its memory".to_owned();
            return Some(("fabric.bind", expected, self.fabric.bind.to_string()));
        }
        if !(1..=LANES_MAX).contains(&self.fabric.lanes_max) {
            return Some(("fabric.lanes_max", format!("1 to {LANES_MAX}"), self.fabric.lanes_max.to_string()));
        }
        if let Some(every) = self.fabric.rotate_every
            && !(ROTATE_EVERY_MIN..=ROTATE_EVERY_MAX).contains(&every)
        {
            let found = humantime::format_duration(every).to_string();
            return Some(("fabric.rotate_every", "1s to 366days".to_owned(), found));
        }
        if let Err(wrong) = self.limits.check() {
            return Some((wrong.name, wrong.expected, wrong.found.to_string()));
        }
        let (least, most) = HEARTBEAT_MS;
        let heartbeat = self.membership.heartbeat_ms;
        if !(least..=most).contains(&heartbeat) {
            return Some(("membership.heartbeat_ms", format!("{least} to {most}"), heartbeat.to_string()));
        }
        None
    }
}

/// What flags set: `section.key` and its value.
#[derive(Clone, Debug, Default)]
pub struct Overrides(Vec<(String, Value)>);

impl Overrides {
    /// Takes `SECTION.KEY=VALUE`, the value read as the environment is: numbers, booleans and `[lists]` for what they are, else text.
    ///
    /// # Errors
    /// [`ConfigError::Flag`] for anything else.
    pub fn set(&mut self, assignment: &str) -> Result<(), ConfigError> {
        let wrong = || ConfigError::Flag { found: assignment.to_owned() };
        let (key, value) = assignment.split_once('=').ok_or_else(wrong)?;
        if key.is_empty() || key.split('.').any(str::is_empty) {
            return Err(wrong());
        }
        let value = value.parse().unwrap_or_else(|never: std::convert::Infallible| match never {});
        self.0.push((key.to_owned(), value));
        Ok(())
    }
    /// Sets `key` to a text, if there is one.
    pub fn text(&mut self, key: &str, value: Option<impl ToString>) {
        if let Some(value) = value {
            self.0.push((key.to_owned(), Value::from(value.to_string())));
        }
    }
    /// Sets `key` to a path as the working folder sees it, if there is one.
    pub fn path(&mut self, key: &str, value: Option<&Path>) {
        let absolute = value.map(|path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned()));
        self.text(key, absolute.map(|path| path.display().to_string()));
    }
}

/// Reads the configuration at `path` under the environment of this process and `flags`.
///
/// # Errors
/// [`ConfigError`], with the key and where it was set.
pub fn load<T: ConfigFile>(path: &Path, flags: &Overrides) -> Result<T, ConfigError> {
    load_with(path, Env::prefixed("QUARRY_").filter(|key| key.as_str().contains("__")).split("__"), flags)
}

fn load_with<T: ConfigFile>(path: &Path, env: Env, flags: &Overrides) -> Result<T, ConfigError> {
    let text = fs::read_to_string(path).map_err(|source| ConfigError::Io { path: path.to_owned(), source })?;
    let mut figment = Figment::new().merge(Toml::string(&text)).merge(env);
    for (key, value) in &flags.0 {
        figment = figment.merge(Serialized::default(key, value));
    }
    let mut config: T = figment.extract().map_err(|wrong| explain(path, &figment, wrong))?;
    let origin = || path.display().to_string();
    if config.version() != CONFIG_VERSION {
        let found = config.version().to_string();
        let expected = CONFIG_VERSION.to_string();
        return Err(ConfigError::Value { key: "version".to_owned(), expected, found, origin: origin() });
    }
    if let Some((key, expected, found)) = config.wrong() {
        return Err(ConfigError::Value { key: key.to_owned(), expected, found, origin: origin() });
    }
    let folder = path.parent().unwrap_or_else(|| Path::new(""));
    let node = config.node();
    for path in [&mut node.cluster, &mut node.key, &mut node.data_dir] {
        *path = folder.join(&*path);
    }
    let beside_the_key = node.key.with_file_name(NODE_CREDENTIALS);
    let tls = config.tls();
    tls.credentials = Some(tls.credentials.take().map_or(beside_the_key, |path| folder.join(path)));
    Ok(config)
}

/// Says what is wrong, by key and origin.
fn explain(path: &Path, settings: &Figment, wrong: figment::Error) -> ConfigError {
    let Some(first) = wrong.into_iter().next() else {
        return ConfigError::Layout { path: path.to_owned(), why: "it is empty".to_owned() };
    };
    let origin = match &first.metadata {
        Some(metadata) if metadata.name.contains("environment") => "set in the environment".to_owned(),
        Some(metadata) if metadata.name.contains("TOML") => format!("in {}", path.display()),
        Some(_) => "set by a flag".to_owned(),
        None => format!("in {}", path.display()),
    };
    let section = first.path.join(".");
    let below = |name: &str| {
        let inside = first.path.last().is_some_and(|last| last == name);
        if section.is_empty() || inside { name.to_owned() } else { format!("{section}.{name}") }
    };
    match &first.kind {
        Kind::UnknownField(name, known) => ConfigError::UnknownKey {
            // The path ends with the unknown key itself or with its section, by where it came from.
            key: if first.path.last() == Some(name) { section.clone() } else { below(name) },
            origin,
            known: known.iter().map(|&name| name.to_owned()).collect(),
        },
        Kind::MissingField(name) => ConfigError::Missing { key: below(name), origin },
        Kind::InvalidType(found, expected) | Kind::InvalidValue(found, expected) => {
            ConfigError::Value { key: section, expected: expected.clone(), found: found.to_string(), origin }
        }
        kind if section.is_empty() => ConfigError::Layout { path: path.to_owned(), why: kind.to_string() },
        kind => {
            let found = match settings.find_value(&section) {
                Ok(Value::String(_, text)) => format!("{text:?}"),
                Ok(other) => format!("{:?}", other.to_actual()),
                Err(_) => "nothing".to_owned(),
            };
            ConfigError::Unfit { key: section, why: kind.to_string(), found, origin }
        }
    }
}

/// Milliseconds as a span of time.
#[must_use]
pub const fn ms(value: u64) -> Duration {
    Duration::from_millis(value)
}

/// What is expected of the size of a region, if this is not it.
#[must_use]
pub fn wrong_region_bytes(bytes: u64) -> Option<String> {
    let unit = if bytes >= REGION_BYTES_FULL { EXTENT_BYTES } else { REGION_BYTES_MIN };
    let fits = (REGION_BYTES_MIN..=REGION_BYTES_MAX).contains(&bytes) && bytes.is_multiple_of(unit);
    (!fits).then(|| {
        format!(
            "{REGION_BYTES_MIN} to {REGION_BYTES_MAX} bytes each, in multiples of {REGION_BYTES_MIN}, from {REGION_BYTES_FULL} on of {EXTENT_BYTES}"
        )
    })
}

#[cfg(test)]
#[expect(clippy::result_large_err, reason = "figment's Jail wants closures with figment's own error")]
mod tests {
    use super::*;
    use figment::Jail;

    const META: &str = r#"
        version = 1
        [node]
        cluster = "../cluster.toml"
        key = "node.key"
        data_dir = "data"
        listen = "127.0.0.1:7001"
        [raft]
        heartbeat_ms = 100
    "#;

    fn in_jail(run: impl FnOnce(&mut Jail) -> figment::error::Result<()>) {
        Jail::expect_with(run);
    }

    #[test]
    fn the_environment_wins_over_the_file_and_flags_win_over_both() {
        in_jail(|jail| {
            jail.create_file("meta.toml", META)?;
            let path = jail.directory().join("meta.toml");
            let read = |flags: &Overrides| load::<MetaFile>(&path, flags).unwrap();
            let none = Overrides::default();
            assert_eq!(read(&none).raft, RaftSection { heartbeat_ms: 100, ..RaftSection::default() });
            jail.set_env("QUARRY_RAFT__HEARTBEAT_MS", "50");
            jail.set_env("QUARRY_NODE__LISTEN", "127.0.0.1:9");
            assert_eq!(read(&none).raft.heartbeat_ms, 50);
            assert_eq!(read(&none).node.listen.port(), 9);
            let mut flags = Overrides::default();
            flags.set("raft.heartbeat_ms=25").unwrap();
            flags.text("node.listen", Some("127.0.0.1:8"));
            assert_eq!(read(&flags).raft.heartbeat_ms, 25);
            assert_eq!(read(&flags).node.listen.port(), 8);
            Ok(())
        });
    }

    #[test]
    fn an_unknown_key_is_refused_by_name_wherever_it_comes_from() {
        in_jail(|jail| {
            let typo = META.replace("heartbeat_ms", "hartbeat_ms");
            jail.create_file("typo.toml", &typo)?;
            jail.create_file("meta.toml", META)?;
            let (typo, path) = (jail.directory().join("typo.toml"), jail.directory().join("meta.toml"));
            let unknown = |wrong: ConfigError| match wrong {
                ConfigError::UnknownKey { key, origin, known } => {
                    assert!(!known.is_empty());
                    (key, origin)
                }
                other => panic!("{other}"),
            };
            let none = Overrides::default();
            let (key, origin) = unknown(load::<MetaFile>(&typo, &none).unwrap_err());
            assert_eq!(key, "raft.hartbeat_ms");
            assert!(origin.contains("typo.toml"), "{origin}");
            let mut flags = Overrides::default();
            flags.set("raft.hartbeat_ms=1").unwrap();
            let (key, origin) = unknown(load::<MetaFile>(&path, &flags).unwrap_err());
            assert_eq!((key.as_str(), origin.as_str()), ("raft.hartbeat_ms", "set by a flag"));
            jail.set_env("QUARRY_RAFT__HARTBEAT_MS", "1");
            let (key, origin) = unknown(load::<MetaFile>(&path, &none).unwrap_err());
            assert_eq!((key.as_str(), origin.as_str()), ("raft.hartbeat_ms", "set in the environment"));
            Ok(())
        });
    }

    #[test]
    fn an_unknown_section_of_the_environment_is_refused_and_plain_variables_are_not_configuration() {
        in_jail(|jail| {
            jail.create_file("meta.toml", META)?;
            let path = jail.directory().join("meta.toml");
            jail.set_env("QUARRY_CLUSTER", "cluster.toml");
            assert!(load::<MetaFile>(&path, &Overrides::default()).is_ok());
            jail.set_env("QUARRY_RAFF__SHARDS", "1");
            let wrong = load::<MetaFile>(&path, &Overrides::default()).unwrap_err();
            assert!(matches!(wrong, ConfigError::UnknownKey { key, .. } if key == "raff"));
            Ok(())
        });
    }

    #[test]
    fn a_wrong_value_says_its_key_what_was_expected_and_what_was_found() {
        in_jail(|jail| {
            jail.create_file("meta.toml", META)?;
            let path = jail.directory().join("meta.toml");
            let wrong = |assignment: &str| {
                let mut flags = Overrides::default();
                flags.set(assignment).unwrap();
                match load::<MetaFile>(&path, &flags).unwrap_err() {
                    ConfigError::Value { key, found, .. } => (key, found),
                    other => panic!("{other}"),
                }
            };
            assert_eq!(wrong("raft.shards=0"), ("raft.shards".to_owned(), "0".to_owned()));
            assert_eq!(wrong("raft.election_ms_min=200"), ("raft.election_ms_min".to_owned(), "200".to_owned()));
            for (key, found) in [
                ("raft.shards", "100000"),
                ("limits.connections_max", "0"),
                ("limits.calls_per_client_max", "1000000"),
                ("raft.heartbeat_ms", "0"),
                ("raft.heartbeat_ms", "9223372036854775808"),
                ("raft.election_ms_max", "18446744073709551615"),
                ("membership.node_silence_ms", "0"),
                ("membership.node_silence_ms", "100"),
                ("eviction.high_water_permille", "125"),
                ("eviction.low_water_permille", "126"),
                ("eviction.high_water_permille", "201"),
            ] {
                assert_eq!(wrong(&format!("{key}={found}")), (key.to_owned(), found.to_owned()));
            }
            assert_eq!(wrong("version=2"), ("version".to_owned(), "2".to_owned()));
            assert_eq!(wrong("raft.shards=many").0, "raft.shards");
            assert!(matches!(Overrides::default().set("raft"), Err(ConfigError::Flag { .. })));
            assert!(matches!(Overrides::default().set(".x=1"), Err(ConfigError::Flag { .. })));
            Ok(())
        });
    }

    #[test]
    fn a_missing_key_is_named_and_paths_start_at_the_folder_of_the_file() {
        in_jail(|jail| {
            jail.create_file("meta.toml", META)?;
            jail.create_file("short.toml", &META.replace("key = \"node.key\"", ""))?;
            let folder = jail.directory().to_owned();
            let config = load::<MetaFile>(&folder.join("meta.toml"), &Overrides::default()).unwrap();
            assert_eq!(config.node.key, folder.join("node.key"));
            let wrong = load::<MetaFile>(&folder.join("short.toml"), &Overrides::default()).unwrap_err();
            assert!(matches!(wrong, ConfigError::Missing { key, .. } if key == "node.key"));
            Ok(())
        });
    }

    #[test]
    fn a_value_that_cannot_be_understood_is_named_by_its_key_wherever_it_was_set() {
        in_jail(|jail| {
            jail.create_file("meta.toml", META)?;
            jail.create_file("typo.toml", &META.replace("127.0.0.1:7001", "7001"))?;
            jail.create_file("broken.toml", "version = ")?;
            let folder = jail.directory().to_owned();
            let mut flags = Overrides::default();
            flags.text("node.listen", Some("localhost"));
            for (file, flags, origin) in
                [("meta.toml", flags, "set by a flag"), ("typo.toml", Overrides::default(), "typo.toml")]
            {
                let wrong = load::<MetaFile>(&folder.join(file), &flags).unwrap_err();
                let said = wrong.to_string();
                assert!(matches!(wrong, ConfigError::Unfit { key, .. } if key == "node.listen"), "{said}");
                assert!(said.contains(origin) && !said.contains("config.rs"), "{said}");
            }
            let wrong = load::<MetaFile>(&folder.join("broken.toml"), &Overrides::default()).unwrap_err();
            let said = wrong.to_string();
            assert!(matches!(wrong, ConfigError::Layout { .. }) && !said.contains("config.rs"), "{said}");
            Ok(())
        });
    }

    #[test]
    fn keys_are_rotated_by_the_clock_only_where_a_file_says_so() {
        in_jail(|jail| {
            let node = META.split("[raft]").next().unwrap_or_default();
            jail.create_file("data.toml", &(node.to_owned() + "[memory]\nregion_bytes = [1048576]\n"))?;
            let path = jail.directory().join("data.toml");
            let every = |value: &str| {
                let mut flags = Overrides::default();
                flags.set(&format!("fabric.rotate_every={value}")).unwrap();
                load::<DataNodeFile>(&path, &flags).map(|file| file.fabric.rotate_every)
            };
            assert_eq!(load::<DataNodeFile>(&path, &Overrides::default()).unwrap().fabric.rotate_every, None);
            let day = every("24h").unwrap();
            assert_eq!(day, Some(Duration::from_secs(24 * 3600)));
            let section = FabricSection { rotate_every: day, ..FabricSection::default() };
            let text = toml::to_string(&section).unwrap();
            assert_eq!(toml::from_str::<FabricSection>(&text).unwrap(), section);
            assert!(matches!(every("20ms"), Err(ConfigError::Value { key, .. }) if key == "fabric.rotate_every"));
            assert!(every("often").is_err());
            Ok(())
        });
    }

    #[test]
    fn regions_lanes_and_heartbeats_outside_the_limits_are_refused() {
        in_jail(|jail| {
            let text = META.split("[raft]").next().unwrap_or_default().to_owned() + "[memory]\nregion_bytes = [1]\n";
            jail.create_file("data.toml", &text)?;
            let path = jail.directory().join("data.toml");
            let mut flags = Overrides::default();
            assert!(matches!(load::<DataNodeFile>(&path, &flags), Err(ConfigError::Value { .. })));
            flags.set("memory.region_bytes=[1048576, 2097152]").unwrap();
            let config = load::<DataNodeFile>(&path, &flags).unwrap();
            assert_eq!(config.memory.region_bytes, [1 << 20, 2 << 20]);
            for wrong in [
                "memory.region_bytes=[]",
                "memory.region_bytes=[1048577]",
                "memory.region_bytes=[1074790400]",
                "fabric.lanes_max=0",
                "limits.bytes_max=0",
                "fabric.lanes_max=100000",
                "membership.heartbeat_ms=0",
                "membership.heartbeat_ms=60001",
                "fabric.bind=\"0.0.0.0\"",
                "fabric.bind=\"::\"",
            ] {
                let mut flags = flags.clone();
                flags.set(wrong).unwrap();
                let said = load::<DataNodeFile>(&path, &flags);
                let key = wrong.split('=').next().unwrap();
                assert!(matches!(&said, Err(ConfigError::Value { key: it, .. }) if it == key), "{wrong}: {said:?}");
            }
            flags.set("node.listen=\"0.0.0.0:7500\"").unwrap();
            let said = load::<DataNodeFile>(&path, &flags);
            assert!(matches!(&said, Err(ConfigError::Value { key, .. }) if key == "node.advertise"), "{said:?}");
            flags.set("node.advertise=\"data-101.example:7500\"").unwrap();
            load::<DataNodeFile>(&path, &flags).unwrap();
            Ok(())
        });
    }
}
