//! Why a bench gave no rows. A row that was not measured is never printed.

use crate::exit::{Code, Failure};
use quarry::{identity::IdentityError, local::LocalError};
use quarry_client::{
    CallError, CloseError, ClusterError, ConnectError, DeleteError, GetError, NamespaceError, PutError,
};
use quarry_fabric::{FabricError, OperationError};
use std::{io, path::PathBuf, time::Duration};

/// Why a bench ended without its rows.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    #[error("the cluster to measure: {0}")]
    Cluster(#[from] LocalError),
    #[error("the cluster file: {0}")]
    ClusterFile(#[from] ClusterError),
    #[error("connecting: {0}")]
    Connect(#[from] ConnectError),
    #[error("the namespace: {0}")]
    Namespace(#[from] NamespaceError),
    #[error("{case}: a put failed: {source}")]
    Put { case: String, source: PutError },
    #[error("{case}: a get failed: {source}")]
    Get { case: String, source: GetError },
    #[error("{case}: the key {key} was written and is not found")]
    Lost { case: String, key: String },
    #[error("{case}: {key} has other bytes than were written")]
    Different { case: String, key: String },
    #[error("deleting what was written: {0}")]
    Delete(#[from] DeleteError),
    #[error("a call failed: {0}")]
    Call(#[from] CallError),
    #[error("closing a client: {0}")]
    Close(#[from] CloseError),
    #[error("{case}: {found} measurements, expected at least {expected}: let it run longer (--seconds)")]
    TooFew { case: String, expected: usize, found: usize },
    #[error("no case matches the filter {filter:?}; the cases of this bench: {known}")]
    NoCase { filter: String, known: String },
    #[error(
        "{free} bytes are free for values after {waited:?}, expected {expected}: something else fills this cluster"
    )]
    NoRoom { expected: u64, free: u64, waited: Duration },
    #[error("libfabric: {0}")]
    Fabric(FabricError),
    #[error("a raw operation: {source}")]
    Raw { source: OperationError },
    #[error("{case}: the buffers to read into do not fit into the memory made for them")]
    Buffers { case: String },
    #[error("random bytes for the name of a folder: {0}")]
    Random(IdentityError),
    #[error("redis-server: expected {expected}, found {found}")]
    Redis { expected: String, found: String },
    #[error("a writer whose leader is killed: {why}")]
    Outage { why: String },
    #[error("etcd: expected {expected}, found {found}")]
    Etcd { expected: String, found: String },
    #[error("Mooncake: expected {expected}, found {found}")]
    Mooncake { expected: String, found: String },
    #[error("a call of the control plane: {0}")]
    Lab(#[from] super::meta::LabError),
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
    #[error("{}: {source}", path.display())]
    Folder { path: PathBuf, source: io::Error },
}

impl BenchError {
    /// What the system said while doing `what`.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

impl From<BenchError> for Failure {
    fn from(error: BenchError) -> Self {
        let code = match &error {
            BenchError::NoRoom { .. } => Code::NoSpace,
            BenchError::Cluster(LocalError::Deadline { .. }) => Code::Unavailable,
            _ => Code::Error,
        };
        Self::new(code, error)
    }
}
