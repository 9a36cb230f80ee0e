//! Credentials for connections: certificates that the cluster's root key signs, each in one PEM file with its private key.
//!
//! What is in a certificate and who believes it is the business of `quarry-trust`; this makes them, which takes the root key.

use crate::identity::{IdentityError, Root, write_secret_over};
use quarry_trust::{Identity, identity::role, issuer};
use quarry_wire::certificate::Role;
use rcgen::{
    CertificateParams, DistinguishedName, DnType, DnValue, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ED25519, SanType,
};
use std::{
    net::IpAddr,
    path::Path,
    time::{Duration, UNIX_EPOCH},
};

/// What stands before the seed of an ed25519 key in PKCS #8.
const PKCS8_ED25519: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];
/// Certificates begin this long before they are made: clocks differ.
pub const BEGINS_BEFORE: Duration = Duration::from_secs(60 * 60);

/// From when to when a certificate is believed, in milliseconds since 1970.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Validity {
    /// From.
    pub from_ms: u64,
    /// To.
    pub to_ms: u64,
}

impl Validity {
    /// From a little before `now_ms` for this long.
    #[must_use]
    pub fn lasting(now_ms: u64, span: Duration) -> Self {
        let ms = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX / 4);
        Self { from_ms: now_ms.saturating_sub(ms(BEGINS_BEFORE)), to_ms: now_ms.saturating_add(ms(span)) }
    }
}

/// Makes credentials for `identity`: the text of their file. `hosts` are names and addresses that other tools than ours may look for; ours
/// know nodes by who they are.
///
/// # Errors
/// [`IdentityError::Certificate`] if a host cannot stand in a certificate, or the system gives no random bytes.
pub fn issue(root: &Root, identity: &Identity, hosts: &[String], validity: Validity) -> Result<String, IdentityError> {
    let wrong = |error: rcgen::Error| IdentityError::Certificate(error.to_string());
    let named = |name: String| {
        let mut names = DistinguishedName::new();
        names.push(DnType::CommonName, DnValue::Utf8String(name));
        names
    };
    let mut authority = CertificateParams::default();
    authority.distinguished_name = named(issuer(root.cluster));
    let seed = [&PKCS8_ED25519[..], &root.key.seed()].concat();
    let issuer = Issuer::new(authority, KeyPair::try_from(seed).map_err(wrong)?);

    let mut params = CertificateParams::default();
    params.distinguished_name = named(identity.to_string());
    let at = |ms: u64| (UNIX_EPOCH + Duration::from_millis(ms)).into();
    (params.not_before, params.not_after) = (at(validity.from_ms), at(validity.to_ms));
    params.subject_alt_names.push(SanType::URI(identity.to_string().try_into().map_err(wrong)?));
    for host in hosts {
        params.subject_alt_names.push(match host.parse::<IpAddr>() {
            Ok(address) => SanType::IpAddress(address),
            Err(_) => SanType::DnsName(host.clone().try_into().map_err(wrong)?),
        });
    }
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    if identity.is(Role::Meta) || identity.is(Role::DataNode) {
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
    }
    let key = KeyPair::generate_for(&PKCS_ED25519).map_err(wrong)?;
    let certificate = params.signed_by(&key, &issuer).map_err(wrong)?;
    Ok(certificate.pem() + &key.serialize_pem())
}

/// Makes credentials and puts them into `path`, in one step: whoever reads it finds the old ones or the new ones whole.
///
/// # Errors
/// [`IdentityError`].
pub fn write(
    path: &Path,
    root: &Root,
    identity: &Identity,
    hosts: &[String],
    validity: Validity,
) -> Result<(), IdentityError> {
    write_secret_over(path, &issue(root, identity, hosts, validity)?)
}

/// The role of a client with this name.
///
/// # Errors
/// What it must be.
pub fn client_role(name: &str) -> Result<Role, String> {
    let client = |role: &Role| matches!(role, Role::Writer | Role::Reader | Role::Admin);
    role(name).filter(client).ok_or_else(|| "a role is writer, reader or admin".to_owned())
}

/// The role of a node with this name.
///
/// # Errors
/// What it must be.
pub fn node_role(name: &str) -> Result<Role, String> {
    let node = |role: &Role| matches!(role, Role::Meta | Role::DataNode);
    role(name).filter(node).ok_or_else(|| "a role is meta or datanode".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_client::{Clock as _, SystemClock};
    use quarry_trust::{Expect, Limits, Trust};
    use quarry_wire::ids::NodeId;
    use std::path::PathBuf;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpStream},
        task::JoinHandle,
        time::Instant,
    };
    use tonic::{
        Status,
        transport::{Channel, Endpoint, server::TcpIncoming},
    };

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    const PATIENCE: Duration = Duration::from_secs(20);

    struct World {
        root: Root,
        folder: tempfile::TempDir,
    }

    impl World {
        fn new() -> Self {
            Self { root: Root::generate().unwrap(), folder: tempfile::tempdir().unwrap() }
        }
        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }
        fn node(&self, role: Role, node: u64) -> Identity {
            Identity::node(self.root.cluster, role, NodeId(node)).unwrap()
        }
        fn writer(&self) -> Identity {
            Identity::client(self.root.cluster, &[Role::Writer], "w").unwrap()
        }
        fn trust_for(&self, name: &str, identity: &Identity, span: Duration) -> Trust {
            let validity = Validity::lasting(SystemClock.wall_ms(), span);
            write(&self.path(name), &self.root, identity, &[], validity).unwrap();
            Trust::mutual(&self.path(name), self.root.cluster, self.root.public()).unwrap()
        }
        fn trust(&self, name: &str, identity: &Identity) -> Trust {
            self.trust_for(name, identity, DAY)
        }
    }

    /// A server that anybody may ask for its health; ends when dropped.
    struct Served(String, JoinHandle<()>);

    impl Drop for Served {
        fn drop(&mut self) {
            self.1.abort();
        }
    }

    async fn serve(trust: &Trust) -> Served {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (_, health) = tonic_health::server::health_reporter();
        let door = trust.door(Limits::default());
        let router = door.server().layer(door.guard()).layer(door.admission()).add_service(health);
        let server = router.serve_with_incoming(door.incoming(TcpIncoming::from(listener)));
        Served(address, tokio::spawn(async move { server.await.unwrap() }))
    }

    /// Connects, or says why that is not trusted. A client whose first bytes meet a connection that is closed already learns why from the next.
    async fn meet(client: &Trust, server: &Served, expect: Expect) -> Result<Channel, String> {
        let endpoint = Endpoint::from_shared(format!("http://{}", server.0)).unwrap();
        let channel = endpoint.connect_with_connector_lazy(client.connector(expect));
        until("to be let in, or to be told why not", async || {
            let mut health = tonic_health::pb::health_client::HealthClient::new(channel.clone());
            match health.check(tonic_health::pb::HealthCheckRequest::default()).await {
                Ok(_) => Some(Ok(channel.clone())),
                Err(status) => client.distrust(&server.0, &status).map(Err),
            }
        })
        .await
    }

    async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look().await {
                return found;
            }
            assert!(Instant::now() < end, "not in time: {what}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    #[tokio::test]
    async fn a_server_is_taken_only_if_it_is_the_node_that_is_meant() {
        let world = World::new();
        let client = world.trust("client", &world.writer());
        let data = serve(&world.trust("101", &world.node(Role::DataNode, 101))).await;
        for expect in [Expect::ANY, Expect::DATA_NODE, Expect::data_node(NodeId(101))] {
            assert!(meet(&client, &data, expect).await.is_ok(), "{expect}");
        }
        for expect in [Expect::META, Expect::meta(NodeId(101)), Expect::data_node(NodeId(102))] {
            let why = meet(&client, &data, expect).await.unwrap_err();
            assert!(why.contains(&expect.to_string()) && why.contains("datanode/101"), "{why}");
        }
        let posing = serve(&world.trust("posing", &world.writer())).await;
        let why = meet(&client, &posing, Expect::ANY).await.unwrap_err();
        assert!(why.contains("is a client's, not a node's"), "{why}");
        let (other, plain) = (World::new(), serve(&Trust::off()).await);
        let foreign = serve(&other.trust("1", &other.node(Role::Meta, 1))).await;
        let why = meet(&client, &foreign, Expect::ANY).await.unwrap_err();
        assert!(why.contains("another root, or of another cluster"), "{why}");
        let why = meet(&client, &plain, Expect::ANY).await.unwrap_err();
        assert!(why.contains("does not speak TLS"), "{why}");
        let why = meet(&Trust::off(), &data, Expect::ANY).await.unwrap_err();
        assert!(why.contains("speaks TLS and this side does not"), "{why}");
    }

    #[tokio::test]
    async fn a_crowd_that_connects_and_says_nothing_keeps_nobody_out() {
        let world = World::new();
        let server = serve(&world.trust("1", &world.node(Role::Meta, 1))).await;
        let client = world.trust("client", &world.writer());
        // More than may prove at once who they are, and none of them does: the first byte of a hello, and no more.
        let mut crowd = Vec::new();
        for _ in 0..1_200 {
            let mut silent = TcpStream::connect(&server.0).await.unwrap();
            // Whoever took longest may have been sent away by now.
            drop(silent.write_all(&[0x16]).await);
            crowd.push(silent);
        }
        assert!(meet(&client, &server, Expect::META).await.is_ok());
        // Newcomers took the places of the first.
        let first = until("the first is sent away", async || {
            let mut byte = [0];
            tokio::time::timeout(Duration::from_millis(1), crowd[0].read(&mut byte)).await.ok()
        });
        assert!(!matches!(first.await, Ok(1..)), "nothing is said to it");
    }

    #[tokio::test]
    async fn a_client_is_let_in_until_its_certificate_ends() {
        let world = World::new();
        let server = serve(&world.trust("1", &world.node(Role::Meta, 1))).await;
        let client = world.trust_for("brief", &world.writer(), Duration::from_secs(2));
        assert_eq!(client.ends_within(Duration::ZERO), None);
        assert!(client.ends_within(DAY).is_some_and(|why| why.contains("expired")));
        let why = until("it ends", async || meet(&client, &server, Expect::META).await.err()).await;
        assert!(why.contains("they have expired") && why.contains("quarry keys"), "{why}");
        let path = world.path("brief");
        let again = Trust::mutual(&path, world.root.cluster, world.root.public()).unwrap_err();
        assert!(again.to_string().contains("has expired"), "{again}");
    }

    #[tokio::test]
    async fn credentials_are_read_again_when_their_file_changed_and_open_connections_go_on() {
        let world = World::new();
        let client = world.trust("client", &world.writer());
        let server = serve(&world.trust("node", &world.node(Role::DataNode, 101))).await;
        let open = meet(&client, &server, Expect::data_node(NodeId(101))).await.unwrap();
        // Another identity, so that it shows which are in use.
        let (path, valid) = (world.path("node"), Validity::lasting(SystemClock.wall_ms(), DAY));
        write(&path, &world.root, &world.node(Role::DataNode, 102), &[], valid).unwrap();
        until("the new ones", async || meet(&client, &server, Expect::data_node(NodeId(102))).await.ok()).await;
        assert!(meet(&client, &server, Expect::data_node(NodeId(101))).await.is_err());
        let mut health = tonic_health::pb::health_client::HealthClient::new(open);
        let still: Result<_, Status> = health.check(tonic_health::pb::HealthCheckRequest::default()).await;
        assert!(still.is_ok(), "open connections go on: {still:?}");
    }

    #[test]
    fn credentials_that_others_can_read_or_that_are_of_another_cluster_are_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let (world, other) = (World::new(), World::new());
        world.trust("w", &world.writer());
        let path = world.path("w");
        let read = |root: &Root| {
            Trust::mutual(&path, root.cluster, root.public()).map(|_| ()).map_err(|wrong| wrong.to_string())
        };
        assert!(read(&other.root).unwrap_err().contains("another root or cluster"));
        let sister = Root { cluster: other.root.cluster, key: world.root.key.clone() };
        assert!(read(&sister).unwrap_err().contains("another root or cluster"));
        let mut parts = std::fs::read_to_string(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(read(&world.root).unwrap_err().contains("chmod 600"));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        read(&world.root).unwrap();
        // The key of another certificate.
        let strange = issue(&world.root, &world.writer(), &[], Validity::lasting(SystemClock.wall_ms(), DAY)).unwrap();
        let at = strange.find("-----BEGIN PRIVATE").unwrap();
        parts.truncate(parts.find("-----BEGIN PRIVATE").unwrap());
        for (text, why) in [
            (parts.clone() + &strange[at..], "private key of its certificate"),
            (parts, "private key in PEM"),
            (String::new(), "a certificate in PEM"),
        ] {
            std::fs::write(&path, text).unwrap();
            let said = read(&world.root).unwrap_err();
            assert!(said.contains(why), "{said}");
        }
    }
}
