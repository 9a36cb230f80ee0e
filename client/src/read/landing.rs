//! Where a payload lands that is read without a copy: in the reader's own buffer, or in memory that is kept for values.

use crate::buffers::Buffer;
use bytes::Bytes;
use quarry_fabric::Span;
use std::sync::Arc;

/// Memory for one payload, in nobody's hands but its want's, and an operation's while that is under way.
#[derive(Debug)]
pub(crate) enum Landing {
    /// The reader's.
    Buffer(Buffer),
    /// The client's, to become the value itself.
    Kept(Arc<Span>),
}

impl Landing {
    /// For operations: whoever awaits their outcomes has the bytes for itself again.
    pub(crate) fn span(&self) -> &Arc<Span> {
        match self {
            Self::Buffer(buffer) => buffer.span(),
            Self::Kept(span) => span,
        }
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        match self {
            Self::Buffer(buffer) => buffer.bytes(),
            Self::Kept(span) => Arc::get_mut(span).expect(SOLE).bytes(),
        }
    }

    /// The reader's buffer again, or what landed as a value.
    pub(crate) fn into_parts(self) -> (Option<Buffer>, Bytes) {
        match self {
            Self::Buffer(buffer) => (Some(buffer), Bytes::new()),
            Self::Kept(span) => (None, Arc::into_inner(span).expect(SOLE).into_bytes()),
        }
    }
}

const SOLE: &str = "an operation lets go of its span before its outcome is told";
