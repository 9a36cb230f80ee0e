//! Metrics of a process: the recorder, what every metric means, and what the process itself uses.
//!
//! The crates record through the `metrics` facade; here is the one exporter. Names are `quarry_<subsystem>_<what>_<unit>`, counters end in
//! `_total`, units are seconds and bytes, labels are few and never a key. `docs/metrics.md` lists them all; a test keeps the list and
//! [`catalogue`] the same.

use crate::build::{BUILD_ID, VERSION};
use metrics::{
    Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit, describe_gauge, gauge,
    with_local_recorder,
};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use quarry_client::{Clock as _, NodeId, SystemClock};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

const BUILD_INFO: &str = "quarry_build_info";
const START_TIME: &str = "quarry_process_start_time_seconds";
const OPEN_FDS: &str = "quarry_process_open_fds";
const RESIDENT: &str = "quarry_process_resident_bytes";
const READY: &str = "quarry_process_ready";
const DISK: &str = "quarry_process_disk_bytes";
const DISK_AVAILABLE: &str = "quarry_process_disk_available_bytes";

/// Samples of histograms are put into their buckets at least this often.
pub const UPKEEP: Duration = Duration::from_secs(5);

/// Upper bounds of the buckets of durations, in seconds: from a single hop on this host to the longest deadline.
const SECONDS: [f64; 20] = [
    0.000_05, 0.000_1, 0.000_2, 0.000_35, 0.000_5, 0.000_75, 0.001, 0.001_5, 0.002, 0.003_5, 0.005, 0.01, 0.02, 0.05,
    0.1, 0.25, 0.5, 1.0, 5.0, 30.0,
];
/// Upper bounds of the buckets of counts.
const COUNTS: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];

/// What kind of metric one is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Only grows, from 0 at the start of the process.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts of samples by size.
    Histogram,
}

impl Kind {
    /// As Prometheus calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// What a metric means.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Described {
    /// Its kind.
    pub kind: Kind,
    /// Its help text.
    pub help: String,
}

/// All metrics that any process of Quarry can show, by name.
#[must_use]
pub fn catalogue() -> BTreeMap<String, Described> {
    let collector = Collector::default();
    with_local_recorder(&collector, describe_all);
    collector.0.into_inner().expect("nobody panics while it describes a metric")
}

/// Says what all metrics mean, to the recorder that is installed.
fn describe_all() {
    quarry_raft::describe_metrics();
    quarry_proto::telemetry::describe_metrics();
    quarry_trust::describe_metrics();
    quarry_meta::describe_metrics();
    quarry_datanode::describe_metrics();
    quarry_fabric::describe_metrics();
    quarry_client::describe_metrics();
    describe_gauge!(BUILD_INFO, Unit::Count, "Always 1: the version and build, role and node of this process.");
    describe_gauge!(START_TIME, Unit::Seconds, "When this process started, in seconds since 1970.");
    describe_gauge!(OPEN_FDS, Unit::Count, "Files and sockets that this process has open.");
    describe_gauge!(RESIDENT, Unit::Bytes, "Memory of this process that is in RAM, registered regions included.");
    describe_gauge!(READY, Unit::Count, "1 while this process serves, as /readyz tells it, else 0.");
    describe_gauge!(DISK, Unit::Bytes, "Size of the file system that this process keeps its folder on.");
    describe_gauge!(DISK_AVAILABLE, Unit::Bytes, "What of it is left for this process.");
}

/// The recorder of this process.
#[derive(Clone)]
pub struct Exporter {
    handle: PrometheusHandle,
    data_dir: PathBuf,
}

impl std::fmt::Debug for Exporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exporter").finish_non_exhaustive()
    }
}

impl Exporter {
    /// Installs the recorder: once per process, before anything is counted. `data_dir` is the folder whose disk is told of.
    ///
    /// # Errors
    /// If this process has one already.
    pub fn install(role: &'static str, node: NodeId, data_dir: PathBuf) -> Result<Self, BuildError> {
        let handle = builder()?.install_recorder()?;
        describe_all();
        tell_identity(role, node);
        Ok(Self { handle, data_dir })
    }

    /// All metrics, as Prometheus reads them, of a process that serves or does not.
    #[must_use]
    pub fn render(&self, ready: bool) -> String {
        gauge!(READY).set(if ready { 1.0 } else { 0.0 });
        tell_use(&self.data_dir);
        self.handle.render()
    }

    /// Puts samples into their buckets; to be called every [`UPKEEP`].
    pub fn upkeep(&self) {
        self.handle.run_upkeep();
    }
}

fn builder() -> Result<PrometheusBuilder, BuildError> {
    PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)?
        .set_buckets_for_metric(Matcher::Suffix("_commands".to_owned()), &COUNTS)
}

#[expect(clippy::cast_precision_loss, reason = "gauges are floating point; milliseconds since 1970 stay below 2^53")]
fn tell_identity(role: &'static str, node: NodeId) {
    let labels = [
        ("version", VERSION.to_owned()),
        ("build", BUILD_ID.to_owned()),
        ("role", role.to_owned()),
        ("node", node.0.to_string()),
    ];
    gauge!(BUILD_INFO, &labels).set(1.0);
    gauge!(START_TIME).set(SystemClock.wall_ms() as f64 / 1_000.0);
}

/// What the process uses now. What the system does not tell is left as it was.
#[expect(clippy::cast_precision_loss, reason = "gauges are floating point; bytes and counts stay far below 2^53")]
fn tell_use(data_dir: &Path) {
    if let Ok(open) = fs::read_dir("/proc/self/fd") {
        // One of them is the folder that is being read.
        gauge!(OPEN_FDS).set(open.count().saturating_sub(1) as f64);
    }
    if let Some(bytes) = fs::read_to_string("/proc/self/status").ok().and_then(|text| resident(&text)) {
        gauge!(RESIDENT).set(bytes as f64);
    }
    // Not there before the node has made it.
    if let Ok(disk) = rustix::fs::statvfs(data_dir) {
        gauge!(DISK).set(disk.f_blocks.saturating_mul(disk.f_frsize) as f64);
        gauge!(DISK_AVAILABLE).set(disk.f_bavail.saturating_mul(disk.f_frsize) as f64);
    }
}

/// The resident bytes that `/proc/self/status` tells, in units of 1,024.
fn resident(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1_024)
}

/// Keeps descriptions and counts nothing.
#[derive(Default)]
struct Collector(Mutex<BTreeMap<String, Described>>);

impl Collector {
    fn keep(&self, kind: Kind, name: &KeyName, help: SharedString) {
        let described = Described { kind, help: help.into_owned() };
        let mut all = self.0.lock().expect("nobody panics while it describes a metric");
        let before = all.insert(name.as_str().to_owned(), described);
        assert!(before.is_none(), "{} is described twice", name.as_str());
    }
}

impl Recorder for Collector {
    fn describe_counter(&self, name: KeyName, _: Option<Unit>, help: SharedString) {
        self.keep(Kind::Counter, &name, help);
    }
    fn describe_gauge(&self, name: KeyName, _: Option<Unit>, help: SharedString) {
        self.keep(Kind::Gauge, &name, help);
    }
    fn describe_histogram(&self, name: KeyName, _: Option<Unit>, help: SharedString) {
        self.keep(Kind::Histogram, &name, help);
    }
    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }
    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scrape::Scrape;
    use metrics::{counter, histogram};
    use std::{
        io::Write as _,
        process::{Command, Stdio},
    };

    /// Text of a recorder with one sample of every metric of the catalogue.
    fn rendered() -> String {
        let recorder = builder().unwrap().build_recorder();
        let handle = recorder.handle();
        with_local_recorder(&recorder, || {
            describe_all();
            for (name, described) in catalogue() {
                match described.kind {
                    Kind::Counter => counter!(name).increment(1),
                    Kind::Gauge => gauge!(name).set(1.0),
                    Kind::Histogram => histogram!(name).record(0.5),
                }
            }
            tell_identity("meta", NodeId(7));
            tell_use(Path::new("/"));
        });
        handle.render()
    }

    #[test]
    fn every_name_follows_the_convention() {
        let all = catalogue();
        assert!(all.len() > 40, "{}", all.len());
        for (name, Described { kind, help }) in all {
            let letters = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
            assert!(name.starts_with("quarry_") && letters, "{name}");
            assert_eq!(
                kind == Kind::Counter,
                name.ends_with("_total"),
                "{name}: counters and they alone end in _total"
            );
            for reserved in ["_count", "_sum", "_bucket"] {
                assert!(!name.ends_with(reserved), "{name}");
            }
            let seconds = name.contains("duration") || name.contains("_time_");
            assert!(!seconds || name.ends_with("_seconds"), "{name}");
            assert!(!name.contains("_ms") && !name.contains("_kb") && !name.contains("_mb"), "{name}");
            assert!(help.ends_with('.') && help.len() > 10, "{name}: {help:?}");
        }
    }

    #[test]
    fn what_is_shown_has_help_and_type_for_every_metric_and_nothing_else() {
        let text = rendered();
        let scrape = Scrape::parse(&text).unwrap();
        let all = catalogue();
        assert_eq!(scrape.names(), all.keys().map(String::as_str).collect::<Vec<_>>());
        for (name, described) in &all {
            let (help, kind) = (format!("# HELP {name} "), format!("# TYPE {name} {}", described.kind.name()));
            assert_eq!(text.lines().filter(|line| line.starts_with(&help)).count(), 1, "{name}");
            assert_eq!(text.lines().filter(|line| **line == *kind).count(), 1, "{name}");
        }
        assert_eq!(scrape.sum("quarry_build_info", &[("role", "meta"), ("node", "7"), ("build", BUILD_ID)]), 1.0);
        assert!(scrape.sum("quarry_process_resident_bytes", &[]) > 1e6, "{text}");
        assert!(scrape.sum("quarry_process_open_fds", &[]) >= 3.0);
        let disk = |name| scrape.sum(name, &[]);
        let (all, left) = (disk("quarry_process_disk_bytes"), disk("quarry_process_disk_available_bytes"));
        assert!(all > 1e6 && left <= all, "{left} of {all}");
    }

    #[test]
    fn promtool_finds_nothing_to_complain_of() {
        let spawned = Command::new("promtool")
            .args(["check", "metrics"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut promtool = match spawned {
            Ok(promtool) => promtool,
            Err(wrong) if wrong.kind() == std::io::ErrorKind::NotFound => {
                eprintln!("promtool is not installed: the own format test has to do");
                return;
            }
            Err(wrong) => panic!("{wrong}"),
        };
        promtool.stdin.take().unwrap().write_all(rendered().as_bytes()).unwrap();
        let output = promtool.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.trim().is_empty(), "{said}");
    }

    #[test]
    fn the_list_of_metrics_in_the_documentation_is_the_catalogue() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
        let page = fs::read_to_string(path).unwrap();
        let rows = page.lines().filter(|line| line.starts_with("| `quarry_"));
        let documented: BTreeMap<String, String> = rows
            .map(|row| {
                let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
                assert_eq!(cells.len(), 4, "name, kind, labels, meaning: {row}");
                (cells[0].trim_matches('`').to_owned(), format!("{} {}", cells[1], cells[3]))
            })
            .collect();
        let told: BTreeMap<String, String> =
            catalogue().into_iter().map(|(name, it)| (name, format!("{} {}", it.kind.name(), it.help))).collect();
        assert_eq!(documented, told);
    }
}
