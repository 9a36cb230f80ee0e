//! Certificates and their revocation: which key speaks for which node, in which role.
//!
//! ```text
//! certificate body = serial (8) ‖ node (8) ‖ role (1) ‖ public key (32)
//! revocations body = number (8) ‖ count (4) ‖ count × serial (8), ascending
//! ```
//! Certificates end by revocation, never by date: no clock decides whom to trust.

use crate::{
    canonical::{DecodeError, Reader, Writer},
    ids::{CertificateSerial, NodeId},
    signed::{PublicKey, Statement, StatementKind},
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What a key may speak as.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Role {
    /// A meta node: grants.
    Meta,
    /// A data node: attestations and region records.
    DataNode,
    /// A client that writes.
    Writer,
    /// A client that reads.
    Reader,
    /// An administrator.
    Admin,
}

impl Role {
    /// The byte that stands for it.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Meta => 1,
            Self::DataNode => 2,
            Self::Writer => 3,
            Self::Reader => 4,
            Self::Admin => 5,
        }
    }
    /// The role that `code` stands for.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Meta),
            2 => Some(Self::DataNode),
            3 => Some(Self::Writer),
            4 => Some(Self::Reader),
            5 => Some(Self::Admin),
            _ => None,
        }
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Meta => "meta",
            Self::DataNode => "datanode",
            Self::Writer => "writer",
            Self::Reader => "reader",
            Self::Admin => "admin",
        })
    }
}

/// The root says that a key speaks for a node in a role. A node may have several at once while its key is rotated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Certificate {
    /// Its number; never given twice.
    pub serial: CertificateSerial,
    /// The node.
    pub node: NodeId,
    /// What it may say.
    pub role: Role,
    /// The key.
    pub key: PublicKey,
}

impl Statement for Certificate {
    const KIND: StatementKind = StatementKind::Certificate;
    const NAME: &'static str = "certificate";
    fn signer(&self) -> Option<NodeId> {
        None
    }
    fn write(&self, out: &mut Writer) {
        out.u64(self.serial.0);
        out.u64(self.node.0);
        out.u8(self.role.code());
        out.bytes(&self.key.0);
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let serial = CertificateSerial(from.u64()?);
        if serial.0 == 0 {
            // Serial 0 is how a statement of the root says that the root signed it.
            return Err(from.field("serial", 0));
        }
        let node = NodeId(from.u64()?);
        let code = from.u8()?;
        let role = Role::from_code(code).ok_or_else(|| from.field("role", u64::from(code)))?;
        Ok(Self { serial, node, role, key: PublicKey(from.array()?) })
    }
}

/// The root says which certificates are void. Of two lists the one with the greater number holds.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Revocations {
    /// Which list; 0 is the empty list before the first.
    pub number: u64,
    /// The void certificates.
    pub serials: BTreeSet<CertificateSerial>,
}

/// Most serials in one list: it must fit in a message.
const SERIALS_MAX: u32 = 100_000;

impl Statement for Revocations {
    const KIND: StatementKind = StatementKind::Revocations;
    const NAME: &'static str = "revocation list";
    fn signer(&self) -> Option<NodeId> {
        None
    }
    fn write(&self, out: &mut Writer) {
        out.u64(self.number);
        out.u32(u32::try_from(self.serials.len()).expect("SERIALS_MAX fits in a u32"));
        for serial in &self.serials {
            out.u64(serial.0);
        }
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let number = from.u64()?;
        let count = from.u32()?;
        if count > SERIALS_MAX {
            return Err(from.field("count", u64::from(count)));
        }
        let mut serials = BTreeSet::new();
        for _ in 0..count {
            let serial = CertificateSerial(from.u64()?);
            if serials.last().is_some_and(|last| *last >= serial) {
                return Err(from.field("serial", serial.0));
            }
            serials.insert(serial);
        }
        Ok(Self { number, serials })
    }
}
