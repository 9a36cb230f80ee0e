//! Which role may make which call: this table, and nothing else. What is not listed is called by nobody.
//!
//! Some calls are about one node or one writer; that the caller is the one is checked where the call is served (see [`crate::Caller`]).

use quarry_wire::certificate::Role::{self, Admin, DataNode, Meta, Reader, Writer};

const EVERYONE: &[Role] = &[Meta, DataNode, Writer, Reader, Admin];

/// The calls, by path.
const CALLS: &[(&str, &[Role])] = &[
    ("/quarry.v1.Control/Describe", EVERYONE),
    ("/quarry.v1.Control/CreateNamespace", &[Admin]),
    ("/quarry.v1.Control/Grant", &[Writer]),
    ("/quarry.v1.Control/Publish", &[DataNode]),
    ("/quarry.v1.Control/Seal", &[Writer]),
    ("/quarry.v1.Control/Delete", &[Writer]),
    ("/quarry.v1.Control/Resolve", &[Reader, Writer]),
    ("/quarry.v1.Control/Pin", &[Reader, Writer]),
    ("/quarry.v1.Control/RenewPin", &[Reader, Writer]),
    ("/quarry.v1.Control/ReleasePin", &[Reader, Writer]),
    ("/quarry.v1.Control/Exists", &[Reader, Writer]),
    ("/quarry.v1.Control/List", &[Reader, Writer]),
    ("/quarry.v1.Registry/RegisterRegion", &[DataNode]),
    ("/quarry.v1.Registry/RecordRegion", &[DataNode]),
    ("/quarry.v1.Registry/Heartbeat", &[DataNode]),
    ("/quarry.v1.Registry/AdmitCertificate", &[DataNode]),
    ("/quarry.v1.Registry/Batches", &[DataNode]),
    ("/quarry.v1.Registry/Resign", &[DataNode]),
    ("/quarry.v1.Registry/CheckCopy", &[DataNode]),
    ("/quarry.v1.Admin/Bootstrap", &[Admin]),
    // A meta node that makes the cluster, or takes another in, looks whether that one is blank.
    ("/quarry.v1.Admin/Status", &[Admin, Meta]),
    ("/quarry.v1.Admin/StateHash", &[Admin]),
    ("/quarry.v1.Admin/SaveGroup", &[Admin]),
    ("/quarry.v1.Admin/Stamp", &[Admin]),
    ("/quarry.v1.Admin/TransferLeader", &[Admin]),
    ("/quarry.v1.Admin/BalanceLeaders", &[Admin]),
    ("/quarry.v1.Admin/Drain", &[Admin]),
    ("/quarry.v1.Admin/ApplyRevocations", &[Admin]),
    ("/quarry.v1.Admin/ChangeMembers", &[Admin]),
    ("/quarry.v1.Admin/SetStanding", &[Admin]),
    ("/quarry.v1.Admin/ForgetNode", &[Admin]),
    ("/quarry.v1.DataNode/Arm", &[Writer]),
    ("/quarry.v1.DataNode/Commit", &[Writer]),
    ("/quarry.v1.DataNode/Confirm", &[DataNode]),
    ("/quarry.v1.DataNode/MoveCopies", &[Meta]),
    ("/quarry.v1.DataNode/Close", &[Writer]),
    ("/quarry.v1.DataNode/RegionRecord", &[Reader, Writer]),
    ("/quarry.v1.DataNode/ReportDamage", &[Reader, Writer]),
    ("/quarry.v1.DataNode/RotateRegion", &[Admin]),
    ("/quarry.v1.DataNode/RotateKey", &[Admin]),
    ("/quarry.v1.DataNode/NodeStatus", &[Admin]),
    ("/quarry.raft.v1.Peer/Link", &[Meta]),
    ("/quarry.raft.v1.Peer/AskSnapshot", &[Meta]),
    ("/quarry.raft.v1.Peer/SendSnapshot", &[Meta]),
    ("/grpc.health.v1.Health/Check", EVERYONE),
    ("/grpc.health.v1.Health/List", EVERYONE),
    ("/grpc.health.v1.Health/Watch", EVERYONE),
];

/// The roles that may make the call with this path (`/package.Service/Method`); none if there is no such call.
#[must_use]
pub fn callers(path: &str) -> Option<&'static [Role]> {
    CALLS.iter().find(|(call, _)| *call == path).map(|(_, roles)| *roles)
}

/// Whose calls share a room (see [`crate::Door::admission`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Of meta nodes to each other.
    Raft,
    /// Of nodes to others, for anything else.
    Node,
    /// Of administrators.
    Admin,
    /// Questions whether a server is well.
    Health,
    /// Of everybody else.
    Client,
}

/// Whose call the one with this path is, by who may make it.
pub(crate) fn kind(path: &str) -> Kind {
    match callers(path) {
        Some([Meta]) if path.starts_with("/quarry.raft.") => Kind::Raft,
        Some([Meta] | [DataNode]) => Kind::Node,
        Some([Admin, ..]) => Kind::Admin,
        Some(_) if path.starts_with("/grpc.health.") => Kind::Health,
        Some(_) | None => Kind::Client,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Paths of all calls in a file of services.
    fn calls_in(file: &str) -> BTreeSet<String> {
        let (mut package, mut service) = (String::new(), String::new());
        let mut calls = BTreeSet::new();
        for line in file.lines().map(str::trim) {
            let word = |text: &str| text.split([' ', '(', '{', ';']).next().unwrap_or_default().to_owned();
            if let Some(rest) = line.strip_prefix("package ") {
                package = word(rest);
            } else if let Some(rest) = line.strip_prefix("service ") {
                service = word(rest);
            } else if let Some(rest) = line.strip_prefix("rpc ") {
                calls.insert(format!("/{package}.{service}/{}", word(rest)));
            }
        }
        calls
    }

    #[test]
    fn every_call_that_is_served_says_who_may_make_it_and_no_other_is_listed() {
        let mut served = calls_in(include_str!("../../proto/proto/quarry.proto"));
        served.append(&mut calls_in(include_str!("../../../raft/proto/peer.proto")));
        assert!(served.len() > 20, "{served:?}");
        let listed: Vec<String> = CALLS.iter().map(|(path, _)| (*path).to_owned()).collect();
        let ours: BTreeSet<String> = listed.iter().filter(|path| path.starts_with("/quarry.")).cloned().collect();
        assert_eq!(ours, served);
        assert_eq!(listed.iter().collect::<BTreeSet<_>>().len(), listed.len(), "a call is listed once");
    }

    #[test]
    fn every_call_has_its_room_by_who_makes_it() {
        for (path, expected) in [
            ("/quarry.raft.v1.Peer/Link", Kind::Raft),
            ("/quarry.raft.v1.Peer/SendSnapshot", Kind::Raft),
            ("/quarry.v1.Control/Publish", Kind::Node),
            ("/quarry.v1.Registry/Heartbeat", Kind::Node),
            ("/quarry.v1.DataNode/Confirm", Kind::Node),
            ("/quarry.v1.DataNode/MoveCopies", Kind::Node),
            ("/quarry.v1.Admin/Status", Kind::Admin),
            ("/quarry.v1.Control/CreateNamespace", Kind::Admin),
            ("/grpc.health.v1.Health/Watch", Kind::Health),
            ("/quarry.v1.Control/Describe", Kind::Client),
            ("/quarry.v1.Control/Grant", Kind::Client),
            ("/quarry.v1.Control/Frobnicate", Kind::Client),
        ] {
            assert_eq!(kind(path), expected, "{path}");
        }
    }

    #[test]
    fn a_reader_changes_nothing_and_only_a_data_node_publishes() {
        let may = |role: Role| -> Vec<&str> {
            CALLS
                .iter()
                .filter(|(_, roles)| roles.contains(&role))
                .map(|(path, _)| *path)
                .filter(|path| path.starts_with("/quarry"))
                .collect()
        };
        let reads = ["Describe", "Resolve", "Pin", "RenewPin", "ReleasePin", "Exists", "List"]
            .map(|call| format!("/quarry.v1.Control/{call}"));
        // A report of damage is no word that counts: the node looks itself.
        let asks = ["RegionRecord", "ReportDamage"].map(|call| format!("/quarry.v1.DataNode/{call}"));
        let reads = [&reads[..], &asks[..]].concat();
        assert_eq!(may(Reader), reads);
        assert!(reads.iter().all(|path| may(Writer).contains(&path.as_str())), "a writer reads as well");
        for path in ["/quarry.v1.Control/Publish", "/quarry.v1.DataNode/Confirm", "/quarry.v1.Registry/Heartbeat"] {
            assert_eq!(callers(path), Some(&[DataNode][..]));
        }
        assert_eq!(callers("/quarry.v1.Control/Frobnicate"), None);
    }
}
