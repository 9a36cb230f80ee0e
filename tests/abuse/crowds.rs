//! Crowds: thousands of connections to the leader's port, and hundreds of clients that take their time.
//!
//! The guards: handshakes are bounded and the slowest makes place (`wire/trust/src/accept.rs`), clients have room of their own (`seats.rs`),
//! a request that does not end and an answer that is not taken hold what they hold and no more (`admission.rs`).

use quarry::scrape::Scrape;
use quarry_proto::protocol::HEADER;
use quarry_tests::{
    Member, TestCluster,
    cluster::{SHARD, create_namespace},
    eventually, soon, stranger,
    wait::PATIENCE,
};
use quarry_wire::limits::PROTOCOL_MAX;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::{
    collections::BTreeMap,
    fs,
    io::Write as _,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    net::TcpStream,
    task::JoinSet,
    time::{Instant, timeout},
};
use tokio_rustls::client::TlsStream;

/// Connections that never say who they are, if this process may have as many descriptors.
const SILENT: usize = 4_850;
/// Connections with a certificate that say hello, and nothing more.
const IDLE: usize = 150;
/// Those that begin to say who they are; that begin a call; and that make a call and take no answer.
const HALF_HANDSHAKES: usize = 300;
const HALF_REQUESTS: usize = 100;
const UNTAKEN: usize = 100;
/// Those who connect at once.
const HANDS: usize = 8;
const ASK: Duration = Duration::from_secs(10);

/// The leaders and terms of both groups, as all meta nodes see them.
async fn reign(cluster: &TestCluster) -> BTreeMap<(Member, u32), (u64, u64)> {
    let mut seen = BTreeMap::new();
    for meta in cluster.metas() {
        let status = soon(format!("{meta} answers"), async || cluster.status(meta).await.ok()).await;
        for group in status.groups {
            seen.insert((meta, group.group), (group.leader, group.term));
        }
    }
    assert_eq!(seen.len(), 3 * 2, "{seen:?}");
    seen
}

/// A frame of HTTP/2.
fn http2(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
    frame.extend_from_slice(&[kind, flags]);
    frame.extend_from_slice(&stream.to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// The beginning of a call of Describe: hello, no room for answers if there is to be none, and the headers.
fn call(takes_answers: bool) -> Vec<u8> {
    const SETTINGS: u8 = 4;
    const HEADERS: u8 = 1;
    const END_HEADERS: u8 = 4;
    let preface = stranger::HELLO.len() - 9;
    let mut said = stranger::HELLO[..preface].to_vec();
    // SETTINGS_INITIAL_WINDOW_SIZE
    let window = [&[0, 4][..], &0_u32.to_be_bytes()].concat();
    said.extend(http2(SETTINGS, 0, 0, if takes_answers { &[] } else { &window }));
    let mut headers = Vec::new();
    let version = PROTOCOL_MAX.to_string();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/quarry.v1.Control/Describe"),
        (":authority", "crowd"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        (HEADER, &version),
    ] {
        // A literal that is not to be remembered.
        headers.push(0);
        for text in [name, value] {
            headers.push(u8::try_from(text.len()).unwrap());
            headers.extend_from_slice(text.as_bytes());
        }
    }
    said.extend(http2(HEADERS, END_HEADERS, 1, &headers));
    said
}

const DATA: u8 = 0;
const END_STREAM: u8 = 1;

/// Raises the number of descriptors as far as it goes, and says how many connections that is enough for.
fn descriptors() -> usize {
    let found = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: found.maximum, ..found }).unwrap();
    found.maximum.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX).saturating_sub(1_000))
}

/// Everybody in a crowd, for as long as it is held.
struct Crowd {
    silent: Vec<std::net::TcpStream>,
    known: Vec<TlsStream<TcpStream>>,
    /// How often those with a certificate had to come.
    came: usize,
}

impl Crowd {
    /// Comes to `address`, all of it, with the credentials `pem` where it shows any.
    async fn gather(address: &str, pem: &str, silent: usize) -> Self {
        let (to, shown) = (address.to_owned(), stranger::showing(Some(pem)));
        let silent = tokio::task::spawn_blocking(move || {
            let mut held = Vec::with_capacity(silent + HALF_HANDSHAKES);
            for number in 0..silent + HALF_HANDSHAKES {
                let mut socket = std::net::TcpStream::connect(&to).unwrap();
                if number.is_multiple_of(10) && number / 10 < HALF_HANDSHAKES {
                    // The head of a handshake of 512 bytes, of which there will be no more. Who is sent away already cannot say it.
                    drop(socket.write(&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3]));
                }
                held.push(socket);
            }
            held
        });
        let half = [call(true), http2(DATA, 0, 1, &[0, 0, 0])].concat();
        let untaken = [call(false), http2(DATA, END_STREAM, 1, &[0; 5])].concat();
        let words = [(stranger::HELLO.to_vec(), IDLE), (half, HALF_REQUESTS), (untaken, UNTAKEN)];
        let words = words.into_iter().flat_map(|(words, times)| std::iter::repeat_n(words, times));
        let words: Arc<[Vec<u8>]> = words.collect();
        let next = Arc::new(AtomicUsize::new(0));
        let mut hands = JoinSet::new();
        for _ in 0..HANDS {
            let (next, words, shown, address) =
                (Arc::clone(&next), Arc::clone(&words), shown.clone(), address.to_owned());
            hands.spawn(async move {
                let (mut held, mut came) = (Vec::new(), 0);
                while let Some(words) = words.get(next.fetch_add(1, Ordering::Relaxed)) {
                    // Among so many that are silent some have to come twice.
                    let deadline = Instant::now() + PATIENCE;
                    loop {
                        came += 1;
                        if let Ok(Ok(stream)) = timeout(ASK, stranger::say(&address, &shown, words)).await {
                            held.push(stream);
                            break;
                        }
                        assert!(Instant::now() < deadline, "one of the crowd is not let in");
                    }
                }
                (held, came)
            });
        }
        let mut crowd = Self { silent: Vec::new(), known: Vec::new(), came: 0 };
        while let Some(hand) = hands.join_next().await {
            let (held, came) = hand.unwrap();
            crowd.known.extend(held);
            crowd.came += came;
        }
        crowd.silent = silent.await.unwrap();
        crowd
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_connections_and_hundreds_of_slow_clients_move_no_leader_and_fail_no_put_or_get() {
    let silent = SILENT.min(descriptors().saturating_sub(IDLE + HALF_HANDSHAKES + HALF_REQUESTS + UNTAKEN));
    let cluster = TestCluster::start().await;
    let (client, blocks) = cluster.namespace().await;
    blocks.put("before", "the crowd").await.unwrap();
    let leader = cluster.leader(SHARD, PATIENCE).await.unwrap();
    let address = cluster.address(leader);
    let reports = quarry::local::LocalCluster::status(&cluster).await;
    let admin = reports[&leader].admin_address().unwrap().to_owned();
    let scrape = async || soon("the leader shows its metrics", async || Scrape::of(&admin, ASK).await.ok()).await;
    // Those of nodes are their own affair: they come as the cluster gets going.
    let seated = |scrape: &Scrape| -> f64 {
        let of = |of| scrape.sum("quarry_listener_connections", &[("listener", "grpc"), ("of", of)]);
        ["client", "admin", "turned_away"].into_iter().map(of).sum()
    };
    let (before, calm) = (reign(&cluster).await, seated(&scrape().await));
    let pem = fs::read_to_string(cluster.dir().join("client.pem")).unwrap();

    let done = Arc::new(AtomicBool::new(false));
    let rounds = Arc::new(AtomicUsize::new(0));
    let writing = tokio::spawn({
        let (done, rounds) = (Arc::clone(&done), Arc::clone(&rounds));
        async move {
            while !done.load(Ordering::Relaxed) {
                let round = rounds.load(Ordering::Relaxed);
                let (key, value) = (format!("key-{round}"), vec![u8::try_from(round % 251).unwrap(); 4_000]);
                blocks.put(&*key, value.clone()).await.unwrap_or_else(|wrong| panic!("put {round}: {wrong}"));
                let got = blocks.fresh().get(&*key).await.unwrap_or_else(|wrong| panic!("get {round}: {wrong}"));
                assert_eq!(got.as_ref().map(|got| &got.bytes[..]), Some(&value[..]), "round {round}");
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let began = Instant::now();
    let crowd = Crowd::gather(&address, &pem, silent).await;
    let among = rounds.load(Ordering::Relaxed);
    assert_eq!(crowd.known.len(), IDLE + HALF_REQUESTS + UNTAKEN);
    // Who comes now is served as well.
    let newcomer = create_namespace(&cluster.client().await, 2, None).await;
    newcomer.put("among", "the crowd").await.unwrap();
    eventually(PATIENCE, "the writer goes on among the crowd", async || {
        assert!(!writing.is_finished(), "a put or get failed");
        (rounds.load(Ordering::Relaxed) >= among + 20).then_some(())
    })
    .await;
    let crowded = scrape().await;
    eprintln!(
        "{} silent, {} known after {} tries; in {:?}; seated {} (before {calm}), handshakes {}, calls of clients {}, crowded out {}, late {}; {} rounds, {} among the crowd",
        crowd.silent.len(),
        crowd.known.len(),
        crowd.came,
        began.elapsed(),
        seated(&crowded),
        crowded.sum("quarry_tls_handshakes_in_flight", &[]),
        crowded.sum("quarry_rpc_calls_in_flight", &[("of", "client")]),
        crowded.sum("quarry_tls_handshakes_refused_total", &[("reason", "crowded_out")]),
        crowded.sum("quarry_tls_handshakes_refused_total", &[("reason", "late")]),
        rounds.load(Ordering::Relaxed),
        rounds.load(Ordering::Relaxed) - among,
    );
    assert!(seated(&crowded) >= calm + 200.0, "most of those with a certificate have a seat");
    assert!(crowded.sum("quarry_tls_handshakes_in_flight", &[]) <= 1_100.0);
    assert_eq!(reign(&cluster).await, before, "no group changed its leader or its term");
    drop(crowd);
    done.store(true, Ordering::Relaxed);
    writing.await.unwrap();
    drop((newcomer, client));
    eventually(PATIENCE, "the connections are as they were", async || {
        // A few are of those who look.
        (seated(&scrape().await) <= calm + 3.0).then_some(())
    })
    .await;
    eventually(PATIENCE, "nothing is held for anybody", async || {
        let now = scrape().await;
        let held = now.sum("quarry_rpc_held_bytes", &[]) + now.sum("quarry_rpc_calls_in_flight", &[("of", "client")]);
        (held == 0.0).then_some(())
    })
    .await;
    assert_eq!(reign(&cluster).await, before);
}
