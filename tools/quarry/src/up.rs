//! `quarry up`: a cluster on this host until Ctrl-C.

use crate::{
    cli::UpArgs,
    exit::{Failure, Format},
    serve::End,
};
use quarry::{
    local::{LocalCluster, LocalSpec, Member},
    stderr,
    stdout::line,
};
use serde_json::json;
use std::{fs, path::Path, time::Duration};

/// Meta nodes and data nodes of a new cluster.
const METAS: u32 = 3;
const DATA_NODES: u32 = 2;
/// How long a cluster may take to be ready.
const READY: Duration = Duration::from_secs(60);
/// How often the processes are looked after.
const LOOK: Duration = Duration::from_millis(500);

/// Refuses options that ask for another cluster than the folder holds.
fn agrees(args: &UpArgs, cluster: &LocalCluster) -> Result<(), Failure> {
    let dir = args.dir.display();
    let count = |wanted: fn(&Member) -> bool| cluster.members().iter().filter(|member| wanted(member)).count();
    let metas = count(|member| matches!(member, Member::Meta(_)));
    let data_nodes = count(|member| matches!(member, Member::Data(_)));
    for (option, asked, found) in [("--metas", args.metas, metas), ("--data-nodes", args.data_nodes, data_nodes)] {
        if let Some(asked) = asked.filter(|asked| usize::try_from(*asked) != Ok(found)) {
            let message = format!("{option} {asked} is for a new cluster: {dir} holds one with {found}");
            return Err(Failure::usage(message).hint("leave the option out, or name another --dir"));
        }
    }
    if args.plaintext && cluster.trust().identity().is_some() {
        let message = format!("--plaintext is for a new cluster: {dir} holds one with TLS");
        return Err(Failure::usage(message).hint("leave the option out, or name another --dir"));
    }
    Ok(())
}

pub(crate) async fn up(args: &UpArgs, format: Format) -> Result<(), Failure> {
    let mut end = End::new()?;
    let binary = std::env::current_exe().map_err(Failure::error)?;
    let spec = LocalSpec {
        metas: args.metas.unwrap_or(METAS),
        data_nodes: args.data_nodes.unwrap_or(DATA_NODES),
        region_bytes: vec![args.region],
        plaintext: args.plaintext,
        ..LocalSpec::new(binary)
    };
    let mut cluster = if LocalCluster::exists(&args.dir) {
        let cluster = LocalCluster::open(&args.dir, spec)?;
        agrees(args, &cluster)?;
        cluster
    } else {
        LocalCluster::create(&args.dir, spec)?
    };
    let started = tokio::select! {
        started = cluster.start(READY) => Some(started),
        () = end.wait() => None,
    };
    match started {
        Some(started) => started?,
        // The processes end with `cluster`.
        None => return Ok(()),
    }
    let file = cluster.cluster_file();
    let dir = cluster.dir().display();
    if cluster.trust().identity().is_some() {
        stderr::line(format_args!(
            "warning: development credentials: the root key and all credentials of this cluster lie in {dir}; whoever reads it may do everything"
        ));
    } else {
        stderr::line("warning: TLS is off: whoever reaches the ports of this cluster may do everything");
    }
    for member in cluster.forgotten() {
        stderr::line(format_args!(
            "{member} does not run: the cluster has forgotten it, its log is {}",
            cluster.log_file(*member).display()
        ));
    }
    match format {
        Format::Text => say(&cluster, &file).await?,
        Format::Json => say_json(&cluster, &file).await?,
    }
    let ready = args.ready_file.as_deref().map(|path| ReadyFile::write(path, &file)).transpose()?;
    let mut look = tokio::time::interval(LOOK);
    loop {
        tokio::select! {
            () = end.wait() => break,
            _ = look.tick() => {
                for (member, status) in cluster.ended()? {
                    stderr::line(format_args!(
                        "{member} ended ({status}); its log is {}",
                        cluster.log_file(member).display()
                    ));
                }
            }
        }
    }
    drop(ready);
    if format == Format::Text {
        line("stopping")?;
    }
    Ok(cluster.stop().await?)
}

async fn say(cluster: &LocalCluster, file: &Path) -> Result<(), Failure> {
    for (member, report) in cluster.status().await {
        let pid = cluster.pid(member).unwrap_or_default();
        let admin = report.admin_address().unwrap_or_default();
        line(format_args!(
            "{member:<10} {:<22} admin {admin:<22} pid {pid:<8} log {}",
            cluster.address(member),
            cluster.log_file(member).display()
        ))?;
    }
    line("\nThe cluster is ready. In another terminal:\n")?;
    line(format_args!("  export QUARRY_CLUSTER={} QUARRY_NAMESPACE=kv", file.display()))?;
    line(format_args!("  quarry namespace create kv --copies {}", cluster.data_nodes().len().min(2)))?;
    line("  echo hello | quarry put greeting && quarry get greeting\n")?;
    line("Ctrl-C stops it.")?;
    Ok(())
}

/// One document, once: a cluster that is ready.
async fn say_json(cluster: &LocalCluster, file: &Path) -> Result<(), Failure> {
    let mut processes = Vec::new();
    for (member, report) in cluster.status().await {
        processes.push(json!({
            "name": member.to_string(),
            "address": cluster.address(member),
            "admin_address": report.admin_address(),
            "pid": cluster.pid(member),
            "log": cluster.log_file(member),
        }));
    }
    Ok(line(json!({ "cluster": file, "processes": processes }))?)
}

/// A file that exists while the cluster is ready.
struct ReadyFile<'a>(&'a Path);

impl<'a> ReadyFile<'a> {
    fn write(path: &'a Path, cluster_file: &Path) -> Result<Self, Failure> {
        // Written aside and renamed, so that whoever waits for it finds it whole.
        let aside = path.with_added_extension("new");
        let written = fs::write(&aside, format!("{}\n", cluster_file.display())).and_then(|()| fs::rename(aside, path));
        written.map_err(|wrong| Failure::of_file(path, &wrong))?;
        Ok(Self(path))
    }
}

impl Drop for ReadyFile<'_> {
    fn drop(&mut self) {
        // It may have been removed by whoever waited for it.
        let _ = fs::remove_file(self.0);
    }
}
