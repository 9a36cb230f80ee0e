//! Extents: which shard each piece of memory is lent to.
//! A lending ends only when its shard gives the extent back under that lending's number, so at most one shard holds it (*Nothing leaks*).
//! What is lent when is planned in [`crate::lending`].

use super::{Directory, feed::Topic, nodes::Standing};
use quarry_wire::{
    ids::{ExtentId, ExtentIndex, FeedNumber, LendNumber, NodeId, RegionId, ShardId},
    limits::extent_bytes,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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

    /// The extents of regions that are up, at nodes that serve, with their bytes and the shard that each is lent to.
    pub(crate) fn extents_up(&self) -> impl Iterator<Item = (ExtentId, Option<ShardId>, u64)> {
        let mut region = None;
        self.extents.iter().filter_map(move |(extent, lending)| {
            if region.is_none_or(|(known, _, _)| known != extent.region) {
                let state = self.regions.get(&extent.region)?.state;
                let serves = self.nodes.get(&extent.region.node).is_none_or(|node| node.standing == Standing::Serving);
                region = Some((extent.region, state.up && serves, extent_bytes(state.bytes)));
            }
            region.filter(|(_, up, _)| *up).map(|(_, _, bytes)| (*extent, lending.shard, bytes))
        })
    }

    /// Nodes with an extent that can be lent and is lent to nobody, and the bytes of the largest such.
    #[must_use]
    pub fn unlent(&self) -> BTreeMap<NodeId, u64> {
        let mut unlent = BTreeMap::new();
        for (extent, _, bytes) in self.extents_up().filter(|(_, shard, _)| shard.is_none()) {
            let largest = unlent.entry(extent.region.node).or_insert(bytes);
            *largest = bytes.max(*largest);
        }
        unlent
    }

    /// Bytes of `region` that are lent to nobody.
    #[must_use]
    pub fn unlent_bytes(&self, region: RegionId) -> u64 {
        let whole = ExtentId { region, index: ExtentIndex(0) }..=ExtentId { region, index: ExtentIndex(u32::MAX) };
        let unlent = self.extents.range(whole).filter(|(_, lending)| lending.shard.is_none()).count() as u64;
        self.regions.get(&region).map_or(0, |held| unlent * extent_bytes(held.state.bytes))
    }
}
