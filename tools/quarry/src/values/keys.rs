//! How keys are written on a command line and printed: any bytes can be, one way each.
//!
//! Given: the bytes of the argument, or hexadecimal digits with `--key-hex`. Printed: UTF-8 as it is, control characters and all bytes that
//! are not UTF-8 as `\xNN`, a backslash as `\\`; in JSON `key` is the text or, if the key is not UTF-8, null, with `key_hex` beside it.

use crate::{cli::KeyForm, exit::Failure};
use quarry_client::Key;
use serde_json::{Map, Value};
use std::{ffi::OsStr, fmt::Write as _, os::unix::ffi::OsStrExt as _};

/// Letters of what was given as a key that an error shows.
const SHOWN_MAX: usize = 40;

impl KeyForm {
    /// The key that an argument means.
    pub(super) fn read(&self, given: &OsStr) -> Result<Key, Failure> {
        let bytes = self.bytes(given)?;
        let shown = || shortened(&given.to_string_lossy());
        Key::new(bytes).map_err(|wrong| Failure::usage(format!("the key {:?}: {wrong}", shown())))
    }

    /// The keys that arguments mean.
    pub(super) fn read_all(&self, given: &[impl AsRef<OsStr>]) -> Result<Vec<Key>, Failure> {
        given.iter().map(|given| self.read(given.as_ref())).collect()
    }

    /// The bytes that an argument means, for a prefix: those may be none.
    pub(super) fn bytes(&self, given: &OsStr) -> Result<Vec<u8>, Failure> {
        if !self.key_hex {
            return Ok(given.as_bytes().to_vec());
        }
        hex::decode(given.as_bytes()).map_err(|wrong| {
            let shown = shortened(&given.to_string_lossy());
            Failure::usage(format!("expected a key in hexadecimal, found {shown:?}: {wrong}"))
        })
    }

    /// The key as people see it.
    pub(super) fn text(&self, key: &Key) -> String {
        if self.key_hex { hex::encode(key.as_bytes()) } else { escaped(key.as_bytes()) }
    }

    /// An object about a key.
    pub(super) fn json(&self, key: &Key, rest: Value) -> Value {
        let text = std::str::from_utf8(key.as_bytes()).ok();
        let mut object = Map::new();
        object.insert("key".to_owned(), text.into());
        if self.key_hex || text.is_none() {
            object.insert("key_hex".to_owned(), hex::encode(key.as_bytes()).into());
        }
        if let Value::Object(rest) = rest {
            object.extend(rest);
        }
        Value::Object(object)
    }
}

/// What was given, as far as it fits in a message.
fn shortened(given: &str) -> String {
    match given.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{}...", &given[..end]),
        None => given.to_owned(),
    }
}

fn escaped(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    let code = |text: &mut String, bytes: &[u8]| {
        for byte in bytes {
            write!(text, "\\x{byte:02x}").expect("a string takes everything");
        }
    };
    for chunk in bytes.utf8_chunks() {
        for letter in chunk.valid().chars() {
            match letter {
                '\\' => text.push_str("\\\\"),
                control if control.is_control() => code(&mut text, control.encode_utf8(&mut [0; 4]).as_bytes()),
                other => text.push(other),
            }
        }
        code(&mut text, chunk.invalid());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const PLAIN: KeyForm = KeyForm { key_hex: false };
    const HEX: KeyForm = KeyForm { key_hex: true };

    #[test]
    fn every_key_is_printed_in_one_line_and_no_two_alike() {
        for (bytes, text) in [
            (&b"seq{42}/block-0"[..], "seq{42}/block-0"),
            ("schlüssel/鍵".as_bytes(), "schlüssel/鍵"),
            (b"a\nb\x1b[2J", "a\\x0ab\\x1b[2J"),
            (b"\xff\x00a", "\\xff\\x00a"),
            (b"\\xff", "\\\\xff"),
        ] {
            assert_eq!(PLAIN.text(&Key::new(bytes).unwrap()), text);
        }
    }

    #[test]
    fn hexadecimal_keys_are_read_as_they_are_printed() {
        let key = Key::new(b"\xff\x00a").unwrap();
        assert_eq!(HEX.text(&key), "ff0061");
        assert_eq!(HEX.read(OsStr::new("ff0061")).unwrap(), key);
        for wrong in ["f", "xx", ""] {
            assert_eq!(HEX.read(OsStr::new(wrong)).unwrap_err().code, crate::exit::Code::Usage, "{wrong}");
        }
    }

    #[test]
    fn a_key_that_cannot_be_one_is_shown_in_short_with_the_limit_and_what_was_found() {
        let told = |given: &str| PLAIN.read(OsStr::new(given)).unwrap_err().to_string();
        assert_eq!(told(""), "the key \"\": a key has 1 to 512 bytes, found 0");
        let long = told(&"ü".repeat(400));
        assert_eq!(
            long,
            format!(
                "the key \"{}...\": a key has 1 to 512 bytes, found 800: shorten it, or hash its long part",
                "ü".repeat(40)
            )
        );
    }

    #[test]
    fn json_has_the_text_of_a_key_and_its_bytes_where_there_is_no_text() {
        let json = |form: KeyForm, key: &[u8]| form.json(&Key::new(key).unwrap(), json!({ "bytes": 1 }));
        assert_eq!(json(PLAIN, b"a\n"), json!({ "key": "a\n", "bytes": 1 }));
        assert_eq!(json(PLAIN, b"\xff"), json!({ "key": null, "key_hex": "ff", "bytes": 1 }));
        assert_eq!(json(HEX, b"a"), json!({ "key": "a", "key_hex": "61", "bytes": 1 }));
    }
}
