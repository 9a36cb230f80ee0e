//! Which build this is.

/// A hash over every source of this build. The library and the binary of one build carry the same.
pub const BUILD_ID: &str = env!("QUARRY_BUILD_ID");

/// What `quarry --version` says.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (build ", env!("QUARRY_BUILD_ID"), ")");
