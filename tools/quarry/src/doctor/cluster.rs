//! A cluster as this machine sees it: each process, its release, its clock, and who leads.

use super::finding::Finding;
use quarry::{
    admin::{self, CallError, DIRECTORY, Health, State},
    scrape,
};
use quarry_client::{Clock as _, Cluster, SystemClock};
use quarry_proto::v1;
use quarry_trust::Trust;
use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, UNIX_EPOCH},
};

/// What this machine runs.
const RELEASE: &str = env!("CARGO_PKG_VERSION");
/// Leaders turn away versions that are further ahead of their clock than this.
const AHEAD_MAX_MS: u64 = 10 * 60 * 1000;
/// Credentials that end within this time are warned of.
const ENDS_SOON: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// A clock that is read to the second, over a busy network, may seem as far off as this.
const SKEW_SEEN_MS: u64 = 3000;

pub(super) async fn check(named: &str, credentials: Option<&Path>, timeout: Duration, findings: &mut Vec<Finding>) {
    let cluster = match quarry::named::cluster(named, credentials) {
        Ok(cluster) => cluster,
        Err(wrong) => {
            let remedy =
                "name the file that quarry up or whoever made the cluster wrote, with --cluster or QUARRY_CLUSTER";
            findings.push(Finding::fail("cluster", wrong, remedy));
            return;
        }
    };
    let trust = match cluster.trust() {
        Ok(trust) => trust,
        Err(wrong) => {
            findings.push(Finding::fail(CREDENTIALS, wrong, "quarry keys client --help"));
            return;
        }
    };
    findings.push(of_trust(&trust, Path::new(named)));
    let (metas, answers) = admin::status_of_present(&trust, &cluster.metas, timeout).await;
    if let Err(wrong) = admin::unless_forbidden(&answers) {
        findings.push(Finding::warn("cluster", wrong, admin::ADMINISTRATOR));
        return;
    }
    let mut data: BTreeMap<u64, String> = BTreeMap::new();
    for (address, answer) in metas.iter().zip(&answers) {
        findings.push(meta(&cluster, address, answer.as_ref()));
        let Ok(reply) = answer else { continue };
        if reply.cluster[..] != cluster.uuid.0 {
            continue;
        }
        data.extend(reply.data_nodes.iter().map(|it| (it.node, it.address.clone())));
        if !reply.admin_address.is_empty() {
            findings.extend(skew(&reply.admin_address, address, timeout).await);
        }
    }
    for (node, address) in data {
        findings.push(data_node(node, &address, admin::node_status(&trust, &address, timeout).await.as_ref()));
    }
    findings.push(together(&Health::judge(&metas, &answers)));
}

const CREDENTIALS: &str = "credentials";

/// Whether connections are safe, and for how long.
fn of_trust(trust: &Trust, cluster_file: &Path) -> Finding {
    let Some(identity) = trust.identity() else {
        let found = "none: the cluster runs without TLS, whoever reaches a port may do everything";
        return Finding::warn(CREDENTIALS, found, "make credentials with quarry keys, and take tls.mode = \"off\" out");
    };
    if let Some(why) = trust.ends_within(ENDS_SOON) {
        let found = format!("{identity}: in {} days {why}", ENDS_SOON.as_secs() / (24 * 60 * 60));
        return Finding::warn(
            CREDENTIALS,
            found,
            "make new ones with quarry keys; they are taken up without a restart",
        );
    }
    if cluster_file.with_file_name("root.key").is_file() {
        let found = format!("{identity}, of a development cluster: its root key lies beside the cluster file");
        return Finding::warn(
            CREDENTIALS,
            found,
            "for more than development make keys with quarry keys, and keep the root key offline",
        );
    }
    Finding::ok(CREDENTIALS, identity)
}

fn meta(cluster: &Cluster, address: &str, answer: Result<&v1::StatusReply, &CallError>) -> Finding {
    const CHECK: &str = "meta node";
    let reply = match answer {
        Ok(reply) => reply,
        Err(wrong) => {
            return Finding::fail(
                CHECK,
                wrong,
                format!("see that it runs and that {address} can be reached from here"),
            );
        }
    };
    if reply.cluster.is_empty() {
        return Finding::fail(
            CHECK,
            format!("{address} belongs to no cluster yet"),
            "raft-admin bootstrap --plan FILE",
        );
    }
    if reply.cluster[..] != cluster.uuid.0 {
        let found = format!("{address} belongs to cluster {}, not {}", hex::encode(&reply.cluster), cluster.uuid);
        return Finding::fail(CHECK, found, "use the cluster file of the cluster that is meant");
    }
    let directory = reply.groups.iter().find(|it| it.group == DIRECTORY);
    let leader = match directory.map_or(0, |it| it.leader) {
        0 => "knows no leader of the directory".to_owned(),
        node if node == reply.node => "leads the directory".to_owned(),
        node => format!("follows {node}"),
    };
    of_release(CHECK, format!("{} at {address} {leader}", reply.node), &reply.build)
}

fn data_node(node: u64, address: &str, answer: Result<&v1::NodeStatusReply, &CallError>) -> Finding {
    const CHECK: &str = "data node";
    match answer {
        Ok(reply) if reply.node != node => {
            let found = format!("at {address} answers {}, not {node}", reply.node);
            Finding::fail(CHECK, found, "give each node an address of its own: node.advertise")
        }
        Ok(reply) => {
            of_release(CHECK, format!("{node} at {address}, regions lent: {}", reply.regions.len()), &reply.build)
        }
        Err(wrong) => {
            let remedy = format!("see that it runs and that {address} can be reached from here");
            Finding::fail(CHECK, format!("{node}: {wrong}"), remedy)
        }
    }
}

fn of_release(check: &'static str, found: String, release: &str) -> Finding {
    if release == RELEASE {
        return Finding::ok(check, found);
    }
    let found = format!("{found}, of release {release}; this is {RELEASE}");
    Finding::warn(check, found, "run one release everywhere, unless an upgrade is under way")
}

/// How far the clock of a process is from ours, by the date of an answer; none if it does not say.
async fn skew(admin: &str, address: &str, timeout: Duration) -> Option<Finding> {
    let page = scrape::get(admin, "/livez", timeout).await.ok()?;
    let there = httpdate::parse_http_date(page.date.as_deref()?).ok()?;
    let there = u64::try_from(there.duration_since(UNIX_EPOCH).ok()?.as_millis()).ok()?;
    Some(of_skew(address, SystemClock.wall_ms(), there))
}

fn of_skew(address: &str, here: u64, there: u64) -> Finding {
    const CHECK: &str = "clock skew";
    let apart = here.abs_diff(there);
    let remedy = "set the clocks: run chrony or systemd-timesyncd on both machines";
    let found = format!("{} s from {address}", apart / 1000);
    match apart {
        ..=SKEW_SEEN_MS => Finding::ok(CHECK, format!("less than {} s from {address}", SKEW_SEEN_MS / 1000)),
        _ if apart < AHEAD_MAX_MS => Finding::warn(CHECK, found, remedy),
        _ => Finding::fail(CHECK, format!("{found}: writes from the clock ahead are turned away"), remedy),
    }
}

fn together(health: &Health) -> Finding {
    const CHECK: &str = "cluster";
    let problems = health.problems.join("; ");
    match health.state {
        State::Healthy => Finding::ok(CHECK, "every group has a leader, every node is heard"),
        State::Degraded => {
            Finding::warn(CHECK, problems, "start what is missing; raft-admin health tells when all is well")
        }
        State::Unavailable => Finding::fail(CHECK, problems, "start meta nodes until most of them run"),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::finding::State as Found, *};

    #[test]
    fn clocks_apart_are_warned_of_and_fail_where_writes_are_turned_away() {
        let at = |there: u64| of_skew("m:1", 10_000_000, there).state;
        assert_eq!([at(10_002_000), at(9_990_000), at(10_700_000)], [Found::Ok, Found::Warn, Found::Fail]);
    }

    #[test]
    fn nodes_that_are_silent_foreign_or_of_another_release_are_told() {
        let root = quarry::identity::Root::generate().unwrap();
        let cluster = Cluster::new(root.cluster, root.public(), vec!["m:1".to_owned()]).unwrap();
        let reply = |uuid: &[u8], build: &str| v1::StatusReply {
            node: 1,
            cluster: bytes::Bytes::copy_from_slice(uuid),
            build: build.to_owned(),
            ..Default::default()
        };
        let state = |reply: &v1::StatusReply| meta(&cluster, "m:1", Ok(reply)).state;
        assert_eq!(state(&reply(&cluster.uuid.0, RELEASE)), Found::Ok);
        assert_eq!(state(&reply(&cluster.uuid.0, "other")), Found::Warn);
        assert_eq!(state(&reply(&[9; 16], RELEASE)), Found::Fail);
        assert_eq!(state(&reply(&[], RELEASE)), Found::Fail);
        let gone = CallError::Unreachable { address: "m:1".into(), why: "refused".into() };
        assert_eq!(meta(&cluster, "m:1", Err(&gone)).state, Found::Fail);
        assert_eq!(data_node(101, "d:1", Err(&gone)).state, Found::Fail);
        let other = v1::NodeStatusReply { node: 102, build: RELEASE.to_owned(), ..Default::default() };
        assert_eq!(data_node(101, "d:1", Ok(&other)).state, Found::Fail);
        assert_eq!(data_node(102, "d:1", Ok(&other)).state, Found::Ok);
    }
}
