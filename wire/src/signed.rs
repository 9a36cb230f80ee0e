//! Signed statements: what is signed, and how it travels.
//!
//! ```text
//! signed bytes  = domain "quarry-statement-v1" ‖ cluster UUID (16) ‖ statement
//! statement     = kind (1) ‖ generation (4) ‖ certificate serial of the signer (8) ‖ body (layout of the kind)
//! what travels  = statement ‖ ed25519 signature (64)
//! ```
//! The cluster's UUID is never sent: each side puts in its own, so a statement of another cluster fails its signature. Statements of the root
//! (certificates, revocations) hold for every generation and carry generation 0 and serial 0.
//! Checking who signed is the business of [`crate::keyring`].

use crate::{
    canonical::{DecodeError, Reader, Writer},
    ids::{CertificateSerial, ClusterUuid, Generation, NodeId},
    together::Claim,
};
use ed25519_dalek::{Signer as _, SigningKey, VerifyingKey};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;

const DOMAIN: &[u8] = b"quarry-statement-v1";
/// Bytes of an ed25519 signature.
pub const SIGNATURE_BYTES: usize = 64;

/// Kinds of statements. A statement of one kind never passes for one of another: the kind is signed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum StatementKind {
    /// The root says: this key is that node's, in that role.
    Certificate,
    /// The root says: these certificates are void.
    Revocations,
    /// A meta node says: this writer may fill these slabs.
    Grant,
    /// A data node says: I hold these copies.
    AttestationBatch,
    /// A data node says: my region is at this address under this key.
    RegionRecord,
}

impl StatementKind {
    /// The byte that stands for it.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Certificate => 1,
            Self::Revocations => 2,
            Self::Grant => 3,
            Self::AttestationBatch => 4,
            Self::RegionRecord => 5,
        }
    }
}

/// Something that can be signed.
pub trait Statement: Sized {
    /// Its kind.
    const KIND: StatementKind;
    /// What errors call it.
    const NAME: &'static str;
    /// The node that must have signed it; none for statements of the root.
    fn signer(&self) -> Option<NodeId>;
    /// Writes the body.
    fn write(&self, out: &mut Writer);
    /// Reads the body; the reader is not finished here.
    ///
    /// # Errors
    /// [`DecodeError`], for every body that [`Statement::write`] would not have written.
    fn read(from: &mut Reader<'_>) -> Result<Self, DecodeError>;
}

/// An ed25519 signature.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Signature(pub [u8; SIGNATURE_BYTES]);

impl fmt::Debug for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Signature({}..)", hex::encode(&self.0[..4]))
    }
}
impl Serialize for Signature {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}
impl<'de> Deserialize<'de> for Signature {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visit;
        impl de::Visitor<'_> for Visit {
            type Value = Signature;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{SIGNATURE_BYTES} bytes")
            }
            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Signature, E> {
                bytes.try_into().map(Signature).map_err(|_| E::invalid_length(bytes.len(), &self))
            }
        }
        deserializer.deserialize_byte_buf(Visit)
    }
}

/// A statement with its signature, not yet checked. Only [`crate::keyring::Keyring`] turns it into something to act on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Signed<S> {
    /// What is said.
    pub statement: S,
    /// Generation in which it was said; 0 for the root.
    pub generation: Generation,
    /// Certificate of the key that signed; 0 for the root.
    pub serial: CertificateSerial,
    /// The signature.
    pub signature: Signature,
}

impl<S: Statement> Signed<S> {
    fn head(&self) -> Writer {
        let mut out = Writer::new();
        out.u8(S::KIND.code());
        out.u32(self.generation.0);
        out.u64(self.serial.0);
        self.statement.write(&mut out);
        out
    }

    /// The bytes that travel.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = self.head();
        out.bytes(&self.signature.0);
        out.finish()
    }

    /// Reads what [`Signed::encode`] wrote.
    ///
    /// # Errors
    /// [`DecodeError`]; nothing is said about the signature.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut from = Reader::new(S::NAME, bytes);
        let kind = from.u8()?;
        if kind != S::KIND.code() {
            return Err(from.field("kind", u64::from(kind)));
        }
        let generation = Generation(from.u32()?);
        let serial = CertificateSerial(from.u64()?);
        let statement = S::read(&mut from)?;
        let signature = Signature(from.array()?);
        from.finish()?;
        Ok(Self { statement, generation, serial, signature })
    }

    fn signed_bytes(&self, cluster: ClusterUuid) -> Vec<u8> {
        let mut out = Writer::new();
        out.bytes(DOMAIN);
        out.bytes(&cluster.0);
        out.bytes(&self.head().finish());
        out.finish()
    }

    /// Whether `key` made this signature for `cluster`. Strict: refuses weak keys and malleable signatures.
    #[must_use]
    pub fn is_signed_by(&self, cluster: ClusterUuid, key: &VerifyingKey) -> bool {
        self.claim(cluster, key).is_good()
    }

    /// That `key` made this signature for `cluster`.
    pub(crate) fn claim<'a>(&self, cluster: ClusterUuid, key: &'a VerifyingKey) -> Claim<'a> {
        let signature = ed25519_dalek::Signature::from_bytes(&self.signature.0);
        Claim { key, message: self.signed_bytes(cluster), signature }
    }
}

/// A key that signs: the root's, or a node's under its certificate.
#[derive(Clone)]
pub struct SecretKey(SigningKey);

impl SecretKey {
    /// The key with this seed of 32 bytes, which must come from the operating system's generator.
    #[must_use]
    pub fn from_seed(seed: &[u8; 32]) -> Self {
        Self(SigningKey::from_bytes(seed))
    }
    /// The seed, to be kept in a file that only its owner can read.
    #[must_use]
    pub fn seed(&self) -> [u8; 32] {
        self.0.to_bytes()
    }
    /// The public half.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.verifying_key().to_bytes())
    }
    /// Signs `statement` for `cluster`, as the holder of certificate `serial` in `generation` (both 0 for the root).
    #[must_use]
    pub fn sign<S: Statement>(
        &self,
        cluster: ClusterUuid,
        generation: Generation,
        serial: CertificateSerial,
        statement: S,
    ) -> Signed<S> {
        let mut signed = Signed { statement, generation, serial, signature: Signature([0; SIGNATURE_BYTES]) };
        signed.signature = Signature(self.0.sign(&signed.signed_bytes(cluster)).to_bytes());
        signed
    }
    /// Signs a statement of the root.
    #[must_use]
    pub fn sign_as_root<S: Statement>(&self, cluster: ClusterUuid, statement: S) -> Signed<S> {
        self.sign(cluster, Generation(0), CertificateSerial(0), statement)
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretKey(of {})", self.public())
    }
}

/// The public half of a key, as 32 bytes; shown as hex.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PublicKey(pub [u8; 32]);

impl PublicKey {
    /// The point that the bytes stand for; none if they stand for no usable key.
    #[must_use]
    pub fn verifying(&self) -> Option<VerifyingKey> {
        VerifyingKey::from_bytes(&self.0).ok().filter(|key| !key.is_weak())
    }
}
impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}
impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({self})")
    }
}
impl std::str::FromStr for PublicKey {
    type Err = hex::FromHexError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes)?;
        Ok(Self(bytes))
    }
}
