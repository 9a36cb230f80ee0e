//! Byte counters: every server counts the calls of each method and the bytes of their bodies, in both directions.
//!
//! Counted where HTTP/2 data frames pass, so the bytes are those of messages and their five-byte prefixes; headers are not counted.

use crate::v1;
use bytes::Buf;
use http_body::{Body, Frame, SizeHint};
use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};
use tower::{Layer, Service};

/// Most methods counted apart; calls of unknown paths share one counter.
const METHODS_MAX: usize = 256;

#[derive(Debug, Default)]
struct Counter {
    calls: AtomicU64,
    received: AtomicU64,
    sent: AtomicU64,
}

/// The counters of one server. Cloning shares them.
#[derive(Clone, Debug, Default)]
pub struct Counters(Arc<Mutex<BTreeMap<String, Arc<Counter>>>>);

impl Counters {
    /// The counts so far, by method path such as `/quarry.v1.Control/Grant`.
    #[must_use]
    pub fn read(&self) -> Vec<v1::MethodCounter> {
        let counters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let read = |(method, counter): (&String, &Arc<Counter>)| v1::MethodCounter {
            method: method.clone(),
            calls: counter.calls.load(Ordering::Relaxed),
            received_bytes: counter.received.load(Ordering::Relaxed),
            sent_bytes: counter.sent.load(Ordering::Relaxed),
        };
        counters.iter().map(read).collect()
    }

    fn of(&self, path: &str) -> Arc<Counter> {
        let mut counters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(counter) = counters.get(path) {
            return Arc::clone(counter);
        }
        let path = if counters.len() < METHODS_MAX { path } else { "other" };
        Arc::clone(counters.entry(path.to_owned()).or_default())
    }
}

impl<S> Layer<S> for Counters {
    type Service = Counting<S>;
    fn layer(&self, inner: S) -> Counting<S> {
        Counting { inner, counters: self.clone() }
    }
}

/// A server whose calls are counted.
#[derive(Clone, Debug)]
pub struct Counting<S> {
    inner: S,
    counters: Counters,
}

impl<S, In, Out> Service<http::Request<In>> for Counting<S>
where
    S: Service<http::Request<CountedBody<In>>, Response = http::Response<Out>>,
    S::Future: Send + 'static,
{
    type Response = http::Response<CountedBody<Out>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<In>) -> Self::Future {
        let counter = self.counters.of(request.uri().path());
        counter.calls.fetch_add(1, Ordering::Relaxed);
        let received = Arc::clone(&counter);
        let answer = self.inner.call(request.map(|body| CountedBody {
            body,
            counter: received,
            direction: Direction::Received,
        }));
        Box::pin(async move { Ok(answer.await?.map(|body| CountedBody { body, counter, direction: Direction::Sent })) })
    }
}

#[derive(Clone, Copy, Debug)]
enum Direction {
    Received,
    Sent,
}

/// A body whose data bytes are counted as they pass.
#[derive(Debug)]
pub struct CountedBody<B> {
    body: B,
    counter: Arc<Counter>,
    direction: Direction,
}

impl<B: Default> Default for CountedBody<B> {
    fn default() -> Self {
        Self { body: B::default(), counter: Arc::default(), direction: Direction::Sent }
    }
}

impl<B: Body + Unpin> Body for CountedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(data) = frame.data_ref()
        {
            let to = match self.direction {
                Direction::Received => &self.counter.received,
                Direction::Sent => &self.counter.sent,
            };
            to.fetch_add(data.remaining() as u64, Ordering::Relaxed);
        }
        polled
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
