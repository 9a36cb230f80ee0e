//! Values in: `put` from standard input, from files, from whole folders.

use super::{
    Extent, close, in_namespace,
    progress::Progress,
    tally::{Tally, of_row},
};
use crate::{
    cli::PutArgs,
    exit::{Failure, Format},
};
use quarry::{stderr, stdout::line};
use quarry_client::{Client, Key, Namespace, PutError, PutItem, PutMode};
use quarry_wire::{frame::header_bytes, limits::EXTENT_BYTES};
use serde_json::json;
use std::{
    collections::BTreeSet,
    ffi::{OsStr, OsString},
    fs,
    io::{self, Read},
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

/// Written in one call: so many keys, or the first that bring so many bytes.
const BATCH_KEYS: usize = 512;
const BATCH_BYTES: usize = 32 << 20;

/// A value to come.
#[derive(PartialEq, Eq, Debug)]
struct Source {
    key: Key,
    /// A file, or `-`.
    file: PathBuf,
}

pub(crate) async fn put(args: PutArgs, format: Format) -> Result<(), Failure> {
    let sources = sources(&args)?;
    let single = args.key.is_some();
    let mode = if args.replace { PutMode::Replace } else { PutMode::Create };
    let mut progress = Progress::new(&args.watch, format, sources.len());
    let mut tally = Tally::default();
    let mut connected: Option<(Client, Namespace)> = None;
    let mut rest = &sources[..];
    while !rest.is_empty() {
        let (batch, later) = read_batch(rest);
        let names = &rest[..rest.len() - later.len()];
        rest = later;
        let items: Vec<PutItem> = names
            .iter()
            .zip(&batch)
            .filter_map(|(source, bytes)| {
                let bytes = bytes.as_ref().ok()?.clone();
                Some(PutItem { key: source.key.clone(), bytes, mode })
            })
            .collect();
        let mut results = Vec::new().into_iter();
        if !items.is_empty() {
            // Only now, so that what cannot be read is told without a cluster.
            if connected.is_none() {
                connected = Some(in_namespace(&args.namespace, Extent::of(sources.len())).await?);
            }
            let (_, namespace) = connected.as_ref().expect("it was just connected");
            results = namespace.put_many(items).await.into_iter();
        }
        for (source, bytes) in names.iter().zip(batch) {
            let name = args.form.text(&source.key);
            let put = bytes.and_then(|bytes| {
                let result = results.next().expect("a result for each value that was read");
                Ok((result?, bytes.len()))
            });
            let row = match (&put, format) {
                (Ok((version, bytes)), Format::Json) => {
                    let about = json!({ "version": version.to_string(), "bytes": bytes });
                    Some(args.form.json(&source.key, about).to_string())
                }
                (Ok((version, _)), Format::Text) if single => Some(version.to_string()),
                (Ok((version, _)), Format::Text) => Some(format!("{version}  {name}")),
                // A single failure is told once, at the end.
                (Err(_), _) if single => None,
                (Err(failure), Format::Json) => Some(args.form.json(&source.key, of_row(failure)).to_string()),
                (Err(failure), Format::Text) => Some(format!("{name}: {failure}")),
            };
            if let Some(row) = row {
                line(row)?;
            }
            match put {
                Ok((_, bytes)) => {
                    tally.good();
                    progress.add(bytes as u64);
                }
                Err(failure) => tally.bad(name, failure),
            }
        }
    }
    progress.end();
    if let Some((client, _)) = connected {
        close(client).await;
    }
    tally.end()
}

/// What the command line names, folders opened; each key once.
fn sources(args: &PutArgs) -> Result<Vec<Source>, Failure> {
    if let Some(key) = &args.key {
        return Ok(vec![Source { key: args.form.read(key)?, file: args.file.clone() }]);
    }
    let prefix = args.prefix.as_deref().map_or(&b""[..], |prefix| prefix.as_bytes());
    let mut found = Vec::new();
    for given in &args.files {
        let (key, file) = split(given);
        match key {
            Some(key) => found.push((args.form.bytes(key)?, file.to_owned())),
            None if file == Path::new("-") => {
                return Err(Failure::usage("standard input has no name to make a key from").hint("KEY=- gives it one"));
            }
            None if file.is_dir() => walk(file, b"", &mut found)?,
            None => {
                let name = file.file_name().ok_or_else(|| {
                    Failure::usage(format!("{} has no name to make a key from", file.display()))
                        .hint("KEY=FILE gives it one")
                })?;
                found.push((name.as_bytes().to_vec(), file.to_owned()));
            }
        }
    }
    let mut sources = Vec::new();
    let (mut keys, mut takes_input) = (BTreeSet::new(), false);
    for (key, file) in found {
        let key = Key::new([prefix, &key].concat())
            .map_err(|wrong| Failure::usage(format!("{}: {wrong}", file.display())))?;
        if !keys.insert(key.as_bytes().to_vec()) {
            return Err(Failure::usage(format!("two values for the key {}", args.form.text(&key))));
        }
        if file == Path::new("-") && std::mem::replace(&mut takes_input, true) {
            return Err(Failure::usage("standard input can be one value only"));
        }
        sources.push(Source { key, file });
    }
    Ok(sources)
}

/// `KEY=FILE`, or a file alone.
fn split(given: &OsStr) -> (Option<&OsStr>, &Path) {
    match given.as_bytes().iter().position(|byte| *byte == b'=') {
        Some(at) => {
            let (key, file) = given.as_bytes().split_at(at);
            (Some(OsStr::from_bytes(key)), Path::new(OsStr::from_bytes(&file[1..])))
        }
        None => (None, Path::new(given)),
    }
}

/// All files below a folder, by the order of their names; the key is the path from the folder on. Links to folders are not followed; what is passed
/// over is told.
fn walk(folder: &Path, above: &[u8], found: &mut Vec<(Vec<u8>, PathBuf)>) -> Result<(), Failure> {
    let failed = |wrong: io::Error| Failure::of_file(folder, &wrong);
    let mut names: Vec<(OsString, bool)> = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        names.push((entry.file_name(), entry.file_type().map_err(failed)?.is_dir()));
    }
    names.sort();
    for (name, is_folder) in names {
        let path = folder.join(&name);
        let key = [above, name.as_bytes()].concat();
        if is_folder {
            walk(&path, &[&key[..], b"/"].concat(), found)?;
        } else if path.is_file() {
            found.push((key, path));
        } else {
            let why = if path.is_dir() { "a link to a folder" } else { "no file" };
            stderr::line(format_args!("quarry: {} is passed over: it is {why}", path.display()));
        }
    }
    Ok(())
}

/// The first values, as many as fit in one call, and the sources after them.
fn read_batch(sources: &[Source]) -> (Vec<Result<bytes::Bytes, Failure>>, &[Source]) {
    let (mut batch, mut length) = (Vec::new(), 0);
    for source in sources {
        if batch.len() == BATCH_KEYS || length >= BATCH_BYTES {
            break;
        }
        let read = read_value(&source.file, EXTENT_BYTES - header_bytes(source.key.as_bytes().len()) as u64);
        length += read.as_ref().map_or(0, Vec::len);
        batch.push(read.map(bytes::Bytes::from));
    }
    let later = &sources[batch.len()..];
    (batch, later)
}

/// What a file or, for `-`, standard input holds, if no more than `limit` bytes: more is refused before it is read.
fn read_value(file: &Path, limit: u64) -> Result<Vec<u8>, Failure> {
    let failed = |wrong: io::Error| Failure::of_file(file, &wrong);
    let source: Box<dyn Read> = if file == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        let opened = fs::File::open(file).map_err(failed)?;
        let about = opened.metadata().map_err(failed)?;
        if about.is_file() && about.len() > limit {
            return Err(PutError::TooLarge { limit, found: about.len() }.into());
        }
        Box::new(opened)
    };
    let mut bytes = Vec::new();
    source.take(limit + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > limit {
        let message =
            format!("a value under this key has at most {limit} bytes, {} has more: split it", file.display());
        return Err(Failure::error(message));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Code;
    use clap::Parser as _;

    fn planned(line: &[&OsStr]) -> Result<Vec<(String, PathBuf)>, Failure> {
        let start = ["quarry", "put", "-n", "ns", "--cluster", "c"].map(OsStr::new);
        let cli = crate::cli::Cli::try_parse_from(start.iter().chain(line)).unwrap();
        let Some(crate::cli::Command::Put(args)) = cli.command else { panic!("not put") };
        Ok(sources(&args)?.into_iter().map(|it| (args.form.text(&it.key), it.file)).collect())
    }

    #[test]
    fn keys_come_from_the_line_the_files_name_or_the_path_within_a_folder() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("tree/b")).unwrap();
        for name in ["tree/a.bin", "tree/b/c", "tree/b/a"] {
            fs::write(at(name), name).unwrap();
        }
        std::os::unix::fs::symlink(at("tree"), at("tree/b/round")).unwrap();
        let line = ["--files", "k=x=y", "/some/where.bin"].map(OsString::from);
        let tree = at("tree").into_os_string();
        let line: Vec<&OsStr> = line.iter().map(OsString::as_os_str).chain([tree.as_os_str()]).collect();
        let named =
            |prefix: &str| ["k", "where.bin", "a.bin", "b/a", "b/c"].map(|name| format!("{prefix}{name}")).to_vec();
        let found = planned(&line).unwrap();
        assert_eq!(found.iter().map(|(key, _)| key.clone()).collect::<Vec<_>>(), named(""));
        assert_eq!((&found[0].1, &found[3].1), (&PathBuf::from("x=y"), &at("tree/b/a")));
        let prefix = ["--prefix", "run-1/"].map(OsStr::new);
        let found = planned(&[&prefix[..], &line].concat()).unwrap();
        assert_eq!(found.into_iter().map(|(key, _)| key).collect::<Vec<_>>(), named("run-1/"));
    }

    #[test]
    fn two_values_for_one_key_or_from_standard_input_are_wrong_usage() {
        for line in
            [&["--files", "a/x", "b/x"][..], &["--files", "a=-", "b=-"], &["--files", "-"], &["--files", "none/.."]]
        {
            let line: Vec<&OsStr> = line.iter().map(OsStr::new).collect();
            assert_eq!(planned(&line).unwrap_err().code, Code::Usage, "{line:?}");
        }
    }
}
