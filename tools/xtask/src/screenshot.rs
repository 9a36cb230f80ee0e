//! `cargo xtask screenshot`: takes docs/status-page.png from a cluster under load, in headless Chromium.
//!
//! The test that looks at the page in a browser does it, so that the picture shows what is tested.

use crate::execute::{ExecuteError, execute};
use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

/// Larger pictures do not belong into a repository.
const BYTES_MAX: u64 = 300_000;

/// Why there is no picture.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ScreenshotError {
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    #[error("{}: {source}; is Chromium installed?", path.display())]
    Absent { path: PathBuf, source: io::Error },
    #[error("the picture has {found} bytes, expected at most {BYTES_MAX}")]
    Large { found: u64 },
}

pub(crate) fn run(root: &Path) -> Result<String, ScreenshotError> {
    let file = root.join("docs/status-page.png");
    // Beside it first: a picture that was not taken must not leave the old one for a new one.
    let taken = file.with_extension("new.png");
    let mut test = Command::new(env!("CARGO"));
    test.current_dir(root).args(["test", "--locked", "--package", "quarry", "--test", "quarry", "--", "browser"]);
    execute("cargo test", test.env("QUARRY_SCREENSHOT", &taken))?;
    let absent = |source| ScreenshotError::Absent { path: taken.clone(), source };
    let found = fs::metadata(&taken).map_err(absent)?.len();
    if found > BYTES_MAX {
        return Err(ScreenshotError::Large { found });
    }
    fs::rename(&taken, &file).map_err(absent)?;
    Ok(format!("{} has {found} bytes", file.display()))
}
