//! The feed: what the directory decided, brought to the shards; and extents, lent to the shards that want them.
//!
//! A shard's leader pulls from the directory replica of its own node, so it needs no leader of the directory. The directory's leader lends what
//! is unlent and takes back what shards gave back, as the shard replicas of its own node show it.

use crate::{
    door,
    hosted::{Hosted, OWN_PROPOSAL},
};
use futures::{
    future::join_all,
    stream::{FuturesUnordered, StreamExt as _},
};
use quarry_meta_state::{
    Directory, Shard,
    directory::{DirectoryCommand, DirectoryOutcome, FEED_SLICE_ENTRIES_MAX},
    shard::{ShardCommand, ShardOutcome},
};
use quarry_wire::ids::ShardId;
use std::sync::Arc;
use tokio::time::{Instant, sleep};

/// Extents lent or taken back in one go.
const LENDINGS_AT_ONCE: usize = 64;

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

/// Lends unlent extents and takes back returned ones while this node leads the directory. Ends with the directory.
pub(crate) async fn lend(directory: Arc<Hosted<Directory>>, shards: Vec<Arc<Hosted<Shard>>>) {
    let mut watch = directory.watch();
    let mut watches: Vec<_> = shards.iter().map(|shard| shard.watch()).collect();
    loop {
        watch.mark_unchanged();
        for watch in &mut watches {
            watch.mark_unchanged();
        }
        if directory.leads().is_ok() {
            let mut commands = returned(&directory, &shards);
            commands.extend(directory.read(|directory| directory.plan_lending(LENDINGS_AT_ONCE)));
            if !commands.is_empty() {
                if !all_taken(&directory, commands).await {
                    sleep(door::RETRY).await;
                }
                continue;
            }
        }
        let mut shard_changes: FuturesUnordered<_> = watches.iter_mut().map(|watch| watch.changed()).collect();
        tokio::select! {
            changed = watch.changed() => if changed.is_err() { return },
            Some(_) = shard_changes.next() => {}
        }
    }
}

/// What shards gave back and the directory does not show yet.
fn returned(directory: &Hosted<Directory>, shards: &[Arc<Hosted<Shard>>]) -> Vec<DirectoryCommand> {
    let mut commands = Vec::new();
    for hosted in shards {
        let shard = ShardId(hosted.id().0);
        let given: Vec<_> = hosted.read(|state| state.returned().collect());
        directory.read(|directory| {
            for (extent, lend) in given {
                if directory.lent(extent) == Some((shard, lend)) {
                    commands.push(DirectoryCommand::Returned { extent, shard, lend });
                }
            }
        });
    }
    commands.truncate(LENDINGS_AT_ONCE);
    commands
}

async fn all_taken(directory: &Hosted<Directory>, commands: Vec<DirectoryCommand>) -> bool {
    let deadline = Instant::now() + OWN_PROPOSAL;
    let outcomes = join_all(commands.into_iter().map(|command| directory.propose(command, deadline))).await;
    outcomes.into_iter().fold(true, |all, outcome| match outcome.map(|done| done.outcome) {
        Ok(DirectoryOutcome::Lend(Ok(_)) | DirectoryOutcome::Returned(Ok(()))) => all,
        Ok(other) => {
            tracing::debug!(outcome = ?other, "an extent was not lent or taken back");
            false
        }
        Err(refusal) => {
            tracing::debug!(%refusal, "an extent was not lent or taken back");
            false
        }
    })
}
