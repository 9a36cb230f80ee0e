//! The world: three nodes that start, crash and start again, and the calls that reach them or do not.

use crate::{checks::Checks, run::Mutant};
use quarry_meta::sim::SimMeta;
use quarry_meta_state::shard::Settings;
use quarry_proto::refusal::Refusal;
use quarry_raft::{
    Host, HostConfig, RaftNodeId, Role, Timing,
    sim::{self, Disk, Net, Pace},
};
use quarry_wire::ids::Generation;
use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
    time::Duration,
};
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

/// How many nodes there are.
pub(crate) const NODES: u64 = 3;
/// How many shards.
pub(crate) const SHARDS: u32 = 2;
/// How long a client waits for one answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// A call came to nothing.
#[derive(Debug)]
pub(crate) enum Failed {
    /// No answer: the call, or what it did, may have been lost on either way.
    Lost,
    /// The node refused.
    Refused(Refusal),
}

/// A node that runs.
struct Up {
    host: Host,
    meta: Arc<SimMeta>,
    down: CancellationToken,
}

struct Node {
    disk: Disk,
    /// How often it was started.
    lives: u32,
    up: Option<Up>,
}

/// All of it. Everything happens in one thread.
pub(crate) struct World {
    pub(crate) net: Net,
    pub(crate) checks: Arc<Checks>,
    mutant: Option<Mutant>,
    folder: TempDir,
    nodes: RefCell<BTreeMap<RaftNodeId, Node>>,
    /// Of a thousand calls of clients, so many are lost on either way.
    pub(crate) lost_per_mille: RefCell<u64>,
}

impl World {
    pub(crate) fn new(mutant: Option<Mutant>, checks: Arc<Checks>) -> io::Result<Rc<Self>> {
        let mut pace = Pace::default();
        if mutant == Some(Mutant::AcknowledgedEarly) {
            // It also takes its time: nobody would notice otherwise.
            let (least, most) = (Duration::from_millis(200), Duration::from_millis(800));
            pace = Pace { least, most, acknowledged_early: true };
        }
        let node = |id| (RaftNodeId(id), Node { disk: Disk::new(pace), lives: 0, up: None });
        // Snapshots are synced files: in memory, if there is such a place, so that thousands of worlds are fast.
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { TempDir::with_prefix_in("quarry-sim-", memory)? } else { TempDir::new()? };
        Ok(Rc::new(Self {
            net: Net::default(),
            checks,
            mutant,
            folder,
            nodes: RefCell::new((1..=NODES).map(node).collect()),
            lost_per_mille: RefCell::new(0),
        }))
    }

    pub(crate) fn mutant(&self) -> Option<Mutant> {
        self.mutant
    }

    pub(crate) fn ids() -> impl Iterator<Item = RaftNodeId> {
        (1..=NODES).map(RaftNodeId)
    }

    /// What every node calls every other.
    pub(crate) fn members() -> BTreeMap<RaftNodeId, String> {
        Self::ids().map(|id| (id, format!("meta-{id}:1"))).collect()
    }

    fn settings(&self) -> Settings {
        let mut settings = Settings::new(Generation(1), SHARDS);
        if self.mutant == Some(Mutant::NoQuarantine) {
            settings.quarantine = Duration::ZERO;
        }
        settings
    }

    fn life_folder(&self, node: RaftNodeId, life: u32) -> PathBuf {
        self.folder.path().join(format!("node-{node}-life-{life}"))
    }

    /// Starts a node that is down, with what its last life left on its disk.
    pub(crate) async fn start(&self, node: RaftNodeId) -> Result<(), String> {
        let (disk, life) = {
            let mut nodes = self.nodes.borrow_mut();
            let held = nodes.get_mut(&node).expect("all nodes were made with the world");
            if held.up.is_some() {
                return Ok(());
            }
            held.lives += 1;
            (held.disk.clone(), held.lives)
        };
        sim::note(format_args!("node {node} starts life {life}"));
        let folder = self.life_folder(node, life);
        copy_snapshots(&self.life_folder(node, life - 1), &folder)
            .map_err(|error| format!("copy snapshots: {error}"))?;
        let config = HostConfig {
            timing: Timing {
                heartbeat: Duration::from_millis(100),
                election_min: Duration::from_millis(400),
                election_max: Duration::from_millis(800),
            },
            snapshot_after_entries: 150,
            entries_kept: 20,
            ..HostConfig::new(node, folder)
        };
        let host = Host::simulated(config, &disk, &self.net).map_err(|error| error.to_string())?;
        let observer = Arc::clone(&self.checks) as Arc<dyn quarry_meta::sim::Observer>;
        let starting = timeout(Duration::from_secs(20), SimMeta::start(&host, self.settings(), observer));
        let meta =
            starting.await.map_err(|_| "not recovered in 20 s".to_owned())?.map_err(|error| error.to_string())?;
        let up = Up { host, meta: Arc::new(meta), down: CancellationToken::new() };
        self.nodes.borrow_mut().get_mut(&node).expect("it was there above").up = Some(up);
        Ok(())
    }

    /// The process of a node ends, and the power of its machine.
    pub(crate) fn crash(&self, node: RaftNodeId) {
        let mut nodes = self.nodes.borrow_mut();
        let held = nodes.get_mut(&node).expect("all nodes were made with the world");
        let Some(Up { host, meta, down }) = held.up.take() else { return };
        sim::note(format_args!("node {node} crashes"));
        self.net.leave(node);
        held.disk.crash();
        down.cancel();
        drop(meta);
        // What is left of it can do nothing any more; it is only cleared away.
        tokio::spawn(async move { host.shutdown().await });
    }

    /// Stops all nodes and what they have running.
    pub(crate) async fn end(&self) {
        let ups: Vec<Up> = self.nodes.borrow_mut().values_mut().filter_map(|node| node.up.take()).collect();
        for Up { host, meta, down } in ups {
            down.cancel();
            drop(meta);
            host.shutdown().await;
        }
    }

    /// The node, if it is up.
    pub(crate) fn meta(&self, node: RaftNodeId) -> Option<Arc<SimMeta>> {
        self.nodes.borrow().get(&node)?.up.as_ref().map(|up| Arc::clone(&up.meta))
    }

    pub(crate) fn is_up(&self, node: RaftNodeId) -> bool {
        self.nodes.borrow().get(&node).is_some_and(|node| node.up.is_some())
    }

    /// The node that leads a group, as far as nodes know: the latest, if several say so.
    pub(crate) fn leader(&self, group: usize) -> Option<RaftNodeId> {
        let leading = Self::ids().filter_map(|node| {
            let status = self.meta(node)?.status().swap_remove(group);
            (status.role == Role::Leader).then_some((status.term, node))
        });
        leading.max().map(|(_, node)| node)
    }

    /// A client calls a node. `work` is done there, and ends with the node.
    pub(crate) async fn call<T, F>(
        &self,
        node: RaftNodeId,
        work: impl FnOnce(Arc<SimMeta>, Instant) -> F,
    ) -> Result<T, Failed>
    where
        F: Future<Output = Result<T, Refusal>>,
    {
        let way = || sim::between(Duration::from_micros(200), Duration::from_millis(4));
        let deadline = Instant::now() + PATIENCE;
        let is_lost = || sim::chance(*self.lost_per_mille.borrow());
        sleep(way()).await;
        let place = self
            .nodes
            .borrow()
            .get(&node)
            .and_then(|node| node.up.as_ref().map(|up| (up.meta.clone(), up.down.clone())));
        let Some((meta, down)) = place else { return Err(Failed::Lost) };
        if is_lost() {
            sleep(PATIENCE / 10).await;
            return Err(Failed::Lost);
        }
        let answer = tokio::select! {
            biased;
            () = down.cancelled() => Err(Failed::Lost),
            done = timeout(PATIENCE, work(meta, deadline)) => match done {
                Ok(done) => done.map_err(Failed::Refused),
                Err(_) => Err(Failed::Lost),
            },
        };
        sleep(way()).await;
        if is_lost() {
            return Err(Failed::Lost);
        }
        answer
    }
}

/// Snapshots were synced before they counted: a crash leaves them whole.
fn copy_snapshots(from: &Path, to: &Path) -> io::Result<()> {
    let from = from.join("snapshots");
    if !from.is_dir() {
        return Ok(());
    }
    for group in fs::read_dir(from)? {
        let group = group?;
        let there = to.join("snapshots").join(group.file_name());
        fs::create_dir_all(&there)?;
        for file in fs::read_dir(group.path())? {
            let file = file?;
            if file.path().extension().is_some_and(|found| found == "snap") {
                fs::copy(file.path(), there.join(file.file_name()))?;
            }
        }
    }
    Ok(())
}
