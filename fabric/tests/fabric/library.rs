//! Which libfabric is at work. A run against another library than the one built with (`cargo xtask libfabric`) says in the environment which one
//! it wants; then nothing but that one will do.

use quarry_fabric::library_version;
use std::{collections::BTreeSet, fs};

/// Files of this name that the process has mapped.
fn mapped(name: &str) -> BTreeSet<String> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter_map(|line| Some(line[line.find('/')?..].to_owned()))
        .filter(|path| path.contains(name))
        .collect()
}

#[test]
fn exactly_one_libfabric_is_loaded_and_it_is_the_one_that_this_run_wants() {
    let (major, minor) = library_version();
    let loaded = mapped("libfabric.so");
    assert_eq!(loaded.len(), 1, "{loaded:?}");
    eprintln!("libfabric {major}.{minor} from {loaded:?}");
    if let Ok(wanted) = std::env::var("QUARRY_TEST_LIBFABRIC") {
        assert!(loaded.contains(&wanted), "expected {wanted}, found {loaded:?}");
    }
    if let Ok(wanted) = std::env::var("QUARRY_TEST_LIBFABRIC_VERSION") {
        assert_eq!(format!("{major}.{minor}"), wanted);
    }
}
