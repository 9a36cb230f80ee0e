//! gRPC by hand: one connection per call, the leader found by its hints, refusals as values.

use crate::wait::PATIENCE;
use bytes::Bytes;
use quarry_proto::{protocol::Announce, refusal::Refusal, v1};
use quarry_wire::limits::MESSAGE_BYTES_MAX;
use std::{future::Future, time::Duration};
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

/// A connection without a protocol version.
///
/// # Errors
/// If nobody listens there.
pub async fn channel(address: &str) -> Answer<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("addresses of a cluster are host:port");
    let connected = endpoint.connect_timeout(CALL).timeout(CALL).connect().await;
    connected.map_err(|wrong| Turned::Fault(Status::unavailable(wrong.to_string())))
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
    done(admin.state_hash(v1::StateHashRequest {})).await
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
