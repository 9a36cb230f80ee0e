//! How a command ends: what it prints in which form, and when it fails one sentence, what to do about it, and an exit code that scripts can act on.
//!
//! The same for all our commands. Decides which error has which code; the commands decide what is an error.

use crate::{admin, backups::SaveError, local::LocalError, stderr};
use clap::{ValueEnum, error::ErrorKind};
use quarry_client::{CallError, ClusterError, ConnectError, DeleteError, GetError, NamespaceError, PutError};
use quarry_meta::backup::BackupError;
use quarry_proto::{refusal::Refusal, v1::node_refused::Reason};
use serde_json::{Value, json};
use std::{error::Error, ffi::OsString, io, path::Path, process::ExitCode};

/// The exit codes, as every help tells them.
pub const CODES_HELP: &str = "\
Exit codes:
  0  done
  1  error
  2  wrong usage
  3  not found: no such key, namespace, node, group or file
  4  conflict: exists already, a number that is used up, another version is current
  5  no space
  6  unavailable, or not done by its deadline

With -o json an error is one line of JSON on standard error:
  {\"error\": {\"code\": \"not_found\", \"exit_code\": 3, \"message\": .., \"hint\": .. or null}}";

/// In which form a command prints.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// For programs: one JSON document, or one per line where there are several.
    Json,
}

/// Why a command ends without having done what was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Code {
    /// None of the others.
    Error = 1,
    /// The command line cannot be meant.
    Usage = 2,
    /// There is no such key, namespace, node, group or file.
    NotFound = 3,
    /// It exists already, or its number was used, or another version is current.
    Conflict = 4,
    /// No memory or disk is left.
    NoSpace = 5,
    /// Nobody answered in time; the same may work later.
    Unavailable = 6,
}

impl Code {
    /// Its name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Usage => "usage",
            Self::NotFound => "not_found",
            Self::Conflict => "conflict",
            Self::NoSpace => "no_space",
            Self::Unavailable => "unavailable",
        }
    }
}

impl From<Code> for ExitCode {
    fn from(code: Code) -> Self {
        Self::from(code as u8)
    }
}

/// Why a command failed, and what can be done about it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// What scripts see.
    pub code: Code,
    message: String,
    hint: Option<String>,
}

impl Failure {
    /// With the hint that usually fits the code.
    pub fn new(code: Code, message: impl ToString) -> Self {
        let hint = match code {
            Code::Unavailable => {
                Some("quarry doctor --cluster FILE says which processes answer; --timeout waits longer".to_owned())
            }
            Code::NoSpace => Some("quarry top shows what is free; delete values, or add data nodes".to_owned()),
            Code::Error | Code::Usage | Code::NotFound | Code::Conflict => None,
        };
        Self { code, message: message.to_string(), hint }
    }
    /// An error without a code of its own.
    pub fn error(message: impl ToString) -> Self {
        Self::new(Code::Error, message)
    }
    /// An error whose code is that of what the system said, if that is its cause: a file that is missing is not found.
    pub fn of(error: impl Error + 'static) -> Self {
        let mut deepest: &(dyn Error + 'static) = &error;
        while let Some(source) = deepest.source() {
            deepest = source;
        }
        let code = deepest.downcast_ref::<io::Error>().map_or(Code::Error, of_system);
        Self::new(code, error)
    }
    /// What the system said of a file.
    pub fn of_file(path: &Path, wrong: &io::Error) -> Self {
        Self::new(of_system(wrong), format!("{}: {wrong}", path.display()))
    }
    /// A command line that cannot be meant.
    pub fn usage(message: impl ToString) -> Self {
        Self::new(Code::Usage, message)
    }
    /// Says what to do.
    #[must_use]
    pub fn hint(mut self, hint: impl ToString) -> Self {
        self.hint = Some(hint.to_string());
        self
    }

    /// The same with another message, made from this one.
    #[must_use]
    pub fn about(self, message: impl FnOnce(&str) -> String) -> Self {
        Self { message: message(&self.message), ..self }
    }

    /// What `-o json` prints.
    #[must_use]
    pub fn json(&self) -> Value {
        let Self { code, message, hint } = self;
        json!({ "error": { "code": code.name(), "exit_code": *code as u8, "message": message, "hint": hint } })
    }

    /// Says it on standard error, and how the process is to end.
    pub fn report(&self, program: &str, format: Format) -> ExitCode {
        match format {
            Format::Json => stderr::line(self.json()),
            Format::Text => {
                stderr::line(format_args!("{program}: {self}"));
                if let Some(hint) = &self.hint {
                    stderr::line(format_args!("  hint: {hint}"));
                }
            }
        }
        self.code.into()
    }
}

/// Says what is wrong with a command line, in the form that the line itself asks for; or prints the help or version that it asks for.
#[must_use]
pub fn usage(wrong: &clap::Error, program: &str) -> ExitCode {
    if matches!(wrong.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        // A reader of the help that went away is no error.
        let _ = wrong.print();
        return ExitCode::SUCCESS;
    }
    let said = wrong.to_string();
    let mut failure = Failure::usage(said.trim_start_matches("error: ").trim_end());
    if wrong.kind() == ErrorKind::MissingRequiredArgument && said.contains("--cluster") {
        failure = failure.hint(CLUSTER_HINT);
    }
    if wants_json(std::env::args_os()) {
        return failure.report(program, Format::Json);
    }
    // In colours, if standard error is a terminal.
    let _ = wrong.print();
    if let Some(hint) = &failure.hint {
        stderr::line(format_args!("\n  hint: {hint}"));
    }
    Code::Usage.into()
}

/// Whether a command line that could not be understood asks for JSON.
fn wants_json(words: impl IntoIterator<Item = OsString>) -> bool {
    let mut before = OsString::new();
    for word in words {
        if word == "--" {
            return false;
        }
        if word == "-ojson" || word == "-o=json" || word == "--output=json" {
            return true;
        }
        if word == "json" && (before == "-o" || before == "--output") {
            return true;
        }
        before = word;
    }
    false
}

/// What to do without a cluster file.
const CLUSTER_HINT: &str = "name the cluster file, or a quarry:// URL, with --cluster or QUARRY_CLUSTER; quarry up makes a cluster and prints the path of its file";

fn of_system(error: &io::Error) -> Code {
    match error.kind() {
        io::ErrorKind::NotFound => Code::NotFound,
        io::ErrorKind::AlreadyExists => Code::Conflict,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Code::NoSpace,
        _ => Code::Error,
    }
}

/// A refusal means the same whichever command hears it.
fn of_refusal(refusal: &Refusal) -> Code {
    match refusal {
        Refusal::NotLeader(_)
        | Refusal::NotReady(_)
        | Refusal::TooManyRequests(_)
        | Refusal::TooFewNodes(_)
        | Refusal::Indeterminate(_) => Code::Unavailable,
        Refusal::NoSpace(_) => Code::NoSpace,
        Refusal::UnknownNamespace(_) => Code::NotFound,
        Refusal::NamespaceExists(_) | Refusal::AlreadyBootstrapped(_) => Code::Conflict,
        Refusal::NodeRefused(it) => match it.reason() {
            Reason::Unknown | Reason::NotAMember | Reason::NotUnderWay => Code::NotFound,
            Reason::Retired | Reason::AlreadyMember | Reason::OtherRole | Reason::UnderWay => Code::Conflict,
            Reason::Silent | Reason::Behind | Reason::NoQuorum => Code::Unavailable,
            _ => Code::Error,
        },
        _ => Code::Error,
    }
}

fn of_call(error: &CallError) -> Code {
    match error {
        CallError::Unreachable { .. } | CallError::Deadline { .. } | CallError::Indeterminate { .. } => {
            Code::Unavailable
        }
        CallError::UnknownNamespace { .. } => Code::NotFound,
        CallError::Refused(refusal) => of_refusal(refusal),
        _ => Code::Error,
    }
}

/// What is shown, with the code and the hint of the call that failed.
fn by_call(call: &CallError, shown: &impl ToString) -> Failure {
    let failure = Failure::new(of_call(call), shown.to_string());
    if failure.code == Code::NotFound {
        return failure.hint("quarry namespace create NAME makes a namespace, quarry namespace list shows all");
    }
    if let CallError::Refused(refusal) = call
        && matches!(**refusal, Refusal::TooManyRequests(_))
    {
        return failure.hint(
            "quarry top shows who has what; [limits] in the configuration of that node sets what clients may use up",
        );
    }
    failure
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::of(error)
    }
}
impl From<LocalError> for Failure {
    fn from(error: LocalError) -> Self {
        if matches!(error, LocalError::Deadline { .. }) { Self::new(Code::Unavailable, error) } else { Self::of(error) }
    }
}
impl From<ClusterError> for Failure {
    fn from(error: ClusterError) -> Self {
        let missing = matches!(error, ClusterError::File { .. });
        let failure = Self::of(error);
        if missing { failure.hint(CLUSTER_HINT) } else { failure }
    }
}
impl From<admin::CallError> for Failure {
    fn from(error: admin::CallError) -> Self {
        let code = match error.refusal() {
            Some(refusal) => of_refusal(refusal),
            None if error.is_passing() => Code::Unavailable,
            None => Code::Error,
        };
        Self::new(code, error)
    }
}
impl From<SaveError> for Failure {
    fn from(error: SaveError) -> Self {
        match error {
            SaveError::Call(call) => call.into(),
            SaveError::Backup(BackupError::Exists { .. }) => Self::new(Code::Conflict, error),
            SaveError::Deadline { .. } => Self::new(Code::Unavailable, error),
            SaveError::Mixed { .. } | SaveError::Backup(_) => Self::of(error),
        }
    }
}
impl From<CallError> for Failure {
    fn from(error: CallError) -> Self {
        by_call(&error, &error)
    }
}
impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Self {
        match &error {
            ConnectError::Call(call) => by_call(call, &error),
            ConnectError::Fabric(_) => Self::error(&error).hint("quarry doctor says what this machine lacks"),
            _ => Self::error(&error),
        }
    }
}
impl From<NamespaceError> for Failure {
    fn from(error: NamespaceError) -> Self {
        match &error {
            NamespaceError::Exists { .. } => Self::new(Code::Conflict, error),
            NamespaceError::Call(call) => by_call(call, &error),
            _ => Self::error(error),
        }
    }
}
impl From<PutError> for Failure {
    fn from(error: PutError) -> Self {
        let code = match &error {
            PutError::Exists { .. } => {
                return Self::new(Code::Conflict, error).hint("--replace writes also if the key exists");
            }
            PutError::StaleVersion { .. } | PutError::CompareFailed { .. } => Code::Conflict,
            PutError::NoSpace { .. } => Code::NoSpace,
            PutError::TooFewHolders { .. } | PutError::Deadline { .. } | PutError::Indeterminate { .. } => {
                Code::Unavailable
            }
            PutError::Call(call) => return by_call(call, &error),
            _ => Code::Error,
        };
        Self::new(code, error)
    }
}
impl From<GetError> for Failure {
    fn from(error: GetError) -> Self {
        let code = match &error {
            GetError::Unreachable { .. } | GetError::NotResident | GetError::Deadline { .. } | GetError::PinOver => {
                Code::Unavailable
            }
            GetError::Call(call) => return by_call(call, &error),
            _ => Code::Error,
        };
        Self::new(code, error)
    }
}
impl From<DeleteError> for Failure {
    fn from(error: DeleteError) -> Self {
        let code = match &error {
            DeleteError::CompareFailed { .. } => Code::Conflict,
            DeleteError::Indeterminate { .. } => Code::Unavailable,
            DeleteError::Call(call) => return by_call(call, &error),
            _ => Code::Error,
        };
        Self::new(code, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_wire::version::Version;

    #[test]
    fn the_exit_code_tells_conflicts_full_memory_and_unreachable_clusters_apart() {
        let put = |error: PutError| Failure::from(error).code;
        assert_eq!(put(PutError::Exists { current: Version::default() }), Code::Conflict);
        assert_eq!(put(PutError::NoSpace { resource: "memory".into(), retry_after: None }), Code::NoSpace);
        assert_eq!(put(PutError::Deadline { last: String::new() }), Code::Unavailable);
        let unreachable = CallError::Unreachable { what: "metas".into(), last: String::new() };
        assert_eq!(Failure::from(ConnectError::Call(unreachable)).code, Code::Unavailable);
        let unknown = CallError::UnknownNamespace { what: "kv".into() };
        assert_eq!(put(PutError::Call(unknown.clone())), Code::NotFound);
        assert_eq!(Failure::from(GetError::Call(unknown)).code, Code::NotFound);
        assert_eq!(Failure::from(NamespaceError::Exists { name: "kv".into() }).code, Code::Conflict);
        assert_eq!(put(PutError::TooLarge { limit: 1, found: 2 }), Code::Error);
    }

    #[test]
    fn a_refusal_of_an_administrators_command_has_the_code_of_what_it_means() {
        let refused = |refusal: Refusal| {
            let refusal = Box::new(refusal);
            Failure::from(admin::CallError::Refused { address: "h:1".into(), refusal }).code
        };
        let of = |reason| refused(Refusal::node_refused(reason, 7, "why"));
        for reason in [Reason::Unknown, Reason::NotAMember, Reason::NotUnderWay] {
            assert_eq!(of(reason), Code::NotFound, "{reason:?}");
        }
        for reason in [Reason::Retired, Reason::AlreadyMember, Reason::OtherRole, Reason::UnderWay] {
            assert_eq!(of(reason), Code::Conflict, "{reason:?}");
        }
        for reason in [Reason::Silent, Reason::Behind, Reason::NoQuorum] {
            assert_eq!(of(reason), Code::Unavailable, "{reason:?}");
        }
        assert_eq!(of(Reason::LastCopies), Code::Error);
        assert_eq!(refused(Refusal::malformed("field", "one", "another")), Code::Error);
        let deadline = admin::CallError::Deadline { address: "h:1".into(), after: std::time::Duration::from_secs(1) };
        let silent = admin::CallError::Silent { last: Box::new(deadline), silent: vec!["h:2".into()] };
        assert_eq!(Failure::from(silent.clone()).code, Code::Unavailable);
        assert_eq!(silent.to_string(), "h:1 did not answer within 1s; no answer from: h:2");
    }

    #[test]
    fn a_file_that_is_missing_is_not_found_and_one_that_is_there_a_conflict() {
        let missing = admin::BootstrapPlan::read(Path::new("/no/such/plan")).unwrap_err();
        assert_eq!(Failure::of(missing).code, Code::NotFound);
        let file = Path::new("backup").to_owned();
        assert_eq!(Failure::from(SaveError::Backup(BackupError::Exists { file })).code, Code::Conflict);
        assert_eq!(Failure::of(io::Error::from(io::ErrorKind::StorageFull)).code, Code::NoSpace);
        assert_eq!(Failure::of(io::Error::from(io::ErrorKind::PermissionDenied)).code, Code::Error);
    }

    #[test]
    fn a_failure_is_one_line_of_json_with_what_to_do() {
        let json = Failure::from(PutError::Exists { current: Version::default() }).json();
        assert_eq!((&json["error"]["code"], &json["error"]["exit_code"]), (&"conflict".into(), &4.into()));
        assert!(json["error"]["hint"].as_str().unwrap().contains("--replace"), "{json}");
        assert!(!json.to_string().contains('\n'));
        assert_eq!(Failure::error("x").json()["error"]["hint"], Value::Null);
    }

    #[test]
    fn every_code_is_in_the_help() {
        for code in [Code::Error, Code::Usage, Code::NotFound, Code::Conflict, Code::NoSpace, Code::Unavailable] {
            assert!(CODES_HELP.contains(&format!("\n  {}  ", code as u8)), "{code:?}");
        }
    }

    #[test]
    fn a_line_that_cannot_be_understood_may_still_ask_for_json() {
        let json = |line: &str| wants_json(line.split(' ').map(OsString::from));
        for line in ["q x -o json", "q --output json", "q -ojson x", "q --output=json", "q -o=json"] {
            assert!(json(line), "{line}");
        }
        for line in ["q json", "q -o text json", "q -- -o json", "q"] {
            assert!(!json(line), "{line}");
        }
    }
}
