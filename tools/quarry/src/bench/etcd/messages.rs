//! As much of etcd's gRPC as the comparison needs, by the numbers of its fields (api/etcdserverpb/rpc.proto of version 3).

use bytes::Bytes;

/// `PutRequest`, and the same inside a transaction.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct Put {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) key: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) value: Bytes,
}

/// `PutResponse`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct PutReply {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
}

/// `ResponseHeader`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct Header {
    #[prost(uint64, tag = "2")]
    pub(super) member_id: u64,
    #[prost(int64, tag = "3")]
    pub(super) revision: i64,
}

/// `TxnRequest` without a condition: what is in it happens.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct Txn {
    #[prost(message, repeated, tag = "2")]
    pub(super) success: Vec<Operation>,
}

/// `RequestOp` that is a put.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct Operation {
    #[prost(message, optional, tag = "2")]
    pub(super) put: Option<Put>,
}

/// `TxnResponse`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct TxnReply {
    #[prost(bool, tag = "2")]
    pub(super) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub(super) responses: Vec<OperationReply>,
}

/// `ResponseOp` that is the answer to a put.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct OperationReply {
    #[prost(message, optional, tag = "2")]
    pub(super) put: Option<PutReply>,
}

/// `StatusRequest`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct Status {}

/// `StatusResponse`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct StatusReply {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(string, tag = "2")]
    pub(super) version: String,
    #[prost(uint64, tag = "4")]
    pub(super) leader: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message as _;

    #[test]
    fn a_put_in_a_transaction_has_the_bytes_that_etcd_reads() {
        let put = Put { key: Bytes::from_static(b"k"), value: Bytes::from_static(b"v") };
        let txn = Txn { success: vec![Operation { put: Some(put) }] };
        assert_eq!(txn.encode_to_vec(), b"\x12\x08\x12\x06\x0a\x01k\x12\x01v");
    }

    #[test]
    fn what_etcd_says_beside_what_is_needed_is_passed_over() {
        // cluster_id, member_id, revision, raft_term; version; dbSize; leader.
        let reply = b"\x0a\x08\x08\x01\x10\x07\x18\x09\x20\x02\x12\x06\x33.4.23\x18\x80\x01\x20\x07";
        let reply = StatusReply::decode(reply.as_slice()).unwrap();
        assert_eq!((reply.version.as_str(), reply.leader), ("3.4.23", 7));
        assert_eq!(reply.header, Some(Header { member_id: 7, revision: 9 }));
    }
}
