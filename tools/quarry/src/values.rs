//! The client commands: namespaces and single values.

use crate::{
    cli::{ClassArg, Connect, Format, GetArgs, InNamespace, NamespaceCommand, PutArgs, RmArgs},
    exit::{Code, Failure},
    output::table,
};
use quarry::stdout::{self, line};
use quarry_client::{Class, Client, Cluster, Key, Namespace, NamespaceInfo, NamespaceSpec, Options, PutError, PutMode};
use quarry_wire::{frame::header_bytes, limits::EXTENT_BYTES};
use serde_json::{Value, json};
use std::{
    fs,
    io::{self, Read},
    path::Path,
};

/// Connects to the cluster that a file or a URL names.
pub(crate) async fn connect(args: &Connect) -> Result<Client, Failure> {
    let cluster = if args.cluster.starts_with("quarry://") {
        Cluster::parse(&args.cluster)
    } else {
        Cluster::from_file(&args.cluster)
    }?;
    Ok(Client::connect(cluster, Options { timeout: args.timeout, ..Options::default() }).await?)
}

async fn in_namespace(args: &InNamespace) -> Result<(Client, Namespace), Failure> {
    let client = connect(&args.connect).await?;
    let namespace = client.namespace(&args.namespace).await?;
    Ok((client, namespace))
}

/// Closes the client; what it did is done, so that a slow goodbye is no failure.
async fn close(client: Client) {
    if let Err(wrong) = client.close().await {
        eprintln!("quarry: {wrong}");
    }
}

pub(crate) async fn namespace(command: NamespaceCommand) -> Result<(), Failure> {
    match command {
        NamespaceCommand::Create { name, class, copies, least, output, connect: to } => {
            let client = connect(&to).await?;
            let class = match class {
                ClassArg::Cache => Class::Cache,
                ClassArg::Durable => Class::Durable,
            };
            let small = |number: u32| u8::try_from(number).expect("the parser allows 1 to 3");
            let spec = NamespaceSpec { name, class, copies: small(copies), least: least.map(small) };
            let made = client.create_namespace(spec).await?;
            match output {
                Format::Json => line(of_namespace(made.info()))?,
                Format::Text => line(format_args!("made {} {:?}", made.info().id, made.info().name))?,
            }
            close(client).await;
        }
        NamespaceCommand::List { output, connect: to } => {
            let client = connect(&to).await?;
            let all = client.list_namespaces().await?;
            match output {
                Format::Json => line(Value::from_iter(all.iter().map(of_namespace)))?,
                Format::Text => {
                    let mut shown = table(&["id", "name", "class", "copies", "least"]);
                    for it in &all {
                        let class = format!("{:?}", it.class).to_lowercase();
                        shown.add_row(vec![
                            it.id.to_string(),
                            it.name.clone(),
                            class,
                            it.copies.to_string(),
                            it.least.to_string(),
                        ]);
                    }
                    line(&shown)?;
                }
            }
            close(client).await;
        }
    }
    Ok(())
}

fn of_namespace(it: &NamespaceInfo) -> Value {
    let class = format!("{:?}", it.class).to_lowercase();
    json!({ "id": it.id.0, "name": it.name, "class": class, "copies": it.copies, "least": it.least })
}

/// What a file or, for `-`, standard input holds, if no more than `limit` bytes: more is refused before it is read.
fn read_value(file: &Path, limit: u64) -> Result<Vec<u8>, Failure> {
    let failed = |wrong: io::Error| Failure::error(format!("{}: {wrong}", file.display()));
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

pub(crate) async fn put(args: PutArgs) -> Result<(), Failure> {
    let key = Key::new(&args.key).map_err(PutError::from)?;
    let bytes = read_value(&args.file, EXTENT_BYTES - header_bytes(key.as_bytes().len()) as u64)?;
    let (client, namespace) = in_namespace(&args.namespace).await?;
    let length = bytes.len();
    let mode = if args.replace { PutMode::Replace } else { PutMode::Create };
    let put = namespace.put_with(&args.key, bytes, mode).await;
    close(client).await;
    let version = put?;
    match args.output {
        Format::Json => line(json!({ "key": args.key, "version": version.to_string(), "bytes": length }))?,
        Format::Text => line(version)?,
    }
    Ok(())
}

pub(crate) async fn get(args: GetArgs) -> Result<(), Failure> {
    let (client, namespace) = in_namespace(&args.namespace).await?;
    let got = namespace.get(&args.key).await;
    close(client).await;
    let Some(value) = got? else {
        let message = format!("there is no key {:?} in namespace {:?}", args.key, args.namespace.namespace);
        return Err(Failure::new(Code::NotFound, message));
    };
    match &args.output {
        Some(path) => {
            fs::write(path, &value.bytes).map_err(|wrong| Failure::error(format!("{}: {wrong}", path.display())))
        }
        None => Ok(stdout::bytes(&value.bytes)?),
    }
}

pub(crate) async fn rm(args: RmArgs) -> Result<(), Failure> {
    let keys: Vec<Key> = args.keys.iter().map(Key::new).collect::<Result<_, _>>().map_err(Failure::error)?;
    let (client, namespace) = in_namespace(&args.namespace).await?;
    let results = namespace.delete_many(&keys).await;
    close(client).await;
    let mut first = None;
    let mut rows = Vec::new();
    for (key, result) in args.keys.into_iter().zip(results) {
        match result {
            Ok(Some(version)) => rows.push(json!({ "key": key, "deleted": version.to_string() })),
            Ok(None) => {
                rows.push(json!({ "key": key, "deleted": null }));
                let message = format!("there is no key {key:?}");
                first.get_or_insert_with(|| Failure::new(Code::NotFound, message));
            }
            Err(wrong) => {
                rows.push(json!({ "key": key, "error": wrong.to_string() }));
                // An error outweighs a key that was not there.
                if first.as_ref().is_none_or(|first: &Failure| first.code == Code::NotFound) {
                    first = Some(wrong.into());
                }
            }
        }
    }
    match args.output {
        Format::Json => line(Value::from(rows))?,
        Format::Text => {
            for row in rows {
                let key = row["key"].as_str().unwrap_or_default();
                match (row["deleted"].as_str(), row["error"].as_str()) {
                    (Some(version), _) => line(format_args!("{key}: deleted {version}"))?,
                    (None, Some(wrong)) => line(format_args!("{key}: {wrong}"))?,
                    (None, None) => line(format_args!("{key}: not found"))?,
                }
            }
        }
    }
    first.map_or(Ok(()), Err)
}
