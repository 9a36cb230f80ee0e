//! Processes that are killed, and a process whose system calls are watched.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use quarry_raft::{Group, Host, RaftNodeId};

use crate::cluster::{GROUP, Ledger, command, soon, test_config, until};

const DIR: &str = "QUARRY_RAFT_TEST_DIR";
const FIRST: &str = "QUARRY_RAFT_TEST_FIRST";
const WRITERS: &str = "QUARRY_RAFT_TEST_WRITERS";
const EACH: &str = "QUARRY_RAFT_TEST_EACH";
const NODE: RaftNodeId = RaftNodeId(1);

async fn open(dir: &Path) -> (Host, Group<Ledger>) {
    let host = Host::open(test_config(NODE, dir)).await.unwrap();
    let group = host.start_group(GROUP, Ledger::default()).await.unwrap();
    if !group.is_initialized() {
        group.initialize(BTreeMap::from([(NODE, "127.0.0.1:1".to_owned())])).await.unwrap();
    }
    until("a leader", || group.status().leader_since.is_some()).await;
    (host, group)
}

/// A command that can be recognised in what is written to disk.
fn marked(number: u64) -> bytes::Bytes {
    let mut bytes = command(number, 8).to_vec();
    bytes.extend_from_slice(format!("<marker-{number}>").as_bytes());
    bytes.into()
}

/// The child: proposes, and says so only after each acknowledgement.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by the other tests of this file, in a process of its own"]
async fn child_that_proposes() {
    let number = |name: &str| std::env::var(name).unwrap().parse::<u64>().unwrap();
    let (first, writers, each) = (number(FIRST), number(WRITERS), number(EACH));
    let (host, group) = open(Path::new(&std::env::var(DIR).unwrap())).await;
    let writers = (0..writers).map(|writer| {
        let group = group.clone();
        tokio::spawn(async move {
            for number in (0..each).map(|step| first + writer + step * writers) {
                group.propose(marked(number)).await.unwrap();
                let mut out = std::io::stdout().lock();
                out.write_all(format!("ack {number}\n").as_bytes()).unwrap();
                out.flush().unwrap();
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    host.shutdown().await;
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn child(wrap: &[&str], dir: &Path, first: u64, writers: u64, each: u64) -> Killed {
    let exe = std::env::current_exe().unwrap();
    let args = [exe.to_str().unwrap(), "--ignored", "--exact", "crashes::child_that_proposes", "--nocapture"];
    let args: Vec<&str> = wrap.iter().copied().chain(args).collect();
    let child = Command::new(args[0])
        .args(&args[1..])
        .env(DIR, dir)
        .envs([(FIRST, first), (WRITERS, writers), (EACH, each)].map(|(name, value)| (name, value.to_string())))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    Killed(child)
}

fn acknowledged(line: &str) -> Option<u64> {
    line.strip_prefix("ack ")?.parse().ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_while_proposing_loses_no_acknowledged_command() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("node");
    let mut acked: BTreeSet<u64> = BTreeSet::new();
    for round in 0..3 {
        let (path, first) = (path.clone(), round * 1_000_000);
        let heard = tokio::task::spawn_blocking(move || {
            let mut child = child(&[], &path, first, 8, 100_000);
            let lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
            let mut heard = BTreeSet::new();
            let mut killed = false;
            for line in lines.map_while(Result::ok) {
                heard.extend(acknowledged(&line));
                if heard.len() >= 300 && !killed {
                    child.0.kill().unwrap();
                    killed = true;
                }
            }
            assert!(killed, "the child ended by itself after {} acknowledgements", heard.len());
            heard
        })
        .await
        .unwrap();
        acked.extend(heard);
        let (host, group) = open(&dir.path().join("node")).await;
        group.read_index(soon()).await.unwrap();
        let kept = group.with(|ledger, _| ledger.numbers());
        let lost: Vec<_> = acked.difference(&kept).collect();
        assert!(lost.is_empty(), "round {round}: acknowledged and lost: {lost:?}");
        host.shutdown().await;
    }
}

/// One system call in a trace, from the line where it began to the line where it ended.
#[derive(Debug)]
struct Call {
    text: String,
    began: usize,
    ended: usize,
}

fn calls(trace: &str) -> Vec<Call> {
    let mut unfinished: BTreeMap<&str, (String, usize)> = BTreeMap::new();
    let mut calls = Vec::new();
    for (at, line) in trace.lines().enumerate() {
        let Some((pid, rest)) = line.split_once(' ') else { continue };
        let rest = rest.trim_start();
        if let Some(begun) = rest.strip_suffix("<unfinished ...>") {
            unfinished.insert(pid, (begun.to_owned(), at));
        } else if rest.starts_with("<... ") {
            let Some((begun, began)) = unfinished.remove(pid) else { continue };
            calls.push(Call { text: begun + rest, began, ended: at });
        } else {
            calls.push(Call { text: rest.to_owned(), began: at, ended: at });
        }
    }
    calls
}

#[test]
fn the_log_is_synced_after_it_is_written_and_before_the_acknowledgement() {
    let dir = tempfile::tempdir().unwrap();
    let (path, trace) = (dir.path().join("node"), dir.path().join("trace"));
    let strace =
        ["strace", "-f", "-y", "-s", "4000000", "-e", "trace=fdatasync,write,pwrite64", "-o", trace.to_str().unwrap()];
    let mut child = child(&strace, &path, 0, 1, 20);
    let lines = BufReader::new(child.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    let heard: Vec<u64> = lines.filter_map(|line| acknowledged(&line)).collect();
    assert_eq!(heard, (0..20).collect::<Vec<_>>());
    assert!(child.0.wait().unwrap().success());

    let trace = String::from_utf8_lossy(&std::fs::read(&trace).unwrap()).into_owned();
    let calls = calls(&trace);
    // Either file of it.
    let log = path.join("journal-").display().to_string();
    for number in 0..20 {
        let find = |what: &str, holds: &dyn Fn(&Call) -> bool| {
            calls.iter().find(|call| holds(call)).unwrap_or_else(|| panic!("command {number}: no {what} in the trace"))
        };
        let written = find("write to the log", &|call| {
            call.text.starts_with("pwrite64(")
                && call.text.contains(&log)
                && call.text.contains(&format!("<marker-{number}>"))
        });
        let acknowledged = find("acknowledgement", &|call| {
            call.text.starts_with("write(1") && call.text.contains(&format!("\"ack {number}\\n\""))
        });
        let synced = find("sync after the write", &|call| {
            call.text.starts_with("fdatasync(")
                && call.text.contains(&log)
                && call.text.trim_end().ends_with("= 0")
                && call.began > written.ended
        });
        assert!(synced.ended < acknowledged.began, "command {number}: {synced:?} is not before {acknowledged:?}");
    }
}
