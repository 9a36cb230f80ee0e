//! What is measured beside the calls: the disk by itself, and what the processes used.

use crate::bench::{error::BenchError, measure::Round};
use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::Path,
    time::Duration,
};
use tokio::time::Instant;

/// Bytes of one append of the reference: what a log writes at least.
const APPEND_BYTES: usize = 4096;
/// The file begins anew after so many, so that it does not grow without bound.
const APPENDS_PER_FILE: usize = 4096;
/// Ticks per second of the times in `/proc`: fixed by the kernel's interface.
const TICKS: u32 = 100;

/// Appends to a file of `dir`, each on the medium before the next, for about `time`. Blocks.
pub(in crate::bench) fn appends(dir: &Path, time: Duration) -> Result<Round, BenchError> {
    let path = dir.join("appends");
    let wrong = |source| BenchError::Folder { path: path.clone(), source };
    let block = vec![0x5a; APPEND_BYTES];
    let (until, mut round) = (Instant::now() + time, Round::default());
    while round.latencies.is_empty() || Instant::now() < until {
        let mut file = File::create(&path).map_err(wrong)?;
        for _ in 0..APPENDS_PER_FILE {
            let began = Instant::now();
            file.write_all(&block).map_err(wrong)?;
            file.sync_data().map_err(wrong)?;
            round.add(1.0, began.elapsed());
            if Instant::now() >= until {
                break;
            }
        }
    }
    fs::remove_file(&path).map_err(wrong)?;
    Ok(round)
}

/// What some processes have used since they began.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::bench) struct Used {
    /// Time on a processor.
    pub(in crate::bench) cpu: Duration,
    /// Bytes handed to the disk.
    pub(in crate::bench) written: u64,
}

impl Used {
    /// What a process has used until now.
    pub(in crate::bench) fn by(pid: u32) -> Result<Self, BenchError> {
        let read = |name: &str| {
            let path = format!("/proc/{pid}/{name}");
            fs::read_to_string(&path).map_err(BenchError::io(path))
        };
        let (stat, bytes) = (read("stat")?, read("io")?);
        // Fields are counted from behind the name, which may hold anything: user and system time are the 14th and 15th of all.
        let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
        let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<u32>().ok());
        let bytes = bytes.lines().find_map(|line| line.strip_prefix("write_bytes: ")?.trim().parse().ok());
        match (ticks(11), ticks(12), bytes) {
            (Some(user), Some(system), Some(written)) => {
                Ok(Self { cpu: Duration::from_secs(1) * (user + system) / TICKS, written })
            }
            _ => {
                let why = io::Error::new(io::ErrorKind::InvalidData, "no times or no bytes in stat and io");
                Err(BenchError::io(format!("/proc/{pid}"))(why))
            }
        }
    }

    pub(in crate::bench) fn since(self, before: Self) -> Self {
        Self { cpu: self.cpu.saturating_sub(before.cpu), written: self.written.saturating_sub(before.written) }
    }

    pub(in crate::bench) fn and(self, other: Self) -> Self {
        Self { cpu: self.cpu + other.cpu, written: self.written + other.written }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_works_is_seen_to_use_time() {
        let before = Used::by(std::process::id()).unwrap();
        let mut used = Duration::ZERO;
        let mut sum = 0_u64;
        let deadline = Instant::now() + Duration::from_secs(20);
        while used.is_zero() {
            assert!(Instant::now() < deadline, "no time was counted");
            sum = (0..100_000).fold(sum, |sum, number| sum.wrapping_mul(31) ^ number);
            used = Used::by(std::process::id()).unwrap().since(before).cpu;
        }
        assert_ne!(sum, 0);
    }
}
