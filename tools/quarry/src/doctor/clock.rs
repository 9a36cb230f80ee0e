//! Clocks: leases are counted on the boot-time clock, versions are made of the wall clock.

use super::finding::Finding;
use quarry_client::{Clock as _, SystemClock};
use std::{path::Path, process::Stdio, time::Duration};
use tokio::{process::Command, time::timeout};

pub(super) async fn check(patience: Duration, findings: &mut Vec<Finding>) {
    findings.push(boot());
    findings.push(synchronised(sources(patience).await));
}

fn boot() -> Finding {
    let (one, other) = (SystemClock.boot(), SystemClock.boot());
    if one > Duration::ZERO && other >= one {
        let up = Duration::from_secs(one.as_secs());
        return Finding::ok("clock", format!("boot-time clock at {}", humantime::format_duration(up)));
    }
    Finding::fail(
        "clock",
        format!("the boot-time clock went from {one:?} to {other:?}"),
        "use a kernel with CLOCK_BOOTTIME",
    )
}

/// What the time services of this machine say, the first that answers: its name and whether the clock is synchronised.
async fn sources(patience: Duration) -> Option<(&'static str, bool)> {
    if Path::new("/run/systemd/timesync/synchronized").exists() {
        return Some(("systemd-timesyncd", true));
    }
    if let Some(said) = said_by("timedatectl", &["show", "-p", "NTPSynchronized", "--value"], patience).await {
        match said.trim() {
            "yes" => return Some(("timedatectl", true)),
            "no" => return Some(("timedatectl", false)),
            _ => {}
        }
    }
    let said = said_by("chronyc", &["-n", "tracking"], patience).await?;
    Some(("chrony", leap_is_normal(&said)?))
}

/// What chrony's tracking says, if it says it.
fn leap_is_normal(tracking: &str) -> Option<bool> {
    let status = tracking.lines().find_map(|line| line.strip_prefix("Leap status"))?;
    Some(status.trim_start_matches([' ', ':']).trim() == "Normal")
}

/// The output of a command that is there and succeeds in time.
async fn said_by(command: &str, arguments: &[&str], patience: Duration) -> Option<String> {
    let mut command = Command::new(command);
    command.args(arguments).stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let output = timeout(patience, command.output()).await.ok()?.ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn synchronised(said: Option<(&'static str, bool)>) -> Finding {
    const CHECK: &str = "clock sync";
    let remedy =
        "run chrony or systemd-timesyncd: writers whose clocks are more than ten minutes ahead are turned away";
    match said {
        Some((source, true)) => Finding::ok(CHECK, format!("synchronised, says {source}")),
        Some((source, false)) => Finding::warn(CHECK, format!("not synchronised, says {source}"), remedy),
        None => Finding::warn(CHECK, "no time service tells (timesyncd, timedatectl, chrony)", remedy),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::finding::State, *};

    #[test]
    fn what_time_services_say_is_understood() {
        assert_eq!(leap_is_normal("Reference ID : 1\nLeap status     : Normal\n"), Some(true));
        assert_eq!(leap_is_normal("Leap status     : Not synchronised\n"), Some(false));
        assert_eq!(leap_is_normal("506 Cannot talk to daemon"), None);
        let states = [Some(("x", true)), Some(("x", false)), None].map(|said| synchronised(said).state);
        assert_eq!(states, [State::Ok, State::Warn, State::Warn]);
        assert_eq!(boot().state, State::Ok);
    }

    #[tokio::test]
    async fn a_command_that_is_not_there_or_fails_says_nothing() {
        let patience = Duration::from_secs(30);
        assert_eq!(said_by("/no/such/command", &[], patience).await, None);
        assert_eq!(said_by("false", &[], patience).await, None);
        assert_eq!(said_by("echo", &["yes"], patience).await.as_deref(), Some("yes\n"));
    }
}
