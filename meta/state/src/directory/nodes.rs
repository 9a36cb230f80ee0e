//! Nodes and whom to believe: certificates that the root signed, the revocation list, where a node's control service listens.
//! Keeps *Nothing unsigned*: apply itself checks every signature, so a replica never holds what the root or the node did not sign.

use super::{Directory, feed::Topic, labels::Labels};
use quarry_wire::{
    certificate::{Certificate, Revocations, Role},
    ids::{CertificateSerial, FeedNumber, NodeId},
    keyring::Keyring,
    limits::LABEL_BYTES_MAX,
    signed::Signed,
};
use serde::{Deserialize, Serialize};

/// Longest address of a control service, in bytes.
pub const NODE_ADDRESS_BYTES_MAX: usize = 256;

/// A node that announced itself.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Node {
    /// The node.
    pub id: NodeId,
    /// Where its control service listens, as `host:port`.
    pub address: String,
    /// What it may be used for, if it is a data node.
    pub standing: Standing,
    /// What it shares its fate with, if it is a data node.
    pub labels: Labels,
    /// Number of this announcement in the feed.
    pub changed: FeedNumber,
}

/// What a data node may be used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Standing {
    /// Everything.
    #[default]
    Serving,
    /// What it holds is read; nothing new is granted on it.
    Draining,
    /// It holds nothing, and offers no memory.
    Decommissioned,
}

impl Standing {
    /// Its name, as tools tell it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Draining => "draining",
            Self::Decommissioned => "decommissioned",
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Numbered<S> {
    pub(super) signed: Signed<S>,
    pub(super) changed: FeedNumber,
}

/// Why a statement of the root, or an announcement, was not taken.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum NodeRefusal {
    /// The cluster was not initialised yet.
    #[error("the cluster is not initialised")]
    NotInitialised,
    /// The keyring does not believe it.
    #[error("not believed: {why}")]
    Untrusted {
        /// What the keyring says.
        why: String,
    },
    /// No certificate that holds names this node.
    #[error("no certificate that holds names {node}: admit one first")]
    UnknownNode {
        /// The node named.
        node: NodeId,
    },
    /// The address cannot be one.
    #[error("an address has 1 to {NODE_ADDRESS_BYTES_MAX} bytes, this one has {found}")]
    Address {
        /// Its bytes.
        found: usize,
    },
    /// The label is too long.
    #[error("a label has at most {LABEL_BYTES_MAX} bytes, this one has {found}")]
    Label {
        /// Its bytes.
        found: usize,
    },
    /// Its number is used up.
    #[error("{node} was removed or forgotten, and a number is never used again: give the node a new one")]
    Retired {
        /// The node.
        node: NodeId,
    },
    /// A node that holds memory is not forgotten.
    #[error("{node} has {regions} regions that are up: decommission it first")]
    Alive {
        /// The node.
        node: NodeId,
        /// Its regions.
        regions: usize,
    },
    /// Nobody takes a decommissioning back: the memory is void.
    #[error("{node} is decommissioned, which is for good: forget it, and give the node a new number to use it again")]
    Decommissioned {
        /// The node.
        node: NodeId,
    },
}

impl Directory {
    pub(super) fn admit(&mut self, signed: &Signed<Certificate>) -> Result<FeedNumber, NodeRefusal> {
        let keyring = self.keyring.as_mut().ok_or(NodeRefusal::NotInitialised)?;
        keyring.admit(signed).map_err(|why| NodeRefusal::Untrusted { why: why.to_string() })?;
        let serial = signed.statement.serial;
        if let Some(held) = self.certificates.get(&serial) {
            return Ok(held.changed);
        }
        let changed = self.touch(Topic::Certificate(serial), None);
        self.certificates.insert(serial, Numbered { signed: signed.clone(), changed });
        Ok(changed)
    }

    pub(super) fn revoke(&mut self, list: &Signed<Revocations>) -> Result<FeedNumber, NodeRefusal> {
        let keyring = self.keyring.as_mut().ok_or(NodeRefusal::NotInitialised)?;
        let again = self.revocations.as_ref().filter(|held| held.signed.statement == list.statement);
        keyring.revoke(list).map_err(|why| NodeRefusal::Untrusted { why: why.to_string() })?;
        if let Some(held) = again {
            return Ok(held.changed);
        }
        let old = self.revocations.as_ref().map(|held| held.changed);
        let changed = self.touch(Topic::Revocations, old);
        self.revocations = Some(Numbered { signed: list.clone(), changed });
        Ok(changed)
    }

    pub(super) fn announce(&mut self, id: NodeId, address: &str) -> Result<FeedNumber, NodeRefusal> {
        if self.cluster.is_none() {
            return Err(NodeRefusal::NotInitialised);
        }
        if address.is_empty() || address.len() > NODE_ADDRESS_BYTES_MAX {
            return Err(NodeRefusal::Address { found: address.len() });
        }
        if self.is_retired(id) {
            return Err(NodeRefusal::Retired { node: id });
        }
        if !self.is_certified(id, Role::DataNode) && !self.is_certified(id, Role::Meta) {
            return Err(NodeRefusal::UnknownNode { node: id });
        }
        let old = match self.nodes.get(&id) {
            Some(held) if held.address == address => return Ok(held.changed),
            held => held.map(|held| held.changed),
        };
        let changed = self.touch(Topic::Node(id), old);
        let kept = self.nodes.get(&id).map(|held| (held.standing, held.labels.clone()));
        let (standing, labels) = kept.unwrap_or_default();
        self.nodes.insert(id, Node { id, address: address.to_owned(), standing, labels, changed });
        Ok(changed)
    }

    /// A decommissioned node loses all its lives at once, for good: values that have a copy elsewhere keep it, the others are gone.
    pub(super) fn set_standing(&mut self, id: NodeId, standing: Standing) -> Result<FeedNumber, NodeRefusal> {
        if self.is_retired(id) {
            return Err(NodeRefusal::Retired { node: id });
        }
        let known = self.is_certified(id, Role::DataNode);
        let Some(held) = self.nodes.get(&id).filter(|_| known) else {
            return Err(NodeRefusal::UnknownNode { node: id });
        };
        if held.standing == standing {
            return Ok(held.changed);
        }
        if held.standing == Standing::Decommissioned {
            return Err(NodeRefusal::Decommissioned { node: id });
        }
        let changed = self.touch(Topic::Node(id), Some(held.changed));
        let held = self.nodes.get_mut(&id).expect("it was there above");
        (held.standing, held.changed) = (standing, changed);
        if standing == Standing::Decommissioned {
            let up: Vec<_> = self.regions_of(id).filter(|it| it.state.up).map(|it| it.state.region).collect();
            for region in up {
                self.new_life(region, None);
            }
        }
        Ok(changed)
    }

    /// Forgets a data node of which nothing is up, and uses its number up. Doing it again changes nothing.
    pub(super) fn forget_node(&mut self, id: NodeId) -> Result<FeedNumber, NodeRefusal> {
        if let Some(changed) = self.retired.get(&id) {
            return Ok(*changed);
        }
        if self.cluster.is_none() {
            return Err(NodeRefusal::NotInitialised);
        }
        if !self.nodes.contains_key(&id) || self.is_certified(id, Role::Meta) {
            return Err(NodeRefusal::UnknownNode { node: id });
        }
        let regions = self.regions_of(id).filter(|it| it.state.up).count();
        if regions > 0 {
            return Err(NodeRefusal::Alive { node: id, regions });
        }
        self.forget_regions(id);
        self.forget_announcement(id);
        self.retire(id);
        Ok(self.retired[&id])
    }

    pub(super) fn forget_announcement(&mut self, id: NodeId) {
        if let Some(held) = self.nodes.remove(&id) {
            self.index.remove(&held.changed);
        }
    }

    /// Whether a certificate that is not revoked names `node` in `role`.
    #[must_use]
    pub fn is_certified(&self, node: NodeId, role: Role) -> bool {
        self.certificates.values().any(|held| {
            let said = &held.signed.statement;
            said.node == node && said.role == role && !self.is_revoked(said.serial)
        })
    }

    /// Whether a certificate that holds, or held before it was revoked, names `node` in `role`.
    #[must_use]
    pub fn was_certified(&self, node: NodeId, role: Role) -> bool {
        self.certificates.values().any(|held| held.signed.statement.node == node && held.signed.statement.role == role)
    }

    /// Whether the newest revocation list names `serial`.
    #[must_use]
    pub fn is_revoked(&self, serial: CertificateSerial) -> bool {
        self.revocations.as_ref().is_some_and(|held| held.signed.statement.serials.contains(&serial))
    }

    /// The nodes that announced themselves, by number.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    /// Where `node` listens, if it announced itself.
    #[must_use]
    pub fn node(&self, node: NodeId) -> Option<&Node> {
        self.nodes.get(&node)
    }

    /// The certificates admitted, revoked ones included, by serial.
    pub fn certificates(&self) -> impl Iterator<Item = &Signed<Certificate>> {
        self.certificates.values().map(|held| &held.signed)
    }

    /// The newest revocation list.
    #[must_use]
    pub fn revocations(&self) -> Option<&Signed<Revocations>> {
        self.revocations.as_ref().map(|held| &held.signed)
    }

    /// Whom to believe; none before the cluster is initialised.
    #[must_use]
    pub const fn keyring(&self) -> Option<&Keyring> {
        self.keyring.as_ref()
    }
}
