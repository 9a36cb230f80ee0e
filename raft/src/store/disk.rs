//! The rituals that make files and folders survive a power cut. Nothing else in this crate renames or syncs a file,
//! except the committer's sync of the log.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Makes the names in a folder durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Makes a folder and its missing parents, and their names durable.
pub(crate) fn create_dir(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent {
        create_dir(parent)?;
    }
    match fs::create_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        done => done?,
    }
    sync_dir(parent.unwrap_or_else(|| Path::new(".")))
}

/// Gives a file that is complete and synced its name. After this it is there whole, or not at all.
pub(crate) fn put_in_place(aside: &Path, place: &Path) -> io::Result<()> {
    fs::rename(aside, place)?;
    sync_dir(place.parent().unwrap_or_else(|| Path::new(".")))
}

/// Writes a small file: aside, sync, rename, sync the folder.
pub(crate) fn write_small(place: &Path, content: &[u8]) -> io::Result<()> {
    let aside = place.with_extension("tmp");
    let mut file = File::create(&aside)?;
    file.write_all(content)?;
    file.sync_all()?;
    put_in_place(&aside, place)
}
