//! Servers of others, started for comparison: on loopback, ended when they are dropped and whenever this process ends.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    process::{Child, Command, ExitStatus, Stdio},
};

/// A server that is not ours.
#[derive(Debug)]
pub(super) struct Served(Child);

impl Served {
    /// Starts `program`; what it says goes to `output`.
    pub(super) fn start<'a>(
        program: &str,
        arguments: impl IntoIterator<Item = &'a str>,
        output: Stdio,
    ) -> io::Result<Self> {
        // It is not ours to make it end with its parent, so setpriv does.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", program]).args(arguments).stdin(Stdio::null()).stdout(output);
        quarry_fabric::without_our_descriptors(&mut command);
        command.spawn().map(Self)
    }

    pub(super) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// How it ended, if it did.
    pub(super) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.0.try_wait()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // It may have ended already.
        let _: io::Result<()> = self.0.kill();
        let _ = self.0.wait();
    }
}

/// So many loopback ports that were free a moment ago, for servers that take no port 0.
pub(super) fn free_ports(count: usize) -> io::Result<Vec<SocketAddr>> {
    let held: Vec<TcpListener> =
        (0..count).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect::<io::Result<_>>()?;
    held.iter().map(TcpListener::local_addr).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn ports_that_are_found_together_differ() {
        let ports: BTreeSet<SocketAddr> = free_ports(16).unwrap().into_iter().collect();
        assert_eq!(ports.len(), 16);
    }

    #[test]
    fn a_server_ends_when_it_is_dropped() {
        let mut served = Served::start("sleep", ["1000"], Stdio::null()).unwrap();
        assert!(served.ended().unwrap().is_none());
        let pid = served.pid();
        drop(served);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}
