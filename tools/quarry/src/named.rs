//! The cluster that a command is about: a cluster file or a URL, and whose credentials to use.

use quarry_client::{Cluster, ClusterError};
use std::path::Path;

/// The cluster that a file or a URL names; with these credentials, if some are given, instead of those that it names.
///
/// # Errors
/// [`ClusterError`].
pub fn cluster(named: &str, credentials: Option<&Path>) -> Result<Cluster, ClusterError> {
    let cluster = if named.starts_with("quarry://") { Cluster::parse(named) } else { Cluster::from_file(named) }?;
    Ok(match credentials {
        Some(file) => cluster.with_credentials(file),
        None => cluster,
    })
}
