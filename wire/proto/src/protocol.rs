//! The version check of each call: the header `quarry-protocol`, set by every client and checked by every server. Calls also carry on the
//! request id in whose scope they are made.

use crate::{
    call_id::{self, CallId},
    refusal::Refusal,
    v1,
};
use quarry_wire::limits::{PROTOCOL_MAX, PROTOCOL_MIN};
use tonic::{Request, Status, metadata::AsciiMetadataValue, service::Interceptor};

/// Name of the header: the versions that the caller speaks, as `7` or `5-7`, both ends included.
pub const HEADER: &str = "quarry-protocol";

/// Adds the versions and the request id to every call of a client.
#[derive(Clone, Copy, Debug, Default)]
pub struct Announce;

impl Interceptor for Announce {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert(HEADER, announced(PROTOCOL_MIN, PROTOCOL_MAX));
        if let Some(id) = CallId::current() {
            request.metadata_mut().insert(call_id::HEADER, id.header());
        }
        Ok(request)
    }
}

/// Refuses calls of versions of which this build speaks none. Of two builds that have a version in common each may call the other, so that the
/// processes of a cluster can be replaced one by one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Check;

impl Interceptor for Check {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let (least, most) = request.metadata().get(HEADER).and_then(spoken).unwrap_or_default();
        if least <= PROTOCOL_MAX && most >= PROTOCOL_MIN {
            return Ok(request);
        }
        let refusal = v1::UnsupportedProtocol { found: most, min: PROTOCOL_MIN, max: PROTOCOL_MAX };
        Err(Refusal::UnsupportedProtocol(refusal).into_status())
    }
}

fn announced(least: u32, most: u32) -> AsciiMetadataValue {
    if least == most {
        return most.into();
    }
    format!("{least}-{most}").parse().expect("digits and a hyphen are ASCII")
}

/// The versions in a header, the lowest and the highest.
fn spoken(value: &AsciiMetadataValue) -> Option<(u32, u32)> {
    let text = value.to_str().ok()?;
    let (least, most) = text.split_once('-').unwrap_or((text, text));
    let (least, most) = (least.parse().ok()?, most.parse().ok()?);
    (least <= most).then_some((least, most))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(header: Option<AsciiMetadataValue>) -> Result<(), Option<Refusal>> {
        let mut request = Request::new(());
        if let Some(header) = header {
            request.metadata_mut().insert(HEADER, header);
        }
        Check.call(request).map(drop).map_err(|status| Refusal::from_status(&status))
    }

    #[test]
    fn a_call_of_other_versions_or_of_none_is_refused_with_the_versions_spoken() {
        let above = PROTOCOL_MAX + 1;
        for (header, found) in [
            (None, 0),
            (Some(announced(0, 0)), 0),
            (Some(announced(above, above)), above),
            (Some(announced(above, above + 7)), above + 7),
            (Some("7-5".parse().unwrap()), 0),
            (Some("1-".parse().unwrap()), 0),
            (Some("-1".parse().unwrap()), 0),
            (Some("one".parse().unwrap()), 0),
        ] {
            let expected = v1::UnsupportedProtocol { found, min: PROTOCOL_MIN, max: PROTOCOL_MAX };
            assert_eq!(call(header.clone()), Err(Some(Refusal::UnsupportedProtocol(expected))), "{header:?}");
        }
    }

    #[test]
    fn builds_that_have_one_version_in_common_may_call_each_other() {
        for header in [announced(PROTOCOL_MAX, PROTOCOL_MAX + 1), announced(0, PROTOCOL_MIN), announced(0, u32::MAX)] {
            assert_eq!(call(Some(header)), Ok(()));
        }
        assert!(Check.call(Announce.call(Request::new(())).unwrap()).is_ok());
    }
}
