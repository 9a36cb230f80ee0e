//! Credentials: one PEM file with a certificate and its private key, readable by its owner alone, read again when it changed.
//!
//! Both lie in one file so that one rename replaces both. Whether it changed is looked at when a connection begins, at most once a second:
//! connections that begin later use what is there then, open ones stay as they are. A new file that cannot be used changes nothing: the old
//! credentials stay in use and the log says why.

use crate::{
    anchor::{Clients, Servers, identity_of, provider, roots},
    identity::Identity,
};
use parking_lot::Mutex;
use quarry_wire::{ids::ClusterUuid, signed::PublicKey};
use rustls::{
    ClientConfig, ServerConfig,
    client::Resumption,
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject as _},
    server::NoServerSessionStorage,
    sign::{CertifiedKey, SingleCertAndKey},
};
use std::{
    fs, io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::time::Instant;

/// The file is looked at no more often.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Bits of a file's mode that let others than its owner in.
const OTHERS: u32 = 0o077;
/// What both sides must speak inside.
const HTTP2: &[u8] = b"h2";

/// Why credentials cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// The file cannot be read.
    #[error("the credentials {}: {source}; quarry keys makes them (quarry keys --help)", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// None are named.
    #[error(
        "no credentials for cluster {cluster}: name a file that quarry keys client made (credentials = \"FILE\" in the cluster file, --credentials FILE or QUARRY_CREDENTIALS); if the cluster runs without TLS, say tls = \"off\" in the cluster file"
    )]
    Unset {
        /// For which cluster.
        cluster: ClusterUuid,
    },
    /// The file can be read by others.
    #[error("the credentials {} have mode {found:03o}, others must not reach them: chmod 600 them", path.display())]
    Open {
        /// Which file.
        path: PathBuf,
        /// Its mode.
        found: u32,
    },
    /// The file does not hold what it must.
    #[error("the credentials {} must hold {expected}, found {found}", path.display())]
    Layout {
        /// Which file.
        path: PathBuf,
        /// What it must hold.
        expected: &'static str,
        /// What it holds. Never a secret.
        found: String,
    },
    /// The certificate is not one of this cluster's, or not of this time.
    #[error("the credentials {} are not usable in cluster {cluster}: {why}; make new ones with quarry keys", path.display())]
    Unfit {
        /// Which file.
        path: PathBuf,
        /// For which cluster.
        cluster: ClusterUuid,
        /// What is wrong.
        why: String,
    },
}

/// A file of credentials and what it held when it was last read.
#[derive(Debug)]
pub(crate) struct Credentials {
    path: PathBuf,
    cluster: ClusterUuid,
    root: PublicKey,
    held: Mutex<Held>,
}

#[derive(Debug)]
struct Held {
    looked: Instant,
    seen: Option<Seen>,
    loaded: Arc<Loaded>,
}

/// What tells one state of the file from another. A file that was renamed into place has another inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Seen {
    inode: u64,
    length: u64,
    modified: (i64, i64),
}

impl Seen {
    fn of(path: &Path) -> Option<Self> {
        let it = fs::metadata(path).ok()?;
        Some(Self { inode: it.ino(), length: it.len(), modified: (it.mtime(), it.mtime_nsec()) })
    }
}

/// What a file of credentials held.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) identity: Arc<Identity>,
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
    certificate: CertificateDer<'static>,
}

impl Credentials {
    pub(crate) fn read(path: &Path, cluster: ClusterUuid, root: PublicKey) -> Result<Self, CredentialsError> {
        let seen = Seen::of(path);
        let loaded = Arc::new(Loaded::read(path, cluster, root)?);
        Ok(Self {
            path: path.to_owned(),
            cluster,
            root,
            held: Mutex::new(Held { looked: Instant::now(), seen, loaded }),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) const fn cluster(&self) -> ClusterUuid {
        self.cluster
    }

    /// What is in use now; reads the file again if it changed.
    pub(crate) fn current(&self) -> Arc<Loaded> {
        let mut held = self.held.lock();
        if held.looked.elapsed() < LOOK_EVERY {
            return Arc::clone(&held.loaded);
        }
        held.looked = Instant::now();
        let seen = Seen::of(&self.path);
        if seen == held.seen {
            return Arc::clone(&held.loaded);
        }
        // Remembered whatever it holds: a file that cannot be used is complained of once.
        held.seen = seen;
        match Loaded::read(&self.path, self.cluster, self.root) {
            Ok(loaded) => {
                tracing::info!(identity = %loaded.identity, path = %self.path.display(), "new credentials are in use");
                held.loaded = Arc::new(loaded);
            }
            Err(error) => {
                tracing::warn!(%error, "the credentials changed and cannot be used: the old ones stay in use")
            }
        }
        Arc::clone(&held.loaded)
    }

    /// Why the certificate in use will not be believed any more in `ahead` from now; none if it will.
    pub(crate) fn ends_within(&self, ahead: Duration) -> Option<String> {
        let at = UnixTime::since_unix_epoch(Duration::from_secs(UnixTime::now().as_secs()) + ahead);
        verify(&self.current().certificate, self.cluster, self.root, at).err()
    }
}

impl Loaded {
    fn read(path: &Path, cluster: ClusterUuid, root: PublicKey) -> Result<Self, CredentialsError> {
        let owned = || path.to_owned();
        let io = |source| CredentialsError::Io { path: owned(), source };
        let found = fs::metadata(path).map_err(io)?.permissions().mode() & 0o777;
        if found & OTHERS != 0 {
            return Err(CredentialsError::Open { path: owned(), found });
        }
        let pem = fs::read(path).map_err(io)?;
        let layout = |expected, found: String| CredentialsError::Layout { path: owned(), expected, found };
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        let chain = chain.map_err(|wrong| layout("a certificate in PEM", wrong.to_string()))?;
        let certificate = chain.first().cloned().ok_or_else(|| layout("a certificate in PEM", "none".to_owned()))?;
        let key = PrivateKeyDer::from_pem_slice(&pem).map_err(|_| layout("a private key in PEM", "none".to_owned()))?;
        let unfit = |why: String| CredentialsError::Unfit { path: owned(), cluster, why };
        let key = CertifiedKey::from_der(chain, key, &provider())
            .map_err(|wrong| layout("the private key of its certificate", wrong.to_string()))?;
        verify(&certificate, cluster, root, UnixTime::now()).map_err(unfit)?;
        let identity = identity_of(&certificate).map_err(|wrong| unfit(wrong.to_string()))?;
        if identity.cluster() != cluster {
            return Err(unfit(format!("they are {identity}")));
        }
        let (client, server) = configs(cluster, root, &Arc::new(SingleCertAndKey::from(key)));
        Ok(Self { identity: Arc::new(identity), client, server, certificate })
    }
}

/// Whether a certificate would be believed at `now` by the other processes of the cluster.
fn verify(
    certificate: &CertificateDer<'_>,
    cluster: ClusterUuid,
    root: PublicKey,
    now: UnixTime,
) -> Result<(), String> {
    let roots = roots(cluster, root);
    let parsed = webpki::EndEntityCert::try_from(certificate).map_err(|wrong| wrong.to_string())?;
    let algorithms = provider().signature_verification_algorithms.all;
    let usage = webpki::KeyUsage::client_auth();
    let verified = parsed.verify_for_usage(algorithms, &roots.roots, &[], now, usage, None, None);
    verified.map(drop).map_err(|wrong| match wrong {
        webpki::Error::CertExpired { .. } => "the certificate has expired".to_owned(),
        webpki::Error::UnknownIssuer => "the certificate is of another root or cluster".to_owned(),
        other => other.to_string(),
    })
}

fn configs(
    cluster: ClusterUuid,
    root: PublicKey,
    own: &Arc<SingleCertAndKey>,
) -> (Arc<ClientConfig>, Arc<ServerConfig>) {
    let algorithms = provider().signature_verification_algorithms;
    let servers = Servers { cluster, roots: roots(cluster, root), algorithms };
    let mut client = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("ring speaks TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(servers))
        .with_client_cert_resolver(Arc::clone(own) as _);
    client.alpn_protocols = vec![HTTP2.to_vec()];
    // The name of a server says nothing here, and every connection shows its certificates anew.
    client.enable_sni = false;
    client.resumption = Resumption::disabled();
    let mut server = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("ring speaks TLS 1.3")
        .with_client_cert_verifier(Arc::new(Clients::new(cluster, roots(cluster, root))))
        .with_cert_resolver(Arc::clone(own) as _);
    server.alpn_protocols = vec![HTTP2.to_vec()];
    server.session_storage = Arc::new(NoServerSessionStorage {});
    server.send_tls13_tickets = 0;
    (Arc::new(client), Arc::new(server))
}
