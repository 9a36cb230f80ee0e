//! Lending by need: which shard is lent which extent next, and which shard gives one back for it.
//!
//! Pure, and no part of apply: the directory's leader plans lendings, each shard's leader plans what its shard gives back, both from what
//! the replicas on their own node show ([`Shard::holdings`](crate::Shard::holdings)); apply validates every step. So nothing here needs a message of its own, and a
//! new leader goes on where the old one stopped.
//!
//! A shard **wants** an extent of a node when somebody found no place for a slot there (replicated, [`crate::shard::ShardCommand::Want`]), and **asks** for
//! one when less than a quarter of what it has there is free or about to be. Extents that nobody holds go to those who want first, then to
//! those who ask, then a few ahead of need. When none is left on a node, shards give back for those who want or ask: extents that they have
//! empty, as long as that does not make them ask themselves; and every shard that has two more than one that wants empties one by eviction, the one
//! that has most before the others ([`turn`]). Between two shards that have equally much nothing goes to and fro.
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
use std::collections::BTreeMap;

/// A shard asks for more of a node when less than one part in so many of what it has there is free or about to be.
const ASKS_BELOW: u64 = 4;
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
    pub nodes: BTreeMap<NodeId, Held>,
    /// Whether grants are open, whose slots may come back.
    pub has_grants: bool,
}

/// What one shard has of one node's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Held {
    /// Extents.
    pub extents: u32,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of them that are free, or rest.
    pub room: u64,
    /// Extents that are wholly free, or will be once what rests is.
    pub loose: u32,
    /// Somebody found no place for a slot of so many bytes.
    pub wanted: Option<u64>,
}

impl Held {
    /// Whether it has so little room that it should have more.
    #[must_use]
    pub const fn asks(&self) -> bool {
        self.room * ASKS_BELOW < self.bytes
    }
    /// Whether it would have room enough with one extent of those less.
    #[must_use]
    pub const fn can_spare(&self) -> bool {
        let Some(one) = self.bytes.checked_div(self.extents as u64) else { return false };
        self.wanted.is_none() && self.loose > 0 && self.room.saturating_sub(one) * ASKS_BELOW >= self.bytes - one
    }
    /// Whether it has so much more than somebody who found no place that values of it go for that.
    #[must_use]
    pub const fn is_richer(&self, poor: &Self) -> bool {
        self.extents >= poor.extents + RICHER || self.extents > 0 && self.wanted.is_none() && poor.extents == 0
    }
}

/// What a shard is to do with a node's memory for the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Giving {
    /// Nothing.
    Keep,
    /// Give back an extent that is empty.
    Loose,
    /// Give back an extent, an empty one if there is one; else empty one first.
    Emptied,
}

/// What `own` is to do on `node` for the other shards. `unlent`: whether an extent of the node is lent to nobody, so that nothing need be
/// given.
#[must_use]
pub fn giving(own: &Holdings, all: &[Holdings], node: NodeId, unlent: bool) -> Giving {
    let on = |shard: &Holdings| shard.nodes.get(&node).copied().unwrap_or_default();
    let others = || all.iter().filter(|other| other.shard != own.shard && other.generation == own.generation);
    let has = on(own);
    if unlent || has.extents == 0 {
        return Giving::Keep;
    }
    // Values go for somebody who found no place, not for somebody who would like more room.
    let needy = || others().map(on).filter(|poor| poor.wanted.is_some());
    let is_rich = |held: &Held| needy().any(|poor| held.is_richer(&poor));
    if has.loose == 0 && is_rich(&has) {
        // What others of the rich have emptied comes first.
        let coming: usize = others().map(on).filter(is_rich).map(|rich| rich.loose as usize).sum();
        return if coming < needy().count() { Giving::Emptied } else { Giving::Keep };
    }
    // An only extent that is empty is given too, but its shard may use it first.
    if needy().any(|poor| has.extents >= poor.extents + RICHER) {
        return Giving::Emptied;
    }
    let is_needy = |held: Held| held.wanted.is_some() || held.extents > 0 && held.asks();
    if has.can_spare() && others().map(on).any(is_needy) { Giving::Loose } else { Giving::Keep }
}

/// How many shards that have more of `node` than `own`, or as much and a higher number, are asked before it to empty an extent. One of them
/// may be unable to: then it is the next one's turn.
#[must_use]
pub fn turn(own: &Holdings, all: &[Holdings], node: NodeId) -> u32 {
    let rank = |it: &Holdings| (it.nodes.get(&node).map_or(0, |held| held.extents), it.shard);
    let before = all.iter().filter(|other| other.generation == own.generation && rank(other) > rank(own));
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

/// A shard as it stands for the next extent of a node.
struct Claim {
    shard: ShardId,
    /// What it has, what is on its way counted as had, and as room.
    held: Held,
    /// Extents that are lent to it and not seen by it yet, or given back by it and not taken back yet.
    in_transit: u32,
}

impl Claim {
    /// How urgent it is, most urgent first; none if the shard needs no more.
    fn rank(&self, ahead: u32) -> Option<(u8, u32, ShardId)> {
        let urgency = match self.held {
            Held { wanted: Some(_), .. } if self.in_transit == 0 => 0,
            Held { extents: 1.., .. } if self.held.asks() => 1,
            Held { extents, .. } if extents < ahead => 2,
            Held { .. } => return None,
        };
        Some((urgency, self.held.extents, self.shard))
    }
}

impl Directory {
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
                let Some(at) = unlent.iter().position(|(_, bytes)| *bytes >= least) else {
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
        let mut claim =
            Self { shard: holdings.shard, held: holdings.nodes.get(&node).copied().unwrap_or_default(), in_transit: 0 };
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
