//! What earlier builds wrote is read by this one: their files, logs and snapshots.

use quarry::local::{LocalCluster, LocalSpec, Member};
use quarry_client::{Client, Cluster, Options};
use quarry_tests::{
    Seed, calls,
    cluster::{SHARD, spec},
    soon,
    wait::PATIENCE,
};
use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// A cluster's folder as version 0.1 of 30 November 2026 left it: one meta node, whose shard has a snapshot at entry 59 and a log to entry 98,
/// two data nodes, no TLS. Values were put, replaced and deleted, a certificate was revoked, a region and a signing key were changed.
const RECORDED: &[u8] = include_bytes!("recorded/cluster-0.1.tar.gz");
/// Where that folder was, and the ports of its processes.
const FOLDER: &str = "/tmp/rec2/c";
const PORTS: [u16; 3] = [24996, 24997, 24998];

/// Unpacks the folder below `dir`, for another place and other ports.
fn unpack(dir: &Path, ports: [u16; 3]) -> PathBuf {
    let folder = dir.join("cluster");
    fs::create_dir(&folder).unwrap();
    let mut tar = Command::new("tar").args(["xzf", "-", "-C"]).arg(&folder).stdin(Stdio::piped()).spawn().unwrap();
    tar.stdin.take().unwrap().write_all(RECORDED).unwrap();
    assert!(tar.wait().unwrap().success());
    for file in [
        "cluster.toml",
        "local.toml",
        "bootstrap.toml",
        "meta-1/config.toml",
        "data-101/config.toml",
        "data-102/config.toml",
    ] {
        let path = folder.join(file);
        let mut text = fs::read_to_string(&path).unwrap().replace(FOLDER, folder.to_str().unwrap());
        for (was, is) in PORTS.iter().zip(ports) {
            text = text.replace(&format!("127.0.0.1:{was}"), &format!("127.0.0.1:{is}"));
        }
        fs::write(&path, text).unwrap();
    }
    folder
}

/// The recorded cluster on ports that are free.
fn open(dir: &Path, spec: &LocalSpec) -> LocalCluster {
    let mut seed = Seed::draw();
    let mut last = String::new();
    for turn in 0..20 {
        let first = 20_000 + u16::try_from(seed.below(10_000)).unwrap();
        let dir = dir.join(turn.to_string());
        fs::create_dir(&dir).unwrap();
        match LocalCluster::open(&unpack(&dir, [first, first + 1, first + 2]), spec.clone()) {
            Ok(cluster) => return cluster,
            Err(wrong) => last = wrong.to_string(),
        }
    }
    panic!("the recorded cluster cannot be opened: {last}");
}

#[tokio::test]
async fn a_cluster_of_version_0_1_is_opened_with_all_that_its_log_and_snapshot_say() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = open(dir.path(), &spec());
    calls::know(cluster.members().into_iter().map(|member| cluster.address(member)), cluster.trust());
    // The meta node alone: what its data nodes held is still as it was.
    let meta = Member::Meta(1);
    cluster.restart(meta).unwrap();
    let address = cluster.address(meta);
    let listed = soon("the meta node leads its groups", async || {
        let status = calls::status(&address).await.ok()?;
        let shard = status.groups.iter().find(|it| it.group == SHARD && it.role == "leader")?;
        (shard.applied > 98).then_some(status.space)
    })
    .await;
    assert_eq!(listed.iter().map(|it| it.keys).sum::<u64>(), 31, "{listed:?}");

    cluster.start(PATIENCE).await.unwrap();
    let client =
        Client::connect(Cluster::from_file(cluster.cluster_file()).unwrap(), Options::default()).await.unwrap();
    let known = client.list_namespaces().await.unwrap();
    let names: Vec<(&str, u8)> = known.iter().map(|it| (it.name.as_str(), it.copies)).collect();
    assert_eq!(names, [("blocks", 2), ("lone", 1)]);
    // Memory is gone with the processes that had it, and with it what was in it.
    let blocks = client.namespace("blocks").await.unwrap();
    assert!(blocks.get("k1").await.unwrap().is_none());
    // The meta node knew these data nodes, with other memory and at other addresses, as they know it: a put waits within its deadline.
    blocks.put("k1", "again").await.unwrap();
    assert_eq!(blocks.get("k1").await.unwrap().unwrap().bytes, "again");
    client.close().await.unwrap();
    cluster.stop().await.unwrap();
}
