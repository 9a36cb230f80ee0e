//! How often a test of the suite `abuse` does what it does: short in the gate, as long as one likes elsewhere.

/// `usual` times what `QUARRY_ABUSE_TIMES` says; without it, `usual`.
///
/// # Panics
/// If `QUARRY_ABUSE_TIMES` is not a number above zero.
#[must_use]
pub fn rounds(usual: usize) -> usize {
    let Ok(times) = std::env::var("QUARRY_ABUSE_TIMES") else { return usual };
    let times: usize =
        times.parse().ok().filter(|times| *times > 0).expect("QUARRY_ABUSE_TIMES is a number above zero");
    usual * times
}
