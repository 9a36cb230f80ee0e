//! The end of a command on several keys: each key has its row, and the command one exit code.

use crate::exit::{Code, Failure};
use serde_json::{Value, json};

/// Counts the keys that failed and keeps the failure that decides.
#[derive(Default)]
pub(super) struct Tally {
    keys: usize,
    failed: usize,
    worst: Option<(String, Failure)>,
}

impl Tally {
    /// A key went well.
    pub(super) fn good(&mut self) {
        self.keys += 1;
    }

    /// A key failed.
    pub(super) fn bad(&mut self, key: String, failure: Failure) {
        self.keys += 1;
        self.failed += 1;
        // An error outweighs a key that was not there; of equals the first counts.
        if self.worst.as_ref().is_none_or(|(_, worst)| worst.code == Code::NotFound && failure.code != Code::NotFound) {
            self.worst = Some((key, failure));
        }
    }

    /// How the command ends.
    pub(super) fn end(self) -> Result<(), Failure> {
        match self.worst {
            None => Ok(()),
            Some((_, failure)) if self.keys == 1 => Err(failure),
            Some((key, failure)) => {
                let (failed, keys) = (self.failed, self.keys);
                Err(failure.about(|message| format!("{failed} of {keys} keys failed, first {key}: {message}")))
            }
        }
    }
}

/// The failure as a field of the key's row.
pub(super) fn of_row(failure: &Failure) -> Value {
    let mut error = failure.json();
    json!({ "error": error["error"].take() })
}

/// There is no such key.
pub(super) fn missing(key: &str) -> Failure {
    Failure::new(Code::NotFound, format!("there is no key {key}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_outweighs_missing_keys_and_the_first_of_equals_decides() {
        let mut tally = Tally::default();
        tally.good();
        tally.bad("a".into(), missing("a"));
        tally.bad("b".into(), Failure::new(Code::NoSpace, "full"));
        tally.bad("c".into(), Failure::error("other"));
        let failure = tally.end().unwrap_err();
        assert_eq!(
            (failure.code, failure.to_string()),
            (Code::NoSpace, "3 of 4 keys failed, first b: full".to_owned())
        );
    }

    #[test]
    fn one_key_that_fails_is_reported_as_it_is() {
        let mut tally = Tally::default();
        tally.bad("a".into(), missing("a"));
        assert_eq!(tally.end().unwrap_err().to_string(), "there is no key a");
        assert!(Tally::default().end().is_ok());
    }
}
