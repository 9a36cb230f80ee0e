//! Calls to other processes: channels by address, and the leader of a group as far as it is known.
//!
//! Decides whom to ask next and how long one attempt may take. Calls made here may be made any number of times: each is idempotent, so an
//! attempt whose fate is unknown is made again, with the same bytes, until the caller's deadline.

use crate::sharing::{self, Answer, Carry};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use quarry_proto::{
    protocol::Announce,
    refusal::Refusal,
    v1::{self, control_client::ControlClient, data_node_client::DataNodeClient, registry_client::RegistryClient},
};
use quarry_trust::{Expect, Trust};
use quarry_wire::{
    ids::{Generation, NodeId},
    limits::MESSAGE_BYTES_MAX,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep_until, timeout_at},
};
use tonic::{
    Code, Request, Status,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

/// A channel whose calls carry the protocol version.
pub(crate) type Link = InterceptedService<Channel, Announce>;

/// Longest wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// When a busy connection is asked whether its other end is there, and how long that may take to say so.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);
const KEEPALIVE_MAX: Duration = Duration::from_secs(3);
/// Longest single attempt: a leader that says nothing may not be one any more.
const ATTEMPT_MAX: Duration = Duration::from_secs(3);
/// Pause after all known addresses were asked without success; doubles up to the longest. One call of all that miss a leader looks for the
/// next one more often than that: the others hear of it.
const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_LONGEST: Duration = Duration::from_millis(500);
const PAUSE_LONGEST_OF_SEEKER: Duration = Duration::from_millis(50);
/// Channels kept; more addresses than a cluster has nodes are never hinted by honest ones.
const CHANNELS_MAX: usize = 1024;

/// Channels, one per address.
pub(crate) struct Channels {
    trust: Trust,
    open: Mutex<BTreeMap<String, (Expect, Channel)>>,
}

impl Channels {
    pub(crate) fn new(trust: Trust) -> Self {
        Self { trust, open: Mutex::default() }
    }

    /// The channel to `host:port`, where `expect` must be; connects when it is first used.
    pub(crate) fn to(&self, address: &str, expect: Expect) -> Result<Link, Status> {
        let mut open = self.open.lock();
        if let Some((_, channel)) = open.get(address).filter(|(expected, _)| *expected == expect) {
            return Ok(InterceptedService::new(channel.clone(), Announce));
        }
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| Status::invalid_argument(format!("{address:?} is not host:port: {error}")))?;
        let channel = endpoint
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEPALIVE_EVERY)
            .keep_alive_timeout(KEEPALIVE_MAX)
            .connect_with_connector_lazy(self.trust.connector(expect));
        if open.len() >= CHANNELS_MAX {
            open.clear();
        }
        open.insert(address.to_owned(), (expect, channel.clone()));
        Ok(InterceptedService::new(channel, Announce))
    }
}

/// The meta nodes.
pub(crate) struct Metas {
    /// Where it was told to look first.
    configured: Vec<String>,
    /// Those that the cluster has, as far as it was heard: nodes come, and go only by being retired.
    present: watch::Sender<Present>,
    channels: Channels,
    /// Where each group's leader was last.
    leaders: Mutex<BTreeMap<u32, String>>,
    /// Groups for whose leader a call looks on behalf of all.
    sought: Mutex<BTreeSet<u32>>,
    /// Tells those who wait that one of them was answered.
    found: Notify,
}

/// One call that looks for the leader of a group on behalf of all that wait for it.
struct Seeker<'a> {
    metas: &'a Metas,
    group: u32,
}

impl Drop for Seeker<'_> {
    fn drop(&mut self) {
        self.metas.sought.lock().remove(&self.group);
    }
}

/// The meta nodes of the cluster, and numbers that are used up.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct Present {
    addresses: BTreeMap<u64, String>,
    retired: BTreeSet<u64>,
    /// Where those of them were that are retired.
    left: BTreeSet<String>,
    /// In which all of this is so: a generation that begins from a backup does not know of later removals, and has meta nodes of its own.
    generation: Generation,
}

impl Present {
    /// Takes in what one of them says. It may be behind, so nobody goes because it does not name them.
    fn learn(&mut self, generation: Generation, metas: &[v1::MetaInfo], retired: &[u64]) {
        if generation < self.generation {
            return;
        }
        if generation > self.generation {
            *self = Self { generation, ..Self::default() };
        }
        self.retired.extend(retired);
        self.addresses.extend(metas.iter().map(|meta| (meta.node, meta.address.clone())));
        let gone: Vec<u64> = self.addresses.keys().copied().filter(|node| self.retired.contains(node)).collect();
        self.left.extend(gone.into_iter().filter_map(|node| self.addresses.remove(&node)));
    }
}

/// How a call to a leader ended other than well.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LeaderCallError {
    /// It was turned down for good.
    #[error("{refusal}")]
    Refused {
        /// What the last attempt was told.
        refusal: Refusal,
        /// Whether an earlier attempt may have taken effect.
        unsure: bool,
    },
    /// No answer that settles it came in time.
    #[error("no settling answer in time; last: {last}")]
    Deadline { last: String },
}

impl Metas {
    pub(crate) fn new(addresses: Vec<String>, trust: Trust) -> Self {
        let present = watch::Sender::default();
        let (leaders, sought) = (Mutex::default(), Mutex::default());
        Self { configured: addresses, present, channels: Channels::new(trust), leaders, sought, found: Notify::new() }
    }

    /// Where to ask: those that the cluster has, then those that it was configured with.
    fn addresses(&self) -> Vec<String> {
        let mut all: Vec<String> = self.present.borrow().addresses.values().cloned().collect();
        let others = self.configured.iter().filter(|address| !all.contains(address)).cloned();
        all.extend(others.collect::<Vec<_>>());
        all
    }

    /// Where to send heartbeats: to the meta nodes that the cluster has, and to those that it was configured with unless they are known to be
    /// retired. A meta node that moved is found by its configured address alone.
    pub(crate) fn listeners(&self) -> BTreeSet<String> {
        let present = self.present.borrow();
        let configured = self.configured.iter().filter(|address| !present.left.contains(*address));
        configured.chain(present.addresses.values()).cloned().collect()
    }

    /// Tells when [`Metas::listeners`] changes.
    pub(crate) fn watch(&self) -> watch::Receiver<Present> {
        self.present.subscribe()
    }

    /// Takes note of the meta nodes that the cluster has, and of nodes that are gone for good.
    pub(crate) fn learn(&self, generation: Generation, metas: &[v1::MetaInfo], changes: Option<&v1::Changes>) {
        let retired = changes.map_or(&[][..], |changes| &changes.retired);
        self.present.send_if_modified(|present| {
            let before = present.clone();
            present.learn(generation, metas, retired);
            *present != before
        });
    }

    pub(crate) fn control(&self, address: &str) -> Result<ControlClient<Link>, Status> {
        let client = ControlClient::new(self.channels.to(address, Expect::META)?);
        Ok(client.max_decoding_message_size(MESSAGE_BYTES_MAX).max_encoding_message_size(MESSAGE_BYTES_MAX))
    }

    pub(crate) fn registry(&self, address: &str) -> Result<RegistryClient<Link>, Status> {
        let client = RegistryClient::new(self.channels.to(address, Expect::META)?);
        Ok(client.max_decoding_message_size(MESSAGE_BYTES_MAX).max_encoding_message_size(MESSAGE_BYTES_MAX))
    }

    /// Takes note of who leads.
    pub(crate) fn heard(&self, groups: &[v1::GroupInfo]) {
        let mut leaders = self.leaders.lock();
        for group in groups.iter().filter(|group| group.leader != 0 && !group.address.is_empty()) {
            leaders.insert(group.group, group.address.clone());
        }
    }

    /// Everything the directory knows, from the first meta node that answers.
    pub(crate) async fn describe(&self, deadline: Instant) -> Result<v1::DescribeReply, Status> {
        let mut last = Status::unavailable("no meta node is known");
        for address in &self.addresses() {
            let attempt = async {
                let request = with_timeout(v1::DescribeRequest { seen: None }, deadline);
                Ok::<_, Status>(self.control(address)?.describe(request).await?.into_inner())
            };
            match timeout_at(deadline.min(Instant::now() + ATTEMPT_MAX), attempt).await {
                Ok(Ok(reply)) => return Ok(reply),
                Ok(Err(status)) => last = status,
                Err(_) => last = Status::deadline_exceeded(format!("{address} did not answer")),
            }
        }
        Err(last)
    }

    /// Calls the leader of `group`, whoever it turns out to be, until an answer settles it or the deadline has passed.
    pub(crate) async fn at_leader<T>(
        &self,
        group: u32,
        deadline: Instant,
        call: impl Fn(String, Instant) -> BoxFuture<'static, Result<T, Status>>,
    ) -> Result<T, LeaderCallError> {
        let mut last = "nobody was asked".to_owned();
        let mut next = 0;
        let mut pause = PAUSE_FIRST;
        let mut seeker = None;
        let mut unsure = false;
        while Instant::now() < deadline {
            // Before the attempt: an answer that another one gets meanwhile is not missed.
            let found = self.found.notified();
            let hinted = self.leaders.lock().get(&group).cloned();
            let addresses = self.addresses();
            let address = hinted.clone().unwrap_or_else(|| {
                next += 1;
                addresses[(next - 1) % addresses.len()].clone()
            });
            let until = deadline.min(Instant::now() + ATTEMPT_MAX);
            let answer = timeout_at(until, call(address.clone(), until)).await;
            let status = match answer {
                Ok(Ok(reply)) => {
                    self.leaders.lock().insert(group, address);
                    if seeker.is_some() {
                        self.found.notify_waiters();
                    }
                    return Ok(reply);
                }
                Ok(Err(status)) => status,
                Err(_) => Status::deadline_exceeded("no answer"),
            };
            last = format!("{address}: {}", status.message());
            let mut wait = Duration::ZERO;
            let mut leads = false;
            match Refusal::from_status(&status) {
                Some(Refusal::NotLeader(hint)) => {
                    let to = (hint.leader != 0 && !hint.address.is_empty() && hint.address != address)
                        .then_some(hint.address);
                    // A hint that leads in a circle costs a pause like a full round without a leader.
                    let circle = to.is_some() && hinted.is_some();
                    self.point(group, &address, to);
                    if circle {
                        wait = pause;
                    }
                }
                Some(Refusal::NotReady(it)) => wait = Duration::from_millis(it.retry_after_ms).max(pause),
                Some(Refusal::TooManyRequests(it)) => {
                    // There is a leader: it has too much to do.
                    (wait, leads) = (Duration::from_millis(it.retry_after_ms).max(pause), true);
                }
                Some(Refusal::Indeterminate(_)) => (wait, unsure) = (pause, true),
                Some(refusal) => return Err(LeaderCallError::Refused { refusal, unsure }),
                None => {
                    unsure = true;
                    // Who had little time left knows nothing of the leader.
                    let is_late = matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled);
                    if !is_late || until < deadline {
                        self.point(group, &address, None);
                    }
                }
            }
            if hinted.is_none() && next % addresses.len() == 0 {
                wait = wait.max(pause);
            }
            if !wait.is_zero() {
                seeker = if leads { None } else { seeker.or_else(|| self.seek(group)) };
                let longest = if seeker.is_some() { PAUSE_LONGEST_OF_SEEKER } else { PAUSE_LONGEST };
                tokio::select! {
                    () = sleep_until(deadline.min(Instant::now() + wait.min(longest))) => {}
                    () = found, if seeker.is_none() && !leads => {}
                }
                pause = (pause * 2).min(longest);
            }
        }
        Err(LeaderCallError::Deadline { last })
    }

    /// Makes this call the one that looks for the leader of `group`, unless there is one.
    fn seek(&self, group: u32) -> Option<Seeker<'_>> {
        self.sought.lock().insert(group).then(|| Seeker { metas: self, group })
    }

    /// Forgets that `was` leads `group`, and notes who does if that is known.
    fn point(&self, group: u32, was: &str, to: Option<String>) {
        let mut leaders = self.leaders.lock();
        if let Some(to) = to {
            leaders.insert(group, to);
        } else if leaders.get(&group).is_some_and(|held| held == was) {
            leaders.remove(&group);
        }
    }
}

impl Carry for Metas {
    async fn carry(
        &self,
        address: &str,
        publishes: Vec<v1::PublishRequest>,
        until: Instant,
    ) -> Result<Vec<Answer>, Status> {
        let count = publishes.len();
        let request = with_timeout(sharing::message(publishes), until);
        let reply = self.control(address)?.publish(request).await?.into_inner();
        Ok(sharing::answers(reply, count))
    }
}

/// A request that tells the server how long the caller waits.
pub(crate) fn with_timeout<T>(message: T, deadline: Instant) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline.saturating_duration_since(Instant::now()));
    request
}

/// A client of another data node.
pub(crate) fn data_node(channels: &Channels, node: NodeId, address: &str) -> Result<DataNodeClient<Link>, Status> {
    let client = DataNodeClient::new(channels.to(address, Expect::data_node(node))?);
    Ok(client.max_decoding_message_size(MESSAGE_BYTES_MAX).max_encoding_message_size(MESSAGE_BYTES_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    };

    #[test]
    fn a_meta_node_that_is_not_named_stays_and_one_that_is_retired_goes_for_good() {
        let meta = |node: u64| v1::MetaInfo { node, address: format!("h:{node}") };
        let mut present = Present::default();
        let first = Generation(1);
        present.learn(first, &[meta(1), meta(2), meta(3)], &[]);
        present.learn(first, &[meta(1), meta(4)], &[]);
        assert_eq!(present.addresses.keys().copied().collect::<Vec<_>>(), [1, 2, 3, 4]);
        present.learn(first, &[], &[2]);
        // One that is behind, or was removed itself, still names it.
        present.learn(first, &[meta(1), meta(2), meta(3)], &[]);
        assert_eq!(present.addresses.keys().copied().collect::<Vec<_>>(), [1, 3, 4]);
        // A backup of before that removal was restored.
        present.learn(Generation(2), &[meta(2)], &[]);
        assert_eq!(present.addresses.keys().copied().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn heartbeats_go_where_the_cluster_says_and_where_it_was_configured_until_that_one_is_retired() {
        let listeners = |metas: &Metas| metas.listeners().into_iter().collect::<Vec<_>>();
        let metas = Metas::new(vec!["h:1".to_owned(), "h:2".to_owned()], Trust::off());
        assert_eq!(listeners(&metas), ["h:1", "h:2"]);
        // Node 1 listens elsewhere than the cluster knows: it would hear nothing if only the cluster were believed.
        let meta = |node: u64, address: &str| v1::MetaInfo { node, address: address.to_owned() };
        let first = Generation(1);
        metas.learn(first, &[meta(1, "old:1"), meta(2, "h:2")], None);
        assert_eq!(listeners(&metas), ["h:1", "h:2", "old:1"]);
        metas.learn(first, &[], Some(&v1::Changes { retired: vec![2], ..Default::default() }));
        assert_eq!(listeners(&metas), ["h:1", "old:1"]);
    }

    /// Fifty calls miss a leader that there is after 2.2 s. Time is tokio's own here, and passes when all wait.
    #[tokio::test(start_paused = true)]
    async fn one_call_looks_for_the_next_leader_often_and_the_others_hear_of_it() {
        let addresses = ["h:1", "h:2", "h:3"].map(str::to_owned).to_vec();
        let metas = Arc::new(Metas::new(addresses, Trust::off()));
        let (begun, asked) = (Instant::now(), Arc::new(AtomicU32::new(0)));
        let elected = begun + Duration::from_millis(2200);
        let calls: Vec<_> = (0..50)
            .map(|_| {
                let (metas, asked) = (Arc::clone(&metas), Arc::clone(&asked));
                tokio::spawn(async move {
                    let call = |address: String, _| -> BoxFuture<'static, Result<(), Status>> {
                        asked.fetch_add(1, Ordering::SeqCst);
                        let leads = address == "h:2" && Instant::now() >= elected;
                        Box::pin(
                            async move { if leads { Ok(()) } else { Err(Status::unavailable("it does not lead")) } },
                        )
                    };
                    metas.at_leader(7, begun + Duration::from_secs(30), call).await.unwrap();
                    Instant::now()
                })
            })
            .collect();
        for call in calls {
            let answered = call.await.unwrap();
            assert!(answered >= elected && answered <= elected + PAUSE_LONGEST_OF_SEEKER, "{:?}", answered - elected);
        }
        // If all asked as often as the one that looks, it would be some 6,600 times.
        assert!(asked.load(Ordering::SeqCst) < 2000, "{asked:?}");
        assert!(metas.sought.lock().is_empty());
    }
}
