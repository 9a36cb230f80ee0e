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
use futures::future::{Either, join_all};
use quarry_meta_state::{
    Directory,
    shard::{
        self, Attested, CommitEntry, CommitOutcome, CommitRefusal, Covers, Mode, Publish, ShardCommand, ShardOutcome,
    },
};
use quarry_proto::{
    call_id::CallId,
    convert,
    refusal::Refusal,
    telemetry,
    v1::{self, publish_answer::Answer},
};
use quarry_wire::{
    attestation::AttestationBatch,
    grant::Grant,
    ids::{NamespaceId, SlotIndex, WriterId},
    keyring::TrustError,
    limits::{COMMIT_ENTRIES_MAX, COPIES_MAX, PUBLISHES_TOGETHER_MAX, VERSION_AHEAD_MAX},
    merkle::Hash,
    signed::Signed,
    units::millis,
    version::{HybridClock, Version},
};
use std::time::Duration;
use tokio::time::Instant;
use tracing::{Instrument as _, error_span};

/// How long a certificate that is not known yet may take to arrive: the directory replica of this node may be a moment behind its leader.
const CERTIFICATE_LAG: Duration = Duration::from_secs(1);

/// Publishes what is asked for: one batch, or several that share the call.
pub(super) async fn publish(
    core: &Core,
    mut asked: v1::PublishRequest,
    deadline: Instant,
) -> Result<v1::PublishReply, Refusal> {
    let together = std::mem::take(&mut asked.together);
    if together.is_empty() {
        let answer = publish_all(core, vec![asked], deadline).await?.pop();
        return answer.expect("one is asked for and one answered");
    }
    if asked != v1::PublishRequest::default() {
        return Err(Refusal::malformed("together", "a call in which everything else is empty", "a publish beside it"));
    }
    if together.len() > PUBLISHES_TOGETHER_MAX {
        return Err(door::too_large("together", PUBLISHES_TOGETHER_MAX, together.len()));
    }
    // All of them are hashed before anybody else has a turn.
    let entries = together.iter().map(|publish| publish.entries.len()).sum();
    if entries > COMMIT_ENTRIES_MAX {
        return Err(door::too_large("entries of publishes in one call", COMMIT_ENTRIES_MAX, entries));
    }
    let answers = publish_all(core, together, deadline).await?;
    let together = answers.into_iter().map(|answer| v1::PublishAnswer {
        answer: Some(match answer {
            Ok(reply) => Answer::Reply(reply),
            Err(refusal) => Answer::Refusal(v1::Refusal { kind: Some(refusal) }),
        }),
    });
    Ok(v1::PublishReply { together: together.collect(), ..Default::default() })
}

/// Publishes batches that came together. Their signatures are checked together; each then goes its own way, and one that is refused or has to
/// wait changes nothing for the others but when they are answered.
async fn publish_all(
    core: &Core,
    asked: Vec<v1::PublishRequest>,
    deadline: Instant,
) -> Result<Vec<Result<v1::PublishReply, Refusal>>, Refusal> {
    let alone = asked.len() == 1;
    let ids: Vec<_> = asked.iter().map(|asked| CallId::parse(asked.request_id.as_bytes())).collect();
    let batches: Vec<_> = asked.into_iter().map(|asked| Batch::of(core, asked)).collect();
    let statements: Vec<_> = batches.iter().flatten().flat_map(|batch| &batch.statements).collect();
    let mut believed = core.keyring()?.verify_all(&statements).into_iter();
    let mut answers = Vec::with_capacity(batches.len());
    for (batch, id) in batches.into_iter().zip(ids) {
        let verdicts = believed.by_ref().take(batch.as_ref().map_or(0, |batch| batch.statements.len())).collect();
        let work = async move { batch?.publish(core, verdicts, deadline).await };
        answers.push(if alone { Either::Left(work) } else { Either::Right(in_its_name(id, work)) });
    }
    Ok(join_all(answers).await)
}

/// Does the work of one of several in the name of the call that it is done for, as if it had come alone.
async fn in_its_name<T>(id: Option<CallId>, work: impl Future<Output = Result<T, Refusal>>) -> Result<T, Refusal> {
    let answer = match id {
        Some(id) => {
            let span = error_span!("publish", request = %id);
            id.scope(work.instrument(span)).await
        }
        None => work.await,
    };
    if let Err(refusal) = &answer {
        telemetry::refused(refusal);
    }
    answer
}

/// A batch that was checked but for its signatures.
struct Batch<'a> {
    shard: &'a HostedShard,
    publish: Publish,
    /// Over exactly these entries, each by a holder. None if the leader does not know the grant: it was never given or is forgotten, and the
    /// machine says which outcome that has, entry by entry.
    statements: Vec<Signed<AttestationBatch>>,
}

impl<'a> Batch<'a> {
    fn of(core: &'a Core, asked: v1::PublishRequest) -> Result<Self, Refusal> {
        if !asked.together.is_empty() {
            return Err(Refusal::malformed("together", "publishes", "further calls of several"));
        }
        let grant_id = convert::grant_id(asked.grant)?;
        let shard = core.shard(grant_id.shard)?;
        shard.hosted.leads()?;
        let writer = convert::writer_id(&asked.writer)?;
        let statements = statements(&asked.attested)?;
        if asked.entries.is_empty() {
            return Err(Refusal::malformed("entries", "at least one", "none"));
        }
        if asked.entries.len() > COMMIT_ENTRIES_MAX {
            return Err(door::too_large("entries", COMMIT_ENTRIES_MAX, asked.entries.len()));
        }
        let grant: Option<Grant> = shard.hosted.read(|state| state.grant(grant_id).map(|held| held.grant.clone()));
        if grant.as_ref().is_some_and(|grant| grant.writer != writer) {
            return Err(Refusal::Untrusted(v1::Untrusted { why: format!("{grant_id} belongs to another writer") }));
        }
        let namespace = grant.as_ref().map(|grant| grant.namespace);
        let entries = entries(core, shard, namespace, writer, asked.entries)?;
        let publish = Publish { grant: grant_id, entries, attested: Vec::new() };
        let Some(grant) = grant else { return Ok(Self { shard, publish, statements: Vec::new() }) };
        for statement in &statements {
            fits(&grant, &publish, &Covers::All, &statement.statement)?;
        }
        Ok(Self { shard, publish, statements })
    }

    /// Proposes it if its signatures are to be believed. `verdicts` has what the keyring said of them; whether it knew enough is seen here.
    async fn publish(
        self,
        core: &Core,
        verdicts: Vec<Result<(), TrustError>>,
        deadline: Instant,
    ) -> Result<v1::PublishReply, Refusal> {
        let Self { shard, mut publish, statements } = self;
        for (statement, verdict) in statements.into_iter().zip(verdicts) {
            if verdict.is_err() {
                verify(core, &statement, deadline).await?;
            }
            publish.attested.push(attested(Covers::All, &statement));
        }
        let count = publish.entries.len();
        let done = shard.hosted.propose(ShardCommand::Publish(publish), deadline).await?;
        match done.outcome {
            ShardOutcome::Publish(outcomes) if outcomes.len() == count => {
                let outcomes: Vec<_> = outcomes.into_iter().map(message).collect();
                metrics::committed(shard.id, &outcomes);
                Ok(v1::PublishReply { outcomes, applied_ms: done.at.0, ..Default::default() })
            }
            other => Err(strange(&other)),
        }
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
    fits(grant, publish, &covers, &statement.statement)?;
    verify(core, &statement, deadline).await?;
    Ok(attested(covers, &statement))
}

/// Refuses a batch that is not a holder's and over exactly those entries that it covers.
fn fits(grant: &Grant, publish: &Publish, covers: &Covers, said: &AttestationBatch) -> Result<(), Refusal> {
    let untrusted = |why: String| Refusal::Untrusted(v1::Untrusted { why });
    let node = said.node;
    let Some(holder) = grant.holder(node) else {
        return Err(untrusted(format!("{node} is not a holder of {}", grant.id)));
    };
    let leaves = shard::leaves(grant, holder, &publish.entries, covers).unwrap_or_default();
    let leaves: Vec<Hash> = leaves.into_iter().map(|(_, leaf)| leaf).collect();
    if leaves.is_empty() || AttestationBatch::of(node, &leaves) != *said {
        return Err(untrusted(format!("{node} attests other copies than these entries under {}", grant.id)));
    }
    Ok(())
}

fn attested(covers: Covers, statement: &Signed<AttestationBatch>) -> Attested {
    let Signed { generation, serial, signature, .. } = *statement;
    Attested { node: statement.statement.node, covers, generation, serial, signature }
}

/// Refuses a batch whose signature is not to be believed.
pub(super) async fn verify(
    core: &Core,
    statement: &Signed<AttestationBatch>,
    deadline: Instant,
) -> Result<(), Refusal> {
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
