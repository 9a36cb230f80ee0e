//! Calls to meta and data nodes.
//!
//! Decides whom to ask: the leader last heard of, then the meta nodes in turn. Leaves to `retry.rs` whether to ask again, and to `view.rs`
//! what to believe. Every call has a deadline, which travels with it; only idempotent requests go through [`Control::ask`].

use crate::{
    cluster::Cluster,
    error::CallError,
    host::Entropy,
    reached::Reached,
    retry::{self, CallStep, Fault},
    stats::Counters,
    view::View,
};
use parking_lot::{Mutex, RwLock};
use quarry_proto::{
    protocol::Announce,
    refusal::Refusal,
    v1::{self, control_client::ControlClient, data_node_client::DataNodeClient},
};
use quarry_trust::{Expect, Trust};
use quarry_wire::{ids::NodeId, keyring::Keyring, limits::MESSAGE_BYTES_MAX};
use std::{
    collections::HashMap,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout_at};
use tonic::{
    Request, Response, Status,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

/// The directory's Raft group.
pub(crate) const DIRECTORY: u32 = 0;

/// How long the first meta node that is asked for a description has for its answer; each one after it has twice the time.
const DESCRIBE_FIRST: Duration = Duration::from_millis(500);

/// A meta node.
pub(crate) type Meta = ControlClient<InterceptedService<Channel, Announce>>;
/// A data node.
pub(crate) type Node = DataNodeClient<InterceptedService<Channel, Announce>>;

/// The way to the servers, and what they told.
#[derive(Debug)]
pub(crate) struct Control {
    cluster: Cluster,
    /// Longest time for one attempt of a call.
    attempt: Duration,
    entropy: Arc<dyn Entropy>,
    counters: Arc<Counters>,
    trust: Trust,
    channels: Mutex<HashMap<String, (Expect, Channel)>>,
    /// Address of the leader last heard of, per group.
    leaders: Mutex<HashMap<u32, String>>,
    /// What was met last where a group's leader was looked for. It counts as long as none is known.
    missed: Mutex<HashMap<u32, String>>,
    /// Latest log time that a group's replies carried, in milliseconds.
    applied_ms: Mutex<HashMap<u32, u64>>,
    view: RwLock<View>,
    next_meta: AtomicUsize,
}

impl Control {
    pub(crate) fn new(
        cluster: Cluster,
        trust: Trust,
        attempt: Duration,
        entropy: Arc<dyn Entropy>,
        counters: Arc<Counters>,
    ) -> Result<Self, CallError> {
        let keyring = Keyring::new(cluster.uuid, cluster.root)
            .map_err(|error| CallError::Untrusted { why: error.to_string() })?;
        // Clients do not all begin with the same node.
        let next_meta = AtomicUsize::new(usize::try_from(entropy.bits() % 1024).expect("below 1024"));
        Ok(Self {
            cluster,
            attempt,
            entropy,
            counters,
            trust,
            channels: Mutex::default(),
            leaders: Mutex::default(),
            missed: Mutex::default(),
            applied_ms: Mutex::default(),
            view: RwLock::new(View::new(keyring)),
            next_meta,
        })
    }

    /// How this client proves who it is.
    pub(crate) fn trust(&self) -> &Trust {
        &self.trust
    }

    /// What is believed now. Never held across an await.
    pub(crate) fn view(&self) -> &RwLock<View> {
        &self.view
    }

    /// Asks the leader of `group`, as often as it makes sense until `deadline`.
    pub(crate) async fn ask<Q, R, F>(
        &self,
        group: u32,
        method: &'static str,
        request: &Q,
        deadline: Instant,
        send: impl Fn(Meta, Request<Q>) -> F,
    ) -> Result<R, CallError>
    where
        Q: Clone,
        F: Future<Output = Result<Response<R>, Status>>,
    {
        self.ask_noting(group, method, request, deadline, send, &AtomicBool::new(false)).await
    }

    /// As [`Control::ask`]; sets `unsure` once an attempt ended without saying whether it took effect.
    async fn ask_noting<Q, R, F>(
        &self,
        group: u32,
        method: &'static str,
        request: &Q,
        deadline: Instant,
        send: impl Fn(Meta, Request<Q>) -> F,
        unsure: &AtomicBool,
    ) -> Result<R, CallError>
    where
        Q: Clone,
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let began = Instant::now();
        let mut hint = self.leaders.lock().get(&group).cloned();
        let mut attempt = 0;
        let mut reached = Reached::default();
        loop {
            let address = hint.unwrap_or_else(|| self.any_meta());
            // Who had little time left knows nothing of the node.
            let has_time = Instant::now() + self.attempt <= deadline;
            let fault = match self.try_meta(&address, method, request.clone(), deadline, &send).await {
                Ok(reply) => {
                    self.leaders.lock().insert(group, address);
                    self.missed.lock().remove(&group);
                    return Ok(reply);
                }
                Err(fault) => fault,
            };
            if fault.leaves_unsure() {
                unsure.store(true, Ordering::Relaxed);
            }
            let CallStep::Again { leader, after } = retry::after_call(&fault, attempt, began.elapsed()) else {
                return Err(fault.into_error(&format!("the leader of group {group}")));
            };
            let is_silent = has_time && matches!(fault, Fault::TimedOut | Fault::Transport(_));
            // Who does not answer for one group does not for the others that it led.
            self.leaders.lock().retain(|other, held| *other != group && !(is_silent && *held == address));
            reached.note(&address, &fault);
            let mut metas: Vec<String> = self.view.read().metas().map(str::to_owned).collect();
            if metas.is_empty() {
                metas.clone_from(&self.cluster.metas);
            }
            let told = reached.told(group, &metas);
            let missed = told.as_ref().map_or_else(|| fault.to_string(), |told| format!("{told}; {fault}"));
            self.missed.lock().insert(group, missed);
            if Instant::now() + after >= deadline {
                return Err(gave_up(fault, &format!("the leader of group {group}"), told));
            }
            hint = leader.or_else(|| is_silent.then(|| self.another_meta(&address)));
            self.pause(after).await;
            attempt += 1;
        }
    }

    /// Why no slab came, as far as is known of the leader of `group`: for those whose own time ends before that of the call that waits for it.
    pub(crate) fn of_leader(&self, group: u32) -> String {
        if let Some(address) = self.leaders.lock().get(&group) {
            return format!("none was granted in time by {address}, which leads group {group} as far as is known");
        }
        self.missed.lock().get(&group).cloned().unwrap_or_else(|| format!("nobody is known to lead group {group}"))
    }

    /// One attempt at one meta node.
    async fn try_meta<Q, R, F>(
        &self,
        address: &str,
        method: &'static str,
        message: Q,
        deadline: Instant,
        send: &impl Fn(Meta, Request<Q>) -> F,
    ) -> Result<R, Fault>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let client = ControlClient::with_interceptor(self.channel(address, Expect::META)?, Announce)
            .max_decoding_message_size(MESSAGE_BYTES_MAX);
        let until = deadline.min(Instant::now() + self.attempt);
        self.once(address, method, message, until, |request| send(client.clone(), request)).await
    }

    /// One attempt at one data node, until `deadline`.
    pub(crate) async fn try_node<Q, R, F>(
        &self,
        node: NodeId,
        method: &'static str,
        message: Q,
        deadline: Instant,
        send: impl Fn(Node, Request<Q>) -> F,
    ) -> Result<R, Fault>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let known = self.view.read().node(node).map(str::to_owned);
        let address = match known {
            Some(address) => address,
            None => {
                let described = self.describe(deadline).await;
                let found = self.view.read().node(node).map(str::to_owned);
                found.ok_or_else(|| {
                    let why = described.err().map_or_else(String::new, |error| format!(" ({error})"));
                    Fault::Transport(format!("the address of {node} is not known{why}"))
                })?
            }
        };
        let client = DataNodeClient::with_interceptor(self.channel(&address, Expect::data_node(node))?, Announce)
            .max_decoding_message_size(MESSAGE_BYTES_MAX);
        self.once(&address, method, message, deadline, |request| send(client.clone(), request)).await
    }

    async fn once<Q, R, F>(
        &self,
        address: &str,
        method: &'static str,
        message: Q,
        until: Instant,
        send: impl Fn(Request<Q>) -> F,
    ) -> Result<R, Fault>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let mut request = Request::new(message);
        request.set_timeout(until.saturating_duration_since(Instant::now()));
        self.counters.called(method);
        match timeout_at(until, send(request)).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(match self.trust.distrust(address, &status) {
                Some(why) => Fault::Distrust(why),
                None => Fault::of(&status),
            }),
            Err(_) => Err(Fault::TimedOut),
        }
    }

    /// Learns what changed in the directory, from its leader if one is known, else from any meta node.
    pub(crate) async fn describe(&self, deadline: Instant) -> Result<(), CallError> {
        let mut hint = self.leaders.lock().get(&DIRECTORY).cloned();
        let mut attempt = 0;
        loop {
            let address = hint.take().unwrap_or_else(|| self.any_meta());
            let request = v1::DescribeRequest { seen: self.view.read().seen() };
            let send = |mut meta: Meta, request| async move { meta.describe(request).await };
            let mut after = retry::pause(attempt);
            // Any of them can answer: one that does not answer soon is not waited for until it was its turn again.
            let until = deadline.min(Instant::now() + DESCRIBE_FIRST * 2u32.saturating_pow(attempt.min(8)));
            let error = match self.try_meta(&address, "Describe", request, until, &send).await {
                Ok(reply) => match self.described(reply) {
                    Ok(()) => return Ok(()),
                    // A node that was not bootstrapped yet, or lags a generation behind: another may know more.
                    Err(error) => error,
                },
                Err(fault @ (Fault::Refused(_) | Fault::Distrust(_)))
                    if retry::after_call(&fault, attempt, Duration::MAX) == CallStep::GiveUp =>
                {
                    return Err(fault.into_error("a meta node"));
                }
                Err(fault) => {
                    after = after.max(fault.come_again().unwrap_or_default());
                    fault.into_error("any meta node")
                }
            };
            if Instant::now() + after >= deadline {
                return Err(error);
            }
            self.pause(after).await;
            attempt += 1;
        }
    }

    fn described(&self, mut reply: v1::DescribeReply) -> Result<(), CallError> {
        let groups = std::mem::take(&mut reply.groups);
        self.view.write().described(reply)?;
        for group in groups {
            self.applied(group.group, group.applied_ms);
            if group.leader != 0 && !group.address.is_empty() {
                self.leaders.lock().insert(group.group, group.address);
            }
        }
        Ok(())
    }

    /// Runs `check` on the view; if it fails for what we may merely not know yet, once more after the cluster was described anew.
    pub(crate) async fn believing<T>(
        &self,
        deadline: Instant,
        mut check: impl FnMut(&mut View) -> Result<T, crate::view::Doubt>,
    ) -> Result<T, CallError> {
        let first = check(&mut self.view.write());
        let doubt = match first {
            Ok(found) => return Ok(found),
            Err(doubt) => doubt,
        };
        if doubt.may_be_ours() {
            self.view.write().forget_seen();
            self.describe(deadline).await?;
            if let Ok(found) = check(&mut self.view.write()) {
                return Ok(found);
            }
        }
        Err(CallError::Untrusted { why: doubt.to_string() })
    }

    /// Makes sure that what is believed was verified under revocation list `number` or a later one: a reply says that there is that list.
    pub(crate) async fn revoked_up_to(&self, number: u64, deadline: Instant) -> Result<(), CallError> {
        if self.view.read().revocations() >= number {
            return Ok(());
        }
        self.view.write().forget_seen();
        self.describe(deadline).await?;
        let held = self.view.read().revocations();
        if held >= number {
            return Ok(());
        }
        let why = format!("a reply names revocation list {number}, the directory shows list {held}: ask again");
        Err(CallError::Untrusted { why })
    }

    /// Takes note of what replies carry besides their answer.
    pub(crate) fn heard(&self, group: u32, applied_ms: u64, changes: Option<v1::Changes>) {
        self.applied(group, applied_ms);
        if let Some(changes) = changes {
            self.view.write().changed(changes);
        }
    }

    fn applied(&self, group: u32, applied_ms: u64) {
        let mut all = self.applied_ms.lock();
        let latest = all.entry(group).or_default();
        *latest = applied_ms.max(*latest);
    }

    /// Names a new command of `group`.
    pub(crate) fn request_id(&self, group: u32) -> v1::RequestId {
        let applied_ms = self.applied_ms.lock().get(&group).copied().unwrap_or(0);
        v1::RequestId { applied_ms, random: self.entropy.bits() }
    }

    /// Asks the leader of `group` to execute a command that carries a request id. A first attempt that comes too late for its id is named
    /// anew, since it was never executed; after that its fate is unknown.
    pub(crate) async fn command<Q, R, F>(
        &self,
        group: u32,
        method: &'static str,
        make: impl Fn(v1::RequestId) -> Q,
        deadline: Instant,
        send: impl Fn(Meta, Request<Q>) -> F,
    ) -> Result<R, CallError>
    where
        Q: Clone,
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let mut named_anew = false;
        loop {
            let request = make(self.request_id(group));
            let unsure = AtomicBool::new(false);
            let error = match self.ask_noting(group, method, &request, deadline, &send, &unsure).await {
                Ok(reply) => return Ok(reply),
                Err(error) => error,
            };
            let unsure = unsure.load(Ordering::Relaxed);
            match error {
                CallError::Refused(refusal) => match *refusal {
                    Refusal::StaleRequest(it) if !unsure && !named_anew => {
                        named_anew = true;
                        self.applied(group, it.floor_ms.saturating_add(1));
                        self.describe(deadline).await?;
                    }
                    // A restored group counts from an older point: what we heard before is ahead of it.
                    Refusal::Malformed(it) if it.field.starts_with("request") && !unsure && !named_anew => {
                        named_anew = true;
                        self.applied_ms.lock().remove(&group);
                        self.describe(deadline).await?;
                    }
                    Refusal::StaleRequest(_) if unsure => {
                        let why = "the cluster has forgotten whether it was executed".to_owned();
                        return Err(CallError::Indeterminate { why });
                    }
                    other => return Err(CallError::Refused(Box::new(other))),
                },
                CallError::Unreachable { last, .. } | CallError::Deadline { last } if unsure => {
                    return Err(CallError::Indeterminate { why: last });
                }
                other => return Err(other),
            }
        }
    }

    /// Waits, a little longer than told, so that clients do not come back all at once.
    pub(crate) async fn pause(&self, after: Duration) {
        if !after.is_zero() {
            self.counters.retries.add(1);
            let jitter = u32::try_from(self.entropy.bits() % 256).expect("below 256");
            sleep(after + after / 4 * jitter / 256).await;
        }
    }

    /// The next one of the meta nodes that the cluster was described with; after them, one that the cluster file names and they do not.
    fn any_meta(&self) -> String {
        let next = self.next_meta.fetch_add(1, Ordering::Relaxed);
        let view = self.view.read();
        let configured = |turn: usize| self.cluster.metas[turn % self.cluster.metas.len()].clone();
        let described = view.metas().len();
        if described == 0 {
            return configured(next);
        }
        let turn = next % (described + 1);
        view.metas().nth(turn).map_or_else(|| configured(next / (described + 1)), str::to_owned)
    }

    /// The next one that is not this one, if there is another.
    fn another_meta(&self, address: &str) -> String {
        let next = self.any_meta();
        if next == address { self.any_meta() } else { next }
    }

    fn channel(&self, address: &str, expect: Expect) -> Result<Channel, Fault> {
        let mut channels = self.channels.lock();
        if let Some((_, channel)) = channels.get(address).filter(|(expected, _)| *expected == expect) {
            return Ok(channel.clone());
        }
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| Fault::Transport(format!("{address} is no address: {error}")))?
            .connect_timeout(self.attempt)
            .tcp_nodelay(true);
        let channel = endpoint.connect_with_connector_lazy(self.trust.connector(expect));
        channels.insert(address.to_owned(), (expect, channel.clone()));
        Ok(channel)
    }
}

/// The error when the time is over and not the patience.
fn gave_up(fault: Fault, what: &str, reached: Option<String>) -> CallError {
    let with = |last: String| reached.as_ref().map_or_else(|| last.clone(), |reached| format!("{reached}; {last}"));
    match fault.into_error(what) {
        // It says itself when to come again.
        CallError::Refused(refusal) if !matches!(*refusal, Refusal::TooManyRequests(_)) => {
            CallError::Deadline { last: with(refusal.to_string()) }
        }
        CallError::Unreachable { what, last } => CallError::Unreachable { what, last: with(last) },
        CallError::Indeterminate { why } => CallError::Indeterminate { why: with(why) },
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::SystemEntropy;
    use quarry_wire::{ids::ClusterUuid, signed::SecretKey};

    fn control(metas: &[&str]) -> Control {
        let root = SecretKey::from_seed(&[1; 32]).public();
        let metas = metas.iter().map(|meta| (*meta).to_owned()).collect();
        let cluster = Cluster::new(ClusterUuid([7; 16]), root, metas).unwrap();
        let attempt = Duration::from_millis(50);
        Control::new(cluster, Trust::off(), attempt, Arc::new(SystemEntropy), Arc::new(Counters::default())).unwrap()
    }

    // In a time that passes only when nothing is left to do: a slow machine takes nothing of the attempt.
    #[tokio::test(start_paused = true)]
    async fn who_does_not_answer_is_not_asked_next_and_leads_no_other_group_any_more() {
        // It takes connections, and says nothing.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let silent = silent.local_addr().unwrap().to_string();
        let control = control(&["one:1", &silent, "two:1"]);
        for group in 0..3 {
            control.leaders.lock().insert(group, silent.clone());
        }
        control.leaders.lock().insert(3, "one:1".to_owned());
        let send = |mut meta: Meta, request| async move { meta.describe(request).await };
        // Time for one attempt and no pause after it.
        let deadline = Instant::now() + Duration::from_millis(52);
        let asked = control.ask(1, "Describe", &v1::DescribeRequest::default(), deadline, send).await;
        assert!(matches!(asked, Err(CallError::Unreachable { .. })), "{asked:?}");
        assert_eq!(*control.leaders.lock(), HashMap::from([(3, "one:1".to_owned())]));
        let told = control.of_leader(1);
        assert!(told.starts_with("meta nodes for group 1: reached nobody, not reached 127.0.0.1:"), "{told}");
        assert_eq!(control.of_leader(2), "nobody is known to lead group 2");
        assert_eq!(control.of_leader(3), "none was granted in time by one:1, which leads group 3 as far as is known");
        for _ in 0..9 {
            assert_ne!(control.another_meta(&silent), silent);
        }
    }

    #[tokio::test]
    async fn the_only_meta_node_is_asked_again() {
        assert_eq!(control(&["one:1"]).another_meta("one:1"), "one:1");
    }
}
