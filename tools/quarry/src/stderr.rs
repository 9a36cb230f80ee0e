//! What a command or a daemon says beside its answer. Nobody may be there to hear it (a log collector that ended, a full disk): that
//! changes nothing else.

use std::{
    fmt,
    io::{self, Write as _},
};

/// Writes a line to standard error.
pub fn line(text: impl fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Standard error as a writer that takes everything and never fails.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stderr;

impl io::Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = io::stderr().lock().write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
