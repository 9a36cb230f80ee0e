//! gRPC by hand: one connection per call, the leader found by its hints, refusals as values.

use crate::wait::PATIENCE;
use bytes::Bytes;
use quarry_proto::{protocol::Announce, refusal::Refusal, v1};
use quarry_trust::{Expect, Trust};
use quarry_wire::limits::MESSAGE_BYTES_MAX;
use std::{collections::BTreeMap, future::Future, sync::Mutex, time::Duration};
use tokio::time::{Instant, sleep};
use tonic::{
    Response, Status,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

/// Longest time for one call.
pub const CALL: Duration = Duration::from_secs(10);

/// Why a call brought no reply.
#[derive(Clone, Debug)]
pub enum Turned {
    /// The server refused.
    Refused(Refusal),
    /// The network or the process failed.
    Fault(Status),
}

/// A reply, or why there is none.
pub type Answer<T> = Result<T, Turned>;
/// A connection that announces its protocol version.
pub type Calls = InterceptedService<Channel, Announce>;

impl From<Status> for Turned {
    fn from(status: Status) -> Self {
        Refusal::from_status(&status).map_or(Self::Fault(status), Self::Refused)
    }
}

/// The refusal of a call that must have been refused.
///
/// # Panics
/// If it was answered, or failed in another way.
#[track_caller]
pub fn refusal<T: std::fmt::Debug>(answer: Answer<T>) -> Refusal {
    match answer {
        Err(Turned::Refused(refusal)) => refusal,
        other => panic!("a refusal was expected, found {other:?}"),
    }
}

/// How the processes at these addresses are called, in all of this module, from now on.
///
/// # Panics
/// Never: nobody panics while the lock is held.
pub fn know<A: Into<String>>(addresses: impl IntoIterator<Item = A>, trust: &Trust) {
    let mut known = KNOWN.lock().expect("nobody panics with it");
    known.extend(addresses.into_iter().map(|address| (address.into(), trust.clone())));
}
static KNOWN: Mutex<BTreeMap<String, Trust>> = Mutex::new(BTreeMap::new());

/// A connection without a protocol version: as a client that may do everything, if the address is of a cluster that asks who calls.
///
/// # Errors
/// If nobody listens there.
///
/// # Panics
/// Never: nobody panics while the lock is held.
pub async fn channel(address: &str) -> Answer<Channel> {
    let known = KNOWN.lock().expect("nobody panics with it").get(address).cloned();
    channel_as(&known.unwrap_or_else(Trust::off), address).await
}

/// A connection without a protocol version as somebody else.
///
/// # Errors
/// If nobody listens there, or one side does not trust the other.
///
/// # Panics
/// If it is no address.
pub async fn channel_as(trust: &Trust, address: &str) -> Answer<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("addresses of a cluster are host:port");
    let endpoint = endpoint.connect_timeout(CALL).timeout(CALL);
    let connected = endpoint.connect_with_connector(trust.connector(Expect::ANY)).await;
    connected.map_err(|wrong| {
        let mut deepest: &dyn std::error::Error = &wrong;
        while let Some(source) = deepest.source() {
            deepest = source;
        }
        trust.explain(address, Status::unavailable(deepest.to_string())).into()
    })
}

/// A connection to `address` as somebody else.
///
/// # Errors
/// As [`channel_as`].
pub async fn connect_as(trust: &Trust, address: &str) -> Answer<Calls> {
    Ok(InterceptedService::new(channel_as(trust, address).await?, Announce))
}

/// A connection to `address`.
///
/// # Errors
/// If nobody listens there.
pub async fn connect(address: &str) -> Answer<Calls> {
    Ok(InterceptedService::new(channel(address).await?, Announce))
}

/// The Control service at `address`.
///
/// # Errors
/// If nobody listens there.
pub async fn control(address: &str) -> Answer<v1::control_client::ControlClient<Calls>> {
    let client = v1::control_client::ControlClient::new(connect(address).await?);
    Ok(client.max_decoding_message_size(MESSAGE_BYTES_MAX))
}

/// The DataNode service at `address`.
///
/// # Errors
/// If nobody listens there.
pub async fn data_node(address: &str) -> Answer<v1::data_node_client::DataNodeClient<Calls>> {
    let client = v1::data_node_client::DataNodeClient::new(connect(address).await?);
    Ok(client.max_decoding_message_size(MESSAGE_BYTES_MAX))
}

/// What the meta node at `address` says about itself.
///
/// # Errors
/// If it does not answer.
pub async fn status(address: &str) -> Answer<v1::StatusReply> {
    let mut admin = v1::admin_client::AdminClient::new(connect(address).await?);
    done(admin.status(v1::StatusRequest {})).await
}

/// Hashes of the states of the meta node at `address`.
///
/// # Errors
/// If it does not answer.
pub async fn state_hash(address: &str) -> Answer<v1::StateHashReply> {
    let mut admin = v1::admin_client::AdminClient::new(connect(address).await?);
    done(admin.state_hash(v1::StateHashRequest::default())).await
}

/// What the data node at `address` says about itself.
///
/// # Errors
/// If it does not answer.
pub async fn node_status(address: &str) -> Answer<v1::NodeStatusReply> {
    done(data_node(address).await?.node_status(v1::NodeStatusRequest {})).await
}

/// What a meta node knows about the cluster.
///
/// # Errors
/// If it does not answer.
pub async fn describe(address: &str) -> Answer<v1::DescribeReply> {
    done(control(address).await?.describe(v1::DescribeRequest { seen: None })).await
}

/// Waits for a reply.
///
/// # Errors
/// What the server or the network says.
pub async fn done<T>(call: impl Future<Output = Result<Response<T>, Status>>) -> Answer<T> {
    Ok(call.await?.into_inner())
}

/// Asks one meta node after the other until one that leads the group answers, or refuses for another reason than not leading.
///
/// # Errors
/// The refusal, or the last fault at the deadline.
pub async fn at_leader<T, F: Future<Output = Answer<T>>>(
    metas: &[String],
    mut call: impl FnMut(v1::control_client::ControlClient<Calls>) -> F,
) -> Answer<T> {
    let until = Instant::now() + PATIENCE;
    loop {
        let mut last = None;
        for meta in metas {
            let answer = match control(meta).await {
                Ok(client) => call(client).await,
                Err(turned) => Err(turned),
            };
            match answer {
                Err(turned @ (Turned::Fault(_) | Turned::Refused(Refusal::NotLeader(_) | Refusal::NotReady(_)))) => {
                    last = Some(turned);
                }
                other => return other,
            }
        }
        if Instant::now() >= until {
            return Err(last.expect("a cluster has meta nodes"));
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// 16 bytes as a message carries them.
#[must_use]
pub fn id_bytes(id: [u8; 16]) -> Bytes {
    Bytes::copy_from_slice(&id)
}
