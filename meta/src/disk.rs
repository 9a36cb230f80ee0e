//! The node's folder: whose it is. Consensus has a folder of its own inside, with its own version file and lock.
//!
//! ```text
//! file `node` = magic "QUARRYMN" (8) ‖ storage version (4) ‖ cluster UUID (16) ‖ node (8) ‖ CRC-32C of all before (4)
//! ```
//! Written aside, synced, renamed, and its folder synced: the file is whole or absent.

use crate::error::MetaError;
use quarry_wire::ids::{ClusterUuid, NodeId};
use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

const MAGIC: &[u8; 8] = b"QUARRYMN";
/// Version of everything that this node writes beside the folder of consensus.
const STORAGE_VERSION: u32 = 1;
/// The folder of consensus.
const RAFT: &str = "raft";
/// The one that a restore or a recovery makes, until it is complete.
const NEXT: &str = "raft.next";
const BYTES: usize = 8 + 4 + 16 + 8 + 4;

/// Makes the folder this node's, or makes sure that it is. Answers where consensus keeps its files.
pub(crate) fn claim(dir: &Path, cluster: ClusterUuid, node: NodeId) -> Result<PathBuf, MetaError> {
    let disk = |doing: &str, source| MetaError::Disk { doing: format!("{doing} {}", dir.display()), source };
    fs::create_dir_all(dir).map_err(|source| disk("make", source))?;
    if dir.join(NEXT).exists() {
        return Err(MetaError::HalfDone { dir: dir.to_owned() });
    }
    mark(dir, cluster, node)?;
    Ok(dir.join(RAFT))
}

/// Says in the folder whose it is, if it does not say so yet.
pub(crate) fn mark(dir: &Path, cluster: ClusterUuid, node: NodeId) -> Result<(), MetaError> {
    let disk = |doing: &str, source| MetaError::Disk { doing: format!("{doing} {}", dir.display()), source };
    let file = dir.join("node");
    match fs::read(&file) {
        Ok(bytes) => check(dir, &file, &bytes, cluster, node),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            write_whole(dir, &file, &encode(cluster, node)).map_err(|source| disk("mark", source))
        }
        Err(source) => Err(disk("read", source)),
    }
}

/// Whose folder it is.
pub(crate) fn owner(dir: &Path) -> Result<(ClusterUuid, NodeId), MetaError> {
    let file = dir.join("node");
    let disk = |source| MetaError::Disk { doing: format!("read {}", file.display()), source };
    read(&file, &fs::read(&file).map_err(disk)?)
}

/// The folder of consensus that is there now.
pub(crate) fn raft(dir: &Path) -> PathBuf {
    dir.join(RAFT)
}

/// The folder of consensus that is to take its place.
pub(crate) fn next(dir: &Path) -> PathBuf {
    dir.join(NEXT)
}

/// Gives the next folder its place, which is complete and synced. What is there is kept under `kept`; without that nothing may be there. Done
/// again after a crash it comes to the same end.
pub(crate) fn put_next(dir: &Path, kept: Option<&Path>) -> io::Result<()> {
    if let Some(kept) = kept {
        fs::rename(raft(dir), kept)?;
        File::open(dir)?.sync_all()?;
    } else if raft(dir).exists() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    fs::rename(next(dir), raft(dir))?;
    File::open(dir)?.sync_all()
}

fn encode(cluster: ClusterUuid, node: NodeId) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(BYTES);
    bytes.extend(MAGIC);
    bytes.extend(STORAGE_VERSION.to_le_bytes());
    bytes.extend(cluster.0);
    bytes.extend(node.0.to_le_bytes());
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    bytes
}

fn check(dir: &Path, file: &Path, bytes: &[u8], cluster: ClusterUuid, node: NodeId) -> Result<(), MetaError> {
    let (owner, owning) = read(file, bytes)?;
    if (owner, owning) != (cluster, node) {
        return Err(MetaError::WrongFolder {
            dir: dir.to_owned(),
            expected: format!("{node} of cluster {cluster}"),
            found: format!("{owning} of cluster {owner}"),
        });
    }
    Ok(())
}

fn read(file: &Path, bytes: &[u8]) -> Result<(ClusterUuid, NodeId), MetaError> {
    let wrong = |expected: String, found: String| MetaError::WrongFile { file: file.to_owned(), expected, found };
    let Ok(bytes) = <&[u8; BYTES]>::try_from(bytes) else {
        return Err(wrong(format!("{BYTES} bytes"), format!("{} bytes", bytes.len())));
    };
    let (said, crc) = bytes.split_at(BYTES - 4);
    if said[..8] != MAGIC[..] {
        return Err(wrong("the mark of a meta node".to_owned(), format!("{:02x?}", &said[..8])));
    }
    if crc32c::crc32c(said).to_le_bytes() != crc {
        return Err(wrong("a checksum that fits".to_owned(), "damaged bytes".to_owned()));
    }
    let version = u32::from_le_bytes(said[8..12].try_into().expect("the range has 4 bytes"));
    if version != STORAGE_VERSION {
        return Err(wrong(format!("storage version {STORAGE_VERSION}"), format!("storage version {version}")));
    }
    let owner = ClusterUuid(said[12..28].try_into().expect("the range has 16 bytes"));
    let owning = NodeId(u64::from_le_bytes(said[28..36].try_into().expect("the range has 8 bytes")));
    Ok((owner, owning))
}

fn write_whole(dir: &Path, file: &Path, bytes: &[u8]) -> io::Result<()> {
    let aside = dir.join("node.new");
    let mut out = File::create(&aside)?;
    out.write_all(bytes)?;
    out.sync_all()?;
    fs::rename(&aside, file)?;
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: ClusterUuid = ClusterUuid([7; 16]);

    #[test]
    fn a_folder_is_one_nodes_of_one_cluster_for_good() {
        let dir = tempfile::tempdir().unwrap();
        claim(dir.path(), CLUSTER, NodeId(1)).unwrap();
        claim(dir.path(), CLUSTER, NodeId(1)).unwrap();
        for (cluster, node) in [(CLUSTER, NodeId(2)), (ClusterUuid([8; 16]), NodeId(1))] {
            assert!(matches!(claim(dir.path(), cluster, node), Err(MetaError::WrongFolder { .. })));
        }
    }

    #[test]
    fn every_changed_bit_of_the_node_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        claim(dir.path(), CLUSTER, NodeId(1)).unwrap();
        let file = dir.path().join("node");
        let whole = fs::read(&file).unwrap();
        for bit in 0..whole.len() * 8 {
            let mut changed = whole.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            fs::write(&file, &changed).unwrap();
            assert!(matches!(claim(dir.path(), CLUSTER, NodeId(1)), Err(MetaError::WrongFile { .. })), "bit {bit}");
        }
        fs::write(&file, &whole[1..]).unwrap();
        assert!(matches!(claim(dir.path(), CLUSTER, NodeId(1)), Err(MetaError::WrongFile { .. })));
    }
}
