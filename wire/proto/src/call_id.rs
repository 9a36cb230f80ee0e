//! The name under which one public call of a client appears in every log: the header `quarry-request-id`.
//!
//! The client draws it, every call to a server carries it, and whoever calls on carries it on: a task that runs in the scope of a [`CallId`]
//! sends it by itself (see [`crate::protocol::Announce`]). It only names: nothing is decided by it, and a malformed one is replaced, never an
//! error. It is not the `RequestId` of a command, by which a command is executed once.

use std::{fmt, sync::Arc};
use tonic::metadata::{Ascii, MetadataValue};

/// Name of the header.
pub const HEADER: &str = "quarry-request-id";
/// Longest id that is carried on, in bytes.
pub const CALL_ID_BYTES_MAX: usize = 32;

tokio::task_local! {
    static CURRENT: CallId;
}

/// The id of a call: 1 to 32 ASCII letters, digits, `-` and `_`. Cloning is cheap.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct CallId(Arc<str>);

impl CallId {
    /// An id made of 64 random bits, as 16 hexadecimal digits.
    #[must_use]
    pub fn new(bits: u64) -> Self {
        Self(format!("{bits:016x}").into())
    }

    /// The id that a header holds; none if it is not one.
    #[must_use]
    pub fn parse(header: &[u8]) -> Option<Self> {
        let fits = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if header.is_empty() || header.len() > CALL_ID_BYTES_MAX || !header.iter().all(fits) {
            return None;
        }
        std::str::from_utf8(header).ok().map(|text| Self(text.into()))
    }

    /// The id in whose scope this task runs.
    #[must_use]
    pub fn current() -> Option<Self> {
        CURRENT.try_with(Clone::clone).ok()
    }

    /// Runs `work` in the scope of this id. A task that `work` spawns is outside, unless it is given a scope of its own.
    pub fn scope<F: Future>(self, work: F) -> impl Future<Output = F::Output> {
        CURRENT.scope(self, work)
    }

    /// Its text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn header(&self) -> MetadataValue<Ascii> {
        self.0.parse().expect("ids hold letters, digits, '-' and '_' alone")
    }
}

impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Announce;
    use tonic::{Request, service::Interceptor as _};

    #[test]
    fn an_id_has_1_to_32_letters_digits_dashes_and_underscores() {
        let longest = "a".repeat(CALL_ID_BYTES_MAX);
        for text in ["0", "Az-09_", CallId::new(7).as_str(), &longest] {
            assert_eq!(CallId::parse(text.as_bytes()).unwrap().as_str(), text);
        }
        assert_eq!(CallId::new(u64::MAX).as_str(), "ffffffffffffffff");
        assert_eq!(CallId::new(1).as_str(), "0000000000000001");
        let too_long = "a".repeat(CALL_ID_BYTES_MAX + 1);
        for wrong in ["", " ", "a b", "a\n", "\u{e4}", "a;b", "\"", &too_long] {
            assert_eq!(CallId::parse(wrong.as_bytes()), None, "{wrong:?}");
        }
        assert_eq!(CallId::parse(&[0xff]), None);
    }

    #[tokio::test]
    async fn calls_made_in_the_scope_of_an_id_carry_it_and_others_carry_none() {
        let carried = || {
            let request = Announce.call(Request::new(())).unwrap();
            request.metadata().get(HEADER).map(|value| value.as_bytes().to_vec())
        };
        assert_eq!(carried(), None);
        let inside = CallId::new(0xabc).scope(async { (carried(), CallId::current()) }).await;
        assert_eq!(inside, (Some(b"0000000000000abc".to_vec()), Some(CallId::new(0xabc))));
        assert_eq!(CallId::current(), None);
    }
}
