//! `quarry doctor`: what this machine lacks, and how to mend it.
//!
//! Every finding comes from trying or reading the thing itself, with a deadline; what the readings mean is decided by pure functions. A failed
//! check is something that Quarry cannot work without; a warning is something that makes it slower or less safe.

mod clock;
mod cluster;
mod disk;
mod fabric;
mod finding;
mod machine;

use crate::exit::{Failure, Format};
use clap::Args;
use finding::State;
use quarry::stdout::line;
use serde_json::json;
use std::{net::SocketAddr, path::PathBuf, time::Duration};

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Also ask every process of this cluster: a cluster file, or quarry://host:port,host:port?uuid=..&root=..
    #[arg(long, value_name = "FILE|URL", env = "QUARRY_CLUSTER")]
    cluster: Option<String>,
    /// Credentials of an administrator, instead of those that the cluster file names.
    #[arg(long, value_name = "FILE", env = "QUARRY_CREDENTIALS")]
    credentials: Option<PathBuf>,
    /// The folder that a node keeps its data in; a small file is written and synced there, and removed.
    #[arg(long, value_name = "DIR", default_value = ".")]
    data_dir: PathBuf,
    /// An address that a node is to listen on; may be repeated.
    #[arg(long, value_name = "IP:PORT")]
    listen: Vec<SocketAddr>,
    /// The libfabric provider; by default the one that fits the library.
    #[arg(long, value_name = "NAME")]
    provider: Option<String>,
    /// Deadline of each check.
    #[arg(long, value_name = "SPAN", default_value = "5s", value_parser = quarry::span::deadline)]
    timeout: Duration,
}

pub(crate) async fn run(args: &DoctorArgs, format: Format) -> Result<(), Failure> {
    let mut findings = Vec::new();
    let software = fabric::check(args.provider.as_deref(), args.timeout, &mut findings).await;
    machine::check(software, &mut findings);
    disk::check(&args.data_dir, &mut findings);
    clock::check(args.timeout, &mut findings).await;
    machine::check_ports(&args.listen, &mut findings);
    if let Some(named) = &args.cluster {
        cluster::check(named, args.credentials.as_deref(), args.timeout, &mut findings).await;
    }
    let count = |state| findings.iter().filter(|it| it.state == state).count();
    let (failed, warned) = (count(State::Fail), count(State::Warn));
    match format {
        Format::Json => line(json!({ "findings": findings, "failed": failed, "warnings": warned }))?,
        Format::Text => {
            for finding in &findings {
                line(finding)?;
            }
        }
    }
    if failed == 0 {
        return Ok(());
    }
    Err(Failure::error(format!("{failed} of {} checks failed", findings.len())).hint("each has its remedy beside it"))
}
