//! Which cluster: its name, its root key and where its meta nodes are. Decides nothing else; a cluster is not contacted here.
//!
//! ```toml
//! version = 1
//! uuid = "00112233445566778899aabbccddeeff"
//! root = "<64 hex digits: the public half of the root key>"
//! metas = ["meta-1:7100", "meta-2:7100", "meta-3:7100"]
//! ```
//! or `quarry://meta-1:7100,meta-2:7100,meta-3:7100?uuid=0011..&root=..`. Unknown keys are refused in both.

use quarry_wire::{ids::ClusterUuid, keyring::Keyring, signed::PublicKey};
use serde::Deserialize;
use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

/// Version of the layout of a cluster file.
const VERSION: u32 = 1;

/// A cluster to connect to: all that a client must trust beforehand.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cluster {
    /// Its name.
    pub uuid: ClusterUuid,
    /// The public half of its root key: what proves everything else.
    pub root: PublicKey,
    /// Its meta nodes, as `host:port`; at least one.
    pub metas: Vec<String>,
}

/// Why a description of a cluster cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The file cannot be read.
    #[error("cannot read the cluster file {path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not the TOML that was expected.
    #[error("the cluster file is not what was expected (version, uuid, root and metas, nothing else): {0}")]
    Toml(Box<toml::de::Error>),
    /// A URL that does not begin with `quarry://`.
    #[error("expected quarry://host:port,host:port?uuid=..&root=.., found {found:?}")]
    Scheme {
        /// What there was.
        found: String,
    },
    /// A parameter that is not known, or stands there twice.
    #[error("parameter {found:?} is unknown or stands there twice: the parameters are uuid and root")]
    Parameter {
        /// Its name.
        found: String,
    },
    /// Something is missing.
    #[error("{what} is missing")]
    Missing {
        /// What.
        what: &'static str,
    },
    /// A value is not what it must be.
    #[error("{what} must be {expected}, found {found:?}")]
    Value {
        /// Of what.
        what: &'static str,
        /// What it must be.
        expected: &'static str,
        /// What it is.
        found: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    version: u32,
    uuid: String,
    root: String,
    metas: Vec<String>,
}

impl Cluster {
    /// Checks the parts.
    ///
    /// # Errors
    /// [`ClusterError`] if there is no meta node, an address is not `host:port`, or the root key is no usable key.
    pub fn new(uuid: ClusterUuid, root: PublicKey, metas: Vec<String>) -> Result<Self, ClusterError> {
        if metas.is_empty() {
            return Err(ClusterError::Missing { what: "the address of a meta node" });
        }
        for meta in &metas {
            let port = meta.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port.parse::<u16>());
            let clean = meta.bytes().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'/' | b'?' | b'#' | b'@'));
            if !clean || !matches!(port, Some(Ok(1..))) {
                return Err(ClusterError::Value { what: "a meta node", expected: "host:port", found: meta.clone() });
            }
        }
        if Keyring::new(uuid, root).is_err() {
            return Err(ClusterError::Value {
                what: "root",
                expected: "a usable ed25519 public key",
                found: root.to_string(),
            });
        }
        Ok(Self { uuid, root, metas })
    }

    /// Reads a cluster file.
    ///
    /// # Errors
    /// [`ClusterError`] if it cannot be read or is not such a file.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ClusterError> {
        let path = path.as_ref();
        let text =
            std::fs::read_to_string(path).map_err(|source| ClusterError::File { path: path.to_owned(), source })?;
        Self::from_toml(&text)
    }

    /// Reads the text of a cluster file.
    ///
    /// # Errors
    /// [`ClusterError`] if it is not such a text.
    pub fn from_toml(text: &str) -> Result<Self, ClusterError> {
        let written: Written = toml::from_str(text).map_err(|error| ClusterError::Toml(Box::new(error)))?;
        if written.version != VERSION {
            let found = written.version.to_string();
            return Err(ClusterError::Value { what: "version", expected: "1, the only one this build reads", found });
        }
        Self::new(uuid(&written.uuid)?, root(&written.root)?, written.metas)
    }

    /// Reads `quarry://host:port,host:port?uuid=..&root=..`.
    ///
    /// # Errors
    /// [`ClusterError`] if it is not such a URL.
    pub fn parse(url: &str) -> Result<Self, ClusterError> {
        let rest = url
            .strip_prefix("quarry://")
            .ok_or_else(|| ClusterError::Scheme { found: url.chars().take(40).collect() })?;
        let (hosts, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        let (mut named_uuid, mut named_root) = (None, None);
        for pair in parameters.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let slot = match name {
                "uuid" => &mut named_uuid,
                "root" => &mut named_root,
                _ => return Err(ClusterError::Parameter { found: name.to_owned() }),
            };
            if slot.replace(value).is_some() {
                return Err(ClusterError::Parameter { found: name.to_owned() });
            }
        }
        let named_uuid = named_uuid.ok_or(ClusterError::Missing { what: "uuid" })?;
        let named_root = named_root.ok_or(ClusterError::Missing { what: "root" })?;
        let metas = hosts.trim_end_matches('/').split(',').filter(|host| !host.is_empty()).map(str::to_owned).collect();
        Self::new(uuid(named_uuid)?, root(named_root)?, metas)
    }

    /// The text of its cluster file.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let metas: Vec<String> = self.metas.iter().map(|meta| format!("\"{meta}\"")).collect();
        format!(
            "version = {VERSION}\nuuid = \"{}\"\nroot = \"{}\"\nmetas = [{}]\n",
            self.uuid,
            self.root,
            metas.join(", ")
        )
    }
}

/// The URL form.
impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "quarry://{}?uuid={}&root={}", self.metas.join(","), self.uuid, self.root)
    }
}

/// Reads the URL form.
impl FromStr for Cluster {
    type Err = ClusterError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

fn uuid(text: &str) -> Result<ClusterUuid, ClusterError> {
    // The usual way to write one has dashes.
    text.replace('-', "").parse().map_err(|_| ClusterError::Value {
        what: "uuid",
        expected: "32 hex digits",
        found: text.to_owned(),
    })
}

fn root(text: &str) -> Result<PublicKey, ClusterError> {
    text.parse().map_err(|_| ClusterError::Value { what: "root", expected: "64 hex digits", found: text.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_wire::signed::SecretKey;

    fn cluster() -> Cluster {
        let root = SecretKey::from_seed(&[3; 32]).public();
        Cluster::new(ClusterUuid([7; 16]), root, vec!["one:7100".into(), "[::1]:7101".into()]).unwrap()
    }

    #[test]
    fn a_cluster_round_trips_through_its_file_and_its_url() {
        let cluster = cluster();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.toml");
        std::fs::write(&path, cluster.to_toml()).unwrap();
        assert_eq!(Cluster::from_file(&path).unwrap(), cluster);
        assert_eq!(Cluster::parse(&cluster.to_string()).unwrap(), cluster);
        assert!(matches!(Cluster::from_file(folder.path().join("none")), Err(ClusterError::File { .. })));
    }

    #[test]
    fn unknown_and_repeated_keys_are_refused() {
        let cluster = cluster();
        let text = cluster.to_toml() + "metaz = []\n";
        assert!(matches!(Cluster::from_toml(&text), Err(ClusterError::Toml(_))));
        assert!(
            matches!(Cluster::parse(&format!("{cluster}&rot=1")), Err(ClusterError::Parameter { found }) if found == "rot")
        );
        assert!(matches!(Cluster::parse(&format!("{cluster}&root=1")), Err(ClusterError::Parameter { .. })));
    }

    #[test]
    fn a_cluster_file_of_another_version_or_of_none_is_refused() {
        let text = cluster().to_toml();
        let other = text.replace("version = 1", "version = 2");
        assert!(
            matches!(Cluster::from_toml(&other), Err(ClusterError::Value { what: "version", found, .. }) if found == "2")
        );
        let none = text.replace("version = 1\n", "");
        assert!(matches!(Cluster::from_toml(&none), Err(ClusterError::Toml(_))));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let good = cluster();
        let url = |metas: &str| format!("quarry://{metas}?uuid={}&root={}", good.uuid, good.root);
        assert!(matches!(Cluster::parse("http://one:1"), Err(ClusterError::Scheme { .. })));
        assert!(matches!(Cluster::parse(&url("")), Err(ClusterError::Missing { .. })));
        assert!(matches!(Cluster::parse("quarry://one:1?uuid=00"), Err(ClusterError::Missing { what: "root" })));
        for bad in ["one", "one:", "one:0", "one:70000", ":7", "a b:7", "user@one:7"] {
            assert!(matches!(Cluster::parse(&url(bad)), Err(ClusterError::Value { what: "a meta node", .. })), "{bad}");
        }
        let short = format!("quarry://one:1?uuid=0011&root={}", good.root);
        assert!(matches!(Cluster::parse(&short), Err(ClusterError::Value { what: "uuid", .. })));
        let weak = format!("quarry://one:1?uuid={}&root={}", good.uuid, "00".repeat(32));
        assert!(matches!(Cluster::parse(&weak), Err(ClusterError::Value { what: "root", .. })));
    }
}
