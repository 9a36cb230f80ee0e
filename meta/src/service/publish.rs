//! Publish: signed batches become current versions.
//!
//! The leader checks what the machine cannot: signatures, the shard of each key, versions from the future. Keeps *Nothing unsigned*: an
//! attestation is proposed only if its signature chains to the root, for this generation, by the holder that it is about, over exactly the
//! leaves that follow from the entries and the grant.

use super::{control::key_of_shard, strange};
use crate::{
    core::{Core, HostedShard},
    door, metrics,
};
use quarry_meta_state::{
    Directory,
    shard::{
        self, Attested, CommitEntry, CommitOutcome, CommitRefusal, Covers, Mode, Publish, ShardCommand, ShardOutcome,
    },
};
use quarry_proto::{convert, refusal::Refusal, v1};
use quarry_wire::{
    attestation::AttestationBatch,
    grant::Grant,
    ids::{NamespaceId, SlotIndex, WriterId},
    keyring::TrustError,
    limits::{COMMIT_ENTRIES_MAX, COPIES_MAX, VERSION_AHEAD_MAX},
    merkle::Hash,
    signed::Signed,
    units::millis,
    version::{HybridClock, Version},
};
use std::time::Duration;
use tokio::time::Instant;

/// How long a certificate that is not known yet may take to arrive: the directory replica of this node may be a moment behind its leader.
const CERTIFICATE_LAG: Duration = Duration::from_secs(1);

pub(super) async fn publish(
    core: &Core,
    asked: v1::PublishRequest,
    deadline: Instant,
) -> Result<v1::PublishReply, Refusal> {
    let grant_id = convert::grant_id(asked.grant)?;
    let shard = core.shard(grant_id.shard)?;
    shard.hosted.leads()?;
    let writer = convert::writer_id(&asked.writer)?;
    let signed = statements(&asked.attested)?;
    if asked.entries.is_empty() {
        return Err(Refusal::malformed("entries", "at least one", "none"));
    }
    if asked.entries.len() > COMMIT_ENTRIES_MAX {
        return Err(door::too_large("entries", COMMIT_ENTRIES_MAX, asked.entries.len()));
    }
    // A grant that this leader does not know was never given or is forgotten: the machine says which outcome that has, entry by entry.
    let grant: Option<Grant> = shard.hosted.read(|state| state.grant(grant_id).map(|held| held.grant.clone()));
    if grant.as_ref().is_some_and(|grant| grant.writer != writer) {
        return Err(Refusal::Untrusted(v1::Untrusted { why: format!("{grant_id} belongs to another writer") }));
    }
    let namespace = grant.as_ref().map(|grant| grant.namespace);
    let entries = entries(core, shard, namespace, writer, asked.entries)?;
    let mut publish = Publish { grant: grant_id, entries, attested: Vec::with_capacity(signed.len()) };
    if let Some(grant) = &grant {
        for statement in signed {
            publish.attested.push(believe(core, grant, &publish, Covers::All, statement, deadline).await?);
        }
    }
    let count = publish.entries.len();
    let done = shard.hosted.propose(ShardCommand::Publish(publish), deadline).await?;
    match done.outcome {
        ShardOutcome::Publish(outcomes) if outcomes.len() == count => {
            let outcomes: Vec<_> = outcomes.into_iter().map(message).collect();
            metrics::committed(shard.id, &outcomes);
            Ok(v1::PublishReply { outcomes, applied_ms: done.at.0 })
        }
        other => Err(strange(&other)),
    }
}

fn statements(attested: &[bytes::Bytes]) -> Result<Vec<Signed<AttestationBatch>>, Refusal> {
    if attested.len() > COPIES_MAX {
        return Err(door::too_large("attested", COPIES_MAX, attested.len()));
    }
    attested.iter().map(|bytes| convert::signed(bytes)).collect()
}

fn entries(
    core: &Core,
    shard: &HostedShard,
    namespace: Option<NamespaceId>,
    writer: WriterId,
    messages: Vec<v1::CommitEntry>,
) -> Result<Vec<CommitEntry>, Refusal> {
    let wall_ms = core.config.wall.now_ms();
    let mut entries = Vec::with_capacity(messages.len());
    for message in messages {
        let key = match namespace {
            Some(namespace) => key_of_shard(core, shard, namespace, &message.key)?,
            None => convert::key(&message.key)?,
        };
        let clock = HybridClock(message.clock);
        let current = || namespace.and_then(|it| shard.hosted.read(|state| state.version(it, &key)));
        if clock.too_far_ahead(wall_ms, None) && clock.too_far_ahead(wall_ms, current().map(|version| version.clock)) {
            return Err(Refusal::VersionAhead(v1::VersionAhead {
                version_ms: clock.wall_ms(),
                wall_ms,
                limit_ms: millis(VERSION_AHEAD_MAX),
            }));
        }
        entries.push(CommitEntry {
            slot: SlotIndex(message.slot),
            version: Version { clock, writer },
            kind: convert::frame_kind(message.kind)?,
            payload_bytes: message.payload_bytes,
            payload_crc: message.payload_crc,
            mode: mode(message.mode)?,
            key,
        });
    }
    Ok(entries)
}

fn mode(message: Option<v1::PutMode>) -> Result<Mode, Refusal> {
    use v1::put_mode::Kind;
    let Some(message) = message else { return Ok(Mode::Create) };
    match Kind::try_from(message.kind) {
        Ok(Kind::Create) => Ok(Mode::Create),
        Ok(Kind::Replace) => Ok(Mode::Replace),
        Ok(Kind::Compare) => Ok(Mode::Compare { expected: message.expected.map(Version::try_from).transpose()? }),
        Err(_) => Err(Refusal::malformed("mode.kind", "create (0), replace (1) or compare (2)", message.kind)),
    }
}

/// The machine's form of a statement about those entries that it covers, if it is to be believed.
pub(crate) async fn believe(
    core: &Core,
    grant: &Grant,
    publish: &Publish,
    covers: Covers,
    statement: Signed<AttestationBatch>,
    deadline: Instant,
) -> Result<Attested, Refusal> {
    let untrusted = |why: String| Refusal::Untrusted(v1::Untrusted { why });
    let node = statement.statement.node;
    let Some(holder) = grant.holder(node) else {
        return Err(untrusted(format!("{node} is not a holder of {}", grant.id)));
    };
    let leaves = shard::leaves(grant, holder, &publish.entries, &covers).unwrap_or_default();
    let leaves: Vec<Hash> = leaves.into_iter().map(|(_, leaf)| leaf).collect();
    if leaves.is_empty() || AttestationBatch::of(node, &leaves) != statement.statement {
        return Err(untrusted(format!("{node} attests other copies than these entries under {}", grant.id)));
    }
    let Signed { generation, serial, signature, .. } = statement;
    verify(core, statement, deadline).await?;
    Ok(Attested { node, covers, generation, serial, signature })
}

/// Refuses a batch whose signature is not to be believed.
pub(super) async fn verify(core: &Core, statement: Signed<AttestationBatch>, deadline: Instant) -> Result<(), Refusal> {
    let untrusted = |error: TrustError| Refusal::Untrusted(v1::Untrusted { why: error.to_string() });
    let patience = deadline.min(Instant::now() + CERTIFICATE_LAG);
    let mut seen = core.directory.read(Directory::feed_position);
    loop {
        match core.keyring()?.verify(statement.clone()) {
            Ok(_) => return Ok(()),
            Err(error @ (TrustError::UnknownCertificate { .. } | TrustError::Generation { .. })) => {
                if !core.directory.wait_for(patience, |directory| directory.feed_position() > seen).await {
                    return Err(untrusted(error));
                }
                seen = core.directory.read(Directory::feed_position);
            }
            Err(error) => return Err(untrusted(error)),
        }
    }
}

fn message(outcome: CommitOutcome) -> v1::CommitOutcome {
    use v1::commit_outcome::Code;
    let of = |code: Code| v1::CommitOutcome { code: code.into(), ..Default::default() };
    let Err(refusal) = outcome else { return of(Code::Committed) };
    let reply = match refusal {
        CommitRefusal::Exists { current } => v1::CommitOutcome { version: Some(current.into()), ..of(Code::Exists) },
        CommitRefusal::StaleVersion { current } => {
            v1::CommitOutcome { version: Some(current.into()), ..of(Code::StaleVersion) }
        }
        CommitRefusal::CompareFailed { current } => {
            v1::CommitOutcome { version: current.map(Into::into), ..of(Code::CompareFailed) }
        }
        CommitRefusal::GrantExpired { expired_at, at } => {
            v1::CommitOutcome { a: expired_at.0, b: at.0, ..of(Code::GrantExpired) }
        }
        CommitRefusal::Sealed { fill } => v1::CommitOutcome { a: fill.0.into(), ..of(Code::Sealed) },
        CommitRefusal::NotEnoughHolders { needed, attested } => {
            v1::CommitOutcome { a: needed.into(), b: attested.into(), ..of(Code::NotEnoughHolders) }
        }
        CommitRefusal::UnknownGrant { .. } => of(Code::UnknownGrant),
        CommitRefusal::SlotTaken { version, .. } => {
            v1::CommitOutcome { version: Some(version.into()), ..of(Code::SlotTaken) }
        }
        CommitRefusal::NoSuchSlot { .. }
        | CommitRefusal::TooLarge { .. }
        | CommitRefusal::WrongShard { .. }
        | CommitRefusal::NotCurrent { .. }
        | CommitRefusal::Pinned
        | CommitRefusal::Purpose => of(Code::Malformed),
    };
    v1::CommitOutcome { detail: refusal.to_string(), ..reply }
}
