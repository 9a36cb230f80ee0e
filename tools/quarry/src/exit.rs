//! How a command ends when it fails: one sentence and an exit code that scripts can act on.

use quarry_client::{CallError, ClusterError, ConnectError, DeleteError, GetError, NamespaceError, PutError};
use quarry_proto::refusal::Refusal;
use std::process::ExitCode;

/// The exit codes, as the help lists them. 2 is the command line parser's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Code {
    Error = 1,
    NotFound = 3,
    Conflict = 4,
    NoSpace = 5,
    Unavailable = 6,
}

impl From<Code> for ExitCode {
    fn from(code: Code) -> Self {
        Self::from(code as u8)
    }
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    pub(crate) code: Code,
    message: String,
}

impl Failure {
    pub(crate) fn new(code: Code, message: impl ToString) -> Self {
        Self { code, message: message.to_string() }
    }
    /// An error without a code of its own.
    pub(crate) fn error(message: impl ToString) -> Self {
        Self::new(Code::Error, message)
    }
}

fn of_call(error: &CallError) -> Code {
    match error {
        CallError::Unreachable { .. } | CallError::Deadline { .. } => Code::Unavailable,
        CallError::UnknownNamespace { .. } => Code::NotFound,
        CallError::Refused(refusal) => match **refusal {
            Refusal::NotLeader(_) | Refusal::NotReady(_) | Refusal::TooManyRequests(_) => Code::Unavailable,
            Refusal::NoSpace(_) => Code::NoSpace,
            Refusal::UnknownNamespace(_) => Code::NotFound,
            _ => Code::Error,
        },
        _ => Code::Error,
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::error(error)
    }
}
impl From<ClusterError> for Failure {
    fn from(error: ClusterError) -> Self {
        Self::error(error)
    }
}
impl From<CallError> for Failure {
    fn from(error: CallError) -> Self {
        Self::new(of_call(&error), error)
    }
}
impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Self {
        let code = if let ConnectError::Call(call) = &error { of_call(call) } else { Code::Error };
        Self::new(code, error)
    }
}
impl From<NamespaceError> for Failure {
    fn from(error: NamespaceError) -> Self {
        let code = match &error {
            NamespaceError::Exists { .. } => Code::Conflict,
            NamespaceError::Call(call) => of_call(call),
            _ => Code::Error,
        };
        Self::new(code, error)
    }
}
impl From<PutError> for Failure {
    fn from(error: PutError) -> Self {
        let code = match &error {
            PutError::Exists { .. } | PutError::StaleVersion { .. } | PutError::CompareFailed { .. } => Code::Conflict,
            PutError::NoSpace { .. } => Code::NoSpace,
            PutError::TooFewHolders { .. } | PutError::Deadline { .. } => Code::Unavailable,
            PutError::Call(call) => of_call(call),
            _ => Code::Error,
        };
        Self::new(code, error)
    }
}
impl From<GetError> for Failure {
    fn from(error: GetError) -> Self {
        let code = match &error {
            GetError::Unreachable { .. } | GetError::NotResident | GetError::Deadline { .. } => Code::Unavailable,
            GetError::Call(call) => of_call(call),
            _ => Code::Error,
        };
        Self::new(code, error)
    }
}
impl From<DeleteError> for Failure {
    fn from(error: DeleteError) -> Self {
        let code = match &error {
            DeleteError::CompareFailed { .. } => Code::Conflict,
            DeleteError::Call(call) => of_call(call),
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
}
