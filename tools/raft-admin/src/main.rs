//! Administers a cluster: make it, see how it is, tell scripts whether it is well, change keys.
//!
//! `status` and `health` ask every meta node of the cluster file and work without a leader.

mod check;
mod hash;
mod leader;
mod log;
mod member;
mod node;
mod recover;
mod region;
mod report;
mod snapshot;
mod trust;

use clap::{Args, Parser, Subcommand};
use quarry::{
    admin::{self, BootstrapPlan, Health, State},
    build::VERSION,
    exit::{self, CODES_HELP, Code, Failure, Format},
    named,
    stdout::line,
};
use quarry_trust::Trust;
use serde_json::json;
use std::{path::PathBuf, process::ExitCode, time::Duration};

/// How errors begin.
const PROGRAM: &str = "raft-admin";

fn after_help() -> String {
    format!(
        "{CODES_HELP}\n\nhealth: 0 all is well, 1 it works but something is missing, 6 a group has no leader or a namespace too few data nodes in use"
    )
}

/// Administer the meta nodes of a Quarry cluster.
#[derive(Parser, Debug)]
#[command(name = "raft-admin", version = VERSION, after_help = after_help())]
struct Cli {
    /// What is printed, errors too.
    #[arg(long, short, value_enum, global = true, default_value_t)]
    output: Format,
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
        /// Credentials of an administrator.
        #[arg(long, value_name = "FILE", env = "QUARRY_CREDENTIALS", required_unless_present = "no_tls")]
        credentials: Option<PathBuf>,
        /// The meta nodes run with tls.mode = "off".
        #[arg(long, conflicts_with = "credentials")]
        no_tls: bool,
        /// Deadline, all attempts together.
        #[arg(long, value_name = "SPAN", default_value = "30s", value_parser = quarry::span::deadline)]
        timeout: Duration,
    },
    /// What every meta node knows, also without a leader.
    Status(Ask),
    /// Whether the cluster is well; the exit code says so too.
    Health(Ask),
    /// Who leads which group.
    #[command(subcommand)]
    Leader(leader::LeaderCommand),
    /// Have a meta node lead nothing, before it is stopped or looked into: it gives all its leaderships away and takes none until that is undone
    /// or the node is started again. It goes on voting and keeping the log. Stopping a node in good order (SIGTERM) drains it too.
    Drain {
        /// The meta node.
        node: u64,
        /// Let it take part again.
        #[arg(long)]
        undo: bool,
        #[command(flatten)]
        ask: Ask,
    },
    /// Whom the cluster believes.
    #[command(subcommand)]
    Certificate(trust::CertificateCommand),
    /// Whom it does not believe any more.
    #[command(subcommand)]
    Revocation(trust::RevocationCommand),
    /// The meta nodes: who votes, who comes and who goes. One command changes all groups.
    #[command(subcommand)]
    Member(member::MemberCommand),
    /// Data nodes: what they are used for, and the keys that they sign with.
    #[command(subcommand)]
    Node(node::NodeCommand),
    /// The regions of data nodes and the keys that they are read with.
    #[command(subcommand)]
    Region(region::RegionCommand),
    /// Backups: save one, look at one, begin again from one.
    #[command(subcommand)]
    Snapshot(snapshot::SnapshotCommand),
    /// Go on with one stopped meta node, after a majority of them was lost for good.
    Recover(recover::Recover),
    /// Compare the states of all meta nodes.
    Hash(hash::Hash),
    /// The logs of a stopped meta node.
    #[command(subcommand)]
    Log(log::LogCommand),
    /// Whether a machine is fit for a meta node.
    #[command(subcommand)]
    Check(check::CheckCommand),
}

#[derive(Args, Debug)]
struct Ask {
    /// Cluster file, or quarry://host:port,host:port?uuid=..&root=..
    #[arg(long, value_name = "FILE|URL", env = "QUARRY_CLUSTER")]
    cluster: String,
    /// Credentials of an administrator, instead of those that the cluster file names.
    #[arg(long, value_name = "FILE", env = "QUARRY_CREDENTIALS")]
    credentials: Option<PathBuf>,
    /// Deadline of each question.
    #[arg(long, value_name = "SPAN", default_value = "3s", value_parser = quarry::span::deadline)]
    timeout: Duration,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(wrong) => return exit::usage(&wrong, PROGRAM),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(Box::pin(run(cli.command, cli.output))),
        Err(wrong) => Err(wrong.into()),
    };
    match result {
        Ok(code) => code,
        Err(failure) => failure.report(PROGRAM, cli.output),
    }
}

async fn run(command: Command, format: Format) -> Result<ExitCode, Failure> {
    match command {
        Command::Bootstrap { plan, credentials, no_tls: _, timeout } => {
            let plan = BootstrapPlan::read(&plan).map_err(Failure::of)?;
            let trust = match credentials {
                Some(file) => Trust::mutual(&file, plan.cluster, plan.root).map_err(Failure::of)?,
                None => Trust::off(),
            };
            bootstrap(&plan, &trust, timeout, format).await
        }
        Command::Status(ask) => status(&ask, format).await,
        Command::Health(ask) => health(&ask, format).await,
        Command::Leader(command) => leader::run(command, format).await,
        Command::Drain { node, undo, ask } => leader::drain(node, undo, &ask, format).await,
        Command::Certificate(command) => trust::certificate(command, format).await,
        Command::Revocation(command) => trust::revocation(command, format).await,
        Command::Member(command) => member::run(command, format).await,
        Command::Node(command) => node::run(command, format).await,
        Command::Region(command) => region::run(command, format).await,
        Command::Snapshot(command) => snapshot::run(command, format).await,
        Command::Recover(asked) => recover::run(&asked, format),
        Command::Hash(asked) => hash::run(asked, format).await,
        Command::Log(command) => log::run(command, format),
        Command::Check(command) => check::run(command, format).await,
    }
}

async fn bootstrap(
    plan: &BootstrapPlan,
    trust: &Trust,
    timeout: Duration,
    format: Format,
) -> Result<ExitCode, Failure> {
    admin::bootstrap(plan, trust, timeout).await.map_err(|wrong| {
        let (passing, failure) = (wrong.is_passing(), Failure::from(wrong));
        if passing { failure.hint("start all meta nodes of the plan; --timeout waits longer") } else { failure }
    })?;
    let (cluster, metas, shards) = (plan.cluster, plan.metas.len(), plan.shards);
    line(match format {
        Format::Json => json!({ "cluster": cluster.to_string(), "metas": metas, "shards": shards }).to_string(),
        Format::Text => format!("cluster {cluster} has {metas} meta nodes and {shards} shards"),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The meta nodes that are asked, and how.
fn whom(ask: &Ask) -> Result<(Vec<String>, Trust), Failure> {
    let cluster = named::cluster(&ask.cluster, ask.credentials.as_deref())?;
    let trust = cluster.trust().map_err(Failure::of)?;
    Ok((cluster.metas, trust))
}

/// The same, as the cluster has them now: the cluster file may be older than the last change of members.
async fn present(ask: &Ask) -> Result<(Vec<String>, Trust), Failure> {
    let (named, trust) = whom(ask)?;
    // Who they are, the others say for one that is silent.
    let (metas, answers) = admin::status_of_present(&trust, &named, admin::LOOK.min(ask.timeout)).await;
    admin::unless_forbidden(&answers)?;
    Ok((metas, trust))
}

async fn status(ask: &Ask, format: Format) -> Result<ExitCode, Failure> {
    let (metas, trust) = whom(ask)?;
    let (metas, answers) = admin::status_of_present(&trust, &metas, ask.timeout).await;
    admin::unless_forbidden(&answers)?;
    match format {
        Format::Json => line(report::json(&metas, &answers))?,
        Format::Text => line(report::text(&metas, &answers))?,
    }
    admin::is_heard(&answers)?;
    Ok(ExitCode::SUCCESS)
}

async fn health(ask: &Ask, format: Format) -> Result<ExitCode, Failure> {
    let (metas, trust) = whom(ask)?;
    let (metas, answers) = admin::status_of_present(&trust, &metas, ask.timeout).await;
    admin::unless_forbidden(&answers)?;
    let health = Health::judge(&metas, &answers);
    match format {
        Format::Json => line(serde_json::to_string(&health).map_err(Failure::error)?)?,
        Format::Text => {
            line(format!("{:?}", health.state).to_lowercase())?;
            for problem in &health.problems {
                line(format_args!("  {problem}"))?;
            }
        }
    }
    // What is wrong was just told: it is the answer, not an error.
    Ok(match health.state {
        State::Healthy => ExitCode::SUCCESS,
        State::Degraded => Code::Error.into(),
        State::Unavailable => Code::Unavailable.into(),
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
        assert!(matches!(cli.command, Command::Health(_)) && cli.output == Format::Json);
    }
}
