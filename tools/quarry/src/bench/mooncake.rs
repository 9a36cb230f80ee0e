//! Mooncake Store on this host, for comparison: its batched existence check, asked through its own Python client.
//!
//! A script of ours in a Python environment that has the package starts its servers and makes the calls; it times them itself, so that what lies
//! between it and us counts for nothing. It is a reference only where such an environment is named.

use super::{
    error::BenchError,
    measure::{Round, Side},
};
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

const SCRIPT: &str = include_str!("mooncake_existence.py");
/// How long its servers may take to start.
const READY: Duration = Duration::from_secs(60);
/// How long a round may take beyond its own time.
const GRACE: Duration = Duration::from_secs(20);

/// Its servers and its client, ended when this is dropped.
pub(super) struct Mooncake {
    /// Ends with its input.
    _child: Child,
    pipes: Pipes,
    version: String,
}

struct Pipes {
    ask: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Mooncake {
    /// Starts it with this interpreter; its logs go to `dir`.
    pub(super) async fn start(python: &Path, dir: &Path) -> Result<Self, BenchError> {
        let script: PathBuf = dir.join("mooncake_existence.py");
        std::fs::write(&script, SCRIPT).map_err(|source| BenchError::Folder { path: script.clone(), source })?;
        let mut command = std::process::Command::new(python);
        command.arg(&script).arg(dir).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        quarry_fabric::without_our_descriptors(&mut command);
        let named = python.display();
        let mut child = Command::from(command).spawn().map_err(BenchError::io(named.to_string()))?;
        let (ask, answers) = (child.stdin.take().expect("it is piped"), child.stdout.take().expect("it is piped"));
        let mut pipes = Pipes { ask, answers: BufReader::new(answers).lines() };
        let said = pipes.answer(READY).await?;
        let version = said.strip_prefix("ready ").ok_or_else(|| unexpected("ready and its version", &said))?.to_owned();
        Ok(Self { _child: child, pipes, version })
    }

    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// Its check of a hundred keys that exist.
    pub(super) fn existence(&mut self) -> Existence<'_> {
        Existence(&mut self.pipes)
    }
}

impl Pipes {
    async fn answer(&mut self, within: Duration) -> Result<String, BenchError> {
        let late =
            |_| BenchError::Mooncake { expected: format!("an answer within {within:?}"), found: "none".to_owned() };
        let line = timeout(within, self.answers.next_line()).await.map_err(late)?;
        line.map_err(BenchError::io("mooncake"))?.ok_or_else(|| unexpected("an answer", "its end"))
    }
}

fn unexpected(expected: &str, found: &str) -> BenchError {
    BenchError::Mooncake { expected: expected.to_owned(), found: found.to_owned() }
}

/// Rounds of existence checks.
pub(super) struct Existence<'a>(&'a mut Pipes);

impl Side for Existence<'_> {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        let ask = format!("{}\n", time.as_secs_f64());
        self.0.ask.write_all(ask.as_bytes()).await.map_err(BenchError::io("mooncake"))?;
        let said = self.0.answer(time + GRACE).await?;
        let mut round = Round::default();
        for word in said.split_whitespace() {
            let micros: f64 = word.parse().map_err(|_| unexpected("microseconds", word))?;
            round.add(1.0, Duration::from_secs_f64(micros / 1e6));
        }
        Ok(round)
    }
}
