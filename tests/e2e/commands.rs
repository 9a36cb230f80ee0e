//! The `quarry` command: what it prints and how it ends.

use quarry_tests::{cluster::fresh_name, seed::pattern, shared};
use std::{path::Path, process::Stdio};
use tokio::{io::AsyncWriteExt as _, process::Command};

const OK: i32 = 0;
const USAGE: i32 = 2;
const NOT_FOUND: i32 = 3;
const EXISTS: i32 = 4;
const UNAVAILABLE: i32 = 6;

struct Ran {
    code: i32,
    out: Vec<u8>,
    err: String,
}

async fn quarry(cluster: Option<&Path>, arguments: &[&str], input: &[u8]) -> Ran {
    let mut command = Command::new(quarry::local::built_binary().unwrap());
    command.args(arguments).env_remove("QUARRY_CLUSTER").kill_on_drop(true);
    if let Some(file) = cluster {
        command.env("QUARRY_CLUSTER", file);
    }
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("quarry can be run");
    let mut stdin = child.stdin.take().unwrap();
    // A command that reads no input may have closed it.
    let _ = stdin.write_all(input).await;
    drop(stdin);
    let output = child.wait_with_output().await.unwrap();
    let code = output.status.code().expect("it was not killed");
    Ran { code, out: output.stdout, err: String::from_utf8_lossy(&output.stderr).into_owned() }
}

#[tokio::test]
async fn values_go_in_and_out_through_the_command_and_its_exit_codes_tell_what_happened() {
    let cluster = shared().await;
    let file = cluster.cluster_file();
    let folder = tempfile::tempdir().unwrap();
    let run = async |arguments: &[&str], input: &[u8]| quarry(Some(&file), arguments, input).await;
    let name = fresh_name("command");
    let expect = |ran: &Ran, code: i32| assert_eq!(ran.code, code, "{}", ran.err);

    expect(&run(&["namespace", "create", &name, "--copies", "2"], b"").await, OK);
    expect(&run(&["namespace", "create", &name, "--copies", "2"], b"").await, EXISTS);
    let listed = run(&["namespace", "list"], b"").await;
    expect(&listed, OK);
    assert!(String::from_utf8_lossy(&listed.out).contains(&name));

    let bytes = pattern(1, 300_000);
    let value = folder.path().join("value");
    std::fs::write(&value, &bytes).unwrap();
    let value = value.to_str().unwrap();
    expect(&run(&["put", "--namespace", &name, "from-file", value], b"").await, OK);
    expect(&run(&["put", "--namespace", &name, "from-input", "-"], b"hello\n").await, OK);
    let again = run(&["put", "--namespace", &name, "from-input", "-"], b"again\n").await;
    expect(&again, EXISTS);
    assert!(!again.err.is_empty(), "it says why");

    let got = run(&["get", "--namespace", &name, "from-input"], b"").await;
    expect(&got, OK);
    assert_eq!(got.out, b"hello\n");
    let copy = folder.path().join("copy");
    expect(&run(&["get", "--namespace", &name, "from-file", "-O", copy.to_str().unwrap()], b"").await, OK);
    assert!(std::fs::read(&copy).unwrap() == bytes);

    expect(&run(&["rm", "--namespace", &name, "from-input"], b"").await, OK);
    expect(&run(&["get", "--namespace", &name, "from-input"], b"").await, NOT_FOUND);
    expect(&run(&["rm", "--namespace", &name, "from-input"], b"").await, NOT_FOUND);
    expect(&run(&["get", "--namespace", &fresh_name("none"), "key"], b"").await, NOT_FOUND);
}

#[tokio::test]
async fn wrong_usage_and_absent_clusters_have_exit_codes_of_their_own() {
    for arguments in [&["put"][..], &["no-such-command"], &["get", "--no-such-flag", "key"], &["namespace", "create"]] {
        let ran = quarry(None, arguments, b"").await;
        assert_eq!(ran.code, USAGE, "{arguments:?}: {}", ran.err);
    }
    // A cluster that nobody serves: the file is right, the processes are not there.
    let folder = tempfile::tempdir().unwrap();
    let spec = quarry_tests::cluster::spec();
    let local = quarry::local::LocalCluster::create(&folder.path().join("down"), spec).unwrap();
    let ran = quarry(Some(&local.cluster_file()), &["get", "--namespace", "blocks", "key"], b"").await;
    assert_eq!(ran.code, UNAVAILABLE, "{}", ran.err);
}

#[tokio::test]
async fn an_unknown_key_in_a_configuration_is_named_and_nothing_is_started() {
    let cluster = shared().await;
    let folder = tempfile::tempdir().unwrap();
    for (member, command) in [(cluster.metas()[0], "meta"), (cluster.data_nodes()[0], "datanode")] {
        let good = cluster.member_dir(member).join("config.toml");
        let checked = quarry(None, &[command, "--config", good.to_str().unwrap(), "--check-config"], b"").await;
        assert_eq!(checked.code, OK, "{}", checked.err);
        let text = std::fs::read_to_string(&good).unwrap().replace("[membership]", "[membership]\nnode_silense_ms = 1");
        let bad = folder.path().join(format!("{command}.toml"));
        std::fs::write(&bad, text).unwrap();
        let ran = quarry(None, &[command, "--config", bad.to_str().unwrap()], b"").await;
        assert_ne!(ran.code, OK);
        assert!(ran.err.contains("node_silense_ms"), "{}", ran.err);
    }
}

#[tokio::test]
async fn the_binary_is_the_one_that_was_built_with_these_tests() {
    let ran = quarry(None, &["--build-id"], b"").await;
    assert_eq!((ran.code, String::from_utf8_lossy(&ran.out).trim()), (OK, quarry::build::BUILD_ID));
}
