//! Loopback ports that stay ours: chosen below the range from which the system takes ports for outgoing connections, and locked against other
//! clusters of this host by one lock file each, so that a process can be killed and restarted on its port while others start beside it.

use std::{
    fs::{self, File},
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::PathBuf,
    sync::atomic::{AtomicU32, Ordering},
};

/// Ports below the ephemeral range among which one is sought.
const SPAN: u16 = 12_000;
/// Where the ephemeral range begins if the system does not say.
const EPHEMERAL: u16 = 32_768;

/// A port of 127.0.0.1, ours until this is dropped.
#[derive(Debug)]
pub(crate) struct Port {
    number: u16,
    /// Holds the lock.
    _lock: File,
}

impl Port {
    pub(crate) const fn address(&self) -> SocketAddr {
        SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), self.number)
    }

    /// Any free port.
    pub(crate) fn reserve() -> io::Result<Self> {
        static TAKEN: AtomicU32 = AtomicU32::new(0);
        let end = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok();
        let end = end.and_then(|text| text.split_whitespace().next()?.parse().ok()).unwrap_or(EPHEMERAL);
        let first = end.saturating_sub(SPAN).max(1024);
        let span = u32::from(end.saturating_sub(first).max(1));
        // Processes begin at different places, so that they seldom meet; the locks decide when they do.
        let start = std::process::id().wrapping_mul(97).wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed));
        for step in 0..span {
            let offset = u16::try_from(start.wrapping_add(step) % span).expect("the span is a u16");
            if let Some(port) = Self::take(first + offset)? {
                return Ok(port);
            }
        }
        Err(io::Error::new(io::ErrorKind::AddrInUse, format!("no free port from {first} to {end} on 127.0.0.1")))
    }

    /// This port.
    pub(crate) fn reserve_exactly(number: u16) -> io::Result<Self> {
        Self::take(number)?.ok_or_else(|| {
            io::Error::new(io::ErrorKind::AddrInUse, format!("port {number} of 127.0.0.1 is in use: is it running?"))
        })
    }

    fn take(number: u16) -> io::Result<Option<Self>> {
        let folder = folder();
        fs::create_dir_all(&folder)?;
        let lock = File::options().create(true).truncate(false).write(true).open(folder.join(number.to_string()))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Ok(None),
            Err(fs::TryLockError::Error(wrong)) => return Err(wrong),
        }
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, number)).is_ok();
        Ok(free.then_some(Self { number, _lock: lock }))
    }
}

fn folder() -> PathBuf {
    std::env::temp_dir().join(format!("quarry-ports-{}", rustix::process::getuid().as_raw()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserved_port_is_not_given_again_until_it_is_dropped() {
        let one = Port::reserve().unwrap();
        let number = one.address().port();
        assert!(Port::reserve_exactly(number).is_err());
        assert_ne!(Port::reserve().unwrap().address(), one.address());
        drop(one);
        assert_eq!(Port::reserve_exactly(number).unwrap().address().port(), number);
    }

    #[test]
    fn a_port_that_somebody_else_listens_on_is_not_given() {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        assert!(Port::reserve_exactly(taken.local_addr().unwrap().port()).is_err());
    }
}
