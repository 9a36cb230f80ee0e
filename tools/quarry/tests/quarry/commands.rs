//! `up`, the client commands, and the daemons' `--check-config`.

use crate::{Up, code, eventually, quarry, runs, text};
use quarry::build::BUILD_ID;
use rustix::process::Signal;
use std::{
    fs,
    io::{Read as _, Write as _},
    path::Path,
    process::{Child, Output, Stdio},
};

fn on(cluster: &Path, line: &str) -> Output {
    quarry().env("QUARRY_CLUSTER", cluster).env("QUARRY_NAMESPACE", "kv").args(line.split(' ')).output().unwrap()
}

fn put(cluster: &Path, line: &str, bytes: &[u8]) -> Output {
    let mut command = quarry();
    command.env("QUARRY_CLUSTER", cluster).env("QUARRY_NAMESPACE", "kv").args(line.split(' '));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    child.wait_with_output().unwrap()
}

fn get(cluster: &Path, key: &str) -> Child {
    let mut command = quarry();
    command.env("QUARRY_CLUSTER", cluster).env("QUARRY_NAMESPACE", "kv").args(["get", key]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[tokio::test]
async fn up_serves_values_ends_in_order_and_opens_its_cluster_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut up = Up::start(dir.path());
    let cluster = up.ready().await;
    let exit = |line: &str| code(&on(&cluster, line));

    assert_eq!(exit("get greeting"), 3, "there is no such namespace");
    assert_eq!(exit("namespace create kv --copies 1"), 0);
    assert_eq!(exit("namespace create kv --copies 1"), 4, "it exists already");
    let listed: serde_json::Value = serde_json::from_slice(&on(&cluster, "namespace list -o json").stdout).unwrap();
    assert_eq!((&listed[0]["name"], &listed[0]["copies"]), (&"kv".into(), &1.into()));

    let written = put(&cluster, "put greeting -o json", b"hello");
    assert_eq!(code(&written), 0, "{}", text(&written.stderr));
    let written: serde_json::Value = serde_json::from_slice(&written.stdout).unwrap();
    assert_eq!((&written["key"], &written["bytes"]), (&"greeting".into(), &5.into()));
    assert_eq!(code(&put(&cluster, "put greeting", b"other")), 4, "it exists already");
    assert_eq!(on(&cluster, "get greeting").stdout, b"hello");
    assert_eq!(code(&put(&cluster, "put greeting --replace", b"good bye")), 0);
    let file = dir.path().join("value");
    assert_eq!(exit(&format!("get greeting -O {}", file.display())), 0);
    assert_eq!(fs::read(&file).unwrap(), b"good bye");
    assert_eq!(exit(&format!("put copy {}", file.display())), 0);
    assert_eq!(code(&put(&cluster, "put large", &[7; 900 << 10])), 0);
    let mut reader = get(&cluster, "large");
    reader.stdout.take().unwrap().read_exact(&mut [0; 5]).unwrap();
    let ended = reader.wait_with_output().unwrap();
    assert_eq!((code(&ended), text(&ended.stderr)), (0, String::new()), "the reader went away with what it wanted");

    let removed = on(&cluster, "rm greeting nothing copy -o json");
    assert_eq!(code(&removed), 3, "one of the keys is not there");
    let rows: Vec<serde_json::Value> =
        text(&removed.stdout).lines().map(|row| serde_json::from_str(row).unwrap()).collect();
    assert!(rows[0]["deleted"].is_string() && rows[2]["deleted"].is_string(), "{rows:?}");
    assert_eq!(rows[1]["error"]["code"], "not_found");
    assert_eq!(exit("get greeting"), 3);

    let pids = up.pids();
    up.signal(Signal::TERM);
    let status = eventually("quarry up to end", || up.child.try_wait().unwrap()).await;
    assert!(status.success(), "{status}: {}", fs::read_to_string(dir.path().join("up.log")).unwrap());
    assert!(!pids.iter().any(|pid| runs(*pid)));
    assert!(!up.ready.exists());
    for member in ["meta-1", "data-101"] {
        let log = fs::read_to_string(up.dir.join(member).join("log")).unwrap();
        assert!(log.contains("drains"), "{member} was killed, not asked to end:\n{log}");
    }

    let mut up = Up::start(dir.path());
    assert_eq!(up.ready().await, cluster);
    assert_eq!(exit("namespace create kv --copies 1"), 4, "namespaces outlive a restart");
    assert_eq!(code(&put(&cluster, "put greeting", b"hello again")), 0);
}

#[tokio::test]
async fn the_processes_of_up_end_also_when_it_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut up = Up::start(dir.path());
    up.ready().await;
    let pids = up.pids();
    assert!(pids.iter().all(|pid| runs(*pid)));
    up.signal(Signal::KILL);
    eventually("the processes to end", || (!pids.iter().any(|pid| runs(*pid))).then_some(())).await;
}

#[test]
fn a_command_without_an_answering_cluster_ends_as_unavailable() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("cluster.toml");
    let root = quarry::identity::Root::generate().unwrap();
    let nobody = vec!["127.0.0.1:1".to_owned()];
    let cluster = quarry_client::Cluster::new(root.cluster, root.public(), nobody).unwrap().without_tls();
    fs::write(&file, cluster.to_toml()).unwrap();
    let output = on(&file, "get greeting --timeout 300ms");
    assert_eq!(code(&output), 6, "{}", text(&output.stderr));
    assert_eq!(code(&on(&dir.path().join("none"), "get greeting")), 3);
    assert_eq!(code(&on(&file, "get")), 2);
}

#[test]
fn a_file_larger_than_any_value_is_refused_before_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("large");
    fs::File::create(&file).unwrap().set_len(1 << 40).unwrap();
    // No cluster is asked: the file that would name one is not there.
    let refused = |output: &Output, found: &str| {
        let said = text(&output.stderr);
        assert_eq!(code(output), 1, "{said}");
        assert!(said.contains("at most 67108736 bytes") && said.contains(found), "{said}");
    };
    let none = dir.path().join("none");
    refused(&on(&none, &format!("put key {}", file.display())), "1099511627776");
    refused(&on(&none, "put key /dev/zero"), "/dev/zero has more");
    let mut command = quarry();
    command.env("QUARRY_CLUSTER", &none).env("QUARRY_NAMESPACE", "kv").args(["put", "key", "-"]);
    refused(&command.stdin(fs::File::open("/dev/zero").unwrap()).output().unwrap(), "has more");
}

#[test]
fn check_config_accepts_what_up_wrote_and_names_an_unknown_key() {
    let dir = tempfile::tempdir().unwrap();
    let spec = quarry::local::LocalSpec::new(env!("CARGO_BIN_EXE_quarry").into());
    let cluster = quarry::local::LocalCluster::create(&dir.path().join("cluster"), spec).unwrap();
    let check = |daemon: &str, config: &Path| {
        let output = quarry().arg(daemon).arg("--config").arg(config).arg("--check-config").output().unwrap();
        (code(&output), text(&output.stderr))
    };
    for (daemon, member) in [("meta", cluster.metas()[0]), ("datanode", cluster.data_nodes()[0])] {
        let config = cluster.member_dir(member).join("config.toml");
        assert_eq!(check(daemon, &config), (0, String::new()));
        let other = if daemon == "meta" { "datanode" } else { "meta" };
        assert_eq!(check(other, &config).0, 1, "a {daemon} is no {other}");
        if daemon == "datanode" {
            let mut command = quarry();
            command.args(["datanode", "--check-config", "--set", "fabric.provider=nonesuch", "--config"]).arg(&config);
            let output = command.output().unwrap();
            assert_eq!(code(&output), 1);
            assert!(text(&output.stderr).contains("nonesuch"), "{}", text(&output.stderr));
        }
        fs::write(&config, fs::read_to_string(&config).unwrap() + "\n[nodes]\nid = 1\n").unwrap();
        let (code, said) = check(daemon, &config);
        assert_eq!(code, 1);
        assert!(said.contains("unknown key nodes"), "{said}");
    }
}

#[test]
fn the_binary_says_the_build_id_of_the_library() {
    let output = quarry().arg("--build-id").output().unwrap();
    assert_eq!(text(&output.stdout).trim(), BUILD_ID);
    let output = quarry().arg("--version").output().unwrap();
    assert!(text(&output.stdout).contains(BUILD_ID));
}
