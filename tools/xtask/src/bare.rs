//! `cargo xtask bare`: does a clean clone work on a bare Debian 12?
//!
//! Makes a minimal Debian root with mmdebstrap (kept for the next time), clones the repository into it, and runs `tools/setup`, `tools/test` and
//! `tools/demo` there. The Rust toolchain and cargo's downloads are those of this machine, bound in read-only or copied over: what is tried is
//! whether `tools/setup` installs everything else. Runs in a mount namespace of its own (`unshare`), so that nothing stays mounted.

use crate::execute::{ExecuteError, execute};
use clap::Args;
use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

#[derive(Args, Debug)]
pub(crate) struct BareArgs {
    /// Folder for the root; several GB. Made on the first run, used again afterwards.
    #[arg(long, value_name = "DIR", default_value = "/var/tmp/quarry-bare")]
    dir: PathBuf,
    /// Debian mirror; without it, the one that mmdebstrap takes.
    #[arg(long, value_name = "URL")]
    mirror: Option<String>,
    /// What to run in the clone.
    #[arg(long, value_name = "COMMAND", default_value = "tools/setup && tools/test && tools/demo")]
    run: String,
    /// Remove the root first, if there is one.
    #[arg(long)]
    fresh: bool,
}

/// Why it did not work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BareError {
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{name} is not set and HOME is not either: say where it is")]
    Home { name: &'static str },
}

pub(crate) fn run(repository: &Path, args: &BareArgs) -> Result<String, BareError> {
    let root = args.dir.join("root");
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| BareError::Io { path, source }
    };
    if args.fresh && root.exists() {
        fs::remove_dir_all(&root).map_err(io(&root))?;
    }
    let made = args.dir.join("made");
    if !root.exists() || !made.exists() {
        fs::create_dir_all(&args.dir).map_err(io(&args.dir))?;
        // apt inside needs certificates for https mirrors only; everything else is left to tools/setup.
        let mut make = Command::new("mmdebstrap");
        make.args(["--variant=minbase", "bookworm"]).arg(&root).args(&args.mirror);
        execute("mmdebstrap", &mut make)?;
        fs::write(&made, "bookworm\n").map_err(io(&made))?;
    }
    let clone = root.join("quarry");
    if clone.exists() {
        fs::remove_dir_all(&clone).map_err(io(&clone))?;
    }
    execute("git clone", Command::new("git").args(["clone", "--quiet", "--no-hardlinks"]).arg(repository).arg(&clone))?;
    let rustup = home("RUSTUP_HOME", ".rustup")?;
    let cargo = home("CARGO_HOME", ".cargo")?;
    // The namespace ends with the shell, and its mounts with it.
    let script = r#"
        set -eu
        root=$1 rustup=$2 cargo=$3 run=$4
        mkdir -p "$root/opt/rustup" "$root/opt/cargo/bin" "$root/proc" "$root/dev" "$root/sys"
        mount --bind "$rustup" "$root/opt/rustup"
        mount -o remount,bind,ro "$root/opt/rustup"
        for part in registry git bin; do
            if [ -e "$cargo/$part" ]; then cp -a "$cargo/$part" "$root/opt/cargo/"; fi
        done
        for part in config.toml config; do
            if [ -e "$cargo/$part" ]; then cp -a "$cargo/$part" "$root/opt/cargo/"; fi
        done
        mount --rbind /dev "$root/dev"
        mount --rbind /sys "$root/sys"
        mount -t proc proc "$root/proc"
        cp /etc/resolv.conf "$root/etc/resolv.conf"
        exec chroot "$root" /usr/bin/env -i HOME=/root CI=true TERM=dumb LANG=C.UTF-8 \
            RUSTUP_HOME=/opt/rustup CARGO_HOME=/opt/cargo \
            PATH=/opt/cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
            ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} \
            /bin/bash -c "cd /quarry && $run" < /dev/null
    "#;
    let mut shell = Command::new("unshare");
    shell.args([
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--propagation",
        "private",
        "bash",
        "-c",
        script,
        "bare",
    ]);
    shell.arg(&root).arg(rustup).arg(cargo).arg(&args.run);
    execute("the run in the bare root (it needs to be root)", &mut shell)?;
    Ok(format!("in a bare Debian 12, from a clean clone: {}: it works", args.run))
}

fn home(name: &'static str, below: &str) -> Result<PathBuf, BareError> {
    if let Some(path) = std::env::var_os(name) {
        return Ok(path.into());
    }
    let home = std::env::var_os("HOME").ok_or(BareError::Home { name })?;
    Ok(PathBuf::from(home).join(below))
}
