//! The feed: what the directory decided, brought to the shards.
//!
//! A shard's leader pulls from the directory replica of its own node, so it needs no leader of the directory.

use crate::{
    door,
    hosted::{Hosted, OWN_PROPOSAL},
};
use quarry_meta_state::{
    Directory, Shard,
    directory::FEED_SLICE_ENTRIES_MAX,
    shard::{ShardCommand, ShardOutcome},
};
use std::sync::Arc;
use tokio::time::{Instant, sleep};

/// Keeps a shard up to date while this node leads it. Ends with either group.
pub(crate) async fn follow(directory: Arc<Hosted<Directory>>, shard: Arc<Hosted<Shard>>) {
    let (mut source, mut sink) = (directory.watch(), shard.watch());
    loop {
        source.mark_unchanged();
        sink.mark_unchanged();
        let behind = shard.leads().ok().and_then(|_| {
            let position = shard.read(Shard::feed_position);
            directory.read(|directory| {
                (directory.feed_position() > position).then(|| directory.feed_since(position, FEED_SLICE_ENTRIES_MAX))
            })
        });
        if let Some(slice) = behind {
            let deadline = Instant::now() + OWN_PROPOSAL;
            match shard.propose(ShardCommand::ApplyFeed(slice), deadline).await.map(|done| done.outcome) {
                Ok(ShardOutcome::Feed(Ok(_))) => continue,
                Ok(other) => tracing::warn!(group = %shard.id(), outcome = ?other, "the feed was not applied"),
                Err(refusal) => tracing::debug!(group = %shard.id(), %refusal, "the feed was not applied"),
            }
            sleep(door::RETRY).await;
            continue;
        }
        tokio::select! {
            changed = source.changed() => if changed.is_err() { return },
            changed = sink.changed() => if changed.is_err() { return },
        }
    }
}
