//! Exit codes and errors, with and without JSON: the same as those of `quarry`.
#![expect(clippy::unwrap_used, reason = "a test fails where it expected something else")]

use std::{
    path::Path,
    process::{Command, Output, Stdio},
};

fn on(cluster: &Path, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_raft-admin"));
    command.env("QUARRY_CLUSTER", cluster).args(line.split(' ')).stdin(Stdio::null());
    command.output().unwrap()
}

fn expect(cluster: &Path, line: &str, code: i32, name: &str) -> serde_json::Value {
    let plain = on(cluster, line);
    assert_eq!(plain.status.code(), Some(code), "{line}: {}", String::from_utf8_lossy(&plain.stderr));
    let output = on(cluster, &format!("{line} -o json"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{line}: {said}");
    let error: serde_json::Value = serde_json::from_str(said.trim()).unwrap_or_else(|_| panic!("no JSON: {said}"));
    assert_eq!((&error["error"]["code"], &error["error"]["exit_code"]), (&name.into(), &code.into()), "{said}");
    error
}

#[test]
fn wrong_usage_missing_files_and_silent_clusters_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let none = dir.path().join("none");
    let root = quarry::identity::Root::generate().unwrap();
    let cluster =
        quarry_client::Cluster::new(root.cluster, root.public(), vec!["127.0.0.1:1".to_owned()]).unwrap().without_tls();
    let silent = dir.path().join("cluster.toml");
    std::fs::write(&silent, cluster.to_toml()).unwrap();
    for line in ["status", "health"] {
        expect(&none, &format!("{line} --no-such-flag"), 2, "usage");
        let error = expect(&none, line, 3, "not_found");
        assert!(error["error"]["hint"].as_str().unwrap().contains("QUARRY_CLUSTER"), "{error}");
    }
    expect(&silent, "bootstrap", 2, "usage");
    expect(&silent, "bootstrap --plan /no/such/plan", 2, "usage");
    expect(&silent, "bootstrap --plan /no/such/plan --no-tls", 3, "not_found");
    for line in [
        "snapshot status /no/such/file",
        "revocation apply /no/such/file",
        "log dump --dir /no/such/folder",
        "recover --offline --look --dir /no/such/folder --keep-node 1",
        "check perf --disk-only --dir /no/such/folder",
        "member add 4 h:1 --certificate /no/such/file",
    ] {
        expect(&silent, line, 3, "not_found");
    }
    std::fs::write(dir.path().join("backup"), "something else").unwrap();
    let backup = dir.path().join("backup").display().to_string();
    expect(&silent, &format!("snapshot save {backup}"), 4, "conflict");
    expect(&silent, &format!("snapshot status {backup}"), 1, "error");
    for line in ["add 0 127.0.0.1:1", "promote 0", "remove 0", "replace 1 0 127.0.0.1:1"] {
        let error = expect(&silent, &format!("member {line}"), 2, "usage");
        assert!(error["error"]["message"].as_str().unwrap().contains("0 is not in 1.."), "{error}");
    }
    let error = expect(&silent, "status", 6, "unavailable");
    assert!(error["error"]["message"].as_str().unwrap().contains("127.0.0.1:1"), "{error}");
    // How the cluster does is the answer of health, also when it does badly.
    let health = on(&silent, "health -o json");
    assert_eq!(health.status.code(), Some(6));
    let told: serde_json::Value = serde_json::from_slice(&health.stdout).unwrap();
    assert!(told["state"] == "unavailable" && !told["problems"].as_array().unwrap().is_empty(), "{told}");
}
