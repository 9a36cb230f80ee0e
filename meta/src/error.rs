//! Faults of a meta node. Refusals of calls are no faults: they are `quarry_proto::refusal`.

use quarry_raft::RaftError;
use quarry_wire::keyring::TrustError;
use std::{io, path::PathBuf};

/// Why a meta node cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum MetaError {
    /// Settings that cannot work.
    #[error("meta settings: {why}")]
    Settings {
        /// What is wrong, and what would be right.
        why: String,
    },
    /// The root or the node's certificate cannot be believed.
    #[error("this node's certificate does not fit the cluster: {source}")]
    Trust {
        /// What is wrong with it.
        source: TrustError,
    },
    /// The folder is another node's, or another cluster's.
    #[error("{} belongs to {found}, this is {expected}: give each node a folder of its own", dir.display())]
    WrongFolder {
        /// The folder.
        dir: PathBuf,
        /// This node and cluster.
        expected: String,
        /// The node and cluster that the folder names.
        found: String,
    },
    /// A file is not what this program writes.
    #[error("{} cannot be read: expected {expected}, found {found}", file.display())]
    WrongFile {
        /// The file.
        file: PathBuf,
        /// What it should hold.
        expected: String,
        /// What it holds.
        found: String,
    },
    /// The disk failed.
    #[error("{doing}: {source}")]
    Disk {
        /// What was being done.
        doing: String,
        /// The cause.
        source: io::Error,
    },
    /// A restore or a recovery of this folder did not come to its end.
    #[error(
        "{} was left by a recovery or a restore that did not come to its end: recover once more to finish it (or, while {} is there, remove the former to stay as it was); restore into an empty folder",
        dir.join("raft.next").display(), dir.join("raft").display()
    )]
    HalfDone {
        /// The folder of the node.
        dir: PathBuf,
    },
    /// The folder and the directory in it speak of different generations.
    #[error("{} is of generation {folder}, but the directory in it of generation {directory}: restore the node, or give it an empty folder and add it anew", dir.display())]
    Generations {
        /// The folder of the node.
        dir: PathBuf,
        /// That of the folder.
        folder: u32,
        /// That of the directory.
        directory: u32,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: String,
        /// The cause.
        source: io::Error,
    },
    /// Consensus cannot start.
    #[error(transparent)]
    Raft(#[from] RaftError),
}
