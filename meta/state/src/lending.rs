//! Lending by need: which shard is lent which extent next, and which shard gives one back for it.
//!
//! Pure, and no part of apply: the directory's leader plans lendings, each shard's leader plans what its shard gives back, both from what
//! the replicas on their own node show ([`Shard::holdings`](crate::Shard::holdings)); apply validates every step. So nothing here needs a message of its own, and a
//! new leader goes on where the old one stopped.
//!
//! A shard **wants** an extent of a node when somebody found no place for a slot there (replicated, [`crate::shard::ShardCommand::Want`]), is
//! **short** when less than an eighth of what it has there is free or about to be, and **asks** below a quarter. Extents that nobody holds go
//! to those who want first, then to the short, to those who ask, and a few ahead of need. When none is left on a node, shards give back
//! ([`giving`]), in this order:
//!
//! 1. An extent that is empty, or will be: for who wants or is short, and, if it keeps its quarter of room without it, for who asks.
//! 2. An extent that can be made empty by moving its values to others: for who wants, if an eighth of room is left, or is short, if a fifth is.
//! 3. Only when nobody has either, an extent whose values go: for who wants, from every shard that has two more, the one that has most first
//!    ([`turn`]).
//!
//! As long as there is 1 or 2 anywhere on a node, no shard needs to evict there ([`coming`]): it waits instead. A shard that nobody writes to
//! needs no room: it is never short, gives all that it has empty, and evicts nothing to have some. Between two shards that have equally much nothing goes
//! to and fro.
//!
//! [`ledger`] counts *Nothing leaks* over the directory and all shards.

use crate::{
    Directory, Shard,
    directory::DirectoryCommand,
    invariant::{Invariant, Violation},
};
use quarry_wire::{
    ids::{ExtentId, Generation, NodeId, RegionId, ShardId},
    limits::extent_bytes,
};
use std::{collections::BTreeMap, sync::Arc};

/// A shard asks for more of a node when less than one part in so many of what it has there is free or about to be.
const ASKS_BELOW: u64 = 4;
/// A shard is short of a node's memory when less than one part in so many of what it has there is free or about to be.
pub(crate) const SHORT_BELOW: u64 = 8;
/// Who gives something to a shard that is short keeps one part in so many: more than eviction makes, the three sixteenths unless it is configured.
pub(crate) const LEAVES_FOR_SHORT: u64 = 5;
/// Of a node's extents one part in so many is lent ahead of need, in equal shares.
const AHEAD: u32 = 4;
/// A shard empties an extent for another one only if it has at least so many more; one is enough if it wants none itself and the other has
/// none at all.
const RICHER: u32 = 2;

/// What one shard has of each node's memory, and what it needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holdings {
    /// The shard.
    pub shard: ShardId,
    /// The generation that it is in: of another one than the directory's, it holds nothing.
    pub generation: Generation,
    /// By node, where something may be put: regions that are up, at nodes that are not drained.
    pub nodes: Arc<BTreeMap<NodeId, Held>>,
    /// Whether grants are open, whose slots may come back.
    pub has_grants: bool,
    /// Whether some of them are writers' grants: it needs room.
    pub is_written: bool,
}

impl Holdings {
    fn on(&self, node: NodeId) -> Held {
        self.nodes.get(&node).copied().unwrap_or_default()
    }

    /// Whether it gives `poor` what it has empty of `node`, now or when it has rested: not if it wants some itself, nor, while it is written,
    /// the eighth of room that it needs, unless `poor` has no more than it.
    #[must_use]
    pub fn gives(&self, node: NodeId, poor: &Self) -> bool {
        let (has, poor) = (self.on(node), poor.on(node));
        // Nothing empty stays where a place is missed, unless that is with who has more.
        let comes_first = poor.wanted.is_none() || has.extents < poor.extents;
        let needs_it = self.is_written && !has.keeps(poor.room_left()) && comes_first;
        has.has_loose(poor.least()) && (has.wanted.is_none() && !needs_it || has.extents >= poor.extents + RICHER)
    }

    /// Whether it can make an extent of `node` empty for `poor` by moving values, and has the room that it needs then.
    #[must_use]
    pub fn compacts(&self, node: NodeId, poor: &Self) -> bool {
        let (has, least) = (self.on(node), poor.on(node).least());
        !has.has_loose(least)
            && has.largest >= least
            && has.extents > 1
            && has.wanted.is_none()
            && has.keeps(poor.on(node).room_left())
    }

    /// Whether somebody found no place on `node`, or values would go there for room. Who is not written to needs no room.
    #[must_use]
    pub fn needs(&self, node: NodeId) -> bool {
        let has = self.on(node);
        has.wanted.is_some() || self.is_written && has.is_short()
    }

    fn asks(&self, node: NodeId) -> bool {
        let has = self.on(node);
        self.is_written && has.extents > 0 && has.asks()
    }
}

/// What one shard has of one node's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Held {
    /// Extents.
    pub extents: u32,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of the largest.
    pub largest: u64,
    /// Bytes of them that are free, or rest.
    pub room: u64,
    /// Extents that are wholly free, or will be once what rests is.
    pub loose: u32,
    /// Bytes of the largest of these.
    pub loose_largest: u64,
    /// Somebody found no place for a slot of so many bytes.
    pub wanted: Option<u64>,
}

impl Held {
    /// Whether it has so little room that it should have more.
    #[must_use]
    pub const fn asks(&self) -> bool {
        self.room * ASKS_BELOW < self.bytes
    }
    /// Whether it has so little room that values would go if it had no more.
    #[must_use]
    pub const fn is_short(&self) -> bool {
        self.room * SHORT_BELOW < self.bytes
    }
    /// Who gives it something keeps one part in so many of room: more than eviction makes, unless somebody found no place here. Else two shards
    /// that evict would give each other the room that they have just made.
    const fn room_left(&self) -> u64 {
        if self.wanted.is_some() { SHORT_BELOW } else { LEAVES_FOR_SHORT }
    }
    /// What an extent must have that is any use to it.
    #[must_use]
    pub const fn least(&self) -> u64 {
        match self.wanted {
            Some(bytes) => bytes,
            None => 1,
        }
    }
    /// Whether an extent is empty, or will be, that has at least so many bytes.
    const fn has_loose(&self, least: u64) -> bool {
        self.loose > 0 && self.loose_largest >= least
    }
    /// Bytes of one of its extents, on average.
    #[must_use]
    pub const fn extent(&self) -> u64 {
        match self.bytes.checked_div(self.extents as u64) {
            Some(bytes) => bytes,
            None => 0,
        }
    }
    /// Whether one part in `parts` of what is left would be room with one extent of room less.
    const fn keeps(&self, parts: u64) -> bool {
        let one = self.extent();
        self.extents > 0 && self.room >= one && (self.room - one) * parts >= self.bytes - one
    }
    /// Whether it has an empty extent, and room enough without it.
    #[must_use]
    pub const fn can_spare(&self) -> bool {
        self.wanted.is_none() && self.loose > 0 && self.keeps(ASKS_BELOW)
    }
    /// Whether it has so much more than somebody who found no place that values of it go for that.
    #[must_use]
    pub const fn is_richer(&self, poor: &Self) -> bool {
        let has_more =
            self.extents >= poor.extents + RICHER || self.extents > 0 && self.wanted.is_none() && poor.extents == 0;
        has_more && self.largest >= poor.least()
    }
}

/// What a shard is to do with a node's memory for the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Giving {
    /// Nothing.
    Keep,
    /// Give back an extent that is empty, or put one aside that will be.
    Loose {
        /// Of at least so many bytes, for somebody who found no place for a slot.
        least: u64,
        /// Though it may have come a moment ago: this shard has many, and somebody found no place.
        at_once: bool,
    },
    /// Make an extent empty by moving its values.
    Compacted {
        /// Values may go if moving them does not succeed: somebody found no place.
        or_emptied: bool,
    },
    /// Make an extent empty by evicting its values.
    Emptied,
}

/// What `own` is to do on `node` for the other shards. `unlent`: bytes of the largest extent of the node that is lent to nobody: whoever is served
/// by that need not be given anything.
#[must_use]
pub fn giving(own: &Holdings, all: &[Holdings], node: NodeId, unlent: Option<u64>) -> Giving {
    let has = own.on(node);
    if has.extents == 0 {
        return Giving::Keep;
    }
    let others: Vec<&Holdings> =
        all.iter().filter(|other| other.shard != own.shard && other.generation == own.generation).collect();
    let is_served = |poor: &Holdings| unlent.is_some_and(|largest| largest >= poor.on(node).least());
    let needy: Vec<&Holdings> = others.iter().copied().filter(|other| other.needs(node) && !is_served(other)).collect();
    let is_rich = |poor: &Holdings| has.extents >= poor.on(node).extents + RICHER;
    let given = || needy.iter().filter(|poor| own.gives(node, poor));
    if let Some(least) = given().map(|poor| poor.on(node).least()).max() {
        let at_once = needy.iter().any(|poor| poor.on(node).wanted.is_some() && is_rich(poor));
        return Giving::Loose { least, at_once };
    }
    if unlent.is_none() && has.can_spare() && others.iter().any(|other| other.asks(node)) {
        return Giving::Loose { least: 1, at_once: false };
    }
    // What others have empty, or are making empty, comes first.
    let gives = |rich: &&Holdings| needy.iter().any(|poor| poor.shard != rich.shard && rich.gives(node, poor));
    let coming: usize = others.iter().copied().filter(gives).map(|rich| rich.on(node).loose as usize).sum();
    let keeps_loose = needy.iter().any(|poor| has.has_loose(poor.on(node).least()));
    if keeps_loose || coming >= needy.len() {
        return Giving::Keep;
    }
    // Values go for somebody who found no place, not for more room.
    let goes = |poor: &&Holdings| poor.on(node).wanted.is_some() && has.is_richer(&poor.on(node));
    let compacts = |poor: &&Holdings| own.compacts(node, poor);
    match (needy.iter().any(compacts), needy.iter().any(goes)) {
        (true, or_emptied) => Giving::Compacted { or_emptied },
        (false, true) => Giving::Emptied,
        (false, false) => Giving::Keep,
    }
}

/// Memory that a shard will have on a node without a value going.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Coming {
    /// An extent of so many bytes that another shard makes empty by moving values, if that succeeds.
    Compacted(u64),
    /// An extent of so many bytes that is empty at another shard, or will be when it has rested, or is on its way from one to another.
    Loose(u64),
}

impl Coming {
    /// Bytes of the extent, if nothing need be done for it.
    #[must_use]
    pub const fn soon(self) -> Option<u64> {
        match self {
            Self::Loose(bytes) => Some(bytes),
            Self::Compacted(_) => None,
        }
    }
}

/// What the other shards give `own` on `node` as soon as it needs it; none if they have nothing there that they can give.
#[must_use]
pub fn coming(own: &Holdings, all: &[Holdings], node: NodeId) -> Option<Coming> {
    let others = || all.iter().filter(|other| other.shard != own.shard && other.generation == own.generation);
    let loose =
        others().filter(|other| other.gives(node, own)).map(|other| Coming::Loose(other.on(node).loose_largest));
    let compacted = others().filter(|other| other.compacts(node, own));
    loose.max().or_else(|| compacted.map(|other| Coming::Compacted(other.on(node).extent())).max())
}

/// Bytes of the largest slot that somebody found no place for on `node` at another shard, and that an extent of `own` would hold.
#[must_use]
pub fn wanted(own: &Holdings, all: &[Holdings], node: NodeId) -> u64 {
    let others = all.iter().filter(|other| other.shard != own.shard && other.generation == own.generation);
    others.filter_map(|other| other.on(node).wanted).filter(|bytes| *bytes <= own.on(node).largest).max().unwrap_or(0)
}

/// How many shards come before `own` when one is to evict what is in an extent of `node`: those that have more, or as much and a higher number,
/// and those that can move values instead. One of them may be unable to: then it is the next one's turn.
#[must_use]
pub fn turn(own: &Holdings, all: &[Holdings], node: NodeId) -> u32 {
    let rank = |it: &Holdings| (it.on(node).extents, it.shard);
    let needy = || all.iter().filter(|poor| poor.generation == own.generation && poor.needs(node));
    let compacts = |it: &Holdings| needy().any(|poor| poor.shard != it.shard && it.compacts(node, poor));
    let is_before = |it: &&Holdings| rank(it) > rank(own) || it.shard != own.shard && compacts(it);
    let before = all.iter().filter(|other| other.generation == own.generation).filter(is_before);
    u32::try_from(before.count()).unwrap_or(u32::MAX)
}

/// Extents of a node with `total` of them that each of `shards` shards is lent ahead of need. A lone shard is lent all at once: nobody else can
/// want them.
#[must_use]
pub const fn ahead(total: u32, shards: u32) -> u32 {
    match total.checked_div(AHEAD * shards) {
        Some(_) if shards == 1 => total,
        Some(each) => each,
        None => 0,
    }
}

/// What is lent to whom: by shard and node the number of extents, and the bytes of the largest. With the generation of that.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LentTo(BTreeMap<ShardId, BTreeMap<NodeId, (u32, u64)>>, Generation);

impl LentTo {
    /// Nodes with an extent that is lent to a shard and not seen by it yet, or given back by one and not taken back yet, and the bytes of the
    /// largest such. For a moment it is nobody's; then somebody has it, or it is lent to nobody: whoever lacks memory looks again.
    #[must_use]
    pub fn in_transit(&self, shards: &[Holdings]) -> BTreeMap<NodeId, u64> {
        let Self(lent, generation) = self;
        let mut coming: BTreeMap<NodeId, u64> = BTreeMap::new();
        for (shard, nodes) in lent {
            let seen = shards.iter().find(|it| it.shard == *shard && it.generation == *generation);
            for (node, (count, largest)) in nodes {
                if seen.map_or(0, |it| it.on(*node).extents) < *count {
                    let most = coming.entry(*node).or_default();
                    *most = (*largest).max(*most);
                }
            }
        }
        coming
    }
}

/// A shard as it stands for the next extent of a node.
struct Claim {
    shard: ShardId,
    /// What it has, what is on its way counted as had, and as room.
    held: Held,
    /// Extents that are lent to it and not seen by it yet, or given back by it and not taken back yet.
    in_transit: u32,
    /// Whether it is written to: else it needs no room.
    is_written: bool,
}

impl Claim {
    /// How urgent it is, most urgent first; none if the shard needs no more.
    fn rank(&self, ahead: u32) -> Option<(u8, u32, ShardId)> {
        let urgency = match self.held {
            Held { wanted: Some(_), .. } if self.in_transit == 0 => 0,
            Held { extents: 1.., .. } if self.is_written && self.held.is_short() => 1,
            Held { extents: 1.., .. } if self.is_written && self.held.asks() => 2,
            Held { extents, .. } if extents < ahead => 3,
            Held { .. } => return None,
        };
        Some((urgency, self.held.extents, self.shard))
    }
}

impl Directory {
    /// How many extents of each node are lent to each shard, of regions that are up at nodes that serve, and the bytes of the largest such.
    #[must_use]
    pub fn lent_to(&self) -> LentTo {
        let mut lent = LentTo::default();
        for (extent, shard, bytes) in self.extents_up() {
            if let Some(shard) = shard {
                let (count, largest) = lent.0.entry(shard).or_default().entry(extent.region.node).or_default();
                (*count, *largest) = (*count + 1, bytes.max(*largest));
            }
        }
        lent.1 = self.generation();
        lent
    }

    /// [`LentTo::in_transit`] as it is now.
    #[must_use]
    pub fn in_transit(&self, shards: &[Holdings]) -> BTreeMap<NodeId, u64> {
        self.lent_to().in_transit(shards)
    }

    /// The lendings that are needed now, at most `max`: one extent after the other to the shard that needs it most, of those that are lent to
    /// nobody. `shards`: what each shard has, as the replicas on this node show it.
    #[must_use]
    pub fn plan_lending(&self, shards: &[Holdings], max: usize) -> Vec<DirectoryCommand> {
        let mut nodes: BTreeMap<NodeId, Vec<(ExtentId, Option<ShardId>, u64)>> = BTreeMap::new();
        for (extent, shard, bytes) in self.extents_up() {
            nodes.entry(extent.region.node).or_default().push((extent, shard, bytes));
        }
        let mut commands = Vec::new();
        for (node, extents) in nodes {
            let ahead = ahead(u32::try_from(extents.len()).unwrap_or(u32::MAX), self.shards());
            let mut unlent: Vec<(ExtentId, u64)> = (extents.iter())
                .filter(|(_, shard, _)| shard.is_none())
                .map(|(extent, _, bytes)| (*extent, *bytes))
                .collect();
            let present = shards.iter().filter(|held| held.generation == self.generation());
            let mut claims: Vec<Claim> = present.map(|held| Claim::of(held, node, &extents)).collect();
            while commands.len() < max && !unlent.is_empty() {
                let ranked = claims.iter_mut().filter_map(|claim| Some((claim.rank(ahead)?, claim)));
                let Some((_, claim)) = ranked.min_by_key(|(rank, _)| *rank) else { break };
                let least = claim.held.wanted.filter(|_| claim.in_transit == 0).unwrap_or(0);
                // The smallest that is large enough: larger ones are for whoever finds no place for larger slots.
                let large = unlent.iter().enumerate().filter(|(_, (_, bytes))| *bytes >= least);
                let Some((at, _)) = large.min_by_key(|(at, (_, bytes))| (*bytes, *at)) else {
                    // No extent left is large enough for what it wants.
                    claim.held.wanted = None;
                    continue;
                };
                let (extent, bytes) = unlent.remove(at);
                claim.take(bytes);
                commands.push(DirectoryCommand::LendExtent { extent, shard: claim.shard });
            }
        }
        commands
    }
}

impl Claim {
    fn of(holdings: &Holdings, node: NodeId, extents: &[(ExtentId, Option<ShardId>, u64)]) -> Self {
        let Holdings { shard, is_written, .. } = *holdings;
        let mut claim = Self { shard, held: holdings.on(node), in_transit: 0, is_written };
        let lent = extents.iter().filter(|(_, shard, _)| *shard == Some(holdings.shard));
        let seen = usize::try_from(claim.held.extents).unwrap_or(usize::MAX);
        for (_, _, bytes) in lent.skip(seen) {
            claim.take(*bytes);
        }
        claim
    }
    const fn take(&mut self, bytes: u64) {
        self.held.extents += 1;
        self.held.bytes += bytes;
        self.held.room += bytes;
        self.in_transit += 1;
    }
}

/// Where the bytes of one region are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Account {
    /// All bytes of its extents.
    pub total: u64,
    /// Lent to nobody.
    pub unlent: u64,
    /// Lent to a shard that has not seen it yet, or given back by one and not taken back yet.
    pub in_transit: u64,
    /// Free in a shard.
    pub free: u64,
    /// Granted and not committed.
    pub granted: u64,
    /// Copies: committed, or kept for a pin.
    pub committed: u64,
    /// At rest.
    pub quarantined: u64,
}

/// Counts the bytes of every region over the directory and all shards, as they are at one moment.
///
/// # Errors
/// *Nothing leaks*: an extent that two have, or nobody; or a sum that is not the region's.
pub fn ledger(directory: &Directory, shards: &[&Shard]) -> Result<BTreeMap<RegionId, Account>, Violation> {
    let mut accounts: BTreeMap<RegionId, Account> = BTreeMap::new();
    for region in directory.regions() {
        accounts.insert(region.state.region, Account { total: region.state.bytes, ..Account::default() });
    }
    // What a shard of an older generation has is void.
    let present = || shards.iter().filter(|shard| shard.generation() == directory.generation());
    for (extent, lent_to, lend) in directory.extents() {
        let account = accounts.get_mut(&extent.region).expect("a directory's extents are of its regions");
        let bytes = extent_bytes(account.total);
        let leak = |what: String| Violation { invariant: Invariant::NothingLeaks, detail: format!("{extent}: {what}") };
        for shard in present() {
            if let Some(held) = shard.held(extent)
                && (Some(shard.id()), held) != (lent_to, lend)
            {
                return Err(leak(format!("held by {} under {held}, lent to {lent_to:?} under {lend}", shard.id())));
            }
        }
        let Some(to) = lent_to else {
            account.unlent += bytes;
            continue;
        };
        let Some(shard) = present().find(|shard| shard.id() == to) else {
            account.in_transit += bytes;
            continue;
        };
        let comes = shard.seen(extent).is_none_or(|seen| seen < lend);
        let goes = shard.returned().any(|given_back| given_back == (extent, lend));
        if comes || goes {
            account.in_transit += bytes;
        } else if shard.held(extent).is_none() {
            return Err(leak(format!("lent to {to} under {lend}, which saw that and has it no more")));
        }
    }
    for shard in present() {
        for (region, space) in shard.space().regions {
            // A region that the directory forgot is gone with its node; the shard will hear of it.
            let Some(account) = accounts.get_mut(&region) else { continue };
            account.free += space.free_bytes;
            account.granted += space.granted_bytes;
            account.committed += space.committed_bytes + space.pinned_bytes;
            account.quarantined += space.resting_bytes;
        }
    }
    for (region, account) in &accounts {
        let Account { total, unlent, in_transit, free, granted, committed, quarantined } = *account;
        let sum = unlent + in_transit + free + granted + committed + quarantined;
        Violation::unless(sum == total, Invariant::NothingLeaks, || {
            format!("{region}: {sum} of {total}: {account:?}")
        })?;
    }
    Ok(accounts)
}
