//! The build id: a hash over every source that ends up in the binary, so that a test can tell a stale daemon from the one just built.

use std::{
    env, fs,
    hash::{DefaultHasher, Hasher},
    path::{Path, PathBuf},
};

/// Folders and files of the workspace whose contents decide what the binary does.
const SOURCES: [&str; 9] =
    ["Cargo.toml", "Cargo.lock", "wire", "fabric", "raft", "meta", "datanode", "client", "tools/quarry"];

/// Folders below them that do not.
const LEFT_OUT: [&str; 4] = ["target", "tests", "examples", "benches"];

fn main() {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let root = here.ancestors().nth(2).expect("this package lies two folders below the workspace");
    let mut hash = DefaultHasher::new();
    for source in SOURCES {
        add(&mut hash, root, &root.join(source));
    }
    println!("cargo::rustc-env=QUARRY_BUILD_ID={:016x}", hash.finish());
}

/// Adds the name and contents of `path`, and of all that lies below it, in a fixed order.
fn add(hash: &mut DefaultHasher, root: &Path, path: &Path) {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if name.starts_with('.') || LEFT_OUT.contains(&&*name) {
        return;
    }
    if path.is_dir() {
        let mut below: Vec<PathBuf> =
            fs::read_dir(path).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect();
        below.sort();
        for path in below {
            add(hash, root, &path);
        }
    } else if let Ok(contents) = fs::read(path) {
        // File by file: a whole folder would have the tests in it. A new file comes with a line in one that was there.
        println!("cargo::rerun-if-changed={}", path.display());
        hash.write(path.strip_prefix(root).unwrap_or(path).to_string_lossy().as_bytes());
        hash.write_usize(contents.len());
        hash.write(&contents);
    }
}
