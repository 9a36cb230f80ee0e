//! Saving a backup of a running cluster: all groups into one file, the shards first and the directory last (`quarry_meta::backup` says why).
//!
//! Each group's state comes from its leader, with all that was acknowledged before; or, stale, from any node that answers. A node that fails in
//! the middle is taken back and another one asked, until the deadline.

use crate::admin::{CallError, LOOK, call, silent};
use quarry_meta::backup::{BackupError, BackupWriter, Manifest, Origin, PartHead};
use quarry_proto::{convert::required, refusal::Refusal, v1};
use quarry_trust::{Expect, Trust};
use quarry_wire::{ids::ClusterUuid, limits::MESSAGE_BYTES_MAX, signed::PublicKey};
use std::{collections::BTreeSet, path::Path, time::Duration};
use tokio::time::{Instant, sleep, timeout};
use tonic::Streaming;

/// How long a node may take before it begins to send a state, and between two parts of it.
const PART_DEADLINE: Duration = Duration::from_secs(60);
/// Between two rounds of asking all nodes.
const PAUSE: Duration = Duration::from_millis(200);

/// Why there is no backup.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// No node sent the state of a group before the deadline; what the last one said.
    #[error("group {group} was not saved within {}: {last}", humantime::format_duration(*after))]
    Deadline {
        /// The group.
        group: u32,
        /// How long was tried.
        after: Duration,
        /// What was wrong last.
        last: String,
    },
    /// A node refused.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The nodes are of two clusters, or of two generations of one.
    #[error("{address} sent the state of {found}, the others are of {expected}: name the meta nodes of one cluster")]
    Mixed {
        /// The node.
        address: String,
        /// Cluster and generation of the first state.
        expected: String,
        /// Cluster and generation of this one.
        found: String,
    },
    /// The file.
    #[error(transparent)]
    Backup(#[from] BackupError),
}

impl SaveError {
    /// Whether the same may work a little later.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Deadline { .. } => true,
            Self::Call(wrong) => wrong.is_passing(),
            Self::Mixed { .. } | Self::Backup(_) => false,
        }
    }
}

/// Saves all groups of the cluster behind `metas` into a new file.
///
/// # Errors
/// [`SaveError`]; nothing is left behind then.
pub async fn save(
    trust: &Trust,
    metas: &[String],
    place: &Path,
    stale: bool,
    deadline: Duration,
) -> Result<Manifest, SaveError> {
    let writer = BackupWriter::create(place)?;
    let silent = silent(trust, metas, deadline).await;
    let until = Instant::now() + deadline;
    let mut saving = Saving { trust, stale, writer, origin: None, first: 0, silent };
    // The first answer says how many shards there are.
    let mut shards = 1;
    let mut group = 1;
    while group <= shards {
        shards = saving.group(metas, group, until, deadline).await?.shards;
        group += 1;
    }
    let origin = saving.group(metas, 0, until, deadline).await?;
    Ok(saving.writer.finish(origin)?)
}

struct Saving<'a> {
    trust: &'a Trust,
    stale: bool,
    writer: BackupWriter,
    origin: Option<Origin>,
    /// Which node is asked first: the one that answered last.
    first: usize,
    /// Those that did not answer when they were asked last: the others are asked before them, and they are not waited for long.
    silent: BTreeSet<String>,
}

/// Why one node's state was not taken.
enum Failed {
    /// Another node, or the same a little later, may do.
    Passing(String),
    Final(SaveError),
}

impl Saving<'_> {
    async fn group(
        &mut self,
        metas: &[String],
        group: u32,
        until: Instant,
        after: Duration,
    ) -> Result<Origin, SaveError> {
        let mut last = "no meta node is named".to_owned();
        loop {
            let mut turns: Vec<usize> = (0..metas.len()).map(|turn| (self.first + turn) % metas.len()).collect();
            turns.sort_by_key(|index| self.silent.contains(&metas[*index]));
            for index in turns {
                match self.from(&metas[index], group).await {
                    Ok(origin) => {
                        self.first = index;
                        return Ok(origin);
                    }
                    Err(Failed::Final(wrong)) => return Err(wrong),
                    Err(Failed::Passing(why)) => last = why,
                }
                self.writer.take_back()?;
            }
            if Instant::now() >= until {
                return Err(SaveError::Deadline { group, after, last });
            }
            sleep(PAUSE).await;
        }
    }

    async fn from(&mut self, address: &str, group: u32) -> Result<Origin, Failed> {
        let request = v1::SaveGroupRequest { group, stale: self.stale };
        let patience = if self.silent.contains(address) { LOOK } else { PART_DEADLINE };
        let parts = call(self.trust, Expect::META, address, patience, |calls| async {
            let admin = v1::admin_client::AdminClient::new(calls);
            admin.max_decoding_message_size(MESSAGE_BYTES_MAX).save_group(request).await
        });
        let parts = parts.await;
        if matches!(parts, Err(CallError::Unreachable { .. } | CallError::Deadline { .. })) {
            self.silent.insert(address.to_owned());
        } else {
            self.silent.remove(address);
        }
        let mut parts = parts.map_err(|wrong| {
            if wrong.is_passing() { Failed::Passing(wrong.to_string()) } else { Failed::Final(wrong.into()) }
        })?;
        let passing = |why: String| Failed::Passing(format!("{address}: {why}"));
        let first = next(&mut parts).await.map_err(passing)?;
        let head = first.head.clone().ok_or_else(|| passing("a state begins with its head".to_owned()))?;
        let origin = origin_of(&head).map_err(|refusal| passing(refusal.to_string()))?;
        let name = |it: &Origin| format!("generation {} of {}", it.generation, it.cluster);
        match &self.origin {
            Some(before) if (name(before), before.shards) != (name(&origin), origin.shards) => {
                let (expected, found) = (name(before), name(&origin));
                return Err(Failed::Final(SaveError::Mixed { address: address.to_owned(), expected, found }));
            }
            Some(_) => {}
            None => self.origin = Some(origin.clone()),
        }
        let broken = |wrong: BackupError| Failed::Final(wrong.into());
        self.writer.begin(PartHead {
            group,
            term: head.term,
            applied: head.applied,
            log_time_ms: head.log_time_ms,
            feed: required("feed", head.feed).map_err(|refusal| passing(refusal.to_string()))?.into(),
        });
        let (mut part, mut bytes) = (first, 0);
        while part.digest.is_empty() {
            if crc32c::crc32c(&part.chunk) != part.crc {
                return Err(passing(format!("the bytes at {bytes} were damaged on their way")));
            }
            bytes += part.chunk.len() as u64;
            self.writer.write(&part.chunk).map_err(broken)?;
            part = next(&mut parts).await.map_err(passing)?;
        }
        if bytes != head.length {
            return Err(passing(format!("expected {} bytes, found {bytes}", head.length)));
        }
        let found = self.writer.end();
        if found != hex::encode(&part.digest) {
            // What was sent whole and does not fit its digest is no passing thing.
            let why = format!("{address}: the state of group {group} does not fit its digest");
            return Err(Failed::Final(BackupError::Mixed { why }.into()));
        }
        Ok(origin)
    }
}

async fn next(parts: &mut Streaming<v1::SavedPart>) -> Result<v1::SavedPart, String> {
    match timeout(PART_DEADLINE, parts.message()).await {
        Ok(Ok(Some(part))) => Ok(part),
        Ok(Ok(None)) => Err("the state ended too early".to_owned()),
        Ok(Err(status)) => Err(status.to_string()),
        Err(_) => Err(format!("nothing came for {PART_DEADLINE:?}")),
    }
}

fn origin_of(head: &v1::SavedHead) -> Result<Origin, Refusal> {
    Ok(Origin {
        cluster: ClusterUuid(quarry_proto::convert::array("cluster", &head.cluster)?).to_string(),
        root: PublicKey(quarry_proto::convert::array("root", &head.root)?).to_string(),
        generation: head.generation,
        shards: head.shards,
        build: head.build.clone(),
    })
}
