//! The quarry command: one binary for the daemons, a local cluster, values, and what looks after them.

mod bench;
mod cli;
mod demo;
mod descriptors;
mod doctor;
mod few;
mod http;
mod keys;
mod logs;
mod output;
mod page;
mod serve;
mod size;
mod supervised;
mod top;
mod up;
mod values;

use clap::Parser as _;
use cli::{Cli, Command, DaemonArgs, LogFormat};
use exit::{Failure, Format};
use quarry::{build::BUILD_ID, exit, stdout::line};
use serde_json::json;
use std::process::ExitCode;

/// How errors begin.
const PROGRAM: &str = "quarry";

fn main() -> ExitCode {
    // Before the runtime takes signals: it would call the handler of the library that took them before.
    quarry_fabric::reclaim_signals();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(wrong) => return exit::usage(&wrong, PROGRAM),
    };
    if cli.build_id {
        return if line(BUILD_ID).is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let Some(command) = cli.command else {
        return Failure::usage("a command is missing").hint("quarry --help lists them").report(PROGRAM, cli.output);
    };
    if matches!(command, Command::Meta(_) | Command::Datanode(_)) {
        quarry_fabric::keep_freed_memory(few_processors());
    }
    let result = match runtime() {
        Ok(runtime) => runtime.block_on(Box::pin(run(command, cli.log_format, cli.output))),
        Err(wrong) => Err(Failure::error(wrong)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(PROGRAM, cli.output),
    }
}

/// The usual runtime, with as many worker threads as there are processors or the environment variable `TOKIO_WORKER_THREADS` says. Where there are two
/// processors at most, one worker: a second would mostly be woken to find nothing left to do, and what blocks has threads of its own.
fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let said = std::env::var_os("TOKIO_WORKER_THREADS").is_some();
    if !said && few_processors() {
        runtime.worker_threads(1);
    }
    runtime.enable_all().build()
}

/// Whether hardly two threads run at once.
fn few_processors() -> bool {
    std::thread::available_parallelism().is_ok_and(|processors| processors.get() <= 2)
}

async fn run(command: Command, log_format: Option<LogFormat>, format: Format) -> Result<(), Failure> {
    // Daemons log once they know which node they are.
    if !matches!(command, Command::Meta(_) | Command::Datanode(_)) {
        logs::start(None, logs::COMMAND, log_format)?;
    }
    match command {
        Command::Meta(args) => {
            serve::meta(&args, log_format).await?;
            checked(&args, format)
        }
        Command::Datanode(args) => {
            serve::datanode(&args, log_format).await?;
            checked(&args, format)
        }
        Command::Up(args) => up::up(&args, format).await,
        Command::Keys(command) => keys::run(command, format),
        Command::Namespace(command) => values::namespace(command, format).await,
        Command::Put(args) => values::put(args, format).await,
        Command::Get(args) => values::get(args, format).await,
        Command::Cat(args) => values::cat(args, format).await,
        Command::Stat(args) => values::stat(args, format).await,
        Command::Exists(args) => values::exists(args, format).await,
        Command::Ls(args) => values::ls(args, format).await,
        Command::Rm(args) => values::rm(args, format).await,
        Command::Doctor(args) => doctor::run(&args, format).await,
        Command::Top(args) => Box::pin(top::top(&args, format)).await,
        Command::Bench(args) => bench::run(&args, format).await,
        Command::BenchTarget(args) => bench::target::run(&args),
        Command::Demo(args) => demo::run(&args, format).await,
        Command::DemoVerify(args) => demo::verify::run(&args).await,
    }
}

/// A configuration that was only to be checked is good.
fn checked(args: &DaemonArgs, format: Format) -> Result<(), Failure> {
    if args.check_config && format == Format::Json {
        line(json!({ "config": args.config, "valid": true }))?;
    }
    Ok(())
}
