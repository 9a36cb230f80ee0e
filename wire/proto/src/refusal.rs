//! Refusals of whole calls: one encoded [`v1::Refusal`] in the details of a gRPC status.

use crate::v1::{self, refusal::Kind};
use prost::Message as _;
use std::fmt;
use tonic::{Code, Status};

pub use crate::v1::refusal::Kind as Refusal;

impl Kind {
    /// The gRPC code that goes with it, for tools that know nothing of Quarry.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::NotLeader(_) | Self::NotReady(_) | Self::TooFewNodes(_) => Code::Unavailable,
            Self::Indeterminate(_) => Code::Unknown,
            Self::UnsupportedProtocol(_)
            | Self::WrongCluster(_)
            | Self::StaleGeneration(_)
            | Self::StaleIncarnation(_)
            | Self::ArmRefused(_)
            | Self::StaleRequest(_)
            | Self::WrongShard(_)
            | Self::NodeRefused(_) => Code::FailedPrecondition,
            Self::NoSpace(_) | Self::TooManyRequests(_) => Code::ResourceExhausted,
            Self::UnknownNamespace(_) | Self::UnknownGrant(_) | Self::UnknownPin(_) => Code::NotFound,
            Self::NamespaceExists(_) | Self::AlreadyBootstrapped(_) => Code::AlreadyExists,
            Self::Malformed(_) | Self::TooLarge(_) | Self::VersionAhead(_) => Code::InvalidArgument,
            Self::Untrusted(_) | Self::Forbidden(_) => Code::PermissionDenied,
        }
    }

    /// Its name, as metrics tell it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::NotLeader(_) => "not_leader",
            Self::Indeterminate(_) => "indeterminate",
            Self::UnsupportedProtocol(_) => "unsupported_protocol",
            Self::WrongCluster(_) => "wrong_cluster",
            Self::StaleGeneration(_) => "stale_generation",
            Self::NotReady(_) => "not_ready",
            Self::NoSpace(_) => "no_space",
            Self::UnknownNamespace(_) => "unknown_namespace",
            Self::NamespaceExists(_) => "namespace_exists",
            Self::Malformed(_) => "malformed",
            Self::UnknownGrant(_) => "unknown_grant",
            Self::UnknownPin(_) => "unknown_pin",
            Self::ArmRefused(_) => "arm_refused",
            Self::TooLarge(_) => "too_large",
            Self::StaleRequest(_) => "stale_request",
            Self::Untrusted(_) => "untrusted",
            Self::StaleIncarnation(_) => "stale_incarnation",
            Self::AlreadyBootstrapped(_) => "already_bootstrapped",
            Self::TooManyRequests(_) => "too_many_requests",
            Self::VersionAhead(_) => "version_ahead",
            Self::WrongShard(_) => "wrong_shard",
            Self::TooFewNodes(_) => "too_few_nodes",
            Self::Forbidden(_) => "forbidden",
            Self::NodeRefused(_) => "node_refused",
        }
    }

    /// What there is too little of, without what stands behind it in brackets; empty for refusals that are about something else.
    #[must_use]
    pub fn resource(&self) -> &str {
        let resource = match self {
            Self::NoSpace(it) => &it.resource,
            Self::TooManyRequests(it) => &it.resource,
            Self::TooFewNodes(_) => "data nodes",
            Self::TooLarge(it) => &it.what,
            _ => "",
        };
        resource.split(" (").next().unwrap_or_default()
    }

    /// The status that carries it.
    #[must_use]
    pub fn into_status(self) -> Status {
        let (code, message) = (self.code(), self.to_string());
        let details = v1::Refusal { kind: Some(self) }.encode_to_vec();
        Status::with_details(code, message, details.into())
    }

    /// The refusal that a status carries; none if it carries none (a fault of the network or of the process).
    #[must_use]
    pub fn from_status(status: &Status) -> Option<Self> {
        if status.details().is_empty() {
            return None;
        }
        v1::Refusal::decode(status.details()).ok()?.kind
    }

    /// A node that cannot become, or be, what was asked.
    #[must_use]
    pub fn node_refused(reason: v1::node_refused::Reason, node: u64, why: impl fmt::Display) -> Self {
        Self::NodeRefused(v1::NodeRefused { reason: reason.into(), node, why: why.to_string(), group: 0, lag: 0 })
    }

    /// A field that is not what it must be.
    #[must_use]
    pub fn malformed(field: &str, expected: impl fmt::Display, found: impl fmt::Display) -> Self {
        Self::Malformed(v1::Malformed {
            field: field.to_owned(),
            expected: expected.to_string(),
            found: found.to_string(),
        })
    }
}

impl From<Kind> for Status {
    fn from(refusal: Kind) -> Self {
        refusal.into_status()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotLeader(it) if it.leader == 0 => {
                write!(f, "group {} has no leader that this node knows of: try again, or another node", it.group)
            }
            Self::NotLeader(it) => {
                write!(f, "group {} is led by node-{} at {}: ask there", it.group, it.leader, it.address)
            }
            Self::Indeterminate(it) => write!(f, "the outcome is not known: {}", it.why),
            Self::UnsupportedProtocol(it) => write!(
                f,
                "protocol version {} is not spoken here, versions {} to {} are: upgrade the older side",
                it.found, it.min, it.max
            ),
            Self::WrongCluster(it) => {
                write!(f, "this is cluster {}, the request is for {}", hex(&it.expected), hex(&it.found))
            }
            Self::StaleGeneration(it) => {
                write!(f, "the cluster is in generation {}, the request is of generation {}", it.expected, it.found)
            }
            Self::NotReady(it) => write!(f, "not ready: {}; try again in {} ms", it.why, it.retry_after_ms),
            Self::NoSpace(it) => {
                write!(f, "no space in {}: {} bytes needed, {} free", it.resource, it.needed_bytes, it.free_bytes)?;
                if it.terminal { Ok(()) } else { write!(f, "; try again in {} ms", it.retry_after_ms) }
            }
            Self::UnknownNamespace(it) if it.name.is_empty() => write!(f, "there is no namespace with id {}", it.id),
            Self::UnknownNamespace(it) => write!(f, "there is no namespace {:?}: create it first", it.name),
            Self::NamespaceExists(it) => write!(f, "the namespace {:?} exists already, with id {}", it.name, it.id),
            Self::Malformed(it) => write!(f, "{} must be {}, found {}", it.field, it.expected, it.found),
            Self::UnknownGrant(it) => match &it.grant {
                Some(grant) => write!(
                    f,
                    "grant {}/{} is not known here: it was never armed, or closed long ago",
                    grant.shard,
                    grant.sequence.map_or(0, |s| s.number)
                ),
                None => f.write_str("the grant is not known here"),
            },
            Self::UnknownPin(it) => {
                write!(f, "the caller holds no pin {}: it ended, was released, or never was", ordinal(it.pin))
            }
            Self::ArmRefused(it) => write!(
                f,
                "the grant cannot be armed ({}): expected {}, found {}",
                it.reason().as_str_name(),
                it.expected,
                it.found
            ),
            Self::TooLarge(it) => write!(f, "{} is too large: at most {}, found {}", it.what, it.limit, it.found),
            Self::StaleRequest(it) => write!(
                f,
                "the request carries log time {} ms, requests up to {} ms are forgotten here and never executed",
                it.found_ms, it.floor_ms
            ),
            Self::Untrusted(it) => write!(f, "not believed: {}", it.why),
            Self::StaleIncarnation(it) => write!(
                f,
                "the region's incarnation is {}, the request names {}",
                ordinal(it.expected),
                ordinal(it.found)
            ),
            Self::AlreadyBootstrapped(it) => write!(f, "this node already belongs to cluster {}", hex(&it.cluster)),
            Self::TooManyRequests(it) => {
                write!(f, "too many requests: {} is limited to {}", it.resource, it.limit)?;
                if it.found > 0 {
                    write!(f, ", found {}", it.found)?;
                }
                if it.retry_after_ms > 0 { write!(f, "; try again in {} ms", it.retry_after_ms) } else { Ok(()) }
            }
            Self::VersionAhead(it) => write!(
                f,
                "the version's clock is {} ms, the leader's is {} ms: more than {} ms ahead; set the writer's clock",
                it.version_ms, it.wall_ms, it.limit_ms
            ),
            Self::TooFewNodes(it) => {
                let (needed, found, silent) = (it.needed, it.found, it.silent);
                write!(f, "{needed} data nodes with room are needed, {found} answer and {silent} do not")?;
                if !it.drained.is_empty() {
                    let drained: Vec<String> =
                        it.drained.iter().map(|node| quarry_wire::ids::NodeId(*node).to_string()).collect();
                    write!(f, "; drained or out of use: {}", drained.join(", "))?;
                }
                write!(f, "; try again in {} ms", it.retry_after_ms)
            }
            Self::Forbidden(it) => {
                write!(
                    f,
                    "{} may be called by {} alone, the caller is {}",
                    it.method,
                    it.expected.join(" or "),
                    it.found
                )
            }
            Self::NodeRefused(it) => f.write_str(&it.why),
            Self::WrongShard(it) => {
                write!(f, "the request is for shard {}, its key belongs to shard {}", it.found, it.expected)
            }
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn ordinal(it: Option<v1::Ordinal>) -> String {
    it.map_or_else(|| "none".to_owned(), |it| format!("{}.{}", it.generation, it.number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_survives_its_status() {
        let refusal = Kind::TooLarge(v1::TooLarge { what: "value".into(), limit: 10, found: 11 });
        let status = refusal.clone().into_status();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(Kind::from_status(&status), Some(refusal));
        assert_eq!(Kind::from_status(&Status::unavailable("no route")), None);
    }

    #[test]
    fn the_resource_is_told_without_its_details() {
        let resource = "memory (4096 bytes in one piece)".to_owned();
        assert_eq!(Kind::NoSpace(v1::NoSpace { resource, ..Default::default() }).resource(), "memory");
        assert_eq!(Kind::malformed("a", "b", "c").resource(), "");
    }

    #[test]
    fn a_limit_is_told_with_what_was_found_and_when_to_come_again() {
        let mut it = v1::TooManyRequests { resource: "calls".into(), limit: 7, retry_after_ms: 50, found: 8 };
        let told = Kind::TooManyRequests(it.clone()).to_string();
        assert_eq!(told, "too many requests: calls is limited to 7, found 8; try again in 50 ms");
        (it.found, it.retry_after_ms) = (0, 0);
        assert_eq!(Kind::TooManyRequests(it).to_string(), "too many requests: calls is limited to 7");
    }
}
