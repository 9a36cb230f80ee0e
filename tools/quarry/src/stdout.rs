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
    wanted(writeln!(out, "{text}").and_then(|()| out.flush()))
}

/// Writes bytes to standard output as they are; a reader that went away is no error here either.
///
/// # Errors
/// What the system says of any other failure.
pub fn bytes(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    wanted(out.write_all(bytes).and_then(|()| out.flush()))
}

/// Writes part of a longer answer: `false` says that the reader went away and wants no more.
///
/// # Errors
/// What the system says of any other failure.
pub fn part(bytes: &[u8]) -> io::Result<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(wrong) if wrong.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(wrong) => Err(wrong),
    }
}

fn wanted(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(wrong) if wrong.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
