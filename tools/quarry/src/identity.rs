//! Identities: the root key, the key and certificate of each process, and the files that they are kept in.
//!
//! Decides the layout of key files and refuses files that others can read. What a certificate means is the business of `quarry-wire`.
//! Every file says its kind and the version of its layout.

use quarry_wire::{
    certificate::{Certificate, Role},
    ids::{CertificateSerial, ClusterUuid, NodeId},
    signed::{PublicKey, SecretKey, Signed},
};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

/// Version of the layout of every file in this module.
pub const KEY_FILE_VERSION: u32 = 1;
const ROOT_KIND: &str = "quarry-root-key";
const NODE_KIND: &str = "quarry-node-key";
/// Bits of a file's mode that let others than its owner in.
const OTHERS: u32 = 0o077;

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The file cannot be read or written.
    #[error("the key file {}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file can be read by others.
    #[error("the key file {} has mode {found:03o}, others must not reach it: chmod 600 it", path.display())]
    Open {
        /// Which file.
        path: PathBuf,
        /// Its mode.
        found: u32,
    },
    /// The file is no key file, or of another kind or version.
    #[error("the key file {}: {field} must be {expected}, found {found}", path.display())]
    Field {
        /// Which file.
        path: PathBuf,
        /// Which field.
        field: &'static str,
        /// What it must be.
        expected: String,
        /// What it is. Never a secret.
        found: String,
    },
    /// The file is not TOML of this layout.
    #[error("the key file {} cannot be understood: {why}", path.display())]
    Layout {
        /// Which file.
        path: PathBuf,
        /// What the parser says, without the text of the file.
        why: String,
    },
    /// A certificate cannot be made.
    #[error("the certificate cannot be made: {0}")]
    Certificate(String),
    /// The system gives no random bytes.
    #[error("the system gives no random bytes: {0}")]
    Random(io::Error),
}

/// The cluster's root: it certifies every node and is needed for nothing else.
#[derive(Debug, Clone)]
pub struct Root {
    /// The cluster that it is the root of.
    pub cluster: ClusterUuid,
    /// The key.
    pub key: SecretKey,
}

/// What one process is: its key and the certificate that says so.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Its key.
    pub key: SecretKey,
    /// The root's word for it.
    pub certificate: Signed<Certificate>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RootFile {
    version: u32,
    kind: String,
    cluster: String,
    seed: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeFile {
    version: u32,
    kind: String,
    node: u64,
    role: String,
    seed: String,
    certificate: String,
}

impl Root {
    /// A new cluster's root, from the system's generator.
    ///
    /// # Errors
    /// [`IdentityError::Random`].
    pub fn generate() -> Result<Self, IdentityError> {
        Ok(Self { cluster: ClusterUuid(random()?), key: SecretKey::from_seed(&random()?) })
    }

    /// The public half, which everyone may know.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        self.key.public()
    }

    /// Makes a key for `node` and certifies it. `serial` must never have been used in this cluster.
    ///
    /// # Errors
    /// [`IdentityError::Random`].
    pub fn certify(&self, serial: CertificateSerial, node: NodeId, role: Role) -> Result<Identity, IdentityError> {
        let key = SecretKey::from_seed(&random()?);
        let statement = Certificate { serial, node, role, key: key.public() };
        Ok(Identity { certificate: self.key.sign_as_root(self.cluster, statement), key })
    }

    /// Writes the root's file, readable by its owner alone. It must not exist.
    ///
    /// # Errors
    /// [`IdentityError::Io`].
    pub fn write(&self, path: &Path) -> Result<(), IdentityError> {
        let file = RootFile {
            version: KEY_FILE_VERSION,
            kind: ROOT_KIND.to_owned(),
            cluster: self.cluster.to_string(),
            seed: hex::encode(self.key.seed()),
        };
        write_secret(path, &toml::to_string(&file).expect("strings and numbers are always TOML"))
    }

    /// Reads the root's file.
    ///
    /// # Errors
    /// [`IdentityError`] for a file that others can read or that is not of this layout.
    pub fn read(path: &Path) -> Result<Self, IdentityError> {
        let file: RootFile = read_secret(path)?;
        expect_kind(path, file.version, &file.kind, ROOT_KIND)?;
        let cluster = file.cluster.parse().map_err(|_| field(path, "cluster", "32 hex digits", &file.cluster))?;
        Ok(Self { cluster, key: SecretKey::from_seed(&seed(path, &file.seed)?) })
    }
}

impl Identity {
    /// The node that it is.
    #[must_use]
    pub const fn node(&self) -> NodeId {
        self.certificate.statement.node
    }

    /// Writes the file of this identity, readable by its owner alone. It must not exist.
    ///
    /// # Errors
    /// [`IdentityError::Io`].
    pub fn write(&self, path: &Path) -> Result<(), IdentityError> {
        write_secret(path, &self.text())
    }

    /// The same in place of the file that is there.
    ///
    /// # Errors
    /// [`IdentityError::Io`].
    pub fn write_over(&self, path: &Path) -> Result<(), IdentityError> {
        write_secret_over(path, &self.text())
    }

    fn text(&self) -> String {
        let file = NodeFile {
            version: KEY_FILE_VERSION,
            kind: NODE_KIND.to_owned(),
            node: self.node().0,
            role: self.certificate.statement.role.to_string(),
            seed: hex::encode(self.key.seed()),
            certificate: hex::encode(self.certificate.encode()),
        };
        toml::to_string(&file).expect("strings and numbers are always TOML")
    }

    /// Reads the file of an identity that must have `role`. Checks that the certificate is this key's and signed by `root` for `cluster`.
    ///
    /// # Errors
    /// [`IdentityError`] for a file that others can read, that is not of this layout, or whose parts do not belong together.
    pub fn read(path: &Path, role: Role, cluster: ClusterUuid, root: PublicKey) -> Result<Self, IdentityError> {
        let file: NodeFile = read_secret(path)?;
        expect_kind(path, file.version, &file.kind, NODE_KIND)?;
        let key = SecretKey::from_seed(&seed(path, &file.seed)?);
        let bytes =
            hex::decode(&file.certificate).map_err(|_| field(path, "certificate", "hex digits", "something else"))?;
        let certificate: Signed<Certificate> =
            Signed::decode(&bytes).map_err(|wrong| field(path, "certificate", "a signed certificate", wrong))?;
        let said = certificate.statement;
        if said.role != role {
            return Err(field(path, "role", role, said.role));
        }
        if said.key != key.public() {
            return Err(field(path, "certificate", "the certificate of this key", said.key));
        }
        if said.node.0 != file.node || said.role.to_string() != file.role {
            let expected = format!("node {} as {}, as its certificate says", said.node.0, said.role);
            return Err(field(path, "node and role", expected, format!("node {} as {}", file.node, file.role)));
        }
        let root_key = root.verifying().ok_or_else(|| field(path, "root", "a usable public key", root))?;
        if !certificate.is_signed_by(cluster, &root_key) {
            let expected = format!("signed by root {root} for cluster {cluster}");
            return Err(field(path, "certificate", expected, "another signature"));
        }
        Ok(Self { key, certificate })
    }
}

/// `N` bytes from the system's generator.
///
/// # Errors
/// [`IdentityError::Random`].
pub fn random<const N: usize>() -> Result<[u8; N], IdentityError> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let got = rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty());
        filled += got.map_err(|errno| IdentityError::Random(errno.into()))?;
    }
    Ok(bytes)
}

fn write_secret(path: &Path, text: &str) -> Result<(), IdentityError> {
    let io = |source| IdentityError::Io { path: path.to_owned(), source };
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(io)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(io)
}

/// Replaces the file at `path`, or makes it, readable by its owner alone; a crash leaves the old one or the new one.
pub(crate) fn write_secret_over(path: &Path, text: &str) -> Result<(), IdentityError> {
    let aside = path.with_added_extension(format!("new-{}", std::process::id()));
    let io = |source| IdentityError::Io { path: path.to_owned(), source };
    // What a process of this number left behind when it was killed.
    if let Err(source) = fs::remove_file(&aside)
        && source.kind() != io::ErrorKind::NotFound
    {
        return Err(io(source));
    }
    write_secret(&aside, text)?;
    fs::rename(&aside, path).map_err(io)
}

fn read_secret<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T, IdentityError> {
    let io = |source| IdentityError::Io { path: path.to_owned(), source };
    let found = fs::metadata(path).map_err(io)?.permissions().mode() & 0o777;
    if found & OTHERS != 0 {
        return Err(IdentityError::Open { path: path.to_owned(), found });
    }
    let text = fs::read_to_string(path).map_err(io)?;
    // The parser's full message quotes the line, which may hold the secret.
    toml::from_str(&text)
        .map_err(|wrong| IdentityError::Layout { path: path.to_owned(), why: wrong.message().to_owned() })
}

fn expect_kind(path: &Path, version: u32, kind: &str, expected: &str) -> Result<(), IdentityError> {
    if kind != expected {
        return Err(field(path, "kind", expected, kind));
    }
    if version != KEY_FILE_VERSION {
        return Err(field(path, "version", KEY_FILE_VERSION, version));
    }
    Ok(())
}

fn seed(path: &Path, text: &str) -> Result<[u8; 32], IdentityError> {
    let mut bytes = [0; 32];
    hex::decode_to_slice(text, &mut bytes)
        .map_err(|_| field(path, "seed", "64 hex digits", format!("{} characters", text.len())))?;
    Ok(bytes)
}

fn field(path: &Path, field: &'static str, expected: impl ToString, found: impl ToString) -> IdentityError {
    IdentityError::Field { path: path.to_owned(), field, expected: expected.to_string(), found: found.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> (tempfile::TempDir, Root) {
        (tempfile::tempdir().unwrap(), Root::generate().unwrap())
    }

    #[test]
    fn key_files_survive_a_round_trip_and_only_their_owner_can_read_them() {
        let (dir, root) = root();
        let (root_path, node_path) = (dir.path().join("root.key"), dir.path().join("node.key"));
        let identity = root.certify(CertificateSerial(1), NodeId(7), Role::Meta).unwrap();
        root.write(&root_path).unwrap();
        identity.write(&node_path).unwrap();
        let read_root = Root::read(&root_path).unwrap();
        assert_eq!((read_root.cluster, read_root.public()), (root.cluster, root.public()));
        let read = Identity::read(&node_path, Role::Meta, root.cluster, root.public()).unwrap();
        assert_eq!((read.certificate, read.key.public()), (identity.certificate, identity.key.public()));
        for path in [root_path, node_path] {
            assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn a_key_file_that_others_can_read_is_refused() {
        let (dir, root) = root();
        let path = dir.path().join("root.key");
        root.write(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(Root::read(&path), Err(IdentityError::Open { found: 0o640, .. })));
    }

    #[test]
    fn a_key_file_is_not_written_over() {
        let (dir, root) = root();
        let path = dir.path().join("root.key");
        root.write(&path).unwrap();
        let before = fs::read(&path).unwrap();
        assert!(matches!(root.write(&path), Err(IdentityError::Io { .. })));
        assert_eq!(fs::read(&path).unwrap(), before);
    }

    #[test]
    fn an_identity_of_another_role_or_cluster_or_layout_is_refused() {
        let (dir, root) = root();
        let path = dir.path().join("node.key");
        root.certify(CertificateSerial(1), NodeId(7), Role::Meta).unwrap().write(&path).unwrap();
        let read = |role, cluster, root| Identity::read(&path, role, cluster, root);
        let wrong_role = read(Role::DataNode, root.cluster, root.public());
        assert!(matches!(wrong_role, Err(IdentityError::Field { field: "role", .. })));
        let other = Root::generate().unwrap();
        let wrong_cluster = read(Role::Meta, other.cluster, root.public());
        assert!(matches!(wrong_cluster, Err(IdentityError::Field { field: "certificate", .. })));
        let wrong_root = read(Role::Meta, root.cluster, other.public());
        assert!(matches!(wrong_root, Err(IdentityError::Field { field: "certificate", .. })));
        let newer = fs::read_to_string(&path).unwrap().replace("version = 1", "version = 2");
        fs::write(&path, newer).unwrap();
        let wrong_version = read(Role::Meta, root.cluster, root.public());
        assert!(matches!(wrong_version, Err(IdentityError::Field { field: "version", .. })));
    }
}
