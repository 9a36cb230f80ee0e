//! Why a data node cannot start or go on.

use quarry_fabric::FabricError;
use quarry_wire::{
    ids::{ClusterUuid, NodeId},
    keyring::TrustError,
};
use std::{io, net::SocketAddr, path::PathBuf};

/// Why a data node cannot start, or is not ready.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataNodeError {
    /// A setting that cannot work.
    #[error("the setting {field} must be {expected}, found {found}")]
    Config {
        /// Which setting.
        field: &'static str,
        /// What works.
        expected: String,
        /// What was given.
        found: String,
    },
    /// The node's own certificate is not one of this cluster's root.
    #[error("the node's certificate is not usable: {0}; have the cluster's root key sign one for this node")]
    Certificate(#[from] TrustError),
    /// Memory or an endpoint cannot be had.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}; choose another address or stop who has it")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The data folder cannot be read or written.
    #[error("{doing} {path}: {source}")]
    Disk {
        /// What was tried.
        doing: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another process has the data folder.
    #[error("{path} is in use by another process: stop it, or give this node a folder of its own")]
    Locked {
        /// The lock file.
        path: PathBuf,
    },
    /// The data folder is another node's.
    #[error(
        "{path} belongs to {found_node} of cluster {found_cluster}, this is {node} of cluster {cluster}: use this node's own folder"
    )]
    Foreign {
        /// The file that says so.
        path: PathBuf,
        /// Who we are.
        node: NodeId,
        /// Which cluster we are of.
        cluster: ClusterUuid,
        /// Whose it is.
        found_node: NodeId,
        /// Of which cluster.
        found_cluster: ClusterUuid,
    },
    /// The folder is no data node's at all.
    #[error("{path} says that this is {found}, not a data node's folder: use this node's own folder")]
    NotADataNodes {
        /// The file that says so.
        path: PathBuf,
        /// Whose folder it is.
        found: String,
    },
    /// The file that names the folder's owner does not hold what was once written there.
    #[error("{path} is damaged: expected {expected}, found {found}; restore it, or empty the folder to start anew")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What should be there.
        expected: String,
        /// What is.
        found: String,
    },
    /// Not all regions were registered in time.
    #[error("not ready in time: {ready} of {regions} regions are registered with the directory ({last})")]
    NotReady {
        /// Regions that are.
        ready: usize,
        /// Regions that there are.
        regions: usize,
        /// What was last heard of the directory.
        last: String,
    },
}
