//! `cargo xtask deploy`: tries deploy/ as an operator would, where the tools for it are installed.
//!
//! Kubernetes manifests are put together by kubectl, which needs no cluster for it, checked against the schemas of the API, and the nodes that they
//! describe are tried on this machine. The units run under systemd in a container, the compose file under podman in a network namespace of its own
//! (`deploy/systemd/rehearse`, `deploy/compose/rehearse`). What cannot be tried for want of a tool is named. Rules and the dashboard are checked by
//! the tests of the crate `quarry`.

use crate::execute::{ExecuteError, execute};
use clap::Args;
use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

#[derive(Args, Debug)]
pub(crate) struct DeployArgs {
    /// Folder for tools from PyPI and the root of the image; kept for the next time.
    #[arg(long, value_name = "DIR", default_value = "/var/tmp/quarry-deploy")]
    dir: PathBuf,
    /// Folder with the two binaries; without it they are built.
    #[arg(long, value_name = "DIR")]
    binaries: Option<PathBuf>,
    /// The manifests alone.
    #[arg(long)]
    manifests: bool,
}

/// From PyPI: what validates manifests, and what runs compose files.
const PACKAGES: [&str; 2] = ["kubernetes-validate==1.37.0", "podman-compose==1.6.0"];
const OVERLAYS: [&str; 2] = ["example", "rdma"];

/// Why it did not work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeployError {
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

pub(crate) fn run(root: &Path, args: &DeployArgs) -> Result<String, DeployError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| DeployError::Io { path, source }
    };
    fs::create_dir_all(&args.dir).map_err(io(&args.dir))?;
    let tools = args.dir.join("venv");
    let ready = tools.join("ready");
    let wanted = format!("{PACKAGES:?}\n");
    if !fs::read_to_string(&ready).is_ok_and(|there| there == wanted) {
        execute("python3 -m venv", Command::new("python3").args(["-m", "venv", "--clear"]).arg(&tools))?;
        let mut pip = Command::new(tools.join("bin/python"));
        execute("pip install", pip.args(["-m", "pip", "install", "--quiet"]).args(PACKAGES))?;
        fs::write(&ready, wanted).map_err(io(&ready))?;
    }
    let binaries = match &args.binaries {
        Some(binaries) => binaries.clone(),
        None => build(root)?,
    };
    let mut skipped = Vec::new();
    if is_there("kubectl") {
        manifests(root, &args.dir, &tools, &binaries)?;
    } else {
        skipped.push("kubectl");
    }
    if args.manifests {
        return Ok(said(&skipped));
    }
    if is_there("podman") && is_there("mmdebstrap") {
        let archive = args.dir.join("base.tar");
        if !archive.exists() {
            let aside = args.dir.join("base.new.tar");
            let mut make = Command::new("mmdebstrap");
            make.args(["--variant=minbase", "--include=libfabric1,systemd,systemd-sysv", "bookworm"]).arg(&aside);
            execute("mmdebstrap", &mut make)?;
            fs::rename(&aside, &archive).map_err(io(&archive))?;
        }
        for rehearsal in ["deploy/systemd/rehearse", "deploy/compose/rehearse"] {
            let mut rehearse = Command::new(root.join(rehearsal));
            rehearse.env("COMPOSE", tools.join("bin/podman-compose"));
            execute(rehearsal, rehearse.env("BASE_ARCHIVE", &archive).env("BINARIES", &binaries))?;
        }
    } else {
        skipped.push("podman and mmdebstrap");
    }
    Ok(said(&skipped))
}

fn said(skipped: &[&str]) -> String {
    let skipped: Vec<String> = skipped.iter().map(|it| format!("; not tried, since there is no {it}")).collect();
    format!("deploy/ does what it says{}", skipped.concat())
}

fn is_there(tool: &str) -> bool {
    let found = Command::new(tool).arg("--help").stdout(Stdio::null()).stderr(Stdio::null()).status();
    !found.is_err_and(|wrong| wrong.kind() == io::ErrorKind::NotFound)
}

/// The binaries of a release build, where cargo puts them.
fn build(root: &Path) -> Result<PathBuf, DeployError> {
    let mut cargo = Command::new(env!("CARGO"));
    let packages = ["--package", "quarry", "--package", "raft-admin"];
    execute("cargo build", cargo.current_dir(root).args(["build", "--release", "--locked"]).args(packages))?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    Ok(target.join("release"))
}

/// Makes the files of the example in a copy of the manifests, puts the overlays together, has them validated, and tries the nodes.
fn manifests(root: &Path, dir: &Path, tools: &Path, binaries: &Path) -> Result<(), DeployError> {
    let work = dir.join("manifests");
    if work.exists() {
        fs::remove_dir_all(&work).map_err(|source| DeployError::Io { path: work.clone(), source })?;
    }
    execute("cp", Command::new("cp").arg("-r").arg(root.join("deploy")).arg(&work))?;
    let overlays = work.join("kubernetes/overlays");
    let mut init = Command::new(overlays.join("example/init"));
    execute("deploy/kubernetes/overlays/example/init", init.env("QUARRY", binaries.join("quarry")))?;
    for overlay in OVERLAYS {
        let path = work.join(format!("{overlay}.yaml"));
        let file = fs::File::create(&path).map_err(|source| DeployError::Io { path: path.clone(), source })?;
        let mut kubectl = Command::new("kubectl");
        execute("kubectl kustomize", kubectl.arg("kustomize").arg(overlays.join(overlay)).stdout(file))?;
        let mut validate = Command::new(tools.join("bin/kubernetes-validate"));
        execute("kubernetes-validate", validate.args(["--strict", "--quiet"]).arg(&path))?;
    }
    let mut nodes = Command::new(tools.join("bin/python"));
    nodes.arg(work.join("kubernetes/try_nodes.py")).arg(work.join("example.yaml")).arg(binaries);
    execute("deploy/kubernetes/try_nodes.py", &mut nodes)?;
    Ok(())
}
