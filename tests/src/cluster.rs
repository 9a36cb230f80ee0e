//! Clusters for tests: started when asked for, at most [`CLUSTERS_MAX`] at a time, gone when dropped.
//!
//! [`TestCluster::start`] gives a cluster of one's own, to be hurt. [`shared`] gives one that tests use side by side and leave whole: each
//! takes a namespace of its own. A test that fails finds the ends of all logs in its output; `QUARRY_KEEP=1` keeps the folder.

use crate::{
    calls::{self, Answer},
    raw::RawWriter,
    seed,
    wait::{PATIENCE, soon},
};
use quarry::local::{LocalCluster, LocalSpec, Member, built_binary};
use quarry_client::{Client, Cluster, Namespace, NamespaceSpec, Options};
use quarry_proto::v1;
use std::{
    collections::BTreeMap,
    ops::{Deref, DerefMut},
    sync::{Arc, Weak},
};
use tempfile::TempDir;
use tokio::sync::{Mutex, Semaphore, SemaphorePermit};

/// Clusters at a time in one test binary: five processes each, for machines of two cores.
pub const CLUSTERS_MAX: usize = 2;
static CLUSTERS: Semaphore = Semaphore::const_new(CLUSTERS_MAX);
/// Lines of each log that a failed test prints.
const LOG_LINES: usize = 40;
/// The Raft group of the only shard, in clusters as [`spec`] has them.
pub const SHARD: u32 = 1;
/// The Raft group of the directory.
pub const DIRECTORY: u32 = 0;

/// A cluster of this test alone.
pub struct TestCluster {
    /// Dropped first: its processes end before their folder goes.
    local: LocalCluster,
    folder: Option<TempDir>,
    _permit: SemaphorePermit<'static>,
}

/// The specification that tests start from: default sizes, impatient timing.
///
/// # Panics
/// If the `quarry` binary is absent or of another build than this test.
#[must_use]
pub fn spec() -> LocalSpec {
    let binary = built_binary().unwrap_or_else(|wrong| panic!("{wrong}"));
    let mut spec = LocalSpec::new(binary);
    spec.region_bytes = vec![1 << 30];
    // Most tests look at the shard that has their keys; `e2e/shards.rs` is about many.
    spec.raft.shards = 1;
    spec.environment.push(("QUARRY_LOG".to_owned(), "info,openraft=warn".to_owned()));
    spec
}

impl TestCluster {
    /// Three meta nodes and two data nodes.
    pub async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    /// A cluster that differs from [`spec`] by `change`.
    ///
    /// # Panics
    /// If it is not ready in time, with what was missing.
    pub async fn start_with(change: impl FnOnce(&mut LocalSpec)) -> Self {
        Self::start_prepared(change, |_| {}).await
    }

    /// One meta node and `data_nodes` data nodes with one region of `region_bytes` each: for what is not about the control plane. A data node
    /// may be stopped for as long as a busy machine makes a test need.
    pub async fn start_small(data_nodes: u32, region_bytes: u64) -> Self {
        Self::start_with(|spec| small(spec, data_nodes, region_bytes)).await
    }

    /// A cluster that differs from [`spec`] by `change`, whose folder is seen to by `prepare` before its processes start.
    ///
    /// # Panics
    /// If it is not ready in time, with what was missing.
    pub async fn start_prepared(change: impl FnOnce(&mut LocalSpec), prepare: impl FnOnce(&LocalCluster)) -> Self {
        let permit = CLUSTERS.acquire().await.expect("the semaphore is never closed");
        let mut spec = spec();
        change(&mut spec);
        let folder = tempfile::Builder::new().prefix("quarry-test-").tempdir().expect("a temporary folder");
        let local =
            LocalCluster::create(&folder.path().join("cluster"), spec).unwrap_or_else(|wrong| panic!("{wrong}"));
        prepare(&local);
        calls::know(local.members().into_iter().map(|member| local.address(member)), local.trust());
        // From here on a failure shows the logs.
        let mut cluster = Self { local, folder: Some(folder), _permit: permit };
        if let Err(wrong) = cluster.local.start(PATIENCE).await {
            panic!("{wrong}");
        }
        cluster
    }

    /// A client of this cluster.
    pub async fn client(&self) -> Client {
        self.client_with(Options::default()).await
    }

    /// A client with options of one's own.
    ///
    /// # Panics
    /// If it cannot connect.
    pub async fn client_with(&self, options: Options) -> Client {
        let cluster = Cluster::from_file(self.local.cluster_file()).expect("the cluster file is a cluster file");
        Client::connect(cluster, options).await.expect("the cluster answers")
    }

    /// A client and a new namespace of two copies.
    pub async fn namespace(&self) -> (Client, Namespace) {
        let client = self.client().await;
        let namespace = create_namespace(&client, 2, None).await;
        (client, namespace)
    }

    /// Somebody who writes by hand.
    pub async fn raw(&self) -> RawWriter {
        RawWriter::connect(&self.local.cluster_file()).await
    }

    /// What one meta node says about itself.
    ///
    /// # Errors
    /// If it does not answer.
    pub async fn status(&self, meta: Member) -> Answer<v1::StatusReply> {
        calls::status(&self.local.address(meta)).await
    }

    /// Waits until every meta node that runs has applied the same entries of every group, and checks that their states are the same.
    ///
    /// # Panics
    /// If two states differ at the same applied index, or if the nodes do not come to the same index in time.
    pub async fn agree(&self) -> BTreeMap<u32, (u64, String)> {
        let running: Vec<Member> = self.local.metas().into_iter().filter(|meta| self.local.is_running(*meta)).collect();
        soon("all meta nodes have applied the same entries", async || {
            let mut seen: BTreeMap<u32, (u64, String)> = BTreeMap::new();
            let mut same = true;
            for meta in &running {
                let reply = calls::state_hash(&self.local.address(*meta)).await.ok()?;
                assert!(reply.groups.len() >= 2, "{meta} hosts the directory and at least one shard");
                for group in reply.groups {
                    assert_eq!(group.hash.len(), 32, "a state hash has 32 bytes");
                    let found = (group.applied, hex::encode(&group.hash));
                    let expected = seen.entry(group.group).or_insert_with(|| found.clone());
                    if expected.0 == found.0 {
                        assert_eq!(
                            *expected, found,
                            "{meta}: another state of group {} at the same index",
                            group.group
                        );
                    } else {
                        same = false;
                    }
                }
            }
            same.then_some(seen)
        })
        .await
    }

    /// Bytes of the shard's memory by the leader's account, summed over all regions: (free, granted, committed, resting).
    pub async fn space(&self) -> Space {
        let leader = soon("the shard has a leader", async || self.local.leader(SHARD, PATIENCE).await.ok()).await;
        let reply = self.status(leader).await.expect("the leader answers");
        let mut space = Space::default();
        for it in reply.space.iter().filter(|it| it.shard == SHARD) {
            space.free += it.free_bytes;
            space.granted += it.granted_bytes;
            space.committed += it.committed_bytes;
            space.pinned += it.pinned_bytes;
            space.resting += it.resting_bytes;
        }
        space
    }

    fn print_logs(&self) {
        for member in self.local.members() {
            let text = std::fs::read(self.local.log_file(member)).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let lines: Vec<&str> = text.lines().collect();
            eprintln!("--- {member}, the end of its log");
            for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
                eprintln!("{line}");
            }
        }
    }
}

/// What [`TestCluster::start_small`] starts.
pub fn small(spec: &mut LocalSpec, data_nodes: u32, region_bytes: u64) {
    spec.metas = 1;
    spec.data_nodes = data_nodes;
    spec.region_bytes = vec![region_bytes];
    spec.node_silence_ms = 120_000;
    // What fills such a cluster is to stay, or its test says otherwise.
    spec.eviction.low_water_permille = 0;
    // What such a cluster is used for is not about who calls, and some of it speaks by hand in the name of others.
    spec.plaintext = true;
}

impl Deref for TestCluster {
    type Target = LocalCluster;
    fn deref(&self) -> &LocalCluster {
        &self.local
    }
}
impl DerefMut for TestCluster {
    fn deref_mut(&mut self) -> &mut LocalCluster {
        &mut self.local
    }
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.print_logs();
        }
        if std::env::var_os("QUARRY_KEEP").is_some()
            && let Some(folder) = self.folder.take()
        {
            eprintln!("kept: {}", folder.keep().display());
        }
    }
}

/// Bytes of a shard's memory by use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    /// To be granted.
    pub free: u64,
    /// Held by grants.
    pub granted: u64,
    /// Under values.
    pub committed: u64,
    /// Under values that are not current any more, kept for a pin.
    pub pinned: u64,
    /// In quarantine.
    pub resting: u64,
}

/// A part in a cluster that tests share.
pub struct Shared(Arc<TestCluster>);

/// The cluster that tests of this binary use side by side; started by whoever comes first, gone with the last.
pub async fn shared() -> Shared {
    static SHARED: Mutex<Weak<TestCluster>> = Mutex::const_new(Weak::new());
    share(&SHARED, false).await
}

/// The same without TLS: for those who speak by hand in the name of nodes and strangers, to see what stands behind the guard.
pub async fn shared_without_tls() -> Shared {
    static SHARED: Mutex<Weak<TestCluster>> = Mutex::const_new(Weak::new());
    share(&SHARED, true).await
}

async fn share(held: &Mutex<Weak<TestCluster>>, plaintext: bool) -> Shared {
    let mut held = held.lock().await;
    if let Some(cluster) = held.upgrade() {
        return Shared(cluster);
    }
    let cluster = Arc::new(TestCluster::start_with(|spec| spec.plaintext = plaintext).await);
    *held = Arc::downgrade(&cluster);
    Shared(cluster)
}

impl Deref for Shared {
    type Target = TestCluster;
    fn deref(&self) -> &TestCluster {
        &self.0
    }
}
impl Drop for Shared {
    fn drop(&mut self) {
        if std::thread::panicking() && Arc::strong_count(&self.0) > 1 {
            self.0.print_logs();
        }
    }
}

/// A name that no other test uses.
#[must_use]
pub fn fresh_name(what: &str) -> String {
    format!("{what}-{:016x}", seed::random())
}

/// A new namespace of class `cache`; without `least` it accepts the default number of copies.
///
/// # Panics
/// If it cannot be made.
pub async fn create_namespace(client: &Client, copies: u8, least: Option<u8>) -> Namespace {
    let name = fresh_name("test");
    let mut spec = NamespaceSpec::cache(&name);
    spec.copies = copies;
    spec.least = least;
    client.create_namespace(spec).await.expect("a new name can be taken")
}
