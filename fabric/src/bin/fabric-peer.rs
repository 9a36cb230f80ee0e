//! A peer in a process of its own, told what to do on its standard input: what tests stop, continue and kill.
//!
//! `fabric-peer <bytes> [port]` opens an endpoint on 127.0.0.1, registers its memory for remote reads and, under another key,
//! for remote writes, and prints `ready <address> <base> <read key> <write key>`. Then it answers each line with one line:
//!
//! | line | answer |
//! | --- | --- |
//! | `write <address> <remote address> <key> <length> <byte> <seconds>` | `begun`, and when it has ended `ended <outcome>` |
//! | `peek <offset> <length>` | `<first byte> <bytes equal to the first>` |
//! | `fill <offset> <length> <byte>` | `filled` |
//!
//! It ends with its standard input, and with the thread that started it.

use quarry_fabric::{
    Access, Endpoint, EndpointConfig, FabricAddress, LocalSpan, Memory, OperationError, Provider, RemoteSpan,
};
use std::{
    error::Error,
    io::{BufRead, Write},
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::Duration,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let mut arguments = std::env::args().skip(1);
    let bytes: usize = arguments.next().ok_or("how many bytes?")?.parse()?;
    let port = arguments.next().map(|port| port.parse()).transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let memory = Memory::allocate(bytes)?;
    let endpoint = Endpoint::open(EndpointConfig {
        provider: Provider::detect()?,
        bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
        port,
        spin: Duration::ZERO,
    })?;
    let readable = endpoint.register(&memory, 0..bytes, Access::RemoteRead, Some(random_key()?))?;
    let writable = endpoint.register(&memory, 0..bytes, Access::RemoteWrite, Some(random_key()?))?;
    say(&format!(
        "ready {} {} {} {}",
        to_hex(endpoint.address().as_bytes()),
        readable.base(),
        readable.key(),
        writable.key()
    ))?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["write", address, remote, key, length, byte, seconds] => {
                let peer = endpoint.connect(&FabricAddress::from_bytes(&from_hex(address)?)?)?;
                let length: usize = length.parse()?;
                let source = Memory::allocate(length)?;
                source.copy_in(0, &vec![byte.parse()?; length])?;
                let source = Arc::new(endpoint.register(&source, 0..length, Access::Local, None)?);
                let local = LocalSpan::new(&source, 0..length)?;
                let remote = RemoteSpan { address: remote.parse()?, key: key.parse()?, len: length as u64 };
                let deadline = tokio::time::Instant::now() + Duration::from_secs(seconds.parse()?);
                let endpoint = endpoint.clone();
                say("begun")?;
                runtime.spawn(async move {
                    let outcome = match endpoint.write(&peer, local, remote, deadline).await {
                        Ok(()) => "ok".to_owned(),
                        Err(OperationError::Failed { errno, .. }) => format!("failed {errno}"),
                        Err(OperationError::Deadline) => "deadline".to_owned(),
                        Err(other) => format!("other {other}"),
                    };
                    say(&format!("ended {outcome}"))
                });
            }
            ["peek", offset, length] => {
                let copy = memory.copy_to_vec(offset.parse()?, length.parse()?)?;
                let first = copy.first().ok_or("peek at nothing")?;
                say(&format!("{first} {}", copy.iter().filter(|byte| *byte == first).count()))?;
            }
            ["fill", offset, length, byte] => {
                memory.copy_in(offset.parse()?, &vec![byte.parse()?; length.parse()?])?;
                say("filled")?;
            }
            other => return Err(format!("not understood: {other:?}").into()),
        }
    }
    Ok(())
}

fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

fn random_key() -> Outcome<u64> {
    let mut bytes = [0u8; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_le_bytes(bytes))
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Outcome<Vec<u8>> {
    (0..text.len() / 2)
        .map(|i| {
            let digits = text.get(2 * i..2 * i + 2).ok_or("not hexadecimal")?;
            Ok(u8::from_str_radix(digits, 16)?)
        })
        .collect()
}
