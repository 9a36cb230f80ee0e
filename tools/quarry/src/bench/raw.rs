//! Raw one-sided operations as a side of a comparison: plain libfabric on one thread against a process that serves its memory as a data node does.

use super::{
    error::BenchError,
    measure::{Round, Side},
    target::Target,
};
use quarry_fabric::{
    OperationError, Provider, RemoteSpan, library_version,
    reference::{Load, RawClient, Run, Way},
};
use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

/// Depths that are tried for the best.
const DEPTHS: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// How long each is tried, twice.
const TRY: Duration = Duration::from_millis(60);

/// A raw client and its target process.
pub(crate) struct Raw {
    client: RawClient,
    target: Target,
    provider: Provider,
}

impl Raw {
    /// Operations of one run use so many bytes here and there, from the start to the end, again and again.
    pub(crate) fn start(bytes: usize) -> Result<Self, BenchError> {
        let target = Target::start(bytes)?;
        let provider = Provider::detect().map_err(BenchError::Fabric)?;
        let bind = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let client = RawClient::open(&provider, bind, &target.address, bytes).map_err(BenchError::Fabric)?;
        Ok(Self { client, target, provider })
    }

    /// Operations of one size at one depth.
    pub(crate) fn side(&mut self, way: Way, bytes: usize, depth: usize) -> RawSide<'_> {
        let remote = match way {
            Way::Read => self.target.readable,
            Way::Write => self.target.writable,
        };
        RawSide { client: &mut self.client, remote, load: Load { way, bytes, depth, time: TRY } }
    }

    /// The depth at which most bytes are moved, at the better of two tries each.
    pub(crate) fn best_depth(&mut self, way: Way, bytes: usize) -> Result<usize, BenchError> {
        let mut best = (0.0, 1);
        for _ in 0..2 {
            for depth in DEPTHS {
                let run = tokio::task::block_in_place(|| self.side(way, bytes, depth).run(TRY))?;
                let rate = run.gib_per_second();
                if rate > best.0 {
                    best = (rate, depth);
                }
            }
        }
        Ok(best.1)
    }

    /// What a row says about it.
    pub(crate) fn name(&self, way: Way, depth: usize) -> String {
        let call = match way {
            Way::Read => "fi_read",
            Way::Write => "fi_write",
        };
        let (major, minor) = library_version();
        format!("{call} depth {depth}, {} {major}.{minor}", self.provider.name())
    }
}

/// One kind of raw operation.
pub(crate) struct RawSide<'a> {
    client: &'a mut RawClient,
    remote: RemoteSpan,
    load: Load,
}

impl RawSide<'_> {
    fn run(&mut self, time: Duration) -> Result<Run, BenchError> {
        self.client
            .run(self.remote, Load { time, ..self.load })
            .map_err(|source: OperationError| BenchError::Raw { source })
    }
}

impl Side for RawSide<'_> {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        let run = tokio::task::block_in_place(|| self.run(time))?;
        Ok(Round { amount: run.bytes as f64, elapsed: run.elapsed, latencies: run.latencies })
    }
}
