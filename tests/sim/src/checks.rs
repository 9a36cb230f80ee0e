//! What must hold after every entry that any replica applies, and what clients were promised.

use quarry_meta::sim::{Observer, Step};
use quarry_meta_state::{
    Directory, Shard, Violation,
    directory::{DirectoryCommand, DirectoryOutcome},
    shard::{CommitOutcome, CommitRefusal, ShardCommand, ShardOutcome},
};
use quarry_raft::{GroupId, sim};
use quarry_wire::{
    grant::Grant,
    ids::{GrantId, RegionId, SlotIndex},
    limits::QUARANTINE,
    units::LogTime,
    version::Version,
};
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Mutex, MutexGuard},
    time::Duration,
};

/// A lease that a client holds on bytes of a region.
#[derive(Debug, Clone)]
struct Lease {
    region: RegionId,
    bytes: Range<u64>,
    ends: Duration,
}

#[derive(Default)]
struct Seen {
    violations: Vec<String>,
    /// Hash of the state after each entry, by the replica that came there first.
    states: BTreeMap<(GroupId, u64), [u8; 32]>,
    stamps: BTreeMap<GroupId, (u64, LogTime)>,
    /// The first outcome of each frame.
    outcomes: BTreeMap<(GrantId, SlotIndex, Version), CommitOutcome>,
    grants: BTreeMap<GrantId, Grant>,
    leases: Vec<Lease>,
    entries: u64,
    applied: u64,
}

/// Everything that was seen. One per world.
#[derive(Default)]
pub(crate) struct Checks(Mutex<Seen>);

impl Checks {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().expect("nobody panics while holding it")
    }

    /// Something that must not be.
    pub(crate) fn broken(&self, what: String) {
        sim::note(format_args!("VIOLATION {what}"));
        self.seen().violations.push(what);
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        self.seen().violations.clone()
    }

    /// Entries in all logs, and how often any replica applied one.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let seen = self.seen();
        (seen.entries, seen.applied)
    }

    pub(crate) fn is_broken(&self) -> bool {
        !self.seen().violations.is_empty()
    }

    /// A client was given a lease that ends, by its own count, at `ends`.
    pub(crate) fn lease(&self, region: RegionId, bytes: Range<u64>, ends: Duration) {
        let mut seen = self.seen();
        let now = sim::now();
        seen.leases.retain(|lease| lease.ends + QUARANTINE > now);
        seen.leases.push(Lease { region, bytes, ends });
    }

    /// What holds of every entry of every group.
    fn entry<S, C, O>(
        &self,
        step: &Step<'_, S, C, O>,
        hash: [u8; 32],
        checked: Result<(), Violation>,
        log_time: LogTime,
    ) {
        let (node, group, index, at) = (step.node, step.group, step.index.0, step.entry.at);
        sim::note(format_args!("{node} applies {index} of group {group} at {at}: {}", hex::encode(&hash[..8])));
        if let Err(violation) = checked {
            self.broken(format!("{node}, group {group}, entry {index}: {violation}"));
        }
        // Log time began at 0 with the world: faster than real time is further.
        if u128::from(at.0) > sim::now().as_millis() {
            self.broken(format!("Log time only creeps: group {group} is stamped {at} after {:?}", sim::now()));
        }
        let mut broken = Vec::new();
        {
            let mut seen = self.seen();
            seen.applied += 1;
            let first = *seen.states.entry((group, index)).or_insert(hash);
            if first != hash {
                broken.push(format!("equal states: {node} differs at entry {index} of group {group}"));
            }
            let last = seen.stamps.entry(group).or_insert((index, log_time));
            if index > last.0 {
                if log_time < last.1 {
                    broken.push(format!("Log time only creeps: group {group} went from {} to {log_time}", last.1));
                }
                *last = (index, log_time);
                seen.entries += 1;
            }
        }
        for what in broken {
            self.broken(what);
        }
    }

    fn published(&self, grant: GrantId, entry: &quarry_meta_state::shard::CommitEntry, outcome: CommitOutcome) {
        if matches!(
            outcome,
            Err(CommitRefusal::UnknownGrant { .. }
                | CommitRefusal::SlotTaken { .. }
                | CommitRefusal::NoSuchSlot { .. })
        ) {
            return;
        }
        let first = *self.seen().outcomes.entry((grant, entry.slot, entry.version)).or_insert(outcome);
        if first != outcome {
            let slot = entry.slot;
            self.broken(format!("Idempotent commits: {grant}, {slot} was {first:?} and is {outcome:?}"));
        }
    }

    /// *Fresh space*, from outside: a grant is new, or the one of this name; and no lease covers its memory, nor did one until a
    /// quarantine ago.
    fn granted(&self, grant: &Grant) {
        let mut broken = Vec::new();
        {
            let mut seen = self.seen();
            let named = |grant: &Grant| Grant { meta: quarry_wire::ids::NodeId(0), ..grant.clone() };
            if let Some(first) = seen.grants.get(&grant.id) {
                if *first != named(grant) {
                    broken.push(format!("Fresh space: {} was given twice, differently", grant.id));
                }
            } else {
                let now = sim::now();
                for lease in seen.leases.iter().filter(|lease| lease.ends + QUARANTINE > now) {
                    let covers = |holder: &quarry_wire::grant::GrantHolder| {
                        let span = grant.span(holder);
                        holder.region == lease.region && span.start < lease.bytes.end && lease.bytes.start < span.end
                    };
                    if grant.holders.iter().any(covers) {
                        broken.push(format!(
                            "Leases hold: {} is granted at {now:?} over {lease:?}, which has not rested for {QUARANTINE:?}",
                            grant.id
                        ));
                    }
                }
                seen.grants.insert(grant.id, named(grant));
            }
        }
        for what in broken {
            self.broken(what);
        }
    }
}

impl Observer for Checks {
    fn directory(&self, step: Step<'_, Directory, DirectoryCommand, DirectoryOutcome>) {
        let checked = step.after.check().and_then(|()| step.after.check_step(step.before));
        self.entry(&step, step.after.hash(), checked, step.after.log_time());
    }

    fn shard(&self, step: Step<'_, Shard, ShardCommand, ShardOutcome>) {
        let checked = step.after.check().and_then(|()| step.after.check_step(step.before));
        self.entry(&step, step.after.hash(), checked, step.after.log_time());
        for (command, outcome) in step.entry.commands.iter().zip(step.outcomes) {
            match (command, outcome) {
                (ShardCommand::Publish(publish), ShardOutcome::Publish(outcomes)) => {
                    for (entry, outcome) in publish.entries.iter().zip(outcomes) {
                        self.published(publish.grant, entry, *outcome);
                    }
                }
                (_, ShardOutcome::Grant(Ok(grant))) => self.granted(grant),
                _ => {}
            }
        }
    }
}
