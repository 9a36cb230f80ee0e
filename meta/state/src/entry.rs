//! Log entries: what Raft carries.
//!
//! ```text
//! entry = format (1) ‖ postcard of (log time, commands)
//! ```
//! All commands of one entry share a stamp. An entry has at most [`COMMAND_BYTES_MAX`] bytes; who gathers commands splits before that.

use quarry_wire::{limits::COMMAND_BYTES_MAX, units::LogTime};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Format of the bytes after the first.
const FORMAT: u8 = 1;

/// Commands that share one log entry and one stamp.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Entry<C> {
    /// Log time of the entry.
    pub at: LogTime,
    /// What to apply, in this order.
    pub commands: Vec<C>,
}

/// Why an entry cannot be written or read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum EntryError {
    /// It is too large for the log.
    #[error("an entry has at most {limit} bytes, this one has {found}: split it")]
    TooLarge {
        /// Most bytes.
        limit: usize,
        /// Bytes found.
        found: usize,
    },
    /// There is no first byte.
    #[error("an entry has at least one byte")]
    Empty,
    /// Another build wrote it.
    #[error("entry format {found} is not the format {expected} that this build reads: do not downgrade a meta node")]
    Format {
        /// The format that this build reads.
        expected: u8,
        /// The format found.
        found: u8,
    },
    /// The bytes are no entry of this kind.
    #[error("the entry cannot be decoded: {why}")]
    Body {
        /// What the decoder said.
        why: String,
    },
}

/// The bytes of one command, to be put together with those of others by [`join`].
///
/// # Errors
/// [`EntryError::Body`] if the command has no encoding, which plain data always has.
pub fn encode_command<C: Serialize>(command: &C) -> Result<Vec<u8>, EntryError> {
    postcard::to_allocvec(command).map_err(|error| EntryError::Body { why: error.to_string() })
}

/// The bytes of the entry of these commands, each encoded once and for all by [`encode_command`]: the same as those of [`Entry::encode`].
///
/// # Errors
/// [`EntryError::TooLarge`].
pub fn join<'a>(at: LogTime, commands: impl ExactSizeIterator<Item = &'a [u8]>) -> Result<Vec<u8>, EntryError> {
    let mut bytes = Vec::with_capacity(COMMAND_BYTES_MAX);
    bytes.push(FORMAT);
    // A sequence is its length and then its elements, so a head with a length and no element is followed by the elements.
    let head = postcard::to_extend(&(at, commands.len()), bytes);
    bytes = head.map_err(|error| EntryError::Body { why: error.to_string() })?;
    for command in commands {
        bytes.extend_from_slice(command);
    }
    within_limit(bytes)
}

fn within_limit(bytes: Vec<u8>) -> Result<Vec<u8>, EntryError> {
    if bytes.len() > COMMAND_BYTES_MAX {
        return Err(EntryError::TooLarge { limit: COMMAND_BYTES_MAX, found: bytes.len() });
    }
    Ok(bytes)
}

impl<C: Serialize> Entry<C> {
    /// Its bytes.
    ///
    /// # Errors
    /// [`EntryError::TooLarge`].
    pub fn encode(&self) -> Result<Vec<u8>, EntryError> {
        let bytes =
            postcard::to_extend(self, vec![FORMAT]).map_err(|error| EntryError::Body { why: error.to_string() })?;
        within_limit(bytes)
    }
}

impl<C: DeserializeOwned> Entry<C> {
    /// Reads what [`Entry::encode`] wrote.
    ///
    /// # Errors
    /// [`EntryError`]; every byte must be used.
    pub fn decode(bytes: &[u8]) -> Result<Self, EntryError> {
        if bytes.len() > COMMAND_BYTES_MAX {
            return Err(EntryError::TooLarge { limit: COMMAND_BYTES_MAX, found: bytes.len() });
        }
        let (format, body) = bytes.split_first().ok_or(EntryError::Empty)?;
        if *format != FORMAT {
            return Err(EntryError::Format { expected: FORMAT, found: *format });
        }
        match postcard::take_from_bytes(body) {
            Ok((entry, [])) => Ok(entry),
            Ok((_, rest)) => Err(EntryError::Body { why: format!("{} bytes follow its end", rest.len()) }),
            Err(error) => Err(EntryError::Body { why: error.to_string() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn commands_encoded_one_by_one_make_the_same_entry(at in any::<u64>(), commands in proptest::collection::vec("[a-z]{0,40}", 0..300)) {
            let at = LogTime(at);
            let parts: Vec<Vec<u8>> = commands.iter().map(|command| encode_command(command).unwrap()).collect();
            let joined = join(at, parts.iter().map(Vec::as_slice)).unwrap();
            let entry = Entry { at, commands };
            prop_assert_eq!(&joined, &entry.encode().unwrap());
            prop_assert_eq!(Entry::decode(&joined).unwrap(), entry);
        }
    }

    #[test]
    fn more_commands_than_an_entry_holds_are_refused() {
        let part = encode_command(&vec![7_u8; COMMAND_BYTES_MAX / 2]).unwrap();
        let whole = [part.as_slice(), part.as_slice()];
        let refused = join(LogTime(1), whole.into_iter());
        assert!(matches!(refused, Err(EntryError::TooLarge { limit: COMMAND_BYTES_MAX, .. })), "{refused:?}");
    }
}
