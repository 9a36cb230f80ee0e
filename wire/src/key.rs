//! Keys and the shard that they hash to.

use crate::{
    ids::{NamespaceId, ShardId},
    limits::KEY_BYTES_MAX,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sha2::{Digest, Sha256};
use std::fmt;
use triomphe::ThinArc;

/// A key: 1 to 512 bytes, any bytes. Cloning is cheap: clones share the bytes, and each is one pointer.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(ThinArc<(), u8>);

/// Why bytes are not a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a key has 1 to {KEY_BYTES_MAX} bytes, found {found}{}", if *found > KEY_BYTES_MAX { ": shorten it, or hash its long part" } else { "" })]
pub struct KeyLengthError {
    /// How many bytes there were.
    pub found: usize,
}

impl Key {
    /// Takes 1 to 512 bytes.
    ///
    /// # Errors
    /// [`KeyLengthError`] for any other length.
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self, KeyLengthError> {
        let bytes = bytes.as_ref();
        if bytes.is_empty() || bytes.len() > KEY_BYTES_MAX {
            return Err(KeyLengthError { found: bytes.len() });
        }
        Ok(Self(ThinArc::from_header_and_slice((), bytes)))
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0.slice
    }

    /// What is hashed to find the shard: the bytes inside the first `{...}` if there are any, else the whole key. So keys that share a tag
    /// share a shard.
    #[must_use]
    pub fn routing_bytes(&self) -> &[u8] {
        let bytes = self.as_bytes();
        let Some(open) = bytes.iter().position(|byte| *byte == b'{') else { return bytes };
        let rest = &bytes[open + 1..];
        match rest.iter().position(|byte| *byte == b'}') {
            Some(close) if close > 0 => &rest[..close],
            _ => bytes,
        }
    }

    /// The shard of this key among `shards` (at least one). Shards count from 1.
    ///
    /// # Panics
    /// If `shards` is 0: a cluster has at least one, checked when it is made.
    #[must_use]
    pub fn shard(&self, namespace: NamespaceId, shards: u32) -> ShardId {
        assert!(shards > 0, "a cluster has at least one shard");
        if shards == 1 {
            return ShardId(1);
        }
        let mut hash = Sha256::new();
        hash.update(b"quarry-shard-v1");
        hash.update(namespace.0.to_le_bytes());
        hash.update(self.routing_bytes());
        let digest = hash.finalize();
        let mut first = [0; 8];
        first.copy_from_slice(&digest[..8]);
        let index = u64::from_le_bytes(first) % u64::from(shards);
        ShardId(1 + u32::try_from(index).expect("a remainder of a u32 fits in a u32"))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.as_bytes().escape_ascii())
    }
}
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key(\"{self}\")")
    }
}
impl AsRef<[u8]> for Key {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}
impl Serialize for Key {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.as_bytes())
    }
}
impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visit;
        impl<'de> de::Visitor<'de> for Visit {
            type Value = Key;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "1 to {KEY_BYTES_MAX} bytes")
            }
            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Key, E> {
                Key::new(bytes).map_err(E::custom)
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Key, A::Error> {
                let mut bytes = Vec::new();
                while let Some(byte) = seq.next_element::<u8>()? {
                    bytes.push(byte);
                }
                Key::new(bytes).map_err(de::Error::custom)
            }
        }
        deserializer.deserialize_byte_buf(Visit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_1_to_512_bytes() {
        assert_eq!(Key::new(b""), Err(KeyLengthError { found: 0 }));
        assert!(Key::new([7; KEY_BYTES_MAX]).is_ok());
        assert_eq!(Key::new([7; KEY_BYTES_MAX + 1]), Err(KeyLengthError { found: KEY_BYTES_MAX + 1 }));
    }

    #[test]
    fn keys_with_one_tag_share_a_shard_whatever_stands_around_it() {
        let one = Key::new("seq{42}block-1").unwrap();
        let two = Key::new("{42}").unwrap();
        assert_eq!(one.routing_bytes(), b"42");
        assert_eq!(one.shard(NamespaceId(1), 64), two.shard(NamespaceId(1), 64));
        assert_eq!(Key::new("a{}b").unwrap().routing_bytes(), b"a{}b");
        assert_eq!(Key::new("a{b").unwrap().routing_bytes(), b"a{b");
    }

    #[test]
    fn the_hash_to_shards_never_changes() {
        let key = Key::new("some key").unwrap();
        assert_eq!(key.shard(NamespaceId(1), 1), ShardId(1));
        let spread: std::collections::BTreeSet<_> =
            (0..100).map(|n| Key::new(format!("k{n}")).unwrap().shard(NamespaceId(1), 8)).collect();
        assert_eq!(spread.len(), 8);
        // Written down once: a change of this value would send every stored key to another shard.
        assert_eq!(key.shard(NamespaceId(7), 1 << 20), ShardId(RECORDED));
    }
    const RECORDED: u32 = 732887;

    #[test]
    fn a_key_round_trips_through_postcard() {
        let key = Key::new([0, 255, 7]).unwrap();
        let bytes = postcard::to_allocvec(&key).unwrap();
        assert_eq!(postcard::from_bytes::<Key>(&bytes).unwrap(), key);
        assert!(postcard::from_bytes::<Key>(&[0]).is_err(), "an empty key does not decode");
    }
}
