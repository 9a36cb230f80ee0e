//! `cargo xtask peers`: Quarry beside other stores on this machine, one after the other, in one table.
//!
//! Runs the benchmark scripts of Mooncake, Redis and NIXL that lie in a folder, each in a Python environment of its own with pinned packages, and
//! `quarry bench calls` in a release build. A script is called as `python SCRIPT --runs N --out FILE` and leaves `{"median": [{op, size, per_call,
//! gib_s, p50_us}, ..]}` there. Nothing else runs at the same time; what the machine does otherwise is for whoever starts it to see to.
//!
//! etcd is compared by `quarry bench meta --peers`, which starts it; it comes from Debian, and its table stands below.

use crate::execute::{ExecuteError, execute};
use clap::Args;
use serde::Deserialize;
use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Another store: its script, what its environment needs, and which of its operations is which of ours.
struct Peer {
    name: &'static str,
    script: &'static str,
    arguments: &'static [&'static str],
    /// Each with its options to pip: dependencies are named where the package's own cannot be had.
    packages: &'static [&'static [&'static str]],
    /// (our call, batch of more than one, its operation).
    operations: &'static [(&'static str, bool, &'static str)],
}

const PEERS: [Peer; 3] = [
    Peer {
        name: "mooncake",
        script: "bench_mooncake.py",
        arguments: &[],
        packages: &[&["mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"]],
        operations: &[
            ("put", false, "put"),
            ("get", false, "get"),
            ("put", true, "put_batch"),
            ("get", true, "get_batch"),
        ],
    },
    Peer {
        name: "redis",
        script: "bench_redis.py",
        arguments: &[],
        packages: &[&["redis", "hiredis", "numpy"]],
        operations: &[("put", false, "SET"), ("get", false, "GET"), ("put", true, "SET-pipe"), ("get", true, "MGET")],
    },
    Peer {
        name: "nixl",
        script: "bench_nixl.py",
        arguments: &["--tls", "tcp"],
        packages: &[&["--no-deps", "nixl-cu12==1.5.1"], &["numpy", "pyyaml"]],
        operations: &[("put", false, "WRITE"), ("get", false, "READ"), ("put", true, "WRITE"), ("get", true, "READ")],
    },
];

#[derive(Args, Debug)]
pub(crate) struct PeersArgs {
    /// Folder with the scripts bench_mooncake.py, bench_redis.py and bench_nixl.py; etcd needs none.
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// Only these: quarry, mooncake, redis, nixl, etcd. What the others left behind in an earlier run is shown with it.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Runs of each script; the median counts.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=20))]
    runs: u32,
    /// Only make what is needed; measure nothing.
    #[arg(long)]
    prepare: bool,
}

/// Why there is no table.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeersError {
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: {source}", path.display())]
    Figures { path: PathBuf, source: serde_json::Error },
    #[error("there is no {} in {}: name the folder of the peers' scripts", script, dir.display())]
    NoScript { script: &'static str, dir: PathBuf },
    #[error("{script} is needed: name the folder of the peers' scripts with --from, or choose others with --only")]
    NoFolder { script: &'static str },
    #[error("unknown peer {found:?}: expected quarry, mooncake, redis, nixl or etcd")]
    Unknown { found: String },
    #[error("nothing was measured")]
    Nothing,
}

/// One figure: GiB/s and the median time of a call.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Figure {
    gib_s: f64,
    p50_us: f64,
}

/// (size, batch of more than one, call): puts after gets of the same shape do not matter, sizes in order do.
type Case = (u64, bool, String);
/// By case, then by store.
type Table = BTreeMap<Case, BTreeMap<&'static str, Figure>>;

/// The peer that is compared by our own bench.
const ETCD: &str = "etcd";

pub(crate) fn run(repository: &Path, args: &PeersArgs) -> Result<String, PeersError> {
    let known = |name: &str| ["quarry", ETCD].contains(&name) || PEERS.iter().any(|peer| peer.name == name);
    if let Some(found) = args.only.iter().find(|name| !known(name)) {
        return Err(PeersError::Unknown { found: found.clone() });
    }
    let wanted = |name: &str| args.only.is_empty() || args.only.iter().any(|only| only == name);
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository.join("target"), PathBuf::from);
    let dir = target.join("peers");
    fs::create_dir_all(&dir).map_err(|source| PeersError::Io { path: dir.clone(), source })?;
    for peer in PEERS.iter().filter(|peer| wanted(peer.name)) {
        prepare(&dir, peer)?;
        script(args, peer)?;
    }
    if wanted(ETCD) {
        prepare_etcd()?;
    }
    if wanted("quarry") || wanted(ETCD) {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.current_dir(repository).args(["build", "--locked", "--release", "--package", "quarry"]);
        execute("cargo build --release --package quarry", &mut build)?;
    }
    if args.prepare {
        return Ok(format!("ready in {}", dir.display()));
    }
    let mut table = Table::new();
    for peer in &PEERS {
        let out = dir.join(format!("{}.json", peer.name));
        if wanted(peer.name) {
            let mut python = Command::new(dir.join(peer.name).join("bin/python"));
            python.arg(script(args, peer)?).args(peer.arguments).arg("--runs").arg(args.runs.to_string());
            python.arg("--out").arg(&out).stdout(Stdio::null());
            execute(peer.script, &mut python)?;
        }
        add_peer(&mut table, peer, &out)?;
    }
    let out = dir.join("quarry.json");
    if wanted("quarry") {
        let file = fs::File::create(&out).map_err(|source| PeersError::Io { path: out.clone(), source })?;
        let mut bench = Command::new(target.join("release/quarry"));
        bench.args(["bench", "calls", "-o", "json"]).stdout(file);
        execute("quarry bench calls", &mut bench)?;
    }
    add_quarry(&mut table, &out)?;
    let out = dir.join("etcd.md");
    if wanted(ETCD) {
        let file = fs::File::create(&out).map_err(|source| PeersError::Io { path: out.clone(), source })?;
        let mut bench = Command::new(target.join("release/quarry"));
        bench.args(["bench", "meta", "--peers", "--filter", "etcd/", "--markdown"]).stdout(file);
        execute("quarry bench meta --peers", &mut bench)?;
    }
    let beside_etcd = read_if_there(&out)?;
    let parts = [(!table.is_empty()).then(|| shown(&table)), beside_etcd];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { Err(PeersError::Nothing) } else { Ok(parts.join("\n\n")) }
}

/// Where a peer's script is.
fn script(args: &PeersArgs, peer: &Peer) -> Result<PathBuf, PeersError> {
    let dir = args.from.as_ref().ok_or(PeersError::NoFolder { script: peer.script })?;
    let script = dir.join(peer.script);
    if script.is_file() { Ok(script) } else { Err(PeersError::NoScript { script: peer.script, dir: dir.clone() }) }
}

/// Installs etcd, unless it is there. Debian starts no member of its own accord where there is no init system; where there is one, that member
/// is idle and has other ports than those of the bench.
fn prepare_etcd() -> Result<(), PeersError> {
    match Command::new(ETCD).arg("--version").stdout(Stdio::null()).status() {
        Ok(_) => Ok(()),
        Err(wrong) if wrong.kind() == io::ErrorKind::NotFound => {
            let apt = |words: &[&str]| {
                let mut command = Command::new("apt-get");
                command.env("DEBIAN_FRONTEND", "noninteractive").arg("-qq").args(words);
                command
            };
            // A machine that never asked has no lists of packages, and old ones name packages that are gone.
            execute("apt-get update", &mut apt(&["update"]))?;
            let mut install = apt(&["install", "-y", "--no-install-recommends", "etcd-server"]);
            Ok(execute("apt-get install etcd-server", &mut install)?)
        }
        Err(source) => Err(ExecuteError::Missing { what: ETCD.to_owned(), source }.into()),
    }
}

/// Makes a peer's Python environment, unless it is there.
fn prepare(dir: &Path, peer: &Peer) -> Result<(), PeersError> {
    let venv = dir.join(peer.name);
    let ready = venv.join("ready");
    let wanted = format!("{:?}\n", peer.packages);
    if fs::read_to_string(&ready).is_ok_and(|there| there == wanted) {
        return Ok(());
    }
    execute("python3 -m venv", Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
    for packages in peer.packages {
        let mut pip = Command::new(venv.join("bin/python"));
        pip.args(["-m", "pip", "install", "--quiet"]).args(*packages);
        execute(&format!("pip install for {}", peer.name), &mut pip)?;
    }
    fs::write(&ready, wanted).map_err(|source| PeersError::Io { path: ready, source })
}

/// What a script leaves.
#[derive(Deserialize)]
struct Left {
    median: Vec<Median>,
}

#[derive(Deserialize)]
struct Median {
    op: String,
    size: u64,
    per_call: u64,
    gib_s: f64,
    p50_us: f64,
}

fn add_peer(table: &mut Table, peer: &Peer, out: &Path) -> Result<(), PeersError> {
    let Some(text) = read_if_there(out)? else { return Ok(()) };
    let left: Left =
        serde_json::from_str(&text).map_err(|source| PeersError::Figures { path: out.to_owned(), source })?;
    for row in left.median {
        let many = row.per_call > 1;
        let ours = peer.operations.iter().find(|(_, batch, op)| *batch == many && *op == row.op);
        if let Some((call, _, _)) = ours {
            let figure = Figure { gib_s: row.gib_s, p50_us: row.p50_us };
            table.entry((row.size, many, (*call).to_owned())).or_default().insert(peer.name, figure);
        }
    }
    Ok(())
}

/// What `quarry bench` prints, as far as it is needed here.
#[derive(Deserialize)]
struct Bench {
    rows: Vec<BenchRow>,
}

#[derive(Deserialize)]
struct BenchRow {
    case: String,
    value: f64,
    p50_us: Option<f64>,
}

/// Where Quarry's gets are shown: cold ones beside the others', warm ones in a column of their own.
const COLD: &str = "quarry";
const WARM: &str = "quarry warm";

fn add_quarry(table: &mut Table, out: &Path) -> Result<(), PeersError> {
    let Some(text) = read_if_there(out)? else { return Ok(()) };
    let bench: Bench =
        serde_json::from_str(&text).map_err(|source| PeersError::Figures { path: out.to_owned(), source })?;
    for row in bench.rows {
        let words: Vec<&str> = row.case.split('/').collect();
        let &[call, size, batch, how] = words.as_slice() else { continue };
        let (Some(size), Some(p50_us)) = (bytes(size), row.p50_us) else { continue };
        let column = if how == "warm" { WARM } else { COLD };
        let figure = Figure { gib_s: row.value, p50_us };
        table.entry((size, batch != "batch1", call.to_owned())).or_default().insert(column, figure);
    }
    Ok(())
}

fn bytes(size: &str) -> Option<u64> {
    let (number, shift) = match size.strip_suffix("KiB") {
        Some(number) => (number, 10),
        None => (size.strip_suffix("MiB")?, 20),
    };
    Some(number.parse::<u64>().ok()? << shift)
}

fn read_if_there(path: &Path) -> Result<Option<String>, PeersError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(wrong) if wrong.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PeersError::Io { path: path.to_owned(), source }),
    }
}

/// The table in Markdown: GiB/s, and in brackets the median time of a call in microseconds.
fn shown(table: &Table) -> String {
    let columns = [COLD, WARM].into_iter().chain(PEERS.iter().map(|peer| peer.name));
    let mut text = format!("| case | {} |\n", columns.clone().collect::<Vec<_>>().join(" | "));
    text += &format!("| --- |{}\n", " ---: |".repeat(columns.clone().count()));
    for ((size, many, call), figures) in table {
        let size = if *size < 1 << 20 { format!("{} KiB", size >> 10) } else { format!("{} MiB", size >> 20) };
        let _ = write!(text, "| {call} {} {size} |", if *many { "100 ×" } else { "1 ×" });
        for column in columns.clone() {
            let cell = figures.get(column).map_or_else(String::new, |it| format!("{:.3} ({:.0})", it.gib_s, it.p50_us));
            let _ = write!(text, " {cell} |");
        }
        text.push('\n');
    }
    text + "\nGiB/s, in brackets the median time of a call in µs."
}

#[cfg(test)]
mod tests {
    use super::*;

    fn temporary(name: &str, text: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("quarry-peers-{}-{name}", std::process::id()));
        fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn rows_of_one_case_stand_beside_each_other() {
        let redis = temporary(
            "redis.json",
            r#"{"median": [{"op": "SET-pipe", "size": 4096, "per_call": 100, "gib_s": 0.25, "p50_us": 1400.0, "n": 1},
                {"op": "SET", "size": 4096, "per_call": 1, "gib_s": 0.05, "p50_us": 70.0},
                {"op": "UNKNOWN", "size": 4096, "per_call": 1, "gib_s": 9.0, "p50_us": 9.0}]}"#,
        );
        let quarry = temporary(
            "quarry.json",
            r#"{"rows": [{"case": "put/4KiB/batch100/copies1", "value": 0.5, "p50_us": 700.0},
                {"case": "get/1MiB/batch1/cold", "value": 2.0, "p50_us": 400.0},
                {"case": "get/1MiB/batch1/warm", "value": 4.0, "p50_us": 200.0}]}"#,
        );
        let mut table = Table::new();
        add_peer(&mut table, &PEERS[1], &redis).unwrap();
        add_peer(&mut table, &PEERS[0], Path::new("/no/such/file")).unwrap();
        add_quarry(&mut table, &quarry).unwrap();
        for path in [redis, quarry] {
            fs::remove_file(path).unwrap();
        }
        let text = shown(&table);
        let line = |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap().to_owned();
        assert_eq!(line("| case"), "| case | quarry | quarry warm | mooncake | redis | nixl |");
        assert_eq!(line("| put 100 × 4 KiB"), "| put 100 × 4 KiB | 0.500 (700) |  |  | 0.250 (1400) |  |");
        assert_eq!(line("| put 1 × 4 KiB"), "| put 1 × 4 KiB |  |  |  | 0.050 (70) |  |");
        assert_eq!(line("| get 1 × 1 MiB"), "| get 1 × 1 MiB | 2.000 (400) | 4.000 (200) |  |  |  |");
        assert!(!text.contains('9'), "{text}");
    }

    #[test]
    fn figures_that_cannot_be_read_are_an_error() {
        let broken = temporary("broken.json", "{");
        let mut table = Table::new();
        assert!(matches!(add_quarry(&mut table, &broken), Err(PeersError::Figures { .. })));
        assert!(matches!(add_peer(&mut table, &PEERS[2], &broken), Err(PeersError::Figures { .. })));
        fs::remove_file(broken).unwrap();
    }
}
