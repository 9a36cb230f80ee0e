//! The one source of randomness: the operating system's generator. Keys that protect memory come from here.

use rustix::rand::{GetRandomFlags, getrandom};

/// `N` random bytes.
#[expect(clippy::disallowed_methods, reason = "this is the seam")]
pub(crate) fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                // Only a kernel without the call gets here. Predictable keys would protect nothing.
                tracing::error!(%error, "the operating system gives no randomness, giving up");
                std::process::abort();
            }
        }
    }
    bytes
}

/// A random key for a memory region.
pub(crate) fn key() -> u64 {
    u64::from_le_bytes(bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_draws_differ() {
        assert_ne!(bytes::<16>(), bytes::<16>());
        assert_ne!(key(), key());
    }
}
