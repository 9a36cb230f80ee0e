//! What is there, without reading values: `stat`, `ls`, `exists`.

use super::{
    Extent, close, in_namespace,
    tally::{Tally, missing, of_row},
};
use crate::{
    cli::{ExistsArgs, KeyForm, ListArgs, StatArgs},
    exit::{Code, Failure, Format},
};
use quarry::stdout;
use quarry_client::{Key, Listed, Stat};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Keys asked for in one call.
const PAGE: usize = 1000;

pub(crate) async fn stat(args: StatArgs, format: Format) -> Result<(), Failure> {
    let keys = args.form.read_all(&args.keys)?;
    let (client, namespace) = in_namespace(&args.namespace, Extent::of(keys.len().div_ceil(PAGE))).await?;
    let mut tally = Tally::default();
    'all: for keys in keys.chunks(PAGE) {
        let results = namespace.stat_many(keys).await;
        for (key, result) in keys.iter().zip(results) {
            let name = args.form.text(key);
            let result = result.map_err(Failure::from).and_then(|stat| stat.ok_or_else(|| missing(&name)));
            let shown = match (&result, format) {
                (Ok(stat), Format::Json) => args.form.json(key, of_stat(stat)).to_string(),
                (Ok(stat), Format::Text) => text_of_stat(&name, stat),
                (Err(failure), Format::Json) => args.form.json(key, of_row(failure)).to_string(),
                (Err(failure), Format::Text) => format!("{name}: {failure}"),
            };
            match result {
                Ok(_) => tally.good(),
                Err(failure) => tally.bad(name, failure),
            }
            if !stdout::part(format!("{shown}\n").as_bytes())? {
                break 'all;
            }
        }
    }
    close(client).await;
    tally.end()
}

fn of_stat(stat: &Stat) -> Value {
    let copy = |it: &quarry_client::CopyStat| {
        json!({
            "node": it.node.0,
            "region": it.region,
            "incarnation": it.incarnation.to_string(),
            "offset": it.offset,
        })
    };
    json!({
        "version": stat.version.to_string(),
        "bytes": stat.payload_bytes,
        "crc32c": format!("{:08x}", stat.payload_crc),
        "copies": stat.copies.iter().map(copy).collect::<Value>(),
    })
}

fn text_of_stat(name: &str, stat: &Stat) -> String {
    let Stat { version, payload_bytes, payload_crc, copies } = stat;
    let mut text = format!("{name}\n  version  {version}\n  bytes    {payload_bytes}\n  crc32c   {payload_crc:08x}");
    for it in copies {
        let (node, region, life, offset) = (it.node, it.region, it.incarnation, it.offset);
        write!(text, "\n  copy     {node}, region {region} (incarnation {life}), at byte {offset}")
            .expect("a string takes everything");
    }
    text
}

pub(crate) async fn ls(args: ListArgs, format: Format) -> Result<(), Failure> {
    let prefix = args.prefix.as_deref().map_or(Ok(Vec::new()), |prefix| args.form.bytes(prefix))?;
    let mut after = args.after.as_deref().map(|key| args.form.read(key)).transpose()?;
    let mut left = args.limit.unwrap_or(usize::MAX);
    let (client, namespace) = in_namespace(&args.namespace, Extent::Series).await?;
    while left > 0 {
        let page = namespace.list(&prefix, after.as_ref(), left.min(PAGE)).await?;
        left -= page.entries.len().min(left);
        let mut text = String::new();
        for entry in &page.entries {
            text.push_str(&row(&args, entry, format));
            text.push('\n');
        }
        // Whoever went away has seen enough.
        if !stdout::part(text.as_bytes())? {
            break;
        }
        after = page.after;
        if after.is_none() {
            break;
        }
    }
    close(client).await;
    Ok(())
}

fn row(args: &ListArgs, entry: &Listed, format: Format) -> String {
    let Listed { key, version, payload_bytes, payload_crc, copies } = entry;
    match format {
        Format::Json => args
            .form
            .json(
                key,
                json!({
                    "version": version.to_string(),
                    "bytes": payload_bytes,
                    "crc32c": format!("{payload_crc:08x}"),
                    "copies": copies,
                }),
            )
            .to_string(),
        Format::Text if args.long => {
            format!("{payload_bytes:>10}  {payload_crc:08x}  {copies}  {version}  {}", args.form.text(key))
        }
        Format::Text => args.form.text(key),
    }
}

pub(crate) async fn exists(args: ExistsArgs, format: Format) -> Result<(), Failure> {
    let keys = args.form.read_all(&args.keys)?;
    let (client, namespace) = in_namespace(&args.namespace, Extent::One).await?;
    let run = namespace.exists_many(&keys).await;
    close(client).await;
    let run = run?;
    let (of, next) = (keys.len(), keys.get(run));
    stdout::line(match format {
        Format::Json => {
            json!({ "run": run, "of": of, "first_missing": next.map(|key| named(&args.form, key)) }).to_string()
        }
        Format::Text => run.to_string(),
    })?;
    match next {
        None => Ok(()),
        Some(key) => Err(Failure::new(
            Code::NotFound,
            format!("there is no key {}, number {} of {of}", args.form.text(key), run + 1),
        )),
    }
}

fn named(form: &KeyForm, key: &Key) -> Value {
    form.json(key, json!({}))
}
