//! Between messages and checked types. Into a message always works; out of one is checked, and what does not fit is a [`Refusal`].

use crate::{refusal::Refusal, v1};
use bytes::Bytes;
use quarry_wire::{
    frame::FrameKind,
    grant::Class,
    ids::{
        FeedNumber, Generation, GrantId, Incarnation, LendNumber, NodeId, Ordinal, PinId, RegionId, RegionIndex,
        ShardId, WriterId,
    },
    key::Key,
    signed::{Signed, Statement},
    version::{HybridClock, Version},
};

/// The field, or a refusal that names it.
///
/// # Errors
/// [`Refusal::Malformed`] if it is absent.
pub fn required<T>(field: &str, value: Option<T>) -> Result<T, Refusal> {
    value.ok_or_else(|| Refusal::malformed(field, "present", "nothing"))
}

impl From<Ordinal> for v1::Ordinal {
    fn from(it: Ordinal) -> Self {
        Self { generation: it.generation.0, number: it.number }
    }
}
impl From<v1::Ordinal> for Ordinal {
    fn from(it: v1::Ordinal) -> Self {
        Self { generation: Generation(it.generation), number: it.number }
    }
}
macro_rules! ordinal_newtype {
    ($($name:ident),*) => { $(
        impl From<$name> for v1::Ordinal {
            fn from(it: $name) -> Self { it.0.into() }
        }
        impl From<v1::Ordinal> for $name {
            fn from(it: v1::Ordinal) -> Self { Self(it.into()) }
        }
    )* };
}
ordinal_newtype!(Incarnation, LendNumber, FeedNumber, PinId);

impl From<RegionId> for v1::RegionId {
    fn from(it: RegionId) -> Self {
        Self { node: it.node.0, index: it.index.0 }
    }
}
impl From<v1::RegionId> for RegionId {
    fn from(it: v1::RegionId) -> Self {
        Self { node: NodeId(it.node), index: RegionIndex(it.index) }
    }
}
impl From<GrantId> for v1::GrantId {
    fn from(it: GrantId) -> Self {
        Self { shard: it.shard.0, sequence: Some(it.sequence.into()) }
    }
}
/// The grant named by `message`.
///
/// # Errors
/// [`Refusal::Malformed`] if it or its sequence is absent.
pub fn grant_id(message: Option<v1::GrantId>) -> Result<GrantId, Refusal> {
    let message = required("grant", message)?;
    Ok(GrantId { shard: ShardId(message.shard), sequence: required("grant.sequence", message.sequence)?.into() })
}

impl From<Version> for v1::Version {
    fn from(it: Version) -> Self {
        Self { clock: it.clock.0, writer: Bytes::copy_from_slice(&it.writer.0) }
    }
}
impl TryFrom<v1::Version> for Version {
    type Error = Refusal;
    fn try_from(it: v1::Version) -> Result<Self, Refusal> {
        Ok(Self { clock: HybridClock(it.clock), writer: writer_id(&it.writer)? })
    }
}

/// The writer named by 16 bytes.
///
/// # Errors
/// [`Refusal::Malformed`] for any other number of bytes.
pub fn writer_id(bytes: &[u8]) -> Result<WriterId, Refusal> {
    array("writer", bytes).map(WriterId)
}

/// Exactly `N` bytes.
///
/// # Errors
/// [`Refusal::Malformed`] for any other number.
pub fn array<const N: usize>(field: &str, bytes: &[u8]) -> Result<[u8; N], Refusal> {
    bytes
        .try_into()
        .map_err(|_| Refusal::malformed(field, format_args!("{N} bytes"), format_args!("{} bytes", bytes.len())))
}

/// The key in `bytes`.
///
/// # Errors
/// [`Refusal::Malformed`] if it is empty or too long.
pub fn key(bytes: &[u8]) -> Result<Key, Refusal> {
    Key::new(bytes).map_err(|wrong| Refusal::malformed("key", "1 to 512 bytes", format_args!("{} bytes", wrong.found)))
}

/// The signed statement in `bytes`, its signature not yet checked.
///
/// # Errors
/// [`Refusal::Malformed`] if the bytes are not such a statement.
pub fn signed<S: Statement>(bytes: &[u8]) -> Result<Signed<S>, Refusal> {
    Signed::decode(bytes).map_err(|wrong| Refusal::malformed(S::NAME, "a signed statement", wrong))
}

impl From<FrameKind> for v1::FrameKind {
    fn from(it: FrameKind) -> Self {
        match it {
            FrameKind::Value => Self::Value,
            FrameKind::Page => Self::Page,
            FrameKind::Manifest => Self::Manifest,
        }
    }
}
impl From<v1::FrameKind> for FrameKind {
    fn from(it: v1::FrameKind) -> Self {
        match it {
            v1::FrameKind::Value => Self::Value,
            v1::FrameKind::Page => Self::Page,
            v1::FrameKind::Manifest => Self::Manifest,
        }
    }
}
/// The frame kind with this number.
///
/// # Errors
/// [`Refusal::Malformed`] for a number that stands for none.
pub fn frame_kind(number: i32) -> Result<FrameKind, Refusal> {
    v1::FrameKind::try_from(number)
        .map(Into::into)
        .map_err(|_| Refusal::malformed("kind", "a known frame kind", number))
}

impl From<Class> for v1::Class {
    fn from(it: Class) -> Self {
        match it {
            Class::Cache => Self::Cache,
            Class::Durable => Self::Durable,
        }
    }
}
/// The class with this number.
///
/// # Errors
/// [`Refusal::Malformed`] for a number that stands for none.
pub fn class(number: i32) -> Result<Class, Refusal> {
    match v1::Class::try_from(number) {
        Ok(v1::Class::Cache) => Ok(Class::Cache),
        Ok(v1::Class::Durable) => Ok(Class::Durable),
        Ok(v1::Class::Unspecified) | Err(_) => Err(Refusal::malformed("class", "cache (1) or durable (2)", number)),
    }
}
