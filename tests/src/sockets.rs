//! The TCP sockets of this host, as the kernel sees them: how much was sent and not taken, how much came and was not read.

use std::{collections::BTreeSet, fs, path::PathBuf};

/// A connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Socket {
    /// Its port at this end.
    pub port: u16,
    /// Bytes that were sent and not acknowledged by the other end.
    pub unacknowledged: u64,
    /// Bytes that came and were not read.
    pub unread: u64,
    inode: u64,
}

/// A listening socket's state, whose queues count connections.
const LISTEN: &str = "0A";

/// All IPv4 connections of the network that this process is in.
///
/// # Panics
/// If the kernel does not show them.
#[must_use]
pub fn all() -> Vec<Socket> {
    let table = fs::read_to_string("/proc/self/net/tcp").expect("the kernel shows its TCP sockets");
    let socket = |line: &str| {
        // number, local, remote, state, send:receive queue, timer, retransmits, user, timeout, inode
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (_, port) = fields.get(1)?.split_once(':')?;
        let (sent, came) = fields.get(4)?.split_once(':')?;
        (*fields.get(3)? != LISTEN).then_some(Socket {
            port: u16::from_str_radix(port, 16).ok()?,
            unacknowledged: u64::from_str_radix(sent, 16).ok()?,
            unread: u64::from_str_radix(came, 16).ok()?,
            inode: fields.get(9)?.parse().ok()?,
        })
    };
    table.lines().skip(1).filter_map(socket).collect()
}

/// The connections of one process.
///
/// # Panics
/// If it has ended, or is not ours.
#[must_use]
pub fn of(process: u32) -> Vec<Socket> {
    let files = fs::read_dir(format!("/proc/{process}/fd")).expect("it runs, and is ours");
    let names = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
    let inode = |name: PathBuf| name.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse::<u64>().ok();
    let own: BTreeSet<u64> = names.filter_map(inode).collect();
    all().into_iter().filter(|socket| own.contains(&socket.inode)).collect()
}
