//! Which cluster: its name, its root key and where its meta nodes are. Decides nothing else; a cluster is not contacted here.
//!
//! ```toml
//! version = 1
//! uuid = "00112233445566778899aabbccddeeff"
//! root = "<64 hex digits: the public half of the root key>"
//! metas = ["meta-1:7100", "meta-2:7100", "meta-3:7100"]
//! credentials = "writer.pem"   # a path from this file's folder; or tls = "off" for a cluster that runs without TLS
//! ```
//! or `quarry://meta-1:7100,meta-2:7100,meta-3:7100?uuid=0011..&root=..&credentials=..`. Unknown keys are refused in both.

use quarry_trust::{CredentialsError, Trust};
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
    /// How this client proves who it is.
    pub tls: Tls,
}

/// How a client proves who it is, and makes its servers prove it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Tls {
    /// Nobody said: such a description serves to look at, not to connect.
    #[default]
    Unset,
    /// With the credentials in this file.
    Credentials(PathBuf),
    /// Not at all: the cluster runs without TLS.
    Off,
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
    #[error(
        "the cluster file is not what was expected (version, uuid, root, metas and credentials or tls, nothing else): {0}"
    )]
    Toml(Box<toml::de::Error>),
    /// A URL that does not begin with `quarry://`.
    #[error("expected quarry://host:port,host:port?uuid=..&root=.., found {found:?}")]
    Scheme {
        /// What there was.
        found: String,
    },
    /// A parameter that is not known, or stands there twice.
    #[error("parameter {found:?} is unknown or stands there twice: the parameters are uuid, root, credentials and tls")]
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
    credentials: Option<PathBuf>,
    tls: Option<String>,
}

impl Cluster {
    /// Checks the parts. How to prove who one is can be said with [`Cluster::with_credentials`] or [`Cluster::without_tls`].
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
        Ok(Self { uuid, root, metas, tls: Tls::Unset })
    }

    /// The same, with the credentials in this file.
    #[must_use]
    pub fn with_credentials(self, file: impl Into<PathBuf>) -> Self {
        Self { tls: Tls::Credentials(file.into()), ..self }
    }

    /// The same, for a cluster that runs without TLS.
    #[must_use]
    pub fn without_tls(self) -> Self {
        Self { tls: Tls::Off, ..self }
    }

    /// How to prove who one is to this cluster, and whom to believe.
    ///
    /// # Errors
    /// [`CredentialsError`] if nobody said, or the credentials cannot be used.
    pub fn trust(&self) -> Result<Trust, CredentialsError> {
        match &self.tls {
            Tls::Unset => Err(CredentialsError::Unset { cluster: self.uuid }),
            Tls::Credentials(file) => Trust::mutual(file, self.uuid, self.root),
            Tls::Off => Ok(Trust::off()),
        }
    }

    /// Reads a cluster file.
    ///
    /// # Errors
    /// [`ClusterError`] if it cannot be read or is not such a file.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ClusterError> {
        let path = path.as_ref();
        let text =
            std::fs::read_to_string(path).map_err(|source| ClusterError::File { path: path.to_owned(), source })?;
        let mut cluster = Self::from_toml(&text)?;
        if let Tls::Credentials(file) = &mut cluster.tls {
            *file = path.parent().unwrap_or_else(|| Path::new("")).join(&*file);
        }
        Ok(cluster)
    }

    /// Reads the text of a cluster file. A relative path of credentials stays as it is.
    ///
    /// # Errors
    /// [`ClusterError`] if it is not such a text.
    pub fn from_toml(text: &str) -> Result<Self, ClusterError> {
        let written: Written = toml::from_str(text).map_err(|error| ClusterError::Toml(Box::new(error)))?;
        if written.version != VERSION {
            let found = written.version.to_string();
            return Err(ClusterError::Value { what: "version", expected: "1, the only one this build reads", found });
        }
        let cluster = Self::new(uuid(&written.uuid)?, root(&written.root)?, written.metas)?;
        Ok(Self { tls: tls(written.credentials, written.tls.as_deref())?, ..cluster })
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
        let (mut named_uuid, mut named_root, mut credentials, mut named_tls) = (None, None, None, None);
        for pair in parameters.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let slot = match name {
                "uuid" => &mut named_uuid,
                "root" => &mut named_root,
                "credentials" => &mut credentials,
                "tls" => &mut named_tls,
                _ => return Err(ClusterError::Parameter { found: name.to_owned() }),
            };
            if slot.replace(value).is_some() {
                return Err(ClusterError::Parameter { found: name.to_owned() });
            }
        }
        let named_uuid = named_uuid.ok_or(ClusterError::Missing { what: "uuid" })?;
        let named_root = named_root.ok_or(ClusterError::Missing { what: "root" })?;
        let metas = hosts.trim_end_matches('/').split(',').filter(|host| !host.is_empty()).map(str::to_owned).collect();
        let cluster = Self::new(uuid(named_uuid)?, root(named_root)?, metas)?;
        Ok(Self { tls: tls(credentials.map(PathBuf::from), named_tls)?, ..cluster })
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
        ) + &match &self.tls {
            Tls::Unset => String::new(),
            Tls::Credentials(file) => format!("credentials = {:?}\n", file.display().to_string()),
            Tls::Off => "tls = \"off\"\n".to_owned(),
        }
    }
}

/// The URL form.
impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "quarry://{}?uuid={}&root={}", self.metas.join(","), self.uuid, self.root)?;
        match &self.tls {
            Tls::Unset => Ok(()),
            Tls::Credentials(file) => write!(f, "&credentials={}", file.display()),
            Tls::Off => f.write_str("&tls=off"),
        }
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

fn tls(credentials: Option<PathBuf>, tls: Option<&str>) -> Result<Tls, ClusterError> {
    match (credentials, tls) {
        (None, None) => Ok(Tls::Unset),
        (Some(file), None) => Ok(Tls::Credentials(file)),
        (None, Some("off")) => Ok(Tls::Off),
        (_, Some(found)) => {
            let expected = "\"off\", or absent where there are credentials";
            Err(ClusterError::Value { what: "tls", expected, found: found.to_owned() })
        }
    }
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
        for cluster in [cluster.clone().without_tls(), cluster.with_credentials(folder.path().join("writer.pem"))] {
            std::fs::write(&path, cluster.to_toml()).unwrap();
            assert_eq!(Cluster::from_file(&path).unwrap(), cluster);
            assert_eq!(Cluster::parse(&cluster.to_string()).unwrap(), cluster);
        }
    }

    #[test]
    fn credentials_lie_beside_the_cluster_file_and_without_any_nobody_connects() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.toml");
        std::fs::write(&path, cluster().with_credentials("writer.pem").to_toml()).unwrap();
        let read = Cluster::from_file(&path).unwrap();
        assert_eq!(read.tls, Tls::Credentials(folder.path().join("writer.pem")));
        assert!(matches!(read.trust(), Err(CredentialsError::Io { .. })));
        assert!(matches!(cluster().trust(), Err(CredentialsError::Unset { .. })));
        let both = cluster().without_tls().to_toml() + "credentials = \"writer.pem\"\n";
        assert!(matches!(Cluster::from_toml(&both), Err(ClusterError::Value { what: "tls", .. })));
        let other = cluster().to_toml() + "tls = \"on\"\n";
        assert!(matches!(Cluster::from_toml(&other), Err(ClusterError::Value { what: "tls", .. })));
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
