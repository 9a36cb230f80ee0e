//! Certificates that are declared void: by the root's tool, by the operator's, at the readers.

use quarry_client::{CallError, GetError};
use quarry_tests::{TestCluster, cluster::create_namespace, soon};
use std::process::Stdio;
use tokio::process::Command;

/// What a tool with these words printed, as JSON.
async fn tool(name: &str, words: &[&str]) -> serde_json::Value {
    let tool = quarry::local::built_binary().unwrap().with_file_name(name);
    let mut command = Command::new(tool);
    command.args(words).args(["-o", "json"]).stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_revoked_data_node_signed_is_read_no_more_and_the_other_copies_are() {
    let cluster = TestCluster::start_small(2, 64 << 20).await;
    let client = cluster.client().await;
    let (pairs, lone) = (create_namespace(&client, 2, None).await, create_namespace(&client, 1, None).await);
    for number in 0..8 {
        pairs.put(format!("key-{number}"), format!("value-{number}")).await.unwrap();
        pairs.get(format!("key-{number}")).await.unwrap().unwrap();
    }
    lone.put("only", "here").await.unwrap();
    lone.get("only").await.unwrap().unwrap();
    let raw = cluster.raw().await;
    let holder = raw.copies(lone.info().id, "only").await[0].region.node;

    let (file, dir) = (cluster.cluster_file(), cluster.dir().to_owned());
    let file = file.to_str().unwrap();
    let serial = async || {
        let listed = tool("raft-admin", &["certificate", "list", "--cluster", file]).await;
        let all = listed["certificates"].as_array().unwrap().clone();
        let own = all.into_iter().find(|it| it["node"] == holder.0 && it["role"] == "datanode").unwrap();
        (
            own["serial"].as_u64().unwrap(),
            own["revoked"].as_bool().unwrap(),
            listed["revocation_list"].as_u64().unwrap(),
        )
    };
    let (number, revoked, list) = serial().await;
    assert_eq!((revoked, list), (false, 0));
    let (root, path) = (dir.join("root.key"), dir.join("revocations.toml"));
    let (root, path) = (root.to_str().unwrap(), path.to_str().unwrap());
    let made = tool("quarry", &["keys", "revoke", "--root", root, "--list", path, &number.to_string()]).await;
    assert_eq!((&made["number"], &made["serials"]), (&1.into(), &serde_json::json!([number])));
    for _ in 0..2 {
        let told = tool("raft-admin", &["revocation", "apply", path, "--cluster", file, "--timeout", "20s"]).await;
        assert_eq!((&told["number"], &told["serials"]), (&1.into(), &1.into()));
    }
    assert_eq!(serial().await, (number, true, 1));

    // The first reply that has the number voids everything that was proven before.
    for number in 0..8 {
        let value = pairs.clone().fresh().get(format!("key-{number}")).await.unwrap().unwrap();
        assert_eq!(value.bytes, format!("value-{number}"));
    }
    let read = lone.get("only").await;
    assert!(matches!(read, Err(GetError::Call(CallError::Untrusted { .. }))), "{read:?}");
    // A further list has the serials of the first.
    let made = tool("quarry", &["keys", "revoke", "--root", root, "--list", path, "4000"]).await;
    assert_eq!((&made["number"], &made["serials"]), (&2.into(), &serde_json::json!([number, 4000])));
    tool("raft-admin", &["revocation", "apply", path, "--cluster", file, "--timeout", "20s"]).await;
    soon("the second list holds", async || (serial().await == (number, true, 2)).then_some(())).await;
    client.close().await.unwrap();
}
