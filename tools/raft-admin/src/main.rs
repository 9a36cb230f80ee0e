//! Administers the meta nodes of a cluster: make it, see how it is, tell scripts whether it is well.
//!
//! `status` and `health` ask every meta node of the cluster file and work without a leader.

mod report;

use clap::{Args, Parser, Subcommand, ValueEnum};
use quarry::{
    admin::{self, BootstrapPlan, Health, State},
    build::VERSION,
    stdout::line,
};
use quarry_client::Cluster;
use std::{path::PathBuf, process::ExitCode, time::Duration};

const AFTER_HELP: &str = "\
Exit codes:
  0  done; health: all is well
  1  error; health: it works, but something is missing
  2  wrong usage
  6  unavailable; health: a group has no leader";

/// Administer the meta nodes of a Quarry cluster.
#[derive(Parser, Debug)]
#[command(name = "raft-admin", version = VERSION, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Make a new cluster, once, when all its meta nodes are up. Doing it again changes nothing.
    Bootstrap {
        /// What the cluster is made of: its id, root key, shards, meta nodes and their certificates.
        #[arg(long, value_name = "FILE")]
        plan: PathBuf,
        /// Deadline, all attempts together.
        #[arg(long, value_name = "SPAN", default_value = "30s", value_parser = humantime::parse_duration)]
        timeout: Duration,
    },
    /// What every meta node knows, also without a leader.
    Status(Ask),
    /// Whether the cluster is well; the exit code says so too.
    Health(Ask),
}

#[derive(Args, Debug)]
struct Ask {
    /// Cluster file, or quarry://host:port,host:port?uuid=..&root=..
    #[arg(long, value_name = "FILE|URL", env = "QUARRY_CLUSTER")]
    cluster: String,
    /// Deadline of each question.
    #[arg(long, value_name = "SPAN", default_value = "3s", value_parser = humantime::parse_duration)]
    timeout: Duration,
    /// Output.
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Format {
    /// For people.
    #[default]
    Text,
    /// One JSON value.
    Json,
}

/// Exit code of a cluster without a leader.
const UNAVAILABLE: u8 = 6;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(Box::pin(run(cli.command))),
        Err(wrong) => Err(wrong.into()),
    };
    result.unwrap_or_else(|wrong| {
        eprintln!("raft-admin: {wrong}");
        ExitCode::FAILURE
    })
}

async fn run(command: Command) -> Result<ExitCode, Box<dyn std::error::Error>> {
    match command {
        Command::Bootstrap { plan, timeout } => bootstrap(&BootstrapPlan::read(&plan)?, timeout).await,
        Command::Status(ask) => status(&ask).await,
        Command::Health(ask) => health(&ask).await,
    }
}

async fn bootstrap(plan: &BootstrapPlan, timeout: Duration) -> Result<ExitCode, Box<dyn std::error::Error>> {
    match admin::bootstrap(plan, timeout).await {
        Ok(()) => {}
        Err(wrong) if wrong.is_passing() => {
            eprintln!("raft-admin: {wrong}");
            return Ok(ExitCode::from(UNAVAILABLE));
        }
        // A refusal that time does not change.
        Err(wrong) => return Err(wrong.into()),
    }
    line(format_args!("cluster {} has {} meta nodes and {} shards", plan.cluster, plan.metas.len(), plan.shards))?;
    Ok(ExitCode::SUCCESS)
}

fn cluster(ask: &Ask) -> Result<Cluster, quarry_client::ClusterError> {
    if ask.cluster.starts_with("quarry://") { Cluster::parse(&ask.cluster) } else { Cluster::from_file(&ask.cluster) }
}

async fn status(ask: &Ask) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let metas = cluster(ask)?.metas;
    let answers = admin::status_all(&metas, ask.timeout).await;
    match ask.output {
        Format::Json => line(report::json(&metas, &answers))?,
        Format::Text => line(report::text(&metas, &answers))?,
    }
    let heard = answers.iter().any(Result::is_ok);
    Ok(if heard { ExitCode::SUCCESS } else { ExitCode::from(UNAVAILABLE) })
}

async fn health(ask: &Ask) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let metas = cluster(ask)?.metas;
    let answers = admin::status_all(&metas, ask.timeout).await;
    let health = Health::judge(&metas, &answers);
    match ask.output {
        Format::Json => line(serde_json::to_string(&health)?)?,
        Format::Text => {
            line(format!("{:?}", health.state).to_lowercase())?;
            for problem in &health.problems {
                line(format_args!("  {problem}"))?;
            }
        }
    }
    Ok(match health.state {
        State::Healthy => ExitCode::SUCCESS,
        State::Degraded => ExitCode::FAILURE,
        State::Unavailable => ExitCode::from(UNAVAILABLE),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory as _, error::ErrorKind};

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn status_needs_a_cluster_and_bootstrap_a_plan() {
        let kind = |line: &str| Cli::try_parse_from(line.split(' ')).unwrap_err().kind();
        assert_eq!(kind("raft-admin bootstrap"), ErrorKind::MissingRequiredArgument);
        assert_eq!(kind("raft-admin status --output xml --cluster c"), ErrorKind::InvalidValue);
        let cli = Cli::try_parse_from(["raft-admin", "health", "--cluster", "c", "-o", "json"]).unwrap();
        assert!(matches!(cli.command, Command::Health(ask) if ask.output == Format::Json));
    }
}
