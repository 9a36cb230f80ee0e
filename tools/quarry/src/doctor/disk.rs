//! The folder that a node keeps its data in: room, kind of file system, and what a sync costs.

use super::{
    finding::Finding,
    machine::{file_system, size},
};
use quarry::identity::random;
use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::time::Instant;

/// The log of the control plane, its snapshots, and room to write the next ones aside.
const FREE_WANTED: u64 = 4 << 30;
const FREE_LEAST: u64 = 256 << 20;
/// Each grant and commit waits for a sync on most meta nodes.
const SYNC_SLOW: Duration = Duration::from_millis(10);
const SYNCS: usize = 15;

pub(super) fn check(dir: &Path, findings: &mut Vec<Finding>) {
    match rustix::fs::statvfs(dir) {
        Ok(about) => findings.push(free(about.f_bavail.saturating_mul(about.f_frsize), dir)),
        Err(wrong) => {
            let found = format!("{}: {}", dir.display(), io::Error::from(wrong));
            findings.push(Finding::fail("disk space", found, "make the folder, or name another with --data-dir"));
            return;
        }
    }
    findings.push(kind(file_system(dir).as_deref()));
    findings.push(match syncs(dir) {
        Ok(times) => sync(&times),
        Err(wrong) => {
            let found = format!("cannot write and sync a file in {}: {wrong}", dir.display());
            Finding::fail("disk sync", found, "let the user that runs the node write there, or name another folder")
        }
    });
}

fn free(bytes: u64, dir: &Path) -> Finding {
    const CHECK: &str = "disk space";
    let found = format!("{} free in {}", size(bytes), dir.display());
    match bytes {
        FREE_WANTED.. => Finding::ok(CHECK, found),
        FREE_LEAST.. => Finding::warn(CHECK, found, format!("free {} for logs and snapshots", size(FREE_WANTED))),
        _ => Finding::fail(CHECK, found, format!("free at least {}", size(FREE_LEAST))),
    }
}

fn kind(name: Option<&str>) -> Finding {
    const CHECK: &str = "file system";
    match name {
        Some(it @ ("tmpfs" | "ramfs")) => {
            let remedy = "use a folder on a disk: what a meta node acknowledged must survive a power cut";
            Finding::warn(CHECK, format!("{it} lives in memory"), remedy)
        }
        Some(it @ ("overlay" | "aufs")) => {
            let remedy = "mount a volume there: the layer goes with its container, and copies files up when they are first written";
            Finding::warn(CHECK, format!("{it} is a container's layer"), remedy)
        }
        Some(it @ ("nfs" | "nfs4" | "cifs" | "smb3" | "9p" | "fuse.sshfs")) => {
            let remedy = "use a local disk: syncs over a network are slow, and a lost server stops the node";
            Finding::warn(CHECK, format!("{it} is remote"), remedy)
        }
        Some(it) => Finding::ok(CHECK, it),
        None => Finding::warn(CHECK, "unknown", "mount /proc, which tells it"),
    }
}

fn sync(times: &[Duration]) -> Finding {
    const CHECK: &str = "disk sync";
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let median = sorted.get(sorted.len() / 2).copied().unwrap_or_default();
    let longest = sorted.last().copied().unwrap_or_default();
    let found = format!("4 KiB by write and fdatasync: median {median:.2?}, longest {longest:.2?}");
    if median <= SYNC_SLOW {
        return Finding::ok(CHECK, found);
    }
    let remedy = "keep meta nodes on an SSD that nothing else fills: every grant and commit waits for a sync";
    Finding::warn(CHECK, found, remedy)
}

/// How long writing and syncing a block took, each time.
fn syncs(dir: &Path) -> io::Result<Vec<Duration>> {
    let name = random::<8>().map_err(io::Error::other)?;
    let aside = Aside(dir.join(format!(".quarry-doctor-{}", hex::encode(name))));
    let mut file = File::options().write(true).create_new(true).open(&aside.0)?;
    let block = [7; 4096];
    let mut times = Vec::with_capacity(SYNCS);
    for _ in 0..SYNCS {
        let began = Instant::now();
        file.write_all(&block)?;
        file.sync_data()?;
        times.push(began.elapsed());
    }
    Ok(times)
}

/// A file that goes with the check.
struct Aside(PathBuf);

impl Drop for Aside {
    fn drop(&mut self) {
        // It may never have been made.
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::finding::State, *};

    #[test]
    fn a_folder_is_tried_and_left_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let mut findings = Vec::new();
        check(dir.path(), &mut findings);
        assert_eq!(findings.len(), 3);
        assert!(findings[2].found.contains("fdatasync"), "{findings:?}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        findings.clear();
        check(&dir.path().join("none"), &mut findings);
        assert!(findings.len() == 1 && findings[0].state == State::Fail, "{findings:?}");
    }

    #[test]
    fn memory_container_layers_and_slow_disks_are_warned_of() {
        let states = ["ext4", "tmpfs", "overlay", "nfs4"].map(|name| kind(Some(name)).state);
        assert_eq!(states, [State::Ok, State::Warn, State::Warn, State::Warn]);
        let ms = Duration::from_millis;
        assert_eq!(sync(&[ms(1), ms(90), ms(2)]).state, State::Ok, "the median counts");
        assert_eq!(sync(&[ms(30), ms(20), ms(1)]).state, State::Warn);
        let states = [1 << 20, 1 << 30, 1 << 40].map(|bytes| free(bytes, Path::new("/d")).state);
        assert_eq!(states, [State::Fail, State::Warn, State::Ok]);
    }
}
