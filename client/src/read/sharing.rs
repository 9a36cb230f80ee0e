//! Callers that ask the same shard at the same time share one call.
//!
//! Decides who asks: whoever has the turn takes along all who wait. So while one call is under way the next one gathers, and a lone caller
//! waits for nobody. A call begins after all whose keys it carries have asked, so what they get is not older than their question
//! (*Linearizable*). A caller that gives up, or is dropped while it has the turn, leaves the others where they were.

use crate::{
    core::Core,
    error::{CallError, GetError},
    read::resolve::{self, Resolved},
};
use parking_lot::Mutex;
use quarry_wire::{
    ids::{NamespaceId, ShardId},
    key::Key,
    limits::KEYS_PER_CALL_MAX,
};
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};
use tokio::{
    task::yield_now,
    time::{Instant, timeout_at},
};

/// Those who wait, by shard and namespace.
#[derive(Debug, Default)]
pub(crate) struct Sharing(Mutex<HashMap<(ShardId, NamespaceId), Arc<Queue>>>);

#[derive(Debug, Default)]
struct Queue {
    /// Every ticket without an answer is here, or with the one who has the turn.
    waiting: Mutex<VecDeque<Arc<Ticket>>>,
    turn: tokio::sync::Mutex<()>,
}

/// What one caller asks for; at most as many keys as fit in one call.
#[derive(Debug)]
struct Ticket {
    keys: Vec<Key>,
    answer: Mutex<Option<Vec<Resolved>>>,
}

/// Tickets that somebody asks for. Those without an answer go back when it drops.
struct Taken<'q> {
    queue: &'q Queue,
    tickets: Vec<Arc<Ticket>>,
}

impl Sharing {
    /// Resolves keys of one shard with a lease, at most [`KEYS_PER_CALL_MAX`]. One answer per key, in their order.
    pub(crate) async fn resolve(
        &self,
        core: &Core,
        namespace: NamespaceId,
        shard: ShardId,
        keys: Vec<Key>,
        deadline: Instant,
    ) -> Vec<Resolved> {
        let queue = Arc::clone(self.0.lock().entry((shard, namespace)).or_default());
        let ticket = Arc::new(Ticket { keys, answer: Mutex::new(None) });
        queue.waiting.lock().push_back(Arc::clone(&ticket));
        // Whoever asks at the same moment comes along.
        yield_now().await;
        loop {
            let Ok(_turn) = timeout_at(deadline, queue.turn.lock()).await else {
                let late = || GetError::Deadline { last: "waiting for another call to the same shard".to_owned() };
                return ticket.keys.iter().map(|_| Err(late())).collect();
            };
            if let Some(answer) = ticket.answer.lock().take() {
                return answer;
            }
            let taken = queue.take();
            let (keys, places) = taken.keys();
            match resolve::call(core, namespace, shard, &keys, core.options.lease, deadline).await {
                Ok(resolved) => taken.answer(&resolved, &places),
                Err(error) => taken.fail(&error, &ticket),
            }
        }
    }
}

impl Queue {
    /// Takes as many as fit in one call, first come, first served.
    fn take(&self) -> Taken<'_> {
        let mut waiting = self.waiting.lock();
        let (mut tickets, mut keys) = (Vec::new(), 0);
        while let Some(next) = waiting.front() {
            keys += next.keys.len();
            if keys > KEYS_PER_CALL_MAX && !tickets.is_empty() {
                break;
            }
            tickets.extend(waiting.pop_front().filter(wanted));
        }
        Taken { queue: self, tickets }
    }
}

/// Whether its caller is still there.
fn wanted(ticket: &Arc<Ticket>) -> bool {
    Arc::strong_count(ticket) > 1
}

impl Taken<'_> {
    /// All keys, each once, and where each key of each ticket is among them.
    fn keys(&self) -> (Vec<&Key>, Vec<usize>) {
        let all = || self.tickets.iter().flat_map(|ticket| &ticket.keys);
        if self.tickets.len() == 1 {
            return (all().collect(), (0..self.tickets[0].keys.len()).collect());
        }
        let mut known: HashMap<&Key, usize> = HashMap::new();
        let mut keys = Vec::new();
        let places = all().map(|key| {
            *known.entry(key).or_insert_with(|| {
                keys.push(key);
                keys.len() - 1
            })
        });
        let places = places.collect();
        (keys, places)
    }

    fn answer(&self, resolved: &[Resolved], places: &[usize]) {
        let mut places = places.iter();
        for ticket in &self.tickets {
            let answer = places.by_ref().take(ticket.keys.len()).map(|place| resolved[*place].clone());
            *ticket.answer.lock() = Some(answer.collect());
        }
    }

    /// What went wrong for want of time or luck is told to `own` alone: the others have times of their own.
    fn fail(&self, error: &CallError, own: &Arc<Ticket>) {
        let own_only = matches!(error, CallError::Deadline { .. } | CallError::Unreachable { .. });
        for ticket in self.tickets.iter().filter(|ticket| !own_only || Arc::ptr_eq(ticket, own)) {
            *ticket.answer.lock() = Some(ticket.keys.iter().map(|_| Err(error.clone().into())).collect());
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut waiting = self.queue.waiting.lock();
        for ticket in self.tickets.drain(..).rev().filter(wanted) {
            if ticket.answer.lock().is_none() {
                waiting.push_front(ticket);
            }
        }
    }
}
