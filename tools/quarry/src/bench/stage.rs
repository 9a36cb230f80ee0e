//! The cluster that is measured: processes of this very binary in a folder for temporary files, gone at the end.

use super::error::BenchError;
use quarry::{
    config::RaftSection,
    local::{LocalCluster, LocalSpec, Report},
    stderr,
};
use quarry_client::{Client, Cluster, Key, Namespace, NamespaceSpec, Options};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::time::Instant;

/// How long a cluster may take to be ready.
const READY: Duration = Duration::from_secs(60);
/// Deadline of each operation.
const OPERATION: Duration = Duration::from_secs(30);
/// How long freed memory may take to be free: a lease, the horizon ahead of it, quarantine, and slack for a busy host.
const REST: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);
/// Keys deleted in one call.
const DELETE_CALL: usize = 1000;

/// A running cluster. Its processes end and its folder goes when it is dropped.
#[derive(Debug)]
pub(crate) struct Stage {
    // Before the folder: what is in it is in use until the processes have ended.
    cluster: LocalCluster,
    region_bytes: u64,
    _folder: Folder,
}

impl Stage {
    /// Starts three meta nodes and `data_nodes` data nodes that lend `region_bytes` each, below `dir`.
    pub(crate) async fn start(dir: &Path, data_nodes: u32, region_bytes: u64) -> Result<Self, BenchError> {
        Self::start_with(dir, data_nodes, region_bytes, RaftSection::default()).await
    }

    /// The same with such groups.
    pub(crate) async fn start_with(
        dir: &Path,
        data_nodes: u32,
        region_bytes: u64,
        raft: RaftSection,
    ) -> Result<Self, BenchError> {
        let folder = Folder::new(dir)?;
        let binary = std::env::current_exe().map_err(BenchError::io("the path of this binary"))?;
        let spec =
            LocalSpec { data_nodes, region_bytes: vec![region_bytes], populate: true, raft, ..LocalSpec::new(binary) };
        let mut cluster = LocalCluster::create(&folder.0.join("cluster"), spec)?;
        cluster.start(READY).await?;
        Ok(Self { cluster, region_bytes, _folder: folder })
    }

    pub(crate) fn cluster(&self) -> &LocalCluster {
        &self.cluster
    }

    /// To end its processes and start them again.
    pub(crate) fn cluster_mut(&mut self) -> &mut LocalCluster {
        &mut self.cluster
    }

    /// A client of its own connections and caches.
    pub(crate) async fn client(&self) -> Result<Client, BenchError> {
        self.client_with(|options| options).await
    }

    /// A client with other options than the usual ones.
    pub(crate) async fn client_with(&self, set: impl FnOnce(Options) -> Options) -> Result<Client, BenchError> {
        let options = set(Options { timeout: OPERATION, ..Options::default() });
        Ok(Client::connect(Cluster::from_file(self.cluster.cluster_file())?, options).await?)
    }

    /// A new namespace of class cache.
    pub(crate) async fn namespace(&self, client: &Client, name: &str, copies: u8) -> Result<Namespace, BenchError> {
        Ok(client.create_namespace(NamespaceSpec { copies, ..NamespaceSpec::cache(name) }).await?)
    }

    /// Waits until every data node has `bytes` that are neither granted, nor committed, nor resting.
    ///
    /// # Errors
    /// [`BenchError::NoRoom`].
    pub(crate) async fn room(&self, bytes: u64) -> Result<(), BenchError> {
        let begun = Instant::now();
        loop {
            let mut used_most = 0;
            for report in self.cluster.status().await.into_values() {
                let Report::Meta(Ok(reply)) = report else { continue };
                let mut used = BTreeMap::<_, u64>::new();
                for space in reply.space {
                    let region = space.region.map(|region| (region.node, region.index));
                    *used.entry(region).or_default() +=
                        space.granted_bytes + space.committed_bytes + space.resting_bytes;
                }
                used_most = used.into_values().fold(used_most, u64::max);
            }
            let free = self.region_bytes.saturating_sub(used_most);
            if free >= bytes {
                return Ok(());
            }
            let waited = begun.elapsed();
            if waited >= REST {
                return Err(BenchError::NoRoom { expected: bytes, free, waited });
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Ends the processes in good order and removes the folder.
    pub(crate) async fn end(mut self) -> Result<(), BenchError> {
        Ok(self.cluster.stop().await?)
    }
}

/// Deletes keys that a round wrote.
pub(crate) async fn delete(namespace: &Namespace, keys: &[Key]) -> Result<(), BenchError> {
    for keys in keys.chunks(DELETE_CALL) {
        for deleted in namespace.delete_many(keys).await {
            deleted?;
        }
    }
    Ok(())
}

/// A folder of ours.
#[derive(Debug)]
struct Folder(PathBuf);

impl Folder {
    fn new(below: &Path) -> Result<Self, BenchError> {
        let random = quarry::identity::random::<6>().map_err(BenchError::Random)?;
        let path = below.join(format!("quarry-bench-{}", hex::encode(random)));
        std::fs::create_dir(&path).map_err(|source| BenchError::Folder { path: path.clone(), source })?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(wrong) = std::fs::remove_dir_all(&self.0) {
            stderr::line(format_args!("quarry: {} stays: {wrong}", self.0.display()));
        }
    }
}
