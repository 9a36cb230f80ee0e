//! The reading half of the demo: in a process of its own, it makes the expected contents from the seed, reads every block and compares.

use super::{content, content::Content};
use crate::{
    cli::VerifyArgs,
    exit::Failure,
    values::{Extent, connect},
};
use quarry::stdout::line;
use quarry_client::Key;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// Bytes asked for in one call.
const CALL_BYTES: u64 = 64 << 20;

/// What the reader found, summed over its rounds.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Found {
    /// Blocks that were read and are what was written.
    pub(crate) good: u64,
    /// Blocks whose key is gone.
    pub(crate) missing: u64,
    /// Blocks that were read with other bytes than were written.
    pub(crate) different: u64,
    /// Blocks that could not be read.
    pub(crate) failed: u64,
    /// Bytes of the blocks that were read.
    pub(crate) bytes: u64,
    /// Time that the calls took; making the expected contents and comparing is not in it.
    pub(crate) seconds: f64,
    /// What went wrong first.
    pub(crate) first_problem: Option<String>,
}

/// Blocks per call.
pub(crate) fn per_call(size: u64) -> u32 {
    u32::try_from((CALL_BYTES / size.max(1)).clamp(1, 4096)).expect("at most 4096")
}

pub(crate) async fn run(args: &VerifyArgs) -> Result<(), Failure> {
    let client = connect(&args.namespace.connect, Extent::Series).await?;
    let namespace = client.namespace(&args.namespace.namespace).await?;
    let size = usize::try_from(args.size).map_err(Failure::error)?;
    let content = Content { seed: args.seed, size };
    let mut found = Found::default();
    let step = per_call(args.size);
    for round in &args.rounds {
        for first in (0..args.blocks).step_by(step as usize) {
            let blocks: Vec<u32> = (first..args.blocks.min(first.saturating_add(step))).collect();
            let keys: Vec<Key> = blocks.iter().map(|block| content::key(*round, *block)).collect();
            let begun = Instant::now();
            let results = namespace.get_many(&keys).await;
            found.seconds += begun.elapsed().as_secs_f64();
            for ((block, key), result) in blocks.into_iter().zip(&keys).zip(results) {
                let problem = match result {
                    Ok(Some(value)) => {
                        found.bytes += value.bytes.len() as u64;
                        if value.bytes == content.of(*round, block) {
                            found.good += 1;
                            continue;
                        }
                        found.different += 1;
                        "holds other bytes than were written".to_owned()
                    }
                    Ok(None) => {
                        found.missing += 1;
                        "is gone".to_owned()
                    }
                    Err(wrong) => {
                        found.failed += 1;
                        wrong.to_string()
                    }
                };
                found.first_problem.get_or_insert_with(|| format!("{key}: {problem}"));
            }
        }
    }
    line(serde_json::to_string(&found).map_err(Failure::error)?)?;
    client.close().await.map_err(Failure::error)
}
