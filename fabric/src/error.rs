//! What can go wrong here, as values. Says what was expected, what was found and what to do; decides nothing.

use std::net::IpAddr;

/// Why something of the fabric could not be set up or used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum FabricError {
    /// The provider is not there, or libfabric answered with another one.
    #[error(
        "libfabric {version} has no provider `{asked}` for one-sided operations (found: {found}); install libfabric 1.17 or newer \
         (Debian: apt install libfabric1) and check FI_PROVIDER"
    )]
    NoProvider { asked: String, found: String, version: String },
    /// The library is older than what this crate was written for.
    #[error("libfabric {found} is too old, 1.17 or newer is needed (Debian: apt install libfabric1)")]
    LibraryTooOld { found: String },
    /// A name that cannot be that of a provider (it holds a NUL byte).
    #[error("`{name}` is not the name of a libfabric provider; use `net` (libfabric 1.17) or `tcp` (later)")]
    BadProviderName { name: String },
    /// A libfabric call failed.
    #[error("{call} failed: {name} ({errno}, {text}){hint}")]
    Library { call: &'static str, errno: i32, name: &'static str, text: String, hint: &'static str },
    /// An operating system call failed.
    #[error("{call} failed: {text}{hint}")]
    System { call: &'static str, text: String, hint: &'static str },
    /// The port is taken.
    #[error("{ip} port {port} is in use by another endpoint or process; choose another port or none")]
    AddressInUse { ip: IpAddr, port: u16 },
    /// Peers could not reach an endpoint at an unspecified address.
    #[error("cannot bind to the unspecified address {ip}: name an address of this host that peers can reach")]
    BindUnspecified { ip: IpAddr },
    /// Bytes that are no address of the kind that this endpoint talks to.
    #[error("not an address of this fabric: expected {expected}, found {found}")]
    BadAddress { expected: String, found: String },
    /// A range that is not inside the memory or registration that it was used with.
    #[error("bytes {start}..{end} are outside of the {length} bytes there")]
    OutOfRange { start: usize, end: usize, length: usize },
    /// Local and remote length differ, or are zero.
    #[error("an operation moves the same, non-zero number of bytes on both sides: local {local}, remote {remote}")]
    LengthMismatch { local: u64, remote: u64 },
    /// More than a pool has in all.
    #[error("{asked} bytes of a pool of {capacity}: take smaller spans or make a larger pool")]
    ExceedsPool { asked: usize, capacity: usize },
    /// A span was used with the registration of another pool.
    #[error("the span is of another pool than this registration")]
    WrongPool,
    /// The provider does not take as many local pieces in one operation.
    #[error("an operation has at most {limit} local pieces here, not {found}; use several operations")]
    TooManyPieces { limit: usize, found: usize },
    /// An empty range cannot be registered or allocated.
    #[error("{what} of zero bytes")]
    Empty { what: &'static str },
    /// The key is in use in this endpoint's domain.
    #[error("key {key:#x} is in use on this endpoint; draw another")]
    KeyInUse { key: u64 },
    /// The registration or peer belongs to another endpoint (or to one that was closed and opened again).
    #[error("this {what} belongs to another endpoint; make one on the endpoint that uses it")]
    WrongEndpoint { what: &'static str },
    /// Operations use memory registered with [`Access::Local`](crate::Access::Local).
    #[error("operations need memory registered for local use, this is registered for {found:?}")]
    NotLocal { found: crate::Access },
    /// The endpoint or registration is closed.
    #[error("the {what} is closed")]
    Closed { what: &'static str },
}

/// How an operation ended other than well.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum OperationError {
    /// It had begun and did not complete in time: its bytes may or may not have moved. Its endpoint is closed, so its buffer is
    /// free and no byte of it leaves any more.
    #[error("not completed by its deadline; its endpoint was closed, open another")]
    Deadline,
    /// It never began, so no byte moved: until the deadline the peer could not be reached or the queue was full. The endpoint
    /// is unharmed.
    #[error("not started by its deadline: the peer cannot be reached or the queue stayed full")]
    NotStarted,
    /// The endpoint was closed under it; whether its bytes moved is unknown.
    #[error("its endpoint was closed")]
    Closed,
    /// The provider says that it failed: refused by the target (wrong or closed key, out of bounds), or disconnected, or
    /// cancelled because another operation to that peer failed. `net` and `tcp` do not tell these apart; ask the target.
    #[error("failed or refused by the target: {text} ({errno}, provider's {provider_errno})")]
    Failed { errno: i32, provider_errno: i32, text: String },
    /// It was wrong before anything was sent.
    #[error(transparent)]
    Invalid(#[from] FabricError),
}

/// The name of an error number, for messages that are searched for.
pub(crate) fn errno_name(errno: i32) -> &'static str {
    match errno {
        libc::EPERM => "EPERM",
        libc::ENOENT => "ENOENT",
        libc::EIO => "EIO",
        libc::EBADF => "EBADF",
        libc::EAGAIN => "EAGAIN",
        libc::ENOMEM => "ENOMEM",
        libc::EACCES => "EACCES",
        libc::EFAULT => "EFAULT",
        libc::EBUSY => "EBUSY",
        libc::ENODEV => "ENODEV",
        libc::EINVAL => "EINVAL",
        libc::EMFILE => "EMFILE",
        libc::ENFILE => "ENFILE",
        libc::ENOSPC => "ENOSPC",
        libc::ENOSYS => "ENOSYS",
        libc::ENODATA => "ENODATA",
        libc::EMSGSIZE => "EMSGSIZE",
        libc::EOPNOTSUPP => "EOPNOTSUPP",
        libc::EADDRINUSE => "EADDRINUSE",
        libc::EADDRNOTAVAIL => "EADDRNOTAVAIL",
        libc::ENETUNREACH => "ENETUNREACH",
        libc::ECONNABORTED => "ECONNABORTED",
        libc::ECONNRESET => "ECONNRESET",
        libc::ENOTCONN => "ENOTCONN",
        libc::ESHUTDOWN => "ESHUTDOWN",
        libc::ETIMEDOUT => "ETIMEDOUT",
        libc::ECONNREFUSED => "ECONNREFUSED",
        libc::EHOSTUNREACH => "EHOSTUNREACH",
        libc::ECANCELED => "ECANCELED",
        libfabric_sys::errno::EAVAIL => "FI_EAVAIL",
        libfabric_sys::errno::ENOKEY => "FI_ENOKEY",
        _ => "unknown error number",
    }
}

/// What an operator can do about an error number.
pub(crate) fn errno_hint(errno: i32) -> &'static str {
    match errno {
        libc::EMFILE | libc::ENFILE => "; raise the limit of open files (ulimit -n): each endpoint takes about 8",
        libc::ENOMEM => "; raise the limits of memory (ulimit -l, container limits)",
        libc::EADDRNOTAVAIL => "; bind to an address that this host has",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_what_was_found_and_what_to_do() {
        let missing =
            FabricError::NoProvider { asked: "tcp".into(), found: "tcp;ofi_rxm".into(), version: "1.17".into() };
        let text = missing.to_string();
        assert!(text.contains("`tcp`") && text.contains("tcp;ofi_rxm") && text.contains("install libfabric"), "{text}");
        assert_eq!(errno_name(libc::ECANCELED), "ECANCELED");
        assert!(errno_hint(libc::EMFILE).contains("ulimit -n"));
    }
}
