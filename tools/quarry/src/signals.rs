//! Signals belong to this program.
//!
//! libfabric pulls in libinfinipath (one of its providers for old cards), which takes SIGTERM, SIGINT, SIGSEGV and others when it is loaded,
//! before `main`: its handler prints a backtrace and ends the process, so that nothing drains. It does not if it finds a variable in the
//! environment, which must be there before the process begins.

use std::{env, io, os::unix::process::CommandExt as _, process::Command};

/// What libinfinipath looks for.
const LEAVE_SIGNALS: &str = "IPATH_NO_BACKTRACE";

/// Makes sure that no library holds our signals, by executing this program anew (same process, same arguments) if need be. To be called
/// first: nothing that was done before survives.
///
/// # Errors
/// If the program cannot be executed again; returns in no other case without the variable being set.
pub fn keep() -> io::Result<()> {
    if env::var_os(LEAVE_SIGNALS).is_some() {
        return Ok(());
    }
    let mut arguments = env::args_os();
    let mut again = Command::new(env::current_exe()?);
    if let Some(name) = arguments.next() {
        again.arg0(name);
    }
    // Returns only if it failed.
    Err(again.args(arguments).env(LEAVE_SIGNALS, "1").exec())
}
