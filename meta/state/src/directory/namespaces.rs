//! Namespaces: units of policy. Ids are never used again; after a restore they go on above a floor of the new generation.

use super::{Directory, feed::Topic};
use crate::requests::{RequestId, RequestRefusal};
use quarry_wire::{
    grant::Class,
    ids::{FeedNumber, Generation, NamespaceId},
    limits::{COPIES_MAX, NAMESPACE_NAME_BYTES_MAX},
};
use serde::{Deserialize, Serialize};

/// Namespaces that one generation can make: the next generation's ids begin above them, whatever a backup had forgotten.
pub const NAMESPACES_PER_GENERATION: u32 = 1 << 16;

/// A namespace.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Namespace {
    /// Its number.
    pub id: NamespaceId,
    /// Its name: 1 to 64 of ASCII letters, digits, `-`, `_`, `.`.
    pub name: String,
    /// Its rules.
    pub policy: Policy,
}

/// What a shard's share of a quota must hold of each copy: a slot for a value of 4 KiB.
const QUOTA_SLOT_BYTES_MIN: u64 = 4096 + 128;

/// The rules of a namespace. Origin, hold time and encryption will follow as further fields of a further version.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Policy {
    /// Whether values may be evicted.
    pub class: Class,
    /// Copies that are wanted: 1 to 3.
    pub copies: u8,
    /// Fewest copies with which a commit is accepted: 1 to `copies`.
    pub least: u8,
    /// Most bytes of memory, all copies counted; each shard allows its even share. None: no limit.
    pub quota_bytes: Option<u64>,
}

impl Policy {
    /// `copies` copies, of which two (or the only one) are enough to accept a commit; no quota.
    #[must_use]
    pub const fn new(class: Class, copies: u8) -> Self {
        Self { class, copies, least: if copies < 2 { copies } else { 2 }, quota_bytes: None }
    }

    /// The smallest quota with these copies whose share of each of `shards` shards holds a value. It is for whoever proposes to ask for no less:
    /// [`Directory`] makes what is in its log, and logs of before have smaller ones.
    #[must_use]
    pub fn quota_least(&self, shards: u32) -> u64 {
        u64::from(shards) * u64::from(self.copies) * QUOTA_SLOT_BYTES_MIN
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct NamespaceEntry {
    pub(super) namespace: Namespace,
    pub(super) changed: FeedNumber,
}

/// Why a namespace was not made.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum NamespaceRefusal {
    /// The request itself was not looked at.
    #[error(transparent)]
    Request(#[from] RequestRefusal),
    /// The cluster was not initialised yet.
    #[error("the cluster is not initialised")]
    NotInitialised,
    /// The name is taken.
    #[error("there is already a namespace of this name: {id}")]
    Exists {
        /// Its number.
        id: NamespaceId,
    },
    /// It cannot be a name.
    #[error(
        "a namespace name is 1 to {NAMESPACE_NAME_BYTES_MAX} of ASCII letters, digits, '-', '_' and '.', not {found:?}"
    )]
    Name {
        /// The name asked for.
        found: String,
    },
    /// Too few or too many copies.
    #[error("a namespace has 1 to {COPIES_MAX} copies and accepts with 1 to that many, not {least} of {copies}")]
    Copies {
        /// Copies asked for.
        copies: u8,
        /// Least copies asked for.
        least: u8,
    },
    /// There are no numbers left in this generation.
    #[error("a generation can make {most} namespaces")]
    TooMany {
        /// Most namespaces.
        most: u32,
    },
}

fn floor_of(generation: Generation) -> u32 {
    generation.0.saturating_sub(1).saturating_mul(NAMESPACES_PER_GENERATION)
}

impl Directory {
    pub(super) fn create_namespace(
        &mut self,
        request: RequestId,
        name: &str,
        policy: Policy,
    ) -> Result<NamespaceId, NamespaceRefusal> {
        if self.cluster.is_none() {
            return Err(NamespaceRefusal::NotInitialised);
        }
        if let Some(outcome) = self.requests.look(self.now, self.outcome_kept, request)? {
            return outcome.clone();
        }
        let outcome = self.new_namespace(name, policy);
        self.requests.record(request, outcome.clone());
        outcome
    }

    fn new_namespace(&mut self, name: &str, policy: Policy) -> Result<NamespaceId, NamespaceRefusal> {
        let letter = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
        if name.is_empty() || name.len() > NAMESPACE_NAME_BYTES_MAX || !name.as_bytes().iter().all(letter) {
            let found = name.chars().take(NAMESPACE_NAME_BYTES_MAX).collect();
            return Err(NamespaceRefusal::Name { found });
        }
        let Policy { copies, least, .. } = policy;
        if copies == 0 || usize::from(copies) > COPIES_MAX || least == 0 || least > copies {
            return Err(NamespaceRefusal::Copies { copies, least });
        }
        if let Some(id) = self.names.get(name) {
            return Err(NamespaceRefusal::Exists { id: *id });
        }
        let floor = floor_of(self.generation());
        let next = self.namespace_last.0.max(floor).saturating_add(1);
        if next - floor > NAMESPACES_PER_GENERATION {
            return Err(NamespaceRefusal::TooMany { most: NAMESPACES_PER_GENERATION });
        }
        let id = NamespaceId(next);
        self.namespace_last = id;
        let changed = self.touch(Topic::Namespace(id), None);
        let namespace = Namespace { id, name: name.to_owned(), policy };
        self.namespaces.insert(id, NamespaceEntry { namespace, changed });
        self.names.insert(name.to_owned(), id);
        Ok(id)
    }

    /// The namespace with this number.
    #[must_use]
    pub fn namespace(&self, id: NamespaceId) -> Option<&Namespace> {
        self.namespaces.get(&id).map(|held| &held.namespace)
    }

    /// The namespace with this name.
    #[must_use]
    pub fn namespace_named(&self, name: &str) -> Option<&Namespace> {
        self.names.get(name).and_then(|id| self.namespace(*id))
    }

    /// All namespaces, by number.
    pub fn namespaces(&self) -> impl Iterator<Item = &Namespace> {
        self.namespaces.values().map(|held| &held.namespace)
    }
}
