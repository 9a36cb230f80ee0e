//! Credentials for connections: certificates that the cluster's root key signs, each in one PEM file with its private key.
//!
//! What is in a certificate and who believes it is the business of `quarry-trust`; this makes them, which takes the root key.

use crate::identity::{IdentityError, Root, write_secret_over};
use quarry_trust::{Identity, identity::role, issuer};
use quarry_wire::certificate::Role;
use rcgen::{
    CertificateParams, DistinguishedName, DnType, DnValue, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ED25519, SanType,
};
use std::{
    net::IpAddr,
    path::Path,
    time::{Duration, UNIX_EPOCH},
};

/// What stands before the seed of an ed25519 key in PKCS #8.
const PKCS8_ED25519: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];
/// Certificates begin this long before they are made: clocks differ.
pub const BEGINS_BEFORE: Duration = Duration::from_secs(60 * 60);

/// From when to when a certificate is believed, in milliseconds since 1970.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Validity {
    /// From.
    pub from_ms: u64,
    /// To.
    pub to_ms: u64,
}

impl Validity {
    /// From a little before `now_ms` for this long.
    #[must_use]
    pub fn lasting(now_ms: u64, span: Duration) -> Self {
        let ms = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX / 4);
        Self { from_ms: now_ms.saturating_sub(ms(BEGINS_BEFORE)), to_ms: now_ms.saturating_add(ms(span)) }
    }
}

/// Makes credentials for `identity`: the text of their file. `hosts` are names and addresses that other tools than ours may look for; ours
/// know nodes by who they are.
///
/// # Errors
/// [`IdentityError::Certificate`] if a host cannot stand in a certificate, or the system gives no random bytes.
pub fn issue(root: &Root, identity: &Identity, hosts: &[String], validity: Validity) -> Result<String, IdentityError> {
    let wrong = |error: rcgen::Error| IdentityError::Certificate(error.to_string());
    let named = |name: String| {
        let mut names = DistinguishedName::new();
        names.push(DnType::CommonName, DnValue::Utf8String(name));
        names
    };
    let mut authority = CertificateParams::default();
    authority.distinguished_name = named(issuer(root.cluster));
    let seed = [&PKCS8_ED25519[..], &root.key.seed()].concat();
    let issuer = Issuer::new(authority, KeyPair::try_from(seed).map_err(wrong)?);

    let mut params = CertificateParams::default();
    params.distinguished_name = named(identity.to_string());
    let at = |ms: u64| (UNIX_EPOCH + Duration::from_millis(ms)).into();
    (params.not_before, params.not_after) = (at(validity.from_ms), at(validity.to_ms));
    params.subject_alt_names.push(SanType::URI(identity.to_string().try_into().map_err(wrong)?));
    for host in hosts {
        params.subject_alt_names.push(match host.parse::<IpAddr>() {
            Ok(address) => SanType::IpAddress(address),
            Err(_) => SanType::DnsName(host.clone().try_into().map_err(wrong)?),
        });
    }
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    if identity.is(Role::Meta) || identity.is(Role::DataNode) {
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
    }
    let key = KeyPair::generate_for(&PKCS_ED25519).map_err(wrong)?;
    let certificate = params.signed_by(&key, &issuer).map_err(wrong)?;
    Ok(certificate.pem() + &key.serialize_pem())
}

/// Makes credentials and puts them into `path`, in one step: whoever reads it finds the old ones or the new ones whole.
///
/// # Errors
/// [`IdentityError`].
pub fn write(
    path: &Path,
    root: &Root,
    identity: &Identity,
    hosts: &[String],
    validity: Validity,
) -> Result<(), IdentityError> {
    write_secret_over(path, &issue(root, identity, hosts, validity)?)
}

/// The role of a client with this name.
///
/// # Errors
/// What it must be.
pub fn client_role(name: &str) -> Result<Role, String> {
    let client = |role: &Role| matches!(role, Role::Writer | Role::Reader | Role::Admin);
    role(name).filter(client).ok_or_else(|| "a role is writer, reader or admin".to_owned())
}

/// The role of a node with this name.
///
/// # Errors
/// What it must be.
pub fn node_role(name: &str) -> Result<Role, String> {
    let node = |role: &Role| matches!(role, Role::Meta | Role::DataNode);
    role(name).filter(node).ok_or_else(|| "a role is meta or datanode".to_owned())
}
