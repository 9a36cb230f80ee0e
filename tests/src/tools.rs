//! The commands `quarry` and `raft-admin` of this build, as operators run them.

use crate::TestCluster;
use serde_json::Value;
use std::{process::Stdio, time::Duration};
use tokio::{process::Command, time::timeout};

/// Longest time of one command; those that wait are told to give up earlier.
const COMMAND_MAX: Duration = Duration::from_secs(90);

/// What a command did.
#[derive(Debug)]
pub struct Ran {
    /// Its exit code; none if a signal ended it.
    pub code: Option<i32>,
    /// What it wrote to standard output.
    pub text: String,
    /// What it wrote to standard error.
    pub said: String,
}

impl Ran {
    /// Whether it ended well.
    #[must_use]
    pub fn is_well(&self) -> bool {
        self.code == Some(0)
    }

    /// What it printed, read as JSON; nothing if it is none.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_default()
    }

    /// What it printed, read as JSON.
    ///
    /// # Panics
    /// If it did not end well, with what it said.
    pub fn done(self) -> Value {
        assert!(self.is_well(), "{self:?}");
        self.json()
    }

    /// What it said on standard error.
    ///
    /// # Panics
    /// If it ended well.
    pub fn refused(self) -> String {
        assert!(!self.is_well(), "{self:?}");
        self.said
    }
}

/// Runs `quarry` or `raft-admin` with these words.
///
/// # Panics
/// If it cannot be run, or does not end.
pub async fn run(tool: &str, words: &[&str]) -> Ran {
    let quarry = quarry::local::built_binary().unwrap_or_else(|wrong| panic!("{wrong}"));
    let mut command = Command::new(quarry.with_file_name(tool));
    command.args(words).stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(COMMAND_MAX, command.output()).await;
    let output = output.unwrap_or_else(|_| panic!("{tool} {words:?} does not end"));
    let output = output.unwrap_or_else(|wrong| panic!("{tool} {words:?}: {wrong}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ran { code: output.status.code(), text: text(&output.stdout), said: text(&output.stderr) }
}

impl TestCluster {
    /// Runs `raft-admin` with these words about this cluster; it answers with JSON.
    pub async fn raft_admin(&self, words: &[&str]) -> Ran {
        let file = self.cluster_file();
        let file = file.to_str().expect("the folder of a test has a name in UTF-8");
        let about = ["--cluster", file, "-o", "json"];
        let deadline = if words.contains(&"--timeout") { &[][..] } else { &["--timeout", "10s"] };
        run("raft-admin", &[words, &about, deadline].concat()).await
    }
}
