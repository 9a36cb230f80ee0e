//! Which libfabric provider carries our bytes. Decides the name by the library's version and checks that libfabric gives
//! exactly that one: asked for `tcp`, 1.17 answers with `tcp;ofi_rxm`, whose endpoints never recover from a refused write.

use crate::{
    DoubleNetwork, FabricError,
    raw::{self, Source},
    reclaim_signals,
};
use std::net::{IpAddr, Ipv4Addr};

/// A provider that this host's libfabric has: `net` on libfabric 1.17, `tcp` from 1.18 on (the same code, renamed).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provider {
    name: String,
    /// In place of libfabric.
    network: Option<DoubleNetwork>,
}

impl Provider {
    /// The provider that fits the installed library.
    ///
    /// # Errors
    /// [`FabricError::LibraryTooOld`] before 1.17, [`FabricError::NoProvider`] if the library lacks it.
    pub fn detect() -> Result<Self, FabricError> {
        let (major, minor) = library_version();
        match (major, minor) {
            (0, _) | (1, 0..17) => Err(FabricError::LibraryTooOld { found: format!("{major}.{minor}") }),
            (1, 17) => Self::named("net"),
            _ => Self::named("tcp"),
        }
    }

    /// The provider of this name, for hosts where the operator knows better (an RDMA card's).
    ///
    /// # Errors
    /// [`FabricError::NoProvider`] if libfabric does not answer with exactly this one.
    pub fn named(name: &str) -> Result<Self, FabricError> {
        reclaim_signals();
        raw::discover(name, &Source { ip: IpAddr::V4(Ipv4Addr::LOCALHOST), port: None })?;
        Ok(Self { name: name.to_owned(), network: None })
    }

    /// No libfabric at all but its double in memory, for fault injection: endpoints of this process on this network.
    #[must_use]
    pub fn double(network: &DoubleNetwork) -> Self {
        Self { name: "double".to_owned(), network: Some(network.clone()) }
    }

    pub(crate) fn network(&self) -> Option<&DoubleNetwork> {
        self.network.as_ref()
    }

    /// The name by which libfabric knows it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// Major and minor version of the libfabric that is loaded (not of the headers that we were built with).
#[must_use]
pub fn library_version() -> (u32, u32) {
    raw::version()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_detected_provider_is_the_one_for_this_library() {
        let provider = Provider::detect().unwrap();
        let expected = if library_version() == (1, 17) { "net" } else { "tcp" };
        assert_eq!(provider.name(), expected);
    }

    #[test]
    fn a_provider_that_libfabric_replaces_by_another_is_refused() {
        assert!(matches!(Provider::named("no-such-provider"), Err(FabricError::NoProvider { .. })));
        assert!(matches!(Provider::named("net\0"), Err(FabricError::BadProviderName { .. })));
        if library_version() == (1, 17) {
            // 1.17 answers `tcp;ofi_rxm` when asked for `tcp`.
            let Err(FabricError::NoProvider { found, .. }) = Provider::named("tcp") else { panic!("tcp was taken") };
            assert_eq!(found, "tcp;ofi_rxm");
        }
    }
}
