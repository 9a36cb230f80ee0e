//! Running other programs, and saying which of them failed.

use std::{io, process::Command};

/// Why a program did not do its part.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecuteError {
    #[error("{what} cannot be run: {source}; install it")]
    Missing { what: String, source: io::Error },
    #[error("{what} failed: {status}")]
    Failed { what: String, status: std::process::ExitStatus },
}

/// Runs a program to its end, with our input and output.
pub(crate) fn execute(what: &str, command: &mut Command) -> Result<(), ExecuteError> {
    let what = || what.to_owned();
    let status = command.status().map_err(|source| ExecuteError::Missing { what: what(), source })?;
    if status.success() { Ok(()) } else { Err(ExecuteError::Failed { what: what(), status }) }
}
