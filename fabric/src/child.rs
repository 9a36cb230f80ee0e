//! Starting other processes from one that has endpoints. libfabric opens its sockets without close-on-exec: a child would keep
//! the ports of closed endpoints bound and their connections up, so that peers wait for answers that nobody gives.

use std::{io, os::unix::process::CommandExt, process::Command};

/// First descriptor behind standard input, output and error.
const FIRST: u32 = 3;

/// Lets the child of `command` inherit nothing but its standard input, output and error. Use it for every child of a process
/// that may have an endpoint.
pub fn without_our_descriptors(command: &mut Command) -> &mut Command {
    let mark = || {
        let flags = i32::try_from(libc::CLOSE_RANGE_CLOEXEC).expect("a small flag");
        // SAFETY: a system call that touches no memory. Marking instead of closing spares the pipe by which the standard
        // library learns how exec went.
        match unsafe { libc::close_range(FIRST, u32::MAX, flags) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: the closure runs between fork and exec, where only async-signal-safe calls are allowed: it makes one system call
    // and allocates nothing.
    unsafe { command.pre_exec(mark) }
}
