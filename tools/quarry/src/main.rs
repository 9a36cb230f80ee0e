//! The quarry command: one binary for the daemons, a local cluster, single values and the demo.

mod bench;
mod cli;
mod demo;
mod exit;
mod http;
mod logs;
mod output;
mod serve;
mod size;
mod top;
mod up;
mod values;

use clap::Parser as _;
use cli::{Cli, Command, LogFormat};
use exit::Failure;
use quarry::{build::BUILD_ID, stdout::line};
use std::process::ExitCode;

fn main() -> ExitCode {
    // Before the runtime takes signals: it would call the handler of the library that took them before.
    quarry_fabric::reclaim_signals();
    let cli = Cli::parse();
    if cli.build_id {
        return if line(BUILD_ID).is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let Some(command) = cli.command else {
        eprintln!("quarry: a command is missing; see quarry --help");
        return ExitCode::from(2);
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(Box::pin(run(command, cli.log_format))),
        Err(wrong) => Err(Failure::error(wrong)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("quarry: {failure}");
            failure.code.into()
        }
    }
}

async fn run(command: Command, log_format: Option<LogFormat>) -> Result<(), Failure> {
    // Daemons log once they know which node they are.
    if !matches!(command, Command::Meta(_) | Command::Datanode(_)) {
        logs::start(None, logs::COMMAND, log_format)?;
    }
    match command {
        Command::Meta(args) => serve::meta(&args, log_format).await,
        Command::Datanode(args) => serve::datanode(&args, log_format).await,
        Command::Up(args) => up::up(&args).await,
        Command::Namespace(command) => values::namespace(command).await,
        Command::Put(args) => values::put(args).await,
        Command::Get(args) => values::get(args).await,
        Command::Rm(args) => values::rm(args).await,
        Command::Top(args) => Box::pin(top::top(&args)).await,
        Command::Bench(args) => bench::run(&args).await,
        Command::BenchTarget(args) => bench::target::run(&args),
        Command::Demo(args) => demo::run(&args).await,
        Command::DemoVerify(args) => demo::verify::run(&args).await,
    }
}
