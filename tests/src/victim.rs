//! A writer or reader in a process of its own, which a test stops, continues or kills in the middle of its work.

use crate::sockets;
use quarry_wire::ids::NamespaceId;
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

/// Longest time until the process says something that it should.
const ANSWER: Duration = Duration::from_secs(60);

/// The process. Killed and reaped when dropped.
pub struct Victim {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Victim {
    /// Starts `binary`, the `raw-writer` or the `slow-reader` of this package, and waits until it takes orders.
    ///
    /// # Panics
    /// If it cannot be started.
    pub async fn start(binary: &str, cluster_file: &Path) -> Self {
        let mut command = Command::new(binary);
        command.arg(cluster_file).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().expect("the binaries of this package can be started");
        let orders = child.stdin.take().expect("its input was piped");
        let answers = BufReader::new(child.stdout.take().expect("its output was piped")).lines();
        let mut victim = Self { child, orders, answers };
        victim.answer("ready").await;
        victim
    }

    /// Takes a grant, arms it on all holders and writes one byte to each, so that the connections stand. Answers the grant.
    pub async fn arm(&mut self, namespace: NamespaceId, slot_size: u32, slots: u32, ttl: Duration) -> Value {
        let granted = self.grant(namespace, slot_size, slots, ttl).await;
        self.arm_granted().await;
        granted
    }

    /// Arms the grant that it took, as [`Victim::arm`] does.
    pub async fn arm_granted(&mut self) {
        self.order(&json!({"do": "arm"})).await;
        self.answer("armed").await;
    }

    /// Takes a grant.
    pub async fn grant(&mut self, namespace: NamespaceId, slot_size: u32, slots: u32, ttl: Duration) -> Value {
        let ttl_ms = u64::try_from(ttl.as_millis()).expect("a TTL is short");
        let order =
            json!({"do": "grant", "namespace": namespace.0, "slot_size": slot_size, "slots": slots, "ttl_ms": ttl_ms});
        self.order(&order).await;
        self.answer("granted").await
    }

    /// Begins to write `byte` over the whole slab at `node`, in one operation. [`Victim::answer`] `written` says how it ended.
    pub async fn begin_write(&mut self, node: u64, byte: u8) {
        self.order(&json!({"do": "write", "node": node, "byte": byte})).await;
        self.answer("writing").await;
    }

    /// Writes the frame of a value to all holders, without committing it.
    pub async fn write_value(&mut self, key: &str, payload_seed: u64, payload_bytes: usize) {
        let order = json!({"do": "value", "key": key, "seed": payload_seed, "bytes": payload_bytes});
        self.order(&order).await;
        self.answer("value").await;
    }

    /// Begins to commit the value that was written, through `node`. [`Victim::answer`] `committed` says what came of it.
    pub async fn begin_commit(&mut self, node: u64) {
        self.order(&json!({"do": "commit", "node": node})).await;
        self.answer("committing").await;
    }

    /// Gives it an order.
    ///
    /// # Panics
    /// If it has ended.
    pub async fn order(&mut self, order: &Value) {
        let line = format!("{order}\n");
        self.orders.write_all(line.as_bytes()).await.expect("it reads its orders");
    }

    /// Its next answer, about `what`, if there is one already.
    ///
    /// # Panics
    /// If it says something else, or has ended.
    pub async fn answered(&mut self, what: &str) -> Option<Value> {
        timeout(Duration::ZERO, self.answer(what)).await.ok()
    }

    /// Its next answer, which must be about `what`.
    ///
    /// # Panics
    /// If it says something else, ends, or stays silent.
    pub async fn answer(&mut self, what: &str) -> Value {
        let line = timeout(ANSWER, self.answers.next_line()).await;
        let line = line.unwrap_or_else(|_| panic!("it did not say {what:?} in time"));
        let line = line.expect("its output can be read").unwrap_or_else(|| panic!("it ended before it said {what:?}"));
        let value: Value = serde_json::from_str(&line).expect("it speaks JSON");
        assert_eq!(value["said"], what, "{value}");
        value
    }

    fn pid(&self) -> Pid {
        i32::try_from(self.id()).ok().and_then(Pid::from_raw).expect("a process id is a positive i32")
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// If it has ended.
    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).expect("it can be signalled");
    }

    /// Bytes that it has sent and that nobody took yet, over all its TCP connections.
    ///
    /// # Panics
    /// If it has ended.
    #[must_use]
    pub fn unacknowledged_bytes(&self) -> u64 {
        sockets::of(self.id()).iter().map(|socket| socket.unacknowledged).sum()
    }

    /// Bytes that came for it and that it did not read yet, over all its TCP connections.
    ///
    /// # Panics
    /// If it has ended.
    #[must_use]
    pub fn unread_bytes(&self) -> u64 {
        sockets::of(self.id()).iter().map(|socket| socket.unread).sum()
    }

    /// Whether every one of its threads is stopped.
    ///
    /// # Panics
    /// If it has ended.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.id())).expect("it runs, and is ours");
        let state = |path: PathBuf| {
            // pid (name) state ...; the name may hold anything, parentheses too.
            let stat = std::fs::read_to_string(path).ok()?;
            stat.rsplit_once(") ").map(|(_, rest)| rest.starts_with('T'))
        };
        threads.filter_map(|thread| state(thread.ok()?.path().join("stat"))).all(|stopped| stopped)
    }

    fn id(&self) -> u32 {
        self.child.id().expect("it runs")
    }

    /// Kills it with SIGKILL and reaps it.
    ///
    /// # Panics
    /// If the system refuses.
    pub async fn kill(mut self) {
        self.child.kill().await.expect("a child can be killed");
    }
}
