//! `raft-admin hash`: whether all meta nodes have the same state at the same place of each log.
//!
//! What the answers mean is a pure function ([`compare`]). Logs move on while nodes are asked, so all are asked for the same index a little
//! ahead, further ahead each time, until every node answered for the same one.

use crate::Ask;
use clap::Args;
use comfy_table::{Table, presets};
use quarry::{
    admin::{self, CallError},
    exit::{Code, Failure, Format},
    stdout::line,
};
use quarry_proto::v1;
use quarry_trust::Trust;
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    process::ExitCode,
    time::Duration,
};

/// How far ahead of the furthest node the first index lies, and how much further each next one.
const AHEAD: u64 = 32;
const FURTHER: u64 = 4;
/// How often it is tried.
const ROUNDS: u32 = 6;
/// How long a node waits for an index before it answers for where it is: all do so when nothing is written.
const WAIT: Duration = Duration::from_secs(2);

#[derive(Args, Debug)]
pub(crate) struct Hash {
    /// Only this group; 0 is the directory.
    #[arg(long, value_name = "GROUP")]
    group: Option<u32>,
    #[command(flatten)]
    ask: Ask,
}

/// What one node said of one group.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Seen {
    node: u64,
    applied: u64,
    hash: Vec<u8>,
}

/// What the answers for one group mean together.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Verdict {
    /// All have this state at this index.
    Same { applied: u64, hash: Vec<u8> },
    /// At this index there are two states or more; the nodes that have each, most of them first.
    Differs { applied: u64, states: Vec<(Vec<u8>, BTreeSet<u64>)> },
    /// The nodes were at different indices, the furthest at this one.
    Apart { furthest: u64 },
}

/// One difference at one index is enough, wherever the others are.
fn compare(seen: &[Seen]) -> Verdict {
    let mut places: BTreeMap<u64, BTreeMap<&[u8], BTreeSet<u64>>> = BTreeMap::new();
    for it in seen {
        places.entry(it.applied).or_default().entry(&it.hash).or_default().insert(it.node);
    }
    if let Some((applied, states)) = places.iter().find(|(_, states)| states.len() > 1) {
        let mut states: Vec<_> = states.iter().map(|(hash, nodes)| (hash.to_vec(), nodes.clone())).collect();
        states.sort_by_key(|(_, nodes)| std::cmp::Reverse(nodes.len()));
        return Verdict::Differs { applied: *applied, states };
    }
    match places.pop_last() {
        Some((applied, states)) if places.is_empty() => {
            let hash = states.keys().next().map(|hash| hash.to_vec()).unwrap_or_default();
            Verdict::Same { applied, hash }
        }
        last => Verdict::Apart { furthest: last.map_or(0, |(applied, _)| applied) },
    }
}

/// The nodes to look at: all but those of the one state that most have.
fn strangers(states: &[(Vec<u8>, BTreeSet<u64>)]) -> BTreeSet<u64> {
    let most = states.first().map_or(0, |(_, nodes)| nodes.len());
    let clear = states.get(1).is_none_or(|(_, nodes)| nodes.len() < most);
    states.iter().skip(usize::from(clear)).flat_map(|(_, nodes)| nodes.iter().copied()).collect()
}

pub(crate) async fn run(asked: Hash, format: Format) -> Result<ExitCode, Failure> {
    let (metas, trust) = crate::present(&asked.ask).await?;
    let limit = asked.ask.timeout.max(WAIT);
    if let Some(group) = asked.group {
        let answers = admin::status_all(&trust, &metas, admin::LOOK.min(limit)).await;
        let mut heard = answers.iter().filter_map(|answer| answer.as_ref().ok()).peekable();
        if heard.peek().is_some() && !heard.any(|reply| reply.groups.iter().any(|it| it.group == group)) {
            return Err(Failure::new(Code::NotFound, format!("there is no group {group}")));
        }
    }
    let mut at: Vec<v1::GroupIndex> = asked.group.map(|group| v1::GroupIndex { group, index: 0 }).into_iter().collect();
    let mut verdicts: BTreeMap<u32, Verdict> = BTreeMap::new();
    let mut ahead = AHEAD;
    let mut missing = Vec::new();
    for _ in 0..ROUNDS {
        let mut seen: BTreeMap<u32, Vec<Seen>> = BTreeMap::new();
        missing.clear();
        let answers = ask_all(&trust, &metas, &at, limit).await;
        if let Some(Err(wrong)) = answers.iter().find(|it| matches!(it, Err(wrong) if !wrong.is_passing())) {
            return Err(wrong.clone().into());
        }
        for answer in answers {
            match answer {
                Err(wrong) => missing.push(wrong.to_string()),
                Ok(reply) => {
                    for it in reply.groups {
                        let one = Seen { node: reply.node, applied: it.applied, hash: it.hash.to_vec() };
                        seen.entry(it.group).or_default().push(one);
                    }
                }
            }
        }
        verdicts.extend(seen.iter().map(|(group, seen)| (*group, compare(seen))));
        let apart = verdicts.iter().filter_map(|(group, verdict)| match verdict {
            Verdict::Apart { furthest } => Some(v1::GroupIndex { group: *group, index: furthest + ahead }),
            Verdict::Same { .. } | Verdict::Differs { .. } => None,
        });
        at = apart.collect();
        if at.is_empty() || seen.is_empty() {
            break;
        }
        ahead *= FURTHER;
    }
    tell(&verdicts, &missing, format)
}

async fn ask_all(
    trust: &Trust,
    metas: &[String],
    at: &[v1::GroupIndex],
    limit: Duration,
) -> Vec<Result<v1::StateHashReply, CallError>> {
    let asked: Vec<_> = metas
        .iter()
        .map(|address| {
            let (trust, address, at) = (trust.clone(), address.clone(), at.to_vec());
            tokio::spawn(async move { admin::state_hash(&trust, &address, at, limit).await })
        })
        .collect();
    let mut answers = Vec::with_capacity(asked.len());
    for task in asked {
        answers.push(task.await.expect("asking for hashes does not panic"));
    }
    answers
}

fn tell(verdicts: &BTreeMap<u32, Verdict>, missing: &[String], format: Format) -> Result<ExitCode, Failure> {
    line(match format {
        Format::Json => json!({
            "groups": verdicts.iter().map(|(group, verdict)| of_verdict(*group, verdict)).collect::<Value>(),
            "missing": missing,
        })
        .to_string(),
        Format::Text => {
            let mut table = Table::new();
            table.load_style(presets::UTF8_FULL_CONDENSED).set_header(["group", "applied", "states", "verdict"]);
            for (group, verdict) in verdicts {
                let [applied, states, said] = words(verdict);
                table.add_row([group.to_string(), applied, states, said]);
            }
            missing.iter().fold(table.to_string(), |text, why| format!("{text}\nnot compared: {why}"))
        }
    })?;
    if verdicts.values().any(|it| matches!(it, Verdict::Differs { .. })) {
        // The answer was told: nodes and groups are named there.
        return Ok(Code::Error.into());
    }
    let whole = !verdicts.is_empty() && verdicts.values().all(|it| matches!(it, Verdict::Same { .. }));
    Ok(if whole && missing.is_empty() { ExitCode::SUCCESS } else { Code::Unavailable.into() })
}

fn words(verdict: &Verdict) -> [String; 3] {
    let short = |hash: &[u8]| hex::encode(&hash[..hash.len().min(8)]);
    match verdict {
        Verdict::Same { applied, hash } => [applied.to_string(), short(hash), "the same on all".to_owned()],
        Verdict::Differs { applied, states } => {
            let of = |(hash, nodes): &(Vec<u8>, BTreeSet<u64>)| format!("{} on {nodes:?}", short(hash));
            let states_said = states.iter().map(of).collect::<Vec<_>>().join(", ");
            [applied.to_string(), states_said, format!("DIFFERS: look at {:?}", strangers(states))]
        }
        Verdict::Apart { furthest } => {
            [furthest.to_string(), "-".to_owned(), "not compared: the log moves on too fast, ask again".to_owned()]
        }
    }
}

fn of_verdict(group: u32, verdict: &Verdict) -> Value {
    match verdict {
        Verdict::Same { applied, hash } => {
            json!({ "group": group, "verdict": "same", "applied": applied, "hash": hex::encode(hash) })
        }
        Verdict::Differs { applied, states } => json!({
            "group": group,
            "verdict": "differs",
            "applied": applied,
            "states": states.iter().map(|(hash, nodes)| json!({ "hash": hex::encode(hash), "nodes": nodes })).collect::<Value>(),
            "look_at": strangers(states),
        }),
        Verdict::Apart { furthest } => json!({ "group": group, "verdict": "apart", "applied": furthest }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_meta_state::{
        Directory,
        directory::{Cluster, DirectoryCommand},
    };
    use quarry_wire::{
        ids::{ClusterUuid, Generation},
        signed::SecretKey,
        units::LogTime,
    };

    /// A replica that applied these stamps.
    fn replica(node: u64, stamps: &[u64]) -> Seen {
        let mut state = Directory::new();
        let root = SecretKey::from_seed(&[1; 32]).public();
        let cluster = Cluster { uuid: ClusterUuid([7; 16]), generation: Generation(1), shards: 1, root };
        state.apply(LogTime(0), DirectoryCommand::InitCluster(cluster));
        for at in stamps {
            state.apply(LogTime(*at), DirectoryCommand::Tick);
        }
        Seen { node, applied: stamps.len() as u64, hash: state.hash().to_vec() }
    }

    #[test]
    fn equal_replicas_at_one_index_are_the_same() {
        let seen = [replica(1, &[5, 6]), replica(2, &[5, 6]), replica(3, &[5, 6])];
        assert_eq!(compare(&seen), Verdict::Same { applied: 2, hash: seen[0].hash.clone() });
    }

    #[test]
    fn a_replica_that_went_its_own_way_is_named() {
        // The second applied another command at the same place.
        let seen = [replica(1, &[5, 6]), replica(2, &[5, 9]), replica(3, &[5, 6])];
        let Verdict::Differs { applied, states } = compare(&seen) else { panic!("they differ") };
        assert_eq!((applied, strangers(&states)), (2, BTreeSet::from([2])));
        let said = words(&Verdict::Differs { applied, states });
        assert_eq!(said[2], "DIFFERS: look at {2}");
        // It is found also while another node is elsewhere; of two alone, nobody knows which one is wrong.
        let seen = [replica(1, &[5]), replica(2, &[5, 9]), replica(3, &[5, 6])];
        let Verdict::Differs { states, .. } = compare(&seen) else { panic!("they differ") };
        assert_eq!(strangers(&states), BTreeSet::from([2, 3]));
    }

    #[test]
    fn replicas_at_different_indices_say_nothing_of_each_other() {
        let seen = [replica(1, &[5, 6]), replica(2, &[5]), replica(3, &[5])];
        assert_eq!(compare(&seen), Verdict::Apart { furthest: 2 });
        assert_eq!(compare(&[]), Verdict::Apart { furthest: 0 });
    }
}
