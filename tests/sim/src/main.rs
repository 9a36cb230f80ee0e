//! Lives through seeds: `quarry-sim --seeds N --from S`.

use clap::{Parser, ValueEnum};
use quarry_sim::{Mutant, run};
use std::{process::ExitCode, time::Duration};

/// Simulated clusters, one per seed. Fails with the first seed that breaks an invariant, unless told to go on.
#[derive(Parser, Debug)]
#[command(name = "quarry-sim")]
struct Cli {
    /// How many seeds.
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Go on after a seed that fails.
    #[arg(long)]
    keep_going: bool,
    /// Print everything that happens to standard error.
    #[arg(long)]
    trace: bool,
    /// Print the hash of each seed's trace.
    #[arg(long)]
    hashes: bool,
    /// Put in a fault on purpose.
    #[arg(long)]
    mutant: Option<Fault>,
}

#[derive(Clone, Copy, ValueEnum, Debug)]
enum Fault {
    AcknowledgedEarly,
    UnconfirmedReads,
    NoQuarantine,
}

impl From<Fault> for Mutant {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::AcknowledgedEarly => Self::AcknowledgedEarly,
            Fault::UnconfirmedReads => Self::UnconfirmedReads,
            Fault::NoQuarantine => Self::NoQuarantine,
        }
    }
}

#[expect(clippy::print_stdout, reason = "a command answers its user")]
fn main() -> ExitCode {
    let cli = Cli::parse();
    let (mut failed, mut lived, mut simulated) = (0_u64, 0_u64, Duration::ZERO);
    let (mut entries, mut operations, mut tangled) = (0, 0, 0);
    for seed in cli.from..cli.from.saturating_add(cli.seeds) {
        let report = run(seed, cli.mutant.map(Into::into), cli.trace);
        lived += 1;
        simulated += report.simulated;
        entries += report.entries;
        operations += report.operations;
        tangled += report.tangled;
        if cli.hashes {
            println!("seed {seed}: {} after {} events", report.trace, report.events);
        }
        if !report.violations.is_empty() {
            failed += 1;
            println!("seed {seed} fails: repeat it with `cargo xtask sim --from {seed} --seeds 1`");
            for violation in &report.violations {
                println!("  {violation}");
            }
            if !cli.keep_going {
                break;
            }
        }
    }
    println!(
        "{lived} seeds, {} simulated s, {entries} entries, {operations} operations judged, {tangled} keys too tangled, {failed} seeds failed",
        simulated.as_secs()
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
