//! Questions to the processes of a cluster: their own counters and states, asked of each of them, with or without a leader.
//!
//! Every call has a deadline. What the answers mean together ([`leader_of`], [`Health::judge`]) is decided by pure functions.

mod health;
mod plan;

pub use health::{Health, State, late_after_ms};
pub use plan::{BootstrapPlan, PLAN_VERSION, PlanError, PlannedMeta};

use crate::exit::{Code as Exit, Failure};
use bytes::Bytes;
use quarry_proto::{protocol::Announce, refusal::Refusal, v1};
use quarry_trust::{Expect, Trust};
use quarry_wire::{ids::NodeId, limits::MESSAGE_BYTES_MAX};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    future::Future,
    time::Duration,
};
use tonic::{
    Code, Status,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

/// Raft group of the directory.
pub const DIRECTORY: u32 = 0;
/// Raft group of the first shard.
pub const FIRST_SHARD: u32 = 1;
/// How long one meta node may be waited for by whoever can do without its answer: a node that is silent must not take the time of what is to be
/// done.
pub const LOOK: Duration = Duration::from_secs(1);
/// How long one meta node may take to make the cluster, before another is asked: it includes the first elections.
const BOOTSTRAP_CALL: Duration = Duration::from_secs(10);
/// Between two rounds of asking all meta nodes of a plan.
const BOOTSTRAP_PAUSE: Duration = Duration::from_millis(100);

/// Why a call to one process did not answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CallError {
    /// It answered with a refusal.
    #[error("{address}: {refusal}")]
    Refused {
        /// Who.
        address: String,
        /// What it says.
        refusal: Box<Refusal>,
    },
    /// Nobody answers there.
    #[error("{address} does not answer: {why}")]
    Unreachable {
        /// Where.
        address: String,
        /// What the network says.
        why: String,
    },
    /// No answer in time.
    #[error("{address} did not answer within {}", humantime::format_duration(*after))]
    Deadline {
        /// Who.
        address: String,
        /// How long was waited.
        after: Duration,
    },
    /// It failed.
    #[error("{address}: {code:?}: {why}")]
    Failed {
        /// Who.
        address: String,
        /// gRPC's code.
        code: Code,
        /// gRPC's message.
        why: String,
    },
    /// The address cannot be one.
    #[error("{address:?} is no address of the form host:port")]
    Address {
        /// What was given.
        address: String,
    },
    /// Of several that were asked nobody could do it, and some did not answer.
    #[error("{last}; no answer from: {}", silent.join(", "))]
    Silent {
        /// What was met last by those who answered, if any did.
        last: Box<Self>,
        /// Who did not answer, beside whom that names.
        silent: Vec<String>,
    },
}

impl CallError {
    /// Whether the same call may succeed a little later.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Deadline { .. } => true,
            Self::Refused { refusal, .. } => matches!(
                **refusal,
                Refusal::NotLeader(_) | Refusal::NotReady(_) | Refusal::TooManyRequests(_) | Refusal::Indeterminate(_)
            ),
            Self::Silent { last, .. } => last.is_passing(),
            Self::Failed { .. } | Self::Address { .. } => false,
        }
    }

    /// Whether nobody answered.
    #[must_use]
    pub const fn is_silence(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Deadline { .. })
    }

    /// The refusal, if it was one.
    #[must_use]
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::Refused { refusal, .. } => Some(refusal),
            Self::Silent { last, .. } => last.refusal(),
            Self::Unreachable { .. } | Self::Deadline { .. } | Self::Failed { .. } | Self::Address { .. } => None,
        }
    }

    /// The same, with those who did not answer, as far as it does not name them itself.
    #[must_use]
    pub(crate) fn beside(self, silent: impl IntoIterator<Item = String>) -> Self {
        let named = match &self {
            Self::Unreachable { address, .. } | Self::Deadline { address, .. } => address.clone(),
            _ => String::new(),
        };
        let silent: Vec<String> = silent.into_iter().filter(|address| *address != named).collect();
        if silent.is_empty() { self } else { Self::Silent { last: Box::new(self), silent } }
    }
}

pub(crate) type Calls = InterceptedService<Channel, Announce>;

pub(crate) async fn call<T, F: Future<Output = Result<tonic::Response<T>, Status>>>(
    trust: &Trust,
    expect: Expect,
    address: &str,
    deadline: Duration,
    run: impl FnOnce(Calls) -> F,
) -> Result<T, CallError> {
    let owned = || address.to_owned();
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|_| CallError::Address { address: owned() })?
        .connect_timeout(deadline)
        .timeout(deadline);
    let answer = async {
        let channel = endpoint.connect_with_connector(trust.connector(expect)).await.map_err(|wrong| {
            let mut deepest: &dyn std::error::Error = &wrong;
            while let Some(source) = deepest.source() {
                deepest = source;
            }
            failed(address, deadline, &trust.explain(address, Status::unavailable(deepest.to_string())))
        })?;
        let answer = run(InterceptedService::new(channel, Announce)).await;
        let answer = answer.map_err(|status| trust.explain(address, status));
        answer.map(tonic::Response::into_inner).map_err(|status| failed(address, deadline, &status))
    };
    let late = |_| CallError::Deadline { address: owned(), after: deadline };
    tokio::time::timeout(deadline, answer).await.map_err(late)?
}

fn failed(address: &str, after: Duration, status: &Status) -> CallError {
    let address = address.to_owned();
    if let Some(refusal) = Refusal::from_status(status) {
        return CallError::Refused { address, refusal: Box::new(refusal) };
    }
    match status.code() {
        Code::DeadlineExceeded | Code::Cancelled => CallError::Deadline { address, after },
        Code::Unavailable => CallError::Unreachable { address, why: status.message().to_owned() },
        // A connection that broke while it was used. What a server says has no cause here.
        Code::Unknown | Code::Internal if std::error::Error::source(status).is_some() => {
            CallError::Unreachable { address, why: status.message().to_owned() }
        }
        code => CallError::Failed { address, code, why: status.message().to_owned() },
    }
}

/// What the meta node at `address` knows.
///
/// # Errors
/// [`CallError`].
pub async fn status(trust: &Trust, address: &str, deadline: Duration) -> Result<v1::StatusReply, CallError> {
    call(trust, Expect::META, address, deadline, |calls| async {
        v1::admin_client::AdminClient::new(calls)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .status(v1::StatusRequest {})
            .await
    })
    .await
}

/// What the data node at `address` knows.
///
/// # Errors
/// [`CallError`].
pub async fn node_status(trust: &Trust, address: &str, deadline: Duration) -> Result<v1::NodeStatusReply, CallError> {
    call(trust, Expect::DATA_NODE, address, deadline, |calls| async {
        v1::data_node_client::DataNodeClient::new(calls)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .node_status(v1::NodeStatusRequest {})
            .await
    })
    .await
}

/// Hash over the canonical state of each group at the meta node at `address`, as they are now, or of these groups at these indices.
///
/// # Errors
/// [`CallError`].
pub async fn state_hash(
    trust: &Trust,
    address: &str,
    at: Vec<v1::GroupIndex>,
    deadline: Duration,
) -> Result<v1::StateHashReply, CallError> {
    call(trust, Expect::META, address, deadline, |calls| async {
        v1::admin_client::AdminClient::new(calls).state_hash(v1::StateHashRequest { at }).await
    })
    .await
}

/// Has the meta node at `address`, the leader of `group`, hand it to the meta node `to`; done when that one leads.
///
/// # Errors
/// [`CallError`].
pub async fn transfer_leader(
    trust: &Trust,
    address: &str,
    group: u32,
    to: u64,
    deadline: Duration,
) -> Result<v1::TransferLeaderReply, CallError> {
    call(trust, Expect::META, address, deadline, |calls| async move {
        v1::admin_client::AdminClient::new(calls)
            .transfer_leader(asked_within(v1::TransferLeaderRequest { group, to }, deadline))
            .await
    })
    .await
}

/// Has the meta node at `address` give away what it leads more than others; what it tried.
///
/// # Errors
/// [`CallError`].
pub async fn balance_leaders(
    trust: &Trust,
    address: &str,
    deadline: Duration,
) -> Result<v1::BalanceLeadersReply, CallError> {
    call(trust, Expect::META, address, deadline, |calls| async move {
        v1::admin_client::AdminClient::new(calls)
            .balance_leaders(asked_within(v1::BalanceLeadersRequest {}, deadline))
            .await
    })
    .await
}

/// Has the meta node at `address` give all its leaderships away and take none, or take part again; what it still leads.
///
/// # Errors
/// [`CallError`].
pub async fn drain(trust: &Trust, address: &str, undo: bool, deadline: Duration) -> Result<v1::DrainReply, CallError> {
    call(trust, Expect::META, address, deadline, |calls| async move {
        v1::admin_client::AdminClient::new(calls).drain(asked_within(v1::DrainRequest { undo }, deadline)).await
    })
    .await
}

/// A request whose server knows when it must have answered.
fn asked_within<T>(request: T, deadline: Duration) -> tonic::Request<T> {
    let mut request = tonic::Request::new(request);
    request.set_timeout(deadline);
    request
}

/// One entry that changes nothing through the log of a group, if the node at `address` leads it.
///
/// # Errors
/// [`CallError`].
pub async fn stamp(trust: &Trust, address: &str, group: u32, deadline: Duration) -> Result<(), CallError> {
    call(trust, Expect::META, address, deadline, |calls| async {
        v1::admin_client::AdminClient::new(calls).stamp(v1::StampRequest { group }).await
    })
    .await
    .map(drop)
}

/// Asks all at once; one answer or error each, in order.
pub async fn status_all(
    trust: &Trust,
    addresses: &[String],
    deadline: Duration,
) -> Vec<Result<v1::StatusReply, CallError>> {
    let asked: Vec<_> = addresses
        .iter()
        .map(|address| {
            let (trust, address) = (trust.clone(), address.clone());
            tokio::spawn(async move { status(&trust, &address, deadline).await })
        })
        .collect();
    let mut answers = Vec::with_capacity(asked.len());
    for task in asked {
        answers.push(task.await.expect("asking for a status does not panic"));
    }
    answers
}

/// Those of `addresses` that do not answer now, or not soon, while others do.
pub(crate) async fn silent(trust: &Trust, addresses: &[String], deadline: Duration) -> BTreeSet<String> {
    let answers = status_all(trust, addresses, LOOK.min(deadline)).await;
    let asked = addresses.iter().cloned().zip(answers);
    let is_silent = |answer: Result<_, CallError>| answer.is_err_and(|wrong| wrong.is_silence());
    let silent: BTreeSet<_> = asked.filter_map(|(address, answer)| is_silent(answer).then_some(address)).collect();
    // Where all are, it is not known of any.
    if silent.len() < addresses.len() { silent } else { BTreeSet::new() }
}

/// Asks the meta nodes of the cluster file, and those that the cluster has beside them; one answer or error each. Nodes of the file that the cluster
/// does not have any more, or that it knows under another address, are left out.
pub async fn status_of_present(
    trust: &Trust,
    addresses: &[String],
    deadline: Duration,
) -> (Vec<String>, Vec<Result<v1::StatusReply, CallError>>) {
    let named = status_all(trust, addresses, deadline).await;
    let others = others(addresses, &named);
    let answers = status_all(trust, &others, deadline).await;
    present(addresses.iter().cloned().zip(named).chain(others.into_iter().zip(answers)))
}

/// The meta nodes that the answers name and whom nobody has asked yet.
fn others(addresses: &[String], answers: &[Result<v1::StatusReply, CallError>]) -> Vec<String> {
    let heard = || answers.iter().filter_map(|answer| answer.as_ref().ok());
    let retired: BTreeSet<u64> = heard().flat_map(|reply| reply.retired.iter().copied()).collect();
    let answered: BTreeSet<u64> = heard().map(|reply| reply.node).collect();
    let metas = heard().flat_map(|reply| &reply.metas);
    let missing = metas.filter(|meta| !retired.contains(&meta.node) && !answered.contains(&meta.node));
    let missing: BTreeMap<u64, String> = missing.map(|meta| (meta.node, meta.address.clone())).collect();
    missing.into_values().filter(|address| !addresses.contains(address)).collect()
}

/// Leaves out nodes that were removed, and addresses where nobody answers and no meta node is said to be.
fn present(
    asked: impl Iterator<Item = (String, Result<v1::StatusReply, CallError>)>,
) -> (Vec<String>, Vec<Result<v1::StatusReply, CallError>>) {
    let asked: Vec<_> = asked.collect();
    let heard = || asked.iter().filter_map(|(_, answer)| answer.as_ref().ok());
    let retired: BTreeSet<u64> = heard().flat_map(|reply| reply.retired.iter().copied()).collect();
    let metas: BTreeSet<String> = heard()
        .flat_map(|reply| &reply.metas)
        .filter(|it| !retired.contains(&it.node))
        .map(|it| it.address.clone())
        .collect();
    let stays = |address: &String, answer: &Result<v1::StatusReply, CallError>| match answer {
        Ok(reply) => !retired.contains(&reply.node),
        Err(_) => metas.is_empty() || metas.contains(address),
    };
    asked.into_iter().filter(|(address, answer)| stays(address, answer)).unzip()
}

/// Makes the cluster of `plan`, asking its meta nodes in turn and following their hints until one has done it. Doing it again changes nothing.
///
/// # Errors
/// [`CallError`]: at once if time does not change it, else at the deadline the last that a node said; [`Refusal::AlreadyBootstrapped`] only if a
/// node belongs to another cluster.
pub async fn bootstrap(plan: &BootstrapPlan, trust: &Trust, deadline: Duration) -> Result<(), CallError> {
    let began = tokio::time::Instant::now();
    let left = || deadline.saturating_sub(began.elapsed());
    let member = |meta: &PlannedMeta| v1::MetaMember {
        node: meta.node,
        address: meta.address.clone(),
        certificate: Bytes::from(meta.certificate.encode()),
    };
    let request = v1::BootstrapRequest {
        cluster: Bytes::copy_from_slice(&plan.cluster.0),
        root: Bytes::copy_from_slice(&plan.root.0),
        shards: plan.shards,
        metas: plan.metas.iter().map(member).collect(),
    };
    let mut last = CallError::Address { address: String::new() };
    let mut hinted = None;
    while !plan.metas.is_empty() {
        let mut turns = Turns::new(&plan.metas, hinted);
        let (mut made, mut waits) = (false, false);
        while let Some(meta) = turns.next() {
            let request = request.clone();
            let answer = call(trust, Expect::META, &meta.address, BOOTSTRAP_CALL.min(left()), |calls| async {
                v1::admin_client::AdminClient::new(calls).bootstrap(request).await
            })
            .await;
            let Err(wrong) = answer else { return Ok(()) };
            if let CallError::Refused { refusal, .. } = &wrong {
                match &**refusal {
                    Refusal::AlreadyBootstrapped(it) if it.cluster[..] == plan.cluster.0 => {
                        made = true;
                        continue;
                    }
                    Refusal::NotLeader(it) => {
                        hinted = Some(it.leader);
                        turns.prefer(it.leader);
                    }
                    _ => {}
                }
                waits = true;
            }
            if !wrong.is_passing() {
                return Err(wrong);
            }
            // What a node said tells more than that another, or the same in the last moment, did not answer.
            if matches!(wrong, CallError::Refused { .. }) || !matches!(last, CallError::Refused { .. }) {
                last = wrong;
            }
            if left().is_zero() {
                return Err(last);
            }
        }
        // A node that only knows that the cluster is there does not know whether another is still about to make it whole.
        if made && !waits {
            return Ok(());
        }
        tokio::time::sleep(BOOTSTRAP_PAUSE.min(left())).await;
    }
    Err(last)
}

/// The order in which the meta nodes of a plan are asked: each once, hinted ones first.
struct Turns<'a>(VecDeque<&'a PlannedMeta>);

impl<'a> Turns<'a> {
    fn new(metas: &'a [PlannedMeta], first: Option<u64>) -> Self {
        let mut turns = Self(metas.iter().collect());
        if let Some(node) = first {
            turns.prefer(node);
        }
        turns
    }
    /// Asks `node` next, if it is of the plan and was not asked yet.
    fn prefer(&mut self, node: u64) {
        if let Some(at) = self.0.iter().position(|meta| meta.node == node) {
            let meta = self.0.remove(at).expect("it was found there");
            self.0.push_front(meta);
        }
    }
    fn next(&mut self) -> Option<&'a PlannedMeta> {
        self.0.pop_front()
    }
}

/// The leader of `group` in these answers: who says so itself, in the highest term.
#[must_use]
pub fn leader_of<'a>(answers: impl IntoIterator<Item = &'a v1::StatusReply>, group: u32) -> Option<NodeId> {
    let leads = |reply: &'a v1::StatusReply| {
        let it = reply.groups.iter().find(|it| it.group == group && it.role == "leader")?;
        Some((it.term, NodeId(reply.node)))
    };
    answers.into_iter().filter_map(leads).max().map(|(_, node)| node)
}

/// What to do where roles forbid a question.
pub const ADMINISTRATOR: &str = "this needs an administrator's credentials: --credentials or QUARRY_CREDENTIALS";

/// If nobody answered and somebody said that these credentials may not ask: that is what is wrong, and no outage.
///
/// # Errors
/// What was said, with a hint.
pub fn unless_forbidden<T>(answers: &[Result<T, CallError>]) -> Result<(), Failure> {
    let forbidden = |wrong: &&CallError| matches!(wrong, CallError::Refused { refusal, .. } if matches!(**refusal, Refusal::Forbidden(_)));
    match answers.iter().filter_map(|answer| answer.as_ref().err()).find(forbidden) {
        Some(wrong) if answers.iter().all(Result::is_err) => Err(Failure::from(wrong.clone()).hint(ADMINISTRATOR)),
        _ => Ok(()),
    }
}

/// That somebody answered.
///
/// # Errors
/// That nobody did, with what each one met.
pub fn is_heard<T>(answers: &[Result<T, CallError>]) -> Result<(), Failure> {
    if answers.iter().any(Result::is_ok) { Ok(()) } else { Err(nobody(answers)) }
}

/// No meta node answers, and what each one met.
pub fn nobody<T>(answers: &[Result<T, CallError>]) -> Failure {
    let met: Vec<String> = answers.iter().filter_map(|answer| Some(answer.as_ref().err()?.to_string())).collect();
    Failure::new(Exit::Unavailable, format!("no meta node answers: {}", met.join("; ")))
}

/// Calls and bytes by method, summed over processes; the bytes of both directions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic(BTreeMap<String, Moved>);

/// Calls of one method, and the bytes of their bodies in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Calls.
    pub calls: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Traffic {
    /// Adds the counters of one server.
    pub fn add(&mut self, counters: &[v1::MethodCounter]) {
        for counter in counters {
            let moved = self.0.entry(counter.method.clone()).or_default();
            moved.calls += counter.calls;
            moved.bytes += counter.received_bytes + counter.sent_bytes;
        }
    }
    /// What was added since `before`, which must be an earlier reading of the same processes.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let grown = |(method, now): (&String, &Moved)| {
            let was = before.0.get(method).copied().unwrap_or_default();
            let moved =
                Moved { calls: now.calls.saturating_sub(was.calls), bytes: now.bytes.saturating_sub(was.bytes) };
            (moved != Moved::default()).then(|| (method.clone(), moved))
        };
        Self(self.0.iter().filter_map(grown).collect())
    }
    /// Sum over the methods that `wanted` says.
    pub fn sum(&self, wanted: impl Fn(&str) -> bool) -> Moved {
        self.0.iter().filter(|(method, _)| wanted(method)).fold(Moved::default(), |sum, (_, moved)| Moved {
            calls: sum.calls + moved.calls,
            bytes: sum.bytes + moved.bytes,
        })
    }
    /// By method.
    pub fn methods(&self) -> impl Iterator<Item = (&str, Moved)> {
        self.0.iter().map(|(method, moved)| (method.as_str(), *moved))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Root;
    use quarry_wire::{certificate::Role, ids::CertificateSerial};

    pub(super) fn reply(node: u64, role: &str, term: u64, leader: u64) -> v1::StatusReply {
        let group = |group| v1::GroupStatus {
            group,
            role: role.to_owned(),
            term,
            leader,
            members: vec![1, 2, 3],
            ..Default::default()
        };
        v1::StatusReply {
            node,
            cluster: Bytes::from_static(&[1; 16]),
            groups: vec![group(0), group(1)],
            ..Default::default()
        }
    }

    pub(super) fn addresses() -> Vec<String> {
        (1..=3).map(|n| format!("127.0.0.1:{n}")).collect()
    }

    pub(super) fn gone() -> Result<v1::StatusReply, CallError> {
        Err(CallError::Unreachable { address: "127.0.0.1:1".to_owned(), why: "refused".to_owned() })
    }

    #[test]
    fn the_leader_of_the_highest_term_is_the_leader() {
        let answers = [reply(1, "leader", 3, 1), reply(2, "leader", 4, 2), reply(3, "follower", 4, 2)];
        assert_eq!(leader_of(&answers, 1), Some(NodeId(2)));
        assert_eq!(leader_of(&answers[2..], 1), None);
    }

    #[test]
    fn removed_nodes_are_not_missed() {
        let mut shrunk = reply(1, "leader", 3, 1);
        shrunk.retired = vec![3];
        shrunk.metas = vec![1, 2, 4, 5]
            .into_iter()
            .map(|node| v1::MetaInfo { node, address: format!("127.0.0.1:{node}") })
            .collect();
        let answers = [Ok(shrunk), gone(), Ok(reply(3, "follower", 2, 1))];
        assert_eq!(others(&addresses(), &answers), ["127.0.0.1:4", "127.0.0.1:5"]);
        let (addresses, _) = present(addresses().into_iter().zip(answers));
        assert_eq!(addresses, ["127.0.0.1:1", "127.0.0.1:2"], "the third was removed, the second is missed");
    }

    #[test]
    fn a_plan_survives_its_file_and_unknown_keys_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bootstrap.toml");
        let root = Root::generate().unwrap();
        let identity = root.certify(CertificateSerial(1), NodeId(1), Role::Meta).unwrap();
        let meta =
            PlannedMeta { node: 1, address: "127.0.0.1:1".to_owned(), certificate: identity.certificate.clone() };
        let plan = BootstrapPlan { cluster: root.cluster, root: root.public(), shards: 1, metas: vec![meta] };
        plan.write(&path).unwrap();
        assert_eq!(BootstrapPlan::read(&path).unwrap(), plan);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("shard_count = 1\n{text}")).unwrap();
        assert!(
            matches!(BootstrapPlan::read(&path), Err(PlanError::Layout { why, .. }) if why.contains("shard_count"))
        );
        std::fs::write(&path, text.replace("version = 1", "version = 9")).unwrap();
        assert!(matches!(BootstrapPlan::read(&path), Err(PlanError::Field { field: "version", .. })));
    }

    #[test]
    fn the_meta_nodes_of_a_plan_are_asked_once_each_and_the_hinted_one_next() {
        let root = Root::generate().unwrap();
        let meta = |node: u64| {
            let certificate = root.certify(CertificateSerial(node), NodeId(node), Role::Meta).unwrap().certificate;
            PlannedMeta { node, address: format!("127.0.0.1:{node}"), certificate }
        };
        let metas = [meta(1), meta(2), meta(3)];
        let mut turns = Turns::new(&metas, None);
        let mut next = |hint| {
            let node = turns.next().map(|meta| meta.node);
            turns.prefer(hint);
            node
        };
        // Neither no leader, nor a stranger, nor one that was asked before changes the order.
        assert_eq!([next(3), next(1), next(0), next(9)], [Some(1), Some(3), Some(2), None]);
        assert_eq!(Turns::new(&metas, Some(2)).0.iter().map(|meta| meta.node).collect::<Vec<_>>(), [2, 1, 3]);
    }

    #[test]
    fn traffic_is_summed_over_servers_and_counted_since_an_earlier_reading() {
        let counter = |method: &str, calls, received_bytes, sent_bytes| v1::MethodCounter {
            method: method.to_owned(),
            calls,
            received_bytes,
            sent_bytes,
        };
        let mut before = Traffic::default();
        before.add(&[counter("/a/X", 1, 10, 20), counter("/a/Y", 1, 1, 1)]);
        let mut after = Traffic::default();
        after.add(&[counter("/a/X", 2, 15, 40), counter("/a/Y", 1, 1, 1)]);
        after.add(&[counter("/a/Z", 5, 0, 7)]);
        let grown = after.since(&before);
        assert_eq!(
            grown.methods().collect::<Vec<_>>(),
            [("/a/X", Moved { calls: 1, bytes: 25 }), ("/a/Z", Moved { calls: 5, bytes: 7 }),]
        );
        assert_eq!(grown.sum(|method| method.ends_with('Z')), Moved { calls: 5, bytes: 7 });
    }
}
