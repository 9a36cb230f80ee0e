//! What a command says on standard error while it works, if that is a terminal, and at its end, if asked with `-v`.

use crate::{cli::Watch, exit::Format};
use serde_json::json;
use std::{
    io::{self, IsTerminal as _, Write as _},
    time::Duration,
};
use tokio::time::Instant;

/// Work that is done sooner shows no progress.
const FIRST: Duration = Duration::from_millis(700);
const EVERY: Duration = Duration::from_millis(200);
/// To the start of the line, which is cleared.
const AFRESH: &str = "\r\u{1b}[K";

/// Counts what was moved.
pub(super) struct Progress {
    shows: bool,
    verbose: bool,
    format: Format,
    began: Instant,
    next: Instant,
    shown: bool,
    done: Done,
}

#[derive(Clone, Copy, Default)]
struct Done {
    keys: usize,
    of: usize,
    bytes: u64,
}

impl Progress {
    /// Work on `of` keys begins.
    pub(super) fn new(watch: &Watch, format: Format, of: usize) -> Self {
        let began = Instant::now();
        Self {
            shows: !watch.no_progress && format == Format::Text && io::stderr().is_terminal(),
            verbose: watch.verbose,
            format,
            began,
            next: began + FIRST,
            shown: false,
            done: Done { of, ..Done::default() },
        }
    }

    /// One more key is done, with so many bytes.
    pub(super) fn add(&mut self, bytes: u64) {
        self.done.keys += 1;
        self.done.bytes += bytes;
        let now = Instant::now();
        if self.shows && now >= self.next {
            self.shown = true;
            self.next = now + EVERY;
            // Progress that cannot be shown is not missed.
            let _ = write!(io::stderr().lock(), "{AFRESH}{}", self.done.sentence(self.began.elapsed()));
        }
    }

    /// The work is done.
    pub(super) fn end(self) {
        if self.shown {
            let _ = write!(io::stderr().lock(), "{AFRESH}");
        }
        let elapsed = self.began.elapsed();
        if self.verbose {
            let _ = match self.format {
                Format::Text => writeln!(io::stderr().lock(), "{}", self.done.sentence(elapsed)),
                Format::Json => writeln!(io::stderr().lock(), "{}", self.done.json(elapsed)),
            };
        }
    }
}

impl Done {
    fn rate(self, elapsed: Duration) -> f64 {
        self.bytes as f64 / elapsed.as_secs_f64().max(1e-9)
    }
    fn sentence(self, elapsed: Duration) -> String {
        let Self { keys, of, bytes } = self;
        let mib = f64::from(1 << 20);
        let (done, rate) = (bytes as f64 / mib, self.rate(elapsed) / mib);
        format!("{keys} of {of} keys, {done:.1} MiB in {:.2} s, {rate:.1} MiB/s", elapsed.as_secs_f64())
    }
    fn json(self, elapsed: Duration) -> serde_json::Value {
        let Self { keys, of, bytes } = self;
        let (seconds, rate) = (elapsed.as_secs_f64(), self.rate(elapsed));
        json!({ "summary": { "keys": keys, "of": of, "bytes": bytes, "seconds": seconds, "bytes_per_second": rate } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_tells_keys_bytes_and_rate() {
        let done = Done { keys: 3, of: 4, bytes: 3 << 20 };
        assert_eq!(done.sentence(Duration::from_secs(2)), "3 of 4 keys, 3.0 MiB in 2.00 s, 1.5 MiB/s");
        let json = done.json(Duration::from_secs(2));
        assert_eq!(json["summary"]["bytes_per_second"].as_f64(), Some(f64::from(3 << 19)));
        assert_eq!(done.json(Duration::ZERO)["summary"]["keys"], 3);
    }
}
