//! The process that raw operations are compared against: memory that it lends over a fabric endpoint served as a data node's is, and nothing else.

use super::error::BenchError;
use crate::exit::Failure;
use clap::Args;
use quarry::stdout::line;
use quarry_fabric::{Access, Endpoint, EndpointConfig, FabricAddress, Memory, Provider, RemoteSpan};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, BufRead as _, BufReader, Read as _},
    net::{IpAddr, Ipv4Addr},
    process::{Child, Command, Stdio},
    time::Duration,
};

#[derive(Args, Debug)]
pub(crate) struct TargetArgs {
    /// Bytes to lend.
    #[arg(long)]
    bytes: usize,
}

/// What the process says when it is ready.
#[derive(Serialize, Deserialize)]
struct Offer {
    address: String,
    base: u64,
    read_key: u64,
    write_key: u64,
}

/// Lends memory until standard input ends.
pub(crate) fn run(args: &TargetArgs) -> Result<(), Failure> {
    let provider = Provider::detect().map_err(Failure::error)?;
    let config = EndpointConfig { provider, bind: IpAddr::V4(Ipv4Addr::LOCALHOST), port: None, spin: Duration::ZERO };
    let endpoint = Endpoint::open(config).map_err(Failure::error)?;
    let memory = Memory::allocate_populated(args.bytes).map_err(Failure::error)?;
    let register = |access| endpoint.register(&memory, 0..args.bytes, access, None).map_err(Failure::error);
    let (readable, writable) = (register(Access::RemoteRead)?, register(Access::RemoteWrite)?);
    let offer = Offer {
        address: hex::encode(endpoint.address().as_bytes()),
        base: readable.base(),
        read_key: readable.key(),
        write_key: writable.key(),
    };
    line(serde_json::to_string(&offer).map_err(Failure::error)?)?;
    io::stdin().read_to_end(&mut Vec::new())?;
    endpoint.close();
    Ok(())
}

/// A running target; its process ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Target {
    _running: Running,
    pub(crate) address: FabricAddress,
    pub(crate) readable: RemoteSpan,
    pub(crate) writable: RemoteSpan,
}

impl Target {
    pub(crate) fn start(bytes: usize) -> Result<Self, BenchError> {
        let failed = || BenchError::io("the process of the raw target");
        let mut command = Command::new(std::env::current_exe().map_err(failed())?);
        command.arg("bench-target").arg("--bytes").arg(bytes.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        quarry_fabric::without_our_descriptors(&mut command);
        let mut running = Running(command.spawn().map_err(failed())?);
        let out = running.0.stdout.take().expect("its standard output is a pipe");
        let mut said = String::new();
        BufReader::new(out).read_line(&mut said).map_err(failed())?;
        let wrong = |why: String| failed()(io::Error::other(format!("expected its offer, found {said:?}: {why}")));
        let offer: Offer = serde_json::from_str(&said).map_err(|source| wrong(source.to_string()))?;
        let address = hex::decode(&offer.address).map_err(|source| wrong(source.to_string()))?;
        let address = FabricAddress::from_bytes(&address).map_err(BenchError::Fabric)?;
        let span = |key| RemoteSpan { address: offer.base, key, len: bytes as u64 };
        Ok(Self { _running: running, address, readable: span(offer.read_key), writable: span(offer.write_key) })
    }
}

/// Ends the process, also when it never offered anything.
#[derive(Debug)]
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _: io::Result<()> = self.0.kill();
        let _ = self.0.wait();
    }
}
