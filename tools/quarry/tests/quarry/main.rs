//! The command as its users run it: real processes, real clusters, exit codes.
#![expect(clippy::unwrap_used, reason = "a test fails where it expected something else")]

mod bench;
mod browser;
mod commands;
mod demo;
mod deploy;
mod doctor;
mod exits;
mod local;
mod page;
mod service;
mod values;

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

/// Longest wait for anything that should happen.
const DEADLINE: Duration = Duration::from_secs(120);

/// The command under test, without the environment of whoever runs the tests.
fn quarry() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quarry"));
    for name in ["QUARRY_CLUSTER", "QUARRY_NAMESPACE", "QUARRY_LOG", "QUARRY_LOG_FORMAT"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    command
}

/// Waits until `found` finds something.
async fn eventually<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let until = tokio::time::Instant::now() + DEADLINE;
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(tokio::time::Instant::now() < until, "gave up waiting for {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A `quarry up` that ends with its test.
struct Up {
    child: Child,
    dir: PathBuf,
    ready: PathBuf,
}

impl Up {
    /// One meta node and one data node in `dir/cluster`.
    fn start(dir: &Path) -> Self {
        let (ready, log, dir) = (dir.join("ready"), dir.join("up.log"), dir.join("cluster"));
        let log = fs::File::options().create(true).append(true).open(log).unwrap();
        let mut command = quarry();
        command.args(["up", "--metas", "1", "--data-nodes", "1", "--region", "16MiB"]);
        command.arg("--dir").arg(&dir).arg("--ready-file").arg(&ready);
        let child = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        Self { child, dir, ready }
    }

    /// The path of its cluster file, when it is ready.
    async fn ready(&mut self) -> PathBuf {
        let (child, ready) = (&mut self.child, &self.ready);
        let text = eventually("quarry up to be ready", || {
            let ended = child.try_wait().unwrap();
            assert!(ended.is_none(), "quarry up ended: {ended:?}");
            fs::read_to_string(ready).ok()
        });
        PathBuf::from(text.await.trim())
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Process ids of its members.
    fn pids(&self) -> Vec<u32> {
        ["meta-1", "data-101"].iter().map(|member| pid(&self.dir.join(member)).unwrap()).collect()
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _: io::Result<()> = self.child.kill();
        let _ = self.child.wait();
    }
}

fn pid(folder: &Path) -> Option<u32> {
    fs::read_to_string(folder.join("pid")).ok()?.trim().parse().ok()
}

/// Whether a process runs; one that ended and waits to be reaped does not.
fn runs(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    !state.is_empty() && !state.starts_with('Z')
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or(-1)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
