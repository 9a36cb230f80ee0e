//! Certificates that are declared void, and keys that others follow: by the root's tool, by the operator's, at the readers.

use quarry::local::Member;
use quarry_client::{CallError, GetError};
use quarry_tests::{TestCluster, cluster::create_namespace, soon, tools};

/// What a tool with these words printed, as JSON, and whether it ended well.
async fn ran(name: &str, words: &[&str]) -> (bool, serde_json::Value) {
    let ran = tools::run(name, &[words, &["-o", "json"]].concat()).await;
    (ran.is_well(), ran.json())
}

/// The same of one that must end well.
async fn tool(name: &str, words: &[&str]) -> serde_json::Value {
    tools::run(name, &[words, &["-o", "json"]].concat()).await.done()
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
        assert_eq!(told["silenced"], serde_json::json!([holder.0]), "it has no other certificate");
    }
    assert_eq!(serial().await, (number, true, 1));
    let (well, health) = ran("raft-admin", &["health", "--cluster", file]).await;
    let problems = health["problems"].to_string();
    assert!(
        !well && problems.contains(&format!("data node {}", holder.0)) && problems.contains("revoked"),
        "{problems}"
    );

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

    // Another key brings the node back; what the old one signed stays unread.
    let (folder, id) = (cluster.member_dir(Member::Data(holder.0)), holder.0.to_string());
    let folder = folder.to_str().unwrap();
    let new_key = ["keys", "node", "--new-key", "--root", root, "--role", "datanode", "--id", &id, "--out", folder];
    tool("quarry", &new_key).await;
    let told = tool("raft-admin", &["node", "rotate-key", &id, "--why", "a test", "--cluster", file]).await;
    assert_eq!((&told["resigned"], &told["older"]), (&0.into(), &serde_json::json!([])));
    let health = tool("raft-admin", &["health", "--cluster", file]).await;
    assert_eq!(health["problems"], serde_json::json!([]));
    pairs.put("both", "again").await.unwrap();
    assert_eq!(raw.copies(pairs.info().id, "both").await.len(), 2);
    client.close().await.unwrap();
}

/// Guards: what a node signed with its old key is signed again (`datanode/src/resign.rs`), and so are the records of its regions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_data_node_gets_another_key_and_once_the_old_one_is_revoked_everything_is_read_as_before() {
    let cluster = TestCluster::start_small(2, 64 << 20).await;
    let (writer, reader) = (cluster.client().await, cluster.client().await);
    let lone = create_namespace(&writer, 1, None).await;
    let name = lone.info().name.clone();
    for number in 0..32 {
        lone.put(format!("key-{number}"), format!("value-{number}")).await.unwrap();
    }
    let blocks = reader.namespace(&name).await.unwrap();
    let read_all = async || {
        for number in 0..32 {
            let value = blocks.get(format!("key-{number}")).await.unwrap().unwrap();
            assert_eq!(value.bytes, format!("value-{number}"));
        }
    };
    read_all().await;
    // Grants that are open could still commit what was signed before: the command would wait until they expire.
    writer.close().await.unwrap();

    let (file, dir) = (cluster.cluster_file(), cluster.dir().to_owned());
    let (root, path) = (dir.join("root.key"), dir.join("revocations.toml"));
    let (file, root, path) = (file.to_str().unwrap(), root.to_str().unwrap(), path.to_str().unwrap());
    let (mut old, mut resigned) = (Vec::new(), 0);
    for node in [101, 102] {
        let folder = cluster.member_dir(Member::Data(node));
        let (folder, node) = (folder.to_str().unwrap(), node.to_string());
        let id = ["--root", root, "--role", "datanode", "--id", &node, "--out", folder];
        tool("quarry", &[&["keys", "node", "--new-key"], &id[..]].concat()).await;
        let rotated = async || {
            let told = ["--why", "a test", "--timeout", "50s", "--cluster", file];
            tool("raft-admin", &[&["node", "rotate-key", &node], &told[..]].concat()).await
        };
        let told = rotated().await;
        resigned += told["resigned"].as_u64().unwrap();
        let older = told["older"].as_array().unwrap();
        assert_eq!(older.len(), 1, "{told}");
        old.push(older[0].to_string());
        // Asked again, there is nothing left to do.
        let again = rotated().await;
        assert_eq!((&again["serial"], &again["resigned"]), (&told["serial"], &0.into()));
    }
    assert!(resigned > 0, "the values are held by one of them at least");
    let old: Vec<&str> = old.iter().map(String::as_str).collect();
    tool("quarry", &[&["keys", "revoke", "--root", root, "--list", path], &old[..]].concat()).await;
    tool("raft-admin", &["revocation", "apply", path, "--cluster", file, "--timeout", "20s"]).await;
    // The first reply that has the number voids everything that was proven before.
    blocks.clone().fresh().get("key-0").await.unwrap().unwrap();
    read_all().await;
    let after = cluster.client().await;
    let theirs = after.namespace(&name).await.unwrap();
    theirs.put("after", "it").await.unwrap();
    assert_eq!(blocks.get("after").await.unwrap().unwrap().bytes, "it");
    for client in [reader, after] {
        client.close().await.unwrap();
    }
}
