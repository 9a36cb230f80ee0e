//! Simulated clusters under the seeds of the gate, those that once failed, and those that prove that faults are found.
//! Run more of them with `cargo xtask sim --seeds 1000 --from 1000`.

use quarry_sim::{Mutant, Report, run};
use std::process::Command;

/// Seeds of the gate: calm, power, mixed, deposed.
const GATE: [u64; 4] = [0, 1, 4, 11];
/// Seeds that failed once, with what it was.
const KEPT: [(u64, &str); 0] = [];

fn is_well(report: &Report) {
    let Report { seed, violations, .. } = report;
    assert!(
        violations.is_empty(),
        "seed {seed} fails; repeat it with `cargo xtask sim --from {seed} --seeds 1`:\n{}",
        violations.join("\n")
    );
}

#[test]
fn every_invariant_holds_through_crashes_and_partitions() {
    for seed in GATE {
        let report = run(seed, None, false);
        is_well(&report);
        assert!(report.operations > 50 && report.entries > 100, "hardly anything happened: {report:?}");
    }
}

#[test]
fn seeds_that_failed_once_do_not_fail_again() {
    for (seed, _) in KEPT {
        is_well(&run(seed, None, false));
    }
}

#[test]
fn the_same_seed_is_the_same_history_here_and_in_another_process() {
    let (first, again, other) = (run(7, None, false), run(7, None, false), run(8, None, false));
    assert_eq!((&first.trace, first.events), (&again.trace, again.events));
    assert_ne!(first.trace, other.trace);
    let output =
        Command::new(env!("CARGO_BIN_EXE_quarry-sim")).args(["--from", "7", "--seeds", "1", "--hashes"]).output();
    let said = String::from_utf8(output.expect("the binary of this package starts").stdout).unwrap();
    assert!(said.contains(&first.trace), "{} is not in:\n{said}", first.trace);
}

/// One of these seeds finds the mutant. All of them have the climate that shows it, and a seed keeps its climate; which of them find it
/// changes with the code.
fn found(mutant: Mutant, seeds: [u64; 8], named: &str) {
    let report = seeds.into_iter().map(|seed| run(seed, Some(mutant), false)).find(|it| !it.violations.is_empty());
    let Report { seed, violations, simulated, .. } =
        report.unwrap_or_else(|| panic!("{mutant:?} lived through {seeds:?}"));
    let all = violations.join("\n");
    assert!(all.contains(named), "seed {seed} finds {mutant:?} as something else than {named}:\n{all}");
    let first = violations[0].lines().next().unwrap_or_default();
    eprintln!("seed {seed} finds {mutant:?} within {} simulated seconds: {first}", simulated.as_secs());
}

#[test]
fn a_log_that_acknowledges_before_it_syncs_is_found() {
    found(Mutant::AcknowledgedEarly, [1, 2, 3, 6, 8, 9, 18, 23], "");
}

#[test]
fn a_leader_that_answers_reads_without_a_majority_is_found() {
    found(Mutant::UnconfirmedReads, [11, 12, 13, 19, 35, 42, 46, 48], "Linearizable");
}

#[test]
fn memory_that_does_not_rest_after_its_last_lease_is_found() {
    found(Mutant::NoQuarantine, [0, 5, 7, 10, 43, 59, 20, 21], "Leases hold");
}
