//! Trust between processes: who is at the other end of a connection, and what they may ask for.
//!
//! Decides how processes prove who they are (mutual TLS 1.3, certificates that the cluster's root key signed), how the certificate names
//! them ([`Identity`]), which role may make which call ([`table`], one file), and how much each may use up ([`Limits`]). Leaves to the services whether a call fits the one node or
//! writer that it is about; they ask the [`Caller`]. Makes no certificates: that takes the root key, which no process has.
//!
//! Keeps *Known callers*: no call is served whose caller did not prove a role that may make it, and no node or writer is spoken for by another.
#![warn(missing_docs)]

mod accept;
mod admission;
mod anchor;
mod credentials;
mod dial;
mod door;
mod guard;
pub mod identity;
mod limits;
mod room;
mod seats;
mod stream;
pub mod table;

pub use accept::Incoming;
pub use admission::{Admission, Admitted, ReplyBody, RequestBody};
pub use anchor::issuer;
pub use credentials::CredentialsError;
pub use dial::{Connector, DialError, Expect};
pub use door::{Door, listen};
pub use guard::{Caller, Guard, Guarded};
pub use identity::Identity;
pub use limits::{LimitError, Limits};
pub use seats::{CONNECTIONS, TURNED_AWAY};
pub use stream::{Connection, Stream};

use credentials::Credentials;
use dial::Troubles;
use quarry_proto::{refusal::Refusal, v1};
use quarry_wire::{
    ids::{ClusterUuid, WriterId},
    signed::PublicKey,
};
use std::{path::Path, sync::Arc, time::Duration};
use tonic::Status;

/// Says what the metrics of this crate mean, to the recorder that is installed.
pub fn describe_metrics() {
    door::describe_metrics();
}

/// How a process proves who it is and whom it believes. Cheap to clone; clones share it.
#[derive(Clone, Debug)]
pub struct Trust {
    credentials: Option<Arc<Credentials>>,
    troubles: Arc<Troubles>,
}

impl Trust {
    /// No TLS: everyone is believed to be whoever they say, and may make every call.
    #[must_use]
    pub fn off() -> Self {
        Self { credentials: None, troubles: Arc::default() }
    }

    /// Mutual TLS with the credentials in this file, in the cluster with this id and root key.
    ///
    /// # Errors
    /// [`CredentialsError`]: the file is absent, open to others, not what it must be, expired, or of another root or cluster.
    pub fn mutual(credentials: &Path, cluster: ClusterUuid, root: PublicKey) -> Result<Self, CredentialsError> {
        let credentials = Some(Arc::new(Credentials::read(credentials, cluster, root)?));
        Ok(Self { credentials, troubles: Arc::default() })
    }

    /// Who this process is to others; nobody without TLS.
    #[must_use]
    pub fn identity(&self) -> Option<Arc<Identity>> {
        self.credentials.as_ref().map(|it| Arc::clone(&it.current().identity))
    }

    /// Why this process's certificate will not be believed any more in `ahead` from now; none if it will, or without TLS.
    #[must_use]
    pub fn ends_within(&self, ahead: Duration) -> Option<String> {
        self.credentials.as_ref().and_then(|it| it.ends_within(ahead))
    }

    /// The name of a new writer of this process. `random` must come from the operating system's generator.
    #[must_use]
    pub fn writer(&self, random: [u8; 8]) -> WriterId {
        match self.identity() {
            Some(identity) => WriterId::marked(random, identity.mark()),
            None => WriterId::anonymous(random),
        }
    }

    /// Makes connections to a server that must be this one.
    #[must_use]
    pub fn connector(&self, expect: Expect) -> Connector {
        Connector { credentials: self.credentials.clone(), troubles: Arc::clone(&self.troubles), expect }
    }

    /// The status of a call to `address` that failed. If that is because one side did not trust the other when they last met, it says so as
    /// [`Refusal::Untrusted`].
    #[must_use]
    pub fn explain(&self, address: &str, status: Status) -> Status {
        match self.distrust(address, &status) {
            Some(why) => Refusal::Untrusted(v1::Untrusted { why }).into_status(),
            None => status,
        }
    }

    /// Why the connection to `address` was not trusted, by one side or the other, if a call failed for that and was never sent.
    #[must_use]
    pub fn distrust(&self, address: &str, status: &Status) -> Option<String> {
        self.troubles.distrust(address, status)
    }

    /// The door of a server of this process.
    #[must_use]
    pub fn door(&self, limits: Limits) -> Door {
        Door::new(self.credentials.clone(), limits)
    }
}
