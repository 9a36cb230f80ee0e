//! `cargo xtask sim`: lives through many seeds of the simulated cluster, in a release build.

use clap::Args;
use std::{
    io,
    path::Path,
    process::{Command, ExitStatus},
};

#[derive(Args, Debug)]
pub(crate) struct SimArgs {
    /// For the simulator: `--seeds N --from S`, `--trace`, `--keep-going`, `--mutant NAME`, `--hashes`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    arguments: Vec<String>,
}

/// Why the seeds were not lived through well.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SimError {
    #[error("cargo cannot be started: {0}")]
    Cargo(#[from] io::Error),
    #[error("the simulation failed: {0}")]
    Failed(ExitStatus),
}

pub(crate) fn run(root: &Path, args: &SimArgs) -> Result<String, SimError> {
    let status = Command::new(env!("CARGO"))
        .current_dir(root)
        .args(["run", "--release", "--quiet", "--locked", "--package", "quarry-sim", "--"])
        .args(&args.arguments)
        .status()?;
    if status.success() { Ok("every invariant held".to_owned()) } else { Err(SimError::Failed(status)) }
}
