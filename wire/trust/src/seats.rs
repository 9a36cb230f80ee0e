//! Seats: who may be connected to one listener at a time.
//!
//! Decides whether a connection is let in, by the role that its certificate proves, and what every client has under way on all of its
//! connections. A connection above a limit is let in for a moment to be told so, if there are few of those, else it is closed.
//! Meta nodes are always let in: nothing that clients do keeps the group from its members.

use crate::{
    identity::Identity,
    limits::{ADMIN_CONNECTIONS_MAX, CONNECTION_AGAIN, DATA_NODE_CONNECTIONS_MAX, FAREWELLS_MAX, Limits},
    room::{Full, Held, Room},
};
use metrics::{Gauge, counter, gauge};
use parking_lot::Mutex;
use quarry_proto::{refusal::Refusal, v1};
use quarry_wire::{certificate::Role, units::millis};
use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    net::IpAddr,
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::time::Instant;

/// The gauge of connections that were let in, with the labels `listener` and `of`.
pub const CONNECTIONS: &str = "quarry_listener_connections";
/// The counter of connections that were not, with the labels `listener` and `resource`.
pub const TURNED_AWAY: &str = "quarry_listener_connections_refused_total";
pub(crate) const CUT: &str = "quarry_listener_connections_cut_total";

/// Connections of one listener.
pub(crate) struct Seats {
    limits: Limits,
    metas: Arc<Room>,
    data_nodes: Arc<Room>,
    admins: Arc<Room>,
    clients: Arc<Room>,
    farewells: Arc<Room>,
    accounts: Mutex<HashMap<Who, Weak<Account>>>,
}

/// A client, as far as it can be told from others.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Who {
    Named(String),
    At(IpAddr),
    Unknown,
}

/// What one client has under way, on all its connections.
pub(crate) struct Account {
    pub(crate) calls: Arc<Room>,
    pub(crate) bytes: Arc<Room>,
    connections: Arc<Room>,
}

/// One connection, as its calls know it.
pub(crate) struct Line {
    pub(crate) account: Arc<Account>,
    /// It was let in only to be told this.
    pub(crate) turned_away: Option<Refusal>,
    replies: Mutex<Replies>,
}

/// The answers that are on their way.
#[derive(Default)]
struct Replies {
    next: u64,
    since: BTreeMap<u64, Instant>,
}

/// A connection that was let in; given up when dropped.
pub(crate) struct Seat {
    pub(crate) line: Arc<Line>,
    _held: [Option<Held>; 2],
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line").field("turned_away", &self.turned_away).finish_non_exhaustive()
    }
}
impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.line.fmt(f)
    }
}
impl fmt::Debug for Seats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seats").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Account {
    fn new(limits: &Limits) -> Arc<Self> {
        let room = |most| Room::new(most, Gauge::noop());
        Arc::new(Self {
            calls: room(limits.calls_per_client_max),
            bytes: room(limits.bytes_per_client_max),
            connections: room(limits.connections_per_client_max),
        })
    }
}

impl Line {
    fn new(account: Arc<Account>, turned_away: Option<Refusal>) -> Arc<Self> {
        Arc::new(Self { account, turned_away, replies: Mutex::default() })
    }

    /// The connection of calls that came by none.
    pub(crate) fn of_nobody(limits: &Limits) -> Arc<Self> {
        Self::new(Account::new(limits), None)
    }

    /// An answer begins its way.
    pub(crate) fn reply_begins(&self) -> u64 {
        let mut replies = self.replies.lock();
        let name = replies.next;
        replies.next += 1;
        replies.since.insert(name, Instant::now());
        name
    }

    /// It was taken, or nobody waits for it any more.
    pub(crate) fn reply_ends(&self, name: u64) {
        self.replies.lock().since.remove(&name);
    }

    /// Whether an answer has not been taken for longer than `most`.
    pub(crate) fn is_slow(&self, most: Duration) -> bool {
        self.replies.lock().since.first_key_value().is_some_and(|(_, since)| since.elapsed() > most)
    }
}

impl Seats {
    pub(crate) fn new(limits: Limits) -> Arc<Self> {
        let room =
            |of: &'static str, most| Room::new(most, zero(gauge!(CONNECTIONS, "listener" => "grpc", "of" => of)));
        // All are shown from the start, as zeros.
        for resource in [ALL, ONE] {
            drop(counter!(TURNED_AWAY, "listener" => "grpc", "resource" => resource));
        }
        for why in ["hello", "reply"] {
            drop(counter!(CUT, "why" => why));
        }
        Arc::new(Self {
            metas: room("meta", usize::MAX),
            data_nodes: room("datanode", DATA_NODE_CONNECTIONS_MAX),
            admins: room("admin", ADMIN_CONNECTIONS_MAX),
            clients: room("client", limits.connections_max),
            farewells: room("turned_away", FAREWELLS_MAX),
            accounts: Mutex::default(),
            limits,
        })
    }

    /// Lets a connection in, whose other end proved to be `peer`, at `address`; none if it is to be closed.
    pub(crate) fn seat(&self, peer: Option<&Identity>, address: Option<IpAddr>) -> Option<Seat> {
        let account = self.account(peer, address);
        match self.room_for(peer, &account) {
            Ok(held) => Some(Seat { line: Line::new(account, None), _held: held }),
            Err((resource, full)) => {
                counter!(TURNED_AWAY, "listener" => "grpc", "resource" => resource).increment(1);
                let farewell = self.farewells.take(1).ok()?;
                let line = Line::new(account, Some(too_many(resource, full, CONNECTION_AGAIN)));
                Some(Seat { line, _held: [Some(farewell), None] })
            }
        }
    }

    fn room_for(&self, peer: Option<&Identity>, account: &Account) -> Result<[Option<Held>; 2], (&'static str, Full)> {
        let is = |role| peer.is_some_and(|peer| peer.is(role));
        if is(Role::Meta) {
            return Ok([Some(self.metas.take_anyway(1)), None]);
        }
        if is(Role::DataNode) {
            return self.data_nodes.take(1).map(|held| [Some(held), None]).map_err(|full| (ALL, full));
        }
        if is(Role::Admin)
            && let Ok(held) = self.admins.take(1)
        {
            return Ok([Some(held), None]);
        }
        let own = account.connections.take(1).map_err(|full| (ONE, full))?;
        let held = self.clients.take(1).map_err(|full| (ALL, full))?;
        Ok([Some(own), Some(held)])
    }

    fn account(&self, peer: Option<&Identity>, address: Option<IpAddr>) -> Arc<Account> {
        let who = match (peer, address) {
            (Some(peer), _) => Who::Named(peer.to_string()),
            (None, Some(address)) => Who::At(address),
            (None, None) => Who::Unknown,
        };
        let mut accounts = self.accounts.lock();
        if let Some(account) = accounts.get(&who).and_then(Weak::upgrade) {
            return account;
        }
        // Those of clients that left are swept out whenever another one comes: there are no more than came since the last sweep.
        accounts.retain(|_, account| account.strong_count() > 0);
        let account = Account::new(&self.limits);
        accounts.insert(who, Arc::downgrade(&account));
        account
    }
}

/// Shows a gauge from the start.
pub(crate) fn zero(gauge: Gauge) -> Gauge {
    gauge.increment(0.0);
    gauge
}

/// What connections are refused for.
const ALL: &str = "connections";
const ONE: &str = "connections of one client";

/// The refusal of whoever finds a room full.
pub(crate) fn too_many(resource: &str, full: Full, again: Duration) -> Refusal {
    Refusal::TooManyRequests(v1::TooManyRequests {
        resource: resource.to_owned(),
        limit: full.limit as u64,
        found: full.found as u64,
        retry_after_ms: millis(again),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_wire::ids::{ClusterUuid, NodeId};
    use std::net::Ipv4Addr;

    const CLUSTER: ClusterUuid = ClusterUuid([3; 16]);

    fn client(name: &str, role: Role) -> Identity {
        Identity::client(CLUSTER, &[role], name).unwrap()
    }

    fn few() -> Arc<Seats> {
        Seats::new(Limits { connections_max: 3, connections_per_client_max: 2, ..Limits::default() })
    }

    fn refused(seat: Option<&Seat>) -> (String, u64, u64) {
        match &seat.unwrap().line.turned_away {
            Some(Refusal::TooManyRequests(it)) if it.retry_after_ms > 0 => (it.resource.clone(), it.limit, it.found),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_client_has_its_share_of_connections_and_all_have_theirs_and_who_left_makes_room() {
        let (seats, alice, bob) = (few(), client("alice", Role::Writer), client("bob", Role::Reader));
        let seat = |who: &Identity| seats.seat(Some(who), None);
        let mut held = vec![seat(&alice), seat(&alice)];
        assert_eq!(refused(seat(&alice).as_ref()), ("connections of one client".to_owned(), 2, 3));
        held.push(seat(&bob));
        assert!(held.iter().all(|it| it.as_ref().unwrap().line.turned_away.is_none()));
        assert_eq!(refused(seat(&bob).as_ref()), ("connections".to_owned(), 3, 4));
        held.pop();
        assert!(seat(&bob).unwrap().line.turned_away.is_none());
    }

    #[test]
    fn nodes_and_administrators_get_in_while_clients_have_theirs_filled() {
        let seats = few();
        let address = Some(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let strangers: Vec<Seat> = (0..2).map(|_| seats.seat(None, address).unwrap()).collect();
        let alice = seats.seat(Some(&client("alice", Role::Writer)), address).unwrap();
        assert_eq!(refused(seats.seat(Some(&client("bob", Role::Writer)), None).as_ref()).0, "connections");
        let node = |role, id| Identity::node(CLUSTER, role, NodeId(id)).unwrap();
        for peer in [node(Role::Meta, 2), node(Role::DataNode, 101), client("ops", Role::Admin)] {
            assert!(seats.seat(Some(&peer), None).unwrap().line.turned_away.is_none(), "{peer}");
        }
        let metas: Vec<_> = (0..10_000).map(|_| seats.seat(Some(&node(Role::Meta, 3)), None).unwrap()).collect();
        assert!(metas.iter().all(|seat| seat.line.turned_away.is_none()));
        drop((strangers, alice));
    }

    #[test]
    fn only_so_many_are_told_that_there_is_no_seat_and_the_others_are_closed() {
        let (seats, alice) = (few(), client("alice", Role::Writer));
        let held: Vec<_> = (0..2 + FAREWELLS_MAX).map(|_| seats.seat(Some(&alice), None).unwrap()).collect();
        assert!(seats.seat(Some(&alice), None).is_none());
        drop(held);
        assert!(seats.seat(Some(&alice), None).unwrap().line.turned_away.is_none());
    }

    #[test]
    fn accounts_of_clients_that_left_are_forgotten() {
        let seats = few();
        for number in 0..100 {
            drop(seats.seat(Some(&client(&format!("client-{number}"), Role::Reader)), None));
        }
        assert!(seats.accounts.lock().len() <= 1, "{}", seats.accounts.lock().len());
    }
}
