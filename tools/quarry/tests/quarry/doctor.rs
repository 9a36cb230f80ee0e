//! The doctor looks at this machine and at a cluster.

use crate::{Up, code, eventually, quarry, text};
use serde_json::Value;
use std::{fs, path::Path, process::Output};

fn doctor(arguments: &[&str], data: &Path) -> (Output, Value) {
    let mut command = quarry();
    let output = command
        .args(["doctor", "-o", "json", "--timeout", "20s", "--data-dir"])
        .arg(data)
        .args(arguments)
        .output()
        .unwrap();
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output.stderr)));
    (output, report)
}

fn of<'a>(report: &'a Value, check: &str) -> Vec<&'a Value> {
    report["findings"].as_array().unwrap().iter().filter(|it| it["check"] == check).collect()
}

#[test]
fn the_doctor_tries_the_fabric_the_disk_and_the_ports_and_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (output, report) = doctor(&["--listen", &address], dir.path());
    assert_eq!((code(&output), &report["failed"]), (1, &1.into()), "{report}");
    for check in ["libfabric", "provider", "round trip", "clock"] {
        assert_eq!(of(&report, check)[0]["state"], "ok", "{report}");
    }
    assert!(of(&report, "round trip")[0]["found"].as_str().unwrap().contains("GiB/s"), "{report}");
    for check in
        ["memlock", "open files", "huge pages", "kernel", "disk space", "file system", "disk sync", "clock sync"]
    {
        assert_eq!(of(&report, check).len(), 1, "{check}: {report}");
    }
    let port = of(&report, "ports")[0];
    assert_eq!(port["state"], "fail");
    for finding in report["findings"].as_array().unwrap() {
        assert_eq!(finding["state"] == "ok", finding["remedy"].is_null(), "{finding}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "it leaves nothing behind");
    drop(taken);
    let (output, report) = doctor(&[], dir.path());
    assert_eq!((code(&output), &report["failed"]), (0, &0.into()), "{report}");
}

#[tokio::test]
async fn the_doctor_asks_every_process_of_a_cluster_and_names_the_one_that_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let mut up = Up::start(dir.path());
    let cluster = up.ready().await;
    let named = ["--cluster", cluster.to_str().unwrap()];
    let (output, report) = doctor(&named, dir.path());
    assert_eq!(code(&output), 0, "{report}");
    for check in ["meta node", "data node", "clock skew", "cluster"] {
        let found = of(&report, check);
        assert_eq!((found.len(), &found[0]["state"]), (1, &"ok".into()), "{check}: {report}");
    }
    let credentials = of(&report, "credentials")[0];
    assert_eq!(credentials["state"], "warn", "it says that they are for development: {report}");
    assert!(of(&report, "meta node")[0]["found"].as_str().unwrap().contains("leads the directory"), "{report}");

    let pid = up.pids()[1];
    let process = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    eventually("the data node to be gone", || (!crate::runs(pid)).then_some(())).await;
    let (output, report) = doctor(&named, dir.path());
    assert_eq!(code(&output), 1, "{report}");
    let gone = of(&report, "data node")[0];
    assert!(gone["state"] == "fail" && gone["found"].as_str().unwrap().contains("101"), "{report}");
}
