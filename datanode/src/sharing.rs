//! Publishes that come together share one call to the meta node that they go to, as commands share an entry of the log.
//!
//! Decides what travels with what. Whom to ask, how often and until when stays with each publish ([`crate::metas`]): a call here is one attempt
//! of each that shares it, and one that fails as a whole failed for each. A publish that finds nothing on its way leaves at once and alone.
//! While a call is on its way others gather; they leave together when they fill one, or when one ends, or when it is late: one publish of it may
//! be waiting for something that the others need not. Nobody is held by another: who gives up while it waits is not sent, who gives up on the
//! way leaves the others there, and a call that everybody gave up ends with the last of their deadlines.
//!
//! A meta node that does not know calls of several refuses one as malformed, before anything was done. Its publishes leave one by one then.

use crate::commit::ENTRY_BYTES;
use parking_lot::Mutex;
use quarry_proto::{
    call_id::CallId,
    refusal::Refusal,
    v1::{self, publish_answer},
};
use quarry_wire::limits::{COMMAND_BYTES_MAX, PUBLISHES_TOGETHER_MAX};
use std::{
    collections::{BTreeMap, VecDeque},
    pin::pin,
    sync::Arc,
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::oneshot,
    time::{Instant, timeout, timeout_at},
};
use tonic::Status;

/// With so many calls on their way to one meta node only full ones follow.
const OPEN: usize = 1;
/// Calls on their way to it at once.
const WINDOW: usize = 8;
/// A call that has been on its way for so long is late: others do not wait for it any more.
const LATE: Duration = Duration::from_millis(100);
/// Late calls that others do not wait for; with more, the meta node has enough to do.
const LATE_MAX: usize = 64;
/// Bytes of publishes that fill a call: about an entry of the log. What is large gains nothing by more company.
const CALL_BYTES: usize = COMMAND_BYTES_MAX;
/// How long publishes to a meta node that does not know calls of several leave one by one.
const ALONE_FOR: Duration = Duration::from_secs(30);

/// What one publish is answered.
pub(crate) type Answer = Result<v1::PublishReply, Status>;

/// Carries publishes to a meta node.
pub(crate) trait Carry: Send + Sync + 'static {
    /// The answers to these, in their order, from one call that its caller gives until then.
    ///
    /// # Errors
    /// What became of the call as a whole.
    fn carry(
        &self,
        address: &str,
        publishes: Vec<v1::PublishRequest>,
        until: Instant,
    ) -> impl Future<Output = Result<Vec<Answer>, Status>> + Send;
}

/// The lines to all meta nodes.
pub(crate) struct Sharing<C> {
    carrier: Arc<C>,
    /// By address; there are as many as there are meta nodes to which something is on its way, and those that do not know calls of several.
    lines: Mutex<BTreeMap<String, Line>>,
}

/// What is on its way to one meta node, and what waits.
#[derive(Default)]
struct Line {
    on_the_way: usize,
    /// Further calls on their way, which others do not wait for.
    late: usize,
    waiting: VecDeque<Waiting>,
    /// Of those that wait.
    bytes: usize,
    alone_until: Option<Instant>,
}

struct Waiting {
    bytes: usize,
    publish: v1::PublishRequest,
    until: Instant,
    answer: oneshot::Sender<Answer>,
}

impl Line {
    fn wait(&mut self, waiting: Waiting) {
        self.bytes += waiting.bytes;
        self.waiting.push_back(waiting);
    }

    /// Those that leave now, if it is time for a call.
    fn depart(&mut self) -> Option<Vec<Waiting>> {
        let full = self.waiting.len() >= PUBLISHES_TOGETHER_MAX || self.bytes >= CALL_BYTES;
        match self.on_the_way {
            ..OPEN => {}
            OPEN..WINDOW if full => {}
            _ => return None,
        }
        let (mut together, mut bytes) = (Vec::new(), 0);
        while together.len() < PUBLISHES_TOGETHER_MAX
            && bytes < CALL_BYTES
            && let Some(waiting) = self.waiting.pop_front()
        {
            self.bytes -= waiting.bytes;
            if !waiting.answer.is_closed() {
                bytes += waiting.bytes;
                together.push(waiting);
            }
        }
        if together.is_empty() {
            return None;
        }
        self.on_the_way += 1;
        Some(together)
    }
}

/// How a publish leaves.
enum Leave {
    /// Now, alone; those that gather meanwhile follow when this is over.
    First(v1::PublishRequest),
    /// Now, alone: nobody shares.
    Alone(v1::PublishRequest),
    /// With others, later.
    Together(oneshot::Receiver<Answer>),
    /// With these, now: they fill a call.
    Full(oneshot::Receiver<Answer>, Vec<Waiting>),
}

/// A call that is on its way. When it ends, however it does, those that wait leave.
struct Passage<C: Carry> {
    sharing: Arc<Sharing<C>>,
    address: String,
    is_late: bool,
}

impl<C: Carry> Drop for Passage<C> {
    fn drop(&mut self) {
        if let Some(next) = self.sharing.ended(&self.address, self.is_late) {
            self.send_off(next);
        }
    }
}

impl<C: Carry> Sharing<C> {
    pub(crate) fn new(carrier: Arc<C>) -> Arc<Self> {
        Arc::new(Self { carrier, lines: Mutex::default() })
    }

    /// One attempt to publish at the meta node with this address. It is over when this future is dropped.
    ///
    /// # Errors
    /// As the meta node answers, or what became of the call.
    pub(crate) async fn publish(
        self: Arc<Self>,
        address: String,
        publish: v1::PublishRequest,
        until: Instant,
    ) -> Answer {
        match self.leave(&address, publish, until) {
            Leave::First(publish) => {
                let mut passage = Passage::new(Arc::clone(&self), address.clone());
                passage.watched(self.alone(&address, publish, until)).await
            }
            Leave::Alone(publish) => self.alone(&address, publish, until).await,
            Leave::Together(answer) => answered(answer).await,
            Leave::Full(answer, together) => {
                tokio::spawn(Passage::new(self, address).carry(together));
                answered(answer).await
            }
        }
    }

    fn leave(&self, address: &str, mut publish: v1::PublishRequest, until: Instant) -> Leave {
        let mut lines = self.lines.lock();
        let Some(line) = lines.get_mut(address) else {
            lines.insert(address.to_owned(), Line { on_the_way: 1, ..Line::default() });
            return Leave::First(publish);
        };
        match line.alone_until {
            Some(until) if Instant::now() < until => return Leave::Alone(publish),
            _ => line.alone_until = None,
        }
        if line.on_the_way < OPEN && line.waiting.is_empty() {
            line.on_the_way += 1;
            return Leave::First(publish);
        }
        publish.request_id = CallId::current().map(|id| id.as_str().to_owned()).unwrap_or_default();
        let (answer, answered) = oneshot::channel();
        line.wait(Waiting { bytes: bytes(&publish), publish, until, answer });
        match line.depart() {
            Some(together) => Leave::Full(answered, together),
            None => Leave::Together(answered),
        }
    }

    /// A call ended: those that leave in its place.
    fn ended(&self, address: &str, was_late: bool) -> Option<Vec<Waiting>> {
        let mut lines = self.lines.lock();
        let line = lines.get_mut(address)?;
        let count = if was_late { &mut line.late } else { &mut line.on_the_way };
        *count -= 1;
        let next = line.depart();
        if line.on_the_way == 0 && line.late == 0 && line.alone_until.is_none() {
            lines.remove(address);
        }
        next
    }

    /// A call is late: those that leave beside it; none if too many are late.
    fn late(&self, address: &str) -> Option<Option<Vec<Waiting>>> {
        let mut lines = self.lines.lock();
        let line = lines.get_mut(address).filter(|line| line.late < LATE_MAX)?;
        line.on_the_way -= 1;
        line.late += 1;
        Some(line.depart())
    }

    async fn alone(&self, address: &str, mut publish: v1::PublishRequest, until: Instant) -> Answer {
        // Of one that waited: the call carries it as every call does.
        let id = CallId::parse(std::mem::take(&mut publish.request_id).as_bytes());
        let carried = self.carrier.carry(address, vec![publish], until);
        let answers = match id {
            Some(id) => id.scope(carried).await,
            None => carried.await,
        }?;
        answers.into_iter().next().unwrap_or_else(|| Err(Status::internal("an answer without an answer")))
    }

    /// Carries one that waited, alone.
    async fn one(&self, address: &str, waiting: Waiting) {
        let Waiting { publish, until, answer, .. } = waiting;
        let answered = timeout_at(until, self.alone(address, publish, until)).await;
        // Who gave up is gone.
        drop(answer.send(answered.unwrap_or_else(|_| Err(late()))));
    }
}

impl<C: Carry> Passage<C> {
    const fn new(sharing: Arc<Sharing<C>>, address: String) -> Self {
        Self { sharing, address, is_late: false }
    }

    /// These leave now.
    fn send_off(&self, together: Vec<Waiting>) {
        // Without a runtime the process ends, and nobody waits.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(Self::new(Arc::clone(&self.sharing), self.address.clone()).carry(together));
        }
    }

    /// Has others leave beside this call once it is late.
    async fn watched<T>(&mut self, call: impl Future<Output = T>) -> T {
        let mut call = pin!(call);
        if let Ok(ended) = timeout(LATE, &mut call).await {
            return ended;
        }
        if let Some(next) = self.sharing.late(&self.address) {
            self.is_late = true;
            if let Some(next) = next {
                self.send_off(next);
            }
        }
        call.await
    }

    /// Carries these in one call and hands out their answers.
    async fn carry(mut self, together: Vec<Waiting>) {
        let (sharing, address) = (Arc::clone(&self.sharing), self.address.clone());
        let together = match <[Waiting; 1]>::try_from(together) {
            Ok([one]) => return self.watched(sharing.one(&address, one)).await,
            Err(several) => several,
        };
        let Some(until) = together.iter().map(|waiting| waiting.until).max() else { return };
        // Kept, should they have to leave one by one; what is large in them is shared.
        let publishes: Vec<v1::PublishRequest> = together.iter().map(|waiting| waiting.publish.clone()).collect();
        let carried = sharing.carrier.carry(&address, publishes, until);
        let failed = match self.watched(timeout_at(until, carried)).await {
            Ok(Ok(answers)) if answers.len() == together.len() => {
                for (waiting, answer) in together.into_iter().zip(answers) {
                    waiting.answered(answer);
                }
                return;
            }
            Ok(Ok(answers)) => Status::internal(format!("{} answers to {} publishes", answers.len(), together.len())),
            Ok(Err(status)) => status,
            Err(_) => late(),
        };
        if matches!(Refusal::from_status(&failed), Some(Refusal::Malformed(_))) {
            sharing.part(&address);
            for waiting in together {
                let (sharing, address) = (Arc::clone(&sharing), address.clone());
                tokio::spawn(async move { sharing.one(&address, waiting).await });
            }
            return;
        }
        for waiting in together {
            waiting.answered(Err(failed.clone()));
        }
    }
}

impl<C> Sharing<C> {
    /// Nobody shares a call to this meta node for a while.
    fn part(&self, address: &str) {
        tracing::info!(address, "the meta node knows no calls of several publishes: they leave one by one");
        if let Some(line) = self.lines.lock().get_mut(address) {
            line.alone_until = Some(Instant::now() + ALONE_FOR);
        }
    }
}

impl Waiting {
    fn answered(self, answer: Answer) {
        // Who gave up is gone.
        drop(self.answer.send(answer));
    }
}

/// About how many bytes a publish takes in a message.
fn bytes(publish: &v1::PublishRequest) -> usize {
    let keys: usize = publish.entries.iter().map(|entry| ENTRY_BYTES + entry.key.len()).sum();
    keys + publish.attested.iter().map(bytes::Bytes::len).sum::<usize>()
}

fn late() -> Status {
    Status::deadline_exceeded("no answer")
}

async fn answered(answer: oneshot::Receiver<Answer>) -> Answer {
    answer.await.unwrap_or_else(|_| Err(Status::unavailable("the call that it shared ended without an answer")))
}

/// The message that carries these.
pub(crate) fn message(mut publishes: Vec<v1::PublishRequest>) -> v1::PublishRequest {
    if publishes.len() == 1 {
        publishes.remove(0)
    } else {
        v1::PublishRequest { together: publishes, ..Default::default() }
    }
}

/// The answers in a reply to a message of `count` publishes.
pub(crate) fn answers(reply: v1::PublishReply, count: usize) -> Vec<Answer> {
    if count == 1 {
        return vec![Ok(reply)];
    }
    let answer = |one: v1::PublishAnswer| match one.answer {
        Some(publish_answer::Answer::Reply(reply)) => Ok(reply),
        Some(publish_answer::Answer::Refusal(v1::Refusal { kind: Some(refusal) })) => Err(refusal.into_status()),
        Some(publish_answer::Answer::Refusal(v1::Refusal { kind: None })) | None => {
            Err(Status::internal("an answer that says nothing"))
        }
    };
    reply.together.into_iter().map(answer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tokio::{sync::Semaphore, task::JoinHandle};

    const AT: &str = "h:1";

    /// A meta node that answers a call once it is let to.
    struct Meta {
        /// The slots of the publishes in each call.
        calls: Mutex<Vec<Vec<u32>>>,
        /// The request id of each call, and those of its publishes.
        names: Mutex<Vec<(String, Vec<String>)>>,
        lets: Semaphore,
        knows_several: AtomicBool,
        lost: AtomicBool,
    }

    impl Carry for Meta {
        async fn carry(&self, _: &str, publishes: Vec<v1::PublishRequest>, _: Instant) -> Result<Vec<Answer>, Status> {
            let slots: Vec<u32> = publishes.iter().map(|publish| publish.entries[0].slot).collect();
            self.calls.lock().push(slots.clone());
            let own = CallId::current().map(|id| id.to_string()).unwrap_or_default();
            let names = publishes.iter().map(|publish| publish.request_id.clone()).collect();
            self.names.lock().push((own, names));
            self.lets.acquire().await.unwrap().forget();
            if slots.len() > 1 && !self.knows_several.load(Ordering::SeqCst) {
                return Err(Refusal::malformed("grant", "one", "none").into());
            }
            if self.lost.load(Ordering::SeqCst) {
                return Err(Status::unavailable("the connection broke"));
            }
            let answer = |slot: u32| match slot {
                13 => Err(Refusal::UnknownGrant(v1::UnknownGrant::default()).into_status()),
                slot => Ok(v1::PublishReply { applied_ms: slot.into(), ..Default::default() }),
            };
            Ok(slots.into_iter().map(answer).collect())
        }
    }

    struct Scene {
        meta: Arc<Meta>,
        sharing: Arc<Sharing<Meta>>,
        began: Instant,
    }

    impl Scene {
        fn new() -> Self {
            let (calls, names, lets) = (Mutex::default(), Mutex::default(), Semaphore::new(0));
            let meta = Meta { calls, names, lets, knows_several: AtomicBool::new(true), lost: AtomicBool::new(false) };
            let meta = Arc::new(meta);
            Self { sharing: Sharing::new(Arc::clone(&meta)), meta, began: Instant::now() }
        }

        /// Somebody publishes this slot and gives up so many seconds after the beginning.
        async fn publish(&self, slot: u32, seconds: u64) -> JoinHandle<Option<Answer>> {
            self.publish_until(slot, self.began + Duration::from_secs(seconds)).await
        }

        async fn publish_until(&self, slot: u32, until: Instant) -> JoinHandle<Option<Answer>> {
            let publish = v1::PublishRequest {
                entries: vec![v1::CommitEntry { slot, ..Default::default() }],
                ..Default::default()
            };
            let attempt = Arc::clone(&self.sharing).publish(AT.to_owned(), publish, until);
            let attempt = CallId::parse(format!("call-{slot}").as_bytes()).unwrap().scope(attempt);
            let publishing = tokio::spawn(async move { timeout_at(until, attempt).await.ok() });
            self.settle().await;
            publishing
        }

        /// Everybody does what there is to do now.
        async fn settle(&self) {
            for _ in 0..50 {
                tokio::task::yield_now().await;
            }
        }

        async fn let_pass(&self, calls: usize) {
            self.meta.lets.add_permits(calls);
            self.settle().await;
        }

        fn calls(&self) -> Vec<Vec<u32>> {
            self.meta.calls.lock().clone()
        }
    }

    fn applied(answer: Option<Answer>) -> u64 {
        answer.unwrap().unwrap().applied_ms
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_come_while_a_call_is_on_its_way_share_the_next_one_and_each_gets_its_own_answer() {
        let scene = Scene::new();
        let first = scene.publish(1, 9).await;
        assert_eq!(scene.calls(), [[1]], "a lone one waits for nobody");
        let others = [scene.publish(2, 9).await, scene.publish(13, 9).await, scene.publish(4, 9).await];
        assert_eq!(scene.calls().len(), 1);
        scene.let_pass(2).await;
        assert_eq!(scene.calls(), [vec![1], vec![2, 13, 4]]);
        assert_eq!(applied(first.await.unwrap()), 1);
        let [second, refused, fourth] = others;
        assert_eq!((applied(second.await.unwrap()), applied(fourth.await.unwrap())), (2, 4));
        let refused = refused.await.unwrap().unwrap().unwrap_err();
        assert!(matches!(Refusal::from_status(&refused), Some(Refusal::UnknownGrant(_))));
        assert!(scene.sharing.lines.lock().is_empty(), "nothing is left of it");
        // The next one is a lone one again.
        let last = scene.publish(5, 9).await;
        assert_eq!(scene.calls()[2], [5]);
        scene.let_pass(1).await;
        assert_eq!(applied(last.await.unwrap()), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn each_publish_carries_the_id_of_the_call_that_it_is_made_for_however_it_leaves() {
        let scene = Scene::new();
        let mut all = vec![scene.publish(1, 9).await, scene.publish(2, 9).await, scene.publish(3, 9).await];
        scene.let_pass(1).await;
        all.push(scene.publish(4, 9).await);
        scene.let_pass(2).await;
        scene.meta.knows_several.store(false, Ordering::SeqCst);
        all.extend([scene.publish(5, 9).await, scene.publish(6, 9).await, scene.publish(7, 9).await]);
        scene.let_pass(4).await;
        let names = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>();
        let alone = |id: &str| (id.to_owned(), names(&[""]));
        let together = |ids: &[&str]| (String::new(), names(ids));
        let expected = [
            alone("call-1"),
            together(&["call-2", "call-3"]),
            alone("call-4"),
            alone("call-5"),
            together(&["call-6", "call-7"]),
            alone("call-6"),
            alone("call-7"),
        ];
        assert_eq!(*scene.meta.names.lock(), expected);
        for publish in all {
            applied(publish.await.unwrap());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_is_lost_is_lost_for_each_that_shared_it_and_the_next_ones_leave() {
        let scene = Scene::new();
        let first = scene.publish(1, 9).await;
        let others = [scene.publish(2, 9).await, scene.publish(3, 9).await];
        scene.meta.lost.store(true, Ordering::SeqCst);
        scene.let_pass(1).await;
        let later = scene.publish(4, 9).await;
        scene.let_pass(1).await;
        scene.meta.lost.store(false, Ordering::SeqCst);
        scene.let_pass(1).await;
        for lost in [first].into_iter().chain(others) {
            // No refusal: whether it took effect is not known, and whoever asked knows that it is not.
            assert!(Refusal::from_status(&lost.await.unwrap().unwrap().unwrap_err()).is_none());
        }
        assert_eq!(applied(later.await.unwrap()), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_less_time_is_not_held_and_who_gave_up_is_not_sent_and_leaves_the_others_their_time() {
        let scene = Scene::new();
        // The meta node says nothing. One gives up in line before the call ahead of it is late.
        let first = scene.publish(1, 2).await;
        let short = scene.publish_until(2, scene.began + LATE / 2).await;
        let (longer, longest) = (scene.publish(3, 1).await, scene.publish(4, 9).await);
        assert!(short.await.unwrap().is_none());
        assert_eq!(scene.began.elapsed().as_millis(), (LATE / 2).as_millis());
        // On their way together: one gives up, the other is answered.
        assert!(longer.await.unwrap().is_none());
        assert_eq!(scene.began.elapsed().as_secs(), 1);
        assert!(first.await.unwrap().is_none());
        assert_eq!(scene.calls(), [vec![1], vec![3, 4]]);
        scene.let_pass(1).await;
        assert_eq!(applied(longest.await.unwrap()), 4);
        assert!(scene.sharing.lines.lock().is_empty(), "nothing is left of it");
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_call_holds_nobody_unless_there_are_too_many() {
        let scene = Scene::new();
        let mut all = vec![scene.publish(100, 9).await, scene.publish(101, 9).await, scene.publish(102, 9).await];
        assert_eq!(scene.calls(), [[100]]);
        tokio::time::advance(LATE).await;
        scene.settle().await;
        assert_eq!(scene.calls(), [vec![100], vec![101, 102]], "they leave beside it");
        tokio::time::advance(LATE).await;
        scene.settle().await;
        for calls in 3..=64 {
            all.push(scene.publish(100 + calls, 9).await);
            assert_eq!(scene.calls().len(), calls as usize, "alone, and at once");
            tokio::time::advance(LATE).await;
            scene.settle().await;
        }
        all.push(scene.publish(165, 9).await);
        assert_eq!(scene.calls().len(), 65, "as many are late as may be");
        tokio::time::advance(LATE).await;
        scene.settle().await;
        all.push(scene.publish(166, 9).await);
        all.push(scene.publish(167, 9).await);
        assert_eq!(scene.calls().len(), 65, "the last one is waited for");
        scene.let_pass(66).await;
        for (publish, slot) in all.into_iter().zip(100..) {
            assert_eq!(applied(publish.await.unwrap()), slot);
        }
        assert!(scene.sharing.lines.lock().is_empty(), "nothing is left of it");
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_nobody_answers_ends_with_the_last_of_those_that_share_it() {
        let scene = Scene::new();
        let first = scene.publish(1, 1).await;
        let shared = [scene.publish(2, 3).await, scene.publish(3, 5).await];
        assert!(first.await.unwrap().is_none());
        let next = scene.publish(4, 9).await;
        for publish in shared {
            assert!(publish.await.unwrap().is_none_or(|answer| answer.is_err()));
        }
        scene.settle().await;
        assert_eq!(scene.calls(), [vec![1], vec![2, 3], vec![4]]);
        assert_eq!(scene.began.elapsed().as_secs(), 5);
        scene.let_pass(1).await;
        assert_eq!(applied(next.await.unwrap()), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn a_meta_node_that_knows_no_calls_of_several_gets_them_one_by_one_for_a_while() {
        let scene = Scene::new();
        scene.meta.knows_several.store(false, Ordering::SeqCst);
        let first = scene.publish(1, 9).await;
        let others = [scene.publish(2, 9).await, scene.publish(3, 9).await];
        scene.let_pass(4).await;
        assert_eq!(scene.calls(), [vec![1], vec![2, 3], vec![2], vec![3]]);
        let answered = [first].into_iter().chain(others).zip(1..);
        for (publish, slot) in answered {
            assert_eq!(applied(publish.await.unwrap()), slot);
        }
        let alone = [scene.publish(4, 9).await, scene.publish(5, 9).await];
        assert_eq!(scene.calls()[4..], [[4], [5]], "nobody waits for company");
        scene.let_pass(2).await;
        for (publish, slot) in alone.into_iter().zip(4..) {
            assert_eq!(applied(publish.await.unwrap()), slot);
        }
        // It may be another build by then.
        tokio::time::advance(ALONE_FOR).await;
        scene.meta.knows_several.store(true, Ordering::SeqCst);
        let again = [scene.publish(6, 99).await, scene.publish(7, 99).await, scene.publish(8, 99).await];
        scene.let_pass(2).await;
        assert_eq!(scene.calls()[6..], [vec![6], vec![7, 8]]);
        for publish in again {
            applied(publish.await.unwrap());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_has_no_more_publishes_and_bytes_than_one_may() {
        let scene = Scene::new();
        let mut all = vec![scene.publish(0, 9).await];
        for slot in 1..=70 {
            all.push(scene.publish(slot, 9).await);
        }
        assert_eq!(scene.calls().iter().map(Vec::len).collect::<Vec<_>>(), [1, PUBLISHES_TOGETHER_MAX], "full");
        scene.let_pass(3).await;
        assert_eq!(scene.calls()[2..].iter().map(Vec::len).collect::<Vec<_>>(), [6]);
        for publish in all {
            publish.await.unwrap();
        }
        let large = v1::PublishRequest {
            entries: vec![v1::CommitEntry { key: vec![0; CALL_BYTES / 3].into(), ..Default::default() }],
            ..Default::default()
        };
        let until = scene.began + Duration::from_secs(9);
        let all: Vec<_> = (0..3 * WINDOW)
            .map(|_| tokio::spawn(Arc::clone(&scene.sharing).publish(AT.to_owned(), large.clone(), until)))
            .collect();
        scene.settle().await;
        let sizes = || scene.calls()[3..].iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(sizes(), [vec![1], vec![3; WINDOW - 1]].concat(), "no more calls than may be on their way");
        scene.let_pass(WINDOW).await;
        assert_eq!(sizes(), [vec![1], vec![3; WINDOW - 1], vec![2]].concat());
        scene.let_pass(1).await;
        for publish in all {
            publish.await.unwrap().unwrap();
        }
    }
}
