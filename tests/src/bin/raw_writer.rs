//! A writer by hand that takes one order per line and answers each: the victim of the suites `faults` and `abuse`.

use quarry_fabric::OperationError;
use quarry_proto::v1::commit_outcome::Code;
use quarry_tests::{
    raw::{Armed, Framed, Granted, RawWriter, Wish},
    seed::pattern,
};
use quarry_wire::ids::{NamespaceId, NodeId};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    io::{BufRead as _, Write as _},
    path::Path,
    time::Duration,
};

/// Longest time for a write that is stopped and continued.
const LONG: Duration = Duration::from_secs(120);

#[tokio::main(flavor = "current_thread")]
async fn main() {
    // The test's process group may be gone when this one wakes up again: its end ends this one too.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .expect("a process may wish to die with its parent");
    let cluster_file = std::env::args().nth(1).expect("the cluster file is the first argument");
    let mut raw = RawWriter::connect(Path::new(&cluster_file)).await;
    let mut granted: Option<Granted> = None;
    let mut armed: BTreeMap<NodeId, Armed> = BTreeMap::new();
    let mut written: Option<Framed> = None;
    say(&json!({"said": "ready"}));
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("orders can be read");
        let order: Value = serde_json::from_str(&line).expect("orders are JSON");
        let number = |name: &str| order[name].as_u64().unwrap_or_else(|| panic!("{name} is missing in {order}"));
        let small = |name: &str| u32::try_from(number(name)).expect("it is a small number");
        match order["do"].as_str() {
            Some("grant") => {
                let wish = Wish {
                    namespace: NamespaceId(small("namespace")),
                    slot_size: small("slot_size"),
                    slots: small("slots"),
                    ttl: Duration::from_millis(number("ttl_ms")),
                    avoid: Vec::new(),
                };
                let new = raw.grant(&wish).await.expect("there is space for the grant");
                let holders: Vec<Value> = new.grant.holders.iter().map(|holder| {
                    json!({"node": holder.region.node.0, "base": holder.base.0, "region": holder.region.index.0})
                }).collect();
                let sequence = new.grant.id.sequence;
                say(&json!({
                    "said": "granted",
                    "writer": raw.id.to_string(),
                    "generation": sequence.generation.0,
                    "sequence": sequence.number,
                    "holders": holders,
                }));
                granted = Some(new);
            }
            Some("arm") => {
                armed = raw.arm_all(granted.as_ref().expect("it has a grant")).await;
                for armed in armed.values() {
                    raw.write(armed, 0, &[0]).await.expect("an armed slab can be written");
                }
                say(&json!({"said": "armed"}));
            }
            Some("write") => {
                let granted = granted.as_ref().expect("it has a grant");
                let armed = &armed[&NodeId(number("node"))];
                let length = usize::try_from(granted.grant.slab_bytes()).expect("a slab fits in memory");
                let bytes = vec![u8::try_from(number("byte")).expect("it is a byte"); length];
                say(&json!({"said": "writing"}));
                let result = raw.write_to(&armed.lane, armed.key, armed.base, &bytes, LONG).await;
                let (ok, why) = match &result {
                    Ok(()) => (true, String::new()),
                    Err(wrong) => (false, kind(wrong).to_owned()),
                };
                say(&json!({"said": "written", "ok": ok, "why": why}));
            }
            Some("value") => {
                let granted = granted.as_ref().expect("it has a grant");
                let payload = pattern(number("seed"), usize::try_from(number("bytes")).expect("it fits in memory"));
                let key = order["key"].as_str().expect("it names a key");
                let frame = raw.frame(granted, 0, key, &payload);
                raw.write_frame(granted, &armed, &frame).await;
                written = Some(frame);
                say(&json!({"said": "value"}));
            }
            Some("commit") => {
                let granted = granted.as_ref().expect("it has a grant");
                let entry = written.as_ref().expect("a value is written").entry.clone();
                say(&json!({"said": "committing"}));
                let outcomes = raw.commit(NodeId(number("node")), granted, armed.keys().copied(), vec![entry]).await;
                let code = outcomes.expect("the holder answers")[0].code();
                say(&json!({"said": "committed", "ok": code == Code::Committed}));
            }
            other => panic!("unknown order {other:?}"),
        }
    }
}

fn say(what: &Value) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{what}").and_then(|()| out.flush()).expect("the test listens");
}

const fn kind(error: &OperationError) -> &'static str {
    match error {
        OperationError::Deadline => "deadline",
        OperationError::NotStarted => "not started",
        OperationError::Closed => "closed",
        OperationError::Failed { .. } => "failed",
        _ => "invalid",
    }
}
