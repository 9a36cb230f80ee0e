//! What the fabric gives through this layer, over loopback: GiB/s and median latency of writes and reads, at depth 1 and 16.
//!
//! `cargo run --release -p quarry-fabric --example raw [seconds per cell]`. Starts itself again as the target process.

use quarry_fabric::{
    Access, Endpoint, EndpointConfig, FabricAddress, LocalSpan, Memory, OperationError, Peer, Provider, RemoteSpan,
    library_version,
};
use std::{
    error::Error,
    io::{BufRead, BufReader, Read, Write},
    net::{IpAddr, Ipv4Addr},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};
use tokio::time::Instant;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const REGION: usize = 256 << 20;

fn main() -> Outcome<()> {
    let argument = std::env::args().nth(1);
    if argument.as_deref() == Some("target") {
        return target();
    }
    let seconds: f64 = argument.map_or(Ok(1.0), |text| text.parse())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async { tokio::spawn(measure(Duration::from_secs_f64(seconds))).await? })
}

/// Lends memory until its standard input ends.
fn target() -> Outcome<()> {
    let endpoint = open()?;
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

async fn measure(time: Duration) -> Outcome<()> {
    let mut child =
        Command::new(std::env::current_exe()?).arg("target").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    let mut numbers = line.split_whitespace();
    let mut number = || numbers.next().ok_or("the target said too little");
    let (base, read_key, write_key): (u64, u64, u64) = (number()?.parse()?, number()?.parse()?, number()?.parse()?);
    let address: Vec<u8> = numbers.map(str::parse).collect::<Result<_, _>>()?;

    let endpoint = open()?;
    let peer = endpoint.connect(&FabricAddress::from_bytes(&address)?)?;
    let memory = Memory::allocate_populated(64 << 20)?;
    let local = Arc::new(endpoint.register(&memory, 0..64 << 20, Access::Local, None)?);
    let mut out = std::io::stdout();
    let (major, minor) = library_version();
    writeln!(out, "# provider {} of libfabric {major}.{minor}", Provider::detect()?.name())?;
    writeln!(out, "{:<6} {:>8} {:>6} {:>8} {:>9}", "op", "bytes", "depth", "GiB/s", "p50 us")?;
    for (name, key) in [("write", write_key), ("read", read_key)] {
        for bytes in [4 << 10, 64 << 10, 1 << 20] {
            for depth in [1, 16] {
                let lanes: Vec<_> = (0..depth)
                    .map(|lane| {
                        let span = LocalSpan::new(&local, lane * bytes..(lane + 1) * bytes)?;
                        let remote = RemoteSpan { address: base + (lane * bytes) as u64, key, len: bytes as u64 };
                        let (endpoint, peer) = (endpoint.clone(), peer.clone());
                        Ok(tokio::spawn(repeat(endpoint, peer, name == "write", span, remote, time)))
                    })
                    .collect::<Outcome<_>>()?;
                let begun = Instant::now();
                let mut latencies = Vec::new();
                for lane in lanes {
                    latencies.extend(lane.await??);
                }
                let moved = (latencies.len() * bytes) as f64 / begun.elapsed().as_secs_f64() / (1u64 << 30) as f64;
                latencies.sort_unstable();
                let median = latencies[latencies.len() / 2].as_secs_f64() * 1e6;
                writeln!(out, "{name:<6} {bytes:>8} {depth:>6} {moved:>8.3} {median:>9.1}")?;
            }
        }
    }
    drop(child.stdin.take());
    child.wait()?;
    Ok(())
}

async fn repeat(
    endpoint: Endpoint,
    peer: Peer,
    write: bool,
    local: LocalSpan,
    remote: RemoteSpan,
    time: Duration,
) -> Result<Vec<Duration>, OperationError> {
    let until = Instant::now() + time;
    let mut latencies = Vec::new();
    loop {
        let begun = Instant::now();
        if begun >= until {
            return Ok(latencies);
        }
        let deadline = begun + Duration::from_secs(10);
        match write {
            true => endpoint.write(&peer, local.clone(), remote, deadline).await?,
            false => endpoint.read(&peer, local.clone(), remote, deadline).await?,
        }
        latencies.push(begun.elapsed());
    }
}

fn open() -> Outcome<Endpoint> {
    let bind = IpAddr::V4(Ipv4Addr::LOCALHOST);
    Ok(Endpoint::open(EndpointConfig { provider: Provider::detect()?, bind, port: None, spin: Duration::ZERO })?)
}
