//! Serving HTTP to few: connections, time and bytes have limits, so that whoever reaches the port cannot take a process's descriptors or memory.
//!
//! Decides how much; what is answered is the router's. Refuses with 503 (come again) and 413 (no body is needed here).

use axum::{
    Router,
    body::Body,
    http::{Request, StatusCode},
    response::{IntoResponse as _, Response},
};
use hyper::{
    body::{Body as _, Incoming},
    server::conn::http1,
    service::{Service as _, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use metrics::{Gauge, counter, gauge};
use quarry_trust::{CONNECTIONS, TURNED_AWAY};
use std::{io::Write as _, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
    time::{sleep, timeout},
};

/// Connections at once.
const CONNECTIONS_MAX: usize = 64;
/// How long the head of a request may take.
const HEAD_MAX: Duration = Duration::from_secs(5);
/// And how many bytes it may have.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// Bytes of the body of a request. Nothing here needs one.
const BODY_BYTES_MAX: u64 = 4 << 10;
/// How long a connection may last, whatever goes on on it.
const CONNECTION_MAX: Duration = Duration::from_secs(30);
/// After a connection could not be accepted none is tried for this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// What those hear for whom there is no room.
const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 47\r\n\r\ntoo many connections to this port, at most 64\r\n";

/// A connection that was let in.
struct Seat {
    _permit: OwnedSemaphorePermit,
    shown: Gauge,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.shown.decrement(1.0);
    }
}

/// Serves until dropped.
pub(crate) async fn serve(listener: TcpListener, router: Router) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let shown = gauge!(CONNECTIONS, "listener" => "http", "of" => "anyone");
    let refused = counter!(TURNED_AWAY, "listener" => "http", "resource" => "connections");
    let mut connections = JoinSet::new();
    loop {
        let socket = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((socket, _)) => socket,
                Err(error) => {
                    tracing::warn!(%error, "a connection to the admin port could not be accepted");
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
            Some(_) = connections.join_next() => continue,
        };
        let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
            refused.increment(1);
            turn_away(socket);
            continue;
        };
        shown.increment(1.0);
        let seat = Seat { _permit: permit, shown: shown.clone() };
        let router = router.clone();
        connections.spawn(async move {
            let _seat = seat;
            // What comes of it, and whether the client waited for it, does not matter any more.
            drop(timeout(CONNECTION_MAX, one(socket, router)).await);
        });
    }
}

/// Serves one connection.
async fn one(socket: TcpStream, router: Router) -> hyper::Result<()> {
    let answering = TowerToHyperService::new(router);
    let service = service_fn(move |request: Request<Incoming>| {
        let answering = answering.clone();
        async move {
            let found = request.body().size_hint().lower();
            if found > BODY_BYTES_MAX { Ok(too_large(found)) } else { answering.call(request.map(Body::new)).await }
        }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_MAX)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(socket), service)
        .await
}

fn too_large(found: u64) -> Response {
    let why = format!("the body of a request is limited to {BODY_BYTES_MAX} bytes here, found {found}\n");
    (StatusCode::PAYLOAD_TOO_LARGE, why).into_response()
}

/// Says why, if that can be done at once.
fn turn_away(socket: TcpStream) {
    if let Ok(mut socket) = socket.into_std() {
        // It does not block, and a client that does not hear it sees a closed connection.
        drop(socket.write(FULL));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use std::net::SocketAddr;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        time::Instant,
    };

    const PATIENCE: Duration = Duration::from_secs(20);

    async fn start() -> (SocketAddr, JoinSet<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut work = JoinSet::new();
        work.spawn(serve(listener, Router::new().route("/", get(|| async { "here" }))));
        (address, work)
    }

    async fn ask(address: SocketAddr, head: &str) -> String {
        let mut socket = TcpStream::connect(address).await.unwrap();
        let mut said = String::new();
        let asking = async {
            // Who is turned away may find the connection closed while it still asks.
            drop(socket.write_all(head.as_bytes()).await);
            drop(socket.read_to_string(&mut said).await);
        };
        timeout(PATIENCE, asking).await.unwrap();
        said
    }

    const GET: &str = "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";

    #[tokio::test]
    async fn who_comes_when_all_places_are_taken_is_told_to_come_again_and_is_served_when_others_left() {
        let (address, _work) = start().await;
        let mut silent = Vec::new();
        for _ in 0..CONNECTIONS_MAX {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        // Answers without being asked.
        let said = ask(address, "").await;
        assert!(said.starts_with("HTTP/1.1 503") && said.contains("Retry-After: 1"), "{said}");
        silent.clear();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let said = ask(address, GET).await;
            if said.ends_with("here") {
                break;
            }
            assert!(Instant::now() < deadline, "{said}");
            sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn a_body_that_is_too_long_is_refused_with_both_sizes_and_a_head_that_is_too_long_is_refused() {
        let (address, _work) = start().await;
        let said = ask(address, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 5000\r\n\r\n").await;
        assert!(said.starts_with("HTTP/1.1 413") && said.contains("limited to 4096 bytes here, found 5000"), "{said}");
        let said = ask(address, &format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", "x".repeat(20_000))).await;
        assert!(said.is_empty() || said.starts_with("HTTP/1.1 431"), "{said}");
        assert!(ask(address, GET).await.ends_with("here"));
    }
}
