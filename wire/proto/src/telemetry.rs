//! What every server tells of its calls: a log span with the caller's request id, counts by method and code, durations, refusals.
//!
//! Keeps the number of series bounded: a method that is not served here counts as `other`, and of a refusal the kind and the resource are
//! told, never a key.

use crate::{
    call_id::{self, CallId},
    refusal::Refusal,
    v1::commit_outcome,
};
use metrics::{Counter, Histogram, Unit, counter, describe_counter, describe_histogram, histogram};
use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};
use tokio::time::Instant;
use tonic::{Code, Status};
use tower::{Layer, Service};
use tracing::{Instrument as _, error_span, field::Empty};

const REQUESTS: &str = "quarry_rpc_requests_total";
const DURATION: &str = "quarry_rpc_request_duration_seconds";
const REFUSALS: &str = "quarry_rpc_refusals_total";

/// Most methods told apart; a server has fewer.
const METHODS_MAX: usize = 64;
/// What calls count as whose method is not served.
const OTHER: &str = "other";

/// Says what the metrics of this crate mean, to the recorder that is installed.
pub fn describe_metrics() {
    describe_counter!(REQUESTS, Unit::Count, "Calls that were answered, by method and gRPC code.");
    describe_histogram!(
        DURATION,
        Unit::Seconds,
        "Time from a call's arrival to the head of its answer, by method: for calls with one answer, all of the work."
    );
    describe_counter!(
        REFUSALS,
        Unit::Count,
        "Calls that were turned down as a whole, by kind of refusal and resource."
    );
}

/// Tells of all calls of one server. Cloning shares the counters.
#[derive(Clone)]
pub struct Telemetry(Arc<Inner>);

struct Inner {
    /// Names the next call that comes without a usable id.
    next: AtomicU64,
    methods: Mutex<BTreeMap<String, Arc<Method>>>,
}

struct Method {
    name: String,
    good: Counter,
    duration: Histogram,
}

impl std::fmt::Debug for Telemetry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Telemetry").finish_non_exhaustive()
    }
}

impl Telemetry {
    /// Calls whose caller did not name them are counted from `first`, which should be another number in each life of each process.
    #[must_use]
    pub fn new(first: u64) -> Self {
        Self(Arc::new(Inner { next: AtomicU64::new(first), methods: Mutex::default() }))
    }

    /// The method at this path, which is known to be served.
    fn method(&self, path: &str) -> Arc<Method> {
        let mut methods = self.0.methods.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(method) = methods.get(path) {
            return Arc::clone(method);
        }
        let name = if methods.len() < METHODS_MAX { path } else { OTHER }.to_owned();
        let method = Arc::new(Method {
            good: counter!(REQUESTS, "method" => name.clone(), "code" => code_name(Code::Ok)),
            duration: histogram!(DURATION, "method" => name.clone()),
            name,
        });
        methods.insert(method.name.clone(), Arc::clone(&method));
        method
    }

    fn answered(&self, path: &str, headers: &http::HeaderMap, began: Instant) {
        // A good answer has its status in the trailers; one that is turned down has it here.
        let status = Status::from_header_map(headers).filter(|status| status.code() != Code::Ok);
        let code = status.as_ref().map_or(Code::Ok, Status::code);
        let elapsed = began.elapsed();
        tracing::debug!(code = code_name(code), why = status.as_ref().map(Status::message), ?elapsed, "answered");
        let Some(status) = status else {
            let method = self.method(path);
            method.good.increment(1);
            method.duration.record(elapsed);
            return;
        };
        // Anybody can make up a path.
        let name = if code == Code::Unimplemented {
            OTHER.to_owned()
        } else {
            let method = self.method(path);
            method.duration.record(elapsed);
            method.name.clone()
        };
        counter!(REQUESTS, "method" => name, "code" => code_name(code)).increment(1);
        if let Some(refusal) = Refusal::from_status(&status) {
            refused(&refusal);
        }
    }
}

/// Counts a refusal. Calls that are turned down as a whole are counted by themselves.
pub fn refused(refusal: &Refusal) {
    let resource = refusal.resource().to_owned();
    counter!(REFUSALS, "kind" => refusal.name(), "resource" => resource).increment(1);
}

impl<S> Layer<S> for Telemetry {
    type Service = Telling<S>;
    fn layer(&self, inner: S) -> Telling<S> {
        Telling { inner, telemetry: self.clone() }
    }
}

/// A server of whose calls is told.
#[derive(Clone, Debug)]
pub struct Telling<S> {
    inner: S,
    telemetry: Telemetry,
}

impl<S, In, Out> Service<http::Request<In>> for Telling<S>
where
    S: Service<http::Request<In>, Response = http::Response<Out>>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Out>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<In>) -> Self::Future {
        let began = Instant::now();
        let path = request.uri().path().to_owned();
        let id = request.headers().get(call_id::HEADER).and_then(|value| CallId::parse(value.as_bytes()));
        let id = id.unwrap_or_else(|| CallId::new(self.telemetry.0.next.fetch_add(1, Ordering::Relaxed)));
        // At the level of errors, so that no filter that lets lines through takes the id from them.
        let span = error_span!("call", request = %id, method = path, shard = Empty);
        let answer = span.in_scope(|| self.inner.call(request));
        let telemetry = self.telemetry.clone();
        let told = async move {
            let answer = answer.await?;
            telemetry.answered(&path, answer.headers(), began);
            Ok(answer)
        };
        Box::pin(id.scope(told).instrument(span))
    }
}

/// The outcome of an entry of a commit as metrics call it.
#[must_use]
pub const fn outcome_name(code: commit_outcome::Code) -> &'static str {
    use commit_outcome::Code;
    match code {
        Code::Unspecified => "unspecified",
        Code::Committed => "committed",
        Code::Exists => "exists",
        Code::StaleVersion => "stale_version",
        Code::CompareFailed => "compare_failed",
        Code::GrantExpired => "grant_expired",
        Code::Sealed => "sealed",
        Code::NotEnoughHolders => "not_enough_holders",
        Code::UnknownGrant => "unknown_grant",
        Code::SlotTaken => "slot_taken",
        Code::Malformed => "malformed",
        Code::NoSpace => "no_space",
    }
}

/// The code as metrics and logs call it.
#[must_use]
pub const fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "ok",
        Code::Cancelled => "cancelled",
        Code::Unknown => "unknown",
        Code::InvalidArgument => "invalid_argument",
        Code::DeadlineExceeded => "deadline_exceeded",
        Code::NotFound => "not_found",
        Code::AlreadyExists => "already_exists",
        Code::PermissionDenied => "permission_denied",
        Code::ResourceExhausted => "resource_exhausted",
        Code::FailedPrecondition => "failed_precondition",
        Code::Aborted => "aborted",
        Code::OutOfRange => "out_of_range",
        Code::Unimplemented => "unimplemented",
        Code::Internal => "internal",
        Code::Unavailable => "unavailable",
        Code::DataLoss => "data_loss",
        Code::Unauthenticated => "unauthenticated",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1;
    use tower::{ServiceExt as _, service_fn};

    type Seen = (Option<CallId>, Code);

    /// Sends a call with this header through the layer to a server that says what it saw.
    async fn send(header: Option<&'static [u8]>) -> CallId {
        let server = service_fn(|_: http::Request<()>| async {
            Ok::<_, std::convert::Infallible>(http::Response::new(CallId::current()))
        });
        let mut request = http::Request::new(());
        if let Some(header) = header {
            request.headers_mut().insert(call_id::HEADER, http::HeaderValue::from_bytes(header).unwrap());
        }
        let answer = Telemetry::new(0x77).layer(server).oneshot(request).await.unwrap();
        answer.into_body().expect("the server runs in the scope of an id")
    }

    #[tokio::test]
    async fn a_server_works_in_the_scope_of_the_callers_id_and_replaces_what_is_none() {
        assert_eq!(send(Some(b"caller-1")).await.as_str(), "caller-1");
        let drawn = CallId::new(0x77);
        assert_eq!(send(None).await, drawn);
        for malformed in [&b""[..], b"a b", b"\xff\xfe", &[b'x'; 33]] {
            assert_eq!(send(Some(malformed)).await, drawn);
        }
    }

    #[tokio::test]
    async fn what_is_turned_down_passes_through_the_layer_as_it_is() {
        let refusal = Refusal::NoSpace(v1::NoSpace { resource: "memory".into(), ..Default::default() });
        let sent = refusal.clone();
        let server = service_fn(move |_: http::Request<()>| {
            let answer = sent.clone().into_status().into_http::<()>();
            async move { Ok::<_, std::convert::Infallible>(answer) }
        });
        let answer = Telemetry::new(1).layer(server).oneshot(http::Request::new(())).await.unwrap();
        let status = Status::from_header_map(answer.headers()).unwrap();
        let seen: Seen = (None, status.code());
        assert_eq!(seen, (None, Code::ResourceExhausted));
        assert_eq!(Refusal::from_status(&status), Some(refusal));
    }
}
