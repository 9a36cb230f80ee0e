//! Values out: `get` to standard output or into files, `cat` one after the other.

use super::{
    Extent, close, in_namespace,
    progress::Progress,
    tally::{Tally, missing, of_row},
};
use crate::{
    cli::{CatArgs, GetArgs},
    exit::{Failure, Format},
};
use quarry::stdout;
use quarry_client::{Key, Namespace};
use serde_json::json;
use std::{
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

/// Keys asked for in one call at most, and the bytes that one call is meant to bring.
const BATCH_MAX: usize = 512;
const BATCH_BYTES: u64 = 16 << 20;

pub(crate) async fn get(args: GetArgs, format: Format) -> Result<(), Failure> {
    let keys = args.form.read_all(&args.keys)?;
    let Some(target) = &args.into else {
        let [key] = &keys[..] else {
            let hint = "quarry cat writes several values one after the other, -O DIR writes each into a file";
            return Err(Failure::usage("several values need a folder to go to").hint(hint));
        };
        let name = args.form.text(key);
        return to_stdout(&args.namespace, std::slice::from_ref(key), &[name], Progress::new(&args.watch, format, 1))
            .await;
    };
    let is_folder = keys.len() > 1 || target.is_dir() || target.as_os_str().as_bytes().ends_with(b"/");
    let paths: Vec<PathBuf> = if is_folder {
        keys.iter()
            .map(|key| inside(target, key).ok_or_else(|| not_a_path(&args.form.text(key))))
            .collect::<Result<_, _>>()?
    } else {
        vec![target.clone()]
    };
    let (client, namespace) = in_namespace(&args.namespace, Extent::of(keys.len())).await?;
    let mut progress = Progress::new(&args.watch, format, keys.len());
    let mut tally = Tally::default();
    let mut batches = Batches::new(&keys);
    while let Some((range, results)) = batches.next(&namespace).await {
        for ((key, path), result) in keys[range.clone()].iter().zip(&paths[range]).zip(results) {
            let name = args.form.text(key);
            let written = result.and_then(|value| value.ok_or_else(|| missing(&name))).and_then(|value| {
                write(path, &value.bytes, is_folder)?;
                Ok((value.version, value.bytes.len()))
            });
            let row = match (&written, format) {
                (Ok((version, bytes)), Format::Json) => {
                    let about =
                        json!({ "version": version.to_string(), "bytes": bytes, "file": path.to_string_lossy() });
                    Some(args.form.json(key, about).to_string())
                }
                (Err(failure), Format::Json) => Some(args.form.json(key, of_row(failure)).to_string()),
                (Err(failure), Format::Text) if keys.len() > 1 => Some(format!("{name}: {failure}")),
                (Ok(_) | Err(_), Format::Text) => None,
            };
            if let Some(row) = row {
                stdout::line(row)?;
            }
            match written {
                Ok((_, bytes)) => {
                    tally.good();
                    progress.add(bytes as u64);
                }
                Err(failure) => tally.bad(name, failure),
            }
        }
    }
    progress.end();
    close(client).await;
    tally.end()
}

pub(crate) async fn cat(args: CatArgs, format: Format) -> Result<(), Failure> {
    let keys = args.form.read_all(&args.keys)?;
    let names: Vec<String> = keys.iter().map(|key| args.form.text(key)).collect();
    let progress = Progress::new(&args.watch, format, keys.len());
    to_stdout(&args.namespace, &keys, &names, progress).await
}

/// The values one after the other, as they are. One that is missing or cannot be read leaves the others where they are.
async fn to_stdout(
    args: &crate::cli::InNamespace,
    keys: &[Key],
    names: &[String],
    mut progress: Progress,
) -> Result<(), Failure> {
    let (client, namespace) = in_namespace(args, Extent::of(keys.len())).await?;
    let mut tally = Tally::default();
    let mut batches = Batches::new(keys);
    'all: while let Some((range, results)) = batches.next(&namespace).await {
        for (name, result) in names[range].iter().zip(results) {
            match result.and_then(|value| value.ok_or_else(|| missing(name))) {
                Ok(value) => {
                    tally.good();
                    progress.add(value.bytes.len() as u64);
                    // Whoever went away has what it wanted.
                    if !stdout::part(&value.bytes)? {
                        break 'all;
                    }
                }
                Err(failure) => tally.bad(name.clone(), failure),
            }
        }
    }
    progress.end();
    close(client).await;
    tally.end()
}

/// Reads keys in order, many small ones or few large ones in a call.
struct Batches<'a> {
    keys: &'a [Key],
    at: usize,
    size: usize,
}

type Read = Result<Option<quarry_client::Value>, Failure>;

impl<'a> Batches<'a> {
    fn new(keys: &'a [Key]) -> Self {
        Self { keys, at: 0, size: 1 }
    }

    async fn next(&mut self, namespace: &Namespace) -> Option<(std::ops::Range<usize>, Vec<Read>)> {
        let range = self.at..self.keys.len().min(self.at + self.size);
        if range.is_empty() {
            return None;
        }
        self.at = range.end;
        let results = namespace.get_many(&self.keys[range.clone()]).await;
        let length = |it: &Result<Option<quarry_client::Value>, _>| {
            it.as_ref().ok().and_then(Option::as_ref).map_or(0, |value| value.bytes.len() as u64)
        };
        self.size = next_size(range.len(), results.iter().map(length).sum());
        Some((range, results.into_iter().map(|it| it.map_err(Failure::from)).collect()))
    }
}

/// How many keys the next call asks for, after one for `keys` keys brought `bytes` bytes: values that follow each other tend to be alike.
fn next_size(keys: usize, bytes: u64) -> usize {
    let each = (bytes / keys.max(1) as u64).max(1);
    let fit = usize::try_from(BATCH_BYTES / each).unwrap_or(usize::MAX);
    // Grown step by step, so that one small value before large ones does not ask for all of them at once.
    fit.clamp(1, (keys * 4).min(BATCH_MAX))
}

/// Where a key's value goes below `folder`; none if the key would lead out of it.
fn inside(folder: &Path, key: &Key) -> Option<PathBuf> {
    let bytes = key.as_bytes();
    let harmless = |part: &[u8]| !part.is_empty() && part != b"." && part != b".." && !part.contains(&0);
    bytes.split(|byte| *byte == b'/').all(harmless).then(|| folder.join(OsStr::from_bytes(bytes)))
}

fn not_a_path(key: &str) -> Failure {
    Failure::usage(format!("the key {key} names no file in a folder: its parts may not be empty, . or .."))
        .hint("get it alone, with -O FILE")
}

fn write(path: &Path, bytes: &[u8], is_folder: bool) -> Result<(), Failure> {
    let failed = |wrong: std::io::Error| Failure::of_file(path, &wrong);
    if is_folder && let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(failed)?;
    }
    fs::write(path, bytes).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_key_leads_out_of_the_folder() {
        let at = |key: &str| inside(Path::new("/d"), &Key::new(key).unwrap());
        assert_eq!(at("a/b.bin"), Some(PathBuf::from("/d/a/b.bin")));
        for key in ["../a", "a/../../b", "/etc/passwd", "a//b", ".", "a/.", "a/", "a\0b"] {
            assert_eq!(at(key), None, "{key:?}");
        }
    }

    #[test]
    fn calls_grow_with_small_values_and_shrink_with_large_ones() {
        assert_eq!(next_size(1, 4096), 4);
        assert_eq!(next_size(4, 4 * 4096), 16);
        assert_eq!(next_size(512, 512 * 4096), BATCH_MAX);
        assert_eq!(next_size(16, 16 << 24), 1);
        assert_eq!(next_size(4, 0), 16);
    }
}
