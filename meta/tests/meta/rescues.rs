//! A cluster that begins again: from a backup, and from what one node of a lost majority holds.

use crate::{
    cluster::{Cluster, Node, PATIENCE, UUID, identity, root, until},
    player::{DataNode, Writer, entry},
};
use futures::StreamExt as _;
use quarry_meta::{
    MetaError, MetaNode,
    backup::{Backup, BackupWriter, Origin, PartHead},
    rescue::{self, NewMeta, RescueError, RestorePlan, Survivor},
};
use quarry_proto::{convert::required, v1};
use quarry_raft::{LogIndex, RaftError};
use quarry_wire::{
    certificate::{Revocations, Role},
    ids::{CertificateSerial, Generation, NodeId, ShardId},
    key::Key,
    signed::Signed,
};
use std::{fs, path::Path};
use tokio::time::Instant;

const SECOND: Generation = Generation(2);

/// A cluster of two shards with a namespace, two data nodes and a value.
async fn with_a_value() -> (Cluster, v1::Namespace, [DataNode; 2], Writer) {
    let cluster = Cluster::with(2, |_| {}).await;
    let nodes = [DataNode::join(&cluster, 11).await, DataNode::join(&cluster, 12).await];
    let namespace = cluster.create_namespace("kv", 2).await;
    let writer = Writer::new(&namespace);
    put(&cluster, &nodes, &writer, "before").await;
    (cluster, namespace, nodes, writer)
}

/// A key of the first shard.
fn key_of(writer: &Writer, name: &str) -> String {
    let mut keys = (0..).map(|tag| format!("{name}{{{tag}}}"));
    keys.find(|key| Key::new(key).unwrap().shard(writer.namespace, 2) == ShardId(1)).unwrap()
}

async fn put(cluster: &Cluster, nodes: &[DataNode; 2], writer: &Writer, name: &str) {
    let grant = writer.grant(cluster).await;
    let entries = [entry(0, &key_of(writer, name))];
    let attested: Vec<_> = nodes.iter().map(|node| node.attest(&grant, &entries)).collect();
    let request = writer.publish(&grant, &entries, &attested);
    let published = cluster.ask(async |node: &Node| node.control().publish(request.clone()).await).await.unwrap();
    assert_eq!(published.outcomes[0].code(), v1::commit_outcome::Code::Committed);
}

async fn is_there(cluster: &Cluster, writer: &Writer, name: &str) -> bool {
    let request = writer.resolve(&[&key_of(writer, name)], 0);
    let reply = cluster.ask(async |node: &Node| node.control().resolve(request.clone()).await).await.unwrap();
    reply.items[0].found
}

/// Saves all groups, the directory last.
async fn save(cluster: &Cluster, place: &Path) {
    let mut writer = BackupWriter::create(place).unwrap();
    let mut origin = None;
    for group in [1, 2, 0] {
        let request = v1::SaveGroupRequest { group, stale: false };
        let mut parts = cluster.ask(async |node: &Node| node.admin().save_group(request).await).await.unwrap();
        let mut bytes = 0;
        while let Some(part) = parts.next().await.map(Result::unwrap) {
            if let Some(head) = part.head {
                let (term, applied, log_time_ms) = (head.term, head.applied, head.log_time_ms);
                let feed = required("feed", head.feed).unwrap().into();
                writer.begin(PartHead { group, term, applied, log_time_ms, feed });
                bytes = head.length;
                origin = Some(Origin {
                    cluster: UUID.to_string(),
                    root: root().public().to_string(),
                    generation: head.generation,
                    shards: head.shards,
                    build: head.build,
                });
            }
            bytes -= part.chunk.len() as u64;
            writer.write(&part.chunk).unwrap();
        }
        assert_eq!(bytes, 0);
        writer.end();
    }
    writer.finish(origin.unwrap()).unwrap();
}

fn plan_of(node: &Node) -> [NewMeta; 1] {
    let (id, address) = (node.id, node.address.to_string());
    [NewMeta { node: id, address, certificate: identity(id, Role::Meta).1 }]
}

fn plan(cluster: &Cluster, metas: &[u64]) -> RestorePlan {
    RestorePlan {
        cluster: UUID,
        root: root().public(),
        shards: 2,
        metas: cluster.nodes.iter().filter(|node| metas.contains(&node.id.0)).flat_map(plan_of).collect(),
        generation: None,
        revocations: None,
    }
}

/// Waits until the threads of a killed node have let go of its folder.
async fn survivor(dir: &Path, node: NodeId) -> Survivor {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match Survivor::open(dir, node) {
            Ok(survivor) => return survivor,
            Err(RescueError::Raft(RaftError::Locked { .. })) if Instant::now() < deadline => {}
            Err(wrong) => panic!("{wrong}"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

async fn in_generation(cluster: &Cluster, nodes: &[u64], expected: Generation) {
    until("the new generation", async || {
        for node in cluster.running().filter(|node| nodes.contains(&node.id.0)) {
            let described = node.control().describe(v1::DescribeRequest { seen: None }).await.ok()?.into_inner();
            assert_eq!((described.generation, described.metas.len()), (expected.0, nodes.len()));
        }
        Some(())
    })
    .await;
}

/// The numbers that this node says are used up.
async fn retired(cluster: &Cluster, node: u64) -> Vec<u64> {
    let node = cluster.nodes.iter().find(|it| it.id == NodeId(node)).unwrap();
    node.admin().status(v1::StatusRequest {}).await.unwrap().into_inner().retired
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_cluster_has_what_the_directory_knew_voids_memory_and_refuses_a_node_of_the_old_one() {
    let (mut cluster, namespace, mut nodes, writer) = with_a_value().await;
    let files = tempfile::tempdir().unwrap();
    let place = files.path().join("backup");
    save(&cluster, &place).await;
    let lost = cluster.create_namespace("later", 2).await;
    for node in &mut cluster.nodes {
        node.kill();
    }
    let backup = Backup::open(&place).unwrap();
    assert_eq!(backup.manifest().groups.iter().map(|part| part.group).collect::<Vec<_>>(), [1, 2, 0]);
    // The third keeps its folder, and the number of votes that it once had. Its certificate is revoked by a list that is newer than the backup.
    let list = Revocations { number: 4, serials: [CertificateSerial(3)].into() };
    let planned = RestorePlan { revocations: Some(root().sign_as_root(UUID, list.clone())), ..plan(&cluster, &[1, 2]) };
    let unplanned = rescue::restore(&backup, &planned, &files.path().join("other"), NodeId(9)).unwrap_err();
    assert_eq!(unplanned.to_string(), "the plan has no node-9, it has node-1, node-2");
    for id in [1, 2] {
        let dir = cluster.node(NodeId(id)).dir.path().to_owned();
        drop(survivor(&dir, NodeId(id)).await);
        let refused = rescue::restore(&backup, &planned, &dir, NodeId(id)).unwrap_err();
        assert!(matches!(refused, RescueError::NotEmpty { .. }), "{refused}");
        fs::remove_dir_all(&dir).unwrap();
        let other = RestorePlan { shards: 3, ..planned.clone() };
        let refused = rescue::restore(&backup, &other, &dir, NodeId(id)).unwrap_err();
        assert!(matches!(refused, RescueError::OtherCluster { what: "the number of shards", .. }), "{refused}");
        for (twice, found) in [(planned.metas[0].node, "127.0.0.1:9"), (NodeId(9), &*planned.metas[0].address)] {
            let again = NewMeta { node: twice, address: found.to_owned(), ..planned.metas[1].clone() };
            let other = RestorePlan { metas: [&planned.metas[..], &[again]].concat(), ..planned.clone() };
            let refused = rescue::restore(&backup, &other, &dir, NodeId(id)).unwrap_err();
            assert!(matches!(refused, RescueError::PlannedTwice { .. }), "{refused}");
        }
        let begun = rescue::restore(&backup, &planned, &dir, NodeId(id)).unwrap();
        assert_eq!((begun.generation, begun.shards, begun.namespaces, begun.metas.len()), (SECOND, 2, 1, 2));
    }
    for id in [3, 1, 2] {
        cluster.restart(NodeId(id)).await;
    }
    in_generation(&cluster, &[1, 2], SECOND).await;
    // Whoever asks the node of the old generation is told that it is one; nobody of the new one follows it or is followed by it.
    let mut third = cluster.nodes.pop().unwrap();
    let status = third.admin().status(v1::StatusRequest {}).await.unwrap().into_inner();
    assert!(status.generation == 1 && status.groups.iter().all(|group| group.role != "leader"), "{status:?}");
    cluster.leader(0).await;
    assert_eq!(retired(&cluster, 1).await, [3], "it is not of the plan");
    assert!(!is_there(&cluster, &writer, "before").await, "memory is void");
    let again = cluster.create_namespace("later", 2).await;
    assert!(again.id > lost.id && again.id > 1 << 16, "numbers go on above a floor: {} was {}", again.id, lost.id);
    let changes = cluster.describe().await.changes.unwrap();
    let known = &changes.namespaces;
    assert!(known.iter().any(|it| it.name == "kv" && it.id == namespace.id), "{known:?}");
    assert_eq!(Signed::<Revocations>::decode(&changes.revocations).unwrap().statement, list, "as the plan says");
    // A backup of the new one knows that the third is no more: no plan names it again.
    let later = files.path().join("later");
    save(&cluster, &later).await;
    let again = RestorePlan { metas: [&planned.metas[..], &plan_of(&third)].concat(), ..planned.clone() };
    let used = rescue::restore(&Backup::open(&later).unwrap(), &again, &files.path().join("other"), NodeId(1));
    assert!(matches!(used, Err(RescueError::UsedUp { node: NodeId(3) })), "{used:?}");

    for (life, node) in nodes.iter_mut().enumerate() {
        node.fall_silent();
        node.register(&cluster, 1_000 + life as u128).await;
        assert_eq!(node.incarnation.0.generation, SECOND);
        node.record(&cluster).await.unwrap();
        node.beat(&cluster);
    }
    put(&cluster, &nodes, &writer, "after").await;
    assert!(is_there(&cluster, &writer, "after").await);
    for group in 0..=2 {
        cluster.assert_equal_hashes(group).await;
    }
    third.kill();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_node_of_a_lost_majority_goes_on_alone_in_the_next_generation() {
    let (mut cluster, _, mut nodes, writer) = with_a_value().await;
    let dir = cluster.node(NodeId(1)).dir.path().to_owned();
    let running = Survivor::open(&dir, NodeId(1)).unwrap_err();
    assert!(matches!(running, RescueError::Raft(RaftError::Locked { .. })), "{running}");
    // All have all of it, so that it does not matter who is left.
    for group in 0..=2 {
        cluster.assert_equal_hashes(group).await;
    }
    for node in &mut cluster.nodes {
        node.kill();
    }
    cluster.nodes.truncate(1);
    let left = survivor(&dir, NodeId(1)).await;
    assert_eq!((left.node(), left.cluster(), left.generation()), (NodeId(1), UUID, Some(Generation(1))));
    let groups = left.groups().unwrap();
    assert_eq!(groups.len(), 3);
    assert!(groups.iter().all(|group| group.members.len() == 3 && group.last.is_some() && group.vote.is_some()));
    drop(left);
    let other = Survivor::open(&dir, NodeId(2)).unwrap_err();
    assert!(matches!(other, RescueError::OtherNode { found: NodeId(1), .. }), "{other}");
    let mut kinds = Vec::new();
    rescue::dump(&dir, 0, LogIndex(0), LogIndex(u64::MAX), |line| {
        kinds.push((line.kind, line.says));
        Ok(())
    })
    .unwrap();
    let none = |_| Ok(());
    assert_eq!(rescue::dump(&dir, 0, LogIndex(0), LogIndex(3), none).unwrap(), None, "nothing was cut from this log");
    assert_eq!(kinds[0].0, "members");
    assert!(kinds.iter().any(|(_, says)| says.contains("CreateNamespace x1")), "{kinds:?}");

    // A recovery that ended in its first half: the node does not start before somebody decides, and a repetition begins anew.
    fs::create_dir_all(dir.join("raft.next/log")).unwrap();
    let config = crate::cluster::config(NodeId(1), &cluster.nodes[0].dir, cluster.nodes[0].address, 2);
    assert!(matches!(MetaNode::start(config.clone()).await, Err(MetaError::HalfDone { .. })));
    let too_low = survivor(&dir, NodeId(1)).await.recover(Some(Generation(1))).unwrap_err();
    assert!(matches!(too_low, RescueError::Generation { current: Generation(1), .. }), "{too_low}");
    let begun = survivor(&dir, NodeId(1)).await.recover(None).unwrap();
    assert_eq!((begun.generation, begun.namespaces, begun.metas.len()), (SECOND, 1, 1));
    assert!(begun.kept.unwrap().join("FORMAT").exists(), "the folder of before is kept");
    // And one that ended in its second half.
    fs::rename(dir.join("raft"), dir.join("raft.next")).unwrap();
    assert!(matches!(MetaNode::start(config).await, Err(MetaError::HalfDone { .. })));
    let halfway = survivor(&dir, NodeId(1)).await;
    assert_eq!((halfway.generation(), halfway.groups().unwrap().len()), (None, 0));
    assert_eq!(halfway.recover(None).unwrap().generation, SECOND);
    let cut = rescue::dump(&dir, 0, LogIndex(0), LogIndex(u64::MAX), none).unwrap();
    assert!(cut.is_some_and(|cut| cut.0 + 1 > kinds.len() as u64), "all of before is in the snapshot alone: {cut:?}");

    cluster.restart(NodeId(1)).await;
    in_generation(&cluster, &[1], SECOND).await;
    assert_eq!(retired(&cluster, 1).await, [2, 3], "those that were given up are not missed");
    assert!(!is_there(&cluster, &writer, "before").await, "memory is void");
    for (life, node) in nodes.iter_mut().enumerate() {
        node.fall_silent();
        node.register(&cluster, 1_000 + life as u128).await;
        node.record(&cluster).await.unwrap();
        node.beat(&cluster);
    }
    put(&cluster, &nodes, &writer, "after").await;
    assert!(is_there(&cluster, &writer, "after").await);
}
