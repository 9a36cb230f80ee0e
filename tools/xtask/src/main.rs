//! Chores of the repository; `cargo xtask help` lists them.

mod arrows;
mod bare;
mod deploy;
mod execute;
mod figures;
mod libfabric;
mod peers;
mod screenshot;
mod sim;

use clap::{Parser, Subcommand};
use std::{path::PathBuf, process::ExitCode};

/// Chores of the Quarry repository.
#[derive(Parser, Debug)]
#[command(name = "xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Check which crate uses which, and that unsafe code stays where it may be.
    Arrows,
    /// Set up, test and run the demo from a clean clone in a bare Debian 12 root. Needs root, mmdebstrap and a Debian mirror.
    Bare(bare::BareArgs),
    /// Try the manifests, units and compose file of deploy/. Needs python3 with venv and PyPI; kubectl; root, podman with runc, and mmdebstrap.
    Deploy(deploy::DeployArgs),
    /// Measure in a release build and write the tables into docs/performance.md.
    Figures(figures::FiguresArgs),
    /// Run the tests that move bytes on another libfabric: a pinned wheel's 2.5. Needs python3 with pip, and PyPI.
    Libfabric(libfabric::LibfabricArgs),
    /// Measure Quarry and other stores one after the other. Needs python3 with venv and pip, PyPI, redis-server, and Debian's etcd-server or root to install it.
    Peers(peers::PeersArgs),
    /// Take the picture of the status page in docs/. Needs Chromium.
    Screenshot,
    /// Live through seeds of the simulated cluster.
    Sim(sim::SimArgs),
}

#[expect(clippy::print_stdout, reason = "a command answers its user")]
fn main() -> ExitCode {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let result = root.canonicalize().map_err(Into::into).and_then(|root| match Cli::parse().command {
        Command::Arrows => arrows::check(&root).map_err(Into::into),
        Command::Libfabric(args) => libfabric::run(&root, &args).map_err(Into::into),
        Command::Sim(args) => sim::run(&root, &args).map_err(Into::into),
        Command::Peers(args) => peers::run(&root, &args).map_err(Into::into),
        Command::Figures(args) => figures::run(&root, &args).map_err(Into::into),
        Command::Deploy(args) => deploy::run(&root, &args).map_err(Into::into),
        Command::Screenshot => screenshot::run(&root).map_err(Into::into),
        Command::Bare(args) => bare::run(&root, &args).map_err(Into::into),
    });
    let result: Result<String, Box<dyn std::error::Error>> = result;
    match result {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(wrong) => {
            eprintln!("xtask: {wrong}");
            ExitCode::FAILURE
        }
    }
}
