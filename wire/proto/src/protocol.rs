//! The version check of each call: the header `quarry-protocol`, set by every client and checked by every server. Calls also carry on the
//! request id in whose scope they are made.

use crate::{
    call_id::{self, CallId},
    refusal::Refusal,
    v1,
};
use quarry_wire::limits::{PROTOCOL_MAX, PROTOCOL_MIN};
use tonic::{Request, Status, metadata::MetadataValue, service::Interceptor};

/// Name of the header.
pub const HEADER: &str = "quarry-protocol";

/// Adds the version and the request id to every call of a client.
#[derive(Clone, Copy, Debug, Default)]
pub struct Announce;

impl Interceptor for Announce {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert(HEADER, MetadataValue::from(PROTOCOL_MAX));
        if let Some(id) = CallId::current() {
            request.metadata_mut().insert(call_id::HEADER, id.header());
        }
        Ok(request)
    }
}

/// Refuses calls of a version that this build does not speak, or of none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Check;

impl Interceptor for Check {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let found = request
            .metadata()
            .get(HEADER)
            .and_then(|value| value.to_str().ok())
            .and_then(|text| text.parse().ok())
            .unwrap_or(0);
        if (PROTOCOL_MIN..=PROTOCOL_MAX).contains(&found) {
            return Ok(request);
        }
        Err(Refusal::UnsupportedProtocol(v1::UnsupportedProtocol { found, min: PROTOCOL_MIN, max: PROTOCOL_MAX })
            .into_status())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_of_another_version_or_of_none_is_refused_with_the_versions_spoken() {
        let mut future = Request::new(());
        future.metadata_mut().insert(HEADER, MetadataValue::from(PROTOCOL_MAX + 1));
        for request in [future, Request::new(())] {
            let status = Check.call(request).unwrap_err();
            assert!(
                matches!(Refusal::from_status(&status), Some(Refusal::UnsupportedProtocol(it)) if it.max == PROTOCOL_MAX)
            );
        }
        assert!(Check.call(Announce.call(Request::new(())).unwrap()).is_ok());
    }
}
