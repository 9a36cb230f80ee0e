//! Every limit of a listener, in one place: what one client, and all of them together, can use up.
//!
//! Numbers only; [`crate::Door`] holds whoever comes to them. What an operator may have to change is in [`Limits`], the rest is fixed here.

use quarry_wire::limits::MESSAGE_BYTES_MAX;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How long a client may take to show who it is.
pub(crate) const HANDSHAKE_MAX: Duration = Duration::from_secs(5);
/// Handshakes under way at once. When there are as many, a newcomer takes the place of whoever has taken longest ..
pub(crate) const HANDSHAKES_MAX: usize = 1024;
/// .. but nobody is sent away sooner than this: until then newcomers wait in the system's queue.
pub(crate) const HANDSHAKE_SURE: Duration = Duration::from_millis(250);
/// How long a client may take to begin to speak HTTP/2, once it is let in.
pub(crate) const HELLO_MAX: Duration = Duration::from_secs(5);
/// Connections that wait in the system's queue until they are accepted, if the system allows as many (`net.core.somaxconn`). One that finds
/// it full comes again after a second.
pub(crate) const BACKLOG: u32 = 4096;
/// After a connection could not be accepted (there are no descriptors left) none is tried for this long.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Connections of data nodes. Those of meta nodes are counted and never refused.
pub(crate) const DATA_NODE_CONNECTIONS_MAX: usize = 1024;
/// Connections of administrators beside those of clients, so that one can look while the clients have theirs filled.
pub(crate) const ADMIN_CONNECTIONS_MAX: usize = 64;
/// Connections above the limits that are told so before they are closed. Those above this are closed at once.
pub(crate) const FAREWELLS_MAX: usize = 64;
/// How long that takes at most.
pub(crate) const FAREWELL_MAX: Duration = Duration::from_millis(900);

/// Calls at once on one connection; further ones wait at the client.
pub(crate) const STREAMS_MAX: u32 = 1024;
/// Calls of nodes to each other under way at once, those of Raft not counted.
pub(crate) const NODE_CALLS_MAX: usize = 4096;
/// Calls of administrators under way at once.
pub(crate) const ADMIN_CALLS_MAX: usize = 64;
/// Questions about health under way at once; a watch lasts as long as its caller likes.
pub(crate) const HEALTH_CALLS_MAX: usize = 256;
/// Headers of one call, in bytes.
pub(crate) const HEADER_BYTES_MAX: u32 = 16 << 10;
/// How long a request may be on its way, and how long one is at most worked on: whatever the caller says.
pub(crate) const REQUEST_MAX: Duration = Duration::from_secs(10);
pub(crate) const CALL_MAX: Duration = Duration::from_secs(65);
/// An answer up to this length always has room.
pub(crate) const REPLY_BYTES_SURE: usize = 64 << 10;
/// How long an answer may be on its way. A connection that does not take one for longer is closed.
pub(crate) const REPLY_MAX: Duration = Duration::from_secs(30);
/// How often connections are looked at for that.
pub(crate) const REPLY_LOOK: Duration = Duration::from_secs(5);
/// A connection is asked whether it is alive this often, and closed when it does not say so for as long.
pub(crate) const KEEPALIVE: Duration = Duration::from_secs(10);

/// When somebody who was refused for want of a connection, a call, or bytes should come back.
pub(crate) const CONNECTION_AGAIN: Duration = Duration::from_secs(1);
pub(crate) const CALL_AGAIN: Duration = Duration::from_millis(50);
pub(crate) const BYTES_AGAIN: Duration = Duration::from_millis(200);

// Who is told to come back finds its old connection closed by then.
const _: () = assert!(FAREWELL_MAX.as_millis() < CONNECTION_AGAIN.as_millis());
// A service says itself that a call took too long, at 60 s at the latest, before this listener ends it.
const _: () = assert!(CALL_MAX.as_secs() > 60 && REQUEST_MAX.as_secs() < CALL_MAX.as_secs());
// A handshake that is not disturbed has its whole time.
const _: () = assert!(HANDSHAKE_SURE.as_millis() < HANDSHAKE_MAX.as_millis());

/// Most connections that a limit can be set to.
const CONNECTIONS_MOST: usize = 1 << 20;

/// What the clients of one listener may use up. A client is whoever a certificate names; without TLS, an address.
///
/// Nodes and administrators have room of their own beside this.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Connections of all clients.
    pub connections_max: usize,
    /// Connections of one client.
    pub connections_per_client_max: usize,
    /// Calls of all clients under way at once, until their answers were taken.
    pub calls_max: usize,
    /// Calls of one client under way at once.
    pub calls_per_client_max: usize,
    /// Bytes of requests and answers of all clients that are held at once. No call begins while there are more.
    pub bytes_max: usize,
    /// The same for one client.
    pub bytes_per_client_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            connections_per_client_max: 2048,
            calls_max: 4096,
            calls_per_client_max: 1024,
            bytes_max: 512 << 20,
            bytes_per_client_max: 128 << 20,
        }
    }
}

/// A limit that cannot be meant.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{name} must be {expected}, found {found}")]
pub struct LimitError {
    /// Which, as configuration calls it.
    pub name: &'static str,
    /// What it must be.
    pub expected: String,
    /// What it is.
    pub found: usize,
}

impl Limits {
    /// Refuses limits that leave no room for anybody, or where one client's are more than all clients'.
    ///
    /// # Errors
    /// [`LimitError`].
    pub fn check(&self) -> Result<(), LimitError> {
        let within = |name, found, least: usize, most: usize| {
            if (least..=most).contains(&found) {
                Ok(())
            } else {
                Err(LimitError { name, expected: format!("{least} to {most}"), found })
            }
        };
        let one = |name, found, most| within(name, found, 1, most);
        one("limits.connections_max", self.connections_max, CONNECTIONS_MOST)?;
        one("limits.connections_per_client_max", self.connections_per_client_max, self.connections_max)?;
        one("limits.calls_max", self.calls_max, CONNECTIONS_MOST)?;
        one("limits.calls_per_client_max", self.calls_per_client_max, self.calls_max)?;
        // With room for less than one message nobody could ever be served.
        within("limits.bytes_max", self.bytes_max, MESSAGE_BYTES_MAX, usize::MAX)?;
        within("limits.bytes_per_client_max", self.bytes_per_client_max, MESSAGE_BYTES_MAX, self.bytes_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_leave_room_for_somebody_and_one_client_has_no_more_than_all() {
        let usual = Limits::default();
        assert_eq!(usual.check(), Ok(()));
        for (wrong, name) in [
            (Limits { connections_max: 0, ..usual }, "limits.connections_max"),
            (
                Limits { connections_per_client_max: usual.connections_max + 1, ..usual },
                "limits.connections_per_client_max",
            ),
            (Limits { calls_max: 0, ..usual }, "limits.calls_max"),
            (Limits { calls_per_client_max: usual.calls_max + 1, ..usual }, "limits.calls_per_client_max"),
            (Limits { bytes_max: MESSAGE_BYTES_MAX - 1, ..usual }, "limits.bytes_max"),
            (Limits { bytes_per_client_max: MESSAGE_BYTES_MAX - 1, ..usual }, "limits.bytes_per_client_max"),
        ] {
            assert_eq!(wrong.check().map_err(|it| it.name), Err(name));
        }
    }
}
