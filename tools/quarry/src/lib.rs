//! What the `quarry` binary, the other tools and the tests share: configuration, identities, local clusters of real processes, questions to
//! running processes, metrics.
#![warn(missing_docs)]

pub mod admin;
pub mod backups;
pub mod build;
pub mod config;
pub mod credentials;
pub mod exit;
pub mod identity;
pub mod local;
pub mod machine;
pub mod members;
pub mod metrics;
pub mod named;
pub mod perf;
pub mod regions;
pub mod revocations;
pub mod scrape;
pub mod span;
pub mod stderr;
pub mod stdout;
