//! The arrows between our crates, and the places where unsafe code may be.
//!
//! `raft` knows nothing of ours, `meta-state` is pure, data nodes and clients know nothing of meta nodes: each holds because the crate could
//! not name the other. Tests of a crate may use more than the crate itself.

use serde::Deserialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

/// Who may use whom. A crate that is not listed is an error: it gets its line when it is made.
const ARROWS: [(&str, &[&str]); 15] = [
    ("quarry-wire", &[]),
    ("quarry-proto", &["quarry-wire"]),
    ("quarry-trust", &["quarry-proto", "quarry-wire"]),
    ("libfabric-sys", &[]),
    ("quarry-fabric", &["libfabric-sys"]),
    ("quarry-raft", &[]),
    ("quarry-meta-state", &["quarry-wire"]),
    ("quarry-meta", &["quarry-raft", "quarry-meta-state", "quarry-proto", "quarry-trust", "quarry-wire"]),
    ("quarry-datanode", &["quarry-fabric", "quarry-proto", "quarry-trust", "quarry-wire"]),
    ("quarry-client", &["quarry-fabric", "quarry-proto", "quarry-trust", "quarry-wire"]),
    ("quarry", ALL),
    ("raft-admin", ALL),
    ("xtask", &[]),
    ("quarry-tests", ALL),
    ("quarry-sim", ALL),
];

const ALL: &[&str] = &[
    "quarry-wire",
    "quarry-proto",
    "quarry-trust",
    "libfabric-sys",
    "quarry-fabric",
    "quarry-raft",
    "quarry-meta-state",
    "quarry-meta",
    "quarry-datanode",
    "quarry-client",
    "quarry",
    "quarry-tests",
];

/// Folders whose crates may hold unsafe code.
const UNSAFE_HOMES: [&str; 2] = ["fabric", "client/c"];

/// Why the check could not be made, or what it found.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArrowError {
    #[error("cargo metadata: {0}")]
    Cargo(String),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{} problems:\n{}", .0.len(), .0.join("\n"))]
    Found(Vec<String>),
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// `dev`, `build`, or absent for a normal one.
    kind: Option<String>,
    /// Present for ours.
    path: Option<PathBuf>,
}

/// Checks the workspace at `root`.
pub(crate) fn check(root: &Path) -> Result<String, ArrowError> {
    let packages = metadata(root)?.packages;
    let mut problems = wrong_arrows(&packages);
    for package in &packages {
        let folder = package.manifest_path.parent().unwrap_or(root);
        let manifest = read(&package.manifest_path)?;
        if !may_be_unsafe(root, folder) && !inherits_lints(&manifest) {
            problems.push(format!("{}: its manifest must say [lints] workspace = true", package.name));
        }
    }
    for file in rust_files(root)? {
        let folder = file.parent().unwrap_or(root);
        if !may_be_unsafe(root, folder) && lifts_the_ban(&read(&file)?) {
            problems.push(format!(
                "{}: unsafe code is allowed in {} alone",
                file.display(),
                UNSAFE_HOMES.join(" and ")
            ));
        }
    }
    if problems.is_empty() {
        Ok(format!("{} crates, every arrow as it should be, no unsafe code outside its homes", packages.len()))
    } else {
        Err(ArrowError::Found(problems))
    }
}

fn metadata(root: &Path) -> Result<Metadata, ArrowError> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(root)
        .output()
        .map_err(|wrong| ArrowError::Cargo(wrong.to_string()))?;
    if !output.status.success() {
        return Err(ArrowError::Cargo(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    serde_json::from_slice(&output.stdout).map_err(|wrong| ArrowError::Cargo(wrong.to_string()))
}

fn wrong_arrows(packages: &[Package]) -> Vec<String> {
    let allowed: BTreeMap<&str, &[&str]> = ARROWS.into_iter().collect();
    let mut problems = Vec::new();
    for package in packages {
        let Some(may_use) = allowed.get(package.name.as_str()) else {
            problems.push(format!("{} is a new crate: say in xtask what it may use", package.name));
            continue;
        };
        let used = package.dependencies.iter().filter(|it| it.path.is_some() && it.kind.as_deref() != Some("dev"));
        let used: BTreeSet<&str> = used.map(|it| it.name.as_str()).collect();
        for wrong in used.iter().filter(|name| !may_use.contains(name)) {
            problems.push(format!("{} must not use {wrong}; it may use {may_use:?}", package.name));
        }
    }
    problems
}

fn may_be_unsafe(root: &Path, folder: &Path) -> bool {
    UNSAFE_HOMES.iter().any(|home| folder.starts_with(root.join(home)))
}

/// Whether a manifest takes the workspace's lints, of which one denies unsafe code.
fn inherits_lints(manifest: &str) -> bool {
    let mut lines = manifest.lines().map(str::trim).skip_while(|line| *line != "[lints]").skip(1);
    lines.find(|line| !line.is_empty() && !line.starts_with('#')) == Some("workspace = true")
}

/// Whether a source file turns the lint against unsafe code off.
fn lifts_the_ban(source: &str) -> bool {
    // Written in two parts, so that this file does not find itself.
    let lint = concat!("unsafe", "_code");
    source.lines().any(|line| {
        let line = line.trim_start();
        line.contains(lint) && !line.starts_with("//") && (line.contains("allow(") || line.contains("expect("))
    })
}

fn rust_files(root: &Path) -> Result<Vec<PathBuf>, ArrowError> {
    let (mut files, mut folders) = (Vec::new(), vec![root.to_owned()]);
    while let Some(folder) = folders.pop() {
        let io = |source| ArrowError::Io { path: folder.clone(), source };
        for entry in fs::read_dir(&folder).map_err(io)? {
            let path = entry.map_err(io)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if path.is_dir() && !name.starts_with('.') && name != "target" {
                folders.push(path);
            } else if path.extension().is_some_and(|it| it == "rs") {
                files.push(path);
            }
        }
    }
    Ok(files)
}

fn read(path: &Path) -> Result<String, ArrowError> {
    fs::read_to_string(path).map_err(|source| ArrowError::Io { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, uses: &[(&str, Option<&str>)]) -> Package {
        let dependency = |(name, kind): &(&str, Option<&str>)| Dependency {
            name: (*name).to_owned(),
            kind: kind.map(str::to_owned),
            path: Some(PathBuf::from("/somewhere")),
        };
        let dependencies = uses.iter().map(dependency).collect();
        Package { name: name.to_owned(), manifest_path: PathBuf::new(), dependencies }
    }

    #[test]
    fn a_crate_may_use_what_its_arrows_say_and_its_tests_may_use_more() {
        assert!(wrong_arrows(&[package("quarry-meta", &[("quarry-raft", None)])]).is_empty());
        assert!(wrong_arrows(&[package("quarry-client", &[("quarry", Some("dev"))])]).is_empty());
        assert_eq!(wrong_arrows(&[package("quarry-client", &[("quarry-meta", None)])]).len(), 1);
        assert_eq!(wrong_arrows(&[package("quarry-raft", &[("quarry-wire", Some("build"))])]).len(), 1);
        assert_eq!(wrong_arrows(&[package("quarry-new", &[])]).len(), 1);
    }

    #[test]
    fn a_manifest_without_the_workspace_lints_is_found() {
        assert!(inherits_lints("[package]\nname = \"a\"\n\n[lints]\nworkspace = true\n"));
        assert!(!inherits_lints("[package]\nname = \"a\"\n"));
        assert!(!inherits_lints("[lints]\n# workspace = true\n[lints.rust]\n"));
    }

    #[test]
    fn an_attribute_that_allows_unsafe_code_is_found() {
        let lint = concat!("unsafe", "_code");
        assert!(lifts_the_ban(&format!("#![expect({lint}, reason = \"x\")]")));
        assert!(lifts_the_ban(&format!("    #[allow({lint})]")));
        assert!(!lifts_the_ban(&format!("// #[allow({lint})]")));
        assert!(!lifts_the_ban(&format!("let what = \"{lint}\";")));
    }
}
