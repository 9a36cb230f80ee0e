//! Regions as the directory knows them, and new keys for them and their nodes.
//!
//! The list is the answer of any meta node that knows the most; a new key is asked of the data node itself, which answers when the old key is
//! dead and the directory has the record of the new one.

use crate::admin::{CallError, call};
use quarry_fabric::FabricAddress;
use quarry_proto::v1;
use quarry_trust::{Expect, Trust};
use quarry_wire::{
    ids::{FeedNumber, NodeId},
    limits::MESSAGE_BYTES_MAX,
    region::RegionRecord,
    signed::Signed,
};
use std::{str::FromStr, time::Duration};
use tonic::Request;

/// A region, or all regions of a data node: `101/0`, `101`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Regions {
    /// The data node.
    pub node: u64,
    /// Which of its regions; none: all.
    pub index: Option<u32>,
}

impl FromStr for Regions {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected NODE or NODE/REGION, such as 101 or 101/0, found {text:?}");
        let (node, index) = match text.split_once('/') {
            Some((node, index)) => (node, Some(index.parse().map_err(|_| wrong())?)),
            None => (text, None),
        };
        Ok(Self { node: node.parse().map_err(|_| wrong())?, index })
    }
}

/// What a meta node knows of the regions and of the nodes that lend them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Known {
    /// Their newest records, by node and index.
    pub records: Vec<RegionRecord>,
    /// The data nodes.
    pub nodes: Vec<v1::DataNodeInfo>,
}

impl Known {
    /// What an answer says of regions. Whether records are signed is not looked at: nothing is read through them.
    #[must_use]
    pub fn of(changes: v1::Changes) -> Self {
        let decode = |bytes: &bytes::Bytes| Signed::<RegionRecord>::decode(bytes).ok().map(|signed| signed.statement);
        let mut records: Vec<RegionRecord> = changes.records.iter().filter_map(decode).collect();
        records.sort_by_key(|record| record.region);
        Self { records, nodes: changes.data_nodes }
    }

    /// A data node by its number.
    #[must_use]
    pub fn node(&self, node: u64) -> Option<&v1::DataNodeInfo> {
        self.nodes.iter().find(|it| it.node == node)
    }

    /// Whether the node of a region is alive, as the directory judges.
    #[must_use]
    pub fn is_alive(&self, node: NodeId) -> bool {
        self.node(node.0).is_some_and(|it| it.alive)
    }
}

/// Where a region's reader listens, for people.
#[must_use]
pub fn reader_address(record: &RegionRecord) -> String {
    let address = FabricAddress::from_bytes(record.address.as_bytes());
    address.map_or_else(|_| hex::encode(record.address.as_bytes()), |address| address.to_string())
}

/// The regions, as the meta node knows them that knows the most.
///
/// # Errors
/// The last [`CallError`] if none answered.
pub async fn known(trust: &Trust, metas: &[String], deadline: Duration) -> Result<Known, CallError> {
    newest(trust, metas, deadline).await.map(Known::of)
}

/// Asks all meta nodes at once for everything that the directory knows; the answer of the one that has followed it furthest.
///
/// # Errors
/// The last [`CallError`] if none answered.
pub async fn newest(trust: &Trust, metas: &[String], deadline: Duration) -> Result<v1::Changes, CallError> {
    let ask = |address: &String| {
        let (trust, address) = (trust.clone(), address.clone());
        tokio::spawn(async move {
            call(&trust, Expect::META, &address, deadline, |calls| async {
                v1::control_client::ControlClient::new(calls)
                    .max_decoding_message_size(MESSAGE_BYTES_MAX)
                    .describe(v1::DescribeRequest { seen: None })
                    .await
            })
            .await
        })
    };
    let mut last = CallError::Address { address: String::new() };
    let mut answers = Vec::new();
    // All are on their way before the first is waited for.
    for asked in metas.iter().map(ask).collect::<Vec<_>>() {
        match asked.await.expect("asking for a description does not panic") {
            Ok(reply) => answers.push(reply),
            Err(wrong) => last = wrong,
        }
    }
    if answers.is_empty() { Err(last) } else { Ok(furthest(answers)) }
}

fn furthest(answers: Vec<v1::DescribeReply>) -> v1::Changes {
    let changes = answers.into_iter().filter_map(|reply| reply.changes);
    changes.max_by_key(|changes| changes.at.map(FeedNumber::from)).unwrap_or_default()
}

/// Has a data node change the read keys of a region or of all of its regions. When this returns, the old ones are dead.
///
/// # Errors
/// [`CallError`]; with [`Indeterminate`](quarry_proto::refusal::Refusal::Indeterminate) the node goes on trying.
pub async fn rotate(
    trust: &Trust,
    node: u64,
    address: &str,
    region: Option<u32>,
    why: &str,
    deadline: Duration,
) -> Result<v1::RotateRegionReply, CallError> {
    call(trust, Expect::data_node(NodeId(node)), address, deadline, |calls| async {
        let mut request = Request::new(v1::RotateRegionRequest { region, why: why.to_owned() });
        request.set_timeout(deadline);
        v1::data_node_client::DataNodeClient::new(calls).rotate_region(request).await
    })
    .await
}

/// Has a data node sign with the key that its key file has now. When this returns, nothing that is read depends on its older keys.
///
/// # Errors
/// [`CallError`]; with [`Indeterminate`](quarry_proto::refusal::Refusal::Indeterminate) it is to be asked again.
pub async fn rotate_key(
    trust: &Trust,
    node: u64,
    address: &str,
    why: &str,
    deadline: Duration,
) -> Result<v1::RotateKeyReply, CallError> {
    call(trust, Expect::data_node(NodeId(node)), address, deadline, |calls| async {
        let mut request = Request::new(v1::RotateKeyRequest { why: why.to_owned() });
        request.set_timeout(deadline);
        v1::data_node_client::DataNodeClient::new(calls).rotate_key(request).await
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_named_by_node_and_index() {
        assert_eq!("101".parse(), Ok(Regions { node: 101, index: None }));
        assert_eq!("101/3".parse(), Ok(Regions { node: 101, index: Some(3) }));
        for wrong in ["", "/", "101/", "/1", "a", "101/1/2", "-1", "101/-1"] {
            assert!(wrong.parse::<Regions>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn the_answer_that_knows_the_most_is_told() {
        let reply = |number, node| v1::DescribeReply {
            changes: Some(v1::Changes {
                at: Some(v1::Ordinal { generation: 1, number }),
                data_nodes: vec![v1::DataNodeInfo { node, address: String::new(), alive: true, revoked: false }],
                ..Default::default()
            }),
            ..Default::default()
        };
        let answers = vec![reply(3, 101), reply(5, 102), reply(4, 103), v1::DescribeReply::default()];
        let known = Known::of(furthest(answers));
        assert!(known.is_alive(NodeId(102)) && known.node(101).is_none());
        assert_eq!(Known::of(furthest(Vec::new())), Known::default());
    }
}
