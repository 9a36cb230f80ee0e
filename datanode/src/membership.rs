//! Whom to believe and where the other data nodes are, as the directory tells it.
//!
//! Takes the directory's changes from whatever meta node brings them: certificates and revocations prove themselves by the root's signature,
//! and the generation only grows. Decides nothing about regions.

use parking_lot::RwLock;
use quarry_proto::{convert, v1};
use quarry_wire::{
    certificate::{Certificate, Revocations},
    ids::{CertificateSerial, ClusterUuid, FeedNumber, Generation, NodeId},
    keyring::{Keyring, TrustError, Verified},
    signed::{SecretKey, Signed, Statement},
};
use std::collections::BTreeMap;

/// What is known of the cluster.
pub(crate) struct Membership {
    cluster: ClusterUuid,
    signer: RwLock<Signer>,
    known: RwLock<Known>,
}

/// Whose signature this node's statements have.
struct Signer {
    key: SecretKey,
    certificate: Signed<Certificate>,
}

struct Known {
    keyring: Keyring,
    /// Newest feed number whose changes are here.
    seen: Option<FeedNumber>,
    data_nodes: BTreeMap<NodeId, String>,
}

impl Membership {
    pub(crate) fn new(
        mut keyring: Keyring,
        key: SecretKey,
        certificate: &Signed<Certificate>,
    ) -> Result<Self, TrustError> {
        keyring.admit(certificate)?;
        Ok(Self {
            cluster: keyring.cluster(),
            signer: RwLock::new(Signer { key, certificate: certificate.clone() }),
            known: RwLock::new(Known { keyring, seen: None, data_nodes: BTreeMap::new() }),
        })
    }

    pub(crate) fn cluster(&self) -> ClusterUuid {
        self.cluster
    }

    pub(crate) fn seen(&self) -> Option<FeedNumber> {
        self.known.read().seen
    }

    pub(crate) fn generation(&self) -> Generation {
        self.known.read().keyring.generation()
    }

    /// Takes note of a generation; false if it is over.
    pub(crate) fn see_generation(&self, generation: Generation) -> bool {
        self.known.write().keyring.see_generation(generation)
    }

    /// The certificate that this node signs under, if it is revoked: nothing that it signs is believed.
    pub(crate) fn revoked(&self) -> Option<CertificateSerial> {
        let serial = self.signer.read().certificate.statement.serial;
        self.known.read().keyring.is_revoked(serial).then_some(serial)
    }

    /// Takes in what a meta node says changed. Older news than what is here adds certificates only.
    pub(crate) fn apply(&self, changes: v1::Changes) {
        let before = self.revoked();
        self.take(changes);
        if let (None, Some(serial)) = (before, self.revoked()) {
            tracing::error!(
                %serial,
                "the certificate that this node signs under is revoked, nothing that it holds can be read: give it another key (quarry keys node --new-key, raft-admin node rotate-key)"
            );
        }
    }

    fn take(&self, changes: v1::Changes) {
        let mut known = self.known.write();
        for bytes in &changes.certificates {
            match convert::signed::<Certificate>(bytes) {
                Ok(certificate) => {
                    if let Err(error) = known.keyring.admit(&certificate) {
                        tracing::warn!(%error, "a certificate from the directory is not believed");
                    }
                }
                Err(error) => tracing::warn!(%error, "the directory sent something that is no certificate"),
            }
        }
        if !changes.revocations.is_empty() {
            match convert::signed::<Revocations>(&changes.revocations) {
                Ok(list) => match known.keyring.revoke(&list) {
                    Ok(()) | Err(TrustError::OldRevocations { .. }) => {}
                    Err(error) => tracing::warn!(%error, "a revocation list from the directory is not believed"),
                },
                Err(error) => tracing::warn!(%error, "the directory sent something that is no revocation list"),
            }
        }
        let Some(at) = changes.at.map(FeedNumber::from) else { return };
        if known.seen.is_some_and(|seen| seen >= at) {
            return;
        }
        for node in changes.data_nodes {
            if !node.address.is_empty() {
                known.data_nodes.insert(NodeId(node.node), node.address);
            }
        }
        known.seen = Some(at);
    }

    /// Where another data node's gRPC server is.
    pub(crate) fn address_of(&self, node: NodeId) -> Option<String> {
        self.known.read().data_nodes.get(&node).cloned()
    }

    pub(crate) fn verify<S: Statement>(&self, signed: Signed<S>) -> Result<Verified<S>, TrustError> {
        self.known.read().keyring.verify(signed)
    }

    /// Signs as this node, in the present generation.
    pub(crate) fn sign<S: Statement>(&self, statement: S) -> Signed<S> {
        let generation = self.generation();
        let signer = self.signer.read();
        signer.key.sign(self.cluster, generation, signer.certificate.statement.serial, statement)
    }

    /// The certificate of the key that this node signs with.
    pub(crate) fn certificate(&self) -> Signed<Certificate> {
        self.signer.read().certificate.clone()
    }

    /// Signs with another key from now on. What the last one signed is believed until it is revoked.
    pub(crate) fn sign_with(&self, key: SecretKey, certificate: Signed<Certificate>) -> Result<(), TrustError> {
        self.known.write().keyring.admit(&certificate)?;
        *self.signer.write() = Signer { key, certificate };
        Ok(())
    }
}
