//! gRPC with bodies as bytes: what is sent need not be a message, and what comes is passed on as it is.

use bytes::{Buf as _, BufMut as _, Bytes};
use quarry_proto::protocol::HEADER;
use quarry_wire::limits::{MESSAGE_BYTES_MAX, PROTOCOL_MAX};
use tonic::{
    Request, Response, Status,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::http::uri::PathAndQuery,
    metadata::MetadataValue,
    transport::Channel,
};

/// Bodies as they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bare;

impl Codec for Bare {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }
    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Bare {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, body: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(body);
        Ok(())
    }
}

impl Decoder for Bare {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        let length = from.remaining();
        Ok(Some(from.copy_to_bytes(length)))
    }
}

/// Calls `method` (`/quarry.v1.Service/Method`) with this body, and this protocol version.
///
/// # Errors
/// What the server or the network says.
pub async fn call(channel: Channel, method: &'static str, body: Bytes) -> Result<Bytes, Status> {
    let mut request = Request::new(body);
    request.metadata_mut().insert(HEADER, MetadataValue::from(PROTOCOL_MAX));
    Ok(pass(channel, PathAndQuery::from_static(method), request).await?.into_inner())
}

/// Passes a request on.
///
/// # Errors
/// What the server or the network says.
pub async fn pass(channel: Channel, method: PathAndQuery, request: Request<Bytes>) -> Result<Response<Bytes>, Status> {
    let mut grpc = Grpc::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
    grpc.ready().await.map_err(|wrong| Status::unavailable(wrong.to_string()))?;
    grpc.unary(request, method, Bare).await
}
