//! Identities: who a process is to the others, as its certificate says.
//!
//! A certificate carries exactly one name of this form among its subject alternative names:
//!
//! ```text
//! quarry://<cluster: 32 hex digits>/<role>[+<role>..]/<name>
//! ```
//! A node has one role, and its name is its id. A client has one or several, and any name of 1 to 64 letters, digits, `-`, `_` and `.`.

use quarry_wire::{
    certificate::Role,
    ids::{ClusterUuid, NodeId, WriterId},
};
use sha2::{Digest as _, Sha256};
use std::{collections::BTreeSet, fmt, str::FromStr};

const SCHEME: &str = "quarry://";
/// Longest name of a client.
pub const NAME_BYTES_MAX: usize = 64;
/// What the mark of a writer is derived behind, so that it collides with no other use of the hash.
const MARK_DOMAIN: &[u8] = b"quarry-writer-v1\0";
const ROLES: [Role; 5] = [Role::Meta, Role::DataNode, Role::Writer, Role::Reader, Role::Admin];

/// Who a process is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    cluster: ClusterUuid,
    roles: BTreeSet<Role>,
    name: String,
}

/// Why something is no identity.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{field} must be {expected}, found {found:?}")]
pub struct IdentityError {
    /// Which part.
    pub field: &'static str,
    /// What it must be.
    pub expected: &'static str,
    /// What it is.
    pub found: String,
}

impl Identity {
    /// A node of the cluster.
    ///
    /// # Errors
    /// [`IdentityError`] if the role is no node's or the id is 0.
    pub fn node(cluster: ClusterUuid, role: Role, node: NodeId) -> Result<Self, IdentityError> {
        if !is_node(role) {
            let found = role.to_string();
            return Err(IdentityError { field: "the role of a node", expected: "meta or datanode", found });
        }
        Self::checked(cluster, BTreeSet::from([role]), node.0.to_string())
    }

    /// A client of the cluster.
    ///
    /// # Errors
    /// [`IdentityError`] if there is no role, one is a node's, or the name is empty, too long or has other characters.
    pub fn client(cluster: ClusterUuid, roles: &[Role], name: &str) -> Result<Self, IdentityError> {
        if let Some(role) = roles.iter().find(|role| is_node(**role)) {
            return Err(IdentityError {
                field: "the role of a client",
                expected: "writer, reader or admin",
                found: role.to_string(),
            });
        }
        Self::checked(cluster, roles.iter().copied().collect(), name.to_owned())
    }

    fn checked(cluster: ClusterUuid, roles: BTreeSet<Role>, name: String) -> Result<Self, IdentityError> {
        let wrong = |field, expected, found| Err(IdentityError { field, expected, found });
        if roles.is_empty() || (roles.len() > 1 && roles.iter().any(|role| is_node(*role))) {
            let found = roles.iter().map(ToString::to_string).collect::<Vec<_>>().join("+");
            return wrong("the roles", "one role of a node, or one or more of writer, reader and admin", found);
        }
        if roles.iter().any(|role| is_node(*role)) {
            // As it is printed, and in no other way: two spellings would be two identities.
            if !name.parse::<u64>().is_ok_and(|id| id != 0 && id.to_string() == name) {
                return wrong("the name of a node", "its id, a number from 1 on", name);
            }
        } else {
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
            if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(fits) {
                return wrong("the name of a client", "1 to 64 ASCII letters, digits, '-', '_' and '.'", name);
            }
        }
        Ok(Self { cluster, roles, name })
    }

    /// The cluster that it belongs to.
    #[must_use]
    pub const fn cluster(&self) -> ClusterUuid {
        self.cluster
    }

    /// Whether it has this role.
    #[must_use]
    pub fn is(&self, role: Role) -> bool {
        self.roles.contains(&role)
    }

    /// Its roles, joined with `+`.
    #[must_use]
    pub fn roles(&self) -> String {
        self.roles.iter().map(ToString::to_string).collect::<Vec<_>>().join("+")
    }

    /// The node that it is in this role, if it is one.
    #[must_use]
    pub fn node_as(&self, role: Role) -> Option<NodeId> {
        if is_node(role) && self.is(role) { self.name.parse().ok().map(NodeId) } else { None }
    }

    /// What the ids of all its writers end with. It depends on the cluster and the name alone, so it stays when roles are added.
    #[must_use]
    pub fn mark(&self) -> [u8; 8] {
        let hash =
            Sha256::new().chain_update(MARK_DOMAIN).chain_update(self.cluster.0).chain_update(&self.name).finalize();
        let mut mark = [0; 8];
        mark.copy_from_slice(&hash[..8]);
        mark
    }

    /// Whether `writer` is one of its own.
    #[must_use]
    pub fn owns(&self, writer: WriterId) -> bool {
        writer.mark() == self.mark()
    }
}

const fn is_node(role: Role) -> bool {
    matches!(role, Role::Meta | Role::DataNode)
}

/// The role with this name.
#[must_use]
pub fn role(name: &str) -> Option<Role> {
    ROLES.into_iter().find(|role| role.to_string() == name)
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}/{}", self.cluster, self.roles(), self.name)
    }
}

impl FromStr for Identity {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let whole = || IdentityError {
            field: "the name in the certificate",
            expected: "quarry://CLUSTER/ROLE/NAME",
            found: text.chars().take(200).collect(),
        };
        let parts: Vec<&str> = text.strip_prefix(SCHEME).ok_or_else(whole)?.split('/').collect();
        let [cluster, roles, name] = parts[..] else { return Err(whole()) };
        let cluster = cluster.parse().map_err(|_| whole())?;
        let roles = roles.split('+').map(role).collect::<Option<BTreeSet<_>>>().ok_or_else(whole)?;
        let identity = Self::checked(cluster, roles, name.to_owned())?;
        // Written in one way alone: what is compared and logged is what was certified.
        if identity.to_string() == text { Ok(identity) } else { Err(whole()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: ClusterUuid = ClusterUuid([0xab; 16]);

    #[test]
    fn an_identity_reads_as_it_was_written_and_in_no_other_way() {
        let node = Identity::node(CLUSTER, Role::DataNode, NodeId(101)).unwrap();
        let client = Identity::client(CLUSTER, &[Role::Admin, Role::Writer], "ci-1").unwrap();
        assert_eq!(client.to_string(), format!("quarry://{CLUSTER}/writer+admin/ci-1"));
        for identity in [node, client] {
            assert_eq!(identity.to_string().parse(), Ok(identity));
        }
        let of = |rest: &str| format!("quarry://{CLUSTER}/{rest}").parse::<Identity>();
        for wrong in [
            "writer",
            "writer/",
            "writer/a/b",
            "/a",
            "wrıter/a",
            "admin+writer/a",
            "writer+writer/a",
            "meta+writer/1",
            "meta+datanode/1",
            "meta/0",
            "meta/01",
            "meta/+1",
            "meta/one",
            "writer/a b",
            "writer/ä",
            "boss/a",
            "Writer/a",
        ] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
        assert!(of(&format!("writer/{}", "a".repeat(NAME_BYTES_MAX))).is_ok());
        assert!(of(&format!("writer/{}", "a".repeat(NAME_BYTES_MAX + 1))).is_err());
        assert!("https://x/writer/a".parse::<Identity>().is_err());
    }

    #[test]
    fn a_role_of_a_node_and_one_of_a_client_are_not_given_to_the_wrong_one() {
        assert!(Identity::node(CLUSTER, Role::Writer, NodeId(1)).is_err());
        assert!(Identity::client(CLUSTER, &[Role::Meta], "1").is_err());
        assert!(Identity::client(CLUSTER, &[], "a").is_err());
        let node = Identity::node(CLUSTER, Role::Meta, NodeId(2)).unwrap();
        assert_eq!((node.node_as(Role::Meta), node.node_as(Role::DataNode)), (Some(NodeId(2)), None));
    }

    #[test]
    fn a_writer_belongs_to_the_name_and_cluster_that_it_was_drawn_for_whatever_the_roles() {
        let identity = |cluster, roles: &[Role], name: &str| Identity::client(cluster, roles, name).unwrap();
        let alice = identity(CLUSTER, &[Role::Writer], "alice");
        let writer = WriterId::marked([7; 8], alice.mark());
        assert!(alice.owns(writer) && identity(CLUSTER, &[Role::Writer, Role::Admin], "alice").owns(writer));
        assert!(!identity(CLUSTER, &[Role::Writer], "bob").owns(writer));
        assert!(!identity(ClusterUuid([1; 16]), &[Role::Writer], "alice").owns(writer));
        assert!(!alice.owns(WriterId::anonymous([7; 8])));
    }
}
