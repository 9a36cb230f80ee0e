//! A cluster of real processes on this host, in one folder.
//!
//! Makes keys, certificates and configurations, reserves ports, starts the processes, bootstraps, and takes processes down and up again. Used
//! by `quarry up`, by `quarry demo` and by the tests. Whatever it started has ended when it is dropped, unless the processes are detached.
//!
//! ```text
//! DIR/local.toml            what this folder is: members and their addresses
//! DIR/cluster.toml          for clients: uuid, root key, meta nodes
//! DIR/bootstrap.toml        for `raft-admin bootstrap`
//! DIR/root.key              the cluster's root; needed to certify further nodes and clients only
//! DIR/client.pem            credentials of a client that may write, read and administer
//! DIR/<member>/node.key     key and certificate for what it signs
//! DIR/<member>/tls.pem      credentials for its connections
//! DIR/<member>/config.toml  configuration
//! DIR/<member>/data/        what the process keeps
//! DIR/<member>/log          its output
//! DIR/<member>/pid          its process id, while it runs
//! ```

mod layout;
mod ports;
mod process;

pub use layout::{LocalError, LocalSpec, Member, built_binary};
pub use process::{PARENT_VARIABLE, die_with_parent};
use rustix::process::Pid;
pub use rustix::process::Signal;

use crate::{
    admin::{self, CallError, Traffic},
    exit::Code,
};
use layout::{Layout, check_binary};
use ports::Port;
use process::Process;
use quarry_proto::v1;
use quarry_trust::Trust;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    time::Duration,
};

/// How long one question to a process may take.
const ASK: Duration = Duration::from_secs(2);
/// How long a process may take to end after SIGTERM before it is killed: longer than it drains by itself.
const DRAIN: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(50);
/// Lines of a log that an error quotes.
const QUOTED_LINES: usize = 12;

/// What one process says about itself.
#[derive(Debug)]
pub enum Report {
    /// A meta node's answer.
    Meta(Result<Box<v1::StatusReply>, CallError>),
    /// A data node's answer.
    Data(Result<v1::NodeStatusReply, CallError>),
}

impl Report {
    /// `host:port` where the process shows its metrics, if it answered and shows any.
    #[must_use]
    pub fn admin_address(&self) -> Option<&str> {
        let address = match self {
            Self::Meta(answer) => &answer.as_ref().ok()?.admin_address,
            Self::Data(answer) => &answer.as_ref().ok()?.admin_address,
        };
        (!address.is_empty()).then_some(address)
    }
}

/// A cluster of processes in a folder.
#[derive(Debug)]
pub struct LocalCluster {
    layout: Layout,
    trust: Trust,
    spec: LocalSpec,
    running: BTreeMap<Member, Process>,
    /// Data nodes that have ended because the cluster has forgotten them.
    forgotten: BTreeSet<Member>,
    /// Keeps the ports ours, also while their processes are down.
    _ports: Vec<Port>,
}

impl LocalCluster {
    /// Makes a new cluster in `dir`, which must be absent or empty. Starts nothing.
    ///
    /// # Errors
    /// [`LocalError`], for example if the folder is in use or the binary is not of this build.
    pub fn create(dir: &Path, spec: LocalSpec) -> Result<Self, LocalError> {
        check_binary(&spec.binary)?;
        let mut ports = Vec::new();
        for _ in 0..spec.metas + spec.data_nodes {
            ports.push(Port::reserve().map_err(LocalError::Ports)?);
        }
        let addresses = ports.iter().map(Port::address).collect::<Vec<_>>();
        let layout = Layout::create(dir, &spec, &addresses)?;
        let trust = layout.trust()?;
        Ok(Self { layout, trust, spec, running: BTreeMap::new(), forgotten: BTreeSet::new(), _ports: ports })
    }

    /// The cluster that was made in `dir` before, on the same addresses, with new credentials for all connections. Starts nothing. What the folder says wins over `spec`, of which the
    /// binary, the environment and `detached` are used.
    ///
    /// # Errors
    /// [`LocalError`], for example if it is running.
    pub fn open(dir: &Path, spec: LocalSpec) -> Result<Self, LocalError> {
        check_binary(&spec.binary)?;
        let layout = Layout::open(dir)?;
        let ports = layout.members().map(|(_, address)| Port::reserve_exactly(address.port()));
        let ports = ports.collect::<Result<_, _>>().map_err(LocalError::Ports)?;
        layout.renew()?;
        let trust = layout.trust()?;
        Ok(Self { layout, trust, spec, running: BTreeMap::new(), forgotten: BTreeSet::new(), _ports: ports })
    }

    /// Whether a cluster was made in `dir`.
    #[must_use]
    pub fn exists(dir: &Path) -> bool {
        Layout::exists(dir)
    }

    /// Starts all processes that are not running, makes the cluster if it is new, and waits until every data node has registered and its memory
    /// is lent.
    ///
    /// # Errors
    /// [`LocalError`], with the end of a log if a process ended.
    pub async fn start(&mut self, deadline: Duration) -> Result<(), LocalError> {
        let until = tokio::time::Instant::now() + deadline;
        let mut started = Vec::new();
        for member in self.members() {
            if !self.running.contains_key(&member) {
                self.spawn(member)?;
                started.push(member);
            }
        }
        let (plan, trust) = (self.layout.plan()?, self.trust.clone());
        let mut making = std::pin::pin!(admin::bootstrap(&plan, &trust, left(until)));
        loop {
            self.all_alive()?;
            tokio::select! {
                made = &mut making => match made {
                    Ok(()) => break,
                    Err(wrong) if !wrong.is_passing() => return Err(LocalError::Bootstrap(wrong)),
                    Err(wrong) => {
                        return Err(LocalError::Deadline { missing: format!("the cluster is not made yet: {wrong}") });
                    }
                },
                () = tokio::time::sleep(POLL) => {}
            }
        }
        self.wait_ready(left(until)).await?;
        for member in started.into_iter().filter(|member| matches!(member, Member::Data(_))) {
            self.wait_registered(member, until).await?;
        }
        Ok(())
    }

    /// Waits until a data node says that all its memory is what the directory knows: one that was known before counts as alive there until it is
    /// back with other memory.
    async fn wait_registered(&mut self, member: Member, until: tokio::time::Instant) -> Result<(), LocalError> {
        let address = self.address(member);
        loop {
            self.all_alive()?;
            if self.forgotten.contains(&member) {
                return Ok(());
            }
            let replies = self.metas_status().await;
            let judge = admin::leader_of(&replies, admin::DIRECTORY);
            let of_judge = replies.iter().filter(|reply| judge.is_some_and(|judge| reply.node == judge.0));
            let mut nodes = of_judge.flat_map(|reply| &reply.data_nodes);
            let known = nodes.find(|node| node.node == member.node().0).map_or(&[][..], |node| &node.regions);
            let own = admin::node_status(&self.trust, &address, ASK).await.map(|reply| reply.regions);
            if own.is_ok_and(|own| !own.is_empty() && own.iter().all(|life| known.contains(life))) {
                return Ok(());
            }
            pause(until, &format!("{member} is not registered yet with the memory that it has now")).await?;
        }
    }

    /// Waits until every group has a leader that every running meta node knows, and every running data node is alive with free memory.
    ///
    /// # Errors
    /// [`LocalError::Deadline`] says what was missing; [`LocalError::Ended`] if a process ended.
    pub async fn wait_ready(&mut self, deadline: Duration) -> Result<(), LocalError> {
        let until = tokio::time::Instant::now() + deadline;
        loop {
            self.all_alive()?;
            let replies = self.metas_status().await;
            let Some(missing) = self.missing(&replies) else { return Ok(()) };
            pause(until, &missing).await?;
        }
    }

    /// What is missing to a ready cluster, as a sentence; none if nothing is.
    fn missing(&self, replies: &[v1::StatusReply]) -> Option<String> {
        for member in self.running.keys().filter(|member| matches!(member, Member::Meta(_))) {
            let Some(reply) = replies.iter().find(|reply| reply.node == member.node().0) else {
                return Some(format!("{member} does not answer"));
            };
            if reply.groups.iter().any(|group| group.leader == 0) {
                return Some(format!("{member} knows no leader of a group"));
            }
        }
        let groups: BTreeSet<u32> = replies.iter().flat_map(|reply| reply.groups.iter().map(|it| it.group)).collect();
        for group in groups.iter().copied() {
            if admin::leader_of(replies, group).is_none() {
                return Some(format!("group {group} has no leader"));
            }
        }
        let judge = admin::leader_of(replies, admin::DIRECTORY)?;
        for member in self.running.keys().filter(|member| matches!(member, Member::Data(_))) {
            let of_judge = replies.iter().filter(|reply| reply.node == judge.0);
            let mut nodes = of_judge.flat_map(|reply| &reply.data_nodes);
            if !nodes.any(|node| node.node == member.node().0 && node.alive) {
                return Some(format!("{member} has not registered"));
            }
            // Free in a shard, or with the directory, to be lent. A lone shard is lent everything at once, as its leader sees it.
            let lone = groups.len() == 2;
            let tells = if lone { admin::leader_of(replies, admin::FIRST_SHARD)? } else { judge };
            let rows = replies.iter().filter(|reply| reply.node == tells.0).flat_map(|reply| &reply.space);
            let is_free = |space: &v1::SpaceStatus| {
                space.region.is_some_and(|region| region.node == member.node().0)
                    && space.free_bytes > 0
                    && (!lone || space.shard == admin::FIRST_SHARD)
            };
            if !rows.into_iter().any(is_free) {
                return Some(format!("{member} has no free memory"));
            }
        }
        None
    }

    /// Makes one more meta node and starts it: it waits, with an empty folder, to be added to the cluster. Answers who it is and where it listens.
    ///
    /// # Errors
    /// [`LocalError`].
    pub fn add_meta(&mut self) -> Result<(Member, SocketAddr), LocalError> {
        let port = Port::reserve().map_err(LocalError::Ports)?;
        let address = port.address();
        let member = self.layout.add_meta(address, &self.spec)?;
        self._ports.push(port);
        self.spawn(member)?;
        Ok((member, address))
    }

    /// The leader of `group`, waited for.
    ///
    /// # Errors
    /// [`LocalError::Deadline`].
    pub async fn leader(&self, group: u32, deadline: Duration) -> Result<Member, LocalError> {
        let until = tokio::time::Instant::now() + deadline;
        loop {
            let replies = self.metas_status().await;
            if let Some(node) = admin::leader_of(&replies, group) {
                return Ok(Member::Meta(node.0));
            }
            pause(until, &format!("group {group} has no leader")).await?;
        }
    }

    /// Sends `signal` to a member. After one that ends it, the end is waited for and the process reaped.
    ///
    /// # Errors
    /// [`LocalError::NotRunning`], or [`LocalError::Deadline`] if it lives on after SIGKILL or SIGTERM.
    pub async fn kill(&mut self, member: Member, signal: Signal) -> Result<Option<ExitStatus>, LocalError> {
        let process = self.running.get_mut(&member).ok_or(LocalError::NotRunning { member })?;
        let io = |source| LocalError::Process { member, source };
        process.signal(signal).map_err(io)?;
        if signal != Signal::KILL && signal != Signal::TERM {
            return Ok(None);
        }
        let Some(status) = process.wait(DRAIN).await.map_err(io)? else {
            return Err(LocalError::Deadline { missing: format!("{member} did not end after {signal:?}") });
        };
        self.forget(member);
        Ok(Some(status))
    }

    /// Stops a member as it stands (SIGSTOP): it keeps its connections and, once this returns, answers nothing.
    ///
    /// # Errors
    /// [`LocalError::NotRunning`], or [`LocalError::Deadline`] if it does not stop.
    pub async fn pause(&mut self, member: Member) -> Result<(), LocalError> {
        self.kill(member, Signal::STOP).await?;
        let until = tokio::time::Instant::now() + DRAIN;
        let process = self.running.get(&member).ok_or(LocalError::NotRunning { member })?;
        while !process.is_stopped().map_err(|source| LocalError::Process { member, source })? {
            pause(until, &format!("{member} did not stop")).await?;
        }
        Ok(())
    }

    /// Lets a paused member go on.
    ///
    /// # Errors
    /// [`LocalError::NotRunning`].
    pub async fn resume(&mut self, member: Member) -> Result<(), LocalError> {
        self.kill(member, Signal::CONT).await.map(|_| ())
    }

    /// Starts a member again, with the same keys, folder and address; kills it first if it runs.
    ///
    /// # Errors
    /// [`LocalError::Process`].
    pub fn restart(&mut self, member: Member) -> Result<(), LocalError> {
        if let Some(mut process) = self.running.remove(&member) {
            process.kill().map_err(|source| LocalError::Process { member, source })?;
        }
        self.spawn(member)
    }

    /// Ends all processes in order: data nodes first, so that they finish their commits while the meta nodes still answer. One that does not end
    /// in time is killed.
    ///
    /// # Errors
    /// [`LocalError::Killed`] names those that had to be killed; all have ended in any case.
    pub async fn stop(&mut self) -> Result<(), LocalError> {
        let mut killed = Vec::new();
        for data in [true, false] {
            let these: Vec<Member> =
                self.running.keys().copied().filter(|member| matches!(member, Member::Data(_)) == data).collect();
            for member in &these {
                if let Some(process) = self.running.get(member) {
                    // A paused process would not see SIGTERM.
                    for signal in [Signal::TERM, Signal::CONT] {
                        process.signal(signal).map_err(|source| LocalError::Process { member: *member, source })?;
                    }
                }
            }
            for member in these {
                let Some(process) = self.running.get_mut(&member) else { continue };
                let ended = process.wait(DRAIN).await.map_err(|source| LocalError::Process { member, source })?;
                if ended.is_none() {
                    killed.push(member);
                }
                self.forget(member);
            }
        }
        if killed.is_empty() { Ok(()) } else { Err(LocalError::Killed { members: killed }) }
    }

    /// Lets the processes live on when this is dropped. They must have been started detached, else they end with this process all the same.
    pub fn leave_running(mut self) {
        for process in std::mem::take(&mut self.running).into_values() {
            std::mem::forget(process);
        }
    }

    /// What every member says about itself; members that are down are asked too.
    pub async fn status(&self) -> BTreeMap<Member, Report> {
        let mut asked = Vec::new();
        for (member, address) in self.layout.members() {
            let (trust, address) = (self.trust.clone(), address.to_string());
            asked.push(tokio::spawn(async move {
                let report = match member {
                    Member::Meta(_) => Report::Meta(admin::status(&trust, &address, ASK).await.map(Box::new)),
                    Member::Data(_) => Report::Data(admin::node_status(&trust, &address, ASK).await),
                };
                (member, report)
            }));
        }
        let mut reports = BTreeMap::new();
        for task in asked {
            let (member, report) = task.await.expect("asking for a status does not panic");
            reports.insert(member, report);
        }
        reports
    }

    /// Calls and bytes that the servers counted, summed over all that run.
    ///
    /// # Errors
    /// [`LocalError::Call`] if one that runs does not answer: a sum without it would be wrong.
    pub async fn traffic(&self) -> Result<Traffic, LocalError> {
        let mut traffic = Traffic::default();
        for (member, report) in self.status().await {
            if !self.running.contains_key(&member) {
                continue;
            }
            let counters = match report {
                Report::Meta(answer) => answer.map(|reply| reply.counters),
                Report::Data(answer) => answer.map(|reply| reply.counters),
            };
            traffic.add(&counters.map_err(|source| LocalError::Call { member, source })?);
        }
        Ok(traffic)
    }

    /// All members, meta nodes first.
    #[must_use]
    pub fn members(&self) -> Vec<Member> {
        self.layout.members().map(|(member, _)| member).collect()
    }
    /// The meta nodes.
    #[must_use]
    pub fn metas(&self) -> Vec<Member> {
        self.members().into_iter().filter(|member| matches!(member, Member::Meta(_))).collect()
    }
    /// The data nodes.
    #[must_use]
    pub fn data_nodes(&self) -> Vec<Member> {
        self.members().into_iter().filter(|member| matches!(member, Member::Data(_))).collect()
    }
    /// Whether a member runs.
    #[must_use]
    pub fn is_running(&self, member: Member) -> bool {
        self.running.contains_key(&member)
    }
    /// A member's process id, if it runs.
    #[must_use]
    pub fn pid(&self, member: Member) -> Option<u32> {
        let pid = self.running.get(&member)?.pid().as_raw_nonzero().get();
        Some(u32::try_from(pid).expect("a process id is positive"))
    }
    /// host:port of a member's gRPC server.
    ///
    /// # Panics
    /// If there is no such member.
    #[must_use]
    pub fn address(&self, member: Member) -> String {
        let found = self.layout.members().find(|(it, _)| *it == member);
        found.expect("the member is one of this cluster").1.to_string()
    }
    /// The file that clients connect by.
    #[must_use]
    pub fn cluster_file(&self) -> PathBuf {
        self.layout.cluster_file()
    }
    /// The folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.layout.dir()
    }
    /// How a client of this cluster that may do everything proves who it is.
    #[must_use]
    pub const fn trust(&self) -> &Trust {
        &self.trust
    }
    /// A member's folder.
    #[must_use]
    pub fn member_dir(&self, member: Member) -> PathBuf {
        self.layout.member_dir(member)
    }
    /// The file with a member's output.
    #[must_use]
    pub fn log_file(&self, member: Member) -> PathBuf {
        self.layout.member_dir(member).join("log")
    }

    async fn metas_status(&self) -> Vec<v1::StatusReply> {
        let addresses: Vec<String> = self
            .layout
            .members()
            .filter(|(it, _)| self.running.contains_key(it) && matches!(it, Member::Meta(_)))
            .map(|(_, address)| address.to_string())
            .collect();
        admin::status_all(&self.trust, &addresses, ASK).await.into_iter().filter_map(Result::ok).collect()
    }

    fn spawn(&mut self, member: Member) -> Result<(), LocalError> {
        let folder = self.layout.member_dir(member);
        let mut command = Command::new(&self.spec.binary);
        command.arg(match member {
            Member::Meta(_) => "meta",
            Member::Data(_) => "datanode",
        });
        command.arg("--config").arg(folder.join("config.toml"));
        command.envs(self.spec.environment.iter().map(|(name, value)| (name, value)));
        let io = |source| LocalError::Process { member, source };
        let process = Process::start(command, &folder.join("log"), self.spec.detached).map_err(io)?;
        fs::write(folder.join("pid"), format!("{}\n", process.pid().as_raw_nonzero())).map_err(io)?;
        self.running.insert(member, process);
        Ok(())
    }

    /// Processes that ended by themselves since this was last asked.
    ///
    /// # Errors
    /// [`LocalError::Process`] if the system does not say.
    pub fn ended(&mut self) -> Result<Vec<(Member, ExitStatus)>, LocalError> {
        let mut ended = Vec::new();
        for (member, process) in &mut self.running {
            let status = process.ended().map_err(|source| LocalError::Process { member: *member, source })?;
            ended.extend(status.map(|status| (*member, status)));
        }
        for (member, _) in &ended {
            self.forget(*member);
        }
        Ok(ended)
    }

    /// An error if a process that should run has ended by itself. A data node that the cluster has forgotten should not.
    fn all_alive(&mut self) -> Result<(), LocalError> {
        for (member, status) in self.ended()? {
            let is_forgotten = matches!(member, Member::Data(_)) && status.code() == Some(Code::Conflict as i32);
            if !is_forgotten {
                return Err(LocalError::Ended { member, status, log: tail(&self.log_file(member)) });
            }
            self.forgotten.insert(member);
        }
        Ok(())
    }

    /// Data nodes that have ended because the cluster has forgotten them.
    #[must_use]
    pub const fn forgotten(&self) -> &BTreeSet<Member> {
        &self.forgotten
    }

    /// Drops the process, which ends and reaps it if it lives.
    fn forget(&mut self, member: Member) {
        if let Some(process) = self.running.remove(&member) {
            remove_pid(&self.layout.member_dir(member), process.pid());
        }
    }
}

impl Drop for LocalCluster {
    fn drop(&mut self) {
        // Kill all before waiting for any, so that none sees the others go.
        for process in self.running.values() {
            let _ = process.signal(Signal::KILL);
        }
        for (member, process) in std::mem::take(&mut self.running) {
            remove_pid(&self.layout.member_dir(member), process.pid());
        }
    }
}

/// Removes the file with this process id. One that names another process is that one's: somebody started the member by hand.
fn remove_pid(folder: &Path, pid: Pid) {
    let file = folder.join("pid");
    let held = fs::read_to_string(&file).unwrap_or_default();
    if held.trim() == pid.as_raw_nonzero().to_string() {
        // The folder may be gone already; nothing depends on the file.
        let _: io::Result<()> = fs::remove_file(file);
    }
}

fn left(until: tokio::time::Instant) -> Duration {
    until.saturating_duration_since(tokio::time::Instant::now())
}

async fn pause(until: tokio::time::Instant, missing: &str) -> Result<(), LocalError> {
    if left(until).is_zero() {
        return Err(LocalError::Deadline { missing: missing.to_owned() });
    }
    tokio::time::sleep(POLL).await;
    Ok(())
}

fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(QUOTED_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_file_that_names_another_process_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, other) = (Pid::from_raw(41).unwrap(), Pid::from_raw(42).unwrap());
        fs::write(dir.path().join("pid"), "42\n").unwrap();
        remove_pid(dir.path(), ours);
        assert_eq!(fs::read_to_string(dir.path().join("pid")).unwrap(), "42\n");
        remove_pid(dir.path(), other);
        assert!(!dir.path().join("pid").exists());
        remove_pid(dir.path(), other);
    }
}
