//! `cargo xtask libfabric`: do the tests of the fabric and of whole clusters pass on another libfabric than the one that we build with?
//!
//! Fetches a pinned wheel of `mpich` from PyPI, which bundles libfabric 2.5, and runs the same test binaries with that library in front. What is
//! tried is the run time: nothing is built against it. The tests are told which library to expect, in their own process and in the clusters that
//! they start, and fail if another was loaded; so a green run proves that it was this one.

use crate::execute::{ExecuteError, execute};
use clap::Args;
use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

/// The wheel: package, version, and what its bytes hash to.
const PACKAGE: &str = "mpich==5.0.2";
const PLATFORM: &str = "manylinux_2_28_x86_64";
const SHA256: &str = "8fed465ebff269ea2ebac179a25de02671ddf8df476e0f115be089015015cfd4";
/// Where the library lies in it, and its version.
const LIBRARY: &str = "mpich-5.0.2.data/data/lib/mpich";
const VERSION: &str = "2.5";
/// The suites that move bytes, in one call: cargo builds what they share once.
const SUITES: &str = "test --locked --package quarry-fabric --package quarry-client --package quarry-tests --test fabric --test client --test e2e";

#[derive(Args, Debug)]
pub(crate) struct LibfabricArgs {
    /// Take the libfabric in this folder instead of the wheel's.
    #[arg(long, value_name = "DIR", requires = "version")]
    library: Option<PathBuf>,
    /// Its major and minor version.
    #[arg(long, value_name = "MAJOR.MINOR", requires = "library")]
    version: Option<String>,
    /// Only tests whose name contains this.
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
}

/// Why it did not work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LibfabricError {
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("there is no libfabric.so.1 in {}", dir.display())]
    NoLibrary { dir: PathBuf },
}

pub(crate) fn run(repository: &Path, args: &LibfabricArgs) -> Result<String, LibfabricError> {
    let LibfabricArgs { library, version, .. } = args;
    let (dir, version) = match (library, version) {
        (Some(dir), Some(version)) => (dir.clone(), version.clone()),
        _ => (fetch(repository)?, VERSION.to_owned()),
    };
    let library = dir.join("libfabric.so.1");
    let library = library.canonicalize().map_err(|_| LibfabricError::NoLibrary { dir: dir.clone() })?;
    eprintln!("libfabric {version}: {}", library.display());
    cargo(repository, &["build", "--package", "quarry", "--package", "raft-admin"], None)?;
    let words: Vec<&str> = SUITES.split(' ').chain(args.filter.as_deref()).collect();
    cargo(repository, &words, Some((&library, &version)))?;
    Ok(format!("the suites pass on libfabric {version} at {}", library.display()))
}

/// Downloads the wheel, unless that was done before, and answers the folder of its library. pip compares the hash.
fn fetch(repository: &Path) -> Result<PathBuf, LibfabricError> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository.join("target"), PathBuf::from);
    let dir = target.join("libfabric-wheel");
    let unpacked = dir.join("unpacked");
    let library = unpacked.join(LIBRARY);
    if library.join("libfabric.so.1").exists() {
        return Ok(library);
    }
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| LibfabricError::Io { path, source }
    };
    if dir.exists() {
        // Half of an earlier try.
        fs::remove_dir_all(&dir).map_err(io(&dir))?;
    }
    fs::create_dir_all(&dir).map_err(io(&dir))?;
    let pinned = dir.join("requirements.txt");
    fs::write(&pinned, format!("{PACKAGE} --hash=sha256:{SHA256}\n")).map_err(io(&pinned))?;
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]);
    pip.args(["--platform", PLATFORM, "--dest"]).arg(&dir).arg("--requirement").arg(&pinned);
    execute("python3 -m pip download", &mut pip)?;
    let entries = fs::read_dir(&dir).map_err(io(&dir))?.collect::<Result<Vec<_>, _>>().map_err(io(&dir))?;
    let wheel =
        entries.into_iter().map(|entry| entry.path()).find(|path| path.extension().is_some_and(|it| it == "whl"));
    let wheel = wheel.ok_or_else(|| LibfabricError::NoLibrary { dir: dir.clone() })?;
    // Unpacked aside, so that what has its name is whole.
    let aside = dir.join("unpacking");
    let mut unzip = Command::new("python3");
    unzip.args(["-m", "zipfile", "--extract"]).arg(&wheel).arg(&aside);
    execute("python3 -m zipfile", &mut unzip)?;
    fs::rename(&aside, &unpacked).map_err(io(&unpacked))?;
    Ok(library)
}

fn cargo(repository: &Path, words: &[&str], library: Option<(&Path, &str)>) -> Result<(), ExecuteError> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(repository).args(words);
    if let Some((library, version)) = library {
        let mut search = library.parent().expect("a file lies in a folder").as_os_str().to_owned();
        if let Some(others) = std::env::var_os("LD_LIBRARY_PATH") {
            search = [search, OsString::from(":"), others].into_iter().collect();
        }
        cargo.env("LD_LIBRARY_PATH", search);
        // The wheel brings providers as files, which need libraries that are not here.
        cargo.env("FI_PROVIDER_PATH", "/nonexistent");
        cargo.env("QUARRY_TEST_LIBFABRIC", library).env("QUARRY_TEST_LIBFABRIC_VERSION", version);
    }
    execute(&format!("cargo {}", words.join(" ")), &mut cargo)
}
