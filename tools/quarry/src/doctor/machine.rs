//! Limits, huge pages, kernel features, TCP, ports.

use super::finding::Finding;
use quarry_fabric::Memory;
use rustix::process::{Resource, getrlimit};
use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::Path,
};

/// 256 lanes of a data node have 7 descriptors each; the rest is connections.
const FILES_WANTED: u64 = 4096;
/// A client alone needs a few dozen.
const FILES_LEAST: u64 = 256;
/// A small region and the windows of a client.
const MEMLOCK_WANTED: u64 = 1 << 30;

pub(super) fn check(software: bool, findings: &mut Vec<Finding>) {
    findings.push(memlock(getrlimit(Resource::Memlock).current, software));
    findings.push(files(getrlimit(Resource::Nofile).current));
    findings.push(huge_pages(fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok().as_deref()));
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    findings.push(kernel(release.trim(), Memory::populates_at_once()));
    if software {
        findings.push(congestion(quarry::machine::congestion_control().as_deref()));
    }
}

/// Only of interest where the fabric runs over TCP.
fn congestion(control: Option<&str>) -> Finding {
    const CHECK: &str = "congestion";
    match control {
        Some(paced @ ("bbr" | "bbr2" | "bbr3")) => Finding::warn(
            CHECK,
            format!("{paced}: paces what goes over loopback and fast networks, at half their speed"),
            "sysctl -w net.ipv4.tcp_congestion_control=cubic",
        ),
        Some(other) => Finding::ok(CHECK, other),
        None => Finding::ok(CHECK, "unknown"),
    }
}

fn memlock(limit: Option<u64>, software: bool) -> Finding {
    const CHECK: &str = "memlock";
    let Some(bytes) = limit else { return Finding::ok(CHECK, "unlimited") };
    let shown = size(bytes);
    if bytes >= MEMLOCK_WANTED {
        Finding::ok(CHECK, shown)
    } else if software {
        Finding::ok(CHECK, format!("{shown}: enough for this provider, which locks nothing; a card's would need more"))
    } else {
        let remedy =
            "ulimit -l unlimited (memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity in systemd units)";
        Finding::fail(CHECK, format!("{shown}: registered memory is locked"), remedy)
    }
}

fn files(limit: Option<u64>) -> Finding {
    const CHECK: &str = "open files";
    let Some(files) = limit else { return Finding::ok(CHECK, "unlimited") };
    let remedy = "ulimit -n 65536 (nofile in /etc/security/limits.conf, LimitNOFILE=65536 in systemd units)";
    match files {
        FILES_WANTED.. => Finding::ok(CHECK, files),
        FILES_LEAST.. => {
            Finding::warn(CHECK, format!("{files}: a data node with many writers needs {FILES_WANTED}"), remedy)
        }
        _ => Finding::fail(CHECK, format!("{files}: at least {FILES_LEAST} are needed"), remedy),
    }
}

fn huge_pages(setting: Option<&str>) -> Finding {
    const CHECK: &str = "huge pages";
    let remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
    let chosen = setting.and_then(|text| Some(text.split_once('[')?.1.split_once(']')?.0));
    match chosen {
        Some(mode @ ("always" | "madvise")) => Finding::ok(CHECK, format!("transparent, {mode}")),
        Some(mode) => Finding::warn(CHECK, format!("{mode}: large regions cost more page faults"), remedy),
        None => Finding::warn(CHECK, "this kernel has no transparent huge pages", "use a kernel with them"),
    }
}

fn kernel(release: &str, populates: bool) -> Finding {
    if populates {
        return Finding::ok("kernel", format!("Linux {release}, with MADV_POPULATE_WRITE"));
    }
    let remedy = "use Linux 5.14 or newer";
    Finding::warn("kernel", format!("Linux {release} lacks MADV_POPULATE_WRITE: regions come up more slowly"), remedy)
}

pub(super) fn check_ports(listen: &[SocketAddr], findings: &mut Vec<Finding>) {
    for address in listen {
        findings.push(port(*address));
    }
    if listen.is_empty() {
        findings.push(port(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))));
    }
}

fn port(address: SocketAddr) -> Finding {
    const CHECK: &str = "ports";
    match TcpListener::bind(address) {
        Ok(_) if address.port() == 0 => Finding::ok(CHECK, format!("can listen on {}", address.ip())),
        Ok(_) => Finding::ok(CHECK, format!("can listen on {address}")),
        Err(wrong) => {
            let remedy = "choose another with node.listen, or end what listens there (ss -ltnp shows it)";
            Finding::fail(CHECK, format!("cannot listen on {address}: {wrong}"), remedy)
        }
    }
}

/// Bytes for people.
pub(super) fn size(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let fits = units.iter().find(|(shift, _)| bytes >> shift > 0);
    fits.map_or_else(
        || format!("{bytes} bytes"),
        |(shift, unit)| format!("{:.1} {unit}", bytes as f64 / f64::from(1 << shift)),
    )
}

/// The type of the file system of `dir`, by the longest mount point above it.
pub(super) fn file_system(dir: &Path) -> Option<String> {
    crate::bench::machine::file_system(dir).ok()
}

#[cfg(test)]
mod tests {
    use super::{super::finding::State, *};

    #[test]
    fn limits_are_judged_by_what_needs_them() {
        let states =
            [memlock(None, false), memlock(Some(8 << 20), true), memlock(Some(8 << 20), false)].map(|it| it.state);
        assert_eq!(states, [State::Ok, State::Ok, State::Fail]);
        let states = [files(None), files(Some(65536)), files(Some(1024)), files(Some(64))].map(|it| it.state);
        assert_eq!(states, [State::Ok, State::Ok, State::Warn, State::Fail]);
        assert!(files(Some(64)).remedy.unwrap().contains("ulimit -n"));
    }

    #[test]
    fn a_congestion_control_that_paces_loopback_is_warned_of() {
        assert_eq!(
            [Some("bbr"), Some("cubic"), None].map(|it| congestion(it).state),
            [State::Warn, State::Ok, State::Ok]
        );
    }

    #[test]
    fn huge_pages_are_read_from_the_kernels_own_words() {
        assert_eq!(huge_pages(Some("always [madvise] never\n")).state, State::Ok);
        assert_eq!(huge_pages(Some("always madvise [never]\n")).state, State::Warn);
        assert_eq!(huge_pages(None).state, State::Warn);
    }

    #[test]
    fn a_port_that_is_taken_fails_and_a_free_one_does_not() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let mut findings = Vec::new();
        check_ports(&[address], &mut findings);
        assert_eq!(findings[0].state, State::Fail);
        assert!(findings[0].found.contains(&address.to_string()));
        findings.clear();
        check_ports(&[], &mut findings);
        assert_eq!(findings[0].state, State::Ok);
    }

    #[test]
    fn sizes_are_shown_in_the_largest_unit_that_fits() {
        assert_eq!([size(512), size(8 << 20), size(3 << 29)], ["512 bytes", "8.0 MiB", "1.5 GiB"]);
    }
}
