//! Canonical bytes: the one way to write a statement down before it is signed.
//!
//! Little-endian, fixed-width fields, no optional parts. Reading is strict: every byte must be used and every field must have a value that
//! writing could have produced, so there is one encoding per statement.

/// Appends fields in order.
#[derive(Default, Debug, Clone)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Empty.
    #[must_use]
    pub fn new() -> Self {
        Self(Vec::with_capacity(256))
    }
    /// One byte.
    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }
    /// Two bytes.
    pub fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }
    /// Four bytes.
    pub fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }
    /// Eight bytes.
    pub fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }
    /// Bytes as they are.
    pub fn bytes(&mut self, value: &[u8]) {
        self.0.extend_from_slice(value);
    }
    /// All that was written.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Why bytes are not a statement.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DecodeError {
    /// Fewer bytes than the layout has.
    #[error("the {what} is cut short: {needed} more bytes were expected, {left} are left")]
    Short {
        /// What was being read.
        what: &'static str,
        /// Bytes that the next field needs.
        needed: usize,
        /// Bytes that were left.
        left: usize,
    },
    /// More bytes than the layout has.
    #[error("{extra} bytes follow the end of the {what}")]
    Trailing {
        /// What was being read.
        what: &'static str,
        /// Bytes left over.
        extra: usize,
    },
    /// A field has a value that no writer produces.
    #[error("the field {field} of the {what} cannot be {found}")]
    Field {
        /// What was being read.
        what: &'static str,
        /// Which field.
        field: &'static str,
        /// Its value.
        found: u64,
    },
}

/// Takes fields in order.
#[derive(Debug)]
pub struct Reader<'a> {
    what: &'static str,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads a `what` from `bytes`.
    #[must_use]
    pub const fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Self { what, rest: bytes }
    }
    /// The next `count` bytes.
    ///
    /// # Errors
    /// [`DecodeError::Short`].
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let Some((taken, rest)) = self.rest.split_at_checked(count) else {
            return Err(DecodeError::Short { what: self.what, needed: count, left: self.rest.len() });
        };
        self.rest = rest;
        Ok(taken)
    }
    /// The next `N` bytes.
    ///
    /// # Errors
    /// [`DecodeError::Short`].
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        Ok(self.bytes(N)?.try_into().expect("bytes(N) returns N bytes"))
    }
    /// One byte.
    ///
    /// # Errors
    /// [`DecodeError::Short`].
    pub fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(self.array::<1>()?[0])
    }
    /// Two bytes.
    ///
    /// # Errors
    /// [`DecodeError::Short`].
    pub fn u16(&mut self) -> Result<u16, DecodeError> {
        Ok(u16::from_le_bytes(self.array()?))
    }
    /// Four bytes.
    ///
    /// # Errors
    /// [`DecodeError::Short`].
    pub fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array()?))
    }
    /// Eight bytes.
    ///
    /// # Errors
    /// [`DecodeError::Short`].
    pub fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array()?))
    }
    /// A refusal of field `field` with the value `found`.
    #[must_use]
    pub const fn field(&self, field: &'static str, found: u64) -> DecodeError {
        DecodeError::Field { what: self.what, field, found }
    }
    /// `count` zero bytes.
    ///
    /// # Errors
    /// [`DecodeError::Short`], or [`DecodeError::Field`] if one of them is not zero.
    pub fn zeros(&mut self, field: &'static str, count: usize) -> Result<(), DecodeError> {
        match self.bytes(count)?.iter().find(|byte| **byte != 0) {
            Some(byte) => Err(self.field(field, u64::from(*byte))),
            None => Ok(()),
        }
    }
    /// Nothing may be left.
    ///
    /// # Errors
    /// [`DecodeError::Trailing`].
    pub const fn finish(self) -> Result<(), DecodeError> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(DecodeError::Trailing { what: self.what, extra: self.rest.len() })
        }
    }
}
