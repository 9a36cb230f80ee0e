//! One seed from beginning to end: a cluster is made, disturbed, mended, drained and judged.

use crate::{
    chaos::{self, Climate},
    checks::Checks,
    client::{Client, NAMESPACE, Told},
    history::{self, Verdict},
    world::{NODES, SHARDS, World},
};
use quarry_meta_state::{
    RequestId, Shard,
    directory::{Cluster, DirectoryCommand, DirectoryOutcome, Policy},
    lending::ledger,
    shard::{DeleteKey, ShardCommand},
};
use quarry_raft::{Role, sim};
use quarry_wire::{
    certificate::{Certificate, Role as Certified},
    grant::Class,
    ids::{CertificateSerial, ClusterUuid, Generation, NodeId, RegionIndex, ShardId},
    key::Key,
    signed::SecretKey,
    units::LogTime,
};
use std::{
    cell::RefCell,
    collections::BTreeSet,
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
    sync::{Arc, Once},
    time::Duration,
};
use tokio::{
    task::LocalSet,
    time::{Instant, sleep},
};

/// Data nodes and the memory of each: so little that it is used again and again.
const DATA_NODES: [u64; 2] = [11, 12];
const REGION_BYTES: u64 = 1 << 20;
const CLIENTS: u8 = 4;
/// How long things go wrong.
const DISTURBED: Duration = Duration::from_secs(20);
/// How long a mended cluster may take to have one leader in each group, and to take commands.
const RECOVERY: Duration = Duration::from_secs(30);
/// How long memory may take to come back once nobody writes any more: the longest grant, the horizon and the quarantine.
const DRAIN: Duration = Duration::from_secs(60);
/// How many acknowledged commits are asked for once more at the end.
const ASKED_AGAIN: usize = 40;

/// A fault put in on purpose, to prove that it would be found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mutant {
    /// The log acknowledges what it has not synced.
    AcknowledgedEarly,
    /// Leaders answer reads without asking a majority whether they still lead.
    UnconfirmedReads,
    /// Freed memory does not rest after its last lease.
    NoQuarantine,
}

/// What came of one seed.
#[derive(Debug)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// What must not be; empty if all was well.
    pub violations: Vec<String>,
    /// Hash over everything that happened.
    pub trace: String,
    /// How much that was.
    pub events: u64,
    /// How long it took in there.
    pub simulated: Duration,
    /// Entries in all logs.
    pub entries: u64,
    /// Operations of clients that were judged.
    pub operations: usize,
    /// Keys whose history was too tangled to judge.
    pub tangled: usize,
}

thread_local! {
    /// Panics of tasks in this thread's world, if it is in one.
    static PANICS: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Panics of simulated tasks are findings, not noise.
fn listen_to_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let taken = PANICS.with_borrow_mut(|panics| match panics {
                Some(panics) => {
                    panics.push(panic.to_string());
                    true
                }
                None => false,
            });
            if !taken {
                usual(panic);
            }
        }));
    });
}

/// Lives through one seed. `told`: everything that happens is printed to standard error.
#[must_use]
pub fn run(seed: u64, mutant: Option<Mutant>, told: bool) -> Report {
    listen_to_panics();
    PANICS.set(Some(Vec::new()));
    let checks = Arc::new(Checks::default());
    let judged = Arc::clone(&checks);
    let lived = catch_unwind(AssertUnwindSafe(|| sim::run(seed, told, story(mutant, judged))));
    let panics = PANICS.take().unwrap_or_default();
    let mut violations = checks.violations();
    violations.extend(panics.into_iter().map(|panic| format!("panic: {panic}")));
    let (entries, _) = checks.counts();
    match lived {
        Ok(lived) => {
            let (operations, tangled) = lived.result;
            let trace = hex::encode(lived.trace);
            Report {
                seed,
                violations,
                trace,
                events: lived.events,
                simulated: lived.lasted,
                entries,
                operations,
                tangled,
            }
        }
        Err(_) => {
            let trace = String::new();
            Report { seed, violations, trace, events: 0, simulated: Duration::ZERO, entries, operations: 0, tangled: 0 }
        }
    }
}

async fn story(mutant: Option<Mutant>, checks: Arc<Checks>) -> (usize, usize) {
    let climate = Climate::drawn();
    sim::note(format_args!("climate: {climate:?}"));
    let world = match World::new(mutant, checks) {
        Ok(world) => world,
        Err(error) => panic!("no folder for snapshots: {error}"),
    };
    let told = Rc::new(Told::default());
    if let Err(why) = make(&world).await {
        world.checks.broken(format!("the cluster was not made: {why}"));
    }
    let local = LocalSet::new();
    let clients: Vec<_> =
        (1..=CLIENTS).map(|number| local.spawn_local(Client::new(number, &world, &told).work())).collect();
    let judged = local.run_until(async {
        chaos::disturb(&world, climate, Instant::now() + DISTURBED).await;
        recover(&world).await;
        sleep(Duration::from_secs(1)).await;
        told.stop.set(true);
        for client in clients {
            if let Err(error) = client.await {
                world.checks.broken(format!("a client ended: {error}"));
            }
        }
        drain(&world).await;
        promises(&world, &told).await;
        judge(&world, &told)
    });
    let judged = judged.await;
    world.end().await;
    judged
}

/// Asks every node in turn until one says yes.
async fn direct(world: &World, command: DirectoryCommand) -> Result<DirectoryOutcome, String> {
    let until = Instant::now() + RECOVERY;
    let mut node = 0;
    while Instant::now() < until {
        node = node % NODES + 1;
        let command = command.clone();
        let done = world
            .call(quarry_raft::RaftNodeId(node), |meta, deadline| async move { meta.direct(command, deadline).await });
        match done.await {
            Ok(done) => return Ok(done.outcome),
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
    Err(format!("no answer to {command:?} within {RECOVERY:?}"))
}

/// Makes a cluster with a namespace and the memory of two data nodes.
async fn make(world: &World) -> Result<(), String> {
    for node in World::ids() {
        world.start(node).await?;
    }
    let first = world.meta(quarry_raft::RaftNodeId(1)).ok_or("node 1 is down")?;
    first.form(&World::members()).await.map_err(|error| error.to_string())?;
    let (root, uuid) = (SecretKey::from_seed(&[1; 32]), ClusterUuid([3; 16]));
    let cluster = Cluster { uuid, generation: Generation(1), shards: SHARDS, root: root.public() };
    direct(world, DirectoryCommand::InitCluster(cluster)).await?;
    for (number, node) in (20..).zip(DATA_NODES) {
        let key = SecretKey::from_seed(&[number; 32]).public();
        let node = NodeId(node);
        let certificate = Certificate { serial: CertificateSerial(node.0), node, role: Certified::DataNode, key };
        direct(world, DirectoryCommand::AdmitCertificate(root.sign_as_root(uuid, certificate))).await?;
        let region = DirectoryCommand::RegisterRegion { node, index: RegionIndex(0), bytes: REGION_BYTES, life: 1 };
        direct(world, region).await?;
    }
    let request = RequestId { at: LogTime(0), random: 1 };
    let policy = Policy { least: 1, ..Policy::new(Class::Cache, 2) };
    match direct(world, DirectoryCommand::CreateNamespace { request, name: "blocks".to_owned(), policy }).await? {
        DirectoryOutcome::Namespace(Ok(NAMESPACE)) => Ok(()),
        other => Err(format!("the namespace: {other:?}")),
    }
}

/// Whether all nodes see one leader in every group, who says so too.
fn led(world: &World) -> bool {
    let all: Option<Vec<_>> = World::ids().map(|node| world.meta(node).map(|meta| meta.status())).collect();
    let Some(all) = all else { return false };
    (0..=SHARDS as usize).all(|group| {
        let leaders: BTreeSet<_> =
            all.iter().map(|groups| groups[group].leader.as_ref().map(|(node, _)| *node)).collect();
        let leading = all.iter().filter(|groups| groups[group].role == Role::Leader).count();
        leaders.len() == 1 && leaders.first().is_some_and(Option::is_some) && leading == 1
    })
}

/// A mended cluster has leaders and makes progress.
async fn recover(world: &Rc<World>) {
    let until = Instant::now() + RECOVERY;
    while !led(world) {
        if Instant::now() >= until || world.checks.is_broken() {
            return world.checks.broken(format!("no leader that all agree on {RECOVERY:?} after the world was mended"));
        }
        sleep(Duration::from_millis(100)).await;
    }
    for shard in (1..=SHARDS).map(ShardId) {
        let key = Key::new("nobody writes this").expect("a short key");
        let mut client = Client::new(100, world, &Rc::new(Told::default()));
        let request = RequestId { at: LogTime(0), random: sim::draw() };
        let keys = vec![DeleteKey { key, expected: None }];
        let command = ShardCommand::Delete { request, namespace: NAMESPACE, keys };
        let done = client.insist(shard, |meta, deadline| {
            let command = command.clone();
            async move { meta.tell(shard, command, deadline).await }
        });
        if !matches!(done.await, Some(Ok(_))) {
            world.checks.broken(format!("{shard} takes no command after the world was mended"));
        }
    }
}

/// *Nothing leaks*: nobody writes any more, so all memory becomes free or holds a value; and all replicas come to the same.
async fn drain(world: &World) {
    let until = Instant::now() + DRAIN;
    loop {
        let mut left = Vec::new();
        for shard in (1..=SHARDS).map(ShardId) {
            let mut times = BTreeSet::new();
            for meta in World::ids().filter_map(|node| world.meta(node)) {
                meta.look(shard, |state| {
                    let total = state.space().total;
                    times.insert((state.log_time(), total.committed_slots));
                    let resting = total.bytes - total.free_bytes - total.committed_bytes;
                    if resting > 0 {
                        left.push(format!("{shard} at {}: {resting} of {} bytes", meta.node(), total.bytes));
                    }
                    let lent = meta.look_up(|directory| {
                        (directory.extents())
                            .all(|(extent, to, lend)| (to == Some(shard)) == (state.held(extent) == Some(lend)))
                    });
                    if !lent {
                        left.push(format!("{shard} at {} holds other extents than the directory lent", meta.node()));
                    }
                });
            }
        }
        for meta in World::ids().filter_map(|node| world.meta(node)) {
            let shards: Vec<Shard> = (1..=SHARDS).map(|shard| meta.look(ShardId(shard), Shard::clone)).collect();
            let counted = meta.look_up(|directory| ledger(directory, &shards.iter().collect::<Vec<_>>()));
            match counted {
                Ok(accounts) if accounts.values().all(|account| account.in_transit == 0) => {}
                Ok(accounts) => left.push(format!("on its way at {}: {accounts:?}", meta.node())),
                Err(broken) => left.push(format!("{broken} at {}", meta.node())),
            }
        }
        if left.is_empty() || world.checks.is_broken() {
            return;
        }
        if Instant::now() >= until {
            return world.checks.broken(format!("Nothing leaks: after {DRAIN:?} without writers {}", left.join("; ")));
        }
        sleep(Duration::from_millis(500)).await;
    }
}

/// What was acknowledged is still so: grants are known, commits have their outcomes.
async fn promises(world: &Rc<World>, told: &Rc<Told>) {
    let mut client = Client::new(101, world, told);
    let commits = told.commits.take();
    let step = (commits.len() / ASKED_AGAIN).max(1);
    for (shard, publish, first) in commits.into_iter().step_by(step) {
        if world.checks.is_broken() {
            return;
        }
        match client.publish(shard, &publish).await {
            Some(again) if again == first => {}
            other => {
                let grant = publish.grant;
                world.checks.broken(format!("Idempotent commits: {grant} was {first:?} and is {other:?} in the end"));
            }
        }
    }
    for grant in told.grants.take() {
        for meta in World::ids().filter_map(|node| world.meta(node)) {
            if !meta.look(grant.id.shard, |state| state.grant(grant.id).is_some()) {
                world.checks.broken(format!("{} was given, and is not known at {}", grant.id, meta.node()));
            }
        }
    }
}

/// *Linearizable*, key by key.
fn judge(world: &World, told: &Told) -> (usize, usize) {
    let (mut count, mut tangled) = (0, 0);
    for (key, operations) in told.operations.borrow().iter() {
        count += operations.len();
        match history::judge(operations) {
            Verdict::Linearizable => {}
            Verdict::TooTangled => tangled += 1,
            Verdict::Impossible => {
                let mut operations = operations.clone();
                operations.sort_by_key(|operation| operation.began);
                let told: Vec<String> = operations.iter().map(|operation| format!("{operation:?}")).collect();
                world.checks.broken(format!("Linearizable: key {key} has no such history:\n  {}", told.join("\n  ")));
            }
        }
    }
    (count, tangled)
}
