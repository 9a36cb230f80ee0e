//! libfabric: its version, the provider that would be used, and a round trip of real one-sided operations through it on this host.

use super::finding::Finding;
use quarry_fabric::{
    Access, ClientEndpoint, Endpoint, EndpointConfig, FabricError, LocalBuffer, Memory, Provider, RemoteSpan,
    library_version,
};
use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};
use tokio::time::Instant;

/// What is written and read back, in operations of one block.
const BLOCK_BYTES: usize = 1 << 20;
const BLOCKS: usize = 16;

/// Providers that need no hardware.
const SOFTWARE: [&str; 3] = ["net", "tcp", "sockets"];

/// Whether the provider is one without hardware, which needs less of the machine.
pub(super) async fn check(named: Option<&str>, timeout: Duration, findings: &mut Vec<Finding>) -> bool {
    let (major, minor) = library_version();
    let version = format!("version {major}.{minor}");
    findings.push(if (major, minor) >= (1, 17) {
        Finding::ok("libfabric", version)
    } else {
        Finding::fail("libfabric", version, "install 1.17 or newer (Debian: apt install libfabric1)")
    });
    let provider = match named.map_or_else(Provider::detect, Provider::named) {
        Ok(provider) => provider,
        Err(wrong) => {
            let remedy = "look at what fi_info lists, unset FI_PROVIDER, or choose another with --provider";
            findings.push(Finding::fail("provider", wrong, remedy));
            return true;
        }
    };
    let software = SOFTWARE.contains(&provider.name());
    let kind = if software { "one-sided operations over TCP, by software" } else { "of a card" };
    findings.push(Finding::ok("provider", format!("{}: {kind}", provider.name())));
    findings.push(match round_trip(provider, Instant::now() + timeout).await {
        Ok((write, read)) => {
            let profile = if cfg!(debug_assertions) { " (debug build)" } else { "" };
            let speed = format!("write {write:.1} GiB/s, read {read:.1} GiB/s");
            Finding::ok(
                "round trip",
                format!("16 MiB by fi_write and fi_read on 127.0.0.1, same bytes: {speed}{profile}"),
            )
        }
        Err(wrong) => Finding::fail(
            "round trip",
            wrong,
            "run with FI_LOG_LEVEL=warn to see what libfabric says; let processes of this host connect to 127.0.0.1",
        ),
    });
    software
}

/// GiB per second of writing blocks into another endpoint's memory, and of reading them back.
async fn round_trip(provider: Provider, deadline: Instant) -> Result<(f64, f64), String> {
    let said = |wrong: &dyn std::fmt::Display| wrong.to_string();
    let bind = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let config = EndpointConfig { provider, bind, port: None, spin: Duration::ZERO };
    let bytes = BLOCK_BYTES * BLOCKS;
    let lent = (|| {
        let endpoint = Endpoint::open(config.clone())?;
        let memory = Memory::allocate_populated(bytes)?;
        let writable = endpoint.register(&memory, 0..bytes, Access::RemoteWrite, None)?;
        let readable = endpoint.register(&memory, 0..bytes, Access::RemoteRead, None)?;
        Ok::<_, FabricError>((endpoint, writable, readable))
    })();
    let (target, writable, readable) = lent.map_err(|wrong| said(&wrong))?;
    let (from, into) = (Memory::allocate_populated(bytes), Memory::allocate_populated(bytes));
    let (from, into) = (from.map_err(|wrong| said(&wrong))?, into.map_err(|wrong| said(&wrong))?);
    // No two blocks alike, so that one in another's place shows.
    let pattern: Vec<u8> = (0..bytes).map(|at| (at / 251 + at).to_le_bytes()[0]).collect();
    from.copy_in(0, &pattern).map_err(|wrong| said(&wrong))?;
    let client = ClientEndpoint::new(EndpointConfig { spin: EndpointConfig::SPIN, ..config });
    client.keep_registered(&from);
    client.keep_registered(&into);
    let peer = target.address();
    let block = |at: usize| at * BLOCK_BYTES..(at + 1) * BLOCK_BYTES;
    let remote = |base: u64, key: u64, at: usize| RemoteSpan {
        address: base + (at * BLOCK_BYTES) as u64,
        key,
        len: BLOCK_BYTES as u64,
    };
    let rate = |began: Instant| bytes as f64 / began.elapsed().as_secs_f64() / f64::from(1 << 30);
    // The first operation connects, uncounted.
    let first = remote(writable.base(), writable.key(), 0);
    client.write(&peer, LocalBuffer::new(&from, block(0)), first, deadline).await.map_err(|wrong| said(&wrong))?;
    let began = Instant::now();
    for at in 0..BLOCKS {
        let there = remote(writable.base(), writable.key(), at);
        client.write(&peer, LocalBuffer::new(&from, block(at)), there, deadline).await.map_err(|wrong| said(&wrong))?;
    }
    let write = rate(began);
    let began = Instant::now();
    for at in 0..BLOCKS {
        let there = remote(readable.base(), readable.key(), at);
        client.read(&peer, LocalBuffer::new(&into, block(at)), there, deadline).await.map_err(|wrong| said(&wrong))?;
    }
    let read = rate(began);
    client.close();
    target.close();
    if into.copy_to_vec(0, bytes).map_err(|wrong| said(&wrong))? != pattern {
        return Err("the bytes that were read back are not those that were written".to_owned());
    }
    Ok((write, read))
}

#[cfg(test)]
mod tests {
    use super::{super::finding::State, *};

    #[tokio::test(flavor = "multi_thread")]
    async fn the_round_trip_moves_real_bytes_and_an_unknown_provider_fails() {
        let mut findings = Vec::new();
        assert!(check(None, Duration::from_secs(60), &mut findings).await);
        assert_eq!(findings.len(), 3);
        assert!(findings.iter().all(|it| it.state == State::Ok), "{findings:?}");
        let mut findings = Vec::new();
        check(Some("nonesuch"), Duration::from_secs(1), &mut findings).await;
        let last = findings.last().unwrap();
        assert!(last.state == State::Fail && last.found.contains("nonesuch"), "{last:?}");
    }
}
