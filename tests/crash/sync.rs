//! System calls: `fdatasync` precedes the acknowledgement, on a quorum.

use quarry_proto::v1;
use quarry_tests::{
    Member, TestCluster, calls,
    cluster::{DIRECTORY, fresh_name},
    soon,
    wait::PATIENCE,
};
use rustix::process::{Pid, Signal};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::Stdio,
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    time::timeout,
};

const TRACED: &str =
    "trace=pwrite64,pwritev,write,writev,sendto,sendmsg,read,readv,recvfrom,recvmsg,fdatasync,fsync,sync_file_range";

/// A trace of one process under way.
struct Trace {
    strace: Child,
    file: PathBuf,
}

impl Trace {
    /// Attaches to all threads of a process.
    async fn attach(pid: u32, file: PathBuf) -> Self {
        let mut command = Command::new("strace");
        command.args(["-f", "-y", "-T", "-ttt", "-s", "200000", "-e", TRACED, "-p"]).arg(pid.to_string());
        command.arg("-o").arg(&file).stdin(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut strace = command.spawn().expect("strace is installed (tools/setup does it)");
        let mut said = BufReader::new(strace.stderr.take().expect("it was piped")).lines();
        let attached = async {
            while let Some(line) = said.next_line().await.unwrap() {
                if line.contains("attached") {
                    return;
                }
                assert!(!line.contains("denied") && !line.contains("not permitted"), "{line}");
            }
            panic!("strace ended before it was attached");
        };
        timeout(PATIENCE, attached).await.expect("strace attaches in time");
        // What it says later must not block it.
        tokio::spawn(async move { while let Ok(Some(_)) = said.next_line().await {} });
        Self { strace, file }
    }

    /// Detaches, and reads what was seen.
    async fn end(mut self) -> Vec<Call> {
        let pid = self.strace.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw).unwrap();
        rustix::process::kill_process(pid, Signal::INT).unwrap();
        timeout(PATIENCE, self.strace.wait()).await.expect("strace detaches in time").unwrap();
        parse(&self.file)
    }
}

/// One system call.
#[derive(Clone, Debug)]
struct Call {
    name: String,
    /// What its first argument is: a path, or `socket:[inode]`.
    file: String,
    /// Seconds since 1970.
    began: f64,
    ended: f64,
    text: String,
    succeeded: bool,
}

impl Call {
    fn receives(&self) -> bool {
        matches!(&self.name[..], "read" | "readv" | "recvfrom" | "recvmsg") && self.is_socket()
    }
    fn sends(&self) -> bool {
        matches!(&self.name[..], "write" | "writev" | "sendto" | "sendmsg") && self.is_socket()
    }
    fn is_socket(&self) -> bool {
        self.file.starts_with("socket:") || self.file.starts_with("TCP")
    }
    fn stores(&self, below: &Path) -> bool {
        matches!(&self.name[..], "pwrite64" | "pwritev" | "write" | "writev")
            && Path::new(&self.file).starts_with(below)
    }
}

fn parse(file: &Path) -> Vec<Call> {
    let text = String::from_utf8_lossy(&std::fs::read(file).unwrap()).into_owned();
    let mut open: HashMap<String, Call> = HashMap::new();
    let mut calls = Vec::new();
    for line in text.lines() {
        // Numbers of threads are padded to the same width.
        let Some((thread, rest)) = line.trim_start().split_once(char::is_whitespace) else { continue };
        let Some((at, rest)) = rest.trim_start().split_once(char::is_whitespace) else { continue };
        let Ok(at) = at.parse::<f64>() else { continue };
        let rest = rest.trim_start();
        if let Some(resumed) = rest.strip_prefix("<... ") {
            let Some(mut call) = open.remove(thread) else { continue };
            call.text.push_str(resumed);
            call.ended = at;
            call.succeeded = !resumed.contains(") = -1");
            calls.push(call);
            continue;
        }
        let Some((name, arguments)) = rest.split_once('(') else { continue };
        let file = arguments.split_once('<').and_then(|(_, rest)| rest.split_once('>')).map_or("", |(file, _)| file);
        let spent = rest.rsplit_once('<').and_then(|(_, spent)| spent.strip_suffix('>')?.parse::<f64>().ok());
        let call = Call {
            name: name.to_owned(),
            file: file.to_owned(),
            began: at,
            ended: at + spent.unwrap_or(0.0),
            text: arguments.to_owned(),
            succeeded: !rest.contains(") = -1"),
        };
        if rest.ends_with("<unfinished ...>") {
            open.insert(thread.to_owned(), call);
        } else {
            calls.push(call);
        }
    }
    calls.sort_by(|one, other| one.began.total_cmp(&other.began));
    calls
}

/// When the bytes that contain `name` were safe below `folder`: the end of the first successful `fdatasync` of the file they were written to
/// that began after they were written.
fn safe_at(calls: &[Call], name: &str, folder: &Path) -> Option<f64> {
    let stored = calls.iter().filter(|call| call.stores(folder) && call.succeeded && call.text.contains(name));
    let synced = |stored: &Call| {
        let after = |call: &&Call| {
            matches!(&call.name[..], "fdatasync" | "fsync")
                && call.succeeded
                && call.file == stored.file
                && call.began >= stored.ended
        };
        calls.iter().find(after).map(|call| call.ended)
    };
    stored.filter_map(synced).min_by(f64::total_cmp)
}

#[tokio::test]
async fn fdatasync_precedes_the_acknowledgement_on_a_quorum() {
    // The trace must show what is said.
    let cluster = TestCluster::start_with(|spec| spec.plaintext = true).await;
    let folder = tempfile::tempdir().unwrap();
    let leader = cluster.leader(DIRECTORY, PATIENCE).await.unwrap();
    let mut traces: Vec<(Member, Trace)> = Vec::new();
    for meta in cluster.metas() {
        let trace = Trace::attach(cluster.pid(meta).unwrap(), folder.path().join(meta.to_string())).await;
        traces.push((meta, trace));
    }
    let raw = cluster.raw().await;
    let name = fresh_name("traced");
    // Attaching takes its time: the leadership may have moved.
    let (leader, reply) = soon("a traced leader answers", async || {
        let leader = cluster.leader(DIRECTORY, PATIENCE).await.unwrap_or(leader);
        let applied_ms = raw.describe().await.groups.iter().find(|it| it.group == DIRECTORY)?.applied_ms;
        let asked = v1::CreateNamespaceRequest {
            request: Some(v1::RequestId { applied_ms, random: quarry_tests::seed::random() }),
            name: name.clone(),
            class: v1::Class::Cache.into(),
            copies: 2,
            least: 0,
            quota_bytes: 0,
        };
        let mut control = calls::control(&cluster.address(leader)).await.ok()?;
        let reply = calls::done(control.create_namespace(asked)).await.ok()?;
        Some((leader, reply))
    })
    .await;
    assert_eq!(reply.namespace.unwrap().name, name);
    // The other follower stores it too, if a little later.
    cluster.agree().await;
    let mut seen = HashMap::new();
    for (meta, trace) in traces {
        seen.insert(meta, trace.end().await);
    }
    let of_leader = &seen[&leader];
    let named = |call: &&Call| call.text.contains(&name);
    for (meta, calls) in &seen {
        for call in calls.iter().filter(named) {
            eprintln!("{meta} {:.6} to {:.6}: {} on {}", call.began, call.ended, call.name, call.file);
        }
    }
    let asked = of_leader.iter().find(|call| call.receives() && named(call)).expect("the request is seen");
    let answered = of_leader
        .iter()
        .find(|call| call.sends() && call.file == asked.file && named(call))
        .expect("the acknowledgement is seen on the connection of the request");
    assert!(asked.began < answered.began);
    let mut safe = Vec::new();
    for (meta, calls) in &seen {
        let folder = cluster.member_dir(*meta).join("data");
        let at =
            safe_at(calls, &name, &folder).unwrap_or_else(|| panic!("{meta} stored the command and synced its file"));
        assert!(at > asked.began);
        safe.push((at, *meta));
    }
    safe.sort_by(|one, other| one.0.total_cmp(&other.0));
    let quorum_at = safe[1].0;
    assert!(
        quorum_at <= answered.began,
        "acknowledged at {:.6}, on the disks of a quorum at {quorum_at:.6}: {safe:?}",
        answered.began
    );
    // Sled's own flush is not power-safe: the proof must not rest on it.
    assert!(of_leader.iter().any(|call| call.name == "fdatasync" && call.succeeded));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_read_with_calls_that_were_interrupted_by_others() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("trace");
        let text = "7     100.000001 pwrite64(5</d/db>, \"..name..\", 8, 0) = 8 <0.000010>\n\
                    7 100.000020 fdatasync(5</d/db> <unfinished ...>\n\
                    8 100.000030 sendto(9<socket:[4]>, \"name\", 4, 0, NULL, 0) = 4 <0.000001>\n\
                    7 100.000040 <... fdatasync resumed>) = 0 <0.000020>\n";
        std::fs::write(&file, text).unwrap();
        let calls = parse(&file);
        let at = safe_at(&calls, "name", Path::new("/d")).unwrap();
        let sent = calls.iter().find(|call| call.sends()).unwrap();
        assert!((at - 100.000_040).abs() < 1e-7 && at > sent.began, "this trace acknowledges too early, and it shows");
        std::fs::write(&file, text.replace(") = 0 ", ") = -1 EIO (Input/output error) ")).unwrap();
        assert_eq!(safe_at(&parse(&file), "name", Path::new("/d")), None);
    }
}
