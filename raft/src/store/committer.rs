//! The one thread that makes the log durable, for all groups.
//! It drains what is waiting, writes it to the journal with one sync, and only then tells everyone, in order.
//!
//! Keeps *Acknowledged is on disk*: nobody is told before the sync returned without an error.
//! Keeps *A failed sync is final*: after one, everything is refused and nothing is tried again, since the kernel may
//! have dropped the pages that could not be written.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use openraft::storage::IOFlushed;
use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use super::journal::Body;
use crate::ids::GroupId;
use crate::metrics;
use crate::types::Types;

/// What nobody waits for (the committed index, a purge) is made durable with the next round, or after this long.
const LAZY_ROUND: Duration = Duration::from_millis(100);

/// What the thread works on.
pub(crate) trait Durable: Send + 'static {
    /// Returns when these writes are on the medium, with all that it was given before.
    fn make_durable(&self, bodies: &[Body]) -> io::Result<()>;
    /// Removes a batch of old entries. Returns whether there is more to remove.
    fn purge(&self, group: GroupId, upto: u64) -> io::Result<bool>;
}

pub(crate) enum Job {
    /// These entries were written; openraft waits.
    Append(Vec<Body>, IOFlushed<Types>),
    /// This was written, or will be; the sender waits.
    Wait(Body, oneshot::Sender<io::Result<()>>),
    /// This was written; nobody waits.
    Lazy(Body),
    /// Entries up to and with this index are no longer needed.
    Purge { group: GroupId, upto: u64 },
    /// Make everything durable and end.
    Stop,
}

pub(crate) struct Committer {
    jobs: Queue,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Why the first sync that failed did.
    fault: Arc<watch::Sender<Option<String>>>,
}

/// Where jobs go.
enum Queue {
    Thread(Sender<Job>),
    /// A task that plays the thread in simulated time.
    #[cfg(feature = "sim")]
    Task(tokio::sync::mpsc::UnboundedSender<Job>),
}

impl Committer {
    pub(crate) fn start(disk: impl Durable) -> io::Result<Self> {
        let (jobs, queue) = channel();
        let fault = Arc::new(watch::Sender::new(None));
        let thread = std::thread::Builder::new().name("raft-committer".to_owned()).spawn({
            let fault = Arc::clone(&fault);
            move || run(&disk, &queue, &fault)
        })?;
        Ok(Self { jobs: Queue::Thread(jobs), thread: Mutex::new(Some(thread)), fault })
    }

    /// One whose jobs and faults are the business of a task.
    #[cfg(feature = "sim")]
    pub(crate) fn of_task(
        jobs: tokio::sync::mpsc::UnboundedSender<Job>,
        fault: Arc<watch::Sender<Option<String>>>,
    ) -> Self {
        Self { jobs: Queue::Task(jobs), thread: Mutex::new(None), fault }
    }

    /// The job, if the thread has ended.
    fn send(&self, job: Job) -> Result<(), Job> {
        match &self.jobs {
            Queue::Thread(jobs) => jobs.send(job).map_err(|unsent| unsent.0),
            #[cfg(feature = "sim")]
            Queue::Task(jobs) => jobs.send(job).map_err(|unsent| unsent.0),
        }
    }

    /// Hands a job over. When the thread has ended, the job comes to an end with an error.
    pub(crate) fn submit(&self, job: Job) {
        let waiter = match self.send(job) {
            Err(Job::Append(_, done)) => Waiter::Openraft(done),
            Err(Job::Wait(_, done)) => Waiter::Task(done),
            Ok(()) | Err(Job::Lazy(_) | Job::Purge { .. } | Job::Stop) => return,
        };
        waiter.tell(Err("the log is closed"));
    }

    /// Returns when this is on the medium, with all that was handed over before.
    pub(crate) async fn durable(&self, body: Body) -> io::Result<()> {
        let (done, answer) = oneshot::channel();
        self.submit(Job::Wait(body, done));
        answer.await.unwrap_or_else(|_| Err(io::Error::other("the log is closed")))
    }

    /// Why nothing can be made durable any more, if so.
    pub(crate) fn failed(&self) -> Option<String> {
        self.fault.borrow().clone()
    }

    /// Whether nothing can be made durable any more.
    pub(crate) fn has_failed(&self) -> bool {
        self.fault.borrow().is_some()
    }

    /// The same, to wait for. Closed once the committer is gone.
    pub(crate) fn watch_failed(&self) -> watch::Receiver<Option<String>> {
        self.fault.subscribe()
    }

    /// Ends the thread after one more round. Blocks for as long as that takes.
    pub(crate) fn stop(&self) {
        // A thread that has ended already is what we want.
        drop(self.send(Job::Stop));
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the committer thread panicked");
        }
    }
}

fn run(disk: &impl Durable, queue: &Receiver<Job>, fault: &watch::Sender<Option<String>>) {
    let fsyncs = metrics::fsyncs();
    // What the next round writes, in the order in which it came.
    let mut bodies: Vec<Body> = Vec::new();
    let mut purges: Vec<(GroupId, u64)> = Vec::new();
    loop {
        // While old entries wait to be removed, rounds follow each other; otherwise the thread sleeps.
        let first = if !bodies.is_empty() || !purges.is_empty() {
            match queue.recv_timeout(if purges.is_empty() { LAZY_ROUND } else { Duration::ZERO }) {
                Ok(job) => Some(job),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => Some(Job::Stop),
            }
        } else {
            Some(queue.recv().unwrap_or(Job::Stop))
        };
        let idle = first.is_none();
        let mut waiting = Vec::new();
        let mut stop = false;
        for job in first.into_iter().chain(std::iter::from_fn(|| queue.try_recv().ok())) {
            match job {
                Job::Append(entries, done) => {
                    bodies.extend(entries);
                    waiting.push(Waiter::Openraft(done));
                }
                Job::Wait(body, done) => {
                    bodies.push(body);
                    waiting.push(Waiter::Task(done));
                }
                Job::Lazy(body) => bodies.push(body),
                Job::Purge { group, upto } => purges.push((group, upto)),
                Job::Stop => stop = true,
            }
        }
        // What says that entries are purged comes before their removal: an older word of it may stand in the journal.
        let due = !waiting.is_empty() || stop || (!bodies.is_empty() && (idle || !purges.is_empty()));
        if fault.borrow().is_none() && due {
            let began = Instant::now();
            let durable = disk.make_durable(&bodies);
            bodies.clear();
            fsyncs.record(began.elapsed());
            if let Err(error) = durable {
                tracing::error!(%error, "the log cannot be made durable: this node stops serving its groups");
                fault.send_replace(Some(format!("the log cannot be made durable: {error}")));
            }
        }
        let failed = fault.borrow().clone();
        for waiter in waiting {
            waiter.tell(failed.as_deref().map_or(Ok(()), Err));
        }
        if stop {
            return;
        }
        if failed.is_some() {
            (bodies, purges) = (Vec::new(), Vec::new());
        } else if let Some(&(group, upto)) = purges.first() {
            match disk.purge(group, upto) {
                Ok(true) => {}
                Ok(false) => drop(purges.remove(0)),
                // What is left over is removed when the group is opened again.
                Err(error) => {
                    tracing::warn!(%error, %group, upto, "old entries were not removed");
                    purges.remove(0);
                }
            }
        }
    }
}

/// Whoever waits for a round.
pub(crate) enum Waiter {
    Openraft(IOFlushed<Types>),
    Task(oneshot::Sender<io::Result<()>>),
}

impl Waiter {
    pub(crate) fn tell(self, result: Result<(), &str>) {
        let result = result.map_err(|why| io::Error::other(why.to_owned()));
        match self {
            Self::Openraft(done) => done.io_completed(result),
            // Whoever waited may have gone.
            Self::Task(done) => drop(done.send(result)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::FutureExt;
    use openraft::type_config::TypeConfigExt;

    use super::*;

    /// A disk whose syncs wait for a permit and then do as the permit says.
    struct Gate {
        permits: Receiver<io::Result<()>>,
        syncs: Arc<AtomicUsize>,
    }

    impl Durable for Gate {
        fn make_durable(&self, _: &[Body]) -> io::Result<()> {
            self.syncs.fetch_add(1, Ordering::SeqCst);
            self.permits.recv_timeout(Duration::from_secs(10)).map_err(io::Error::other)?
        }

        fn purge(&self, _: GroupId, _: u64) -> io::Result<bool> {
            Ok(false)
        }
    }

    fn gated() -> (Committer, Sender<io::Result<()>>, Arc<AtomicUsize>) {
        let (permit, permits) = channel();
        let syncs = Arc::new(AtomicUsize::new(0));
        (Committer::start(Gate { permits, syncs: Arc::clone(&syncs) }).unwrap(), permit, syncs)
    }

    async fn until(what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !holds() {
            assert!(Instant::now() < deadline, "{what}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn an_acknowledgement_waits_for_the_sync() {
        let (committer, permit, syncs) = gated();
        let (done, mut answer) = Types::oneshot();
        committer.submit(Job::Append(Vec::new(), IOFlushed::signal(done)));
        until("the sync was never asked for", || syncs.load(Ordering::SeqCst) == 1).await;
        assert!((&mut answer).now_or_never().is_none(), "acknowledged while the sync was still running");
        permit.send(Ok(())).unwrap();
        answer.await.unwrap().unwrap();
        permit.send(Ok(())).unwrap();
        committer.stop();
    }

    #[tokio::test]
    async fn one_sync_serves_all_who_came_while_the_last_one_ran() {
        let (committer, permit, syncs) = gated();
        let ask = || {
            let (done, answer) = oneshot::channel();
            committer.submit(Job::Wait(Body::default(), done));
            answer
        };
        let first = ask();
        until("the sync was never asked for", || syncs.load(Ordering::SeqCst) == 1).await;
        let rest: Vec<_> = (0..50).map(|_| ask()).collect();
        permit.send(Ok(())).unwrap();
        first.await.unwrap().unwrap();
        permit.send(Ok(())).unwrap();
        for answer in rest {
            answer.await.unwrap().unwrap();
        }
        assert_eq!(syncs.load(Ordering::SeqCst), 2);
        permit.send(Ok(())).unwrap();
        committer.stop();
    }

    #[tokio::test]
    async fn a_failed_sync_is_never_acknowledged_and_never_retried() {
        let (committer, permit, syncs) = gated();
        permit.send(Err(io::Error::other("no medium"))).unwrap();
        assert!(committer.durable(Body::default()).await.unwrap_err().to_string().contains("no medium"));
        assert!(committer.durable(Body::default()).await.is_err());
        assert!(committer.failed().unwrap().contains("no medium"));
        committer.stop();
        assert!(committer.durable(Body::default()).await.is_err());
        assert_eq!(syncs.load(Ordering::SeqCst), 1);
    }
}
