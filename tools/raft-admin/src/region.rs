//! `raft-admin region`: which regions there are and under which epoch they are read, and new read keys for them.

use crate::Ask;
use clap::Subcommand;
use comfy_table::{Table, presets};
use quarry::{
    exit::{Code, Failure, Format},
    regions::{self, Known, Regions},
    stdout::line,
};
use quarry_trust::Trust;
use serde_json::{Value, json};
use std::process::ExitCode;

#[derive(Subcommand, Debug)]
pub(crate) enum RegionCommand {
    /// All regions: their life, the epoch of their read key, where they are read.
    List(Ask),
    /// Give regions a new read key each. The old ones are dead when this ends well; readers go on with the new ones by themselves.
    Rotate {
        /// A data node, or one of its regions: NODE or NODE/REGION.
        #[arg(value_name = "NODE[/REGION]")]
        regions: Regions,
        /// The reason, for the data node's log.
        #[arg(long, value_name = "TEXT", default_value = "")]
        why: String,
        #[command(flatten)]
        ask: Ask,
    },
}

pub(crate) async fn run(command: RegionCommand, format: Format) -> Result<ExitCode, Failure> {
    match command {
        RegionCommand::List(ask) => list(&ask, format).await,
        RegionCommand::Rotate { regions, why, ask } => rotate(regions, &why, &ask, format).await,
    }
}

async fn list(ask: &Ask, format: Format) -> Result<ExitCode, Failure> {
    let (metas, trust) = crate::whom(ask)?;
    let known = known(ask, &trust, &metas).await?;
    line(match format {
        Format::Json => as_json(&known).to_string(),
        Format::Text => as_text(&known),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// A data node, which must be known.
pub(crate) fn data_node(known: &Known, node: u64) -> Result<&quarry_proto::v1::DataNodeInfo, Failure> {
    known.node(node).ok_or_else(|| {
        let found: Vec<String> = known.nodes.iter().map(|it| it.node.to_string()).collect();
        Failure::new(Code::NotFound, format!("there is no data node {node}, there are: {}", found.join(", ")))
    })
}

pub(crate) async fn known(ask: &Ask, trust: &Trust, metas: &[String]) -> Result<Known, Failure> {
    Ok(regions::known(trust, metas, ask.timeout).await?)
}

fn as_json(known: &Known) -> Value {
    let rows = known.records.iter().map(|it| {
        json!({
            "node": it.region.node.0,
            "region": it.region.index.0,
            "incarnation": format!("{}.{}", it.incarnation.0.generation.0, it.incarnation.0.number),
            "epoch": it.epoch.0,
            "length_bytes": it.length,
            "provider": it.provider,
            "reader": regions::reader_address(it),
            "alive": known.is_alive(it.region.node),
        })
    });
    json!({ "regions": rows.collect::<Value>() })
}

fn as_text(known: &Known) -> String {
    let mut table = Table::new();
    let header = ["region", "incarnation", "epoch", "size", "provider", "reader", "alive"];
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header);
    for it in &known.records {
        table.add_row(vec![
            format!("{}/{}", it.region.node.0, it.region.index.0),
            format!("{}.{}", it.incarnation.0.generation.0, it.incarnation.0.number),
            it.epoch.0.to_string(),
            format!("{} MiB", it.length >> 20),
            it.provider.clone(),
            regions::reader_address(it),
            known.is_alive(it.region.node).to_string(),
        ]);
    }
    table.to_string()
}

async fn rotate(regions: Regions, why: &str, ask: &Ask, format: Format) -> Result<ExitCode, Failure> {
    let (metas, trust) = crate::whom(ask)?;
    let known = known(ask, &trust, &metas).await?;
    let node = data_node(&known, regions.node)?;
    let of_node = || known.records.iter().map(|it| it.region).filter(|it| it.node.0 == regions.node);
    if let Some(index) = regions.index.filter(|index| !of_node().any(|it| it.index.0 == *index)) {
        let found: Vec<String> = of_node().map(|it| it.index.0.to_string()).collect();
        let what = format!("data node {} has no region {index}, but {}", regions.node, found.join(", "));
        return Err(Failure::new(Code::NotFound, what));
    }
    let answer = regions::rotate(&trust, node.node, &node.address, regions.index, why, ask.timeout).await;
    let rotated = answer?;
    let name = |it: &quarry_proto::v1::RegionEpoch| (it.region.unwrap_or_default(), it.incarnation.unwrap_or_default());
    line(match format {
        Format::Json => {
            let rows = rotated.regions.iter().map(|it| {
                let (region, life) = name(it);
                let incarnation = format!("{}.{}", life.generation, life.number);
                json!({ "node": region.node, "region": region.index, "incarnation": incarnation, "epoch": it.epoch })
            });
            json!({ "regions": rows.collect::<Value>() }).to_string()
        }
        Format::Text => {
            let rows = rotated.regions.iter().map(|it| {
                let (region, _) = name(it);
                format!("{}/{} is read in epoch {} now, all earlier keys are dead", region.node, region.index, it.epoch)
            });
            rows.collect::<Vec<_>>().join("\n")
        }
    })?;
    Ok(ExitCode::SUCCESS)
}
