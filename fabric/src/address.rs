//! Where an endpoint is reached. Keeps the raw bytes of `fi_getname`, which only the provider understands; reads IP and port out
//! of socket addresses for people and for tests. Whether a peer's bytes fit an endpoint is checked before libfabric sees them,
//! which would read past the end of short ones.

use crate::FabricError;
use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// Longest address that we pass to libfabric: that of a `sockaddr_storage`.
pub(crate) const ADDRESS_BYTES_MAX: usize = 128;

/// The address of an [`Endpoint`](crate::Endpoint), as its provider writes it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FabricAddress {
    bytes: Box<[u8]>,
}

impl FabricAddress {
    /// Takes the bytes that another endpoint's [`as_bytes`](Self::as_bytes) gave.
    ///
    /// # Errors
    /// [`FabricError::BadAddress`] if they are empty or longer than any address.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, FabricError> {
        if bytes.is_empty() || bytes.len() > ADDRESS_BYTES_MAX {
            return Err(FabricError::BadAddress {
                expected: format!("1 to {ADDRESS_BYTES_MAX} bytes"),
                found: format!("{} bytes", bytes.len()),
            });
        }
        Ok(Self { bytes: bytes.into() })
    }

    /// A socket address, as the `net` and `tcp` providers write it.
    #[expect(clippy::host_endian_bytes, reason = "sa_family is in the host's order by definition")]
    pub(crate) fn of_socket(ip: Ipv4Addr, port: u16) -> Self {
        let family = u16::try_from(libc::AF_INET).expect("a small number");
        let mut bytes = [0; 16];
        bytes[..2].copy_from_slice(&family.to_ne_bytes());
        bytes[2..4].copy_from_slice(&port.to_be_bytes());
        bytes[4..8].copy_from_slice(&ip.octets());
        Self { bytes: bytes.into() }
    }

    /// The bytes to send to peers.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The IP address, if the provider's addresses are socket addresses.
    #[must_use]
    pub fn ip(&self) -> Option<IpAddr> {
        match self.family()? {
            libc::AF_INET => {
                let octets: [u8; 4] = self.bytes.get(4..8)?.try_into().ok()?;
                Some(IpAddr::V4(Ipv4Addr::from(octets)))
            }
            libc::AF_INET6 => {
                let octets: [u8; 16] = self.bytes.get(8..24)?.try_into().ok()?;
                Some(IpAddr::V6(Ipv6Addr::from(octets)))
            }
            _ => None,
        }
    }

    /// The port, if the provider's addresses are socket addresses.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        self.ip()?;
        let port: [u8; 2] = self.bytes.get(2..4)?.try_into().ok()?;
        Some(u16::from_be_bytes(port))
    }

    /// Refuses a peer's address that differs in kind from `self`, which is ours.
    pub(crate) fn check_kind_of(&self, peer: &Self) -> Result<(), FabricError> {
        let kind = |address: &Self| match address.family() {
            Some(family) => format!("{} bytes of address family {family}", address.bytes.len()),
            None => format!("{} bytes", address.bytes.len()),
        };
        // Only socket addresses name a family that we understand; other kinds are told apart by their length alone.
        let same_family = self.ip().is_none() || self.family() == peer.family();
        if self.bytes.len() == peer.bytes.len() && same_family {
            return Ok(());
        }
        Err(FabricError::BadAddress { expected: kind(self), found: kind(peer) })
    }

    fn family(&self) -> Option<i32> {
        #[expect(clippy::host_endian_bytes, reason = "sa_family is in the host's order by definition")]
        let family = u16::from_ne_bytes(self.bytes.get(..2)?.try_into().ok()?);
        Some(i32::from(family))
    }
}

impl fmt::Display for FabricAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.ip(), self.port()) {
            (Some(IpAddr::V6(ip)), Some(port)) => write!(f, "[{ip}]:{port}"),
            (Some(ip), Some(port)) => write!(f, "{ip}:{port}"),
            _ => self.bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
        }
    }
}

impl fmt::Debug for FabricAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FabricAddress({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::host_endian_bytes, reason = "sa_family is in the host's order by definition")]
    fn socket_v4(ip: [u8; 4], port: u16) -> Vec<u8> {
        let mut bytes = u16::try_from(libc::AF_INET).unwrap().to_ne_bytes().to_vec();
        bytes.extend(port.to_be_bytes());
        bytes.extend(ip);
        bytes.extend([0; 8]);
        bytes
    }

    #[test]
    fn a_socket_address_shows_its_ip_and_port() {
        let address = FabricAddress::from_bytes(&socket_v4([127, 0, 0, 1], 4711)).unwrap();
        assert_eq!(address.ip(), Some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        assert_eq!(address.port(), Some(4711));
        assert_eq!(address.to_string(), "127.0.0.1:4711");
    }

    #[test]
    fn addresses_of_another_length_or_family_are_refused() {
        let ours = FabricAddress::from_bytes(&socket_v4([127, 0, 0, 1], 4711)).unwrap();
        let short = FabricAddress::from_bytes(&ours.as_bytes()[..8]).unwrap();
        let mut other = ours.as_bytes().to_vec();
        other[0] = 99;
        let other = FabricAddress::from_bytes(&other).unwrap();
        assert!(matches!(ours.check_kind_of(&short), Err(FabricError::BadAddress { .. })));
        assert!(matches!(ours.check_kind_of(&other), Err(FabricError::BadAddress { .. })));
        assert_eq!(ours.check_kind_of(&ours.clone()), Ok(()));
        assert!(FabricAddress::from_bytes(&[]).is_err());
        assert!(FabricAddress::from_bytes(&[0; ADDRESS_BYTES_MAX + 1]).is_err());
    }
}
