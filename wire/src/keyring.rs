//! The keyring: whom to believe (*Nothing unsigned*).
//!
//! Holds the cluster's name, the public half of its root key, the highest generation seen, the certificates that the root signed and the
//! newest revocation list. A statement is believed if its certificate is known, not revoked, has the role that may make such statements, is
//! the certificate of the node that the statement is about, and its key made the signature, for this cluster and the present generation.

use crate::{
    certificate::{Certificate, Revocations, Role},
    ids::{CertificateSerial, ClusterUuid, Generation, NodeId},
    signed::{PublicKey, Signed, Statement, StatementKind},
    together::{self, Claim},
};
use ed25519_dalek::VerifyingKey;
use std::collections::BTreeMap;

/// Why a statement is not believed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TrustError {
    /// It is of a generation that is over, or of one not heard of yet.
    #[error(
        "the statement is of generation {found}, this cluster is in generation {expected}: its memory was voided by a restore"
    )]
    Generation {
        /// The present one.
        expected: Generation,
        /// The statement's.
        found: Generation,
    },
    /// Its certificate is unknown here.
    #[error("the certificate {serial} is not known here: ask the directory for it")]
    UnknownCertificate {
        /// The serial named.
        serial: CertificateSerial,
    },
    /// Its certificate was revoked.
    #[error("the certificate {serial} was revoked")]
    Revoked {
        /// The serial named.
        serial: CertificateSerial,
    },
    /// Its signer may not make such statements.
    #[error("only a {expected} may say this, the signer is a {found}")]
    Role {
        /// Who may.
        expected: Role,
        /// Who did.
        found: Role,
    },
    /// It is about another node than its signer.
    #[error("the statement is about {expected} but was signed by {found}")]
    Signer {
        /// The node that the statement is about.
        expected: NodeId,
        /// The node that signed.
        found: NodeId,
    },
    /// The signature is not that key's over these bytes for this cluster.
    #[error("the signature does not match: the bytes were changed, or made for another cluster")]
    BadSignature,
    /// A public key is no usable point of the curve.
    #[error("the public key is not usable")]
    BadKey,
    /// The same serial was certified before with other contents.
    #[error("the certificate {serial} is already known with other contents")]
    SerialReused {
        /// The serial.
        serial: CertificateSerial,
    },
    /// Another revocation list of this number is held.
    #[error("revocation list {number} is already known with other serials: give the next one a greater number")]
    RevocationsReused {
        /// The number.
        number: u64,
    },
    /// The revocation list is older than the one held.
    #[error("revocation list {found} is older than list {held}")]
    OldRevocations {
        /// The number held.
        held: u64,
        /// The number offered.
        found: u64,
    },
}

/// A statement whose signature was checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Verified<S>(Signed<S>);

impl<S> Verified<S> {
    /// What was said.
    #[must_use]
    pub const fn get(&self) -> &S {
        &self.0.statement
    }
    /// The statement with its signature, to pass it on.
    #[must_use]
    pub const fn signed(&self) -> &Signed<S> {
        &self.0
    }
    /// The statement alone.
    #[must_use]
    pub fn into_inner(self) -> S {
        self.0.statement
    }
}

/// Whom to believe.
#[derive(Clone, Debug)]
pub struct Keyring {
    cluster: ClusterUuid,
    root: VerifyingKey,
    generation: Generation,
    certificates: BTreeMap<CertificateSerial, (Signed<Certificate>, VerifyingKey)>,
    revocations: Revocations,
}

impl Keyring {
    /// A keyring that knows the root alone.
    ///
    /// # Errors
    /// [`TrustError::BadKey`] if `root` is no usable key.
    pub fn new(cluster: ClusterUuid, root: PublicKey) -> Result<Self, TrustError> {
        let root = root.verifying().ok_or(TrustError::BadKey)?;
        Ok(Self {
            cluster,
            root,
            generation: Generation(0),
            certificates: BTreeMap::new(),
            revocations: Revocations::default(),
        })
    }

    /// The cluster's name.
    #[must_use]
    pub const fn cluster(&self) -> ClusterUuid {
        self.cluster
    }
    /// The root's public key.
    #[must_use]
    pub fn root(&self) -> PublicKey {
        PublicKey(self.root.to_bytes())
    }
    /// The highest generation seen.
    #[must_use]
    pub const fn generation(&self) -> Generation {
        self.generation
    }
    /// Number of the newest revocation list.
    #[must_use]
    pub const fn revocation_number(&self) -> u64 {
        self.revocations.number
    }
    /// The certificates held, revoked ones included.
    pub fn certificates(&self) -> impl Iterator<Item = &Signed<Certificate>> {
        self.certificates.values().map(|(signed, _)| signed)
    }

    /// Takes note of a generation; a lower one than the highest seen changes nothing and is answered false.
    pub fn see_generation(&mut self, generation: Generation) -> bool {
        self.generation = self.generation.max(generation);
        self.generation == generation
    }

    /// Takes a certificate that the root signed. Taking it again changes nothing.
    ///
    /// # Errors
    /// [`TrustError`] if the root did not sign it, or signed another one with its serial before.
    pub fn admit(&mut self, certificate: &Signed<Certificate>) -> Result<(), TrustError> {
        self.signed_by_root(certificate)?;
        let said = &certificate.statement;
        let key = said.key.verifying().ok_or(TrustError::BadKey)?;
        match self.certificates.get(&said.serial) {
            Some((held, _)) if held.statement != *said => Err(TrustError::SerialReused { serial: said.serial }),
            Some(_) => Ok(()),
            None => {
                self.certificates.insert(said.serial, (certificate.clone(), key));
                Ok(())
            }
        }
    }

    /// Whether the newest revocation list names this certificate.
    #[must_use]
    pub fn is_revoked(&self, serial: CertificateSerial) -> bool {
        self.revocations.serials.contains(&serial)
    }

    /// Takes a newer revocation list that the root signed. The same list again changes nothing.
    ///
    /// # Errors
    /// [`TrustError`] if the root did not sign it, or a newer one is held, or another one of its number.
    pub fn revoke(&mut self, list: &Signed<Revocations>) -> Result<(), TrustError> {
        self.signed_by_root(list)?;
        if list.statement.number < self.revocations.number {
            return Err(TrustError::OldRevocations { held: self.revocations.number, found: list.statement.number });
        }
        // Whoever holds a number asks for no list of that number again.
        if list.statement.number == self.revocations.number && list.statement != self.revocations {
            return Err(TrustError::RevocationsReused { number: list.statement.number });
        }
        self.revocations = list.statement.clone();
        Ok(())
    }

    /// Checks a statement of a node: certificate, role, node, generation, signature.
    ///
    /// # Errors
    /// The first check that fails.
    pub fn verify<S: Statement>(&self, signed: Signed<S>) -> Result<Verified<S>, TrustError> {
        if signed.is_signed_by(self.cluster, self.signer(&signed)?) {
            Ok(Verified(signed))
        } else {
            Err(TrustError::BadSignature)
        }
    }

    /// Checks statements as [`Self::verify`] does, their signatures together: many take about six tenths of the time. What that changes is said in
    /// `together.rs`: a node can sign so that it passes here and not alone.
    pub fn verify_all<S: Statement>(&self, statements: &[&Signed<S>]) -> Vec<Result<(), TrustError>> {
        let signers: Vec<_> = statements.iter().map(|signed| self.signer(signed)).collect();
        let claims = statements.iter().zip(&signers);
        let claims = claims.filter_map(|(signed, signer)| Some(signed.claim(self.cluster, signer.ok()?)));
        let claims: Vec<Claim<'_>> = claims.collect();
        let all = claims.is_empty() || together::are_good(&claims);
        let mut claims = claims.iter();
        let verdict = |signer: Result<&VerifyingKey, TrustError>| {
            signer?;
            let claim = claims.next().expect("there is a claim of each known signer");
            if all || claim.is_good() { Ok(()) } else { Err(TrustError::BadSignature) }
        };
        signers.into_iter().map(verdict).collect()
    }

    /// The key that a statement must be signed with, if its signer may say such a thing.
    fn signer<S: Statement>(&self, signed: &Signed<S>) -> Result<&VerifyingKey, TrustError> {
        let expected_role = match S::KIND {
            StatementKind::Certificate | StatementKind::Revocations => return self.root_for(signed),
            StatementKind::Grant => Role::Meta,
            StatementKind::AttestationBatch | StatementKind::RegionRecord => Role::DataNode,
        };
        if signed.generation != self.generation {
            return Err(TrustError::Generation { expected: self.generation, found: signed.generation });
        }
        let serial = signed.serial;
        let (certificate, key) = self.certificates.get(&serial).ok_or(TrustError::UnknownCertificate { serial })?;
        if self.revocations.serials.contains(&serial) {
            return Err(TrustError::Revoked { serial });
        }
        let certified = &certificate.statement;
        if certified.role != expected_role {
            return Err(TrustError::Role { expected: expected_role, found: certified.role });
        }
        let about = signed.statement.signer().expect("only statements of the root are about no node");
        if certified.node != about {
            return Err(TrustError::Signer { expected: about, found: certified.node });
        }
        Ok(key)
    }

    fn root_for<S: Statement>(&self, signed: &Signed<S>) -> Result<&VerifyingKey, TrustError> {
        if signed.generation != Generation(0) {
            return Err(TrustError::Generation { expected: Generation(0), found: signed.generation });
        }
        if signed.serial != CertificateSerial(0) {
            return Err(TrustError::UnknownCertificate { serial: signed.serial });
        }
        Ok(&self.root)
    }

    fn signed_by_root<S: Statement>(&self, signed: &Signed<S>) -> Result<(), TrustError> {
        let root = self.root_for(signed)?;
        if signed.is_signed_by(self.cluster, root) { Ok(()) } else { Err(TrustError::BadSignature) }
    }
}
