//! `raft-admin recover`: one meta node goes on alone, after a majority of them was lost for good.

use crate::snapshot::{failed, tell};
use clap::Args;
use comfy_table::{Table, presets};
use quarry::{
    exit::{Failure, Format},
    stderr,
    stdout::line,
};
use quarry_meta::rescue::{FoundGroup, Place, Survivor};
use quarry_wire::ids::{Generation, NodeId};
use serde_json::{Value, json};
use std::{io, path::PathBuf, process::ExitCode};

#[derive(Args, Debug)]
pub(crate) struct Recover {
    /// Says that the node is stopped, and that the others will not come back.
    #[arg(long, required = true)]
    offline: bool,
    /// The data folder of the node.
    #[arg(long, value_name = "FOLDER")]
    dir: PathBuf,
    /// The node whose folder it is: the only member of all groups from here on.
    #[arg(long, value_name = "NODE")]
    keep_node: u64,
    /// The UUID of the cluster, instead of typing it when asked.
    #[arg(long, value_name = "UUID")]
    confirm: Option<String>,
    /// Only say what the folder holds.
    #[arg(long, conflicts_with = "confirm")]
    look: bool,
    /// The generation that begins, if the one after the node's was used already: it must be higher than any that the cluster ever was in.
    #[arg(long, value_name = "NUMBER")]
    generation: Option<u32>,
}

pub(crate) fn run(asked: &Recover, format: Format) -> Result<ExitCode, Failure> {
    let survivor = Survivor::open(&asked.dir, NodeId(asked.keep_node)).map_err(failed)?;
    let groups = survivor.groups().map_err(failed)?;
    let cluster = survivor.cluster().to_string();
    let found = survivor.generation();
    if asked.look || format == Format::Text {
        line(match format {
            Format::Json => json!({
                "cluster": cluster,
                "node": asked.keep_node,
                "generation": found.map(|it| it.0),
                "groups": groups.iter().map(of_group).collect::<Value>(),
            })
            .to_string(),
            Format::Text => match found {
                None => "a recovery of this folder only has to be finished".to_owned(),
                Some(generation) => {
                    format!(
                        "node {} of cluster {cluster}, generation {}\n{}",
                        asked.keep_node,
                        generation.0,
                        table(&groups)
                    )
                }
            },
        })?;
    }
    if asked.look {
        return Ok(ExitCode::SUCCESS);
    }
    confirmed(asked, &cluster)?;
    let begun = survivor.recover(asked.generation.map(Generation)).map_err(failed)?;
    tell(&begun, asked.keep_node, &asked.dir, format)
}

/// Everything that only the other nodes had is given up: nobody does that by a slip of the hand.
fn confirmed(asked: &Recover, cluster: &str) -> Result<(), Failure> {
    let typed = match &asked.confirm {
        Some(typed) => typed.clone(),
        None => {
            stderr::line(format_args!(
                "Node {} will be the only meta node. What it does not hold is given up, and no other node of before is heard again.\n\
                 Do this on one node only. Type the UUID of the cluster to go on:",
                asked.keep_node
            ));
            let mut typed = String::new();
            io::stdin().read_line(&mut typed)?;
            typed.trim().to_owned()
        }
    };
    if typed == cluster {
        return Ok(());
    }
    let wrong = format!("not confirmed: expected the cluster's UUID {cluster}, found {typed:?}; nothing was changed");
    Err(Failure::usage(wrong))
}

fn of_group(it: &FoundGroup) -> Value {
    let place = |place: Option<Place>| place.map(|it| json!({ "term": it.term.0, "index": it.index.0 }));
    json!({
        "group": it.group.0,
        "last": place(it.last),
        "committed": place(it.committed),
        "snapshot": place(it.snapshot),
        "vote": it.vote.map(|vote| json!({ "term": vote.term.0, "node": vote.node.0, "committed": vote.committed })),
        "members": it.members.iter().map(|(id, member)| json!({ "node": id.0, "address": member.addr, "voter": member.voter })).collect::<Value>(),
    })
}

fn table(groups: &[FoundGroup]) -> String {
    let place = |place: Option<Place>| place.map_or_else(|| "-".to_owned(), |it| format!("{}.{}", it.term, it.index));
    let mut table = Table::new();
    let head = ["group", "last log", "committed", "snapshot", "vote", "members"];
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(head);
    for it in groups {
        let vote = it.vote.map_or_else(|| "-".to_owned(), |vote| format!("{} in term {}", vote.node, vote.term));
        let members: Vec<String> = it.members.keys().map(ToString::to_string).collect();
        table.add_row([
            it.group.to_string(),
            place(it.last),
            place(it.committed),
            place(it.snapshot),
            vote,
            members.join(" "),
        ]);
    }
    table.to_string()
}
