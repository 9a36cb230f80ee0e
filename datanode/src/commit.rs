//! Commit: has every holder confirm, publishes at the shard's leader, answers one outcome per entry (*Idempotent commits*).
//!
//! Any data node can coordinate; it need not be a holder. A batch is split before it is confirmed, so that one signature stays one Raft entry.
//! Holders that refuse or do not answer are left out. An entry that no holder confirms is published without an attestation, since it may
//! have been committed by an earlier attempt: only the shard knows, and it looks up recorded outcomes first. An entry that is plainly wrong is
//! answered here. Whether a Publish whose answer was lost took effect is not known, so it is sent again, with the same bytes, until the
//! deadline; after that the answer is `Indeterminate`.

use crate::{
    confirm::{self, EntryRefusal},
    metas::{self, LeaderCallError, with_timeout},
    node::Node,
};
use bytes::Bytes;
use futures::{StreamExt as _, future::join_all, stream};
use quarry_proto::{
    convert,
    refusal::Refusal,
    v1::{self, commit_outcome::Code},
};
use quarry_wire::{
    attestation::AttestationBatch,
    ids::{GrantId, NodeId, WriterId},
    keyring::TrustError,
    limits::{COMMIT_ENTRIES_MAX, COPIES_MAX},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};
use tokio::{
    task::yield_now,
    time::{Instant, timeout_at},
};
use tonic::Status;

/// Bytes of entries in one part. Below a Raft command's limit by what the leader adds: batch signatures and the command's frame.
const PART_BYTES_MAX: usize = 24 << 10;
/// What an entry takes beside its key: slot, clock, length, CRC, kind, mode with an expected version.
pub(crate) const ENTRY_BYTES: usize = 72;
/// Parts under way at once.
const PARTS_AT_ONCE: usize = 4;
/// Longest wait for a holder's confirmation, and the part of the time left that it may take.
const CONFIRM_MAX: Duration = Duration::from_secs(3);
const CONFIRM_SHARE: u32 = 2;

const _: () = assert!(PART_BYTES_MAX + (4 << 10) <= quarry_wire::limits::COMMAND_BYTES_MAX);

/// One commit, checked at the door.
struct Commit {
    node: Arc<Node>,
    grant: GrantId,
    writer: WriterId,
    holders: BTreeSet<NodeId>,
    deadline: Instant,
}

/// An entry and its place in the request.
type Placed = (usize, v1::CommitEntry);
/// What became of some entries.
type Fates = Vec<(usize, Result<v1::CommitOutcome, Refusal>)>;

/// What a holder says to some entries.
enum Answer {
    /// It signed for all but these; the text says why where that is known, and whether the entry itself is wrong.
    Said { attested: Bytes, refused: BTreeMap<usize, Option<EntryRefusal>> },
    /// It vouches for nothing of this grant.
    Refused(String),
    /// It did not answer, so nothing is known.
    Silent(String),
}

/// Coordinates a commit.
///
/// # Errors
/// A refusal of the whole: nothing of it was applied, except for `Indeterminate`.
pub(crate) async fn commit(
    node: Arc<Node>,
    request: v1::CommitRequest,
    deadline: Instant,
) -> Result<v1::CommitReply, Refusal> {
    let grant = convert::grant_id(request.grant)?;
    tracing::Span::current().record("shard", grant.shard.0);
    let writer = convert::writer_id(&request.writer)?;
    let holders: BTreeSet<NodeId> = request.written.iter().map(|node| NodeId(*node)).collect();
    if holders.is_empty() || holders.len() > COPIES_MAX {
        return Err(Refusal::malformed("written", format_args!("1 to {COPIES_MAX} holders"), holders.len()));
    }
    check_count(request.entries.len())?;
    let commit = Commit { node, grant, writer, holders, deadline };
    commit.check_owner()?;

    let mut fates: Fates = Vec::with_capacity(request.entries.len());
    let mut sound = Vec::with_capacity(request.entries.len());
    for (place, entry) in request.entries.into_iter().enumerate() {
        match convert::key(&entry.key).and_then(|_| convert::frame_kind(entry.kind)) {
            Ok(_) => sound.push((place, entry)),
            Err(refusal) => fates.push((place, Ok(malformed(refusal)))),
        }
    }
    let mut applied_ms = 0;
    let mut parts = stream::iter(split(sound)).map(|part| commit.part(part)).buffer_unordered(PARTS_AT_ONCE);
    while let Some((part, applied)) = parts.next().await {
        fates.extend(part);
        applied_ms = applied_ms.max(applied);
    }
    drop(parts);
    settle(fates).map(|outcomes| v1::CommitReply { outcomes, applied_ms })
}

/// Refuses batches of no entries or too many.
pub(crate) fn check_count(entries: usize) -> Result<(), Refusal> {
    if entries == 0 {
        return Err(Refusal::malformed("entries", "at least one", "none"));
    }
    if entries > COMMIT_ENTRIES_MAX {
        return Err(Refusal::TooLarge(v1::TooLarge {
            what: "commit batch".to_owned(),
            limit: COMMIT_ENTRIES_MAX as u64,
            found: entries as u64,
        }));
    }
    Ok(())
}

/// Parts that fit in one Raft command each.
fn split(entries: Vec<Placed>) -> Vec<Vec<Placed>> {
    let mut parts: Vec<Vec<Placed>> = Vec::new();
    let mut room = 0;
    for entry in entries {
        let bytes = ENTRY_BYTES + entry.1.key.len();
        match parts.last_mut() {
            Some(part) if bytes <= room => part.push(entry),
            _ => {
                room = PART_BYTES_MAX;
                parts.push(vec![entry]);
            }
        }
        room -= bytes;
    }
    parts
}

/// One outcome per entry, in order; or a refusal of the whole.
fn settle(mut fates: Fates) -> Result<Vec<v1::CommitOutcome>, Refusal> {
    fates.sort_by_key(|(place, _)| *place);
    // Something may have taken effect: the caller must come again with the same commit.
    let unsure = |refusal: &Refusal| {
        matches!(
            refusal,
            Refusal::Indeterminate(_) | Refusal::NotReady(_) | Refusal::NotLeader(_) | Refusal::TooManyRequests(_)
        )
    };
    let open = fates.iter().filter_map(|(_, fate)| fate.as_ref().err()).find(|refusal| unsure(refusal));
    if let Some(refusal) = open {
        let all = fates.iter().all(|(_, fate)| fate.as_ref().is_err_and(|other| other == refusal));
        let why = format!("not all entries were settled: {refusal}");
        return Err(if all { refusal.clone() } else { Refusal::Indeterminate(v1::Indeterminate { why }) });
    }
    if let Some((_, Err(first))) = fates.first()
        && fates.iter().all(|(_, fate)| fate.is_err())
    {
        return Err(first.clone());
    }
    Ok(fates.into_iter().map(|(_, fate)| fate.unwrap_or_else(in_its_place)).collect())
}

/// What a refusal of a whole Publish means for each of its entries.
fn in_its_place(refusal: Refusal) -> v1::CommitOutcome {
    match refusal {
        Refusal::UnknownGrant(_) => {
            v1::CommitOutcome { code: Code::UnknownGrant.into(), detail: refusal.to_string(), ..Default::default() }
        }
        other => malformed(other),
    }
}

fn malformed(why: impl ToString) -> v1::CommitOutcome {
    v1::CommitOutcome { code: Code::Malformed.into(), detail: why.to_string(), ..Default::default() }
}

impl Commit {
    /// If the grant is known here, it must be the writer's: no other holder or shard would say otherwise.
    fn check_owner(&self) -> Result<(), Refusal> {
        match self.node.holdings.lock().confirmable(self.grant, self.writer) {
            Err(refusal @ crate::claims::ConfirmRefusal::Writer { .. }) => {
                Err(Refusal::Untrusted(v1::Untrusted { why: refusal.to_string() }))
            }
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Confirms and publishes one part. Answers the fate of each entry, and the newest log time heard.
    async fn part(&self, part: Vec<Placed>) -> (Fates, u64) {
        let entries: Vec<v1::CommitEntry> = part.iter().map(|(_, entry)| entry.clone()).collect();
        let all: Vec<usize> = (0..entries.len()).collect();
        let mut answers = self.ask(&self.holders, &entries).await;

        if answers.values().all(|answer| matches!(answer, Answer::Silent(_))) {
            let heard: Vec<String> = answers.iter().map(|(node, answer)| format!("{node}: {}", answer.why())).collect();
            let why = format!("no holder answered ({})", heard.join("; "));
            let refusal = Refusal::NotReady(v1::NotReady { why, retry_after_ms: 100 });
            return (part.into_iter().map(|(place, _)| (place, Err(refusal.clone()))).collect(), 0);
        }
        for (holder, answer) in &answers {
            if !matches!(answer, Answer::Said { .. }) {
                tracing::warn!(%holder, grant = %self.grant, why = answer.why(), "left out of a commit");
            }
        }
        // Entries with the same holders go together: each of these holders signs exactly them.
        let mut groups: BTreeMap<BTreeSet<NodeId>, Vec<usize>> = BTreeMap::new();
        for entry in all {
            let by = answers.iter().filter(|(_, answer)| answer.vouches_for(entry)).map(|(node, _)| *node).collect();
            groups.entry(by).or_default().push(entry);
        }
        let mut fates = Fates::new();
        let mut applied_ms = 0;
        for (by, members) in groups {
            let members: Vec<usize> = if by.is_empty() {
                let (wrong, rest): (Vec<usize>, Vec<usize>) =
                    members.into_iter().partition(|entry| own_final(&answers, self.node.id, *entry).is_some());
                fates.extend(wrong.into_iter().map(|entry| {
                    let why = own_final(&answers, self.node.id, entry).expect("just found");
                    (part[entry].0, Ok(malformed(why)))
                }));
                rest
            } else {
                members
            };
            if members.is_empty() {
                continue;
            }
            let entries: Vec<v1::CommitEntry> = members.iter().map(|entry| part[*entry].1.clone()).collect();
            let attested = self.attested(&by, &members, &entries, part.len(), &mut answers).await;
            let published = self.publish(entries, attested).await;
            match published {
                Ok(reply) => {
                    applied_ms = applied_ms.max(reply.applied_ms);
                    let outcomes = reply.outcomes.into_iter().map(Ok);
                    fates.extend(members.iter().map(|entry| part[*entry].0).zip(outcomes));
                }
                Err(refusal) => {
                    fates.extend(members.iter().map(|entry| (part[*entry].0, Err(refusal.clone()))));
                }
            }
        }
        (fates, applied_ms)
    }

    /// The signatures of the holders `by` over exactly `entries`. Who signed for another set is asked again; who refuses now is left out.
    async fn attested(
        &self,
        by: &BTreeSet<NodeId>,
        members: &[usize],
        entries: &[v1::CommitEntry],
        asked: usize,
        answers: &mut BTreeMap<NodeId, Answer>,
    ) -> Vec<Bytes> {
        let mut attested = Vec::with_capacity(by.len());
        let mut again = BTreeSet::new();
        for holder in by {
            match answers.get(holder) {
                Some(Answer::Said { attested: signed, refused }) if asked - refused.len() == members.len() => {
                    attested.push(signed.clone());
                }
                _ => {
                    again.insert(*holder);
                }
            }
        }
        if !again.is_empty() {
            for (holder, answer) in self.ask(&again, entries).await {
                match answer {
                    Answer::Said { attested: signed, refused } if refused.is_empty() => attested.push(signed),
                    other => tracing::warn!(%holder, why = other.why(), "confirmed before and does not now"),
                }
            }
        }
        attested
    }

    /// Asks holders to confirm, all at once.
    async fn ask(&self, holders: &BTreeSet<NodeId>, entries: &[v1::CommitEntry]) -> BTreeMap<NodeId, Answer> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let deadline = Instant::now() + (left / CONFIRM_SHARE).min(CONFIRM_MAX);
        let asked = holders.iter().map(async |holder| {
            let answer = if *holder == self.node.id {
                if holders.len() > 1 {
                    // The questions to the others are on their way before this node checks for itself.
                    yield_now().await;
                }
                self.ask_self(entries)
            } else {
                match timeout_at(deadline, self.ask_other(*holder, entries, deadline)).await {
                    Ok(answer) => answer,
                    Err(_) => Answer::Silent("no answer in time".to_owned()),
                }
            };
            (*holder, answer)
        });
        join_all(asked).await.into_iter().collect()
    }

    fn ask_self(&self, entries: &[v1::CommitEntry]) -> Answer {
        match confirm::confirm(&self.node, self.grant, self.writer, entries) {
            Ok(verdict) => Answer::Said {
                attested: verdict.attested,
                refused: verdict.refused.into_iter().map(|(entry, why)| (entry, Some(why))).collect(),
            },
            Err(refusal) => Answer::Refused(refusal.to_string()),
        }
    }

    async fn ask_other(&self, holder: NodeId, entries: &[v1::CommitEntry], deadline: Instant) -> Answer {
        let mut address = self.node.membership.address_of(holder);
        if address.is_none() {
            self.node.refresh(deadline).await;
            address = self.node.membership.address_of(holder);
        }
        let Some(address) = address else { return Answer::Silent("its address is not known".to_owned()) };
        let request = v1::ConfirmRequest {
            grant: Some(self.grant.into()),
            writer: Bytes::copy_from_slice(&self.writer.0),
            entries: entries.to_vec(),
        };
        let reply = match metas::data_node(&self.node.peers, holder, &address) {
            Ok(mut client) => client.confirm(with_timeout(request, deadline)).await,
            Err(status) => Err(status),
        };
        let reply = match reply {
            Ok(reply) => reply.into_inner(),
            Err(status) => return no_answer(&status),
        };
        let refused: BTreeMap<usize, Option<EntryRefusal>> =
            reply.refused.iter().filter_map(|entry| Some((usize::try_from(*entry).ok()?, None))).collect();
        let in_range = refused.keys().all(|entry| *entry < entries.len());
        if !in_range || reply.attested.is_empty() != (refused.len() == entries.len()) {
            return Answer::Refused("its reply does not add up".to_owned());
        }
        if let Err(why) = self.believe(holder, &reply.attested, entries.len() - refused.len()) {
            return Answer::Refused(why);
        }
        Answer::Said { attested: reply.attested, refused }
    }

    /// Whether a holder's word will be believed at the shard, as far as that can be told here: one bad signature would spoil the Publish.
    fn believe(&self, holder: NodeId, attested: &Bytes, count: usize) -> Result<(), String> {
        if count == 0 {
            return Ok(());
        }
        let signed = convert::signed::<AttestationBatch>(attested).map_err(|error| error.to_string())?;
        let said = signed.statement;
        if said.node != holder || said.leaves as usize != count {
            return Err(format!("it signed {} entries as {}, {count} were confirmed", said.leaves, said.node));
        }
        match self.node.membership.verify(signed) {
            // A certificate that is news here may be known to the shard.
            Ok(_) | Err(TrustError::UnknownCertificate { .. }) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Publishes until the shard's leader has answered, or the deadline.
    async fn publish(&self, entries: Vec<v1::CommitEntry>, attested: Vec<Bytes>) -> Result<v1::PublishReply, Refusal> {
        let count = entries.len();
        let request = v1::PublishRequest {
            grant: Some(self.grant.into()),
            writer: Bytes::copy_from_slice(&self.writer.0),
            entries,
            attested,
            ..Default::default()
        };
        let caller = Arc::clone(&self.node);
        let call = self.node.metas.at_leader(self.grant.shard.0, self.deadline, move |address, deadline| {
            Box::pin(Arc::clone(&caller.sharing).publish(address, request.clone(), deadline))
        });
        let indeterminate = |why: String| Refusal::Indeterminate(v1::Indeterminate { why });
        match call.await {
            Ok(reply) if reply.outcomes.len() == count => Ok(reply),
            Ok(reply) => Err(indeterminate(format!("{} outcomes for {count} entries", reply.outcomes.len()))),
            Err(LeaderCallError::Refused { refusal, unsure: false }) => Err(refusal),
            // The refusal is of the last attempt; one before it may be in the log.
            Err(LeaderCallError::Refused { refusal, unsure: true }) => {
                Err(indeterminate(format!("an attempt brought no answer, and the one after it was refused: {refusal}")))
            }
            Err(LeaderCallError::Deadline { last }) => Err(indeterminate(format!("the shard did not answer: {last}"))),
        }
    }
}

impl Answer {
    fn vouches_for(&self, entry: usize) -> bool {
        matches!(self, Self::Said { refused, .. } if !refused.contains_key(&entry))
    }

    fn why(&self) -> &str {
        match self {
            Self::Said { .. } => "it refuses some entries",
            Self::Refused(why) | Self::Silent(why) => why,
        }
    }
}

/// A call without an answer: refused for good, or nothing known.
fn no_answer(status: &Status) -> Answer {
    match Refusal::from_status(status) {
        Some(Refusal::NotReady(it)) => Answer::Silent(it.why),
        Some(refusal) => Answer::Refused(refusal.to_string()),
        None => Answer::Silent(status.message().to_owned()),
    }
}

/// Why this node knows that an entry was never committed, if it does.
fn own_final(answers: &BTreeMap<NodeId, Answer>, own: NodeId, entry: usize) -> Option<String> {
    let Some(Answer::Said { refused, .. }) = answers.get(&own) else { return None };
    let why = refused.get(&entry)?.as_ref()?;
    why.is_final().then(|| why.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_wire::limits::KEY_BYTES_MAX;

    fn entry(key: usize) -> v1::CommitEntry {
        v1::CommitEntry { key: vec![b'k'; key].into(), ..Default::default() }
    }
    fn committed() -> Result<v1::CommitOutcome, Refusal> {
        Ok(v1::CommitOutcome { code: Code::Committed.into(), ..Default::default() })
    }

    #[test]
    fn parts_keep_every_entry_in_order_and_fit_in_a_command() {
        for key in [1, 100, KEY_BYTES_MAX] {
            let entries: Vec<Placed> = (0..COMMIT_ENTRIES_MAX).map(|place| (place, entry(key))).collect();
            let parts = split(entries);
            let places: Vec<usize> = parts.iter().flatten().map(|(place, _)| *place).collect();
            assert_eq!(places, (0..COMMIT_ENTRIES_MAX).collect::<Vec<_>>());
            for part in &parts {
                let bytes: usize = part.iter().map(|(_, entry)| ENTRY_BYTES + entry.key.len()).sum();
                assert!(!part.is_empty() && bytes <= PART_BYTES_MAX);
            }
        }
        assert!(split(Vec::new()).is_empty());
    }

    #[test]
    fn a_refusal_of_all_parts_refuses_the_whole_and_one_of_some_its_entries_only() {
        let ahead = || Err(Refusal::VersionAhead(v1::VersionAhead::default()));
        assert!(matches!(settle(vec![(0, ahead()), (1, ahead())]), Err(Refusal::VersionAhead(_))));
        let outcomes = settle(vec![(1, ahead()), (0, committed())]).unwrap();
        assert_eq!(
            outcomes.iter().map(v1::CommitOutcome::code).collect::<Vec<_>>(),
            [Code::Committed, Code::Malformed]
        );
        let unknown = Err(Refusal::UnknownGrant(v1::UnknownGrant::default()));
        let outcomes = settle(vec![(0, committed()), (1, unknown)]).unwrap();
        assert_eq!(outcomes[1].code(), Code::UnknownGrant);
    }

    #[test]
    fn what_is_unsettled_in_part_is_indeterminate_as_a_whole() {
        let lost = || Err(Refusal::Indeterminate(v1::Indeterminate { why: "lost".into() }));
        let silent = || Err(Refusal::NotReady(v1::NotReady::default()));
        assert!(matches!(settle(vec![(0, committed()), (1, lost())]), Err(Refusal::Indeterminate(_))));
        assert!(matches!(settle(vec![(0, committed()), (1, silent())]), Err(Refusal::Indeterminate(_))));
        assert!(matches!(settle(vec![(0, silent()), (1, silent())]), Err(Refusal::NotReady(_))));
    }
}
