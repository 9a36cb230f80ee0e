//! Exit codes and errors: the same for every command.

use crate::{Up, code, quarry, text};
use serde_json::Value;
use std::{
    path::Path,
    process::{Output, Stdio},
};

/// Every command that asks a cluster, whole enough to be understood.
const CLIENTS: [&str; 11] = [
    "put k /dev/null",
    "put --files k=/dev/null",
    "get k",
    "get k -O /dev/null",
    "cat k",
    "stat k",
    "exists k",
    "ls",
    "rm k",
    "namespace list",
    "namespace create other",
];

fn on(cluster: &Path, line: &str) -> Output {
    let mut command = quarry();
    command.env("QUARRY_CLUSTER", cluster).env("QUARRY_NAMESPACE", "kv").args(line.split(' '));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap()
}

/// The error that a command told in JSON, which must be the last line of standard error.
fn told(output: &Output) -> Value {
    let said = text(&output.stderr);
    let last = said.lines().last().unwrap_or_else(|| panic!("it said nothing"));
    let mut value: Value = serde_json::from_str(last).unwrap_or_else(|_| panic!("no JSON: {said}"));
    let error = value["error"].take();
    assert_eq!(error["exit_code"], code(output), "{said}");
    assert!(!error["message"].as_str().unwrap().is_empty(), "{said}");
    error
}

fn expect(cluster: &Path, line: &str, expected: i32, name: &str) -> Value {
    let output = on(cluster, line);
    assert_eq!(code(&output), expected, "{line}: {}", text(&output.stderr));
    let line = format!("{line} -o json");
    let output = on(cluster, &line);
    assert_eq!(code(&output), expected, "{line}: {}", text(&output.stderr));
    let error = told(&output);
    assert_eq!(error["code"], name, "{line}: {error}");
    error
}

#[test]
fn every_command_tells_wrong_usage_a_missing_cluster_file_and_a_silent_cluster_apart() {
    let dir = tempfile::tempdir().unwrap();
    let none = dir.path().join("none");
    let root = quarry::identity::Root::generate().unwrap();
    let nobody = vec!["127.0.0.1:1".to_owned()];
    let silent = dir.path().join("cluster.toml");
    let cluster = quarry_client::Cluster::new(root.cluster, root.public(), nobody).unwrap().without_tls();
    std::fs::write(&silent, cluster.to_toml()).unwrap();
    for line in CLIENTS.into_iter().chain(["top --once"]) {
        expect(&none, &format!("{line} --no-such-flag"), 2, "usage");
        let error = expect(&none, line, 3, "not_found");
        assert!(error["hint"].as_str().unwrap().contains("QUARRY_CLUSTER"), "{line}: {error}");
        let timeout = if line.starts_with("top") { "" } else { " --timeout 300ms" };
        let error = expect(&silent, &format!("{line}{timeout}"), 6, "unavailable");
        assert!(error["hint"].as_str().unwrap().contains("doctor"), "{line}: {error}");
    }
    for (line, expected, name) in [
        ("meta --config none", 3, "not_found"),
        ("datanode --config none", 3, "not_found"),
        ("put k /no/such/file", 3, "not_found"),
        ("keys node --root /no/such/file --role meta --id 1 --out x", 3, "not_found"),
        ("up --metas 1 --dir /dev/null/x", 1, "error"),
        ("demo --dir /dev/null/x", 1, "error"),
    ] {
        expect(&none, &format!("{line} --no-such-flag"), 2, "usage");
        expect(&none, line, expected, name);
    }
    for line in ["bench", "doctor --timeout soon", "get", "frobnicate", "get k --key-hex", "put --files -"] {
        expect(&none, line, 2, "usage");
    }
    let mut bare = quarry();
    let output = bare.args(["ls", "-n", "kv"]).output().unwrap();
    assert_eq!(code(&output), 2);
    assert!(text(&output.stderr).contains("QUARRY_CLUSTER"), "{}", text(&output.stderr));
}

#[tokio::test]
async fn every_command_tells_missing_existing_and_full_apart() {
    let dir = tempfile::tempdir().unwrap();
    let mut up = Up::start(dir.path());
    let cluster = up.ready().await;
    for line in CLIENTS.into_iter().filter(|line| !line.starts_with("namespace")) {
        let error = expect(&cluster, line, 3, "not_found");
        assert!(error["hint"].as_str().unwrap().contains("namespace create"), "{line}: {error}");
    }
    assert_eq!(code(&on(&cluster, "namespace create kv --copies 1 -o json")), 0);
    expect(&cluster, "namespace create kv --copies 1", 4, "conflict");
    for line in ["get k", "get k -O /dev/null", "cat k", "stat k", "exists k", "rm k"] {
        expect(&cluster, line, 3, "not_found");
    }
    assert_eq!(code(&on(&cluster, "put k /dev/null")), 0);
    for line in ["put k /dev/null", "put --files k=/dev/null"] {
        let error = expect(&cluster, line, 4, "conflict");
        assert!(error["hint"].as_str().unwrap().contains("--replace"), "{line}: {error}");
    }
    for line in CLIENTS.into_iter().filter(|line| !line.starts_with("namespace c")) {
        let line = line.replace("put ", "put --replace ");
        // The last that reads is the one that removes.
        let output = on(&cluster, &line);
        assert_eq!(code(&output), 0, "{line}: {}", text(&output.stderr));
    }
    // What a cache has room for goes in, for something else goes out: what can never fit does not.
    let value = dir.path().join("value");
    std::fs::write(&value, vec![1; 700 << 10]).unwrap();
    assert_eq!(code(&on(&cluster, "namespace create small --copies 1 --quota 256KiB")), 0);
    let line = format!("put -o json --namespace small --timeout 3s k {}", value.display());
    let full = on(&cluster, &line);
    assert_eq!(code(&full), 5, "more than its quota was written: {}", text(&full.stderr));
    let error = told(&full);
    assert!(error["code"] == "no_space" && error["hint"].is_string(), "{error}");
}

/// Nobody can write there: each write fails, as on a full disk.
fn full() -> Stdio {
    Stdio::from(std::fs::File::options().write(true).open("/dev/full").unwrap())
}

#[test]
fn what_cannot_be_said_on_standard_error_changes_no_exit_code() {
    let none = Path::new("/no/such/file");
    for log in ["off", "debug"] {
        for command in CLIENTS {
            let mut ran = quarry();
            ran.env("QUARRY_CLUSTER", none).env("QUARRY_NAMESPACE", "kv").env("QUARRY_LOG", log);
            let status = ran.args(command.split(' ')).stdout(Stdio::null()).stderr(full()).status().unwrap();
            assert_eq!(status.code(), Some(3), "{command}, QUARRY_LOG={log}");
        }
    }
}

#[tokio::test]
async fn commands_whose_log_has_no_reader_do_their_work() {
    let dir = tempfile::tempdir().unwrap();
    let mut up = Up::start(dir.path());
    let cluster = up.ready().await;
    let quietly = |line: &str| {
        let mut command = quarry();
        command.env("QUARRY_CLUSTER", &cluster).env("QUARRY_NAMESPACE", "kv").env("QUARRY_LOG", "debug");
        command.args(line.split(' ')).stdout(Stdio::null()).stderr(full()).status().unwrap().code()
    };
    assert_eq!(quietly("namespace create kv --copies 1"), Some(0));
    assert_eq!(quietly("put k /dev/null"), Some(0));
    assert_eq!((quietly("get k"), quietly("get nothing"), quietly("put k /dev/null")), (Some(0), Some(3), Some(4)));
}
