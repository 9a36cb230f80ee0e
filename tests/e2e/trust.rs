//! Trust between processes: who is let in, who may ask for what, and credentials that change under load.

use quarry::{
    credentials::{Validity, issue, write},
    identity::Root,
};
use quarry_client::{CallError, Client, Clock as _, Cluster, ConnectError, GetError, Options, PutError, SystemClock};
use quarry_proto::{refusal::Refusal, v1};
use quarry_tests::{
    LocalSpec, Member, Signal, TestCluster, bare,
    calls::{self, Answer, Calls, refusal},
    cluster::create_namespace,
    eventually,
    raw::{RawWriter, Wish},
    shared, soon, stranger,
    wait::PATIENCE,
};
use quarry_trust::{Identity, Trust};
use quarry_wire::{certificate::Role, ids::NodeId};
use std::{
    path::{Path, PathBuf},
    process::{Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tempfile::TempDir;
use tokio::process::Command;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The root of a cluster, and a folder for credentials that it makes.
struct Authority {
    root: Root,
    folder: TempDir,
}

impl Authority {
    fn of(cluster: &TestCluster) -> Self {
        let root = Root::read(&cluster.dir().join("root.key")).unwrap();
        Self { root, folder: tempfile::tempdir().unwrap() }
    }

    fn client(&self, roles: &[Role], name: &str) -> Identity {
        Identity::client(self.root.cluster, roles, name).unwrap()
    }

    fn node(&self, role: Role, node: u64) -> Identity {
        Identity::node(self.root.cluster, role, NodeId(node)).unwrap()
    }

    /// A file with credentials that last for `span`.
    fn file(&self, identity: &Identity, span: Duration) -> PathBuf {
        let path = self.folder.path().join(identity.to_string().replace([':', '/'], "-"));
        write(&path, &self.root, identity, &[], lasting(span)).unwrap();
        path
    }

    fn trust(&self, identity: &Identity) -> Trust {
        Trust::mutual(&self.file(identity, DAY), self.root.cluster, self.root.public()).unwrap()
    }
}

fn lasting(span: Duration) -> Validity {
    Validity::lasting(SystemClock.wall_ms(), span)
}

fn doors(cluster: &TestCluster) -> [String; 2] {
    [cluster.address(cluster.metas()[0]), cluster.address(cluster.data_nodes()[0])]
}

#[tokio::test]
async fn whoever_shows_no_certificate_of_this_cluster_and_time_is_turned_away_by_every_server() {
    let cluster = shared().await;
    let ours = Authority::of(&cluster);
    let writer = ours.client(&[Role::Writer], "stranger");
    let good = issue(&ours.root, &writer, &[], lasting(DAY)).unwrap();
    let over = Validity { from_ms: 1_000, to_ms: SystemClock.wall_ms() - 1_000 };
    let expired = issue(&ours.root, &writer, &[], over).unwrap();
    let later = Validity { from_ms: SystemClock.wall_ms() + 3_600_000, to_ms: SystemClock.wall_ms() + 7_200_000 };
    let early = issue(&ours.root, &writer, &[], later).unwrap();
    let other = Root::generate().unwrap();
    let name = Identity::client(other.cluster, &[Role::Writer], "stranger").unwrap();
    let foreign = issue(&other, &name, &[], lasting(DAY)).unwrap();
    // Under another root that claims our name, and under our root for another cluster.
    let impostor = Root { cluster: ours.root.cluster, key: other.key.clone() };
    let forged = issue(&impostor, &writer, &[], lasting(DAY)).unwrap();
    let sister = Root { cluster: other.cluster, key: ours.root.key.clone() };
    let elsewhere = issue(&sister, &name, &[], lasting(DAY)).unwrap();
    for address in doors(&cluster) {
        let met = stranger::meet(&address, Some(&good)).await;
        assert!(met.answer.is_ok(), "{address}: whoever belongs to the cluster is let in: {met:?}");
        for (pem, alert) in [
            (None, "CertificateRequired"),
            (Some(&expired), "CertificateExpired"),
            (Some(&early), "CertificateExpired"),
            (Some(&foreign), "UnknownCA"),
            (Some(&forged), "DecryptError"),
            (Some(&elsewhere), "UnknownCA"),
        ] {
            let met = stranger::meet(&address, pem.map(String::as_str)).await;
            let why = met.answer.expect_err(alert);
            assert!(why.contains(alert), "{address}: expected {alert}, found {why}");
        }
    }
}

async fn connect(cluster: Cluster) -> Result<Client, ConnectError> {
    Client::connect(cluster, Options { timeout: Duration::from_secs(20), ..Options::default() }).await
}

/// What a client is told that is not trusted, or does not trust.
async fn told(cluster: Cluster) -> String {
    let began = tokio::time::Instant::now();
    let why = match connect(cluster).await {
        Err(ConnectError::Call(CallError::Untrusted { why }) | ConnectError::Credentials { why }) => why,
        other => panic!("{other:?}"),
    };
    assert!(began.elapsed() < Duration::from_secs(15), "it gives up at once: {why}");
    why
}

#[tokio::test]
async fn a_client_that_is_not_trusted_or_does_not_trust_is_told_why_at_once() {
    let cluster = shared().await;
    let ours = Authority::of(&cluster);
    let file = Cluster::from_file(cluster.cluster_file()).unwrap();
    let writer = ours.client(&[Role::Writer], "told");
    let with = |path: PathBuf| file.clone().with_credentials(path);

    // Its credentials end while it holds them: the servers turn it away.
    let brief = ours.file(&writer, Duration::from_secs(3));
    let trust = with(brief.clone()).trust().unwrap();
    let [meta, data] = doors(&cluster);
    for address in [meta, data] {
        let answer =
            eventually(PATIENCE, "credentials end", async || calls::connect_as(&trust, &address).await.err()).await;
        let Refusal::Untrusted(it) = refusal::<()>(Err(answer)) else { panic!("not told why") };
        assert!(it.why.contains("expired") && it.why.contains("quarry keys"), "{}", it.why);
    }
    // It sees so itself before it asks anybody.
    let why = told(with(brief)).await;
    assert!(why.contains("has expired"), "{why}");

    // Of another root: neither side would believe the other, and the client looks first.
    let other = Root::generate().unwrap();
    let stranger = Identity::client(other.cluster, &[Role::Writer], "told").unwrap();
    let path = ours.folder.path().join("other.pem");
    write(&path, &other, &stranger, &[], lasting(DAY)).unwrap();
    let of_other = Cluster::new(other.cluster, other.public(), file.metas.clone()).unwrap().with_credentials(&path);
    let why = told(of_other).await;
    assert!(why.contains("another root, or of another cluster"), "{why}");
    let why = told(with(path)).await;
    assert!(why.contains("another root or cluster"), "{why}");

    // No credentials at all, and none where they should be.
    let why = told(Cluster::new(file.uuid, file.root, file.metas.clone()).unwrap()).await;
    assert!(why.contains("quarry keys client"), "{why}");
    let why = told(with(ours.folder.path().join("none.pem"))).await;
    assert!(why.contains("none.pem"), "{why}");
    let why = told(file.clone().without_tls()).await;
    assert!(why.contains("speaks TLS"), "{why}");
}

fn forbidden<T: std::fmt::Debug>(answer: Answer<T>) -> v1::Forbidden {
    match refusal(answer) {
        Refusal::Forbidden(it) => it,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn each_role_makes_its_own_calls_and_is_refused_the_others_with_both_sides_named() {
    let cluster = shared().await;
    let ours = Authority::of(&cluster);
    let [meta, data] = doors(&cluster);
    let as_client = |role| ours.client(&[role], "roles");
    let calls_of =
        async |identity: &Identity, address: &str| calls::connect_as(&ours.trust(identity), address).await.unwrap();
    let status =
        async |calls: Calls| calls::done(v1::admin_client::AdminClient::new(calls).status(v1::StatusRequest {})).await;
    let grant = async |calls: Calls| {
        calls::done(v1::control_client::ControlClient::new(calls).grant(v1::GrantRequest::default())).await
    };
    let heartbeat = async |calls: Calls, node: u64| {
        let beat = v1::HeartbeatRequest { node, ..Default::default() };
        calls::done(v1::registry_client::RegistryClient::new(calls).heartbeat(beat)).await
    };

    let (reader, writer, admin) = (as_client(Role::Reader), as_client(Role::Writer), as_client(Role::Admin));
    let (node, leader) = (ours.node(Role::DataNode, 101), ours.node(Role::Meta, 1));
    assert!(status(calls_of(&admin, &meta).await).await.is_ok());
    for identity in [&reader, &writer, &node] {
        let it = forbidden(status(calls_of(identity, &meta).await).await);
        assert_eq!((it.found, it.expected), (identity.to_string(), vec!["admin".to_owned(), "meta".to_owned()]));
    }
    for identity in [&reader, &admin, &node, &leader] {
        let it = forbidden(grant(calls_of(identity, &meta).await).await);
        assert_eq!((it.found, it.expected), (identity.to_string(), vec!["writer".to_owned()]));
    }
    assert!(heartbeat(calls_of(&node, &meta).await, 101).await.is_ok());
    for (identity, node) in [(&node, 102), (&writer, 101), (&leader, 1)] {
        let it = forbidden(heartbeat(calls_of(identity, &meta).await, node).await);
        assert_eq!(it.found, identity.to_string());
    }
    let confirm = v1::ConfirmRequest::default();
    let mut by_writer = v1::data_node_client::DataNodeClient::new(calls_of(&writer, &data).await);
    assert_eq!(forbidden(calls::done(by_writer.confirm(confirm)).await).expected, ["datanode"]);
    // Between meta nodes nobody else is heard.
    for identity in [&admin, &node] {
        let channel = calls::channel_as(&ours.trust(identity), &meta).await.unwrap();
        let answer = bare::call(channel, "/quarry.raft.v1.Peer/Link", bytes::Bytes::new()).await;
        let it = forbidden::<bytes::Bytes>(answer.map_err(Into::into));
        assert_eq!(it.expected, ["meta"]);
    }

    // The same through the client: a reader reads and writes nothing, a writer does both and administers nothing.
    let file = Cluster::from_file(cluster.cluster_file()).unwrap();
    let everything = cluster.client().await;
    let blocks = create_namespace(&everything, 2, None).await;
    blocks.put("greeting", "hello").await.unwrap();
    let client =
        async |identity: &Identity| connect(file.clone().with_credentials(ours.file(identity, DAY))).await.unwrap();
    let read = client(&reader).await.namespace(&blocks.info().name).await.unwrap();
    assert_eq!(&read.get("greeting").await.unwrap().unwrap().bytes[..], b"hello");
    match read.put("more", "words").await {
        Err(PutError::Call(CallError::Refused(refusal))) => {
            assert!(matches!(*refusal, Refusal::Forbidden(_)), "{refusal}")
        }
        other => panic!("{other:?}"),
    }
    let write = client(&writer).await.namespace(&blocks.info().name).await.unwrap();
    write.put("more", "words").await.unwrap();
    assert_eq!(&write.get("more").await.unwrap().unwrap().bytes[..], b"words");
    let administers = client(&admin).await.namespace(&blocks.info().name).await.unwrap();
    match administers.get("greeting").await {
        Err(GetError::Call(CallError::Refused(refusal))) => {
            assert!(matches!(*refusal, Refusal::Forbidden(_)), "{refusal}")
        }
        other => panic!("{other:?}"),
    }
}

/// A writer by hand with these credentials.
async fn raw_writer(cluster: &TestCluster, ours: &Authority, name: &str) -> (RawWriter, Trust) {
    let identity = ours.client(&[Role::Writer], name);
    let path = ours.file(&identity, DAY);
    let file = Cluster::from_file(cluster.cluster_file()).unwrap().with_credentials(&path);
    let at = ours.folder.path().join(format!("{name}.toml"));
    std::fs::write(&at, file.to_toml()).unwrap();
    (RawWriter::connect(&at).await, ours.trust(&identity))
}

#[tokio::test]
async fn a_writer_cannot_arm_commit_close_or_seal_what_was_granted_to_another() {
    let cluster = shared().await;
    let ours = Authority::of(&cluster);
    let blocks = create_namespace(&cluster.client().await, 2, None).await;
    let (alice, _) = raw_writer(&cluster, &ours, "alice").await;
    let wish = Wish {
        namespace: blocks.info().id,
        slot_size: 4096,
        slots: 8,
        ttl: Duration::from_secs(20),
        avoid: Vec::new(),
    };
    let granted = alice.grant(&wish).await.unwrap();
    let node = granted.grant.holders[0].region.node;
    let (grant, writer) = (Some(granted.grant.id.into()), calls::id_bytes(alice.id.0));
    let mallory = ours.trust(&ours.client(&[Role::Writer], "mallory"));
    let mut theirs =
        v1::data_node_client::DataNodeClient::new(calls::connect_as(&mallory, alice.address(node)).await.unwrap());
    // All that mallory says is true but who mallory is.
    let arm = v1::ArmRequest { grant: granted.bytes.clone(), writer: writer.clone() };
    let commit = v1::CommitRequest {
        grant,
        writer: writer.clone(),
        written: vec![node.0],
        entries: vec![v1::CommitEntry::default()],
    };
    let close = v1::CloseRequest { grant, writer: writer.clone() };
    let refusals = [
        forbidden(calls::done(theirs.arm(arm)).await),
        forbidden(calls::done(theirs.commit(commit)).await),
        forbidden(calls::done(theirs.close(close)).await),
    ];
    for it in refusals {
        assert!(it.found.contains("mallory") && it.expected[0].contains(&alice.id.to_string()), "{it:?}");
    }
    let seal = v1::SealRequest { grant, fill: 0, writer };
    let mut control =
        v1::control_client::ControlClient::new(calls::connect_as(&mallory, &alice.metas()[0]).await.unwrap());
    forbidden(calls::done(control.seal(seal)).await);
    // And it still is alice's.
    alice.arm_all(&granted).await;
}

fn one_of_each(spec: &mut LocalSpec) {
    (spec.metas, spec.data_nodes) = (1, 1);
}

/// The certificate that the server at `address` shows now.
async fn shown(address: &str) -> Vec<u8> {
    stranger::meet(address, None).await.shown.expect("servers show theirs first")
}

#[tokio::test]
async fn credentials_are_exchanged_without_a_restart_under_load_and_no_call_fails() {
    let cluster = TestCluster::start_with(one_of_each).await;
    let ours = Authority::of(&cluster);
    let client = cluster.client().await;
    let blocks = create_namespace(&client, 1, None).await;
    blocks.put("before", "them").await.unwrap();
    let (ends, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let load = {
        let (ends, written, file) = (Arc::clone(&ends), Arc::clone(&written), cluster.cluster_file());
        let name = blocks.info().name.clone();
        tokio::spawn(async move {
            while !ends.load(Ordering::SeqCst) {
                // Each with connections of its own: handshakes go on all the time.
                let client = connect(Cluster::from_file(&file).unwrap()).await.unwrap();
                let theirs = client.namespace(&name).await.unwrap();
                let key = format!("key-{}", written.load(Ordering::SeqCst));
                theirs.put(key.as_str(), "value").await.unwrap();
                assert!(theirs.get(key.as_str()).await.unwrap().is_some());
                client.close().await.unwrap();
                written.fetch_add(1, Ordering::SeqCst);
            }
        })
    };
    let pids: Vec<_> = cluster.members().into_iter().map(|member| cluster.pid(member)).collect();
    for (member, role) in [(Member::Meta(1), Role::Meta), (Member::Data(101), Role::DataNode)] {
        let (address, file) = (cluster.address(member), cluster.member_dir(member).join("tls.pem"));
        let first = shown(&address).await;
        write(&file, &ours.root, &ours.node(role, member.node().0), &[], lasting(DAY)).unwrap();
        let second =
            soon("the new certificate is shown", async || Some(shown(&address).await).filter(|it| *it != first)).await;
        // Something that is not usable changes nothing.
        std::fs::write(&file, "no credentials").unwrap();
        let log = cluster.log_file(member);
        soon("the log says so", async || {
            let now = shown(&address).await;
            assert_eq!(now, second, "the old ones stay in use");
            std::fs::read_to_string(&log).unwrap().contains("the old ones stay in use").then_some(())
        })
        .await;
    }
    // The client's own, and everything goes on.
    let everything = [Role::Writer, Role::Reader, Role::Admin];
    write(&cluster.dir().join("client.pem"), &ours.root, &ours.client(&everything, "dev"), &[], lasting(DAY)).unwrap();
    let before = written.load(Ordering::SeqCst);
    soon("puts go on", async || (written.load(Ordering::SeqCst) > before + 2).then_some(())).await;
    ends.store(true, Ordering::SeqCst);
    load.await.unwrap();
    assert!(blocks.get("before").await.unwrap().is_some(), "open connections stay");
    assert_eq!(cluster.members().into_iter().map(|member| cluster.pid(member)).collect::<Vec<_>>(), pids);
}

async fn quarry(arguments: &[&str], environment: &[(&str, &Path)]) -> Output {
    let mut command = Command::new(quarry::local::built_binary().unwrap());
    command.args(arguments).envs(environment.iter().map(|(name, value)| (name, value)));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    tokio::time::timeout(PATIENCE, command.output()).await.expect("it ends").unwrap()
}

#[tokio::test]
async fn a_node_without_credentials_does_not_start_and_names_the_command_that_makes_them() {
    let mut cluster = TestCluster::start_with(one_of_each).await;
    let blocks = create_namespace(&cluster.client().await, 1, None).await;
    let member = Member::Data(101);
    let (folder, root) = (cluster.member_dir(member), cluster.dir().join("root.key"));
    let (folder, root) = (folder.to_str().unwrap(), root.to_str().unwrap());
    let config = format!("{folder}/config.toml");
    cluster.kill(member, Signal::TERM).await.unwrap();
    let starts = async || quarry(&["datanode", "--config", &config, "--check-config"], &[]).await;
    assert!(starts().await.status.success());
    let credentials = format!("{folder}/tls.pem");
    std::fs::remove_file(&credentials).unwrap();
    let ended = starts().await;
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(!ended.status.success() && said.contains("quarry keys node") && said.contains("--id 101"), "{said}");
    // Nor with those of another.
    std::fs::copy(cluster.member_dir(Member::Meta(1)).join("tls.pem"), &credentials).unwrap();
    let ended = quarry(&["datanode", "--config", &config], &[]).await;
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(!ended.status.success() && said.contains("/meta/1"), "{said}");
    let made =
        quarry(&["keys", "node", "--root", root, "--role", "datanode", "--id", "101", "--out", folder], &[]).await;
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    cluster.restart(member).unwrap();
    cluster.wait_ready(PATIENCE).await.unwrap();
    blocks.put("again", "there").await.unwrap();

    // And clients have theirs by the same command.
    let reader = format!("{folder}/reader.pem");
    let made =
        quarry(&["keys", "client", "--root", root, "--role", "reader", "--name", "bob", "--out", &reader], &[]).await;
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let (file, name) = (cluster.cluster_file(), blocks.info().name.clone());
    let environment = [("QUARRY_CLUSTER", file.as_path()), ("QUARRY_CREDENTIALS", Path::new(&reader))];
    let got = quarry(&["get", "-n", &name, "again"], &environment).await;
    assert_eq!(
        (got.status.code(), &got.stdout[..]),
        (Some(0), &b"there"[..]),
        "{}",
        String::from_utf8_lossy(&got.stderr)
    );
    let put = quarry(&["put", "-n", &name, "more", "/dev/null"], &environment).await;
    let said = String::from_utf8_lossy(&put.stderr).into_owned();
    assert!(!put.status.success() && said.contains("writer alone") && said.contains("reader/bob"), "{said}");
}
