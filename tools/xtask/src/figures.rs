//! `cargo xtask figures`: measures with `quarry bench` and writes the tables into docs/performance.md.
//!
//! Each table stands between two marks that name it. A bench that fails leaves the page as it is.

use crate::execute::{ExecuteError, execute};
use clap::Args;
use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

const PAGE: &str = "docs/performance.md";

#[derive(Args, Debug)]
pub(crate) struct FiguresArgs {
    /// Benches to run; each has its table.
    #[arg(value_name = "BENCH", default_values = ["fabric", "small", "meta", "calls", "lifecycle"])]
    benches: Vec<String>,
    /// Counted seconds of each side of a case.
    #[arg(long, default_value = "1")]
    seconds: String,
    /// Python interpreter that has Mooncake's package, for bench lifecycle; `cargo xtask peers` makes one.
    #[arg(long, value_name = "PYTHON")]
    mooncake: Option<PathBuf>,
}

/// Why the page is as it was.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FiguresError {
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("quarry bench {bench} cannot be run: {source}")]
    Missing { bench: String, source: io::Error },
    #[error("quarry bench {bench} failed: {status}")]
    Failed { bench: String, status: std::process::ExitStatus },
    #[error("{PAGE} has no place for {bench}: expected a line {begin} and, below it, a line {end}")]
    NoPlace { bench: String, begin: String, end: String },
}

pub(crate) fn run(repository: &Path, args: &FiguresArgs) -> Result<String, FiguresError> {
    let page = repository.join(PAGE);
    let read = || fs::read_to_string(&page).map_err(|source| FiguresError::Io { path: page.clone(), source });
    // Before the measuring: a missing mark would waste it.
    let text = read()?;
    for bench in &args.benches {
        replaced(&text, bench, "")?;
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.current_dir(repository).args(["build", "--locked", "--release", "--package", "quarry"]);
    execute("cargo build --release --package quarry", &mut build)?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository.join("target"), PathBuf::from);
    for bench in &args.benches {
        let mut command = Command::new(target.join("release/quarry"));
        command.args(["bench", bench, "--markdown", "--seconds", &args.seconds]).stderr(Stdio::inherit());
        if let Some(python) = &args.mooncake {
            command.arg("--mooncake").arg(python);
        }
        let missing = |source| FiguresError::Missing { bench: bench.clone(), source };
        let output = command.output().map_err(missing)?;
        if !output.status.success() {
            return Err(FiguresError::Failed { bench: bench.clone(), status: output.status });
        }
        let table = String::from_utf8_lossy(&output.stdout);
        let text = replaced(&read()?, bench, &table)?;
        fs::write(&page, text).map_err(|source| FiguresError::Io { path: page.clone(), source })?;
    }
    Ok(format!("wrote {} into {PAGE}", args.benches.join(", ")))
}

/// The page with `table` between the marks of a bench.
fn replaced(page: &str, bench: &str, table: &str) -> Result<String, FiguresError> {
    let (begin, end) = (format!("<!-- begin {bench} -->"), format!("<!-- end {bench} -->"));
    let parts = page.split_once(&begin).and_then(|(before, rest)| Some((before, rest.split_once(&end)?.1)));
    let Some((before, after)) = parts else {
        return Err(FiguresError::NoPlace { bench: bench.to_owned(), begin, end });
    };
    Ok(format!("{before}{begin}\n\n{}\n\n{end}{after}", table.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_takes_the_place_of_the_one_between_its_marks_and_of_nothing_else() {
        let page =
            "a\n<!-- begin small -->\nold\n<!-- end small -->\nb\n<!-- begin meta -->\nstays\n<!-- end meta -->\n";
        let new = replaced(page, "small", "new\n").unwrap();
        assert_eq!(
            new,
            "a\n<!-- begin small -->\n\nnew\n\n<!-- end small -->\nb\n<!-- begin meta -->\nstays\n<!-- end meta -->\n"
        );
        assert_eq!(replaced(&new, "small", "new\n").unwrap(), new);
        assert!(matches!(replaced(page, "fabric", "new"), Err(FiguresError::NoPlace { .. })));
        assert!(matches!(replaced("<!-- begin small -->", "small", "new"), Err(FiguresError::NoPlace { .. })));
    }
}
