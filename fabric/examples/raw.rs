//! What this layer costs, over loopback: GiB/s and median latency of writes and reads through endpoints, beside plain libfabric
//! ([`quarry_fabric::reference`]) on the same target, in turns.
//!
//! `cargo run --release -p quarry-fabric --example raw [seconds per cell [part of a cell's name]]`. Starts itself again as the
//! target process.

use quarry_fabric::{
    Access, Endpoint, EndpointConfig, FabricAddress, LocalSpan, Memory, OperationError, Peer, Provider, RemoteSpan,
    Wait, library_version,
    reference::{Load, RawClient, Way},
};
use std::{
    error::Error,
    io::{BufRead, BufReader, Read, Write},
    net::{IpAddr, Ipv4Addr},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};
use tokio::{runtime::Runtime, time::Instant};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const REGION: usize = 256 << 20;
const BIND: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// Turns of each side per row, of which the best counts: what else runs on a machine only makes a turn worse.
const TURNS: usize = 7;

fn main() -> Outcome<()> {
    let argument = std::env::args().nth(1);
    if argument.as_deref() == Some("target") {
        return target();
    }
    let seconds: f64 = argument.map_or(Ok(0.2), |text| text.parse())?;
    let filter = std::env::args().nth(2).unwrap_or_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    measure(&runtime, Duration::from_secs_f64(seconds), &filter)
}

/// Lends memory until its standard input ends.
fn target() -> Outcome<()> {
    let provider = Provider::detect()?;
    let endpoint = Endpoint::open(EndpointConfig { provider, bind: BIND, port: None, spin: Duration::ZERO })?;
    let memory = Memory::allocate_populated(REGION)?;
    let readable = endpoint.register(&memory, 0..REGION, Access::RemoteRead, Some(1))?;
    let writable = endpoint.register(&memory, 0..REGION, Access::RemoteWrite, Some(2))?;
    let address: Vec<String> = endpoint.address().as_bytes().iter().map(u8::to_string).collect();
    let mut out = std::io::stdout().lock();
    writeln!(out, "{} {} {} {}", readable.base(), readable.key(), writable.key(), address.join(" "))?;
    out.flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// What one side did in one turn.
#[derive(Clone, Copy, Default)]
struct Figure {
    gib_per_second: f64,
    median_us: f64,
}

/// The best rate and the best latency of all turns.
fn best(figures: &[Figure]) -> Figure {
    let gib_per_second = figures.iter().map(|figure| figure.gib_per_second).fold(0.0, f64::max);
    let median_us = figures.iter().map(|figure| figure.median_us).fold(f64::INFINITY, f64::min);
    Figure { gib_per_second, median_us }
}

fn measure(runtime: &Runtime, time: Duration, filter: &str) -> Outcome<()> {
    let mut child =
        Command::new(std::env::current_exe()?).arg("target").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    let mut numbers = line.split_whitespace();
    let mut number = || numbers.next().ok_or("the target said too little");
    let (base, read_key, write_key): (u64, u64, u64) = (number()?.parse()?, number()?.parse()?, number()?.parse()?);
    let address: Vec<u8> = numbers.map(str::parse).collect::<Result<_, _>>()?;
    let address = FabricAddress::from_bytes(&address)?;

    let provider = Provider::detect()?;
    let (major, minor) = library_version();
    let mut out = std::io::stdout();
    writeln!(out, "# provider {} of libfabric {major}.{minor}; best of {TURNS} turns", provider.name())?;
    writeln!(
        out,
        "{:<24} {:>9} {:>9}   {:>9} {:>9} {:>6}   {:>6} {:>8}",
        "cell", "GiB/s", "p50 us", "raw GiB/s", "p50 us", "depth", "rate", "latency"
    )?;
    for (way, key) in [(Way::Write, write_key), (Way::Read, read_key)] {
        for (size, bytes) in [("4KiB", 4 << 10), ("64KiB", 64 << 10), ("1MiB", 1 << 20), ("4MiB", 4 << 20)] {
            for (name, depth, spins, raw_depths) in [
                ("depth1/spin", 1, true, vec![1]),
                ("depth1/sleep", 1, false, vec![1]),
                ("depth16", 16, false, vec![1, 2, 4, 8, 16]),
            ] {
                let cell = format!("{}/{size}/{name}", if way == Way::Write { "write" } else { "read" });
                if !cell.contains(filter) {
                    continue;
                }
                let remote = RemoteSpan { address: base, key, len: (bytes * depth.max(16)) as u64 };
                let (mut ours, mut theirs) = (Vec::new(), vec![Vec::new(); raw_depths.len()]);
                for _ in 0..TURNS {
                    ours.push(runtime.block_on(through_endpoint(&address, way, remote, bytes, depth, spins, time))?);
                    for (depth, theirs) in raw_depths.iter().zip(&mut theirs) {
                        let mut client = RawClient::open(&provider, BIND, &address, 16 * bytes)?;
                        let load = Load { way, bytes, depth: *depth, time };
                        // The first run connects and warms up.
                        client.run(remote, Load { time: time / 4, ..load })?;
                        let run = client.run(remote, load)?;
                        theirs.push(Figure {
                            gib_per_second: run.gib_per_second(),
                            median_us: run.quantile(0.5).as_secs_f64() * 1e6,
                        });
                    }
                }
                let ours = best(&ours);
                let raw = raw_depths.into_iter().zip(theirs).map(|(depth, theirs)| (depth, best(&theirs)));
                let (raw_depth, raw) =
                    raw.max_by(|a, b| a.1.gib_per_second.total_cmp(&b.1.gib_per_second)).ok_or("there is a depth")?;
                writeln!(
                    out,
                    "{cell:<24} {:>9.3} {:>9.1}   {:>9.3} {:>9.1} {raw_depth:>6}   {:>6.2} {:>8.2}",
                    ours.gib_per_second,
                    ours.median_us,
                    raw.gib_per_second,
                    raw.median_us,
                    ours.gib_per_second / raw.gib_per_second,
                    ours.median_us / raw.median_us
                )?;
            }
        }
    }
    drop(child.stdin.take());
    child.wait()?;
    Ok(())
}

/// Tasks on one endpoint, each with one operation at a time. A new endpoint, as for the other side.
async fn through_endpoint(
    address: &FabricAddress,
    way: Way,
    remote: RemoteSpan,
    bytes: usize,
    depth: usize,
    spins: bool,
    time: Duration,
) -> Outcome<Figure> {
    let spin = EndpointConfig::SPIN;
    let endpoint = Endpoint::open(EndpointConfig { provider: Provider::detect()?, bind: BIND, port: None, spin })?;
    let peer = endpoint.connect(address)?;
    let memory = Memory::allocate_populated(depth * bytes)?;
    let local = Arc::new(endpoint.register(&memory, 0..depth * bytes, Access::Local, None)?);
    let mut figure = Figure::default();
    for time in [time / 4, time] {
        let begun = Instant::now();
        let lanes: Vec<_> = (0..depth)
            .map(|lane| {
                let span = LocalSpan::new(&local, lane * bytes..(lane + 1) * bytes)?;
                let remote =
                    RemoteSpan { address: remote.address + (lane * bytes) as u64, len: bytes as u64, ..remote };
                Ok(tokio::spawn(repeat(endpoint.clone(), peer.clone(), way, span, remote, spins, begun + time)))
            })
            .collect::<Outcome<_>>()?;
        let mut latencies = Vec::new();
        for lane in lanes {
            latencies.extend(lane.await??);
        }
        let moved = (latencies.len() * bytes) as f64 / begun.elapsed().as_secs_f64() / f64::from(1u32 << 30);
        latencies.sort_unstable();
        let median_us = latencies[latencies.len() / 2].as_secs_f64() * 1e6;
        figure = Figure { gib_per_second: moved, median_us };
    }
    endpoint.close();
    Ok(figure)
}

async fn repeat(
    endpoint: Endpoint,
    peer: Peer,
    way: Way,
    local: LocalSpan,
    remote: RemoteSpan,
    spins: bool,
    until: Instant,
) -> Result<Vec<Duration>, OperationError> {
    let mut latencies = Vec::with_capacity(1 << 16);
    loop {
        let begun = Instant::now();
        let deadline = begun + Duration::from_secs(10);
        let wait = if spins { Wait::spinning_until(deadline) } else { Wait::until(deadline) };
        match way {
            Way::Write => endpoint.write(&peer, local.clone(), remote, wait).await?,
            Way::Read => endpoint.read(&peer, local.clone(), remote, wait).await?,
        }
        latencies.push(begun.elapsed());
        // At least one, also on a machine that let the time pass without us.
        if Instant::now() >= until {
            return Ok(latencies);
        }
    }
}
