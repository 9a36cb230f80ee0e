//! From descriptors to checked bytes.
//!
//! A few operations are under way at once, all in the caller's task: while one frame is checked, the next ones arrive. Frames land in the
//! window and their payloads are copied out once, or the payload lands where the reader finds it (`landing.rs`); they are checked (`check.rs`)
//! where they landed, which nobody else can write to. Whatever is held while a caller waits for it is given back when its future is dropped, as soon as
//! the network has let go of it.

use crate::{
    core::Core,
    endpoints::{Direction, Source},
    read::{
        State, Want,
        check::{Expected, Miss},
        damage,
        landing::Landing,
        plan::{Plan, RUN_BYTES, Run, plan},
        records::Refused,
    },
    write::transfer_time,
};
use bytes::Bytes;
use futures::{StreamExt as _, stream::FuturesUnordered};
use parking_lot::Mutex;
use quarry_fabric::{LocalBuffer, Pieces, Span, Wait};
use quarry_wire::{frame::HEADER_BYTES_MAX, ids::NamespaceId};
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, timeout_at};

/// Operations under way at once for one call.
const DEPTH: usize = 8;
/// A copy is waited for so long while there is another one to try (plus the time its bytes take).
const PATIENCE: Duration = Duration::from_millis(750);

/// Fetches all that were found, each from one copy after the other. Afterwards each is done or unknown. Answers which regions were not read
/// although their records said how.
pub(crate) async fn fetch(core: &Core, namespace: NamespaceId, wants: &mut [Want], deadline: Instant) -> Refused {
    let mut refused = Refused::new();
    let mut again = false;
    loop {
        let plan = {
            let avoided = core.endpoints.avoided(Direction::Read);
            let (now, late) = (core.options.clock.boot(), Instant::now() >= deadline);
            plan(wants, &core.control.view().read(), &avoided, core.salt, now, late)
        };
        if again {
            core.counters.retries.add(plan.frames.len() as u64);
        }
        again = true;
        if plan.runs.is_empty() {
            // What could not even be planned for one copy has another one to try.
            if wants.iter().any(|want| matches!(want.state, State::Found { .. })) {
                continue;
            }
            return refused;
        }
        let sources = {
            let view = core.control.view().read();
            let source = |(region, incarnation)| {
                let record = view.record(region, incarnation).ok_or("its memory of that time is gone")?;
                core.endpoints.source(record).map_err(|error| error.to_string())
            };
            plan.regions.iter().map(|region| source(*region)).collect()
        };
        let (state, failed) = (Mutex::new((0, &mut *wants)), Mutex::new(&mut refused));
        let reading = Reading { core, namespace, deadline, plan: &plan, sources, state, failed };
        match plan.runs.len() {
            1 => reading.work(Wait::spinning_until).await,
            runs => {
                let mut workers: FuturesUnordered<_> =
                    (0..runs.min(DEPTH)).map(|_| reading.work(Wait::until)).collect();
                while workers.next().await.is_some() {}
            }
        }
    }
}

/// One plan being carried out.
struct Reading<'a> {
    core: &'a Core,
    namespace: NamespaceId,
    deadline: Instant,
    plan: &'a Plan,
    /// By region of the plan: how to read there, or why not.
    sources: Vec<Result<Source, String>>,
    /// The next run that nobody took, and the wants. Held for moments only.
    state: Mutex<(usize, &'a mut [Want])>,
    /// What is answered in the end. Held for moments only.
    failed: Mutex<&'a mut Refused>,
}

impl Reading<'_> {
    /// Takes one run after the other.
    async fn work(&self, wait: impl Fn(Instant) -> Wait) {
        let mut window = None;
        loop {
            let run = {
                let next = &mut self.state.lock().0;
                *next += 1;
                self.plan.runs.get(*next - 1)
            };
            let Some(run) = run else { return };
            if self.is_over(run) {
                // Nothing of it could be shown: it is not read in vain, and what follows comes to its turn in the next lease.
                let wants = &mut self.state.lock().1;
                for frame in &self.plan.frames[run.frames.clone()] {
                    wants[frame.want].failed(Miss::LeaseOver);
                }
                continue;
            }
            let outcome = match self.has_failed(run) {
                Some(miss) => Err(miss),
                None => self.read(run, &mut window, &wait).await,
            };
            if let Err(miss) = outcome {
                let wants = &mut self.state.lock().1;
                for frame in &self.plan.frames[run.frames.clone()] {
                    wants[frame.want].failed(miss.clone());
                }
            }
        }
    }

    /// Whether the leases of all its values are over.
    fn is_over(&self, run: &Run) -> bool {
        let now = self.core.options.clock.boot();
        let wants = &self.state.lock().1;
        self.plan.frames[run.frames.clone()].iter().all(|frame| wants[frame.want].is_over(now))
    }

    /// Whether another read of this plan from the same region has failed while there are other copies: patience with a node that is gone is
    /// spent once, not once for each of its values.
    fn has_failed(&self, run: &Run) -> Option<Miss> {
        let failed = run.spare && self.failed.lock().contains_key(&self.plan.regions[run.region]);
        failed.then(|| self.unreachable(run, &"another read from there has just failed"))
    }

    /// Carries out one run; `window` is what the runs of one worker land in.
    async fn read(
        &self,
        run: &Run,
        window: &mut Option<Arc<Span>>,
        wait: &impl Fn(Instant) -> Wait,
    ) -> Result<(), Miss> {
        if run.direct { self.read_direct(run, window, wait).await } else { self.read_window(run, window, wait).await }
    }

    /// Whole frames land in the window.
    async fn read_window(
        &self,
        run: &Run,
        window: &mut Option<Arc<Span>>,
        wait: &impl Fn(Instant) -> Wait,
    ) -> Result<(), Miss> {
        let bytes = length(run.bytes);
        let local = self.part(run, self.room(window, bytes).await?, bytes)?;
        self.operate(run, Pieces::one(local), wait).await?;
        let landed = exclusive(window);
        let wants = &mut self.state.lock().1;
        for frame in &self.plan.frames[run.frames.clone()] {
            let (head, rest) = landed[length(frame.offset - run.offset)..].split_at(length(frame.header));
            let (want, payload) = (&mut wants[frame.want], &rest[..length(frame.payload)]);
            if self.passes(want, run, frame.offset, head, payload) {
                let bytes = match &mut want.into {
                    Some(buffer) => {
                        buffer.bytes()[..payload.len()].copy_from_slice(payload);
                        Bytes::new()
                    }
                    None => Bytes::copy_from_slice(payload),
                };
                want.landed(bytes, payload.len());
            }
        }
        Ok(())
    }

    /// The header of the only frame lands in the window, its payload where the reader finds it; if there is no room for that, in the window too.
    async fn read_direct(
        &self,
        run: &Run,
        window: &mut Option<Arc<Span>>,
        wait: &impl Fn(Instant) -> Wait,
    ) -> Result<(), Miss> {
        let frame = self.plan.frames[run.frames.start];
        let (header, payload) = (length(frame.header), length(frame.payload));
        let buffered = self.state.lock().1[frame.want].into.is_some();
        let kept = if buffered { None } else { self.core.values.try_take(payload) };
        if !buffered && kept.is_none() {
            return self.read_window(run, window, wait).await;
        }
        let head = self.part(run, self.room(window, HEADER_BYTES_MAX).await?, header)?;
        // A future that is dropped meanwhile drops the buffer, and the operation holds its memory until it is over.
        let buffer = self.state.lock().1[frame.want].into.take().map(Landing::Buffer);
        let kept = kept.map(|span| Landing::Kept(Arc::new(span)));
        let mut landing = buffer.or(kept).expect("one of the two was found above");
        let outcome = match self.part(run, landing.span(), payload) {
            // Pieces are never empty, payloads may be.
            Ok(_) if payload == 0 => self.operate(run, Pieces::one(head), wait).await,
            Ok(body) => self.operate(run, Pieces::from([head, body]), wait).await,
            Err(miss) => Err(miss),
        };
        let want = &mut self.state.lock().1[frame.want];
        let passes = outcome.is_ok()
            && self.passes(want, run, frame.offset, &exclusive(window)[..header], &landing.bytes()[..payload]);
        let (buffer, value) = landing.into_parts();
        want.into = buffer;
        if passes {
            want.landed(value, payload);
        }
        outcome
    }

    async fn operate(
        &self,
        run: &Run,
        local: Pieces<LocalBuffer>,
        wait: &impl Fn(Instant) -> Wait,
    ) -> Result<(), Miss> {
        let source = self.sources[run.region].as_ref().map_err(|why| self.unreachable(run, why))?;
        let attempt = self.core.options.attempt_timeout;
        let patience = if run.spare { attempt.min(PATIENCE) } else { attempt };
        let until = self.deadline.min(Instant::now() + patience + transfer_time(length(run.bytes)));
        let read = self.core.endpoints.read(source, run.offset, run.bytes, local, wait(until)).await;
        read.map_err(|error| {
            self.failed.lock().insert(self.plan.regions[run.region], source.epoch);
            self.unreachable(run, &error)
        })
    }

    /// Whether these bytes are the wanted ones. If not, the want knows why.
    fn passes(&self, want: &mut Want, run: &Run, offset: u64, head: &[u8], payload: &[u8]) -> bool {
        let State::Found { found, .. } = &want.state else { return false };
        let node = self.plan.regions[run.region].0.node;
        let expected = Expected { namespace: self.namespace, key: &want.key, found, node };
        let Err(miss) = expected.check(head, payload, &*self.core.options.clock) else { return true };
        if matches!(miss, Miss::Corrupt { .. }) {
            self.core.counters.damaged.add(1);
            damage::report(self.core, self.namespace, &want.key, found, self.plan.regions[run.region], offset);
        }
        tracing::debug!(key = %want.key, ?miss, "a copy did not yield the value");
        want.failed(miss);
        false
    }

    /// `bytes` of the window: those that are held, if they are enough and not far too many.
    async fn room<'s>(&self, window: &'s mut Option<Arc<Span>>, bytes: usize) -> Result<&'s Arc<Span>, Miss> {
        let held = window.take().filter(|held| held.len() >= bytes && held.len() <= bytes.max(length(RUN_BYTES)));
        let span = match held {
            Some(held) => held,
            // Nothing is in hand while we wait.
            None => Arc::new(match self.core.read_window.try_take(bytes) {
                Some(span) => span,
                None => match timeout_at(self.deadline, self.core.read_window.take(bytes)).await {
                    Ok(Ok(span)) => span,
                    Ok(Err(_)) | Err(_) => return Err(Miss::NoRoom),
                },
            }),
        };
        Ok(window.insert(span))
    }

    fn part(&self, run: &Run, span: &Arc<Span>, bytes: usize) -> Result<LocalBuffer, Miss> {
        LocalBuffer::of_span(span, 0..bytes).map_err(|error| self.unreachable(run, &error))
    }

    fn unreachable(&self, run: &Run, last: &impl ToString) -> Miss {
        Miss::Unreachable { node: self.plan.regions[run.region].0.node, last: last.to_string() }
    }
}

/// What an operation that is over has left in the window.
fn exclusive(window: &mut Option<Arc<Span>>) -> &mut [u8] {
    let span = window.as_mut().and_then(Arc::get_mut);
    span.expect("an operation lets go of its span before its outcome is told").bytes()
}

fn length(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a slot's bytes fit in a usize")
}
