//! Everything that touches the disk: whose folder this is, and that one process has it.
//!
//! ```text
//! node  = magic "QRYD" (4) ‖ storage version (4) ‖ cluster UUID (16) ‖ node (8) ‖ CRC-32C of all before (4)
//! lock  = empty; held by an exclusive flock while a process uses the folder
//! ```
//! Files are written aside, fsynced, renamed, and their folder is fsynced: after a crash the old file or the new one is there, whole.

use crate::DataNodeError;
use quarry_wire::ids::{ClusterUuid, NodeId};
use rustix::fs::{FlockOperation, flock};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

/// Layout of what is stored here; a build refuses folders of a version that it does not know.
const STORAGE_VERSION: u32 = 1;
const MAGIC: [u8; 4] = *b"QRYD";
const NODE_BYTES: usize = 36;
/// How the file of the same name begins in a meta node's folder.
const META_MAGIC: &[u8] = b"QUARRYMN";

/// A data folder that is ours until this is dropped.
#[derive(Debug)]
pub(crate) struct DataDir {
    /// The lock goes with it.
    _lock: File,
}

impl DataDir {
    /// Opens the folder, or makes it. Blocks on the disk.
    ///
    /// # Errors
    /// [`DataNodeError::Locked`] if another process has it, [`DataNodeError::Foreign`] if it is another node's or cluster's,
    /// [`DataNodeError::NotADataNodes`], [`DataNodeError::Damaged`], [`DataNodeError::Disk`].
    pub(crate) fn open(folder: &Path, cluster: ClusterUuid, node: NodeId) -> Result<Self, DataNodeError> {
        make_folder(folder)?;
        let lock = lock(&folder.join("lock"))?;
        let path = folder.join("node");
        match read(&path)? {
            None => write_whole(folder, &path, &encode(cluster, node))?,
            Some(bytes) => {
                let (found_cluster, found_node) = decode(&path, &bytes)?;
                if (found_cluster, found_node) != (cluster, node) {
                    return Err(DataNodeError::Foreign { path, node, cluster, found_node, found_cluster });
                }
            }
        }
        Ok(Self { _lock: lock })
    }
}

fn encode(cluster: ClusterUuid, node: NodeId) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(NODE_BYTES);
    bytes.extend(MAGIC);
    bytes.extend(STORAGE_VERSION.to_le_bytes());
    bytes.extend(cluster.0);
    bytes.extend(node.0.to_le_bytes());
    let crc = crc32c::crc32c(&bytes);
    bytes.extend(crc.to_le_bytes());
    bytes
}

fn decode(path: &Path, bytes: &[u8]) -> Result<(ClusterUuid, NodeId), DataNodeError> {
    let damaged = |expected: String, found: String| DataNodeError::Damaged { path: path.to_owned(), expected, found };
    // Before anything else, so that nobody is told to empty the folder of something else.
    let begins = &bytes[..MAGIC.len().min(bytes.len())];
    if !MAGIC.starts_with(begins) {
        let found = if bytes.starts_with(META_MAGIC) {
            "a meta node's folder".to_owned()
        } else {
            format!("something else's (it begins with {begins:02x?}, not with \"QRYD\")")
        };
        return Err(DataNodeError::NotADataNodes { path: path.to_owned(), found });
    }
    let whole: &[u8; NODE_BYTES] =
        bytes.try_into().map_err(|_| damaged(format!("{NODE_BYTES} bytes"), format!("{} bytes", bytes.len())))?;
    let (body, crc) = whole.split_at(NODE_BYTES - 4);
    if crc != crc32c::crc32c(body).to_le_bytes() {
        return Err(damaged("a matching CRC-32C".to_owned(), "another".to_owned()));
    }
    let version = u32::from_le_bytes(body[4..8].try_into().expect("four bytes"));
    if version != STORAGE_VERSION {
        return Err(damaged(format!("storage version {STORAGE_VERSION}"), format!("version {version}")));
    }
    let cluster = ClusterUuid(body[8..24].try_into().expect("sixteen bytes"));
    let node = NodeId(u64::from_le_bytes(body[24..32].try_into().expect("eight bytes")));
    Ok((cluster, node))
}

#[expect(clippy::disallowed_methods, reason = "this module owns the disk")]
fn make_folder(folder: &Path) -> Result<(), DataNodeError> {
    fs::create_dir_all(folder).map_err(failed("cannot make the folder", folder))
}

#[expect(clippy::disallowed_methods, reason = "this module owns the disk")]
fn lock(path: &Path) -> Result<File, DataNodeError> {
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .map_err(failed("cannot open the lock file", path))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(DataNodeError::Locked { path: path.to_owned() }),
        Err(error) => Err(failed("cannot lock", path)(error.into())),
    }
}

#[expect(clippy::disallowed_methods, reason = "this module owns the disk")]
fn read(path: &Path) -> Result<Option<Vec<u8>>, DataNodeError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("cannot read", path)(error)),
    }
}

/// Writes aside, fsyncs, renames, fsyncs the folder.
#[expect(clippy::disallowed_methods, reason = "this module owns the disk")]
fn write_whole(folder: &Path, path: &Path, bytes: &[u8]) -> Result<(), DataNodeError> {
    let aside = path.with_extension("aside");
    let mut file = File::create(&aside).map_err(failed("cannot create", &aside))?;
    file.write_all(bytes).map_err(failed("cannot write", &aside))?;
    file.sync_all().map_err(failed("cannot fsync", &aside))?;
    drop(file);
    fs::rename(&aside, path).map_err(failed("cannot rename to", path))?;
    let folder_file = File::open(folder).map_err(failed("cannot open", folder))?;
    folder_file.sync_all().map_err(failed("cannot fsync", folder))
}

fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DataNodeError {
    let path: PathBuf = path.to_owned();
    move |source| DataNodeError::Disk { doing, path, source }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests damage files")]
mod tests {
    use super::*;

    const CLUSTER: ClusterUuid = ClusterUuid([7; 16]);
    const NODE: NodeId = NodeId(11);

    #[test]
    fn a_folder_can_be_opened_again_by_its_own_node_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er");
        drop(DataDir::open(&path, CLUSTER, NODE).unwrap());
        drop(DataDir::open(&path, CLUSTER, NODE).unwrap());
        assert!(matches!(
            DataDir::open(&path, CLUSTER, NodeId(12)),
            Err(DataNodeError::Foreign { found_node: NODE, node: NodeId(12), .. })
        ));
        assert!(matches!(
            DataDir::open(&path, ClusterUuid([8; 16]), NODE),
            Err(DataNodeError::Foreign { found_cluster: CLUSTER, .. })
        ));
        assert!(!path.join("node.aside").exists());
    }

    #[test]
    fn a_folder_in_use_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let held = DataDir::open(folder.path(), CLUSTER, NODE).unwrap();
        assert!(matches!(DataDir::open(folder.path(), CLUSTER, NODE), Err(DataNodeError::Locked { .. })));
        drop(held);
        assert!(DataDir::open(folder.path(), CLUSTER, NODE).is_ok());
    }

    #[test]
    fn every_flipped_bit_and_every_truncation_of_the_node_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        drop(DataDir::open(folder.path(), CLUSTER, NODE).unwrap());
        let path = folder.path().join("node");
        let good = fs::read(&path).unwrap();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let refused = decode(&path, &bad).unwrap_err();
            match refused {
                DataNodeError::NotADataNodes { .. } if bit / 8 < MAGIC.len() => {}
                DataNodeError::Damaged { .. } if bit / 8 >= MAGIC.len() => {}
                other => panic!("bit {bit}: {other}"),
            }
        }
        for end in 0..good.len() {
            assert!(matches!(decode(&path, &good[..end]), Err(DataNodeError::Damaged { .. })));
        }
        fs::write(&path, &good[..3]).unwrap();
        assert!(matches!(DataDir::open(folder.path(), CLUSTER, NODE), Err(DataNodeError::Damaged { .. })));
    }

    #[test]
    fn the_folder_of_a_meta_node_is_called_by_its_name_and_not_to_be_emptied() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node");
        for (bytes, found) in
            [(&b"QUARRYMN and what follows, 40 bytes long"[..], "a meta node's folder"), (b"x", "[78]")]
        {
            fs::write(&path, bytes).unwrap();
            let refused = DataDir::open(folder.path(), CLUSTER, NODE).unwrap_err();
            let said = refused.to_string();
            assert!(matches!(refused, DataNodeError::NotADataNodes { .. }), "{said}");
            assert!(said.contains(found) && !said.contains("empty"), "{said}");
            assert_eq!(fs::read(&path).unwrap(), bytes, "it is left as it is");
        }
    }
}
