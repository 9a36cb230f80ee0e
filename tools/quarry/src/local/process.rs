//! Child processes: started so that they die with us, signalled, waited for with a deadline, reaped.

use rustix::process::{Pid, Signal};
use std::{
    fs::{self, File},
    io,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{OnceLock, mpsc},
    time::Duration,
};

/// Names the process whose child this is. A daemon that finds it set asks the system to be killed when that process ends.
pub const PARENT_VARIABLE: &str = "QUARRY_PARENT";
const POLL: Duration = Duration::from_millis(10);

/// A running child.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    pid: Pid,
}

impl Process {
    /// Starts `command` in a process group of its own, so that a Ctrl-C at our terminal reaches us alone, with its output appended to `log`.
    /// A child that is not `detached` dies with us.
    pub(crate) fn start(mut command: Command, log: &Path, detached: bool) -> io::Result<Self> {
        let out = File::options().create(true).append(true).open(log)?;
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out).process_group(0);
        if detached {
            command.env_remove(PARENT_VARIABLE);
        } else {
            command.env(PARENT_VARIABLE, std::process::id().to_string());
        }
        // A test or the demo may have endpoints, whose ports a child would keep.
        quarry_fabric::without_our_descriptors(&mut command);
        let child = spawn(command)?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        Ok(Self { child, pid: pid.expect("a process id is a positive i32") })
    }

    pub(crate) const fn pid(&self) -> Pid {
        self.pid
    }

    /// Sends a signal. Not an error if the process has ended: the child is not reaped yet, so its id is still its own.
    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        match rustix::process::kill_process(self.pid, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits for its end; none if it lives on after `deadline`.
    pub(crate) async fn wait(&mut self, deadline: Duration) -> io::Result<Option<ExitStatus>> {
        let until = tokio::time::Instant::now() + deadline;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            if tokio::time::Instant::now() >= until {
                return Ok(None);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Whether every one of its threads is stopped. A signal that stops takes effect on each thread when that one gets to it.
    pub(crate) fn is_stopped(&self) -> io::Result<bool> {
        for thread in fs::read_dir(format!("/proc/{}/task", self.pid().as_raw_nonzero()))? {
            // pid (name) state ...; the name may hold anything, parentheses too.
            let stat = fs::read_to_string(thread?.path().join("stat"))?;
            if stat.rsplit_once(") ").is_none_or(|(_, rest)| !rest.starts_with('T')) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Ends it at once and reaps it.
    pub(crate) fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Killing fails only if it has ended, and waiting then returns at once.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a child from a thread that lives as long as this process: the system's parent-death signal is about the thread that started the
/// child, and threads of a runtime come and go.
fn spawn(command: Command) -> io::Result<Child> {
    type Order = (Command, mpsc::Sender<io::Result<Child>>);
    static SPAWNER: OnceLock<mpsc::Sender<Order>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (orders, inbox) = mpsc::channel::<Order>();
        std::thread::spawn(move || {
            for (mut command, reply) in inbox {
                // Nobody waits for the reply only if the asker panicked; the child is then dropped and dies with us.
                let _ = reply.send(command.spawn());
            }
        });
        orders
    });
    let (reply, answer) = mpsc::channel();
    let gone = || io::Error::other("the thread that starts processes has ended");
    spawner.send((command, reply)).map_err(|_| gone())?;
    answer.recv().map_err(|_| gone())?
}

/// To be called by a daemon first: if it was started as somebody's child, it asks to be killed when that process ends.
///
/// # Errors
/// If the parent has ended already, or the system refuses.
pub fn die_with_parent() -> io::Result<()> {
    let Ok(parent) = std::env::var(PARENT_VARIABLE) else { return Ok(()) };
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // The parent may have ended before the request took effect.
    let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().to_string());
    if now.as_deref() == Some(parent.as_str()) {
        Ok(())
    } else {
        Err(io::Error::other(format!("{PARENT_VARIABLE} is {parent}, but that process is not the parent of this one")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt as _;

    fn sleeper(log: &Path) -> Process {
        let mut command = Command::new("sleep");
        command.arg("600");
        Process::start(command, log, false).unwrap()
    }

    #[tokio::test]
    async fn a_dropped_process_is_gone_and_reaped() {
        let dir = tempfile::tempdir().unwrap();
        let process = sleeper(&dir.path().join("log"));
        let pid = process.pid();
        drop(process);
        assert_eq!(rustix::process::test_kill_process(pid), Err(rustix::io::Errno::SRCH));
    }

    #[tokio::test]
    async fn a_stopped_process_lives_and_a_killed_one_says_by_which_signal_it_ended() {
        let dir = tempfile::tempdir().unwrap();
        let mut process = sleeper(&dir.path().join("log"));
        process.signal(Signal::STOP).unwrap();
        assert_eq!(process.wait(Duration::from_millis(30)).await.unwrap(), None);
        process.signal(Signal::KILL).unwrap();
        let status = process.wait(Duration::from_secs(10)).await.unwrap().unwrap();
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));
        process.signal(Signal::TERM).unwrap();
    }
}
