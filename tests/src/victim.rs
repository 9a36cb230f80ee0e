//! A writer in a process of its own, which a test stops, continues or kills in the middle of its work.

use quarry_wire::ids::NamespaceId;
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
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
    /// Starts `binary`, the `raw-writer` of this package.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn start(binary: &str, cluster_file: &Path) -> Self {
        let mut command = Command::new(binary);
        command.arg(cluster_file).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().expect("the raw-writer of this package can be started");
        let orders = child.stdin.take().expect("its input was piped");
        let answers = BufReader::new(child.stdout.take().expect("its output was piped")).lines();
        Self { child, orders, answers }
    }

    /// Takes a grant and arms it on all holders; then writes one byte to each, so that the connections stand.
    pub async fn arm(&mut self, namespace: NamespaceId, slot_size: u32, slots: u32, ttl: Duration) -> Value {
        let ttl_ms = u64::try_from(ttl.as_millis()).expect("a TTL is short");
        let order =
            json!({"do": "arm", "namespace": namespace.0, "slot_size": slot_size, "slots": slots, "ttl_ms": ttl_ms});
        self.order(&order).await;
        self.answer("armed").await
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

    async fn order(&mut self, order: &Value) {
        let line = format!("{order}\n");
        self.orders.write_all(line.as_bytes()).await.expect("the raw-writer reads its orders");
    }

    /// Its next answer, which must be about `what`.
    ///
    /// # Panics
    /// If it says something else, ends, or stays silent.
    pub async fn answer(&mut self, what: &str) -> Value {
        let line = timeout(ANSWER, self.answers.next_line()).await;
        let line = line.unwrap_or_else(|_| panic!("the raw-writer did not say {what:?} in time"));
        let line = line.expect("its output can be read").unwrap_or_else(|| panic!("it ended before it said {what:?}"));
        let value: Value = serde_json::from_str(&line).expect("it speaks JSON");
        assert_eq!(value["said"], what, "{value}");
        value
    }

    fn pid(&self) -> Pid {
        let id = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        id.expect("the raw-writer runs")
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
    pub fn unread_bytes(&self) -> u64 {
        let folder = format!("/proc/{}", self.pid().as_raw_nonzero());
        let files = std::fs::read_dir(format!("{folder}/fd")).expect("it runs, and is ours");
        let names = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
        let socket = |name: PathBuf| Some(name.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned());
        let sockets: BTreeSet<String> = names.filter_map(socket).collect();
        let table = std::fs::read_to_string(format!("{folder}/net/tcp")).expect("it runs, and is ours");
        let unread = |line: &str| {
            // number, local, remote, state, send:receive queue, timer, retransmits, user, timeout, inode
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (sent, _) = fields.get(4)?.split_once(':')?;
            sockets.contains(*fields.get(9)?).then(|| u64::from_str_radix(sent, 16).ok())?
        };
        table.lines().skip(1).filter_map(unread).sum()
    }

    /// Kills it with SIGKILL and reaps it.
    ///
    /// # Panics
    /// If the system refuses.
    pub async fn kill(mut self) {
        self.child.kill().await.expect("a child can be killed");
    }
}
