//! The client commands: namespaces and values.

mod keys;
mod look;
mod progress;
mod read;
mod tally;
mod write;

pub(crate) use look::{exists, ls, stat};
pub(crate) use read::{cat, get};
pub(crate) use write::put;

use crate::{
    cli::{ClassArg, Connect, InNamespace, NamespaceCommand, RmArgs},
    exit::{Failure, Format},
    output::table,
};
use quarry::{named::cluster, stderr, stdout::line};
use quarry_client::{Class, Client, Namespace, NamespaceInfo, NamespaceSpec, Options};
use serde_json::{Value, json};
use std::time::Duration;
use tally::{Tally, missing, of_row};
use tokio::time::Instant;

/// Whether a command is one operation, whose deadline it has as a whole, or a series of them, each with a deadline of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Extent {
    One,
    Series,
}

impl Extent {
    /// Of a command that works on so many keys or files.
    const fn of(count: usize) -> Self {
        if count > 1 { Self::Series } else { Self::One }
    }
}

/// Connects to the cluster that a file or a URL names.
pub(crate) async fn connect(args: &Connect, extent: Extent) -> Result<Client, Failure> {
    let cluster = cluster(&args.cluster, args.credentials.as_deref())?;
    Ok(Client::connect(cluster, options(args.timeout, extent, Instant::now())).await?)
}

fn options(timeout: Duration, extent: Extent, now: Instant) -> Options {
    let until = (extent == Extent::One).then(|| now + timeout);
    Options { timeout, until, ..Options::default() }
}

async fn in_namespace(args: &InNamespace, extent: Extent) -> Result<(Client, Namespace), Failure> {
    let client = connect(&args.connect, extent).await?;
    let namespace = client.namespace(&args.namespace).await?;
    Ok((client, namespace))
}

/// Closes the client; what it did is done, so that a slow goodbye is no failure.
async fn close(client: Client) {
    if let Err(wrong) = client.close().await {
        stderr::line(format_args!("quarry: {wrong}"));
    }
}

pub(crate) async fn namespace(command: NamespaceCommand, format: Format) -> Result<(), Failure> {
    match command {
        NamespaceCommand::Create { name, class, copies, least, quota, connect: to } => {
            let client = connect(&to, Extent::One).await?;
            let class = match class {
                ClassArg::Cache => Class::Cache,
                ClassArg::Durable => Class::Durable,
            };
            let small = |number: u32| u8::try_from(number).expect("the parser allows 1 to 3");
            let least = least.map(small);
            let spec = NamespaceSpec { name, class, copies: small(copies), least, quota_bytes: quota };
            let made = client.create_namespace(spec).await?;
            match format {
                Format::Json => line(of_namespace(made.info()))?,
                Format::Text => line(format_args!("made {} {:?}", made.info().id, made.info().name))?,
            }
            close(client).await;
        }
        NamespaceCommand::List { connect: to } => {
            let client = connect(&to, Extent::One).await?;
            let all = client.list_namespaces().await?;
            match format {
                Format::Json => line(Value::from_iter(all.iter().map(of_namespace)))?,
                Format::Text => {
                    let mut shown = table(&["id", "name", "class", "copies", "least", "quota"]);
                    for it in &all {
                        let class = format!("{:?}", it.class).to_lowercase();
                        shown.add_row(vec![
                            it.id.to_string(),
                            it.name.clone(),
                            class,
                            it.copies.to_string(),
                            it.least.to_string(),
                            it.quota_bytes.map_or_else(|| "none".to_owned(), |bytes| format!("{bytes} B")),
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
    json!({ "id": it.id.0, "name": it.name, "class": class, "copies": it.copies, "least": it.least,
        "quota_bytes": it.quota_bytes })
}

pub(crate) async fn rm(args: RmArgs, format: Format) -> Result<(), Failure> {
    let keys = args.form.read_all(&args.keys)?;
    let (client, namespace) = in_namespace(&args.namespace, Extent::One).await?;
    let results = namespace.delete_many(&keys).await;
    close(client).await;
    let mut tally = Tally::default();
    for (key, result) in keys.iter().zip(results) {
        let name = args.form.text(key);
        let removed = result.map_err(Failure::from).and_then(|version| version.ok_or_else(|| missing(&name)));
        line(match (&removed, format) {
            (Ok(version), Format::Json) => args.form.json(key, json!({ "deleted": version.to_string() })).to_string(),
            (Ok(version), Format::Text) => format!("{name}: deleted {version}"),
            (Err(failure), Format::Json) => args.form.json(key, of_row(failure)).to_string(),
            (Err(failure), Format::Text) => format!("{name}: {failure}"),
        })?;
        match removed {
            Ok(_) => tally.good(),
            Err(failure) => tally.bad(name, failure),
        }
    }
    tally.end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_is_one_operation_has_one_deadline_for_all_that_it_asks() {
        let (now, timeout) = (Instant::now(), Duration::from_secs(3));
        assert_eq!(options(timeout, Extent::of(1), now).until, Some(now + timeout));
        // Of a thousand files each has its own.
        assert_eq!(options(timeout, Extent::of(1_000), now).until, None);
        assert_eq!(options(timeout, Extent::Series, now).timeout, timeout);
    }
}
