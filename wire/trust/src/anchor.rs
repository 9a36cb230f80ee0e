//! The trust anchor: the cluster's root key, which also certifies the keys that sign statements.
//!
//! There is no file of an authority: whoever knows the cluster's id and root key can check every certificate of the cluster. The name of the
//! issuer carries the id, so that two clusters under one root key do not trust each other's processes.

use crate::identity::{Identity, IdentityError};
use quarry_wire::{ids::ClusterUuid, signed::PublicKey};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore, SignatureScheme,
    client::{
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_cert_signed_by_trust_anchor,
    },
    crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature},
    pki_types::{CertificateDer, Der, ServerName, TrustAnchor, UnixTime},
    server::{
        ParsedCertificate, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use std::sync::Arc;

/// What the issuer of a cluster's certificates is called, as a common name.
#[must_use]
pub fn issuer(cluster: ClusterUuid) -> String {
    format!("quarry root {cluster}")
}

/// The one set of algorithms of this build.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// What a certificate of the cluster chains to.
pub(crate) fn roots(cluster: ClusterUuid, root: PublicKey) -> RootCertStore {
    // DER of the insides of a Name and of a SubjectPublicKeyInfo.
    const COMMON_NAME: [u8; 5] = [0x06, 0x03, 0x55, 0x04, 0x03];
    const ED25519: [u8; 7] = [0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70];
    let element = |tag: u8, content: &[u8]| {
        let length = u8::try_from(content.len()).ok().filter(|length| *length < 0x80);
        let mut der = vec![tag, length.expect("names of roots and their keys have less than 128 bytes")];
        der.extend_from_slice(content);
        der
    };
    let name = element(0x0c, issuer(cluster).as_bytes());
    let subject = element(0x31, &element(0x30, &[&COMMON_NAME[..], &name].concat()));
    let key = [&ED25519[..], &element(0x03, &[&[0][..], &root.0].concat())].concat();
    let anchor =
        TrustAnchor { subject: Der::from(subject), subject_public_key_info: Der::from(key), name_constraints: None };
    RootCertStore { roots: vec![anchor] }
}

/// Who a certificate is for; its signature is checked elsewhere.
pub(crate) fn identity_of(certificate: &CertificateDer<'_>) -> Result<Identity, Error> {
    let wrong = |why: IdentityError| Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(why))));
    let parsed = webpki::EndEntityCert::try_from(certificate)
        .map_err(|_| Error::InvalidCertificate(CertificateError::BadEncoding))?;
    let mut names = parsed.valid_uri_names().filter(|name| name.starts_with("quarry:"));
    let none = |found: &str| {
        wrong(IdentityError {
            field: "the names in the certificate",
            expected: "one quarry:// name",
            found: found.to_owned(),
        })
    };
    let name = names.next().ok_or_else(|| none("none"))?;
    if names.next().is_some() {
        return Err(none("several"));
    }
    name.parse().map_err(wrong)
}

fn of_cluster(certificate: &CertificateDer<'_>, cluster: ClusterUuid) -> Result<(), Error> {
    let identity = identity_of(certificate)?;
    if identity.cluster() == cluster {
        return Ok(());
    }
    let why = IdentityError { field: "the certificate's cluster", expected: "this one", found: identity.to_string() };
    Err(Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(why)))))
}

/// Believes servers that are nodes of the cluster. Where they listen does not matter: who is meant is checked by identity (see
/// [`crate::Expect`]), and a certificate for clients does not serve.
#[derive(Debug)]
pub(crate) struct Servers {
    pub(crate) cluster: ClusterUuid,
    pub(crate) roots: RootCertStore,
    pub(crate) algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for Servers {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = ParsedCertificate::try_from(end_entity)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, self.algorithms.all)?;
        of_cluster(end_entity, self.cluster)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.3 alone is spoken".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// Believes clients of the cluster, and refuses those that show no certificate.
#[derive(Debug)]
pub(crate) struct Clients {
    cluster: ClusterUuid,
    chain: Arc<dyn ClientCertVerifier>,
}

impl Clients {
    pub(crate) fn new(cluster: ClusterUuid, roots: RootCertStore) -> Self {
        let chain = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider());
        Self { cluster, chain: chain.build().expect("there is one root, and no revocation list to be wrong") }
    }
}

impl ClientCertVerifier for Clients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.chain.verify_client_cert(end_entity, intermediates, now)?;
        of_cluster(end_entity, self.cluster)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}
