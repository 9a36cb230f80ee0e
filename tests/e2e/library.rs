//! All processes of a cluster move bytes with one and the same libfabric: the one of this run (see `cargo xtask libfabric`).

use quarry_tests::shared;
use std::{collections::BTreeSet, fs};

/// The libfabric files that a process has mapped.
fn loaded(pid: u32) -> BTreeSet<String> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let paths = maps.lines().filter_map(|line| Some(line[line.find('/')?..].to_owned()));
    paths.filter(|path| path.contains("libfabric.so")).collect()
}

#[tokio::test]
async fn data_nodes_load_the_libfabric_of_their_clients() {
    let cluster = shared().await;
    let ours = loaded(std::process::id());
    assert_eq!(ours.len(), 1, "{ours:?}");
    if let Ok(wanted) = std::env::var("QUARRY_TEST_LIBFABRIC") {
        assert!(ours.contains(&wanted), "expected {wanted}, found {ours:?}");
    }
    let nodes = cluster.data_nodes();
    assert!(!nodes.is_empty());
    for node in nodes {
        assert_eq!(loaded(cluster.pid(node).unwrap()), ours, "{node}");
    }
    let (major, minor) = quarry_fabric::library_version();
    eprintln!("libfabric {major}.{minor} in every process, from {ours:?}");
    if let Ok(wanted) = std::env::var("QUARRY_TEST_LIBFABRIC_VERSION") {
        assert_eq!(format!("{major}.{minor}"), wanted);
    }
}
