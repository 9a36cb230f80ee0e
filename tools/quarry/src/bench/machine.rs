//! What the figures were measured on.

use super::error::BenchError;
use quarry_fabric::{Provider, library_version};
use serde::Serialize;
use std::{fmt, fs, path::Path};

/// A machine and a build, as far as they decide the figures.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) processor: String,
    pub(crate) cores: usize,
    pub(crate) memory_gib: u64,
    pub(crate) kernel: String,
    /// Type of the file system that the meta nodes sync to.
    pub(crate) disk: String,
    pub(crate) libfabric: String,
    pub(crate) provider: String,
    /// How TCP paces itself, which software providers run over.
    pub(crate) congestion: String,
    /// `release` or `debug`.
    pub(crate) profile: &'static str,
    pub(crate) build: &'static str,
}

impl Machine {
    /// This machine; the clusters lie in `dir`.
    pub(crate) fn here(dir: &Path) -> Result<Self, BenchError> {
        let provider = Provider::detect().map_err(BenchError::Fabric)?;
        let (major, minor) = library_version();
        Ok(Self {
            processor: value_of("/proc/cpuinfo", "model name").unwrap_or_else(unknown),
            cores: std::thread::available_parallelism().map_err(BenchError::io("counting cores"))?.get(),
            memory_gib: memory_gib(),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
                .map_or_else(|_| unknown(), |it| it.trim().to_owned()),
            disk: file_system(dir)?,
            libfabric: format!("{major}.{minor}"),
            provider: provider.name().to_owned(),
            congestion: quarry::machine::congestion_control().unwrap_or_else(unknown),
            profile: if cfg!(debug_assertions) { "debug" } else { "release" },
            build: quarry::build::BUILD_ID,
        })
    }

    /// Whether figures of this build mean anything.
    pub(crate) fn is_meaningful(&self) -> bool {
        self.profile == "release"
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { processor, cores, memory_gib, kernel, disk, libfabric, provider, congestion, profile, build } = self;
        write!(
            f,
            "{cores} cores of {processor}, {memory_gib} GiB, Linux {kernel}, {disk}; libfabric {libfabric}, provider {provider}, TCP {congestion}; {profile} build {build}"
        )?;
        if self.is_meaningful() { Ok(()) } else { write!(f, "\nA DEBUG BUILD: THESE NUMBERS MEAN NOTHING") }
    }
}

fn unknown() -> String {
    "unknown".to_owned()
}

fn value_of(file: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(value.trim_start_matches([' ', '\t', ':']).trim().to_owned())
}

fn memory_gib() -> u64 {
    let kib: Option<u64> = value_of("/proc/meminfo", "MemTotal")
        .and_then(|value| value.strip_suffix(" kB").and_then(|number| number.trim().parse().ok()));
    kib.unwrap_or(0).div_ceil(1 << 20)
}

/// The type of the file system of `dir`, by the longest mount point above it.
pub(crate) fn file_system(dir: &Path) -> Result<String, BenchError> {
    let dir = dir.canonicalize().map_err(|source| BenchError::Folder { path: dir.to_owned(), source })?;
    let mounts = fs::read_to_string("/proc/self/mounts").map_err(BenchError::io("/proc/self/mounts"))?;
    let found = mounts.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let (_, point, kind) = (words.next()?, words.next()?, words.next()?);
        dir.starts_with(point).then_some((Path::new(point).components().count(), kind))
    });
    // The last of equals lies on top.
    Ok(found.max_by_key(|(depth, _)| *depth).map_or_else(unknown, |(_, kind)| kind.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_described() {
        let machine = Machine::here(&std::env::temp_dir()).unwrap();
        assert!(machine.cores > 0 && machine.memory_gib > 0, "{machine:?}");
        for known in [&machine.kernel, &machine.disk, &machine.libfabric, &machine.provider] {
            assert!(!known.is_empty() && known != "unknown", "{machine:?}");
        }
        assert_eq!(machine.is_meaningful(), !machine.to_string().contains("MEAN NOTHING"));
        assert_eq!(file_system(Path::new("/proc/self")).unwrap(), "proc");
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error() {
        assert!(matches!(file_system(Path::new("/no/such/folder")), Err(BenchError::Folder { .. })));
    }
}
