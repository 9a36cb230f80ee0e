//! What one check found.

use serde::Serialize;
use std::fmt;

/// How it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    Ok,
    /// Works, but slower or less safe than it could.
    Warn,
    /// Quarry does not work so.
    Fail,
}

/// One line of the report.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(super) struct Finding {
    pub(super) check: &'static str,
    pub(super) state: State,
    /// What was found.
    pub(super) found: String,
    /// How to mend it; absent if all is well.
    pub(super) remedy: Option<String>,
}

impl Finding {
    pub(super) fn ok(check: &'static str, found: impl ToString) -> Self {
        Self { check, state: State::Ok, found: found.to_string(), remedy: None }
    }
    pub(super) fn warn(check: &'static str, found: impl ToString, remedy: impl ToString) -> Self {
        Self { check, state: State::Warn, found: found.to_string(), remedy: Some(remedy.to_string()) }
    }
    pub(super) fn fail(check: &'static str, found: impl ToString, remedy: impl ToString) -> Self {
        Self { check, state: State::Fail, found: found.to_string(), remedy: Some(remedy.to_string()) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Ok => "ok",
            State::Warn => "warn",
            State::Fail => "FAIL",
        };
        write!(f, "{state:<5} {:<12} {}", self.check, self.found)?;
        match &self.remedy {
            Some(remedy) => write!(f, "\n{:19}-> {remedy}", ""),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_a_line_with_its_remedy_below() {
        assert_eq!(Finding::ok("disk", "fine").to_string(), "ok    disk         fine");
        let shown = Finding::fail("disk", "full", "delete").to_string();
        assert_eq!(shown, "FAIL  disk         full\n                   -> delete");
        let json = serde_json::to_value(Finding::warn("disk", "slow", "buy")).unwrap();
        assert_eq!((&json["state"], &json["remedy"]), (&"warn".into(), &"buy".into()));
    }
}
