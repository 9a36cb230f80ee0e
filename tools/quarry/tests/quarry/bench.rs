//! Each bench runs to its end and prints rows that hold together. What the figures are is not tested: this build may be any.

use crate::{code, quarry, text};
use serde_json::Value;
use std::path::Path;

/// What a bench prints in a folder of its own, with little memory and time.
fn rows(dir: &Path, arguments: &[&str]) -> Vec<Value> {
    let mut command = quarry();
    command.arg("bench").args(arguments).args(["--tiny", "--seconds", "0.02", "-o", "json", "--dir"]).arg(dir);
    let output = command.output().unwrap();
    assert_eq!(code(&output), 0, "{arguments:?}: {}", text(&output.stderr));
    let mut report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["machine"]["cores"].as_u64().unwrap() > 0, "{report}");
    assert!(["release", "debug"].contains(&report["machine"]["profile"].as_str().unwrap()), "{report}");
    let left: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
    let Value::Array(rows) = report["rows"].take() else { panic!("no rows: {report}") };
    for row in &rows {
        let number = |name: &str| row[name].as_f64();
        // A single put waits for nothing when there is room.
        let least = if row["case"].as_str().unwrap().ends_with("/wait") { 0.0 } else { f64::MIN_POSITIVE };
        assert!(number("value").unwrap() >= least, "{row}");
        assert!(["GiB/s", "us", "1/s", "B", "% of a core"].contains(&row["unit"].as_str().unwrap()), "{row}");
        if let (Some(p50), Some(p99)) = (number("p50_us"), number("p99_us")) {
            assert!(p50 > 0.0 && p99 >= p50, "{row}");
        }
        match (number("reference_value"), number("ratio")) {
            (Some(reference), Some(ratio)) => {
                assert!((ratio * reference / number("value").unwrap() - 1.0).abs() < 1e-9, "{row}");
                assert!(!row["reference"].as_str().unwrap().is_empty(), "{row}");
            }
            (None, None) => {}
            _ => panic!("a ratio needs a reference: {row}"),
        }
    }
    rows
}

fn names(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["case"].as_str().unwrap()).collect()
}

#[test]
fn the_bench_of_small_values_compares_with_redis_or_says_that_there_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let rows = rows(dir.path(), &["small"]);
    let expected = [
        "get/4KiB/batch100/warm",
        "get/4KiB/batch100/cold",
        "get/4KiB/batch100/shuffled100slabs/warm",
        "put/4KiB/batch100/copies1",
        "put/4KiB/batch100/copies2",
    ];
    for case in expected {
        let row = rows.iter().find(|row| row["case"] == case).unwrap_or_else(|| panic!("no {case} in {rows:?}"));
        let reference = row["reference"].as_str().unwrap();
        assert_eq!(reference.starts_with("Redis "), row["reference_value"].is_number(), "{row}");
        assert!(reference.starts_with("Redis ") || reference == "redis-server is not installed", "{row}");
    }
}

#[test]
fn the_bench_of_the_fabric_compares_every_size_with_raw_operations() {
    let dir = tempfile::tempdir().unwrap();
    let rows = rows(dir.path(), &["fabric", "--filter", "64KiB"]);
    let names = names(&rows);
    let expected = [
        "put/64KiB/copies1/best",
        "put/64KiB/copies1/reserved/best",
        "put/64KiB/copies1/depth1",
        "put/64KiB/copies1/depth1/crc",
        "put/64KiB/copies1/depth1/fabric",
        "put/64KiB/copies1/depth1/commit",
        "get/64KiB/best",
        "get/64KiB/into/best",
        "get/64KiB/depth1/warm",
    ];
    for case in expected {
        assert!(names.contains(&case), "no {case} in {names:?}");
    }
    for row in rows.iter().filter(|row| row["reference"].is_string()) {
        assert!(row["reference"].as_str().unwrap().contains("depth "), "{row}");
        assert!(row["ratio"].is_number(), "{row}");
    }
}

#[test]
fn the_bench_of_calls_has_a_row_for_each_kind_of_call() {
    let dir = tempfile::tempdir().unwrap();
    let rows = rows(dir.path(), &["calls", "--filter", "/4KiB/batch1/"]);
    assert_eq!(names(&rows), ["put/4KiB/batch1/copies1", "get/4KiB/batch1/cold", "get/4KiB/batch1/warm"]);
}

#[test]
fn a_filter_that_matches_nothing_starts_nothing_and_names_the_cases() {
    let dir = tempfile::tempdir().unwrap();
    let output = quarry().args(["bench", "all", "--filter", "nonsense", "--dir"]).arg(dir.path()).output().unwrap();
    assert_eq!(code(&output), 1);
    let said = text(&output.stderr);
    assert!(said.contains("nonsense") && said.contains("get/4KiB/batch100/warm"), "{said}");
    assert!(output.stdout.is_empty());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn the_bench_of_the_control_plane_measures_grants_commits_and_resolves() {
    let dir = tempfile::tempdir().unwrap();
    let rows = rows(dir.path(), &["meta"]);
    let names = names(&rows);
    let expected = [
        "grant/callers1",
        "commit/100/callers1/copies1",
        "commit/100/callers1/copies2",
        "resolve/100/callers1/leased",
        "resolve/100/callers1/fresh",
        "resolve/100/callers1/leased/copies2",
        "resolve/100/callers1/leased/shuffled",
        "shards2/commit/100/callers16",
    ];
    for case in expected {
        assert!(names.contains(&case), "no {case} in {names:?}");
    }
    assert!(!names.iter().any(|name| name.starts_with("etcd/")), "nobody asked for peers: {names:?}");
}

#[test]
fn the_bench_of_the_control_plane_compares_with_etcd_or_says_how_to_get_it() {
    let dir = tempfile::tempdir().unwrap();
    let arguments = ["meta", "--peers", "--filter", "etcd/"];
    if std::process::Command::new("etcd").arg("--version").output().is_err() {
        let output = quarry().arg("bench").args(arguments).arg("--dir").arg(dir.path()).output().unwrap();
        assert_eq!(code(&output), 1);
        assert!(text(&output.stderr).contains("cargo xtask peers --prepare"), "{}", text(&output.stderr));
        return;
    }
    let rows = rows(dir.path(), &arguments);
    for (case, what) in [("etcd/1/callers1", "Put"), ("etcd/100/callers1", "Txn of 100 puts")] {
        let row = rows.iter().find(|row| row["case"] == case).unwrap_or_else(|| panic!("no {case} in {rows:?}"));
        let reference = row["reference"].as_str().unwrap();
        assert!(reference.starts_with("etcd 3.") && reference.ends_with(what), "{row}");
        assert!(row["ratio"].is_number(), "{row}");
    }
}

#[test]
fn the_bench_of_the_lifecycle_measures_signatures_leases_and_pins_and_says_where_there_is_no_peer() {
    let dir = tempfile::tempdir().unwrap();
    let rows = rows(dir.path(), &["lifecycle"]);
    let expected = [
        "signature/sign/of100",
        "signature/check/of100",
        "lease/resolve100",
        "pin/100/pin+release",
        "peer/resolve100",
        "peer/exists100",
    ];
    for case in expected {
        assert!(names(&rows).contains(&case), "no {case} in {:?}", names(&rows));
    }
    let peer = rows.iter().find(|row| row["case"] == "peer/exists100").unwrap();
    assert!(peer["reference"].as_str().unwrap().contains("--mooncake") && peer["ratio"].is_null(), "{peer}");
}
