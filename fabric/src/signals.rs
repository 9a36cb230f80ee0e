//! Signals belong to the program, not to its libraries.
//!
//! On Debian libfabric pulls in libinfinipath (a provider for old cards), whose constructor takes SIGTERM, SIGINT, SIGSEGV and others
//! before `main`: its handler prints a backtrace and ends the process, so nothing drains. Runtimes that install handlers of their own
//! often call the one that they found, so the library's must go first.

use std::ffi::CStr;

/// What the library takes.
const TAKEN: [libc::c_int; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGABRT, libc::SIGINT, libc::SIGTERM];
/// Part of the file name of the library that takes signals.
const TAKER: &[u8] = b"libinfinipath";

/// Gives the signals that libinfinipath took when it was loaded back to the system's default, and answers how many there were. Handlers
/// of others are left alone. Programs that use the fabric call it first in `main`; [`crate::Provider`] calls it too, which comes too late for
/// a runtime that has chained the handler by then.
pub fn reclaim_signals() -> usize {
    TAKEN.into_iter().filter(|signal| is_taken(*signal) && reset(*signal)).count()
}

fn is_taken(signal: libc::c_int) -> bool {
    let mut found = empty_action();
    // SAFETY: `found` is a whole sigaction on our stack that the call may write; no new action is given.
    if unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut found) } != 0 {
        return false;
    }
    let handler = found.sa_sigaction;
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        return false;
    }
    let mut home = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: dladdr only looks the address up; `home` is a whole Dl_info on our stack.
    let known = unsafe { libc::dladdr(handler as *const libc::c_void, &raw mut home) };
    if known == 0 || home.dli_fname.is_null() {
        return false;
    }
    // SAFETY: the dynamic linker keeps the name of a loaded object as a C string for as long as it is loaded.
    let file = unsafe { CStr::from_ptr(home.dli_fname) };
    file.to_bytes().windows(TAKER.len()).any(|part| part == TAKER)
}

fn reset(signal: libc::c_int) -> bool {
    let default = empty_action();
    // SAFETY: `default` is a whole sigaction that asks for SIG_DFL; the old one is not asked for.
    unsafe { libc::sigaction(signal, &raw const default, std::ptr::null_mut()) == 0 }
}

/// The default action with no flags and an empty mask.
fn empty_action() -> libc::sigaction {
    // SAFETY: all zeros are a valid sigaction: SIG_DFL, no flags, an empty mask, no restorer.
    unsafe { std::mem::zeroed() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_library_holds_a_signal_once_they_are_reclaimed() {
        reclaim_signals();
        assert!(TAKEN.into_iter().all(|signal| !is_taken(signal)));
        assert_eq!(reclaim_signals(), 0);
    }
}
