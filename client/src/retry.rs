//! What to do after something failed: a pure decision over what failed, what had been sent, how often it was tried and how much time is left.
//!
//! Decides only; `control.rs`, `write/` and `read/` do it. Keeps *Linearizable* on the client's side:
//! - once a Commit may have reached the log, a put leaves its (grant, slot) only after an outcome that was applied;
//! - all attempts of a put keep one version, except after an applied `StaleVersion`, which ends the old version for good;
//! - finding the own version current is success;
//! - after `UnknownGrant` anything else is `Indeterminate`, never an automatic rewrite.

use crate::error::{CallError, PutError};
use quarry_proto::{refusal::Refusal, v1};
use quarry_wire::version::Version;
use std::{fmt, time::Duration};

/// First pause between attempts, doubled each time.
const PAUSE_FIRST: Duration = Duration::from_millis(5);
/// Longest pause between attempts.
const PAUSE_LONGEST: Duration = Duration::from_millis(400);
/// Leader hints that are followed without a pause.
const HINTS_AT_ONCE: u32 = 3;
/// Further servers that are tried after one that is not trusted, or does not trust us.
const DISTRUSTED_AGAIN: u32 = 2;
/// A namespace that was just made may not have reached its shard yet.
const NAMESPACE_SETTLES: Duration = Duration::from_secs(2);
/// Rewrites after `StaleVersion` before it is reported.
const STALE_MAX: u32 = 8;
/// Attempts in slots of their own before a put is given up even if there is time.
const SLOTS_MAX: u32 = 16;

/// The pause before attempt `attempt` + 1.
pub(crate) fn pause(attempt: u32) -> Duration {
    PAUSE_FIRST.saturating_mul(1 << attempt.min(10)).min(PAUSE_LONGEST)
}

/// Why a call brought no answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Fault {
    /// A typed refusal.
    Refused(Box<Refusal>),
    /// The call was never sent: one side of the connection does not trust the other.
    Distrust(String),
    /// No answer, and nobody knows why: the network, the process.
    Transport(String),
    /// No answer in the time of this attempt.
    TimedOut,
}

impl Fault {
    pub(crate) fn of(status: &tonic::Status) -> Self {
        Refusal::from_status(status).map_or_else(
            || Self::Transport(format!("{:?}: {}", status.code(), status.message())),
            |refusal| Self::Refused(Box::new(refusal)),
        )
    }

    /// When the same server wants to be asked again, if it had too much to do.
    pub(crate) fn come_again(&self) -> Option<Duration> {
        match self {
            Self::Refused(refusal) => match &**refusal {
                Refusal::TooManyRequests(it) => Some(Duration::from_millis(it.retry_after_ms).max(PAUSE_FIRST)),
                _ => None,
            },
            Self::Distrust(_) | Self::Transport(_) | Self::TimedOut => None,
        }
    }

    /// Whether an attempt that ended so may have taken effect: all other refusals are said before anything is done.
    pub(crate) fn leaves_unsure(&self) -> bool {
        match self {
            Self::Transport(_) | Self::TimedOut => true,
            Self::Distrust(_) => false,
            Self::Refused(refusal) => matches!(**refusal, Refusal::Indeterminate(_)),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => refusal.fmt(f),
            Self::Distrust(text) | Self::Transport(text) => f.write_str(text),
            Self::TimedOut => f.write_str("no answer in time"),
        }
    }
}

impl Fault {
    /// The error that a caller is shown when a call to `what` is given up.
    pub(crate) fn into_error(self, what: &str) -> CallError {
        match self {
            Self::Refused(refusal) => match *refusal {
                Refusal::Indeterminate(it) => CallError::Indeterminate { why: it.why },
                Refusal::UnknownNamespace(it) => CallError::UnknownNamespace {
                    what: if it.name.is_empty() { format!("ns-{}", it.id) } else { it.name },
                },
                Refusal::Untrusted(it) => CallError::Untrusted { why: it.why },
                other => CallError::Refused(Box::new(other)),
            },
            Self::Distrust(why) => CallError::Untrusted { why },
            Self::Transport(last) => CallError::Unreachable { what: what.to_owned(), last },
            Self::TimedOut => CallError::Unreachable { what: what.to_owned(), last: "no answer in time".to_owned() },
        }
    }
}

/// What to do after an idempotent call to a group's leader failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CallStep {
    /// Send the same bytes again after this pause: to this leader, or to the next node if there is no hint.
    Again { leader: Option<String>, after: Duration },
    /// It will not get better.
    GiveUp,
}

/// Decides after attempt number `attempt` (from 0) of a call failed, `elapsed` after the first began.
pub(crate) fn after_call(fault: &Fault, attempt: u32, elapsed: Duration) -> CallStep {
    let again = |after| CallStep::Again { leader: None, after };
    let refusal = match fault {
        // The certificate of one server may have expired while those of the others have not; ours is the same for all.
        Fault::Distrust(_) if attempt < DISTRUSTED_AGAIN => return again(Duration::ZERO),
        Fault::Distrust(_) => return CallStep::GiveUp,
        Fault::Transport(_) | Fault::TimedOut => return again(pause(attempt)),
        Fault::Refused(refusal) => refusal,
    };
    match &**refusal {
        Refusal::NotLeader(it) if !it.address.is_empty() => {
            let after = if attempt < HINTS_AT_ONCE { Duration::ZERO } else { pause(attempt) };
            CallStep::Again { leader: Some(it.address.clone()), after }
        }
        Refusal::NotLeader(_) | Refusal::Indeterminate(_) => again(pause(attempt)),
        Refusal::NotReady(it) => again(pause(attempt).max(Duration::from_millis(it.retry_after_ms).min(PAUSE_LONGEST))),
        Refusal::TooManyRequests(it) => again(pause(attempt).max(Duration::from_millis(it.retry_after_ms))),
        Refusal::UnknownNamespace(_) if elapsed < NAMESPACE_SETTLES => again(pause(attempt)),
        _ => CallStep::GiveUp,
    }
}

/// What to do after a Commit call failed as a whole. The entries stay in their slots in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommitStep {
    /// The same bytes again after this pause, through the next written holder.
    SameSlot { after: Duration },
    /// No holder will take it: look at each entry.
    Stop,
}

/// Decides after attempt number `attempt` (from 0) of a Commit failed that `holders` holders could coordinate.
pub(crate) fn after_commit(fault: &Fault, attempt: u32, holders: usize) -> CommitStep {
    // Another holder is asked at once; a pause makes sense only when all were.
    let round = usize::try_from(attempt).unwrap_or(usize::MAX) / holders.max(1);
    let all_asked = usize::try_from(attempt).unwrap_or(usize::MAX) + 1 >= holders;
    let after = if all_asked { pause(u32::try_from(round).unwrap_or(u32::MAX)) } else { Duration::ZERO };
    match fault {
        Fault::Transport(_) | Fault::TimedOut => CommitStep::SameSlot { after },
        Fault::Distrust(_) if !all_asked => CommitStep::SameSlot { after },
        Fault::Distrust(_) => CommitStep::Stop,
        Fault::Refused(refusal) => match &**refusal {
            Refusal::NotLeader(_) | Refusal::NotReady(_) | Refusal::Indeterminate(_) => CommitStep::SameSlot { after },
            // The limit is of one holder: the others may have room.
            Refusal::TooManyRequests(it) if all_asked => {
                CommitStep::SameSlot { after: after.max(Duration::from_millis(it.retry_after_ms)) }
            }
            Refusal::TooManyRequests(_) => CommitStep::SameSlot { after },
            Refusal::VersionAhead(_) | Refusal::UnsupportedProtocol(_) | Refusal::WrongCluster(_) => CommitStep::Stop,
            // One holder may have lost its memory while the others have not.
            _ if !all_asked => CommitStep::SameSlot { after },
            _ => CommitStep::Stop,
        },
    }
}

/// The outcome of one commit entry, as its server reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Committed,
    Exists(Option<Version>),
    StaleVersion(Option<Version>),
    CompareFailed(Option<Version>),
    GrantExpired,
    Sealed,
    NotEnoughHolders {
        needed: u64,
        attested: u64,
    },
    UnknownGrant(Option<Version>),
    SlotTaken(Option<Version>),
    NoSpace,
    /// Left out by the coordinator: never handed to the log by this call.
    NotConfirmed(String),
}

impl Outcome {
    pub(crate) fn of(message: v1::CommitOutcome) -> Self {
        use v1::commit_outcome::Code;
        let code = message.code();
        let version = message.version.and_then(|version| Version::try_from(version).ok());
        match code {
            Code::Committed => Self::Committed,
            Code::Exists => Self::Exists(version),
            Code::StaleVersion => Self::StaleVersion(version),
            Code::CompareFailed => Self::CompareFailed(version),
            Code::GrantExpired => Self::GrantExpired,
            Code::Sealed => Self::Sealed,
            Code::NotEnoughHolders => Self::NotEnoughHolders { needed: message.a, attested: message.b },
            Code::UnknownGrant => Self::UnknownGrant(version),
            Code::SlotTaken => Self::SlotTaken(version),
            Code::NoSpace => Self::NoSpace,
            Code::Malformed => Self::NotConfirmed(message.detail),
            Code::Unspecified => Self::NotConfirmed("an outcome that this build does not know".to_owned()),
        }
    }
}

/// What became of one attempt of one put.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Happened {
    /// Its entry has an outcome. `maybe_logged`: an earlier Commit of this (grant, slot) may have reached the log.
    Outcome { outcome: Outcome, maybe_logged: bool },
    /// Its Commit brought no answer. `maybe_logged` as above.
    NoAnswer { fault: Fault, maybe_logged: bool },
    /// The frame did not reach enough holders; no Commit was sent.
    TooFewWritten { written: usize, needed: usize, last: String },
    /// A fresh resolve after a Commit of unknown fate found this.
    Resolved(Option<Version>),
}

/// Where a put stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    /// The version of the present attempt.
    pub(crate) own: Version,
    /// Slots used so far.
    pub(crate) slots: u32,
    /// Rewrites after `StaleVersion` so far.
    pub(crate) stale: u32,
    /// Time left until its deadline.
    pub(crate) left: Duration,
}

/// What to do next with a put.
#[derive(Clone, Debug)]
pub(crate) enum PutStep {
    /// It is written.
    Done,
    /// Go on after this pause.
    Retry { after: Duration, how: How },
    /// It failed.
    GiveUp(PutError),
}

/// How to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// A new slot and a new version above this one: the old version was turned down for good.
    NewVersion(Version),
    /// The same version in a slot of another grant.
    NewGrant,
    /// Ask which version is current.
    Resolve,
}

/// Decides how a put goes on.
pub(crate) fn after_put(happened: &Happened, standing: &Standing) -> PutStep {
    let own = standing.own;
    let indeterminate = |why: String| PutStep::GiveUp(PutError::Indeterminate { version: own, why });
    let retry = |after: Duration, how: How, last: String| {
        if after >= standing.left || standing.slots >= SLOTS_MAX {
            return PutStep::GiveUp(PutError::Deadline { last });
        }
        PutStep::Retry { after, how }
    };
    let another_grant = |last: String| retry(pause(standing.slots.saturating_sub(1)), How::NewGrant, last);
    let resolve = |why: String| {
        if standing.left.is_zero() {
            indeterminate(why)
        } else {
            PutStep::Retry { after: Duration::ZERO, how: How::Resolve }
        }
    };
    match happened {
        Happened::Outcome { outcome, maybe_logged } => match outcome {
            Outcome::Committed => PutStep::Done,
            Outcome::Exists(Some(current))
            | Outcome::StaleVersion(Some(current))
            | Outcome::CompareFailed(Some(current))
            | Outcome::UnknownGrant(Some(current))
            | Outcome::SlotTaken(Some(current))
                if *current == own =>
            {
                PutStep::Done
            }
            Outcome::Exists(Some(current)) => PutStep::GiveUp(PutError::Exists { current: *current }),
            Outcome::CompareFailed(current) => PutStep::GiveUp(PutError::CompareFailed { current: *current }),
            Outcome::StaleVersion(Some(current)) if standing.stale >= STALE_MAX => {
                PutStep::GiveUp(PutError::StaleVersion { current: *current })
            }
            Outcome::StaleVersion(Some(current)) => {
                retry(Duration::ZERO, How::NewVersion(*current), format!("version {current} is newer"))
            }
            Outcome::GrantExpired => another_grant("the grant had expired".to_owned()),
            Outcome::Sealed => another_grant("the slab was sealed".to_owned()),
            Outcome::NotEnoughHolders { needed, attested } => {
                another_grant(format!("{attested} of {needed} holders confirmed"))
            }
            Outcome::SlotTaken(_) => another_grant("the slot holds another version".to_owned()),
            Outcome::NoSpace => {
                PutStep::GiveUp(PutError::NoSpace { resource: "the namespace".to_owned(), retry_after: None })
            }
            Outcome::UnknownGrant(Some(_)) => indeterminate("the cluster has forgotten the grant".to_owned()),
            Outcome::UnknownGrant(None) => resolve("the cluster has forgotten the grant".to_owned()),
            Outcome::NotConfirmed(why) if *maybe_logged => resolve(why.clone()),
            Outcome::NotConfirmed(why) => another_grant(why.clone()),
            Outcome::Exists(None) | Outcome::StaleVersion(None) => {
                indeterminate("an outcome came without the current version".to_owned())
            }
        },
        Happened::NoAnswer { fault, maybe_logged: true } => resolve(fault.to_string()),
        Happened::NoAnswer { fault, maybe_logged: false } => match fault {
            Fault::Refused(refusal)
                if matches!(
                    **refusal,
                    Refusal::VersionAhead(_)
                        | Refusal::UnsupportedProtocol(_)
                        | Refusal::WrongCluster(_)
                        | Refusal::UnknownNamespace(_)
                        | Refusal::TooLarge(_)
                ) =>
            {
                PutStep::GiveUp(fault.clone().into_error("the coordinating holder").into())
            }
            fault => another_grant(fault.to_string()),
        },
        Happened::TooFewWritten { written, needed, last } => {
            match another_grant(format!("{written} of {needed} holders took the frame: {last}")) {
                PutStep::GiveUp(_) => {
                    PutStep::GiveUp(PutError::TooFewHolders { needed: *needed, reached: *written, last: last.clone() })
                }
                step => step,
            }
        }
        Happened::Resolved(Some(current)) if *current == own => PutStep::Done,
        Happened::Resolved(_) => {
            indeterminate("its Commit brought no outcome, and it is not the current version".to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_wire::{ids::WriterId, version::HybridClock};

    const LONG: Duration = Duration::from_secs(5);

    fn version(clock: u64, writer: u8) -> Version {
        Version { clock: HybridClock(clock), writer: WriterId([writer; 16]) }
    }
    fn own() -> Version {
        version(10, 1)
    }
    fn other() -> Version {
        version(20, 2)
    }
    fn standing() -> Standing {
        Standing { own: own(), slots: 1, stale: 0, left: LONG }
    }
    fn applied(outcome: Outcome) -> Happened {
        Happened::Outcome { outcome, maybe_logged: true }
    }
    fn refused(refusal: Refusal) -> Fault {
        Fault::Refused(Box::new(refusal))
    }
    fn unknown_grant() -> Fault {
        refused(Refusal::UnknownGrant(v1::UnknownGrant { grant: None }))
    }
    fn indeterminate() -> Fault {
        refused(Refusal::Indeterminate(v1::Indeterminate { why: "leader lost".into() }))
    }

    #[test]
    fn finding_the_own_version_is_success_whatever_the_outcome_is_called() {
        let mine = Some(own());
        for outcome in [
            Outcome::Committed,
            Outcome::Exists(mine),
            Outcome::StaleVersion(mine),
            Outcome::CompareFailed(mine),
            Outcome::UnknownGrant(mine),
            Outcome::SlotTaken(mine),
        ] {
            assert!(matches!(after_put(&applied(outcome), &standing()), PutStep::Done));
        }
        assert!(matches!(after_put(&Happened::Resolved(mine), &standing()), PutStep::Done));
    }

    #[test]
    fn applied_refusals_that_say_nothing_about_the_key_lead_to_another_grant_with_the_same_version() {
        for outcome in [
            Outcome::GrantExpired,
            Outcome::Sealed,
            Outcome::NotEnoughHolders { needed: 2, attested: 1 },
            Outcome::SlotTaken(Some(other())),
        ] {
            let step = after_put(&applied(outcome), &standing());
            assert!(matches!(step, PutStep::Retry { how: How::NewGrant, .. }), "{step:?}");
        }
    }

    #[test]
    fn refusals_about_the_key_are_reported() {
        let step = after_put(&applied(Outcome::Exists(Some(other()))), &standing());
        assert!(matches!(step, PutStep::GiveUp(PutError::Exists { current }) if current == other()));
        let step = after_put(&applied(Outcome::CompareFailed(None)), &standing());
        assert!(matches!(step, PutStep::GiveUp(PutError::CompareFailed { current: None })));
    }

    #[test]
    fn a_stale_version_is_written_again_above_the_current_one_until_it_was_tried_often() {
        let stale = applied(Outcome::StaleVersion(Some(other())));
        let step = after_put(&stale, &standing());
        assert!(matches!(step, PutStep::Retry { how: How::NewVersion(above), .. } if above == other()));
        let step = after_put(&stale, &Standing { stale: STALE_MAX, ..standing() });
        assert!(matches!(step, PutStep::GiveUp(PutError::StaleVersion { .. })));
    }

    #[test]
    fn after_unknown_grant_nothing_is_rewritten() {
        for maybe_logged in [false, true] {
            let happened = |current| Happened::Outcome { outcome: Outcome::UnknownGrant(current), maybe_logged };
            let step = after_put(&happened(Some(other())), &standing());
            assert!(matches!(step, PutStep::GiveUp(PutError::Indeterminate { .. })), "{step:?}");
            let step = after_put(&happened(None), &standing());
            assert!(matches!(step, PutStep::Retry { how: How::Resolve, .. }), "{step:?}");
            let step = after_put(&happened(None), &Standing { left: Duration::ZERO, ..standing() });
            assert!(matches!(step, PutStep::GiveUp(PutError::Indeterminate { .. })), "{step:?}");
        }
    }

    #[test]
    fn once_a_commit_may_be_logged_no_unapplied_refusal_leads_to_a_rewrite() {
        let faults = [Fault::TimedOut, Fault::Transport("reset".into()), unknown_grant(), indeterminate()];
        for fault in faults {
            let step = after_put(&Happened::NoAnswer { fault, maybe_logged: true }, &standing());
            assert!(matches!(step, PutStep::Retry { how: How::Resolve, .. }), "{step:?}");
        }
        let left_out = applied(Outcome::NotConfirmed("superseded".into()));
        assert!(matches!(after_put(&left_out, &standing()), PutStep::Retry { how: How::Resolve, .. }));
        let step = after_put(&left_out, &Standing { left: Duration::ZERO, ..standing() });
        assert!(matches!(step, PutStep::GiveUp(PutError::Indeterminate { .. })));
        for current in [None, Some(other())] {
            let step = after_put(&Happened::Resolved(current), &standing());
            assert!(matches!(step, PutStep::GiveUp(PutError::Indeterminate { .. })));
        }
    }

    #[test]
    fn a_commit_that_never_reached_the_log_may_be_written_elsewhere() {
        let step = after_put(&Happened::NoAnswer { fault: unknown_grant(), maybe_logged: false }, &standing());
        assert!(matches!(step, PutStep::Retry { how: How::NewGrant, .. }));
        let left_out = Happened::Outcome { outcome: Outcome::NotConfirmed("not armed".into()), maybe_logged: false };
        assert!(matches!(after_put(&left_out, &standing()), PutStep::Retry { how: How::NewGrant, .. }));
        let ahead = refused(Refusal::VersionAhead(v1::VersionAhead { version_ms: 9_000, wall_ms: 1_000, limit_ms: 5 }));
        let step = after_put(&Happened::NoAnswer { fault: ahead, maybe_logged: false }, &standing());
        assert!(matches!(step, PutStep::GiveUp(PutError::ClockAhead { ahead }) if ahead == Duration::from_secs(8)));
    }

    #[test]
    fn frames_that_reached_too_few_holders_go_to_another_grant_while_there_is_time() {
        let happened = Happened::TooFewWritten { written: 1, needed: 2, last: "reset".into() };
        assert!(matches!(after_put(&happened, &standing()), PutStep::Retry { how: How::NewGrant, .. }));
        for done in [Standing { left: Duration::ZERO, ..standing() }, Standing { slots: SLOTS_MAX, ..standing() }] {
            let step = after_put(&happened, &done);
            assert!(matches!(step, PutStep::GiveUp(PutError::TooFewHolders { needed: 2, reached: 1, .. })));
        }
    }

    #[test]
    fn leader_hints_are_followed_at_once_and_then_with_pauses() {
        let hint = refused(Refusal::NotLeader(v1::NotLeader { group: 1, leader: 2, address: "two:1".into() }));
        assert_eq!(
            after_call(&hint, 0, Duration::ZERO),
            CallStep::Again { leader: Some("two:1".into()), after: Duration::ZERO }
        );
        assert!(matches!(after_call(&hint, HINTS_AT_ONCE, LONG), CallStep::Again { after, .. } if !after.is_zero()));
        let none = refused(Refusal::NotLeader(v1::NotLeader::default()));
        assert!(matches!(after_call(&none, 0, LONG), CallStep::Again { leader: None, after } if !after.is_zero()));
    }

    #[test]
    fn calls_are_repeated_after_faults_and_given_up_after_refusals_that_stay() {
        for fault in [Fault::TimedOut, Fault::Transport("reset".into()), indeterminate()] {
            assert!(matches!(after_call(&fault, 1, LONG), CallStep::Again { leader: None, .. }));
        }
        let unknown = refused(Refusal::UnknownNamespace(v1::UnknownNamespace { id: 1, name: String::new() }));
        assert!(matches!(after_call(&unknown, 0, Duration::ZERO), CallStep::Again { .. }));
        assert_eq!(after_call(&unknown, 9, NAMESPACE_SETTLES), CallStep::GiveUp);
        assert_eq!(after_call(&refused(Refusal::malformed("a", "b", "c")), 0, Duration::ZERO), CallStep::GiveUp);
    }

    #[test]
    fn a_commit_goes_to_the_next_holder_at_once_and_pauses_when_all_were_asked() {
        assert_eq!(after_commit(&Fault::TimedOut, 0, 2), CommitStep::SameSlot { after: Duration::ZERO });
        assert!(matches!(after_commit(&Fault::TimedOut, 1, 2), CommitStep::SameSlot { after } if !after.is_zero()));
        assert_eq!(after_commit(&unknown_grant(), 0, 2), CommitStep::SameSlot { after: Duration::ZERO });
        assert_eq!(after_commit(&unknown_grant(), 1, 2), CommitStep::Stop);
        assert!(matches!(after_commit(&indeterminate(), 7, 2), CommitStep::SameSlot { .. }));
    }

    #[test]
    fn who_is_told_when_to_come_again_does_not_come_sooner() {
        let full = v1::TooManyRequests { retry_after_ms: 900, ..v1::TooManyRequests::default() };
        let full = refused(Refusal::TooManyRequests(full));
        let again = Duration::from_millis(900);
        assert_eq!(after_call(&full, 0, Duration::ZERO), CallStep::Again { leader: None, after: again });
        assert_eq!(
            after_commit(&full, 0, 2),
            CommitStep::SameSlot { after: Duration::ZERO },
            "another holder has room"
        );
        assert_eq!(after_commit(&full, 1, 2), CommitStep::SameSlot { after: again });
    }

    #[test]
    fn only_silence_and_indeterminate_leave_unsure() {
        for unsure in [Fault::TimedOut, Fault::Transport("reset".into()), indeterminate()] {
            assert!(unsure.leaves_unsure());
        }
        for sure in [unknown_grant(), refused(Refusal::NotReady(v1::NotReady::default()))] {
            assert!(!sure.leaves_unsure());
        }
    }

    #[test]
    fn pauses_grow_and_stay_bounded() {
        assert!(pause(0) < pause(1));
        assert_eq!(pause(u32::MAX), PAUSE_LONGEST);
    }
}
