//! What a command answers.

use std::{
    fmt,
    io::{self, Write as _},
};

/// Writes a line to standard output. A reader that went away (`| head`) is no error: it has what it wanted.
///
/// # Errors
/// What the system says of any other failure.
pub fn line(text: impl fmt::Display) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(wrong) if wrong.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
