//! Extents: which shard each piece of memory is lent to.
//! A lending ends only when its shard gives the extent back under that lending's number, so at most one shard holds it (*Nothing leaks*).

use super::{Directory, DirectoryCommand, feed::Topic};
use quarry_wire::ids::{ExtentId, FeedNumber, LendNumber, ShardId};
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Lending {
    /// Number of the present lending, or of the last one; 0 of generation 0 before the first.
    pub(super) lend: LendNumber,
    /// Who holds it.
    pub(super) shard: Option<ShardId>,
    pub(super) changed: FeedNumber,
}

/// Why an extent was not lent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum LendRefusal {
    /// No registered region has such an extent.
    #[error("{extent} does not exist")]
    UnknownExtent {
        /// The extent named.
        extent: ExtentId,
    },
    /// The region is not up.
    #[error("the region of {extent} is not up")]
    RegionDown {
        /// The extent.
        extent: ExtentId,
    },
    /// There is no such shard.
    #[error("there are shards 1 to {shards}, not {found}")]
    UnknownShard {
        /// How many there are.
        shards: u32,
        /// The shard named.
        found: ShardId,
    },
    /// It is lent already.
    #[error("{extent} is already lent to {shard} under {lend}")]
    AlreadyLent {
        /// The extent.
        extent: ExtentId,
        /// To whom.
        shard: ShardId,
        /// Under which number.
        lend: LendNumber,
    },
}

/// Why an extent was not taken back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum ReturnRefusal {
    /// No registered region has such an extent.
    #[error("{extent} does not exist")]
    UnknownExtent {
        /// The extent named.
        extent: ExtentId,
    },
    /// It is not lent under that number, to that shard: an old message, or taken back already.
    #[error("{extent} is not lent to {shard} under {found}, its last lending is {lend}")]
    NotLent {
        /// The extent.
        extent: ExtentId,
        /// The shard that gives it back.
        shard: ShardId,
        /// Number of the last lending.
        lend: LendNumber,
        /// Number named.
        found: LendNumber,
    },
}

impl Directory {
    pub(super) fn lend(&mut self, extent: ExtentId, shard: ShardId) -> Result<LendNumber, LendRefusal> {
        let lending = *self.extents.get(&extent).ok_or(LendRefusal::UnknownExtent { extent })?;
        let shards = self.shards();
        if shard.0 == 0 || shard.0 > shards {
            return Err(LendRefusal::UnknownShard { shards, found: shard });
        }
        if let Some(shard) = lending.shard {
            return Err(LendRefusal::AlreadyLent { extent, shard, lend: lending.lend });
        }
        if !self.regions.get(&extent.region).is_some_and(|held| held.state.up) {
            return Err(LendRefusal::RegionDown { extent });
        }
        let lend = LendNumber::new(self.generation(), lending.lend.0.number + 1);
        assert!(lend > lending.lend, "a lend number only grows");
        let changed = self.touch(Topic::Extent(extent), Some(lending.changed));
        self.extents.insert(extent, Lending { lend, shard: Some(shard), changed });
        Ok(lend)
    }

    pub(super) fn take_back(
        &mut self,
        extent: ExtentId,
        shard: ShardId,
        found: LendNumber,
    ) -> Result<(), ReturnRefusal> {
        let lending = *self.extents.get(&extent).ok_or(ReturnRefusal::UnknownExtent { extent })?;
        if lending.shard != Some(shard) || lending.lend != found {
            return Err(ReturnRefusal::NotLent { extent, shard, lend: lending.lend, found });
        }
        let changed = self.touch(Topic::Extent(extent), Some(lending.changed));
        self.extents.insert(extent, Lending { shard: None, changed, ..lending });
        Ok(())
    }

    /// To whom `extent` is lent, and under which number.
    #[must_use]
    pub fn lent(&self, extent: ExtentId) -> Option<(ShardId, LendNumber)> {
        self.extents.get(&extent).and_then(|lending| Some((lending.shard?, lending.lend)))
    }

    /// All extents with the shard that holds each, by region and index.
    pub fn extents(&self) -> impl Iterator<Item = (ExtentId, Option<ShardId>, LendNumber)> {
        self.extents.iter().map(|(extent, lending)| (*extent, lending.shard, lending.lend))
    }

    /// Lends every extent that is lent to nobody and whose region is up, spread over the shards in turn. At most `max` commands.
    ///
    /// Reserve extents (one per node, lent for one move at a time) will be left out here.
    #[must_use]
    pub fn plan_lending(&self, max: usize) -> Vec<DirectoryCommand> {
        let shards = self.shards();
        if shards == 0 {
            return Vec::new();
        }
        let up = |extent: &ExtentId| self.regions.get(&extent.region).is_some_and(|held| held.state.up);
        self.extents
            .iter()
            .filter(|(extent, lending)| lending.shard.is_none() && up(extent))
            .take(max)
            .map(|(extent, _)| {
                // The node is added so that one region with fewer extents than shards does not leave the same shards empty on every node.
                let turn = u64::from(extent.index.0)
                    + u64::from(extent.region.index.0)
                    + extent.region.node.0 % u64::from(shards);
                let shard = u32::try_from(turn % u64::from(shards)).expect("a remainder of a u32 fits in a u32");
                DirectoryCommand::LendExtent { extent: *extent, shard: ShardId(1 + shard) }
            })
            .collect()
    }
}
